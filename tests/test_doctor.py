"""`eagle-kernels doctor`: pairs that fit, and one pair for each trap, in the files of a checkpoint."""

import io
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from eagle_kernels.bench import cli
from eagle_kernels.bench.doctor import examine, lists, modelopt, nextn, pair, served

import eagle_kernels as ek
from eagle_kernels.engines import scales
from eagle_kernels.quantization_config import OTHER_TOOLS
from engines.test_scales import at
from test_int4_checkpoint import says_transformers

save_file = pytest.importorskip("safetensors.torch").save_file

K, H, D, V, DRAFTED, N = 3, 64, 48, 1000, 200, 12
IDS = "eagle_aux_hidden_state_layer_ids"
LAYER = f"model.layers.{N}"
FP8 = torch.float8_e4m3fn
KV_A = "kv_a_proj_with_mqa"
SLIDING = "sliding_attention"
BY_LAYER_TYPE = {name: {"rope_type": "default", "rope_theta": 1e4} for name in ("full_attention", SLIDING)}
HF_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


class Files:
    """The files of a target and its drafter."""

    target: dict
    drafter: dict
    weights: dict[str, torch.Tensor]
    beside: dict | None = None  # `quantization` of the drafter's hf_quant_config.json

    def save(self, folder: Path) -> tuple[Path, Path]:
        for name, config in (("target", self.target), ("drafter", self.drafter)):
            (folder / name).mkdir()
            (folder / name / "config.json").write_text(json.dumps(config))
        save_file(self.weights, folder / "drafter/model.safetensors")
        if self.beside is not None:
            (folder / "drafter/hf_quant_config.json").write_text(json.dumps({"quantization": self.beside}))
        return folder / "target", folder / "drafter"


class Checkpoints(Files):
    """A Llama target and an EAGLE-3 drafter of it that both engines read as its config means."""

    def __init__(self) -> None:
        self.target = {"model_type": "llama", "hidden_size": H, "num_hidden_layers": N, "vocab_size": V}
        self.drafter = {"hidden_size": D, "target_hidden_size": H, "vocab_size": V, "draft_vocab_size": DRAFTED}
        self.drafter["fc_norm"] = True
        self.weights = {f"fc_norm.{k}.weight": torch.ones(H) for k in range(K)}
        self.weights |= {"fc.weight": torch.ones(D, K * H).bfloat16(), "lm_head.weight": torch.ones(DRAFTED, D)}
        self.weights |= {"d2t": torch.zeros(DRAFTED, dtype=torch.int64), "norm.weight": torch.ones(D)}
        self.weights |= {f"midlayer.{norm}.weight": torch.ones(D) for norm in ("input_layernorm", "hidden_norm")}


def with_attention(c: Checkpoints, layer: str = "midlayer", **fields: object) -> None:
    """One decoder layer of four heads, and the config's fields of it."""
    c.drafter.update(
        {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12} | fields
    )
    rows = {"q": D, "k": D // 2, "v": D // 2}
    c.weights.update({f"{layer}.self_attn.{name}_proj.weight": torch.ones(rows[name], 2 * D) for name in rows})
    c.weights[f"{layer}.self_attn.o_proj.weight"] = torch.ones(D, D)


def with_latent_attention(c: Checkpoints, **fields: object) -> None:
    sizes = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8}
    c.drafter.update({"num_hidden_layers": 1, "num_attention_heads": 4} | sizes | fields)
    c.drafter.update(architectures=["Eagle3DeepseekV2ForCausalLM"])
    c.weights.update({f"midlayer.self_attn.{name}.weight": torch.ones(24, 2 * D) for name in ("q_a_proj", KV_A)})


def with_biases(c: Checkpoints, layer: str = "midlayer", output: bool = True) -> None:
    """Of q, k and v, and of o_proj."""
    rows = {"q": D, "k": D // 2, "v": D // 2} | ({"o": D} if output else {})
    c.weights.update({f"{layer}.self_attn.{name}_proj.bias": torch.ones(rows[name]) for name in rows})


class MTPCheckpoints(Files):
    """DeepSeek's, whose MTP layer follows the target's own layers in one checkpoint."""

    def __init__(self) -> None:
        self.target = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 2 * H}
        self.target |= {"num_hidden_layers": N, "vocab_size": V}
        self.drafter = self.target
        self.weights = {f"{LAYER}.{name}.weight": torch.ones(2 * H) for name in ("enorm", "hnorm")}
        self.weights |= {f"{LAYER}.eh_proj.weight": torch.ones(2 * H, 4 * H).bfloat16()}


