"""The vLLM plugin's hooks on a stand-in for vLLM: what they replace, what they leave alone, and the reason they log.

`tests/engines/vllm` runs them in the real engine, on its CPU runner; the V2 runner's speculators run only here
and on a GPU.
"""

import contextlib
import importlib
import pickle
import re
import sys
import types
from collections.abc import Callable, Iterator

import pytest
import torch
import vllm_stand_in as stand_in
from torch import Tensor, nn
from vllm_stand_in import MODELS, SPECULATORS, D, H, K

import eagle_kernels as ek
from backends import fused_up_to, needs_compiled
from eagle_kernels import library, plan
from eagle_kernels.engines import decision, eligibility, gates
from eagle_kernels.plan import Kernel, Plan
from guards import forbidden

pytestmark = needs_compiled  # without kernels every stage stays with the engine: test_a_library...

T = 5
PACKED = "its weight is packed for vLLM's own CPU product"
PACKED_AWAY = "its weight is packed for the engine's own CPU product"
COMBINE = "Eagle3LlamaForCausalLM.combine_hidden_states"
EAGLE3, LAGUNA, DFLASH = "LlamaForCausalLMEagle3", "DFlashLagunaForCausalLM", "DFlashDraftModel"
CODES = "norm_concat_linear on codes"
VLLMS = (1.0, 1.0, 1.0, 1.0)  # seconds of vLLM's own calls


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.SimpleNamespace]:
    """A stand-in vLLM in sys.modules, and the plugin in the state of a fresh process, forced on. The V2 runner is not
    imported yet. The gates accept the stand-in's bodies besides vLLM's. The plan takes the fused kernel on any CPU."""
    loaded, defined = {}, stand_in.modules()
    check_body, known = gates.check_body, dict.fromkeys(stand_in.bodies(defined), ("the stand-in",))
    monkeypatch.setattr(
        gates, "check_body", lambda where, function, bodies: check_body(where, function, bodies | known)
    )
    monkeypatch.setenv("EAGLE_KERNELS_VLLM", "force")
    for name, members in defined.items():
        loaded[name] = types.ModuleType(name)
        vars(loaded[name]).update(members)
        if not name.startswith(SPECULATORS):
            monkeypatch.setitem(sys.modules, name, loaded[name])
    loaded["vllm"].envs = loaded["vllm.envs"]
    clear_plugin()
    with fused_up_to(512):
        yield types.SimpleNamespace(
            root=loaded["vllm"],
            envs=loaded["vllm.envs"],
            models=loaded[f"{MODELS}.registry"].ModelRegistry.models,
            Eagle3=loaded[f"{MODELS}.llama_eagle3"].Eagle3LlamaForCausalLM,
            speculator_modules={name: module for name, module in loaded.items() if name.startswith(SPECULATORS)},
            EagleSpeculator=loaded[f"{SPECULATORS}.eagle.speculator"].EagleSpeculator,
            DFlashSpeculator=loaded[f"{SPECULATORS}.dflash.speculator"].DFlashSpeculator,
        )
    clear_plugin()


def clear_plugin() -> None:
    for name in [name for name in sys.modules if name.startswith("eagle_kernels.engines.vllm")]:
        del sys.modules[name]
    eligibility.clear_logged()
    decision.clear()


@pytest.fixture
def v2(vllm: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    for name, module in vllm.speculator_modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return vllm


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level("INFO")
    return lambda: [record.getMessage().removeprefix("eagle_kernels: ") for record in caplog.records]


def register() -> None:
    importlib.import_module("eagle_kernels.engines.vllm").register()


def build(
    vllm: types.SimpleNamespace,
    architecture: str = EAGLE3,
    change: Callable[[nn.Module], None] = id,
    packs: bool = False,
    lora_config: object = None,
    **config: object,
) -> nn.Module:
    """What vLLM's loader does: take the class from the registry, construct it, load the weights, pack them on a CPU,
    call the model's post-load hook."""
    hf_config = types.SimpleNamespace(**({"norm": "chunk"} | config))
    speculative = types.SimpleNamespace(draft_model_config=types.SimpleNamespace(hf_config=hf_config))
    model_class = vllm.models[architecture].load_model_cls()
    scheduler = types.SimpleNamespace(max_num_batched_tokens=4 * T)
    vllm_config = types.SimpleNamespace(
        speculative_config=speculative, scheduler_config=scheduler, lora_config=lora_config
    )
    model = model_class(vllm_config=vllm_config).requires_grad_(False)
    change(model.model)
    if packs:
        model.model.fc.quant_method.process_weights_after_loading(model.model.fc)
    if hasattr(model, "process_weights_after_loading"):
        model.process_weights_after_loading()
    return model


def engines_own(vllm: types.SimpleNamespace, drafter: nn.Module, hidden: Tensor) -> Tensor:
    own = next(base for base in type(drafter).__mro__ if base.__module__.startswith(MODELS))
    return own.combine_hidden_states(drafter, hidden)


def assert_close(got: Tensor, expected: Tensor) -> None:
    tolerance = 0.02 if got.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ops that the plugin's projections call, in order, without the probes at load."""
    from eagle_kernels.engines import projection

    called: list[str] = []
    probe = projection.run_probe

    def uncounted(*args: object) -> None:
        before = len(called)
        try:
            probe(*args)
        finally:
            del called[before:]

    monkeypatch.setattr(projection, "run_probe", uncounted)
    for module, function, op in (
        (projection, "concatenate", "norm_concat"),
        (projection, "project", "norm_concat_linear"),
        (projection.quantized, "project", CODES),
    ):
        run = getattr(module, function)

        def counted(*args: object, op: str = op, run: Callable = run) -> Tensor:
            called.append(op)
            return run(*args)

        monkeypatch.setattr(module, function, counted)
    return called


@pytest.fixture
def runs(vllm: types.SimpleNamespace, ops: list[str], log: Callable) -> Callable:
    """check(drafter, {number of rows: the op that runs, or None}, the beginning of its log line)."""

    def check(drafter: nn.Module, ran: dict[int, str | None], line: str) -> None:
        ops.clear()
        for rows, op in ran.items():
            hidden = torch.randn(rows, K * H)
            assert_close(drafter.combine_hidden_states(hidden), engines_own(vllm, drafter, hidden))
            assert ops == ([] if op is None else [op])
            ops.clear()
        (logged,) = [logged for logged in log() if "combine_hidden_states" in logged]
        assert logged.startswith(f"{COMBINE} {line}")

    return check


@pytest.mark.parametrize(
    ("architecture", "norm", "expected"),
    [
        pytest.param(EAGLE3, "chunk", ["norm_concat_linear"], id="chunk"),
        pytest.param(EAGLE3, "concat", ["norm_concat_linear"], id="concat"),
        pytest.param(EAGLE3, "both", ["norm_concat", "norm_concat_linear"], id="both"),
        pytest.param(EAGLE3, "none", [], id="none"),
        pytest.param(LAGUNA, "chunk", ["norm_concat_linear"], id="laguna"),
    ],
)
@pytest.mark.parametrize("rows", [(T,), (0,), ()], ids=["T5", "T0", "one-row"])
def test_combine_equals_the_engines(
    vllm: types.SimpleNamespace, ops: list[str], architecture: str, norm: str, expected: list[str], rows: tuple
) -> None:
    register()
    drafter = build(vllm, architecture, norm=norm)
    hidden = torch.randn(*rows, K * H)
    assert_close(drafter.combine_hidden_states(hidden), engines_own(vllm, drafter, hidden))
    assert ops == expected


def wrapped_by_lora(model: nn.Module) -> None:
    fc = model.fc
    model.fc = nn.Module()
    model.fc.base_layer, model.fc.forward = fc, fc.forward


def packed(model: nn.Module) -> None:
    dense = model.fc.weight.data
    model.fc.forward = lambda x: torch.nn.functional.linear(x, dense)
    model.fc.weight = nn.Parameter(torch.empty(0), requires_grad=False)


def biased(model: nn.Module) -> None:
    model.fc.bias = nn.Parameter(torch.randn(D), requires_grad=False)


def quantized(model: nn.Module) -> None:
    model.fc.quant_method = stand_in.Fp8LinearMethod()


@pytest.mark.parametrize(
    ("change", "because"),
    [
        pytest.param(quantized, "its quant_method is Fp8LinearMethod", id="quantized"),
        pytest.param(wrapped_by_lora, "LoRA wraps it (Module)", id="lora"),
        pytest.param(packed, "its weight is packed for the engine's own CPU product", id="packed"),
    ],
)
@pytest.mark.parametrize("norm", ["chunk", "concat", "both"])
def test_an_fc_that_is_not_eligible_runs_itself_behind_the_norms(
    vllm: types.SimpleNamespace, ops: list[str], log: Callable, change: Callable, because: str, norm: str
) -> None:
    register()
    drafter = build(vllm, change=change, norm=norm)
    hidden = torch.randn(T, K * H)
    assert_close(drafter.combine_hidden_states(hidden), engines_own(vllm, drafter, hidden))
    assert ops == ["norm_concat"] * (2 if norm == "both" else 1)
    assert [line for line in log() if "fc stays with vLLM: " + because in line]
    assert len([line for line in log() if "combine_hidden_states" in line]) == 1


def test_a_bias_is_projected_with(vllm: types.SimpleNamespace, ops: list[str]) -> None:
    register()
    drafter = build(vllm, change=biased)
    hidden = torch.randn(T, K * H)
    assert_close(drafter.combine_hidden_states(hidden), engines_own(vllm, drafter, hidden))
    assert ops == ["norm_concat_linear"]


def another_norm(model: nn.Module) -> None:
    model.fc_norm[1] = stand_in.GemmaRMSNorm(H).requires_grad_(False)


def partial_variance(model: nn.Module) -> None:
    model.fc_norm[1].variance_size_override = 8


def weightless(model: nn.Module) -> None:
    model.fc_norm[1].has_weight = False


def float64(model: nn.Module) -> None:
    model.double()
    model.fc.params_dtype = torch.float64


def no_fc(model: nn.Module) -> None:
    model.use_aux_hidden_state = False
    del model.fc


@pytest.mark.parametrize(
    ("change", "because"),
    [
        pytest.param(another_norm, "its norm is a vllm_stand_in.GemmaRMSNorm", id="norm-class"),
        pytest.param(partial_variance, "its norm takes the variance of 8 columns only", id="partial-variance"),
        pytest.param(weightless, "its norm has no weight", id="weightless"),
        pytest.param(float64, "its fc is torch.float64", id="dtype"),
        pytest.param(no_fc, "it has no fc (use_aux_hidden_state is False)", id="no-fc"),
    ],
)
def test_a_stage_that_is_not_eligible_stays_with_the_engine(
    vllm: types.SimpleNamespace, ops: list[str], log: Callable, change: Callable, because: str
) -> None:
    register()
    drafter = build(vllm, change=change)
    hidden = torch.randn(T, K * H, dtype=torch.float64 if change is float64 else torch.float32)
    assert torch.equal(drafter.combine_hidden_states(hidden), engines_own(vllm, drafter, hidden))
    assert ops == []
    assert f"Eagle3LlamaForCausalLM.combine_hidden_states stays with vLLM: {because}" in log()


def test_batch_invariant_mode_keeps_the_engines_kernels(
    vllm: types.SimpleNamespace, ops: list[str], log: Callable
) -> None:
    vllm.envs.VLLM_BATCH_INVARIANT = True
    register()
    build(vllm).combine_hidden_states(torch.randn(T, K * H))
    build(vllm, "DeepSeekMTPModel")
    assert ops == []
    assert len([line for line in log() if "stays with vLLM: VLLM_BATCH_INVARIANT=1" in line]) == 2


def test_lora_that_comes_after_loading_is_seen(vllm: types.SimpleNamespace, ops: list[str]) -> None:
    register()
    drafter = build(vllm)
    wrapped_by_lora(drafter.model)
    drafter.combine_hidden_states(torch.randn(T, K * H))
    assert ops == ["norm_concat"]


@pytest.mark.parametrize("replaced", [False, True], ids=["in-place", "new-parameter"])
def test_updated_weights_are_the_ones_used(vllm: types.SimpleNamespace, ops: list[str], replaced: bool) -> None:
    register()
    drafter, hidden = build(vllm), torch.randn(T, K * H)
    drafter.combine_hidden_states(hidden)
    for module in (drafter.model.fc, *drafter.model.fc_norm):
        if replaced:
            module.weight = nn.Parameter(torch.randn_like(module.weight), requires_grad=False)
        else:
            module.weight.data.copy_(torch.randn_like(module.weight))
    assert_close(drafter.combine_hidden_states(hidden), engines_own(vllm, drafter, hidden))
    assert ops == ["norm_concat_linear"] * 2


def warm_ups(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor | list[Tensor], dict[str, Tensor]]]:
    """The chunks and keyword arguments of the warm-ups at load that a GPU has; they run."""
    from eagle_kernels.engines import projection

    warmed, warm_up = [], projection.warm_up

    def recorded(name: str, function: Callable, args: tuple, kwargs: dict[str, Tensor]) -> None:
        warmed.append((args[0], kwargs))
        warm_up(name, function, args, kwargs)

    monkeypatch.setattr(projection, "_on_gpu", lambda device: True)
    monkeypatch.setattr(projection, "warm_up", recorded)
    return warmed


