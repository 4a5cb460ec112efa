"""A projection's linear layer, dense or on a QuantizedWeight, and how modules of this package create and load it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from . import bf16_12bit, checks
from .huge_pages import use_huge_pages
from .ops.norm_concat_linear_quantized import QuantizedProjection, can_read_codes
from .ops.projection import OP
from .quantized_checkpoint import OF_WEIGHT
from .quantized_weight import COMPRESSED, QuantizedWeight, log_dequantized, quantize, warn_of_dequantizing

LOAD = "load_state_dict"


def compute_in_hooks(module: Any, name: str) -> None:
    """Compute an attribute that `prune`, `weight_norm` and `spectral_norm` of torch.nn.utils set in a pre-hook of a
    forward that is not called: it would be that of the weight before a load."""
    hooks = getattr(module, "_forward_pre_hooks", {})
    if not hooks:
        return
    from torch.nn.utils.prune import BasePruningMethod  # which torch itself does not import

    for hook in hooks.values():
        is_pruning = isinstance(hook, BasePruningMethod)
        if is_pruning or isinstance(hook, SpectralNorm | WeightNorm):
            computed = hook._tensor_name if is_pruning else hook.name
            if computed == name:
                hook(module, None)


class _LoadsWhole(nn.Module):
    """A layer that loads all tensors of a weight from a state_dict, or reports what does not fit and keeps its own."""

    def _mismatch(self, state_dict: dict, prefix: str, names: list[str]) -> Exception | None:
        """The error in the tensors of these names (codes, scales or a dense weight); None if there is none."""
        raise NotImplementedError

    def wrong_in(self, state_dict: dict, prefix: str) -> Exception | None:
        names = [name for name in OF_WEIGHT if prefix + name in state_dict]
        wrong = self._mismatch(state_dict, prefix, names) if names else None
        return wrong or checks.codes_error(LOAD, f"{prefix}bias", state_dict.get(f"{prefix}bias"))

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any) -> None:
        wrong = self.wrong_in(state_dict, prefix)
        if wrong is None:
            super()._load_from_state_dict(state_dict, prefix, *args)
            self._use_huge_pages()
        else:
            args[-1].append(str(wrong))  # torch raises these, even with strict=False

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self._use_huge_pages()
        return self

    def _use_huge_pages(self) -> None:
        use_huge_pages(*self._parameters.values(), *self._buffers.values())


class LoadsProjections(nn.Module):
    """A module that refuses a state_dict whose projections do not fit, or whose gains are codes, before anything is
    written: torch would load its norms first."""

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any) -> None:
        for name, child in self._modules.items():
            if isinstance(child, _LoadsWhole) and (wrong := child.wrong_in(state_dict, f"{prefix}{name}.")):
                raise RuntimeError(str(wrong))  # as torch raises what a layer reports
        for name, _ in self.named_parameters(remove_duplicate=False):
            if wrong := checks.codes_error(LOAD, prefix + name, state_dict.get(prefix + name)):
                raise RuntimeError(str(wrong))
        super()._load_from_state_dict(state_dict, prefix, *args)


class DenseLinear(_LoadsWhole, nn.Linear):
    """nn.Linear that refuses codes: torch would cast them to the weight's dtype and skip their scales."""

    def _mismatch(self, state_dict: dict, prefix: str, names: list[str]) -> Exception | None:
        weight = state_dict.get(prefix + "weight")
        because = "the layer is dense: load_checkpoint makes it a quantized one"
        if wrong := checks.codes_error(LOAD, f"{prefix}weight", weight, because):
            return wrong
        if scales := [name for name in names if name != "weight"]:
            got = f"state_dict has {prefix}{scales[0]}"
            return checks.error(ValueError, LOAD, got, f"{prefix}weight alone", because)
        return None


