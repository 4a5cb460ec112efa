"""Compiles what the launchers would launch, for GPUs that are not here, and counts what each binary needs.

`launches` runs a launcher on meta tensors and intercepts its launches, so what is compiled is the specialization that a
real call would look up, not a copy of it.
"""

import functools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

import triton
from eagle_kernels.triton_kernels import launch as launching
from eagle_kernels.triton_kernels.launch import Specialization, compile_kernel
from torch import Tensor
from triton.backends.compiler import GPUTarget

Arch = int | str
NVIDIA_ARCHS = (80, 89, 90, 100, 120)
ARCHS = (*NVIDIA_ARCHS, "gfx942")
# Bytes for one program: CUDA programming guide, "technical specifications per compute capability"; CDNA3 ISA, LDS.
SHARED_LIMIT = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10, "gfx942": 64 << 10}
TMEM_COLUMNS = 512

_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
# How each generation multiplies: Ampere and all consumer GPUs, Hopper, Blackwell.
_MMA = r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b"


@dataclass(frozen=True)
class Launch:
    """A kernel, everything that its binary depends on, and the grid that was asked for."""

    kernel: object
    specialization: Specialization
    grid: tuple[int, int, int]


def launches(call: Callable[[], None], arch: Arch) -> list[Launch]:
    """What `call` launches where the GPU is an `arch`."""
    seen = []

    def record(launch: launching.Launch, grid: tuple, numbers: Sequence, is_aligned: bool | None = None) -> None:
        assert is_aligned in (None, launch.is_aligned(numbers))
        prepared_for = [kind for _, kind in launching._leaves(launch.types) if kind != launching.NONE]
        assert [_type_of(number) for number in numbers] == prepared_for, launch.kernel.fn.__name__
        seen.append(Launch(launch.kernel, launch.specialization(launch.is_aligned(numbers)), grid))

    launching.forget_prepared()  # those of another arch
    patched = mock.patch.multiple(launching, has_pdl=lambda device: has_pdl(arch))
    with patched, mock.patch.object(launching.Launch, "__call__", record), ExitStack() as patches:
        for name, module in list(sys.modules.items()):
            if name.startswith("eagle_kernels.triton_kernels.") and hasattr(module, "address"):
                patches.enter_context(mock.patch.object(module, "address", _Address.of))
        call()
    return seen


class _Address(int):
    """The address of a tensor, with its dtype."""

    @classmethod
    def of(cls, tensor: Tensor) -> "_Address":
        address = cls(tensor.data_ptr())
        address.dtype = tensor.dtype
        return address


def _type_of(number: object) -> str:
    if isinstance(number, _Address):
        return launching.pointer_to(number.dtype)
    return {int: launching.I64, float: launching.FP32}[type(number)]


def has_pdl(arch: Arch) -> bool:
    return isinstance(arch, int) and arch >= 90


@dataclass(frozen=True)
class Resources:
    """What one binary needs, read from its machine code."""

    registers: int
    spills: int  # instructions that store or load a spilled register
    shared: int  # bytes
    tmem: int  # columns
    trap: bool  # the body Triton gives an sm_100 kernel that outgrows the tensor memory, without saying so
    loads: str  # global loads by width, `128-bit x4`
    mma: str  # matrix instructions by kind

    def faults(self, arch: Arch) -> list[str]:
        """Why this binary must not ship; empty where it may."""
        limits = {
            f"{self.spills} instructions that spill": self.spills > 0,
            f"{self.shared} bytes of shared memory, of {SHARED_LIMIT[arch]}": self.shared > SHARED_LIMIT[arch],
            f"{self.tmem} columns of tensor memory, of {TMEM_COLUMNS}": self.tmem > TMEM_COLUMNS,
            "a trap for a body": self.trap,
        }
        return [fault for fault, found in limits.items() if found]


def resources(launch: Launch, arch: Arch) -> Resources:
    """Compile (once per process; Triton's own cache keeps it longer) and count."""
    return _resources(launch.kernel, launch.specialization, arch)


