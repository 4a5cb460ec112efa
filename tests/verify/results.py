"""Runs pytest and counts its outcomes; saves a target's result beside the benchmarks of the same machine."""

import json
import os
import subprocess
import tempfile
import xml.etree.ElementTree as xml
from dataclasses import asdict, dataclass
from pathlib import Path

from eagle_kernels.bench.info import read_environment

from verify.variant import ROOT

FACTS = ("cpu_model", "cpu_cores", "cpu_isa", "version", "commit", "torch", "triton", "python", "date")
# As `make test` does: a worker per core, and threads that wait without spinning.
EVERY_CORE = ["-n", "auto", "--maxprocesses=8", "--dist", "worksteal"]


@dataclass(frozen=True)
class Outcome:
    passed: int
    skipped: int
    failed: int
    seconds: float  # from the collection of the tests to the last one's end


def run_tests(
    python: os.PathLike | str, arguments: list[str], environment: dict[str, str], longest: float | None = None
) -> tuple[Outcome, str]:
    """pytest in its own process, and its output. A process that dies or runs for `longest` seconds is one failure."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *arguments]
        environment = {"OMP_WAIT_POLICY": "passive"} | os.environ | environment
        process = {"cwd": ROOT, "env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        try:
            done = subprocess.run(command, **process, timeout=longest)
        except subprocess.TimeoutExpired as late:
            return Outcome(0, 0, 1, late.timeout), (late.stdout or b"").decode(errors="replace")
        output = done.stdout.decode(errors="replace")
        if not report.exists():
            return Outcome(0, 0, 1, 0.0), output
        (suite,) = xml.parse(report).getroot().iter("testsuite")
    total, skipped = int(suite.get("tests")), int(suite.get("skipped"))
    failed = int(suite.get("failures")) + int(suite.get("errors"))
    if done.returncode not in (0, 1):
        failed += 1
    return Outcome(total - skipped - failed, skipped, failed, round(float(suite.get("time")), 1)), output


def save(name: str, records: list[dict], **totals: object) -> Path:
    """bench/results/<machine>/verify/<name>.json."""
    facts = read_environment("cpu")
    path = _path_of(name, facts)
    path.parent.mkdir(parents=True, exist_ok=True)
    saved = {"environment": {fact: facts[fact] for fact in FACTS}, **totals, "records": records}
    path.write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")
    return path


def load(name: str) -> dict:
    """What `save` wrote for this machine's last run; no records where there was none."""
    path = _path_of(name, read_environment("cpu"))
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"records": []}


def _path_of(name: str, facts: dict) -> Path:
    return ROOT / "bench/results" / facts["device_slug"] / "verify" / f"{name}.json"


def as_record(outcome: Outcome, **facts: object) -> dict:
    return facts | asdict(outcome)
