"""From the record of a call to the kernel of its plan: what every op with one kernel per backend does alike.

A record is the NamedTuple of an op's normalised arguments, in the order of its schema. It can `check` itself, which
words whatever is wrong, and compute itself in plain torch: `reference`.
"""

import functools
import importlib
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from .. import library
from ..dispatch import increment_version
from ..plan import COMPILED, Plan


class Primitive(Protocol):
    """A record that a compiled primitive takes."""

    def check(self) -> None:
        """Raise the sentence for what no kernel can take."""

    def for_primitive(self) -> tuple:
        """The arguments of the compiled primitive."""


class Record(Primitive, Protocol):
    def reference(self) -> None:
        """Plain torch, any device."""


def run(record: Record, plan: Plan, outputs: Sequence[Tensor]) -> None:
    """Write the record's outputs, of which autograd is told, by the single kernel that the plan names."""
    if plan.backend in COMPILED:
        run_primitive(record, plan.op)
    elif plan.backend == "triton":
        check(record, plan.op)
        triton_kernels(plan.op).run(record)
    else:
        record.check()
        record.reference()
    increment_version(outputs)


@functools.cache
def triton_kernels(op: str) -> Any:
    """The module of the op's Triton kernels, which launch by the compiled library where there is one. An import
    statement takes 0.7 us of each call."""
    launch: Any = importlib.import_module("..triton_kernels.launch", __package__)
    launch.launch_by_library = getattr(library.primitives, "launch_triton", None)
    return importlib.import_module(f"..triton_kernels.{op}", __package__)


def check(record: Primitive, op: str) -> None:
    """Raise the sentence for what no kernel can take, by the compiled checks where they are: 2 us, where those in
    Python take 10 to 60."""
    if library.unsupported_reason is not None:
        return record.check()
    try:  # as `run_primitive`, whose call takes 0.2 us more
        getattr(library.primitives, op + "_checks_out")(*record.for_primitive())
    except RuntimeError:
        record.check()
        raise


def run_primitive(record: Primitive, op: str, of: Primitive | None = None) -> None:
    """The compiled kernel, which checks the record itself; what it refuses, `check` words: that of the call which the
    record is a part `of`."""
    try:
        getattr(library.primitives, f"{op}_out")(*record.for_primitive())
    except RuntimeError:
        (record if of is None else of).check()
        raise  # not an argument: the device failed, or no such check exists in Python, which tests rule out
