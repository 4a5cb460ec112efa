"""A vLLM plugin for tests: every call of an op of eagle_kernels appends a line to $EAGLE_KERNELS_CALLS/<pid>.

It counts below torch.compile and in every process, where a counter in Python code that Dynamo traces would not.
"""

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

OPS = ("norm_concat_linear", "norm_concat", "vocab_parallel_embedding")
_log: TextIO | None = None


def register() -> None:
    global _log
    folder = os.environ.get("EAGLE_KERNELS_CALLS")
    if folder is None or _log is not None:
        return
    from eagle_kernels import library

    _log = (Path(folder) / str(os.getpid())).open("a", buffering=1)
    for op in OPS:
        module = importlib.import_module(f"eagle_kernels.ops.{op}")
        for name, body in ((op, module._functional), (f"{op}_out", module._run)):
            library._library.impl(name, _counted(op, body), "CPU", allow_override=True)


def _counted(op: str, body: Callable) -> Callable:
    def call(*args: object) -> object:
        _log.write(f"{op}\n")
        return body(*args)

    return call
