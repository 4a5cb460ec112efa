"""read_stream, copy_stream and add_stream: every byte once, no byte beside them, and no access optimized away."""

import pytest
import torch
from eagle_kernels.bench.measure import COPY_WALKS, READ_WALKS
from torch import Tensor

from backends import needs_compiled
from guards import between_forbidden_pages, same_bits

pytestmark = needs_compiled

WALKS = sorted({*READ_WALKS, *COPY_WALKS, (8, 512, 512), (16, 512, 0), (1, 512, 512), (6, 1024, 512)})
SIZES = (0, 1, 63, 64, 511, 512, 8191, 8192, 100_003, 1 << 20, (3 << 20) + 17)


def random_bytes(size: int) -> Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))


def read(data: Tensor, walk: tuple[int, int, int]) -> Tensor:
    """The sums of the pieces, in an output that was poisoned before."""
    size = data.numel() * data.element_size()
    sums = torch.full((-(-size // (walk[0] * walk[1])),), -77, dtype=torch.int64)
    torch.ops.eagle_kernels_C.read_stream(data, *walk, sums)
    return sums


def expected_sums(data: Tensor, walk: tuple[int, int, int]) -> Tensor:
    """The sum of the 64-bit words of each piece, which wraps around; past the end there are zeros."""
    piece = walk[0] * walk[1]
    padded = torch.zeros(-(-data.numel() // piece) * piece, dtype=torch.uint8)
    padded[: data.numel()] = data
    return padded.view(torch.int64).view(-1, piece // 8).sum(1)


@pytest.mark.parametrize("walk", WALKS, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_every_byte_is_read_once(size: int, walk: tuple[int, int, int]) -> None:
    data = random_bytes(size)
    assert torch.equal(read(data, walk), expected_sums(data, walk))


@pytest.mark.parametrize("walk", WALKS, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_a_copy_has_every_bit_and_writes_nothing_beside(size: int, walk: tuple[int, int, int]) -> None:
    for shift in (0, 1):  # on a cache line, and off it
        buffer = torch.full((size + 192,), 77, dtype=torch.uint8)
        begin = -buffer.data_ptr() % 64 + 64 + shift
        out, data = buffer[begin : begin + size], random_bytes(size)
        torch.ops.eagle_kernels_C.copy_stream(data, *walk, out)
        assert torch.equal(out, data)
        other = random_bytes(size).flip(0)
        torch.ops.eagle_kernels_C.add_stream(data, other, *walk, out)
        assert torch.equal(out, expected_sum(data, other))
        assert (buffer[:begin] == 77).all() and (buffer[begin + size :] == 77).all()


def expected_sum(a: Tensor, b: Tensor) -> Tensor:
    """The sums of 64-bit words, which wrap around; a carry past the end is dropped."""
    padded = torch.zeros(2, -(-a.numel() // 8) * 8 + 8, dtype=torch.uint8)
    padded[0, : a.numel()], padded[1, : b.numel()] = a, b
    return padded.view(torch.int64).sum(0).view(torch.uint8)[: a.numel()]


def test_a_large_copy_goes_around_the_caches_and_has_every_bit() -> None:
    data = torch.randint(-(2**31), 2**31 - 1, (34 << 18,), dtype=torch.int32)  # 34 MiB: streamed from 32 MiB on
    for walk in COPY_WALKS:
        out = torch.zeros_like(data)
        torch.ops.eagle_kernels_C.copy_stream(data, *walk, out)
        assert torch.equal(out, data)
        torch.ops.eagle_kernels_C.add_stream(data, data.flip(0), *walk, out)
        words = data.view(torch.int64) + data.flip(0).view(torch.int64)
        assert torch.equal(out.view(torch.int64), words)


@pytest.mark.parametrize("at", ["begin", "end"])
@pytest.mark.parametrize("size", [64, 100_003, 1 << 18])
def test_no_page_beside_the_operands_is_touched(size: int, at: str) -> None:
    data, out = (between_forbidden_pages(random_bytes(size), at) for _ in range(2))
    for walk in WALKS:
        assert torch.equal(read(data, walk), expected_sums(data, walk))
        torch.ops.eagle_kernels_C.copy_stream(data, *walk, out.zero_())
        assert torch.equal(out, data)
        torch.ops.eagle_kernels_C.add_stream(data, data, *walk, out.zero_())
        assert torch.equal(out, expected_sum(data, data))


def test_dtypes_and_shapes_are_bytes() -> None:
    data = torch.randn(37, 1000).bfloat16()
    out = torch.empty_like(data)
    torch.ops.eagle_kernels_C.copy_stream(data, 4, 512, 0, out)
    assert same_bits(out, data)
    assert torch.equal(read(data, (4, 512, 0)), expected_sums(data.view(torch.uint8).view(-1), (4, 512, 0)))


@pytest.mark.parametrize(
    "walk, message",
    [
        ((3, 512, 0), r"^read_stream: streams: value \("),
        ((1, 100, 0), r"^read_stream: run_bytes: value \("),
        ((1, 0, 0), r"^read_stream: run_bytes: value \("),
        ((16, 1 << 60, 0), r"^read_stream: run_bytes: value \("),  # 16 of them were 0 bytes, by which it divided
        ((1, 512, 1024), r"^read_stream: ahead_bytes: value \("),
    ],
)
def test_a_bad_walk_is_refused(walk: tuple[int, int, int], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        torch.ops.eagle_kernels_C.read_stream(torch.zeros(512), *walk, torch.zeros(4, dtype=torch.int64))


def test_bad_tensors_are_refused() -> None:
    streams, data = torch.ops.eagle_kernels_C, torch.zeros(64, 64)
    with pytest.raises(RuntimeError, match=r"^read_stream: sums: shape \("):
        streams.read_stream(data, 1, 512, 0, torch.zeros(31, dtype=torch.int64))
    with pytest.raises(RuntimeError, match=r"^read_stream: sums: dtype \("):
        streams.read_stream(data, 1, 512, 0, torch.zeros(32))
    with pytest.raises(RuntimeError, match=r"^read_stream: data: strides \("):
        streams.read_stream(data[:, :32], 1, 512, 0, torch.zeros(16, dtype=torch.int64))
    with pytest.raises(RuntimeError, match=r"^copy_stream: out: overlap \("):
        streams.copy_stream(data[:32], 1, 512, 0, data[16:48])
    with pytest.raises(RuntimeError, match=r"^copy_stream: out: dtype \("):
        streams.copy_stream(data, 1, 512, 0, data.bfloat16())
    with pytest.raises(RuntimeError, match=r"^add_stream: b: shape \("):
        streams.add_stream(data, data[:32], 1, 512, 0, data.clone())
    with pytest.raises(RuntimeError, match=r"^add_stream: out: overlap \("):
        streams.add_stream(data.clone(), data, 1, 512, 0, data)
