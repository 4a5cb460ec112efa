"""How many copies of its inputs a benchmark row needs, so that every call finds them outside the caches.

A serving engine runs the rest of the model between two calls, so weights come from memory. With one copy of a 100 MB
weight a server CPU reads it from its last-level cache, and reports a bandwidth that no engine will see.
"""

import math
from dataclasses import dataclass
from pathlib import Path

# Of the memory that is free: the rest stays for the neighbours, the compiler and temporaries.
MEMORY_SHARE = 0.7
_FALLBACK_CACHE_BYTES = 64 << 20
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class TooLarge(Exception):
    """A row that does not fit into memory; the message says what it needs and what there is."""


@dataclass(frozen=True)
class Footprint:
    """Bytes of a row: what one call touches, what each copy occupies, and what there is once whatever the copies."""

    touched: int
    resident: int
    fixed: int


@dataclass(frozen=True)
class Rotation:
    """Copies of the inputs, and whether together they exceed the cache; `limit` says what kept them from it."""

    copies: int
    touched_bytes: int
    cache_bytes: int
    limit: str = ""

    @property
    def total_bytes(self) -> int:
        return self.copies * self.touched_bytes

    @property
    def is_cold(self) -> bool:
        return self.total_bytes > self.cache_bytes

    def reduced(self, copies: int, limit: str) -> "Rotation":
        return Rotation(copies, self.touched_bytes, self.cache_bytes, limit)


def plan_rotation(
    footprint: Footprint,
    cache_bytes: int,
    available_bytes: int,
    *,
    cache_factor: float = 1.25,
    most_copies: int = 1 << 16,
) -> Rotation:
    """At least two copies, as many as exceed the cache by a factor, no more than `most_copies` or fit into memory.

    By a factor, since replacement is not exactly least-recently-used and a VM shares the cache. A copy is a handful of
    tensor objects of about 1 kB, and a call in a CUDA graph: a one-row call is not worth more than some of them.

    Raises:
        TooLarge: two copies do not fit.
    """
    wanted = max(math.ceil(cache_factor * cache_bytes / footprint.touched), 2)
    budget = int(MEMORY_SHARE * available_bytes)
    fitting = (budget - footprint.fixed) // footprint.resident
    if fitting < 2:
        needed = footprint.fixed + 2 * footprint.resident
        raise TooLarge(f"needs {format_bytes(needed)}, {format_bytes(budget)} of memory may be used")
    limits = {wanted: "", most_copies: f"{most_copies} copies", fitting: f"{format_bytes(budget)} of memory"}
    copies = min(limits)
    return Rotation(copies, footprint.touched, cache_bytes, limits[copies] if copies < wanted else "")


def last_level_cache_bytes(directory: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Size of the outermost cache; 64 MiB where the system does not say."""
    levels = []
    for index in directory.glob("index*"):
        try:
            size = (index / "size").read_text().strip()
            levels.append((int((index / "level").read_text()), int(size[:-1]) * _UNITS[size[-1]]))
        except (OSError, ValueError, KeyError, IndexError):
            continue
    return max(levels)[1] if levels else _FALLBACK_CACHE_BYTES


def available_memory_bytes() -> int:
    """What can be allocated without swapping: the kernel's estimate, or less where a container's limit is lower."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) << 10
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return available
    return min(available, limit - used)


def format_bytes(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"
