"""The input stage of vLLM's DeepSeek and Step-3.5 MTP layers: eh_proj(cat([enorm(embeds), hnorm(hidden)])).

vLLM's forward stays as it is, its masking of position 0 included (contested: vllm#33299). The norms hand their input
through, and eh_proj norms both halves of what it is given: cat + one op for 2 norms + cat + GEMM. The parameters stay
where they are, so loading and updating weights see no difference.
"""

import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...environment import EngineSwitches
from ...plan import cpu_isa
from .. import decision
from ..decision import Decision
from ..eligibility import linear_unsupported_reason, log_once
from ..gates import Target, TargetError
from ..projection import EngineProjection, check_backend, probe
from . import LOGGER, replicas
from .combine import rms_norm_unsupported_reason
from .registry import hook_models, leaving_to_vllm
from .timing import agreed_seconds

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

_Base: Any = object  # vLLM's norms, which have no types here

fused: set[str] = set()  # the layers that run on the op; part of the key of vLLM's compile caches
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

    def __init__(self: Any, *, vllm_config: Any, prefix: str = "") -> None:
        predictor.__init__(self, vllm_config=vllm_config, prefix=prefix)
        mode = getattr(getattr(vllm_config, "compilation_config", None), "mode", None)
        self._eagle_kernels = (vllm_config.scheduler_config.max_num_batched_tokens, bool(mode))

    def process_weights_after_loading(self: Any) -> None:
        """vLLM's hook on a model: behind its layers' weights, before a forward is traced."""
        if hasattr(predictor, "process_weights_after_loading"):
            predictor.process_weights_after_loading(self)
        with leaving_to_vllm(f"{predictor.__name__}'s input stage"):
            for layer in self.model.layers.values():
                if not isinstance(layer.eh_proj, NormedLinear):
                    fuse(layer, *self._eagle_kernels)

    members = {"__init__": __init__, "process_weights_after_loading": process_weights_after_loading}
    return type(predictor.__name__, (predictor,), {**members, "__module__": __name__})


class PassThrough(_Base):
    """Mixed in before a norm whose work eh_proj does."""

    def forward(self, x: Tensor) -> Tensor:
        return x

    def engines_own(self, x: Tensor) -> Tensor:
        return super().forward(x)


class NormedLinear(nn.Linear):
    """y = [norm(x[:, :H]), norm'(x[:, H:])] @ weight^T with the gains of the two norms."""

    projection: EngineProjection

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return self.projection(x)
        try:
            return self.projection(x)
        except Exception as failure:
            log_once(LOGGER, logging.WARNING, f"eh_proj stays with vLLM, norm_concat_linear failed: {failure!r}")
            halves = zip(self.projection.chunk_norms, x.chunk(2, -1), strict=True)
            return super().forward(torch.cat([norm.engines_own(half) for norm, half in halves], -1))


def fuse(layer: Any, max_rows: int, compiled: bool) -> None:
    """Give a layer with enorm, hnorm and eh_proj the fused stage, or log why not."""
    norms, eh_proj = (layer.enorm, layer.hnorm), layer.eh_proj
    name = f"{type(layer).__name__}.eh_proj"
    offset, unsupported = _offset_and_unsupported_reason(norms, eh_proj)
    if unsupported is not None:
        log_once(LOGGER, logging.INFO, f"{name} stays with vLLM: {unsupported}")
        return
    projection = EngineProjection(eh_proj, 2, chunk_norms=norms, norm_offset=offset)
    projection, decided = _decide(name, projection, max_rows, compiled)
    figures = decided.figures("vLLM")
    # A graph is traced once for all row counts: it has the op, or it has not.
    if not decided.always:
        because = f"norm_concat_linear is not faster at all row counts, {figures}" if decided.rows else figures
        log_once(LOGGER, logging.INFO, f"{name} stays with vLLM: {because}")
        return
    for norm in norms:
        norm.__class__ = type(type(norm).__name__, (PassThrough, type(norm)), {})
    eh_proj.__class__ = NormedLinear
    eh_proj.projection = projection
    fused.add(name)
    log_once(LOGGER, logging.INFO, f"{name} runs norm_concat_linear; {figures}")


def _decide(
    name: str, projection: EngineProjection, max_rows: int, compiled: bool
) -> tuple[EngineProjection, Decision]:
    eh_proj, norms = projection.fc, projection.chunk_norms
    width, columns, weight = eh_proj.in_features, eh_proj.out_features, eh_proj.weight

    def engine(x: Tensor) -> Tensor:
        return F.linear(torch.cat([norm(half) for norm, half in zip(norms, x.chunk(2, -1), strict=True)], -1), weight)

    row_parallel = "row_parallel" in _switches.parts
    split = replicas.split(name, projection, weight, max_rows, engine) if row_parallel else None
    if split is not None:
        return split
    if _switches.force:
        probe(projection, width, weight, max_rows, engine)
        return projection, decision.FORCED
    if weight.device.type != "cpu":
        shipped = decision.on_gpu(weight.device, width, columns, weight.dtype)
        if not shipped.never:
            probe(projection, width, weight, max_rows, engine)
        return projection, shipped
    check_backend(projection.op, weight.device)
    rows = decision.rows_up_to(max_rows)

    def measure() -> list[list[float]]:
        probe(projection, width, weight, max_rows, engine)
        # Inductor's norms are one kernel with the cat. Timed as if they took nothing: it compiles for some seconds.
        theirs = (lambda x: F.linear(x, weight)) if compiled else engine
        return decision.seconds_per_call(
            [theirs, lambda x: projection(torch.cat(x.chunk(2, -1), -1))], rows, width, weight
        )

    key = (name, width, columns, weight.dtype, compiled, rows, torch.get_num_threads(), cpu_isa())
    seconds: Any = decision.once(key, lambda: agreed_seconds(measure, 2, len(rows)))
    theirs, ours = map(tuple, seconds)
    return projection, Decision(rows, theirs, ours)


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
