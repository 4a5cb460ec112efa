"""What is special about one family of target models: the records that layers, engines, capture and presets read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class EngineStage:
    """How one engine serves the input stage of a family's MTP layers.

    architectures: the names under which its registry finds the drafter.
    linear: the class of the projection: "Linear" (torch's, never quantized), "ReplicatedLinear",
        "ColumnParallelLinear" (the weight's rows over the ranks, gathered), "RowParallelLinear" (columns, all-reduced).
    chain: what the next draft step reads, a word of `mtp_config.CHAINS`.
    quantized: the projection takes the drafter's quantization config.
    zeroes_position_0: the embedding is zero where the position is 0, before its norm.
    bias: whether the projection has one, or the name of the config's field that says so.
    compiled: whether torch.compile compiles the drafter in the engine's default settings.
    """

    architectures: tuple[str, ...]
    linear: str = "Linear"
    chain: str = "normed"
    quantized: bool = False
    zeroes_position_0: bool = False
    bias: bool | str = False
    compiled: bool = False


@dataclass(frozen=True)
class MTPStage:
    """The input stage of the family's MTP / NextN layers: y = eh_proj(cat of enorm(embedding) and hnorm(hidden)).

    order: which of the two comes first in the concat, "embed,hidden" or "hidden,embed".
    normed: False where the projection reads embedding and hidden state as they are.
    names: what the family's modules call enorm, hnorm and eh_proj; without norms, what they call eh_proj.
    eps_field: the config's field with the eps of both norms.
    norm_offsets: (field, offset by its value) where a config's field says what the gains are added to. The key None is
        for a config without the field; a value that is no key is another norm than RMSNorm.
    embedding_scaled: the drafter multiplies the shared table's rows by sqrt(H) itself.
    embedding_scale_field: the config's field with the factor, where that is another one.
    embedding_prenormed: the embedding has been through a norm of the target before enorm.
    chain_field: a field of the config that is true where the next step reads the normed state, whatever `chain` says.
    streams_field: the config's field with the number of residual streams (mHC), which are projected each by itself:
        y_k = e_proj(enorm(e)) + h_proj(hnorm(x_k)); `hnorm_over` is "stream" or "row", the columns that one norm reads.
    sglang, vllm: None where the engine does not serve it.
    drafter_types: model types of drafters with a checkpoint of their own.
    """

    order: str = "embed,hidden"
    normed: bool = True
    names: tuple[str, ...] = ("enorm", "hnorm", "eh_proj")
    eps_field: str = "rms_norm_eps"
    norm_offsets: tuple[str, Mapping[Any, float]] | None = field(default=None, hash=False)
    embedding_scaled: bool = False
    embedding_scale_field: str | None = None
    embedding_prenormed: bool = False
    chain_field: str | None = None
    streams_field: str | None = None
    hnorm_over: str = "stream"
    sglang: EngineStage | None = None
    vllm: EngineStage | None = None
    drafter_types: tuple[str, ...] = ()

    @property
    def streams(self) -> bool:
        """Whether its hidden states are several residual streams."""
        return self.streams_field is not None

    @property
    def projections(self) -> tuple[str, ...]:
        """The names in `names` that are not norms."""
        return self.names[2:] if self.normed else self.names

    @property
    def engines(self) -> dict[str, EngineStage]:
        """The engines that serve it, by name."""
        both = {"sglang": self.sglang, "vllm": self.vllm}
        return {name: engine for name, engine in both.items() if engine is not None}

    @property
    def transformers(self) -> EngineStage:
        """The stage in transformers 5.23, `MtpModel` and the Gemma 4 assistant: nothing masked, no bias."""
        return EngineStage((), chain="pre-norm" if self.chain_field else "normed" if self.normed else "projected")


@dataclass(frozen=True)
class ModelFamily:
    """One family of targets.

    name: what tests and messages call it.
    title: what docs/models.md calls it.
    model_types: `model_type` of the Hugging Face configs, of the whole model and of its text part.
    target_architectures: those that tell the family from another one with the same model types.
    norm_offset: the gain of the target's and its MTP layers' norms is norm_offset + weight.
    embedding_scaled: the target multiplies its embeddings by sqrt(H).
    scale_rounded_by: the engines that round sqrt(H) to the table's dtype first: `MTPConfig.round_embedding_scale`.
    layer_ids: what the layer ids of an EAGLE-3 checkpoint mean, a name of `drafter_config.LAYER_ID_RULES`; None where
        no engine captures layers of this target.
    mtp: the input stage of its MTP layers, or None.
    """

    name: str
    title: str
    model_types: tuple[str, ...] = ()
    target_architectures: tuple[str, ...] = ()
    norm_offset: float = 0.0
    embedding_scaled: bool = False
    scale_rounded_by: tuple[str, ...] = ()
    layer_ids: str | None = None
    mtp: MTPStage | None = None

    @cached_property
    def config_types(self) -> tuple[str, ...]:
        """The model types of a target's config and of its drafter's own."""
        return self.model_types + (self.mtp.drafter_types if self.mtp else ())

    @cached_property
    def architectures(self) -> frozenset[str]:
        """Every architecture that names the family: those of its drafters and `target_architectures`."""
        served = self.mtp.engines.values() if self.mtp else ()
        return frozenset(self.target_architectures).union(*(engine.architectures for engine in served))
