"""Speculative decoding with a trained drafter: same tokens, accepted length, times, and what each mistake costs."""

import argparse
from pathlib import Path

from eagle_kernels import byte_eagle3

from . import choices

_FILES = ("config.json", "model.safetensors")
_NEEDED = [*(f"{part}/{file}" for part in ("target", "drafter") for file in _FILES), "prompts.json"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    home = Path(byte_eagle3.__file__).parent
    parser.add_argument("--weights", type=Path, default=home, help="folder of target/, drafter/ and prompts.json")
    parser.add_argument("--tokens", type=choices.number(2), default=96, help="tokens per prompt")
    parser.add_argument("--drafts", type=choices.number(1), default=4, help="drafts per forward of the target")


def run(arguments: argparse.Namespace) -> int:
    try:
        from . import speculation
    except ImportError as missing:
        needed = "expected transformers and safetensors: pip install 'eagle-kernels[demo]'"
        arguments.parser.error(f"{missing}, {needed}")
    absent = [name for name in _NEEDED if not (arguments.weights / name).is_file()]
    if absent:
        arguments.parser.error(
            f"{arguments.weights} has no {', '.join(absent)}, expected what examples/byte_eagle3/train.py writes"
        )
    return speculation.report(arguments.weights, arguments.tokens, arguments.drafts)
