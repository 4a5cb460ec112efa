"""Make the package importable where it is not installed: links to this tree, and a library carried along or built."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

from .stages import ALTERNATIVES, ROOT, WORK

CARRIED = ROOT / "build" / "gpu_session"  # what `pack` leaves for the GPU machine
SITE = ROOT / "build" / "gpu_site"  # the package as if it were installed, in symbolic links
# The subfolder with the library of alternatives, whose CUDA kernels environment variables select (make gpu-ready).
_OF_ALTERNATIVES = "alternatives"
# Triton's compiled kernels, so that no GPU time goes into compiling: filled by the rehearsal, carried as an archive.
TRITON_CACHE = ROOT / "build" / "gpu_triton_cache"
_LIBRARY = "libeagle_kernels.so"
_SECTION_OF_CUDA = b".nv_fatbin"  # of the ELF file, whose section names are not stripped
_CACHE_ARCHIVE = "triton_cache.tar.xz"
_NVCC = ("/usr/local/cuda/bin/nvcc", "/usr/local/bin/nvcc", "/opt/cuda/bin/nvcc")


def prepare_package(device: str, library: Path | None = None) -> dict[str, str]:
    """The environment in which `eagle_kernels` is importable from this tree: linked, with the first library that loads;
    that of the folder `library` is tried first."""
    package = SITE / "eagle_kernels"
    shutil.rmtree(SITE, ignore_errors=True)
    package.mkdir(parents=True)
    beside = [
        ROOT / "bench",
        ROOT / "triton_kernels",
        ROOT / "examples" / "byte_eagle3",
    ]  # pyproject.toml's package-dir
    for source in [*(ROOT / "python" / "eagle_kernels").iterdir(), *beside]:
        if source.name != "__pycache__" and source.suffix != ".so":
            (package / source.name).symlink_to(source)
    (package / "COMMIT").write_text(_commit() + "\n")
    path = os.pathsep.join([str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "PYTHON": sys.executable, "PYTHONUNBUFFERED": "1"}
    environment["TRITON_CACHE_DIR"] = str(TRITON_CACHE)
    carried = CARRIED / _CACHE_ARCHIVE
    if carried.exists() and not TRITON_CACHE.exists():
        with tarfile.open(carried) as archive:
            archive.extractall(TRITON_CACHE, filter="data")
    _note(_provide_library(package, environment, device, library))
    linked = package / _LIBRARY
    if linked.exists() and linked.resolve() == (CARRIED / _LIBRARY).resolve() and (CARRIED / "COMMIT").exists():
        # On a lent machine .git has the commit that the session began with, and all later ones as changes.
        shutil.copy(CARRIED / "COMMIT", package / "COMMIT")
    _provide_alternatives([*([library] if library else []), CARRIED])
    return environment


def _provide_alternatives(folders: Sequence[Path]) -> None:
    """A second package with the library of alternatives, where one is carried along: `python ALTERNATIVES` times them.
    Whether it loads is left to the commands, since trying takes as long as a row."""
    shutil.rmtree(ALTERNATIVES, ignore_errors=True)
    libraries = [folder / _OF_ALTERNATIVES / _LIBRARY for folder in folders]
    library = next((path for path in libraries if path.exists()), None)
    if library is None:
        print("library: none of alternatives is carried along", flush=True)
        return
    shutil.copytree(SITE, ALTERNATIVES, symlinks=True)
    linked = ALTERNATIVES / "eagle_kernels" / _LIBRARY
    linked.unlink(missing_ok=True)
    linked.symlink_to(library)
    main = "from eagle_kernels.bench.gpu.alternatives import main\n\nmain()\n"
    (ALTERNATIVES / "__main__.py").write_text(main)


def _provide_library(package: Path, environment: dict[str, str], device: str, library: Path | None = None) -> str:
    """Link a library that loads; returns where it comes from. On a GPU one without CUDA kernels is second choice."""
    folders = [*([library] if library else []), CARRIED, ROOT / "python" / "eagle_kernels"]
    there = [folder for folder in folders if (folder / _LIBRARY).exists()]
    for folder in there:
        if _loads(package, folder, environment, device):
            return f"from {folder.relative_to(ROOT)}"
    built = _build(environment, device)
    if built is not None and _loads(package, built, environment, device):
        return "built here"
    for folder in [*([built] if built else []), *there]:
        if _loads(package, folder, environment, "cpu"):
            return f"from {folder.relative_to(ROOT)}, without CUDA kernels"
    return "none loads; Triton and torch are what is measured"


def _note(text: str) -> None:
    """Where the library comes from: to the terminal, and into the JSON of the first stage."""
    print(f"library: {text}", flush=True)
    (WORK / "library.json").write_text(json.dumps({"library": text, "commit": _commit()}))


def _loads(package: Path, folder: Path, environment: dict[str, str], device: str) -> bool:
    """Link the libraries of a folder into the package and try them; those that do not load are unlinked again."""
    for library in folder.glob("*.so"):
        (package / library.name).unlink(missing_ok=True)
        (package / library.name).symlink_to(library)
    lacks = "library.unsupported_reason"
    if device == "cuda":
        lacks += " or (None if library.cuda_archs else 'it has no CUDA kernels')"
    code = f"from eagle_kernels import library; raise SystemExit({lacks})"
    loaded = subprocess.run([sys.executable, "-c", code], env=environment, cwd=SITE, capture_output=True, text=True)
    if loaded.returncode == 0:
        return True
    print(f"library: {folder.relative_to(ROOT)} does not serve: {loaded.stderr.strip()[-300:]}", flush=True)
    for library in folder.glob("*.so"):
        (package / library.name).unlink(missing_ok=True)
    return False


def _build(environment: dict[str, str], device: str) -> Path | None:
    """Build with what this machine has; None, with the end of the log printed, where that fails."""
    target = WORK / "built"
    environment = dict(environment)
    nvcc = environment.get("CUDACXX") or shutil.which("nvcc") or next(filter(os.path.exists, _NVCC), None)
    if device == "cuda" and nvcc:
        environment["CUDACXX"] = nvcc
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(target)]
    print("library: building, for at most 300 s", flush=True)
    try:
        built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired:
        print("library: the build took longer than 300 s")
        return None
    if built.returncode:
        print(f"library: the build failed: {(built.stdout + built.stderr)[-1500:]}")
        return None
    return target / "eagle_kernels"


def pack(folder: Path | None = None) -> int:
    """Copy the library of `folder`, or the one built in this tree, that of alternatives beside it, Triton's cache and
    the commit into the folder to carry. A library without CUDA kernels is refused, since on the GPU Triton would be
    measured instead, and so is one that is older than its sources."""
    library = (folder or ROOT / "python" / "eagle_kernels") / _LIBRARY
    there = library.exists()
    if not there or _SECTION_OF_CUDA not in library.read_bytes():
        build = "EAGLE_KERNELS_BUILD=cuda EAGLE_KERNELS_CUDA_ARCHS=90a pip install --no-build-isolation -e ."
        print(f"{library} {'has no CUDA kernels' if there else 'is not built'}: {build}", file=sys.stderr)
        return 2
    changed = [path.stat().st_mtime for path in (ROOT / "csrc").rglob("*") if path.is_file()]
    if library.stat().st_mtime < max(changed, default=0):  # COMMIT would name a commit whose kernels it has not
        print(f"{library} is older than csrc: make gpu-ready", file=sys.stderr)
        return 2
    CARRIED.mkdir(parents=True, exist_ok=True)
    shutil.copy2(library, CARRIED / library.name)
    shutil.rmtree(CARRIED / _OF_ALTERNATIVES, ignore_errors=True)  # of an earlier commit
    if (alternatives := library.parent / _OF_ALTERNATIVES / _LIBRARY).exists():
        (CARRIED / _OF_ALTERNATIVES).mkdir()
        shutil.copy2(alternatives, CARRIED / _OF_ALTERNATIVES)
    (CARRIED / "COMMIT").write_text(_commit() + "\n")
    if TRITON_CACHE.exists():
        partial = CARRIED / f"{_CACHE_ARCHIVE}.partial"  # half of a cache must not be carried
        with tarfile.open(partial, "w:xz", preset=1) as archive:
            archive.add(TRITON_CACHE, ".", filter=_without_locks)
        partial.replace(CARRIED / _CACHE_ARCHIVE)
    size = sum(file.stat().st_size for file in CARRIED.rglob("*") if file.is_file()) >> 10
    print(f"carry {CARRIED.relative_to(ROOT)} ({size} KiB, commit {_commit()})")
    return 0


def _without_locks(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if member.name.endswith((".lock", ".tmp")) or "/tmp." in member.name else member


def _commit() -> str:
    """The checkout's commit, with "+" where it has changes; without .git, the one that --pack wrote down."""
    git = ["git", "-C", str(ROOT)]
    try:
        commit = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, timeout=20)
        changes = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        commit = None
    if commit is not None and commit.returncode == 0:
        return commit.stdout.strip() + ("+" if changes.stdout else "")
    carried = CARRIED / "COMMIT"
    return carried.read_text().strip() if carried.exists() else "unknown"
