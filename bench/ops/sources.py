"""The random sources of norm_concat and norm_concat_linear, and the case of an op with one output."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from eagle_kernels.ops.sources import Sources

from ..accuracy import error_bound, relative_rms
from .draw import ROWS, WIDTHS, Draw, Expected, Guarded, RandomCall


def make_sources(draw: Draw) -> tuple[tuple[list[Tensor] | Tensor], dict[str, Any]]:
    """chunks and the options that norm_concat and norm_concat_linear share."""
    dtype, K, T = draw.dtype(), draw.choose("K", 1, 2, 3, 5, 6), draw.choose("T", *ROWS)
    norm = draw.choose("norm", "chunk", "chunk", "concat", "none")
    layout = draw.choose("layout", "list", "list", "packed", "unequal", "one row")
    widths = [draw.choose("H", *WIDTHS)] * K
    if layout == "unequal":
        widths = [draw.width() for _ in range(K)]
        draw.drawn["H"] = widths
    parts = [sum(widths)] if layout == "packed" else widths
    chunks = [draw.rows(1 if layout == "one row" else T, width, dtype) for width in parts]
    every = [draw.rows(chunk.shape[0], chunk.shape[1], dtype) for chunk in chunks]
    keep = draw.choose("residuals", "none", "some", "all")
    kept = [keep == "all" or (keep == "some" and draw.random.random() < 0.5) for _ in every]
    residuals = [residual if is_kept else None for residual, is_kept in zip(every, kept, strict=True)]

    options: dict[str, Any] = {"norm": norm, "norm_offset": draw.choose("norm_offset", 0.0, 1.0)}
    options["residuals"] = None if keep == "none" else residuals
    options["norm_weight"] = _make_gains(draw, norm, widths, dtype)
    options["eps"] = [1e-6 * 10**k for k in range(K)] if norm == "chunk" and draw.choose("eps", 1, "K") == "K" else 1e-5
    if layout == "one row":
        options["residuals"] = None if keep == "none" else [r if r is None else r[0] for r in residuals]
        return ([chunk[0] for chunk in chunks],), options
    options["indices"] = _make_indices(draw, T, K, per_chunk=layout != "packed")
    if layout == "packed":
        options["num_chunks"] = K
    if norm != "none" and draw.choose("sum_squares", False, False, True):
        options["sum_squares"] = _sum_squares(chunks, residuals, K)
    return (chunks[0] if layout == "packed" else chunks,), options


def _make_gains(draw: Draw, norm: str, widths: list[int], dtype: torch.dtype) -> Tensor | list[Tensor] | None:
    form = draw.choose("gains", "none", "list", "tensor")
    if norm == "none" or form == "none":
        return None
    if norm == "concat":
        return draw.gain(sum(widths), dtype=dtype)
    if form == "tensor" and len(set(widths)) == 1:
        return draw.gain(len(widths), widths[0], dtype=dtype)
    gains = [draw.gain(width, dtype=dtype) for width in widths]
    return [gain.to(gains[0].dtype) for gain in gains]


def _make_indices(draw: Draw, T: int, K: int, per_chunk: bool) -> Tensor | list[Tensor | None] | None:
    form = draw.choose("indices", "none", "one", *(["per chunk"] if per_chunk else []))
    dtype = draw.choose("index_dtype", torch.int32, torch.int64)
    if form == "none":
        return None
    # Without an index of its own a chunk gives its T rows, so a mixed list has to have N = T.
    mixed = form == "per chunk" and draw.choose("mixed", False, True)
    N = T if mixed else draw.choose("N", *ROWS)
    indices = [draw.index(T, N, dtype) for _ in range(K if form == "per chunk" else 1)]
    if form == "one":
        return indices[0]
    return [None if mixed and draw.random.random() < 0.4 else index for index in indices]


def _sum_squares(chunks: list[Tensor], residuals: list[Tensor | None], K: int) -> Tensor:
    values = [c if r is None else c + r for c, r in zip(chunks, residuals, strict=True)]
    pieces: Sequence[Tensor] = values[0].chunk(K, -1) if len(values) != K else values
    return torch.stack([piece.float().square().sum(-1) for piece in pieces], -1)


def one_output(
    draw: Draw, arguments: tuple, options: dict[str, Any], truth: Tensor, eager: Tensor, sources: Sources
) -> RandomCall:
    """The call of an op whose only output is float64 `truth` up to a bound, half of the time through `out`."""
    bound = error_bound(relative_rms(eager, truth), eager.dtype, sources.width, truth.numel())
    truth = truth[0] if sources.is_one_row else truth
    if not draw.choose("out", False, True):
        return RandomCall(arguments, options, [Expected("result", truth, bound)])
    out = Guarded(draw, *truth.shape, dtype=eager.dtype)
    return RandomCall(arguments, options | {"out": out.view}, [Expected("result", truth, bound)], [out])
