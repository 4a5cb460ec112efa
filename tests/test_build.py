"""The build: wheels, what is left out when a tool is missing, and what the op library may depend on."""

import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import setuptools
import torch

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The tracked files and the untracked ones git does not ignore, copied: a build here disturbs no other."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    copy = tmp_path / "tree"
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    return copy


def build_wheel(tree: Path, **environment: str) -> tuple[Path | None, subprocess.CompletedProcess]:
    """A wheel without pip in between: its output is the build's own."""
    code = "from setuptools import build_meta; print(build_meta.build_wheel('dist'))"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tree, env=os.environ | environment, capture_output=True, text=True
    )
    wheels = list((tree / "dist").glob("*.whl"))
    return (wheels[0] if wheels else None), run


def modules(tree: Path) -> set[str]:
    """Where every module of the tree belongs in a wheel: a package that pyproject.toml forgets is missing there."""
    homes = {"python/eagle_kernels": "eagle_kernels", "bench": "eagle_kernels/bench"}
    homes |= {"triton_kernels": "eagle_kernels/triton_kernels", "examples/byte_eagle3": "eagle_kernels/byte_eagle3"}
    return {
        f"{home}/{path.relative_to(tree / folder).as_posix()}"
        for folder, home in homes.items()
        for path in (tree / folder).rglob("*.py")
        if path.parent not in (tree / "bench/gpu", tree / "bench/results")  # scripts of a checkout
    }


def run_in(site: Path, code: str) -> subprocess.CompletedProcess:
    """Run code against an unpacked wheel, away from the repository and from the editable install."""
    start = (
        "import sys\n"
        "sys.meta_path = [finder for finder in sys.meta_path if 'editable' not in repr(finder).lower()]\n"
        f"sys.path.insert(0, {str(site)!r})\n"
    )
    return subprocess.run([sys.executable, "-c", start + code], cwd=site, capture_output=True, text=True, timeout=120)


