"""What DFlash lacks on a CPU, in plain torch. SGLang refuses DFlash there by name; its NPU path runs here too.

A test tool, never installed. Everything else is SGLang's: worker, draft block, context K and V, pool, verification.
"""

import sys
import types

import torch
import torch.nn.functional as F
from torch import Tensor


class _Platform:
    """A platform of another package, which SGLang asks whether DFlash is supported."""

    def is_out_of_tree(self) -> bool:
        return True

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return True

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return True


def _table_qk_norm_rope(
    qkv: Tensor,
    positions: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin_cache: Tensor,
    num_q_heads: int,
    num_k_heads: int,
    head_dim: int,
    eps: float,
) -> None:
    """In place: q and k of the draft block normed, rounded and rotated (NeoX)."""
    cos, sin = cos_sin_cache[positions].float().unsqueeze(1).chunk(2, -1)
    heads = qkv[:, : (num_q_heads + num_k_heads) * head_dim].view(-1, num_q_heads + num_k_heads, head_dim)
    for of_kind, weight in zip(heads.split([num_q_heads, num_k_heads], 1), (q_weight, k_weight), strict=True):
        normed = F.rms_norm(of_kind.float(), (head_dim,), weight.float(), eps).to(qkv.dtype).float()
        first, second = normed.chunk(2, -1)
        of_kind.copy_(torch.cat([first * cos - second * sin, second * cos + first * sin], -1))


def let_it_run() -> None:
    from sglang.srt.arg_groups import choices, speculative_hook
    from sglang.srt.speculative.dflash_info import DFlashVerifyInput

    speculative_hook.current_platform = _Platform()
    choices.add_draft_attention_backend_choices(["intel_amx"])
    DFlashVerifyInput.tree_topk = 1  # that backend reads it from EAGLE's input: a chain, not a tree
    torch.Tensor.record_stream = lambda self, stream: None  # a CPU has no streams
    kernel = types.ModuleType("sglang.kernels.ops.attention.table_qk_norm_rope")
    kernel.table_qk_norm_rope_ = _table_qk_norm_rope
    sys.modules[kernel.__name__] = kernel
