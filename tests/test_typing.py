"""What a type checker finds in the installed package; `make lint` checks the tree itself."""

import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

PROGRAM = """\
import eagle_kernels as ek
reveal_type(ek.capture_layers("llama", 32))
ek.capture_layers(32, "llama")
ek.norm_concat([], norms="chunk")
"""


def test_installed_package_has_its_types(tmp_path: Path) -> None:
    """In an environment of its own, without torch: torch's types are Any there, and the rest is checked."""
    pytest.importorskip("mypy")
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv/bin/python"
    (site,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    build = [sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", str(site)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=60, env={"EAGLE_KERNELS_BUILD": "none"})
    assert (site / "eagle_kernels/py.typed").exists()
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "mypy", f"--python-executable={python}", "--ignore-missing-imports"]
    options = ["--config-file=", f"--cache-dir={tmp_path / 'cache'}", "program.py"]
    run = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    lines = [line.partition(": ")[2] for line in run.stdout.splitlines() if line.startswith("program.py:")]
    assert lines[0].startswith('note: Revealed type is "') and "list[" in lines[0], run.stdout
    assert "[arg-type]" in lines[1] and "[arg-type]" in lines[2], run.stdout
    assert lines[3].startswith('error: Unexpected keyword argument "norms"'), run.stdout
