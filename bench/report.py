"""Saved runs: their file, their tables as text and Markdown, their curves, and what changed between two of them."""

import argparse
import csv
import functools
import io
import itertools
import json
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_kernels.quantized_weight import WEIGHT_FORMATS

from . import cli_types
from .baselines import BASELINES
from .cli_types import Command
from .measure import TIMERS, geometric_mean, is_ours
from .ops import WORKLOADS
from .output import Unwritable, check_writable, say, wrap, write_bytes, write_text
from .workloads import DENSE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# 2: the timer of each record, and the rate of the matrix product beside those of copy and read.
SCHEMA_VERSION = 2

# What every record has; records of rows that were timed have the figures too.
ROW_FIELDS = ("op", "preset", "stage", "norm", "S", "K", "H", "D", "V", "T", "dtype", "weight", "timer")
RECORD_FIELDS = (*ROW_FIELDS, "variant", "is_ours", "status")
_RATES = ("copy_gbps", "read_gbps", "matmul_tflops")
FIGURES = ("median_ms", "min_ms", "p20_ms", "p80_ms", "rounds", "bytes", "gbps", "tflops", "floor_ms", *_RATES)
STATUSES = ("ok", "wrong", "skipped", "failed")

# What the fields of records and environment may be; those that are in _OPTIONAL too may be None: not measured.
_TEXTS = (
    *("op", "preset", "stage", "norm", "dtype", "timer", "variant", "status", "reason", "plan", "copies_limited_by"),
    *("ceiling", "fastest_stream"),
    *("device_slug", "torch", "date", "commit", "cpu_model", "cpu_isa", "gpu", "driver", "cuda"),
)
_COUNTS = ("K", "H", "D", "V", "T", "S", "n", "d", "rounds", "copies", "rotated_bytes", "threads", "cpu_cores")
_POSITIVE = ("median_ms", "min_ms", "p20_ms", "p80_ms", "bytes", "gbps", *_RATES, "add_gbps", "memory_gbps")
_NUMBERS = ("tflops", "floor_ms", "error", "error_bound", "speedup", "speedup_low", "speedup_high")
_OPTIONAL = ("add_gbps", "memory_gbps", "matmul_tflops", "error")
_TIMER_ORDER = tuple(timer for timers in TIMERS.values() for timer in timers)
_FLAGS = ("is_ours", "cold", "array_exceeds_cache")
# The logarithm of a ratio of two numbers within these limits is a float.
_SMALLEST, _LARGEST = 1e-100, 1e100

# Fields of the environment that the line above a table needs.
_SHOWN = {
    "cpu": ("device_slug", "torch", "date", "commit", "cpu_model", "threads", "cpu_cores", "cpu_isa"),
    "cuda": ("device_slug", "torch", "date", "commit", "gpu", "driver", "cuda"),
}

# The part of the environment that every line of a CSV file repeats, since nothing stands above its records.
_CSV_ENVIRONMENT = ("device_slug", "version", "commit", "torch", "date")


class UnreadableResult(Exception):
    """A file that is no saved run of this schema; the message names the file."""


def save(path: Path, environment: dict, argv: list[str], records: list[dict]) -> None:
    """Write a run; the file is replaced only once all of it is written."""
    run = {"schema_version": SCHEMA_VERSION, "argv": argv, "environment": environment, "records": records}
    write_text(path, json.dumps(run, indent=1) + "\n")


def save_csv(path: Path, environment: dict, records: Sequence[dict]) -> None:
    """The records as lines, with a column for every field that any of them has."""
    fields = list(dict.fromkeys(field for record in records for field in record))
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, [*fields, *_CSV_ENVIRONMENT])
    writer.writeheader()
    writer.writerows(record | {name: environment[name] for name in _CSV_ENVIRONMENT} for record in records)
    write_text(path, file.getvalue())


