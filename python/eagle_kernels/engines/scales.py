"""A drafter's checkpoint for engine layers that have no place for its scales.

A layer without a quantization method takes what is called `weight` for numbers. Codes are some hundred times too large,
the scales beside them are names that its model skips in silence, and no draft is accepted (sglang#39087: accepted
length 3.7 -> 1.0). Here such codes become numbers on their way from the checkpoint to the model, once, in the dtype of
the layer; what cannot be read is an error with the tensor's name, and no engine gets it. Codes of an embedding, lm_head
or norm without a quantization method are such an error. What an engine loads as codes passes as it is, and so does what
no layer of the drafter is named for: an MTP model is loaded out of the checkpoint of its target.
"""

import functools
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import checks
from ..checks import DTYPES
from ..drafter_config import get_field
from ..models import families
from ..quantized_checkpoint import read_projection
from ..quantized_weight import QuantizedWeight
from .eligibility import log_once

OP = "load_weights"
_MERGED = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj") | dict.fromkeys(
    ("gate_proj", "up_proj"), "gate_up_proj"
)
_MERGED |= dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa"), "fused_qkv_a_proj")
_OTHER_NAMES = {"eagle_linear": "fc"}  # Mistral's, which the engines rename behind this
_CODES = {"weight", "weight_packed", "qweight"}
# Renames of the engines' own load_weights, which run behind this: vLLM's EAGLE-3 models, its MTP models, its DSpark.
_RENAMES = (
    (re.compile(r"\bmidlayer\."), "layers.0."),
    (re.compile(r"\blayers\.(\d+)\."), r"layers.\1.mtp_block."),
    (re.compile(r"^mtp\.\d+\.main_proj$"), "model.main_proj"),
)
_STRIPPED = re.compile(r"^(model|encoder(?=\.fc$))\.")  # SGLang's DFlash, where no parameter has the whole name
_DTYPES_OF_CODES = {
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.int8,
    torch.uint8,
}


@functools.cache
def _projections() -> frozenset[str]:
    """Of the input stage: their path in a checkpoint is not the engine's (model.layers.61.eh_proj is model.eh_proj)."""
    return frozenset(name for family in families().values() if family.mtp for name in family.mtp.projections)


def scaled(
    model: nn.Module,
    weights: Iterable[tuple[str, Tensor]],
    unquantized: Collection[type],
    engine: str,
    logger: logging.Logger,
) -> Iterator[tuple[str, Tensor]]:
    """The weights for `model.load_weights`, with numbers in place of codes where the layer takes numbers.

    Codes and scales come last, when all of them are known. The model's config says what they are, where it has a
    quantization_config. Raises ValueError, TypeError that name the tensor, for codes that cannot be read.

    Args:
        unquantized: the exact types of quant_method that take numbers; a torch nn.Linear does as well.
        engine: its name, for the log.
    """
    drafter = _Drafter(f"{type(model).__name__} of {engine}", _quantization_of(model), logger)
    return _scaled(weights, _layers_by_tail(model, unquantized), drafter)


def _scaled(
    weights: Iterable[tuple[str, Tensor]], layers: Mapping[str, "_Layer | None"], drafter: "_Drafter"
) -> Iterator[tuple[str, Tensor]]:
    held: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights:
        path, _, parameter = name.rpartition(".")
        is_dense = parameter == "bias" or (parameter == "weight" and tensor.dtype in DTYPES)
        if not is_dense and _layer_of(path, layers) is not None:
            held.setdefault(path, {})[parameter] = tensor
        else:
            yield name, tensor
    for path, tensors in held.items():
        layer = _layer_of(path, layers)
        if layer is not None and not layer.is_linear:
            _refuse_codes(path, tensors)
        elif layer is not None and _CODES & tensors.keys():
            tensors = {"weight": _numbers(path, tensors, layer, drafter)}
        for parameter, tensor in tensors.items():
            yield f"{path}.{parameter}", tensor


@dataclass(frozen=True)
class _Drafter:
    name: str
    quantization: Mapping[str, Any] | None
    logger: logging.Logger


def _quantization_of(model: nn.Module) -> Mapping[str, Any] | None:
    """quantization_config of the first of its modules whose config has one."""
    for _, module in model.named_modules():
        said = get_field(getattr(module, "config", None), "quantization_config")
        said = said.to_dict() if hasattr(said, "to_dict") else said
        if isinstance(said, Mapping):
            return said
    return None


