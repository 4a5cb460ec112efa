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
    """Define `NAMESPACE::schema` with one Python body for every device and its fake kernel."""
    name = schema.partition("(")[0]
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
    except OSError as failure:
        return f"{COMPILED_LIBRARY.name} did not load: {failure}"
    return None


unsupported_reason: str | None = load_compiled()


def _exported(name: str, kind: type, default: Any) -> Any:
    """What a function of the library without arguments returns; the default where there is no library."""
    if unsupported_reason is not None:
        return default
    function = getattr(ctypes.CDLL(os.fspath(COMPILED_LIBRARY)), f"eagle_kernels_{name}")
    function.restype = kind
    return function()


# version, namespace, compiler, torch_headers, cuda_archs, cpu_isas; empty where there is no library.
build_info: dict[str, str] = dict(
    line.split(": ", 1) for line in _exported("build_info", ctypes.c_char_p, b"").decode().splitlines()
)
# What the library has CUDA kernels for, as CMakeLists.txt spells it: 80, 90a, 90+ptx.
cuda_archs: tuple[str, ...] = tuple(build_info.get("cuda_archs", "").split())
MAX_CUDA_CHUNKS: int = _exported("max_cuda_chunks", ctypes.c_int64, 0)
MAX_CUDA_DECODE_ROWS: int = _exported("max_cuda_decode_rows", ctypes.c_int64, 0)

CUDA_RUNTIME_VERSION: int = _exported("cuda_runtime_version", ctypes.c_int64, 0)  # 13000 for 13.0


def cuda_driver_version() -> int:
    """The newest CUDA that the driver serves, 13000 for 13.0; 0 without a driver. Makes no context."""
    return _exported("cuda_driver_version", ctypes.c_int64, 0)


# A hub package has a namespace of its own, so that several can be loaded beside an installed eagle-kernels.
NAMESPACE: str = build_info.get("namespace", "eagle_kernels")
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
registered_ops = getattr(torch.ops, NAMESPACE)
# Exchanged by tests: tests/cuda_host runs the CUDA kernels in an emulation.
primitives = getattr(torch.ops, f"{NAMESPACE}_C")
