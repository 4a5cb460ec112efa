"""Argument checks and the one place that words an error: `op: argument is got, expected ..., because ...`.

TypeError for types and dtypes, ValueError for shapes and values, RuntimeError for state. Every check runs before the
first write, so a call that raises leaves `out` and every buffer as they were.
"""

import contextlib
import inspect
import operator
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]  # no stub of torch's has it

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_WIDTH = 2**31 - 4096  # K*H: csrc/sources.cpp
_is_of_functorch = torch._C._functorch.is_functorch_wrapped_tensor
_MAX_FP32 = torch.finfo(torch.float32).max


def error(kind: type[Exception], op: str, got: str, expected: str, because: str = "") -> Exception:
    """Build the exception; `got` starts with the argument: `weight has shape (4, 8)`."""
    return kind(f"{op}: {got}, expected {expected}" + (f", because {because}" if because else ""))


def shape_error(op: str, name: str, tensor: Tensor, expected: str, because: str = "") -> Exception:
    return error(ValueError, op, f"{name} has shape {tuple(tensor.shape)}", expected, because)


def codes_error(op: str, name: str, tensor: object, because: str = "codes need their scale") -> Exception | None:
    """The error of a tensor whose dtype is that of codes or integers: torch would cast them to numbers. Else None."""
    if not isinstance(tensor, Tensor) or (tensor.itemsize > 1 and tensor.is_floating_point()):
        return None
    got = f"{name} has dtype {tensor.dtype}"
    return error(TypeError, op, got, "a floating-point dtype of 16 bits or more", because)


def _is_refused(value: Any) -> bool:
    """Whether it is no real number although float() may take it: a bool, a string, a complex number, a time; numpy's
    and torch's too."""
    dtype = getattr(value, "dtype", None)
    if isinstance(dtype, torch.dtype):
        return dtype is torch.bool or dtype.is_complex
    is_text = isinstance(value, (str, bytes, bytearray, memoryview))
    return is_text or isinstance(value, bool) or getattr(dtype, "kind", None) in ("b", "c", "U", "S", "m", "M")


def check_int(op: str, name: str, value: Any, at_least: int | None = None) -> int:
    """Any integer of 64 bits (Python's, numpy's) as an int; a bool is refused."""
    number: Any = None
    # `index` would make a constant of a traced size.
    if isinstance(value, torch.SymInt) or type(value) is int:
        number = value
    elif not _is_refused(value):
        with contextlib.suppress(TypeError, RuntimeError):  # RuntimeError: a meta tensor
            number = operator.index(value)
    if number is None:
        raise error(TypeError, op, f"{name} is a {type(value).__name__}", "an int")
    if not -(2**63) <= number < 2**63:  # torch's sizes are such
        raise error(ValueError, op, f"{name} is beyond 64 bits", "an int of 64 bits")
    if at_least is not None and number < at_least:
        raise error(ValueError, op, f"{name} is {number}", f"at least {at_least}")
    return number


def check_sizes(op: str, config: object, *names: str) -> None:
    """The fields of a frozen config that are at least 1, which become Python's ints: a product of numpy's may wrap."""
    for name in names:
        object.__setattr__(config, name, check_int(op, name, getattr(config, name), at_least=1))


def check_number(op: str, name: str, value: Any, expected: str = "a number") -> float:
    """Any real number (Python's, numpy's, torch's) as a float; `_is_refused` says what is none."""
    if type(value) is float:
        return value
    if _is_refused(value):
        raise error(TypeError, op, f"{name} is a {type(value).__name__}", expected)
    try:
        return float(value)
    except OverflowError:
        raise error(ValueError, op, f"{name} is beyond a float", expected) from None
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several values
        raise error(TypeError, op, f"{name} is a {type(value).__name__}", expected) from None


def check_bool(op: str, name: str, value: object) -> bool:
    """True or False only: the string "false" would count as true."""
    if not isinstance(value, bool):
        raise error(TypeError, op, f"{name} is {value!r}", "True or False")
    return value


def check_type(op: str, name: str, value: object, kind: type, expected: str) -> None:
    if not isinstance(value, kind):
        raise error(TypeError, op, f"{name} is a {type(value).__name__}", expected)


