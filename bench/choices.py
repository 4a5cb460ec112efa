"""Command-line values that come from a list of known names: a wrong one is named together with the known ones."""

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

# What torch calls them, which is how the tuned tables and the log line that names a `tune` call write them.
_TORCH_NAMES = {str(dtype).removeprefix("torch."): name for name, dtype in DTYPES.items()}

_RANGE = re.compile(r"(\d+):(\d+):x(\d+)")


def one_of(kind: str, known: Sequence[str]) -> Callable[[str], str]:
    """An argparse type for one known name."""

    def parse(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"{kind} {text!r} is unknown, known are: {', '.join(known)}")
        return text

    return parse


def list_of(kind: str, known: Sequence[str]) -> Callable[[str], list[str]]:
    """An argparse type for known names with commas between."""
    parse = one_of(kind, known)
    return lambda text: list(dict.fromkeys(parse(name) for name in text.split(",") if name))


def dtypes(text: str) -> list[str]:
    """An argparse type: `bf16,fp32`, or torch's names of them."""
    return list_of("dtype", list(DTYPES))(",".join(_TORCH_NAMES.get(name, name) for name in text.split(",")))


def row_counts(text: str) -> list[int]:
    """An argparse type: `1,8,64` or `1:8192:x2` (1, 2, 4 to 8192) or both, as row counts, at least 1 each."""
    counts = [count for part in text.split(",") for count in _row_counts(part.strip())]
    if min(counts, default=0) < 1:
        expected = "numbers of at least 1 with commas between, or FIRST:LAST:xFACTOR such as 1:8192:x2"
        raise argparse.ArgumentTypeError(f"row counts are {text!r}, expected {expected}")
    return list(dict.fromkeys(counts))


def _row_counts(part: str) -> list[int]:
    """One number or one range; [0] for what is neither."""
    if (spelled := _RANGE.fullmatch(part)) is None:
        return [int(part) if part.isdecimal() else 0]
    count, last, factor = map(int, spelled.groups())
    if factor < 2 or not 1 <= count <= last:
        return [0]
    counts = []
    while count <= last:
        counts.append(count)
        count *= factor
    return counts


def number(minimum: float, kind: type = int) -> Callable[[str], float]:
    """An argparse type for a number of at least `minimum`."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = minimum - 1
        if not value >= minimum:  # so that nan is refused
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least {minimum}")
        return value

    return parse


def png(text: str) -> Path:
    """An argparse type: the name of a PNG file."""
    if not text.endswith(".png"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a name that ends in .png")
    return Path(text)


def percentage(text: str) -> float:
    """An argparse type: `5%` or `0.05` as a fraction of at least 0."""
    fraction = number(0, float)(text.removesuffix("%"))
    return fraction / 100 if text.endswith("%") else fraction
