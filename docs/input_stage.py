"""Draw docs/input_stage.svg, the README's first figure: the chain of an engine above, the op below. `make report`.

The chain is vLLM 0.33's `combine_hidden_states` with K = 3 and `fc_norm` under its default compile mode, where this
method runs eagerly and a norm is plain torch.
"""

import sys
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

# vllm/ir/ops/layernorm.py: what one eager RMSNorm launches.
RMS_NORM = ("float", "pow", "mean", "add", "rsqrt", "mul", "to", "mul")
K = 3
CHAIN = (("cat", 1), ("RMSNorm", K * len(RMS_NORM)), ("cat", 1), ("fc", 1), ("copy", 1))
# csrc/norm_concat_linear.h, kMaxDecodeRows: what the fused CUDA kernel takes in one pass over the weight.
DECODE_ROWS = 16

# Filled boxes with white text, and a gray for text outside of them that is readable on white and on black.
_DATA, _BEFORE, _AFTER, _TEXT = "#57606a", "#b35900", "#1a7f37", "#7d8590"


def main() -> int:
    save(Path(__file__).with_suffix(".svg"))
    return 0


def save(path: Path) -> None:
    # Text stays text: sharp at any size, and the same file whichever fonts are installed. A fixed salt: the same ids.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "eagle-kernels", "font.family": "sans-serif"}):
        draw().savefig(path, format="svg", transparent=True, metadata={"Date": None, "Creator": None})


def draw() -> Figure:
    figure = Figure(figsize=(9.2, 3.3))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, 92)
    axes.set_ylim(0, 33)

    launches = sum(count for _, count in CHAIN)
    _heading(
        axes, 31.2, f"vLLM 0.33, K = {K}, fc_norm: {launches} kernel launches, {launches - 1} intermediate tensors"
    )
    for k in range(K):
        _box(axes, 1, 26 - 5 * k, 13, 4, _DATA, f"captured layer {k + 1}")
        _arrow(axes, 14, 26 - 5 * k, 18, 21)
    for left, width, (name, count) in zip((18, 30, 48, 58, 68), (8, 14, 6, 6, 6), CHAIN, strict=True):
        if name == "RMSNorm":
            for k in range(K):
                _box(axes, left, 26 - 5 * k, width, 4, _BEFORE, f"RMSNorm, {count // K} kernels")
                _arrow(axes, 26, 21, left, 26 - 5 * k)
                _arrow(axes, left + width, 26 - 5 * k, 48, 21)
        else:
            _box(axes, left, 21, width, 4, _BEFORE, name)
    for left, right in ((54, 58), (64, 68), (74, 78)):
        _arrow(axes, left, 21, right, 21)
    _box(axes, 78, 21, 13, 4, _DATA, "drafter's input")

    launches = f"the op, up to {DECODE_ROWS} rows on sm_90 and later: 1 kernel launch, no intermediate tensor"
    _heading(axes, 11.8, launches)
    for k in range(K):
        _box(axes, 1, 8.2 - 3.2 * k, 13, 2.6, _DATA, f"captured layer {k + 1}")
        _arrow(axes, 14, 8.2 - 3.2 * k, 30, 5)
    _box(axes, 30, 5, 44, 6, _AFTER, "norm_concat_linear(..., out=drafter's input)")
    _arrow(axes, 74, 5, 78, 5)
    _box(axes, 78, 5, 13, 4, _DATA, "drafter's input")
    return figure


def _heading(axes: object, y: float, text: str) -> None:
    axes.text(1, y, text, fontsize=11, weight="bold", color=_TEXT, va="center")


def _box(axes: object, left: float, middle: float, width: float, height: float, color: str, text: str) -> None:
    style = "round,pad=0,rounding_size=0.6"
    axes.add_patch(FancyBboxPatch((left, middle - height / 2), width, height, boxstyle=style, color=color, linewidth=0))
    axes.text(left + width / 2, middle, text, fontsize=9, color="white", ha="center", va="center")


def _arrow(axes: object, x: float, y: float, to_x: float, to_y: float) -> None:
    style = {"arrowstyle": "-|>", "color": _TEXT, "linewidth": 1, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 8}
    axes.annotate("", (to_x, to_y), (x, y), arrowprops=style)


if __name__ == "__main__":
    sys.exit(main())
