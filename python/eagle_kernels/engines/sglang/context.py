"""The context of SGLang's DFlash and DSpark drafters on one op: hidden_norm(fc(cat of K captured layers)).

With a norm of each captured layer in front of fc (Laguna). Replaced is `project_target_hidden` of a drafter that has
been loaded, where that is SGLang's own. K and V of the draft layers stay with SGLang: on a GPU one Triton kernel over
all of them, on a CPU each layer's own modules, into a pool of the attention backend's layout and dtype.
"""

import logging
import sys
from typing import Any

from torch import Tensor, nn

from ..decision import Decision
from ..eligibility import log_once
from ..gates import Target
from ..projection import EngineProjection
from .hooks import LOGGER, Hook, leaving_to_sglang
from .stage import after_loading, decide
from .unsupported import determinism_unsupported_reason, linear_unsupported_reason, rms_norm_unsupported_reason

_METHOD = "project_target_hidden"
_DFLASH = f"sglang.srt.models.dflash:DFlashDraftModel.{_METHOD}"
_LAGUNA = f"sglang.srt.models.dflash:DFlashLagunaForCausalLM.{_METHOD}"


class Context:
    """Takes the place of a drafter's `project_target_hidden`."""

    def __init__(self, drafter: Any, name: str) -> None:
        self.drafter, self.name = drafter, name
        self.own = getattr(drafter, _METHOD)
        self.fc = drafter.fc
        norms = getattr(drafter, "aux_hidden_norms", ())
        self.projection = EngineProjection(
            self.fc, drafter.num_context_features, chunk_norms=norms, post_norm=drafter.hidden_norm
        )

    def put_in_where_faster(self) -> None:
        """Decide, log it, and put it in where the op runs at any row count."""
        self.projection, self.decision = decide(self.name, self.projection, self.own)
        if not self.decision.never:
            setattr(self.drafter, _METHOD, self)

    def __call__(self, target_hidden: Tensor) -> Tensor:
        weight = self.fc.weight
        # Another dtype or width is SGLang's to cast or to refuse; fc that LoRA wraps since is LoRA's.
        fits = target_hidden.dtype == weight.dtype and target_hidden.shape[1:] == weight.shape[1:]
        if fits and self.drafter.fc is self.fc and self.decision.runs_op(target_hidden.shape[0]):
            try:
                return self.projection(target_hidden)
            except Exception as failure:
                self.decision = Decision()
                message = f"{self.name} stays with SGLang, {self.projection.op} failed: {failure!r}"
                log_once(LOGGER, logging.WARNING, message)
        return self.own(target_hidden)


def prepare(drafter: Any) -> None:
    """Put the op into a drafter that has been loaded, or log why not."""
    method = getattr(type(drafter), _METHOD, None)
    if method is None or _METHOD in drafter.__dict__:  # weights that are loaded again
        return
    name = f"{type(drafter).__name__}.{_METHOD}"
    dflash = sys.modules.get("sglang.srt.models.dflash")
    known = [getattr(dflash, owner).__dict__[_METHOD] for owner in ("DFlashDraftModel", "DFlashLagunaForCausalLM")]
    unsupported = None if method in known else f"it is that of {method.__module__}"
    unsupported = unsupported or determinism_unsupported_reason() or linear_unsupported_reason(drafter.fc)
    if unsupported is None:
        for norm in (drafter.hidden_norm, *getattr(drafter, "aux_hidden_norms", ())):
            unsupported = unsupported or rms_norm_unsupported_reason(norm, drafter.fc.weight.dtype)
    if unsupported is not None:
        log_once(LOGGER, logging.INFO, f"{name} stays with SGLang: {unsupported}")
        return
    Context(drafter, name).put_in_where_faster()


def _prepare(module: nn.Module) -> None:
    with leaving_to_sglang(f"{type(module).__name__}.{_METHOD}"):
        prepare(module)


_PARAMETERS = ("self", "target_hidden")
HOOKS = (
    Hook(Target(_DFLASH, _PARAMETERS, {"2d895ff21d758dc3": ["0.5.23"]})),
    Hook(Target(_LAGUNA, _PARAMETERS, {"ab06d200d43b1fa2": ["0.5.23"]})),
    after_loading(_prepare),
)
