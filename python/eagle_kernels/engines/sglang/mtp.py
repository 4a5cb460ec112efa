"""The input stage of Step-3.5's and Qwen3-Next's MTP layers on one op: fc(cat([norm(embeds), norm'(hidden)])).

SGLang's forward stays as it is: the norms set their inputs aside and hand on a view without columns, so that SGLang's
own cat has nothing to copy, and the projection norms, concatenates and projects what was set aside. The modules and
their parameters stay where they are, so loading and updating weights see no difference.
"""

import logging
from collections.abc import Callable

from torch import Tensor, nn

from ...ops import norm_concat_linear
from ..eligibility import linear_unsupported_reason, log_once
from .hooks import LOGGER, Hook
from .unsupported import determinism_unsupported_reason, rms_norm_unsupported_reason


def _fuse_step3p5(result: None, predictor: nn.Module, *args: object, **kwargs: object) -> None:
    fuse(predictor, ("enorm", "hnorm"), "eh_proj")


def _fuse_qwen3_next(result: None, predictor: nn.Module, *args: object, **kwargs: object) -> None:
    fuse(predictor, ("pre_fc_norm_embedding", "pre_fc_norm_hidden"), "fc")


def fuse(predictor: nn.Module, norm_names: tuple[str, str], linear_name: str) -> None:
    """Fuse the stage of a predictor that has just been built, or log why not."""
    name = f"{type(predictor).__name__}.{linear_name}"
    norms, linear = [getattr(predictor, norm) for norm in norm_names], getattr(predictor, linear_name)
    unsupported = determinism_unsupported_reason() or linear_unsupported_reason(linear)
    for norm in norms:
        unsupported = unsupported or rms_norm_unsupported_reason(norm, linear.weight.dtype, gemma=True)
    if unsupported is not None:
        log_once(LOGGER, logging.INFO, f"{name} stays with SGLang: {unsupported}")
        return
    log_once(LOGGER, logging.INFO, f"{name} runs norm_concat_linear")
    _Stage(predictor, norm_names, linear_name)


class _Stage:
    """Takes the place of three modules' forward, in their order: first norm, second norm, projection."""

    def __init__(self, predictor: nn.Module, norm_names: tuple[str, str], linear_name: str) -> None:
        self.predictor = predictor
        self.names = (*norm_names, linear_name)
        self.modules = tuple(getattr(predictor, name) for name in self.names)
        self.forwards = tuple(module.forward for module in self.modules)
        self.aside: list[Tensor] = []
        for k, module in enumerate(self.modules):
            module.forward = self._project if k == 2 else self._norm(k)

    def _norm(self, k: int) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor, *args: object, **kwargs: object) -> Tensor:
            if k == 0:
                self.aside = []
                # A module wrapped since (LoRA) would see views without columns.
                whole = all(
                    getattr(self.predictor, name) is module
                    for name, module in zip(self.names, self.modules, strict=True)
                )
                if not whole:
                    return self.forwards[0](x, *args, **kwargs)
            elif len(self.aside) != 1:
                return self.forwards[k](x, *args, **kwargs)
            self.aside.append(x)
            return x[:, :0]

        return forward

    def _project(self, x: Tensor) -> Tensor:
        chunks, self.aside = self.aside, []
        if len(chunks) != 2:  # an idle batch comes without norms
            return self.forwards[2](x)
        *norms, linear = self.modules
        gains, eps = [norm.weight.data for norm in norms], [norm.variance_epsilon for norm in norms]
        return norm_concat_linear(chunks, linear.weight.data, norm_weight=gains, eps=eps, norm_offset=1.0)


HOOKS = (
    Hook("sglang.srt.models.step3p5_mtp:Step3p5AMultiTokenPredictor.__init__", "AFTER", _fuse_step3p5),
    Hook("sglang.srt.models.qwen3_next_mtp:Qwen3NextForCausalLMMTP.__init__", "AFTER", _fuse_qwen3_next),
)
