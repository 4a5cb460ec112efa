"""What this machine's memory can do, measured in the same run as the ops it is compared with."""

from dataclasses import dataclass

import torch

from .measure import interleave
from .rotation import CACHE_FACTOR, MEMORY_SHARE


@dataclass(frozen=True)
class Rates:
    """Bytes per second: a copy counts what it reads and what it writes."""

    copy: float
    read: float


class MemoryBandwidth:
    """Two arrays, each larger than the last-level cache, that are copied and read on demand."""

    def __init__(self, cache_bytes: int, available_bytes: int) -> None:
        wanted = int(CACHE_FACTOR * cache_bytes)
        # A sixth of what may be used for each: the rows need the rest.
        self.array_bytes = min(wanted, int(MEMORY_SHARE * available_bytes) // 6) // 4 * 4
        self.exceeds_cache = self.array_bytes > cache_bytes
        self._source = torch.ones(self.array_bytes // 4, dtype=torch.int32)
        self._target = torch.zeros_like(self._source)

    @property
    def resident_bytes(self) -> int:
        return 2 * self.array_bytes

    def measure(self, seconds: float = 0.2) -> Rates:
        """Medians over about `seconds` each, with torch's current number of threads."""
        # Of torch's reductions, max over int32 streams fastest (32 GB/s where sum of fp32 reaches 30).
        calls = (lambda _: self._target.copy_(self._source), lambda _: self._source.max())
        copy, read = interleave(calls, 1, seconds)
        return Rates(2 * self.array_bytes / copy.median, self.array_bytes / read.median)
