"""norm_concat_linear on a QuantizedWeight: the sources as there, the codes in place of the weight.

    out[i, d] = round(post_norm(sum_c x[i, c] * (codes[d, c] * scales[d // B, c // C] * global_scale) + bias[d]))

Weight-only: x is rounded once to its 16 bits as ever, codes are widened in registers, scales enter in fp32. Where no
kernel reads codes the weight is dequantized in every call, in fp32: right everywhere, and slow.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import checks, library
from .. import plan as plans
from ..dispatch import increment_version, is_plain
from ..library import register_with_out, registered_ops
from ..plan import COMPILED, Kernel, Plan, choose
from ..quantized_weight import QuantizedWeight
from ..triton_kernels.alignment import alignment
from .call import check, triton_kernels
from .norm_concat import ARGUMENTS
from .projection import OP, Projection, check_epilogue, eps_name, expected_weight, project_formula
from .sources import Sources, formula

PRIMITIVE = "norm_concat_linear_quantized"


class QuantizedProjection(NamedTuple):
    """What follows the sources; `for_schema` has it in the order of the registered ops' schema."""

    weight: QuantizedWeight  # [D, K*H]
    bias: Tensor | None
    post_norm_weight: Tensor | None
    post_norm_eps: float

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return (*self.weight.tensors, self.bias, self.post_norm_weight)

    def for_schema(self) -> tuple:
        weight, *epilogue = self
        return (*weight.tensors, weight.format, *weight.block, *epilogue)

    def check(self, sources: Sources) -> None:
        weight, bias, post_norm_weight, post_norm_eps = self
        for name, tensor in zip(("codes", "scales", "global_scale"), weight.tensors, strict=True):
            if tensor is not None:
                checks.check_device(OP, f"weight.{name}", tensor, sources.chunks[0].device, "chunks[0]")
        D, width = weight.shape
        if width != sources.width:
            got = f"weight is {weight.format} of shape {(D, width)}"
            raise checks.error(ValueError, OP, got, expected_weight(sources))
        if tuple(weight.scales.shape) != (expected := weight.scale_shape):
            because = f"{weight.block[0]} x {weight.block[1]} of the weight have one"
            raise checks.shape_error(OP, "weight.scales", weight.scales, str(expected), because)
        check_epilogue(sources, D, bias, post_norm_weight, post_norm_eps)
        checks.check_inference(OP, self.tensors)


def project(sources: Sources, projection: QuantizedProjection, out: Tensor | None = None) -> Tensor:
    """The op for arguments that are records already."""
    if is_plain((*sources.operands, *projection.tensors, out)) and sources.chunks[0].dim() == 2:
        if out is None:
            out = sources.chunks[0].new_empty(sources.rows, projection.weight.codes.size(0))
        run(sources, projection, out)
        return out
    sources.check(OP, eps_name(projection.post_norm_weight))
    projection.check(sources)
    matrices = sources.as_matrices()
    if out is None:
        projected = registered_ops.norm_concat_linear_quantized(*matrices, *projection.for_schema())
        return projected.squeeze(0) if sources.is_one_row else projected
    sources.check_out(OP, out, projection.weight.shape[0], "D")
    rows = out.unsqueeze(0) if sources.is_one_row else out
    registered_ops.norm_concat_linear_quantized_out(*matrices, *projection.for_schema(), rows)
    return out


class NormConcatLinearQuantized(NamedTuple):
    """The arguments of one call, rows as matrices."""

    sources: Sources
    projection: QuantizedProjection
    out: Tensor
    in_dots: bool = False  # Kernel.DOTS

    def for_primitive(self) -> tuple:
        weight, *epilogue = self.projection
        choices = (self.in_dots, plans.SETTINGS.early_weight)
        return (*self.sources.for_primitive(), *weight.tensors, *weight.block, *epilogue, *choices, self.out)

    def check(self) -> None:
        sources, projection, out, _ = self
        sources.check(OP, eps_name(projection.post_norm_weight))
        projection.check(sources)
        checks.check_matrix(OP, "chunks[0]", sources.chunks[0])
        sources.check_out(OP, out, projection.weight.shape[0], "D")
        names = ("weight.codes", "weight.scales", "weight.global_scale", "bias", "post_norm_weight")
        sources.check_memory(OP, out, *zip(names, projection.tensors, strict=True))

    def reference(self) -> None:
        sources, (weight, bias, post_norm_weight, post_norm_eps), out, _ = self
        dense = Projection(weight.dequantize(torch.float32), bias, post_norm_weight, post_norm_eps)
        normed = formula(sources).to(out.dtype).float()
        out.copy_(project_formula(normed, dense, sources.norm_offset))


