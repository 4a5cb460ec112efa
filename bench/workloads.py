"""A row of the benchmark: its data in rotating copies, the calls to time, what their results must be, and the check
that no time is printed for a result that is wrong."""

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import eagle_kernels
from eagle_kernels import Eagle3Config, Eagle3Projection, VocabShard
from eagle_kernels.model_shapes import InputStage
from eagle_kernels.ops.add_rms_norm import formula as add_formula
from eagle_kernels.ops.capture_hidden import CaptureHidden as CaptureRecord
from eagle_kernels.ops.norm_concat_linear import Projection, project_formula
from eagle_kernels.ops.sources import Sources
from eagle_kernels.ops.sources import formula as sources_formula
from eagle_kernels.ops.vocab_parallel_embedding import VocabParallelEmbedding as EmbeddingRecord
from eagle_kernels.plan import Plan

from . import baselines as engine_chains
from .accuracy import baseline_bound, error_bound, relative_rms
from .baselines import (
    BASELINES,
    FOREIGN,
    SLICES,
    ForeignNorms,
    MaskScratch,
    NormScratch,
    compiled,
    foreign_unsupported_reason,
    slices_unsupported_reason,
)
from .forced import forced
from .measure import FORMS, Call, Footprint, Traffic, Variant, is_ours

# Float64 of every row would take longer than the measurement; the rows of a call are computed alike.
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

    @property
    def width(self) -> int:
        return self.stage.K * self.stage.H

    def __str__(self) -> str:
        return f"{self.op} {self.preset}:{self.stage.kind} T={self.T} {str(self.dtype).removeprefix('torch.')}"


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
    def traffic(self) -> Traffic:
        """Bytes that any implementation has to read and to write in one call."""

    @abstractmethod
    def allocate(self, copies: int) -> None:
        """Random inputs and poisoned outputs."""

    @abstractmethod
    def chain(self, *arguments: object) -> object:
        """The engines' way."""

    @abstractmethod
    def truth(self, copy: int, rows: Tensor) -> list[Tensor]:
        """Each output's rows by the formula: in float64, or in the row's dtype where the bits have to be right."""

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
        def active():
            with forced(backend):
                self.plan()  # forcing empties the plan cache, and the timed call should not pay for filling it
                yield

        return active

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


# Baselines that need a concat of their own for each copy.
_WITH_CONCAT = ("linear", *SLICES)


