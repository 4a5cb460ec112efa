"""Put the tables and plots of saved runs between the marks of the README: `make report`, from a checkout.

python bench/results/readme.py README.md bench/results/*/*.json
"""

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

from eagle_kernels.bench.report import UnreadableResult, load, render_files

_BEGIN, _END = "<!-- bench:{} -->", "<!-- /bench:{} -->"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="readme.py", description=__doc__.partition("\n")[0])
    parser.add_argument("readme", type=Path, metavar="README", help="what stands between its marks is replaced")
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULT", help="files that bench --json wrote")
    arguments = parser.parse_args(argv)
    try:
        write(arguments.readme, arguments.results)
    except (UnreadableResult, OSError, ValueError) as failure:
        parser.error(str(failure))
    return 0


def write(readme: Path, results: Sequence[Path]) -> None:
    """Draw every run beside its file, and show all runs of a device between its marks, in the order given."""
    sections = render_files(results, plots=True)
    by_device = sorted(results, key=_device)
    text = readme.read_text(encoding="utf-8")
    for device, group in itertools.groupby(by_device, key=_device):
        text = replace_section(text, device, "\n".join(sections[path] for path in group))
    readme.write_text(text, encoding="utf-8")


def _device(path: Path) -> str:
    return load(path)["environment"]["device"]


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


if __name__ == "__main__":
    sys.exit(main())
