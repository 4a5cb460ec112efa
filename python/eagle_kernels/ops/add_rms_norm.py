"""add_rms_norm: the pre-norm sum and its RMSNorm, two outputs of one kernel.

    sum = round(hidden + residual)
    normed = round((hidden + residual) * rsqrt(mean((hidden + residual)^2) + eps) * (norm_offset + weight))

Replaces add + clone + norm where a drafter hands its pre-norm hidden states to the next step (the MTP chain of
Step-3.5, `norm_output` of EAGLE-3.1). The norm reads the sum before it is rounded, as the fused add-norm kernels of
SGLang 0.5.23 and the native RMSNorm of vLLM 0.33 do; the stored sum is rounded once.
"""

import torch
from torch import Tensor

from .. import checks
from ..direct import is_direct
from ..library import register
from ..plan import COMPILED, Plan, simple_plan

OP = "add_rms_norm"


def add_rms_norm(
    hidden: Tensor,
    residual: Tensor,
    weight: Tensor,
    *,
    eps: float = 1e-6,
    norm_offset: float = 0.0,
    out: Tensor | None = None,
    out_sum: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """normed, sum of the formula above, each rounded once from fp32.

    Args:
        hidden, residual: [T, H] (or one row [H]), bf16, fp16 or fp32; row strides are free, the last stride is 1.
        weight: [H], the same dtype or fp32; the gain is norm_offset + weight, added in fp32 (Gemma, Step-3.5,
            Qwen3-Next: norm_offset = 1).
        eps: added to the mean square.
        out, out_sum: where `normed` and `sum` go, shaped like hidden; may be rows of a static buffer, may not overlap
            an input or each other. Each is allocated where it is None.

    Returns:
        (normed, sum), both shaped and typed like hidden.

    Raises:
        TypeError, ValueError: a dtype, shape, device or stride that does not fit, or an output over an input.
        RuntimeError: an input requires grad while grad mode is on.
    """
    try:
        if out is not None and out_sum is not None and is_direct(OP, out, out_sum, hidden, residual, weight):
            torch.ops.eagle_kernels_C.add_rms_norm_out(hidden, residual, weight, eps, norm_offset, out, out_sum)
            return out, out_sum
    except Exception:  # whatever it is: the checks below word it, or the registered op raises it again
        pass
    checks.check_rows(OP, "hidden", hidden)
    checks.check_like(OP, "residual", residual, hidden, "hidden")
    for name, tensor in (("out", out), ("out_sum", out_sum)):
        if tensor is not None:
            checks.check_like(OP, name, tensor, hidden, "hidden")
    checks.check_vector(OP, "weight", weight, hidden.shape[-1], "H", hidden, "hidden")
    checks.check_inference(OP, (hidden, residual, weight, out, out_sum))

    eps = checks.check_number(OP, "eps", eps)
    norm_offset = checks.check_number(OP, "norm_offset", norm_offset)
    if out is None and out_sum is None and hidden.dim() == 2:
        return torch.ops.eagle_kernels.add_rms_norm(hidden, residual, weight, eps, norm_offset)
    out = hidden.new_empty(hidden.shape) if out is None else out
    out_sum = hidden.new_empty(hidden.shape) if out_sum is None else out_sum
    row = (lambda tensor: tensor.unsqueeze(0)) if hidden.dim() == 1 else (lambda tensor: tensor)
    torch.ops.eagle_kernels.add_rms_norm_out(
        row(hidden), row(residual), weight, eps, norm_offset, row(out), row(out_sum)
    )
    return out, out_sum


def plan(hidden: Tensor, *_args: object, **_kwargs: object) -> Plan:
    return simple_plan(OP, hidden.device)


def _run(
    hidden: Tensor, residual: Tensor, weight: Tensor, eps: float, norm_offset: float, out: Tensor, out_sum: Tensor
) -> None:
    reads = (("hidden", hidden), ("residual", residual), ("weight", weight))
    checks.check_no_overlap(OP, "out", out, (*reads, ("out_sum", out_sum)))
    checks.check_no_overlap(OP, "out_sum", out_sum, reads)
    backend = simple_plan(OP, hidden.device).backend
    if backend in COMPILED:
        torch.ops.eagle_kernels_C.add_rms_norm_out(hidden, residual, weight, eps, norm_offset, out, out_sum)
    elif backend == "triton":
        from ..triton_kernels.add_rms_norm import add_rms_norm as kernel

        kernel(hidden, residual, weight, eps, norm_offset, out, out_sum)
    else:
        normed, total = formula(hidden, residual, weight, eps, norm_offset)
        out.copy_(normed)
        out_sum.copy_(total)


@torch.no_grad()
def formula(
    hidden: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    norm_offset: float,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """(normed, sum) in `dtype`, unrounded: fp32 is the reference backend, fp64 the truth of the tests."""
    total = hidden.to(dtype) + residual.to(dtype)
    rstd = torch.rsqrt(total.square().mean(-1, keepdim=True) + eps)
    return total * rstd * (weight.to(dtype) + norm_offset), total


def _functional(
    hidden: Tensor, residual: Tensor, weight: Tensor, eps: float, norm_offset: float
) -> tuple[Tensor, Tensor]:
    out, out_sum = hidden.new_empty(hidden.shape), hidden.new_empty(hidden.shape)
    _run(hidden, residual, weight, eps, norm_offset, out, out_sum)
    return out, out_sum


_ARGUMENTS = "Tensor hidden, Tensor residual, Tensor weight, float eps, float norm_offset"
register(
    f"add_rms_norm({_ARGUMENTS}) -> (Tensor, Tensor)",
    _functional,
    lambda hidden, *args: (hidden.new_empty(hidden.shape), hidden.new_empty(hidden.shape)),
)
register(f"add_rms_norm_out({_ARGUMENTS}, Tensor(a!) out, Tensor(b!) out_sum) -> ()", _run, lambda *args: None)
