"""The input stage of vLLM's MTP and EAGLE-1 layers with norms: eh_proj(cat([enorm(embeds), hnorm(hidden)])).

With targets of residual streams it is fc_embedding(norm(embeds)) (Qwen4-Exp), or e_proj(enorm(embeds)) and
h_proj(hnorm(streams)) (DeepSeek V4). vLLM's forward stays as it is, including its mask of position 0 (contested:
vllm#33299); see `normed_linear`, and `fused_norms` where norms and cat are one kernel of vLLM's.
"""

import itertools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ..eligibility import log_once
from ..gates import Target, TargetError, resolve
from . import LOGGER, fused_norms
from .normed_linear import FusedNorms, Stage, fuse
from .registry import BOTH, ONLY_033, Config, hook_models, when_loaded

_MODELS = "vllm.model_executor.models"


@dataclass(frozen=True)
class Layer:
    """A class whose forward has the stage.

    architectures: those of the models built of it; none where another row has them.  forward: its target.
    norms: those in front of the projection, in the order of the cat.  projection: the linear layer behind them.
    in_some: whether layers of the class may lack norms and projection.
    norm: (class, offset of its gains) where the norms are of a class of their own; offset None where it has a flag.
    fused_norms: set where the norms are one kernel of vLLM's.  others: what the stage depends on besides the forward.
    more: (norms, projection) of further stages in the same forward.  within: the attribute with the layers, where the
        class norms for all of them.
    """

    architectures: tuple[str, ...]
    forward: Target
    norms: tuple[str, ...] = ("enorm", "hnorm")
    projection: str = "eh_proj"
    in_some: bool = False
    norm: tuple[str, float | None] = ("", None)
    fused_norms: Callable[[Any], FusedNorms] | None = None
    others: tuple[Target, ...] = ()
    more: tuple[tuple[tuple[str, ...], str], ...] = ()
    within: str = ""

    @property
    def where(self) -> str:
        return self.forward.where.rpartition(".")[0]

    @property
    def targets(self) -> tuple[Target, ...]:
        return (self.forward, *self.others)


def _layer(architectures: str, where: str, body: str, takes: str, *names: Any) -> Layer:
    parameters = ("self", *takes.split(), ...)
    where = where if where.startswith("vllm.") else f"{_MODELS}.{where}"
    return Layer(tuple(architectures.split()), Target(f"{where}.forward", parameters, {body: BOTH}), *names)


def _kernel(where: str, body: str) -> Target:
    return Target(where, None, {body: BOTH})


_EMBED_EH_NORM = _kernel("vllm.model_executor.layers.fused_embed_norm:fused_embed_eh_norm", "9e908b0a5500ea95")
_EH_NORM = _kernel("vllm.models.deepseek_v32.common.kernels:fused_eh_norm", "11c8aa7300f29389")
_INKLING = "vllm.models.inkling.nvidia"