class NormConcatLinear(Workload):
    """Every copy has its own weight, chunks and out; the gains are shared."""

    forms = FORMS
    baselines = tuple(name for name in BASELINES if name != "eager-out")  # its product is what takes the time
    chain = staticmethod(engine_chains.projection)

    def __init__(self, row: Row, cache_bytes: int = 0) -> None:
        super().__init__(row, cache_bytes)
        self.weight_bytes = row.stage.D * row.width * self.item

    def footprint(self, names: Sequence[str]) -> Footprint:
        # Inductor keeps a folded and a packed weight per module, `prepacked` oneDNN's layout beside the dense one.
        extra = 2 * ("inductor-max" in names and self.row.device == "cpu") + ("prepacked" in names)
        concats = sum(name in _WITH_CONCAT for name in names) * self.row.T * self.row.width * self.item
        in_float64 = self.weight_bytes // self.item * 8
        touched = self.traffic().total
        return Footprint(touched, touched + extra * self.weight_bytes + concats, in_float64)

    def traffic(self) -> Traffic:
        row_bytes = self.row.T * self.item
        return Traffic(self.weight_bytes + row_bytes * self.row.width, row_bytes * self.row.stage.D)

    def flops(self) -> int:
        return 2 * self.row.T * self.row.width * self.row.stage.D

    def allocate(self, copies: int) -> None:
        row, stage = self.row, self.row.stage
        self.weights = self.random(copies, stage.D, row.width, scale=row.width**-0.5).unbind()
        by_chunk = [self.random(copies, row.T, stage.H, scale=3.0**k) for k in range(stage.K)]
        self.chunks = list(zip(*by_chunk, strict=True))
        self.outs = self.poisoned(copies, row.T, stage.D).unbind()
        gains = self._gains()
        # What the checkpoint stores: without the offset, which the op adds in fp32 and a baseline has folded in.
        stored = [gain - stage.norm_offset for gain in gains]
        post_gain = self.random_gain(stage.D) if stage.post_norm else None
        self.options = {
            "norm": row.norm,
            "norm_weight": stored[0] if row.norm == "concat" else stored or None,
            "eps": stage.eps,
            "norm_offset": stage.norm_offset,
            "post_norm_weight": None if post_gain is None else post_gain - stage.norm_offset,
        }
        settings = (row.norm, stage.eps, post_gain)
        pairs = zip(self.chunks, self.weights, strict=True)
        self.chain_arguments = [(chunks, gains, weight, *settings) for chunks, weight in pairs]
        calls = zip(self.chunks, self.weights, self.outs, strict=True)
        self.op_arguments = [((chunks, weight), {**self.options, "out": out}) for chunks, weight, out in calls]

    def _gains(self) -> list[Tensor]:
        if self.row.norm == "none":
            return []
        widths = [self.row.width] if self.row.norm == "concat" else [self.row.stage.H] * self.row.stage.K
        return [self.random_gain(width) for width in widths]

    def _call(self, name: str) -> tuple[Call, int]:
        if name in ("layer", "prepacked"):
            layers = [self._layer(weight) for weight in self.weights]
            if name == "prepacked":
                layers = [layer.prepack() for layer in layers]
            return lambda copy: layers[copy](self.chunks[copy], out=self.outs[copy]), len(layers)
        if name in _WITH_CONCAT:
            return self._over_a_concat(name), len(self.weights)
        if name == "inductor-max" and self.row.device == "cuda":
            # Freezing folds constants for the CPU's packed kernels; on a GPU the weights can stay arguments.
            return compiled(self.chain, self.chain_arguments, "max-autotune-no-cudagraphs"), len(self.weights)
        if name == "inductor-max":
            modules = engine_chains.frozen_projections(self.chain_arguments)
            return lambda copy: modules[copy](self.chunks[copy]), len(modules)
        return super()._call(name)

    def _over_a_concat(self, name: str) -> Call:
        """The product over a static buffer of normed rows: filled by K norm kernels in the call, or before it."""
        row = self.row
        concats = self.poisoned(len(self.weights), row.T, row.width).unbind()
        _, gains, _, norm, eps, post_gain = self.chain_arguments[0]
        if name == "linear":
            for chunks, concat in zip(self.chunks, concats, strict=True):
                engine_chains.normed_concat(chunks, gains, norm, eps, out=concat)
            return lambda copy: torch.mm(concats[copy], self.weights[copy].t(), out=self.outs[copy])

        kernel = engine_chains.norm_kernel(name)

        def call(copy: int) -> Tensor:
            normed = engine_chains.normed_slices(kernel, self.chunks[copy], gains, eps, concats[copy])
            return engine_chains.projected(normed, self.weights[copy], eps, post_gain)

        return call

    def unsupported_reason(self, name: str) -> str | None:
        form, post_norm = name.partition(":")[0], self.row.stage.post_norm
        if form in ("layer", "prepacked") and (self.row.stage.norm_offset or post_norm):
            return "Eagle3Projection is the block of EAGLE-3: no norm offset, no norm of the result"
        if form == "prepacked" and (self.row.dtype == torch.float32 or self.row.device != "cpu"):
            return "prepack() is for 16-bit weights on the CPU"
        if form == "linear" and post_norm:
            return "a product alone is not the result where a norm follows it"
        if form in SLICES:
            return slices_unsupported_reason(form, self.row.norm, self.row.device)
        return super().unsupported_reason(name)

    def _layer(self, weight: Tensor) -> Eagle3Projection:
        """The layer over a weight that exists."""
        row, stage = self.row, self.row.stage
        config = Eagle3Config(
            num_chunks=stage.K,
            target_hidden_size=stage.H,
            hidden_size=stage.D,
            eps=stage.eps,
            chunk_norm=row.norm == "chunk",
            concat_norm=row.norm == "concat",
        )
        # On meta: initialising a weight that is thrown away takes longer than the row.
        layer = Eagle3Projection(config, dtype=row.dtype, device="meta")
        layer.fc.weight = nn.Parameter(weight, requires_grad=False)
        norms = {"chunk": layer.fc_norm, "concat": [layer.input_norm], "none": []}[row.norm]
        _, gains, *_ = self.chain_arguments[0]
        for norm, gain in zip(norms, gains, strict=True):
            norm.weight = nn.Parameter(gain, requires_grad=False)
        return layer

    def truth(self, copy: int, rows: Tensor) -> list[Tensor]:
        options = dict(self.options)
        post_gain = options.pop("post_norm_weight")
        chunks = [chunk[rows] for chunk in self.chunks[copy]]
        sources = Sources.of_call(self.row.op, chunks, options)
        normed = sources_formula(sources, torch.float64)
        projection = Projection(self.weights[copy], None, post_gain, options["eps"])
        return [project_formula(normed, projection, options["norm_offset"])]


