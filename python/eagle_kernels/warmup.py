"""Compiles, loads and allocates ahead of time what a range of row counts will need."""

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from . import ops
from .checks import error

# The arguments with one row or entry per row of the call; ops and modules share their names.
_MATRICES = ("chunks", "residuals", "hidden", "residual", "embeds", "out", "out_sum")
_ROW_ARGUMENTS = (*_MATRICES, "sum_squares", "indices", "ids", "positions", "slots")

# Above this no plan changes between two powers of two.
_EVERY_ROW_COUNT_UP_TO = 256


def warmup(op: str | nn.Module, *args: object, rows: Iterable[int] | None = None, **kwargs: object) -> None:
    """Run `op(*args, **kwargs)` on its leading rows once for each row count, so that no later call has to compile.

    After it, calls with any of these row counts compile nothing, allocate nothing with `out=`, and may be captured into
    a CUDA graph. Call it before the capture, on any stream; it waits for the device at the end.

    Args:
        op: the op's name, for example "norm_concat_linear", or a module of this package.
        args, kwargs: those of a call with the most rows. Pass static buffers as the real calls will: dtypes, alignment
            and which arguments are given decide what is compiled. `out` and the like are overwritten.
        rows: the row counts to come, for example range(1, 129); by default 1 to the rows of the arguments.

    Raises:
        ValueError: an op that does not exist, or more rows than the arguments have.
        RuntimeError: a CUDA graph is being captured.

    >>> warmup("norm_concat_linear", aux.packed(128), fc.weight, norm_weight=gains, out=static_out, rows=range(1, 129))
    """
    if isinstance(op, str) and op not in ops.__all__:
        raise error(ValueError, "warmup", f"op is {op!r}", f"a module or one of {ops.__all__}")
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise error(RuntimeError, "warmup", "the current stream is being captured", "a call before the capture")
    function = getattr(ops, op) if isinstance(op, str) else op
    call = inspect.signature(function if isinstance(op, str) else op.forward).bind(*args, **kwargs)
    given = dict(call.arguments)
    max_rows = _row_count(given)
    # The most rows first: the workspace then grows once.
    requested = sorted(set(range(1, max_rows + 1) if rows is None else rows), reverse=True)
    if requested and requested[0] > max_rows:
        raise error(
            ValueError,
            "warmup",
            f"rows goes up to {requested[0]}",
            f"at most {max_rows}",
            "the arguments have that many",
        )
    for T in requested:
        if T <= _EVERY_ROW_COUNT_UP_TO or requested[0] == T or T & (T - 1) == 0:
            call.arguments.update(_leading_rows(given, T))
            with torch.no_grad():
                function(*call.args, **call.kwargs)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _row_count(given: dict[str, Any]) -> int:
    """N of the call: 1 for single rows [H]."""
    index = next((index for index in _as_list(given.get("indices")) if index is not None), None)
    if index is not None:
        return index.shape[0]
    if "ids" in given:
        return given["ids"].shape[0]
    first = _as_list(given.get("chunks", given.get("hidden")))[0]
    return 1 if first.dim() == 1 else first.shape[0]


def _leading_rows(given: dict[str, Any], T: int) -> dict[str, Any]:
    """The row arguments cut to T rows. A tensor whose rows are gathered by an index keeps all of them."""
    indices = _as_list(given.get("indices"))

    def cut(name: str, value: Any, k: int = 0) -> Any:
        if isinstance(value, list | tuple):
            return [cut(name, entry, k) for k, entry in enumerate(value)]
        if value is None or (value.dim() == 1 and name in _MATRICES):  # a single row [H] has nothing to cut
            return value
        if name in ("chunks", "residuals", "hidden") and indices and indices[k if len(indices) > 1 else 0] is not None:
            return value
        return value if name == "sum_squares" and indices else value[:T]

    return {name: cut(name, given[name]) for name in _ROW_ARGUMENTS if name in given}


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else [value] if isinstance(value, Tensor) else list(value)
