"""A DFlash drafter for a target that counts: its drafts are right exactly where K and V of its context are.

Each masked position attends to the context `DISTANCE` positions before it, by RoPE alone: queries and keys are the same
for every token, and only that distance lines them up. The value there names its token, t; the output projection moves
it to t + DISTANCE - 1, and the head names the successor of that. Layer 0 does so for even tokens, layer 1 for odd ones.

So drafts are lost if a key is off by one position, was not normed or got the gain of another layer, or if a value comes
from a state that was not normed: before the norm keys are a thousandth as large as after it and have other signs, which
differ by layer, and a value without hidden_norm is small next to the masked token's own embedding.
"""

import torch
from torch import Tensor

# At least one more than the number of draft tokens; the shortest prompt is one token shorter than this.
DISTANCE = 4
LAYERS = 2
THETA = 10000.0
# Columns that rotate by 1, 0.56, ... 0.1 a position (heads of 32): no other distance up to 60 is as good.
_PAIRS = 5
_LENGTH = 10.0  # of each: the attention weight one position off is smaller by e^12


def weights(H: int, heads: int, K: int, length: float, one_gain: bool = False) -> dict[str, Tensor]:
    """All weights but embedding and lm_head.

    length: of the target's states, one nonzero column each.  one_gain: k_norm has the same signs in every layer.
    """
    generator = torch.Generator().manual_seed(3)
    d = H // heads
    query, key = _aligned(d)
    gain = 0.5 + torch.rand(H, generator=generator).bfloat16().float()
    # Reads only the first captured state, at 5 % of the size that hidden_norm gives it.
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
    """A query and a key before RoPE (NeoX), which line up where the key is DISTANCE positions before the query."""
    angles = DISTANCE * THETA ** (-torch.arange(0, d, 2) / d)
    used = _LENGTH * (torch.arange(d // 2) < _PAIRS)
    return torch.cat([used * angles.cos(), -used * angles.sin()]), torch.cat([used, torch.zeros(d // 2)])
