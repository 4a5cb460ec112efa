"""Turn saved runs into Markdown tables, and put them between the marks of a README."""

import argparse
from pathlib import Path

from .results import UnreadableResult, load
from .table import footer, markdown

_BEGIN, _END = "<!-- bench:{} -->", "<!-- /bench:{} -->"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULT", help="files that bench --json wrote")
    parser.add_argument("--readme", type=Path, metavar="FILE", help="replace what stands between its marks")


def run(arguments: argparse.Namespace) -> int:
    try:
        runs = [(path, load(path)) for path in arguments.results]
        text = "\n".join(render(path, run) for path, run in runs)
        if arguments.readme is None:
            print(text, end="")
        else:
            device = runs[0][1]["environment"]["device"]
            readme = arguments.readme.read_text(encoding="utf-8")
            arguments.readme.write_text(replace_section(readme, device, text), encoding="utf-8")
    except (UnreadableResult, OSError, ValueError) as failure:
        arguments.parser.error(str(failure))
    return 0


def render(path: Path, run: dict) -> str:
    """What the run was measured on, its tables, its geometric means, and the file they come from."""
    env = run["environment"]
    machine = f"{env['cpu_model']}, {env['threads']} of {env['cpu_cores']} cores, {env['cpu_isa']}"
    lines = [
        f"{machine}; torch {env['torch']}; {env['date']}, commit {env['commit']}. Times are medians / minima in ms.",
        "",
        *markdown(run["records"]),
        *(f"- {line}" for line in footer(run["records"])),
        "",
        f"From [`{path.as_posix()}`]({path.as_posix()}) by `eagle-kernels report`.",
    ]
    return "\n".join(lines) + "\n"


def section(readme: str, device: str) -> str | None:
    """What stands between the marks of this device; None where there are none."""
    begin, end = _BEGIN.format(device), _END.format(device)
    if begin not in readme or end not in readme:
        return None
    return readme.partition(begin)[2].partition(end)[0].removeprefix("\n")


def replace_section(readme: str, device: str, text: str) -> str:
    """The README with this text between the marks; ValueError where it has none."""
    old = section(readme, device)
    if old is None:
        raise ValueError(f"the README has no {_BEGIN.format(device)} ... {_END.format(device)}")
    begin, end = _BEGIN.format(device), _END.format(device)
    before, _, rest = readme.partition(begin)
    return f"{before}{begin}\n{text}{end}{rest.partition(end)[2]}"
