"""Where a stage runs on the op: at the timed row counts where it was faster, and between two of these."""

import contextlib
import functools
import gc
import itertools
import time
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import gloo_ranks as ranks
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


def test_those_bytes_are_read_in_front_of_every_call() -> None:
    clock, order = decision._Clock(torch.device("cpu")), []
    clock._evicted = types.SimpleNamespace(sum=lambda: order.append("evicts"))
    for _ in range(2):
        clock.seconds(lambda x: order.append("calls"), torch.empty(0))
    assert order == ["evicts", "calls"] * 2


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


def test_a_stage_is_timed_once_by_what_its_times_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever key a caller gives: other rows, another width, dtype or number of threads are timed anew."""
    done: list[str] = []

    def seconds_per_call(calls: list, rows: tuple, width: int, like: torch.Tensor) -> list[list[float]]:
        done.append("timed")
        return [[float(len(rows))] * len(rows) for _ in calls]

    monkeypatch.setattr(decision, "seconds_per_call", seconds_per_call)
    agree = functools.partial(decision.agreed_seconds, group=None)
    like = torch.empty(0)

    def timed(rows: tuple = (1, 4), width: int = 8, like: torch.Tensor = like) -> list:
        return decision.timed(("e",), [None, None], rows, width, like, lambda: done.append("checked"), agree)

    assert timed() == timed() == [(2.0, 2.0), (2.0, 2.0)]
    assert done == ["checked", "timed"]
    timed(rows=(1, 2))
    timed(width=9)
    timed(like=like.half())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    timed()
    assert done == ["checked", "timed"] * 5


def test_ranks_agree_on_seconds_whatever_the_default_device_is(tmp_path: Path) -> None:
    """On the engine's fastest and our slowest. The default is `meta` in vLLM's `ipc_cache` loader, where the all-reduce
    raised NotImplementedError."""
    store = str(tmp_path / "store")
    torch.multiprocessing.spawn(ranks.agree_on_seconds, args=(2, store), nprocs=2)
    assert [torch.load(f"{store}.{rank}") for rank in range(2)] == [[[2.0, 4.0], [1.0, 6.0]]] * 2


def test_a_failure_is_kept_without_what_its_frames_hold() -> None:
    """256 MB, and the drafter."""

    class Drafter:
        pass

    def fails() -> None:
        held = Drafter()
        alive.append(weakref.ref(held))
        raise RuntimeError("no memory")

    alive: list[weakref.ref] = []
    gc.disable()  # at once, and not when garbage is collected
    try:
        for _ in range(2):
            with contextlib.suppress(RuntimeError):
                decision.once("d", lambda: decision.agreed_seconds(fails, 2, 1, None))
                pytest.fail("it did not raise")
        assert [held() for held in alive] == [None]
    finally:
        gc.enable()


class Event:
    """Of a GPU that is late for the first calls: it is through with what it had to do before they are queued."""

    done: ClassVar[list[object]] = []
    late = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object) -> None:
        Event.done.append(stream)

    def query(self) -> bool:
        Event.late -= 1
        return Event.late >= 0

    def synchronize(self) -> None:
        Event.done.append("waits")

    def elapsed_time(self, end: object) -> float:
        assert isinstance(end, Event) and end is not self
        return 0.25


@pytest.mark.parametrize(("late", "passes"), [(0, [16]), (2, [16, 32, 64]), (9, [16, 32, 64, 128, 256])])
def test_on_a_gpu_the_kernels_of_a_call_are_timed(
    monkeypatch: pytest.MonkeyPatch, late: int, passes: list[int]
) -> None:
    """Between two events of the tensor's stream, behind reads that keep the GPU busy while the host queues it."""
    monkeypatch.setattr(Event, "late", late)
    monkeypatch.setattr(Event, "done", done := [])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    clock = decision._GpuClock(torch.device("cpu"))
    clock._evicted = types.SimpleNamespace(sum=lambda: done.append("reads"))
    x = types.SimpleNamespace(device=torch.device("cuda", 1))
    for rounds in (passes, passes[-1:]):  # a later call needs no more tries
        done.clear()
        assert clock.seconds(lambda x: done.append("calls"), x) == 0.25e-3
        queued = ["stream of cuda:1", "calls", "stream of cuda:1", "waits"]
        assert done == [each for count in rounds for each in ["reads"] * count + queued]