_BY_IDS = "input_ids positions previous_hidden_states inputs_embeds"
_BY_HIDDEN = "input_ids positions hidden_states"
_QWEN = (("pre_fc_norm_embedding", "pre_fc_norm_hidden"), "fc")
_IN_SOME = (("enorm", "hnorm"), "eh_proj", True)
_BY_EMBEDS = "inputs_embeds positions previous_hidden_states"
LAYERS = (
    _layer("DeepSeekMTPModel", "deepseek_mtp:DeepSeekMultiTokenPredictorLayer", "82cbd3f91a7919ce", _BY_IDS),
    _layer("OpenPanguMTPModel", "openpangu_mtp:OpenPanguMultiTokenPredictorLayer", "82cbd3f91a7919ce", _BY_IDS),
    _layer("Step3p5MTP", "step3p5_mtp:Step3p5AMultiTokenPredictorLayer", "da27bcb52de713a3", _BY_IDS),
    _layer("Glm4MoeMTPModel", "glm4_moe_mtp:Glm4MoeMultiTokenPredictorLayer", "e4bfc96e86b04790", _BY_IDS),
    _layer("Glm4MoeLiteMTPModel", "glm4_moe_lite_mtp:Glm4MoeLiteMultiTokenPredictorLayer", "c9a7678e859bb1fc", _BY_IDS),
    _layer("GlmOcrMTPModel", "glm_ocr_mtp:GlmOcrMultiTokenPredictorLayer", "e1b75c2a4fc9fdd5", _BY_IDS),
    _layer("HYV3MTPModel", "hy_v3_mtp:HYV3MultiTokenPredictorLayer", "69849a6846949d6d", _BY_IDS),
    _layer("HYV4MTPModel", "vllm.models.hy_v4.nvidia.mtp:HYV4MultiTokenPredictorLayer", "7b9170aacd17888b", _BY_IDS),
    _layer(
        "BailingMoeV25MTPModel", "bailing_moe_mtp:BailingMoeV25MultiTokenPredictorLayer", "ddcbe0192798610c", _BY_IDS
    ),
    _layer(
        "MiMoMTPModel",
        "mimo_mtp:MiMoMultiTokenPredictorLayer",
        "afb17f931413b7cc",
        _BY_EMBEDS,
        ("hidden_layernorm", "token_layernorm"),
        "input_proj",
    ),
    _layer(
        "ErnieMTPModel",
        "ernie_mtp:ErnieMultiTokenPredictorLayer",
        "fb2404840cc35633",
        _BY_EMBEDS,
        ("mtp_emb_norm", "mtp_hidden_norm"),
        "mtp_linear_proj",
    ),
    _layer("MiMoV2MTPModel MiMoV2OmniMTPModel", "mimo_v2_mtp:MiMoV2MTPLayer", "e84899ea57ebdee3", _BY_EMBEDS),
    _layer("LongCatFlashMTPModel", "longcat_flash_mtp:LongCatMultiTokenPredictorLayer", "8113964161fd78a5", _BY_IDS),
    _layer(
        "BailingMoeV3MTPModel", "bailing_moe_v3_mtp:BailingMoeV3MultiTokenPredictorLayer", "47d773c61c8d0f69", _BY_IDS
    ),
    _layer("Qwen3NextMTP", "qwen3_next_mtp:Qwen3NextMultiTokenPredictor", "e8d090b5c83afa46", _BY_HIDDEN, *_QWEN),
    _layer(
        "Qwen3_5MTP Qwen3_5MoeMTP InternS2MobiusMTP",
        "qwen3_5_mtp:Qwen3_5MultiTokenPredictor",
        "d10bcfd218fdc8d2",
        _BY_HIDDEN,
        *_QWEN,
    ),
    # The norm of the hidden state is over a row of all streams, while fc_hidden reads a row per stream.
    _layer(
        "Qwen4ExpMTP",
        "vllm.models.qwen4_exp.nvidia.mtp:Qwen4ExpMultiTokenPredictor",
        "a0feb27caf563a10",
        _BY_HIDDEN,
        ("pre_fc_norm_embedding",),
        "fc_embedding",
    ),
    _layer("ExaoneMoeMTP", "exaone_moe_mtp:ExaoneMoeMultiTokenPredictor", "4c07536b5b1cd361", _BY_HIDDEN, *_QWEN),
    _layer("Exaone4_5_MTP", "exaone4_5_mtp:Exaone4_5MultiTokenPredictor", "cadfc1dcc60e48b0", _BY_HIDDEN, *_QWEN),
    # A step has several layers, of either class; the stage is in the first one.
    _layer(
        "NemotronHMTPModel",
        "nemotron_h_mtp:NemotronHMTPAttentionDecoderLayer",
        "8106536c1762531b",
        "positions hidden_states residual inputs_embeds",
        *_IN_SOME,
    ),
    _layer(
        "",
        "nemotron_h_mtp:NemotronHMTPMoEDecoderLayer",
        "43ff0f7ee8be2fdb",
        "hidden_states residual inputs_embeds",
        *_IN_SOME,
    ),
    _layer(
        "EagleMiniCPMForCausalLM",
        "minicpm_eagle:EagleMiniCPMModel",
        "68535a008c46a2df",
        "input_ids positions hidden_states",
        ("input_norm1", "input_norm2"),
        "fc",
    ),
    _layer(
        "EagleDeepSeekMTPModel",
        "deepseek_eagle:DeepseekV2Model",
        "82b00f2dc103b63c",
        "input_ids positions hidden_states",
        ("enorm", "hnorm"),
        "fc",
    ),
    replace(
        _layer(
            "DeepseekV32MTPModel",
            "vllm.models.deepseek_v32.nvidia.mtp:DeepseekV32MultiTokenPredictorLayer",
            "a9d38cb690d0c644",
            _BY_IDS,
        ),
        fused_norms=fused_norms.of_deepseek_v32,
        others=(_EMBED_EH_NORM, _EH_NORM),
    ),
    replace(
        _layer(
            "Glm5NextMTPModel",
            "vllm.models.glm5next.common.mtp:Glm5NextMultiTokenPredictorLayer",
            "35b036b9e0c8ca35",
            _BY_IDS,
        ),
        fused_norms=fused_norms.embeds_and_hidden,
        others=(_kernel("vllm.models.glm5next.nvidia.ops.fused_eh_norm:fused_eh_norm", "11c8aa7300f29389"),),
    ),
    replace(
        _layer(
            "Dots3NoteMTPModel",
            "vllm.models.dots3_note.nvidia.mtp:Dots3NoteMultiTokenPredictorLayer",
            "a256822267a4ca0c",
            _BY_IDS,
        ),
        fused_norms=fused_norms.embeds_and_hidden,
        others=(_EMBED_EH_NORM, _EH_NORM),
    ),
    replace(
        _layer(
            "KimiK3MTPModel",
            "vllm.models.kimi_k3.nvidia.mtp:KimiK3MultiTokenPredictorLayer",
            "320cabf02dffc1ab",
            _BY_IDS,
        ),
        fused_norms=fused_norms.embeds_and_hidden,
        others=(_kernel("vllm.models.kimi_k3.common.mtp:fused_mtp_input", "1a8e8abe2f6d71f3"),),
    ),
    replace(
        _layer(
            "DeepSeekV4MTPModel",
            "vllm.models.deepseek_v4.nvidia.mtp:DeepSeekV4MultiTokenPredictorLayer",
            "eda279296dc4b37f",
            _BY_IDS,
            ("enorm",),
            "e_proj",
        ),
        more=((("hnorm",), "h_proj"),),
        fused_norms=fused_norms.of_streams,
        others=(
            _kernel(
                "vllm.models.deepseek_v4.common.ops.fused_mtp_input_rmsnorm:FusedMTPInputRMSNormKernel.__call__",
                "dd077e66f2d9ec86",
            ),
        ),
    ),
    Layer(
        ("Step5MTP",),
        Target(
            "vllm.models.step5.nvidia.mtp:Step5MultiTokenPredictorLayer.forward",
            ("self", *_BY_IDS.split(), ...),
            {"da6ffe4214345e37": ONLY_033},
        ),
        norm=("vllm.models.step5.nvidia.layernorm:Step5RMSNorm", None),
        fused_norms=fused_norms.of_step5,
        others=(Target("vllm.models.step5.nvidia.layernorm:_step5_rms_norm", None, {"2dac6dc2c26a4723": ONLY_033}),),
    ),
    replace(
        _layer(
            "MiniMaxM3MTP",
            "vllm.models.minimax_m3.nvidia.mtp:MiniMaxM3MultiTokenPredictorLayer",
            "789de132faeae745",
            _BY_IDS,
        ),
        norm=("vllm.models.minimax_m3.nvidia.model:MiniMAXGemmaRMSNorm", 1.0),
        others=(_kernel("vllm.models.minimax_m3.nvidia.model:MiniMAXGemmaRMSNorm.forward", "7264b9e9b08c0865"),),
    ),
    Layer(
        ("InklingMTPModel",),
        Target(
            f"{_INKLING}.mtp:InklingMultiTokenPredictor.fused_input_cat",
            ("self", "layer", "previous_hidden", "input_ids", "inputs_embeds"),
            {"2b06be3a985ac684": BOTH},
        ),
        ("hidden_norm", "embed_norm"),
        "input_proj",
        norm=(f"{_INKLING}.layernorm:InklingRMSNorm", 0.0),
        fused_norms=fused_norms.of_normed_embeds,
        others=(
            _kernel(f"{_INKLING}.mtp:InklingMTPDepthLayer.forward", "864c0d4983db5587"),
            _kernel(f"{_INKLING}.mtp:InklingMultiTokenPredictor.embed_input_ids", "24e4cdd562736622"),
            _kernel(f"{_INKLING}.ops.norm:embed_dual_rmsnorm_cat", "f084de6517090f90"),
        ),
        within="layers",
    ),
)
ARCHITECTURES = tuple(name for layer in LAYERS for name in layer.architectures)


