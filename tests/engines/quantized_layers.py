"""A layer of a checkpoint in the layouts that quantizers write."""

import torch
from torch import Tensor

import eagle_kernels as ek
from test_int4_checkpoint import pack
from test_quantized_checkpoint import LAYOUTS

W4A16 = "pack-int4"  # compressed-tensors' pack-quantized, as DFlash2-W4A16 is


def tensors_of(layer: str, weight: Tensor, layout: str) -> dict[str, Tensor]:
    """layout: a key of LAYOUTS, or W4A16."""
    return in_integers(layer, weight)[0] if layout == W4A16 else written(layer, weight, layout)[0]


def in_integers(layer: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """(the layer's tensors by name, their dequantized weight in float64): symmetric, one scale for each 32 columns."""
    groups = weight.float().unflatten(1, (-1, 32))
    scales = (groups.abs().amax(2) / 7).bfloat16()
    scales = torch.where(scales == 0, 1.0, scales)
    q = (groups / scales.float().unsqueeze(2)).round().clamp(-8, 7)
    tensors = {
        "weight_packed": pack(q.flatten(1).int() + 8, 4),
        "weight_scale": scales.bfloat16(),
        "weight_shape": torch.tensor(weight.shape),
    }
    meant = (q.double() * scales.double().unsqueeze(2)).flatten(1)
    return {f"{layer}.{name}": tensor for name, tensor in tensors.items()}, meant


def written(layer: str, weight: Tensor, layout: str) -> tuple[dict[str, Tensor], ek.QuantizedWeight]:
    """(the layer's tensors by name, the weight that they stand for)."""
    format, tensors_of, _, _ = LAYOUTS[layout]
    quantized = ek.quantize(weight, format)
    tensors = {f"{layer}.{name}": tensor.contiguous() for name, tensor in tensors_of(quantized).items()}
    if tensors_of.__name__ == "deepseek":
        quantized = ek.QuantizedWeight(quantized.codes, tensors[f"{layer}.scale"], format)
    return tensors, quantized