def load(path: Path) -> dict:
    """Read a run that `save` wrote.

    Raises:
        UnreadableResult: no such file, no JSON, another schema, or records with fields missing or of the wrong kind.
    """
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
    except OSError as failure:
        raise UnreadableResult(f"{path}: {failure.strerror}") from None
    except (ValueError, RecursionError) as failure:
        raise UnreadableResult(f"{path}: not a saved run: {failure}") from None
    version = run.get("schema_version") if isinstance(run, dict) else None
    if version != SCHEMA_VERSION:
        raise UnreadableResult(f"{path}: schema version is {version}, expected {SCHEMA_VERSION}; measure again")
    absent = [name for name, kind in (("environment", dict), ("records", list)) if not isinstance(run.get(name), kind)]
    if absent:
        raise UnreadableResult(f"{path}: schema version {version}, but without {' and '.join(absent)}")
    for number, record in enumerate(run["records"]):
        if isinstance(record, dict):
            record.setdefault("weight", DENSE)  # runs saved before there were other weights
            record.setdefault("S", 1)
        if (wrong := _record_fault(record)) is not None:
            raise UnreadableResult(f"{path}: record {number} {wrong}")
    return run


def _record_fault(record: Any) -> str | None:
    """What is wrong with a record; None where nothing is."""
    if not isinstance(record, dict):
        return f"is {record!r}, expected an object"
    missing = [name for name in RECORD_FIELDS if name not in record]
    figures: tuple[str, ...] = ()
    if (status := record.get("status")) in ("skipped", "failed"):
        figures = ("reason",)
    elif status == "ok":
        figures = FIGURES
        figures += ("rotated_bytes", "copies", "copies_limited_by") if record.get("cold") is False else ()
        figures += ("speedup_low", "speedup_high") if "speedup" in record else ()
    missing += [name for name in figures if name not in record]
    if missing:
        return f"has no {', '.join(missing)}"
    for name, value in record.items():
        if (expected := _expected(name, value)) is not None:
            return f"has {name} {value!r}, expected {expected}"
    return None


def _expected(name: str, value: Any) -> str | None:
    """What a field should be; None where it is that, or unknown."""
    choices = {"op": tuple(WORKLOADS), "status": STATUSES, "timer": _TIMER_ORDER, "weight": (DENSE, *WEIGHT_FORMATS)}
    if name in choices:
        return None if value in choices[name] else f"one of {', '.join(choices[name])}"
    if name == "variant":
        return None if isinstance(value, str) and (is_ours(value) or value in BASELINES) else "a form or a baseline"
    if name in _TEXTS:  # JSON may have half of a UTF-16 pair, which no font draws
        return None if isinstance(value, str) and re.search("[\ud800-\udfff]", value) is None else "text"
    if name in _FLAGS:
        return None if isinstance(value, bool) else "true or false"
    if name in _OPTIONAL and value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if name in _COUNTS:
        return None if is_number and isinstance(value, int) and 1 <= value < 2**63 else "a count"
    if name in _POSITIVE:
        is_inside = is_number and _SMALLEST <= value <= _LARGEST
        return None if is_inside else f"a number from {_SMALLEST} to {_LARGEST}"
    return None if name not in _NUMBERS or (is_number and 0 <= value <= _LARGEST) else f"a number from 0 to {_LARGEST}"


def _load_shown(path: Path) -> dict:
    """`load` for commands that name the machine."""
    run = load(path)
    environment = run["environment"]
    if (device := environment.get("device")) not in tuple(_SHOWN):  # a list would be no key
        raise UnreadableResult(f"{path}: the environment has device {device!r}, expected cpu or cuda")
    if absent := [name for name in _SHOWN[device] if name not in environment]:
        raise UnreadableResult(f"{path}: the environment has no {', '.join(absent)}")
    for name in _SHOWN[device]:
        if (expected := _expected(name, environment[name])) is not None:
            raise UnreadableResult(f"{path}: the environment has {name} {environment[name]!r}, expected {expected}")
    return run


