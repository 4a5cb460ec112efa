"""Time variants against each other: how many copies of their inputs, which clock, in which order, how sure.

Variants run round-robin, one call each per round, so that a neighbor, a clock change or a thermal limit hits all of
them alike; timed one after the other they drift apart by more than the differences that matter. Medians are reported,
and minima beside them: on a shared machine the median is what one gets, the minimum what the code can do.

- `clock`: one call between two readings of the clock (CPU).
- `graph`: one CUDA graph holds a call for every copy of the inputs, back to back. A sample is the time of a replay over
  the number of copies. This is what a decode step of an engine costs, which replays graphs too.
- `spaced`: the graph with a kernel of torch's after every call, less the time of those kernels alone. Torch's kernel
  does not let the next one start early, so that a call shows its launch gap and its prologue, which calls back to back
  hide.
- `eager`: the same calls launched from Python, between two events. The GPU or, at small T, the launches limit a sample.
  It matters for engines and prefills that run without graphs.

Every call takes the next copy of its inputs, so that it finds them outside the caches: an engine runs the rest of the
model between two calls. With one copy of a 100 MB weight a server CPU reads it from its last-level cache, and reports a
bandwidth that no engine will see.
"""

import contextlib
import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from eagle_kernels import library, plan

Call = Callable[[int], Any]  # runs a variant on the copy of the inputs with this number

# How the package is called: the public op with out=, the layer over it, the layer with its weight in oneDNN's layout;
# where the op reads codes, also the op on their dequantized weight.
FORMS = ("op", "layer", "prepacked", "dense")

TIMERS = {"cpu": ("clock",), "cuda": ("graph", "eager", "spaced")}
DEFAULT_TIMERS = {"cpu": ("clock",), "cuda": ("graph", "eager")}

_MIN_ROUNDS = 7  # the 95 % interval of a median needs six samples
_BESIDE_EVERY = 0.1
_WARM_REPLAYS = 5
_SPACE_REPLAYS = 15

# Cycles the GPU spins before a sample, about 0.1 ms: the start event and the graph are then both queued when the GPU
# gets to them, and the sample holds none of the 5 to 10 us that a graph takes to be launched.
_SPIN_CYCLES = 200_000


def is_ours(name: str) -> bool:
    """Whether a column of this name runs the package: "op", or "op:triton" on a backend of the user's choice."""
    return name.partition(":")[0] in FORMS


@dataclass(frozen=True)
class Variant:
    """One column: the call of the op or a baseline, on how many copies it works, and the context of each call."""

    name: str
    call: Call
    copies: int
    active: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext


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
        """Whether the whole interval is above `factor`."""
        return self.low > factor


def time_on_cpu(call: Call, copy: int) -> float:
    """Seconds of one call."""
    start = time.perf_counter_ns()
    call(copy)
    return (time.perf_counter_ns() - start) * 1e-9


def interleave(
    calls: Sequence[Any],
    copies: int,
    min_time: float,
    timer: Callable[[Any, int], float] = time_on_cpu,
    beside: Sequence[Any] = (),
) -> list[Samples]:
    """Time the calls, whatever the timer knows how to run, round-robin until each had `min_time` seconds on average.

    Every call takes the next copy of the inputs: a copy comes back only after all others were used, by whichever
    variant, so none finds what the one before it left in the cache. Odd rounds run backwards, so no variant always
    follows the same one.

    What is timed `beside` them runs once in every 100 ms of theirs: often enough to see the same machine, and so rarely
    that the median of a short call is not that of a call whose caches were just emptied. Its samples come last.
    """
    seconds: list[list[float]] = [[] for _ in (*calls, *beside)]
    total, rounds, copy, since = 0.0, 0, 0, math.inf
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()  # a collection inside a call would be counted as the call's
    try:
        while rounds < _MIN_ROUNDS or total < min_time * len(calls):
            if since > _BESIDE_EVERY or rounds < _MIN_ROUNDS:
                since = 0.0
                for number, call in enumerate(beside, len(calls)):
                    seconds[number].append(timer(call, 0))
            order = range(len(calls)) if rounds % 2 == 0 else reversed(range(len(calls)))
            for variant in order:
                elapsed = timer(calls[variant], copy % copies)
                seconds[variant].append(elapsed)
                total += elapsed
                since += elapsed
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


