"""From the files to a drafter: the right one, and the same weights with one of the classic mistakes."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import Gemma3ForCausalLM

import eagle_kernels as ek
from eagle_kernels.engines.transformers import capture

from .decode import Drafter
from .drafter import DraftLayer

Shards = list[tuple[ek.VocabShard, Tensor]]  # one per tensor-parallel rank, with its rows of the table

# Keyword arguments of `assemble`, by the names in the demo's table.
MISTAKES: dict[str, dict] = {
    "layer ids off by one": {"layer_ids_mean": "boundary"},
    "residual dropped": {"keep_residual": False},
    "chunk norm skipped": {"chunk_norm": False},
    "gain offset forgotten": {"norm_offset": 0.0},
    "embedding sliced by ceil(V / tp), tp 2": {"slice_by_ceil": True},
}


@dataclass
class Checkpoint:
    """The target, the drafter's config.json and weights, all in fp32, and texts to continue."""

    target: Gemma3ForCausalLM
    config: dict
    weights: dict[str, Tensor]
    prompts: list[list[int]]


def load(folder: Path) -> Checkpoint:
    target = Gemma3ForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()
    weights = load_file(folder / "drafter" / "model.safetensors")
    prompts = json.loads((folder / "prompts.json").read_text())
    return Checkpoint(
        target,
        json.loads((folder / "drafter" / "config.json").read_text()),
        {name: tensor.float() for name, tensor in weights.items()},
        [[target.config.bos_token_id, *prompt.encode()] for prompt in prompts],
    )


def assemble(
    checkpoint: Checkpoint,
    *,
    layer_ids_mean: str | None = None,
    keep_residual: bool = True,
    chunk_norm: bool = True,
    norm_offset: float = 1.0,
    tp_size: int = 1,
    slice_by_ceil: bool = False,
    weight_format: str | None = None,
) -> Drafter:
    """The drafter over the package's ops. `weight_format`, a format of QuantizedWeight, quantizes its fc; any other
    argument that differs from its default is a mistake, except tp_size."""
    target, weights = checkpoint.target, checkpoint.weights
    config = dataclasses.replace(ek.Eagle3Config.from_hf(checkpoint.config), norm_offset=norm_offset)
    boundaries = ek.capture_layers(
        target.config.model_type, target.config.num_hidden_layers, config.layer_ids, layer_ids_mean=layer_ids_mean
    )
    buffer = ek.AuxHiddenStates(256, config.num_chunks, config.target_hidden_size, dtype=torch.float32)
    capturing = capture if keep_residual else capture_without_residual
    if not chunk_norm:
        # load_checkpoint refuses norms that the config does not mention.
        config = dataclasses.replace(config, chunk_norm=False)
        weights = {name: tensor for name, tensor in weights.items() if not name.startswith("fc_norm.")}
    stage = ek.Eagle3Projection(config, dtype=torch.float32).load_checkpoint(weights)
    if weight_format is not None:
        stage.quantize(weight_format)
    table = target.model.embed_tokens.weight.detach()
    shards = ceil_slices(table, 2) if slice_by_ceil else vocab_shards(table, tp_size)
    return Drafter(
        capture=lambda: capturing(target, boundaries, buffer),
        project=lambda rows: stage(buffer.packed(rows), sum_squares=buffer.row_sum_squares(rows)),
        embed=lambda ids: embed(ids, shards),
        layer=load_layer(checkpoint),
        head=target.lm_head.weight,
    )


def load_layer(checkpoint: Checkpoint) -> DraftLayer:
    layer = DraftLayer(checkpoint.target.config)
    weights = {name: tensor for name, tensor in checkpoint.weights.items() if name.startswith("midlayer.")}
    layer.load_state_dict({name.removeprefix("midlayer."): tensor for name, tensor in weights.items()})
    return layer.requires_grad_(False)


def vocab_shards(table: Tensor, tp_size: int) -> Shards:
    shards = [ek.VocabShard.build(len(table), tp_rank=rank, tp_size=tp_size) for rank in range(tp_size)]
    return [(shard, ek.shard_vocab_weight(table, shard)) for shard in shards]


def ceil_slices(table: Tensor, tp_size: int) -> Shards:
    """What a rank reads in SGLang's Gemma models, where it gets rows [rank * ceil(V / tp), ..) of the table."""
    rows = -(-len(table) // tp_size)
    shards = []
    for shard, weight in vocab_shards(table, tp_size):
        piece = table[shard.tp_rank * rows : (shard.tp_rank + 1) * rows]
        # The drafter's layer expects more rows than the slice has; an engine reads past its end, here it reads zeros.
        padded = torch.zeros_like(weight)
        padded[: len(piece)] = piece
        shards.append((shard, padded))
    return shards


def embed(ids: Tensor, shards: Shards) -> Tensor:
    """The ranks' lookups and their all-reduce, in one process."""
    first, *others = (ek.vocab_parallel_embedding(ids, weight, shard) for shard, weight in shards)
    return sum(others, first)


@contextlib.contextmanager
def capture_without_residual(
    target: Gemma3ForCausalLM, boundaries: list[int], buffer: ek.AuxHiddenStates
) -> Iterator[None]:
    """What SGLang 0.5.23 captures of Gemma 3 (sglang#39286): the last branch, not the stream it is added to."""
    with contextlib.ExitStack() as hooks:
        for k, boundary in enumerate(boundaries):
            branch = target.model.layers[boundary - 1].post_feedforward_layernorm
            hooks.callback(branch.register_forward_hook(_writer(buffer, k)).remove)
        yield


def _writer(buffer: ek.AuxHiddenStates, k: int) -> Callable[..., None]:
    def write(module: nn.Module, args: tuple, output: Tensor) -> None:
        buffer.capture(k, output.flatten(0, -2))

    return write