def row_key(record: dict) -> tuple:
    """What tells the rows of a run apart."""
    return tuple(record[field] for field in ROW_FIELDS)


# The indent of a note below a row.
_NOTE = " " * 8

_HAS_NORM = ("norm_concat_linear", "norm_concat")
_HAS_PRODUCT = ("norm_concat_linear",)
_BLOCK_FIELDS = tuple(field for field in ROW_FIELDS if field not in ("T", "timer"))


def title(record: dict) -> str:
    """The line above the rows of one op, shape and dtype."""
    names = [name for name in WORKLOADS[record["op"]].sizes if name != "S" or record["S"] > 1]
    sizes = " ".join(f"{name}={record[name]}" for name in names)
    norm = f", norm {record['norm']}" if record["op"] in _HAS_NORM else ""
    return f"{record['op']}, {record['preset']}:{record['stage']}, {dtypes(record)}: {sizes}{norm}"


def dtypes(record: dict) -> str:
    """The rows' dtype, and the weight's format where the weight is not dense."""
    return record["dtype"] if record["weight"] == DENSE else f"{record['dtype']} x {record['weight']}"


def block_key(record: dict) -> tuple:
    """What tells the tables of a run apart."""
    return tuple(record[field] for field in _BLOCK_FIELDS)


def blocks(records: Sequence[dict]) -> Iterator[list[dict]]:
    """Records of one table each."""
    for _, block in itertools.groupby(records, key=block_key):
        yield list(block)


def rows(records: Sequence[dict]) -> Iterator[list[dict]]:
    """Records of one row each."""
    for _, row in itertools.groupby(records, key=row_key):
        yield list(row)


def speedup(row: Sequence[dict], ours: str, baseline: str) -> float | None:
    """How many times faster ours is, by medians; None where either was not timed."""
    medians = {record["variant"]: record["median_ms"] for record in row if record["status"] == "ok"}
    return medians[baseline] / medians[ours] if ours in medians and baseline in medians else None


def roofline_share(record: dict) -> float:
    """Per cent of what the ceilings of the same run allow."""
    return 100 * record["floor_ms"] / record["median_ms"]


# A share above this means that the ceiling is wrong; between 1 and this, it is the noise of two medians.
_CEILING_LIMIT = 1.03


def memory_share(record: dict) -> float:
    """Share of the bandwidth that the streams of the same run reached with the row's mix of reads and writes."""
    return record["gbps"] / _memory_gbps(record)


def _memory_gbps(record: dict) -> float:
    # Runs saved before `memory_gbps` existed: the better of two rates was their ceiling.
    return record.get("memory_gbps") or max(record["copy_gbps"], record["read_gbps"])


def is_above_ceiling(record: dict) -> bool:
    """Whether a column was faster than memory was measured to be: then that measurement is wrong, or the result.

    It is judged only where streams ran beside it and its data came from memory.
    """
    judged = record["status"] == "ok" and record.get("ceiling") == "streams" and record.get("cold")
    return bool(judged and record.get("array_exceeds_cache")) and memory_share(record) > _CEILING_LIMIT


def ceiling_sentence(record: dict) -> str:
    """The row, its share, and both rates."""
    row = f"{record['op']} {record['preset']}:{record['stage']} T={record['T']} {dtypes(record)} {record['variant']}"
    return (
        f"{row} moved {record['gbps']:.1f} GB/s, {100 * memory_share(record):.0f} % of the {_memory_gbps(record):.1f} "
        f"GB/s that streaming reached beside it (read {record['read_gbps']:.1f}, copy {record['copy_gbps']:.1f}), "
        f"expected at most {100 * _CEILING_LIMIT:.0f} %"
    )


