"""Any call of the Triton kernels, interpreted."""

from collections.abc import Callable

import pytest

from eagle_kernels import ops
from test_fuzz import check_any_call, check_any_store


@pytest.mark.parametrize("op", ops.__all__)
def test_any_call(
    op: str, for_any: Callable, triton_backend: str, request: pytest.FixtureRequest, record_property: Callable
) -> None:
    check_any_call(op, "triton, interpreted", for_any, request, record_property, few=10)


def test_any_store_of_context(
    for_any: Callable, triton_backend: str, request: pytest.FixtureRequest, record_property: Callable
) -> None:
    record_property("paths", ["triton, interpreted"])
    check_any_store([{}], for_any, request, few=10)
