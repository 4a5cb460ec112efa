"""The sources of norm_concat and norm_concat_linear as kernels see them: tuples of pointers, an entry per chunk, or one
that stands for all K (a packed tensor, one gain matrix). The terms are those of `ops/sources.py`.

A tuple costs one select per entry to index at run time, on uniform registers, and one kernel then serves all sources;
K branches with a body each would be K times the code. Presence and widths are known at compile time, row counts and
strides are not. index_ptrs and residual_ptrs may hold None; Triton 3.6 then neither takes the length of such a tuple
nor compares it with None, so both are asked of row_counts and residual_row_strides, which run beside them.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dialect import round_to, to_fp32
from .launch import I64, NONE, address, pointer_to, pointers_to
from .rows import row_stride

# Cache modifiers: from where a load may take what it reads. CACHE has no default: Triton 3.6 cannot compile a string.
L1 = tl.constexpr("")
L2 = tl.constexpr(".cg")


@triton.jit
def pick(values, k):
    """values[k], or the only value."""
    picked = values[0]
    for j in tl.static_range(1, len(values)):
        picked = tl.where(k == j, values[j], picked)
    return picked


@triton.jit
def first_column(WIDTHS: tl.constexpr, k):
    """Where chunk k starts in the concat."""
    column = k * 0
    for j in tl.static_range(len(WIDTHS) - 1):
        column += tl.where(j < k, WIDTHS[j], 0)
    return column


@triton.jit
def source_row(index_ptrs, row_counts, k, n, CACHE: tl.constexpr):
    """(row of chunk k, whether there is one) for output row n; one that is not there becomes 0 and is never read."""
    row = n
    for j in tl.static_range(len(row_counts)):
        if index_ptrs[j] is not None:
            mine = (k == j) | (len(row_counts) == 1)
            index = tl.load(index_ptrs[j] + n, mask=mine, other=0, cache_modifier=CACHE).to(tl.int64)
            row = tl.where(mine, index, row)
    in_range = (row >= 0) & (row < pick(row_counts, k))
    return tl.where(in_range, row, 0), in_range


@triton.jit
def load_values(
    x_ptrs,
    x_row_strides,
    residual_ptrs,
    residual_row_strides,
    WIDTHS: tl.constexpr,
    k,
    row,
    in_range,
    h,
    CACHE: tl.constexpr,
):
    """round(x + residual) of chunk k in fp32, columns h: [BLOCK]; 0 beyond the row and where it is out of range."""
    # Not in_range & (h < width): the interpreter of 3.9 turns a scalar truth value into int32 where it meets a block.
    end = tl.where(in_range, pick(WIDTHS, k), 0)
    column = first_column(WIDTHS, k) if len(x_ptrs) == 1 else 0  # of a packed row
    x_ptr = pick(x_ptrs, k)
    x_row_ptr = x_ptr + row * pick(x_row_strides, k) + column
    value = to_fp32(tl.load(x_row_ptr + h, mask=h < end, other=0.0, cache_modifier=CACHE))
    if residual_row_strides is not None:
        residual_ptr = x_ptr
        given = k < 0
        for j in tl.static_range(len(residual_row_strides)):
            if residual_ptrs[j] is not None:
                mine = (k == j) | (len(residual_row_strides) == 1)
                residual_ptr = tl.where(mine, residual_ptrs[j], residual_ptr)
                given = given | mine
        residual_row_ptr = residual_ptr + row * pick(residual_row_strides, k) + column
        residual_end = tl.where(given, end, 0)
        residual = to_fp32(tl.load(residual_row_ptr + h, mask=h < residual_end, other=0.0, cache_modifier=CACHE))
        total = to_fp32(round_to(value + residual, x_ptr.dtype.element_ty))
        # Not value + 0 where there is none: that would turn -0 into 0.
        value = tl.where(given, total, value)
    return value


class Signature(NamedTuple):
    """What binaries depend on of the sources' tensors."""

    dtype: torch.dtype
    entries: int  # chunks
    residuals: tuple[bool, ...]  # whether each is there; () without any
    indices: tuple[torch.dtype | None, ...]  # per entry of chunks
    gains: tuple[torch.dtype, ...]

    @property
    def types(self) -> tuple:
        """Of the kernels' first arguments, x_ptrs to index_ptrs."""
        x, strides = pointer_to(self.dtype), (I64,) * self.entries
        residuals = tuple(x if given else NONE for given in self.residuals)
        return (
            (x,) * self.entries,
            strides,
            strides,
            residuals or NONE,
            strides if residuals else NONE,
            pointers_to(self.indices),
        )

    @property
    def gain_types(self) -> tuple | str:
        """Of the argument gain_ptrs."""
        return pointers_to(self.gains) or NONE


def describe(sources: tuple) -> tuple[Signature, tuple[int, ...], list[Any]]:
    """Of a checked `ops.sources.Sources`: its signature, the widths of its chunks (one of packed ones), and the numbers
    of the arguments `Signature.types`."""
    chunks, _, _, gains, _, _, residuals, indices, _ = sources
    numbers, shapes = [address(chunk) for chunk in chunks], [chunk.shape for chunk in chunks]
    # `row_stride` of each, whose calls take 0.5 us more.
    numbers += [chunk.stride()[0] if shape[0] > 1 else 0 for chunk, shape in zip(chunks, shapes)]  # noqa: B905
    numbers += [shape[0] for shape in shapes]
    given: tuple[bool, ...] = ()
    if residuals:
        given = tuple([residual is not None for residual in residuals])
        numbers += [address(residual) for residual in residuals if residual is not None]
        numbers += map(row_stride, residuals)
    index_dtypes: tuple[torch.dtype | None, ...] = (None,) * len(chunks)
    if indices:
        of_chunks: list[Tensor | None] = indices if len(indices) == len(chunks) else indices * len(chunks)
        index_dtypes = tuple([None if index is None else index.dtype for index in of_chunks])
        numbers += [address(index) for index in of_chunks if index is not None]
    signature = chunks[0].dtype, len(chunks), given, index_dtypes, tuple([gain.dtype for gain in gains])
    widths = tuple([shape[1] for shape in shapes])
    return tuple.__new__(Signature, signature), widths, numbers  # Signature(*signature) is a call of Python's