def ceiling_lines(records: Sequence[dict]) -> Iterator[str]:
    """What "memory" is a share of where no stream runs beside the rows: the fastest before each row, with its rate."""
    rates: dict[str, list[float]] = {}
    for record in records:
        if stream := record.get("fastest_stream"):
            rates.setdefault(stream, []).append(_memory_gbps(record))
    for stream, of_rows in rates.items():
        yield f"memory: share of the fastest stream before each row: {stream}, {_span(of_rows)} GB/s"


def _span(values: Sequence[float]) -> str:
    low, high = f"{min(values):.0f}", f"{max(values):.0f}"
    return low if low == high else f"{low} to {high}"


def headline_baselines(row: Sequence[dict]) -> list[str]:
    """The baselines of means and curves: not `eager` where `eager-out` was timed, the fair one of the two; and not
    `dequantize`, a call without a kernel for codes, which nobody would choose."""
    names = [record["variant"] for record in row if not record["is_ours"]]
    timed = {record["variant"] for record in row if record["status"] == "ok"}
    left_out = {"dequantize", *(["eager"] if "eager-out" in timed else [])}
    return [name for name in names if name not in left_out]


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
        for record in filter(is_above_ceiling, row):
            yield wrap(f"ABOVE THE CEILING: {ceiling_sentence(record)}", _NOTE, first=_NOTE)

    def _line(self, record: dict, is_first: bool) -> str:
        median, low, high = (_three_digits(record[name] * self.scale) for name in ("median_ms", "p20_ms", "p80_ms"))
        row = (str(record["T"]), record["timer"]) if is_first else ("", "")
        speedup = "" if record["is_ours"] or "speedup" not in record else _speedup_text(record)
        shares = [f"{100 * memory_share(record):.0f} %"]
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
        figures = [f"{first['gbps']:.1f}", f"{100 * memory_share(first):.0f}"]
        if self.has_product:
            figures += [_three_digits(first["tflops"]), _share(first["tflops"], first["matmul_tflops"])]
        return [str(first["T"]), *timer, *times, *speedups, *figures]

    def footer(self, records: Sequence[dict]) -> Iterator[str]:
        """Geometric means over the rows of the table."""
        return footer(records) if len({record["T"] for record in records}) > 1 else iter(())

    def _time(self, record: dict) -> str:
        median, *spread = (_three_digits(record[name] * self.scale) for name in ("median_ms", "p20_ms", "p80_ms"))
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
            shown = [row for row in rows(timed) if baseline in headline_baselines(row)]
            values = [value for row in shown if (value := speedup(row, ours, baseline)) is not None]
            if values:
                spread = f"{min(values):.2f} to {max(values):.2f}, {len(values)} rows"
                parts.append(f"{geometric_mean(values):.2f}x {baseline} ({spread})")
        if parts:
            yield f"geomean {ours}{f' ({timer})' if len(timers) > 1 else ''}: " + ", ".join(parts)


def markdown(records: Sequence[dict]) -> Iterator[str]:
    """The tables in Markdown: one per op, shape and dtype."""
    for block in blocks(records):
        layout = Layout.of(block)
        yield f"**{title(block[0])}**"
        yield ""
        yield "| " + " | ".join(layout.titles) + " |"
        yield "|" + " ---: |" * len(layout.titles)
        for row in rows(block):
            cells = layout.cells(row) or [str(row[0]["T"]), _no_times_reason(row)]
            cells += [""] * (len(layout.titles) - len(cells))
            yield "| " + " | ".join(cells) + " |"
        yield ""


def _variants(records: Sequence[dict], ours: bool) -> list[str]:
    return list(dict.fromkeys(record["variant"] for record in records if record["is_ours"] == ours))


def _share(value: float, ceiling: float | None) -> str:
    """Per cent of what this machine does; "-" where that was not measured."""
    return "-" if ceiling is None else f"{100 * value / ceiling:.0f}"


