"""The sources of norm_concat and norm_concat_linear as kernels see them: tuples of pointers with an entry per chunk, or
a single entry for all K (a packed tensor, one gain matrix). The terms are those of `ops/sources.py`.

Indexing a tuple at run time takes one select per entry, on uniform registers, and lets one body serve all sources; K
branches with a body each would be K times the code. Presence and widths are known at compile time, row counts and
strides are not. index_ptrs and residual_ptrs may hold None. Triton 3.6 can then neither take the length of the tuple
nor compare it with None, so kernels ask row_counts and residual_row_strides instead, which have the same entries.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dialect import round_to, to_fp32
from .launch import I64, NONE, Origin, address_of, pointer_to, pointers_to, row_stride_of, rows_of

# Cache modifiers: the nearest cache that a load may read. Parameters CACHE have no default: Triton 3.6 cannot compile
# one that is a string.
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
    """(row of chunk k, whether it is in range) for output row n. A row out of range becomes 0 and is never read."""
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
    # Not in_range & (h < width): Triton 3.9's interpreter turns a scalar bool into int32 where it is combined with a
    # block.
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
        # Where there is no residual, value stays: value + 0 would turn -0 into 0.
        value = tl.where(given, total, value)
    return value


class Signature(NamedTuple):
    """The properties of the sources' tensors that binaries depend on, and the tensors' positions in the operands of
    `describe`."""

    dtype: torch.dtype
    entries: int  # chunks
    residuals: tuple[bool, ...]  # whether each is there; () without any
    indices: tuple[torch.dtype | None, ...]  # (), one for all chunks, or one per entry of chunks
    gains: int
    gain_dtype: torch.dtype | None
    has_sum_squares: bool

    @property
    def types(self) -> tuple:
        """The types of the kernels' first arguments, x_ptrs to index_ptrs."""
        x, strides = pointer_to(self.dtype), (I64,) * self.entries
        residuals = tuple(x if given else NONE for given in self.residuals)
        return (
            (x,) * self.entries,
            strides,
            strides,
            residuals or NONE,
            strides if residuals else NONE,
            pointers_to([None if position is None else self.indices[position] for position in self._index_of_entry]),
        )

    @property
    def origins(self) -> list[Origin]:
        """The origins of the numbers of these arguments."""
        chunks, first_residual = range(self.entries), self.entries
        residuals = range(first_residual, first_residual + len(self.residuals))
        first_index = residuals.stop
        indices = [p for p in self._index_of_entry if p is not None and self.indices[p] is not None]
        return [
            *map(address_of, chunks),
            *map(row_stride_of, chunks),
            *map(rows_of, chunks),
            *(address_of(position) for position, given in zip(residuals, self.residuals, strict=True) if given),
            *map(row_stride_of, residuals),
            *(address_of(first_index + position) for position in indices),
        ]

    @property
    def _index_of_entry(self) -> list[int | None]:
        """For each entry of chunks, the position of its index in `indices`."""
        count = len(self.indices)
        return [None if count == 0 else entry if count > 1 else 0 for entry in range(self.entries)]

    @property
    def gain_types(self) -> tuple | str:
        """The types of the argument gain_ptrs."""
        return (pointer_to(self.gain_dtype),) * self.gains or NONE

    @property
    def gain_origins(self) -> list[Origin]:
        first = self.entries + len(self.residuals) + len(self.indices)
        return [address_of(first + k) for k in range(self.gains)]

    @property
    def num_operands(self) -> int:
        """Of the sources: the position of a call's first operand after them. The last of them is sum_squares."""
        return self.entries + len(self.residuals) + len(self.indices) + self.gains + 1

    @property
    def sum_squares_types(self) -> tuple[str, str]:
        """The types of the arguments sum_squares_ptr and sum_squares_row_stride."""
        return pointer_to(torch.float32 if self.has_sum_squares else None), I64

    @property
    def sum_squares_origins(self) -> list[Origin]:
        position = self.num_operands - 1
        return [*([address_of(position)] if self.has_sum_squares else []), row_stride_of(position)]


def describe(sources: tuple) -> tuple[Signature, tuple[Tensor | None, ...]]:
    """The signature of a checked `ops.sources.Sources`, and its tensors as operands of `Launches`."""
    chunks, _, _, gains, _, _, residuals, indices, sum_squares = sources
    signature = (
        chunks[0].dtype,
        len(chunks),
        tuple([residual is not None for residual in residuals]) if residuals else (),
        tuple([None if index is None else index.dtype for index in indices]) if indices else (),
        len(gains),
        gains[0].dtype if gains else None,
        sum_squares is not None,
    )
    # Signature(*signature) would go through a function in Python.
    return tuple.__new__(Signature, signature), (*chunks, *residuals, *indices, *gains, sum_squares)
