"""VocabShard and shard_vocab_weight: the layout against a list-based transcription, engine examples, and lookups."""

import itertools
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_kernels.vocab_shard import VocabShard, shard_vocab_weight


def pad(count, multiple):
    return (count + multiple - 1) // multiple * multiple


def transcribed_ranks(num_embeddings, org, tp_size, padding_size):
    """The id of every row of every rank, None for padding; None alone where tp_size does not divide the padded table.

    docs/design.md, Vocabulary shards, on lists: pad both halves, cut each into tp_size pieces. Nothing is clamped, so
    nothing here shares an expression with VocabShard.
    """
    padding = padding_size if pad(org, padding_size) % tp_size == 0 else padding_size * tp_size
    original = list(range(org)) + [None] * (pad(org, padding) - org)
    added = list(range(org, num_embeddings))
    added += [None] * (pad(len(original) + len(added), padding) - len(original) - len(added))
    if (len(original) + len(added)) % tp_size:
        return None
    o, a = len(original) // tp_size, len(added) // tp_size
    return [original[r * o : (r + 1) * o] + added[r * a : (r + 1) * a] for r in range(tp_size)]


def build_ranks(num_embeddings, org, tp_size, padding_size=64):
    return [
        VocabShard.build(
            num_embeddings, org_num_embeddings=org, tp_rank=rank, tp_size=tp_size, padding_size=padding_size
        )
        for rank in range(tp_size)
    ]


LAYOUTS = [
    pytest.param(org + added, org, tp_size, padding_size, id=f"V{org}+{added}-tp{tp_size}-pad{padding_size}")
    for org, added, tp_size, padding_size in itertools.product(
        (1, 63, 64, 65, 192, 1010), (0, 1, 64, 70), (1, 2, 3, 4, 6, 8), (1, 64)
    )
]


@pytest.mark.parametrize(("num_embeddings", "org", "tp_size", "padding_size"), LAYOUTS)
def test_rows_and_lookup_match_the_transcription(num_embeddings, org, tp_size, padding_size):
    expected = transcribed_ranks(num_embeddings, org, tp_size, padding_size)
    if expected is None:
        with pytest.raises(ValueError, match="do not divide over tp_size"):
            build_ranks(num_embeddings, org, tp_size, padding_size)
        return
    shards = build_ranks(num_embeddings, org, tp_size, padding_size)
    full = torch.arange(1, num_embeddings + 1, dtype=torch.float32).unsqueeze(1)
    ids = torch.arange(-3, num_embeddings + 130)
    in_table = (ids >= 0) & (ids < num_embeddings)
    owners = torch.zeros_like(ids)
    rank_sum = torch.zeros(len(ids), 1)
    for shard, row_ids in zip(shards, expected, strict=True):
        assert shard.rows == len(row_ids)
        weight = shard_vocab_weight(full, shard)
        assert weight.squeeze(1).tolist() == [0 if i is None else i + 1 for i in row_ids]

        rows = shard.local_rows(ids)
        assert rows.dtype == torch.int64
        assert rows.tolist() == [row_ids.index(i) if i in row_ids else -1 for i in ids.tolist()]
        in_range = rows >= 0
        owners += in_range
        rank_sum += torch.where(in_range.unsqueeze(1), weight[rows.clamp(min=0)], 0)
    assert torch.equal(owners, in_table.long())
    assert torch.equal(rank_sum, torch.where(in_table.unsqueeze(1), full[ids.clamp(0, num_embeddings - 1)], 0))


