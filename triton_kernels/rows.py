"""Rows as the launchers describe them to `launch`: strides, blocks, and when a load may be 16 bytes wide."""

from .alignment import row_stride

__all__ = [
    "block_and_warps",
    "cdiv",
    "column_block_and_warps",
    "next_power_of_2",
    "row_stride",
]

# The widest row of shapes.json: 16 warps of 16 columns a thread. Wider ones are walked in blocks, which a norm reads
# twice. At 8 columns a thread: a loop over blocks of 16 spills, on sm_80 with Triton 3.7 and on sm_89 with 3.8.
_WIDEST_ROW, _BLOCK_OF_WIDER_ROWS = 8192, 4096


def cdiv(a: int, b: int) -> int:
    """As triton.cdiv, which is a jitted function: 3 us a call from Python."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n > 0."""
    return 1 << (n - 1).bit_length()


def block_and_warps(width: int) -> tuple[int, int]:
    """(columns of a block, warps): 16 columns a thread, two 16-byte loads of bf16 in flight."""
    if width > _WIDEST_ROW:
        return _BLOCK_OF_WIDER_ROWS, 16
    block = next_power_of_2(width)
    return block, max(block // 512, 1)


def column_block_and_warps(width: int) -> tuple[int, int]:
    """The same of a kernel whose programs share the columns of a row: the widest block with which at most an eighth of
    the lanes is idle, of 512 columns at least: 16 bytes for AMD's 64 lanes. One block of 2880 would idle 30 %."""
    block, num_warps = block_and_warps(width)
    while block > 512 and 8 * width < 7 * cdiv(width, block) * block:
        block //= 2
    return block, min(num_warps, max(block // 512, 1))
