"""`eagle-kernels info | list | check | bench | roofline | host | tune | compare | plot | report | demo`."""

import argparse
import contextlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from eagle_kernels import byte_eagle3

from . import benchmark, check, host, info, report, tune
from .cli_types import Command, number

# `demo`: what it reads from --weights.
_FILES = ("config.json", "model.safetensors")
_NEEDED = [*(f"{part}/{file}" for part in ("target", "drafter") for file in _FILES), "prompts.json"]


def _add_demo_arguments(parser: argparse.ArgumentParser) -> None:
    home = Path(byte_eagle3.__file__).parent
    parser.add_argument("--weights", type=Path, default=home, help="folder of target/, drafter/ and prompts.json")
    parser.add_argument("--tokens", type=number(2), default=96, help="tokens per prompt")
    parser.add_argument("--drafts", type=number(1), default=4, help="drafts per forward of the target")


def _run_demo(arguments: argparse.Namespace) -> int:
    try:
        from . import speculation  # transformers takes seconds to import, and need not be installed
    except ImportError as missing:
        needed = "expected transformers and safetensors: pip install 'eagle-kernels[demo]'"
        arguments.parser.error(f"{missing}, {needed}")
    absent = [name for name in _NEEDED if not (arguments.weights / name).is_file()]
    if absent:
        arguments.parser.error(
            f"{arguments.weights} has no {', '.join(absent)}, expected what examples/byte_eagle3/train.py writes"
        )
    return speculation.report(arguments.weights, arguments.tokens, arguments.drafts)


_DEMO = Command(
    "Speculative decoding with a trained drafter: same tokens, accepted length, times, and what each mistake costs.",
    _add_demo_arguments,
    _run_demo,
)

# In the order in which somebody new to a machine would use them.
_COMMANDS = {
    "info": info.INFO,
    "list": info.LIST,
    "check": check.CHECK,
    "bench": benchmark.BENCH,
    "roofline": benchmark.ROOFLINE,
    "host": host.HOST,
    "tune": tune.TUNE,
    "compare": report.COMPARE,
    "plot": report.PLOT,
    "report": report.REPORT,
    "demo": _DEMO,
}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="eagle-kernels", description="Look at, check and measure eagle-kernels.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{" + ",".join(_COMMANDS) + "}")
    for name, command in _COMMANDS.items():
        subparser = commands.add_parser(name, help=command.summary, description=command.summary)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run, parser=subparser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 is success, 1 a wrong result or a regression, 2 a bad argument, 130 an interrupted run."""
    arguments = build_parser().parse_args(argv)
    arguments.argv = list(sys.argv[1:] if argv is None else argv)
    # A shell starts what runs in its background with SIGINT ignored; bench and tune keep what they have when it comes.
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return arguments.run(arguments)
    except BrokenPipeError:  # `| head` closed the pipe: not an error of ours
        return 0
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