@settings(deadline=None, max_examples=300, derandomize=True)
@given(
    org=st.integers(1, 300_000),
    added=st.integers(0, 2_000),
    tp_size=st.integers(1, 64),
    padding_size=st.sampled_from([1, 16, 64, 128]),
)
def test_ranges_partition_the_ids(org, added, tp_size, padding_size):
    try:
        shards = build_ranks(org + added, org, tp_size, padding_size)
    except ValueError:
        # Widening the padding, as the message proposes, always divides.
        shards = build_ranks(org + added, org, tp_size, padding_size * tp_size)
    assert len({(shard.rows, shard.added_row, shard.padding) for shard in shards}) == 1
    assert shards[0].rows * tp_size % shards[0].padding == 0
    assert [shards[0].org_begin, shards[-1].org_end] == [0, org]
    assert [shards[0].added_begin, shards[-1].added_end] == [org, org + added]
    for left, right in itertools.pairwise(shards):
        assert (left.org_end, left.added_end) == (right.org_begin, right.added_begin)
    for shard in shards:
        assert 0 <= shard.org_end - shard.org_begin <= shard.added_row
        assert 0 <= shard.added_end - shard.added_begin <= shard.rows - shard.added_row


ENGINE_EXAMPLES = [
    # vLLM 0.33, run: V=1010 at tp 2.
    pytest.param((1010, None, 2, 0), (512, 0, 512, 1010, 1010, 512), id="vllm-V1010-rank0"),
    pytest.param((1010, None, 2, 1), (512, 512, 1010, 1010, 1010, 512), id="vllm-V1010-rank1"),
    # The docstring of VocabParallelEmbedding: 1010 original and 16 added ids, padded to 1088 rows.
    pytest.param((1026, 1010, 2, 0), (544, 0, 512, 1010, 1026, 512), id="docstring-1010+16-rank0"),
    pytest.param((1026, 1010, 2, 1), (544, 512, 1010, 1026, 1026, 512), id="docstring-1010+16-rank1"),
    # 64 is not a multiple of 3, so P widens to 192 and rank 2 holds padding only.
    pytest.param((65, None, 3, 2), (64, 65, 65, 65, 65, 64), id="sglang-widened-V65-rank2"),
]


@pytest.mark.parametrize(("layout", "expected"), ENGINE_EXAMPLES)
def test_engine_examples(layout, expected):
    num_embeddings, org, tp_size, tp_rank = layout
    shard = VocabShard.build(num_embeddings, org_num_embeddings=org, tp_size=tp_size, tp_rank=tp_rank)
    fields = (shard.rows, shard.org_begin, shard.org_end, shard.added_begin, shard.added_end, shard.added_row)
    assert fields == expected


# docs/design.md, Vocabulary shards: rows per rank of the engines' layout, ids that a ceil(V / tp) slice misroutes.
CEIL_SLICES = [
    pytest.param(262144, None, 2, 131072, 0, id="gemma3-1b-tp2"),
    pytest.param(262208, None, 8, 32776, 0, id="gemma3-27b-tp8"),
    pytest.param(262144, None, 3, 87424, 174762, id="gemma3-1b-tp3"),
    pytest.param(262208, None, 6, 43712, 218506, id="gemma3-27b-tp6"),
    pytest.param(262145, None, 2, 131104, 131072, id="gemma-plus-one-tp2"),
    pytest.param(262145, None, 8, 32776, 229376, id="gemma-plus-one-tp8"),
    # Declared as an added id, the extra token itself is misrouted too.
    pytest.param(262145, 262144, 2, 131104, 131073, id="gemma-plus-one-added-tp2"),
    pytest.param(32001, None, 4, 8016, 24000, id="llama2-plus-one-tp4"),
    pytest.param(151669, None, 2, 75840, 75834, id="qwen-tokenizer-tp2"),
    pytest.param(128815, None, 8, 16104, 112713, id="step3p5-default-tp8"),
    pytest.param(50257, None, 8, 6288, 43974, id="gpt2-tp8"),
]


