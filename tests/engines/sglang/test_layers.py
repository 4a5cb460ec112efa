"""SGLang's own classes with and without the hooks, on one simulated rank and without an engine."""

import dataclasses
import importlib
import logging
import socket
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from unittest.mock import MagicMock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("sglang")

import eagle_kernels as ek
from accuracy import outliers, relative_rms
from backends import environment_of
from eagle_kernels.engines import eligibility
from eagle_kernels.engines.sglang import capture, context, layer0, mtp, projection, scales, vocab
from eagle_kernels.engines.sglang.hooks import Hook
from eagle_kernels.engines.sglang.normed_linear import NormedLinear
from eagle_kernels.ops.sources import Sources, formula
from engines.quantized_layers import streamed, written
from engines.sglang import checkpoints

T, K, Ht, Hd, V = 7, 3, 96, 160, 100
BF16 = torch.bfloat16


@pytest.fixture(scope="module", autouse=True)
def hooked_sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The published config and one-rank group that a scheduler has, with every plugin loaded. The ops also run where
    they are slower, as at these widths."""
    from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    model = checkpoints.llama_target(tmp_path_factory.mktemp("model"), 128, BF16)
    arguments = {"device": "cpu", "dtype": "bfloat16", "load_format": "dummy", "skip_tokenizer_init": True}
    publish(ServerArgs(model_path=model, **arguments), role="scheduler", ranks=SpawnRanks(world_rank=0))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    init_distributed_environment(world_size=1, rank=0, local_rank=0, backend="gloo", distributed_init_method=address)
    initialize_model_parallel(backend="gloo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EAGLE_KERNELS_SGLANG", "force")
        load_plugins()
    before = torch.get_default_dtype()
    torch.set_default_dtype(BF16)
    with torch.inference_mode():
        yield
    torch.set_default_dtype(before)


@pytest.fixture(scope="module", autouse=True)
def model_of_gpus(hooked_sglang: None) -> None:
    """Inkling's module, imported with stand-ins for what it imports from CUTLASS."""
    cute = "sglang.kernels.ops.attention.flash_attn.cute"
    absent = ["cutlass", "cutlass.cute", cute, f"{cute}.batch_invariance", f"{cute}.seqlen_info"]
    with pytest.MonkeyPatch.context() as patched:
        for name in absent:
            patched.setitem(sys.modules, name, MagicMock())
        importlib.import_module("sglang.srt.models.inkling")


def on_rank(tp_rank: int, tp_size: int) -> object:
    """Build layers as that rank of a larger group; nothing communicates."""
    from sglang.srt.runtime_context import get_parallel

    def group() -> object:
        return types.SimpleNamespace(rank_in_group=tp_rank, world_size=tp_size)

    ranks = {f"{name}_rank": tp_rank for name in ("tp", "attn_tp", "moe_tp")}
    sizes = {f"{name}_size": tp_size for name in ("tp", "attn_tp", "moe_tp")}
    return get_parallel().override(**ranks, **sizes, tp_group=group(), attn_tp_group=group(), moe_tp_group=group())


def hooks() -> list:
    from eagle_kernels.engines import sglang

    return [
        pytest.param(part, hook, id=hook.target.where.rpartition(":")[2])
        for part in sglang.PARTS
        for hook in importlib.import_module(f"eagle_kernels.engines.sglang.{part}").HOOKS
    ]


@pytest.mark.parametrize(("part", "hook"), hooks())
def test_every_target_is_what_was_recorded(part: str, hook: Hook) -> None:
    from eagle_kernels.engines.sglang.hooks import _parts

    value: object = importlib.import_module(hook.target.module)
    for name in hook.target.where.partition(":")[2].split("."):
        value = getattr(value, name)
    assert _parts[part].on
    if hook.kind == "ADD":
        assert value is hook.function
    elif hook.kind == "REPLACE":
        assert value.__name__ == "PackedAuxHiddenStates"
    elif hook.kind != "KEEP":
        assert value.__wrapped__ is not None


def test_loading_the_plugin_imports_nothing_of_sglang() -> None:
    """When the registry imported what it hooks, every process took 2,260 modules and 3.8 s of CPU."""
    script = """
import sys
from sglang.srt.plugins import load_plugins
before = set(sys.modules)
load_plugins()
print(*sorted(set(sys.modules) - before))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    imported = done.stdout.split()
    assert "eagle_kernels.engines.sglang.hooks" in imported
    assert {name for name in imported if name.partition(".")[0] not in ("eagle_kernels", "probe")} == set()


def randomized(module: nn.Module) -> nn.Module:
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, dtype=torch.float32)
        parameter.data = (1 + noise / 8 if parameter.dim() == 1 else noise / parameter.shape[-1] ** 0.5).to(BF16)
        assert parameter.is_contiguous(), name
    return module


class Identity(nn.Module):
    """Replaces a decoder layer: returns the input stage's output."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()

    def forward(self, positions: Tensor, embeds: Tensor, hidden: Tensor, *args: object) -> tuple[Tensor, Tensor]:
        return hidden, torch.zeros_like(hidden)


def drafter_config(**changes: object) -> object:
    from transformers import LlamaConfig

    fields = {
        "hidden_size": Hd,
        "target_hidden_size": Ht,
        "num_hidden_layers": 1,
        "vocab_size": V,
        "rms_norm_eps": 1e-5,
    }
    fields |= {"num_attention_heads": 2, "intermediate_size": 64, "fc_norm": False, "norm_before_fc": False}
    return LlamaConfig(**fields | changes)


def batch(hidden: Tensor, mode: str = "EXTEND") -> object:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    return types.SimpleNamespace(
        spec_info=types.SimpleNamespace(hidden_states=hidden),
        forward_mode=ForwardMode[mode],
        mm_input_embeds=None,
        contains_mm_inputs=lambda: False,
        residual_stream=None,
        aux_hidden_states_buffer=None,
    )


def llama_drafter(monkeypatch: pytest.MonkeyPatch, **changes: object) -> nn.Module:
    from sglang.srt.models import llama_eagle3

    monkeypatch.setattr(llama_eagle3, "LlamaDecoderLayer", Identity)
    return randomized(llama_eagle3.LlamaModel(drafter_config(**changes)))


