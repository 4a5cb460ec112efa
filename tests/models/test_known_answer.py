"""Drafters whose best accepted length is known: every draft. Each classic mistake lowers it, and none changes a token.

EAGLE-3 on Gemma 3 and DeepSeek V3, its layer 0, DeepSeek's MTP layer, and the three chained MTP layers of Step-3.5,
with solved weights (`counting.py`) over real transformers decoders.
"""

import dataclasses
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import eagle_kernels as ek

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from eagle_kernels.byte_eagle3.assemble import Shards, ceil_slices, embed, vocab_shards
from eagle_kernels.byte_eagle3.decode import Decoded, Drafter, speculate

import tiny_models
from counting import SIZES, CountingTarget, H, V, capture_branches, normalized, shares, solve
from eagle_kernels.engines.transformers import capture

ROWS, DRAFTS, MTP_LAYERS = 64, 4, 3
# Noise hits the right token once in V drafts.
CHANCE = 1.2


@dataclass(frozen=True)
class Family:
    """layer_ids: as a checkpoint writes them.  norm_offset: of the drafter's norms.
    modules: in a layer, the norm that reads the residual of its last branch, and the branch."""

    layer_ids: tuple[int, ...]
    norm_offset: float
    modules: tuple[str, str]


FAMILIES = {
    "gemma3": Family((0, 1, 3), 1.0, ("pre_feedforward_layernorm", "post_feedforward_layernorm")),
    "deepseek_v3": Family((1, 2, 3), 0.0, ("post_attention_layernorm", "mlp")),
}


@pytest.fixture(scope="module")
def targets() -> dict[str, CountingTarget]:
    torch.manual_seed(0)
    with torch.no_grad():
        return {
            name: CountingTarget(tiny_models.MODELS[name](**SIZES).get_decoder()) for name in (*FAMILIES, "step3p7")
        }


def accepted(target: CountingTarget, drafter: Drafter, start: int = 2, count: int = 25, drafts: int = DRAFTS) -> float:
    """The mean accepted length of a count from `start`; the count itself is right whatever the drafter does."""
    prompt = [(start + i) % V for i in range(3)]
    decoded: Decoded = speculate(target, drafter, prompt, count, drafts)
    assert decoded.tokens == [(start + 3 + i) % V for i in range(count)]
    return sum(decoded.accepted) / len(decoded.accepted)


