"""The vLLM plugin's hooks on a stand-in for vLLM: what they replace, and what they leave alone and say why.

`tests/engines/vllm` runs them in the real engine, on its CPU runner; the V2 runner's speculators exist here only, and
on a GPU.
"""

import importlib
import re
import sys
import types
from collections.abc import Callable, Iterator

import pytest
import torch
import vllm_stand_in as stand_in
from torch import Tensor, nn
from vllm_stand_in import MODELS, SPECULATORS, D, H, K

from eagle_kernels.engines import eligibility
from eagle_kernels.plan import Kernel
from guards import forbidden

T = 5
EAGLE3, LAGUNA, DFLASH = "LlamaForCausalLMEagle3", "DFlashLagunaForCausalLM", "DFlashDraftModel"


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.SimpleNamespace]:
    """A stand-in vLLM in sys.modules, and the plugin as a fresh process has it. The V2 runner is not imported yet."""
    loaded = {}
    for name, members in stand_in.modules().items():
        loaded[name] = types.ModuleType(name)
        vars(loaded[name]).update(members)
        if not name.startswith(SPECULATORS):
            monkeypatch.setitem(sys.modules, name, loaded[name])
    loaded["vllm"].envs = loaded["vllm.envs"]
    clear_plugin()
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
    vllm: types.SimpleNamespace, architecture: str = EAGLE3, change: Callable[[nn.Module], None] = id, **config: object
) -> nn.Module:
    """What vLLM's loader does: class from the registry, construction, the weights, the model's post-load hook."""
    hf_config = types.SimpleNamespace(**({"norm": "chunk"} | config))
    speculative = types.SimpleNamespace(draft_model_config=types.SimpleNamespace(hf_config=hf_config))
    model_class = vllm.models[architecture].load_model_cls()
    scheduler = types.SimpleNamespace(max_num_batched_tokens=4 * T)
    vllm_config = types.SimpleNamespace(speculative_config=speculative, scheduler_config=scheduler)
    model = model_class(vllm_config=vllm_config).requires_grad_(False)
    change(model.model)
    if hasattr(model, "process_weights_after_loading"):
        model.process_weights_after_loading()
    return model


def engines_own(vllm: types.SimpleNamespace, drafter: nn.Module, hidden: Tensor) -> Tensor:
    own = next(base for base in type(drafter).__mro__ if base.__module__.startswith(MODELS))
    return own.combine_hidden_states(drafter, hidden)


def assert_close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ops that the plugin's projections call, in order."""
    from eagle_kernels.engines import projection

    called: list[str] = []
    for function, op in (("concatenate", "norm_concat"), ("project", "norm_concat_linear")):
        run = getattr(projection, function)

        def counted(*args: object, op: str = op, run: Callable = run) -> Tensor:
            called.append(op)
            return run(*args)

        monkeypatch.setattr(projection, function, counted)
    return called


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


def quantised(model: nn.Module) -> None:
    model.fc.quant_method = stand_in.Fp8LinearMethod()


