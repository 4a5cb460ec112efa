"""Compiles csrc/cuda for the CPU: the wheel's kernels, launchers and host files over device_host.h and fibers.cpp."""

import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import torch
from filelock import FileLock

import sanitizers

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# The root of csrc: `make mutants` sets a changed copy, and flags for it.
SOURCES = Path(os.environ.get("EAGLE_KERNELS_TEST_SOURCES", ROOT))
TORCH = Path(torch.__file__).parent
COMPILER = sanitizers.COMPILER

# The host files of all ops, and what they share; library.cpp concerns the wheel's own library.
HOSTS = [path for path in sorted(SOURCES.glob("csrc/*.cpp")) if path.stem not in ("library", "memory_bandwidth")]
_DEVICE = [*sorted(SOURCES.glob("csrc/cuda/*.cu")), *sorted(SOURCES.glob("csrc/cuda/*.cpp"))]
_SOURCES = [*_DEVICE, *HOSTS, *sorted(HERE.glob("*.cpp"))]
_HEADERS = [*SOURCES.glob("csrc/**/*.h"), *SOURCES.glob("csrc/cuda/*.cuh"), *HERE.glob("**/*.h")]
_FLAGS = ["-std=c++20", "-O1", "-g1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unknown-pragmas"]
# A product and a sum are rounded separately, as written; nvcc contracts some of them.
_FLAGS += ["-ffp-contract=off"]
# Conversions of fp16 by the processor; as calls of libgcc they took a quarter of the time.
if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
    _FLAGS += ["-mf16c"]
_FLAGS += [f"-I{SOURCES / 'csrc/cuda'}", f"-I{HERE}", "-isystem", str(TORCH / "include")]
_FLAGS += os.environ.get("EAGLE_KERNELS_TEST_FLAGS", "").split()
_FLAGS += ["-isystem", sysconfig.get_path("include")]
# For all files but the module's: torch 2.11's copy of pybind11 cannot be included with this.
_STABLE_FLAGS = ["-DTORCH_TARGET_VERSION=0x020B000000000000ULL"]
_HOST_FLAGS = ["-include", str(HERE / "registration.h"), "-DEAGLE_KERNELS_WITH_CUDA", "-DEAGLE_KERNELS_ISAS=scalar"]
# -Wno-psabi silences a note on 128-byte aligned arguments.
_DEVICE_FLAGS = [f"-I{HERE / 'runtime'}", "-Wno-psabi", "-DEAGLE_KERNELS_ALTERNATIVES"]
# What the scheduler itself does must not order two CUDA threads: racecheck.h states what does.
_RACECHECK = {"fibers.cpp": ["-fno-sanitize=thread", "-DEAGLE_KERNELS_RACECHECK"]}


@functools.cache
def load(sanitizer: str = "") -> ModuleType:
    """The emulation, whose `set_device` configures the emulated GPU; its ops are in
    `torch.ops.eagle_kernels_emulated`."""
    name = "eagle_kernels_emulated"
    loader = importlib.machinery.ExtensionFileLoader(name, str(build(sanitizer)))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    loader.exec_module(module)
    return module


def build(sanitizer: str) -> Path:
    """Compiles what has changed since the last build."""
    flags = _FLAGS + sanitizers.FLAGS.get(sanitizer, [])
    folder = ROOT / "build" / "cuda_host"
    folder.mkdir(parents=True, exist_ok=True)
    own_flags = [*flags, *_STABLE_FLAGS, *_HOST_FLAGS, *_DEVICE_FLAGS]
    settings = hashlib.sha256(" ".join([str(COMPILER), torch.__version__, *own_flags]).encode())
    for header in sorted(_HEADERS):
        settings.update(header.name.encode() + header.read_bytes())
    # One worker compiles, on every core; the others wait for it.
    with FileLock(folder / f"{settings.hexdigest()[:16]}.lock"), ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(lambda source: _compile(source, flags, folder, settings.copy()), _SOURCES))
        names = hashlib.sha256("".join(path.name for path in objects).encode())
        library = folder / f"libeagle_kernels_emulated-{names.hexdigest()[:16]}.so"
        if not library.exists():
            _write(library, [*flags, "-shared", *objects, f"-L{TORCH / 'lib'}", "-ltorch_cpu"])
    return library


def _compile(source: Path, flags: list[str], folder: Path, digest: object) -> Path:
    digest.update(source.read_bytes())
    target = folder / f"{source.name}-{digest.hexdigest()[:16]}.o"
    if not target.exists():
        own_flags = _HOST_FLAGS if source in HOSTS else _DEVICE_FLAGS if source in _DEVICE else []
        if source != HERE / "library.cpp":
            own_flags = own_flags + _STABLE_FLAGS
        if "-fsanitize=thread" in flags:
            own_flags = own_flags + _RACECHECK.get(source.name, [])
        _write(target, [*flags, *own_flags, "-x", "c++", "-c", source])
    return target


def check_syntax() -> None:
    """Raise RuntimeError where a device file does not compile: 8 s for all, where code for them takes minutes."""
    for source in _DEVICE:
        arguments = [*_FLAGS, *_DEVICE_FLAGS, *_STABLE_FLAGS, "-fsyntax-only", "-x", "c++", source]
        done = subprocess.run([COMPILER, *map(str, arguments)], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr)


def _write(target: Path, arguments: list[object]) -> None:
    """Run the compiler; `target` appears whole or not at all, whatever interrupts it."""
    partial = target.with_suffix(f".{os.getpid()}")
    command = [COMPILER, *map(str, arguments), "-o", str(partial)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode or done.stderr:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    partial.replace(target)
