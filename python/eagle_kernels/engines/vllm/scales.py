"""Dequantizes drafters for the layers that vLLM builds as torch's nn.Linear or without a quantization config.

These are `eh_proj` of nearly every MTP model and `fc` of EAGLE drafters whose config does not say that it is quantized.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from ..gates import check_parameters
from ..scales import scaled
from . import LOGGER, combine
from .registry import MODELS, hook_models, leaving_to_vllm

_Base: Any = object  # a drafter class of vLLM


def register() -> None:
    names = {name for name in MODELS.find()[2] if _is_drafter(name)}
    hook_models(sorted(names.union(combine.EAGLE3, combine.DFLASH, combine.DSPARK)), hooked)


def _is_drafter(name: str) -> bool:
    # Eagle2_5_VLForConditionalGeneration is a target.
    is_one = any(kind in name for kind in ("MTP", "Eagle", "DFlash", "DSpark"))
    return is_one and not name.endswith("ForConditionalGeneration")


def hooked(drafter: type[nn.Module]) -> type[nn.Module]:
    """A subclass of the drafter whose load_weights gets dense weights for its unquantized layers."""
    load_weights: Any = getattr(drafter, "load_weights", None)
    check_parameters(f"{drafter.__module__}:{drafter.__name__}.load_weights", load_weights, ("self", "weights"))
    return type(drafter.__name__, (LoadsScales, drafter), {"__module__": __name__})


class LoadsScales(_Base):
    """Mixed in before a drafter class of vLLM."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> object:
        with leaving_to_vllm(f"{type(self).__name__}'s scales"):
            from vllm.model_executor.layers.linear import UnquantizedLinearMethod

            weights = scaled(self, weights, {UnquantizedLinearMethod}, "vLLM", LOGGER)
        return super().load_weights(weights)
