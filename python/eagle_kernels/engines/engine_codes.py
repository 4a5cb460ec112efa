"""A linear layer that the engine itself keeps quantized, as the op reads it: the engine's own tensors, without a copy.

| the layer's tensors | their format for the op |
|---|---|
| weight e4m3, a [W, D] view of D rows in memory; weight_scale fp32, one in all or one per row | fp8_tensor, fp8_row |
| weight int8, a [W, D] view of D rows in memory; weight_scale fp32, one per row | int8_row |
| weight e4m3 [D, W]; weight_scale_inv or weight_scale [ceil(D/n), ceil(W/n)], weight_block_size [n, n] | fp8_block{n} |

`process_weights_after_loading` of Fp8LinearMethod, ModelOptLinearMethod and CompressedTensorsLinearMethod in vLLM 0.32
and 0.33 leaves these layouts where the kernel is CUTLASS, FlashInfer, DeepGEMM on sm_90 or torch._scaled_mm; so does
SGLang 0.5.23's Fp8LinearMethod for these kernels. Other layouts (Marlin's, AMX's and oneDNN's packed codes, scales of
DeepGEMM on sm_100, fnuz) do not fit and stay with the engine. With most of these kernels the engines also round
activations to 8 bits; the op keeps them in 16.
"""

import operator
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..quantized_weight import FORMATS, QuantizedWeight

_SCALES = ("weight_scale_inv", "weight_scale")


@dataclass(eq=False)
class EngineCodes:
    """Stands in for a linear layer of the engine: the same tensors, `weight` as a QuantizedWeight."""

    linear: Any
    _read: tuple[Any, Any] | None = field(default=None, init=False)  # the parameters that `_weight` was made from
    _places: tuple[int | None, ...] = field(default=(), init=False)  # and where their memory was
    _weight: QuantizedWeight | None = field(default=None, init=False)

    @property
    def weight(self) -> QuantizedWeight:
        """The layer's current weight, after updates in place and with new parameters too."""
        if self._weight is not None and is_compiling():
            return self._in_graph(self._weight)
        parameters = (self.linear.weight, _scales_of(self.linear))
        with torch._C.DisableTorchFunctionSubclass():  # vLLM's parameter class: `as_operand` in projection.py
            places = tuple(map(_place, parameters))  # `param.data = new` keeps the parameter, not its memory
        if (
            self._weight is None
            or self._read is None
            or any(map(operator.is_not, parameters, self._read))
            or places != self._places
        ):
            self._weight, self._read, self._places = _quantized(self.linear), parameters, places
        return self._weight

    def _in_graph(self, checked: QuantizedWeight) -> QuantizedWeight:
        """`weight` for Dynamo, which cannot compare addresses; the graph reads the layer's tensors in each call."""
        codes, scales = _codes_of(self.linear), _scales_of(self.linear).detach().reshape(checked.scales.shape)
        return QuantizedWeight.of_tensors(codes, scales, None, checked.format, checked.block)

    @property
    def bias(self) -> Tensor | None:
        return getattr(self.linear, "bias", None)

    @property
    def is_current(self) -> bool:
        """Whether the codes can still be read."""
        try:
            return self.weight is not None
        except (AttributeError, TypeError, ValueError):
            return False

    def like(self) -> Tensor:
        """An empty tensor with the dtype and device of the activations."""
        return torch.empty(0, dtype=self.linear.params_dtype, device=self.linear.weight.device)


def read(linear: Any, methods: Collection[str]) -> EngineCodes | None:
    """The codes of a layer of the engine; None where it has none, none in a layout of the module's table, or where LoRA
    wraps it.

    Args:
        methods: "module:class" of each quant_method that leaves the layouts above; a subclass might not.
    """
    method = type(getattr(linear, "quant_method", None))
    if hasattr(linear, "base_layer") or f"{method.__module__}:{method.__qualname__}" not in methods:  # LoRA's
        return None
    codes = EngineCodes(linear)
    return codes if codes.is_current else None


def _place(parameter: Any) -> int | None:
    return parameter.data_ptr() if isinstance(parameter, Tensor) else None


def _scales_of(linear: Any) -> Any:
    return next((scales for name in _SCALES if isinstance(scales := getattr(linear, name, None), Tensor)), None)


def _block_of(linear: Any) -> Any:
    return getattr(linear, "weight_block_size", None) or getattr(linear.quant_method, "weight_block_size", None)


def _codes_of(linear: Any) -> Tensor:
    """[D, W]."""
    codes = linear.weight.detach()
    return codes if _block_of(linear) else codes.t()


def _quantized(linear: Any) -> QuantizedWeight:
    """Raises TypeError, ValueError where the layer's tensors are in no known layout."""
    weight, scales = linear.weight, _scales_of(linear)
    if not isinstance(weight, Tensor) or scales is None or scales.dtype != torch.float32:
        raise TypeError("it holds no codes with fp32 scales")
    shape = (getattr(linear, "output_size_per_partition", linear.output_size), linear.input_size)
    block, codes = _block_of(linear), _codes_of(linear)
    if tuple(codes.shape) != shape or codes.stride(1) != 1:
        raise ValueError(f"its codes are {tuple(weight.shape)} with strides {weight.stride()}")
    if block and any(rows % block[0] for rows in getattr(linear, "logical_widths", shape[:1])[:-1]):
        raise ValueError("a block ends inside of a merged weight")
    return QuantizedWeight(codes, scales.detach(), _format(codes, scales, block))


def _format(codes: Tensor, scales: Tensor, block: Any) -> str:
    """The format that the layout implies; QuantizedWeight raises where the dtypes are not the format's."""
    if codes.dtype == torch.int8:
        return "int8_row"
    if not block:
        return "fp8_tensor" if scales.numel() == 1 else "fp8_row"
    name = f"fp8_block{block[0]}"
    if name not in FORMATS or FORMATS[name].block != tuple(block):
        raise ValueError(f"{block} of its codes share a scale")
    return name
