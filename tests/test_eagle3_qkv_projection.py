"""Eagle3QKVProjection: layer 0 of every kind of EAGLE-3 drafter against float64, rank by rank; checkpoints, errors."""

import logging
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import eagle_kernels as ek
from accuracy import relative_rms, rms_limit
from guards import UnchangedTensors, same_bits

H, V, T, EPS = 64, 50, 9, 3e-3
LLAMA = {"hidden_size": H, "num_attention_heads": 8, "num_key_value_heads": 2, "rms_norm_eps": EPS}
QWEN3 = LLAMA | {"head_dim": 16}
GPT_OSS = QWEN3 | {"attention_bias": True}
LATENT = {"hidden_size": H, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "rms_norm_eps": EPS}
SPECULATORS = {"speculators_model_type": "eagle3", "transformer_layer_config": QWEN3}
DRAFTERS = {
    "llama": (LLAMA, {"q_proj": 64, "k_proj": 16, "v_proj": 16}, False),
    "qwen3": (QWEN3, {"q_proj": 128, "k_proj": 32, "v_proj": 32}, False),
    "gpt-oss": (GPT_OSS, {"q_proj": 128, "k_proj": 32, "v_proj": 32}, False),
    "normed-residual": (LLAMA | {"norm_before_residual": True}, {"q_proj": 64, "k_proj": 16, "v_proj": 16}, True),
    "latent": (LATENT, {"q_a_proj": 24, "kv_a_proj_with_mqa": 24}, False),
    "speculators": (SPECULATORS, {"q_proj": 128, "k_proj": 32, "v_proj": 32}, True),
}


def checkpoint(name: str, prefix: str = "midlayer.", dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    config, sizes, _ = DRAFTERS[name]
    gains = {f"{prefix}{norm}.weight": torch.rand(H) + 0.5 for norm in ("input_layernorm", "hidden_norm")}
    weights = {f"{prefix}self_attn.{part}.weight": torch.randn(rows, 2 * H) / H**0.5 for part, rows in sizes.items()}
    if config.get("attention_bias"):
        weights |= {f"{prefix}self_attn.{part}.bias": torch.randn(rows) for part, rows in sizes.items()}
    rest = {"fc.weight": torch.ones(H, 3 * H), f"{prefix}post_attention_layernorm.weight": torch.ones(H)}
    return {key: tensor.to(dtype) for key, tensor in (gains | weights | rest).items()}


def plain(weights: dict, name: str, embeds: Tensor, hidden: Tensor, prefix: str = "midlayer.") -> tuple[list, Tensor]:
    """The projections and the residual, as the layers of the engines compute them, in the dtype of the inputs."""

    def norm(x: Tensor, which: str) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(wide), (H,), weights[f"{prefix}{which}.weight"].to(wide), EPS).to(x.dtype)

    normed = norm(hidden, "hidden_norm")
    concat = torch.cat([norm(embeds, "input_layernorm"), normed], -1)
    parts = []
    for part in DRAFTERS[name][1]:
        stem = f"{prefix}self_attn.{part}"
        bias = weights.get(f"{stem}.bias")
        weight = weights[f"{stem}.weight"].to(concat.dtype)
        parts.append(F.linear(concat, weight, None if bias is None else bias.to(concat.dtype)))
    return parts, normed if DRAFTERS[name][2] else hidden


