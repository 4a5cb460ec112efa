"""Runs the other files of this folder twice more. AddressSanitizer and UndefinedBehaviorSanitizer find reads beyond a
tensor inside the allocator's block, unaligned access, overflow of an offset; ThreadSanitizer finds two CUDA threads
that touch the same bytes with no barrier or end of a launch between them (racecheck.h)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cuda_host.build import build
from sanitizers import FLAGS, environment_under

HERE = Path(__file__).parent
# Tests that take long for their sizes and add no kind of access, and those that fail by segmentation fault anyway.
_LEFT_OUT = "torchs_bits or do_not_depend or any_ids or any_indices or every_bit_pattern or beyond_its_end or T129"
_LEFT_OUT += " or H896 or H1152 or H2880 or H4096 or 20000 or outliers or scales"
_LEFT_OUT += " or (linear_quantized and fp16)"
_LEFT_OUT += " or (in_pairs and (offset or no-gain or mxfp or int8_row or e8m0))"
_LEFT_OUT += " or (wgmma_instance and (fp16 or offset or 0.5 or 0.0 or 2-6- or 2-40- or int8_row))"


def run_under(sanitizer: str, command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a Python process with the sanitizer preloaded."""
    if "EAGLE_KERNELS_TEST_SANITIZED" in os.environ:
        pytest.skip("this is the process that it starts")
    under = environment_under(sanitizer)
    if under is None:
        pytest.skip(f"no g++ with the {sanitizer} sanitizer on this machine")
    # Built here, not in that process: two threads that start compilers under ThreadSanitizer both fork, and OpenBLAS's
    # fork handlers then wait for each other forever.
    build(sanitizer)
    environment = os.environ | under | {"EAGLE_KERNELS_TEST_SANITIZED": sanitizer} | variables
    command = [sys.executable, *command]
    return subprocess.run(command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True)


# What takes long has processes of its own, so that workers share the load: (file, which of its tests).
_ALONE = {
    "codes": ("test_norm_concat_linear_quantized.py", "not wgmma"),
    "codes-wgmma": ("test_norm_concat_linear_quantized.py", "wgmma"),
    "linear": ("test_norm_concat_linear.py", "test"),
}


@pytest.mark.slow
@pytest.mark.parametrize("part", [*_ALONE, "others"])
@pytest.mark.parametrize("sanitizer", FLAGS)
def test_the_kernels_under_sanitizers(sanitizer: str, part: str) -> None:
    alone, chosen = {Path(__file__).name, *(file for file, _ in _ALONE.values())}, "test"
    files = [name for name in os.listdir(HERE) if name.startswith("test_") and name not in alone]
    if part in _ALONE:
        file, chosen = _ALONE[part]
        files = [file]
    selection = [*(os.fspath(HERE / name) for name in files), "-k", f"({chosen}) and not ({_LEFT_OUT})"]
    run = run_under(sanitizer, ["-m", "pytest", "-x", "-p", "no:cacheprovider", *selection])
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-6000:]
    assert " passed" in run.stdout and " failed" not in run.stdout, run.stdout


def test_the_sanitizers_see_an_access_beyond_a_tensor() -> None:
    """The tests above prove something only if the sanitizers see such errors."""
    code = (
        "import torch; from cuda_host.build import load; load('address').set_device(1 << 17, descending_warps=False)\n"
        "ops = torch.ops.eagle_kernels_emulated\n"
        "x = torch.zeros(100).bfloat16(); out = torch.zeros(2, 100).bfloat16()\n"
        "hidden = torch.as_strided(x, (1, 100), (100, 1)); short = x.untyped_storage()\n"
        "ops.capture_hidden_out(hidden, None, out[:1], None); print('fine')\n"
        "short.resize_(120)\n"
        "ops.capture_hidden_out(hidden, None, out[:1], None); print('missed')\n"
    )
    run = run_under("address", ["-c", code], PYTHONPATH=os.fspath(HERE.parent))
    assert "heap-buffer-overflow" in run.stderr and "capture_hidden_kernel" in run.stderr, run.stderr[-4000:]
    assert run.stdout == "fine\n"


_RING = (
    "import torch; from cuda_host.build import load\n"
    "load('{sanitizer}').set_device({memory}, descending_warps=False, multiprocessors=1, {order})\n"
    "ops = torch.ops.eagle_kernels_emulated\n"
    "x, weight, out = (torch.ones(40, n).bfloat16() for n in ({H}, 2 * {H}, 40))\n"
    "sources = ([x, x], 2, 0, [], [0.0], 0.0, None, None, None)\n"
    "ops.norm_concat_linear_{call}\n"
    "print('fine' if (out == 2 * {H}).all() else 'wrong')\n"
)


def _ring(call: str, H: int = 520, memory: int = 1 << 17, **variables: str) -> tuple[dict, dict[str, str]]:
    """What _RING is formatted with, and variables of the library of alternatives."""
    return {"call": call, "H": H, "memory": memory}, {f"EAGLE_KERNELS_FUSED_{name}": v for name, v in variables.items()}


