"""The tables of runs, as text and Markdown; `eagle-kernels report`."""

import argparse
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..cli_types import Command
from ..measure import geometric_mean, is_ours
from ..ops import WORKLOADS
from ..output import Unwritable, say, three_digits, wrap
from ..workloads import DENSE
from . import curves, saved_run

# The indent of a note below a row.
_NOTE = " " * 8
_HAS_PRODUCT = ("norm_concat_linear",)


class Layout:
    """A table of what was measured side by side; the first column is ours, unless a run has only baselines.

    In Markdown a line per T: a time per column, speedups of the first column, and its GB/s and TFLOP/s. In text a line
    per T and column, which fits 80 characters whatever is measured.
    """

    def __init__(self, names: Sequence[str], op: str, timers: Sequence[str]) -> None:
        self.names = list(names)
        self.ours = [name for name in names if is_ours(name)]
        self.first = (self.ours or self.names)[0]
        self.baselines = [name for name in names if not is_ours(name) and name != self.first]
        self.timers = timers
        self.unit, self.scale = ("ms", 1.0) if "clock" in timers else ("us", 1e3)
        self.has_product = op in _HAS_PRODUCT
        timer = ["timer"] if len(timers) > 1 else []
        times = [f"{name} {self.unit}" for name in self.names]
        speedups = [f"vs {name}" for name in self.baselines]
        product = ["TFLOP/s", "% matmul"] if self.has_product else []
        self.titles = ["T", *timer, *times, *speedups, "GB/s", "% memory", *product]

    @classmethod
    def of(cls, block: Sequence[dict]) -> "Layout":
        """The layout of saved records of one table."""
        names, timers = (dict.fromkeys(record[field] for record in block) for field in ("variant", "timer"))
        return cls(list(names), block[0]["op"], list(timers))

    def header(self) -> str:
        product = ["matmul"] if self.has_product else []
        titles = ["T", "timer", "column", self.unit, "p20-p80", "speedup", "GB/s", "memory", *product]
        return self._format(titles)

    def lines(self, row: Sequence[dict]) -> Iterator[str]:
        """A line for each column of a row, or the sentence that says why there is none; notes below them."""
        by_name = {record["variant"]: record for record in row if record["status"] == "ok"}
        names = [name for name in self.names if name in by_name] if self.first in by_name else []
        for number, name in enumerate(names):
            yield self._line(by_name[name], is_first=number == 0)
        if not names:
            yield wrap(_no_times_reason(row), _NOTE, first=f"{row[0]['T']:>6}  ")
        for record in row:
            if record["status"] == "failed":
                yield wrap(f"{record['variant']} failed: {record['reason']}", _NOTE, first=_NOTE)
        timed = [record for record in row if record["status"] == "ok"]
        if timed and not timed[0].get("cold", True):
            size, limit = timed[0]["rotated_bytes"] >> 20, timed[0]["copies_limited_by"]
            yield wrap(f"not cold: {timed[0]['copies']} copies are {size} MiB, limited by {limit}", _NOTE, first=_NOTE)
        for record in filter(saved_run.is_above_ceiling, row):
            yield wrap(f"ABOVE THE CEILING: {saved_run.ceiling_sentence(record)}", _NOTE, first=_NOTE)

    def _line(self, record: dict, is_first: bool) -> str:
        median, low, high = (three_digits(record[name] * self.scale) for name in ("median_ms", "p20_ms", "p80_ms"))
        row = (str(record["T"]), record["timer"]) if is_first else ("", "")
        speedup = "" if record["is_ours"] or "speedup" not in record else _speedup_text(record)
        shares = [f"{100 * saved_run.memory_share(record):.0f} %"]
        if self.has_product:
            shares.append(f"{_share(record['tflops'], record['matmul_tflops'])} %")
        return self._format(
            [*row, record["variant"], median, f"{low}-{high}", speedup, f"{record['gbps']:.1f}", *shares]
        )

    def cells(self, row: Sequence[dict]) -> list[str]:
        """The texts of a row; empty where nothing was timed."""
        by_name = {record["variant"]: record for record in row if record["status"] == "ok"}
        if self.first not in by_name:
            return []
        first = by_name[self.first]
        timer = [first["timer"]] if len(self.timers) > 1 else []
        times = [self._time(by_name[name]) if name in by_name else "-" for name in self.names]
        speedups = [_speedup_text(by_name[name]) if name in by_name else "-" for name in self.baselines]
        figures = [f"{first['gbps']:.1f}", f"{100 * saved_run.memory_share(first):.0f}"]
        if self.has_product:
            figures += [three_digits(first["tflops"]), _share(first["tflops"], first["matmul_tflops"])]
        return [str(first["T"]), *timer, *times, *speedups, *figures]

    def footer(self, records: Sequence[dict]) -> Iterator[str]:
        """Geometric means over the rows of the table."""
        return footer(records) if len({record["T"] for record in records}) > 1 else iter(())

    def _time(self, record: dict) -> str:
        median, *spread = (three_digits(record[name] * self.scale) for name in ("median_ms", "p20_ms", "p80_ms"))
        return f"{median} ({' - '.join(spread)})"

    def _format(self, cells: Sequence[str]) -> str:
        T, timer, name, *figures = cells
        timer = f" {timer:<5}" if len(self.timers) > 1 else ""
        width = max(map(len, (*self.names, "column")))
        widths = (8, 16 if self.unit == "ms" else 15, 8, 7, 7, 7)  # 80 characters with the longest names
        return f"{T:>6}{timer} {name:<{width}}" + "".join(map(str.rjust, figures, widths))


