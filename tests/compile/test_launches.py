"""What the launcher of triton_kernels passes to the CUDA driver, over a stub of it."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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
    assert re.match(r"\d+ binaries of 8 kernels on Triton", run.stdout), run.stdout


def test_the_library_launches_on_the_current_device_and_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python launches what the library leaves to it, and every call while another device is the current one."""
    from eagle_kernels.triton_kernels import launch as launching

    by_library, by_python, takes = [], [], [True]
    monkeypatch.setattr(launching, "launch_by_library", lambda *call: by_library.append(call) or takes[-1])
    monkeypatch.setattr(launching, "_current_device", lambda: current[-1])
    monkeypatch.setattr(launching, "current_stream", lambda index: (index, len(by_library)))
    product = launching.Product(lambda *operands: by_python.append(operands), x=0, weight=1, bias=None, out=2)
    launches = launching.Launches(torch.device("cuda", 1), [product])
    operands, current = (torch.ones(1, 8), torch.ones(2, 8), torch.empty(1, 2)), [1]

    assert launches(operands, (7,), (0.5,)) and not by_library, "nothing is entered before the first call"
    launches._has_binaries = True
    for _ in range(2):
        assert launches(operands, (7,), (0.5,))
    address = launches._record_address
    assert by_library == [(address, operands, (7,), (0.5,), (1, 0)), (address, operands, (7,), (0.5,), (1, 1))]
    current.append(0)
    assert launches(operands, (7,), (0.5,))
    assert len(by_library) == 2 and len(by_python) == 2
    current.append(1)
    takes.append(None)
    assert launches(operands, (7,), (0.5,))
    assert len(by_library) == 3 and by_python[-1] == (operands[0], operands[1], None, operands[2])