def test_pure_python_install_works(tree: Path, tmp_path: Path) -> None:
    wheel, run = build_wheel(tree, EAGLE_KERNELS_BUILD="none")
    assert wheel is not None, run.stderr
    assert wheel.name.endswith("-py3-none-any.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]
        assert {name for name in archive.namelist() if name.endswith(".py")} == modules(tree)
        in_bench = [name for name in archive.namelist() if name.startswith("eagle_kernels/bench/")]
        assert in_bench and all(re.fullmatch(r"eagle_kernels/bench/(ops/)?\w+\.py", name) for name in in_bench), (
            in_bench
        )
        assert not [name for name in in_bench if "gpu" in name or "pages" in name]
        assert {f"eagle_kernels/byte_eagle3/{part}/model.safetensors" for part in ("target", "drafter")} <= set(
            archive.namelist()
        )
        archive.extractall(site)
    done = run_in(
        site,
        "import torch, eagle_kernels as ek\n"
        f"assert ek.__file__.startswith({str(site)!r}), ek.__file__\n"
        "x = torch.randn(2, 8); w = torch.randn(3, 8)\n"
        "print(ek.explain('norm_concat_linear', [x], w))\n"
        "print(torch.allclose(ek.norm_concat_linear([x], w, norm='none'), x @ w.T, atol=1e-5))\n",
    )
    assert "reference" in done.stdout and "without compiled kernels" in done.stdout, done.stdout + done.stderr
    assert done.stdout.endswith("True\n")


def test_no_compiler_falls_back_to_pure_python_and_says_so(tree: Path) -> None:
    wheel, run = build_wheel(tree, PATH="/nonexistent", CXX="", CUDACXX="", CUDA_HOME="", CUDA_PATH="")
    assert wheel is not None and wheel.name.endswith("-py3-none-any.whl"), run.stderr
    lines = [line for line in run.stderr.splitlines() if line.startswith("eagle-kernels:")]
    assert set(lines) == {"eagle-kernels: NO COMPILED KERNELS: a C++ compiler was not found; installing pure Python"}


@pytest.mark.parametrize(
    ("requested", "message"),
    [
        pytest.param("cpu", "EAGLE_KERNELS_BUILD=cpu needs a C++ compiler", id="cpu"),
        pytest.param("fast", "EAGLE_KERNELS_BUILD is 'fast', expected auto, cpu, cuda or none", id="unknown"),
    ],
)
def test_a_build_that_was_asked_for_and_cannot_be_had_fails(tree: Path, requested: str, message: str) -> None:
    wheel, run = build_wheel(tree, EAGLE_KERNELS_BUILD=requested, PATH="/nonexistent", CXX="")
    assert wheel is None and message in run.stderr


def test_nvcc_absent_is_said_in_one_line() -> None:
    # cmake and a compiler stay reachable; only nvcc is gone.
    code = "import setuptools; setuptools.setup = lambda **k: None; import runpy; runpy.run_path('setup.py')"
    path = os.pathsep.join(p for p in os.environ["PATH"].split(os.pathsep) if not (Path(p) / "nvcc").exists())
    environment = os.environ | {"PATH": path, "CXX": shutil.which("g++") or "c++", "CUDACXX": "", "CUDA_HOME": ""}
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("eagle-kernels: NO CUDA KERNELS: nvcc was not found") == 1


def test_wheels_take_every_arch_and_editable_installs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setuptools, "setup", lambda **keywords: None)
    monkeypatch.setenv("EAGLE_KERNELS_BUILD", "none")
    monkeypatch.delenv("EAGLE_KERNELS_CUDA_ARCHS", raising=False)
    cuda_archs = runpy.run_path(str(ROOT / "setup.py"))["cuda_archs"]
    assert cuda_archs(editable=False) == "80;89;90a;100a;120" and cuda_archs(editable=True) == "90a"
    monkeypatch.setenv("EAGLE_KERNELS_CUDA_ARCHS", "89")
    assert cuda_archs(editable=False) == cuda_archs(editable=True) == "89"


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on this machine")
def test_interrupted_build_resumes_and_the_wheel_holds_what_it_should(tree: Path, tmp_path: Path) -> None:
    with_cuda = shutil.which("nvcc") is not None
    code = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    build = {"EAGLE_KERNELS_BUILD": "cuda" if with_cuda else "cpu", "EAGLE_KERNELS_CUDA_ARCHS": "90a"}
    interrupted = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=tree,
        env=os.environ | build,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while interrupted.poll() is None and not list(tree.glob("build/cmake-*/CMakeFiles/*/csrc/cpu/*.o")):
        time.sleep(0.05)
    os.killpg(interrupted.pid, signal.SIGKILL)
    interrupted.wait()

    wheel, run = build_wheel(tree, **build)
    assert wheel is not None, run.stderr[-4000:]
    (cache,) = tree.glob("build/cmake-*/CMakeCache.txt")
    assert "CMAKE_BUILD_TYPE:STRING=Release" in cache.read_text()  # once empty: the host files ran unoptimised
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    assert sorted({path.name for path in site.iterdir() if "dist-info" not in path.name}) == ["eagle_kernels"]
    done = run_in(
        site,
        "import torch, eagle_kernels as ek\n"
        f"assert ek.__file__.startswith({str(site)!r}), ek.__file__\n"
        "from eagle_kernels import _C, library\n"
        "assert library.unsupported_reason is None, library.unsupported_reason\n"
        "print(_C.build_info()['cuda_archs'], ek.explain('capture_hidden', torch.zeros(1, 1)).backend)\n"
        "served = torch._C._dispatch_has_kernel_for_dispatch_key\n"
        "print([name for name in ek.ops.__all__ if not served(f'eagle_kernels_C::{name}_out', 'CUDA')])\n",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("90a cpu\n[]" if with_cuda else " cpu"), done.stdout
    check_dependencies(site / "eagle_kernels/libeagle_kernels.so")


def check_dependencies(library: Path) -> None:
    """No Python, and of libtorch only its C shims: that is what makes one build serve every torch from 2.11 on."""
    needed = subprocess.run(["readelf", "-d", library], capture_output=True, text=True).stdout
    assert "libpython" not in needed and "libc10" not in needed
    assert "RUNPATH" not in needed and "RPATH" not in needed
    symbols = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True).stdout
    names = [line.split()[-1] for line in symbols.splitlines()]
    assert not [name for name in names if name.startswith(("Py", "cu")) or "_ZN2at" in name or "_ZN3c10" in name]
    shims = {name for name in names if name.startswith(("aoti_torch_", "torch_"))}
    assert shims and shims <= stable_functions((2, 11)), shims - stable_functions((2, 11))


def stable_functions(version: tuple[int, int]) -> set[str]:
    """The C functions that libtorch_cpu of a torch version exports to stable extensions, by the headers of this one:
    each stands under an `#if TORCH_FEATURE_VERSION >= TORCH_VERSION_2_xx_0` unless it is as old as the ABI."""
    folder = Path(torch.__file__).parent / "include/torch/csrc"
    functions = set()
    for header in ("stable/c/shim.h", "inductor/aoti_torch/c/shim.h"):
        conditions: list[bool] = []
        for line in (folder / header).read_text().splitlines():
            if match := re.match(r"#\s*if(?:def|ndef)?\b(.*)", line):
                since = re.search(r"TORCH_FEATURE_VERSION >= TORCH_VERSION_(\d+)_(\d+)_", match[1])
                no_cuda = "USE_CUDA" not in match[1]
                conditions.append(no_cuda and (since is None or (int(since[1]), int(since[2])) <= version))
            elif re.match(r"#\s*endif\b", line):
                conditions.pop()
            elif all(conditions):
                functions |= set(re.findall(r"\b((?:aoti_torch|torch)_\w+)\(", line))
                functions |= set(re.findall(r"^\s*((?:aoti_torch|torch)_\w+)\($", line))
    return functions


def test_no_list_names_an_op() -> None:
    """CMake finds the sources of an op by their place, so that a new one edits nothing there."""
    ops = {path.stem for path in ROOT.glob("csrc/cuda/*.cu")}
    assert ops and not [op for op in ops if op in (ROOT / "CMakeLists.txt").read_text()]
