"""capture_layers against real checkpoints and every encoding; Eagle3Config.from_hf against every config format."""

import re
from types import SimpleNamespace

import pytest

from eagle_kernels.drafter_config import Eagle3Config, capture_layers
from eagle_kernels.model_shapes import model_shapes

MODEL_TYPES = {
    "gemma3-27b": "gemma3",
    "gemma4-26b-a4b": "gemma4",
    "deepseek-v3": "deepseek_v3",
    "kimi-k2.5": "kimi_k25",
    "gpt-oss-20b": "gpt_oss",
    "gpt-oss-120b": "gpt_oss",
}
CHECKPOINTS = [
    pytest.param(MODEL_TYPES[shape.name], shape.num_layers, stage, id=f"{shape.name}-{stage.kind}")
    for shape in model_shapes().values()
    for stage in shape.stages
    if stage.boundaries is not None
]


@pytest.mark.parametrize(("model_type", "num_layers", "stage"), CHECKPOINTS)
def test_real_checkpoints(model_type, num_layers, stage):
    assert capture_layers(model_type, num_layers, stage.layer_ids) == list(stage.boundaries)


RULES = [
    pytest.param("llama", 32, [1, 15, 28], [2, 16, 29], id="output-llama"),
    pytest.param("gemma3_text", 62, [1, 29, 61], [2, 30, 62], id="output-gemma3-last-layer"),
    pytest.param("gemma4_text", 30, [5, 17, 29], [6, 18, 30], id="output-gemma4-last-layer"),
    pytest.param("qwen3", 36, [2, 18, 33], [3, 19, 34], id="output-even-where-it-looks-like-boundaries"),
    pytest.param("qwen3_moe", 94, [1, 46, 90], [2, 47, 91], id="output-qwen3-235b"),
    # SGLang's classes inherit the rule: `llama.py` has InternLM3's and IQuestCoder's, `ministral3.py` a subclass of
    # Llama's, `bailing_moe.py` BailingMoeV2's, `sarvam_moe.py` a subclass of it, `mellum.py` one of Qwen3Moe's,
    # `cosmos3.py`, `interns1pro.py`, `interns2preview.py` and `interns2_mobius.py` subclasses of Qwen3VL's. None
    # overrides it.
    pytest.param("internlm3", 48, [1, 23, 44], [2, 24, 45], id="output-internlm3"),
    pytest.param("iquestcoder", 80, [1, 39, 76], [2, 40, 77], id="output-iquest-coder"),
    pytest.param("ministral3", 34, [2, 17, 31], [3, 18, 32], id="output-ministral3"),
    pytest.param("bailing_moe_v2", 32, [1, 15, 28], [2, 16, 29], id="output-ling-2"),
    pytest.param("sarvam_moe", 19, [1, 9, 15], [2, 10, 16], id="output-sarvam"),
    pytest.param("mellum", 28, [1, 13, 24], [2, 14, 25], id="output-mellum"),
    pytest.param("cosmos3_omni", 36, [1, 17, 32], [2, 18, 33], id="output-cosmos-3"),
    pytest.param("interns1_pro", 94, [1, 46, 90], [2, 47, 91], id="output-intern-s1-pro"),
    pytest.param("intern_s2_preview", 40, [1, 19, 36], [2, 20, 37], id="output-intern-s2"),
    pytest.param("interns2_mobius_text", 40, [1, 19, 36], [2, 20, 37], id="output-intern-s2-mobius"),
    pytest.param("minimax_m3_vl", 60, [1, 29, 56, 59], [2, 30, 57, 60], id="output-four-layers"),
    pytest.param("qwen3", 36, [33, 1, 17], [2, 18, 34], id="output-sorted"),
    pytest.param("qwen3", 36, (7,), [8], id="output-one-layer"),
    pytest.param("qwen3", 36, [-1, 17], [0, 18], id="output-of-no-layer-is-the-embedding"),
    pytest.param("deepseek_v3", 61, [1, 29, 57], [2, 30, 58], id="first-id-one-shifts"),
    pytest.param("deepseek_v2", 27, [2, 13, 24], [2, 13, 24], id="first-id-two-does-not"),
    pytest.param("kimi_k2", 61, [2, 30, 58], [2, 30, 58], id="first-id-kimi"),
    pytest.param("glm4_moe_lite", 47, [1, 23, 44], [2, 24, 45], id="first-id-glm"),
    pytest.param("deepseek_v3", 61, [29, 1, 57], [1, 29, 57], id="first-id-as-written-not-the-smallest"),
    pytest.param("gpt_oss", 36, [1, 17, 32], [2, 18, 33], id="max-id-below-n-shifts"),
    pytest.param("gpt_oss", 36, [24, 30, 36], [24, 30, 36], id="max-id-n-does-not"),
    pytest.param("gpt_oss", 36, [36, 24, 30], [24, 30, 36], id="max-id-n-in-any-order"),
]


