"""The emulation of tests/cuda_host against the GPU it stands for: the same bits wherever fp32 arithmetic is exact.

Integers small enough make every product and sum exact in any order, so a fragment laid out otherwise, a row taken from
elsewhere or a sum that misses a term shows, and nothing else does.
"""

import pytest
import torch
from torch import Tensor

from backends import environment_of
from cuda_host.build import COMPILER, load
from cuda_host.integers import CALLS, Call
from eagle_kernels import plan
from guards import same_bits


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.id)
def test_the_same_bits_as_the_emulation(call: Call) -> None:
    device = torch.device("cuda")
    if (reason := plan.unsupported_reason("cuda", device)) is not None:
        pytest.skip(f"cuda: {reason}")
    if call.kernel is plan.Kernel.FUSED and not plan.has_clusters(device):
        pytest.skip("the GPU has no clusters, and the fused kernel refuses it")
    if call.kernel is plan.Kernel.WGMMA and not plan.has_wgmma(device):
        pytest.skip("the GPU or the library has no wgmma, and that kernel refuses it")
    if COMPILER is None:
        pytest.skip("no g++ on this machine")
    load().set_device(227 << 10, descending_warps=False)
    expected = call.run(torch.ops.eagle_kernels_emulated)

    def on_gpu(value: object) -> object:
        if isinstance(value, Tensor):
            return value.cuda()
        return [on_gpu(entry) for entry in value] if isinstance(value, list) else value

    with environment_of(EAGLE_KERNELS_BACKEND="cuda"):
        outputs = [output.cpu() for output in call.run(torch.ops.eagle_kernels_C, on_gpu)]
    for output, wanted in zip(outputs, expected, strict=True):
        assert same_bits(output, wanted)  # of CPU tensors: pytest prints them
