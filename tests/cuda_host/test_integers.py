"""Calls on integers, whose arithmetic is exact: the emulation is compared with int64, and a GPU with the emulation
(tests/gpu/test_emulation.py)."""

import pytest
import torch

from cuda_host.integers import CALLS, Call
from eagle_kernels.ops.sources import gather_rows
from guards import same_bits


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.id)
def test_integers_are_exact(call: Call, emulated: object) -> None:
    chunks, residuals, weight, indices = call.operands()
    outputs = call.run(emulated)
    first = chunks[0].double()
    if call.op.startswith("norm_concat"):
        # The mean square is 4 in every chunk and over all of them, except in rows out of range, which are zero.
        values = [c + r if call.norm == "none" else c / 2 for c, r in zip(chunks, residuals, strict=True)]
        x = torch.cat([gather_rows(value, indices) for value in values], -1).double()
        weight = call.quantized().dequantize(torch.float64) if call.format else weight
        expected = [x @ weight.double().t() if call.D else x]
    elif call.op == "capture_hidden":
        total = first + first.flip(0)
        expected = [total, total.square().sum(-1)]
    elif call.op == "add_rms_norm":
        expected = [first / 2, first * 2]
    else:
        expected = [gather_rows(first, indices) * 3]
    for output, wanted in zip(outputs, expected, strict=True):
        assert same_bits(output + 0.0, wanted.to(output.dtype) + 0.0)  # a sum may be -0 where int64 has no sign
