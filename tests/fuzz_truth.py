"""What a call of test_fuzz.py must give: bits, or a bound around float64, for each element that has one.

The bounds are the elementwise ones of tests/accuracy.py (`expect`), which hold for any finite input. A row has none
where the range of fp32 ends: its squares overflow, or vanish beside an eps of 0. Such a row, and one with NaN or Inf,
must not change other rows, and a NaN must not be lost.
"""

from dataclasses import dataclass

import torch
from eagle_kernels.bench.accuracy import UNIT_ROUNDOFF
from torch import Tensor

from eagle_kernels import QuantizedWeight
from eagle_kernels.ops.add_rms_norm import formula as add_rms_norm_formula
from eagle_kernels.ops.capture_hidden import CaptureHidden
from eagle_kernels.ops.norm_concat_linear import _split_eps
from eagle_kernels.ops.projection import Projection, project_formula
from eagle_kernels.ops.sources import Sources, formula, gather_rows, rows_in_range
from eagle_kernels.ops.vocab_parallel_embedding import VocabParallelEmbedding
from eagle_kernels.quantized_weight import CompressedWeight, values_of
from fuzz_calls import Call

FP32 = UNIT_ROUNDOFF[torch.float32]
# Between these a sum of n fp32 squares has a relative error of at most n * 2^-24.
_LEAST, _MOST = 2.0**-100, 2.0**120


@dataclass(frozen=True)
class Truth:
    """One output in float64."""

    name: str
    value: Tensor  # fp64 [N, columns], or the bits in the op's dtype
    bound: Tensor | None  # fp64, NaN where nothing is promised; None: the bits, any NaN for a NaN
    nan: Tensor | None = None  # where the result has to be NaN

    def miss(self, actual: Tensor) -> str | None:
        """What is wrong with a result; None where nothing is."""
        actual = actual.reshape(self.value.shape)
        if self.bound is None:
            wrong = (actual != self.value) & ~(actual.isnan() & self.value.isnan())
            wrong |= (actual.signbit() != self.value.signbit()) & ~actual.isnan()
        else:
            most = torch.finfo(actual.dtype).max
            overflows = (self.value.abs() + self.bound >= most) & (actual.abs() >= most)
            overflows &= actual.signbit() == self.value.signbit()
            within = (actual.double() - self.value).abs() <= self.bound
            wrong = ~within & ~overflows & ~self.bound.isnan()
            if self.nan is not None:
                wrong |= self.nan & ~actual.isnan()
        if not wrong.any():
            return None
        place = tuple(wrong.nonzero()[0].tolist())
        bound = "its bits" if self.bound is None else f"+- {self.bound[place].item():.3g}"
        return (
            f"{self.name}: {int(wrong.sum())} of {wrong.numel()} elements miss; at {place} {actual[place].item()!r}, "
            f"expected {self.value[place].item()!r} {bound}"
        )


def truths_of(call: Call) -> list[Truth]:
    return _TRUTHS[call.op](call.arguments)


def _capture_hidden(arguments: dict) -> list[Truth]:
    hidden = arguments["hidden"]
    value, squares = torch.empty(hidden.shape[0], hidden.shape[-1], dtype=hidden.dtype), torch.empty(hidden.shape[0])
    CaptureHidden(hidden, arguments["residual"], value, squares).reference()
    truths = [Truth("out", value, None)]
    if "sum_squares" in arguments:
        total = value.double().square().sum(-1)
        bound = hidden.shape[-1] * (FP32 * total + 2.0**-149)
        bound[~(total < _MOST)] = float("nan")
        truths.append(Truth("sum_squares", total, bound, value.isnan().any(-1)))
    return truths


def _add_rms_norm(arguments: dict) -> list[Truth]:
    hidden, residual, weight = (arguments[name] for name in ("hidden", "residual", "weight"))
    eps, norm_offset = arguments["eps"], arguments["norm_offset"]
    normed, total = add_rms_norm_formula(hidden, residual, weight, eps, norm_offset, torch.float64)
    bound = _norm_bound(normed, hidden.dtype, hidden.shape[1])
    bound[~_has_rstd(total, total.square().sum(-1), eps)] = float("nan")
    nan = total.isnan().any(-1, keepdim=True) | weight.isnan()
    return [Truth("normed", normed, bound, nan), Truth("sum", hidden + residual, None)]


