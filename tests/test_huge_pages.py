"""Weights in huge pages: where Linux has put them, and that nothing else changes."""

import ctypes
import fcntl
import mmap
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import eagle_kernels as ek
from backends import environment_of
from eagle_kernels import huge_pages
from eagle_kernels.engines import decision
from eagle_kernels.engines.projection import EngineProjection, run_probe
from eagle_kernels.engines.sglang import stage
from eagle_kernels.huge_pages import use_huge_pages
from guards import same_bits

pytestmark = pytest.mark.usefixtures("turned_on")

PAGE = 2 << 20
SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")


def _shows_huge_pages() -> bool:
    """Whether this is a Linux that gives out huge pages only on request, does so at once, and says where they are."""
    release = re.match(r"(\d+)\.(\d+)", Path("/proc/sys/kernel/osrelease").read_text()) if SIZE.exists() else None
    is_new = release is not None and tuple(map(int, release.groups())) >= (6, 7)
    is_asked = huge_pages.mode() == "madvise" and os.environ.get("THP_MEM_ALLOC_ENABLE", "0") == "0"
    return is_new and is_asked and int(SIZE.read_text()) == PAGE


needs_huge_pages = pytest.mark.skipif(
    not _shows_huge_pages(), reason="Linux 6.7 or later that gives out huge pages, of 2 MB, only on request"
)


def whole_pages(tensor: Tensor) -> int:
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.untyped_storage().nbytes()
    return end // PAGE - -(-begin // PAGE)


