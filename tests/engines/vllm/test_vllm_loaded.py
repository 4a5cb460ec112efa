"""The plugin on drafters that vLLM's own loader has loaded from a checkpoint: registry, construction, weights, their
layout, and vLLM's methods on the result. No engine runs, so these also work without a GPU in vLLM 0.33, whose wheel has
no kernels for CPUs (`make test-vllm`)."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("vllm", reason="the real engine lives in the environment of `make test-vllm`")

from vllm import __version__ as VERSION
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
from vllm_checkpoints import (
    H,
    V,
    fp8_config,
    write_counting_deepseek,
    write_deepseek,
    write_drafter,
    write_latent_drafter,
    write_layer0_drafter,
    write_target,
)
from vllm_engine import ENVIRONMENT

import eagle_kernels.engines.vllm as plugin
from accuracy import relative_rms
from eagle_kernels.engines import decision, eligibility
from eagle_kernels.engines.gates import Target, body_hash, resolve
from eagle_kernels.engines.vllm import (
    LOGGER,
    combine,
    context,
    cpu_packing,
    embedding,
    layer0,
    mtp,
    normed_linear,
    speculator,
)
from eagle_kernels.ops.sources import Sources, formula

T, K = 6, 3
SPECULATORS = "vllm.v1.worker.gpu.spec_decode"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("loaded")
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{folder}/init", 0, "gloo")
        initialize_model_parallel(1, 1)
    yield write_target(folder / "target")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """The plugin's log lines, recorded here because vLLM sets its loggers up anew while it loads."""
    eligibility.clear_logged()
    decision.clear()
    lines: list[str] = []
    logged = LOGGER.log
    monkeypatch.setattr(
        LOGGER, "log", lambda level, text, line, **more: lines.append(line) or logged(level, text, line)
    )
    return lambda: lines


@pytest.fixture
def load(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., nn.Module]:
    """A drafter as vLLM loads it, with EAGLE_KERNELS_VLLM as given."""

    def load(switch: str, drafter: str | None, model: str = target, layer0: str = "0", **more: object) -> nn.Module:
        switches = {"EAGLE_KERNELS_VLLM": switch, "EAGLE_KERNELS_VLLM_LAYER0": layer0}
        for name, value in (ENVIRONMENT | switches).items():
            monkeypatch.setenv(name, value)
        speculative = {"num_speculative_tokens": 1, "method": "mtp" if drafter is None else "eagle3"}
        arguments = EngineArgs(
            model=model,
            speculative_config=speculative | ({} if drafter is None else {"model": drafter}),
            dtype="bfloat16",
            max_model_len=128,
            skip_tokenizer_init=True,
            enforce_eager=True,
            **more,
        )
        config = arguments.create_engine_config()
        plugin.register()
        # As in vLLM's CPU worker: on a CPU torch has no accelerator whose cache it could empty.
        monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
        with set_current_vllm_config(config):
            return get_model(vllm_config=config, model_config=config.speculative_config.draft_model_config)

    return load


def vllms_own(drafter: nn.Module, hidden: Tensor) -> Tensor:
    own = next(base for base in type(drafter).__mro__ if base.__module__.startswith("vllm."))
    return own.combine_hidden_states(drafter, hidden)


@pytest.mark.parametrize("norm", ["chunk", "concat", "none"])
@pytest.mark.parametrize("switch", ["force", "1"])
def test_a_loaded_drafter(load: Callable, log: Callable, tmp_path: Path, norm: str, switch: str) -> None:
    drafter = load(switch, write_drafter(tmp_path, K, norm))
    assert isinstance(drafter, combine.FusedCombine)
    hidden = torch.randn(T, K * H).bfloat16()
    with torch.inference_mode():
        ours, own = drafter.combine_hidden_states(hidden), vllms_own(drafter, hidden)
    assert relative_rms(ours, own.double()) < 0.01
    (line,) = [line for line in log() if "combine_hidden_states" in line]
    stage = drafter.eagle_kernels_stage()
    runs = f"runs {'norm_concat' if stage is None else stage.projection.op} (K=3, {norm} norm)"
    if norm == "none":
        assert "stays with vLLM: it has no norm" in line
    elif switch == "force":
        assert runs in line and "forced" in line
    else:
        assert (runs in line or "is not faster" in line) and "T=1 " in line
    # The layer keeps the dense weight where the op reads it at all row counts, else vLLM's own layout.
    fc = drafter.model.fc
    whole = stage is not None and stage.projection.has_norm and stage.projection.fc_unsupported is None
    assert cpu_packing.is_kept_dense(fc) <= whole and (fc.weight.numel() > 0 or not whole)


