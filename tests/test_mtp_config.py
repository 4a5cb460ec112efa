"""MTPConfig: what from_hf reads from configs of every family and shape, and the words of its errors."""

import math
import re
from types import SimpleNamespace

import pytest

import eagle_kernels as ek
from eagle_kernels.models import families

TEXT = {"hidden_size": 256, "rms_norm_eps": 1e-5}

EXPECTED = [
    pytest.param({"model_type": "deepseek_v3"} | TEXT, "sglang", {}, id="deepseek-sglang"),
    pytest.param({"model_type": "deepseek_v3"} | TEXT, "vllm", {"mask_position_zero": True}, id="deepseek-vllm"),
    pytest.param({"model_type": "step3p5"} | TEXT, "vllm", {"norm_offset": 1.0, "chain": "pre-norm"}, id="step3p5"),
    pytest.param(
        {"model_type": "step3p7", "text_config": TEXT},
        "sglang",
        {"norm_offset": 1.0, "chain": "pre-norm"},
        id="composite",
    ),
    pytest.param({"model_type": "qwen3_next"} | TEXT, "sglang", {"norm_offset": 1.0}, id="qwen3-next"),
    pytest.param(
        {"model_type": "gemma4_assistant", "backbone_hidden_size": 2816, "text_config": TEXT},
        "vllm",
        {
            "hidden_size": 2816,
            "out_features": 256,
            "normed": False,
            "embedding_scale": 2816**0.5,
            "round_embedding_scale": True,
            "chain": "projected",
        },
        id="gemma4-assistant",
    ),
]


@pytest.mark.parametrize("as_object", [False, True], ids=["dict", "object"])
@pytest.mark.parametrize(("config", "engine", "expected"), EXPECTED)
def test_from_hf_reads_what_the_family_says(config: dict, engine: str, expected: dict, as_object: bool) -> None:
    if as_object:
        config = SimpleNamespace(**config)
    expected = {"hidden_size": 256, "enorm_eps": 1e-5, "hnorm_eps": 1e-5, "round_embedding_scale": False} | expected
    assert ek.MTPConfig.from_hf(config, engine=engine) == ek.MTPConfig(**expected)


def test_gemma4_scale_is_rounded_by_all_but_sglang() -> None:
    config = {"model_type": "gemma4_assistant", "backbone_hidden_size": 2816, "text_config": TEXT}
    assert not ek.MTPConfig.from_hf(config, engine="sglang").round_embedding_scale
    assert ek.MTPConfig.from_hf(config, engine="transformers").round_embedding_scale


