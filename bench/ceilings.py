"""What this machine's memory and matrix units can do, measured in the same run as the ops it is compared with."""

from dataclasses import dataclass

import torch

from .rotation import MEMORY_SHARE
from .timers import TIMERS, time_variants
from .workloads import Variant

_SECONDS = {"cpu": 0.2, "cuda": 0.05}

# Rows, columns and depth of the product whose rate is the ceiling: large enough for the best kernels to reach it, and
# on a CPU small enough for 0.2 s on two cores without matrix units.
_MATMUL = {"cuda": (8192, 8192, 8192), "cpu": (512, 4096, 4096)}


@dataclass(frozen=True)
class Rates:
    """Bytes per second, a copy counting what it reads and what it writes; floating-point operations per second."""

    copy: float
    read: float
    matmul: float

    def floor_seconds(self, traffic: int, flops: int) -> float:
        """The roofline: no implementation can be much faster than these bytes and these operations take.

        Bytes at the better of the two rates: a product mostly reads.
        """
        return max(traffic / max(self.copy, self.read), flops / self.matmul if flops else 0.0)


class Ceilings:
    """Two arrays, each larger than the last-level cache, that are copied and read on demand; a product per dtype."""

    def __init__(self, device: str, cache_bytes: int, cache_factor: float, available_bytes: int) -> None:
        # A GPU's copy reaches its rate from some 500 MB on.
        wanted = max(int(cache_factor * cache_bytes), 1 << 29 if device == "cuda" else 0)
        # A sixth of what may be used for each: the rows need the rest.
        self.array_bytes = min(wanted, int(MEMORY_SHARE * available_bytes) // 6) // 4 * 4
        self.exceeds_cache = self.array_bytes > cache_bytes
        self._timer = TIMERS[device][0]
        self._device = device
        self._source = torch.ones(self.array_bytes // 4, dtype=torch.int32, device=device)
        self._target = torch.zeros_like(self._source)
        self._matmul: dict[torch.dtype, float] = {}

    def measure(self, dtype: torch.dtype, seconds: float | None = None) -> Rates:
        """Medians over about `seconds` each (0.2; 0.05 on a GPU), with torch's current number of threads.

        The product is measured once per dtype: at full power it would lower the clocks of every row beside it.
        """
        seconds = _SECONDS[self._device] if seconds is None else seconds
        if dtype not in self._matmul:
            self._matmul[dtype] = self._measure_matmul(dtype, seconds)
        # Of torch's reductions on a CPU, max over int32 streams fastest (32 GB/s where sum of fp32 reaches 30).
        calls = (lambda _: self._target.copy_(self._source), lambda _: self._source.max())
        copy, read = time_variants(self._timer, [Variant("", call, 1) for call in calls], 1, seconds)
        return Rates(2 * self.array_bytes / copy.median, self.array_bytes / read.median, self._matmul[dtype])

    def _measure_matmul(self, dtype: torch.dtype, seconds: float) -> float:
        M, N, K = _MATMUL[self._device]
        # Random: the multipliers draw less power on zeros, and the clocks go up (894 against 788 TFLOP/s on an H200).
        a, b = (torch.randn(rows, K, device=self._device).to(dtype) for rows in (M, N))
        out = torch.empty(M, N, dtype=dtype, device=self._device)
        product = Variant("", lambda _: torch.mm(a, b.t(), out=out), 1)
        product.call(0)
        (samples,) = time_variants(self._timer, [product], 1, seconds)
        return 2 * M * N * K / samples.median
