"""Tests that need a GPU: marked `gpu`, and skipped where there is none."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from backends import environment_of
from eagle_kernels import plan

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(params=["cuda", "triton"])
def gpu_backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each backend that runs CUDA tensors with kernels of its own, active."""
    if (reason := plan.unsupported_reason(request.param, torch.device("cuda"))) is not None:
        pytest.skip(f"{request.param}: {reason}")
    with environment_of(EAGLE_KERNELS_BACKEND=request.param):
        yield request.param
