"""What `import eagle_kernels` brings along, seen from a fresh interpreter in a directory of its own.

`make bench-host` measures what it costs.
"""

import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from backends import needs_compiled
from eagle_kernels import library

ROOT = Path(__file__).resolve().parent.parent

_SCRIPT = """
import importlib.util, json, sys
import torch
before = set(sys.modules)
import eagle_kernels
in_dir = set(dir(eagle_kernels))
print(json.dumps({
    "modules": sorted(set(sys.modules) - before),
    "triton": "triton" in sys.modules,
    "cuda": torch.cuda.is_initialized(),
    "threads": torch.get_num_threads(),
    "top_level": [name for name in ("triton_kernels", "bench", "python", "ops", "tests", "csrc")
                  if importlib.util.find_spec(name) is not None],
    "names": [name for name in eagle_kernels.__all__ if not hasattr(eagle_kernels, name)],
    "not_in_dir": [name for name in eagle_kernels.__all__ if name not in in_dir],
}))
"""


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict:
    elsewhere: Path = tmp_path_factory.mktemp("elsewhere")
    run = subprocess.run([sys.executable, "-c", _SCRIPT], cwd=elsewhere, capture_output=True, text=True, check=True)
    return json.loads(run.stdout)


def test_brings_no_triton_and_no_cuda_context(imported: dict) -> None:
    assert not imported["triton"] and not imported["cuda"]


def test_loads_nothing_but_itself_and_the_standard_library(imported: dict) -> None:
    """What torch imports is there before; an engine, transformers, numpy or the benchmark would be a new cost."""
    foreign = {name.partition(".")[0] for name in imported["modules"]} - {"eagle_kernels"} - sys.stdlib_module_names
    assert not {name for name in foreign if not name.startswith(("torch", "__editable__"))}
    assert not [name for name in imported["modules"] if name.startswith(("eagle_kernels.bench", "eagle_kernels.eng"))]


def test_installs_no_other_top_level_name(imported: dict) -> None:
    """vLLM and SGLang import another package as `triton_kernels`."""
    assert imported["top_level"] == []


def test_all_is_importable(imported: dict) -> None:
    assert imported["names"] == []


def test_dir_has_all_before_a_lazy_name_is_used(imported: dict) -> None:
    """help() and the API page show what dir has."""
    assert imported["not_in_dir"] == []
    assert "automodule:: eagle_kernels\n   :members:\n" in (ROOT / "docs/api.md").read_text("utf-8")


_LOAD = """
import sys, torch, eagle_kernels
program = torch.export.load(sys.argv[1])
print(*(node.target for node in program.graph.nodes if node.op == "call_function"))
"""


class _Store(torch.nn.Module):
    def forward(self, kv: torch.Tensor, cos_sin: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        index = torch.arange(kv.shape[0])
        torch.ops.eagle_kernels.store_context_kv(kv, None, 1e-6, 0.0, 8, cos_sin, 0, False, index, index, k, v)
        return k + v


def test_a_saved_graph_with_any_op_loads_after_the_import_alone(tmp_path: Path) -> None:
    """store_context_kv was registered once ContextKV had been used: the graph could not be loaded before."""
    arguments = torch.randn(3, 16), torch.rand(9, 4), torch.zeros(5, 1, 8), torch.zeros(5, 1, 8)
    program = torch.export.export(_Store(), arguments, strict=False)
    torch.export.save(program, tmp_path / "store.pt2")
    run = subprocess.run(
        [sys.executable, "-c", _LOAD, str(tmp_path / "store.pt2")], cwd=tmp_path, capture_output=True, text=True
    )
    assert "eagle_kernels.store_context_kv.default" in run.stdout, run.stderr


_CALL = """
import torch, eagle_kernels as ek
x = torch.randn(2, 8)
plan = ek.explain("norm_concat", x, num_chunks=2)
print(plan.backend, torch.equal(ek.norm_concat(x, num_chunks=2, norm="none"), x), plan.reason)
"""


@needs_compiled
@pytest.mark.parametrize(
    "missing",
    [
        "eagle_kernels_python_names",
        "eagle_kernels_num_python_objects",
        "vocab_parallel_embedding_out",
        "add_rms_norm_checks_out",
    ],
)
def test_an_older_library_counts_as_none(tmp_path: Path, missing: str) -> None:
    """A checkout with newer Python files than its library ended in an AttributeError: at import where the library lacks
    a function, at the first call where it lacks a primitive."""
    package = library.COMPILED_LIBRARY.parent
    shutil.copytree(package, tmp_path / package.name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    older = library.COMPILED_LIBRARY.read_bytes().replace(missing.encode(), missing[:-1].encode() + b"X")
    (tmp_path / package.name / library.COMPILED_LIBRARY.name).write_bytes(older)
    run = subprocess.run([sys.executable, "-c", _CALL], cwd=tmp_path, capture_output=True, text=True)
    older_than = f"libeagle_kernels.so is older than the package, it has no {missing}: install the package again"
    assert run.stdout.strip() == f"reference True cpu: {older_than}", run.stderr
    assert run.stderr.splitlines() == [f"the compiled kernels are left out: {older_than}"]


@needs_compiled
@pytest.mark.parametrize(("version", "is_too_old"), [("2.9.1+cpu", True), ("2.10.0", True), ("2.11.0a0+git1", False)])
def test_an_older_torch_gets_no_compiled_kernels(
    version: str, is_too_old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may lack functions that they call."""
    monkeypatch.setattr(torch, "__version__", version)
    reason = f"the compiled kernels need torch 2.11 or newer, and this is torch {version}"
    assert library.load_compiled() == (reason if is_too_old else None)


def test_a_library_that_does_not_load_is_reported_once(tmp_path: Path) -> None:
    """Calls ran plain torch, and only `explain` said so. A build without kernels was asked for: it stays silent. The
    reason is the loader's: torch's error names the file alone, whether it is damaged or one of CUDA is missing."""
    package = library.COMPILED_LIBRARY.parent
    shutil.copytree(package, tmp_path / package.name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    run = functools.partial(subprocess.run, [sys.executable, "-c", _CALL], cwd=tmp_path, capture_output=True, text=True)
    without = run()
    assert without.stdout.startswith("reference True cpu: the package is without compiled kernels"), without.stderr
    assert without.stderr == ""
    (tmp_path / package.name / library.COMPILED_LIBRARY.name).write_bytes(b"no library")
    broken = run()
    assert broken.stdout.startswith("reference True cpu: libeagle_kernels.so did not load: "), broken.stderr
    assert broken.stderr.count("the compiled kernels are left out: libeagle_kernels.so did not load: ") == 1
    assert broken.stderr.rstrip().endswith("libeagle_kernels.so: file too short")
