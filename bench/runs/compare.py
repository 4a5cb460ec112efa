"""What changed between two saved runs; `eagle-kernels compare`."""

import argparse
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .. import cli_types
from ..cli_types import Command
from ..measure import geometric_mean
from ..output import say, three_digits, wrap
from . import saved_run

# Baselines that run only torch: they tell a slower machine from slower code of ours.
_CONTROLS = ("eager", "eager-out", "linear", "compile", "inductor-max")
_SAME_MACHINE = ("device_slug", "threads", "torch", "triton", "driver")


def _add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("base", type=Path, metavar="BASE", help="a file that bench --json wrote")
    add("new", type=Path, metavar="NEW", help="a later one")
    help_text = "slower by this is the same: 5%% (default) or 0.05"
    add("--tolerance", type=cli_types.percentage, default=0.05, metavar="5%", help=help_text)
    add("--fail-on-regression", action="store_true", help="exit 1 where a row became slower, wrong or failed")


def _run_compare(arguments: argparse.Namespace) -> int:
    try:
        base, new = saved_run.load(arguments.base), saved_run.load(arguments.new)
    except saved_run.UnreadableResult as failure:
        arguments.parser.error(str(failure))
    for note in _differences(base["environment"], new["environment"]):
        say(wrap(note))
    changes = list(changes_between(base["records"], new["records"]))
    if not changes:
        arguments.parser.error(f"{arguments.base} and {arguments.new} have no row of ours in common")
    regressions = 0
    width = max(len(change.row["variant"]) for change in changes)
    for block, group in itertools.groupby(changes, key=lambda change: _block(change.row)):
        say(f"\n{block}")
        say(f"{'T':>6} {'timer':<5} {'':<{width}}{'base ms':>9}{'new ms':>8}{'time':>8}{'control':>8} verdict")
        for change in group:
            verdict = change.verdict(arguments.tolerance)
            regressions += verdict in ("slower", "lost")
            say(_line(change, verdict, width))
    say()
    factors = [change.factor for change in changes if change.factor is not None]
    if factors:
        say(f"geomean of time, new over base: {geometric_mean(factors):.3f} over {len(factors)} rows")
    say(f"{regressions} of {len(changes)} rows are slower by more than {100 * arguments.tolerance:g} % or lost")
    return 1 if regressions and arguments.fail_on_regression else 0


@dataclass(frozen=True)
class Change:
    """One of our columns in two runs.

    factor: new median over base median, None where one of the two was not timed; low, high: its 95 % interval from the
    noise inside both runs. control: how the torch baselines of the row moved between the runs; None without any.
    """

    row: dict
    base_ms: float | None
    new_ms: float | None
    factor: float | None
    low: float
    high: float
    control: float | None
    new_status: str

    def verdict(self, tolerance: float) -> str:
        """Slower and faster are said only where the interval leaves no doubt, and where the baselines of the same run
        did not move alike: a busy machine slows both."""
        if self.factor is None:
            return "lost" if self.base_ms is not None else "not timed"
        limit = 1 + tolerance
        against_control = self.factor / (self.control or 1.0)
        if self.low > limit and against_control > limit:
            return "slower"
        if self.high < 1 / limit and against_control < 1 / limit:
            return "faster"
        if 1 / limit <= self.factor <= limit:
            return "same"
        return "machine moved" if self.low > limit or self.high < 1 / limit else "unsure"


def changes_between(base: Sequence[dict], new: Sequence[dict]) -> Iterator[Change]:
    """Every column of ours that both runs have, in the order of the first."""
    before, after = _by_column(base), _by_column(new)
    for (row, variant), old in before.items():
        if (row, variant) not in after or not old["is_ours"]:
            continue
        now = after[row, variant]
        was_timed, is_timed = old["status"] == "ok", now["status"] == "ok"
        factor, low, high = None, math.nan, math.nan
        if was_timed and is_timed:
            factor = now["median_ms"] / old["median_ms"]
            (old_low, old_high), (now_low, now_high) = median_interval(old), median_interval(now)
            low, high = now_low / old_high, now_high / old_low
        yield Change(
            old,
            old["median_ms"] if was_timed else None,
            now["median_ms"] if is_timed else None,
            factor,
            low,
            high,
            _control(row, before, after),
            now["status"],
        )


def median_interval(record: dict) -> tuple[float, float]:
    """The 95 % interval of a median, in ms, from what a record keeps: p20, p80 and the number of rounds.

    By order statistics it reaches 0.98 / sqrt(n) of the ranks to both sides; p20 and p80 are 0.3 of them away.
    """
    ranks = 0.98 / math.sqrt(record["rounds"]) / 0.3
    median = record["median_ms"]
    return median - (median - record["p20_ms"]) * min(ranks, 1.5), median + (record["p80_ms"] - median) * ranks


def _by_column(records: Sequence[dict]) -> dict[tuple[tuple, str], dict]:
    return {(saved_run.row_key(record), record["variant"]): record for record in records}


def _control(row: tuple, before: dict, after: dict) -> float | None:
    factors = [
        after[row, name]["median_ms"] / before[row, name]["median_ms"]
        for name in _CONTROLS
        if all(run.get((row, name), {}).get("status") == "ok" for run in (before, after))
    ]
    return geometric_mean(factors) if factors else None


def _differences(base: dict, new: dict) -> Iterator[str]:
    for name in _SAME_MACHINE:
        if base.get(name) != new.get(name):
            yield f"note: {name} is {base.get(name)} in BASE and {new.get(name)} in NEW"


def _block(row: dict) -> str:
    return f"{row['op']}, {saved_run.shape([row])}, {saved_run.dtypes(row)}"


def _line(change: Change, verdict: str, width: int) -> str:
    row = change.row
    cells = [f"{row['T']:>6} {row['timer']:<5} {row['variant']:<{width}}"]
    times = ["-" if ms is None else three_digits(ms) for ms in (change.base_ms, change.new_ms)]
    factors = ["-" if factor is None else f"{factor:.3f}x" for factor in (change.factor, change.control)]
    cells += map(str.rjust, (*times, *factors), (9, 8, 8, 8))
    return "".join(cells) + f" {verdict}" + (f" ({change.new_status})" if verdict == "lost" else "")


COMPARE = Command(
    "Compare two saved runs of the same rows: what became slower or faster, beyond the noise of both.",
    _add_compare_arguments,
    _run_compare,
)
