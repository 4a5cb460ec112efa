"""The projection on an engine's own modules: with parameters of any class, and after a change of their memory."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accuracy import relative_rms
from eagle_kernels.engines import row_parallel
from eagle_kernels.engines.projection import EngineProjection
from eagle_kernels.ops.sources import Sources, formula
from engines.watched_parameter import Parameter

K, H, D, T = 3, 48, 40, 5


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = Parameter(torch.randn(D, K * H).bfloat16()), Parameter(torch.randn(D).bfloat16())


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = Parameter((1 + torch.randn(H) / 8).bfloat16()), 1e-5


def truth(projection: EngineProjection, chunks: list[Tensor]) -> Tensor:
    gains = [norm.weight.data for norm in projection.chunk_norms]
    x = formula(Sources(chunks, K, "chunk", gains, [1e-5], 0.0, [], [], None), torch.float64)
    return x @ projection.fc.weight.data.double().t() + projection.fc.bias.data.double()


@pytest.mark.parametrize("packed", [False, True])
def test_a_norm_of_the_concat_runs_before_those_of_the_chunks(packed: bool) -> None:
    """Against float64; a gain of mixed signs shows which norm came first."""
    whole = Norm()
    whole.weight = Parameter(torch.randn(K * H).bfloat16())
    projection = EngineProjection(Linear(), K, concat_norm=whole, chunk_norms=[Norm() for _ in range(K)])
    x = (torch.randn(T, K, H) * torch.tensor([1.0, 10.0, 0.1]).view(1, K, 1)).bfloat16().flatten(1)
    first = Sources([x], 1, "concat", [whole.weight.data], [1e-5], 0.0, [], [], None)
    expected = truth(projection, list(formula(first, torch.float64).split(H, 1)))
    with torch.inference_mode():
        got = projection.forward(x if packed else list(x.split(H, 1)))
    assert projection.kind == f"K={K}, concat then chunk norm"
    assert relative_rms(got, expected) < 6e-3


def test_an_fc_that_the_ops_cannot_read_is_called_behind_the_norms() -> None:
    linear, seen = Linear(), []

    def fc(x: Tensor) -> Tensor:
        seen.append(x)
        return nn.functional.linear(x, linear.weight.data, linear.bias.data)

    norms = [Norm() for _ in range(K)]
    projection = EngineProjection(fc, K, chunk_norms=norms, post_norm=torch.neg, fc_unsupported="it is in codes")
    chunks = [torch.randn(T, H).bfloat16() for _ in range(K)]
    with torch.inference_mode():
        got = projection.forward(chunks)
    gains = [norm.weight.data for norm in norms]
    normed = formula(Sources(chunks, K, "chunk", gains, [1e-5], 0.0, [], [], None), torch.float64)
    assert projection.op == "norm_concat" and relative_rms(seen[0], normed) < 3e-3
    assert torch.equal(got, -nn.functional.linear(seen[0], linear.weight.data, linear.bias.data))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("rank", ["one", "of ranks"])
def test_parameters_of_an_engine_are_plain_tensors_to_the_ops(mode: Any, rank: str) -> None:
    projection = EngineProjection(Linear(), K, chunk_norms=[Norm() for _ in range(K)])
    if rank == "of ranks":
        fields = {name: getattr(projection, name) for name in EngineProjection.__dataclass_fields__}
        projection = row_parallel.RowParallelProjection(**fields)
    with mode():
        chunks = [torch.randn(T, H).bfloat16() for _ in range(K)]
        Parameter.seen.clear()
        got = projection.forward(chunks)
        asked = list(Parameter.seen)
    assert asked == []
    assert relative_rms(got, truth(projection, chunks)) < 3e-3


class Forwarding(nn.Parameter):
    """Like vLLM's: its `__torch_function__` has no side effects, since one with side effects is in no graph."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_a_compiled_model_reads_them_in_one_graph(mode: Any) -> None:
    linear, norms = Linear(), [Norm() for _ in range(K)]
    for module in (linear, *norms):
        for name, parameter in list(module.named_parameters()):
            setattr(module, name, Forwarding(parameter.data, requires_grad=False))
    projection = EngineProjection(linear, K, chunk_norms=norms)
    chunks = [torch.randn(T, H).bfloat16() for _ in range(K)]
    with mode():
        torch._dynamo.reset()
        compiled = torch.compile(lambda: projection(chunks), fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(), projection(chunks))
        linear.weight.data.mul_(2)
        assert torch.equal(compiled(), projection(chunks))


@pytest.mark.parametrize(("num_chunks", "expected"), [(K, f"K={K}"), (None, "K >= 1")])
def test_no_chunks_are_an_error(num_chunks: int | None, expected: str) -> None:
    message = f"^norm_concat_linear: chunks has 0 entries, expected {expected}$"
    with pytest.raises(ValueError, match=message):
        EngineProjection(Linear(), num_chunks).forward([])


def test_memory_that_a_parameter_got_later_is_read() -> None:
    projection = EngineProjection(Linear(), K, chunk_norms=[Norm() for _ in range(K)])
    chunks = [torch.randn(T, H).bfloat16() for _ in range(K)]
    for change in ("none", "data", "in place", "parameter"):
        weight = torch.randn(D, K * H).bfloat16()
        if change == "data":
            projection.fc.weight.data = weight
        elif change == "in place":
            projection.fc.weight.data.copy_(weight)
        elif change == "parameter":
            projection.fc.weight = nn.Parameter(weight, requires_grad=False)
        with torch.inference_mode():
            got = projection.forward(chunks)
        assert relative_rms(got, truth(projection, chunks)) < 3e-3, change