def eagle3(
    target: CountingTarget,
    family: Family,
    *,
    layer_ids_mean: str | None = None,
    residual: str = "in the stream",
    chunk_norm: bool = True,
    offset_error: float = 0.0,
    slot_order: tuple[int, ...] = (0, 1, 2),
    shards: Shards | None = None,
    id_shift: int = 0,
) -> Drafter:
    """x(t) = S_N(t) from three shares; hidden = x(t) + P e(t + 1) = S_N(t + 1). Keyword arguments are mistakes, except
    shards and the residual "beside the branch"."""
    torch.manual_seed(1)
    last, config = target.states[-1], target.decoder.config
    right = ek.capture_layers(config.model_type, config.num_hidden_layers, family.layer_ids)
    gains = [torch.empty(H).uniform_(0.1, 2) - family.norm_offset for _ in right]
    normed = [
        normalized(target.states[boundary], family.norm_offset + gain, 1e-6)
        for boundary, gain in zip(right, gains, strict=True)
    ]
    weight = torch.cat([solve(chunk, share) for chunk, share in zip(normed, shares(last, 3), strict=True)], 1)
    step = solve(target.table.double(), last - last.roll(1, 0))

    boundaries = ek.capture_layers(
        config.model_type, config.num_hidden_layers, family.layer_ids, layer_ids_mean=layer_ids_mean
    )
    boundaries = [boundaries[k] for k in slot_order]
    stage_config = ek.Eagle3Config(
        3, H, H, chunk_norm=chunk_norm, norm_offset=family.norm_offset + offset_error, eps=1e-6
    )
    stage = ek.Eagle3Projection(stage_config, dtype=torch.float32)
    norms = {f"fc_norm.{k}.weight": gain for k, gain in enumerate(gains)} if chunk_norm else {}
    stage.load_checkpoint({"fc.weight": weight, **norms})
    buffer = ek.AuxHiddenStates(ROWS, 3, H, dtype=torch.float32)
    shards = shards or vocab_shards(target.table, 1)

    def layer(x: Tensor, embeds: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        hidden = x + F.linear(embeds, step)
        return target.decoder.norm(hidden), hidden

    def capturing() -> object:
        if residual == "in the stream":
            return capture(target, boundaries, buffer)
        return capture_branches(target, boundaries, buffer, family.modules, residual == "beside the branch")

    return Drafter(
        capture=capturing,
        project=lambda rows: stage(buffer.packed(rows), sum_squares=buffer.row_sum_squares(rows)),
        embed=lambda ids: embed((ids + id_shift) % V, shards),
        layer=layer,
        head=target.head,
    )


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("residual", ["in the stream", "beside the branch"])
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_eagle3_accepts_every_draft(targets: dict[str, CountingTarget], name: str, residual: str, tp_size: int) -> None:
    target = targets[name]
    drafter = eagle3(target, FAMILIES[name], residual=residual, shards=vocab_shards(target.table, tp_size))
    # The count crosses the end of the vocabulary and every boundary between ranks.
    assert accepted(target, drafter, count=2 * V) == DRAFTS + 1


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param({"layer_ids_mean": "boundary"}, id="layer-ids-off-by-one"),
        pytest.param({"slot_order": (2, 1, 0)}, id="chunks-in-reverse"),
        pytest.param({"residual": "dropped"}, id="residual-dropped"),
        pytest.param({"chunk_norm": False}, id="chunk-norm-skipped"),
        pytest.param({"offset_error": "flipped"}, id="gain-offset-flipped"),
        pytest.param({"id_shift": -1}, id="token-not-shifted"),
    ],
)
def test_eagle3_accepts_nothing_after_a_mistake(targets: dict[str, CountingTarget], name: str, mistake: dict) -> None:
    family = FAMILIES[name]
    if "offset_error" in mistake:  # forgotten on Gemma 3, added on DeepSeek
        mistake = {"offset_error": 1 - 2 * family.norm_offset}
    assert accepted(targets[name], eagle3(targets[name], family, **mistake)) < CHANCE


@pytest.mark.parametrize("name", FAMILIES)
def test_eagle3_with_ceil_slices_loses_exactly_the_ids_they_misplace(
    targets: dict[str, CountingTarget], name: str
) -> None:
    target = targets[name]
    drafter = eagle3(target, FAMILIES[name], shards=ceil_slices(target.table, 2))
    # Rank 0 holds ids 0..34 at their rows; 35..63 should be there too, and 64..69 are elsewhere on rank 1.
    assert accepted(target, drafter, start=2, count=25) == DRAFTS + 1
    assert accepted(target, drafter, start=36, count=27) == 1
    assert accepted(target, drafter, start=61, count=6) == 1


QKV = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": H // 6}


