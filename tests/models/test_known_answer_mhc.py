"""Drafters of a target with residual streams (mHC) whose best accepted length is known; each classic mistake lowers it.

The target is a small DeepSeek-V4: its streams, their post, collapse and head by the formulas of SGLang 0.5.23
`deepseek_v4` and vLLM 0.33 `kernels/mhc/torch.py`, V4.1's Engram before a layer, and branches that look at one token
only, so that a token has the same state at every position. Weights are solved for, as in
tests/models/test_known_answer.py.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import eagle_kernels as ek

pytest.importorskip("transformers")

from eagle_kernels.byte_eagle3.decode import Drafter, speculate

from counting import normalized, shares, solve

# The S*V rows of streams are independent, and their number is so close to H that a mistake is not averaged away.
S, V, H, LAYERS, ENGRAM_LAYER = 4, 30, 192, 4, 2
ROWS, DRAFTS = 64, 4
EPS, LOST = 1e-6, 2.0  # of 5: a draft that is right by chance, or by half of its sources


class MHCTarget(torch.nn.Module):
    """`streams` [V, S, H] after the last layer and `collapsed` [V, H], both float64, by token."""

    def __init__(self) -> None:
        super().__init__()
        random = functools.partial(torch.randn, dtype=torch.float32)
        self.table = random(V, H)
        self.mixes = [random((2 + S) * S, S * H) * 3 / (S * H) ** 0.5 for _ in range(LAYERS)]
        self.branches = [random(H, H) * 2 / H**0.5 for _ in range(LAYERS)]
        self.engram = 20 * random(V, S, H) * torch.empty(V, S, 1).uniform_(-1.5, 1.5).exp()
        self.head_mix = random(S, S * H) * 2 / (S * H) ** 0.5
        self.norm = 0.5 + torch.rand(H)
        self.on_boundary = lambda boundary, before, streams: None
        streams = self.streams_of(torch.arange(V))
        self.streams, self.collapsed = streams.double(), self.collapse(streams).double()
        self.head = solve(normalized(self.collapsed, self.norm, EPS), torch.eye(V).double().roll(1, 1))

    def streams_of(self, ids: Tensor) -> Tensor:
        streams = self.table[ids].unsqueeze(1).repeat(1, S, 1)
        for layer in range(LAYERS):
            before = streams
            if layer == ENGRAM_LAYER:
                streams = streams + self.engram[ids]
            self.on_boundary(layer, before, streams)
            streams = self.layer(layer, streams)
        return streams

    def layer(self, layer: int, streams: Tensor) -> Tensor:
        """pre-mix collapse, a branch, and post: X'[j] = sum_i comb[i, j] X[i] + post[j] x."""
        mixes = F.linear(normalized_row(streams), self.mixes[layer])
        pre, post, comb = mixes.sigmoid()[:, :S], 2 * mixes.sigmoid()[:, S : 2 * S], mixes[:, 2 * S :].view(-1, S, S)
        comb = (comb + 4 * torch.eye(S)).softmax(-1)  # near the identity, like trained ones: streams stay apart
        for _ in range(3):
            comb = comb / comb.sum(-2, keepdim=True)
            comb = comb / comb.sum(-1, keepdim=True)
        x = F.linear((pre.unsqueeze(-1) * streams).sum(1), self.branches[layer]).tanh() * 6
        return torch.einsum("tij,tih->tjh", comb, streams) + post.unsqueeze(-1) * x.unsqueeze(1)

    def collapse(self, streams: Tensor) -> Tensor:
        """hc_head: y = sum_j p_j X[j], p of the normed row without a gain."""
        weights = F.linear(normalized_row(streams), self.head_mix.to(streams)).sigmoid() + EPS
        return (weights.unsqueeze(-1) * streams).sum(1)

    def final_norm(self, collapsed: Tensor) -> Tensor:
        return F.rms_norm(collapsed, (H,), self.norm, EPS)

    def forward(self, ids: Tensor, *_: object) -> SimpleNamespace:
        streams = self.streams_of(ids[0])
        self.on_boundary(LAYERS, streams, streams)
        return SimpleNamespace(logits=(self.final_norm(self.collapse(streams)) @ self.head.T)[None])


def normalized_row(streams: Tensor) -> Tensor:
    return F.rms_norm(streams.flatten(1), (S * H,), None, EPS)


@pytest.fixture(scope="module")
def target() -> MHCTarget:
    torch.manual_seed(0)
    return MHCTarget().requires_grad_(False)


def accepted(target: MHCTarget, drafter: Drafter, count: int = 25) -> float:
    decoded = speculate(target, drafter, [2, 3, 4], count, DRAFTS)
    assert decoded.tokens == [(5 + i) % V for i in range(count)]
    return sum(decoded.accepted) / len(decoded.accepted)


@contextmanager
def boundaries(target: MHCTarget, capture: Callable) -> Iterator[None]:
    target.on_boundary = capture
    try:
        yield
    finally:
        target.on_boundary = lambda boundary, before, streams: None