def footer(records: Sequence[dict]) -> Iterator[str]:
    """A line per form of ours and timer: geometric mean, best and worst of its speedups over each baseline."""
    timers = list(dict.fromkeys(record["timer"] for record in records))
    for timer, ours in itertools.product(timers, _variants(records, True)):
        timed = [record for record in records if record["timer"] == timer]
        parts = []
        for baseline in _variants(timed, False):
            shown = [row for row in saved_run.rows(timed) if baseline in saved_run.headline_baselines(row)]
            values = [value for row in shown if (value := saved_run.speedup(row, ours, baseline)) is not None]
            if values:
                spread = f"{min(values):.2f} to {max(values):.2f}, {len(values)} rows"
                parts.append(f"{geometric_mean(values):.2f}x {baseline} ({spread})")
        if parts:
            yield f"geomean {ours}{f' ({timer})' if len(timers) > 1 else ''}: " + ", ".join(parts)


def markdown(records: Sequence[dict]) -> Iterator[str]:
    """The tables in Markdown: one per op, shape and dtype."""
    for block in saved_run.blocks(records):
        layout = Layout.of(block)
        yield f"**{saved_run.title(block[0])}**"
        yield ""
        yield "| " + " | ".join(layout.titles) + " |"
        yield "|" + " ---: |" * len(layout.titles)
        for row in saved_run.rows(block):
            cells = layout.cells(row) or [str(row[0]["T"]), _no_times_reason(row)]
            cells += [""] * (len(layout.titles) - len(cells))
            yield "| " + " | ".join(cells) + " |"
        yield ""


def _variants(records: Sequence[dict], ours: bool) -> list[str]:
    return list(dict.fromkeys(record["variant"] for record in records if record["is_ours"] == ours))


def _share(value: float, ceiling: float | None) -> str:
    """Per cent of what this machine does; "-" where that was not measured."""
    return "-" if ceiling is None else f"{100 * value / ceiling:.0f}"


def _speedup_text(record: dict) -> str:
    """The factor, with "~" where the interval holds 1 and the two may be equal."""
    if "speedup" not in record:
        return "-"
    unsure = record["speedup_low"] <= 1 <= record["speedup_high"]
    return f"{'~' if unsure else ''}{record['speedup']:.2f}x"


def _no_times_reason(row: Sequence[dict]) -> str:
    wrong = [record for record in row if record["status"] == "wrong"]
    if wrong:
        errors = [f"{record['variant']} {error_text(record)}" for record in wrong]
        return f"WRONG RESULT, no times: {', '.join(errors)}"
    reasons = dict.fromkeys(record["reason"] for record in row if record["status"] == "skipped")
    return f"skipped: {'; '.join(reasons)}" if reasons else "nothing was timed"


def error_text(record: dict) -> str:
    error, bound = (record.get(name) for name in ("error", "error_bound"))
    return ", ".join(
        f"{name} {'no number' if value is None else f'{value:.2e}'}"
        for name, value in (("error", error), ("bound", bound))
    )


# A run with more tables than this gets one line per shape: its tables would fill pages, and are in the JSON.
_MAX_TABLES = 6


def render(path: Path | None, run: dict) -> str:
    """What the run was measured on, its tables, its geometric means, its plot, and the file they come from."""
    env, records = run["environment"], run["records"]
    lines = [
        f"{machine(env)}; torch {env['torch']}; {env['date']}, commit {env['commit']}. Times are medians (p20 - p80).",
        "",
        *_tables(records),
        *(f"- {line}" for line in (*footer(records), *saved_run.ceiling_lines(records))),
    ]
    if path is not None:
        source = path.as_posix()
        plot = path.with_suffix(".png")
        picture = ["", f"![{path.stem}: speedup and share of the roofline over T]({plot.as_posix()})"]
        lines += picture if plot.exists() else []
        lines += ["", f"From [`{source}`]({source}) by `eagle-kernels report`."]
    return "\n".join(lines) + "\n"


def _tables(records: Sequence[dict]) -> Iterator[str]:
    tables = list(saved_run.blocks(records))
    if len(tables) <= _MAX_TABLES:
        return markdown(records)
    but_for_the_weight = {(record["timer"], *saved_run.block_key(record | {"weight": DENSE})) for record in records}
    has_ours = any(record["is_ours"] for record in records)
    return _of_weights(records) if len(but_for_the_weight) == 1 and has_ours else _summary(records)


