"""ContextKV: every variant of the stage against float64 and both engines' eager chains; slots, configs, errors."""

import math
import re
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import eagle_kernels as ek
from accuracy import relative_rms, rms_limit
from backends import environment_of
from eagle_kernels.context_kv import plain_config
from guards import UnchangedTensors, same_bits

K, HT, H, L, N, POSITIONS, SLOTS = 3, 56, 72, 2, 13, 30, 40

VARIANTS: dict[str, dict] = {
    "dflash": {"num_kv_heads": 2, "head_dim": 32},
    "bias-partial": {"num_kv_heads": 2, "head_dim": 32, "bias": True, "rotary_dim": 16},
    "laguna": {"num_kv_heads": 2, "head_dim": 32, "chunk_norm": True, "layer_norm": True, "bias": True},
    "muse-spark": {"num_kv_heads": 1, "head_dim": 64, "layer_norm": True, "k_norm": "unit"},
    "gemma4": {"num_kv_heads": 2, "head_dim": 32, "values": "k"},
    "kimi-k3": {
        "num_kv_heads": 1, "head_dim": 40, "norm_width": 32, "rotary_begin": 32, "values": "none", "interleaved": True,
    },
    "deepseek-v4": {"num_kv_heads": 1, "head_dim": 48, "rotary_begin": 40, "values": "none", "interleaved": True},
    "minimax-m3": {"num_kv_heads": 2, "head_dim": 32, "rotary_dim": 16, "norm_offset": 1.0},
    "no-k-norm": {"num_kv_heads": 2, "head_dim": 32, "k_norm": "none"},
    "one-head": {"num_kv_heads": 1, "head_dim": 32},
}  # fmt: skip


def make_stage(variant: str, dtype: torch.dtype = torch.bfloat16) -> ek.ContextKV:
    stage = ek.ContextKV(ek.ContextKVConfig(K, HT, H, L, **VARIANTS[variant], eps=1e-5), dtype=dtype)
    for name, parameter in stage.named_parameters():
        if "norm" in name:
            parameter.uniform_(0.5 - stage.config.norm_offset, 1.5 - stage.config.norm_offset)
    return stage


class Inputs:
    """Captured states whose rows differ in size, slots of which some are padding, and empty caches."""

    def __init__(self, config: ek.ContextKVConfig, dtype: torch.dtype = torch.bfloat16) -> None:
        scales = torch.logspace(-1, 2, N).unsqueeze(1)
        self.chunks = [(torch.randn(N, HT) * scales).to(dtype) for _ in range(K)]
        angles = torch.randn(POSITIONS, config.rotary_dim // 2) * 3
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], 1)
        self.positions = torch.randint(POSITIONS, (N,))
        self.slots = torch.randperm(SLOTS)[:N]
        self.slots[[2, 7]] = -1
        self.shape = (SLOTS, config.num_kv_heads, config.head_dim)
        self.dtype, self.config = dtype, config

    def caches(self) -> list[tuple[Tensor, Tensor | None]]:
        def empty() -> Tensor:
            return torch.full(self.shape, float("nan"), dtype=self.dtype)

        return [(empty(), None if self.config.values == "none" else empty()) for _ in range(L)]

    @property
    def place(self) -> dict:
        return {"positions": self.positions, "slots": self.slots, "cos_sin": self.cos_sin}


def chain(stage: ek.ContextKV, inputs: Inputs, dtype: torch.dtype, engine: str = "sglang") -> list[tuple[Tensor, ...]]:
    """K and V [N, n, d] of each layer as the engines compute them eagerly, each norm and product rounded to `dtype`.

    After the product SGLang rounds K once (`_fused_norm_rope_kernel_stacked`), vLLM the normed K, cos, sin and K.
    """
    config, wide = stage.config, torch.promote_types(dtype, torch.float32)
    weights = {name: value.to(dtype) for name, value in stage.state_dict().items()}

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x.to(wide), x.shape[-1:], weights[name].to(wide) + config.norm_offset, config.eps).to(dtype)

    chunks = [chunk.to(dtype) for chunk in inputs.chunks]
    if config.chunk_norm:
        chunks = [norm(chunk, f"aux_norm.{k}.weight") for k, chunk in enumerate(chunks)]
    context = norm(F.linear(torch.cat(chunks, -1), weights["fc.weight"]), "hidden_norm.weight")
    step = wide if engine == "sglang" else dtype
    cos, sin = inputs.cos_sin.to(step)[inputs.positions].unsqueeze(1).chunk(2, -1)
    result = []
    for layer in range(L):
        rows = slice(layer * config.kv_width, (layer + 1) * config.kv_width)
        c = norm(context, f"layer_norm.{layer}.weight") if config.layer_norm else context
        bias = weights["kv_proj.bias"][rows] if config.bias else None
        heads = F.linear(c, weights["kv_proj.weight"][rows], bias).unflatten(1, (-1, config.head_dim))
        k, v = heads[:, : config.num_kv_heads], heads[:, config.num_kv_heads :]
        if config.values == "k":
            v = F.rms_norm(k.to(wide), k.shape[-1:], None, config.eps).to(dtype)
        k = k.to(wide)
        if config.k_norm != "none":
            gain = (
                weights[f"k_norm.{layer}.weight"].to(wide) + config.norm_offset if config.k_norm == "weight" else None
            )
            normed = F.rms_norm(k[..., : config.norm_width], (config.norm_width,), gain, config.eps)
            k = torch.cat([normed, k[..., config.norm_width :]], -1)
        k = k.to(step).clone()
        turned = k[..., config.rotary_begin : config.rotary_begin + config.rotary_dim]
        if config.interleaved:
            first, second = turned[..., 0::2].clone(), turned[..., 1::2].clone()
            turned[..., 0::2], turned[..., 1::2] = first * cos - second * sin, second * cos + first * sin
        else:
            first, second = (half.clone() for half in turned.chunk(2, -1))
            turned.copy_(torch.cat([first * cos - second * sin, second * cos + first * sin], -1))
        result.append((k.to(dtype),) if config.values == "none" else (k.to(dtype), v))
    return result


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_matches_float64(variant: str, dtype: torch.dtype) -> None:
    stage = make_stage(variant, dtype)
    inputs = Inputs(stage.config, dtype)
    caches = inputs.caches()
    with UnchangedTensors([*inputs.chunks, inputs.cos_sin, inputs.positions, inputs.slots]):
        stage(inputs.chunks, caches=caches, **inputs.place)
    kept = inputs.slots >= 0
    engine, truth = chain(stage, inputs, dtype), chain(stage, inputs, torch.float64)
    for cache, of_engine, true in zip(caches, engine, truth, strict=True):
        for written, eager, exact in zip(cache, of_engine, true, strict=False):
            limit, _ = rms_limit(dtype, K * HT + H, exact[kept].flatten(1), eager[kept].flatten(1))
            assert relative_rms(written[inputs.slots[kept]].flatten(1), exact[kept].flatten(1)) <= limit
            others = torch.ones(SLOTS, dtype=torch.bool)
            others[inputs.slots[kept]] = False
            assert written[others].isnan().all(), "a slot of no row was written"


