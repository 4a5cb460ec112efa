"""A row of the benchmark: its data in rotating copies, the calls to time, what their results must be, and the check
that no time is printed for a result that is wrong."""

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import eagle_kernels
from eagle_kernels.model_shapes import InputStage
from eagle_kernels.plan import Plan

from .accuracy import absolute_bound, baseline_bound, error_bound, relative_rms
from .baselines import compiled
from .forced import forced
from .measure import Call, Footprint, Traffic, Variant, is_ours

DENSE = "dense"

# Checking every row in float64 would take longer than the measurement; all rows of a call are computed alike.
_CHECKED_ROWS = 64
_RANDOM_BLOCK = 1 << 22


@dataclass(frozen=True)
class Row:
    """Sizes, dtype and norms of one row of the table, from a preset, and the device it runs on."""

    op: str
    preset: str
    stage: InputStage
    norm: str
    V: int
    T: int
    dtype: torch.dtype
    device: str = "cpu"
    weight: str = DENSE  # or a format of QuantizedWeight

    @property
    def width(self) -> int:
        return self.stage.K * self.stage.H

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.") + (f" x {self.weight}" if self.weight != DENSE else "")
        return f"{self.op} {self.preset}:{self.stage.kind} T={self.T} {dtype}"


class Workload(ABC):
    """Data and calls of one row. `chain` and `chain_arguments` are the eager baseline, a list of arguments per copy;
    `op_arguments` are those of the public op."""

    chain: Callable[..., Any]  # the engines' way
    sizes: tuple[str, ...]  # the op's, out of those that every record has
    forms: tuple[str, ...] = ("op",)
    baselines: tuple[str, ...] = ("eager", "compile")
    exact: tuple[bool, ...] = (False,)  # per output, whether the bits have to be those of the truth

    def __init__(self, row: Row, cache_bytes: int = 0) -> None:
        self.row = row
        self.cache_bytes = cache_bytes
        self.item = torch.empty((), dtype=row.dtype).element_size()
        self.out_rows = row.T
        self.chain_arguments: Sequence[tuple] = []
        self.op_arguments: Sequence[tuple[tuple, dict]] = []

    @abstractmethod
    def footprint(self, names: Sequence[str]) -> Footprint:
        """Bytes that the named variants need."""

    @abstractmethod
    def traffic(self) -> Traffic:
        """Bytes that any implementation has to read and to write in one call."""

    @abstractmethod
    def allocate(self, copies: int) -> None:
        """Random inputs and poisoned outputs."""

    @abstractmethod
    def truth(self, copy: int, rows: Tensor) -> list[Tensor]:
        """Each output's rows by the formula: in float64, or in the row's dtype where the bits have to be right."""

    @staticmethod
    def no_stage_reason(stage: InputStage) -> str | None:
        """Why the op has no part in a stage; None where it has one."""
        return None

    def unsupported_reason(self, name: str) -> str | None:
        """Why there is no column of this name for the row; None where there is one."""
        form = name.partition(":")[0]
        if form == "eager-out" and self.row.device != "cpu":
            return "torch's caching allocator on a GPU gives eager the same blocks again: it allocates nothing"
        if form in self.forms or form in self.baselines:
            return None
        return f"{self.row.op} has no such form" if is_ours(name) else "it computes another op"

    def plan(self) -> Plan:
        """What runs the op, and why."""
        arguments, options = self.op_arguments[0]
        return eagle_kernels.explain(self.row.op, *arguments, **options)

    def flops(self) -> int:
        """Of the product, where there is one."""
        return 0

    def variant(self, name: str) -> Variant:
        """Build the column of this name."""
        form, _, backend = name.partition(":")
        call, copies = self._call(form)
        return Variant(name, call, copies, self._on(backend) if backend else contextlib.nullcontext)

    def _call(self, name: str) -> tuple[Call, int]:
        arguments = self.chain_arguments
        if name == "op":
            function, calls = getattr(eagle_kernels, self.row.op), self.op_arguments

            def call(copy: int) -> object:
                positional, options = calls[copy]
                return function(*positional, **options)

            return call, len(calls)
        if name == "eager":
            return lambda copy: self.chain(*arguments[copy]), len(arguments)
        if name == "eager-out":
            return self._preallocated(), len(arguments)
        if name == "compile":
            return compiled(self.chain, arguments), len(arguments)
        raise AssertionError(f"{self.row.op} has no {name}")

    def _preallocated(self) -> Call:
        """The chain with outputs and intermediates in static memory, for ops that have `eager-out`."""
        raise AssertionError(f"{self.row.op} has no eager-out")

    def _on(self, backend: str) -> Callable[[], contextlib.AbstractContextManager]:
        @contextlib.contextmanager
        def active() -> Iterator[None]:
            with forced(backend):
                self.plan()  # forcing empties the plan cache, and the timed call should not pay for filling it
                yield

        return active

    def checked_rows(self) -> Tensor:
        count = min(self.out_rows, _CHECKED_ROWS)
        return torch.linspace(0, self.out_rows - 1, count).round().long().to(self.row.device)

    def poisoned(self, copies: int, *shape: int) -> Tensor:
        # Filling it also maps the pages, as those of an engine's static buffer are.
        return torch.full((copies, *shape), math.nan, dtype=self.row.dtype, device=self.row.device)

    def random(self, copies: int, *shape: int, scale: float = 1.0) -> Tensor:
        """Normal values [copies, *shape], a block of them repeated: caches see only addresses, and tables are large."""
        tensor = torch.empty(copies, *shape, dtype=self.row.dtype, device=self.row.device)
        flat = tensor.view(-1)
        block = torch.randn(min(flat.numel(), _RANDOM_BLOCK), device=self.row.device)
        block = (block * scale).to(self.row.dtype)
        for part in flat.split(_RANDOM_BLOCK):
            part.copy_(block[: part.numel()])
        return tensor

    def random_gain(self, *shape: int) -> Tensor:
        return (1 + 0.1 * torch.randn(*shape, device=self.row.device)).to(self.row.dtype)


