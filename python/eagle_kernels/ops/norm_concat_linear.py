"""norm_concat_linear: gather, norm and project K sources in one pass, the input stage of a drafter.

    x[i]   = round(concat_k(value_k[i] * rstd_k[i] * (norm_offset + gain_k)))        (the terms: `ops/sources.py`)
    out[i] = round(post_norm(x[i] @ weight^T + bias))

Replaces `cat` + K norms + `cat` + `fc` of EAGLE-3 (SGLang 0.5.23 `llama_eagle3`, vLLM 0.33 `combine_hidden_states`),
and enorm + hnorm + `cat` + `eh_proj` of MTP / NextN. Sums are fp32; the bias and the post norm see them unrounded.
Triton's split kernels round (norm_offset + gain) * weight instead of x: also one rounding, in another place.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import checks, library
from .. import plan as plans
from ..dispatch import increment_version, is_plain
from ..library import register_with_out
from ..plan import COMPILED, Kernel, Plan, choose
from ..quantized_weight import QuantizedWeight
from ..triton_kernels.alignment import alignment
from . import norm_concat_linear_quantized as quantized
from .call import call_registered, check, copied, run_primitive, triton_kernels, writing
from .norm_concat import ARGUMENTS, NormConcat
from .projection import OP, Projection, eps_name, expected_weight, project_formula
from .sources import Sources, formula, is_number


def norm_concat_linear(
    chunks: Sequence[Tensor] | Tensor,
    weight: Tensor | QuantizedWeight,
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
        weight: [D, K*H], the chunks' dtype; row stride free, last stride 1. Or a QuantizedWeight of that shape: its
            codes are widened as they are multiplied and scaled in fp32, or for many rows on a GPU written as numbers of
            16 bits and scaled in fp32, without a rounded copy of the weight.
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
        RuntimeError: an input requires grad while grad mode is on, or has a tangent of forward-mode differentiation.
    """
    if type(eps) is float:
        post_norm_eps = eps
    else:
        eps, post_norm_eps = _split_eps(eps, post_norm_weight)
    sources = Sources.of(OP, chunks, norm, norm_weight, eps, norm_offset, residuals, indices, sum_squares, num_chunks)
    if isinstance(weight, QuantizedWeight):
        of_codes = tuple.__new__(quantized.QuantizedProjection, (weight, bias, post_norm_weight, post_norm_eps))
        return quantized.project(sources, of_codes, out)
    # Not Projection(...), which goes through a Python function and takes 0.2 us.
    return project(sources, tuple.__new__(Projection, (weight, bias, post_norm_weight, post_norm_eps)), out)


def project(sources: Sources, projection: Projection, out: Tensor | None = None) -> Tensor:
    """The op for arguments that are records already, as the modules of this package keep them."""
    chunks, _, _, gains, _, _, residuals, indices, sum_squares = sources
    weight, bias, post_norm_weight, _ = projection
    if (
        is_plain(chunks[0], chunks, gains, residuals, indices, sum_squares, weight, bias, post_norm_weight, out)
        and isinstance(weight, Tensor)
        and weight.dim() == chunks[0].dim() == 2
    ):
        return run(sources, projection, out)
    sources.check(OP, eps_name(projection.post_norm_weight))
    projection.check(sources)
    return call_registered(OP, sources, projection, out, (OP, weight.shape[0], "D"))


def _split_eps(eps: float | Sequence[float], post_norm_weight: Tensor | None) -> tuple[float | Sequence[float], float]:
    if isinstance(eps, float):
        return eps, eps
    if post_norm_weight is None:
        return eps, 0.0
    if is_number(eps):
        eps = checks.check_number(OP, "eps", eps, "a number or a sequence of numbers")
        return eps, eps
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


class NormConcatLinear(NamedTuple):
    """The arguments of one call, rows as matrices."""

    sources: Sources
    projection: Projection
    out: Tensor | None  # None where torch's product allocates it

    def for_primitive(self) -> tuple:
        sources, projection, out = self
        return (*sources.for_primitive(), *projection, out)

    def check(self) -> None:
        self.sources.check(OP, eps_name(self.projection.post_norm_weight))
        self.projection.check(self.sources)
        self.check_out()

    def check_out(self) -> None:
        sources, projection, out = self
        checks.check_matrix(OP, "chunks[0]", sources.chunks[0])
        if out is None:
            return
        sources.check_out(OP, out, projection.weight.shape[0], "D")
        reads = (("weight", projection.weight), ("bias", projection.bias))
        sources.check_memory(OP, out, *reads, ("post_norm_weight", projection.post_norm_weight))