@pytest.mark.parametrize(("model_type", "num_layers", "layer_ids", "boundaries"), RULES)
def test_eagle3_rules(model_type, num_layers, layer_ids, boundaries):
    assert capture_layers(model_type, num_layers, layer_ids) == boundaries


OVERRIDES = [
    pytest.param("qwen3", 36, [2, 18, 33], "boundary", [2, 18, 33], id="boundary-over-output-rule"),
    pytest.param("qwen3", 36, [0, 36], "boundary", [0, 36], id="boundary-both-ends"),
    pytest.param("kimi_k2", 61, [2, 30, 58], "output", [3, 31, 59], id="output-over-first-id-rule"),
    pytest.param("deepseek_v3", 61, [1, 30, 58], "boundary", [1, 30, 58], id="boundary-over-first-id-rule"),
    pytest.param("gpt_oss", 36, [24, 30, 35], "boundary", [24, 30, 35], id="boundary-over-max-id-rule"),
    pytest.param("not_in_the_table", 40, [2, 20, 37], "boundary", [2, 20, 37], id="unknown-type-boundary"),
    pytest.param("not_in_the_table", 40, [2, 20, 37], "output", [3, 21, 38], id="unknown-type-output"),
]


@pytest.mark.parametrize(("model_type", "num_layers", "layer_ids", "layer_ids_mean", "boundaries"), OVERRIDES)
def test_layer_ids_mean_overrides_the_table(model_type, num_layers, layer_ids, layer_ids_mean, boundaries):
    assert capture_layers(model_type, num_layers, layer_ids, layer_ids_mean=layer_ids_mean) == boundaries


@pytest.mark.parametrize("layer_ids", [[2, 5, 8], (each for each in (2, 5, 8))], ids=["list", "generator"])
def test_a_config_keeps_ids_as_a_tuple(layer_ids) -> None:
    """A generator was used up by the check, and a list could be changed."""
    config = Eagle3Config(3, 64, 48, layer_ids=layer_ids)
    assert config.layer_ids == (2, 5, 8) and hash(config) == hash(Eagle3Config(3, 64, 48, layer_ids=(2, 5, 8)))


@pytest.mark.parametrize("layer_ids_mean", [None, "output", "boundary"])
@pytest.mark.parametrize(
    ("model_type", "num_layers", "boundaries"),
    [
        pytest.param("llama", 32, [2, 16, 29], id="llama"),
        pytest.param("deepseek_v3", 61, [2, 30, 58], id="deepseek"),
        pytest.param("gpt_oss", 24, [2, 12, 21], id="gpt-oss"),
        pytest.param("minimax_m3_vl", 60, [2, 30, 57], id="minimax-m3-where-sglang-shifts"),
        pytest.param("qwen3", 7, [2, 3, 4], id="shallowest"),
        pytest.param("mistral3", 40, [2, 20, 37], id="captured-by-vllm-alone"),
    ],
)
def test_default_layers_are_boundaries(model_type, num_layers, boundaries, layer_ids_mean):
    assert capture_layers(model_type, num_layers, layer_ids_mean=layer_ids_mean) == boundaries


