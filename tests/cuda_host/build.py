"""Compiles csrc/cuda for the CPU: the kernels and launchers of the wheel over device_host.h and fibers.cpp."""

import hashlib
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TORCH = Path(torch.__file__).parent
COMPILER = shutil.which(os.environ.get("CXX", "g++"))

_SOURCES = [*sorted(ROOT.glob("csrc/cuda/*.cu")), ROOT / "csrc/cuda/ops.cpp", ROOT / "csrc/arguments.cpp"]
_SOURCES += sorted(HERE.glob("*.cpp"))
_HEADERS = [*ROOT.glob("csrc/*.h"), *ROOT.glob("csrc/cuda/*.h"), *ROOT.glob("csrc/cuda/*.cuh"), *HERE.glob("*.h")]
_FLAGS = ["-std=c++20", "-O1", "-g1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unknown-pragmas"]
# A product and a sum stay two roundings, as written; nvcc contracts some of them.
_FLAGS += ["-ffp-contract=off", "-DTORCH_TARGET_VERSION=0x020B000000000000ULL"]
_FLAGS += [f"-I{ROOT / 'csrc/cuda'}", f"-I{HERE}", "-isystem", str(TORCH / "include")]
_SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]


def build(sanitized: bool) -> Path:
    """The emulated library, compiled where no build of the same sources and flags is at hand."""
    flags = _FLAGS + (_SANITIZERS if sanitized else [])
    digest = hashlib.sha256(" ".join([str(COMPILER), torch.__version__, *flags]).encode())
    for path in sorted([*_SOURCES, *_HEADERS]):
        digest.update(path.name.encode() + path.read_bytes())
    folder = ROOT / "build" / "cuda_host" / digest.hexdigest()[:16]
    library = folder / "libeagle_kernels_emulated.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(lambda source: _compile(source, flags, folder), _SOURCES))
    partial = library.with_suffix(f".{os.getpid()}")
    _run([*flags, "-shared", *objects, "-o", partial, f"-L{TORCH / 'lib'}", "-ltorch_cpu"])
    partial.replace(library)
    return library


def _compile(source: Path, flags: list[str], folder: Path) -> Path:
    target = folder / f"{source.name}.{os.getpid()}.o"
    _run([*flags, "-x", "c++", "-c", source, "-o", target])
    return target


def _run(arguments: list[object]) -> None:
    done = subprocess.run([COMPILER, *map(str, arguments)], capture_output=True, text=True)
    if done.returncode or done.stderr:
        raise RuntimeError(f"g++ {' '.join(map(str, arguments))}\n{done.stderr}")
