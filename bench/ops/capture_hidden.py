"""capture_hidden against add and copy."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from eagle_kernels import AuxHiddenStates
from eagle_kernels.ops.capture_hidden import CaptureHidden as CaptureRecord

from ..accuracy import error_bound, relative_rms
from ..measure import Call, Footprint, Traffic
from ..workloads import Workload
from .draw import ROWS, WIDTHS, Draw, Expected, Guarded, RandomCall
from .host_call import H, HostCall, K


def captured(hidden: Tensor, residual: Tensor, slot: Tensor) -> Tensor:
    return slot.copy_(hidden + residual)


def preallocated_captured(hidden: Tensor, residual: Tensor, slot: Tensor) -> Tensor:
    return torch.add(hidden, residual, out=slot)


class CaptureHidden(Workload):
    """Every copy has its own hidden and residual, and a slot of a packed [T, K*H] buffer."""

    sizes = ("K", "H")
    baselines = ("eager", "eager-out", "compile")
    chain = staticmethod(captured)
    exact = (True,)

    def footprint(self, names: Sequence[str]) -> Footprint:
        touched = self.traffic().total
        return Footprint(touched, touched, self.row.T * self.row.width * self.item)

    def traffic(self) -> Traffic:
        rows = self.row.T * self.row.stage.H * self.item
        return Traffic(2 * rows, rows)

    def _preallocated(self) -> Call:
        return lambda copy: preallocated_captured(*self.chain_arguments[copy])

    def allocate(self, copies: int) -> None:
        row, stage = self.row, self.row.stage
        hidden = self.random(copies, row.T, stage.H)
        residual = self.random(copies, row.T, stage.H, scale=10.0)
        buffers = self.poisoned(math.ceil(copies / stage.K), row.T, row.width)
        slots = [slot for buffer in buffers for slot in buffer.chunk(stage.K, -1)][:copies]
        self.chain_arguments = list(zip(hidden, residual, slots, strict=True))
        self.op_arguments = [((hidden, residual), {"out": slot}) for hidden, residual, slot in self.chain_arguments]

    def truth(self, copy: int, rows: Tensor) -> list[Tensor]:
        hidden, residual, _ = self.chain_arguments[copy]
        value = torch.empty_like(hidden[rows])
        CaptureRecord(hidden[rows], residual[rows], value, None).reference()
        return [value]


WORKLOAD = CaptureHidden


def random_call(draw: Draw) -> RandomCall:
    dtype, T, H = draw.dtype(), draw.choose("T", *ROWS), draw.choose("H", *WIDTHS)
    added = draw.choose("added", "nothing", "residual", "streams")
    streams = draw.choose("S", 1, 2, 4) if added == "streams" else 0
    hidden = draw.rows(T * streams, H, dtype).unflatten(0, (T, streams)) if streams else draw.rows(T, H, dtype)
    residual = draw.rows(T, H, dtype) if added == "residual" else None
    value, squares = torch.empty(T, H, dtype=dtype), torch.empty(T)
    CaptureRecord(hidden, residual, value, squares).reference()
    out = Guarded(draw, T, H, dtype=dtype)
    expected, options, written = [Expected("out", value)], {"out": out.view}, [out]
    if draw.choose("sum_squares", False, True):
        column = Guarded(draw, T, 1, dtype=torch.float32)
        truth = value.double().square().sum(-1)
        options["sum_squares"] = column.view[:, 0]
        bound = error_bound(relative_rms(squares, truth), torch.float32, H, T)
        expected.append(Expected("sum_squares", truth, bound))
        written.append(column)
    return RandomCall((hidden, residual), options, expected, written)


def host_calls() -> dict[str, HostCall]:
    hidden, residual = torch.randn(1, H), torch.randn(1, H)
    buffer = AuxHiddenStates(8, K, H, dtype=torch.float32)
    slot = torch.empty(8, K * H)[:1, H : 2 * H]
    call = HostCall(lambda: buffer.capture(1, hidden, residual), lambda: slot.copy_(hidden + residual), goal=2.2)
    return {"AuxHiddenStates.capture": call}
