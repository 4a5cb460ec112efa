"""The SGLang plugin on a stand-in for SGLang: what is hooked, what stays with the engine, and what the log says.

`tests/engines/sglang` runs the same hooks on SGLang's own classes and in the real engine (`make test-sglang`).
"""

import ast
import copy
import dataclasses
import importlib
import importlib.util
import logging
import sys
import textwrap
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from backends import environment_of
from eagle_kernels import library
from eagle_kernels.engines import decision, eligibility, row_parallel, sglang
from eagle_kernels.engines.gates import Target, body_hash
from eagle_kernels.engines.projection import relative_difference
from eagle_kernels.engines.sglang import capture, context, hooks, layer0, mtp, projection, stage
from eagle_kernels.engines.sglang.hooks import Hook
from eagle_kernels.engines.sglang.unsupported import rms_norm_unsupported_reason

K, H, D = 3, 8, 5
FORWARD = "sglang.srt.models.llama_eagle3:LlamaModel.forward"


class UnquantizedLinearMethod:
    pass


class RMSNorm(nn.Module):
    def __init__(self, **fields: object) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(H).bfloat16(), requires_grad=False), 1e-5
        for name, value in fields.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gain = self.weight.float() + isinstance(self, GemmaRMSNorm)
        return nn.functional.rms_norm(x.float(), x.shape[-1:], gain, self.variance_epsilon).to(x.dtype)


class GemmaRMSNorm(RMSNorm):
    pass


ALL_HOOKS = {part: importlib.import_module(f"eagle_kernels.engines.sglang.{part}").HOOKS for part in sglang.PARTS}


class Engine:
    """The part of SGLang's source tree that the hooks read, in files that a test may change before their import."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sources: dict[str, dict[str, dict[str, Sequence[object]]]] = {"sglang": {}}
        for hook in (hook for part in ALL_HOOKS.values() for hook in part):
            owner, _, method = hook.target.where.partition(":")[2].partition(".")
            members = self.sources.setdefault(hook.target.module, {}).setdefault(owner, {})
            if hook.kind != "ADD" and (method or hook.target.parameters):
                members[method] = hook.target.parameters or ("*args", "**kwargs")
        for module, owners in self.sources.items():
            path = self.path(module)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n\n".join(_source(owner, members) for owner, members in owners.items()))

    def path(self, module: str) -> Path:
        return self.folder.joinpath(*module.split("."), *(["__init__"] if module == "sglang" else [])).with_suffix(
            ".py"
        )

    def change(self, module: str, before: str, after: str) -> None:
        source = self.path(module).read_text()
        assert before in source
        self.path(module).write_text(source.replace(before, after))

    def import_all(self) -> None:
        """Like SGLang's model registry: a module that fails to import is left out."""
        for module in self.sources:
            try:
                importlib.import_module(module)
            except Exception as failure:
                logging.getLogger("sglang").warning("Ignore import error when loading %s: %s", module, failure)


def _source(owner: str, members: dict[str, Sequence[object]]) -> str:
    def function(name: str, parameters: Sequence[object]) -> str:
        taken = [*parameters[:-1], "other=None"] if parameters[-1] is ... else parameters
        return f"def {name}({', '.join(taken)}):\n    return 'engine'"

    if list(members) == [""]:
        return function(owner, members[""])
    body = "\n\n".join(function(name, parameters) for name, parameters in members.items() if name)
    return f"class {owner}(list):\n" + textwrap.indent(body or "pass", "    ")


def recorded(hook: Hook, engine: Engine) -> Hook:
    """The hook as if it had been written for the stand-in's bodies."""
    return dataclasses.replace(hook, target=with_body(hook.target, engine))