def machine(env: dict) -> str:
    if env["device"] == "cuda":
        return f"{env['gpu']}, driver {env['driver']}, CUDA {env['cuda']}"
    return f"{env['cpu_model']}, {env['threads']} of {env['cpu_cores']} cores, {env['cpu_isa']}"


def _of_weights(records: Sequence[dict]) -> Iterator[str]:
    """The table of one op and shape whose weight has several formats: a line per format and T, the figures of the first
    of ours, its speedups over our other forms (`dense`: the weight before it was quantized) and over the baselines."""
    ours, *others = sorted(_variants(records, True), key=lambda name: name == "dense")  # in order, but for `dense`
    others += dict.fromkeys(name for row in saved_run.rows(records) for name in saved_run.headline_baselines(row))
    titles = ["weight", "T", f"{ours} ms", "MB", "GB/s", "% memory", *(f"vs {name}" for name in others)]
    yield f"**{saved_run.title(records[0] | {'weight': DENSE})}**"
    yield ""
    yield "| " + " | ".join(titles) + " |"
    yield "| --- |" + " ---: |" * (len(titles) - 1)
    for row in saved_run.rows(records):
        first = next((record for record in row if record["variant"] == ours and record["status"] == "ok"), None)
        figures = [_no_times_reason(row), *[""] * (len(titles) - 3)]
        if first is not None:
            figures = [three_digits(first["median_ms"]), f"{first['bytes'] / 1e6:.1f}", f"{first['gbps']:.1f}"]
            factors = [saved_run.speedup(row, ours, name) for name in others]
            figures += [
                f"{100 * saved_run.memory_share(first):.0f}",
                *("-" if f is None else f"{f:.2f}x" for f in factors),
            ]
        yield "| " + " | ".join([row[0]["weight"], str(row[0]["T"]), *figures]) + " |"
    yield ""


def _summary(records: Sequence[dict]) -> Iterator[str]:
    """A table per op, dtype, timer and baseline: a line per shape, a column per T, the speedup of the first of ours.

    For baselines measured alone, their share of the roofline.
    """
    groups: dict[tuple, list[list[dict]]] = {}
    for row in saved_run.rows(records):
        ours = next((record["variant"] for record in row if record["is_ours"]), None)
        for baseline in saved_run.headline_baselines(row):
            table = (row[0]["op"], saved_run.dtypes(row[0]), row[0]["timer"], ours, baseline)
            groups.setdefault(table, []).append(row)
    for (op, dtype, timer, ours, baseline), group in groups.items():
        counts = sorted({row[0]["T"] for row in group})
        what = f"{ours} over {baseline}" if ours else f"{baseline}, % of the roofline"
        yield f"**{op}, {dtype}, {timer}: {what}**"
        yield ""
        sizes = [name for name in WORKLOADS[op].sizes if name != "S" or any(row[0]["S"] > 1 for row in group)]
        yield "| " + " | ".join(["preset", *sizes, *(f"T={T}" for T in counts)]) + " |"
        yield "| --- |" + " ---: |" * (len(sizes) + len(counts))
        shapes: dict[tuple, dict[int, str]] = {}
        for row in group:
            first = row[0]
            shape = (f"{first['preset']}:{first['stage']}", *(first[name] for name in sizes))
            shapes.setdefault(shape, {})[first["T"]] = _summary_cell(row, ours, baseline)
        for shape, cells in shapes.items():
            yield "| " + " | ".join([*map(str, shape), *(cells.get(T, "") for T in counts)]) + " |"
        yield ""


def _summary_cell(row: Sequence[dict], ours: str | None, baseline: str) -> str:
    if ours is not None:
        value = saved_run.speedup(row, ours, baseline)
        return "-" if value is None else f"{value:.2f}x"
    return next(
        (f"{saved_run.roofline_share(r):.0f}" for r in row if r["variant"] == baseline and r["status"] == "ok"), "-"
    )


def _add_report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULT", help="files that bench --json wrote")
    parser.add_argument("--plots", action="store_true", help="draw each run beside its file, and show the plot")


def _run_report(arguments: argparse.Namespace) -> int:
    try:
        say("\n".join(render_files(arguments.results, arguments.plots).values()).removesuffix("\n"))
    except ImportError:
        arguments.parser.error("argument --plots: matplotlib is not installed: pip install 'eagle-kernels[plot]'")
    except (saved_run.UnreadableResult, Unwritable, ValueError) as failure:
        arguments.parser.error(str(failure))
    return 0


def render_files(paths: Sequence[Path], plots: bool) -> dict[Path, str]:
    """The Markdown of every file; with `plots` each run is first drawn into a PNG beside its file."""
    runs = {path: saved_run.load_shown(path) for path in paths}
    if plots:
        for path, run in runs.items():
            curves.draw([run], path.with_suffix(".png"))
    return {path: render(path, run) for path, run in runs.items()}


REPORT = Command("Turn saved runs into Markdown tables and plots.", _add_report_arguments, _run_report)
