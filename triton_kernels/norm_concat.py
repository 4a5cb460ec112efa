"""norm_concat in Triton: one program per row and source, one launch.

    out[n] = round(concat_k(value_k[n] * rstd_k[n] * (norm_offset + gain_k)))        (the terms: `ops/sources.py`)

A concat norm needs the squares of a whole row. Up to 128 rows every program of a row sums all of them: K times the
reads, out of L2, but K times the programs. Above that one program writes all chunks of its row.
"""

import triton
import triton.language as tl
from torch import Tensor

from .dialect import has_pdl, let_next_kernel_start, round_to, rstd_of, to_fp32, wait_for_previous_kernel
from .launch import launch
from .rows import aligned, block_and_warps, index_per_chunk, row_stride
from .sources import L1, first_column, load_values, pick, source_row

_ROWS = (
    "x_ptrs",
    "x_row_strides",
    "residual_ptrs",
    "residual_row_strides",
    "gain_ptrs",
    "out_ptr",
    "out_row_stride",
)

# A heuristic that no GPU has measured: 128 rows of one program each fill the 132 SMs of an H100 once.
_SPLIT_CONCAT_ROWS = 128


@triton.jit
def _norm_concat(
    x_ptrs,
    x_row_strides,
    row_counts,
    residual_ptrs,
    residual_row_strides,
    index_ptrs,
    gain_ptrs,
    norm_offset,
    sum_squares_ptr,
    sum_squares_row_stride,
    eps,
    out_ptr,
    out_row_stride,
    WIDTHS: tl.constexpr,
    WIDTH: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Output row program_id(0); chunks program_id(1), + num_programs(1), ..."""
    n = tl.program_id(0).to(tl.int64)
    wait_for_previous_kernel(PDL)
    let_next_kernel_start(PDL)

    rstd = 1.0
    if NORM == "concat":
        squares = 0.0
        lanes = tl.zeros((BLOCK,), dtype=tl.float32)
        for k in range(len(WIDTHS)):
            row, in_range = source_row(index_ptrs, row_counts, k, n, L1)
            if sum_squares_ptr is not None:
                squares += tl.load(sum_squares_ptr + row * sum_squares_row_stride + k, mask=in_range, other=0.0)
            else:
                for start in range(0, pick(WIDTHS, k), BLOCK):
                    h = start + tl.arange(0, BLOCK)
                    value = load_values(
                        x_ptrs, x_row_strides, residual_ptrs, residual_row_strides, WIDTHS, k, row, in_range, h, L1
                    )
                    lanes += value * value
        rstd = rstd_of((squares + tl.sum(lanes, axis=0)) / WIDTH + eps[0])

    for k in range(tl.program_id(1), len(WIDTHS), tl.num_programs(1)):
        row, in_range = source_row(index_ptrs, row_counts, k, n, L1)
        H = pick(WIDTHS, k)
        if NORM == "chunk":
            if sum_squares_ptr is not None:
                squares = tl.load(sum_squares_ptr + row * sum_squares_row_stride + k, mask=in_range, other=0.0)
            else:
                lanes = tl.zeros((BLOCK,), dtype=tl.float32)
                for start in range(0, H, BLOCK):
                    h = start + tl.arange(0, BLOCK)
                    value = load_values(
                        x_ptrs, x_row_strides, residual_ptrs, residual_row_strides, WIDTHS, k, row, in_range, h, L1
                    )
                    lanes += value * value
                squares = tl.sum(lanes, axis=0)
            rstd = rstd_of(squares / H + pick(eps, k))

        # Where one block covers the chunk, the compiler drops this second load.
        column = first_column(WIDTHS, k)
        for start in range(0, H, BLOCK):
            h = start + tl.arange(0, BLOCK)  # [BLOCK]
            value = load_values(
                x_ptrs, x_row_strides, residual_ptrs, residual_row_strides, WIDTHS, k, row, in_range, h, L1
            )
            normed = value * rstd
            if gain_ptrs is not None:
                gain_column = column if len(gain_ptrs) == 1 else 0  # of the one matrix [K, H] or vector [K*H]
                gain = to_fp32(tl.load(pick(gain_ptrs, k) + gain_column + h, mask=h < H, other=0.0))
                normed *= norm_offset + gain
            # A row whose index is out of range stays zero, also where the gain is infinite.
            normed = tl.where(in_range, round_to(normed, out_ptr.dtype.element_ty), 0.0)
            tl.store(out_ptr + n * out_row_stride + column + h, normed, mask=h < H)


def run(record: tuple) -> None:
    """One launch for a checked `NormConcat` record."""
    run_sources(*record)


def run_sources(sources: tuple, out: Tensor) -> None:
    chunks, num_chunks, norm, gains, eps, norm_offset, residuals, indices, sum_squares = sources
    N, width = out.shape
    if out.numel() == 0:
        return
    packed = len(chunks) != num_chunks
    widths = (width // num_chunks,) * num_chunks if packed else tuple(chunk.shape[1] for chunk in chunks)
    block, num_warps = block_and_warps(max(widths))
    one_program_per_row = norm == "concat" and sum_squares is None and N > _SPLIT_CONCAT_ROWS
    pdl = has_pdl(out.device)
    launch(
        _norm_concat,
        (N, 1 if one_program_per_row else num_chunks, 1),
        (
            tuple(chunks),
            tuple(map(row_stride, chunks)),
            tuple(chunk.shape[0] for chunk in chunks),
            tuple(residuals) or None,
            tuple(map(row_stride, residuals)) or None,
            index_per_chunk(indices, chunks),
            tuple(gains) or None,
            norm_offset,
            sum_squares,
            row_stride(sum_squares),
            tuple(eps),
            out,
            row_stride(out),
        ),
        {"WIDTHS": widths, "WIDTH": width, "NORM": norm, "BLOCK": block, "PDL": pdl},
        aligned=_ROWS if aligned(*chunks, *residuals, *gains, out) else (),
        num_warps=num_warps,
        pdl=pdl,
        device=out.device,
    )
