"""The stages of bench/gpu_session.sh: bounded in time, saved, resumed, and never begun twice."""

import ctypes
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from eagle_kernels.bench import cli
from eagle_kernels.bench.gpu import alternatives, package, session, stages
from eagle_kernels.bench.gpu import device as device_facts
from eagle_kernels.bench.gpu.stages import Stage

from cases import CASES, operands
from eagle_kernels import library, plan

ROOT = Path(__file__).parents[1]


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place for the stages' files, and no package to prepare."""
    folder = tmp_path / "work"
    for module in (session, stages):
        monkeypatch.setattr(module, "WORK", folder)
    monkeypatch.setattr(session, "prepare_package", lambda device, library: dict(os.environ))
    return folder


def stage(name: str, code: str, limit: float = 60, **options: object) -> Stage:
    return Stage(name, limit, lambda device: [[sys.executable, "-c", code]], **options)


def gpu_tests(name: str) -> ModuleType:
    """A module of tests/gpu, loaded by its path because tests/ has one of the same name."""
    spec = importlib.util.spec_from_file_location(f"gpu_{name}", ROOT / "tests/gpu" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def counting(work: Path, more: str = "") -> str:
    """A program that notes each start, as bench notes each row."""
    file = str(work.parent / "starts")
    return f"open({file!r}, 'a').write('x'); print('ran'); {more}"


def run(stages: list[Stage], out: Path, seconds: float = 100, done: Path | None = None) -> dict[str, dict]:
    session.run_stages(stages, out, done, "cpu", seconds)
    return {each.name: json.loads((out / f"{each.name}.json").read_text()) for each in stages}


def test_a_finished_stage_is_not_run_again(work: Path, tmp_path: Path) -> None:
    once = stage("once", counting(work), result=lambda: {"rows": 3})
    first = run([once], tmp_path / "out")["once"]
    assert (first["status"], first["output_tail"], first["result"]) == ("done", "ran\n", {"rows": 3})
    assert run([once], tmp_path / "out")["once"] == first
    # A fresh machine, whose --out is empty, with the files of the previous call carried to it.
    assert run([once], tmp_path / "fresh", done=tmp_path / "out")["once"] == first
    assert (tmp_path / "starts").read_text() == "x"


def test_a_failure_is_told_and_the_next_stage_runs(work: Path, tmp_path: Path) -> None:
    stages = [stage("bad", "print('no GPU'); raise SystemExit(3)"), stage("good", "print('fine')")]
    records = run(stages, tmp_path)
    assert [record["status"] for record in records.values()] == ["failed", "done"]
    assert "no GPU" in records["bad"]["output_tail"]
    assert session.run_stages(stages, tmp_path, None, "cpu", 100) == 1


def test_a_wrong_table_does_not_stop_the_next_one(work: Path, tmp_path: Path) -> None:
    programs = ["raise SystemExit(1)", "print('second')"]
    both = Stage("both", 60, lambda device: [[sys.executable, "-c", program] for program in programs])
    record = run([both], tmp_path)["both"]
    assert (record["status"], record["output_tail"]) == ("failed", "second\n")


def test_a_stage_without_its_tool_is_skipped(work: Path, tmp_path: Path) -> None:
    record = run([stage("tool", "print('ran')", needs="no-such-sanitizer")], tmp_path)["tool"]
    assert (record["status"], record["output_tail"]) == ("skipped", "no-such-sanitizer is not on PATH")


SLOW = """
import json, signal, sys, time
path = sys.argv[-1] if sys.argv[1:] else None
try:
    while True: time.sleep(0.05)
except KeyboardInterrupt:
    print("interrupted, rows kept")
    sys.exit(130)
"""


def test_a_stage_out_of_time_is_interrupted_and_keeps_its_rows(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_SAVE_EVERY", 0.3)
    monkeypatch.setattr(session, "_LEAST", 0.5)
    kept = {"records": [1, 2]}
    rows = work / "slow.json"

    def restore(result: dict) -> None:
        stages.write_json(rows, result)

    slow = stage("slow", SLOW, limit=1.5, result=lambda: kept, restore=restore)
    never = stage("never", "print('ran')")
    records = run([slow, never], tmp_path / "out", seconds=1.6)
    assert records["slow"]["status"] == "cut" and records["slow"]["result"] == kept
    assert "interrupted, rows kept" in records["slow"]["output_tail"]
    assert records["never"]["status"] == "not started"
    seconds_of_first = records["slow"]["seconds"]

    # The next call finds the rows where bench --resume looks for them, and starts the stage that was not started.
    code = f"import json, time; time.sleep(0.5); assert json.load(open({str(rows)!r})) == {kept}"
    records = run([stage("slow", code, restore=restore), never], tmp_path / "out")
    assert [record["status"] for record in records.values()] == ["done", "done"]
    assert records["slow"]["seconds"] >= seconds_of_first + 0.4  # of both calls


def test_a_stage_goes_on_with_the_command_that_was_cut(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_LEAST", 0.5)
    starts = tmp_path / "starts"
    say = f"import sys; open({str(starts)!r}, 'a').write(sys.argv[1])"
    programs = [[say, "a"], [f"{say}; sys.exit(3)", "b"], [f"{say}; import time; time.sleep(60)", "c"], [say, "d"]]

    def files(commands: list[list[str]]) -> Stage:
        return Stage("files", 5, lambda device: [[sys.executable, "-c", *command] for command in commands])

    first = run([files(programs)], tmp_path / "out")["files"]
    assert (first["status"], list(first["finished"].values())) == ("cut", [0, 3])
    assert starts.read_text() == "abc"
    # The same commands, the third one quick this time: what has finished is not run again, failed or not.
    quick = [*programs[:2], [say, "c"], programs[3]]
    second = run([files(quick)], tmp_path / "fresh", done=tmp_path / "out")["files"]
    assert (second["status"], list(second["finished"].values())) == ("failed", [0, 3, 0, 0])
    assert starts.read_text() == "abccd"
    assert run([files(quick)], tmp_path / "fresh")["files"] == second


FAILING = """
import pytest

@pytest.mark.parametrize("n", range(3))
def test_n(n: int) -> None:
    if n == 2:
        pytest.skip("no third")
    assert n == 1, f"the value is {n}"
"""


def test_failures_of_the_tests_keep_their_messages_over_two_calls(work: Path, tmp_path: Path) -> None:
    """Each test file runs in its own call, as after a cut, and must keep the failures of the earlier ones."""
    read = next(each for each in stages.STAGES if each.name == "gpu-tests")
    for name in stages._TEST_FILES:
        file = f"test_{name}.py"
        (tmp_path / file).write_text(FAILING)
        report = work / f"tests-{name}.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", file]
        subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=100)
        kept = read.result()
        report.unlink()
        read.restore(kept)
    assert list(kept) == ["projection", "others"]
    for file in kept.values():
        (failure,) = file["failed"]
        assert failure["test"].endswith("::test_n[0]") and "the value is 0" in failure["message"]
        assert "assert 0 == 1" in failure["text"]
        assert file["skips"] == {"no third": 1} and (file["tests"], file["failures"]) == (3, 1)
    record = {"stage": "gpu-tests", "status": "failed", "result": kept}
    assert session._result_text(record) == ": 6 tests, 2 skipped, 2 failed"


def test_a_command_without_rows_to_keep_starts_again(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """host-cost, cut at the end of a call that had less time left than it takes, was never run again."""
    monkeypatch.setattr(session, "_LEAST", 0.5)
    assert run([stage("host-cost", SLOW, limit=30)], tmp_path, seconds=1.0)["host-cost"]["status"] == "cut"
    assert run([stage("host-cost", "print('again')", limit=30)], tmp_path)["host-cost"]["status"] == "done"


CLI = "eagle_kernels.bench.cli"  # the word before a call's arguments


def test_stages_in_order_of_value_name_commands_that_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every `eagle-kernels` call of every stage is parsed by the real parser: a renamed option would end a session."""
    parser = cli.build_parser()
    monkeypatch.setattr(stages, "ALTERNATIVES", tmp_path)
    names = [each.name for each in stages.STAGES]
    expected = ["library", "gpu-tests", "sanitizer", "decode-curve", "op-table", "tune", "host-cost", "sweeps"]
    assert names == expected  # 8 files at most come back from a lent machine
    assert sum(each.limit for each in stages.STAGES) == 3 * 275  # a machine is lent for 900 s
    for device in ("cuda", "cpu"):
        for command in (command for each in stages.STAGES for command in each.commands(device)):
            if CLI not in command:
                continue
            arguments = parser.parse_args(command[command.index(CLI) + 1 :])
            assert arguments.command in ("info", "bench", "tune")
    files = [file for of_command in stages._TEST_FILES.values() for file in of_command]
    assert sorted(files) == sorted(path.name for path in (ROOT / "tests/gpu").glob("test_*.py"))
    cases = {case.id: case for case in (*CASES, *gpu_tests("test_norm_concat_linear").OF_WARPGROUPS)}
    sanitized = [cases[id] for backend, id in stages._SANITIZED if backend == "cuda"]
    fused = [case for case in sanitized if operands(case).N <= library.MAX_CUDA_DECODE_ROWS and not case.post_norm]
    assert (len(fused), len(sanitized)) == (5, 9)
    assert [len(case.widths) for case in fused[:2]] == [1, 3] and fused[0].widths[0] <= 128  # one range, three or more
    (sanitizer,) = stages._sanitizer("cuda")
    ids = sanitizer[sanitizer.index("memcheck racecheck") + 1 :]
    assert len(ids) == 18
    collect = [sys.executable, "-m", "pytest", "--collect-only", "-q", *ids]  # fails where pytest finds one of them not
    collected = subprocess.run(collect, cwd=ROOT, capture_output=True, text=True)
    assert collected.returncode == 0, collected.stdout
    for path in ("tests/gpu/sanitize.sh", "tests/host_overhead"):
        assert (ROOT / path).exists()


def test_the_curve_has_every_variant_beside_the_product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows: each setting of the fused kernel. More rows: the two steps, which no setting makes a plan choose."""
    parser = cli.build_parser()
    monkeypatch.setattr(stages, "ALTERNATIVES", tmp_path / "alternatives")
    found: dict[tuple[str, str], list] = {}  # by settings and file: T and columns
    for command in stages._decode_curve("cuda") + stages._op_table("cuda"):
        if CLI not in command:
            continue  # ncu's, where it is installed
        arguments = parser.parse_args(command[command.index(CLI) + 1 :])
        settings = " ".join(word for word in command if word.startswith("EAGLE_KERNELS_"))
        columns = [*arguments.backends, *arguments.baselines]
        found.setdefault((settings, arguments.json.stem), []).append((arguments.tokens, columns))
    few, more = [1, 2, 4, 8, 9, 12, 16], [17, 24, 32, 40, 48, 64]
    assert found["", "decode-curve"] == [(few, ["cuda", "triton", "linear"]), (more, ["cuda", "two-step", "linear"])]
    assert found["EAGLE_KERNELS_EARLY_WEIGHT=0", "decode-curve-late"] == [(few, ["cuda", "linear"])]
    of_split = [([17, 32, 64, 128], ["cuda", "linear"])]
    assert found["EAGLE_KERNELS_BATCH_INVARIANT=1", "decode-curve-split"] == of_split
    assert [tokens for tokens, columns in found["", "op-table"] if "two-step" in columns] == [[48, 64, 128]]


def test_alternatives_are_timed_where_their_library_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "ALTERNATIVES", tmp_path / "alternatives")
    without = stages._decode_curve("cuda")
    (tmp_path / "alternatives").mkdir()
    (command,) = [each for each in stages._decode_curve("cuda") if each not in without]
    assert command[2:] == [stages._ALTERNATIVES_NAME, "build/gpu_work/decode-curve-alternatives.json"]


def test_every_setting_is_one_that_the_library_or_a_plan_reads() -> None:
    """Inside a setting the variable is there and the plan is made anew; after it nothing is left."""
    plans = []
    workload = SimpleNamespace(plan=lambda: plans.append((plan.SETTINGS, plan.MAX_ROWS_OF_SCALED_SUMS)))
    before, most = dict(os.environ), plan.MAX_ROWS_OF_SCALED_SUMS
    names = {column.partition(":")[2] for question in alternatives._QUESTIONS for column in question.columns}
    sources = "".join(path.read_text() for path in (ROOT / "csrc/cuda").glob("*.cu*"))
    for name in sorted(names - {""}):
        with alternatives._set(name, workload):
            new = {key: value for key, value in os.environ.items() if before.get(key) != value}
        assert dict(os.environ) == before and most == plan.MAX_ROWS_OF_SCALED_SUMS
        if name == "split":
            assert new == {"EAGLE_KERNELS_BATCH_INVARIANT": "1"} and plans[-1][0].batch_invariant
        elif name == "dequantized":
            assert not new and plans[-1][1] == 0
        else:
            assert [part.partition("-")[2] for part in name.split("+")] == [new[variable] for variable in sorted(new)]
            assert all(f'"{variable}"' in sources for variable in new)
    assert not plan.SETTINGS.batch_invariant


def test_alternatives_are_columns_beside_what_the_package_runs() -> None:
    rows = [row for question in alternatives._QUESTIONS for row in question.rows()]
    assert len(rows) > 90 and {row.stage.K for row in rows} == {2, 3, 4}
    assert all(question.columns[0] == "op" for question in alternatives._QUESTIONS)


def test_formats_and_the_other_ops_have_tables_of_their_own() -> None:
    """Each in a file that is rewritten after every row, so that a session that ends early has left one."""
    parser, tables = cli.build_parser(), {}
    for command in stages._op_table("cuda"):
        arguments = parser.parse_args(command[command.index(CLI) + 1 :])
        tables.setdefault(arguments.json.stem, []).append(arguments)
    (codes,), (memory,) = tables["op-table-codes"], tables["op-table-memory"]
    assert codes.weights == ["fp8_row", "fp8_block128", "int8_row", "mxfp8", "mxfp4", "nvfp4"]
    assert (codes.tokens, codes.forms) == ([1, 8, 16, 64, 256], ["op", "dense"])
    assert sorted(memory.op) == ["add_rms_norm", "capture_hidden", "norm_concat", "vocab_parallel_embedding"]
    assert memory.tokens == [4**n for n in range(9)]


def test_a_cut_table_goes_on_where_it_was(work: Path) -> None:
    runs = {"op-table": {"records": [1]}, "op-table-codes": {"records": [2]}}
    for name, run in runs.items():
        stages.write_json(work / f"{name}.json", run)
    stage = next(each for each in stages.STAGES if each.name == "op-table")
    kept = stage.result()
    assert kept == {"run": runs["op-table"], "variants": {"codes": runs["op-table-codes"], "memory": None}}
    shutil.rmtree(work)
    stage.restore(kept)
    assert {path.stem: stages.read_json(path) for path in work.glob("*.json")} == runs


def test_results_are_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    for module in (session, stages):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    result = {"schema_version": 2, "environment": {"device_slug": "nvidia-h100"}, "records": []}
    tables = {"NVIDIA_H100.json": {"norm_concat_linear": []}}
    failed = {"test_x.py": {"tests": 2, "skipped": 0, "failed": [{"test": "test_x::test_y", "message": "4 and not 5"}]}}
    curve = {"run": result, "variants": {"late": result, "split": None}, "ncu": '"ID","Kernel Name"\n'}
    host = {"date": "2026-01-01", "microseconds": {"test_out[norm_concat-cuda]": {"median": 9.5}}}
    said = {"library": None, "run": result, "device": {"clusters": [{"threads": 512, "at_once": {"6": 18}}]}}
    kept_by = {
        "library": said,
        "op-table": {"run": result, "variants": {"codes": result, "memory": None}},
        "decode-curve": curve,
        "tune": tables,
        "host-cost": host,
        "sanitizer": None,
    }
    for name, kept in (kept_by | {"gpu-tests": failed}).items():
        status = "failed" if name == "gpu-tests" else "done"
        record = {"schema_version": 2, "stage": name, "status": status, "output_tail": "0 errors", "result": kept}
        stages.write_json(tmp_path / "back" / f"{name}.json", record)
    assert session.main(["--collect", str(tmp_path / "back")]) == 0
    assert json.loads((tmp_path / "bench/results/nvidia-h100/op-table.json").read_text()) == result
    assert not (tmp_path / "bench/results/nvidia-h100/op-table-memory.json").exists()
    for name in ("decode-curve", "decode-curve-late", "op-table-codes"):
        assert json.loads((tmp_path / f"bench/results/nvidia-h100/{name}.json").read_text()) == result
    assert not (tmp_path / "bench/results/nvidia-h100/decode-curve-split.json").exists()
    kept = json.loads((tmp_path / "bench/results/nvidia-h100/device.json").read_text())
    assert kept == {"environment": result["environment"], **said["device"]}
    tests = json.loads((tmp_path / "bench/results/nvidia-h100/gpu_tests.json").read_text())
    counts = {"command": "test_x.py", "tests": 2, "skipped": 0}
    assert tests == {"environment": result["environment"], "records": [counts]}
    of_device, environment = tmp_path / "bench/results/nvidia-h100", {"environment": result["environment"]}
    assert json.loads((of_device / "host_calls.json").read_text()) == environment | host
    sanitized = {"status": "done", "output_tail": "0 errors"}
    assert json.loads((of_device / "sanitizer.json").read_text()) == environment | sanitized
    assert (of_device / "decode-curve-ncu.csv").read_text() == curve["ncu"]
    assert (tmp_path / "python/eagle_kernels/configs/NVIDIA_H100.json").exists()
    printed = capsys.readouterr().out
    assert "gpu-tests: failed: 2 tests, 0 skipped, 1 failed\n  test_x::test_y: 4 and not 5\n" in printed
    assert "sweeps: not in" in printed


@pytest.fixture
def stub_of_a_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rehearsal's stub of libcuda: a GPU with six GPCs of 16 SMs and two of 18."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc on this machine")
    built = tmp_path / "libcuda.so.1"
    source = ROOT / "tests/gpu/rehearsal/driver.c"
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(built)], check=True)
    load = ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda name: load(str(built)) if name == "libcuda.so.1" else load(name))


