"""Compiles, loads and allocates ahead of time what a range of row counts will need."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from . import ops
from .checks import bind, check_int, check_sequence, check_tensor, error
from .huge_pages import use_huge_pages
from .plan import MAX_ROWS_OF_SCALED_SUMS

# The arguments with one row or entry per row of the call; ops and modules share their names.
_MATRICES = ("chunks", "residuals", "hidden", "residual", "embeds", "out", "out_sum")
_ROW_ARGUMENTS = (*_MATRICES, "sum_squares", "indices", "ids", "positions", "slots")

# Above this no plan changes between two powers of two.
_EVERY_ROW_COUNT_UP_TO = MAX_ROWS_OF_SCALED_SUMS


def warmup(op: str | nn.Module, *args: object, rows: Iterable[int] | None = None, **kwargs: object) -> None:
    """Run `op(*args, **kwargs)` on its leading rows once for each row count, so that no later call has to compile.

    After it, calls with any of these row counts compile nothing, allocate nothing with `out=`, and may be captured into
    a CUDA graph. Call it before the capture, in its thread, on any stream; it waits for the device at the end. On a CPU
    under Linux the weight, or the module's, is moved into huge pages, where it is read faster.

    Args:
        op: the op's name, for example "norm_concat_linear", or a module of this package.
        args, kwargs: those of a call with the most rows. Pass static buffers as the real calls will: dtypes, alignment
            and which arguments are given decide what is compiled. `out` and the like are overwritten.
        rows: the row counts to come, for example range(1, 129); by default 1 to the rows of the arguments.

    Raises:
        TypeError, ValueError: an op that does not exist, arguments that it does not take, or more rows than they have.
        RuntimeError: a CUDA graph is being captured.

    >>> warmup("norm_concat_linear", aux.packed(128), fc.weight, norm_weight=gains, out=static_out, rows=range(1, 129))
    """
    if isinstance(op, nn.Module):
        warm_up(type(op).__name__, op, args, kwargs, rows)
    elif isinstance(op, str) and op in ops.__all__:
        warm_up(op, getattr(ops, op), args, kwargs, rows)
    else:
        raise error(ValueError, "warmup", f"op is {op!r}", f"a module or one of {ops.__all__}")


def warm_up(name: str, function: Callable, args: tuple, kwargs: dict, rows: Iterable[int] | None = None) -> None:
    """`warmup` of any callable whose arguments have an op's names; a module's are those of its `forward`."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise error(RuntimeError, "warmup", "the current stream is being captured", "a call before the capture")
    call = bind(name, inspect.signature(getattr(function, "forward", function)), args, kwargs)
    given = {argument: _tensors(name, argument, value) for argument, value in call.arguments.items()}
    if isinstance(function, nn.Module):
        use_huge_pages(*function.parameters(), *function.buffers())
    else:
        use_huge_pages(call.arguments.get("weight"))
    max_rows = _row_count(name, given)
    counts = range(1, max_rows + 1) if rows is None else _row_counts(rows)
    # The most rows first: the workspace then grows once.
    requested = sorted(set(counts), reverse=True)
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


def _tensors(op: str, name: str, value: Any) -> Any:
    """An argument with rows as tensors that can be cut: a list, read once, where it is another sequence."""
    if name not in _ROW_ARGUMENTS or value is None:
        return value
    if isinstance(value, Tensor):
        check_tensor(op, name, value)
        return value
    values = check_sequence(op, name, value, "a tensor or a sequence of tensors or None")
    for k, entry in enumerate(values):
        if entry is not None:
            check_tensor(op, f"{name}[{k}]", entry)
    return values


def _row_counts(rows: Iterable[int]) -> list[int]:
    counts = check_sequence("warmup", "rows", rows, "row counts, for example range(1, 129)")
    return [check_int("warmup", f"rows[{k}]", count, at_least=0) for k, count in enumerate(counts)]


def _row_count(op: str, given: dict[str, Any]) -> int:
    """N of the call: 1 for single rows [H]."""
    for name in ("indices", "ids", "chunks", "hidden"):
        first = next((tensor for tensor in _as_list(given.get(name)) if tensor is not None), None)
        if first is not None:
            return 1 if first.dim() <= (name in _MATRICES) else first.shape[0]
    raise error(TypeError, op, "there are no chunks, hidden or ids", "a tensor whose rows are counted")


def _leading_rows(given: dict[str, Any], T: int) -> dict[str, Any]:
    """The row arguments cut to T rows. A tensor whose rows are gathered by an index keeps all of them."""
    indices = _as_list(given.get("indices"))
    have_index = [index is not None for index in indices]
    # sum_squares has a row per row of every chunk: where one chunk has no index, all are as long as the call's rows.
    if not any(have_index) or (given.get("sum_squares") is not None and not all(have_index)):
        indices = []

    def cut(name: str, value: Any, k: int = 0) -> Any:
        if isinstance(value, list | tuple):
            return [cut(name, entry, k) for k, entry in enumerate(value)]
        if value is None or value.dim() <= (name in _MATRICES):  # a single row [H] has nothing to cut
            return value
        if name in ("chunks", "residuals", "hidden") and indices and indices[k if len(indices) > 1 else 0] is not None:
            return value
        return value if name == "sum_squares" and indices else value[:T]

    return {name: cut(name, given[name]) for name in _ROW_ARGUMENTS if name in given}


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else [value] if isinstance(value, Tensor) else list(value)
