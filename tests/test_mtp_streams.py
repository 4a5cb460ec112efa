"""MTPStreamsProjection: every stream against float64 and against the engines' three roundings; masks, checkpoints."""

import copy
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import eagle_kernels as ek
from accuracy import relative_rms, rms_limit
from eagle_kernels import layers, mtp_streams, plan
from eagle_kernels.quantized_weight import columns_of
from guards import GuardedRows, UnchangedTensors, same_bits

S, H, D, V, T = 4, 72, 40, 193, 13
EPS = {"enorm_eps": 1e-5, "hnorm_eps": 3e-2}
DEEPSEEK = {"hnorm_over": "stream"}
QWEN4 = {"hnorm_over": "row", "norm_offset": 1.0}
STAGES = [pytest.param(DEEPSEEK, id="deepseek_v4"), pytest.param(QWEN4, id="qwen4_exp")]


WAYS = {"one product": 1 << 40, "two products": 1}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """One product with eh_proj or one each with e_proj and h_proj, whatever the number of rows."""
    monkeypatch.setattr(mtp_streams, "_least_rows_apart", lambda like: WAYS[request.param])
    return request.param


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(rows, columns of the weight) of every product since the last look."""
    seen: list[tuple[int, int]] = []

    def counted(function: Callable, width: Callable[[Any], int]) -> Callable:
        def call(sources: Any, projection: Any, out: Tensor | None = None) -> Tensor:
            seen.append((sources.rows, width(projection.weight)))
            return function(sources, projection, out)

        return call

    monkeypatch.setattr(layers, "project", counted(layers.project, lambda weight: weight.shape[1]))
    monkeypatch.setattr(layers.quantized, "project", counted(layers.quantized.project, lambda weight: weight.shape[1]))
    return seen


def make_layer(dtype: torch.dtype = torch.bfloat16, max_tokens: int | None = None, **config: object):
    layer = ek.MTPStreamsProjection(ek.MTPStreamsConfig(H, D, **(EPS | config)), max_tokens=max_tokens, dtype=dtype)
    for norm in (layer.enorm, layer.hnorm):
        norm.weight.uniform_(0.5 - layer.config.norm_offset, 1.5 - layer.config.norm_offset)
    return layer


def make_inputs(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [T, S, H] whose streams are of different sizes, ids [T] with some outside the vocabulary, table [V, H]."""
    scales = torch.logspace(-3, 2, T).view(T, 1, 1) * torch.tensor([1.0, 10.0, 0.1, 3.0]).view(1, S, 1)
    hidden = (torch.randn(T, S, H) * scales).to(dtype)
    table = (torch.randn(V, H) * torch.logspace(-4, 1, V).unsqueeze(1)).to(dtype)
    ids = torch.randint(V, (T,))
    ids[3], ids[7] = -1, V
    return hidden, ids, table


def lookup(table: Tensor, ids: Tensor) -> Tensor:
    return F.embedding(ids.clamp(0, len(table) - 1), table) * ((ids >= 0) & (ids < len(table))).unsqueeze(1)


def engine_chain(layer: ek.MTPStreamsProjection, embeds: Tensor, hidden: Tensor) -> Tensor:
    """Both engines: norm, project and round the embedding and each stream, add, round (SGLang 0.5.23
    `deepseek_v4_nextn`, `qwen4_exp_mtp`; vLLM 0.33 `models/deepseek_v4/nvidia/mtp.py`)."""
    config, dtype = layer.config, hidden.dtype
    wide = torch.promote_types(dtype, torch.float32)

    def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x.to(wide), weight.shape, weight.to(wide) + config.norm_offset, eps).to(dtype)

    of_e, of_h = layer.eh_proj.weight.to(dtype).chunk(2, 1)
    rows = hidden.flatten(1) if config.hnorm_over == "row" else hidden
    normed = norm(rows, layer.hnorm.weight, config.hnorm_eps).view(hidden.shape)
    return F.linear(normed, of_h) + F.linear(norm(embeds, layer.enorm.weight, config.enorm_eps), of_e).unsqueeze(1)


