"""norm_concat_linear: gather, norm and project K sources in one pass, the input stage of a drafter.

    x[i]   = round(concat_k(value_k[i] * rstd_k[i] * (norm_offset + gain_k)))        (the terms: `ops/sources.py`)
    out[i] = round(post_norm(x[i] @ weight^T + bias))

Replaces `cat` + K norms + `cat` + `fc` of EAGLE-3 (SGLang 0.5.23 `llama_eagle3`, vLLM 0.33 `combine_hidden_states`),
and enorm + hnorm + `cat` + `eh_proj` of MTP / NextN. Sums are fp32; the bias and the post norm see them unrounded.
Triton's split kernels round (norm_offset + gain) * weight in place of x: one rounding either way, in other places.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import checks
from .. import plan as plans
from ..alignment import aligned
from ..direct import is_direct
from ..library import register
from ..plan import Plan
from ..tuned_configs import Tiles, choose_tiles, gpu_of, invariant_rows
from .norm_concat import ARGUMENTS, check_out
from .sources import NORMS, Sources, check_no_overlap, formula, output_rows, plain_arguments, tensors_of

OP = "norm_concat_linear"


def norm_concat_linear(
    chunks: Sequence[Tensor] | Tensor,
    weight: Tensor,
    *,
    norm: str = "chunk",
    norm_weight: Sequence[Tensor] | Tensor | None = None,
    eps: float | Sequence[float] = 1e-6,
    norm_offset: float = 0.0,
    residuals: Sequence[Tensor | None] | Tensor | None = None,
    indices: Sequence[Tensor | None] | Tensor | None = None,
    bias: Tensor | None = None,
    post_norm_weight: Tensor | None = None,
    sum_squares: Tensor | None = None,
    num_chunks: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """out[i] = round(post_norm(round(norm_concat(...)[i]) @ weight^T + bias)).

    Args:
        chunks, norm, norm_weight, norm_offset, residuals, indices, sum_squares, num_chunks: as in `norm_concat`.
            A chunk with its own index can be an embedding table [V, H]: the MTP input stage is then this one op.
        weight: [D, K*H], the chunks' dtype; row stride free, last stride 1.
        eps: one float for every norm; or K floats for "chunk". With post_norm_weight a sequence has one more, the
            last, for the post norm.
        bias: [D], the chunks' dtype or fp32.
        post_norm_weight: [D]: RMSNorm of the result with gain norm_offset + post_norm_weight (DFlash, Laguna, DSpark).
        out: [N, D], row stride free, for example a slice of a static buffer; allocated where None. May not overlap an
            input.

    Returns:
        [N, D] ([D] for 1-D rows).

    Raises:
        TypeError, ValueError: an argument that does not fit; nothing is written.
        RuntimeError: an input requires grad while grad mode is on.
    """
    try:
        one_eps = isinstance(eps, (int, float))
        if out is not None and (one_eps or post_norm_weight is None):
            plain = plain_arguments(
                OP, chunks, norm, norm_weight, eps, norm_offset, residuals, indices, sum_squares, num_chunks
            )
            projection = (weight, bias, post_norm_weight, eps if one_eps else 0.0)
            if is_direct(OP, out, *projection[:3], *tensors_of(plain)) and _runs_fused(out, weight, post_norm_weight):
                torch.ops.eagle_kernels_C.norm_concat_linear_out(*plain, *projection, out)
                return out
    except Exception:  # whatever it is: the checks below word it, or the registered op raises it again
        pass
    eps, post_norm_eps = _split_eps(eps, post_norm_weight)
    eps_name = "eps" if post_norm_weight is None else "eps without the post norm's"
    sources = Sources.build(
        OP, chunks, norm, norm_weight, eps, norm_offset, residuals, indices, sum_squares, num_chunks, eps_name
    )
    columns = _check_projection(sources, weight, bias, post_norm_weight)
    projection = (weight, bias, post_norm_weight, post_norm_eps)
    if out is None:
        projected = torch.ops.eagle_kernels.norm_concat_linear(*sources.arguments, *projection)
        return projected.squeeze(0) if sources.one_row else projected
    rows = check_out(OP, out, sources, columns, "D")
    torch.ops.eagle_kernels.norm_concat_linear_out(*sources.arguments, *projection, rows)
    return out


def _runs_fused(out: Tensor, weight: Tensor, post_norm_weight: Tensor | None) -> bool:
    """Whether the plan of this call is one compiled primitive, unless that refuses operands that lie badly."""
    if post_norm_weight is not None and weight.is_cuda:
        return False
    columns, width = weight.shape
    return plan_sizes(out.shape[0], width, columns, weight.dtype, weight.device.type).method.startswith("fused")


def _split_eps(eps: float | Sequence[float], post_norm_weight: Tensor | None) -> tuple[float | Sequence[float], float]:
    if isinstance(eps, (int, float)):
        return eps, float(eps)
    if post_norm_weight is None:
        return eps, 0.0  # which Sources.build checks
    eps = checks.check_sequence(OP, "eps", eps, "a number or a sequence of numbers")
    if len(eps) < 2:
        raise checks.error(
            ValueError,
            OP,
            f"eps has {len(eps)} entries",
            "K + 1",
            "post_norm_weight is given and the last eps is its own",
        )
    return eps[:-1], checks.check_number(OP, f"eps[{len(eps) - 1}]", eps[-1])


def _check_projection(sources: Sources, weight: Tensor, bias: Tensor | None, post_norm_weight: Tensor | None) -> int:
    first = sources.chunks[0]
    checks.check_operand(OP, "weight", weight, first, "chunks[0]")
    width = sources.width
    if weight.dim() != 2 or weight.shape[1] != width:
        k = sources.num_chunks
        split = f"K={k} chunks of H={width // k}" if width % k == 0 else f"{k} chunks"
        raise checks.shape_error(OP, "weight", weight, f"(D, K*H) = (*, {width}) for {split}")
    columns = weight.shape[0]
    for name, vector in (("bias", bias), ("post_norm_weight", post_norm_weight)):
        if vector is not None:
            checks.check_vector(OP, name, vector, columns, "D", first, "chunks[0]")
    checks.check_inference(OP, (weight, bias, post_norm_weight))
    return columns


def plan(chunks: Sequence[Tensor] | Tensor, weight: Tensor, **arguments: object) -> Plan:
    """The plan of a call with these arguments; see `eagle_kernels.explain`."""
    eps, _ = _split_eps(arguments.get("eps", 1e-6), arguments.get("post_norm_weight"))
    sources = Sources.of_call(OP, chunks, arguments | {"eps": eps})
    post_norm_weight = arguments.get("post_norm_weight")
    operands = (sources.chunks, sources.num_chunks, sources.gains, sources.residuals)
    return _plan_call(sources.rows, *operands, weight, post_norm_weight)


def _plan_call(
    rows: int,
    chunks: list[Tensor],
    num_chunks: int,
    gains: list[Tensor],
    residuals: list[Tensor | None],
    weight: Tensor,
    post_norm_weight: Tensor | None,
) -> Plan:
    columns, width = weight.shape
    backend, _ = plans.choose_backend(OP, weight.device.type, num_chunks)
    if backend not in ("cuda", "triton"):
        return plan_sizes(rows, width, columns, weight.dtype, weight.device.type)
    widths = {chunk.shape[1] for chunk in chunks} if len(chunks) > 1 else {width // num_chunks}
    operands = (*chunks, *residuals, *gains, weight)
    sizes = (rows, num_chunks, max(widths), columns, weight.dtype, weight.device)
    fit = {
        "equal_widths": len(widths) == 1,
        "aligned": max(widths) % 16 == 0 and aligned(*operands),
        "has_residuals": bool(residuals),
    }
    if backend == "triton":
        return plan_triton(*sizes, **fit)
    return plan_cuda(*sizes, misfit=_cuda_misfit(widths, operands, post_norm_weight), **fit)


def _cuda_misfit(widths: set[int], operands: tuple[Tensor | None, ...], post_norm_weight: Tensor | None) -> str | None:
    """Why the fused CUDA kernel cannot take operands that lie like these; None where it can."""
    if post_norm_weight is not None:
        return "a post norm needs all D columns of a row in one place"
    if any(H % 8 for H in widths):
        return f"H={max(H for H in widths if H % 8)} is no multiple of 8"
    if not aligned(*operands, stride_unit=operands[-1].element_size()):
        return "an address or a row stride is no multiple of 16 bytes"
    return None


# Rows that the fused CUDA kernel multiplies in one pass over the weight: csrc/cuda/launchers.h.
_CUDA_ROWS = 16


@plans.remembered
def plan_cuda(
    rows: int,
    num_chunks: int,
    H: int,
    columns: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    misfit: str | None = None,
    **fit: bool,
) -> Plan:
    """The plan where the cuda backend is usable, with the arguments of `plan_triton` beside `misfit`.

    Which of the two is faster at T <= 16 is a lead: the fused kernel is one launch and no workspace, and no GPU has
    measured it yet.
    """
    invariant = plans.SETTINGS.batch_invariant
    forced = plans.SETTINGS.backend == "cuda"
    if dtype == torch.float32:
        misfit = "tensor cores multiply 16-bit types"
    if misfit is None and rows > _CUDA_ROWS and not (forced and invariant):
        misfit = f"T={rows} > {_CUDA_ROWS}: the fused kernel would read the weight {-(-rows // _CUDA_ROWS)} times"
    if not forced and (misfit is not None or invariant) and plans.unusable_reason("triton", device.type) is None:
        plan = plan_triton(rows, num_chunks, H, columns, dtype, device, **fit)
        return plan if misfit is None else replace(plan, reason=f"cuda: {misfit}; {plan.reason}")
    if misfit is not None:
        return Plan(OP, "cuda", "norm_concat + linear", misfit)
    if invariant:
        return Plan(OP, "cuda", "fused", "EAGLE_KERNELS_BATCH_INVARIANT=1 wants one plan for all T")
    return Plan(OP, "cuda", "fused", f"T={rows} <= {_CUDA_ROWS}: one pass over the weight is the bound")


@dataclass(frozen=True)
class TritonPlan(Plan):
    """What the launcher of triton_kernels/norm_concat_linear.py runs."""

    tiles: Tiles | None  # of the split kernels; None for norm_concat and torch's product
    aligned: bool  # the split kernels may copy 16 bytes at a time


@plans.remembered
def plan_triton(
    rows: int,
    num_chunks: int,
    H: int,
    columns: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    equal_widths: bool = True,
    aligned: bool = True,
    has_residuals: bool = False,
) -> TritonPlan:
    """The plan of the triton backend as a pure function of N, K, H, D, dtype, device and the layout of the operands."""
    invariant = plans.SETTINGS.batch_invariant
    T = invariant_rows(dtype) if invariant else rows
    # A library's product is not the same for all T, even where a table has it as the fastest.
    tiles, reason = choose_tiles(
        gpu_of(device), T, num_chunks, H, columns, dtype, has_residuals=has_residuals, split_only=invariant
    )
    if invariant:
        reason = "EAGLE_KERNELS_BATCH_INVARIANT=1 wants one plan for all T"
    if not equal_widths:
        tiles, reason = None, "the chunks differ in width, and the split kernels take one width"
    elif not aligned and not invariant:
        tiles, reason = None, "an address, a row stride or H is no multiple of 16, and the split kernels copy 16 bytes"
    elif not aligned:
        tiles = replace(tiles, num_warps=8)  # an address for every element: they spill in 4 warps
    method = "norm_concat + linear" if tiles is None else f"split {tiles.BT}x{tiles.BD}x{tiles.BK}"
    return TritonPlan(OP, "triton", method, reason, tiles, aligned)


@plans.remembered
def plan_sizes(rows: int, width: int, columns: int, dtype: torch.dtype, device_type: str) -> Plan:
    """The plan as a pure function of N, K*H, D, dtype and device."""
    backend, reason = plans.choose_backend(OP, device_type)
    if backend == "reference":
        return Plan(OP, backend, "plain torch", reason)
    if backend == "cuda":  # where the caller knows K, `plan_cuda` says more
        return plan_cuda(rows, 1, width, columns, dtype, torch.device(device_type))
    if backend == "triton":
        return plan_triton(rows, 1, width, columns, dtype, torch.device(device_type))
    isa = plans.cpu_isa()
    if plans.SETTINGS.batch_invariant:
        return Plan(OP, backend, f"fused {isa}", "EAGLE_KERNELS_BATCH_INVARIANT=1 wants one plan for all T")
    limit = FUSED_ROWS[dtype][isa]
    if limit is None:
        return Plan(OP, backend, f"fused {isa}", f"torch's {dtype} product is slow on {isa}, at every T")
    if rows <= limit:
        return Plan(OP, backend, f"fused {isa}", f"T={rows} <= {limit}: one pass over the weight is the bound")
    return Plan(OP, backend, "norm_concat + linear", f"T={rows} > {limit}: oneDNN's product is faster there")


# The largest N at which the fused CPU kernel beats norm_concat + F.linear; None: at every N. Measured at K=3,
# H=D=4096, 2 threads, cold weights, oneDNN and ATen capped to the same instruction set. Without instructions for it,
# torch's 16-bit product takes 3 times as long as the fused kernel (bf16, avx512, T=256: 352 ms against 136).
FUSED_ROWS = {
    torch.bfloat16: {"amx_bf16": 512, "avx512_bf16": 32, "avx512": None, "avx2": None, "scalar": 1},
    torch.float16: {"amx_bf16": 16, "avx512_bf16": None, "avx512": None, "avx2": None, "scalar": 1},
    torch.float32: {"amx_bf16": 32, "avx512_bf16": 32, "avx512": 32, "avx2": 16, "scalar": 1},
}


def _run(
    chunks: list[Tensor],
    num_chunks: int,
    norm: str,
    gains: list[Tensor],
    eps: list[float],
    norm_offset: float,
    residuals: list[Tensor | None],
    indices: list[Tensor | None],
    sum_squares: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    post_norm_weight: Tensor | None,
    post_norm_eps: float,
    out: Tensor,
) -> None:
    check_no_overlap(OP, out, chunks, residuals)
    checks.check_no_overlap(OP, "out", out, (("weight", weight),))
    sources = (num_chunks, norm, gains, eps, norm_offset, residuals, indices, sum_squares)
    rows = out.shape[0]
    plan = _plan_call(rows, chunks, num_chunks, gains, residuals, weight, post_norm_weight)
    if plan.backend == "triton":
        from ..triton_kernels import norm_concat_linear as kernels

        projection = (weight, bias, post_norm_weight, post_norm_eps)
        kernels.norm_concat_linear(chunks, *sources, *projection, out, plan)
        return
    if plan.method.startswith("fused"):
        torch.ops.eagle_kernels_C.norm_concat_linear_out(
            chunks,
            num_chunks,
            NORMS.index(norm),
            *sources[2:],
            weight,
            bias,
            post_norm_weight,
            post_norm_eps,
            out,
        )
        return
    if plan.backend in plans.COMPILED:
        normed = chunks[0].new_empty(rows, weight.shape[1])
        torch.ops.eagle_kernels.norm_concat_out(chunks, *sources, normed)
    else:
        normed = formula(chunks, *sources).to(weight.dtype)
    _project(normed, weight, bias, post_norm_weight, post_norm_eps, norm_offset, out)


@torch.no_grad()
def _project(
    normed: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    post_norm_weight: Tensor | None,
    eps: float,
    norm_offset: float,
    out: Tensor,
) -> None:
    """The projection by torch's own product, which rounds once unless a post norm has to see the fp32 result."""
    if post_norm_weight is None and (bias is None or bias.dtype == weight.dtype):
        # The product is written where it belongs when out's rows are dense; a strided out costs one copy.
        if bias is None:
            torch.mm(normed, weight.t(), out=out) if out.is_contiguous() else out.copy_(F.linear(normed, weight))
        else:
            out.copy_(F.linear(normed, weight, bias))
        return
    out.copy_(project_formula(normed.float(), weight, bias, post_norm_weight, eps, norm_offset))


