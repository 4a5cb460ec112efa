"""compare: a planted regression is seen, and what noise, a busy machine or a lost row look like."""

import random
import re
from pathlib import Path

import pytest
from eagle_kernels.bench import measure
from eagle_kernels.bench.cli import main
from eagle_kernels.bench.measure import Samples
from eagle_kernels.bench.runs import saved_run
from eagle_kernels.bench.runs.compare import changes_between, median_interval

from eagle_kernels import environment
from eagle_kernels.model_shapes import model_shapes

ENVIRONMENT = {"device": "cpu", "device_slug": "some-cpu", "threads": 2, "torch": "2.13.0", "triton": None}
NOISE = 0.03


def record(variant: str, milliseconds: float, seed: int, T: int = 8, status: str = "ok") -> dict:
    """A record of 60 calls that take this long +- 3 %, a tenth of them preempted for 8 ms."""
    source = random.Random(f"{variant} {seed} {T}")
    calls = [milliseconds * (1 + source.uniform(-NOISE, NOISE)) for _ in range(60)]
    taken = Samples(tuple(call + (8.0 if source.random() < 0.1 else 0.0) for call in calls))
    row = {"op": "norm_concat", "preset": "tiny", "stage": "eagle3", "norm": "chunk", "S": 1}
    row |= {"K": 3, "H": 64, "D": 32, "V": 99}
    row |= {
        "T": T,
        "dtype": "bf16",
        "weight": "dense",
        "timer": "clock",
        "variant": variant,
        "is_ours": variant == "op",
        "status": status,
    }
    if status != "ok":
        return row | {"reason": "gone"}
    times = {"median_ms": taken.median, "min_ms": taken.minimum}
    times |= {"p20_ms": taken.quantile(0.2), "p80_ms": taken.quantile(0.8), "rounds": 60}
    return row | dict.fromkeys(saved_run.FIGURES, 1.0) | times


def verdict(base: list[dict], new: list[dict], tolerance: float = 0.05) -> str:
    (change,) = changes_between(base, new)
    return change.verdict(tolerance)


@pytest.mark.parametrize("seed", range(20))
def test_planted_regression_is_seen_and_noise_is_not(seed: int) -> None:
    base = [record("op", 2.0, seed), record("eager", 4.0, seed)]
    assert verdict(base, [record("op", 2.2, seed + 100), record("eager", 4.0, seed + 100)]) == "slower"
    assert verdict(base, [record("op", 2.0, seed + 100), record("eager", 4.0, seed + 100)]) == "same"
    assert verdict(base, [record("op", 2.06, seed + 100), record("eager", 4.0, seed + 100)]) in ("same", "unsure")
    assert verdict(base, [record("op", 1.8, seed + 100), record("eager", 4.0, seed + 100)]) == "faster"


def test_without_a_baseline_the_times_alone_decide() -> None:
    assert verdict([record("op", 2.0, 0)], [record("op", 2.2, 1)]) == "slower"


def test_a_machine_that_is_slower_at_everything_is_no_regression() -> None:
    base = [record("op", 2.0, 0), record("eager", 4.0, 0)]
    assert verdict(base, [record("op", 2.4, 1), record("eager", 4.8, 1)]) == "machine moved"
    assert verdict(base, [record("op", 1.6, 1), record("eager", 3.2, 1)]) == "machine moved"
    # Nor is a torch that became faster: our time has not changed.
    assert verdict(base, [record("op", 2.0, 1), record("eager", 3.0, 1)]) == "same"


def test_a_baseline_of_our_own_kernels_is_no_control() -> None:
    base = [record("op", 2.0, 0), record("slices", 4.0, 0)]
    assert verdict(base, [record("op", 2.4, 1), record("slices", 4.8, 1)]) == "slower"


@pytest.mark.parametrize("milliseconds", [2.2, 1.8])
def test_wide_noise_leaves_it_open(milliseconds: float) -> None:
    base, new = record("op", 2.0, 0), record("op", milliseconds, 1)
    wide = {"p20_ms": 1.6, "p80_ms": 2.6, "rounds": 9}
    assert verdict([base | wide], [new | wide]) == "unsure"


def test_the_interval_of_a_median_from_its_quantiles() -> None:
    kept = {"median_ms": 2.0, "p20_ms": 1.7, "p80_ms": 2.6, "rounds": 98}  # 0.98 / sqrt(98) = 0.099 of the ranks
    low, high = median_interval(kept)
    assert (low, high) == pytest.approx((2.0 - 0.3 * 0.33, 2.0 + 0.6 * 0.33), rel=1e-3)


