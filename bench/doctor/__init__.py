"""`doctor`: whether a target and its EAGLE-3 drafter fit each other, and what each engine makes of the two.

Configs and the headers of the safetensors files are read, no weight and no GPU.
"""

import argparse
import json
from pathlib import Path

from ..cli_types import Command
from ..output import define, say, wrap
from . import eagle3
from .pair import ENGINES, Pair, read

__all__ = ["DOCTOR", "examine"]


def examine(target: Path, drafter: Path, trained_by: str | None = None) -> Pair:
    """Read both folders and look for every trap; `trained_by` as in `Eagle3Config.from_hf`.

    Raises ValueError that names a file which is missing or damaged.
    """
    pair = read(target, drafter)
    stated = pair.drafter.get("architectures")
    if stated is not None and not (isinstance(stated, list) and all(isinstance(name, str) for name in stated)):
        pair.find("config", f"the drafter's architectures is {stated!r}, expected a list of names")
    eagle3.examine(pair, trained_by)
    return pair


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", type=Path, help="folder of the target: its config.json")
    parser.add_argument("drafter", type=Path, help="folder of the EAGLE-3 drafter: config.json and safetensors files")
    parser.add_argument("--engine", choices=list(ENGINES), help="leave out what only the others fall into")
    parser.add_argument("--trained-by", choices=["specforge", "speculators"], help="who wrote the drafter's config")
    parser.add_argument("--json", action="store_true", help="the same as one JSON object on standard output")


def _run(arguments: argparse.Namespace) -> int:
    try:
        pair = examine(arguments.target, arguments.drafter, arguments.trained_by)
    except ValueError as unreadable:
        arguments.parser.error(str(unreadable))
    asked = set(ENGINES.get(arguments.engine, ()))
    findings = [finding for finding in pair.findings if not (asked and finding.engines) or asked & {*finding.engines}]
    if arguments.json:
        say(json.dumps({"facts": pair.facts, "findings": [finding._asdict() for finding in findings]}, indent=1))
    else:
        for name, fact in pair.facts.items():
            define(name, str(fact), column=22)
        for finding in findings:
            who = f"{'; '.join(finding.engines)}: " if finding.engines else ""
            say(wrap(f"{finding.trap}: {who}{finding.text}"))
        say(f"findings: {len(findings)}" if findings else "nothing found")
    return 1 if findings else 0


DOCTOR = Command(
    "Whether a target and its EAGLE-3 drafter fit, and what each engine makes of them; 1 where something does not.",
    _add_arguments,
    _run,
)