@torch.no_grad()
def project_formula(
    normed: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    post_norm_weight: Tensor | None,
    eps: float,
    norm_offset: float,
) -> Tensor:
    """post_norm(normed @ weight^T + bias) in the dtype of `normed`, unrounded."""
    projected = normed @ weight.to(normed.dtype).t()
    if bias is not None:
        projected = projected + bias.to(normed.dtype)
    if post_norm_weight is None:
        return projected
    rstd = torch.rsqrt(projected.square().mean(-1, keepdim=True) + eps)
    return projected * rstd * (post_norm_weight.to(normed.dtype) + norm_offset)


def _empty(chunks: list[Tensor], indices: list[Tensor | None], weight: Tensor) -> Tensor:
    return chunks[0].new_empty(output_rows(chunks, indices), weight.shape[0])


def _functional(chunks: list[Tensor], *arguments: object) -> Tensor:
    out = _empty(chunks, arguments[6], arguments[8])
    _run(chunks, *arguments, out)
    return out


_PROJECTION = "Tensor weight, Tensor? bias, Tensor? post_norm_weight, float post_norm_eps"
register(
    f"norm_concat_linear({ARGUMENTS}, {_PROJECTION}) -> Tensor",
    _functional,
    lambda chunks, *args: _empty(chunks, args[6], args[8]),
)
register(f"norm_concat_linear_out({ARGUMENTS}, {_PROJECTION}, Tensor(a!) out) -> ()", _run, lambda *args: None)
