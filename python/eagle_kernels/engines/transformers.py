"""Hugging Face transformers: captured layers of a running model go straight into an `AuxHiddenStates` buffer."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .. import checks
from ..buffers import AuxHiddenStates, CaptureStep
from ..models import find_family

OP = "transformers.capture"

_lock = threading.Lock()
_active = 0  # captures, in all threads
_stance: Any = None  # torch.compiler's, while there are any


@contextlib.contextmanager
def capture(
    model: Any, boundaries: Sequence[int], buffer: AuxHiddenStates, *, row: int = 0
) -> Iterator[AuxHiddenStates]:
    """While active, every forward of `model` writes boundary `boundaries[k]` into slot k of `buffer`.

    Boundary 0 is the embedding output, boundary i the residual stream after layers 0..i-1, boundary N the stream after
    the last layer and before the final norm (`output_hidden_states` gives that entry only after the norm). The rows of
    a [B, S, H] batch follow each other; of residual streams, [B, S, N, H] (DeepSeek-V4), their rounded mean is written.
    The hooks are removed on exit, also on an exception. While active, whatever torch.compile has compiled runs eagerly,
    in every thread: a graph compiled earlier has no hooks, and Dynamo would not notice them. (A capture inside of a
    compiled function leaves the graphs of what that function calls: then no boundary is reached, which is an error.)

    Args:
        model: a decoder of transformers, or a model that has one (`get_decoder().layers`).
        boundaries: K different ones, as `capture_layers` returns them.
        buffer: num_chunks = K, hidden_size = H.
        row: where the rows of a forward begin, for a prefill in several chunks.

    Raises:
        TypeError: the model has no decoder layers, a boundary is no int, or the buffer is no AuxHiddenStates.
        ValueError: a boundary outside [0, N] or there twice, or another number of boundaries than slots: no hook is
            set. In a forward: more rows than the buffer has, before anything is written; or fewer rows than at the
            first boundary (Gemma 4 drops prompt rows in front of its KV-shared layers when logits_to_keep is set); or
            states of another form, such as the four predictions that Gemma 3n keeps of each.
        RuntimeError: in a forward, where a captured layer ran twice or not at all.
    """
    layers = _layers(model)
    boundaries = _checked_boundaries(boundaries, len(layers), buffer)
    decoder = model.get_decoder()
    forward = _Forward(boundaries, buffer, row, _num_streams(decoder))
    with contextlib.ExitStack() as hooks:
        # The stance may not be changed in a compiled function. Such a function is left here for a moment.
        torch.compiler.disable(_count_captures)(1)
        hooks.callback(torch.compiler.disable(_count_captures), -1)
        hooks.callback(decoder.register_forward_pre_hook(forward.begin).remove)
        for k, boundary in enumerate(boundaries):
            hooks.callback(_attach(layers, boundary, k, forward).remove)
        hooks.callback(decoder.register_forward_hook(forward.end).remove)
        yield buffer


def _count_captures(change: int) -> None:
    """While there is a capture compiled code runs eagerly. The stance is the process's, and restored to what it was:
    captures that overlap, in threads or in one, share one."""
    global _active, _stance
    with _lock:
        if _active == 0:
            _stance = torch.compiler.set_stance("force_eager")
        _active += change
        if _active == 0:
            _stance.__exit__(None, None, None)


class _Forward:
    """The captures of the current forward; its number of rows is known at the first boundary."""

    def __init__(self, boundaries: Sequence[int], buffer: AuxHiddenStates, row: int, num_streams: int | None) -> None:
        self.boundaries = boundaries
        self.buffer = buffer
        self.row = row
        self.num_streams = num_streams
        self.step: CaptureStep | None = None

    def begin(self, *_: object) -> None:
        self.step = None

    def write(self, k: int, hidden: Tensor) -> None:
        columns = hidden.shape[2:] if hidden.dim() > 3 else hidden.shape[-1:]
        if len(columns) > 1 and columns[:-1] != (self.num_streams,):
            expected = "[B, S, H]" if self.num_streams is None else f"[B, S, H] or [B, S, {self.num_streams}, H]"
            raise checks.shape_error(OP, f"boundary {self.boundaries[k]}", hidden, expected)
        rows = hidden.shape[: -len(columns)].numel()
        if self.step is None:
            self.step = self.buffer.step(rows, row=self.row)
        if rows != self.step.rows:
            got, expected = f"boundary {self.boundaries[k]} has {rows} rows", f"{self.step.rows}"
            because = "an earlier boundary has that many (logits_to_keep cuts rows in front of KV-shared layers)"
            raise checks.error(ValueError, OP, got, expected, because)
        for piece in _rows(hidden, columns):
            self.step.capture(k, piece)

    def end(self, *_: object) -> None:
        if self.step is None:
            raise checks.error(RuntimeError, OP, "no boundary was reached", f"{list(self.boundaries)} in each forward")
        self.step.finish()


def _layers(model: Any) -> nn.ModuleList:
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    layers = getattr(decoder, "layers", None)
    if layers is None:
        expected = "a transformers model whose get_decoder() has layers"
        raise checks.error(TypeError, OP, f"model is a {type(model).__name__}", expected)
    return layers


def _checked_boundaries(boundaries: Any, num_layers: int, buffer: Any) -> list[int]:
    checks.check_type(OP, "buffer", buffer, AuxHiddenStates, "an AuxHiddenStates")
    boundaries = checks.check_sequence(OP, "boundaries", boundaries, "a sequence of ints")
    boundaries = [checks.check_int(OP, f"boundaries[{k}]", boundary) for k, boundary in enumerate(boundaries)]
    got = f"boundaries is {boundaries}"
    if len(boundaries) != buffer.num_chunks:
        because = "the buffer has that many slots"
        raise checks.error(ValueError, OP, got, f"{buffer.num_chunks} of them", because)
    if len(set(boundaries)) < len(boundaries):
        raise checks.error(ValueError, OP, got, "each boundary once", "two slots would hold the same states")
    for boundary in boundaries:
        if not 0 <= boundary <= num_layers:
            raise checks.error(ValueError, OP, f"boundary is {boundary}", f"one in [0, {num_layers}]")
    return boundaries


def _attach(layers: nn.ModuleList, boundary: int, k: int, forward: _Forward) -> RemovableHandle:
    # A boundary is read at the input of the next layer; only the last boundary has no next layer.
    if boundary < len(layers):
        return layers[boundary].register_forward_pre_hook(
            lambda module, args, kwargs: forward.write(k, args[0] if args else kwargs["hidden_states"]),
            with_kwargs=True,
        )
    return layers[-1].register_forward_hook(
        lambda module, args, output: forward.write(k, output[0] if isinstance(output, tuple) else output)
    )


def _num_streams(decoder: Any) -> int | None:
    """The residual streams (mHC) that a decoder's layers hand on side by side; None where the family has none."""
    config = getattr(decoder, "config", None)
    family = find_family(getattr(config, "model_type", ""))
    field = None if family is None or family.mtp is None else family.mtp.streams_field
    return None if field is None else getattr(config, field, None)


def _rows(hidden: Tensor, columns: torch.Size) -> list[Tensor]:
    """[B, S, H] as [B*S, H], or as B of [S, H] where no view has all rows (a batch expanded or cut along S)."""
    try:
        return [hidden.view(-1, *columns)]
    except RuntimeError:
        return list(hidden.unbind())
