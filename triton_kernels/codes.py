"""Decodes the codes and scales of a quantized weight to fp32 from their bits: sm_80 has no fp8, and Triton's
interpreter has no e8m0."""

import triton
import triton.language as tl


@triton.jit
def e4m3_to_fp32(code):
    """OCP E4M3 from uint8. Its exponent and mantissa, moved to those of fp32, are 2^120 too small, subnormals too."""
    magnitude = code & 0x7F
    value = (magnitude.to(tl.uint32) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    value = tl.where(magnitude == 0x7F, float("nan"), value)
    return tl.where(code >= 0x80, -value, value)


@triton.jit
def e8m0_to_fp32(code):
    """2^(b - 127) from uint8, NaN for 255. 2^-127 is subnormal in fp32."""
    bits = tl.where(code == 0, 0x00400000, code.to(tl.uint32) << 23)
    return tl.where(code == 0xFF, float("nan"), bits.to(tl.uint32).to(tl.float32, bitcast=True))


@triton.jit
def e2m1_to_fp32(code):
    """OCP E2M1 from the low four bits of uint8: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives."""
    magnitude = code & 7
    # As in e4m3_to_fp32: exponent and mantissa, moved to those of fp32, are 2^126 too small.
    value = (magnitude.to(tl.uint32) << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37
    return tl.where((code & 8) != 0, -value, value)


@triton.jit
def load_scales(ptr, mask, SCALES: tl.constexpr):
    """The scales in fp32; 0 where the mask is false."""
    if SCALES == "e8m0":
        return tl.where(mask, e8m0_to_fp32(tl.load(ptr, mask=mask, other=0)), 0.0)
    elif SCALES == "e4m3":
        return e4m3_to_fp32(tl.load(ptr, mask=mask, other=0))
    else:
        return tl.load(ptr, mask=mask, other=0.0)


@triton.jit
def load_block_scales(
    row_ptr, column, last, SCALES: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr
):
    """[BD, BK] or [BD, 1]: the scales of BK columns from `column` on; those of a row begin at its `row_ptr` [BD]."""
    if BLOCK_COLUMNS % BK == 0:
        mask = tl.full((BD,), 1, tl.int1) & (column < last)
        return load_scales(row_ptr + column // BLOCK_COLUMNS, mask, SCALES)[:, None]
    else:
        COUNT: tl.constexpr = BK // BLOCK_COLUMNS
        block = column // BLOCK_COLUMNS + tl.arange(0, COUNT)
        mask = tl.full((BD, 1), 1, tl.int1) & (block * BLOCK_COLUMNS < last)[None, :]
        scales = load_scales(row_ptr[:, None] + block[None, :], mask, SCALES)
        return tl.reshape(tl.broadcast_to(scales[:, :, None], (BD, COUNT, BLOCK_COLUMNS)), (BD, BK))