def _vocab_parallel_embedding(arguments: dict) -> list[Truth]:
    ids, table, scale = arguments["ids"].reshape(-1), arguments["table"], arguments["scale"]
    value = table.new_empty(ids.shape[0], table.shape[1])
    scales = (None, scale) if isinstance(scale, Tensor) else (scale, None)
    VocabParallelEmbedding(ids, table, *arguments["shard"].bounds, *scales, value).reference()
    return [Truth("result", value, None)]


def _norm_concat(arguments: dict) -> list[Truth]:
    sources = Sources.of_call("norm_concat", arguments["chunks"], arguments)
    if sources.norm == "none":
        sources = sources.as_matrices()
        return [Truth("result", formula(sources, torch.float64).to(sources.chunks[0].dtype), None)]
    return [Truth("result", *_normed(sources))]


def _norm_concat_linear(arguments: dict) -> list[Truth]:
    weight, bias, post = (arguments[name] for name in ("weight", "bias", "post_norm_weight"))
    is_nan, (codes, scale) = _nan_of(weight), _scaled_sums(weight)
    if isinstance(weight, QuantizedWeight):
        weight = weight.dequantize(torch.float64)
    eps, post_eps = _split_eps(arguments["eps"], post)
    sources = Sources.of_call("norm_concat_linear", arguments["chunks"], arguments | {"eps": eps})
    x, dx, nan = _normed(sources)
    dtype, n, D = sources.chunks[0].dtype, x.shape[1], weight.shape[0]
    tiny, u = torch.finfo(dtype).smallest_normal, UNIT_ROUNDOFF[dtype]

    # Columns whose weight or bias is not finite: the only promise there is that a NaN is not lost.
    broken = ~weight.isfinite().all(1) if bias is None else ~(weight.isfinite().all(1) & bias.isfinite())
    sizes = torch.where(broken.unsqueeze(1), 0, weight.double().abs())
    p = project_formula(x, Projection(weight, bias, None, 0.0), 0.0)
    magnitude = x.abs() @ sizes.t()
    magnitude = magnitude if bias is None else magnitude + torch.where(broken, 0, bias.double().abs())
    # Tensor-core units and AVX-512-BF16 take a subnormal operand as zero, and VDPBF16PS each subnormal sum.
    flushed = n * tiny * (sizes.amax(1) + x.abs().amax(1, keepdim=True))
    flushed = flushed + (n * tiny * scale if dtype == torch.bfloat16 else 0.0)
    dp = dx @ sizes.t() + (n + 1) * FP32 * magnitude + flushed
    # x is rounded to the dtype, and fp16 ends at 65504.
    bounded = (x.abs() + dx < torch.finfo(dtype).max).all(1) & (magnitude < _MOST).all(1)
    bounded &= (x.abs() @ codes.t() < _MOST).all(1)
    dp[~bounded] = float("nan")
    dp[:, broken] = float("nan")
    # The products of a source whose index is out of range may be left out.
    lost = is_nan.any(1) & _in_range(sources)
    nan = nan.any(1, keepdim=True) | (lost if bias is None else lost | bias.isnan())
    nan = nan if post is None else nan.any(1, keepdim=True) | post.isnan()
    y = p
    if post is not None:
        y = project_formula(x, Projection(weight, bias, post, post_eps), sources.norm_offset)
        gain = (post.double() + sources.norm_offset).abs()
        mean = p.square().mean(-1, keepdim=True) + post_eps
        length, missed = (mean * D).sqrt(), dp.norm(dim=-1, keepdim=True)
        dp = gain * torch.rsqrt(mean) * (dp + p.abs() * missed / length)
        dp += (D / 2 + 8) * FP32 * y.abs()
        # The derivation is of first order: nothing is promised where a row's terms cancel to a length near its error.
        dp[((missed > 0.05 * length) | ~(mean > _LEAST) | ~(mean < _MOST)).squeeze(-1)] = float("nan")
    dy = 1.2 * (dp + u * (y.abs() + dp) + tiny * torch.finfo(dtype).eps)
    dy[~y.isfinite()] = float("nan")
    return [Truth("result", y, dy, nan.expand_as(y))]


