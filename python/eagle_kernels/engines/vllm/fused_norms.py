"""MTP layers whose norm modules are not called: one kernel of vLLM's reads their gains, and norms everything that the
projection reads.

Our op does the norms itself, so such a layer gets a subclass whose forward hands on the kernel's inputs
(`normed_linear.Unnormed`). That forward is vLLM's own with the kernel's name bound to a function of ours; other layers
and models of the process still call vLLM's kernel. Each function here takes a layer, and returns its `FusedNorms`.
"""

import types
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .normed_linear import FusedNorms, Unnormed


def embeds_and_hidden(layer: Any) -> FusedNorms:
    """GLM-5-next, dots3-note, Kimi K3: mask of position 0, enorm, hnorm and cat in one kernel."""
    forward = type(layer).forward
    of_embeds = next(name for name in _OF_EMBEDS if name in forward.__code__.co_names)
    kernel: Any = forward.__globals__[of_embeds]
    of_table: Any = forward.__globals__.get(_OF_TABLE)

    def own(x: Tensor, enorm: Any, hnorm: Any) -> Tensor:
        positions = torch.ones(len(x), dtype=torch.int64, device=x.device)
        return kernel(positions, *x.chunk(2, -1), enorm.weight, hnorm.weight, enorm.variance_epsilon)

    def hand_on(positions: Tensor, embeds: Tensor, hidden: Tensor, *gains: Any) -> Unnormed:
        rows = torch.arange(len(embeds), device=embeds.device)
        indices = [_but_position_0(positions, rows), None]
        return Unnormed([embeds, hidden], indices, partial(kernel, positions, embeds, hidden, *gains))

    def hand_table_on(positions: Tensor, ids: Tensor, table: Tensor, hidden: Tensor, *gains: Any) -> Unnormed:
        indices = [_but_position_0(positions, ids.view(-1)), None]
        return Unnormed([table, hidden], indices, partial(of_table, positions, ids, table, hidden, *gains))

    bound = _with_names(forward, {of_embeds: hand_on, _OF_TABLE: hand_table_on})
    return FusedNorms(layer, {"forward": bound}, own, gathered=0)


def of_deepseek_v32(layer: Any) -> FusedNorms:
    """DeepSeek V3.2, GLM-5: the same, unsupported where vLLM does more between the kernel and the projection."""
    unsupported = None
    if layer._eh_plan is not None:
        unsupported = "vLLM has a GEMM of its own for few rows of it"
    if layer.mtp_block.use_sequence_parallel:
        unsupported = "vLLM gives each rank some of its rows (sequence parallelism)"
    return replace(embeds_and_hidden(layer), unsupported=unsupported)


_OF_EMBEDS, _OF_TABLE = ("fused_eh_norm", "fused_mtp_input"), "fused_embed_eh_norm"


def _but_position_0(positions: Tensor, rows: Tensor) -> Tensor:
    """`rows`, but -1 at position 0: the op reads a zero row there, which its norm leaves zero."""
    return torch.where(positions == 0, -1, rows)


def of_streams(layer: Any) -> FusedNorms:
    """DeepSeek V4: mask, enorm of the embedding and hnorm of each stream in one kernel; e_proj and h_proj behind it."""

    def hand_on(embeds: Tensor, positions: Tensor, streams: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        # Not `Unnormed` but tensors, as vLLM may give each rank some of their rows (sequence parallelism).
        return embeds.masked_fill((positions == 0).unsqueeze(-1), 0), streams

    forward = _with_names(type(layer).forward, {"_FUSED_MTP_INPUT_RMSNORM_KERNEL": hand_on})
    return FusedNorms(layer, {"forward": forward}, shards_rows=layer.mtp_block.use_sequence_parallel)


def of_step5(layer: Any) -> FusedNorms:
    """Step-5: on CUDA, with fp32 residuals, vLLM's forward runs a kernel that it imports, if rows have H > 0 columns.
    Given views without columns, it calls the norms instead, and its cat has nothing to copy."""
    own = type(layer).forward

    def forward(
        self: Any,
        input_ids: Tensor,
        positions: Tensor,
        previous_hidden_states: Tensor,
        inputs_embeds: Tensor,
        spec_step_index: int = 0,
    ) -> Tensor:
        chunks = [inputs_embeds, previous_hidden_states]
        if self.fp32_residual_connection:
            chunks = [chunk.to(torch.bfloat16) for chunk in chunks]
        self.eh_proj.aside = Unnormed(chunks, None, None)
        embeds, hidden = inputs_embeds[:, :0], previous_hidden_states[:, :0]
        return own(self, input_ids, positions, hidden, embeds, spec_step_index)

    return FusedNorms(layer, {"forward": forward}, passes_through=True)


def of_normed_embeds(predictor: Any) -> FusedNorms:
    """Inkling: hidden_norm, the target's norm of the embedding, embed_norm and cat in one kernel. The target's norm
    stays vLLM's, in one launch with the gather; the op does the other two."""
    own: Callable[..., Tensor] = type(predictor).fused_input_cat

    def fused_input_cat(
        self: Any, layer: Any, previous_hidden: Tensor, input_ids: Tensor, inputs_embeds: Tensor | None
    ) -> Unnormed:
        embeds, rows = inputs_embeds, None
        if embeds is None and self.backbone_embed_norm is None:
            embeds, rows = self.embed_tokens.weight, input_ids
        elif embeds is None:
            embeds = self.embed_input_ids(input_ids)
        indices = None if rows is None else [None, rows]
        vllms = partial(own, self, layer, previous_hidden, input_ids, inputs_embeds)
        return Unnormed([previous_hidden, embeds], indices, vllms)

    def kernel(x: Tensor, hidden_norm: Any, embed_norm: Any) -> Tensor:
        hidden, embeds = x.chunk(2, -1)
        layer = types.SimpleNamespace(hidden_norm=hidden_norm, embed_norm=embed_norm)
        return own(predictor, layer, hidden, None, embeds)

    return FusedNorms(predictor, {"fused_input_cat": fused_input_cat}, kernel, gathered=1)


def _with_names(function: Any, names: dict[str, Any]) -> types.FunctionType:
    """The same function with some of the names that it reads from its module bound to others."""
    bound = types.FunctionType(
        function.__code__, {**function.__globals__, **names}, function.__name__, function.__defaults__
    )
    bound.__kwdefaults__ = function.__kwdefaults__
    return bound
