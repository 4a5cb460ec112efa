"""Hugging Face transformers: captured layers of a running model go straight into an `AuxHiddenStates` buffer."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .. import checks
from ..buffers import AuxHiddenStates, CaptureStep

OP = "transformers.capture"


@contextlib.contextmanager
def capture(
    model: Any, boundaries: Sequence[int], buffer: AuxHiddenStates, *, row: int = 0
) -> Iterator[AuxHiddenStates]:
    """While active, every forward of `model` writes boundary `boundaries[k]` into slot k of `buffer`.

    Boundary 0 is the embedding output, boundary i the residual stream after layers 0..i-1, boundary N the stream after
    the last layer and before the final norm (`output_hidden_states` gives that entry only after the norm). The rows of
    a [B, S, H] batch follow each other. The hooks are removed on exit, also on an exception.

    Args:
        model: a decoder of transformers, or a model that has one (`get_decoder().layers`).
        boundaries: K different ones, as `capture_layers` returns them.
        buffer: num_chunks = K, hidden_size = H.
        row: where the rows of a forward begin, for a prefill in several chunks.

    Raises:
        TypeError: the model has no decoder layers, a boundary is no int, or the buffer is no AuxHiddenStates.
        ValueError: a boundary outside [0, N] or there twice, or another number of boundaries than slots: no hook is
            set. In a forward: more rows than the buffer has, before anything is written; or fewer rows than at the
            first boundary (Gemma 4 drops prompt rows in front of its KV-shared layers when logits_to_keep is set).
        RuntimeError: in a forward, where a captured layer ran twice or not at all.
    """
    layers = _layers(model)
    boundaries = _checked_boundaries(boundaries, len(layers), buffer)
    forward = _Forward(boundaries, buffer, row)
    decoder = model.get_decoder()
    with contextlib.ExitStack() as hooks:
        hooks.callback(decoder.register_forward_pre_hook(forward.begin).remove)
        for k, boundary in enumerate(boundaries):
            hooks.callback(_attach(layers, boundary, k, forward).remove)
        hooks.callback(decoder.register_forward_hook(forward.end).remove)
        yield buffer


class _Forward:
    """The captures of the current forward; its number of rows is known at the first boundary."""

    def __init__(self, boundaries: Sequence[int], buffer: AuxHiddenStates, row: int) -> None:
        self.boundaries = boundaries
        self.buffer = buffer
        self.row = row
        self.step: CaptureStep | None = None

    def begin(self, *_: object) -> None:
        self.step = None

    def write(self, k: int, hidden: Tensor) -> None:
        rows = hidden.shape[:-1].numel()
        if self.step is None:
            self.step = self.buffer.step(rows, row=self.row)
        if rows != self.step.rows:
            got, expected = f"boundary {self.boundaries[k]} has {rows} rows", f"{self.step.rows}"
            because = "an earlier boundary has that many (logits_to_keep cuts rows in front of KV-shared layers)"
            raise checks.error(ValueError, OP, got, expected, because)
        for piece in _rows(hidden):
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


def _rows(hidden: Tensor) -> list[Tensor]:
    """[B, S, H] as [B*S, H], or as B of [S, H] where no view has all rows (a batch expanded or cut along S)."""
    try:
        return [hidden.view(-1, hidden.shape[-1])]
    except RuntimeError:
        return list(hidden.unbind())
