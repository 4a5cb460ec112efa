"""`make coverage`: the lines of Python (coverage.py) and C++ (gcov) that the suite runs, and those it does not.

Not counted: bench/, the plugins, which need their engine, Triton kernels, whose source Triton compiles and Python never
runs, and csrc/cuda, which nvcc compiles.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

from verify.core import CORE
from verify.results import EVERY_CORE, run_tests, save
from verify.variant import ROOT, Variant, install, unoptimized

# The part of the suite that starts no engine, measures nothing, and compiles nothing for long.
TESTS = [
    *CORE,
    "tests/engines/test_eligibility.py",
    "tests/models",
    "tests/test_checkpoint.py",
    "tests/test_cuda_backend.py",
    "tests/test_drafter_config.py",
    "tests/test_fuzz_configs.py",
    "tests/test_int4_checkpoint.py",
    "tests/test_model_shapes.py",
    "tests/test_mtp_config.py",
    "tests/test_quantized_checkpoint.py",
    "tests/test_quantized_linear.py",
    "tests/test_tensor_parallel.py",
    "tests/test_triton_backend.py",
    "tests/test_tuned_configs.py",
    "tests/test_warmup.py",
]
OMITTED = ["bench", "byte_eagle3", "engines", "triton_kernels"]


def main() -> int:
    variant = install("coverage", "--coverage", edit=unoptimized)
    for old in variant.source.glob("build/**/*.gcda"):
        old.unlink()
    data = ROOT / "build/coverage/python"
    omitted = ",".join(f"*/eagle_kernels/{folder}/*" for folder in OMITTED)
    environment = variant.environment() | {"COVERAGE_FILE": os.fspath(data)}
    settings = ROOT / "build/coverage/coveragerc"
    settings.write_text(f"[run]\nomit = {omitted}\n")
    options = ["--cov=eagle_kernels", f"--cov-config={settings}", "--cov-report="]
    outcome, output = run_tests(sys.executable, [*EVERY_CORE, *options, *TESTS], environment)
    print(output[-2000:])
    records = [*python_lines(data, variant), *cpp_lines(variant)]
    for record in records:
        print(f"{record['file']}: {record['covered']} of {record['lines']} lines; not {record['missing'] or 'one'}")
    for kind in (".py", ""):
        chosen = [record for record in records if (record["file"].endswith(".py")) == bool(kind)]
        covered, lines = (sum(record[field] for record in chosen) for field in ("covered", "lines"))
        print(f"{'Python' if kind else 'C++'}: {covered / lines:.1%} of {lines} lines")
    print(f"saved {save('coverage', records, tests=asdict(outcome))}")
    return 1 if outcome.failed else 0


def python_lines(data: Path, variant: Variant) -> list[dict]:
    report = data.with_name("lines.json")
    command = [sys.executable, "-m", "coverage", "json", f"--data-file={data}", "-o", report, "-q"]
    subprocess.run(command, check=True, env=variant.environment())
    files = json.loads(report.read_text())["files"]
    return [
        record_of("python/" + name.partition("/site/")[2], file["executed_lines"], file["missing_lines"])
        for name, file in ((os.path.abspath(name), file) for name, file in files.items())
    ]


def cpp_lines(variant: Variant) -> list[dict]:
    """A line of a kernel counts as run where one of its instruction sets ran it."""
    counts: dict[str, dict[int, int]] = {}
    for notes in sorted((variant.source / "build").glob("**/*.gcno")):
        report = subprocess.run(["gcov", "--json-format", "--stdout", notes], capture_output=True, check=True).stdout
        for file in (file for line in report.splitlines() for file in json.loads(line)["files"]):
            if file["file"].startswith("csrc/"):  # the build's paths begin in the checkout
                lines = counts.setdefault(file["file"], {})
                for line in file["lines"]:
                    lines[line["line_number"]] = lines.get(line["line_number"], 0) + line["count"]
    return [
        record_of(file, [n for n, count in lines.items() if count], [n for n, count in lines.items() if not count])
        for file, lines in sorted(counts.items())
    ]


def record_of(file: str, executed: list[int], missing: list[int]) -> dict:
    return {"file": file, "lines": len(executed) + len(missing), "covered": len(executed), "missing": ranges(missing)}


def ranges(numbers: list[int]) -> str:
    """1, 2, 3, 7 as "1-3, 7"."""
    parts = []
    for _, group in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ", ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
