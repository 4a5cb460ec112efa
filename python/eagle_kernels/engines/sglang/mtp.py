"""The input stage of SGLang's MTP layers with norms on one op: eh_proj(cat([enorm(embeds), hnorm(hidden)])).

SGLang's forward stays as it is, a mask of position 0 included (`normed_linear`).
"""

import logging
from dataclasses import dataclass

from torch import nn

from ..eligibility import log_once
from ..gates import Target
from .hooks import LOGGER, Hook, leaving_to_sglang
from .normed_linear import NormedLinear
from .stage import after_loading
from .unsupported import determinism_unsupported_reason, linear_unsupported_reason, rms_norm_unsupported_reason

_MODELS = "sglang.srt.models"


@dataclass(frozen=True)
class Predictor:
    """A class whose forward has the stage.

    where: the class.  body: of its forward, whose order of norms, cat and projection it is.
    norms: its two norms, in the order of the cat.  projection: the linear layer behind it.
    """

    where: str
    body: str
    norms: tuple[str, str] = ("enorm", "hnorm")
    projection: str = "eh_proj"

    @property
    def forward(self) -> Target:
        return Target(f"{_MODELS}.{self.where}.forward", bodies={self.body: ["0.5.23"]})


_QWEN = (("pre_fc_norm_embedding", "pre_fc_norm_hidden"), "fc")
PREDICTORS = (
    Predictor("step3p5_mtp:Step3p5AMultiTokenPredictor", "f34bcae7ac3e7852"),
    Predictor("qwen3_next_mtp:Qwen3NextForCausalLMMTP", "adb9f5cdadfb46fa", *_QWEN),
    Predictor("qwen3_moe_mtp:Qwen3MoeForCausalLMMTP", "c06c8dac3b38056e", *_QWEN),
    Predictor("exaone_moe_mtp:ExaoneMoEForCausalLMMTP", "379bc5a1355e20ba", *_QWEN),
    Predictor("glm4_moe_nextn:Glm4MoeModelNextN", "4db1f8b7fb836d22"),
    Predictor("glm4_moe_lite_nextn:Glm4MoeLiteModelNextN", "8bcc1941cc5a5b67"),
    Predictor("glm_ocr_nextn:GlmOcrModelNextN", "660373f5b2574766"),
    Predictor("hunyuan_v3_nextn:HYV3ModelNextN", "20c31af30ab15786"),
    Predictor("hunyuan_v4_nextn:HYV4ModelNextN", "e34141a8f8e72a8c"),
    Predictor("mimo_v2_nextn:MiMoV2ModelNextN", "bf464a19b608d896"),
    Predictor("gigachat35_mtp:GigaChat35ModelNextN", "26a84ea4bc8807cb"),
    Predictor(
        "mimo_mtp:MiMoMultiTokenPredictorLayer",
        "ae47d0022e46150e",
        ("hidden_layernorm", "token_layernorm"),
        "input_proj",
    ),
    Predictor(
        "ernie4_eagle:Ernie4ModelMTP",
        "e7757b79a2df5f5b",
        ("mtp_emb_norm", "mtp_hidden_norm"),
        "mtp_linear_proj",
    ),
)
_BY_CLASS = {f"{_MODELS}.{row.where}": row for row in PREDICTORS}


def prepare(module: nn.Module) -> None:
    """Fuse the stage of a predictor that has been loaded, or log why not."""
    row = _BY_CLASS.get(f"{type(module).__module__}:{type(module).__qualname__}")
    if row is None or "forward" in getattr(module, row.projection).__dict__:  # weights that are loaded again
        return
    from sglang.srt.layers.layernorm import GemmaRMSNorm

    norms, linear = [getattr(module, norm) for norm in row.norms], getattr(module, row.projection)
    name = f"{type(module).__name__}.{row.projection}"
    gemma = type(norms[0]) is GemmaRMSNorm
    unsupported = determinism_unsupported_reason() or linear_unsupported_reason(linear, bias=True)
    for norm in norms:
        unsupported = unsupported or rms_norm_unsupported_reason(norm, linear.weight.dtype, gemma=gemma)
    if unsupported is not None:
        log_once(LOGGER, logging.INFO, f"{name} stays with SGLang: {unsupported}")
        return
    first, second = [(module, norm) for norm in row.norms]
    offset = 1.0 if gemma else 0.0
    NormedLinear(name, (first, second), (module, row.projection), norm_offset=offset).put_in_where_faster()


def _prepare(module: nn.Module) -> None:
    with leaving_to_sglang(f"{type(module).__name__}'s input stage"):
        prepare(module)


HOOKS = (*(Hook(row.forward) for row in PREDICTORS), after_loading(_prepare))
