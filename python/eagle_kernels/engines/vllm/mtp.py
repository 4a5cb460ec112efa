"""The input stage of vLLM's DeepSeek and Step-3.5 MTP layers: eh_proj(cat([enorm(embeds), hnorm(hidden)])).

vLLM's forward stays as it is, its masking of position 0 included (contested: vllm#33299). The norms hand their input
through, and eh_proj norms both halves of what it is given: cat + one op for 2 norms + cat + GEMM. The parameters stay
where they are, so loading and updating weights see no difference.
"""

import logging
from typing import Any

from torch import Tensor, nn

from ..eligibility import TargetError, linear_unsupported_reason, log_once
from ..projection import EngineProjection, try_warm_up
from . import LOGGER
from .combine import rms_norm_unsupported_reason
from .registry import hook_models, leaving_to_vllm

ARCHITECTURES = ("DeepSeekMTPModel", "Step3p5MTP")
_MODULES = ("vllm.model_executor.models.deepseek_mtp", "vllm.model_executor.models.step3p5_mtp")


def register() -> None:
    hook_models(ARCHITECTURES, hooked)


def hooked(predictor: type[nn.Module]) -> type[nn.Module]:
    """A subclass of the predictor whose layers are fused as soon as they exist."""
    if predictor.__module__ not in _MODULES:
        raise TargetError(f"it is of another plugin, {predictor.__module__}")

    def __init__(self: Any, *, vllm_config: Any, prefix: str = "") -> None:
        predictor.__init__(self, vllm_config=vllm_config, prefix=prefix)
        with leaving_to_vllm(f"{predictor.__name__}'s input stage"):
            for layer in self.model.layers.values():
                fuse(layer, vllm_config.scheduler_config.max_num_batched_tokens)

    return type(predictor.__name__, (predictor,), {"__init__": __init__, "__module__": __name__})


class PassThrough:
    """Mixed in before a norm whose work eh_proj does."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class NormedLinear(nn.Linear):
    """y = [norm(x[:, :H]), norm'(x[:, H:])] @ weight^T with the gains of the two norms."""

    projection: EngineProjection

    def forward(self, x: Tensor) -> Tensor:
        return self.projection(x)


def fuse(layer: Any, max_rows: int) -> None:
    """Give a layer with enorm, hnorm and eh_proj the fused stage, or log why not."""
    norms, eh_proj = (layer.enorm, layer.hnorm), layer.eh_proj
    offset, unsupported = _offset_and_unsupported_reason(norms, eh_proj)
    projection = EngineProjection(eh_proj, 2, chunk_norms=norms, norm_offset=offset)
    if unsupported is None:
        unsupported = try_warm_up(projection, eh_proj.in_features, eh_proj.weight.dtype, max_rows)
    name = f"{type(layer).__name__}.eh_proj"
    if unsupported is not None:
        log_once(LOGGER, logging.INFO, f"{name} stays with vLLM: {unsupported}")
        return
    for norm in norms:
        norm.__class__ = type(type(norm).__name__, (PassThrough, type(norm)), {})
    eh_proj.__class__ = NormedLinear
    eh_proj.projection = projection
    log_once(LOGGER, logging.INFO, f"{name} runs norm_concat_linear")


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
