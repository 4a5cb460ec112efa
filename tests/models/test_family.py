"""The families together: found by model type, each fact in one place, nothing imported but data."""

import ast
from collections import Counter
from pathlib import Path

import pytest

import eagle_kernels as ek
from eagle_kernels import models
from eagle_kernels.drafter_config import LAYER_ID_RULES
from eagle_kernels.models import families, find_family
from eagle_kernels.mtp_config import ENGINES, ORDERS


def test_every_family_is_found_by_its_model_types_and_by_no_other() -> None:
    owners = Counter()
    for name, family in families().items():
        assert family.name == name
        types = family.model_types + (family.mtp.drafter_types if family.mtp else ())
        owners.update(types)
        assert all(find_family(model_type) is family for model_type in types)
    assert set(owners.values()) == {1}
    assert find_family("llama") is None and find_family(None) is None


@pytest.mark.parametrize("family", families().values(), ids=list(families()))
def test_descriptions_use_known_words(family: object) -> None:
    assert family.layer_ids is None or family.layer_ids in LAYER_ID_RULES
    assert family.norm_offset in (0.0, 1.0)
    assert set(family.scale_rounded_by) <= set(ENGINES)
    if family.mtp is not None:
        assert family.mtp.order in ORDERS and set(family.mtp.position_0_zeroed_by) <= set(ENGINES)


def test_a_description_imports_nothing_of_the_package_but_its_neighbours() -> None:
    for file in Path(models.__path__[0]).glob("*.py"):
        imports = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
        assert max((node.level for node in imports), default=0) <= 1, file.name


def test_a_target_without_eagle3_ids_is_refused_with_the_way_out() -> None:
    message = r"capture_layers: model_type is 'step3p5', expected one of \[.*'gemma3'.*\], because what the ids mean "
    message += r"depends on it; for another target pass boundaries and layer_ids_mean='boundary'$"
    with pytest.raises(ValueError, match=message):
        ek.capture_layers("step3p5", 45, [2, 22, 42])
    assert ek.capture_layers("step3p5", 45, [2, 22, 42], layer_ids_mean="boundary") == [2, 22, 42]