def test_kernels_are_compiled_at_load_on_a_gpu(
    vllm: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, log: Callable
) -> None:
    """For both forms of input, at the engine's largest batch; a GPU that cannot run them keeps the engine's path."""
    warmed = warm_ups(monkeypatch)
    register()
    build(vllm)
    build(vllm, "DeepSeekMTPModel")
    assert not [line for line in log() if "stays with vLLM" in line]
    shapes = [[tuple(c.shape) for c in (chunks if isinstance(chunks, list) else [chunks])] for chunks, _ in warmed]
    rows = 4 * T
    assert shapes == [[(rows, K * H)], [(rows, H)] * K, [(rows, 2 * H)], [(rows, H)] * 2]
    assert [tuple(out["out"].shape) if out else None for _, out in warmed] == [None, (rows, D), None, (rows, H)]
    assert all(chunk.is_contiguous() for chunks, _ in warmed for chunk in chunks)

    def no_kernels(*args: object, **kwargs: object) -> None:
        raise RuntimeError("the GPU has compute capability 7.5")

    monkeypatch.setattr("eagle_kernels.engines.projection.warm_up", no_kernels)
    drafter, hidden = build(vllm), torch.randn(T, K * H)
    assert torch.equal(drafter.combine_hidden_states(hidden), engines_own(vllm, drafter, hidden))
    because = "norm_concat_linear does not run here: the GPU has compute capability 7.5"
    assert f"{COMBINE} stays with vLLM: {because}" in log()


