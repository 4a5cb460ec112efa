"""Greedy speculative decoding of one sequence: a chain of drafts, one forward of the target to verify them.

Which token goes with which state: row i of the drafter holds the target's captured states of position i and the
embedding of token i + 1, and predicts token i + 2. The rows of a verifying forward whose drafts were accepted are the
drafter's next rows; the captured states of the others are overwritten.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import DynamicCache


@dataclass
class Drafter:
    """The parts of a drafter.

    capture: while active, a forward of the target leaves its states where `project` finds them.
    project: rows -> x [rows, H], the input stage over the first rows captured.
    embed: ids [T] -> [T, H].
    layer: (x, embeds [1, T, H], positions [1, T], cache, mask [T, cached + T]) -> (normed, hidden), both [1, T, H].
    head: [V, H].
    """

    capture: Callable[[], AbstractContextManager]
    project: Callable[[int], Tensor]
    embed: Callable[[Tensor], Tensor]
    layer: Callable[..., tuple[Tensor, Tensor]]
    head: Tensor

    def draft(self, cache: DynamicCache, tokens: list[int], num_drafts: int) -> list[int]:
        """The drafts after `tokens`, where token j is the one after captured row j; the cache keeps only these rows."""
        x = self.project(len(tokens))
        drafts: list[int] = []
        while True:
            cached, rows = cache.get_seq_length(), len(x)
            positions = torch.arange(cached, cached + rows)[None]
            mask = torch.ones(rows, cached + rows, dtype=torch.bool).tril(cached)
            embeds = self.embed(torch.tensor(tokens))
            normed, hidden = self.layer(x[None], embeds[None], positions, cache, mask)
            drafts.append(int((normed[0, -1] @ self.head.T).argmax()))
            if len(drafts) == num_drafts:
                _crop(cache, num_drafts - 1)
                return drafts
            x, tokens = hidden[0, -1:], drafts[-1:]


@dataclass
class Decoded:
    """tokens: the continuation.  accepted: per verifying forward, the accepted drafts and the target's own token."""

    tokens: list[int]
    accepted: list[int] = field(default_factory=list)
    draft_seconds: float = 0.0
    seconds: float = 0.0


@torch.inference_mode()
def speculate(target: nn.Module, drafter: Drafter, prompt: list[int], count: int, num_drafts: int) -> Decoded:
    """The target's greedy continuation of `prompt` by `count` tokens, with `num_drafts` drafts per forward."""
    begin = time.perf_counter()
    decoded = Decoded(tokens=list(prompt))
    target_cache, draft_cache = DynamicCache(), DynamicCache()
    unread = decoded.tokens
    drafts: list[int] = []
    with drafter.capture():
        while True:
            # By position: from transformers 5.24 on past_key_values is named cache.
            logits = target(torch.tensor([unread + drafts]), None, None, target_cache).logits[0]
            choices = logits[len(unread) - 1 :].argmax(-1).tolist()
            correct = 0
            while correct < len(drafts) and drafts[correct] == choices[correct]:
                correct += 1
            rows = len(unread) + correct
            decoded.tokens = [*decoded.tokens, *choices[: correct + 1]]
            _crop(target_cache, len(drafts) - correct)
            if drafts:
                decoded.accepted.append(correct + 1)
            if len(decoded.tokens) >= len(prompt) + count:
                break
            start = time.perf_counter()
            # Shifted by one: the state of a position goes with the token after it.
            drafts = drafter.draft(draft_cache, decoded.tokens[-rows:], num_drafts)
            decoded.draft_seconds += time.perf_counter() - start
            unread = decoded.tokens[-1:]
    decoded.tokens = decoded.tokens[len(prompt) : len(prompt) + count]
    decoded.seconds = time.perf_counter() - begin
    return decoded


def accepted_length(runs: list[Decoded]) -> float:
    """Tokens per verifying forward: 1 where no draft is accepted, num_drafts + 1 where all are."""
    counts = [count for decoded in runs for count in decoded.accepted]
    return sum(counts) / len(counts)


def _crop(cache: DynamicCache, rows: int) -> None:
    """Drop the last rows; 0 is not passed on, since transformers 5.0 would take it for the length to keep."""
    if rows:
        cache.crop(-rows)