def pages_of(tensor: Tensor) -> int:
    """The huge pages that begin within the tensor, by the ioctl PAGEMAP_SCAN (linux/fs.h)."""
    is_huge, end, found = 1 << 6, tensor.data_ptr() + tensor.untyped_storage().nbytes(), (ctypes.c_uint64 * 3 * 1024)()
    # Size, flags, begin, end, end of the walk, regions, their number, most pages; masks: inverted, all, any, returned.
    begin = -(-tensor.data_ptr() // PAGE) * PAGE
    arguments = struct.pack(
        "12Q", 96, 0, begin, end // PAGE * PAGE, 0, ctypes.addressof(found), 1024, 0, 0, is_huge, 0, is_huge
    )
    with Path("/proc/self/pagemap").open("rb") as pagemap:
        count = fcntl.ioctl(pagemap, 3 << 30 | 96 << 16 | ord("f") << 8 | 16, bytearray(arguments))
    return sum(last - first for first, last, _ in found[:count]) // PAGE


def weight() -> Tensor:
    """72 MB of bf16 in small pages, whatever the allocator had there before."""
    tensor = torch.empty(6000, 6000, dtype=torch.bfloat16)
    madvise, _ = huge_pages._madvise_and_page()
    begin = -(-tensor.data_ptr() // PAGE) * PAGE
    for advice in (mmap.MADV_NOHUGEPAGE, mmap.MADV_DONTNEED):
        madvise(begin, whole_pages(tensor) * PAGE, advice)
    return tensor.normal_()


@pytest.fixture
def turned_on() -> Iterator[None]:
    with environment_of(EAGLE_KERNELS_HUGE_PAGES="1"):
        yield


@needs_huge_pages
def test_whole_pages_move_with_their_values() -> None:
    tensor = weight()
    before, address = tensor.clone(), tensor.data_ptr()
    assert whole_pages(tensor) >= 33 and pages_of(tensor) == 0
    for _ in range(2):
        use_huge_pages(tensor)
        # Where memory is fragmented, or pinned for a moment, Linux may leave single pages as they are.
        assert pages_of(tensor) > whole_pages(tensor) / 2
        assert tensor.data_ptr() == address
        assert same_bits(tensor, before)


@needs_huge_pages
def test_only_pages_that_lie_within_a_view() -> None:
    tensor = weight()
    rows = PAGE // (tensor.shape[1] * tensor.element_size())
    use_huge_pages(tensor[:rows], tensor[::2][:0], tensor[:, :8][:2], None)  # within each lies no whole page
    assert pages_of(tensor) == 0
    use_huge_pages(tensor[: 3 * rows])
    assert 0 < pages_of(tensor) <= 3


@needs_huge_pages
def test_it_can_be_turned_off() -> None:
    tensor = weight()
    with environment_of(EAGLE_KERNELS_HUGE_PAGES="0"):
        use_huge_pages(tensor)
    assert pages_of(tensor) == 0


class Subclass(Tensor):
    pass


def without_memory() -> Iterator[Tensor]:
    freed = torch.empty(PAGE)
    freed.untyped_storage().resize_(0)
    with FakeTensorMode():
        fake = torch.empty(4 * PAGE)
    yield from (freed, fake, torch.empty(4 * PAGE, device="meta"), torch._efficientzerotensor(4 * PAGE), torch.empty(0))
    yield from (
        torch.randn(99, 99).to_sparse(),
        torch.randn(999, 999).to_mkldnn(),
        torch.empty(4 * PAGE).as_subclass(Subclass),
    )
    yield torch.nested.nested_tensor([torch.randn(3, PAGE), torch.randn(2, PAGE)])


class Requests(list):
    """What Linux is asked: (address, bytes, advice)."""

    def cover(self, tensor: Tensor) -> bool:
        """Whether both requests were made for the whole pages of a tensor; forgets all."""
        begin, end = -(-tensor.data_ptr() // SMALL) * SMALL, (tensor.data_ptr() + tensor.nbytes) // SMALL * SMALL
        made = [*self]
        self.clear()
        return begin < end and all((begin, end - begin, advice) in made for advice in (14, 25))


SMALL = 4096  # with such pages small weights have whole ones


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Requests:
    """A recorder in Linux's place, on any machine."""
    requests = Requests()
    monkeypatch.setattr(huge_pages, "_madvise_and_page", lambda: (lambda *request: requests.append(request), SMALL))
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 14, raising=False)
    return requests


def test_nothing_is_asked_of_what_has_no_memory_of_a_cpu(asked: Requests) -> None:
    use_huge_pages(*without_memory())
    assert asked == []
    for tensor in (torch.empty(9999), torch.empty(9999)[1:], torch.empty(99, 99)[1:]):
        use_huge_pages(tensor)
        assert asked.cover(tensor)


def test_nothing_is_asked_inside_a_transform_or_a_trace(asked: Requests) -> None:
    def doubled(x: Tensor) -> Tensor:
        use_huge_pages(x)
        return 2 * x

    x = torch.randn(4 * SMALL)
    torch.func.vmap(doubled)(x.view(2, -1))
    torch.func.grad(lambda x: doubled(x).sum())(x)
    torch.func.jvp(doubled, (x,), (x,))
    torch.compile(doubled, backend="eager", fullgraph=True)(x)
    assert asked == []


@pytest.fixture
def projection() -> ek.Eagle3Projection:
    config = ek.Eagle3Config(num_chunks=3, target_hidden_size=64, hidden_size=136, chunk_norm=True)
    layer = ek.Eagle3Projection(config, dtype=torch.bfloat16)
    torch.nn.init.normal_(layer.fc.weight)
    return layer


def test_a_projection_asks_as_it_loads_and_is_moved(projection: ek.Eagle3Projection, asked: Requests) -> None:
    projection.load_state_dict(projection.state_dict())
    assert asked.cover(projection.fc.weight)
    assert asked.cover(projection.to(torch.float16).fc.weight)


@pytest.mark.parametrize("format", ["fp8_row", "bf16_12bit"])
def test_a_quantized_projection_asks_for_its_codes(
    projection: ek.Eagle3Projection, asked: Requests, format: str
) -> None:
    projection.quantize(format)
    assert asked.cover(projection.fc.weight)
    projection.load_state_dict(projection.state_dict())
    assert asked.cover(projection.fc.weight)


def test_warmup_asks_for_the_weight_of_an_op_and_of_a_module(projection: ek.Eagle3Projection, asked: Requests) -> None:
    chunks, weight = [torch.randn(1, 64).bfloat16() for _ in range(3)], torch.randn(136, 192).bfloat16()
    ek.warmup("norm_concat_linear", chunks, weight)
    assert asked.cover(weight)
    codes = ek.quantize(weight, "int8_row")
    ek.warmup("norm_concat_linear", chunks, codes)
    assert asked.cover(codes.codes)
    ek.warmup(projection, chunks)
    assert asked.cover(projection.fc.weight)


@torch.no_grad()
def test_a_plugin_asks_for_each_weight_of_one_shape(asked: Requests, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the first one is probed, and for the next ones, whose shape has been timed."""
    fc = torch.nn.Linear(192, 136, bias=False, dtype=torch.bfloat16)
    run_probe(EngineProjection(fc, 3), torch.randn(2, 192).bfloat16(), None)
    assert asked.cover(fc.weight)
    timed = [[1.0] * len(decision.ROWS)] * 2
    monkeypatch.setattr(decision, "once", lambda key, settle: timed)
    monkeypatch.setattr(stage, "_cpu_group", lambda: None)
    stage._decide("fc", EngineProjection(fc, 3), fc)
    assert asked.cover(fc.weight)