@functools.cache
def _resources(kernel: object, specialization: Specialization, arch: Arch) -> Resources:
    target = GPUTarget("cuda", arch, 32) if isinstance(arch, int) else GPUTarget("hip", arch, 64)
    binary = compile_kernel(kernel, specialization, target)
    return _count_nvidia(binary) if isinstance(arch, int) else _count_amd(binary)


def _count_nvidia(binary: object) -> Resources:
    ptx = binary.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(binary.asm["cubin"])
        cubin.flush()
        usage = nvidia_tool("cuobjdump", "--dump-resource-usage", cubin.name)
        registers, stack = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))
        # Nothing spills without a stack. Disassembling takes 0.3 s, three times as long as compiling.
        spills = len(re.findall(r"\b(?:STL|LDL)\b", nvidia_tool("nvdisasm", "-c", cubin.name))) if stack else 0
    return Resources(
        registers=registers,
        spills=spills,
        shared=binary.metadata.shared,
        tmem=getattr(binary.metadata, "tmem_size", None) or 0,
        trap="trap;" in ptx,
        loads=_tally([*_load_widths(ptx), *re.findall(r"\b(cp\.async\.bulk\.tensor)", ptx)]),
        mma=_tally(re.findall(_MMA, ptx)),
    )


def _load_widths(ptx: str) -> Iterator[str]:
    """`128-bit` for ld.global.v4.b32, `128-bit async` for a cp.async of 16 bytes."""
    for vector, bits in re.findall(r"\bld\.global[\w.:]*?(?:\.v(\d))?\.[bfsu](\d+)", ptx):
        yield f"{int(vector or 1) * int(bits)}-bit"
    for size in re.findall(r"\bcp\.async\.c[ag]\.shared\.global[\w.:]*[^;]*?, (0x\w+)", ptx):
        yield f"{int(size, 16) * 8}-bit async"


def _count_amd(binary: object) -> Resources:
    text = binary.asm["amdgcn"]
    # Spilled scalars move to lanes of a vector register, not to memory: only vector registers count.
    counts = {key: int(value) for key, value in re.findall(r"\.(\w+):\s+(\d+)", text)}
    return Resources(
        registers=counts["vgpr_count"],
        spills=counts["vgpr_spill_count"],
        shared=binary.metadata.shared,
        tmem=0,
        trap="s_trap" in text,
        loads=_tally(re.findall(r"\b((?:global|buffer)_load_\w+)", text)),
        mma=_tally(["mfma"] * len(re.findall(r"\bv_mfma", text))),
    )


def _tally(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(f"{name} x{names.count(name)}" for name in sorted(set(names)))


def nvidia_tool(tool: str, *arguments: str) -> str:
    return subprocess.run([_TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout


@dataclass(frozen=True)
class Row:
    """One binary in the table that the gate saves."""

    kernel: str
    case: str
    arch: str
    warps: int
    resources: Resources

    @classmethod
    def of(cls, values: dict) -> "Row":
        """From `dataclasses.asdict`."""
        return cls(**values | {"resources": Resources(**values["resources"])})


def save(rows: list[Row], path: Path) -> None:
    """The rows as JSON, with the compiler they come from."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [asdict(row) | asdict(row.resources) for row in rows]
    for line in lines:
        del line["resources"]
    path.write_text(json.dumps({"triton": triton.__version__, "binaries": lines}, indent=1) + "\n")


def summary(rows: list[Row]) -> str:
    """The worst of each kernel on each arch, one line each."""
    lines = [f"{'kernel':32} {'arch':>6} {'binaries':>8} {'registers':>9} {'spills':>6} {'shared':>7} {'tmem':>4}  mma"]
    for kernel, arch in dict.fromkeys((row.kernel, row.arch) for row in rows):
        found = [row.resources for row in rows if (row.kernel, row.arch) == (kernel, arch)]
        worst = [max(getattr(entry, name) for entry in found) for name in ("registers", "spills", "shared", "tmem")]
        flavours = sorted({name for entry in found for name in re.findall(r"[a-z][\w.]+(?= x)", entry.mma)})
        numbers = "{:>9} {:>6} {:>7} {:>4}".format(*worst)
        lines.append(f"{kernel:32} {arch:>6} {len(found):>8} {numbers}  {', '.join(flavours)}")
    return "\n".join(lines)
