"""The demo's runs: plain greedy decoding, speculation over our ops and over the eager chain, and every mistake."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from eagle_kernels.byte_eagle3.assemble import MISTAKES, Checkpoint, assemble, load
from eagle_kernels.byte_eagle3.decode import Decoded, Drafter, accepted_length, speculate
from torch import Tensor, nn

import eagle_kernels as ek

from . import baselines
from .measure import Call, interleave
from .output import define, say, wrap

_STAGE_ROWS = (1, 5, 64)
_STAGE_SECONDS = 0.2


def report(folder: Path, count: int, num_drafts: int, formats: Sequence[str] = ()) -> int:
    """Print all runs, with the drafter's fc in each of `formats` too; 1 where an output differs from plain decoding."""
    threads = torch.get_num_threads()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)  # at this size threads wait for each other longer than they work
    try:
        return _report(load(folder), count, num_drafts, formats)
    finally:
        torch.set_num_threads(threads)


def _report(checkpoint: Checkpoint, count: int, num_drafts: int, formats: Sequence[str]) -> int:
    for sentence in _header(checkpoint, count, num_drafts):
        say(wrap(sentence))
    right = assemble(checkpoint)
    eager = over_eager_chain(checkpoint, right)
    _decode(checkpoint, [right, eager], num_drafts, num_drafts)  # the first calls

    start = time.perf_counter()
    greedy = [generate(checkpoint, prompt, count) for prompt in checkpoint.prompts]
    say(f"plain greedy decoding  {time.perf_counter() - start:6.2f} s")
    drafters = {"none": right, "none, eager chain": eager, "none, embedding over tp 2": assemble(checkpoint, tp_size=2)}
    drafters |= {mistake: assemble(checkpoint, **changes) for mistake, changes in MISTAKES.items()}
    drafters |= {format: assemble(checkpoint, weight_format=format) for format in formats}
    decoded = _decode(checkpoint, list(drafters.values()), count, num_drafts)
    runs = dict(zip(drafters, decoded, strict=True))
    wrong = [name for name, run in runs.items() if [one.tokens for one in run] != greedy]

    ours, chain = runs["none"], runs["none, eager chain"]
    say(f"speculative decoding   {sum(one.seconds for one in ours):6.2f} s")
    say(f"  drafter, our ops     {_draft_ms(ours):6.2f} ms per forward of the target {_by_prompt(ours)}")
    say(f"  drafter, eager chain {_draft_ms(chain):6.2f} ms {_by_prompt(chain)}")
    say("  (in brackets by prompt; a difference of less than that is noise)")
    same = "equal to plain greedy decoding, token for token, with every drafter below"
    define("output", "DIFFERS: " + ", ".join(wrong) if wrong else same, column=21)
    say(f"  mean accepted length {accepted_length(ours):6.2f} of at most {num_drafts + 1}")
    quantized = {format: runs.pop(format) for format in formats}
    for line in (*_stage_table(checkpoint), *_mistake_table(runs), *_format_table(checkpoint, ours, quantized)):
        say(line)
    return 1 if wrong else 0


def _decode(checkpoint: Checkpoint, drafters: Sequence[Drafter], count: int, num_drafts: int) -> list[list[Decoded]]:
    """The runs of each drafter. Prompt by prompt in turn: what slows the machine down hits all of them."""
    runs = [
        [speculate(checkpoint.target, drafter, prompt, count, num_drafts) for drafter in drafters]
        for prompt in checkpoint.prompts
    ]
    return [list(run) for run in zip(*runs, strict=True)]


def over_eager_chain(checkpoint: Checkpoint, drafter: Drafter) -> Drafter:
    """The same drafter over what engines run: a clone of each captured layer, K norms, cat, fc, and a plain lookup."""
    config, weight, gains, table = _stage_weights(checkpoint)
    boundaries = ek.capture_layers("gemma3_text", checkpoint.target.config.num_hidden_layers, config.layer_ids)
    states: dict[int, Tensor] = {}
    return dataclasses.replace(
        drafter,
        capture=lambda: _clone_states(checkpoint.target, boundaries, states),
        project=lambda rows: baselines.projection(
            [states[boundary][:rows] for boundary in boundaries], gains, weight, "chunk", config.eps, None
        ),
        embed=lambda ids: F.embedding(ids, table),
    )


def _stage_weights(checkpoint: Checkpoint) -> tuple[ek.Eagle3Config, Tensor, list[Tensor], Tensor]:
    config = ek.Eagle3Config.from_hf(checkpoint.config)
    gains = [1 + checkpoint.weights[f"fc_norm.{k}.weight"] for k in range(config.num_chunks)]
    return config, checkpoint.weights["fc.weight"], gains, checkpoint.target.model.embed_tokens.weight.detach()


@contextlib.contextmanager
def _clone_states(target: Any, boundaries: Sequence[int], states: dict[int, Tensor]) -> Iterator[None]:
    def cloner(boundary: int) -> Callable[[nn.Module, tuple], None]:
        return lambda module, args: states.update({boundary: args[0][0].clone()})

    readers = [*target.model.layers, target.model.norm]  # the input of number b is boundary b
    with contextlib.ExitStack() as hooks:
        for boundary in boundaries:
            hooks.callback(readers[boundary].register_forward_pre_hook(cloner(boundary)).remove)
        yield