def layer_0(
    target: CountingTarget,
    *,
    norm_before_residual: bool = False,
    tp_size: int = 1,
    id_shift: int = 0,
    flipped_residual: bool = False,
    ranks_swapped: bool = False,
    no_embedding: bool = False,
    **wrong: object,
) -> Drafter:
    """residual + qkv([input_layernorm(e(t + 1)), hidden_norm(S_N(t))]) = S_N(t + 1): an attention that returns q, k and
    v side by side. Keyword arguments are mistakes, except norm_before_residual and tp_size."""
    torch.manual_seed(1)
    last = target.states[-1]
    gains = [torch.empty(H).uniform_(0.1, 2) for _ in range(2)]
    if not norm_before_residual:
        gains[1] *= 20  # the normed state, taken for the residual, then drowns the right one
    normed = [normalized(x, gain, 1e-6) for x, gain in zip((target.table.double(), last), gains, strict=True)]
    residual = normed[1] if norm_before_residual else last
    of_token, of_hidden = shares(last - residual.roll(1, 0), 2)
    weight = torch.cat([solve(normed[0], of_token), solve(normed[1], of_hidden.roll(-1, 0))], 1)
    weights = {"midlayer.input_layernorm.weight": gains[0], "midlayer.hidden_norm.weight": gains[1]}
    weights |= {
        f"midlayer.self_attn.{name}_proj.weight": part for name, part in zip("qkv", weight.chunk(3), strict=True)
    }
    config = {"hidden_size": H, "norm_before_residual": norm_before_residual, **QKV}
    ranks = [
        ek.Eagle3QKVProjection(
            ek.Eagle3QKVConfig.from_hf(config), tp_rank=rank, tp_size=tp_size, dtype=torch.float32
        ).load_checkpoint(weights)
        for rank in range(tp_size)
    ]
    for rank in ranks:
        rank.config = dataclasses.replace(rank.config, **wrong)
        rank.norm_before_residual ^= flipped_residual
    buffer = ek.AuxHiddenStates(ROWS, 1, H, dtype=torch.float32)

    def layer(x: Tensor, ids: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        source = {"ids": (ids[0] + id_shift) % V, "table": target.table}
        if no_embedding:
            source = {"embeds": torch.zeros(ids.shape[1], H)}
        parts = [rank(x[0], **source) for rank in (ranks[::-1] if ranks_swapped else ranks)]
        qkv = torch.cat([part.unflatten(1, (3, -1)) for part, _ in parts], 2).flatten(1)
        hidden = (parts[0][1] + qkv)[None]
        return target.decoder.norm(hidden), hidden

    return Drafter(
        capture=lambda: capture(target, [len(target.decoder.layers)], buffer),
        project=buffer.packed,
        embed=lambda ids: ids,
        layer=layer,
        head=target.head,
    )


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("norm_before_residual", [False, True])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_layer_0_accepts_every_draft(
    targets: dict[str, CountingTarget], name: str, norm_before_residual: bool, tp_size: int
) -> None:
    drafter = layer_0(targets[name], norm_before_residual=norm_before_residual, tp_size=tp_size)
    assert accepted(targets[name], drafter, count=2 * V) == DRAFTS + 1


@pytest.mark.parametrize("norm_before_residual", [False, True])
@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param({"normed": False}, id="norms-skipped"),
        pytest.param({"order": "hidden,embed"}, id="halves-swapped"),
        pytest.param({"norm_offset": 1.0}, id="offset-added"),
        pytest.param({"id_shift": -1}, id="token-not-shifted"),
        pytest.param({"no_embedding": True}, id="no-embedding"),
        pytest.param({"tp_size": 2, "ranks_swapped": True}, id="heads-of-another-rank"),
    ],
)
def test_layer_0_accepts_nothing_after_a_mistake(
    targets: dict[str, CountingTarget], norm_before_residual: bool, mistake: dict
) -> None:
    target = targets["deepseek_v3"]
    assert accepted(target, layer_0(target, norm_before_residual=norm_before_residual, **mistake)) < CHANCE


def test_layer_0_with_the_other_residual_loses_half_of_what_it_accepts(targets: dict[str, CountingTarget]) -> None:
    """What SGLang 0.5.23 does with norm_before_residual: the other residual points to some of the right tokens."""
    target = targets["deepseek_v3"]
    for norm_before_residual in (False, True):
        drafter = layer_0(target, norm_before_residual=norm_before_residual, flipped_residual=True)
        assert accepted(target, drafter) < (DRAFTS + 1) / 2


