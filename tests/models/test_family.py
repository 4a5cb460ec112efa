"""The families together: found by their configs, each fact in one place, norms and model types as transformers has
them, nothing imported but data."""

import ast
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import eagle_kernels as ek
from accuracy import relative_rms, rms_limit
from eagle_kernels import models
from eagle_kernels.drafter_config import _OTHER_MODEL_TYPES, ENGINES, LAYER_ID_RULES
from eagle_kernels.model_shapes import model_shapes
from eagle_kernels.models import families, find_family
from eagle_kernels.mtp_config import CHAINS, ORDERS
from family_checks import norm_of

FAMILIES = [pytest.param(family, id=name) for name, family in families().items()]


def test_every_family_is_found_by_its_model_types_and_architectures() -> None:
    owners = Counter(name for family in families().values() for name in family.config_types)
    for name, family in families().items():
        assert family.name == name
        for model_type in family.config_types:
            found = find_family(model_type, family.target_architectures)
            assert found is family, model_type
            assert owners[model_type] == 1 or family.target_architectures, f"{model_type} is that of several families"
        for architecture in family.architectures:
            assert any(find_family(other, [architecture]) is family for other in (*family.config_types, "llama"))
    assert find_family("llama") is None and find_family(None) is None and find_family([]) is None


def test_a_target_s_generation_is_told_by_its_architecture() -> None:
    config = {"model_type": "bailing_hybrid", "hidden_size": 64}
    masks = {
        name: ek.MTPConfig.from_hf(config | {"architectures": [name]}, engine="vllm").mask_position_zero
        for name in ("BailingMoeV2_5ForCausalLM", "BailingMoeV3ForCausalLM", "SomethingElse")
    }
    assert masks == {"BailingMoeV2_5ForCausalLM": True, "BailingMoeV3ForCausalLM": False, "SomethingElse": True}


@pytest.mark.parametrize("family", FAMILIES)
def test_descriptions_use_known_words(family: object) -> None:
    assert family.title
    assert family.layer_ids is None or family.layer_ids in LAYER_ID_RULES
    assert family.norm_offset in (0.0, 1.0)
    assert set(family.scale_rounded_by) <= set(ENGINES)
    stage = family.mtp
    if stage is not None:
        assert stage.order in ORDERS and stage.hnorm_over in ("stream", "row")
        assert len(stage.names) == (4 if stage.streams else 3 if stage.normed else 1)
        assert stage.engines, "no engine serves it"
        # A layer of streams passes streams on, and no other does.
        assert {engine.chain == "streams" for engine in stage.engines.values()} == {stage.streams}
        for engine in (*stage.engines.values(), stage.transformers):
            assert engine.chain in CHAINS
            assert engine.linear in ("Linear", "ReplicatedLinear", "ColumnParallelLinear", "RowParallelLinear")


def test_a_model_type_s_layer_ids_stand_in_one_place() -> None:
    of_families = [name for family in families().values() if family.layer_ids for name in family.model_types]
    others = [name for names in _OTHER_MODEL_TYPES.values() for name in names.split()]
    assert not {name for name, count in Counter(of_families + others).items() if count > 1}


def test_both_encodings_of_deepseek_mean_the_same_boundaries() -> None:
    assert ek.capture_layers("deepseek_v3", 61, [1, 29, 57]) == ek.capture_layers("kimi_k2", 61, [2, 30, 58])


def test_a_description_imports_nothing_of_the_package_but_its_neighbors() -> None:
    for file in Path(models.__path__[0]).glob("*.py"):
        imports = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
        assert max((node.level for node in imports), default=0) <= 1, file.name


def test_importing_the_package_reads_no_row() -> None:
    code = (
        "import sys, eagle_kernels; print(*[name for name in sys.modules if name.startswith('eagle_kernels.models')])"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert loaded == ["eagle_kernels.models"]


def test_a_target_without_eagle3_ids_is_refused_with_the_way_out() -> None:
    message = r"capture_layers: model_type is 'step3p5', expected one of \[.*'gemma3'.*\], because what the ids mean "
    message += r"depends on it; for another target pass boundaries and layer_ids_mean='boundary'$"
    with pytest.raises(ValueError, match=message):
        ek.capture_layers("step3p5", 45, [2, 22, 42])
    assert ek.capture_layers("step3p5", 45, [2, 22, 42], layer_ids_mean="boundary") == [2, 22, 42]


@pytest.mark.parametrize("family", FAMILIES)
def test_presets_have_the_family_s_facts(family: object) -> None:
    """Ids and boundaries agree with capture_layers; drafters have plain norms, MTP layers the target's."""
    text = (Path(ek.__file__).parent / "shapes.json").read_text(encoding="utf-8")
    for name in [model["name"] for model in json.loads(text)["models"] if model.get("family") == family.name]:
        shape = model_shapes()[name]
        assert shape.norm_offset == family.norm_offset
        for stage in shape.stages:
            assert stage.norm_offset == (family.norm_offset if stage.kind == "mtp" else 0.0)
            if stage.kind == "eagle3" and stage.boundaries is not None:
                boundaries = ek.capture_layers(family.model_types[0], shape.num_layers, stage.layer_ids)
                assert tuple(boundaries) == stage.boundaries


TYPES = [
    name for family in families().values() for name in family.model_types if name != "kimi_k25"
]  # kimi_k25's text part is DeepSeek V3


@pytest.mark.parametrize("model_type", dict.fromkeys(TYPES))
def test_gains_are_those_of_transformers(model_type: str) -> None:
    """A norm of the model, with gains far from their initial value, is norm_concat with the family's offset."""
    family, H = find_family(model_type), 96
    norm, x = norm_of(model_type)(H, eps=1e-5), torch.randn(9, H) * 3
    with torch.no_grad():
        norm.weight.copy_(torch.rand(H) - 0.2)
        eager = norm(x)
        truth = F.rms_norm(x.double(), (H,), norm.weight.double() + family.norm_offset, 1e-5)
        ours = ek.norm_concat([x], norm_weight=[norm.weight], eps=1e-5, norm_offset=family.norm_offset)
    limit, _ = rms_limit(torch.float32, H, truth, eager)
    assert relative_rms(eager, truth) < 1e-6, "the row is not what the model computes"
    assert relative_rms(ours, truth) <= limit
