"""What an op's result is compared with: hard data, the engines' eager chain, elementwise bounds derived here."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from eagle_kernels.bench.accuracy import UNIT_ROUNDOFF, error_bound
from torch import Tensor

from eagle_kernels.ops.projection import Projection, project_formula
from eagle_kernels.ops.sources import Sources, formula, gather_rows

FP32 = UNIT_ROUNDOFF[torch.float32]


def plain(T: int, H: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randn(T, H, generator=generator).to(dtype)


def outliers(T: int, H: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """A hundredth of the channels 500 times as large as the others, as in the residual stream of every large model."""
    rows = torch.randn(T, H, generator=generator)
    channels = torch.randperm(H, generator=generator)[: max(1, H // 100)]
    rows[:, channels] *= 500
    return rows.to(dtype)


def scales(T: int, H: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Rows scaled from 1e-3 (mean square about eps) to 1e3."""
    return (torch.randn(T, H, generator=generator) * torch.logspace(-3, 3, T).unsqueeze(1)).to(dtype)


def tiny(T: int, H: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Around the smallest normal number, so that many values are subnormal and their squares vanish beside eps."""
    return (torch.randn(T, H, generator=generator) * torch.finfo(dtype).tiny).to(dtype)


def every_number(dtype: torch.dtype) -> Tensor:
    """All 65536 bit patterns of a 16-bit type, subnormals, infinities and NaNs too; as many random ones of fp32."""
    if dtype == torch.float32:
        return torch.randint(-(2**31), 2**31, (65536,), dtype=torch.int64).int().view(dtype)
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).short().view(dtype)


def half_steps(numbers: Tensor) -> Tensor:
    """Half of each number's distance to the next: adding it makes a tie, and at the largest number an infinity."""
    _, exponent = torch.frexp(numbers.float())
    significant_bits = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}[numbers.dtype]
    halves = torch.ldexp(torch.ones(exponent.shape), exponent - significant_bits - 1)
    return torch.where(numbers.isfinite(), halves, 0).to(numbers.dtype)


DATA: dict[str, Callable[..., Tensor]] = {"plain": plain, "outliers": outliers, "scales": scales, "tiny": tiny}


def eager_chain(operands: object) -> tuple[Tensor, Tensor]:
    """(normed concat, projection) as the engines compute them: clone or add, gather, norm rounded to the dtype, cat,
    F.linear, norm (SGLang 0.5.23 `llama_eagle3`, vLLM 0.33 `combine_hidden_states`).

    The norm rounds once (flashinfer and vLLM's vllm_c kernels); vLLM's `native` rounds twice, which is less accurate.
    """
    values, K, norm, gains, eps, norm_offset, residuals, indices, _ = operands.formula
    dtype = values[0].dtype

    def rms_norm(x: Tensor, gain: Tensor | None, eps: float) -> Tensor:
        weight = None if gain is None else gain.float() + norm_offset
        return F.rms_norm(x.float(), (x.shape[-1],), weight, eps).to(dtype)

    chunks = [value if not residuals or r is None else value + r for value, r in zip(values, residuals, strict=True)]
    chunks = [gather_rows(chunk, indices[k] if indices else None) for k, chunk in enumerate(chunks)]
    if norm == "chunk":
        eps = eps * K if len(eps) == 1 else eps
        chunks = [rms_norm(chunk, gains[k] if gains else None, eps[k]) for k, chunk in enumerate(chunks)]
    normed = torch.cat(chunks, -1)
    if norm == "concat":
        normed = rms_norm(normed, gains[0] if gains else None, eps[0])

    projection = operands.projection
    weight = projection["weight"]
    product_dtype = (
        dtype if weight.dtype == dtype else torch.float32
    )  # for a quantized weight, which is given in float64
    projected = F.linear(normed.to(product_dtype), weight.to(product_dtype)).to(dtype)
    if projection["bias"] is not None:
        projected = (projected + projection["bias"]).to(dtype)
    if projection["post_norm_weight"] is not None:
        projected = rms_norm(projected, projection["post_norm_weight"], operands.post_norm_eps)
    return normed, projected


def relative_rms(result: Tensor, truth: Tensor) -> float:
    """Root mean square over the rows of |result - truth| / |truth|, so that a small row weighs as much as a large one.

    A row whose truth is zero has to be zero.
    """
    error = (result.double() - truth).norm(dim=-1)
    scale = truth.norm(dim=-1)
    per_row = torch.where(error == 0, 0.0, error / scale)
    return per_row.square().mean().sqrt().item() if per_row.numel() else 0.0


@dataclass(frozen=True)
class Expectation:
    """A float64 truth, and by how much a result may miss it."""

    truth: Tensor  # fp64 [N, columns]
    elementwise: Tensor  # fp64 [N, columns]: no |result - truth| above this
    rms: float  # relative_rms at most this
    eager_rms: float

    def check(self, result: Tensor) -> None:
        assert result.shape == self.truth.shape, f"{tuple(result.shape)} != {tuple(self.truth.shape)}"
        error = (result.double() - self.truth).abs()
        missed = ~(error <= self.elementwise)  # a NaN misses
        if missed.any():
            place = tuple(missed.nonzero()[0].tolist())
            raise AssertionError(
                f"{int(missed.sum())} of {missed.numel()} elements miss; at {place} {result[place].item()!r}, expected "
                f"{self.truth[place].item()!r} +- {self.elementwise[place].item():.3g}"
            )
        rms = relative_rms(result, self.truth)
        assert rms <= self.rms, f"relative RMS error {rms:.4g} > {self.rms:.4g} (eager: {self.eager_rms:.4g})"


