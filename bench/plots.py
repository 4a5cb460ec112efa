"""Curves over T, as a PNG: how much faster than each baseline, and how near to the roofline of the same run.

A row of panels per op, timer and dtype. A few shapes are a line each; of many, the geometric mean is drawn, in a band
from the worst to the best.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from .baselines import BASELINES
from .measure import geometric_mean
from .table import roofline_share, rows, speedup
from .workloads import is_ours

_PANEL = (6.4, 4.0)  # inches
_MOST_LINES = 6
_MARKERS = "osD^vPX*"
_COLOURS = matplotlib.colormaps["tab10"].colors
_OUR_COLOURS = ("black", "0.5", "0.7")
_MOST_TICKS = 14
_TIMER_ORDER = ("clock", "graph", "eager")


@dataclass(frozen=True)
class _Curve:
    label: str
    points: dict[int, float]  # by T


def draw(runs: Sequence[dict], path: Path) -> None:
    """Draw the timed rows of all runs into one file."""
    groups = list(_groups(runs))
    if not groups:
        raise ValueError("there is nothing to plot: no row was timed")
    width, height = _PANEL
    # A Figure of its own, without pyplot: no window system is looked for, and nothing stays in memory.
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
    figure.suptitle("; ".join(devices), fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without the date, so that the same run draws the same bytes.
    figure.savefig(path, metadata={"Software": None})


def _device(env: dict) -> str:
    machine = env["gpu"] if env["device"] == "cuda" else f"{env['cpu_model']}, {env['threads']} threads"
    return f"{machine}, torch {env['torch']}, {env['date']}"


def _groups(runs: Sequence[dict]) -> Iterable[tuple[str, str | None, list[list[dict]]]]:
    """(title, name of ours, timed rows) of every row of panels."""
    timed = [
        (run["environment"]["device_slug"], row)
        for run in runs
        for row in rows([record for record in run["records"] if record["status"] == "ok"])
    ]
    several = len({slug for slug, _ in timed}) > 1

    def key(entry: tuple[str, list[dict]]) -> tuple:
        slug, row = entry
        return (row[0]["op"], _TIMER_ORDER.index(row[0]["timer"]), row[0]["dtype"], slug)

    for (op, _, dtype, slug), group in itertools.groupby(sorted(timed, key=key), key=key):
        measured = [row for _, row in group]
        timer = measured[0][0]["timer"]
        ours = next((record["variant"] for record in measured[0] if record["is_ours"]), None)
        title = ", ".join([op, dtype, *([timer] if timer != "clock" else []), *([slug] if several else [])])
        yield title, ours, measured


def _whose(group: Sequence[list[dict]], ours: str | None) -> str:
    """Of a few shapes the panel holds one column alone."""
    return f": `{ours}`" if ours and 1 < len({_shape(row) for row in group}) <= _MOST_LINES else ""


def _roofline_name(group: Sequence[list[dict]]) -> str:
    """A run that did not measure the matmul rate knows the floor of memory alone."""
    has_product = any(record["tflops"] for row in group for record in row)
    is_known = all(record["matmul_tflops"] for row in group for record in row)
    return "memory roofline" if has_product and not is_known else "roofline"


def _colour(name: str, ours: Sequence[str]) -> object:
    """The same for a name in every panel."""
    if is_ours(name):
        return _OUR_COLOURS[ours.index(name) % len(_OUR_COLOURS)]
    return _COLOURS[BASELINES.index(name) % len(_COLOURS)]


def _shape(row: Sequence[dict]) -> str:
    return f"{row[0]['preset']}:{row[0]['stage']}"


def _curves(group: Sequence[list[dict]], value: object) -> list[_Curve]:
    """A curve per shape of what `value(row)` gives."""
    points: dict[str, dict[int, float]] = {}
    for row in group:
        if (y := value(row)) is not None:
            points.setdefault(_shape(row), {})[row[0]["T"]] = y
    return [_Curve(label, by_T) for label, by_T in points.items()]


def _draw_speedups(axes: Axes, group: Sequence[list[dict]], ours: str) -> None:
    baselines = dict.fromkeys(record["variant"] for row in group for record in row if not record["is_ours"])
    styles = ["-", "--", "-.", ":"]
    shapes = len({_shape(row) for row in group})
    for number, baseline in enumerate(baselines):
        curves = _curves(group, lambda row, baseline=baseline: speedup(row, ours, baseline))
        if shapes == 1 or shapes * len(baselines) > _MOST_LINES:
            _draw_band(axes, curves, f"over {baseline}", number, _colour(baseline, []))
            continue
        for shape, curve in enumerate(curves):
            label = f"{curve.label} over {baseline}"
            _draw_line(axes, curve, label, shape, _COLOURS[shape % len(_COLOURS)], styles[number % 4])
    axes.axhline(1.0, color="black", linewidth=1.0)
    axes.set_ylabel("times faster")
    top = axes.get_ylim()[1]
    if top > 8:  # norms that eager spends on allocating are 40 times slower, and 1.3 should not look like 1.0 beside it
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.set_ylim(bottom=0)
    _finish(axes, group)


def _draw_roofline(axes: Axes, group: Sequence[list[dict]], ours: str | None) -> None:
    names = list(dict.fromkeys(record["variant"] for row in group for record in row))
    all_ours = [name for name in names if is_ours(name)]
    one_shape = len({_shape(row) for row in group}) == 1
    for number, name in enumerate(names):
        curves = _curves(group, lambda row, name=name: _share(row, name))
        if one_shape or len(curves) > _MOST_LINES:
            _draw_band(axes, curves, name, number, _colour(name, all_ours))
        elif name == (ours or names[0]):  # of several shapes, ours alone: all of them would be a tangle
            for shape, curve in enumerate(curves):
                _draw_line(axes, curve, curve.label, shape, _COLOURS[shape % len(_COLOURS)], "-")
    axes.axhline(100, color="black", linewidth=1.0)
    axes.set_ylabel("% of the roofline")
    axes.set_ylim(bottom=0)
    _finish(axes, group)


def _share(row: Sequence[dict], name: str) -> float | None:
    return next((roofline_share(record) for record in row if record["variant"] == name), None)


def _draw_line(axes: Axes, curve: _Curve, label: str, number: int, colour: object, style: str) -> None:
    T = sorted(curve.points)
    marker = _MARKERS[number % len(_MARKERS)]
    axes.plot(T, [curve.points[t] for t in T], style, color=colour, marker=marker, markersize=4, label=label)


def _draw_band(axes: Axes, curves: Sequence[_Curve], label: str, number: int, colour: object) -> None:
    """The geometric mean of the curves, and from the worst to the best of them."""
    by_T: dict[int, list[float]] = {}
    for curve in curves:
        for T, y in curve.points.items():
            by_T.setdefault(T, []).append(y)
    if not by_T:
        return
    T = sorted(by_T)
    several = f", geomean of {len(curves)}" if len(curves) > 1 else ""
    mean = _Curve(label, {t: geometric_mean(by_T[t]) for t in T})
    _draw_line(axes, mean, label + several, number, colour, "-")
    if several:
        low, high = ([pick(by_T[t]) for t in T] for pick in (min, max))
        axes.fill_between(T, low, high, color=colour, alpha=0.12, linewidth=0)


def _finish(axes: Axes, group: Sequence[list[dict]]) -> None:
    counts = sorted({row[0]["T"] for row in group})
    axes.set_xscale("log", base=2)
    every = -(-len(counts) // _MOST_TICKS)
    axes.set_xticks(counts[::every], [str(T) for T in counts[::every]])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("T (rows)")
    axes.grid(True, color="0.9")
    axes.set_axisbelow(True)
    axes.legend(fontsize=8)
