"""capture_hidden in CUDA, emulated: the tests of the CPU kernels."""

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
    test_statistics_do_not_depend_on_T_threads_or_the_run,
    test_streams_of_one_buffer_beside_the_output,
    test_the_mean_of_four_streams_has_torchs_bits,
    test_the_mean_of_strided_streams,
    test_without_a_residual_it_is_a_copy,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")


# 64 and 2880 have aligned rows in the statistics' own test below; 8200 and 20000 take two and
# three steps of a block of 512 threads.
@pytest.mark.parametrize(("T", "H"), [(0, 64), (1, 1), (2, 8200), (3, 2880), (7, 101), (33, 3), (1, 20000)])
@pytest.mark.parametrize("dtype", on_cpu.DTYPES, ids=on_cpu.DTYPE_IDS)
def test_slots_of_a_buffer_and_their_statistics(dtype: torch.dtype, T: int, H: int, cpu_isa: str) -> None:
    on_cpu.test_slots_of_a_buffer_and_their_statistics(dtype, T, H, cpu_isa)


@pytest.mark.parametrize(("T", "H"), [(2, 8200), (1, 20000)])
def test_the_mean_of_wide_streams(T: int, H: int, cpu_isa: str) -> None:
    on_cpu.test_the_mean_of_strided_streams(torch.bfloat16, T, H, 4, cpu_isa)
    hidden = torch.randn(T, 4, H).bfloat16()  # aligned
    out = torch.empty(T, H).bfloat16()
    assert same_bits(ek.capture_hidden(hidden, out=out), hidden.mean(1))