def inputs(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    return (torch.randn(T, H) * 0.1).to(dtype), torch.randint(V, (T,)), (torch.randn(V, H) * 0.1).to(dtype)


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_every_rank_has_its_heads(name: str, dtype: torch.dtype, tp_size: int) -> None:
    """There are two key-value heads: of four ranks two have the same one."""
    torch.manual_seed(0)
    weights, (hidden, ids, table) = checkpoint(name, dtype=dtype), inputs(dtype)
    config = ek.Eagle3QKVConfig.from_hf(DRAFTERS[name][0])
    doubles = {key: tensor.double() for key, tensor in weights.items()}
    truths, true_residual = plain(doubles, name, table[ids].double(), hidden.double())
    eagers, _ = plain(weights, name, table[ids], hidden)
    for rank in range(tp_size):
        layer = ek.Eagle3QKVProjection(config, tp_rank=rank, tp_size=tp_size, dtype=dtype).load_checkpoint(weights)
        with UnchangedTensors([hidden, ids, table]):
            qkv, residual = layer(hidden, ids, table=table)
        if name == "latent":
            rows = [slice(None)] * 2
        else:
            heads, size = 8 // tp_size, truths[0].shape[1] // 8
            group = max(2 // tp_size, 1)
            key = rank * 2 // tp_size * size
            rows = [slice(rank * heads * size, (rank + 1) * heads * size)] + [slice(key, key + group * size)] * 2
        truth, eager = (
            torch.cat([part[:, mine] for part, mine in zip(parts, rows, strict=True)], 1) for parts in (truths, eagers)
        )
        limit, _ = rms_limit(dtype, 2 * H, truth, eager)
        assert relative_rms(qkv, truth) <= limit
        if layer.norm_before_residual:
            assert relative_rms(residual, true_residual) <= rms_limit(dtype, H, true_residual, true_residual)[0] + 4e-3
        else:
            assert residual is hidden
        assert same_bits(layer(hidden, embeds=table[ids])[0], qkv)
        out = torch.empty_like(qkv)
        assert layer(hidden, ids, table=table, out=out)[0] is out and same_bits(out, qkv)


def test_without_a_number_of_key_value_heads_every_head_has_its_own() -> None:
    config = ek.Eagle3QKVConfig.from_hf({"hidden_size": H, "num_attention_heads": 8})
    assert ek.Eagle3QKVConfig(H, latent=[24, 16]) == ek.Eagle3QKVConfig(H, latent=(24, 16))
    of_rank = (H // 2, H)
    assert config.rows(1, 2) == {"q_proj": of_rank, "k_proj": of_rank, "v_proj": of_rank}


@pytest.mark.parametrize("prefix", ["midlayer.", "layers.0.", "model.layers.0.", "model.midlayer."])
def test_the_layer_is_found_behind_any_prefix(prefix: str) -> None:
    weights = checkpoint("llama", prefix)
    weights["layers.1.hidden_norm.weight"] = torch.ones(H)
    layer = ek.Eagle3QKVProjection(ek.Eagle3QKVConfig.from_hf(LLAMA), dtype=torch.bfloat16).load_checkpoint(weights)
    qkv = torch.cat([weights[f"{prefix}self_attn.{part}_proj.weight"] for part in "qkv"])
    assert same_bits(layer.qkv_proj.weight, qkv)
    assert sorted(layer.state_dict()) == ["hidden_norm.weight", "input_layernorm.weight", "qkv_proj.weight"]


def test_a_sharded_table_and_quantized_codes() -> None:
    hidden, ids, table = inputs()
    layer = ek.Eagle3QKVProjection(ek.Eagle3QKVConfig.from_hf(QWEN3), dtype=torch.bfloat16)
    layer.load_checkpoint(checkpoint("qwen3"))
    module = ek.VocabParallelEmbedding(V, H, dtype=torch.bfloat16)
    module.load_state_dict({"weight": table})
    dense, _ = layer(hidden, ids, table=table)
    assert same_bits(layer(hidden, ids, table=module)[0], dense)
    rounded, _ = layer.quantize("fp8_row")(hidden, ids, table=table)
    assert relative_rms(rounded, dense.double()) < 0.05


CHECKPOINTS = {
    "no layer": (lambda w: w.pop("midlayer.hidden_norm.weight"), "weights has no layer with hidden_norm, expected one"),
    "two layers": (
        lambda w: w.update({"layers.0.hidden_norm.weight": torch.ones(H)}),
        "weights has hidden_norm at ['midlayer.', 'layers.0.'], expected one midlayer or layers.0",
    ),
    "no k": (lambda w: w.pop("midlayer.self_attn.k_proj.weight"), "weights has no midlayer.self_attn.k_proj.weight, "),
    "another width": (
        lambda w: w.update({"midlayer.self_attn.q_proj.weight": torch.ones(64, H)}),
        "midlayer.self_attn.q_proj.weight has shape (64, 64), expected (64, 128)",
    ),
    "more heads": (
        lambda w: w.update({"midlayer.self_attn.v_proj.weight": torch.ones(24, 2 * H)}),
        "midlayer.self_attn.v_proj.weight has shape (24, 128), expected (16, 128)",
    ),
    "a bias": (
        lambda w: w.update({"midlayer.self_attn.q_proj.bias": torch.ones(64)}),
        "weights has midlayer.self_attn.q_proj.bias, expected none, because bias is False",
    ),
    "codes": (
        lambda w: w.update({"midlayer.self_attn.q_proj.weight_scale": torch.ones(1)}),
        "midlayer.self_attn.q_proj.weight is torch.bfloat16, expected codes for midlayer.self_attn.",
    ),
    "no scale": (
        lambda w: w.update({"midlayer.self_attn.k_proj.weight": torch.ones(16, 2 * H).to(torch.float8_e4m3fn)}),
        "weights has midlayer.self_attn.k_proj.weight in torch.float8_e4m3fn, expected its scale beside it",
    ),
    "LoRA": (
        lambda w: w.update({"midlayer.self_attn.k_proj.lora_A.weight": torch.ones(4, 2 * H)}),
        "weights has midlayer.self_attn.k_proj.lora_A.weight beside midlayer.self_attn.k_proj.weight, expected only ",
    ),
    "AWQ": (
        lambda w: w.update({"midlayer.self_attn.k_proj.pre_quant_scale": torch.ones(2 * H)}),
        "weights has midlayer.self_attn.k_proj.pre_quant_scale beside midlayer.self_attn.k_proj.weight, expected only ",
    ),
}


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_a_checkpoint_that_does_not_fit_is_named_and_nothing_copied(case: str) -> None:
    change, message = CHECKPOINTS[case]
    layer, weights = (
        ek.Eagle3QKVProjection(ek.Eagle3QKVConfig.from_hf(LLAMA), dtype=torch.bfloat16),
        checkpoint("llama"),
    )
    change(weights)
    message = re.escape(f"Eagle3QKVProjection.load_checkpoint: {message}")
    with UnchangedTensors(list(layer.state_dict().values())), pytest.raises(ValueError, match=f"^{message}"):
        layer.load_checkpoint(weights)


@pytest.mark.parametrize(("tp_rank", "tp_size"), [(0, 1), (1, 2)])
def test_quantized_projections_become_numbers(tp_rank: int, tp_size: int, caplog: pytest.LogCaptureFixture) -> None:
    """A quantized q, k or v was refused; DFlash2-W4A16 and FP8 drafters have them."""
    caplog.set_level(logging.INFO)
    weights, dense = checkpoint("llama"), {}
    for part, format in (("q_proj", "fp8_row"), ("k_proj", "nvfp4")):  # v_proj stays dense
        name = f"midlayer.self_attn.{part}"
        codes = ek.quantize(weights[f"{name}.weight"], format)
        weights |= {f"{name}.weight": codes.codes, f"{name}.weight_scale": codes.scales}
        weights |= {} if codes.global_scale is None else {f"{name}.weight_scale_2": codes.global_scale}
        dense[f"{name}.weight"] = codes.dequantize()
    config = ek.Eagle3QKVConfig.from_hf(LLAMA)

    def loaded(weights: dict) -> dict:
        layer = ek.Eagle3QKVProjection(config, tp_rank=tp_rank, tp_size=tp_size, dtype=torch.bfloat16)
        return layer.load_checkpoint(weights).state_dict()

    got, expected = loaded(weights), loaded({k: v for k, v in weights.items() if "scale" not in k} | dense)
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    because = "q, k and v have scales of their own"
    line = f"midlayer.self_attn.q_proj.weight is fp8_row, dequantized to torch.bfloat16: {because}"
    assert line in caplog.text


@pytest.mark.parametrize("format", ["fp8_row", "nvfp4", "bf16_12bit"])
def test_a_quantized_layer_loads_a_checkpoint(format: str) -> None:
    """A quantized layer refused every checkpoint, as a state_dict of another format."""
    config, weights = ek.Eagle3QKVConfig.from_hf(GPT_OSS), checkpoint("gpt-oss")
    expected = ek.Eagle3QKVProjection(config, dtype=torch.bfloat16).load_checkpoint(weights)
    layer = ek.Eagle3QKVProjection(config, dtype=torch.bfloat16).quantize(format).load_checkpoint(weights)
    loaded = layer.state_dict()
    assert loaded.keys() == expected.state_dict().keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.state_dict().items())
    assert not any(parameter.requires_grad for parameter in layer.parameters())


ERRORS = {
    "size": (
        lambda: ek.Eagle3QKVConfig.from_hf({"hidden_size": H}),
        "Eagle3QKVConfig.from_hf: num_attention_heads is missing, expected the drafter's",
    ),
    "path": (
        lambda: ek.Eagle3QKVConfig.from_hf("config.json"),
        "Eagle3QKVConfig.from_hf: config is a str, expected a dict or a Hugging Face config object",
    ),
    "kv-heads": (
        lambda: ek.Eagle3QKVConfig(H, num_kv_heads=0),
        "Eagle3QKVConfig: num_kv_heads is 0, expected at least 1",
    ),
    "eps": (
        lambda: ek.Eagle3QKVConfig(H, eps=-1.0),
        "Eagle3QKVConfig: eps is -1.0, expected a finite fp32 number of at least 0",
    ),
    "flag": (
        lambda: ek.Eagle3QKVConfig.from_hf(LLAMA | {"norm_before_residual": "no"}),
        "Eagle3QKVConfig.from_hf: norm_before_residual is 'no', expected True or False",
    ),
    "heads": (
        lambda: ek.Eagle3QKVConfig(H, 8, 3),
        "Eagle3QKVConfig: num_heads is 8, expected a multiple of num_kv_heads = 3",
    ),
    "latent": (
        lambda: ek.Eagle3QKVConfig(H, latent=(24, 0)),
        "Eagle3QKVConfig: latent[1] is 0, expected at least 1",
    ),
    "rank": (
        lambda: ek.Eagle3QKVProjection(ek.Eagle3QKVConfig(H), tp_rank=2, tp_size=2),
        "Eagle3QKVProjection: tp_rank is 2, expected one in [0, 2)",
    ),
    "shards": (
        lambda: ek.Eagle3QKVProjection(ek.Eagle3QKVConfig(H, 8, 2), tp_size=3),
        "Eagle3QKVProjection: tp_size is 3, expected whole heads on each rank, because there are 8 heads and 2 "
        "key-value heads",
    ),
    "shards-of-keys": (
        lambda: ek.Eagle3QKVProjection(ek.Eagle3QKVConfig(H, 12, 3), tp_size=2),
        "Eagle3QKVProjection: tp_size is 2, expected whole heads on each rank, because there are 12 heads and 3 "
        "key-value heads",
    ),
    "embedding": (
        lambda: ek.Eagle3QKVProjection(ek.Eagle3QKVConfig(H))(torch.ones(2, H)),
        "Eagle3QKVProjection: given are neither, expected either ids and table, or embeds",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_say_what_is_expected(case: str) -> None:
    call, message = ERRORS[case]
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}$"):
        call()


def test_torch_compile_sees_one_functional_op_for_every_row_count() -> None:
    """As in an engine's compiled drafter: no mutation, one graph, and no recompilation for another T."""
    layer = ek.Eagle3QKVProjection(ek.Eagle3QKVConfig.from_hf(LLAMA), dtype=torch.bfloat16)
    layer.load_checkpoint(checkpoint("llama"))
    torch._dynamo.reset()
    graphs: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    table = inputs()[2]
    compiled = torch.compile(lambda h, ids: layer(h, ids, table=table), backend=backend, fullgraph=True, dynamic=True)
    for rows in (T, 3, 5):
        hidden, ids = torch.randn(rows, H).bfloat16(), torch.randint(V, (rows,))
        for ours, eager in zip(compiled(hidden, ids), layer(hidden, ids, table=table), strict=True):
            assert same_bits(ours, eager)
    assert len(graphs) == 1
    assert [name for name in graphs[0] if "eagle_kernels" in name] == ["eagle_kernels.norm_concat_linear"]