def test_a_probe_takes_64_mb_at_most(vllm: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """With max_num_batched_tokens of 262,144 it would take 50 MB in fp32 at K*H = 48, and 13 GB at K*H = 12,288."""
    warmed = warm_ups(monkeypatch)
    monkeypatch.setattr("eagle_kernels.engines.projection.PROBED_BYTES", 7 * K * H * 4 + 3)
    register()
    build(vllm)
    assert len(warmed[0][0]) == 7


@pytest.mark.parametrize("kernel", [Kernel.FUSED, Kernel.DOTS, Kernel.TWO_STEP])
def test_forced_fc_stays_dense_where_a_fused_kernel_reads_it(
    vllm: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, ops: list[str], kernel: Kernel
) -> None:
    register()
    fused = kernel is not Kernel.TWO_STEP
    monkeypatch.setattr(combine(), "choose", lambda op, *problem: Plan(op, "cpu", kernel, "planned"))
    drafter, hidden = build(vllm, packs=True), torch.randn(T, K * H)
    drafter.combine_hidden_states(hidden)
    assert ops == ["norm_concat_linear" if fused else "norm_concat"]
    assert is_dense(drafter) == fused


def held_as_fp8(model: nn.Module) -> None:
    """fc with an FP8 weight as vLLM keeps it, and its product."""
    fc = model.fc
    vars(fc).pop("_cpu_skip_gemm_dispatch", None)  # a layer that is quantized from the start is not kept dense
    quantized = ek.quantize(fc.weight.data, "fp8_row")
    dense = quantized.dequantize(torch.float32)
    fc.quant_method, fc.weight_block_size = stand_in.Fp8LinearMethod(), None
    fc.weight = torch.nn.Parameter(quantized.codes.t(), requires_grad=False)
    fc.weight_scale = torch.nn.Parameter(quantized.scales, requires_grad=False)
    fc.forward = lambda x: torch.nn.functional.linear(x, dense)


@pytest.fixture
def reads_codes(vllm: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    method = stand_in.Fp8LinearMethod
    monkeypatch.setattr(combine(), "QUANTIZED", {f"{method.__module__}:{method.__qualname__}"})


@pytest.mark.usefixtures("reads_codes")
@pytest.mark.parametrize("norm", ["chunk", "concat", "both", "none"])
def test_the_codes_of_a_quantized_fc_are_read(
    vllm: types.SimpleNamespace, ops: list[str], log: Callable, norm: str
) -> None:
    drafter, hidden = build(vllm, change=held_as_fp8, norm=norm), torch.randn(T, K * H)
    got = drafter.combine_hidden_states(hidden)
    assert ops[-1] == CODES
    assert_close(got, engines_own(vllm, drafter, hidden))
    (line,) = [line for line in log() if "combine_hidden_states" in line]
    assert "runs norm_concat_linear (K=3, " in line and line.endswith(" norm, fp8_row); forced, not timed")


@pytest.mark.usefixtures("reads_codes")
@pytest.mark.parametrize(
    ("norm_concat", "codes", "ran", "line"),
    [
        pytest.param(
            (0.9, 0.9, 0.9, 0.9), (0.8, 0.8, 0.8, 0.8), {1: CODES, T: CODES},
            "runs norm_concat_linear (K=3, chunk norm, fp8_row); T=1 800 ms (vLLM 1e+03), ", id="everywhere",
        ),
        pytest.param(
            (0.9, 0.9, 0.9, 0.9), (0.5, 0.85, 0.95, 1.1), {1: CODES, 4: CODES, 16: "norm_concat"},
            "runs norm_concat_linear (K=3, chunk norm, fp8_row) where that is faster than vLLM's fc, T=1 500 ms "
            f"(vLLM 900), T=4 850 ms (vLLM 900), T=16 950 ms (vLLM 900), T={4 * T} 1.1e+03 ms (vLLM 900); else runs "
            "norm_concat (K=3, chunk norm), its fc stays with vLLM: its quant_method is Fp8LinearMethod; T=1 900 ms",
            id="at-some-row-counts",
        ),
        pytest.param(
            (1.1, 1.1, 1.1, 1.1), (1.1, 1.1, 1.1, 1.1), {1: None}, "stays with vLLM: norm_concat (K=3", id="slower"
        ),
    ],
)  # fmt: skip
def test_codes_are_read_where_that_is_faster(
    vllm: types.SimpleNamespace,
    decides: Callable,
    runs: Callable,
    norm_concat: tuple[float, ...],
    codes: tuple[float, ...],
    ran: dict[int, str | None],
    line: str,
) -> None:
    timed = decides(VLLMS, norm_concat, codes)
    drafter = build(vllm, change=held_as_fp8)
    assert timed == [3]
    runs(drafter, ran, line)


def packed_in_blocks(model: nn.Module) -> None:
    """fc as vLLM's AMX kernel leaves it: the codes in another order, in a tensor of the same shape."""
    held_as_fp8(model)
    fc = model.fc
    fc.weight_block_size = [128, 128]
    quantized = ek.quantize(torch.randn(D, K * H), "fp8_block128")
    packed = quantized.codes.flatten().view(torch.uint8).flip(0).view(quantized.codes.dtype).view(D, K * H)
    fc.weight = torch.nn.Parameter(packed, requires_grad=False)
    fc.weight_scale = torch.nn.Parameter(quantized.scales, requires_grad=False)
    dense = quantized.dequantize(torch.float32)
    fc.forward = lambda x: torch.nn.functional.linear(x, dense)


@pytest.mark.usefixtures("reads_codes")
def test_fp8_blocks_that_a_cpu_packs_stay_and_norm_concat_runs(
    vllm: types.SimpleNamespace, ops: list[str], log: Callable
) -> None:
    """Read as plain codes they failed the probe, which left the whole stage to vLLM."""
    drafter, hidden = build(vllm, change=packed_in_blocks), torch.randn(T, K * H)
    got = drafter.combine_hidden_states(hidden)
    assert ops == ["norm_concat"]
    assert_close(got, engines_own(vllm, drafter, hidden))
    (line,) = [line for line in log() if "combine_hidden_states" in line]
    assert "its fc stays with vLLM: its quant_method is Fp8LinearMethod; forced, not timed" in line


def combine() -> types.ModuleType:
    return sys.modules["eagle_kernels.engines.vllm.combine"]


def is_dense(drafter: nn.Module) -> bool:
    """Whether fc's weight is still as loaded, not packed by vLLM."""
    fc = drafter.model.fc
    kept = getattr(fc, "_cpu_skip_gemm_dispatch", False)
    assert kept == (fc.weight.numel() > 0) == (fc.cpu_linear is torch.nn.functional.linear)
    return kept


@pytest.fixture
def decides(vllm: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Not forced, with given seconds per row count for each call: vLLM's, norm_concat's, norm_concat_linear's."""
    monkeypatch.delenv("EAGLE_KERNELS_VLLM")
    timed: list[int] = []

    def take(*seconds: tuple[float, ...]) -> list[int]:
        def seconds_per_call(calls: list[Callable], rows: tuple, width: int, like: Tensor) -> list[list[float]]:
            timed.append(len(calls))
            assert rows == (1, 4, 16, 4 * T)
            outs = [call(torch.ones(2, width, dtype=like.dtype)) for call in calls]
            for out in outs:
                assert_close(out, outs[0])
            assert len(calls) <= len(seconds)
            return [list(times) for times in seconds[: len(calls)]]

        monkeypatch.setattr(decision, "seconds_per_call", seconds_per_call)
        register()
        return timed

    return take


DENSE_MB = f"{4 * K * H * D / 1e6:.3g}"


@pytest.mark.parametrize(
    ("norm_concat", "whole", "dense", "ran", "line"),
    [
        pytest.param(
            (0.9, 0.9, 0.9, 0.9), (0.8, 0.8, 0.8, 0.8), True, {1: "norm_concat_linear", T: "norm_concat_linear"},
            "runs norm_concat_linear (K=3, chunk norm); T=1 800 ms (vLLM 1e+03), T=4 800 ms (vLLM 1e+03), ",
            id="the-one-op",
        ),
        pytest.param(
            (0.9, 0.9, 0.9, 0.9), (0.85, 0.85, 0.85, 1.1), False, {1: "norm_concat", T: "norm_concat"},
            f"runs norm_concat (K=3, chunk norm), its fc stays with vLLM: {PACKED}; T=1 900 ms (vLLM 1e+03), ",
            id="no-row-count-slower",
        ),
        pytest.param(
            (0.9, 1.1, 1.1, 0.9), (1.1, 1.1, 1.1, 0.85), False, {1: "norm_concat", T: None, 4 * T: "norm_concat"},
            f"runs norm_concat (K=3, chunk norm) where it is faster, its fc stays with vLLM: {PACKED}; T=1 900 ms",
            id="some-row-counts",
        ),
        pytest.param(
            (0.9, 0.9, 0.9, 0.9), (0.5, 0.5, 1.1, 1.1), False,
            {1: "norm_concat_linear", 4: "norm_concat_linear", 16: "norm_concat", 4 * T: "norm_concat"},
            f"runs norm_concat_linear (K=3, chunk norm) on a dense copy of its weight ({DENSE_MB} MB) where that is "
            "faster than the packed one, T=1 500 ms (packed 900), T=4 500 ms (packed 900), T=16 1.1e+03 ms (packed 900)"
            f", T={4 * T} 1.1e+03 ms (packed 900); else runs norm_concat (K=3, chunk norm), its fc stays with vLLM: "
            f"{PACKED}; T=1 900 ms (vLLM 1e+03), ",
            id="both-layouts",
        ),
        pytest.param(
            (1.1, 1.1, 1.1, 1.1), (0.5, 1.1, 1.1, 1.1), False, {1: "norm_concat_linear", 4: None, T: None},
            f"runs norm_concat_linear (K=3, chunk norm) on a dense copy of its weight ({DENSE_MB} MB) where that is "
            f"faster than the packed one, T=1 500 ms (packed 1e+03), ",
            id="one-row-alone",
        ),
        pytest.param(
            (1.1, 1.1, 1.1, 1.1), (1.1, 1.1, 1.1, 1.1), False, {1: None, T: None},
            "stays with vLLM: norm_concat (K=3, chunk norm) is not faster, T=1 1.1e+03 ms (vLLM 1e+03), ",
            id="slower",
        ),
        pytest.param(
            (0.9, 0.9, 0.9, 0.9), (1.0, 0.95, 0.95, 0.95), False, {1: "norm_concat"}, "runs norm_concat (K=3",
            id="the-faster-of-two",
        ),
    ],
)  # fmt: skip
def test_a_stage_runs_where_it_is_faster(
    vllm: types.SimpleNamespace,
    decides: Callable,
    runs: Callable,
    norm_concat: tuple[float, ...],
    whole: tuple[float, ...],
    dense: bool,
    ran: dict[int, str | None],
    line: str,
) -> None:
    timed = decides(VLLMS, norm_concat, whole)
    for _ in range(2):  # the second is not timed: its shape is known
        drafter = build(vllm, packs=True)
        assert timed == [3] and is_dense(drafter) == dense
    runs(drafter, ran, line)


TWELVE_BITS = "runs norm_concat_linear (K=3, chunk norm, bf16_12bit) on an exact copy in 12 bits of its weight ("


@pytest.mark.parametrize(
    ("whole", "compressed", "dense", "ran", "line"),
    [
        pytest.param(
            (0.85, 0.85, 0.85, 1.1), (0.5, 0.6, 0.6, 1.2), False, {1: CODES, 16: CODES, 4 * T: "norm_concat"},
            TWELVE_BITS, id="beside-the-packed-one",
        ),
        pytest.param(
            (0.8, 0.8, 0.8, 0.8), (0.5, 0.5, 0.5, 1.0), False, {1: CODES, 4: CODES, 4 * T: "norm_concat"}, TWELVE_BITS,
            id="for-the-dense-one",
        ),
        pytest.param(
            (0.5, 0.5, 1.1, 1.1), (0.5, 0.4, 0.4, 1.1), False, {1: CODES, 16: CODES, 4 * T: "norm_concat"}, TWELVE_BITS,
            id="for-a-dense-copy",
        ),
        pytest.param(
            (0.8, 0.8, 0.8, 0.8), (0.75, 0.75, 0.75, 0.75), True, {1: "norm_concat_linear", T: "norm_concat_linear"},
            "runs norm_concat_linear (K=3, chunk norm); T=1 800 ms", id="not-worth-its-bytes",
        ),
        pytest.param(
            (0.5, 0.5, 0.5, 0.5), (0.4, 0.9, 0.9, 0.9), True, {1: "norm_concat_linear", T: "norm_concat_linear"},
            "runs norm_concat_linear (K=3, chunk norm); T=1 500 ms", id="faster-for-one-row-alone",
        ),
    ],
)  # fmt: skip
def test_a_weight_in_12_bits_is_kept_where_it_is_faster(
    vllm: types.SimpleNamespace,
    decides: Callable,
    runs: Callable,
    monkeypatch: pytest.MonkeyPatch,
    whole: tuple[float, ...],
    compressed: tuple[float, ...],
    dense: bool,
    ran: dict[int, str | None],
    line: str,
) -> None:
    timed = decides(VLLMS, (0.9,) * 4, whole, compressed)
    monkeypatch.setattr(combine(), "cpu_isa", lambda: "amx_bf16")
    with default_dtype(torch.bfloat16):
        drafter = build(vllm, packs=True)
        assert timed == [4] and is_dense(drafter) == dense
        runs(drafter, ran, line)
        if not dense:  # after vLLM packs it again no old copy may be in use
            fc, hidden = drafter.model.fc, torch.randn(1, K * H)
            fc.weight = nn.Parameter(torch.randn(D, K * H))
            fc.quant_method.process_weights_after_loading(fc)
            assert_close(drafter.combine_hidden_states(hidden), engines_own(vllm, drafter, hidden))


def test_no_weight_is_put_into_12_bits_where_that_gains_nothing(
    vllm: types.SimpleNamespace, decides: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = decides(VLLMS, (0.9,) * 4, (0.8,) * 4, (0.1,) * 4)
    monkeypatch.setattr(combine(), "cpu_isa", lambda: "avx512_bf16")
    with default_dtype(torch.bfloat16):
        build(vllm, packs=True)
    assert timed == [3]


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def test_a_weight_that_is_packed_anew_leaves_no_dense_copy_in_use(
    vllm: types.SimpleNamespace, decides: Callable, ops: list[str]
) -> None:
    """After a reload of the weights vLLM processes its layers again."""
    decides(VLLMS, (0.9,) * 4, (0.5, 0.5, 1.1, 1.1))
    drafter, hidden = build(vllm, packs=True), torch.randn(1, K * H)
    drafter.combine_hidden_states(hidden)
    fc = drafter.model.fc
    fc.weight = nn.Parameter(torch.randn(D, K * H))
    fc.quant_method.process_weights_after_loading(fc)
    ops.clear()
    assert_close(drafter.combine_hidden_states(hidden), engines_own(vllm, drafter, hidden))
    assert ops == ["norm_concat"]


@pytest.mark.parametrize(("seconds", "op"), [(0.9, "norm_concat_linear"), (1.1, None)], ids=["faster", "slower"])
def test_where_vllm_packs_nothing_both_read_the_dense_weight(
    vllm: types.SimpleNamespace,
    decides: Callable,
    monkeypatch: pytest.MonkeyPatch,
    ops: list[str],
    seconds: float,
    op: str | None,
) -> None:
    """vLLM's fallback for a CPU build without oneDNN."""

    def leave_dense(self: object, layer: nn.Module) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    monkeypatch.setattr(gates, "check_body", lambda where, function, bodies: None)
    monkeypatch.setattr(stand_in.UnquantizedLinearMethod, "process_weights_after_loading", leave_dense)
    timed = decides(VLLMS, (seconds,) * 4)
    drafter, hidden = build(vllm, packs=True), torch.randn(T, K * H)
    assert timed == [2] and drafter.model.fc.weight.numel() > 0
    ops.clear()
    assert_close(drafter.combine_hidden_states(hidden), engines_own(vllm, drafter, hidden))
    assert ops == ([] if op is None else [op])


def test_lora_around_a_dense_weight_is_part_of_the_product(
    vllm: types.SimpleNamespace, decides: Callable, ops: list[str]
) -> None:
    """LoRA wraps fc after it was loaded and left dense: vLLM's layer runs, packed, after norm_concat."""
    decides(VLLMS, (0.9,) * 4, (0.5,) * 4)
    drafter, hidden = build(vllm, packs=True), torch.randn(T, K * H)
    assert is_dense(drafter)
    wrapped_by_lora(drafter.model)
    base = drafter.model.fc.base_layer
    drafter.model.fc.forward = lambda x: 2 * base(x)
    drafter.model.fc.input_size = K * H
    ops.clear()
    assert_close(drafter.combine_hidden_states(hidden), engines_own(vllm, drafter, hidden))
    assert set(ops) == {"norm_concat"} and base.weight.numel() == 0


@pytest.mark.parametrize("switch", ["EAGLE_KERNELS_VLLM_COMBINE", None], ids=["combine-off", "no-norm"])
def test_a_stage_that_is_vllms_keeps_vllms_layout(
    vllm: types.SimpleNamespace,
    decides: Callable,
    monkeypatch: pytest.MonkeyPatch,
    log: Callable,
    ops: list[str],
    switch: str | None,
) -> None:
    """Left dense, the weight made vLLM's own product 14 to 24 % slower at H=4096, and 3.6 times at H=128."""
    if switch is not None:
        monkeypatch.setenv(switch, "0")
    assert decides() == []
    drafter = build(vllm, packs=True, norm="none" if switch is None else "chunk")
    drafter.combine_hidden_states(torch.randn(T, K * H))
    assert not is_dense(drafter) and ops == []
    assert drafter.combine_hidden_states.__func__ is vllm.Eagle3.combine_hidden_states  # with no call of ours between
    (line,) = [line for line in log() if "combine_hidden_states" in line]
    packed_away = f"it has no norm, and its fc is vLLM's: {PACKED_AWAY}"
    assert line == f"{COMBINE} stays with vLLM: {packed_away if switch is None else 'EAGLE_KERNELS_VLLM_COMBINE=0'}"


def test_a_stage_without_norm_stays_dense_where_vllm_left_it(
    vllm: types.SimpleNamespace, decides: Callable, log: Callable
) -> None:
    assert decides() == []
    build(vllm, norm="none")
    assert f"{COMBINE} stays with vLLM: it has no norm to fuse" in log()


@pytest.mark.parametrize("forced", [True, False])
@pytest.mark.parametrize("packs", [True, False])
def test_a_stage_that_gives_other_values_stays_with_vllm(
    vllm: types.SimpleNamespace,
    decides: Callable,
    monkeypatch: pytest.MonkeyPatch,
    log: Callable,
    packs: bool,
    forced: bool,
) -> None:
    """A later version's norm computes something else, while the hooked method is unchanged."""
    monkeypatch.setattr(stand_in.RMSNorm, "forward", lambda self, x: x * self.weight)
    if forced:
        monkeypatch.setenv("EAGLE_KERNELS_VLLM", "force")
    assert decides(VLLMS, VLLMS, VLLMS) == []
    drafter, hidden = build(vllm, packs=packs), torch.randn(T, K * H)
    assert torch.equal(drafter.combine_hidden_states(hidden), engines_own(vllm, drafter, hidden))
    assert not packs or not is_dense(drafter)
    (line,) = [line for line in log() if "gives other values than the engine" in line]
    assert line.startswith(f"{COMBINE} stays with vLLM: norm_concat")


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize(
    ("variable", "missing", "because"),
    [
        pytest.param("triton", None, "EAGLE_KERNELS_BACKEND is 'triton', expected one of", id="refused"),
        pytest.param("sparse", None, "EAGLE_KERNELS_BACKEND is 'sparse', expected one of", id="garbage"),
        pytest.param("reference", None, "no kernels of ours for it, EAGLE_KERNELS_BACKEND=reference", id="reference"),
        pytest.param(
            "auto",
            "libeagle_kernels.so did not load: no AVX",
            "no kernels of ours for it, cpu: libeagle_kernels.so did not load: no AVX; `pip install --no-deps .` in a",
            id="broken-library",
        ),
    ],
)
def test_without_kernels_a_stage_stays_with_vllm(
    vllm: types.SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    ops: list[str],
    forced: bool,
    variable: str,
    missing: str | None,
    because: str,
) -> None:
    if not forced:
        monkeypatch.delenv("EAGLE_KERNELS_VLLM")
    monkeypatch.setenv("EAGLE_KERNELS_BACKEND", variable)
    if missing is not None:
        monkeypatch.setattr(library, "unsupported_reason", missing)
    plan.clear()
    try:
        register()
        drafter, hidden = build(vllm, packs=True), torch.randn(T, K * H)
        expected = engines_own(vllm, drafter, hidden)
        assert torch.equal(drafter.combine_hidden_states(hidden), expected) and ops == []
        assert not is_dense(drafter)
        layer = build(vllm, "DeepSeekMTPModel").model.layers["61"]
        assert type(layer.eh_proj) is nn.Linear and type(layer.enorm) is stand_in.RMSNorm
    finally:
        monkeypatch.undo()
        plan.clear()
    warned = [record.getMessage() for record in caplog.records if because in record.getMessage()]
    stages = [line.partition(" stays with vLLM: ")[0] for line in warned]
    assert stages == [f"eagle_kernels: {COMBINE}", "eagle_kernels: DeepSeekMultiTokenPredictorLayer.eh_proj"]
    assert all(record.levelname == "WARNING" for record in caplog.records)


def failing(*args: object) -> Tensor:
    raise RuntimeError("no more")


def test_a_call_that_fails_leaves_the_stage_to_vllm(
    v2: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, log: Callable
) -> None:
    from eagle_kernels.engines import projection

    register()
    drafter, other, aux = build(v2), build(v2), [torch.randn(T, H) for _ in range(K)]
    layer = build(v2, "DeepSeekMTPModel").model.layers["61"]
    monkeypatch.setattr(projection, "project", failing)
    hidden = torch.cat(aux, -1)
    for _ in range(2):
        assert torch.equal(drafter.combine_hidden_states(hidden), engines_own(v2, drafter, hidden))
    speculator = v2.EagleSpeculator(other, T)
    propose(speculator, aux)
    assert torch.equal(speculator.hidden_states, engines_own(v2, other, hidden))
    dflash = v2.DFlashSpeculator(build_unprobed(v2, monkeypatch), T)
    dflash._store_hidden_states(T, torch.zeros(T, D), aux)
    assert not dflash.hidden_states.isnan().any()
    assert log().count(f"{COMBINE} stays with vLLM from now on: RuntimeError('no more')") == 1
    own = type(layer)()
    own.load_state_dict(layer.state_dict())
    arguments = (None, torch.arange(T), torch.randn(T, H), torch.randn(T, H))
    assert torch.equal(layer(*arguments), own(*arguments))
    assert "eh_proj stays with vLLM, norm_concat_linear failed: RuntimeError('no more')" in log()


def test_a_layer_whose_op_failed_does_not_try_again(
    vllm: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, log: Callable
) -> None:
    """Each step would fail anew, with a line of its own where the message has the number of rows."""
    from eagle_kernels.engines import projection

    register()
    layer = build(vllm, "DeepSeekMTPModel").model.layers["61"]
    rows: list[int] = []

    def fail(sources: object, *args: object) -> Tensor:
        rows.append(len(sources.chunks[0]))
        raise RuntimeError(f"{rows[-1]} rows")

    monkeypatch.setattr(projection, "project", fail)
    for T in (3, 4):
        layer(None, torch.arange(T), torch.randn(T, H), torch.randn(T, H))
    assert rows == [3]
    assert [line for line in log() if "failed" in line] == [
        "eh_proj stays with vLLM, norm_concat_linear failed: RuntimeError('3 rows')"
    ]


def test_a_forced_stage_that_fails_at_load_is_packed_as_ever(
    vllm: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, log: Callable
) -> None:
    from eagle_kernels.engines import projection

    monkeypatch.setattr(projection, "project", failing)
    register()
    drafter, hidden = build(vllm, packs=True), torch.randn(T, K * H)
    assert torch.equal(drafter.combine_hidden_states(hidden), engines_own(vllm, drafter, hidden))
    assert not is_dense(drafter)
    assert f"{COMBINE} stays with vLLM: norm_concat_linear does not run here: no more" in log()


def build_unprobed(vllm: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    monkeypatch.setattr(combine(), "probe", lambda *args: None)
    return build(vllm, LAGUNA)


@pytest.mark.parametrize(
    ("vllms", "ours", "runs"),
    [
        pytest.param(VLLMS, (0.9, 0.9, 0.9, 0.9), True, id="faster"),
        pytest.param(VLLMS, (0.5, 0.5, 0.5, 1.0), False, id="not-at-all-row-counts"),
    ],
)
def test_an_mtp_layer_is_fused_where_that_is_faster_at_all_row_counts(
    vllm: types.SimpleNamespace, decides: Callable, log: Callable, vllms: tuple, ours: tuple, runs: bool
) -> None:
    """A graph is traced once for all row counts."""
    timed = decides(vllms, ours)
    for _ in range(2):
        layer = build(vllm, "DeepSeekMTPModel").model.layers["61"]
        assert isinstance(layer.eh_proj, normed_linear().NormedLinear) == runs
    assert timed == [2]
    (line,) = [line for line in log() if "eh_proj" in line]
    says = "runs norm_concat_linear; T=1 900 ms" if runs else "stays with vLLM: norm_concat_linear is not faster at all"
    assert line.startswith(f"DeepSeekMultiTokenPredictorLayer.eh_proj {says}")


@pytest.mark.parametrize("runs", [True, False])
def test_an_mtp_projection_that_vllm_packs_waits_for_the_decision(
    vllm: types.SimpleNamespace, decides: Callable, runs: bool
) -> None:
    """A ReplicatedLinear, like LongCat's: on a CPU vLLM drops the dense weight, which the op reads."""
    entry = vllm.models["DeepSeekMTPModel"]
    original = entry.model_class.__init__

    def replicated(self: nn.Module, **arguments: object) -> None:
        original(self, **arguments)
        for layer in self.model.layers.values():
            layer.eh_proj = stand_in.ReplicatedLinear(2 * H, H)

    def load(model: nn.Module) -> None:
        torch.manual_seed(1)
        for parameter in model.layers["61"].parameters():
            parameter.data.copy_(torch.randn_like(parameter))
        linear = model.layers["61"].eh_proj
        linear.quant_method.process_weights_after_loading(linear)

    entry.model_class.__init__ = replicated
    own = types.SimpleNamespace(layers={"61": type(build(vllm, "DeepSeekMTPModel").model.layers["61"])()})
    own.layers["61"].eh_proj = stand_in.ReplicatedLinear(2 * H, H)
    load(own)
    decides(VLLMS, (0.5,) * 4 if runs else (2.0,) * 4)
    layer = build(vllm, "DeepSeekMTPModel", load).model.layers["61"]
    assert isinstance(layer.eh_proj, normed_linear().NormedLinear) == runs
    assert (layer.eh_proj.weight.numel() > 0) == runs
    arguments = (None, torch.arange(T), torch.randn(T, H), torch.randn(T, H))
    assert_close(layer(*arguments), own.layers["61"](*arguments))


@pytest.mark.parametrize(
    ("architecture", "packs", "weight_of"),
    [
        pytest.param(EAGLE3, True, lambda model: model.fc.weight, id="fc"),
        pytest.param("DeepSeekMTPModel", False, lambda model: model.layers["61"].eh_proj.weight, id="eh_proj"),
    ],
)
def test_each_weight_of_a_timed_shape_goes_into_huge_pages(
    vllm: types.SimpleNamespace,
    decides: Callable,
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    packs: bool,
    weight_of: Callable[[nn.Module], Tensor],
) -> None:
    """Those after the first are not probed, which would put them there too."""
    from eagle_kernels.engines import projection

    asked: list[int] = []
    monkeypatch.setattr(projection, "use_huge_pages", lambda weight: asked.append(weight.data_ptr()))
    decides(VLLMS, (0.9,) * 4, (0.8,) * 4)
    for _ in range(2):
        asked.clear()
        model = build(vllm, architecture, packs=packs).model
        assert weight_of(model).data_ptr() in asked


@pytest.fixture
def two_ranks(vllm: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[list[float]]], None]:
    """Tensor parallelism with one other rank, whose seconds are given: vLLM's, then ours."""
    group = types.SimpleNamespace(world_size=2, cpu_group="gloo")
    monkeypatch.setattr(sys.modules["vllm.distributed"], "get_tp_group", lambda: group)

    def other(seconds: list[list[float]]) -> None:
        negated = torch.tensor(seconds, dtype=torch.float64)
        negated[1:].neg_()

        def all_reduce(tensor: Tensor, op: object, group: str) -> None:
            assert group == "gloo" and op == torch.distributed.ReduceOp.MIN
            torch.minimum(tensor, negated, out=tensor)

        monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)

    return other


def test_ranks_agree_on_vllms_fastest_and_our_slowest(two_ranks: Callable) -> None:
    ranks = importlib.import_module("eagle_kernels.engines.vllm.tensor_parallel")
    two_ranks([[5.0, 2.0], [3.0, 4.0]])
    assert ranks.agreed_seconds(lambda: [[4.0, 3.0], [2.0, 5.0]], 2, 2) == [[4.0, 2.0], [3.0, 5.0]]
    two_ranks([[0.0, 0.0], [float("inf")] * 2])  # from a rank where the timing failed
    assert ranks.agreed_seconds(lambda: [[4.0, 3.0], [2.0, 5.0]], 2, 2) == [[0.0, 0.0], [float("inf")] * 2]


def test_a_rank_that_fails_tells_the_others_first(two_ranks: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = importlib.import_module("eagle_kernels.engines.vllm.tensor_parallel")
    sent: list[list] = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, op, group: sent.append(tensor.tolist()))
    with pytest.raises(RuntimeError, match="no more"):
        ranks.agreed_seconds(failing, 3, 1)
    assert sent == [[[0.0], [-float("inf")], [-float("inf")]]]


@pytest.mark.parametrize(
    ("config", "stated"),
    [
        pytest.param({"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 5]}, 4, id="top-level-ids"),
        pytest.param({"eagle_aux_hidden_state_layer_ids": [1, 2], "num_aux_hidden_states": 2}, 2, id="both"),
        pytest.param(
            {
                "eagle_aux_hidden_state_layer_ids": [1, 2],
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
            },
            None,
            id="nested-ids-first",
        ),
        pytest.param({}, None, id="neither"),
    ],
)
def test_the_number_of_chunks_is_stated_for_the_engine(
    vllm: types.SimpleNamespace, config: dict, stated: int | None
) -> None:
    register()
    drafter = build(vllm, **config)
    hf_config = drafter.config
    assert getattr(hf_config, "num_aux_hidden_states", None) == stated


def propose(speculator: object, aux: list[Tensor], **more: object) -> tuple:
    batch = types.SimpleNamespace(num_tokens_after_padding=aux[0].shape[0])
    return speculator.propose(batch, "attn", "slots", torch.zeros(T, D), aux, "sampled", **more)


@pytest.mark.parametrize("norm", ["chunk", "concat", "both", "none"])
def test_zero_copy_writes_the_engines_buffer(v2: types.SimpleNamespace, ops: list[str], norm: str) -> None:
    register()
    drafter = build(v2, norm=norm)
    wide = torch.randn(T, 2 * K * H)
    aux = [wide[:, 2 * k * H : (2 * k + 1) * H] for k in range(K)]  # strided, like those of a sequence-parallel target
    speculator = v2.EagleSpeculator(drafter, T + 2)
    buffer = speculator.hidden_states.data_ptr()
    assert propose(speculator, aux, dummy_run=True) == ("attn", "slots", "sampled", True)
    assert_close(speculator.hidden_states[:T], engines_own(v2, drafter, torch.cat(aux, -1)))
    # The engine then copies the buffer onto itself.
    assert speculator.received.data_ptr() == speculator.hidden_states.data_ptr() == buffer
    assert speculator.hidden_states[T:].isnan().all()
    assert ops == (["norm_concat"] if norm == "both" else []) + ["norm_concat_linear"]


def test_the_copy_behind_the_zero_copy_route_moves_nothing() -> None:
    """The route relies on it: ATen returns at once from a copy of a tensor onto itself (64 MB: 4 us; to another tensor:
    8 ms). Here all memory of the tensor traps on access: a failure is a segmentation fault."""
    source = forbidden(4096, 64)
    source[:4095].copy_(source[:4095])


@pytest.mark.parametrize("case", ["pcp", "no-aux", "part-off", "packed"])
def test_zero_copy_leaves_the_rest_to_the_engine(
    v2: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, ops: list[str], case: str
) -> None:
    if case == "part-off":
        monkeypatch.setenv("EAGLE_KERNELS_VLLM_ZERO_COPY", "0")
    register()
    drafter = build(v2, change=packed if case == "packed" else id)
    aux = [torch.randn(T, H) for _ in range(K)]
    expected = engines_own(v2, drafter, torch.cat(aux, -1))
    speculator = v2.EagleSpeculator(drafter, T)
    if case == "pcp":
        speculator.pcp_manager = object()
    if case == "no-aux":
        batch = types.SimpleNamespace(num_tokens_after_padding=T)
        speculator.propose(batch, "attn", "slots", expected, None)
    else:
        propose(speculator, aux)
    assert_close(speculator.hidden_states, expected)
    assert speculator.received.data_ptr() != speculator.hidden_states.data_ptr()
    # The engine concatenates and copies; the drafter's combine_hidden_states still runs on the ops.
    assert ops == {"no-aux": [], "packed": ["norm_concat"]}.get(case, ["norm_concat_linear"])


def test_combine_off_leaves_the_zero_copy_route(
    v2: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, ops: list[str]
) -> None:
    monkeypatch.setenv("EAGLE_KERNELS_VLLM_COMBINE", "0")
    register()
    drafter, aux = build(v2), [torch.randn(T, H) for _ in range(K)]
    drafter.combine_hidden_states(torch.cat(aux, -1))
    assert ops == []
    propose(v2.EagleSpeculator(drafter, T), aux)
    assert ops == ["norm_concat_linear"]


@pytest.mark.parametrize(("staged", "zero_copy"), [(0, True), (4, False)], ids=["eager", "full-graph"])
@pytest.mark.parametrize("architecture", [LAGUNA, DFLASH])
def test_dflash_store(
    v2: types.SimpleNamespace, ops: list[str], architecture: str, staged: int, zero_copy: bool
) -> None:
    register()
    drafter = build(v2, architecture)
    speculator = v2.DFlashSpeculator(drafter, T + 2)
    aux, before = [torch.randn(T + 2, H) for _ in range(K)], len(ops)
    speculator._store_hidden_states(T, torch.zeros(T, D), aux, staged)
    assert_close(speculator.hidden_states[:T], engines_own(v2, drafter, torch.cat(aux, -1))[:T])
    assert speculator.hidden_states[T:].isnan().all()
    assert speculator.staged == (None if zero_copy else staged)
    # Without a norm a packed input stays with the engine.
    assert ops[before:] == (["norm_concat_linear"] if zero_copy or architecture == LAGUNA else [])


def test_a_renamed_speculator_method_is_named_once(v2: types.SimpleNamespace, log: Callable, ops: list[str]) -> None:
    v2.EagleSpeculator.draft = v2.EagleSpeculator.propose
    del v2.EagleSpeculator.propose
    register()
    build(v2)
    drafter = build(v2)
    lines = [line for line in log() if "EagleSpeculator" in line]
    assert lines == [
        f"no zero-copy route: {SPECULATORS}.eagle.speculator:EagleSpeculator.propose is not there "
        "(type object 'EagleSpeculator' has no attribute 'propose')"
    ]
    drafter.combine_hidden_states(torch.randn(T, K * H))
    assert ops == ["norm_concat_linear"]


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.99.0"])
def test_a_method_that_a_tested_version_does_not_have_is_no_warning(
    v2: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, log: Callable, version: str
) -> None:
    monkeypatch.setattr(sys.modules["vllm"], "__version__", version, raising=False)
    del v2.DFlashSpeculator._store_hidden_states
    register()
    build(v2)
    lines = [line for line in log() if "no zero-copy route" in line]
    assert len(lines) == (version == "0.99.0") and all("_store_hidden_states is not there" in line for line in lines)


def test_hooks_go_in_once(v2: types.SimpleNamespace, log: Callable) -> None:
    """vLLM loads plugins once per process; a forked worker or a test may do so again."""
    register()
    register()
    build(v2)
    first = v2.EagleSpeculator.propose
    drafter = build(v2)
    assert v2.EagleSpeculator.propose is first
    bases = [base.__name__ for base in type(drafter).__mro__]
    assert bases.count("FusedCombine") == bases.count("LoadsScales") == 1
    assert not [line for line in log() if "stays with vLLM" in line]
    assert v2.models[EAGLE3].inspect_model_cls() == "info of Eagle3LlamaForCausalLM"


@pytest.mark.parametrize(
    ("architecture", "offset"), [("DeepSeekMTPModel", 0.0), ("Step3p5MTP", 1.0)], ids=["deepseek", "step3p5"]
)
def test_mtp_input_stage(vllm: types.SimpleNamespace, log: Callable, architecture: str, offset: float) -> None:
    positions, embeds, hidden = torch.arange(T), torch.randn(T, H), torch.randn(T, H)
    torch.manual_seed(1)
    own = build(vllm, architecture)
    names = list(own.state_dict())
    register()
    torch.manual_seed(1)
    fused = build(vllm, architecture)
    assert list(fused.state_dict()) == names == [name for name, _ in fused.named_parameters()]
    layer, own_layer = fused.model.layers["61"], own.model.layers["61"]
    arguments = (None, positions, hidden, embeds)
    assert_close(layer(*arguments), own_layer(*arguments))
    assert layer.eh_proj.projection.norm_offset == offset
    for loaded in (own, fused):  # new weights, loaded later
        torch.manual_seed(2)
        for parameter in loaded.parameters():
            parameter.data.copy_(torch.randn_like(parameter))
    assert_close(layer(*arguments), own_layer(*arguments))
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert_close(compiled(*arguments), own_layer(*arguments))
    assert f"{type(layer).__name__}.eh_proj runs norm_concat_linear; forced, not timed" in log()


QWEN3 = "Eagle3Qwen3ForCausalLM"
LAYER0 = "Qwen3Eagle3DecoderLayer.qkv_proj"


def pack(model: nn.Module) -> None:
    linear = model.layers[0].self_attn.qkv_proj
    linear.quant_method.process_weights_after_loading(linear)


def test_a_layer_0_without_a_weight_of_that_name_stays_with_a_line(
    vllm: types.SimpleNamespace, log: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPTQ's is qweight, which on a CPU was an AttributeError in the log."""
    build_linear = stand_in.QKVParallelLinear.__init__

    def packed(self: nn.Module, *sizes: int) -> None:
        build_linear(self, *sizes)
        self.quant_method, self.qweight = stand_in.Fp8LinearMethod(), self.weight
        del self.weight

    monkeypatch.setattr(stand_in.QKVParallelLinear, "__init__", packed)
    register()
    layer = build(vllm, QWEN3).model.layers[0]
    assert type(layer.self_attn.qkv_proj) is stand_in.QKVParallelLinear
    lines = [line for line in log() if "qkv_proj" in line or "layer 0" in line]
    assert lines == [f"{LAYER0} stays with vLLM: its quant_method is Fp8LinearMethod"]


@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_layer_0(vllm: types.SimpleNamespace, log: Callable, norm_before_residual: bool) -> None:
    positions, embeds, hidden = torch.arange(T), torch.randn(T, H), torch.randn(T, H)
    own = build(vllm, QWEN3, pack, norm_before_residual=norm_before_residual)
    names = list(own.state_dict())
    register()
    fused = build(vllm, QWEN3, pack, norm_before_residual=norm_before_residual)
    assert list(fused.state_dict()) == names == [name for name, _ in fused.named_parameters()]
    layer = fused.model.layers[0]
    assert isinstance(layer.self_attn.qkv_proj, normed_linear().NormedLinear)
    own = type(layer)(norm_before_residual)
    arguments = (positions, embeds, hidden, None)
    for seed in (1, 2):  # new weights, loaded later
        for loaded in (layer, own):
            torch.manual_seed(seed)
            for parameter in loaded.parameters():
                parameter.data.copy_(torch.randn_like(parameter))
        for run in (layer, torch.compile(layer, fullgraph=True, backend="eager")):
            for got, expected in zip(run(*arguments), own(*arguments), strict=True):
                assert_close(got, expected)
    assert f"{LAYER0} runs norm_concat_linear; forced, not timed" in log()


@pytest.mark.parametrize(("ours", "runs"), [((0.9, 0.9, 0.9, 0.9), True), ((0.5, 0.5, 0.5, 1.0), False)])
def test_layer_0_has_the_faster_layout_of_its_weight(
    vllm: types.SimpleNamespace, decides: Callable, log: Callable, ours: tuple, runs: bool
) -> None:
    timed = decides(VLLMS, ours)
    layer = build(vllm, QWEN3, pack).model.layers[0]
    linear = layer.self_attn.qkv_proj
    assert timed == [2]
    assert isinstance(linear, normed_linear().NormedLinear) == runs
    assert (linear.weight.numel() > 0) == runs
    arguments = (torch.arange(T), torch.randn(T, H), torch.randn(T, H), None)
    qkv, residual = layer(*arguments)
    assert qkv.shape == (T, H) and residual is arguments[2]
    (line,) = [line for line in log() if LAYER0 in line]
    says = "runs norm_concat_linear; T=1 900 ms" if runs else "stays with vLLM: norm_concat_linear is not faster at all"
    assert line.startswith(f"{LAYER0} {says}")


@pytest.mark.parametrize("reason", ["lora", "indexer", "batch-invariant", "another-class", "another-body", "fails"])
def test_layer_0_stays_with_the_engine(
    vllm: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, log: Callable, reason: str
) -> None:
    """Its weight is then packed, as vLLM packs it."""
    from eagle_kernels.engines import projection

    attention = sys.modules[f"{MODELS}.qwen3"].Qwen3Attention
    layer_class = sys.modules[f"{MODELS}.qwen3_eagle3"].Qwen3Eagle3DecoderLayer
    if reason == "another-class":
        layer_class.__qualname__ = "Theirs"
    elif reason == "another-body":
        attention.forward = lambda self, positions, hidden_states: self.qkv_proj(hidden_states)[0][:, :H]
    elif reason == "indexer":
        attention.indexer = nn.Identity()
    elif reason == "fails":
        monkeypatch.setattr(projection, "project", failing)
    vllm.envs.VLLM_BATCH_INVARIANT = reason == "batch-invariant"
    register()
    config = types.SimpleNamespace(max_loras=1) if reason == "lora" else None
    layer = build(vllm, QWEN3, pack, lora_config=config).model.layers[0]
    linear = layer.self_attn.qkv_proj
    assert not isinstance(linear, normed_linear().NormedLinear) and linear.weight.numel() == 0
    layer(torch.arange(T), torch.randn(T, H), torch.randn(T, H), None)
    says = {
        "lora": f"{LAYER0} stays with vLLM: LoRA is on, which replaces it",
        "indexer": f"{LAYER0} stays with vLLM: an indexer reads the normed states too",
        "batch-invariant": f"{LAYER0} stays with vLLM: VLLM_BATCH_INVARIANT=1 wants vLLM's own",
        "another-class": f"stays with vLLM: its layer 0 is a {MODELS}.qwen3_eagle3.Theirs",
        "another-body": f"Eagle3Qwen3ForCausalLM's layer 0 stays with vLLM: {MODELS}.qwen3:Qwen3Attention.forward",
        "fails": f"{LAYER0} stays with vLLM: norm_concat_linear does not run here: no more",
    }
    assert len([line for line in log() if says[reason] in line]) == 1


CONTEXT = "DFlashQwen3Model.precompute_and_store_context_kv"
CONTEXT_OPS = "norm_concat_linear and store_context_kv"


def caches(model: nn.Module, store: Callable, states: Tensor, positions: Tensor, slots: object) -> list[Tensor]:
    for attention in model._attn_layers:
        attention.kv_cache.zero_()
    store(states, positions, slots)
    return [attention.kv_cache.clone() for attention in model._attn_layers]


def same_context(model: nn.Module, rows: int = T, slots: object = ...) -> bool:
    """Whether the model writes the same as vLLM's own methods, with its current buffers."""
    states, positions = torch.randn(rows, D), torch.randperm(32)[:rows]
    slots = torch.arange(rows) % 8 if slots is ... else slots
    got = caches(model, model.precompute_and_store_context_kv, states, positions, slots)
    ours = {name: model.__dict__.pop(name) for name in METHODS if name in vars(model)}
    expected = caches(model, model.precompute_and_store_context_kv, states, positions, slots)
    vars(model).update(ours)
    for written, theirs in zip(got, expected, strict=True):
        assert_close(written, theirs)
    return True


METHODS = ("precompute_and_store_context_kv", "_project_context_kv")


@pytest.mark.parametrize(
    "slots",
    [
        pytest.param(torch.tensor([7, 0, 3, 1, 2]), id="slots"),
        pytest.param([torch.arange(T), torch.arange(T) + 2], id="slots-of-each-layer"),
        pytest.param([None, torch.arange(T)], id="a-layer-left-out"),
        pytest.param(None, id="profiling"),
    ],
)
@pytest.mark.parametrize("v_scale", [None, 0.25])
def test_the_context_of_dflash(
    vllm: types.SimpleNamespace, log: Callable, ops: list[str], slots: object, v_scale: float | None
) -> None:
    register()
    model = build(vllm, DFLASH).model
    model.layers[0].self_attn.v_scale = v_scale
    before = len(ops)
    assert same_context(model, slots=slots) and ops[before:] == ["norm_concat_linear"]
    assert any(cache.kv_cache.any() for cache in model._attn_layers) == (slots is not None)
    model._build_context_kv_buffers([], False)  # new weights, loaded later
    assert same_context(model, slots=slots) and len(ops) == before + 2
    assert f"{CONTEXT} runs {CONTEXT_OPS}; forced, not timed" in log()


def test_interleaved_heads_and_a_cache_of_another_dtype(vllm: types.SimpleNamespace) -> None:
    """RoPE on pairs of neighboring columns, and cos and sin in float64: the op takes neither."""
    register()
    model = build(vllm, DFLASH, lambda model: setattr(model, "_rope_is_neox", False)).model
    assert "precompute_and_store_context_kv" not in vars(model)  # the stand-in rotates halves: the probe differs
    model = build(vllm, DFLASH, lambda model: setattr(model, "_rope_cos_sin_cache", torch.randn(32, 4).double())).model
    assert same_context(model)


@pytest.mark.parametrize(
    ("ours", "ran", "says"),
    [
        ((0.5, 0.5, 0.5, 0.5), [1, 4, 20], f"runs {CONTEXT_OPS}; T=1 500 ms"),
        ((0.5, 0.5, 2.0, 2.0), [1, 4], f"runs {CONTEXT_OPS} where it is faster; T=1 500 ms"),
        ((2.0, 2.0, 2.0, 2.0), [], f"stays with vLLM: {CONTEXT_OPS} are not faster, T=1 2e+03 ms"),
    ],
)
def test_the_context_runs_where_that_is_faster(
    vllm: types.SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    log: Callable,
    ops: list,
    ours: tuple,
    ran: list,
    says: str,
) -> None:
    monkeypatch.delenv("EAGLE_KERNELS_VLLM")
    monkeypatch.setattr(decision, "seconds_per_call", lambda *_: [list(VLLMS), list(ours)])
    register()
    model = build(vllm, DFLASH).model
    for rows in (1, 4, 20):
        before = len(ops)
        same_context(model, rows)
        assert len(ops) - before == (rows in ran)
    (line,) = [line for line in log() if CONTEXT in line]
    assert line.startswith(f"{CONTEXT} {says}")


def test_what_is_timed_are_both_methods(vllm: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EAGLE_KERNELS_VLLM")
    timed = []

    def seconds_per_call(calls: list[Callable], rows: tuple, width: int, like: Tensor) -> list[list[float]]:
        timed.extend(call(torch.randn(40, width)) for call in calls)
        return [list(VLLMS), [0.5] * 4]

    monkeypatch.setattr(decision, "seconds_per_call", seconds_per_call)
    register()
    build(vllm, DFLASH)
    own, ours = timed
    assert own is None and [tuple(x.shape) for x in ours] == [(2, 40, 2, 4)] * 2


def test_the_projection_alone_runs_where_no_kernel_stores_keys(
    vllm: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, log: Callable, ops: list
) -> None:
    """On a GPU without Triton."""
    register()
    choose, reference = plan.choose_backend, ("reference", "no cuda kernel stores context KV")
    others = lambda op, *more: reference if op == "store_context_kv" else choose(op, *more)  # noqa: E731
    monkeypatch.setattr(plan, "choose_backend", others)
    model = build(vllm, DFLASH).model
    before = len(ops)
    assert same_context(model) and len(ops) == before + 1
    assert [name for name in METHODS if name in vars(model)] == ["_project_context_kv"]
    assert [line for line in log() if "no kernels of ours for it, no cuda kernel stores context KV" in line]
    assert [line for line in log() if line.startswith("DFlashQwen3Model._project_context_kv runs norm_concat_linear; ")]


def test_a_norm_with_one_gain_for_all_layers(
    vllm: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, log: Callable
) -> None:
    """vLLM's norm on a CPU, and formerly on XPU (vllm#56431): replaced even where the rest stays with vLLM."""
    right = stand_in.custom_ops.rms_norm

    def of_layer_0(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
        right(out, x, weight if weight.dim() == 1 else weight[0], eps)

    monkeypatch.setattr(stand_in.custom_ops, "rms_norm", of_layer_0)
    register()
    for change in (id, lambda model: setattr(model, "_fused_kv_weight", None)):
        model = build(vllm, DFLASH, change).model
        keys, expected = torch.randn(2, T, 2, 4), torch.empty(2, T, 2, 4)
        right(expected, keys, model._k_norm_weights, 1e-2)
        assert_close(model._normalize_context_k(keys), expected)
    line = "DFlashQwen3Model norms the keys of its context layer by layer: vLLM's norm has one gain for all layers here"
    assert [said for said in log() if said.startswith(line)]


@pytest.mark.parametrize("reason", ["quantized", "fails", "another-body", "other-values", "too-wide"])
def test_a_context_that_stays_with_the_engine(
    vllm: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, log: Callable, reason: str
) -> None:
    def change(model: nn.Module) -> None:
        if reason == "quantized":
            model._fused_kv_weight = None

    register()
    context = sys.modules["eagle_kernels.engines.vllm.context"]
    if reason == "another-body":
        model_class = sys.modules[f"{MODELS}.qwen3_dflash"].DFlashQwen3Model
        model_class._project_context_kv = lambda self, context_states, num_ctx, num_layers, num_kv_heads, head_dim: None
    if reason == "other-values":
        own = context.store_context_kv
        monkeypatch.setattr(context, "store_context_kv", lambda record: own(record._replace(eps=9.0)))
    if reason == "too-wide":
        monkeypatch.setattr(context, "MAX_HEAD_DIM", 3)
    model = build(vllm, DFLASH, change).model
    keys = f"the norm and rotation of keys in {CONTEXT} stays with vLLM: "
    says = {
        "quantized": f"{CONTEXT} stays with vLLM: its K and V are quantized",
        "another-body": f"K and V stays with vLLM: {MODELS}.qwen3_dflash:DFlashQwen3Model._project_context_kv has",
        "fails": f"{CONTEXT} stays with vLLM, {CONTEXT_OPS} failed: RuntimeError('no more')",
        "other-values": f"{keys}{CONTEXT_OPS} give other values than vLLM: ",
        "too-wide": f"{keys}heads of 4 columns, and at most 3 are supported",
    }
    if reason == "fails":
        monkeypatch.setattr(context, "store_context_kv", failing)
        assert same_context(model)
    left = {"fails": [METHODS[0]], "other-values": [METHODS[1]], "too-wide": [METHODS[1]]}
    assert [name for name in METHODS if name in vars(model)] == left.get(reason, [])
    if reason != "another-body":
        assert reason == "quantized" or same_context(model)
    assert len([line for line in log() if says[reason] in line]) == 1


def test_mtp_with_an_unknown_norm_stays_with_the_engine(vllm: types.SimpleNamespace, log: Callable) -> None:
    register()
    layer = build(vllm, "DeepSeekMTPModel").model.layers["61"]
    mtp = sys.modules["eagle_kernels.engines.vllm.mtp"]
    other = type(layer)()
    other.hnorm = nn.RMSNorm(H)
    config = sys.modules["eagle_kernels.engines.vllm.registry"].Config(T, False, False)
    assert not mtp.fuse(mtp.stages_of(other, mtp.LAYERS[0], config))
    assert type(other.eh_proj) is nn.Linear and type(other.enorm) is stand_in.RMSNorm
    assert (
        "DeepSeekMultiTokenPredictorLayer.eh_proj stays with vLLM: its norm is a torch.nn.modules.normalization.RMSNorm"
        in log()
    )


def theirs(vllm: types.SimpleNamespace) -> type[nn.Module]:
    class Theirs(vllm.Eagle3):
        def combine_hidden_states(self, hidden_states: Tensor) -> Tensor:
            return hidden_states[..., :D] * 0

    return Theirs


def test_another_plugins_class_keeps_its_method(vllm: types.SimpleNamespace, log: Callable, ops: list[str]) -> None:
    vllm.models[EAGLE3] = stand_in.Entry(theirs(vllm))
    register()
    drafter = build(vllm)
    assert not drafter.combine_hidden_states(torch.randn(T, K * H)).any() and ops == []
    (line,) = [line for line in log() if "Theirs" in line]
    assert re.search(r"Theirs stays with vLLM: combine_hidden_states is that of \S+, not vLLM's own", line)


def test_another_plugins_class_that_inherits_the_method_is_served(vllm: types.SimpleNamespace, ops: list[str]) -> None:
    vllm.models[EAGLE3] = stand_in.Entry(type("Theirs", (vllm.Eagle3,), {}))
    register()
    build(vllm).combine_hidden_states(torch.randn(T, K * H))
    assert ops == ["norm_concat_linear"]


def renamed(drafter: type) -> None:
    drafter.combine_states = drafter.combine_hidden_states
    del drafter.combine_hidden_states


def with_another_parameter(drafter: type) -> None:
    original = drafter.combine_hidden_states

    def combine_hidden_states(self: nn.Module, hidden_states: Tensor, scale: float = 1.0) -> Tensor:
        return original(self, hidden_states) * scale

    combine_hidden_states.__module__ = drafter.__module__
    drafter.combine_hidden_states = combine_hidden_states


def with_another_body(drafter: type) -> None:
    original = drafter.combine_hidden_states

    def combine_hidden_states(self: nn.Module, hidden_states: Tensor) -> Tensor:
        return original(self, 2 * hidden_states)

    combine_hidden_states.__module__ = drafter.__module__
    drafter.combine_hidden_states = combine_hidden_states


def moved(drafter: type) -> None:
    drafter.combine_hidden_states.__module__ = "vllm.models.llama.eagle3"


TARGET = f"{MODELS}.llama_eagle3:{COMBINE}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(renamed, "combine_hidden_states is not there", id="renamed"),
        pytest.param(
            with_another_parameter, f"{TARGET} takes ['self', 'hidden_states', 'scale'], and the hook", id="parameter"
        ),
        pytest.param(with_another_body, f"{TARGET} has another body (", id="body"),
        pytest.param(moved, "combine_hidden_states is that of vllm.models.llama.eagle3, not vLLM's own", id="moved"),
    ],
)
def test_the_next_versions_drafter_is_named_and_left_alone(
    vllm: types.SimpleNamespace, log: Callable, ops: list[str], change: Callable, message: str
) -> None:
    """The other drafters and the MTP layers still run on the ops."""
    change(vllm.Eagle3)
    vllm.root.__version__ = "0.34.0"
    register()
    for _ in range(2):
        loaded = vllm.models[EAGLE3].load_model_cls()
        assert getattr(loaded, "combine_hidden_states", None) is getattr(vllm.Eagle3, "combine_hidden_states", None)
    (line,) = [line for line in log() if line.startswith(f"{MODELS}.llama_eagle3")]
    assert line.startswith(f"{MODELS}.llama_eagle3.Eagle3LlamaForCausalLM stays with vLLM: {message}")
    build(vllm, LAGUNA).combine_hidden_states(torch.randn(T, K * H))
    assert ops == ["norm_concat_linear"]
    assert isinstance(build(vllm, "DeepSeekMTPModel").model.layers["61"].eh_proj, normed_linear().NormedLinear)


def normed_linear() -> types.ModuleType:
    return sys.modules["eagle_kernels.engines.vllm.normed_linear"]


def test_the_next_versions_mtp_layer_is_named_and_left_alone(
    vllm: types.SimpleNamespace, log: Callable, ops: list[str]
) -> None:
    layer = sys.modules[f"{MODELS}.deepseek_mtp"].DeepSeekMultiTokenPredictorLayer
    with_another_forward(layer)
    register()
    fc = build(vllm, "DeepSeekMTPModel").model.layers["61"].eh_proj
    assert type(fc) is nn.Linear
    (line,) = [line for line in log() if line.startswith(MODELS)]
    assert re.match(rf"{MODELS}.deepseek_mtp.DeepSeekMTP stays with vLLM: \S+Layer.forward has another body", line)
    assert isinstance(build(vllm, "Step3p5MTP").model.layers["61"].eh_proj, normed_linear().NormedLinear)
    build(vllm).combine_hidden_states(torch.randn(T, K * H))
    assert ops == ["norm_concat_linear"]


def with_another_forward(layer: type[nn.Module]) -> None:
    def forward(
        self: nn.Module,
        input_ids: None,
        positions: Tensor,
        previous_hidden_states: Tensor,
        inputs_embeds: Tensor,
        spec_step_index: int = 0,
    ) -> Tensor:
        hidden = previous_hidden_states / 2
        return self.eh_proj(torch.cat([self.enorm(inputs_embeds), self.hnorm(hidden)], -1))

    layer.forward = forward


def test_the_next_versions_speculator_is_named_and_left_alone(
    v2: types.SimpleNamespace, log: Callable, ops: list[str]
) -> None:
    original = v2.EagleSpeculator.propose

    def propose_otherwise(
        self: object,
        input_batch: object,
        attn_metadata: object,
        slot_mappings: object,
        last_hidden_states: Tensor,
        aux_hidden_states: list[Tensor],
        num_sampled: object = None,
        dummy_run: bool = False,
    ) -> object:
        aux = [2 * states for states in aux_hidden_states]
        return original(self, input_batch, attn_metadata, slot_mappings, last_hidden_states, aux)

    v2.EagleSpeculator.propose = propose_otherwise
    register()
    drafter, aux = build(v2), [torch.randn(T, H) for _ in range(K)]
    assert v2.EagleSpeculator.propose is propose_otherwise
    assert hasattr(v2.DFlashSpeculator._store_hidden_states, "eagle_kernels_original")
    (line,) = [line for line in log() if "EagleSpeculator" in line]
    assert line.startswith(f"no zero-copy route: {SPECULATORS}.eagle.speculator:EagleSpeculator.propose has another b")
    propose(v2.EagleSpeculator(drafter, T), aux)
    assert ops == ["norm_concat_linear"]  # by combine_hidden_states


def test_a_next_version_without_our_key_in_its_compile_cache_keeps_its_graphs(
    vllm: types.SimpleNamespace, log: Callable, ops: list[str]
) -> None:
    vllm.envs.compile_factors = lambda: {}
    register()
    assert type(build(vllm, "DeepSeekMTPModel").model.layers["61"].eh_proj) is nn.Linear
    assert (
        "the input stage of MTP layers stays with vLLM: vllm.envs:compile_factors leaves EAGLE_KERNELS_VLLM out of the "
        "key of the compile caches" in log()
    )
    build(vllm).combine_hidden_states(torch.randn(T, K * H))
    assert ops == ["norm_concat_linear"]


def test_what_a_next_version_asks_of_a_registry_entry_is_the_entrys(vllm: types.SimpleNamespace) -> None:
    stand_in_entry = vllm.models[EAGLE3]
    object.__setattr__(stand_in_entry, "module_hash", "abc")
    register()
    assert vllm.models[EAGLE3] is not stand_in_entry and vllm.models[EAGLE3].module_hash == "abc"
    assert pickle.loads(pickle.dumps(vllm.models["DFlashDraftModel"].__class__)).__name__ == "HookedModel"


def without_its_count(model: nn.Module) -> None:
    model.aux_count = model.num_aux_hidden_states
    del model.num_aux_hidden_states


def test_a_renamed_attribute_of_the_drafter_is_named_and_left_alone(
    vllm: types.SimpleNamespace, log: Callable, ops: list[str]
) -> None:
    register()
    drafter, hidden = build(vllm, change=without_its_count), torch.randn(T, K * H)
    assert torch.equal(drafter.combine_hidden_states(hidden), engines_own(vllm, drafter, hidden)) and ops == []
    (line,) = [line for line in log() if "stays with vLLM" in line]
    assert line.startswith("Eagle3LlamaForCausalLM.combine_hidden_states stays with vLLM: AttributeError(")
    assert "num_aux_hidden_states" in line


def test_a_renamed_layer_of_a_predictor_is_named_and_left_alone(vllm: types.SimpleNamespace, log: Callable) -> None:
    register()
    entry = vllm.models["DeepSeekMTPModel"].entry.entry
    original = entry.model_class.__init__

    def renamed(self: nn.Module, **arguments: object) -> None:
        original(self, **arguments)
        for layer in self.model.layers.values():
            layer.input_proj = layer.eh_proj
            del layer.eh_proj

    entry.model_class.__init__ = renamed
    build(vllm, "DeepSeekMTPModel")
    (line,) = [line for line in log() if "stays with vLLM" in line]
    assert line.startswith("DeepSeekMTP's input stage stays with vLLM: AttributeError(") and "eh_proj" in line


def test_an_architecture_that_is_gone_is_named(vllm: types.SimpleNamespace, log: Callable) -> None:
    del vllm.models[EAGLE3]
    register()
    assert [
        line
        for line in log()
        if line.startswith(EAGLE3) and line.endswith("not in vLLM's registry, and stay untouched")
    ]


def untouched(vllm: types.SimpleNamespace) -> bool:
    return all(type(entry) is stand_in.Entry for entry in vllm.models.values())


@pytest.mark.parametrize("architecture", ["DeepSeekMTPModel", QWEN3, DFLASH])
def test_what_is_fused_is_not_fused_again(vllm: types.SimpleNamespace, architecture: str) -> None:
    """A second load of the weights finds the projection that the first one installed."""

    def ours(model: nn.Module) -> list[object]:
        parts = [type(module) for module in model.modules()]
        return [part for part in parts if part.__module__.startswith("eagle_kernels.engines")] + [
            vars(model.model).get("precompute_and_store_context_kv")
        ]

    register()
    model = build(vllm, architecture)
    before = ours(model)
    assert len(before) > 2 or before[-1] is not None  # the drafter itself and its fused parts
    model.process_weights_after_loading()
    assert ours(model) == before


def test_a_target_is_no_drafter(vllm: types.SimpleNamespace) -> None:
    name = "Eagle2_5_VLForConditionalGeneration"
    vllm.models[name] = stand_in.Entry(vllm.models[EAGLE3].load_model_cls())
    register()
    assert type(vllm.models[name]) is stand_in.Entry


@pytest.mark.parametrize("switch", ["1", "0"])
@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        (EAGLE3, "fc"),
        ("DeepSeekMTPModel", "layers.61.eh_proj"),
        ("NewMTPModel", "layers.61.eh_proj"),
        ("K3DSparkModel", "layers.61.eh_proj"),
        ("NewDSparkModel", "layers.61.eh_proj"),
    ],
)
def test_a_quantized_projection_is_loaded_with_its_scale(
    vllm: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, architecture: str, name: str, switch: str
) -> None:
    """And again after an update of the weights; without the part vLLM loads the codes as dense values."""
    monkeypatch.setenv("EAGLE_KERNELS_VLLM_SCALES", switch)
    for added in ("NewMTPModel", "K3DSparkModel", "NewDSparkModel"):
        vllm.models[added] = stand_in.Entry(vllm.models["DeepSeekMTPModel"].load_model_cls())
    register()
    model = build(vllm, architecture)
    weight = model.model.get_submodule(name).weight
    for factor in (1.0, 2.0):
        quantized = ek.quantize(factor * torch.randn(weight.shape), "fp8_row")
        model.load_weights({f"{name}.weight": quantized.codes, f"{name}.weight_scale": quantized.scales}.items())
        expected = quantized.dequantize(weight.dtype) if switch == "1" else quantized.codes.to(weight.dtype)
        assert torch.equal(weight, expected)


@pytest.mark.parametrize(
    ("variables", "lines"),
    [
        pytest.param({"EAGLE_KERNELS_VLLM": "0"}, [], id="switched-off"),
        pytest.param(
            {"EAGLE_KERNELS_VLLM": "yes"},
            ["EAGLE_KERNELS_VLLM is 'yes', expected one of ('auto', '0', '1', 'force'); read as 0"],
            id="garbage",
        ),
    ],
)
def test_off_means_untouched(
    vllm: types.SimpleNamespace,
    log: Callable,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    lines: list[str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    register()
    register()
    assert untouched(vllm) and log() == lines and vllm.envs.environment_variables == {}


def test_a_failing_registry_does_not_reach_the_engine(
    vllm: types.SimpleNamespace, log: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, f"{MODELS}.registry")
    register()
    missing = f"stays with vLLM: {MODELS}.registry:ModelRegistry.models is not there"
    parts = [line.partition(f" {missing}")[0] for line in log() if missing in line]
    assert parts == [
        "combine_hidden_states",
        "K and V of DFlash drafters",
        "the input stage of MTP layers",
        "layer 0 of EAGLE-3 drafters",
        "the scales of quantized drafters",
    ]


def test_the_key_of_the_compile_caches_says_what_is_in_the_graphs(
    vllm: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is empty without MTP layers and embeddings: combine_hidden_states is outside the graphs. It had layers that
    vLLM does not compile, so that another decision about one made vLLM compile the target anew."""
    monkeypatch.setenv("EAGLE_KERNELS_VLLM_SCALES", "0")  # it hooks the same classes, after the other parts
    monkeypatch.setenv("EAGLE_KERNELS_VLLM_MTP", "0")
    monkeypatch.setenv("EAGLE_KERNELS_VLLM_LAYER0", "0")
    register()
    assert vllm.envs.environment_variables == {}
    monkeypatch.setenv("EAGLE_KERNELS_VLLM_MTP", "1")
    register()
    before = vllm.envs.compile_factors()["EAGLE_KERNELS_VLLM"]
    assert before.endswith("combine,context,mtp,zero_copy")
    build(vllm, "DeepSeekMTPModel")
    assert vllm.envs.compile_factors()["EAGLE_KERNELS_VLLM"] == before  # vLLM does not compile it
    own = vllm.models["DeepSeekMTPModel"].load_model_cls().__base__
    monkeypatch.setattr(own, "do_not_compile", False, raising=False)  # as classes that vLLM compiles have it
    build(vllm, "DeepSeekMTPModel")
    after = vllm.envs.compile_factors()["EAGLE_KERNELS_VLLM"]
    assert after == f"{before},DeepSeekMultiTokenPredictorLayer.eh_proj"