def projected(forward: Callable, model: nn.Module, hidden: Tensor, mode: str = "EXTEND") -> Tensor:
    """What the layers after the input stage get."""
    model.norm = Behind()
    rows = torch.arange(hidden.shape[0])
    return forward(model, rows, rows, batch(hidden, mode))[0]


class Behind(nn.Module):
    def forward(self, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return hidden, residual


def float64_projection(model: nn.Module, hidden: Tensor) -> Tensor:
    x = hidden.double()
    for norms in ([model.input_norm] if model.input_norm is not None else [], list(model.fc_norm or [])):
        if norms:
            gains, eps = [norm.weight for norm in norms], [norm.variance_epsilon for norm in norms]
            x = formula(Sources([x], len(norms), "chunk", gains, eps, 0.0, [], [], None), torch.float64)
    return F.linear(x, model.fc.weight.double(), None if model.fc.bias is None else model.fc.bias.double())


NORMS = [
    pytest.param({}, id="none"),
    pytest.param({"fc_norm": True}, id="chunk"),
    pytest.param({"norm_before_fc": True}, id="concat"),
    pytest.param({"fc_norm": True, "norm_before_fc": True}, id="both"),
    pytest.param({"fc_norm": True, "bias": True}, id="chunk-bias"),
]


@pytest.mark.parametrize("norms", NORMS)
def test_llama_drafter(monkeypatch: pytest.MonkeyPatch, norms: dict) -> None:
    model = llama_drafter(monkeypatch, **norms)
    hooked, original = type(model).forward, type(model).forward.__wrapped__
    hidden = outliers(T, K * Ht, BF16, torch.Generator().manual_seed(1))
    expected, result = projected(original, model, hidden), projected(hooked, model, hidden)
    truth = float64_projection(model, hidden)
    assert relative_rms(result, truth) <= 1.05 * relative_rms(expected, truth)
    with environment_of(EAGLE_KERNELS_BACKEND="reference"):
        assert torch.equal(projected(hooked, model, hidden), expected)
    # Weights are read in every call: an update in place (RL) takes effect at once.
    for parameter in model.fc.parameters():
        parameter.data.mul_(-2)
    assert torch.equal(projected(hooked, model, hidden), -2 * result)


@pytest.mark.parametrize(("mode", "projects"), [("EXTEND", True), ("DRAFT_EXTEND_V2", True), ("DECODE", False)])
def test_llama_drafter_as_wide_as_its_sources(monkeypatch: pytest.MonkeyPatch, mode: str, projects: bool) -> None:
    """K*Ht == Hd: the states of the target are projected, those of the drafter's previous step are not."""
    model = llama_drafter(monkeypatch, hidden_size=K * Ht, fc_norm=True)
    hidden = torch.randn(T, K * Ht)
    result = projected(type(model).forward, model, hidden, mode)
    assert torch.equal(projected(type(model).forward.__wrapped__, model, hidden, mode), hidden)  # SGLang's own
    if projects:
        assert relative_rms(result, float64_projection(model, hidden)) < 0.01
    else:
        assert torch.equal(result, hidden)


def load_weights_of(model: nn.Module, weights: dict[str, Tensor], *, is_drafter: bool) -> None:
    """Loads weights as SGLang's model runner does, from a loader that reuses their memory."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    runner = types.SimpleNamespace(is_draft_worker=is_drafter)

    def load_model(runner: object) -> None:
        DefaultModelLoader.load_weights_only(model, streamed(weights), torch.device("cpu"))

    scales._load_model(load_model, runner)


@pytest.mark.parametrize("is_drafter", [True, False])
def test_a_dflash_drafter_whose_layers_are_all_quantized(is_drafter: bool) -> None:
    """Its layers are built without a quantization config here; its fc always is (sglang#39087). A target's weights are
    left alone."""
    from sglang.srt.models.dflash import DFlashDraftModel

    config = drafter_config(hidden_size=Ht, num_hidden_layers=1, block_size=4, head_dim=Ht // 2)
    config.dflash_config = {"target_layer_ids": [0, 1, 2], "mask_token_id": 0}
    model = DFlashDraftModel(config)
    shapes = {"fc": (Ht, K * Ht), "layers.0.mlp.down_proj": (Ht, config.intermediate_size)}
    shapes |= {f"layers.0.self_attn.{name}_proj": (Ht, Ht) for name in "qkv"}
    weights, expected = {}, {}
    for name, shape in shapes.items():
        tensors, quantized = written(name, torch.randn(shape, dtype=torch.float32), "compressed-row")
        weights |= tensors
        expected[name] = quantized.dequantize(BF16) if is_drafter else quantized.codes.to(BF16)
    load_weights_of(model, weights, is_drafter=is_drafter)
    assert torch.equal(model.fc.weight, expected["fc"])
    assert torch.equal(model.layers[0].mlp.down_proj.weight, expected["layers.0.mlp.down_proj"])
    qkv = torch.cat([expected[f"layers.0.self_attn.{name}_proj"] for name in "qkv"])
    assert torch.equal(model.layers[0].self_attn.qkv_proj.weight, qkv)


def test_llama_drafter_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama_drafter(monkeypatch, fc_norm=True)
    assert projected(type(model).forward, model, torch.randn(0, K * Ht), "IDLE").shape == (0, Hd)


def test_llama_drafter_without_aux_states(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"hidden_size": Ht, "eagle_config": {"use_aux_hidden_state": False}, "num_aux_hidden_states": 1}
    model = llama_drafter(monkeypatch, **config)
    hidden = torch.randn(T, Ht)
    assert torch.equal(projected(type(model).forward, model, hidden), hidden)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_kimi_drafter(monkeypatch: pytest.MonkeyPatch, tp_size: int) -> None:
    """fc has this rank's output columns, which SGLang gathers."""
    from sglang.srt.models import kimi_k25_eagle3

    monkeypatch.setattr(kimi_k25_eagle3, "Eagle3MLADecoderLayer", Identity)
    with on_rank(tp_size - 1, tp_size):
        model = randomized(kimi_k25_eagle3.Eagle3MLAModel(drafter_config(fc_norm=True)))
    gathered = []
    model._fc_gatherer = lambda x: (gathered.append(x), torch.cat([x] * tp_size, -1))[1]
    assert model.fc.weight.shape == (Hd // tp_size, K * Ht)
    hidden = torch.randn(T, K * Ht)
    hooked, original = type(model).forward, type(model).forward.__wrapped__
    projection._prepare(model)
    with environment_of(EAGLE_KERNELS_BACKEND="reference"):
        assert torch.equal(projected(hooked, model, hidden), projected(original, model, hidden))
    assert len(gathered) == 2 and torch.equal(*gathered)


def step3p5_predictor() -> nn.Module:
    from sglang.srt.models import step3p5_mtp

    sizes = {"hidden_size": Ht, "rms_norm_eps": 1e-5, "vocab_size": V}
    config = types.SimpleNamespace(**sizes, num_hidden_layers=45, num_nextn_predict_layers=3)
    predictor = randomized(step3p5_mtp.Step3p5AMultiTokenPredictor(config, prefix="model"))
    for norm in (predictor.enorm, predictor.hnorm, predictor.shared_head.norm):
        norm.weight.data.sub_(1)
        norm.refresh_gemma_weight()
    mtp.prepare(predictor)
    return predictor


class HalfBlock(nn.Module):
    """Replaces the decoder layer."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()

    def forward(self, positions: Tensor, hidden_states: Tensor, forward_batch: object) -> Tensor:
        return hidden_states * 0.5


def chain(predictors: list[nn.Module], ids: Tensor, hidden: Tensor) -> list[Tensor]:
    """As in multi_layer_eagle_worker_v2: a layer's states before its norm are the next layer's input."""
    outputs = []
    for predictor in predictors:
        normed, hidden = predictor(ids, ids, batch(hidden))
        outputs += [normed, hidden]
    return outputs


def unfused(predictor: nn.Module) -> None:
    for name in ("enorm", "hnorm", "eh_proj"):
        del getattr(predictor, name).__dict__["forward"]


def test_step3p5_chain_is_bit_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """In plain torch the fused stage rounds where SGLang's modules do; the test below judges the kernels by float64."""
    from sglang.srt.models import step3p5_mtp

    monkeypatch.setattr(step3p5_mtp, "Step3p5DecoderLayer", HalfBlock)
    predictors = [step3p5_predictor() for _ in range(3)]
    assert all(isinstance(predictor.eh_proj.forward.__self__, NormedLinear) for predictor in predictors)
    ids, hidden = torch.randint(V, (T,)), outliers(T, Ht, BF16, torch.Generator().manual_seed(1))
    with environment_of(EAGLE_KERNELS_BACKEND="reference"):
        fused = chain(predictors, ids, hidden)
    kernels = chain(predictors, ids, hidden)
    for predictor in predictors:
        unfused(predictor)
    own = chain(predictors, ids, hidden)
    assert all(map(torch.equal, fused, own))
    # The kernels sum in another order: most outputs of the chain are within one rounding step of SGLang's.
    for result, expected in zip(kernels, own, strict=True):
        assert relative_rms(result, expected.double()) < 2.0**-7


def test_step3p5_stage_is_as_accurate_as_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.models import step3p5_mtp

    monkeypatch.setattr(step3p5_mtp, "Step3p5DecoderLayer", HalfBlock)
    predictor = step3p5_predictor()
    ids, hidden = torch.randint(V, (64,)), outliers(64, Ht, BF16, torch.Generator().manual_seed(1))
    chunks = [predictor.embed_tokens(ids), hidden]
    gains, eps = [predictor.enorm.weight, predictor.hnorm.weight], [1e-5, 1e-5]
    sources = Sources([chunk.double() for chunk in chunks], 2, "chunk", gains, eps, 1.0, [], [], None)
    x = formula(sources, torch.float64)
    truth = 0.5 * F.linear(x, predictor.eh_proj.weight.double())
    _, fused = predictor(ids, ids, batch(hidden))
    unfused(predictor)
    _, own = predictor(ids, ids, batch(hidden))
    assert relative_rms(fused, truth) <= 1.05 * relative_rms(own, truth)


def test_step3p5_projection_wrapped_after_the_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapper (LoRA) reads the concatenation itself, so the norms must run again."""
    from sglang.srt.models import step3p5_mtp

    class Wrapper(nn.Module):
        def __init__(self, base_layer: nn.Linear) -> None:
            super().__init__()
            self.base_layer = base_layer

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.base_layer.weight)

    monkeypatch.setattr(step3p5_mtp, "Step3p5DecoderLayer", HalfBlock)
    predictor = step3p5_predictor()
    ids, hidden = torch.randint(V, (T,)), torch.randn(T, Ht)
    predictor.eh_proj = Wrapper(predictor.eh_proj)
    wrapped = predictor(ids, ids, batch(hidden))
    predictor.eh_proj = predictor.eh_proj.base_layer
    unfused(predictor)
    assert all(map(torch.equal, wrapped, predictor(ids, ids, batch(hidden))))


@pytest.mark.parametrize("mode", ["EXTEND", "IDLE"])
def test_qwen3_next_stage(mode: str) -> None:
    from sglang.srt.layers.layernorm import GemmaRMSNorm
    from sglang.srt.models.qwen3_next_mtp import Qwen3NextForCausalLMMTP

    class Decoder(nn.Module):
        def forward(self, input_ids: Tensor, positions: Tensor, forward_batch: object, hidden: Tensor) -> Tensor:
            return hidden

    predictor = Qwen3NextForCausalLMMTP.__new__(Qwen3NextForCausalLMMTP)
    nn.Module.__init__(predictor)
    predictor.fc = nn.Linear(2 * Ht, Ht, bias=False)
    predictor.pre_fc_norm_embedding, predictor.pre_fc_norm_hidden = GemmaRMSNorm(Ht, 1e-6), GemmaRMSNorm(Ht, 1e-6)
    randomized(predictor)
    predictor.model, predictor.lm_head, predictor.quant_config = Decoder(), None, None
    predictor.logits_processor = lambda input_ids, hidden, *_: hidden
    rows = 0 if mode == "IDLE" else T
    embeds, hidden, ids = torch.randn(rows, Ht), torch.randn(rows, Ht), torch.arange(rows)
    expected = predictor(ids, ids, batch(hidden, mode), embeds)
    mtp.prepare(predictor)
    assert isinstance(predictor.fc.forward.__self__, NormedLinear)
    with environment_of(EAGLE_KERNELS_BACKEND="reference"):
        assert torch.equal(predictor(ids, ids, batch(hidden, mode), embeds), expected)


class Stop(Exception):
    pass


def seen_behind(linear: nn.Module, run: Callable[[], object]) -> Tensor:
    """The output of a linear layer in a forward, which is stopped there."""
    seen: list[Tensor] = []

    def keep(module: nn.Module, args: tuple, output: Tensor | tuple) -> None:
        seen.append(output[0] if isinstance(output, tuple) else output)
        raise Stop

    hook = linear.register_forward_hook(keep)
    with pytest.raises(Stop):
        run()
    hook.remove()
    return seen[0]


S = 4  # residual streams


def predictor_of(row: mtp.Predictor, gemma: bool) -> nn.Module:
    """A hooked class with the modules of its rows and what else SGLang's method reads before it projects."""
    from sglang.srt.layers.layernorm import GemmaRMSNorm, RMSNorm
    from sglang.srt.layers.linear import ColumnParallelLinear, ReplicatedLinear

    owner, _, _ = row.target.where.partition(":")[2].rpartition(".")
    predictor_class = getattr(importlib.import_module(row.target.module), owner)
    predictor = predictor_class.__new__(predictor_class)
    nn.Module.__init__(predictor)
    if row.within:  # heads.0
        predictor.heads = nn.ModuleList([nn.Module()])
    has_modules = predictor.get_submodule(row.within)
    norm_class = row.norm_class() or (GemmaRMSNorm if gemma else RMSNorm)
    streams = any(name in row.where for name in ("deepseek_v4", "qwen4"))
    for other in (other for other in mtp.PREDICTORS if (other.where, other.method) == (row.where, row.method)):
        for norm, eps in zip(other.norms, (1e-6, 1e-2), strict=False):
            has_modules.add_module(norm, norm_class(Ht, eps))
        width = len(other.norms) * Ht
        if any(name in row.where for name in ("longcat", "bailing", "dots3", "deepseek_v4")):
            linear: nn.Module = ReplicatedLinear(width, Ht, bias=False)
        elif "nemotron" in row.where:
            linear = ColumnParallelLinear(width, Ht, bias=False, gather_output=True)
        else:
            linear = nn.Linear(width, Ht, bias=other.projection == "mtp_linear_proj")
        has_modules.add_module(other.projection, linear)
    if "qwen4" in row.where and of_streams(row):
        predictor.pre_fc_norm_hidden, predictor.fc_hidden = nn.Identity(), nn.Linear(Ht, Ht, bias=False)
    randomized(predictor)
    for module in predictor.modules():
        if isinstance(module, GemmaRMSNorm):
            module.refresh_gemma_weight()
    fields = {"hc_mult": S, "hc_count": S, "hidden_size": Ht} if streams else {}
    fields |= {"rot_weight": None, "quant_config": None, "has_start_projections": True}
    predictor.__dict__.update(fields, config=types.SimpleNamespace(hidden_size=Ht))
    return predictor


def run(predictor: nn.Module, row: mtp.Predictor, embeds: Tensor, hidden: Tensor) -> None:
    """Calls SGLang's method with the kind of batch that it gets."""
    rows, method = torch.arange(T), getattr(predictor, row.method)
    forward_batch = batch(hidden)
    forward_batch.can_run_tbo = False
    if row.method != "forward":
        method(embeds.clone(), hidden)
    elif "qwen3_5" in row.where:
        forward_batch.mm_input_embeds = embeds.clone()
        method(rows, rows, forward_batch)
    elif "inkling" in row.where:
        predictor.embed_tokens, predictor.main_model_embed_norm = lambda ids: embeds.clone(), None
        method(rows, rows, forward_batch)
    elif "iquest" in row.where:
        method(rows, hidden, embeds.clone(), forward_batch)
    elif "nemotron" in row.where:
        method(inputs_embeds=embeds.clone(), hidden_states=hidden, forward_batch=forward_batch)
    else:
        method(rows, rows, forward_batch, embeds.clone())


HIDDEN_FIRST = ("mimo_mtp", "inkling")
MASKS = ("mimo_mtp", "ernie4")


def of_streams(row: mtp.Predictor) -> bool:
    return len(row.norms) == 1


@pytest.mark.parametrize(
    ("row", "gemma"),
    [
        pytest.param(row, gemma, id=f"{row.where.partition(':')[2]}-{row.projection}-{'1+w' if gemma else 'w'}")
        for row in mtp.PREDICTORS
        for gemma in (False, True)
        if row.norm is None or not gemma
    ],
)
def test_mtp_input_stage(row: mtp.Predictor, gemma: bool) -> None:
    """Every hooked class in SGLang's own forward, with both kinds of gains."""
    predictor = predictor_of(row, gemma)
    owner = predictor.get_submodule(row.within)
    embeds, hidden = torch.randn(T, Ht), torch.randn(T, S * Ht if of_streams(row) else Ht)
    linear = getattr(owner, row.projection)

    def projected() -> Tensor:
        return seen_behind(linear, lambda: run(predictor, row, embeds, hidden))

    own = projected()
    mtp.prepare(predictor)
    assert isinstance(linear.forward.__self__, NormedLinear)
    masked = embeds.clone()
    if row.where.startswith(MASKS):
        masked[0] = 0
    chunks = [hidden, masked] if row.where.startswith(HIDDEN_FIRST) else [masked, hidden]
    if of_streams(row):
        chunks = [hidden.view(-1, Ht) if row.norms == ("hnorm",) else embeds]
    norms = [getattr(owner, norm) for norm in row.norms]
    gains, eps = [norm.weight for norm in norms], [norm.variance_epsilon for norm in norms]
    sources = Sources(chunks, len(chunks), "chunk", gains, eps, float(gemma), [], [], None)
    bias = getattr(linear, "bias", None)
    truth = F.linear(formula(sources, torch.float64), linear.weight.double(), None if bias is None else bias.double())
    assert relative_rms(projected(), truth) <= 1.05 * relative_rms(own, truth) < 0.02


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=["bf16", "fp32"])
def test_iquest_q1_rounds_behind_its_norms(dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    """fp32 hidden states stay with SGLang, whose norm takes them unrounded."""
    (row,) = [row for row in mtp.PREDICTORS if row.norm is not None]
    predictor, embeds, hidden = predictor_of(row, False), torch.randn(T, Ht), torch.randn(T, Ht, dtype=dtype)

    def projected() -> Tensor:
        return seen_behind(predictor.eh_proj, lambda: run(predictor, row, embeds, hidden))

    own = projected()
    mtp.prepare(predictor)
    assert isinstance(predictor.eh_proj.forward.__self__, NormedLinear)
    assert torch.equal(projected(), own) if dtype is torch.float32 else relative_rms(projected(), own) < 0.01
    assert ("norm_concat_linear failed" in caplog.text) == (dtype is torch.float32)


def test_inkling_norms_its_embedding_twice() -> None:
    """The target's norm, which comes first, runs by itself."""
    from sglang.srt.layers.layernorm import RMSNorm

    (row,) = [row for row in mtp.PREDICTORS if row.where.startswith("inkling")]
    predictor, embeds, hidden = predictor_of(row, False), torch.randn(T, Ht), torch.randn(T, Ht)
    norm = randomized(RMSNorm(Ht, 1e-2))

    def projected() -> Tensor:
        predictor.__dict__.update(embed_tokens=lambda ids: embeds, main_model_embed_norm=norm)
        rows = torch.arange(T)
        return seen_behind(predictor.input_proj, lambda: predictor(rows, rows, batch(hidden)))

    own = projected()
    mtp.prepare(predictor)
    norms = [predictor.hidden_norm, predictor.embed_norm]
    gains, eps = [one.weight for one in norms], [one.variance_epsilon for one in norms]
    sources = Sources([hidden, norm(embeds)], 2, "chunk", gains, eps, 0.0, [], [], None)
    truth = F.linear(formula(sources, torch.float64), predictor.input_proj.weight.double())
    assert relative_rms(projected(), truth) <= 1.05 * relative_rms(own, truth) < 0.02


def test_fewer_states_than_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured prefill of Qwen 3.5 pads the normed states with zeros."""
    (row,) = [row for row in mtp.PREDICTORS if "qwen3_5" in row.where]
    predictor = predictor_of(row, True)
    embeds, hidden = torch.randn(T, Ht), torch.randn(T - 2, Ht)

    def projected() -> Tensor:
        return seen_behind(predictor.fc, lambda: run(predictor, row, embeds, hidden))

    own = projected()
    mtp.prepare(predictor)
    decided = predictor.fc.forward.__self__
    with environment_of(EAGLE_KERNELS_BACKEND="reference"):
        assert torch.equal(projected(), own)
    # The first norm decides for both: at its T rows the op does not run, at the T - 2 of the second it would.
    monkeypatch.setattr(decided, "decision", types.SimpleNamespace(runs_op=lambda rows: rows < T))
    monkeypatch.setattr(decided, "projection", None)
    assert torch.equal(projected(), own)


def test_an_mtp_row_with_another_body_stays_by_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = [row for row in mtp.PREDICTORS if row.where.startswith(("glm4_moe_nextn", "glm_ocr"))]
    monkeypatch.setattr(mtp, "PREDICTORS", (dataclasses.replace(first, body="another"), second))
    predictors = [predictor_of(row, False) for row in (first, second)]
    for predictor in predictors:
        mtp.prepare(predictor)
    assert ["forward" in predictor.eh_proj.__dict__ for predictor in predictors] == [False, True]
    (warning,) = [line for line in map(str, caplog.messages) if "stays with SGLang" in line]
    assert "Glm4MoeModelNextN.eh_proj stays with SGLang: " in warning and "has another body" in warning


def test_an_mtp_projection_that_sglang_holds_in_fp8_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSeek-V4's, as SGLang keeps it on sm_90: the op reads SGLang's codes. On a CPU SGLang needs AMX for them."""
    from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod

    (row,) = [row for row in mtp.PREDICTORS if row.projection == "h_proj"]
    predictor, method = predictor_of(row, False), Fp8LinearMethod.__new__(Fp8LinearMethod)
    linear = predictor.h_proj
    quantized = ek.quantize(linear.weight.data, "fp8_block128")
    exact = quantized.dequantize(torch.float64)
    method.weight_block_size = [128, 128]
    monkeypatch.setattr(Fp8LinearMethod, "apply", lambda self, layer, x, bias=None: F.linear(x, exact.to(x)))
    linear.quant_method = method
    linear.weight = nn.Parameter(quantized.codes, requires_grad=False)
    linear.weight_scale_inv = nn.Parameter(quantized.scales, requires_grad=False)
    mtp.prepare(predictor)
    assert isinstance(linear.forward.__self__, NormedLinear)
    assert linear.forward.__self__.projection.kind == "K=1, chunk norm, fp8_block128"
    embeds, hidden = torch.randn(T, Ht), torch.randn(T, S * Ht)
    projected = seen_behind(linear, lambda: run(predictor, row, embeds, hidden))
    gains, eps = [predictor.hnorm.weight], [predictor.hnorm.variance_epsilon]
    normed = formula(Sources([hidden.view(-1, Ht)], 1, "chunk", gains, eps, 0.0, [], [], None), torch.float64)
    assert relative_rms(projected, normed @ exact.t()) < 0.005  # bf16


def test_a_quantized_mtp_projection_stays_with_sglang(caplog: pytest.LogCaptureFixture) -> None:
    """If its layout is one that the op does not read."""
    (row,) = [row for row in mtp.PREDICTORS if row.projection == "h_proj"]
    predictor = predictor_of(row, False)
    predictor.h_proj.quant_method = types.SimpleNamespace()
    with caplog.at_level("INFO"):
        mtp.prepare(predictor)
    assert "forward" not in predictor.h_proj.__dict__ and "forward" in predictor.e_proj.__dict__
    assert "DeepseekV4ModelNextN.h_proj stays with SGLang: its quant_method is SimpleNamespace" in caplog.text


def test_a_projection_that_ranks_share_stays_with_sglang(caplog: pytest.LogCaptureFixture) -> None:
    """Nemotron-H gathers the ranks' columns."""
    row = next(row for row in mtp.PREDICTORS if "nemotron" in row.where)
    with on_rank(1, 2):
        predictor = predictor_of(row, False)
    with caplog.at_level("INFO"):
        mtp.prepare(predictor)
    assert "forward" not in predictor.eh_proj.__dict__
    assert f"eh_proj stays with SGLang: its weight is a shard or a repacked copy: {(Ht // 2, 2 * Ht)}" in caplog.text


def test_layer_0_with_latent_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's forward of the layer, and the part of its attention that reads the projection."""
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.linear import ReplicatedLinear
    from sglang.srt.models import kimi_k25_eagle3
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA

    given = types.SimpleNamespace(set_attn_inputs=lambda inputs: None)
    monkeypatch.setattr(kimi_k25_eagle3, "get_attn_tp_context", lambda: given)
    layer_class, attention = kimi_k25_eagle3.Eagle3MLADecoderLayer, nn.Module.__new__(DeepseekV2AttentionMLA)
    layer = layer_class.__new__(layer_class)
    for module in (layer, attention):
        nn.Module.__init__(module)
    attention.q_lora_rank, attention.use_dsa, attention._use_min_latency_fused_a_gemm = 64, False, False
    attention.is_packed_weight = False
    attention.fused_qkv_a_proj_with_mqa = ReplicatedLinear(2 * Ht, 64 + 32 + 16, bias=False)
    attention.forward = lambda positions, hidden_states, forward_batch, zero_allocator: attention.prepare_qkv_latent(
        hidden_states, forward_batch
    )
    layer.self_attn, layer.input_layernorm, layer.hidden_norm = attention, RMSNorm(Ht, 1e-6), RMSNorm(Ht, 1e-2)
    randomized(layer)
    embeds, hidden, rows = torch.randn(T, Ht), torch.randn(T, Ht), torch.arange(T)
    linear = attention.fused_qkv_a_proj_with_mqa

    def projected() -> Tensor:
        return seen_behind(linear, lambda: layer(rows, embeds, hidden, batch(hidden), None))

    own = projected()
    layer0._prepare(layer)
    assert isinstance(linear.forward.__self__, NormedLinear)
    norms = [layer.input_layernorm, layer.hidden_norm]
    gains, eps = [norm.weight for norm in norms], [norm.variance_epsilon for norm in norms]
    normed = formula(Sources([embeds, hidden], 2, "chunk", gains, eps, 0.0, [], [], None), torch.float64)
    truth = F.linear(normed, linear.weight.double())
    assert relative_rms(projected(), truth) <= 1.05 * relative_rms(own, truth) < 0.02


def gemma(path: str, vocab_size: int, weight: nn.Parameter) -> object:
    """A target of this class, with an embedding table and nothing else."""
    module, _, name = path.partition(":")
    target = getattr(importlib.import_module(f"sglang.srt.models.{module}"), name)
    model = target.__new__(target)
    nn.Module.__init__(model)
    model._shared_vocab_tp_group = None
    model.pp_group = types.SimpleNamespace(world_size=1)
    model.config = types.SimpleNamespace(
        vocab_size=vocab_size, text_config=types.SimpleNamespace(vocab_size=vocab_size)
    )
    table = types.SimpleNamespace(weight=weight)
    model.__dict__["model"] = types.SimpleNamespace(embed_tokens=table)
    model.__dict__["language_model"] = types.SimpleNamespace(embed_tokens=table)
    model.__dict__["lm_head"] = table
    return model


TARGETS = [
    "gemma3_causal:Gemma3ForCausalLM",
    "gemma4_causal:Gemma4ForCausalLM",
    "gemma4_mm:Gemma4ForConditionalGeneration",
    "gemma4_unified:Gemma4UnifiedForConditionalGeneration",
]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("rows", "draft_rows", "tp_size"), [(100, 100, 2), (256, 256, 2), (100, 40, 4), (64, 70, 2)])
def test_a_gemma_table_is_cut_as_the_drafter_pads_it(target: str, rows: int, draft_rows: int, tp_size: int) -> None:
    """Every id of the drafter finds its row on one rank and zeros on the others."""
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    weight = nn.Parameter(torch.randn(rows, 8), requires_grad=False)
    model = gemma(target, rows, weight)
    ids, total = torch.arange(draft_rows), torch.zeros(draft_rows, 8)
    for tp_rank in range(tp_size):
        with on_rank(tp_rank, tp_size):
            embedding = VocabParallelEmbedding(draft_rows, 8)
        embed, head = model.get_embed_and_head_for_draft(embedding)
        assert embed.data_ptr() == head.data_ptr() and embed.shape == embedding.weight.shape
        shares = embed.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
        assert shares or rows != 256  # no copy where SGLang does not copy
        embedding.weight = nn.Parameter(embed, requires_grad=False)
        total += embedding._embed_local_shard(ids)
    expected = torch.zeros(draft_rows, 8)
    expected[:rows] = weight[:draft_rows]
    assert torch.equal(total, expected)


@pytest.mark.parametrize("name", ["ParallelLMHead", "VocabParallelEmbedding"])
def test_codes_of_a_padded_vocabulary_become_numbers(name: str) -> None:
    from sglang.srt.layers import vocab_parallel_embedding

    layer = getattr(vocab_parallel_embedding, name)(100, 64)
    tensors, weight = written("lm_head", torch.randn(100, 64), "compressed-row")
    ((_, numbers),) = scales._scaled(nn.ModuleDict({"lm_head": layer}), tensors.items())
    layer.weight_loader(layer.weight, numbers)
    assert torch.equal(layer.weight[:100], weight.dequantize(layer.weight.dtype))


def test_without_the_hook_ids_get_other_rows() -> None:
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from sglang.srt.models.gemma3_causal import Gemma3ForCausalLM

    model = gemma(TARGETS[0], 100, nn.Parameter(torch.randn(100, 8), requires_grad=False))
    with on_rank(1, 2):
        embedding = VocabParallelEmbedding(100, 8)
    own = Gemma3ForCausalLM._shard_weight.__wrapped__(model, model.lm_head.weight, draft_embedding=embedding)
    assert own.shape[0] == 50 and embedding.weight.shape[0] == 64
    assert torch.equal(own[64 - 50], model.lm_head.weight[64])  # and the drafter expects id 64 in row 0


def test_a_replicated_drafter_and_one_rank_get_the_table_itself() -> None:
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    weight = nn.Parameter(torch.randn(100, 8), requires_grad=False)
    model = gemma(TARGETS[0], 100, weight)
    for embedding in (nn.Embedding(100, 8), VocabParallelEmbedding(100, 8)):
        assert model.get_embed_and_head_for_draft(embedding)[0] is weight


@pytest.mark.parametrize("target", TARGETS)
def test_a_shard_that_fails_is_sglangs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, target: str
) -> None:
    """In a next version a name that the hook reads may be gone."""
    from sglang.srt.distributed import utils
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    weight = nn.Parameter(torch.randn(100, 8), requires_grad=False)
    model = gemma(target, 100, weight)
    eligibility.clear_logged()
    with on_rank(1, 2):
        embedding = VocabParallelEmbedding(100, 8)
        monkeypatch.delattr(utils, "get_group_rank_size")
        embed, _ = model.get_embed_and_head_for_draft(embedding)
    assert torch.equal(embed, weight if "gemma4_mm" in target or "unified" in target else weight[50:])
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "vocab stays with SGLang" in warning and "get_group_rank_size" in warning


def test_copies_follow_the_target_when_it_is_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    weight = nn.Parameter(torch.randn(100, 8), requires_grad=False)
    model = gemma(TARGETS[0], 100, weight)
    with on_rank(1, 2):
        embed, _ = model.get_embed_and_head_for_draft(VocabParallelEmbedding(100, 8))
    assert torch.equal(embed[:36], weight[64:])
    weight.data.mul_(3)
    model.load_weights([])
    assert torch.equal(embed[:36], weight[64:]) and not embed[36:].any()
    del embed
    vocab._refresh(None)


@pytest.fixture
def dflash_drafter(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], nn.Module]:
    """A drafter of one of SGLang's classes, loaded except for its layers."""
    from sglang.srt.models import dflash, lilicorr
    from transformers import Qwen3Config

    head = {"candidate_topk": 4, "hidden_size": 0, "num_layers": 1, "num_heads": 2, "mlp_ratio": 1.0}
    head |= {"factor_dim": 8, "vector_eps": 1e-6, "logit_scale": 1.0}

    def build(name: str) -> nn.Module:
        drafter_class = getattr(lilicorr if name == "LiLiCorrDraftModel" else dflash, name)
        monkeypatch.setattr(drafter_class, "decoder_layer_cls", Identity)
        config = Qwen3Config(hidden_size=Ht, num_hidden_layers=2, vocab_size=V, rms_norm_eps=1e-3)
        config.dflash_config = {"target_layer_ids": [0, 2, 5], "mask_token_id": 1}
        config.dflash_config |= {f"lilicorr_{field}": value for field, value in head.items()}
        drafter = randomized(drafter_class(config))
        context._prepare(drafter)
        return drafter

    return build


