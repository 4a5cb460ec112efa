"""`combine_hidden_states` of vLLM's EAGLE-3 and DFlash drafters on the ops.

vLLM runs it eagerly on every engine step: 28 kernel launches for K = 3 with `fc_norm` (vLLM 0.33, default config).
Here: one op for norms and projection; in the V2 speculators (`speculator.py`) it also takes the captured layers as they
are and writes into the engine's static buffer.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...checks import DTYPES
from ...plan import Kernel, Problem, choose
from ..eligibility import TargetError, check_parameters, linear_unsupported_reason, log_once, norm_unsupported_reason
from ..projection import EngineProjection, try_warm_up
from . import LOGGER, speculator
from .registry import hook_models, leaving_to_vllm

EAGLE3 = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3MiniMaxM2ForCausalLM",
    "Eagle3Qwen2_5vlForCausalLM",
    "Eagle3Qwen3vlForCausalLM",
    "PEagleDraftModel",
    "PeagleLlamaForCausalLM",
    "Eagle3Qwen3ForCausalLM",
    "PeagleQwen3ForCausalLM",
    "Eagle3DeepseekV2ForCausalLM",
    "Eagle3DeepseekV3ForCausalLM",
)
DFLASH = ("DFlashDraftModel", "DFlashLagunaForCausalLM")

_parts: frozenset[str] = frozenset()


def register(parts: frozenset[str]) -> None:
    global _parts
    _parts = parts
    hook_models((*EAGLE3, *DFLASH), hooked)


def hooked(drafter: type[nn.Module]) -> type[nn.Module]:
    """A subclass of the drafter whose combine_hidden_states runs on the ops, where that method is vLLM's own."""
    method = getattr(drafter, "combine_hidden_states", None)
    if method is None:
        raise TargetError("combine_hidden_states is not there")
    check_parameters("combine_hidden_states", method, ["self", "hidden_states"])
    if (read := _READERS.get(method.__module__)) is None:
        raise TargetError(f"combine_hidden_states is that of {method.__module__}, not vLLM's own")
    members = {"__module__": __name__, "_read_modules": staticmethod(read)}
    return type(drafter.__name__, (FusedCombine, drafter), members)


# What vLLM has no types for here: the class that another one is mixed into, its model and its configs.
_Base: Any = object


