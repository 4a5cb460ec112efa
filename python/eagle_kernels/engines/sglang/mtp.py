"""The input stage of SGLang's MTP layers with norms on one op: eh_proj(cat([enorm(embeds), hnorm(hidden)])).

With a target of residual streams (mHC) e_proj(enorm(embeds)) and h_proj(hnorm(streams)) are one op each. SGLang's
forward stays as it is, including a mask of position 0 (`normed_linear`).

A row of PREDICTORS is checked when a drafter of its class has been loaded; with another body, that drafter alone stays
with SGLang.
"""

import logging
from dataclasses import dataclass

import torch
from torch import nn

from ..eligibility import log_once
from ..gates import Target
from .hooks import LOGGER, leaving_to_sglang
from .normed_linear import NormedLinear
from .stage import after_loading
from .unsupported import (
    activation_dtype,
    determinism_unsupported_reason,
    linear_unsupported_reason,
    rms_norm_unsupported_reason,
)

_MODELS = "sglang.srt.models"


@dataclass(frozen=True)
class Predictor:
    """A class whose forward has the stage.

    where: the class.  body: the hash of `method`, which fixes the order of norms, cat and projection.
    norms: those in front of the projection, in the order of the cat.  projection: the linear layer behind them.
    method: the method that runs the stage.  within: the submodule that has the modules.
    not_on_cuda: on CUDA a kernel of SGLang's reads the gains and the norms are not called.
    norm: (class, body of its forward) of norms of the model's own class, w * x / rms in fp32.
    """

    where: str
    body: str
    norms: tuple[str, ...] = ("enorm", "hnorm")
    projection: str = "eh_proj"
    method: str = "forward"
    within: str = ""
    not_on_cuda: bool = False
    norm: tuple[str, str] | None = None

    @property
    def target(self) -> Target:
        return Target(f"{_MODELS}.{self.where}.{self.method}", bodies={self.body: ["0.5.23"]})

    def norm_class(self) -> type | None:
        """The class in `norm`; raises TargetError where its forward has another body."""
        if self.norm is None:
            return None
        where, body = self.norm
        return Target(f"{_MODELS}.{where}.forward", bodies={body: ["0.5.23"]}).find()[0]


_QWEN = (("pre_fc_norm_embedding", "pre_fc_norm_hidden"), "fc")
_V4 = ("deepseek_v4_nextn:DeepseekV4ModelNextN", "878e008ca7ca7981")
PREDICTORS = (
    Predictor("deepseek_nextn:DeepseekModelNextN", "9ea436164c215d54", not_on_cuda=True),
    Predictor(*_V4, ("enorm",), "e_proj"),
    Predictor(*_V4, ("hnorm",), "h_proj"),
    # The norm of the hidden state is over a row of all streams, while fc_hidden reads a row per stream.
    Predictor(
        "qwen4_exp_mtp:Qwen4ExpForCausalLMMTP",
        "3d1bdd3041187ac4",
        ("pre_fc_norm_embedding",),
        "fc_embedding",
        method="_fuse_residual_linear_shared",
    ),
    # With one stream it has Qwen3.5's modules, and none of the row above.
    Predictor("qwen4_exp_mtp:Qwen4ExpForCausalLMMTP", "0a51ea86f66aa253", *_QWEN, method="_fuse_standard"),
    Predictor("longcat_flash_nextn:LongcatFlashModelNextN", "7e54b370b24135b3"),
    Predictor("bailing_moe_nextn:BailingMoEModelNextN", "083c0b746c13b855"),
    Predictor("dots3_common.nextn:Dot3NoteModelNextN", "2edecb7eaf8b90ff", within="heads.0"),
    Predictor("nemotron_h_mtp:NemotronHMTPAttentionDecoderLayer", "dd122fd7afc9eff2"),
    Predictor("nemotron_h_mtp:NemotronHMTPMoEDecoderLayer", "dd122fd7afc9eff2"),
    Predictor("step3p5_mtp:Step3p5AMultiTokenPredictor", "f34bcae7ac3e7852"),
    Predictor("qwen3_next_mtp:Qwen3NextForCausalLMMTP", "adb9f5cdadfb46fa", *_QWEN),
    Predictor("qwen3_5_mtp:Qwen3_5ForCausalLMMTP", "110cb20d364cc04d", *_QWEN),
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
    # The target's norm of the embedding, in front of these two, is a module of its own.
    Predictor("inkling:InklingMTPLayer", "0ce524ab405bb0e2", ("hidden_norm", "embed_norm"), "input_proj"),
    Predictor(
        "iquest_q1_mtp:IQuestQ1MTPLayer",
        "697e6222b99d817a",
        norm=("iquest_q1:IQuestQ1RMSNorm", "b6f22aadf60edf29"),
    ),
)


def prepare(module: nn.Module) -> None:
    """Fuse the stages of a predictor that has been loaded, or log why not."""
    where = f"{type(module).__module__}:{type(module).__qualname__}"
    for row in PREDICTORS:
        if f"{_MODELS}.{row.where}" == where:
            with leaving_to_sglang(f"{type(module).__name__}.{row.projection}"):
                _prepare_row(module, row)


def _prepare_row(module: nn.Module, row: Predictor) -> None:
    owner = module.get_submodule(row.within)
    linear = getattr(owner, row.projection, None)
    # Layers after the first of a predictor have none; a layer whose weights are loaded again is fused already.
    if linear is None or "forward" in linear.__dict__:
        return
    from sglang.srt.layers.layernorm import GemmaRMSNorm

    row.target.check(getattr(type(module), row.method))
    norms = [getattr(owner, norm) for norm in row.norms]
    name = f"{type(module).__name__}.{row.projection}"
    gemma = type(norms[0]) is GemmaRMSNorm
    unsupported = determinism_unsupported_reason() or linear_unsupported_reason(linear, bias=True, codes=True)
    if row.not_on_cuda and linear.weight.is_cuda and torch.version.hip is None:
        unsupported = unsupported or "both norms and the cat are one kernel of SGLang's on CUDA"
    for norm in norms:
        dtype, known = activation_dtype(linear), row.norm_class()
        unsupported = unsupported or rms_norm_unsupported_reason(norm, dtype, gemma=gemma, known=known)
    if unsupported is not None:
        log_once(LOGGER, logging.INFO, f"{name} stays with SGLang: {unsupported}")
        return
    places = [(owner, norm) for norm in row.norms]
    NormedLinear(name, places, (owner, row.projection), norm_offset=float(gemma)).put_in_where_faster()


HOOKS = (after_loading(prepare),)
