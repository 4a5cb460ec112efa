"""Writes the codes of a quantized weight as 16-bit numbers, which the library's product then multiplies by many rows.

    dense[d - first] = codes[d]                                                          SCALED "rows"
    dense[d - first] = codes[d] * scales[d // block rows, c // block columns]            SCALED "codes"
    dense[d - first] + low[d - first] = the same                                         SCALED "blocks"

Here d are the rows of one slice of the weight and c its columns. Codes alone are exact in 16 bits, and so are codes
times a scale of e4m3 or, within the range of bf16, of e8m0. A code times a scale of fp32 is not: to 16 significant bits
it is the sum of two bf16 numbers, `dense` the product rounded and `low` the rounded rest. The scales that are in no
number here, of rows and of the whole weight, multiply the sums of the product, in norm_concat_linear's finalize kernel.
"""

from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl

from .codes import e2m1_to_fp32, e4m3_to_fp32, load_block_scales
from .dialect import let_next_kernel_start, round_to, to_fp32, wait_for_previous_kernel
from .launch import I64, NONE, Launch, Origin, Step, address_of, constant, pointer_to
from .rows import cdiv

# Bytes that the numbers of one slice may take. A weight of more is dequantized and multiplied slice by slice, so that
# the workspace is not as large as the dense weight (K=3, H=D=7168: 308 MB).
_MAX_BYTES = 128 << 20

# Rows and columns of a program: 32 numbers for each thread of 4 warps. 128 columns are a line of the cache, and divide
# blocks of scales or are whole ones; a row ends within the last 127 of them.
_BD, _BK = 32, 128


@triton.jit
def _dequantize(
    w_ptr,
    w_row_stride,
    scale_ptr,
    scale_row_stride,
    dense_ptr,
    low_ptr,
    first,
    end,
    W,
    code_columns,
    CODES: tl.constexpr,
    SCALES: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BD: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BD rows x BK columns of the rows from `first` to `end`. Grid (W / BK, rows / BD). `code_columns` are
    the columns of codes: half of W where one has two."""
    c = tl.program_id(0) * BK + tl.arange(0, BK)
    row = tl.program_id(1).to(tl.int64) * BD + tl.arange(0, BD)
    # Rows beyond the slice repeat its first, so that their loads need no mask.
    d = first + tl.where(first + row < end, row, 0)
    w_rows = w_ptr + d * w_row_stride

    wait_for_previous_kernel(PDL)
    let_next_kernel_start(PDL)

    if CODES == "e2m1":  # two columns a byte
        byte = tl.program_id(0) * (BK // 2) + tl.arange(0, BK // 2)
        pairs = tl.load(w_rows[:, None] + byte[None, :], mask=(byte < code_columns)[None, :], other=0)
        value = tl.interleave(e2m1_to_fp32(pairs & 15), e2m1_to_fp32(pairs >> 4))  # [BD, BK]
    else:
        code = tl.load(w_rows[:, None] + c[None, :], mask=(c < code_columns)[None, :], other=0)
        value = e4m3_to_fp32(code) if CODES == "e4m3" else code.to(tl.float32)
    if SCALED != "rows":
        scale_rows = scale_ptr + (d // BLOCK_ROWS if BLOCK_ROWS else d * 0) * scale_row_stride  # [BD]
        value *= load_block_scales(scale_rows, tl.program_id(0) * BK, W, SCALES, BLOCK_COLUMNS, BD, BK)

    place = (row * W)[:, None] + c[None, :]
    is_there = (first + row < end)[:, None] & (c < W)[None, :]
    dense = round_to(value, dense_ptr.dtype.element_ty)
    tl.store(dense_ptr + place, dense, mask=is_there)
    if low_ptr is not None:
        rounded = to_fp32(dense)
        # Infinity has no rest: infinity - infinity would make a sum of the two products NaN.
        rest = tl.where(tl.abs(rounded) == float("inf"), 0.0, value - rounded)
        tl.store(low_ptr + place, round_to(rest, low_ptr.dtype.element_ty), mask=is_there)


_ROWS = ("w_ptr", "w_row_stride", "dense_ptr", "low_ptr", "W", "code_columns")


def rows_of_slice(shape: tuple[int, int], num_matrices: int) -> int:
    """The rows of a weight [D, W] that are dequantized at once, into `num_matrices` matrices."""
    D, W = shape
    # Of 16 rows, so that every slice of the products, which are fp32, begins at a multiple of 64 bytes.
    most = max(_MAX_BYTES // (2 * W * num_matrices) // 16 * 16, 16)
    return min(D, cdiv(cdiv(D, cdiv(D, most)), 16) * 16)


def step_of(
    weight_types: Sequence[str],
    weight_origins: Sequence[Origin],
    constants: Mapping[str, object],
    dtype: torch.dtype,
    rows: range,
    W: int,
    matrices: Sequence[int],
    device: torch.device,
) -> Step:
    """The step that dequantizes these rows. The types and origins are those of codes and scales; `matrices` are the
    positions of the one or two matrices [rows, W] among the operands."""
    number = pointer_to(dtype)
    launch = Launch(
        _dequantize,
        (*weight_types, number, number if len(matrices) > 1 else NONE, I64, I64, I64, I64),
        {**constants, "BD": _BD, "BK": _BK},
        device,
        aligned_together=_ROWS,
        num_warps=4,
    )
    code_columns = W // 2 if constants["CODES"] == "e2m1" else W
    sizes = map(constant, (rows.start, rows.stop, W, code_columns))
    grid = constant(cdiv(W, _BK)), constant(cdiv(len(rows), _BD)), constant(1)
    return Step(launch, grid, [*weight_origins, *map(address_of, matrices), *sizes])
