"""Saved runs, and tables made of them."""

import json
import re
from pathlib import Path

import pytest
import torch
from eagle_kernels.bench.accuracy import error_bound, relative_rms
from eagle_kernels.bench.cli import main
from eagle_kernels.bench.info import cpu_facts, cpu_slug, gpu_slug
from eagle_kernels.bench.results.pages import NO_BENCH_RUNS
from eagle_kernels.bench.runs import curves, report, saved_run

ROOT = Path(__file__).parents[1]


def saved_runs(folder: Path) -> list[Path]:
    """The runs that `bench` saved; the other commands save other columns."""
    return sorted(path for path in folder.glob("*/*.json") if path.name not in NO_BENCH_RUNS)


ENVIRONMENT = {
    "device": "cpu",
    "cpu_model": "Some CPU",
    "threads": 2,
    "cpu_cores": 2,
    "cpu_isa": "avx2",
    "torch": "2.13.0",
    "date": "2026-01-01 00:00 UTC",
    "commit": "0123456789ab",
}


def record(variant: str, median_ms: float, T: int = 8, status: str = "ok") -> dict:
    sizes = {"S": 1, "K": 3, "H": 64, "D": 32, "V": 1000, "T": T}
    row = {
        "op": "norm_concat_linear",
        "preset": "tiny",
        "stage": "eagle3",
        "norm": "chunk",
        "dtype": "bf16",
        "weight": "dense",
        "timer": "clock",
        **sizes,
    }
    entry = row | {"variant": variant, "is_ours": variant == "op", "status": status, "reason": "too large"}
    if status == "wrong":
        return entry | {"error": None, "error_bound": 2e-3}
    if status != "ok":
        return entry
    times = {"median_ms": median_ms, "min_ms": median_ms * 0.9, "p20_ms": median_ms * 0.95, "p80_ms": median_ms * 1.1}
    rates = {"rounds": 9, "bytes": 10**6, "gbps": 10.0, "copy_gbps": 20.0, "read_gbps": 40.0, "tflops": 0.1}
    rates |= {"matmul_tflops": 0.4, "floor_ms": 1.5}
    speedups = {"speedup": median_ms / 2.0, "speedup_low": 0.99, "speedup_high": 1.2}
    return entry | times | rates | speedups | {"cold": True, "copies": 6, "copies_limited_by": ""}


LAYOUT = report.Layout(["op", "eager"], "norm_concat_linear", ["clock"])
RECORDS = [record("op", 2.0), record("eager", 4.0), record("op", 2.0, T=64), record("eager", 16.0, T=64)]


