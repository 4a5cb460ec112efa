"""The input stage of Step-3.5's and Qwen3-Next's MTP layers on one op: fc(cat([norm(embeds), norm'(hidden)])).

SGLang's forward stays as it is: the norms set their inputs aside and hand on a view without columns, so that SGLang's
own cat has nothing to copy, and the projection norms, concatenates and projects what was set aside. The modules and
their parameters stay where they are, so loading and updating weights see no difference.
"""

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ..decision import Decision
from ..eligibility import linear_unsupported_reason, log_once
from ..gates import Target
from ..projection import EngineProjection
from .hooks import LOGGER, Hook, leaving_to_sglang
from .stage import after_loading, decide
from .unsupported import determinism_unsupported_reason, rms_norm_unsupported_reason


def prepare(module: nn.Module) -> None:
    """Fuse the stage of a predictor that has been loaded, or log why not."""
    names = _PREDICTORS.get(f"{type(module).__module__}:{type(module).__qualname__}")
    if names is None or "forward" in getattr(module, names[-1]).__dict__:  # weights that are loaded again
        return
    *norms, linear = [getattr(module, name) for name in names]
    name = f"{type(module).__name__}.{names[-1]}"
    unsupported = determinism_unsupported_reason() or linear_unsupported_reason(linear)
    for norm in norms:
        unsupported = unsupported or rms_norm_unsupported_reason(norm, linear.weight.dtype, gemma=True)
    if unsupported is not None:
        log_once(LOGGER, logging.INFO, f"{name} stays with SGLang: {unsupported}")
        return
    stage = _Stage(module, names)
    stage.projection, decided = decide(name, stage.projection, stage.engine)
    if not decided.never:
        stage.put_in(decided)


class _Stage:
    """Takes the place of three modules' forward, in their order: first norm, second norm, projection."""

    def __init__(self, predictor: nn.Module, names: tuple[str, str, str]) -> None:
        self.predictor, self.names = predictor, names
        self.modules = tuple(getattr(predictor, name) for name in names)
        self.forwards = tuple(module.forward for module in self.modules)
        *norms, linear = self.modules
        self.projection = EngineProjection(linear, 2, chunk_norms=norms, norm_offset=1.0)
        self.aside: list[Tensor] = []

    def put_in(self, decided: Decision) -> None:
        self.decision = decided
        for k, module in enumerate(self.modules):
            module.forward = self._project if k == 2 else self._norm(k)

    def engine(self, packed: Tensor) -> Tensor:
        """SGLang's own stage on [N, 2*H]."""
        return self._own(packed.chunk(2, -1))

    def _own(self, chunks: Sequence[Tensor]) -> Tensor:
        *norms, linear = self.forwards
        return linear(torch.cat([norm(chunk) for norm, chunk in zip(norms, chunks, strict=True)], -1))

    def _norm(self, k: int) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor, *args: object, **kwargs: object) -> Tensor:
            if k == 0:
                self.aside = []
                if not self._takes(x.shape[0]):
                    return self.forwards[0](x, *args, **kwargs)
            elif len(self.aside) != 1:
                return self.forwards[k](x, *args, **kwargs)
            self.aside.append(x)
            return x[:, :0]

        return forward

    def _takes(self, rows: int) -> bool:
        # A module wrapped since (LoRA) would see views without columns.
        whole = all(
            getattr(self.predictor, name) is module for name, module in zip(self.names, self.modules, strict=True)
        )
        return whole and self.decision.runs_op(rows)

    def _project(self, x: Tensor) -> Tensor:
        chunks, self.aside = self.aside, []
        if len(chunks) != 2:  # an idle batch comes without norms
            return self.forwards[2](x)
        try:
            return self.projection(chunks)
        except Exception as failure:
            self.decision = Decision()
            message = f"{self.names[-1]} stays with SGLang, {self.projection.op} failed: {failure!r}"
            log_once(LOGGER, logging.WARNING, message)
            return self._own(chunks)


_STEP3P5 = "sglang.srt.models.step3p5_mtp:Step3p5AMultiTokenPredictor"
_QWEN3_NEXT = "sglang.srt.models.qwen3_next_mtp:Qwen3NextForCausalLMMTP"

_PREDICTORS = {
    _STEP3P5: ("enorm", "hnorm", "eh_proj"),
    _QWEN3_NEXT: ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc"),
}


def _prepare(module: nn.Module) -> None:
    with leaving_to_sglang(f"{type(module).__name__}'s input stage"):
        prepare(module)


# The order of norms, cat and projection is forward's.
HOOKS = (
    Hook(Target(f"{_STEP3P5}.forward", bodies={"f34bcae7ac3e7852": ["0.5.23"]})),
    Hook(Target(f"{_QWEN3_NEXT}.forward", bodies={"adb9f5cdadfb46fa": ["0.5.23"]})),
    after_loading(_prepare),
)
