"""Timing, statistics and rotation of the benchmark, on which its figures rest."""

import gc
import itertools
import math
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from eagle_kernels.bench import benchmark, measure
from eagle_kernels.bench.measure import (
    Footprint,
    Rates,
    Samples,
    TooLarge,
    Traffic,
    available_memory_bytes,
    geometric_mean,
    interleave,
    last_level_cache_bytes,
    plan_rotation,
    ratio,
)

from backends import needs_compiled

MB = 1 << 20
TOLERANCE = 1.05


def drifting_timer(noise: float) -> Callable:
    """A timer of calls that return their own duration, on a machine whose clock drifts by a factor of two and where a
    tenth of the calls is preempted for 8 ms."""
    source, now = random.Random(0), [0.0]

    def timer(call: Callable[[int], float], copy: int) -> float:
        seconds = call(copy) * (1.5 + 0.5 * math.sin(now[0] * 3)) * (1 + source.uniform(-noise, noise))
        seconds += 0.008 if source.random() < 0.1 else 0
        now[0] += seconds
        return seconds

    return timer


@pytest.mark.parametrize("slowdown, seen", [(1.10, True), (1.0, False)], ids=["10-percent-slower", "noise-only"])
def test_planted_regression_is_seen_and_noise_is_not(slowdown: float, seen: bool) -> None:
    calls = [lambda copy: 1e-3, lambda copy: 1e-3 * slowdown]
    base, new = interleave(calls, 4, min_time=1.0, timer=drifting_timer(noise=0.03))
    assert ratio(new, base).is_more_than(TOLERANCE) == seen
    assert ratio(new, base).value == pytest.approx(slowdown, rel=0.03)


def test_interval_of_equal_variants_holds_one() -> None:
    base, new = interleave([lambda copy: 1e-3] * 2, 4, min_time=1.0, timer=drifting_timer(noise=0.03))
    measured = ratio(new, base)
    assert measured.low <= 1 <= measured.high


def test_the_interval_of_a_ratio_by_its_ranks() -> None:
    """Of 100 pairs the 41st and the 61st: 50 -+ 0.98 * 10."""
    measured = ratio(Samples(tuple(range(100))), Samples((1.0,) * 100))
    assert (measured.value, measured.low, measured.high) == (49.5, 40, 60)


def test_the_timer_on_cpu_reads_the_clock_before_and_after_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0]

    def spin(nanoseconds: int) -> Callable[[int], None]:
        def call(copy: int) -> None:
            now[0] += nanoseconds

        return call

    monkeypatch.setattr(measure.time, "perf_counter_ns", lambda: now[0])
    base, new = interleave([spin(100_000), spin(110_000)], 2, min_time=0.1)
    for samples, expected in ((base, 1e-4), (new, 1.1e-4)):
        assert samples.seconds == pytest.approx([expected] * len(samples.seconds))
    assert ratio(new, base).is_more_than(TOLERANCE)


@pytest.mark.parametrize("variants, copies", [(1, 2), (2, 4), (3, 6), (5, 6), (4, 3)])
def test_a_copy_comes_back_only_after_all_others(variants: int, copies: int) -> None:
    order: list[int] = []

    def timer(call: Callable[[int], None], copy: int) -> float:
        order.append(copy)
        return 1.0

    interleave([lambda copy: None] * variants, copies, min_time=20, timer=timer)
    for start in range(len(order) - copies):
        assert len(set(order[start : start + copies])) == copies


def test_no_collection_is_timed_and_collecting_goes_on_afterwards() -> None:
    enabled: list[bool] = []
    interleave([lambda copy: enabled.append(gc.isenabled())], 1, min_time=0.0)
    assert enabled and not any(enabled) and gc.isenabled()
    gc.disable()
    try:
        interleave([lambda copy: None], 1, min_time=0.0)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_without_compiled_kernels_torch_streams_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure.library, "unsupported_reason", "there is no library")
    ceilings = measure.Ceilings("cpu", 1 << 16, 1.25, 1 << 40)
    assert not ceilings.are_streams and ceilings.beside() == ()


@pytest.mark.parametrize(
    ("count", "text"),
    [(999, "999 B"), (1000, "1 kB"), (10**6, "1 MB"), (10**9 - 10**7, "990 MB"), (10**9, "1 GB"), (2.5e9, "2.5 GB")],
)
def test_bytes_in_the_largest_unit_that_they_fill(count: int, text: str) -> None:
    assert measure.format_bytes(count) == text


def test_rounds_alternate_direction() -> None:
    order: list[str] = []
    calls = [lambda copy, name=name: order.append(name) for name in "abc"]
    interleave(calls, 1, min_time=0.0)
    assert "".join(order[:9]) == "abccbaabc"


def test_every_variant_has_at_least_seven_samples() -> None:
    samples = interleave([lambda copy: None] * 2, 1, min_time=0.0)
    assert [len(each.seconds) for each in samples] == [7, 7]


