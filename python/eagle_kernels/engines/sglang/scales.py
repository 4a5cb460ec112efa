"""Dequantizes drafters for the layers that SGLang builds as torch's nn.Linear or without a quantization config.

These are `fc` of llama_eagle3, every layer of a DFlash drafter, `eh_proj` of most MTP models (sglang#39087,
sglang#39254).
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from ..gates import Target
from .hooks import LOGGER, Hook, leaving_to_sglang

_drafters: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_loads_drafter = False  # whether the model runner that loads now is a drafter's


def _load_model(original: Callable, runner: Any) -> object:
    global _loads_drafter
    _loads_drafter = bool(getattr(runner, "is_draft_worker", False))
    try:
        return original(runner)
    finally:
        _loads_drafter = False


def _load_weights(
    original: Callable, model: nn.Module, weights: Iterable[tuple[str, Tensor]], target_device: object
) -> object:
    """Also of a drafter that is loaded again (RL)."""
    with leaving_to_sglang("scales"):
        if _loads_drafter:
            _drafters.add(model)
        if model in _drafters:
            weights = _scaled(model, weights)
    return original(model, weights, target_device)


def _scaled(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    from ..scales import scaled  # reads checkpoints; this module is loaded in processes that run no model

    # Run:ai's streamer reads all tensors into one buffer, and fastsafetensors frees a file's memory after its last.
    return scaled(model, weights, {UnquantizedLinearMethod}, "SGLang", LOGGER, reused=True)


HOOKS = (
    Hook(Target("sglang.srt.model_executor.model_runner:ModelRunner.load_model", ("self",)), "AROUND", _load_model),
    Hook(
        Target(
            "sglang.srt.model_loader.loader:DefaultModelLoader.load_weights_only",
            ("model", "weights", "target_device"),
        ),
        "AROUND",
        _load_weights,
    ),
)
