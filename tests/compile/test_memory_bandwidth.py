"""The compile gate of the benchmark's streams: no spills, and loads of 16 bytes alone."""

from collections.abc import Callable

import pytest
import torch

from eagle_kernels import plan

if plan.SETTINGS.triton_interpret:
    pytest.skip("TRITON_INTERPRET=1: nothing is compiled", allow_module_level=True)
pytest.importorskip("triton")

from eagle_kernels.triton_kernels import memory_bandwidth
from eagle_kernels.triton_kernels.memory_bandwidth import BLOCKS, Block

from compile.offline import ARCHS, Arch, Row, launches, resources

SIZE = 50_000


def words(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int32, device="meta")


STREAMS: dict[str, Callable[[Block], None]] = {
    "read": lambda block: memory_bandwidth.read(words(SIZE), words(-(-SIZE // block.words)), block),
    "fill": lambda block: memory_bandwidth.fill(words(SIZE), block),
    "copy": lambda block: memory_bandwidth.copy(words(SIZE), words(SIZE), block),
}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", STREAMS)
def test_resources(name: str, arch: Arch, record_binary: Callable[[Row], None]) -> None:
    faults = []
    for block in BLOCKS:
        (launch,) = launches(lambda block=block: STREAMS[name](block), arch)
        assert launch.grid == (-(-SIZE // block.words), 1, 1)
        found = resources(launch, arch)
        record_binary(Row(launch.kernel.fn.__name__, str(block), str(arch), block.num_warps, found))
        faults += [f"{block}: {fault}" for fault in found.faults(arch)]
        loads = block.words // (32 * block.num_warps) // 4  # gfx942 has wavefronts of 64 threads
        wanted = f"128-bit x{loads}" if isinstance(arch, int) else f"global_load_dwordx4 x{loads // 2}"
        if found.loads != ("" if name == "fill" else wanted):
            faults.append(f"{block}: loads are {found.loads!r}, expected {wanted!r}")
    assert not faults, "\n".join(faults)