KNOWN = sorted(
    {
        name
        for family in families().values()
        if family.mtp is not None and not family.mtp.streams
        for name in family.config_types
    }
)
ERRORS = [
    pytest.param(
        lambda: ek.MTPConfig.from_hf({"model_type": "llama"} | TEXT),
        f"MTPConfig.from_hf: model_type is 'llama', expected one of {KNOWN}, because order, norms and masking depend "
        "on it; for another one build the MTPConfig itself",
        id="unknown-model",
    ),
    pytest.param(
        lambda: ek.MTPConfig.from_hf({"model_type": "kimi_k2"} | TEXT),
        f"MTPConfig.from_hf: model_type is 'kimi_k2', expected one of {KNOWN}, because order, norms and masking depend "
        "on it; for another one build the MTPConfig itself",
        id="without-mtp-layers",
    ),
    pytest.param(
        lambda: ek.MTPConfig.from_hf({"model_type": "deepseek_v4"} | TEXT),
        "MTPConfig.from_hf: model_type is 'deepseek_v4', expected one projection of a concat, because h_proj projects "
        "each residual stream by itself: MTPStreamsConfig",
        id="streams",
    ),
    pytest.param(
        lambda: ek.MTPConfig.from_hf({"model_type": "kimi_k3"} | TEXT),
        "MTPConfig.from_hf: engine is 'sglang', expected 'vllm' or 'transformers', because sglang does not serve "
        "Kimi K3",
        id="not-served",
    ),
    pytest.param(
        lambda: ek.MTPConfig.from_hf(
            {"architectures": ["EagleLlamaForCausalLM"], "model_type": "llama"} | TEXT, engine="transformers"
        ),
        "MTPConfig.from_hf: engine is 'transformers', expected 'sglang' or 'vllm', because transformers does not serve "
        "Llama, Qwen 2 EAGLE",
        id="eagle-in-transformers",
    ),
    pytest.param(
        lambda: ek.MTPConfig.from_hf({"model_type": "ernie4_5_moe", "use_bias": "no"} | TEXT),
        "MTPConfig.from_hf: use_bias is 'no', expected True or False",
        id="bias-of-hf",
    ),
    pytest.param(
        lambda: ek.MTPConfig(8, chain="post"),
        "MTPConfig: chain is 'post', expected 'normed' or 'pre-norm' or 'target' or 'streams' or 'projected'",
        id="chain",
    ),
    pytest.param(
        lambda: ek.MTPConfig.from_hf({"model_type": "deepseek_v3"} | TEXT, engine="trt"),
        "MTPConfig.from_hf: engine is 'trt', expected 'sglang' or 'vllm' or 'transformers'",
        id="engine",
    ),
    pytest.param(
        lambda: ek.MTPConfig.from_hf({"model_type": "deepseek_v3"}),
        "MTPConfig.from_hf: hidden_size is missing, expected the target's width",
        id="width",
    ),
    pytest.param(
        lambda: ek.MTPConfig.from_hf({"model_type": "step5", "zero_centered": 1} | TEXT, engine="vllm"),
        "MTPConfig.from_hf: zero_centered is 1, expected one of [True, False], because another norm is no RMSNorm",
        id="offset",
    ),
    pytest.param(
        lambda: ek.MTPConfig(8, order="hidden"),
        "MTPConfig: order is 'hidden', expected 'embed,hidden' or 'hidden,embed'",
        id="order",
    ),
    pytest.param(lambda: ek.MTPConfig(0), "MTPConfig: hidden_size is 0, expected at least 1", id="H"),
    pytest.param(
        lambda: ek.MTPConfig(2**30, 8),
        f"MTPConfig: K=2 chunks of H={2**30} have {2**31} columns, expected at most {2**31 - 4096}, because int32 "
        "counts them",
        id="columns",
    ),
    pytest.param(lambda: ek.MTPConfig(8, 2.5), "MTPConfig: out_features is a float, expected an int", id="D"),
    pytest.param(lambda: ek.MTPConfig(8, enorm_eps="x"), "MTPConfig: enorm_eps is a str, expected a number", id="eps"),
    pytest.param(
        lambda: ek.MTPConfig(8, norm_offset=-math.inf),
        "MTPConfig: norm_offset is -inf, expected a finite fp32 number",
        id="norm_offset",
    ),
    pytest.param(
        lambda: ek.MTPConfig(8, embedding_scale=0.0),
        "MTPConfig: embedding_scale is 0.0, expected above 0 and finite",
        id="scale",
    ),
    pytest.param(
        lambda: ek.MTPConfig(8, embedding_scale=math.inf),
        "MTPConfig: embedding_scale is inf, expected above 0 and finite",
        id="infinite-scale",
    ),
    *(
        pytest.param(
            lambda name=name, eps=eps: ek.MTPConfig(8, **{name: eps}),
            f"MTPConfig: {name} is {eps}, expected a finite fp32 number of at least 0",
            id=f"{name}-{eps}",
        )
        for name in ("enorm_eps", "hnorm_eps")
        for eps in (math.nan, math.inf, -1.0)
    ),
    pytest.param(lambda: ek.MTPConfig(True), "MTPConfig: hidden_size is a bool, expected an int", id="H-as-bool"),
    pytest.param(
        lambda: ek.MTPConfig(8, normed="false"), "MTPConfig: normed is 'false', expected True or False", id="normed"
    ),
    pytest.param(
        lambda: ek.MTPConfig.from_hf({"model_type": "deepseek_v3"} | TEXT | {"rms_norm_eps": "abc"}),
        "MTPConfig.from_hf: rms_norm_eps is a str, expected a number",
        id="eps-of-hf",
    ),
    *(
        pytest.param(
            lambda fields=fields: ek.MTPConfig.from_hf({"model_type": "gemma4_assistant"} | TEXT | fields),
            f"MTPConfig.from_hf: {message}",
            id=id,
        )
        for fields, message, id in (
            ({"backbone_hidden_size": [2816]}, "backbone_hidden_size is a list, expected an int", "width-as-list"),
            ({"backbone_hidden_size": -1}, "backbone_hidden_size is -1, expected at least 1", "width-without-a-root"),
            (
                {"backbone_hidden_size": 10**400},
                "backbone_hidden_size is beyond 64 bits, expected an int of 64 bits",
                "width-beyond-a-float",
            ),
        )
    ),
    pytest.param(
        lambda: ek.MTPConfig.from_hf("config.json"),
        "MTPConfig.from_hf: config is a str, expected a dict or a Hugging Face config object",
        id="path",
    ),
]


@pytest.mark.parametrize(("call", "message"), ERRORS)
def test_errors_say_what_is_expected(call: object, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^{re.escape(message)}$"):
        call()


def test_an_eps_of_zero_is_one() -> None:
    config = ek.MTPConfig.from_hf({"model_type": "deepseek_v3", "hidden_size": 8, "rms_norm_eps": 0})
    assert (config.enorm_eps, config.hnorm_eps) == (0.0, 0.0)


@pytest.mark.parametrize("field", ["layernorm_epsilon", "rms_norm_eps"])
def test_an_eps_of_another_name_may_have_transformers_own(field: str) -> None:
    """MiMo-V2's config.json has the first name, transformers' config object made from it the second."""
    config = ek.MTPConfig.from_hf({"model_type": "mimo_v2_flash", "hidden_size": 8, field: 1e-3})
    assert (config.enorm_eps, config.hnorm_eps) == (1e-3, 1e-3)