def generate(checkpoint: Checkpoint, prompt: list[int], count: int) -> list[int]:
    """transformers' own loop: another cache, no captures, one token per forward."""
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    target: Any = checkpoint.target  # transformers types `generate` for a protocol that its own models do not fit
    output = target.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False)
    return output[0, len(prompt) :].tolist()


def _draft_ms(run: Sequence[Decoded]) -> float:
    return 1e3 * sum(decoded.draft_seconds for decoded in run) / sum(len(decoded.accepted) for decoded in run)


def _by_prompt(run: Sequence[Decoded]) -> str:
    times = [_draft_ms([decoded]) for decoded in run]
    return f"({min(times):.2f} to {max(times):.2f})"


def _header(checkpoint: Checkpoint, count: int, num_drafts: int) -> Iterator[str]:
    config, target = checkpoint.target.config, sum(weight.numel() for weight in checkpoint.target.parameters())
    drafter = sum(weight.numel() for weight in checkpoint.weights.values())
    layers = f"{config.num_hidden_layers} layers of {config.hidden_size}"
    yield f"target: byte-level Gemma 3, {layers}, {target / 1e6:.2f} M parameters"
    yield f"drafter: EAGLE-3 with chunk norms, {drafter / 1e6:.2f} M"
    prompts = f"{len(checkpoint.prompts)} prompts, {count} tokens each"
    yield f"{prompts}, {num_drafts} drafts per forward of the target; fp32, one thread"


def _stage_table(checkpoint: Checkpoint) -> Iterator[str]:
    """Times of capture, fc with its norms, and lookup alone: nothing else differs between the two drafters."""
    yield ""
    yield "input stage alone, microseconds (median / minimum)"
    yield "at this width what a call costs, not what it does"
    yield f"{'rows':>6}  {'our ops':>15}  {'eager chain':>15}"
    for rows in _STAGE_ROWS:
        with torch.inference_mode():
            samples = interleave(_stage_calls(checkpoint, rows), 1, _STAGE_SECONDS)
        cells = [f"{1e6 * sample.median:.1f} / {1e6 * sample.minimum:.1f}" for sample in samples]
        yield f"{rows:>6}  {cells[0]:>15}  {cells[1]:>15}"


def _stage_calls(checkpoint: Checkpoint, rows: int) -> tuple[Call, Call]:
    config, weight, gains, table = _stage_weights(checkpoint)
    size = config.target_hidden_size
    states = [torch.randn(rows, size) for _ in range(config.num_chunks)]
    ids = torch.randint(len(table), (rows,))
    buffer = ek.AuxHiddenStates(rows, config.num_chunks, size, dtype=torch.float32)
    config = dataclasses.replace(config, norm_offset=1.0)
    stage = ek.Eagle3Projection(config, dtype=torch.float32).load_checkpoint(checkpoint.weights)
    shard = ek.VocabShard.build(len(table), tp_rank=0, tp_size=1)
    local = ek.shard_vocab_weight(table, shard)

    def ours(_: int) -> None:
        for k, state in enumerate(states):
            buffer.capture(k, state)
        stage(buffer.packed(rows), sum_squares=buffer.row_sum_squares(rows))
        ek.vocab_parallel_embedding(ids, local, shard)

    def eager(_: int) -> None:
        captured = [state.clone() for state in states]
        baselines.projection(captured, gains, weight, "chunk", config.eps, None)
        F.embedding(ids, table)

    return ours, eager


def _mistake_table(runs: dict[str, list[Decoded]]) -> Iterator[str]:
    right, width = accepted_length(runs["none"]), max(map(len, runs))
    yield ""
    yield f"{'mistake':<{width}}  {'accepted length':>15}  {'drafts lost':>11}"
    for name, run in runs.items():
        length = accepted_length(run)
        # A share of the accepted drafts: 1 of the accepted length is the target's own token.
        yield f"{name:<{width}}  {length:>15.2f}  {100 * (right - length) / (right - 1):>9.0f} %"


def _format_table(checkpoint: Checkpoint, dense: list[Decoded], quantized: dict[str, list[Decoded]]) -> Iterator[str]:
    """What rounding fc's weight to each format costs."""
    if not quantized:
        return
    weight = checkpoint.weights["fc.weight"]
    yield ""
    yield f"{'fc.weight':<14}{'bits':>6}{'relative error':>16}{'accepted length':>17}"
    yield f"{'fp32':<14}{32:>6}{0:>16.2e}{accepted_length(dense):>17.2f}"
    for format, run in quantized.items():
        codes = ek.quantize(weight, format)
        error = (codes.dequantize(torch.float64) - weight.double()).norm() / weight.double().norm()
        bits = 8 * codes.nbytes / weight.numel()
        yield f"{format:<14}{bits:>6.2f}{error:>16.2e}{accepted_length(run):>17.2f}"