def deepseek_mtp(
    target: CountingTarget, *, pre_norm: bool = False, shards: Shards | None = None, **wrong: object
) -> Drafter:
    """eh_proj([enorm(e(t + 1)), hnorm(n(t))]) = S_N(t + 1); n is the state after the final norm, as in SGLang."""
    torch.manual_seed(1)
    config = ek.MTPConfig.from_hf(target.decoder.config)
    weights = mtp_weights(target, config, target.normed, target.states[-1])
    mtp = mtp_layer(dataclasses.replace(config, **wrong), weights)
    buffer = ek.AuxHiddenStates(ROWS, 1, H, dtype=torch.float32)
    norm = torch.nn.Identity() if pre_norm else target.decoder.norm

    def layer(x: Tensor, ids: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        source = {"ids": ids[0], "table": target.table} if shards is None else {"embeds": embed(ids[0], shards)}
        hidden = mtp(x[0], **source)[None]
        return target.decoder.norm(hidden), norm(hidden)

    return Drafter(
        capture=lambda: capture(target, [len(target.decoder.layers)], buffer),
        project=lambda rows: norm(buffer.packed(rows)),
        embed=lambda ids: ids,
        layer=layer,
        head=target.head,
    )


def mtp_weights(target: CountingTarget, config: ek.MTPConfig, hidden: Tensor, outputs: Tensor) -> dict[str, Tensor]:
    """The layer that maps token u and hidden(u - 1) to outputs(u), from one share of each."""
    gains = [torch.empty(H).uniform_(0.1, 2) - config.norm_offset for _ in range(2)]
    of_token, of_hidden = shares(outputs, 2)
    sources = (target.table.double(), config.enorm_eps), (hidden, config.hnorm_eps)
    normed = [
        normalized(states, config.norm_offset + gain, eps) for (states, eps), gain in zip(sources, gains, strict=True)
    ]
    weight = torch.cat([solve(normed[0], of_token), solve(normed[1], of_hidden.roll(-1, 0))], 1)
    return {"enorm.weight": gains[0], "hnorm.weight": gains[1], "eh_proj.weight": weight}


def mtp_layer(config: ek.MTPConfig, weights: dict[str, Tensor]) -> ek.MTPProjection:
    if not config.normed:
        weights = {"eh_proj.weight": weights["eh_proj.weight"]}
    layer = ek.MTPProjection(config, dtype=torch.float32)
    layer.load_state_dict(weights)
    return layer


@pytest.mark.parametrize("tp_size", [None, 2, 4])
def test_deepseek_mtp_accepts_every_draft(targets: dict[str, CountingTarget], tp_size: int | None) -> None:
    target = targets["deepseek_v3"]
    shards = None if tp_size is None else vocab_shards(target.table, tp_size)
    assert accepted(target, deepseek_mtp(target, shards=shards), count=2 * V) == DRAFTS + 1


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param({"order": "hidden,embed"}, id="concat-order"),
        pytest.param({"normed": False}, id="norms-skipped"),
        pytest.param({"norm_offset": 1.0}, id="offset-added"),
        pytest.param({"pre_norm": True}, id="states-before-the-final-norm"),
    ],
)
def test_deepseek_mtp_accepts_nothing_after_a_mistake(targets: dict[str, CountingTarget], mistake: dict) -> None:
    target = targets["deepseek_v3"]
    assert accepted(target, deepseek_mtp(target, **mistake)) < CHANCE


def test_deepseek_mtp_with_ceil_slices_loses_exactly_the_ids_they_misplace(targets: dict[str, CountingTarget]) -> None:
    target = targets["deepseek_v3"]
    drafter = deepseek_mtp(target, shards=ceil_slices(target.table, 2))
    assert accepted(target, drafter, start=2, count=25) == DRAFTS + 1
    assert accepted(target, drafter, start=36, count=27) < CHANCE


