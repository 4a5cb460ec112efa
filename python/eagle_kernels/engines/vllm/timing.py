"""Times a stage of vLLM beside ours, so that all tensor-parallel ranks come to one decision."""

from collections.abc import Callable

from .. import decision


def agreed_seconds(measure: Callable[[], list[list[float]]], calls: int, rows: int) -> list[list[float]]:
    """`decision.agreed_seconds` over vLLM's tensor-parallel group."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    return decision.agreed_seconds(measure, calls, rows, group.cpu_group if group.world_size > 1 else None)