# Two, so that a variant that always computes the first one is caught.
CHECKED_COPIES = 2


@dataclass(frozen=True)
class Verdict:
    """The error of a variant nearest to its bound, over outputs and copies."""

    error: float
    bound: float

    @property
    def is_right(self) -> bool:
        # Written so that an error of nan is wrong.
        return self.error <= self.bound

    @property
    def ratio(self) -> float:
        if self.is_right:
            return self.error / self.bound if self.bound else 0.0
        return self.error / self.bound if self.bound and self.error < math.inf else math.inf


def judge(workload: Workload, variants: Sequence[Variant]) -> dict[str, Verdict]:
    """Run every variant on a few copies and compare sampled rows with the formula."""
    verdicts: dict[str, Verdict] = {}
    rows = workload.checked_rows()
    for copy in range(min(CHECKED_COPIES, *(variant.copies for variant in variants))):
        truths = workload.truth(copy, rows)
        eager_errors = _errors(workload, workload.chain(*workload.chain_arguments[copy]), truths, rows)
        for variant in variants:
            with variant.active():
                errors = _errors(workload, variant.call(copy), truths, rows)
            bound_of = error_bound if is_ours(variant.name) else baseline_bound
            width, dtype = workload.row.width, workload.row.dtype
            most = absolute_bound(dtype, width)
            for error, eager, truth, exact in zip(errors, eager_errors, truths, workload.exact, strict=True):
                bound = min(bound_of(eager, dtype, width, truth.numel()), most)
                verdict = Verdict(error, 0.0 if exact else bound)
                worst = verdicts.setdefault(variant.name, verdict)
                verdicts[variant.name] = max(worst, verdict, key=lambda candidate: candidate.ratio)
    return verdicts


def _errors(workload: Workload, result: Tensor | tuple[Tensor, ...], truths: list[Tensor], rows: Tensor) -> list[float]:
    """The error of each output, which is then poisoned: a call that writes nothing must not pass with the result of the
    one before it."""
    outputs = result if isinstance(result, tuple) else (result,)
    errors = [
        _exact_error(output[rows], truth) if exact else relative_rms(output[rows], truth)
        for output, truth, exact in zip(outputs, truths, workload.exact, strict=True)
    ]
    for output in outputs:
        output.fill_(math.nan)
    return errors


def _exact_error(actual: Tensor, truth: Tensor) -> float:
    return 0.0 if torch.equal(actual, truth) else math.inf
