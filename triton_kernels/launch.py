"""Compiles and launches the Triton kernels: one binary per specialization, which we choose instead of Triton's JIT.

Triton's JIT specializes on every integer of a call: a row count of 1, or a multiple of 16, compiles a new binary,
inside tuples even under `do_not_specialize`. Here integers never specialize. Two binaries may differ in the dtype or
absence of an argument, in the constexprs, and in which arguments the launcher promises to be multiples of 16.

What calls have in common is prepared once, as a `Launch`. An op keeps one for each of its signatures, and a call then
passes only numbers: addresses, strides, sizes. On CUDA a launch is one driver call with these numbers packed in place;
Triton's own launcher walks the nested tuples of the kernels in every call.

`Launches` prepares all launches of a call and where each of their numbers comes from, such as the address of an
operand. The compiled library then reads the operands and launches all of them in 1 us; in Python the numbers of
norm_concat_linear's two launches take 9 us.
"""

import ctypes
import functools
import math
import operator
import os
import re
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .alignment import row_stride
from .dialect import has_pdl

INTERPRETED: bool = triton.knobs.runtime.interpret

# An argument's type as Triton writes it. Strides, sizes and addresses come in 64 bits; the kernel casts the sizes that
# its index arithmetic needs in 32. NONE is an absent argument, which has no number.
I64, FP32, NONE = "i64", "fp32", "constexpr"
_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    torch.float8_e4m3fn: "*u8",  # codes and scales of 8 bits go as bytes
    torch.float8_e8m0fnu: "*u8",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def pointer_to(dtype: torch.dtype | None) -> str:
    """The type of a tensor's address; NONE for None."""
    return NONE if dtype is None else _POINTERS[dtype]


def pointers_to(dtypes: Sequence[torch.dtype | None]) -> tuple[str, ...]:
    return tuple(map(pointer_to, dtypes))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu) else tensor


# How a tensor appears among the numbers of a launch: as its address, or in the interpreter as the tensor itself.
address: Callable[[Tensor], Any] = _bytes if INTERPRETED else Tensor.data_ptr


class Specialization(NamedTuple):
    """Everything a binary depends on, the GPU aside. Calls with equal specializations share one binary."""

    function: object  # the Python function of the kernel: it hashes in constant time, a JITFunction does not
    types: tuple  # per run-time argument: its type, NONE where it is absent, nested for tuples
    constants: tuple  # the values of the trailing constexpr arguments
    aligned: tuple[str, ...]  # arguments whose pointers and integers are all multiples of 16
    num_warps: int
    num_stages: int
    pdl: bool


# What torch.cuda's functions of these names call; calling it directly saves 0.15 us. Those also initialize CUDA, which
# has happened here, since there are tensors.
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # its handle

# Run a binary with this grid and these numbers.
Launcher = Callable[[tuple[int, int, int], Sequence[Any]], None]

# Never emptied: a captured graph launches these binaries for as long as it lives.
_binaries: dict[tuple[Specialization, int], Any] = {}
_prepared: list[functools._lru_cache_wrapper] = []


def prepared(function: Callable) -> Callable:
    """Cache what an op prepares for a signature. The signature is the function's arguments, hashed in every call."""
    wrapped = functools.cache(function)
    _prepared.append(wrapped)
    return wrapped


def forget_prepared() -> None:
    """For tests, which change what launches are prepared from. Binaries stay."""
    for cache in _prepared:
        cache.cache_clear()


