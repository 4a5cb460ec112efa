"""vLLM's CPU layout of a linear layer's weight, and how a layer is kept dense until that layout and ours are timed.

vLLM packs the weight of every unquantized linear layer once it is loaded, and drops the dense one, which is what
`norm_concat_linear` reads. So a layer that may run on the op is kept dense while vLLM loads; then both layouts are
timed (`decision.py`), and a layout that no row count needs is dropped.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn

from ...quantized_weight import QuantizedWeight
from ..gates import Target
from .registry import ONLY_032, ONLY_033

# With the flag set, this makes `cpu_linear` torch's own product; else it packs the weight.
PROCESS = Target(
    "vllm.model_executor.layers.linear:UnquantizedLinearMethod.process_weights_after_loading",
    ("self", "layer"),
    {"372714890df8ddaf": ONLY_032, "7d012504b2ec3a7e": ONLY_033},
)
_FLAG = "_cpu_skip_gemm_dispatch"


@dataclass(frozen=True, eq=False)
class WeightCopy:
    """The weight that a projection reads of a layer without bias, after vLLM packed its own as `product`."""

    weight: nn.Parameter | QuantizedWeight
    linear: Any
    product: Any

    @property
    def is_current(self) -> bool:
        """Whether vLLM has packed nothing newer, as a reload does; an update in place reaches no packed weight."""
        return getattr(self.linear, "cpu_linear", None) is self.product


def keep_dense(linear: Any) -> None:
    """Have vLLM leave the weight as it is, until `pack`. Raises TargetError where vLLM may not read the flag."""
    PROCESS.find()
    setattr(linear, _FLAG, True)


def is_kept_dense(linear: Any) -> bool:
    return getattr(linear, _FLAG, False)


def pack(linear: Any) -> WeightCopy:
    """Pack a layer that was kept dense, as vLLM would have; returns the dense weight, for `unpack`."""
    weight = linear.weight
    delattr(linear, _FLAG)
    linear.quant_method.process_weights_after_loading(linear)
    return WeightCopy(weight, linear, getattr(linear, "cpu_linear", None))


def unpack(linear: Any, dense: WeightCopy) -> None:
    """Undo `pack`."""
    linear.weight = dense.weight
    setattr(linear, _FLAG, True)
    linear.quant_method.process_weights_after_loading(linear)
