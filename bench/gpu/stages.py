"""What a session on a GPU runs, in order of value: the commands of each stage, and the results to keep."""

import json
import os
import shutil
import sys
import xml.etree.ElementTree
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Where stages write files that then go into their JSON; commands run in ROOT and name them relative to it.
WORK_NAME = "build/gpu_work"
WORK = ROOT / WORK_NAME
# The package with the library of alternatives, for separate processes; it exists where package.py found that library.
_ALTERNATIVES_NAME = "build/gpu_alternatives"
ALTERNATIVES = ROOT / _ALTERNATIVES_NAME

Command = Sequence[str]

# The projection first: if time is short, its failures matter most. Each command starts its workers once; a command for
# each file would start them ten times.
_TEST_FILES = {
    "projection": ("test_norm_concat_linear.py", "test_norm_concat_linear_quantized.py"),
    "others": (
        "test_static_calls.py",
        "test_emulation.py",
        "test_norm_concat.py",
        "test_mtp_chain.py",
        "test_capture_hidden.py",
        "test_store_context_kv.py",
        "test_vocab_parallel_embedding.py",
        "test_add_rms_norm.py",
        "test_plugins.py",
    ),
}
_MAX_WORKERS = 14  # of the tests; a CUDA context takes 0.5 GB

# The tools slow a kernel down 10 to 100 times, hence few cases: five for the flavors of the fused kernel, of which a
# block without a cluster and K=3 come first, three for those of the warpgroup kernel (on sm_90), one for the split
# kernels of C++, two for Triton's, and seven for codes. These run first: in wide pairs whose ranges have columns of two
# chunks and in pairs, which no sanitizer has seen, fused in a block without a cluster, the same and split with scales
# that pass through the ring, and by warpgroups.
_SANITIZED = (
    ("cuda", "bf16-K1-H64-T1-chunk"),
    ("cuda", "bf16-K3-H64-T8-chunk-packed"),
    ("cuda", "bf16-K2-H896-T2-concat-D257"),
    ("cuda", "bf16-K2-H64-T5-chunk-gain_none-offset1"),
    ("cuda", "bf16-K2-H64-T8-chunk-offset1-residuals_all-indices_table"),
    ("cuda", "bf16-K3-H2880-T17-concat"),
    ("cuda", "bf16-K3-H896-T33-chunk-D257-outliers"),
    ("cuda", "bf16-K2-H896-T47-chunk-D257-residuals_all-indices_table"),
    ("cuda", "bf16-K2-H896-T3-chunk-D97-post_dtype"),
    ("triton", "fp16-K2-H2880-T16-concat-D97"),
    ("triton", "bf16-K3-H896-T33-chunk-D257-outliers"),
)
_SANITIZED_CODES = (
    "test_float64_truth[cuda-nvfp4-bf16-K3-H2048-T5-concat-D6144]",
    "test_float64_truth[cuda-fp8_row-bf16-K2-H1024-T9-chunk-D4096-gain_fp32]",
    "test_every_code_and_scale[cuda-fp8_row-32-dtype0-16]",
    "test_every_code_and_scale[cuda-nvfp4-128-dtype0-16]",
    "test_every_code_and_scale[cuda-mxfp8-128-dtype0-16]",
    "test_every_code_and_scale[cuda-mxfp4-128-dtype0-64]",
    "test_float64_truth[cuda-fp8_row-bf16-K3-H160-T40-concat-D150-gain_fp32-offset1-residuals_some]",
)

_TUNED = ("llama3.1-8b", "gpt-oss-120b", "llama3.3-70b")
_DRAFTERS = (
    "deepseek-v4-flash:mtp",
    "deepseek-v4-flash:dspark",
    "deepseek-v4-flash:context_kv",
    "qwen4-exp:mtp",
    "qwen3-8b:dflash",
    "qwen3-8b:context_kv",
    "llama3.1-8b:first_layer_qkv",
)
_EIGHT_SHAPES = (*_TUNED, "deepseek-v3", "deepseek-v3:mtp", "qwen2.5-0.5b", "gemma3-27b", "gemma3-1b")


@dataclass(frozen=True)
class Stage:
    """Commands that run one after the other for at most `limit` seconds together, and their result, which is kept.

    A later call resumes with the first command that a cut one did not finish.
    """

    name: str
    limit: float
    commands: Callable[[str], list[Command]]  # for a device
    result: Callable[[], object] = lambda: None
    needs: str | None = None  # a program without which the stage is skipped
    restore: Callable[[dict], None] = lambda result: None  # puts a cut call's result where its commands look


_CLI = ("-m", "eagle_kernels.bench.cli")


