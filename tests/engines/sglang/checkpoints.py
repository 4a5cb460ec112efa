"""Models whose best accepted length is known: targets that count (t -> t + 1 mod V) and drafters that know it.

Every token t is a unit vector e_t of the hidden space, only the layers named here do anything, and one MLP turns e_t
into e_{t+1}. A drafter reads its token from one place only, so an engine that puts something wrong there loses every
draft: 1 accepted token a step instead of num_steps + 1.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from engines import dflash_drafter, layer0_drafter
from engines.quantized_layers import tensors_of

# Both are divisible by 1, 2 and 3 ranks.
H = 192
HEADS = 6
LAYERS = 7
LATENT = layer0_drafter.Latent(
    HEADS, q_lora_rank=64, kv_lora_rank=2 * H, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=H // HEADS
)


def eye(V: int, width: int = H) -> Tensor:
    """Row t is e_t."""
    return torch.eye(V, width)


def shift_mlp(V: int, scale: float, prefix: str, width: int) -> dict[str, Tensor]:
    """down(act(gate x) * up x) = scale * (e_{t+1} - e_t) for x = sqrt(width) e_t and any act with act(64) = 64."""
    root = width**0.5
    gate = torch.zeros(width, width)
    gate[:V, :V] = 64.0 / root
    up = torch.zeros(width, width)
    up[:V, :V] = torch.eye(V) / (64.0 * root) * scale
    step = torch.zeros(width, width)
    step[:V, :V] = torch.eye(V).roll(1, 0) - torch.eye(V)  # column t is e_{t+1} - e_t
    return {f"{prefix}.gate_proj.weight": gate, f"{prefix}.up_proj.weight": up, f"{prefix}.down_proj.weight": step}


def idle_layer(prefix: str, width: int, inputs: int, norms: tuple[str, ...], gain: float) -> dict[str, Tensor]:
    """A decoder layer whose attention and MLP add nothing."""
    zeros = torch.zeros(width, width)
    weights = {f"{prefix}.self_attn.{name}_proj.weight": torch.zeros(width, inputs) for name in "qkv"}
    weights |= {f"{prefix}.self_attn.o_proj.weight": zeros.clone()}
    weights |= {f"{prefix}.mlp.{name}_proj.weight": zeros.clone() for name in ("gate", "up", "down")}
    return weights | {f"{prefix}.{name}.weight": torch.full((width,), gain) for name in norms}


def save(
    folder: Path, config: dict, weights: dict[str, Tensor], dtype: torch.dtype, layouts: Mapping[str, str] | None = None
) -> str:
    """layouts: layer -> its `layout` for `tensors_of`, for quantized layers."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    weights = {name: weight.to(dtype) if weight.is_floating_point() else weight for name, weight in weights.items()}
    for layer, layout in (layouts or {}).items():
        weights |= tensors_of(layer, weights.pop(f"{layer}.weight"), layout)
    weights = {name: weight.contiguous() for name, weight in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def base_config(V: int, dtype: torch.dtype, width: int = H) -> dict:
    return {
        "hidden_size": width,
        "intermediate_size": width,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": width // HEADS,
        "vocab_size": V,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def llama_target(folder: Path, V: int, dtype: torch.dtype) -> str:
    """Its head counts."""
    config = base_config(V, dtype) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": LAYERS,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
    }
    weights = {"model.embed_tokens.weight": eye(V), "model.norm.weight": torch.ones(H)}
    weights["lm_head.weight"] = eye(V).roll(1, 0)  # row t + 1 is e_t
    for i in range(LAYERS):
        norms = ("input_layernorm", "post_attention_layernorm")
        weights |= idle_layer(f"model.layers.{i}", H, H, norms, 1.0)
    return save(folder, config, weights, dtype)


def gemma3_target(folder: Path, V: int, dtype: torch.dtype) -> str:
    """The MLP of its last layer counts; the head is the embedding. Gains are 1 + w, the embedding is scaled by
    sqrt(H), and a layer's MLP is normed before it is added: 1 + w = sqrt(2) keeps the stream at sqrt(H) e_t."""
    config = base_config(V, dtype) | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": LAYERS,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": H // HEADS,
        "sliding_window": 64,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "layer_types": ["full_attention"] * LAYERS,
    }
    weights = {"model.embed_tokens.weight": eye(V), "model.norm.weight": torch.zeros(H)}
    norms = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        weights |= idle_layer(layer, H, H, norms, 0.0)
        weights |= {f"{layer}.self_attn.{name}_norm.weight": torch.zeros(H // HEADS) for name in "qk"}
    last = f"model.layers.{LAYERS - 1}"
    weights |= shift_mlp(V, 1.0, f"{last}.mlp", H)
    weights[f"{last}.post_feedforward_layernorm.weight"] = torch.full((H,), 2.0**0.5 - 1)
    return save(folder, config, weights, dtype)


def gpt_oss_target(folder: Path, V: int, dtype: torch.dtype) -> str:
    """The Llama target with gpt-oss's layers: sinks, a sliding window, biases, and experts that add nothing."""
    experts, layers = 4, 5
    config = base_config(V, dtype) | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_hidden_layers": layers,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
        "num_local_experts": experts,
        "num_experts_per_tok": 2,
        "sliding_window": 64,
        "layer_types": [f"{'full' if i % 2 else 'sliding'}_attention" for i in range(layers)],
        "attention_bias": True,
        "swiglu_limit": 7.0,
    }
    weights = {"model.embed_tokens.weight": eye(V), "model.norm.weight": torch.ones(H)}
    weights["lm_head.weight"] = eye(V).roll(1, 0)
    norms = ("input_layernorm", "post_attention_layernorm")
    for i in range(layers):
        layer = f"model.layers.{i}"
        weights |= {name: weight for name, weight in idle_layer(layer, H, H, norms, 1.0).items() if ".mlp." not in name}
        weights |= {f"{layer}.self_attn.{name}_proj.bias": torch.zeros(H) for name in "qkvo"}
        weights |= {f"{layer}.self_attn.sinks": torch.zeros(HEADS)}
        sizes = {"router.weight": (experts, H), "router.bias": (experts,)}
        sizes |= {"experts.gate_up_proj": (experts, H, 2 * H), "experts.gate_up_proj_bias": (experts, 2 * H)}
        weights |= {f"{layer}.mlp.{name}": torch.ones(size) for name, size in sizes.items()}
        weights[f"{layer}.mlp.experts.down_proj"] = torch.zeros(experts, H, H)
        weights[f"{layer}.mlp.experts.down_proj_bias"] = torch.zeros(experts, H)
    return save(folder, config, weights, dtype)


@dataclass(frozen=True)
class Drafter:
    """reads: "aux" (a captured chunk, through fc), "embedding" (its own input token, through attention), "layer0" or
    "latent" (`layer0_drafter`, the second with the attention of DeepSeek and Kimi)."""

    reads: str = "aux"
    norm: str = "none"  # none, chunk, concat, both
    layer_ids: tuple[int, ...] = (0, 2, 3)
    chunk: int = 0  # which captured chunk names the token; the others are multiplied by zero
    width: int = H  # Hd; len(layer_ids) * H makes fc square
    stream_length: float = 1.0  # |captured|: 1 for the Llama target, sqrt(H) for Gemma
    layout: str = ""  # of a quantized fc
    whole: bool = False  # the decoder layer's projections are quantized too
    quantization: Mapping[str, object] | None = None  # quantization_config
    draft_V: int = 0  # size of its vocabulary, the first tokens in reverse order; d2t is their distance
    norm_output: bool = False

    def save(self, folder: Path, V: int, dtype: torch.dtype) -> str:
        K, Hd = len(self.layer_ids), self.width
        config = base_config(V, dtype, Hd) | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "rope_theta": 10000.0,
            "draft_vocab_size": self.draft_V or V,
            "fc_norm": self.norm in ("chunk", "both"),
            "norm_before_fc": self.norm in ("concat", "both"),
            "norm_output": self.norm_output or self.reads != "aux",
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(self.layer_ids), "use_aux_hidden_state": True},
        }
        if Hd != H:
            config["target_hidden_size"] = H
        if self.quantization:
            config["quantization_config"] = self.quantization
        norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        weights = idle_layer("midlayer", Hd, 2 * Hd, norms, 1.0)
        weights |= {"lm_head.weight": eye(V, Hd).roll(1, 0), "norm.weight": torch.ones(Hd)}
        weights |= {"fc.weight": torch.zeros(Hd, K * H)}
        if self.norm in ("chunk", "both"):
            weights |= {f"fc_norm.{k}.weight": torch.ones(H) for k in range(K)}
        if self.norm in ("concat", "both"):
            weights |= {"input_norm.weight": torch.ones(K * H)}
        if self.draft_V:
            weights["lm_head.weight"] = weights["lm_head.weight"][: self.draft_V].flip(0)
            weights["d2t"] = self.draft_V - 1 - 2 * torch.arange(self.draft_V)
        if Hd != H:
            weights["embed_tokens.weight"] = eye(V, Hd)
        if self.reads == "aux":
            # x = e_t for the token before the drafter's input token; the MLP steps to the input token, the head to the
            # one after it. After a norm, and in Gemma's scaled embedding, e_t has the length sqrt(H).
            length = self.stream_length if self.norm == "none" else H**0.5
            weights["fc.weight"][:V, self.chunk * H : self.chunk * H + V] = torch.eye(V) / length
            weights |= shift_mlp(V, 1.0, "midlayer.mlp", Hd)
        elif self.reads in ("layer0", "latent"):
            weights = {name: weight for name, weight in weights.items() if not name.startswith("midlayer.")}
            if self.reads == "layer0":
                weights |= layer0_drafter.layer0("midlayer.", H, HEADS)
            else:
                weights |= layer0_drafter.latent_layer0("midlayer.", H, LATENT)
                sizes = {name: size for name, size in asdict(LATENT).items() if name != "heads"}
                config |= {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "deepseek_v3"} | sizes
                # The only rotation of SGLang's latent attention on a CPU; the rotated columns are not used.
                yarn = {"factor": 1.0, "original_max_position_embeddings": 256, "mscale": 1.0, "mscale_all_dim": 1.0}
                config["rope_parameters"] = {"rope_type": "deepseek_yarn", "rope_theta": 10000.0} | yarn
            weights["fc.weight"] = layer0_drafter.fc_weight(K, H, self.stream_length)
            weights["norm.weight"] = torch.full((H,), layer0_drafter.RMS)
        else:
            # Each position attends to itself only, since its own key matches its query best; the head names the next
            # token. The state that the drafter passes to its next step is close to zero.
            config["head_dim"] = H
            heads = torch.zeros(HEADS * H, 2 * Hd)
            heads[:V, :V] = torch.eye(V)
            first = torch.zeros(Hd, HEADS * H)
            first[:V, :V] = torch.eye(V) / H**0.5
            attention = {"q_proj": 4 * heads, "k_proj": 4 * heads, "v_proj": heads, "o_proj": first}
            weights |= {f"midlayer.self_attn.{name}.weight": weight for name, weight in attention.items()}
            weights["norm.weight"] = torch.full((Hd,), 1e-3)
        quantized = ("fc.weight", "_proj.weight") if self.whole else ("fc.weight",)
        layers = [name.removesuffix(".weight") for name in weights if self.layout and name.endswith(quantized)]
        return save(folder, config, weights, dtype, dict.fromkeys(layers, self.layout))


