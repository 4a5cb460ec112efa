"""A drafter's layer 0 whose attention hands on its input token, and takes its hidden state out of the residual.

Each position attends to itself alone: queries are keys, of one length, another direction for each token. Its value is
the normed embedding minus the normed hidden state times what makes that the residual. So the layer is right where both
halves of the projection are, in their order, each behind its own norm, and the residual is the one that the config asks
for; else the hidden state, which names another token and is longer, is what the head reads.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# RMS of every hidden state that the layer is given: fc's and, with norm_output, its own of the step before.
RMS = 4.0


def layer0(prefix: str, H: int, heads: int, norm_before_residual: bool = False) -> dict[str, Tensor]:
    """Weights of the layer, whose MLP adds nothing."""
    generator = torch.Generator().manual_seed(2)
    gains = {name: 0.5 + torch.rand(H, generator=generator).bfloat16().float() for name in ("input", "hidden")}
    directions = torch.randn(heads, H // heads, H, generator=generator)
    directions = 2 * F.normalize(directions, dim=1).reshape(H, H) / gains["input"]
    # The residual is the normed state itself, its gain included, or what it was before the norm.
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


def fc_weight(K: int, H: int, length: float) -> Tensor:
    """[H, K*H]: of captures of that length, from the first chunk alone, a state of `RMS` that names another token."""
    other = torch.eye(H).roll(H // 2, 0) * (RMS * H**0.5 / length)
    return torch.cat([other, torch.zeros(H, (K - 1) * H)], 1)
