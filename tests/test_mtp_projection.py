"""MTPProjection: all orders, offsets and embeddings against float64; one op call, masks, shards, errors."""

import copy
import pickle
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import eagle_kernels as ek
from accuracy import relative_rms, rms_limit
from guards import GuardedRows, UnchangedTensors, same_bits

H, D, V, T = 72, 40, 193, 13


def make_layer(dtype: torch.dtype = torch.bfloat16, **config: object) -> ek.MTPProjection:
    # Two eps that differ, and rows small enough that they matter.
    eps = {"enorm_eps": 1e-5, "hnorm_eps": 3e-2}
    layer = ek.MTPProjection(ek.MTPConfig(H, D, **(eps | config)), dtype=dtype)
    for name, parameter in layer.named_parameters():
        if "norm" in name:
            parameter.uniform_(0.5 - layer.config.norm_offset, 1.5 - layer.config.norm_offset)
    return layer


def make_inputs(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [T, H], ids [T] with some outside the vocabulary, table [V, H]; rows from far below eps to far above."""
    scales = torch.logspace(-3, 2, T).unsqueeze(1)
    hidden = (torch.randn(T, H) * scales).to(dtype)
    table = (torch.randn(V, H) * torch.logspace(-4, 1, V).unsqueeze(1)).to(dtype)
    ids = torch.randint(V, (T,))
    ids[3], ids[7], ids[8], ids[9] = -1, V, V - 1, 0
    return hidden, ids, table


def lookup(table: Tensor, ids: Tensor, scale: float | None = None) -> Tensor:
    """The embeddings as engines compute them: a row outside the vocabulary is zero, the product is rounded once."""
    rows = F.embedding(ids.clamp(0, len(table) - 1), table) * ((ids >= 0) & (ids < len(table))).unsqueeze(1)
    return rows if scale is None else (rows.to(torch.promote_types(rows.dtype, torch.float32)) * scale).to(rows.dtype)


def chain(layer: ek.MTPProjection, embeds: Tensor, hidden: Tensor) -> Tensor:
    """What the engines run, in the dtype of the inputs: enorm, hnorm, cat, eh_proj."""
    config, dtype = layer.config, hidden.dtype
    wide = torch.promote_types(dtype, torch.float32)

    def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x.to(wide), (H,), weight.to(wide) + config.norm_offset, eps).to(dtype)

    if config.normed:
        embeds = norm(embeds, layer.enorm.weight, config.enorm_eps)
        hidden = norm(hidden, layer.hnorm.weight, config.hnorm_eps)
    pair = [embeds, hidden] if config.order == "embed,hidden" else [hidden, embeds]
    bias = layer.eh_proj.bias
    return F.linear(torch.cat(pair, -1), layer.eh_proj.weight.to(dtype), None if bias is None else bias.to(dtype))


CONFIGS = [
    pytest.param({}, id="deepseek"),
    pytest.param({"norm_offset": 1.0}, id="step3p5"),
    pytest.param({"order": "hidden,embed"}, id="mimo"),
    pytest.param({"norm_offset": 1.0, "order": "hidden,embed", "embedding_scale": H**0.5}, id="reversed-offset-scale"),
    pytest.param({"normed": False, "embedding_scale": H**0.5}, id="gemma4"),
    pytest.param({"normed": False, "order": "hidden,embed"}, id="no-norms"),
    pytest.param({"bias": True}, id="ernie"),
    pytest.param({"normed": False, "bias": True}, id="eagle"),
]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("source", ["table", "module", "embeds"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_matches_float64(config: dict, source: str, dtype: torch.dtype) -> None:
    layer, (hidden, ids, table) = make_layer(dtype, **config), make_inputs(dtype)
    scale = layer.config.embedding_scale
    embeds = lookup(table, ids, scale)
    if source == "table":
        given = {"ids": ids, "table": table}
    elif source == "module":
        module = ek.VocabParallelEmbedding(V, H, dtype=dtype)
        module.load_state_dict({"weight": table})
        given = {"ids": ids.int(), "table": module}
    else:
        given = {"embeds": embeds}
    truth_embeds = embeds.double() if source == "embeds" else lookup(table.double(), ids, scale)
    truth = chain(layer, truth_embeds, hidden.double())
    limit, _ = rms_limit(dtype, 2 * H, truth, chain(layer, embeds, hidden))
    out = GuardedRows(T, D, dtype)
    with UnchangedTensors([hidden, ids, table]):
        projected = layer(hidden, **given)
        assert layer(hidden, **given, out=out.view) is out.view
    out.check_around()
    assert same_bits(projected, out.view.contiguous())
    assert relative_rms(projected, truth) <= limit


class RecordedOps(TorchDispatchMode):
    def __enter__(self) -> list[str]:
        self.names = []
        super().__enter__()
        return self.names

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("config", CONFIGS[:4])
def test_token_ids_and_a_table_are_one_op_call(config: dict) -> None:
    layer, (hidden, ids, table) = make_layer(**config), make_inputs()
    out, accepted = torch.empty(T, D).bfloat16(), torch.arange(T)
    with torch.no_grad(), RecordedOps() as names:
        layer(hidden, ids, table=table, indices=accepted, out=out)
    assert names == ["norm_concat_linear_out"]


def test_the_embedding_as_a_chunk_has_the_bits_of_the_embedding_handed_in() -> None:
    layer, (hidden, ids, table) = make_layer(norm_offset=1.0), make_inputs()
    assert same_bits(layer(hidden, ids, table=table), layer(hidden, embeds=lookup(table, ids)))


def test_rows_are_selected_through_indices() -> None:
    layer, (hidden, ids, table) = make_layer(), make_inputs()
    accepted = torch.tensor([12, 0, 0, 5], dtype=torch.int32)
    selected = layer(hidden, ids[:4], table=table, indices=accepted)
    assert same_bits(selected, layer(hidden[accepted.long()], ids[:4], table=table))
    # A row that was rejected may be addressed as -1: its half of the concat is zero.
    assert same_bits(
        layer(hidden, ids[:1], table=table, indices=torch.tensor([-1])),
        layer(torch.zeros(1, H).bfloat16(), ids[:1], table=table),
    )


@pytest.mark.parametrize("max_tokens", [None, T + 2])
@pytest.mark.parametrize("source", ["table", "module", "embeds"])
def test_position_0_is_masked_where_the_config_says_so(source: str, max_tokens: int | None) -> None:
    hidden, ids, table = make_inputs()
    positions = torch.arange(T) % 5
    layer = make_layer(mask_position_zero=True)
    layer.max_tokens = max_tokens
    module = ek.VocabParallelEmbedding.from_weight(table, ek.VocabShard.build(V, tp_rank=0, tp_size=1))
    given = {
        "table": {"ids": ids, "table": table},
        "module": {"ids": ids.int(), "table": module},
        "embeds": {"embeds": lookup(table, ids)},
    }[source]
    unmasked = make_layer()
    unmasked.load_state_dict(layer.state_dict())
    zeroed = torch.where((positions == 0).unsqueeze(1), 0, lookup(table, ids))
    with UnchangedTensors([ids, positions, table]):
        masked = layer(hidden, positions=positions, **given)
    assert same_bits(masked, unmasked(hidden, embeds=zeroed))
    assert same_bits(layer(hidden, positions=positions + 1, **given), unmasked(hidden, **given))
    assert not torch.equal(masked, unmasked(hidden, **given))


@pytest.mark.parametrize("scale", [None, H**0.5])
@pytest.mark.parametrize("normed", [True, False])
def test_added_ids_and_padding_rows_go_through_the_shard(normed: bool, scale: float | None) -> None:
    """On one rank too: added ids follow the padding of the original ones, so an added id is not its row's number."""
    layer, (hidden, ids, table) = make_layer(normed=normed, embedding_scale=scale), make_inputs()
    module = ek.VocabParallelEmbedding(V, H, org_num_embeddings=V - 5, dtype=torch.bfloat16)
    module.load_state_dict({"weight": table})
    assert not module.shard.is_full_table
    assert same_bits(layer(hidden, ids, table=module), layer(hidden, ids, table=table))


def test_padding_rows_of_a_full_table_are_no_ids() -> None:
    layer, (hidden, ids, table) = make_layer(), make_inputs()
    padded = torch.cat([table, torch.ones(256 - V, H).bfloat16()])
    module = ek.VocabParallelEmbedding.from_weight(padded, ek.VocabShard.build(V, tp_rank=0, tp_size=1))
    assert module.shard.is_full_table and V in ids
    assert same_bits(layer(hidden, ids, table=module), layer(hidden, ids, table=table))


@pytest.mark.parametrize("normed", [True, False])
def test_the_scale_of_a_shared_module_goes_before_the_configs(normed: bool) -> None:
    """A Gemma target's own embedding scales: the drafter must neither scale a second time nor drop that scale."""
    layer, (hidden, ids, table) = make_layer(normed=normed, embedding_scale=1e3), make_inputs()
    shard, scale = ek.VocabShard.build(V, tp_rank=0, tp_size=1), 3.0
    as_float = ek.VocabParallelEmbedding.from_weight(table, shard, scale=scale)
    as_tensor = ek.VocabParallelEmbedding.from_weight(table, shard, scale=torch.tensor(scale).bfloat16())
    expected = chain(layer, lookup(table.double(), ids, scale), hidden.double())
    eager = chain(layer, lookup(table, ids, scale), hidden)
    limit, _ = rms_limit(torch.bfloat16, 2 * H, expected, eager)
    for module in (as_float, as_tensor):
        assert relative_rms(layer(hidden, ids, table=module), expected) <= limit


@pytest.mark.parametrize(("rounded", "expected"), [(False, 2816**0.5), (True, 53.0)])
def test_the_scale_is_rounded_as_the_engine_rounds_it(rounded: bool, expected: float) -> None:
    """sqrt(2816) = 53.066: SGLang multiplies by the float, transformers and vLLM by 53."""
    scale = {"embedding_scale": 2816**0.5, "round_embedding_scale": rounded}
    layer, (hidden, ids, table) = make_layer(normed=False, **scale), make_inputs()
    assert same_bits(layer(hidden, ids, table=table), layer(hidden, embeds=lookup(table, ids, expected)))


@pytest.mark.parametrize("normed", [False, True])
def test_a_rounded_scale_compiles_into_one_graph(normed: bool) -> None:
    """It was rounded in each call, by a tensor whose value no trace knows."""
    layer, (hidden, ids, table) = (
        make_layer(normed=normed, embedding_scale=1.7, round_embedding_scale=True),
        make_inputs(),
    )
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (T, 2):
        ours = compiled(hidden[:rows], ids[:rows], table=table)
        assert same_bits(ours, layer(hidden[:rows], ids[:rows], table=table))


def test_static_buffers_are_allocated_once_and_keep_their_address() -> None:
    config = {"mask_position_zero": True, "normed": False, "embedding_scale": 2.0}
    layer, (hidden, ids, table) = make_layer(**config), make_inputs()
    layer.max_tokens = T
    positions, out = torch.arange(T), torch.empty(T, D).bfloat16()
    layer(hidden[:2], ids[:2], table=table, positions=positions[:2])
    addresses = {key: buffer.data_ptr() for key, buffer in layer._static_buffers.items()}
    assert {(name, buffer.shape) for (name, *_), buffer in layer._static_buffers.items()} == {
        ("ids", (T,)),
        ("embeds", (T, H)),
    }
    expected = layer(hidden, ids, table=table, positions=positions)
    layer(hidden, ids, table=table, positions=positions, out=out)
    assert {key: buffer.data_ptr() for key, buffer in layer._static_buffers.items()} == addresses
    assert same_bits(out, expected)
    assert set(layer.state_dict()) == {"eh_proj.weight"}


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_has_no_static_buffers(how: str) -> None:
    """They were copied and saved with the layer."""
    layer, (hidden, ids, table) = make_layer(mask_position_zero=True), make_inputs()
    layer.max_tokens, positions = T, torch.arange(T)
    projected = layer(hidden, ids, table=table, positions=positions)
    assert layer._static_buffers
    other = copy.deepcopy(layer) if how == "deepcopy" else pickle.loads(pickle.dumps(layer))
    assert other._static_buffers == {}
    assert same_bits(other(hidden, ids, table=table, positions=positions), projected)


def test_state_dict_names_are_those_of_checkpoints() -> None:
    layer = make_layer(norm_offset=1.0)
    assert set(layer.state_dict()) == {"enorm.weight", "hnorm.weight", "eh_proj.weight"}
    assert not any(parameter.requires_grad for parameter in layer.parameters())
    fresh = ek.MTPProjection(ek.MTPConfig(H, norm_offset=1.0))
    assert not fresh.enorm.weight.any() and fresh.eh_proj.weight.shape == (H, 2 * H)


def test_no_rows_give_no_rows() -> None:
    layer, (hidden, ids, table) = make_layer(), make_inputs()
    assert layer(hidden[:0], ids[:0], table=table).shape == (0, D)


ERRORS = [
    pytest.param(
        lambda layer, h, ids, table, out: layer(h, out=out),
        "MTPProjection: given are neither, expected either ids and table, or embeds",
        id="no-embedding",
    ),
    pytest.param(
        lambda layer, h, ids, table, out: layer(h, ids, out=out),
        "MTPProjection: given are ids, expected either ids and table, or embeds",
        id="no-table",
    ),
    pytest.param(
        lambda layer, h, ids, table, out: layer(h, ids, table=table, embeds=h, out=out),
        "MTPProjection: given are ids, table, embeds, expected either ids and table, or embeds",
        id="both",
    ),
    pytest.param(
        lambda layer, h, ids, table, out: layer(h, ids.double(), table=table, out=out),
        "MTPProjection: ids has dtype torch.float64, expected torch.int32 or torch.int64",
        id="ids-dtype",
    ),
    pytest.param(
        lambda layer, h, ids, table, out: layer(h, ids.unsqueeze(0), table=table, out=out),
        "MTPProjection: ids has shape (1, 13), expected (N,)",
        id="ids-shape",
    ),
    pytest.param(
        lambda layer, h, ids, table, out: layer(None, ids, table=table, out=out),
        "MTPProjection: hidden is a NoneType, expected a torch.Tensor",
        id="no-hidden",
    ),
    pytest.param(
        lambda layer, h, ids, table, out: layer(h[0], ids, table=table, out=out),
        "MTPProjection: hidden has shape (72,), expected (*, H) = (*, 72)",
        id="one-row",
    ),
    pytest.param(
        lambda layer, h, ids, table, out: layer(h, ids, table=table[:, :8], out=out),
        "MTPProjection: table has shape (193, 8), expected (*, H) = (*, 72)",
        id="table-width",
    ),
    pytest.param(
        lambda layer, h, ids, table, out: layer(h[:, :8], ids, table=table, out=out),
        "MTPProjection: hidden has shape (13, 8), expected (*, H) = (*, 72)",
        id="hidden-width",
    ),
    pytest.param(
        lambda layer, h, ids, table, out: layer(h, embeds=h[:, :8], out=out),
        "MTPProjection: embeds has shape (13, 8), expected (*, H) = (*, 72)",
        id="embeds-width",
    ),
    pytest.param(
        lambda layer, h, ids, table, out: layer(h, ids[:4], table=table, out=out),
        "MTPProjection: hidden has shape (13, 72), expected (4, ...), because there is one row per embedding where "
        "indices is None",
        id="rows",
    ),
    pytest.param(
        lambda layer, h, ids, table, out: layer(h, embeds=h[:4], out=out),
        "MTPProjection: hidden has shape (13, 72), expected (4, ...), because there is one row per embedding where "
        "indices is None",
        id="rows-of-embeds",
    ),
    pytest.param(
        lambda layer, h, ids, table, out: layer(h, ids, table=table, indices=ids[:4], out=out),
        "MTPProjection: indices has shape (4,), expected (13,), because there is one per embedding",
        id="indices",
    ),
    pytest.param(
        lambda layer, h, ids, table, out: layer(h, ids, table=table, indices=ids.double(), out=out),
        "MTPProjection: indices has dtype torch.float64, expected torch.int32 or torch.int64",
        id="indices-dtype",
    ),
    pytest.param(
        lambda layer, h, ids, table, out: layer(h, ids, table=table, positions=ids[:4], out=out),
        "MTPProjection: positions has shape (4,), expected (13,), because there is one per embedding",
        id="positions",
    ),
    pytest.param(
        lambda layer, h, ids, table, out: layer(h.float(), ids, table=table, out=out),
        "norm_concat_linear: chunks[1] has dtype torch.float32, expected torch.bfloat16, because chunks[0] has dtype "
        "torch.bfloat16",
        id="dtype",
    ),
]


@pytest.mark.parametrize(("call", "message"), ERRORS)
def test_bad_arguments_are_refused_and_nothing_is_written(call: object, message: str) -> None:
    layer, inputs, out = make_layer(), make_inputs(), GuardedRows(T, D, torch.bfloat16)
    with pytest.raises((ValueError, TypeError), match=f"^{re.escape(message)}$"):
        call(layer, *inputs, out.view)
    out.check_untouched()


SCALED = {"normed": False, "embedding_scale": H**0.5}


@pytest.mark.parametrize(
    ("named", "config"), [("ids", {}), ("positions", {}), ("ids", SCALED), ("positions", SCALED), ("table", SCALED)]
)
def test_an_out_over_an_input_that_is_copied_first_is_refused(named: str, config: dict) -> None:
    """The op reads the copy, so that it wrote over the input."""
    layer = make_layer(mask_position_zero=True, **config)
    memory = torch.zeros(T * D // 4 + 1, dtype=torch.int64)
    out = memory.view(torch.bfloat16)[: T * D].view(T, D)
    hidden, ids, table = make_inputs()
    positions = torch.arange(T)
    if named == "table":
        memory = torch.zeros(max(V * H, T * D), dtype=torch.bfloat16)
        out, table = memory[: T * D].view(T, D), memory[: V * H].view(V, H)
    elif named == "ids":
        ids = memory[:T]
    else:
        positions = memory[:T]
    with pytest.raises(ValueError, match=f"^MTPProjection: out overlaps {named}, expected disjoint memory"):
        layer(hidden, ids, table=table, positions=positions, out=out)
    assert not memory.any()


def test_a_mask_without_positions_and_too_many_rows_are_refused() -> None:
    layer, (hidden, ids, table) = make_layer(mask_position_zero=True), make_inputs()
    message = "MTPProjection: positions is None, expected (13,) positions, because the config masks position 0"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        layer(hidden, ids, table=table)
    layer.max_tokens = 12
    message = "MTPProjection: there are 13 rows, expected at most 12, because static buffers never grow"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        layer(hidden, ids, table=table, positions=ids)


def test_a_raw_table_is_refused_where_the_target_norms_its_embeddings() -> None:
    layer, (hidden, ids, table) = make_layer(embedding_prenormed=True), make_inputs()
    message = "given are ids, table, expected embeds, because the target norms its embeddings before enorm does"
    with pytest.raises(ValueError, match=f"^MTPProjection: {message}$"):
        layer(hidden, ids, table=table)
    assert layer(hidden, embeds=lookup(table, ids)).shape == (T, D)


@pytest.mark.parametrize("scale", [-3.0, 0.0, 1e-200])
def test_a_scale_that_the_norms_eps_cannot_hold_is_multiplied(scale: float) -> None:
    """Folded into eps, -3 gave the norm of 3 * e, and a scale whose square is 0 a division by zero."""
    layer, (hidden, ids, table) = make_layer(), make_inputs()
    module = ek.VocabParallelEmbedding.from_weight(table, ek.VocabShard.build(V, tp_rank=0, tp_size=1), scale=scale)
    assert same_bits(layer(hidden, ids, table=module), layer(hidden, embeds=module(ids)))


def test_a_call_of_fake_tensors_leaves_no_buffers() -> None:
    """With buffers of the fake call the next call of real tensors had a fake result."""
    layer, inputs = make_layer(mask_position_zero=True), make_inputs()
    layer.max_tokens = T
    positions = torch.arange(T)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        hidden, ids, table = map(mode.from_tensor, inputs)
        layer(hidden, ids, table=table, positions=mode.from_tensor(positions))
    hidden, ids, table = inputs
    assert type(layer(hidden, ids, table=table, positions=positions)) is Tensor


def test_the_default_device_is_not_the_stages() -> None:
    hidden, ids, table = make_inputs()
    scaled = make_layer(embedding_scale=1.7, round_embedding_scale=True)
    masked, positions = make_layer(mask_position_zero=True), torch.arange(T)
    with torch.device("meta"):
        assert scaled(hidden, ids, table=table).device.type == "cpu"
        assert masked(hidden, embeds=hidden, positions=positions).device.type == "cpu"
