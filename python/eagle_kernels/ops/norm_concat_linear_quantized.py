"""norm_concat_linear with a QuantizedWeight: the same sources, and codes in place of the weight.

    out[i, d] = round(post_norm(sum_c x[i, c] * (codes[d, c] * scales[d // B, c // C] * global_scale) + bias[d]))

Weight-only: x is rounded once to its 16 bits as for any weight, codes are widened in registers, scales enter in fp32.
For many rows on a GPU (`plan._max_rows_of_codes`), codes become 16-bit numbers (triton_kernels/dequantize.py), which
torch multiplies.
Where no kernel reads the codes, every call dequantizes the weight to fp32: correct everywhere, but slow.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import checks, library
from .. import plan as plans
from ..dispatch import increment_version, is_plain
from ..library import register_with_out
from ..plan import COMPILED, Kernel, Plan, choose
from ..quantized_weight import DTYPES, E8M0, WEIGHT_FORMATS, QuantizedWeight
from ..triton_kernels.alignment import alignment, row_stride
from .call import call_registered, check, copied, triton_kernels
from .norm_concat import ARGUMENTS
from .projection import OP, Projection, check_epilogue, eps_name, expected_weight, project_formula
from .sources import Sources, formula

PRIMITIVE = "norm_concat_linear_quantized"
# The primitive's argument `kernel` for kernels other than its default: csrc/norm_concat_linear.h, ProductKernel.
_FEW_ROWS, _WGMMA = 1, 2
_KERNELS = {("cpu", Kernel.DOTS): _FEW_ROWS, ("cuda", Kernel.FUSED): _FEW_ROWS, ("cuda", Kernel.WGMMA): _WGMMA}


class QuantizedProjection(NamedTuple):
    """What follows the sources; `for_schema` gives it in the order of the registered ops' schema."""

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
        weight.check(OP)
        for name, tensor in zip(("codes", "scales", "global_scale"), weight.tensors, strict=True):
            if tensor is not None:
                checks.check_device(OP, f"weight.{name}", tensor, sources.chunks[0].device, "chunks[0]")
        D, width = weight.shape
        if width != sources.width:
            got = f"weight is {weight.format} of shape {(D, width)}"
            raise checks.error(ValueError, OP, got, expected_weight(sources))
        check_epilogue(sources, D, bias, post_norm_weight, post_norm_eps)
        checks.check_inference(OP, self.tensors)


def project(sources: Sources, projection: QuantizedProjection, out: Tensor | None = None) -> Tensor:
    """The op for arguments that are records already."""
    chunks, _, _, gains, _, _, residuals, indices, sum_squares = sources
    weight, bias, post_norm_weight, _ = projection
    of_weight = weight.codes, weight.scales, weight.global_scale, bias, post_norm_weight
    first = chunks[0]
    if is_plain(first, chunks, gains, residuals, indices, sum_squares, *of_weight, out) and first.dim() == 2:
        return run(sources, projection, out)
    sources.check(OP, eps_name(projection.post_norm_weight))
    projection.check(sources)
    return call_registered(PRIMITIVE, sources, projection.for_schema(), out, (OP, weight.shape[0], "D"))


class NormConcatLinearQuantized(NamedTuple):
    """The arguments of one call, rows as matrices."""

    sources: Sources
    projection: QuantizedProjection
    out: Tensor

    def for_primitive(self) -> tuple:
        return _for_primitive(*self, kernel=0)

    def check(self) -> None:
        sources, projection, out = self
        sources.check(OP, eps_name(projection.post_norm_weight))
        projection.check(sources)
        checks.check_matrix(OP, "chunks[0]", sources.chunks[0])
        sources.check_out(OP, out, projection.weight.shape[0], "D")
        names = ("weight.codes", "weight.scales", "weight.global_scale", "bias", "post_norm_weight")
        sources.check_memory(OP, out, *zip(names, projection.tensors, strict=True))

    @torch.no_grad()
    def reference(self) -> None:
        sources, (weight, bias, post_norm_weight, post_norm_eps), out = self
        if torch.is_autocast_enabled(out.device.type):  # which would round fp32 operands to 16 bits
            with torch.autocast(out.device.type, enabled=False):
                return self.reference()
        dense = Projection(weight.dequantize(torch.float32), bias, post_norm_weight, post_norm_eps)
        normed = formula(sources).to(out.dtype).float()
        copied(project_formula(normed, dense, sources.norm_offset), out)


