"""What `import eagle_kernels` costs and brings along, seen from fresh interpreters in a directory of their own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = """
import importlib.util, json, sys, time
import torch
before = set(sys.modules)
start = time.perf_counter()
import eagle_kernels
seconds = time.perf_counter() - start
print(json.dumps({
    "seconds": seconds,
    "modules": sorted(set(sys.modules) - before),
    "triton": "triton" in sys.modules,
    "cuda": torch.cuda.is_initialized(),
    "threads": torch.get_num_threads(),
    "top_level": [name for name in ("triton_kernels", "bench", "python", "ops", "tests", "csrc")
                  if importlib.util.find_spec(name) is not None],
    "names": [name for name in eagle_kernels.__all__ if not hasattr(eagle_kernels, name)],
}))
"""


@pytest.fixture(scope="module")
def imports(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """Three fresh imports; the best of their times is the one that other processes disturbed least."""
    elsewhere: Path = tmp_path_factory.mktemp("elsewhere")
    command = [sys.executable, "-c", _SCRIPT]
    runs = [subprocess.run(command, cwd=elsewhere, capture_output=True, text=True, check=True) for _ in range(3)]
    return [json.loads(run.stdout) for run in runs]


def test_costs_less_than_50_ms_beyond_torch(imports: list[dict]) -> None:
    assert min(run["seconds"] for run in imports) < 0.050


def test_brings_no_triton_and_no_cuda_context(imports: list[dict]) -> None:
    assert not imports[0]["triton"] and not imports[0]["cuda"]


def test_loads_nothing_but_itself_and_the_standard_library(imports: list[dict]) -> None:
    """torch imports what it needs before; an engine, transformers, numpy or the benchmark here would be a new cost."""
    foreign = {name.partition(".")[0] for name in imports[0]["modules"]} - {"eagle_kernels"} - sys.stdlib_module_names
    assert not {name for name in foreign if not name.startswith(("torch", "__editable__"))}
    assert not [name for name in imports[0]["modules"] if name.startswith(("eagle_kernels.bench", "eagle_kernels.eng"))]


def test_installs_no_other_top_level_name(imports: list[dict]) -> None:
    """vLLM and SGLang import another package as `triton_kernels`."""
    assert imports[0]["top_level"] == []


def test_all_is_importable(imports: list[dict]) -> None:
    assert imports[0]["names"] == []
