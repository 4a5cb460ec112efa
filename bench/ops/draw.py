"""Random values for `check`, the call that is made of them, and what its outputs must be."""

import math
import random
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..accuracy import relative_rms
from ..cli_types import DTYPE_NAMES, DTYPES

Chosen = TypeVar("Chosen")

ROWS = (0, 1, 2, 3, 7, 16, 33, 129)
WIDTHS = (1, 7, 16, 64, 100, 255, 896, 1152)


@dataclass(frozen=True)
class Expected:
    """What one output must be: the bits of `value`, or within `bound` of it."""

    label: str
    value: Tensor
    bound: float | None = None  # None: bit for bit

    def error(self, actual: Tensor) -> float:
        """The relative RMS error; for bit-exact outputs 0 or inf."""
        if self.bound is None:
            return 0.0 if torch.equal(_bits(actual), _bits(self.value)) else math.inf
        return relative_rms(actual, self.value)


def _bits(tensor: Tensor) -> Tensor:
    """The tensor as integers: as floats -0.0 would equal 0.0."""
    return tensor.contiguous().view(torch.int32 if tensor.element_size() == 4 else torch.int16)


@dataclass(frozen=True)
class RandomCall:
    """One call of an op, the outputs to look at, and what they must be."""

    arguments: tuple
    options: Mapping[str, Any]
    expected: list[Expected]
    written: list["Guarded"] = field(default_factory=list)  # tensors that the call fills through `out` and the like


class Guarded:
    """A poisoned output that is a view into a wider buffer; what surrounds the view has to survive the call."""

    def __init__(self, draw: "Draw", *shape: int, dtype: torch.dtype) -> None:
        rows, columns = (1, *shape)[-2:]
        margin = draw.random.choice((0, 3, 8))
        self._buffer = torch.full((rows + 2, columns + 2 * margin), math.nan, dtype=dtype)
        self._inner = (slice(1, rows + 1), slice(margin, margin + columns))
        self.view = self._buffer[self._inner] if len(shape) == 2 else self._buffer[self._inner][0]

    def reset(self) -> None:
        self._buffer.fill_(math.nan)

    def is_intact(self) -> bool:
        outside = torch.ones_like(self._buffer, dtype=torch.bool)
        outside[self._inner] = False
        return bool(self._buffer[outside].isnan().all())


class Draw:
    """Random values of one case; everything that was drawn is kept by name, to be printed with a failure."""

    def __init__(self, op: str, seed: int, number: int) -> None:
        key = f"{op}-{seed}-{number}"
        self.random = random.Random(key)
        self._generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
        self.drawn: dict[str, object] = {}

    def choose(self, name: str, *values: Chosen) -> Chosen:
        value = self.random.choice(values)
        self.drawn[name] = DTYPE_NAMES.get(value, value) if isinstance(value, torch.dtype) else value
        return value

    def width(self) -> int:
        return self.random.choice(WIDTHS)

    def dtype(self) -> torch.dtype:
        return self.choose("dtype", *DTYPES.values())

    def normal(self, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=self._generator) * scale).to(dtype)

    def integers(self, low: int, high: int, count: int, dtype: torch.dtype) -> Tensor:
        return torch.randint(low, max(high, low + 1), (count,), generator=self._generator).to(dtype)

    def rows(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Hidden states [rows, columns], often a slice of a wider buffer whose other columns are NaN."""
        margin = self.random.choice((0, 0, 1, 8))
        buffer = torch.full((rows, columns + 2 * margin), math.nan, dtype=dtype)
        values = torch.randn(rows, columns, generator=self._generator)
        # fp16 ends at 65504, and a product without a norm has to stay below it.
        outlier, spread = (50.0, 1.0) if dtype == torch.float16 else (500.0, 4.0)
        values[:, self.random.randrange(columns)] *= self.random.choice((1.0, outlier))
        values *= torch.exp2(torch.randn(rows, 1, generator=self._generator).clamp(-2, 2) * spread)
        view = buffer[:, margin : margin + columns]
        view.copy_(values)
        return view

    def gain(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return self.normal(*shape, dtype=self.random.choice((dtype, torch.float32)), scale=0.3) + 1

    def index(self, T: int, N: int, dtype: torch.dtype) -> Tensor:
        """N row numbers, some of them outside [0, T)."""
        index = self.integers(-1, T + 1, N, dtype)
        far = torch.iinfo(dtype)
        for position in range(0, N, 5):
            index[position] = self.random.choice((-1, T, far.min, far.max))
        return index
