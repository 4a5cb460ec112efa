"""The SGLang plugin on a stand-in for SGLang: what is hooked, what stays with the engine, and what is said about it.

`tests/engines/sglang` runs the same hooks on SGLang's own classes and in the real engine (`make test-sglang`).
"""

import enum
import importlib
import logging
import sys
import types
from collections import defaultdict
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from eagle_kernels.engines import eligibility, sglang
from eagle_kernels.engines.eligibility import find_target
from eagle_kernels.engines.sglang import hooks, projection
from eagle_kernels.engines.sglang.unsupported import rms_norm_unsupported_reason

K, H, D = 3, 8, 5
FORWARD = "sglang.srt.models.llama_eagle3:LlamaModel.forward"
REGISTRY = "sglang.srt.plugins.hook_registry"


class HookType(enum.Enum):
    AROUND, AFTER, REPLACE = "around", "after", "replace"


class HookRegistry:
    """As SGLang's: applies what was registered later, and only logs what it fails to apply."""

    hooks: defaultdict
    unable: set

    @classmethod
    def register(cls, target: str, hook: object, hook_type: HookType) -> None:
        cls.hooks[target].append((hook, hook_type))

    @classmethod
    def apply_hooks(cls) -> None:
        for target, entries in cls.hooks.items():
            if target in cls.unable:
                logging.getLogger(REGISTRY).error("Failed to apply hooks to %s", target)
                continue
            path, _, name = target.rpartition(".")
            owner = cls._resolve(path)
            for hook, hook_type in entries:
                setattr(owner, name, cls._wrapped(getattr(owner, name), hook, hook_type))

    @staticmethod
    def _resolve(path: str) -> object:
        module, _, name = path.rpartition(".")
        return sys.modules.get(path) or getattr(sys.modules[module], name)

    @staticmethod
    def _wrapped(original: object, hook: object, hook_type: HookType) -> object:
        if hook_type is HookType.AROUND:
            return lambda *args, **kwargs: hook(original, *args, **kwargs)
        return hook if hook_type is HookType.REPLACE else lambda *args, **kwargs: hook(None, *args, **kwargs)


class UnquantizedLinearMethod:
    pass


class RMSNorm(nn.Module):
    def __init__(self, **fields: object) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(H).bfloat16(), requires_grad=False), 1e-5
        for name, value in fields.items():
            setattr(self, name, value)


class GemmaRMSNorm(RMSNorm):
    pass


ALL_HOOKS = {part: importlib.import_module(f"eagle_kernels.engines.sglang.{part}").HOOKS for part in sglang.PARTS}


def function(parameters: object) -> object:
    scope: dict = {}
    exec(f"def target({', '.join(parameters or ('*args', '**kwargs'))}): return 'engine'", scope)
    return scope["target"]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[dict]:
    """Modules by name: SGLang as far as the hooks look, and the plugin as a fresh process has it."""
    HookRegistry.hooks, HookRegistry.unable = defaultdict(list), set()
    monkeypatch.setattr(HookRegistry, "apply_hooks", HookRegistry.apply_hooks)
    monkeypatch.setattr(hooks, "_registered", [])
    members: dict[str, dict] = {
        "sglang": {"__version__": sglang.LAST_VERSION},
        REGISTRY: {"HookRegistry": HookRegistry, "HookType": HookType},
        "sglang.srt.layers.quantization.unquant": {"UnquantizedLinearMethod": UnquantizedLinearMethod},
        "sglang.srt.layers.layernorm": {"RMSNorm": RMSNorm, "GemmaRMSNorm": GemmaRMSNorm},
        "sglang.srt.batch_invariant_ops": {"is_batch_invariant_mode_enabled": lambda: False},
    }
    for hook in (hook for part in ALL_HOOKS.values() for hook in part):
        module, _, path = hook.target.partition(":")
        names, owner = path.split("."), members.setdefault(module, {})
        if len(names) == 1:
            owner[path] = type(path, (list,), {}) if hook.kind == "REPLACE" else function(hook.parameters)
            continue
        owner = owner.setdefault(names[0], type(names[0], (), {}))
        if hook.kind != "ADD":
            setattr(owner, names[1], function(hook.parameters))
    modules = {}
    for name, fields in members.items():
        modules[name] = types.ModuleType(name)
        vars(modules[name]).update(fields)
        monkeypatch.setitem(sys.modules, name, modules[name])
    eligibility.clear_logged()
    caplog.set_level(logging.INFO)
    yield modules
    eligibility.clear_logged()


def load() -> None:
    """As SGLang's load_plugins."""
    sglang.register()
    HookRegistry.apply_hooks()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = [record for record in caplog.records if record.name == "sglang.eagle_kernels"]
    return [record.getMessage() for record in records if record.levelno >= logging.WARNING]


