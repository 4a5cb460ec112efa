"""The fc block of SGLang's EAGLE-3 drafters on one op: norms, cat and fc of `llama_eagle3` and `kimi_k25_eagle3`.

SGLang's forward applies the block where the hidden states are not as wide as the embeddings. The hook gives it the
projected states, which are as wide, so it skips its own block. Only states of the target go through the block. Where
K*Ht == Hd, widths cannot tell them from those of the drafter's previous step, and SGLang 0.5.23 silently skips fc.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..decision import Decision
from ..eligibility import log_once
from ..gates import Target
from ..projection import EngineProjection
from .hooks import LOGGER, Hook, leaving_to_sglang
from .stage import after_loading, decide
from .unsupported import determinism_unsupported_reason, linear_unsupported_reason, rms_norm_unsupported_reason

_FORWARD = ("self", "input_ids", "positions", "forward_batch", "input_embeds", "pp_proxy_tensors")


@dataclass
class FcStage:
    """What one drafter's hook needs; planned once per fc."""

    fc: Any  # what it was planned for: LoRA wraps fc after loading
    target_width: int  # K*Ht
    width: int  # Hd
    engine: Callable[[Tensor], Tensor]  # SGLang's own modules
    gather: Callable[[Tensor], Tensor] | None  # Kimi: fc has this rank's columns
    projection: EngineProjection | None  # None where the ops cannot read its modules
    decision: Decision

    def reads_target(self, hidden: Tensor, forward_batch: Any) -> bool:
        if hidden.shape[-1] != self.target_width:
            return False
        # Only draft decode feeds a drafter its own output; prefill and draft extend bring the target's.
        return self.target_width != self.width or not forward_batch.forward_mode.is_decode_or_idle()

    def project(self, hidden: Tensor) -> Tensor | None:
        """The input of the layers behind the block; None where SGLang's forward is to compute it."""
        projected = None
        if self.projection is not None and self.decision.runs_op(hidden.shape[0]):
            try:
                projected = self.projection(hidden)
            except Exception as failure:
                log_once(LOGGER, logging.WARNING, f"fc stays with SGLang, {self.projection.op} failed: {failure!r}")
                self.projection = None
        if projected is None and self.target_width == self.width:
            projected = self.engine(hidden)
        return projected if projected is None or self.gather is None else self.gather(projected)


def _forward(
    original: Callable,
    model: Any,
    input_ids: Tensor,
    positions: Tensor,
    forward_batch: Any,
    *args: object,
    **kwargs: object,
) -> object:
    stage = _stage_of(model)
    spec_info = forward_batch.spec_info
    hidden = spec_info.hidden_states
    projected = stage.project(hidden) if stage is not None and stage.reads_target(hidden, forward_batch) else None
    if projected is None:
        return original(model, input_ids, positions, forward_batch, *args, **kwargs)
    spec_info.hidden_states = projected
    try:
        return original(model, input_ids, positions, forward_batch, *args, **kwargs)
    finally:
        spec_info.hidden_states = hidden


def _stage_of(model: Any) -> FcStage | None:
    """None where the drafter reads no captured layers, or where planning failed."""
    stage = model.__dict__.get("_eagle_kernels_stage", ...)
    if stage is ... or (stage is not None and stage.fc is not model.fc):
        stage = model.__dict__["_eagle_kernels_stage"] = None
        with leaving_to_sglang(_name(model)):
            stage = model.__dict__["_eagle_kernels_stage"] = _plan(model)
    return stage


def _name(model: Any) -> str:
    return f"{type(model).__module__.rpartition('.')[2]}.{type(model).__name__}"


def _plan(model: Any) -> FcStage | None:
    eagle_config = getattr(model.config, "eagle_config", None) or {}
    if not eagle_config.get("use_aux_hidden_state", True):
        log_once(LOGGER, logging.INFO, f"{_name(model)} stays with SGLang: use_aux_hidden_state is False")
        return None
    concat_norm, chunk_norms = getattr(model, "input_norm", None), model.fc_norm or ()
    fc = getattr(model.fc, "base_layer", model.fc)  # LoRA wraps it
    target_width = fc.in_features if isinstance(fc, nn.Linear) else fc.input_size

    def engine(hidden: Tensor) -> Tensor:
        if concat_norm is not None:
            hidden = concat_norm(hidden)
        if chunk_norms:
            chunks = hidden.chunk(model.num_aux_hidden_states, dim=-1)
            hidden = torch.cat([norm(chunk) for norm, chunk in zip(chunk_norms, chunks, strict=True)], dim=-1)
        projected = model.fc(hidden)
        return projected[0] if isinstance(projected, tuple) else projected  # SGLang's layers return a bias beside it

    gather = getattr(model, "_fc_gatherer", None)
    stage = FcStage(model.fc, target_width, model.config.hidden_size, engine, gather, None, Decision())
    unsupported = _unsupported_reason(model, concat_norm, chunk_norms)
    if unsupported is not None:
        log_once(LOGGER, logging.INFO, f"{_name(model)} stays with SGLang: {unsupported}")
        return stage
    projection = EngineProjection(model.fc, model.num_aux_hidden_states, concat_norm, chunk_norms)
    projection, decided = decide(_name(model), projection, engine)
    return stage if decided.never else replace(stage, projection=projection, decision=decided)


def _unsupported_reason(model: Any, concat_norm: Any, chunk_norms: Sequence[Any]) -> str | None:
    column_shard = getattr(model, "_fc_gatherer", None) is not None
    unsupported = determinism_unsupported_reason() or linear_unsupported_reason(
        model.fc, column_shard=column_shard, bias=True
    )
    for norm in filter(None, (concat_norm, *chunk_norms)):
        unsupported = unsupported or rms_norm_unsupported_reason(norm, model.fc.weight.dtype)
    return unsupported


def _prepare(module: nn.Module) -> None:
    if f"{type(module).__module__}:{type(module).__qualname__}.forward" in (_LLAMA, _KIMI):
        _stage_of(module)


_LLAMA = "sglang.srt.models.llama_eagle3:LlamaModel.forward"
_KIMI = "sglang.srt.models.kimi_k25_eagle3:Eagle3MLAModel.forward"
HOOKS = (
    Hook(Target(_LLAMA, _FORWARD, {"c60196e4bb82208d": ["0.5.23"]}), "AROUND", _forward),
    Hook(Target(_KIMI, _FORWARD, {"a9f7c5d61f315ecf": ["0.5.23"]}), "AROUND", _forward),
    after_loading(_prepare),
)
