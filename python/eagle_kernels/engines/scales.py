"""Dequantizes a drafter's checkpoint for engine layers that are unquantized and have no parameter for its scales.

A layer without a quantization method reads codes called `weight` as dense values. They are some hundred times too
large, the model silently skips the scales beside them by name, and no draft is accepted (sglang#39087: accepted length
3.7 -> 1.0). Here such codes, those of an embedding or lm_head too, are dequantized once to the layer's dtype on their
way from the checkpoint to the model. What cannot be read raises an error with the tensor's name, but only once the
engine loads it: an MTP model is loaded from its target's checkpoint, and skips the target's layers, embedding and
lm_head by name. Codes that the engine loads as codes pass unchanged, and so do tensors of no layer of the drafter.
"""

import functools
import itertools
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checks import DTYPES, error, shape_error
from ..drafter_config import get_field
from ..models import families
from ..quantized_checkpoint import UNREAD_CODES, check_is_read, read_projection, tensors_inside
from ..quantized_weight import QuantizedWeight
from ..stored_projection import CODES, StoredProjection
from .eligibility import log_once

OP = "load_weights"
# A layer of the engines -> the checkpoint's layers that it merges.
MERGED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj", "index_q_proj", "index_k_proj"),  # the last two MiniMax-M3's in vLLM
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),  # vLLM's
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),  # SGLang's
    "fused_wqa_wkv": ("wq_a", "wkv"),  # DeepSeek-V4's in vLLM
    "wqkv_a": ("wq_a", "wkv"),  # in SGLang
    "qkvr": ("wq_du", "wk_dv", "wv_dv", "wr_du"),  # Inkling's
}
# Also those of single models in vLLM, apart from MERGED, which `doctor` applies to all families: Ling's g_proj is its
# own layer.
_MERGED_BY_ANY = {
    **MERGED,
    "qkv_proj": (*MERGED["qkv_proj"], "o_gate_proj"),  # Muse Spark
    "fused_qkv_a_g_proj": ("q_a_proj", "kv_a_proj_with_mqa", "g_proj"),  # Kimi K3
    "qkvg_proj": ("q_proj", "k_proj", "v_proj", "g_proj"),  # Step-5
    "qkv_indexer_proj": ("q_proj", "k_proj", "v_proj", "g_proj", *(f"sparse_indexer_{part}" for part in "qkz")),
}
# Other names of single layers: Mistral's, Step-3.5's, Bailing's, GigaChat's, HunYuan's, Inkling's and DeepSeek-V4's.
_OTHER_NAMES = {
    **{"eagle_linear": "fc", "wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "o_proj"},
    **{"wq_a": "q_a_proj", "wq_b": "q_b_proj", "wkv_a_with_mqa": "kv_a_proj_with_mqa", "wkv_b": "kv_b_proj"},
    **{"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"},
    **{"gate_and_up_proj": "gate_up_proj", "w13_dn": "gate_up_proj", "w2_md": "down_proj", "dense": "o_proj"},
    **dict.fromkeys(("word_embeddings", "tok_embeddings", "tok_emb", "embeddings", "embed"), "embed_tokens"),
    # vLLM's MTP models have the target's lm_head in each layer, as shared_head.head; Qwen4-Exp the other way round.
    **{"output": "head", "lm_head": "head", "head": "lm_head", "unembed": "lm_head"},
    **{"gate_proj": "attn_gate", "gate_up_projection": "gate_up_lowrank", "gate_down_projection": "gate_down_lowrank"},
}
# Names that mean another layer in other checkpoints, with as much of the path as tells the two apart.
_OTHER_PATHS = {
    "output": "lm_head",  # Mistral Large 3: both engines' `mistral_large_3`
    "markov_head.embed": "markov_head.markov_w1",  # DeepSeek-V4.1: vLLM's `models/deepseek_v41/nvidia/dspark`
    "markov_head.head": "markov_head.markov_w2",
    **{f"xpress_head.mlp.{part}_proj": f"xpress_head.mlp_{part}" for part in ("gate", "up", "down")},  # `qwen3_xpress`
}
# Unquantized layers whose codes in square FP8 blocks the engine dequantizes itself: the drafter's class -> the layer
# and the names of the scales that the engine knows.
_READ_BY_ENGINE = {
    **dict.fromkeys(("DeepseekV4ForCausalLMNextN", "DeepseekV4ForCausalLMDSpark"), ("wo_a", ("scale",))),  # SGLang
    # vLLM pads the rows of a checkpoint without RoPE to the layer's only if they are codes; dense ones would not load.
    "Glm5NextMTP": ("kv_a_proj_with_mqa", ("weight_scale_inv", "weight_scale")),
}
# Layers that get rows of zeros only where the engine dequantizes them itself: the drafter's class -> the layer and the
# fields of the config whose sum is its rows. vLLM's `models/glm5next/common/mtp`: without RoPE the rows of the latter
# are not in the checkpoint.
_PADDED = {"Glm5NextMTP": ("kv_a_proj_with_mqa", ("kv_lora_rank", "qk_rope_head_dim"))}
_CODES = {*CODES, *UNREAD_CODES}
# Renames that the engines' own load_weights applies after us, like those above. Each may follow on those before it.
_RENAMES = (
    *((re.compile(rf"(?<![^.]){re.escape(theirs)}$"), ours) for theirs, ours in _OTHER_PATHS.items()),
    (re.compile(r"^(?:model\.)?language_model\.(?:model\.)?"), ""),  # GLM-OCR, GLM-5-next, Nemotron-H
    (re.compile(r"^backbone\.(?=embeddings$)"), ""),  # Nemotron-H: other layers there are its target's
    (re.compile(r"^(?:model\.)?llm\.(?=(?:un)?embed$)"), ""),  # Inkling in SGLang
    (re.compile(r"^masked_embedding\."), ""),  # Gemma 4 in SGLang
    (re.compile(r"^(?:model\.)?dspark\."), ""),  # MiniMax's DSpark in SGLang
    (re.compile(r"\bblock_sparse_moe\."), "mlp."),  # the same
    (re.compile(r"\.transformer\."), "."),  # Step-3.5, 3.7
    (re.compile(r"\b(?:attention|attn)\."), "self_attn."),  # Bailing in vLLM, Mistral; DeepSeek-V4 in SGLang
    (re.compile(r"\b(?:feed_forward|ffn)\."), "mlp."),  # Mistral; DeepSeek-V4 in SGLang
    (re.compile(r"^(layers\.\d+\.)(?=shared_experts\.)"), r"\1mlp."),  # Mistral Large 3
    (re.compile(r"\bmidlayer\."), "layers.0."),  # EAGLE-3
    (re.compile(r"^layers\.0\."), "midlayer."),  # Kimi's EAGLE-3 in SGLang
    (re.compile(r"\blayers\.(\d+)\."), r"layers.\1.mtp_block."),  # vLLM's MTP models
    (re.compile(r"^mtp\.(\d+\.)"), r"layers.\1"),  # DeepSeek-V4's DSpark in vLLM
    (re.compile(r"^mtp\.(\d+\.)"), r"stages.\1"),  # in SGLang
    (re.compile(r"\bmtp\.(?=layers\.)"), ""),  # Qwen3-Next, Qwen3.5, EXAONE, Nemotron-H, MiniMax-M3, Inkling
    (re.compile(r"^mtp\.(layers\.\d+\.)self_attn\."), r"\1"),  # Qwen3-Next and Qwen3.5 in SGLang
    (re.compile(r"^mtp\."), "model.mtp_layer."),  # IQuest-Q1 in SGLang
    # MiMo, Ernie, LongCat, Inkling, DeepSeek-V4: what is left is the tail of the engine's path, whatever its beginning.
    (re.compile(r"^(?:model\.(?:mtp\.layers|mtp_layers|mtp_block)|mtp)\.\d+\.(?:transformer_layer\.)?"), ""),
    (re.compile(r"^(?:(?:model\.)?(?:mtp|layers\.\d+)|emb)\.(?=(?:embed_tokens|tok_emb)$)"), ""),  # MTP models in vLLM
    (re.compile(r"^(?:model\.)?(?:mtp\.)?shared_head\.(?=head$)"), ""),  # Qwen4-Exp in vLLM
)
_STRIPPED = re.compile(r"^(model|encoder(?=\.fc$))\.")  # SGLang's DFlash, where no parameter has the whole name
_DTYPES_OF_CODES = {
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.int8,
    torch.uint8,
}


@functools.cache
def _projections() -> frozenset[str]:
    """Those of the input stage: the checkpoint's path (model.layers.61.eh_proj) is not the engine's (model.eh_proj)."""
    return frozenset(name for family in families().values() if family.mtp for name in family.mtp.projections)


def scaled(
    model: nn.Module,
    weights: Iterable[tuple[str, Tensor]],
    unquantized: Collection[type],
    engine: str,
    logger: logging.Logger,
    *,
    reused: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """The weights for `model.load_weights`, dequantized where the layer is unquantized.

    Codes and scales come last, when all of them are known. The model's quantization_config, where it has one, has to
    agree with them. Codes that cannot be read raise a ValueError or TypeError that names the tensor once they are used.

    Args:
        unquantized: the exact types of quant_method of unquantized layers; a torch nn.Linear is one as well.
        engine: its name, for the log.
        reused: whether a tensor's memory may be overwritten or freed once `weights` has yielded the next one.
    """
    drafter = _Drafter(type(model).__name__, engine, _quantization_of(model), _padded_rows(model), logger)
    layers = _Layers(_layers_by_tail(model, unquantized), (*_RENAMES, *_renames_of(model)))
    return _scaled(weights, layers, drafter, reused)


def _scaled(
    weights: Iterable[tuple[str, Tensor]], layers: "_Layers", drafter: "_Drafter", reused: bool
) -> Iterator[tuple[str, Tensor]]:
    tensors_of: dict[str, dict[str, Tensor]] = {}
    others: list[str] = []
    for name, tensor in weights:
        path, _, parameter = name.rpartition(".")
        is_dense = parameter == "bias" or (parameter == "weight" and tensor.dtype in DTYPES)
        if not is_dense and layers.of(path) is not None:
            tensors_of.setdefault(path, {})[parameter] = tensor.clone() if reused else tensor
        else:
            others.append(name)
            yield name, tensor
    inside = tensors_inside(tensors_of, others)
    for path, tensors in tensors_of.items():
        layer = layers.of(path)
        if layer is not None and _has_codes(tensors, layer) and not drafter.is_read_by_engine(path, tensors):
            try:
                tensors = {"weight": _numbers(path, tensors, inside[path], layer, drafter)}
            except (ValueError, TypeError) as failure:
                tensors = {"weight": _unreadable(failure)}
        for parameter, tensor in tensors.items():
            yield f"{path}.{parameter}", tensor


@dataclass(frozen=True)
class _Drafter:
    name: str
    engine: str
    quantization: Mapping[str, Any] | None
    rows: Mapping[str, int]  # by the names of layers whose numbers are padded to them
    logger: logging.Logger

    def is_read_by_engine(self, path: str, tensors: Mapping[str, Tensor]) -> bool:
        layer, names = _READ_BY_ENGINE.get(self.name, ("", ()))
        codes = tensors.get("weight")
        if path.rpartition(".")[2] != layer or codes is None or codes.dtype != torch.float8_e4m3fn:
            return False
        return any(_in_squares(codes, tensors[name]) for name in names if name in tensors)


def _in_squares(codes: Tensor, scales: Tensor) -> bool:
    """Whether the scales are of square blocks: not one per row, nor of blocks within one row as in MXFP8."""
    if codes.dim() != 2:
        return False
    blocks = ([-(-size // side) for size in codes.shape] for side in (32, 64, 128, 256))
    return list(scales.shape) in blocks


def _quantization_of(model: nn.Module) -> Mapping[str, Any] | None:
    """quantization_config of the model's first module whose config has one."""
    for _, module in model.named_modules():
        said = get_field(getattr(module, "config", None), "quantization_config")
        said = said.to_dict() if hasattr(said, "to_dict") else said
        if isinstance(said, Mapping):
            return said
    return None


def _padded_rows(model: nn.Module) -> dict[str, int]:
    """{layer: its rows}, for a drafter of `_PADDED` whose config has their number."""
    if type(model).__name__ not in _PADDED:
        return {}
    layer, fields = _PADDED[type(model).__name__]
    sizes = [get_field(getattr(model, "config", None), name) for name in fields]
    return {layer: sum(sizes)} if all(isinstance(size, int) for size in sizes) else {}


def _renames_of(model: nn.Module) -> Iterator[tuple[re.Pattern, str]]:
    """SGLang's NextN models have the layer after the target's, or the only one of a drafter's own checkpoint, as
    `decoder`; dots3-note's have several in `heads`; Step-3.5 has a model for each layer, which it calls `mtp_block`."""
    layers = get_field(getattr(model, "config", None), "num_hidden_layers")
    if isinstance(layers, int):
        yield re.compile(rf"^(?:model\.)?layers\.{0 if layers == 1 else layers}\."), "model.decoder."
        layer = layers + (getattr(model, "draft_model_idx", None) or 0)
        yield re.compile(rf"^model\.layers\.{layer}\.(?=shared_head\.)"), "model."
        yield re.compile(rf"^model\.layers\.{layer}\.(?!shared_head\.)"), "model.mtp_block."
        for k in range(get_field(getattr(model, "config", None), "num_nextn_predict_layers") or 0):
            yield re.compile(rf"^model\.layers\.{layers + k}\."), f"model.heads.{k}.decoder."


@dataclass(frozen=True)
class _Layer:
    """An unquantized layer: a linear layer, an embedding, lm_head or norm without a quantization method.

    columns: None where no codes can be read for it, as for a norm.
    rows: None where the checkpoint decides: it has one part of a merged weight, or another vocabulary.
    """

    path: str
    dtype: torch.dtype
    columns: int | None
    rows: int | None = None
    is_linear: bool = True

    @classmethod
    def of(cls, module: Any, path: str) -> "_Layer":
        dtype = module.weight.dtype
        if isinstance(module, nn.Linear):
            return cls(path, dtype, module.in_features, module.out_features)
        # vLLM's embeddings have an input_size as well, and an output_size that is padded.
        if hasattr(module, "embedding_dim") or not hasattr(module, "input_size"):
            return cls(path, dtype, getattr(module, "embedding_dim", None), is_linear=False)
        is_merged = path.rpartition(".")[2] in _MERGED_BY_ANY
        return cls(path, dtype, module.input_size, None if is_merged else module.output_size)

    def shape_of(self, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        """[D, W] of a weight that the layer takes."""
        rows = self.rows
        if rows is None:
            transposed = tensors.get("scales") if "qweight" in tensors else None
            codes = next(tensors[name] for name in tensors if name in _CODES)
            rows = codes.shape[0] if transposed is None else transposed.shape[-1]
        return rows, self.columns or 0


def _layers_by_tail(model: nn.Module, unquantized: Collection[type]) -> Mapping[str, _Layer | None]:
    """Unquantized layers, by every tail of their paths ("fc", "model.fc"); None where one of that tail is quantized."""
    layers: dict[str, _Layer | None] = {}
    for path, module in model.named_modules(remove_duplicate=False):  # tied embeddings are lm_head too
        is_dense = _takes_numbers(module, unquantized)
        if not path or (not is_dense and not hasattr(module, "quant_method")):
            continue
        names = path.split(".")
        layer = _Layer.of(module, path) if is_dense else None
        for k in range(len(names)):
            tail = ".".join(names[k:])
            layers[tail] = None if layers.get(tail, layer) is None else layer
    return layers


def _takes_numbers(module: nn.Module, unquantized: Collection[type]) -> bool:
    if isinstance(module, nn.Linear):
        return True
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dtype not in DTYPES:
        return False
    method = type(getattr(module, "quant_method", None))
    # UnquantizedEmbeddingMethod is that of VocabParallelEmbedding and ParallelLMHead, in both engines.
    return method is type(None) or method in unquantized or method.__name__ == "UnquantizedEmbeddingMethod"


@dataclass(frozen=True)
class _Layers:
    """The layers of a drafter, by the names that its checkpoint may have for them."""

    by_tail: Mapping[str, _Layer | None]
    renames: Collection[tuple[re.Pattern, str]]

    @functools.cached_property
    def names(self) -> set[str]:
        """The last name of every path for which `of` may find a layer."""
        names = {layer.path.rpartition(".")[2] for layer in self.by_tail.values() if layer}
        names.update(part for merged, parts in _MERGED_BY_ANY.items() if merged in names for part in parts)
        others = {other for other, name in _OTHER_NAMES.items() if name in names}
        paths = (theirs for theirs, ours in _OTHER_PATHS.items() if ours.rpartition(".")[2] in names)
        return names.union(others, (theirs.rpartition(".")[2] for theirs in paths))

    @functools.cached_property
    def has_experts(self) -> bool:
        """Whether experts are layers of their own; in no engine are they."""
        return any(layer and ".experts." in layer.path for layer in self.by_tail.values())

    def of(self, path: str) -> _Layer | None:
        """The unquantized layer for a path of the checkpoint; None where there is none."""
        name = path.rpartition(".")[2]
        if name not in self.names or (".experts." in path and not self.has_experts):  # some 50000 in a target
            return None
        if own := self._named(path):
            return own[0]
        paths = [path]
        for pattern, new in self.renames:
            paths += [renamed for each in paths if (renamed := pattern.sub(new, each)) != each]
        for layer in itertools.chain.from_iterable(map(self._named, paths)):
            if layer is not None:
                return layer
        stripped = _STRIPPED.sub("", path)
        for layer in self._named(stripped):
            if layer is not None and layer.path.rpartition(".")[0] == stripped.rpartition(".")[0]:
                return layer
        return self.by_tail.get(name) if name in _projections() else None

    def _named(self, path: str) -> Sequence[_Layer | None]:
        """The engine's layer of this path: none, or one, which is None where it is quantized."""
        parent, _, own = path.rpartition(".")
        for name in filter(None, (own, _OTHER_NAMES.get(own))):
            merged = (merged for merged, parts in _MERGED_BY_ANY.items() if name in parts)
            for tail in (f"{parent}.{each}".lstrip(".") for each in (name, *merged)):
                if tail in self.by_tail:
                    return [self.by_tail[tail]]
        return []


def _has_codes(tensors: Mapping[str, Tensor], layer: _Layer) -> bool:
    """Whether there are codes: in a linear layer any weight that is not dense; an embedding or norm may have integers
    that are no codes."""
    codes = _CODES & tensors.keys()
    return bool(codes) and (layer.is_linear or codes != {"weight"} or tensors["weight"].dtype in _DTYPES_OF_CODES)


def _unreadable(failure: Exception) -> Tensor:
    """Stands in for a weight that cannot be read: an engine that loads it gets the error, one that skips its name does
    not."""

    class Unreadable(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func == Tensor.device.__get__:  # SGLang's DeepSeek NextN asks for it before it looks at the name
                return super().__torch_function__(func, types, args, kwargs or {})
            raise failure

    return torch.empty(0).as_subclass(Unreadable)


def _numbers(
    path: str, tensors: Mapping[str, Tensor], inside: Mapping[str, str], layer: _Layer, drafter: _Drafter
) -> Tensor:
    if layer.columns is None:
        name = next(parameter for parameter in tensors if parameter in _CODES)
        because = "the engine's layer has no quantization method"
        raise error(ValueError, OP, f"{path}.{name} is {tensors[name].dtype}", "numbers", because)
    names = {parameter: f"{path}.{parameter}" for parameter in tensors}
    for parameter in sorted({*_CODES, "scales"} & tensors.keys()):
        if layer.rows is None and not tensors[parameter].dim():  # `shape_of` counts its rows
            raise shape_error(OP, names[parameter], tensors[parameter], "a matrix", "it is the engine's layer")
    read = {names[parameter]: tensor for parameter, tensor in tensors.items()}.__getitem__
    # Only codes that are read have a shape that `shape_of` can tell.
    stored = StoredProjection(OP, names, read, (0, 0), "the engine's layer", drafter.quantization or {})
    check_is_read(stored)
    weight = read_projection(replace(stored, names={**names, **inside}, shape=layer.shape_of(tensors)))
    kind = weight.format if isinstance(weight, QuantizedWeight) else "integers in groups"
    name = path.rpartition(".")[2]
    where = f"{name} of {drafter.name} of {drafter.engine}"
    message = f"{where} is {kind} in the checkpoint; the engine's layer has no scales: dequantized to {layer.dtype}"
    log_once(drafter.logger, logging.INFO, message)
    numbers = weight.dequantize(layer.dtype) if isinstance(weight, QuantizedWeight) else weight.to(layer.dtype)
    missing = drafter.rows.get(name, 0) - len(numbers)
    return F.pad(numbers, (0, 0, 0, missing)) if missing > 0 else numbers
