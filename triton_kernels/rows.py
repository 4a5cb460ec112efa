"""Rows as the launchers describe them to `launch`: strides, blocks, and when a load may be 16 bytes wide."""

import triton
from torch import Tensor

# The widest row of shapes.json: 16 warps of 16 columns a thread. Wider ones are walked in blocks, which a norm reads
# twice. At 8 columns a thread: a loop over blocks of 16 spills, on sm_80 with Triton 3.7 and on sm_89 with 3.8.
_WIDEST_ROW, _BLOCK_OF_WIDER_ROWS = 8192, 4096


def row_stride(rows: Tensor | None) -> int:
    """The stride of a single row is whatever its view left there; it is never used, but it has to be aligned."""
    return 0 if rows is None or rows.shape[0] <= 1 else rows.stride(0)


def index_per_chunk(indices: list[Tensor | None], chunks: list[Tensor]) -> tuple[Tensor | None, ...]:
    """An index for each entry of `chunks`, None where its rows are taken in order."""
    if len(indices) == len(chunks):
        return tuple(indices)
    return (indices[0] if indices else None,) * len(chunks)


def aligned(*tensors: Tensor | None) -> bool:
    """Whether every base address, in bytes, and every row stride, in elements, is a multiple of 16.

    All or nothing: an op then has two binaries, not one for each combination of aligned arguments.
    """
    bits = 0
    for tensor in tensors:
        if tensor is not None:
            bits |= tensor.data_ptr() | (row_stride(tensor) if tensor.dim() == 2 else 0)
    return bits % 16 == 0


def block_and_warps(width: int) -> tuple[int, int]:
    """(columns of a block, warps): 16 columns a thread, two 16-byte loads of bf16 in flight."""
    if width > _WIDEST_ROW:
        return _BLOCK_OF_WIDER_ROWS, 16
    block = triton.next_power_of_2(width)
    return block, max(block // 512, 1)
