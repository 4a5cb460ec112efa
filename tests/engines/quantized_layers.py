"""A layer of a checkpoint as quantizers write it."""

from torch import Tensor

import eagle_kernels as ek
from test_quantized_checkpoint import LAYOUTS


def written(layer: str, weight: Tensor, layout: str) -> tuple[dict[str, Tensor], ek.QuantizedWeight]:
    """(its tensors by name, what they mean)."""
    format, tensors_of, _, _ = LAYOUTS[layout]
    quantized = ek.quantize(weight, format)
    tensors = {f"{layer}.{name}": tensor.contiguous() for name, tensor in tensors_of(quantized).items()}
    if tensors_of.__name__ == "deepseek":
        quantized = ek.QuantizedWeight(quantized.codes, tensors[f"{layer}.scale"], format)
    return tensors, quantized