def register() -> None:
    hook_models(ARCHITECTURES, hooked)


def hooked(predictor: type[nn.Module]) -> type[nn.Module]:
    """A subclass of the predictor whose layers are fused once its weights are loaded."""
    modules = [base.__module__ for base in predictor.__mro__]
    rows = [layer for layer in LAYERS if layer.forward.module in modules]
    if not rows:
        raise TargetError(f"it is of another plugin or platform, {predictor.__module__}")
    for layer in rows:
        for target in layer.targets:
            target.find()
    return when_loaded(predictor, "input stage", _read, _fuse)


def _read(predictor: Any, config: Config) -> list[list[Stage]]:
    """The stages of each layer of a predictor that has been built, their weights kept dense until they are fused."""
    found = [(module, _row_of(module)) for module in predictor.modules()]
    layers = [(module, row) for module, row in found if row is not None]
    if not layers:
        raise TargetError("none of its layers is of a class that is known")
    stages = [stages_of(module, row, config) for module, row in layers]
    for stage in itertools.chain(*stages):
        stage.keep_dense_on_cpu()
    return stages


def _fuse(predictor: Any, stages: list[list[Stage]]) -> None:
    for together in filter(None, stages):
        fuse(together)


def _row_of(module: nn.Module) -> Layer | None:
    where = f"{type(module).__module__}:{type(module).__qualname__}"
    return next((layer for layer in LAYERS if layer.where == where), None)


