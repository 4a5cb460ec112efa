"""Argument checks and the one place that words an error: `op: argument is got, expected ..., because ...`.

TypeError for types and dtypes, ValueError for shapes and values, RuntimeError for state. Every check runs before the
first write, so a call that raises leaves `out` and every buffer as they were.
"""

import operator
from collections.abc import Iterable

import torch
from torch import Tensor

from .dispatch import requires_grad

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MAX_FP32 = torch.finfo(torch.float32).max


def error(kind: type[Exception], op: str, got: str, expected: str, because: str = "") -> Exception:
    """Build the exception; `got` starts with the argument: `weight has shape (4, 8)`."""
    return kind(f"{op}: {got}, expected {expected}" + (f", because {because}" if because else ""))


def shape_error(op: str, name: str, tensor: Tensor, expected: str, because: str = "") -> Exception:
    return error(ValueError, op, f"{name} has shape {tuple(tensor.shape)}", expected, because)


def check_int(op: str, name: str, value: object, at_least: int | None = None) -> int:
    """Any integer (Python's, numpy's) as an int."""
    try:
        number = operator.index(value)
    except TypeError:
        raise error(TypeError, op, f"{name} is a {type(value).__name__}", "an int") from None
    if at_least is not None and number < at_least:
        raise error(ValueError, op, f"{name} is {number}", f"at least {at_least}")
    return number


def check_number(op: str, name: str, value: object, expected: str = "a number") -> float:
    """Any real number (Python's, numpy's) as a float."""
    if isinstance(value, (str, bytes)):
        raise error(TypeError, op, f"{name} is a {type(value).__name__}", expected)
    try:
        return float(value)
    except (TypeError, ValueError):
        raise error(TypeError, op, f"{name} is a {type(value).__name__}", expected) from None


def check_eps(op: str, name: str, value: float) -> None:
    """What is added to a mean square, in fp32."""
    if not 0 <= value <= _MAX_FP32:
        raise error(ValueError, op, f"{name} is {value}", "a finite fp32 number of at least 0")


def check_sequence(op: str, name: str, value: object, expected: str = "a tensor or a sequence of tensors") -> list:
    """Any iterable as a list."""
    try:
        return list(value)
    except TypeError:
        raise error(TypeError, op, f"{name} is a {type(value).__name__}", expected) from None


def check_tensor(op: str, name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise error(TypeError, op, f"{name} is a {type(value).__name__}", "a torch.Tensor")


def check_dtype(op: str, name: str, tensor: Tensor, allowed: Iterable[torch.dtype], because: str = "") -> None:
    if tensor.dtype not in allowed:
        names = " or ".join(str(dtype) for dtype in allowed)
        raise error(TypeError, op, f"{name} has dtype {tensor.dtype}", names, because)


def check_device(op: str, name: str, tensor: Tensor, device: torch.device, like: str) -> None:
    if tensor.device != device:
        raise error(ValueError, op, f"{name} is on {tensor.device}", str(device), f"{like} is there")


def check_last_dim_contiguous(op: str, name: str, tensor: Tensor) -> None:
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise error(ValueError, op, f"{name} has strides {tensor.stride()}", "a last stride of 1")


def check_operand(op: str, name: str, tensor: object, like: Tensor, like_name: str, fp32_too: bool = False) -> None:
    """A tensor of the op's dtype (or fp32 where that is allowed too), on its device, last dimension contiguous."""
    check_tensor(op, name, tensor)
    allowed = (like.dtype, torch.float32) if fp32_too and like.dtype != torch.float32 else (like.dtype,)
    if tensor.dtype not in allowed:
        check_dtype(op, name, tensor, allowed, f"{like_name} has dtype {like.dtype}")
    if tensor.device != like.device:
        check_device(op, name, tensor, like.device, like_name)
    check_last_dim_contiguous(op, name, tensor)


def check_rows(op: str, name: str, tensor: object) -> None:
    """Rows of a supported dtype: [T, H], or one row [H]."""
    check_tensor(op, name, tensor)
    check_dtype(op, name, tensor, DTYPES)
    if tensor.dim() not in (1, 2):
        raise shape_error(op, name, tensor, "[T, H] or [H]")
    check_last_dim_contiguous(op, name, tensor)


def check_like(op: str, name: str, tensor: object, like: Tensor, like_name: str) -> None:
    """A tensor of the dtype, device and shape of another."""
    check_operand(op, name, tensor, like, like_name)
    if tensor.shape != like.shape:
        raise shape_error(op, name, tensor, str(tuple(like.shape)), f"{like_name} has that shape")


def check_vector(op: str, name: str, tensor: object, length: int, meaning: str, like: Tensor, like_name: str) -> None:
    """A [length] vector of the op's dtype or fp32: a gain or a bias."""
    check_operand(op, name, tensor, like, like_name, fp32_too=True)
    if tuple(tensor.shape) != (length,):
        raise shape_error(op, name, tensor, f"({length},) = ({meaning},)")


def check_ids(op: str, name: str, tensor: object) -> None:
    """One dimension of int32 or int64: token ids or row numbers."""
    check_tensor(op, name, tensor)
    check_dtype(op, name, tensor, (torch.int32, torch.int64))
    if tensor.dim() != 1:
        raise shape_error(op, name, tensor, "(N,)")


def check_inference(op: str, tensors: Iterable[Tensor | None]) -> None:
    """Refuse to break a training graph silently: no op here has a backward."""
    if torch.is_grad_enabled() and requires_grad(tensors):
        raise error(
            RuntimeError,
            op,
            "an input requires grad",
            "inputs without grad or a call under torch.no_grad()",
            "the op is inference only and would cut the gradient",
        )


def check_no_overlap(op: str, name: str, written: Tensor, reads: Iterable[tuple[str, Tensor | None]]) -> None:
    """Refuse an output that shares memory with an input. Slots of one packed buffer interleave and are fine."""
    if written.dim() == 2 and written.shape[0] > 1 and written.stride(0) < written.shape[1]:
        raise error(ValueError, op, f"{name} has strides {written.stride()}", "rows that do not overlap each other")
    begin, end = _byte_range(written)
    for read_name, read in reads:
        if read is None:
            continue
        read_begin, read_end = _byte_range(read)
        if begin < read_end and read_begin < end and not _interleave(written, read, read_begin - begin):
            because = "rows are written while others are read"
            raise error(ValueError, op, f"{name} overlaps {read_name}", "disjoint memory", because)


def _byte_range(tensor: Tensor) -> tuple[int, int]:
    """The first byte and the one behind the last; equal for an empty tensor."""
    begin = tensor.data_ptr()
    elements = tensor.numel()
    if elements and not tensor.is_contiguous():
        shape, strides = tensor.shape, tensor.stride()
        elements = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return begin, begin + elements * tensor.element_size()


def _interleave(a: Tensor, b: Tensor, distance: int) -> bool:
    """Whether rows of one pitch, `distance` bytes apart, lie beside each other: disjoint columns modulo the pitch."""
    if a.dim() != 2 or b.dim() != 2:
        return False
    a_row, b_row = a.shape[1] * a.element_size(), b.shape[1] * b.element_size()
    pitch = a.stride(0) * a.element_size()
    if pitch < max(a_row, b_row) or b.stride(0) * b.element_size() != pitch:
        return False
    distance %= pitch
    return a_row <= distance and distance + b_row <= pitch
