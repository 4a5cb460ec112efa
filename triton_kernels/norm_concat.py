"""norm_concat in Triton: one program per row and source, one launch.

    out[n] = round(concat_k(value_k[n] * rstd_k[n] * (norm_offset + gain_k)))        (the terms: `ops/sources.py`)

A concat norm needs the squares of a whole row. Up to 128 rows, each of a row's K programs sums all of them: K times the
reads, from L2, but K times the programs. Above that, one program writes all chunks of its row.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from .dialect import let_next_kernel_start, round_to, rstd_of, to_fp32, wait_for_previous_kernel
from .launch import (
    FP32,
    I64,
    Launch,
    Launches,
    Step,
    address_of,
    constant,
    floating,
    integer,
    pointer_to,
    prepared,
    row_stride_of,
)
from .rows import block_and_warps
from .sources import L1, Signature, describe, first_column, load_values, pick, source_row

_ROWS = (
    "x_ptrs",
    "x_row_strides",
    "residual_ptrs",
    "residual_row_strides",
    "gain_ptrs",
    "out_ptr",
    "out_row_stride",
)

# A heuristic, not measured on a GPU: 128 rows of one program each fill the 132 SMs of an H100 once.
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
            # A row whose index is out of range stays zero, even where the gain is infinite.
            normed = tl.where(in_range, round_to(normed, out_ptr.dtype.element_ty), 0.0)
            tl.store(out_ptr + n * out_row_stride + column + h, normed, mask=h < H)


@prepared
def _prepare(
    sources: Signature,
    norm: str,
    num_eps: int,
    widths: tuple[int, ...],
    width: int,
    device: torch.device,
) -> Launches:
    return Launches(device, [step_of(sources, norm, num_eps, widths, width, device, sources.num_operands)])


def step_of(
    sources: Signature, norm: str, num_eps: int, widths: tuple[int, ...], width: int, device: torch.device, out: int
) -> Step:
    """The step of a call whose integers and floats are those of `numbers_of`. `out` is the position of the output."""
    block, num_warps = block_and_warps(max(widths))
    norm_types = sources.gain_types, FP32, *sources.sum_squares_types, (FP32,) * num_eps
    launch = Launch(
        _norm_concat,
        (*sources.types, *norm_types, pointer_to(sources.dtype), I64),
        {"WIDTHS": widths, "WIDTH": width, "NORM": norm, "BLOCK": block},
        device,
        aligned_together=_ROWS,
        num_warps=num_warps,
    )
    eps = map(floating, range(1, 1 + num_eps))
    norm_numbers = *sources.gain_origins, floating(0), *sources.sum_squares_origins, *eps
    numbers = [*sources.origins, *norm_numbers, address_of(out), row_stride_of(out)]
    return Step(launch, (integer(0), integer(1), constant(1)), numbers)


def run(record: tuple) -> None:
    """One launch for a checked `NormConcat` record."""
    sources, out = record
    N, width = out.shape
    if N == 0 or width == 0:
        return
    signature, operands = describe(sources)
    launches = _prepare(signature, sources.norm, len(sources.eps), widths_of(sources, width), width, out.device)
    integers, floats = numbers_of(sources, N)
    launches((*operands, out), integers, floats)


def widths_of(sources: Any, width: int) -> tuple[int, ...]:
    """The widths of all K chunks, also where they are packed."""
    chunks, num_chunks = sources[:2]
    if len(chunks) == num_chunks:
        return tuple([chunk.shape[1] for chunk in chunks])
    return (width // num_chunks,) * num_chunks


def numbers_of(sources: Any, N: int) -> tuple[tuple[int, int], tuple[float, ...]]:
    """The integers and floats of a call."""
    _, num_chunks, norm, _, eps, norm_offset, _, _, sum_squares = sources
    one_program_per_row = norm == "concat" and sum_squares is None and N > _SPLIT_CONCAT_ROWS
    return (N, 1 if one_program_per_row else num_chunks), (norm_offset, *eps)
