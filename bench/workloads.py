"""A row of the benchmark: its data in rotating copies, the calls to time, and what their results must be."""

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import eagle_kernels
from eagle_kernels.model_shapes import InputStage
from eagle_kernels.plan import Plan

from .baselines import compiled
from .forced import forced
from .measure import Call
from .rotation import Footprint

# How the package is called: the public op with out=, the layer over it, the layer with its weight in oneDNN's layout.
FORMS = ("op", "layer", "prepacked")

# Float64 of every row would take longer than the measurement; the rows of a call are computed alike.
_CHECKED_ROWS = 64
_RANDOM_BLOCK = 1 << 22


def is_ours(name: str) -> bool:
    """Whether a column of this name runs the package: "op", or "op:triton" on a backend of the user's choice."""
    return name.partition(":")[0] in FORMS


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

    @property
    def width(self) -> int:
        return self.stage.K * self.stage.H

    def __str__(self) -> str:
        return f"{self.op} {self.preset}:{self.stage.kind} T={self.T} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class Variant:
    """One column: how the op or a baseline is called, on how many copies it can be, and what has to hold meanwhile."""

    name: str
    call: Call
    copies: int
    in_force: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext


class Workload(ABC):
    """Data and calls of one row. `chain` and `chain_arguments` are the eager baseline, a list of arguments per copy;
    `op_arguments` are those of the public op."""

    forms: tuple[str, ...] = ("op",)
    baselines: tuple[str, ...] = ("eager", "compile")
    exact: tuple[bool, ...] = (False,)  # per output, whether the bits have to be those of the truth

    def __init__(self, row: Row, cache_bytes: int = 0) -> None:
        self.row = row
        self.cache_bytes = cache_bytes
        self.item = torch.empty((), dtype=row.dtype).element_size()
        self.chain_arguments: list[tuple] = []
        self.op_arguments: list[tuple[tuple, dict]] = []

    @abstractmethod
    def footprint(self, names: Sequence[str]) -> Footprint:
        """Bytes that the named variants need."""

    @abstractmethod
    def traffic(self) -> int:
        """Bytes that any implementation has to read or write in one call."""

    @abstractmethod
    def allocate(self, copies: int) -> None:
        """Random inputs and poisoned outputs."""

    @abstractmethod
    def chain(self, *arguments: object) -> object:
        """The engines' way."""

    @abstractmethod
    def truth(self, copy: int, rows: Tensor) -> list[Tensor]:
        """Each output's rows by the formula: in float64, or in the row's dtype where the bits have to be right."""

    def refusal(self, name: str) -> str | None:
        """Why there is no column of this name for the row; None where there is one."""
        form = name.partition(":")[0]
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
        if name == "compile":
            return compiled(self.chain, arguments), len(arguments)
        raise AssertionError(f"{self.row.op} has no {name}")

    def _on(self, backend: str) -> Callable[[], contextlib.AbstractContextManager]:
        @contextlib.contextmanager
        def in_force():
            with forced(backend):
                self.plan()  # forcing empties the plan cache, and the timed call should not pay for filling it
                yield

        return in_force

    def checked_rows(self) -> Tensor:
        count = min(self.row.T, _CHECKED_ROWS)
        return torch.linspace(0, self.row.T - 1, count).round().long().to(self.row.device)

    def poisoned(self, copies: int, *shape: int) -> Tensor:
        # Filling it also has the pages mapped: a static buffer of an engine has been written before.
        return torch.full((copies, *shape), math.nan, dtype=self.row.dtype, device=self.row.device)

    def random(self, copies: int, *shape: int, scale: float = 1.0) -> Tensor:
        """Normal values [copies, *shape], a block of them repeated: caches go by address, and tables are large."""
        tensor = torch.empty(copies, *shape, dtype=self.row.dtype, device=self.row.device)
        flat = tensor.view(-1)
        block = torch.randn(min(flat.numel(), _RANDOM_BLOCK), device=self.row.device)
        block = (block * scale).to(self.row.dtype)
        for part in flat.split(_RANDOM_BLOCK):
            part.copy_(block[: part.numel()])
        return tensor

    def random_gain(self, *shape: int) -> Tensor:
        return (1 + 0.1 * torch.randn(*shape, device=self.row.device)).to(self.row.dtype)
