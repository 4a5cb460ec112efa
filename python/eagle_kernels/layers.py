"""The ops as inference modules whose state_dict is what checkpoints hold."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import checkpoint, checks
from .drafter_config import Eagle3Config
from .mtp_config import MTPConfig
from .ops import norm_concat, norm_concat_linear, vocab_parallel_embedding
from .packable_linear import PackableLinear
from .vocab_shard import VocabShard, shard_vocab_weight


class Eagle3Projection(nn.Module):
    """The `fc` block of an EAGLE-3 drafter: y = fc(fc_norm(input_norm(cat of K captured layers))).

    Args:
        config: `Eagle3Config`; chunk_norm and concat_norm say which norms there are, concat first where both are.
        dtype, device: of the parameters.

    state_dict: fc.weight [D, K*H], fc.bias [D] (config.bias), fc_norm.{k}.weight [H] (chunk_norm), input_norm.weight
    [K*H] (concat_norm). Parameters do not require grad: the layer is inference only.

    Source: SGLang 0.5.23 and vLLM 0.33 `llama_eagle3`.
    """

    def __init__(
        self, config: Eagle3Config, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        if not config.projection:
            raise checks.error(
                ValueError,
                "Eagle3Projection",
                "config.projection is False",
                "True",
                "a drafter without aux states has no fc",
            )
        self.config = config
        width = config.num_chunks * config.target_hidden_size
        place = {"dtype": dtype, "device": device}
        self.fc = PackableLinear(width, config.hidden_size, bias=config.bias, **place)
        self.fc_norm = None
        if config.chunk_norm:
            norms = (nn.RMSNorm(config.target_hidden_size, config.eps, **place) for _ in range(config.num_chunks))
            self.fc_norm = nn.ModuleList(norms)
        self.input_norm = nn.RMSNorm(width, config.eps, **place) if config.concat_norm else None
        self.requires_grad_(False)

    def load_checkpoint(self, weights: str | os.PathLike | Mapping[str, Tensor]) -> Eagle3Projection:
        """Copy fc and the norms from a drafter's checkpoint: a safetensors file or folder, or tensors by name.

        Names may start with `model.`; aux_norm_low|mid|high are fc_norm.0|1|2 (the legacy name). What belongs to the
        rest of the drafter (layers, midlayer, norm, lm_head, embed_tokens, d2t, t2d) is left alone.

        Raises ValueError that names the weight, before anything is copied: a missing one, a norm that the config does
        not have, a shape that does not fit, a projection that is quantised.
        """
        self.load_state_dict(checkpoint.eagle3_projection(weights, self))
        return self

    def prepack(self) -> Eagle3Projection:
        """Put fc.weight into oneDNN's blocked layout, for CPUs without AMX; every T then runs norm_concat + oneDNN.

        The dense weight is dropped (`fc.weight` is None, state_dict and load_state_dict work as before). Call it once
        after loading, where T is mostly above what the fused kernel is good for (`explain` says): with AVX-512-BF16 it
        gains 8 % at T = 64 and loses 17 % at T = 1; with AMX the fused kernel on the dense weight is faster up to 512.
        """
        op = "Eagle3Projection.prepack"
        if self.fc.packed is None and self.fc.weight.dtype == torch.float32:
            because = "oneDNN's fp32 product was 2.2 times as far from float64 as the dense one at K*H = 192"
            raise checks.error(TypeError, op, "fc.weight has dtype torch.float32", "bf16 or fp16", because)
        if self.fc.packed is None and self.fc.weight.device.type != "cpu":
            raise checks.error(
                RuntimeError,
                op,
                f"fc.weight is on {self.fc.weight.device}",
                "cpu",
                "oneDNN runs there",
            )
        self.fc.pack()
        return self

    def forward(
        self,
        chunks: Sequence[Tensor] | Tensor,
        *,
        residuals: Sequence[Tensor | None] | Tensor | None = None,
        indices: Sequence[Tensor | None] | Tensor | None = None,
        sum_squares: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """[N, D] from K tensors [T, H] or one packed [T, K*H]; the arguments are those of `norm_concat_linear`."""
        config = self.config
        sources = {"residuals": residuals, "indices": indices, "num_chunks": config.num_chunks}
        if self.input_norm is not None and self.fc_norm is not None:
            # Two norms in a row: the first is written out, as the engines do, and the second one reads it.
            chunks = norm_concat(
                chunks,
                norm="concat",
                norm_weight=self.input_norm.weight,
                eps=config.eps,
                sum_squares=sum_squares,
                **sources,
            )
            sources, sum_squares = {"num_chunks": config.num_chunks}, None
        if self.fc_norm is not None:
            norm, gains = "chunk", [norm.weight for norm in self.fc_norm]
        elif self.input_norm is not None:
            norm, gains = "concat", self.input_norm.weight
        else:
            norm, gains, sum_squares = "none", None, None
        sources |= {"norm": norm, "norm_weight": gains, "eps": config.eps, "sum_squares": sum_squares}
        if self.fc.packed is None:
            return norm_concat_linear(chunks, self.fc.weight, bias=self.fc.bias, out=out, **sources)
        projected = self.fc.product(norm_concat(chunks, **sources))
        return projected if out is None else out.copy_(projected)


class MTPProjection(nn.Module):
    """The input stage of an MTP / NextN layer: y = eh_proj(cat[enorm(scale * embedding), hnorm(hidden)]).

    Args:
        config: `MTPConfig`; `MTPConfig.from_hf` reads what is special about the model's family.
        max_tokens: rows of the static buffers that a masked position 0, a sharded table and a scale without norm need:
            each is allocated by the first call that needs it and never again. None: such calls allocate.
        dtype, device: of the parameters.

    state_dict: enorm.weight [H], hnorm.weight [H] (config.normed), eh_proj.weight [D, 2H]. Parameters do not require
    grad: the layer is inference only.

    Source: SGLang 0.5.23 `deepseek_nextn`, `step3p5_mtp`, `gemma4_mtp`; vLLM 0.33 `deepseek_mtp`, `mimo_mtp`.
    """

    def __init__(
        self,
        config: MTPConfig,
        *,
        max_tokens: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.max_tokens = max_tokens
        self._static_buffers: dict[tuple, Tensor] = {}
        place = {"dtype": dtype, "device": device}
        if config.normed:
            self.enorm = nn.RMSNorm(config.hidden_size, config.enorm_eps, **place)
            self.hnorm = nn.RMSNorm(config.hidden_size, config.hnorm_eps, **place)
            for norm in (self.enorm, self.hnorm):
                norm.weight.data.fill_(1 - config.norm_offset)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.out_features, bias=False, **place)
        self.requires_grad_(False)

    def load_checkpoint(
        self, weights: str | os.PathLike | Mapping[str, Tensor], *, layer: int | None = None
    ) -> MTPProjection:
        """Copy enorm, hnorm and eh_proj from a checkpoint: a safetensors file or folder, or tensors by name.

        Names may have any prefix (`model.layers.61.`); `layer` picks one where the checkpoint holds several MTP layers.
        Qwen3-Next's, MiMo's and Gemma 4's names for the three are known too.

        Raises ValueError that names the weight, before anything is copied: as `Eagle3Projection.load_checkpoint`.
        """
        self.load_state_dict(checkpoint.mtp_projection(weights, self, layer))
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
        """[N, D]. A table of the whole vocabulary is a chunk of the one op call, with the token ids as its indices.

        Args:
            hidden: [T, H], the target's (or the previous MTP layer's) hidden states.
            ids, table: token ids [N], int32 / int64, and the embedding: the full [V, H] tensor, or a
                VocabParallelEmbedding, full or sharded, whose own scale (if it has one) goes before the config's. An id
                outside the vocabulary has a zero row.
            embeds: [N, H] in their place, scaled already.
            positions: [N] int32 / int64, needed where the config masks position 0.
            indices: [N], rows of `hidden` (accepted rows); None takes them in order, N = T.
            out: [N, D], as in `norm_concat_linear`.

        Raises TypeError / ValueError for arguments that do not fit; nothing is written to `out`.
        """
        self._check_sources(ids, table, embeds, positions)
        config = self.config
        chunk, index, scale = self._embedding(ids, table, embeds, positions)
        for name, tensor in (("hidden", hidden), ("embeds" if table is None else "table", chunk)):
            if tensor.shape[-1:] != (config.hidden_size,):
                raise checks.shape_error("MTPProjection", name, tensor, f"(*, H) = (*, {config.hidden_size})")
        chunks, rows = [chunk, hidden], [index, indices]
        if not config.normed:
            chunks, rows = self._ordered(chunks), self._ordered(rows)
            return norm_concat_linear(chunks, self.eh_proj.weight, norm="none", indices=rows, out=out)
        # rms(scale * e) with eps is rms(e) with eps / scale^2, without the rounding of scale * e.
        eps = [config.enorm_eps / (1.0 if scale is None else scale**2), config.hnorm_eps]
        return norm_concat_linear(
            self._ordered(chunks),
            self.eh_proj.weight,
            norm_weight=self._ordered([self.enorm.weight, self.hnorm.weight]),
            eps=self._ordered(eps),
            norm_offset=config.norm_offset,
            indices=self._ordered(rows),
            out=out,
        )

    def _ordered(self, pair: list) -> list:
        return pair if self.config.order == "embed,hidden" else pair[::-1]

    def _check_sources(
        self,
        ids: Tensor | None,
        table: Tensor | VocabParallelEmbedding | None,
        embeds: Tensor | None,
        positions: Tensor | None,
    ) -> None:
        op = "MTPProjection"
        if (ids is None) == (embeds is None) or (ids is None) != (table is None):
            given = {"ids": ids, "table": table, "embeds": embeds}
            got = ", ".join(name for name, value in given.items() if value is not None) or "neither"
            raise checks.error(ValueError, op, f"given are {got}", "either ids and table, or embeds")
        for name, tensor in (("ids", ids), ("positions", positions)):
            if tensor is not None:
                checks.check_ids(op, name, tensor)
        if embeds is not None:
            checks.check_rows(op, "embeds", embeds)
        elif not isinstance(table, VocabParallelEmbedding):
            checks.check_rows(op, "table", table)
        rows = (embeds if ids is None else ids).shape[0]
        if positions is not None and positions.shape[0] != rows:
            raise checks.shape_error(op, "positions", positions, f"({rows},)", "there is one per embedding")
        if positions is None and self.config.mask_position_zero:
            because = "the config masks position 0"
            raise checks.error(ValueError, op, "positions is None", f"({rows},) positions", because)
        if self.max_tokens is not None and rows > self.max_tokens:
            because = "static buffers never grow"
            raise checks.error(ValueError, op, f"there are {rows} rows", f"at most {self.max_tokens}", because)

    def _embedding(
        self,
        ids: Tensor | None,
        table: Tensor | VocabParallelEmbedding | None,
        embeds: Tensor | None,
        positions: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, float | None]:
        """(chunk, index, scale) of the embedding; a scale that is left here is the norm's to apply."""
        if ids is None:
            return embeds, self._masked(None, positions), None
        ids = self._masked(ids, positions)
        scale, weight, shard = self._scale(), table, None
        if isinstance(table, VocabParallelEmbedding):
            weight, shard = table.weight, table.shard
            scale = scale if table.own_scale is None else table.own_scale
        norm_takes_scale = self.config.normed and not isinstance(scale, Tensor)
        if (shard is None or shard.is_full_table) and (scale is None or norm_takes_scale):
            return weight if shard is None else weight[: shard.num_embeddings], ids, scale
        if shard is None:
            shard = VocabShard.build(weight.shape[0], tp_rank=0, tp_size=1)
        rows = self._static("embeds", (ids.shape[0], weight.shape[1]), weight)
        vocab_parallel_embedding(ids, weight, shard, scale=None if norm_takes_scale else scale, out=rows)
        if isinstance(table, VocabParallelEmbedding):
            table.reduce(rows)
        return rows, None, scale if norm_takes_scale else None

    def _masked(self, ids: Tensor | None, positions: Tensor | None) -> Tensor | None:
        """The index of the embedding: ids (or the row itself), -1 where position 0 is masked."""
        if not self.config.mask_position_zero:
            return ids
        masked = self._static("ids", positions.shape, positions.new_empty(0, dtype=torch.int64))
        if ids is None:
            torch.arange(positions.shape[0], out=masked)
        else:
            masked.copy_(ids)
        return masked.masked_fill_(positions == 0, -1)

    def _scale(self) -> float | None:
        scale = self.config.embedding_scale
        if scale is None or not self.config.round_embedding_scale:
            return scale
        return torch.tensor(scale, dtype=self.eh_proj.weight.dtype).item()

    def _static(self, name: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """The first rows of a buffer that keeps its address; a new tensor where max_tokens is None."""
        if self.max_tokens is None:
            return like.new_empty(shape)
        key = (name, like.dtype, like.device, *shape[1:])
        if key not in self._static_buffers:
            self._static_buffers[key] = like.new_zeros((self.max_tokens, *shape[1:]))
        return self._static_buffers[key][: shape[0]]


class VocabParallelEmbedding(nn.Module):
    """An embedding table split over the ranks of a group by `VocabShard`; each rank gathers its rows, then all-reduce.

    y = all_reduce(vocab_parallel_embedding(ids, weight, shard, scale=scale))

    Args:
        num_embeddings, embedding_dim: V and H.
        process_group: the ranks that share the table; None keeps the whole table here, without communication.
        org_num_embeddings, padding_size: as in `VocabShard.build`.
        scale: as in `vocab_parallel_embedding`: a float (SGLang's Gemma) or a 0-d tensor (Hugging Face, vLLM).
        dtype, device: of the table.

    state_dict: weight [shard.rows, H]; loading also takes the full [V, H] table and keeps this rank's rows.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        process_group: dist.ProcessGroup | None = None,
        org_num_embeddings: int | None = None,
        padding_size: int = 64,
        scale: float | Tensor | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        shard = VocabShard.build(
            num_embeddings,
            tp_rank=0 if process_group is None else process_group.rank(),
            tp_size=1 if process_group is None else process_group.size(),
            org_num_embeddings=org_num_embeddings,
            padding_size=padding_size,
        )
        self._share(torch.zeros(shard.rows, embedding_dim, dtype=dtype, device=device), shard, scale, process_group)

    @classmethod
    def from_weight(
        cls,
        weight: Tensor,
        shard: VocabShard,
        *,
        scale: float | Tensor | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> VocabParallelEmbedding:
        """Share a table that exists, for example the target's, without a copy: weight is this rank's [rows, H]."""
        embedding = cls.__new__(cls)
        nn.Module.__init__(embedding)
        embedding._share(weight, shard, scale, process_group)
        return embedding

    def _share(
        self, weight: Tensor, shard: VocabShard, scale: float | Tensor | None, process_group: dist.ProcessGroup | None
    ) -> None:
        self.shard = shard
        self.process_group = process_group
        self.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=False)
        self.register_buffer("scale_tensor", scale if isinstance(scale, Tensor) else None, persistent=False)
        self.scale = None if isinstance(scale, Tensor) else scale

    def forward(self, ids: Tensor, *, out: Tensor | None = None) -> Tensor:
        """[*ids.shape, H]; ids outside the vocabulary give zero rows."""
        rows = vocab_parallel_embedding(ids, self.weight.detach(), self.shard, scale=self.own_scale, out=out)
        return self.reduce(rows)

    @property
    def own_scale(self) -> float | Tensor | None:
        return self.scale if self.scale_tensor is None else self.scale_tensor

    def reduce(self, rows: Tensor) -> Tensor:
        """Sum this rank's rows with those of the others, in place: exact, since one rank has the row and the rest 0."""
        if self.process_group is not None and self.shard.tp_size > 1:
            # gloo leaves a strided tensor unreduced without a word, and NCCL refuses it.
            dense = rows.contiguous()
            dist.all_reduce(dense, group=self.process_group)
            if dense is not rows:
                rows.copy_(dense)
        return rows

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: object) -> None:
        name = prefix + "weight"
        loaded = state_dict.get(name)
        if loaded is not None and loaded.shape[0] == self.shard.num_embeddings != self.shard.rows:
            state_dict = state_dict | {name: shard_vocab_weight(loaded, self.shard)}
        super()._load_from_state_dict(state_dict, prefix, *args)
