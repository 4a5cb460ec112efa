"""store_context_kv in Triton, one launch: one program per row of kv and head.

Rotating a column of K needs the normed value of its partner column, which is loaded a second time: it lies in the same
cache line or the next.
"""

import torch
import triton
import triton.language as tl

from .alignment import row_stride
from .dialect import let_next_kernel_start, round_to, rstd_of, to_fp32, wait_for_previous_kernel
from .launch import FP32, I64, Launch, address, pointer_to, prepared
from .rows import next_power_of_2


@triton.jit
def _load_normed(row_ptr, gain_ptr, rstd, norm_offset, norm_width, h, mask):
    """Columns h of a head of K after k_norm, in fp32."""
    value = to_fp32(tl.load(row_ptr + h, mask=mask, other=0.0))
    scale = rstd
    if gain_ptr is not None:
        scale = rstd * (norm_offset + to_fp32(tl.load(gain_ptr + h, mask=mask & (h < norm_width), other=0.0)))
    return tl.where(h < norm_width, value * scale, value)


@triton.jit
def _store_context_kv(
    kv_ptr,
    kv_row_stride,
    gain_ptr,
    eps,
    norm_offset,
    norm_width,
    cos_sin_ptr,
    cos_sin_row_stride,
    num_positions,
    rotary_begin,
    positions_ptr,
    slots_ptr,
    num_slots,
    num_heads,
    k_cache_ptr,
    k_slot_stride,
    k_head_stride,
    v_cache_ptr,
    v_slot_stride,
    v_head_stride,
    D: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    V_IS_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    wait_for_previous_kernel(PDL)
    let_next_kernel_start(PDL)
    slot = tl.load(slots_ptr + i).to(tl.int64)
    position = tl.load(positions_ptr + i).to(tl.int64)
    if (slot < 0) | (slot >= num_slots) | (position < 0) | (position >= num_positions):
        return
    h = tl.arange(0, BLOCK)  # [BLOCK]
    mask = h < D
    row_ptr = kv_ptr + i * kv_row_stride + head * D
    raw = tl.load(row_ptr + h, mask=mask, other=0.0)
    value = to_fp32(raw)
    if v_cache_ptr is not None:
        v_ptr = v_cache_ptr + slot * v_slot_stride + head * v_head_stride
        if V_IS_K:
            of_v = value * rstd_of(tl.sum(value * value, axis=0) / D + eps)
            tl.store(v_ptr + h, round_to(of_v, v_cache_ptr.dtype.element_ty), mask=mask)
        else:
            tl.store(v_ptr + h, tl.load(row_ptr + num_heads * D + h, mask=mask, other=0.0), mask=mask)
    squares = tl.sum(tl.where(h < norm_width, value * value, 0.0), axis=0)
    rstd = rstd_of(squares / tl.maximum(norm_width, 1).to(tl.float32) + eps)
    k = _load_normed(row_ptr, gain_ptr, rstd, norm_offset, norm_width, h, mask)
    if ROTARY > 0:
        at = h - rotary_begin
        rotates = mask & (at >= 0) & (at < ROTARY)
        if INTERLEAVED:
            first = at % 2 == 0
            partner = tl.where(first, h + 1, h - 1)
            frequency = at // 2
        else:
            first = at < ROTARY // 2
            partner = tl.where(first, h + ROTARY // 2, h - ROTARY // 2)
            frequency = tl.where(first, at, at - ROTARY // 2)
        other = _load_normed(row_ptr, gain_ptr, rstd, norm_offset, norm_width, partner, rotates)
        angle_ptr = cos_sin_ptr + position * cos_sin_row_stride + frequency
        cos = to_fp32(tl.load(angle_ptr, mask=rotates, other=0.0))
        sin = to_fp32(tl.load(angle_ptr + ROTARY // 2, mask=rotates, other=0.0))
        k = tl.where(rotates, tl.where(first, k * cos - other * sin, k * cos + other * sin), k)
    k_ptr = k_cache_ptr + slot * k_slot_stride + head * k_head_stride
    tl.store(k_ptr + h, round_to(k, k_cache_ptr.dtype.element_ty), mask=mask)


@prepared
def _prepare(
    dtype: torch.dtype,
    gain_dtype: torch.dtype | None,
    cos_sin_dtype: torch.dtype,
    positions_dtype: torch.dtype,
    slots_dtype: torch.dtype,
    has_v_cache: bool,
    v_is_k: bool,
    D: int,
    rotary_width: int,
    interleaved: bool,
    device: torch.device,
) -> Launch:
    rows, block = pointer_to(dtype), next_power_of_2(D)
    norm = pointer_to(gain_dtype), FP32, FP32, I64
    rotation = pointer_to(cos_sin_dtype), I64, I64, I64, pointer_to(positions_dtype)
    caches = rows, I64, I64, pointer_to(dtype if has_v_cache else None), I64, I64
    return Launch(
        _store_context_kv,
        (rows, I64, *norm, *rotation, pointer_to(slots_dtype), I64, I64, *caches),
        {"D": D, "ROTARY": rotary_width, "INTERLEAVED": interleaved, "V_IS_K": v_is_k, "BLOCK": block},
        device,
        num_warps=max(block // 128, 1),
    )


def run(record: tuple) -> None:
    """One launch for a checked `StoreContextKV` record."""
    kv, gain, eps, norm_offset, norm_width, cos_sin, rotary_begin, interleaved, positions, slots, k_cache, v_cache = (
        record
    )
    num_slots, heads, D = k_cache.shape
    rows, width = kv.shape
    if rows == 0 or heads == 0 or D == 0:
        return
    num_positions, rotary_width = cos_sin.shape
    numbers = [address(kv), row_stride(kv)]
    if gain is not None:
        numbers.append(address(gain))
    numbers += eps, norm_offset, norm_width, address(cos_sin), row_stride(cos_sin), num_positions, rotary_begin
    numbers += address(positions), address(slots), num_slots, heads, address(k_cache), *k_cache.stride()[:2]
    numbers += (0, 0) if v_cache is None else (address(v_cache), *v_cache.stride()[:2])
    launch = _prepare(
        kv.dtype,
        None if gain is None else gain.dtype,
        cos_sin.dtype,
        positions.dtype,
        slots.dtype,
        v_cache is not None,
        v_cache is not None and width == heads * D,
        D,
        rotary_width,
        interleaved,
        kv.device,
    )
    launch((rows, heads, 1), numbers)
