"""vocab_parallel_embedding on a GPU: the table's bits on every rank, both roundings of a scale, ids out of range."""

import pytest
import torch

import eagle_kernels as ek
from guards import GuardedRows, UnchangedTensors, same_bits, same_bits_or_nan
from test_capture_hidden import every_number
from test_vocab_parallel_embedding import (
    DTYPE_IDS,
    DTYPES,
    INDEX_DTYPES,
    LAYOUTS,
    SCALES,
    awkward_ids,
    full_lookup,
    whole,
)

pytestmark = pytest.mark.usefixtures("gpu_backend")


@pytest.mark.parametrize("H", [33, 1152, 20000])
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=["int32", "int64"])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_rank(layout: tuple, dtype: torch.dtype, index_dtype: torch.dtype, H: int) -> None:
    V, org, tp_size, padding = layout
    table = torch.randn(V, H, device="cuda").to(dtype)
    ids = awkward_ids(V, index_dtype).cuda()
    for rank in range(tp_size):
        shard = ek.VocabShard.build(V, tp_rank=rank, tp_size=tp_size, org_num_embeddings=org, padding_size=padding)
        weight = ek.shard_vocab_weight(table, shard)
        rows = GuardedRows(len(ids), H, dtype, "cuda")
        with UnchangedTensors([ids, weight]):
            ek.vocab_parallel_embedding(ids, weight, shard, out=rows.view)
        rows.check_around()
        in_range = shard.local_rows(ids) >= 0
        assert same_bits(rows.view[in_range], full_lookup(ids[in_range], table))
        assert same_bits(rows.view[~in_range], torch.zeros_like(rows.view[~in_range]))


@pytest.mark.parametrize("scale", [None, *SCALES])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_every_bit_pattern_and_both_conventions_of_a_scale(dtype: torch.dtype, scale: float | None) -> None:
    table = every_number(dtype).view(256, 256).cuda()
    ids = torch.randperm(256, device="cuda")
    if scale is None:
        out = ek.vocab_parallel_embedding(ids, table, whole(256))
        integer = torch.int32 if dtype == torch.float32 else torch.int16
        assert torch.equal(out.view(integer), table.view(integer)[ids])
        return
    out = ek.vocab_parallel_embedding(ids, table, whole(256), scale=scale)
    assert same_bits_or_nan(out, table[ids] * scale)
    for scale_dtype in {dtype, torch.float32}:
        normalizer = torch.tensor(scale, dtype=scale_dtype, device="cuda")
        out = ek.vocab_parallel_embedding(ids, table, whole(256), scale=normalizer)
        # On a GPU, unlike on a CPU, torch first rounds a 0-d fp32 tensor to the table's dtype; a float it does not.
        assert same_bits_or_nan(out, table[ids] * normalizer.item())


def test_rows_beyond_2_to_the_31_elements() -> None:
    table = torch.zeros(2**19 + 2**8, 4096, dtype=torch.bfloat16, device="cuda")
    table[-1] = 3
    out = ek.vocab_parallel_embedding(torch.tensor([len(table) - 1], device="cuda"), table, whole(len(table)))
    assert (out == 3).all()
