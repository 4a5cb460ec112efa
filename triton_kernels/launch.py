"""Compiles and launches the Triton kernels: one binary per specialisation, and the specialisation is what we say.

Triton's own JIT looks at every integer of a call: a row count of 1, or one that 16 divides, compiles anew, inside
tuples even under `do_not_specialize`. Here integers never specialise. What may differ between two binaries is the dtype
or the absence of an argument, the constexprs, and which arguments the launcher promises to be multiples of 16.

On CUDA a launch is one call of the driver with arguments packed in place; Triton's own launcher walks the nested tuples
of these kernels in every call.
"""

import ctypes
import functools
import re
import struct
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

INTERPRETED: bool = triton.knobs.runtime.interpret

_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class Specialisation(NamedTuple):
    """Everything a binary depends on, the GPU aside. Calls with equal specialisations share one binary."""

    function: object  # the Python function under the kernel: hashes in constant time, a JITFunction does not
    types: tuple  # per run-time argument: its type, "constexpr" for None, nested for tuples
    constants: tuple  # the values of the trailing constexpr arguments
    aligned: tuple[str, ...]  # arguments whose pointers and integers are all multiples of 16
    num_warps: int
    num_stages: int
    pdl: bool


# Run a binary: with the grid, the call's arguments, and these flattened to numbers.
Launcher = Callable[[tuple[int, int, int], tuple, list[int | float]], None]

# Never emptied: a captured graph launches these binaries for as long as it lives.
_binaries: dict[tuple[Specialisation, int], Any] = {}
# The same by what `launch` is called with: a key that costs less to make than a Specialisation.
_launchers: dict[tuple, Launcher] = {}


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    arguments: tuple,
    constants: Mapping[str, object],
    *,
    aligned: tuple[str, ...] = (),
    num_warps: int = 4,
    num_stages: int = 1,
    pdl: bool = False,
    device: torch.device,
) -> None:
    """Run `kernel` on the current stream of `device`.

    Args:
        arguments: in the kernel's order, constexprs left out: tensors, ints, floats, None, or tuples of these.
        constants: the kernel's constexprs, which are last in its parameter list and in this order.
        aligned: names of arguments of which every pointer (in bytes) and every integer is a multiple of 16.
        pdl: programmatic dependent launch; the kernel then calls `gdc_wait` before it reads or writes.

    Raises:
        RuntimeError: the binary is not there yet and the stream is being captured into a CUDA graph.
    """
    if INTERPRETED:
        kernel[grid](*arguments, **constants)
        return
    if torch.cuda.current_device() != device.index:
        with torch.cuda.device(device):
            return launch(
                kernel,
                grid,
                arguments,
                constants,
                aligned=aligned,
                num_warps=num_warps,
                num_stages=num_stages,
                pdl=pdl,
                device=device,
            )
    constant_values = tuple(constants.values())
    values: list[int | float] = []
    kinds: list[object] = []
    _flatten(arguments, values, kinds)
    key = (kernel.fn, tuple(kinds), constant_values, aligned, num_warps, num_stages, pdl, device.index)
    launcher = _launchers.get(key)
    if launcher is None:
        specialisation = Specialisation(
            kernel.fn, types_of(arguments), constant_values, aligned, num_warps, num_stages, pdl
        )
        assert list(constants) == kernel.arg_names[len(arguments) :], kernel.fn.__name__
        launcher = _launchers[key] = _launcher_of(_binary_of(kernel, specialisation, device), constant_values, values)
    launcher(grid, arguments, values)


def _flatten(arguments: tuple, values: list[int | float], kinds: list[object]) -> None:
    """The numbers that a kernel gets, and what tells one specialisation's arguments from another's."""
    for argument in arguments:
        kind = type(argument)
        if kind is int or kind is float:
            values.append(argument)
            kinds.append(kind)
        elif kind is tuple:
            kinds.append(len(argument))
            _flatten(argument, values, kinds)
        elif argument is None:
            kinds.append(None)
        else:
            values.append(argument.data_ptr())
            kinds.append(argument.dtype)


def _binary_of(kernel: Any, specialisation: Specialisation, device: torch.device) -> Any:
    binary = _binaries.get((specialisation, device.index))
    if binary is None:
        if torch.cuda.is_current_stream_capturing():
            raise _uncompiled(kernel)
        binary = compile_kernel(kernel, specialisation, triton.runtime.driver.active.get_current_target())
        _binaries[specialisation, device.index] = binary
    return binary


def _launcher_of(binary: Any, constant_values: tuple, values: list[int | float]) -> Launcher:
    """By the CUDA driver where it can be, else by Triton's own launcher."""

    def launch_by_triton(grid: tuple[int, int, int], arguments: tuple, values: list[int | float]) -> None:
        binary[grid](*arguments, *constant_values)

    driver = _cuda_driver()
    if driver is None or not _is_plain_binary(binary):
        return launch_by_triton
    binary._init_handles()  # loads the module; sets the function and what it may have of shared memory
    call = _DriverCall(binary, values)

    def launch_by_driver(grid: tuple[int, int, int], arguments: tuple, values: list[int | float]) -> None:
        if call(driver, grid, values):  # a thread without a context, which Triton sets; and it words what is left
            launch_by_triton(grid, arguments, values)

    return launch_by_driver


