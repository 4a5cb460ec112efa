"""Drives CMakeLists.txt; everything declarative is in pyproject.toml.

EAGLE_KERNELS_BUILD        auto (default): the CPU kernels, and the CUDA ones where nvcc and a GPU are found. cpu: the
                           CPU kernels alone. cuda: both, or an error. none: pure Python and Triton, nothing compiled.
EAGLE_KERNELS_CUDA_ARCHS   e.g. 90a or 80;89;90a;100a;120 (`make wheels`); default: the GPUs of this machine.
EAGLE_KERNELS_NAMESPACE    torch.ops.<this>, for hub/build.py.
EAGLE_KERNELS_ALTERNATIVES ON: the environment chooses among CUDA kernels, for bench/gpu_session.sh. Never in a wheel.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import NoReturn

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.editable_wheel import editable_wheel

ROOT = Path(__file__).resolve().parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "python/eagle_kernels/version.py").read_text()).group(1)
# Seconds of one core of an AMD EPYC (Zen 4), CUDA 13.0: the CPU kernels and the host files; csrc/cuda for one arch.
CPU_SECONDS, ARCH_SECONDS = 240, 12


def say(message: str) -> None:
    """To stderr, and to the terminal where stderr is none: pip hides a build's output unless the build fails."""
    print(f"eagle-kernels: {message}", file=sys.stderr, flush=True)
    if not sys.stderr.isatty():
        try:
            with open("/dev/tty", "w") as terminal:
                print(f"eagle-kernels: {message}", file=terminal)
        except OSError:  # no terminal: a log has the line above
            pass


def find_torch() -> Path | None:
    """The installed torch package, 2.11 or newer. Under build isolation it is not importable, but is beside the
    interpreter (pip), or in the active environment, which is on PATH, or in uv's default one: uv builds with an
    interpreter of its own. Any of them will do, since a library is not bound to the torch whose headers it saw."""
    spec = importlib.util.find_spec("torch")
    candidates = [Path(spec.origin).parent] if spec and spec.origin else []
    candidates += [Path(sysconfig.get_path(kind)) / "torch" for kind in ("platlib", "purelib")]
    prefixes = [Path(folder).parent for folder in os.environ.get("PATH", "").split(os.pathsep)]
    prefixes.append(Path(os.environ.get("PWD", "."), ".venv"))
    candidates += [torch for prefix in prefixes for torch in prefix.glob("lib/python3.*/site-packages/torch")]
    return next((path for path in candidates if torch_version(path) >= (2, 11)), None)


def torch_version(torch: Path) -> tuple[int, ...]:
    if not (torch / "include/torch/csrc/stable/library.h").exists():
        return ()
    return tuple(map(int, re.findall(r"\d+", torch_release(torch))[:2]))


def torch_release(torch: Path) -> str:
    return re.search(r"__version__ = '(.+)'", (torch / "version.py").read_text()).group(1)


def find_nvcc() -> str | None:
    cuda_home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return os.environ.get("CUDACXX") or shutil.which("nvcc", path=f"{cuda_home}/bin" if cuda_home else None)


def find_compiler() -> str | None:
    return os.environ.get("CXX") or next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


def cuda_archs() -> list[str]:
    """What EAGLE_KERNELS_CUDA_ARCHS names, else one for each kind of GPU here from Ampere on."""
    named = os.environ.get("EAGLE_KERNELS_CUDA_ARCHS")
    if named:
        # CMake would name a value of its own (9.0-real), above a traceback that pip shows.
        if re.fullmatch(r"\d+[af]?(;\d+[af]?)*", named) is None:
            expected = "numbers with semicolons between, such as 80;90a"
            raise SystemExit(f"eagle-kernels: EAGLE_KERNELS_CUDA_ARCHS is {named!r}, expected {expected}")
        return named.split(";")
    smi = shutil.which("nvidia-smi")
    query = [smi, "--query-gpu=compute_cap", "--format=csv,noheader"]
    output = subprocess.run(query, capture_output=True, text=True).stdout if smi else ""
    capabilities = sorted({tuple(map(int, pair)) for pair in re.findall(r"^(\d+)\.(\d+)$", output, re.MULTILINE)})
    # "a": the instructions that only Hopper and data-center Blackwell have.
    return [f"{major}{minor}" + ("a" if major in (9, 10) else "") for major, minor in capabilities if major >= 8]


def requested_build() -> str:
    requested = (os.environ.get("EAGLE_KERNELS_BUILD") or "auto").lower()
    if requested not in ("auto", "cpu", "cuda", "none"):
        raise SystemExit(f"eagle-kernels: EAGLE_KERNELS_BUILD is {requested!r}, expected auto, cpu, cuda or none")
    return requested


