"""norm_concat: gather K sources, add residuals, norm each chunk (or the whole concat), write them side by side.

    out[i] = round(concat_k(value_k[i] * rstd_k[i] * (norm_offset + gain_k)))        (the terms: `ops/sources.py`)

One kernel for what engines run as row selects, adds, K RMSNorms and a `cat` (SGLang 0.5.23 `llama_eagle3`, vLLM 0.33
`combine_hidden_states`). It is for projections that are quantized, sharded by the engine, or compute-bound.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..dispatch import is_plain
from ..library import register_with_out
from ..plan import Plan, choose
from .call import call_registered, run
from .sources import Sources, formula

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
    """out[i] = round(concat_k(value_k[i] * rstd_k[i] * (norm_offset + gain_k))), fp32 until the one rounding, where
    rstd_k[i] = rsqrt(mean(value_k[i]^2) + eps_k), of the whole concat for norm="concat", 1 for "none".

    Args:
        chunks: K tensors [T_k, H_k] (row stride free, last stride 1), or one packed [T, K*H]; 1-D rows are legal.
            bf16, fp16 or fp32, all alike.
        norm: "chunk" (an rstd per chunk: `fc_norm`, enorm / hnorm), "concat" (one over K*H: `norm_before_fc`), "none".
        norm_weight: [K, H] or K of [H_k] for "chunk", [K*H] for "concat", None for unit gain (norm_offset is then
            unused); the chunks' dtype or fp32.
        eps: one float, or K of them for "chunk"; a row of zeros stays zero, at eps = 0 too.
        norm_offset: 1.0 where checkpoints store gain - 1 (Gemma, Step-3.5, Qwen3-Next); added in fp32.
        residuals: per chunk a tensor of its shape, or None; value = round_to_dtype(chunk + residual).
        indices: int32 / int64 [N], one for all chunks or one per chunk (None = row i). Out of range gives a zero row.
        sum_squares: fp32 [T, K] from `capture_hidden`: the row sums of squares of the values; x is then read once.
        num_chunks: K of a packed `chunks`, where norm_weight does not give it.
        out: [N, K*H], row stride free; allocated where None. May not overlap an input.

    Returns:
        [N, K*H] (1-D for 1-D rows).

    Raises:
        TypeError, ValueError: an argument that does not fit; nothing is written.
        RuntimeError: an input requires grad while grad mode is on, or has a tangent of forward-mode differentiation.
    """
    arguments = (chunks, norm, norm_weight, eps, norm_offset, residuals, indices, sum_squares, num_chunks)
    return concatenate(Sources.of(OP, *arguments), out)


def concatenate(sources: Sources, out: Tensor | None = None) -> Tensor:
    """The op for arguments that are a record already."""
    if is_plain(sources.chunks[0], *sources.operands, out) and sources.chunks[0].dim() == 2:
        if out is None:
            try:
                out = sources.chunks[0].new_empty(sources.rows, sources.width)
            except RuntimeError:  # a nested tensor has no width
                sources.check(OP)
                raise
        run(NormConcat(sources, out), _plan(sources), (out,))
        return out
    sources.check(OP)
    return call_registered(OP, sources, (), out, (OP, sources.width, "K*H"))


class NormConcat(NamedTuple):
    """The arguments of one call, rows as matrices."""

    sources: Sources
    out: Tensor

    def for_primitive(self) -> tuple:
        return (*self.sources.for_primitive(), self.out)

    def check(self) -> None:
        self.sources.check(OP)
        self.sources.check_out(OP, self.out, self.sources.width, "K*H")
        self.sources.check_memory(OP, self.out)

    @torch.no_grad()
    def reference(self) -> None:
        self.out.copy_(formula(self.sources))


def plan(chunks: Sequence[Tensor] | Tensor, **arguments: Any) -> Plan:
    """The plan of a call with these arguments; see `eagle_kernels.explain`."""
    sources = Sources.of_call(OP, chunks, arguments)
    sources.check(OP)
    return _plan(sources)


def _plan(sources: Sources) -> Plan:
    return choose(OP, sources.chunks[0].device, sources.num_chunks)


def _run_out(*arguments: Any) -> None:
    sources, out = Sources.of_schema(OP, arguments), arguments[-1]
    run(NormConcat(sources, out), _plan(sources), (out,))


def _empty(*arguments: Any) -> Tensor:
    sources = Sources.of_schema(OP, arguments)
    return sources.chunks[0].new_empty(sources.rows, sources.width)


ARGUMENTS = (
    "Tensor[] chunks, int num_chunks, str norm, Tensor[] gains, float[] eps, float norm_offset, "
    "Tensor?[] residuals, Tensor?[] indices, Tensor? sum_squares"
)
register_with_out("norm_concat", ARGUMENTS, _run_out, _empty)