def at_once(clusters: list[dict], threads: int, shared_bytes: int) -> dict:
    return next(row["at_once"] for row in clusters if (row["threads"], row["shared_bytes"]) == (threads, shared_bytes))


def test_the_driver_is_asked_for_clusters(work: Path, stub_of_a_driver: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the block of every instance. Counts are checked for a block that fills an SM's shared memory, and for one of
    which two fit."""
    monkeypatch.setattr(device_facts, "WORK", work)
    assert device_facts.main() == 0
    said = stages._read_library()["device"]
    assert "failed" not in said and said["cuda"] == 13000
    assert (said["attributes"]["multiprocessors"], said["attributes"]["l2_bytes"]) == (132, 60 << 20)
    instances = json.loads(device_facts.INSTANCES.read_text())["instances"].values()
    asked = {(row["threads"], row["shared_bytes"]) for row in said["clusters"]}
    assert asked == {(instance["threads"], instance["shared"]) for instance in instances}
    for alone in (True, False):
        threads, shared_bytes = next(pair for pair in sorted(asked) if (pair[1] > 113 << 10) == alone)
        on_each = 1 if alone else 2
        counts = at_once(said["clusters"], threads, shared_bytes)
        assert [counts[str(n)] for n in (1, 6, 16)] == [
            6 * (16 * on_each // n) + 2 * (18 * on_each // n) for n in (1, 6, 16)
        ]


def test_what_the_driver_refuses_costs_nothing_else(
    work: Path, stub_of_a_driver: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_facts, "WORK", work)
    call = device_facts._Driver._call

    def refusing(driver: object, name: str, *arguments: object) -> None:
        if name == "cuOccupancyMaxActiveClusters" and len(refused) < 2:
            refused.append(name)
            raise OSError(f"{name} returned 912")
        call(driver, name, *arguments)

    refused: list[str] = []
    monkeypatch.setattr(device_facts._Driver, "_call", refusing)
    counts = device_facts.read_device()["clusters"][0]["at_once"]
    assert counts[2] == "cuOccupancyMaxActiveClusters returned 912" and counts[3] >= 44

    def no_driver(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", no_driver)
    assert device_facts.main() == 0
    said = stages._read_library()["device"]
    assert said["failed"] == "OSError: libcuda.so.1: cannot open shared object file" and "clusters" not in said


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="no ptxas on this machine")
def test_the_kernel_that_the_driver_is_asked_about_assembles(tmp_path: Path) -> None:
    """On the GPU's machine the driver assembles it."""
    (tmp_path / "nothing.ptx").write_bytes(device_facts.PTX)
    subprocess.run(["ptxas", "-arch=sm_90a", "nothing.ptx", "-o", "nothing.cubin"], cwd=tmp_path, check=True)


def test_the_compile_cache_is_carried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed at home, and unpacked once on the GPU's machine: a second call finds what the first one compiled."""
    home, away = tmp_path / "home", tmp_path / "away"
    for root in (home, away):
        monkeypatch.setattr(package, "ROOT", root)
        monkeypatch.setattr(package, "CARRIED", root / "build/gpu_session")
        monkeypatch.setattr(package, "TRITON_CACHE", root / "build/gpu_triton_cache")
        monkeypatch.setattr(package, "SITE", root / "build/gpu_site")
        monkeypatch.setattr(package, "ALTERNATIVES", root / "build/gpu_alternatives")
        monkeypatch.setattr(package, "WORK", root / "build/gpu_work")
        (root / "build/gpu_work").mkdir(parents=True)
        (root / "python/eagle_kernels").mkdir(parents=True)
        if root == home:
            for name in ("key/kernel.cubin", "key/kernel.lock"):
                stages.write_json(root / "build/gpu_triton_cache" / name, name)
            (root / "python/eagle_kernels/libeagle_kernels.so").write_bytes(b".nv_fatbin")
            assert package.pack() == 0
            shutil.copytree(package.CARRIED, away / "build/gpu_session")
    monkeypatch.setattr(package, "_provide_library", lambda *arguments: "the test's")
    for _ in range(2):
        environment = package.prepare_package("cpu")
        cache = Path(environment["TRITON_CACHE_DIR"])
        assert cache == away / "build/gpu_triton_cache"
        assert [path.name for path in sorted(cache.glob("key/*"))] == ["kernel.cubin"]


def test_the_library_of_alternatives_is_carried(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Beside the plain library, in a package of its own that separate processes load. One from an earlier commit is
    removed."""
    for name in ("CARRIED", "SITE", "ALTERNATIVES", "TRITON_CACHE"):
        monkeypatch.setattr(package, name, tmp_path / name.lower())
    monkeypatch.setattr(package, "WORK", tmp_path)
    monkeypatch.setattr(package, "_SECTION_OF_CUDA", b"ELF")
    built = tmp_path / "built"
    for folder in (built, built / "alternatives"):
        folder.mkdir()
        shutil.copy2(library.COMPILED_LIBRARY, folder)
    (built / "libeagle_kernels.so").write_bytes(b"ELF")  # which does not load

    def pack() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(package, "ROOT", tmp_path)
            assert session.main(["--pack", "--library", str(built)]) == 0

    pack()
    monkeypatch.setattr(package, "_provide_library", lambda package, *rest: (package / "libeagle_kernels.so").touch())
    environment = package.prepare_package("cpu")
    assert (tmp_path / "site/eagle_kernels/libeagle_kernels.so").read_bytes() == b""
    command = [sys.executable, str(tmp_path / "alternatives"), "alternatives.json"]
    told = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert told.stdout == f"alternatives of {tmp_path / 'alternatives/eagle_kernels/libeagle_kernels.so'}\n"
    assert "no CUDA device: " in told.stderr or torch.cuda.is_available()

    shutil.rmtree(built / "alternatives")
    pack()
    package.prepare_package("cpu")
    assert not (tmp_path / "alternatives").exists()
    assert "library: none of alternatives is carried along" in capsys.readouterr().out


def test_a_library_without_the_kernels_is_not_carried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A GPU session whose library had no CUDA kernels measured Triton only, and said so in its first line only. One
    that is older than its sources has kernels of another commit."""
    monkeypatch.setattr(package, "ROOT", tmp_path)
    monkeypatch.setattr(package, "CARRIED", tmp_path / "carried")
    monkeypatch.setattr(package, "TRITON_CACHE", tmp_path / "cache")
    folder = tmp_path / "built"
    folder.mkdir()
    for content, message in ((None, "is not built"), (b"ELF", "has no CUDA kernels"), (b".nv_fatbin", "")):
        if content is not None:
            (folder / "libeagle_kernels.so").write_bytes(content)
        assert session.main(["--pack", "--library", str(folder)]) == (2 if message else 0)
        assert message in capsys.readouterr().err
        assert (tmp_path / "carried/libeagle_kernels.so").exists() == (not message)
    (tmp_path / "csrc/cuda").mkdir(parents=True)
    (tmp_path / "csrc/cuda/cut.cuh").touch()
    os.utime(folder / "libeagle_kernels.so", (1e9, 1e9))
    assert session.main(["--pack", "--library", str(folder)]) == 2
    assert "is older than csrc" in capsys.readouterr().err


def test_the_script_on_a_tree_without_the_package(tmp_path: Path) -> None:
    """On a bare machine nothing is installed: the script links the tree, loads the library, and says which it is."""
    command = ["bash", "bench/gpu_session.sh", "--device", "cpu", "--stages", "library,sanitizer"]
    options = {"cwd": ROOT, "env": os.environ | {"PYTHON": sys.executable}, "capture_output": True, "text": True}
    run = subprocess.run([*command, "--out", str(tmp_path)], timeout=200, **options)
    assert run.returncode == 0, run.stdout + run.stderr
    record = json.loads((tmp_path / "library.json").read_text())
    assert record["status"] == "done" and record["result"]["library"]["commit"] == package._commit()
    assert (
        "build/gpu_site/eagle_kernels" in record["output_tail"]
        or "none loads" in record["result"]["library"]["library"]
    )


@pytest.mark.parametrize(
    "device, carried, built, expected",
    [
        ("cuda", "cuda", None, "from carried"),
        ("cuda", "cpu", "cuda", "built here"),
        ("cuda", "cpu", None, "from carried, without CUDA kernels"),
        ("cuda", None, "cuda", "built here"),
        ("cpu", "cpu", "cuda", "from carried"),
        ("cuda", None, None, "none loads; Triton and torch are what is measured"),
    ],
)
def test_which_library(
    device: str, carried: str, built: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that was built for CPU alone must not keep a GPU session from building the CUDA kernels."""
    kinds = {tmp_path / "carried": carried, tmp_path / "built": built}
    for folder in kinds:
        folder.mkdir()
    if carried:
        (tmp_path / "carried" / "libeagle_kernels.so").touch()
    monkeypatch.setattr(package, "ROOT", tmp_path)
    monkeypatch.setattr(package, "CARRIED", tmp_path / "carried")
    monkeypatch.setattr(package, "_build", lambda environment, device: tmp_path / "built" if built else None)

    def loads(package: Path, folder: Path, environment: dict, wanted: str) -> bool:
        return kinds[folder] is not None and (wanted == "cpu" or kinds[folder] == "cuda")

    monkeypatch.setattr(package, "_loads", loads)
    assert package._provide_library(tmp_path, {}, device) == expected


def test_the_linked_package_has_every_part(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts that pyproject.toml lists: with one of them missing `eagle-kernels` itself did not start."""
    monkeypatch.setattr(package, "SITE", tmp_path / "site")
    monkeypatch.setattr(package, "ALTERNATIVES", tmp_path / "alternatives")
    monkeypatch.setattr(package, "_provide_library", lambda *arguments: "none")
    monkeypatch.setattr(package, "WORK", tmp_path)
    package.prepare_package("cpu")
    parts = re.findall(r'^"(eagle_kernels[\w.]*)" = "([\w/]+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert len(parts) == 4
    for name, source in parts:
        linked = tmp_path / "site" / name.replace(".", "/")
        assert linked.is_dir() and (linked / "__init__.py").samefile(ROOT / source / "__init__.py")


def test_unknown_stage_lists_the_known(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        session.main(["--stages", "library,sass"])
    assert "stage sass is unknown, known are: library, gpu-tests" in capsys.readouterr().err
