"""The op namespace `torch.ops.eagle_kernels`, and the compiled primitives of `torch.ops.eagle_kernels_C` behind it.

Public ops are registered from Python with `Library.define / impl`: 2 to 3 us a call, where `torch.library.custom_op`
costs 10 to 16 (torch 2.13, 2.6 GHz Xeon). The compiled library holds no Python and is optional.
"""

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import torch

_library = torch.library.Library("eagle_kernels", "FRAGMENT")
COMPILED_LIBRARY = Path(__file__).parent / "libeagle_kernels.so"
# Exchanged by tests: tests/cuda_host runs the CUDA kernels in an emulation.
primitives = torch.ops.eagle_kernels_C


def register(schema: str, implementation: Callable, fake: Callable) -> None:
    """Define `eagle_kernels::schema` with one Python body for every device and its fake kernel."""
    name = schema.partition("(")[0]
    # A fixed stride order: Inductor must hand over `out` views and strided chunks as they are, never re-laid copies.
    _library.define(schema, tags=(torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag))
    for key in ("CPU", "CUDA"):
        _library.impl(name, implementation, key)
    torch.library.register_fake(f"eagle_kernels::{name}", fake, lib=_library)


def load_compiled() -> str | None:
    """Load the compiled primitives; the reason why not, where they cannot be had."""
    if not COMPILED_LIBRARY.exists():
        return "the package was installed without compiled kernels (EAGLE_KERNELS_BUILD, or no compiler was found)"
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11):
        return f"the compiled kernels need torch 2.11 or newer, and this is torch {torch.__version__}"
    try:
        torch.ops.load_library(os.fspath(COMPILED_LIBRARY))
    except OSError as failure:
        return f"{COMPILED_LIBRARY.name} did not load: {failure}"
    return None


def _cuda_archs() -> tuple[str, ...]:
    """What the loaded library has CUDA kernels for, as CMakeLists.txt spells it: 80, 90a, 90+ptx."""
    if unsupported_reason is not None:
        return ()
    archs = ctypes.CDLL(os.fspath(COMPILED_LIBRARY)).eagle_kernels_cuda_archs
    archs.restype = ctypes.c_char_p
    return tuple(archs().decode().split())


unsupported_reason: str | None = load_compiled()
cuda_archs: tuple[str, ...] = _cuda_archs()
MAX_CUDA_CHUNKS = 8
MAX_CUDA_FUSED_ROWS = 16
