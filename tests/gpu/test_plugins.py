"""The plugins on a GPU: what they run when a drafter is loaded, and that a captured graph then compiles nothing. The
engine is the stand-in of tests/engines/test_vllm_hooks.py: real engines run here on CPU alone."""

import functools
import re
import types
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import eagle_kernels as ek
from accuracy import relative_rms
from eagle_kernels.engines.projection import EngineProjection, probe
from eagle_kernels.ops.sources import Sources, formula
from engines.test_vllm_hooks import COMBINE, T, build, engines_own, log, register, vllm
from test_norm_concat_linear_quantized import random_weight

__all__ = ["log", "vllm"]  # fixtures

K, H, D, MAX_ROWS = 3, 96, 80, 40
randn = functools.partial(torch.randn, dtype=torch.bfloat16, device="cuda")


def norm_of(width: int) -> nn.Module:
    norm = nn.Module()
    norm.weight, norm.variance_epsilon = nn.Parameter(1 + randn(width) / 8, requires_grad=False), 1e-5
    norm.forward = lambda x: nn.functional.rms_norm(x, x.shape[-1:], norm.weight.to(x.dtype), norm.variance_epsilon)
    return norm


def projection_of(kind: str, codes: str) -> EngineProjection:
    fc = nn.Module()
    fc.weight = random_weight(codes, D, K * H).to("cuda") if codes else nn.Parameter(randn(D, K * H), False)
    fc.bias = nn.Parameter(randn(D), requires_grad=False)
    return EngineProjection(
        fc,
        K,
        concat_norm=norm_of(K * H) if kind in ("concat", "both") else None,
        chunk_norms=[norm_of(H) for _ in range(K)] if kind in ("chunk", "both", "post") else (),
        post_norm=norm_of(D) if kind == "post" else None,
    )


def truth(projection: EngineProjection, packed: Tensor) -> Tensor:
    """In float64, but for the first of two norms, which is rounded as engines round it."""
    concat, chunks = projection.concat_norm, projection.chunk_norms
    if concat is not None and chunks:
        packed = concat.forward(packed.double()).bfloat16()
    norms, kind = (chunks, "chunk") if chunks else ([concat], "concat") if concat is not None else ([], "none")
    gains = [norm.weight for norm in norms]
    x = formula(Sources([packed], K, kind, gains, [1e-5], 0.0, [], [], None), torch.float64)
    weight = projection.fc.weight
    dense = weight.dequantize(torch.float64) if isinstance(weight, ek.QuantizedWeight) else weight.double()
    y = x @ dense.t() + projection.fc.bias.double()
    return y if projection.post_norm is None else projection.post_norm.forward(y)


@pytest.mark.usefixtures("gpu_backend")
@pytest.mark.parametrize("codes", ["", "fp8_row", "nvfp4"])
@pytest.mark.parametrize("kind", ["none", "chunk", "concat", "both", "post"])
def test_a_probed_projection_is_captured_at_any_number_of_rows(kind: str, codes: str) -> None:
    projection = projection_of(kind, codes)
    probe(projection, K * H, projection.fc.bias, MAX_ROWS)
    for rows in (1, 9, MAX_ROWS):
        packed, out = randn(rows, K * H), randn(rows, D)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = [projection.forward(packed), projection.forward(list(packed.chunk(K, -1)), out=out)]
        packed.normal_()
        graph.replay()
        error = max(relative_rms(result, truth(projection, packed)) for result in results)
        assert error < 3e-3


@pytest.mark.parametrize("forced", [True, False])
def test_a_drafter_is_timed_on_the_gpu_or_forced(
    vllm: types.SimpleNamespace, log: Callable, monkeypatch: pytest.MonkeyPatch, forced: bool
) -> None:
    if not forced:
        monkeypatch.delenv("EAGLE_KERNELS_VLLM")
    register()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"), torch.inference_mode():  # as vLLM makes its modules
            drafter = build(vllm)
    finally:
        torch.set_default_dtype(torch.float32)
    (line,) = [line for line in log() if line.startswith(COMBINE)]
    if forced:
        assert "runs norm_concat_linear" in line and "forced, not timed" in line
    else:
        assert re.search(r"; T=1 \S+ ms \(vLLM \S+\)", line) or "is not faster, T=1 " in line
    hidden = randn(T, drafter.model.fc.input_size)
    error = relative_rms(drafter.combine_hidden_states(hidden), engines_own(vllm, drafter, hidden).double())
    assert error < 1e-2