def _cli(*arguments: str, program: Sequence[str] = _CLI) -> Command:
    return [sys.executable, "-u", *program, *arguments]


def _pytest(*arguments: str) -> Command:
    return [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]


def _bench(device: str, name: str, *arguments: str, program: Sequence[str] = _CLI) -> Command:
    """A run that resumes from its JSON. On a CPU its sizes are tiny, to try the stages out."""
    json_file = ["--json", f"{WORK_NAME}/{name}.json", "--resume"]
    small = ["--preset", "qwen2.5-0.5b", "--tokens", "1,8", "--min-time", "0.02"] if device == "cpu" else []
    # argparse takes the last one given.
    return _cli("bench", "--device", device, *arguments, *small, *json_file, program=program)


def _backends(device: str) -> str:
    return "auto" if device == "cpu" else "auto,triton"


def _library(device: str) -> list[Command]:
    """Load the library; one call of every op on each backend and plan, checked against float64; last what the driver
    says about the device, which may spend its 20 s in vain."""
    if device != "cuda":
        return [_cli("info")]
    once = ["--forms", "op", "--baselines", "none", "--timer", "eager", "--min-time", "0.001"]
    dense = ["--op", "all", "--backends", "auto,triton", "--preset", "qwen2.5-0.5b", "--tokens", "1,16,32,64,128,129"]
    codes = ["--op", "norm_concat_linear", "--weights", "fp8_row,fp8_block128,int8_row", "--preset", "llama3.1-8b"]
    codes += ["--tokens", "1,17,33,64,128,129"]
    first_calls = [_bench(device, "first-calls", *what, *once) for what in (dense, codes)]
    return [_cli("info"), *first_calls, ["timeout", "20", sys.executable, "-m", "bench.gpu.device"]]


def _gpu_tests(device: str) -> list[Command]:
    options = ["-m", "gpu", "--tb=short", "--durations=10"]
    options += ["-n", str(min(_MAX_WORKERS, os.cpu_count() or 1)), "--dist", "worksteal"] if find_spec("xdist") else []
    # The thread method ends the worker: a kernel that hangs keeps the main thread inside the driver.
    options += ["--timeout", "120", "--timeout-method", "thread"] if find_spec("pytest_timeout") else []
    return [
        _pytest(*(f"tests/gpu/{file}" for file in files), *options, f"--junitxml={WORK_NAME}/tests-{name}.xml")
        for name, files in _TEST_FILES.items()
    ]


def _sanitizer(device: str) -> list[Command]:
    dense, codes = _TEST_FILES["projection"]
    cases = [f"tests/gpu/{codes}::{case}" for case in _SANITIZED_CODES]
    cases += [f"tests/gpu/{dense}::test_float64_truth[{backend}-{case}]" for backend, case in _SANITIZED]
    return [["bash", "tests/gpu/sanitize.sh", "--tools", "memcheck racecheck", *cases]]


# Other settings of the kernels, each in a run of its own with the same baseline: (setting, what is timed).
_FEW_ROWS = "1,2,4,8,9,12,16"
_MORE_ROWS = "17,24,32,40,48,64"
_DENSE = ("--forms", "op", "--baselines", "linear", "--tokens")
_VARIANTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "late": ("EAGLE_KERNELS_EARLY_WEIGHT=0", (*_DENSE, _FEW_ROWS)),
    "split": ("EAGLE_KERNELS_BATCH_INVARIANT=1", (*_DENSE, "17,32,64,128")),
}


def _decode_curve(device: str) -> list[Command]:
    """Both backends beside the library's product alone; for more rows also the two steps that plans take for still
    more; what the library of alternatives makes settings (alternatives.py), since only a GPU can say whether models
    choose well; ncu's counters of one call of each kernel and of the product, whose kernel they name; the variants."""
    what = ["--preset", "llama3.1-8b", "gpt-oss-120b", "qwen2.5-0.5b", "--min-time", "0.05"]
    what += [] if device == "cpu" else ["--timer", "graph,spaced"]
    cuda = "auto" if device == "cpu" else "cuda"
    both = [*what, "--forms", "op", "--backends", "auto" if device == "cpu" else "cuda,triton", "--baselines", "linear"]
    more = [*what, "--forms", "op", "--backends", cuda, "--baselines", "two-step,linear", "--tokens", _MORE_ROWS]
    commands = [_bench(device, "decode-curve", *arguments) for arguments in ([*both, "--tokens", _FEW_ROWS], more)]
    if device == "cuda" and ALTERNATIVES.exists():
        commands.append(_cli(f"{WORK_NAME}/decode-curve-alternatives.json", program=(_ALTERNATIVES_NAME,)))
    if device == "cuda" and (ncu := shutil.which("ncu")):
        # The card's clocks stay as they are. ncu empties the caches before each kernel, and prints a line for each of
        # its metrics.
        profiled = ["--profile-from-start", "off", "--clock-control", "none", *_of_sections()]
        # Without the advice of ncu's rules: it was most of an output that outgrew what the stage keeps.
        log = ["--apply-rules", "no", "--csv", "--log-file", f"{WORK_NAME}/ncu.csv"]
        commands.append([ncu, *profiled, *log, sys.executable, "-m", "eagle_kernels.bench.gpu.counters"])
    for variant, (setting, timed) in _VARIANTS.items():
        commands.append(["env", setting, *_bench(device, f"decode-curve-{variant}", *what, "--backends", cuda, *timed)])
    return commands


