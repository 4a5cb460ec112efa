"""Every check of csrc has a counterpart in Python: what a primitive refuses, the public op refuses in Python's words.

`tests/bad_calls.py` has a call for every check (tests/test_primitives.py proves it); here each goes through the public
op, on the compiled backend and on plain torch.
"""

import re

import pytest
import torch

import eagle_kernels as ek
from backends import environment_of, fused_up_to, needs_compiled
from bad_calls import BAD_CALLS, CONTEXT_KV, GOOD, QUANTIZED, BadCall
from guards import same_bits
from primitives import tensors_of

PUBLIC = [call for call in BAD_CALLS if call.direct_only is None and "cpu" in call.backends]
OF_CPP = re.compile(r"\(\w+\.\w+:\d+\)$")  # how a message of csrc ends


def check_worded(call: BadCall, backend: str) -> None:
    torch.manual_seed(0)
    arguments = call.arguments()
    tensors = tensors_of(arguments)
    before = [tensor.clone() for tensor in tensors]
    worded = pytest.raises((TypeError, ValueError))
    with environment_of(EAGLE_KERNELS_BACKEND=backend), torch.no_grad(), worded as raised:
        getattr(ek, call.op)(**arguments)
    message = str(raised.value)
    assert message.startswith(f"{call.op}: ") and ", expected " in message, message
    assert not OF_CPP.search(message), message
    for tensor, kept in zip(tensors, before, strict=True):
        assert tensor.numel() == 0 or same_bits(tensor.contiguous(), kept.contiguous())


@needs_compiled
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("call", PUBLIC, ids=lambda call: call.id)
def test_every_failed_check_is_worded(call: BadCall, backend: str) -> None:
    check_worded(call, backend)


@needs_compiled
@pytest.mark.parametrize("call", [call for call in PUBLIC if call.op == "norm_concat_linear"], ids=lambda call: call.id)
def test_a_failed_check_of_the_two_step_plan_is_worded(call: BadCall) -> None:
    """There norm_concat's primitive checks the sources; its name must not appear in the message."""
    with fused_up_to(-1):
        check_worded(call, "cpu")


@pytest.mark.parametrize("op", [op for op in GOOD if op not in (QUANTIZED, CONTEXT_KV)])
def test_the_calls_that_the_bad_ones_change_are_good(op: str) -> None:
    arguments = BadCall(op, "good", lambda good: {}).arguments()
    with torch.no_grad():
        getattr(ek, op)(**arguments)
