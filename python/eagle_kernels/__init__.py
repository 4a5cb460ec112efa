"""eagle-kernels: the input stage of speculative-decoding drafters as single kernels."""

from .buffers import AuxHiddenStates, ChainedHiddenStates, rotate_token_ids
from .drafter_config import Eagle3Config, capture_layers
from .explain import explain
from .layers import Eagle3Projection, VocabParallelEmbedding
from .mtp_config import MTPConfig
from .mtp_projection import MTPProjection
from .ops import add_rms_norm, capture_hidden, norm_concat, norm_concat_linear, vocab_parallel_embedding
from .version import __version__
from .vocab_shard import VocabShard, shard_vocab_weight
from .warmup import warmup

__all__ = [
    "norm_concat_linear",
    "norm_concat",
    "capture_hidden",
    "vocab_parallel_embedding",
    "add_rms_norm",
    "explain",
    "warmup",
    "VocabShard",
    "shard_vocab_weight",
    "capture_layers",
    "Eagle3Config",
    "MTPConfig",
    "Eagle3Projection",
    "MTPProjection",
    "VocabParallelEmbedding",
    "AuxHiddenStates",
    "ChainedHiddenStates",
    "rotate_token_ids",
    "__version__",
]
