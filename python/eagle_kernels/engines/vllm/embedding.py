"""VocabParallelEmbedding of vLLM on `vocab_parallel_embedding`, where vLLM has no fused op of its own: all but CUDA.

There vLLM's lookup in a shard is a compare-and-shift chain, a gather and a masked fill; here it is one kernel. A table
on one rank is a plain gather in both, and stays with vLLM.
"""

import logging
from typing import Any

import torch
from torch import Tensor

from ...checks import DTYPES
from ...ops import vocab_parallel_embedding
from ...vocab_shard import VocabShard
from ..eligibility import log_once
from ..gates import Target
from ..projection import check_backend
from . import LOGGER
from .registry import BOTH, leaving_to_vllm

NAME = "VocabParallelEmbedding"
# `forward` is replaced as a whole.
FORWARD = Target(
    f"vllm.model_executor.layers.vocab_parallel_embedding:{NAME}.forward",
    ("self", "input_"),
    {"a3b00bb42850db7e": BOTH},
)
REGISTERED = Target("vllm.model_executor.custom_op:op_registry_oot")


def register() -> None:
    VocabParallelEmbedding, _, _ = FORWARD.find()
    other = REGISTERED.find()[2].get(NAME)
    if other is None:
        replacement = type(NAME, (ShardLookup, VocabParallelEmbedding), {"__module__": __name__})
        VocabParallelEmbedding.register_oot(replacement, name=NAME)
    elif not issubclass(other, ShardLookup):
        message = f"{NAME} stays with {other.__module__}.{other.__qualname__}, which another plugin registered"
        log_once(LOGGER, logging.WARNING, message)


_Base: Any = object  # vLLM's class, which has no types here


class ShardLookup(_Base):
    """Mixed in before vLLM's class, whose constructor, loader and LoRA handling stay."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.shard = None
        with leaving_to_vllm(NAME):
            shard, unsupported = _shard(self)
            if shard is not None:
                _probe(self.weight.data, shard)
            self.shard = shard
            message = f"stays with vLLM: {unsupported}" if unsupported else "runs vocab_parallel_embedding"
            log_once(LOGGER, logging.INFO, f"{NAME} {self.num_embeddings} x {self.embedding_dim} {message}")

    def forward(self, input_: Tensor) -> Tensor:
        if self.shard is None:
            return super().forward(input_)
        from vllm.distributed import tensor_model_parallel_all_reduce

        rows = vocab_parallel_embedding(input_, self.weight.data, self.shard)
        if not self.reduce_results:
            return rows
        group = self.parallel_group
        return tensor_model_parallel_all_reduce(rows) if group is None else group.all_reduce(rows)


def _probe(table: Tensor, shard: VocabShard) -> None:
    """Look up one id, so that a failure shows here."""
    check_backend("vocab_parallel_embedding", table.device)
    vocab_parallel_embedding(torch.zeros(1, dtype=torch.int64, device=table.device), table, shard)


def _shard(layer: Any) -> tuple[VocabShard | None, str | None]:
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    if layer.tp_size == 1:
        return None, "one rank holds the table"
    if getattr(layer, "use_fused_embedding", False):
        return None, "vLLM has a fused op for it here"
    if type(layer.quant_method) is not UnquantizedEmbeddingMethod:
        return None, f"its quant_method is {type(layer.quant_method).__name__}"
    if layer.params_dtype not in DTYPES:
        return None, f"its weight is {layer.params_dtype}"
    shard = VocabShard.build(
        layer.num_embeddings,
        tp_rank=layer.tp_rank,
        tp_size=layer.tp_size,
        org_num_embeddings=layer.org_vocab_size,
        padding_size=layer.padding_size,
    )
    theirs = layer.shard_indices
    begins_and_ends = (
        theirs.org_vocab_start_index,
        theirs.org_vocab_end_index,
        theirs.added_vocab_start_index,
        theirs.added_vocab_end_index,
        theirs.num_org_elements_padded,
    )
    ours = (shard.org_begin, shard.org_end, shard.added_begin, shard.added_end, shard.added_row)
    if begins_and_ends != ours or layer.num_embeddings_per_partition != shard.rows:
        return None, f"its shard is {theirs}, and the op expects {shard}"
    return shard, None
