"""norm_concat in Triton: the cases and tests of the CPU kernels, at sizes that the interpreter gets through."""

import pytest
import torch
from eagle_kernels.triton_kernels import norm_concat as kernels

import eagle_kernels as ek
import test_norm_concat as on_cpu
from accuracy import expect
from cases import NORM_CONCAT_CASES, Case, operands
from guards import GuardedRows, UnchangedTensors, same_bits
from test_norm_concat import (  # noqa: F401
    test_a_bad_chunk_leaves_the_other_chunks_of_its_row_alone,
    test_a_bad_row_stays_in_its_row,
    test_a_row_of_zeros_stays_zero_without_eps,
    test_a_zero_row_hides_what_the_sources_hold,
    test_a_zero_row_is_zero_whatever_the_gain_and_eps,
    test_int32_and_int64_indices_agree,
    test_one_index_tensor_equals_a_list_of_it,
    test_sources_without_rows_give_zero_rows,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# A program, which is one row of one chunk, takes 5 ms. 8200 columns are three blocks of the kernel.
CASES = [case for case in NORM_CONCAT_CASES if case.T * case.K <= 60]
CASES += [
    Case("bf16", (8200, 8200), 2, residuals="some", indices="each", norm_offset=1.0),
    Case("bf16", (8200, 101, 8192), 2, "concat", residuals="all"),
    Case("fp32", (8200,), 2, "none", layout="strided"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_float64_truth(case: Case, cpu_isa: str) -> None:
    call = operands(case)
    expected, _ = expect(call)
    one_row = case.layout == "row"
    guarded = GuardedRows(1 if one_row else call.N, sum(case.widths), case.dtype)
    with UnchangedTensors(call.tensors()):
        call.norm_concat(out=guarded.view[0] if one_row else guarded.view)
    guarded.check_around()
    expected.check(guarded.view)


@pytest.mark.parametrize("case", [case for case in CASES if case.norm == "concat"], ids=lambda case: case.id)
def test_a_concat_norm_has_the_same_bits_in_one_program_per_row(
    case: Case, cpu_isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = operands(case).norm_concat()
    monkeypatch.setattr(kernels, "_SPLIT_CONCAT_ROWS", 0)
    assert same_bits(split, operands(case).norm_concat())


def test_without_norm_it_is_the_engines_cat_bit_for_bit(cpu_isa: str) -> None:
    chunks, residuals, _ = on_cpu.make_call(5, torch.bfloat16)
    chunks[1][0] = -0.0  # adding a zero for the absent residual would make it +0
    out = ek.norm_concat(chunks, norm="none", residuals=[residuals[0], None, residuals[2]])
    assert same_bits(out, torch.cat([chunks[0] + residuals[0], chunks[1], chunks[2] + residuals[2]], -1))


def test_bits_do_not_depend_on_T(cpu_isa: str) -> None:
    chunks, residuals, gain = on_cpu.make_call(20, torch.bfloat16, H=333)
    every_row = ek.norm_concat(chunks, norm_weight=gain, residuals=residuals)
    for T in (1, 2, 7, 16):
        rows = [[rows[20 - T :] for rows in source] for source in (chunks, residuals)]
        assert same_bits(every_row[20 - T :], ek.norm_concat(rows[0], norm_weight=gain, residuals=rows[1])), T


@pytest.mark.parametrize("at", ["begin", "end"])
@pytest.mark.parametrize("H", [1, 101, 512])
def test_no_operand_is_read_or_written_beyond_its_end(H: int, at: str, cpu_isa: str) -> None:
    on_cpu.test_no_operand_is_read_or_written_beyond_its_end(torch.bfloat16, H, at, cpu_isa)