@pytest.mark.parametrize("name", ["gemma4-31b", "kimi-k2.7-dflash"])
def test_dflash_ids_are_outputs_for_every_model_type(name):
    shape = model_shapes()[name]
    layer_ids = shape.stage("dflash").layer_ids
    for model_type in ("gemma4", "kimi_k2", "gpt_oss", "laguna", "nemotron_h", "mimo_v2", "lfm2"):
        boundaries = capture_layers(model_type, shape.num_layers, layer_ids, algorithm="dflash")
        assert boundaries == [layer_id + 1 for layer_id in layer_ids]


def test_dflash_rule_ignores_what_eagle3_rules_look_at():
    assert capture_layers("kimi_k2", 61, [2, 30, 58], algorithm="dflash") == [3, 31, 59]
    assert capture_layers("kimi_k2", 61, [2, 30, 58], algorithm="dflash", layer_ids_mean="boundary") == [2, 30, 58]
    with pytest.raises(ValueError, match=re.escape("boundaries in [0, 36]")):
        capture_layers("gpt_oss", 36, [24, 30, 36], algorithm="dflash")


def test_dspark_ids_are_outputs_but_for_the_stages_of_deepseek_v41():
    """Ids of those stages name the layers whose attention reads the captures (vLLM 0.33
    `get_eagle3_aux_layers_from_config`)."""
    ids, outputs = [2, 21, 40], [3, 22, 41]
    for model_type, boundaries in (("deepseek_v41", ids), ("deepseek_v4", outputs), ("qwen3", outputs)):
        assert capture_layers(model_type, 43, ids, algorithm="dspark") == boundaries
    for algorithm, expected in (("eagle3", "one of"), ("dflash", "a target whose ids have one meaning for DFlash")):
        with pytest.raises(ValueError, match=f"model_type is 'deepseek_v41', expected {expected}"):
            capture_layers("deepseek_v41", 43, ids, algorithm=algorithm)


def test_dflash_ids_of_muse_glimmer_have_to_be_explained():
    """SGLang 0.5.23 `_map_muse_target_layer_ids`: outputs for two classes of drafters, boundaries for others."""
    ids = [2, 21, 40]
    with pytest.raises(ValueError, match=r"those of Muse Glimmer depend on the drafter.*; pass layer_ids_mean$"):
        capture_layers("muse_glimmer", 43, ids, algorithm="dflash")
    assert capture_layers("muse_glimmer", 43, ids, algorithm="dflash", layer_ids_mean="output") == [3, 22, 41]


def test_model_types_are_those_of_transformers():
    configuration_auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    # Remote-code configs, known to SGLang by these names.
    remote = {"bailing_moe", "bailing_moe_v2", "kimi_k2", "minimax_m3", "interns1_pro", "interns1_pro_text"}
    remote |= {"intern_s2_preview", "interns2_mobius", "interns2_mobius_text"}
    with pytest.raises(ValueError, match="model_type") as caught:
        capture_layers("", 36, [2])
    known = set(re.findall(r"'(\w+)'", str(caught.value).split("one of")[1].split("]")[0]))
    assert {"llama", "gemma3", "gemma3_text", "gemma4", "deepseek_v3", "kimi_k2", "gpt_oss", "qwen3"} <= known
    assert known - remote <= set(configuration_auto.CONFIG_MAPPING_NAMES)


