"""tune: the search on stub times, the table it writes, and the call that the log names."""

import errno
import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from eagle_kernels.bench import tune
from eagle_kernels.bench.cli import main
from eagle_kernels.bench.measure import Ratio
from eagle_kernels.bench.output import Unwritable

from eagle_kernels.model_shapes import model_shapes
from eagle_kernels.tuned_configs import Gpu, Shape, Tiles, choose_tiles, read_rows, table_path

H100 = Gpu("NVIDIA H100 80GB HBM3", 90, 227 << 10)
START = tune.start_tiles(H100, 16, 3, 4096, 4096, torch.bfloat16)
SHAPE = Shape(3, 4096, 4096, "bfloat16")


def near(tiles: Tiles, field: str) -> object:
    return tune.neighbors(tiles, field, H100, 4096, torch.bfloat16)


def comparison(seconds: object, noise: float = 0.0) -> tune.Compare:
    """Stub times: None where the candidate cannot run."""

    def compare(incumbent: tune.Choice, candidate: tune.Choice) -> Ratio | None:
        if math.isinf(seconds(candidate)):
            return None
        value = seconds(incumbent) / seconds(candidate)
        return Ratio(value, value * (1 - noise), value * (1 + noise))

    return compare


def time_of(tiles: tune.Choice) -> float:
    """Best at BD 32, two splits and five stages; the library is slower; eight warps do not compile."""
    if tiles is None:
        return 2.0
    if tiles.num_warps == 8:
        return math.inf
    distances = (math.log2(tiles.BD / 32), tiles.splits - 2, tiles.num_stages - 5)
    return 1 + 0.1 * sum(map(abs, distances))


def test_search_finds_the_best() -> None:
    best = tune.search(START, comparison(time_of), near, deadline=math.inf)
    assert (best.BD, best.splits, best.num_stages, best.num_warps) == (32, 2, 5, START.num_warps)


def test_the_library_wins_where_it_is_faster() -> None:
    assert tune.search(START, comparison(lambda tiles: 1.0 if tiles else 0.5), near, deadline=math.inf) is None


def test_noise_changes_nothing() -> None:
    def almost(tiles: tune.Choice) -> float:
        return 1.0 if tiles == START else 0.98

    assert tune.search(START, comparison(almost, noise=0.03), near, deadline=math.inf) == START


def test_time_over_keeps_the_start() -> None:
    assert tune.search(START, comparison(time_of), near, deadline=-math.inf) == START


