"""The input stage of an MTP / NextN layer as its checkpoint was trained: order, norms, offset, scale, position 0."""

import math
from dataclasses import dataclass

from . import checks
from .drafter_config import check_config, get_field
from .models import families, find_family

ORDERS = ("embed,hidden", "hidden,embed")
ENGINES = ("sglang", "vllm", "transformers")


@dataclass(frozen=True)
class MTPConfig:
    """y = eh_proj(cat[enorm(scale * embedding), hnorm(hidden)]), 2H -> D.

    Args:
        hidden_size: H, of embedding and hidden state.
        out_features: D, H where None.
        order: "embed,hidden" or "hidden,embed" (MiMo, Inkling), the order of the concat.
        normed: False where there are no enorm and hnorm (the Gemma 4 assistant).
        enorm_eps, hnorm_eps: of the two norms.
        norm_offset: the gain of both is norm_offset + weight.
        embedding_scale: multiplies the rows of the embedding table; embeddings handed in are taken as they are.
        round_embedding_scale: to the table's dtype first, as transformers and vLLM do; SGLang takes the float.
        mask_position_zero: the embedding is zero where the position is 0, before its norm.
    """

    hidden_size: int
    out_features: int = None  # type: ignore[assignment]  # an int from __post_init__ on
    order: str = "embed,hidden"
    normed: bool = True
    enorm_eps: float = 1e-6
    hnorm_eps: float = 1e-6
    norm_offset: float = 0.0
    embedding_scale: float | None = None
    round_embedding_scale: bool = False
    mask_position_zero: bool = False

    def __post_init__(self) -> None:
        op = "MTPConfig"
        checks.check_int(op, "hidden_size", self.hidden_size, at_least=1)
        if self.out_features is None:
            object.__setattr__(self, "out_features", self.hidden_size)
        checks.check_int(op, "out_features", self.out_features, at_least=1)
        checks.check_width(op, 2, self.hidden_size)
        for name in ("normed", "round_embedding_scale", "mask_position_zero"):
            checks.check_bool(op, name, getattr(self, name))
        checks.check_number(op, "norm_offset", self.norm_offset)
        for name in ("enorm_eps", "hnorm_eps"):
            checks.check_eps(op, name, checks.check_number(op, name, getattr(self, name)))
        if (
            self.embedding_scale is not None
            and not 0 < checks.check_number(op, "embedding_scale", self.embedding_scale) < math.inf
        ):
            raise checks.error(ValueError, op, f"embedding_scale is {self.embedding_scale}", "above 0 and finite")
        if self.order not in ORDERS:
            raise checks.error(ValueError, op, f"order is {self.order!r}", " or ".join(map(repr, ORDERS)))

    @classmethod
    def from_hf(cls, config: object, *, engine: str = "sglang") -> "MTPConfig":
        """The stage of a target's MTP layers (or of a drafter's own config), by the family of its `model_type`.

        Args:
            config: a Hugging Face config, object or dict; a composite one is read through its `text_config`.
            engine: "sglang", "vllm" or "transformers": whose position-0 rule and whose rounding of the scale.

        Raises:
            ValueError: a model type without a known MTP stage (the message lists those there are), an unknown engine,
                a missing hidden_size.
        """
        op = "MTPConfig.from_hf"
        if engine not in ENGINES:
            raise checks.error(ValueError, op, f"engine is {engine!r}", " or ".join(map(repr, ENGINES)))
        check_config(op, "config", config)
        model_type = get_field(config, "model_type")
        family = find_family(model_type)
        if family is None or family.mtp is None:
            known = [
                name
                for family in families().values()
                if family.mtp is not None
                for name in family.model_types + family.mtp.drafter_types
            ]
            because = "order, norms and masking depend on it; for another one build the MTPConfig itself"
            raise checks.error(ValueError, op, f"model_type is {model_type!r}", f"one of {sorted(known)}", because)
        text, stage = get_field(config, "text_config") or config, family.mtp
        width = get_field(text, "hidden_size")
        if width is None:
            raise checks.error(ValueError, op, "hidden_size is missing", "the target's width")
        width = checks.check_int(op, "hidden_size", width, at_least=1)
        # The assistant of Gemma 4 is narrower than the target whose states it reads.
        backbone = get_field(config, "backbone_hidden_size")
        hidden_size = width if backbone is None else checks.check_int(op, "backbone_hidden_size", backbone, at_least=1)
        checks.check_width(op, 2, hidden_size)  # before its square root, which a number beyond a float has not
        eps = get_field(text, "rms_norm_eps")
        eps = 1e-6 if eps is None else checks.check_number(op, "rms_norm_eps", eps)
        return cls(
            hidden_size=hidden_size,
            out_features=width,
            order=stage.order,
            normed=stage.normed,
            enorm_eps=eps,
            hnorm_eps=eps,
            norm_offset=family.norm_offset,
            embedding_scale=hidden_size**0.5 if stage.embedding_scaled else None,
            round_embedding_scale=engine in family.scale_rounded_by,
            mask_position_zero=engine in stage.position_0_zeroed_by,
        )
