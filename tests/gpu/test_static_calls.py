"""What an engine needs of every op on a GPU: graphs, no allocation, no sync, its own stream, the same bits always."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import eagle_kernels as ek
from gpu.calls import CALLS, H, K, StaticCall
from guards import same_bits

pytestmark = pytest.mark.usefixtures("gpu_backend")


@pytest.fixture(params=CALLS)
def make(request: pytest.FixtureRequest) -> Callable[[int], StaticCall]:
    return CALLS[request.param]


def assert_same(a: list[Tensor], b: list[Tensor], rows: int | None = None) -> None:
    for one, other in zip(a, b, strict=True):
        assert same_bits(one[:rows], other[:rows])


def captured(call: StaticCall) -> torch.cuda.CUDAGraph:
    call.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.run()
    return graph


@pytest.mark.parametrize("T", [1, 5, 17, 300])
def test_a_graph_replays_with_new_contents_and_poisoned_padding(make: Callable, T: int) -> None:
    call = make(T)
    graph = captured(call)
    for seed in range(3):
        real = max(1, T - 2 * seed)
        call.refill(seed, poisoned_from=real)
        call.poison()
        graph.replay()
        replayed = call.results()
        call.poison()
        call.run()
        assert_same(replayed, call.results())

        alone = make(real)
        for weight, same in zip(alone.weights, call.weights, strict=True):
            weight.copy_(same)
        for rows, same in zip(alone.inputs, call.inputs, strict=True):
            rows.copy_(same[:real])
        alone.run()
        assert_same(replayed, alone.results(), real)
        assert all(rows[:real].isfinite().all() for rows in replayed)


@pytest.mark.parametrize("gpu_backend", ["triton"], indirect=True)
def test_a_capture_without_a_binary_raises_and_writes_nothing(make: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    from eagle_kernels.triton_kernels import launch

    call = make(3)
    call.run()
    call.poison()
    monkeypatch.setattr(launch, "_binaries", {})
    launch.forget_prepared()
    with pytest.raises(RuntimeError, match=r"eagle_kernels\.warmup"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        call.run()
    torch.cuda.synchronize()
    assert all(rows.isnan().all() for rows in call.results())


@pytest.mark.parametrize("T", [1, 300])
def test_no_allocation_and_no_sync(make: Callable, T: int) -> None:
    call = make(T)
    call.run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        call.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.parametrize("T", [1, 300])
def test_the_launches_it_promises(make: Callable, T: int) -> None:
    call = make(T)
    call.run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call.run()
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == call.launches, kernels


def test_it_runs_on_the_current_stream(make: Callable) -> None:
    """The inputs are written late on a side stream; a launch on the default stream would read them too early."""
    call = make(17)
    call.refill(1)
    call.run()
    expected = call.results()
    call.refill(2)
    call.poison()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # 25 ms or more
        call.refill(1)
        call.run()
    stream.synchronize()
    assert_same(call.results(), expected)


@pytest.mark.parametrize("T", [1, 17, 129, 4096])
def test_the_same_bits_every_time(make: Callable, T: int) -> None:
    call = make(T)
    call.refill(7)
    call.run()
    first = call.results()
    for _ in range(5):
        call.poison()
        call.run()
        assert_same(first, call.results())


def test_a_rows_bits_do_not_depend_on_T(make: Callable) -> None:
    call = make(300)
    call.refill(7)
    call.run()
    every_row = call.results()
    for T in (1, 2, 15, 16, 17, 128, 129, 299):
        fewer = make(T)
        for pair in (zip(fewer.weights, call.weights, strict=True), zip(fewer.inputs, call.inputs, strict=True)):
            for target, source in pair:
                target.copy_(source[: len(target)])
        fewer.run()
        assert_same(fewer.results(), every_row, T)


def test_a_chain_of_dependent_launches_in_a_graph() -> None:
    """Each op reads what the one before it just wrote: programmatic dependent launch must wait for it."""
    T = 64
    source = torch.randn(T, H, device="cuda").bfloat16()
    weight = torch.rand(H, device="cuda") + 0.5
    buffer = ek.AuxHiddenStates(T, K, H, device="cuda")
    normed, total = torch.empty_like(source), torch.empty_like(source)
    out = torch.empty(T, K * H, dtype=source.dtype, device="cuda")

    def chain() -> None:
        ek.add_rms_norm(source, source, weight, out=normed, out_sum=total)
        for _ in range(10):
            for k, hidden in enumerate((normed, total, source)):
                buffer.capture(k, hidden, normed)
            ek.norm_concat(buffer.packed(T), num_chunks=K, sum_squares=buffer.row_sum_squares(T), out=out)
            ek.add_rms_norm(out[:, :H], out[:, 2 * H :], weight, out=normed, out_sum=total)

    chain()
    torch.cuda.synchronize()
    expected = [rows.clone() for rows in (normed, total, out)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for _ in range(20):
        for rows in (normed, total, out, buffer.buffer, buffer.sum_squares):
            rows.fill_(float("nan"))
        graph.replay()
        assert_same([normed, total, out], expected)
