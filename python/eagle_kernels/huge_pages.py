"""Weights in huge pages, where Linux has them: 2 MB instead of 4 KB on x86.

While a weight streams through a core the address of each of its pages is looked up in memory, in a virtual machine in
two tables, and its reads wait. norm_concat_linear with K = 3, H = D = 4096 on a Xeon with AMX (virtual machine, two
cores), medians in ms in pages of 4 KB -> 2 MB:

| weights in turn | | T = 8 | T = 64 |
|---|---|---|---|
| 4 GB | bf16 | 4.9 -> 4.6 | 6.7 -> 6.1 |
| 4 GB | fp8_row | 3.1 -> 2.7 | 5.9 -> 4.8 |
| 600 MB, beside an L3 of 480 MB | fp8_row | 3.0 -> 2.1 | 5.9 -> 4.1 |

At T = 1 they are equal.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import mmap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from . import plan
from .checks import byte_range
from .dispatch import is_plain
from .quantized_weight import QuantizedWeight

_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
_MADV_COLLAPSE = 25  # since Linux 6.1; `mmap` has no name for it


def mode() -> str:
    """When Linux gives huge pages out: always, madvise or never; unknown where it does not say."""
    try:
        chosen = _chosen(_SETTINGS / "enabled")
        of_size = _SETTINGS / f"hugepages-{_page_bytes() >> 10}kB" / "enabled"  # since Linux 6.8
        own = _chosen(of_size) if of_size.exists() else "inherit"
    except OSError:
        return "unknown"
    return chosen if own == "inherit" else own


def _chosen(path: Path) -> str:
    return path.read_text().partition("[")[2].partition("]")[0]


def _page_bytes() -> int:
    return int((_SETTINGS / "hpage_pmd_size").read_text())


def use_huge_pages(*weights: Tensor | QuantizedWeight | None) -> None:
    """Have Linux put weights into huge pages, those between a tensor's first element and its last: addresses and values
    stay.

    It happens now from Linux 6.1 on (100 MB in 0.2 s), before that in the background. Nothing happens, and nothing is
    raised, for tensors that have no memory of a CPU, under EAGLE_KERNELS_HUGE_PAGES=0, and where Linux is set to give
    no huge pages or has none left.
    """
    if is_compiling() or not plan.SETTINGS.huge_pages or (found := _madvise_and_page()) is None:
        return
    madvise, page = found
    parts = (weight.tensors if isinstance(weight, QuantizedWeight) else (weight,) for weight in weights)
    for tensor in itertools.chain.from_iterable(parts):
        first, last = _memory_of(tensor)
        begin, end = -(-first // page) * page, last // page * page
        if begin < end:
            for advice in (mmap.MADV_HUGEPAGE, _MADV_COLLAPSE):  # an older Linux refuses the second
                madvise(begin, end - begin, advice)


@torch.no_grad()
def _memory_of(tensor: Tensor | None) -> tuple[int, int]:
    """The addresses of a tensor's first element and behind its last one; (0, 0) where it has none on a CPU."""
    if tensor is None or not is_plain(tensor) or not tensor.is_cpu or tensor.layout is not torch.strided:
        return 0, 0
    # The address is 0 for memory that was freed, and for a zero that autograd has made: both have sizes.
    return (0, 0) if tensor.data_ptr() == 0 else byte_range(tensor)


@functools.cache
def _madvise_and_page() -> tuple[Any, int] | None:
    """libc's madvise and the bytes of a huge page; None without them."""
    if not hasattr(mmap, "MADV_HUGEPAGE") or mode() not in ("always", "madvise"):
        return None
    try:
        page, madvise = _page_bytes(), ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return madvise, page