def time_variants(timer: str, variants: Sequence[Variant], copies: int, min_time: float) -> list[Samples]:
    """Interleave the variants for `min_time` seconds each on average; seconds per call."""
    return time_prepared(timer, [prepare(timer, variant, copies) for variant in variants], copies, min_time)


def prepare(timer: str, variant: Variant, copies: int) -> "Prepared":
    """Warm a variant up, and capture it where the timer replays; what fails here would fail in the measurement."""
    if timer == "clock":
        return variant
    if timer == "eager":
        return _Eager(variant, copies)
    return _Graph(variant, copies) if timer == "graph" else _SpacedGraph(variant, copies)


def time_prepared(
    timer: str, prepared: Sequence["Prepared"], copies: int, min_time: float, beside: Sequence[Variant] = ()
) -> list[Samples]:
    """Samples of the prepared variants, then, on a CPU, of those beside them."""
    if timer == "clock":
        return interleave(prepared, copies, min_time, _clock, beside)
    samples = interleave(prepared, 1, min_time, timer=_events if timer == "eager" else _events_after_spin)
    return [Samples(tuple(seconds / copies for seconds in taken.seconds)) for taken in samples]


def _clock(variant: Variant, copy: int) -> float:
    with variant.active():
        return time_on_cpu(variant.call, copy)


class _Eager:
    """One call for every copy."""

    def __init__(self, variant: Variant, copies: int) -> None:
        self.variant, self.copies = variant, copies
        with variant.active():
            self.run()

    def run(self) -> None:
        for copy in range(self.copies):
            self.variant.call(copy)

    def active(self) -> contextlib.AbstractContextManager:
        return self.variant.active()


