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


def is_moved(tensor: Tensor) -> bool:
    """Most of it: where memory is fragmented or pinned for a moment, Linux may leave single pages as they are."""
    return 0 < whole_pages(tensor) < 2 * pages_of(tensor)


# From 32 MB on malloc gives a tensor a mapping of its own: what is freed of a heap may be in huge pages already.
D, WIDTH = 6000, 3 * 2000


def weight() -> Tensor:
    """72 MB in small pages."""
    return torch.randn(D, WIDTH).bfloat16()


@pytest.fixture
def turned_on() -> Iterator[None]:
    with environment_of(EAGLE_KERNELS_HUGE_PAGES="1"):
        yield


@needs_huge_pages
def test_whole_pages_move_with_their_values() -> None:
    tensor = weight()
    before, address = tensor.clone(), tensor.data_ptr()
    assert whole_pages(tensor) >= 33 and pages_of(tensor) == 0
    use_huge_pages(tensor)
    assert is_moved(tensor)
    assert tensor.data_ptr() == address
    assert same_bits(tensor, before)
    use_huge_pages(tensor)
    assert is_moved(tensor)


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


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """What Linux would be asked, on any machine."""
    calls: list[tuple] = []
    monkeypatch.setattr(huge_pages, "_madvise_and_page", lambda: (lambda *call: calls.append(call), PAGE))
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 14, raising=False)
    return calls


def test_nothing_is_asked_of_what_has_no_memory_of_a_cpu(asked: list[tuple]) -> None:
    use_huge_pages(*without_memory())
    assert asked == []
    use_huge_pages(tensor := torch.empty(4 * PAGE))
    begin, size, advice = asked[0]
    assert begin % PAGE == 0 and tensor.data_ptr() <= begin < begin + size <= tensor.data_ptr() + 16 * PAGE
    assert advice == 14 and asked[1] == (begin, size, 25)


def test_nothing_is_asked_inside_a_transform_or_a_trace(asked: list[tuple]) -> None:
    def doubled(x: Tensor) -> Tensor:
        use_huge_pages(x)
        return 2 * x

    x = torch.randn(4 * PAGE)
    torch.func.vmap(doubled)(x.view(2, -1))
    torch.func.grad(lambda x: doubled(x).sum())(x)
    torch.func.jvp(doubled, (x,), (x,))
    torch.compile(doubled, backend="eager", fullgraph=True)(x)
    assert asked == []


@pytest.fixture
def projection() -> ek.Eagle3Projection:
    config = ek.Eagle3Config(num_chunks=3, target_hidden_size=WIDTH // 3, hidden_size=D, chunk_norm=True)
    return ek.Eagle3Projection(config, dtype=torch.bfloat16)


@needs_huge_pages
def test_a_projection_that_loads_moves_its_weight(projection: ek.Eagle3Projection) -> None:
    state = {name: torch.randn(tensor.shape).bfloat16() for name, tensor in projection.state_dict().items()}
    projection.load_state_dict(state)
    assert is_moved(projection.fc.weight)
    assert same_bits(projection.fc.weight, state["fc.weight"])
    moved = projection.to(torch.float16)
    assert is_moved(moved.fc.weight)


@needs_huge_pages
@pytest.mark.parametrize("format", ["fp8_row", "bf16_12bit"])
def test_a_quantized_projection_moves_its_codes(projection: ek.Eagle3Projection, format: str) -> None:
    torch.nn.init.normal_(projection.fc.weight)
    codes = projection.quantize(format).fc.weight
    assert is_moved(codes)


@needs_huge_pages
def test_warmup_moves_the_weight_of_an_op_and_of_a_module(projection: ek.Eagle3Projection) -> None:
    chunks, own = [torch.randn(1, WIDTH // 3).bfloat16() for _ in range(3)], weight()
    ek.warmup("norm_concat_linear", chunks, own)
    assert is_moved(own)
    codes = ek.quantize(own, "int8_row")
    ek.warmup("norm_concat_linear", chunks, codes)
    assert is_moved(codes.codes)
    torch.nn.init.normal_(projection.fc.weight)
    ek.warmup(projection, chunks)
    assert is_moved(projection.fc.weight)


@pytest.fixture
@torch.no_grad()
def of_an_engine() -> EngineProjection:
    return EngineProjection(torch.nn.Linear(WIDTH, D, bias=False, dtype=torch.bfloat16), 3)


@needs_huge_pages
@torch.no_grad()
def test_an_engines_weight_moves_when_its_projection_is_probed(of_an_engine: EngineProjection) -> None:
    run_probe(of_an_engine, torch.randn(2, WIDTH).bfloat16(), None)
    assert is_moved(of_an_engine.fc.weight)


@needs_huge_pages
@torch.no_grad()
def test_so_it_does_where_the_shape_has_been_timed_before(
    of_an_engine: EngineProjection, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = [[1.0] * len(decision.ROWS)] * 2
    monkeypatch.setattr(decision, "once", lambda key, settle: timed)
    stage._decide("fc", of_an_engine, of_an_engine.fc)
    assert is_moved(of_an_engine.fc.weight)