@pytest.mark.parametrize("variant", ["dflash", "laguna", "gemma4", "minimax-m3"])
def test_k_is_nearer_to_float64_than_vllms(variant: str) -> None:
    stage = make_stage(variant)
    inputs = Inputs(stage.config)
    caches, kept = inputs.caches(), inputs.slots >= 0
    stage(inputs.chunks, caches=caches, **inputs.place)
    for (cache, _), (vllm, *_), (truth, *_) in zip(
        caches, chain(stage, inputs, torch.bfloat16, "vllm"), chain(stage, inputs, torch.float64), strict=True
    ):
        assert relative_rms(cache[inputs.slots[kept]], truth[kept]) < relative_rms(vllm[kept], truth[kept])


def test_what_is_captured_goes_in_as_one_packed_tensor_and_by_rows() -> None:
    stage = make_stage("laguna")
    inputs = Inputs(stage.config)
    buffer = ek.AuxHiddenStates(N, K, HT)
    for k, chunk in enumerate(inputs.chunks):
        buffer.capture(k, chunk)
    accepted = torch.tensor([4, 0, 12])
    assert same_bits(stage.combine(buffer.packed(N), indices=accepted), stage.combine(inputs.chunks)[accepted])
    out = torch.empty(N, H).bfloat16()
    assert stage.combine(inputs.chunks, out=out) is out


@pytest.mark.parametrize("variant", ["dflash", "laguna"])
def test_the_projection_goes_into_a_view(variant: str) -> None:
    stage = make_stage(variant)
    states = torch.randn(N, H).bfloat16()
    wide = torch.full((N, L * stage.config.kv_width + 8), 7.0).bfloat16()
    out = wide[:, 3:-5]
    assert stage.project(states, out=out) is out
    assert same_bits(out.contiguous(), stage.project(states))
    assert (wide[:, :3] == 7).all() and (wide[:, -5:] == 7).all()


@pytest.mark.parametrize("variant", ["dflash", "laguna"])
@pytest.mark.parametrize("columns", [-8, 8])
def test_an_out_that_does_not_fit_is_not_written(columns: int, variant: str) -> None:
    """Where each layer has a norm of its own, an `out` too wide got the result in its first columns, and one too narrow
    raised after the layers that fit were written."""
    stage = make_stage(variant)
    width = L * stage.config.kv_width
    out = torch.full((N, width + columns), 7.0).bfloat16()
    message = rf"norm_concat_linear: out has shape \({N}, {width + columns}\), expected .* = \({N}, {width}\)"
    with UnchangedTensors([out]), pytest.raises(ValueError, match=f"^{message}$"):
        stage.project(torch.randn(N, H).bfloat16(), out=out)


def test_a_norm_of_a_layer_that_does_not_fit_is_found_before_the_first_layer_is_written() -> None:
    """It was found after, and an `out` over the second layer's gain changed what that was computed with."""
    stage, states = make_stage("laguna"), torch.randn(N, H).bfloat16()
    width = L * stage.config.kv_width
    memory = torch.full((N, width), 0.5).bfloat16()
    stage.layer_norm[1].weight = torch.nn.Parameter(memory[0, :H], requires_grad=False)
    message = r"norm_concat_linear: out overlaps layer_norm\[1\].weight, expected disjoint memory"
    with UnchangedTensors([memory]), pytest.raises(ValueError, match=f"^{message}"):
        stage.project(states, out=memory)
    stage.layer_norm[1].half()
    out = torch.full((N, width), 7.0).bfloat16()
    message = r"ContextKV: layer_norm\[1\].weight has dtype torch.float16, expected torch.bfloat16 or torch.float32"
    with UnchangedTensors([out]), pytest.raises(TypeError, match=f"^{message}"):
        stage.project(states, out=out)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (
            lambda stage: setattr(stage.layer_norm[1], "weight", parameter(H + 1)),
            ValueError,
            f"ContextKV: layer_norm[1].weight has shape ({H + 1},), expected ({H},) = (H,)",
        ),
        (
            lambda stage: setattr(stage.layer_norm[1], "weight", parameter(H, 2, column=1)),
            ValueError,
            "ContextKV: layer_norm[1].weight has strides (2,), expected a last stride of 1",
        ),
        (
            lambda stage: stage.layer_norm[1].to("meta"),
            ValueError,
            "ContextKV: layer_norm[1].weight is on meta, expected cpu, because states is there",
        ),
        (
            lambda stage: stage.layer_norm[1].requires_grad_(),
            RuntimeError,
            "ContextKV: an input requires grad, expected inputs without grad or a call under torch.no_grad(), because "
            "the op is inference only and would cut the gradient",
        ),
        (
            lambda stage: setattr(stage.kv_proj, "bias", parameter(255)),
            ValueError,
            "norm_concat_linear: bias has shape (255,), expected (256,) = (D,)",
        ),
        (
            lambda stage: setattr(stage, "kv_proj", torch.nn.Linear(H, 255).bfloat16().requires_grad_(False)),
            ValueError,
            f"ContextKV: kv_proj.weight has shape (255, {H}), expected (L*W, H) = (256, {H})",
        ),
    ],
    ids=["shape", "strides", "device", "grad", "bias", "weight"],
)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_what_only_the_last_layer_reads_is_found_before_the_first_is_written(
    backend: str, change: Callable, kind: type[Exception], message: str
) -> None:
    stage, states = make_stage("laguna"), torch.randn(N, H).bfloat16()
    change(stage)
    out = torch.full((N, L * stage.config.kv_width), 7.0).bfloat16()
    raises = pytest.raises(kind, match=f"^{re.escape(message)}$")
    with environment_of(EAGLE_KERNELS_BACKEND=backend), UnchangedTensors([out]), raises:
        stage.project(states, out=out)


def parameter(*shape: int, column: int | None = None) -> torch.nn.Parameter:
    values = torch.rand(shape).bfloat16()
    return torch.nn.Parameter(values if column is None else values[:, column], requires_grad=False)


@pytest.mark.parametrize("variant", ["dflash", "laguna"])
def test_one_row_may_have_one_dimension(variant: str) -> None:
    stage, states = make_stage(variant), torch.randn(1, H).bfloat16()
    assert same_bits(stage.project(states[0]), stage.project(states)[0])


