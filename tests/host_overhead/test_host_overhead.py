"""What a call costs on the host: checks, dispatch, plan. One row of 64 columns leaves the kernels nothing to do.

`make bench-host` measures; a plain pytest run calls each once; `make gpu-ready` measures them on CUDA, by its first
backend and by Triton, with every launch stubbed. `torch` is one product of the same size, for scale; `dispatch` is the
registered op below the public function, so the difference to `out` is what the checks cost.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import eagle_kernels as ek
from eagle_kernels.engines.projection import EngineProjection
from eagle_kernels.model_shapes import model_shapes
from eagle_kernels.ops.store_context_kv import StoreContextKV
from eagle_kernels.ops.store_context_kv import store_context_kv as store_rows
from eagle_kernels.plan import Problem, choose
from engines.watched_parameter import Parameter

K, H, V = 3, 64, 100


def rows(device: str, *shape: int) -> Tensor:
    return torch.randn(*(shape or (1, H)), device=device).bfloat16()


def norm_concat_linear(device: str) -> tuple[Callable, dict]:
    chunks, weight, gain = [rows(device) for _ in range(K)], rows(device, H, K * H), rows(device, K, H)
    return lambda **out: ek.norm_concat_linear(chunks, weight, norm_weight=gain, **out), {"out": rows(device)}


def norm_concat(device: str) -> tuple[Callable, dict]:
    chunks, gain = [rows(device) for _ in range(K)], rows(device, K, H)
    return lambda **out: ek.norm_concat(chunks, norm_weight=gain, **out), {"out": rows(device, 1, K * H)}


def vocab_parallel_embedding(device: str) -> tuple[Callable, dict]:
    shard = ek.VocabShard.build(V, tp_rank=0, tp_size=2)
    ids, table = torch.zeros(1, dtype=torch.int64, device=device), rows(device, shard.rows, H)
    return lambda **out: ek.vocab_parallel_embedding(ids, table, shard, **out), {"out": rows(device)}


def add_rms_norm(device: str) -> tuple[Callable, dict]:
    hidden, residual, weight = rows(device), rows(device), rows(device, H)
    outs = {"out": rows(device), "out_sum": rows(device)}
    return lambda **out: ek.add_rms_norm(hidden, residual, weight, **out), outs


def capture_hidden(device: str) -> tuple[Callable, dict]:
    hidden, residual = rows(device), rows(device)
    return lambda **out: ek.capture_hidden(hidden, residual, **out), {"out": rows(device)}


def store_context_kv(device: str) -> tuple[Callable, dict]:
    ids = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2)]
    caches = [rows(device, 4, 1, H) for _ in range(2)]
    norm, rotary = (rows(device, H), 1e-6, 0.0, H), (rows(device, 9, H), 0, False)
    record = StoreContextKV(rows(device, 1, 2 * H), *norm, *rotary, *ids, *caches)
    return lambda: store_rows(record), {}


OPS = [norm_concat_linear, norm_concat, vocab_parallel_embedding, add_rms_norm, capture_hidden, store_context_kv]


@pytest.mark.parametrize("op", OPS[:-2], ids=lambda op: op.__name__)
def test_functional(op: Callable, device: str, measure: Callable) -> None:
    call, _ = op(device)
    measure(call)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_out(op: Callable, device: str, measure: Callable) -> None:
    call, outs = op(device)
    measure(lambda: call(**outs))


@pytest.mark.parametrize("form", ["out", "functional"])
@pytest.mark.parametrize("T", [8, 16, 128, 200])
def test_more_rows(T: int, form: str, device: str, measure: Callable) -> None:
    """Each plan of a GPU: one kernel, two (the split kernels), or one and the library's product."""
    if device == "cpu":
        pytest.skip("on a CPU the kernel would be what is measured")
    chunks, weight, gain = [rows(device, T, H) for _ in range(K)], rows(device, H, K * H), rows(device, K, H)
    out = {"out": rows(device, T, H)} if form == "out" else {}
    measure(lambda: ek.norm_concat_linear(chunks, weight, norm_weight=gain, **out))