def choose_archs() -> list[str]:
    """The CUDA architectures to build for; without any, the CPU kernels alone. Says what is left out. Fails where no
    kernels can be compiled: only `none` installs pure Python, never a missing tool."""
    if find_compiler() is None:
        refuse("a C++ compiler was not found (CXX, PATH)")
    if find_torch() is None:
        beside = f"torch 2.11 or newer was not found beside {sys.executable}"
        refuse(f"{beside}: install it first; where it is installed and the build isolated, add --no-build-isolation")
    requested = requested_build()
    if requested == "cpu":
        return []
    archs = cuda_archs()
    if find_nvcc() is None:
        missing = "nvcc was not found (PATH, CUDA_HOME)"
    elif not archs:
        missing = "no GPU was found (nvidia-smi); EAGLE_KERNELS_CUDA_ARCHS names architectures, as 90a"
    else:
        return archs
    if requested == "cuda":
        raise SystemExit(f"eagle-kernels: EAGLE_KERNELS_BUILD=cuda cannot be had: {missing}")
    say(f"NO CUDA KERNELS: {missing}")
    return []


def refuse(missing: str) -> NoReturn:
    pure = "EAGLE_KERNELS_BUILD=none installs pure Python and Triton"
    raise SystemExit(f"eagle-kernels: NO COMPILED KERNELS: {missing}. {pure}")


class CMakeBuild(build_ext):
    """Configure and build with CMake and ninja; the library lands where setuptools expects an extension."""

    def get_ext_filename(self, name: str) -> str:
        return os.path.join(*name.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        # The build tools from PyPI, not those on PATH: Debian 12's CMake 3.25 is too old.
        import cmake
        import ninja

        archs = choose_archs()
        torch = find_torch()
        options = {
            "EAGLE_KERNELS_VERSION": VERSION,
            "EAGLE_KERNELS_NAMESPACE": os.environ.get("EAGLE_KERNELS_NAMESPACE") or "eagle_kernels",
            "EAGLE_KERNELS_TORCH_DIR": torch,
            "EAGLE_KERNELS_TORCH_VERSION": torch_release(torch),
            "EAGLE_KERNELS_OUTPUT_DIR": Path(self.get_ext_fullpath(ext.name)).resolve().parent,
            "EAGLE_KERNELS_STRIP": "OFF" if self.editable_mode else "ON",
            "EAGLE_KERNELS_WITH_CUDA": "ON" if archs else "OFF",
            "EAGLE_KERNELS_CUDA_ARCHS": ";".join(archs),
            "EAGLE_KERNELS_ALTERNATIVES": os.environ.get("EAGLE_KERNELS_ALTERNATIVES") or "OFF",
            "CMAKE_MAKE_PROGRAM": Path(ninja.BIN_DIR) / "ninja",
        }
        if archs:
            options["CMAKE_CUDA_COMPILER"] = find_nvcc()
        definitions = [f"-D{name}={value}" for name, value in options.items()]
        # A build tree for each torch: other headers would compile the host files anew, 2 min of a core.
        tree = ROOT / "build" / f"cmake-{sysconfig.get_platform()}-torch{torch_release(torch)}"
        tree.mkdir(parents=True, exist_ok=True)
        # Objects are kept between builds, CMake's cache is not: the tools of an isolated build live at another path
        # each time, and a cached path would be gone. --fresh would delete both.
        (tree / "CMakeCache.txt").unlink(missing_ok=True)
        program = Path(cmake.CMAKE_BIN_DIR) / "cmake"
        cores, seconds = os.cpu_count() or 1, CPU_SECONDS + ARCH_SECONDS * len(archs)
        parts = "CPU kernels" + (f" and CUDA kernels for {', '.join(archs)}" if archs else "")
        say(f"compiling {parts}: about {seconds / cores:.0f} s on {cores} cores where nothing is built yet")
        start = time.monotonic()
        subprocess.run([program, "-G", "Ninja", "-S", ROOT, "-B", tree, *definitions], check=True)
        subprocess.run([program, "--build", tree], check=True)
        say(f"compiled in {time.monotonic() - start:.0f} s")

    def copy_extensions_to_source(self) -> None:
        """Editable installs: by a rename, since a process that has the old file mapped would crash if it changed."""
        (ext,) = self.extensions
        target = ROOT / "python" / self.get_ext_filename(ext.name)
        partial = target.with_suffix(".partial")
        shutil.copy2(Path(self.build_lib) / self.get_ext_filename(ext.name), partial)
        partial.replace(target)


class EditableWheel(editable_wheel):
    def run(self) -> None:
        if not self.distribution.ext_modules:  # the library of an earlier editable install would be loaded
            (ROOT / "python/eagle_kernels/libeagle_kernels.so").unlink(missing_ok=True)
        super().run()


class AnyPythonWheel(bdist_wheel):
    """The library is linked to no Python, so that a wheel is bound to the platform alone."""

    def run(self) -> None:
        # A module that an earlier build copied there, and that is gone since, would be in the wheel.
        shutil.rmtree(self.get_finalized_command("build").build_lib, ignore_errors=True)
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


setup(
    version=VERSION,
    ext_modules=[Extension("eagle_kernels.libeagle_kernels", sources=[])] if requested_build() != "none" else [],
    cmdclass={"build_ext": CMakeBuild, "bdist_wheel": AnyPythonWheel, "editable_wheel": EditableWheel},
)
