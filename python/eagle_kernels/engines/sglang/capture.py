"""Captured layers of an EAGLE-3 target straight into one packed [T, K*H] tensor.

SGLang clones each captured layer into a list and concatenates the list: every value is written twice and read twice,
and each decode graph keeps its own result. Here a capture is one write into a slot of the packed tensor, which the list
then returns instead of concatenating. In decode graphs that tensor is the runner's static buffer, one for all graph
sizes, which SGLang 0.5.23 has for DFlash only. EAGLE-3 may share it as well, since its worker extends the drafter with
these states before the target runs again.
"""

import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...checks import DTYPES
from ...ops import capture_hidden
from ..eligibility import log_once
from ..gates import Target
from ..projection import check_backend
from .hooks import LOGGER, Hook

_SETUP = "sglang.srt.model_executor.model_runner_components"


class Slots:
    """The K slots of one forward. `store` writes the next one; whatever does not fit stays with SGLang's list."""

    def __init__(self, owner: nn.Module, num_chunks: int, graph_buffer: Tensor | None) -> None:
        self.owner = owner
        self.num_chunks = num_chunks
        self.buffer: Any = graph_buffer  # a tensor from the first `store` on
        self.taken = 0
        self.broken = False

    def store(self, hidden: Tensor, residual: Tensor | None = None) -> Tensor | None:
        """Slot k with round(hidden + residual) in it, or None."""
        if self.taken == 0:
            self.buffer = fitting(self.buffer, hidden, self.num_chunks)
        H = hidden.shape[-1]
        fits = hidden.dim() == 2 and self.taken < self.num_chunks and hidden.dtype in DTYPES and hidden.stride(-1) == 1
        if self.broken or not fits or (*hidden.shape[:-1], self.num_chunks * H) != tuple(self.buffer.shape):
            self.broken = True
            return None
        slot = self.buffer[:, self.taken * H : (self.taken + 1) * H]
        try:
            captured = capture_hidden(hidden, residual, out=slot)
        except Exception as failure:  # of a kernel: the engine must serve on
            _give_up(self.owner, failure)
            self.broken = True
            return None
        self.taken += 1
        return captured

    def packed(self) -> Tensor | None:
        return self.buffer if self.taken == self.num_chunks and not self.broken else None


def fitting(buffer: Tensor | None, like: Tensor, num_chunks: int) -> Tensor:
    """The graph's buffer where it has the captures' rows and dtype, else a new one."""
    shape = (*like.shape[:-1], num_chunks * like.shape[-1])
    if (
        buffer is not None
        and tuple(buffer.shape) == shape
        and (buffer.dtype, buffer.device) == (like.dtype, like.device)
    ):
        return buffer
    return like.new_empty(shape)


_slots: Slots | None = None  # those of the running forward, until a list takes them
_failed: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # of whose captures one has failed: SGLang's list has all since
_widths: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()  # K*H of each watched target


def _give_up(owner: nn.Module, failure: Exception) -> None:
    _failed.add(owner)
    name = f"{type(owner).__name__}'s capture"
    log_once(LOGGER, logging.WARNING, f"{name} stays with SGLang from now on, capture_hidden failed: {failure!r}")


def claim() -> Slots | None:
    """The running forward's slots, once."""
    global _slots
    slots, _slots = _slots, None
    return slots


def _watch(result: None, *, model: Any, eagle_use_aux_hidden_state: bool, **kwargs: object) -> None:
    """After SGLang told a target what to capture: give each of its forwards slots for that."""
    owners: list[Any] = [module for module in model.modules() if module.__dict__.get("layers_to_capture")]
    if not eagle_use_aux_hidden_state or model in _widths:
        return
    unsupported = _unsupported_reason(owners)
    if unsupported is not None:
        log_once(LOGGER, logging.INFO, f"capture stays with SGLang: {unsupported}")
        return
    check_backend("capture_hidden", next((weight.device for weight in model.parameters()), torch.device("cpu")))
    (owner,) = owners
    num_chunks = len(owner.layers_to_capture)
    _widths[model] = num_chunks * owner.config.hidden_size

    def begin(module: nn.Module, args: tuple, kwargs: dict) -> None:
        global _slots
        if owner in _failed:
            return
        batch = next((arg for arg in (*args, *kwargs.values()) if hasattr(arg, "aux_hidden_states_buffer")), None)
        _slots = Slots(owner, num_chunks, getattr(batch, "aux_hidden_states_buffer", None))

    def end(*_: object) -> None:
        claim()

    owner.register_forward_pre_hook(begin, with_kwargs=True)
    owner.register_forward_hook(end, always_call=True)
    boundaries = sorted(owner.layers_to_capture)
    log_once(LOGGER, logging.INFO, f"{type(owner).__name__} captures boundaries {boundaries} into one packed tensor")