class Launch:
    """A kernel with everything but its numbers, on one device: what the calls of one signature share."""

    def __init__(
        self,
        kernel: Any,
        types: tuple,
        constants: Mapping[str, object],
        device: torch.device,
        *,
        aligned: tuple[str, ...] = (),
        aligned_together: tuple[str, ...] = (),
        num_warps: int = 4,
        num_stages: int = 1,
    ) -> None:
        """
        Args:
            kernel: of `triton.jit`.
            device: where it runs.
            num_warps, num_stages: Triton's options of those names.
            types: those of the kernel's arguments in order, without constexprs: I64, FP32, `pointer_to`, or tuples.
            constants: the kernel's constexprs in order, without the last, PDL. They follow the other arguments.
            aligned: names of arguments whose numbers are all multiples of 16 in every call.
            aligned_together: names of arguments whose numbers may be multiples of 16. Either all of them are, or none
                counts as aligned: a signature has two binaries, not one per combination, and a call's numbers pick one.

        PDL is programmatic dependent launch: the kernel then calls `gdc_wait` before it reads or writes.
        """
        self.kernel, self.types, self.device = kernel, types, device
        self._device_index = device.index
        pdl = has_pdl(device)
        self.constants = (*constants.values(), pdl)
        assert [*constants, "PDL"] == kernel.arg_names[len(types) :], kernel.__name__
        self._aligned, self._aligned_together = aligned, aligned_together
        self.num_warps, self._options = num_warps, (num_warps, num_stages, pdl)
        numbers = [path[0] for path, kind in _leaves(types) if kind != NONE]  # the argument of each number
        self.is_of_rows = [kernel.arg_names[argument] in aligned_together for argument in numbers]
        rows = [i for i, of_rows in enumerate(self.is_of_rows) if of_rows]
        # itemgetter returns no tuple for a single position, so the first is repeated.
        self._of_rows = operator.itemgetter(*rows, rows[0]) if rows else None
        self.launchers: list[Launcher | None] = [None, None]  # by whether the rows are aligned

    def is_aligned(self, numbers: Sequence[Any]) -> bool:
        """Whether the arguments that are aligned together are so in this call."""
        if self._of_rows is None:
            return True
        rows = self._of_rows(numbers)
        if INTERPRETED:
            rows = [row.data_ptr() if isinstance(row, Tensor) else row for row in rows]
        return math.gcd(16, *rows) == 16  # takes a third less time than an OR of all of them

    def specialization(self, is_aligned: bool) -> Specialization:
        names = (*self._aligned_together, *self._aligned) if is_aligned else self._aligned
        return Specialization(self.kernel.fn, self.types, self.constants, names, *self._options)

    def __call__(self, grid: tuple[int, int, int], numbers: Sequence[Any], is_aligned: bool | None = None) -> None:
        """Run the kernel on the current stream of the device.

        Args:
            numbers: those of the arguments, tuples flattened, absent ones left out: ints, floats, `address`es.
            is_aligned: the result of `is_aligned(numbers)`, where the caller has it already.

        Raises:
            ValueError: the grid has 2^31 programs or more in one dimension.
            RuntimeError: the binary is not compiled yet and the stream is being captured into a CUDA graph.
        """
        if max(grid) > _MAX_EXTENT:
            op = self.kernel.fn.__module__.rpartition(".")[2]
            got, expected = f"the rows take {max(grid)} programs", f"at most {_MAX_EXTENT}"
            raise ValueError(f"{op}: {got}, expected {expected}, because a grid has no more")
        if INTERPRETED:
            self.kernel[grid](*_nested(self.types, iter(numbers)), *self.constants)
            return
        if _current_device() != self._device_index:
            with torch.cuda.device(self.device):
                return self(grid, numbers)
        if is_aligned is None:
            is_aligned = self.is_aligned(numbers)
        launcher = self.launchers[is_aligned]
        if launcher is None:
            launcher = self.launchers[is_aligned] = self._launcher_of(self._binary_of(self.specialization(is_aligned)))
        launcher(grid, numbers)

    def _binary_of(self, specialization: Specialization) -> Any:
        binary = _binaries.get((specialization, self._device_index))
        if binary is None:
            if torch.cuda.is_current_stream_capturing():
                raise _uncompiled(self.kernel)
            binary = compile_kernel(self.kernel, specialization, triton.runtime.driver.active.get_current_target())
            _binaries[specialization, self._device_index] = binary
        return binary

    def _launcher_of(self, binary: Any) -> Launcher:
        """Launches through the CUDA driver where possible, else through Triton's own launcher."""

        def launch_by_triton(grid: tuple[int, int, int], numbers: Sequence[Any]) -> None:
            binary[grid](*_nested(self.types, iter(numbers)), *self.constants)

        driver = _cuda_driver()
        if driver is None or not _is_plain_binary(binary):
            return launch_by_triton
        binary._init_handles()  # loads the module; sets the function and its limit of shared memory
        kinds = [kind for _, kind in _leaves(self.types) if kind != NONE]
        return _DriverLauncher(driver, binary, kinds, self._device_index, launch_by_triton)


