"""Layer 0 of vLLM's EAGLE-3 drafters: qkv_proj(cat([input_layernorm(embeds), hidden_norm(hidden)])) in one op.

In latent attention the projection is fused_qkv_a_proj. vLLM's forwards stay as they are (`normed_linear`): the
projection is the first line of the attention's forward, the only one that reads its input. With `norm_before_residual`
the residual is the normed hidden state, which hidden_norm then computes for that alone.
"""

import logging
import types
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..eligibility import log_once
from ..gates import Target
from . import LOGGER
from .combine import EAGLE3
from .normed_linear import Stage, fuse
from .registry import BOTH, Config, hook_models, when_loaded

ARCHITECTURES = EAGLE3
_MODELS = "vllm.model_executor.models"
_ATTENTION = ("self", "positions", "hidden_states")


@dataclass(frozen=True)
class Layer:
    """What the stage of one drafter's layer 0 depends on.

    layer: its class.  forwards: those of the layer and of its attention.  projection: its name in the attention.
    """

    layer: str
    forwards: tuple[Target, ...]
    projection: str = "qkv_proj"

    @property
    def targets(self) -> tuple[Target, ...]:
        # They say which residual hidden_norm leaves.
        norms = {"_norm_before_residual": "e5d88550cf4b3c59", "_norm_after_residual": "b77236a117ae54c7"}
        parameters = ("self", "hidden_states")
        return (*self.forwards, *[Target(f"{self.layer}.{name}", parameters, {norms[name]: BOTH}) for name in norms])


def _layer(layer: str, body: str, *attention: Target, projection: str = "qkv_proj") -> Layer:
    parameters = ("self", "positions", "embeds", "hidden_states", "residual")
    where = f"{_MODELS}.{layer}"
    return Layer(where, (Target(f"{where}.forward", parameters, {body: BOTH}), *attention), projection)


def _attention(where: str, body: str, *more: str) -> Target:
    return Target(where, (*_ATTENTION, *more), {body: BOTH})


LAYERS = (
    _layer(
        "llama_eagle3:LlamaDecoderLayer",
        "01769ba4f13f934a",
        _attention(f"{_MODELS}.llama:LlamaAttention.forward", "f60f2765ac7b0830"),
    ),
    _layer(
        "qwen3_eagle3:Qwen3Eagle3DecoderLayer",
        "01769ba4f13f934a",
        _attention(f"{_MODELS}.qwen3:Qwen3Attention.forward", "c9aab8cfcded4f8d"),
    ),
    _layer(
        "deepseek_eagle3:DeepseekV2Eagle3DecoderLayer",
        "42222155238a6718",
        _attention(f"{_MODELS}.deepseek_v2:DeepseekV2MLAAttention.forward", "5422cfcc3b196ba9", "llama_4_scaling"),
        _attention(
            "vllm.model_executor.layers.mla:MultiHeadLatentAttentionWrapper.forward",
            "5e28a1d96fd5b70d",
            "llama_4_scaling",
        ),
        projection="fused_qkv_a_proj",
    ),
)


def register() -> None:
    hook_models(ARCHITECTURES, hooked)


def hooked(drafter: type[nn.Module]) -> type[nn.Module]:
    """A subclass of the drafter whose layer 0 is fused once its weights are loaded."""
    return when_loaded(drafter, "layer 0", _read, lambda _, layer: layer.fuse())


@dataclass(frozen=True, eq=False)
class Layer0:
    """Layer 0 of a drafter that is being loaded."""

    layer: Any
    stage: Stage

    def fuse(self) -> None:
        residual = self.layer._residual_norm
        if fuse([self.stage]) and residual.__name__ == "_norm_before_residual":
            self.layer._residual_norm = types.MethodType(_normed_residual, self.layer)


def _normed_residual(layer: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Replaces `_norm_before_residual`: (hidden state for the projection, which norms it itself; normed residual)."""
    return hidden_states, layer.hidden_norm.engines_own(hidden_states)


def _read(drafter: Any, config: Config) -> Layer0 | None:
    """The stage of a drafter that has been built, its weight kept dense until `Layer0.fuse`; None where it stays with
    vLLM, and one line that says why."""
    layers = getattr(drafter.model, "layers", None)
    if not layers:
        return None
    layer = layers[0]
    known = {row.layer: row for row in LAYERS}.get(f"{type(layer).__module__}:{type(layer).__qualname__}")
    name = f"{type(layer).__name__}.{'qkv_proj' if known is None else known.projection}"
    unsupported = None
    if known is None:
        unsupported = f"its layer 0 is a {type(layer).__module__}.{type(layer).__qualname__}"
    elif config.lora:
        unsupported = "LoRA is on, which replaces it"
    elif getattr(layer.self_attn, "indexer", None) is not None:
        unsupported = "an indexer reads the normed states too"
    if known is None or unsupported is not None:
        log_once(LOGGER, logging.INFO, f"{name} stays with vLLM: {unsupported}")
        return None
    for target in known.targets:
        target.find()
    linear = getattr(layer.self_attn, known.projection, None)
    if linear is None:
        log_once(LOGGER, logging.INFO, f"{name} stays with vLLM: its attention has none")
        return None
    from vllm.model_executor.layers.layernorm import RMSNorm

    norms = (layer.input_layernorm, layer.hidden_norm)
    stage = Stage(name, norms, linear, {RMSNorm: 0.0}, config, column_shard=True)
    stage.keep_dense_on_cpu()
    return Layer0(layer, stage)
