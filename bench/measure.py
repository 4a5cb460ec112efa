"""Time variants against each other, and say how sure the difference is.

Variants run round-robin, one call each per round, so that a neighbour, a clock change or a thermal limit hits all of
them alike; timed one after the other they drift apart by more than the differences that matter. Medians are reported,
and minima beside them: on a shared machine the median is what one gets, the minimum what the code can do.
"""

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

Call = Callable[[int], object]  # runs a variant on the copy of the inputs with this number
Timed = TypeVar("Timed")  # whatever the timer knows how to run

_MIN_ROUNDS = 7  # the 95 % interval of a median needs six samples


@dataclass(frozen=True)
class Samples:
    """Seconds per call, in the order of the rounds."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def minimum(self) -> float:
        return min(self.seconds)

    def quantile(self, fraction: float) -> float:
        """The sample at this fraction of the sorted ones (nearest rank)."""
        return sorted(self.seconds)[min(int(fraction * len(self.seconds)), len(self.seconds) - 1)]


@dataclass(frozen=True)
class Ratio:
    """How many times longer one variant takes: ratio of medians, and the 95 % interval of the paired ratios."""

    value: float
    low: float
    high: float

    def is_more_than(self, factor: float) -> bool:
        """Whether the noise leaves no doubt."""
        return self.low > factor


def time_on_cpu(call: Call, copy: int) -> float:
    """Seconds of one call."""
    start = time.perf_counter_ns()
    call(copy)
    return (time.perf_counter_ns() - start) * 1e-9


def interleave(
    calls: Sequence[Timed], copies: int, min_time: float, timer: Callable[[Timed, int], float] = time_on_cpu
) -> list[Samples]:
    """Time the calls round-robin until each had `min_time` seconds on average.

    Every call takes the next copy of the inputs: a copy comes back only after all others were used, by whichever
    variant, so none finds what the one before it left in the cache. Odd rounds run backwards, so no variant always
    follows the same one.
    """
    seconds: list[list[float]] = [[] for _ in calls]
    total, rounds, copy = 0.0, 0, 0
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()  # a collection inside a call would be counted as the call's
    try:
        while rounds < _MIN_ROUNDS or total < min_time * len(calls):
            order = range(len(calls)) if rounds % 2 == 0 else reversed(range(len(calls)))
            for variant in order:
                elapsed = timer(calls[variant], copy % copies)
                seconds[variant].append(elapsed)
                total += elapsed
                copy += 1
            rounds += 1
    finally:
        if was_enabled:
            gc.enable()
    return [Samples(tuple(samples)) for samples in seconds]


def ratio(numerator: Samples, denominator: Samples) -> Ratio:
    """median(numerator) / median(denominator), with the interval from the ratios of calls of the same round.

    The interval is that of the median by order statistics: ranks n/2 -+ 0.98 * sqrt(n), which holds for any
    distribution. What slows a whole round down leaves its ratio alone.
    """
    pairs = zip(numerator.seconds, denominator.seconds, strict=True)
    ratios = sorted(above / below for above, below in pairs)
    reach = 0.98 * math.sqrt(len(ratios))
    low = max(math.floor(len(ratios) / 2 - reach), 0)
    high = min(math.ceil(len(ratios) / 2 + reach), len(ratios) - 1)
    return Ratio(numerator.median / denominator.median, ratios[low], ratios[high])


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
