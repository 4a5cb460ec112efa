"""What is special about one family of target models: the record that layers, engines, capture and presets read."""

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class MTPStage:
    """The input stage of the family's MTP / NextN layers: y = eh_proj(cat of enorm(embedding) and hnorm(hidden)).

    order: which of the two comes first in the concat, "embed,hidden" or "hidden,embed".
    normed: False where the projection reads embedding and hidden state as they are.
    embedding_scaled: the drafter multiplies the shared table's rows by sqrt(H) itself.
    chained: layer k reads the pre-norm output of layer k - 1; else every step reads the target's hidden state.
    position_0_zeroed_by: the engines that zero the embedding where the position is 0, before its norm.
    drafter_types: model types of drafters with a checkpoint of their own.
    """

    order: str = "embed,hidden"
    normed: bool = True
    embedding_scaled: bool = False
    chained: bool = False
    position_0_zeroed_by: tuple[str, ...] = ()
    drafter_types: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelFamily:
    """One family of targets.

    name: how tests and messages call it.
    model_types: `model_type` of the Hugging Face configs, of the whole model and of its text part.
    norm_offset: the gain of the target's and its MTP layers' norms is norm_offset + weight.
    embedding_scaled: the target multiplies its embeddings by sqrt(H).
    scale_rounded_by: the engines that round sqrt(H) to the table's dtype first; `embedding_scale` gives the number.
    layer_ids: what the layer ids of an EAGLE-3 checkpoint mean, a name of `drafter_config.LAYER_ID_RULES`; None where
        no engine captures layers of this target.
    mtp: the input stage of its MTP layers, or None.
    shapes: entries of the schema of `shapes.json`, without what this record says already.
    """

    name: str
    model_types: tuple[str, ...]
    norm_offset: float = 0.0
    embedding_scaled: bool = False
    scale_rounded_by: tuple[str, ...] = ()
    layer_ids: str | None = None
    mtp: MTPStage | None = None
    shapes: tuple[dict, ...] = field(default=(), hash=False)

    def embedding_scale(self, hidden_size: int, dtype: torch.dtype, *, engine: str) -> float | None:
        """What `engine` multiplies a row of a table of `dtype` by, in fp32; None where it does not."""
        if not self.embedding_scaled:
            return None
        scale = hidden_size**0.5
        return torch.tensor(scale, dtype=dtype).item() if engine in self.scale_rounded_by else scale