def hooked_targets() -> set[str]:
    return set(HookRegistry.hooks)


def targets(*parts: str) -> set[str]:
    return {hook.target.replace(":", ".") for part in parts for hook in ALL_HOOKS[part] if hook.kind != "ADD"}


def test_every_part_is_hooked_and_reported(engine: dict, caplog: pytest.LogCaptureFixture) -> None:
    load()
    assert hooked_targets() == targets(*sglang.PARTS)
    assert not warnings(caplog)
    assert "hooks of capture, gemma3_capture, mtp, projection, vocab are active" in caplog.text
    added = engine["sglang.srt.models.gemma4_mm"].Gemma4ForConditionalGeneration.get_embed_and_head_for_draft
    assert added.__module__ == "eagle_kernels.engines.sglang.vocab"


def test_the_second_register_changes_nothing(engine: dict, caplog: pytest.LogCaptureFixture) -> None:
    sglang.register()
    load()
    assert all(len(entries) == len(set(entries)) for entries in HookRegistry.hooks.values())
    assert len(HookRegistry.hooks[FORWARD.replace(":", ".")]) == 1
    assert not warnings(caplog)


@pytest.mark.parametrize(
    ("variables", "parts"),
    [
        pytest.param({"EAGLE_KERNELS_SGLANG": "0"}, (), id="all-off"),
        pytest.param({"EAGLE_KERNELS_VLLM": "0"}, tuple(sglang.PARTS), id="another-engine's"),
        pytest.param(
            {"EAGLE_KERNELS_SGLANG_CAPTURE": "0", "EAGLE_KERNELS_SGLANG_VOCAB": "0"},
            ("projection", "mtp", "gemma3_capture"),
            id="two-off",
        ),
    ],
)
def test_switches(engine: dict, monkeypatch: pytest.MonkeyPatch, variables: dict, parts: tuple) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    load()
    assert hooked_targets() == targets(*parts)


@pytest.mark.parametrize("version", ["0.5.22", "0.5.24", "0.6.0", "0.0.0.dev1+g1234"])
def test_an_unknown_version_is_left_alone(engine: dict, caplog: pytest.LogCaptureFixture, version: str) -> None:
    engine["sglang"].__version__ = version
    load()
    sglang.register()
    assert not hooked_targets()
    (warning,) = warnings(caplog)
    assert f"the plugin is off: SGLang {version} is none of the versions" in warning


def test_a_post_release_is_known(engine: dict) -> None:
    engine["sglang"].__version__ = "0.5.23.post1"
    load()
    assert hooked_targets()


def rename(engine: dict) -> None:
    model = engine["sglang.srt.models.llama_eagle3"].LlamaModel
    model.forward_all = model.forward
    del model.forward


def change_parameters(engine: dict) -> None:
    engine["sglang.srt.models.llama_eagle3"].LlamaModel.forward = function(("self", "batch"))


def fail_to_import(engine: dict) -> None:
    sys.modules["sglang.srt.models.llama_eagle3"] = None  # import raises ModuleNotFoundError


@pytest.mark.parametrize("change", [rename, change_parameters, fail_to_import])
def test_a_changed_target_leaves_its_part_to_the_engine(
    engine: dict, caplog: pytest.LogCaptureFixture, change: object
) -> None:
    change(engine)
    load()
    (warning,) = warnings(caplog)
    assert "projection is off, SGLang runs its own code" in warning and FORWARD in warning
    assert hooked_targets() == targets(*sglang.PARTS) - targets("projection")


def test_a_module_that_dies_on_import(engine: dict, caplog: pytest.LogCaptureFixture, tmp_path: object) -> None:
    """Not an ImportError: a missing CUDA library raises OSError, a version check RuntimeError."""
    del sys.modules["sglang.srt.models.step3p5_mtp"]
    package = types.ModuleType("sglang.srt.models")
    package.__path__ = [str(tmp_path)]
    (tmp_path / "step3p5_mtp.py").write_text("raise RuntimeError('no driver')")
    sys.modules["sglang.srt.models"] = package
    try:
        load()
    finally:
        del sys.modules["sglang.srt.models"]
    (warning,) = warnings(caplog)
    assert "mtp is off" in warning and "step3p5_mtp" in warning and "no driver" in warning


def test_a_hook_that_the_registry_could_not_apply(engine: dict, caplog: pytest.LogCaptureFixture) -> None:
    HookRegistry.unable = {FORWARD.replace(":", ".")}
    load()
    (warning,) = warnings(caplog)
    assert warning == f"eagle_kernels: projection is not whole: SGLang did not apply the hook on {FORWARD}"