def _is_plain_binary(binary: Any) -> bool:
    """Whether a launch needs nothing but its arguments: no cluster, no memory of Triton's."""
    facts = getattr(binary, "metadata", None)
    extras = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "tensordesc_meta")
    return facts is not None and facts.num_ctas == 1 and not any(getattr(facts, name, None) for name in extras)


@functools.cache
def _cuda_driver() -> Any:
    """cuLaunchKernelEx; None where there is no CUDA driver."""
    if torch.version.cuda is None:
        return None
    try:
        return ctypes.PyDLL("libcuda.so.1").cuLaunchKernelEx
    except (AttributeError, OSError):
        return None


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute, of one int."""

    _fields_ = (("id", ctypes.c_int), ("value", ctypes.c_int * 17))  # the value begins after 4 bytes of padding


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    )


_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID


class _DriverCall:
    """A binary with memory for its arguments, which every call fills anew."""

    def __init__(self, binary: Any, values: list[int | float]) -> None:
        """`values`: of any call, for their types."""
        facts = binary.metadata
        # Behind the arguments Triton's kernels have pointers to memory of its own: null where they use none.
        parameters = len(re.findall(r"\.param\b", binary.asm["ptx"].partition(".entry")[2].partition(")")[0]))
        assert parameters >= len(values), (parameters, len(values))
        unused = [0] * (parameters - len(values))
        self._pack = struct.Struct("".join("f4x" if isinstance(value, float) else "q" for value in (*values, *unused)))
        self._unused = unused
        self._memory = ctypes.create_string_buffer(self._pack.size)
        first = ctypes.addressof(self._memory)
        self._parameters = (ctypes.c_void_p * parameters)(*range(first, first + 8 * parameters, 8))
        self._attribute = _LaunchAttribute(_PROGRAMMATIC_STREAM_SERIALIZATION, (0, 1))
        pdl = getattr(facts, "launch_pdl", False)
        self._config = _LaunchConfig(
            (1, 1, 1), (32 * facts.num_warps, 1, 1), facts.shared, None, ctypes.pointer(self._attribute), int(pdl)
        )
        self._config_pointer = ctypes.byref(self._config)
        self._function = ctypes.c_void_p(binary.function)
        self._binary = binary  # which unloads the function when it goes
        self._lock = threading.Lock()

    def __call__(self, driver: Any, grid: tuple[int, int, int], values: list[int | float]) -> int:
        """The driver's error code, 0 for success."""
        with self._lock:
            self._pack.pack_into(self._memory, 0, *values, *self._unused)
            self._config.grid[:] = grid
            self._config.stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
            return driver(self._config_pointer, self._function, self._parameters, None)


def types_of(arguments: tuple) -> tuple:
    """The type of each argument as Triton writes it; every int inside a tuple is 64 bits wide."""
    return tuple(
        _POINTERS[argument.dtype]
        if isinstance(argument, Tensor)
        else types_of(argument)
        if isinstance(argument, tuple)
        else _SCALARS[type(argument)]
        for argument in arguments
    )


# i64: strides and addresses come this way; sizes that index arithmetic wants in 32 bits are cast in the kernel.
_SCALARS = {int: "i64", float: "fp32", type(None): "constexpr"}


def compile_kernel(kernel: Any, specialisation: Specialisation, target: GPUTarget) -> Any:
    """Triton's CompiledKernel for `target`; needs no GPU, which is what the offline compile gate lives on."""
    names = kernel.arg_names
    types = specialisation.types + ("constexpr",) * len(specialisation.constants)
    constants = dict(zip(names[len(specialisation.types) :], specialisation.constants, strict=True))
    for path, kind in _leaves(specialisation.types):
        if kind == "constexpr":
            constants[path] = None
    attributes = {
        path: [["tt.divisibility", 16]]
        for path, kind in _leaves(specialisation.types)
        if names[path[0]] in specialisation.aligned and kind != "constexpr"
    }
    source = ASTSource(kernel, dict(zip(names, types, strict=True)), constants, attributes)
    # Triton 3.10 turns contraction into FMAs off by default; written down so that bits do not change with it.
    options = {"num_warps": specialisation.num_warps, "num_stages": specialisation.num_stages, "enable_fp_fusion": True}
    if specialisation.pdl:
        options["launch_pdl"] = True
    return triton.compile(source, target=target, options=options)


def _leaves(types: tuple, path: tuple[int, ...] = ()) -> list[tuple[tuple[int, ...], str]]:
    leaves: list[tuple[tuple[int, ...], str]] = []
    for position, kind in enumerate(types):
        here = (*path, position)
        leaves += _leaves(kind, here) if isinstance(kind, tuple) else [(here, kind)]
    return leaves


def _uncompiled(kernel: Any) -> RuntimeError:
    return needs_warmup(
        kernel.fn.__module__.rpartition(".")[2],
        f"the Triton kernel {kernel.fn.__name__} is not compiled for these dtypes and sizes",
        "a call of {} before the capture",
        "compiling and loading inside a CUDA graph capture would break it",
    )


def needs_warmup(op: str, got: str, expected: str, because: str) -> RuntimeError:
    """What a CUDA graph capture must find done; `expected` has a place for the call that does it."""
    call = f"eagle_kernels.warmup({op!r}, <these arguments>, rows=<the row counts>)"
    return RuntimeError(f"{op}: {got}, expected {expected.format(call)}, because {because}")
