"""The input stage of vLLM's MTP and EAGLE-1 layers with norms: eh_proj(cat([enorm(embeds), hnorm(hidden)])).

vLLM's forward stays as it is, its masking of position 0 included (contested: vllm#33299); see `normed_linear`.
"""

import logging
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...environment import EngineSwitches
from ..eligibility import linear_unsupported_reason, log_once
from ..gates import Target, TargetError
from ..projection import EngineProjection
from . import LOGGER, normed_linear
from .combine import rms_norm_unsupported_reason
from .normed_linear import Candidate
from .registry import Config, hook_models, when_loaded

_MODELS = "vllm.model_executor.models"
_BOTH = ("0.32.0", "0.33.0")


@dataclass(frozen=True)
class Layer:
    """A class whose forward has the stage.

    architectures: of the models that are built of it.  forward: its target.
    norms: its two norms, in the order of the cat.  projection: the linear layer behind it.
    """

    architectures: tuple[str, ...]
    forward: Target
    norms: tuple[str, str] = ("enorm", "hnorm")
    projection: str = "eh_proj"

    @property
    def where(self) -> str:
        return self.forward.where.rpartition(".")[0]


def _layer(architectures: str, where: str, body: str, takes: str, *names: Any) -> Layer:
    parameters = ("self", *takes.split(), ...)
    where = where if where.startswith("vllm.") else f"{_MODELS}.{where}"
    return Layer(tuple(architectures.split()), Target(f"{where}.forward", parameters, {body: _BOTH}), *names)


_BY_IDS = "input_ids positions previous_hidden_states inputs_embeds"
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
    rows = [layer for layer in LAYERS if layer.forward.module == predictor.__module__]
    if not rows:
        raise TargetError(f"it is of another plugin, {predictor.__module__}")
    for layer in rows:
        layer.forward.find()
    return when_loaded(predictor, "input stage", lambda _, config: config, _fuse_layers)


def _fuse_layers(predictor: Any, config: Config) -> None:
    found = [(module, _row_of(module)) for module in predictor.modules()]
    stages = [(module, row) for module, row in found if row is not None]
    if not stages:
        raise TargetError("none of its layers is of a class that is known")
    for module, row in stages:
        fuse(module, row, config.max_rows, config.compiled)


def _row_of(module: nn.Module) -> Layer | None:
    where = f"{type(module).__module__}:{type(module).__qualname__}"
    return next((layer for layer in LAYERS if layer.where == where), None)


def fuse(layer: Any, row: Layer, max_rows: int, compiled: bool) -> None:
    """Give a layer the fused stage, or log why not."""
    first, second = (getattr(layer, norm) for norm in row.norms)
    norms, eh_proj = (first, second), getattr(layer, row.projection)
    name = f"{type(layer).__name__}.{row.projection}"
    offset, unsupported = _offset_and_unsupported_reason(norms, eh_proj)
    if unsupported is not None:
        log_once(LOGGER, logging.INFO, f"{name} stays with vLLM: {unsupported}")
        return
    stage = EngineProjection(eh_proj, 2, chunk_norms=norms, norm_offset=offset)
    projection = normed_linear.plan(Candidate(name, stage, eh_proj, max_rows, compiled, _switches))
    if projection is not None:
        normed_linear.put_in(name, projection)


def _offset_and_unsupported_reason(norms: tuple[Any, Any], eh_proj: Any) -> tuple[float, str | None]:
    import vllm.envs
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

    offsets = {RMSNorm: 0.0, GemmaRMSNorm: 1.0}
    if vllm.envs.VLLM_BATCH_INVARIANT:
        return 0.0, "VLLM_BATCH_INVARIANT=1 wants vLLM's own batch-invariant kernels"
    unsupported = linear_unsupported_reason(eh_proj)
    for norm in norms:
        unsupported = unsupported or rms_norm_unsupported_reason(norm, set(offsets), eh_proj.weight.dtype)
    if unsupported is None and type(norms[0]) is not type(norms[1]):
        unsupported = "its norms are of two kinds"
    return offsets.get(type(norms[0]), 0.0), unsupported
