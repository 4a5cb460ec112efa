"""Drives CMakeLists.txt; everything declarative is in pyproject.toml.

EAGLE_KERNELS_BUILD        auto (default), cpu, cuda, none: what to compile. auto takes what the machine has: CUDA with
                           nvcc, the CPU kernels with a C++ compiler, else pure Python and Triton.
EAGLE_KERNELS_CUDA_ARCHS   default 80;89;90a;100a;120 and PTX for what comes later; an editable install takes 90a
                           alone: 47 s of one core instead of 84.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
LIBRARY = "libeagle_kernels.so"
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "python/eagle_kernels/version.py").read_text()).group(1)


def say(message: str) -> None:
    # pip shows a build's output with -v or on failure; `eagle-kernels info` says the same about an installed package.
    print(f"eagle-kernels: {message}", file=sys.stderr, flush=True)


def find_torch() -> Path | None:
    """The installed torch package. Under build isolation it is not importable but is beside the interpreter."""
    spec = importlib.util.find_spec("torch")
    candidates = [Path(spec.origin).parent] if spec and spec.origin else []
    candidates += [Path(sysconfig.get_path(kind)) / "torch" for kind in ("platlib", "purelib")]
    return next((path for path in candidates if (path / "include/torch/csrc/stable/library.h").exists()), None)


def find_nvcc() -> str | None:
    cuda_home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return os.environ.get("CUDACXX") or shutil.which("nvcc", path=f"{cuda_home}/bin" if cuda_home else None)


def find_compiler() -> str | None:
    return os.environ.get("CXX") or next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


def choose_build() -> str:
    """cuda, cpu or none; says in one line what was left out, and fails where what was asked for cannot be had."""
    requested = os.environ.get("EAGLE_KERNELS_BUILD", "auto").lower()
    if requested not in ("auto", "cpu", "cuda", "none"):
        raise SystemExit(f"eagle-kernels: EAGLE_KERNELS_BUILD is {requested!r}, expected auto, cpu, cuda or none")
    if requested == "none":
        return "none"
    missing = None
    if find_compiler() is None:
        missing = "a C++ compiler"
    elif find_torch() is None:
        missing = "an installed torch >= 2.11"
    if missing and requested == "auto":
        say(f"NO COMPILED KERNELS: {missing} was not found; installing pure Python")
        return "none"
    if missing:
        raise SystemExit(f"eagle-kernels: EAGLE_KERNELS_BUILD={requested} needs {missing}, and none was found")
    if find_nvcc() is not None and requested != "cpu":
        return "cuda"
    if requested == "cuda":
        raise SystemExit("eagle-kernels: EAGLE_KERNELS_BUILD=cuda needs nvcc, and none was found (PATH, CUDA_HOME)")
    if requested == "auto":
        say("NO CUDA KERNELS: nvcc was not found (PATH, CUDA_HOME); building the CPU kernels only")
    return "cpu"


def cuda_archs(editable: bool) -> str:
    return os.environ.get("EAGLE_KERNELS_CUDA_ARCHS") or ("90a" if editable else "80;89;90a;100a;120")


class CMakeBuild(build_ext):
    """Configure and build with CMake and ninja; both libraries land where setuptools expects the extension."""

    def build_extension(self, ext: Extension) -> None:
        # The build tools from PyPI, not those on PATH: Debian 12's CMake 3.25 is too old.
        import cmake
        import ninja
        import pybind11

        output = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        # One build tree per interpreter, kept between calls: an interrupted build goes on where it stopped.
        tree = ROOT / "build" / f"cmake-{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
        tree.mkdir(parents=True, exist_ok=True)
        torch = find_torch()
        torch_version = re.search(r"__version__ = '(.+)'", (torch / "version.py").read_text()).group(1)
        cuda = choose_build() == "cuda"
        options = {
            "EAGLE_KERNELS_VERSION": VERSION,
            "EAGLE_KERNELS_TORCH_DIR": torch,
            "EAGLE_KERNELS_TORCH_VERSION": torch_version,
            "EAGLE_KERNELS_OUTPUT_DIR": output,
            "EAGLE_KERNELS_WITH_CUDA": "ON" if cuda else "OFF",
            "EAGLE_KERNELS_CUDA_ARCHS": cuda_archs(self.editable_mode),
            "Python_EXECUTABLE": sys.executable,
            "pybind11_DIR": pybind11.get_cmake_dir(),
            "CMAKE_MAKE_PROGRAM": Path(ninja.BIN_DIR) / "ninja",
        }
        if cuda:
            options["CMAKE_CUDA_COMPILER"] = find_nvcc()
        definitions = [f"-D{name}={value}" for name, value in options.items()]
        # --fresh: the tools of an isolated build live at another path each time, and a cached one would be gone.
        program = Path(cmake.CMAKE_BIN_DIR) / "cmake"
        subprocess.run([program, "--fresh", "-G", "Ninja", "-S", ROOT, "-B", tree, *definitions], check=True)
        subprocess.run([program, "--build", tree], check=True)

    def copy_extensions_to_source(self) -> None:
        """Editable installs: setuptools copies _C back into the tree; the op library goes with it."""
        super().copy_extensions_to_source()
        built = Path(self.build_lib) / "eagle_kernels" / LIBRARY
        target = ROOT / "python/eagle_kernels" / LIBRARY
        # A rename, not a copy over the old file: a process that has it mapped would crash.
        partial = target.with_suffix(".partial")
        shutil.copy2(built, partial)
        partial.replace(target)


compiled = choose_build() != "none"
setup(
    version=VERSION,
    ext_modules=[Extension("eagle_kernels._C", sources=[])] if compiled else [],
    cmdclass={"build_ext": CMakeBuild},
)
