"""The input stage of Step-3.5's and Qwen3-Next's MTP layers on one op: fc(cat([norm(embeds), norm'(hidden)])).

SGLang's forward stays as it is (`normed_linear`).
"""

import logging

from torch import nn

from ..eligibility import log_once
from ..gates import Target
from .hooks import LOGGER, Hook, leaving_to_sglang
from .normed_linear import NormedLinear
from .stage import after_loading
from .unsupported import determinism_unsupported_reason, linear_unsupported_reason, rms_norm_unsupported_reason


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
    first, second, projection = [(module, name) for name in names]
    NormedLinear(name, (first, second), projection, norm_offset=1.0).put_in_where_faster()


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
