"""Checkpoints whose best result is known: a target that counts (token t is followed by t + 1 mod V) and an EAGLE-3
drafter that counts along if its projection recovers the captured hidden state.

H = V and embeddings are one-hot, c = sqrt(H): every boundary of the target is c * e_t. Chunk k of the drafter's fc
picks the columns congruent to k mod K and undoes the gains, so that every chunk is needed; its MLP turns c * e_t into
c * e_{t+1}. All n draft tokens are accepted, n + 1 tokens a step; 1 if the projection is wrong.
"""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors.torch import save_file

from engines import dflash_drafter, layer0_drafter
from engines.layer0_drafter import Latent
from engines.quantized_layers import tensors_of

# Divisible by 1, 2 and 3 ranks.
V = H = 192
LAYERS, HEADS, INTERMEDIATE = 3, 6, 192
C = H**0.5


def _config(architecture: str, layers: int, **more: object) -> dict:
    return {
        "architectures": [architecture],
        "model_type": "llama",
        "vocab_size": V,
        "hidden_size": H,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": H // HEADS,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": V - 1,
    } | more


def _layer(prefix: str, inputs: int = H) -> dict[str, torch.Tensor]:
    """Attention with real queries, keys and values whose output is dropped."""
    weights = {f"{prefix}self_attn.{name}_proj.weight": torch.randn(H, inputs) / inputs**0.5 for name in "qkv"}
    weights[f"{prefix}self_attn.o_proj.weight"] = torch.zeros(H, H)
    return weights | {
        f"{prefix}{name}.weight": torch.ones(H) for name in ("input_layernorm", "post_attention_layernorm")
    }


def _next(rows: torch.Tensor) -> torch.Tensor:
    """Row j holds what row j - 1 held: as lm_head, token t is followed by t + 1."""
    return rows.roll(1, 0)


def _save(
    folder: Path,
    config: dict,
    weights: dict[str, torch.Tensor],
    layouts: Mapping[str, str | None] = MappingProxyType({}),
    d2t: torch.Tensor | None = None,
) -> str:
    """layouts: layer -> its `layout` for `tensors_of`; None where it is dense."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    saved = {name: weight.bfloat16().contiguous() for name, weight in weights.items()}
    for layer, layout in layouts.items():
        if layout is not None:
            saved |= tensors_of(layer, saved.pop(f"{layer}.weight"), layout)
    if d2t is not None:
        saved["d2t"] = d2t
    save_file(saved, folder / "model.safetensors")
    return str(folder)


def write_target(folder: Path, vocabulary: int = V, layers: int = LAYERS) -> str:
    """vocabulary: at most H, so that each token has a column."""
    torch.manual_seed(0)
    tokens = torch.eye(vocabulary, H)
    weights = {"model.embed_tokens.weight": C * tokens, "lm_head.weight": _next(tokens)}
    for i in range(layers):
        prefix = f"model.layers.{i}."
        weights |= _layer(prefix)
        weights |= {f"{prefix}mlp.{name}_proj.weight": torch.randn(INTERMEDIATE, H) / C for name in ("gate", "up")}
        weights[f"{prefix}mlp.down_proj.weight"] = torch.zeros(H, INTERMEDIATE)
    weights["model.norm.weight"] = torch.ones(H)
    config = _config("LlamaForCausalLM", layers, vocab_size=vocabulary, eos_token_id=vocabulary - 1)
    return _save(folder, config, weights)


def write_gpt_oss_target(folder: Path) -> str:
    """The counting target with gpt-oss's layers: sinks, biases, and experts that add nothing."""
    torch.manual_seed(0)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_per_token": 2}
    attention = {
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "attention_bias": True,
    }
    config = _config("GptOssForCausalLM", 4, **experts, **attention, swiglu_limit=7.0)
    config |= {"model_type": "gpt_oss", "rms_norm_eps": 1e-5}
    weights = {"model.embed_tokens.weight": C * torch.eye(V), "lm_head.weight": _next(torch.eye(V))}
    for i in range(4):
        prefix = f"model.layers.{i}."
        weights |= _layer(prefix)
        weights |= {f"{prefix}self_attn.{name}_proj.bias": torch.zeros(H) for name in "qkvo"}
        weights[f"{prefix}self_attn.sinks"] = torch.zeros(HEADS)
        weights |= {f"{prefix}mlp.router.weight": torch.randn(4, H) / C, f"{prefix}mlp.router.bias": torch.zeros(4)}
        weights |= {
            f"{prefix}mlp.experts.gate_up_proj": torch.randn(4, H, 2 * INTERMEDIATE) / C,
            f"{prefix}mlp.experts.gate_up_proj_bias": torch.zeros(4, 2 * INTERMEDIATE),
            f"{prefix}mlp.experts.down_proj": torch.zeros(4, INTERMEDIATE, H),
            f"{prefix}mlp.experts.down_proj_bias": torch.zeros(4, H),
        }
    weights["model.norm.weight"] = torch.ones(H)
    return _save(folder, config, weights)


