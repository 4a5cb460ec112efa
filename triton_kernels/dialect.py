"""The operations that kernels need in two forms: for TRITON_INTERPRET=1, and without programmatic dependent launch.

The interpreter (Triton 3.6 to 3.9) keeps bf16 as raw uint16: arithmetic and `tl.dot` on it give garbage, a cast from
fp32 truncates, and subnormals come out wrong either way. So kernels widen loads with `to_fp32`, multiply with `dot`
and cast with `round_to`: in the interpreter these work on the bits, in compiled code they are the plain operations.
"""

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(a, b, total):
    """total + a @ b with fp32 sums; fp32 operands are multiplied as fp32, not as tf32."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    else:
        return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def to_fp32(x):
    """x in fp32, exactly."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def round_to(x, DTYPE: tl.constexpr):
    """fp32 to DTYPE, nearest even."""
    if INTERPRETED and tl.bfloat16 == DTYPE:
        bits = x.to(tl.uint32, bitcast=True)
        # The carry would turn a NaN with a full payload into -0.
        bits = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), bits)
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(DTYPE)


@triton.jit
def rstd_of(mean_square):
    """1/rms, but 0 where eps = 0 meets a row of zeros, which then stays zero."""
    return tl.where(mean_square == 0.0, 0.0, tl.rsqrt(mean_square))


@functools.cache
def has_pdl(device: torch.device) -> bool:
    """Programmatic dependent launch, griddepcontrol in PTX: sm_90 and later. gfx942 reports 9.4 but has none."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def wait_for_previous_kernel(PDL: tl.constexpr):
    """After this a kernel may read what the kernels before it wrote, and overwrite what they read."""
    if PDL:
        gdc_wait()


@triton.jit
def let_next_kernel_start(PDL: tl.constexpr):
    """Call only after `wait_for_previous_kernel`: the next kernel may then rely on what the previous one wrote."""
    if PDL:
        gdc_launch_dependents()
