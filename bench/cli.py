"""`eagle-kernels info | check | bench | report`: one module per command, each with add_arguments and run."""

import argparse
import sys
from collections.abc import Sequence

from . import benchmark, check, info, readme_table

_COMMANDS = {"info": info, "check": check, "bench": benchmark, "report": readme_table}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 is success, 1 a wrong result, 2 a bad argument, 130 an interrupted run."""
    parser = argparse.ArgumentParser(prog="eagle-kernels", description=__doc__.partition(":")[0].replace("`", ""))
    commands = parser.add_subparsers(dest="command", required=True, metavar="{" + ",".join(_COMMANDS) + "}")
    for name, module in _COMMANDS.items():
        summary = module.__doc__.partition("\n")[0]
        command = commands.add_parser(name, help=summary, description=summary)
        module.add_arguments(command)
        command.set_defaults(run=module.run, parser=command)
    arguments = parser.parse_args(argv)
    arguments.argv = list(sys.argv[1:] if argv is None else argv)
    try:
        return arguments.run(arguments)
    except BrokenPipeError:  # `| head` closed the pipe: not an error of ours
        return 0
    except KeyboardInterrupt:
        return 130
