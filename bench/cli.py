"""The command `eagle-kernels`: its parser, its exit status, and what becomes of errors that no command expects."""

import argparse
import contextlib
import io
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from eagle_kernels import byte_eagle3, plan
from eagle_kernels.quantized_weight import FORMATS

from . import benchmark, check, doctor, host, info, tune
from .cli_types import Command, list_of, number, png
from .output import Unwritable
from .runs import compare, curves, report

# The files that `demo` reads from --model.
_FILES = ("config.json", "model.safetensors")
_NEEDED = [*(f"{part}/{file}" for part in ("target", "drafter") for file in _FILES), "prompts.json"]


def _add_demo_arguments(parser: argparse.ArgumentParser) -> None:
    home = Path(byte_eagle3.__file__).parent
    help_text = "folder of target/, drafter/ and prompts.json (default: the package's own)"
    parser.add_argument("--model", type=Path, default=home, help=help_text)
    formats = list_of("format", list(FORMATS))
    help_text = f"the same drafter with its fc in each of these formats: {','.join(FORMATS)} (default none)"
    parser.add_argument("--weights", type=formats, default=[], metavar="FORMATS", help=help_text)
    parser.add_argument("--tokens", type=number(2), default=96, help="tokens per prompt (default 96)")
    parser.add_argument("--drafts", type=number(1), default=4, help="drafts per forward of the target (default 4)")


def _run_demo(arguments: argparse.Namespace) -> int:
    try:
        from . import speculation  # transformers takes seconds to import, and need not be installed
    except ImportError as missing:
        needed = "expected transformers and safetensors: pip install 'eagle-kernels[demo]'"
        arguments.parser.error(f"{missing}, {needed}")
    absent = [name for name in _NEEDED if not (arguments.model / name).is_file()]
    if absent:
        arguments.parser.error(
            f"{arguments.model} has no {', '.join(absent)}, expected what examples/byte_eagle3/train.py writes"
        )
    return speculation.report(arguments.model, arguments.tokens, arguments.drafts, arguments.weights)


_DEMO = Command(
    "Speculative decoding with a trained drafter: same tokens, accepted length, times, and what each mistake costs.",
    _add_demo_arguments,
    _run_demo,
)

_SHELLS = ("bash", "zsh", "tcsh")


def _add_completion_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=_SHELLS, help='for example: eval "$(eagle-kernels completion bash)"')


def _run_completion(arguments: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError:
        arguments.parser.error("shtab is not installed: pip install 'eagle-kernels[cli]'")
    print(shtab.complete(build_parser(file_completion=shtab.FILE), arguments.shell))
    return 0


_COMPLETION = Command(
    "Print a shell's script that completes commands, options and file names.",
    _add_completion_arguments,
    _run_completion,
)

# In the order in which somebody new to a machine would use them.
_COMMANDS = {
    "info": info.INFO,
    "list": info.LIST,
    "check": check.CHECK,
    "doctor": doctor.DOCTOR,
    "bench": benchmark.BENCH,
    "roofline": benchmark.ROOFLINE,
    "host": host.HOST,
    "tune": tune.TUNE,
    "compare": compare.COMPARE,
    "plot": curves.PLOT,
    "report": report.REPORT,
    "demo": _DEMO,
    "completion": _COMPLETION,
}


def build_parser(file_completion: object = None) -> argparse.ArgumentParser:
    """The parser of all commands; file_completion is shtab's completion of paths (`shtab.FILE`)."""
    parser = argparse.ArgumentParser(prog="eagle-kernels", description="Look at, check and measure eagle-kernels.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in _COMMANDS.items():
        subparser = commands.add_parser(name, help=command.summary, description=command.summary)
        command.add_arguments(subparser)
        for action in subparser._actions:
            if action.type in (Path, png):
                action.complete = file_completion  # type: ignore[attr-defined]  # which shtab looks for
        subparser.set_defaults(run=command.run, parser=subparser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 is success, 1 a wrong result, a regression or an output that could not be written, 2 a bad
    argument, 130 an interrupted run."""
    if sys.stdout is None:  # a shell's `>&-`
        print("eagle-kernels: standard output was not written: it is closed", file=sys.stderr)
        return 1
    try:
        return _run(argv)
    except BrokenPipeError:  # `| head` closed the pipe: not an error of ours
        _discard_stdout()
        return 0
    except Unwritable as failure:
        print(f"eagle-kernels: {failure}", file=sys.stderr)
    except OSError as failure:
        if failure.filename is not None:  # not a file that we write
            raise
        _discard_stdout()
        print(f"eagle-kernels: standard output was not written: {failure.strerror}", file=sys.stderr)
    except KeyboardInterrupt:
        return 130
    return 1


def _discard_stdout() -> None:
    """Point it at /dev/null: flushing its buffer when the interpreter exits would fail again."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(argv: Sequence[str] | None) -> int:
    # Names of configs and tensors may have characters that the terminal's encoding lacks.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        arguments = build_parser().parse_args(argv)
    except SystemExit:  # --help was printed
        sys.stdout.flush()
        raise
    arguments.argv = list(sys.argv[1:] if argv is None else argv)
    if plan.SETTINGS.wrong is not None:
        arguments.parser.error(plan.SETTINGS.wrong)
    # A shell starts background jobs with SIGINT ignored; bench and tune save what they have when it arrives.
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGINT, signal.default_int_handler)
    status = arguments.run(arguments)
    sys.stdout.flush()
    return status


if __name__ == "__main__":
    sys.exit(main())