def v4_mtp(target: MHCTarget, mistake: str = "") -> Drafter:
    """x[s] = e_proj(enorm(e(t + 1))) + h_proj(hnorm(X(t)[s])), from which a decoder layer makes the streams X(t + 1).

    Each x[s] is a share of what the layer has to know, and the embedding is a part of each share.
    """
    torch.manual_seed(1)
    gains = [0.5 + torch.rand(H) for _ in range(2)]
    stage_output = torch.stack(shares(target.collapsed, S), 1)
    of_token = 6 * target.collapsed.std() * torch.randn(V, H).double()
    of_hidden = stage_output - of_token.unsqueeze(1)
    decoder = solve(target.collapsed, target.streams.flatten(1))
    e_proj = solve(normalized(target.table.double(), gains[0], EPS), of_token)
    h_proj = solve(normalized(target.streams, gains[1], EPS).flatten(0, 1), of_hidden.roll(-1, 0).flatten(0, 1))
    weights = {"enorm": gains[0], "hnorm": gains[1], "e_proj": e_proj, "h_proj": h_proj}
    over_row = mistake == "one norm over all streams"
    if over_row:
        weights["hnorm"] = gains[1].repeat(S)
    config = ek.MTPStreamsConfig(H, num_streams=S, hnorm_over="row" if over_row else "stream")
    stage = ek.MTPStreamsProjection(config, max_tokens=ROWS, dtype=torch.float32)
    stage.load_checkpoint({f"mtp.0.{name}.weight": weight for name, weight in weights.items()})
    chain = ek.ChainedHiddenStates(ROWS, S * H, dtype=torch.float32)

    def capture(boundary: int, before: Tensor, streams: Tensor) -> None:
        if boundary == LAYERS:
            chain.load(streams.flatten(1))

    def layer(hidden: Tensor, ids: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        hidden = hidden[0]
        if mistake == "stream 0 for all":
            hidden = hidden[:, :H].repeat(1, S)
        if mistake == "streams collapsed":
            hidden = target.collapse(hidden.view(-1, S, H)).repeat(1, S)
        if mistake == "no embedding":
            x = stage(hidden, embeds=torch.zeros(len(hidden), H))
        else:
            x = stage(hidden, ids[0], table=target.table)
        streams = F.linear(x.sum(1), decoder)
        return target.final_norm(target.collapse(streams.view(-1, S, H)))[None], streams[None]

    return Drafter(
        capture=lambda: boundaries(target, capture),
        project=chain.current,
        embed=lambda ids: (ids - 1) % V if mistake == "token not shifted" else ids,
        layer=layer,
        head=target.head,
    )


def test_v4_mtp_accepts_every_draft(target: MHCTarget) -> None:
    assert accepted(target, v4_mtp(target), count=2 * V) == DRAFTS + 1


@pytest.mark.parametrize(
    "mistake",
    ["one norm over all streams", "stream 0 for all", "streams collapsed", "no embedding", "token not shifted"],
)
def test_v4_mtp_loses_its_drafts_after_a_mistake(target: MHCTarget, mistake: str) -> None:
    assert accepted(target, v4_mtp(target, mistake)) < LOST


def means_of(target: MHCTarget) -> dict[int, Tensor]:
    """By boundary, the mean of each token's streams, after the Engram where there is one."""
    means = {}
    with boundaries(target, lambda boundary, before, streams: means.update({boundary: streams.mean(1).double()})):
        target(torch.arange(V)[None])
    return means


def on_collapsed(target: MHCTarget, capture: Callable, project: Callable[[int], Tensor]) -> Drafter:
    """x(t) = collapsed(t) is what `project` makes of the captures; hidden = x(t) + P e(t + 1) = collapsed(t + 1)."""
    step = solve(target.table.double(), target.collapsed - target.collapsed.roll(1, 0))

    def layer(x: Tensor, embeds: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        hidden = x + F.linear(embeds, step)
        return target.final_norm(hidden), hidden

    return Drafter(
        capture=lambda: boundaries(target, capture),
        project=project,
        embed=lambda ids: target.table[ids],
        layer=layer,
        head=target.head,
    )


def eagle3(target: MHCTarget, mistake: str = "") -> Drafter:
    """x(t) = collapsed(t) from the means of the streams at three boundaries, one of them after the Engram."""
    torch.manual_seed(1)
    captured = [1, ENGRAM_LAYER, LAYERS]
    means = means_of(target)
    parts = shares(target.collapsed, len(captured), size=30)
    weight = torch.cat([solve(means[b], part) for b, part in zip(captured, parts, strict=True)], 1)
    stage = ek.Eagle3Projection(ek.Eagle3Config(3, H, H), dtype=torch.float32)
    stage.load_checkpoint({"fc.weight": weight})
    buffer = ek.AuxHiddenStates(ROWS, 3, H, dtype=torch.float32)

    def capture(boundary: int, before: Tensor, streams: Tensor) -> None:
        streams = before if mistake == "before the Engram" else streams
        if boundary in captured:
            buffer.capture(captured.index(boundary), streams[:, 0] if mistake == "stream 0" else streams)

    return on_collapsed(target, capture, lambda rows: stage(buffer.packed(rows)))


def test_captured_means_accept_every_draft(target: MHCTarget) -> None:
    assert accepted(target, eagle3(target), count=2 * V) == DRAFTS + 1


@pytest.mark.parametrize("mistake", ["stream 0", "before the Engram"])
def test_captures_of_something_else_lose_their_drafts(target: MHCTarget, mistake: str) -> None:
    assert accepted(target, eagle3(target, mistake)) < LOST


LAYERS_OF_DSPARK, HEADS, HEAD_DIM = 2, 2, H // 2


def dspark(target: MHCTarget, mistake: str = "") -> Drafter:
    """The V of two draft layers, each a share of collapsed(t), from the context that fc makes of three means.

    main_proj and main_norm are those of DeepSeek-V4, the norm in each layer is that of Laguna. The block of drafts
    attends only to the last context token here, and continues from that token's V.
    """
    torch.manual_seed(1)
    captured = [1, ENGRAM_LAYER, LAYERS]
    means = means_of(target)
    context = torch.randn(V, H).double()
    parts = shares(context, len(captured), size=30)
    state = {"fc.weight": torch.cat([solve(means[b], part) for b, part in zip(captured, parts, strict=True)], 1)}
    gains = [torch.empty(H).uniform_(0.1, 2) for _ in range(1 + LAYERS_OF_DSPARK)]
    names = ["hidden_norm.weight", *(f"layer_norm.{layer}.weight" for layer in range(LAYERS_OF_DSPARK))]
    state |= dict(zip(names, gains, strict=True))
    main_x = normalized(context, gains[0], EPS)
    rows = []
    for gain, share in zip(gains[1:], shares(target.collapsed, LAYERS_OF_DSPARK, size=30), strict=True):
        rows += [torch.randn(H, H), solve(normalized(main_x, gain, EPS), share)]
    state["kv_proj.weight"] = torch.cat(rows)
    state |= {f"k_norm.{layer}.weight": torch.rand(HEAD_DIM) for layer in range(LAYERS_OF_DSPARK)}

    config = ek.ContextKVConfig(
        3, H, H, LAYERS_OF_DSPARK, HEADS, HEAD_DIM, layer_norm=mistake != "norm of each layer skipped"
    )
    if mistake == "main_norm skipped":
        state["hidden_norm.weight"] = torch.ones(H)
    stage = ek.ContextKV(config, dtype=torch.float32)
    stage.load_state_dict({name: value for name, value in state.items() if name in stage.state_dict()})
    buffer = ek.AuxHiddenStates(ROWS, 3, H, dtype=torch.float32)
    caches = [tuple(torch.zeros(ROWS, HEADS, HEAD_DIM) for _ in range(2)) for _ in range(LAYERS_OF_DSPARK)]
    free = torch.arange(4 * ROWS).flip(0) % ROWS  # each step takes the next slots
    angles = torch.randn(ROWS, HEAD_DIM // 2)
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1)

    def capture(boundary: int, before: Tensor, streams: Tensor) -> None:
        streams = before if mistake == "before the Engram" else streams
        if boundary in captured:
            buffer.capture(captured.index(boundary), streams[:, 0] if mistake == "stream 0" else streams)

    def context_of(rows: int) -> Tensor:
        nonlocal free
        slots, free = free[:rows], free[rows:]
        chunks = [buffer.chunk(k, rows) for k in ((2, 1, 0) if mistake == "captures in reverse" else (0, 1, 2))]
        stage(chunks, positions=torch.arange(rows), slots=slots, cos_sin=cos_sin, caches=caches)
        read = (slots + 1) % ROWS if mistake == "slot of the token before" else slots
        return sum(v[read].flatten(1) for _, v in caches)

    return on_collapsed(target, capture, context_of)


def test_dspark_accepts_every_draft(target: MHCTarget) -> None:
    assert accepted(target, dspark(target), count=2 * V) == DRAFTS + 1


@pytest.mark.parametrize(
    "mistake",
    [
        "norm of each layer skipped",
        "main_norm skipped",
        "stream 0",
        "before the Engram",
        "captures in reverse",
    ],
)
def test_dspark_loses_its_drafts_after_a_mistake(target: MHCTarget, mistake: str) -> None:
    assert accepted(target, dspark(target, mistake)) < LOST


def test_dspark_loses_drafts_in_the_slot_of_the_token_before(target: MHCTarget) -> None:
    # 2.4 of 5: for some tokens the embedding alone tells which one follows, whatever the context.
    assert accepted(target, dspark(target, "slot of the token before")) < 3
