"""Turn saved runs into Markdown tables and plots, and put them between the marks of a README."""

import argparse
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from .results import UnreadableResult, load
from .table import blocks, footer, markdown, roofline_share, rows, speedup

_BEGIN, _END = "<!-- bench:{} -->", "<!-- /bench:{} -->"

# A run over more shapes than this gets one line a shape: its tables fill pages, and stand in the JSON.
_MOST_TABLES = 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULT", help="files that bench --json wrote")
    parser.add_argument("--readme", type=Path, metavar="FILE", help="replace what stands between its marks")
    parser.add_argument("--plots", action="store_true", help="draw each run beside its file, and show the plot")


def run(arguments: argparse.Namespace) -> int:
    try:
        runs = [(path, load(path)) for path in arguments.results]
        if arguments.plots:
            _draw(arguments, runs)
        if arguments.readme is None:
            print("\n".join(render(path, run) for path, run in runs), end="")
            return 0
        readme = arguments.readme.read_text(encoding="utf-8")
        by_device = sorted(runs, key=lambda entry: entry[1]["environment"]["device"])
        for device, group in itertools.groupby(by_device, key=lambda entry: entry[1]["environment"]["device"]):
            readme = replace_section(readme, device, "\n".join(render(path, run) for path, run in group))
        arguments.readme.write_text(readme, encoding="utf-8")
    except (UnreadableResult, OSError, ValueError) as failure:
        arguments.parser.error(str(failure))
    return 0


def _draw(arguments: argparse.Namespace, runs: Sequence[tuple[Path, dict]]) -> None:
    try:
        from . import plots
    except ImportError:
        arguments.parser.error("argument --plots: matplotlib is not installed: pip install 'eagle-kernels[plot]'")
    for path, measured in runs:
        plots.draw([measured], path.with_suffix(".png"))


def render(path: Path | None, run: dict) -> str:
    """What the run was measured on, its tables, its geometric means, its plot, and the file they come from."""
    env, records = run["environment"], run["records"]
    lines = [
        f"{_machine(env)}; torch {env['torch']}; {env['date']}, commit {env['commit']}. Times are medians (p20 - p80).",
        "",
        *(markdown(records) if len(list(blocks(records))) <= _MOST_TABLES else _summary(records)),
        *(f"- {line}" for line in footer(records)),
    ]
    if path is not None:
        source = path.as_posix()
        plot = path.with_suffix(".png")
        picture = ["", f"![{path.stem}: speedup and share of the roofline over T]({plot.as_posix()})"]
        lines += picture if plot.exists() else []
        lines += ["", f"From [`{source}`]({source}) by `eagle-kernels report`."]
    return "\n".join(lines) + "\n"


def _machine(env: dict) -> str:
    if env["device"] == "cuda":
        return f"{env['gpu']}, driver {env['driver']}, CUDA {env['cuda']}"
    return f"{env['cpu_model']}, {env['threads']} of {env['cpu_cores']} cores, {env['cpu_isa']}"


def _summary(records: Sequence[dict]) -> Iterator[str]:
    """A table per op, dtype, timer and baseline: a line per shape, a column per T, the speedup of the first of ours.

    Of baselines measured alone, their share of the roofline.
    """
    groups: dict[tuple, list[list[dict]]] = {}
    for row in rows(records):
        ours = next((record["variant"] for record in row if record["is_ours"]), None)
        for baseline in (record["variant"] for record in row if not record["is_ours"]):
            groups.setdefault((row[0]["op"], row[0]["dtype"], row[0]["timer"], ours, baseline), []).append(row)
    for (op, dtype, timer, ours, baseline), group in groups.items():
        counts = sorted({row[0]["T"] for row in group})
        what = f"{ours} over {baseline}" if ours else f"{baseline}, % of the roofline"
        yield f"**{op}, {dtype}, {timer}: {what}**"
        yield ""
        yield "| preset | K | H | D | " + " | ".join(f"T={T}" for T in counts) + " |"
        yield "| --- |" + " ---: |" * (3 + len(counts))
        shapes: dict[tuple, dict[int, str]] = {}
        for row in group:
            first = row[0]
            shape = (f"{first['preset']}:{first['stage']}", first["K"], first["H"], first["D"])
            shapes.setdefault(shape, {})[first["T"]] = _summary_cell(row, ours, baseline)
        for shape, cells in shapes.items():
            yield "| " + " | ".join([*map(str, shape), *(cells.get(T, "") for T in counts)]) + " |"
        yield ""


def _summary_cell(row: Sequence[dict], ours: str | None, baseline: str) -> str:
    if ours is not None:
        value = speedup(row, ours, baseline)
        return "-" if value is None else f"{value:.2f}x"
    return next((f"{roofline_share(r):.0f}" for r in row if r["variant"] == baseline and r["status"] == "ok"), "-")


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