def _for_primitive(sources: Sources, projection: QuantizedProjection, out: Tensor, kernel: int) -> tuple:
    """The primitive's arguments, without making the record, which takes 0.3 us."""
    weight, bias, post_norm_weight, post_norm_eps = projection
    codes = weight.codes, weight.scales, weight.global_scale, *weight.block
    epilogue = bias, post_norm_weight, post_norm_eps, kernel, plans.SETTINGS.early_weight, out
    return sources.for_primitive() + codes + epilogue


def plan_of(sources: Sources, weight: QuantizedWeight, rows: int, has_post_norm: bool) -> Plan:
    operands = *sources.chunks, *sources.residuals, *sources.gains, weight.codes
    aligned = *alignment(*operands, of_single_rows=plans.SETTINGS.batch_invariant), _in_fours(weight.scales)
    return _choose(sources, weight, weight.codes.shape, rows, has_post_norm, sources.widths, *aligned)


def _in_fours(scales: Tensor) -> bool:
    """Whether four scales of a byte can be copied together."""
    return (scales.data_ptr() | row_stride(scales) * scales.element_size()) % 4 == 0


# By format the bits and dtypes of codes, and the dtypes of scales: weight.code_bits takes 0.4 us.
_parts: dict[str, tuple[int, tuple[torch.dtype, ...], tuple[torch.dtype, ...]]] = {}


def _choose(
    sources: Sources,
    weight: QuantizedWeight,
    of_codes: tuple[int, ...],
    rows: int,
    has_post_norm: bool,
    widths: tuple[int, ...],
    *aligned: bool,
) -> Plan:
    """`of_codes`: the shape of the codes. `aligned`: the result of `alignment` and of `_in_fours`; all is aligned where
    they are left out."""
    chunks, num_chunks, _, _, _, _, residuals, _, _ = sources
    device, dtype, (columns, code_bytes) = chunks[0].device, chunks[0].dtype, of_codes
    (block_rows, block_columns), format, scales = weight.block, weight.format, weight.scales
    parts = _parts.get(format) or _parts.setdefault(format, (weight.code_bits, *DTYPES[format]))
    code_bits, codes_dtypes, scales_dtypes = parts
    # A kernel goes by the dtypes alone: it reads e4m3 codes as int8 where a buffer of the layer was replaced by a view.
    fits = weight.codes.dtype in codes_dtypes and scales is not None and scales.dtype in scales_dtypes
    if not fits or (format == "nvfp4" and weight.global_scale is None):
        weight.check(OP)
    # Most weights have one scale per row: this spares them `scaled_where`, which takes 0.5 us.
    in_blocks = block_columns * code_bits < code_bytes * 8
    scales_sums = in_blocks and weight.scaled_where(dtype) == "blocks"
    sizes = (num_chunks, rows, dtype, columns, widths, bool(residuals), has_post_norm)
    scaling = block_rows, block_columns, in_blocks, scales_sums
    bytes_aligned, elements_aligned, scales_aligned = aligned or (True, True, True)
    of_codes = code_bits, format == "int8_row", scales.dtype == E8M0, scales_aligned
    return choose(PRIMITIVE, device, *sizes, bytes_aligned, elements_aligned, *scaling, *of_codes)


def can_read_codes(device: torch.device, code_bits: int) -> bool:
    """Whether this device has a kernel that reads such codes, where the sizes suit it. CUDA's read 4 bits for rows of
    bf16 alone, and not for all widths of chunks, which a layer that loads a weight does not know."""
    if device.type == "cpu":
        return choose(PRIMITIVE, device, 1).is_one_pass
    backend, _ = plans.choose_backend(PRIMITIVE, device)
    if backend == "reference" or code_bits == 12:
        return False
    return (backend == "cuda" and code_bits == 8) or plans.unsupported_reason("triton", device) is None