_TOO_SHALLOW = "layer_ids is None, expected a list, because the default [2, N // 2, N - 3] needs N >= 7 layers, and the"
CAPTURE_ERRORS = [
    pytest.param(("qwen3", 36, []), {}, ValueError, "layer_ids is [], expected at least one id", id="empty"),
    pytest.param(("qwen3", 36, [2, 5, 2]), {}, ValueError, "layer_ids is [2, 5, 2], expected distinct ids", id="twice"),
    pytest.param(
        ("qwen3", 36, [2, 18, 36]),
        {},
        ValueError,
        "layer_ids is [2, 18, 36], expected boundaries in [0, 36], because with N = 36 layers they mean the "
        "boundaries [3, 19, 37]",
        id="above-n",
    ),
    pytest.param(
        ("deepseek_v3", 61, [2, 30, 62]), {}, ValueError, "expected boundaries in [0, 61]", id="above-n-unshifted"
    ),
    pytest.param(("qwen3", 36, [-2, 18]), {}, ValueError, "they mean the boundaries [-1, 19]", id="below-zero"),
    pytest.param(
        ("qwen3", 36, [-1, 18]),
        {"layer_ids_mean": "boundary"},
        ValueError,
        "they mean the boundaries [-1, 18]",
        id="below-zero-boundary",
    ),
    pytest.param(("qwen3", 3), {}, ValueError, _TOO_SHALLOW, id="3-layers"),
    pytest.param(("qwen3", 6), {}, ValueError, _TOO_SHALLOW, id="6-layers"),
    pytest.param(("qwen3", 36, "[2, 18]"), {}, TypeError, "layer_ids is a str, expected a list of ints", id="text"),
    pytest.param(("qwen3", 36, 2), {}, TypeError, "layer_ids is a int, expected a list of ints", id="number"),
    pytest.param(("qwen3", 36, [True]), {}, TypeError, "layer_ids[0] is a bool, expected an int", id="bool-id"),
    pytest.param(("qwen3", -3), {}, ValueError, "num_layers is -3, expected at least 1", id="negative-layers"),
    pytest.param((["qwen3"], 36), {}, TypeError, "model_type is a list, expected a name", id="list-without-ids"),
    pytest.param((["qwen3"], 36, [2]), {}, ValueError, "model_type is ['qwen3'], expected one of", id="list-of-types"),
    pytest.param(
        (["qwen3"], 36, [1]),
        {"algorithm": "dspark"},
        ValueError,
        "model_type is ['qwen3'], expected a target whose ids have one meaning for DSpark",
        id="list-of-types-dspark",
    ),
    pytest.param(("qwen3", 36, [2, 18.0]), {}, TypeError, "layer_ids[1] is a float, expected an int", id="float-id"),
    pytest.param(("qwen3", None, [2]), {}, TypeError, "num_layers is a NoneType, expected an int", id="no-layers"),
    pytest.param(
        ("qwen3", 36),
        {"algorithm": "dflash"},
        ValueError,
        "layer_ids is None, expected a list, because DFlash has no default layers",
        id="dflash-default",
    ),
    pytest.param(
        ("deepseek_v4", 43),
        {"algorithm": "dspark"},
        ValueError,
        "layer_ids is None, expected a list, because DSpark has no default layers",
        id="dspark-default",
    ),
    pytest.param(
        ("qwen3", 36), {"algorithm": "eagle"}, ValueError, "algorithm is 'eagle', expected 'eagle3' or", id="algorithm"
    ),
    pytest.param(
        ("qwen3", 36),
        {"layer_ids_mean": "input"},
        ValueError,
        "layer_ids_mean is 'input', expected None, 'output' or 'boundary'",
        id="meaning",
    ),
    pytest.param(
        ("lamma", 36, [2]), {}, ValueError, "model_type is 'lamma', expected one of ['apertus', ", id="unknown"
    ),
    pytest.param(("step3p5", 45, [1]), {}, ValueError, "layer_ids_mean='boundary'", id="unknown-says-how-to-go-on"),
]


@pytest.mark.parametrize(("arguments", "keywords", "kind", "message"), CAPTURE_ERRORS)
def test_capture_errors(arguments, keywords, kind, message):
    with pytest.raises(kind, match=re.escape(message)) as caught:
        capture_layers(*arguments, **keywords)
    assert str(caught.value).startswith("capture_layers: ")


LLAMA_DRAFT = {"model_type": "llama", "hidden_size": 4096, "vocab_size": 128256, "rms_norm_eps": 1e-5}


def speculators(model_type="eagle3", layer_config=None, **fields):
    layer_config = {"model_type": "llama", "hidden_size": 4096, "vocab_size": 151936, "rms_norm_eps": 1e-6} | (
        layer_config or {}
    )
    return {"speculators_model_type": model_type, "transformer_layer_config": layer_config, **fields}