# Kinds of `Origin`, as csrc/triton_launches.cpp numbers them.
_CONSTANT, _INTEGER, _FLOAT, _ADDRESS, _ROW_STRIDE, _ROWS = range(6)


class Origin(NamedTuple):
    """Where a number of a launch comes from in each call. `value` is a position, or the constant."""

    kind: int
    value: int


def constant(value: int) -> Origin:
    return Origin(_CONSTANT, value)


def integer(position: int) -> Origin:
    """One of the call's `integers`."""
    return Origin(_INTEGER, position)


def floating(position: int) -> Origin:
    """One of the call's `floats`."""
    return Origin(_FLOAT, position)


def address_of(position: int) -> Origin:
    """The address of one of the call's `operands`, which must not be None."""
    return Origin(_ADDRESS, position)


def row_stride_of(position: int) -> Origin:
    """As `alignment.row_stride`: 0 for an operand that is None."""
    return Origin(_ROW_STRIDE, position)


def rows_of(position: int) -> Origin:
    return Origin(_ROWS, position)


class Step(NamedTuple):
    """One of the launches of a call."""

    launch: Launch
    grid: tuple[Origin, Origin, Origin]
    numbers: Sequence[Origin]


class Product(NamedTuple):
    """out = x @ weight^T + bias by torch, as a step between launches. The ints are positions among the operands."""

    by_torch: Callable[[Tensor, Tensor, Tensor | None, Tensor], None]
    x: int
    weight: int
    bias: int | None
    out: int

    def run(self, operands: Sequence[Any]) -> None:
        _, x, weight, bias, out = self
        self.by_torch(operands[x], operands[weight], None if bias is None else operands[bias], operands[out])


# The compiled library's function that launches all steps, or returns False. Set by ops/call.py.
launch_by_library: Callable[..., bool | None] | None = None