def _of_sections() -> list[str]:
    names = ("SpeedOfLight", "LaunchStats", "Occupancy", "WarpStateStats", "SchedulerStats", "MemoryWorkloadAnalysis")
    return [word for name in names for word in ("--section", name)]


def _op_table(device: str) -> list[Command]:
    timers = [] if device == "cpu" else ["--timer", "graph,spaced,eager"]
    # Triton beside the plan's choice: only a GPU can say which of the two is faster at small T. At the largest T also
    # the two steps that the plan takes for more rows: whether it takes them soon enough (_ONE_PASS_ROWS of plan.py).
    linear = ["--forms", "op", "--backends", _backends(device), "--preset", *_EIGHT_SHAPES, *timers]
    few = ["--baselines", "eager,slices,linear", "--tokens", "1,8,16,32"]
    many = ["--baselines", "eager,slices,two-step,linear", "--tokens", "48,64,128"]
    more = ["--forms", "op", "--baselines", "eager,linear", "--preset", "llama3.1-8b", "deepseek-v3"]
    return [
        *(_bench(device, f"op-table-{name}", *what, "--min-time", "0.05") for name, what in _tables(device).items()),
        _bench(device, "op-table", *linear, *few, "--min-time", "0.05"),
        _bench(device, "op-table", *linear, *many, "--min-time", "0.05"),
        _bench(device, "op-table", *more, "--tokens", "129,256,512,4096", "--min-time", "0.05"),
    ]


def _tables(device: str) -> dict[str, list[str]]:
    """Runs of their own, so that each has a file: every format beside the op on a dense weight, and the other ops. In
    `graph` alone: each row has weights or rows of its own, and making them takes longer than timing them."""
    formats = "fp8_row" if device == "cpu" else "fp8_row,fp8_block128,int8_row,mxfp8,mxfp4,nvfp4"
    graph = [] if device == "cpu" else ["--timer", "graph"]
    codes = ["--op", "norm_concat_linear", "--weights", formats, "--forms", "op,dense", "--baselines", "none"]
    memory = ["--op", "norm_concat,capture_hidden,vocab_parallel_embedding,add_rms_norm", "--forms", "op"]
    return {
        "codes": [*codes, "--preset", "llama3.1-8b", "--tokens", "1,8,16,64,256", *graph],
        "memory": [*memory, "--preset", "llama3.1-8b", "--tokens", "1:65536:x4", *graph],
    }


def _tune(device: str) -> list[Command]:
    rows = ["--tokens", "16"] if device == "cpu" else ["--tokens", "1,16,32,64,128"]
    jobs = str(os.cpu_count() or 1)
    where = ["--dry-run"] if device == "cpu" else ["--write", f"{WORK_NAME}/configs", "--missing", "--jobs", jobs]
    return [_cli("tune", "--preset", preset, *rows, *where) for preset in _TUNED]


def _host_cost(device: str) -> list[Command]:
    return [_pytest("tests/host_overhead", "--benchmark-enable", f"--benchmark-json={WORK_NAME}/host-cost.json")]


def _sweeps(device: str) -> list[Command]:
    """The compiled baselines last: Inductor takes what time is left."""
    compiled = ["--baselines", "eager,compile,inductor-max,liger,flashinfer,vllm", "--tokens", "1,16,64,256,1024"]
    drafters = ["--op", "norm_concat_linear,capture_hidden,store_context_kv", "--preset", *_DRAFTERS]
    return [
        _bench(device, "sweeps", *drafters, "--tokens", "1,16,128", "--min-time", "0.05"),
        _bench(device, "sweeps", *compiled, "--preset", "llama3.1-8b", "deepseek-v3:mtp"),
    ]


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


