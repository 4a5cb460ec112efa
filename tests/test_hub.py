"""The package for Hugging Face's kernel hub, built and loaded where eagle-kernels is not installed."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

pytest.importorskip("kernels")

from kernels._rust import Digest, DigestAlgorithm, Metadata

from eagle_kernels import library

ROOT = Path(__file__).resolve().parent.parent

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(library.unsupported_reason is not None, reason="this machine compiles nothing"),
]


def test_the_hub_package(tmp_path: Path) -> None:
    """One test, since two processes of pytest-xdist would build in the same folder."""
    variant = build()
    check_metadata(variant)
    check_imports(variant)
    check_that_it_loads(variant, tmp_path)


def build() -> Path:
    """`make hub HUB=cpu`, which compiles the host files anew and takes the kernels from the build of the tree."""
    run = subprocess.run([sys.executable, "hub/build.py", "cpu"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return ROOT / run.stdout.strip()


def check_metadata(variant: Path) -> None:
    assert re.fullmatch(r"torch-stable-abi211-cpu-\w+-linux", variant.name)
    metadata = Metadata.read_from_file(variant / "metadata.json")
    assert re.fullmatch(r"_eagle_kernels_cpu_[0-9a-f]{7}", metadata.id)
    assert (str(metadata.name), metadata.version, metadata.python_depends) == ("eagle-kernels", 0, [])
    assert json.loads((variant / "metadata.json").read_text())["backend"] == {"type": "cpu"}
    metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
    assert {"__init__.py", "eagle_kernels/libeagle_kernels.so"} <= set(metadata.digest.files)


def check_imports(variant: Path) -> None:
    for path in variant.rglob("*.py"):
        text = path.read_text()
        assert not re.search(r"^\s*(from|import) eagle_kernels\b", text, re.MULTILINE), path
        # Imports of modules only: what a function imports when called (safetensors, for a checkpoint) may be missing.
        names = set(re.findall(r"^(?:from|import) ([a-zA-Z_]\w*)", text, re.MULTILINE))
        assert names - sys.stdlib_module_names <= {"torch", "triton"}, path


LOAD = """
import importlib.util
import pathlib
import sys

import torch

assert importlib.util.find_spec("eagle_kernels") is None
import kernels

first, second = (kernels.get_local_kernel(pathlib.Path(path)) for path in sys.argv[1:])
assert first is not second and first.__name__ != second.__name__
x, residual = torch.randn(2, 3, 64, dtype=torch.bfloat16)
weight = torch.randn(8, 64, dtype=torch.bfloat16)
for ek in (first, second):
    assert "cpu/" in str(ek.explain("norm_concat_linear", [x], weight)), ek.explain("norm_concat_linear", [x], weight)
    out = torch.empty_like(x)
    assert torch.equal(ek.capture_hidden(x, residual, out=out), x + residual)
    ops = getattr(torch.ops, ek.__name__)
    traced = torch.compile(lambda: ek.norm_concat_linear([x], weight, norm="none"), fullgraph=True, backend="aot_eager")
    assert torch.equal(traced(), ek.norm_concat_linear([x], weight, norm="none"))
    assert hasattr(ops, "norm_concat_linear") and ek.layers.RMSNorm.has_backward is False
assert not hasattr(torch.ops.eagle_kernels, "norm_concat_linear")

from torch import nn

class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(64)), 1e-6

    def forward(self, hidden_states):
        raise AssertionError("not replaced")

model = nn.Sequential(kernels.use_kernel_forward_from_hub("RMSNorm")(Norm)())
layer = kernels.LocalLayerRepository(pathlib.Path(sys.argv[1]), layer_name="RMSNorm")
with kernels.use_kernel_mapping({"RMSNorm": {"cpu": layer}}, inherit_mapping=False), torch.no_grad():
    normed = kernels.kernelize(model, mode=kernels.Mode.INFERENCE, device="cpu", use_fallback=False)(x.float())
torch.testing.assert_close(normed, torch.nn.functional.rms_norm(x.float(), (64,), eps=1e-6))
print("loaded")
"""


def check_that_it_loads(variant: Path, tmp_path: Path) -> None:
    """It loads beside another version of itself."""
    venv.create(tmp_path / "empty", symlinks=True)
    # A folder on PYTHONPATH is no site folder: the .pth of the editable install there is not read.
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": sysconfig.get_path("purelib")}
    other = other_version(variant, tmp_path / "other" / "build" / variant.name)
    command = [tmp_path / "empty/bin/python", "-c", LOAD, variant.parents[1], other.parents[1]]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert run.stdout == "loaded\n", run.stdout + run.stderr


def other_version(variant: Path, copy: Path) -> Path:
    """The same package with another id, of the same length because the library contains it as a string."""
    identifier = json.loads((variant / "metadata.json").read_text())["id"]
    changed = identifier[:-1] + ("0" if identifier[-1] != "0" else "1")
    for path in variant.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            target = copy / path.relative_to(variant)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes().replace(identifier.encode(), changed.encode()))
    return copy
