"""Random calls of the CUDA kernels, emulated."""

from collections.abc import Callable

import pytest

from eagle_kernels import ops
from test_fuzz import check_any_call


@pytest.mark.parametrize("op", ops.__all__)
def test_any_call(
    op: str, for_any: Callable, emulated: object, request: pytest.FixtureRequest, record_property: Callable
) -> None:
    check_any_call(op, "cuda, emulated", for_any, request, record_property, few=20)
