"""capture_hidden in Triton, one launch:

    out[t] = round(hidden[t] + residual[t]), or round(mean_s hidden[t, s]);  sum_squares[t] = sum_h out[t, h]^2

One program per row, so that a row's sum of squares is one reduction in a fixed order.
"""

import torch
import triton
import triton.language as tl

from .alignment import row_stride
from .dialect import let_next_kernel_start, round_to, to_fp32, wait_for_previous_kernel
from .launch import I64, NONE, Launch, address, pointer_to, prepared
from .rows import block_and_warps

_ROWS = (
    "hidden_ptr",
    "hidden_row_stride",
    "hidden_stream_stride",
    "residual_ptr",
    "residual_row_stride",
    "out_ptr",
    "out_row_stride",
)


@triton.jit
def _capture_hidden(
    hidden_ptr,
    hidden_row_stride,
    hidden_stream_stride,
    residual_ptr,
    residual_row_stride,
    out_ptr,
    out_row_stride,
    sum_squares_ptr,
    sum_squares_stride,
    H: tl.constexpr,
    STREAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    lanes = tl.zeros((BLOCK,), dtype=tl.float32)
    wait_for_previous_kernel(PDL)
    let_next_kernel_start(PDL)
    for start in range(0, H, BLOCK):
        h = start + tl.arange(0, BLOCK)  # [BLOCK]
        if STREAMS > 0:
            # Starts from +0 and adds in the order of the streams, for the bits of torch's mean: all -0 gives +0.
            total = tl.zeros((BLOCK,), dtype=tl.float32)
            for s in tl.static_range(STREAMS):
                stream_ptr = hidden_ptr + t * hidden_row_stride + s * hidden_stream_stride
                total += to_fp32(tl.load(stream_ptr + h, mask=h < H, other=0.0))
            value = round_to(total * (1.0 / STREAMS), out_ptr.dtype.element_ty)
        else:
            value = tl.load(hidden_ptr + t * hidden_row_stride + h, mask=h < H, other=0.0)
        if residual_ptr is not None:
            residual = tl.load(residual_ptr + t * residual_row_stride + h, mask=h < H, other=0.0)
            value = round_to(to_fp32(value) + to_fp32(residual), out_ptr.dtype.element_ty)
        tl.store(out_ptr + t * out_row_stride + h, value, mask=h < H)
        if sum_squares_ptr is not None:
            # The squares of the rounded value, which a norm of the slot will read.
            lanes += to_fp32(value) * to_fp32(value)
    if sum_squares_ptr is not None:
        tl.store(sum_squares_ptr + t * sum_squares_stride, tl.sum(lanes, axis=0))


@prepared
def _prepare(
    dtype: torch.dtype, has_residual: bool, has_sum_squares: bool, H: int, streams: int, device: torch.device
) -> Launch:
    rows = pointer_to(dtype)
    squares = pointer_to(torch.float32 if has_sum_squares else None)
    block, num_warps = block_and_warps(max(H, 1))  # rows without columns have a sum of squares too
    return Launch(
        _capture_hidden,
        (rows, I64, I64, rows if has_residual else NONE, I64, rows, I64, squares, I64),
        {"H": H, "STREAMS": streams, "BLOCK": block},
        device,
        aligned_together=_ROWS,
        num_warps=num_warps,
    )


def run(record: tuple) -> None:
    """One launch for a checked `CaptureHidden` record."""
    hidden, residual, out, sum_squares = record
    T, H = out.shape
    if T == 0 or (H == 0 and sum_squares is None):
        return
    streams = hidden.shape[1] if hidden.dim() == 3 else 0
    numbers = [address(hidden), row_stride(hidden), hidden.stride(1) if streams > 1 else 0]
    if residual is not None:
        numbers.append(address(residual))
    numbers += row_stride(residual), address(out), row_stride(out)
    if sum_squares is not None:
        numbers.append(address(sum_squares))
    numbers.append(0 if sum_squares is None else sum_squares.stride(0))
    launch = _prepare(hidden.dtype, residual is not None, sum_squares is not None, H, streams, out.device)
    launch((T, 1, 1), numbers)
