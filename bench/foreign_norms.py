"""RMSNorm kernels of other packages, as baselines where they are installed: Liger, FlashInfer, vLLM.

Each is called as its engine would: `norm` gives the normed rows, `norm_into` writes them into a slice of the concat
where the package can, `add_norm` leaves (normed, sum) in the two tensors it is given. The gain is the full one: an
offset has been added to it.
"""

import importlib
import importlib.util
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType

from torch import Tensor

# The import name of each, which is also what has to be installed.
_PACKAGES = {"liger": "liger_kernel", "flashinfer": "flashinfer", "vllm": "vllm"}
NAMES = tuple(_PACKAGES)


def unusable_reason(name: str, device: str) -> str | None:
    """Why this package's kernels cannot be timed here; None where they can."""
    if importlib.util.find_spec(_PACKAGES[name]) is None:
        return f"{_PACKAGES[name]} is not installed"
    return None if device == "cuda" else f"the kernels of {_PACKAGES[name]} take CUDA tensors"


@dataclass(frozen=True)
class Norms:
    """The kernels of one package."""

    name: str

    @cached_property
    def _module(self) -> ModuleType:
        path = {"liger": "liger_kernel.ops", "flashinfer": "flashinfer.norm", "vllm": "vllm._custom_ops"}[self.name]
        return importlib.import_module(path)

    def norm(self, x: Tensor, gain: Tensor, eps: float, out: Tensor) -> None:
        """out = RMSNorm(x); `out` may have rows apart from each other."""
        if self.name == "flashinfer":
            self._module.rmsnorm(x, gain, eps, out=out)
        elif self.name == "liger":
            out.copy_(self._module.LigerRMSNormFunction.apply(x, gain, eps))  # it has no out=
        elif out.is_contiguous():
            self._module.rms_norm(out, x, gain, eps)
        else:
            dense = x.new_empty(x.shape)  # its kernel writes dense rows only
            self._module.rms_norm(dense, x, gain, eps)
            out.copy_(dense)

    def add_norm(self, hidden: Tensor, residual: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(normed, sum); hidden and residual are overwritten where the package works in place."""
        if self.name == "liger":
            return self._module.LigerFusedAddRMSNormFunction.apply(hidden, residual, gain, eps)
        if self.name == "flashinfer":
            self._module.fused_add_rmsnorm(hidden, residual, gain, eps)
        else:
            self._module.fused_add_rms_norm(hidden, residual, gain, eps)
        return hidden, residual
