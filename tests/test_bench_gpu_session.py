"""The stages of bench/gpu_session.sh: bounded, saved, gone on with, and never begun twice."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from eagle_kernels.bench import cli
from eagle_kernels.bench.gpu import package, session, stages
from eagle_kernels.bench.gpu.stages import Stage

ROOT = Path(__file__).parents[1]


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place for the stages' files, and no package to prepare."""
    folder = tmp_path / "work"
    for module in (session, stages):
        monkeypatch.setattr(module, "WORK", folder)
    monkeypatch.setattr(session, "prepare_package", lambda device: dict(os.environ))
    return folder


def stage(name: str, code: str, limit: float = 60, **options: object) -> Stage:
    return Stage(name, limit, lambda device: [[sys.executable, "-c", code]], **options)


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
    # A fresh machine, whose --out is empty, with the files of the call before carried to it.
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
    slow = stage("slow", SLOW, limit=1.5, result=lambda: kept, goes_on=True)
    never = stage("never", "print('ran')")
    records = run([slow, never], tmp_path / "out", seconds=1.6)
    assert records["slow"]["status"] == "cut" and records["slow"]["result"] == kept
    assert "interrupted, rows kept" in records["slow"]["output_tail"]
    assert records["never"]["status"] == "not started"

    # The next call finds the rows where bench --resume looks for them, and starts what was not.
    code = f"import json; assert json.load(open({str(work / 'slow.json')!r})) == {kept}"
    records = run([stage("slow", code, goes_on=True), never], tmp_path / "out")
    assert [record["status"] for record in records.values()] == ["done", "done"]


def test_a_cut_stage_that_cannot_go_on_stays_cut(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that take longer than a call would otherwise take every call."""
    monkeypatch.setattr(session, "_LEAST", 0.5)
    assert run([stage("tests", SLOW, limit=1.0)], tmp_path)["tests"]["status"] == "cut"
    assert run([stage("tests", "print('again')")], tmp_path)["tests"]["status"] == "cut"


def test_stages_in_order_of_value_name_commands_that_exist() -> None:
    """Every `eagle-kernels` call of every stage is parsed by the real parser: a renamed option would end a session."""
    parser = cli.build_parser()
    names = [each.name for each in stages.STAGES]
    assert names == ["library", "gpu-tests", "sanitizer", "linear-curve", "op-table", "host-cost", "sweeps"]
    for device in ("cuda", "cpu"):
        for command in (command for each in stages.STAGES for command in each.commands(device)):
            if "eagle_kernels.bench.cli" not in command:
                continue
            arguments = parser.parse_args(command[command.index("eagle_kernels.bench.cli") + 1 :])
            assert arguments.command in ("info", "bench", "tune")
    for path in ("tests/gpu/sanitize.sh", "tests/host_overhead", "tests/gpu"):
        assert (ROOT / path).exists()


def test_results_are_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (session, stages):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    result = {"schema_version": 2, "environment": {"device_slug": "nvidia-h100"}, "records": []}
    sweeps = {"run": result, "configs": {"NVIDIA_H100.json": {"norm_concat_linear": []}}}
    for name, kept in (("op-table", result), ("sweeps", sweeps), ("host-cost", None)):
        record = {"schema_version": 1, "stage": name, "status": "done", "output_tail": "", "result": kept}
        stages.write_json(tmp_path / "back" / f"{name}.json", record)
    assert session.main(["--collect", str(tmp_path / "back")]) == 0
    assert json.loads((tmp_path / "bench/results/nvidia-h100/op-table.json").read_text()) == result
    assert json.loads((tmp_path / "bench/results/nvidia-h100/sweeps.json").read_text()) == result
    assert (tmp_path / "python/eagle_kernels/configs/NVIDIA_H100.json").exists()


def test_the_script_on_a_tree_without_the_package(tmp_path: Path) -> None:
    """On a bare machine nothing is installed: the script links the tree, loads the library, and says what it is."""
    command = ["bash", "bench/gpu_session.sh", "--device", "cpu", "--stages", "library,sanitizer"]
    options = {"cwd": ROOT, "env": os.environ | {"PYTHON": sys.executable}, "capture_output": True, "text": True}
    run = subprocess.run([*command, "--out", str(tmp_path)], timeout=200, **options)
    assert run.returncode == 0, run.stdout + run.stderr
    record = json.loads((tmp_path / "library.json").read_text())
    assert record["status"] == "done" and record["result"]["commit"] == package._commit()
    assert "build/gpu_site/eagle_kernels" in record["output_tail"] or "none loads" in record["result"]["library"]


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


def test_unknown_stage_lists_the_known(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        session.main(["--stages", "library,sass"])
    assert "stage sass is unknown, known are: library, gpu-tests" in capsys.readouterr().err
