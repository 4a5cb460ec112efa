"""vocab_parallel_embedding: the table's bits, both roundings of a scale, rank sums, and ids that point nowhere."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import eagle_kernels as ek
from accuracy import every_number
from guards import GuardedRows, UnchangedTensors, between_forbidden_pages, same_bits, same_bits_or_nan

pytestmark = pytest.mark.usefixtures("poisoned_memory")

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
DTYPE_IDS = ["bf16", "fp16", "fp32"]
INDEX_DTYPES = [torch.int32, torch.int64]

# (ids, of which original, ranks, padding): original ids only; added ids; ranks that have only padding.
LAYOUTS = [(200, 200, 1, 64), (200, 190, 1, 64), (130, 130, 2, 64), (261, 256, 2, 64), (100, 90, 4, 8), (70, 70, 8, 64)]


def whole(V: int) -> ek.VocabShard:
    return ek.VocabShard.build(V, tp_rank=0, tp_size=1)


def awkward_ids(V: int, dtype: torch.dtype) -> Tensor:
    """Every id once and ids that no rank has, shuffled."""
    limits = torch.iinfo(dtype)
    nobody = [-1, -V, V, V + 1, V + 10_000, limits.min, limits.max]
    nobody += [2**40, -(2**40), 2**32, 2**32 + 5] if dtype == torch.int64 else []
    ids = torch.cat([torch.arange(V, dtype=dtype), torch.tensor(nobody, dtype=dtype)])
    return ids[torch.randperm(len(ids))]


def full_lookup(ids: Tensor, table: Tensor) -> Tensor:
    """F.embedding of the valid ids, zero rows for the others."""
    valid = (ids >= 0) & (ids < len(table))
    return torch.where(valid.unsqueeze(-1), F.embedding(torch.where(valid, ids, 0).long(), table), 0)


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=["int32", "int64"])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_ranks_add_up_to_the_full_lookup(
    layout: tuple, dtype: torch.dtype, index_dtype: torch.dtype, cpu_isa: str
) -> None:
    V, org, tp_size, padding = layout
    H = 33
    table = torch.randn(V, H).to(dtype)
    ids = awkward_ids(V, index_dtype)
    total = torch.zeros(len(ids), H, dtype=dtype)
    holders = torch.zeros(len(ids), dtype=torch.int64)
    for rank in range(tp_size):
        shard = ek.VocabShard.build(V, tp_rank=rank, tp_size=tp_size, org_num_embeddings=org, padding_size=padding)
        weight = ek.shard_vocab_weight(table, shard)
        rows = GuardedRows(len(ids), H, dtype)
        with UnchangedTensors([ids, weight]):
            ek.vocab_parallel_embedding(ids, weight, shard, out=rows.view)
            own = ek.vocab_parallel_embedding(ids, weight, shard)
        rows.check_around()
        in_range = shard.local_rows(ids) >= 0
        assert same_bits(own, rows.view.clone())
        assert same_bits(own[in_range], full_lookup(ids[in_range], table))
        assert same_bits(own[~in_range], torch.zeros_like(own[~in_range]))
        holders += in_range
        total += own
    assert torch.equal(holders, ((ids >= 0) & (ids < V)).long())
    assert same_bits_or_nan(total, full_lookup(ids, table))


@pytest.mark.parametrize("scale", [None, 0.5])
def test_rows_without_columns(scale: float | None, cpu_isa: str) -> None:
    """Their memory is a null pointer, which the copy passed to memcpy: undefined behavior, seen by `make sanitize`."""
    shard = ek.VocabShard.build(64, tp_rank=0, tp_size=1)
    out = torch.empty(2, 0)
    assert ek.vocab_parallel_embedding(torch.tensor([3, 77]), torch.empty(64, 0), shard, scale=scale, out=out) is out
    ids, out = torch.tensor([[3, 77, 4]]), torch.empty(1, 3, 0)
    assert ek.vocab_parallel_embedding(ids, torch.empty(64, 0), shard, scale=scale, out=out) is out
    assert ek.vocab_parallel_embedding(torch.tensor([3, 77]), torch.empty(64, 0), shard, scale=scale).shape == (2, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_without_a_scale_every_bit_pattern_passes(dtype: torch.dtype, cpu_isa: str) -> None:
    """A copy: subnormals, infinities and NaN payloads too."""
    table = every_number(dtype).view(256, 256)
    ids = torch.randperm(256)
    out = ek.vocab_parallel_embedding(ids, table, whole(256))
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(out.view(integer), table.view(integer)[ids])


SCALES = [2560**0.5, 5376**0.5, 1.0, 0.1, 0.0, -3.3, 1e30]


@pytest.mark.parametrize("scale", SCALES, ids="{:.4g}".format)
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_both_conventions_of_a_scale_have_torchs_bits(dtype: torch.dtype, scale: float, cpu_isa: str) -> None:
    """A float: SGLang's `row * hidden_size**0.5`. A 0-d tensor: the rounded normalizer of Hugging Face and vLLM."""
    table = every_number(dtype).view(256, 256)
    ids = torch.randperm(256)
    by_float = ek.vocab_parallel_embedding(ids, table, whole(256), scale=scale)
    assert same_bits_or_nan(by_float, table[ids] * scale)
    for scale_dtype in {dtype, torch.float32}:
        normalizer = torch.tensor(scale, dtype=scale_dtype)
        by_tensor = ek.vocab_parallel_embedding(ids, table, whole(256), scale=normalizer)
        assert same_bits_or_nan(by_tensor, table[ids] * normalizer)


