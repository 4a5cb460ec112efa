"""Hugging Face transformers: captured layers of a running model go straight into an `AuxHiddenStates` buffer."""

import contextlib
from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from .. import checks
from ..buffers import AuxHiddenStates


@contextlib.contextmanager
def capture(model: nn.Module, boundaries: Sequence[int], buffer: AuxHiddenStates) -> Iterator[AuxHiddenStates]:
    """While active, every forward of `model` writes boundary `boundaries[k]` into slot k of `buffer`.

    Boundary 0 is the embedding output, boundary i the residual stream after layers 0..i-1, boundary N the stream after
    the last layer and before the final norm (`output_hidden_states` gives that entry only after the norm). The rows of
    a [B, S, H] batch follow each other. The hooks are removed on exit.

    Args:
        model: a decoder of transformers (`get_decoder().layers`).
        boundaries: K of them, as `capture_layers` returns them.
        buffer: num_chunks = K, hidden_size = H.

    Raises:
        ValueError: a boundary outside [0, N], or another number of boundaries than slots; no hook is set.
    """
    op = "transformers.capture"
    layers = model.get_decoder().layers
    if len(boundaries) != buffer.num_chunks:
        raise checks.error(
            ValueError,
            op,
            f"boundaries is {list(boundaries)}",
            f"{buffer.num_chunks} of them",
            "the buffer has that many slots",
        )
    for boundary in boundaries:
        if not 0 <= boundary <= len(layers):
            raise checks.error(ValueError, op, f"boundary is {boundary}", f"one in [0, {len(layers)}]")
    with contextlib.ExitStack() as hooks:
        for k, boundary in enumerate(boundaries):
            hooks.callback(_attach(layers, boundary, k, buffer).remove)
        yield buffer


def _attach(layers: nn.ModuleList, boundary: int, k: int, buffer: AuxHiddenStates) -> object:
    def write(hidden: Tensor) -> None:
        buffer.capture(k, hidden.flatten(0, -2))

    # A boundary is read where the next layer takes it in; only the last one has no next layer.
    if boundary < len(layers):
        return layers[boundary].register_forward_pre_hook(
            lambda module, args, kwargs: write(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
        )
    return layers[-1].register_forward_hook(
        lambda module, args, output: write(output[0] if isinstance(output, tuple) else output)
    )
