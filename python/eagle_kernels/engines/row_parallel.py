"""The row-parallel form of a projection that an engine replicates: y = all_reduce(norm(cat)[:, b:e] @ W[:, b:e]^T).

A replicated fc is read whole by every rank at every step, 308 MB for Kimi K2. Here each rank reads only its columns of
the weight, a view of the engine's own parameter: nothing is copied, and a weight update takes effect at the next call.
Every rank has all captured layers, so each norms whole chunks, with the same statistics as on one rank, and only the
partial products are exchanged (sglang#29223 shards fc by its rows instead, and gathers).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..ops.norm_concat_linear import project
from ..ops.projection import Projection
from ..ops.sources import Sources
from .decision import Call, Decision, agreed_seconds
from .projection import EngineProjection, ProbeError, parameter_of, probe

# Each rank's columns begin at a tile of the kernels, and at a multiple of 128 bytes in each row of the weight.
TILE = 64


@dataclass(frozen=True, eq=False)
class RowParallelProjection(EngineProjection):
    """An `EngineProjection` on the columns of one rank of `size`; `all_reduce` is the engine's sum over them."""

    rank: int = 0
    size: int = 1
    all_reduce: Callable[[Tensor], Tensor] = lambda partial: partial

    @property
    def is_worthwhile(self) -> bool:
        return True

    @property
    def kind(self) -> str:
        return f"{super().kind}, columns {self.size} ways"

    def forward(
        self,
        chunks: Sequence[Tensor] | Tensor,
        out: Tensor | None = None,
        indices: Sequence[Tensor | None] | None = None,
    ) -> Tensor:
        """As `EngineProjection.forward`; every rank of the group has to call it."""
        whole = isinstance(chunks, Tensor) and not self.has_norm
        normed = chunks if isinstance(chunks, Tensor) and whole else self.normed(chunks, indices)
        weight = parameter_of(self.fc)
        begin, end = columns_of(weight.shape[1], self.rank, self.size)
        bias = parameter_of(self.fc, "bias", None) if self.rank == 0 else None  # one rank adds it to the sum
        piece = Sources.of(self.op, normed[..., begin:end], "none", num_chunks=1)
        projected = self.all_reduce(project(piece, Projection(weight[:, begin:end], bias, None, 0.0)))
        if self.post_norm is not None:
            projected = self.post_norm(projected)
        return projected if out is None else out.copy_(projected)

    __call__ = forward


def columns_of(width: int, rank: int, size: int) -> tuple[int, int]:
    """[begin, end) of a rank's columns: whole tiles, whose number differs by at most one between ranks.

    >>> [columns_of(384, rank, 4) for rank in range(4)]
    [(0, 64), (64, 192), (192, 256), (256, 384)]
    """
    tiles = math.ceil(width / TILE)
    return tiles * rank // size * TILE, min(tiles * (rank + 1) // size * TILE, width)


def unsupported_reason(projection: EngineProjection, width: int, size: int) -> str | None:
    """Why a projection of [N, width] is not split over `size` ranks."""
    if size == 1:
        return "there is one rank"
    if projection.fc_unsupported is not None:
        return projection.fc_unsupported
    if projection.codes:
        return f"its weight is {projection.codes}"
    if math.ceil(width / TILE) < size:
        return f"K*H={width} has less than {TILE} columns for each of {size} ranks"
    return None


def split(
    projection: EngineProjection,
    like: Tensor,
    rows: int,
    engine: Call | None,
    *,
    rank: int,
    size: int,
    all_reduce: Callable[[Tensor], Tensor],
    group: ProcessGroup,
) -> tuple[EngineProjection, Decision]:
    """The row-parallel form, probed on all ranks; raises ProbeError on all of them where it fails on one.

    Args:
        like, rows, engine: as in `probe`.
        group: the same ranks, for tensors on the CPU.
    """
    shared = {field.name: getattr(projection, field.name) for field in fields(projection)}
    row_parallel = RowParallelProjection(**shared, rank=rank, size=size, all_reduce=all_reduce)
    width = parameter_of(projection.fc).shape[1]

    def alone() -> list[list[float]]:
        # Without the engine's all-reduce, in which the others would wait for a rank that fails here.
        probe(replace(row_parallel, all_reduce=torch.clone), width, like, rows)
        return [[1.0], [1.0]]

    _, (ours,) = agreed_seconds(alone, 2, 1, group)
    if ours != 1.0:
        raise ProbeError("it does not run on another rank")
    probe(row_parallel, width, like, rows, engine)
    return row_parallel, Decision(everywhere=True, reason=f"row-parallel on {size} ranks, not timed")