def _three_digits(value: float) -> str:
    """12.3 and 0.0123 and 1234: three digits, no exponent."""
    decimals = 0
    while decimals < 6 and value * 10**decimals < 100:
        decimals += 1
    return f"{value:.{decimals}f}"


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
        *(f"- {line}" for line in (*footer(records), *ceiling_lines(records))),
    ]
    if path is not None:
        source = path.as_posix()
        plot = path.with_suffix(".png")
        picture = ["", f"![{path.stem}: speedup and share of the roofline over T]({plot.as_posix()})"]
        lines += picture if plot.exists() else []
        lines += ["", f"From [`{source}`]({source}) by `eagle-kernels report`."]
    return "\n".join(lines) + "\n"


def _tables(records: Sequence[dict]) -> Iterator[str]:
    tables = list(blocks(records))
    if len(tables) <= _MAX_TABLES:
        return markdown(records)
    but_for_the_weight = {(record["timer"], *block_key(record | {"weight": DENSE})) for record in records}
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
    others += dict.fromkeys(name for row in rows(records) for name in headline_baselines(row))
    titles = ["weight", "T", f"{ours} ms", "MB", "GB/s", "% memory", *(f"vs {name}" for name in others)]
    yield f"**{title(records[0] | {'weight': DENSE})}**"
    yield ""
    yield "| " + " | ".join(titles) + " |"
    yield "| --- |" + " ---: |" * (len(titles) - 1)
    for row in rows(records):
        first = next((record for record in row if record["variant"] == ours and record["status"] == "ok"), None)
        figures = [_no_times_reason(row), *[""] * (len(titles) - 3)]
        if first is not None:
            figures = [_three_digits(first["median_ms"]), f"{first['bytes'] / 1e6:.1f}", f"{first['gbps']:.1f}"]
            factors = [speedup(row, ours, name) for name in others]
            figures += [f"{100 * memory_share(first):.0f}", *("-" if f is None else f"{f:.2f}x" for f in factors)]
        yield "| " + " | ".join([row[0]["weight"], str(row[0]["T"]), *figures]) + " |"
    yield ""


def _summary(records: Sequence[dict]) -> Iterator[str]:
    """A table per op, dtype, timer and baseline: a line per shape, a column per T, the speedup of the first of ours.

    For baselines measured alone, their share of the roofline.
    """
    groups: dict[tuple, list[list[dict]]] = {}
    for row in rows(records):
        ours = next((record["variant"] for record in row if record["is_ours"]), None)
        for baseline in headline_baselines(row):
            groups.setdefault((row[0]["op"], dtypes(row[0]), row[0]["timer"], ours, baseline), []).append(row)
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
        value = speedup(row, ours, baseline)
        return "-" if value is None else f"{value:.2f}x"
    return next((f"{roofline_share(r):.0f}" for r in row if r["variant"] == baseline and r["status"] == "ok"), "-")


_PANEL = (6.4, 4.0)  # inches
_MAX_LINES = 6
_MARKERS = "osD^vPX*"
_COLORS = tuple(f"C{number}" for number in range(10))  # matplotlib's names of its ten
_OUR_COLORS = ("black", "0.5", "0.7")
_MAX_TICKS = 14
_Group = tuple[str, str | None, list[list[dict]]]  # title, name of ours, timed rows


@dataclass(frozen=True)
class _Curve:
    label: str
    points: dict[int, float]  # by T


def draw(runs: Sequence[dict], path: Path) -> None:
    """Draw the timed rows of all runs into one file: a row of panels per op, timer and dtype.

    On the left the speedup over each baseline, on the right the share of the roofline of the same run. A few shapes are
    a line each; many are drawn as their geometric mean, in a band from the worst to the best.
    """
    import matplotlib  # 0.3 s, and not installed everywhere

    groups = list(_groups(runs))
    if not groups:
        raise ValueError("there is nothing to plot: no row was timed")
    image = io.BytesIO()
    with matplotlib.rc_context({"text.parse_math": False}):  # "$" in a name would begin a formula
        # Without the date, so that the same run draws the same bytes.
        _figure(runs, groups).savefig(image, format="png", metadata={"Software": None})
    write_bytes(path, image.getvalue())