class QuantizedLinear(_LoadsWhole):
    """A projection whose weight stays codes and scales; `norm_concat_linear` reads them on every call.

    state_dict: weight (the codes), weight_scale, weight_scale_2 (nvfp4) and bias: Model-Optimizer's names, so that
    `load_checkpoint` reads a saved one too. It loads into a layer of the same format, completely or not at all;
    .to(dtype) leaves codes and scales as they are.
    """

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.format, self.block = weight.format, weight.block
        codes, scales, global_scale = weight.tensors
        self.register_buffer("weight", codes)
        self.register_buffer("weight_scale", scales)
        self.register_buffer("weight_scale_2", global_scale)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), requires_grad=False))

    @property
    def quantized(self) -> QuantizedWeight:
        """The buffers as they are now."""
        buffers: dict[str, Any] = self._buffers
        try:
            codes, scales, global_scale = buffers["weight"], buffers["weight_scale"], buffers["weight_scale_2"]
        except KeyError as missing:  # as after `layer.weight = nn.Parameter(...)`
            because = "a parameter or a parametrization has no codes: assign a dense layer in place of this one"
            got = f"{missing.args[0]} is no buffer of the layer"
            raise checks.error(RuntimeError, OP, got, f"what {self.format} stores", because) from None
        return QuantizedWeight.of_tensors(codes, scales, global_scale, self.format, self.block)

    def has_tensors_like(self, weight: QuantizedWeight) -> bool:
        """Whether a weight can be copied into the buffers, which CUDA graphs may have captured."""

        def kinds(tensors: tuple[Tensor | None, ...]) -> list:
            return [None if tensor is None else (tensor.dtype, tensor.shape) for tensor in tensors]

        same_format = (self.format, self.block) == (weight.format, weight.block)
        return same_format and kinds(self.quantized.tensors) == kinds(weight.tensors)

    def projection(self, post_norm_eps: float = 0.0) -> QuantizedProjection:
        try:  # as `layers.parameter_of`
            bias: Any = self._parameters["bias"]
        except KeyError:
            bias = self.bias
        return QuantizedProjection(self.quantized, bias, None, post_norm_eps)

    def _mismatch(self, state_dict: dict, prefix: str, names: list[str]) -> Exception | None:
        own = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        because = f"the layer is {self.format}"
        if own.keys() != {*names}:
            got = f"state_dict has {[prefix + name for name in names]}"
            return checks.error(ValueError, LOAD, got, str([prefix + name for name in own]), because)
        for name, buffer in own.items():
            given = state_dict[prefix + name]
            if not isinstance(given, Tensor):
                return checks.error(TypeError, LOAD, f"{prefix}{name} is a {type(given).__name__}", "a torch.Tensor")
            if given.dtype != buffer.dtype:
                got = f"{prefix}{name} has dtype {given.dtype}"
                return checks.error(TypeError, LOAD, got, str(buffer.dtype), because)
            if self.format == COMPRESSED and name == "weight_scale":
                if not bf16_12bit.is_exponents_shape(tuple(given.shape), self.out_features):
                    expected = f"({self.out_features}, {bf16_12bit.TABLE_BYTES} + 4 E)"
                    return checks.shape_error(LOAD, prefix + name, given, expected, because)
            elif given.shape != buffer.shape:
                if {tuple(given.shape), tuple(buffer.shape)} == {(buffer.shape[0], 1), (buffer.shape[0], 2)}:
                    # One weight, and e_proj and h_proj side by side.
                    because += ": MTPStreamsProjection.load_checkpoint takes either"
                return checks.shape_error(LOAD, prefix + name, given, str(tuple(buffer.shape)), because)
        return None

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any) -> None:
        given = state_dict.get(f"{prefix}weight_scale")
        if self.format == COMPRESSED and given is not None and self.wrong_in(state_dict, prefix) is None:
            own = self.quantized.scales
            if given.shape != own.shape:
                # Another weight has another number of exceptions. No CUDA graph reads this buffer: it is on a CPU. It
                # holds the new ones at once, since a call in another thread takes columns from them.
                self.weight_scale = given.detach().to(own.device, copy=True)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, format={self.format}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedLinear:
        bias = self._parameters.get("bias")

        def keep_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if tensor is bias or moved.dtype == tensor.dtype else tensor.to(moved.device)

        if "bias" in self._parameters:
            return super()._apply(keep_dtype, recurse)
        for child in self.children() if recurse else ():  # it is parametrized: in a child, and takes the dtype
            child._apply(fn)
        return super()._apply(keep_dtype, recurse=False)


