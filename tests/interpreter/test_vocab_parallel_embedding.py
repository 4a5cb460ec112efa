"""vocab_parallel_embedding in Triton: the tests of the CPU kernels, at sizes that the interpreter gets through."""

import pytest
import torch

import eagle_kernels as ek
import test_vocab_parallel_embedding as on_cpu
from guards import same_bits, same_bits_or_nan
from test_capture_hidden import every_number
from test_vocab_parallel_embedding import (  # noqa: F401
    test_an_id_of_nobody_hides_what_the_table_holds,
    test_any_shape_of_ids,
    test_strided_tables_and_ids,
    test_without_a_scale_every_bit_pattern_passes,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")


# One rank with added ids, two ranks with padding of both kinds, a rank that holds nothing.
@pytest.mark.parametrize("index_dtype", on_cpu.INDEX_DTYPES, ids=["int32", "int64"])
@pytest.mark.parametrize("layout", [(20, 19, 1, 4), (26, 25, 2, 8), (7, 7, 8, 64)], ids=str)
@pytest.mark.parametrize("dtype", on_cpu.DTYPES, ids=on_cpu.DTYPE_IDS)
def test_the_ranks_add_up_to_the_full_lookup(
    layout: tuple, dtype: torch.dtype, index_dtype: torch.dtype, cpu_isa: str
) -> None:
    on_cpu.test_the_ranks_add_up_to_the_full_lookup(layout, dtype, index_dtype, cpu_isa)


@pytest.mark.parametrize("scale", on_cpu.SCALES, ids="{:.4g}".format)
@pytest.mark.parametrize("dtype", on_cpu.DTYPES, ids=on_cpu.DTYPE_IDS)
def test_both_conventions_of_a_scale_have_torchs_bits(dtype: torch.dtype, scale: float, cpu_isa: str) -> None:
    """Every number in 7 rows of 9400 columns, three blocks of the kernel each; a test of 256 rows takes 3 seconds."""
    table = torch.cat([every_number(dtype), every_number(dtype)[:264]]).view(7, 9400)
    ids = torch.randperm(7)
    by_float = ek.vocab_parallel_embedding(ids, table, on_cpu.whole(7), scale=scale)
    assert same_bits_or_nan(by_float, table[ids] * scale)
    for scale_dtype in {dtype, torch.float32}:
        normalizer = torch.tensor(scale, dtype=scale_dtype)
        by_tensor = ek.vocab_parallel_embedding(ids, table, on_cpu.whole(7), scale=normalizer)
        assert same_bits_or_nan(by_tensor, table[ids] * normalizer)


@pytest.mark.parametrize("at", ["begin", "end"])
@pytest.mark.parametrize(("H", "scale"), [(1, None), (33, 1.5), (512, None)])
def test_no_memory_outside_the_table_is_touched(H: int, scale: float | None, at: str, cpu_isa: str) -> None:
    on_cpu.test_no_memory_outside_the_table_is_touched(torch.bfloat16, H, scale, at, cpu_isa)


@pytest.mark.parametrize("scale", [-2.0, float("inf")])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_an_id_of_nobody_is_plus_zero_whatever_the_scale(as_tensor: bool, scale: float, cpu_isa: str) -> None:
    table = torch.randn(5, 33).bfloat16()
    factor = torch.tensor(scale) if as_tensor else scale
    out = ek.vocab_parallel_embedding(torch.tensor([-1, 5]), table, on_cpu.whole(5), scale=factor)
    assert same_bits(out, torch.zeros(2, 33).bfloat16())