def _figure(runs: Sequence[dict], groups: Sequence[_Group]) -> "Figure":
    from matplotlib.figure import Figure

    width, height = _PANEL
    # A Figure without pyplot: no window system is looked for, and nothing stays in memory.
    figure = Figure(figsize=(2 * width, height * len(groups)), layout="constrained", dpi=120)
    panels = figure.subplots(len(groups), 2, squeeze=False)
    for (title, ours, group), (left, right) in zip(groups, panels, strict=True):
        if ours is None:  # baselines alone
            left.set_axis_off()
            left.text(0.5, 0.5, f"{title}:\nno column of ours", ha="center", transform=left.transAxes)
        else:
            _draw_speedups(left, group, ours)
            left.set_title(f"{title}: speedup of `{ours}`", loc="left")
        _draw_roofline(right, group, ours)
        right.set_title(f"share of the {_roofline_name(group)}{_whose(group, ours)}", loc="left")
    devices = dict.fromkeys(_device(run["environment"]) for run in runs)
    shapes = dict.fromkeys(_shape(row) for _, _, group in groups for row in group)
    names = textwrap.fill(", ".join(shapes), 150, break_on_hyphens=False)
    figure.suptitle(f"{'; '.join(devices)}\n{names}", fontsize=10)
    return figure


def _device(env: dict) -> str:
    machine = env["gpu"] if env["device"] == "cuda" else f"{env['cpu_model']}, {env['threads']} threads"
    return f"{machine}, torch {env['torch']}, {env['date']}"


def _groups(runs: Sequence[dict]) -> Iterable[_Group]:
    """What is in every row of panels."""
    timed = [
        (run["environment"]["device_slug"], row)
        for run in runs
        for row in rows([record for record in run["records"] if record["status"] == "ok"])
    ]
    several = len({slug for slug, _ in timed}) > 1

    def key(entry: tuple[str, list[dict]]) -> tuple:
        slug, row = entry
        return (row[0]["op"], _TIMER_ORDER.index(row[0]["timer"]), dtypes(row[0]), slug)

    for (op, _, dtype, slug), group in itertools.groupby(sorted(timed, key=key), key=key):
        measured = [row for _, row in group]
        timer = measured[0][0]["timer"]
        ours = next((record["variant"] for record in measured[0] if record["is_ours"]), None)
        title = ", ".join([op, dtype, *([timer] if timer != "clock" else []), *([slug] if several else [])])
        yield title, ours, measured


def _whose(group: Sequence[list[dict]], ours: str | None) -> str:
    """The name of the one column in the panel, where a few shapes are a line each."""
    return f": `{ours}`" if ours and 1 < len({_shape(row) for row in group}) <= _MAX_LINES else ""


def _roofline_name(group: Sequence[list[dict]]) -> str:
    """A run that did not measure the matmul rate knows only memory's floor."""
    has_product = any(record["tflops"] for row in group for record in row)
    is_known = all(record["matmul_tflops"] for row in group for record in row)
    return "memory roofline" if has_product and not is_known else "roofline"


def _color(name: str, ours: Sequence[str]) -> object:
    """The color of a column, the same in every panel."""
    if is_ours(name):
        return _OUR_COLORS[ours.index(name) % len(_OUR_COLORS)]
    return _COLORS[BASELINES.index(name) % len(_COLORS)]


def _shape(row: Sequence[dict]) -> str:
    """The name of a row's shape, or its sizes where it has no name."""
    first = row[0]
    if first["preset"] == cli_types.EXPLICIT:
        return " ".join(f"{name}={first[name]}" for name in "KHD")
    return f"{first['preset']}:{first['stage']}"


