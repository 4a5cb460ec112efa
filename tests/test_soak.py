"""Many calls, threads and processes: flat memory and the same bits, `make soak`."""

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import eagle_kernels as ek
import soak_calls
from backends import environment_of, needs_compiled
from eagle_kernels.plan import cpu_isa
from guards import same_bits

# Both plans of norm_concat_linear, and T = 0.
ROWS = (0, 1, 2, 3, 8, 17, 33, 40)
MAX_GROWTH = 4 << 20  # bytes in the second half of the calls; a leak of 84 bytes a call shows in 50,000


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def growth_of(call: Callable[[int], soak_calls.Outputs], number: int) -> int:
    """Bytes of memory that the second half of this many calls adds. T changes with every call; the bits are checked."""
    expected = {T: call(T) for T in ROWS}
    each = -(-number // (2 * soak_calls.THREADS))

    def work(thread: int) -> None:
        for count in range(each):
            T = ROWS[(count + thread) % len(ROWS)]
            for output, bits in zip(call(T), expected[T], strict=True):
                assert same_bits(output, bits), f"call {count} of thread {thread}, T={T}"

    with ThreadPoolExecutor(soak_calls.THREADS) as pool:
        list(pool.map(work, range(soak_calls.THREADS)))
        before = resident_bytes()
        list(pool.map(work, range(soak_calls.THREADS)))
        return resident_bytes() - before


@needs_compiled
@pytest.mark.parametrize("op", soak_calls.OPS)
def test_memory_is_flat_and_bits_are_stable(op: str, cases: Callable[[int], int], record_property: Callable) -> None:
    """Eight threads on shared layers and inputs."""
    growth = growth_of(soak_calls.calls(op, max(ROWS), 64, torch.bfloat16), cases(2000))
    record_property("paths", [f"{soak_calls.THREADS} threads, {cpu_isa()}"])
    record_property("growth_bytes", growth)
    assert growth <= MAX_GROWTH


def test_a_leak_and_other_bits_are_seen() -> None:
    kept = []
    assert growth_of(lambda T: (kept.append(torch.ones(2000)) or torch.ones(T),), 2000) > MAX_GROWTH
    with pytest.raises(AssertionError, match="call 0 of thread"):
        growth_of(lambda T: (torch.rand(T),), 16)


def in_a_process(function: str) -> dict:
    """What a function of soak_calls.py returns in a fresh process; one that hangs fails."""
    command = [sys.executable, soak_calls.__file__, function]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_threads_and_processes_give_the_same_bits() -> None:
    """Every op on every instruction set: two runs here, and one each with one and two threads in another process."""
    elsewhere = in_a_process("on_every_path")
    for name, variables in soak_calls.PATHS.items():
        with environment_of(**variables):
            here = soak_calls.digests()
            assert soak_calls.digests() == here, name
        for threads in (1, 2):
            assert elsewhere[f"{name} {threads}"] == here, f"{name}, {threads} threads"


def test_first_calls_at_once() -> None:
    """Eight threads find no plan and no instruction set yet."""
    for op, found in in_a_process("first_calls").items():
        call = soak_calls.calls(op, **soak_calls.SIZES, dtype=torch.bfloat16)
        assert found == [soak_calls.digest(call(8))] * soak_calls.THREADS, op


def test_a_forked_child_with_one_thread_gives_the_same_bits() -> None:
    assert in_a_process("in_a_fork") == soak_calls.digests()


@needs_compiled
@pytest.mark.parametrize("dtype", soak_calls.DTYPES.values(), ids=soak_calls.DTYPES)
def test_what_a_call_leaves_in_its_workspace_is_not_read(dtype: torch.dtype) -> None:
    """289 columns are packed as 304 or more, and a call gets the workspace of the one before."""
    weights = {width: torch.randn(40, width).to(dtype) for width in (289, 304)}
    rows, nan = torch.randn(3, 289).to(dtype), torch.full((3, 304), float("nan"), dtype=dtype)
    for variables in soak_calls.PATHS.values():
        with environment_of(**variables):
            for of in (lambda weight: weight, lambda weight: ek.quantize(weight, "fp8_row")):
                expected = ek.norm_concat_linear([rows], of(weights[289]), norm="none")
                for _ in range(10):
                    assert ek.norm_concat_linear([nan], of(weights[304]), norm="none").isnan().all()
                    assert same_bits(ek.norm_concat_linear([rows], of(weights[289]), norm="none"), expected)