def test_each_layer_may_have_slots_of_its_own_or_none() -> None:
    stage = make_stage("dflash")
    inputs = Inputs(stage.config)
    kv = stage.project(stage.combine(inputs.chunks))
    caches, expected = inputs.caches(), inputs.caches()
    stage.store(kv, caches=expected, **inputs.place)
    stage.store(kv, caches=caches, **inputs.place | {"slots": [None, inputs.slots.int()]})
    assert all(cache.isnan().all() for cache in caches[0])
    assert all(same_bits(cache, other) for cache, other in zip(caches[1], expected[1], strict=True))


@pytest.mark.parametrize("variant", ["dflash", "laguna", "kimi-k3"])
def test_a_quantized_stage_computes_with_what_its_codes_stand_for(variant: str) -> None:
    stage, dense = make_stage(variant), make_stage(variant, torch.float32)
    state = {name: value.float() for name, value in stage.state_dict().items()}
    stage.quantize("fp8_row")
    state["fc.weight"] = stage.fc.quantized.dequantize(torch.float32)
    if not stage.config.layer_norm:
        state["kv_proj.weight"] = stage.kv_proj.quantized.dequantize(torch.float32)
    dense.load_state_dict(state)
    inputs = Inputs(stage.config)
    caches = inputs.caches()
    stage(inputs.chunks, caches=caches, **inputs.place)
    kept = inputs.slots >= 0
    engine, truth = chain(dense, inputs, torch.bfloat16), chain(dense, inputs, torch.float64)
    for cache, of_engine, true in zip(caches, engine, truth, strict=True):
        limit, _ = rms_limit(torch.bfloat16, K * HT + H, true[0][kept].flatten(1), of_engine[0][kept].flatten(1))
        assert relative_rms(cache[0][inputs.slots[kept]].flatten(1), true[0][kept].flatten(1)) <= limit


QWEN3 = {
    "architectures": ["DFlashDraftModel"], "hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-5, "dflash_config": {"target_layer_ids": [1, 5, 9]},
}  # fmt: skip
LATENT = {"values": "none", "interleaved": True}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": "16"}, "head_dim is a str, expected an int"),
        ({"head_dim": math.inf, "partial_rotary_factor": 0.5}, "head_dim is a float, expected an int"),
        ({"head_dim": None, "num_attention_heads": [4]}, "num_attention_heads is a list, expected an int"),
        ({"architectures": 5}, "architectures is a int, expected a list of names"),
        ({"attention_bias": "false"}, "attention_bias is 'false', expected True or False"),
        ({"partial_rotary_factor": "0.5"}, "partial_rotary_factor is a str, expected a number"),
        (
            {"architectures": ["DSparkMiniMaxDraftModel"], "use_gemma_norm": "false"},
            "use_gemma_norm is 'false', expected True or False",
        ),
        ({"use_gemma_norm": "false"}, "use_gemma_norm is 'false', expected True or False"),
        (
            {"architectures": ["MuseSparkDSparkModel"], "norm_zero_centered_gamma": 1},
            "norm_zero_centered_gamma is 1, expected True or False",
        ),
        (
            {"architectures": ["Gemma4DSparkModel"], "attention_k_eq_v": "true"},
            "attention_k_eq_v is 'true', expected True or False",
        ),
        ({"architectures": ["K3DSparkModel"], "kv_lora_rank": "5", "qk_rope_head_dim": 8}, "kv_lora_rank is a str"),
        ({"rope_is_neox_style": 0}, "rope_is_neox_style is 0, expected True or False"),
        (
            {"speculators_model_type": "dflash", "transformer_layer_config": 5},
            "transformer_layer_config is a int, expected a dict or a Hugging Face config object",
        ),
        (
            {"architectures": ["DFlashLagunaForCausalLM"], "layer_types": [{}]},
            "layer_types[0] is a dict, expected a name",
        ),
    ],
)
def test_a_field_of_another_type_is_named(changes: dict, message: str) -> None:
    """These raised Python's own message about a division by text, and an OverflowError for JSON's Infinity."""
    with pytest.raises(TypeError, match=re.escape(f"ContextKVConfig.from_hf: {message}")):
        ek.ContextKVConfig.from_hf(QWEN3 | changes, target_hidden_size=96)


@pytest.mark.parametrize(
    ("changes", "engine", "expected"),
    [
        ({}, "vllm", ek.ContextKVConfig(3, 96, 64, 5, 2, 32, eps=1e-5)),
        (
            {"architectures": ["MiniMaxDFlash2DraftModel"], "use_gemma_norm": True},
            "sglang",
            ek.ContextKVConfig(3, 96, 64, 5, 2, 32, eps=1e-5, norm_offset=1.0),
        ),
        (
            {"head_dim": None, "dflash_config": None, "attention_bias": True, "partial_rotary_factor": 0.5},
            "sglang",
            ek.ContextKVConfig(5, 96, 64, 5, 2, 16, eps=1e-5, bias=True, rotary_dim=8),
        ),
        (
            {"architectures": ["DFlashLagunaForCausalLM"]},
            "vllm",
            ek.ContextKVConfig(3, 96, 64, 5, 2, 32, eps=1e-5, chunk_norm=True, layer_norm=True),
        ),
        (
            {"architectures": ["Gemma4DSparkModel"], "attention_k_eq_v": True, "num_global_key_value_heads": 1},
            "vllm",
            ek.ContextKVConfig(3, 96, 64, 5, 1, 32, eps=1e-5, values="k"),
        ),
        (
            {"architectures": ["K3DSparkModel"], "kv_lora_rank": 512, "qk_rope_head_dim": 64},
            "vllm",
            ek.ContextKVConfig(3, 96, 64, 5, 1, 576, eps=1e-5, norm_width=512, rotary_begin=512, **LATENT),
        ),
        (
            {"architectures": ["MuseSparkDSparkModel"], "norm_zero_centered_gamma": True},
            "vllm",
            ek.ContextKVConfig(3, 96, 64, 5, 2, 32, eps=1e-5, norm_offset=1.0, layer_norm=True, k_norm="unit",
                               interleaved=True),
        ),
        (
            {"architectures": ["DSparkMiniMaxDraftModel"], "use_gemma_norm": True, "rotary_dim": 16},
            "sglang",
            ek.ContextKVConfig(3, 96, 64, 5, 2, 32, eps=1e-5, norm_offset=1.0, rotary_dim=16),
        ),
        (
            {"architectures": ["DSparkDraftModel"], "head_dim": 512, "qk_rope_head_dim": 64, "n_mtp_layers": 4,
             "dflash_config": None, "dspark_target_layer_ids": [3, 7]},
            "vllm",
            ek.ContextKVConfig(2, 96, 64, 4, 1, 512, eps=1e-5, rotary_begin=448, **LATENT),
        ),
        ({"architectures": ["DSparkDraftModel"]}, "sglang", ek.ContextKVConfig(3, 96, 64, 5, 2, 32, eps=1e-5)),
        (  # transformers' order, 0 being a factor too
            {"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.0}},
            "vllm",
            ek.ContextKVConfig(3, 96, 64, 5, 2, 32, eps=1e-5, rotary_dim=0),
        ),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "vllm",
            ek.ContextKVConfig(3, 96, 64, 5, 2, 32, eps=1e-5, rotary_dim=16),
        ),
    ],
)  # fmt: skip
def test_from_hf(changes: dict, engine: str, expected: ek.ContextKVConfig) -> None:
    assert ek.ContextKVConfig.from_hf(QWEN3 | changes, target_hidden_size=96, engine=engine) == expected


