"""add_rms_norm in CUDA, emulated: the tests of the CPU kernels."""

import pytest
import torch

import test_add_rms_norm as on_cpu
from test_add_rms_norm import (  # noqa: F401
    test_a_bad_row_stays_in_its_row,
    test_a_row_of_zeros_stays_zero_without_eps,
    test_a_sum_of_any_two_numbers_has_torchs_bits,
    test_bits_do_not_depend_on_T_threads_or_the_run,
    test_no_operand_is_read_or_written_beyond_its_end,
    test_one_output_given_and_one_allocated,
    test_one_row,
    test_rows_without_columns,
    test_the_norm_sees_the_sum_before_it_is_rounded,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")


# 8200 columns take two steps of a block of 512 threads.
@pytest.mark.parametrize("data", list(on_cpu.DATA))
@pytest.mark.parametrize(("T", "H"), [(0, 64), (1, 1), (2, 8200), (3, 2880), (16, 64), (33, 101)])
@pytest.mark.parametrize("dtype", on_cpu.DTYPES, ids=on_cpu.DTYPE_IDS)
def test_float64_truth(dtype: torch.dtype, T: int, H: int, data: str, cpu_isa: str) -> None:
    on_cpu.test_float64_truth(dtype, T, H, data, cpu_isa)