def _read_op_table() -> dict:
    tables = {name: read_json(WORK / f"op-table-{name}.json") for name in _tables("cuda")}
    return {"run": read_json(WORK / "op-table.json"), "variants": tables}


def _run_of(name: str) -> Callable[[], dict | None]:
    return lambda: read_json(WORK / f"{name}.json")


def _restore_run(name: str) -> Callable[[dict], None]:
    """Puts the rows of a cut run where bench --resume looks for them."""
    return lambda run: write_json(WORK / f"{name}.json", run)


def _read_library() -> dict:
    files = {"library": "library", "run": "first-calls", "device": "device"}
    return {name: read_json(WORK / f"{file}.json") for name, file in files.items()}


def _read_tests() -> dict[str, dict]:
    """Counts and failures of each command, of this call and of those before it."""
    earlier = read_json(WORK / "gpu-tests.json") or {}
    reports = {name: WORK / f"tests-{name}.xml" for name in _TEST_FILES}
    return earlier | {name: _test_summary(path) for name, path in reports.items() if path.exists()}


def _test_summary(path: Path) -> dict:
    """Counts, and what failed with its message and the end of its traceback, from pytest's JUnit file."""
    suites = list(xml.etree.ElementTree.parse(path).getroot().iter("testsuite"))
    counts = {name: sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors")}
    counts["skipped"] = sum(int(suite.get("skipped", 0)) for suite in suites)
    cases = [case for suite in suites for case in suite.iter("testcase")]
    reports = [(case, report) for case in cases for report in (*case.iter("failure"), *case.iter("error"))]
    failed = [_failure(case, report) for case, report in reports[:_MAX_FAILURES]]
    skips = [report.get("message", "") for case in cases for report in case.iter("skipped")]
    return counts | {"failed": failed, "skips": {reason: skips.count(reason) for reason in sorted(set(skips))}}


_MAX_FAILURES = 100  # per command; the cases of a table fail alike


def _failure(case: xml.etree.ElementTree.Element, report: xml.etree.ElementTree.Element) -> dict[str, str]:
    message, text = report.get("message", ""), report.text or ""
    return {"test": f"{case.get('classname')}::{case.get('name')}", "message": message[:500], "text": text[-1500:]}


def _read_curve() -> dict:
    counters = WORK / "ncu.csv"
    text = counters.read_text(encoding="utf-8", errors="replace") if counters.exists() else ""
    names = (*_VARIANTS, "alternatives")
    variants = {variant: read_json(WORK / f"decode-curve-{variant}.json") for variant in names}
    return {"run": read_json(WORK / "decode-curve.json"), "variants": variants, "ncu": text[:400_000]}


def _restore_run_of(name: str) -> Callable[[dict], None]:
    """`_restore_run` for a result that has more than the run: its variants, and what no run resumes from."""

    def restore(result: dict) -> None:
        variants = {f"{name}-{variant}": run for variant, run in result.get("variants", {}).items()}
        for file, run in {name: result.get("run"), **variants}.items():
            if run:
                write_json(WORK / f"{file}.json", run)

    return restore


def _read_tables() -> dict:
    return {path.name: read_json(path) for path in (WORK / "configs").glob("*.json")}


def _restore_tables(tables: dict) -> None:
    for name, table in tables.items():
        write_json(WORK / "configs" / name, table)


def _host_summary() -> dict | None:
    """Medians in us by benchmark, without the samples, which are megabytes."""
    run = read_json(WORK / "host-cost.json")
    if run is None:
        return None
    fields = ("median", "iqr", "min")
    cases = {
        case["name"]: {field: round(case["stats"][field] * 1e6, 3) for field in fields} for case in run["benchmarks"]
    }
    return {"date": run["datetime"], "microseconds": cases}


# 825 s in all, three calls of 275; at most eight stages, since no more files come back from a lent machine.
STAGES = (
    Stage("library", 60, _library, _read_library, restore=_restore_run_of("first-calls")),
    Stage(
        "gpu-tests",
        180,
        _gpu_tests,
        _read_tests,
        restore=lambda result: write_json(WORK / "gpu-tests.json", result),
    ),
    Stage("sanitizer", 150, _sanitizer, needs="compute-sanitizer"),
    Stage("decode-curve", 140, _decode_curve, _read_curve, restore=_restore_run_of("decode-curve")),
    Stage("op-table", 160, _op_table, _read_op_table, restore=_restore_run_of("op-table")),
    Stage("tune", 60, _tune, _read_tables, restore=_restore_tables),
    Stage("host-cost", 30, _host_cost, _host_summary),
    Stage("sweeps", 45, _sweeps, _run_of("sweeps"), restore=_restore_run("sweeps")),
)
