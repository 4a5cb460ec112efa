"""The memory that partial sums and normed rows pass through: one buffer per device, kept for good.

- It grows outside CUDA graph captures only; a capture that needs more raises, and `eagle_kernels.warmup` makes it grow
  beforehand. A buffer that was outgrown is kept, because captured graphs hold its address; each is at least twice as
  large as the one before, so the outgrown buffers together are at most as large as the newest.
- Calls on different streams of a device share the buffer. A call on another stream than the last call's first makes its
  stream wait for the last one. Graph replays are not visible here: two graphs of one device that contain these ops, or
  a graph and an eager call, must not run at the same time.
"""

import functools

import torch
from torch import Tensor

from .launch import current_stream, needs_warmup

# By the GPU's index: hashing a torch.device takes 0.1 us.
_buffers: dict[int, list[Tensor]] = {}
_last_stream: dict[int, tuple[int, torch.cuda.Stream]] = {}  # (its handle, the stream): a handle takes 1 us less to get


def workspace(op: str, numel: int, device: torch.device) -> Tensor:
    """Uninitialized memory for at least `numel` fp32 numbers of one call; the next call overwrites it."""
    if device.type != "cuda":
        return torch.empty(numel, dtype=torch.float32, device=device)
    index = device.index
    last = _last_stream.get(index)
    if last is None or last[0] != current_stream(index):
        _take_turns(device, last)
    buffers = _buffers.get(index)
    if not buffers or buffers[-1].numel() < numel:
        return _grow(op, numel, device)
    return buffers[-1]


def matrix_in(buffer: Tensor, dtype: torch.dtype, rows: int, columns: int, row_stride: int, first: int = 0) -> Tensor:
    """A workspace from number `first` on as [rows, columns]. A GPU's buffer is kept, so the view, which takes 1.5 us to
    make, is cached."""
    view = _kept_view if buffer.is_cuda else _view
    return view(buffer, dtype, rows, columns, row_stride, first)


def _view(buffer: Tensor, dtype: torch.dtype, rows: int, columns: int, row_stride: int, first: int) -> Tensor:
    if torch.is_inference_mode_enabled():  # as in `_grow`; entering the context takes as long as the view
        with torch.inference_mode(False):
            return _view(buffer, dtype, rows, columns, row_stride, first)
    return buffer.view(dtype).as_strided((rows, columns), (row_stride, 1), first)


# A call of codes in several slices has up to 30 views, of which most depend on the number of rows.
_kept_view = functools.lru_cache(maxsize=512)(_view)


def _grow(op: str, numel: int, device: torch.device) -> Tensor:
    buffers = _buffers.setdefault(device.index, [])
    if torch.cuda.is_current_stream_capturing():
        raise needs_warmup(
            op,
            f"the workspace of {device} has {buffers[-1].numel() * 4 if buffers else 0} bytes",
            f"{numel * 4} from a call of {{}}",
            "it must not grow during a CUDA graph capture",
        )
    smallest = 2 * buffers[-1].numel() if buffers else 0
    with torch.inference_mode(False):  # torch's products cannot write an inference tensor outside of it
        buffers.append(torch.empty(max(numel, smallest), dtype=torch.float32, device=device))
    return buffers[-1]


def _take_turns(device: torch.device, last: tuple[int, torch.cuda.Stream] | None) -> None:
    stream = torch.cuda.current_stream(device)
    if last is not None and not torch.cuda.is_current_stream_capturing():
        stream.wait_stream(last[1])
    _last_stream[device.index] = (current_stream(device.index), stream)
