"""The ops as inference modules whose state_dict is what checkpoints hold."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import checks
from .drafter_config import Eagle3Config
from .ops import norm_concat, norm_concat_linear, vocab_parallel_embedding
from .vocab_shard import VocabShard, shard_vocab_weight


class PackableLinear(nn.Linear):
    """nn.Linear whose weight can live in oneDNN's blocked layout, in place of the dense one: one copy either way.

    state_dict always holds the dense weight, and loading one packs it again.
    """

    packed: Tensor | None = None

    def pack(self) -> None:
        if self.packed is None:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach())
            self.weight = None

    def unpack(self) -> None:
        if self.packed is not None:
            self.weight = nn.Parameter(self.packed.to_dense(), requires_grad=False)
            self.packed = None

    def product(self, x: Tensor) -> Tensor:
        """x @ weight^T + bias from the packed weight."""
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.packed is not None:
            destination[prefix + "weight"] = self.packed.to_dense()

    def _load_from_state_dict(self, *args: object) -> None:
        was_packed = self.packed is not None
        self.unpack()
        super()._load_from_state_dict(*args)
        if was_packed:
            self.pack()

    def _apply(self, fn: object, recurse: bool = True) -> PackableLinear:
        # .to() and .cuda() cannot move a blocked weight; it packs again where it lands on the CPU.
        was_packed = self.packed is not None
        self.unpack()
        super()._apply(fn, recurse)
        if was_packed and self.weight.device.type == "cpu":
            self.pack()
        return self


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
        scale = self.scale if self.scale_tensor is None else self.scale_tensor
        rows = vocab_parallel_embedding(ids, self.weight.detach(), self.shard, scale=scale, out=out)
        if self.process_group is not None and self.shard.tp_size > 1:
            dist.all_reduce(rows, group=self.process_group)
        return rows

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: object) -> None:
        name = prefix + "weight"
        loaded = state_dict.get(name)
        if loaded is not None and loaded.shape[0] == self.shard.num_embeddings != self.shard.rows:
            state_dict = state_dict | {name: shard_vocab_weight(loaded, self.shard)}
        super()._load_from_state_dict(state_dict, prefix, *args)
