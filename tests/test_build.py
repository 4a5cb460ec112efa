"""The build: the sdist, wheels, what happens where a tool is missing, and what the op library may depend on."""

import email
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import time
import venv
import zipfile
from pathlib import Path

import pytest
import torch

from compile.test_cuda import ARCHS

ROOT = Path(__file__).resolve().parent.parent
SITE = Path(sysconfig.get_path("purelib"))


def copy_tree(copy: Path) -> Path:
    """The tracked files and the untracked ones git does not ignore: a build there disturbs no other."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    return copy


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return copy_tree(tmp_path / "tree")


@pytest.fixture(scope="session")
def clean_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has what pyproject.toml demands of a build, and nothing else."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python3.*/site-packages")
    for name in ("setuptools*", "_distutils_hack", "cmake*", "ninja*"):
        for package in SITE.glob(name):
            (site / package.name).symlink_to(package)
    return folder / "bin/python"


def build(kind: str, tree: Path, python: Path | str = sys.executable, **environment: str) -> tuple[Path | None, str]:
    """A wheel or an sdist without pip in between, and what the build said."""
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}('dist'))"
    run = subprocess.run([python, "-c", code], cwd=tree, env=os.environ | environment, capture_output=True, text=True)
    name = run.stdout.splitlines()[-1] if run.returncode == 0 else None
    return (tree / "dist" / name if name else None), run.stderr


# Where each folder of the tree belongs in a wheel.
HOMES = {
    "python/eagle_kernels": "eagle_kernels",
    "bench": "eagle_kernels/bench",
    "triton_kernels": "eagle_kernels/triton_kernels",
    "examples/byte_eagle3": "eagle_kernels/byte_eagle3",
}


def package_files(tree: Path) -> set[str]:
    """What a wheel without compiled kernels holds: a package or a data file that pyproject.toml forgets is missing
    there. Pages and the scripts of a checkout stay behind."""
    return {
        f"{home}/{path.relative_to(tree / folder).as_posix()}"
        for folder, home in HOMES.items()
        for path in (tree / folder).rglob("*")
        if path.is_file() and path.suffix not in (".md", ".so", ".pyc")
        if not {tree / "bench/gpu", tree / "bench/results", tree / "bench/gpu_session.sh"} & {path, *path.parents}
    }


def contents(wheel: Path) -> tuple[set[str], set[str]]:
    """The files of the package, and those of its metadata by their name."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    metadata = {name for name in names if ".dist-info/" in name}
    return names - metadata, {name.partition("/")[2] for name in metadata}


def run_in(site: Path, code: str) -> subprocess.CompletedProcess:
    """Run code against an unpacked wheel, away from the repository and from the editable install."""
    start = (
        "import sys\n"
        "sys.meta_path = [finder for finder in sys.meta_path if 'editable' not in repr(finder).lower()]\n"
        f"sys.path.insert(0, {str(site)!r})\n"
    )
    return subprocess.run([sys.executable, "-c", start + code], cwd=site, capture_output=True, text=True, timeout=120)


METADATA = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt"}


def test_pure_python_install_works(tree: Path, tmp_path: Path) -> None:
    wheel, log = build("wheel", tree, EAGLE_KERNELS_BUILD="none")
    assert wheel is not None, log
    assert wheel.name.endswith("-py3-none-any.whl")
    assert contents(wheel) == (package_files(tree), METADATA)
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
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


def test_a_pure_editable_install_leaves_no_library(tree: Path) -> None:
    """The library of an earlier install was loaded, however old, although `none` asks for no library."""
    library = tree / "python/eagle_kernels/libeagle_kernels.so"
    library.write_bytes(b"")
    wheel, log = build("editable", tree, EAGLE_KERNELS_BUILD="none")
    assert wheel is not None, log
    assert not library.exists()


def test_an_empty_variable_is_none() -> None:
    assert setup_answers("requested_build()", EAGLE_KERNELS_BUILD="") == ("auto", "")


NO_TOOLS = {"PATH": "/nonexistent", "PWD": "/", "CXX": "", "CUDACXX": "", "CUDA_HOME": "", "CUDA_PATH": ""}


