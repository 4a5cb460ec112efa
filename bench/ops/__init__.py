"""What the benchmark knows about each op, in a file with the op's name: its chain, workload, random and host calls.

A file has `WORKLOAD`, the class behind a row of `bench`; that of a public op also has `random_call(draw)`, a case of
`check`, and `host_calls()`, the lines of `host`.
"""

import importlib
from types import ModuleType

from eagle_kernels import ops
from eagle_kernels.ops import store_context_kv

from ..workloads import Row, Workload
from .streams import StreamsProjection


def entry_of(op: str) -> ModuleType:
    return importlib.import_module(f".{op}", __name__)


# The part of ContextKV after the product has no public function of its own.
WORKLOADS: dict[str, type[Workload]] = {op: entry_of(op).WORKLOAD for op in (*ops.__all__, store_context_kv.OP)}


def workload_of(row: Row, cache_bytes: int = 0) -> Workload:
    """Data and calls of a row."""
    if row.op == "norm_concat_linear" and row.stage.projects_streams:
        return StreamsProjection(row, cache_bytes)
    return WORKLOADS[row.op](row, cache_bytes)
