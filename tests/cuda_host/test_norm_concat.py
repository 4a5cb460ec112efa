"""norm_concat in CUDA, emulated: the cases and tests of the CPU kernels."""

import pytest

import test_norm_concat as on_cpu
from cases import NORM_CONCAT_CASES, Case
from test_norm_concat import (  # noqa: F401
    test_a_bad_chunk_leaves_the_other_chunks_of_its_row_alone,
    test_a_bad_row_stays_in_its_row,
    test_a_row_of_zeros_stays_zero_without_eps,
    test_a_zero_row_hides_what_the_sources_hold,
    test_a_zero_row_is_zero_whatever_the_gain_and_eps,
    test_any_indices,
    test_bits_do_not_depend_on_T_threads_or_the_run,
    test_int32_and_int64_indices_agree,
    test_no_operand_is_read_or_written_beyond_its_end,
    test_one_index_tensor_equals_a_list_of_it,
    test_sources_without_rows_give_zero_rows,
    test_without_norm_it_is_the_engines_cat_bit_for_bit,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# 8200 columns take two steps of a block of 512 threads.
CASES = [case for case in NORM_CONCAT_CASES if case.T < 1000]
CASES += [
    Case("bf16", (8200, 8200), 2, residuals="some", indices="each", norm_offset=1.0),
    Case("bf16", (8200, 101, 8192), 2, "concat", residuals="all"),
    Case("fp32", (8200,), 2, "none", layout="strided"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_float64_truth(case: Case, cpu_isa: str) -> None:
    on_cpu.test_float64_truth(case, cpu_isa)