def write_drafter(
    folder: Path,
    K: int,
    norm: str,
    layout: str | None = None,
    vocabulary: int = V,
    draft_vocabulary: int | None = None,
    layers: int = LAYERS,
    whole: bool = False,
    **more: object,
) -> str:
    """norm: "chunk" (fc_norm), "concat" (norm_before_fc) or "none". layout: of a quantized fc, and with `whole` of the
    decoder layer's projections too. draft_vocabulary: size of the drafter's vocabulary, the first tokens in reverse
    order; d2t holds their distance from the target's."""
    torch.manual_seed(1)
    layer_ids = list(range(layers + 1))[-K:]
    tokens = _next(torch.eye(vocabulary, H))
    config = {
        "draft_vocab_size": draft_vocabulary or vocabulary,
        "vocab_size": vocabulary,
        "eos_token_id": vocabulary - 1,
        "eagle_aux_hidden_state_layer_ids": layer_ids,
        "num_aux_hidden_states": K,
        **more,
    }
    weights = {"fc.weight": fc_weight(K, gains := 0.5 + torch.rand(K, H).bfloat16().float(), norm)}
    if norm == "chunk":
        config["fc_norm"] = True
        weights |= {f"fc_norm.{k}.weight": gains[k] for k in range(K)}
    elif norm == "concat":
        config["norm_before_fc"] = True
        weights["input_norm.weight"] = gains.reshape(-1)
    weights |= _layer("midlayer.", 2 * H) | {"midlayer.hidden_norm.weight": torch.ones(H)}
    weights |= {f"midlayer.mlp.{name}_proj.weight": torch.eye(H) for name in ("gate", "up")}
    # silu(c) * c = c^2 in column t becomes -c there, which cancels the residual, and c in the next.
    weights["midlayer.mlp.down_proj.weight"] = (torch.eye(H).roll(1, 0) - torch.eye(H)) / C
    weights |= {"norm.weight": torch.ones(H), "lm_head.weight": tokens}
    d2t = None
    if draft_vocabulary is not None:
        weights["lm_head.weight"] = tokens[:draft_vocabulary].flip(0)
        d2t = draft_vocabulary - 1 - 2 * torch.arange(draft_vocabulary)
    config = {name: value for name, value in config.items() if value is not None}
    layouts = {"fc": layout}
    if whole:
        layouts |= {name.removesuffix(".weight"): layout for name in weights if name.endswith("_proj.weight")}
    return _save(folder, _config("LlamaForCausalLMEagle3", 1, **config), weights, layouts, d2t)


