"""What the tensor-parallel ranks of vLLM do together: agree on a decision, and split a projection that each of them
replicates (`row_parallel.py`).
"""

import logging
from collections.abc import Callable

from torch import Tensor

from .. import decision, row_parallel
from ..decision import Call, Decision
from ..eligibility import log_once
from ..projection import EngineProjection, parameter_of
from . import LOGGER


def agreed_seconds(measure: Callable[[], list[list[float]]], calls: int, rows: int) -> list[list[float]]:
    """`decision.agreed_seconds` over vLLM's tensor-parallel group."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    return decision.agreed_seconds(measure, calls, rows, group.cpu_group if group.world_size > 1 else None)


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
