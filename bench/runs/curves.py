"""The curves of saved runs; `eagle-kernels plot`."""

import argparse
import functools
import io
import itertools
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .. import cli_types
from ..baselines import BASELINES
from ..cli_types import Command
from ..measure import geometric_mean, is_ours
from ..output import Unwritable, check_writable, say, write_bytes
from . import saved_run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PANEL = (6.4, 4.0)  # inches
_MAX_LINES = 6
_MARKERS = "osD^vPX*"
_COLORS = tuple(f"C{number}" for number in range(10))  # matplotlib's names of its ten
_OUR_COLORS = ("black", "0.5", "0.7")
_MAX_TICKS = 14
_Group = tuple[str, str | None, list[list[dict]]]  # title, name of ours, timed rows


@dataclass(frozen=True)
class _Curve:
    label: str
    points: dict[int, float]  # by T


def draw(runs: Sequence[dict], path: Path) -> None:
    """Draw the timed rows of all runs into one file: a row of panels per op, timer and dtype.

    On the left the speedup over each baseline, on the right the share of the roofline of the same run. A few shapes are
    a line each; many are drawn as their geometric mean, in a band from the worst to the best.
    """
    import matplotlib  # 0.3 s, and not installed everywhere

    groups = list(_groups(runs))
    if not groups:
        raise ValueError("there is nothing to plot: no row was timed")
    image = io.BytesIO()
    with matplotlib.rc_context({"text.parse_math": False}):  # "$" in a name would begin a formula
        # Without the date, so that the same run draws the same bytes.
        _figure(runs, groups).savefig(image, format="png", metadata={"Software": None})
    write_bytes(path, image.getvalue())


def _figure(runs: Sequence[dict], groups: Sequence[_Group]) -> "Figure":
    from matplotlib.figure import Figure

    width, height = _PANEL
    # A Figure without pyplot: no window system is looked for, and nothing stays in memory.
    figure = Figure(figsize=(2 * width, height * len(groups)), layout="constrained", dpi=120)
    panels = figure.subplots(len(groups), 2, squeeze=False)
    for (title, ours, group), (left, right) in zip(groups, panels, strict=True):
        if ours is None:  # baselines alone
            left.set_axis_off()
            left.text(0.5, 0.5, f"{title}:\nno column of ours", ha="center", transform=left.transAxes)
        else:
            _draw_speedups(left, group, ours)
            left.set_title(f"{title}: speedup of `{ours}`", loc="left")
        _draw_roofline(right, group, ours)
        right.set_title(f"share of the {_roofline_name(group)}{_whose(group, ours)}", loc="left")
    devices = dict.fromkeys(_device(run["environment"]) for run in runs)
    shapes = dict.fromkeys(saved_run.shape(row) for _, _, group in groups for row in group)
    names = textwrap.fill(", ".join(shapes), 150, break_on_hyphens=False)
    figure.suptitle(f"{'; '.join(devices)}\n{names}", fontsize=10)
    return figure


def _device(env: dict) -> str:
    machine = env["gpu"] if env["device"] == "cuda" else f"{env['cpu_model']}, {env['threads']} threads"
    return f"{machine}, torch {env['torch']}, {env['date']}"


def _groups(runs: Sequence[dict]) -> Iterable[_Group]:
    """What is in every row of panels."""
    timed = [
        (run["environment"]["device_slug"], row)
        for run in runs
        for row in saved_run.rows([record for record in run["records"] if record["status"] == "ok"])
    ]
    several = len({slug for slug, _ in timed}) > 1

    def key(entry: tuple[str, list[dict]]) -> tuple:
        slug, row = entry
        return (row[0]["op"], saved_run.TIMER_ORDER.index(row[0]["timer"]), saved_run.dtypes(row[0]), slug)

    for (op, _, dtype, slug), group in itertools.groupby(sorted(timed, key=key), key=key):
        measured = [row for _, row in group]
        timer = measured[0][0]["timer"]
        ours = next((record["variant"] for record in measured[0] if record["is_ours"]), None)
        title = ", ".join([op, dtype, *([timer] if timer != "clock" else []), *([slug] if several else [])])
        yield title, ours, measured


def _whose(group: Sequence[list[dict]], ours: str | None) -> str:
    """The name of the one column in the panel, where a few shapes are a line each."""
    return f": `{ours}`" if ours and 1 < len({saved_run.shape(row) for row in group}) <= _MAX_LINES else ""


def _roofline_name(group: Sequence[list[dict]]) -> str:
    """A run that did not measure the matmul rate knows only memory's floor."""
    has_product = any(record["tflops"] for row in group for record in row)
    is_known = all(record["matmul_tflops"] for row in group for record in row)
    return "memory roofline" if has_product and not is_known else "roofline"


def _color(name: str, ours: Sequence[str]) -> object:
    """The color of a column, the same in every panel."""
    if is_ours(name):
        return _OUR_COLORS[ours.index(name) % len(_OUR_COLORS)]
    return _COLORS[BASELINES.index(name) % len(_COLORS)]