@pytest.mark.parametrize("T", [8, 200])
def test_epilogue(T: int, device: str, measure: Callable) -> None:
    """With residuals and a post norm."""
    if device == "cpu":
        pytest.skip("on a CPU the kernel would be what is measured")
    chunks, residuals = ([rows(device, T, H) for _ in range(K)] for _ in range(2))
    weight, gain, post = rows(device, H, K * H), rows(device, K, H), rows(device, H)
    options = {"norm_weight": gain, "residuals": residuals, "post_norm_weight": post}
    measure(lambda: ek.norm_concat_linear(chunks, weight, **options))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_bias(dtype: torch.dtype, device: str, measure: Callable) -> None:
    """With the library's product: it adds a bf16 bias itself; an fp32 one is added by a kernel to unrounded sums."""
    if device == "cpu":
        pytest.skip("on a CPU the kernel would be what is measured")
    chunks, weight, gain = [rows(device, 200, H) for _ in range(K)], rows(device, H, K * H), rows(device, K, H)
    bias = rows(device, H).to(dtype)
    measure(lambda: ek.norm_concat_linear(chunks, weight, norm_weight=gain, bias=bias))


def test_quantized(device: str, measure: Callable) -> None:
    chunks, gain = [rows(device, 1, 128) for _ in range(K)], rows(device, K, 128)
    codes = torch.zeros(H, K * 128, dtype=torch.float8_e4m3fn, device=device)
    weight = ek.QuantizedWeight(codes, torch.ones(H, 1, device=device), "fp8_row")
    measure(lambda: ek.norm_concat_linear(chunks, weight, norm_weight=gain))


def test_dispatch(device: str, measure: Callable) -> None:
    hidden, residual, out = rows(device), rows(device), rows(device)
    measure(lambda: torch.ops.eagle_kernels.capture_hidden_out(hidden, residual, out, None))


@pytest.mark.parametrize("T", [1, 200])
@pytest.mark.parametrize("form", ["out", "functional"])
def test_module(form: str, T: int, device: str, measure: Callable) -> None:
    if device == "cpu" and T > 1:
        pytest.skip("on a CPU the kernel would be what is measured")
    config = ek.Eagle3Config(num_chunks=K, target_hidden_size=H, hidden_size=H, eps=1e-6, chunk_norm=True)
    layer = ek.Eagle3Projection(config, dtype=torch.bfloat16, device=device)
    chunks, options = [rows(device, T, H) for _ in range(K)], {"out": rows(device, T, H)} if form == "out" else {}
    measure(lambda: layer(chunks, **options))


@pytest.mark.parametrize("kind", [nn.Parameter, Parameter], ids=["torch", "vllm"])
def test_engine_projection(kind: type, device: str, measure: Callable) -> None:
    """On an engine's modules, whose linear layer may hold a class of parameters of the engine's own."""

    def holding(parameter: nn.Parameter) -> nn.Module:
        module = nn.Module()
        module.weight, module.bias, module.variance_epsilon = parameter, None, 1e-6
        return module.requires_grad_(False)

    norms = [holding(nn.Parameter(rows(device, H))) for _ in range(K)]
    projection = EngineProjection(holding(kind(rows(device, H, K * H))), K, chunk_norms=norms)
    packed = rows(device, 1, K * H)
    measure(lambda: projection(packed))


def test_buffer_capture(device: str, measure: Callable) -> None:
    buffer, hidden, residual = ek.AuxHiddenStates(8, K, H, device=device), rows(device), rows(device)
    measure(lambda: buffer.capture(1, hidden, residual))


def test_torch(device: str, measure: Callable) -> None:
    x, weight, out = rows(device), rows(device, H, H), rows(device)
    measure(lambda: torch.mm(x, weight.t(), out=out))


def test_plan_lookup(device: str, measure: Callable) -> None:
    stage = model_shapes()["llama3.1-8b"].stage("eagle3")
    problem = Problem("norm_concat_linear", torch.device(device), stage.K, 8, torch.bfloat16, stage.D, (stage.H,))
    measure(lambda: choose(*problem))


def test_explain(device: str, measure: Callable) -> None:
    chunks, weight = [rows(device) for _ in range(K)], rows(device, H, K * H)
    measure(lambda: ek.explain("norm_concat_linear", chunks, weight, norm="none"))
