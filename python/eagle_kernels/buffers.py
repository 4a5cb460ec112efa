"""Static buffers between the target's forward and the drafter's input stage: allocated once, fixed pointers.

A buffer never grows: CUDA graphs hold its address. Too many rows is an error that says both numbers.
"""

import torch
from torch import Tensor

from . import checks
from .ops import capture_hidden


class AuxHiddenStates:
    """K captured hidden states, packed as one [max_tokens, K*H] tensor, with their row sums of squares.

    `capture(k, hidden, residual)` writes round(hidden + residual) into slot k: the `cat` that engines run afterwards
    never happens. `packed(T)` goes to `norm_concat_linear` or `Eagle3Projection`, together with
    `row_sum_squares(T)` so that the statistics are not computed again.

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
        for name, value in (("max_tokens", max_tokens), ("num_chunks", num_chunks), ("hidden_size", hidden_size)):
            checks.check_int("AuxHiddenStates", name, value, at_least=1)
        self.max_tokens = max_tokens
        self.num_chunks = num_chunks
        self.hidden_size = hidden_size
        self.buffer = torch.zeros(max_tokens, num_chunks * hidden_size, dtype=dtype, device=device)
        self.sum_squares = torch.zeros(max_tokens, num_chunks, dtype=torch.float32, device=device)

    def capture(self, k: int, hidden: Tensor, residual: Tensor | None = None, *, row: int = 0) -> Tensor:
        """Write round(hidden + residual), [T, H], into rows [row, row + T) of slot k; the written view.

        Raises ValueError for a slot or rows that the buffer does not have, and whatever `capture_hidden` raises.
        """
        op = "AuxHiddenStates.capture"
        if not 0 <= k < self.num_chunks:
            raise checks.error(ValueError, op, f"k is {k}", f"a slot in [0, {self.num_chunks})")
        checks.check_tensor(op, "hidden", hidden)
        if hidden.dim() != 2 or hidden.shape[1] != self.hidden_size:
            raise checks.shape_error(op, "hidden", hidden, f"(T, H) = (*, {self.hidden_size})")
        stop = row + hidden.shape[0]
        if row < 0 or stop > self.max_tokens:
            raise checks.error(
                ValueError,
                op,
                f"the rows end at {stop}",
                f"at most max_tokens = {self.max_tokens}",
                "static buffers never grow",
            )
        begin = k * self.hidden_size
        slot = self.buffer[row:stop, begin : begin + self.hidden_size]
        return capture_hidden(hidden, residual, out=slot, sum_squares=self.sum_squares[row:stop, k])

    def packed(self, rows: int) -> Tensor:
        """The first `rows` rows of all slots: a [T, K*H] view."""
        return self.buffer[: self._checked("packed", rows)]

    def chunk(self, k: int, rows: int) -> Tensor:
        """The first `rows` rows of slot k: a [T, H] view of row stride K*H."""
        if not 0 <= k < self.num_chunks:
            raise checks.error(ValueError, "AuxHiddenStates.chunk", f"k is {k}", f"a slot in [0, {self.num_chunks})")
        return self.buffer[: self._checked("chunk", rows), k * self.hidden_size : (k + 1) * self.hidden_size]

    def row_sum_squares(self, rows: int) -> Tensor:
        """The sums of squares of the first `rows` rows: an fp32 [T, K] view."""
        return self.sum_squares[: self._checked("row_sum_squares", rows)]

    def _checked(self, method: str, rows: int) -> int:
        if not 0 <= rows <= self.max_tokens:
            raise checks.error(
                ValueError, f"AuxHiddenStates.{method}", f"rows is {rows}", f"at most max_tokens = {self.max_tokens}"
            )
        return rows
