"""A one-layer EAGLE-3 drafter with chunk norms for a Gemma 3 target, made of the target's own blocks.

    x      = fc(cat(fc_norm.k(c_k)))       c_k: the target's captured boundary k at position i
    hidden = x + attention([input_layernorm(e), hidden_norm(x)])      e: the target's embedding of token i + 1
    hidden = hidden + mlp(post_attention_layernorm(hidden))
    logits = head(norm(hidden))            of token i + 2; the head is the target's

The next draft has `hidden` in place of x. Every norm has Gemma's gain 1 + w, those of fc included.
"""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, Gemma3TextConfig
from transformers.models.gemma3.modeling_gemma3 import (
    Gemma3Attention,
    Gemma3MLP,
    Gemma3RMSNorm,
    Gemma3RotaryEmbedding,
)


class TrainableInputStage(nn.Module):
    """x in plain torch, with a gradient; `eagle_kernels.Eagle3Projection` reads the same weights and has none."""

    def __init__(self, num_chunks: int, config: Gemma3TextConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.fc = nn.Linear(num_chunks * size, size, bias=False)
        self.fc_norm: Any = nn.ModuleList(Gemma3RMSNorm(size, config.rms_norm_eps) for _ in range(num_chunks))

    def forward(self, packed: Tensor) -> Tensor:
        """[T, H] from [T, K*H]."""
        chunks = packed.chunk(len(self.fc_norm), -1)
        normed = [
            F.rms_norm(chunk, chunk.shape[-1:], 1 + norm.weight, norm.eps)
            for chunk, norm in zip(chunks, self.fc_norm, strict=True)
        ]
        return self.fc(torch.cat(normed, -1))


class DraftLayer(nn.Module):
    """All of the drafter after its input stage."""

    def __init__(self, target_config: Gemma3TextConfig) -> None:
        super().__init__()
        config = copy.deepcopy(target_config)
        config.layer_types = ["full_attention"]
        config._attn_implementation = "sdpa"
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = Gemma3RMSNorm(size, eps)
        self.hidden_norm = Gemma3RMSNorm(size, eps)
        self.self_attn = Gemma3Attention(config, layer_idx=0)
        for name in ("q_proj", "k_proj", "v_proj"):
            width = getattr(self.self_attn, name).out_features
            setattr(self.self_attn, name, nn.Linear(2 * size, width, bias=False))
        self.post_attention_layernorm = Gemma3RMSNorm(size, eps)
        self.mlp = Gemma3MLP(config)
        self.norm = Gemma3RMSNorm(size, eps)
        self.rotary = Gemma3RotaryEmbedding(config)

    def forward(
        self, x: Tensor, embeds: Tensor, positions: Tensor, cache: Cache, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(norm(hidden), hidden), both [B, T, H].

        Args:
            x, embeds: [B, T, H].  positions: [1, T].
            cache: the keys and values of these rows are appended to it.
            mask: bool [T, cached + T], true where a row may attend.
        """
        attended, _ = self.self_attn(
            torch.cat([self.input_layernorm(embeds), self.hidden_norm(x)], -1),
            self.rotary(x, positions, "full_attention"),
            mask[None, None],
            cache,  # by position, as in decode.py
        )
        hidden = x + attended
        hidden = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return self.norm(hidden), hidden
