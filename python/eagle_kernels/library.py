"""The op namespace `torch.ops.eagle_kernels`, and the compiled primitives of `torch.ops.eagle_kernels_C` behind it.

Public ops are registered from Python with `Library.define / impl`: 2 to 3 us a call, where `torch.library.custom_op`
costs 10 to 16 (torch 2.13, 2.6 GHz Xeon). The compiled library uses no symbol of Python and is optional.
"""

import ctypes
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

COMPILED_LIBRARY = Path(__file__).parent / "libeagle_kernels.so"


def register(schema: str, implementation: Callable, fake: Callable) -> None:
    """Define `NAMESPACE::schema` with one Python body for CPU and CUDA tensors and its fake kernel.

    A compiled library without a primitive for the op is not used at all.
    """
    global unsupported_reason
    op = schema.partition("(")[0].removesuffix("_out")
    for primitive in (f"{op}_out", f"{op}_checks_out"):
        if unsupported_reason is None and not hasattr(primitives, primitive):
            unsupported_reason = _is_older(primitive)
    define(schema, implementation, fake, ("CPU", "CUDA"))


def define(schema: str, implementation: Callable, fake: Callable, keys: tuple[str, ...]) -> None:
    """Define `NAMESPACE::schema` with a body for these dispatch keys and its fake kernel."""
    name = schema.partition("(")[0]
    # A fixed stride order: Inductor must hand over `out` views and strided chunks as they are, never re-laid copies.
    _library.define(schema, tags=(torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag))
    for key in keys:
        _library.impl(name, implementation, key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)


def register_with_out(op: str, arguments: str, run_out: Callable, empty: Callable) -> None:
    """Register op(arguments) -> Tensor, and op_out(arguments, out), which writes its last argument: `run_out`. `empty`
    allocates the result of the first, given its arguments, and is its fake kernel."""

    def run(*values: Any) -> Any:
        out = empty(*values)
        run_out(*values, out)
        return out

    register(f"{op}({arguments}) -> Tensor", run, empty)
    register(f"{op}_out({arguments}, Tensor(a!) out) -> ()", run_out, lambda *values: None)


def load_compiled() -> str | None:
    """Load the compiled primitives; returns None, or the reason why they cannot be used."""
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
        # torch's says only which file it was; its cause, the loader's, names a library or symbol that is missing.
        return f"{COMPILED_LIBRARY.name} did not load: {failure.__cause__ or failure}"
    if missing := [name for name in _EXPORTED if not hasattr(library, name)]:
        return _is_older(missing[0])
    # A library with another list of objects would mistake one for another: the class `list` for `Parameter`.
    if library.eagle_kernels_num_python_objects() != (count := len(_PYTHON_OBJECTS)):
        return _is_older(f"eagle_kernels_num_python_objects of {count}")
    return None


def _is_older(missing: str) -> str:
    """The reason in a checkout whose Python is newer than the library that was built there."""
    return f"{COMPILED_LIBRARY.name} is older than the package, it has no {missing}: install the package again"


class Primitives:
    """The compiled primitives by name. Those that ops call are C functions that Python calls without the dispatcher
    (csrc/python_call.h), which would take 4 us of a call of norm_concat_linear. A call with anything but plain tensors,
    and every call under a profiler, they pass on to the dispatcher, by the op packets of `namespace`."""

    def __init__(self, namespace: Any) -> None:
        self._namespace = namespace
        if unsupported_reason is None:
            self.__dict__ |= _python_functions(namespace)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._namespace, name)


def _python_functions(namespace: Any) -> dict[str, Callable]:
    """The C functions by name; {} where Python or torch lacks what they need."""
    exchange = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    python, library = ctypes.pythonapi, ctypes.PyDLL(os.fspath(COMPILED_LIBRARY))
    names = _exported("eagle_kernels_python_names").decode().split()
    if exchange is None or not all(hasattr(python, name) for name in names):
        return {}
    # Prototypes of our own: setting types on the functions of ctypes.pythonapi would change them for everyone.
    pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", python))
    function_of = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)(
        ("PyCFunction_NewEx", python)
    )
    functions = [ctypes.cast(getattr(python, name), ctypes.c_void_p).value for name in names]
    objects = list(map(id, _PYTHON_OBJECTS))  # addresses
    addresses = [(ctypes.c_void_p * len(those))(*those) for those in (functions, objects)]
    table = ctypes.c_void_p(pointer_of(exchange, b"dlpack_exchange_api"))
    if not library.eagle_kernels_set_python(*addresses, table):
        return {}
    method_of = library.eagle_kernels_python_method
    method_of.restype, method_of.argtypes = ctypes.c_void_p, [ctypes.c_int64]
    found = {}
    for method in iter(map(method_of, itertools.count()).__next__, None):
        name = ctypes.cast(method, ctypes.POINTER(ctypes.c_char_p))[0].decode()  # the first field of a PyMethodDef
        found[name] = function_of(method, getattr(namespace, name) if name.endswith("_out") else None, None)
    return found