@pytest.mark.parametrize(
    ("changes", "interleaved"),
    [
        ({"rope_is_neox_style": False, "architectures": ["Lfm2DSparkDraftModel"]}, True),  # LFM2.5's
        ({"is_neox_style": False}, True),
        ({"rope_is_neox_style": True, "is_neox_style": False}, False),
        ({"rope_is_neox_style": None, "is_neox_style": False}, True),
        ({"rope_is_neox_style": False, "architectures": ["DSparkDraftModel"]}, True),
        ({"rope_is_neox_style": False, "architectures": ["DFlashLagunaForCausalLM"]}, True),
        # Engines read the field for none of these.
        ({"rope_is_neox_style": False, "architectures": ["DSparkMiniMaxDraftModel"]}, False),
        ({"rope_is_neox_style": True, "architectures": ["MuseSparkDSparkModel"]}, True),
    ],
)
def test_a_drafter_says_which_columns_of_a_head_rope_pairs(changes: dict, interleaved: bool) -> None:
    """Halves were rotated whatever the config says, and K in the cache was wrong."""
    assert ek.ContextKVConfig.from_hf(QWEN3 | changes, target_hidden_size=96).interleaved is interleaved


LAGUNA = {"architectures": ["DFlashLagunaForCausalLM"], "layer_types": ["sliding_attention"] * 5}
GEMMA4 = {"architectures": ["Gemma4DSparkModel"], "attention_k_eq_v": True, "global_head_dim": 64}
PROPORTIONAL = {"rope_type": "proportional", "partial_rotary_factor": 0.25}


@pytest.mark.parametrize(
    ("changes", "rotary_dim"),
    [
        ({"rope_parameters": {"rope_dim": 24, "partial_rotary_factor": 0.5}}, 24),
        ({"rope_scaling": {"rope_dim": 24}, "partial_rotary_factor": 0.5}, 24),
        (GEMMA4 | {"rope_parameters": {"full_attention": PROPORTIONAL, "sliding_attention": {}}}, 64),
        (GEMMA4 | {"rope_parameters": PROPORTIONAL}, 64),
        (GEMMA4, 64),
        (GEMMA4 | {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, 16),
        (LAGUNA | {"partial_rotary_factor": 0.5}, 16),
        (LAGUNA | {"partial_rotary_factor": 0.5, "swa_rope_parameters": {"partial_rotary_factor": 1.0}}, 32),
        (LAGUNA | {"partial_rotary_factor": 0.5, "swa_rope_parameters": {"rope_type": "default"}}, 16),
        (
            LAGUNA | {"rope_parameters": {"full_attention": {"partial_rotary_factor": 0.5}, "sliding_attention": {}},
                      "partial_rotary_factor": 0.25},
            16,
        ),
        (
            LAGUNA | {"rope_parameters": {"full_attention": {}, "sliding_attention": {"partial_rotary_factor": 0.25}},
                      "partial_rotary_factor": 0.5},
            8,
        ),
        (
            LAGUNA | {"layer_types": ["full_attention"] * 5, "swa_rope_parameters": {"partial_rotary_factor": 0.25}},
            32,
        ),
    ],
)  # fmt: skip
def test_the_columns_that_rope_rotates_are_those_of_the_engine_s_table(changes: dict, rotary_dim: int) -> None:
    """`store` refused the engines' tables, or took a narrower one and left columns where they were."""
    assert ek.ContextKVConfig.from_hf(QWEN3 | changes, target_hidden_size=96).rotary_dim == rotary_dim


def test_the_columns_of_a_config_are_pythons_ints() -> None:
    """Each access of them was a check; and a product of numpy's integers may wrap."""
    config = ek.ContextKVConfig(3, 96, 64, 5, 2, 32, norm_width=np.int32(16), rotary_dim=np.int32(8))
    assert (type(config.norm_width), type(config.rotary_dim)) == (int, int)
    with pytest.raises(TypeError, match=r"^ContextKVConfig: rotary_dim is a float, expected an int$"):
        ek.ContextKVConfig(3, 96, 64, 5, 2, 32, rotary_dim=8.0)


SPECULATORS = {
    "speculators_model_type": "dflash",
    "architectures": ["DFlashSpeculator"],
    "aux_hidden_state_layer_ids": [2, 6, 10, 11],
    "transformer_layer_config": QWEN3 | {"architectures": None, "dflash_config": None},
}
M31 = {
    "architectures": ["DSparkMiniMaxDraftModel"],
    "text_config": QWEN3
    | {"architectures": ["MiniMaxM3SparseForCausalLM"], "num_hidden_layers": 60}
    | {"dflash_config": {"num_hidden_layers": 3, "target_layer_ids": [1, 5, 9, 13]}, "use_gemma_norm": True},
}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (SPECULATORS, ek.ContextKVConfig(4, 96, 64, 5, 2, 32, eps=1e-5)),
        (SPECULATORS | {"speculators_model_type": "dflash2"}, ek.ContextKVConfig(4, 96, 64, 5, 2, 32, eps=1e-5)),
        (SPECULATORS | {"speculators_model_type": "dspark"}, ek.ContextKVConfig(4, 96, 64, 5, 2, 32, eps=1e-5)),
        (M31, ek.ContextKVConfig(4, 96, 64, 3, 2, 32, eps=1e-5, norm_offset=1.0)),
        (  # the same after SGLang's own translation of sections
            M31["text_config"] | {"architectures": M31["architectures"]},
            ek.ContextKVConfig(4, 96, 64, 3, 2, 32, eps=1e-5, norm_offset=1.0),
        ),
    ],
    ids=["dflash", "dflash2", "dspark", "MiniMax-M3.1", "MiniMax-M3.1 without sections"],
)
@pytest.mark.parametrize("of", [dict, lambda config: SimpleNamespace(**config)], ids=["dict", "object"])
def test_a_config_in_sections_is_read(of: Callable, config: dict, expected: ek.ContextKVConfig) -> None:
    """Of speculators' no field was found, and of MiniMax-M3.1's the target's number of layers."""
    sections = {name: of(value) if name.endswith("_config") else value for name, value in config.items()}
    assert ek.ContextKVConfig.from_hf(of(sections), target_hidden_size=96) == expected


