"""A layer of a checkpoint in the layouts that quantizers write."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

import eagle_kernels as ek
from test_int4_checkpoint import AWQ_ORDER, pack
from test_quantized_checkpoint import LAYOUTS

W4A16 = "pack-int4"  # compressed-tensors' pack-quantized, as DFlash2-W4A16 is
GPTQ, AWQ = "gptq", "awq"
AUTO_GPTQ, AUTO_AWQ = "auto_round:auto_gptq", "auto_round:auto_awq"  # auto-round's, with the tensors of those
# The dtype of their scales.
IN_GROUPS = {W4A16: torch.bfloat16, **dict.fromkeys((GPTQ, AWQ, AUTO_GPTQ, AUTO_AWQ), torch.float16)}
GROUP = 32  # columns that share a scale, in all of them


def tensors_of(layer: str, weight: Tensor, layout: str) -> dict[str, Tensor]:
    """layout: a key of LAYOUTS or IN_GROUPS."""
    return (in_integers if layout in IN_GROUPS else written)(layer, weight, layout)[0]


def in_integers(layer: str, weight: Tensor, layout: str) -> tuple[dict[str, Tensor], Tensor]:
    """(the layer's tensors by name, their dequantized weight in float64): zeros are 8, but for AWQ 6 to 9."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    is_awq = layout in (AWQ, AUTO_AWQ)
    most = 6 if is_awq else 7
    scales = (groups.abs().amax(2) / most).to(IN_GROUPS[layout])
    scales = torch.where(scales == 0, 1.0, scales)
    q = (groups / scales.float().unsqueeze(2)).round().clamp(-most, most)
    zeros = torch.full(scales.shape, 8)
    if is_awq:  # the zero of another row or group would give other numbers
        zeros = 6 + (torch.arange(len(zeros))[:, None] + torch.arange(zeros.shape[1])) % 4
    codes = (q.int() + zeros.unsqueeze(2)).flatten(1)
    if layout == W4A16:
        tensors = {"weight_packed": pack(codes, 4), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}
    elif not is_awq:
        tensors = {"qweight": pack(codes, 4).t(), "qzeros": pack(zeros.t() - 1, 4), "scales": scales.t()}
        tensors["g_idx"] = torch.arange(weight.shape[1], dtype=torch.int32) // GROUP
    else:
        tensors = {"qweight": pack(codes.t(), 4, AWQ_ORDER), "qzeros": pack(zeros.t(), 4, AWQ_ORDER)}
        tensors["scales"] = scales.t()
    meant = (q.double() * scales.double().unsqueeze(2)).flatten(1)
    return {f"{layer}.{name}": tensor.contiguous() for name, tensor in tensors.items()}, meant


def config_of(layout: str) -> dict:
    """quantization_config of a layout of IN_GROUPS, as its tool writes it."""
    grouped = {"quant_method": layout, "bits": 4, "group_size": GROUP}
    by_auto_round = grouped | {"quant_method": "auto-round", "data_type": "int", "packing_format": layout}
    return {
        W4A16: {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        GPTQ: {**grouped, "desc_act": False, "sym": True},
        AWQ: {**grouped, "zero_point": True, "version": "gemm"},
        AUTO_GPTQ: {**by_auto_round, "sym": True},
        AUTO_AWQ: {**by_auto_round, "sym": False},
    }[layout]


def written(layer: str, weight: Tensor, layout: str) -> tuple[dict[str, Tensor], ek.QuantizedWeight]:
    """(the layer's tensors by name, the weight that they stand for)."""
    format, tensors_of, _, _ = LAYOUTS[layout]
    quantized = ek.quantize(weight, format)
    tensors = {f"{layer}.{name}": tensor.contiguous() for name, tensor in tensors_of(quantized).items()}
    if tensors_of.__name__ == "deepseek":
        quantized = ek.QuantizedWeight(quantized.codes, tensors[f"{layer}.scale"], format)
    return tensors, quantized


def streamed(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """As a loader yields them that overwrites each once it is asked for the next."""
    for name, tensor in tensors.items():
        memory = tensor.clone()
        yield name, memory
        memory.untyped_storage().fill_(0)
