"""The fc block of SGLang's EAGLE-3 drafters on one op: norms, cat and fc of `llama_eagle3` and `kimi_k25_eagle3`.

SGLang's forward applies the block where the hidden states are not as wide as the embeddings. The hook hands it the
projected states, which are as wide, so it skips its own block. Only states of the target go through the block. Where
K*Ht == Hd, widths cannot tell them from those of the drafter's previous step, and SGLang 0.5.23 silently skips fc.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..eligibility import linear_unsupported_reason, log_once
from ..projection import EngineProjection
from .hooks import LOGGER, Hook
from .unsupported import determinism_unsupported_reason, rms_norm_unsupported_reason

_FORWARD = ("self", "input_ids", "positions", "forward_batch", "input_embeds", "pp_proxy_tensors")


@dataclass(frozen=True)
class Stage:
    """What one drafter's hook needs; planned once, at the drafter's first forward."""

    projection: EngineProjection
    gather: Callable[[Tensor], Tensor] | None  # Kimi: fc has this rank's columns
    target_width: int  # K*Ht
    width: int  # Hd

    def reads_target(self, hidden: Tensor, forward_batch: Any) -> bool:
        if hidden.shape[-1] != self.target_width:
            return False
        # Only draft decode feeds a drafter its own output; prefill and draft extend bring the target's.
        return self.target_width != self.width or not forward_batch.forward_mode.is_decode_or_idle()


def _forward(
    original: Callable,
    model: Any,
    input_ids: Tensor,
    positions: Tensor,
    forward_batch: Any,
    *args: object,
    **kwargs: object,
) -> object:
    stage = model.__dict__.get("_eagle_kernels_stage", _UNPLANNED)
    if stage is _UNPLANNED or (stage is not None and stage.projection.fc is not model.fc):
        stage = model.__dict__["_eagle_kernels_stage"] = _plan(model)
    spec_info = forward_batch.spec_info
    hidden = spec_info.hidden_states
    if stage is None or not stage.reads_target(hidden, forward_batch):
        return original(model, input_ids, positions, forward_batch, *args, **kwargs)
    projected = stage.projection(hidden)
    spec_info.hidden_states = projected if stage.gather is None else stage.gather(projected)
    try:
        return original(model, input_ids, positions, forward_batch, *args, **kwargs)
    finally:
        spec_info.hidden_states = hidden


_UNPLANNED = object()


def _plan(model: Any) -> Stage | None:
    name = f"{type(model).__module__.rpartition('.')[2]}.{type(model).__name__}"
    stage, unsupported = _read(model)
    if stage is None:
        log_once(LOGGER, logging.INFO, f"{name} stays with SGLang: {unsupported}")
        return None
    projection = stage.projection
    norms = [("concat", projection.concat_norm is not None), ("chunk", bool(projection.chunk_norms))]
    norm = " then ".join(kind for kind, there in norms if there) or "no"
    log_once(LOGGER, logging.INFO, f"{name} runs norm_concat_linear (K={projection.num_chunks}, {norm} norm)")
    return stage


def _read(model: Any) -> tuple[Stage | None, str | None]:
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    eagle_config = getattr(model.config, "eagle_config", None) or {}
    if not eagle_config.get("use_aux_hidden_state", True):
        return None, "use_aux_hidden_state is False"
    fc, gather = model.fc, getattr(model, "_fc_gatherer", None)
    unsupported = determinism_unsupported_reason() or linear_unsupported_reason(
        fc, {UnquantizedLinearMethod}, column_shard=gather is not None, bias=True
    )
    concat_norm, chunk_norms = getattr(model, "input_norm", None), model.fc_norm or ()
    for norm in filter(None, (concat_norm, *chunk_norms)):
        unsupported = unsupported or rms_norm_unsupported_reason(norm, fc.weight.dtype)
    if unsupported is not None:
        return None, unsupported
    projection = EngineProjection(fc, model.num_aux_hidden_states, concat_norm, chunk_norms)
    return Stage(projection, gather, fc.weight.shape[1], model.config.hidden_size), None


HOOKS = (
    Hook("sglang.srt.models.llama_eagle3:LlamaModel.forward", "AROUND", _forward, _FORWARD),
    Hook("sglang.srt.models.kimi_k25_eagle3:Eagle3MLAModel.forward", "AROUND", _forward, _FORWARD),
)
