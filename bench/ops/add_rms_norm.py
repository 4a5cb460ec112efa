"""add_rms_norm against add and norm, and against the fused kernels of other packages."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import eagle_kernels
from eagle_kernels.ops.add_rms_norm import formula

from ..accuracy import error_bound, relative_rms
from ..baselines import FOREIGN, ForeignNorms, NormScratch, foreign_unsupported_reason
from ..measure import Call, Footprint, Traffic
from ..workloads import Workload
from .draw import ROWS, WIDTHS, Draw, Expected, Guarded, RandomCall
from .host_call import H, HostCall


def added_norm(hidden: Tensor, residual: Tensor, gain: Tensor, eps: float, out_sum: Tensor) -> tuple[Tensor, Tensor]:
    total = torch.add(hidden, residual, out=out_sum)
    return F.rms_norm(total, total.shape[-1:], gain, eps), total


def preallocated_added_norm(
    hidden: Tensor, residual: Tensor, gain: Tensor, eps: float, out_sum: Tensor, out: Tensor, scratch: NormScratch
) -> tuple[Tensor, Tensor]:
    torch.add(hidden, residual, out=out_sum)
    scratch.norm(out_sum, gain, eps, out)
    return out, out_sum


class AddRmsNorm(Workload):
    """Every copy has its own inputs and both outputs."""

    sizes = ("H",)
    baselines = ("eager", "eager-out", "compile", *FOREIGN)
    chain = staticmethod(added_norm)
    exact = (False, True)

    def footprint(self, names: Sequence[str]) -> Footprint:
        touched, scratch = self.traffic().total, NormScratch.num_bytes(self.row.T, self.row.stage.H)
        return Footprint(touched, touched, scratch if "eager-out" in names else 0)

    def traffic(self) -> Traffic:
        rows = self.row.T * self.row.stage.H * self.item
        return Traffic(2 * rows, 2 * rows)

    def _preallocated(self) -> Call:
        scratch = NormScratch(self.row.T, self.row.stage.H, device=self.row.device)
        wide = self.chain_arguments[0][2].float()

        def call(copy: int) -> tuple[Tensor, Tensor]:
            hidden, residual, _, eps, total = self.chain_arguments[copy]
            return preallocated_added_norm(hidden, residual, wide, eps, total, self.outs[copy], scratch)

        return call

    def allocate(self, copies: int) -> None:
        row, stage = self.row, self.row.stage
        hidden = self.random(copies, row.T, stage.H)
        residual = self.random(copies, row.T, stage.H, scale=10.0)
        outs, sums = (self.poisoned(copies, row.T, stage.H) for _ in range(2))
        gain = self.random_gain(stage.H)
        self.settings: dict[str, Any] = {"eps": stage.eps, "norm_offset": stage.norm_offset}
        self.weight = gain - stage.norm_offset
        pairs = zip(hidden, residual, sums, strict=True)
        self.chain_arguments = [(h, r, gain, stage.eps, total) for h, r, total in pairs]
        self.outs = outs.unbind()
        self.op_arguments = [
            ((h, r, self.weight), {**self.settings, "out": out, "out_sum": total})
            for (h, r, _, _, total), out in zip(self.chain_arguments, self.outs, strict=True)
        ]

    def _call(self, name: str) -> tuple[Call, int]:
        if name not in FOREIGN:
            return super()._call(name)
        norms = ForeignNorms(name)

        def call(copy: int) -> tuple[Tensor, Tensor]:
            hidden, residual, gain, eps, total = self.chain_arguments[copy]
            # These kernels work in place: what a chain of drafter steps has to keep is cloned first.
            return norms.add_norm(self.outs[copy].copy_(hidden), total.copy_(residual), gain, eps)

        return call, len(self.outs)

    def unsupported_reason(self, name: str) -> str | None:
        if name in FOREIGN:
            return foreign_unsupported_reason(name, self.row.device)
        return super().unsupported_reason(name)

    def truth(self, copy: int, rows: Tensor) -> list[Tensor]:
        hidden, residual = (tensor[rows] for tensor in self.chain_arguments[copy][:2])
        normed, _ = formula(hidden, residual, self.weight, **self.settings, dtype=torch.float64)
        _, total = formula(hidden, residual, self.weight, **self.settings)
        return [normed, total.to(hidden.dtype)]


WORKLOAD = AddRmsNorm


def random_call(draw: Draw) -> RandomCall:
    dtype, T, H = draw.dtype(), draw.choose("T", *ROWS), draw.choose("H", *WIDTHS)
    hidden, residual, weight = draw.rows(T, H, dtype), draw.rows(T, H, dtype), draw.gain(H, dtype=dtype)
    options: dict[str, Any] = {
        "eps": draw.choose("eps", 1e-6, 1e-3),
        "norm_offset": draw.choose("norm_offset", 0.0, 1.0),
    }
    truth = formula(hidden, residual, weight, **options, dtype=torch.float64)[0]
    eager, total = (output.to(dtype) for output in formula(hidden, residual, weight, **options))
    bound = error_bound(relative_rms(eager, truth), dtype, H, truth.numel())
    expected = [Expected("normed", truth, bound), Expected("sum", total)]
    written = []
    for name in ("out", "out_sum"):
        if draw.choose(name, False, True):
            written.append(Guarded(draw, T, H, dtype=dtype))
            options[name] = written[-1].view
    return RandomCall((hidden, residual, weight), options, expected, written)


def host_calls() -> dict[str, HostCall]:
    hidden, residual, gain = torch.randn(1, H), torch.randn(1, H), torch.rand(H)

    def chain() -> tuple[Tensor, Tensor]:
        total = hidden + residual
        return F.rms_norm(total, (H,), gain, 1e-6), total

    return {"add_rms_norm": HostCall(lambda: eagle_kernels.add_rms_norm(hidden, residual, gain), chain, goal=0.7)}
