"""add_rms_norm on a GPU: the sum bit for bit, the norm against float64."""

import pytest
import torch

import eagle_kernels as ek
from accuracy import DATA
from guards import GuardedRows, UnchangedTensors, same_bits, same_bits_or_nan
from test_add_rms_norm import DTYPE_IDS, DTYPES, expect_normed
from test_capture_hidden import every_number

pytestmark = pytest.mark.usefixtures("gpu_backend")

SIZES = [(0, 64), (1, 1), (2, 101), (3, 4096), (7, 2880), (33, 896), (129, 33), (5, 8192), (3, 20000), (4096, 2048)]


@pytest.mark.parametrize("data", list(DATA))
@pytest.mark.parametrize(("T", "H"), SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_float64_truth(dtype: torch.dtype, T: int, H: int, data: str) -> None:
    generator = torch.Generator().manual_seed(T * H)
    hidden, residual = (DATA[data](T, H, dtype, generator).cuda() for _ in range(2))
    offset, gain_dtype = (1.0, torch.float32) if T % 2 else (0.0, dtype)
    weight = (torch.rand(H) + 0.5 - offset).to(gain_dtype).cuda()
    expected = expect_normed(hidden, residual, weight, 1e-5, offset)
    normed, total = GuardedRows(T, H, dtype, "cuda"), GuardedRows(T, H, dtype, "cuda")
    with UnchangedTensors([hidden, residual, weight]):
        ek.add_rms_norm(hidden, residual, weight, eps=1e-5, norm_offset=offset, out=normed.view, out_sum=total.view)
    normed.check_around()
    total.check_around()
    assert same_bits(total.view.clone(), hidden + residual)
    expected.check(normed.view)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_a_sum_of_any_two_numbers_has_torchs_bits(dtype: torch.dtype) -> None:
    numbers = every_number(dtype).cuda()
    others = torch.cat([numbers[torch.randperm(65536)], numbers.roll(1), numbers.roll(2**15)])
    hidden, residual = numbers.repeat(3).view(-1, 512), others.view(-1, 512)
    _, total = ek.add_rms_norm(hidden, residual, torch.ones(512, dtype=dtype, device="cuda"))
    assert same_bits_or_nan(total, hidden + residual)
