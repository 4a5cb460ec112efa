"""capture_hidden: the bits of torch's own sum for every number there is, the statistic, and what memory it touches."""

import pytest
import torch
from torch import Tensor

import eagle_kernels as ek
from accuracy import every_number, half_steps, relative_rms
from guards import GuardedRows, UnchangedTensors, between_forbidden_pages, same_bits, same_bits_or_nan

pytestmark = pytest.mark.usefixtures("poisoned_memory")

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
DTYPE_IDS = ["bf16", "fp16", "fp32"]


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_a_sum_of_any_two_numbers_has_torchs_bits(dtype: torch.dtype, cpu_isa: str) -> None:
    numbers = every_number(dtype)
    others = [numbers[torch.randperm(65536)] for _ in range(6)]  # mostly of another exponent
    others += [numbers.roll(shift) for shift in (1, 7, 100, 2**15, 2**15 + 3)]  # the same exponent, either sign
    others += [half_steps(numbers), -half_steps(numbers)]
    hidden, residual = numbers.repeat(len(others)).view(-1, 4096), torch.cat(others).view(-1, 4096)
    out = torch.empty_like(hidden)
    ek.capture_hidden(hidden, residual, out=out)
    assert same_bits_or_nan(out, hidden + residual)


def test_fp16_keeps_its_small_numbers_where_denormals_are_flushed(cpu_isa: str) -> None:
    """torch flushes those of fp32. Numbers below 6.1e-5 were 0 on CPUs without an instruction that widens fp16."""
    numbers = every_number(torch.float16).view(64, 1024)
    out = torch.empty_like(numbers)
    try:
        if not torch.set_flush_denormal(True):
            pytest.skip("this CPU does not flush denormals")
        ek.capture_hidden(numbers, torch.full_like(numbers, 2**-24), out=out)
    finally:
        torch.set_flush_denormal(False)
    assert same_bits_or_nan(out, numbers + 2**-24)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_without_a_residual_it_is_a_copy(dtype: torch.dtype, cpu_isa: str) -> None:
    hidden = every_number(dtype).view(64, 1024)
    assert same_bits_or_nan(ek.capture_hidden(hidden, out=torch.empty_like(hidden)), hidden)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_the_mean_of_four_streams_has_torchs_bits(dtype: torch.dtype, cpu_isa: str) -> None:
    """Both engines have these bits: SGLang 0.5.23 `mhc_stream_mean`, vLLM 0.33 `mhc_post_tilelang(...).mean(dim=1)`."""
    numbers = every_number(dtype)
    near = [numbers.roll(shift) for shift in (1, 7, 2**15)]  # sums that cancel and sums beyond the largest number
    streams = [
        torch.stack([numbers, *near], 0),
        torch.stack([numbers, *(numbers[torch.randperm(65536)] for _ in near)]),
    ]
    hidden = torch.cat(streams, 1).view(4, -1, 4096).transpose(0, 1)  # streams first in memory
    hidden[3, :, :8] = -0.0
    out = torch.empty(hidden[:, 0].shape, dtype=dtype)
    ek.capture_hidden(hidden, out=out)
    assert same_bits_or_nan(out, hidden.mean(1))
    assert not out[3, :8].signbit().any()


