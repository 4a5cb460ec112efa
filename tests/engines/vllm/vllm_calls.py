"""A vLLM plugin for tests: every call of an op of eagle_kernels appends a line to $EAGLE_KERNELS_CALLS/<pid>.

It counts calls of the compiled primitives, below torch.compile and in every process: a call that Dynamo traces runs the
registered op, any other goes straight to the primitive, and both end in the primitive. Probes at load are not counted.
"""

import os
from pathlib import Path
from typing import TextIO

OPS = {"norm_concat_linear", "norm_concat_linear_quantized", "norm_concat"}
OPS |= {"vocab_parallel_embedding", "store_context_kv"}
_log: TextIO | None = None
_probing = False


class _Counted:
    """`library.primitives`, with a line in the log for each call."""

    def __init__(self, primitives: object) -> None:
        self._primitives = primitives

    def __getattr__(self, name: str) -> object:
        primitive, op = getattr(self._primitives, name), name.removesuffix("_out").removesuffix("_few_rows")

        def call(*args: object) -> object:
            if op in OPS and not _probing:
                _log.write(f"{op}\n")
            return primitive(*args)

        return call


def register() -> None:
    global _log
    folder = os.environ.get("EAGLE_KERNELS_CALLS")
    if folder is None or _log is not None:
        return
    from eagle_kernels import library
    from eagle_kernels.engines import projection

    probe = projection.run_probe

    def uncounted(*args: object) -> None:
        global _probing
        _probing = True
        try:
            probe(*args)
        finally:
            _probing = False

    projection.run_probe = uncounted
    _log = (Path(folder) / str(os.getpid())).open("a", buffering=1)
    library.primitives = _Counted(library.primitives)
