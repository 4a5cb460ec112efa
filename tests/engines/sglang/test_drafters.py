"""docs/models.md has every drafter of the real SGLang's models."""

import ast
import importlib.util
import inspect
import re
from pathlib import Path

import pytest

from eagle_kernels.engines.gates import resolve
from eagle_kernels.models.drafters import SGLANG, Drafter
from eagle_kernels.models.family import MTPStage
from engines.built_projections import built, mtp_stages

DRAFTER = re.compile(r"NextN$|MTP$|Eagle3?|DFlash|DSpark|Draft|AssistantForCausalLM$|AssistantModel$")
# Algorithm -> part of the title of its drafters' row.
ALGORITHMS = {
    "EAGLE": "EAGLE-1",
    "EAGLE3": "EAGLE-3",
    "FROZEN_KV_MTP": "Gemma 4 assistants",
    "DFLASH": "DFlash",
    "DSPARK": "DSpark",
    "STANDALONE": "draft models of their own",
    "UNO": "UNO",
    "NGRAM": "n-grams",
}


pytest.importorskip("sglang")


def served_drafters() -> dict[str, str]:
    """Drafter -> module, from `EntryClass` of every model file, as SGLang's registry finds them; nothing is imported. A
    drafter is recognized by its name or by that of a class it derives from."""
    found = importlib.util.find_spec("sglang")
    served: dict[str, str] = {}
    bases: dict[str, list[str]] = {}
    for file in (Path(found.submodule_search_locations[0]) / "srt/models").glob("*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "EntryClass":
                names = (name.id for name in ast.walk(node.value) if isinstance(name, ast.Name))
                served |= dict.fromkeys(names, f"sglang.srt.models.{file.stem}")

    def drafts(name: str) -> bool:
        return bool(DRAFTER.search(name)) or any(map(drafts, bases.get(name, ())))

    return {name: module for name, module in served.items() if drafts(name)}


def test_every_drafter_of_the_registry_has_a_row() -> None:
    assert set(served_drafters()) == {name for row in SGLANG for name in row.architectures}


def test_every_algorithm_has_a_row() -> None:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    assert set(SpeculativeAlgorithm.__members__) == {*ALGORITHMS, "NONE"}
    titles = [row.title for row in SGLANG]
    assert not [part for part in ALGORITHMS.values() if not any(part in title for title in titles)]


def test_a_context_row_has_the_classes_with_the_method_that_is_hooked() -> None:
    served = served_drafters()
    hooked = {target for row in SGLANG for target in row.targets if target.endswith(".project_target_hidden")}
    of_row = {name: (*row.targets, "")[0] for row in SGLANG for name in row.architectures}
    for name, module in served.items():
        if any(word in module for word in ("dflash", "dspark", "lilicorr")):
            method = getattr(importlib.import_module(module), name).project_target_hidden
            ours = [target for target in hooked if resolve(f"sglang.srt.{target}")[2] is method]
            assert ours == ([of_row[name]] if of_row[name] in hooked else []), name


@pytest.mark.parametrize("row", [pytest.param(row, id=row.title) for row in SGLANG if len(row.targets) > 1])
def test_an_mtp_architecture_is_built_of_the_class_that_is_hooked(row: Drafter) -> None:
    """It is that class, or its module uses the class to build the model."""
    served = served_drafters()
    one = len(row.architectures) == 1  # with layers of several classes
    for architecture, target in zip(row.architectures * (len(row.targets) if one else 1), row.targets, strict=True):
        owner, _, _ = target.partition(":")[2].rpartition(".")
        module = importlib.import_module(f"sglang.srt.{target.partition(':')[0]}")
        assert served[architecture] == module.__name__
        source = inspect.getsource(getattr(module, architecture))
        assert architecture == owner or f"{owner}(" in source or f"{owner}(" in inspect.getsource(module)


@pytest.mark.parametrize(("stage", "architecture"), mtp_stages("sglang"))
def test_a_projection_is_built_of_the_class_that_the_family_s_row_names(stage: MTPStage, architecture: str) -> None:
    """With a quantization config where the row says so; only DeepSeek's module builds a second class, for Quark."""
    (row,) = [row for row in SGLANG if architecture in row.architectures]
    targets = row.targets[-1:] * len(row.architectures) if len(row.targets) != len(row.architectures) else row.targets
    of = dict(zip(row.architectures, targets, strict=False))
    module = f"sglang.srt.{of[architecture].partition(':')[0]}" if of else served_drafters()[architecture]
    source = Path(importlib.util.find_spec(module).origin).read_text(encoding="utf-8")
    of_quark = {("ReplicatedLinear", True)} if "Quark" in row.stays else set()
    for projection in stage.projections:
        assert built(source, projection) - of_quark == {(stage.sglang.linear, stage.sglang.quantized)}
