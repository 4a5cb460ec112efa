"""norm_concat: gather K sources, add residuals, norm each chunk (or the whole concat), write them side by side.

    out[i] = round(concat_k(value_k[i] * rstd_k[i] * (norm_offset + gain_k)))        (the terms: `ops/sources.py`)

One kernel for what engines run as row selects, adds, K RMSNorms and a `cat` (SGLang 0.5.23 `llama_eagle3`, vLLM 0.33
`combine_hidden_states`), where the projection that follows is quantised, sharded by the engine, or compute-bound.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import checks
from ..direct import is_direct
from ..library import register
from ..plan import COMPILED, Plan, simple_plan
from .sources import (
    NORMS,
    Sources,
    check_no_overlap,
    formula,
    output_rows,
    plain_arguments,
    tensors_of,
    total_width,
)

OP = "norm_concat"


def norm_concat(
    chunks: Sequence[Tensor] | Tensor,
    *,
    norm: str = "chunk",
    norm_weight: Sequence[Tensor] | Tensor | None = None,
    eps: float | Sequence[float] = 1e-6,
    norm_offset: float = 0.0,
    residuals: Sequence[Tensor | None] | Tensor | None = None,
    indices: Sequence[Tensor | None] | Tensor | None = None,
    sum_squares: Tensor | None = None,
    num_chunks: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """out[i] = round(concat_k(value_k[i] * rstd_k[i] * (norm_offset + gain_k))), fp32 until the one rounding.

    Args:
        chunks: K tensors [T_k, H_k] (row stride free, last stride 1), or one packed [T, K*H]; 1-D rows are legal.
            bf16, fp16 or fp32, all alike.
        norm: "chunk" (an rstd per chunk: `fc_norm`, enorm / hnorm), "concat" (one over K*H: `norm_before_fc`), "none".
        norm_weight: [K, H] or K of [H_k] for "chunk", [K*H] for "concat", None for unit gain (norm_offset is then
            unused); the chunks' dtype or fp32.
        eps: one float, or K of them for "chunk".
        norm_offset: 1.0 where checkpoints store gain - 1 (Gemma, Step-3.5, Qwen3-Next); added in fp32.
        residuals: per chunk a tensor of its shape, or None; value = round_to_dtype(chunk + residual).
        indices: int32 / int64 [N], one for all chunks or one per chunk (None = row i). Out of range gives a zero row.
        sum_squares: fp32 [T, K] from `capture_hidden`: the row sums of squares of the values; x is then read once.
        num_chunks: K of a packed `chunks` where norm_weight does not say it.
        out: [N, K*H], row stride free; allocated where None. May not overlap an input.

    Returns:
        [N, K*H] (1-D for 1-D rows).

    Raises:
        TypeError, ValueError: an argument that does not fit; nothing is written.
        RuntimeError: an input requires grad while grad mode is on.
    """
    try:
        if out is not None:
            plain = plain_arguments(
                OP, chunks, norm, norm_weight, eps, norm_offset, residuals, indices, sum_squares, num_chunks
            )
            if is_direct(OP, out, *tensors_of(plain)):
                torch.ops.eagle_kernels_C.norm_concat_out(*plain, out)
                return out
    except Exception:  # whatever it is: the checks below word it, or the registered op raises it again
        pass
    sources = Sources.build(
        OP, chunks, norm, norm_weight, eps, norm_offset, residuals, indices, sum_squares, num_chunks
    )
    if out is None:
        normed = torch.ops.eagle_kernels.norm_concat(*sources.arguments)
        return normed.squeeze(0) if sources.one_row else normed
    rows = check_out(OP, out, sources, sources.width, "K*H")
    torch.ops.eagle_kernels.norm_concat_out(*sources.arguments, rows)
    return out


def check_out(op: str, out: Tensor, sources: Sources, columns: int, meaning: str) -> Tensor:
    """Check the caller's `out` against [N, columns]; its 2-D view."""
    checks.check_operand(op, "out", out, sources.chunks[0], "chunks[0]")
    checks.check_inference(op, (out,))
    expected = (columns,) if sources.one_row else (sources.rows, columns)
    if tuple(out.shape) != expected:
        raise checks.shape_error(op, "out", out, f"{meaning if sources.one_row else f'(N, {meaning})'} = {expected}")
    return out.unsqueeze(0) if sources.one_row else out


def plan(chunks: Sequence[Tensor] | Tensor, **arguments: object) -> Plan:
    sources = Sources.of_call(OP, chunks, arguments)
    return simple_plan(OP, sources.chunks[0].device, sources.num_chunks)


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
    out: Tensor,
) -> None:
    check_no_overlap(OP, out, chunks, residuals)
    arguments = (gains, eps, norm_offset, residuals, indices, sum_squares)
    backend = simple_plan(OP, out.device, num_chunks).backend
    if backend in COMPILED:
        torch.ops.eagle_kernels_C.norm_concat_out(chunks, num_chunks, NORMS.index(norm), *arguments, out)
    elif backend == "triton":
        from ..triton_kernels.norm_concat import norm_concat as kernel

        kernel(chunks, num_chunks, norm, *arguments, out)
    else:
        out.copy_(formula(chunks, num_chunks, norm, *arguments))


def _empty(chunks: list[Tensor], indices: list[Tensor | None]) -> Tensor:
    return chunks[0].new_empty(output_rows(chunks, indices), total_width(chunks))


def _functional(chunks: list[Tensor], *arguments: object) -> Tensor:
    out = _empty(chunks, arguments[6])
    _run(chunks, *arguments, out)
    return out


ARGUMENTS = (
    "Tensor[] chunks, int num_chunks, str norm, Tensor[] gains, float[] eps, float norm_offset, "
    "Tensor?[] residuals, Tensor?[] indices, Tensor? sum_squares"
)
register(f"norm_concat({ARGUMENTS}) -> Tensor", _functional, lambda chunks, *args: _empty(chunks, args[6]))
register(f"norm_concat_out({ARGUMENTS}, Tensor(a!) out) -> ()", _run, lambda *args: None)
