"""Eagle3QKVProjection: layer 0 of an EAGLE-3 drafter up to its attention, one op call a step."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from . import checks
from .drafter_config import check_config, flag_field, get_field, int_field, needed_int_field, number_field
from .layers import VocabParallelEmbedding, gain_of
from .mtp_config import MTPConfig
from .mtp_projection import EmbeddingHiddenProjection
from .ops import norm_concat
from .quantized_linear import DenseLinear, QuantizedLinear, load_projections

_FROM_HF = "Eagle3QKVConfig.from_hf"


@dataclass(frozen=True)
class Eagle3QKVConfig:
    """qkv = qkv_proj(cat[input_layernorm(embedding), hidden_norm(hidden)]), 2H -> q, k and v of one rank.

    Args:
        hidden_size: H, the drafter's width.
        num_heads, num_kv_heads, head_dim: of its attention, over all ranks.
        latent: (q_lora_rank, kv_lora_rank + qk_rope_head_dim) of latent attention (DeepSeek, Kimi), whose projection
            is replicated on every rank; the three sizes above are then not read.
        eps: of both norms.
        bias: qkv_proj has one (`attention_bias`). SGLang 0.5.23 `llama_eagle3` builds it without.
        norm_before_residual: the layer's residual is hidden_norm(hidden), not hidden. SGLang never reads this field.
    """

    hidden_size: int
    num_heads: int = 1
    num_kv_heads: int = 1
    head_dim: int = 1
    latent: tuple[int, int] | None = None
    eps: float = 1e-6
    bias: bool = False
    norm_before_residual: bool = False

    def __post_init__(self) -> None:
        op = "Eagle3QKVConfig"
        checks.check_sizes(op, self, "hidden_size", "num_heads", "num_kv_heads", "head_dim")
        if self.latent is not None:
            latent = checks.check_sequence(op, "latent", self.latent, "two ints")
            latent = [checks.check_int(op, f"latent[{k}]", size, at_least=1) for k, size in enumerate(latent)]
            if len(latent) != 2:
                raise checks.error(ValueError, op, f"latent has {len(latent)} entries", "2, of q_a_proj and kv_a_proj")
            object.__setattr__(self, "latent", tuple(latent))
        for name in ("bias", "norm_before_residual"):
            checks.check_bool(op, name, getattr(self, name))
        object.__setattr__(self, "eps", checks.check_number(op, "eps", self.eps))
        checks.check_eps(op, "eps", self.eps)
        if self.num_heads % self.num_kv_heads:
            got, expected = f"num_heads is {self.num_heads}", f"a multiple of num_kv_heads = {self.num_kv_heads}"
            raise checks.error(ValueError, op, got, expected)
        checks.check_width(op, 2, self.hidden_size)
        checks.check_width(op, 1, sum(end for _, end in self.rows(0, 1).values()))

    @classmethod
    def from_hf(cls, config: object) -> Eagle3QKVConfig:
        """Read a drafter's Hugging Face config: its `transformer_layer_config` where it has one (speculators).

        Raises ValueError that names a missing size.
        """
        check_config(_FROM_HF, "config", config)
        layer = get_field(config, "transformer_layer_config") or config

        def size(name: str) -> int:
            return needed_int_field(_FROM_HF, name, layer)

        eps = number_field(_FROM_HF, "rms_norm_eps", layer, default=1e-6)
        is_speculators = get_field(config, "speculators_model_type") == "eagle3"
        normed = flag_field(_FROM_HF, "norm_before_residual", config, layer, default=is_speculators)
        hidden_size = size("hidden_size")
        if get_field(layer, "q_lora_rank") is not None:
            latent = (size("q_lora_rank"), size("kv_lora_rank") + size("qk_rope_head_dim"))
            return cls(hidden_size, latent=latent, eps=eps, norm_before_residual=normed)
        heads = size("num_attention_heads")
        return cls(
            hidden_size,
            heads,
            int_field(_FROM_HF, "num_key_value_heads", layer) or heads,
            int_field(_FROM_HF, "head_dim", layer) or max(hidden_size // heads, 1),
            eps=eps,
            bias=flag_field(_FROM_HF, "attention_bias", config, layer),
            norm_before_residual=normed,
        )

    def rows(self, tp_rank: int, tp_size: int) -> dict[str, tuple[int, int]]:
        """The rank's rows [begin, end) of each of the checkpoint's projections, in the order of qkv_proj.

        Query heads are split evenly. With fewer key-value heads than ranks several ranks have the same head, as in
        vLLM's and SGLang's QKVParallelLinear.
        """
        if self.latent is not None:
            return {"q_a_proj": (0, self.latent[0]), "kv_a_proj_with_mqa": (0, self.latent[1])}
        copies = max(tp_size // self.num_kv_heads, 1)
        queries, keys = self.num_heads // tp_size, max(self.num_kv_heads // tp_size, 1)
        begin = tp_rank * queries * self.head_dim
        q = (begin, begin + queries * self.head_dim)
        begin = tp_rank // copies * keys * self.head_dim
        kv = (begin, begin + keys * self.head_dim)
        return {"q_proj": q, "k_proj": kv, "v_proj": kv}


class Eagle3QKVProjection(EmbeddingHiddenProjection):
    """Layer 0 of an EAGLE-3 drafter up to its attention: qkv_proj(cat[input_layernorm(e), hidden_norm(h)]).

    Args:
        config: `Eagle3QKVConfig`.
        tp_rank, tp_size: this rank's heads; nothing is communicated.
        max_tokens: as in `MTPProjection`.
        dtype, device: of the parameters.

    Raises TypeError / ValueError for a rank outside of tp_size, and for heads that tp_size does not divide.

    state_dict: input_layernorm.weight [H], hidden_norm.weight [H], qkv_proj.weight [R, 2H], qkv_proj.bias [R]
    (config.bias), R the rank's rows of q, k and v, or of q_a and kv_a of latent attention. Inference only.

    Source: SGLang 0.5.23 `llama_eagle3`, `kimi_k25_eagle3`; vLLM 0.33 `llama_eagle3`, `qwen3_eagle3`,
    `deepseek_eagle3`: two norms, a cat and the first line of the attention.
    """

    NAMES = ("input_layernorm", "hidden_norm", "qkv_proj")

    input_layernorm: nn.RMSNorm
    hidden_norm: nn.RMSNorm
    qkv_proj: DenseLinear | QuantizedLinear

    def __init__(
        self,
        config: Eagle3QKVConfig,
        *,
        tp_rank: int = 0,
        tp_size: int = 1,
        max_tokens: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        op = "Eagle3QKVProjection"
        expected = "an Eagle3QKVConfig: Eagle3QKVConfig.from_hf makes one"
        checks.check_type(op, "config", config, Eagle3QKVConfig, expected)
        tp_size = checks.check_int(op, "tp_size", tp_size, at_least=1)
        if not 0 <= (tp_rank := checks.check_int(op, "tp_rank", tp_rank)) < tp_size:
            raise checks.error(ValueError, op, f"tp_rank is {tp_rank}", f"one in [0, {tp_size})")
        heads, kv_heads = config.num_heads, config.num_kv_heads
        if config.latent is None and (heads % tp_size or (kv_heads % tp_size and tp_size % kv_heads)):
            because = f"there are {heads} heads and {kv_heads} key-value heads"
            raise checks.error(ValueError, op, f"tp_size is {tp_size}", "whole heads on each rank", because)
        self.rows, self.all_rows = config.rows(tp_rank, tp_size), config.rows(0, 1)
        self.norm_before_residual = config.norm_before_residual
        columns = sum(end - begin for begin, end in self.rows.values())
        stage = MTPConfig(config.hidden_size, columns, enorm_eps=config.eps, hnorm_eps=config.eps, bias=config.bias)
        super().__init__(stage, max_tokens, dtype, device)

    def load_checkpoint(self, weights: str | os.PathLike | Mapping[str, Tensor]) -> Eagle3QKVProjection:
        """Copy the norms and this rank's rows of q, k and v (q_a and kv_a) from a drafter's checkpoint.

        weights: a safetensors file or folder, or tensors by name. The layer is `midlayer` or `layers.0`, after any
        prefix. Quantized weights are dequantized, since q, k and v are one weight here, and the log says so; after
        `quantize`, loading makes qkv_proj dense again. A saved state_dict has one rank's rows and is restored as it is,
        quantized or not.

        Raises ValueError that names the weight, before anything is copied: a missing one, a shape that does not fit, a
        bias that the config does not have, codes without their scale. FileNotFoundError where the path is missing.
        """
        from . import checkpoint  # an import of 6 ms, which only loading needs

        state, weight = checkpoint.eagle3_qkv_projection(weights, self)
        load_projections("Eagle3QKVProjection.load_checkpoint", self, state, {"qkv_proj": (weight, self._dense)})
        return self

    def forward(
        self,
        hidden: Tensor,
        ids: Tensor | None = None,
        *,
        table: Tensor | VocabParallelEmbedding | None = None,
        embeds: Tensor | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(qkv [T, R], residual [T, H]): the attention's q, k and v, and what the attention's output is added to.

        Args:
            hidden: [T, H], the output of `fc` or of the drafter's previous step.
            ids, table, embeds: as in `MTPProjection`; a table of the whole vocabulary is gathered inside the op.
            out: [T, R], as in `norm_concat_linear`.

        The residual is `hidden` itself, or a new tensor where the config norms it first.

        Raises TypeError / ValueError for arguments that do not fit; nothing is written to `out`.
        """
        qkv = self._project(hidden, ids, table, embeds, None, None, out)
        if not self.norm_before_residual:
            return qkv, hidden
        gain = gain_of(self._modules["hidden_norm"])
        return qkv, norm_concat([hidden], norm_weight=[gain], eps=self.config.hnorm_eps)