_EMBEDDING_RANKS = 2


class NormConcat(Workload):
    """Every copy has its own chunks and out."""

    baselines = ("eager", "eager-out", "compile", *SLICES)
    chain = staticmethod(engine_chains.normed_concat)

    def footprint(self, names: Sequence[str]) -> Footprint:
        touched, scratch = self.traffic().total, NormScratch.num_bytes(self.row.T, self._normed_width())
        return Footprint(touched, touched, scratch if "eager-out" in names else 0)

    def traffic(self) -> Traffic:
        concat = self.row.T * self.row.width * self.item
        return Traffic(concat, concat)

    def _normed_width(self) -> int:
        return {"chunk": self.row.stage.H, "concat": self.row.width, "none": 0}[self.row.norm]

    def allocate(self, copies: int) -> None:
        row, stage = self.row, self.row.stage
        by_chunk = [self.random(copies, row.T, stage.H, scale=3.0**k) for k in range(stage.K)]
        self.chunks = list(zip(*by_chunk, strict=True))
        self.outs = self.poisoned(copies, row.T, row.width).unbind()
        widths = {"chunk": [stage.H] * stage.K, "concat": [row.width], "none": []}[row.norm]
        gains = [self.random_gain(width) for width in widths]
        stored = [gain - stage.norm_offset for gain in gains]
        self.options = {
            "norm": row.norm,
            "norm_weight": stored[0] if row.norm == "concat" else stored or None,
            "eps": stage.eps,
            "norm_offset": stage.norm_offset,
        }
        pairs = zip(self.chunks, self.outs, strict=True)
        self.chain_arguments = [(chunks, gains, row.norm, stage.eps, out) for chunks, out in pairs]
        pairs = zip(self.chunks, self.outs, strict=True)
        self.op_arguments = [((chunks,), {**self.options, "out": out}) for chunks, out in pairs]

    def _preallocated(self) -> Call:
        scratch = NormScratch(self.row.T, self._normed_width(), self.row.device)
        _, gains, *settings, _ = self.chain_arguments[0]
        wide = [gain.float() for gain in gains]
        return lambda copy: engine_chains.preallocated_normed_concat(
            self.chunks[copy], wide, *settings, self.outs[copy], scratch
        )

    def _call(self, name: str) -> tuple[Call, int]:
        if name not in SLICES:
            return super()._call(name)
        kernel = engine_chains.norm_kernel(name)

        def call(copy: int) -> Tensor:
            chunks, gains, _, eps, out = self.chain_arguments[copy]
            return engine_chains.normed_slices(kernel, chunks, gains, eps, out)

        return call, len(self.outs)

    def unsupported_reason(self, name: str) -> str | None:
        if name in SLICES:
            return slices_unsupported_reason(name, self.row.norm, self.row.device)
        return super().unsupported_reason(name)

    def truth(self, copy: int, rows: Tensor) -> list[Tensor]:
        chunks = [chunk[rows] for chunk in self.chunks[copy]]
        sources = Sources.of_call(self.row.op, chunks, self.options)
        return [sources_formula(sources, torch.float64)]