class FusedCombine(_Base):
    """Mixed in before a drafter class of vLLM."""

    _projection: EngineProjection | None = None
    _projection_of: Any = None  # the fc that `_projection` was planned for

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        with leaving_to_vllm(f"{type(self).__name__}'s number of chunks"):
            _state_num_chunks(vllm_config.speculative_config.draft_model_config.hf_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        with leaving_to_vllm(f"{type(self).__name__}.model.fc"):
            self._max_rows = vllm_config.scheduler_config.max_num_batched_tokens
            _keep_dense_on_cpu(getattr(self.model, "fc", None))

    def process_weights_after_loading(self) -> None:
        """vLLM's hook on a model, once its layers have their final form."""
        if hasattr(super(), "process_weights_after_loading"):
            super().process_weights_after_loading()
        self.eagle_kernels_projection()
        if "zero_copy" in _parts:
            speculator.hook()

    def eagle_kernels_projection(self) -> EngineProjection | None:
        """The projection on the ops, planned once per fc: LoRA wraps fc after loading, and asks anew."""
        fc = getattr(self.model, "fc", None)
        if fc is not self._projection_of or fc is None:
            object.__setattr__(self, "_projection_of", fc)  # a plain attribute: a module's would register it again
            self._projection = None
            with leaving_to_vllm(f"{type(self).__name__}.combine_hidden_states"):
                self._projection = plan(self, self._read_modules)
        return self._projection

    def combine_hidden_states(self, hidden_states: Tensor) -> Tensor:
        projection = self.eagle_kernels_projection()
        if projection is None or "combine" not in _parts or not projection.has_norm:
            return super().combine_hidden_states(hidden_states)
        return projection(hidden_states)


def plan(drafter: Any, read: Callable) -> EngineProjection | None:
    """What runs this drafter's projection; None is vLLM's own path. Either way one line says so."""
    name = f"{type(drafter).__name__}.combine_hidden_states"
    projection, unsupported = _plan(drafter, read)
    if projection is None:
        log_once(LOGGER, logging.INFO, f"{name} stays with vLLM: {unsupported}")
        return None
    if projection.has_norm:
        norm = "chunk" if projection.chunk_norms else "concat"
        fc = "" if projection.fc_unsupported is None else f", its fc stays with vLLM: {projection.fc_unsupported}"
        log_once(LOGGER, logging.INFO, f"{name} runs {projection.op} (K={projection.num_chunks}, {norm} norm){fc}")
    else:
        log_once(
            LOGGER, logging.INFO, f"{name} stays with vLLM: it has no norm to fuse (the zero-copy route needs none)"
        )
    return projection


def _plan(drafter: Any, read: Callable) -> tuple[EngineProjection | None, str | None]:
    import vllm.envs
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    if vllm.envs.VLLM_BATCH_INVARIANT:
        return None, "VLLM_BATCH_INVARIANT=1 wants vLLM's own batch-invariant kernels"
    modules = read(drafter.model)
    if modules is None:
        return None, "it has no fc (use_aux_hidden_state is False)"
    fc = modules["fc"]
    base = getattr(fc, "base_layer", fc)  # of LoRA
    dtype = getattr(base, "params_dtype", None)
    if dtype not in DTYPES:
        return None, f"its fc is {dtype}"
    norms = [*modules.get("chunk_norms", ()), modules.get("concat_norm"), modules.get("post_norm")]
    for norm in filter(None, norms):
        if (unsupported := rms_norm_unsupported_reason(norm, {RMSNorm}, dtype)) is not None:
            return None, unsupported
    modules["fc_unsupported"] = linear_unsupported_reason(fc, {UnquantizedLinearMethod}, bias=True)
    if modules["fc_unsupported"] is not None and not any(norms[:-1]):
        return None, f"it has no norm, and its fc is vLLM's: {modules['fc_unsupported']}"
    projection = EngineProjection(**modules)
    unsupported = try_warm_up(projection, base.input_size, dtype, drafter._max_rows)
    return (projection, None) if unsupported is None else (None, unsupported)


def rms_norm_unsupported_reason(norm: Any, known: set[type], dtype: torch.dtype) -> str | None:
    """`norm_unsupported_reason`, and two cases of vLLM's own RMSNorm: a part of the row, no weight."""
    if getattr(norm, "variance_size_override", None) is not None:
        return f"its norm takes the variance of {norm.variance_size_override} columns only"
    if not getattr(norm, "has_weight", True):
        return "its norm has no weight"
    return norm_unsupported_reason(norm, known, dtype)


def _read_eagle3(model: Any) -> dict | None:
    if not getattr(model, "use_aux_hidden_state", True):
        return None
    # Qwen 3 calls the count num_aux_layers; DeepSeek has no norm before fc.
    num_chunks = model.num_aux_layers if hasattr(model, "num_aux_layers") else model.num_aux_hidden_states
    concat_norm = model.input_norm if getattr(model, "norm_before_fc", False) else None
    return {"fc": model.fc, "num_chunks": num_chunks, "concat_norm": concat_norm, "chunk_norms": model.fc_norm or ()}


def _read_dflash(model: Any) -> dict | None:
    return {"fc": model.fc, "num_chunks": None} if model.use_aux_hidden_state else None


def _read_laguna(model: Any) -> dict:
    chunk_norms = model.aux_hidden_norms
    return {"fc": model.fc, "num_chunks": len(chunk_norms), "chunk_norms": chunk_norms, "post_norm": model.hidden_norm}


_MODELS = "vllm.model_executor.models"
_READERS = {
    f"{_MODELS}.llama_eagle3": _read_eagle3,
    f"{_MODELS}.qwen3_eagle3": _read_eagle3,
    f"{_MODELS}.deepseek_eagle3": _read_eagle3,
    f"{_MODELS}.qwen3_dflash": _read_dflash,
    f"{_MODELS}.laguna_dflash": _read_laguna,
}


def _state_num_chunks(config: Any) -> None:
    """vLLM's Llama and DeepSeek drafters size fc for 3 chunks where K is in the top-level layer ids only, as the
    speculators format writes them, and die on any other K (vllm#54526; vllm#54598 is not merged)."""
    nested = getattr(config, "eagle_config", None) or {}
    layer_ids = getattr(config, "eagle_aux_hidden_state_layer_ids", None)
    stated = getattr(config, "num_aux_hidden_states", None) or nested.get("eagle_aux_hidden_state_layer_ids")
    if layer_ids and not stated:
        config.num_aux_hidden_states = len(layer_ids)


def _keep_dense_on_cpu(fc: Any) -> None:
    """Ask vLLM's CPU backend not to pack fc's weight away where the fused kernel would read it dense."""
    from vllm.platforms import current_platform

    if fc is None or not current_platform.is_cpu() or getattr(fc, "params_dtype", None) not in DTYPES:
        return
    # 32 rows: a few requests of a few draft tokens each.
    problem = Problem("norm_concat_linear", torch.device("cpu"), rows=32, dtype=fc.params_dtype)
    if choose(*problem).kernel is Kernel.FUSED:
        fc._cpu_skip_gemm_dispatch = True