def plan_of(sources: Sources, weight: QuantizedWeight, rows: int, has_post_norm: bool) -> Plan:
    aligned = alignment(*sources.chunks, *sources.residuals, *sources.gains, weight.codes)
    return _choose(sources, weight, rows, has_post_norm, sources.widths, aligned)


def _likely_plan(sources: Sources, weight: QuantizedWeight, rows: int, has_post_norm: bool) -> Plan:
    """As that of norm_concat_linear."""
    return _choose(sources, weight, rows, has_post_norm, (sources.first_width,), (True, True))


def _choose(
    sources: Sources,
    weight: QuantizedWeight,
    rows: int,
    has_post_norm: bool,
    widths: tuple[int, ...],
    aligned: tuple[bool, bool],
) -> Plan:
    device, dtype = sources.chunks[0].device, sources.chunks[0].dtype
    sizes = (sources.num_chunks, rows, dtype, weight.codes.shape[0], widths, bool(sources.residuals), has_post_norm)
    scales_sums = weight.scaled_where(dtype) == "blocks"
    return choose(PRIMITIVE, device, *sizes, *aligned, weight.block[1], scales_sums, weight.code_bits)


def can_read_codes(device: torch.device) -> bool:
    """Whether a kernel of this device does, where the sizes suit it."""
    if device.type == "cpu":
        return choose(PRIMITIVE, device, 1).kernel is Kernel.FUSED
    return device.type == "cuda" and plans.unsupported_reason("triton", device) is None


def run(sources: Sources, projection: QuantizedProjection, out: Tensor) -> None:
    weight, has_post_norm = projection.weight, projection.post_norm_weight is not None
    rows = out.size(0) if out.dim() else 0
    plan = _likely_plan(sources, weight, rows, has_post_norm)
    record = NormConcatLinearQuantized(sources, projection, out, plan.kernel is Kernel.DOTS)
    if plan.backend in COMPILED:
        try:
            library.primitives.norm_concat_linear_quantized_out(*record.for_primitive())
            return increment_version((out,))
        except RuntimeError:
            record.check()
            refused, plan = plan, plan_of(sources, weight, rows, has_post_norm)
            if plan.backend == refused.backend:
                raise  # not an argument: the device failed
    elif plan.backend == "triton":
        check(record, PRIMITIVE)
    else:
        record.check()
    # The second plan is for these very operands, and may be of another backend.
    if not (_ran_triton(record, plan) or _ran_triton(record, plan_of(sources, weight, rows, has_post_norm))):
        record.reference()
    increment_version((out,))


def _ran_triton(record: NormConcatLinearQuantized, plan: Plan) -> bool:
    sources, projection, out, _ = record
    return plan.backend == "triton" and triton_kernels(OP).run(sources, projection, out, plan)


_SOURCES = len(Sources._fields)


def _run_out(*arguments: Any) -> None:
    run(*_records(arguments), arguments[-1])


def _empty(*arguments: Any) -> Tensor:
    sources, projection = _records(arguments)
    return sources.chunks[0].new_empty(sources.rows, projection.weight.shape[0])


def _records(arguments: tuple) -> tuple[Sources, QuantizedProjection]:
    """The records of a schema's arguments, which are in its order."""
    codes, scales, global_scale, format, rows, columns, *epilogue = arguments[_SOURCES : _SOURCES + 9]
    weight = QuantizedWeight.of_tensors(codes, scales, global_scale, format, (rows, columns))
    return Sources(*arguments[:_SOURCES]), QuantizedProjection(weight, *epilogue)


_SCHEMA = (
    f"{ARGUMENTS}, Tensor codes, Tensor scales, Tensor? global_scale, str format, int block_rows, int block_columns, "
    "Tensor? bias, Tensor? post_norm_weight, float post_norm_eps"
)
register_with_out(PRIMITIVE, _SCHEMA, _run_out, _empty)
