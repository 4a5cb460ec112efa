"""model_shapes: every preset reads into a usable record, and its facts agree with each other."""

import dataclasses

import pytest

import eagle_kernels as ek
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
    pytest.param("deepseek-v4-flash", "dspark", (3, 4096, 4096, 1e-6, 0.0, "none"), id="main-proj"),
    pytest.param("deepseek-v4-flash", "context_kv", (1, 4096, 1536, 1e-6, 0.0, "none"), id="latent-k-of-3-layers"),
    pytest.param("qwen4-exp", "mtp", (2, 2048, 2048, 1e-6, 1.0, "chunk"), id="a-stream-with-offset"),
    pytest.param("qwen3-8b", "dflash", (5, 4096, 4096, 1e-6, 0.0, "none"), id="five-chunks"),
    pytest.param("qwen3-8b", "context_kv", (1, 4096, 10240, 1e-6, 0.0, "none"), id="k-and-v-of-5-layers"),
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
    assert (stage.K >= 2) != (stage.kind == "context_kv")
    assert min(stage.H, stage.D) >= 896
    assert 0 < stage.eps < 1e-4
    assert stage.norm_offset in (0.0, 1.0)
    assert stage.norm in ("chunk", "concat", "none")
    assert stage.post_norm == (stage.kind in ("dflash", "dspark"))
    assert (stage.context is not None) == (stage.kind == "context_kv")
    assert stage.streams in (1, 4) and (stage.hnorm_over == "stream" or stage.projects_streams)
    assert stage.layer_ids is None or len(stage.layer_ids) == stage.K
    if stage.boundaries is not None:
        assert len(stage.boundaries) == stage.K
        assert max(stage.boundaries) <= shape.num_layers


@pytest.mark.parametrize(("name", "architecture"), [("deepseek_v4", "DeepseekV4ForCausalLM"), ("qwen4_exp", None)])
def test_streams_are_those_of_the_family(name, architecture):
    """From a config with hardly more than a width, MTPStreamsConfig and ContextKVConfig read what the preset has."""
    preset = {"deepseek_v4": "deepseek-v4-flash", "qwen4_exp": "qwen4-exp"}[name]
    shape, stage = model_shapes()[preset], model_shapes()[preset].stage("mtp")
    fields = {"model_type": name, "hidden_size": stage.H, "hc_mult": 4, "hc_count": 4}
    config = ek.MTPStreamsConfig.from_hf(fields)
    assert (config.num_streams, config.hnorm_over) == (stage.streams, stage.hnorm_over)
    assert (config.norm_offset, config.enorm_eps) == (shape.norm_offset, stage.eps)
    if architecture is not None:
        fields |= {"architectures": [architecture], "dspark_target_layer_ids": [2, 21, 40]}
        fields |= {"head_dim": 512, "qk_rope_head_dim": 64}
        config = ek.ContextKVConfig.from_hf(fields, target_hidden_size=stage.H)
        context = shape.stage("context_kv").context
        assert config.num_chunks == shape.stage("dspark").K
        for field in ("num_layers", "num_kv_heads", "head_dim", "values", "rotary_begin", "interleaved", "kv_width"):
            assert getattr(context, field) == getattr(config, field), field


@pytest.mark.parametrize(("name", "model_type"), [("deepseek-v4-flash", "deepseek_v4"), ("qwen4-exp", "qwen4_exp")])
def test_streams_and_sizes_are_those_of_transformers(name, model_type):
    config = pytest.importorskip("transformers").AutoConfig.for_model(model_type)
    text, shape = getattr(config, "text_config", config), model_shapes()[name]
    assert (shape.target_hidden_size, shape.num_layers) == (text.hidden_size, text.num_hidden_layers)
    assert (shape.vocab_size, shape.eps) == (text.vocab_size, text.rms_norm_eps)
    streams = getattr(text, "hc_mult", None) or text.hc_count
    assert {stage.streams for stage in shape.stages if stage.context is None} == {streams}


def test_the_captured_layers_of_a_dflash_drafter_of_five_layers():
    """SGLang 0.5.23 `build_target_layer_ids(36, 5)`: five, evenly from 1 to the third from the end."""
    shape = model_shapes()["qwen3-8b"]
    last = shape.num_layers - 3
    assert list(shape.stage("dflash").layer_ids) == [round(1 + i * (last - 1) / 4) for i in range(5)]


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
        model_shapes()["gemma3-4b"].stage("mtp")
