"""MTPStreamsProjection: the input stage of MTP layers whose target keeps several residual streams (mHC), one op call.

DeepSeek-V4 and Qwen4-Exp project the embedding once and each stream by itself, and add the two:

    x[t, s] = e_proj(enorm(embedding[t])) + h_proj(hnorm(hidden[t, s]))

which for few rows is one product with eh_proj = [e_proj | h_proj] over S*T rows, where row r has the embedding of token
r // S, rounded once. For many rows the embedding and the streams are multiplied apart, and each product and the sum are
rounded, as in the engines (SGLang 0.5.23 `deepseek_v4_nextn`, `qwen4_exp_mtp`; vLLM 0.33
`models/deepseek_v4/nvidia/mtp.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import checks, library, plan
from .dispatch import is_plain
from .drafter_config import check_config, check_engine, get_field, needed_int_field, number_field
from .layers import VocabParallelEmbedding, gain_of, product_with_columns, project_onto, unit_norm
from .mtp_config import MTPConfig, family_of_streams
from .mtp_projection import MTPProjection
from .ops.norm_concat import concatenate
from .ops.sources import Sources
from .quantized_linear import load_projections


@dataclass(frozen=True)
class MTPStreamsConfig(MTPConfig):
    """x[s] = e_proj(enorm(scale * embedding)) + h_proj(hnorm(hidden[s])), H -> D, for each of S streams.

    Args:
        num_streams: S.
        hnorm_over: the columns of hnorm's mean square, "stream" (the H of each stream, one gain [H] for all:
            DeepSeek-V4) or "row" (all S*H, gain [S*H]: Qwen4-Exp).
        others: as in `MTPConfig`, where eh_proj is [e_proj | h_proj].
    """

    chain: str = "streams"
    num_streams: int = 4
    hnorm_over: str = "stream"

    def __post_init__(self) -> None:
        super().__post_init__()
        op = "MTPStreamsConfig"
        checks.check_sizes(op, self, "num_streams")
        checks.check_width(op, self.num_streams, max(self.hidden_size, self.out_features))
        if self.hnorm_over not in ("stream", "row"):
            raise checks.error(ValueError, op, f"hnorm_over is {self.hnorm_over!r}", "'stream' or 'row'")
        if self.order != "embed,hidden" or not self.normed or self.bias:
            got = f"order is {self.order!r}, normed {self.normed}, bias {self.bias}"
            because = "no family has another stage of streams"
            raise checks.error(ValueError, op, got, "'embed,hidden', True, False", because)

    @classmethod
    def from_hf(cls, config: object, *, engine: str = "sglang") -> MTPStreamsConfig:
        """The stage of a target with residual streams, by its `model_type`: deepseek_v4, qwen4_exp.

        Args:
            config: a Hugging Face config, object or dict; a composite one is read through its `text_config`.
            engine: "sglang", "vllm" or "transformers": the one whose position-0 rule to take (vLLM's V4 zeroes the
                embedding there).

        Raises:
            ValueError: another model type, an unknown engine, a missing width or number of streams.
        """
        op = "MTPStreamsConfig.from_hf"
        check_engine(op, engine)
        check_config(op, "config", config)
        family, stage, count = family_of_streams(op, config)
        served = stage.engines.get(engine, stage.transformers)
        text = get_field(config, "text_config") or config
        eps = number_field(op, "rms_norm_eps", text, default=1e-6)
        return cls(
            hidden_size=needed_int_field(op, "hidden_size", text, whose="the target's"),
            enorm_eps=eps,
            hnorm_eps=eps,
            norm_offset=family.norm_offset,
            mask_position_zero=served.zeroes_position_0,
            num_streams=needed_int_field(op, count, text, whose="the target's"),
            hnorm_over=stage.hnorm_over,
        )


class MTPStreamsProjection(MTPProjection):
    """The input stage of an MTP layer over residual streams: x[t, s] = e_proj(enorm(e[t])) + h_proj(hnorm(h[t, s])).

    Args:
        config: `MTPStreamsConfig`.
        max_tokens, dtype, device: as in `MTPProjection`.

    state_dict: enorm.weight [H], hnorm.weight [H] or [S*H] (hnorm_over "row"), eh_proj.weight [D, 2H] = [e_proj |
    h_proj]. The state that a step hands to the next is the decoder's streams before they are collapsed, [T, S*H]:
    `load` of `ChainedHiddenStates(max_tokens, S*H)` stores it.

    One product takes 2*S*T*H*D multiplications, two take (S + 1)*T*H*D. So where the time is no longer that of reading
    the weight (`_least_rows_apart`), there are two products and a sum. A compiled call has one product for all T, and
    so have calls under EAGLE_KERNELS_BATCH_INVARIANT=1 and weights in bf16_12bit, whose halves are no weights.
    """

    config: MTPStreamsConfig

    def __init__(
        self,
        config: MTPStreamsConfig,
        *,
        max_tokens: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        expected = "an MTPStreamsConfig: MTPStreamsConfig.from_hf makes one"
        checks.check_type("MTPStreamsProjection", "config", config, MTPStreamsConfig, expected)
        super().__init__(config, max_tokens=max_tokens, dtype=dtype, device=device)
        if config.hnorm_over == "row":
            width = config.num_streams * config.hidden_size
            self.hnorm = unit_norm(width, config.hnorm_eps, config.norm_offset, dtype=dtype, device=device)

    def load_checkpoint(
        self, weights: str | os.PathLike | Mapping[str, Tensor], *, layer: int | None = None
    ) -> MTPStreamsProjection:
        """Copy the norms and the two projections from a checkpoint: a safetensors file or folder, or tensors by name.

        e_proj, h_proj, enorm and hnorm (DeepSeek-V4, in FP8 with `.scale` too), or fc_embedding, fc_hidden,
        pre_fc_norm_embedding and pre_fc_norm_hidden (Qwen4-Exp), after any prefix (`mtp.0.`); `layer` picks the one
        with `mtp.{layer}.` or `layers.{layer}.` in it. The codes of both become one weight; where that is impossible
        (nvfp4, two formats, a block that would have columns of both) they are dequantized, and the log says so. A saved
        state_dict, with eh_proj in their place, is restored as it is, quantized or not.

        Raises ValueError that names the weight, before anything is copied; FileNotFoundError where the path is missing.
        """
        from . import checkpoint  # an import of 6 ms, which only loading needs

        state, weight = checkpoint.mtp_streams_projection(weights, self, layer)
        load_projections("MTPStreamsProjection.load_checkpoint", self, state, {"eh_proj": (weight, self._dense)})
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
        """x, [N, S, D], which the decoder layer reads.

        Args:
            hidden: [T, S*H] or [T, S, H], dense: the target's streams before they are collapsed, or those of the
                previous step.
            ids, table, embeds, positions: as in `MTPProjection`, [N] or [N, H].
            indices: [N], rows of `hidden` (accepted rows); None takes them in order, N = T.
            out: [N, S, D] or [N, S*D], dense.

        Raises TypeError / ValueError for arguments that do not fit; nothing is written to `out`.
        """
        op, S, H = "MTPStreamsProjection", self.config.num_streams, self.config.hidden_size
        streams = _rows_of_streams(op, "hidden", hidden, S, H)
        self._check_sources(streams, ids, table, embeds, positions)
        self._check_rows(hidden, ids if embeds is None else embeds, indices)
        for name, places in (("ids", ids), ("positions", positions), ("indices", indices)):
            if isinstance(places, Tensor):  # read here, before the op checks them
                checks.check_device(op, name, places, streams.device, "hidden")
        out_rows = None if out is None else _rows_of_streams(op, "out", out, S, self.config.out_features)
        if out_rows is not None:
            given = {"ids": ids, "table": table, "embeds": embeds, "positions": positions, "indices": indices}
            norms = {name: gain_of(self._modules[name]) for name in ("enorm", "hnorm")}
            self._check_copied(out_rows, hidden=streams, **given, **norms)
        chunk, index, scale = self._embedding(ids, table, embeds, positions)
        count = chunk.shape[0] if index is None else index.shape[0]
        norm, offset = "chunk", self.config.norm_offset
        gains: list[Tensor] | None = [gain_of(self._modules[name]) for name in ("enorm", "hnorm")]
        eps = [self.config.enorm_eps if scale is None else self.config.enorm_eps / scale**2, self.config.hnorm_eps]
        if self.config.hnorm_over == "row":
            # The op norms H columns, with one gain for all rows: here both sources are normed first, as in the engines.
            chunk = self._normed("enorm", chunk, eps[0], index, count)
            streams = self._normed("hnorm", streams.view(-1, S * H), eps[1], indices, count).view(-1, H)
            norm, gains = "none", None
            index = indices = None
        chunks, of_hidden = [chunk, streams], self._rows_of_hidden(indices, streams, count)

        def sources(at: slice, rows: list[Tensor | None]) -> Sources:
            own_gains, own_eps = (gains[at], eps[at]) if gains else (None, [1e-6])  # an eps that nobody reads
            return Sources.of("norm_concat_linear", chunks[at], norm, own_gains, own_eps, offset, indices=rows)

        eh_proj: Any = self._modules["eh_proj"]
        products = self._products_apart(eh_proj, chunk, streams, count)
        if products is None:
            both = sources(slice(2), [self._rows_of_embedding(index, chunk, count), of_hidden])
            projected = project_onto(eh_proj, both, 0.0, out_rows)
        else:
            if out_rows is not None:  # the op that writes it sees h_proj alone
                tensors = (*eh_proj.named_parameters(), *eh_proj.named_buffers())
                self._check_copied(out_rows, **{f"eh_proj.{name}": tensor for name, tensor in tensors})
            by_e_proj, by_h_proj = products
            of_embedding = self._static("projected embedding", (count, self.config.out_features), chunk)
            by_e_proj(sources(slice(1), [index]), out=of_embedding)
            projected = by_h_proj(sources(slice(1, 2), [of_hidden]), out=out_rows)
            projected.view(count, S, -1).add_(of_embedding.unsqueeze(1))
        return projected.view(-1, S, self.config.out_features) if out is None else out

    def _products_apart(
        self, projection: Any, chunk: Tensor, streams: Tensor, count: int
    ) -> tuple[Callable[..., Tensor], Callable[..., Tensor]] | None:
        """The products with e_proj and with h_proj, where both take less time than the one with eh_proj."""
        H, S = self.config.hidden_size, self.config.num_streams
        # A compiled call has one graph for all T. Dtypes that differ are left to the op, which refuses them.
        is_one = not is_plain(chunk, streams) or chunk.dtype != streams.dtype or plan.SETTINGS.batch_invariant
        if is_one or S == 1 or count * S < _least_rows_apart(chunk):
            return None
        by_e_proj, by_h_proj = (product_with_columns(projection, begin, begin + H) for begin in (0, H))
        return None if by_e_proj is None or by_h_proj is None else (by_e_proj, by_h_proj)

    def _normed(self, norm: str, rows: Tensor, eps: float, index: Tensor | None, count: int) -> Tensor:
        """The rows that `index` picks, normed over all their columns and rounded."""
        out = self._static(f"{norm}ed", (count, rows.shape[1]), rows)
        gain, offset = gain_of(self._modules[norm]), self.config.norm_offset
        return concatenate(Sources.of("norm_concat", [rows], "concat", gain, eps, offset, indices=index), out)

    def _rows_of_embedding(self, index: Tensor | None, like: Tensor, count: int) -> Tensor:
        """The row of the embedding for each of the N*S rows r: r // S, or index[r // S]."""
        S = self.config.num_streams
        if index is None:
            return self._rows_in_order(like, count)
        rows = self._static("rows of the embedding", (count, S), like.new_empty(0, dtype=torch.int64))
        return rows.copy_(index.unsqueeze(1)).view(-1)

    def _rows_in_order(self, like: Tensor, count: int) -> Tensor:
        """r // S of the rows r. With max_tokens they are written once: in every call they would be two more kernels."""
        S, key = self.config.num_streams, ("rows in order", like.device)
        if key in self._static_buffers:
            return self._static_buffers[key][: count * S]
        # What a compiled call or a capture of a CUDA graph makes is not there until it runs.
        is_made = is_plain(like) and not (like.is_cuda and torch.cuda.is_current_stream_capturing())
        if self.max_tokens is None or not is_made:
            return torch.arange(count * S, device=like.device) // S
        with torch.inference_mode(False):
            rows = torch.arange(self.max_tokens * S, device=like.device) // S
        if like.is_cuda:  # the next call may be on another stream
            torch.cuda.current_stream(like.device).synchronize()
        self._static_buffers[key] = rows
        return rows[: count * S]

    def _rows_of_hidden(self, indices: Tensor | None, like: Tensor, count: int) -> Tensor | None:
        """The S rows of streams of each of `indices`; an index that is out of range stays out of range."""
        if indices is None:
            return None
        S = self.config.num_streams
        rows = self._static("rows of hidden", (count, S), like.new_empty(0, dtype=torch.int64))
        first = indices.long().clamp(-1, like.shape[0] // S) * S
        torch.add(first.unsqueeze(1), torch.arange(S, device=like.device), out=rows)
        return rows.masked_fill_((indices < 0).unsqueeze(1), -1).view(-1)


def _least_rows_apart(like: Tensor) -> int:
    """The least S*T at which two products take less time than one.

    S=4, H=D=4096, two threads of a Xeon with AMX, cold weights, both ways in turn: the time of one product over that of
    two, at S*T = 4, 16, 64 and 128, is 0.93, 0.90, 1.01 and 1.40 in bf16 and 0.90, 0.88, 1.21 and 1.36 in fp8_block128
    (1.50 and 1.43 at 1024). With AVX-512-BF16 alone it is 0.84, 1.26, 1.29, 1.44 and 1.07, 1.37, 1.43, 1.49; with AVX2
    in bf16 0.94, 1.29, 1.42, 1.50; in fp32 0.96, 1.09, 1.40, 1.48. That of a GPU is an estimate: products of so many
    rows take longer than two more launches.
    """
    if not like.is_cpu:
        return 512
    has_tiles = like.dtype == torch.bfloat16 and library.unsupported_reason is None and plan.cpu_isa() == "amx_bf16"
    return 64 if has_tiles else 16


def _rows_of_streams(op: str, name: str, tensor: Any, S: int, width: int) -> Tensor:
    """[T, S*width] or [T, S, width] as the matrix [T*S, width] that it is in memory."""
    checks.check_strided(op, name, tensor)
    if tuple(tensor.shape[1:]) not in ((S * width,), (S, width)):
        columns = "H" if name == "hidden" else "D"
        expected = f"(T, S*{columns}) or (T, S, {columns}) = (*, {S}, {width})"
        raise checks.shape_error(op, name, tensor, expected)
    if not tensor.is_contiguous():
        because = "its streams are the rows of one matrix"
        raise checks.error(ValueError, op, f"{name} has strides {tensor.stride()}", "a dense tensor", because)
    return tensor.view(-1, width)
