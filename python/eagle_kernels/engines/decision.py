"""Whether a hooked stage runs on our op: only at the row counts where that is faster than what the engine runs there.

Both are timed with the real layer when it is loaded, once per shape and process, on a CPU and on a GPU. `FORCED` skips
that (EAGLE_KERNELS_VLLM=force, EAGLE_KERNELS_SGLANG=force).
"""

import bisect
import copy
import math
import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

Call = Callable[[Tensor], Tensor]

# A row count between two of these runs on the op if it is faster at both, as plans change in between (`plan`).
ROWS = (1, 4, 16, 64, 256, 512, 1024)
# Medians of two runs of one call differ by up to 5 % on a shared machine: a smaller gain may be none.
MARGIN = 0.05
# Seconds per row count, min and max rounds. 0.12 s gave three or four rounds of calls that take 6 ms, too few: at 16
# rows and H=4096 the op was rejected, though 1.22x as fast as vLLM's path, 1.1x as norm_concat in front of vLLM's fc.
_SECONDS, _MIN_ROUNDS, _MAX_ROUNDS = 0.4, 3, 12
# Read before each timed call to evict the stage's weight from all caches, as an engine does by reading its target's
# weights. After 64 MB a shared L3 of 480 MB still had a weight of 25 MB (28 GB/s per core; after 256 MB 15, as memory).
EVICTED_BYTES = 256 << 20
# On a GPU they are read so often before a call, 1 ms on an H200 (estimate): the host queues the call meanwhile, and
# what is timed are its kernels, as in a CUDA graph. Where a stage runs eagerly, one launch saves more than that. A host
# that takes longer is given up to so many passes.
_PASSES, _MAX_PASSES = 16, 256


@dataclass(frozen=True)
class Decision:
    """The row counts at which the op runs.

    rows: where both were timed, ascending.  engine, ours: seconds of a call at each.
    everywhere: the op runs at all row counts, whatever was timed.
    reason: why, where there are no times.
    """

    rows: tuple[int, ...] = ()
    engine: tuple[float, ...] = ()
    ours: tuple[float, ...] = ()
    everywhere: bool = False
    reason: str = ""

    @cached_property
    def _faster(self) -> tuple[bool, ...]:
        return tuple(ours < engine * (1 - MARGIN) for engine, ours in zip(self.engine, self.ours, strict=True))

    @cached_property
    def always(self) -> bool:
        return self.everywhere or (bool(self.rows) and all(self._faster))

    @cached_property
    def never(self) -> bool:
        return not (self.everywhere or any(self._faster))

    @property
    def slowest(self) -> float:
        """The smallest ratio of the engine's time to ours."""
        return min(theirs / ours for theirs, ours in zip(self.engine, self.ours, strict=True))

    @property
    def seconds(self) -> tuple[float, ...]:
        """Seconds of a call under this decision, at each row count."""
        timed = zip(self.rows, self.engine, self.ours, strict=True)
        return tuple(ours if self.runs_op(T) else theirs for T, theirs, ours in timed)

    def runs_op(self, T: int) -> bool:
        """Whether a call of T rows runs on the op."""
        if self.always or self.never:
            return self.always
        k = bisect.bisect_left(self.rows, T)
        if k == len(self.rows):
            return self._faster[-1]
        return self._faster[k] and (k == 0 or self.rows[k] == T or self._faster[k - 1])

    def figures(self, engine: str) -> str:
        """The times for a log line: "T=1 5.71 ms (vLLM 6.68), T=4 5.73 ms (vLLM 6.71)"."""
        timed = zip(self.rows, self.ours, self.engine, strict=True)
        return ", ".join(f"T={T} {_ms(ours)} ms ({engine} {_ms(theirs)})" for T, ours, theirs in timed) or self.reason


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}"


FORCED = Decision(everywhere=True, reason="forced, not timed")


def rows_up_to(max_rows: int) -> tuple[int, ...]:
    """The row counts at which to time a stage that is called with at most `max_rows`."""
    last = min(max_rows, ROWS[-1])
    return (*ROWS[: bisect.bisect_left(ROWS, last)], last)


@torch.inference_mode()
def seconds_per_call(calls: Sequence[Call], rows: Sequence[int], width: int, like: Tensor) -> list[list[float]]:
    """The median seconds of each call at each row count, for inputs [T, width] of the dtype and device of `like`.

    The calls take turns, so that a noisy neighbor slows all of them. With a weight of 25 MB the fastest call may be one
    that found it in a cache: by minima, norm_concat and vLLM's product won with 1.5 times the median of 12 bits.
    """
    clock = _Clock(like.device) if like.device.type == "cpu" else _GpuClock(like.device)
    seconds: list[list[float]] = [[] for _ in calls]
    for T in rows:
        x = normal_rows(T, width, like)
        for call in calls:
            call(x)
        samples: list[list[float]] = [[] for _ in calls]
        start = time.perf_counter()
        for done in range(_MAX_ROUNDS):
            if done >= _MIN_ROUNDS and time.perf_counter() - start > _SECONDS:
                break
            for call, of_call in zip(calls, samples, strict=True):
                of_call.append(clock.seconds(call, x))
        for of_call, of_rows in zip(samples, seconds, strict=True):
            of_rows.append(statistics.median(of_call))
    return seconds