class _Graph:
    """The same, captured."""

    idle_seconds = 0.0  # the part of a replay that is not of the calls

    def __init__(self, variant: Variant, copies: int) -> None:
        with variant.active():
            self.graph = _captured(variant.call, copies)

    def run(self) -> None:
        self.graph.replay()

    def active(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()


class _SpacedGraph(_Graph):
    """The same with a kernel of torch's after every call."""

    def __init__(self, variant: Variant, copies: int) -> None:
        space = _spacer()

        def call_and_space(copy: int) -> None:
            variant.call(copy)
            space(copy)

        super().__init__(Variant(variant.name, call_and_space, copies, variant.active), copies)
        spaces = _Graph(Variant("spaces", space, copies), copies)
        self.idle_seconds = statistics.median(_events_after_spin(spaces, 0) for _ in range(_SPACE_REPLAYS))


def _spacer() -> Call:
    """A kernel of torch's, as short as they are."""
    element = torch.zeros(1, device="cuda")
    return lambda copy: element.add_(1.0)


def _captured(call: Call, copies: int) -> torch.cuda.CUDAGraph:
    """A graph of a call on every copy, replayed until it is warm."""
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()  # a capture needs its warm-up on a side stream
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # Every copy: binaries are compiled here, and an address of another alignment takes another binary.
        for copy in range(copies):
            call(copy)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        for copy in range(copies):
            call(copy)
    for _ in range(_WARM_REPLAYS):
        graph.replay()
    torch.cuda.synchronize()
    return graph


Prepared = Variant | _Eager | _Graph


def _events(all_copies: _Eager | _Graph, _: int, spin: int = 0) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with all_copies.active():
        torch.cuda.synchronize()
        if spin:
            torch.cuda._sleep(spin)
        start.record()
        all_copies.run()
        end.record()
        end.synchronize()
    return start.elapsed_time(end) * 1e-3


def _events_after_spin(all_copies: _Graph, _: int) -> float:
    """At least a tenth of what was measured: the kernels between calls can hide a call."""
    seconds = _events(all_copies, 0, _SPIN_CYCLES)
    return max(seconds - all_copies.idle_seconds, 0.1 * seconds)


# The share of free memory that may be used: the rest is for other processes, the compiler and temporaries.
MEMORY_SHARE = 0.7
_FALLBACK_CACHE_BYTES = 64 << 20
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class TooLarge(Exception):
    """A row that does not fit into memory; the message says what it needs and what there is."""


@dataclass(frozen=True)
class Footprint:
    """Bytes of a row: what one call touches, what each copy occupies, and what exists once for all copies."""

    touched: int
    resident: int
    fixed: int


@dataclass(frozen=True)
class Rotation:
    """Copies of the inputs, and whether together they exceed the cache; `limit` says what kept them few, if so."""

    copies: int
    touched_bytes: int
    cache_bytes: int
    limit: str = ""

    @property
    def total_bytes(self) -> int:
        return self.copies * self.touched_bytes

    @property
    def is_cold(self) -> bool:
        return self.total_bytes > self.cache_bytes

    def reduced(self, copies: int, limit: str) -> "Rotation":
        return Rotation(copies, self.touched_bytes, self.cache_bytes, limit)


def plan_rotation(
    footprint: Footprint,
    cache_bytes: int,
    available_bytes: int,
    *,
    cache_factor: float = 1.25,
    max_copies: int = 1 << 16,
) -> Rotation:
    """As many copies as exceed the cache by a factor, at least two; at most `max_copies`, or what fits into memory.

    By a factor, since replacement is not exactly least-recently-used and a VM shares the cache. At most `max_copies`,
    since a copy costs a handful of tensor objects of about 1 kB, and a call in a CUDA graph, however small the row is.

    Raises:
        TooLarge: two copies do not fit.
    """
    wanted = max(math.ceil(cache_factor * cache_bytes / footprint.touched), 2)
    budget = int(MEMORY_SHARE * available_bytes)
    fitting = (budget - footprint.fixed) // footprint.resident
    if fitting < 2:
        needed = footprint.fixed + 2 * footprint.resident
        raise TooLarge(f"needs {format_bytes(needed)}, {format_bytes(budget)} of memory may be used")
    limits = {wanted: "", max_copies: f"{max_copies} copies", fitting: f"{format_bytes(budget)} of memory"}
    copies = min(limits)
    return Rotation(copies, footprint.touched, cache_bytes, limits[copies] if copies < wanted else "")


def last_level_cache_bytes(directory: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Size of the outermost cache; 64 MiB where the system does not say."""
    levels = []
    for index in directory.glob("index*"):
        try:
            size = (index / "size").read_text().strip()
            levels.append((int((index / "level").read_text()), int(size[:-1]) * _UNITS[size[-1]]))
        except (OSError, ValueError, KeyError, IndexError):
            continue
    return max(levels)[1] if levels else _FALLBACK_CACHE_BYTES


def available_memory_bytes() -> int:
    """What can be allocated without swapping: the kernel's estimate, or less where a container's limit is lower."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) << 10
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return available
    return min(available, limit - used)


def format_bytes(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"


# Seconds for each ceiling where nothing is timed beside it.
_SECONDS = {"cpu": 0.2, "cuda": 0.05}

# Rows, columns and depth of the products whose best rate is the ceiling: large enough for the best kernels to reach it,
# and on a CPU small enough for 0.2 s on two cores without matrix units. Without AVX-512 the one with fewer columns is
# faster: 149 and 123 GFLOP/s in fp32 on two cores of an AMD EPYC, of which our own kernels reach 141.
_MATMUL = {"cuda": ((8192, 8192, 8192),), "cpu": ((512, 4096, 4096), (512, 512, 4096))}

# What a thread streams in one call of a ceiling: 4 ms at 15 GB/s. With 32 MB, starting the threads takes 2 %.
_THREAD_BYTES = 64 << 20

# A GPU's copy reaches its rate from some 500 MB on. What a fill leaves in L2 counts as written to memory: 50 MB on an
# H100, a tenth of 512 MB and a fortieth of this.
_GPU_BYTES = 1 << 31

# (streams, run_bytes, ahead_bytes): the walks of project_dot.h and project_amx.h (6 and 16 runs of a weight's row, the
# next ones prefetched), and walks that may be faster on other machines. AMD EPYC, 2 cores with neighbors, chrt -f 10,
# 100 MB, GB/s: reading 32.6 with (6, 65536, 0), 31.5 with (4, 262144, 0), 28.2 with the best single run, where
# norm_concat_linear reads 28.8; copying 45.3 with (4, 65536, 0), 33.4 with 16 runs, 30.0 by torch.
Walk = tuple[int, int, int]
READ_WALKS: tuple[Walk, ...] = (
    (1, 65536, 1024),
    (2, 262144, 2048),
    (4, 65536, 0),
    (4, 262144, 0),
    (6, 24576, 0),
    (6, 24576, 8192),
    (6, 24576, 24576),
    (6, 65536, 0),
    (6, 65536, 65536),
    (8, 24576, 24576),
    (16, 24576, 0),
    (16, 24576, 512),
    (16, 24576, 24576),
)
# Of copy_stream and add_stream.
COPY_WALKS: tuple[Walk, ...] = ((1, 65536, 0), (1, 262144, 0), (2, 262144, 0), (4, 65536, 0), (4, 262144, 0))


@dataclass(frozen=True)
class Traffic:
    """Bytes that any implementation has to read and to write in one call."""

    read: int
    written: int

    @property
    def total(self) -> int:
        return self.read + self.written


@dataclass(frozen=True)
class Rates:
    """Bytes per second, counting what is read and what is written; floating-point operations per second.

    `add` is the rate of two reads for each write; None where it was not measured. `fastest` is that of the fastest
    stream of a GPU, whose reads and writes share a bus, and `fastest_stream` says which that is; None elsewhere.
    """

    copy: float
    read: float
    matmul: float
    add: float | None = None
    fastest: float | None = None
    fastest_stream: str | None = None

    def memory_seconds(self, traffic: Traffic) -> float:
        """What the streams of this run take for these bytes.

        No single rate is a ceiling: where reads and writes have channels of their own a copy is faster than a read
        (45 and 34 GB/s on an AMD EPYC), elsewhere slower, and an op has its own share of writes. Seconds per byte are
        measured at a share of zero (read), a third (add) and a half (copy), and linear between these and beyond. Where
        reads and writes overlap, the true curve sags below such a line: without `add`, capture_hidden, which has a
        third, would be at 102 % of its ceiling. Beyond a half the true curve rises faster than the line.

        On a GPU the fastest of all streams bounds every mix.
        """
        if self.fastest is not None:
            return traffic.total / self.fastest
        share = traffic.written / max(traffic.total, 1)
        ends = [(0.0, 1 / self.read), (1 / 2, 1 / self.copy)]
        if self.add is not None and share < 1 / 2:
            ends[1 if share < 1 / 3 else 0] = (1 / 3, 1 / self.add)
        (low, at_low), (high, at_high) = ends
        return traffic.total * max(at_low + (at_high - at_low) * (share - low) / (high - low), 0.0)

    def floor_seconds(self, traffic: Traffic, flops: int) -> float:
        """The roofline: no implementation can be much faster than these bytes and these operations take."""
        return max(self.memory_seconds(traffic), flops / self.matmul if flops else 0.0)


@dataclass(frozen=True)
class Stream:
    """What is timed before the rows: a "copy", "read" or "fill" of some bytes."""

    kind: str
    variant: Variant
    bytes: int


def _call_of(run: Callable[..., None], *arguments: object) -> Call:
    return lambda _: run(*arguments)


class Ceilings:
    """What this machine's memory and matrix units can do, measured in the same run as the ops compared with it.

    On a CPU the memory is streamed by the compiled kernels, with the fastest of several walks, in calls interleaved
    with the row's: same threads, allocator, page size and priority. Without compiled kernels torch copies and reduces
    before the row. On a GPU torch copies and reduces, and Triton's kernels copy, read and fill in several block sizes;
    the fastest of each kind is timed before every row, and the fastest of these is the ceiling: one stream alone may
    be slower than an op, as torch's copy is on an H100 (triton_kernels/memory_bandwidth.py).
    """

    def __init__(self, device: str, cache_bytes: int, cache_factor: float, available_bytes: int) -> None:
        part_bytes = _THREAD_BYTES * torch.get_num_threads()
        # On a CPU at least two parts, or the next call would read what this one has read.
        least = 2 * part_bytes if device == "cpu" else _GPU_BYTES
        wanted = max(int(cache_factor * cache_bytes), least)
        # Each of the two arrays may take a sixth of the usable memory: the rows need the rest.
        self.array_bytes = min(wanted, int(MEMORY_SHARE * available_bytes) // 6) // 64 * 64
        self.exceeds_cache = self.array_bytes > cache_bytes
        self.are_streams = device == "cpu" and library.unsupported_reason is None
        self._timer = TIMERS[device][0]
        self._device = device
        self._source = torch.ones(self.array_bytes // 4, dtype=torch.int32, device=device)
        self._target = torch.zeros_like(self._source)
        count = max(self.array_bytes // part_bytes, 1)
        # Whole cache lines: only those are stored past the caches.
        self._part_size = self._source.numel() // count // 16 * 16
        # One rotation for all streams: a part comes back after all others, whichever stream it was read by.
        self._next_part = itertools.cycle(range(0, count * self._part_size, self._part_size))
        self._matmul: dict[torch.dtype, float] = {}
        self._beside: tuple[Variant, ...] | None = None
        self._before: list[Stream] | None = None

    def beside(self) -> tuple[Variant, ...]:
        """Copies, additions and reads to time in the rounds of a row; none where `measure` has to run before it."""
        if self._beside is None:
            self._beside = self._streams() if self.are_streams else ()
        return self._beside

    def measure(self, dtype: torch.dtype, seconds: float | None = None) -> Rates:
        """Medians over about `seconds` each (0.2; 0.05 on a GPU), with torch's current number of threads."""
        seconds = _SECONDS[self._device] if seconds is None else seconds
        self.matmul(dtype, seconds)
        if variants := self.beside():
            return self.rates(dtype, time_variants(self._timer, variants, 1, seconds))
        if self._before is None:
            self._before = self._fastest_of_each_kind()
        before = self._rates_of(self._before, seconds)
        rate = {stream.kind: each for stream, each in before}
        # Reads and writes share a bus: memory that copies this fast could read this fast.
        rates = Rates(rate["copy"], max(rate["read"], rate["copy"]), self.matmul(dtype))
        if self._device == "cpu":
            return rates
        stream, fastest = max(before, key=lambda pair: pair[1])
        return replace(rates, fastest=fastest, fastest_stream=stream.variant.name)

    def rates(self, dtype: torch.dtype, samples: Sequence[Samples]) -> Rates:
        """What samples of `beside` say: of each kind, the faster one."""
        copy, add, read = (min(first.median, second.median) for first, second in zip(*[iter(samples)] * 2, strict=True))
        size = 4 * self._part_size
        return Rates(2 * size / copy, size / read, self.matmul(dtype), 3 * size / add)

    def matmul(self, dtype: torch.dtype, seconds: float | None = None) -> float:
        """Measured once per dtype, not beside rows: at full power it would lower their clocks.

        On a CPU at least the rate of fp32, in which 16 bits can always be multiplied: where no instruction multiplies
        bf16, torch's product of bf16 takes four times as long as that of fp32 (34 GFLOP/s on an AMD EPYC with AVX2).
        """
        dtypes = {dtype, torch.float32} if self._device == "cpu" else {dtype}
        for missing in dtypes - self._matmul.keys():
            seconds = _SECONDS[self._device] if seconds is None else seconds
            self._matmul[missing] = max(self._matmul_rate(missing, *size, seconds) for size in _MATMUL[self._device])
        return max(self._matmul[each] for each in dtypes)

    def _part(self) -> tuple[torch.Tensor, torch.Tensor]:
        begin = next(self._next_part)
        return self._source[begin : begin + self._part_size], self._target[begin : begin + self._part_size]

    def _rates_of(self, streams: Sequence[Stream], seconds: float) -> list[tuple[Stream, float]]:
        samples = time_variants(self._timer, [stream.variant for stream in streams], 1, seconds)
        return [(stream, stream.bytes / taken.median) for stream, taken in zip(streams, samples, strict=True)]

    def _fastest_of_each_kind(self) -> list[Stream]:
        """Of torch's streams, and on a GPU of Triton's."""
        # Of torch's reductions on a CPU, max over int32 streams fastest (32 GB/s where sum of fp32 reaches 30).
        copy = Variant("copy by torch", lambda _: self._target.copy_(self._source), 1)
        read = Variant("read by torch", lambda _: self._source.max(), 1)
        streams = [Stream("copy", copy, 2 * self.array_bytes), Stream("read", read, self.array_bytes)]
        if self._device == "cpu":
            return streams
        if plan.unsupported_reason("triton", self._source.device) is None:
            streams += self._triton_streams()
        fastest: dict[str, tuple[float, Stream]] = {}
        for stream, rate in self._rates_of(streams, _SECONDS[self._device]):
            if rate > fastest.get(stream.kind, (0.0, stream))[0]:
                fastest[stream.kind] = rate, stream
        return [stream for _, stream in fastest.values()]

    def _triton_streams(self) -> Iterator[Stream]:
        from eagle_kernels.triton_kernels import memory_bandwidth as triton_streams  # imports Triton

        source, target, size = self._source, self._target, self.array_bytes
        for block in triton_streams.BLOCKS:
            sums = source.new_empty(triton_streams.programs(source, block))
            streams: tuple[tuple[str, int, Callable[..., None], tuple[torch.Tensor, ...]], ...] = (
                ("copy", 2 * size, triton_streams.copy, (source, target)),
                ("read", size, triton_streams.read, (source, sums)),
                ("fill", size, triton_streams.fill, (target,)),
            )
            for kind, moved, run, tensors in streams:
                name = f"{kind} by Triton, {block.words} words in {block.num_warps} warps"
                yield Stream(kind, Variant(name, _call_of(run, *tensors, block), 1), moved)

    def _streams(self) -> tuple[Variant, ...]:
        """Copying, adding and reading, each with the two fastest of its walks.

        Two, since these are 1 or 2 % apart: one, chosen by a moment's noise, must not set an op's ceiling.
        """
        kinds = ((self._copy, COPY_WALKS), (self._add, COPY_WALKS), (self._read, READ_WALKS))
        return tuple(stream for make, walks in kinds for stream in self._fastest([make(walk) for walk in walks]))

    def _fastest(self, variants: Sequence[Variant]) -> list[Variant]:
        samples = time_variants(self._timer, variants, 1, _SECONDS[self._device])
        medians = {variant: taken.median for variant, taken in zip(variants, samples, strict=True)}
        return sorted(variants, key=medians.__getitem__)[:2]

    def _read(self, walk: Walk) -> Variant:
        streams, run_bytes, _ = walk
        sums = torch.empty(-(-4 * self._part_size // (streams * run_bytes)), dtype=torch.int64)
        read = torch.ops.eagle_kernels_C.read_stream
        return Variant(f"read {walk}", lambda _: read(self._part()[0], *walk, sums), 1)

    def _copy(self, walk: Walk) -> Variant:
        def call(_: int) -> None:
            source, target = self._part()
            torch.ops.eagle_kernels_C.copy_stream(source, *walk, target)

        return Variant(f"copy {walk}", call, 1)

    def _add(self, walk: Walk) -> Variant:
        def call(_: int) -> None:
            source = self._part()[0]
            other, target = self._part()
            torch.ops.eagle_kernels_C.add_stream(source, other, *walk, target)

        return Variant(f"add {walk}", call, 1)

    def _matmul_rate(self, dtype: torch.dtype, rows: int, columns: int, depth: int, seconds: float) -> float:
        # Random: on zeros the multipliers draw less power and clocks go up (894 against 788 TFLOP/s on an H200).
        a, b = (torch.randn(count, depth, device=self._device).to(dtype) for count in (rows, columns))
        out = torch.empty(rows, columns, dtype=dtype, device=self._device)
        product = Variant("", lambda _: torch.mm(a, b.t(), out=out), 1)
        product.call(0)
        (samples,) = time_variants(self._timer, [product], 1, seconds)
        return 2 * rows * columns * depth / samples.median
