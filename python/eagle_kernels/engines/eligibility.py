"""What every engine plugin asks before it touches an engine: is this version known, is the hook's target what it was,
may this layer run on the ops; and one log line per process for each answer.

Nothing here imports an engine. `*_unsupported_reason` says why a layer stays with the engine; None where it runs on the
ops.
"""

import importlib
import inspect
import logging
from collections.abc import Callable, Collection, Sequence
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


def version_unsupported_reason(engine: str, version: str, first: str, last: str) -> str | None:
    """Why the hooks, written against engine versions first to last ("0.32" to "0.33"), do not suit this one.

    As many numbers count as first and last have: "0.5.23" to "0.5.23" is one patch release.
    """
    if _release(first) <= _release(version, first.count(".") + 1) <= _release(last):
        return None
    return f"{engine} {version} is none of the versions the hooks were written for, {first} to {last}"


def _release(version: str, length: int | None = None) -> tuple[int, ...]:
    """The leading numbers of a version; (-1,) where it has fewer, such as a build from a bare checkout."""
    numbers = version.split(".")[:length]
    if len(numbers) < (length or 0) or not all(number.isdigit() for number in numbers):
        return (-1,)
    return tuple(map(int, numbers))


class TargetError(Exception):
    """A hook's target is gone or has changed; the message names it."""


def find_target(target: str, parameters: Sequence[object] | None = None) -> tuple[Any, str, Any]:
    """(owner, name, value) of "package.module:Class.attribute"; imports the module.

    Args:
        target: where the engine keeps what a hook replaces.
        parameters: the names the function has to take, `self` included, `...` at the end for any more; None checks
            nothing.

    Raises:
        TargetError: the module, the attribute or the parameters are not what the hook was written for.
    """
    module, _, path = target.partition(":")
    try:
        owner: Any = None
        value: Any = importlib.import_module(module)
        for name in path.split("."):
            owner, value = value, getattr(value, name)
    except (ImportError, AttributeError) as failure:
        raise TargetError(f"{target} is not there ({failure})") from failure
    if parameters is not None:
        check_parameters(target, value, parameters)
    return owner, name, value


def check_parameters(target: str, function: Callable, parameters: Sequence[object]) -> None:
    """Raise TargetError where a function takes other parameters than a hook passes on."""
    found, expected = list(inspect.signature(function).parameters), list(parameters)
    if expected[-1] is ...:
        expected.pop()
        found = found[: len(expected)]
    if found != expected:
        raise TargetError(f"{target} takes {found}, and the hook was written for {expected}")


def linear_unsupported_reason(
    linear: Any, unquantized: Collection[type] = (), *, bias: bool = False, column_shard: bool = False
) -> str | None:
    """Why an op cannot read the weight of a projection of the engine. Reads no data, so it may run at load.

    Args:
        linear: torch's nn.Linear, or a layer of the engine with input_size, output_size and quant_method.
        unquantized: the exact types of quant_method that leave the weight as it is; a subclass may not.
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


def norm_unsupported_reason(norm: nn.Module, known: Collection[type], dtype: torch.dtype) -> str | None:
    """Why an op cannot take over an RMSNorm: another class (another plugin's, perhaps), no weight, another dtype."""
    if type(norm) not in known:
        return f"its norm is a {type(norm).__module__}.{type(norm).__qualname__}"
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, Tensor):
        return "its norm has no weight"
    if weight.dtype not in (dtype, torch.float32):
        return f"its norm's weight is {weight.dtype}, and the layer is {dtype}"
    return None
