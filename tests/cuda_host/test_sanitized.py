"""The other files of this folder once more, with the kernels under AddressSanitizer and UndefinedBehaviorSanitizer:
reads beyond a tensor inside the allocator's block, unaligned access, overflow of an offset."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cuda_host.build import COMPILER

HERE = Path(__file__).parent
# What takes long for its sizes and adds no kind of access, and what ends in a segmentation fault by itself.
_LEFT_OUT = "torchs_bits or do_not_depend or any_ids or any_indices or every_bit_pattern or beyond_its_end or T129"
_LEFT_OUT += " or H896 or H1152 or H2880 or H4096 or 20000 or D4300 or outliers or scales or (8x32 and concat)"


def _runtime(name: str) -> str | None:
    """The path of a sanitizer's library, which must come before everything else in the process."""
    if COMPILER is None:
        return None
    path = subprocess.run([COMPILER, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
    return path if os.path.isabs(path) else None


@pytest.mark.slow
@pytest.mark.skipif("EAGLE_KERNELS_TEST_SANITIZED" in os.environ, reason="this is the process that it starts")
@pytest.mark.skipif(_runtime("libasan.so") is None, reason="no g++ with AddressSanitizer on this machine")
def test_the_kernels_under_sanitizers() -> None:
    # libstdc++ too: AddressSanitizer looks for __cxa_throw when it starts, and Python has none.
    libraries = [_runtime("libasan.so"), _runtime("libubsan.so"), _runtime("libstdc++.so.6")]
    environment = os.environ | {
        "EAGLE_KERNELS_TEST_SANITIZED": "1",
        "LD_PRELOAD": " ".join(filter(None, libraries)),
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", str(HERE), "-k", f"not ({_LEFT_OUT})"],
        cwd=HERE.parents[1],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-6000:]
    assert " passed" in run.stdout and " failed" not in run.stdout, run.stdout


def test_the_sanitizers_see_an_access_beyond_a_tensor(tmp_path: Path) -> None:
    """The setup above proves something only if it would have failed."""
    if _runtime("libasan.so") is None or "EAGLE_KERNELS_TEST_SANITIZED" in os.environ:
        pytest.skip("no g++ with AddressSanitizer on this machine, or the process that is under it")
    code = (
        "import torch; from cuda_host.build import load; load(True).set_device(1 << 17, descending_warps=False)\n"
        "ops = torch.ops.eagle_kernels_emulated\n"
        "x = torch.zeros(100).bfloat16(); out = torch.zeros(2, 100).bfloat16()\n"
        "hidden = torch.as_strided(x, (1, 100), (100, 1)); short = x.untyped_storage()\n"
        "ops.capture_hidden_out(hidden, None, out[:1], None); print('fine')\n"
        "short.resize_(120)\n"
        "ops.capture_hidden_out(hidden, None, out[:1], None); print('missed')\n"
    )
    preload = f"{_runtime('libasan.so')} {_runtime('libubsan.so')} {_runtime('libstdc++.so.6')}"
    environment = os.environ | {"LD_PRELOAD": preload, "ASAN_OPTIONS": "detect_leaks=0", "PYTHONPATH": str(HERE.parent)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "heap-buffer-overflow" in run.stderr and "capture_hidden_kernel" in run.stderr, run.stderr[-4000:]
    assert run.stdout == "fine\n"