# Where a format comes from a checkpoint, the fields that matter here are copied from its config.json.
FORMATS = [
    pytest.param(
        LLAMA_DRAFT | {"draft_vocab_size": 32000},
        Eagle3Config(3, 4096, 4096, eps=1e-5, vocab_size=128256, draft_vocab_size=32000),
        id="specforge-llama3-8b",
    ),
    pytest.param(
        {
            "model_type": "llama",
            "hidden_size": 5376,
            "rms_norm_eps": 1e-06,
            "vocab_size": 262208,
            "draft_vocab_size": 262208,
            "target_model_type": "gemma3_text",
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 29, 61]},
        },
        Eagle3Config(3, 5376, 5376, layer_ids=(1, 29, 61), vocab_size=262208, draft_vocab_size=262208),
        id="specforge-gemma3-27b",
    ),
    pytest.param(
        LLAMA_DRAFT | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 29, 57], "use_aux_hidden_state": True}},
        Eagle3Config(3, 4096, 4096, eps=1e-5, layer_ids=(1, 29, 57), vocab_size=128256, draft_vocab_size=128256),
        id="specforge-deepseek-no-draft-vocab",
    ),
    pytest.param(
        LLAMA_DRAFT | {"fc_norm": True, "norm_output": True},
        Eagle3Config(
            3, 4096, 4096, chunk_norm=True, norm_output=True, eps=1e-5, vocab_size=128256, draft_vocab_size=128256
        ),
        id="specforge-eagle3.1",
    ),
    pytest.param(
        LLAMA_DRAFT | {"use_aux_norm": True, "bias": True},
        Eagle3Config(3, 4096, 4096, chunk_norm=True, bias=True, eps=1e-5, vocab_size=128256, draft_vocab_size=128256),
        id="legacy-use_aux_norm-and-bias",
    ),
    pytest.param(
        {
            "hidden_size": 2880,
            "rms_norm_eps": 1e-5,
            "norm_before_fc": True,
            "eagle_aux_hidden_state_layer_ids": [24, 30, 36],
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [24, 30, 36]},
        },
        Eagle3Config(3, 2880, 2880, concat_norm=True, eps=1e-5, layer_ids=(24, 30, 36)),
        id="nvidia-gpt-oss-v3",
    ),
    pytest.param(
        {"hidden_size": 8, "fc_norm": True, "eagle_config": {"norm_before_fc": True, "num_aux_hidden_states": 4}},
        Eagle3Config(4, 8, 8, chunk_norm=True, concat_norm=True),
        id="both-norms-nested",
    ),
    pytest.param(
        LLAMA_DRAFT | {"hidden_size": 6144, "target_hidden_size": 8192},
        Eagle3Config(3, 8192, 6144, eps=1e-5, vocab_size=128256, draft_vocab_size=128256),
        id="narrow-drafter",
    ),
    pytest.param(
        {"hidden_size": 8, "target_hidden_size": None, "num_aux_layers": 5, "draft_vocab_size": None, "vocab_size": 9},
        Eagle3Config(5, 8, 8, vocab_size=9, draft_vocab_size=9),
        id="nulls-and-num_aux_layers",
    ),
    pytest.param(
        {"hidden_size": 8, "num_aux_hidden_states": 4, "eagle_aux_hidden_state_layer_ids": [2, 9, 20, 33]},
        Eagle3Config(4, 8, 8, layer_ids=(2, 9, 20, 33)),
        id="top-level-ids-agree-with-count",
    ),
    pytest.param(
        {"hidden_size": 8, "eagle_config": {"layer_ids": [2, 18, 30, 33]}},
        Eagle3Config(4, 8, 8, layer_ids=(2, 18, 30, 33), layer_ids_mean="boundary"),
        id="vllm-v2-layer_ids",
    ),
    pytest.param(
        {"hidden_size": 8, "eagle_config": {"use_aux_hidden_state": False, "eagle_aux_hidden_state_layer_ids": []}},
        Eagle3Config(1, 8, 8, projection=False),
        id="modelopt-without-aux-states",
    ),
    pytest.param(
        {"hidden_size": 8, "norm_before_residual": True},
        Eagle3Config(3, 8, 8, norm_before_residual=True),
        id="plain-norm_before_residual",
    ),
    pytest.param(
        speculators(
            draft_vocab_size=32000,
            eagle_aux_hidden_state_layer_ids=[2, 46, 91, 93],
            fc_norm=False,
            norm_before_fc=True,
            norm_before_residual=True,
            norm_output=True,
            target_hidden_size=None,
        ),
        Eagle3Config(
            4,
            4096,
            4096,
            concat_norm=True,
            norm_output=True,
            norm_before_residual=True,
            layer_ids=(2, 46, 91, 93),
            layer_ids_mean="boundary",
            vocab_size=151936,
            draft_vocab_size=32000,
        ),
        id="speculators-four-layers-vllm-54526",
    ),
    pytest.param(
        speculators(draft_vocab_size=64000, layer_config={"num_aux_hidden_states": 3}),
        Eagle3Config(3, 4096, 4096, norm_before_residual=True, vocab_size=151936, draft_vocab_size=64000),
        id="speculators-eagle3-defaults",
    ),
    pytest.param(
        speculators(norm_before_residual=False, target_hidden_size=8192),
        Eagle3Config(3, 8192, 4096, vocab_size=151936, draft_vocab_size=151936),
        id="speculators-eagle3-norm-after",
    ),
    pytest.param(
        speculators("peagle", eagle_aux_hidden_state_layer_ids=[2, 18, 33]),
        Eagle3Config(
            3,
            4096,
            4096,
            layer_ids=(2, 18, 33),
            layer_ids_mean="boundary",
            vocab_size=151936,
            draft_vocab_size=151936,
        ),
        id="speculators-peagle-defaults",
    ),
    pytest.param(
        LLAMA_DRAFT | {"model_type": "speculators", "eagle_aux_hidden_state_layer_ids": [2, 16, 29]},
        Eagle3Config(
            3,
            4096,
            4096,
            eps=1e-5,
            layer_ids=(2, 16, 29),
            layer_ids_mean="boundary",
            vocab_size=128256,
            draft_vocab_size=128256,
        ),
        id="speculators-as-vllm-converts-it",
    ),
]


