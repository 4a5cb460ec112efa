"""The package once more under build/<name>, compiled with other flags: instrumented, or changed by a mutant."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Variant:
    """A copy of the checkout and what pip installed from it; tests come from the checkout, the package from `site`."""

    source: Path
    site: Path

    def environment(self) -> dict[str, str]:
        # PYTHONPATH precedes the editable install of the checkout.
        paths = [os.fspath(self.site), os.fspath(ROOT / "tests")]
        return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}


def install(name: str, flags: str = "", edit: Callable[[Path], None] = lambda source: None) -> Variant:
    """The variant of this name, made or brought up to date. `flags` go to the compiler and the linker; `edit` changes
    the copy before it is compiled."""
    variant = Variant(ROOT / "build" / name / "source", ROOT / "build" / name / "site")
    _copy_checkout(variant.source)
    edit(variant.source)
    shutil.rmtree(variant.site, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-build-isolation"]
    command += ["--no-deps", "--target", os.fspath(variant.site), os.fspath(variant.source)]
    environment = os.environ | {"CXXFLAGS": flags, "LDFLAGS": flags, "EAGLE_KERNELS_BUILD": "cpu"}
    subprocess.run(command, env=environment, check=True)
    return variant


def unoptimized(source: Path) -> None:
    """-O1 and symbols. At -O3 an instrumented kernel file takes minutes to compile, and checks, counters and faults are
    in the code before it is optimized. Reports of a stripped library have no names."""
    listfile = source / "CMakeLists.txt"
    text = listfile.read_text(encoding="utf-8")
    for old, new in ((" -O3 ", " -O1 "), ("LINKER:--strip-all", "")):
        assert text.count(old) == 1
        text = text.replace(old, new)
    listfile.write_text(text, encoding="utf-8")


def _copy_checkout(target: Path) -> None:
    """What git tracks or would add; only files that differ are written, so that ninja compiles only those again."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = set(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"))
    for stale in target.glob("csrc/**/*"):  # CMake finds files by their folder
        if stale.is_file() and os.fspath(stale.relative_to(target)) not in names:
            stale.unlink()
    for name in filter(None, names):
        old, new = ROOT / name, target / name
        if not old.is_file() or (new.is_file() and new.read_bytes() == old.read_bytes()):
            continue
        new.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(old, new)