@pytest.mark.parametrize(
    "name",
    ["DFlashDraftModel", "DFlashLagunaForCausalLM", "MuseGlimmerAssistantModel", "LiLiCorrDraftModel"],
)
def test_dflash_context_is_as_accurate_as_sglang(dflash_drafter: Callable, name: str) -> None:
    drafter = dflash_drafter(name)
    assert isinstance(drafter.project_target_hidden, context.Context)
    hidden = outliers(64, K * Ht, BF16, torch.Generator().manual_seed(1))
    chunks = [chunk.double() for chunk in hidden.chunk(K, -1)]
    norms = list(getattr(drafter, "aux_hidden_norms", ()))
    kind = "chunk" if norms else "none"
    sources = Sources(chunks, K, kind, [norm.weight for norm in norms], [1e-3] * K, 0.0, [], [], None)
    projected = F.linear(formula(sources, torch.float64), drafter.fc.weight.double())
    truth = F.rms_norm(projected, (Ht,), drafter.hidden_norm.weight.double(), 1e-3)
    own = drafter.project_target_hidden.own(hidden)
    assert relative_rms(drafter.project_target_hidden(hidden), truth) <= 1.05 * relative_rms(own, truth)


def dspark_minimax(tp_size: int, gemma: bool) -> nn.Module:
    """A drafter of MiniMax-M3's class on rank 0, without its layers."""
    from sglang.srt.layers.layernorm import GemmaRMSNorm, RMSNorm
    from sglang.srt.layers.linear import ColumnParallelLinear
    from sglang.srt.models.dspark_minimax import DSparkMiniMaxDraftModel

    drafter = DSparkMiniMaxDraftModel.__new__(DSparkMiniMaxDraftModel)
    nn.Module.__init__(drafter)
    with on_rank(0, tp_size):
        drafter.fc = ColumnParallelLinear(K * Ht, Ht, bias=False, gather_output=False)
    drafter.hidden_norm, drafter.num_context_features = (GemmaRMSNorm if gemma else RMSNorm)(Ht, eps=1e-3), K
    randomized(drafter)
    if gemma:
        drafter.hidden_norm.weight.data.sub_(1)
        drafter.hidden_norm.gemma_weight.copy_(1 + drafter.hidden_norm.weight)
    drafter._fc_gatherer = lambda x: x
    return drafter