class Launches:
    """All that a call of one signature launches, in order, and where the numbers come from."""

    def __init__(
        self,
        device: torch.device,
        steps: Sequence[Step | Product],
        widths: Sequence[int] = (),
        must_be_aligned: bool = False,
    ) -> None:
        """
        Args:
            widths: those of the first operands; a call with other widths is refused.
            must_be_aligned: refuse a call whose rows are not aligned.
        """
        self._steps, self._widths, self._must_be_aligned = steps, widths, must_be_aligned
        self._device_index = device.index
        launches = [step for step in steps if isinstance(step, Step)]
        # For launches from Python: a pool of all numbers, each once, and which of them each launch takes.
        pool = sorted({origin for step in launches for origin in (*step.grid, *step.numbers)})
        places = {origin: place for place, origin in enumerate(pool)}
        self._values = [[value for kind, value in pool if kind == wanted] for wanted in range(_ROWS + 1)]
        self._picks = [
            tuple(operator.itemgetter(*map(places.__getitem__, origins)) for origins in (step.grid, step.numbers))
            for step in launches
        ]
        # For the library; csrc/triton_launches.cpp has the layout.
        values = [0] * _NUM_FUNCTIONS + [must_be_aligned, len(widths), len(steps), *widths]
        self._entries: list[tuple[int, Launch]] = []  # the place in the record for each launch's binaries
        for step in steps:
            if isinstance(step, Product):
                operands = (-1 if place is None else place for place in step[1:])
                origins, of_rows, threads = [constant(0)] * 3 + list(map(constant, operands)), [False] * 7, 0
            else:
                origins, of_rows = [*step.grid, *step.numbers], [False] * 3 + step.launch.is_of_rows
                threads = 32 * step.launch.num_warps
                self._entries.append((len(values) + _STEP_SIZES, step.launch))
            values += [threads, len(origins) - 3, *[0] * (2 * _BINARY_ENTRY)]
            for (kind, value), together in zip(origins, of_rows, strict=True):
                values += kind, value, together
        self._record = (ctypes.c_int64 * len(values))(*values)
        self._record_address = ctypes.addressof(self._record)
        self._has_binaries = False

    def __call__(
        self, operands: tuple[Tensor | None, ...], integers: tuple[Any, ...], floats: tuple[float, ...]
    ) -> bool:
        """False, with nothing launched, where the operands do not have the widths or the alignment.

        Raises:
            RuntimeError: as in a call of a `Launch`.
        """
        index = self._device_index
        if (
            self._has_binaries
            and _current_device() == index
            and launch_by_library is not None
            and launch_by_library(self._record_address, operands, integers, floats, current_stream(index))
        ):
            return True
        return self._launch_each(operands, integers, floats)

    def _launch_each(
        self, operands: tuple[Tensor | None, ...], integers: tuple[Any, ...], floats: tuple[float, ...]
    ) -> bool:
        if any(operands[k].shape[1] != width for k, width in enumerate(self._widths)):  # type: ignore[union-attr]
            return False
        constants, of_integers, of_floats, addresses, row_strides, rows = self._values
        pool = [
            *constants,
            *[integers[position] for position in of_integers],
            *[floats[position] for position in of_floats],
            *[address(operands[position]) for position in addresses],  # type: ignore[arg-type]  # these are there
            *[row_stride(operands[position]) for position in row_strides],
            *[operands[position].shape[0] for position in rows],  # type: ignore[union-attr]
        ]
        made = [(grid(pool), numbers(pool)) for grid, numbers in self._picks]
        aligned = [launch.is_aligned(numbers) for (_, launch), (_, numbers) in zip(self._entries, made, strict=True)]
        if self._must_be_aligned and not all(aligned):
            return False
        arguments = iter(zip(made, aligned, strict=True))
        for step in self._steps:
            if isinstance(step, Product):
                step.run(operands)
            else:
                (grid, numbers), is_aligned = next(arguments)
                step.launch(grid, numbers, is_aligned)
        if launch_by_library is not None:
            self._enter_binaries()
        return True

    def _enter_binaries(self) -> None:
        """Enter the binaries launched so far into the library's record, where the CUDA driver launches them."""
        driver = _cuda_driver()
        products = _torch_products() if len(self._entries) < len(self._steps) else (0, 0, 0)
        if driver is None or products is None:
            return
        for first, launch in self._entries:
            for place, launcher in zip((first, first + _BINARY_ENTRY), launch.launchers, strict=True):
                if isinstance(launcher, _DriverLauncher):
                    self._record[place : place + _BINARY_ENTRY] = [*launcher.entry()]
        self._record[:_NUM_FUNCTIONS] = [ctypes.cast(driver, ctypes.c_void_p).value or 0, *products]
        self._has_binaries = True


_MAX_EXTENT = 2**31 - 1  # of a grid
_NUM_FUNCTIONS = 4  # the driver's, torch's three
_STEP_SIZES = 2  # threads and the count of numbers, which come before a step's binaries
_BINARY_ENTRY = 3  # function, bytes of shared memory, whether it is launched with PDL


@functools.cache
def _torch_products() -> tuple[int, ...] | None:
    """The addresses of torch's C functions that multiply CUDA tensors; None where this torch lacks them."""
    try:
        torch_cuda = ctypes.CDLL("libtorch_cuda.so", mode=os.RTLD_NOLOAD)
        functions = [getattr(torch_cuda, f"aoti_torch_cuda_{name}_out") for name in ("mm", "addmm", "mm_dtype")]
    except (AttributeError, OSError):
        return None
    return tuple(ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions)


def _nested(types: tuple, numbers: Iterator[Any]) -> tuple:
    """The kernel's arguments, nested as `types`, from their flat numbers."""
    return tuple(
        _nested(kind, numbers) if isinstance(kind, tuple) else None if kind == NONE else next(numbers) for kind in types
    )


