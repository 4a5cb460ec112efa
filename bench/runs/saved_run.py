"""A saved run: its file, and what its records say."""

import csv
import io
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from eagle_kernels.quantized_weight import WEIGHT_FORMATS

from .. import cli_types
from ..baselines import BASELINES
from ..measure import TIMERS, is_ours
from ..ops import WORKLOADS
from ..output import write_text
from ..workloads import DENSE

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
TIMER_ORDER = tuple(timer for timers in TIMERS.values() for timer in timers)
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
        raise UnreadableResult(f"{path}: schema version is {version!r}, expected {SCHEMA_VERSION}; measure again")
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
    choices = {"op": tuple(WORKLOADS), "status": STATUSES, "timer": TIMER_ORDER, "weight": (DENSE, *WEIGHT_FORMATS)}
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


def load_shown(path: Path) -> dict:
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


_HAS_NORM = ("norm_concat_linear", "norm_concat")
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


def shape(row: Sequence[dict]) -> str:
    """The name of a row's shape, or its sizes where it has no name."""
    first = row[0]
    if first["preset"] == cli_types.EXPLICIT:
        return " ".join(f"{name}={first[name]}" for name in "KHD")
    return f"{first['preset']}:{first['stage']}"