def run(sources: Sources, projection: QuantizedProjection, out: Tensor | None) -> Tensor:
    """The result of the plan's kernel, in `out` where it is given, whose version is incremented for autograd."""
    chunks, num_chunks, _, _, _, _, _, indices, _ = sources
    weight, _, post_norm_weight, _ = projection
    has_post_norm = post_norm_weight is not None
    rows, width = chunks[0].shape
    if indices:
        rows = sources.rows
    # The plan for aligned operands and chunks of one width first, as in norm_concat_linear.
    widths = (width if len(chunks) == num_chunks else width // num_chunks,)
    try:
        columns, _ = of_codes = weight.codes.shape
    except (AttributeError, ValueError):  # a buffer of the layer that is None or no matrix
        weight.check(OP)
        raise
    plan = _choose(sources, weight, of_codes, rows, has_post_norm, widths)
    is_new = out is None
    out = chunks[0].new_empty(rows, columns) if out is None else out
    if plan.backend != "cpu":
        # CUDA's kernels take a single row whatever its stride is and, with block scales, a last chunk of any width. So
        # they could run where `explain`, or the plan of the same call with more rows, says another kernel.
        is_unlike = len(chunks) > 1 and chunks[-1].shape[-1:] != (width,)
        if is_unlike or (rows == 1 and plans.SETTINGS.batch_invariant):
            NormConcatLinearQuantized(sources, projection, out).check()
            plan = plan_of(sources, weight, rows, has_post_norm)
    if not _run_plan(plan, sources, projection, out):
        # This plan is for exactly these operands, and may be of another backend.
        plan = plan_of(sources, weight, rows, has_post_norm)
        if not _run_plan(plan, sources, projection, out):
            NormConcatLinearQuantized(sources, projection, out).reference()
    if not is_new:  # autograd has saved nothing of a new tensor
        increment_version((out,))
    return out


def _run_plan(plan: Plan, sources: Sources, projection: QuantizedProjection, out: Tensor) -> bool:
    """Whether the plan's kernel has written `out`: it may not take operands that are not what the plan was made for."""
    if plan.backend in COMPILED:
        kernel = _KERNELS.get((plan.backend, plan.kernel), 0)
        try:
            library.primitives.norm_concat_linear_quantized_out(*_for_primitive(sources, projection, out, kernel))
            return True
        except RuntimeError:
            NormConcatLinearQuantized(sources, projection, out).check()
            has_post_norm = projection.post_norm_weight is not None
            exact = plan_of(sources, projection.weight, sources.rows, has_post_norm)
            if (exact.backend, exact.kernel) == (plan.backend, plan.kernel):
                raise  # not an argument: the device failed
            return False
    record = NormConcatLinearQuantized(sources, projection, out)
    if plan.backend == "triton":
        check(record, PRIMITIVE)
        return triton_kernels(OP).run(sources, projection, out, plan)
    record.check()
    record.reference()
    return True


_SOURCES = len(Sources._fields)


def _run_out(*arguments: Any) -> None:
    run(*_records(arguments), arguments[-1])


def _empty(*arguments: Any) -> Tensor:
    sources, projection = _records(arguments)
    return sources.chunks[0].new_empty(sources.rows, projection.weight.shape[0])


def _records(arguments: tuple) -> tuple[Sources, QuantizedProjection]:
    """The records of arguments in the schema's order."""
    sources = Sources.of_schema(OP, arguments)
    codes, scales, global_scale, format, rows, columns, *epilogue = arguments[_SOURCES : _SOURCES + 9]
    if format not in WEIGHT_FORMATS:
        raise checks.error(ValueError, OP, f"format is {format!r}", f"one of {list(WEIGHT_FORMATS)}")
    for name, number in (("block_rows", rows), ("block_columns", columns)):
        checks.check_int(OP, name, number, at_least=1)
    for name, tensor in (("codes", codes), ("scales", scales)):
        if tensor.dim() != 2:
            raise checks.shape_error(OP, f"weight.{name}", tensor, "two dimensions")
    weight = QuantizedWeight.of_tensors(codes, scales, global_scale, format, (rows, columns))
    return sources, QuantizedProjection(weight, *epilogue)


_SCHEMA = (
    f"{ARGUMENTS}, Tensor codes, Tensor scales, Tensor? global_scale, str format, int block_rows, int block_columns, "
    "Tensor? bias, Tensor? post_norm_weight, float post_norm_eps"
)
register_with_out(PRIMITIVE, _SCHEMA, _run_out, _empty)
