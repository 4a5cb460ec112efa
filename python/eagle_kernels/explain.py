"""What a call would run, and why."""

import functools
import importlib
import inspect

from . import ops
from .checks import error
from .ops import __all__ as _OPS
from .plan import Plan


@functools.cache
def _parameters(op: str) -> tuple[str, ...]:
    return tuple(inspect.signature(getattr(ops, op)).parameters)


def explain(op: str, *args: object, **kwargs: object) -> Plan:
    """The plan of `op(*args, **kwargs)`, without running it: backend, method and the reason, printable.

    Args:
        op: the op's name, for example "norm_concat_linear".
        args, kwargs: those of the call. Tensors' values are not read: any with the same sizes, dtypes, devices and
            alignment have the same plan.

    Raises:
        ValueError: an op that does not exist.
        TypeError: an argument that the op does not have.
        RuntimeError: a backend forced by EAGLE_KERNELS_BACKEND that cannot run the call.

    >>> print(explain("norm_concat_linear", chunks, weight))
    norm_concat_linear: cpu/fused amx_bf16, because T=16 <= 512: one pass over the weight is the bound
    """
    if op not in _OPS:
        raise error(ValueError, "explain", f"op is {op!r}", f"one of {_OPS}")
    known = _parameters(op)
    if unknown := [name for name in kwargs if name not in known]:
        raise error(TypeError, op, f"{', '.join(unknown)} is no argument", f"some of {list(known)}")
    return importlib.import_module(f".ops.{op}", __package__).plan(*args, **kwargs)
