"""capture_hidden on a GPU: the bits of torch's own sum for every number there is, and the statistic."""

import pytest
import torch

import eagle_kernels as ek
from guards import GuardedRows, UnchangedTensors, same_bits, same_bits_or_nan
from test_capture_hidden import DTYPE_IDS, DTYPES, every_number

pytestmark = pytest.mark.usefixtures("gpu_backend")


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_a_sum_of_any_two_numbers_has_torchs_bits(dtype: torch.dtype) -> None:
    numbers = every_number(dtype).cuda()
    others = [numbers[torch.randperm(65536)] for _ in range(6)]
    others += [numbers.roll(shift) for shift in (1, 7, 100, 2**15, 2**15 + 3)]
    hidden, residual = numbers.repeat(len(others)).view(-1, 4096), torch.cat(others).view(-1, 4096)
    out = torch.empty_like(hidden)
    ek.capture_hidden(hidden, residual, out=out)
    assert same_bits_or_nan(out, hidden + residual)
    ek.capture_hidden(hidden, out=out)
    assert same_bits_or_nan(out, hidden)


@pytest.mark.parametrize("H", [1, 101, 4096, 7168, 20000])
@pytest.mark.parametrize("T", [0, 1, 33, 1000])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_the_mean_of_streams(dtype: torch.dtype, T: int, H: int) -> None:
    """Against the CPU's mean: on a GPU torch sums the streams in the same order only where H is a multiple of 1024."""
    hidden = torch.randn(T, 4, H, device="cuda").to(dtype)
    guarded = GuardedRows(T, H, dtype, "cuda")
    with UnchangedTensors([hidden]):
        ek.capture_hidden(hidden, out=guarded.view)
    guarded.check_around()
    assert same_bits(guarded.view.cpu().clone(), hidden.cpu().mean(1))
    if H % 1024 == 0:
        assert same_bits(guarded.view.clone(), hidden.mean(1))


@pytest.mark.parametrize("H", [1, 101, 896, 2880, 4096, 8192, 20000])
@pytest.mark.parametrize("T", [0, 1, 33, 4096])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_slots_of_a_buffer_and_their_statistics(dtype: torch.dtype, T: int, H: int) -> None:
    wide = (torch.randn(2, T, H + 6, device="cuda") * 10).to(dtype)
    hidden, residual = wide[0, :, 1 : H + 1], wide[1, :, 5 : H + 5]
    for other in (residual, None):
        guarded, statistics = GuardedRows(T, H, dtype, "cuda"), GuardedRows(T, 3, torch.float32, "cuda")
        column = statistics.view[:, 1]
        with UnchangedTensors([wide]):
            ek.capture_hidden(hidden, other, out=guarded.view, sum_squares=column)
        value = hidden if other is None else hidden + other
        assert same_bits(guarded.view.clone(), value.contiguous())
        guarded.check_around()
        statistics.check_around()
        assert statistics.view[:, [0, 2]].isnan().all()
        truth = value.double().square().sum(-1)
        torch.testing.assert_close(column.double(), truth, rtol=2.0**-24 * (4 + H**0.5), atol=1e-37)
