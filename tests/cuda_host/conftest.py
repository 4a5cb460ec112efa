"""Runs the CUDA kernels on the CPU: the sources of csrc/cuda compiled with g++ over an emulation of a GPU's threads.

Where possible the tests are those of the CPU kernels, with the cuda backend forced and its primitives replaced by the
emulated ones.
"""

import os
import zlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from backends import environment_of
from cuda_host.build import COMPILER, load
from eagle_kernels import library, plan

# Tests of other backends, which the files here import and run again.
pytest.register_assert_rewrite(
    "test_add_rms_norm",
    "test_capture_hidden",
    "test_norm_concat",
    "test_norm_concat_linear",
    "test_primitives",
    "test_vocab_parallel_embedding",
)

COMPILED = library.primitives  # which `emulated` replaces
SHARED_MEMORY = 227 << 10  # of a block on sm_90 and sm_100


def is_in_threes(launch: Any) -> bool:
    """Whether an SM has three of its blocks: csrc/cuda/mma_tile.cuh, kBytesOfThree."""
    return launch.shared_bytes <= 75 << 10


def is_in_pairs(launch: Any) -> bool:
    """Whether a launched block is two of the fused kernel's, of any width: kThreadRows of that file."""
    return launch.rows == 2


@pytest.fixture(scope="session")
def emulation() -> ModuleType:
    """The emulated GPU; instrumented in the processes that test_sanitized.py starts."""
    if COMPILER is None or library.unsupported_reason is not None:
        pytest.skip("no g++ on this machine")
    return load(os.environ.get("EAGLE_KERNELS_TEST_SANITIZED", ""))


@pytest.fixture
def emulated(
    emulation: ModuleType, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[object]:
    """The cuda backend on CPU tensors. By the name of the test, warps of a block run in descending order (a GPU may run
    them in any order between two barriers), asynchronous copies land where they are waited for, or, in a third of the
    tests, both are random."""
    monkeypatch.setattr(library, "primitives", torch.ops.eagle_kernels_emulated)
    monkeypatch.setattr(plan, "_cuda_unsupported_reason", lambda device: None)
    monkeypatch.setattr(library, "cuda_archs", ("90a",))
    # All row counts that the kernels take, more than those for which plans choose them (tests/test_cuda_backend.py).
    one_pass = dict.fromkeys((plan.Kernel.WGMMA, plan.Kernel.SPLIT), library.MAX_CUDA_SPLIT_ROWS)
    monkeypatch.setattr(plan, "_ONE_PASS_ROWS", one_pass)
    order = len(request.node.name)
    seed = zlib.crc32(request.node.nodeid.encode()) if order % 3 == 0 else 0
    emulation.set_device(SHARED_MEMORY, descending_warps=order % 2 == 1, late_copies=order // 2 % 2 == 1, random=seed)
    with environment_of(EAGLE_KERNELS_BACKEND="cuda"):
        yield library.primitives


@pytest.fixture
def cpu_isa(emulated: object, emulation: ModuleType, request: pytest.FixtureRequest) -> str:
    """Tests that run on every instruction set of the CPU kernels run once here, half of them on a GPU of one SM, where
    rows share a block."""
    order = len(request.node.name)
    if order // 2 % 2 == 1:
        emulation.set_device(SHARED_MEMORY, descending_warps=order % 2 == 1, multiprocessors=1)
    return "emulated"


@pytest.fixture
def fused_at_every_T(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused kernel also for more than 16 rows, in rounds of 16, where plans choose the split kernels."""
    monkeypatch.setattr(library, "MAX_CUDA_DECODE_ROWS", library.MAX_CUDA_SPLIT_ROWS)


@pytest.fixture
def wgmma_at_every_T(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wgmma kernel also for few rows, where plans choose the fused kernel."""
    monkeypatch.setattr(library, "MAX_CUDA_DECODE_ROWS", 0)


@pytest.fixture
def no_wgmma(emulated: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a library without code for sm_90a: the split kernels run in place of wgmma."""
    monkeypatch.setattr(library, "cuda_archs", ("80", "90+ptx"))
