"""Three ways to time a call: the clock on a CPU; on a GPU, replays of a CUDA graph, and eager launches.

- `clock`: one call between two readings of the clock.
- `graph`: one CUDA graph holds a call for every copy of the inputs, back to back. A sample is a replay over their
  number. This is what a decode step of an engine costs, which replays graphs too.
- `eager`: the same calls launched from Python, between two events. A sample is what limits them: the GPU, or, at small
  T, the launches. It counts for engines and prefills that run without graphs.
"""

import contextlib
from collections.abc import Sequence

import torch

from .measure import Samples, interleave, time_on_cpu
from .workloads import Variant

TIMERS = {"cpu": ("clock",), "cuda": ("graph", "eager")}

_WARM_REPLAYS = 5

# Cycles the GPU spins before a sample, about 0.1 ms: the start event and the graph are then both queued when the GPU
# gets to them, and the sample holds none of the 5 to 10 us that a graph takes to be launched.
_SPIN_CYCLES = 200_000


def time_variants(timer: str, variants: Sequence[Variant], copies: int, min_time: float) -> list[Samples]:
    """Interleave the variants for `min_time` seconds each on average; seconds per call."""
    return time_prepared(timer, [prepare(timer, variant, copies) for variant in variants], copies, min_time)


def prepare(timer: str, variant: Variant, copies: int) -> "Prepared":
    """Warm a variant up, and capture it where the timer replays; what fails here would fail in the measurement."""
    if timer == "clock":
        return variant
    return (_Graph if timer == "graph" else _Eager)(variant, copies)


def time_prepared(timer: str, prepared: Sequence["Prepared"], copies: int, min_time: float) -> list[Samples]:
    if timer == "clock":
        return interleave(prepared, copies, min_time, timer=_clock)
    samples = interleave(prepared, 1, min_time, timer=_events_after_spin if timer == "graph" else _events)
    return [Samples(tuple(seconds / copies for seconds in taken.seconds)) for taken in samples]


def _clock(variant: Variant, copy: int) -> float:
    with variant.in_force():
        return time_on_cpu(variant.call, copy)


class _Eager:
    """One call for every copy."""

    def __init__(self, variant: Variant, copies: int) -> None:
        self.variant, self.copies = variant, copies
        with variant.in_force():
            self.run()

    def run(self) -> None:
        for copy in range(self.copies):
            self.variant.call(copy)

    def in_force(self) -> contextlib.AbstractContextManager:
        return self.variant.in_force()


class _Graph:
    """The same, captured."""

    def __init__(self, variant: Variant, copies: int) -> None:
        self.graph = torch.cuda.CUDAGraph()
        with variant.in_force():
            stream = torch.cuda.Stream()  # a capture wants its warm-up on a side stream
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                # Every copy: binaries get compiled, and an address of another alignment is another binary.
                for copy in range(copies):
                    variant.call(copy)
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(self.graph):
                for copy in range(copies):
                    variant.call(copy)
        for _ in range(_WARM_REPLAYS):
            self.graph.replay()
        torch.cuda.synchronize()

    def run(self) -> None:
        self.graph.replay()

    def in_force(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()


Prepared = Variant | _Eager | _Graph


def _events(all_copies: _Eager | _Graph, _: int, spin: int = 0) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with all_copies.in_force():
        torch.cuda.synchronize()
        if spin:
            torch.cuda._sleep(spin)
        start.record()
        all_copies.run()
        end.record()
        end.synchronize()
    return start.elapsed_time(end) * 1e-3


def _events_after_spin(all_copies: _Eager | _Graph, _: int) -> float:
    return _events(all_copies, 0, _SPIN_CYCLES)
