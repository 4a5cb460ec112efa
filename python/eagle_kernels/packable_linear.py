"""A linear layer whose weight oneDNN may keep in its own layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from . import checks, plan
from .dispatch import is_plain
from .library import define, registered_ops
from .ops.norm_concat_linear import in_whole_tiles
from .ops.projection import OP, check_epilogue, expected_weight
from .ops.sources import Sources
from .quantized_linear import DenseLinear

ORDER_BY_ROWS = "oneDNN picks the order of its sums by T"


def unsupported_reason(weight: Tensor) -> str | None:
    """Why oneDNN cannot keep this weight in its layout; None where it can."""
    if plan.SETTINGS.batch_invariant:
        return ORDER_BY_ROWS
    if weight.device.type != "cpu":
        return f"oneDNN runs on cpu, not on {weight.device}"
    if weight.dtype == torch.float32:
        return "oneDNN's fp32 product was 2.2 times as far from float64 as the dense one at K*H = 192"
    supported = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    if weight.dtype in supported and getattr(torch.ops.mkldnn, supported[weight.dtype])():
        return None
    return f"oneDNN multiplies no {weight.dtype} on this CPU"


def _product(x: Tensor, packed: Any, bias: Tensor | None, out_features: int) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


# Inductor takes oneDNN's own op for one of its fusions, and has no layout for a packed weight that it did not pack.
define(
    "packed_linear(Tensor x, Tensor packed, Tensor? bias, int out_features) -> Tensor",
    _product,
    lambda x, packed, bias, out_features: x.new_empty(*x.shape[:-1], out_features),
    ("MkldnnCPU",),
)


class PackableLinear(DenseLinear):
    """A dense layer whose weight can live in oneDNN's blocked layout, in place of the dense one: one copy either way.

    state_dict and a pickle always have the dense weight; loading or copying a packed layer packs it again. Assigning a
    weight makes the layer dense. A spawned process has to get the layer before it is packed, as torch.multiprocessing
    shares memory, and that of the dense weight in a pickle is gone before the child opens it.
    """

    packed: Tensor | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "weight" and value is not None:
            self.packed = None

    @property
    def packed_weight(self) -> Tensor | None:
        """None while the layer is dense, and while `functional_call` has put a weight in the parameter's place. A call
        reads it once: another thread may unpack it meanwhile, to move or reload it."""
        packed = self.packed
        return packed if packed is not None and self._parameters["weight"] is None else None

    def pack(self) -> None:
        if self.packed is None:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(in_whole_tiles(self.weight.detach()))
            self.weight = None  # type: ignore[assignment]  # nn.Linear's is a Parameter; state_dict unpacks

    def unpack(self) -> None:
        if self.packed is not None:
            self.weight = nn.Parameter(self.dense(self.packed), requires_grad=False)

    def dense(self, packed: Tensor) -> Tensor:
        return packed.to_dense()[:, : self.in_features].contiguous()

    def check(self, sources: Sources, packed: Tensor) -> None:
        """As `Projection.check`, for a packed weight: else x would be padded, or oneDNN raise errors of its own."""
        first, dtype, device = sources.chunks[0], packed.dtype, packed.device
        if dtype != first.dtype:
            because = f"chunks[0] has dtype {first.dtype}"
            raise checks.error(TypeError, OP, f"weight has dtype {dtype}", str(first.dtype), because)
        if device != first.device:
            raise checks.error(ValueError, OP, f"weight is on {device}", str(first.device), "chunks[0] is there")
        if sources.width != self.in_features:
            got = f"weight has shape {(self.out_features, self.in_features)}"
            raise checks.error(ValueError, OP, got, expected_weight(sources))
        check_epilogue(sources, self.out_features, self.bias, None, 0.0)
        checks.check_inference(OP, (self.bias,))

    def product(self, x: Tensor, packed: Tensor) -> Tensor:
        """x @ weight^T + bias from the packed weight."""
        operands = in_whole_tiles(x), packed, self.bias, self.out_features
        return _product(*operands) if is_plain(*operands[:3]) else registered_ops.packed_linear(*operands)

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.packed is not None:
            destination[prefix + "weight"] = self.dense(self.packed)

    def _load_from_state_dict(self, *args: Any) -> None:
        was_packed = self.packed is not None
        self.unpack()
        super()._load_from_state_dict(*args)
        if was_packed and unsupported_reason(self.weight) is None:  # assign=True may bring another dtype
            self.pack()

    def __getstate__(self) -> dict[str, object]:
        state = dict(self.__dict__)
        if self.packed is not None:
            dense = nn.Parameter(self.dense(self.packed), requires_grad=False)
            state |= {"packed": True, "_parameters": self._parameters | {"weight": dense}}
        return state

    def __setstate__(self, state: dict[str, object]) -> None:
        was_packed = state.get("packed") is not None
        super().__setstate__(state | {"packed": None})
        if was_packed and unsupported_reason(self.weight) is None:
            self.pack()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackableLinear:
        # .to() and .cuda() cannot move a blocked weight: unpack, move, and pack again where oneDNN can read it.
        was_packed = self.packed is not None
        self.unpack()
        try:
            super()._apply(fn, recurse)
        finally:  # a missing or full device raises, and the layer stays packed
            if was_packed and unsupported_reason(self.weight) is None:
                self.pack()
        return self
