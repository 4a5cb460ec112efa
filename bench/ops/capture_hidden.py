"""capture_hidden against add and copy, and against the mean of streams and copy."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from eagle_kernels import AuxHiddenStates
from eagle_kernels.model_shapes import InputStage
from eagle_kernels.ops.capture_hidden import CaptureHidden as CaptureRecord

from ..accuracy import error_bound, relative_rms
from ..measure import Call, Footprint, Traffic
from ..workloads import Row, Workload
from .draw import ROWS, WIDTHS, Draw, Expected, Guarded, RandomCall
from .host_call import H, HostCall, K


def captured(hidden: Tensor, residual: Tensor, slot: Tensor) -> Tensor:
    return slot.copy_(hidden + residual)


def captured_mean(streams: Tensor, slot: Tensor) -> Tensor:
    return slot.copy_(streams.mean(1))


class CaptureHidden(Workload):
    """Every copy has its own hidden and residual (or streams), and a slot of a packed [T, K*H] buffer."""

    sizes = ("S", "K", "H")
    baselines = ("eager", "eager-out", "compile")
    exact = (True,)

    def __init__(self, row: Row, cache_bytes: int = 0) -> None:
        super().__init__(row, cache_bytes)
        self.streams = row.stage.streams
        self.chain = captured if self.streams == 1 else captured_mean

    @staticmethod
    def no_stage_reason(stage: InputStage) -> str | None:
        if stage.projects_streams:
            return "it reads every stream, and no mean is captured"
        return None if stage.context is None else "it begins with what fc gave, not with a captured state"

    def footprint(self, names: Sequence[str]) -> Footprint:
        touched = self.traffic().total
        return Footprint(touched, touched, self.row.T * self.row.width * self.item)

    def traffic(self) -> Traffic:
        rows = self.row.T * self.row.stage.H * self.item
        return Traffic((2 if self.streams == 1 else self.streams) * rows, rows)

    def _preallocated(self) -> Call:
        arguments = self.chain_arguments
        if self.streams > 1:
            return lambda copy: torch.mean(arguments[copy][0], 1, out=arguments[copy][1])
        return lambda copy: torch.add(*arguments[copy][:2], out=arguments[copy][2])

    def allocate(self, copies: int) -> None:
        row, stage = self.row, self.row.stage
        if self.streams == 1:
            hidden = self.random(copies, row.T, stage.H)
            sources = [hidden, self.random(copies, row.T, stage.H, scale=10.0)]
        else:
            sources = [self.random(copies, row.T, self.streams, stage.H)]
        buffers = self.poisoned(math.ceil(copies / stage.K), row.T, row.width)
        slots = [slot for buffer in buffers for slot in buffer.chunk(stage.K, -1)][:copies]
        self.chain_arguments = list(zip(*sources, slots, strict=True))
        self.op_arguments = [(tuple(read), {"out": slot}) for *read, slot in self.chain_arguments]

    def truth(self, copy: int, rows: Tensor) -> list[Tensor]:
        hidden, *residual, slot = self.chain_arguments[copy]
        value = slot.new_empty(len(rows), slot.shape[1])
        CaptureRecord(hidden[rows], residual[0][rows] if residual else None, value, None).reference()
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
