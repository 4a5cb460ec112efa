"""The memory that partial sums and normed rows pass through: a buffer for each thread and device, kept for good.

- It grows outside CUDA graph captures only; a capture that needs more raises, and `eagle_kernels.warmup`, called in
  the same thread, makes it grow beforehand. A buffer that was outgrown is kept, because captured graphs hold its
  address; each is at least twice as large as the one before, so the outgrown ones together are at most as large as the
  newest.
- A thread has buffers of its own, since its launches come later than its call of `workspace`: another thread would be
  given the same memory in between. The buffers of a thread that has ended go to the next new one.
- A thread's calls on different streams of a device share the buffer. A call on another stream than the last call's
  first makes its stream wait for the last one, between the branches of one graph too. Graph replays are not visible
  here: two graphs of one device that contain these ops, or a graph and an eager call, must not run at the same time,
  nor may one thread capture two graphs at once.
"""

from __future__ import annotations

import functools
import threading
from typing import NamedTuple

import torch
from torch import Tensor

from .launch import current_stream, needs_warmup


class _Turn(NamedTuple):
    """The stream of the last call."""

    handle: int  # takes 1 us less to get than the stream
    stream: torch.cuda.Stream
    other: _Turn | None = None  # the last one inside of a capture where this one is outside, or the other way round


class _Workspaces:
    """Of one thread at a time, by the GPU's index: hashing a torch.device takes 0.1 us."""

    def __init__(self) -> None:
        self.buffers: dict[int, list[Tensor]] = {}
        self.last_turn: dict[int, _Turn] = {}


# Of threads that have ended. What is not here belongs to a thread, so no buffer is ever freed.
_idle: list[_Workspaces] = []


class _Lease:
    """A thread's hold on its workspaces, which ends with the thread."""

    def __init__(self) -> None:
        self._idle = _idle  # at interpreter exit the module's name for it may be gone before this object
        try:
            self.workspaces = _idle.pop()
        except IndexError:
            self.workspaces = _Workspaces()

    def __del__(self) -> None:
        self._idle.append(self.workspaces)


class _OfThread(threading.local):
    def __init__(self) -> None:
        self._lease = _Lease()
        self.workspaces = self._lease.workspaces


_of_thread = _OfThread()


def workspace(op: str, numel: int, device: torch.device) -> Tensor:
    """Uninitialized memory for at least `numel` fp32 numbers of one call; the thread's next call overwrites it."""
    if device.type != "cuda":
        return torch.empty(numel, dtype=torch.float32, device=device)
    index, own = device.index, _of_thread.workspaces
    last = own.last_turn.get(index)
    if last is None or last.handle != current_stream(index):
        own.last_turn[index] = _take_turns(device, last)
    buffers = own.buffers.setdefault(index, [])
    if not buffers or buffers[-1].numel() < numel:
        buffers.append(_grown(op, numel, device, buffers))
    return buffers[-1]


def matrix_in(buffer: Tensor, dtype: torch.dtype, rows: int, columns: int, row_stride: int, first: int = 0) -> Tensor:
    """A workspace from number `first` on as [rows, columns]. A GPU's buffer is kept, so the view, which takes 1.5 us to
    make, is cached."""
    view = _kept_view if buffer.is_cuda else _view
    return view(buffer, dtype, rows, columns, row_stride, first)


def _view(buffer: Tensor, dtype: torch.dtype, rows: int, columns: int, row_stride: int, first: int) -> Tensor:
    if torch.is_inference_mode_enabled():  # as in `_grown`; entering the context takes as long as the view
        with torch.inference_mode(False):
            return _view(buffer, dtype, rows, columns, row_stride, first)
    return buffer.view(dtype).as_strided((rows, columns), (row_stride, 1), first)


# A call of codes in several slices has up to 30 views, of which most depend on the number of rows.
_kept_view = functools.lru_cache(maxsize=512)(_view)


def _grown(op: str, numel: int, device: torch.device, buffers: list[Tensor]) -> Tensor:
    if torch.cuda.is_current_stream_capturing():
        raise needs_warmup(
            op,
            f"this thread's workspace of {device} has {buffers[-1].numel() * 4 if buffers else 0} bytes",
            f"{numel * 4} from a call of {{}} in this thread",
            "it must not grow during a CUDA graph capture",
        )
    smallest = 2 * buffers[-1].numel() if buffers else 0
    with torch.inference_mode(False):  # torch's products cannot write an inference tensor outside of it
        return torch.empty(max(numel, smallest), dtype=torch.float32, device=device)


def _take_turns(device: torch.device, last: _Turn | None) -> _Turn:
    handle, stream = current_stream(device.index), torch.cuda.current_stream(device)
    is_captured = _is_capturing(stream)
    other, turn = None, last
    while turn is not None:
        # A capture cannot wait for a stream outside of it, and a stream that waits for one inside becomes part of it.
        if _is_capturing(turn.stream) != is_captured:
            other = other or turn._replace(other=None)
        elif turn.handle != handle:
            stream.wait_stream(turn.stream)
        turn = turn.other
    return _Turn(handle, stream, other)


def _is_capturing(stream: torch.cuda.Stream) -> bool:
    if stream.cuda_stream == 0:  # never is, and to ask is an error while a blocking stream is captured
        return False
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()