def test_what_runs_beside_is_rare_and_sees_the_whole_time() -> None:
    order: list[str] = []

    def timer(name: str, copy: int) -> float:
        order.append(name)
        return 1e-3 if name == "op" else 5e-3

    op, copy, read = interleave(["op"], 4, 1.0, timer, ["copy", "read"])
    assert len(op.seconds) == 1000 and len(copy.seconds) == len(read.seconds)
    assert 7 <= len(read.seconds) <= 20 and set(read.seconds) == {5e-3}
    places = [place for place, name in enumerate(order) if name == "read"]
    assert max(after - before for before, after in itertools.pairwise(places)) <= 105
    assert places[-1] > len(order) - 105
    short = interleave(["op"], 4, 0.0, timer, ["copy", "read"])
    assert [len(each.seconds) for each in short] == [7, 7, 7]  # a median of one would be a moment's noise


@needs_compiled
def test_a_part_comes_back_after_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one stream has just read, the next one must not find in the cache."""
    monkeypatch.setattr(measure, "_THREAD_BYTES", 1 << 16)
    monkeypatch.setattr(measure, "_SECONDS", {"cpu": 0.0})
    part = torch.get_num_threads() << 16
    ceilings = measure.Ceilings("cpu", 5 * part, 1.25, 1 << 40)
    read: list[int] = []
    original = ceilings._part

    def recorded() -> tuple[torch.Tensor, torch.Tensor]:
        source, target = original()
        read.append(source.data_ptr())
        assert source.nbytes >= part and source.data_ptr() % 64 == target.data_ptr() % 64 == 0
        return source, target

    monkeypatch.setattr(ceilings, "_part", recorded)
    rates = ceilings.measure(torch.float32)
    assert rates.copy > 0 and rates.read > 0 and rates.add > 0
    assert len(ceilings.beside()) == 6 and ceilings.array_bytes == 5 * part * 5 // 4
    count = len(set(read))
    assert count == 6 and all(len(set(read[at : at + count])) == count for at in range(len(read) - count))


def test_the_ceiling_of_a_gpu_is_the_fastest_of_its_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's copy and reduction alone a row of ours was above it. A GPU that is not here: times are planted."""
    pytest.importorskip("triton")
    timed: list[list[str]] = []
    gbps = {"copy by torch": 2400, "read by torch": 2800, "copy": 2500, "read": 3100, "fill": 2700}

    def planted(timer: str, variants: list[measure.Variant], copies: int, seconds: float) -> list[Samples]:
        timed.append([variant.name for variant in variants])
        assert timer == "graph"
        kinds = [variant.name.partition(" by Triton")[0] for variant in variants]
        # The third block size is the fastest of each kind.
        slower = [1.0 if "Triton" not in variant.name or "8 warps" in variant.name else 1.1 for variant in variants]
        moved = [size * (2 if kind.startswith("copy") else 1) for kind in kinds]
        pairs = zip(moved, kinds, slower, strict=True)
        return [Samples((bytes_ / (gbps[kind] * 1e9) * slow,)) for bytes_, kind, slow in pairs]

    ceilings = measure.Ceilings("cpu", 1 << 16, 1.25, 1 << 40)
    size = ceilings.array_bytes
    for name, value in {
        "_device": "cuda",
        "_timer": "graph",
        "are_streams": False,
        "_matmul": {torch.float16: 1.0},
    }.items():
        monkeypatch.setattr(ceilings, name, value)
    monkeypatch.setattr(measure, "time_variants", planted)
    monkeypatch.setattr(measure.plan, "unsupported_reason", lambda backend, device: None)
    rates = ceilings.measure(torch.float16)
    assert [round(rate * 1e-9) for rate in (rates.copy, rates.read, rates.fastest)] == [2500, 3100, 3100]
    assert rates.fastest_stream == "read by Triton, 8192 words in 8 warps"
    traffic = Traffic(10**9, 10**9)
    assert rates.memory_seconds(traffic) == pytest.approx(2 / 3100)
    # All once, then the best of each kind before every row.
    assert len(timed[0]) == 2 + 3 * 4 and len(timed[1]) == 3
    ceilings.measure(torch.float16)
    assert timed[2:] == [timed[1]] and all("8 warps" in name for name in timed[1])

    # A GPU without Triton has torch's two.
    monkeypatch.setattr(measure.plan, "unsupported_reason", lambda backend, device: "triton is not installed")
    monkeypatch.setattr(ceilings, "_before", None)
    rates = ceilings.measure(torch.float16)
    assert rates.fastest_stream == "read by torch" and len(timed[-1]) == 2


def test_the_ceiling_of_a_product_is_the_best_of_sizes_and_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an instruction for bf16 torch's bf16 product is slow, and a row was at 463 % of that ceiling."""
    rates = {(torch.bfloat16, 64): 3e9, (torch.bfloat16, 32): 4e9, (torch.float32, 64): 9e9, (torch.float32, 32): 7e9}
    monkeypatch.setattr(measure, "_MATMUL", {"cpu": ((16, 64, 64), (16, 32, 64))})
    ceilings = measure.Ceilings("cpu", 1 << 16, 1.25, 1 << 40)
    monkeypatch.setattr(ceilings, "_matmul_rate", lambda dtype, rows, columns, *_: rates[dtype, columns])
    assert ceilings.matmul(torch.bfloat16) == ceilings.matmul(torch.float32) == 9e9
    rates[torch.float16, 64] = rates[torch.float16, 32] = 2e10
    assert ceilings.matmul(torch.float16) == 2e10


