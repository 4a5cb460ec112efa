"""Weights in huge pages: where Linux has put them, and that nothing else changes."""

import ctypes
import fcntl
import re
import struct
from pathlib import Path

import pytest
import torch
from torch import Tensor

import eagle_kernels as ek
from backends import environment_of
from eagle_kernels import huge_pages
from eagle_kernels.engines.projection import EngineProjection, run_probe
from eagle_kernels.huge_pages import use_huge_pages
from guards import same_bits

PAGE = 2 << 20
SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")


def _shows_huge_pages() -> bool:
    """Whether this is a Linux that gives out huge pages, moves memory when it is asked to, and says where they are."""
    release = re.match(r"(\d+)\.(\d+)", Path("/proc/sys/kernel/osrelease").read_text()) if SIZE.exists() else None
    is_new = release is not None and tuple(map(int, release.groups())) >= (6, 7)
    return is_new and huge_pages.mode() in ("always", "madvise") and int(SIZE.read_text()) == PAGE


needs_huge_pages = pytest.mark.skipif(
    not _shows_huge_pages(), reason="Linux 6.7 or later, which may give out huge pages of 2 MB"
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


# From 32 MB on malloc gives a tensor a mapping of its own: what is freed of a heap may be in huge pages already.
D, WIDTH = 6000, 3 * 2000


def weight() -> Tensor:
    """72 MB in small pages."""
    return torch.randn(D, WIDTH).bfloat16()


@needs_huge_pages
def test_whole_pages_move_with_their_values() -> None:
    tensor = weight()
    before, address = tensor.clone(), tensor.data_ptr()
    assert whole_pages(tensor) >= 33 and pages_of(tensor) == 0
    use_huge_pages(tensor)
    assert pages_of(tensor) == whole_pages(tensor)
    assert tensor.data_ptr() == address
    assert same_bits(tensor, before)
    use_huge_pages(tensor)
    assert pages_of(tensor) == whole_pages(tensor)


@needs_huge_pages
def test_only_the_pages_that_a_view_fills_alone() -> None:
    tensor = weight()
    rows = PAGE // (tensor.shape[1] * tensor.element_size())
    use_huge_pages(tensor[:rows], tensor[::2][:0], tensor[:, :8][:2], None)  # each fills no whole page
    assert pages_of(tensor) == 0
    use_huge_pages(tensor[: 3 * rows])
    assert 0 < pages_of(tensor) <= 3


@needs_huge_pages
def test_it_can_be_turned_off() -> None:
    tensor = weight()
    with environment_of(EAGLE_KERNELS_HUGE_PAGES="0"):
        use_huge_pages(tensor)
    assert pages_of(tensor) == 0


def test_what_has_no_address_is_left_alone() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = weight()
    use_huge_pages(fake, torch.empty(1 << 22, device="meta"), weight().to_sparse(), torch.empty(0))


@pytest.fixture
def projection() -> ek.Eagle3Projection:
    config = ek.Eagle3Config(num_chunks=3, target_hidden_size=WIDTH // 3, hidden_size=D, chunk_norm=True)
    return ek.Eagle3Projection(config, dtype=torch.bfloat16)


@needs_huge_pages
def test_a_projection_that_loads_moves_its_weight(projection: ek.Eagle3Projection) -> None:
    state = {name: torch.randn(tensor.shape).bfloat16() for name, tensor in projection.state_dict().items()}
    projection.load_state_dict(state)
    assert pages_of(projection.fc.weight) == whole_pages(projection.fc.weight) > 0
    assert same_bits(projection.fc.weight, state["fc.weight"])
    moved = projection.to(torch.float16)
    assert pages_of(moved.fc.weight) == whole_pages(moved.fc.weight) > 0


@needs_huge_pages
@pytest.mark.parametrize("format", ["fp8_row", "bf16_12bit"])
def test_a_quantized_projection_moves_its_codes(projection: ek.Eagle3Projection, format: str) -> None:
    torch.nn.init.normal_(projection.fc.weight)
    codes = projection.quantize(format).fc.weight
    assert pages_of(codes) == whole_pages(codes) > 0


@needs_huge_pages
def test_warmup_moves_the_weight_of_an_op_and_of_a_module(projection: ek.Eagle3Projection) -> None:
    chunks, own = [torch.randn(1, WIDTH // 3).bfloat16() for _ in range(3)], weight()
    ek.warmup("norm_concat_linear", chunks, own)
    assert pages_of(own) == whole_pages(own) > 0
    codes = ek.quantize(own, "int8_row")
    ek.warmup("norm_concat_linear", chunks, codes)
    assert pages_of(codes.codes) == whole_pages(codes.codes) > 0
    torch.nn.init.normal_(projection.fc.weight)
    ek.warmup(projection, chunks)
    assert pages_of(projection.fc.weight) == whole_pages(projection.fc.weight) > 0


@needs_huge_pages
@torch.no_grad()
def test_an_engines_weight_moves_when_its_projection_is_probed() -> None:
    fc = torch.nn.Linear(WIDTH, D, bias=False, dtype=torch.bfloat16)
    run_probe(EngineProjection(fc, 3), torch.randn(2, WIDTH).bfloat16(), None)
    assert pages_of(fc.weight) == whole_pages(fc.weight) > 0
