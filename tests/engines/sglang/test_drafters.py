"""docs/models.md has every drafter of the real SGLang's models."""

import ast
import importlib.util
import inspect
import re
from pathlib import Path

import pytest

from eagle_kernels.engines.gates import resolve
from eagle_kernels.models.drafters import SGLANG, Drafter

DRAFTER = re.compile(r"NextN$|MTP$|Eagle3?|DFlash|DSpark|AssistantForCausalLM$|AssistantModel$")


pytest.importorskip("sglang")


def served_drafters() -> dict[str, str]:
    """The names in `EntryClass` of every model file, by which SGLang's registry finds them, and its module; nothing is
    imported."""
    found = importlib.util.find_spec("sglang")
    served = {}
    for file in (Path(found.submodule_search_locations[0]) / "srt/models").glob("*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "EntryClass":
                names = (name.id for name in ast.walk(node.value) if isinstance(name, ast.Name))
                served |= dict.fromkeys(names, f"sglang.srt.models.{file.stem}")
    return {name: module for name, module in served.items() if DRAFTER.search(name)}


def test_every_drafter_of_the_registry_has_a_row() -> None:
    assert set(served_drafters()) == {name for row in SGLANG for name in row.architectures}


def test_a_context_row_has_the_classes_with_the_method_that_is_hooked() -> None:
    served = served_drafters()
    hooked = {target for row in SGLANG for target in row.targets if target.endswith(".project_target_hidden")}
    of_row = {name: (*row.targets, "")[0] for row in SGLANG for name in row.architectures}
    for name, module in served.items():
        if "dflash" in module or "dspark" in module:
            method = getattr(importlib.import_module(module), name).project_target_hidden
            ours = [target for target in hooked if resolve(f"sglang.srt.{target}")[2] is method]
            assert ours == ([of_row[name]] if of_row[name] in hooked else []), name


@pytest.mark.parametrize("row", [pytest.param(row, id=row.title) for row in SGLANG if len(row.targets) > 1])
def test_an_mtp_architecture_is_built_of_the_class_that_is_hooked(row: Drafter) -> None:
    """It is that class, or its module has the class and names it where it builds the model."""
    served = served_drafters()
    one = len(row.architectures) == 1  # of layers of several classes
    for architecture, target in zip(row.architectures * (len(row.targets) if one else 1), row.targets, strict=True):
        owner, _, _ = target.partition(":")[2].rpartition(".")
        module = importlib.import_module(f"sglang.srt.{target.partition(':')[0]}")
        assert served[architecture] == module.__name__
        source = inspect.getsource(getattr(module, architecture))
        assert architecture == owner or f"{owner}(" in source or f"{owner}(" in inspect.getsource(module)
