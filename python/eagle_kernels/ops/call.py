"""Runs the record of a call on the kernel of its plan, alike for every op with one kernel per backend.

A record is the NamedTuple of an op's normalized arguments, in the order of its schema. Its `check` raises the error
message for whatever is wrong, and its `reference` computes the result in plain torch.
"""

import contextlib
import functools
import importlib
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .. import library
from ..dispatch import increment_version
from ..library import registered_ops
from ..plan import COMPILED, Plan
from .sources import Sources


class Primitive(Protocol):
    """A record that a compiled primitive takes."""

    def check(self) -> None:
        """Raise the error message for what no kernel supports."""

    def for_primitive(self) -> tuple:
        """The arguments of the compiled primitive."""


class Record(Primitive, Protocol):
    def reference(self) -> None:
        """Plain torch, on a CPU or on CUDA."""


def writing(*outputs: Tensor) -> contextlib.AbstractContextManager:
    """The mode in which torch's ops write these. They refuse an inference tensor outside of it; no kernel here does."""
    if not is_compiling() and any(out.is_inference() for out in outputs):  # Dynamo breaks the graph at the question
        return torch.inference_mode()
    return contextlib.nullcontext()


def copied(values: Tensor, out: Tensor) -> Tensor:
    with writing(out):
        return out.copy_(values)


def run(record: Record, plan: Plan, outputs: Sequence[Tensor]) -> None:
    """Write the record's outputs with the kernel that the plan names, and increment their versions for autograd."""
    if plan.backend in COMPILED:
        run_primitive(record, plan.op)
    elif plan.backend == "triton":
        check(record, plan.op)
        triton_kernels(plan.op).run(record)
    else:
        record.check()
        with writing(*outputs):
            record.reference()
    increment_version(outputs)


def call_registered(
    name: str, sources: Sources, following: tuple, out: Tensor | None, expected: tuple[str, int, str]
) -> Tensor:
    """The registered op `name`, which PyTorch sees, for arguments that are checked.

    following: the arguments behind the sources. expected: the op's name in messages, and the columns of its result with
    what they are, which `out` has to have.
    """
    matrices = sources.as_matrices()
    if out is None:
        result = getattr(registered_ops, name)(*matrices, *following)
        return result.squeeze(0) if sources.is_one_row else result
    op, columns, meaning = expected
    sources.check_out(op, out, columns, meaning)
    getattr(registered_ops, f"{name}_out")(*matrices, *following, out.unsqueeze(0) if sources.is_one_row else out)
    return out


@functools.cache
def triton_kernels(op: str) -> Any:
    """The module of the op's Triton kernels, which launch through the compiled library where there is one. An import
    statement in its place takes 0.7 us in each call."""
    launch: Any = importlib.import_module("..triton_kernels.launch", __package__)
    launch.launch_by_library = getattr(library.primitives, "launch_triton", None)
    return importlib.import_module(f"..triton_kernels.{op}", __package__)


def check(record: Primitive, op: str) -> None:
    """Raise the error message for what no kernel supports. The compiled checks, where there are any, take 2 us; those
    in Python take 10 to 60."""
    if library.unsupported_reason is not None:
        return record.check()
    try:  # as `run_primitive`, written out because calling it takes 0.2 us more
        getattr(library.primitives, op + "_checks_out")(*record.for_primitive())
    except RuntimeError:
        record.check()
        raise


def run_primitive(record: Primitive, op: str, of: Primitive | None = None) -> None:
    """Run the compiled kernel, which checks the record itself. Where it refuses, `check` raises the error message: the
    record's, or that of the call `of` which it is a part."""
    try:
        getattr(library.primitives, f"{op}_out")(*record.for_primitive())
    except RuntimeError:
        (record if of is None else of).check()
        raise  # not an argument: the device failed. Tests rule out that Python lacks a check
