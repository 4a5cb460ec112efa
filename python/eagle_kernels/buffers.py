"""Static buffers between the target's forward and the drafter's input stage: allocated once, fixed pointers.

A buffer never grows: CUDA graphs hold its address. Too many rows is an error that says both numbers.
"""

import torch
from torch import Tensor

from . import checks
from .ops import add_rms_norm, capture_hidden


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


class ChainedHiddenStates:
    """The hidden states that one drafting step hands to the next: load(target), then per step current(T), advance(...).

    Step 0 reads the target's pre-norm hidden states, step k what step k - 1 left: the pre-norm sum
    round(hidden + residual), or its norm where the drafter has `norm_output` (EAGLE-3.1). Rows keep their place; it is
    the token ids that move (`rotate_token_ids`).

    Args:
        max_tokens, hidden_size: of the static buffers.
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
        for name, value in (("max_tokens", max_tokens), ("hidden_size", hidden_size)):
            checks.check_int("ChainedHiddenStates", name, value, at_least=1)
        self.max_tokens = max_tokens
        self.hidden_size = hidden_size
        self.norm_output = norm_output
        self.buffer = torch.zeros(max_tokens, hidden_size, dtype=dtype, device=device)
        self.other = torch.zeros_like(self.buffer)

    def load(self, target: Tensor, residual: Tensor | None = None, *, row: int = 0) -> Tensor:
        """Write round(target + residual), [T, H], into rows [row, row + T); the written view."""
        return capture_hidden(target, residual, out=self.buffer[row : row + target.shape[0]])

    def current(self, rows: int) -> Tensor:
        """The first `rows` rows of what the next step reads: a [T, H] view."""
        return self.buffer[:rows]

    def advance(
        self, hidden: Tensor, residual: Tensor, norm_weight: Tensor, *, eps: float = 1e-6, norm_offset: float = 0.0
    ) -> Tensor:
        """Take over the step's output, [T, H] hidden and residual, in one `add_rms_norm`; returns the normed states.

        They are a [T, H] view of a static buffer, valid until the next `advance`: what the head reads.
        """
        rows = hidden.shape[0]
        total, normed = (self.other, self.buffer) if self.norm_output else (self.buffer, self.other)
        add_rms_norm(
            hidden,
            residual,
            norm_weight,
            eps=eps,
            norm_offset=norm_offset,
            out=normed[:rows],
            out_sum=total[:rows],
        )
        return normed[:rows]


def rotate_token_ids(ids: Tensor, next_ids: Tensor, last_rows: Tensor) -> Tensor:
    """In place: ids[i] = ids[i + 1] within each request, ids[last_rows[r]] = next_ids[r]; returns ids.

    The step from MTP layer k to k + 1: hidden rows stay, each sees the token one further on.

    Args:
        ids: [T] token ids of all requests, one after the other.
        next_ids: [R], the token drafted for each request, dtype of ids.
        last_rows: [R] int64, the row of each request's last token.

    Source: SGLang 0.5.23 `multi_layer_eagle_utils.rotate_input_ids`.
    """
    ids.copy_(ids.roll(-1))
    return ids.index_copy_(0, last_rows, next_ids)
