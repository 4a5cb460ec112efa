"""Whether a call may go straight to its kernel, or PyTorch has to see the registered op.

A registered op costs 5 us a call on a 2.6 GHz Xeon, as much as the smallest kernels. So a call goes through
`torch.ops.eagle_kernels` only if something may intercept it: torch.compile and torch.export, FakeTensor and other
tensor subclasses, dispatch modes, functorch. Every other call goes straight to the kernel of its plan.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from . import library
from .checks import error, requires_grad

_dispatch_modes = torch._C._len_torch_dispatch_stack
_is_tracing = torch._C._is_tracing  # by torch.jit.trace; torch.jit.is_tracing takes 0.1 us more
_functorch_level = torch._C._functorch.peek_interpreter_stack
_is_grad_enabled = torch.is_grad_enabled
OPERANDS = frozenset({Tensor, torch.nn.Parameter, type(None)})
# For the tensors that a kernel has written, as torch's own out= ops do: autograd then sees that a tensor saved for the
# backward has changed. 0.11 us, where torch.autograd.graph.increment_version takes 0.24. It skips inference tensors.
increment_version = torch._C._increment_version


def is_plain(*operands: Any) -> bool:
    """Whether nothing in PyTorch intercepts a call on these (tensors, None, or lists of them) and the first is a CPU or
    CUDA tensor. A list where an op takes a tensor passes here; the op's checks refuse it."""
    if is_compiling() or _dispatch_modes() or not _are_plain(*operands):
        return False
    if _is_tracing():
        because = "a trace has no call that goes past torch's dispatcher"
        got, expected = "torch.jit.trace is tracing the call", "torch.compile or torch.export"
        raise error(RuntimeError, "eagle_kernels", got, expected, because)
    if _functorch_level() is not None or forward_ad._current_level >= 0:
        return False
    first = operands[0]
    # A nested tensor of two dimensions has no shape from which to allocate the result.
    if not isinstance(first, Tensor) or not (first.is_cuda or first.is_cpu) or first.is_nested:
        return False
    return not _is_grad_enabled() or not requires_grad(_each(operands))


def _each(operands: Iterable[Any]) -> Iterator[Tensor | None]:
    for operand in operands:
        if type(operand) is list:
            yield from operand
        else:
            yield operand


def _have_plain_types(*operands: Any) -> bool:
    return OPERANDS.issuperset(map(type, _each(operands)))


# Compiled: 0.2 us for the operands of norm_concat_linear, where Python takes 0.6.
_are_plain = vars(library.primitives).get("are_plain", _have_plain_types)
