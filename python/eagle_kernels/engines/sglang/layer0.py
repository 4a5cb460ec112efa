"""Layer 0 of SGLang's EAGLE-3 drafters on one op: qkv_proj(cat([input_layernorm(embeds), hidden_norm(hidden)])).

In latent attention (`kimi_k25_eagle3`) the projection is fused_qkv_a_proj_with_mqa. SGLang's forwards stay as they are
(`normed_linear`), as nothing but the projection reads the attention's input. The residual is the hidden state before
its norm: SGLang reads no `norm_before_residual`.
"""

import logging

from torch import nn

from ..eligibility import log_once
from ..gates import Target
from .hooks import LOGGER, Hook, leaving_to_sglang
from .normed_linear import NormedLinear
from .stage import after_loading
from .unsupported import (
    activation_dtype,
    determinism_unsupported_reason,
    linear_unsupported_reason,
    rms_norm_unsupported_reason,
)

_MODELS = "sglang.srt.models"
_LLAMA = f"{_MODELS}.llama_eagle3:LlamaDecoderLayer"
_LATENT = f"{_MODELS}.kimi_k25_eagle3:Eagle3MLADecoderLayer"
# A layer's class -> the projection in its attention.
_PROJECTIONS = {_LLAMA: "qkv_proj", _LATENT: "fused_qkv_a_proj_with_mqa"}


def prepare(layer: nn.Module) -> None:
    """Fuse the stage of a layer 0 that has been loaded, or log why not."""
    projection = _PROJECTIONS.get(f"{type(layer).__module__}:{type(layer).__qualname__}")
    if projection is None or not getattr(layer, "is_input_layer", True):
        return
    linear = getattr(layer.self_attn, projection)
    if "forward" in linear.__dict__:  # fused already: its weights are loaded again
        return
    norms = ("input_layernorm", "hidden_norm")
    name = f"{type(layer).__name__}.{projection}"
    unsupported = determinism_unsupported_reason()
    unsupported = unsupported or linear_unsupported_reason(
        linear, bias=True, column_shard=projection == "qkv_proj", codes=True
    )
    if getattr(layer.self_attn, "use_dsa", False):
        unsupported = unsupported or "an indexer reads the normed states too"
    for norm in norms:
        unsupported = unsupported or rms_norm_unsupported_reason(getattr(layer, norm), activation_dtype(linear))
    if unsupported is not None:
        log_once(LOGGER, logging.INFO, f"{name} stays with SGLang: {unsupported}")
        return
    NormedLinear(name, [(layer, norm) for norm in norms], (layer.self_attn, projection)).put_in_where_faster()


def _prepare(module: nn.Module) -> None:
    with leaving_to_sglang(f"{type(module).__name__}'s layer 0"):
        prepare(module)


_LAYER = ("self", "positions", "embeds", "hidden_states", "forward_batch")
_ATTENTION = ("self", "positions", "hidden_states", "forward_batch")

# Their bodies say what becomes of the normed states, and that the attention begins with the projection.
HOOKS = (
    Hook(Target(f"{_LLAMA}.forward", (*_LAYER, "residual"), {"41633aba4b1d371c": ["0.5.23"]})),
    Hook(Target(f"{_LATENT}.forward", (*_LAYER, "zero_allocator"), {"8cd3fe347bcb0e3c": ["0.5.23"]})),
    Hook(Target(f"{_MODELS}.llama:LlamaAttention.forward", _ATTENTION, {"e58fc085a9388274": ["0.5.23"]})),
    Hook(
        Target(
            f"{_MODELS}.llama:LlamaAttention.forward_prepare_native",
            ("self", "positions", "hidden_states"),
            {"dff5fd587451b933": ["0.5.23"]},
        )
    ),
    Hook(
        Target(
            f"{_MODELS}.deepseek_v2:DeepseekV2AttentionMLA.prepare_qkv_latent",
            ("self", "hidden_states", "forward_batch"),
            {"33cb9e5717ab1c49": ["0.5.23"]},
        )
    ),
    after_loading(_prepare),
)
