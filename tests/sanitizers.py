"""Starts Python with a sanitizer of g++ in the process: for test_sanitized.py of cuda_host, and `make sanitize`."""

import os
import shutil
import subprocess

COMPILER = shutil.which(os.environ.get("CXX", "g++"))
FLAGS = {
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"],
    "thread": ["-fsanitize=thread", "-fno-omit-frame-pointer"],
}
# libstdc++ too: AddressSanitizer looks for __cxa_throw when it starts, and Python has none.
_RUNTIMES = {
    "address": ("libasan.so", "libubsan.so", "libstdc++.so.6"),
    "thread": ("libtsan.so", "libstdc++.so.6"),
}


def environment_under(sanitizer: str) -> dict[str, str] | None:
    """The variables of a process that ends at the sanitizer's first report; None where g++ has no such sanitizer."""
    libraries = [_path_of(name) for name in _RUNTIMES[sanitizer]]
    if None in libraries:
        return None
    return {
        "LD_PRELOAD": " ".join(libraries),
        # No leaks, since Python's own are thousands; no use after return, since fibers switch stacks. Null for more
        # memory than there can be, as in a process without a sanitizer.
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        # Python and torch are not instrumented: their accesses are ignored, and their locks are still seen.
        "TSAN_OPTIONS": "ignore_noninstrumented_modules=1:halt_on_error=1:allocator_may_return_null=1",
    }


def _path_of(library: str) -> str | None:
    if COMPILER is None:
        return None
    path = subprocess.run([COMPILER, f"-print-file-name={library}"], capture_output=True, text=True).stdout.strip()
    return path if os.path.isabs(path) else None
