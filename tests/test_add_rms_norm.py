"""add_rms_norm: the sum bit for bit, the norm against float64, and what memory it touches."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import eagle_kernels as ek
from accuracy import DATA, FP32, UNIT_ROUNDOFF, Expectation, every_number, relative_rms
from eagle_kernels.ops.add_rms_norm import formula
from guards import GuardedRows, UnchangedTensors, between_forbidden_pages, same_bits, same_bits_or_nan

pytestmark = pytest.mark.usefixtures("poisoned_memory")

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
DTYPE_IDS = ["bf16", "fp16", "fp32"]


def expect_normed(hidden: Tensor, residual: Tensor, weight: Tensor, eps: float, norm_offset: float) -> Expectation:
    """The bounds of `accuracy.expect` for one norm of the fp32 sum, not yet rounded; the sum adds one rounding.

    Engines norm the stored sum (a native RMSNorm) or the fp32 one (fused kernels). The RMS limit is that of the second:
    it leaves no room for the rounding of a stored bf16 sum.
    """
    dtype, H = hidden.dtype, hidden.shape[-1]
    normed, _ = formula(hidden, residual, weight, eps, norm_offset, dtype=torch.float64)
    half_subnormal = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2
    # The fp32 sum is off by at most FP32 of itself, and is exact where it is subnormal. Its product with rstd may round
    # to a subnormal, off by up to 2^-150, before the gain multiplies it.
    elementwise = (UNIT_ROUNDOFF[dtype] + (H / 2 + 9) * FP32) * normed.abs() + half_subnormal
    elementwise += 2.0**-150 * (weight.double() + norm_offset).abs()
    # Relative RMS of one rounding, u/sqrt(3) of the value at the very worst binade end, and the fp32 floor of 3 v.
    limit = max(1.05 * relative_rms(normed.to(dtype), normed), 3 * FP32)
    return Expectation(normed, elementwise, limit, relative_rms(normed.to(dtype), normed))


@pytest.mark.parametrize("data", list(DATA))
@pytest.mark.parametrize(("T", "H"), [(0, 64), (1, 1), (2, 101), (3, 4096), (7, 2880), (16, 64), (33, 896), (129, 33)])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_float64_truth(dtype: torch.dtype, T: int, H: int, data: str, cpu_isa: str) -> None:
    generator = torch.Generator().manual_seed(T * H)
    hidden, residual = (DATA[data](T, H, dtype, generator) for _ in range(2))
    offset, gain_dtype = (1.0, torch.float32) if T % 2 else (0.0, dtype)
    weight = (torch.rand(H) + 0.5 - offset).to(gain_dtype)
    expected = expect_normed(hidden, residual, weight, 1e-5, offset)
    normed, total = GuardedRows(T, H, dtype), GuardedRows(T, H, dtype)
    with UnchangedTensors([hidden, residual, weight]):
        results = ek.add_rms_norm(
            hidden, residual, weight, eps=1e-5, norm_offset=offset, out=normed.view, out_sum=total.view
        )
        own_normed, own_total = ek.add_rms_norm(hidden, residual, weight, eps=1e-5, norm_offset=offset)
    assert results[0] is normed.view and results[1] is total.view
    normed.check_around()
    total.check_around()
    assert same_bits(own_total, hidden + residual)
    assert same_bits(total.view.clone(), own_total) and same_bits(normed.view.clone(), own_normed)
    expected.check(own_normed)


def test_the_formula_is_torchs_rms_norm_of_the_sum() -> None:
    hidden, residual, weight = torch.randn(5, 24).double(), torch.randn(5, 24).double(), torch.rand(24).double()
    normed, total = formula(hidden, residual, weight, 0.1, 1.0, dtype=torch.float64)
    torch.testing.assert_close(total, hidden + residual)
    torch.testing.assert_close(normed, F.rms_norm(hidden + residual, (24,), weight + 1, 0.1))


def test_the_norm_sees_the_sum_before_it_is_rounded(cpu_isa: str) -> None:
    """The fused add-norm semantics of both engines; a norm of the stored sum differs in a quarter of the values."""
    hidden, residual = torch.randn(2, 64, 256).bfloat16()
    weight = torch.ones(256)
    normed, total = ek.add_rms_norm(hidden, residual, weight)
    of_exact = F.rms_norm(hidden.double() + residual.double(), (256,), eps=1e-6).bfloat16()
    of_rounded = F.rms_norm(total.double(), (256,), eps=1e-6).bfloat16()
    assert (of_exact != of_rounded).float().mean() > 0.1
    assert (normed != of_exact).float().mean() < 0.001


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_a_sum_of_any_two_numbers_has_torchs_bits(dtype: torch.dtype, cpu_isa: str) -> None:
    numbers = every_number(dtype)
    others = torch.cat([numbers[torch.randperm(65536)], numbers.roll(1), numbers.roll(2**15)])
    hidden, residual = numbers.repeat(3).view(-1, 512), others.view(-1, 512)
    _, total = ek.add_rms_norm(hidden, residual, torch.ones(512).to(dtype))
    assert same_bits_or_nan(total, hidden + residual)


@pytest.mark.parametrize("given", ["out", "out_sum"])
def test_one_output_given_and_one_allocated(given: str, cpu_isa: str) -> None:
    hidden, residual = torch.randn(2, 3, 33).bfloat16()
    weight = torch.rand(33)
    expected = ek.add_rms_norm(hidden, residual, weight)
    buffer = torch.empty(3, 33).bfloat16()
    results = ek.add_rms_norm(hidden, residual, weight, **{given: buffer})
    assert results[0 if given == "out" else 1] is buffer
    assert all(map(same_bits, results, expected))


def test_rows_without_columns(cpu_isa: str) -> None:
    normed, total = ek.add_rms_norm(torch.empty(3, 0), torch.empty(3, 0), torch.empty(0))
    assert normed.shape == total.shape == (3, 0)


def test_one_row(cpu_isa: str) -> None:
    hidden, residual, weight = torch.randn(3, 101).bfloat16()
    normed, total = ek.add_rms_norm(hidden, residual, weight)
    of_matrix = ek.add_rms_norm(hidden.unsqueeze(0), residual.unsqueeze(0), weight)
    assert normed.shape == total.shape == (101,)
    assert same_bits(normed, of_matrix[0][0]) and same_bits(total, of_matrix[1][0])


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_a_row_of_zeros_stays_zero_without_eps(dtype: torch.dtype, cpu_isa: str) -> None:
    """A row of zeros, and one that adds up to zeros: 0 * rsqrt(0) would be NaN."""
    hidden, residual = torch.randn(2, 4, 33).to(dtype)
    hidden[1], residual[1] = 0, 0
    residual[2] = -hidden[2]
    normed, total = ek.add_rms_norm(hidden, residual, torch.rand(33) + 0.5, eps=0.0)
    assert not normed[1:3].any() and not total[1:3].any()
    assert normed.isfinite().all() and normed[[0, 3]].any(1).all()


@pytest.mark.parametrize("stale", [float("nan"), float("inf"), 3e4])
def test_a_bad_row_stays_in_its_row(stale: float, cpu_isa: str) -> None:
    hidden, residual = torch.randn(2, 9, 101).bfloat16()
    weight = torch.rand(101)
    clean = ek.add_rms_norm(hidden, residual, weight)
    hidden[4, 50] = stale
    dirty = ek.add_rms_norm(hidden, residual, weight)
    kept = [0, 1, 2, 3, 5, 6, 7, 8]
    assert all(same_bits(a[kept], b[kept]) for a, b in zip(clean, dirty, strict=True))
    assert dirty[0][4, 50].isnan() or stale == 3e4


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_bits_do_not_depend_on_T_threads_or_the_run(dtype: torch.dtype, cpu_isa: str) -> None:
    hidden, residual = torch.randn(2, 200, 333).to(dtype)
    weight = torch.rand(333)
    every_row = ek.add_rms_norm(hidden, residual, weight)
    for T in (1, 2, 7, 16, 33, 199):
        rows = ek.add_rms_norm(hidden[200 - T :], residual[200 - T :], weight)
        assert all(same_bits(a[200 - T :], b) for a, b in zip(every_row, rows, strict=True))
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert all(map(same_bits, every_row, ek.add_rms_norm(hidden, residual, weight)))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("at", ["begin", "end"])
@pytest.mark.parametrize("H", [1, 33, 101, 512])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_no_operand_is_read_or_written_beyond_its_end(dtype: torch.dtype, H: int, at: str, cpu_isa: str) -> None:
    hidden, residual, out, out_sum = (between_forbidden_pages(torch.randn(3, H).to(dtype), at) for _ in range(4))
    for weight in (torch.rand(H).to(dtype), torch.rand(H)):
        ek.add_rms_norm(hidden, residual, between_forbidden_pages(weight, at), out=out, out_sum=out_sum)
        assert same_bits(out_sum, hidden + residual)
