"""Compiles and launches the Triton kernels: one binary per specialisation, and the specialisation is what we say.

Triton's own JIT looks at every integer of a call: a row count of 1, or one that 16 divides, compiles anew, inside
tuples even under `do_not_specialize`. Here integers never specialise. What may differ between two binaries is the dtype
or the absence of an argument, the constexprs, and which arguments the launcher promises to be multiples of 16.
"""

from collections.abc import Mapping
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


# Never emptied: a captured graph launches these binaries for as long as it lives.
_binaries: dict[tuple[Specialisation, int], Any] = {}


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
    specialisation = Specialisation(
        kernel.fn, types_of(arguments), constant_values, aligned, num_warps, num_stages, pdl
    )
    binary = _binaries.get((specialisation, device.index))
    if binary is None:
        if torch.cuda.is_current_stream_capturing():
            raise _uncompiled(kernel)
        assert list(constants) == kernel.arg_names[len(arguments) :], kernel.fn.__name__
        binary = compile_kernel(kernel, specialisation, triton.runtime.driver.active.get_current_target())
        _binaries[specialisation, device.index] = binary
    binary[grid](*arguments, *constant_values)


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
