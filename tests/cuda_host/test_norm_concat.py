"""norm_concat in CUDA, emulated: the cases and tests of the CPU kernels."""

from types import ModuleType

import pytest
import torch

import eagle_kernels as ek
import test_norm_concat as on_cpu
from cases import NORM_CONCAT_CASES, Case
from cuda_host.conftest import SHARED_MEMORY
from guards import same_bits
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


# Threads of a row: 192, 256, 512 (8200 columns take two steps of them), 160, whose half is no whole warp.
@pytest.mark.parametrize("width", [2880, 4096, 8200, 2560])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_the_threads_give_the_same_bits(
    emulated: object, emulation: ModuleType, dtype: torch.dtype, width: int
) -> None:
    """Where every SM has many blocks a thread does the work of two."""
    T, K = 16, 2
    chunks = [torch.randn(T + 3, width).to(dtype) for _ in range(K)]
    residuals = [None, torch.randn(T + 3, width).to(dtype)]
    indices = [torch.randint(-1, T + 3, (T,)) for _ in range(K)]
    gain = torch.randn(K, width)
    results, threads = [], []
    for multiprocessors in (132, 1):
        emulation.set_device(SHARED_MEMORY, descending_warps=False, multiprocessors=multiprocessors)
        emulation.take_launches()
        for norm in ("chunk", "none"):
            out = torch.full((T, K * width), torch.nan, dtype=dtype)
            options = {"norm": norm, "norm_weight": gain if norm == "chunk" else None}
            results.append(ek.norm_concat(chunks, residuals=residuals, indices=indices, out=out, **options))
        threads += [launch.threads for launch in emulation.take_launches() if launch.threads]
    assert threads[2:] == [n // 2 if n % 64 == 0 else n for n in threads[:2]]
    assert all(map(same_bits, results[:2], results[2:]))