def test_the_floor_of_memory_goes_by_what_is_read_and_what_is_written() -> None:
    for rates in (Rates(20e9, 25e9, 1.0), Rates(45e9, 34e9, 1.0)):
        assert rates.memory_seconds(Traffic(10**9, 0)) == pytest.approx(1e9 / rates.read)
        assert rates.memory_seconds(Traffic(10**9, 10**9)) == pytest.approx(2e9 / rates.copy)
    overlapping = Rates(45e9, 34e9, 1.0, add=48e9)
    assert overlapping.memory_seconds(Traffic(2 * 10**9, 10**9)) == pytest.approx(3e9 / 48e9)
    # Between the streams a row takes what streams of its bytes take: an addition and two reads, an addition and a copy.
    assert overlapping.memory_seconds(Traffic(4 * 10**9, 10**9)) == pytest.approx(3 / 48 + 2 / 34)
    assert overlapping.memory_seconds(Traffic(3 * 10**9, 2 * 10**9)) == pytest.approx(3 / 48 + 2 / 45)
    for traffic in (Traffic(10**9, 0), Traffic(10**9, 10**9), Traffic(10**9, 2 * 10**9)):
        without = Rates(45e9, 34e9, 1.0).memory_seconds(traffic)
        assert overlapping.memory_seconds(traffic) == pytest.approx(without)
    assert Rates(45e9, 34e9, 1.0).memory_seconds(Traffic(0, 10**9)) == pytest.approx(2 / 45 - 1 / 34)
    assert Rates(90e9, 30e9, 1.0).memory_seconds(Traffic(0, 10**9)) == 0  # a write never saves time
    assert Rates(20e9, 25e9, 1e12).floor_seconds(Traffic(10**6, 0), 10**9) == pytest.approx(1e-3)


def test_rates_of_a_busy_machine_that_give_writes_no_time_are_no_division_by_zero() -> None:
    workload = SimpleNamespace(traffic=lambda: Traffic(0, 10**9), flops=lambda: 0)
    figures = benchmark._figures(Samples((1.0,)), workload, Rates(90e9, 30e9, 1.0))
    assert figures["floor_ms"] == 0 and figures["memory_gbps"] is None


def test_statistics() -> None:
    samples = Samples((5.0, 1.0, 4.0, 2.0, 3.0))
    assert (samples.median, samples.minimum) == (3.0, 1.0)
    assert (samples.quantile(0.2), samples.quantile(0.8), samples.quantile(1.0)) == (2.0, 5.0, 5.0)
    assert geometric_mean([0.5, 2.0, 8.0]) == pytest.approx(2.0)


def test_copies_exceed_the_cache() -> None:
    rotation = plan_rotation(Footprint(touched=100 * MB, resident=100 * MB, fixed=0), 480 * MB, 20000 * MB)
    assert (rotation.copies, rotation.is_cold, rotation.limit) == (6, True, "")


def test_memory_limits_copies_and_says_so() -> None:
    rotation = plan_rotation(Footprint(touched=100 * MB, resident=300 * MB, fixed=100 * MB), 480 * MB, 1500 * MB)
    assert (rotation.copies, rotation.is_cold) == (3, False)
    assert "memory" in rotation.limit


def test_a_short_row_has_no_more_copies_than_a_graph_can_hold() -> None:
    rotation = plan_rotation(Footprint(touched=100, resident=100, fixed=0), 480 * MB, 20000 * MB)
    assert (rotation.copies, rotation.is_cold, rotation.limit) == (1 << 16, False, "65536 copies")


def test_two_copies_at_least() -> None:
    rotation = plan_rotation(Footprint(touched=900 * MB, resident=900 * MB, fixed=0), 480 * MB, 20000 * MB)
    assert (rotation.copies, rotation.is_cold) == (2, True)


def test_row_that_does_not_fit_says_its_size() -> None:
    footprint = Footprint(touched=100, resident=4 * 10**9, fixed=2 * 10**9)
    with pytest.raises(TooLarge, match=r"needs 10 GB, 7 GB of memory may be used"):
        plan_rotation(footprint, 480 * MB, 10 * 10**9)


def test_cache_size_is_read_from_the_outermost_level(tmp_path: Path) -> None:
    for index, (level, size) in enumerate([("1", "48K"), ("2", "2M"), ("3", "491520K"), ("x", "?")]):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "level").write_text(level + "\n")
        (tmp_path / f"index{index}" / "size").write_text(size + "\n")
    assert last_level_cache_bytes(tmp_path) == 480 * MB


def test_machine_without_cache_facts_gets_a_default(tmp_path: Path) -> None:
    assert last_level_cache_bytes(tmp_path) == 64 * MB


def test_available_memory_is_plausible() -> None:
    assert 16 * MB < available_memory_bytes() < 1 << 50