def dspark_deepseek_v4() -> nn.Module:
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.linear import ReplicatedLinear
    from sglang.srt.models.deepseek_v4_dspark import DeepseekV4ForCausalLMDSpark

    drafter = DeepseekV4ForCausalLMDSpark.__new__(DeepseekV4ForCausalLMDSpark)
    nn.Module.__init__(drafter)
    stage = nn.Module()
    stage.main_proj, stage.main_norm = ReplicatedLinear(K * Ht, Ht, bias=False), RMSNorm(Ht, eps=1e-3)
    drafter.stages, drafter.num_target_features = nn.ModuleList([stage, nn.Module()]), K
    return randomized(drafter)


@pytest.mark.parametrize("kind", ["minimax", "minimax-gemma", "deepseek-v4"])
def test_dspark_context_is_as_accurate_as_sglang(kind: str) -> None:
    drafter = dspark_deepseek_v4() if kind == "deepseek-v4" else dspark_minimax(1, kind.endswith("gemma"))
    context._prepare(drafter)
    project = drafter.project_target_hidden
    assert isinstance(project, context.Context)
    hidden = (0.05 * torch.randn(64, K * Ht)).to(BF16)  # small, so that eps matters
    fc, norm, _, _ = project.read(drafter)
    gain = norm.weight.double() + float(kind.endswith("gemma"))
    truth = F.rms_norm(F.linear(hidden.double(), fc.weight.double()), (Ht,), gain, 1e-3)
    own = project.own(hidden)
    assert relative_rms(project(hidden), truth) <= 1.05 * relative_rms(own, truth) < 0.02
    assert project.decision.always  # ours did not fall back to SGLang's own


