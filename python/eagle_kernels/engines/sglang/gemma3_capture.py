"""Captured layers of Gemma 3 with their residual (sglang#39286).

SGLang 0.5.23 carries Gemma 3's residual beside the hidden states and captures the hidden states alone: the last
branch's output, and on CUDA what the next layer's in-place norm makes of it. Here the stream is read at the input of
the next layer, or of the final norm, which gets both: round(hidden + residual), before either changes.
"""

import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..eligibility import log_once
from ..gates import Target
from .capture import Slots, claim
from .hooks import LOGGER, Hook


class _Captured(list):
    """Replaces the list that SGLang fills; `capture` packs it by its `slots`."""

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
    """In plain torch, as it has to be right where none of our kernels runs; torch rounds the sum once as well."""
    return hidden.clone() if residual is None else hidden + residual


_GEMMA3 = "sglang.srt.models.gemma3_causal"

# A release that captures the residual itself has another model forward; one whose layers add it, another layer forward.
HOOKS = (
    Hook(Target(f"{_GEMMA3}:Gemma3TextModel.forward", bodies={"4bb041a68e906925": ["0.5.23"]})),
    Hook(Target(f"{_GEMMA3}:Gemma3DecoderLayer.forward", bodies={"fe7b9d8ffffe5aeb": ["0.5.23"]})),
    Hook(Target(f"{_GEMMA3}:Gemma3ForCausalLM.set_eagle3_layers_to_capture", ("self", "layer_ids")), "AFTER", _attach),
)
