"""vocab_parallel_embedding against the engines' masks, gather and fill."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import eagle_kernels
from eagle_kernels import VocabShard
from eagle_kernels.ops.vocab_parallel_embedding import VocabParallelEmbedding as EmbeddingRecord

from ..measure import Call, Footprint, Traffic
from ..workloads import Row, Workload
from .draw import ROWS, WIDTHS, Draw, Expected, Guarded, RandomCall
from .host_call import H, HostCall, V

_EMBEDDING_RANKS = 2


def masked_embedding(
    ids: Tensor, weight: Tensor, org_begin: int, org_end: int, added_begin: int, added_end: int, added_row: int
) -> Tensor:
    """`get_masked_input_and_mask` of both engines, the gather, and the fill."""
    is_org = (ids >= org_begin) & (ids < org_end)
    is_added = (ids >= added_begin) & (ids < added_end)
    offset = org_begin * is_org + (added_begin - added_row) * is_added
    in_range = is_org | is_added
    rows = F.embedding(in_range * (ids - offset), weight)
    return rows.masked_fill_(~in_range.unsqueeze(-1), 0)


class MaskScratch:
    """The masks and the local ids of `masked_embedding` in static memory."""

    def __init__(self, T: int, device: str) -> None:
        self._masks = torch.zeros(3, T, dtype=torch.bool, device=device).unbind()
        self._ids = torch.zeros(2, T, dtype=torch.int64, device=device).unbind()

    @staticmethod
    def num_bytes(T: int) -> int:
        return 19 * T

    def embed(
        self,
        ids: Tensor,
        weight: Tensor,
        org_begin: int,
        org_end: int,
        added_begin: int,
        added_end: int,
        added_row: int,
        out: Tensor,
    ) -> Tensor:
        is_org, is_added, other = self._masks
        offset, local = self._ids
        torch.logical_and(torch.ge(ids, org_begin, out=is_org), torch.lt(ids, org_end, out=other), out=is_org)
        torch.logical_and(torch.ge(ids, added_begin, out=is_added), torch.lt(ids, added_end, out=other), out=is_added)
        # Copied before the product: torch allocates for operands of two dtypes.
        offset.copy_(is_org).mul_(org_begin).add_(local.copy_(is_added).mul_(added_begin - added_row))
        torch.sub(ids, offset, out=local)
        torch.logical_or(is_org, is_added, out=is_org)
        torch.index_select(weight, 0, local.mul_(offset.copy_(is_org)), out=out)
        return out.masked_fill_(torch.logical_not(is_org, out=other).unsqueeze(-1), 0)


class VocabParallelEmbedding(Workload):
    """Rank 0 of two: half of the random ids belong to the other one. Every copy has its own ids and out.

    There is more than one table only where a table fits into the cache.
    """

    sizes = ("V", "H")
    baselines = ("eager", "eager-out", "compile")
    chain = staticmethod(masked_embedding)
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

        def call(copy: int) -> Tensor:
            ids, table, *_ = self.chain_arguments[copy]
            return scratch.embed(ids, table, *self.shard.bounds, self.outs[copy])

        return call

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
        ids, table, *_ = self.chain_arguments[copy]
        value = table.new_empty(len(rows), table.shape[1])
        EmbeddingRecord(ids[rows], table, *self.shard.bounds, None, None, value).reference()
        return [value]


WORKLOAD = VocabParallelEmbedding


def random_call(draw: Draw) -> RandomCall:
    dtype, H, T = draw.dtype(), draw.choose("H", *WIDTHS), draw.choose("T", *ROWS)
    added, tp_size = draw.choose("added", 0, 0, 1, 70), draw.choose("tp_size", 1, 2, 4)
    V = draw.choose("V", 5, 64, 130, 1000) + added
    tp_rank = draw.random.randrange(tp_size)
    draw.drawn["tp_rank"] = tp_rank
    shard = VocabShard.build(V, tp_rank=tp_rank, tp_size=tp_size, org_num_embeddings=V - added)
    weight = draw.rows(shard.rows, H, dtype)
    ids = draw.index(V, T, draw.choose("id_dtype", torch.int32, torch.int64))
    kind = draw.choose("scale", None, None, "float", "tensor")
    scale: Any = math.sqrt(H) if kind else None
    scale = torch.tensor(scale, dtype=dtype) if kind == "tensor" else scale
    value = torch.empty(T, H, dtype=dtype)
    number, tensor = (None, scale) if kind == "tensor" else (scale, None)
    EmbeddingRecord(ids, weight, *shard.bounds, number, tensor, value).reference()
    written = [Guarded(draw, T, H, dtype=dtype)] if draw.choose("out", False, True) else []
    options = {"scale": scale} | ({"out": written[0].view} if written else {})
    return RandomCall((ids, weight, shard), options, [Expected("result", value)], written)


def host_calls() -> dict[str, HostCall]:
    shard = VocabShard.build(V, tp_rank=1, tp_size=2)
    ids, table = torch.tensor([shard.org_begin + 3]), torch.randn(shard.rows, H)

    def chain() -> Tensor:
        in_shard = (ids >= shard.org_begin) & (ids < shard.org_end)
        rows = F.embedding((ids - shard.org_begin) * in_shard, table)
        return rows.masked_fill_(~in_shard.unsqueeze(-1), 0)

    call = HostCall(lambda: eagle_kernels.vocab_parallel_embedding(ids, table, shard), chain, goal=0.4)
    return {"vocab_parallel_embedding": call}
