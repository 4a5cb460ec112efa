"""The CUDA primitives, emulated and called directly: what they refuse, and rows of zeros."""

import pytest

import test_primitives as on_cpu
from bad_calls import BAD_CALLS, CONTEXT_KV, GOOD, QUANTIZED, BadCall
from csrc_checks import failure_of, unreached


@pytest.fixture
def ops(emulated: object) -> object:
    return on_cpu.CudaKernels(emulated, "fused", True)


ON_CUDA = [call for call in BAD_CALLS if "cuda" in call.backends]


@pytest.mark.parametrize("call", ON_CUDA, ids=lambda call: call.id)
def test_a_bad_call_is_refused_before_anything_is_written(call: BadCall, ops: object) -> None:
    failure_of(ops, call)


PROJECTIONS = [call for call in ON_CUDA if call.op == "norm_concat_linear" and call.name != "cuda-post_norm"]
# Refused only by the kernels that multiply.
FUSED = ("cuda-fp32", "cuda-alignment")


@pytest.mark.parametrize("call", [call for call in PROJECTIONS if call.name not in FUSED], ids=lambda call: call.id)
def test_the_two_steps_refuse_what_the_fused_kernel_does(call: BadCall, ops: object) -> None:
    failure_of(on_cpu.Projections(ops, "two_step"), call)


@pytest.mark.parametrize("kernel", ["split", "wgmma"])
@pytest.mark.parametrize("call", PROJECTIONS, ids=lambda call: call.id)
def test_the_other_kernels_refuse_what_the_fused_kernel_does(call: BadCall, kernel: str, ops: object) -> None:
    failure_of(on_cpu.CudaKernels(ops, kernel, *[True] * (kernel == "split")), call)


def test_every_check_of_cuda_alone_has_a_call_that_it_refuses(ops: object) -> None:
    assert unreached([failure_of(ops, call) for call in ON_CUDA], cuda=True) == []


@pytest.mark.parametrize("op", [op for op in GOOD if op not in (QUANTIZED, CONTEXT_KV)])
def test_the_calls_that_the_bad_ones_change_work(op: str, ops: object) -> None:
    on_cpu.run(ops, op)


test_the_two_steps_take_strides_and_no_rows = on_cpu.test_the_two_steps_take_strides_and_no_rows
test_slots_of_one_buffer_are_apart = on_cpu.test_slots_of_one_buffer_are_apart
test_the_stride_of_one_row_is_not_used = on_cpu.test_the_stride_of_one_row_is_not_used
test_rows_of_no_columns_have_no_squares = on_cpu.test_rows_of_no_columns_have_no_squares
test_a_row_of_zeros_without_eps_gives_zeros = on_cpu.test_a_row_of_zeros_without_eps_gives_zeros
test_a_zero_chunk_of_a_row_leaves_the_others = on_cpu.test_a_zero_chunk_of_a_row_leaves_the_others
test_the_sum_may_be_a_row_of_zeros = on_cpu.test_the_sum_may_be_a_row_of_zeros
test_a_projected_row_of_zeros_is_zero = on_cpu.test_a_projected_row_of_zeros_is_zero
test_a_row_out_of_range_is_zero_whatever_gain_and_eps_are = (
    on_cpu.test_a_row_out_of_range_is_zero_whatever_gain_and_eps_are
)
