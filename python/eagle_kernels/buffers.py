"""Static buffers between the target's forward and the drafter's input stage: allocated once, fixed pointers.

A buffer never grows: CUDA graphs hold its address. Too many rows is an error that says both numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import checks
from .dispatch import is_plain
from .ops.add_rms_norm import add_rms_norm
from .ops.call import copied, run
from .ops.capture_hidden import CaptureHidden, capture_hidden
from .plan import choose

_MAX_VIEWS = 4096  # cached for one buffer; about 1 KB each


class _SlotViews(NamedTuple):
    out: Tensor  # [T, H]
    sum_squares: Tensor  # [T]


class AuxHiddenStates:
    """K captured hidden states, packed as one [max_tokens, K*H] tensor, with their row sums of squares.

    `capture(k, hidden, residual)` writes round(hidden + residual), or the mean of an mHC target's streams, into slot k.
    This replaces the `cat` that engines run afterwards. Pass `packed(T)` to `norm_concat_linear` or `Eagle3Projection`,
    together with `row_sum_squares(T)` so that the statistics are not computed again. `step(T)` takes the captures of
    one forward (`CaptureStep`) and raises if a slot is written twice or never.

    Args:
        max_tokens: rows of the buffer; padded rows may hold anything, rows above T are neither read nor written.
        num_chunks: K.
        hidden_size: H.
        dtype, device: of the captured stream.

    Attributes:
        buffer: [max_tokens, K*H].
        sum_squares: fp32 [max_tokens, K].
    """

    def __init__(
        self,
        max_tokens: int,
        num_chunks: int,
        hidden_size: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        op = "AuxHiddenStates"
        self.max_tokens = max_tokens = checks.check_int(op, "max_tokens", max_tokens, at_least=1)
        self.num_chunks = num_chunks = checks.check_int(op, "num_chunks", num_chunks, at_least=1)
        self.hidden_size = hidden_size = checks.check_int(op, "hidden_size", hidden_size, at_least=1)
        checks.check_width(op, num_chunks, hidden_size)
        checks.check_factory(op, dtype, device)
        self.buffer = torch.zeros(max_tokens, num_chunks * hidden_size, dtype=dtype, device=device)
        self.sum_squares = torch.zeros(max_tokens, num_chunks, dtype=torch.float32, device=device)
        self._views: dict[tuple[int, int, torch.Size], _SlotViews] = {}
        self._views_of: tuple[int, int] | None = None  # not the addresses yet: a fake tensor has none

    def __getstate__(self) -> dict[str, object]:
        # A copied or unpickled view would not share the buffer's memory: captures would be lost.
        return self.__dict__ | {"_views": {}}

    def capture(self, k: int, hidden: Tensor, residual: Tensor | None = None, *, row: int = 0) -> Tensor:
        """Write round(hidden + residual), [T, H], into rows [row, row + T) of slot k; returns the written view.

        A hidden of S streams, [T, S, H], is captured as their mean: see `capture_hidden`.

        Raises ValueError for a slot or rows that the buffer does not have, and whatever `capture_hidden` raises.
        """
        views = self._kept_views(k, row, hidden.shape) if is_plain(hidden, residual) else None
        if views is not None:
            run(CaptureHidden(hidden, residual, *views), choose("capture_hidden", hidden.device), views)
            # Not the cached view itself: if the caller changed its shape or storage, the next capture would see it.
            return views.out.detach()
        op = "AuxHiddenStates.capture"
        k = self._check_slot(op, k)
        _check_hidden(op, hidden, self.hidden_size, or_streams=True)
        row, stop = _check_range(op, row, hidden.shape[0], self.max_tokens)
        begin = k * self.hidden_size
        out, squares = self.buffer[row:stop, begin : begin + self.hidden_size], self.sum_squares[row:stop, k]
        self._keep_views(k, row, hidden, out, squares)
        return capture_hidden(hidden, residual, out=out, sum_squares=squares)

    def _kept_views(self, k: int, row: int, shape: torch.Size) -> _SlotViews | None:
        """The cached views of an earlier capture, if they still point into the buffer; never in a trace."""
        if type(k) is not int or type(row) is not int or self._views_of is None:
            return None
        return self._views.get((k, row, shape)) if self._views_of == self._addresses else None

    @property
    def _addresses(self) -> tuple[int, int]:
        return self.buffer.data_ptr(), self.sum_squares.data_ptr()

    def _keep_views(self, k: int, row: int, hidden: Tensor, out: Tensor, squares: Tensor) -> None:
        """Cache the views: making these two slices costs as much as capturing a row."""
        if not is_plain(hidden, out, squares, self.buffer, self.sum_squares):
            return
        # Views of an earlier buffer would keep its memory allocated.
        if len(self._views) >= _MAX_VIEWS or self._views_of != self._addresses:
            self._views.clear()
            self._views_of = self._addresses
        self._views[k, row, hidden.shape] = _SlotViews(out.detach(), squares.detach())

    def step(self, rows: int, *, row: int = 0) -> CaptureStep:
        """One forward of the target:

            with buffer.step(T) as step:
                step.capture(k, hidden, residual)  # at each boundary; what goes to `buffer.capture` does not count

        It has to write rows [row, row + rows) of every slot exactly once: see `CaptureStep`.
        """
        return CaptureStep(self, rows, row)

    def packed(self, rows: int) -> Tensor:
        """The first `rows` rows of all slots: a [T, K*H] view."""
        return self.buffer[: _check_rows("AuxHiddenStates.packed", rows, self.max_tokens)]

    def chunk(self, k: int, rows: int) -> Tensor:
        """The first `rows` rows of slot k: a [T, H] view of row stride K*H."""
        k = self._check_slot("AuxHiddenStates.chunk", k)
        rows = _check_rows("AuxHiddenStates.chunk", rows, self.max_tokens)
        return self.buffer[:rows, k * self.hidden_size : (k + 1) * self.hidden_size]

    def row_sum_squares(self, rows: int) -> Tensor:
        """The sums of squares of the first `rows` rows: an fp32 [T, K] view."""
        return self.sum_squares[: _check_rows("AuxHiddenStates.row_sum_squares", rows, self.max_tokens)]

    def _check_slot(self, op: str, k: int) -> int:
        k = checks.check_int(op, "k", k)
        if not 0 <= k < self.num_chunks:
            raise checks.error(ValueError, op, f"k is {k}", f"a slot in [0, {self.num_chunks})")
        return k


class CaptureStep:
    """The captures of one forward of the target, counted on the host: no slot twice, none left out.

    Where an engine collects its captures in a list, a slot that is written twice or never raises nothing and costs
    acceptance. The rows of a slot may come in several pieces, in order. As a context manager a step calls `finish` when
    it ends without an exception. Nothing here reads the device, so a step may be part of a captured CUDA graph.
    """

    def __init__(self, buffer: AuxHiddenStates, rows: int, row: int = 0) -> None:
        self.buffer = buffer
        self.rows = checks.check_int("AuxHiddenStates.step", "rows", rows, at_least=0)
        self.row, _ = _check_range("AuxHiddenStates.step", row, self.rows, buffer.max_tokens)
        self.captured = [0] * buffer.num_chunks

    def capture(self, k: int, hidden: Tensor, residual: Tensor | None = None) -> Tensor:
        """`AuxHiddenStates.capture` into the step's next rows of slot k; RuntimeError if there are too many."""
        op = "CaptureStep.capture"
        k = self.buffer._check_slot(op, k)
        _check_hidden(op, hidden, self.buffer.hidden_size, or_streams=True)
        begin, rows = self.captured[k], hidden.shape[0]
        if begin + rows > self.rows:
            got, expected = f"slot {k} gets rows [{begin}, {begin + rows})", f"each of the step's {self.rows} rows once"
            raise checks.error(RuntimeError, op, got, expected)
        written = self.buffer.capture(k, hidden, residual, row=self.row + begin)
        self.captured[k] += rows
        return written

    def finish(self) -> None:
        """Raise RuntimeError that names the slots without all rows of the step, if there are any."""
        short = {k: rows for k, rows in enumerate(self.captured) if rows < self.rows}
        if short:
            got = ", ".join(f"slot {k} has {rows}" for k, rows in short.items())
            because = "the layers in front of those boundaries did not run, or not for all rows"
            if not any(self.captured):
                because = "nothing was captured through the step: call its capture, not the buffer's"
            raise checks.error(RuntimeError, "CaptureStep.finish", got, f"{self.rows} rows in each", because)

    def __enter__(self) -> CaptureStep:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()