def test_dspark_context_that_ranks_share_stays_with_sglang() -> None:
    drafter = dspark_minimax(2, False)
    assert drafter.fc.weight.shape[0] == Ht // 2
    context._prepare(drafter)
    assert "project_target_hidden" not in drafter.__dict__


def test_dflash_states_that_do_not_fit_are_sglangs_to_refuse(dflash_drafter: Callable) -> None:
    drafter = dflash_drafter("DFlashDraftModel")
    with pytest.raises(ValueError, match="DFLASH target_hidden feature dim mismatch"):
        drafter.project_target_hidden(torch.randn(T, Ht))
    drafter.fc = nn.Linear(K * Ht, Ht, bias=False)  # replaced after loading, as by a wrapper
    expected = drafter.hidden_norm(drafter.fc(hidden := torch.randn(T, K * Ht)))
    assert torch.equal(drafter.project_target_hidden(hidden), expected)


class Watched(nn.Module):
    """A target whose layers capture as SGLang's do: a list per forward, packed after it."""

    def __init__(self, boundaries: list[int], packer: bool) -> None:
        super().__init__()
        self.layers_to_capture, self.packer = boundaries, packer
        self.config = types.SimpleNamespace(hidden_size=Ht)
        self.capture_aux_hidden_states = True

    def set_eagle3_layers_to_capture(self, layer_ids: list[int] | None) -> None:
        pass

    def forward(self, streams: list[Tensor], forward_batch: object) -> object:
        from sglang.srt.layers import aux_hidden_states as aux

        captured = aux.AuxHiddenStatePacker(len(streams)) if self.packer else aux.AuxHiddenStateList()
        for stream in streams:
            captured.capture(stream)
            stream.zero_()  # the next layer's in-place norm
        return captured.finalize() if self.packer else captured


