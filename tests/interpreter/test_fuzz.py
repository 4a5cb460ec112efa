"""Any call of the Triton kernels, interpreted."""

from collections.abc import Callable

import pytest
from hypothesis import strategies as st

from eagle_kernels import ops
from fuzz_calls import draw_call
from fuzz_truth import truths_of
from test_fuzz import SMALL, check, last_call


@pytest.mark.parametrize("op", ops.__all__)
def test_any_call(
    op: str, for_any: Callable, triton_backend: str, request: pytest.FixtureRequest, record_property: Callable
) -> None:
    record_property("paths", ["triton, interpreted"])
    with last_call(f"interpreted-{request.node.name}") as remember:

        def check_interpreted(data: st.DataObject) -> None:
            call = draw_call(op, data, SMALL)
            remember(call)
            check(call, [] if call.overlaps else truths_of(call))

        for_any(check_interpreted, few=10)
