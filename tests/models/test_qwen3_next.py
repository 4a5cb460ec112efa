"""Qwen3-Next: offset against transformers, and its MTP weights under their own names."""

import pytest
import torch

import eagle_kernels as ek
from eagle_kernels.models.qwen3_next import QWEN3_NEXT
from family_checks import check_model_types, check_norm_offset, check_presets
from guards import same_bits

transformers = pytest.importorskip("transformers")

from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm  # noqa: E402


def test_qwen3_next_is_what_it_says() -> None:
    check_model_types(QWEN3_NEXT, transformers.Qwen3NextConfig)
    check_norm_offset(QWEN3_NEXT, Qwen3NextRMSNorm(96, eps=1e-5))
    check_presets(QWEN3_NEXT)


def test_its_mtp_layer_loads_by_its_own_names() -> None:
    config = ek.MTPConfig.from_hf(transformers.Qwen3NextConfig(hidden_size=24))
    weights = {"fc": (24, 48), "pre_fc_norm_embedding": (24,), "pre_fc_norm_hidden": (24,)}
    weights = {f"mtp.{name}.weight": torch.randn(shape) for name, shape in weights.items()}
    layer = ek.MTPProjection(config).load_checkpoint(weights | {"mtp.norm.weight": torch.ones(24)})
    assert config.norm_offset == 1.0
    assert same_bits(layer.enorm.weight, weights["mtp.pre_fc_norm_embedding.weight"])
    assert same_bits(layer.hnorm.weight, weights["mtp.pre_fc_norm_hidden.weight"])
    assert same_bits(layer.eh_proj.weight, weights["mtp.fc.weight"])