def watched(boundaries: list[int], packer: bool = False) -> nn.Module:
    from sglang.srt.model_executor.model_runner_components.attention_backend_setup import (
        configure_aux_hidden_state_capture,
    )

    model = Watched(boundaries, packer)
    others = {"dflash_use_aux_hidden_state": False, "dflash_target_layer_ids": None, "is_dspark": False}
    configure_aux_hidden_state_capture(
        model=model, eagle_use_aux_hidden_state=True, eagle_aux_hidden_state_layer_ids=None, **others
    )
    return model


@pytest.mark.parametrize("packer", [False, True], ids=["list", "packer"])
@pytest.mark.parametrize("buffer_rows", [None, T, T + 1])
def test_captures_are_packed(buffer_rows: int | None, packer: bool) -> None:
    from sglang.srt.layers.aux_hidden_states import pack_aux_hidden_states

    model = watched([1, 4, 5], packer)
    streams = [torch.randn(T, Ht) for _ in range(K)]
    expected = torch.cat(streams, -1)
    forward_batch = batch(torch.empty(0))
    buffer = None if buffer_rows is None else torch.full((buffer_rows, K * Ht), torch.nan)
    forward_batch.aux_hidden_states_buffer = buffer
    packed = pack_aux_hidden_states(model([stream.clone() for stream in streams], forward_batch))
    assert torch.equal(packed, expected)
    assert (packed is buffer) == (buffer_rows == T)  # a decode graph's buffer; one of another size is left alone
    assert buffer_rows != T + 1 or buffer.isnan().all()
    assert capture.claim() is None