def test_the_boundaries_of_speculators_are_one_more_than_their_layers() -> None:
    for kind, place in (("dflash", "dflash_config"), ("dspark", None)):
        plain = plain_config(SPECULATORS | {"speculators_model_type": kind, "draft_vocab_size": 7})
        layers = plain if place is None else plain[place]
        assert layers["target_layer_ids"] == [1, 5, 9, 10]
        assert (plain["eagle_aux_hidden_state_layer_ids"], plain["draft_vocab_size"]) == ([2, 6, 10, 11], 7)
    assert SPECULATORS["transformer_layer_config"]["dflash_config"] is None


V4 = {"hidden_size": 64, "head_dim": 512, "qk_rope_head_dim": 64, "dspark_target_layer_ids": [3, 7]}


@pytest.mark.parametrize(
    ("model_type", "architecture", "captures_after"),
    [
        ("deepseek_v41", "DSparkV41DraftModel", {"sglang": True, "vllm": False}),  # vLLM's class, for V4.1 only
        ("deepseek_v41", "DeepseekV4ForCausalLMDSpark", {"sglang": True, "vllm": False}),  # SGLang's class, for both
        ("deepseek_v41", "DeepseekV41ForCausalLM", {"sglang": True, "vllm": False}),  # the checkpoint's class
        ("deepseek_v4", "DeepseekV4ForCausalLMDSpark", {"sglang": False, "vllm": False}),
        ("deepseek_v4", "DeepseekV4ForCausalLM", {"sglang": False, "vllm": False}),
    ],
)
def test_the_engines_capture_v41_on_different_sides_of_the_engram(
    model_type: str, architecture: str, captures_after: dict[str, bool]
) -> None:
    config = V4 | {"model_type": model_type, "architectures": [architecture]}
    for engine, after in captures_after.items():
        read = ek.ContextKVConfig.from_hf(config, target_hidden_size=96, engine=engine)
        assert read == ek.ContextKVConfig(2, 96, 64, 3, 1, 512, rotary_begin=448, **LATENT, capture_after_engram=after)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": [["DFlashDraftModel"]]}, "architectures is [['DFlashDraftModel']], expected one of "),
        (
            {"architectures": ["LlamaForCausalLMEagle3"]},
            "architectures is ['LlamaForCausalLMEagle3'], expected one of ",
        ),
        ({"hidden_size": None}, "hidden_size is missing, expected the drafter's"),
        ({"partial_rotary_factor": float("inf")}, "partial_rotary_factor is inf, expected one in [0, 1]"),
        (
            {"dflash_config": {"attention_value_scale": 2.0}},
            "attention_value_scale is given, expected none, because V is cached as it is projected",
        ),
        (
            {"architectures": ["Gemma4DSparkModel"]},
            "attention_k_eq_v is not set, expected True, because ",
        ),
        (
            {"architectures": ["MuseSparkDSparkModel"], "draft_position_mode": "nope"},
            "draft_position_mode is 'nope', expected 'rope', because K rotates",
        ),
        ({"architectures": ["MuseSparkDSparkModel"], "norm_affine": False}, "norm_affine is False, expected True, "),
        ({"architectures": ["K3DSparkModel"]}, "kv_lora_rank is missing, expected the drafter's"),
        ({"num_key_value_heads": None}, "num_key_value_heads is missing, expected the drafter's"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing, expected the drafter's"),
        ({"head_dim": None, "num_attention_heads": None}, "head_dim is missing, expected the drafter's"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0, expected at least 1"),
        (
            {"architectures": ["DeepseekV4ForCausalLM"]},
            "dspark_target_layer_ids is missing, expected the captured layers of its DSpark stages",
        ),
        ({"rope_parameters": {"rope_dim": 0}}, "rope_dim is 0, expected at least 1"),
        (
            {"architectures": ["DFlashLagunaForCausalLM"], "use_gemma_norm": True},
            "use_gemma_norm is True, expected False, because SGLang adds 1 to every gain but the aux_norms'",
        ),
        (
            {"speculators_model_type": "medusa"},
            "speculators_model_type is 'medusa', expected 'dflash' or 'dflash2' or 'dspark'",
        ),
        ({"speculators_model_type": "dflash"}, "transformer_layer_config is missing, expected the drafter's layers"),
        (
            {"speculators_model_type": "dspark", "transformer_layer_config": {"hidden_size": 64}},
            "aux_hidden_state_layer_ids is missing, expected the captured boundaries",
        ),
        (
            {
                "architectures": ["DFlashLagunaForCausalLM"],
                "layer_types": ["full_attention", "sliding_attention"],
                "swa_rope_parameters": {"rope_dim": 16},
            },
            "rotary_dim is 32 for full_attention, 16 for sliding_attention, expected one, because a stage has one",
        ),
    ],
)
def test_a_drafter_that_is_not_supported_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"ContextKVConfig.from_hf: {message}")):
        ek.ContextKVConfig.from_hf(QWEN3 | changes, target_hidden_size=96)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers is 0, expected at least 1"),
        ({"num_chunks": 2**26}, f"K={2**26} chunks of H={HT} have {2**26 * HT} columns, expected at most "),
        ({"hidden_size": 2**31}, f"K=1 chunks of H={2**31} have {2**31} columns, expected at most "),
        ({"num_layers": 2**25}, f"K={2**25} chunks of H=128 have {2**32} columns, expected at most "),
        ({"k_norm": "layer"}, "k_norm is 'layer', expected 'weight' or 'unit' or 'none'"),
        ({"head_dim": 2048}, "head_dim is 2048, expected at most 1024"),
        ({"norm_width": 33}, "norm_width is 33, expected 1 to head_dim = 32"),
        ({"norm_offset": float("nan")}, "norm_offset is nan, expected a finite fp32 number"),
        (
            {"rotary_dim": 7},
            "rotary_begin is 0 and rotary_dim 7, expected an even number of columns within ",
        ),
        ({"rotary_begin": 30, "rotary_dim": 4}, "rotary_begin is 30 and rotary_dim 4, expected an even number"),
    ],
)
def test_a_config_that_no_kernel_takes_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"ContextKVConfig: {message}")):
        ek.ContextKVConfig(**({"num_chunks": K, "target_hidden_size": HT, "hidden_size": H, "num_layers": L,
                               "num_kv_heads": 2, "head_dim": 32} | changes))  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: {"kv": torch.empty(N, 5).bfloat16()}, "kv has shape (13, 5), expected (N, L*W) = (*, 256)"),
        (lambda i: {"slots": [i.slots]}, "slots has 1 entries, expected 2, one per layer"),
        (lambda i: {"caches": i.caches()[:1]}, "caches has 1 entries, expected 2, one per layer"),
        (lambda i: {"cos_sin": i.cos_sin[:, :8]}, "cos_sin has shape (30, 8), expected (P, rotary_dim) = (*, 32)"),
        (
            lambda i: {"caches": [(k, None) for k, _ in i.caches()]},
            "caches[0] has no V, expected the opposite, because ",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change: object, message: str) -> None:
    stage = make_stage("dflash")
    inputs = Inputs(stage.config)
    arguments = {"kv": stage.project(stage.combine(inputs.chunks)), "caches": inputs.caches(), **inputs.place}
    with pytest.raises(ValueError, match=re.escape(f"ContextKV: {message}")):
        stage.store(**arguments | change(inputs))


