"""add_rms_norm in Triton, one launch:

    sum = round(hidden + residual);  normed = round((hidden + residual) * rstd * (norm_offset + weight))

One program per row, which is read once where one block covers it.
"""

import torch
import triton
import triton.language as tl

from .alignment import row_stride
from .dialect import let_next_kernel_start, round_to, rstd_of, to_fp32, wait_for_previous_kernel
from .launch import FP32, I64, Launch, address, pointer_to, prepared
from .rows import block_and_warps

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

    # Where one block covers the row, the compiler drops these loads. Both outputs are stored here, because a store in
    # the loop above would prevent that.
    for start in range(0, H, BLOCK):
        h = start + tl.arange(0, BLOCK)  # [BLOCK]
        total = _sum_of(hidden_row_ptr, residual_row_ptr, h, H)
        gain = norm_offset + to_fp32(tl.load(weight_ptr + h, mask=h < H, other=0.0))
        dtype: tl.constexpr = sum_ptr.dtype.element_ty
        tl.store(sum_ptr + t * sum_row_stride + h, round_to(total, dtype), mask=h < H)
        tl.store(normed_ptr + t * normed_row_stride + h, round_to(total * rstd * gain, dtype), mask=h < H)


@prepared
def _prepare(dtype: torch.dtype, weight_dtype: torch.dtype, H: int, device: torch.device) -> Launch:
    rows, weight = pointer_to(dtype), pointer_to(weight_dtype)
    block, num_warps = block_and_warps(H)
    return Launch(
        _add_rms_norm,
        (rows, I64, rows, I64, weight, FP32, FP32, rows, I64, rows, I64),
        {"H": H, "BLOCK": block},
        device,
        aligned_together=_ROWS,
        num_warps=num_warps,
    )


def run(record: tuple) -> None:
    """One launch for a checked `AddRmsNorm` record."""
    hidden, residual, weight, eps, norm_offset, out, out_sum = record
    T, H = out.shape
    if T == 0 or H == 0:
        return
    numbers = (
        address(hidden),
        row_stride(hidden),
        address(residual),
        row_stride(residual),
        address(weight),
        eps,
        norm_offset,
        address(out),
        row_stride(out),
        address(out_sum),
        row_stride(out_sum),
    )
    _prepare(hidden.dtype, weight.dtype, H, out.device)((T, 1, 1), numbers)
