"""The input stage of an MTP / NextN layer as its checkpoint was trained: order, norms, offset, scale, position 0."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import checks
from .drafter_config import check_config, check_engine, flag_field, get_field, int_field, needed_int_field, number_field
from .models import families, find_family

if TYPE_CHECKING:
    from .models.family import EngineStage, ModelFamily, MTPStage

ORDERS = ("embed,hidden", "hidden,embed")
# What the next draft step reads: the layer's output after or before the final norm; the target's state, like the first
# step; the residual streams; the normed output after Gemma 4's post_projection.
CHAINS = ("normed", "pre-norm", "target", "streams", "projected")


@dataclass(frozen=True)
class MTPConfig:
    """y = eh_proj(cat[enorm(scale * embedding), hnorm(hidden)]), 2H -> D.

    Args:
        hidden_size: H, of embedding and hidden state.
        out_features: D; None means H.
        order: "embed,hidden" or "hidden,embed" (MiMo, Inkling), the order of the concat.
        normed: False where there are no enorm and hnorm (the Gemma 4 assistant, EAGLE-1).
        enorm_eps, hnorm_eps: of the two norms.
        norm_offset: the gain of both is norm_offset + weight.
        bias: eh_proj has one.
        embedding_scale: multiplies the rows of the embedding table; `embeds` given to the layer are used as they are.
        round_embedding_scale: the scale is rounded to the table's dtype first, as in transformers and vLLM; SGLang uses
            the float.
        embedding_prenormed: the target norms the embedding before enorm does (Inkling), so the layer needs `embeds`.
        mask_position_zero: the embedding is set to zero where the position is 0, before its norm.
        chain: what the next draft step reads. "normed" and "pre-norm" are `ChainedHiddenStates` with norm_output True
            and False; "target" is the target's state again, "streams" the layer's residual streams (DeepSeek-V4), and
            "projected" the normed output projected to H.
    """

    hidden_size: int
    out_features: int = None  # type: ignore[assignment]  # an int from __post_init__ on
    order: str = "embed,hidden"
    normed: bool = True
    enorm_eps: float = 1e-6
    hnorm_eps: float = 1e-6
    norm_offset: float = 0.0
    bias: bool = False
    embedding_scale: float | None = None
    round_embedding_scale: bool = False
    embedding_prenormed: bool = False
    mask_position_zero: bool = False
    chain: str = "normed"

    def __post_init__(self) -> None:
        op = type(self).__name__
        if self.out_features is None:
            object.__setattr__(self, "out_features", self.hidden_size)
        checks.check_sizes(op, self, "hidden_size", "out_features")
        checks.check_width(op, 2, self.hidden_size)
        checks.check_width(op, 1, self.out_features)
        for name in ("normed", "bias", "round_embedding_scale", "embedding_prenormed", "mask_position_zero"):
            checks.check_bool(op, name, getattr(self, name))
        for name in ("norm_offset", "enorm_eps", "hnorm_eps"):  # floats, as `Sources.of_module` takes them
            object.__setattr__(self, name, checks.check_number(op, name, getattr(self, name)))
        for name in ("enorm_eps", "hnorm_eps"):
            checks.check_eps(op, name, getattr(self, name))
        checks.check_finite(op, "norm_offset", self.norm_offset)
        if self.embedding_scale is not None:
            scale = checks.check_number(op, "embedding_scale", self.embedding_scale)
            if not 0 < scale < math.inf:
                raise checks.error(ValueError, op, f"embedding_scale is {scale}", "above 0 and finite")
            object.__setattr__(self, "embedding_scale", scale)
        for name, words in (("order", ORDERS), ("chain", CHAINS)):
            if (word := getattr(self, name)) not in words:
                raise checks.error(ValueError, op, f"{name} is {word!r}", " or ".join(map(repr, words)))

    @classmethod
    def from_hf(cls, config: object, *, engine: str = "sglang") -> MTPConfig:
        """The stage of a target's MTP layers (or of a drafter's own config), by its family in `models/table.py`.

        Args:
            config: a Hugging Face config, object or dict; a composite one is read through its `text_config`. The
                family is that of its `architectures` or its `model_type`.
            engine: "sglang", "vllm" or "transformers": the one whose chain, bias, position-0 rule and rounding of the
                scale to take. transformers' `MtpModel` masks nothing, has no bias and passes on the normed state.

        Raises:
            ValueError: a model type without a known MTP stage (the message lists those there are), one that projects
                each residual stream by itself, one that the engine does not serve, an unknown engine, a missing
                hidden_size.
        """
        check_engine(_FROM_HF, engine)
        check_config(_FROM_HF, "config", config)
        family, stage = _family_of(config)
        served = _engine_stage(family, stage, engine)
        text = get_field(config, "text_config") or config
        width = needed_int_field(_FROM_HF, "hidden_size", text, whose="the target's width")
        # The assistant of Gemma 4 is narrower than the target whose states it reads.
        hidden_size = int_field(_FROM_HF, "backbone_hidden_size", config) or width
        # Where a family's field has another name, transformers' own config may still call it rms_norm_eps (MiMo-V2).
        eps = number_field(_FROM_HF, "rms_norm_eps", text, default=1e-6)
        eps = number_field(_FROM_HF, stage.eps_field, text, default=eps)
        scale = hidden_size**0.5 if stage.embedding_scaled else None
        if stage.embedding_scale_field is not None:
            scale = number_field(_FROM_HF, stage.embedding_scale_field, text, default=1.0)
        return cls(
            hidden_size=hidden_size,
            out_features=width,
            order=stage.order,
            normed=stage.normed,
            enorm_eps=eps,
            hnorm_eps=eps,
            norm_offset=_norm_offset(family, stage, text),
            bias=flag_field(_FROM_HF, served.bias, text) if isinstance(served.bias, str) else served.bias,
            embedding_scale=scale,
            round_embedding_scale=engine in family.scale_rounded_by,
            embedding_prenormed=stage.embedding_prenormed,
            mask_position_zero=served.zeroes_position_0,
            chain="normed" if _is_chain_normed(config, text, stage, engine) else served.chain,
        )


_FROM_HF = "MTPConfig.from_hf"


def _family_of(config: object) -> tuple[ModelFamily, MTPStage]:
    model_type, architectures = get_field(config, "model_type"), get_field(config, "architectures")
    names = (
        [name for name in architectures if isinstance(name, str)] if isinstance(architectures, (list, tuple)) else []
    )
    family = find_family(model_type, names)
    if family is None or family.mtp is None:
        stages = [other for other in families().values() if other.mtp is not None and not other.mtp.streams]
        known = sorted({name for other in stages for name in other.config_types})
        because = "order, norms and masking depend on it; for another one build the MTPConfig itself"
        raise checks.error(ValueError, _FROM_HF, f"model_type is {model_type!r}", f"one of {known}", because)
    if family.mtp.streams:
        because = f"{family.mtp.names[-1]} projects each residual stream by itself: MTPStreamsConfig"
        raise checks.error(ValueError, _FROM_HF, f"model_type is {model_type!r}", "one projection of a concat", because)
    return family, family.mtp


def family_of_streams(op: str, config: object) -> tuple[ModelFamily, MTPStage, str]:
    """The family of a target with residual streams, its stage, and the config's field with their number."""
    model_type = get_field(config, "model_type")
    family = find_family(model_type)
    if family is None or family.mtp is None or family.mtp.streams_field is None:
        rows = [row for row in families().values() if row.mtp is not None and row.mtp.streams]
        known = sorted(name for row in rows for name in row.config_types)
        because = "norms and masking depend on it; for another one build the MTPStreamsConfig itself"
        raise checks.error(ValueError, op, f"model_type is {model_type!r}", f"one of {known}", because)
    return family, family.mtp, family.mtp.streams_field


