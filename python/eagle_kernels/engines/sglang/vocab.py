"""A Gemma target's embedding and head, sharded for the drafter as the drafter pads its vocabulary over ranks.

SGLang's `_shard_weight` slices the full table by ceil(V / tp), which is the drafter's layout iff pad(V, P) - V < tp: a
Gemma table with one added token at tp 2 gives 131072 ids the wrong row, and some of them one past the slice's end. The
Gemma 4 multimodal wrapper hands every rank the full table. Here each rank gets the rows of its own shard: a view where
the layouts agree, as before, else a zero-padded copy, which is refreshed when the target's weights are reloaded (RL).
"""

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...vocab_shard import VocabShard, shard_vocab_weight
from ..eligibility import log_once
from ..gates import Target
from .hooks import LOGGER, Hook, leaving_to_sglang


@dataclass(frozen=True)
class _Copy:
    full: weakref.ref  # the target's parameter
    shard: VocabShard
    rows: weakref.ref  # what the drafter reads


_copies: list[_Copy] = []


def shard_for_draft(weight: Tensor, draft_embedding: nn.Module | None, vocab_size: int) -> Tensor | None:
    """This rank's rows of a full [V, H] table in the layout of the drafter's embedding; None where there is nothing to
    shard: a drafter without shards, or a weight that is a shard already."""
    from sglang.srt.distributed.utils import get_group_rank_size
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    if not isinstance(draft_embedding, VocabParallelEmbedding) or weight.shape[0] != vocab_size:
        return None
    # The drafter's own group: under DP attention it is smaller than the target's.
    tp_rank, tp_size = get_group_rank_size(draft_embedding.tp_group)
    if tp_size == 1:
        return None
    shard = VocabShard.build(
        draft_embedding.num_embeddings,
        tp_rank=tp_rank,
        tp_size=tp_size,
        org_num_embeddings=draft_embedding.org_vocab_size,
        padding_size=draft_embedding.padding_size,
    )
    if shard.rows != draft_embedding.num_embeddings_per_partition:
        message = f"SGLang pads the drafter to {draft_embedding.num_embeddings_per_partition} rows a rank, not to"
        log_once(LOGGER, logging.WARNING, f"vocab stays with SGLang: {message} {shard.rows}")
        return None
    for copy in _copies:  # one copy where the head is the embedding
        if copy.full() is weight and copy.shard == shard and (rows := copy.rows()) is not None:
            return rows
    rows = _rows(weight, shard)
    view = rows.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
    kind = "a view" if view else "a padded copy"
    log_once(LOGGER, logging.INFO, f"vocab: rank {tp_rank} of {tp_size} shares {kind} of {shard.rows} rows")
    if not view:
        _copies.append(_Copy(weakref.ref(weight), shard, weakref.ref(rows)))
    return rows


def _rows(weight: Tensor, shard: VocabShard) -> Tensor:
    # A drafter's vocabulary may be shorter than its target's (262144 of Gemma 3's 262208 ids) or longer.
    missing = shard.num_embeddings - weight.shape[0]
    full = weight.detach()[: shard.num_embeddings] if missing <= 0 else F.pad(weight.detach(), (0, 0, 0, missing))
    return shard_vocab_weight(full, shard)


def _shard_weight(
    original: Callable, model: Any, weight: Tensor, *, draft_embedding: nn.Module | None = None
) -> Tensor:
    rows = None
    with leaving_to_sglang("vocab"):
        rows = shard_for_draft(weight, draft_embedding, model.config.vocab_size)
    return original(model, weight, draft_embedding=draft_embedding) if rows is None else rows


def _get_embed_and_head_for_draft(model: Any, draft_embedding: nn.Module) -> tuple[Tensor, Tensor]:
    """The method that SGLang looks for and the Gemma 4 wrapper lacks; its head is its embedding."""
    embed, head = model.get_embed_and_head()
    rows = None
    with leaving_to_sglang("vocab"):
        rows = shard_for_draft(embed, draft_embedding, model.config.text_config.vocab_size)
    return (embed, head) if rows is None else (rows, rows)


@torch.no_grad()
def _refresh(result: object, *args: object, **kwargs: object) -> None:
    """After a target's load_weights: bring the copies up to date, in place."""
    for copy in list(_copies):
        full, rows = copy.full(), copy.rows()
        if full is None or rows is None:
            _copies.remove(copy)
        else:
            rows.copy_(_rows(full, copy.shard))


_MODELS = "sglang.srt.models"
_PARAMETERS = ("self", "weight", "draft_embedding")
_WRAPPER = f"{_MODELS}.gemma4_mm:Gemma4ForConditionalGeneration"

# No bodies: a hook returns the drafter's own layout, checked against its number of rows, however SGLang would slice.
HOOKS = (
    Hook(Target(f"{_MODELS}.gemma3_causal:Gemma3ForCausalLM._shard_weight", _PARAMETERS), "AROUND", _shard_weight),
    Hook(Target(f"{_MODELS}.gemma4_causal:Gemma4ForCausalLM._shard_weight", _PARAMETERS), "AROUND", _shard_weight),
    Hook(Target(f"{_WRAPPER}.get_embed_and_head_for_draft"), "ADD", _get_embed_and_head_for_draft),
    Hook(Target(f"{_MODELS}.gemma3_causal:Gemma3ForCausalLM.load_weights"), "AFTER", _refresh),
    Hook(Target(f"{_MODELS}.gemma3_mm:Gemma3ForConditionalGeneration.load_weights"), "AFTER", _refresh),
    Hook(Target(f"{_MODELS}.gemma4_causal:Gemma4ForCausalLM.load_weights"), "AFTER", _refresh),
    Hook(Target(f"{_WRAPPER}.load_weights"), "AFTER", _refresh),
)
