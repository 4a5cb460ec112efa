"""The blocks and warps with which launchers cover the columns of rows."""

# The widest row of shapes.json takes 16 warps with 16 columns per thread. Wider rows take a loop over blocks, and a
# norm reads them twice. Those blocks have 8 columns per thread: with 16 the loop spills, on sm_80 with Triton 3.7 and
# on sm_89 with 3.8.
_WIDEST_ROW, _BLOCK_OF_WIDER_ROWS = 8192, 4096


def cdiv(a: int, b: int) -> int:
    """Ceiling division. triton.cdiv is a jitted function and takes 3 us a call from Python."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n > 0."""
    return 1 << (n - 1).bit_length()


def block_and_warps(width: int) -> tuple[int, int]:
    """(columns of a block, warps): 16 columns per thread, two 16-byte loads of bf16 in flight."""
    if width > _WIDEST_ROW:
        return _BLOCK_OF_WIDER_ROWS, 16
    block = next_power_of_2(width)
    return block, max(block // 512, 1)


def column_block_and_warps(width: int) -> tuple[int, int]:
    """The same for a kernel whose programs split the columns of a row: the widest block that leaves at most an eighth
    of the lanes idle (one block for 2880 columns leaves 30 %), at least 512 columns: 16 bytes for AMD's 64 lanes."""
    block, num_warps = block_and_warps(width)
    while block > 512 and 8 * width < 7 * cdiv(width, block) * block:
        block //= 2
    return block, min(num_warps, max(block // 512, 1))
