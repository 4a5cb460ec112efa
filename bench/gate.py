"""The correctness gate: no time is printed for a result that is wrong."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .accuracy import baseline_bound, error_bound, relative_rms
from .workloads import Variant, Workload, is_ours

# Two, so that a variant that always computes the first one is caught.
CHECKED_COPIES = 2


@dataclass(frozen=True)
class Verdict:
    """The error of a variant nearest to its bound, over outputs and copies."""

    error: float
    bound: float

    @property
    def is_right(self) -> bool:
        # Written so that an error of nan is wrong.
        return self.error <= self.bound

    @property
    def ratio(self) -> float:
        if self.is_right:
            return self.error / self.bound if self.bound else 0.0
        return self.error / self.bound if self.bound and self.error < math.inf else math.inf


def judge(workload: Workload, variants: Sequence[Variant]) -> dict[str, Verdict]:
    """Run every variant on a few copies and compare sampled rows with the formula."""
    verdicts: dict[str, Verdict] = {}
    rows = workload.checked_rows()
    for copy in range(min(CHECKED_COPIES, *(variant.copies for variant in variants))):
        truths = workload.truth(copy, rows)
        eager_errors = _errors(workload, workload.chain(*workload.chain_arguments[copy]), truths, rows)
        for variant in variants:
            with variant.in_force():
                errors = _errors(workload, variant.call(copy), truths, rows)
            bound_of = error_bound if is_ours(variant.name) else baseline_bound
            width, dtype = workload.row.width, workload.row.dtype
            for error, eager, truth, exact in zip(errors, eager_errors, truths, workload.exact, strict=True):
                verdict = Verdict(error, 0.0 if exact else bound_of(eager, dtype, width, truth.numel()))
                worst = verdicts.setdefault(variant.name, verdict)
                verdicts[variant.name] = max(worst, verdict, key=lambda candidate: candidate.ratio)
    return verdicts


def _errors(workload: Workload, result: Tensor | tuple[Tensor, ...], truths: list[Tensor], rows: Tensor) -> list[float]:
    outputs = result if isinstance(result, tuple) else (result,)
    return [
        _exact_error(output[rows], truth) if exact else relative_rms(output[rows], truth)
        for output, truth, exact in zip(outputs, truths, workload.exact, strict=True)
    ]


def _exact_error(actual: Tensor, truth: Tensor) -> float:
    return 0.0 if torch.equal(actual, truth) else math.inf
