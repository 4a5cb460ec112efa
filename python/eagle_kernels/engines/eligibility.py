"""Whether a layer of an engine can run on the ops, asked before a plugin touches it; one log line per process for each
answer. (Whether a hook's target is what was recorded: `gates.py`.)

Nothing here imports an engine. `*_unsupported_reason` returns why a layer stays with the engine, None where it can run
on the ops.
"""

import logging
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from ..checks import DTYPES

_logged: set[str] = set()


def log_once(logger: logging.Logger, level: int, message: str) -> None:
    """Log a message the first time this process sees it: layers, steps and ranks repeat, their log lines do not."""
    if message not in _logged:
        _logged.add(message)
        logger.log(level, "eagle_kernels: %s", message, stacklevel=2)


def clear_logged() -> None:
    """Log everything anew; for tests."""
    _logged.clear()


def linear_unsupported_reason(
    linear: Any, unquantized: Collection[type] = (), *, bias: bool = False, column_shard: bool = False
) -> str | None:
    """Why an op cannot read the weight of a projection of the engine. Reads no data, so it may run at load.

    Args:
        linear: torch's nn.Linear, or a layer of the engine with input_size, output_size and quant_method.
        unquantized: the exact types of quant_method that leave the weight as it is; a subclass might not.
        bias: whether the op takes a bias.
        column_shard: whether the weight may be this rank's rows of a column-parallel layer, to be gathered afterwards.
    """
    if hasattr(linear, "base_layer"):
        return f"LoRA wraps it ({type(linear).__name__})"
    if type(linear) is nn.Linear:
        expected = (linear.out_features, linear.in_features)
    else:
        if type(method := getattr(linear, "quant_method", None)) not in unquantized:
            return f"its quant_method is {type(method).__name__}"
        columns = linear.output_size_per_partition if column_shard else linear.output_size
        expected = (columns, linear.input_size)
    weight = getattr(linear, "weight", None)
    if not isinstance(weight, Tensor):
        return "it has no weight"
    if weight.numel() == 0:
        return "its weight is packed for the engine's own CPU product"
    if weight.dtype not in DTYPES:
        return f"its weight is {weight.dtype}"
    if tuple(weight.shape) != expected:
        return f"its weight is a shard or a repacked copy: {tuple(weight.shape)} of {expected}"
    if weight.stride(-1) != 1:
        return f"its weight has strides {weight.stride()}"
    if not bias and getattr(linear, "bias", None) is not None:
        return "it has a bias"
    return None


def is_column_shard(linear: Any) -> bool:
    """Whether the layer holds this rank's columns of the output alone, which the engine gathers or passes on."""
    own = getattr(linear, "output_size_per_partition", None)
    return own is not None and own != linear.output_size


def norm_unsupported_reason(norm: nn.Module, known: Collection[type], dtype: torch.dtype) -> str | None:
    """Why an op cannot take over an RMSNorm: another class (another plugin's, perhaps), no weight, another dtype, or a
    norm of a part of the row, as vLLM's and SGLang's may be."""
    if getattr(norm, "variance_size_override", None) is not None:
        return f"its norm takes the variance of {norm.variance_size_override} columns only"
    if type(norm) not in known:
        return f"its norm is a {type(norm).__module__}.{type(norm).__qualname__}"
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, Tensor) or not getattr(norm, "has_weight", True):
        return "its norm has no weight"
    if weight.dtype not in (dtype, torch.float32):
        return f"its norm's weight is {weight.dtype}, and the layer is {dtype}"
    return None