def _engine_stage(family: ModelFamily, stage: MTPStage, engine: str) -> EngineStage:
    engines = stage.engines | ({"transformers": stage.transformers} if family.model_types else {})
    if engine not in engines:
        because = f"{engine} does not serve {family.title}"
        raise checks.error(ValueError, _FROM_HF, f"engine is {engine!r}", " or ".join(map(repr, engines)), because)
    return engines[engine]


def _is_chain_normed(config: object, text: object, stage: MTPStage, engine: str) -> bool:
    """By Inkling's field, which its checkpoints have in `mtp_config`.

    Source: SGLang 0.5.23 `inkling`, vLLM 0.33 `config/speculative`, transformers 5.23 `configuration_inkling`.
    """
    if stage.chain_field is None:
        return False
    of_mtp = get_field(config, "mtp_config")
    places = {"sglang": (of_mtp, text), "vllm": (of_mtp or text,), "transformers": (text, of_mtp)}
    return flag_field(_FROM_HF, stage.chain_field, *places[engine])


def _norm_offset(family: ModelFamily, stage: MTPStage, text: object) -> float:
    if stage.norm_offsets is None:
        return family.norm_offset
    name, offsets = stage.norm_offsets
    value = get_field(text, name)
    for known, offset in offsets.items():
        if known is value or (isinstance(known, str) and known == value):
            return offset
    expected = f"one of {[known for known in offsets if known is not None]}"
    raise checks.error(ValueError, _FROM_HF, f"{name} is {value!r}", expected, "another norm is no RMSNorm")