# In the order of `Objects` in csrc/python_call.cpp; kept alive here as long as the library.
_PYTHON_OBJECTS = (
    None,
    True,
    False,
    list,
    Tensor,
    torch.nn.Parameter,
    RuntimeError,
    Tensor.is_neg,
    torch._C._autograd._profiler_enabled,
)

# The functions of the library, and what they return. All arguments are int64.
_EXPORTED: dict[str, type] = {
    "eagle_kernels_build_info": ctypes.c_char_p,
    "eagle_kernels_max_cuda_chunks": ctypes.c_int64,
    "eagle_kernels_max_cuda_decode_rows": ctypes.c_int64,
    "eagle_kernels_max_cuda_split_rows": ctypes.c_int64,
    "eagle_kernels_cuda_runtime_version": ctypes.c_int64,
    "eagle_kernels_cuda_driver_version": ctypes.c_int64,
    "eagle_kernels_wgmma_pays": ctypes.c_bool,
    "eagle_kernels_python_names": ctypes.c_char_p,
    "eagle_kernels_num_python_objects": ctypes.c_int64,
}
unsupported_reason: str | None = load_compiled()


def _exported(name: str, *arguments: int) -> Any:
    """What a function of the library returns; None, 0 or False where there is no library."""
    kind = _EXPORTED[name]
    if unsupported_reason is not None:
        return kind().value
    function = getattr(ctypes.CDLL(os.fspath(COMPILED_LIBRARY)), name)
    function.restype, function.argtypes = kind, [ctypes.c_int64] * len(arguments)
    return function(*arguments)


# version, namespace, compiler, torch_headers, cuda_archs, cpu_isas; empty where there is no library.
build_info: dict[str, str] = dict(
    line.split(": ", 1) for line in (_exported("eagle_kernels_build_info") or b"").decode().splitlines()
)
# The architectures that the library has CUDA kernels for, as CMakeLists.txt spells them: 80, 90a, 90+ptx.
cuda_archs: tuple[str, ...] = tuple(build_info.get("cuda_archs", "").split())
MAX_CUDA_CHUNKS: int = _exported("eagle_kernels_max_cuda_chunks")
MAX_CUDA_DECODE_ROWS: int = _exported("eagle_kernels_max_cuda_decode_rows")
MAX_CUDA_SPLIT_ROWS: int = _exported("eagle_kernels_max_cuda_split_rows")

CUDA_RUNTIME_VERSION: int = _exported("eagle_kernels_cuda_runtime_version")  # 13000 for 13.0


def cuda_driver_version() -> int:
    """The newest CUDA that the driver serves, 13000 for 13.0; 0 without a driver. Creates no context."""
    return _exported("eagle_kernels_cuda_driver_version")


def wgmma_pays(num_chunks: int, width: int, num_columns: int, multiprocessors: int) -> bool:
    """Whether 17 to 48 rows take an H200 less in one pass over a dense weight by warpgroups than in norm_concat and the
    library's product; False in a library without CUDA kernels."""
    return _exported("eagle_kernels_wgmma_pays", num_chunks, width, num_columns, multiprocessors)


# A hub package has a namespace of its own, so that several can be loaded beside an installed eagle-kernels.
NAMESPACE: str = build_info.get("namespace", "eagle_kernels")
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
registered_ops = getattr(torch.ops, NAMESPACE)
# Replaced by tests: tests/cuda_host runs the CUDA kernels in an emulation.
primitives = Primitives(getattr(torch.ops, f"{NAMESPACE}_C"))
