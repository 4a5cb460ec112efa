"""The CUDA kernels, emulated, against the CPU kernels: two implementations that share no arithmetic."""

import pytest
import torch
from torch import Tensor

import eagle_kernels as ek
from accuracy import UNIT_ROUNDOFF, relative_rms
from backends import environment_of
from cuda_host.conftest import COMPILED
from eagle_kernels import library

DTYPES = [torch.bfloat16, torch.float16]
NORMS = ["chunk", "concat", "none"]


def on_both(monkeypatch: pytest.MonkeyPatch, op: str, *arguments: object, **options: object) -> tuple[Tensor, Tensor]:
    emulated = getattr(ek, op)(*arguments, **options)
    with environment_of(EAGLE_KERNELS_BACKEND="cpu"):
        monkeypatch.setattr(library, "primitives", COMPILED)
        assert ek.explain(op, *arguments, **options).backend == "cpu"
        return emulated, getattr(ek, op)(*arguments, **options)


def make_call(norm: str, dtype: torch.dtype, T: int = 13, K: int = 3, H: int = 136) -> tuple[list[Tensor], dict]:
    chunks = [torch.randn(T, H).to(dtype) for _ in range(K)]
    gain = torch.rand(K, H).to(dtype) + 0.5
    return chunks, {
        "norm": norm,
        "norm_weight": {"chunk": gain, "concat": gain.reshape(-1), "none": None}[norm],
        "residuals": [chunk.flip(0) for chunk in chunks],
        "indices": torch.randint(-1, T + 1, (T,)),
    }


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
def test_norm_concat(dtype: torch.dtype, norm: str, emulated: object, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks, options = make_call(norm, dtype)
    cuda, cpu = on_both(monkeypatch, "norm_concat", chunks, **options)
    # Sums in another order move an fp32 value across a tie now and then: one unit in the last place, seldom.
    torch.testing.assert_close(cuda, cpu, rtol=2 * UNIT_ROUNDOFF[dtype], atol=0)
    assert (cuda != cpu).float().mean() < 0.01


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
def test_norm_concat_linear(dtype: torch.dtype, norm: str, emulated: object, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks, options = make_call(norm, dtype)
    weight = (torch.randn(97, 3 * 136) / 20).to(dtype)
    cuda, cpu = on_both(monkeypatch, "norm_concat_linear", chunks, weight, **options, bias=torch.randn(97))
    # In both, each operand and the result are rounded: at most three roundings of u/sqrt(3), twice.
    assert relative_rms(cuda, cpu.double()) < 6**0.5 * UNIT_ROUNDOFF[dtype] / 3**0.5
    assert (cuda == cpu).float().mean() > 0.3