def _curves(group: Sequence[list[dict]], value: Callable[[list[dict]], float | None]) -> list[_Curve]:
    """A curve per shape of what `value(row)` gives."""
    points: dict[str, dict[int, float]] = {}
    for row in group:
        if (y := value(row)) is not None:
            points.setdefault(_shape(row), {})[row[0]["T"]] = y
    return [_Curve(label, by_T) for label, by_T in points.items()]


def _draw_speedups(axes: "Axes", group: Sequence[list[dict]], ours: str) -> None:
    baselines = dict.fromkeys(baseline for row in group for baseline in headline_baselines(row))
    styles = ["-", "--", "-.", ":"]
    shapes = len({_shape(row) for row in group})
    for number, baseline in enumerate(baselines):
        curves = _curves(group, functools.partial(speedup, ours=ours, baseline=baseline))
        if shapes == 1 or shapes * len(baselines) > _MAX_LINES:
            _draw_band(axes, curves, f"over {baseline}", number, _color(baseline, []))
            continue
        for shape, curve in enumerate(curves):
            label = f"{curve.label} over {baseline}"
            _draw_line(axes, curve, label, shape, _COLORS[shape % len(_COLORS)], styles[number % 4])
    axes.axhline(1.0, color="black", linewidth=1.0)
    axes.set_ylabel("times faster")
    top = axes.get_ylim()[1]
    if (
        top > 8
    ):  # chains that spend their time allocating are 40 times slower, and 1.3 should not look like 1.0 beside them
        from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.set_ylim(bottom=0)
    _finish(axes, group)


def _draw_roofline(axes: "Axes", group: Sequence[list[dict]], ours: str | None) -> None:
    names = list(dict.fromkeys(record["variant"] for row in group for record in row))
    all_ours = [name for name in names if is_ours(name)]
    one_shape = len({_shape(row) for row in group}) == 1
    for number, name in enumerate(names):
        curves = _curves(group, functools.partial(_roofline_share_of, name=name))
        if one_shape or len(curves) > _MAX_LINES:
            _draw_band(axes, curves, name, number, _color(name, all_ours))
        elif name == (ours or names[0]):  # of several shapes only ours: all columns would be a tangle
            for shape, curve in enumerate(curves):
                _draw_line(axes, curve, curve.label, shape, _COLORS[shape % len(_COLORS)], "-")
    axes.axhline(100, color="black", linewidth=1.0)
    axes.set_ylabel("% of the roofline")
    axes.set_ylim(bottom=0)
    _finish(axes, group)


def _roofline_share_of(row: Sequence[dict], name: str) -> float | None:
    return next((roofline_share(record) for record in row if record["variant"] == name), None)


def _draw_line(axes: "Axes", curve: _Curve, label: str, number: int, color: object, style: str) -> None:
    counts = sorted(curve.points)
    marker = _MARKERS[number % len(_MARKERS)]
    axes.plot(counts, [curve.points[T] for T in counts], style, color=color, marker=marker, markersize=4, label=label)


def _draw_band(axes: "Axes", curves: Sequence[_Curve], label: str, number: int, color: object) -> None:
    """The geometric mean of the curves, and from the worst to the best of them."""
    by_T: dict[int, list[float]] = {}
    for curve in curves:
        for T, y in curve.points.items():
            by_T.setdefault(T, []).append(y)
    if not by_T:
        return
    counts = sorted(by_T)
    several = f", geomean of {len(curves)}" if len(curves) > 1 else ""
    mean = _Curve(label, {T: geometric_mean(values) for T, values in by_T.items()})
    _draw_line(axes, mean, label + several, number, color, "-")
    if several:
        low, high = ([pick(by_T[T]) for T in counts] for pick in (min, max))
        axes.fill_between(counts, low, high, color=color, alpha=0.12, linewidth=0)