# The prefix if checkpoints have one, and names: the layers, fc and its norm; in a layer K's projection, K's norm and
# the layer's own norm.
NAMES = {
    "dflash": ("", "layers", "fc", "hidden_norm", "self_attn.k_proj", "self_attn.k_norm", ""),
    "bias-partial": (
        "model.", "layers", "encoder.fc", "encoder.output_norm_enc", "self_attn.k_proj", "self_attn.k_norm", "",
    ),
    "laguna": ("", "layers", "fc", "hidden_norm", "self_attn.k_proj", "self_attn.k_norm", "input_layernorm"),
    "muse-spark": ("", "layers", "fc", "hidden_norm", "self_attn.k_proj", "", "pre_qkv_proj_norm"),
    "gemma4": ("", "layers", "fc", "hidden_norm", "self_attn.k_proj", "self_attn.k_norm", ""),
    "kimi-k3": (
        "", "layers", "context_proj", "context_norm", "self_attn.kv_a_proj_with_mqa", "self_attn.kv_a_layernorm", "",
    ),
    "deepseek-v4": ("", "mtp", "main_proj", "main_norm", "attn.wkv", "attn.kv_norm", ""),
    "one-head": ("", "layers", "fc", "hidden_norm", "self_attn.k_proj", "self_attn.k_norm", ""),
    "minimax-m3": (
        "language_model.model.dspark.", "layers", "fc", "hidden_norm", "decoder_layer.self_attn.k_proj",
        "decoder_layer.self_attn.k_norm", "",
    ),
}  # fmt: skip


def checkpoint(variant: str, ranks: list[ek.ContextKV]) -> dict[str, Tensor]:
    """A checkpoint with the heads of all ranks, under the names of a variant, and weights that are not the stage's."""
    prefix, layers, fc, hidden_norm, k, k_norm, layer_norm = NAMES[variant]
    config, state = ranks[0].config, ranks[0].state_dict()
    top = f"{prefix}mtp.0." if layers == "mtp" else prefix
    weights = {f"{top}{fc}.weight": state["fc.weight"], f"{top}{hidden_norm}.weight": state["hidden_norm.weight"]}
    weights |= {f"aux_hidden_norms.{i}.weight": state[f"aux_norm.{i}.weight"] for i in range(len(ranks[0].aux_norm))}
    weights |= {"lm_head.weight": torch.ones(9, H), f"{prefix}norm.weight": torch.ones(H)}
    heads = config.num_kv_heads * config.head_dim
    for layer in range(L):
        stem = f"{prefix}{layers}.{layer}"
        for number, part in enumerate([k, k.replace("k_proj", "v_proj")][: 2 if config.values == "own" else 1]):
            begin = layer * config.kv_width + number * heads
            rows = slice(begin, begin + heads)
            for parameter in ("weight", "bias") if config.bias else ("weight",):
                parts = [rank.state_dict()[f"kv_proj.{parameter}"][rows] for rank in ranks]
                weights[f"{stem}.{part}.{parameter}"] = torch.cat(parts)
        if k_norm:
            weights[f"{stem}.{k_norm}.weight"] = state[f"k_norm.{layer}.weight"]
        if layer_norm:
            weights[f"{stem}.{layer_norm}.weight"] = state[f"layer_norm.{layer}.weight"]
        weights[f"{stem}.self_attn.q_proj.weight"] = torch.ones(8, H)
    if layers == "mtp":  # the target's own layers
        weights |= {f"layers.{layer}.attn.wkv.weight": torch.ones(config.head_dim, H) for layer in range(5)}
    if prefix.endswith("dspark."):
        of_target = [f"language_model.model.layers.{layer}.self_attn.k_proj.weight" for layer in range(5)]
        weights |= {name: torch.ones(config.head_dim, H) for name in of_target}
    return weights


def rank_stages(variant: str, count: int) -> list[ek.ContextKV]:
    """Stages that differ in their heads alone."""
    stages = [make_stage(variant) for _ in range(count)]
    shared = {name: value for name, value in stages[0].state_dict().items() if not name.startswith("kv_proj")}
    for stage in stages:
        stage.load_state_dict(shared, strict=False)
    return stages


@pytest.mark.parametrize("variant", NAMES)
def test_a_checkpoint_is_loaded(variant: str) -> None:
    (expected,) = rank_stages(variant, 1)
    loaded = ek.ContextKV(expected.config, dtype=torch.bfloat16)
    assert loaded.load_checkpoint(checkpoint(variant, [expected])) is loaded
    assert all(map(same_bits, loaded.state_dict().values(), expected.state_dict().values()))