def stages_of(layer: Any, row: Layer, config: Config) -> list[Stage]:
    """The stages of a layer, to be fused together; none where it has none, or where LoRA is on and replaces a
    projection."""
    owners = getattr(layer, row.within).values() if row.within else [layer]
    stages = []
    made = None if row.fused_norms is None else row.fused_norms(layer)
    for owner, (norms, projection) in itertools.product(owners, ((row.norms, row.projection), *row.more)):
        name = f"{type(owner).__name__}.{projection}"
        if row.in_some and not hasattr(owner, projection):
            return []
        linear = getattr(owner, projection)
        if config.lora and hasattr(linear, "quant_method"):  # nn.Linear has none, and is not replaced
            log_once(LOGGER, logging.INFO, f"{name} stays with vLLM: LoRA is on, which replaces it")
            return []
        modules = [getattr(owner, norm) for norm in norms]
        offsets = _offsets(row, modules[0])
        stages.append(Stage(name, modules, linear, offsets, config, fused_norms=made))
    return stages


def _offsets(row: Layer, norm: Any) -> Mapping[type, float]:
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

    where, offset = row.norm
    if not where:
        return {RMSNorm: 0.0, GemmaRMSNorm: 1.0}
    return {resolve(where)[2]: float(norm.zero_centered) if offset is None else offset}