def check_unwrapped(op: str, name: str, layer: Any, kind: str = "a linear layer") -> None:
    """Refuse a layer with an adapter around it, whose weight is that of the layer inside: PEFT's lora.Linear."""
    if hasattr(layer, "base_layer"):
        got, because = f"{name} is that of a {type(layer).__name__}'s base_layer", "its own forward would be left out"
        raise error(RuntimeError, op, got, f"{kind}: merge the adapter", because)


def check_factory(op: str, dtype: object, device: Any) -> None:
    """What a constructor allocates with; None is torch's default."""
    if dtype is not None and dtype not in DTYPES:
        raise error(TypeError, op, f"dtype is {dtype!r}", " or ".join(map(str, DTYPES)))
    if device is not None:
        as_device(op, device)


def as_device(op: str, device: Any) -> torch.device:
    try:
        return torch.device(device)
    except (TypeError, ValueError, RuntimeError) as failure:
        is_name = isinstance(device, (str, int))
        kind, because = (ValueError, f"torch says: {failure}") if is_name else (TypeError, "")
        raise error(kind, op, f"device is {device!r}", "a torch.device or the name of one", because) from None


def bind(op: str, signature: inspect.Signature, args: tuple, kwargs: dict, partial: bool = False) -> Any:
    """The arguments of a call by name; `partial`: some may be missing."""
    known = signature.parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in known.values())
    if not takes_any and (unknown := [name for name in kwargs if name not in known]):
        raise error(TypeError, op, f"{', '.join(unknown)} is no argument", f"some of {list(known)}")
    try:
        return (signature.bind_partial if partial else signature.bind)(*args, **kwargs)
    except TypeError as failure:
        raise error(TypeError, op, str(failure), f"some of {list(known)}") from None


def check_eps(op: str, name: str, value: float) -> None:
    """An eps is added to a mean square in fp32, so it has to be finite there and not negative."""
    if not 0 <= value <= _MAX_FP32:
        raise error(ValueError, op, f"{name} is {value}", "a finite fp32 number of at least 0")


def check_finite(op: str, name: str, value: float) -> None:
    """A number that the kernels take in fp32 has to be finite there."""
    if not abs(value) <= _MAX_FP32:  # NaN too
        raise error(ValueError, op, f"{name} is {value}", "a finite fp32 number")


def check_width(op: str, num_chunks: int, hidden_size: int) -> None:
    """K*H has to fit int32, which counts columns; call this before allocating for it."""
    if num_chunks * hidden_size > MAX_WIDTH:
        got = f"K={num_chunks} chunks of H={hidden_size} have {num_chunks * hidden_size} columns"
        raise error(ValueError, op, got, f"at most {MAX_WIDTH}", "int32 counts them")


def check_sequence(op: str, name: str, value: Any, expected: str = "a tensor or a sequence of tensors") -> list:
    """Any iterable but a string, as a list. What a generator raises is the caller's and comes out as it is."""
    if type(value) is list:
        return [*value]
    try:
        values = None if isinstance(value, str) else iter(value)
    except (TypeError, RuntimeError):  # RuntimeError: a nested tensor
        values = None
    if values is None or isinstance(value, (set, frozenset)):  # which have no order
        raise error(TypeError, op, f"{name} is a {type(value).__name__}", expected)
    return list(values)


def check_file(op: str, file: Path, expected: str) -> None:
    """A file, or nothing at all: a pipe would be waited for, and a broken link pass for a file that is not there."""
    if file.is_file() or not (file.exists() or file.is_symlink()):
        return
    because = "it is a folder" if file.is_dir() else "it is neither a file nor a folder"
    if not file.exists():
        because = f"it is a link to {os.readlink(file)!r}, which is not there"
    raise error(ValueError, op, f"{str(file)!r} cannot be read", expected, because)


def check_tensor(op: str, name: str, value: object) -> None:
    """A tensor whose values lie in memory as its strides say."""
    check_strided(op, name, value)
    if not is_compiling() and _is_released(value):
        because = "its storage was released, as FSDP does between uses"
        raise error(ValueError, op, f"{name} has no memory", "a tensor with its values", because)