class EagleCheckpoints(Files):
    """Mistral's EAGLE-1, as Mistral writes it."""

    def __init__(self) -> None:
        self.target = {"model_type": "mistral", "hidden_size": H, "num_hidden_layers": N, "vocab_size": V}
        # SGLang knows the first name alone, vLLM the second, with Eagle in front.
        names = ["MistralForCausalLMEagle", "MistralForCausalLM"]
        self.drafter = self.target | {"architectures": names, "num_hidden_layers": 1}
        self.drafter["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "static"}
        self.weights = {
            "eagle_linear.weight": torch.ones(H, 2 * H).to(FP8),
            "eagle_linear.qscale_weight": torch.ones(1),
        }
        self.weights |= {"eagle_linear.qscale_act": torch.ones(1)}


class ContextCheckpoints(Files):
    """A DFlash drafter of Qwen 3."""

    def __init__(self) -> None:
        self.target = {"model_type": "qwen3", "hidden_size": H, "num_hidden_layers": N, "vocab_size": V}
        self.drafter = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": H}
        self.drafter |= {"num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 2, "head_dim": 16}
        self.drafter |= {"num_target_layers": N, "vocab_size": V, "dflash_config": {"target_layer_ids": [1, 4, 8]}}
        self.weights = {"fc.weight": torch.ones(H, K * H).bfloat16(), "hidden_norm.weight": torch.ones(H)}
        for layer in (f"layers.{number}.self_attn" for number in range(2)):
            self.weights |= {f"{layer}.{part}_proj.weight": torch.ones(32, H).bfloat16() for part in "kv"}
            self.weights[f"{layer}.k_norm.weight"] = torch.ones(16)


def as_laguna(checkpoints: Files) -> None:
    """Laguna's DFlash drafter as it is published, with one weight for q, k and v."""
    checkpoints.drafter.update(architectures=["DFlashLagunaForCausalLM"], model_type="laguna")
    checkpoints.drafter.update(rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    checkpoints.weights |= {f"aux_hidden_norms.{k}.weight": torch.ones(H) for k in range(K)}
    for layer in range(2):
        attention = f"layers.{layer}.self_attn"
        for part in "kv":
            del checkpoints.weights[f"{attention}.{part}_proj.weight"]
        checkpoints.weights[f"{attention}.qkv_proj.weight"] = torch.ones(64 + 2 * 32, H).bfloat16()
        checkpoints.weights[f"{attention}.o_proj.weight"] = torch.ones(H, 64).bfloat16()
        checkpoints.weights[f"layers.{layer}.input_layernorm.weight"] = torch.ones(H)


def as_laguna_in_parts(checkpoints: Files) -> None:
    """The same with q, k and v apart, which SGLang loads too."""
    own = {name: value for name, value in checkpoints.weights.items() if "_proj" in name}
    as_laguna(checkpoints)
    whole = {name for name in checkpoints.weights if "qkv_proj" in name}
    checkpoints.weights = {name: value for name, value in checkpoints.weights.items() if name not in whole} | own


def of_speculators(checkpoints: Files, kind: str, **more: object) -> None:
    """The same drafter in speculators' format, whose ids are boundaries."""
    layers = checkpoints.drafter | {"num_target_layers": None, "dflash_config": None, "architectures": None}
    checkpoints.drafter = {"speculators_model_type": kind, "aux_hidden_state_layer_ids": [2, 5, 9], **more}
    checkpoints.drafter |= {"transformer_layer_config": layers, "mask_token_id": 3}


def as_minimax_m31(checkpoints: Files) -> None:
    """MiniMax-M3.1's DSpark: one config with the target's, names with a prefix; vLLM does not serve it."""
    text = checkpoints.drafter | {"num_hidden_layers": N, "use_gemma_norm": True}
    text["dflash_config"] = text["dflash_config"] | {"num_hidden_layers": 2, "num_target_layers": N}
    checkpoints.drafter = {"architectures": ["DSparkMiniMaxDraftModel"], "text_config": text}
    weights, prefix = checkpoints.weights, "language_model.model.dspark"
    named = {name.replace(".self_attn", ".decoder_layer.self_attn"): value for name, value in weights.items()}
    checkpoints.weights = {f"{prefix}.{name}": value for name, value in named.items()}
    beside = [f"language_model.model.layers.{layer}" for layer in range(N)]  # codes without a scale
    checkpoints.weights |= {f"{layer}.self_attn.k_proj.weight": torch.ones(32, H) for layer in beside}
    checkpoints.weights |= {f"{layer}.mlp.up_proj.weight": torch.ones(32, H).to(FP8) for layer in beside}


def as_kimi_k3(checkpoints: Files) -> None:
    """Kimi K3's DSpark, whose num_target_layers is the number of captured layers; SGLang does not serve it."""
    drafter = checkpoints.drafter
    del drafter["dflash_config"], drafter["head_dim"]
    drafter.update(architectures=["K3DSparkModel"], target_layer_ids=[1, 4, 8], num_target_layers=3)
    drafter.update(kv_lora_rank=32, qk_rope_head_dim=8)
    checkpoints.weights = {"context_proj.weight": torch.ones(H, K * H).bfloat16(), "context_norm.weight": torch.ones(H)}
    for attention in (f"layers.{layer}.self_attn" for layer in range(2)):
        checkpoints.weights[f"{attention}.kv_a_proj_with_mqa.weight"] = torch.ones(40, H).bfloat16()
        checkpoints.weights[f"{attention}.kv_a_layernorm.weight"] = torch.ones(32)


def as_deepseek_v4(checkpoints: Files, *left_out: str, numbers: str = "") -> None:
    """The MTP layer of DeepSeek-V4 under its names, in FP8 blocks except `numbers`; the config ignores `left_out`."""
    config = HF_FP8 | {"weight_block_size": [128, 128], "ignored_layers": list(left_out)}
    checkpoints.target.update(model_type="deepseek_v4", architectures=["DeepseekV4ForCausalLM"], hc_mult=4)
    checkpoints.target["quantization_config"] = config
    checkpoints.weights = {f"mtp.0.{name}.weight": torch.ones(2 * H) for name in ("enorm", "hnorm", "attn_norm")}
    attention = [f"attn.{name}" for name in ("wq_a", "wkv", "wq_b", "wo_a", "wo_b")]
    experts = [f"ffn.shared_experts.{name}" for name in ("w1", "w2", "w3")]
    for path in (f"mtp.0.{name}" for name in ("e_proj", "h_proj", "emb.tok_emb", "head", *attention, *experts)):
        weight = torch.ones(2 * H, 2 * H)
        checkpoints.weights[f"{path}.weight"] = weight.bfloat16() if path == numbers else weight.to(FP8)
        if path != numbers:
            checkpoints.weights[f"{path}.scale"] = torch.ones(1, 1).to(torch.float8_e8m0fnu)


def with_dspark(checkpoints: Files) -> None:
    """A DSpark stage instead of the MTP layer of `as_deepseek_v4`, with main_proj in numbers."""
    checkpoints.target.update(dspark_target_layer_ids=[1, 4, 8], n_mtp_layers=1, num_attention_heads=3, head_dim=16)
    checkpoints.target.update(num_key_value_heads=1, qk_rope_head_dim=8)
    checkpoints.weights |= {"mtp.0.attn.wkv.weight": torch.ones(16, 2 * H).to(FP8)}
    checkpoints.weights |= {"mtp.0.main_proj.weight": torch.ones(2 * H, 6 * H).bfloat16()}
    checkpoints.weights |= {"mtp.0.main_norm.weight": torch.ones(2 * H), "mtp.0.attn.kv_norm.weight": torch.ones(16)}


def as_qwen35(checkpoints: Files, in_codes: bool) -> None:
    """The MTP layer of Qwen 3.5 in Model-Optimizer's NVFP4, its fc in codes or in numbers."""
    text = {"model_type": "qwen3_5_text", "hidden_size": 2 * H, "num_hidden_layers": N, "vocab_size": V}
    config = {"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    checkpoints.target.clear()
    checkpoints.target.update(model_type="qwen3_5", architectures=["Qwen3_5ForConditionalGeneration"])
    checkpoints.target.update(text_config=text, quantization_config=config)
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden")
    checkpoints.weights = {f"mtp.{name}.weight": torch.ones(2 * H) for name in norms}
    checkpoints.weights["mtp.fc.weight"] = torch.ones(2 * H, 4 * H).bfloat16()
    if in_codes:
        checkpoints.weights["mtp.fc.weight"] = torch.zeros(2 * H, 2 * H, dtype=torch.uint8)
        checkpoints.weights |= {"mtp.fc.weight_scale": torch.ones(2 * H, H // 4).to(FP8)}
        checkpoints.weights |= {"mtp.fc.weight_scale_2": torch.ones(())}


def in_a_thinker(checkpoints: Files) -> None:
    """The target is the thinker of a Qwen3-Omni."""
    text = checkpoints.target | {"model_type": "qwen3_omni_moe_text"}
    thinker = {"model_type": "qwen3_omni_moe_thinker", "text_config": text}
    checkpoints.target = {"model_type": "qwen3_omni_moe", "thinker_config": thinker}


def as_w4a16(checkpoints: Files, *paths: str) -> None:
    """compressed-tensors' pack-quantized, in groups of 16."""
    for path in paths:
        rows, columns = checkpoints.weights.pop(f"{path}.weight").shape
        checkpoints.weights[f"{path}.weight_packed"] = torch.zeros(rows, columns // 8, dtype=torch.int32)
        checkpoints.weights[f"{path}.weight_scale"] = torch.ones(rows, columns // 16).bfloat16()
        checkpoints.weights[f"{path}.weight_shape"] = torch.tensor([rows, columns])
    checkpoints.drafter["quantization_config"] = of_group("Linear")


def of_group(*targets: str) -> dict:
    groups = {"group_0": {"targets": [*targets], "weights": {"num_bits": 4, "group_size": 16}}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


def arguments(type: str, bits: int, strategy: str, size: int | None = None, **more: object) -> dict:
    return {"type": type, "num_bits": bits, "strategy": strategy, "group_size": size, "symmetric": True, **more}


BY_TOKEN = {bits: arguments("int", bits, "token", dynamic=True) for bits in (4, 8)}
MX = {bits: arguments("float", bits, "group", 32, dynamic=True) for bits in (4, 6, 8)}
NVFP4 = arguments("float", 4, "tensor_group", 16, dynamic="local")
E4M3_BY_TOKEN = arguments("float", 8, "token", dynamic=True)
PACKED, INTEGERS, FLOATS = "pack-quantized", "int-quantized", "float-quantized"
BOTH, NONE = ("sglang", "vllm"), ()
# Weights, inputs and format of compressed-tensors' presets, and the engines whose `_get_scheme_from_parts` raises.
SCHEMES: dict[str, tuple[dict, dict | None, str, tuple[str, ...]]] = {
    "MXFP4": (MX[4], MX[4], "mxfp4-pack-quantized", ("sglang",)),
    "MXFP4A16": (MX[4], None, "mxfp4-pack-quantized", ("sglang",)),
    "MXFP4xFP8": (MX[4], arguments("float", 8, "group", 128, dynamic=True), "mxfp4-pack-quantized", ("sglang",)),
    "MXFP6A16": (MX[6], None, "mxfp6-pack-quantized", BOTH),
    "MXFP6A8": (MX[6], MX[8], "mxfp6-pack-quantized", BOTH),
    "MXFP8": (MX[8], MX[8], "mxfp8-quantized", ("sglang",)),
    "MXFP8A16": (MX[8], None, "mxfp8-quantized", ("sglang",)),
    "NVFP4": (NVFP4, NVFP4, "nvfp4-pack-quantized", NONE),
    "NVFP4A16": (NVFP4, None, "nvfp4-pack-quantized", NONE),
    "NVFP4 with inputs in FP8": (NVFP4, E4M3_BY_TOKEN, "nvfp4-pack-quantized", BOTH),
    **{f"W{n}A16": (arguments("int", n, "group", 128), None, PACKED, ("sglang",)) for n in (2, 3, 5, 6, 7)},
    **{f"W{n}A16": (arguments("int", n, "group", 128), None, PACKED, NONE) for n in (4, 8)},
    "W4A16 asymmetric": (arguments("int", 4, "group", 128, symmetric=False), None, PACKED, NONE),
    "W4A16 with one scale": ({"num_bits": 4}, None, PACKED, BOTH),
    "W4A16 by row, as a default": ({"num_bits": 4, "group_size": -1}, None, PACKED, NONE),
    "W8A16 unpacked": (arguments("int", 8, "channel"), None, INTEGERS, BOTH),
    "W4A8": (arguments("int", 4, "group", 128), BY_TOKEN[8], INTEGERS, ("sglang",)),
    "W4A8 by row": (arguments("int", 4, "channel"), BY_TOKEN[8], INTEGERS, ("sglang",)),
    "W4A8 packed": (arguments("int", 4, "channel"), BY_TOKEN[8], PACKED, ("sglang",)),
    "W4AFP8": (arguments("int", 4, "group", 128), E4M3_BY_TOKEN, INTEGERS, BOTH),
    **{f"W{n}A8": (arguments("int", n, "group", 128), BY_TOKEN[8], INTEGERS, BOTH) for n in (2, 3, 5, 6, 7)},
    **{f"W{n}A4": (arguments("int", n, "group", 128), BY_TOKEN[4], INTEGERS, BOTH) for n in (2, 3, 4)},
    "W8A8": (arguments("int", 8, "channel"), BY_TOKEN[8], INTEGERS, NONE),
    "W8A8 static": (arguments("int", 8, "tensor"), arguments("int", 8, "tensor", symmetric=False), INTEGERS, NONE),
    "W8A8 asymmetric": (arguments("int", 8, "channel", symmetric=False), BY_TOKEN[8], INTEGERS, BOTH),
    "FP8": (arguments("float", 8, "tensor"), arguments("float", 8, "tensor"), FLOATS, NONE),
    "FP8 dynamic": (arguments("float", 8, "channel"), E4M3_BY_TOKEN, FLOATS, NONE),
    "FP8 of weights": (arguments("float", 8, "channel"), None, FLOATS, NONE),
    "W8A8 FP8 block": (
        arguments("float", 8, "block", block_structure=[128, 128]),
        arguments("float", 8, "group", 128, dynamic=True),
        FLOATS,
        NONE,
    ),
    "FP8 block of weights": (arguments("float", 8, "block", block_structure=[128, 128]), None, FLOATS, ("sglang",)),
}


def in_scheme(name: str, *targets: str, format: str | None = None) -> dict:
    """A config whose one group has a preset; with `format` for the group's own, and that is the whole config's."""
    weights, inputs, own, _ = SCHEMES[name]
    group = {"targets": [*targets], "weights": weights | {"dynamic": False}, "format": format and own}
    group["input_activations"] = inputs
    return {"quant_method": "compressed-tensors", "format": format or own, "config_groups": {"a": group}}


def with_attention_in_mxfp4(checkpoints: Files) -> None:
    """q, k and v in codes, fc in numbers and ignored."""
    for name, rows in (("q", 48), ("k", 32), ("v", 32)):
        stem = f"midlayer.self_attn.{name}_proj"
        checkpoints.weights[f"{stem}.weight_packed"] = torch.zeros(rows, 48, dtype=torch.uint8)
        checkpoints.weights[f"{stem}.weight_scale"] = torch.full((rows, 3), 127, dtype=torch.uint8)
    config = in_scheme("MXFP4", "Linear") | {"ignore": ["lm_head", "re:.*fc$"]}
    checkpoints.drafter["quantization_config"] = config


def mixed(*layers: str, algorithm: str = "FP8") -> dict:
    """Model-Optimizer's, with these layers in FP8, and another in NVFP4: without one SGLang takes it for W4AFP8."""
    listed = {layer: {"quant_algo": algorithm} for layer in layers} | {
        "other": {"quant_algo": "NVFP4", "group_size": 16}
    }
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None}
    return config | {"quantized_layers": listed}


class GemmaCheckpoints(Files):
    """A Gemma-4 assistant in numbers."""

    def __init__(self) -> None:
        self.target = {"model_type": "gemma4_text", "hidden_size": H, "num_hidden_layers": N, "vocab_size": V}
        self.drafter = {"model_type": "gemma4_assistant", "backbone_hidden_size": H}
        self.drafter["architectures"] = ["Gemma4AssistantForCausalLM"]
        text = {"hidden_size": D, "model_type": "gemma4_text", "vocab_size": V, "num_hidden_layers": 4}
        self.drafter |= {"text_config": text}
        self.weights = {"pre_projection.weight": torch.ones(D, 2 * H).bfloat16(), "model.norm.weight": torch.ones(D)}


def with_gemma_layers(checkpoints: Files, *paths: str, ignore: str = "re:.*pre_projection") -> None:
    """These layers in W4A16."""
    checkpoints.weights |= {f"{path}.weight": torch.ones(48, 96) for path in paths}
    as_w4a16(checkpoints, *paths)
    checkpoints.drafter["quantization_config"].update(ignore=[ignore])


def as_nemotron_35(checkpoints: Files) -> None:
    """DFlash in Model-Optimizer's W4A16_NVFP4, as SGLang tells drafters of Nemotron 3.5 from others."""
    for path in ("fc", *(f"layers.{layer}.self_attn.{part}_proj" for layer in range(2) for part in "kv")):
        rows, columns = checkpoints.weights[f"{path}.weight"].shape
        checkpoints.weights[f"{path}.weight"] = torch.zeros(rows, columns // 2, dtype=torch.uint8)
        checkpoints.weights[f"{path}.weight_scale"] = torch.ones(rows, columns // 16).to(FP8)
        checkpoints.weights[f"{path}.weight_scale_2"] = torch.ones(())
    checkpoints.drafter |= {"has_embed_tokens": True, IDS: [2, 5, 9], "sample_from_anchor": False}
    checkpoints.drafter["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}


MLP, ATTENTION = ("gate_proj", "up_proj", "down_proj"), ("q_proj", "o_proj")


def with_layers_in_fp8(checkpoints: Files, *layers: str) -> None:
    """MLP and attention of these decoder layers in Hugging Face's FP8 blocks; the config leaves the input stage out."""
    stems = [f"{layer}.mlp.{name}" for layer in layers for name in MLP]
    for stem in [*stems, *(f"{layer}.self_attn.{name}" for layer in layers for name in ATTENTION)]:
        checkpoints.weights[f"{stem}.weight"] = torch.randn(130, 64).to(FP8)
        checkpoints.weights[f"{stem}.weight_scale_inv"] = torch.ones(2, 1)
    for name in [name for name in checkpoints.weights if name.endswith(("k_proj.weight", "v_proj.weight"))]:
        checkpoints.weights[name] = checkpoints.weights[name].to(FP8)
        checkpoints.weights[f"{name}_scale_inv"] = torch.ones(1, 1)
    left_out = ["model.fc", "eh_proj"]
    config = HF_FP8 | {"weight_block_size": [128, 128], "modules_to_not_convert": left_out}
    checkpoints.drafter["quantization_config"] = config


def with_mlp_in_w4a16(checkpoints: Files, layers: int) -> None:
    stems = [f"layers.{layer}.mlp.{name}" for layer in range(layers) for name in MLP]
    checkpoints.weights |= {f"{stem}.weight": torch.randn(96, 64) for stem in stems}
    as_w4a16(checkpoints, *stems)
    checkpoints.drafter["quantization_config"]["ignore"] = ["re:.*[qkv]_proj", "re:.*fc"]


EXPERTS = f"{LAYER}.mlp.experts"
E8M0 = torch.float8_e8m0fnu


def stacked(checkpoints: Files, config: dict | None, **tensors: torch.Tensor) -> None:
    """The MTP layer's experts, one tensor for each projection of all; the input stage is not quantized and left out."""
    checkpoints.weights |= {f"{EXPERTS}.{name}": tensor for name, tensor in tensors.items()}
    if config is not None:
        checkpoints.drafter["quantization_config"] = config | {"modules_to_not_convert": ["eh_proj"]}


def in_gpt_oss_mxfp4(checkpoints: Files) -> None:
    """As openai/gpt-oss-20b has them, with 3 experts of intermediate size 96."""
    for name, rows, groups in (("gate_up_proj", 192, 4), ("down_proj", 128, 3)):
        blocks = {f"{name}_blocks": torch.zeros(3, rows, groups, 16, dtype=torch.uint8)}
        scales = {f"{name}_scales": torch.zeros(3, rows, groups, dtype=torch.uint8)}
        bias = {f"{name}_bias": torch.zeros(3, rows).bfloat16()}
        stacked(checkpoints, {"quant_method": "mxfp4"}, **blocks, **scales, **bias)


def in_stacked_blocks(checkpoints: Files) -> None:
    """Hugging Face's FP8 blocks: gate and up have a row of scales each, although one block has the rows of both."""
    config = HF_FP8 | {"weight_block_size": [128, 128]}
    codes = {"gate_up_proj": torch.ones(3, 96, 130).to(FP8), "down_proj": torch.ones(3, 130, 48).to(FP8)}
    scales = {"gate_up_proj_scale_inv": torch.ones(3, 2, 2), "down_proj_scale_inv": torch.ones(3, 2, 1)}
    stacked(checkpoints, config, **codes, **scales)


def in_stacked_nvfp4(checkpoints: Files) -> None:
    """Model-Optimizer's NVFP4 of Llama 4, in which D is last."""
    codes = {"gate_up_proj": (3, 64, 192), "down_proj": (3, 48, 128)}
    for name, (experts, half, columns) in codes.items():
        weight = {name: torch.zeros(experts, half, columns, dtype=torch.uint8)}
        scale = {f"{name}_weight_scale": torch.ones(experts, half // 8, columns).to(FP8)}
        rest = {f"{name}_weight_scale_2": torch.ones(()), f"{name}_input_scale": torch.ones(())}
        stacked(checkpoints, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, **weight, **scale, **rest)


def in_bitsandbytes(checkpoints: Files, path: str = "fc") -> None:
    """As transformers saves nf4: the names of the tensors that dequantize a weight begin with the weight's own name."""
    rows, columns = checkpoints.weights[f"{path}.weight"].shape
    checkpoints.weights[f"{path}.weight"] = torch.zeros(rows * columns // 2, 1, dtype=torch.uint8)
    checkpoints.weights[f"{path}.weight.absmax"] = torch.ones(rows * columns // 64)
    checkpoints.weights[f"{path}.weight.quant_map"] = torch.ones(16)
    checkpoints.weights[f"{path}.weight.quant_state.bitsandbytes__nf4"] = torch.zeros(90, dtype=torch.uint8)
    checkpoints.drafter["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}


def in_torchao(checkpoints: Files, path: str = "fc") -> None:
    """int8 weight-only as transformers flattens it."""
    rows, columns = checkpoints.weights.pop(f"{path}.weight").shape
    checkpoints.weights[f"{path}._weight_qdata"] = torch.zeros(rows, columns, dtype=torch.int8)
    checkpoints.weights[f"{path}._weight_scale"] = torch.ones(rows, 1)
    checkpoints.drafter["quantization_config"] = {"quant_method": "torchao", "quant_type": {"default": {}}}


def in_exl3(checkpoints: Files, path: str = "fc") -> None:
    rows, columns = checkpoints.weights.pop(f"{path}.weight").shape
    checkpoints.weights[f"{path}.trellis"] = torch.zeros(columns // 16, rows // 16, 64, dtype=torch.int16)
    checkpoints.weights |= {f"{path}.suh": torch.ones(columns).half(), f"{path}.svh": torch.ones(rows).half()}
    checkpoints.drafter["quantization_config"] = {"quant_method": "exl3", "bits": 4.0}


def quark(*weights: dict) -> dict:
    of_all = {"weight": weights[0] if len(weights) == 1 else [*weights], "input_tensors": {"dtype": "fp8_e4m3"}}
    return {"quant_method": "quark", "export": {}, "global_quant_config": of_all}


def of_family(checkpoints: Files, architecture: str, model_type: str) -> None:
    checkpoints.target.update(architectures=[architecture], model_type=model_type)


class NextNClass(NamedTuple):
    """A class of SGLang's that calls its MTP layer otherwise than the file."""

    architecture: str  # of the target
    model_type: str
    stage: str  # what the file calls the first norm, with {} for the others' names
    names: tuple[str, str, str]
    layer: str  # in the file
    own: str  # in SGLang, with the dot behind it
    in_vllm: bool = True


_QWEN, _STANDARD = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc"), ("enorm", "hnorm", "eh_proj")
_ERNIE = ("mtp_emb_norm", "mtp_hidden_norm", "mtp_linear_proj")
NEXTN = {
    "EXAONE-MoE": NextNClass("ExaoneMoEForCausalLM", "exaone_moe", "mtp.{}", _QWEN, "mtp.layers.0", "model.layers.0."),
    "Qwen3-Next": NextNClass("Qwen3NextForCausalLM", "qwen3_next", "mtp.{}", _QWEN, "mtp.layers.0", "model.layers.0."),
    "Qwen3-MoE": NextNClass(
        "Qwen3MoeForCausalLM", "qwen3_moe", "mtp.{}", _QWEN, "mtp.layers.0", "model.layers.0.", in_vllm=False
    ),
    "MiMo": NextNClass(
        "MiMoForCausalLM",
        "mimo",
        "model.mtp_layers.0.{}",
        ("token_layernorm", "hidden_layernorm", "input_proj"),
        "model.mtp_layers.0",
        "",
    ),
    "Ernie 4.5": NextNClass(
        "Ernie4_5_MoeForCausalLM", "ernie4_5_moe", "model.{}.0", _ERNIE, "model.mtp_block.0", "model.mtp_block."
    ),
    "dots3-note": NextNClass(
        "Dots3NoteForCausalLM", "dots3_note", LAYER + ".{}", _STANDARD, LAYER, "model.heads.0.decoder."
    ),
    "IQuest-Q1": NextNClass(
        "IQuestQ1ForCausalLM",
        "iquest_q1",
        "mtp.{}",
        _STANDARD,
        "mtp.mtp_model_layer",
        "model.mtp_layer.mtp_model_layer.",
        in_vllm=False,
    ),
    "HunYuan V4": NextNClass(
        "HYV4ForCausalLM", "hy_v4", "model.mtp_layers.0.{}", _STANDARD, "model.mtp_layers.0", ".model.decoder."
    ),
}


def of_nextn(c: Files, title: str, left_out: dict[str, object]) -> None:
    """Its MTP layer with one layer in numbers, which the config leaves out by the file's name."""
    its = NEXTN[title]
    of_family(c, its.architecture, its.model_type)
    c.weights = {f"{its.stage.format(name)}.weight": torch.ones(2 * H) for name in its.names[:2]}
    c.weights[f"{its.stage.format(its.names[2])}.weight"] = torch.ones(2 * H, 4 * H).bfloat16()
    c.weights[f"{its.layer}.{OUT}.weight"] = torch.ones(96, 64)
    c.target.update(quantization_config=left_out)


def with_qkv_of(c: Files, title: str) -> None:
    """Attention in numbers, which the config leaves out by the file's names and by SGLang's of q, k and v."""
    names = [f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    its = NEXTN[title]
    left_out = [f"{layer}{name}" for layer in (f"{its.layer}.", its.own) for name in names]
    of_nextn(c, title, of_group("Linear") | {"ignore": [*left_out, its.names[2], its.stage.format(its.names[2])]})
    c.weights.update({f"{its.layer}.{name}.weight": torch.ones(96, 64) for name in names})


LAYER61 = "model.layers.61"


def excluded(checkpoints: Files, architecture: str, entry: str) -> None:
    """The MTP layer 61 of a model in Quark's FP8 whose config excludes `entry`."""
    types = {"GlmMoeDsaForCausalLM": "glm_moe_dsa", "Glm5NextForConditionalGeneration": "glm5_next"}
    checkpoints.target.update(num_hidden_layers=61, architectures=[architecture])
    checkpoints.target.update(model_type=types.get(architecture, "deepseek_v3"))
    checkpoints.target.update(quantization_config=quark({"dtype": "fp8_e4m3"}) | {"exclude": [entry]})
    checkpoints.weights = {name.replace(LAYER, LAYER61): tensor for name, tensor in checkpoints.weights.items()}


def in_quark(checkpoints: Files, dtype: str, **weights: torch.Tensor) -> None:
    checkpoints.weights |= {f"fc.{name}": tensor for name, tensor in weights.items()}
    spec = {"dtype": dtype, "qscheme": "per_group", "group_size": 32}
    checkpoints.drafter["quantization_config"] = quark(spec)


STEP = f"{LAYER}.moe"


def in_step_s_stacks(checkpoints: Files) -> None:
    """Step-3.5's stacked experts in FP8 blocks, under names without `experts`."""
    for name, rows, columns in (("gate_proj", 96, 130), ("up_proj", 96, 130), ("down_proj", 130, 96)):
        checkpoints.weights[f"{STEP}.{name}.weight"] = torch.ones(3, rows, columns).to(FP8)
        checkpoints.weights[f"{STEP}.{name}.weight_scale_inv"] = torch.ones(3, -(-rows // 128), -(-columns // 128))
    stacked(checkpoints, HF_FP8 | {"weight_block_size": [128, 128]})


def without_fc(checkpoints: Files) -> None:
    """As nvidia/gpt-oss-120b-Eagle3-short-context, which reads the state in front of the target's head."""
    checkpoints.target.update(model_type="gpt_oss")
    checkpoints.drafter.update(hidden_size=H, target_hidden_size=H, fc_norm=False)
    checkpoints.drafter["eagle_config"] = {IDS: [], "use_aux_hidden_state": False}
    checkpoints.weights = {"lm_head.weight": torch.ones(DRAFTED, H), "d2t": checkpoints.weights["d2t"]}
    norms = ("norm", "midlayer.input_layernorm", "midlayer.hidden_norm")
    checkpoints.weights |= {f"{norm}.weight": torch.ones(H) for norm in norms}


UP, OUT = "midlayer.mlp.up_proj", "self_attn.o_proj"
GEMMA_DOWN = "model.layers.0.mlp.down_proj"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True}
AUTO_ROUND_FP8 = {"data_type": "fp", "bits": 8, "group_size": [128, 128], "block_name_to_quantize": "model.layers"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
MODELOPT_FP8 = {"quant_method": "modelopt", "quant_algo": "FP8"}
LEFT = "which this package does not read: load_checkpoint refuses it, the plugins leave layers of it to the engine"

# For each kind of drafter a pair without a finding, and facts of it.
FITS: dict[str, tuple[Callable[[], Files], Callable, dict]] = {
    "EAGLE-3": (Checkpoints, lambda c: None, {"drafter": "EAGLE-3", "boundaries": [2, 6, 9], "fc": "BF16"}),
    "EAGLE-3 with a calibrated range": (
        Checkpoints,
        lambda c: c.weights.update({"fc.input_quantizer._amax": torch.ones(())}),
        {"fc": "BF16"},
    ),
    "MTP with a calibrated range": (
        MTPCheckpoints,
        lambda c: c.weights.update({f"{LAYER}.eh_proj.input_quantizer._amax": torch.ones(())}),
        {"eh_proj": "BF16"},
    ),
    "EAGLE-3 without fc": (
        Checkpoints,
        without_fc,
        {"K": 1, "boundaries": "none: the drafter reads the state in front of the target's head"},
    ),
    "EAGLE-3 in FP8": (
        Checkpoints,
        lambda c: with_config(c, HF_FP8),
        {"fc": "F8_E4M3 with weight_scale"},
    ),
    "EAGLE-3 in Hugging Face's static FP8": (
        Checkpoints,
        lambda c: (
            with_config(c, {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}),
            renamed(c, "fc.weight_scale", "fc.weight_scale_inv"),
            c.weights.update({"fc.activation_scale": torch.ones(())}),
            c.weights.update({f"{UP}.weight": torch.ones(96, 64).to(FP8), f"{UP}.weight_scale_inv": torch.ones(())}),
            c.weights.update({f"{UP}.activation_scale": torch.ones(())}),
        ),
        {"fc": "F8_E4M3 with weight_scale_inv", UP: "F8_E4M3 with weight_scale_inv"},
    ),
    "EAGLE-3 in GPTQ with transformers' config": (
        Checkpoints,
        lambda c: (
            in_gptq(c, groups=6),
            c.weights.pop("fc.g_idx"),
            with_integers(c, says_transformers("GPTQConfig")),
        ),
        {"fc": "I32 with scales"},
    ),
    "EAGLE-3 in AWQ with transformers' config": (
        Checkpoints,
        lambda c: (in_awq(c), with_integers(c, says_transformers("AwqConfig"))),
        {"fc": "I32 with scales"},
    ),
    "EAGLE-3 in GPTQ of auto-round": (
        Checkpoints,
        lambda c: (
            in_gptq(c, groups=6),
            with_integers(c, AUTO_ROUND),
        ),
        {"fc": "I32 with scales"},
    ),
    "EAGLE-3 with attention": (Checkpoints, with_attention, {}),
    "EAGLE-3 with attention in codes": (
        Checkpoints,
        lambda c: (with_attention(c), with_layers_in_fp8(c, "midlayer")),
        {},
    ),
    "EAGLE-3 of two layers": (
        Checkpoints,
        lambda c: (
            with_attention(c, "layers.0", num_hidden_layers=2),
            renamed(c, "midlayer.input_layernorm.weight", "layers.0.input_layernorm.weight"),
            renamed(c, "midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"),
            c.weights.update({"layers.1.self_attn.q_proj.weight": torch.ones(D, D)}),
        ),
        {},
    ),
    "a layer of HunYuan V4 that fp8 leaves out by the file's name": (
        MTPCheckpoints,
        lambda c: of_nextn(
            c, "HunYuan V4", HF_FP8 | {"modules_to_not_convert": [f"model.mtp_layers.0.{OUT}", "eh_proj"]}
        ),
        {},
    ),
    "q, k and v of a class with packed_modules_mapping, in numbers": (
        MTPCheckpoints,
        lambda c: with_qkv_of(c, "Qwen3-Next"),
        {},
    ),
    "EAGLE-3 with latent attention": (Checkpoints, with_latent_attention, {}),
    **{
        f"EAGLE-3 of {model_type}, whose class inherits its captures": (
            Checkpoints,
            lambda c, model_type=model_type: c.target.update(
                {"model_type": model_type, "text_config": {**c.target, "model_type": f"{model_type}_text"}}
            ),
            {"boundaries": [2, 6, 9], "SGLang 0.5.23": "captures [2, 6, 9], fc for K = 3"},
        )
        for model_type in ("cosmos3_omni", "interns1_pro", "intern_s2_preview", "interns2_mobius")
    },
    "EAGLE-3 of LongCat-Flash, whose config has num_layers": (
        Checkpoints,
        lambda c: (c.target.update(model_type="longcat_flash", num_layers=N), c.target.pop("num_hidden_layers")),
        {"boundaries": [2, 6, 9]},
    ),
    "EAGLE-3 in NVFP4": (Checkpoints, lambda c: in_nvfp4(c), {"fc": "U8 with weight_scale, weight_scale_2"}),
    "EAGLE-3 whose layer is in FP8 blocks": (
        Checkpoints,
        lambda c: with_layers_in_fp8(c, "midlayer"),
        {"fc": "BF16", "midlayer.mlp.down_proj": "F8_E4M3 with weight_scale_inv"},
    ),
    "EAGLE-3 whose lm_head is in a group of its own": (
        Checkpoints,
        lambda c: (as_w4a16(c, "lm_head"), c.drafter.update(quantization_config=of_group("re:.*lm_head"))),
        {"lm_head": "I32 with weight_scale"},
    ),
    "EAGLE-3 with an lm_head in GPTQ": (
        Checkpoints,
        lambda c: (
            with_head_in_gptq(c),
            c.drafter.update(quantization_config=GPTQ | {"group_size": -1}),
            c.drafter["quantization_config"].update(lm_head=True, dynamic={"-:.*fc": {}}),
        ),
        {"lm_head": "I32 with scales"},
    ),
    "EAGLE-3 with an lm_head in GPTQ that auto-round names": (
        Checkpoints,
        lambda c: (
            with_head_in_gptq(c),
            c.drafter.update(quantization_config=AUTO_ROUND | {"group_size": -1}),
            c.drafter["quantization_config"].update(
                extra_config={"fc": {"bits": 16}, "model.fc": {"bits": 16}, "lm_head": {"bits": 4}}
            ),
        ),
        {"lm_head": "I32 with scales"},
    ),
    "MTP of Qwen 3.5 in NVFP4 without its fc": (MTPCheckpoints, lambda c: as_qwen35(c, in_codes=False), {"fc": "BF16"}),
    "EAGLE-3 in MXFP4 of Quark": (
        Checkpoints,
        lambda c: in_quark(
            c,
            "fp4",
            weight=torch.zeros(D, K * H // 2, dtype=torch.uint8),
            weight_scale=torch.zeros(D, K * H // 32, dtype=torch.uint8),
        ),
        {"fc": "U8 with weight_scale"},
    ),
    "EAGLE-3 in vLLM with layers in torchao's FP8": (
        Checkpoints,
        lambda c: (c.weights.update({f"{UP}.weight": torch.ones(96, 64)}), in_torchao(c, UP)),
        {"format": f"torchao, {LEFT}", "fc": "BF16", UP: "I8 of torchao"},
    ),
    "an fc that the config leaves out": (
        Checkpoints,
        lambda c: c.drafter.update(quantization_config=HF_FP8 | {"modules_to_not_convert": ["model.fc"]}),
        {"fc": "BF16"},
    ),
    "a dense fc in GPTQ of which the config lists no layers": (
        Checkpoints,
        lambda c: c.drafter.update(quantization_config=GPTQ),
        {"fc": "BF16"},
    ),
    "a dense fc in GPTQ of which the config lists other layers": (
        Checkpoints,
        lambda c: c.drafter.update(quantization_config={**GPTQ, "modules_in_block_to_quantize": [["mlp.up_proj"]]}),
        {"fc": "BF16"},
    ),
    "ranges of activations in norms": (
        Checkpoints,
        lambda c: c.weights.update(
            {
                f"{norm}.input_quantizer._amax": torch.ones(())
                for norm in ("fc_norm.1", "midlayer.hidden_norm", "midlayer.input_layernorm")
            }
        ),
        {"fc": "BF16"},
    ),
    "an fc that auto-round leaves out": (
        Checkpoints,
        lambda c: c.drafter.update(quantization_config=AUTO_ROUND | {"extra_config": {"fc": {"bits": 16}}}),
        {"fc": "BF16"},
    ),
    "an fc in no block that auto-round quantized": (
        Checkpoints,
        lambda c: c.drafter.update(quantization_config=AUTO_ROUND | {"block_name_to_quantize": "model.layers"}),
        {"fc": "BF16"},
    ),
    "an fc that a pattern leaves out": (
        Checkpoints,
        lambda c: setattr(c, "beside", {"quant_algo": "FP8", "exclude_modules": ["lm_head", "*fc*"]}),
        {"fc": "BF16"},
    ),
    "an fc in codes whose parent compressed-tensors ignores": (
        ContextCheckpoints,
        # llm-compressor lists parents of layers in codes.
        lambda c: (with_mlp_in_w4a16(c, layers=2), c.drafter["quantization_config"]["ignore"].append("layers.0.mlp")),
        {"layers.*.mlp.down_proj": "I32 with weight_scale"},
    ),
    "numbers whose merged layer has an entry of AWQ's list in its name": (
        Checkpoints,
        lambda c: (
            c.drafter.update(quantization_config=AWQ | {"modules_to_not_convert": ["fc", "v_proj"]}),
            c.weights.update({f"midlayer.self_attn.{name}_proj.weight": torch.ones(96, 64) for name in "qkv"}),
        ),
        {"fc": "BF16"},
    ),
    "a drafter of Nemotron 3.5": (ContextCheckpoints, as_nemotron_35, {"fc": "U8 with weight_scale, weight_scale_2"}),
    "a Gemma assistant with layers in W4A16": (
        GemmaCheckpoints,
        lambda c: with_gemma_layers(c, GEMMA_DOWN),
        {GEMMA_DOWN: "I32 with weight_scale"},
    ),
    "an fc that Model-Optimizer's mixed precision does not list": (
        Checkpoints,
        lambda c: c.drafter.update(quantization_config=mixed("lm_head")),
        {"fc": "BF16"},
    ),
    "an fc that is in no group": (
        Checkpoints,
        lambda c: c.drafter.update(
            quantization_config={
                "quant_method": "compressed-tensors",
                "config_groups": {"0": {"targets": ["re:.*mlp.*"]}},
            }
        ),
        {"fc": "BF16"},
    ),
    "MTP": (
        MTPCheckpoints,
        lambda c: None,
        {
            "drafter": "MTP of DeepSeek V3, R1",
            "layers": [f"{LAYER}."],
            "eh_proj": "BF16",
            "SGLang 0.5.23": "Linear, never quantized; the next step reads: normed",
            "vLLM 0.33, V1 runner": "Linear, never quantized; the next step reads: normed; zeros at position 0",
        },
    ),
    # It was taken for EAGLE-3, whose layer 0 has this norm as well.
    "MTP behind all layers of its target": (
        MTPCheckpoints,
        lambda c: c.weights.update({f"model.layers.{n}.input_layernorm.weight": torch.ones(2 * H) for n in range(N)}),
        {"drafter": "MTP of DeepSeek V3, R1", "eh_proj": "BF16"},
    ),
    "MTP whose layer is in FP8 blocks": (
        MTPCheckpoints,
        lambda c: (
            with_layers_in_fp8(c, LAYER),
            c.weights.update({f"{LAYER}.mlp.experts.{k}.up_proj.weight": torch.ones(8, 16).to(FP8) for k in range(3)}),
            c.weights.update({f"{LAYER}.mlp.experts.{k}.up_proj.weight_scale_inv": torch.ones(1, 1) for k in range(3)}),
            # Layers that are not the drafter's are not examined, nor is a head that is the target's.
            c.weights.update({f"{LAYER}.shared_head.head.weight": torch.ones(V, 2 * H).to(FP8)}),
            c.weights.update({f"{LAYER}.shared_head.head.weight_scale": torch.ones(1)}),
            c.drafter["quantization_config"]["modules_to_not_convert"].append("head"),
            c.drafter["quantization_config"].pop("weight_block_size"),
            c.weights.update({"model.layers.3.mlp.up_proj.weight": torch.ones(8, 16).to(FP8)}),
        ),
        {"model.layers.*.mlp.experts.*.up_proj": "F8_E4M3 with weight_scale_inv"},
    ),
    "MTP with gpt-oss's stacked experts": (
        MTPCheckpoints,
        in_gpt_oss_mxfp4,
        {f"{EXPERTS}.gate_up_proj": "U8 with scales", f"{EXPERTS}.down_proj": "U8 with scales", "eh_proj": "BF16"},
    ),
    "MTP with stacked experts in FP8 blocks": (
        MTPCheckpoints,
        in_stacked_blocks,
        {f"{EXPERTS}.gate_up_proj": "F8_E4M3 with scale_inv"},
    ),
    "MTP with stacked experts in FP8 blocks, gate's and up's apart": (
        # Of 150 rows each: 300 are 3 blocks, and each of the two has 2 of its own.
        MTPCheckpoints,
        lambda c: (
            in_stacked_blocks(c),
            stacked(c, None, gate_up_proj=torch.ones(3, 300, 130).to(FP8), gate_up_proj_scale_inv=torch.ones(3, 4, 2)),
        ),
        {f"{EXPERTS}.gate_up_proj": "F8_E4M3 with scale_inv"},
    ),
    "MTP with stacked experts in FP8, of one scale each": (
        MTPCheckpoints,
        lambda c: stacked(
            c,
            HF_FP8,
            gate_up_proj=torch.ones(3, 96, 130).to(FP8),
            gate_up_proj_scale_inv=torch.ones(3, 1, 1),
            down_proj=torch.ones(3, 130, 48).to(FP8),
            down_proj_scale_inv=torch.ones(3, 1, 1),
        ),
        {f"{EXPERTS}.down_proj": "F8_E4M3 with scale_inv"},
    ),
    "MTP with stacked experts of Llama 4 in FP8": (
        MTPCheckpoints,
        lambda c: stacked(
            c,
            {"quant_method": "modelopt", "quant_algo": "FP8"},
            down_proj=torch.ones(3, 48, 130).to(FP8),
            down_proj_weight_scale=torch.ones(()),
            down_proj_input_scale=torch.ones(()),
        ),
        {f"{EXPERTS}.down_proj": "F8_E4M3 with weight_scale"},
    ),
    "MTP with stacked experts in numbers": (
        MTPCheckpoints,
        lambda c: (
            stacked(c, HF_FP8, gate_up_proj=torch.ones(3, 96, 130).bfloat16()),
            c.drafter["quantization_config"]["modules_to_not_convert"].append("mlp.experts"),
        ),
        {"eh_proj": "BF16"},
    ),
    "MTP with stacked experts in packed integers": (
        MTPCheckpoints,
        lambda c: (
            c.weights.update({f"{EXPERTS}.down_proj.weight_packed": torch.zeros(3, 128, 12, dtype=torch.int32)}),
            c.weights.update({f"{EXPERTS}.down_proj.weight_scale": torch.ones(3, 128, 6).bfloat16()}),
            c.drafter.update(quantization_config=of_group("Linear") | {"ignore": ["re:.*eh_proj"]}),
        ),
        {f"{EXPERTS}.down_proj": "I32 with weight_scale"},
    ),
    "MTP with Step-3.5's stacked experts": (
        MTPCheckpoints,
        in_step_s_stacks,
        {f"{STEP}.up_proj": "F8_E4M3 with weight_scale_inv"},
    ),
    "vLLM's MTP with stacked experts in NVFP4": (
        MTPCheckpoints,
        in_stacked_nvfp4,
        {f"{EXPERTS}.gate_up_proj": "U8 with weight_scale, weight_scale_2"},
    ),
    "MTP with stacked experts of which the config says nothing": (
        MTPCheckpoints,
        lambda c: (
            in_gpt_oss_mxfp4(c),
            c.drafter.update(quantization_config=HF_FP8 | {"store_dtype": "mxfp4", "ignore": ["eh_proj"]}),
        ),
        {f"{EXPERTS}.down_proj": "U8 with scales"},
    ),
    "MTP whose experts have a format of their own": (
        MTPCheckpoints,
        lambda c: (
            with_layers_in_fp8(c, LAYER),
            c.drafter.update(expert_dtype="fp4"),
            c.weights.update({f"{LAYER}.mlp.experts.0.up_proj.weight": torch.ones(8, 32, dtype=torch.int8)}),
            c.weights.update({f"{LAYER}.mlp.experts.0.up_proj.scale": torch.ones(8, 2).to(torch.float8_e8m0fnu)}),
        ),
        {f"{LAYER}.mlp.experts.0.up_proj": "I8 with scale"},
    ),
    **{
        f"MTP of {title} whose eh_proj Quark excludes by {entry}": (
            MTPCheckpoints,
            lambda c, architecture=architecture, entry=entry: excluded(c, architecture, entry),
            {"eh_proj": "BF16"},
        )
        for title, architecture, entry in (
            ("DeepSeek", "DeepseekV3ForCausalLM", LAYER61),
            ("DeepSeek", "DeepseekV3ForCausalLM", f"re:{LAYER61}.*"),
            ("GLM-5", "GlmMoeDsaForCausalLM", f"{LAYER61}.eh_proj"),
            ("GLM-5-next", "Glm5NextForConditionalGeneration", LAYER61),
            ("GLM-5-next", "Glm5NextForConditionalGeneration", f"{LAYER61}.eh_proj"),
            ("GLM-5-next", "Glm5NextForConditionalGeneration", f"re:{LAYER61}.*"),
        )
    },
    "MTP of DeepSeek with a layer in numbers that its config leaves out": (
        MTPCheckpoints,
        lambda c: (
            excluded(c, "DeepseekV3ForCausalLM", ""),
            c.weights.update({f"{LAYER61}.{OUT}.weight": torch.ones(96, 64)}),
            c.target.update(quantization_config=HF_FP8 | {"modules_to_not_convert": [f"{LAYER61}.{OUT}", "eh_proj"]}),
        ),
        {"eh_proj": "BF16"},
    ),
    "MTP of which each engine has a bias of its own": (
        MTPCheckpoints,
        lambda c: (
            c.target.update(model_type="ernie4_5_moe", architectures=["Ernie4_5_MoeForCausalLM"]),
            renamed(c, f"{LAYER}.enorm.weight", "model.mtp_emb_norm.0.weight"),
            renamed(c, f"{LAYER}.hnorm.weight", "model.mtp_hidden_norm.0.weight"),
            renamed(c, f"{LAYER}.eh_proj.weight", "model.mtp_linear_proj.0.weight"),
        ),
        {"drafter": "MTP of Ernie 4.5", "mtp_linear_proj": "BF16"},
    ),
    "MTP of residual streams": (
        MTPCheckpoints,
        lambda c: (
            c.target.update(model_type="deepseek_v4", architectures=["DeepseekV4ForCausalLM"], hc_mult=4),
            c.target.update(quantization_config=HF_FP8),
            c.weights.pop(f"{LAYER}.eh_proj.weight"),
            [
                c.weights.update({f"{name}.weight": torch.ones(2 * H, 2 * H).to(FP8), f"{name}.scale": torch.ones(1)})
                for name in (f"{LAYER}.e_proj", f"{LAYER}.h_proj")
            ],
        ),
        {"drafter": "MTP of DeepSeek V4", "e_proj": "F8_E4M3 with scale", "h_proj": "F8_E4M3 with scale"},
    ),
    "DeepSeek-V4 in FP8 blocks beside Model-Optimizer's keys": (
        MTPCheckpoints,
        # nvidia/DeepSeek-V4-Flash-NVFP4. Both engines read fp8's keys alone: "that leaves e_proj out", "for w4afp8".
        lambda c: (
            as_deepseek_v4(c),
            c.target.update(
                quantization_config={
                    **c.target["quantization_config"],
                    **{"quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4", "ignore": ["*.attn.*", "mtp.*"]},
                    "quantized_layers": {"layers.0.ffn.experts": {"quant_algo": "MXFP8"}},
                }
            ),
        ),
        {"e_proj": "F8_E4M3 with scale", "mtp.0.attn.wq_a": "F8_E4M3 with scale"},
    ),
    "DeepSeek-V4's own names, in FP8 blocks": (
        MTPCheckpoints,
        as_deepseek_v4,
        {"mtp.0.attn.wq_a": "F8_E4M3 with scale", "mtp.0.ffn.shared_experts.w3": "F8_E4M3 with scale"},
    ),
    "Mistral's EAGLE": (
        EagleCheckpoints,
        lambda c: None,
        {"drafter": "Mistral EAGLE", "eagle_linear": "F8_E4M3 with qscale_weight"},
    ),
    "EAGLE-3 under its name in SGLang": (
        Checkpoints,
        lambda c: c.drafter.update(architectures=["LlamaForCausalLMEagle3"]),
        {"drafter": "EAGLE-3"},
    ),
    "DFlash whose layers are in FP8 blocks": (
        ContextCheckpoints,
        lambda c: with_layers_in_fp8(c, "layers.0", "layers.1"),
        {"layers.*.self_attn.q_proj": "F8_E4M3 with weight_scale_inv", "fc": "BF16"},
    ),
    "DFlash with an MLP in W4A16": (
        ContextCheckpoints,
        lambda c: with_mlp_in_w4a16(c, layers=2),
        {"layers.*.mlp.up_proj": "I32 with weight_scale", "fc": "BF16"},
    ),
    # vLLM 0.33 renames the entries.
    "DFlash in ModelOpt's FP8 that leaves out layers by the file's numbers": (
        ContextCheckpoints,
        lambda c: c.drafter.update(
            quantization_config=MODELOPT_FP8 | {"ignore": ["fc", "layers.0*", "layers.1.self*"]}
        ),
        {"fc": "BF16", "k_proj": "BF16"},
    ),
    "DFlash in FP8 that mixed precision lists by the file's names": (
        ContextCheckpoints,
        lambda c: (
            c.drafter.update(quantization_config=mixed(*CONTEXT_LAYERS)),
            [c.weights.update({f"{path}.weight": c.weights[f"{path}.weight"].to(FP8)}) for path in CONTEXT_LAYERS],
            [c.weights.update({f"{path}.weight_scale": torch.ones(())}) for path in CONTEXT_LAYERS],
        ),
        {"fc": "F8_E4M3 with weight_scale", "k_proj": "F8_E4M3 with weight_scale"},
    ),
    "EAGLE-3 with a layer in FP8 that mixed precision lists by vLLM's number too": (
        Checkpoints,
        lambda c: (
            c.drafter.update(quantization_config=mixed(UP, f"model.layers.{N}.mlp.up_proj")),
            c.weights.update({f"{UP}.weight": torch.zeros(96, 64).to(FP8), f"{UP}.weight_scale": torch.ones(())}),
        ),
        {UP: "F8_E4M3 with weight_scale"},
    ),
    "DFlash of a target that EAGLE-3 has no rule for": (
        ContextCheckpoints,
        lambda c: c.target.update(model_type="nemotron_h"),
        {"boundaries": [2, 5, 9]},
    ),
    "DFlash that states the target's layers in dflash_config, and something else beside it": (
        ContextCheckpoints,
        lambda c: (c.drafter["dflash_config"].update(num_target_layers=N), c.drafter.update(num_target_layers=2)),
        {"boundaries": [2, 5, 9]},
    ),
    "DFlash of LongCat-Flash, whose config has num_layers": (
        ContextCheckpoints,
        lambda c: (c.target.update(model_type="longcat_flash", num_layers=N), c.target.pop("num_hidden_layers")),
        {"boundaries": [2, 5, 9]},
    ),
    "DFlash that rotates a part of each head, by the field that both engines read": (
        ContextCheckpoints,
        lambda c: c.drafter.update(rope_parameters={"rope_dim": 8, "partial_rotary_factor": 0.25}),
        {"drafter": "DFlash (DFlashDraftModel)"},
    ),
    "DFlash of MiMo": (
        ContextCheckpoints,
        lambda c: c.drafter["dflash_config"].update(attention_value_scale=0.707),
        {
            "attention_value_scale": "0.707, which ContextKV does not read: it refuses the config",
            "K": 3,
            "k_proj": "BF16",
        },
    ),
    "DFlash of Laguna with one weight for q, k and v": (
        ContextCheckpoints,
        as_laguna,
        {"drafter": "DFlash (DFlashLagunaForCausalLM)", "qkv_proj": "BF16", "fc": "BF16"},
    ),
    "DFlash of Laguna without rope_parameters, where the engines' defaults are the same": (
        ContextCheckpoints,
        lambda c: (as_laguna(c), c.drafter.pop("rope_parameters"), c.drafter.update(layer_types=[SLIDING] * 2)),
        {"drafter": "DFlash (DFlashLagunaForCausalLM)"},
    ),
    "DFlash whose keys rotate in pairs, by the field that both engines read": (
        ContextCheckpoints,
        lambda c: c.drafter.update(is_neox_style=False),
        {"drafter": "DFlash (DFlashDraftModel)"},
    ),
    "DFlash2 of Muse Glimmer": (
        ContextCheckpoints,
        lambda c: (c.target.update(model_type="muse_glimmer"), c.drafter.update(architectures=["DFlash2DraftModel"])),
        {"boundaries": [2, 5, 9]},
    ),
    "DFlash": (
        ContextCheckpoints,
        lambda c: None,
        {
            "drafter": "DFlash (DFlashDraftModel)",
            "boundaries": [2, 5, 9],
            "layer ids": "[1, 4, 8] in dflash_config.target_layer_ids",
            "K": 3,
            "fc": "BF16",
        },
    ),
}


@pytest.mark.parametrize("case", FITS)
def test_a_pair_that_fits_has_no_finding(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build, change, facts = FITS[case]
    checkpoints = build()
    change(checkpoints)
    folders = list(map(str, checkpoints.save(tmp_path)))
    # SGLang falls into a trap with these formats.
    asked = ["--engine", "vllm"] if any(name in case for name in ("FP4", "FP8", "GPTQ", "AWQ")) else []
    assert cli.main(["doctor", *folders, *asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {name: found["facts"].get(name) for name in facts} == facts
    assert cli.main(["doctor", *folders, *asked]) == 0
    out = capsys.readouterr().out
    assert out.endswith("nothing found\n")
    assert max(map(len, out.splitlines())) <= 80


def renamed(checkpoints: Files, old: str, new: str) -> None:
    checkpoints.weights[new] = checkpoints.weights.pop(old)


def quantized(checkpoints: Files) -> None:
    checkpoints.weights["fc.weight"] = checkpoints.weights["fc.weight"].to(FP8)
    checkpoints.weights["fc.weight_scale"] = torch.ones(1)


def with_config(checkpoints: Files, quantization: dict) -> None:
    quantized(checkpoints)
    checkpoints.drafter["quantization_config"] = quantization


def in_nvfp4(checkpoints: Files) -> None:
    checkpoints.weights |= {"fc.weight": torch.zeros(D, K * H // 2, dtype=torch.uint8)}
    checkpoints.weights |= {"fc.weight_scale": torch.ones(D, K * H // 16).to(FP8), "fc.weight_scale_2": torch.ones(())}
    checkpoints.drafter["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


def middle_zeros(groups: int, rows: int) -> torch.Tensor:
    """GPTQ's of symmetric int4, each stored less 1."""
    return torch.full((groups, rows // 8), 0x77777777, dtype=torch.int32)


def in_gptq(checkpoints: Files, groups: int) -> None:
    """With act order: g_idx names the group of each column, in no order."""
    del checkpoints.weights["fc.weight"]
    checkpoints.weights |= {"fc.qweight": torch.zeros(K * H // 8, D, dtype=torch.int32)}
    checkpoints.weights |= {"fc.scales": torch.ones(groups, D).half()}
    checkpoints.weights |= {"fc.qzeros": middle_zeros(groups, D)}
    checkpoints.weights |= {"fc.g_idx": torch.arange(K * H, dtype=torch.int32) % groups}
    checkpoints.drafter["quantization_config"] = GPTQ | {"desc_act": True}


def with_head_in_gptq(checkpoints: Files) -> None:
    """In one group of all columns."""
    del checkpoints.weights["lm_head.weight"]
    checkpoints.weights |= {"lm_head.qweight": torch.zeros(D // 8, DRAFTED, dtype=torch.int32)}
    checkpoints.weights |= {"lm_head.scales": torch.ones(1, DRAFTED).half(), "lm_head.qzeros": middle_zeros(1, DRAFTED)}


def in_awq(checkpoints: Files) -> None:
    del checkpoints.weights["fc.weight"]
    checkpoints.weights |= {"fc.qweight": torch.zeros(K * H, D // 8, dtype=torch.int32)}
    checkpoints.weights |= {"fc.scales": torch.ones(6, D).half()}
    checkpoints.weights |= {"fc.qzeros": torch.zeros(6, D // 8, dtype=torch.int32)}


def in_packed_rows(checkpoints: Files, *paths: str) -> None:
    """AWQ's int4 in groups of 32 columns."""
    for path in paths:
        checkpoints.weights |= {f"{path}.qweight": torch.zeros(64, 12, dtype=torch.int32)}
        checkpoints.weights |= {f"{path}.scales": torch.ones(2, 96).half()}
        checkpoints.weights |= {f"{path}.qzeros": torch.zeros(2, 12, dtype=torch.int32)}


def with_integers(checkpoints: Files, quantization: dict) -> None:
    checkpoints.drafter["quantization_config"] = quantization


def in_int8(checkpoints: Files) -> None:
    """compressed-tensors' int8 with one scale."""
    inputs = {"num_bits": 8, "strategy": "token", "dynamic": True}
    with_config(checkpoints, of_group("Linear") | {"format": "int-quantized"})
    group = checkpoints.drafter["quantization_config"]["config_groups"]["group_0"]
    group.update(weights={"num_bits": 8}, input_activations=inputs)
    checkpoints.weights["fc.weight"] = torch.ones(D, K * H, dtype=torch.int8)


def in_int8_groups(checkpoints: Files) -> None:
    """compressed-tensors' W4A8 in groups of 96."""
    with_config(checkpoints, in_scheme("W4A8", "Linear"))
    checkpoints.drafter["quantization_config"]["config_groups"]["a"]["weights"]["group_size"] = 96
    checkpoints.weights["fc.weight"] = torch.ones(D, K * H, dtype=torch.int8)
    checkpoints.weights["fc.weight_scale"] = torch.ones(D, 2).bfloat16()


def with_zero_points(checkpoints: Files, value: int) -> None:
    in_int8(checkpoints)
    checkpoints.weights["fc.weight_scale"] = torch.ones(D, 1)
    checkpoints.weights["fc.weight_zero_point"] = torch.full((D, 1), value, dtype=torch.int8)


def without_scale(checkpoints: Checkpoints) -> None:
    quantized(checkpoints)
    del checkpoints.weights["fc.weight_scale"]


def in_blocks(checkpoints: Files, path: str) -> None:
    """Hugging Face's FP8 blocks; the config says that the whole checkpoint is in this format."""
    checkpoints.weights[f"{path}.weight"] = checkpoints.weights[f"{path}.weight"].to(FP8)
    checkpoints.weights[f"{path}.weight_scale_inv"] = torch.ones(1, 2)
    checkpoints.drafter["quantization_config"] = HF_FP8 | {"weight_block_size": [128, 128]}


def as_wide_as_the_drafter(checkpoints: Checkpoints) -> None:
    checkpoints.drafter["hidden_size"] = K * H
    checkpoints.weights["fc.weight"] = torch.ones(K * H, K * H)
    norms = ("norm", "midlayer.input_layernorm", "midlayer.hidden_norm")
    checkpoints.weights |= {f"{norm}.weight": torch.ones(K * H) for norm in norms}


SGLANG, V1, V2 = pair.SGLANG, pair.VLLM_V1, pair.VLLM_V2
ALL: tuple[str, ...] = ()
IN_NUMBERS = ("fc-quantized", (SGLANG,), "codes are taken for numbers (sglang#39087)")
OUT_OF_ORDER = (
    "engine-format",
    (V1, V2),
    "refuses the config: desc_act is true, and it reads no groups of columns that are out of order",
)
KEPT = ("fc-quantized", (SGLANG,), "skips its qweight: the weight stays what it was made with (sglang#39087)")
LORA, ROWS = "lora_A.weight", torch.ones(4, H)
MXFP8_BUT_FC = {"quant_algo": "MXFP8", "exclude_modules": ["fc"]}
TRANSFORM = {"config_groups": {"v": {"type": "hadamard", "apply": [{"targets": ["re:.*fc$"], "location": "input"}]}}}
E4M3_BY_ROW = {"dtype": "fp8_e4m3", "qscheme": "per_channel"}
QUARK = quark(E4M3_BY_ROW)
CONTEXT_LAYERS = ("fc", *(f"layers.{layer}.self_attn.{part}_proj" for layer in range(2) for part in "kv"))
# The change, and (trap, engines, a part of the text) of each finding.
EAGLE3_TRAPS: dict[str, tuple[Callable, list[tuple]]] = {
    "the name of a target": (
        lambda c: c.drafter.update(architectures=["LlamaForCausalLM"]),
        [("unserved", (SGLANG,), "has no LlamaForCausalLM")],
    ),
    "a name that no engine has": (
        lambda c: c.drafter.update(architectures=["Qwen2ForCausalLM"]),
        [
            ("unserved", (SGLANG,), "has no Qwen2ForCausalLM"),
            ("unserved", (V1, V2), "has no Eagle3Qwen2ForCausalLM"),
        ],
    ),
    "norms that are missing": (
        lambda c: [c.weights.pop(f"{norm}.weight") for norm in ("norm", "midlayer.hidden_norm")],
        [
            (
                "norms",
                ALL,
                "the file has no midlayer.hidden_norm.weight and no norm.weight: engines norm with a gain of 1",
            )
        ],
    ),
    "numbers that Model-Optimizer's nested config says are codes": (
        lambda c: c.drafter.update(
            quantization_config={"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}}
        ),
        [("fc-quantized", (V1, V2), "builds fc quantized, as quantization_config says of it, and fc.weight is BF16")],
    ),
    "numbers that Quark's config says are codes": (
        lambda c: c.drafter.update(quantization_config=quark({"dtype": "fp8_e4m3"})),
        [("fc-quantized", (V1, V2), "builds fc quantized, as quantization_config says of it, and fc.weight is BF16")],
    ),
    "numbers that Model-Optimizer's list of layers says are codes": (
        lambda c: c.drafter.update(quantization_config=mixed("model.fc")),
        [("fc-quantized", (V1, V2), "builds fc quantized, as quantization_config says of it, and fc.weight is BF16")],
    ),
    "codes that Model-Optimizer's list of layers lacks": (
        lambda c: with_config(c, mixed("lm_head")),
        [IN_NUMBERS, ("fc-quantized", (V1, V2), "and its quantized_layers lack fc: codes have no place there")],
    ),
    "an fc that Quark excludes by another name than vLLM's": (
        lambda c: c.drafter.update(quantization_config=QUARK | {"exclude": ["fc"]}),
        [("layer-quantized", (V1, V2), "builds fc quantized: it calls it model.fc, which quantization_config does")],
    ),
    "Kimi's fc that Quark excludes by another name than the engines'": (
        lambda c: c.drafter.update(
            quantization_config=QUARK | {"exclude": ["fc"]}, architectures=["Eagle3DeepseekV2ForCausalLM"]
        ),
        [
            ("layer-quantized", engines, "builds fc quantized: it calls it model.fc, which quantization_config does")
            for engines in ((SGLANG,), (V1, V2))
        ],
    ),
    "a quant_algo that SGLang lacks": (
        lambda c: with_config(c, {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}),
        [
            ("engine-format", (SGLANG,), "refuses the config: it has no quant_algo FP8_PB_WO"),
            ("load", ALL, "fc.weight is fp8_tensor, expected fp8_block128"),
            IN_NUMBERS,
        ],
    ),
    "a quant_algo that SGLang lacks, in hf_quant_config.json alone": (
        lambda c: setattr(c, "beside", {"quant_algo": "FP8_PB_WO", "exclude_modules": ["*fc*"]}),
        [("engine-format", (SGLANG,), "takes the checkpoint for one in numbers: it has no quant_algo FP8_PB_WO")],
    ),
    "a quant_algo that vLLM lacks, in the file beside the config": (
        lambda c: setattr(c, "beside", {"quant_algo": "NVFP4_AWQ", "exclude_modules": ["*fc*"]}),
        [("engine-format", (V1, V2), "refuses the config: it has no quant_algo NVFP4_AWQ")],
    ),
    **{
        f"Quark's {name}, which SGLang lacks": (
            lambda c, weights=weights: c.drafter.update(
                quantization_config=quark(*weights) | {"exclude": ["model.fc"]}
            ),
            [("engine-format", (SGLANG,), f"refuses the config: it has no scheme of Quark for weights in {name}")],
        )
        for name, weights in {
            "int8": [{"dtype": "int8", "qscheme": "per_tensor"}],
            "NVFP4": [{"dtype": "fp4", "group_size": 16}, {"dtype": "fp8_e4m3"}],
            "fp8_e4m3 and int4": [{"dtype": "fp8_e4m3"}, {"dtype": "int4"}],
            "MXFP8": [{"dtype": "fp8_e4m3", "qscheme": "per_group", "group_size": 32}],
        }.items()
    },
    "Quark's FP8 of weights alone": (
        lambda c: c.drafter.update(
            quantization_config=QUARK | {"exclude": ["model.fc"], "global_quant_config": {"weight": E4M3_BY_ROW}}
        ),
        [("engine-format", (SGLANG,), "no scheme of Quark for weights in fp8_e4m3 without input_tensors")],
    ),
    "a config of Quark without export": (
        lambda c: c.drafter.update(quantization_config=QUARK | {"export": None, "exclude": ["model.fc"]}),
        [("engine-format", (SGLANG, V1, V2), "refuses the config: it lacks export")],
    ),
    "mixed precision that says nothing of the KV cache": (
        lambda c: (
            c.drafter.update(quantization_config=mixed("lm_head")),
            c.drafter["quantization_config"].pop("kv_cache_quant_algo"),
        ),
        [
            (
                "engine-format",
                (SGLANG,),
                "it lacks kv_cache_quant_algo and kv_cache_scheme, and there is no hf_quant_con",
            )
        ],
    ),
    "Model-Optimizer's config without a quant_method": (
        # 0.31's. SGLang takes it for Model-Optimizer's, and reads its list: it builds down_proj in numbers.
        lambda c: (
            with_config(
                c, {"quant_algo": "FP8", "ignore": ["lm_head", "*down_proj"], "producer": {"name": "modelopt"}}
            ),
            c.weights.update({"midlayer.mlp.down_proj.weight": torch.ones(96, 64)}),
        ),
        [
            ("engine-format", (V1, V2), "takes the checkpoint for one in numbers: its quantization_config has no quan"),
            IN_NUMBERS,
            ("fc-quantized", (V1, V2), "and there is none: it fails to load"),
        ],
    ),
    "the same in the form of hf_quant_config.json, to which vLLM adds a quant_method": (
        lambda c: with_config(c, {"quantization": {"quant_algo": "FP8"}, "producer": {"name": "modelopt"}}),
        [IN_NUMBERS],
    ),
    "a layer that fp8 leaves out in a list of compressed-tensors": (
        lambda c: (
            c.drafter.update(quantization_config=HF_FP8 | {"ignore": ["fc", "midlayer.mlp.down_proj"]}),
            c.weights.update({"midlayer.mlp.down_proj.weight": torch.ones(96, 64)}),
        ),
        [
            ("fc-quantized", (V1, V2), "builds fc quantized: it does not read the list that leaves it out"),
            (
                "layer-quantized",
                (SGLANG, V1, V2),
                "builds midlayer.mlp.down_proj quantized: it does not read the list that leav",
            ),
        ],
    ),
    "a layer that fp8 leaves out in the second of its lists, of which the first is empty": (
        lambda c: (
            c.drafter.update(
                quantization_config=HF_FP8
                | {
                    "ignored_layers": [],
                    # The file's names and vLLM's.
                    "modules_to_not_convert": [
                        *("fc", "model.fc", "midlayer.mlp.down_proj", f"model.layers.{N}.mlp.down_proj")
                    ],
                }
            ),
            c.weights.update({"midlayer.mlp.down_proj.weight": torch.ones(96, 64)}),
        ),
        [
            (
                "layer-quantized",
                (SGLANG,),
                "builds midlayer.mlp.down_proj quantized: it does not read the list that leav",
            )
        ],
    ),
    "a quant_algo in lower case": (
        lambda c: c.drafter.update(quantization_config=MODELOPT_FP8 | {"quant_algo": "fp8", "ignore": ["fc"]}),
        [("engine-format", (SGLANG,), "refuses the config: it has no quant_algo fp8")],
    ),
    "a quant_algo in lower case, in hf_quant_config.json alone": (
        lambda c: setattr(c, "beside", {"quant_algo": "fp8", "exclude_modules": ["fc"]}),
        [("engine-format", (SGLANG,), "takes the checkpoint for one in numbers: it has no quant_algo fp8")],
    ),
    "MXFP8 in config.json without a quant_method": (
        lambda c: c.drafter.update(
            quantization_config={"producer": {"name": "modelopt"}, "quantization": MXFP8_BUT_FC}
        ),
        [("engine-format", (V1, V2), "refuses the config: it has no quant_algo MXFP8 without a quant_method")],
    ),
    "MXFP8 in hf_quant_config.json alone": (
        lambda c: setattr(c, "beside", MXFP8_BUT_FC),
        [("engine-format", (V1, V2), "refuses the config: it has no quant_algo MXFP8 in hf_quant_config.json alone")],
    ),
    "a layer that ModelOpt's FP8 leaves out in a list that SGLang does not read": (
        lambda c: (
            c.drafter.update(quantization_config=MODELOPT_FP8 | {"exclude_modules": ["fc", "*down_proj"]}),
            c.weights.update({"midlayer.mlp.down_proj.weight": torch.ones(96, 64)}),
        ),
        [
            (
                "layer-quantized",
                (SGLANG,),
                "builds midlayer.mlp.down_proj quantized: it does not read the list that leav",
            )
        ],
    ),
    "codes of a layer that ModelOpt's FP8 leaves out in a list that vLLM alone reads": (
        lambda c: (
            c.drafter.update(quantization_config=MODELOPT_FP8 | {"exclude_modules": ["fc", "*down_proj"]}),
            c.weights.update({"midlayer.mlp.down_proj.weight": torch.ones(96, 64).to(FP8)}),
            c.weights.update({"midlayer.mlp.down_proj.weight_scale": torch.ones(())}),
        ),
        [("layer-quantized", (V1, V2), "and that leaves midlayer.mlp.down_proj out: codes have no place there")],
    ),
    **{
        f"a layer of mixed precision in {algorithm}": (
            lambda c, algorithm=algorithm, scale=scale: (
                c.drafter.update(
                    quantization_config=mixed(
                        *(f"{place}.down_proj" for place in ("midlayer.mlp", f"model.layers.{N}.mlp", "model")),
                        algorithm=algorithm,
                    )
                ),
                c.weights.update({"midlayer.mlp.down_proj.weight": torch.ones(96, 64).to(FP8)}),
                c.weights.update({"midlayer.mlp.down_proj.weight_scale": scale}),
            ),
            [
                (
                    "layer-quantized",
                    engines,
                    "its method lacks the quant_algo of midlayer.mlp.down_proj: codes have no pl",
                )
            ],
        )
        for algorithm, scale, engines in (
            ("FP8_BLOCK_SCALES", torch.ones(1, 1), (V1, V2)),
            ("FP8_PER_CHANNEL_PER_TOKEN", torch.ones(96, 1), (SGLANG,)),
        )
    },
    "mixed precision without NVFP4": (
        lambda c: (
            c.drafter.update(quantization_config=mixed("lm_head")),
            c.drafter["quantization_config"]["quantized_layers"].pop("other"),
        ),
        [("engine-format", (SGLANG,), "takes MIXED_PRECISION without NVFP4 for w4afp8, which builds every linear")],
    ),
    "a layer that mixed precision lists by another name than the engines'": (
        lambda c: (
            c.drafter.update(quantization_config=mixed(UP)),
            c.weights.update({f"{UP}.weight": torch.zeros(96, 64).to(FP8), f"{UP}.weight_scale": torch.ones(())}),
        ),
        [
            ("layer-quantized", engines, f"calls {UP} {name}, which quantized_layers lack: codes have no place there")
            for engines, name in (
                ((SGLANG,), "model.gate_up_proj"),
                ((V1, V2), f"model.layers.{N}.mlp.gate_up_proj"),
            )
        ],
    ),
    "MXFP4 of compressed-tensors, in which SGLang builds q, k and v": (
        lambda c: with_attention_in_mxfp4(c),
        [
            (
                "engine-format",
                (SGLANG,),
                "refuses the config: it has no scheme of compressed-tensors for weights in float4 group 32, inputs in "
                "float4 group 32 dynamic, format mxfp4-pack-quantized",
            )
        ],
    ),
    "a divisor of GPTQModel, which engines multiply by": (
        lambda c: (
            renamed(c, "fc.weight", "model.fc.weight"),
            c.weights.update(
                {"model.fc.weight": torch.ones(D, K * H).to(FP8), "model.fc.weight_scale_inv": torch.full((D,), 1e4)}
            ),
            c.drafter.update(quantization_config={"quant_method": "fp8", "weight_scale_semantics": "inverse"}),
        ),
        [
            ("engine-format", (SGLANG, V1, V2), "refuses the config: it lacks activation_scheme"),
            (
                "engine-format",
                (SGLANG, V1, V2),
                "multiplies codes by weight_scale_inv, which weight_scale_semantics says is a divisor",
            ),
            IN_NUMBERS,
        ],
    ),
    "a sparsity_config, which vLLM has no more": (
        lambda c: c.drafter.update(
            quantization_config=of_group("re:.*mlp.*") | {"sparsity_config": {"targets": ["Linear"]}}
        ),
        [("engine-format", (V1, V2), "refuses the config: it has a sparsity_config, support of which is removed")],
    ),
    "ids of outputs": (
        lambda c: c.drafter.update({"eagle_config": {IDS: [1, 5, 8]}}),
        [
            ("engine-layers", (V1,), "captures the boundaries [1, 5, 8], and the config means [2, 6, 9]"),
        ],
    ),
    "ids where vLLM's V2 runner does not look": (
        lambda c: c.drafter.update({"eagle_config": {IDS: [1, 4, 7]}}),
        [
            ("engine-layers", (V1,), "captures the boundaries [1, 4, 7], and the config means [2, 5, 8]"),
            ("engine-layers", (V2,), "takes its default: the boundaries [2, 6, 9], and the config means [2, 5, 8]"),
        ],
    ),
    "ids of a target that is too shallow for the default": (
        lambda c: (c.target.update(num_hidden_layers=5), c.drafter.update({"eagle_config": {IDS: [0, 1, 2]}})),
        [
            ("engine-layers", (V1,), "captures the boundaries [0, 1, 2], and the config means [1, 2, 3]"),
            ("engine-layers", (V2,), "does not read the config's layer ids and takes its default: capture_layers: "),
        ],
    ),
    "ids at the top, four of them": (
        lambda c: (
            c.drafter.update({IDS: [1, 4, 7, 9]}),
            c.weights.update({"fc.weight": torch.ones(D, 4 * H), "fc_norm.3.weight": torch.ones(H)}),
        ),
        [
            ("engine-layers", (SGLANG,), "its default: the boundaries [2, 6, 9], and the config means [2, 5, 8, 10]"),
            ("engine-chunks", (SGLANG,), "builds fc for K = 3, and the config means K = 4 (vllm#54526)"),
            ("engine-layers", (V1,), "captures the boundaries [1, 4, 7, 9], and the config means [2, 5, 8, 10]"),
            ("engine-chunks", (V1,), "builds fc for K = 3"),
            ("engine-layers", (V2,), "captures the boundaries [1, 4, 7, 9]"),
            ("engine-chunks", (V2,), "builds fc for K = 3"),
        ],
    ),
    "an empty list of ids": (
        lambda c: c.drafter.update({"eagle_config": {IDS: []}}),
        [("engine-layers", (SGLANG,), "captures no layer, as the list of its ids is empty, and the config means")],
    ),
    "ids at the top of a latent drafter, four of them": (
        lambda c: (
            c.drafter.update({IDS: [1, 4, 7, 9], "architectures": ["Eagle3DeepseekV2ForCausalLM"]}),
            c.target.update(model_type="kimi_k2"),
            c.weights.update({"fc.weight": torch.ones(D, 4 * H), "fc_norm.3.weight": torch.ones(H)}),
        ),
        [
            ("engine-layers", (SGLANG,), "its default: the boundaries [2, 6, 9], and the config means [2, 5, 8, 10]"),
            *(
                (trap, (engine,), "")
                for engine in (V1, V2)
                for trap in ("engine-layers", "engine-chunks")  # only SGLang's class reads K there
            ),
        ],
    ),
    "the number of states of a latent drafter, without ids": (
        lambda c: (
            c.drafter.update(num_aux_hidden_states=4, architectures=["Eagle3DeepseekV2ForCausalLM"]),
            c.weights.update({"fc.weight": torch.ones(D, 4 * H), "fc_norm.3.weight": torch.ones(H)}),
        ),
        [("engine-chunks", (SGLANG,), "builds fc for K = 3, and the config means K = 4")],
    ),
    "no fc between two widths": (
        lambda c: (without_fc(c), c.target.update(hidden_size=D), c.drafter.update(target_hidden_size=D)),
        [("hidden-size", ALL, "the states are 48 wide and the drafter 64, and use_aux_hidden_state False leaves out")],
    ),
    "layer ids of a drafter without fc": (
        lambda c: (without_fc(c), c.drafter["eagle_config"].update({IDS: [2, 6, 9]})),
        [
            ("engine-layers", (SGLANG, V1), f"use_aux_hidden_state is False, and eagle_config.{IDS} is [2, 6, 9]"),
            ("config", ALL, "use_aux_hidden_state is False, expected K = 3 chunks, because eagle_config."),
        ],
    ),
    "one layer id of a drafter without fc": (
        lambda c: (without_fc(c), c.drafter.update({IDS: [6]})),
        [("engine-layers", (SGLANG, V1), f"captures no layer, since use_aux_hidden_state is False, and {IDS} is [6]")],
    ),
    "no fc, as a field that no engine reads says": (
        lambda c: (without_fc(c), c.drafter.update(use_aux_hidden_state=False, eagle_config={IDS: [6]})),
        [
            ("layers", ALL, "use_aux_hidden_state is False, but not in eagle_config, where engines look for it"),
            ("engine-layers", (V1,), "captures the boundaries [6], and the config means [7]"),
            ("engine-layers", (V2,), "takes its default: the boundaries [2, 6, 9], and the config means [7]"),
        ],
    ),
    "a target that vLLM alone captures": (
        lambda c: c.target.update({"model_type": "mistral3"}),
        [("engine-layers", (SGLANG,), "is not known to capture layers of a 'mistral3' target")],
    ),
    "a target whose class inherits its captures and drops them": (
        lambda c: c.target.update({"model_type": "qwen4_exp"}),
        [("engine-layers", (SGLANG,), "is not known to capture layers of a 'qwen4_exp' target")],
    ),
    "ids of a target that vLLM alone captures": (
        lambda c: (c.target.update({"model_type": "granite"}), c.drafter.update({IDS: [2, 6, 12]})),
        [("engine-layers", (SGLANG,), "is not known to capture layers of a 'granite' target")],
    ),
    "a target without layers": (
        lambda c: c.target.pop("num_hidden_layers"),
        [("layers", ALL, "the target's config has no num_hidden_layers")],
    ),
    "two values of K": (
        lambda c: c.drafter.update({"num_aux_hidden_states": 4, "eagle_config": {IDS: [1, 5, 8]}}),
        [("config", ALL, "expected K = 4 chunks, because num_aux_hidden_states is 4")],
    ),
    "Gemma 3": (
        lambda c: c.target.update({"model_type": "gemma3_text"}),
        [("gemma3-residual", (SGLANG,), "without its residual (sglang#39286)")],
    ),
    "another target": (
        lambda c: c.target.update({"hidden_size": 2 * H}),
        [("hidden-size", ALL, "the target's hidden_size is 128, and the drafter's target_hidden_size 64")],
    ),
    "K*H is the drafter's width": (
        as_wide_as_the_drafter,
        [("fc-skipped", (SGLANG,), "K*H = 192 is the drafter's own")],
    ),
    "no fc": (lambda c: c.weights.pop("fc.weight"), [("fc", ALL, "the drafter has no fc.weight")]),
    "fc of another K": (
        lambda c: c.weights.update({"fc.weight": torch.ones(D, 2 * H)}),
        [("load", ALL, "fc.weight has shape (48, 128), expected (48, 192), because it is (D, K*H) with K = 3")],
    ),
    "a bias that the config does not have": (
        lambda c: c.weights.update({"fc.bias": torch.ones(D)}),
        [("fc-bias", ALL, "fc.bias is there, and the config's bias is False")],
    ),
    "modules inside norms": (
        lambda c: c.weights.update(
            {
                "fc_norm.0.norm.weight": torch.ones(H),
                "midlayer.hidden_norm.norm.weight": torch.ones(D),
                "midlayer.hidden_norm.weight_scale": torch.ones(()),
            }
        ),
        [
            ("norms", ALL, "'fc_norm.0.norm.weight', 'fc_norm.0.weight', 'fc_norm.1.weight', "),
            ("norms", ALL, "the file has midlayer.hidden_norm.norm.weight, and a norm has its weight alone"),
            ("norms", ALL, "the file has midlayer.hidden_norm.weight_scale, and a norm has its weight alone"),
        ],
    ),
    "a norm less": (lambda c: c.weights.pop("fc_norm.1.weight"), [("norms", ALL, "an engine that skips one loses")]),
    "norms that the config forgot": (
        lambda c: c.drafter.pop("fc_norm"),
        [("norms", ALL, "and the config means none: an engine that skips")],
    ),
    "a normed residual": (
        lambda c: c.drafter.update(norm_before_residual=True),
        [
            (
                "engine-flags",
                (SGLANG,),
                "takes norm_before_residual for False, and the drafter was trained with True: layer 0 adds another",
            )
        ],
    ),
    "one norm of the concat, in a latent drafter": (
        lambda c: (
            c.drafter.update(norm_before_fc=True, fc_norm=False, architectures=["Eagle3DeepseekV2ForCausalLM"]),
            [c.weights.pop(f"fc_norm.{k}.weight") for k in range(K)],
            c.weights.update({"input_norm.weight": torch.ones(K * H)}),
        ),
        [("engine-flags", (engine,), "takes concat_norm for False") for engine in (SGLANG, V1, V2)],
    ),
    "the old name of fc_norm": (
        lambda c: c.drafter.update(fc_norm=None, use_aux_norm=True),
        [("engine-flags", (engine,), "takes chunk_norm for False") for engine in (V1, V2)],
    ),
    "a bias": (
        lambda c: (c.drafter.update(bias=True), c.weights.update({"fc.bias": torch.ones(D)})),
        [("engine-flags", (engine,), "takes bias for False") for engine in (V1, V2)],
    ),
    "flags where no engine looks": (
        lambda c: c.drafter.update({"eagle_config": {"norm_output": True}}),
        [("engine-flags", (engine,), "takes norm_output for False") for engine in (SGLANG, V1, V2)],
    ),
    "speculators": (
        lambda c: c.drafter.update(speculators_model_type="eagle3", norm_output=True),
        [("format", (SGLANG,), "does not know the format of speculators")],
    ),
    "speculators' parallel drafter": (
        lambda c: c.drafter.update(speculators_model_type="peagle", norm_output=True),
        [
            ("format", (SGLANG,), ""),
            *(
                ("engine-flags", (engine,), f"takes {name} for False")
                for engine in (V1, V2)
                for name in ("chunk_norm", "norm_output")
            ),
        ],
    ),
    "q, k and v that compressed-tensors leaves out by all names but SGLang's of the three": (
        lambda c: (
            with_attention(c),
            c.drafter.update(
                quantization_config=of_group("Linear")
                | {
                    "ignore": [
                        *("fc", "model.fc", f"model.layers.{N}.self_attn.qkv_proj", f"model.layers.{N}.{OUT}"),
                        *(f"{place}.{each}_proj" for place in ("midlayer.self_attn", "model") for each in "qkv"),
                        *(f"midlayer.{OUT}", f"model.{OUT}"),
                    ]
                }
            ),
        ),
        [
            (
                "layer-quantized",
                (SGLANG,),
                f"builds midlayer.self_attn.{name}_proj quantized: it calls it model.qkv_proj, which ",
            )
            for name in "kqv"
        ],
    ),
    "layers that the file lacks": (
        lambda c: with_attention(c, num_hidden_layers=28),
        [
            (
                "decoder-layers",
                (SGLANG, V1, V2),
                "num_hidden_layers is 28, and the file has the layers [0]: it runs the others with what its memory had",
            )
        ],
    ),
    "a layer that the config lacks": (
        lambda c: (with_attention(c), c.weights.update({"layers.1.mlp.up_proj.weight": torch.ones(8, D)})),
        [
            ("decoder-layers", (V1, V2), "and the file has the layers [0, 1]: it fails to load the others"),
            ("decoder-layers", (SGLANG,), "and the file has the layers [0, 1]: it skips the others, and says nothing"),
        ],
    ),
    "a layer that the config in speculators' format lacks, which SGLang does not read": (
        lambda c: (
            with_attention(c),
            c.drafter.update(speculators_model_type="eagle3", norm_output=True),
            c.weights.update({"layers.1.mlp.up_proj.weight": torch.ones(8, D)}),
        ),
        [
            ("format", (SGLANG,), "does not know the format of speculators"),
            ("decoder-layers", (V1, V2), "and the file has the layers [0, 1]: it fails to load the others"),
        ],
    ),
    "a layer that a latent drafter's config lacks, of which SGLang builds one": (
        lambda c: (with_latent_attention(c), c.weights.update({"layers.1.mlp.up_proj.weight": torch.ones(8, D)})),
        [("decoder-layers", (V1, V2), "and the file has the layers [0, 1]: it fails to load the others")],
    ),
    "two layers of a latent drafter": (
        lambda c: (
            with_latent_attention(c, num_hidden_layers=2),
            c.weights.update({"layers.1.mlp.up_proj.weight": torch.ones(8, D)}),
        ),
        [("decoder-layers", (SGLANG,), "num_hidden_layers is 2, and it has one layer: it fails")],
    ),
    "a latent drafter without q_lora_rank": (
        lambda c: with_latent_attention(c, q_lora_rank=None),
        [("config", (SGLANG,), "requires q_lora_rank, which the config does not have")],
    ),
    "no q_proj": (
        lambda c: (with_attention(c), c.weights.pop("midlayer.self_attn.q_proj.weight")),
        [("load", ALL, "weights has no midlayer.self_attn.q_proj.weight, expected every projection of the layer")],
    ),
    "k_proj of other heads": (
        lambda c: with_attention(c, num_key_value_heads=4),
        [("load", ALL, "midlayer.self_attn.k_proj.weight has shape (24, 96), expected (48, 96)")],
    ),
    "heads that are no number": (
        lambda c: with_attention(c, num_attention_heads="4"),
        [("config", ALL, "Eagle3QKVConfig.from_hf: num_attention_heads is a str, expected an int")],
    ),
    "biases of q, k and v": (
        lambda c: (with_attention(c, attention_bias=True), with_biases(c)),
        [("engine-flags", (SGLANG,), "takes attention_bias for False, and the drafter was trained with True")],
    ),
    "biases of q, k and v in speculators' format, which SGLang does not read": (
        lambda c: (
            with_attention(c, attention_bias=True),
            with_biases(c),
            c.drafter.update(speculators_model_type="eagle3", norm_output=True),
        ),
        [("format", (SGLANG,), "does not know the format of speculators")],
    ),
    "biases that the config does not have": (
        lambda c: (with_attention(c), with_biases(c)),
        [("load", ALL, "weights has midlayer.self_attn.q_proj.bias, expected none, because bias is False")],
    ),
    "biases that the file does not have": (
        lambda c: (
            with_attention(c, attention_bias=True),
            with_biases(c),
            c.weights.pop("midlayer.self_attn.k_proj.bias"),
        ),
        [
            ("load", ALL, "weights has no midlayer.self_attn.k_proj.bias"),
            ("engine-flags", (SGLANG,), "takes attention_bias for False"),
        ],
    ),
    "no bias of o_proj": (
        lambda c: (with_attention(c, attention_bias=True), with_biases(c, output=False)),
        [
            ("engine-flags", (SGLANG,), "takes attention_bias for False"),
            ("engine-flags", (V1, V2), "builds o_proj with a bias, as attention_bias says, and the file has none"),
        ],
    ),
    "a bias of fc, and vLLM's of o_proj": (
        lambda c: (with_attention(c, bias=True), c.weights.update({"fc.bias": torch.ones(D)})),
        [
            *(("engine-flags", (engine,), "takes bias for False") for engine in (V1, V2)),
            ("engine-flags", (V1, V2), "builds o_proj with a bias, as bias says, and the file has none"),
        ],
    ),
    "a width of the target that is null": (
        lambda c: (
            c.drafter.update(target_hidden_size=None, hidden_size=H),
            c.target.update(hidden_size=H),
            c.weights.update({"fc.weight": torch.ones(H, K * H), "lm_head.weight": torch.ones(DRAFTED, H)}),
            c.weights.update({"norm.weight": torch.ones(H)}),
            c.weights.update({f"midlayer.{norm}.weight": torch.ones(H) for norm in ("input_layernorm", "hidden_norm")}),
        ),
        [("hidden-size", (SGLANG, V1, V2), "reads target_hidden_size, which is null, and fails")],
    ),
    "another vocabulary": (
        lambda c: c.drafter.update(vocab_size=V + 8),
        [("vocabulary", ALL, "the target has 1000 token ids, and the drafter's table 1008 rows")],
    ),
    "no d2t": (
        lambda c: c.weights.pop("d2t"),
        [("d2t", ALL, "200 of 1000 ids are drafted, and the file has no d2t")],
    ),
    "d2t of another length": (
        lambda c: c.weights.update(d2t=torch.zeros(V, dtype=torch.int64)),
        [("d2t", ALL, "d2t has [1000] entries, and draft_vocab_size is 200")],
    ),
    "a head of another length": (
        lambda c: c.weights.update({"lm_head.weight": torch.ones(V, D)}),
        [("draft-head", ALL, "lm_head.weight has 1000 rows, and draft_vocab_size is 200")],
    ),
    "no head": (
        lambda c: c.weights.pop("lm_head.weight"),
        [("draft-head", ALL, "200 ids are drafted, and the file has no lm_head.weight")],
    ),
    "a head that SGLang ties to the embedding": (
        lambda c: c.drafter.update(tie_word_embeddings=True),
        [("draft-head", (SGLANG,), "takes the embedding for the head, as tie_word_embeddings says, and skips the")],
    ),
    "no number of drafted ids": (
        lambda c: (
            c.drafter.pop("draft_vocab_size"),
            c.weights.update({"lm_head.weight": torch.ones(V, D)}),
            c.weights.pop("d2t"),
        ),
        [("draft-head", (SGLANG,), "reads draft_vocab_size, which the config does not have, and fails")],
    ),
    "fp8 that no config mentions": (
        quantized,
        [
            ("fc-quantized", (SGLANG,), "codes are taken for numbers (sglang#39087)"),
            ("fc-quantized", (V1, V2), "quantizes fc as the drafter's quantization_config says, and there is none"),
        ],
    ),
    "int8 with one scale": (in_int8, [IN_NUMBERS]),
    "int8 in groups": (
        in_int8_groups,
        [("engine-format", (SGLANG,), "weights in int4 group 96, inputs in int8 token dynamic"), IN_NUMBERS],
    ),
    "int8 with zero points of zero": (lambda c: with_zero_points(c, 0), [IN_NUMBERS]),
    "int8 with zero points": (
        lambda c: with_zero_points(c, 3),
        [
            ("load", ALL, "fc.weight_zero_point is 3 at [0, 0], expected 0, because int8 is read without zero points"),
            ("fc-quantized", (SGLANG,), "(sglang#39087); this package's plugin refuses them"),
        ],
    ),
    "e5m2": (
        lambda c: (
            quantized(c),
            c.weights.update({"fc.weight": c.weights["fc.weight"].to(torch.float8_e5m2)}),
        ),
        [
            ("load", ALL, "fc.weight is torch.float8_e5m2, expected codes in torch.float8_e4m3fn, torch.int8 or"),
            ("fc-quantized", (SGLANG,), "; this package's plugin refuses them"),
            ("fc-quantized", (V1, V2), "and there is none: it fails to load; this package's plugin refuses them"),
        ],
    ),
    "fp8 with its config": (
        lambda c: with_config(c, HF_FP8),
        [("fc-quantized", (SGLANG,), "codes are taken for numbers (sglang#39087)")],
    ),
    "GPTQ": (
        lambda c: (
            with_config(c, GPTQ | {"group_size": 48}),
            c.weights.update({"fc.qweight": torch.zeros(K * H // 8, D, dtype=torch.int32)}),
            c.weights.update({"fc.scales": torch.ones(4, D), "fc.qzeros": middle_zeros(4, D)}),
            [c.weights.pop(name) for name in ("fc.weight", "fc.weight_scale")],
        ),
        [
            ("engine-format", (SGLANG, V1, V2), "group_size is 48, and it reads -1, 32, 64, 128"),
            KEPT,
        ],
    ),
    "a group size of auto-round that engines read in AWQ's packing alone": (
        lambda c: c.drafter.update(
            quantization_config=AUTO_ROUND | {"group_size": 16, "block_name_to_quantize": "model.layers"}
        ),
        [("engine-format", (SGLANG, V1, V2), "group_size is 16, and it reads -1, 32, 64, 128")],
    ),
    "a config of fp8 without its activations": (
        lambda c: c.drafter.update(
            quantization_config={"quant_method": "fp8", "modules_to_not_convert": ["fc", "model.fc"]}
        ),
        [("engine-format", (SGLANG, V1, V2), "refuses the config: it lacks activation_scheme")],
    ),
    "an lm_head of auto-round, whose lm_head changes nothing": (
        lambda c: (
            with_head_in_gptq(c),
            c.drafter.update(quantization_config=AUTO_ROUND | {"group_size": -1, "lm_head": True}),
            c.drafter["quantization_config"].update(extra_config={"fc": {"bits": 16}, "model.fc": {"bits": 16}}),
        ),
        [("layer-quantized", (SGLANG, V1, V2), "holds lm_head in a ParallelLMHead without a quantization method")],
    ),
    "an lm_head in ModelOpt's MXFP8": (
        lambda c: (
            c.weights.update({"lm_head.weight": torch.ones(DRAFTED, 64).to(FP8)}),
            c.weights.update({"lm_head.weight_scale": torch.ones(DRAFTED, 2, dtype=torch.uint8)}),
            c.drafter.update(quantization_config=MODELOPT_FP8 | {"quant_algo": "MXFP8", "ignore": ["fc"]}),
        ),
        [("layer-quantized", (SGLANG,), "holds lm_head in a ParallelLMHead without a quantization method")],
    ),
    "GPTQ of which the config lacks keys": (
        lambda c: (
            in_gptq(c, groups=6),
            c.weights.pop("fc.g_idx"),
            with_integers(c, {"quant_method": "gptq", "bits": 4, "desc_act": False}),
        ),
        [("engine-format", (SGLANG, V1, V2), "refuses the config: it lacks group_size and sym"), KEPT],
    ),
    "AWQ of another width": (
        lambda c: c.drafter.update(quantization_config=AWQ | {"bits": 8, "modules_to_not_convert": ["fc", "midlayer"]}),
        [("engine-format", (SGLANG, V1, V2), "refuses the config: bits is 8, and it reads 4")],
    ),
    "AWQ of which the config lacks keys": (
        lambda c: (in_awq(c), with_integers(c, {"quant_method": "awq", "w_bit": 4, "q_group_size": 32})),
        [("engine-format", (SGLANG, V1, V2), "refuses the config: it lacks zero_point"), KEPT],
    ),
    # `tests/engines/vllm` has both: vLLM ends with an error.
    "GPTQ of which vLLM calls a layer by another name": (
        lambda c: (
            in_gptq(c, groups=6),
            c.weights.pop("fc.g_idx"),
            c.drafter["quantization_config"].update(desc_act=False),
            c.weights.update({f"{UP}.qweight": torch.zeros(8, 96, dtype=torch.int32)}),
            c.weights.update({f"{UP}.scales": torch.ones(2, 96), f"{UP}.qzeros": middle_zeros(2, 96)}),
        ),
        [
            KEPT,
            (
                "layer-quantized",
                (V1, V2),
                f"calls {UP} model.layers.{N}.mlp.gate_up_proj, and looks that up among the file's names: codes have "
                "no place there without this package's plugin",
            ),
        ],
    ),
    "AWQ of which vLLM calls an unquantized layer by another name": (
        lambda c: (
            in_awq(c),
            with_integers(c, AWQ),
            c.weights.update({f"{UP}.weight": torch.ones(96, 64).bfloat16()}),
        ),
        [
            KEPT,
            (
                "layer-quantized",
                (SGLANG,),
                f"builds {UP} quantized, as quantization_config says of it, and it is in num",
            ),
            (
                "layer-quantized",
                (V1, V2),
                f"builds {UP} quantized: it calls it model.layers.{N}.mlp.gate_up_proj, which none of the file's",
            ),
        ],
    ),
    "GPTQ with act order": (lambda c: in_gptq(c, groups=6), [OUT_OF_ORDER, KEPT]),
    "GPTQ of another group size": (
        lambda c: (in_gptq(c, groups=5), c.drafter["quantization_config"].update(group_size=64, desc_act=False)),
        [("load", ALL, "fc.qweight has 5 groups in 192 columns, expected 3, because the checkpoint says group"), KEPT],
    ),
    "GPTQ with one group of all columns, in any order": (
        lambda c: (in_gptq(c, groups=1), c.drafter["quantization_config"].update(group_size=-1)),
        [KEPT],
    ),
    "GPTQ with zeros": (
        lambda c: (
            in_gptq(c, groups=6),
            c.weights.pop("fc.g_idx"),
            c.drafter["quantization_config"].update(desc_act=False, sym=False),
        ),
        [("engine-format", (SGLANG, V1, V2), "refuses the config: sym is not true, and it reads no zeros"), KEPT],
    ),
    "GPTQ with a group too many": (
        lambda c: (in_gptq(c, groups=6), c.weights["fc.g_idx"].add_(1)),
        [
            OUT_OF_ORDER,
            ("load", ALL, "fc.g_idx has groups 1 to 6, expected 0 to 5, because fc.scales has 6"),
            KEPT,
        ],
    ),
    "GPTQ of which the config contradicts itself": (
        lambda c: (
            in_gptq(c, groups=6),
            c.drafter["quantization_config"].update(checkpoint_format="gptq", format="gptq_v2", desc_act=False),
        ),
        [("load", ALL, "the checkpoint says checkpoint_format 'gptq' and format 'gptq_v2', expected the same"), KEPT],
    ),
    "another packing of auto-round": (
        lambda c: (
            in_gptq(c, groups=6),
            with_integers(c, AUTO_ROUND | {"packing_format": "auto_round:mlx"}),
        ),
        [
            ("engine-format", (SGLANG, V1, V2), "packing_format is 'auto_round:mlx', and it reads auto_gptq's"),
            ("load", ALL, "the checkpoint says packing_format 'auto_round:mlx', expected 'auto_round:auto_gptq'"),
            KEPT,
        ],
    ),
    "fp8 without its scale": (
        without_scale,
        [
            ("load", ALL, "weights has fc.weight in torch.float8_e4m3fn, expected its scale beside it"),
            ("fc-quantized", (SGLANG,), ""),
            ("fc-quantized", (V1, V2), ""),
        ],
    ),
    "a scale without its codes' blocks": (
        lambda c: (
            with_config(c, HF_FP8 | {"weight_block_size": [128, 128]}),
            c.weights.update({"fc.weight_scale": torch.ones(7, 9)}),
        ),
        [("load", ALL, "fc.weight_scale is torch.float32 of shape (7, 9), expected"), IN_NUMBERS],
    ),
    "a config of another format": (
        lambda c: with_config(c, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
        [("load", ALL, "fc.weight is fp8_tensor, expected nvfp4, because the checkpoint says"), IN_NUMBERS],
    ),
    "a config of other blocks": (
        lambda c: with_config(c, HF_FP8 | {"weight_block_size": [64, 64]}),
        [("load", ALL, "because the checkpoint says weight_block_size [64, 64]"), IN_NUMBERS],
    ),
    "codes that the config leaves out": (
        lambda c: with_config(c, HF_FP8 | {"modules_to_not_convert": ["fc"]}),
        [IN_NUMBERS, ("fc-quantized", (V1, V2), "and that leaves fc out: codes have no place there")],
    ),
    "an fc that is left out by another name than vLLM's": (
        lambda c: c.drafter.update(quantization_config=HF_FP8 | {"modules_to_not_convert": ["fc"]}),
        [
            (
                "layer-quantized",
                (V1, V2),
                "builds fc quantized: it calls it model.fc, which quantization_config does not",
            )
        ],
    ),
    "an fc that only a pattern leaves out": (
        lambda c: c.drafter.update(quantization_config=HF_FP8 | {"modules_to_not_convert": ["lm_head", ".*fc"]}),
        [
            (
                "fc-quantized",
                (V1, V2),
                "builds fc quantized: it takes the pattern in modules_to_not_convert that leaves it out for a name",
            )
        ],
    ),
    "layers that only a pattern leaves out": (
        lambda c: (
            c.drafter.update(quantization_config=AWQ | {"modules_to_not_convert": ["fc", r".*mlp\.(gate|up)_proj"]}),
            c.weights.update({f"midlayer.mlp.{name}.weight": torch.ones(96, 64) for name in ("gate_proj", "up_proj")}),
        ),
        [
            ("layer-quantized", (SGLANG, V1, V2), f"builds midlayer.mlp.{name} quantized: it takes the pattern in")
            for name in ("gate_proj", "up_proj")
        ],
    ),
    "layers in numbers that the config says are codes": (
        lambda c: (
            c.drafter.update(quantization_config=HF_FP8 | {"modules_to_not_convert": ["fc", "model.fc"]}),
            c.weights.update({f"midlayer.{name}.weight": torch.ones(96, 64) for name in ("mlp.down_proj", OUT)}),
        ),
        [
            (
                "layer-quantized",
                (SGLANG, V1, V2),
                f"builds midlayer.{name} quantized, as quantization_config says of it",
            )
            for name in ("mlp.down_proj", OUT)
        ],
    ),
    "layers in numbers that GPTQ's config says are codes": (
        # vLLM lists the layers in codes by the file's header.
        lambda c: (
            c.drafter.update(quantization_config=GPTQ | {"dynamic": {"-:.*fc": {}}}),
            c.weights.update({f"{UP}.weight": torch.ones(96, 64)}),
        ),
        [("layer-quantized", (SGLANG,), f"builds {UP} quantized, as quantization_config says of it")],
    ),
    "a layer in numbers that mixed precision lists": (
        lambda c: (
            c.drafter.update(quantization_config=mixed(UP, "model.up_proj", f"model.layers.{N}.mlp.up_proj")),
            c.weights.update({f"{UP}.weight": torch.ones(96, 64)}),
        ),
        [("layer-quantized", (SGLANG, V1, V2), f"builds {UP} quantized, as quantization_config says of it")],
    ),
    "codes that GPTQModel leaves out": (
        lambda c: with_config(c, HF_FP8 | {"dynamic": {"-:.*fc": {}}}),
        [IN_NUMBERS, ("fc-quantized", (V1, V2), "and that leaves fc out")],
    ),
    "codes that auto-round leaves out": (
        lambda c: with_config(c, AUTO_ROUND | AUTO_ROUND_FP8),
        [
            ("engine-format", (SGLANG,), "refuses the config: data_type is 'fp', and it reads int"),
            IN_NUMBERS,
            ("fc-quantized", (V1, V2), "and that leaves fc out: codes have no place there"),
        ],
    ),
    "a data_type of auto-round that no engine reads": (
        lambda c: c.drafter.update(
            quantization_config=AUTO_ROUND | {"data_type": "nv_fp4", "block_name_to_quantize": "model.layers"}
        ),
        [
            ("engine-format", (SGLANG,), "refuses the config: data_type is 'nv_fp4', and it reads int"),
            ("engine-format", (V1, V2), "refuses the config: data_type is 'nv_fp4', and it reads int, fp and mx_fp"),
        ],
    ),
    "FP8 of auto-round by row": (
        lambda c: c.drafter.update(quantization_config=AUTO_ROUND | AUTO_ROUND_FP8 | {"group_size": 32}),
        [
            ("engine-format", (SGLANG,), "refuses the config: data_type is 'fp', and it reads int"),
            ("engine-format", (V1, V2), "refuses the config: group_size is 32, and it reads FP8 in blocks alone"),
        ],
    ),
    "3 bits of auto-round": (
        lambda c: c.drafter.update(
            quantization_config=AUTO_ROUND | {"bits": 3, "block_name_to_quantize": "model.layers"}
        ),
        [("engine-format", (SGLANG,), "refuses the config: bits is 3, and it reads 4 and 8")],
    ),
    "a config of auto-round that lacks sym, which vLLM takes for true": (
        lambda c: (
            c.drafter.update(quantization_config=AUTO_ROUND | {"block_name_to_quantize": "model.layers"}),
            c.drafter["quantization_config"].pop("sym"),
        ),
        [("engine-format", (SGLANG,), "refuses the config: it lacks sym")],
    ),
    "GPTQ's method by the name of its tool": (
        lambda c: c.drafter.update(quantization_config=GPTQ | {"quant_method": "gptqmodel", "dynamic": {"-:fc": {}}}),
        [("engine-format", (SGLANG, V1, V2), "has no quantization method gptqmodel, and refuses the config")],
    ),
    "GPTQ with act order in a rule": (
        lambda c: c.drafter.update(
            quantization_config=GPTQ | {"dynamic": {"-:.*fc": {}, "+:.*other": {"desc_act": True}}}
        ),
        [OUT_OF_ORDER],
    ),
    "GPTQ of symmetric codes with other zeros": (
        lambda c: (
            in_gptq(c, groups=6),
            c.weights.pop("fc.g_idx"),
            c.drafter["quantization_config"].update(desc_act=False),
            c.weights["fc.qzeros"].add_(1),
        ),
        [("load", ALL, "fc.qzeros has a zero of 9 for row 0, group 0, expected 8, because the checkpoint says"), KEPT],
    ),
    "codes of AWQ whose merged layer has an entry of the list in its name": (
        lambda c: (
            c.drafter.update(quantization_config=AWQ | {"modules_to_not_convert": ["fc", "gate"]}),
            in_packed_rows(c, "midlayer.mlp.gate_proj", "midlayer.mlp.up_proj"),
        ),
        [
            ("layer-quantized", engines, f"calls midlayer.mlp.{part}_proj {name}, which the config leaves out: codes")
            for engines, name in (((SGLANG,), "model.gate_up_proj"), ((V1, V2), "model.layers.12.mlp.gate_up_proj"))
            for part in ("gate", "up")
        ],
    ),
    "numbers that GPTQ's rules leave out by the names of parts": (
        lambda c: (
            c.drafter.update(quantization_config=GPTQ | {"dynamic": {"-:.*fc": {}, r"-:.*\.(q|k|v)_proj": {}}}),
            c.weights.update({f"midlayer.self_attn.{name}_proj.weight": torch.ones(96, 64) for name in "qkv"}),
        ),
        # vLLM lists the layers in codes by the file's header; SGLang knows the merged layer alone.
        [
            ("layer-quantized", (SGLANG,), f"builds midlayer.self_attn.{name}_proj quantized: it calls it model.qkv")
            for name in "kqv"
        ],
    ),
    "a layer in MXFP4 for a method that has experts alone": (
        lambda c: (
            c.drafter.update(quantization_config={"quant_method": "mxfp4", "ignored_layers": ["fc", "model.fc"]}),
            c.weights.update({f"{UP}.weight": torch.zeros(96, 32, dtype=torch.uint8)}),
            c.weights.update({f"{UP}.weight_scale": torch.zeros(96, 2, dtype=torch.uint8)}),
        ),
        [("layer-quantized", (SGLANG, V1, V2), f"has no linear layer for quant_method mxfp4, which {UP} is in")],
    ),
    "numbers that auto-round does not leave out": (
        lambda c: c.drafter.update(quantization_config=AUTO_ROUND),
        [("fc-quantized", (V1, V2), "builds fc quantized, as quantization_config says of it, and fc.weight is BF16")],
    ),
    "codes in a block that vLLM calls otherwise": (
        lambda c: (
            in_gptq(c, groups=6),
            with_integers(c, AUTO_ROUND | {"block_name_to_quantize": "fc"}),
        ),
        [KEPT, ("layer-quantized", (V1, V2), "calls fc model.fc, which is in no block of the config: codes have no")],
    ),
    "numbers that the config says are codes": (
        lambda c: c.drafter.update(quantization_config=HF_FP8),
        [("fc-quantized", (V1, V2), "builds fc quantized, as quantization_config says of it, and fc.weight is BF16")],
    ),
    "numbers in a group of codes": (
        lambda c: c.drafter.update(
            quantization_config={"quant_method": "compressed-tensors", "config_groups": {"0": {"targets": ["Linear"]}}}
        ),
        [("fc-quantized", (V1, V2), "builds fc quantized")],
    ),
    "bitsandbytes": (
        in_bitsandbytes,
        [
            ("engine-format", (V1, V2), "has no quantization method bitsandbytes, and refuses the config"),
            ("load", ALL, "fc.weight is in bitsandbytes, expected numbers or codes in one of ['fp8_tensor',"),
            (
                "fc-quantized",
                (SGLANG,),
                "codes are taken for numbers (sglang#39087); this package's plugin refuses them",
            ),
        ],
    ),
    "bitsandbytes' layers, and an fc in numbers": (
        lambda c: (c.weights.update({f"{UP}.weight": torch.ones(96, 64)}), in_bitsandbytes(c, UP)),
        [("engine-format", (V1, V2), "has no quantization method bitsandbytes")],
    ),
    "torchao": (
        in_torchao,
        [
            ("engine-format", (SGLANG,), "has no quantization method torchao"),
            ("load", ALL, "fc._weight_qdata is in torchao, expected numbers or codes in one of"),
            ("fc-quantized", (SGLANG,), "skips its _weight_qdata: the weight stays what it was made with"),
        ],
    ),
    "EXL3": (
        in_exl3,
        [
            ("engine-format", (SGLANG, V1, V2), "has no quantization method exl3"),
            ("load", ALL, "fc.trellis is in exl3, expected numbers or codes in one of"),
            (
                "fc-quantized",
                (SGLANG,),
                "skips its trellis: the weight stays what it was made with (sglang#39087); this",
            ),
        ],
    ),
    "blocks of int8": (
        lambda c: (
            with_config(c, {"quant_method": "blockwise_int8", "weight_block_size": [128, 128]}),
            renamed(c, "fc.weight_scale", "fc.weight_scale_inv"),
        ),
        [
            ("engine-format", (V1, V2), "has no quantization method blockwise_int8"),
            ("load", ALL, "fc.weight is in blockwise_int8, expected"),
            ("fc-quantized", (SGLANG,), "; this package's plugin refuses them"),
        ],
    ),
    "fbgemm's FP8": (
        lambda c: (
            with_config(c, {"quant_method": "fbgemm_fp8"}),
            c.weights.update({"fc.weight_scale": torch.ones(D, 1)}),
        ),
        [
            ("engine-format", (SGLANG,), "has no quantization method fbgemm_fp8"),
            (
                "engine-format",
                (V1, V2),
                "the method is deprecated, and --allow-deprecated-quantization is for the target alone",
            ),
            IN_NUMBERS,
        ],
    ),
    "a deprecated method that this package does not read": (
        lambda c: c.drafter.update(quantization_config={"quant_method": "fp_quant"}),
        [
            ("engine-format", (SGLANG,), "has no quantization method fp_quant"),
            ("engine-format", (V1, V2), "the method is deprecated"),
        ],
    ),
    "Quark's FP6": (
        lambda c: in_quark(
            c,
            "fp6_e3m2",
            weight=torch.zeros(D, K * H * 3 // 4, dtype=torch.uint8),
            weight_scale=torch.zeros(D, K * H // 32, dtype=torch.uint8),
        ),
        [
            ("engine-format", (SGLANG,), "refuses the config: it has no scheme of Quark for weights in fp6_e3m2"),
            ("load", ALL, "fc.weight is in quark fp6_e3m2, expected"),
            ("fc-quantized", (SGLANG,), "this package's plugin refuses them"),
        ],
    ),
    "a scale beside numbers": (
        lambda c: c.weights.update({"fc.weight_scale": torch.ones(1)}),
        [("load", ALL, "fc.weight is torch.bfloat16, expected codes for fc.weight_scale, because a scale belongs")],
    ),
    "a scale inside fc": (
        lambda c: c.weights.update({"fc.input_quantizer._pre_quant_scale": torch.ones(K * H)}),
        [("load", ALL, "weights has fc.input_quantizer._pre_quant_scale beside fc.weight, expected only")],
    ),
    "LoRA of Mistral's fc": (
        lambda c: (renamed(c, "fc.weight", "eagle_linear.weight"), c.weights.update({f"eagle_linear.{LORA}": ROWS})),
        [("load", ALL, f"weights has eagle_linear.{LORA} beside eagle_linear.weight, expected only")],
    ),
    "a transform of fc": (
        lambda c: with_config(c, of_group("Linear") | {"transform_config": TRANSFORM}),
        [("load", ALL, "fc.weight is of a layer with a transform, expected one without, because"), IN_NUMBERS],
    ),
    "two scales": (
        lambda c: (
            with_config(c, HF_FP8),
            c.weights.update({"fc.weight_scale_inv": torch.ones(1, 2)}),
        ),
        [("load", ALL, "weights has fc.weight_scale and fc.weight_scale_inv, expected one of them"), IN_NUMBERS],
    ),
    "NVFP4 without its second scale": (
        lambda c: (in_nvfp4(c), c.weights.pop("fc.weight_scale_2")),
        [("load", ALL, "expected one of weight_scale_2 and weight_global_scale beside it"), IN_NUMBERS],
    ),
    "NVFP4 with its second scale alone": (
        lambda c: (in_nvfp4(c), c.weights.pop("fc.weight_scale")),
        [("load", ALL, "weights has fc.weight in torch.uint8, expected its scale beside it"), IN_NUMBERS],
    ),
    "GPTQ without its scales": (
        lambda c: (
            c.drafter.update(quantization_config=GPTQ),
            c.weights.update({"fc.qweight": torch.zeros(K * H // 8, D, dtype=torch.int32)}),
            c.weights.pop("fc.weight"),
        ),
        [("load", ALL, "weights has fc.qweight, expected scales beside it"), KEPT],
    ),
    "fc in float64": (
        lambda c: c.weights.update({"fc.weight": torch.ones(D, K * H, dtype=torch.float64)}),
        [("fc", ALL, "fc.weight is F64, expected BF16 or F16 or F32, or codes")],
    ),
    "fc that is a number": (
        lambda c: c.weights.update({"fc.weight": torch.ones(())}),
        [("load", ALL, "fc.weight has shape (), expected (48, 192)")],
    ),
    "fc twice": (
        lambda c: c.weights.update({"model.fc.weight": torch.ones(D, K * H)}),
        [("load", ALL, "expected one of them, because both are fc.weight")],
    ),
    "a head that is a number": (
        lambda c: c.weights.update({"lm_head.weight": torch.ones(())}),
        [("draft-head", ALL, "lm_head.weight is [], expected a matrix")],
    ),
    "a norm of another width": (
        lambda c: c.weights.update({"fc_norm.1.weight": torch.ones(H - 1)}),
        [("norms", ALL, "fc_norm.1.weight is [63] of F32, expected [64] of BF16 or F16 or F32")],
    ),
    "a norm of layer 0 of another width": (
        lambda c: c.weights.update({"midlayer.hidden_norm.weight": torch.ones(H)}),
        [("norms", ALL, "midlayer.hidden_norm.weight is [64] of F32, expected [48]")],
    ),
    "a norm in codes": (
        lambda c: c.weights.update({"fc_norm.1.weight": torch.ones(H).to(FP8)}),
        [("norms", ALL, "fc_norm.1.weight is [64] of F8_E4M3, expected [64] of BF16")],
    ),
    "a width that no tensor has": (
        lambda c: c.drafter.update(hidden_size=10**15),
        [("config", ALL, f"Eagle3Config: K=1 chunks of H={10**15} have {10**15} columns, expected at most 2147479552")],
    ),
    "architectures that are a number": (
        lambda c: c.drafter.update(architectures=5),
        [("config", ALL, "the drafter's architectures is 5, expected a list of names")],
    ),
    "ids beyond the target, in one engine": (
        lambda c: c.drafter.update({"speculators_model_type": "eagle3", "eagle_config": {IDS: [2, 6, 12]}}),
        [
            ("engine-layers", (SGLANG,), "layer_ids is [2, 6, 12], expected boundaries in [0, 12]"),
            ("engine-layers", (V2,), "takes its default: the boundaries [2, 6, 9], and the config means [2, 6, 12]"),
            ("format", (SGLANG,), "does not know the format of speculators"),
        ],
    ),
}

MTP_TRAPS: dict[str, tuple[Callable, list[tuple]]] = {
    "a module inside a norm of MTP": (
        lambda c: c.weights.update({f"{LAYER}.hnorm.norm.weight": torch.ones(2 * H)}),
        [("load", ALL, f"weights has {LAYER}.hnorm.norm.weight, expected a norm to have its weight alone")],
    ),
    "layers of DeepSeek-V4 that its config leaves out": (
        # SGLang reads wo_a itself, and tok_emb is the target's in both engines.
        lambda c: as_deepseek_v4(c, *(f"mtp.0.{name}" for name in ("attn.wo_a", "attn.wo_b", "emb.tok_emb"))),
        [
            ("layer-quantized", (V1, V2), "and that leaves mtp.0.attn.wo_a out: codes have no place there"),
            ("layer-quantized", (SGLANG, V1, V2), "and that leaves mtp.0.attn.wo_b out: codes have no place there"),
        ],
    ),
    "DeepSeek-V4 in NVFP4 that leaves its MTP layer in FP8": (
        lambda c: (
            as_deepseek_v4(c),
            c.target.update(
                quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["mtp*"]}
            ),
        ),
        # Each engine's, and none of what this package reads: no tensor is "fp8_block128, expected nvfp4".
        [
            ("quantized", (SGLANG, V1, V2), "and that leaves e_proj out: codes have no place there without this"),
            ("quantized", (SGLANG, V1, V2), "and that leaves h_proj out: codes have no place there without this"),
            *(
                ("layer-quantized", (V1, V2) if "wo_a" in name else (SGLANG, V1, V2), f"leaves mtp.0.{name} out")
                for name in (
                    *(f"attn.{part}" for part in ("wkv", "wo_a", "wo_b", "wq_a", "wq_b")),
                    *(f"ffn.shared_experts.{part}" for part in ("w1", "w2", "w3")),
                )
            ),
        ],
    ),
    "fc of Qwen 3.5 in NVFP4": (
        lambda c: as_qwen35(c, in_codes=True),
        [
            ("quantized", (SGLANG,), "holds fc in a plain nn.Linear"),
            ("quantized", (V1, V2), "holds fc in a linear layer without a quantization method, skips its scales"),
        ],
    ),
    "captured layers of DeepSeek-V4.1 that have an Engram": (
        lambda c: (
            as_deepseek_v4(c, "mtp.0.main_proj"),
            with_dspark(c),
            c.target.update(model_type="deepseek_v41", architectures=["DeepseekV41ForCausalLM"]),
            c.target.update(engram_layer_ids=[2, 4, 8]),
        ),
        [
            (
                "engine-layers",
                ALL,
                "SGLang captures the layers [4, 8] after the injection of their Engram, vLLM before it",
            )
        ],
    ),
    "layers of DeepSeek-V4's DSpark that its config leaves out": (
        lambda c: (
            as_deepseek_v4(c, "mtp.0.main_proj", "mtp.0.attn.wo_a", "mtp.0.attn.wo_b"),
            with_dspark(c),
        ),
        [
            ("layer-quantized", (V1, V2), "and that leaves mtp.0.attn.wo_a out: codes have no place there"),
            ("layer-quantized", (SGLANG, V1, V2), "and that leaves mtp.0.attn.wo_b out: codes have no place there"),
        ],
    ),
    "a layer of DeepSeek-V4 in numbers that the engines merge with one in codes": (
        lambda c: as_deepseek_v4(c, "mtp.0.attn.wkv", numbers="mtp.0.attn.wkv"),
        [("layer-quantized", ALL, "mtp.0.attn.wkv is in numbers and mtp.0.attn.wq_a in codes")],
    ),
    "MTP in FP8": (
        lambda c: in_blocks(c, f"{LAYER}.eh_proj"),
        [("quantized", (SGLANG, V1, V2), "holds eh_proj in a plain nn.Linear, skips its scales: codes are taken for")],
    ),
    "MTP in FP8 without its scale": (
        lambda c: (in_blocks(c, f"{LAYER}.eh_proj"), c.weights.pop(f"{LAYER}.eh_proj.weight_scale_inv")),
        [
            ("load", ALL, "MTPProjection.load_checkpoint: weights has model.layers.12.eh_proj.weight in torch.float8"),
            ("quantized", (SGLANG, V1, V2), "codes are taken for numbers"),
        ],
    ),
    "MTP whose engines take codes, and numbers": (
        lambda c: (
            c.target.update(model_type="longcat_flash", architectures=["LongcatFlashForCausalLM"]),
            c.target.update(quantization_config=HF_FP8 | {"weight_block_size": [128, 128]}),
        ),
        [("quantized", (SGLANG, V1, V2), "builds eh_proj quantized, as quantization_config says of it")],
    ),
    "MTP that is left out as a part of the model": (
        lambda c: (
            as_qwen35(c, in_codes=False),
            c.target.update(quantization_config=HF_FP8 | {"modules_to_not_convert": ["lm_head", "mtp"]}),
        ),
        [("quantized", (V1, V2), "builds mtp.fc quantized: it takes the entry that leaves it out for a layer")],
    ),
    "LongCat's MTP that is left out by another name than the engines'": (
        lambda c: (
            c.target.update(model_type="longcat_flash", architectures=["LongcatFlashForCausalLM"]),
            c.target.update(quantization_config=HF_FP8 | {"ignored_layers": [f"{LAYER}.eh_proj"]}),
        ),
        [
            ("quantized", engines, f"builds {LAYER}.eh_proj quantized: it calls it eh_proj, which quantization_config")
            for engines in ((SGLANG,), (V1, V2))
        ],
    ),
    "MTP in Quark's formats": (
        lambda c: (
            in_blocks(c, f"{LAYER}.eh_proj"),
            c.target.update(quantization_config={"quant_method": "quark", "export": {}}),
        ),
        [("quantized", (V1, V2), "codes are taken for numbers")],
    ),
    **{
        f"{title}'s eh_proj that Quark excludes by {entry}": (
            lambda c, architecture=architecture, entry=entry: excluded(c, architecture, entry),
            [("quantized", (SGLANG,), f"builds {LAYER61}.eh_proj quantized: it calls it model.eh_proj, which")]
            if "eh_proj" in entry or entry.startswith("re:")
            else [("quantized", (SGLANG,), "builds eh_proj quantized, as quantization_config says of it")],
        )
        for title, architecture, entry in (
            ("DeepSeek", "DeepseekV3ForCausalLM", f"{LAYER61}.eh_proj"),
            ("GLM-5", "GlmMoeDsaForCausalLM", LAYER61),
            ("GLM-5", "GlmMoeDsaForCausalLM", f"re:{LAYER61}.*"),
        )
    },
    **{
        f"a layer of {title} that fp8 leaves out by the file's name": (
            lambda c, architecture=architecture, kind=kind: (
                of_family(c, architecture, kind),
                c.weights.update({f"{LAYER}.{OUT}.weight": torch.ones(96, 64)}),
                c.target.update(quantization_config=HF_FP8 | {"modules_to_not_convert": [f"{LAYER}.{OUT}", "eh_proj"]}),
            ),
            [("layer-quantized", (SGLANG,), f"builds {LAYER}.{OUT} quantized: it calls it model.decoder.{OUT}, which")],
        )
        for title, architecture, kind in (
            ("GLM-4.5", "Glm4MoeForCausalLM", "glm4_moe"),
            ("DeepSeek behind 12 layers", "DeepseekV3ForCausalLM", "deepseek_v3"),
        )
    },
    **{
        f"a layer of {title} that {method} leaves out by the file's name": (
            lambda c, title=title, config=config, key=key, its=its: of_nextn(
                c, title, config | {key: [f"{its.layer}.{OUT}", its.names[2], its.stage.format(its.names[2])]}
            ),
            [
                *([] if its.in_vllm else [("unserved", (V1, V2), "has no drafter for")]),
                (
                    "layer-quantized",
                    (SGLANG,),
                    f"builds {its.layer}.{OUT} quantized: it calls it {its.own}{OUT}, which quantization_config does",
                ),
            ],
        )
        for title, its in NEXTN.items()
        for method, config, key in (
            ("fp8", HF_FP8, "modules_to_not_convert"),
            ("compressed-tensors", of_group("Linear"), "ignore"),
        )
        if (title, method) != ("HunYuan V4", "fp8")  # whose class renames the entries of that list
    },
    "q, k and v of a class without packed_modules_mapping, in numbers": (
        lambda c: with_qkv_of(c, "EXAONE-MoE"),
        [
            (
                "layer-quantized",
                (SGLANG,),
                f"builds mtp.layers.0.self_attn.{name}_proj quantized: it calls it model.layers.0.self_attn.qkv_proj,",
            )
            for name in "kqv"
        ],
    ),
    "GLM-5's latent attention that fp8 leaves out by the file's names": (
        lambda c: (
            of_family(c, "GlmMoeDsaForCausalLM", "glm_moe_dsa"),
            c.weights.update({f"{LAYER}.self_attn.q_a_proj.weight": torch.ones(96, 64)}),
            c.target.update(quantization_config=HF_FP8 | {"ignored_layers": [f"{LAYER}.self_attn", "eh_proj"]}),
        ),
        [("layer-quantized", (SGLANG,), "calls it model.decoder.self_attn.fused_qkv_a_proj_with_mqa, which quantizat")],
    ),
    "layers of DeepSeek's MTP in codes, which SGLang leaves out with their parent": (
        lambda c: (
            excluded(c, "DeepseekV3ForCausalLM", LAYER61),
            c.weights.update({f"{LAYER61}.mlp.up_proj.weight": torch.ones(96, 64).to(FP8)}),
            c.weights.update({f"{LAYER61}.mlp.up_proj.weight_scale": torch.ones(96, 1)}),
        ),
        [
            (
                "layer-quantized",
                (SGLANG,),
                f"holds {LAYER61}.mlp.up_proj in a linear layer without a quantization method",
            )
        ],
    ),
    "Qwen 3.5 whose config leaves out another part of MTP, with a layer in numbers that SGLang expects in codes": (
        # One rule of mtp's is enough for vLLM to build all layers in numbers, whatever it names.
        lambda c: (
            as_qwen35(c, in_codes=False),
            c.weights.update({f"mtp.layers.0.{OUT}.weight": torch.ones(96, 64)}),
            c.target.update(quantization_config=GPTQ | {"dynamic": {"-:.*mtp.*mlp": {}, "-:.*fc": {}}}),
        ),
        [("layer-quantized", (SGLANG,), f"builds mtp.layers.0.{OUT} quantized, as quantization_config says of it")],
    ),
    "Qwen 3.5 whose config has a rule for MTP that leaves nothing out, with a layer in numbers": (
        lambda c: (
            as_qwen35(c, in_codes=False),
            c.weights.update({f"mtp.layers.0.{OUT}.weight": torch.ones(96, 64)}),
            c.target.update(quantization_config=GPTQ | {"dynamic": {"+:.*mtp.*": {"bits": 4}, "-:.*fc": {}}}),
        ),
        [("layer-quantized", (SGLANG, V1, V2), f"builds mtp.layers.0.{OUT} quantized, as quantization_config says of")],
    ),
    "Qwen 3.5 with a layer in codes whose config leaves out another part of MTP": (
        lambda c: (
            as_qwen35(c, in_codes=False),
            c.weights.update({f"mtp.layers.0.{OUT}.qweight": torch.zeros(8, 96, dtype=torch.int32)}),
            c.weights.update({f"mtp.layers.0.{OUT}.scales": torch.ones(2, 96).half()}),
            c.weights.update({f"mtp.layers.0.{OUT}.qzeros": middle_zeros(2, 96)}),
            c.target.update(quantization_config=GPTQ | {"dynamic": {"-:.*mtp.*mlp": {}, "-:.*fc": {}}}),
        ),
        [("layer-quantized", (V1, V2), f"holds mtp.layers.0.{OUT} in a linear layer without a quantization method")],
    ),
    "GLM-4.5's experts in numbers, which the config leaves out by SGLang's name of all of them": (
        lambda c: (
            of_family(c, "Glm4MoeForCausalLM", "glm4_moe"),
            c.weights.update(
                {f"{EXPERTS}.0.{name}_proj.weight": torch.ones(96, 64) for name in ("down", "gate", "up")}
            ),
            c.target.update(quantization_config=HF_FP8 | {"ignored_layers": ["model.decoder.mlp.experts", "eh_proj"]}),
        ),
        [
            (
                "layer-quantized",
                (V1, V2),
                f"builds {EXPERTS}.0.{name}_proj quantized, as quantization_config says of it",
            )
            for name in ("down", "gate", "up")
        ],
    ),
    "a layer of Step-3.5's MTP in FP8, which SGLang builds in numbers": (
        lambda c: (
            of_family(c, "Step3p5ForCausalLM", "step3p5"),
            c.target.update(quantization_config=HF_FP8 | {"modules_to_not_convert": ["eh_proj"]}),
            c.weights.update({f"{LAYER}.{OUT}.weight": torch.ones(96, 64).to(FP8)}),
            c.weights.update({f"{LAYER}.{OUT}.weight_scale": torch.ones(())}),
        ),
        [("layer-quantized", (SGLANG,), f"holds {LAYER}.{OUT} in a linear layer without a quantization method")],
    ),
    "a layer of Inkling's MTP in FP8, which SGLang builds in numbers": (
        lambda c: (
            of_family(c, "InklingForConditionalGeneration", "inkling_text"),
            renamed(c, f"{LAYER}.enorm.weight", "mtp.layers.0.embed_norm.weight"),
            renamed(c, f"{LAYER}.hnorm.weight", "mtp.layers.0.hidden_norm.weight"),
            renamed(c, f"{LAYER}.eh_proj.weight", "mtp.layers.0.input_proj.weight"),
            c.target.update(quantization_config=HF_FP8 | {"ignored_layers": ["mtp.layers.0.input_proj"]}),
            c.weights.update({f"mtp.layers.0.{OUT}.weight": torch.ones(96, 64).to(FP8)}),
            c.weights.update({f"mtp.layers.0.{OUT}.weight_scale": torch.ones(())}),
        ),
        [("layer-quantized", (SGLANG,), f"holds mtp.layers.0.{OUT} in a linear layer without a quantization method")],
    ),
    "a layer of Qwen 3.5 in Quark's FP8, which SGLang builds in numbers as it does experts": (
        lambda c: (
            as_qwen35(c, in_codes=False),
            c.weights.update({f"mtp.layers.0.{OUT}.weight": torch.ones(96, 64).to(FP8)}),
            c.weights.update({f"mtp.layers.0.{OUT}.weight_scale": torch.ones(96, 1)}),
            c.target.update(quantization_config=QUARK | {"exclude": ["mtp.fc", "mtp.layers.0.mlp.experts"]}),
        ),
        [("layer-quantized", (SGLANG,), f"holds mtp.layers.0.{OUT} in a linear layer without a quantization method")],
    ),
    "MTP in bitsandbytes": (
        lambda c: in_bitsandbytes(c, f"{LAYER}.eh_proj"),
        [
            ("engine-format", (V1, V2), "has no quantization method bitsandbytes"),
            ("load", ALL, f"{LAYER}.eh_proj.weight is in bitsandbytes, expected"),
            ("quantized", (SGLANG, V1, V2), "; this package's plugin refuses them"),
        ],
    ),
    "MTP in EXL3": (
        lambda c: in_exl3(c, f"{LAYER}.eh_proj"),
        [
            ("engine-format", (SGLANG, V1, V2), "has no quantization method exl3"),
            ("load", ALL, f"{LAYER}.eh_proj.trellis is in exl3, expected"),
            ("quantized", (SGLANG, V1, V2), "holds eh_proj in a plain nn.Linear, skips its trellis"),
        ],
    ),
    "MTP that one engine serves": (
        lambda c: c.target.update(model_type="pangu_ultra_moe", architectures=["PanguUltraMoEForCausalLM"]),
        [("unserved", (SGLANG,), "has no drafter for openPangu Ultra MoE")],
    ),
    "MTP without a norm": (
        lambda c: c.weights.pop(f"{LAYER}.enorm.weight"),
        [("load", ALL, "MTPProjection.load_checkpoint: weights has no enorm.weight")],
    ),
    "MTP with LoRA": (
        lambda c: c.weights.update({f"{LAYER}.eh_proj.{LORA}": ROWS}),
        [("load", ALL, f"weights has {LAYER}.eh_proj.{LORA} beside {LAYER}.eh_proj.weight, expected only")],
    ),
    "MTP of another width": (
        lambda c: c.weights.update({f"{LAYER}.eh_proj.weight": torch.ones(H, H)}),
        [("load", ALL, "model.layers.12.eh_proj.weight has shape (64, 64), expected (128, 256)")],
    ),
    "MTP of another target": (
        lambda c: setattr(c, "target", c.target | {"hidden_size": H}),
        [("hidden-size", ALL, "the target's hidden_size is 64, and the drafter's target_hidden_size 128")],
    ),
    "MTP without a layer": (
        lambda c: c.weights.pop(f"{LAYER}.eh_proj.weight"),
        [("load", ALL, "the drafter's files have no eh_proj, the stage of DeepSeek V3, R1")],
    ),
    "MTP without a width": (
        lambda c: setattr(c, "drafter", {k: v for k, v in c.target.items() if k != "hidden_size"}),
        [("config", ALL, "MTPConfig.from_hf: hidden_size is missing")],
    ),
    "MTP with the bias of one engine": (
        lambda c: (
            c.target.update(model_type="ernie4_5_moe", architectures=["Ernie4_5_MoeForCausalLM"], use_bias=True),
            renamed(c, f"{LAYER}.enorm.weight", "model.mtp_emb_norm.0.weight"),
            renamed(c, f"{LAYER}.hnorm.weight", "model.mtp_hidden_norm.0.weight"),
            renamed(c, f"{LAYER}.eh_proj.weight", "model.mtp_linear_proj.0.weight"),
        ),
        [("load", (SGLANG,), "weights has no eh_proj.bias")],
    ),
}

EAGLE_TRAPS: dict[str, tuple[Callable, list[tuple]]] = {
    "EAGLE-1 under the name of its target": (
        lambda c: c.drafter.update(architectures=["MistralForCausalLM"]),
        [("unserved", (SGLANG,), "has no MistralForCausalLM")],
    ),
    "EAGLE-1 under its name in SGLang": (
        lambda c: c.drafter.update(architectures=["MistralForCausalLMEagle"]),
        [("unserved", (V1, V2), "has no EagleMistralForCausalLMEagle")],
    ),
    "a module inside a norm that the config does not have": (
        lambda c: c.weights.update({"hnorm.norm.weight": torch.ones(H)}),
        [("load", ALL, "weights has hnorm.norm.weight, expected a norm to have its weight alone")],
    ),
    "Mistral's EAGLE without a config of its codes": (
        lambda c: c.drafter.pop("quantization_config"),
        [
            (
                "quantized",
                (SGLANG, V1, V2),
                "quantizes eagle_linear as the drafter's quantization_config says, and there",
            )
        ],
    ),
    "Mistral's EAGLE without its scale": (
        lambda c: c.weights.pop("eagle_linear.qscale_weight"),
        [("load", ALL, "weights has eagle_linear.weight in torch.float8_e4m3fn, expected its scale beside it")],
    ),
}

GEMMA_TRAPS: dict[str, tuple[Callable, list[tuple]]] = {
    "a Gemma assistant whose projection is left out by another name than vLLM's": (
        lambda c: with_gemma_layers(c, GEMMA_DOWN, ignore="pre_projection"),
        [("quantized", (V1, V2), "builds pre_projection quantized: it calls it draft_model.pre_projection, which")],
    ),
    "a layer of a Gemma assistant without its scale": (
        lambda c: (with_gemma_layers(c, GEMMA_DOWN), c.weights.pop(f"{GEMMA_DOWN}.weight_scale")),
        [("load", ALL, f"weights has {GEMMA_DOWN}.weight_packed, expected weight_scale beside it")],
    ),
    "layers of a Gemma assistant that engines hold in numbers": (
        lambda c: with_gemma_layers(c, "masked_embedding.centroids", "model.embed_tokens"),
        [
            ("layer-quantized", (SGLANG, V1, V2), "holds masked_embedding.centroids in a plain nn.Linear, skips its"),
            ("layer-quantized", (SGLANG, V1, V2), "holds model.embed_tokens in an embedding without a quantization"),
        ],
    ),
    "a norm of a Gemma assistant in FP8": (
        lambda c: c.weights.update({"model.norm.weight": torch.ones(D).to(FP8)}),
        [
            ("load", ALL, "model.norm.weight is [48] of F8_E4M3, expected numbers"),
            ("layer-quantized", (SGLANG, V1, V2), "holds model.norm in a norm, skips its scales"),
        ],
    ),
}

CONTEXT_TRAPS: dict[str, tuple[Callable, list[tuple]]] = {
    "a Markov head of Gemma 4's DSpark in FP8 that Model-Optimizer lists": (
        lambda c: (
            c.drafter.update(architectures=["Gemma4DSparkModel"], attention_k_eq_v=True),
            c.weights.update({"markov_head.markov_w2.weight": torch.ones(32, 64).to(FP8)}),
            c.weights.update({"markov_head.markov_w2.weight_scale": torch.ones(())}),
            c.drafter.update(quantization_config=mixed("markov_head.markov_w2")),
        ),
        [
            ("unserved", (SGLANG,), "has no Gemma4DSparkModel"),
            ("layer-quantized", (SGLANG,), "holds markov_head.markov_w2 in a plain nn.Linear"),
            ("layer-quantized", (V1, V2), "holds markov_head.markov_w2 in a ParallelLMHead without a quantization met"),
        ],
    ),
    "DFlash of Laguna with one weight for q, k and v in FP8": (
        lambda c: (
            as_laguna(c),
            c.drafter.update(quantization_config=HF_FP8 | {"modules_to_not_convert": ["fc", "o_proj"]}),
            [
                c.weights.update({f"{path}.weight": torch.ones(128, H).to(FP8), f"{path}.weight_scale": torch.ones(1)})
                for path in (f"layers.{layer}.self_attn.qkv_proj" for layer in range(2))
            ],
        ),
        [("kv-quantized", (V1, V2), "cuts K and V out of the codes of qkv_proj as if they were numbers (vllm#51581)")],
    ),
    "DFlash of Laguna with a qkv_proj of too few rows": (
        lambda c: (as_laguna(c), c.weights.update({"layers.1.self_attn.qkv_proj.weight": torch.ones(96, H)})),
        [("load", ALL, "layers.1.self_attn.qkv_proj.weight[64:80] has 16 rows, expected 2 heads of 16 rows for each")],
    ),
    "DFlash of Laguna with q, k and v apart": (
        as_laguna_in_parts,
        [("load", (V1, V2), "has no parameter for layers.0.self_attn.k_proj, and fails: of a layer it has qkv_proj")],
    ),
    "DFlash of Laguna with gate and up in one weight": (
        lambda c: (as_laguna(c), c.weights.update({"layers.1.mlp.gate_up_proj.weight": torch.ones(192, H)})),
        [("load", (V1, V2), "has no parameter for layers.1.mlp.gate_up_proj, and fails: of a layer it has qkv_proj")],
    ),
    "DFlash of Laguna with model. in front of its names": (
        lambda c: (as_laguna(c), setattr(c, "weights", {f"model.{name}": c.weights[name] for name in c.weights})),
        [("load", (V1, V2), "has no parameter for model.aux_hidden_norms.0, and fails")],
    ),
    "DFlash whose gains are 1 + w": (
        lambda c: c.drafter.update(use_gemma_norm=True),
        [("norms", (V1, V2), "norms with the gain w: it does not read use_gemma_norm")],
    ),
    "DFlash of Laguna whose gains are 1 + w": (
        lambda c: (as_laguna(c), c.drafter.update(use_gemma_norm=True)),
        [("config", ALL, "use_gemma_norm is True, expected False, because SGLang adds 1 to every gain but the aux_no")],
    ),
    "DFlash with RoPE by the type of a layer": (
        lambda c: c.drafter.update(rope_parameters=BY_LAYER_TYPE),
        [("rope", (SGLANG, V1, V2), "has one RoPE for all layers, and fails: rope_parameters have one for each type")],
    ),
    "DFlash of Laguna with RoPE by the type of a layer": (
        lambda c: (as_laguna(c), c.drafter.update(rope_parameters=BY_LAYER_TYPE)),
        [
            (
                "rope",
                (SGLANG,),
                "has one RoPE for all layers, and fails: rope_parameters have one for each type of layer",
            )
        ],
    ),
    "DFlash of Laguna without rope_parameters": (
        lambda c: (as_laguna(c), c.drafter.pop("rope_parameters"), c.drafter.update(rope_theta=5e5)),
        [
            (
                "rope",
                ALL,
                "for full_attention SGLang takes theta 500000.0 and a factor of 1.0, vLLM transformers' 500000.0 and 0",
            )
        ],
    ),
    "DFlash of Laguna with RoPE of its own for sliding attention": (
        lambda c: (
            as_laguna(c),
            c.drafter.update(layer_types=[SLIDING] * 2, swa_rope_parameters={"partial_rotary_factor": 0.5}),
        ),
        [("rope", ALL, "SGLang rotates 16 of 16 columns of K's heads, vLLM 8: it alone reads swa_rope_parameters and")],
    ),
    "DFlash of Laguna that rotates a part of each head, by vLLM's field": (
        lambda c: (as_laguna(c), c.drafter["rope_parameters"].update(partial_rotary_factor=0.5)),
        [("rope", ALL, "SGLang rotates 16 of 16 columns of K's heads, vLLM 8: it alone reads swa_rope_parameters and")],
    ),
    "DFlash whose keys rotate in pairs, by SGLang's field": (
        lambda c: c.drafter.update(rope_is_neox_style=False),
        [("rope", (V1, V2), "rotates halves of K's heads: it reads is_neox_style alone, and the config has rope_is")],
    ),
    "DFlash that rotates a part of each head, by vLLM's field": (
        lambda c: c.drafter.update(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        [
            (
                "rope",
                ALL,
                "SGLang rotates 16 of 16 columns of K's heads, vLLM 8: it alone reads partial_rotary_factor in",
            )
        ],
    ),
    "DFlash that rotates another part of each head by vLLM's field": (
        lambda c: c.drafter.update(partial_rotary_factor=0.25, rope_parameters={"partial_rotary_factor": 0.5}),
        [("rope", ALL, "SGLang rotates 4 of 16 columns of K's heads, vLLM 8: it alone reads partial_rotary_fac")],
    ),
    "DFlash whose second field for RoPE's style is no flag": (
        lambda c: c.drafter.update(rope_is_neox_style=True, is_neox_style="no"),
        [("config", (V1, V2), "ContextKVConfig.from_hf: is_neox_style is 'no', expected")],
    ),
    "DFlash whose keys rotate in halves, by SGLang's field": (
        lambda c: c.drafter.update(rope_is_neox_style=True, is_neox_style=False),
        [("rope", (V1, V2), "rotates pairs of K's heads: it reads is_neox_style alone, and the config has rope_is_")],
    ),
    "DFlash2 Beam whose keys rotate in pairs": (
        lambda c: c.drafter.update(architectures=["DFlash2BeamDraftModel"], is_neox_style=False),
        [("rope", (V1, V2), "rotates halves of K's heads: it reads no field for it, and the config has is_neox_style")],
    ),
    "DFlash of Muse Glimmer": (
        lambda c: c.target.update(model_type="muse_glimmer"),
        [("layers", ALL, "those of Muse Glimmer depend on the drafter")],
    ),
    "DFlash in W4A16": (
        lambda c: as_w4a16(c, *CONTEXT_LAYERS),
        [
            (
                "fc-quantized",
                (SGLANG,),
                "holds fc in a plain nn.Linear, skips its weight_packed: the weight stays what it",
            ),
        ],
    ),
    "DFlash2 Beam in W4A16": (
        lambda c: (
            c.drafter.update(architectures=["DFlash2BeamDraftModel"]),
            as_w4a16(c, *CONTEXT_LAYERS),
        ),
        [
            ("fc-quantized", (SGLANG,), "holds fc in a plain nn.Linear"),
            ("fc-quantized", (V1, V2), "holds fc in a linear layer without a quantization method"),
            ("kv-quantized", (V1, V2), "holds k_proj in a linear layer without a quantization method"),
            ("kv-quantized", (V1, V2), "holds v_proj in a linear layer without a quantization method"),
        ],
    ),
    "DFlash with keys in no group": (
        lambda c: (
            as_w4a16(c, *CONTEXT_LAYERS),
            c.drafter["quantization_config"]["config_groups"]["group_0"].update(targets=["re:.*v_proj", "re:.*fc"]),
        ),
        [
            ("fc-quantized", (SGLANG,), "holds fc in a plain nn.Linear"),
            ("kv-quantized", (SGLANG, V1, V2), "and none of its config_groups has k_proj: codes have no place there"),
        ],
    ),
    "DFlash with packed keys of one layer": (
        lambda c: (
            as_w4a16(c, "layers.1.self_attn.k_proj"),
            c.drafter["quantization_config"].update(ignore=["re:.*fc", "re:.*v_proj"]),
        ),
        [
            (
                "kv-quantized",
                (SGLANG, V1, V2),
                "builds k_proj quantized, as quantization_config says of it, and layers.0",
            ),
            (
                "layer-quantized",
                ALL,
                "layers.1.self_attn.v_proj is in numbers and layers.1.self_attn.k_proj in codes: engines merge them",
            ),
            # The pattern of v_proj matches the end of qkv_proj.
            (
                "layer-quantized",
                (V1, V2),
                "calls layers.1.self_attn.k_proj model.layers.13.self_attn.qkv_proj, which the config leaves out",
            ),
        ],
    ),
    "DFlash in W4A16 of another shape": (
        lambda c: (as_w4a16(c, "fc"), c.weights.update({"fc.weight_shape": torch.tensor([H, H])})),
        [
            ("load", ALL, "fc.weight_shape is [64, 64], expected [64, 192]"),
            ("fc-quantized", (SGLANG,), ""),
            ("kv-quantized", (SGLANG, V1, V2), "builds k_proj quantized"),
            ("kv-quantized", (SGLANG, V1, V2), "builds v_proj quantized"),
        ],
    ),
    "DFlash with LoRA": (
        lambda c: c.weights.update({f"layers.1.self_attn.k_proj.{LORA}": ROWS}),
        [("load", ALL, f"weights has layers.1.self_attn.k_proj.{LORA} beside layers.1.self_attn.k_proj.weight")],
    ),
    "DFlash in W4A16 without a scale": (
        lambda c: (as_w4a16(c, *CONTEXT_LAYERS), c.weights.pop("layers.1.self_attn.k_proj.weight_scale")),
        [
            ("load", ALL, "weights has layers.1.self_attn.k_proj.weight_packed, expected weight_scale beside it"),
            ("fc-quantized", (SGLANG,), ""),
        ],
    ),
    "Laguna's DFlash with packed keys": (
        lambda c: (
            c.drafter.update(architectures=["DFlashLagunaForCausalLM"]),
            c.weights.update({f"aux_hidden_norms.{k}.weight": torch.ones(H) for k in range(K)}),
            c.weights.update({f"layers.{layer}.input_layernorm.weight": torch.ones(H) for layer in range(2)}),
            as_w4a16(c, *CONTEXT_LAYERS),
        ),
        [
            ("load", (V1, V2), "has no parameter for layers.0.self_attn.k_proj, and fails"),
            ("fc-quantized", (SGLANG,), ""),
            (
                "kv-quantized",
                (V1, V2),
                "cuts K and V out of the codes of qkv_proj as if they were numbers (vllm#51581)",
            ),
        ],
    ),
    "DFlash in bitsandbytes": (
        lambda c: [in_bitsandbytes(c, path) for path in CONTEXT_LAYERS],
        [
            ("engine-format", (V1, V2), "has no quantization method bitsandbytes"),
            ("load", ALL, "is in bitsandbytes, expected"),
            ("fc-quantized", (SGLANG,), "; this package's plugin refuses them"),
        ],
    ),
    "DFlash in torchao": (
        lambda c: [in_torchao(c, path) for path in CONTEXT_LAYERS],
        [
            ("engine-format", (SGLANG,), "has no quantization method torchao"),
            ("load", ALL, "is in torchao, expected"),
            ("fc-quantized", (SGLANG,), "; this package's plugin refuses them"),
        ],
    ),
    "DFlash without ids": (
        lambda c: (c.drafter.pop("dflash_config"), c.drafter.update(num_hidden_layers=2)),
        [
            ("layers", ALL, "the config has no target_layer_ids: SGLang spreads them over the target, vLLM takes as"),
            ("load", ALL, "fc.weight has shape (64, 192), expected (64, 128)"),
        ],
    ),
    "DFlash with ids in two places": (
        lambda c: c.drafter.update(target_layer_ids=[1, 4, 9]),
        [("layers", ALL, "target_layer_ids is [1, 4, 9], and dflash_config.target_layer_ids [1, 4, 8]")],
    ),
    "DFlash with ids at the top alone": (
        lambda c: (c.drafter.pop("dflash_config"), c.drafter.update(target_layer_ids=[1, 4, 8])),
        [("engine-layers", (V1,), "reads target_layer_ids in dflash_config alone, and captures the layers that its")],
    ),
    "DFlash with boundaries for vLLM that mean other layers": (
        lambda c: c.drafter.update({IDS: [1, 4, 8]}),
        [("engine-layers", (V1, V2), "captures the boundaries [1, 4, 8], as eagle_aux_hidden_state_layer_ids says")],
    ),
    "DFlash of another width than its target's, which it states": (
        # As its fc has it, which SGLang builds for states of the drafter's width.
        lambda c: (
            c.target.update(hidden_size=D),
            c.drafter.update(target_hidden_size=D),
            c.weights.update({"fc.weight": torch.ones(H, K * D)}),
        ),
        [("hidden-size", (SGLANG,), "builds fc for states as wide as 64, and the target's hidden_size is 48")],
    ),
    "DFlash with ids beyond the target": (
        lambda c: c.drafter.update(dflash_config={"target_layer_ids": [1, 4, 12]}),
        [("layers", ALL, "layer_ids is [1, 4, 12], expected boundaries in [0, 12]")],
    ),
    "DFlash with ids that are a number": (
        lambda c: c.drafter.update(dflash_config={"target_layer_ids": 3}),
        [
            ("layers", ALL, "capture_layers: layer_ids is a int, expected a list of ints"),
            ("config", ALL, "ContextKVConfig.from_hf: target_layer_ids is a int, expected a list of layers"),
        ],
    ),
    "DFlash of a deeper target": (
        lambda c: c.drafter.update(num_target_layers=36),
        [("layers", ALL, "the target has 12 layers, and the drafter's num_target_layers is 36")],
    ),
    "target layers of dflash_config": (
        lambda c: c.drafter["dflash_config"].update(num_target_layers=36),
        [("layers", ALL, "the target has 12 layers, and the drafter's num_target_layers is 36")],
    ),
    **{
        f"speculators' {kind}": (
            lambda c, kind=kind: of_speculators(c, kind),
            [("format", (SGLANG,), "does not know the format of speculators")],
        )
        for kind in ("dflash", "dflash2", "dspark")
    },
    "speculators' DSpark of Qwen3-Omni": (
        lambda c: of_speculators(c, "dspark", architectures=["Qwen3OmniDSparkModel"]),
        [
            ("format", (SGLANG,), "does not know the format of speculators"),
            ("unserved", (SGLANG,), "has no Qwen3OmniDSparkModel"),
        ],
    ),
    "speculators' DFlash without its captured layers": (
        lambda c: of_speculators(c, "dflash", aux_hidden_state_layer_ids=None),
        [
            ("format", (SGLANG,), "does not know the format of speculators"),
            ("config", ALL, "aux_hidden_state_layer_ids is missing, expected the captured boundaries"),
        ],
    ),
    "MiniMax-M3.1's DSpark": (as_minimax_m31, [("unserved", (V1, V2), "has no DSparkMiniMaxDraftModel")]),
    "MiniMax-M3.1's DSpark without a layer's values": (
        lambda c: (
            as_minimax_m31(c),
            c.weights.pop("language_model.model.dspark.layers.1.decoder_layer.self_attn.v_proj.weight"),
        ),
        [
            ("unserved", (V1, V2), "has no DSparkMiniMaxDraftModel"),
            ("load", ALL, "weights has no self_attn.v_proj.weight, expected k and v of every layer, and their norms"),
        ],
    ),
    # That it has as many captured layers as num_target_layers was reported.
    "Kimi K3's DSpark": (as_kimi_k3, [("unserved", (SGLANG,), "has no K3DSparkModel")]),
    "Kimi K3's DSpark with the target's layers": (
        lambda c: (as_kimi_k3(c), c.drafter.update(num_target_layers=N)),
        [
            ("unserved", (SGLANG,), "has no K3DSparkModel"),
            ("layers", (V1, V2), "refuses the config: num_target_layers is 12, and target_layer_ids has 3 entries"),
        ],
    ),
    "Kimi K3's DSpark with layers where vLLM does not look": (
        lambda c: (
            as_kimi_k3(c),
            c.drafter.update(dflash_config={"target_layer_ids": c.drafter.pop("target_layer_ids")}),
        ),
        [
            ("unserved", (SGLANG,), "has no K3DSparkModel"),
            ("layers", (V1, V2), "refuses the config: num_target_layers is 3, and target_layer_ids has 0 entries"),
        ],
    ),
    "DFlash of a target of another width": (
        lambda c: c.target.update(hidden_size=2 * H),
        [
            (
                "hidden-size",
                (SGLANG, V1, V2),
                "builds fc for states as wide as 64, and the target's hidden_size is 128",
            ),
            ("load", ALL, "fc.weight has shape (64, 192), expected (64, 384), because it is (H, K*Ht) with K = 3"),
        ],
    ),
    "DFlash of a target without a width": (
        lambda c: c.target.pop("hidden_size"),
        [("hidden-size", ALL, "the target's config has no hidden_size: got None")],
    ),
    "DFlash with keys that are a number": (
        lambda c: c.weights.update({"layers.0.self_attn.k_proj.weight": torch.ones(())}),
        [("load", ALL, "layers.0.self_attn.k_proj.weight has shape (), expected (n*d, H)")],
    ),
    "DFlash of another vocabulary": (
        lambda c: c.drafter.update(vocab_size=V + 8),
        [("vocabulary", ALL, "the target has 1000 token ids, and the drafter's table 1008 rows")],
    ),
    "DFlash with a norm of another width": (
        lambda c: c.weights.update({"hidden_norm.weight": torch.ones(D)}),
        [("load", ALL, "hidden_norm.weight has shape (48,), expected (64,)")],
    ),
    "DFlash in ModelOpt's FP8 that leaves out keys and values by their own names": (
        lambda c: c.drafter.update(
            quantization_config=MODELOPT_FP8 | {"ignore": ["fc", *(each for each in CONTEXT_LAYERS if "self" in each)]}
        ),
        [
            ("layer-quantized", engines, f"builds layers.*.self_attn.{part}_proj quantized: it calls it {name}qkv_proj")
            for engines, name in (((SGLANG,), ""), ((V1, V2), "layers.*.self_attn."))
            for part in "kv"
        ],
    ),
    "DSpark of Muse Spark whose layers vLLM numbers": (
        lambda c: (
            c.drafter.update(architectures=["MuseSparkDSparkModel"]),
            c.weights.update({f"layers.{layer}.input_layernorm.weight": torch.ones(H) for layer in "01"}),
            c.drafter.update(quantization_config=MODELOPT_FP8 | {"ignore": ["fc", "layers.0*", "layers.1.self*"]}),
        ),
        [
            ("unserved", (SGLANG,), "has no MuseSparkDSparkModel"),
            *(
                ("layer-quantized", (V1, V2), f"builds layers.*.self_attn.{part}_proj quantized: it calls it model.lay")
                for part in "kv"
            ),
        ],
    ),
    "DSpark that one engine serves": (
        lambda c: (in_a_thinker(c), c.drafter.update(architectures=["Qwen3OmniDSparkModel"])),
        [("unserved", (SGLANG,), "has no Qwen3OmniDSparkModel")],
    ),
}

# The same for EAGLE-3 drafters with one layer in FP8 blocks.
LAYER_TRAPS: dict[str, tuple[Callable, list[tuple]]] = {
    "a layer without a scale": (
        lambda c: c.weights.pop(f"{UP}.weight_scale_inv"),
        [("load", ALL, f"weights has {UP}.weight in torch.float8_e4m3fn, expected its scale beside it")],
    ),
    "a layer with LoRA": (
        lambda c: c.weights.update({f"{UP}.{LORA}": ROWS}),
        [("load", ALL, f"weights has {UP}.{LORA} beside {UP}.weight, expected only")],
    ),
    "a layer with a scale of another shape": (
        lambda c: c.weights.update({f"{UP}.weight_scale_inv": torch.ones(3, 1)}),
        [("load", ALL, f"{UP}.weight_scale_inv is torch.float32 of shape (3, 1), expected")],
    ),
    "a layer in no format": (
        lambda c: c.weights.update({f"{UP}.weight": torch.ones(130, 64, dtype=torch.int64)}),
        [("load", ALL, f"{UP}.weight is torch.int64, expected codes in torch.float8_e4m3fn, torch.int8 or torch")],
    ),
    "a layer of another format": (
        lambda c: c.weights.update({f"{UP}.weight_scale_inv": torch.ones(130, 1)}),
        [("load", ALL, f"{UP}.weight is fp8_row, expected fp8_block128, because the checkpoint says weight_block")],
    ),
    "a layer that is a number": (
        lambda c: c.weights.update({f"{UP}.weight": torch.ones(()).to(FP8)}),
        [("load", ALL, f"{UP}.weight is [] of F8_E4M3, expected a matrix")],
    ),
    "a layer that the config leaves out": (
        lambda c: c.drafter["quantization_config"]["modules_to_not_convert"].append("up_proj"),
        [("layer-quantized", (SGLANG, V1, V2), f"and that leaves {UP} out: codes have no place there")],
    ),
    "layers that no config mentions": (
        lambda c: (
            c.drafter.pop("quantization_config"),
            [c.weights.pop(f"midlayer.self_attn.{name}.weight") for name in ATTENTION],
            [c.weights.pop(f"midlayer.mlp.{name}.weight") for name in MLP[:2]],
        ),
        [
            (
                "layer-quantized",
                (SGLANG, V1, V2),
                "quantizes midlayer.mlp.down_proj as the drafter's quantization_config says, and there is none",
            )
        ],
    ),
    "a layer in no group": (
        lambda c: (
            c.drafter.update(quantization_config=in_scheme("W8A8 FP8 block", "re:.*(gate|gate_up|down|q|qkv|o)_proj")),
        ),
        [("layer-quantized", (SGLANG, V1, V2), f"and none of its config_groups has {UP}: codes have no place")],
    ),
    "a layer of numbers that is merged with codes": (
        lambda c: (
            c.weights.update({f"{UP}.weight": torch.randn(130, 64)}),
            c.weights.pop(f"{UP}.weight_scale_inv"),
        ),
        [("layer-quantized", ALL, f"{UP} is in numbers and midlayer.mlp.gate_proj in codes: engines merge them into")],
    ),
    "a layer that is left out by a name that SGLang does not have": (
        lambda c: (
            c.weights.update({"midlayer.mlp.down_proj.weight": torch.randn(64, 130)}),
            c.weights.pop("midlayer.mlp.down_proj.weight_scale_inv"),
            c.drafter["quantization_config"]["modules_to_not_convert"].append("model.midlayer.mlp.down_proj"),
        ),
        [
            (
                "layer-quantized",
                (SGLANG,),
                "builds midlayer.mlp.down_proj quantized: it calls it model.down_proj, which quantization_config does",
            ),
            (
                "layer-quantized",
                (V1, V2),
                "builds midlayer.mlp.down_proj quantized: it calls it model.layers.12.mlp.down_proj, which",
            ),
        ],
    ),
    "an lm_head in FP8": (
        lambda c: (
            c.weights.update({"lm_head.weight": torch.ones(DRAFTED, D).to(FP8)}),
            c.weights.update({"lm_head.weight_scale_inv": torch.ones(2, 1)}),
        ),
        [
            (
                "layer-quantized",
                (SGLANG, V1, V2),
                "holds lm_head in a ParallelLMHead without a quantization method, skips its scales: codes are taken "
                "for numbers (sglang#39087) without this package's plugin",
            )
        ],
    ),
    "an lm_head in FP8, where SGLang takes the target's": (
        lambda c: (
            c.drafter.update(draft_vocab_size=None),
            c.weights.update({"lm_head.weight": torch.ones(V, D).to(FP8)}),
            c.weights.update({"lm_head.weight_scale_inv": torch.ones(8, 1)}),
            c.weights.pop("d2t"),
        ),
        [("layer-quantized", (V1, V2), "holds lm_head in a ParallelLMHead without a quantization method")],
    ),
    "an embedding in FP8": (
        lambda c: (
            c.weights.update({"embed_tokens.weight": torch.ones(V, D).to(FP8)}),
            c.weights.update({"embed_tokens.weight_scale_inv": torch.ones(8, 1)}),
        ),
        [
            (
                "layer-quantized",
                (SGLANG, V1, V2),
                "holds embed_tokens in an embedding without a quantization method, skips its scales",
            )
        ],
    ),
    "an embedding in FP8, as wide as the target's": (
        lambda c: (
            c.drafter.update(hidden_size=c.drafter.pop("target_hidden_size")),
            c.weights.update({"fc.weight": torch.ones(H, K * H), "norm.weight": torch.ones(H)}),
            c.weights.update({f"midlayer.{norm}.weight": torch.ones(H) for norm in ("input_layernorm", "hidden_norm")}),
            c.weights.update({"embed_tokens.weight": torch.ones(V, H).to(FP8)}),
            c.weights.update({"embed_tokens.weight_scale_inv": torch.ones(8, 1)}),
        ),
        [
            (
                "layer-quantized",
                (V1, V2),
                "holds embed_tokens in an embedding without a quantization method, skips its scales",
            )
        ],
    ),
    "a norm in FP8": (
        lambda c: c.weights.update({"midlayer.post_attention_layernorm.weight": torch.ones(D).to(FP8)}),
        [
            ("load", ALL, "midlayer.post_attention_layernorm.weight is [48] of F8_E4M3, expected numbers"),
            (
                "layer-quantized",
                (SGLANG, V1, V2),
                "holds midlayer.post_attention_layernorm in a norm, skips its scales: codes are taken for numbers; "
                "this package's plugin refuses them",
            ),
        ],
    ),
    "a latent drafter in NVFP4": (
        lambda c: (
            in_nvfp4(c),
            c.drafter.update(architectures=["Eagle3DeepseekV2ForCausalLM"]),
            c.drafter["quantization_config"].update(exclude_modules=["lm_head"]),
            [c.weights.pop(name) for name in [*c.weights] if name.startswith(("midlayer.mlp", "midlayer.self"))],
            c.weights.update({f"{UP}.weight": torch.zeros(96, 32, dtype=torch.uint8)}),
            c.weights.update({f"{UP}.weight_scale": torch.ones(96, 4).to(FP8), f"{UP}.weight_scale_2": torch.ones(())}),
        ),
        [
            ("fc-quantized", (SGLANG,), "holds fc in a linear layer without a quantization method"),
            ("layer-quantized", (SGLANG,), f"holds {UP} in a linear layer without a quantization method"),
        ],
    ),
}

# The same for DFlash drafters with two layers whose MLP is in W4A16.
MLP_TRAPS: dict[str, tuple[Callable, list[tuple]]] = {
    "DFlash with an MLP in W4A16 without scales": (
        lambda c: [c.weights.pop(f"layers.{layer}.mlp.up_proj.weight_scale") for layer in range(2)],
        [("load", ALL, "weights has layers.*.mlp.up_proj.weight_packed, expected weight_scale beside it")],
    ),
    "DFlash with an MLP in W4A16, of which one has no scale": (
        lambda c: c.weights.pop("layers.1.mlp.up_proj.weight_scale"),
        [("load", ALL, "weights has layers.1.mlp.up_proj.weight_packed, expected weight_scale beside it")],
    ),
    "DFlash with an MLP in W4A16 of another group size": (
        lambda c: [
            c.weights.update({f"layers.{layer}.mlp.{name}.weight_scale": torch.ones(96, 2).bfloat16()})
            for layer in range(2)
            for name in MLP
        ],
        [
            ("load", ALL, f"layers.*.mlp.{name}.weight_packed has 2 groups in 64 columns, expected 4")
            for name in sorted(MLP)
        ],
    ),
    "DFlash of three layers, of which two have no scale": (
        lambda c: (
            c.drafter.update(num_hidden_layers=3),
            c.weights.update({f"layers.2.self_attn.{part}_proj.weight": torch.ones(32, H) for part in "kv"}),
            c.weights.update({"layers.2.self_attn.k_norm.weight": torch.ones(16)}),
            with_mlp_in_w4a16(c, layers=3),
            [c.weights.pop(f"layers.{layer}.mlp.up_proj.weight_scale") for layer in (1, 2)],
        ),
        [("load", ALL, "(in 2 of 3, the first of which is layers.1.mlp.up_proj)")],
    ),
    "DFlash with an MLP in a group that has the layers' names": (
        lambda c: c.drafter.update(quantization_config=of_group("re:.*mlp.*")),
        [
            ("layer-quantized", (SGLANG,), "calls layers.*.mlp.down_proj down_proj, which none of config_groups has"),
            ("layer-quantized", (SGLANG,), "calls layers.*.mlp.gate_proj gate_up_proj, which none of config_groups"),
            ("layer-quantized", (SGLANG,), "calls layers.*.mlp.up_proj gate_up_proj, which none of config_groups has"),
        ],
    ),
    "DFlash with an MLP in numbers, in a group that has the layers' names": (
        lambda c: (
            # SGLang calls it down_proj, which is in no group.
            c.drafter.update(quantization_config=of_group("re:.*mlp.*")),
            [c.weights.pop(name) for name in [*c.weights] if ".mlp." in name],
            c.weights.update({f"layers.{layer}.mlp.down_proj.weight": torch.ones(96, 64) for layer in range(2)}),
        ),
        [("layer-quantized", (V1, V2), "builds layers.*.mlp.down_proj quantized, as quantization_config says of it")],
    ),
    "DFlash with keys and values left out by the layers' names": (
        lambda c: c.drafter["quantization_config"].update(ignore=["re:.*self_attn.*", "re:.*fc"]),
        [
            ("layer-quantized", (SGLANG,), "builds layers.*.self_attn.k_proj quantized: it calls it qkv_proj, which"),
            ("layer-quantized", (SGLANG,), "builds layers.*.self_attn.v_proj quantized: it calls it qkv_proj, which"),
        ],
    ),
    "DFlash with keys and values left out by their own names": (
        lambda c: c.drafter["quantization_config"].update(
            ignore=["re:.*fc", *(f"layers.{layer}.self_attn.{part}_proj" for layer in range(2) for part in "kv")]
        ),
        [
            *(
                ("layer-quantized", (SGLANG,), f"builds layers.*.self_attn.{part}_proj quantized: it calls it qkv_proj")
                for part in "kv"
            ),
            *(
                (
                    "layer-quantized",
                    (V1, V2),
                    f"builds layers.*.self_attn.{part}_proj quantized: it calls it model.layers.*.self_attn.qkv_proj",
                )
                for part in "kv"
            ),
        ],
    ),
    "DFlash with heads in W4A16": (
        lambda c: (
            c.weights.update({"candidate_selector.hidden_projection.weight": torch.ones(32, 64)}),
            c.weights.update({"markov_head.markov_w2.weight": torch.ones(32, 64)}),
            as_w4a16(c, "candidate_selector.hidden_projection", "markov_head.markov_w2"),
            c.drafter["quantization_config"].update(ignore=["re:.*[qkv]_proj", "re:.*fc"]),
        ),
        [
            (
                "layer-quantized",
                (SGLANG,),
                "holds candidate_selector.hidden_projection in a plain nn.Linear, skips its weight_packed",
            ),
            (
                "layer-quantized",
                (V1, V2),
                "holds candidate_selector.hidden_projection in a linear layer without a quantization method",
            ),
            ("layer-quantized", (SGLANG,), "holds markov_head.markov_w2 in a plain nn.Linear"),
            ("layer-quantized", (V1, V2), "holds markov_head.markov_w2 in a ParallelLMHead without a quantization met"),
        ],
    ),
    "DFlash with tables of its own in W4A16": (
        lambda c: (
            c.weights.update({f"{name}.weight": torch.ones(V, 64) for name in ("embed_tokens", "lm_head")}),
            as_w4a16(c, "embed_tokens", "lm_head"),
            c.drafter["quantization_config"].update(ignore=["re:.*[qkv]_proj", "re:.*fc"]),
        ),
        [
            (
                "layer-quantized",
                (V1, V2),
                "holds embed_tokens in an embedding without a quantization method, skips its weight_packed",
            ),
            ("layer-quantized", (V1, V2), "holds lm_head in a ParallelLMHead without a quantization method"),
        ],
    ),
}

# The same for DeepSeek's MTP with a layer in FP8 blocks.
MTP_LAYER_TRAPS: dict[str, tuple[Callable, list[tuple]]] = {
    "an MTP layer without a scale": (
        lambda c: c.weights.pop(f"{LAYER}.self_attn.o_proj.weight_scale_inv"),
        [("load", ALL, f"weights has {LAYER}.self_attn.o_proj.weight in torch.float8_e4m3fn, expected its scale")],
    ),
    "MTP of ModelOpt's FP4": (
        lambda c: (
            [c.weights.pop(name) for name in [*c.weights] if ".mlp." in name or ".self_attn." in name],
            c.weights.update({f"{LAYER}.mlp.up_proj.weight": torch.zeros(96, 32, dtype=torch.uint8)}),
            c.weights.update({f"{LAYER}.mlp.up_proj.weight_scale": torch.ones(96, 4).to(FP8)}),
            c.weights.update({f"{LAYER}.mlp.up_proj.weight_scale_2": torch.ones(())}),
            c.drafter.update(quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4"}),
        ),
        [("layer-quantized", (SGLANG,), f"holds {LAYER}.mlp.up_proj in a linear layer without a quantization method")],
    ),
}


DOWN = f"{EXPERTS}.down_proj"
# The same for DeepSeek's MTP with stacked experts.
STACK_TRAPS: dict[str, tuple[Callable, list[tuple]]] = {
    "stacked experts in numbers that the config says are codes": (
        lambda c: stacked(c, HF_FP8, gate_up_proj=torch.ones(3, 96, 130).bfloat16()),
        [
            (
                "layer-quantized",
                (SGLANG, V1, V2),
                f"builds {EXPERTS}.gate_up_proj quantized, as quantization_config says",
            )
        ],
    ),
    "gpt-oss's experts without scales": (
        lambda c: (in_gpt_oss_mxfp4(c), c.weights.pop(f"{DOWN}_scales")),
        [("load", ALL, f"{DOWN}_blocks is [3, 128, 3, 16] of U8, expected its scales beside it")],
    ),
    "gpt-oss's experts with scales of another shape": (
        lambda c: (in_gpt_oss_mxfp4(c), c.weights.update({f"{DOWN}_scales": torch.zeros(3, 128, 6).byte()})),
        [("load", ALL, f"{DOWN}_scales is [3, 128, 6] of U8, expected [3, 128, 3] of mxfp4, because {DOWN}_blocks is")],
    ),
    "gpt-oss's experts with scales of another number of experts": (
        lambda c: (in_gpt_oss_mxfp4(c), c.weights.update({f"{DOWN}_scales": torch.zeros(2, 128, 3).byte()})),
        [("load", ALL, f"{DOWN}_scales is [2, 128, 3] of U8, expected [3, 128, 3] of mxfp4")],
    ),
    "gpt-oss's experts with scales in another dtype": (
        lambda c: (in_gpt_oss_mxfp4(c), c.weights.update({f"{DOWN}_scales": torch.zeros(3, 128, 3)})),
        [("load", ALL, f"{DOWN}_scales is [3, 128, 3] of F32, expected [3, 128, 3] of mxfp4")],
    ),
    "gpt-oss's experts in flat blocks": (
        lambda c: (in_gpt_oss_mxfp4(c), c.weights.update({f"{DOWN}_blocks": torch.zeros(9, 5).byte()})),
        [("load", ALL, f"weights has {DOWN}_b")],
    ),
    "gpt-oss's experts that no config mentions": (
        lambda c: (
            in_gpt_oss_mxfp4(c),
            c.drafter.pop("quantization_config"),
            [c.weights.pop(f"{EXPERTS}.gate_up_proj_{part}") for part in ("blocks", "scales", "bias")],
        ),
        [
            (
                "layer-quantized",
                (SGLANG, V1, V2),
                "and there is none: it fails to load; this package's plugin leaves experts to it",
            )
        ],
    ),
    "gpt-oss's experts in a config of FP8": (
        lambda c: (in_gpt_oss_mxfp4(c), c.drafter["quantization_config"].update(HF_FP8)),
        [
            ("load", ALL, f"{DOWN}_blocks is mxfp4, expected fp8_tensor or fp8_row or"),
            ("load", ALL, f"{EXPERTS}.gate_up_proj_blocks is mxfp4, expected fp8_tensor or fp8_row or"),
        ],
    ),
    "stacked experts in FP8 blocks without scales": (
        lambda c: (in_stacked_blocks(c), c.weights.pop(f"{DOWN}_scale_inv")),
        [("load", ALL, f"{DOWN} is [3, 130, 48] of F8_E4M3, expected its scales beside it")],
    ),
    "stacked experts in FP8 blocks of another size": (
        lambda c: (in_stacked_blocks(c), c.weights.update({f"{DOWN}_scale_inv": torch.ones(3, 5, 2)})),
        [("load", ALL, f"{DOWN} is fp8_block32, expected fp8_block128, because the checkpoint says weight_block_size")],
    ),
    "stacked experts in FP8 blocks of one expert": (
        lambda c: (in_stacked_blocks(c), c.weights.update({f"{DOWN}_scale_inv": torch.ones(2, 1)})),
        [("load", ALL, f"{DOWN}_scale_inv is [2, 1] of F32, expected")],
    ),
    "stacked experts with two scales": (
        lambda c: (in_stacked_blocks(c), c.weights.update({f"{DOWN}_scale": torch.ones(3, 1, 1)})),
        [("load", ALL, f"the file has {DOWN}_scale and {DOWN}_scale_inv, expected one of them, because both scale")],
    ),
    "stacked experts in bytes that are no codes": (
        lambda c: (in_stacked_blocks(c), c.weights.update({DOWN: torch.ones(3, 130, 48, dtype=torch.int16)})),
        [("load", ALL, f"{DOWN} is [3, 130, 48] of I16, expected codes of stacked experts")],
    ),
    "stacked experts in FP8 of one dimension too many": (
        lambda c: (in_stacked_blocks(c), c.weights.update({DOWN: torch.ones(3, 2, 65, 48).to(FP8)})),
        [("load", ALL, f"{DOWN} is [3, 2, 65, 48] of F8_E4M3, expected codes of stacked experts")],
    ),
    "stacked experts in NVFP4 without their second scale": (
        lambda c: (in_stacked_nvfp4(c), c.weights.pop(f"{DOWN}_weight_scale_2")),
        [
            ("load", ALL, f"{DOWN} is [3, 48, 128] of U8 in nvfp4, expected one of weight_scale_2 and"),
            ("layer-quantized", (SGLANG,), "; this package's plugin leaves experts to it"),
            ("layer-quantized", (SGLANG,), "; this package's plugin leaves experts to it"),
        ],
    ),
    "stacked experts in packed integers of another number of experts": (
        lambda c: (
            FITS["MTP with stacked experts in packed integers"][1](c),
            c.weights.update({f"{DOWN}.weight_scale": torch.ones(2, 128, 6)}),
        ),
        [("load", ALL, f"{DOWN}.weight_scale is [2, 128, 6] of F32, expected [3, 128, 6] of pack-quantized")],
    ),
    "Step-3.5's experts without scales": (
        lambda c: (in_step_s_stacks(c), c.weights.pop(f"{STEP}.up_proj.weight_scale_inv")),
        [("load", ALL, f"{STEP}.up_proj.weight is [3, 96, 130] of F8_E4M3, expected its scales beside it")],
    ),
    "Step-3.5's experts, of which gate is in numbers": (
        lambda c: (
            in_step_s_stacks(c),
            c.weights.pop(f"{STEP}.gate_proj.weight_scale_inv"),
            c.weights.update({f"{STEP}.gate_proj.weight": torch.ones(3, 96, 130)}),
        ),
        [("layer-quantized", ALL, f"{STEP}.gate_proj is in numbers and {STEP}.up_proj in codes")],
    ),
}


def after(prepare: Callable, traps: dict[str, tuple[Callable, list[tuple]]]) -> dict[str, tuple[Callable, list[tuple]]]:
    def then(change: Callable) -> Callable:
        return lambda checkpoints: (prepare(checkpoints), change(checkpoints))

    return {trap: (then(change), findings) for trap, (change, findings) in traps.items()}


TRAPS = {
    trap: (build, change, findings)
    for build, traps in (
        (Checkpoints, EAGLE3_TRAPS),
        (MTPCheckpoints, MTP_TRAPS),
        (EagleCheckpoints, EAGLE_TRAPS),
        (GemmaCheckpoints, GEMMA_TRAPS),
        (ContextCheckpoints, CONTEXT_TRAPS),
        (Checkpoints, after(lambda c: with_layers_in_fp8(c, "midlayer"), LAYER_TRAPS)),
        (ContextCheckpoints, after(lambda c: with_mlp_in_w4a16(c, layers=2), MLP_TRAPS)),
        (MTPCheckpoints, after(lambda c: with_layers_in_fp8(c, LAYER), MTP_LAYER_TRAPS)),
        (MTPCheckpoints, STACK_TRAPS),
    )
    for trap, (change, findings) in traps.items()
}


@pytest.mark.parametrize(
    "odd",
    [
        {"quantization_config": {"quant_method": []}},
        {"quantization_config": {"quant_method": {}, "modules_to_not_convert": [1, None]}},
        {"dflash_config": [1]},
        {"architectures": ["DFlashLagunaForCausalLM"], "model_type": "laguna", "rope_theta": "x"},
        {"dflash_config": "target_layer_ids"},
        {"dflash_config": None, "target_layer_ids": ["x"]},
        {"dflash_config": {"target_layer_ids": 3}},
        {"target_hidden_size": [64]},
        {IDS: {}},
        {IDS: 7},
        {"quantization_config": {"quant_method": "auto-round", "bits": [], "group_size": {}, "extra_config": [1]}},
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": "fc", "quantization": 3}},
        {"quantization_config": {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"fc": None, "x": {}}}},
    ],
    ids=str,
)
@pytest.mark.parametrize("algorithm", [None, "W4A16_NVFP4"])
def test_values_of_other_types_are_findings(odd: dict, algorithm: str | None, tmp_path: Path) -> None:
    checkpoints = ContextCheckpoints()
    checkpoints.drafter |= {"has_embed_tokens": True, "quantization_config": {"quant_algo": algorithm}} | odd
    checkpoints.weights["layers.0.mlp.up_proj.weight"] = torch.zeros(96, 32, dtype=torch.uint8)
    assert examine(*checkpoints.save(tmp_path)).findings


@pytest.mark.parametrize("trap", TRAPS)
def test_each_trap_is_found(trap: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build, change, expected = TRAPS[trap]
    checkpoints = build()
    change(checkpoints)
    folders = list(map(str, checkpoints.save(tmp_path)))
    assert cli.main(["doctor", *folders, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    assert [(each["trap"], tuple(each["engines"])) for each in found] == [case[:2] for case in expected]
    for each, (_, _, text) in zip(found, expected, strict=True):
        assert text in each["text"]
    assert cli.main(["doctor", *folders]) == 1
    out = capsys.readouterr().out
    assert out.endswith(f"findings: {len(expected)}\n")
    assert max(map(len, out.splitlines())) <= 80


# For each trap what the finding says of the plugin, and what the plugin does with the codes where the engine's layer is
# not quantized.
SAID = {
    "e5m2": ("; this package's plugin refuses them", "refused"),
    "fp8 with its config": (" without this package's plugin", "numbers"),
    "GPTQ": (" without this package's plugin", "numbers"),
    "bitsandbytes": ("; this package's plugin refuses them", "refused"),
    "torchao": ("; this package's plugin refuses them", "refused"),
    "EXL3": ("; this package's plugin refuses them", "refused"),
    "Quark's FP6": ("; this package's plugin refuses them", "refused"),
    "a norm in FP8": ("; this package's plugin refuses them", "refused"),
    "an lm_head in FP8": (" without this package's plugin", "numbers"),
    "stacked experts in NVFP4 without their second scale": ("; this package's plugin leaves experts to it", "left"),
}


@pytest.mark.parametrize("trap", SAID)
def test_doctor_says_of_the_plugin_what_that_does(trap: str, tmp_path: Path) -> None:
    """The two contradicted each other about embeddings, experts and formats that only engines read."""
    build, change, _ = TRAPS[trap]
    checkpoints, (said, done) = build(), SAID[trap]
    change(checkpoints)
    found = examine(*checkpoints.save(tmp_path)).findings
    holds = [finding.text for finding in found if finding.text.startswith("holds ")]
    assert holds and all(text.endswith(said) for text in holds)
    path = holds[0].split()[1]
    name = path.rpartition(".")[2]
    is_linear = "norm" not in name and name != "lm_head"
    layer = torch.nn.Linear(K * H, D, bias=False) if is_linear else torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.zeros(D, K * H))
    if name == "lm_head":
        layer.embedding_dim = D
    root = at(path, layer)
    root.config = SimpleNamespace(quantization_config=checkpoints.drafter.get("quantization_config"))
    own = (f"{path}.", f"{path}_weight")
    weights = {each: tensor for each, tensor in checkpoints.weights.items() if each == path or each.startswith(own)}
    assert weights
    scaled = scales.scaled(root, weights.items(), set(), "an engine", logging.getLogger())
    if done == "refused":
        with pytest.raises(ValueError, match=f"^load_weights: {path}"):
            [tensor.clone() for _, tensor in scaled]
    elif done == "numbers":
        assert [(each, tensor.dtype) for each, tensor in scaled] == [(f"{path}.weight", torch.float32)]
    else:
        assert all(tensor is weights[each] for each, tensor in scaled)


@pytest.mark.parametrize(
    ("config", "format"),
    [
        (GPTQ | {"quant_method": "Exl3"}, "Exl3"),
        (MODELOPT_FP8 | {"quant_algo": "W4A16_AWQ"}, "modelopt W4A16_AWQ"),
        (in_scheme("MXFP6A16", "Linear"), "compressed-tensors mxfp6-pack-quantized"),
        (AUTO_ROUND | {"data_type": "mx_int"}, "auto-round mx_int"),
        ({"bits": 4, "group_size": 64, "mode": "affine"}, "MLX affine"),
        (of_group("Linear") | {"format": "dense"}, None),
        (MODELOPT_FP8, None),
    ],
)
def test_the_format_that_only_engines_read(config: dict, format: str | None, tmp_path: Path) -> None:
    checkpoints = Checkpoints()
    checkpoints.drafter["quantization_config"] = config
    stated = None if format is None else f"{format}, {LEFT}"
    assert examine(*checkpoints.save(tmp_path)).facts.get("format") == stated


# As llm-compressor writes SpinQuant: R1 turns the residual stream, R2 values within a head, R4 what enters down_proj.
R1 = {"targets": ["re:.*embed_tokens$", "re:.*o_proj$", "re:.*down_proj$"], "location": "weight_output"}
R1_INVERSE = {"targets": ["re:.*q_proj$", "re:.*gate_proj$", "lm_head"], "location": "weight_input", "inverse": True}
R2 = {"targets": ["re:.*v_proj$"], "location": "weight_output"}
R4 = {"targets": ["re:.*down_proj$"], "location": "input"}


@pytest.mark.parametrize(
    ("groups", "key"),
    [
        ({"R2": {"apply": [R2]}, "R1": {"apply": [R1_INVERSE, R1]}}, "R1"),
        ({"R1": {"apply": R1 | {"targets": "model.embed_tokens"}}}, "R1"),
        ({"R2": {"apply": [R2]}, "R4": {"apply": [R4]}, "R1": {"apply": [R1_INVERSE]}}, None),
        ({"online": {"apply": [R1 | {"location": "output"}]}}, "online"),
        ({"R1": {"apply": [R1 | {"targets": ["re:.*language_model.*embed_tokens$"]}]}}, "R1"),
        ({"R1": {"apply": [R1 | {"ignore": ["re:.*embed_tokens$"]}]}}, None),
        ([], None),
    ],
)
@pytest.mark.parametrize("section", ["quantization_config", "compression_config", "text_config"])
def test_a_target_with_rotated_hidden_states(groups: object, key: str | None, section: str, tmp_path: Path) -> None:
    checkpoints = Checkpoints()
    config = {"quant_method": "compressed-tensors", "transform_config": {"config_groups": groups}}
    if section == "text_config":
        checkpoints.target = {"model_type": "gemma3", section: checkpoints.target | {"quantization_config": config}}
    else:
        checkpoints.target[section] = config
    expected = f"rotated (transform_config.config_groups.{key}): a drafter has to be trained on it"
    stated = examine(*checkpoints.save(tmp_path)).facts.get("target")
    assert stated is None if key is None else str(stated).startswith(expected)


@pytest.mark.parametrize("format", [None, "mixed-precision"])
@pytest.mark.parametrize("name", SCHEMES)
def test_schemes_that_an_engine_lacks(name: str, format: str | None, tmp_path: Path) -> None:
    checkpoints = Checkpoints()
    with_attention_in_mxfp4(checkpoints)
    checkpoints.drafter["quantization_config"] = in_scheme(name, "re:.*self_attn.*", format=format)
    found = [each for each in examine(*checkpoints.save(tmp_path)).findings if "no scheme of compressed" in each.text]
    engines = [engine for engine in pair.ENGINES if any(pair.ENGINES[engine][0] in each.engines for each in found)]
    assert tuple(engines) == SCHEMES[name][3]
    of_sm_90 = [each for each in found if " but on sm_90 for " in each.text]
    assert bool(of_sm_90) == (name == "W4AFP8") and not any(SGLANG in each.engines for each in of_sm_90)
    assert all(f"format {SCHEMES[name][2]}" in each.text for each in found)


def test_each_engine_reads_one_list_of_model_optimizer_s() -> None:
    """Where the keys stand at the top and in `quantization` too, SGLang reads the former and vLLM the latter."""
    nested = {"quant_algo": "NVFP4", "exclude_modules": ["nested"]}
    both = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["flat"], "quantization": nested}
    flat = {name: value for name, value in both.items() if name != "quantization"}
    beside = {"hf_quant_config.json": {"exclude_modules": ["beside"]}}
    without_method = {"quant_algo": "NVFP4", "ignore": ["flat"], "exclude_modules": ["own"]}
    assert modelopt.read_by(without_method, "sglang", of_experts=False, is_inline=True)["ignore"] == ["flat"]
    assert modelopt.read_by(without_method, "vllm", of_experts=False, is_inline=True) is None
    for config, engine, expected in (
        (both, "sglang", ["flat"]),
        (both, "vllm", ["nested"]),
        (flat, "sglang", ["flat"]),
        (flat, "vllm", ["flat"]),
        # Without a quant_method, here, it is what hf_quant_config.json says: SGLang reads exclude_modules of it alone.
        (without_method, "sglang", ["own"]),
        (flat | {"quant_algo": "MIXED_PRECISION", "ignore": ["flat"]} | beside, "sglang", ["flat"]),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"} | beside, "sglang", ["beside"]),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"} | beside, "sglang", []),
        ({"quantization": nested}, "sglang", ["nested"]),
        ({"quantization": nested}, "vllm", ["nested"]),
    ):
        read = modelopt.read_by(config, engine, of_experts=False, is_inline="quant_method" in config)
        assert read["ignore"] == expected, (config, engine)


def test_every_tool_but_model_optimizer_has_a_list_or_none() -> None:
    assert set(lists._KEYS) == set(OTHER_TOOLS)


@pytest.mark.parametrize(("method", "key"), [("quark", "exclude"), ("fp8", "modules_to_not_convert")])
def test_quark_alone_leaves_out_a_whole_layer_of_nextn(method: str, key: str) -> None:
    """The class looks for its layer in Quark's exclude only (`_resolve_nextn_quant_config`)."""
    drafter = SimpleNamespace(quantization={"quant_method": method, key: ["model.layers.61"]}, num_layers=61)
    assert nextn.is_unquantized(drafter, ["DeepseekV3ForCausalLMNextN"]) == (method == "quark")
    assert not nextn.is_unquantized(drafter, ["GlmMoeDsaForCausalLMNextN"])


def test_vllm_s_names_of_eagle_drafters() -> None:
    names = ("EagleLlamaForCausalLM", "LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
    assert [*map(served.eagle_in_vllm, names[:2])] == ["EagleLlamaForCausalLM", "EagleLlamaForCausalLM"]
    assert [*map(served.eagle3_in_vllm, names[1:])] == ["Eagle3LlamaForCausalLM", names[2], names[3]]


def test_experts_have_other_schemes(tmp_path: Path) -> None:
    """SGLang has MXFP4 for them."""
    checkpoints = MTPCheckpoints()
    names = [f"{LAYER}.mlp.experts.0.{name}" for name in MLP]
    checkpoints.weights |= {f"{name}.weight_packed": torch.zeros(96, 64, dtype=torch.uint8) for name in names}
    checkpoints.drafter["quantization_config"] = in_scheme("MXFP4", "re:.*experts.*")
    assert not [each for each in examine(*checkpoints.save(tmp_path)).findings if "no scheme" in each.text]


@pytest.mark.parametrize(
    ("architecture", "kind", "layers", "engines"),
    [
        pytest.param("Glm4MoeForCausalLM", "glm4_moe", 1, [(V1, V2)], id="glm-4.7"),
        pytest.param("Glm4MoeForCausalLM", "glm4_moe", 0, [(SGLANG,), (V1, V2)], id="glm-4.7-without-layers"),
        pytest.param("Glm4MoeForCausalLM", "glm4_moe", None, [(SGLANG,), (V1, V2)], id="glm-4.7-of-none"),
        pytest.param("DeepseekV3ForCausalLM", "deepseek_v3", 1, [(SGLANG,), (V1, V2)], id="deepseek"),
    ],
)
@pytest.mark.parametrize("is_indexed", [False, True], ids=["outside", "indexed"])
def test_mtp_safetensors_outside_the_index(
    architecture: str, kind: str, layers: int | None, engines: list[tuple], is_indexed: bool, tmp_path: Path
) -> None:
    """SGLang reads it for GLM-4.5 to 4.7 alone, whose config says that it has layers; doctor found no MTP layer, and
    load_checkpoint neither."""
    checkpoints = MTPCheckpoints()
    of_family(checkpoints, architecture, kind)
    checkpoints.target.update(num_nextn_predict_layers=layers)
    target, drafter = checkpoints.save(tmp_path)
    (drafter / "model.safetensors").rename(drafter / "mtp.safetensors")
    save_file({"model.norm.weight": torch.ones(2 * H)}, drafter / "model-00001-of-00001.safetensors")
    weight_map = {"model.norm.weight": "model-00001-of-00001.safetensors"}
    weight_map |= dict.fromkeys(checkpoints.weights, "mtp.safetensors") if is_indexed else {}
    (drafter / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    found = examine(target, drafter).findings
    assert [finding.engines for finding in found] == ([] if is_indexed else engines)
    assert all("does not read mtp.safetensors" in finding.text for finding in found)
    layer = ek.MTPProjection(ek.MTPConfig.from_hf(checkpoints.target), dtype=torch.bfloat16)
    assert layer.load_checkpoint(drafter) is layer


def test_an_engine_leaves_out_what_the_others_fall_into(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints = Checkpoints()
    checkpoints.drafter["eagle_config"] = {IDS: [1, 5, 8]}
    del checkpoints.target["vocab_size"]
    folders = list(map(str, checkpoints.save(tmp_path)))
    assert cli.main(["doctor", *folders, "--engine", "sglang"]) == 0
    out = capsys.readouterr().out
    assert "SGLang 0.5.23 " in out and "vLLM" not in out and "target not stated, drafter 1000" in out
    assert cli.main(["doctor", *folders, "--engine", "vllm"]) == 1
    out = capsys.readouterr().out
    assert "vLLM 0.33, V1 runner: captures the boundaries" in out.replace("\n ", "") and "SGLang" not in out


def test_a_drafter_without_safetensors_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = list(map(str, Checkpoints().save(tmp_path)))
    for file in Path(folders[1]).glob("*.safetensors"):
        file.unlink()
    with pytest.raises(SystemExit):
        cli.main(["doctor", *folders])
    assert f"doctor: drafter is '{folders[1]}', expected a folder with .safetensors" in capsys.readouterr().err


def test_specforge_s_norm_output_is_another_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """There it says that the head has a norm; SpecForge trains the next step on the pre-norm state."""
    checkpoints = Checkpoints()
    checkpoints.drafter["norm_output"] = True
    folders = list(map(str, checkpoints.save(tmp_path)))
    assert cli.main(["doctor", *folders]) == 0
    assert "chunk_norm, norm_output" in capsys.readouterr().out
    assert cli.main(["doctor", *folders, "--trained-by", "specforge", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    text = (
        "takes norm_output for True, and the drafter was trained with False: from its second step on it reads another"
    )
    assert [(each["trap"], each["engines"]) for each in found] == [
        ("engine-flags", [each]) for each in (SGLANG, V1, V2)
    ]
    assert all(text in each["text"] for each in found)


# A drafter of another kind, and the error about it.
UNKNOWN: dict[str, tuple[Callable[[Files], object], str]] = {
    "no drafter": (
        lambda c: (of_nobody(c), c.drafter.update(architectures=["MedusaModel"], model_type="medusa")),
        "the drafter's architectures are ['MedusaModel'], its model_type 'medusa', expected an EAGLE, MTP, DFlash or",
    ),
    "a draft model of its own": (
        lambda c: (of_nobody(c), c.drafter.update(architectures=["LlamaForCausalLM"]), c.weights.pop("fc.weight")),
        "the drafter's architectures are ['LlamaForCausalLM'], its model_type None, expected",
    ),
    "an MTP layer of nobody": (
        lambda c: (of_nobody(c), renamed(c, "fc.weight", "eh_proj.weight")),
        "the drafter's architectures are [], its model_type None, and its files have eh_proj, expected an EAGLE, MTP",
    ),
    "an EAGLE of nobody": (
        lambda c: (of_nobody(c), renamed(c, "fc.weight", "eagle_linear.weight")),
        "the drafter's architectures are [], its model_type None, and its files have eagle_linear, expected an EAGLE",
    ),
    "speculators' Medusa": (
        lambda c: c.drafter.update(speculators_model_type="medusa"),
        "the drafter is speculators' 'medusa', expected 'eagle3' or 'peagle' or 'dflash' or 'dflash2' or 'dspark' of",
    ),
}


def of_nobody(checkpoints: Files) -> None:
    """Removes what says that it is an EAGLE-3 drafter."""
    checkpoints.drafter.clear()
    for norm in ("input_layernorm", "hidden_norm"):
        del checkpoints.weights[f"midlayer.{norm}.weight"]


@pytest.mark.parametrize("case", UNKNOWN)
def test_another_kind_of_drafter_is_a_usage_error(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, message = UNKNOWN[case]
    checkpoints = Checkpoints()
    change(checkpoints)
    folders = list(map(str, checkpoints.save(tmp_path)))
    with pytest.raises(SystemExit) as stop:
        cli.main(["doctor", *folders])
    assert stop.value.code == 2
    assert f"error: doctor: {message}" in capsys.readouterr().err


def replaced_by_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def replaced_by_broken_link(file: Path) -> None:
    file.unlink()
    file.symlink_to("nowhere")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "target/config.json").unlink(), "config.json is missing, expected a model's folder"),
        (lambda folder: (folder / "drafter/config.json").write_text("{"), "config.json is damaged, expected JSON"),
        (lambda folder: (folder / "target/config.json").write_text("[]"), "config.json is a list, expected an object"),
        (lambda folder: (folder / "drafter/model.safetensors").write_bytes(b"x"), "is damaged, expected a safetensors"),
        (lambda folder: (folder / "drafter/model.safetensors").unlink(), "expected a folder with .safetensors files"),
        (lambda folder: replaced_by_folder(folder / "target/config.json"), "because it is a folder"),
        (
            lambda folder: replaced_by_broken_link(folder / "drafter/config.json"),
            "expected a model's config, because it is a link to 'nowhere', which is not there",
        ),
        (lambda folder: replaced_by_folder(folder / "drafter/model.safetensors"), "because it is a folder"),
        (
            lambda folder: shutil.copy(folder / "drafter/model.safetensors", folder / "drafter/twice.safetensors"),
            "twice.safetensors', expected one of them, because no index says which",
        ),
        (
            lambda folder: replaced_by_broken_link(folder / "drafter/model.safetensors"),
            "because it is a link to 'nowhere', which is not there",
        ),
    ],
)
def test_an_unreadable_folder_is_a_usage_error(
    damage: Callable[[Path], object], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = list(map(str, Checkpoints().save(tmp_path)))
    damage(tmp_path)
    with pytest.raises(SystemExit) as stop:
        cli.main(["doctor", *folders])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert cli.main(["doctor", *folders, "--json"]) == 2
    assert message in json.loads(capsys.readouterr().out)["error"]


def with_empty_tensor(file: Path, name: str, shape: list[int]) -> None:
    """Put a tensor into the file whose shape has no element, whatever its other sizes."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def test_a_size_that_no_memory_has_is_a_finding(tmp_path: Path) -> None:
    """A row of it was allocated: a RuntimeError, or all memory."""
    checkpoints = Checkpoints()
    del checkpoints.weights["fc.weight"]
    folders = checkpoints.save(tmp_path)
    with_empty_tensor(tmp_path / "drafter/model.safetensors", "fc.weight", [0, 2**62])
    found = [finding.text for finding in examine(*folders).findings if finding.trap == "load"]
    message = f"fc.weight has shape (0, {2**62}), expected ({D}, {K * H}), because it is (D, K*H) with K = 3 and H = 64"
    assert found == [f"Eagle3Projection.load_checkpoint: {message}"]


@pytest.mark.parametrize("shape", [[2**63, 0], [0, 2**64 - 1]])
def test_a_size_beyond_torch_s_is_a_usage_error(
    shape: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = list(map(str, Checkpoints().save(tmp_path)))
    with_empty_tensor(tmp_path / "drafter/model.safetensors", "fc.extra", shape)
    assert cli.main(["doctor", *folders, "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error == f"doctor: fc.extra is F32 of shape {shape}, expected sizes that torch has"


def test_a_width_in_a_config_takes_no_memory() -> None:
    """Its norms have stand-ins of that width: 12 GB of the widest."""
    stand_in = pair.Header((2**40,), "BF16").stand_in()
    assert stand_in.shape == (2**40,) and stand_in.untyped_storage().nbytes() == 2


@pytest.mark.parametrize("pattern", ["a{99999999999}", "(" * 5000])
def test_a_pattern_that_cannot_be_compiled_names_no_layer(pattern: str, tmp_path: Path) -> None:
    """re raises an OverflowError and a RecursionError for these, which ended doctor."""
    checkpoints = Checkpoints()
    with_config(checkpoints, HF_FP8 | {"modules_to_not_convert": [f"re:{pattern}"]})
    found = examine(*checkpoints.save(tmp_path)).findings
    assert [finding.engines for finding in found] == [(SGLANG,)]  # as without the pattern


def test_a_layer_of_5000_digits_is_none(tmp_path: Path) -> None:
    """Python reads no int of more than 4300."""
    checkpoints = Checkpoints()
    with_attention(checkpoints)
    checkpoints.weights[f"layers.{'9' * 5000}.self_attn.q_proj.weight"] = torch.ones(2, 2)
    assert examine(*checkpoints.save(tmp_path)).findings == []


@pytest.mark.parametrize("name", ["k\u00e4se", "\ud800"])
def test_a_name_that_the_terminal_cannot_show_is_escaped(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A UnicodeEncodeError ended doctor with exit code 1, which means that something does not fit."""
    checkpoints = Checkpoints()
    checkpoints.drafter["quantization_config"] = {"quant_method": name}
    folders = list(map(str, checkpoints.save(tmp_path)))
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    assert cli.main(["doctor", *folders]) == 1
    out.flush()
    escaped = name.encode("ascii", "backslashreplace")
    assert b"quantization method " + escaped in b" ".join(out.buffer.getvalue().split())


def test_gguf_is_a_usage_error_that_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = list(map(str, Checkpoints().save(tmp_path)))
    (tmp_path / "drafter/model.safetensors").rename(tmp_path / "drafter/drafter-Q4_K_M.gguf")
    assert cli.main(["doctor", *folders, "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert "drafter-Q4_K_M.gguf is in GGUF, expected .safetensors files, because SGLang alone reads it" in error


def test_without_safetensors_it_is_a_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A ModuleNotFoundError ended doctor with exit code 1, which means that something does not fit."""
    folders = list(map(str, Checkpoints().save(tmp_path)))
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert cli.main(["doctor", *folders, "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error.startswith("doctor: safetensors is not installed, expected it to read ")


@pytest.mark.parametrize("name", ["target/config.json", "drafter/config.json", "drafter/model.safetensors"])
def test_a_pipe_is_a_usage_error(name: str, tmp_path: Path) -> None:
    """Opening a pipe waited for its writer forever. Runs in a process of its own, which a timeout can stop."""
    folders = list(map(str, Checkpoints().save(tmp_path)))
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    command = [sys.executable, "-m", "eagle_kernels.bench.cli", "doctor", *folders, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    error = json.loads(done.stdout)["error"]
    assert str(tmp_path / name) in error and "neither a file nor a folder" in error
