"""Where a stage runs on the op: at the timed row counts where it was faster, and between two of these."""

import itertools
import time
import types
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from eagle_kernels.engines import decision
from eagle_kernels.engines.decision import Decision

ROWS = (1, 4, 16, 64)


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    decision.clear()
    yield
    decision.clear()


def of_speedups(*speedups: float, **more: bool) -> Decision:
    return Decision(ROWS[: len(speedups)], tuple(speedups), (1.0,) * len(speedups), **more)


@pytest.mark.parametrize(
    ("decided", "T"),
    [
        pytest.param(of_speedups(1.2, 1.2, 1.2, 1.2), range(200), id="faster-everywhere"),
        pytest.param(of_speedups(0.9, 0.9, 0.9, 0.9), [], id="slower-everywhere"),
        pytest.param(of_speedups(0.9, 1.0, 1.02, 1.0), [], id="no-more-than-noise"),
        pytest.param(of_speedups(1.2, 1.2, 1.2, 0.9), range(17), id="slower-from-64"),
        pytest.param(of_speedups(0.9, 0.9, 1.2, 1.2), range(16, 200), id="faster-from-16"),
        pytest.param(of_speedups(1.2, 0.9, 1.2, 0.9), [0, 1, 16], id="in-turns"),
        pytest.param(of_speedups(1.2, 1.0, 1.0, 1.2, everywhere=True), range(200), id="everywhere"),
        pytest.param(Decision(reason="it failed"), [], id="no-figures"),
        pytest.param(decision.FORCED, range(200), id="forced"),
    ],
)
def test_the_op_runs_between_two_row_counts_where_it_is_faster(decided: Decision, T: range | list[int]) -> None:
    assert [rows for rows in range(200) if decided.runs_op(rows)] == list(T)
    assert decided.always == (len(T) == 200) and decided.never == (len(T) == 0)


def test_figures() -> None:
    decided = Decision((1, 512), (0.00668, 0.0352), (0.00571, 0.02741), True)
    assert decided.figures("vLLM") == "T=1 5.71 ms (vLLM 6.68), T=512 27.4 ms (vLLM 35.2)"
    assert Decision(reason="it failed").figures("vLLM") == "it failed"
    assert decided.slowest == pytest.approx(0.00668 / 0.00571)


def test_what_a_call_takes_now_counts_what_runs_on_the_op() -> None:
    assert of_speedups(1.5, 0.5, 1.5, 1.5).seconds == (1.0, 0.5, 1.0, 1.0)
    assert of_speedups(1.5, 0.5, 1.5, 1.5, everywhere=True).seconds == (1.0,) * 4


@pytest.mark.parametrize(
    ("max_rows", "rows"),
    [(1, (1,)), (2, (1, 2)), (16, (1, 4, 16)), (20, (1, 4, 16, 20)), (8192, decision.ROWS)],
)
def test_rows_up_to(max_rows: int, rows: tuple[int, ...]) -> None:
    assert decision.rows_up_to(max_rows) == rows


def test_calls_are_timed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fake clock: calls of 3 and 2 seconds, the first slower by a second in every other sample."""
    now, noise = [0.0], itertools.cycle((1.0, 0.0))
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    called: list[tuple[str, int]] = []

    def call(name: str, seconds: float) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            assert x.shape[1] == 8 and x.dtype == torch.bfloat16
            called.append((name, x.shape[0]))
            now[0] += seconds + (next(noise) if name == "a" else 0)
            return x

        return run

    like = torch.empty(0, dtype=torch.bfloat16)
    assert decision.seconds_per_call([call("a", 3.0), call("b", 2.0)], (1, 4), 8, like) == [[3.0, 3.0], [2.0, 2.0]]
    # One warm-up call each, then three rounds, after which the clock is past the budget.
    assert called == [("a", 1), ("b", 1)] * 4 + [("a", 4), ("b", 4)] * 4


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16])
def test_as_many_bytes_are_read_before_a_call_whatever_the_default_dtype_is(
    monkeypatch: pytest.MonkeyPatch, default: torch.dtype
) -> None:
    """vLLM loads with the model's dtype as the default, which halved the bytes."""
    made, zeros, before = [], torch.zeros, torch.get_default_dtype()
    monkeypatch.setattr(torch, "zeros", lambda *args, **kwargs: made.append(zeros(*args, **kwargs)) or made[-1])
    torch.set_default_dtype(default)
    try:
        decision.seconds_per_call([lambda x: x], (1,), 8, torch.empty(0))
    finally:
        torch.set_default_dtype(before)
    assert [tensor.nbytes for tensor in made] == [decision.EVICTED_BYTES]


def test_timing_leaves_the_engines_random_numbers_alone() -> None:
    state = torch.get_rng_state()
    x = decision.normal_rows(4, 8, torch.empty(0, dtype=torch.float16))
    assert (x.shape, x.dtype) == ((4, 8), torch.float16) and torch.equal(state, torch.get_rng_state())


def test_a_shape_is_settled_once() -> None:
    assert [decision.once("a", lambda k=k: k) for k in range(3)] == [0, 0, 0]
    assert decision.once("b", lambda: 7) == 7

    failed: list[int] = []

    def fails() -> None:
        failed.append(1)
        raise RuntimeError("no more")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="no more"):
            decision.once("c", fails)
    assert len(failed) == 1


def test_on_a_gpu_the_kernels_of_a_call_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two events of the tensor's stream, behind writes that keep the GPU busy while the host queues it."""
    done: list[object] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: object) -> None:
            done.append(stream)

        def synchronize(self) -> None:
            done.append("waits")

        def elapsed_time(self, end: object) -> float:
            assert isinstance(end, Event) and end is not self
            return 0.25

    x, evicted = types.SimpleNamespace(device=torch.device("cuda", 1)), types.SimpleNamespace()
    evicted.zero_ = lambda: done.append("writes")
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    assert decision._seconds_of(lambda x: done.append("calls"), x, evicted) == 0.25e-3
    assert [name for name in done if name != "writes"] == ["stream of cuda:1", "calls", "stream of cuda:1", "waits"]
    assert done[: done.count("writes")] == ["writes"] * decision._PASSES