def check_strided(op: str, name: str, value: object) -> None:
    """All that `check_tensor` asks of a tensor but memory, where an op will ask for that: its storage takes 0.35 us."""
    if not isinstance(value, Tensor):
        raise error(TypeError, op, f"{name} is a {type(value).__name__}", "a torch.Tensor")
    if isinstance(value, UninitializedTensorMixin):  # which has no shape
        raise error(TypeError, op, f"{name} is a {type(value).__name__}", "an initialized tensor")
    if value.is_nested:
        raise error(TypeError, op, f"{name} is a nested tensor", "a dense one")
    if value.layout is not torch.strided:
        raise error(TypeError, op, f"{name} has layout {value.layout}", "torch.strided")
    if not is_compiling() and (value.is_neg() or value._is_zerotensor()):  # Dynamo breaks the graph at both
        raise error(TypeError, op, f"{name} is a lazy view", "a tensor with memory of its own values: its clone()")


def _is_released(tensor: Any) -> bool:
    """Whether no storage is behind the elements, as is right for a subclass and for the tensors of functorch."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or _is_of_functorch(tensor):
        return False
    return tensor.untyped_storage().nbytes() == 0 and tensor.numel() > 0


def check_dtype(op: str, name: str, tensor: Tensor, allowed: Iterable[torch.dtype], because: str = "") -> None:
    if tensor.dtype not in allowed:
        names = " or ".join(str(dtype) for dtype in allowed)
        raise error(TypeError, op, f"{name} has dtype {tensor.dtype}", names, because)


def check_device(op: str, name: str, tensor: Tensor, device: torch.device, like: str) -> None:
    if tensor.device != device:
        raise error(ValueError, op, f"{name} is on {tensor.device}", str(device), f"{like} is there")


def check_last_dim_contiguous(op: str, name: str, tensor: Tensor) -> None:
    # The stride first: a trace knows it, and may not know whether there are two rows.
    if tensor.dim() and tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise error(ValueError, op, f"{name} has strides {tensor.stride()}", "a last stride of 1")


def check_operand(op: str, name: str, tensor: Any, like: Tensor, like_name: str, fp32_too: bool = False) -> None:
    """A tensor of the op's dtype (or fp32 where that is allowed too), on its device, last dimension contiguous."""
    check_tensor(op, name, tensor)
    allowed = (like.dtype, torch.float32) if fp32_too and like.dtype != torch.float32 else (like.dtype,)
    if tensor.dtype not in allowed:
        check_dtype(op, name, tensor, allowed, f"{like_name} has dtype {like.dtype}")
    if tensor.device != like.device:
        check_device(op, name, tensor, like.device, like_name)
    check_last_dim_contiguous(op, name, tensor)


def check_rows(op: str, name: str, tensor: Any, *, or_streams: bool = False) -> None:
    """Rows of a supported dtype: [T, H], or one row [H]; with `or_streams` rows of S streams [T, S, H] too."""
    check_tensor(op, name, tensor)
    check_dtype(op, name, tensor, DTYPES)
    if tensor.dim() not in ((1, 2, 3) if or_streams else (1, 2)):
        raise shape_error(op, name, tensor, "[T, H], [T, S, H] or [H]" if or_streams else "[T, H] or [H]")
    check_last_dim_contiguous(op, name, tensor)


def check_matrix(op: str, name: str, tensor: Tensor) -> None:
    """Rows as the registered ops take them; the public ops turn a single row into a matrix first."""
    if tensor.dim() != 2:
        raise shape_error(op, name, tensor, "(T, H)")


def check_like(op: str, name: str, tensor: Any, like: Tensor, like_name: str) -> None:
    """A tensor of the dtype, device and shape of another."""
    check_operand(op, name, tensor, like, like_name)
    if tensor.shape != like.shape:
        raise shape_error(op, name, tensor, str(tuple(like.shape)), f"{like_name} has that shape")


def check_vector(op: str, name: str, tensor: Any, length: int, meaning: str, like: Tensor, like_name: str) -> None:
    """A [length] vector of the op's dtype or fp32: a gain or a bias."""
    check_operand(op, name, tensor, like, like_name, fp32_too=True)
    if tuple(tensor.shape) != (length,):
        raise shape_error(op, name, tensor, f"({length},) = ({meaning},)")


