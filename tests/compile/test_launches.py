"""What the launcher of triton_kernels passes to the CUDA driver, over a stub of it."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent
DRIVER = HERE.parent / "gpu" / "rehearsal" / "driver.c"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc on this machine")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="TRITON_INTERPRET=1: nothing is compiled")
def test_the_driver_gets_every_argument_as_it_was_given(tmp_path: Path) -> None:
    """In a process of its own, which has the stub for a driver."""
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", DRIVER, "-o", library], check=True)
    folder = str(tmp_path)
    paths = {"TRITON_LIBCUDA_PATH": folder, "LD_LIBRARY_PATH": folder}
    environment = os.environ | paths | {"EAGLE_KERNELS_BACKEND": "triton"}
    command = [sys.executable, str(HERE / "stubbed_launches.py")]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-6000:]
    assert re.match(r"\d+ binaries of 7 kernels on Triton", run.stdout), run.stdout