def write_layer0_drafter(
    folder: Path,
    *,
    norm_before_residual: bool,
    architecture: str = "LlamaForCausalLMEagle3",
    attention_bias: bool = False,
    **more: object,
) -> str:
    """Its drafts are right only where layer 0 is. attention_bias: of zeros. Qwen 3's queries and keys are normed."""
    K = 3
    weights = {"fc.weight": layer0_drafter.fc_weight(K, H, C), "lm_head.weight": _next(torch.eye(V))}
    weights |= layer0_drafter.layer0("midlayer.", H, HEADS, norm_before_residual)
    weights["norm.weight"] = torch.full((H,), layer0_drafter.RMS)
    model = {"draft_vocab_size": V, "eagle_aux_hidden_state_layer_ids": [1, 2, 3], "num_aux_hidden_states": K}
    flags = {"norm_output": True, "norm_before_residual": norm_before_residual}
    if "Qwen3" in architecture:
        weights |= {f"midlayer.self_attn.{name}_norm.weight": torch.full((H // HEADS,), 2.0) for name in "qk"}
    if attention_bias:
        weights |= {f"midlayer.self_attn.{name}_proj.bias": torch.zeros(H) for name in "qkvo"}
    return _save(folder, _config(architecture, 1, **model, **flags, attention_bias=attention_bias, **more), weights)


def write_latent_drafter(folder: Path, *, norm_before_residual: bool) -> str:
    """The same with the latent attention of DeepSeek and Kimi."""
    K, config = 3, _deepseek_config()
    config |= {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",  # vLLM takes deepseek_v3 for MTP
        "num_hidden_layers": 1,
        "draft_vocab_size": V,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "num_aux_hidden_states": K,
        "norm_before_residual": norm_before_residual,
        "norm_output": True,
    }
    sizes = {field.name: config[field.name] for field in fields(Latent) if field.name != "heads"}
    weights = layer0_drafter.latent_layer0("midlayer.", H, Latent(HEADS, **sizes), norm_before_residual)
    weights |= {"fc.weight": layer0_drafter.fc_weight(K, H, C), "lm_head.weight": _next(torch.eye(V))}
    weights["norm.weight"] = torch.full((H,), layer0_drafter.RMS)
    return _save(folder, config, weights)


def write_dflash_drafter(folder: Path, one_gain: bool = False, layout: str | None = None, **more: object) -> str:
    """Its drafts are right only where K and V of its context are. Embedding and head are the target's. layout: of a
    quantized fc."""
    K = 3
    flash = {"target_layer_ids": list(range(K)), "mask_token_id": V - 1}
    config = _config("DFlashDraftModel", dflash_drafter.LAYERS, rope_theta=dflash_drafter.THETA, dflash_config=flash)
    weights = dflash_drafter.weights(H, HEADS, K, C, one_gain)
    return _save(folder, config | {"model_type": "qwen3"} | more, weights, {"fc": layout})


def fp8_config(layer: str) -> dict:
    """quantization_config of compressed-tensors for one layer: e4m3 with a scale for each row. On a CPU vLLM has no
    kernel for one scale per weight, nor, without AMX, for blocks."""
    e4m3 = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = e4m3 | {"strategy": "channel", "dynamic": False}
    activations = e4m3 | {"strategy": "token", "dynamic": True}
    group = {"targets": [f"re:.*{layer}$"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": [f"re:^(?!.*{layer}$).*$"],
    }


def fc_weight(K: int, gains: torch.Tensor, norm: str) -> torch.Tensor:
    """[H, K*H]: takes column c of the output from chunk c mod K and undoes its gain."""
    gains = torch.ones(K, H) if norm == "none" else gains
    picks = [torch.diag((torch.arange(H) % K == k).float() / gains[k]) for k in range(K)]
    return torch.cat(picks, 1)


def _deepseek_config(layers: int = 2) -> dict:
    """Of a DeepSeek V3 with one MTP layer. 576 is the only head width of vLLM's MLA on a CPU."""
    config = _config("DeepseekV3ForCausalLM", layers) | {
        "model_type": "deepseek_v3",
        "num_nextn_predict_layers": 1,
        "moe_intermediate_size": 64,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 8,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "q_lora_rank": 64,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
    }
    del config["head_dim"]
    return config


def write_deepseek(folder: Path) -> str:
    """Its weights are vLLM's dummy weights, the same in every run."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_deepseek_config(), indent=1))
    return str(folder)


def write_counting_deepseek(folder: Path, layout: str | None, layers: int = 2, **more: object) -> str:
    """Target and MTP layer count. eh_proj moves the input token's c * e_t back to t - 1; the MLP moves it forward again
    by adding a step of length c, negligible next to codes without their scale. layout: of a quantized eh_proj."""
    config = _deepseek_config(layers) | more
    heads, rank, rope = config["num_attention_heads"], config["kv_lora_rank"], config["qk_rope_head_dim"]
    nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
    attention = {
        "q_a_proj": torch.zeros(config["q_lora_rank"], H),
        "q_a_layernorm": torch.ones(config["q_lora_rank"]),
        "q_b_proj": torch.zeros(heads * (nope + rope), config["q_lora_rank"]),
        "kv_a_proj_with_mqa": torch.zeros(rank + rope, H),
        "kv_a_layernorm": torch.ones(rank),
        "kv_b_proj": torch.zeros(heads * (nope + value), rank),
        "o_proj": torch.zeros(H, heads * value),
    }
    step = (torch.eye(H).roll(1, 0) - torch.eye(H)) / C  # as in write_drafter
    weights = {"model.embed_tokens.weight": C * torch.eye(V), "model.norm.weight": torch.ones(H)}
    weights["lm_head.weight"] = _next(torch.eye(V))
    for i in range(config["num_hidden_layers"] + 1):
        layer = f"model.layers.{i}"
        weights |= {f"{layer}.self_attn.{name}.weight": weight.clone() for name, weight in attention.items()}
        weights |= {f"{layer}.mlp.{name}_proj.weight": torch.eye(H) for name in ("gate", "up")}
        weights[f"{layer}.mlp.down_proj.weight"] = torch.zeros(H, H)
        weights |= {f"{layer}.{name}.weight": torch.ones(H) for name in ("input_layernorm", "post_attention_layernorm")}
    weights[f"{layer}.mlp.down_proj.weight"] = step
    weights |= {f"{layer}.{name}.weight": torch.ones(H) for name in ("enorm", "hnorm", "shared_head.norm")}
    weights[f"{layer}.eh_proj.weight"] = torch.cat([torch.eye(H).roll(-1, 0), torch.zeros(H, H)], 1)
    weights[f"{layer}.embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    weights[f"{layer}.shared_head.head.weight"] = weights["lm_head.weight"].clone()
    return _save(folder, config, weights, {f"{layer}.eh_proj": layout})
