"""The fused kernel's weight by bulk copies, which nobody but who times them has: the bits of the other copies, and an
end. Last of the files: a barrier that nobody trips hangs."""

import pytest
import torch

import eagle_kernels as ek
from backends import environment_of
from eagle_kernels import plan
from guards import same_bits

# Chunks that end inside a stage of 128 columns, and a last block of fewer than 64 rows.
SHAPES = ((3, 4096, 4096), (3, 2880, 2880), (2, 896, 257), (1, 72, 1))


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("T", [1, 7, 16])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_same_bits(dtype: torch.dtype, shape: tuple[int, int, int], T: int, residual: bool) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("bulk copies are of compute capability 9.0 and above")
    if (reason := plan.unsupported_reason("cuda", torch.device("cuda"))) is not None:
        pytest.skip(f"cuda: {reason}")
    K, H, D = shape
    chunks = [torch.randn(T, H, device="cuda").to(dtype) for _ in range(K)]
    residuals = [chunk.flip(0) for chunk in chunks] if residual else None
    weight = torch.randn(D, K * H, device="cuda").mul_((K * H) ** -0.5).to(dtype)
    gain = (torch.rand(K, H, device="cuda") + 0.5).to(dtype)
    with environment_of(EAGLE_KERNELS_BACKEND="cuda", EAGLE_KERNELS_BULK_COPIES="0"):
        expected = ek.norm_concat_linear(chunks, weight, norm_weight=gain, residuals=residuals)
    for early in ("0", "1"):
        variables = {"EAGLE_KERNELS_BULK_COPIES": "1", "EAGLE_KERNELS_EARLY_WEIGHT": early}
        with environment_of(EAGLE_KERNELS_BACKEND="cuda", **variables):
            for _ in range(10):
                out = ek.norm_concat_linear(chunks, weight, norm_weight=gain, residuals=residuals)
                assert same_bits(out, expected)