@pytest.mark.parametrize(
    ("change", "because"),
    [
        pytest.param(quantised, "its quant_method is Fp8LinearMethod", id="quantised"),
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


def test_kernels_are_compiled_at_load_on_a_gpu(
    vllm: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, log: Callable
) -> None:
    """Both forms of input, up to the engine's batch; a GPU that cannot run them keeps the engine's path."""
    from eagle_kernels.engines import projection

    warmed = []
    monkeypatch.setattr(projection, "_on_gpu", lambda fc: True)
    monkeypatch.setattr(projection, "warmup", lambda stage, chunks, **out: warmed.append((chunks, out)))
    register()
    build(vllm)
    build(vllm, "DeepSeekMTPModel")
    shapes = [[tuple(c.shape) for c in (chunks if isinstance(chunks, list) else [chunks])] for chunks, _ in warmed]
    rows = 4 * T
    assert shapes == [[(rows, K * H)], [(rows, H)] * K, [(rows, 2 * H)], [(rows, H)] * 2]
    assert [tuple(out["out"].shape) if out else None for _, out in warmed] == [None, (rows, D), None, (rows, H)]

    def no_kernels(*args: object, **kwargs: object) -> None:
        raise RuntimeError("the GPU has compute capability 7.5")

    monkeypatch.setattr(projection, "warmup", no_kernels)
    drafter, hidden = build(vllm), torch.randn(T, K * H)
    assert torch.equal(drafter.combine_hidden_states(hidden), engines_own(vllm, drafter, hidden))
    assert [line for line in log() if "stays with vLLM: its kernels do not run here: the GPU has compute cap" in line]


@pytest.mark.parametrize("cpu_isa", ["amx_bf16", "scalar"])
def test_fc_stays_dense_where_the_fused_kernel_reads_it(
    vllm: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, cpu_isa: str
) -> None:
    register()
    combine = sys.modules["eagle_kernels.engines.vllm.combine"]
    kernel = Kernel.FUSED if cpu_isa == "amx_bf16" else Kernel.TWO_STEP
    monkeypatch.setattr(combine, "choose", lambda *problem: types.SimpleNamespace(kernel=kernel))
    fc = build(vllm).model.fc
    assert getattr(fc, "_cpu_skip_gemm_dispatch", False) == (cpu_isa == "amx_bf16")


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
    aux = [wide[:, 2 * k * H : (2 * k + 1) * H] for k in range(K)]  # strided, as a sequence-parallel target gives them
    speculator = v2.EagleSpeculator(drafter, T + 2)
    buffer = speculator.hidden_states.data_ptr()
    assert propose(speculator, aux, dummy_run=True) == ("attn", "slots", "sampled", True)
    assert_close(speculator.hidden_states[:T], engines_own(v2, drafter, torch.cat(aux, -1)))
    # The engine's own copy is one of the buffer onto itself.
    assert speculator.received.data_ptr() == speculator.hidden_states.data_ptr() == buffer
    assert speculator.hidden_states[T:].isnan().all()
    assert ops == (["norm_concat"] if norm == "both" else []) + ["norm_concat_linear"]


def test_the_copy_behind_the_zero_copy_route_moves_nothing() -> None:
    """The route rests on it: ATen returns from a copy of a tensor onto itself (64 MB: 4 us; elsewhere: 8 ms). Here all
    of the tensor is memory that traps: a failure is a segmentation fault."""
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
    # The engine concatenates and copies; the drafter's combine_hidden_states is on the ops all the same.
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
    aux = [torch.randn(T + 2, H) for _ in range(K)]
    speculator._store_hidden_states(T, torch.zeros(T, D), aux, staged)
    assert_close(speculator.hidden_states[:T], engines_own(v2, drafter, torch.cat(aux, -1))[:T])
    assert speculator.hidden_states[T:].isnan().all()
    assert speculator.staged == (None if zero_copy else staged)
    # Without a norm a packed input stays with the engine.
    assert ops == (["norm_concat_linear"] if zero_copy or architecture == LAGUNA else [])


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


def test_hooks_go_in_once(v2: types.SimpleNamespace, log: Callable) -> None:
    """vLLM loads plugins once per process; a forked worker or a test may do so again."""
    register()
    register()
    build(v2)
    first = v2.EagleSpeculator.propose
    drafter = build(v2)
    assert v2.EagleSpeculator.propose is first
    assert [base.__name__ for base in type(drafter).__mro__].count("FusedCombine") == 1
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
    assert_close(layer(positions, embeds, hidden), own_layer(positions, embeds, hidden))
    assert layer.eh_proj.projection.norm_offset == offset
    for loaded in (own, fused):  # weights that come later
        torch.manual_seed(2)
        for parameter in loaded.parameters():
            parameter.data.copy_(torch.randn_like(parameter))
    assert_close(layer(positions, embeds, hidden), own_layer(positions, embeds, hidden))
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert_close(compiled(positions, embeds, hidden), own_layer(positions, embeds, hidden))
    assert "MultiTokenPredictorLayer.eh_proj runs norm_concat_linear" in log()


def test_mtp_with_an_unknown_norm_stays_with_the_engine(vllm: types.SimpleNamespace, log: Callable) -> None:
    register()
    layer = build(vllm, "DeepSeekMTPModel").model.layers["61"]
    mtp = sys.modules["eagle_kernels.engines.vllm.mtp"]
    other = type(layer)()
    other.hnorm = nn.RMSNorm(H)
    mtp.fuse(other, T)
    assert type(other.eh_proj) is nn.Linear and type(other.enorm) is stand_in.RMSNorm
    assert (
        "MultiTokenPredictorLayer.eh_proj stays with vLLM: its norm is a torch.nn.modules.normalization.RMSNorm"
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda drafter: None, "combine_hidden_states is not there", id="renamed"),
        pytest.param(
            lambda drafter: setattr(drafter, "combine_hidden_states", lambda self, hidden_states, scale: None),
            "combine_hidden_states takes ['self', 'hidden_states', 'scale'], and the hook was written for",
            id="another-signature",
        ),
    ],
)
def test_a_changed_target_is_named_and_left_alone(
    vllm: types.SimpleNamespace, log: Callable, change: Callable, message: str
) -> None:
    del vllm.Eagle3.combine_hidden_states
    change(vllm.Eagle3)
    register()
    assert vllm.models[EAGLE3].load_model_cls() is vllm.Eagle3
    vllm.models[EAGLE3].load_model_cls()
    (line,) = [line for line in log() if "combine_hidden_states" in line]
    assert line.startswith(f"{MODELS}.llama_eagle3.Eagle3LlamaForCausalLM stays with vLLM: {message}")


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
    entry = vllm.models["DeepSeekMTPModel"].entry
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


@pytest.mark.parametrize(
    ("variables", "version", "lines"),
    [
        pytest.param({"EAGLE_KERNELS_VLLM": "0"}, "0.33.1", [], id="switched-off"),
        pytest.param(
            {},
            "0.34.0",
            ["the plugin is off: vLLM 0.34.0 is none of the versions the hooks were written for, 0.32 to 0.33"],
            id="unknown-version",
        ),
        pytest.param(
            {"EAGLE_KERNELS_VLLM_MTP": "off"},
            "0.33.1",
            [
                'the plugin is off, it failed to register: ValueError("eagle_kernels: EAGLE_KERNELS_VLLM_MTP is '
                "'off', expected one of ('auto', '0', '1')\")"
            ],
            id="misspelt-switch",
        ),
    ],
)
def test_off_means_untouched(
    vllm: types.SimpleNamespace,
    log: Callable,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    version: str,
    lines: list[str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    vllm.root.__version__ = version
    register()
    register()
    assert untouched(vllm) and log() == lines and vllm.envs.environment_variables == {}


def test_a_failing_registry_does_not_reach_the_engine(
    vllm: types.SimpleNamespace, log: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, f"{MODELS}.registry")
    register()
    assert [line for line in log() if line.startswith("the plugin is off, it failed to register: ModuleNotFoundError")]


def test_the_switches_are_part_of_the_compile_caches_key(
    vllm: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = []
    for mtp in ("0", "1"):
        monkeypatch.setenv("EAGLE_KERNELS_VLLM_MTP", mtp)
        register()
        values.append(vllm.envs.environment_variables["EAGLE_KERNELS_VLLM"]())
    assert values[0].endswith("combine,zero_copy") and values[1].endswith("combine,mtp,zero_copy")
