"""Quantized drafters in engine layers without scales: each layout is dequantized, everything else passes unchanged."""

import logging
import re
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import test_int4_checkpoint as int4
from eagle_kernels.engines import eligibility, scales
from eagle_kernels.models import families
from engines.quantized_layers import IN_GROUPS, config_of, in_integers, streamed, written
from test_quantized_checkpoint import LAYOUTS, LEAVES_OUT

LOGGER = logging.getLogger("eagle_kernels.engines.scales")
D, W = 136, 192


class Unquantized: ...


class Fp8(Unquantized): ...


class EngineLinear(nn.Module):
    """A linear layer with the attributes that it has in vLLM and SGLang."""

    def __init__(self, method: type, outputs: int = D, inputs: int = W, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.input_size, self.output_size, self.quant_method = inputs, outputs, method()
        self.weight = nn.Parameter(torch.zeros(outputs, inputs, dtype=dtype), requires_grad=False)


class Drafter(nn.Module):
    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        self.model = nn.Module()
        for name, module in modules.items():
            self.model.add_module(name, module)


def linear() -> nn.Linear:
    return nn.Linear(W, D, bias=False, dtype=torch.bfloat16)


def quantized(layout: str, path: str) -> tuple[dict[str, Tensor], Tensor]:
    """(the tensors of a random layer in a checkpoint, its dequantized weight in bf16)."""
    torch.manual_seed(0)
    tensors, weight = written(path, torch.randn(D, W) * torch.logspace(-2, 1, D).unsqueeze(1), layout)
    return tensors, weight.dequantize(torch.bfloat16)


def loaded(model: nn.Module, weights: dict[str, Tensor], skipped: str = "nothing") -> dict[str, Tensor]:
    """Loads like an engine that reads every tensor's device and copies those without `skipped` in their name."""
    got = {}
    for name, tensor in scales.scaled(model, weights.items(), {Unquantized}, "an engine", LOGGER):
        assert tensor.device.type == "cpu"
        got[name] = tensor
        if skipped not in name:
            tensor.clone()
    return got


@pytest.fixture
def log(caplog: Callable) -> Callable[[], list[str]]:
    eligibility.clear_logged()
    caplog.set_level(logging.INFO)
    return lambda: [record.getMessage() for record in caplog.records if record.name == LOGGER.name]


@pytest.mark.parametrize("layer", [linear, lambda: EngineLinear(Unquantized)], ids=["torch", "engine"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_becomes_numbers(layout: str, layer: Callable, log: Callable) -> None:
    tensors, expected = quantized(layout, "fc")
    weights = loaded(Drafter(fc=layer()), tensors)
    assert list(weights) == ["fc.weight"] and torch.equal(weights["fc.weight"], expected)
    line = f"fc of Drafter of an engine is {LAYOUTS[layout][0]} in the checkpoint; the engine's layer has no scales"
    assert f"eagle_kernels: {line}: dequantized to torch.bfloat16" in log()


@pytest.mark.parametrize("layout", ["hf-block", "modelopt-nvfp4"])
def test_the_bias_beside_codes_is_not_lost(layout: str) -> None:
    tensors, expected = quantized(layout, "fc")
    bias = torch.randn(D).bfloat16()
    weights = loaded(Drafter(fc=nn.Linear(W, D, dtype=torch.bfloat16)), {"fc.bias": bias} | tensors)
    assert weights.keys() == {"fc.weight", "fc.bias"}
    assert torch.equal(weights["fc.weight"], expected) and torch.equal(weights["fc.bias"], bias)


STAGES = {name: family.mtp for name, family in families().items() if family.mtp is not None}


@pytest.mark.parametrize("path", ["{}", "model.layers.61.{}", "mtp.0.{}"])
@pytest.mark.parametrize("family", STAGES)
def test_a_projection_by_its_last_name(family: str, path: str) -> None:
    names = STAGES[family].projections
    assert names and not [name for name in names if "norm" in name]
    for name in names:
        tensors, expected = quantized("hf-block", path.format(name))
        weights = loaded(Drafter(**{name: linear()}), tensors)
        assert torch.equal(weights[f"{path.format(name)}.weight"], expected)


def test_layers_that_the_engine_merges() -> None:
    """Where the engine passes no quantization config on, none of a drafter's layers has scales (sglang#39087)."""
    layers = nn.ModuleList([nn.Module()])
    layers[0].qkv_proj, layers[0].o_proj = EngineLinear(Unquantized, 3 * D), EngineLinear(Unquantized)
    weights, expected = {}, {}
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        tensors, expected[f"layers.0.{name}.weight"] = quantized("compressed-row", f"layers.0.{name}")
        weights |= tensors
    got = loaded(Drafter(layers=layers), weights)
    assert got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in got)


@pytest.mark.parametrize(
    ("model", "path"),
    [
        pytest.param(lambda: Drafter(fc=EngineLinear(Fp8)), "fc", id="codes-of-the-engine"),
        pytest.param(lambda: Drafter(fc=linear(), other=Drafter(fc=EngineLinear(Fp8))), "x.fc", id="first-of-two"),
        pytest.param(lambda: Drafter(fc=EngineLinear(Fp8), other=Drafter(fc=linear())), "x.fc", id="second-of-two"),
        pytest.param(lambda: Drafter(lm_head=EngineLinear(Fp8), head=linear()), "lm_head", id="of-that-name"),
        pytest.param(lambda: two_attentions(), "layers.0.attn.wo", id="of-that-path"),
        pytest.param(lambda: Drafter(q_proj=linear()), "model.layers.3.q_proj", id="of-the-target"),
        pytest.param(
            lambda: at("model.layers.0.mixer.qkv_proj", EngineLinear(Unquantized)),
            "backbone.layers.0.mixer.q_proj",
            id="of-nemotron-h-s-target",
        ),
        pytest.param(lambda: Drafter(eh_proj=linear()), "fc", id="no-such-layer"),
    ],
)
def test_what_the_engine_reads_passes(model: Callable, path: str, log: Callable) -> None:
    tensors, _ = quantized("hf-block", path)
    got = loaded(model(), tensors)
    assert list(got) == list(tensors) and all(got[name] is tensor for name, tensor in tensors.items())
    assert not log()


def test_numbers_pass_in_their_order(log: Callable) -> None:
    weights = {name: torch.randn(2) for name in ("fc.weight", "norm.weight", "fc.input_scale", "lm_head.weight")}
    got = loaded(Drafter(fc=linear()), weights)
    assert list(got) == ["fc.weight", "norm.weight", "lm_head.weight", "fc.input_scale"]
    assert all(got[name] is tensor for name, tensor in weights.items()) and not log()


INTEGERS = {name: build for name, (_, build) in int4.LAYOUTS.items()}


def saying(model: nn.Module, quantization: object) -> nn.Module:
    """The drafter with a Hugging Face config: an object, whose fields may be objects too."""
    model.model.config = SimpleNamespace(quantization_config=quantization)
    return model


@pytest.mark.parametrize("case", [case for case, (config, beside) in LEAVES_OUT.items() if config and not beside])
@pytest.mark.parametrize("path", ["fc", "model.fc"])
def test_codes_of_a_layer_that_the_config_leaves_out(path: str, case: str) -> None:
    """An engine builds it without a quantization method, and its codes are of another format than the config's."""
    tensors, expected = quantized("hf-block", path)
    got = loaded(saying(Drafter(fc=linear()), LEAVES_OUT[case][0]), tensors)
    assert list(got) == [f"{path}.weight"] and torch.equal(got[f"{path}.weight"], expected)


def test_codes_of_a_layer_that_the_config_does_not_leave_out() -> None:
    tensors, _ = quantized("hf-block", "fc")
    message = "load_weights: fc.weight is fp8_block128, expected nvfp4, because the checkpoint says quant_algo NVFP4"
    with pytest.raises(ValueError, match=f"^{message}$"):
        loaded(saying(Drafter(fc=linear()), {"quant_algo": "NVFP4", "ignore": ["lm_head", "mtp*"]}), tensors)


def test_int8_with_one_scale_becomes_numbers() -> None:
    codes, scale = torch.randint(-127, 128, (D, W)).to(torch.int8), torch.tensor(0.0123)
    got = loaded(Drafter(fc=linear()), {"fc.weight": codes, "fc.weight_scale": scale})["fc.weight"]
    assert torch.equal(got, (codes.double() * scale.double()).float().bfloat16())


@pytest.mark.parametrize("layer", ["torch", "engine"])
@pytest.mark.parametrize("layout", INTEGERS)
def test_integers_in_groups_become_numbers(layout: str, layer: str) -> None:
    """What GPTQ's stored zeros mean depends on checkpoint_format, which the drafter's config states."""
    tensors, config, expected = INTEGERS[layout]()
    rows, columns = expected.shape
    fc = nn.Linear(columns, rows, bias=False, dtype=torch.float16)
    if layer == "engine":
        fc = EngineLinear(Unquantized, rows, columns, torch.float16)
    got = loaded(saying(Drafter(fc=fc), config), {f"fc.{name}": tensor for name, tensor in tensors.items()})
    assert list(got) == ["fc.weight"] and torch.equal(got["fc.weight"], expected.float().bfloat16().half())


DFLASH = {
    "fc": "fc",
    **{f"layers.0.self_attn.{name}_proj": "layers.0.self_attn.qkv_proj" for name in "qkv"},
    "layers.0.self_attn.o_proj": "layers.0.self_attn.o_proj",
    **{f"layers.0.mlp.{name}_proj": "layers.0.mlp.gate_up_proj" for name in ("gate", "up")},
    "layers.0.mlp.down_proj": "layers.0.mlp.down_proj",
}


@pytest.mark.parametrize("layout", ["compressed-row", "modelopt-nvfp4", *IN_GROUPS])
def test_a_drafter_of_which_every_layer_is_quantized(layout: str, log: Callable) -> None:
    """DFlash2-W4A16 in SGLang, whose DFlash model does not pass its quantization config on (sglang#39087)."""
    drafter = Drafter()
    for path in set(DFLASH.values()):
        rows = D * sum(other == path for other in DFLASH.values())
        parent, _, name = path.rpartition(".")
        home = drafter.model
        for part in parent.split(".") if parent else ():
            if not hasattr(home, part):
                home.add_module(part, nn.Module())
            home = getattr(home, part)
        home.add_module(name, EngineLinear(Unquantized, rows))
    torch.manual_seed(0)
    weights, expected = {}, {}
    for path in DFLASH:
        numbers = torch.randn(D, W)
        if layout in IN_GROUPS:
            tensors, meant = in_integers(path, numbers, layout)
        else:
            tensors, codes = written(path, numbers, layout)
            meant = codes.dequantize(torch.bfloat16)
        weights |= tensors
        expected[f"{path}.weight"] = meant.float().bfloat16()
    config = config_of(layout) if layout in IN_GROUPS else None
    got = loaded(saying(drafter, config), weights)
    assert got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in got)
    kind = "integers in groups" if config else LAYOUTS[layout][0]
    assert f"fc of Drafter of an engine is {kind} in the checkpoint; the engine's layer has no scales" in "".join(log())


@pytest.mark.parametrize("path", ["model.layers.61.eh_proj", "mtp.0.eh_proj"])
@pytest.mark.parametrize("layout", INTEGERS)
def test_integers_of_an_mtp_layer(layout: str, path: str) -> None:
    tensors, config, expected = INTEGERS[layout]()
    eh_proj = nn.Linear(expected.shape[1], expected.shape[0], bias=False, dtype=torch.bfloat16)
    weights = {f"{path}.{name}": tensor for name, tensor in tensors.items()}
    got = loaded(saying(Drafter(eh_proj=eh_proj), config), weights)
    assert list(got) == [f"{path}.weight"] and torch.equal(got[f"{path}.weight"], expected.float().bfloat16())


@pytest.mark.parametrize("layout", ["hf-block", "deepseek-block", "modelopt-nvfp4", "compressed-nvfp4"])
def test_codes_and_scales_of_several_files_come_in_any_order(layout: str) -> None:
    """The scales of one file's codes may be in another file, before or after them, with other layers in between."""
    weights, expected = {}, {}
    for path in ("fc", "mtp.0.fc", "model.fc"):
        tensors, expected[f"{path}.weight"] = quantized(layout, path)
        weights |= tensors
    scales_first = sorted(weights.items(), key=lambda item: "scale" not in item[0])
    for order in (scales_first, scales_first[::-1]):
        got = loaded(Drafter(fc=linear()), {**dict(order[:2]), "norm.weight": torch.ones(W), **dict(order[2:])})
        assert got.keys() == {"norm.weight", *expected}
        assert all(torch.equal(got[name], weight) for name, weight in expected.items())


@pytest.mark.parametrize("layout", ["hf-block", "compressed-nvfp4"])
def test_codes_outlive_the_memory_that_they_were_read_into(layout: str) -> None:
    """In SGLang, Run:ai's streamer reads all tensors into one buffer, and fastsafetensors frees a file's memory after
    its last tensor."""
    tensors, expected = quantized(layout, "fc")
    weights = streamed(tensors)
    ((_, weight),) = scales.scaled(Drafter(fc=linear()), weights, {Unquantized}, "an engine", LOGGER, reused=True)
    assert torch.equal(weight, expected)


def test_a_scale_of_another_load_is_an_error_of_the_codes() -> None:
    """An engine that gets weights in buckets (RL) calls load_weights for each: no scale may be lost silently."""
    tensors, _ = quantized("hf-block", "fc")
    scale = {"fc.weight_scale_inv": tensors.pop("fc.weight_scale_inv")}
    drafter = Drafter(fc=linear())
    with pytest.raises(ValueError, match=r"^load_weights: weights has fc\.weight in .*, expected its scale beside it"):
        loaded(drafter, tensors)
    assert loaded(drafter, scale)["fc.weight_scale_inv"] is scale["fc.weight_scale_inv"]


def test_mistral_calls_fc_eagle_linear() -> None:
    """The engines rename it after the plugin has run, so its codes matched no layer there."""
    tensors, expected = quantized("mistral", "eagle_linear")
    got = loaded(Drafter(fc=EngineLinear(Unquantized)), tensors)
    assert list(got) == ["eagle_linear.weight"] and torch.equal(got["eagle_linear.weight"], expected)


def test_integers_of_layers_that_the_engine_merges() -> None:
    """GPTQ stores codes transposed: the weight's rows are their columns."""
    tensors, config, expected = INTEGERS["gptq"]()
    rows, columns = expected.shape
    layers = nn.ModuleList([nn.Module()])
    layers[0].qkv_proj = EngineLinear(Unquantized, 3 * rows, columns)
    weights = {f"layers.0.{proj}.{name}": tensors[name] for proj in ("q_proj", "k_proj") for name in tensors}
    told = SimpleNamespace(to_dict=lambda: config)
    got = loaded(saying(Drafter(layers=layers), told), weights)
    assert [*got] == ["layers.0.q_proj.weight", "layers.0.k_proj.weight"]
    assert all(torch.equal(weight, expected.float().bfloat16()) for weight in got.values())


@pytest.mark.parametrize(
    ("layout", "change", "quantization", "message"),
    [
        pytest.param(
            "hf-block",
            {"weight_scale_inv": None},
            None,
            "weights has fc.weight in torch.float8_e4m3fn, expected its scale beside it: ",
            id="no-scale",
        ),
        pytest.param(
            "hf-block",
            {"weight_scale_inv": torch.ones(3, 3)},
            None,
            "fc.weight_scale_inv is torch.float32 of shape (3, 3), expected ",
            id="wrong-blocks",
        ),
        pytest.param(
            "hf-block",
            {"weight_scale_inv": torch.full((2, 2), torch.nan)},
            None,
            "fc.weight_scale_inv is NaN at [0, 0], expected numbers",
            id="nan",
        ),
        pytest.param(
            "hf-block", {"qzeros": torch.ones(1)}, None, "weights has fc.qzeros beside fc.weight, expected ", id="zeros"
        ),
        pytest.param(
            "modelopt-nvfp4",
            {"pre_quant_scale": torch.ones(W)},
            None,
            "weights has fc.pre_quant_scale beside fc.weight, expected ",
            id="companion",
        ),
        *(
            pytest.param(
                "modelopt-nvfp4",
                {inside: torch.ones(W)},
                None,
                f"weights has fc.{inside} beside fc.weight, expected ",
                id=inside,
            )
            for inside in ("input_quantizer._pre_quant_scale", "v_input.weight", "lora_A.weight")
        ),
        pytest.param(
            "compressed-row",
            {},
            {
                "quant_method": "compressed-tensors",
                "transform_config": {"config_groups": {"v": {"apply": [{"targets": ["Linear"], "location": "input"}]}}},
            },
            "fc.weight is of a layer with a transform, expected one without, because the checkpoint says transform_",
            id="transform",
        ),
        pytest.param(
            "modelopt-nvfp4",
            {"weight_scale_2": None},
            None,
            "weights has fc.weight in nvfp4, expected one of weight_scale_2 and weight_global_scale beside it",
            id="no-global-scale",
        ),
        pytest.param(
            "hf-block",
            {},
            {"quant_method": "fp8", "weight_block_size": [32, 32]},
            "fc.weight is fp8_block128, expected fp8_block32, because the checkpoint says weight_block_size [32, 32]",
            id="config",
        ),
    ],
)
def test_codes_that_cannot_be_read_are_an_error(
    layout: str, change: dict, quantization: dict | None, message: str
) -> None:
    """They reached the engine as dense values, with only a warning, and no draft was accepted."""
    tensors, _ = quantized(layout, "fc")
    tensors |= {f"fc.{name}": tensor for name, tensor in change.items()}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    with pytest.raises(ValueError, match=f"^{re.escape(f'load_weights: {message}')}"):
        loaded(saying(Drafter(fc=linear()), quantization), tensors)


def test_a_calibrated_range_inside_a_layer_is_left_alone() -> None:
    tensors, expected = quantized("modelopt-nvfp4", "fc")
    amax = {"fc.input_quantizer._amax": torch.ones(())}
    got = loaded(Drafter(fc=linear()), amax | tensors)
    assert torch.equal(got["fc.weight"], expected) and got["fc.input_quantizer._amax"] is amax.popitem()[1]


# Formats that engines read and this package does not -> quant_method, and a layer's tensors.
UNREAD: dict[str, tuple[str, dict[str, Tensor]]] = {
    "bitsandbytes-nf4": ("bitsandbytes", {"weight": torch.zeros(D * W // 2, 1).byte()}),
    "bitsandbytes-int8": ("bitsandbytes", {"weight": torch.zeros(D, W).char(), "SCB": torch.ones(D)}),
    "torchao": ("torchao", {"_weight_qdata": torch.zeros(D, W).char(), "_weight_scale": torch.ones(D, 1)}),
    "exl2": ("exl2", {"q_weight": torch.zeros(W // 8, D).int(), "q_scale": torch.zeros(4, D // 8).int()}),
    "exl3": (
        "exl3",
        {"trellis": torch.zeros(W // 16, D // 16, 64).short(), "suh": torch.ones(W), "svh": torch.ones(D)},
    ),
    "hqq": ("hqq", {"W_q": torch.zeros(D * W // 2, 1).byte(), "scale": torch.ones(1, D)}),
    "aqlm": ("aqlm", {"codes": torch.zeros(D, W // 8, 2).short(), "codebooks": torch.ones(2, 256, 1, 8)}),
    "blockwise_int8": ("blockwise_int8", {"weight": torch.zeros(D, W).char(), "weight_scale_inv": torch.ones(2, 2)}),
}


@pytest.mark.parametrize("format", UNREAD)
def test_formats_that_only_engines_read_are_refused_where_the_layer_takes_numbers(format: str) -> None:
    """They used to pass: an engine skips names that a layer does not have, and never loads its weight."""
    method, tensors = UNREAD[format]
    layers = nn.ModuleList([nn.Module()])
    layers[0].qkv_proj = EngineLinear(Unquantized, 3 * D)
    for model, path in ((Drafter(fc=linear()), "fc"), (Drafter(layers=layers), "layers.0.q_proj")):
        weights = {f"{path}.{name}": tensor for name, tensor in tensors.items()}
        message = f"load_weights: {path}.{next(iter(tensors))} is in {method}, expected numbers or codes in one of "
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            loaded(saying(model, {"quant_method": method}), weights)
        assert list(loaded(model, weights, skipped=path)) == [f"{path}.weight"]


@pytest.mark.parametrize("format", UNREAD)
def test_formats_that_only_engines_read_are_left_to_their_layers(format: str, log: Callable) -> None:
    method, tensors = UNREAD[format]
    weights = {f"fc.{name}": tensor for name, tensor in tensors.items()} | {"norm.weight": torch.ones(W)}
    got = loaded(saying(Drafter(fc=EngineLinear(Fp8)), {"quant_method": method}), weights)
    assert list(got) == list(weights) and all(got[name] is tensor for name, tensor in weights.items())
    dense = {"fc.weight": torch.randn(D, W)}
    assert loaded(saying(Drafter(fc=linear()), {"quant_method": method}), dense)["fc.weight"] is dense["fc.weight"]
    assert not log()


@pytest.mark.parametrize("names", [("weight", "weight_scale"), ("qweight", "scales")], ids=["fp8", "gptq"])
def test_codes_without_a_dimension_are_an_error(names: tuple[str, str]) -> None:
    """In a merged layer, whose rows are counted in the checkpoint, they raised an IndexError."""
    layers = nn.ModuleList([nn.Module()])
    layers[0].qkv_proj = EngineLinear(Unquantized, 3 * D)
    codes, scale = names
    tensors = {codes: torch.zeros((), dtype=torch.float8_e4m3fn if codes == "weight" else torch.int32)}
    tensors[scale] = torch.ones(())
    weights = {f"layers.0.q_proj.{name}": tensor for name, tensor in tensors.items()}
    message = f"load_weights: layers.0.q_proj.{codes} has shape (), expected a matrix, because it is the engine's layer"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        loaded(Drafter(layers=layers), weights)


def test_gptq_without_a_config_is_an_error() -> None:
    tensors, _, expected = INTEGERS["gptq"]()
    fc = nn.Linear(expected.shape[1], expected.shape[0], bias=False)
    message = "load_weights: fc.qweight is gptq, expected a config.json beside it whose quantization_config is GPTQ's"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        loaded(Drafter(fc=fc), {f"fc.{name}": tensor for name, tensor in tensors.items()})


def test_a_model_that_cannot_be_read_is_refused_before_the_engine_reads_a_weight() -> None:
    # Here the plugins can still leave the weights to the engine; inside the generator the failure would be its own.
    model = Drafter(fc=linear())
    model.named_modules = lambda **_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        scales.scaled(model, iter(()), set(), "an engine", LOGGER)


def at(path: str, module: nn.Module) -> nn.Module:
    root = nn.Module()
    home, (*parents, name) = root, path.split(".")
    for part in parents:
        home.add_module(part, nn.Module())
        home = getattr(home, part)
    home.add_module(name, module)
    return root


def two_attentions() -> nn.Module:
    drafter = at("layers.0.attn.wo", EngineLinear(Fp8))
    drafter.get_submodule("layers.0").add_module("self_attn", Drafter(o_proj=linear()))
    return drafter


@pytest.mark.parametrize(
    ("there", "path"),
    [
        pytest.param("model.layers.0.self_attn.qkv_proj", "midlayer.self_attn.q_proj", id="vllm-eagle3-qkv"),
        pytest.param("model.layers.0.mlp.down_proj", "midlayer.mlp.down_proj", id="vllm-eagle3-mlp"),
        pytest.param("model.layers.61.mtp_block.mlp.down_proj", "model.layers.61.mlp.down_proj", id="vllm-mtp"),
        pytest.param("layers.0.self_attn.fused_qkv_a_proj", "layers.0.self_attn.q_a_proj", id="vllm-mla"),
        pytest.param("model.main_proj", "mtp.0.main_proj", id="vllm-dspark"),
        pytest.param("fc", "model.fc", id="sglang-dflash"),
        pytest.param("fc", "encoder.fc", id="sglang-dflash-encoder"),
        pytest.param("layers.0.self_attn.qkv_proj", "model.layers.0.self_attn.q_proj", id="sglang-dflash-qkv"),
        pytest.param("model.layers.0.self_attn.qkv_proj", "mtp.layers.0.self_attn.k_proj", id="vllm-qwen3-next"),
        pytest.param("model.layers.0.qkv_proj", "mtp.layers.0.self_attn.k_proj", id="sglang-qwen3-next"),
        pytest.param("model.layers.0.mlp.down_proj", "mtp.layers.0.mlp.down_proj", id="qwen3-next-mlp"),
        pytest.param("model.layers.62.mtp_block.mlp.down_proj", "model.mtp_layers.0.mlp.down_proj", id="vllm-mimo"),
        pytest.param("model.mtp_block.mlp.down_proj", "model.mtp_layers.0.mlp.down_proj", id="sglang-mimo"),
        pytest.param("model.layers.28.mtp_block.mlp.down_proj", "model.mtp_block.0.mlp.down_proj", id="vllm-ernie"),
        pytest.param("model.layers.9.mtp_block.self_attn.o_proj", "model.mtp.layers.0.self_attn.o_proj", id="longcat"),
        pytest.param(
            "model.decoder.mlp.gate_up_proj", "model.mtp.layers.0.transformer_layer.mlp.up_proj", id="sglang-longcat"
        ),
        pytest.param("model.layers.45.shared_head.head", "model.layers.45.shared_head.output", id="step3p5"),
        pytest.param("model.decoder.self_attn.o_proj", "model.layers.61.self_attn.o_proj", id="sglang-deepseek"),
        pytest.param(
            "model.decoder.self_attn.fused_qkv_a_proj_with_mqa",
            "model.layers.61.self_attn.kv_a_proj_with_mqa",
            id="sglang-deepseek-mla",
        ),
        pytest.param("model.layers.61.self_attn.o_proj", "model.layers.61.attention.dense", id="vllm-bailing"),
        pytest.param(
            "model.layers.61.self_attn.fused_qkv_a_proj", "model.layers.61.attention.q_a_proj", id="vllm-bailing-mla"
        ),
        pytest.param("model.decoder.attention.o_proj", "model.layers.61.attention.dense", id="sglang-bailing"),
        pytest.param("model.decoder.attention.dense", "model.layers.61.attention.dense", id="sglang-bailing-v1"),
        pytest.param("model.decoder.self_attn.o_proj", "model.layers.61.attention.dense", id="sglang-bailing-v3"),
        pytest.param(
            "model.decoder.attention.query_key_value", "model.layers.61.attention.query_key_value", id="bailing-qkv"
        ),
        pytest.param(
            "model.layers.61.mtp_block.mlp.down_proj", "model.language_model.layers.61.mlp.down_proj", id="vllm-glm-ocr"
        ),
        pytest.param("model.decoder.mlp.down_proj", "model.language_model.layers.61.mlp.down_proj", id="sglang-glm"),
        pytest.param("model.layers.0.mixer.o_proj", "language_model.mtp.layers.0.mixer.o_proj", id="nemotron-h"),
        pytest.param(
            "model.layers.61.mtp_block.mlp.down_proj", "model.layers.61.transformer.mlp.down_proj", id="vllm-step"
        ),
        pytest.param("model.mtp_block.mlp.gate_up_proj", "model.layers.61.transformer.mlp.up_proj", id="sglang-step"),
        pytest.param("model.mtp_block.self_attn.o_proj", "model.layers.61.self_attn.o_proj", id="sglang-step-plain"),
        pytest.param("model.shared_head.head", "model.layers.61.shared_head.output", id="sglang-step-head"),
        pytest.param("model.midlayer.mlp.gate_up_proj", "layers.0.mlp.up_proj", id="sglang-kimi"),
        pytest.param(
            "model.midlayer.self_attn.fused_qkv_a_proj_with_mqa", "layers.0.self_attn.q_a_proj", id="sglang-kimi-mla"
        ),
        pytest.param("model.layers.0.self_attn.qkv_proj", "layers.0.attention.wk", id="mistral-qkv"),
        pytest.param("model.layers.0.self_attn.o_proj", "layers.0.attention.wo", id="mistral-o"),
        pytest.param("model.layers.0.mlp.gate_up_proj", "layers.0.feed_forward.w3", id="mistral-up"),
        pytest.param("model.layers.0.mlp.down_proj", "layers.0.feed_forward.w2", id="mistral-down"),
        pytest.param("lm_head", "output", id="mistral-head"),
        pytest.param(
            "layers.0.mlp.down_proj", "model.dspark.layers.0.block_sparse_moe.down_proj", id="sglang-minimax-dspark"
        ),
        pytest.param(
            "layers.0.self_attn.qkv_proj", "language_model.model.dspark.layers.0.self_attn.v_proj", id="minimax-vision"
        ),
        pytest.param("model.mtp_layer.mlp.down_proj", "mtp.mlp.down_proj", id="sglang-iquest"),
        pytest.param(
            "model.layers.0.transformer_layer.self_attn.o_proj",
            "language_model.model.mtp.layers.0.transformer_layer.self_attn.o_proj",
            id="vllm-minimax-m3",
        ),
        pytest.param("model.decoder.self_attn.attn_gate", "model.layers.61.self_attn.gate_proj", id="sglang-gigachat"),
        pytest.param(
            "model.decoder.mlp.gate_up_lowrank", "model.layers.61.mlp.gate_up_projection", id="sglang-gigachat-lowrank"
        ),
        pytest.param(
            "model.layers.61.mtp_block.mlp.down_proj", "model.mtp_layers.0.mlp.down_proj", id="vllm-hunyuan-v4"
        ),
        pytest.param("model.embed_tokens", "model.word_embeddings", id="vllm-bailing-embedding"),
        pytest.param("model.layers.61.mtp_block.attn.fused_wqa_wkv", "mtp.0.attn.wq_a", id="vllm-v4-wq"),
        pytest.param("model.layers.61.mtp_block.attn.fused_wqa_wkv", "mtp.0.attn.wkv", id="vllm-v4-wkv"),
        pytest.param("model.layers.61.mtp_block.attn.wq_b", "mtp.0.attn.wq_b", id="vllm-v4-wq-b"),
        pytest.param("model.layers.61.mtp_block.attn.wo_a", "mtp.0.attn.wo_a", id="vllm-v4-wo-a"),
        pytest.param(
            "model.layers.61.mtp_block.ffn.shared_experts.gate_up_proj", "mtp.0.ffn.shared_experts.w3", id="vllm-v4-up"
        ),
        pytest.param(
            "model.layers.61.mtp_block.ffn.shared_experts.down_proj", "mtp.0.ffn.shared_experts.w2", id="vllm-v4-down"
        ),
        pytest.param("model.layers.61.shared_head.head", "mtp.0.head", id="vllm-v4-head"),
        pytest.param("model.embed_tokens", "mtp.0.emb.tok_emb", id="vllm-v4-embedding"),
        pytest.param("model.layers.2.attn.wo_b", "mtp.2.attn.wo_b", id="vllm-v4-dspark"),
        pytest.param(
            "model.layers.1.ffn.shared_experts.gate_up_proj", "mtp.1.ffn.shared_experts.w1", id="v4-dspark-up"
        ),
        pytest.param("model.markov_head.markov_w1", "mtp.2.markov_head.markov_w1", id="vllm-v4-dspark-markov"),
        pytest.param("model.markov_head.markov_w1", "mtp.2.markov_head.embed", id="vllm-v4.1-dspark-markov-embedding"),
        pytest.param("model.markov_head.markov_w2", "mtp.2.markov_head.head", id="vllm-v4.1-dspark-markov-head"),
        *(
            pytest.param(f"model.xpress_head.mlp_{part}", f"xpress_head.mlp.{part}_proj", id=f"vllm-xpress-{part}")
            for part in ("gate", "up", "down")
        ),
        pytest.param("model.decoder.self_attn.wqkv_a", "mtp.0.attn.wq_a", id="sglang-v4-wq"),
        pytest.param("model.decoder.self_attn.wkv", "mtp.0.attn.wkv", id="sglang-v4-wkv"),
        pytest.param("model.decoder.self_attn.wo_b", "mtp.0.attn.wo_b", id="sglang-v4-wo-b"),
        pytest.param(
            "model.decoder.mlp.shared_experts.gate_up_proj", "mtp.0.ffn.shared_experts.w1", id="sglang-v4-gate"
        ),
        pytest.param("model.decoder.mlp.shared_experts.down_proj", "mtp.0.ffn.shared_experts.w2", id="sglang-v4-down"),
        pytest.param("stages.2.self_attn.wkv", "mtp.2.attn.wkv", id="sglang-v4-dspark"),
        pytest.param(
            "stages.0.mlp.shared_experts.gate_up_proj", "mtp.0.ffn.shared_experts.w1", id="sglang-v4-dspark-up"
        ),
        pytest.param("stages.0.main_proj", "mtp.0.main_proj", id="sglang-v4-dspark-main"),
        pytest.param("model.layers.61.shared_head.head", "lm_head", id="vllm-glm-and-bailing-head"),
        pytest.param("lm_head", "mtp.shared_head.head", id="vllm-qwen4-head"),
        pytest.param("lm_head", "model.language_model.shared_head.head", id="vllm-qwen4-vision-head"),
        pytest.param("model.embed_tokens", "backbone.embeddings", id="nemotron-h-embedding"),
        pytest.param("model.embed_tokens", "language_model.backbone.embeddings", id="nemotron-h-vision-embedding"),
        pytest.param("model.embed_tokens", "model.layers.61.embed_tokens", id="vllm-deepseek-embedding"),
        pytest.param("model.embed_tokens", "model.mtp.embed_tokens", id="vllm-longcat-embedding"),
        pytest.param(
            "model.layers.0.self_attn.fused_qkv_a_proj", "layers.0.attention.wkv_a_with_mqa", id="mistral-large-3-kv"
        ),
        pytest.param(
            "model.layers.0.self_attn.fused_qkv_a_proj_with_mqa", "layers.0.attention.wq_a", id="mistral-large-3-q"
        ),
        pytest.param("model.layers.0.self_attn.q_b_proj", "layers.0.attention.wq_b", id="mistral-large-3-q-b"),
        pytest.param("model.layers.0.self_attn.kv_b_proj", "layers.0.attention.wkv_b", id="mistral-large-3-kv-b"),
        pytest.param(
            "model.layers.0.mlp.shared_experts.gate_up_proj", "layers.0.shared_experts.w3", id="mistral-large-3-experts"
        ),
        pytest.param(
            "model.layers.61.mtp_block.self_attn.fused_qkv_a_g_proj",
            "language_model.model.layers.61.self_attn.g_proj",
            id="vllm-kimi-k3",
        ),
        pytest.param("model.layers.0.self_attn.qkv_proj", "layers.0.self_attn.o_gate_proj", id="vllm-muse-spark"),
        pytest.param("model.layers.61.mtp_block.self_attn.qkvg_proj", "layers.61.self_attn.g_proj", id="vllm-step-5"),
        pytest.param(
            "model.layers.61.mtp_block.self_attn.qkv_indexer_proj",
            "model.layers.61.self_attn.sparse_indexer_z",
            id="vllm-step-5-indexer",
        ),
        pytest.param(
            "model.layers.0.transformer_layer.self_attn.qkv_proj",
            "model.mtp.layers.0.transformer_layer.self_attn.index_q_proj",
            id="vllm-minimax-m3-index",
        ),
        pytest.param(
            "model.layers.61.mtp_block.mlp.gate_up_proj", "model.layers.61.mlp.gate_and_up_proj", id="vllm-hunyuan-v3"
        ),
        pytest.param(
            "model.layers.0.transformer_block.attn.qkvr",
            "model.mtp.layers.0.transformer_block.attn.wr_du",
            id="vllm-inkling",
        ),
        pytest.param(
            "model.transformer_block.attn.qkvr", "model.mtp.layers.0.transformer_block.attn.wq_du", id="sglang-inkling"
        ),
        pytest.param(
            "model.transformer_block.mlp.gate_up_proj",
            "model.mtp.layers.0.transformer_block.mlp.w13_dn",
            id="sglang-inkling-up",
        ),
        pytest.param(
            "model.layers.0.transformer_block.mlp.down_proj",
            "model.mtp.layers.0.transformer_block.mlp.w2_md",
            id="vllm-inkling-down",
        ),
        pytest.param("model.embed_tokens", "model.llm.embed", id="sglang-inkling-embedding"),
        pytest.param("lm_head", "model.llm.unembed", id="sglang-inkling-head"),
        pytest.param("centroids", "masked_embedding.centroids", id="sglang-gemma4"),
    ],
)
def test_layers_that_the_engine_renames(there: str, path: str) -> None:
    """Their codes reached the engine as dense values, without an error."""

    def drafter(method: type) -> nn.Module:
        root = at(there, EngineLinear(method))
        root.config = SimpleNamespace(num_hidden_layers=61)
        return root

    tensors, expected = quantized("compressed-row", path)
    got = loaded(drafter(Unquantized), tensors)
    assert list(got) == [f"{path}.weight"] and torch.equal(got[f"{path}.weight"], expected)
    del tensors[f"{path}.weight_scale"]
    with pytest.raises(ValueError, match=f"^load_weights: weights has {re.escape(path)}.weight in "):
        loaded(drafter(Unquantized), tensors)
    assert all(tensor is tensors[name] for name, tensor in loaded(drafter(Fp8), tensors).items())


NEXTN, DSPARK = "DeepseekV4ForCausalLMNextN", "DeepseekV4ForCausalLMDSpark"
KV_A, FUSED = "self_attn.kv_a_proj_with_mqa", "self_attn.fused_qkv_a_proj"


def named(architecture: str, there: str) -> nn.Module:
    """An engine's drafter with this class name and one unquantized layer."""
    root = at(there, EngineLinear(Unquantized))
    root.__class__ = type(architecture, (nn.Module,), {})
    root.config = SimpleNamespace(num_hidden_layers=61)
    return root


@pytest.mark.parametrize(
    ("architecture", "there", "path", "layout"),
    [
        pytest.param(NEXTN, "model.decoder.self_attn.wo_a", "mtp.0.attn.wo_a", "deepseek-block", id="sglang-v4"),
        pytest.param(DSPARK, "stages.1.self_attn.wo_a", "mtp.1.attn.wo_a", "deepseek-v4.1", id="sglang-v4-dspark"),
        pytest.param(
            "Glm5NextMTP",
            f"model.layers.61.mtp_block.{FUSED}",
            f"model.language_model.layers.61.{KV_A}",
            "hf-block",
            id="vllm-glm-5-next",
        ),
        pytest.param(
            "DeepSeekMTP",
            "model.layers.61.mtp_block.self_attn.indexer.wk_weights_proj",
            "model.layers.61.self_attn.indexer.wk",
            "hf-block",
            id="vllm-indexer",
        ),
    ],
)
def test_a_scale_that_the_engine_reads_itself_is_left_to_it(
    architecture: str, there: str, path: str, layout: str, log: Callable
) -> None:
    """vLLM pads kv_a_proj_with_mqa of a GLM-5-next without RoPE only if it is in codes, so dense values did not load;
    wo_a is in FP8 in checkpoints of other quant_methods too, which the hook would refuse."""
    tensors, _ = quantized(layout, path)
    drafter = named(architecture, there)
    drafter.config.quantization_config = {"quant_method": "w4afp8"}
    got = loaded(drafter, tensors)
    assert list(got) == list(tensors) and all(got[name] is tensor for name, tensor in tensors.items()) and not log()


@pytest.mark.parametrize(
    ("architecture", "there", "path", "layout"),
    [
        pytest.param(NEXTN, "model.decoder.self_attn.wo_a", "mtp.0.attn.wo_a", "hf-block", id="another-scale"),
        pytest.param(NEXTN, "model.decoder.self_attn.wo_b", "mtp.0.attn.wo_b", "deepseek-block", id="another-layer"),
        *(
            pytest.param("Glm5NextMTP", f"model.layers.61.mtp_block.{FUSED}", f"model.layers.61.{KV_A}", layout)
            for layout in ("compressed-int8", "compressed-row", "modelopt-mxfp8", "modelopt-nvfp4")
        ),
        pytest.param("DeepSeekMTP", f"model.layers.61.mtp_block.{FUSED}", f"model.layers.61.{KV_A}", "hf-block"),
    ],
)
def test_one_that_it_does_not_read_is_not(architecture: str, there: str, path: str, layout: str) -> None:
    tensors, expected = quantized(layout, path)
    got = loaded(named(architecture, there), tensors)
    assert list(got) == [f"{path}.weight"] and torch.equal(got[f"{path}.weight"], expected)


@pytest.mark.parametrize("layout", ["compressed-int8", "compressed-row", "modelopt-mxfp8", "modelopt-nvfp4"])
@pytest.mark.parametrize(
    ("architecture", "ranks", "rows"),
    [
        pytest.param("Glm5NextMTP", (D, 8), D + 8, id="without-rope"),
        pytest.param("Glm5NextMTP", (D - 8, 8), D, id="with-rope"),
        pytest.param("Glm5NextMTP", (D, None), D, id="without-the-field"),
        pytest.param("DeepSeekMTP", (D, 8), D, id="another-drafter"),
    ],
)
def test_rows_that_the_engine_adds_to_codes_alone_are_added(
    architecture: str, ranks: tuple, rows: int, layout: str
) -> None:
    """vLLM gives a GLM-5-next without RoPE the missing rows of kv_a_proj_with_mqa where it reads FP8 blocks; what the
    hook made of other codes did not load."""
    tensors, expected = quantized(layout, path := f"model.layers.61.{KV_A}")
    drafter = named(architecture, f"model.layers.61.mtp_block.{FUSED}")
    drafter.config.kv_lora_rank, drafter.config.qk_rope_head_dim = ranks
    (weight,) = loaded(drafter, tensors).values()
    assert weight.shape == (rows, W) and torch.equal(weight[:D], expected) and not weight[D:].any()
    tensors, expected = quantized(layout, path.replace("kv_a_proj_with_mqa", "q_a_proj"))
    (weight,) = loaded(drafter, tensors).values()
    assert torch.equal(weight, expected)


@pytest.mark.parametrize("there", ["model.layers.{}.attn.wo_b", "stages.{}.self_attn.wo_b"], ids=["vllm", "sglang"])
def test_each_of_several_stages_takes_what_its_own_layer_does(there: str) -> None:
    """DeepSeek-V4's DSpark with one stage that the config leaves unquantized."""
    root = nn.Module()
    for stage, method in enumerate((Fp8, Unquantized, Fp8)):
        home, (*parents, name) = root, there.format(stage).split(".")
        for part in parents:
            if not hasattr(home, part):
                home.add_module(part, nn.Module())
            home = getattr(home, part)
        home.add_module(name, EngineLinear(method))
    for stage in range(3):
        tensors, expected = quantized("deepseek-block", f"mtp.{stage}.attn.wo_b")
        got = loaded(root, tensors)
        if stage == 1:
            assert torch.equal(got["mtp.1.attn.wo_b.weight"], expected)
        else:
            assert all(got[name] is tensor for name, tensor in tensors.items())


@pytest.mark.parametrize("there", ["model.decoder", "model.mtp_block", "model.layers.61.mtp_block"])
@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
@pytest.mark.parametrize(
    ("layers", "path"),
    [
        (61, "layers.3.self_attn.o_proj"),
        (61, "layers.0.self_attn.o_proj"),
        (61, "layers.62.attention.dense"),
        (61, "layers.6.attention.dense"),
        (61, "layers.3.transformer.self_attn.o_proj"),
        (1, "layers.60.self_attn.o_proj"),
    ],
)
def test_layers_of_the_target_are_not_those_of_a_nextn_model(layers: int, path: str, prefix: str, there: str) -> None:
    """Nor are they kept until all weights are read: SGLang loads DeepSeek's NextN model from its target's 61 layers."""
    tensors, _ = quantized("hf-block", prefix + path)
    root = at(f"{there}.self_attn.o_proj", EngineLinear(Unquantized))
    root.config = SimpleNamespace(num_hidden_layers=layers)
    got = loaded(root, tensors)
    assert list(got) == list(tensors) and all(got[name] is tensor for name, tensor in tensors.items())


@pytest.mark.parametrize("index", [0, 2])
def test_each_of_several_mtp_models_has_the_layer_of_its_index(index: int) -> None:
    """SGLang's Step-3.5 loads each draft step as a model of its own."""
    root = at("model.mtp_block.self_attn.o_proj", EngineLinear(Unquantized))
    root.config, root.draft_model_idx = SimpleNamespace(num_hidden_layers=45), index
    for layer in range(44, 48):
        tensors, expected = quantized("hf-block", f"model.layers.{layer}.self_attn.o_proj")
        got = loaded(root, tensors)
        if layer == 45 + index:
            assert torch.equal(got[f"model.layers.{layer}.self_attn.o_proj.weight"], expected)
        else:
            assert all(got[name] is tensor for name, tensor in tensors.items())


@pytest.mark.parametrize("head", [0, 1])
def test_each_of_several_heads_has_the_layer_of_its_number(head: int) -> None:
    """SGLang's dots3-note has all heads in one model."""
    root = at(f"model.heads.{head}.decoder.self_attn.o_proj", EngineLinear(Unquantized))
    root.config = SimpleNamespace(num_hidden_layers=45, num_nextn_predict_layers=2)
    for layer in range(44, 48):
        tensors, expected = quantized("hf-block", f"model.layers.{layer}.self_attn.o_proj")
        got = loaded(root, tensors)
        if layer == 45 + head:
            assert torch.equal(got[f"model.layers.{layer}.self_attn.o_proj.weight"], expected)
        else:
            assert all(got[name] is tensor for name, tensor in tensors.items())


def test_experts_are_the_engine_s() -> None:
    """It has the experts of a layer as one module; a target has some 50000 expert tensors to look up."""
    tensors, _ = quantized("hf-block", "model.layers.61.mlp.experts.17.w2")
    root = at("model.decoder.mlp.shared_experts.down_proj", EngineLinear(Unquantized))
    root.config = SimpleNamespace(num_hidden_layers=61)
    got = loaded(root, tensors)
    assert all(got[name] is tensor for name, tensor in tensors.items())
    fused, tensors = {"gate_up_proj_blocks": torch.uint8, "gate_up_proj": torch.float8_e4m3fn}, {}
    for name, dtype in fused.items():
        tensors[f"model.layers.61.mlp.experts.{name}"] = torch.ones(2, 4, 8).to(dtype)
    got = loaded(root, tensors)
    assert all(got[name] is tensor for name, tensor in tensors.items())


def test_the_layer_of_a_nextn_checkpoint_of_its_own() -> None:
    tensors, expected = quantized("hf-block", "model.layers.0.self_attn.o_proj")
    root = at("model.decoder.self_attn.o_proj", EngineLinear(Unquantized))
    root.config = SimpleNamespace(num_hidden_layers=1)
    assert torch.equal(loaded(root, tensors)["model.layers.0.self_attn.o_proj.weight"], expected)


class UnquantizedEmbeddingMethod: ...


class Norm(nn.Module):
    def __init__(self, method: type | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(D, W, dtype=torch.bfloat16), requires_grad=False)
        if method is not None:
            self.quant_method = method()


class Embedding(Norm):
    """SGLang's VocabParallelEmbedding and ParallelLMHead."""

    embedding_dim = W


class PaddedEmbedding(Embedding):
    """vLLM's, which has the sizes of a linear layer with the padded vocabulary."""

    input_size, output_size = W, D + 56


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", [UnquantizedEmbeddingMethod, None])
@pytest.mark.parametrize("embedding", [Embedding, PaddedEmbedding])
def test_codes_of_an_embedding_become_numbers(embedding: type, method: type | None, layout: str) -> None:
    """vLLM builds lm_head of MiMo, Ernie, Qwen3-Next and EXAONE without a quantization config, loads it from the
    target's checkpoint, then replaces it with the target's: an error here broke drafters that had worked."""
    for name in ("lm_head", "model.embed_tokens"):
        tensors, expected = quantized(layout, name)
        got = loaded(at(name, embedding(method)), tensors)
        assert list(got) == [f"{name}.weight"] and torch.equal(got[f"{name}.weight"], expected)


@pytest.mark.parametrize("name", ["lm_head", "model.embed_tokens"])
def test_a_layer_that_has_two_names_is_found_by_both(name: str) -> None:
    """In vLLM, lm_head of a Qwen4-Exp with tied embeddings is its embed_tokens, and is loaded by both names."""
    root = at("model.embed_tokens", Embedding())
    root.lm_head = root.model.embed_tokens
    tensors, expected = quantized("hf-block", name)
    assert torch.equal(loaded(root, tensors)[f"{name}.weight"], expected)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8])
@pytest.mark.parametrize("module", [Embedding, PaddedEmbedding, Norm])
def test_codes_that_cannot_be_read_are_an_error_of_the_engine_that_loads_them(module: type, dtype: torch.dtype) -> None:
    """SGLang's NextN models and vLLM's LongCat skip lm_head and embed_tokens by name, which must not raise."""
    codes = {"lm_head.weight": torch.ones(D, W).to(dtype), "lm_head.weight_shift": torch.ones(D)}
    assert list(loaded(Drafter(lm_head=module(None)), codes, skipped="lm_head")) == ["lm_head.weight"]
    with pytest.raises(ValueError, match=r"^load_weights: .*lm_head\.weight"):
        loaded(Drafter(lm_head=module(None)), codes)


def test_packed_codes_of_a_norm_are_an_error() -> None:
    message = "load_weights: norm.qweight is torch.int32, expected numbers, because the engine's layer has no "
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        loaded(Drafter(norm=Norm()), {"norm.qweight": torch.ones(D, W).int()})


@pytest.mark.parametrize("use", [lambda x: torch.cat([x, x]), lambda x: x.shape, lambda x: x.to("cpu"), repr])
def test_no_engine_gets_what_cannot_be_read(use: Callable) -> None:
    codes = {"fc.weight": torch.ones(D, W).to(torch.float8_e4m3fn)}
    (weight,) = loaded(Drafter(fc=linear()), codes, skipped="fc").values()
    with pytest.raises(ValueError, match=r"^load_weights: weights has fc\.weight in torch\.float8_e4m3fn, expected "):
        use(weight)


@pytest.mark.parametrize("embedding", [Embedding, PaddedEmbedding])
def test_integers_that_are_no_codes_pass(embedding: type) -> None:
    weights = {"d2t": torch.arange(3), "t2d": torch.ones(3).bool(), "lm_head.weight": torch.ones(D, W).long()}
    got = loaded(Drafter(lm_head=embedding(None)), weights)
    assert got.keys() == weights.keys() and all(got[name] is tensor for name, tensor in weights.items())
    codes = {"lm_head.weight": torch.ones(D, W).to(torch.float8_e4m3fn)}
    assert loaded(Drafter(lm_head=Embedding(Fp8)), codes)["lm_head.weight"] is codes["lm_head.weight"]