def expect(operands: object) -> tuple[Expectation, Expectation]:
    """(norm_concat, norm_concat_linear) of these operands: float64 truth and tolerances.

    With u the unit roundoff of the dtype, v = 2^-24 that of fp32, n = K*H, every bound to first order in u and v:

    Elementwise, worst case. A sum of n squares has no cancellation, so any order of summation has relative error
    n*v, its rsqrt half of that; root, reciprocal, mean, eps, offset + gain and two products are 8 more roundings. The
    rounding to the dtype adds u, or half of the smallest subnormal:

        dx = (u + (n/2 + 8) v) |x| + tiny/2                               0 where norm is "none": x is copied

    The product sees dx through |weight|, and sums n terms and the bias in fp32 in any order. Tensor-core units treat
    a subnormal bf16 as zero: each of n products then misses at most the smallest normal m times a weight:

        dp = dx |W|^T + (n + 1) v (|x| |W|^T + |bias|) + n m |W|max        out: + u |p| + tiny/2

    The post norm y = p rstd(p) g turns dp into g rstd (dp + |p| |dp|_2 / |p|_2), with the roundings of a norm on top.

    Relative RMS, the rule of `bench/accuracy.py`. bf16 and fp16: 1.05 times the eager chain's, which rounds in the same
    places. This needs no slack for few outputs: where the two differ, the fp32 values are on either side of a tie, and
    both are half a unit off. fp32: 1e-6 sqrt(n) / 32, at most twice eager's; but never below 3 v = sqrt(9) v, which
    nine roundings give where sums are exact: at n = 1 the rule would ask for half of one (0.5 v).
    """
    case, projection = operands.case, operands.projection
    u, finfo = UNIT_ROUNDOFF[case.dtype], torch.finfo(case.dtype)
    half_subnormal = finfo.smallest_normal * finfo.eps / 2
    n = sum(case.widths)
    norm_roundings = (n / 2 + 8) * FP32

    eager_normed, eager_projected = eager_chain(operands)
    x = formula(Sources(*operands.formula), torch.float64)
    dx = torch.zeros_like(x) if case.norm == "none" else (u + norm_roundings) * x.abs() + half_subnormal
    normed = Expectation(x, dx, *rms_limit(case.dtype, n, x, eager_normed))

    weight, bias, post = (projection[name] for name in ("weight", "bias", "post_norm_weight"))
    p = project_formula(x, Projection(weight, bias, None, 0.0), 0.0)
    magnitudes = Projection(weight.abs(), None if bias is None else bias.abs(), None, 0.0)
    magnitude = project_formula(x.abs(), magnitudes, 0.0)
    flushed = n * finfo.smallest_normal * weight.abs().max().item() if case.dtype == torch.bfloat16 else 0.0
    dp = dx @ weight.double().abs().t() + (n + 1) * FP32 * magnitude + flushed
    y = p
    if post is not None:
        y = project_formula(x, Projection(weight, bias, post, operands.post_norm_eps), case.norm_offset)
        per_p = (post.double() + case.norm_offset).abs()
        per_p = per_p * torch.rsqrt(p.square().mean(-1, keepdim=True) + operands.post_norm_eps)
        dp = per_p * (dp + p.abs() * dp.norm(dim=-1, keepdim=True) / p.norm(dim=-1, keepdim=True))
        dp += (case.D / 2 + 8) * FP32 * y.abs()
    dy = dp + u * (y.abs() + dp) + half_subnormal
    return normed, Expectation(y, dy, *rms_limit(case.dtype, n, y, eager_projected))


def allow_independent_roundings(expected: Expectation) -> Expectation:
    """For kernels that fold the gain: they round gain * weight, where eager rounds the normed value. The rms error of m
    independent outputs scatters by 1 / sqrt(2 m) of itself, the ratio of two by 1 / sqrt(m). Three times that is added
    to the 5 % of bench/accuracy.py; at the size of a model the 5 % decide alone (measured ratios: 0.97 to 1.01).
    Rows of zeros do not count: they have no error."""
    outputs = max(int(expected.truth.any(-1).sum()) * expected.truth.shape[1], 1)
    if expected.truth.shape[1] == 1:  # relative errors of single numbers have no such moments
        return replace(expected, rms=float("inf"))
    return replace(expected, rms=expected.rms * (1 + 3 / outputs**0.5))


def rms_limit(dtype: torch.dtype, n: int, truth: Tensor, eager: Tensor) -> tuple[float, float]:
    """(limit, eager's own): the rule of bench/accuracy.py, on the mean over rows."""
    eager_rms = relative_rms(eager, truth)
    return error_bound(eager_rms, dtype, n), eager_rms