@pytest.mark.parametrize("norm_before_residual", [False, True])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLMEagle3", "Eagle3Qwen3ForCausalLM"])
def test_layer_0_of_a_loaded_drafter(
    load: Callable, log: Callable, tmp_path: Path, architecture: str, norm_before_residual: bool
) -> None:
    written = write_layer0_drafter(tmp_path, norm_before_residual=norm_before_residual, architecture=architecture)
    layer = load("force", written, layer0="1").model.layers[0]
    runs_as_vllms_own(layer, "qkv_proj", norm_before_residual, log)


@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_layer_0_with_latent_attention(
    load: Callable, log: Callable, tmp_path: Path, norm_before_residual: bool
) -> None:
    written = write_latent_drafter(tmp_path, norm_before_residual=norm_before_residual)
    layer = load("force", written, layer0="1", load_format="dummy").model.layers[0]
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randn_like(parameter))
    runs_as_vllms_own(layer, "fused_qkv_a_proj", norm_before_residual, log)


def test_layer_0_with_a_bias(load: Callable, log: Callable, tmp_path: Path) -> None:
    """Like gpt-oss's. Packing changes a bias in place, so on a CPU both layouts cannot exist side by side."""
    written = write_layer0_drafter(tmp_path, norm_before_residual=False, attention_bias=True)
    layer = load("force", written, layer0="1").model.layers[0]
    because = "its weight is packed for the engine's own CPU product"
    packed = layer.self_attn.qkv_proj.weight.numel() == 0
    if packed:
        assert f"LlamaDecoderLayer.qkv_proj stays with vLLM: {because}" in log()
    else:  # 0.33's wheel has no packing
        runs_as_vllms_own(layer, "qkv_proj", False, log)


def runs_as_vllms_own(
    layer: nn.Module, projection: str, norm_before_residual: bool, log: Callable, quantized: Tensor | None = None
) -> None:
    """Compares vLLM's forward of the layer, up to the tensor that its attention splits, and its residual with float64.

    quantized: the layer's dequantized weight.
    """
    linear, norms = getattr(layer.self_attn, projection), (layer.input_layernorm, layer.hidden_norm)
    assert isinstance(linear, normed_linear.NormedLinear)
    assert linear.bias is not None or quantized is not None or cpu_packing.is_kept_dense(linear)
    assert f"{type(layer).__name__}.{projection} runs norm_concat_linear; forced, not timed" in log()
    embeds, hidden = torch.randn(T, H).bfloat16(), 3 * torch.randn(T, H).bfloat16()
    seen: list[Tensor] = []
    linear.register_forward_hook(lambda module, args, output: seen.append(output[0]) or stop())
    layer.post_attention_layernorm.forward = lambda x, residual: seen.append(residual) or stop()
    with torch.inference_mode():
        with pytest.raises(Stop):
            layer(torch.arange(T), embeds, hidden, None)
        layer.self_attn.forward = lambda positions, hidden_states, **more: embeds
        with pytest.raises(Stop):
            layer(torch.arange(T), embeds, hidden, None)
    gains, eps = [norm.weight for norm in norms], [norm.variance_epsilon for norm in norms]
    normed = formula(Sources([embeds, hidden], 2, "chunk", gains, eps, 0.0, [], [], None), torch.float64)
    bias = 0 if linear.bias is None else linear.bias.double()
    weight = linear.weight.double() if quantized is None else quantized
    assert relative_rms(seen[0], normed @ weight.t() + bias) < 0.01
    assert relative_rms(seen[1], normed[:, H:] if norm_before_residual else hidden.double()) < 0.01


