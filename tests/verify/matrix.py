"""`make test-matrix`: one library, compiled with one torch, in every torch, Triton and Python that is supported.

An environment per row under MATRIX (default build/matrix), made on first use; a CUDA build of torch is 5 GB and runs on
a machine without a GPU. The rows together cover each release, not each combination.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from verify.core import CORE
from verify.results import EVERY_CORE, as_record, run_tests, save
from verify.variant import ROOT, Variant, install


@dataclass(frozen=True)
class Cell:
    python: str
    torch: str
    triton: str


CELLS = (
    Cell("3.10", "2.11.0", "3.6.0"),
    Cell("3.11", "2.13.0+cpu", "3.9.0"),
    Cell("3.12", "2.14.1", ""),  # the one that torch asks for
    Cell("3.13", "2.15.0", "3.9.0"),
)
ENVIRONMENTS = Path(os.environ.get("MATRIX", ROOT / "build/matrix"))
TEST_PACKAGES = ["hypothesis", "numpy<2.4", "pytest", "pytest-benchmark", "pytest-xdist"]
TEST_PACKAGES += ["safetensors", "setuptools>=77"]
VERSIONS = "import torch, triton, platform; print(platform.python_version(), torch.__version__, triton.__version__)"


def main() -> int:
    variant = install("matrix")
    records = [check(cell, variant) for cell in CELLS]
    print(f"saved {save('test-matrix', records)}")
    return 1 if any(record["failed"] for record in records) else 0


def check(cell: Cell, variant: Variant) -> dict:
    python = environment_of(cell)
    names = ("python", "torch", "triton")
    versions = subprocess.run([python, "-c", VERSIONS], capture_output=True, text=True, check=True).stdout.split()
    outcome, output = run_tests(python, [*EVERY_CORE, *CORE], variant.environment())
    if outcome.failed:
        print(output[-8000:])
    print(versions, outcome, flush=True)
    return as_record(outcome, **dict(zip(names, versions, strict=True)))


def environment_of(cell: Cell) -> Path:
    """The Python of the cell's environment, which is made where it is missing or incomplete."""
    folder = ENVIRONMENTS / f"py{cell.python}-torch{cell.torch}"
    python, stamp = folder / "bin/python", folder / "cell.stamp"
    wanted = repr(asdict(cell))
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    subprocess.run([interpreter(cell.python), "-m", "venv", "--clear", folder], check=True)
    packages = [f"torch=={cell.torch}", f"triton=={cell.triton}" if cell.triton else "triton", *TEST_PACKAGES]
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    subprocess.run([*command, *packages], check=True)
    stamp.write_text(wanted)
    return python


def interpreter(version: str) -> str:
    """The Python of this minor version: pyenv's newest, else the one on PATH."""
    pyenv = sorted((Path.home() / ".pyenv/versions").glob(f"{version}.*/bin/python"))
    found = os.fspath(pyenv[-1]) if pyenv else shutil.which(f"python{version}")
    if found is None:
        raise SystemExit(f"test-matrix: Python is missing, expected python{version} on PATH or of pyenv")
    return found


if __name__ == "__main__":
    sys.exit(main())
