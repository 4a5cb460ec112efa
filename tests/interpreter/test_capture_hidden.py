"""capture_hidden in Triton: the tests of the CPU kernels, at sizes that the interpreter gets through."""

import pytest
import torch

import eagle_kernels as ek
import test_capture_hidden as on_cpu
from guards import same_bits
from test_capture_hidden import (  # noqa: F401
    test_a_bad_row_stays_in_its_row,
    test_a_sum_of_any_two_numbers_has_torchs_bits,
    test_no_operand_is_read_or_written_beyond_its_end,
    test_one_row,
    test_rows_without_columns,
    test_streams_of_one_buffer_beside_the_output,
    test_the_mean_of_four_streams_has_torchs_bits,
    test_the_mean_of_strided_streams,
    test_without_a_residual_it_is_a_copy,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")


# 8200 columns are three blocks of the kernel.
@pytest.mark.parametrize(("T", "H"), [(0, 64), (1, 1), (2, 8200), (3, 2880), (7, 101), (33, 3)])
@pytest.mark.parametrize("dtype", on_cpu.DTYPES, ids=on_cpu.DTYPE_IDS)
def test_slots_of_a_buffer_and_their_statistics(dtype: torch.dtype, T: int, H: int, cpu_isa: str) -> None:
    on_cpu.test_slots_of_a_buffer_and_their_statistics(dtype, T, H, cpu_isa)


@pytest.mark.parametrize("H", [64, 8200])
def test_the_mean_of_aligned_streams(H: int, cpu_isa: str) -> None:
    hidden = torch.randn(3, 4, H).bfloat16()
    assert same_bits(ek.capture_hidden(hidden, out=torch.empty(3, H).bfloat16()), hidden.mean(1))


def test_statistics_do_not_depend_on_T(cpu_isa: str) -> None:
    hidden = torch.randn(20, 333).bfloat16()

    def squares(rows: torch.Tensor) -> torch.Tensor:
        result = torch.empty(rows.shape[0])
        ek.capture_hidden(rows, rows, out=torch.empty_like(rows), sum_squares=result)
        return result

    every_row = squares(hidden)
    for T in (1, 2, 7, 16):
        assert same_bits(every_row[20 - T :], squares(hidden[20 - T :]))


@pytest.mark.parametrize(("T", "H"), [(0, 64), (3, 0)])
def test_inference_statistics_of_nothing_are_written_outside_of_inference_mode(T: int, H: int, cpu_isa: str) -> None:
    """As the statistics of other rows are: torch's own ops refuse it."""
    with torch.inference_mode():
        squares = torch.full((T,), torch.nan)
    ek.capture_hidden(torch.empty(T, H), out=torch.empty(T, H), sum_squares=squares)
    assert (squares == 0).all()