class ChainedHiddenStates:
    """The hidden states that one drafting step hands to the next: load(target), then per step current(T), advance(...).

    Step 0 reads the target's pre-norm hidden states, step k the output of step k - 1: the pre-norm sum
    round(hidden + residual), or its norm where the drafter has `norm_output` (EAGLE-3.1). Rows keep their place; only
    the token ids move (`rotate_token_ids`).

    Args:
        max_tokens, hidden_size: of the static buffers; padded rows may hold anything, rows above T stay as they are.
        norm_output: the normed output feeds the next step, not the pre-norm sum.
        dtype, device: of the stream.

    Attributes:
        buffer: [max_tokens, H], what the next step reads.
        other: [max_tokens, H], the output of `advance` that does not feed the next step.

    Source: SGLang 0.5.23 `multi_layer_eagle_worker_v2` (chain_mtp_hidden_states), `llama_eagle3` (norm_output).
    """

    def __init__(
        self,
        max_tokens: int,
        hidden_size: int,
        *,
        norm_output: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        op = "ChainedHiddenStates"
        self.max_tokens = max_tokens = checks.check_int(op, "max_tokens", max_tokens, at_least=1)
        self.hidden_size = hidden_size = checks.check_int(op, "hidden_size", hidden_size, at_least=1)
        self.norm_output = checks.check_bool(op, "norm_output", norm_output)
        checks.check_width(op, 1, hidden_size)
        checks.check_factory(op, dtype, device)
        self.buffer = torch.zeros(max_tokens, hidden_size, dtype=dtype, device=device)
        self.other = torch.zeros_like(self.buffer)

    def load(self, target: Tensor, residual: Tensor | None = None, *, row: int = 0) -> Tensor:
        """Write round(target + residual), [T, H], into rows [row, row + T); returns the written view.

        Raises ValueError for rows or a width that the buffer does not have, and whatever `capture_hidden` raises.
        """
        op = "ChainedHiddenStates.load"
        _check_hidden(op, target, self.hidden_size, "target")
        row, stop = _check_range(op, row, target.shape[0], self.max_tokens)
        return capture_hidden(target, residual, out=self.buffer[row:stop])

    def current(self, rows: int) -> Tensor:
        """The first `rows` rows of what the next step reads: a [T, H] view."""
        return self.buffer[: _check_rows("ChainedHiddenStates.current", rows, self.max_tokens)]

    def advance(
        self, hidden: Tensor, residual: Tensor, norm_weight: Tensor, *, eps: float = 1e-6, norm_offset: float = 0.0
    ) -> Tensor:
        """Store the step's output, [T, H] hidden and residual, in one `add_rms_norm`; returns the normed states.

        The head reads them: a [T, H] view of a static buffer, valid until the next `advance`. The gain is
        norm_offset + norm_weight. Raises as `load`; neither hidden nor residual may be in this object's buffers.
        """
        op = "ChainedHiddenStates.advance"
        _check_hidden(op, hidden, self.hidden_size)
        _, rows = _check_range(op, 0, hidden.shape[0], self.max_tokens)
        total, normed = (self.other, self.buffer) if self.norm_output else (self.buffer, self.other)
        out, out_sum = normed[:rows], total[:rows]
        normed, _ = add_rms_norm(
            hidden, residual, norm_weight, eps=eps, norm_offset=norm_offset, out=out, out_sum=out_sum
        )
        return normed


def rotate_token_ids(ids: Tensor, next_ids: Tensor, last_rows: Tensor) -> Tensor:
    """In place: ids[i] = ids[i + 1] within each request, ids[last_rows[r]] = next_ids[r]; returns ids.

    The step from MTP layer k to k + 1: hidden rows stay, and each gets the token after its own. Rows of a request
    behind its last row (rejected tokens) are left with ids that nobody reads.

    Args:
        ids: [T] token ids of all requests, one after the other; int32 / int64.
        next_ids: [R], the token drafted for each request, dtype of ids.
        last_rows: [R] int32 / int64, the row of each request's last token.

    Raises TypeError / ValueError for a dtype or shape that does not fit, and on the CPU for a row that is not in ids,
    which then stay as they are.

    Source: SGLang 0.5.23 `multi_layer_eagle_utils.rotate_input_ids`.
    """
    op = "rotate_token_ids"
    for name, tensor in (("ids", ids), ("next_ids", next_ids), ("last_rows", last_rows)):
        checks.check_ids(op, name, tensor)
        checks.check_device(op, name, tensor, ids.device, "ids")
    checks.check_dtype(op, "next_ids", next_ids, (ids.dtype,), f"ids has dtype {ids.dtype}")
    if ids.shape[0] > 1 and ids.stride(0) == 0:
        raise checks.error(ValueError, op, f"ids has strides {ids.stride()}", "entries of its own", "ids is written")
    if last_rows.shape != next_ids.shape:
        raise checks.shape_error(op, "last_rows", last_rows, str(tuple(next_ids.shape)), "next_ids has that shape")
    # ids is written last: on the CPU an index that is out of range raises before ids changes.
    try:
        return copied(ids.roll(-1).index_copy_(0, last_rows.long(), next_ids), ids)
    except IndexError:
        expected = f"rows in [0, {ids.shape[0]})"
        raise checks.error(ValueError, op, "last_rows has a row outside of ids", expected) from None


def _check_hidden(op: str, hidden: Tensor, hidden_size: int, name: str = "hidden", *, or_streams: bool = False) -> None:
    checks.check_strided(op, name, hidden)
    if hidden.dim() not in ((2, 3) if or_streams else (2,)) or hidden.shape[-1] != hidden_size:
        raise checks.shape_error(op, name, hidden, f"(T, H) = (*, {hidden_size})")


def _check_range(op: str, row: int, rows: int, max_tokens: int) -> tuple[int, int]:
    """The range [row, stop) as Python's ints: the sums and products of numpy's small ones wrap."""
    row = checks.check_int(op, "row", row, at_least=0)
    stop = row + rows
    if stop > max_tokens:
        because = "static buffers never grow"
        raise checks.error(ValueError, op, f"the rows end at {stop}", f"at most max_tokens = {max_tokens}", because)
    return row, stop


def _check_rows(op: str, rows: int, max_tokens: int) -> int:
    rows = checks.check_int(op, "rows", rows, at_least=0)
    if rows > max_tokens:
        raise checks.error(ValueError, op, f"rows is {rows}", f"at most max_tokens = {max_tokens}")
    return rows