@pytest.mark.parametrize(
    ("requested", "message"),
    [
        pytest.param("auto", "NO COMPILED KERNELS: a C++ compiler was not found (CXX, PATH)", id="compiler"),
        pytest.param("cpu", "NO COMPILED KERNELS: a C++ compiler was not found (CXX, PATH)", id="compiler-asked"),
        pytest.param("fast", "EAGLE_KERNELS_BUILD is 'fast', expected auto, cpu, cuda or none", id="unknown"),
    ],
)
def test_no_build_ends_in_pure_python_unasked(tree: Path, requested: str, message: str) -> None:
    wheel, log = build("wheel", tree, EAGLE_KERNELS_BUILD=requested, **NO_TOOLS)
    assert wheel is None and message in log


def test_a_build_without_torch_fails(tree: Path, clean_python: Path) -> None:
    wheel, log = build("wheel", tree, clean_python, **NO_TOOLS | {"CXX": "g++"})
    assert wheel is None and "NO COMPILED KERNELS: torch 2.11 or newer was not found beside" in log
    assert "EAGLE_KERNELS_BUILD=none installs pure Python" in log


def setup_answers(expression: str, python: Path | str = sys.executable, **environment: str) -> tuple[str, str]:
    """What setup.py computes under these environment variables, and what it prints."""
    code = "import runpy, setuptools; setuptools.setup = lambda **k: None\n"
    code += f"names = runpy.run_path('setup.py'); print(eval({expression!r}, names))"
    environment = os.environ | {"EAGLE_KERNELS_BUILD": "none", "EAGLE_KERNELS_CUDA_ARCHS": ""} | environment
    run = subprocess.run([python, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    return run.stdout.strip(), run.stderr


@pytest.mark.parametrize("where", ["on PATH", "in .venv"])
def test_an_isolated_build_finds_torch(where: str, clean_python: Path, tmp_path: Path) -> None:
    """uv builds with an interpreter of its own; of the user's environment it keeps PATH and PWD."""
    site = tmp_path / ".venv/lib/python3.11/site-packages"
    (tmp_path / ".venv/bin").mkdir(parents=True)
    site.mkdir(parents=True)
    (site / "torch").symlink_to(Path(torch.__file__).parent)
    hints = {"PATH": f"{tmp_path}/.venv/bin", "PWD": "/"} if where == "on PATH" else {"PWD": str(tmp_path)}
    assert setup_answers("find_torch()", clean_python, **NO_TOOLS | hints)[0] == str(site / "torch")


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder of stand-ins for nvcc and nvidia-smi that print what these print on a machine with GPUs."""
    for name, says in {"nvcc": "", "nvidia-smi": "9.0\n8.6\n9.0\n7.5\n"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\nprintf '{says}'\n")
        (tmp_path / name).chmod(0o755)
    return tmp_path


NO_GPU = "no GPU was found (nvidia-smi); EAGLE_KERNELS_CUDA_ARCHS names architectures, as 90a"


def test_cuda_is_compiled_for_the_gpus_that_are_there(tools: Path) -> None:
    with_gpus = NO_TOOLS | {"PATH": str(tools), "CXX": "g++", "EAGLE_KERNELS_BUILD": "auto"}
    assert setup_answers("choose_archs()", **with_gpus) == ("['86', '90a']", "")
    named = with_gpus | {"EAGLE_KERNELS_CUDA_ARCHS": "80;89"}
    assert setup_answers("choose_archs()", **named) == ("['80', '89']", "")
    for wrong in ("80,90", "80; 90a", "9.0", "sm_90", "80;"):
        answer, log = setup_answers("choose_archs()", **with_gpus | {"EAGLE_KERNELS_CUDA_ARCHS": wrong})
        expected = "expected numbers with semicolons between, such as 80;90a"
        assert (answer, log) == ("", f"eagle-kernels: EAGLE_KERNELS_CUDA_ARCHS is {wrong!r}, {expected}\n")
    (tools / "nvidia-smi").unlink()
    answer, log = setup_answers("choose_archs()", **with_gpus)
    assert answer == "[]" and f"NO CUDA KERNELS: {NO_GPU}" in log
    answer, log = setup_answers("choose_archs()", **with_gpus | {"EAGLE_KERNELS_BUILD": "cuda"})
    assert answer == "" and f"EAGLE_KERNELS_BUILD=cuda cannot be had: {NO_GPU}" in log
    (tools / "nvcc").unlink()
    answer, log = setup_answers("choose_archs()", **with_gpus)
    assert answer == "[]" and "NO CUDA KERNELS: nvcc was not found (PATH, CUDA_HOME)" in log


def test_the_compile_gate_compiles_what_a_wheel_holds() -> None:
    assert f"WHEEL_CUDA_ARCHS := {';'.join(ARCHS)}\n" in (ROOT / "Makefile").read_text()


def test_lint_in_a_folder_with_a_space(tmp_path: Path) -> None:
    """Its links were made of the halves of the folder's name. The environment is there, of stand-ins."""
    tree = copy_tree(tmp_path / "a tree")
    tools = tree / ".venv/bin"
    tools.mkdir(parents=True)
    for tool in ("ruff", "mypy"):
        (tools / tool).symlink_to("/bin/true")
    for stamp in ("torch.stamp", "package.stamp"):
        (tree / ".venv" / stamp).touch()
    environment = os.environ | {"SOURCE_DATE_EPOCH": "0"}  # the copy has no commit to take it from
    run = subprocess.run(["make", "lint"], cwd=tree, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    for name in ("bench/cli.py", "triton_kernels/codes.py", "byte_eagle3/decode.py", "plan.py"):
        assert (tree / "build/typed/eagle_kernels" / name).is_file()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist of the tree, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    copy_tree(folder / "tree")
    sdist, log = build("sdist", folder / "tree")
    assert sdist is not None, log
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (unpacked,) = folder.glob("eagle_kernels-*")
    return unpacked


def test_the_sdist_holds_what_a_build_needs(source: Path) -> None:
    def files(tree: Path) -> set[str]:
        names = {path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file()}
        return {
            name for name in names if re.match(r"csrc/|cmake/|CMakeLists.txt|setup.py|pyproject.toml|LICENSE", name)
        }

    tree = source.parent / "tree"
    assert files(source) == files(tree)
    assert package_files(source) == package_files(tree)
    assert not (source / "tests").exists()


def wheel_environment() -> dict[str, str]:
    """Where nvcc is: with CUDA for one arch; `make wheels` builds for five."""
    with_cuda = shutil.which("nvcc") is not None
    path = os.pathsep.join((os.path.dirname(sys.executable), os.environ["PATH"]))
    kind = {"EAGLE_KERNELS_BUILD": "cuda" if with_cuda else "cpu", "EAGLE_KERNELS_CUDA_ARCHS": "90a"}
    return kind | {"PWD": "/", "PATH": path, "SOURCE_DATE_EPOCH": "1700000000"}


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on this machine")
@pytest.mark.slow
def test_the_wheel(source: Path, clean_python: Path, tmp_path: Path) -> None:
    """One test, since the build takes most of the time, and each process of pytest-xdist would have to make its own."""
    built = interrupted_build(source, clean_python)
    check_that_a_second_build_is_the_same(source, built, clean_python)
    wheel = repaired(source, built)
    check_contents(source, wheel)
    check_library(source, wheel, tmp_path)
    check_in_an_empty_environment(wheel, tmp_path)


def interrupted_build(source: Path, clean_python: Path) -> Path:
    """Built from the sdist, in a clean environment beside a torch. The first build is killed, the second resumes it."""
    environment = wheel_environment()
    code = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    interrupted = subprocess.Popen(
        [clean_python, "-c", code],
        cwd=source,
        env=os.environ | environment | {"CMAKE_BUILD_PARALLEL_LEVEL": "1"},
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while len(objects(source)) < 3:
        assert interrupted.poll() is None, "the build ended before it compiled anything"
        time.sleep(0.05)
    os.killpg(interrupted.pid, signal.SIGKILL)
    interrupted.wait()
    before = objects(source)

    built, log = build("wheel", source, clean_python, **environment)
    assert built is not None, log[-4000:]
    assert re.search(r"eagle-kernels: compiling .* about \d+ s", log), log[:4000]
    assert len(before.items() - objects(source).items()) <= 1, "it began anew"  # one may have been half written
    (cache,) = source.glob("build/cmake-*/CMakeCache.txt")
    assert "CMAKE_BUILD_TYPE:STRING=Release" in cache.read_text()  # was empty once: the host files ran unoptimized
    return built


def objects(tree: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in tree.glob("build/cmake-*/CMakeFiles/*/csrc/cpu/*.o")}


def repaired(source: Path, built: Path) -> Path:
    """As `make wheels` does: auditwheel refuses a library that needs newer symbols than the tag promises. Wheels are
    built with GCC 12; which symbols a newer GCC adds is not known, so there auditwheel chooses the tag."""
    compiler = subprocess.run(["g++", "-dumpversion"], capture_output=True, text=True).stdout
    platform = f"manylinux_2_28_{os.uname().machine}" if int(compiler.partition(".")[0]) <= 12 else "auto"
    repair = [sys.executable, "-m", "auditwheel", "repair", "--only-plat", "--plat", platform]
    repair += ["--exclude", "libtorch_cpu.so", "--wheel-dir", "repaired", built]
    run = subprocess.run(repair, cwd=source, env=os.environ | wheel_environment(), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    (wheel,) = source.glob("repaired/*.whl")
    return wheel


def check_contents(source: Path, wheel: Path) -> None:
    assert re.fullmatch(r"eagle_kernels-[\d.]+-py3-none-manylinux_2_\d+_\w+\.whl", wheel.name)
    expected = package_files(source) | {"eagle_kernels/libeagle_kernels.so"}
    assert contents(wheel) == (expected, METADATA | {"sboms/auditwheel.cdx.json"} & contents(wheel)[1])
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/WHEEL"))
        tags = email.message_from_bytes(archive.read(name)).get_all("Tag")
    assert tags == [wheel.stem.partition("-")[2].partition("-")[2]]


def check_that_a_second_build_is_the_same(source: Path, first: Path, clean_python: Path) -> None:
    """Two builds in one folder give the same archive; builds here and in the folder of `make test` give the same CPU
    kernels. CMakeLists.txt takes care of the names that nvcc derives from a path."""
    bytes_of_first = first.read_bytes()
    time.sleep(2)  # zip stores times in steps of 2 s
    again, log = build("wheel", source, clean_python, **wheel_environment())
    assert again == first and again.read_bytes() == bytes_of_first, log

    def kernels(tree: Path) -> dict[str, bytes]:
        return {path.relative_to(tree).as_posix(): path.read_bytes() for path in objects(tree)}

    here, there = kernels(ROOT), kernels(source)
    assert there and all(there[name] == here[name] for name in there.keys() & here.keys())


def check_library(source: Path, wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        library = Path(archive.extract("eagle_kernels/libeagle_kernels.so", tmp_path))
    check_dependencies(library)
    assert ".symtab" not in subprocess.run(["readelf", "-SW", library], capture_output=True, text=True).stdout
    text = library.read_bytes()
    assert not [path for path in (source, ROOT, SITE, Path(torch.__file__).parent) if os.fsencode(path) in text]
    exported = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True).stdout
    names = {line.split()[-1] for line in exported.splitlines()}
    assert names and all(name.startswith("eagle_kernels_") for name in names), names


def check_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """Installed by pip without a network, with no compiler on PATH; torch comes from the environment of the tests."""
    venv.create(tmp_path / "empty", symlinks=True)
    programs = tmp_path / "empty/bin"
    pip = [sys.executable, "-m", "pip", "--python", programs / "python", "install", "--no-index", "--no-deps", wheel]
    installed = subprocess.run(pip, capture_output=True, text=True, env=os.environ | {"PATH": str(programs)})
    assert installed.returncode == 0, installed.stderr
    # A folder on PYTHONPATH is no site folder: the .pth of the editable install there is not read.
    environment = {"PATH": str(programs), "PYTHONPATH": str(SITE), "HOME": str(tmp_path)}

    def run(*command: str | Path) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    archs = "90a" if shutil.which("nvcc") is not None else "none"
    info = run(programs / "eagle-kernels", "info")
    assert f"loaded from {tmp_path}/empty/" in " ".join(info.split()), info
    assert re.search(rf"cuda_archs +{archs}$", info, re.MULTILINE), info
    assert "backend" in run(programs / "eagle-kernels", "check", "--cases", "2")
    served = (
        "import torch, eagle_kernels as ek\n"
        "served = torch._C._dispatch_has_kernel_for_dispatch_key\n"
        "primitives = {'norm_concat_linear': 'norm_concat_linear_fused'}\n"
        "names = [primitives.get(name, name) for name in ek.ops.__all__]\n"
        "print([name for name in names if not served(f'eagle_kernels_C::{name}_out', 'CUDA')])\n"
    )
    assert run(programs / "python", "-c", served) == "[]\n" or archs == "none"


# A function of the shim that AOTInductor's compiled models are linked against, which torchgen keeps for them
# (aoti/fallback_ops.py); seen in 2.11 to 2.15. Through the dispatcher the product takes 2 us more.
COMPILED_MODELS = {"aoti_torch_cpu_mm_out"}


def check_dependencies(library: Path) -> None:
    """No Python, and of libtorch only its C shims: that is what makes one build serve every torch from 2.11 on."""
    needed = subprocess.run(["readelf", "-d", library], capture_output=True, text=True).stdout
    assert "libpython" not in needed and "libc10" not in needed
    assert "RUNPATH" not in needed and "RPATH" not in needed
    symbols = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True).stdout
    names = [line.split()[-1] for line in symbols.splitlines()]
    assert not [name for name in names if name.startswith(("Py", "cu")) or "_ZN2at" in name or "_ZN3c10" in name]
    shims = {name for name in names if name.startswith(("aoti_torch_", "torch_"))}
    assert shims and shims <= stable_functions((2, 11)) | COMPILED_MODELS, shims - stable_functions((2, 11))


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


_TENSOR = "AtenTensorHandle"
# What csrc/cuda/current_device.cpp looks up by name, and calls with these arguments.
OF_LIBTORCH_CUDA = {
    "aoti_torch_cuda_mm_out": [_TENSOR] * 3,
    "aoti_torch_cuda_addmm_out": [_TENSOR] * 4 + ["double"] * 2,
    "aoti_torch_cuda_mm_dtype_out": [_TENSOR] * 3 + ["int32_t"],
    "aoti_torch_get_current_cuda_stream": ["int32_t", "void**"],
    "aoti_torch_cuda_caching_allocator_raw_alloc": ["uint64_t", "void**"],
    "aoti_torch_cuda_caching_allocator_raw_delete": ["void*"],
}


def test_what_is_looked_up_in_libtorch_cuda_is_what_its_headers_declare() -> None:
    """No compiler compares the two: another order of arguments would be a wrong result, or a crash."""
    source = (ROOT / "csrc/cuda/current_device.cpp").read_text()
    assert set(re.findall(r'find_in_torch<[^"]*\("(\w+)"\)', source)) == set(OF_LIBTORCH_CUDA)
    folder = Path(torch.__file__).parent / "include/torch/csrc/inductor/aoti_torch"
    headers = "".join((folder / name).read_text() for name in ("c/shim.h", "generated/c_shim_cuda.h"))
    for name, types in OF_LIBTORCH_CUDA.items():
        parameters = re.search(rf"AOTITorchError\s+{name}\(([^)]*)\)", headers)[1]
        declared = [re.sub(r"//.*", "", parameter).strip().rpartition(" ")[0] for parameter in parameters.split(",")]
        assert [" ".join(each.split()) for each in declared] == types, name


def test_no_list_names_an_op() -> None:
    """CMake finds the sources of an op by their folder, so that a new op edits nothing there."""
    ops = {path.stem for path in ROOT.glob("csrc/cuda/*.cu")}
    assert ops and not [op for op in ops if op in (ROOT / "CMakeLists.txt").read_text()]
