"""What a call would run, and why."""

import functools
import importlib
import inspect
from typing import Any

from . import ops
from .checks import bind, error
from .ops import __all__ as _OPS
from .plan import Plan


@functools.cache
def _signature(op: str) -> inspect.Signature:
    return inspect.signature(getattr(ops, op))


@functools.cache
def _needed(op: str) -> tuple[str, ...]:
    """The arguments without which there is no plan."""
    parameters = inspect.signature(_module(op).plan).parameters.values()
    return tuple(each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD)


def _module(op: str) -> Any:
    return importlib.import_module(f".ops.{op}", __package__)


def explain(op: str, *args: object, **kwargs: object) -> Plan:
    """The plan of `op(*args, **kwargs)`, without running it: backend, method and the reason, printable.

    Args:
        op: the op's name, for example "norm_concat_linear".
        args, kwargs: those of the call. Tensors' values are not read: any with the same sizes, dtypes, devices and
            alignment have the same plan.

    Raises:
        ValueError: an op that does not exist.
        TypeError: an argument that the op does not have, or none where the plan depends on it.
        TypeError, ValueError: `norm_concat`, `norm_concat_linear`: as the op, but for `out`. The plan of the other ops
            depends on the device of the first argument, which alone is checked.
        RuntimeError: a backend forced by EAGLE_KERNELS_BACKEND that cannot run the call.

    >>> print(explain("norm_concat_linear", chunks, weight))
    norm_concat_linear: cpu/fused amx_bf16, because T=16 <= 768: one pass over the weight is the bound
    """
    if not isinstance(op, str) or op not in _OPS:
        raise error(ValueError, "explain", f"op is {op!r}", f"one of {_OPS}")
    signature = _signature(op)
    arguments = bind(op, signature, args, kwargs, partial=True).arguments
    needed = _needed(op)
    if missing := [name for name in needed if name not in arguments]:
        raise error(TypeError, op, f"{', '.join(missing)} is missing", " and ".join(needed), "the plan depends on it")
    return _module(op).plan(**arguments)