@pytest.mark.parametrize(("copies", "variant"), [(1, "laguna"), (2, "muse-spark"), (4, "deepseek-v4")])
def test_each_rank_loads_its_own_heads(copies: int, variant: str) -> None:
    """With fewer heads than ranks, several ranks have the same head."""
    stages = rank_stages(variant, 4 // copies)
    weights = checkpoint(variant, stages)
    for rank in range(4):
        loaded = ek.ContextKV(stages[0].config, dtype=torch.bfloat16)
        loaded.load_checkpoint(weights, tp_rank=np.uint8(rank), tp_size=np.uint8(4))  # whose products wrapped
        assert same_bits(loaded.kv_proj.weight, stages[rank // copies].kv_proj.weight)


def test_a_quantized_checkpoint_keeps_the_codes_of_fc() -> None:
    stage = make_stage("dflash")
    weights, codes = checkpoint("dflash", [stage]), {}
    for name in ("fc", *(f"layers.{layer}.self_attn.{part}_proj" for layer in range(L) for part in "kv")):
        codes[name] = ek.quantize(weights.pop(f"{name}.weight"), "fp8_row")
        weights |= {f"{name}.weight": codes[name].codes, f"{name}.weight_scale": codes[name].scales}
    loaded = make_stage("dflash").quantize("int8_row").load_checkpoint(weights)
    assert torch.equal(loaded.fc.quantized.codes.view(torch.uint8), codes.pop("fc").codes.view(torch.uint8))
    assert torch.equal(loaded.kv_proj.weight, torch.cat([weight.dequantize() for weight in codes.values()]))


Q_ROWS = 4 * 32  # of 4 heads


def fused(weights: dict[str, Tensor], *left_out: str) -> dict[str, Tensor]:
    """A checkpoint with one qkv_proj for each layer instead of q, k and v, as Laguna's are published."""
    weights = dict(weights)
    for attention in (f"layers.{layer}.self_attn" for layer in range(L)):
        apart = {part: weights.pop(f"{attention}.{part}_proj.weight") for part in "qkv"}
        apart["q"] = torch.randn(Q_ROWS, H).bfloat16()
        weights[f"{attention}.qkv_proj.weight"] = torch.cat(list(apart.values()))
        if f"{attention}.k_proj.bias" in weights:
            biases = [weights.pop(f"{attention}.{part}_proj.bias") for part in "kv"]
            weights[f"{attention}.qkv_proj.bias"] = torch.cat([torch.randn(Q_ROWS).bfloat16(), *biases])
        weights[f"{attention}.o_proj.weight"] = torch.randn(H, Q_ROWS).bfloat16()
    return {name: value for name, value in weights.items() if not name.endswith(left_out)}


@pytest.mark.parametrize("left_out", [(), ("o_proj.weight",)], ids=["o_proj", "alone"])
@pytest.mark.parametrize("variant", ["laguna", "dflash"])
def test_one_weight_of_q_k_and_v_is_loaded(variant: str, left_out: tuple[str, ...]) -> None:
    """`weights has no layer with a K projection`, load_checkpoint said of Laguna's drafters."""
    (expected,) = rank_stages(variant, 1)
    loaded = ek.ContextKV(expected.config, dtype=torch.bfloat16)
    loaded.load_checkpoint(fused(checkpoint(variant, [expected]), *left_out))
    assert all(map(same_bits, loaded.state_dict().values(), expected.state_dict().values()))


@pytest.mark.parametrize(
    ("copies", "left_out"), [(1, ()), (1, ("o_proj.weight",)), (2, ())], ids=["o_proj", "alone", "copies"]
)
def test_each_rank_loads_its_own_heads_of_one_weight(copies: int, left_out: tuple[str, ...]) -> None:
    variant = "laguna" if copies == 1 else "one-head"
    stages = rank_stages(variant, 2 // copies)
    weights = fused(checkpoint(variant, stages), *left_out)
    for rank in range(2):
        loaded = ek.ContextKV(stages[0].config, dtype=torch.bfloat16)
        loaded.load_checkpoint(weights, tp_rank=rank, tp_size=2)
        expected = stages[rank // copies].state_dict()
        assert all(map(same_bits, loaded.state_dict().values(), expected.values()))


@pytest.mark.parametrize("format", ["fp8_row", "fp8_block128", "nvfp4"])
def test_codes_of_one_weight_are_cut_as_numbers(format: str) -> None:
    """The second block of 128 rows has the last rows of Q and those of K."""
    config = ek.ContextKVConfig(K, HT, 64, L, 2, 32)
    stage = ek.ContextKV(config, dtype=torch.bfloat16)
    weights = {"fc.weight": stage.fc.weight, "hidden_norm.weight": torch.ones(64)}
    expected = []
    for layer in (f"layers.{layer}" for layer in range(L)):
        codes = ek.quantize(torch.randn(192 + 2 * 64, 64).bfloat16() * torch.rand(320, 1), format)
        weights[f"{layer}.self_attn.k_norm.weight"] = torch.ones(32)
        names = ("weight", "weight_scale", "weight_scale_2")
        stored = {name: tensor for name, tensor in zip(names, codes.tensors, strict=True) if tensor is not None}
        weights |= {f"{layer}.self_attn.qkv_proj.{name}": tensor for name, tensor in stored.items()}
        expected.append(codes.dequantize()[192:])
    stage.load_checkpoint(weights)
    assert torch.equal(stage.kv_proj.weight, torch.cat(expected).bfloat16())


FUSED = {
    "too-narrow": (
        lambda w: w.update({"layers.0.self_attn.o_proj.weight": torch.ones(H, 256)}),
        "layers.0.self_attn.qkv_proj.weight has 256 rows, expected 256 of Q, and as many of K as of V, because "
        "layers.0.self_attn.o_proj.weight has as many columns",
    ),
    "odd": (
        lambda w: w.update({"layers.0.self_attn.o_proj.weight": torch.ones(H, 127)}),
        "layers.0.self_attn.qkv_proj.weight has 256 rows, expected 127 of Q, and as many of K as of V, because",
    ),
    "heads": (
        lambda w: w.update({"layers.0.self_attn.o_proj.weight": torch.ones(H, 64)}),
        "layers.0.self_attn.qkv_proj.weight[64:160] has 96 rows, expected 2 heads of 32 rows for each of 1 ranks",
    ),
    "no-rows-of-q": (
        lambda w: (
            w.pop("layers.0.self_attn.o_proj.weight"),
            w.update({"layers.0.self_attn.qkv_proj.weight": torch.ones(128, H)}),
        ),
        "layers.0.self_attn.qkv_proj.weight has 128 rows, expected a multiple of K's 64 for Q, and 64 each for K and V",
    ),
    "k-twice": (
        lambda w: w.update({"layers.1.self_attn.k_proj.weight": torch.ones(64, H)}),
        "weights has layers.1.self_attn.qkv_proj.weight and layers.1.self_attn.k_proj.weight, expected one of them, "
        "because both have heads of K or V",
    ),
    "a-scale-for-each-of-three": (
        lambda w: w.update(
            {
                "layers.0.self_attn.qkv_proj.weight": torch.ones(256, H).to(torch.float8_e4m3fn),
                "layers.0.self_attn.qkv_proj.weight_scale": torch.ones(3),
            }
        ),
        "layers.0.self_attn.qkv_proj.weight_scale is torch.float32 of shape (3,), expected (1, 1) of fp8_tensor or ",
    ),
}


@pytest.mark.parametrize("case", FUSED)
def test_rows_that_cannot_be_cut_are_named_and_nothing_copied(case: str) -> None:
    change, message = FUSED[case]
    stage = make_stage("dflash")
    weights = fused(checkpoint("dflash", [stage]))
    change(weights)
    message = re.escape(f"ContextKV.load_checkpoint: {message}")
    with UnchangedTensors(list(stage.state_dict().values())), pytest.raises(ValueError, match=f"^{message}"):
        stage.load_checkpoint(weights)


def test_one_weight_of_k_alone_is_refused() -> None:
    stage = make_stage("gemma4")
    weights = checkpoint("gemma4", [stage])
    weights["layers.0.self_attn.qkv_proj.weight"] = weights.pop("layers.0.self_attn.k_proj.weight")
    message = "weights has layers.0.self_attn.qkv_proj.weight, expected K alone, because values is 'k'"
    with pytest.raises(ValueError, match=f"^ContextKV.load_checkpoint: {re.escape(message)}$"):
        stage.load_checkpoint(weights)


def test_which_rows_are_k_s_is_not_guessed() -> None:
    """Both ranks may have the same head of K, or each its own."""
    stage = make_stage("one-head")
    weights = fused(checkpoint("one-head", [stage]), "o_proj.weight")
    message = "weights has layers.0.self_attn.qkv_proj.weight and no o_proj in numbers, expected both, because the "
    with pytest.raises(ValueError, match=f"^ContextKV.load_checkpoint: {re.escape(message)}"):
        stage.load_checkpoint(weights, tp_rank=0, tp_size=2)


def without(name: str) -> object:
    return lambda weights: weights.pop(name)


CHECKPOINTS = {
    "no-fc": (without("fc.weight"), "weights has no fc, expected one of ['fc', 'context_proj', 'main_proj'"),
    "no-norm": (without("hidden_norm.weight"), "weights has no hidden_norm.weight, expected every projection"),
    "no-k-norm": (without("layers.1.self_attn.k_norm.weight"), "weights has no self_attn.k_norm.weight, expected"),
    "no-v": (without("layers.0.self_attn.v_proj.weight"), "weights has no self_attn.v_proj.weight, expected k and v"),
    "layers": (
        lambda weights: weights.update({"layers.2.self_attn.k_proj.weight": torch.ones(64, H)}),
        "weights has layers [0, 1, 2] at layers., expected 0 to 1, because num_layers is 2",
    ),
    "two-drafters": (
        lambda weights: weights.update({"draft.layers.0.self_attn.k_proj.weight": torch.ones(64, H)}),
        "weights has layers at ['draft.layers.', 'layers.'], expected one drafter's",
    ),
    "heads": (
        lambda weights: weights.update({"layers.0.self_attn.v_proj.weight": torch.ones(96, H)}),
        "layers.0.self_attn.v_proj.weight has 96 rows, expected 2 heads of 32 rows for each of 1 ranks",
    ),
    "number": (
        lambda weights: weights.update({"layers.0.self_attn.v_proj.weight": torch.ones(())}),
        "layers.0.self_attn.v_proj.weight has shape (), expected (n*d, H)",
    ),
    "bias": (
        lambda weights: weights.update({"layers.0.self_attn.k_proj.bias": torch.ones(64)}),
        "weights has layers.0.self_attn.k_proj.bias, expected none, because bias is False",
    ),
    "fc-twice": (
        lambda weights: weights.update({"model.fc.weight": weights["fc.weight"]}),
        "weights has fc.weight and model.fc.weight, expected one of them, because both are fc.weight",
    ),
    "norm-twice": (
        lambda weights: weights.update({"model.hidden_norm.weight": torch.ones(H)}),
        "weights has hidden_norm.weight and model.hidden_norm.weight, expected one of them, because both are",
    ),
    "two-names-of-fc": (
        lambda weights: weights.update({"main_proj.weight": weights["fc.weight"]}),
        "weights has fc.weight and main_proj.weight, expected one of them, because both are fc",
    ),
    "two-names-of-norm": (
        lambda weights: weights.update({"main_norm.weight": torch.ones(H)}),
        "weights has hidden_norm.weight and main_norm.weight, expected one of them, because both are hidden_norm",
    ),
    "width": (
        lambda weights: weights.update({"fc.weight": torch.ones(H, HT)}),
        f"fc.weight has shape ({H}, {HT}), expected ({H}, {K * HT}), because it is (H, K*Ht) with K = 3 and Ht = 56",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_a_checkpoint_that_does_not_fit_is_named_and_nothing_copied(case: str) -> None:
    change, message = CHECKPOINTS[case]
    stage = make_stage("dflash")
    weights = checkpoint("dflash", [stage])
    change(weights)
    message = re.escape(f"ContextKV.load_checkpoint: {message}")
    with UnchangedTensors(list(stage.state_dict().values())), pytest.raises(ValueError, match=f"^{message}"):
        stage.load_checkpoint(weights)


def test_a_rank_that_does_not_exist_is_refused() -> None:
    message = "ContextKV.load_checkpoint: tp_rank is 2, expected one in [0, 2)"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make_stage("dflash").load_checkpoint({}, tp_rank=2, tp_size=2)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("variant", ["dflash", "laguna", "kimi-k3"])
def test_the_stage_compiles_into_one_graph(variant: str, dynamic: bool | None) -> None:
    """The caches' addresses were asked for while tracing, where there are none: a graph break, an error of
    torch.export, and for fake and meta tensors an overlap, since all of them are at address 0. With symbolic sizes
    `in` was False of the right width."""
    stage = make_stage(variant)
    inputs = Inputs(stage.config)
    caches, expected = inputs.caches(), inputs.caches()

    def run(caches: list) -> None:
        stage(inputs.chunks, caches=caches, **inputs.place)

    torch._dynamo.reset()
    torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=dynamic)(caches)
    run(expected)
    for cache, other in zip(caches, expected, strict=True):
        assert all(same_bits(a, b) for a, b in zip(cache, other, strict=True) if a is not None)
    place = {name: value.to("meta") for name, value in inputs.place.items()}
    on_meta = [tuple(None if one is None else one.to("meta") for one in pair) for pair in caches]
    stage.to("meta")([chunk.to("meta") for chunk in inputs.chunks], caches=on_meta, **place)


def test_an_out_over_another_layers_weight_is_not_written() -> None:
    """The columns of each layer were only compared with the weight rows of that layer."""
    stage = make_stage("laguna")
    W = stage.config.kv_width
    out = stage.kv_proj.weight.data.view(-1)[W * H :][: 2 * L * W].view(2, L * W)
    states = torch.randn(2, L * W).bfloat16()
    for written, states_in, name in ((out, torch.randn(2, H).bfloat16(), "weight"), (states, states[:, :H], "chunks")):
        with UnchangedTensors([written]), pytest.raises(ValueError, match=f"out overlaps {name}"):
            stage.project(states_in, out=written)
