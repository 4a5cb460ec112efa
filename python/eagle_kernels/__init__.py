"""eagle-kernels: the input stage of speculative-decoding drafters as single kernels."""

from .ops import add_rms_norm, capture_hidden, norm_concat, norm_concat_linear, vocab_parallel_embedding
from .version import __version__
from .vocab_shard import VocabShard, shard_vocab_weight

__all__ = [
    "norm_concat_linear",
    "norm_concat",
    "capture_hidden",
    "vocab_parallel_embedding",
    "add_rms_norm",
    "VocabShard",
    "shard_vocab_weight",
    "__version__",
]
