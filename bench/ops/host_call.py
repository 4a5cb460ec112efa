"""A line of `host`: a public call at sizes that leave its kernel next to nothing to do, and the chain it replaces."""

from collections.abc import Callable
from typing import NamedTuple

K, H, D, V = 3, 128, 128, 1000


class HostCall(NamedTuple):
    ours: Callable[[], object]
    chain: Callable[[], object]
    goal: float  # the largest share of the chain's time (docs/design.md, Goals); checked by eye, never by a test