def check_ids(op: str, name: str, tensor: Any) -> None:
    """One dimension of int32 or int64: token ids or row numbers."""
    check_tensor(op, name, tensor)
    check_dtype(op, name, tensor, (torch.int32, torch.int64))
    if tensor.dim() != 1:
        raise shape_error(op, name, tensor, "(N,)")


def requires_grad(operands: Iterable[Tensor | None]) -> bool:
    return any(operand is not None and operand.requires_grad for operand in operands)


def has_tangent(operands: Iterable[Tensor | None]) -> bool:
    """Whether one of these has a tangent of forward-mode differentiation, which torch.no_grad does not turn off."""
    if forward_ad._current_level < 0 or not torch._C._is_fwd_grad_enabled():
        return False
    return any(operand is not None and forward_ad.unpack_dual(operand).tangent is not None for operand in operands)


def check_inference(op: str, tensors: Sequence[Tensor | None]) -> None:
    """Refuse to break a training graph silently: no op here has a backward."""
    if torch.is_grad_enabled() and requires_grad(tensors):
        raise error(
            RuntimeError,
            op,
            "an input requires grad",
            "inputs without grad or a call under torch.no_grad()",
            "the op is inference only and would cut the gradient",
        )
    if has_tangent(tensors):
        expected = "inputs that forward-mode differentiation does not follow"
        raise error(RuntimeError, op, "an input has a tangent", expected, "the op is inference only and would drop it")


def check_no_overlap(op: str, name: str, written: Tensor, others: Iterable[tuple[str, Tensor | None]]) -> None:
    """Refuse an output that shares memory with another operand. Slots of one packed buffer interleave and are fine."""
    width = written.shape[1] if written.dim() == 2 else 1
    if written.shape[0] > 1 and written.stride(0) < width:
        raise error(ValueError, op, f"{name} has strides {written.stride()}", "rows that do not overlap each other")
    rows = _byte_rows(written)
    for other_name, other in others:
        if other is not None and any(_overlap(rows, _byte_rows(part)) for part in _streams(other)):
            because = "rows are written while others are read"
            raise error(ValueError, op, f"{name} overlaps {other_name}", "disjoint memory", because)


def byte_range(tensor: Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first element and behind its last one, gaps included; (0, 0) where it has none."""
    if tensor.numel() == 0:
        return 0, 0
    begin = tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()


def _streams(tensor: Tensor) -> Sequence[Tensor]:
    """Each stream [T, H] of a tensor [T, S, H] that is not dense; else the tensor itself."""
    return tensor.unbind(1) if tensor.dim() == 3 and not tensor.is_contiguous() else (tensor,)


def _byte_rows(tensor: Tensor) -> tuple[int, int, int, int]:
    """(address, rows, bytes of a row, bytes from row to row) of a tensor; a dense vector is one row."""
    begin, size = tensor.data_ptr(), tensor.element_size()
    if tensor.dim() == 2:
        return begin, tensor.shape[0], tensor.shape[1] * size, tensor.stride(0) * size
    if tensor.is_contiguous():
        return begin, 1, tensor.numel() * size, 0
    return begin, tensor.shape[0], size, tensor.stride(0) * size


def _overlap(a: tuple[int, int, int, int], b: tuple[int, int, int, int]) -> bool:
    """As `overlap` of csrc/checks.cpp. Rows that interleave at one pitch, like a buffer's slots, do not overlap."""
    (a_begin, a_rows, a_bytes, a_pitch), (b_begin, b_rows, b_bytes, b_pitch) = a, b
    if not (a_rows and a_bytes and b_rows and b_bytes):
        return False
    if a_begin + (a_rows - 1) * a_pitch + a_bytes <= b_begin or b_begin + (b_rows - 1) * b_pitch + b_bytes <= a_begin:
        return False
    if (a_rows == 1 and b_rows == 1) or (a_rows > 1 and b_rows > 1 and a_pitch != b_pitch):
        return True
    pitch = a_pitch if a_rows > 1 else b_pitch
    distance = (b_begin - a_begin) % pitch if pitch >= max(a_bytes, b_bytes) else 0
    return distance < a_bytes or distance + b_bytes > pitch
