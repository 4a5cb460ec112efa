"""DeepSeek V3 and Kimi K2: norms, the two encodings of one list of layers, and the contested position 0."""

import pytest
import torch

import eagle_kernels as ek
from eagle_kernels.models.deepseek import DEEPSEEK_V3, KIMI_K2
from family_checks import check_model_types, check_norm_offset, check_presets

transformers = pytest.importorskip("transformers")

from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm  # noqa: E402


def test_deepseek_v3_is_what_it_says() -> None:
    check_model_types(DEEPSEEK_V3, transformers.DeepseekV3Config)
    check_norm_offset(DEEPSEEK_V3, DeepseekV3RMSNorm(96))
    check_presets(DEEPSEEK_V3)
    assert not DEEPSEEK_V3.mtp.chained
    assert DEEPSEEK_V3.embedding_scale(7168, torch.bfloat16, engine="vllm") is None


def test_kimi_k2_is_what_it_says() -> None:
    assert ek.models.find_family("kimi_k2") is KIMI_K2 and ek.models.find_family("kimi_k25") is KIMI_K2
    check_presets(KIMI_K2)


def test_both_encodings_mean_the_same_boundaries() -> None:
    assert ek.capture_layers("deepseek_v3", 61, [1, 29, 57]) == ek.capture_layers("kimi_k2", 61, [2, 30, 58])


@pytest.mark.parametrize(("engine", "masks"), [("sglang", False), ("vllm", True), ("transformers", False)])
def test_only_vllm_zeroes_position_0(engine: str, masks: bool) -> None:
    config = transformers.DeepseekV3Config(hidden_size=96, rms_norm_eps=1e-5)
    assert ek.MTPConfig.from_hf(config, engine=engine) == ek.MTPConfig(
        96, enorm_eps=1e-5, hnorm_eps=1e-5, mask_position_zero=masks
    )


def test_a_target_without_mtp_layers_is_refused() -> None:
    message = r"MTPConfig.from_hf: model_type is 'kimi_k2', expected one of \[.*'deepseek_v3'.*'step3p5'.*\], because "
    message += "order, norms and masking depend on it; for another one build the MTPConfig itself$"
    with pytest.raises(ValueError, match=message):
        ek.MTPConfig.from_hf({"model_type": "kimi_k2", "hidden_size": 7168})
