"""How far a result is from float64, and how far it may be: for `check`, for `bench` before it prints a time, and for
the tests, whose own bounds (tests/accuracy.py) follow the same rule."""

import math

import torch
from torch import Tensor

# Half the distance from 1 to the next number, 2^-p for p significant bits: the relative error of one rounding.
UNIT_ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}

# Even where sums are exact, as at width 1, a result has nine roundings of fp32 (root, reciprocal, mean, eps, offset +
# gain, two products and two more): as a root mean square, sqrt(9) times one of them. No bound may be lower: at width 1
# the rule would ask for half of one rounding.
_FP32_FLOOR = 3 * UNIT_ROUNDOFF[torch.float32]


def relative_rms(actual: Tensor, truth: Tensor) -> float:
    """rms(actual - truth) / rms(truth) in float64; nan where actual holds one."""
    truth = truth.double()
    difference = (actual.double() - truth).square().sum()
    if difference == 0:
        return 0.0
    power = truth.square().sum()
    return math.sqrt(difference / power) if power > 0 else math.inf


def error_bound(eager_error: float, dtype: torch.dtype, width: int, count: int | None = None) -> float:
    """The largest relative RMS error an output may have.

    bf16, fp16: 1.05 times that of the engines' eager path on the same data. Both paths round the same values, and
    differ where fp32 sums land on two sides of a tie; over `count` outputs the RMS error itself scatters by
    1 / sqrt(2 * count), hence the allowance of three such deviations for few outputs. None leaves the allowance out.
    fp32: 1e-6 * sqrt(width) / 32 for sums over `width` products, and at most twice eager's.
    """
    if dtype == torch.float32:
        return max(min(1e-6 * math.sqrt(width) / 32, 2 * eager_error), _FP32_FLOOR)
    allowance = 1.0 if count is None else 1 + 3 / math.sqrt(2 * max(count, 1))
    return 1.05 * eager_error * allowance


def absolute_bound(dtype: torch.dtype, width: int) -> float:
    """A limit for every result, whatever the chain's own error is: in 16 bits four roundings, enough for any order of
    operations and for a dequantized weight's rounding; in fp32 four times the error of sums over `width` products."""
    if dtype == torch.float32:
        return max(4e-6 * math.sqrt(width) / 32, 2 * _FP32_FLOOR)
    return 4 * UNIT_ROUNDOFF[dtype]


def baseline_bound(eager_error: float, dtype: torch.dtype, width: int, count: int) -> float:
    """A baseline has to compute the same thing, not as exactly: compilers sum in other orders than eager torch."""
    return 4 * max(error_bound(eager_error, dtype, width, count), eager_error)