def _is_plain_binary(binary: Any) -> bool:
    """Whether a launch needs nothing but its arguments: no cluster, no scratch memory from Triton."""
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


class _DriverLauncher:
    """A binary with memory for its arguments and the launch's configuration, which every call fills anew."""

    def __init__(self, driver: Any, binary: Any, types: list[str], device_index: int, otherwise: Launcher) -> None:
        """`types`: one for each number, flat."""
        facts = binary.metadata
        # After the arguments, Triton's kernels take pointers to Triton's scratch memory: null where they use none.
        parameters = len(re.findall(r"\.param\b", binary.asm["ptx"].partition(".entry")[2].partition(")")[0]))
        assert parameters >= len(types), (parameters, len(types))
        unused = 8 * (parameters - len(types))
        numbers = "".join("f4x" if kind == FP32 else "q" for kind in types)
        # The configuration follows the arguments, so that one pack fills both, up to its stream: setting its fields one
        # by one takes 0.3 us more.
        self._pack_into = struct.Struct(f"{numbers}{unused}x7I4xQ").pack_into
        self._memory = ctypes.create_string_buffer(8 * parameters + ctypes.sizeof(_LaunchConfig))
        first = ctypes.addressof(self._memory)
        self._parameters = (ctypes.c_void_p * parameters)(*range(first, first + 8 * parameters, 8))
        self._attribute = _LaunchAttribute(_PROGRAMMATIC_STREAM_SERIALIZATION, (0, 1))
        self._config = _LaunchConfig.from_buffer(self._memory, 8 * parameters)
        self._config.attributes = ctypes.pointer(self._attribute)
        self._config.num_attributes = int(getattr(facts, "launch_pdl", False))
        self._block_and_shared = 32 * facts.num_warps, 1, 1, facts.shared
        self._config_pointer = ctypes.byref(self._config)
        self._function = ctypes.c_void_p(binary.function)
        self._driver, self._device_index, self._otherwise = driver, device_index, otherwise
        self._binary = binary  # keeps the function loaded: it is unloaded with the binary
        self._lock = threading.Lock()

    def entry(self) -> tuple[int, int, int]:
        """What the library needs of the binary."""
        return self._binary.function, self._binary.metadata.shared, self._config.num_attributes

    def __call__(self, grid: tuple[int, int, int], numbers: Sequence[int | float]) -> None:
        with self._lock:
            stream = current_stream(self._device_index)
            self._pack_into(self._memory, 0, *numbers, *grid, *self._block_and_shared, stream)
            error = self._driver(self._config_pointer, self._function, self._parameters, None)
        if error:  # Triton sets the context that this thread may lack, and raises a message for any other error
            self._otherwise(grid, numbers)


def compile_kernel(kernel: Any, specialization: Specialization, target: GPUTarget) -> Any:
    """Triton's CompiledKernel for `target`. It needs no GPU, which is what lets tests/compile run without one."""
    names = kernel.arg_names
    types = specialization.types + (NONE,) * len(specialization.constants)
    constants = dict(zip(names[len(specialization.types) :], specialization.constants, strict=True))
    for path, kind in _leaves(specialization.types):
        if kind == NONE:
            constants[path] = None
    attributes = {
        path: [["tt.divisibility", 16]]
        for path, kind in _leaves(specialization.types)
        if names[path[0]] in specialization.aligned and kind != NONE
    }
    source = ASTSource(kernel, dict(zip(names, types, strict=True)), constants, attributes)
    # Triton 3.10 turns off contraction into FMAs by default; set explicitly so that results keep their bits.
    options = {"num_warps": specialization.num_warps, "num_stages": specialization.num_stages, "enable_fp_fusion": True}
    if specialization.pdl:
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
    """The error for what must be done before a CUDA graph capture; `{}` in `expected` becomes a call that does it."""
    call = f"eagle_kernels.warmup({op!r}, <these arguments>, rows=<the row counts>)"
    return RuntimeError(f"{op}: {got}, expected {expected.format(call)}, because {because}")
