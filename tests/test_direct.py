"""The short way of a call with `out=`: taken by plain calls, left by all others, and the same bits as the long one."""

from collections.abc import Callable

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import eagle_kernels as ek
from backends import environment_of, needs_compiled

T, K, H, D, V = 3, 2, 48, 40, 12
SHARD = ek.VocabShard.build(V, tp_rank=0, tp_size=1)


class Dispatched(TorchDispatchMode):
    """The names of the ops of both namespaces that the dispatcher sees first."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace.startswith("eagle_kernels"):
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def projection(out: torch.Tensor | None, **changes: object) -> object:
    arguments = {"norm_weight": rows(K, H), "eps": (1e-6, 1e-5), "residuals": (None, rows(T, H))} | changes
    return ek.norm_concat_linear([rows(T, H), rows(T, H)], rows(D, K * H), out=out, **arguments)


def concat(out: torch.Tensor | None, **changes: object) -> object:
    arguments = {"norm": "concat", "norm_weight": rows(K * H), "indices": torch.tensor([2, -1, 0])} | changes
    return ek.norm_concat(rows(T, K * H), num_chunks=K, out=out, **arguments)


def embedding(out: torch.Tensor | None) -> object:
    return ek.vocab_parallel_embedding(torch.tensor([3, 11, 99]), rows(V, H), SHARD, scale=1.5, out=out)


def sum_and_norm(out: torch.Tensor | None) -> object:
    return ek.add_rms_norm(rows(T, H), rows(T, H + 1)[:, 1:], rows(H), out=out, out_sum=torch.empty(T, H).bfloat16())[0]


def capture(out: torch.Tensor) -> object:
    return ek.capture_hidden(rows(T, H), rows(T, H + 1)[:, 1:], out=out)


CALLS = {
    "norm_concat_linear": (projection, D),
    "norm_concat": (concat, K * H),
    "vocab_parallel_embedding": (embedding, H),
    "add_rms_norm": (sum_and_norm, H),
    "capture_hidden": (capture, H),
}


def dispatched(call: Callable, out: torch.Tensor) -> list[str]:
    with Dispatched() as seen:
        call(out)
    return [name for name in seen.names if not name.endswith("set_cpu_isa")]


@needs_compiled
@pytest.mark.parametrize("op", CALLS)
def test_a_plain_call_is_one_primitive(op: str) -> None:
    call, columns = CALLS[op]
    assert dispatched(call, torch.empty(T, columns).bfloat16()) == [f"eagle_kernels_C::{op}_out"]


@needs_compiled
@pytest.mark.parametrize("op", CALLS)
def test_both_ways_give_the_same_bits(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, columns = CALLS[op]
    short, long = (torch.full((T, columns), torch.nan).bfloat16() for _ in range(2))
    call(short)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert dispatched(call, long)[0] == f"eagle_kernels::{op}_out"
    assert not short.isnan().any()
    assert torch.equal(short, long)


@needs_compiled
@pytest.mark.parametrize("op", CALLS)
def test_a_forced_backend_is_obeyed(op: str) -> None:
    call, columns = CALLS[op]
    with environment_of(EAGLE_KERNELS_BACKEND="reference"):
        assert f"eagle_kernels_C::{op}_out" not in dispatched(call, torch.empty(T, columns).bfloat16())


@needs_compiled
def test_what_the_short_way_cannot_say_goes_the_long_one() -> None:
    post_norm = {"post_norm_weight": rows(D), "eps": (1e-6, 1e-6, 1e-2)}
    out = torch.empty(T, D).bfloat16()
    assert dispatched(lambda out: projection(out, **post_norm), out)[0] == "eagle_kernels::norm_concat_linear_out"
    assert torch.equal(out, projection(None, **post_norm))


@needs_compiled
@pytest.mark.parametrize("gain", [pytest.param(rows(K * H), id="flat"), pytest.param(rows(1, K * H), id="one-row")])
def test_a_gain_in_another_norms_form_raises(gain: torch.Tensor) -> None:
    out = torch.full((T, K * H), torch.nan).bfloat16()
    with pytest.raises(
        ValueError, match=r"norm_concat: norm_weight has shape \(.*96,?\), expected \(K, H\) = \(2, 48\)"
    ):
        concat(out, norm="chunk", norm_weight=gain)
    assert out.isnan().all()
