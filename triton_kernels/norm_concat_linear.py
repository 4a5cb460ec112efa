"""norm_concat_linear in Triton: two launches that stream the weight once, or norm_concat and a library product, which
for codes is of the numbers that dequantize.py writes.

    partial[k, s, n] = value_k[n][columns of split s] @ (gain_k * weight_k)[:, the same columns]^T
    out[n]           = round(post_norm(sum_k rstd_k[n] * sum_s partial[k, s, n] + bias))         s and k ascending

The raw value enters the tensor core and 1/rms multiplies the fp32 sum: no statistic is needed before the weight starts
to stream, and no program sees more than one source. The gain is multiplied into the weight tile and rounded once, as if
it had been folded into the weight beforehand. This rounding replaces that of the normed value in the engines. Measured
at K=3, H=4096 on plain data, outliers and rows of any scale, the relative RMS error is 0.97 to 1.01 of theirs where
their norm rounds once, 0.80 to 0.82 where it rounds twice, 0.70 without a gain. Rows of values below 2^-100, which no
model has, lose precision: their products are subnormal in fp32.

The finalize kernel computes the row statistics before it waits for the partial sums, while those are in flight. The
loop of the product must not compute them: Triton 3.6 to 3.9 give a tile that feeds both wgmma and a reduction one
buffer too few, and the sums come out wrong (triton #6691).
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import dequantize, norm_concat
from .codes import e2m1_to_fp32, e4m3_to_fp32, load_block_scales, load_scales
from .dialect import dot, let_next_kernel_start, round_to, rstd_of, to_fp32, wait_for_previous_kernel
from .launch import (
    FP32,
    I64,
    INTERPRETED,
    NONE,
    Launch,
    Launches,
    Origin,
    Product,
    Step,
    address,
    address_of,
    constant,
    floating,
    integer,
    pointer_to,
    prepared,
    row_stride_of,
)
from .rows import cdiv, next_power_of_2
from .sources import L2, Signature, describe, load_values, pick, source_row
from .workspace import matrix_in, workspace

OP = "norm_concat_linear"

# fp16 loses precision below 6e-5, where gain * weight can land. A factor of 2^6 moves the range of full precision to
# [1e-6, 1023], and the finalize kernel divides by it exactly.
_GAIN_SCALE = {torch.bfloat16: 1.0, torch.float16: 64.0, torch.float32: 1.0}

# More rows run in several rounds, which bounds the workspace: 100 MB of normed rows and 67 MB for each product in fp32,
# or 8 MB of partial sums per split and source, at K*H = 12288 and D = 4096; codes that are dequantized once take up to
# 134 MB more (`dequantize.py`). So many rows get a split plan under EAGLE_KERNELS_BATCH_INVARIANT=1, with codes that
# are not dequantized once, or from a tuned table.
_LIBRARY_ROWS = 4096
_SPLIT_ROWS = 512


@triton.jit
def _pick_residual(residual_ptrs, residual_row_strides, x_ptr, source, N):
    """(residual_ptrs[source], how many output rows it is added to: N, or 0 where this source has no residual)."""
    picked = x_ptr
    rows = N * 0
    for k in tl.static_range(len(residual_row_strides)):
        if residual_ptrs[k] is not None:
            mine = (source == k) | (len(residual_row_strides) == 1)
            picked = tl.where(mine, residual_ptrs[k], picked)
            rows = tl.where(mine, N, rows)
    return picked, rows


@triton.jit
def _source_rows(index_ptrs, row_counts, source, n, N):
    """`source_row` for a block of output rows; rows from N on are out of range."""
    rows = n
    for k in tl.static_range(len(row_counts)):
        if index_ptrs[k] is not None:
            index = tl.load(index_ptrs[k] + n, mask=n < N, other=-1).to(tl.int64)
            rows = tl.where((source == k) | (len(row_counts) == 1), index, rows)
    in_range = (n < N) & (rows >= 0) & (rows < pick(row_counts, source))
    return tl.where(in_range, rows, 0), in_range


@triton.jit
def _norm_concat_linear_partial(
    x_ptrs,
    x_row_strides,
    row_counts,
    residual_ptrs,
    residual_row_strides,
    index_ptrs,
    gain_ptrs,
    norm_offset,
    w_ptr,
    w_row_stride,
    scale_ptr,
    scale_row_stride,
    global_scale_ptr,
    partial_ptr,
    partial_row_stride,
    N,
    D,
    H,
    splits,
    split_h,
    CODES: tl.constexpr,
    SCALES: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    GAIN_SCALE: tl.constexpr,
    WHOLE: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    BK: tl.constexpr,
    SWAP: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BT rows x BD columns of one split of one source. Grid (D / BD, K * splits, N / BT)."""
    part = tl.program_id(1)
    source = part // splits
    h = (part % splits) * split_h + tl.arange(0, BK)
    n = tl.program_id(2).to(tl.int64) * BT + tl.arange(0, BT)
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    # Columns beyond D repeat column 0, so the loads of the weight need no mask. The stores are masked at a row stride
    # that the compiler knows to be a multiple of 16, so that they are 16 bytes wide.
    w_rows = tl.where(d < D, d, 0).to(tl.int64)
    if CODES == "e2m1":  # two columns a byte
        first_byte = (source * H + (part % splits) * split_h) // 2 + tl.arange(0, BK // 2)
        w_tile = w_ptr + w_rows[:, None] * w_row_stride + first_byte[None, :]  # [BD, BK / 2]
    else:
        w_tile = w_ptr + w_rows[:, None] * w_row_stride + (source * H + h)[None, :]  # [BD, BK]
    x_column = source * H if len(x_ptrs) == 1 else 0  # of a packed row

    wait_for_previous_kernel(PDL)
    # Here, not at the end, so that the finalize kernel computes its statistics during this loop.
    let_next_kernel_start(PDL)

    rows, in_range = _source_rows(index_ptrs, row_counts, source, n, N)
    x_ptr = pick(x_ptrs, source)
    x_tile = x_ptr + (rows * pick(x_row_strides, source))[:, None] + (x_column + h)[None, :]  # [BT, BK]
    if CODES != "":
        scale_rows = scale_ptr + (w_rows // BLOCK_ROWS if BLOCK_ROWS else w_rows * 0) * scale_row_stride  # [BD]
        scale_column = source * H + (part % splits) * split_h
        every_row = tl.full((BD,), 1, tl.int1)  # rows beyond D repeat row 0
    if residual_row_strides is not None:
        residual_ptr, residual_rows = _pick_residual(residual_ptrs, residual_row_strides, x_ptr, source, N)
        has_residual = in_range & (n < residual_rows)
        residual_row = rows * pick(residual_row_strides, source)
        residual_tile = residual_ptr + residual_row[:, None] + (x_column + h)[None, :]  # [BT, BK]
    if gain_ptrs is not None:
        gain_tile = pick(gain_ptrs, source) + (source * H if len(gain_ptrs) == 1 else 0) + h  # [BK]
        gain = tl.load(gain_tile, mask=h < H, other=0.0)

    if global_scale_ptr is not None:
        # Scales are multiplied by it, not sums: one after the other, 1e37 and 1e-37 would overflow.
        global_scale = tl.load(global_scale_ptr)
    total = tl.zeros((BD, BT) if SWAP else (BT, BD), dtype=tl.float32)
    for start in range(0, split_h.to(tl.int32), BK):  # a 64-bit counter costs so many registers that it spills
        # WHOLE: every split consists of whole blocks. A constexpr, so that the compiler drops the masks.
        inside_h = tl.full((BK,), 1, tl.int1) if WHOLE else h + start < H
        x = tl.load(x_tile + start, mask=in_range[:, None] & inside_h[None, :], other=0.0)
        if CODES == "":
            w = tl.load(w_tile + start, mask=inside_h[None, :], other=0.0)
        else:
            if CODES == "e2m1":
                inside_bytes = first_byte + start // 2 < (source * H + H) // 2
                pairs = tl.load(w_tile + start // 2, mask=inside_bytes[None, :], other=0)
                scaled = tl.interleave(e2m1_to_fp32(pairs & 15), e2m1_to_fp32(pairs >> 4))
            elif CODES == "e4m3":
                scaled = e4m3_to_fp32(tl.load(w_tile + start, mask=inside_h[None, :], other=0))
            else:
                scaled = tl.load(w_tile + start, mask=inside_h[None, :], other=0).to(tl.float32)
            if SCALED == "codes":
                scaled *= load_block_scales(
                    scale_rows, scale_column + start, source * H + H, SCALES, BLOCK_COLUMNS, BD, BK
                )
        if residual_row_strides is not None:
            residual = tl.load(residual_tile + start, mask=has_residual[:, None] & inside_h[None, :], other=0.0)
            x = round_to(to_fp32(x) + to_fp32(residual), x_ptr.dtype.element_ty)
        if gain_ptrs is not None:
            # 2 bytes per thread cannot be copied asynchronously, so the gain is loaded by hand, one block ahead.
            scaled_gain = (norm_offset + to_fp32(gain)) * GAIN_SCALE
            gain = tl.load(gain_tile + start + BK, mask=h + start + BK < H, other=0.0)
            if CODES == "":
                w = round_to(to_fp32(w) * scaled_gain[None, :], w_ptr.dtype.element_ty)
            else:
                scaled *= scaled_gain[None, :]
        if CODES != "":
            w = round_to(scaled, x_ptr.dtype.element_ty)
        if SCALED == "blocks":
            # A split may end beyond its chunk, where there is no scale and perhaps no memory; garbage times a sum of 0
            # may be NaN. So the chunk's last scale is read there; a mask spills on gfx942 (mxfp8, fp16, 32 rows).
            column = tl.minimum(scale_column + start, source * H + H - 1)
            block_scale = load_scales(scale_rows + column // BLOCK_COLUMNS, every_row, SCALES)
            if global_scale_ptr is not None:
                block_scale *= global_scale
            if SWAP:
                total += dot(w, x.T, tl.zeros((BD, BT), dtype=tl.float32)) * block_scale[:, None]
            else:
                total += dot(x, w.T, tl.zeros((BT, BD), dtype=tl.float32)) * block_scale[None, :]
        else:
            total = dot(w, x.T, total) if SWAP else dot(x, w.T, total)
    if SCALED == "rows":
        row_scale = load_scales(scale_rows, every_row, SCALES)
        if global_scale_ptr is not None:
            row_scale *= global_scale
        total *= row_scale[:, None] if SWAP else row_scale[None, :]
    elif SCALED != "blocks" and global_scale_ptr is not None:
        total *= global_scale

    partial_row = partial_ptr + (part * N + n) * partial_row_stride
    if SWAP:
        tl.store(partial_row[None, :] + d[:, None], total, mask=(n < N)[None, :] & (d < partial_row_stride)[:, None])
    else:
        tl.store(partial_row[:, None] + d[None, :], total, mask=(n < N)[:, None] & (d < partial_row_stride)[None, :])


@triton.jit
def _row_sum_squares(
    x_ptrs, x_row_strides, residual_ptrs, residual_row_strides, WIDTHS: tl.constexpr, k, row, in_range, BH: tl.constexpr
):
    lanes = tl.zeros((BH,), dtype=tl.float32)
    for start in range(0, WIDTHS[k], BH):
        h = start + tl.arange(0, BH)
        value = load_values(x_ptrs, x_row_strides, residual_ptrs, residual_row_strides, WIDTHS, k, row, in_range, h, L2)
        lanes += value * value
    return tl.sum(lanes, axis=0)


@triton.jit
def _norm_concat_linear_finalize(
    x_ptrs,
    x_row_strides,
    row_counts,
    residual_ptrs,
    residual_row_strides,
    index_ptrs,
    sum_squares_ptr,
    sum_squares_row_stride,
    eps,
    partial_ptr,
    partial_row_stride,
    scale_ptr,
    scale_row_stride,
    global_scale_ptr,
    bias_ptr,
    post_gain_ptr,
    post_eps,
    norm_offset,
    out_ptr,
    out_row_stride,
    D,
    NORM: tl.constexpr,
    WIDTHS: tl.constexpr,
    GAIN_SCALE: tl.constexpr,
    SPLITS: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BD: tl.constexpr,
    BH: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BD columns of one row. Grid (N, D / BD); with a post norm BD covers D. The scales are those of the
    weight's rows and of all of it, where no kernel before this one has applied them."""
    n = tl.program_id(0).to(tl.int64)
    N = tl.num_programs(0)
    d = tl.program_id(1) * BD + tl.arange(0, BD)

    # The statistics come before the wait, which is for the partial sums. The kernels that wrote their inputs are done:
    # the partial kernel waited for them before it let this one start. But L1 may hold older data, so they load from L2.
    squares = ()
    in_ranges = ()
    if NORM != "none":
        for k in tl.static_range(len(WIDTHS)):
            row, in_range = source_row(index_ptrs, row_counts, k, n, L2)
            if sum_squares_ptr is not None:
                square_ptr = sum_squares_ptr + row * sum_squares_row_stride + k
                square = tl.load(square_ptr, mask=in_range, other=0.0, cache_modifier=L2)
            else:
                square = _row_sum_squares(
                    x_ptrs, x_row_strides, residual_ptrs, residual_row_strides, WIDTHS, k, row, in_range, BH
                )
            squares += (square,)  # type: ignore[assignment]  # Triton grows the tuple
            in_ranges += (in_range,)  # type: ignore[assignment]

    wait_for_previous_kernel(PDL)
    let_next_kernel_start(PDL)

    all_squares = 0.0
    projected = tl.zeros((BD,), dtype=tl.float32)
    for k in tl.static_range(len(WIDTHS)):
        source_sum = tl.zeros((BD,), dtype=tl.float32)
        for split in tl.static_range(SPLITS):
            part_row = ((k * SPLITS + split) * N + n) * partial_row_stride
            source_sum += tl.load(partial_ptr + part_row + d, mask=d < partial_row_stride, other=0.0)
        if NORM != "none":
            # A row whose index is out of range adds nothing, even where the gain is infinite.
            source_sum = tl.where(in_ranges[k], source_sum, 0.0)
        if NORM == "chunk":
            source_sum *= rstd_of(squares[k] / WIDTHS[k] + eps[k]) * (1 / GAIN_SCALE)
        elif NORM == "concat":
            all_squares += squares[k]
        projected += source_sum
    if NORM == "concat":
        projected *= rstd_of(all_squares / (len(WIDTHS) * WIDTHS[0]) + eps[0]) * (1 / GAIN_SCALE)
    if scale_ptr is not None:
        scale_row = d.to(tl.int64) // BLOCK_ROWS if BLOCK_ROWS else d * 0
        scale = load_scales(scale_ptr + scale_row * scale_row_stride, d < D, SCALES)
        if global_scale_ptr is not None:
            scale *= tl.load(global_scale_ptr)
        projected *= scale
    elif global_scale_ptr is not None:
        projected *= tl.load(global_scale_ptr)
    if bias_ptr is not None:
        projected += to_fp32(tl.load(bias_ptr + d, mask=d < D, other=0.0))
    if post_gain_ptr is not None:
        squares_of_row = tl.where(d < D, projected * projected, 0.0)
        rstd = rstd_of(tl.sum(squares_of_row, axis=0) / D + post_eps)
        post_gain = norm_offset + to_fp32(tl.load(post_gain_ptr + d, mask=d < D, other=0.0))
        projected = projected * rstd * post_gain
    tl.store(out_ptr + n * out_row_stride + d, round_to(projected, out_ptr.dtype.element_ty), mask=d < D)


# Columns of a row per step of the statistics: two 16-byte loads per thread. With four, and four more of a residual,
# sm_100 spills.
_STATISTICS_BLOCK = 2048

_ROWS = ("x_ptrs", "x_row_strides", "residual_ptrs", "residual_row_strides")
_WEIGHTS = ("gain_ptrs", "w_ptr", "w_row_stride", "H", "split_h")
_CODES = {torch.float8_e4m3fn: "e4m3", torch.int8: "int8", torch.uint8: "e2m1"}
_SCALES = {torch.float8_e4m3fn: "e4m3", torch.float8_e8m0fnu: "e8m0", torch.float32: "fp32"}
_PARTIAL = ("partial_ptr", "partial_row_stride")

# Columns per program of the finalize kernel after a library product, which has enough rows for blocks this wide.
_FINALIZE_COLUMNS = 1024


def run(sources: Any, projection: Any, out: Tensor, plan: Any) -> bool:
    """Run the records of a checked `ops.norm_concat_linear` by its plan. False, with nothing launched, where the plan
    needs aligned operands or chunks of one width and these are not."""
    N, D = out.shape
    if N == 0 or D == 0:
        return True
    rows_per_round = _LIBRARY_ROWS if plan.tiles is None else _SPLIT_ROWS
    if rows_per_round >= N:
        return _run_round(sources, projection, out, plan)
    if sources.sum_squares is not None and any(index is None for index in sources.indices):
        # Where a chunk is gathered, its column of sum_squares is too and cannot be sliced by output rows. So the other
        # chunks get an index as well, and only indices are sliced.
        in_order = torch.arange(N, device=out.device)
        sources = sources._replace(indices=[in_order if index is None else index for index in sources.indices])
    for first in range(0, N, rows_per_round):
        rows = slice(first, first + rows_per_round)
        if not _run_round(_slice_sources(sources, rows), projection, out[rows], plan):
            return False  # in the first round: what is aligned there is aligned in all of them
    return True


def _run_round(sources: Any, projection: Any, out: Tensor, plan: Any) -> bool:
    if plan.tiles is not None:
        return _split_product(sources, projection, out, plan)
    if isinstance(projection[0], Tensor):
        _library_product(sources, projection, out)
    else:
        _dequantized_product(sources, projection, out)
    return True


def _slice_sources(sources: Any, rows: slice) -> Any:
    """The sources of a round's rows. What an index gathers is kept whole, and its index is sliced."""
    indices, squares = sources.indices, sources.sum_squares

    def slice_rows(tensors: list[Tensor | None]) -> list[Tensor | None]:
        gathered = [len(indices) == 1 or (len(indices) > 1 and indices[k] is not None) for k in range(len(tensors))]
        return [t if t is None or whole else t[rows] for t, whole in zip(tensors, gathered, strict=True)]

    return sources._replace(
        chunks=slice_rows(sources.chunks),
        residuals=slice_rows(sources.residuals),
        indices=[None if index is None else index[rows] for index in indices],
        sum_squares=squares if squares is None or indices else squares[rows],
    )


class _Call(NamedTuple):
    """What the binaries of every call depend on; the functions that prepare them name the rest."""

    sources: Signature
    norm: str
    num_eps: int
    shape: tuple[int, int]  # D, K*H
    bias_dtype: torch.dtype | None
    post_gain_dtype: torch.dtype | None
    device: torch.device

    @property
    def ends_in_product(self) -> bool:
        """Whether nothing is left to do after torch's product, which adds a bias of its own dtype."""
        return self.post_gain_dtype is None and self.bias_dtype in (None, self.sources.dtype)

    @property
    def post_eps(self) -> Origin:
        """The post norm's eps, after norm_offset and the sources' eps."""
        return floating(1 + self.num_eps)


def _call_of(sources: Any, projection: Any, device: torch.device) -> tuple[_Call, tuple[Tensor | None, ...]]:
    """The call, and the operands of its sources."""
    weight, bias, post_gain, _ = projection
    signature, operands = describe(sources)
    bias_dtype, post_gain_dtype = None if bias is None else bias.dtype, None if post_gain is None else post_gain.dtype
    shape = tuple(weight.shape)
    # Not _Call(...), which goes through a Python function.
    of_call = (signature, sources.norm, len(sources.eps), shape, bias_dtype, post_gain_dtype, device)
    return tuple.__new__(_Call, of_call), operands


# A call's `integers`: N and, of a split product, the address of its partial sums and the blocks of BT rows.
_ROW_COUNT, _SUMS, _ROW_BLOCKS = map(integer, range(3))
_NORM_OFFSET = floating(0)  # the first of its `floats`, before eps and the post norm's eps


class _Split(NamedTuple):
    """What the calls of one signature share."""

    launches: Launches
    sums_per_row: int  # fp32 partial sums of an output row


@prepared
def _prepare_split(call: _Call, num_chunks: int, codes: tuple | None, tiles: Any, must_be_aligned: bool) -> _Split:
    sources, device, (D, width) = call.sources, call.device, call.shape
    H = width // num_chunks
    split_h = cdiv(cdiv(H, tiles.BK), tiles.splits) * tiles.BK
    weight = sources.num_operands
    weight_types, weight_origins, weight_constants, gain_scale = _weight_of(codes, call.shape, sources.dtype, weight)
    if not sources.gains:
        gain_scale = 1.0
    # A plan for rows of any alignment has one binary for each kernel: a single row, whose stride counts as 0, must not
    # get that of aligned rows, which adds the squares in another order.
    rows, weights = (_ROWS, _WEIGHTS) if must_be_aligned else ((), ())
    fp32, row_stride = pointer_to(torch.float32), _padded(D)
    launch = Launch(
        _norm_concat_linear_partial,
        (*sources.types, sources.gain_types, FP32, *weight_types, fp32, I64, I64, I64, I64, I64, I64),
        weight_constants
        | {
            "GAIN_SCALE": gain_scale,
            "WHOLE": split_h * tiles.splits == H,
            "BT": tiles.BT,
            "BD": tiles.BD,
            "BK": tiles.BK,
            "SWAP": tiles.swap,
        },
        device,
        aligned=_PARTIAL,
        aligned_together=(*rows, *weights),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    sizes = map(constant, (D, H, tiles.splits, split_h))
    of_sources = [*sources.origins, *sources.gain_origins, _NORM_OFFSET]
    numbers = [*of_sources, *weight_origins, _SUMS, constant(row_stride), _ROW_COUNT, *sizes]
    grid = constant(cdiv(D, tiles.BD)), constant(num_chunks * tiles.splits), _ROW_BLOCKS
    eps = [floating(1 + (k if call.num_eps > 1 else 0)) for k in range(num_chunks)]
    finalize = _finalize(
        call,
        (*sources.types, *sources.sum_squares_types, (FP32,) * num_chunks),
        [*sources.origins, *sources.sum_squares_origins, *eps],
        _SUMS,
        weight + _count_tensors(weight_types),
        tiles.finalize_columns,
        {"NORM": call.norm, "WIDTHS": (H,) * num_chunks, "GAIN_SCALE": gain_scale, "SPLITS": tiles.splits},
        aligned_together=rows,
    )
    widths = (width // sources.entries,) * sources.entries
    launches = Launches(device, [Step(launch, grid, numbers), finalize], widths, must_be_aligned)
    return _Split(launches, num_chunks * tiles.splits * row_stride)


def _split_product(sources: Any, projection: Any, out: Tensor, plan: Any) -> bool:
    """One width for all chunks; the weight is a tensor or a QuantizedWeight."""
    weight, bias, post_gain, post_eps = projection
    tiles, N = plan.tiles, out.shape[0]
    call, operands = _call_of(sources, projection, out.device)
    codes, tensors = (None, (weight,)) if isinstance(weight, Tensor) else _describe_codes(weight, out.dtype)
    launches, sums_per_row = _prepare_split(call, sources.num_chunks, codes, tiles, plan.aligned)
    sums = address(workspace(OP, N * sums_per_row, out.device))
    integers = N, sums, -(-N // tiles.BT)
    floats = sources.norm_offset, *sources.eps, post_eps
    return launches((*operands, *tensors, bias, post_gain, out), integers, floats)


def _describe_codes(weight: Any, dtype: torch.dtype) -> tuple[tuple, tuple[Tensor, ...]]:
    """The properties of a QuantizedWeight that binaries depend on, and its tensors."""
    codes, scales, global_scale = tensors = weight.tensors
    facts = codes.dtype, scales.dtype, global_scale is not None, weight.format, weight.scaled_where(dtype), weight.block
    return facts, tensors if global_scale is not None else tensors[:2]


def _weight_of(
    codes: tuple | None, shape: tuple[int, int], dtype: torch.dtype, first: int
) -> tuple[tuple[str, ...], list[Origin], dict[str, object], float]:
    """Types and origins of the partial kernel's arguments for the weight, the constants for it, and GAIN_SCALE. The
    weight's tensors are the operands from `first` on."""
    of_weight = [address_of(first), row_stride_of(first)]
    if codes is None:
        constants = {"CODES": "", "SCALES": "", "SCALED": "", "BLOCK_ROWS": 0, "BLOCK_COLUMNS": 0}
        types = pointer_to(dtype), I64, NONE, I64, NONE
        return types, [*of_weight, constant(0)], constants, _GAIN_SCALE[dtype]
    codes_dtype, scales_dtype, has_global_scale, format, scaled, (rows, columns) = codes
    constants = {
        "CODES": _CODES[codes_dtype],
        "SCALES": _SCALES[scales_dtype],
        "SCALED": scaled,
        "BLOCK_ROWS": 0 if rows >= shape[0] else rows,
        "BLOCK_COLUMNS": 0 if columns >= shape[1] else columns,
    }
    global_scale = pointer_to(torch.float32 if has_global_scale else None)
    types = pointer_to(codes_dtype), I64, pointer_to(scales_dtype), I64, global_scale
    origins = [*of_weight, address_of(first + 1), row_stride_of(first + 1)]
    if has_global_scale:
        origins.append(address_of(first + 2))
    if dtype != torch.float16:
        return types, origins, constants, _GAIN_SCALE[dtype]
    # With these factors, gains up to 390 keep codes, and e2m1 * e4m3 of nvfp4, in fp16's range.
    return types, origins, constants, 0.0625 if format == "nvfp4" else 0.25


def _count_tensors(types: tuple[str, ...]) -> int:
    return len([kind for kind in types if kind.startswith("*")])


def _padded(D: int) -> int:
    """A row stride of the partial sums with which their loads and stores are 16 bytes wide for every D."""
    return cdiv(D, 16) * 16


class _Scaling(NamedTuple):
    """Types, origins and constants of the finalize kernel's scales."""

    types: tuple[str, str, str]
    origins: list[Origin]
    constants: dict[str, object]


_UNSCALED = _Scaling((NONE, I64, NONE), [constant(0)], {"SCALES": "", "BLOCK_ROWS": 0})


def _finalize(
    call: _Call,
    source_types: tuple,
    source_origins: list[Origin],
    sums: Origin,
    bias: int,
    columns: int,
    constants: dict[str, object],
    scaling: _Scaling = _UNSCALED,
    aligned_together: tuple[str, ...] = (),
) -> Step:
    """The finalize kernel. `source_types` are the types of its first arguments, up to eps. Bias, post gain and out are
    the operands from `bias` on."""
    D, dtype, bias_dtype, post_gain_dtype = call.shape[0], call.sources.dtype, call.bias_dtype, call.post_gain_dtype
    BD = next_power_of_2(D) if post_gain_dtype is not None else min(next_power_of_2(D), columns)
    epilogue = pointer_to(bias_dtype), pointer_to(post_gain_dtype), FP32, FP32, pointer_to(dtype), I64, I64
    launch = Launch(
        _norm_concat_linear_finalize,
        (*source_types, pointer_to(torch.float32), I64, *scaling.types, *epilogue),
        constants | scaling.constants | {"BD": BD, "BH": _STATISTICS_BLOCK},
        call.device,
        aligned=_PARTIAL,
        aligned_together=aligned_together,
        num_warps=min(max(BD // 512, 4), 16),
    )
    vectors = [address_of(bias + i) for i, given in enumerate((bias_dtype, post_gain_dtype)) if given is not None]
    result = address_of(bias + 2), row_stride_of(bias + 2), constant(D)
    padded = constant(_padded(D))
    numbers = [*source_origins, sums, padded, *scaling.origins, *vectors, call.post_eps, _NORM_OFFSET, *result]
    return Step(launch, (_ROW_COUNT, constant(cdiv(D, BD)), constant(1)), numbers)


@prepared
def _prepare_library(call: _Call, widths: tuple[int, ...], is_concatenated: bool) -> Launches:
    """norm_concat, torch's product and, for a post norm or a bias of another dtype, the finalize kernel."""
    first = call.sources.num_operands
    weight, bias, _, out, normed, product = range(first, first + 6)
    x, steps = _concat(call, widths, is_concatenated, normed)
    if call.ends_in_product:
        steps.append(Product(_library_matmul, x, weight, bias if call.bias_dtype else None, out))
    else:
        steps += [Product(_library_matmul_fp32, x, weight, None, product), _finalize_product(call, product, bias)]
    return Launches(call.device, steps)


def _concat(
    call: _Call, widths: tuple[int, ...], is_concatenated: bool, normed: int
) -> tuple[int, list[Step | Product]]:
    """(the operand that is the product's x, the steps that write it): norm_concat into `normed`, unless the sources are
    concatenated already."""
    if is_concatenated:
        return 0, []
    _, width = call.shape
    return normed, [norm_concat.step_of(call.sources, call.norm, call.num_eps, widths, width, call.device, normed)]


def _finalize_product(
    call: _Call, product: int, bias: int, num_matrices: int = 1, scaling: _Scaling = _UNSCALED
) -> Step:
    """The finalize kernel after products in fp32: one, or those of `num_matrices` matrices, which it adds."""
    # With NORM "none" the kernel reads no source; the two arguments that cannot be absent get any number.
    without_sources = (*[NONE] * 7, I64, (FP32,))  # x_ptrs to sum_squares_ptr, sum_squares_row_stride, eps
    return _finalize(
        call,
        without_sources,
        [constant(0), call.post_eps],
        address_of(product),
        bias,
        _FINALIZE_COLUMNS,
        {"NORM": "none", "WIDTHS": (call.shape[1],), "GAIN_SCALE": 1.0, "SPLITS": num_matrices},
        scaling,
    )


def _library_product(sources: Any, projection: tuple, out: Tensor) -> None:
    """norm_concat into the workspace and torch's product, which writes `out` where nothing is left to do after it."""
    weight, bias, post_gain, post_eps = projection
    (N, D), (_, width), dtype, device = out.shape, weight.shape, weight.dtype, out.device
    call, operands = _call_of(sources, projection, device)
    is_concatenated = _is_concatenated(sources)
    product_row_stride = 0 if call.ends_in_product else _padded(D)
    normed_numel = _numel_of(N * width, dtype)
    normed = product = None
    if product_row_stride or not is_concatenated:
        buffer = workspace(OP, normed_numel + N * product_row_stride, device)
        normed = matrix_in(buffer, dtype, N, width, width)
        if product_row_stride:
            product = matrix_in(buffer, torch.float32, N, D, product_row_stride, normed_numel)
    launches = _prepare_library(call, norm_concat.widths_of(sources, width), is_concatenated)
    integers, floats = norm_concat.numbers_of(sources, N)
    launches((*operands, weight, bias, post_gain, out, normed, product), integers, (*floats, post_eps))


def _is_concatenated(sources: Any) -> bool:
    """Whether the rows are those of the product already, written by capture_hidden."""
    chunks, _, norm, _, _, _, residuals, indices, _ = sources
    return norm == "none" and len(chunks) == 1 and not residuals and not indices


def _numel_of(numel: int, dtype: torch.dtype) -> int:
    """What so many numbers take of the workspace, counted in fp32 numbers and rounded up to 256 bytes."""
    return cdiv(numel * dtype.itemsize, 256) * 64


@prepared
def _prepare_dequantized(
    call: _Call, widths: tuple[int, ...], is_concatenated: bool, codes: tuple, slice_rows: int
) -> Launches:
    """norm_concat; for each slice of the weight's rows its numbers, in one matrix or two, and torch's products of them;
    the finalize kernel."""
    (D, width), dtype, device = call.shape, call.sources.dtype, call.device
    weight = call.sources.num_operands
    types, origins, constants, _ = _weight_of(codes, call.shape, dtype, weight)
    bias = weight + _count_tensors(types)
    normed, sums, first = range(bias + 3, bias + 6)
    scaled = constants["SCALED"]
    num_matrices = 2 if scaled == "blocks" else 1
    x, steps = _concat(call, widths, is_concatenated, normed)
    for begin in range(0, D, slice_rows):
        rows = range(begin, min(begin + slice_rows, D))
        matrices = range(first, first + 2 * num_matrices, 2)  # each is followed by its part of the sums
        step = dequantize.step_of(types[:4], origins[:4], constants, dtype, rows, width, matrices, device)
        steps += [step, *(Product(_library_matmul_fp32, x, matrix, None, matrix + 1) for matrix in matrices)]
        first = matrices.stop
    of_rows = scaled == "rows"
    scaling = _Scaling(
        (types[2] if of_rows else NONE, I64, types[4]),
        [*(origins[2:4] if of_rows else [constant(0)]), *origins[4:]],
        {"SCALES": constants["SCALES"], "BLOCK_ROWS": constants["BLOCK_ROWS"]} if of_rows else _UNSCALED.constants,
    )
    return Launches(device, [*steps, _finalize_product(call, sums, bias, num_matrices, scaling)])


def _dequantized_product(sources: Any, projection: Any, out: Tensor) -> None:
    """As `_library_product`, with the numbers of a QuantizedWeight. The product is in fp32 even if nothing follows it:
    cuBLAS may split a product along K*H, and adds the parts of one in 16 bits in 16 bits."""
    weight, bias, post_gain, post_eps = projection
    shape = D, width = weight.shape
    N, dtype, device = out.shape[0], out.dtype, out.device
    codes, tensors = _describe_codes(weight, dtype)
    num_matrices = 2 if weight.scaled_where(dtype) == "blocks" else 1
    slice_rows = dequantize.rows_of_slice(shape, num_matrices)
    row_stride, matrix_numel = _padded(D), _numel_of(slice_rows * width, dtype)
    first_sum = num_matrices * matrix_numel
    first_normed = first_sum + _numel_of(num_matrices * N * row_stride, torch.float32)
    buffer = workspace(OP, first_normed + _numel_of(N * width, dtype), device)
    per_fp32 = 4 // dtype.itemsize
    views = [
        matrix_in(buffer, dtype, N, width, width, first_normed * per_fp32),
        matrix_in(buffer, torch.float32, num_matrices * N, D, row_stride, first_sum),
    ]
    for begin in range(0, D, slice_rows):
        rows = min(slice_rows, D - begin)
        for i in range(num_matrices):
            sums = first_sum + i * N * row_stride + begin
            views.append(matrix_in(buffer, dtype, rows, width, width, i * matrix_numel * per_fp32))
            views.append(matrix_in(buffer, torch.float32, N, rows, row_stride, sums))
    call, operands = _call_of(sources, projection, device)
    widths = norm_concat.widths_of(sources, width)
    launches = _prepare_dequantized(call, widths, _is_concatenated(sources), codes, slice_rows)
    integers, floats = norm_concat.numbers_of(sources, N)
    launches((*operands, *tensors, bias, post_gain, out, *views), integers, (*floats, post_eps))


def _library_matmul(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if out.is_inference() and not torch.is_inference_mode_enabled():  # torch's products refuse it; no kernel here does
        with torch.inference_mode():
            return _library_matmul(x, weight, bias, out)
    if torch.is_grad_enabled() and _is_trained(x, weight, bias, out):
        with torch.no_grad():
            return _library_matmul(x, weight, bias, out)
    _linear(x, weight, bias, out=out)


# torch.mm or addmm with the weight transposed in C++, which takes 0.9 us less.
_linear: Any = torch._C._nn.linear


def _is_trained(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> bool:
    """Whether `out=` would raise, as when the registered op gets a weight that requires grad. Turning grad mode off in
    every call would take 1.4 us."""
    return x.requires_grad or weight.requires_grad or out.requires_grad or (bias is not None and bias.requires_grad)


def _library_matmul_fp32(x: Tensor, weight: Tensor, _: Tensor | None, out: Tensor) -> None:
    """The product in fp32, for a scale, a bias or a norm that needs it unrounded."""
    if torch.is_grad_enabled() and _is_trained(x, weight, None, out):
        with torch.no_grad():
            return _library_matmul_fp32(x, weight, _, out)
    if x.dtype == torch.float32:
        torch.mm(x, weight.t(), out=out)
    elif INTERPRETED:  # torch has this overload on CUDA only
        torch.mm(x.float(), weight.t().float(), out=out)
    else:
        try:
            torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)
        except RuntimeError as failure:
            if torch.version.hip is None or isinstance(failure, torch.OutOfMemoryError):
                raise
            # Some of AMD's torches refuse it: "float output with half input is not enabled for ROCm".
            torch.mm(x.float(), weight.t().float(), out=out)