@pytest.mark.parametrize("config", STAGES)
@pytest.mark.parametrize("source", ["table", "module", "embeds"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_matches_float64(config: dict, source: str, dtype: torch.dtype, way: str) -> None:
    layer, (hidden, ids, table) = make_layer(dtype, **config), make_inputs(dtype)
    embeds = lookup(table, ids)
    given = {
        "table": {"ids": ids, "table": table},
        "module": {"ids": ids.int(), "table": ek.VocabParallelEmbedding(V, H, org_num_embeddings=V - 5, dtype=dtype)},
        "embeds": {"embeds": embeds},
    }[source]
    if source == "module":
        given["table"].load_state_dict({"weight": table})
    truth = engine_chain(layer, embeds.double(), hidden.double())
    engine = engine_chain(layer, embeds, hidden)
    limit, _ = rms_limit(dtype, 2 * H, truth.flatten(0, 1), engine.flatten(0, 1))
    out = torch.full((T, S, D), float("nan"), dtype=dtype)
    with UnchangedTensors([hidden, ids, table]):
        projected = layer(hidden, **given)
        assert layer(hidden.flatten(1), **given, out=out.view(T, S * D)).data_ptr() == out.data_ptr()
    assert projected.shape == (T, S, D) and same_bits(projected, out)
    assert relative_rms(projected, truth) <= limit


@pytest.mark.parametrize("config", STAGES)
@pytest.mark.parametrize("way", ["one product"], indirect=True)
def test_one_rounding_is_nearer_to_float64_than_the_engines_three(config: dict, way: str) -> None:
    layer, (hidden, ids, table) = make_layer(**config), make_inputs()
    embeds = lookup(table, ids)
    truth = engine_chain(layer, embeds.double(), hidden.double())
    ours, engine = (
        relative_rms(result, truth) for result in (layer(hidden, embeds=embeds), engine_chain(layer, embeds, hidden))
    )
    assert ours < 0.9 * engine


@pytest.mark.parametrize("config", STAGES)
def test_position_0_is_masked_where_the_config_says_so(config: dict, way: str) -> None:
    hidden, ids, table = make_inputs()
    positions = torch.arange(T) % 5
    layer, unmasked = make_layer(mask_position_zero=True, **config), make_layer(**config)
    unmasked.load_state_dict(layer.state_dict())
    zeroed = torch.where((positions == 0).unsqueeze(1), 0, lookup(table, ids))
    masked = layer(hidden, ids, table=table, positions=positions)
    assert same_bits(masked, unmasked(hidden, embeds=zeroed))
    assert same_bits(masked, layer(hidden, embeds=lookup(table, ids), positions=positions))
    assert not torch.equal(masked, unmasked(hidden, ids, table=table))


@pytest.mark.parametrize("config", STAGES)
def test_rows_are_selected_through_indices(config: dict, way: str) -> None:
    layer, (hidden, ids, table) = make_layer(**config), make_inputs()
    for dtype in (torch.int32, torch.int64):
        accepted = torch.tensor([12, 0, 0, 5, -1, T, torch.iinfo(dtype).max, torch.iinfo(dtype).min], dtype=dtype)
        selected = layer(hidden, ids[:8], table=table, indices=accepted)
        rows = torch.cat([hidden[accepted[:4].long()], torch.zeros(4, S, H).bfloat16()])
        assert same_bits(selected, layer(rows, ids[:8], table=table))


@pytest.mark.parametrize("config", STAGES)
def test_static_buffers_are_allocated_once_and_a_call_sees_no_other_rows(config: dict, way: str) -> None:
    layer, (hidden, ids, table) = make_layer(max_tokens=T, mask_position_zero=True, **config), make_inputs()
    fresh = make_layer(mask_position_zero=True, **config)
    fresh.load_state_dict(layer.state_dict())
    positions = torch.arange(T) % 5
    kept = {}
    for rows in (T, 3, 0, T):
        given = {"ids": ids[:rows], "table": table, "positions": positions[:rows], "indices": torch.arange(rows)}
        assert same_bits(layer(hidden, **given), fresh(hidden, **given))
        buffers = {name: buffer.data_ptr() for name, buffer in layer._static_buffers.items()}
        assert kept.items() <= buffers.items()  # each is allocated by the first call that needs it
        kept = buffers


def test_a_bad_stream_stays_in_its_stream(way: str) -> None:
    layer, (hidden, ids, table) = make_layer(), make_inputs()
    good = layer(hidden, ids, table=table)
    hidden[5, 2, 11] = float("nan")
    bad = layer(hidden, ids, table=table)
    assert bad[5, 2].isnan().all()
    good[5, 2] = bad[5, 2] = 0
    assert same_bits(good, bad)


@pytest.mark.parametrize("max_tokens", [1, T])
@pytest.mark.parametrize("way", ["one product"], indirect=True)
def test_the_rows_of_embeds_are_written_once(max_tokens: int, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, (hidden, ids, table) = make_layer(max_tokens=max_tokens), make_inputs()
    fresh = make_layer()
    fresh.load_state_dict(layer.state_dict())
    embeds = lookup(table, ids)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert same_bits(compiled(hidden[:1], embeds=embeds[:1]), fresh(hidden[:1], embeds=embeds[:1]))
    assert not layer._static_buffers  # a graph's tensors are its own
    counts = []
    arange = torch.arange
    with torch.inference_mode():
        layer(hidden[:1], embeds=embeds[:1])
    for rows in (1, max_tokens, 1):
        expected = fresh(hidden[:rows], embeds=embeds[:rows])
        with monkeypatch.context() as patch:
            patch.setattr(torch, "arange", lambda *size, **options: counts.append(size) or arange(*size, **options))
            assert same_bits(layer(hidden[:rows], embeds=embeds[:rows]), expected)
    assert not counts and not any(buffer.is_inference() for buffer in layer._static_buffers.values())


FORMATS = ["fp8_tensor", "fp8_row", "fp8_block128", "fp8_block32", "int8_row", "mxfp8", "mxfp4", "nvfp4"]


@pytest.mark.parametrize("format", [None, *FORMATS])
def test_the_two_products_have_the_bits_of_the_halves(format: str | None, products: list) -> None:
    """At a number of rows at which every device and instruction set makes two."""
    H, D, T = 256, 136, 128
    layer = ek.MTPStreamsProjection(ek.MTPStreamsConfig(H, D, **EPS), dtype=torch.bfloat16)
    halves: list[Any] = list(layer.eh_proj.weight.chunk(2, 1))
    if format is not None:
        codes = layer.quantize(format).eh_proj.quantized.dequantize(torch.float32)
        halves = [ek.quantize(half, format) for half in halves]
        if format in ("fp8_tensor", "fp8_row", "int8_row", "nvfp4"):  # whose scales the halves share
            halves = [columns_of(layer.eh_proj.quantized, begin, begin + H) for begin in (0, H)]
        assert torch.cat([half.dequantize(torch.float32) for half in halves], 1).equal(codes)
    hidden, embeds = torch.randn(T, S, H).bfloat16(), torch.randn(T, H).bfloat16()
    out = torch.full((T, S, D), float("nan")).bfloat16()
    projected = layer(hidden, embeds=embeds, out=out)
    assert products == [(T, H), (T * S, H)] and projected is out
    gains = (layer.enorm.weight, layer.hnorm.weight)
    of_embeds, of_streams = (
        ek.norm_concat_linear([rows], half, norm_weight=[gain], eps=eps)
        for rows, half, gain, eps in zip((embeds, hidden.view(-1, H)), halves, gains, EPS.values(), strict=True)
    )
    assert same_bits(out, of_streams.view(T, S, D) + of_embeds.unsqueeze(1))
    assert same_bits(out, layer(hidden, embeds=embeds))


def test_when_there_is_one_product(products: list, monkeypatch: pytest.MonkeyPatch) -> None:
    H, T = 192, 128
    hidden, embeds = torch.randn(T, S, H).bfloat16(), torch.randn(T, H).bfloat16()

    def widths(layer: ek.MTPStreamsProjection, rows: int = T) -> list[int]:
        products.clear()
        layer(hidden[:rows], embeds=embeds[:rows])
        return [width for _, width in products]

    dense = ek.MTPStreamsProjection(ek.MTPStreamsConfig(H), dtype=torch.bfloat16)
    assert widths(dense) == [H, H] and widths(dense, 3) == [2 * H]
    in_blocks = ek.MTPStreamsProjection(ek.MTPStreamsConfig(H), dtype=torch.bfloat16).quantize("fp8_block128")
    compressed = ek.MTPStreamsProjection(ek.MTPStreamsConfig(H), dtype=torch.bfloat16).quantize("bf16_12bit")
    assert widths(in_blocks) == widths(compressed) == [2 * H]
    for layer in (dense, copy.deepcopy(dense).quantize("fp8_row")):
        assert widths(layer) == [H, H]
        biased = copy.deepcopy(layer)
        biased.eh_proj.bias = torch.nn.Parameter(torch.ones(H).bfloat16(), requires_grad=False)
        assert widths(biased) == [2 * H]
    single = ek.MTPStreamsProjection(ek.MTPStreamsConfig(H, num_streams=1), dtype=torch.bfloat16)
    products.clear()
    single(hidden[:, 0].contiguous(), embeds=embeds)  # no embedding would be multiplied less often
    assert products == [(T, 2 * H)]
    with monkeypatch.context() as patch:
        patch.setattr(mtp_streams, "_least_rows_apart", lambda like: 5 * S)
        assert widths(dense, 5) == [H, H] and widths(dense, 4) == [2 * H]
    monkeypatch.setenv("EAGLE_KERNELS_BATCH_INVARIANT", "1")
    plan.clear()
    try:
        assert widths(dense) == [2 * H]
    finally:
        monkeypatch.undo()
        plan.clear()


@pytest.mark.parametrize(
    ("dtype", "isa", "least"),
    [
        (torch.bfloat16, "amx_bf16", 64),
        (torch.float16, "amx_bf16", 16),
        (torch.float32, "amx_bf16", 16),
        (torch.bfloat16, "avx512_bf16", 16),
    ],
)
def test_the_least_rows_of_two_products(
    dtype: torch.dtype, isa: str, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mtp_streams.library, "unsupported_reason", None)
    monkeypatch.setattr(plan, "cpu_isa", lambda: isa)
    assert mtp_streams._least_rows_apart(torch.empty(0, dtype=dtype)) == least
    assert mtp_streams._least_rows_apart(torch.empty(0, dtype=dtype, device="meta")) == 512


@pytest.mark.parametrize("format", [None, "fp8_row", "fp8_block128"])
def test_an_out_over_the_weight_is_refused_with_two_products(format: str | None) -> None:
    """The product that writes sees h_proj alone; here `out` ends within the first row of e_proj."""
    H, D, T = 256, 4, 128
    layer = ek.MTPStreamsProjection(ek.MTPStreamsConfig(H, D), dtype=torch.bfloat16)
    if format is not None:
        layer.quantize(format)
    hidden, embeds = torch.randn(T, S, H).bfloat16(), torch.randn(T, H).bfloat16()
    names = ["weight"] if format is None else ["weight", "weight_scale"]
    for name in names:
        tensor = getattr(layer.eh_proj, name)
        memory = torch.zeros(T * S * D * 2 + tensor.nbytes, dtype=torch.uint8)
        moved = memory[T * S * D * 2 - 4 :][: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        own = moved if format is not None else torch.nn.Parameter(moved, requires_grad=False)
        setattr(layer.eh_proj, name, own)
        out = memory[: T * S * D * 2].view(torch.bfloat16).view(T, S, D)
        with pytest.raises(
            ValueError, match=rf"^MTPStreamsProjection: out overlaps eh_proj\.{name}, expected disjoint"
        ):
            layer(hidden, embeds=embeds, out=out)
        assert not memory.any()
        setattr(layer.eh_proj, name, tensor)


@pytest.mark.parametrize("format", [None, "fp8_row"])
def test_a_layer_without_its_weight_is_refused(format: str | None, way: str) -> None:
    layer, (hidden, _, _) = make_layer(), make_inputs()
    if format is not None:
        layer.quantize(format)
    layer.eh_proj.weight = None
    with pytest.raises(TypeError, match=r"^norm_concat_linear: weight(\.codes)? is a NoneType, expected "):
        layer(hidden, embeds=torch.randn(T, H).bfloat16())


def test_two_dtypes_are_refused_with_codes_too() -> None:
    """Each of two products would take its own."""
    layer = ek.MTPStreamsProjection(ek.MTPStreamsConfig(256), dtype=torch.bfloat16).quantize("fp8_block128")
    message = r"^norm_concat_linear: chunks\[1\] has dtype torch.bfloat16, expected torch.float16, because"
    with pytest.raises(TypeError, match=message):
        layer(torch.randn(128, S, 256).bfloat16(), embeds=torch.randn(128, 256).half())


def test_the_state_goes_on_as_rows_of_all_streams(way: str) -> None:
    """As [T, S*H] in a `ChainedHiddenStates` of that width, whose rows are dense."""
    layer, (hidden, ids, table) = make_layer(), make_inputs()
    chain = ek.ChainedHiddenStates(T + 3, S * H)
    chain.load(hidden.flatten(1))
    assert same_bits(layer(chain.current(T), ids, table=table), layer(hidden, ids, table=table))


def checkpoint_of(prefix: str, names: tuple[str, str, str, str], H: int, D: int, hnorm: int) -> dict[str, Tensor]:
    enorm, hnorm_name, e_proj, h_proj = (f"{prefix}{name}.weight" for name in names)
    weights = {enorm: torch.rand(H), hnorm_name: torch.rand(hnorm)}
    return weights | {e_proj: torch.randn(D, H).bfloat16(), h_proj: torch.randn(D, H).bfloat16()}


DEEPSEEK_NAMES = ("enorm", "hnorm", "e_proj", "h_proj")
QWEN4_NAMES = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc_embedding", "fc_hidden")


@pytest.mark.parametrize(
    ("config", "prefix", "names", "width"),
    [(DEEPSEEK, "mtp.1.", DEEPSEEK_NAMES, H), (QWEN4, "mtp.", QWEN4_NAMES, S * H)],
    ids=["deepseek_v4", "qwen4_exp"],
)
def test_loads_what_the_families_call_the_two_projections(config: dict, prefix: str, names: tuple, width: int) -> None:
    weights = checkpoint_of(prefix, names, H, D, width)
    others = checkpoint_of("mtp.0.", names, H, D, width) if prefix == "mtp.1." else {}
    layer = ek.MTPStreamsProjection(ek.MTPStreamsConfig(H, D, **config), dtype=torch.float32)
    layer.load_checkpoint(weights | others | {"embed.weight": torch.rand(3)}, layer=1 if others else None)
    enorm, hnorm, e_proj, h_proj = weights.values()
    assert torch.equal(layer.enorm.weight, enorm) and torch.equal(layer.hnorm.weight, hnorm)
    assert torch.equal(layer.eh_proj.weight, torch.cat([e_proj, h_proj], 1).float())


@pytest.mark.parametrize("format", ["fp8_block128", "fp8_tensor", "fp8_row", "mxfp8"])
@pytest.mark.parametrize("e8m0", [False, True])
def test_quantized_projections_become_one_weight(format: str, e8m0: bool, way: str) -> None:
    """DeepSeek-V4's own files: e4m3 in blocks of 128 x 128, and scales named `.scale` in fp32 or as exponents."""
    H, D = 256, 200
    weights = checkpoint_of("mtp.0.", DEEPSEEK_NAMES, H, D, H)
    parts = []
    for name in ("e_proj", "h_proj"):
        part = ek.quantize(weights[f"mtp.0.{name}.weight"] * (1 + 9 * len(parts)), format)
        scales = part.scales
        if e8m0 and format == "fp8_block128":
            scales = scales.log2().round().exp2().to(torch.float8_e8m0fnu)
            part = ek.QuantizedWeight(part.codes, scales, format)
        weights |= {f"mtp.0.{name}.weight": part.codes, f"mtp.0.{name}.scale": scales}
        parts.append(part.dequantize(torch.float32))
    config = ek.MTPStreamsConfig(H, D)
    layer = ek.MTPStreamsProjection(config, dtype=torch.bfloat16).load_checkpoint(weights)
    assert layer.eh_proj.quantized.dequantize(torch.float32).equal(torch.cat(parts, 1))
    dense = ek.MTPStreamsProjection(config, dtype=torch.float32)
    norms = {name: value for name, value in weights.items() if "norm" in name}
    wide = {"mtp.0.e_proj.weight": parts[0], "mtp.0.h_proj.weight": parts[1]}
    dense.load_checkpoint(norms | wide)
    hidden, embeds = torch.randn(3, S, H).bfloat16(), torch.randn(3, H).bfloat16()
    truth = engine_chain(dense, embeds.double(), hidden.double())
    rounded = ek.MTPStreamsProjection(config, dtype=torch.bfloat16).load_checkpoint(norms | wide)
    limit, _ = rms_limit(torch.bfloat16, 2 * H, truth, engine_chain(rounded, embeds, hidden))
    assert relative_rms(layer(hidden, embeds=embeds), truth) <= limit


@pytest.mark.parametrize(
    ("formats", "H", "because"),
    [
        pytest.param(("bf16_12bit",) * 2, 256, "the exponents of a row are one table", id="12-bits"),
        pytest.param(("nvfp4", "nvfp4"), 256, "each has a global scale of its own", id="nvfp4"),
        pytest.param(
            ("fp8_block128", "fp8_block128"), 192, "128 columns share a scale, and 192 are no multiple", id="blocks"
        ),
        *(
            pytest.param(
                (format, format),
                H,
                f"{H} columns share a scale, and kernels read blocks of (16, 32, 64) or a multiple of 128",
                id=f"{format}-{H}",
            )
            for format in ("fp8_row", "fp8_tensor", "int8_row")
            for H in (160, 200)
        ),
        pytest.param(("fp8_row", "int8_row"), 192, "fp8_row and int8_row are two formats", id="two-formats"),
        pytest.param((None, "fp8_row"), 192, "the other one is not quantized", id="half"),
        pytest.param(("mxfp4", None), 192, "the other one is not quantized", id="other-half"),
    ],
)
def test_codes_that_cannot_become_one_weight_become_numbers(
    formats: tuple, H: int, because: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    D = 136
    weights = checkpoint_of("mtp.0.", DEEPSEEK_NAMES, H, D, H)
    expected = []
    for stem, format in zip(("mtp.0.e_proj", "mtp.0.h_proj"), formats, strict=True):
        expected.append(weights[f"{stem}.weight"].bfloat16())
        if format is None:
            continue
        codes = ek.quantize(expected[-1], format)
        weights |= {f"{stem}.weight": codes.codes, f"{stem}.weight_scale": codes.scales}
        weights |= {} if codes.global_scale is None else {f"{stem}.weight_scale_2": codes.global_scale}
        expected[-1] = codes.dequantize()
    layer = ek.MTPStreamsProjection(ek.MTPStreamsConfig(H, D), dtype=torch.bfloat16).load_checkpoint(weights)
    assert torch.equal(layer.eh_proj.weight, torch.cat(expected, 1))
    assert layer(torch.randn(2, S, H).bfloat16(), embeds=torch.randn(2, H).bfloat16()).isfinite().all()
    for stem, format in zip(("mtp.0.e_proj", "mtp.0.h_proj"), formats, strict=True):
        line = f"{stem}.weight is {format}, dequantized to torch.bfloat16: {because}"
        assert (line in caplog.text) == (format is not None)


def without(weights: dict[str, Tensor], part: str) -> dict[str, Tensor]:
    return {name: value for name, value in weights.items() if part not in name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: without(w, "e_proj"), "weights has no e_proj.weight, expected all of "),
        (lambda w: without(w, "hnorm"), "weights has no hnorm.weight, expected all of "),
        (lambda w: {}, "weights has no MTP layer of streams, expected one, because "),
        (
            lambda w: w | checkpoint_of("mtp.3.", DEEPSEEK_NAMES, H, D, H),
            "weights has MTP layers at ['mtp.0.', 'mtp.3.'], expected one, because ",
        ),
        (
            lambda w: w | {"mtp.0.h_proj.weight": w["mtp.0.h_proj.weight"].to(torch.float8_e4m3fn)},
            "mtp.0.h_proj.weight in torch.float8_e4m3fn, expected its scale beside it",
        ),
        (lambda w: w | {"mtp.0.hnorm.weight": torch.rand(288)}, "mtp.0.hnorm.weight has shape (288,), expected (72,)"),
    ],
)  # fmt: skip
def test_a_checkpoint_that_does_not_fit_is_refused_before_anything_is_copied(change: object, message: str) -> None:
    layer = make_layer()
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    with pytest.raises(ValueError, match=re.escape(message)):
        layer.load_checkpoint(change(checkpoint_of("mtp.0.", DEEPSEEK_NAMES, H, D, H)))
    assert all(same_bits(value, before[name]) for name, value in layer.state_dict().items())


@pytest.mark.parametrize("config", STAGES)
@pytest.mark.parametrize("named", ["hidden", "ids", "indices", "positions", "table", "enorm", "hnorm"])
def test_an_out_over_an_input_is_refused(config: dict, named: str, way: str) -> None:
    """Each of them is copied or normed first by some stage, so that the op that writes cannot tell."""
    layer = make_layer(mask_position_zero=True, **config)
    hidden, ids, table = make_inputs()
    given = {"hidden": hidden, "ids": ids, "indices": torch.arange(T), "positions": torch.arange(T), "table": table}
    given |= {name: getattr(layer, name).weight for name in ("enorm", "hnorm")}
    memory = torch.zeros(max(T * S * max(D, H), V * H) // 4 + 1, dtype=torch.int64)
    like = given[named]
    given[named] = memory.view(like.dtype)[: like.numel()].view(like.shape)
    for norm in ("enorm", "hnorm"):
        getattr(layer, norm).weight = torch.nn.Parameter(given.pop(norm), requires_grad=False)
    out = memory.view(torch.bfloat16)[: T * S * D].view(T, S, D)
    with pytest.raises(ValueError, match=f"^MTPStreamsProjection: out overlaps {named}, expected disjoint memory"):
        layer(**given, out=out)
    assert not memory.any()


def test_from_hf() -> None:
    v4 = {"model_type": "deepseek_v4", "hidden_size": 4096, "hc_mult": 4, "rms_norm_eps": 1e-5}
    read = ek.MTPStreamsConfig.from_hf(v4)
    assert read == ek.MTPStreamsConfig(4096, enorm_eps=1e-5, hnorm_eps=1e-5)
    assert ek.MTPStreamsConfig.from_hf(v4, engine="vllm").mask_position_zero
    qwen4 = {"model_type": "qwen4_exp", "text_config": {"hidden_size": 2048, "hc_count": 4}}
    for engine in ("sglang", "vllm"):
        read = ek.MTPStreamsConfig.from_hf(qwen4, engine=engine)
        assert read == ek.MTPStreamsConfig(2048, norm_offset=1.0, hnorm_over="row")
    errors = [
        ({"model_type": "deepseek_v3"}, {}, "model_type is 'deepseek_v3', expected one of ['deepseek_v4', "),
        ({"model_type": "llama"}, {}, "model_type is 'llama', expected one of ['deepseek_v4', "),
        ({"model_type": "deepseek_v4", "hidden_size": 8}, {}, "hc_mult is missing, expected the target's"),
        (v4, {"engine": "tgi"}, "engine is 'tgi', expected 'sglang' or "),
    ]
    for config, arguments, message in errors:
        with pytest.raises(ValueError, match=re.escape(f"MTPStreamsConfig.from_hf: {message}")):
            ek.MTPStreamsConfig.from_hf(config, **arguments)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": 0}, "hidden_size is 0, expected at least 1"),
        ({"num_streams": 0}, "num_streams is 0, expected at least 1"),
        ({"hnorm_over": "all"}, "hnorm_over is 'all', expected 'stream' or 'row'"),
        (
            {"order": "hidden,embed"},
            "order is 'hidden,embed', normed True, bias False, expected 'embed,hidden', True, False, ",
        ),
        (
            {"normed": False},
            "order is 'embed,hidden', normed False, bias False, expected 'embed,hidden', True, False, ",
        ),
        ({"bias": True}, "order is 'embed,hidden', normed True, bias True, expected 'embed,hidden', True, False, "),
        ({"num_streams": 2**30}, f"K={2**30} chunks of H=72 have "),
    ],
)
def test_a_config_that_no_family_has_is_refused(config: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"MTPStreamsConfig: {message}")):
        ek.MTPStreamsConfig(**{"hidden_size": H, "out_features": D} | config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hidden": torch.randn(T, H).bfloat16()},
            "hidden has shape (13, 72), expected (T, S*H) or (T, S, H) = (*, 4, 72)",
        ),
        (
            {"hidden": torch.randn(S, T, H).bfloat16().transpose(0, 1)},
            "hidden has strides (72, 936, 1), expected a dense tensor, because its streams are the rows of one matrix",
        ),
        ({"out": GuardedRows(T, S * D, torch.bfloat16).view}, "out has strides (169, 1), expected a dense tensor"),
        ({"out": torch.empty(T, D).bfloat16()}, "out has shape (13, 40), expected (T, S*D) or (T, S, D) = (*, 4, 40)"),
        ({"indices": torch.arange(3)}, "indices has shape (3,), expected (13,), because there is one per embedding"),
        (
            {"hidden": torch.randn(5, S, H).bfloat16()},
            "hidden has shape (5, 4, 72), expected (13, ...), because there is one row per embedding",
        ),
        ({"embeds": torch.randn(T, H)}, "given are ids, table, embeds, expected either ids and table, or embeds"),
        ({"ids": None}, "given are table, expected either ids and table, or embeds"),
        ({"table": torch.randn(V, 8).bfloat16()}, "table has shape (193, 8), expected (*, H) = (*, 72)"),
        (
            {"positions": torch.arange(5)},
            "positions has shape (5,), expected (13,), because there is one per embedding",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changes: dict, message: str) -> None:
    layer, (hidden, ids, table) = make_layer(), make_inputs()
    with pytest.raises(ValueError, match=re.escape(f"MTPStreamsProjection: {message}")):
        layer(**({"hidden": hidden, "ids": ids, "table": table} | changes))


def test_what_the_config_and_the_buffers_need_is_asked_for() -> None:
    hidden, ids, table = make_inputs()
    message = "MTPStreamsProjection: positions is None, expected (13,) positions, because the config masks position 0"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make_layer(mask_position_zero=True)(hidden, ids, table=table)
    message = "MTPStreamsProjection: there are 13 rows, expected at most 12, because static buffers never grow"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make_layer(max_tokens=T - 1)(hidden, ids, table=table)
