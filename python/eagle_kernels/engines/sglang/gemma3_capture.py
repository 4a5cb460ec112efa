"""Captured layers of Gemma 3 with their residual (sglang#39286).

SGLang 0.5.23 carries Gemma 3's residual beside the hidden states and captures the hidden states alone: the last
branch's output, and on CUDA what the next layer's in-place norm makes of it. The stream is read here where the next
layer, or the final norm, takes both in: round(hidden + residual), before either changes.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...ops import capture_hidden
from ..eligibility import log_once
from .capture import Slots, claim
from .hooks import LOGGER, Hook


class _Captured(list):
    """In place of the list that SGLang fills: `slots` is what `capture` packs it by."""

    slots: Slots | None = None


def _attach(result: None, model: Any, layer_ids: list[int] | None = None) -> None:
    """After Gemma3ForCausalLM.set_eagle3_layers_to_capture."""
    decoder = model.model
    if "_eagle_kernels_captured" in decoder.__dict__:  # a second call changes what is captured, not how
        return
    decoder.__dict__["_eagle_kernels_captured"] = None
    for boundary, reader in enumerate((*decoder.layers, decoder.norm)):
        reader.register_forward_pre_hook(_reads(decoder, boundary), with_kwargs=True)
    decoder.register_forward_pre_hook(_begin)
    decoder.register_forward_hook(_end)
    log_once(LOGGER, logging.INFO, "Gemma 3's captures include their residual (sglang#39286)")


def _begin(decoder: nn.Module, args: tuple) -> None:
    decoder.__dict__["_eagle_kernels_captured"] = _Captured()


def _end(decoder: nn.Module, args: tuple, output: Any) -> object:
    captured = decoder.__dict__["_eagle_kernels_captured"]
    decoder.__dict__["_eagle_kernels_captured"] = None
    return (output[0], captured) if captured else output


def _reads(decoder: Any, boundary: int) -> Callable:
    def read(reader: nn.Module, args: tuple, kwargs: dict) -> None:
        captured = decoder.__dict__["_eagle_kernels_captured"]
        if captured is None or boundary not in decoder.layers_to_capture:
            return
        # The final norm takes (hidden, residual) by position, a layer takes both by name.
        hidden, residual = args if args else (kwargs["hidden_states"], kwargs["residual"])
        if not captured:  # not in _begin, which runs before the hook that makes the slots
            captured.slots = claim()
        slot = None if captured.slots is None else captured.slots.store(hidden, residual)
        captured.append(_value(hidden, residual) if slot is None else slot)

    return read


def _value(hidden: Tensor, residual: Tensor | None) -> Tensor:
    return capture_hidden(hidden, residual, out=torch.empty_like(hidden))


_TARGET = "sglang.srt.models.gemma3_causal:Gemma3ForCausalLM.set_eagle3_layers_to_capture"
HOOKS = (Hook(_TARGET, "AFTER", _attach, ("self", "layer_ids")),)