def test_the_two_conventions_differ(cpu_isa: str) -> None:
    """Gemma 3 4B: sqrt(2560) = 50.596 rounds to 50.5 in bf16, and a sixth of the values show it."""
    table = torch.randn(64, 256).bfloat16()
    ids = torch.arange(64)
    by_float = ek.vocab_parallel_embedding(ids, table, whole(64), scale=2560**0.5)
    by_tensor = ek.vocab_parallel_embedding(ids, table, whole(64), scale=torch.tensor(2560**0.5).bfloat16())
    assert (by_float != by_tensor).float().mean() > 0.05


@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3), (2, 0, 3), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("scale", [None, 1.5])
def test_any_shape_of_ids(shape: tuple, scale: float | None, cpu_isa: str) -> None:
    table = torch.randn(50, 33).bfloat16()
    ids = torch.randint(-3, 53, shape)
    expected = full_lookup(ids.reshape(-1), table).view(*shape, 33) * (scale or 1)
    out = torch.full((*shape, 40), float("nan")).bfloat16()[..., :33]
    own = ek.vocab_parallel_embedding(ids, table, whole(50), scale=scale)
    assert own.shape == (*shape, 33) and torch.equal(own, expected)
    assert ek.vocab_parallel_embedding(ids, table, whole(50), scale=scale, out=out) is out
    assert torch.equal(out, expected)


def test_strided_tables_and_ids(cpu_isa: str) -> None:
    wide = torch.randn(50, 80).bfloat16()
    ids = torch.randint(-3, 53, (7, 4))[:, 1]
    out = ek.vocab_parallel_embedding(ids, wide[:, 3:36], whole(50), scale=None)
    assert torch.equal(out, full_lookup(ids, wide[:, 3:36]))


@pytest.mark.parametrize("scale", [None, 2.0, float("inf")])
def test_an_id_of_nobody_hides_what_the_table_holds(scale: float | None, cpu_isa: str) -> None:
    """Row 0 and the last row, the likely clamps, are NaN."""
    table = torch.randn(50, 33).bfloat16()
    table[[0, -1]] = float("nan")
    out = ek.vocab_parallel_embedding(torch.tensor([-1, 50, 7, 2**40]), table, whole(50), scale=scale)
    assert same_bits(out[[0, 1, 3]], torch.zeros(3, 33).bfloat16())
    assert torch.equal(out[2], table[7] * (scale or 1))


@pytest.mark.parametrize("at", ["begin", "end"])
@pytest.mark.parametrize("scale", [None, 1.5])
@pytest.mark.parametrize("H", [1, 33, 512])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_no_memory_outside_the_table_is_touched(
    dtype: torch.dtype, H: int, scale: float | None, at: str, cpu_isa: str
) -> None:
    """A failure is a segmentation fault. The unpadded table of one rank ends at its last id; so does the last shard."""
    table = torch.randn(70, H).to(dtype)
    for index_dtype in INDEX_DTYPES:
        ids = awkward_ids(70, index_dtype)
        weight = between_forbidden_pages(table, at)
        out = between_forbidden_pages(torch.empty(len(ids), H).to(dtype), at)
        ids = between_forbidden_pages(ids, at)
        ek.vocab_parallel_embedding(ids, weight, whole(70), scale=scale, out=out)
        assert torch.equal(out, full_lookup(ids, table) * (scale or 1))
        for rank in range(2):
            shard = ek.VocabShard.build(70, tp_rank=rank, tp_size=2, org_num_embeddings=64, padding_size=4)
            weight = between_forbidden_pages(ek.shard_vocab_weight(table, shard), at)
            ek.vocab_parallel_embedding(ids, weight, shard, scale=scale, out=out)
            in_range = shard.local_rows(ids) >= 0
            assert torch.equal(out[in_range], full_lookup(ids[in_range], table) * (scale or 1))
            assert not out[~in_range].any()


@settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_ids(data: st.DataObject, cpu_isa: str) -> None:
    V = data.draw(st.integers(1, 200), label="V")
    added = data.draw(st.integers(0, V - 1), label="added")
    tp_size = data.draw(st.sampled_from([1, 2, 4]), label="tp_size")
    rank = data.draw(st.integers(0, tp_size - 1), label="rank")
    dtype = data.draw(st.sampled_from(INDEX_DTYPES), label="dtype")
    limits = torch.iinfo(dtype)
    entry = st.one_of(st.integers(-2, V + 70), st.integers(limits.min, limits.max))
    ids = torch.tensor(data.draw(st.lists(entry, max_size=12), label="ids"), dtype=dtype)
    shard = ek.VocabShard.build(V, tp_rank=rank, tp_size=tp_size, org_num_embeddings=V - added)
    table = torch.arange(1, V + 1, dtype=torch.float32).unsqueeze(1).repeat(1, 3)
    out = ek.vocab_parallel_embedding(ids, ek.shard_vocab_weight(table, shard), shard)
    for i, id in enumerate(ids.tolist()):
        mine = shard.org_begin <= id < shard.org_end or shard.added_begin <= id < shard.added_end
        assert out[i].tolist() == [float(id + 1) if mine else 0.0] * 3


@pytest.mark.parametrize("scale", [None, 1.5])
def test_bits_do_not_depend_on_threads(scale: float | None, cpu_isa: str) -> None:
    table, ids = torch.randn(200, 333).bfloat16(), torch.randint(-20, 220, (1000,))
    expected = ek.vocab_parallel_embedding(ids, table, whole(200), scale=scale)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert same_bits(expected, ek.vocab_parallel_embedding(ids, table, whole(200), scale=scale))
    finally:
        torch.set_num_threads(before)
