"""docs/models.md has every drafter of the real SGLang's models."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from eagle_kernels.models.drafters import SGLANG

DRAFTER = re.compile(r"NextN$|MTP$|Eagle3?|DFlash|DSpark|AssistantForCausalLM$|AssistantModel$")


def test_every_drafter_of_the_registry_has_a_row() -> None:
    """The names in `EntryClass` of every model file, by which SGLang's registry finds them; nothing is imported."""
    found = importlib.util.find_spec("sglang")
    if found is None:
        pytest.skip("SGLang is not installed")
    served = set()
    for file in (Path(found.submodule_search_locations[0]) / "srt/models").glob("*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "EntryClass":
                served |= {name.id for name in ast.walk(node.value) if isinstance(name, ast.Name)}
    rows = {name for row in SGLANG for name in row.architectures}
    assert {name for name in served if DRAFTER.search(name)} == rows