def test_the_interval_of_a_change_holds_the_noise_of_both_runs() -> None:
    sharp = {"median_ms": 2.0, "p20_ms": 2.0, "p80_ms": 2.0, "rounds": 98}
    wide = sharp | {"p20_ms": 1.7, "p80_ms": 2.6}
    low, high = median_interval(wide)
    for old, new, expected in ((sharp, wide, (low / 2, high / 2)), (wide, sharp, (2 / high, 2 / low))):
        (change,) = changes_between([record("op", 2.0, 0) | old], [record("op", 2.0, 1) | new])
        assert (change.low, change.high) == pytest.approx(expected)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "base.json", tmp_path / "new.json"]
    base = [record("op", 2.0, 0), record("eager", 4.0, 0), record("op", 3.0, 0, T=64)]
    new = [record("op", 2.3, 1), record("eager", 4.0, 1), record("op", 3.0, 1, T=64, status="wrong")]
    for path, records in zip(paths, (base, new), strict=True):
        saved_run.save(path, ENVIRONMENT, ["bench"], records)
    return paths


@pytest.mark.parametrize("options, code", [([], 0), (["--fail-on-regression"], 1)], ids=["told", "failed"])
def test_command(options: list[str], code: int, files: list[Path], capsys: pytest.CaptureFixture) -> None:
    assert main(["compare", *map(str, files), *options]) == code
    printed = capsys.readouterr().out
    heading = r"^norm_concat, tiny:eagle3, bf16\n +T timer +base ms +new ms +time +control verdict$"
    assert re.search(heading, printed, re.MULTILINE), printed
    assert re.search(r"^ +8 clock op +2\.0\d +2\.3\d +1\.1\d\dx +1\.0\d\dx slower$", printed, re.MULTILINE), printed
    assert "lost (wrong)" in printed
    assert "2 of 2 rows are slower by more than 5 % or lost" in printed


def test_tolerance_is_the_users(files: list[Path]) -> None:
    saved_run.save(files[1], ENVIRONMENT, ["bench"], [record("op", 2.3, 1), record("eager", 4.0, 1)])
    assert main(["compare", *map(str, files), "--fail-on-regression", "--tolerance", "5%"]) == 1
    assert main(["compare", *map(str, files), "--fail-on-regression", "--tolerance", "0.3"]) == 0


def test_another_machine_is_told(files: list[Path], capsys: pytest.CaptureFixture) -> None:
    saved_run.save(files[1], ENVIRONMENT | {"torch": "2.14.0"}, ["bench"], [record("op", 2.0, 1)])
    assert main(["compare", *map(str, files)]) == 0
    assert "note: torch is 2.13.0 in BASE and 2.14.0 in NEW" in capsys.readouterr().out


def test_what_is_printed_fits_80_columns(files: list[Path], capsys: pytest.CaptureFixture) -> None:
    """Every verdict, with the longest names, sizes and times there are."""
    longest = max(
        (f"{shape.name}:{stage.kind}" for shape in model_shapes().values() for stage in shape.stages), key=len
    )
    preset, _, stage = longest.partition(":")
    sizes = {"op": "norm_concat_linear", "preset": preset, "stage": stage, "T": 131072}

    def run(*times: tuple[float, str]) -> list[dict]:
        forms = [f"{form}:{backend}" for form in measure.FORMS for backend in environment.BACKENDS]
        forms = sorted(forms, key=len)[-len(times) :]
        rows = [record(name, each, 0, status=status) for name, (each, status) in zip(forms, times, strict=True)]
        return [row | sizes | {"is_ours": True} for row in rows]

    ok = [(54321.0, "ok"), (54321.0, "ok"), (0.00123, "ok"), (54321.0, "ok"), (1.0, "skipped")]
    new = [(98765.0, "ok"), (54321.0, "skipped"), (54321.0, "wrong"), (12345.0, "failed"), (1.0, "ok")]
    name = "a-processor-of-a-name-so-long-that-its-slug-needs-the-better-half-of-a-terminal"
    saved_run.save(files[0], ENVIRONMENT | {"device_slug": name}, ["bench"], run(*ok))
    saved_run.save(files[1], ENVIRONMENT, ["bench"], run(*new))
    main(["compare", *map(str, files)])
    slowed = [record("op", 98765.0, 1), record("eager", 54321.0, 1)]
    saved_run.save(files[0], ENVIRONMENT, ["bench"], [record("op", 54321.0, 0), record("eager", 29876.0, 0)])
    saved_run.save(files[1], ENVIRONMENT, ["bench"], slowed)
    main(["compare", *map(str, files)])
    printed = capsys.readouterr().out
    for verdict in (" slower", " lost (skipped)", " not timed", " machine moved"):
        assert verdict in printed
    line = max((line for line in printed.splitlines() if name not in line), key=len)
    assert len(line) <= 80, line


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "not a saved run"),
        ('{"schema_version": 1, "records": []}', "schema version is 1, expected 2; measure again"),
        ('{"schema_version": 2, "environment": {}, "records": []}', "have no row of ours in common"),
    ],
    ids=["corrupt", "older", "nothing-in-common"],
)
def test_bad_file_is_one_sentence(text: str, message: str, files: list[Path], capsys: pytest.CaptureFixture) -> None:
    files[1].write_text(text)
    with pytest.raises(SystemExit) as stopped:
        main(["compare", *map(str, files)])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
