"""The ops, one file each, and the reference computations beside them."""

from .add_rms_norm import add_rms_norm
from .capture_hidden import capture_hidden
from .norm_concat import norm_concat
from .norm_concat_linear import norm_concat_linear
from .vocab_parallel_embedding import vocab_parallel_embedding

__all__ = ["norm_concat_linear", "norm_concat", "capture_hidden", "vocab_parallel_embedding", "add_rms_norm"]