def plan(chunks: Sequence[Tensor] | Tensor, weight: Tensor | QuantizedWeight, **arguments: Any) -> Plan:
    """The plan of a call with these arguments; see `eagle_kernels.explain`."""
    eps, post_norm_eps = _split_eps(arguments.get("eps", 1e-6), arguments.get("post_norm_weight"))
    sources = Sources.of_call(OP, chunks, arguments | {"eps": eps})
    sources.check(OP)
    matrices = sources.as_matrices()
    bias, post_norm_weight = arguments.get("bias"), arguments.get("post_norm_weight")
    with torch.no_grad():  # nothing runs: the weight may require grad
        if isinstance(weight, QuantizedWeight):
            quantized.QuantizedProjection(weight, bias, post_norm_weight, post_norm_eps).check(sources)
            planned = quantized.plan_of(matrices, weight, matrices.rows, post_norm_weight is not None)
            return replace(planned, op=f"{OP} x {weight.format}")
        projection = Projection(weight, bias, post_norm_weight, post_norm_eps)
        projection.check(sources)
    return _plan(matrices, projection, matrices.rows)


def _plan(sources: Sources, projection: Projection, rows: int) -> Plan:
    weight = projection.weight
    return choose(
        OP,
        sources.chunks[0].device,
        sources.num_chunks,
        rows,
        weight.dtype,
        weight.shape[0],
        sources.widths,
        bool(sources.residuals),
        projection.post_norm_weight is not None,
        *alignment(
            *(*sources.chunks, *sources.residuals, *sources.gains, weight),
            of_single_rows=plans.SETTINGS.batch_invariant,
        ),
    )


