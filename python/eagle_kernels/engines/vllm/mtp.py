"""The input stage of vLLM's MTP and EAGLE-1 layers with norms: eh_proj(cat([enorm(embeds), hnorm(hidden)])).

Of Qwen4-Exp, whose target has residual streams, it is fc_embedding(norm(embeds)).
vLLM's forward stays as it is, its masking of position 0 included (contested: vllm#33299); see `normed_linear`.
"""

import logging
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...environment import EngineSwitches
from ..eligibility import log_once
from ..gates import Target, TargetError
from . import LOGGER
from .normed_linear import Stage
from .registry import Config, hook_models, when_loaded

_MODELS = "vllm.model_executor.models"
_BOTH = ("0.32.0", "0.33.0")


@dataclass(frozen=True)
class Layer:
    """A class whose forward has the stage.

    architectures: of the models that are built of it, none where another row has them.  forward: its target.
    norms: in front of the projection, in the order of the cat.  projection: the linear layer behind it.
    in_some: whether layers of the class may have none of them.
    """

    architectures: tuple[str, ...]
    forward: Target
    norms: tuple[str, ...] = ("enorm", "hnorm")
    projection: str = "eh_proj"
    in_some: bool = False

    @property
    def where(self) -> str:
        return self.forward.where.rpartition(".")[0]


def _layer(architectures: str, where: str, body: str, takes: str, *names: Any) -> Layer:
    parameters = ("self", *takes.split(), ...)
    where = where if where.startswith("vllm.") else f"{_MODELS}.{where}"
    return Layer(tuple(architectures.split()), Target(f"{where}.forward", parameters, {body: _BOTH}), *names)


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
    # The norm of the hidden state is over all streams, whose rows are not those that fc_hidden reads.
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
    # A step has several layers, of either class, and the stage is in the first.
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
)
ARCHITECTURES = tuple(name for layer in LAYERS for name in layer.architectures)

_switches = EngineSwitches(frozenset(), False, ())


def register(switches: EngineSwitches) -> None:
    global _switches
    _switches = switches
    hook_models(ARCHITECTURES, hooked)


def hooked(predictor: type[nn.Module]) -> type[nn.Module]:
    """A subclass of the predictor whose layers are fused once its weights are loaded."""
    modules = [base.__module__ for base in predictor.__mro__]
    rows = [layer for layer in LAYERS if layer.forward.module in modules]
    if not rows:
        raise TargetError(f"it is of another plugin or platform, {predictor.__module__}")
    for layer in rows:
        layer.forward.find()
    return when_loaded(predictor, "input stage", _read, _fuse)


def _read(predictor: Any, config: Config) -> list[Stage]:
    """The stages of a predictor that has been built, their weights kept dense until they are fused."""
    found = [(module, _row_of(module)) for module in predictor.modules()]
    layers = [(module, row) for module, row in found if row is not None]
    if not layers:
        raise TargetError("none of its layers is of a class that is known")
    stages = [stage for module, row in layers if (stage := stage_of(module, row, config)) is not None]
    for stage in stages:
        stage.keep_dense_on_cpu()
    return stages


def _fuse(predictor: Any, stages: list[Stage]) -> None:
    for stage in stages:
        stage.fuse()


def _row_of(module: nn.Module) -> Layer | None:
    where = f"{type(module).__module__}:{type(module).__qualname__}"
    return next((layer for layer in LAYERS if layer.where == where), None)


def stage_of(layer: Any, row: Layer, config: Config) -> Stage | None:
    """The stage of a layer; None where it has none, or where LoRA is on and replaces its projection."""
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

    name = f"{type(layer).__name__}.{row.projection}"
    if row.in_some and not hasattr(layer, row.projection):
        return None
    linear = getattr(layer, row.projection)
    if config.lora and hasattr(linear, "quant_method"):  # nn.Linear has none, and is not replaced
        log_once(LOGGER, logging.INFO, f"{name} stays with vLLM: LoRA is on, which replaces it")
        return None
    return Stage(
        name, [getattr(layer, norm) for norm in row.norms], linear, {RMSNorm: 0.0, GemmaRMSNorm: 1.0}, config, _switches
    )