def test_specforge_feeds_back_the_pre_norm_state():
    config = LLAMA_DRAFT | {"norm_output": True}
    assert Eagle3Config.from_hf(config).norm_output
    assert not Eagle3Config.from_hf(config, trained_by="specforge").norm_output
    message = "Eagle3Config.from_hf: trained_by is 'eagle', expected None or 'specforge'"
    with pytest.raises(ValueError, match=f"^{message}$"):
        Eagle3Config.from_hf(config, trained_by="eagle")


@pytest.mark.parametrize("value", [True, False])
def test_every_flag_of_speculators_is_read(value):
    """As speculators 0.9 writes them: every flag, at the top level of the config."""
    flags = dict.fromkeys(("norm_before_residual", "norm_before_fc", "norm_output"), value)
    config = Eagle3Config.from_hf(speculators(fc_norm=False, **flags))
    assert (config.norm_before_residual, config.concat_norm, config.norm_output) == (value,) * 3


@pytest.mark.parametrize(("config", "expected"), FORMATS)
def test_formats_as_dicts(config, expected):
    assert Eagle3Config.from_hf(config) == expected


@pytest.mark.parametrize(("config", "expected"), FORMATS)
def test_formats_as_objects(config, expected):
    nested = {key: SimpleNamespace(**value) if isinstance(value, dict) else value for key, value in config.items()}
    assert Eagle3Config.from_hf(SimpleNamespace(**nested)) == expected


@pytest.mark.parametrize(("config", "expected"), FORMATS)
def test_formats_as_transformers_configs(config, expected):
    transformers = pytest.importorskip("transformers")
    fields = {key: value for key, value in config.items() if key != "model_type"}
    hf_config = transformers.PretrainedConfig(**fields)
    hf_config.model_type = config.get("model_type", "")
    assert Eagle3Config.from_hf(hf_config) == expected


