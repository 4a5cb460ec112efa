"""`eagle-kernels info | list | check | bench | roofline | tune | compare | plot | report | demo`: a module each."""

import argparse
import contextlib
import importlib
import signal
import sys
from collections.abc import Sequence

# In the order in which somebody new to a machine would use them.
_COMMANDS = {
    "info": "info",
    "list": "listing",
    "check": "check",
    "bench": "benchmark",
    "roofline": "roofline",
    "tune": "tune",
    "compare": "compare",
    "plot": "plot",
    "report": "readme_table",
    "demo": "demo",
}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="eagle-kernels", description="Look at, check and measure eagle-kernels.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{" + ",".join(_COMMANDS) + "}")
    for name, module_name in _COMMANDS.items():
        module = importlib.import_module(f".{module_name}", __package__)
        summary = module.__doc__.partition("\n")[0]
        command = commands.add_parser(name, help=summary, description=summary)
        module.add_arguments(command)
        command.set_defaults(run=module.run, parser=command)
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
