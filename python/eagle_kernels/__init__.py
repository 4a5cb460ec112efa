"""eagle-kernels: the input stage of speculative-decoding drafters as single kernels."""

from typing import TYPE_CHECKING

from . import ops
from .buffers import AuxHiddenStates, ChainedHiddenStates, rotate_token_ids
from .drafter_config import Eagle3Config, capture_layers
from .explain import explain
from .layers import Eagle3Projection, VocabParallelEmbedding
from .mtp_config import MTPConfig
from .mtp_projection import MTPProjection
from .ops import *  # noqa: F403
from .ops import store_context_kv as _store_context_kv  # noqa: F401  # a saved graph of ContextKV needs it registered
from .quantized_weight import QuantizedWeight, quantize
from .version import __version__
from .vocab_shard import VocabShard, shard_vocab_weight
from .warmup import warmup

if TYPE_CHECKING:
    from .context_kv import ContextKV, ContextKVConfig
    from .eagle3_qkv_projection import Eagle3QKVConfig, Eagle3QKVProjection
    from .mtp_streams import MTPStreamsConfig, MTPStreamsProjection
else:
    # The module of each name, imported when the name is first used.
    _LAZY = dict.fromkeys(("ContextKV", "ContextKVConfig"), "context_kv")
    _LAZY |= dict.fromkeys(("Eagle3QKVConfig", "Eagle3QKVProjection"), "eagle3_qkv_projection")
    _LAZY |= dict.fromkeys(("MTPStreamsConfig", "MTPStreamsProjection"), "mtp_streams")

    def __getattr__(name: str) -> object:
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(f".{_LAZY[name]}", __name__), name)

    def __dir__() -> list[str]:  # else help() and the API page leave out what is lazy
        return sorted({*globals(), *_LAZY})


# Type checkers understand this form, and only `ops` lists the ops.
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
    "Eagle3QKVConfig",
    "MTPConfig",
    "MTPStreamsConfig",
    "ContextKVConfig",
    "Eagle3Projection",
    "Eagle3QKVProjection",
    "MTPProjection",
    "MTPStreamsProjection",
    "ContextKV",
    "VocabParallelEmbedding",
    "AuxHiddenStates",
    "ChainedHiddenStates",
    "rotate_token_ids",
    "__version__",
]
