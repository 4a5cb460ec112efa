"""The input stage of vLLM's DeepSeek and Step-3.5 MTP layers: eh_proj(cat([enorm(embeds), hnorm(hidden)])).

vLLM's forward stays as it is, its masking of position 0 included (contested: vllm#33299); see `normed_linear`.
"""

import logging
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

ARCHITECTURES = ("DeepSeekMTPModel", "Step3p5MTP")
_MODELS = "vllm.model_executor.models"
_FORWARD = ("self", "input_ids", "positions", "previous_hidden_states", "inputs_embeds", "spec_step_index")
# The layers' forward, by the module of the model.
TARGETS = {
    f"{_MODELS}.deepseek_mtp": Target(
        f"{_MODELS}.deepseek_mtp:DeepSeekMultiTokenPredictorLayer.forward",
        _FORWARD,
        {"82cbd3f91a7919ce": ("0.32.0", "0.33.0")},
    ),
    f"{_MODELS}.step3p5_mtp": Target(
        f"{_MODELS}.step3p5_mtp:Step3p5AMultiTokenPredictorLayer.forward",
        _FORWARD,
        {"da27bcb52de713a3": ("0.32.0", "0.33.0")},
    ),
}

_switches = EngineSwitches(frozenset(), False, ())


def register(switches: EngineSwitches) -> None:
    global _switches
    _switches = switches
    hook_models(ARCHITECTURES, hooked)


def hooked(predictor: type[nn.Module]) -> type[nn.Module]:
    """A subclass of the predictor whose layers are fused once their weights are loaded."""
    target = TARGETS.get(predictor.__module__)
    if target is None:
        raise TargetError(f"it is of another plugin, {predictor.__module__}")
    target.find()

    return when_loaded(predictor, "input stage", lambda _, config: config, _fuse_layers)


def _fuse_layers(predictor: Any, config: Config) -> None:
    for layer in predictor.model.layers.values():
        fuse(layer, config.max_rows, config.compiled)


def fuse(layer: Any, max_rows: int, compiled: bool) -> None:
    """Give a layer with enorm, hnorm and eh_proj the fused stage, or log why not."""
    norms, eh_proj = (layer.enorm, layer.hnorm), layer.eh_proj
    name = f"{type(layer).__name__}.eh_proj"
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