def test_speculators_ids_reach_capture_layers_unshifted():
    # Qwen3 ids are outputs in SGLang's format; read that way, speculators' own default would be one layer late.
    config = Eagle3Config.from_hf(speculators(eagle_aux_hidden_state_layer_ids=[2, 18, 33]))
    assert capture_layers("qwen3", 36, config.layer_ids, layer_ids_mean=config.layer_ids_mean) == [2, 18, 33]
    plain = Eagle3Config.from_hf({"hidden_size": 8, "eagle_aux_hidden_state_layer_ids": [1, 17, 32]})
    assert capture_layers("qwen3", 36, plain.layer_ids, layer_ids_mean=plain.layer_ids_mean) == [2, 18, 33]


CONFIG_ERRORS = [
    pytest.param(
        {"num_aux_hidden_states": 4, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 29, 57]}},
        ValueError,
        "eagle_config.eagle_aux_hidden_state_layer_ids is [1, 29, 57], expected K = 4 chunks, because "
        "num_aux_hidden_states is 4",
        id="count-against-nested-ids",
    ),
    pytest.param(
        {"eagle_config": {"num_aux_hidden_states": 3}, "eagle_aux_hidden_state_layer_ids": [2, 9, 20, 33]},
        ValueError,
        "eagle_aux_hidden_state_layer_ids is [2, 9, 20, 33], expected K = 3 chunks, because "
        "eagle_config.num_aux_hidden_states is 3",
        id="nested-count-against-ids",
    ),
    pytest.param(
        {"num_aux_hidden_states": 3, "eagle_config": {"num_aux_hidden_states": 4}},
        ValueError,
        "eagle_config.num_aux_hidden_states is 4, expected K = 3 chunks, because num_aux_hidden_states is 3",
        id="count-against-count",
    ),
    pytest.param(
        {
            "eagle_aux_hidden_state_layer_ids": [1, 29, 57],
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 29, 57, 60]},
        },
        ValueError,
        "eagle_config.eagle_aux_hidden_state_layer_ids is (1, 29, 57, 60), expected (1, 29, 57), because "
        "eagle_aux_hidden_state_layer_ids says so",
        id="ids-against-ids",
    ),
    pytest.param(
        {"eagle_config": {"use_aux_hidden_state": False}, "eagle_aux_hidden_state_layer_ids": [1, 29, 57]},
        ValueError,
        "use_aux_hidden_state is False, expected K = 3 chunks, because eagle_aux_hidden_state_layer_ids is [1, 29, 57]",
        id="no-aux-states-against-ids",
    ),
    pytest.param(
        {"transformer_layer_config": {"num_aux_hidden_states": 3}, "eagle_aux_hidden_state_layer_ids": [2, 46, 91, 93]},
        ValueError,
        "expected K = 3 chunks, because transformer_layer_config.num_aux_hidden_states is 3",
        id="speculators-count-against-ids",
    ),
    pytest.param(
        {"norm_before_fc": True, "eagle_config": {"norm_before_fc": False}},
        ValueError,
        "eagle_config.norm_before_fc is False, expected True, because norm_before_fc says so",
        id="norm-against-norm",
    ),
    pytest.param({"hidden_size": None}, ValueError, "hidden_size is missing", id="no-width"),
    pytest.param({"hidden_size": 0}, ValueError, "hidden_size is 0, expected at least 1", id="zero-width"),
    pytest.param({"hidden_size": "4096"}, TypeError, "hidden_size is a str, expected an int", id="width-as-text"),
    pytest.param(
        {"eagle_aux_hidden_state_layer_ids": [1, "29"]},
        TypeError,
        "eagle_aux_hidden_state_layer_ids[1] is a str, expected an int",
        id="id-as-text",
    ),
    pytest.param(
        {"speculators_model_type": "dflash"},
        ValueError,
        "speculators_model_type is 'dflash', expected 'eagle3' or 'peagle'",
        id="not-eagle3",
    ),
    *(
        pytest.param({name: "false"}, TypeError, f"{name} is 'false', expected True or False", id=f"{name}-as-text")
        for name in (
            "fc_norm",
            "use_aux_norm",
            "norm_before_fc",
            "bias",
            "use_aux_hidden_state",
            "norm_output",
            "norm_before_residual",
        )
    ),
    pytest.param(
        {"eagle_config": {"fc_norm": 1}}, TypeError, "fc_norm is 1, expected True or False", id="flag-as-number"
    ),
    *(
        pytest.param(
            {"eagle_aux_hidden_state_layer_ids": ids},
            TypeError,
            f"eagle_aux_hidden_state_layer_ids is a {type(ids).__name__}, expected a list of ints",
            id=f"ids-as-{type(ids).__name__}",
        )
        for ids in ("[1, 29, 57]", 29)
    ),
    pytest.param(
        {"eagle_config": {"layer_ids": [1, True]}},
        TypeError,
        "eagle_config.layer_ids[1] is a bool, expected an int",
        id="id-as-bool",
    ),
    *(
        pytest.param(
            {"rms_norm_eps": eps}, ValueError, f"eps is {eps}, expected a finite fp32 number of at least 0", id=str(eps)
        )
        for eps in (float("nan"), float("inf"), -1e-6)
    ),
    *(
        pytest.param(
            {"rms_norm_eps": eps}, TypeError, f"rms_norm_eps is a {type(eps).__name__}, expected a number", id=str(eps)
        )
        for eps in ("abc", "1e-6", True, [1e-6])
    ),
    pytest.param(
        {"num_aux_hidden_states": 10**9},
        ValueError,
        "K=1000000000 chunks of H=4096 have 4096000000000 columns, expected at most 2147479552",
        id="K",
    ),
    pytest.param(
        {"hidden_size": 2**62, "target_hidden_size": 64},
        ValueError,
        f"K=1 chunks of H={2**62} have {2**62} columns, expected at most 2147479552",
        id="width",
    ),
    pytest.param({"hidden_size": True}, TypeError, "hidden_size is a bool, expected an int", id="width-as-bool"),
    pytest.param({"vocab_size": -1}, ValueError, "vocab_size is -1, expected at least 1", id="vocab"),
    pytest.param({"draft_vocab_size": "1"}, TypeError, "draft_vocab_size is a str, expected an int", id="draft-vocab"),
    pytest.param({"eagle_config": "x"}, TypeError, "eagle_config is a str, expected a dict or", id="section"),
]