@dataclass
class StepDrafter(Drafter):
    """Three MTP layers, each over all rows: rows stay, token ids rotate, hidden states go from layer to layer.

    A layer is eh_proj and one branch: residual q(u), branch S_N(u) - q(u), and their sum is passed on.
    """

    target: CountingTarget = None
    layers: list[tuple[ek.MTPProjection, Tensor]] = field(default_factory=list)
    states: ek.AuxHiddenStates = None
    mistake: str = ""

    def draft(self, cache: object, tokens: list[int], num_drafts: int) -> list[int]:
        rows, ids = len(tokens), torch.tensor(tokens)
        norm = self.target.decoder.norm
        offset = 0.0 if self.mistake == "offset of the chain's norm" else 1.0
        chain = ek.ChainedHiddenStates(ROWS, H, norm_output=self.mistake == "normed output fed on", dtype=torch.float32)
        first = self.states.packed(rows)
        chain.load(norm(first) if self.mistake == "states behind the final norm" else first)
        drafts = []
        for mtp, branch in self.layers[:num_drafts]:
            if self.mistake == "not chained":
                chain.load(first)
            residual = mtp(chain.current(rows), ids, table=self.target.table)
            hidden = F.linear(residual, branch)
            if self.mistake == "residual dropped":
                residual = torch.zeros_like(residual)
            normed = chain.advance(hidden, residual, norm.weight, eps=norm.eps, norm_offset=offset)
            token = (normed[-1:] @ self.target.head.T).argmax(-1)
            drafts.append(token.item())
            if self.mistake != "ids not rotated":
                ek.rotate_token_ids(ids, token, torch.tensor([rows - 1]))
            if self.mistake == "rows shifted":
                chain.load(chain.current(rows).roll(-1, 0))
        return drafts


def step_chain(target: CountingTarget, mistake: str = "") -> StepDrafter:
    torch.manual_seed(1)
    config, last = ek.MTPConfig.from_hf(target.decoder.config), target.states[-1]
    wrong = {"offset of enorm and hnorm": {"norm_offset": 0.0}, "concat order": {"order": "hidden,embed"}}
    layers = []
    for _ in range(MTP_LAYERS):
        residual, hidden = shares(last, 2, size=4)
        weights = mtp_weights(target, config, last, residual)
        mtp = mtp_layer(dataclasses.replace(config, **wrong.get(mistake, {})), weights)
        layers.append((mtp, solve(residual, hidden)))
    buffer = ek.AuxHiddenStates(ROWS, 1, H, dtype=torch.float32)
    return StepDrafter(
        capture=lambda: capture(target, [len(target.decoder.layers)], buffer),
        project=None,
        embed=None,
        layer=None,
        head=None,
        target=target,
        layers=layers,
        states=buffer,
        mistake=mistake,
    )


def test_step_chain_accepts_every_draft(targets: dict[str, CountingTarget]) -> None:
    target = targets["step3p7"]
    assert accepted(target, step_chain(target), count=2 * V, drafts=MTP_LAYERS) == MTP_LAYERS + 1


@pytest.mark.parametrize(
    ("mistake", "best"),
    [
        # Layer 0 is still right: its draft is accepted, those of the later layers are not.
        pytest.param("not chained", 2, id="not-chained"),
        pytest.param("ids not rotated", 2, id="ids-not-rotated"),
        pytest.param("rows shifted", 2, id="rows-shifted"),
        pytest.param("normed output fed on", 2, id="normed-output-fed-on"),
        pytest.param("states behind the final norm", 1, id="states-behind-the-final-norm"),
        pytest.param("residual dropped", 1, id="residual-dropped"),
        pytest.param("offset of enorm and hnorm", 1, id="offset-of-enorm-and-hnorm"),
        pytest.param("offset of the chain's norm", 1, id="offset-of-the-chains-norm"),
        pytest.param("concat order", 1, id="concat-order"),
    ],
)
def test_step_chain_loses_what_a_mistake_costs(targets: dict[str, CountingTarget], mistake: str, best: int) -> None:
    target = targets["step3p7"]
    assert best <= accepted(target, step_chain(target, mistake), drafts=MTP_LAYERS) < best * CHANCE
