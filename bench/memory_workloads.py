"""The benchmark rows of the ops that move memory: their bytes are the bound at every T."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from eagle_kernels import VocabShard
from eagle_kernels.ops.sources import Sources, formula

from . import baselines as engine_chains
from . import foreign_norms
from .measure import Call
from .op_modules import op_module
from .rotation import Footprint
from .workloads import Row, Workload

_EMBEDDING_RANKS = 2


class NormConcat(Workload):
    """Every copy has its own chunks and out."""

    baselines = ("eager", "compile", *engine_chains.SLICES)
    chain = staticmethod(engine_chains.normed_concat)

    def footprint(self, names: Sequence[str]) -> Footprint:
        return Footprint(self.traffic(), self.traffic(), 0)

    def traffic(self) -> int:
        return 2 * self.row.T * self.row.width * self.item

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

    def _call(self, name: str) -> tuple[Call, int]:
        if name not in engine_chains.SLICES:
            return super()._call(name)
        kernel = engine_chains.norm_kernel(name)

        def call(copy: int) -> Tensor:
            chunks, gains, _, eps, out = self.chain_arguments[copy]
            return engine_chains.normed_slices(kernel, chunks, gains, eps, out)

        return call, len(self.outs)

    def refusal(self, name: str) -> str | None:
        if name in engine_chains.SLICES:
            return engine_chains.slices_refusal(name, self.row.norm, self.row.device)
        return super().refusal(name)

    def truth(self, copy: int, rows: Tensor) -> list[Tensor]:
        chunks = [chunk[rows] for chunk in self.chunks[copy]]
        none = {"residuals": None, "indices": None, "sum_squares": None, "num_chunks": None}
        sources = Sources.build(self.row.op, chunks, **self.options, **none)
        return [formula(*sources.arguments, dtype=torch.float64)]


class CaptureHidden(Workload):
    """Every copy has its own hidden and residual, and a slot of a packed [T, K*H] buffer."""

    chain = staticmethod(engine_chains.captured)
    exact = (True,)

    def footprint(self, names: Sequence[str]) -> Footprint:
        return Footprint(self.traffic(), self.traffic(), self.row.T * self.row.width * self.item)

    def traffic(self) -> int:
        return 3 * self.row.T * self.row.stage.H * self.item

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
        op_module(self.row.op).reference(hidden[rows], residual[rows], value, None)
        return [value]


class AddRmsNorm(Workload):
    """Every copy has its own inputs and both outputs."""

    baselines = ("eager", "compile", *foreign_norms.NAMES)
    chain = staticmethod(engine_chains.added_norm)
    exact = (False, True)

    def footprint(self, names: Sequence[str]) -> Footprint:
        return Footprint(self.traffic(), self.traffic(), 0)

    def traffic(self) -> int:
        return 4 * self.row.T * self.row.stage.H * self.item

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
        if name not in foreign_norms.NAMES:
            return super()._call(name)
        norms = foreign_norms.Norms(name)

        def call(copy: int) -> tuple[Tensor, Tensor]:
            hidden, residual, gain, eps, total = self.chain_arguments[copy]
            # In place, as these kernels work: what a chain of drafter steps has to keep is cloned first.
            return norms.add_norm(self.outs[copy].copy_(hidden), total.copy_(residual), gain, eps)

        return call, len(self.outs)

    def refusal(self, name: str) -> str | None:
        if name in foreign_norms.NAMES:
            return foreign_norms.unusable_reason(name, self.row.device)
        return super().refusal(name)

    def truth(self, copy: int, rows: Tensor) -> list[Tensor]:
        hidden, residual = (tensor[rows] for tensor in self.chain_arguments[copy][:2])
        add_formula = op_module(self.row.op).formula
        normed, _ = add_formula(hidden, residual, self.weight, **self.settings, dtype=torch.float64)
        _, total = add_formula(hidden, residual, self.weight, **self.settings)
        return [normed, total.to(hidden.dtype)]


class VocabParallelEmbedding(Workload):
    """Rank 0 of two: half of the random ids belong to the other one. Every copy has its own ids and out.

    Tables are copied only as far as one of them fits into the cache.
    """

    chain = staticmethod(engine_chains.masked_embedding)
    exact = (True,)

    def __init__(self, row: Row, cache_bytes: int = 0) -> None:
        super().__init__(row, cache_bytes)
        self.shard = VocabShard.build(row.V, tp_rank=0, tp_size=_EMBEDDING_RANKS)

    def footprint(self, names: Sequence[str]) -> Footprint:
        resident = self.row.T * (self.row.stage.H * self.item + 8)
        return Footprint(self.traffic(), resident, self._tables() * self._table_bytes())

    def traffic(self) -> int:
        row_bytes = self.row.stage.H * self.item
        return self.row.T * (8 + row_bytes + row_bytes // _EMBEDDING_RANKS)

    def _table_bytes(self) -> int:
        return self.shard.rows * self.row.stage.H * self.item

    def _tables(self) -> int:
        return max(math.ceil(self.cache_bytes / self._table_bytes()), 1)

    def allocate(self, copies: int) -> None:
        tables = self.random(self._tables(), self.shard.rows, self.row.stage.H)
        ids = torch.randint(0, self.row.V, (copies, self.row.T), device=self.row.device)
        self.outs = self.poisoned(copies, self.row.T, self.row.stage.H).unbind()
        shard = self.shard
        bounds = (shard.org_begin, shard.org_end, shard.added_begin, shard.added_end, shard.added_row)
        self.chain_arguments = [(row, tables[copy % len(tables)], *bounds) for copy, row in enumerate(ids)]
        pairs = zip(self.chain_arguments, self.outs, strict=True)
        self.op_arguments = [((ids, table, shard), {"out": out}) for (ids, table, *_), out in pairs]

    def truth(self, copy: int, rows: Tensor) -> list[Tensor]:
        ids, table, *bounds = self.chain_arguments[copy]
        value = table.new_empty(len(rows), table.shape[1])
        op_module(self.row.op).reference(ids[rows], table, *bounds, None, None, value)
        return [value]