def test_the_logits_of_a_loaded_drafter_are_vllms(load: Callable, tmp_path: Path) -> None:
    """Its LogitsProcessor and lm_head, after states that went through the op."""
    drafter = load("force", write_drafter(tmp_path, K, "chunk"))
    hidden = drafter.combine_hidden_states(torch.randn(T, K * H).bfloat16())
    with torch.inference_mode():
        logits = drafter.compute_logits(hidden)
    assert torch.equal(logits[:, :V], hidden.roll(1, 1))  # lm_head: token t is followed by t + 1


def test_a_loaded_mtp_layer(load: Callable, log: Callable, tmp_path: Path) -> None:
    """vLLM's forward around the stage, up to the decoder layer, whose attention has no kernels here in 0.33."""
    predictor = load("force", None, write_deepseek(tmp_path), load_format="dummy")
    (layer,) = predictor.model.layers.values()
    assert isinstance(layer.eh_proj, normed_linear.NormedLinear)
    assert "DeepSeekMultiTokenPredictorLayer.eh_proj runs norm_concat_linear; forced, not timed" in log()
    for parameter in (layer.enorm.weight, layer.hnorm.weight, layer.eh_proj.weight):
        parameter.data.copy_(torch.randn_like(parameter))
    embeds, hidden = torch.randn(T, H).bfloat16(), torch.randn(T, H).bfloat16()
    seen: list[Tensor] = []
    layer.mtp_block.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["hidden_states"]) or stop(), with_kwargs=True
    )
    with torch.inference_mode(), pytest.raises(Stop):
        layer(None, torch.arange(1, T + 1), hidden, embeds)
    gains, eps = [layer.enorm.weight, layer.hnorm.weight], [layer.enorm.variance_epsilon] * 2
    normed = formula(Sources([embeds, hidden], 2, "chunk", gains, eps, 0.0, [], [], None), torch.float64)
    assert relative_rms(seen[0], normed @ layer.eh_proj.weight.double().t()) < 0.01


@pytest.mark.parametrize("layout", ["modelopt-fp8", "hf-block", "modelopt-nvfp4"])
def test_a_quantized_projection_is_loaded_with_its_scale(
    load: Callable, log: Callable, tmp_path: Path, layout: str
) -> None:
    """fc, which the config does not mention, and eh_proj, which is a plain nn.Linear."""
    dense = load("force", write_drafter(tmp_path / "dense", K, "none"))
    drafter = load("force", write_drafter(tmp_path / "quantized", K, "none", layout))
    hidden = torch.randn(T, K * H).bfloat16()
    with torch.inference_mode():
        ours, expected = drafter.combine_hidden_states(hidden), dense.combine_hidden_states(hidden)
    assert relative_rms(ours, expected.double()) < 0.01  # ones
    predictor = load("force", None, write_counting_deepseek(tmp_path / "deepseek", layout))
    (layer,) = predictor.model.layers.values()
    moved = torch.cat([torch.eye(H).roll(-1, 0), torch.zeros(H, H)], 1)
    assert relative_rms(layer.eh_proj.weight, moved.double()) < 1e-2
    names = [line.partition(" of ")[0] for line in log() if "the engine's layer has no scales" in line]
    assert names == ["fc", "eh_proj"]