@pytest.mark.parametrize("S", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(("T", "H"), [(0, 64), (1, 1), (2, 2880), (7, 101), (33, 3)])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_the_mean_of_strided_streams(dtype: torch.dtype, T: int, H: int, S: int, cpu_isa: str) -> None:
    wide = (torch.randn(T, S + 1, H + 6) * 10).to(dtype)
    hidden = wide[:, 1:, 5 : H + 5]
    guarded, statistics = GuardedRows(T, H, dtype), GuardedRows(T, 3, torch.float32)
    column = statistics.view[:, 1]
    with UnchangedTensors([wide]):
        assert ek.capture_hidden(hidden, out=guarded.view, sum_squares=column) is guarded.view
    total = sum((stream.float() for stream in hidden.unbind(1)), torch.zeros(T, H))
    value = (total * (1 / S)).to(dtype)
    assert same_bits(guarded.view.clone(), value)
    guarded.check_around()
    statistics.check_around()
    truth = value.double().square().sum(-1)
    torch.testing.assert_close(column.double(), truth, rtol=2.0**-24 * (4 + H**0.5), atol=1e-37)


def test_streams_of_one_buffer_beside_the_output(cpu_isa: str) -> None:
    buffer = torch.randn(3, 5, 64).bfloat16()
    mean = buffer[:, :4].mean(1)
    assert same_bits(ek.capture_hidden(buffer[:, :4], out=buffer[:, 4]).clone(), mean)


@pytest.mark.parametrize("H", [1, 3, 64, 101, 1152, 2880])
@pytest.mark.parametrize("T", [0, 1, 2, 7, 33])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_slots_of_a_buffer_and_their_statistics(dtype: torch.dtype, T: int, H: int, cpu_isa: str) -> None:
    """Strided in, strided out, one column of [max_tokens, K] written, nothing around any of them."""
    wide = (torch.randn(2, T, H + 6) * 10).to(dtype)
    hidden, residual = wide[0, :, 1 : H + 1], wide[1, :, 5 : H + 5]
    for other in (residual, None):
        guarded, statistics = GuardedRows(T, H, dtype), GuardedRows(T, 3, torch.float32)
        column = statistics.view[:, 1]
        with UnchangedTensors([wide]):
            assert ek.capture_hidden(hidden, other, out=guarded.view, sum_squares=column) is guarded.view
        value = hidden if other is None else hidden + other
        assert same_bits(guarded.view.clone(), value.contiguous())
        guarded.check_around()
        statistics.check_around()
        assert statistics.view[:, [0, 2]].isnan().all()
        # n squares of one sign, summed in any order: at most n roundings of 2^-24 (and in practice their root).
        truth = value.double().square().sum(-1)
        torch.testing.assert_close(column.double(), truth, rtol=2.0**-24 * (4 + H**0.5), atol=1e-37)

        without = GuardedRows(T, H, dtype)
        ek.capture_hidden(hidden, other, out=without.view)
        assert same_bits(without.buffer[2 : 2 + T], guarded.buffer[2 : 2 + T])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_output_beyond_the_caches_lies_anywhere(dtype: torch.dtype, cpu_isa: str) -> None:
    """From 32 MB a thread on, aligned rows are stored past the caches, with instructions that trap on other rows."""
    T, H = (33 << 20) // (1024 * dtype.itemsize), 1024
    hidden, buffer = torch.randn(T, H).to(dtype), torch.full((T, H + 3), 7.0, dtype=dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for begin in (0, 1):
            out = buffer[:, begin : begin + H]
            ek.capture_hidden(hidden, hidden, out=out)
            assert torch.equal(out, hidden + hidden) and (buffer[:, begin + H :] == 7).all()
    finally:
        torch.set_num_threads(before)


def test_statistics_are_as_near_to_float64_as_torchs(cpu_isa: str) -> None:
    """torch sums in a cascade."""
    hidden, squares = torch.randn(64, 65536), torch.empty(64)
    ek.capture_hidden(hidden, out=torch.empty_like(hidden), sum_squares=squares)
    truth = hidden.double().square().sum(-1)
    assert relative_rms(squares, truth) <= 1.05 * relative_rms(hidden.square().sum(-1), truth)


@pytest.mark.parametrize("residual", [torch.empty(3, 0), None], ids=["residual", "copy"])
def test_rows_without_columns(residual: Tensor | None, cpu_isa: str) -> None:
    """Their memory is a null pointer, which the copy passed to memcpy: undefined behavior, seen by `make sanitize`."""
    for hidden, other in ((torch.empty(3, 0), residual), (torch.empty(3, 4, 0), None)):
        squares = torch.full((3,), float("nan"))
        ek.capture_hidden(hidden, other, out=torch.empty(3, 0), sum_squares=squares)
        assert same_bits(squares, torch.zeros(3))


def test_one_row(cpu_isa: str) -> None:
    hidden, residual = torch.randn(2, 101).bfloat16()
    out, square = torch.empty(101).bfloat16(), torch.empty(1)
    assert ek.capture_hidden(hidden, residual, out=out, sum_squares=square) is out
    assert same_bits(out, hidden + residual)
    torch.testing.assert_close(square.double(), out.double().square().sum(-1, keepdim=True), rtol=1e-6, atol=0)
    # Boundary 0 has no residual.
    assert same_bits(ek.capture_hidden(hidden, out=torch.empty_like(hidden)), hidden)


@pytest.mark.parametrize("stale", [float("nan"), float("inf"), float("-inf")])
def test_a_bad_row_stays_in_its_row(stale: float, cpu_isa: str) -> None:
    hidden, residual = torch.randn(2, 9, 101).bfloat16()
    hidden[4, 50] = stale
    out, squares = torch.empty_like(hidden), torch.empty(9)
    ek.capture_hidden(hidden, residual, out=out, sum_squares=squares)
    assert same_bits_or_nan(out, hidden + residual)
    assert squares.isfinite().tolist() == [True] * 4 + [False] + [True] * 4
    streams = torch.randn(9, 4, 101).bfloat16()
    streams[4, 3, 50] = stale
    ek.capture_hidden(streams, out=out, sum_squares=squares)
    assert same_bits_or_nan(out, streams.mean(1))
    assert squares.isfinite().tolist() == [True] * 4 + [False] + [True] * 4


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_statistics_do_not_depend_on_T_threads_or_the_run(dtype: torch.dtype, cpu_isa: str) -> None:
    hidden = torch.randn(200, 333).to(dtype)

    def squares(rows: Tensor) -> Tensor:
        result = torch.empty(rows.shape[0])
        ek.capture_hidden(rows, rows, out=torch.empty_like(rows), sum_squares=result)
        return result

    every_row = squares(hidden)
    for T in (1, 2, 7, 16, 33, 199):
        assert same_bits(every_row[200 - T :], squares(hidden[200 - T :]))
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert same_bits(every_row, squares(hidden))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("at", ["begin", "end"])
@pytest.mark.parametrize("H", [1, 33, 101, 512])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_no_operand_is_read_or_written_beyond_its_end(dtype: torch.dtype, H: int, at: str, cpu_isa: str) -> None:
    hidden, residual, out = (between_forbidden_pages(torch.randn(3, H).to(dtype), at) for _ in range(3))
    ek.capture_hidden(hidden, residual, out=out, sum_squares=between_forbidden_pages(torch.zeros(3), at))
    assert same_bits(out, hidden + residual)
    ek.capture_hidden(hidden, out=out)
    assert same_bits(out, hidden)
    streams = between_forbidden_pages(torch.randn(3, 4, H).to(dtype), at)
    ek.capture_hidden(streams, out=out)
    assert same_bits(out, streams.mean(1))