def quantize_linear(op: str, linear: Any, format: str) -> QuantizedLinear:
    """A dense linear layer of 16 or 32 bits, converted to a format of `quantize`."""
    checks.check_unwrapped(op, "the weight", linear)
    for name in ("weight", "bias"):
        compute_in_hooks(linear, name)
    weight = None if isinstance(linear, QuantizedLinear) else getattr(linear, "weight", None)
    if weight is None:
        got, because = "packed", "prepack has put its numbers into another order"
        if isinstance(linear, QuantizedLinear):
            got, because = linear.format, "rounding twice loses more"
        raise checks.error(RuntimeError, op, f"the weight is {got}", "a dense weight", because)
    if format == COMPRESSED and weight.device.type != "cpu":
        because = "no kernel reads 12 bits a number elsewhere"
        raise checks.error(RuntimeError, op, f"the weight is on {weight.device}", f"on cpu for {format}", because)
    quantized = quantize(weight.detach(), format)
    if not can_read_codes(weight.device, quantized.code_bits):
        warn_of_dequantizing(op, format, f"no kernel reads codes on {weight.device.type}")
    use_huge_pages(quantized)
    return QuantizedLinear(quantized, linear.bias)


def load_projections(
    op: str,
    module: Any,
    state: dict[str, Tensor],
    projections: Mapping[str, tuple[Tensor | QuantizedWeight, Callable]],
) -> None:
    """Load a module's `state` and the weight of each of its projections; the old and new ones may each be quantized.

    `projections` has by name the weight and what makes a dense layer for it. Tensors of the same dtypes and shapes are
    copied in place, so that a captured CUDA graph reads the new weight. Where no kernel of the module's device reads
    codes, they are dequantized here, once.
    """
    tensors = [*module.named_parameters(), *module.named_buffers()]
    if on_meta := [name for name, tensor in tensors if tensor.is_meta]:
        expected, because = "a module with memory: to_empty(device=...) first", "a copy to meta keeps no value"
        raise checks.error(RuntimeError, op, f"{on_meta[0]} is on meta", expected, because)
    of_inference = (
        [] if torch.is_inference_mode_enabled() else [name for name, tensor in tensors if tensor.is_inference()]
    )
    if of_inference:
        expected, because = "a call under torch.inference_mode()", "torch refuses to write it outside"
        raise checks.error(RuntimeError, op, f"{of_inference[0]} is an inference tensor", expected, because)
    loaded: dict[str, Tensor] = {}
    for name, (weight, dense) in projections.items():
        loaded |= _fitted(op, module, name, weight, dense)
    module.load_state_dict(loaded | state)


def _fitted(op: str, module: Any, name: str, weight: Tensor | QuantizedWeight, dense: Callable) -> dict[str, Tensor]:
    """The state_dict of a projection with this weight, after the module has got a layer that takes it."""
    current = getattr(module, name)
    # A packed weight is no parameter, but may be the only tensor that the module has.
    numbers = next(module.parameters(), getattr(current, "packed", None))
    device = (current._buffers["weight"] if numbers is None else numbers).device
    is_compressed = isinstance(weight, QuantizedWeight) and weight.format == COMPRESSED
    if isinstance(weight, QuantizedWeight) and not can_read_codes(device, weight.code_bits):
        dtype = torch.bfloat16 if numbers is None else numbers.dtype
        because = f"no kernel reads {'12 bits a number' if is_compressed else 'codes'} on {device.type}"
        log_dequantized(op, f"{name}.weight", weight.format, dtype, because)
        weight = weight.dequantize(dtype)
    if isinstance(weight, QuantizedWeight):
        codes = QuantizedLinear(weight.to(device), current.bias)
        if not (isinstance(current, QuantizedLinear) and current.has_tensors_like(weight)):
            codes = QuantizedLinear(weight.to(device, copy=True), current.bias)
            setattr(module, name, codes)
        return codes.state_dict(prefix=f"{name}.")
    if isinstance(current, QuantizedLinear):
        dtype = next((p.dtype for p in module.parameters()), weight.dtype)  # that of the norms
        setattr(module, name, dense(dtype=dtype, device=device))
    return {f"{name}.weight": weight}
