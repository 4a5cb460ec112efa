"""Real transformers models with tiny seeded weights: one per family, with mixed layers (dense and MoE, windows, KV
sharing, linear attention), and gains that differ from their initial value."""

import torch
import transformers

VOCABULARY, H, LAYERS = 128, 64, 4

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": H,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_WINDOWS = ["sliding_attention", "full_attention"] * 2
_GEMMA4 = {"head_dim": 16, "global_head_dim": 16, "sliding_window": 4, "layer_types": _WINDOWS}
_GEMMA4 |= {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8}


def gemma3(**sizes: int) -> torch.nn.Module:
    windows = {"head_dim": 16, "sliding_window": 4, "layer_types": _WINDOWS}
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**(_SIZES | sizes), **windows))


def gemma3n() -> torch.nn.Module:
    own = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY, "laurel_rank": 8}
    sizes = _SIZES | own | {"head_dim": 16, "num_kv_shared_layers": 0, "activation_sparsity_pattern": None}
    return transformers.Gemma3nForCausalLM(transformers.Gemma3nTextConfig(**sizes))


def gemma4_moe() -> torch.nn.Module:
    experts = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
    config = transformers.Gemma4TextConfig(**_SIZES, **_GEMMA4, **experts, num_kv_shared_layers=0)
    return transformers.Gemma4ForCausalLM(config)


def gemma4_shared_kv() -> torch.nn.Module:
    config = transformers.Gemma4TextConfig(**_SIZES, **_GEMMA4, num_kv_shared_layers=2)
    return transformers.Gemma4ForCausalLM(config)


def deepseek_v3(**sizes: int) -> torch.nn.Module:
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    experts = _EXPERTS | {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    sizes = _SIZES | {"num_key_value_heads": 4} | sizes
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**sizes, **latent, **experts))


def deepseek_v4() -> torch.nn.Module:
    """With residual streams; its class does not report hidden states."""
    latent = {"q_lora_rank": 16, "o_lora_rank": 16, "o_groups": 2, "qk_rope_head_dim": 8, "head_dim": 32}
    experts = _EXPERTS | {"n_routed_experts": 4, "num_hash_layers": 1, "index_n_heads": 2, "index_head_dim": 16}
    return transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**_SIZES, **latent, **experts))


def step3p7_config(**more: object) -> object:
    experts = _EXPERTS | {"n_routed_experts": 4, "share_expert_dim": 16}
    layers = {"layer_types": _WINDOWS, "mlp_layer_types": ["dense", "dense", "sparse", "sparse"]}
    heads = {"head_dim": 16, "sliding_window": 4, "num_sliding_attention_heads": 2}
    return transformers.Step3p7TextConfig(**(_SIZES | experts | heads | layers | more))


def step3p7(**sizes: int) -> torch.nn.Module:
    return transformers.Step3p7TextModel(step3p7_config(**sizes))


def step3p7_with_mtp() -> torch.nn.Module:
    """The composite model with three MTP layers, whose entries in the lists follow those of the decoder's layers."""
    lists = {
        "layer_types": _WINDOWS + ["sliding_attention"] * 3,
        "mlp_layer_types": ["dense", "dense", "sparse", "sparse", "dense", "dense", "dense"],
    }
    text = step3p7_config(num_nextn_predict_layers=3, **lists)
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
    return transformers.Step3p7ForConditionalGeneration(
        transformers.Step3p7Config(text_config=text.to_dict(), vision_config=vision)
    )


def deepseek_v3_with_mtp() -> torch.nn.Module:
    return deepseek_v3(num_nextn_predict_layers=2)


def qwen3_next() -> torch.nn.Module:
    experts = _EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 16, "decoder_sparse_step": 1}
    linear = {"linear_num_value_heads": 2, "linear_num_key_heads": 2}
    linear |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    return transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**_SIZES, **experts, **linear, head_dim=16))


MODELS = {build.__name__: build for build in (gemma3, gemma4_moe, gemma4_shared_kv, deepseek_v3, step3p7, qwen3_next)}


def build(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return randomise(MODELS[name]()).bfloat16().eval()


def randomise(model: torch.nn.Module) -> torch.nn.Module:
    """Draws every weight, since MtpModel leaves some uninitialized; gains vary around their initial value."""
    for name, parameter in model.named_parameters():
        noise = torch.randn_like(parameter)
        parameter.data = parameter.data + 0.3 * noise if "norm" in name else 0.1 * noise
    return model
