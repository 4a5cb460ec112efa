"""`make tiles`: the kernels of the AMX tile unit on a processor with AVX-512-BF16 and without tiles, which are emulated
(emulated_tiles.h), over the tests that call the compiled library."""

import re
import sys
from pathlib import Path

from verify.core import COMPILED
from verify.results import EVERY_CORE, as_record, run_tests, save
from verify.variant import install, unoptimized

TILES = Path(__file__).with_name("emulated_tiles.h")


def main() -> int:
    environment = install("tiles", f"-include {TILES}", edit=grant_tiles).environment()
    outcome, output = run_tests(sys.executable, [*EVERY_CORE, *COMPILED], environment)
    if outcome.failed:
        print(output[-20000:])
    print(f"tiles: {outcome}")
    print(f"saved {save('tiles', [as_record(outcome, subject='CPU kernels, AMX tiles emulated')])}")
    return 1 if outcome.failed else 0


def grant_tiles(source: Path) -> None:
    """Makes the library take the processor for one with tiles."""
    unoptimized(source)
    isa = source / "csrc/cpu/isa.cpp"
    text, count = re.subn(
        r"bool grants_amx\(\) \{\n.*?\n\}\n", "bool grants_amx() { return true; }\n", isa.read_text(), flags=re.S
    )
    assert count == 1
    isa.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
