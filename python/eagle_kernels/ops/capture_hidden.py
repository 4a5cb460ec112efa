"""capture_hidden: out = round(hidden + residual), written straight into a slot of a static buffer.

Replaces the clone of each captured layer and the `cat` of the clones (SGLang 0.5.23 `AuxHiddenStateList`, vLLM 0.33
`_maybe_add_hidden_state`): a slot is a strided view `[T, H]` of the packed `[max_tokens, K*H]` buffer. The sum is
rounded once to the stream's dtype, which makes it bit-identical to the residual a fused add-norm stores.
"""

import torch
from torch import Tensor

from .. import checks
from ..direct import is_direct
from ..library import register
from ..plan import COMPILED, Plan, simple_plan

OP = "capture_hidden"


def capture_hidden(
    hidden: Tensor, residual: Tensor | None = None, *, out: Tensor, sum_squares: Tensor | None = None
) -> Tensor:
    """out[t] = round(hidden[t] + residual[t]);  sum_squares[t] = sum_h out[t, h]^2.

    Args:
        hidden: [T, H] (or one row [H]), bf16, fp16 or fp32; the row stride is free, the last stride is 1.
        residual: same shape and dtype, or None where the stream has none (boundary 0, Gemma 4).
        out: same shape and dtype; usually a slot of `AuxHiddenStates`.
        sum_squares: fp32 [T], any stride: the slot's column of a [max_tokens, K] tensor that `norm_concat_linear`
            takes, so that it reads x once. The squares are those of the rounded value.

    Returns:
        out.

    Raises:
        TypeError, ValueError: a dtype, shape, device or stride that does not fit, or `out` over an input.
        RuntimeError: an input requires grad while grad mode is on.
    """
    try:
        if is_direct(OP, out, hidden, residual):
            torch.ops.eagle_kernels_C.capture_hidden_out(hidden, residual, out, sum_squares)
            return out
    except Exception:  # whatever it is: the checks below word it, or the registered op raises it again
        pass
    checks.check_rows(OP, "hidden", hidden)
    if residual is not None:
        checks.check_like(OP, "residual", residual, hidden, "hidden")
    checks.check_like(OP, "out", out, hidden, "hidden")
    if sum_squares is not None:
        _check_sum_squares(hidden, sum_squares)
    checks.check_inference(OP, (hidden, residual, out))
    if hidden.dim() == 1:
        rows = [None if tensor is None else tensor.unsqueeze(0) for tensor in (hidden, residual, out)]
        torch.ops.eagle_kernels.capture_hidden_out(*rows, sum_squares)
    else:
        torch.ops.eagle_kernels.capture_hidden_out(hidden, residual, out, sum_squares)
    return out


def _check_sum_squares(hidden: Tensor, sum_squares: Tensor) -> None:
    checks.check_tensor(OP, "sum_squares", sum_squares)
    checks.check_dtype(OP, "sum_squares", sum_squares, (torch.float32,))
    checks.check_device(OP, "sum_squares", sum_squares, hidden.device, "hidden")
    rows = hidden.shape[0] if hidden.dim() == 2 else 1
    if sum_squares.dim() != 1 or sum_squares.shape[0] != rows:
        raise checks.shape_error(OP, "sum_squares", sum_squares, f"({rows},) = (T,)")


def plan(hidden: Tensor, *_args: object, **_kwargs: object) -> Plan:
    return simple_plan(OP, hidden.device)


def _run(hidden: Tensor, residual: Tensor | None, out: Tensor, sum_squares: Tensor | None) -> None:
    reads = (("hidden", hidden), ("residual", residual))
    checks.check_no_overlap(OP, "out", out, reads)
    backend = simple_plan(OP, hidden.device).backend
    if backend in COMPILED:
        torch.ops.eagle_kernels_C.capture_hidden_out(hidden, residual, out, sum_squares)
    elif backend == "triton":
        from ..triton_kernels.capture_hidden import capture_hidden as kernel

        kernel(hidden, residual, out, sum_squares)
    else:
        reference(hidden, residual, out, sum_squares)


@torch.no_grad()
def reference(hidden: Tensor, residual: Tensor | None, out: Tensor, sum_squares: Tensor | None) -> None:
    """Plain torch, any device."""
    value = hidden if residual is None else hidden + residual
    out.copy_(value)
    if sum_squares is not None:
        sum_squares.copy_(value.float().square().sum(-1))


def _functional(hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    out = hidden.new_empty(hidden.shape)
    sum_squares = hidden.new_empty(hidden.shape[:1], dtype=torch.float32)
    _run(hidden, residual, out, sum_squares)
    return out, sum_squares


def _functional_fake(hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    return hidden.new_empty(hidden.shape), hidden.new_empty(hidden.shape[:1], dtype=torch.float32)


register("capture_hidden(Tensor hidden, Tensor? residual) -> (Tensor, Tensor)", _functional, _functional_fake)
register(
    "capture_hidden_out(Tensor hidden, Tensor? residual, Tensor(a!) out, Tensor(b!)? sum_squares) -> ()",
    _run,
    lambda *args: None,
)