def with_body(target: Target, engine: Engine) -> Target:
    if not target.bodies:
        return target
    path = engine.path(target.module)
    spec = importlib.util.spec_from_file_location(f"recorded_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # inspect finds a class's source through its module
    try:
        spec.loader.exec_module(module)
        value: object = module
        for name in target.where.partition(":")[2].split("."):
            value = getattr(value, name)
        return dataclasses.replace(target, bodies={body_hash(value): ["0.5.23"]})
    finally:
        del sys.modules[spec.name]


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Engine]:
    """The part of SGLang that the hooks read, and the plugin in the state of a fresh process."""
    engine = Engine(tmp_path)
    parts = {part: tuple(recorded(hook, engine) for hook in written) for part, written in ALL_HOOKS.items()}
    monkeypatch.setattr(sglang, "_hooks", parts.__getitem__)
    monkeypatch.setattr(hooks, "_parts", {})
    monkeypatch.setattr(stage, "force", False)
    monkeypatch.setattr(decision, "_settled", {})
    monkeypatch.setattr(hooks, "_FINDER", hooks._Finder())
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.syspath_prepend(tmp_path)
    members = {
        "sglang.srt.layers.quantization.unquant": {"UnquantizedLinearMethod": UnquantizedLinearMethod},
        "sglang.srt.layers.layernorm": {"RMSNorm": RMSNorm, "GemmaRMSNorm": GemmaRMSNorm},
        "sglang.srt.batch_invariant_ops": {"is_batch_invariant_mode_enabled": lambda: False},
        "sglang.srt.runtime_context": {
            "get_parallel": lambda: types.SimpleNamespace(tp_group=types.SimpleNamespace(world_size=1)),
            "get_flags": lambda: types.SimpleNamespace(capture=types.SimpleNamespace(enable_torch_compile=False)),
        },
        "sglang.srt.model_executor.cuda_graph_config": {
            "Backend": types.SimpleNamespace(TC_PIECEWISE=1),
            "Phase": types.SimpleNamespace(PREFILL=1),
            "check_cuda_graph_backend": lambda phase, backend: False,
        },
    }
    for name, fields in members.items():
        module = types.ModuleType(name)
        vars(module).update(fields)
        monkeypatch.setitem(sys.modules, name, module)
    eligibility.clear_logged()
    caplog.set_level(logging.INFO)
    yield engine
    eligibility.clear_logged()
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        del sys.modules[name]


def load(engine: Engine) -> None:
    """In SGLang's order: load_plugins first, the models' modules later."""
    sglang.register()
    engine.import_all()