def mimo_target(folder: Path, V: int, dtype: torch.dtype, layout: str = "") -> str:
    """The Llama target in Qwen2's layers, with an MTP layer in the same checkpoint: `input_proj` of [hidden, embedding]
    takes e_t from the hidden state, the MLP turns it into e_{t+1}, and the target's head names the token after that.

    layout: of a quantized `input_proj`.
    """
    config = base_config(V, dtype) | {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",  # transformers has no mimo
        "num_hidden_layers": LAYERS,
        "num_nextn_predict_layers": 1,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
    }
    weights = {"model.embed_tokens.weight": eye(V), "model.norm.weight": torch.ones(H)}
    weights["lm_head.weight"] = eye(V).roll(1, 0)
    norms = ("input_layernorm", "post_attention_layernorm")
    mtp = "model.mtp_layers.0"
    for layer in (*(f"model.layers.{i}" for i in range(LAYERS)), mtp):
        weights |= idle_layer(layer, H, H, norms, 1.0)
        weights |= {f"{layer}.self_attn.{name}_proj.bias": torch.zeros(H) for name in "qkv"}
    weights |= {f"{mtp}.{name}_layernorm.weight": torch.ones(H) for name in ("token", "hidden", "final")}
    weights |= shift_mlp(V, 1.0, f"{mtp}.mlp", H)
    weights[f"{mtp}.input_proj.weight"] = torch.cat([torch.eye(H) / H**0.5, torch.zeros(H, H)], 1)
    return save(folder, config, weights, dtype, {f"{mtp}.input_proj": layout} if layout else {})


