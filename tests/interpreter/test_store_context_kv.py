"""store_context_kv in Triton: the tests of the CPU kernels, at sizes that the interpreter gets through."""

import pytest
import torch

import test_store_context_kv as on_cpu
from test_store_context_kv import (  # noqa: F401
    test_a_bad_row_stays_in_its_slot,
    test_a_head_of_zeros_without_eps_stays_zero,
    test_k_is_as_near_to_float64_as_sglangs_and_nearer_than_vllms,
    test_no_operand_is_read_or_written_beyond_its_end,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize(("N", "index"), [(0, torch.int64), (1, torch.int32), (9, torch.int64)])
@pytest.mark.parametrize("form", on_cpu.FORMS)
@pytest.mark.parametrize("dtype", on_cpu.DTYPES, ids=on_cpu.DTYPE_IDS)
def test_matches_float64_and_writes_its_slots_alone(
    dtype: torch.dtype, form: str, N: int, index: torch.dtype, cpu_isa: str
) -> None:
    on_cpu.test_matches_float64_and_writes_its_slots_alone(dtype, form, N, index, cpu_isa)