@pytest.mark.parametrize(("fields", "kind", "message"), CONFIG_ERRORS)
def test_config_errors(fields, kind, message):
    with pytest.raises(kind, match=re.escape(message)) as caught:
        Eagle3Config.from_hf({"hidden_size": 4096} | fields)
    assert str(caught.value).startswith("Eagle3Config")


@pytest.mark.parametrize("config", ["config.json", None, 3], ids=["path", "none", "int"])
def test_from_hf_reads_no_files(config):
    with pytest.raises(TypeError, match=r"Eagle3Config.from_hf: config is a \w+, expected a dict or a Hugging Face"):
        Eagle3Config.from_hf(config)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"eps": "abc"}, "eps is a str, expected a number"),
        ({"eps": float("nan")}, "eps is nan, expected a finite fp32 number of at least 0"),
        ({"norm_offset": "1"}, "norm_offset is a str, expected a number"),
        ({"norm_offset": float("inf")}, "norm_offset is inf, expected a finite fp32 number"),
        ({"chunk_norm": "false"}, "chunk_norm is 'false', expected True or False"),
        ({"num_chunks": True}, "num_chunks is a bool, expected an int"),
        ({"layer_ids": "123"}, "layer_ids is a str, expected a list of ints"),
        ({"layer_ids_mean": "input"}, "layer_ids_mean is 'input', expected None, 'output' or 'boundary'"),
    ],
)
def test_direct_construction_checks_its_fields(fields, message):
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(f'Eagle3Config: {message}')}$"):
        Eagle3Config(**{"num_chunks": 3, "target_hidden_size": 8, "hidden_size": 8} | fields)


def test_direct_construction_checks_layer_ids():
    with pytest.raises(ValueError, match=re.escape("Eagle3Config: layer_ids is (1, 2), expected 3 ids")):
        Eagle3Config(3, 8, 8, layer_ids=(1, 2))
    assert hash(Eagle3Config(2, 8, 8, layer_ids=(1, 2))) == hash(Eagle3Config(2, 8, 8, layer_ids=(1, 2)))
