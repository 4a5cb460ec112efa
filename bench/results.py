"""Saved runs: one JSON file with the environment, the command and flat records, one per row and column."""

import json
from pathlib import Path

SCHEMA_VERSION = 1

# What every record has; records of rows that were timed have the figures too.
ROW_FIELDS = ("op", "preset", "stage", "norm", "K", "H", "D", "V", "T", "dtype")
RECORD_FIELDS = (*ROW_FIELDS, "variant", "is_ours", "status")
FIGURES = ("median_ms", "min_ms", "p20_ms", "p80_ms", "rounds", "bytes", "gbps", "copy_gbps", "read_gbps", "tflops")
STATUSES = ("ok", "wrong", "skipped", "failed")


class UnreadableResult(Exception):
    """A file that is no saved run of this schema; the message names the file."""


def save(path: Path, environment: dict, argv: list[str], records: list[dict]) -> None:
    """Write a run; the file is replaced only once all of it is written."""
    run = {"schema_version": SCHEMA_VERSION, "argv": argv, "environment": environment, "records": records}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
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
    for number, record in enumerate(run.get("records", ())):
        missing = [name for name in RECORD_FIELDS if name not in record]
        if record.get("status") == "ok":
            missing += [name for name in FIGURES if name not in record]
        if missing:
            raise UnreadableResult(f"{path}: record {number} has no {', '.join(missing)}")
    return run
