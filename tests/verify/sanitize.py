"""`make sanitize`: the compiled library under AddressSanitizer with UndefinedBehaviorSanitizer, and under
ThreadSanitizer, over the tests that call it; then the emulated CUDA kernels under both (tests/cuda_host).

Nothing is suppressed. A sanitizer does not see every access: masked loads and stores of AVX-512, and those of AMX
tiles, are not instrumented. For these tests/guards.py puts operands between pages that trap.
"""

import sys

from sanitizers import FLAGS, environment_under
from verify.core import COMPILED
from verify.results import EVERY_CORE, as_record, run_tests, save
from verify.variant import install, unoptimized

# AddressSanitizer's checks as calls: g++ compiles the kernels of codes in 3 minutes, in 8 with the checks inlined.
COMPILES_FASTER = {"address": ["--param", "asan-instrumentation-with-call-threshold=0"], "thread": []}

# A fault at a page that traps is no sanitizer's report, and under AddressSanitizer no workspace is kept
# (csrc/cpu/workspace.h), so that each call faults its pages in.
LEFT_OUT = "not beyond_its_end and not faults_no_pages_in"


def main() -> int:
    records = [check_library(sanitizer) for sanitizer in FLAGS]
    records.append(check_emulation())
    print(f"saved {save('sanitize', records)}")
    return 1 if any(record["failed"] for record in records) else 0


def check_library(sanitizer: str) -> dict:
    under = environment_under(sanitizer)
    if under is None:
        raise SystemExit(f"sanitize: g++ has no {sanitizer} sanitizer, expected libasan, libubsan and libtsan")
    # More threads than cores: a race is one whatever the order in which threads ran.
    flags = " ".join([*FLAGS[sanitizer], *COMPILES_FASTER[sanitizer], "-g1"])
    environment = install(f"sanitize-{sanitizer}", flags, edit=unoptimized).environment()
    environment |= under | {"OMP_NUM_THREADS": "4"}
    # A report goes to the process's own stderr, which pytest's default capture would swallow.
    options = [*EVERY_CORE, "-x", "--max-worker-restart=0", "--capture=sys", "-k", LEFT_OUT]
    outcome, output = run_tests(sys.executable, [*options, *COMPILED], environment)
    if outcome.failed:
        print(output[-20000:])
    print(f"{sanitizer}: {outcome}", flush=True)
    return as_record(outcome, subject="library, CPU kernels", sanitizer=FLAGS[sanitizer][0])


def check_emulation() -> dict:
    outcome, output = run_tests(sys.executable, ["tests/cuda_host/test_sanitized.py"], {})
    if outcome.failed:
        print(output[-8000:])
    print(f"emulation: {outcome}")
    return as_record(
        outcome, subject="CUDA kernels, emulated", sanitizer=" and ".join(flags[0] for flags in FLAGS.values())
    )


if __name__ == "__main__":
    sys.exit(main())