def _finish(axes: "Axes", group: Sequence[list[dict]]) -> None:
    from matplotlib.ticker import NullLocator

    counts = sorted({row[0]["T"] for row in group})
    axes.set_xscale("log", base=2)
    every = -(-len(counts) // _MAX_TICKS)
    axes.set_xticks(counts[::every], [str(T) for T in counts[::every]])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("T (rows)")
    axes.grid(True, color="0.9")
    axes.set_axisbelow(True)
    axes.legend(fontsize=8)


def _add_plot_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULT", help="files that bench --json wrote")
    parser.add_argument("--out", type=cli_types.png, metavar="FILE", help="default: the first RESULT with .png")


def _run_plot(arguments: argparse.Namespace) -> int:
    first = arguments.results[0]
    if not first.name:  # "." and "/" have no suffix to replace
        arguments.parser.error(f"{first}: Is a directory")
    path = arguments.out or first.with_suffix(".png")
    check_writable(arguments.parser, "--out", path)
    try:
        draw([_load_shown(result) for result in arguments.results], path)
    except ImportError:
        arguments.parser.error("matplotlib is not installed: pip install 'eagle-kernels[plot]'")
    except (UnreadableResult, Unwritable, ValueError) as failure:
        arguments.parser.error(str(failure))
    say(f"saved: {path}")
    return 0


def _add_report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULT", help="files that bench --json wrote")
    parser.add_argument("--plots", action="store_true", help="draw each run beside its file, and show the plot")


def _run_report(arguments: argparse.Namespace) -> int:
    try:
        say("\n".join(render_files(arguments.results, arguments.plots).values()).removesuffix("\n"))
    except ImportError:
        arguments.parser.error("argument --plots: matplotlib is not installed: pip install 'eagle-kernels[plot]'")
    except (UnreadableResult, Unwritable, ValueError) as failure:
        arguments.parser.error(str(failure))
    return 0


def render_files(paths: Sequence[Path], plots: bool) -> dict[Path, str]:
    """The Markdown of every file; with `plots` each run is first drawn into a PNG beside its file."""
    runs = {path: _load_shown(path) for path in paths}
    if plots:
        for path, run in runs.items():
            draw([run], path.with_suffix(".png"))
    return {path: render(path, run) for path, run in runs.items()}


# Baselines that run only torch: they tell a slower machine from slower code of ours.
_CONTROLS = ("eager", "eager-out", "linear", "compile", "inductor-max")

_SAME_MACHINE = ("device_slug", "threads", "torch", "triton", "driver")


def _add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("base", type=Path, metavar="BASE", help="a file that bench --json wrote")
    add("new", type=Path, metavar="NEW", help="a later one")
    add("--tolerance", type=cli_types.percentage, default=0.05, metavar="5%", help="slower by this is the same (5%%)")
    add("--fail-on-regression", action="store_true", help="exit 1 where a row became slower, wrong or failed")


def _run_compare(arguments: argparse.Namespace) -> int:
    try:
        base, new = load(arguments.base), load(arguments.new)
    except UnreadableResult as failure:
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
    return {(row_key(record), record["variant"]): record for record in records}


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
    return f"{row['op']}, {_shape([row])}, {dtypes(row)}"


def _line(change: Change, verdict: str, width: int) -> str:
    row = change.row
    cells = [f"{row['T']:>6} {row['timer']:<5} {row['variant']:<{width}}"]
    times = ["-" if ms is None else _three_digits(ms) for ms in (change.base_ms, change.new_ms)]
    factors = ["-" if factor is None else f"{factor:.3f}x" for factor in (change.factor, change.control)]
    cells += map(str.rjust, (*times, *factors), (9, 8, 8, 8))
    return "".join(cells) + f" {verdict}" + (f" ({change.new_status})" if verdict == "lost" else "")


COMPARE = Command(
    "Compare two saved runs of the same rows: what became slower or faster, beyond the noise of both.",
    _add_compare_arguments,
    _run_compare,
)
PLOT = Command("Draw saved runs: speedup and share of the roofline over T, as a PNG.", _add_plot_arguments, _run_plot)
REPORT = Command("Turn saved runs into Markdown tables and plots.", _add_report_arguments, _run_report)