@pytest.mark.parametrize("captures", [2, 4])  # of 3
def test_another_number_of_captures_stays_a_list(captures: int) -> None:
    from sglang.srt.layers.aux_hidden_states import pack_aux_hidden_states

    model = watched([1, 4, 5])
    streams = [torch.randn(T, Ht) for _ in range(captures)]
    packed = pack_aux_hidden_states(model([stream.clone() for stream in streams], batch(torch.empty(0))))
    assert torch.equal(packed, torch.cat(streams, -1))


def test_a_capture_that_does_not_fit_its_slot_stays_a_list() -> None:
    from sglang.srt.layers.aux_hidden_states import pack_aux_hidden_states

    model = watched([1, 4, 5])
    streams = [torch.randn(T, Ht), torch.randn(Ht, T).t(), torch.randn(T, Ht)]  # the op needs contiguous rows
    expected = torch.cat(streams, -1)
    assert torch.equal(pack_aux_hidden_states(model(streams, batch(torch.empty(0)))), expected)


@pytest.mark.parametrize("calls", [0, 1])  # before one fails
def test_a_capture_that_fails_leaves_all_to_sglang(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, calls: int
) -> None:
    from sglang.srt.layers.aux_hidden_states import pack_aux_hidden_states

    called, op = [], capture.capture_hidden

    def fail(*args: object, **kwargs: object) -> Tensor:
        called.append(args)
        if len(called) > calls:
            raise RuntimeError("ours")
        return op(*args, **kwargs)

    monkeypatch.setattr(capture, "capture_hidden", fail)
    eligibility.clear_logged()
    model = watched([1, 4, 5])
    for _ in range(2):
        streams = [torch.randn(T, Ht) for _ in range(K)]
        packed = pack_aux_hidden_states(model([stream.clone() for stream in streams], batch(torch.empty(0))))
        assert torch.equal(packed, torch.cat(streams, -1))
    assert len(called) == calls + 1  # a failed op is not called again
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "capture stays with SGLang from now on" in warning and "ours" in warning


def test_a_list_outside_a_forward_is_sglangs() -> None:
    from sglang.srt.layers.aux_hidden_states import AuxHiddenStateList, pack_aux_hidden_states

    aux, stream = AuxHiddenStateList(), torch.randn(T, Ht)
    aux.capture(stream, owned=True)
    assert pack_aux_hidden_states(aux) is stream


def test_the_decode_graphs_get_a_static_buffer() -> None:
    from sglang.srt.model_executor.model_runner_components.misc_utils import resolve_aux_hidden_states_width
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    model, eagle3 = watched([1, 4, 5]), SpeculativeAlgorithm.from_string("EAGLE3")
    width = {"model": model, "spec_algorithm": eagle3, "is_draft_worker": False}
    assert resolve_aux_hidden_states_width(**width) == K * Ht
    assert resolve_aux_hidden_states_width(**width | {"is_draft_worker": True}) == 0
    assert resolve_aux_hidden_states_width(**width | {"model": nn.Linear(1, 1)}) == 0