class _Clock:
    """Times a call whose weight is in no cache."""

    def __init__(self, device: torch.device) -> None:
        # vLLM loads with the model's dtype as the default.
        self._evicted = torch.zeros(EVICTED_BYTES // 4, dtype=torch.float32, device=device)

    def seconds(self, call: Call, x: Tensor) -> float:
        self._evicted.sum()
        begin = time.perf_counter()
        call(x)
        return time.perf_counter() - begin


class _GpuClock(_Clock):
    """Times the kernels of a call: the GPU is kept busy until the host has queued all of them."""

    _passes = _PASSES

    def seconds(self, call: Call, x: Tensor) -> float:
        stream = torch.cuda.current_stream(x.device)
        while True:
            for _ in range(self._passes):
                self._evicted.sum()
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record(stream)
            call(x)
            ended.record(stream)
            is_late = begun.query()  # the GPU had to wait for the host
            ended.synchronize()
            if not is_late or self._passes >= _MAX_PASSES:
                return 1e-3 * begun.elapsed_time(ended)
            self._passes *= 2


def agreed_seconds(
    measure: Callable[[], list[list[float]]], calls: int, rows: int, group: ProcessGroup | None
) -> list[list[float]]:
    """The seconds of `calls` calls at each of `rows` row counts, the engine's call first: over all ranks of a CPU group
    the engine's fastest and our slowest. Ranks that decided separately could round a replicated layer in two ways.

    A rank whose measurement fails joins the all-reduce, for which the others wait, before it raises.
    """
    failure = None
    try:
        seconds = measure()
    except Exception as caught:  # whatever an engine's module raises; raised again below, once the other ranks know
        failure, seconds = caught, [[0.0] * rows] + [[math.inf] * rows] * (calls - 1)
    if group is not None:
        # The default device is `meta` in vLLM's `ipc_cache` loader.
        ours_negated = torch.tensor(seconds, dtype=torch.float64, device="cpu")
        ours_negated[1:].neg_()
        torch.distributed.all_reduce(ours_negated, op=torch.distributed.ReduceOp.MIN, group=group)
        ours_negated[1:].neg_()
        seconds = ours_negated.tolist()
    try:
        if failure is not None:
            raise failure
    finally:
        failure = None  # whose frames have this one in them, and what was evicted
    return seconds


def timed(
    key: tuple,
    calls: Sequence[Call],
    rows: Sequence[int],
    width: int,
    like: Tensor,
    check: Callable[[], None],
    agree: Callable[[Callable[[], list[list[float]]], int, int], list[list[float]]],
) -> list[tuple[float, ...]]:
    """The seconds of each call at each row count, the engine's first: timed once per process, agreed over all ranks.

    Args:
        key: what the times depend on beside the arguments and the number of threads.
        rows, width, like: as in `seconds_per_call`.
        check: compares what is timed with the engine before; it raises where the results differ.
        agree: `agreed_seconds` over the engine's group.
    """

    def measure() -> list[list[float]]:
        check()
        return seconds_per_call(calls, rows, width, like)

    of_call = (width, tuple(rows), like.dtype, like.device, torch.get_num_threads())
    seconds: Any = once((*key, *of_call), lambda: agree(measure, len(calls), len(rows)))
    return list(map(tuple, seconds))


def normal_rows(T: int, width: int, like: Tensor) -> Tensor:
    """[T, width] of normal values, which leave the engine's random state as it is."""
    generator = torch.Generator(like.device).manual_seed(0)
    return torch.randn(T, width, generator=generator, dtype=like.dtype, device=like.device)


_settled: dict[Hashable, object] = {}


def once(key: Hashable, settle: Callable[[], object]) -> object:
    """What `settle()` returned or raised for this key the first time: drafters of one shape and reloaded weights are
    not timed again, not even by a rank where that failed, as the others would not join it."""
    if key not in _settled:
        try:
            _settled[key] = settle()
        except Exception as failure:  # whatever `settle` raises, which the caller handles
            _settled[key] = _without_frames(failure)
            raise
    settled = _settled[key]
    if isinstance(settled, Exception):
        raise _without_frames(settled)
    return settled


def _without_frames(failure: Exception) -> Exception:
    """A copy for keeping: the frames of a failure hold the drafter and the memory that was evicted."""
    try:
        return copy.copy(failure)
    except TypeError:  # of a class that takes other arguments than it keeps
        return RuntimeError(repr(failure))


def clear() -> None:
    """Time everything anew; for tests."""
    _settled.clear()