@pytest.mark.parametrize(("num_embeddings", "org", "tp_size", "rows", "misrouted"), CEIL_SLICES)
def test_slicing_by_ceil_misroutes(num_embeddings, org, tp_size, rows, misrouted):
    slice_rows = -(-num_embeddings // tp_size)
    ids = torch.arange(num_embeddings)
    wrong = 0
    for shard in build_ranks(num_embeddings, org, tp_size):
        assert shard.rows == rows
        local = shard.local_rows(ids)
        fetched = shard.tp_rank * slice_rows + local
        wrong += int(((local >= 0) & ((local >= slice_rows) | (fetched != ids))).sum())
    assert wrong == misrouted


@settings(deadline=None, max_examples=300, derandomize=True)
@given(num_embeddings=st.integers(1, 300_000), tp_size=st.integers(1, 64))
def test_ceil_slices_agree_iff_padding_is_below_tp_size(num_embeddings, tp_size):
    shard = VocabShard.build(num_embeddings, tp_rank=0, tp_size=tp_size)
    agrees = shard.rows == -(-num_embeddings // tp_size)
    assert agrees == (pad(num_embeddings, shard.padding) - num_embeddings < tp_size)


VIEWS = [
    pytest.param(128, None, 2, 0, 64, 0, id="first-half"),
    pytest.param(128, None, 2, 1, 64, 64, id="second-half"),
    pytest.param(100, None, 2, 1, 1, 50, id="no-padding"),
    pytest.param(128, 64, 1, 0, 64, 0, id="added-rows-follow"),
    pytest.param(129, 128, 2, 0, 64, None, id="first-half-with-added-row"),
    pytest.param(100, None, 1, 0, 64, None, id="padded-tail"),
    pytest.param(100, None, 2, 0, 64, 0, id="padding-is-on-the-other-rank"),
    pytest.param(100, None, 2, 1, 64, None, id="padding-is-on-this-rank"),
    pytest.param(128, 100, 1, 0, 64, None, id="padding-between-original-and-added"),
    pytest.param(192, 128, 2, 0, 64, None, id="added-rows-are-elsewhere"),
    pytest.param(65, None, 3, 2, 64, None, id="padding-only"),
]


@pytest.mark.parametrize(("num_embeddings", "org", "tp_size", "tp_rank", "padding_size", "first_row"), VIEWS)
@pytest.mark.parametrize("row_stride", [8, 24])
def test_view_where_layouts_agree(num_embeddings, org, tp_size, tp_rank, padding_size, first_row, row_stride):
    shard = VocabShard.build(
        num_embeddings, org_num_embeddings=org, tp_size=tp_size, tp_rank=tp_rank, padding_size=padding_size
    )
    full = torch.ones(num_embeddings, row_stride, dtype=torch.bfloat16)[:, :8]
    weight = shard_vocab_weight(full, shard)
    assert weight.shape == (shard.rows, 8)
    assert weight.dtype == torch.bfloat16
    begin, end = full.data_ptr(), full.data_ptr() + num_embeddings * row_stride * 2
    if first_row is None:
        assert not begin <= weight.data_ptr() < end
        assert weight.is_contiguous()
    else:
        assert weight.data_ptr() == full[first_row:].data_ptr()
        assert weight.stride() == (row_stride, 1)


@pytest.mark.parametrize("num_embeddings", [128, 130], ids=["view", "copy"])
def test_weight_of_a_parameter_is_detached(num_embeddings):
    full = torch.nn.Parameter(torch.zeros(num_embeddings, 4))
    weight = shard_vocab_weight(full, VocabShard.build(num_embeddings, tp_rank=0, tp_size=1))
    assert not weight.requires_grad
    assert type(weight) is torch.Tensor


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
def test_local_rows_takes_any_integer_dtype_and_shape(dtype):
    # Row 138 of id 100 does not fit int8: the arithmetic has to be in int64.
    shard = VocabShard.build(120, org_num_embeddings=90, tp_rank=0, tp_size=1)
    ids = torch.tensor([[0, 100], [119, 90]], dtype=dtype)
    assert torch.equal(shard.local_rows(ids), torch.tensor([[0, 138], [157, 128]]))
    assert shard.local_rows(torch.empty(0, 3, dtype=dtype)).shape == (0, 3)


def test_local_rows_of_no_tensor_are_refused():
    with pytest.raises(TypeError, match=r"^VocabShard.local_rows: ids is a list, expected a torch.Tensor$"):
        VocabShard.build(120, tp_rank=0, tp_size=1).local_rows([0, 1])


def test_shards_are_equal_hashable_and_printable():
    first, second = (VocabShard.build(1010, tp_rank=1, tp_size=2) for _ in range(2))
    assert first == second
    assert len({first, second, VocabShard.build(1010, tp_rank=0, tp_size=2)}) == 2
    assert "rows=512, org_begin=512, org_end=1010" in str(first)
    with pytest.raises(AttributeError):
        first.rows = 1


def test_zero_org_num_embeddings_means_all():
    with_zero = VocabShard.build(1010, tp_rank=0, tp_size=2, org_num_embeddings=0)
    assert with_zero == VocabShard.build(1010, tp_rank=0, tp_size=2)


BUILD_ERRORS = [
    pytest.param({"num_embeddings": 0}, ValueError, "num_embeddings is 0, expected at least 1", id="no-ids"),
    pytest.param({"num_embeddings": 1010.0}, TypeError, "num_embeddings is a float, expected an int", id="float"),
    pytest.param({"tp_size": 0}, ValueError, "tp_size is 0, expected at least 1", id="no-ranks"),
    pytest.param({"tp_rank": -1}, ValueError, "tp_rank is -1, expected at least 0", id="negative-rank"),
    pytest.param({"tp_rank": 2}, ValueError, "tp_rank is 2, expected below tp_size = 2", id="rank-outside"),
    pytest.param({"padding_size": 0}, ValueError, "padding_size is 0, expected at least 1", id="no-padding-size"),
    pytest.param(
        {"org_num_embeddings": 1011},
        ValueError,
        "org_num_embeddings is 1011, expected at most num_embeddings = 1010",
        id="more-original-than-all",
    ),
    pytest.param(
        {"num_embeddings": 193, "org_num_embeddings": 192, "tp_size": 3},
        ValueError,
        "padding_size is 64, expected 192, because the 256 padded rows do not divide over tp_size = 3",
        id="added-ids-do-not-divide",
    ),
]


@pytest.mark.parametrize(("changed", "kind", "message"), BUILD_ERRORS)
def test_build_errors(changed, kind, message):
    arguments = {"num_embeddings": 1010, "tp_rank": 0, "tp_size": 2} | changed
    with pytest.raises(kind, match=re.escape(f"VocabShard.build: {message}")):
        VocabShard.build(**arguments)


SHARD = VocabShard.build(1010, tp_rank=0, tp_size=2)
CALL_ERRORS = [
    pytest.param(
        lambda: shard_vocab_weight(torch.zeros(1024, 8), SHARD),
        ValueError,
        "shard_vocab_weight: full_weight has shape (1024, 8), expected (1010, H), because the shard has 1010 ids",
        id="rows",
    ),
    pytest.param(
        lambda: shard_vocab_weight(torch.zeros(1010), SHARD),
        ValueError,
        "shard_vocab_weight: full_weight has shape (1010,), expected (1010, H)",
        id="one-dimensional",
    ),
    pytest.param(
        lambda: shard_vocab_weight([[0.0]], SHARD),
        TypeError,
        "shard_vocab_weight: full_weight is a list, expected a torch.Tensor",
        id="not-a-tensor",
    ),
    pytest.param(
        lambda: shard_vocab_weight(torch.zeros(1010, 8), (0, 512)),
        TypeError,
        "shard_vocab_weight: shard is a tuple, expected a VocabShard",
        id="not-a-shard",
    ),
    pytest.param(
        lambda: SHARD.local_rows(torch.zeros(3)),
        TypeError,
        "VocabShard.local_rows: ids has dtype torch.float32, expected an integer dtype",
        id="float-ids",
    ),
    pytest.param(
        lambda: SHARD.local_rows(torch.zeros(3, dtype=torch.bool)),
        TypeError,
        "VocabShard.local_rows: ids has dtype torch.bool, expected an integer dtype",
        id="bool-ids",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), CALL_ERRORS)
def test_call_errors(call, kind, message):
    with pytest.raises(kind, match=re.escape(message)):
        call()
