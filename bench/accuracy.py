"""Error against float64, and how much of it is allowed: design section 4, for `check` and the gate of `bench`."""

import math

import torch
from torch import Tensor

# fp32 rounds three or four times even where there is nothing to sum: 4 * 2^-24, below which no bound may go.
_FP32_FLOOR = 2.0**-22


def relative_rms(actual: Tensor, truth: Tensor) -> float:
    """rms(actual - truth) / rms(truth) in float64; nan where actual holds one."""
    truth = truth.double()
    difference = (actual.double() - truth).square().sum()
    if difference == 0:
        return 0.0
    power = truth.square().sum()
    return math.sqrt(difference / power) if power > 0 else math.inf


def error_bound(eager_error: float, dtype: torch.dtype, width: int, count: int) -> float:
    """The largest relative RMS error an output may have.

    bf16, fp16: 1.05 times that of the engines' eager path on the same data. Both paths round the same values, and
    differ where fp32 sums land on two sides of a tie; over `count` outputs the RMS error itself scatters by
    1 / sqrt(2 * count), hence the allowance of three such deviations for few outputs.
    fp32: 1e-6 * sqrt(width) / 32 for sums over `width` products, and at most twice eager's.
    """
    if dtype != torch.float32:
        return 1.05 * eager_error * (1 + 3 / math.sqrt(2 * max(count, 1)))
    return max(min(1e-6 * math.sqrt(width) / 32, 2 * eager_error), _FP32_FLOOR)


def baseline_bound(eager_error: float, dtype: torch.dtype, width: int, count: int) -> float:
    """A baseline has to compute the same thing, not as exactly: compilers sum in other orders than eager torch."""
    return 4 * max(error_bound(eager_error, dtype, width, count), eager_error)
