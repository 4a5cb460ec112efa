"""When the triton backend is chosen, and what is said where it is not."""

import importlib.util

import pytest
import torch

import eagle_kernels as ek
from backends import environment_of
from eagle_kernels import library, plan


@pytest.fixture(autouse=True)
def no_cuda_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "unsupported_reason", None)
    monkeypatch.setattr(library, "cuda_archs", ())
    plan.clear()
    yield
    plan.clear()


def on_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> str:
    """What a CUDA tensor's op would run on a GPU of this capability."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    with environment_of():
        return str(plan.choose("norm_concat", torch.device("cuda")))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_cuda_tensors_go_to_triton(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert on_gpu(monkeypatch, capability).startswith("norm_concat: triton/one kernel, because cuda: this build has no")


def test_an_old_gpu_gets_the_reference_and_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    said = on_gpu(monkeypatch, (7, 5))
    assert said.startswith("norm_concat: reference/plain torch") and "compute capability 7.5" in said


def test_without_triton_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "triton is not installed" in on_gpu(monkeypatch, (9, 0))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_cpu_tensors_need_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    row = torch.zeros(1, 8)
    wanted = r"EAGLE_KERNELS_BACKEND is 'triton'.*TRITON_INTERPRET=1"
    with environment_of(EAGLE_KERNELS_BACKEND="triton"), pytest.raises(RuntimeError, match=wanted):
        ek.capture_hidden(row, out=torch.zeros(1, 8))
    with environment_of(EAGLE_KERNELS_BACKEND="triton", TRITON_INTERPRET="1"):
        assert ek.explain("capture_hidden", row).backend == "triton"
