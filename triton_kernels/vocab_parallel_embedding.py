"""vocab_parallel_embedding in Triton, one launch:

    out[i] = weight[local(ids[i])] * scale where the shard holds ids[i], else 0

One program per id and block of columns. The shard's bounds are run-time values: one binary serves all ranks, where
SGLang 0.5.23 compiles one for each.
"""

import torch
import triton
import triton.language as tl

from .alignment import row_stride
from .dialect import let_next_kernel_start, round_to, to_fp32, wait_for_previous_kernel
from .launch import FP32, I64, NONE, Launch, address, pointer_to, prepared
from .rows import cdiv, column_block_and_warps

_ROWS = ("weight_ptr", "weight_row_stride", "out_ptr", "out_row_stride")


@triton.jit
def _vocab_parallel_embedding(
    ids_ptr,
    ids_stride,
    weight_ptr,
    weight_row_stride,
    org_begin,
    org_end,
    added_begin,
    added_end,
    added_row,
    scale,
    scale_ptr,
    out_ptr,
    out_row_stride,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    wait_for_previous_kernel(PDL)
    let_next_kernel_start(PDL)
    id = tl.load(ids_ptr + i * ids_stride).to(tl.int64)
    is_org = (id >= org_begin) & (id < org_end)
    is_added = (id >= added_begin) & (id < added_end)
    row = tl.where(is_org, id - org_begin, tl.where(is_added, id - added_begin + added_row, 0))
    in_shard = is_org | is_added
    values = tl.load(weight_ptr + row * weight_row_stride + h, mask=h < tl.where(in_shard, H, 0), other=0.0)
    if scale_ptr is not None:
        values = round_to(to_fp32(values) * to_fp32(tl.load(scale_ptr)), out_ptr.dtype.element_ty)
    elif scale is not None:
        values = round_to(to_fp32(values) * scale, out_ptr.dtype.element_ty)
    if scale_ptr is not None or scale is not None:
        # A scaled zero row may be NaN (0 * inf) or -0 (a negative scale).
        values = tl.where(in_shard, values, 0.0)
    tl.store(out_ptr + i * out_row_stride + h, values, mask=h < H)


@prepared
def _prepare(
    ids_dtype: torch.dtype,
    dtype: torch.dtype,
    has_scale: bool,
    scale_dtype: torch.dtype | None,
    H: int,
    device: torch.device,
) -> tuple[Launch, int]:
    """The launch, and the number of blocks that a row takes."""
    ids, rows, scale = pointer_to(ids_dtype), pointer_to(dtype), FP32 if has_scale else NONE
    block, num_warps = column_block_and_warps(H)
    launch = Launch(
        _vocab_parallel_embedding,
        (ids, I64, rows, I64, I64, I64, I64, I64, I64, scale, pointer_to(scale_dtype), rows, I64),
        {"H": H, "BLOCK": block},
        device,
        aligned_together=_ROWS,
        num_warps=num_warps,
    )
    return launch, cdiv(H, block)


def run(record: tuple) -> None:
    """One launch for a checked `VocabParallelEmbedding` record."""
    ids, weight, org_begin, org_end, added_begin, added_end, added_row, scale, scale_tensor, out = record
    N, H = out.shape
    if N == 0 or H == 0:
        return
    bounds = org_begin, org_end, added_begin, added_end, added_row
    numbers = [address(ids), ids.stride(0), address(weight), row_stride(weight), *bounds]
    if scale is not None:
        numbers.append(scale)
    if scale_tensor is not None:
        numbers.append(address(scale_tensor))
    numbers += address(out), row_stride(out)
    scale_dtype = None if scale_tensor is None else scale_tensor.dtype
    launch, blocks = _prepare(ids.dtype, weight.dtype, scale is not None, scale_dtype, H, out.device)
    launch((N, blocks, 1), numbers)