def test_a_method_that_is_there_by_now_is_not_added(engine: dict, caplog: pytest.LogCaptureFixture) -> None:
    wrapper = engine["sglang.srt.models.gemma4_mm"].Gemma4ForConditionalGeneration
    wrapper.get_embed_and_head_for_draft = own = function(("self", "draft_embedding"))
    load()
    assert wrapper.get_embed_and_head_for_draft is own
    (warning,) = warnings(caplog)
    assert "vocab is off" in warning and "get_embed_and_head_for_draft exists" in warning


@pytest.mark.parametrize("failure", ["switch", "registry", "version"])
def test_no_failure_reaches_the_engine(
    engine: dict, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failure: str
) -> None:
    if failure == "switch":
        monkeypatch.setenv("EAGLE_KERNELS_SGLANG", "off")
    elif failure == "registry":
        del engine[REGISTRY].HookRegistry
    else:
        del engine["sglang"].__version__
    load()
    (warning,) = warnings(caplog)
    assert "the plugin is off, it failed to register" in warning


def test_two_plugins_on_one_target(engine: dict, caplog: pytest.LogCaptureFixture) -> None:
    HookRegistry.register(FORWARD.replace(":", "."), lambda original, *args, **kwargs: "other", HookType.AROUND)
    load()
    batch = types.SimpleNamespace(spec_info=types.SimpleNamespace(hidden_states=torch.zeros(2, D)))
    assert find_target(FORWARD)[2](drafter(), None, None, batch) == "other"
    assert not warnings(caplog)


def drafter(**changes: object) -> nn.Module:
    """As much of llama_eagle3.LlamaModel as the hook reads."""
    model = nn.Module()
    model.config = types.SimpleNamespace(hidden_size=D, eagle_config=changes.pop("eagle_config", None))
    model.fc = nn.Linear(K * H, D, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    model.num_aux_hidden_states, model.input_norm = K, None
    model.fc_norm = nn.ModuleList([RMSNorm() for _ in range(K)])
    for name, value in changes.items():
        setattr(model, name, value)
    return model


class Fp8Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_size, self.output_size, self.quant_method = K * H, D, object()
        self.weight = nn.Parameter(torch.zeros(D, K * H, dtype=torch.float8_e4m3fn), requires_grad=False)


class LoRA(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base_layer, self.weight = nn.Linear(K * H, D), torch.zeros(D, K * H)


@pytest.mark.parametrize(
    ("changes", "unsupported"),
    [
        pytest.param({}, None, id="eligible"),
        pytest.param({"fc_norm": None}, None, id="no-norm"),
        pytest.param({"fc": nn.Linear(K * H, D, dtype=torch.bfloat16)}, None, id="bias"),
        pytest.param({"fc": Fp8Linear()}, "its quant_method is object", id="quantised"),
        pytest.param({"fc": LoRA()}, "LoRA wraps it", id="lora"),
        pytest.param({"fc": nn.Linear(K * H, D, dtype=torch.float64)}, "its weight is torch.float64", id="dtype"),
        pytest.param({"fc_norm": nn.ModuleList([nn.LayerNorm(H)])}, "its norm is a torch.nn", id="another-norm"),
        pytest.param({"input_norm": GemmaRMSNorm()}, "its norm is a ", id="gain-of-gemma"),
        pytest.param({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is False", id="no-aux"),
    ],
)
def test_eligibility(engine: dict, changes: dict, unsupported: str | None) -> None:
    stage, reason = projection._read(drafter(**changes))
    assert (stage is None) == (unsupported is not None)
    assert (reason or "").startswith(unsupported or "")


@pytest.mark.parametrize(
    ("fields", "unsupported"),
    [
        ({"variance_size_override": 4}, "its norm takes the variance of 4 columns only"),
        ({"cast_x_before_out_mul": True}, "its norm rounds before the gain"),
        ({"has_weight": False}, "its norm has no weight"),
        ({}, None),
    ],
)
def test_norm_eligibility(engine: dict, fields: dict, unsupported: str | None) -> None:
    reason = rms_norm_unsupported_reason(RMSNorm(**fields), torch.bfloat16)
    assert (reason is None) == (unsupported is None) and (reason or "").startswith(unsupported or "")


def test_the_deterministic_mode_keeps_sglangs_kernels(engine: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    from backends import environment_of

    engine["sglang.srt.batch_invariant_ops"].is_batch_invariant_mode_enabled = lambda: True
    assert "batch-invariant mode is on" in projection._read(drafter())[1]
    with environment_of(EAGLE_KERNELS_BATCH_INVARIANT="1"):
        assert projection._read(drafter())[1] is None
