"""The op namespace `torch.ops.eagle_kernels`, and the compiled primitives of `torch.ops.eagle_kernels_C` behind it.

Public ops are registered from Python with `Library.define / impl`: 2 to 3 us a call, where `torch.library.custom_op`
costs 10 to 16 (torch 2.13, 2.6 GHz Xeon). The compiled library holds no Python and is optional.
"""

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

COMPILED_LIBRARY = Path(__file__).parent / "libeagle_kernels.so"


def register(schema: str, implementation: Callable, fake: Callable) -> None:
    """Define `NAMESPACE::schema` with one Python body for every device and its fake kernel.

    A library that has no primitive for it counts as none.
    """
    global unsupported_reason
    name = schema.partition("(")[0]
    primitive = f"{name.removesuffix('_out')}_out"
    if unsupported_reason is None and not hasattr(primitives, primitive):
        unsupported_reason = _is_older(primitive)
    # A fixed stride order: Inductor must hand over `out` views and strided chunks as they are, never re-laid copies.
    _library.define(schema, tags=(torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag))
    for key in ("CPU", "CUDA"):
        _library.impl(name, implementation, key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)


def register_with_out(op: str, arguments: str, run_out: Callable, empty: Callable) -> None:
    """Register op(arguments) -> Tensor, and op_out(arguments, out), which writes its last argument: `run_out`. `empty`
    makes the result of the first from its arguments, and is its fake kernel."""

    def run(*values: Any) -> Any:
        out = empty(*values)
        run_out(*values, out)
        return out

    register(f"{op}({arguments}) -> Tensor", run, empty)
    register(f"{op}_out({arguments}, Tensor(a!) out) -> ()", run_out, lambda *values: None)


def load_compiled() -> str | None:
    """Load the compiled primitives; the reason why not, where they cannot be had."""
    if not COMPILED_LIBRARY.exists():
        return (
            "the package is without compiled kernels: it was installed with EAGLE_KERNELS_BUILD=none, or is a checkout "
            "that was never installed"
        )
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11):
        return f"the compiled kernels need torch 2.11 or newer, and this is torch {torch.__version__}"
    try:
        torch.ops.load_library(os.fspath(COMPILED_LIBRARY))
        library = ctypes.CDLL(os.fspath(COMPILED_LIBRARY))
    except OSError as failure:
        return f"{COMPILED_LIBRARY.name} did not load: {failure}"
    missing = [name for name in _EXPORTED if not hasattr(library, name)]
    return _is_older(missing[0]) if missing else None


def _is_older(missing: str) -> str:
    """Of a checkout whose Python is newer than the library that was built there."""
    return f"{COMPILED_LIBRARY.name} is older than the package, it has no {missing}: install the package again"


# The functions of the library without arguments, and what they return.
_EXPORTED: dict[str, type] = {
    "eagle_kernels_build_info": ctypes.c_char_p,
    "eagle_kernels_max_cuda_chunks": ctypes.c_int64,
    "eagle_kernels_max_cuda_decode_rows": ctypes.c_int64,
    "eagle_kernels_max_cuda_split_rows": ctypes.c_int64,
    "eagle_kernels_cuda_runtime_version": ctypes.c_int64,
    "eagle_kernels_cuda_driver_version": ctypes.c_int64,
}
unsupported_reason: str | None = load_compiled()


def _exported(name: str) -> Any:
    """What a function of the library returns; None or 0 where there is no library."""
    kind = _EXPORTED[name]
    if unsupported_reason is not None:
        return kind().value
    function = getattr(ctypes.CDLL(os.fspath(COMPILED_LIBRARY)), name)
    function.restype = kind
    return function()


# version, namespace, compiler, torch_headers, cuda_archs, cpu_isas; empty where there is no library.
build_info: dict[str, str] = dict(
    line.split(": ", 1) for line in (_exported("eagle_kernels_build_info") or b"").decode().splitlines()
)
# What the library has CUDA kernels for, as CMakeLists.txt spells it: 80, 90a, 90+ptx.
cuda_archs: tuple[str, ...] = tuple(build_info.get("cuda_archs", "").split())
MAX_CUDA_CHUNKS: int = _exported("eagle_kernels_max_cuda_chunks")
MAX_CUDA_DECODE_ROWS: int = _exported("eagle_kernels_max_cuda_decode_rows")
MAX_CUDA_SPLIT_ROWS: int = _exported("eagle_kernels_max_cuda_split_rows")

CUDA_RUNTIME_VERSION: int = _exported("eagle_kernels_cuda_runtime_version")  # 13000 for 13.0


def cuda_driver_version() -> int:
    """The newest CUDA that the driver serves, 13000 for 13.0; 0 without a driver. Makes no context."""
    return _exported("eagle_kernels_cuda_driver_version")


# A hub package has a namespace of its own, so that several can be loaded beside an installed eagle-kernels.
NAMESPACE: str = build_info.get("namespace", "eagle_kernels")
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
registered_ops = getattr(torch.ops, NAMESPACE)
# Exchanged by tests: tests/cuda_host runs the CUDA kernels in an emulation.
primitives = getattr(torch.ops, f"{NAMESPACE}_C")
