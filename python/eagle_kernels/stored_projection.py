"""A projection as a checkpoint stores it: what its readers get."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from . import checks

# The codes, or the weight if it is dense. No projection has two of them.
CODES = ("weight", "weight_packed", "qweight")


@dataclass(frozen=True)
class StoredProjection:
    """A weight of a checkpoint that is still to be read, with the names and the config that tell its format."""

    op: str  # which errors name
    # The file's names of all the projection's tensors but its bias, by what follows its path: `weight`, and
    # `lora_A.weight` of a module inside it.
    names: Mapping[str, str]
    read: Callable[[str], Tensor]  # the tensor of a name
    shape: tuple[int, int]  # [D, W] of the weight
    meaning: str  # of the shape, for errors
    config: Mapping[str, Any]  # the checkpoint's `quantization_config`, {} where it has none

    @property
    def codes_name(self) -> str:
        """The file's name of the tensor with the weight or its codes."""
        return next(self.names[parameter] for parameter in CODES if parameter in self.names)

    @property
    def path(self) -> str:
        return self.codes_name.rpartition(".")[0]

    def tensor(self, parameter: str) -> Tensor:
        """The tensor of a parameter that the projection has to have."""
        if parameter not in self.names:
            raise checks.error(ValueError, self.op, f"weights has {self.codes_name}", f"{parameter} beside it")
        checks.check_tensor(self.op, self.names[parameter], value := self.read(self.names[parameter]))
        return value
