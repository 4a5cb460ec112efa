"""What the benchmark knows of each op, in a file of the op's name: its chain, workload, random calls and host calls.

A file has `WORKLOAD`, the class behind a row of `bench`; `random_call(draw)`, a case of `check`; and `host_calls()`,
the lines of `host`.
"""

import importlib
from types import ModuleType

from eagle_kernels import ops

from ..workloads import Workload


def entry_of(op: str) -> ModuleType:
    return importlib.import_module(f".{op}", __name__)


WORKLOADS: dict[str, type[Workload]] = {op: entry_of(op).WORKLOAD for op in ops.__all__}
