"""Records as a text table, and as Markdown: times, speedups, bandwidth, matmul rate, geometric means."""

import itertools
from collections.abc import Iterator, Sequence

from .measure import geometric_mean
from .results import ROW_FIELDS, row_key
from .workloads import is_ours

# The sizes that an op has, of those that every record holds.
_SIZES = {
    "norm_concat_linear": ("K", "H", "D"),
    "norm_concat": ("K", "H"),
    "capture_hidden": ("K", "H"),
    "add_rms_norm": ("H",),
    "vocab_parallel_embedding": ("V", "H"),
}
_HAS_NORM = ("norm_concat_linear", "norm_concat")
_HAS_PRODUCT = ("norm_concat_linear",)
_BLOCK_FIELDS = tuple(field for field in ROW_FIELDS if field not in ("T", "timer"))


def title(record: dict) -> str:
    """The line above the rows of one op, shape and dtype."""
    sizes = " ".join(f"{name}={record[name]}" for name in _SIZES[record["op"]])
    norm = f", norm {record['norm']}" if record["op"] in _HAS_NORM else ""
    return f"{record['op']}, {record['preset']}:{record['stage']}, {record['dtype']}: {sizes}{norm}"


def blocks(records: Sequence[dict]) -> Iterator[list[dict]]:
    """Records of one table each."""
    for _, block in itertools.groupby(records, key=lambda record: [record[field] for field in _BLOCK_FIELDS]):
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


class Layout:
    """The columns of a table: T, a time per variant, speedups of the first one, and what that one's time amounts to.

    The first one is ours, unless a run measures baselines alone.
    """

    def __init__(self, names: Sequence[str], op: str, timers: Sequence[str]) -> None:
        self.names = list(names)
        self.ours = [name for name in names if is_ours(name)]
        self.lead = (self.ours or self.names)[0]
        self.baselines = [name for name in names if not is_ours(name) and name != self.lead]
        self.timers = timers
        self.unit, self.scale = ("ms", 1.0) if "clock" in timers else ("us", 1e3)
        self.has_product = op in _HAS_PRODUCT
        timer = ["timer"] if len(timers) > 1 else []
        times = [f"{name} {self.unit}" for name in self.names]
        speedups = [f"vs {name}" for name in self.baselines]
        product = ["TFLOP/s", "% matmul"] if self.has_product else []
        self.titles = ["T", *timer, *times, *speedups, "GB/s", "% copy", "% read", *product]
        widths = [6, *(7 for _ in timer), *(27 for _ in times), *(10 for _ in speedups), 8, 8, 8, *(9 for _ in product)]
        self.widths = [max(width, len(text) + 2) for width, text in zip(widths, self.titles, strict=True)]

    @classmethod
    def of(cls, block: Sequence[dict]) -> "Layout":
        """The layout of saved records of one table."""
        names, timers = (dict.fromkeys(record[field] for record in block) for field in ("variant", "timer"))
        return cls(list(names), block[0]["op"], list(timers))

    def header(self) -> str:
        return self._format(self.titles)

    def lines(self, row: Sequence[dict]) -> Iterator[str]:
        """A row, or the sentence that says why there is none; notes below it."""
        cells = self.cells(row)
        yield self._format(cells) if cells else self._format([str(row[0]["T"])]) + "  " + _excuse(row)
        for record in row:
            if record["status"] == "failed":
                yield f"        {record['variant']} failed: {record['reason']}"
        timed = [record for record in row if record["status"] == "ok"]
        if timed and not timed[0]["cold"]:
            size, limit = timed[0]["rotated_bytes"] >> 20, timed[0]["copies_limited_by"]
            yield f"        not cold: {timed[0]['copies']} copies are {size} MiB, limited by {limit}"

    def cells(self, row: Sequence[dict]) -> list[str]:
        """The texts of a row; empty where nothing was timed."""
        by_name = {record["variant"]: record for record in row if record["status"] == "ok"}
        if self.lead not in by_name:
            return []
        lead = by_name[self.lead]
        timer = [lead["timer"]] if len(self.timers) > 1 else []
        times = [self._time(by_name[name]) if name in by_name else "-" for name in self.names]
        speedups = [_speedup_text(by_name[name]) if name in by_name else "-" for name in self.baselines]
        figures = [f"{lead['gbps']:.1f}", *(_share(lead["gbps"], lead[rate]) for rate in ("copy_gbps", "read_gbps"))]
        if self.has_product:
            figures += [_three_digits(lead["tflops"]), _share(lead["tflops"], lead["matmul_tflops"])]
        return [str(lead["T"]), *timer, *times, *speedups, *figures]

    def footer(self, records: Sequence[dict]) -> Iterator[str]:
        """Geometric means over the rows of the table."""
        return footer(records) if len({record["T"] for record in records}) > 1 else iter(())

    def _time(self, record: dict) -> str:
        median, *spread = (_three_digits(record[name] * self.scale) for name in ("median_ms", "p20_ms", "p80_ms"))
        return f"{median} ({' - '.join(spread)})"

    def _format(self, cells: Sequence[str]) -> str:
        return "".join(cell.rjust(width) for cell, width in zip(cells, self.widths, strict=False))


def footer(records: Sequence[dict]) -> Iterator[str]:
    """A line per form of ours and timer: geometric mean, best and worst of its speedups over each baseline."""
    timers = list(dict.fromkeys(record["timer"] for record in records))
    for timer, ours in itertools.product(timers, _variants(records, True)):
        timed = [record for record in records if record["timer"] == timer]
        parts = []
        for baseline in _variants(timed, False):
            values = [value for row in rows(timed) if (value := speedup(row, ours, baseline)) is not None]
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
            cells = layout.cells(row) or [str(row[0]["T"]), _excuse(row)]
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


def _excuse(row: Sequence[dict]) -> str:
    wrong = [record for record in row if record["status"] == "wrong"]
    if wrong:
        errors = [f"{record['variant']} {_error(record)}" for record in wrong]
        return f"WRONG RESULT, no times: {', '.join(errors)}"
    reasons = dict.fromkeys(record["reason"] for record in row if record["status"] == "skipped")
    return f"skipped: {'; '.join(reasons)}" if reasons else "nothing was timed"


def _error(record: dict) -> str:
    error = "no number" if record["error"] is None else f"{record['error']:.2e}"
    return f"error {error}, bound {record['error_bound']:.2e}"
