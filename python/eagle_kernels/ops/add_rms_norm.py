"""add_rms_norm: the pre-norm sum and its RMSNorm, two outputs of one kernel.

    sum = round(hidden + residual)
    normed = round((hidden + residual) * rsqrt(mean((hidden + residual)^2) + eps) * (norm_offset + weight))

Replaces add + clone + norm where a drafter hands its pre-norm hidden states to the next step (the MTP chain of
Step-3.5, `norm_output` of EAGLE-3.1). The norm reads the sum before it is rounded, as the fused add-norm kernels of
SGLang 0.5.23 and the native RMSNorm of vLLM 0.33 do; the stored sum is rounded once.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import checks
from ..dispatch import is_plain
from ..library import register, registered_ops
from ..plan import Plan, choose
from .call import run
from .sources import rstd_of

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
    """sum = round(hidden + residual);  normed = round(s * rsqrt(mean(s^2) + eps) * (norm_offset + weight)), where s is
    hidden + residual in fp32, unrounded.

    Args:
        hidden, residual: [T, H] (or one row [H]), bf16, fp16 or fp32; row strides are free, the last stride is 1.
        weight: [H], the same dtype or fp32; the gain is norm_offset + weight, added in fp32 (Gemma, Step-3.5,
            Qwen3-Next: norm_offset = 1).
        eps: added to the mean square; a sum of zeros stays zero, at eps = 0 too.
        out, out_sum: where `normed` and `sum` go, shaped like hidden; may be rows of a static buffer, may not overlap
            an input or each other. Each is allocated where it is None.

    Returns:
        (normed, sum), both shaped and typed like hidden.

    Raises:
        TypeError, ValueError: a dtype, shape, device or stride that does not fit, or an output over an input.
        RuntimeError: an input requires grad while grad mode is on, or has a tangent of forward-mode differentiation.
    """
    eps = eps if type(eps) is float else checks.check_number(OP, "eps", eps)
    norm_offset = norm_offset if type(norm_offset) is float else checks.check_number(OP, "norm_offset", norm_offset)
    if is_plain(hidden, residual, weight, out, out_sum) and hidden.dim() == 2:
        out = _empty_like(hidden) if out is None else out
        out_sum = _empty_like(hidden) if out_sum is None else out_sum
        record = AddRmsNorm(hidden, residual, weight, eps, norm_offset, out, out_sum)
        run(record, choose(OP, hidden.device), (out, out_sum))
        return out, out_sum
    # An output that is None is allocated below.
    record = AddRmsNorm(hidden, residual, weight, eps, norm_offset, out, out_sum)  # type: ignore[arg-type]
    record.check_arguments()
    if out is None and out_sum is None and hidden.dim() == 2:
        return registered_ops.add_rms_norm(*record[:5])
    out = _empty_like(hidden) if out is None else out
    out_sum = _empty_like(hidden) if out_sum is None else out_sum
    rows = [row.unsqueeze(0) if hidden.dim() == 1 else row for row in (hidden, residual, out, out_sum)]
    registered_ops.add_rms_norm_out(*rows[:2], weight, eps, norm_offset, *rows[2:])
    return out, out_sum


class AddRmsNorm(NamedTuple):
    """The arguments of one call. Only before `check_arguments` may rows be 1-D and outputs None."""

    hidden: Tensor
    residual: Tensor
    weight: Tensor
    eps: float
    norm_offset: float
    out: Tensor
    out_sum: Tensor

    def for_primitive(self) -> tuple:
        return self

    def check(self) -> None:
        self.check_arguments()
        checks.check_matrix(OP, "hidden", self.hidden)
        reads = (("hidden", self.hidden), ("residual", self.residual), ("weight", self.weight))
        checks.check_no_overlap(OP, "out", self.out, (*reads, ("out_sum", self.out_sum)))
        checks.check_no_overlap(OP, "out_sum", self.out_sum, reads)

    def check_arguments(self) -> None:
        """Check everything but overlapping memory, which a trace cannot know."""
        hidden, residual, weight, eps, norm_offset, out, out_sum = self
        checks.check_rows(OP, "hidden", hidden)
        checks.check_like(OP, "residual", residual, hidden, "hidden")
        for name, tensor in (("out", out), ("out_sum", out_sum)):
            if tensor is not None:
                checks.check_like(OP, name, tensor, hidden, "hidden")
        checks.check_vector(OP, "weight", weight, hidden.shape[-1], "H", hidden, "hidden")
        checks.check_inference(OP, (hidden, residual, weight, out, out_sum))
        checks.check_eps(OP, "eps", eps)
        checks.check_finite(OP, "norm_offset", norm_offset)

    @torch.no_grad()
    def reference(self) -> None:
        normed, total = formula(*self[:5])
        self.out.copy_(normed)
        self.out_sum.copy_(total)


@torch.no_grad()
def formula(
    hidden: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    norm_offset: float,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """(normed, sum) in `dtype`, unrounded: fp32 for the reference backend, fp64 as the truth in tests."""
    total = hidden.to(dtype) + residual.to(dtype)
    return total * rstd_of(total.square().mean(-1, keepdim=True), eps) * (weight.to(dtype) + norm_offset), total


def plan(hidden: Tensor, *_args: object, **_kwargs: object) -> Plan:
    """The plan of a call with these arguments; see `eagle_kernels.explain`."""
    checks.check_tensor(OP, "hidden", hidden)
    return choose(OP, hidden.device)


def _run_out(hidden: Tensor, *others: Any) -> None:
    run(AddRmsNorm(hidden, *others), choose(OP, hidden.device), others[-2:])


def _run(hidden: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    outputs = _empty(hidden)
    _run_out(hidden, *others, *outputs)
    return outputs


def _empty(hidden: Tensor, *_others: object) -> tuple[Tensor, Tensor]:
    checks.check_matrix(OP, "hidden", hidden)
    return _empty_like(hidden), _empty_like(hidden)


def _empty_like(hidden: Tensor) -> Tensor:
    """Contiguous; new_empty(hidden.shape) takes 1 us more."""
    return hidden.new_empty(*hidden.shape)


_ARGUMENTS = "Tensor hidden, Tensor residual, Tensor weight, float eps, float norm_offset"
register(f"add_rms_norm({_ARGUMENTS}) -> (Tensor, Tensor)", _run, _empty)
register(f"add_rms_norm_out({_ARGUMENTS}, Tensor(a!) out, Tensor(b!) out_sum) -> ()", _run_out, lambda *args: None)
