"""capture_hidden in Triton, one launch:

    out[t] = round(hidden[t] + residual[t]), or round(mean_s hidden[t, s]);  sum_squares[t] = sum_h out[t, h]^2

One program per row, so that a row's sum of squares is one reduction in a fixed order.
"""

import triton
import triton.language as tl

from .dialect import has_pdl, let_next_kernel_start, round_to, to_fp32, wait_for_previous_kernel
from .launch import launch
from .rows import aligned, block_and_warps, row_stride

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
            # From +0 on, in the order of the streams: the bits of torch's mean, whose row of all -0 is +0.
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
            # Of the rounded value: it is what a norm of the slot will see.
            lanes += to_fp32(value) * to_fp32(value)
    if sum_squares_ptr is not None:
        tl.store(sum_squares_ptr + t * sum_squares_stride, tl.sum(lanes, axis=0))


def run(record: tuple) -> None:
    """One launch for a checked `CaptureHidden` record."""
    hidden, residual, out, sum_squares = record
    T, H = out.shape
    if out.numel() == 0:
        if sum_squares is not None:
            sum_squares.zero_()  # of rows without columns
        return
    streams = hidden.shape[1] if hidden.dim() == 3 else 0
    block, num_warps = block_and_warps(H)
    pdl = has_pdl(out.device)
    launch(
        _capture_hidden,
        (T, 1, 1),
        (
            hidden,
            row_stride(hidden),
            hidden.stride(1) if streams > 1 else 0,
            residual,
            row_stride(residual),
            out,
            row_stride(out),
            sum_squares,
            0 if sum_squares is None else sum_squares.stride(0),
        ),
        {"H": H, "STREAMS": streams, "BLOCK": block, "PDL": pdl},
        aligned=_ROWS if aligned(hidden, residual, out) else (),
        num_warps=num_warps,
        pdl=pdl,
        device=out.device,
    )
