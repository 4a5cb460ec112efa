"""Which backend runs an op, and why: pure functions of device, dtype and settings, so that `explain` can print them."""

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import environment, library
from .checks import error

SETTINGS = environment.read_settings()

# In order of preference; `reference` is plain torch and runs wherever torch does.
_PREFERENCE = {"cpu": ("cpu", "reference"), "cuda": ("cuda", "triton", "reference")}
_DEFAULT_PREFERENCE = ("reference",)
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
    return f"this build has no {backend} kernels"


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
def choose_backend(op: str, device_type: str) -> tuple[str, str]:
    """The backend for `op` on this device type and the reason; raises where a forced backend cannot be used."""
    backend, reason = _choose_backend(op, device_type)
    if backend == "cpu":
        cpu_isa()  # the compiled kernels start out scalar: 3 times slower until this puts the machine's best in force
    return backend, reason


def _choose_backend(op: str, device_type: str) -> tuple[str, str]:
    forced = SETTINGS.backend
    if forced is not None:
        if (reason := unusable_reason(forced, device_type)) is not None:
            usable = [name for name in environment.BACKENDS if unusable_reason(name, device_type) is None]
            raise error(RuntimeError, op, f"EAGLE_KERNELS_BACKEND is {forced!r}", f"one of {usable}", reason)
        return forced, f"EAGLE_KERNELS_BACKEND={forced}"
    rejected = []
    for backend in _PREFERENCE.get(device_type, _DEFAULT_PREFERENCE):
        if (reason := unusable_reason(backend, device_type)) is None:
            return backend, "; ".join(rejected) or f"it is the fastest backend for {device_type} tensors"
        rejected.append(f"{backend}: {reason}")
    raise AssertionError("the reference backend is always usable")


def simple_plan(op: str, device: torch.device) -> Plan:
    """The plan of an op that has one kernel per backend."""
    backend, reason = choose_backend(op, device.type)
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