def _unsupported_reason(owners: list[Any]) -> str | None:
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend
    from sglang.srt.runtime_context import get_flags

    if len(owners) != 1:
        return f"{len(owners)} modules have layers_to_capture"
    if check_cuda_graph_backend(Phase.PREFILL, Backend.TC_PIECEWISE):
        return "prefill graphs are piecewise, and torch.compile would trace the hooks"
    if get_flags().capture.enable_torch_compile:
        return "torch.compile fuses SGLang's own copies, and would trace the hooks"
    if not hasattr(getattr(owners[0], "config", None), "hidden_size"):
        return f"{type(owners[0]).__name__}.config has no hidden_size"
    return None


def _packed_list(original: Any) -> type:
    class PackedAuxHiddenStates(original):
        """SGLang's AuxHiddenStateList whose entries are slots of one packed tensor, as long as they fit."""

        def __init__(self, *args: object) -> None:
            super().__init__(*args)
            self.slots = claim()

        def capture(self, hidden: Tensor, *, owned: bool = False) -> None:
            slot = None if self.slots is None else self.slots.store(hidden)
            if slot is None:
                super().capture(hidden, owned=owned)
            else:
                list.append(self, slot)

        def append(self, hidden: Tensor) -> None:
            slot = None if self.slots is None else self.slots.store(hidden)
            list.append(self, hidden if slot is None else slot)

    return PackedAuxHiddenStates


def _pack(original: Callable, aux_hidden_states: Any) -> Tensor:
    slots = getattr(aux_hidden_states, "slots", None)
    packed = None if slots is None or len(aux_hidden_states) != slots.num_chunks else slots.packed()
    return original(aux_hidden_states) if packed is None else packed


def _packer_slot(original: Callable, packer: Any, like: Tensor) -> Tensor:
    """DeepSeek and MiMo pack by themselves; in a decode graph they get the graph's static buffer."""
    if packer._feature_size is None and packer._buffer is None and (slots := claim()) is not None:
        packer._buffer = fitting(slots.buffer, like, packer._num_captures)
    return original(packer, like)


def _width(original: Callable, *, model: nn.Module, spec_algorithm: Any, is_draft_worker: bool) -> int:
    """The width of the static buffer that the decode graph runner allocates: 0 for none."""
    width = original(model=model, spec_algorithm=spec_algorithm, is_draft_worker=is_draft_worker)
    return width or (0 if is_draft_worker or not spec_algorithm.is_eagle3() else _widths.get(model, 0))


_AUX = "sglang.srt.layers.aux_hidden_states"
_CONFIGURE = f"{_SETUP}.attention_backend_setup:configure_aux_hidden_state_capture"
_RESOLVE_WIDTH = f"{_SETUP}.misc_utils:resolve_aux_hidden_states_width"
_WIDTH_PARAMETERS = ("model", "spec_algorithm", "is_draft_worker")

HOOKS = (
    Hook(Target(_CONFIGURE, ("model", "eagle_use_aux_hidden_state", ...)), "AFTER", _watch),
    Hook(Target(_RESOLVE_WIDTH, _WIDTH_PARAMETERS, {"a7d747670e9b1257": ["0.5.23"]}), "AROUND", _width),
    Hook(Target(f"{_AUX}:AuxHiddenStateList", bodies={"8221245a02b1a132": ["0.5.23"]}), "REPLACE", _packed_list),
    Hook(Target(f"{_AUX}:AuxHiddenStatePacker", bodies={"e0a6fda6a9dd31e8": ["0.5.23"]})),
    Hook(Target(f"{_AUX}:AuxHiddenStatePacker.slot", ("self", "like")), "AROUND", _packer_slot),
    Hook(
        Target(f"{_AUX}:pack_aux_hidden_states", ("aux_hidden_states",), {"7b2d31ae70d4da46": ["0.5.23"]}),
        "AROUND",
        _pack,
    ),
)