@dataclass(frozen=True)
class _Layer:
    module: Any
    path: str
    is_linear: bool = True  # the others take numbers too, but none is read for them
    is_merged: bool = False  # out of several weights of the checkpoint

    def shape_of(self, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        """[D, W] of a weight that the layer takes, of a merged one as high as the checkpoint's codes or scales are."""
        if isinstance(self.module, nn.Linear):
            return self.module.out_features, self.module.in_features
        rows = self.module.output_size
        if self.is_merged:
            transposed = tensors.get("scales") if "qweight" in tensors else None
            codes = next(tensors[name] for name in tensors if name in _CODES)
            rows = codes.shape[0] if transposed is None else transposed.shape[-1]
        return rows, self.module.input_size


def _layers_by_tail(model: nn.Module, unquantized: Collection[type]) -> Mapping[str, _Layer | None]:
    """Layers that take numbers, by every end of their path ("fc", "model.fc"); None where one of them takes codes."""
    layers: dict[str, _Layer | None] = {}
    for path, module in model.named_modules():
        is_dense = _takes_numbers(module, unquantized)
        if not path or (not is_dense and not hasattr(module, "quant_method")):
            continue
        names = path.split(".")
        is_linear = isinstance(module, nn.Linear) or hasattr(module, "input_size")
        layer = _Layer(module, path, is_linear, names[-1] in _MERGED.values()) if is_dense else None
        for k in range(len(names)):
            tail = ".".join(names[k:])
            layers[tail] = None if layers.get(tail, layer) is None else layer
    return layers


def _takes_numbers(module: nn.Module, unquantized: Collection[type]) -> bool:
    """A linear layer, an embedding, lm_head or norm without a quantization method."""
    if isinstance(module, nn.Linear):
        return True
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dtype not in DTYPES:
        return False
    method = type(getattr(module, "quant_method", None))
    # Of VocabParallelEmbedding and ParallelLMHead, in both engines.
    return method is type(None) or method in unquantized or method.__name__ == "UnquantizedEmbeddingMethod"


def _refuse_codes(path: str, tensors: Mapping[str, Tensor]) -> None:
    for parameter in sorted(_CODES & tensors.keys()):
        dtype = tensors[parameter].dtype
        if dtype in _DTYPES_OF_CODES or parameter != "weight":
            raise ValueError(
                f"{OP}: {path}.{parameter} is {dtype}, expected numbers, "
                "because the engine's layer has no quantization method"
            )


def _layer_of(path: str, layers: Mapping[str, _Layer | None]) -> _Layer | None:
    """The layer that takes numbers for a layer of the checkpoint."""
    name = path.rpartition(".")[2]
    for renamed in (path, *(pattern.sub(new, path) for pattern, new in _RENAMES)):
        if layer := _named(renamed, layers):
            return layer
    stripped = _STRIPPED.sub("", path)
    if (layer := _named(stripped, layers)) and layer.path.rpartition(".")[0] == stripped.rpartition(".")[0]:
        return layer
    return layers.get(name) if name in _projections() else None


def _named(path: str, layers: Mapping[str, _Layer | None]) -> _Layer | None:
    parent, _, name = path.rpartition(".")
    if name in _OTHER_NAMES:
        path = f"{parent}.{_OTHER_NAMES[name]}".lstrip(".")
    return layers.get(path) or layers.get(f"{parent}.{_MERGED.get(name, name)}")


def _numbers(path: str, tensors: Mapping[str, Tensor], layer: _Layer, drafter: _Drafter) -> Tensor:
    names = {parameter: f"{path}.{parameter}" for parameter in tensors}
    for parameter in sorted({*_CODES, "scales"} & tensors.keys()):
        if layer.is_merged and not tensors[parameter].dim():  # `shape_of` counts its rows
            raise checks.shape_error(OP, names[parameter], tensors[parameter], "a matrix", "it is the engine's layer")
    read = {names[parameter]: tensor for parameter, tensor in tensors.items()}.__getitem__
    shape = layer.shape_of(tensors)
    weight = read_projection(OP, names, read, shape, "the engine's layer", drafter.quantization)
    dtype = layer.module.weight.dtype
    kind = weight.format if isinstance(weight, QuantizedWeight) else "integers in groups"
    message = f"{path.rpartition('.')[2]} of {drafter.name} is {kind} in the checkpoint and has no scales there"
    log_once(drafter.logger, logging.INFO, f"{message}: dequantized to {dtype}")
    return weight.dequantize(dtype) if isinstance(weight, QuantizedWeight) else weight.to(dtype)
