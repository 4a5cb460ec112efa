"""Draw saved runs: speedup and share of the roofline over T, as a PNG."""

import argparse
from pathlib import Path

from . import choices
from .results import UnreadableResult, load


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULT", help="files that bench --json wrote")
    parser.add_argument("--out", type=choices.png, metavar="FILE", help="default: the first RESULT with .png")


def run(arguments: argparse.Namespace) -> int:
    try:
        from . import plots
    except ImportError:
        arguments.parser.error("matplotlib is not installed: pip install 'eagle-kernels[plot]'")
    path = arguments.out or arguments.results[0].with_suffix(".png")
    try:
        plots.draw([load(result) for result in arguments.results], path)
    except (UnreadableResult, OSError, ValueError) as failure:
        arguments.parser.error(str(failure))
    print(f"saved: {path}")
    return 0
