"""model_shapes: every preset reads into a usable record, and its facts agree with each other."""

import dataclasses

import pytest

from eagle_kernels.model_shapes import model_shapes

PRESETS = list(model_shapes())
STAGES = [
    pytest.param(shape, stage, id=f"{shape.name}-{stage.kind}")
    for shape in model_shapes().values()
    for stage in shape.stages
]

# (K, H, D, eps, norm_offset, norm)
KNOWN_STAGES = [
    pytest.param("gemma3-27b", "eagle3", (3, 5376, 5376, 1e-6, 0.0, "none"), id="plain-norms-for-a-gemma-target"),
    pytest.param("qwen3-30b-a3b", "eagle3", (3, 2048, 2048, 1e-6, 0.0, "chunk"), id="fc_norm"),
    pytest.param("gpt-oss-120b", "eagle3", (3, 2880, 2880, 1e-5, 0.0, "none"), id="gpt-oss"),
    pytest.param("gpt-oss-120b", "eagle3_v3", (3, 2880, 2880, 1e-5, 0.0, "concat"), id="norm_before_fc"),
    pytest.param("llama3.3-70b", "eagle3_narrow", (3, 8192, 6144, 1e-5, 0.0, "none"), id="narrow-drafter"),
    pytest.param("llama3.1-8b", "first_layer_qkv", (2, 4096, 6144, 1e-5, 0.0, "chunk"), id="first-layer"),
    pytest.param("gemma4-31b", "dflash", (6, 5376, 5376, 1e-6, 0.0, "none"), id="dflash-without-draft-width"),
    pytest.param("deepseek-v3", "mtp", (2, 7168, 7168, 1e-6, 0.0, "chunk"), id="mtp"),
    pytest.param("step3.5-flash", "mtp", (2, 4096, 4096, 1e-5, 1.0, "chunk"), id="mtp-with-offset"),
    pytest.param("minimax-m3", "eagle3", (4, 6144, 6144, 1e-6, 0.0, "none"), id="four-chunks"),
    pytest.param("minimax-m3", "mtp", (2, 6144, 6144, 1e-6, 1.0, "chunk"), id="mtp-beside-eagle3"),
    pytest.param("deepseek-v4-flash", "mtp", (2, 4096, 4096, 1e-6, 0.0, "chunk"), id="a-stream-of-four"),
    pytest.param("glm-5", "mtp", (2, 6144, 6144, 1e-5, 0.0, "chunk"), id="wide-mtp"),
    pytest.param("kimi-k2.5-mla", "first_layer_qkv", (2, 7168, 2112, 1e-6, 0.0, "chunk"), id="latent-first-layer"),
    pytest.param("gpt-oss-eagle3", "first_layer_qkv", (2, 2880, 5120, 1e-5, 0.0, "chunk"), id="first-layer-of-2880"),
]


@pytest.mark.parametrize(("name", "kind", "expected"), KNOWN_STAGES)
def test_known_stages(name, kind, expected):
    stage = model_shapes()[name].stage(kind)
    assert (stage.K, stage.H, stage.D, stage.eps, stage.norm_offset, stage.norm) == expected


@pytest.mark.parametrize(("shape", "stage"), STAGES)
def test_stage_is_consistent(shape, stage):
    assert stage.K >= 2
    assert min(stage.H, stage.D) >= 896
    assert 0 < stage.eps < 1e-4
    assert stage.norm_offset in (0.0, 1.0)
    assert stage.norm in ("chunk", "concat", "none")
    assert stage.post_norm == (stage.kind == "dflash")
    assert stage.layer_ids is None or len(stage.layer_ids) == stage.K
    if stage.boundaries is not None:
        assert len(stage.boundaries) == stage.K
        assert max(stage.boundaries) <= shape.num_layers


@pytest.mark.parametrize("name", PRESETS)
def test_preset_has_a_stage_and_distinct_kinds(name):
    shape = model_shapes()[name]
    assert shape.name == name
    kinds = [stage.kind for stage in shape.stages]
    assert kinds
    assert len(set(kinds)) == len(kinds)


def test_missing_facts():
    assert model_shapes()["minimax-m3"].num_layers is None
    assert not model_shapes()["minimax-m3"].certain
    assert model_shapes()["deepseek-v3"].certain
    assert model_shapes()["qwen3-8b"].stage("eagle3").layer_ids is None


def test_records_are_frozen_and_read_once():
    shape = model_shapes()["deepseek-v3"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        shape.vocab_size = 0
    assert model_shapes()["deepseek-v3"] is shape
    assert hash(shape) == hash(dataclasses.replace(shape))


def test_unknown_stage():
    with pytest.raises(ValueError, match=r"ModelShape.stage: kind is 'mtp', expected one of \['eagle3'\]"):
        model_shapes()["qwen3-8b"].stage("mtp")
