"""A parameter of a class like vLLM's `ModelWeightParameter`."""

from typing import Any, ClassVar

from torch import Tensor, nn


class Parameter(nn.Parameter):
    """Records every torch function that is called on it, property reads included."""

    seen: ClassVar[list[Any]] = []

    def __new__(cls, data: Tensor) -> "Parameter":
        return super().__new__(cls, data, requires_grad=False)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})