def _nan_of(weight: Tensor | QuantizedWeight) -> Tensor:
    """Where a weight [D, K*H] is NaN. A code of zero with an infinite fp32 scale does not count: a kernel may apply the
    scale to a sum of products, which a code of zero does not make NaN."""
    if isinstance(weight, CompressedWeight):
        weight = weight.dequantize()
    if isinstance(weight, Tensor):
        return weight.isnan()
    codes, scales, global_scale = weight.tensors
    if scales.dtype == torch.float32:
        scales = torch.where(scales.isinf(), 1.0, scales)
    finite = QuantizedWeight.of_tensors(codes, scales, global_scale, weight.format, weight.block)
    return finite.dequantize(torch.float64).isnan()


def _scaled_sums(weight: Tensor | QuantizedWeight) -> tuple[Tensor, float]:
    """For kernels that multiply rows by codes and the sums by scales: absolute codes [D, K*H] and the largest scale,
    which is at least 1."""
    if isinstance(weight, Tensor | CompressedWeight):
        return torch.zeros(weight.shape, dtype=torch.float64), 1.0
    codes, scales, _ = weight.tensors
    return values_of(codes).double().abs().nan_to_num(), max(1.0, scales.float().nan_to_num(0, 0).amax().item())


def _normed(sources: Sources) -> tuple[Tensor, Tensor, Tensor]:
    """x in float64 with its bound (see tests/accuracy.py, `expect`), and where it has to be NaN."""
    sources = sources.as_matrices()
    x, values = formula(sources, torch.float64), formula(_without_norm(sources), torch.float64)
    unscaled = formula(sources._replace(gains=[]), torch.float64)
    if sources.norm == "none":
        bound = torch.zeros_like(x)
        bound[~x.isfinite().all(1)] = float("nan")
        return x, bound, x.isnan()
    K, chunks = sources.num_chunks, sources.chunks
    widths = [chunk.shape[1] for chunk in chunks] if len(chunks) == K else [x.shape[1] // K] * K
    if sources.sum_squares is None:
        squares = [part.square().sum(-1, keepdim=True) for part in values.split(widths, 1)]
    else:
        indices = sources.indices if len(sources.indices) == K else (sources.indices or [None]) * K
        squares = [gather_rows(sources.sum_squares[:, k : k + 1].double(), index) for k, index in enumerate(indices)]
    if sources.norm == "concat":
        widths, squares = [sum(widths)], [sum(squares)]
    eps = sources.eps if len(sources.eps) == len(widths) else sources.eps * len(widths)
    bound = _norm_bound(x, sources.chunks[0].dtype, x.shape[1])
    parts = zip(unscaled.split(widths, 1), bound.split(widths, 1), squares, eps, strict=True)
    for part, part_bound, square, each in parts:
        part_bound[~_has_rstd(part, square.squeeze(1), each)] = float("nan")
    bound[~x.isfinite()] = float("nan")
    by_gain = x.isnan() & unscaled.isfinite()
    # Statistics that the caller gives need not match the values.
    return x, bound, by_gain if sources.sum_squares is not None else by_gain | (x.isnan() & values.isnan())


def _in_range(sources: Sources) -> Tensor:
    """[N, 1]: whether every chunk has the row that its index asks for."""
    K, indices = len(sources.chunks), sources.indices
    indices = indices if len(indices) == K else (indices or [None]) * K
    there = [rows_in_range(chunk, i) for chunk, i in zip(sources.chunks, indices, strict=True) if i is not None]
    return torch.stack(there).all(0) if there else torch.ones(1, 1, dtype=torch.bool)


def _without_norm(sources: Sources) -> Sources:
    """The same rows, only gathered and summed."""
    return sources._replace(norm="none", gains=[], sum_squares=None)


def _norm_bound(x: Tensor, dtype: torch.dtype, n: int) -> Tensor:
    finfo = torch.finfo(dtype)
    subnormals = finfo.smallest_normal * finfo.eps + 4 * 2.0**-149
    return (UNIT_ROUNDOFF[dtype] + (n / 2 + 8) * FP32) * x.abs() + subnormals


def _has_rstd(values: Tensor, squares: Tensor, eps: float) -> Tensor:
    """Per row, whether fp32 gives its 1/rms: a row of zeros has one."""
    mean = squares / values.shape[1] + eps
    return (squares < _MOST) & values.isfinite().all(1) & ((mean > _LEAST) | (values == 0).all(1))


_TRUTHS = {
    "capture_hidden": _capture_hidden,
    "add_rms_norm": _add_rms_norm,
    "vocab_parallel_embedding": _vocab_parallel_embedding,
    "norm_concat": _norm_concat,
    "norm_concat_linear": _norm_concat_linear,
}
