"""The streams of a GPU's memory in Triton: every word once, and none beside them."""

import pytest
import torch
from eagle_kernels.bench import measure
from eagle_kernels.triton_kernels import memory_bandwidth
from eagle_kernels.triton_kernels.memory_bandwidth import BLOCKS, Block
from torch import Tensor

SIZES = (16, 2032, 2048, 2064, 8192, 50_000)
BESIDE = 77


def words(size: int) -> Tensor:
    generator = torch.Generator().manual_seed(size)
    return torch.randint(-(2**31), 2**31, (size,), generator=generator).int()


def poisoned(size: int) -> tuple[Tensor, Tensor]:
    """All of it, and its first `size` words."""
    buffer = torch.full((size + 64,), BESIDE, dtype=torch.int32)
    return buffer, buffer[:size]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_every_word_is_read_once(size: int, block: Block) -> None:
    data, count = words(size), -(-size // block.words)
    buffer, sums = poisoned(count)
    memory_bandwidth.read(data, sums, block)
    assert memory_bandwidth.programs(data, block) == count
    padded = torch.zeros(count * block.words, dtype=torch.int64)
    padded[:size] = data
    # Sums wrap around, as the words of 32 bits do.
    assert torch.equal(sums, padded.view(count, -1).sum(1).int())
    assert (buffer[count:] == BESIDE).all()


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_a_fill_and_a_copy_write_every_word_and_nothing_beside(size: int, block: Block) -> None:
    buffer, out = poisoned(size)
    memory_bandwidth.fill(out, block)
    assert torch.equal(out, (torch.arange(size) // block.words).int())
    data = words(size)
    memory_bandwidth.copy(data, out, block)
    assert torch.equal(out, data)
    assert (buffer[size:] == BESIDE).all()


def test_the_benchmark_streams_all_of_its_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU in place of a GPU, by its clock."""
    monkeypatch.setattr(measure, "_SECONDS", {"cuda": 0.0})
    monkeypatch.setattr(measure, "_THREAD_BYTES", 1 << 12)
    ceilings = measure.Ceilings("cpu", 1 << 15, 1.25, 1 << 40)
    size = ceilings.array_bytes
    for name, value in (("_device", "cuda"), ("are_streams", False), ("_matmul", {torch.float16: 1.0})):
        monkeypatch.setattr(ceilings, name, value)
    source, target = ceilings._source, ceilings._target
    for stream in ceilings._triton_streams():
        source.copy_(torch.arange(1, 1 + len(source)))
        target.fill_(-1)
        stream.variant.call(0)
        if stream.kind == "copy":
            assert torch.equal(source, target)
        assert bool((target == -1).any()) == bool((target == -1).all()) == (stream.kind == "read")
        assert stream.bytes == size * (2 if stream.kind == "copy" else 1)
    rates = ceilings.measure(torch.float16)
    assert rates.fastest == max(rates.copy, rates.read, rates.fastest) > 0 and rates.fastest_stream