def messages(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    records = [record for record in caplog.records if record.name == "sglang.eagle_kernels"]
    return [record.getMessage().removeprefix("eagle_kernels: ") for record in records if record.levelno == level]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return messages(caplog, logging.WARNING)


def value_of(where: str) -> object:
    """What a target is now, without importing its module."""
    module, _, path = where.partition(":")
    value: object = sys.modules[module]
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


def is_hooked(hook: Hook) -> bool:
    if hook.kind == "KEEP":
        return True
    value = value_of(hook.target.where)
    if hook.kind == "ADD":
        return value is hook.function
    return hasattr(value, "__wrapped__") or getattr(value, "__name__", "") == "PackedAuxHiddenStates"


def hooked_parts() -> set[str]:
    """The parts whose hooks are all installed and active; one that is half installed is an error."""
    for part, written in ALL_HOOKS.items():
        if hooks._parts.get(part) is not None and hooks._parts[part].on:
            assert all(map(is_hooked, written)), part
    return {part for part in ALL_HOOKS if part in hooks._parts and hooks._parts[part].on}


def test_every_part_is_hooked_and_reported(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    load(engine)
    assert hooked_parts() == set(sglang.PARTS)
    assert not warnings(caplog)
    assert messages(caplog, logging.INFO) == [f"hooks of {part} are active" for part in hooks_in_import_order(engine)]
    added = sys.modules["sglang.srt.models.gemma4_mm"].Gemma4ForConditionalGeneration.get_embed_and_head_for_draft
    assert added.__module__ == "eagle_kernels.engines.sglang.vocab"


def hooks_in_import_order(engine: Engine) -> list[str]:
    """A part becomes active when the last of its modules is imported."""
    order = list(engine.sources)
    last = {part: max(order.index(hook.target.module) for hook in written) for part, written in ALL_HOOKS.items()}
    return sorted(last, key=last.__getitem__)


def test_registering_imports_nothing_of_the_engine(engine: Engine) -> None:
    """Every process of the engine calls register(), most of them run no model, and the imports cost 3.8 s of CPU."""
    import sglang as stand_in

    before = set(sys.modules)
    sglang.register()
    assert stand_in.__file__.startswith(str(engine.folder))
    assert {name for name in set(sys.modules) - before if not name.startswith("eagle_kernels.")} == set()
    assert set(hooks._FINDER.waiting) == set(engine.sources) - {"sglang"}


def test_a_module_that_was_imported_before(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """Other modules have imported the function by name by then."""
    packing = "sglang.srt.layers.aux_hidden_states"
    original = importlib.import_module(packing).pack_aux_hidden_states
    user = types.ModuleType("imports_by_name")
    user.pack_aux_hidden_states = original
    sys.modules[user.__name__] = user
    try:
        load(engine)
    finally:
        del sys.modules[user.__name__]
    assert hooked_parts() == set(sglang.PARTS) and not warnings(caplog)
    assert user.pack_aux_hidden_states is sys.modules[packing].pack_aux_hidden_states is not original


def test_the_loader_stays_the_modules_own(engine: Engine) -> None:
    """Resources, source and reloads depend on it."""
    load(engine)
    module = sys.modules["sglang.srt.models.llama_eagle3"]
    assert type(module.__loader__).__name__ == "SourceFileLoader" and "exec_module" not in vars(module.__loader__)
    assert "class LlamaModel" in module.__loader__.get_source(module.__name__)
    assert not hooks._FINDER.waiting


def test_the_second_register_changes_nothing(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    sglang.register()
    load(engine)
    forward = value_of(FORWARD)
    sglang.register()
    assert value_of(FORWARD) is forward and not hasattr(forward.__wrapped__, "__wrapped__")
    assert not warnings(caplog)


@pytest.mark.parametrize(
    ("variables", "parts"),
    [
        pytest.param({"EAGLE_KERNELS_SGLANG": "0"}, set(), id="all-off"),
        pytest.param({"EAGLE_KERNELS_VLLM": "0"}, set(sglang.PARTS), id="another-engine's"),
        pytest.param(
            {"EAGLE_KERNELS_SGLANG_CAPTURE": "0", "EAGLE_KERNELS_SGLANG_VOCAB": "0"},
            {"projection", "mtp", "layer0", "context", "gemma3_capture", "scales"},
            id="two-off",
        ),
    ],
)
def test_switches(engine: Engine, monkeypatch: pytest.MonkeyPatch, variables: dict, parts: set) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    load(engine)
    assert hooked_parts() == parts


@pytest.mark.parametrize("value", ["off", "2"])
def test_a_switch_that_does_not_exist_is_one_line(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, value: str
) -> None:
    monkeypatch.setenv("EAGLE_KERNELS_SGLANG_CAPTURE", value)
    monkeypatch.setenv("EAGLE_KERNELS_SGLANG_VOCABULARY", "0")
    load(engine)
    assert hooked_parts() == set(sglang.PARTS) - {"capture"}
    wrong, misspelt = warnings(caplog)
    assert wrong == f"EAGLE_KERNELS_SGLANG_CAPTURE is {value!r}, expected one of ('auto', '0', '1'); read as 0"
    assert misspelt.endswith("did you mean EAGLE_KERNELS_SGLANG_VOCAB?")


def next_version_cases() -> list:
    """Each target of each hook, with each change that a later SGLang may have made to it."""
    cases = []
    for part, hook in ((part, hook) for part, written in ALL_HOOKS.items() for hook in written):
        target = hook.target
        # A class without __init__ inherits one.
        changes = [] if hook.kind == "ADD" or target.where.endswith("__init__") else ["renamed"]
        changes += ["parameter"] if target.parameters else []
        changes += ["body"] if target.bodies else []
        for change in (*changes, "moved"):
            id = f"{part}-{target.where.rpartition(':')[2]}-{change}"
            cases.append(pytest.param(part, target.where, change, id=id))
    return cases


@pytest.mark.parametrize(("part", "where", "change"), next_version_cases())
def test_the_next_version(engine: Engine, caplog: pytest.LogCaptureFixture, part: str, where: str, change: str) -> None:
    """The whole part with a changed target stays off, with one log line that names it; the other parts work."""
    module, _, path = where.partition(":")
    change_source(engine, module, path, change)
    load(engine)
    targets = {other: [hook.target for hook in written] for other, written in ALL_HOOKS.items()}
    off = {other for other in targets if any(depends(target, where, change) for target in targets[other])}
    assert part in off and hooked_parts() == set(sglang.PARTS) - off
    assert len(warnings(caplog)) == len(off)
    for warning in warnings(caplog):
        assert " is off, SGLang runs its own code: " in warning and where.partition(".")[0] in warning
        assert warning.partition(" ")[0] in off and module in warning


def depends(target: Target, where: str, change: str) -> bool:
    """Whether a change at `where` reaches a target: another part may hook the same class or module."""
    if change == "moved":
        return target.module == where.partition(":")[0]
    if change == "renamed" and target.where.startswith(f"{where}."):
        return True
    if target.where == where:
        return change == "renamed" or bool(target.parameters if change == "parameter" else target.bodies)
    return bool(target.bodies) and where.startswith(f"{target.where}.")  # a class's body contains those of its methods


def change_source(engine: Engine, module: str, path: str, change: str) -> None:
    if change == "moved":
        engine.path(module).rename(engine.path(f"{module}_v2"))
        return
    source = engine.path(module).read_text()
    nodes = {node.name: node for node in ast.parse(source).body}
    owner, _, method = path.partition(".")
    node = nodes[owner]
    if method:
        node = next(member for member in node.body if member.name == method)
    lines = source.splitlines()
    definition = node.lineno - 1
    if change == "renamed":
        lines[definition] = lines[definition].replace(f" {node.name}(", f" {node.name}_v2(")
    elif change == "parameter":
        lines[definition] = lines[definition].replace("(", "(new, ", 1)
    else:
        lines[node.end_lineno - 1] = lines[node.end_lineno - 1].replace("pass", "new = 1").replace("'engine'", "'v2'")
    engine.path(module).write_text("\n".join(lines))


def test_hooks_that_went_in_before_a_part_went_off_call_the_engine(engine: Engine) -> None:
    """gemma3_causal is imported before gemma4_causal, whose function is renamed here."""
    change_source(engine, "sglang.srt.models.gemma4_causal", "Gemma4ForCausalLM._shard_weight", "renamed")
    load(engine)
    first = "sglang.srt.models.gemma3_causal:Gemma3ForCausalLM._shard_weight"
    assert hasattr(value_of(first), "__wrapped__")
    assert value_of(first)(None, None, None) == "engine"
    wrapper = sys.modules["sglang.srt.models.gemma4_mm"].Gemma4ForConditionalGeneration
    assert not hasattr(wrapper, "get_embed_and_head_for_draft")


def test_a_module_that_dies_on_import(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """Not an ImportError: a missing CUDA library raises OSError, a version check RuntimeError. SGLang skips it."""
    module = "sglang.srt.models.deepseek_v2"
    engine.path(module).write_text("raise RuntimeError('no driver')")
    load(engine)
    assert "Ignore import error when loading sglang.srt.models.deepseek_v2: no driver" in caplog.text
    assert not warnings(caplog)
    assert f"layer0: SGLang fails to import {module}, nothing is hooked there" in messages(caplog, logging.INFO)
    assert hooks._parts["layer0"].on and all(map(is_hooked, ALL_HOOKS["layer0"]))


def test_a_method_that_is_there_by_now_is_not_added(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    engine.change(
        "sglang.srt.models.gemma4_mm",
        "    def load_weights",
        "    def get_embed_and_head_for_draft(self):\n        return 'engine'\n\n    def load_weights",
    )
    load(engine)
    wrapper = sys.modules["sglang.srt.models.gemma4_mm"].Gemma4ForConditionalGeneration
    assert wrapper().get_embed_and_head_for_draft() == "engine"
    (warning,) = warnings(caplog)
    assert "vocab is off" in warning and "get_embed_and_head_for_draft exists" in warning


@pytest.mark.parametrize("failure", ["register", "import", "call"])
def test_no_failure_reaches_the_engine(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failure: str
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("ours")

    if failure == "register":
        monkeypatch.setattr(hooks, "_exists", fail)
    elif failure == "import":
        monkeypatch.setattr(hooks.Part, "_replacement", fail)
    else:
        hook = sglang._hooks("gemma3_capture")[-1]
        hook = dataclasses.replace(hook, function=fail)
        monkeypatch.setattr(sglang, "_hooks", lambda part: (hook,) if part == "gemma3_capture" else ())
    load(engine)
    if failure == "call":
        assert value_of(ALL_HOOKS["gemma3_capture"][-1].target.where)(None, None) == "engine"
    assert warnings(caplog) and all("ours" in warning for warning in warnings(caplog))


def test_two_plugins_on_one_target(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """Another plugin's registry imports the module and wraps the function that it finds there, which is ours."""
    sglang.register()
    model = importlib.import_module("sglang.srt.models.llama_eagle3").LlamaModel
    ours = model.forward
    model.forward = lambda *args: (ours(*args), "other")
    batch = types.SimpleNamespace(spec_info=types.SimpleNamespace(hidden_states=torch.zeros(2, D)))
    assert model.forward(drafter(), None, None, batch, None, None) == ("engine", "other")
    assert hasattr(ours, "__wrapped__") and not warnings(caplog)


def drafter(**changes: object) -> nn.Module:
    """The part of llama_eagle3.LlamaModel that the hook reads."""
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
        pytest.param({"fc": Fp8Linear()}, "its quant_method is object", id="quantized"),
        pytest.param({"fc": LoRA()}, "LoRA wraps it", id="lora"),
        pytest.param({"fc": nn.Linear(K * H, D, dtype=torch.float64)}, "its weight is torch.float64", id="dtype"),
        pytest.param({"fc_norm": nn.ModuleList([nn.LayerNorm(H)])}, "its norm is a torch.nn", id="another-norm"),
        pytest.param({"input_norm": GemmaRMSNorm()}, "its norm is a ", id="gain-of-gemma"),
        pytest.param({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is False", id="no-aux"),
    ],
)
def test_eligibility(engine: Engine, caplog: pytest.LogCaptureFixture, changes: dict, unsupported: str | None) -> None:
    stage.force = True
    planned = projection._plan(drafter(**changes))
    assert (planned is None or planned.projection is None) == (unsupported is not None)
    (line,) = messages(caplog, logging.INFO)
    assert f"stays with SGLang: {unsupported}" in line if unsupported else "runs norm_concat_linear (K=3, " in line


@pytest.mark.parametrize(
    ("fields", "unsupported"),
    [
        ({"variance_size_override": 4}, "its norm takes the variance of 4 columns only"),
        ({"cast_x_before_out_mul": True}, "its norm rounds before the gain"),
        ({"has_weight": False}, "its norm has no weight"),
        ({}, None),
    ],
)
def test_norm_eligibility(engine: Engine, fields: dict, unsupported: str | None) -> None:
    reason = rms_norm_unsupported_reason(RMSNorm(**fields), torch.bfloat16)
    assert (reason is None) == (unsupported is None) and (reason or "").startswith(unsupported or "")


def test_the_deterministic_mode_keeps_sglangs_kernels(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    sys.modules["sglang.srt.batch_invariant_ops"].is_batch_invariant_mode_enabled = lambda: True
    norms = drafter().fc_norm
    assert "batch-invariant mode is on" in projection._unsupported_reason(drafter(), None, norms)
    with environment_of(EAGLE_KERNELS_BATCH_INVARIANT="1"):
        assert projection._unsupported_reason(drafter(), None, norms) is None


def batch(rows: int, width: int, decodes: bool = False) -> object:
    mode = types.SimpleNamespace(is_decode_or_idle=lambda: decodes)
    hidden = torch.randn(rows, width, generator=torch.Generator().manual_seed(1)).bfloat16()
    return types.SimpleNamespace(spec_info=types.SimpleNamespace(hidden_states=hidden), forward_mode=mode)


def seen_behind(model: nn.Module, forward_batch: object) -> torch.Tensor:
    """The hidden states that SGLang's forward gets from the hook."""
    return projection._forward(lambda *args: args[3].spec_info.hidden_states, model, None, None, forward_batch)


def shares_of(ours: float, others: float = 2.0) -> list[float]:
    """Times at the row counts of a decision: `ours` at 1, 4 and 16 rows, `others` beyond."""
    return [ours] * 3 + [others] * (len(decision.ROWS) - 3)


@pytest.mark.parametrize("ours", [0.5, 0.99, 2.0])
def test_the_op_runs_where_it_is_faster(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ours: float
) -> None:
    """At the first three row counts our op takes `ours` times SGLang's time, at the others twice as long."""
    rows = decision.ROWS
    shares = shares_of(ours)
    seconds = [[1e-3] * len(rows), [1e-3 * share for share in shares]]
    monkeypatch.setattr(decision, "seconds_per_call", lambda *_: seconds)
    model = drafter()
    changed = {T: seen_behind(model, batch(T, K * H)).shape[-1] == D for T in rows}
    assert changed == {T: ours == 0.5 and rows[2] >= T for T in rows}
    (line,) = messages(caplog, logging.INFO)
    runs = "runs norm_concat_linear (K=3, chunk norm) where it is faster; "
    stays = "stays with SGLang: norm_concat_linear (K=3, chunk norm) is not faster, "
    assert (runs if ours == 0.5 else stays) + f"T=1 {ours:.3g} ms (SGLang 1), T=4 " in line


@pytest.mark.parametrize("forced", [True, False])
@pytest.mark.parametrize(("backend", "why"), [("triton", "TRITON_INTERPRET"), ("reference", "no kernels of ours")])
def test_a_backend_that_does_not_run_here(
    engine: Engine, caplog: pytest.LogCaptureFixture, backend: str, why: str, forced: bool
) -> None:
    """EAGLE_KERNELS_BACKEND=triton on a CPU raised in the forward, after the plugin had logged that the stage runs."""
    stage.force = forced
    target = nn.Linear(H, H)
    target.layers_to_capture, target.config = [1, 2], types.SimpleNamespace(hidden_size=H)
    with environment_of(EAGLE_KERNELS_BACKEND=backend):
        assert seen_behind(drafter(), batch(2, K * H)).shape[-1] == K * H
        with hooks.leaving_to_sglang("capture"):
            capture._watch(None, model=target, eagle_use_aux_hidden_state=True)
    assert not target._forward_pre_hooks
    assert len(warnings(caplog)) == 2
    for warning in warnings(caplog):
        assert "stays with SGLang: " in warning and why in warning


def test_a_missing_library_says_how_to_install(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library, "unsupported_reason", "libeagle_kernels.so did not load: GLIBC_2.38 not found")
    with environment_of():  # plans are cached
        assert seen_behind(drafter(), batch(2, K * H)).shape[-1] == K * H
    (warning,) = warnings(caplog)
    assert "GLIBC_2.38 not found" in warning and "`pip install --no-deps .`" in warning


def test_an_op_that_fails_later_leaves_the_block_to_sglang(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stage.force = True
    model = drafter()
    assert seen_behind(model, batch(2, K * H)).shape[-1] == D

    def fail(*args: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(projection.EngineProjection, "__call__", fail)
    for _ in range(2):
        assert seen_behind(model, batch(2, K * H)).shape[-1] == K * H
    (warning,) = warnings(caplog)
    assert warning == "fc stays with SGLang, norm_concat_linear failed: RuntimeError('out of memory')"


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_a_square_fc_is_applied_whatever_runs_it(engine: Engine, backend: str) -> None:
    """K*Ht == Hd: SGLang compares the widths and skips fc."""
    fc = nn.Linear(K * H, K * H, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    model = drafter(fc=fc, config=types.SimpleNamespace(hidden_size=K * H, eagle_config=None))
    stage.force = True
    with environment_of(EAGLE_KERNELS_BACKEND=backend):
        given = batch(2, K * H)
        hidden = given.spec_info.hidden_states
        expected = fc(torch.cat([norm(x) for norm, x in zip(model.fc_norm, hidden.chunk(K, -1), strict=True)], -1))
        assert relative_difference(seen_behind(model, given), expected) < 0.02
        decoding = batch(2, K * H, decodes=True)
        assert seen_behind(model, decoding) is decoding.spec_info.hidden_states


@pytest.mark.parametrize(
    ("world_size", "attn_tp_size", "rows_of", "reason"),
    [
        (1, 1, None, "there is one rank"),
        (2, 1, None, "ranks have different tokens (DP attention)"),
        (2, 2, 2 * D, "SGLang splits it by rows"),
    ],
)
def test_what_is_not_row_parallel_runs_as_ever(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    world_size: int,
    attn_tp_size: int,
    rows_of: int | None,
    reason: str,
) -> None:
    group = types.SimpleNamespace(world_size=world_size)
    parallel = types.SimpleNamespace(tp_group=group, attn_tp_size=attn_tp_size)
    monkeypatch.setattr(sys.modules["sglang.srt.runtime_context"], "get_parallel", lambda: parallel)
    monkeypatch.setattr(stage, "force", True)
    monkeypatch.setattr(stage, "row_parallel", True)
    monkeypatch.setattr(row_parallel, "TILE", H)  # the stand-in's rows are short
    model = drafter()
    if rows_of is not None:
        model.fc.output_size = rows_of
    assert seen_behind(model, batch(2, K * H)).shape[-1] == D
    first, second = messages(caplog, logging.INFO)
    assert first == f"module.Module is not row-parallel: {reason}"
    assert second == "module.Module runs norm_concat_linear (K=3, chunk norm); forced, not timed"


def test_ranks_that_come_and_go_decide_nothing_together(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With elastic expert parallelism a rank that joins a running server would wait for the others."""
    group = types.SimpleNamespace(world_size=2, cpu_group=None)
    context = types.SimpleNamespace(
        is_config_namespace_published=lambda name: name == "exec",
        config_bag=lambda name: types.SimpleNamespace(moe=types.SimpleNamespace(elastic_ep_backend="mooncake")),
    )
    runtime = sys.modules["sglang.srt.runtime_context"]
    monkeypatch.setattr(runtime, "get_parallel", lambda: types.SimpleNamespace(tp_group=group))
    monkeypatch.setattr(runtime, "get_context", lambda: context, raising=False)
    monkeypatch.setattr(stage, "_cpu_group", lambda: object())
    monkeypatch.setattr(decision, "seconds_per_call", None)
    seen_behind(drafter(), batch(2, K * H))
    (line,) = messages(caplog, logging.INFO)
    assert line.startswith("module.Module stays with SGLang: with elastic expert parallelism ")


class Predictor(nn.Module):
    """The part of Step-3.5's MTP layer that the hook reads, and its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.enorm, self.hnorm = GemmaRMSNorm(), GemmaRMSNorm()
        self.eh_proj = nn.Linear(2 * H, H, bias=False, dtype=torch.bfloat16).requires_grad_(False)

    def forward(self, embeds: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return self.eh_proj(torch.cat((self.enorm(embeds), self.hnorm(hidden)), dim=-1))


STEP = mtp.Predictor("step3p5_mtp:Step3p5AMultiTokenPredictor", body_hash(Predictor.forward))
Predictor.__module__, Predictor.__qualname__ = STEP.target.where.removesuffix(".forward").split(":")


class OneStream(nn.Module):
    """The part of Qwen4-Exp's predictor with hc_count = 1 that the hook reads, and SGLang's method."""

    def __init__(self) -> None:
        super().__init__()
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = GemmaRMSNorm(), GemmaRMSNorm()
        self.fc = nn.Linear(2 * H, H, bias=False, dtype=torch.bfloat16).requires_grad_(False)

    def _fuse_standard(self, input_embeds: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        input_embeds = self.pre_fc_norm_embedding(input_embeds)
        hidden_states = self.pre_fc_norm_hidden(hidden_states)
        return self.fc(torch.cat((input_embeds, hidden_states), dim=-1))

    forward = _fuse_standard


OneStream.__module__, OneStream.__qualname__ = "sglang.srt.models.qwen4_exp_mtp", "Qwen4ExpForCausalLMMTP"


class QKVParallelLinear(nn.Linear):
    """The rows of two of four ranks; forward also returns the bias that it did not add."""

    quant_method, input_size, output_size, output_size_per_partition = UnquantizedLinearMethod(), 2 * H, 4 * D, 2 * D

    def __init__(self) -> None:
        super().__init__(2 * H, 2 * D, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return super().forward(x), None


class Layer(nn.Module):
    """The part of an EAGLE-3 drafter's layer that the hook reads, and its forward up to the attention."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.hidden_norm = RMSNorm(), RMSNorm()
        self.input_layernorm.weight.data.copy_(torch.linspace(0.5, 2, H))
        self.self_attn = nn.Module()
        self.self_attn.qkv_proj = QKVParallelLinear().requires_grad_(False)

    def forward(self, embeds: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.hidden_norm(hidden)  # normed first, but second in the cat
        embeds = self.input_layernorm(embeds)
        return self.self_attn.qkv_proj(torch.cat([embeds, hidden], dim=-1))[0]


Layer.__module__, Layer.__qualname__ = layer0._LLAMA.split(":")


@pytest.mark.parametrize(("runs", "fails"), [("always", False), ("T<=16", False), ("never", False), ("always", True)])
@pytest.mark.parametrize(
    ("module", "prepare"), [(Predictor, mtp.prepare), (Layer, layer0._prepare)], ids=["mtp", "layer0"]
)
def test_two_norms_and_a_projection_run_the_op_where_it_is_faster(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, runs: str, fails: bool, module: type, prepare: Callable
) -> None:
    monkeypatch.setattr(mtp, "PREDICTORS", (STEP,))
    ours = {"always": shares_of(0.5, 0.5), "T<=16": shares_of(0.5), "never": shares_of(2.0)}[runs]
    monkeypatch.setattr(decision, "seconds_per_call", lambda *_: [[1.0] * len(ours), ours])
    fused, calls = module(), []
    inputs = {T: torch.randn(2, T, H, generator=torch.Generator().manual_seed(T)).bfloat16() for T in (1, 64)}
    own = {T: fused(*inputs[T]) for T in inputs}
    prepare(fused)
    prepare(fused)  # the weights are loaded again
    call = projection.EngineProjection.__call__

    def watched(self: object, chunks: object) -> torch.Tensor:
        calls.append(chunks)
        if fails:
            raise RuntimeError("ours")
        return call(self, chunks)

    monkeypatch.setattr(projection.EngineProjection, "__call__", watched)
    for T in inputs:
        assert relative_difference(fused(*inputs[T]), own[T]) <= (0 if fails else 0.02)
    assert len(calls) == (1 if fails else {"always": 2, "T<=16": 1, "never": 0}[runs])


@pytest.mark.parametrize(
    ("module", "prepare"), [(Predictor, mtp.prepare), (Layer, layer0._prepare)], ids=["mtp", "layer0"]
)
def test_a_copy_of_a_model_runs_its_own_modules(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, module: type, prepare: Callable
) -> None:
    monkeypatch.setattr(mtp, "PREDICTORS", (STEP,))
    monkeypatch.setattr(stage, "force", True)
    fused, inputs = module(), torch.randn(2, 3, H).bfloat16()
    prepare(fused)
    before = fused(*inputs)
    copied = copy.deepcopy(fused)
    for linear in copied.modules():
        if isinstance(linear, nn.Linear):
            linear.weight.data.mul_(2)
    assert torch.equal(copied(*inputs), 2 * before) and torch.equal(fused(*inputs), before)


def test_a_qwen4_exp_with_one_stream_runs_the_op(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its projection was in no row, and no line of the log said so."""
    monkeypatch.setattr(stage, "force", True)
    predictor = OneStream()
    embeds, hidden = torch.randn(2, 3, H).bfloat16()
    own = predictor(embeds, hidden)
    mtp.prepare(predictor)
    assert "forward" in predictor.fc.__dict__ and not warnings(caplog)
    assert relative_difference(predictor(embeds, hidden), own) <= 0.02


def test_an_mtp_body_that_was_not_read_stays_with_sglang(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Only that stage does: the rest of the part works."""
    monkeypatch.setattr(stage, "force", True)
    another = dataclasses.replace(STEP, body="0" * 16)
    for rows, fused in (((another,), False), ((another, STEP), True)):
        monkeypatch.setattr(mtp, "PREDICTORS", rows)
        predictor = Predictor()
        mtp.prepare(predictor)
        assert ("forward" in predictor.eh_proj.__dict__) == fused
    (warning,) = warnings(caplog)
    assert warning.startswith("Predictor.eh_proj stays with SGLang: ") and "another body" in warning


class DFlashDraftModel(nn.Module):
    """The part of a DFlash drafter that the hook reads."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(K * H, H, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        self.hidden_norm, self.num_context_features = RMSNorm(), K

    def project_target_hidden(self, target_hidden: torch.Tensor) -> torch.Tensor:
        return self.hidden_norm(self.fc(target_hidden))


class DFlashLagunaForCausalLM(DFlashDraftModel):
    def project_target_hidden(self, target_hidden: torch.Tensor) -> torch.Tensor:
        return super().project_target_hidden(target_hidden)


class Theirs(DFlashDraftModel):
    def project_target_hidden(self, target_hidden: torch.Tensor) -> torch.Tensor:
        return 2 * super().project_target_hidden(target_hidden)


@pytest.fixture
def dflash(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang.srt.models.dflash", sys.modules[__name__])


@pytest.mark.usefixtures("dflash")
@pytest.mark.parametrize(("runs", "fails"), [("always", False), ("T<=16", False), ("never", False), ("always", True)])
def test_the_context_runs_the_op_where_it_is_faster(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, runs: str, fails: bool
) -> None:
    monkeypatch.setattr(mtp, "PREDICTORS", (STEP,))
    ours = {"always": shares_of(0.5, 0.5), "T<=16": shares_of(0.5), "never": shares_of(2.0)}[runs]
    monkeypatch.setattr(decision, "seconds_per_call", lambda *_: [[1.0] * len(ours), ours])
    drafter, calls = DFlashDraftModel(), []
    inputs = {T: torch.randn(T, K * H, generator=torch.Generator().manual_seed(T)).bfloat16() for T in (1, 64)}
    own = {T: drafter.project_target_hidden(inputs[T]) for T in inputs}
    context._prepare(drafter)
    context._prepare(drafter)  # the weights are loaded again
    project = context.EngineProjection.__call__

    def watched(self: object, packed: torch.Tensor) -> torch.Tensor:
        calls.append(packed)
        if fails:
            raise RuntimeError("ours")
        return project(self, packed)

    monkeypatch.setattr(context.EngineProjection, "__call__", watched)
    for T in inputs:
        assert relative_difference(drafter.project_target_hidden(inputs[T]), own[T]) <= (0 if fails else 0.02)
    assert len(calls) == (1 if fails else {"always": 2, "T<=16": 1, "never": 0}[runs])
    says = "stays with SGLang" if runs == "never" else "runs norm_concat_linear"
    assert messages(caplog, logging.INFO)[0].startswith(f"DFlashDraftModel.project_target_hidden {says}")


@pytest.mark.usefixtures("dflash")
def test_another_plugins_context_stays(caplog: pytest.LogCaptureFixture) -> None:
    drafter = Theirs()
    context._prepare(drafter)
    assert "project_target_hidden" not in drafter.__dict__
    assert messages(caplog, logging.INFO) == [
        f"Theirs.project_target_hidden stays with SGLang: it is that of {__name__}"
    ]


def amx(layer: nn.Module) -> None:
    layer.self_attn.qkv_proj.use_intel_amx_backend = True


def gemma_norm(layer: nn.Module) -> None:
    layer.hidden_norm.__class__ = GemmaRMSNorm


def later_layer(layer: nn.Module) -> None:
    layer.is_input_layer = False


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (amx, "its weight is packed for the engine's own CPU product"),
        (gemma_norm, "its norm is a "),
        (later_layer, None),
    ],
)
def test_layer_0_stays_with_sglang(
    engine: Engine, caplog: pytest.LogCaptureFixture, change: Callable, reason: str | None
) -> None:
    layer = Layer()
    change(layer)
    layer0._prepare(layer)
    assert "forward" not in layer.self_attn.qkv_proj.__dict__
    lines = messages(caplog, logging.INFO)
    assert len(lines) == (reason is not None)
    assert all(line.startswith(f"Layer.qkv_proj stays with SGLang: {reason}") for line in lines)
