"""capture_hidden: out = round(hidden + residual), or the rounded mean of S streams, written into a slot of a buffer.

Replaces the clone of each captured layer and the `cat` of the clones (SGLang 0.5.23 `AuxHiddenStateList`, vLLM 0.33
`_maybe_add_hidden_state`): a slot is a strided view `[T, H]` of the packed `[max_tokens, K*H]` buffer. The sum is
rounded once to the stream's dtype, which makes it bit-identical to the residual a fused add-norm stores. The mean is
that of the 4 residual streams of mHC targets (DeepSeek-V4, V4.1): bit-identical to SGLang's `mhc_stream_mean` and to
the `mean(dim=1)` of vLLM, both of which read the streams as they are stored.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .. import checks
from ..dispatch import is_plain
from ..library import register, registered_ops
from ..plan import Plan, choose
from .call import run

OP = "capture_hidden"


def capture_hidden(
    hidden: Tensor, residual: Tensor | None = None, *, out: Tensor, sum_squares: Tensor | None = None
) -> Tensor:
    """out[t] = round(hidden[t] + residual[t]), or round(1/S * sum_s hidden[t, s]);  sum_squares[t] = sum_h out[t, h]^2.

    Args:
        hidden: [T, H] (or one row [H]), bf16, fp16 or fp32; the row stride is free, the last stride is 1. Or [T, S, H],
            the S residual streams of an mHC target after the layer's `post`, whose mean is captured. It is summed in
            fp32 from +0 in the order of the streams, for S = 4 bit-identical to `torch.mean`. The stride between
            streams is free too.
        residual: same shape and dtype, or None where there is none (boundary 0, Gemma 4). Always None with streams.
        out: [T, H] (or [H]) of the same dtype; usually a slot of `AuxHiddenStates`.
        sum_squares: fp32 [T], any stride: the slot's column of a [max_tokens, K] tensor that `norm_concat_linear`
            takes, so that it reads x once. The squares are those of the rounded value.

    Returns:
        out.

    Raises:
        TypeError, ValueError: a dtype, shape, device or stride that does not fit, or `out` over an input.
        RuntimeError: an input requires grad while grad mode is on, or has a tangent of forward-mode differentiation.
    """
    if is_plain(hidden, residual, out, sum_squares) and hidden.dim() != 1:
        _run_out(hidden, residual, out, sum_squares)
        return out
    record = CaptureHidden(hidden, residual, out, sum_squares)
    record.check_arguments()
    if hidden.dim() == 1:
        row = None if residual is None else residual.unsqueeze(0)
        record = CaptureHidden(hidden.unsqueeze(0), row, out.unsqueeze(0), sum_squares)
    registered_ops.capture_hidden_out(*record)
    return out


class CaptureHidden(NamedTuple):
    """The arguments of one call. Only before `check_arguments` may they be a single row [H]."""

    hidden: Tensor
    residual: Tensor | None
    out: Tensor
    sum_squares: Tensor | None

    def for_primitive(self) -> tuple:
        return self

    def check(self) -> None:
        self.check_arguments()
        if self.hidden.dim() != 3:
            checks.check_matrix(OP, "hidden", self.hidden)
        reads = (("hidden", self.hidden), ("residual", self.residual))
        checks.check_no_overlap(OP, "out", self.out, reads)
        if self.sum_squares is not None:
            checks.check_no_overlap(OP, "sum_squares", self.sum_squares, (*reads, ("out", self.out)))

    def check_arguments(self) -> None:
        """Check everything but overlapping memory, which a trace cannot know."""
        hidden, residual, out, sum_squares = self
        checks.check_rows(OP, "hidden", hidden, or_streams=True)
        if hidden.dim() == 3:
            if hidden.shape[1] == 0:
                raise checks.shape_error(OP, "hidden", hidden, "(T, S, H) with S >= 1", "no stream has no mean")
            if residual is not None:
                because = "hidden has streams, which are complete residuals"
                raise checks.error(ValueError, OP, "residual is given", "None", because)
            checks.check_operand(OP, "out", out, hidden, "hidden")
            T, _, H = hidden.shape
            if out.shape != (T, H):
                raise checks.shape_error(OP, "out", out, f"({T}, {H}) = (T, H)")
        else:
            if residual is not None:
                checks.check_like(OP, "residual", residual, hidden, "hidden")
            checks.check_like(OP, "out", out, hidden, "hidden")
        if sum_squares is not None:
            checks.check_tensor(OP, "sum_squares", sum_squares)
            checks.check_dtype(OP, "sum_squares", sum_squares, (torch.float32,))
            checks.check_device(OP, "sum_squares", sum_squares, hidden.device, "hidden")
            rows = 1 if hidden.dim() == 1 else hidden.shape[0]
            if sum_squares.dim() != 1 or sum_squares.shape[0] != rows:
                raise checks.shape_error(OP, "sum_squares", sum_squares, f"({rows},) = (T,)")
        checks.check_inference(OP, self)

    @torch.no_grad()
    def reference(self) -> None:
        value = self.hidden if self.residual is None else self.hidden + self.residual
        if self.hidden.dim() == 3:
            total = torch.zeros(self.out.shape, dtype=torch.float32, device=self.out.device)
            for stream in self.hidden.unbind(1):
                total += stream
            value = total.mul_(1 / self.hidden.shape[1]).to(self.out.dtype)
        self.out.copy_(value)
        if self.sum_squares is not None:
            self.sum_squares.copy_(value.float().square().sum(-1))


def plan(hidden: Tensor, *_args: object, **_kwargs: object) -> Plan:
    """The plan of a call with these arguments; see `eagle_kernels.explain`."""
    checks.check_tensor(OP, "hidden", hidden)
    return choose(OP, hidden.device)


def _run_out(hidden: Tensor, residual: Tensor | None, out: Tensor, sum_squares: Tensor | None) -> None:
    outputs = (out,) if sum_squares is None else (out, sum_squares)
    run(CaptureHidden(hidden, residual, out, sum_squares), choose(OP, hidden.device), outputs)


def _run(hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    out, sum_squares = _empty(hidden, residual)
    _run_out(hidden, residual, out, sum_squares)
    return out, sum_squares


def _empty(hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    if hidden.dim() != 3:
        checks.check_matrix(OP, "hidden", hidden)
    return hidden.new_empty((hidden.shape[0], hidden.shape[-1])), hidden.new_empty(
        hidden.shape[:1], dtype=torch.float32
    )


register("capture_hidden(Tensor hidden, Tensor? residual) -> (Tensor, Tensor)", _run, _empty)
register(
    "capture_hidden_out(Tensor hidden, Tensor? residual, Tensor(a!) out, Tensor(b!)? sum_squares) -> ()",
    _run_out,
    lambda *args: None,
)
