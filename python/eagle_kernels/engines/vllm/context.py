"""K and V of vLLM's DFlash drafters: hidden_norm and the projection of all draft layers in one op.

vLLM projects the context eagerly on every engine step, by a weight [L*2*n*d, H] that it stacks when it loads the
drafter. Replaced is `_project_context_kv` of a loaded drafter; k_norm, RoPE and the write into the cache stay vLLM's,
whose layout and dtype are the attention backend's.
"""

import logging
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...environment import EngineSwitches
from ..decision import Call, Decision
from ..eligibility import log_once
from ..gates import Target
from ..projection import EngineProjection
from . import LOGGER, normed_linear
from .registry import hook_models, when_loaded

ARCHITECTURES = ("DFlashDraftModel",)
_MODEL = "vllm.model_executor.models.qwen3_dflash:DFlashQwen3Model"
_BOTH = ("0.32.0", "0.33.0")
PROJECT = Target(
    f"{_MODEL}._project_context_kv",
    ("self", "context_states", "num_ctx", "num_layers", "num_kv_heads", "head_dim"),
    {"f10fe7949ed550be": _BOTH},
)
BUFFERS = Target(
    f"{_MODEL}._build_context_kv_buffers", ("self", "layers_attn", "has_bias"), {"b2455c0fd0aa3b44": _BOTH}
)

_switches = EngineSwitches(frozenset(), False, ())


def register(switches: EngineSwitches) -> None:
    global _switches
    # Ranks have the rows of their own heads, which no sum over ranks may mix.
    _switches = replace(switches, parts=switches.parts - {"row_parallel"})
    hook_models(ARCHITECTURES, hooked)


def hooked(drafter: type[nn.Module]) -> type[nn.Module]:
    """A subclass of the drafter whose context is projected by the op once its weights are loaded."""

    def fuse(loaded: Any, max_rows: int) -> None:
        put_in_where_faster(loaded.model, max_rows)

    return when_loaded(drafter, "K and V", lambda _, config: config.max_rows, fuse)


@dataclass(frozen=True, eq=False)
class _Stacked:
    """The buffers of a drafter's model as they are now: vLLM stacks them anew when weights are updated."""

    model: Any

    @property
    def weight(self) -> Tensor:
        return self.model._fused_kv_weight

    @property
    def bias(self) -> Tensor | None:
        return self.model._fused_kv_bias


@dataclass(frozen=True, eq=False)
class _HiddenNorm:
    model: Any

    @property
    def weight(self) -> Tensor:
        return self.model._hidden_norm_weight

    @property
    def variance_epsilon(self) -> float:
        return self.model._rms_norm_eps


class KeysAndValues:
    """Takes the place of `_project_context_kv` of a drafter's model."""

    def __init__(self, model: Any, name: str) -> None:
        self.model, self.name, self.own = model, name, model._project_context_kv
        self.projection = EngineProjection(_Stacked(model), 1, concat_norm=_HiddenNorm(model))
        self.decision = Decision()

    def __call__(self, states: Tensor, N: int, L: int, n: int, d: int) -> tuple[Tensor, Tensor]:
        if self.decision.runs_op(N):
            try:
                return self.project(states, N, L, n, d)
            except Exception as failure:
                self.decision = Decision()
                message = f"{self.name} stays with vLLM, norm_concat_linear failed: {failure!r}"
                log_once(LOGGER, logging.WARNING, message)
        return self.own(states, N, L, n, d)

    def project(self, states: Tensor, N: int, L: int, n: int, d: int) -> tuple[Tensor, Tensor]:
        """K and V, each [L, N, n, d], as vLLM's own method lays them out."""
        keys, values = self.projection(states).view(N, L, 2, n, d).permute(2, 1, 0, 3, 4).contiguous()
        return keys, values


@dataclass(frozen=True, eq=False)
class _Candidate(normed_linear.Candidate):
    """product: `_project_context_kv` of vLLM, on the states alone."""

    ours: Call

    def engine(self, x: Tensor) -> Tensor:
        keys, values = self.product(x)
        return torch.stack((keys, values)).permute(2, 1, 0, 3, 4).flatten(1)

    def calls(self) -> list[Call]:
        return [self.product, self.ours]


def put_in_where_faster(model: Any, max_rows: int) -> None:
    """Have the model's context run on the op, or log why not."""
    name = f"{type(model).__name__}._project_context_kv"
    for target in (PROJECT, BUFFERS):
        target.check(getattr(type(model), target.where.rpartition(".")[2]))
    unsupported = _unsupported_reason(model)
    if unsupported is not None:
        log_once(LOGGER, logging.INFO, f"{name} stays with vLLM: {unsupported}")
        return
    stage = KeysAndValues(model, name)
    sizes = (model._num_attn_layers, model._num_kv_heads, model._head_dim)

    def own(x: Tensor) -> Any:
        return stage.own(x, x.shape[0], *sizes)

    def ours(x: Tensor) -> Any:
        return stage.project(x, x.shape[0], *sizes)

    candidate = _Candidate(name, stage.projection, own, max_rows, False, _switches, ours)
    _, stage.decision = normed_linear.decide(candidate)
    figures = stage.decision.figures("vLLM")
    if stage.decision.never:
        because = f"norm_concat_linear is not faster, {figures}" if stage.decision.rows else figures
        log_once(LOGGER, logging.INFO, f"{name} stays with vLLM: {because}")
        return
    model.__dict__["_project_context_kv"] = stage
    where = "" if stage.decision.always else " where it is faster"
    log_once(LOGGER, logging.INFO, f"{name} runs norm_concat_linear{where}; {figures}")


def _unsupported_reason(model: Any) -> str | None:
    import vllm.envs

    if vllm.envs.VLLM_BATCH_INVARIANT:
        return "VLLM_BATCH_INVARIANT=1 wants vLLM's own batch-invariant kernels"
    if not hasattr(model, "_num_attn_layers"):
        return "vLLM has not stacked its weights"
    if model._fused_kv_weight is None:
        return "its K and V are quantized"
    return None
