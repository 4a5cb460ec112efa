"""What the ops are timed against: that each baseline is the engine's own computation, and all of it."""

import importlib.util
import sys
import types
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from eagle_kernels.bench import baselines
from torch import Tensor

from guards import same_bits

EPS = 0.3  # so large that another one shows


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def normed(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], gain, eps)


def add_in_place(hidden: Tensor, residual: Tensor, gain: Tensor, eps: float) -> None:
    residual.add_(hidden)
    hidden.copy_(normed(residual, gain, eps))


def into_dense(out: Tensor, x: Tensor, gain: Tensor, eps: float) -> None:
    assert out.is_contiguous()
    out.copy_(normed(x, gain, eps))


def of_both(hidden: Tensor, residual: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return normed(hidden + residual, gain, eps), hidden + residual


# The functions of each package by their own signatures, since none of the packages is required.
STAND_INS = {
    "liger_kernel.ops": {
        "LigerRMSNormFunction": types.SimpleNamespace(apply=normed),
        "LigerFusedAddRMSNormFunction": types.SimpleNamespace(apply=of_both),
    },
    "flashinfer.norm": {
        "rmsnorm": lambda x, gain, eps, out: out.copy_(normed(x, gain, eps)),
        "fused_add_rmsnorm": add_in_place,
    },
    "vllm._custom_ops": {"rms_norm": into_dense, "fused_add_rms_norm": add_in_place},
}


@pytest.mark.parametrize("name", baselines.FOREIGN)
def test_each_package_norms_into_a_slice_and_after_a_sum(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, functions in STAND_INS.items():
        monkeypatch.setitem(sys.modules, module.partition(".")[0], types.ModuleType("stand_in"))
        monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(**functions))
    x, gain, buffer = rows(5, 8), rows(8, seed=1), rows(5, 24)
    for out in (buffer[:, 8:16], torch.empty(5, 8)):
        baselines.norm_kernel(name)(x, gain, EPS, out)
        assert same_bits(out.contiguous(), normed(x, gain, EPS))
    total, result = x + buffer[:, :8], baselines.ForeignNorms(name).add_norm(x, buffer[:, :8].clone(), gain, EPS)
    assert same_bits(result[0], normed(total, gain, EPS)) and same_bits(result[1], total)


def test_packages_that_are_not_here_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert baselines.foreign_unsupported_reason("liger", "cuda") == "liger_kernel is not installed"
    assert baselines.torchao_unsupported_reason("int8_row") == "torchao is not installed"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert baselines.foreign_unsupported_reason("liger", "cpu") == "the kernels of liger_kernel take CUDA tensors"
    assert baselines.foreign_unsupported_reason("liger", "cuda") is None
    assert baselines.torchao_unsupported_reason("int8_row") is None


def test_norms_take_the_eps_and_the_buffer_of_the_call() -> None:
    x, gain, out = rows(5, 24), rows(24, seed=1), torch.empty(5, 24)
    assert baselines.normed_concat(x.chunk(3, 1), [gain], "concat", EPS, out) is out
    torch.testing.assert_close(out, normed(x, gain, EPS))
    assert baselines.normed_concat([x], [], "none", EPS) is x  # an engine has no cat for one chunk
    baselines.norm_kernel("slices")(x, gain, EPS, out)
    torch.testing.assert_close(out, normed(x, gain, EPS))
    scratch = baselines.NormScratch(5, 24, device="cpu")
    assert baselines.NormScratch.num_bytes(5, 24) == sum(tensor.nbytes for tensor in vars(scratch).values())


@pytest.mark.parametrize(("format", "config"), [("int8_row", "int8"), ("fp8_row", "float8")])
def test_torchao_quantizes_the_layer(format: str, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = {"Int8WeightOnlyConfig": lambda: "int8", "Float8WeightOnlyConfig": lambda: "float8"}
    quantized: list[tuple] = []
    stand_in = types.SimpleNamespace(**configs, quantize_=lambda *arguments: quantized.append(arguments))
    monkeypatch.setitem(sys.modules, "torchao", types.ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.quantization", stand_in)
    layer = baselines.torchao_linear(rows(4, 8), format)
    assert quantized == [(layer, config)] and same_bits(layer(rows(2, 8)), F.linear(rows(2, 8), rows(4, 8)))


def stand_in_for_compile(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """torch.compile that calls its function, and notes its options and what Inductor would be told."""
    from torch._inductor import config

    noted: list[dict] = []
    names = ("freezing", "max_autotune", "max_autotune_gemm_backends", "fx_graph_cache", "compile_threads")

    def compiled(function: Callable, **options: object) -> Callable:
        def call(*arguments: object) -> object:
            noted.append(options | {name: getattr(config, name) for name in names})
            return function(*arguments)

        return call

    monkeypatch.setattr(torch, "compile", compiled)
    return noted


def test_a_compiled_chain_has_the_arguments_of_its_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = stand_in_for_compile(monkeypatch)
    call = baselines.compiled(lambda *arguments: arguments, [(1, 2), (3, 4)], "max-autotune-no-cudagraphs")
    assert call(1) == (3, 4) and call(0) == (1, 2)
    assert [each["mode"] for each in noted] == ["max-autotune-no-cudagraphs"] * 3
    assert noted[0]["compile_threads"] == 1  # a worker would run into the measurement


def test_a_frozen_projection_is_the_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a weight of its own, which Inductor packs from the start of its storage."""
    noted, frozen = stand_in_for_compile(monkeypatch), []
    freeze = baselines._freeze
    monkeypatch.setattr(baselines, "_freeze", lambda module, *rest: frozen.append(module) or freeze(module, *rest))
    chunks, gains, post_gain = rows(2, 5, 8).unbind(), rows(2, 8, seed=1).unbind(), rows(4, seed=2)
    arguments = [(chunks, gains, weight, "chunk", EPS, post_gain) for weight in rows(2, 4, 16).unbind()]
    for call, module, each in zip(baselines.frozen_projections(arguments), frozen, arguments, strict=True):
        assert same_bits(call(chunks), baselines.projection(*each))
        assert module.weight.data_ptr() != each[2].data_ptr() and module.weight.storage_offset() == 0
    assert noted[0] == {
        "dynamic": False,
        "freezing": True,
        "max_autotune": True,
        "max_autotune_gemm_backends": "CPP,ATEN",
        "fx_graph_cache": False,
        "compile_threads": 1,
    }


def test_fewer_modules_are_made_where_all_would_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 s each, the first one apart: seven would take 70 s."""
    clock = [0.0]

    def freeze(module: object, chunks: object, number: int) -> object:
        clock[0] += 10 if number else 500
        return module

    monkeypatch.setattr(baselines, "_freeze", freeze)
    monkeypatch.setattr(baselines.time, "perf_counter", lambda: clock[0])
    arguments = [([rows(1, 4)], [rows(4)], rows(2, 4), "chunk", EPS, None)] * 9
    assert [len(baselines.frozen_projections(arguments[:n])) for n in (1, 2, 6, 9)] == [1, 2, 6, 7]
