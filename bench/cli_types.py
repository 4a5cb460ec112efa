"""What the commands share on the command line: known names, numbers, row counts, and the input stages of presets."""

import argparse
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from eagle_kernels.model_shapes import InputStage, model_shapes

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

# torch's names, as the tuned tables and the log line that names a `tune` call have them.
_TORCH_NAMES = {str(dtype).removeprefix("torch."): name for name, dtype in DTYPES.items()}

_RANGE = re.compile(r"(\d+):(\d+):x(\d+)")

# What an explicit shape is called in tables and files.
EXPLICIT = "explicit"
_EXPLICIT_VOCABULARY = 128256
_DEFAULT = "llama3.1-8b"

Stage = tuple[str, InputStage, int]  # preset, stage, V


@dataclass(frozen=True)
class Command:
    """A command of `eagle-kernels`: its help text, its arguments, and the function that returns its exit status."""

    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def no_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def one_of(kind: str, known: Sequence[str]) -> Callable[[str], str]:
    """An argparse type for one known name."""

    def parse(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"{kind} {text!r} is unknown, known are: {', '.join(known)}")
        return text

    return parse


def list_of(kind: str, known: Sequence[str]) -> Callable[[str], list[str]]:
    """An argparse type for known names with commas between, at least one."""
    parse_one = one_of(kind, known)

    def parse(text: str) -> list[str]:
        names = list(dict.fromkeys(parse_one(name) for name in text.split(",") if name))
        if not names:  # a shell's variable that is not set
            raise argparse.ArgumentTypeError(f"{text!r} names no {kind}, known are: {', '.join(known)}")
        return names

    return parse


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
        if not minimum <= value < math.inf:  # nan is neither
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
    if text.endswith("%"):
        return fraction / 100
    if fraction >= 1:  # 5 is hardly meant as 500 %
        raise argparse.ArgumentTypeError(f"{text!r} is a fraction of 1 or more, write {text}%")
    return fraction


def add_stage_arguments(parser: argparse.ArgumentParser) -> None:
    """--preset, and --chunks --hidden --out for a shape that no preset has."""
    add = parser.add_argument
    names = "NAME (of its stages eagle3, if it has that), NAME:STAGE such as deepseek-v3:mtp, all, or distinct: one of "
    names += f"each shape (see `list`), with commas between; default {_DEFAULT}"
    add("--preset", type=presets, nargs="+", metavar="PRESET", help=names)
    add("--chunks", type=number(1), metavar="K", help="an explicit shape: sources")
    add("--hidden", type=number(1), metavar="H", help="an explicit shape: width of a source")
    add("--out", type=number(1), metavar="D", help="an explicit shape: output width")
    add("--vocab", type=number(1), metavar="V", help=f"of an explicit shape (default {_EXPLICIT_VOCABULARY})")


def stages(arguments: argparse.Namespace) -> list[Stage]:
    """The selected stages in the order given; a usage error where an explicit shape is not complete."""
    K, H, D = arguments.chunks, arguments.hidden, arguments.out
    sizes = {"--chunks": K, "--hidden": H, "--out": D}
    missing = [name for name, size in sizes.items() if size is None]
    chosen = [stage for group in arguments.preset or [] for stage in group]
    if not missing:
        # EAGLE-3's block: a norm per chunk, no offset; where a command has --norm, it overrides the norm.
        stage = InputStage("eagle3", K, H, D, 1e-6, 0.0, "none", False, None, None)
        chosen.append((EXPLICIT, stage, arguments.vocab or _EXPLICIT_VOCABULARY))
    elif len(missing) < len(sizes):
        arguments.parser.error(f"an explicit shape is --chunks K --hidden H --out D; {', '.join(missing)} is missing")
    elif arguments.vocab is not None:
        arguments.parser.error("--vocab belongs to an explicit shape: --chunks K --hidden H --out D")
    return chosen or presets(_DEFAULT)


def norm_of(stage: InputStage) -> str:
    """The checkpoint's norm; EAGLE-3 stages without one get the chunk norm (`fc_norm`), which newer ones have."""
    return "chunk" if stage.kind.startswith("eagle3") and stage.norm == "none" else stage.norm


def presets(text: str) -> list[Stage]:
    """An argparse type: models, with commas between, each with one of its input stages: `_stages_of`."""
    return [stage for name in text.split(",") for stage in _stages_of(name)]


def _stages_of(text: str) -> list[Stage]:
    """NAME:STAGE, or NAME for EAGLE-3 or the first stage there is, or all, or distinct."""
    if text in ("all", "distinct"):
        every = [(name, stage, model.vocab_size) for name, model in model_shapes().items() for stage in model.stages]
        if text == "all":
            return every
        # The post norm counts, since it changes what runs; names, eps and layer ids do not.
        keys = [(norm_of(s), s.K, s.H, s.D, s.norm_offset, s.post_norm, s.streams, s.context) for _, s, _ in every]
        return [stage for number, stage in enumerate(every) if keys.index(keys[number]) == number]
    name, _, kind = text.partition(":")
    if name not in model_shapes():
        known = ", ".join(["all", "distinct", *model_shapes()])
        raise argparse.ArgumentTypeError(f"preset {name!r} is unknown, known are: {known}")
    model = model_shapes()[name]
    kinds = {stage.kind: stage for stage in model.stages}
    if kind and kind not in kinds:
        raise argparse.ArgumentTypeError(f"{name} has no stage {kind!r}, it has: {', '.join(kinds)}")
    stage = kinds[kind] if kind else kinds.get("eagle3") or next(iter(kinds.values()))
    return [(name, stage, model.vocab_size)]
