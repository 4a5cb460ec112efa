"""Saved runs: one JSON file with the environment, the command and flat records, one per row, timer and column."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path

# 2: the timer of each record, and the rate of the matrix product beside those of copy and read.
SCHEMA_VERSION = 2

# What every record has; records of rows that were timed have the figures too.
ROW_FIELDS = ("op", "preset", "stage", "norm", "K", "H", "D", "V", "T", "dtype", "timer")
RECORD_FIELDS = (*ROW_FIELDS, "variant", "is_ours", "status")
_RATES = ("copy_gbps", "read_gbps", "matmul_tflops")
FIGURES = ("median_ms", "min_ms", "p20_ms", "p80_ms", "rounds", "bytes", "gbps", "tflops", "floor_ms", *_RATES)
STATUSES = ("ok", "wrong", "skipped", "failed")

# What of the environment stands beside every line of a CSV file, which has no header to say it.
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
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*fields, *_CSV_ENVIRONMENT])
        writer.writeheader()
        writer.writerows(record | {name: environment[name] for name in _CSV_ENVIRONMENT} for record in records)


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def load(path: Path) -> dict:
    """Read a run that `save` wrote.

    Raises:
        UnreadableResult: no such file, no JSON, another schema, or records without their fields.
    """
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
    except OSError as failure:
        raise UnreadableResult(f"{path}: {failure.strerror}") from None
    except ValueError as failure:
        raise UnreadableResult(f"{path}: not a saved run: {failure}") from None
    version = run.get("schema_version") if isinstance(run, dict) else None
    if version != SCHEMA_VERSION:
        raise UnreadableResult(f"{path}: schema version is {version}, expected {SCHEMA_VERSION}; measure again")
    absent = [name for name, kind in (("environment", dict), ("records", list)) if not isinstance(run.get(name), kind)]
    if absent:
        raise UnreadableResult(f"{path}: schema version {version}, but without {' and '.join(absent)}")
    for number, record in enumerate(run["records"]):
        missing = [name for name in RECORD_FIELDS if name not in record]
        if record.get("status") == "ok":
            missing += [name for name in FIGURES if name not in record]
        if missing:
            raise UnreadableResult(f"{path}: record {number} has no {', '.join(missing)}")
    return run


def row_key(record: dict) -> tuple:
    """What tells the rows of a run apart."""
    return tuple(record[field] for field in ROW_FIELDS)
