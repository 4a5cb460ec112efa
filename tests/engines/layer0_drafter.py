"""A drafter's layer 0 whose attention passes its input token on and subtracts its hidden state from the residual.

Each position attends to itself alone: queries equal keys, with one length and a different direction for each token. The
value is the normed embedding minus the normed hidden state, scaled to equal the residual. So the layer is right only if
both halves of the projection come in their order, each after its own norm, and the residual is the one that the config
asks for; otherwise the head reads the hidden state, which names another token and is longer.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# RMS of every hidden state that the layer gets: fc's output and, with norm_output, its own output of the step before.
RMS = 4.0


def layer0(prefix: str, H: int, heads: int, norm_before_residual: bool = False) -> dict[str, Tensor]:
    """Weights of the layer, whose MLP adds nothing."""
    generator = torch.Generator().manual_seed(2)
    gains = {name: 0.5 + torch.rand(H, generator=generator).bfloat16().float() for name in ("input", "hidden")}
    directions = torch.randn(heads, H // heads, H, generator=generator)
    directions = 2 * F.normalize(directions, dim=1).reshape(H, H) / gains["input"]
    # The residual is the normed state, gain included, or the state before the norm.
    taken_out = torch.eye(H) if norm_before_residual else torch.diag(RMS / gains["hidden"])
    weights = {f"{prefix}self_attn.{name}_proj.weight": torch.cat([directions, torch.zeros(H, H)], 1) for name in "qk"}
    weights[f"{prefix}self_attn.v_proj.weight"] = torch.cat([torch.diag(1 / gains["input"]), -taken_out], 1)
    weights[f"{prefix}self_attn.o_proj.weight"] = torch.eye(H)
    weights |= {f"{prefix}mlp.{name}_proj.weight": torch.zeros(H, H) for name in ("gate", "up", "down")}
    weights[f"{prefix}post_attention_layernorm.weight"] = torch.ones(H)
    return weights | {
        f"{prefix}input_layernorm.weight": gains["input"],
        f"{prefix}hidden_norm.weight": gains["hidden"],
    }


@dataclass(frozen=True)
class Latent:
    """The sizes of latent attention (DeepSeek's config)."""

    heads: int
    q_lora_rank: int
    kv_lora_rank: int  # at least 2*H
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int  # H / heads


def latent_layer0(prefix: str, H: int, sizes: Latent, norm_before_residual: bool = False) -> dict[str, Tensor]:
    """The layer with latent attention: the latent holds both normed states, so its own norm is known, and its value is
    that of `layer0`. No column rotates, and all heads have the same keys."""
    weights = layer0(prefix, H, sizes.heads, norm_before_residual)
    weights = {name: weight for name, weight in weights.items() if "self_attn" not in name}
    of_input, of_hidden = (1 / weights[f"{prefix}{name}.weight"] for name in ("input_layernorm", "hidden_norm"))
    rank, nope, rope, value = sizes.kv_lora_rank, sizes.qk_nope_head_dim, sizes.qk_rope_head_dim, sizes.v_head_dim
    latent = torch.zeros(rank + rope, 2 * H)
    latent[:H, :H], latent[H : 2 * H, H:] = torch.diag(of_input), torch.diag(of_hidden)
    # Two columns of the latent are equal, the others zero.
    length = (rank / 2) ** 0.5
    residual = torch.diag(1 / of_hidden) if norm_before_residual else RMS * torch.eye(H)
    values = torch.cat([torch.eye(H), -residual, torch.zeros(H, rank - 2 * H)], 1) * (H**0.5 / length)
    directions = F.normalize(torch.randn(nope, H, generator=torch.Generator().manual_seed(4)), dim=0)
    of_heads = torch.zeros(sizes.heads, nope + value, rank)
    of_heads[:, :nope, :H], of_heads[:, nope:] = 3 * directions, values.view(sizes.heads, value, rank)
    queries = torch.zeros(sizes.heads, nope + rope, sizes.q_lora_rank)
    queries[:, :nope, :nope] = 3 * torch.eye(nope)
    attention = {
        "q_a_proj": F.pad(directions * of_input, (0, H, 0, sizes.q_lora_rank - nope)),
        "q_a_layernorm": torch.ones(sizes.q_lora_rank),
        "q_b_proj": queries.flatten(0, 1),
        "kv_a_proj_with_mqa": latent,
        "kv_a_layernorm": torch.ones(rank),
        "kv_b_proj": of_heads.flatten(0, 1),
        "o_proj": torch.eye(H),
    }
    return weights | {f"{prefix}self_attn.{name}.weight": weight for name, weight in attention.items()}


def fc_weight(K: int, H: int, length: float) -> Tensor:
    """[H, K*H]: makes of the first captured chunk, of that length, a state of `RMS` that names another token."""
    other = torch.eye(H).roll(H // 2, 0) * (RMS * H**0.5 / length)
    return torch.cat([other, torch.zeros(H, (K - 1) * H)], 1)
