"""What a session on a GPU runs, in order of value: the commands of each stage, and what it leaves to be kept."""

import json
import sys
import xml.etree.ElementTree
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Files that the stages write before they go into their JSON; commands name them from ROOT, where they run.
WORK_NAME = "build/gpu_work"
WORK = ROOT / WORK_NAME

Command = Sequence[str]


# The tools slow a kernel 10 to 100 times: odd sizes of every op, where a missing mask shows.
_SANITIZED = "(bf16-K3-H101 or bf16-5- or bf16-int64-1152) and (float64 or every_rank)"


@dataclass(frozen=True)
class Stage:
    """Commands that run one after the other for at most `limit` seconds together, and what they leave to be kept."""

    name: str
    limit: float
    commands: Callable[[str], list[Command]]  # for a device
    result: Callable[[], object] = lambda: None
    needs: str | None = None  # a program without which the stage is skipped
    goes_on: bool = False  # a later call takes up what a cut one left; others are not begun again


def _cli(*arguments: str) -> Command:
    return [sys.executable, "-u", "-m", "eagle_kernels.bench.cli", *arguments]


def _pytest(*arguments: str) -> Command:
    return [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]


def _bench(device: str, name: str, *arguments: str) -> Command:
    """A run that goes on with what its JSON holds. On a CPU a token of it, to try the stages out."""
    json_file = ["--json", f"{WORK_NAME}/{name}.json", "--resume"]
    small = ["--preset", "qwen2.5-0.5b", "--tokens", "1,8", "--min-time", "0.02"] if device == "cpu" else []
    # argparse takes the last one given.
    return _cli("bench", "--device", device, *arguments, *small, *json_file)


def _linear_curve(device: str) -> list[Command]:
    what = ["--forms", "none", "--baselines", "linear", "--preset", "distinct", "--tokens", "1,4,16,64,128,256"]
    return [_bench(device, "linear-curve", *what, "--min-time", "0.1")]


def _op_table(device: str) -> list[Command]:
    rows = ["--preset", "distinct", "--tokens", "1,4,16,32,64,128,256,512,4096"]
    # Triton beside what the plan takes: which of the two is faster at small T is for a GPU to say.
    backends = "auto" if device == "cpu" else "auto,triton"
    linear = ["--forms", "op", "--backends", backends, "--baselines", "eager,slices,linear", *rows]
    memory = ["--op", "norm_concat,capture_hidden,add_rms_norm,vocab_parallel_embedding"]
    shapes = ["--preset", "llama3.1-8b", "deepseek-v3", "gemma3-27b", "--tokens", "1,16,64,512,4096,65536"]
    return [
        _bench(device, "op-table", *linear, "--min-time", "0.1"),
        _bench(device, "op-table", *memory, *shapes, "--min-time", "0.1"),
    ]


def _sweeps(device: str) -> list[Command]:
    compiled = ["--baselines", "eager,compile,inductor-max,liger,flashinfer,vllm", "--tokens", "1,16,64,256,1024"]
    tune = ["--dry-run", "--tokens", "16"] if device == "cpu" else ["--write", f"{WORK_NAME}/configs", "--missing"]
    shapes = ["--preset", "llama3.1-8b", "deepseek-v3:mtp", "deepseek-v3", "llama3.3-70b", "gpt-oss-120b"]
    return [
        _bench(device, "sweeps", *compiled, "--preset", "llama3.1-8b", "deepseek-v3:mtp"),
        _cli("tune", *shapes, *tune),
    ]


def _host_cost(device: str) -> list[Command]:
    return [_pytest("tests/host_overhead", "--benchmark-enable", f"--benchmark-json={WORK_NAME}/host-cost.json")]


def read_json(path: Path) -> dict | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write_json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def _read_sweeps() -> dict:
    tables = {path.name: read_json(path) for path in (WORK / "configs").glob("*.json")}
    return {"run": read_json(WORK / "sweeps.json"), "configs": tables}


def _test_summary(path: Path) -> dict | None:
    """Counts, and the names of what failed, from pytest's JUnit file."""
    if not path.exists():
        return None
    suites = list(xml.etree.ElementTree.parse(path).getroot().iter("testsuite"))
    counts = {name: sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors")}
    counts["skipped"] = sum(int(suite.get("skipped", 0)) for suite in suites)
    cases = [case for suite in suites for case in suite.iter("testcase")]
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    return counts | {"failed": [f"{case.get('classname')}::{case.get('name')}" for case in failed]}


def _host_summary(path: Path) -> dict | None:
    """Medians in us by benchmark, without the samples, which are megabytes."""
    run = read_json(path)
    if run is None:
        return None
    fields = ("median", "iqr", "min")
    cases = {
        case["name"]: {field: round(case["stats"][field] * 1e6, 3) for field in fields} for case in run["benchmarks"]
    }
    return {"machine": run["machine_info"]["node"], "date": run["datetime"], "microseconds": cases}


STAGES = (
    Stage("library", 60, lambda device: [_cli("info")], lambda: read_json(WORK / "library.json")),
    Stage(
        "gpu-tests",
        300,
        lambda device: [_pytest("tests/gpu", "-m", "gpu", "--tb=short", f"--junitxml={WORK_NAME}/gpu-tests.xml")],
        lambda: _test_summary(WORK / "gpu-tests.xml"),
    ),
    Stage(
        "sanitizer",
        180,
        lambda device: [["bash", "tests/gpu/sanitize.sh", "tests/gpu", "-k", _SANITIZED]],
        needs="compute-sanitizer",
    ),
    Stage("linear-curve", 120, _linear_curve, lambda: read_json(WORK / "linear-curve.json"), goes_on=True),
    Stage("op-table", 560, _op_table, lambda: read_json(WORK / "op-table.json"), goes_on=True),
    Stage("host-cost", 120, _host_cost, lambda: _host_summary(WORK / "host-cost.json")),
    Stage("sweeps", 560, _sweeps, _read_sweeps, goes_on=True),
)
