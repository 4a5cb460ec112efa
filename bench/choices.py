"""Command-line values that come from a list of known names: a wrong one is named together with the known ones."""

import argparse
from collections.abc import Callable, Sequence

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


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


def row_counts(text: str) -> list[int]:
    """An argparse type: `1,8,64` as row counts, at least 1 each."""
    counts = [int(count) if count.strip().isdecimal() else 0 for count in text.split(",")]
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"row counts are {text!r}, expected numbers of at least 1 with commas between")
    return list(dict.fromkeys(counts))


def number(minimum: float, kind: type = int) -> Callable[[str], float]:
    """An argparse type for a number of at least `minimum`."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = minimum - 1
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least {minimum}")
        return value

    return parse
