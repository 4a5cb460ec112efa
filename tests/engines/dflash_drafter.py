"""A DFlash drafter whose drafts are right where K and V of its context are, of a target that counts.

Each masked position attends to the context `DISTANCE` positions before it, by RoPE alone: queries and keys are the same
for every token, and only that distance lines them up. The value there names its token, t, and the output projection
moves it to t + DISTANCE - 1, whose successor the head names. Even tokens pass layer 0, odd ones layer 1.

So a key that is off by one position, that was not normed or got the gain of another layer, and a value of a state that
was not normed lose drafts: keys before their norm are a thousandth of what they are behind it and have other signs, in
each layer its own, and a value without hidden_norm is short beside the masked token's own embedding.
"""

import torch
from torch import Tensor

# At least one more than the draft tokens, and the shortest prompt has one fewer.
DISTANCE = 4
LAYERS = 2
THETA = 10000.0
# Columns that rotate by 1, 0.56, ... 0.1 a position (heads of 32): no other distance up to 60 is as good.
_PAIRS = 5
_LENGTH = 10.0  # of each: a key one position beside the right one is e^12 behind


def weights(H: int, heads: int, K: int, length: float, one_gain: bool = False) -> dict[str, Tensor]:
    """All but embedding and lm_head.

    length: of the target's states, one column each.  one_gain: k_norm has the same signs in every layer.
    """
    generator = torch.Generator().manual_seed(3)
    d = H // heads
    query, key = _aligned(d)
    gain = 0.5 + torch.rand(H, generator=generator).bfloat16().float()
    # 5 % of what hidden_norm makes of it, from the first captured state alone.
    fc = 0.05 * H**0.5 / length * torch.eye(H)
    tensors = {"fc.weight": torch.cat([fc, torch.zeros(H, (K - 1) * H)], 1), "hidden_norm.weight": gain}
    signs = torch.randn(d, generator=generator).sign()
    for layer in range(LAYERS):
        prefix = f"layers.{layer}."
        for name, wanted, size in (("q", query, 1.0), ("k", key, 1e-3)):
            tensors[f"{prefix}self_attn.{name}_norm.weight"] = signs * wanted
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = size * signs.repeat(heads).unsqueeze(1).expand(H, H)
        signs = signs if one_gain else -signs
        passes = torch.diag((torch.arange(H) % LAYERS == layer).float())
        tensors[f"{prefix}self_attn.v_proj.weight"] = torch.diag(1 / gain)
        tensors[f"{prefix}self_attn.o_proj.weight"] = 4 * passes.roll(DISTANCE - 1, 0)
        tensors |= {f"{prefix}mlp.{name}_proj.weight": torch.zeros(H, H) for name in ("gate", "up", "down")}
        tensors |= {f"{prefix}{name}.weight": torch.ones(H) for name in ("input_layernorm", "post_attention_layernorm")}
    return tensors | {"norm.weight": torch.ones(H)}


def _aligned(d: int) -> tuple[Tensor, Tensor]:
    """A query and a key in front of RoPE (NeoX), which line up where the key is DISTANCE positions before the query."""
    angles = DISTANCE * THETA ** (-torch.arange(0, d, 2) / d)
    used = _LENGTH * (torch.arange(d // 2) < _PAIRS)
    return torch.cat([used * angles.cos(), -used * angles.sin()]), torch.cat([used, torch.zeros(d // 2)])
