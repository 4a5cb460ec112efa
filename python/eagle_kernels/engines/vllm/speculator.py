"""The zero-copy route of vLLM's V2 speculators: captured layers in, the engine's static buffer out, one kernel.

vLLM concatenates the captured layers, projects them, and copies the result into `self.hidden_states`, which the
drafter's CUDA graphs read. Here the projection writes its rows there itself. `propose` of vLLM then runs as it is, with
the buffer as the target's hidden states and no aux states: its copy is one of a tensor onto itself, which ATen skips.

The hooks go in when the drafter is loaded: by then the worker has imported the speculator it uses, and no other process
needs to.
"""

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..eligibility import TargetError, find_target, log_once
from . import LOGGER

_SPECULATORS = "vllm.v1.worker.gpu.spec_decode"
EAGLE = f"{_SPECULATORS}.eagle.speculator:EagleSpeculator.propose"
DFLASH = f"{_SPECULATORS}.dflash.speculator:DFlashSpeculator._store_hidden_states"
_PROPOSE = ("self", "input_batch", "attn_metadata", "slot_mappings", "last_hidden_states", "aux_hidden_states", ...)
_STORE = ("self", "num_tokens", "last_hidden_states", "aux_hidden_states", "num_graph_tokens")


def hook() -> None:
    """Hook the speculators this process has imported; V1 has none of them, and 0.32 no method for DFlash's."""
    for target, parameters, wrap in ((EAGLE, _PROPOSE, _propose), (DFLASH, _STORE, _store_hidden_states)):
        if target.partition(":")[0] not in sys.modules:
            continue
        try:
            _hook(target, parameters, wrap)
        except TargetError as failure:
            log_once(LOGGER, logging.WARNING, f"no zero-copy route: {failure}")


def _hook(target: str, parameters: tuple[object, ...], wrap: Callable) -> None:
    owner, name, method = find_target(target, parameters)
    if not hasattr(method, "eagle_kernels_original"):
        wrapped: Any = functools.wraps(method)(wrap(method))
        wrapped.eagle_kernels_original = method
        setattr(owner, name, wrapped)
        log_once(LOGGER, logging.INFO, f"{target.partition(':')[2]} takes the zero-copy route")


def _projection(speculator: Any) -> Callable | None:
    planned = getattr(speculator.model, "eagle_kernels_projection", None)
    return None if planned is None else planned()


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
        projection = _projection(self) if aux_hidden_states else None
        # Prefill context parallelism counts its rows after the projection.
        if projection is not None and getattr(self, "pcp_manager", None) is None:
            rows = self.hidden_states[: aux_hidden_states[0].shape[0]]
            last_hidden_states, aux_hidden_states = projection(aux_hidden_states, out=rows), None
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
        projection = _projection(self) if aux_hidden_states else None
        # Rows that a FULL graph projects itself are staged for it by vLLM.
        if projection is None or num_graph_tokens:
            return original(self, num_tokens, last_hidden_states, aux_hidden_states, num_graph_tokens)
        rows = self.hidden_states[:num_tokens]
        projected = projection([aux[:num_tokens] for aux in aux_hidden_states], out=rows)
        if projected is not rows:
            rows.copy_(projected)
        return None

    return _store_hidden_states