@pytest.mark.parametrize("switch", ["force", "1"])
@pytest.mark.parametrize("norm", ["chunk", "none"])
def test_an_fc_that_vllm_holds_as_fp8(load: Callable, log: Callable, tmp_path: Path, switch: str, norm: str) -> None:
    """The op reads vLLM's codes, and keeps activations in 16 bits, which vLLM rounds to FP8."""
    quantization = {"quantization_config": fp8_config("fc")}
    drafter = load(switch, write_drafter(tmp_path, K, norm, "compressed-row", **quantization))
    fc, stage = drafter.model.fc, drafter.eagle_kernels_stage()
    assert fc.weight.dtype == torch.float8_e4m3fn
    hidden = torch.randn(T, K * H).bfloat16()
    with torch.inference_mode():
        ours, own = drafter.combine_hidden_states(hidden), vllms_own(drafter, hidden)
    (line,) = [line for line in log() if "combine_hidden_states" in line]
    assert f"runs norm_concat_linear (K=3, {'no' if norm == 'none' else norm} norm, fp8_row)" in line
    chunks, weight = list(hidden.chunk(K, -1)), fc.weight.double().t() * fc.weight_scale.double()
    if norm == "chunk":
        gains, eps = zip(*[(norm.weight, norm.variance_epsilon) for norm in drafter.model.fc_norm], strict=True)
        chunks = [formula(Sources(chunks, K, "chunk", list(gains), list(eps), 0.0, [], [], None), torch.float64)]
    exact = torch.cat(chunks, -1).double() @ weight.t()
    assert relative_rms(own, exact) < 0.05
    projection = stage.projection_at(T)  # None: by its times this row count is vLLM's
    if projection is not None and projection.op == "norm_concat_linear":
        assert relative_rms(ours, exact) < 0.005


def test_layer_0_that_vllm_holds_as_fp8(load: Callable, log: Callable, tmp_path: Path) -> None:
    quantization = {"quantization_config": fp8_config("qkv_proj")}
    written = write_layer0_drafter(tmp_path, norm_before_residual=True, **quantization)
    layer = load("force", written, layer0="1", load_format="dummy").model.layers[0]
    linear = layer.self_attn.qkv_proj
    assert linear.weight.dtype == torch.float8_e4m3fn
    linear.weight.copy_(torch.randn(linear.weight.shape))
    linear.weight_scale.copy_(0.5 + torch.rand(linear.weight_scale.shape))
    x = torch.randn(T, 2 * H).bfloat16()
    with torch.inference_mode():  # as vLLM compiles the drafter; comparing addresses would break the graph
        assert torch.equal(torch.compile(linear, fullgraph=True, backend="eager")(x)[0], linear(x)[0])
    runs_as_vllms_own(layer, "qkv_proj", True, log, linear.weight.double().t() * linear.weight_scale.double())


class Stop(Exception):
    pass


def stop() -> None:
    raise Stop


@pytest.mark.usefixtures("models_of_gpus")
@pytest.mark.parametrize(
    "recorded",
    [
        *[pytest.param(target, id=target.module.rpartition(".")[2]) for target in combine.TARGETS],
        *[pytest.param(target, id=target.where.rpartition(".")[2]) for row in mtp.LAYERS for target in row.targets],
        *[pytest.param(target, id=target.where.rpartition(".")[2]) for row in layer0.LAYERS for target in row.targets],
        *[pytest.param(target, id=target.where.rpartition(".")[2]) for target in context.TARGETS],
        pytest.param(cpu_packing.PROCESS, id="packing"),
        pytest.param(embedding.FORWARD, id="embedding"),
        pytest.param(speculator.EAGLE, id="eagle"),
        pytest.param(speculator.DFLASH, id="dflash"),
    ],
)
def test_every_gate_is_open_in_the_versions_that_it_names(recorded: Target) -> None:
    versions = {version for known in recorded.bodies.values() for version in known}
    assert versions <= set(plugin.TESTED_VERSIONS)
    assert VERSION in plugin.TESTED_VERSIONS
    if VERSION not in versions:
        pytest.skip(f"{recorded.where} is not in vLLM {VERSION}, and stays off there")
    function = resolve(recorded.where)[2]
    function = getattr(function, "eagle_kernels_original", function)  # another test may have hooked it
    recorded.check(function)
    assert VERSION in recorded.bodies[body_hash(function)]
