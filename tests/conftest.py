"""Options, seeds, markers, and the fixtures that activate a backend, an instruction set or a plan."""

import contextlib
import ctypes
import gc
import os
from collections.abc import Iterator

import pytest
import torch

from backends import CPU_ISAS, environment_of, fused_up_to
from eagle_kernels import plan

pytest_plugins = ("counted",)

_LIBC = ctypes.CDLL(None)
_M_PERTURB = -6  # glibc: malloc fills with the complement of the number's lowest byte, unless the number is 0


def pytest_addoption(parser: pytest.Parser) -> None:
    reason = "the compile gate compiles every binary, not those that stand for the rest (tests/compile)"
    parser.addoption("--all-binaries", action="store_true", help=reason)


def pytest_configure(config: pytest.Config) -> None:
    if (workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))) > 1:
        # Two at least: rows are split over threads only where there are two.
        torch.set_num_threads(max(torch.get_num_threads() // workers, 2))
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    config.addinivalue_line("markers", "slow: takes more than 5 seconds on 2 cores")


def pytest_collection_finish() -> None:
    # Freezes what exists by now: the benchmark collects garbage before every measurement, 0.5 s each with all of this.
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or Triton's bindings report all of it as leaked


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fills every uninitialized tensor with NaN (bytes of 0xff), and all that C++ allocates, workspaces included. A
    value that an op forgot to write then shows, even where it is multiplied by zero; pages fresh from the system would
    have been zero."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    _LIBC.mallopt(_M_PERTURB, 0x100)
    keep = torch.ops.eagle_kernels_C.keep_workspaces if CPU_ISAS else lambda most: most
    kept = keep(0)
    yield
    keep(kept)
    _LIBC.mallopt(_M_PERTURB, 0)
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=[*CPU_ISAS, "reference"])
def cpu_isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each usable instruction set of the compiled kernels, then the reference backend."""
    if request.param == "reference":
        variables = {"EAGLE_KERNELS_BACKEND": "reference"}
    else:
        variables = {"EAGLE_KERNELS_BACKEND": "cpu", "EAGLE_KERNELS_CPU_ISA": request.param}
    with environment_of(**variables):
        assert request.param == "reference" or plan.cpu_isa() == request.param
        yield request.param


_DOTS_ISAS = {isa for limits in plan.DENSE_DOTS_ROWS.values() for isa in limits}
_FUSED = [f"fused-{isa}" for isa in CPU_ISAS] + [f"dots-{isa}" for isa in CPU_ISAS if isa in _DOTS_ISAS]


@pytest.fixture(params=[*_FUSED, *(["two-step"] if CPU_ISAS else []), "reference"])
def projection(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each way norm_concat_linear can run, for every T: the fused kernels of each instruction set, norm_concat followed
    by torch's product, and the reference backend."""
    method, _, isa = request.param.partition("-")
    limited = contextlib.nullcontext()
    if method == "fused":
        limited, variables = fused_up_to(1 << 40), {"EAGLE_KERNELS_CPU_ISA": isa}
    elif method == "dots":
        variables = {"EAGLE_KERNELS_CPU_ISA": isa, "EAGLE_KERNELS_BATCH_INVARIANT": "1"}
    elif request.param == "two-step":
        limited, variables = fused_up_to(-1), {"EAGLE_KERNELS_BACKEND": "cpu"}
    else:
        variables = {"EAGLE_KERNELS_BACKEND": "reference"}
    with limited, environment_of(**variables):
        yield request.param