def test_a_run_from_before_codes_and_streams_has_neither(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    before = [{k: v for k, v in each.items() if k not in ("weight", "S")} for each in RECORDS]
    saved_run.save(path, ENVIRONMENT, [], before)
    assert saved_run.load(path)["records"] == RECORDS


def test_run_survives_saving(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "run.json"
    saved_run.save(path, ENVIRONMENT, ["bench"], RECORDS)
    run = saved_run.load(path)
    assert run == {
        "schema_version": saved_run.SCHEMA_VERSION,
        "argv": ["bench"],
        "environment": ENVIRONMENT,
        "records": RECORDS,
    }
    assert [file.name for file in path.parent.iterdir()] == ["run.json"]


@pytest.mark.parametrize(
    "text, message",
    [
        pytest.param("{", "run.json: not a saved run", id="cut-off"),
        pytest.param("[" * 100_000, "run.json: not a saved run: maximum recursion depth exceeded", id="nested"),
        pytest.param("[]", "schema version is None, expected 2", id="no-run"),
        pytest.param('{"schema_version": 1}', "schema version is 1, expected 2; measure again", id="older"),
        pytest.param('{"schema_version": "2"}', "schema version is '2', expected 2; measure again", id="a-string"),
        pytest.param('{"schema_version": 2}', "schema version 2, but without environment and records", id="nothing"),
        pytest.param(
            '{"schema_version": 2, "environment": {}, "records": [{}]}', "record 0 has no op, preset", id="no-fields"
        ),
        pytest.param(
            '{"schema_version": 2, "environment": {}, "records": [3]}',
            "record 0 is 3, expected an object",
            id="no-record",
        ),
    ],
)
def test_unreadable_run_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(saved_run.UnreadableResult, match=re.escape(message)):
        saved_run.load(path)


@pytest.mark.parametrize(
    "field, value, expected",
    [
        ("median_ms", "2.0", "median_ms '2.0', expected a number from 1e-100 to 1e+100"),
        ("median_ms", 5e-324, "median_ms 5e-324, expected a number from 1e-100 to 1e+100"),
        ("p80_ms", 0, "p80_ms 0, expected a number from 1e-100 to 1e+100"),
        ("gbps", None, "gbps None, expected a number from 1e-100 to 1e+100"),
        ("matmul_tflops", 0, "matmul_tflops 0, expected a number from 1e-100 to 1e+100"),
        ("tflops", True, "tflops True, expected a number from 0 to 1e+100"),
        ("floor_ms", 10**308, "floor_ms 1000"),
        ("T", 8.5, "T 8.5, expected a count"),
        ("T", 2**63, f"T {2**63}, expected a count"),
        ("H", 10**400, "H 1000"),
        ("status", [], "status [], expected one of ok, "),
        ("is_ours", "yes", "is_ours 'yes', expected true or false"),
        ("op", "softmax", "op 'softmax', expected one of norm_concat_linear, "),
        ("timer", "wall", "timer 'wall', expected one of clock, graph, eager"),
        ("variant", 3, "variant 3, expected a form or a baseline"),
        ("preset", None, "preset None, expected text"),
        ("preset", "\ud800", "preset '\\ud800', expected text"),
    ],
)
def test_a_field_of_another_kind_is_named(
    field: str, value: object, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "run.json"
    saved_run.save(path, ENVIRONMENT | {"device_slug": "x"}, ["bench"], [RECORDS[0], RECORDS[1] | {field: value}])
    for command in (["report"], ["plot", "--out", str(tmp_path / "x.png")], ["compare", str(path)]):
        with pytest.raises(SystemExit) as stopped:
            main([command[0], str(path), *command[1:]])
        assert stopped.value.code == 2
        assert f"run.json: record 1 has {expected}" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    "changes, without, missing",
    [
        ({}, "speedup_low", "speedup_low"),
        ({"cold": False}, "copies_limited_by", "rotated_bytes, copies_limited_by"),
        ({"status": "skipped"}, "reason", "reason"),
        ({"status": "failed"}, "reason", "reason"),
    ],
)
def test_a_record_without_what_its_line_needs_is_named(
    changes: dict, without: str, missing: str, tmp_path: Path
) -> None:
    """This ended in a KeyError when the table was printed."""
    path = tmp_path / "run.json"
    changed = {name: value for name, value in (RECORDS[1] | changes).items() if name != without}
    saved_run.save(path, ENVIRONMENT, ["bench"], [RECORDS[0], changed])
    with pytest.raises(saved_run.UnreadableResult, match=f"record 1 has no {missing}$"):
        saved_run.load(path)


@pytest.mark.parametrize("command", ["report", "plot"])
def test_an_environment_without_its_machine_is_named(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "run.json"
    for environment, message in (
        ({}, "the environment has device None, expected cpu or cuda"),
        ({"device": ["cpu"]}, "the environment has device ['cpu'], expected cpu or cuda"),
        ({"device": "cuda", "gpu": "H100"}, "the environment has no device_slug, torch, date, commit, driver, cuda"),
        (ENVIRONMENT | {"device_slug": []}, "the environment has device_slug [], expected text"),
        (ENVIRONMENT | {"device_slug": "x", "cpu_model": "\ud800"}, "has cpu_model '\\ud800', expected text"),
        (ENVIRONMENT | {"device_slug": "x", "threads": "2"}, "the environment has threads '2', expected a count"),
    ):
        saved_run.save(path, environment, ["bench"], RECORDS)
        with pytest.raises(SystemExit):
            main([command, str(path)])
        assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_plot_names_its_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    said = []
    monkeypatch.setattr(figures.Figure, "suptitle", lambda self, text, **options: said.append(text))
    run = {"environment": ENVIRONMENT | {"device_slug": "some-cpu"}, "records": RECORDS}
    curves.draw([run], tmp_path / "one.png")
    explicit = [entry | {"preset": "explicit", "H": H} for H in (64, 128) for entry in RECORDS]
    many = [entry | {"preset": f"model{number}"} for number in range(9) for entry in RECORDS]
    curves.draw([run | {"records": many + explicit}], tmp_path / "many.png")
    assert said[0].splitlines()[-1] == "tiny:eagle3"
    names = " ".join(said[1].splitlines()[1:]).split(", ")
    assert names == [*(f"model{number}:eagle3" for number in range(9)), "K=3 H=64 D=32", "K=3 H=128 D=32"]


def test_a_name_is_no_formula(tmp_path: Path) -> None:
    """matplotlib's ParseSyntaxException, in five lines."""
    pytest.importorskip("matplotlib")
    records = [entry | {"preset": "$x^{$"} for entry in RECORDS]
    curves.draw([{"environment": ENVIRONMENT | {"device_slug": "some-cpu"}, "records": records}], tmp_path / "x.png")


def test_missing_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(saved_run.UnreadableResult, match=r"absent\.json: No such file"):
        saved_run.load(tmp_path / "absent.json")


def test_table_has_times_speedups_and_means() -> None:
    layout = report.Layout.of(RECORDS)
    ours, eager = (re.split(" {2,}", line.strip()) for line in layout.lines(RECORDS[2:]))
    assert ours == ["64 op", "2.00", "1.90-2.20", "10.0", "25 %", "25 %"]
    assert eager == ["eager", "16.0", "15.2-17.6", "~8.00x", "10.0", "25 %", "25 %"]
    times = ["2.00 (1.90 - 2.20)", "16.0 (15.2 - 17.6)"]
    assert layout.cells(RECORDS[2:]) == ["64", *times, "~8.00x", "10.0", "25", "0.100", "25"]
    assert list(report.footer(RECORDS)) == ["geomean op: 4.00x eager (2.00 to 8.00, 2 rows)"]


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [(0.9, 1.1, "~2.00x"), (1.0, 1.1, "~2.00x"), (0.9, 1.0, "~2.00x"), (1.1, 1.2, "2.00x"), (0.8, 0.9, "2.00x")],
)
def test_a_speedup_whose_interval_holds_1_is_marked(low: float, high: float, text: str) -> None:
    assert report._speedup_text({"speedup": 2.0, "speedup_low": low, "speedup_high": high}) == text
    assert report._speedup_text({}) == "-"


def test_wrong_row_has_no_times() -> None:
    (line,) = LAYOUT.lines([record("op", 2.0, status="wrong"), record("eager", 4.0)])
    assert "WRONG RESULT, no times: op error no number, bound 2.00e-03" in line
    assert "4.00" not in line


def test_skipped_row_says_why() -> None:
    (line,) = LAYOUT.lines([record("op", 2.0, status="skipped")])
    assert line.endswith("skipped: too large")


def test_row_that_is_not_cold_says_so() -> None:
    warm = record("op", 2.0) | {"cold": False, "rotated_bytes": 100 << 20, "copies_limited_by": "7 GB of memory"}
    assert "not cold: 6 copies are 100 MiB, limited by 7 GB of memory" in list(LAYOUT.lines([warm]))[1]


def test_many_shapes_are_a_line_each() -> None:
    records = [entry | {"preset": f"model{number}"} for number in range(7) for entry in RECORDS]
    text = report.render(None, {"environment": ENVIRONMENT, "records": records})
    assert "**norm_concat_linear, bf16, clock: op over eager**" in text
    assert "| preset | K | H | D | T=8 | T=64 |" in text
    assert "| model6:eagle3 | 3 | 64 | 32 | 2.00x | 8.00x |" in text


def test_the_weights_of_one_shape_share_a_table() -> None:
    """With the bytes of a call and its share of what memory gives."""
    formats = ("fp8_tensor", "fp8_row", "fp8_block128", "int8_row", "mxfp8", "mxfp4", "nvfp4")
    dense = record("dense", 3.0) | {"is_ours": True}
    records = [entry | {"weight": name} for name in formats for entry in (RECORDS[0], dense, *RECORDS[1:])]
    records[-2] = records[-2] | {"status": "skipped"}
    lines = report.render(None, {"environment": ENVIRONMENT, "records": records}).splitlines()
    assert "**norm_concat_linear, tiny:eagle3, bf16: K=3 H=64 D=32, norm chunk**" in lines
    assert "| weight | T | op ms | MB | GB/s | % memory | vs dense | vs eager |" in lines
    assert "| fp8_row | 8 | 2.00 | 1.0 | 10.0 | 25 | 1.50x | 2.00x |" in lines
    assert "| fp8_row | 64 | 2.00 | 1.0 | 10.0 | 25 | - | 8.00x |" in lines
    assert "| nvfp4 | 64 | skipped: too large |  |  |  |  |  |" in lines
    assert sum(line.startswith("| ") for line in lines) == 2 + 2 * len(formats)


def test_weights_of_baselines_alone_have_no_table_of_their_own() -> None:
    formats = ("fp8_tensor", "fp8_row", "fp8_block128", "int8_row", "mxfp8", "mxfp4", "nvfp4")
    records = [record("dequantize", 2.0) | {"weight": name} for name in formats]
    assert "| weight |" not in report.render(None, {"environment": ENVIRONMENT, "records": records})


def test_baselines_alone_are_shown_as_a_share_of_the_roofline() -> None:
    records = [record("linear", 2.0) | {"preset": f"model{number}"} for number in range(7)]
    text = report.render(None, {"environment": ENVIRONMENT, "records": records})
    assert "**norm_concat_linear, bf16, clock: linear, % of the roofline**" in text
    assert "| model0:eagle3 | 3 | 64 | 32 | 75 |" in text


def test_plot_has_the_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    axes = pytest.importorskip("matplotlib.axes")
    drawn = {}
    plot = axes.Axes.plot

    def recorded(self: object, x: list, y: list, *style: object, **options: object) -> object:
        drawn[options["label"]] = dict(zip(x, y, strict=True))
        return plot(self, x, y, *style, **options)

    monkeypatch.setattr(axes.Axes, "plot", recorded)
    run = {"environment": ENVIRONMENT | {"device_slug": "some-cpu"}, "records": RECORDS}
    curves.draw([run], tmp_path / "one.png")
    expected = {"over eager": {8: 2.0, 64: 8.0}, "op": {8: 75, 64: 75}, "eager": {8: 37.5, 64: 9.375}}
    assert {label: pytest.approx(curve) for label, curve in drawn.items()} == expected
    drawn.clear()
    many = [entry | {"preset": f"model{number}"} for number in range(7) for entry in RECORDS]
    curves.draw([run | {"records": many}], tmp_path / "many.png")
    assert drawn["over eager, geomean of 7"] == pytest.approx({8: 2.0, 64: 8.0})
    for path in tmp_path.iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no row was timed"):
        curves.draw([run | {"records": [record("op", 2.0, status="skipped")]}], tmp_path / "none.png")


@pytest.mark.parametrize("path", saved_runs(ROOT / "bench" / "results"), ids=lambda path: path.name)
def test_saved_runs_are_readable(path: Path) -> None:
    run = saved_run.load(path)
    assert run["environment"]["device_slug"] == path.parent.name
    json.dumps(run, allow_nan=False)


@pytest.mark.parametrize(
    "model, flags, slug",
    [
        ("Intel(R) Xeon(R) Processor", "avx2 avx512f avx512_bf16 amx_bf16", "intel-xeon-amx-bf16-2core"),
        ("Intel(R) Xeon(R) Platinum 8488C @ 2.4GHz", "avx512f amx_bf16", "intel-xeon-platinum-8488c-amx-bf16-2core"),
        ("AMD EPYC 9R14 96-Core Processor", "avx2 avx512f avx512_bf16", "amd-epyc-9r14-avx512-bf16-2core"),
        ("Intel(R) Core(TM) i5-6500 CPU @ 3.20GHz", "sse2 avx2", "intel-core-i5-6500-avx2-2core"),
    ],
)
def test_cpu_slug(model: str, flags: str, slug: str) -> None:
    facts = cpu_facts(f"processor\t: 0\nmodel name\t: {model}\nflags\t\t: {flags}\n\nprocessor\t: 1\n")
    assert cpu_slug(facts, 2) == slug


def test_gpu_slug() -> None:
    assert gpu_slug("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"


def test_error_and_bound() -> None:
    truth = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert relative_rms(torch.tensor([3.0, 4.5]), truth) == pytest.approx(0.1)
    assert relative_rms(torch.zeros(0), torch.zeros(0)) == 0
    assert relative_rms(torch.ones(1), torch.zeros(1)) == float("inf")
    assert not relative_rms(torch.tensor([float("nan"), 1.0]), truth) <= 1e9
    assert error_bound(2e-3, torch.bfloat16, 4096, 10**8) == pytest.approx(2.1e-3, rel=1e-3)
    assert error_bound(1e-6, torch.float32, 4096, 100) == pytest.approx(2e-6)
    assert error_bound(4e-7, torch.float32, 4096, 100) == pytest.approx(8e-7)
