"""Which backend runs an op, and why: pure functions of device, dtype and settings, so that `explain` can print them."""

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import environment, library
from .checks import error

SETTINGS = environment.read_settings()

# In order of preference; `reference` is plain torch and runs wherever torch does. CUDA before Triton for its launch,
# a C++ call where Triton's launcher is Python: a lead, as long as no GPU has measured the kernels themselves.
_PREFERENCE = {"cpu": ("cpu", "reference"), "cuda": ("cuda", "triton", "reference")}
_DEFAULT_PREFERENCE = ("reference",)
COMPILED = ("cpu", "cuda")  # the backends behind torch.ops.eagle_kernels_C, which picks by the tensors' device
MOST_CUDA_CHUNKS = 8  # csrc/cuda/launchers.h
_remembered: list[Callable] = []


@dataclass(frozen=True)
class Plan:
    """What one call would run. `method` names the path inside the backend; print it or read the fields."""

    op: str
    backend: str
    method: str
    reason: str

    def __str__(self) -> str:
        return f"{self.op}: {self.backend}/{self.method}, because {self.reason}"


def unusable_reason(backend: str, device_type: str) -> str | None:
    """Why `backend` cannot run on tensors of this device; None where it can."""
    if backend == "reference":
        return None
    if backend == "cpu":
        if device_type != "cpu":
            return f"the tensors are on {device_type}"
        return library.missing_reason
    if backend == "triton":
        return _triton_unusable_reason(device_type)
    return _cuda_unusable_reason(device_type)


def _cuda_unusable_reason(device_type: str) -> str | None:
    if library.missing_reason is not None:
        return library.missing_reason
    if not library.cuda_archs:
        return "this build has no cuda kernels"
    if device_type != "cuda":
        return f"the tensors are on {device_type}"
    if torch.version.hip is not None:
        return "the GPU is AMD's"
    capability = torch.cuda.get_device_capability()
    if not any(runs_on(arch, capability) for arch in library.cuda_archs):
        archs = ", ".join(library.cuda_archs)
        return f"this build has kernels for {archs}, and the GPU has compute capability {capability[0]}.{capability[1]}"
    return None


def runs_on(arch: str, capability: tuple[int, int]) -> bool:
    """Whether code for `arch` runs on a GPU: PTX on all later ones, machine code on later minors, `90a` on 9.0 alone.

    >>> runs_on("80", (8, 9)), runs_on("90a", (10, 0)), runs_on("90+ptx", (10, 3))
    (True, False, True)
    """
    major, minor = divmod(int(arch.rstrip("a+ptx")), 10)
    if arch.endswith("+ptx"):
        return capability >= (major, minor)
    if arch.endswith("a"):
        return capability == (major, minor)
    return capability[0] == major and capability[1] >= minor


def _triton_unusable_reason(device_type: str) -> str | None:
    if importlib.util.find_spec("triton") is None:  # found, not imported: an import costs 0.2 s
        return "triton is not installed"
    if device_type == "cpu":
        return None if SETTINGS.triton_interpret else "it takes CPU tensors under TRITON_INTERPRET=1 only"
    if device_type != "cuda":
        return f"the tensors are on {device_type}"
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        return f"the GPU has compute capability {major}.{minor}, and the kernels need 8.0: cp.async and bf16"
    return None


@functools.cache
def choose_backend(op: str, device_type: str, num_chunks: int = 1) -> tuple[str, str]:
    """The backend for `op` on this device type and the reason; raises where a forced backend cannot be used."""
    backend, reason = _choose_backend(op, device_type, num_chunks)
    if backend == "cpu":
        cpu_isa()  # the compiled kernels start out scalar: 3 times slower until this puts the machine's best in force
    return backend, reason


def _choose_backend(op: str, device_type: str, num_chunks: int) -> tuple[str, str]:
    def unusable(backend: str) -> str | None:
        if (reason := unusable_reason(backend, device_type)) is None and backend == "cuda":
            return f"K={num_chunks} > {MOST_CUDA_CHUNKS} chunks" if num_chunks > MOST_CUDA_CHUNKS else None
        return reason

    forced = SETTINGS.backend
    if forced is not None:
        if (reason := unusable(forced)) is not None:
            usable = [name for name in environment.BACKENDS if unusable(name) is None]
            raise error(RuntimeError, op, f"EAGLE_KERNELS_BACKEND is {forced!r}", f"one of {usable}", reason)
        return forced, f"EAGLE_KERNELS_BACKEND={forced}"
    rejected = []
    for backend in _PREFERENCE.get(device_type, _DEFAULT_PREFERENCE):
        if (reason := unusable(backend)) is None:
            return backend, "; ".join(rejected) or f"it is the fastest backend for {device_type} tensors"
        rejected.append(f"{backend}: {reason}")
    raise AssertionError("the reference backend is always usable")


def simple_plan(op: str, device: torch.device, num_chunks: int = 1) -> Plan:
    """The plan of an op that has one kernel per backend."""
    backend, reason = choose_backend(op, device.type, num_chunks)
    return Plan(op, backend, "plain torch" if backend == "reference" else "one kernel", reason)


@functools.cache
def cpu_isa() -> str:
    """The instruction set of the compiled CPU kernels on this machine, after EAGLE_KERNELS_CPU_ISA."""
    cap = SETTINGS.cpu_isa or environment.CPU_ISAS[-1]
    return environment.CPU_ISAS[torch.ops.eagle_kernels_C.set_cpu_isa(environment.CPU_ISAS.index(cap))]


def remembered(function: Callable) -> Callable:
    """Cache what a plan function of hashable sizes returns, until `forget`."""
    cached = functools.lru_cache(maxsize=4096)(function)
    _remembered.append(cached)
    return cached


def forget() -> None:
    """Read the environment again and drop what was chosen from it; for tests and the benchmark."""
    global SETTINGS
    SETTINGS = environment.read_settings()
    for cached in (choose_backend, cpu_isa, *_remembered):
        cached.cache_clear()
