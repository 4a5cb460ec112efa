"""vLLM's CPU layout of a linear layer's weight, and how a layer waits for the decision between it and ours.

vLLM packs the weight of every unquantised linear layer once it is loaded, and drops the dense one, which is what
`norm_concat_linear` reads. So a layer that may run on it is kept dense while vLLM loads; then both are timed
(`decision.py`), and the layout that no row count needs goes.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn

from ...quantized_weight import QuantizedWeight
from ..gates import Target

# Where the flag is set it makes `cpu_linear` torch's own product; else it packs the weight.
PROCESS = Target(
    "vllm.model_executor.layers.linear:UnquantizedLinearMethod.process_weights_after_loading",
    ("self", "layer"),
    {"372714890df8ddaf": ("0.32.0",), "7d012504b2ec3a7e": ("0.33.0",)},
)
_FLAG = "_cpu_skip_gemm_dispatch"


@dataclass(frozen=True, eq=False)
class WeightCopy:
    """What a projection reads of a layer without bias, after vLLM packed its weight as `product` and dropped it."""

    weight: nn.Parameter | QuantizedWeight
    linear: Any
    product: Any

    @property
    def is_current(self) -> bool:
        """Whether vLLM packs nothing newer: a reload does, and in place no update reaches a packed weight."""
        return getattr(self.linear, "cpu_linear", None) is self.product


def keep_dense(linear: Any) -> None:
    """Have vLLM leave the weight as it is, until `pack`. Raises TargetError where vLLM looks at no such flag."""
    PROCESS.find()
    setattr(linear, _FLAG, True)


def is_kept_dense(linear: Any) -> bool:
    return getattr(linear, _FLAG, False)


def pack(linear: Any) -> WeightCopy:
    """Pack a layer that was kept dense, as vLLM would have; what it was is returned for `unpack`."""
    weight = linear.weight
    delattr(linear, _FLAG)
    linear.quant_method.process_weights_after_loading(linear)
    return WeightCopy(weight, linear, getattr(linear, "cpu_linear", None))


def unpack(linear: Any, dense: WeightCopy) -> None:
    """Undo `pack`."""
    linear.weight = dense.weight
    setattr(linear, _FLAG, True)
    linear.quant_method.process_weights_after_loading(linear)
