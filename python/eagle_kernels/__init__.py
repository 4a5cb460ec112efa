"""eagle-kernels: the input stage of speculative-decoding drafters as single kernels."""

from . import ops
from .buffers import AuxHiddenStates, ChainedHiddenStates, rotate_token_ids
from .drafter_config import Eagle3Config, capture_layers
from .explain import explain
from .layers import Eagle3Projection, VocabParallelEmbedding
from .mtp_config import MTPConfig
from .mtp_projection import MTPProjection
from .ops import *  # noqa: F403
from .quantized_weight import QuantizedWeight, quantize
from .version import __version__
from .vocab_shard import VocabShard, shard_vocab_weight
from .warmup import warmup

# A form that type checkers read; the ops are named in `ops` alone.
__all__: list[str] = []
__all__ += ops.__all__
__all__ += [
    "explain",
    "warmup",
    "QuantizedWeight",
    "quantize",
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
