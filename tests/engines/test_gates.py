"""The gate of a hook: it opens for the recorded function, in any layout and under any Python, and for no other."""

import functools
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from eagle_kernels.engines import gates

PYTHONS = ("3.10", "3.11", "3.12", "3.13")

READ = '''
class Drafter:
    @staticmethod
    def scale(x): return x

    def combine(self, hidden_states, *, chunks=3):
        """What it does."""
        x: list[int] = []
        if not self.model.use_aux:  # nothing to do
            return hidden_states
        text = f"{chunks!r:>{3}} of " 'K' f"{self.model.K=}"
        match chunks:
            case 3 if x:
                hidden_states = [norm(c) for norm, c in zip(self.norms, hidden_states.chunk(3, dim=-1))]
        with self.lock as held, self.other: del x[0], x[1:2, ...]
        return self.model.fc((*hidden_states, 1e-6, -1, None, ..., b"x", text), out=(1, 2))
'''
# Differs in layout, quotes, parentheses, comments, docstring and annotations only, none of which runs.
SAME = """
class Drafter:
    def combine(self, hidden_states: "Tensor", *, chunks: int = 3) -> "Tensor":
        x: dict = []
        if not self.model.use_aux: return hidden_states
        text = f'{chunks!r:>{3}} of K{self.model.K=}'
        match chunks:
            case 3 if (x):
                hidden_states = [
                    norm(c)
                    for norm, c in zip(
                        self.norms, hidden_states.chunk(3, dim=-1)
                    )
                ]
        with (self.lock as held, self.other):
            del x[0], x[1:2, ...]
        # a comment
        return self.model.fc(
            (*hidden_states, 0.000001, -1, None, ..., b'x', text), out=(1, 2),
        )
"""
HASH = "3a8ff17f5c874944"


def method(source: str, folder: Path, name: str = "combine") -> Callable:
    """The method of Drafter in a module with this source, written to a file where inspect finds it."""
    path = folder / "engine_with_hooks.py"
    path.write_text(source)
    module = types.ModuleType(path.stem)
    exec(compile(source, path, "exec"), vars(module))
    return getattr(module.Drafter, name)


def change(before: str, after: str) -> str:
    assert READ.count(before) == 1
    return READ.replace(before, after)


@pytest.mark.parametrize("source", [READ, SAME], ids=["read", "other-layout"])
def test_the_hash_is_of_what_runs(tmp_path: Path, source: str) -> None:
    assert gates.body_hash(method(source, tmp_path)) == HASH


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(change("1e-6", "1e-5"), id="constant"),
        pytest.param(change("chunks=3", "chunks=4"), id="default"),
        pytest.param(change("dim=-1", "dim=0"), id="argument"),
        pytest.param(change("!r", "!s"), id="conversion"),
        pytest.param(change("1:2", ":2"), id="slice"),
        pytest.param(change("None, ...", "..., None"), id="order"),
        pytest.param(change("if not", "if"), id="condition"),
        pytest.param(change("        with", "        return 0\n        with"), id="statement"),
        pytest.param(change("    def combine", "    @staticmethod\n    def combine"), id="decorator"),
    ],
)
def test_what_runs_is_in_the_hash(tmp_path: Path, source: str) -> None:
    assert gates.body_hash(method(source, tmp_path)) != HASH


@pytest.mark.parametrize("version", PYTHONS)
def test_the_hash_does_not_depend_on_the_python(tmp_path: Path, version: str) -> None:
    installed = sorted((Path.home() / ".pyenv/versions").glob(f"{version}.*/bin/python"))
    python = installed[-1] if installed else shutil.which(f"python{version}")
    if python is None:
        pytest.skip(f"there is no Python {version} here")
    (tmp_path / "engine_with_hooks.py").write_text(READ)
    (tmp_path / "gates.py").write_text(Path(gates.__file__).read_text())
    code = "import gates, engine_with_hooks; print(gates.body_hash(engine_with_hooks.Drafter.combine))"
    ran = subprocess.run([python, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.stderr) == (f"{HASH}\n", "")


def test_a_wrapper_that_the_source_does_not_name_is_another_body(tmp_path: Path) -> None:
    original = method(READ, tmp_path)

    @functools.wraps(original)
    def wrapped(*args: object) -> object:
        return original(*args)

    with pytest.raises(gates.TargetError, match=f"combine is wrapped by {re.escape(__file__)}"):
        gates.body_hash(wrapped)
    decorated = READ.replace("    def combine", "    @decorated\n    def combine")
    decorator = "import functools\ndef decorated(f):\n    return functools.wraps(f)(lambda *args: f(*args))\n"
    gates.body_hash(method(decorator + decorated, tmp_path))


@pytest.fixture
def engine_module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    class Drafter:
        def combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return hidden_states

    module = types.ModuleType("engine_with_hooks")
    module.Drafter = Drafter
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


COMBINE = "engine_with_hooks:Drafter.combine"


def test_a_target_is_found(engine_module: types.ModuleType) -> None:
    known = gates.body_hash(engine_module.Drafter.combine)
    target = gates.Target(COMBINE, ["self", "hidden_states"], {known: ["0.32.0"]})
    assert target.find() == (engine_module.Drafter, "combine", engine_module.Drafter.combine)


def test_parameters_may_go_on(engine_module: types.ModuleType) -> None:
    gates.Target(COMBINE, ["self", ...]).find()
    with pytest.raises(gates.TargetError, match="takes"):
        gates.Target(COMBINE, ["self", "aux", ...]).find()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        pytest.param("engine_without:Drafter.combine", "engine_without:Drafter.combine is not there", id="module"),
        pytest.param("engine_with_hooks:Draft.combine", "engine_with_hooks:Draft.combine is not", id="class"),
        pytest.param("engine_with_hooks:Drafter.merge", "engine_with_hooks:Drafter.merge is not", id="method"),
        pytest.param(COMBINE, f"{COMBINE} takes ['self', 'hidden_states'], and the hook was written", id="parameters"),
    ],
)
def test_a_target_that_changed_is_named(engine_module: types.ModuleType, target: str, message: str) -> None:
    parameters = ["self", "aux"] if message.startswith(f"{COMBINE} takes") else None
    with pytest.raises(gates.TargetError, match=re.escape(message)):
        gates.Target(target, parameters).find()


@pytest.mark.parametrize("replaced", [7, dict], ids=["constant", "builtin"])
def test_what_is_no_function_is_named(engine_module: types.ModuleType, replaced: object) -> None:
    engine_module.Drafter.combine = replaced
    with pytest.raises(gates.TargetError, match=f"{COMBINE} is no function with parameters"):
        gates.Target(COMBINE, ["self"]).find()


def test_another_body_is_named(engine_module: types.ModuleType) -> None:
    target = gates.Target(COMBINE, None, {"0": ["0.32.0", "0.33.0"]})
    found = gates.body_hash(engine_module.Drafter.combine)
    message = rf"{COMBINE} has another body \({found}\) than the hook was written for \(that of 0.32.0, 0.33.0\)"
    with pytest.raises(gates.TargetError, match=message):
        target.find()


def test_a_body_without_source_is_another_body(engine_module: types.ModuleType) -> None:
    engine_module.Drafter.combine = eval("lambda self, hidden_states: hidden_states")
    with pytest.raises(gates.TargetError, match=f"{COMBINE} has no source to compare"):
        gates.Target(COMBINE, None, {"0": ["0.32.0"]}).find()