def _curves(group: Sequence[list[dict]], value: Callable[[list[dict]], float | None]) -> list[_Curve]:
    """A curve per shape of what `value(row)` gives."""
    points: dict[str, dict[int, float]] = {}
    for row in group:
        if (y := value(row)) is not None:
            points.setdefault(saved_run.shape(row), {})[row[0]["T"]] = y
    return [_Curve(label, by_T) for label, by_T in points.items()]


def _draw_speedups(axes: "Axes", group: Sequence[list[dict]], ours: str) -> None:
    baselines = dict.fromkeys(baseline for row in group for baseline in saved_run.headline_baselines(row))
    styles = ["-", "--", "-.", ":"]
    shapes = len({saved_run.shape(row) for row in group})
    for number, baseline in enumerate(baselines):
        curves = _curves(group, functools.partial(saved_run.speedup, ours=ours, baseline=baseline))
        if shapes == 1 or shapes * len(baselines) > _MAX_LINES:
            _draw_band(axes, curves, f"over {baseline}", number, _color(baseline, []))
            continue
        for shape, curve in enumerate(curves):
            label = f"{curve.label} over {baseline}"
            _draw_line(axes, curve, label, shape, _COLORS[shape % len(_COLORS)], styles[number % 4])
    axes.axhline(1.0, color="black", linewidth=1.0)
    axes.set_ylabel("times faster")
    top = axes.get_ylim()[1]
    if (
        top > 8
    ):  # chains that spend their time allocating are 40 times slower, and 1.3 should not look like 1.0 beside them
        from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.set_ylim(bottom=0)
    _finish(axes, group)


def _draw_roofline(axes: "Axes", group: Sequence[list[dict]], ours: str | None) -> None:
    names = list(dict.fromkeys(record["variant"] for row in group for record in row))
    all_ours = [name for name in names if is_ours(name)]
    one_shape = len({saved_run.shape(row) for row in group}) == 1
    for number, name in enumerate(names):
        curves = _curves(group, functools.partial(_roofline_share_of, name=name))
        if one_shape or len(curves) > _MAX_LINES:
            _draw_band(axes, curves, name, number, _color(name, all_ours))
        elif name == (ours or names[0]):  # of several shapes only ours: all columns would be a tangle
            for shape, curve in enumerate(curves):
                _draw_line(axes, curve, curve.label, shape, _COLORS[shape % len(_COLORS)], "-")
    axes.axhline(100, color="black", linewidth=1.0)
    axes.set_ylabel("% of the roofline")
    axes.set_ylim(bottom=0)
    _finish(axes, group)


def _roofline_share_of(row: Sequence[dict], name: str) -> float | None:
    return next((saved_run.roofline_share(record) for record in row if record["variant"] == name), None)


def _draw_line(axes: "Axes", curve: _Curve, label: str, number: int, color: object, style: str) -> None:
    counts = sorted(curve.points)
    marker = _MARKERS[number % len(_MARKERS)]
    axes.plot(counts, [curve.points[T] for T in counts], style, color=color, marker=marker, markersize=4, label=label)


def _draw_band(axes: "Axes", curves: Sequence[_Curve], label: str, number: int, color: object) -> None:
    """The geometric mean of the curves, and from the worst to the best of them."""
    by_T: dict[int, list[float]] = {}
    for curve in curves:
        for T, y in curve.points.items():
            by_T.setdefault(T, []).append(y)
    if not by_T:
        return
    counts = sorted(by_T)
    several = f", geomean of {len(curves)}" if len(curves) > 1 else ""
    mean = _Curve(label, {T: geometric_mean(values) for T, values in by_T.items()})
    _draw_line(axes, mean, label + several, number, color, "-")
    if several:
        low, high = ([pick(by_T[T]) for T in counts] for pick in (min, max))
        axes.fill_between(counts, low, high, color=color, alpha=0.12, linewidth=0)


def _finish(axes: "Axes", group: Sequence[list[dict]]) -> None:
    from matplotlib.ticker import NullLocator

    counts = sorted({row[0]["T"] for row in group})
    axes.set_xscale("log", base=2)
    every = -(-len(counts) // _MAX_TICKS)
    axes.set_xticks(counts[::every], [str(T) for T in counts[::every]])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("T (rows)")
    axes.grid(True, color="0.9")
    axes.set_axisbelow(True)
    axes.legend(fontsize=8)


def _add_plot_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULT", help="files that bench --json wrote")
    parser.add_argument("--out", type=cli_types.png, metavar="FILE", help="default: the first RESULT with .png")


def _run_plot(arguments: argparse.Namespace) -> int:
    first = arguments.results[0]
    if not first.name:  # "." and "/" have no suffix to replace
        arguments.parser.error(f"{first}: Is a directory")
    path = arguments.out or first.with_suffix(".png")
    check_writable(arguments.parser, "--out", path)
    try:
        draw([saved_run.load_shown(result) for result in arguments.results], path)
    except ImportError:
        arguments.parser.error("matplotlib is not installed: pip install 'eagle-kernels[plot]'")
    except (saved_run.UnreadableResult, Unwritable, ValueError) as failure:
        arguments.parser.error(str(failure))
    say(f"saved: {path}")
    return 0


PLOT = Command("Draw saved runs: speedup and share of the roofline over T, as a PNG.", _add_plot_arguments, _run_plot)