class CaptureHidden(Workload):
    """Every copy has its own hidden and residual, and a slot of a packed [T, K*H] buffer."""

    baselines = ("eager", "eager-out", "compile")
    chain = staticmethod(engine_chains.captured)
    exact = (True,)

    def footprint(self, names: Sequence[str]) -> Footprint:
        touched = self.traffic().total
        return Footprint(touched, touched, self.row.T * self.row.width * self.item)

    def traffic(self) -> Traffic:
        rows = self.row.T * self.row.stage.H * self.item
        return Traffic(2 * rows, rows)

    def _preallocated(self) -> Call:
        return lambda copy: engine_chains.preallocated_captured(*self.chain_arguments[copy])

    def allocate(self, copies: int) -> None:
        row, stage = self.row, self.row.stage
        hidden = self.random(copies, row.T, stage.H)
        residual = self.random(copies, row.T, stage.H, scale=10.0)
        buffers = self.poisoned(math.ceil(copies / stage.K), row.T, row.width)
        slots = [slot for buffer in buffers for slot in buffer.chunk(stage.K, -1)][:copies]
        self.chain_arguments = list(zip(hidden, residual, slots, strict=True))
        self.op_arguments = [((hidden, residual), {"out": slot}) for hidden, residual, slot in self.chain_arguments]

    def truth(self, copy: int, rows: Tensor) -> list[Tensor]:
        hidden, residual, _ = self.chain_arguments[copy]
        value = torch.empty_like(hidden[rows])
        CaptureRecord(hidden[rows], residual[rows], value, None).reference()
        return [value]


class AddRmsNorm(Workload):
    """Every copy has its own inputs and both outputs."""

    baselines = ("eager", "eager-out", "compile", *FOREIGN)
    chain = staticmethod(engine_chains.added_norm)
    exact = (False, True)

    def footprint(self, names: Sequence[str]) -> Footprint:
        touched, scratch = self.traffic().total, NormScratch.num_bytes(self.row.T, self.row.stage.H)
        return Footprint(touched, touched, scratch if "eager-out" in names else 0)

    def traffic(self) -> Traffic:
        rows = self.row.T * self.row.stage.H * self.item
        return Traffic(2 * rows, 2 * rows)

    def _preallocated(self) -> Call:
        scratch = NormScratch(self.row.T, self.row.stage.H, self.row.device)
        wide = self.chain_arguments[0][2].float()

        def call(copy: int) -> tuple[Tensor, Tensor]:
            hidden, residual, _, eps, total = self.chain_arguments[copy]
            return engine_chains.preallocated_added_norm(hidden, residual, wide, eps, total, self.outs[copy], scratch)

        return call

    def allocate(self, copies: int) -> None:
        row, stage = self.row, self.row.stage
        hidden = self.random(copies, row.T, stage.H)
        residual = self.random(copies, row.T, stage.H, scale=10.0)
        self.outs, sums = (self.poisoned(copies, row.T, stage.H) for _ in range(2))
        gain = self.random_gain(stage.H)
        self.settings = {"eps": stage.eps, "norm_offset": stage.norm_offset}
        self.weight = gain - stage.norm_offset
        pairs = zip(hidden, residual, sums, strict=True)
        self.chain_arguments = [(h, r, gain, stage.eps, total) for h, r, total in pairs]
        self.outs = self.outs.unbind()
        self.op_arguments = [
            ((h, r, self.weight), {**self.settings, "out": out, "out_sum": total})
            for (h, r, _, _, total), out in zip(self.chain_arguments, self.outs, strict=True)
        ]

    def _call(self, name: str) -> tuple[Call, int]:
        if name not in FOREIGN:
            return super()._call(name)
        norms = ForeignNorms(name)

        def call(copy: int) -> tuple[Tensor, Tensor]:
            hidden, residual, gain, eps, total = self.chain_arguments[copy]
            # In place, as these kernels work: what a chain of drafter steps has to keep is cloned first.
            return norms.add_norm(self.outs[copy].copy_(hidden), total.copy_(residual), gain, eps)

        return call, len(self.outs)

    def unsupported_reason(self, name: str) -> str | None:
        if name in FOREIGN:
            return foreign_unsupported_reason(name, self.row.device)
        return super().unsupported_reason(name)

    def truth(self, copy: int, rows: Tensor) -> list[Tensor]:
        hidden, residual = (tensor[rows] for tensor in self.chain_arguments[copy][:2])
        normed, _ = add_formula(hidden, residual, self.weight, **self.settings, dtype=torch.float64)
        _, total = add_formula(hidden, residual, self.weight, **self.settings)
        return [normed, total.to(hidden.dtype)]


