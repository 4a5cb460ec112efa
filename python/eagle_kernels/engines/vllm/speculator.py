"""The zero-copy route of vLLM's V2 speculators: captured layers in, the engine's static buffer out, one kernel.

vLLM concatenates the captured layers, projects them, and copies the result into `self.hidden_states`, which the
drafter's CUDA graphs read. Here the projection writes its rows there itself. `propose` of vLLM then runs as it is, with
the buffer as the target's hidden states and no aux states: it copies a tensor onto itself, which ATen skips.

The hooks go in when the drafter is loaded: by then the worker has imported the speculator it uses, and no other process
needs to.
"""

import functools
import itertools
import logging
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..eligibility import log_once
from ..gates import Target, TargetError, resolve
from . import LOGGER, TESTED_VERSIONS
from .registry import ONLY_032, ONLY_033

_SPECULATORS = "vllm.v1.worker.gpu.spec_decode"
_PROPOSE = ("self", "input_batch", "attn_metadata", "slot_mappings", "last_hidden_states", "aux_hidden_states", ...)
_STORE = ("self", "num_tokens", "last_hidden_states", "aux_hidden_states", "num_graph_tokens")
# With no aux states `propose` copies the states it is given into `self.hidden_states`, and reads them nowhere else.
EAGLE = Target(
    f"{_SPECULATORS}.eagle.speculator:EagleSpeculator.propose",
    _PROPOSE,
    {"091c2eaedc335787": ONLY_032, "3b07390161d358ad": ONLY_033},
)
DFLASH = Target(
    f"{_SPECULATORS}.dflash.speculator:DFlashSpeculator._store_hidden_states",
    _STORE,
    {"dcffd6537bec434c": ONLY_033},
)


def hook() -> None:
    """Hook the speculators this process has imported; V1 imports none, and DFlash's of 0.32 lacks the method."""
    version = getattr(sys.modules.get("vllm"), "__version__", "").partition("+")[0]
    for target, wrap in ((EAGLE, _propose), (DFLASH, _store_hidden_states)):
        lacks_it = version in TESTED_VERSIONS and version not in itertools.chain(*target.bodies.values())
        if target.module not in sys.modules or lacks_it:
            continue
        try:
            _hook(target, wrap)
        except TargetError as failure:
            log_once(LOGGER, logging.WARNING, f"no zero-copy route: {failure}")


def _hook(target: Target, wrap: Callable) -> None:
    owner, name, method = resolve(target.where)
    if hasattr(method, "eagle_kernels_original"):
        return
    target.check(method)
    wrapped: Any = functools.wraps(method)(wrap(method))
    wrapped.eagle_kernels_original = method
    setattr(owner, name, wrapped)
    log_once(LOGGER, logging.INFO, f"{target.where.partition(':')[2]} takes the zero-copy route")


def _projected(speculator: Any, chunks: list[Tensor], out: Tensor) -> Tensor | None:
    """The projection of the captured layers, in `out` where fc's weight is read; None where vLLM runs it."""
    drafter = speculator.model
    projection = drafter.eagle_kernels_projection() if hasattr(drafter, "eagle_kernels_projection") else None
    if projection is None:
        return None
    try:
        return projection(chunks, out=out)
    except Exception as failure:
        drafter.eagle_kernels_give_up(failure)
        return None


def _propose(original: Callable) -> Callable:
    def propose(
        self: Any,
        input_batch: object,
        attn_metadata: object,
        slot_mappings: object,
        last_hidden_states: Tensor,
        aux_hidden_states: Any,  # list[Tensor] | None
        *args: object,
        **kwargs: object,
    ) -> Tensor:
        # Prefill context parallelism counts its rows after the projection.
        if aux_hidden_states and getattr(self, "pcp_manager", None) is None:
            rows = self.hidden_states[: aux_hidden_states[0].shape[0]]
            projected = _projected(self, aux_hidden_states, rows)
            if projected is not None:
                last_hidden_states, aux_hidden_states = projected, None
        return original(
            self, input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states, *args, **kwargs
        )

    return propose


def _store_hidden_states(original: Callable) -> Callable:
    def _store_hidden_states(
        self: Any,
        num_tokens: int,
        last_hidden_states: Tensor,
        aux_hidden_states: Any,  # list[Tensor] | None
        num_graph_tokens: int = 0,
    ) -> None:
        projected = None
        # Rows that a FULL graph projects itself are staged for it by vLLM.
        if aux_hidden_states and not num_graph_tokens:
            rows = self.hidden_states[:num_tokens]
            projected = _projected(self, [aux[:num_tokens] for aux in aux_hidden_states], rows)
        if projected is None:
            original(self, num_tokens, last_hidden_states, aux_hidden_states, num_graph_tokens)
        elif projected is not rows:
            rows.copy_(projected)

    return _store_hidden_states