_FUSED = "fused_out(*sources, weight, None, None, 0.0, True, out)"
_CODES = "weight.to(torch.float8_e4m3fn), torch.ones(40, 1), None, 1, 5120"
_WGMMA = _ring("wgmma_out(*sources, weight, None, None, 0.0, out)")
# Ranges are those that the blocks of a cluster share out: of three the second has the end of a chunk and the beginning
# of the next.
_SWITCHES = {
    "split": _ring("split_out(*sources, weight, None, None, 0.0, True, out)"),
    "wgmma": _WGMMA,
    "fused": _ring(_FUSED, RANGES="2"),
    "fused across chunks": _ring(_FUSED, RANGES="3"),
    "fused in pairs": _ring(
        f"quantized_out(*sources, {_CODES}, None, None, 0.0, 1, True, out)", 2560, 227 << 10, RANGES="4", BLOCKS="1"
    ),
}


@pytest.mark.parametrize("forgotten", ["nothing", "barriers", "waits"])
@pytest.mark.parametrize("kernel", _SWITCHES)
def test_a_ring_of_copies_without_its_barriers_or_waits_is_seen(kernel: str, forgotten: str) -> None:
    """520 columns are 9 stages of 64 columns and 5 of the fused kernel, and half of 2560 5 of a pair, more than
    the ring has. A missing barrier is a race; a copy that nobody has waited for has not landed."""
    call, variables = _SWITCHES[kernel]
    variables = variables | ({} if forgotten == "nothing" else {f"EAGLE_KERNELS_TEST_NO_{forgotten.upper()}": "1"})
    code = _RING.format(**call, sanitizer="thread", order=f"late_copies={forgotten == 'waits'}")
    run = run_under("thread", ["-c", code], PYTHONPATH=os.fspath(HERE.parent), **variables)
    said_of_waits = {
        "fused": "shared memory of a block that has ended",
        "fused across chunks": "shared memory of a block that has ended",
        "fused in pairs": "shared memory of a block that has ended",
        "wgmma": "a thread has ended before its products",
    }
    if forgotten == "waits" and kernel in said_of_waits:
        assert said_of_waits[kernel] in run.stderr, run.stderr[-4000:]
    elif forgotten == "barriers":
        name = "norm_concat_linear_wgmma" if kernel == "wgmma" else "norm_concat_linear_partial"
        assert "data race" in run.stderr and name in run.stderr, run.stderr[-4000:]
    else:
        said = {"nothing": "fine\n", "waits": "wrong\n"}[forgotten]
        assert run.stdout == said, run.stderr[-6000:]


@pytest.mark.usefixtures("emulation")
@pytest.mark.parametrize("forgotten", [False, True])
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("kernel", _SWITCHES)
def test_a_random_order_of_warps_shows_forgotten_barriers(kernel: str, seed: int, forgotten: bool) -> None:
    """Without a sanitizer: the sum is wrong, or the emulation ends the kernel."""
    call, variables = _SWITCHES[kernel]
    code = _RING.format(**call, sanitizer="", order=f"random={seed}")
    environment = os.environ | {"PYTHONPATH": os.fspath(HERE.parent)} | variables
    environment |= {"EAGLE_KERNELS_TEST_NO_BARRIERS": "1"} if forgotten else {}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (run.stdout == "fine\n") != forgotten, run.stdout + run.stderr[-4000:]
    assert not forgotten or run.stdout == "wrong\n" or "of block (" in run.stderr, run.stderr[-4000:]


def test_what_wgmma_reads_without_a_fence_is_seen() -> None:
    code = _RING.format(**_WGMMA[0], sanitizer="thread", order="")
    run = run_under("thread", ["-c", code], PYTHONPATH=os.fspath(HERE.parent), EAGLE_KERNELS_TEST_NO_FENCES="1")
    assert "has not fenced" in run.stderr, run.stderr[-4000:]


@pytest.mark.parametrize("barriers", ["counted", "forgotten"])
def test_the_racecheck_sees_a_barrier_that_was_forgotten(barriers: str) -> None:
    code = (
        "import torch; from cuda_host.build import load\n"
        "load('thread').set_device(1 << 17, descending_warps=False); ops = torch.ops.eagle_kernels_emulated\n"
        "hidden, residual, out, out_sum = (torch.randn(3, 8200).bfloat16() for _ in range(4))\n"
        "ops.add_rms_norm_out(hidden, residual, torch.ones(8200), 1e-6, 0.0, out, out_sum); print('fine')\n"
    )
    forgotten = {"EAGLE_KERNELS_TEST_NO_BARRIERS": "1"} if barriers == "forgotten" else {}
    run = run_under("thread", ["-c", code], PYTHONPATH=os.fspath(HERE.parent), **forgotten)
    if forgotten:
        assert "data race" in run.stderr and "add_rms_norm" in run.stderr, run.stderr[-4000:]
    else:
        assert run.stdout == "fine\n", run.stderr[-6000:]