def run(sources: Sources, projection: Projection, out: Tensor | None) -> Tensor:
    """The result of the plan's kernel, in `out` where it is given, whose version is incremented for autograd."""
    chunks, num_chunks, _, _, _, _, residuals, indices, _ = sources
    weight, _, post_norm_weight, _ = projection
    first = chunks[0]
    rows, width = first.shape
    if indices:
        rows = sources.rows
    try:
        columns = weight.shape[0]  # half the time of size(0)
    except RuntimeError:  # a nested tensor, which is refused below, has no shape
        columns = weight.size(0)
    # The plan for aligned operands and chunks of one width, which takes 4 us less to find. Its kernels refuse other
    # operands, which then get a plan of their own.
    widths = (width if len(chunks) == num_chunks else width // num_chunks,)
    has_post_norm = post_norm_weight is not None
    plan = choose(OP, first.device, num_chunks, rows, weight.dtype, columns, widths, bool(residuals), has_post_norm)
    if rows == 1 and plans.SETTINGS.batch_invariant and plan.backend != "cpu":
        # One row must get the plan of several. The kernels would not refuse its stride: they take a single row
        # whatever its stride is.
        NormConcatLinear(sources, projection, out).check()
        plan = _plan(sources, projection, rows)
    if plan.backend in COMPILED:
        try:
            written = _run_compiled(plan, sources, projection, out, (rows, columns))
            if out is not None:  # autograd has saved nothing of a new tensor
                increment_version((out,))
            return written
        except RuntimeError:
            NormConcatLinear(sources, projection, out).check()
            refused, plan = plan, _plan(sources, projection, rows)
            if (plan.backend, plan.kernel) == (refused.backend, refused.kernel):
                raise  # not an argument: the device failed
    out = _run_plan(plan, sources, projection, out, (rows, columns))
    increment_version((out,))
    return out


def _run_plan(
    plan: Plan, sources: Sources, projection: Projection, out: Tensor | None, shape: tuple[int, int]
) -> Tensor:
    if plan.backend in COMPILED:
        return _run_compiled(plan, sources, projection, out, shape)
    out = sources.chunks[0].new_empty(*shape) if out is None else out
    record = tuple.__new__(NormConcatLinear, (sources, projection, out))
    if plan.backend == "triton":
        check(record, OP)
        if triton_kernels(OP).run(sources, projection, out, plan):
            return out
        return _run_plan(_plan(sources, projection, shape[0]), sources, projection, out, shape)
    record.check()
    return _project(formula(sources).to(out.dtype), projection, sources.norm_offset, out)


def _run_compiled(
    plan: Plan, sources: Sources, projection: Projection, out: Tensor | None, shape: tuple[int, int]
) -> Tensor:
    """The primitive checks the arguments. Where Python runs the two steps and torch allocates the result, overlap is
    not checked, which would take 8 us: new memory overlaps no operand."""
    primitives, weight = library.primitives, projection.weight
    in_two_steps = plan.kernel is Kernel.TWO_STEP
    if in_two_steps and plan.backend == "cpu" and (not projection.is_product or _columns_to_pad(weight)):
        return _run_two_steps(NormConcatLinear(sources, projection, out))
    out = sources.chunks[0].new_empty(*shape) if out is None else out
    arguments = sources.for_primitive()
    if in_two_steps:  # one call that ends in torch's product: three calls from Python take 8 us more
        primitives.norm_concat_linear_two_step_out(*arguments, *projection, out)
    elif plan.kernel is Kernel.SPLIT:
        primitives.norm_concat_linear_split_out(*arguments, *projection, plans.SETTINGS.early_weight, out)
    elif plan.kernel is Kernel.WGMMA:
        primitives.norm_concat_linear_wgmma_out(*arguments, *projection, out)
    elif plan.backend == "cuda":
        primitives.norm_concat_linear_fused_out(*arguments, *projection, plans.SETTINGS.early_weight, out)
    elif plan.kernel is Kernel.DOTS:
        primitives.norm_concat_linear_few_rows_out(*arguments, *projection, out)
    else:
        primitives.norm_concat_linear_out(*arguments, *projection, out)
    return out


def _run_two_steps(record: NormConcatLinear) -> Tensor:
    sources, projection, out = record
    normed = sources.chunks[0].new_empty(sources.rows, projection.weight.shape[1])
    run_primitive(NormConcat(sources, normed), "norm_concat", of=record)  # which checks the sources
    projection.check(sources)
    record.check_out()
    return _project(normed, projection, sources.norm_offset, out)


def _project(normed: Tensor, projection: Projection, norm_offset: float, out: Tensor | None) -> Tensor:
    """The projection by torch's own product, which rounds once unless a post norm has to see the fp32 result."""
    if torch.is_autocast_enabled(normed.device.type):  # which would round fp32 operands to 16 bits
        with torch.autocast(normed.device.type, enabled=False):
            return _project(normed, projection, norm_offset, out)
    weight, bias, post_norm_weight, _ = projection
    if post_norm_weight is not None or (bias is not None and bias.dtype != weight.dtype):
        projected = project_formula(normed.float(), projection, norm_offset)
        return projected.to(weight.dtype) if out is None else copied(projected, out)
    if normed.is_cpu:
        normed, weight = in_whole_tiles(normed), in_whole_tiles(weight)
    if out is not None and bias is None and out.is_contiguous():
        with writing(out):
            return torch.mm(normed, weight.t(), out=out)
    projected = F.linear(normed, weight, bias)  # a strided out costs one copy
    return projected if out is None else copied(projected, out)


# Columns that oneDNN's AMX product reads at once. Where a row ends inside a tile, it also reads the next row's first
# values and multiplies them by zero, which gives NaN where they are NaN or infinite.
_ONEDNN_TILE = 32


def in_whole_tiles(rows: Tensor) -> Tensor:
    """16-bit operands of oneDNN's product, each row padded with zeros; a copy only at widths that no model has."""
    columns = _columns_to_pad(rows)
    return F.pad(rows, (0, columns)) if columns else rows


def _columns_to_pad(rows: Tensor) -> int:
    return -rows.size(-1) % _ONEDNN_TILE if rows.dtype.itemsize == 2 else 0


_SOURCES, _PROJECTION = len(Sources._fields), len(Projection._fields)


def _run_out(*arguments: Any) -> None:
    run(*_records(arguments), arguments[-1])


def _empty(*arguments: Any) -> Tensor:
    sources, projection = _records(arguments)
    return projection.weight.new_empty(sources.rows, projection.weight.shape[0])


def _records(arguments: tuple) -> tuple[Sources, Projection]:
    """The records of arguments in the schema's order."""
    sources = Sources.of_schema(OP, arguments)
    projection = Projection(*arguments[_SOURCES : _SOURCES + _PROJECTION])
    if projection.weight.dim() != 2:
        raise checks.shape_error(OP, "weight", projection.weight, expected_weight(sources))
    return sources, projection


_SCHEMA = f"{ARGUMENTS}, Tensor weight, Tensor? bias, Tensor? post_norm_weight, float post_norm_eps"
register_with_out("norm_concat_linear", _SCHEMA, _run_out, _empty)
