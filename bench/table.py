"""Records as a text table, and as Markdown: medians and minima, speedups, bandwidth, geometric means."""

import itertools
from collections.abc import Iterator, Sequence

from .measure import geometric_mean
from .results import ROW_FIELDS
from .workloads import FORMS

# The sizes that an op has, of those that every record holds.
_SIZES = {
    "norm_concat_linear": ("K", "H", "D"),
    "norm_concat": ("K", "H"),
    "capture_hidden": ("K", "H"),
    "add_rms_norm": ("H",),
    "vocab_parallel_embedding": ("V", "H"),
}
_HAS_NORM = ("norm_concat_linear", "norm_concat")
_BLOCK_FIELDS = tuple(field for field in ROW_FIELDS if field != "T")


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
    for _, row in itertools.groupby(records, key=lambda record: [record[field] for field in ROW_FIELDS]):
        yield list(row)


def speedup(row: Sequence[dict], ours: str, baseline: str) -> float | None:
    """How many times faster ours is, by medians; None where either was not timed."""
    medians = {record["variant"]: record["median_ms"] for record in row if record["status"] == "ok"}
    return medians[baseline] / medians[ours] if ours in medians and baseline in medians else None


class Layout:
    """The columns of a table: T, a time per variant, speedups of the first of ours, bandwidth of that one."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self.ours = [name for name in names if name in FORMS]
        self.baselines = [name for name in names if name not in FORMS]
        times = [f"{name} ms" for name in self.names]
        speedups = [f"vs {name}" for name in self.baselines]
        self.titles = ["T", *times, *speedups, "GB/s", "% copy", "% read"]
        widths = [6, *(18 for _ in times), *(10 for _ in speedups), 7, 7, 7]
        self.widths = [max(width, len(text) + 2) for width, text in zip(widths, self.titles, strict=True)]

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
        if self.ours[0] not in by_name:
            return []
        lead = by_name[self.ours[0]]
        times = [_time(by_name[name]) if name in by_name else "-" for name in self.names]
        speedups = [_speedup_text(by_name[name]) if name in by_name else "-" for name in self.baselines]
        shares = [f"{100 * lead['gbps'] / lead[rate]:.0f}" for rate in ("copy_gbps", "read_gbps")]
        return [str(lead["T"]), *times, *speedups, f"{lead['gbps']:.1f}", *shares]

    def footer(self, records: Sequence[dict]) -> Iterator[str]:
        """Geometric means over the rows of the table."""
        return footer(records) if len(list(rows(records))) > 1 else iter(())

    def _format(self, cells: Sequence[str]) -> str:
        return "".join(cell.rjust(width) for cell, width in zip(cells, self.widths, strict=False))


def footer(records: Sequence[dict]) -> Iterator[str]:
    """A line per form of ours: geometric mean, best and worst of its speedups over each baseline."""
    for ours in _variants(records, True):
        parts = []
        for baseline in _variants(records, False):
            values = [value for row in rows(records) if (value := speedup(row, ours, baseline)) is not None]
            if values:
                spread = f"{min(values):.2f} to {max(values):.2f}, {len(values)} rows"
                parts.append(f"{geometric_mean(values):.2f}x {baseline} ({spread})")
        if parts:
            yield f"geomean {ours}: " + ", ".join(parts)


def markdown(records: Sequence[dict]) -> Iterator[str]:
    """The tables in Markdown: one per op, shape and dtype, medians only."""
    for block in blocks(records):
        layout = Layout(list(dict.fromkeys(record["variant"] for record in block)))
        yield f"**{title(block[0])}**"
        yield ""
        yield "| " + " | ".join(layout.titles) + " |"
        yield "|" + " ---: |" * len(layout.titles)
        for row in rows(block):
            cells = layout.cells(row) or [str(row[0]["T"]), _excuse(row)]
            cells += [""] * (len(layout.titles) - len(cells))
            yield "| " + " | ".join(cells) + " |"
        yield ""


def _variants(records: Sequence[dict], is_ours: bool) -> list[str]:
    return list(dict.fromkeys(record["variant"] for record in records if record["is_ours"] == is_ours))


def _time(record: dict) -> str:
    return f"{_three_digits(record['median_ms'])} / {_three_digits(record['min_ms'])}"


def _three_digits(value: float) -> str:
    """12.3 and 0.0123 and 1234: three digits, no exponent."""
    decimals = 0
    while decimals < 6 and value * 10**decimals < 100:
        decimals += 1
    return f"{value:.{decimals}f}"


def _speedup_text(record: dict) -> str:
    """The factor, with "~" where the interval holds 1 and the two may be equal."""
    unsure = record["speedup_low"] <= 1 <= record["speedup_high"]
    return f"{'~' if unsure else ''}{record['speedup']:.2f}x"


def _excuse(row: Sequence[dict]) -> str:
    wrong = [record for record in row if record["status"] == "wrong"]
    if not wrong:
        return f"skipped: {row[0]['reason']}"
    errors = [f"{record['variant']} {_error(record)}" for record in wrong]
    return f"WRONG RESULT, no times: {', '.join(errors)}"


def _error(record: dict) -> str:
    error = "no number" if record["error"] is None else f"{record['error']:.2e}"
    return f"error {error}, bound {record['error_bound']:.2e}"
