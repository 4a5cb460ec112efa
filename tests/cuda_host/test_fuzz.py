"""Any call of the CUDA kernels, emulated."""

from collections.abc import Callable

import pytest
from hypothesis import strategies as st

from eagle_kernels import ops
from fuzz_calls import draw_call
from fuzz_truth import truths_of
from test_fuzz import SMALL, check, last_call


@pytest.mark.parametrize("op", ops.__all__)
def test_any_call(
    op: str, for_any: Callable, emulated: object, request: pytest.FixtureRequest, record_property: Callable
) -> None:
    record_property("paths", ["cuda, emulated"])
    with last_call(f"emulated-{request.node.name}") as remember:

        def check_emulated(data: st.DataObject) -> None:
            call = draw_call(op, data, SMALL)
            remember(call)
            check(call, [] if call.overlaps else truths_of(call))

        for_any(check_emulated, few=20)
