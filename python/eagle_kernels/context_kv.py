"""ContextKV: the K and V that DFlash and DSpark drafters compute from the target's captured states and cache.

    f    = fc(cat_k aux_norm_k(a_k))                                  [N, H], `combine`
    kv_l = (hidden_norm(f)) [W_k,l | W_v,l]^T + bias, or of layer_norm_l(hidden_norm(f))     [N, L * W], `project`
    rope(k_norm_l(k_l)) and v_l, to the slots of layer l's cache      `store`

`combine` is one `norm_concat_linear`, `project` is another one for all layers (or one per layer, where each has its own
norm), and `store` is one kernel per layer. In the engines: SGLang 0.5.23 `models/dflash.py` with
`fused_kv_materialize`, vLLM 0.33 `combine_hidden_states` and `precompute_and_store_context_kv`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import checks
from .dispatch import is_plain
from .drafter_config import check_config, check_engine, flag_field, get_field, int_field, needed_int_field, number_field
from .layers import gain_of, project_onto, unit_norm, weight_and_bias, weights_of
from .ops.norm_concat import concatenate
from .ops.norm_concat_linear import project
from .ops.projection import Projection
from .ops.sources import Sources
from .ops.store_context_kv import MAX_HEAD_DIM, StoreContextKV, store_context_kv
from .quantized_linear import DenseLinear, LoadsProjections, QuantizedLinear, load_projections, quantize_linear

OP = "ContextKV"
# The fields that say whether RoPE rotates halves, in the order in which SGLang looks for them.
NEOX_STYLE = ("rope_is_neox_style", "is_neox_style")
_K_NORMS, _VALUES = ("weight", "unit", "none"), ("own", "k", "none")


@dataclass(frozen=True)
class ContextKVConfig:
    """The context stage of a DFlash, DFlash2 or DSpark drafter.

    Args:
        num_chunks, target_hidden_size: K captured states of width Ht.
        hidden_size: H, the drafter's.
        num_layers, num_kv_heads, head_dim: L draft layers with n heads of K (on this rank) of d columns.
        eps, norm_offset: of all norms; the gain is norm_offset + weight (use_gemma_norm: 1).
        bias: of the K and V projections.
        chunk_norm: an aux_norm in front of fc for each captured state (Laguna).
        layer_norm: each layer has its own norm between hidden_norm and its projection (Laguna's input_layernorm,
            Muse-Spark's pre_qkv_proj_norm).
        k_norm: "weight", "unit" (a norm without a gain: Muse-Spark) or "none".
        values: "own", "k" (V is K's projection after a norm without a gain: Gemma 4's k_eq_v) or "none" (latent
            attention caches K alone: Kimi K3, DeepSeek-V4).
        norm_width: k_norm covers the first norm_width columns of a head; None: all d. Kimi K3's kv_a_layernorm covers
            512 of 576.
        rotary_dim, rotary_begin, interleaved: columns [rotary_begin, rotary_begin + rotary_dim) of a head rotate, in
            halves (NeoX) or interleaved pairs; rotary_dim None: all columns from rotary_begin on.
        capture_after_engram: whether a layer's state is captured after its Engram injection (DeepSeek-V4.1), as SGLang
            does, or before it, as vLLM does; a drafter needs the one that it was trained on.
    """

    num_chunks: int
    target_hidden_size: int
    hidden_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    eps: float = 1e-6
    norm_offset: float = 0.0
    bias: bool = False
    chunk_norm: bool = False
    layer_norm: bool = False
    k_norm: str = "weight"
    values: str = "own"
    norm_width: int = None  # type: ignore[assignment]  # an int from __post_init__ on, like rotary_dim
    rotary_dim: int = None  # type: ignore[assignment]
    rotary_begin: int = 0
    interleaved: bool = False
    capture_after_engram: bool = False

    def __post_init__(self) -> None:
        op = "ContextKVConfig"
        checks.check_sizes(
            op, self, "num_chunks", "target_hidden_size", "hidden_size", "num_layers", "num_kv_heads", "head_dim"
        )
        checks.check_width(op, self.num_chunks, self.target_hidden_size)
        checks.check_width(op, 1, self.hidden_size)
        checks.check_width(op, self.num_layers, self.kv_width)
        for name in ("bias", "chunk_norm", "layer_norm", "interleaved", "capture_after_engram"):
            checks.check_bool(op, name, getattr(self, name))
        for name in ("norm_offset", "eps"):  # floats, as the ops' records take them
            object.__setattr__(self, name, checks.check_number(op, name, getattr(self, name)))
        checks.check_eps(op, "eps", self.eps)
        checks.check_finite(op, "norm_offset", self.norm_offset)
        for name, words in (("k_norm", _K_NORMS), ("values", _VALUES)):
            if (word := getattr(self, name)) not in words:
                raise checks.error(ValueError, op, f"{name} is {word!r}", " or ".join(map(repr, words)))
        if self.head_dim > MAX_HEAD_DIM:
            raise checks.error(ValueError, op, f"head_dim is {self.head_dim}", f"at most {MAX_HEAD_DIM}")
        object.__setattr__(self, "rotary_begin", checks.check_int(op, "rotary_begin", self.rotary_begin, at_least=0))
        if self.norm_width is None:
            object.__setattr__(self, "norm_width", self.head_dim)
        if self.rotary_dim is None:
            object.__setattr__(self, "rotary_dim", self.head_dim - self.rotary_begin)
        for name in ("norm_width", "rotary_dim"):
            object.__setattr__(self, name, checks.check_int(op, name, getattr(self, name)))
        if not 0 < self.norm_width <= self.head_dim:
            raise checks.error(ValueError, op, f"norm_width is {self.norm_width}", f"1 to head_dim = {self.head_dim}")
        if self.rotary_dim < 0 or self.rotary_dim % 2 or self.rotary_begin + self.rotary_dim > self.head_dim:
            got = f"rotary_begin is {self.rotary_begin} and rotary_dim {self.rotary_dim}"
            raise checks.error(ValueError, op, got, f"an even number of columns within head_dim = {self.head_dim}")

    @property
    def kv_width(self) -> int:
        """W, the columns of one layer's projection."""
        return self.num_kv_heads * self.head_dim * (2 if self.values == "own" else 1)

    @classmethod
    def from_hf(cls, config: object, *, target_hidden_size: int, engine: str = "sglang") -> ContextKVConfig:
        """The context stage of a drafter's Hugging Face config, by its `architectures`.

        Args:
            config: the drafter's config, object or dict; target_layer_ids at its top level or in `dflash_config`, or
                one of speculators' or MiniMax-M3.1's, which have sections. For the DSpark stages in DeepSeek-V4's
                checkpoints it is the target's config.
            target_hidden_size: Ht.
            engine: "sglang", "vllm" or "transformers": the one that a V4.1 drafter was made for, which sets
                capture_after_engram (True for "sglang").

        Raises:
            ValueError: an architecture that is not supported (the message says why), a size that is missing.
        """
        check_engine(_FROM_HF, engine)
        check_config(_FROM_HF, "config", config)
        config = plain_config(config)
        stated = get_field(config, "architectures") or ()
        architectures = checks.check_sequence(_FROM_HF, "architectures", stated, "a list of names")
        name = next((name for name in architectures if isinstance(name, str) and name in VARIANTS), None)
        if name is None:
            got, because = f"architectures is {architectures}", "the norms and the form of K depend on it"
            raise checks.error(ValueError, _FROM_HF, got, f"one of {sorted(VARIANTS)}", because)
        return cls(
            num_chunks=_num_chunks(config),
            target_hidden_size=target_hidden_size,
            hidden_size=_size(config, "hidden_size"),
            eps=number_field(_FROM_HF, "rms_norm_eps", config, default=1e-6),
            capture_after_engram=engine == "sglang" and _is_v41(name, config),
            **VARIANTS[name](config),
        )


_FROM_HF = "ContextKVConfig.from_hf"


# The architecture that vLLM gives each kind of speculators' drafters.
SPECULATORS = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel", "dspark": "Qwen3DSparkModel"}
_OF_DSPARK = ("Qwen3DSparkModel", "Qwen3OmniDSparkModel")  # which a config of speculators may name itself


def plain_config(config: object) -> object:
    """The config that an engine makes of one with the drafter's fields in sections; any other as it is.

    Source: vLLM 0.33 `configs/speculators/algos.py`, for which aux_hidden_state_layer_ids are boundaries; SGLang 0.5.23
    `configure_minimax_m3_dspark`.
    """
    names = get_field(config, "architectures")
    if (kind := get_field(config, "speculators_model_type")) is not None:
        if not isinstance(kind, str) or kind not in SPECULATORS:
            got, expected = f"speculators_model_type is {kind!r}", " or ".join(map(repr, SPECULATORS))
            raise checks.error(ValueError, _FROM_HF, got, expected)
        return _of_speculators(config, kind, names)
    is_minimax = isinstance(names, list) and names[:1] == ["DSparkMiniMaxDraftModel"]
    return _of_minimax_m3(config) if is_minimax else config


def _of_speculators(config: object, kind: str, names: object) -> dict[str, Any]:
    plain = _section(config, "transformer_layer_config")
    if plain is None:
        raise checks.error(ValueError, _FROM_HF, "transformer_layer_config is missing", "the drafter's layers")
    ids = get_field(config, name := "aux_hidden_state_layer_ids")
    if ids is None:
        raise checks.error(ValueError, _FROM_HF, f"{name} is missing", "the captured boundaries")
    boundaries = checks.check_sequence(_FROM_HF, name, ids, "a list of layers")
    boundaries = [checks.check_int(_FROM_HF, f"{name}[{k}]", each) for k, each in enumerate(boundaries)]
    layers = {"target_layer_ids": [boundary - 1 for boundary in boundaries]}
    own = [each for each in names if each in _OF_DSPARK] if kind == "dspark" and isinstance(names, list) else []
    plain |= layers if kind == "dspark" else {"dflash_config": layers}
    plain |= {"architectures": own or [SPECULATORS[kind]], "eagle_aux_hidden_state_layer_ids": boundaries}
    stated = {name: get_field(config, name) for name in ("draft_vocab_size", "target_hidden_size")}
    return plain | {name: value for name, value in stated.items() if value is not None}


def _of_minimax_m3(config: object) -> object:
    """M3.1's, whose text_config has the target's number of layers and in dflash_config the drafter's."""
    text = _section(config, "text_config")
    nested = get_field(config if text is None else text, "dflash_config")
    own = int_field(_FROM_HF, "num_hidden_layers", nested)
    if text is None and own is None:
        return config
    plain = _fields(config) if text is None else text | {"architectures": get_field(config, "architectures")}
    return plain if own is None else plain | {"num_hidden_layers": own}


def _section(config: object, name: str) -> dict[str, Any] | None:
    section = get_field(config, name)
    if section is None:
        return None
    check_config(_FROM_HF, name, section)
    return _fields(section)


def _fields(config: object) -> dict[str, Any]:
    return dict(config) if isinstance(config, Mapping) else dict(vars(config))


def _num_chunks(config: object) -> int:
    """The number of captured layers; where the config lists none, the drafter's number of layers."""
    nested = get_field(config, "dflash_config")
    for place in (config, nested):
        for name in ("target_layer_ids", "dspark_target_layer_ids"):
            if place is not None and (layer_ids := get_field(place, name)):
                return len(checks.check_sequence(_FROM_HF, name, layer_ids, "a list of layers"))
    return _size(config, "num_hidden_layers")


def _size(config: object, name: str) -> int:
    return needed_int_field(_FROM_HF, name, config)


def _dense(config: object) -> dict[str, Any]:
    nested = get_field(config, "dflash_config")
    if nested is not None and get_field(nested, "attention_value_scale") is not None:
        got, because = "attention_value_scale is given", "V is cached as it is projected; scale its rows of kv_proj"
        raise checks.error(ValueError, _FROM_HF, got, "none", because)
    width, heads = (int_field(_FROM_HF, name, config) for name in ("hidden_size", "num_attention_heads"))
    head = int_field(_FROM_HF, "head_dim", config)
    if head is None:
        head = width // heads if width and heads else _size(config, "head_dim")
    return {
        "num_layers": _size(config, "num_hidden_layers"),
        "num_kv_heads": _size(config, "num_key_value_heads"),
        "head_dim": head,
        "rotary_dim": _rotary_dim(config, _rope_parameters(config), head),
        "bias": flag_field(_FROM_HF, "attention_bias", config),
    }


def _rotary_dim(config: object, rope: object, head: int) -> int:
    """The columns of a head that a table of these rope_parameters rotates.

    Source: SGLang 0.5.23 `dflash` and vLLM 0.33 `get_rope`, for which rope_dim supersedes partial_rotary_factor;
    transformers 5.24 `standardize_rope_params`, for which a factor in rope_parameters supersedes the config's own.
    """
    stated = int_field(_FROM_HF, "rope_dim", rope)
    if stated is not None:
        return stated
    factor = number_field(_FROM_HF, "partial_rotary_factor", rope, config, default=1.0)
    if not 0 <= factor <= 1:
        raise checks.error(ValueError, _FROM_HF, f"partial_rotary_factor is {factor}", "one in [0, 1]")
    return int(head * factor)


def _rope_parameters(config: object, layer_type: str = "full_attention") -> object:
    """The rope_parameters of a drafter's layers of one type; None where the config has none."""
    rope = get_field(config, "rope_parameters") or get_field(config, "rope_scaling")
    if isinstance(rope, Mapping) and any(isinstance(value, Mapping) for value in rope.values()):
        return rope.get(layer_type) or rope.get("full_attention")
    return rope


def _qwen3(config: object) -> dict[str, Any]:
    """A checkpoint says how its keys were trained to rotate, and what its gains are added to.

    Source: SGLang 0.5.23 `DFlashAttention`, `DFlashDraftModel`; vLLM 0.33 `qwen3_dflash` reads is_neox_style alone.
    """
    return _dense(config) | {"interleaved": not is_neox_style(config), "norm_offset": _gemma_offset(config)}


def _gemma_offset(config: object) -> float:
    return 1.0 if flag_field(_FROM_HF, "use_gemma_norm", config) else 0.0


def is_neox_style(config: object, *names: str) -> bool:
    """Whether RoPE rotates halves: the first of these fields that the config has; without names those of SGLang."""
    name = next((name for name in names or NEOX_STYLE if get_field(config, name) is not None), None)
    return True if name is None else flag_field(_FROM_HF, name, config)


def _laguna(config: object) -> dict[str, Any]:
    """Layers of one type may have RoPE of their own.

    Source: vLLM 0.33 `LagunaAttention`, where swa_rope_parameters come first for layers of sliding attention.
    """
    variant = _qwen3(config)
    if variant["norm_offset"]:
        because = "SGLang adds 1 to every gain but the aux_norms'"
        raise checks.error(ValueError, _FROM_HF, "use_gemma_norm is True", "False", because)
    stated = get_field(config, "layer_types") or ("full_attention",)
    of_windows = get_field(config, "swa_rope_parameters")
    widths = {}
    for layer, name in enumerate(checks.check_sequence(_FROM_HF, "layer_types", stated, "a list of names")):
        checks.check_type(_FROM_HF, f"layer_types[{layer}]", name, str, "a name")
        is_own = name == "sliding_attention" and of_windows is not None
        rope = of_windows if is_own else _rope_parameters(config, name)
        widths[name] = _rotary_dim(config, rope, variant["head_dim"])
    if len(set(widths.values())) > 1:
        got = f"rotary_dim is {', '.join(f'{width} for {name}' for name, width in widths.items())}"
        raise checks.error(ValueError, _FROM_HF, got, "one", "a stage has one table of cos and sin")
    return variant | {"rotary_dim": next(iter(widths.values())), "chunk_norm": True, "layer_norm": True}


def _muse_spark(config: object) -> dict[str, Any]:
    """Each layer has its own norm after hidden_norm, K's norm has no gain, and RoPE rotates pairs."""
    for name, got, wanted, because in (
        ("norm_affine", get_field(config, "norm_affine"), True, "a norm without a gain has no weights to load"),
        ("use_rope", get_field(config, "use_rope"), True, "K rotates"),
        ("draft_position_mode", get_field(config, "draft_position_mode"), "rope", "K rotates"),
    ):
        if got not in (None, wanted):
            raise checks.error(ValueError, _FROM_HF, f"{name} is {got!r}", repr(wanted), because)
    offset = 1.0 if flag_field(_FROM_HF, "norm_zero_centered_gamma", config) else 0.0
    return _dense(config) | {"layer_norm": True, "k_norm": "unit", "interleaved": True, "norm_offset": offset}


def _minimax_m3(config: object) -> dict[str, Any]:
    rotary = int_field(_FROM_HF, "rotary_dim", config, at_least=0)
    return _dense(config) | {"norm_offset": _gemma_offset(config)} | ({} if rotary is None else {"rotary_dim": rotary})


def _gemma4(config: object) -> dict[str, Any]:
    """Layers of full attention, whose proportional RoPE has a table as wide as the head: partial_rotary_factor leaves
    angles in it that are 0.

    Source: vLLM 0.33 `gemma4_dspark`, `Gemma4RotaryEmbedding`; it is the default of transformers 5.24.
    """
    if not flag_field(_FROM_HF, "attention_k_eq_v", config):
        because = "a V of its own is normed too, which no kernel does"
        raise checks.error(ValueError, _FROM_HF, "attention_k_eq_v is not set", "True", because)
    globals_ = {"num_kv_heads": "num_global_key_value_heads", "head_dim": "global_head_dim"}
    found = {field: int_field(_FROM_HF, name, config) for field, name in globals_.items()}
    variant = _dense(config) | {field: value for field, value in found.items() if value is not None}
    head, rope = variant["head_dim"], _rope_parameters(config)
    is_proportional = rope is None or get_field(rope, "rope_type") == "proportional"
    return variant | {"values": "k", "rotary_dim": head if is_proportional else _rotary_dim(config, rope, head)}


def _kimi_k3(config: object) -> dict[str, Any]:
    """One latent head: kv_lora_rank normed columns, then those that rotate."""
    rank, rotary = _size(config, "kv_lora_rank"), _size(config, "qk_rope_head_dim")
    latent = {"num_kv_heads": 1, "head_dim": rank + rotary, "norm_width": rank, "rotary_begin": rank}
    return latent | {"num_layers": _size(config, "num_hidden_layers"), "values": "none", "interleaved": True}


def _deepseek_v4(config: object) -> dict[str, Any]:
    """One normed head, whose last columns rotate, for each DSpark stage in the checkpoint."""
    head, rotary = _size(config, "head_dim"), _size(config, "qk_rope_head_dim")
    stages = int_field(_FROM_HF, "n_mtp_layers", config) or 3
    stage = {"num_layers": stages, "num_kv_heads": 1, "head_dim": head, "rotary_begin": head - rotary}
    return stage | {"values": "none", "interleaved": True}


def _is_v41(name: str, config: object) -> bool:
    """SGLang has one class for V4 and V4.1, and distinguishes them by model type."""
    return name == "DSparkV41DraftModel" or get_field(config, "model_type") == "deepseek_v41"


def _stages_of_target(config: object) -> dict[str, Any]:
    """The config of a checkpoint that has DSpark stages beside the target's own layers."""
    if get_field(config, "dspark_target_layer_ids") is None:
        got, expected = "dspark_target_layer_ids is missing", "the captured layers of its DSpark stages"
        raise checks.error(ValueError, _FROM_HF, got, expected)
    return _deepseek_v4(config)


def _dspark(config: object) -> dict[str, Any]:
    """DSparkDraftModel is vLLM's name for DeepSeek-V4's stages, and SGLang's for a dense drafter."""
    return _qwen3(config) if get_field(config, "dspark_target_layer_ids") is None else _deepseek_v4(config)


_QWEN3 = """
    DFlashDraftModel DFlash2DraftModel DFlash2BeamDraftModel MiniMaxDFlash2DraftModel MuseGlimmerAssistantModel
    DFlashMuseGlimmerAssistantModel Qwen3DSparkModel Qwen3OmniDSparkModel LingDSparkModel Lfm2DSparkDraftModel
    LiLiCorrDraftModel Qwen3XPressModel DFlashQwen3XPressModel
"""
VARIANTS = {
    **dict.fromkeys(_QWEN3.split(), _qwen3),
    "DFlashLagunaForCausalLM": _laguna,
    "Gemma4DSparkModel": _gemma4,
    "MuseSparkDSparkModel": _muse_spark,
    "K3DSparkModel": _kimi_k3,
    "DSparkMiniMaxDraftModel": _minimax_m3,
    "DSparkDraftModel": _dspark,
    "DSparkV41DraftModel": _deepseek_v4,
    "DeepseekV4ForCausalLMDSpark": _deepseek_v4,
    "DeepseekV4ForCausalLM": _stages_of_target,
    "DeepseekV41ForCausalLM": _stages_of_target,
}


class ContextKV(LoadsProjections):
    """fc, hidden_norm and the K and V of all draft layers, written to their cache slots.

    Args:
        config: `ContextKVConfig`.
        dtype, device: of the parameters.

    state_dict: fc.weight [H, K*Ht], aux_norm.{k}.weight [Ht] (chunk_norm), hidden_norm.weight [H],
    layer_norm.{l}.weight [H] (layer_norm), kv_proj.weight [L*W, H] (and bias) with the layers in order, each K before
    V, k_norm.{l}.weight (k_norm "weight"). Parameters do not require grad: the layer is inference only.
    """

    def __init__(
        self, config: ContextKVConfig, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        checks.check_type(OP, "config", config, ContextKVConfig, "a ContextKVConfig: ContextKVConfig.from_hf makes one")
        checks.check_factory(OP, dtype, device)
        self.config = config
        factory: dict[str, Any] = {"dtype": dtype, "device": device}
        H, L = config.hidden_size, config.num_layers

        def norms(count: int, width: int) -> nn.ModuleList:
            return nn.ModuleList([unit_norm(width, config.eps, config.norm_offset, **factory) for _ in range(count)])

        self.aux_norm = norms(config.num_chunks if config.chunk_norm else 0, config.target_hidden_size)
        self.fc: DenseLinear | QuantizedLinear = self._dense_fc(**factory)
        self.hidden_norm = unit_norm(H, config.eps, config.norm_offset, **factory)
        self.layer_norm = norms(L if config.layer_norm else 0, H)
        self.kv_proj: DenseLinear | QuantizedLinear = self._dense_kv_proj(**factory)
        self.k_norm = norms(L if config.k_norm == "weight" else 0, config.norm_width)

    def _dense_fc(self, **factory: Any) -> DenseLinear:
        width = self.config.num_chunks * self.config.target_hidden_size
        return DenseLinear(width, self.config.hidden_size, bias=False, **factory).requires_grad_(False)

    def _dense_kv_proj(self, **factory: Any) -> DenseLinear:
        config = self.config
        columns = config.num_layers * config.kv_width
        return DenseLinear(config.hidden_size, columns, bias=config.bias, **factory).requires_grad_(False)

    def load_checkpoint(
        self, weights: str | os.PathLike | Mapping[str, Tensor], *, tp_rank: int = 0, tp_size: int = 1
    ) -> ContextKV:
        """Copy fc, the norms and this rank's heads of K and V from a drafter's checkpoint.

        weights: a safetensors file or folder, or tensors by name: those of a drafter, or of a target whose checkpoint
        has the DSpark stages (`mtp.{l}`). A quantized fc stays quantized; K and V of all layers are one weight here, so
        they are dequantized. A saved state_dict of a stage has one rank's heads, and is restored as it is, whatever
        tp_rank and tp_size are.

        Raises ValueError that names the weight, before anything is copied: a missing one, another number of layers or
        heads, a shape that does not fit, a bias that the config does not have. FileNotFoundError for a path that
        is missing.
        """
        from . import checkpoint  # an import of 6 ms, which only loading needs

        op = f"{OP}.load_checkpoint"
        tp_size = checks.check_int(op, "tp_size", tp_size, at_least=1)
        tp_rank = checks.check_int(op, "tp_rank", tp_rank)
        if not 0 <= tp_rank < tp_size:
            raise checks.error(ValueError, op, f"tp_rank is {tp_rank}", f"one in [0, {tp_size})")
        state, projections = checkpoint.context_kv(weights, self, tp_rank, tp_size)
        dense = {"fc": self._dense_fc, "kv_proj": self._dense_kv_proj}
        load_projections(op, self, state, {name: (weight, dense[name]) for name, weight in projections.items()})
        return self

    def quantize(self, format: str) -> ContextKV:
        """Round fc and, without a norm of each layer's own, kv_proj to a format of `QuantizedWeight`."""
        self.fc = quantize_linear(f"{OP}.quantize", self.fc, format)
        if not self.config.layer_norm:
            self.kv_proj = quantize_linear(f"{OP}.quantize", self.kv_proj, format)
        return self

    def forward(
        self,
        chunks: Sequence[Tensor] | Tensor,
        *,
        positions: Tensor,
        slots: Tensor,
        cos_sin: Tensor,
        caches: Sequence[tuple[Tensor, Tensor | None]],
        indices: Tensor | None = None,
    ) -> None:
        """`combine`, `project` and `store` of N context tokens; the arguments are theirs, and what they raise."""
        kv = self.project(self.combine(chunks, indices=indices))
        self.store(kv, positions=positions, slots=slots, cos_sin=cos_sin, caches=caches)

    def combine(
        self, chunks: Sequence[Tensor] | Tensor, *, indices: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """fc of the captured states, [N, H] in their dtype, before hidden_norm: what vLLM's `combine_hidden_states`
        keeps.

        Args: as in `norm_concat_linear`: K chunks [T, Ht] or one packed [T, K*Ht], and the indices of their rows.

        Raises TypeError / ValueError for arguments that do not fit; nothing is written to `out`.
        """
        config = self.config
        gains = weights_of(self.aux_norm) or None
        sources = Sources.of(
            "norm_concat_linear",
            chunks,
            "none" if gains is None else "chunk",
            gains,
            config.eps,
            config.norm_offset,
            indices=indices,
            num_chunks=config.num_chunks,
        )
        return project_onto(self._modules["fc"], sources, 0.0, out)

    def project(self, states: Tensor, *, out: Tensor | None = None) -> Tensor:
        """K and V of all layers, [N, L*W], before k_norm and RoPE.

        Args:
            states: [N, H] in the weights' dtype, of `combine`.
            out: [N, L*W] in that dtype, with any row stride.

        Raises TypeError / ValueError for arguments that do not fit; nothing is written to `out`.
        """
        config = self.config
        hidden_norm = ("concat", gain_of(self.hidden_norm), config.eps, config.norm_offset)
        kv_proj = self._modules["kv_proj"]
        if not config.layer_norm:
            return project_onto(kv_proj, Sources.of("norm_concat_linear", [states], *hidden_norm), 0.0, out)
        sources = Sources.of("norm_concat", [states], *hidden_norm)
        normed = concatenate(sources)
        L, W = config.num_layers, config.kv_width
        weight, bias = weight_and_bias(kv_proj)
        gains = weights_of(self.layer_norm)
        if out is not None:  # checked before the first layer is written
            sources.check_out("norm_concat_linear", out, L * W, "L*W")
            Projection(weight, bias, None, 0.0).check(sources)
            if weight.shape[0] != L * W:
                raise checks.shape_error(OP, "kv_proj.weight", weight, f"(L*W, H) = ({L * W}, {config.hidden_size})")
            of_layers = [(f"layer_norm[{layer}].weight", gain) for layer, gain in enumerate(gains)]
            for name, gain in of_layers:
                checks.check_vector(OP, name, gain, config.hidden_size, "H", states, "states")
            checks.check_inference(OP, gains)
            if is_plain(states, weight, bias, out):  # a trace has no addresses
                sources.check_memory("norm_concat_linear", out, ("weight", weight), ("bias", bias), *of_layers)
        kv = states.new_empty(*states.shape[:-1], L * W) if out is None else out
        for layer, gain in enumerate(gains):
            columns = slice(layer * W, (layer + 1) * W)
            of_layer = Sources.of("norm_concat_linear", [normed], "concat", gain, config.eps, config.norm_offset)
            projection = Projection(weight[columns], None if bias is None else bias[columns], None, 0.0)
            project(of_layer, projection, kv[..., columns])
        return kv

    def store(
        self,
        kv: Tensor,
        *,
        positions: Tensor,
        slots: Tensor | Sequence[Tensor | None],
        cos_sin: Tensor,
        caches: Sequence[tuple[Tensor, Tensor | None]],
    ) -> None:
        """k_norm and RoPE of K, and both into the cache.

        Args:
            kv: [N, L*W] of `project`.
            positions: [N] int32 / int64; a row whose position is not in cos_sin is skipped.
            slots: [N] int32 / int64, where each row goes in all caches, or one such tensor per layer (None: the layer
                is left out); a row whose slot is negative or beyond the cache is skipped.
            cos_sin: [P, rotary_dim] in the dtype of kv or fp32: cos of half as many frequencies, then sin. SGLang reads
                its cache as stored, vLLM casts it to the model's dtype.
            caches: per layer (K, V), each [slots, n, d] in kv's dtype, with any strides by which no two heads share
                memory; V is None where the config says values "none". Only the engine can write an FP8 cache: give
                `store` a buffer instead.

        Raises TypeError / ValueError for arguments that do not fit, before their layer is written.
        """
        config, W = self.config, self.config.kv_width
        checks.check_tensor(OP, "kv", kv)
        checks.check_strided(OP, "cos_sin", cos_sin)
        if kv.dim() != 2 or kv.shape[1] != config.num_layers * W:
            raise checks.shape_error(OP, "kv", kv, f"(N, L*W) = (*, {config.num_layers * W})")
        of_layer = (
            [slots] * config.num_layers if isinstance(slots, Tensor) else checks.check_sequence(OP, "slots", slots)
        )
        caches = checks.check_sequence(OP, "caches", caches, "a pair of K and V per layer")
        for name, given in (("slots", of_layer), ("caches", caches)):
            if len(given) != config.num_layers:
                raise checks.error(
                    ValueError, OP, f"{name} has {len(given)} entries", f"{config.num_layers}, one per layer"
                )
        if cos_sin.dim() != 2 or cos_sin.shape[1] != config.rotary_dim:
            raise checks.shape_error(OP, "cos_sin", cos_sin, f"(P, rotary_dim) = (*, {config.rotary_dim})")
        norm_width = 0 if config.k_norm == "none" else config.norm_width
        pairs = []
        for layer, cache in enumerate(caches):  # before the first one is written
            try:
                k_cache, v_cache = cache
            except (TypeError, ValueError, RuntimeError):  # no sequence, not two entries, a tensor without rows
                got = f"caches[{layer}] is a {type(cache).__name__}"
                raise checks.error(TypeError, OP, got, "a pair (K, V)") from None
            if (v_cache is None) != (config.values == "none"):
                got = f"caches[{layer}] has {'no V' if v_cache is None else 'a V'}"
                raise checks.error(ValueError, OP, got, "the opposite", f"the config says values {config.values!r}")
            pairs.append((k_cache, v_cache))
        for layer, (slot, (k_cache, v_cache)) in enumerate(zip(of_layer, pairs, strict=True)):
            if slot is None:
                continue
            gain = gain_of(self.k_norm[layer]) if config.k_norm == "weight" else None
            norm = (gain, config.eps, config.norm_offset, norm_width)
            rotary = (cos_sin, config.rotary_begin, config.interleaved)
            rows = kv[:, layer * W : (layer + 1) * W]
            store_context_kv(StoreContextKV(rows, *norm, *rotary, positions, slot, k_cache, v_cache))
