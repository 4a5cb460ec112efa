"""add_rms_norm in Triton, one launch:

    sum = round(hidden + residual);  normed = round((hidden + residual) * rstd * (norm_offset + weight))

One program per row, which is read once where one block covers it.
"""

import triton
import triton.language as tl

from .dialect import has_pdl, let_next_kernel_start, round_to, rstd_of, to_fp32, wait_for_previous_kernel
from .launch import launch
from .rows import aligned, block_and_warps, row_stride

_ROWS = (
    "hidden_ptr",
    "hidden_row_stride",
    "residual_ptr",
    "residual_row_stride",
    "weight_ptr",
    "normed_ptr",
    "normed_row_stride",
    "sum_ptr",
    "sum_row_stride",
)


@triton.jit
def _sum_of(hidden_row_ptr, residual_row_ptr, h, H: tl.constexpr):
    """hidden + residual in fp32, [BLOCK]; 0 beyond the row."""
    hidden = tl.load(hidden_row_ptr + h, mask=h < H, other=0.0)
    return to_fp32(hidden) + to_fp32(tl.load(residual_row_ptr + h, mask=h < H, other=0.0))


@triton.jit
def _add_rms_norm(
    hidden_ptr,
    hidden_row_stride,
    residual_ptr,
    residual_row_stride,
    weight_ptr,
    eps,
    norm_offset,
    normed_ptr,
    normed_row_stride,
    sum_ptr,
    sum_row_stride,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    hidden_row_ptr = hidden_ptr + t * hidden_row_stride
    residual_row_ptr = residual_ptr + t * residual_row_stride
    lanes = tl.zeros((BLOCK,), dtype=tl.float32)
    wait_for_previous_kernel(PDL)
    let_next_kernel_start(PDL)
    for start in range(0, H, BLOCK):
        total = _sum_of(hidden_row_ptr, residual_row_ptr, start + tl.arange(0, BLOCK), H)
        lanes += total * total
    rstd = rstd_of(tl.sum(lanes, axis=0) / H + eps)

    # Where one block covers the row, the compiler drops these loads: both outputs are stored here, because a store
    # in the loop above would keep it from doing so.
    for start in range(0, H, BLOCK):
        h = start + tl.arange(0, BLOCK)  # [BLOCK]
        total = _sum_of(hidden_row_ptr, residual_row_ptr, h, H)
        gain = norm_offset + to_fp32(tl.load(weight_ptr + h, mask=h < H, other=0.0))
        dtype: tl.constexpr = sum_ptr.dtype.element_ty
        tl.store(sum_ptr + t * sum_row_stride + h, round_to(total, dtype), mask=h < H)
        tl.store(normed_ptr + t * normed_row_stride + h, round_to(total * rstd * gain, dtype), mask=h < H)


def run(record: tuple) -> None:
    """One launch for a checked `AddRmsNorm` record."""
    hidden, residual, weight, eps, norm_offset, out, out_sum = record
    T, H = out.shape
    if out.numel() == 0:
        return
    block, num_warps = block_and_warps(H)
    pdl = has_pdl(out.device)
    launch(
        _add_rms_norm,
        (T, 1, 1),
        (
            hidden,
            row_stride(hidden),
            residual,
            row_stride(residual),
            weight,
            eps,
            norm_offset,
            out,
            row_stride(out),
            out_sum,
            row_stride(out_sum),
        ),
        {"H": H, "BLOCK": block, "PDL": pdl},
        aligned=_ROWS if aligned(hidden, residual, weight, out, out_sum) else (),
        num_warps=num_warps,
        pdl=pdl,
        device=out.device,
    )