@dataclass(frozen=True)
class MTPDrafter:
    """The MTP layer of `mimo_target`, which SGLang loads from the whole checkpoint."""

    layout: str = ""

    def save(self, folder: Path, V: int, dtype: torch.dtype) -> str:
        return mimo_target(folder, V, dtype, self.layout)


@dataclass(frozen=True)
class DFlashDrafter:
    """`dflash_drafter`: its drafts are right only where K and V of its context are. Embedding, head: the target's.

    layout: of a quantized fc, which also adds a thousandth of a wrong token from each other captured state: hidden_norm
    undoes a common factor, so the loss of the scales shows only if they differ.
    """

    layer_ids: tuple[int, ...] = (0, 2, 3)
    layout: str = ""

    def save(self, folder: Path, V: int, dtype: torch.dtype) -> str:
        config = base_config(V, dtype) | {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "num_hidden_layers": dflash_drafter.LAYERS,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "rope_theta": dflash_drafter.THETA,
            "block_size": 4,
            "dflash_config": {"target_layer_ids": list(self.layer_ids), "mask_token_id": V - 1},
        }
        weights = dflash_drafter.weights(H, HEADS, len(self.layer_ids), 1.0)
        if self.layout:
            right = weights["fc.weight"][:, :H]
            right[:, V:] = 0  # columns of no token, in one block with the next chunk's first columns
            wrong = right.roll(3, 0) / 1000
            weights["fc.weight"] = torch.cat([right, *[wrong] * (len(self.layer_ids) - 1)], 1)
        return save(folder, config, weights, dtype, {"fc": self.layout} if self.layout else {})
