"""Outputs with poison inside and sentinels around them; operands that end at a page that traps every access."""

import ctypes
import math
import mmap

import torch
from torch import Tensor

SENTINEL = -77.0  # exact in every dtype, and nothing here computes it


class GuardedRows:
    """A NaN-filled [rows, columns] slice of a wider and longer buffer of sentinels; its rows start off alignment."""

    def __init__(self, rows: int, columns: int, dtype: torch.dtype, device: str = "cpu") -> None:
        self.buffer = torch.full((rows + 4, columns + 9), SENTINEL, dtype=dtype, device=device)
        self.inside = torch.zeros(self.buffer.shape, dtype=torch.bool, device=device)
        self.inside[2 : 2 + rows, 3 : 3 + columns] = True
        self.buffer[self.inside] = float("nan")
        self.view = self.buffer[2 : 2 + rows, 3 : 3 + columns]

    def check_around(self) -> None:
        """Nothing outside the view was written."""
        assert (self.buffer[~self.inside] == SENTINEL).all(), "written outside of out"

    def check_untouched(self) -> None:
        """Nothing at all was written."""
        self.check_around()
        assert self.view.isnan().all(), "out was written"


class UnchangedTensors:
    """A context in which the given tensors must keep every bit."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors

    def __enter__(self) -> None:
        self.copies = [tensor.clone() for tensor in self.tensors]

    def __exit__(self, *failure: object) -> None:
        for tensor, copy in zip(self.tensors, self.copies, strict=True):
            assert same_bits(tensor, copy), f"an input of shape {tuple(tensor.shape)} was written"


_LIBC = ctypes.CDLL(None, use_errno=True)
_PROT_NONE = 0


def between_forbidden_pages(values: Tensor, at: str = "end") -> Tensor:
    """A copy of `values` whose last (at="end") or first (at="begin") byte touches a page that traps every access.

    A read beyond it is a segmentation fault: pytest's faulthandler names the test it came from.
    """
    size = values.numel() * values.element_size()
    middle = -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    region = mmap.mmap(-1, middle + 2 * mmap.PAGESIZE)
    offset = mmap.PAGESIZE + (middle - size if at == "end" else 0)
    copy = torch.frombuffer(region, dtype=values.dtype, count=values.numel(), offset=offset).view(values.shape)
    copy.copy_(values)
    begin = copy.data_ptr() - offset
    for page in (begin, begin + mmap.PAGESIZE + middle):
        _forbid(page, mmap.PAGESIZE)
    return copy


def forbidden(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor of which every byte traps."""
    size = math.prod(shape) * dtype.itemsize
    whole = torch.frombuffer(mmap.mmap(-1, size), dtype=dtype).view(shape)
    _forbid(whole.data_ptr(), size)
    return whole


def _forbid(begin: int, size: int) -> None:
    if _LIBC.mprotect(ctypes.c_void_p(begin), ctypes.c_size_t(size), _PROT_NONE):
        raise OSError(ctypes.get_errno(), "mprotect")


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal shapes, dtypes and bit patterns; NaN equals itself and -0 differs from +0."""
    integer = _INTEGERS[a.element_size()]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.view(integer), b.view(integer))


def same_bits_or_nan(a: Tensor, b: Tensor) -> bool:
    """same_bits, where any NaN equals any other: IEEE 754 leaves the payload of a sum open."""
    nan = a.isnan()
    return torch.equal(nan, b.isnan()) and same_bits(torch.where(nan, 0, a), torch.where(nan, 0, b))
