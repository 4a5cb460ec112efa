"""The emulated tensor cores against the PTX ISA: where its own tables place each element, written here independently of
where a kernel or the emulation looks for it."""

from types import ModuleType

import pytest
import torch


def _bits(numbers: torch.Tensor) -> torch.Tensor:
    """The bf16 bits of small integers."""
    return numbers.bfloat16().view(torch.int16).int() & 0xFFFF


def _pairs(numbers: torch.Tensor) -> list[list[int]]:
    """Registers of two values each, the first in the lower half."""
    bits = _bits(numbers).long()
    return (bits[:, ::2] | bits[:, 1::2] << 16).tolist()


def _integers(*shape: int) -> torch.Tensor:
    return torch.randint(-8, 8, shape, generator=torch.Generator().manual_seed(0)).float()


# "Matrix Fragments for mma.m16n8k16 with floating point type": groupID = %laneid >> 2, threadID_in_group = %laneid % 4.
def _row_of_a(lane: int, i: int) -> int:
    return lane >> 2 if 0 <= i < 2 or 4 <= i < 6 else (lane >> 2) + 8


def _column_of_a(lane: int, i: int) -> int:
    return lane % 4 * 2 + (i & 1) if i < 4 else lane % 4 * 2 + (i & 1) + 8


def _row_of_b(lane: int, i: int) -> int:
    return lane % 4 * 2 + (i & 1) if i < 2 else lane % 4 * 2 + (i & 1) + 8


def _row_of_c(lane: int, i: int) -> int:
    return lane >> 2 if i < 2 else (lane >> 2) + 8


def _column_of_c(lane: int, i: int) -> int:
    return lane % 4 * 2 + (i & 1)


def test_mma(emulation: ModuleType) -> None:
    a, b = _integers(16, 16), _integers(16, 8)
    of_a = torch.stack([a[_row_of_a(lane, i), _column_of_a(lane, i)] for lane in range(32) for i in range(8)])
    of_b = torch.stack([b[_row_of_b(lane, i), lane >> 2] for lane in range(32) for i in range(4)])
    sums = emulation.multiply_warp(_pairs(of_a.view(32, 8)), _pairs(of_b.view(32, 4)))
    product = a @ b
    for lane in range(32):
        assert sums[lane] == [product[_row_of_c(lane, i), _column_of_c(lane, i)] for i in range(4)]


# "128B swizzle": for each of 8 rows, which of its 8 parts of 16 bytes lies in each place.
_SWIZZLE = ("01234567", "10325476", "23016745", "32107654", "45670123", "54761032", "67452301", "76543210")


def _swizzled(rows: torch.Tensor) -> list[int]:
    """The words of shared memory that has these rows of 64 values, swizzled."""
    placed = torch.empty_like(rows)
    for row in range(rows.shape[0]):
        for place, part in enumerate(_SWIZZLE[row % 8]):
            placed[row, place * 8 : place * 8 + 8] = rows[row, int(part) * 8 : int(part) * 8 + 8]
    return [word for words in _pairs(placed) for word in words]


@pytest.mark.parametrize("first_row", [0, 64])
@pytest.mark.parametrize("step", range(4))
def test_wgmma(emulation: ModuleType, step: int, first_row: int) -> None:
    """m64n64k16, a in registers and b K-major in shared memory: "Register Fragments for wgmma.mma_async.m64nNk16",
    with 16 rows for each warp, and "Matrix Descriptor Format"."""
    a, b = _integers(64, 16), _integers(128, 64)
    of_a = torch.stack(
        [a[t // 32 * 16 + _row_of_a(t % 32, i), _column_of_a(t % 32, i)] for t in range(128) for i in range(8)]
    )
    address = first_row * 128 + step * 32
    descriptor = (
        (address & 0x3FFFF) >> 4  # bits 0 to 13: matrix-descriptor-encode(start address)
        | 1024 >> 4 << 32  # bits 32 to 45: the same of the stride from 8 rows to the next 8
        | 1 << 62  # bits 62 and 63: 1 for the 128-byte swizzle
    )
    assert emulation.matrix_descriptor(first_row * 128) + (step * 32 >> 4) == descriptor
    sums = emulation.multiply_warpgroup(_pairs(of_a.view(128, 8)), _swizzled(b), descriptor)
    product = a @ b[first_row : first_row + 64, step * 16 : step * 16 + 16].t()
    for t in range(128):
        row = [t // 32 * 16 + t % 32 // 4 + i // 2 % 2 * 8 for i in range(32)]
        assert sums[t] == [product[row[i], i // 4 * 8 + t % 4 * 2 + i % 2] for i in range(32)]


def test_ldmatrix(emulation: ModuleType) -> None:
    """.m8n8.x4.b16: threads 0 to 7 have the addresses of the first matrix's rows, 8 to 15 of the second's, ...; of each
    matrix thread t gets elements 2 (t % 4) and the next of row t / 4."""
    matrices = _integers(4, 8, 8)
    order = torch.randperm(32, generator=torch.Generator().manual_seed(1))  # rows may lie anywhere
    memory = torch.empty(32, 8)
    memory[order] = matrices.view(32, 8)
    words = [word for words in _pairs(memory) for word in words]
    loaded = emulation.load_matrices((order * 16).tolist(), words)
    for t in range(32):
        expected = matrices[:, t // 4, t % 4 * 2 : t % 4 * 2 + 2]
        assert [loaded[t]] == _pairs(expected.reshape(1, 8))
