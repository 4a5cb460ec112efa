"""The context of SGLang's DFlash and DSpark drafters on one op: hidden_norm(fc(cat of K captured layers)).

Laguna norms each captured layer in front of fc. In DeepSeek V4 fc is main_proj and hidden_norm is main_norm. The op
replaces `project_target_hidden` of a loaded drafter, where that method is SGLang's own. K and V of the draft layers
stay with SGLang: after hidden_norm they are a GEMM without a norm, and on a GPU one Triton kernel over all layers, on a
CPU each layer's own modules, into a pool of the attention backend's layout and dtype.
"""

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..decision import Decision
from ..eligibility import log_once
from ..gates import Target
from ..projection import EngineProjection
from .hooks import LOGGER, Hook, leaving_to_sglang
from .stage import after_loading, decide
from .unsupported import (
    activation_dtype,
    determinism_unsupported_reason,
    linear_unsupported_reason,
    read_by_op,
    rms_norm_unsupported_reason,
)

_METHOD = "project_target_hidden"
_MODELS = "sglang.srt.models"


class _Modules(NamedTuple):
    """What a drafter's `project_target_hidden` reads."""

    fc: Any
    hidden_norm: Any
    num_chunks: int
    chunk_norms: Sequence[Any] = ()


def _dflash(drafter: Any) -> _Modules:
    norms = getattr(drafter, "aux_hidden_norms", ())
    return _Modules(drafter.fc, drafter.hidden_norm, drafter.num_context_features, norms)


def _deepseek_v4(drafter: Any) -> _Modules:
    stage = drafter.stages[0]
    return _Modules(stage.main_proj, stage.main_norm, drafter.num_target_features)


def _target(owner: str, body: str, states: str = "target_hidden") -> Target:
    return Target(f"{_MODELS}.{owner}.{_METHOD}", ("self", states), {body: ["0.5.23"]})


# Who defines the method, and how its modules are read.
KNOWN = (
    (_target("dflash:DFlashDraftModel", "2d895ff21d758dc3"), _dflash),
    (_target("dflash:DFlashLagunaForCausalLM", "ab06d200d43b1fa2"), _dflash),
    # Ranks that shard fc gather its columns in front of the norm; on one rank the gather does nothing.
    (_target("dspark_minimax:MiniMaxDraftBackbone", "c358ae52aa4b649d"), _dflash),
    (_target("deepseek_v4_dspark:DeepseekV4ForCausalLMDSpark", "13afd54c7d4150e7", "main_hidden"), _deepseek_v4),
)


class Context:
    """Replaces a drafter's `project_target_hidden`."""

    def __init__(self, drafter: Any, name: str, read: Callable[[Any], _Modules], norm_offset: float) -> None:
        self.drafter, self.name, self.read = drafter, name, read
        self.own = getattr(drafter, _METHOD)
        self.fc, norm, num_chunks, norms = read(drafter)
        self.projection = EngineProjection(
            read_by_op(self.fc), num_chunks, chunk_norms=norms, post_norm=norm, norm_offset=norm_offset
        )

    def put_in_where_faster(self) -> None:
        """Decide, log it, and put it in where the op runs at any row count."""
        self.projection, self.decision = decide(self.name, self.projection, self.own)
        if not self.decision.never:
            setattr(self.drafter, _METHOD, self)

    def __call__(self, target_hidden: Tensor) -> Tensor:
        # SGLang casts or refuses another dtype or width; LoRA runs an fc that it has wrapped since.
        fits = target_hidden.dtype == activation_dtype(self.fc)
        fits = fits and target_hidden.shape[1:] == self.projection.fc.weight.shape[1:]
        if fits and self.read(self.drafter).fc is self.fc and self.decision.runs_op(target_hidden.shape[0]):
            try:
                return self.projection(target_hidden)
            except Exception as failure:
                self.decision = Decision()
                message = f"{self.name} stays with SGLang, {self.projection.op} failed: {failure!r}"
                log_once(LOGGER, logging.WARNING, message)
        return self.own(target_hidden)


def prepare(drafter: Any) -> None:
    """Put the op into a drafter that has been loaded, or log why not."""
    method = getattr(type(drafter), _METHOD, None)
    if method is None or _METHOD in drafter.__dict__:  # replaced already: its weights are loaded again
        return
    from sglang.srt.layers.layernorm import GemmaRMSNorm

    name = f"{type(drafter).__name__}.{_METHOD}"
    read = _read_of(method)
    unsupported = f"it is that of {method.__module__}" if read is None else determinism_unsupported_reason()
    if read is None or unsupported is not None:
        log_once(LOGGER, logging.INFO, f"{name} stays with SGLang: {unsupported}")
        return
    fc, hidden_norm, _, chunk_norms = read(drafter)
    gemma = type(hidden_norm) is GemmaRMSNorm
    unsupported = linear_unsupported_reason(fc, codes=True)
    for norm in (hidden_norm, *chunk_norms):
        unsupported = unsupported or rms_norm_unsupported_reason(norm, activation_dtype(fc), gemma=gemma)
    if unsupported is not None:
        log_once(LOGGER, logging.INFO, f"{name} stays with SGLang: {unsupported}")
        return
    Context(drafter, name, read, float(gemma)).put_in_where_faster()


def _read_of(method: Any) -> Callable[[Any], _Modules] | None:
    """None for a method that is not SGLang's; a module that is not imported has built no drafter."""
    for target, read in KNOWN:
        owner, _, _ = target.where.partition(":")[2].rpartition(".")
        defined = getattr(sys.modules.get(target.module), owner, None)
        if defined is not None and defined.__dict__.get(_METHOD) is method:
            return read
    return None


def _prepare(module: nn.Module) -> None:
    with leaving_to_sglang(f"{type(module).__name__}.{_METHOD}"):
        prepare(module)


HOOKS = (*(Hook(target) for target, _ in KNOWN), after_loading(_prepare))
