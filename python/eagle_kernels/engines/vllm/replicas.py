"""Splits a projection that every tensor-parallel rank of vLLM replicates (`row_parallel.py`)."""

import logging

from torch import Tensor

from .. import row_parallel
from ..decision import Call, Decision
from ..eligibility import log_once
from ..projection import EngineProjection, parameter_of
from . import LOGGER


def split(
    name: str, projection: EngineProjection, like: Tensor, rows: int, engine: Call | None
) -> tuple[EngineProjection, Decision] | None:
    """The row-parallel form, or None and a line that says why there is none."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    unsupported = projection.fc_unsupported
    if unsupported is None:
        width = parameter_of(projection.fc).shape[1]
        unsupported = row_parallel.unsupported_reason(projection, width, group.world_size)
    if unsupported is not None:
        log_once(LOGGER, logging.INFO, f"{name} is not row-parallel: {unsupported}")
        return None
    return row_parallel.split(
        projection,
        like,
        rows,
        engine,
        rank=group.rank_in_group,
        size=group.world_size,
        all_reduce=group.all_reduce,
        group=group.cpu_group,
    )
