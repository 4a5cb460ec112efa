"""MTPProjection and what it shares with layer 0 of EAGLE-3 drafters: one op call on an embedding and a hidden state."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from . import checks
from .dispatch import is_plain
from .layers import VocabParallelEmbedding, gain_of, project_onto, unit_norm
from .mtp_config import MTPConfig
from .ops import vocab_parallel_embedding
from .ops.sources import Sources
from .quantized_linear import DenseLinear, LoadsProjections, QuantizedLinear, load_projections, quantize_linear
from .vocab_shard import VocabShard

if TYPE_CHECKING:
    from typing_extensions import Self


def _fits_eps(scale: float | Tensor | None, eps: float) -> bool:
    """Whether the norm can absorb the scale as eps / scale^2, finite in fp32; the sign of a scale would be lost."""
    if scale is None:
        return True
    limit = torch.finfo(torch.float32).max
    return not isinstance(scale, Tensor) and 0 < scale <= limit and eps < limit * scale * scale


def _rounded(scale: float, dtype: torch.dtype) -> float:
    return torch.tensor(scale, dtype=dtype, device="cpu").item()  # the default device may be meta


class EmbeddingHiddenProjection(LoadsProjections):
    """y = projection(cat[norm(scale * embedding), norm'(hidden)]); `NAMES` are the checkpoint's names for the three."""

    NAMES: tuple[str, str, str]

    def __init__(
        self, config: MTPConfig, max_tokens: int | None, dtype: torch.dtype | None, device: torch.device | str | None
    ) -> None:
        super().__init__()
        op = type(self).__name__
        checks.check_factory(op, dtype, device)
        self.config = config
        self.max_tokens = None if max_tokens is None else checks.check_int(op, "max_tokens", max_tokens, at_least=1)
        self._static_buffers: dict[tuple, Tensor] = {}
        scale, rounds = config.embedding_scale, config.round_embedding_scale
        # By the table's dtype, rounded here: Dynamo traces no `item`.
        self._scales = {kind: _rounded(scale, kind) if scale and rounds else scale for kind in checks.DTYPES}
        factory: dict[str, Any] = {"dtype": dtype, "device": device}
        *norms, projection = self.NAMES
        for name, eps in zip(norms if config.normed else (), (config.enorm_eps, config.hnorm_eps), strict=False):
            self.add_module(name, unit_norm(config.hidden_size, eps, config.norm_offset, **factory))
        self.add_module(projection, self._dense(**factory))

    def __getstate__(self) -> dict[str, object]:
        # A copy gets buffers of its own when it needs them.
        return self.__dict__ | {"_static_buffers": {}}

    def quantize(self, format: str) -> Self:
        """Round the projection's weight to a format of `QuantizedWeight`, as `Eagle3Projection.quantize`."""
        name = self.NAMES[-1]
        op = f"{type(self).__name__}.quantize"
        setattr(self, name, quantize_linear(op, getattr(self, name), format))
        return self

    def _dense(self, **factory: Any) -> DenseLinear:
        config = self.config
        linear = DenseLinear(2 * config.hidden_size, config.out_features, bias=config.bias, **factory)
        return linear.requires_grad_(False)

    def _project(
        self,
        hidden: Tensor,
        ids: Tensor | None,
        table: Tensor | VocabParallelEmbedding | None,
        embeds: Tensor | None,
        positions: Tensor | None,
        indices: Tensor | None,
        out: Tensor | None,
    ) -> Tensor:
        self._check_sources(hidden, ids, table, embeds, positions)
        self._check_rows(hidden, ids if embeds is None else embeds, indices)
        config = self.config
        chunk, index, scale = self._embedding(ids, table, embeds, positions)
        if out is not None and index is not ids:
            self._check_copied(out, ids=ids, table=table, positions=positions)
        modules, pair = self._modules, self._ordered
        enorm, hnorm, projection = self.NAMES
        norm, gains, eps = "none", [], [1e-6]
        if config.normed:
            # norm(scale * e) with eps equals norm(e) with eps / scale^2, which saves the rounding of scale * e.
            enorm_eps = config.enorm_eps if scale is None else config.enorm_eps / scale**2
            norm, eps = "chunk", pair([enorm_eps, config.hnorm_eps])
            gains = pair([gain_of(modules[enorm]), gain_of(modules[hnorm])])
        chunks, rows = pair([chunk, hidden]), pair([index, indices])
        arguments = (chunks, 2, norm, gains, eps, config.norm_offset, None, rows)
        return project_onto(modules[projection], Sources.of_module("norm_concat_linear", *arguments), 0.0, out)

    def _ordered(self, pair: list) -> list:
        return pair if self.config.order == "embed,hidden" else pair[::-1]

    def _check_sources(
        self,
        hidden: Tensor,
        ids: Tensor | None,
        table: Tensor | VocabParallelEmbedding | None,
        embeds: Tensor | None,
        positions: Tensor | None,
    ) -> None:
        op = type(self).__name__
        if (ids is None) == (embeds is None) or (ids is None) != (table is None):
            given = {"ids": ids, "table": table, "embeds": embeds}
            got = ", ".join(name for name, value in given.items() if value is not None) or "neither"
            raise checks.error(ValueError, op, f"given are {got}", "either ids and table, or embeds")
        for name, tensor in (("ids", ids), ("positions", positions)):
            if tensor is not None:
                checks.check_ids(op, name, tensor)
        weight = table.weight if isinstance(table, VocabParallelEmbedding) else table
        embedding: tuple[str, Any] = ("embeds", embeds) if table is None else ("table", weight)
        for name, tensor in (("hidden", hidden), embedding):
            checks.check_rows(op, name, tensor)
            if tensor.dim() != 2 or tensor.shape[1] != self.config.hidden_size:
                raise checks.shape_error(op, name, tensor, f"(*, H) = (*, {self.config.hidden_size})")
        firsts: Any = embeds if ids is None else ids
        rows = firsts.shape[0]
        if positions is not None and positions.shape[0] != rows:
            raise checks.shape_error(op, "positions", positions, f"({rows},)", "there is one per embedding")
        if ids is not None and self.config.embedding_prenormed:
            because = "the target norms its embeddings before enorm does"
            raise checks.error(ValueError, op, "given are ids, table", "embeds", because)
        if positions is None and self.config.mask_position_zero:
            because = "the config masks position 0"
            raise checks.error(ValueError, op, "positions is None", f"({rows},) positions", because)
        if self.max_tokens is not None and rows > self.max_tokens:
            because = "static buffers never grow"
            raise checks.error(ValueError, op, f"there are {rows} rows", f"at most {self.max_tokens}", because)

    def _check_rows(self, hidden: Tensor, embeddings: Any, indices: Tensor | None) -> None:
        """`hidden`, as the caller gave it, or `indices` has a row for each of the ids or embeds."""
        op, rows = type(self).__name__, embeddings.shape[0]
        if indices is not None:
            checks.check_ids(op, "indices", indices)
            if indices.shape[0] != rows:
                raise checks.shape_error(op, "indices", indices, f"({rows},)", "there is one per embedding")
        elif hidden.shape[0] != rows:
            because = "there is one row per embedding where indices is None"
            raise checks.shape_error(op, "hidden", hidden, f"({rows}, ...)", because)

    def _embedding(
        self, ids: Tensor | None, table: Any, embeds: Any, positions: Any
    ) -> tuple[Tensor, Tensor | None, float | None]:
        """(chunk, index, scale) of the embedding; the norm has to absorb a scale that is not None."""
        if ids is None:
            return embeds, self._masked(None, positions), None
        ids = self._masked(ids, positions)
        weight, shard = table, None
        scale: Any = None
        if isinstance(table, VocabParallelEmbedding):
            weight, shard, scale = table.weight, table.shard, table.own_scale
        scale = self._scales[weight.dtype] if scale is None else scale
        norm_takes_scale = self.config.normed and _fits_eps(scale, self.config.enorm_eps)
        if (shard is None or shard.is_full_table) and (scale is None or norm_takes_scale):
            return weight if shard is None else weight[: shard.num_embeddings], ids, scale
        if shard is None:
            shard = VocabShard.build(weight.shape[0], tp_rank=0, tp_size=1)
        rows = self._static("embeds", (ids.shape[0], weight.shape[1]), weight)
        vocab_parallel_embedding(ids, weight, shard, scale=None if norm_takes_scale else scale, out=rows)
        if isinstance(table, VocabParallelEmbedding):
            table.reduce(rows)
        return rows, None, scale if norm_takes_scale else None

    def _check_copied(self, out: Any, **inputs: Any) -> None:
        """Raise where `out` shares memory with an input that is read into other memory first: the op cannot tell."""
        tensors = {name: getattr(given, "weight", given) for name, given in inputs.items()}
        # A trace has no addresses; what is no matrix, the op refuses.
        if is_plain(out, *tensors.values()) and out.dim() == 2:
            checks.check_no_overlap(type(self).__name__, "out", out, tensors.items())

    def _masked(self, ids: Tensor | None, positions: Any) -> Any:
        """The rows of the embedding: ids, or 0 to N - 1 of embeds, but -1 where position 0 is masked."""
        if not self.config.mask_position_zero:
            return ids
        masked = self._static("ids", positions.shape, positions.new_empty(0, dtype=torch.int64))
        if ids is None:
            torch.arange(positions.shape[0], out=masked, device=masked.device)
        else:
            checks.check_device(type(self).__name__, "ids", ids, positions.device, "positions")
            masked.copy_(ids)
        return masked.masked_fill_(positions == 0, -1)

    def _static(self, name: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """The first rows of a buffer that keeps its address; a new tensor where max_tokens is None."""
        if self.max_tokens is None:
            return like.new_empty(shape)
        key = (name, like.dtype, like.device, *shape[1:])
        if key not in self._static_buffers:
            with torch.inference_mode(False):  # an inference tensor cannot be written outside of it
                buffer = like.new_zeros((self.max_tokens, *shape[1:]))
            if type(buffer) is not Tensor:  # a fake tensor is of no use to later calls
                return buffer[: shape[0]]
            self._static_buffers[key] = buffer
        return self._static_buffers[key][: shape[0]]


class MTPProjection(EmbeddingHiddenProjection):
    """The input stage of an MTP / NextN layer: y = eh_proj(cat[enorm(scale * embedding), hnorm(hidden)]).

    Args:
        config: `MTPConfig`; `MTPConfig.from_hf` reads what is special about the model's family.
        max_tokens: rows of the static buffers that a masked position 0, a sharded table and a scale without norm need:
            each is allocated by the first call that needs it and never again. None: every such call allocates.
        dtype, device: of the parameters.

    state_dict: enorm.weight [H], hnorm.weight [H] (config.normed), eh_proj.weight [D, 2H], eh_proj.bias [D]
    (config.bias). Parameters do not require grad: the layer is inference only.

    Source: SGLang 0.5.23 `deepseek_nextn`, `step3p5_mtp`, `gemma4_mtp`; vLLM 0.33 `deepseek_mtp`, `mimo_mtp`.
    """

    NAMES = ("enorm", "hnorm", "eh_proj")

    enorm: nn.RMSNorm
    hnorm: nn.RMSNorm
    eh_proj: DenseLinear | QuantizedLinear

    def __init__(
        self,
        config: MTPConfig,
        *,
        max_tokens: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        checks.check_type("MTPProjection", "config", config, MTPConfig, "an MTPConfig: MTPConfig.from_hf makes one")
        super().__init__(config, max_tokens, dtype, device)

    def load_checkpoint(
        self, weights: str | os.PathLike | Mapping[str, Tensor], *, layer: int | None = None
    ) -> MTPProjection:
        """Copy enorm, hnorm and eh_proj from a checkpoint: a safetensors file or folder, or tensors by name.

        Names may have any prefix (`model.layers.61.`); `layer` picks one where the checkpoint has several MTP layers.
        The names that the families of `models/table.py` have for the three are accepted too.

        Raises ValueError that names the weight, before anything is copied: as `Eagle3Projection.load_checkpoint`.
        """
        from . import checkpoint  # an import of 6 ms, which only loading needs

        state, weight = checkpoint.mtp_projection(weights, self, layer)
        load_projections("MTPProjection.load_checkpoint", self, state, {"eh_proj": (weight, self._dense)})
        return self

    def forward(
        self,
        hidden: Tensor,
        ids: Tensor | None = None,
        *,
        table: Tensor | VocabParallelEmbedding | None = None,
        embeds: Tensor | None = None,
        positions: Tensor | None = None,
        indices: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """y, [N, D], by one op call: a table of the whole vocabulary is one of its chunks, indexed by the token ids.

        Args:
            hidden: [T, H], the target's (or the previous MTP layer's) hidden states.
            ids, table: token ids [N], int32 / int64, and the embedding: the full [V, H] tensor, or a
                VocabParallelEmbedding, full or sharded, whose own scale (if it has one) overrides the config's. An id
                outside the vocabulary has a zero row.
            embeds: [N, H] in place of ids and table, already scaled.
            positions: [N] int32 / int64, needed where the config masks position 0.
            indices: [N], rows of `hidden` (accepted rows); None takes them in order, N = T.
            out: [N, D], as in `norm_concat_linear`.

        Raises TypeError / ValueError for arguments that do not fit; nothing is written to `out`.
        """
        return self._project(hidden, ids, table, embeds, positions, indices, out)
