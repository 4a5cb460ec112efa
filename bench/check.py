"""`check`: every op on every usable backend and instruction set against float64, on random calls.

A case is its op, seed and number: the same three give the same call on every machine. Row counts, widths, strides,
dtypes and all optional arguments are drawn; rows get different scales and some channels are outliers, as in real
residual streams.
"""

import argparse
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import eagle_kernels
from eagle_kernels import environment, ops
from eagle_kernels.plan import unsupported_reason

from . import cli_types
from .cli_types import Command
from .forced import forced, usable_isas
from .ops import entry_of
from .ops.draw import Draw, Expected, RandomCall
from .output import say, wrap

_LINE = "{op:<25}{backend:<10}{isa:<12}{worst:<20}{verdict}"


def make_case(op: str, seed: int, number: int) -> tuple[Draw, RandomCall]:
    """Case `number` of this op and seed: what was drawn for it, and the call."""
    draw = Draw(op, seed, number)
    return draw, entry_of(op).random_call(draw)


@dataclass(frozen=True)
class Outcome:
    """How the error of a case compares with its bound (inf where the result cannot be compared), and what is wrong."""

    ratio: float
    error: float
    bound: float
    text: str


@dataclass(frozen=True)
class Path:
    """Where cases run."""

    op: str
    backend: str
    isa: str | None


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    isas, op_names = environment.CPU_ISAS, ops.__all__
    add = parser.add_argument
    add("--seed", type=cli_types.number(0), default=0, help="of the random calls (default 0)")
    add("--cases", type=cli_types.number(1), default=40, help="calls per op and backend (default 40)")
    add("--op", type=cli_types.one_of("op", op_names), help="only this op")
    add("--backend", type=cli_types.one_of("backend", environment.BACKENDS), help="only this backend")
    add("--isa", type=cli_types.one_of("instruction set", isas), help="only this one, of the cpu backend")
    add("--case", type=cli_types.number(0), help="only the case of this number, as a repro names it")


def _run(arguments: argparse.Namespace) -> int:
    cases = arguments.cases if arguments.case is None else 1
    numbers = range(cases) if arguments.case is None else [arguments.case]
    say(f"random calls against float64, seed {arguments.seed}, {cases} for each line")
    say("worst: its relative RMS error / bound")
    say(_LINE.format(op="op", backend="backend", isa="cpu isa", worst="worst", verdict="calls"))
    failed = paths = 0
    for path in _paths(arguments):
        paths += 1
        with forced(path.backend, path.isa):
            failed += not _check_path(path, arguments.seed, numbers)
    if not paths:
        arguments.parser.error("nothing to check: no usable backend or instruction set is left, see above")
    return 1 if failed else 0


def _paths(arguments: argparse.Namespace) -> Iterator[Path]:
    backends = [arguments.backend] if arguments.backend else environment.BACKENDS
    for backend in backends:
        # The calls are made of CPU tensors; a backend for another device says so here.
        if (reason := unsupported_reason(backend, torch.device("cpu"))) is not None:
            say(wrap(f"{backend} is left out: {reason}"))
            continue
        isas = usable_isas(backend)
        if arguments.isa is not None:
            isas = [isa for isa in isas if isa == arguments.isa]
        for op in [arguments.op] if arguments.op else ops.__all__:
            yield from (Path(op, backend, isa) for isa in isas)


def _check_path(path: Path, seed: int, numbers: range | list[int]) -> bool:
    """Run the cases and print one line, and the worst case if any misses; returns whether all are right."""
    results = [(_run_case(path.op, seed, number), number) for number in numbers]
    worst, number = max(results, key=lambda result: result[0].ratio)
    misses = sum(result.ratio > 1 for result, _ in results)
    verdict = f"{misses} of {len(results)} FAIL" if misses else f"{len(results)} ok"
    error = "bit for bit" if worst.bound == 0 == worst.error else f"{worst.error:.2e} / {worst.bound:.2e}"
    fields = {"op": path.op, "backend": path.backend, "isa": path.isa or "-"}
    say(_LINE.format(**fields, worst=error, verdict=verdict))
    if misses:
        _print_repro(path, seed, number, worst)
    return not misses


def _print_repro(path: Path, seed: int, number: int, outcome: Outcome) -> None:
    draw, _ = make_case(path.op, seed, number)
    isa = f" --isa {path.isa}" if path.isa else ""
    say(wrap(f"case {number}: {outcome.text}", first="  "))
    say(wrap(f"{path.op} with {', '.join(f'{name}={value}' for name, value in draw.drawn.items())}", first="  "))
    say(f"  repro: eagle-kernels check --op {path.op} --backend {path.backend}{isa} --seed {seed} --case {number}")


def _run_case(op: str, seed: int, number: int) -> Outcome:
    """Run one case; its largest ratio of error and bound, inf for wrong bits, a raise or a write outside `out`."""
    _, call = _case(op, seed, number)
    for guarded in call.written:
        guarded.reset()
    try:
        results = getattr(eagle_kernels, op)(*call.arguments, **call.options)
    except Exception as raised:  # whatever a backend raises is a wrong result
        return Outcome(math.inf, math.inf, 0, f"raised {type(raised).__name__}: {raised}")
    if not all(guarded.is_intact() for guarded in call.written):
        return Outcome(math.inf, math.inf, 0, "memory beside an output was written")
    results = results if isinstance(results, tuple) else (results,)
    if op == "capture_hidden" and "sum_squares" in call.options:
        results = (*results, call.options["sum_squares"])
    outcomes = [_judge(expected, actual) for expected, actual in zip(call.expected, results, strict=True)]
    return max(outcomes, key=lambda outcome: outcome.ratio)


# Every backend and instruction set runs the same cases, and float64 is the slow part of a case.
_case = functools.cache(make_case)


def _judge(expected: Expected, actual: Tensor) -> Outcome:
    if actual.shape != expected.value.shape:
        got, wanted = tuple(actual.shape), tuple(expected.value.shape)
        return Outcome(math.inf, math.inf, 0, f"{expected.label} has shape {got}, expected {wanted}")
    error, bound = expected.error(actual), expected.bound or 0.0
    if error <= bound:
        return Outcome(error / bound if bound else 0.0, error, bound, "")
    # Not a plain comparison: an error of nan has to count as a miss.
    ratio = error / bound if bound and error < math.inf else math.inf
    return Outcome(ratio, error, bound, f"{expected.label} differs")


CHECK = Command(
    "Compare every op on every usable backend and instruction set with float64, on random calls.", _add_arguments, _run
)