class VocabParallelEmbedding(Workload):
    """Rank 0 of two: half of the random ids belong to the other one. Every copy has its own ids and out.

    Tables are copied only as far as one of them fits into the cache.
    """

    baselines = ("eager", "eager-out", "compile")
    chain = staticmethod(engine_chains.masked_embedding)
    exact = (True,)

    def __init__(self, row: Row, cache_bytes: int = 0) -> None:
        super().__init__(row, cache_bytes)
        self.shard = VocabShard.build(row.V, tp_rank=0, tp_size=_EMBEDDING_RANKS)

    def footprint(self, names: Sequence[str]) -> Footprint:
        resident = self.row.T * (self.row.stage.H * self.item + 8)
        scratch = MaskScratch.num_bytes(self.row.T) if "eager-out" in names else 0
        return Footprint(self.traffic().total, resident, self._tables() * self._table_bytes() + scratch)

    def traffic(self) -> Traffic:
        row_bytes = self.row.stage.H * self.item
        return Traffic(self.row.T * (8 + row_bytes // _EMBEDDING_RANKS), self.row.T * row_bytes)

    def _preallocated(self) -> Call:
        scratch = MaskScratch(self.row.T, self.row.device)
        return lambda copy: scratch.embed(*self.chain_arguments[copy], out=self.outs[copy])

    def _table_bytes(self) -> int:
        return self.shard.rows * self.row.stage.H * self.item

    def _tables(self) -> int:
        return max(math.ceil(self.cache_bytes / self._table_bytes()), 1)

    def allocate(self, copies: int) -> None:
        tables = self.random(self._tables(), self.shard.rows, self.row.stage.H)
        ids = torch.randint(0, self.row.V, (copies, self.row.T), device=self.row.device)
        self.outs = self.poisoned(copies, self.row.T, self.row.stage.H).unbind()
        shard = self.shard
        self.chain_arguments = [(row, tables[copy % len(tables)], *shard.bounds) for copy, row in enumerate(ids)]
        pairs = zip(self.chain_arguments, self.outs, strict=True)
        self.op_arguments = [((ids, table, shard), {"out": out}) for (ids, table, *_), out in pairs]

    def truth(self, copy: int, rows: Tensor) -> list[Tensor]:
        ids, table, *bounds = self.chain_arguments[copy]
        value = table.new_empty(len(rows), table.shape[1])
        EmbeddingRecord(ids[rows], table, *bounds, None, None, value).reference()
        return [value]


WORKLOADS: dict[str, type[Workload]] = {
    "norm_concat_linear": NormConcatLinear,
    "norm_concat": NormConcat,
    "capture_hidden": CaptureHidden,
    "add_rms_norm": AddRmsNorm,
    "vocab_parallel_embedding": VocabParallelEmbedding,
}

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
            for error, eager, truth, exact in zip(errors, eager_errors, truths, workload.exact, strict=True):
                verdict = Verdict(error, 0.0 if exact else bound_of(eager, dtype, width, truth.numel()))
                worst = verdicts.setdefault(variant.name, verdict)
                verdicts[variant.name] = max(worst, verdict, key=lambda candidate: candidate.ratio)
    return verdicts


def _errors(workload: Workload, result: Tensor | tuple[Tensor, ...], truths: list[Tensor], rows: Tensor) -> list[float]:
    outputs = result if isinstance(result, tuple) else (result,)
    return [
        _exact_error(output[rows], truth) if exact else relative_rms(output[rows], truth)
        for output, truth, exact in zip(outputs, truths, workload.exact, strict=True)
    ]


def _exact_error(actual: Tensor, truth: Tensor) -> float:
    return 0.0 if torch.equal(actual, truth) else math.inf
