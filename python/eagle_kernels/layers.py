"""The ops as inference modules whose state_dict is what checkpoints hold."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import checkpoint, checks
from .drafter_config import Eagle3Config
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
                norm_offset=config.norm_offset,
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
        sources |= {"norm": norm, "norm_weight": gains, "eps": config.eps, "norm_offset": config.norm_offset}
        sources["sum_squares"] = sum_squares
        if self.fc.packed is None:
            return norm_concat_linear(chunks, self.fc.weight, bias=self.fc.bias, out=out, **sources)
        projected = self.fc.product(norm_concat(chunks, **sources))
        return projected if out is None else out.copy_(projected)


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