@pytest.mark.parametrize("T", [1, 64, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_candidates_fit_on_every_preset(T: int, dtype: torch.dtype) -> None:
    for model in model_shapes().values():
        for stage in model.stages:
            start = tune.start_tiles(H100, T, stage.K, stage.H, stage.D, dtype)
            for tiles in tune.neighbors(start, "BK", H100, stage.H, dtype):
                assert tiles.num_stages * (tiles.BT + tiles.BD) * tiles.BK * dtype.itemsize <= H100.shared_memory
                assert tiles.splits <= -(-stage.H // tiles.BK)
            swapped = list(tune.neighbors(start, "swap", H100, stage.H, dtype))
            assert not any(tiles.swap and tiles.BT < 64 for tiles in swapped)


def test_the_weight_is_the_left_operand_only_where_the_tensor_cores_take_it() -> None:
    """wgmma and tcgen05 have 64 rows at least on the left: other candidates fail to compile, in minutes of --limit."""
    sizes = (64, 3, 4096, 4096, torch.bfloat16)
    for arch in (90, 100, 103):
        gpu = Gpu("any", arch, 227 << 10)
        start = tune.start_tiles(gpu, *sizes)
        assert start.swap
        assert {tiles.BD for tiles in tune.neighbors(start, "BD", gpu, 4096, torch.bfloat16)} == {64, 256}
        (unswapped,) = tune.neighbors(start, "swap", gpu, 4096, torch.bfloat16)
        assert not unswapped.swap
    a100 = Gpu("NVIDIA A100-SXM4-80GB", 80, 163 << 10)
    assert not list(tune.neighbors(tune.start_tiles(a100, *sizes), "swap", a100, 4096, torch.bfloat16))


def test_what_is_written_is_what_is_chosen(tmp_path: Path) -> None:
    facts = {"torch": "2.13.0", "triton": "3.9.0", "date": "today", "commit": "0"}
    tune.write_rows(H100.name, SHAPE, {2: START, 256: None}, facts, tmp_path / "new folder")
    path = tune.write_rows(H100.name, Shape(2, 64, 64, "float32"), {8: START}, facts, tmp_path / "new folder")
    tune.write_rows(H100.name, SHAPE, {16: START}, facts, path.parent)
    assert read_rows(H100.name, SHAPE, path.parent) == {2: START, 16: START, 256: None}
    assert read_rows(H100.name, Shape(2, 64, 64, "float32"), path.parent) == {8: START}
    assert list(path.parent.iterdir()) == [path]
    (entry, _) = json.loads(path.read_text())["norm_concat_linear"]
    assert list(entry["rows"]) == ["2", "16", "256"] and entry["measured_with"] == facts
    options = {"has_residuals": False, "directory": path.parent}
    assert choose_tiles(H100, 300, 3, 4096, 4096, torch.bfloat16, **options)[0] is None
    assert choose_tiles(H100, 20, 3, 4096, 4096, torch.bfloat16, **options)[0] == START


def test_a_table_that_cannot_be_written_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`standard output was not written`, and a .partial stayed."""

    def full(self: Path, target: Path) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(Unwritable) as raised:
        tune.write_rows(H100.name, SHAPE, {1: START}, {}, tmp_path)
    path = table_path(H100.name, tmp_path)
    assert str(raised.value) == f"{path} was not written: No space left on device"
    assert not list(tmp_path.iterdir())


DAMAGED = [
    "",
    "[]",
    '{"norm_concat_linear": [{"K": 3}]}',
    '{"norm_concat_linear": [{"K": 3, "H": 8, "D": 8, "dtype": "float32", "rows": {"1": {"BT": 16}}}]}',
    '{"norm_concat_linear": [{"K": 3, "H": 8, "D": 8, "dtype": "float32", "rows": [1]}]}',
]


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_table_is_seen_before_anything_is_measured(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A traceback once all was measured, and nothing of it was kept."""
    monkeypatch.setattr(tune.plan, "unsupported_reason", lambda backend, device: None)
    path = table_path("Triton interpreter", tmp_path)
    path.write_text(text)
    with pytest.raises(SystemExit) as stopped:
        main(["tune", "--device", "cpu", "--write", str(tmp_path)])
    assert stopped.value.code == 2
    damaged = f"argument --write: norm_concat_linear: {str(path)!r} is damaged, expected a tuned table, because "
    assert damaged in capsys.readouterr().err.splitlines()[-1]


def test_a_table_that_cannot_be_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune.plan, "unsupported_reason", lambda backend, device: None)
    path = table_path("Triton interpreter", tmp_path)
    path.touch()

    def read_text(path: Path) -> str:  # as root every file can be read
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "read_text", read_text)
    with pytest.raises(SystemExit) as stopped:
        main(["tune", "--device", "cpu", "--write", str(tmp_path)])
    assert stopped.value.code == 2
    assert f"argument --write: {path} was not read: Permission denied" in capsys.readouterr().err.splitlines()[-1]


def test_the_processes_that_compile_leave_ctrl_c_to_tune() -> None:
    """A terminal sends it to each of them: a traceback from each stood above what was measured."""
    processes = tune._compilers.__wrapped__(1)
    try:
        assert processes.submit(signal.getsignal, signal.SIGINT).result(timeout=120) is signal.SIG_IGN
    finally:
        processes.shutdown()


def test_one_plan_for_all_T_is_never_the_librarys(tmp_path: Path) -> None:
    """A table may say at T=64 that the library's product is fastest; where one plan serves every T, that entry is not
    used."""
    tune.write_rows(H100.name, SHAPE, {16: START, 64: None}, {}, tmp_path)
    options = {"has_residuals": False, "directory": tmp_path}
    assert choose_tiles(H100, 64, 3, 4096, 4096, torch.bfloat16, **options)[0] is None
    assert choose_tiles(H100, 64, 3, 4096, 4096, torch.bfloat16, split_only=True, **options)[0] == START


def test_the_call_that_the_log_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture
) -> None:
    """A reader copies the command from the log: it has to run, and for the same shape."""
    with caplog.at_level(logging.INFO, "eagle_kernels"):
        choose_tiles(H100, 8, 3, 2816, 1408, torch.float16, has_residuals=False, directory=tmp_path)
    (command,) = re.findall("`eagle-kernels (.*?)`", caplog.records[0].getMessage())
    assert command.endswith("--write")
    assert main([*command.split(), "--dry-run", "--tokens", "8"]) == 0
    heading, start, *candidates = capsys.readouterr().out.splitlines()
    assert heading.startswith("explicit:eagle3 K=3 H=2816 D=1408 fp16 T=8")
    assert start.startswith("  starts from BT=16 BD=64 ")
    for candidate in ("BD=32 BK=128", "BD=64 BK=64", "num_warps=8", "num_stages=2"):
        assert any(candidate in line for line in candidates), candidate
    assert not table_path(H100.name, tmp_path).exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "no CUDA device: "),
        (["--device", "cpu"], "the CPU kernels have no table to tune"),
        (["--missing"], "argument --missing: it goes by the table that --write names"),
        (["--op", "norm_concat"], "op 'norm_concat' is unknown, known are: norm_concat_linear"),
        (["--chunks", "3"], "an explicit shape is --chunks K --hidden H --out D; --hidden, --out is missing"),
    ],
)
def test_bad_input_is_one_clear_sentence(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        main(["tune", *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_the_kernels_in_the_interpreter(tmp_path: Path) -> None:
    """The whole command, gate and table included, on kernels that run without a GPU; the times mean nothing."""
    shape = ["--chunks", "2", "--hidden", "64", "--out", "32", "--tokens", "1,2"]
    command = [sys.executable, "-m", "eagle_kernels.bench.cli", "tune", "--device", "cpu", *shape]
    command += ["--limit", "1", "--min-time", "0", "--write", str(tmp_path)]
    code = (
        "import sys; from eagle_kernels.bench import cli, info; info.available_bytes = lambda device: 1 << 24\n"
        "sys.exit(cli.main(sys.argv[1:]))"
    )
    command[1:3] = ["-c", code]
    environment = {"TRITON_INTERPRET": "1", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    assert ", 0 could not run or were wrong" in " ".join(run.stdout.split())  # joins lines that wrap at 80 columns
    rows = read_rows("Triton interpreter", Shape(2, 64, 32, "bfloat16"), tmp_path)
    assert set(rows) == {1, 2}
