"""Quantized projections out of checkpoints, in the layouts that quantizers write; what is broken is named."""

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import eagle_kernels as ek
from backends import needs_packing
from eagle_kernels import plan
from eagle_kernels.quantization_config import leaves_out
from eagle_kernels.quantized_weight import FORMATS, QuantizedWeight
from guards import UnchangedTensors, same_bits

save_file = pytest.importorskip("safetensors.torch").save_file

K, H, D = 3, 64, 136  # 136 rows: no block divides them
W = K * H


def eagle3(**config: object) -> ek.Eagle3Projection:
    config = {"chunk_norm": True, **config}
    return ek.Eagle3Projection(
        ek.Eagle3Config(num_chunks=K, target_hidden_size=H, hidden_size=D, **config), dtype=torch.bfloat16
    )


def weights_of(codes: dict[str, Tensor], stem: str = "model.fc") -> dict[str, Tensor]:
    norms = {f"model.fc_norm.{k}.weight": torch.rand(H).bfloat16() for k in range(K)}
    return norms | {f"{stem}.{name}": tensor.contiguous() for name, tensor in codes.items()}


def per_tensor(q: QuantizedWeight) -> dict[str, Tensor]:
    return {"weight": q.codes, "weight_scale": q.scales.reshape(()), "input_scale": torch.tensor(0.1)}


def hf_static(q: QuantizedWeight) -> dict[str, Tensor]:
    return {"weight": q.codes, "weight_scale_inv": q.scales.reshape(()), "activation_scale": torch.tensor(0.1)}


def mistral(q: QuantizedWeight) -> dict[str, Tensor]:
    return {"weight": q.codes, "qscale_weight": q.scales.reshape(1), "qscale_act": torch.tensor([0.5])}


def per_row(q: QuantizedWeight) -> dict[str, Tensor]:
    return {"weight": q.codes, "weight_scale": q.scales.reshape(-1)}


def compressed_whole(q: QuantizedWeight) -> dict[str, Tensor]:
    return {"weight": q.codes, "weight_scale": q.scales.reshape(1)}


def compressed(q: QuantizedWeight) -> dict[str, Tensor]:
    return {"weight": q.codes, "weight_scale": q.scales}


def scale_inv(q: QuantizedWeight) -> dict[str, Tensor]:
    return {"weight": q.codes, "weight_scale_inv": q.scales}


def divisors(q: QuantizedWeight) -> dict[str, Tensor]:
    shapes = {"fp8_tensor": (), "fp8_row": (-1,)}
    return {"weight": q.codes, "weight_scale_inv": 1 / q.scales.reshape(shapes.get(q.format, q.scales.shape))}


def deepseek(q: QuantizedWeight) -> dict[str, Tensor]:
    return {"weight": q.codes, "scale": powers_of_two(q.scales)}


def powers_of_two(scales: Tensor) -> Tensor:
    return (scales.log2().ceil() + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


def modelopt_blocks(q: QuantizedWeight) -> dict[str, Tensor]:
    return {"weight": q.codes, "weight_scale": q.scales[:, None, :, None]}


def modelopt_mx(q: QuantizedWeight) -> dict[str, Tensor]:
    return {"weight": q.codes, "weight_scale": q.scales.view(torch.uint8)}


def int8_pairs(q: QuantizedWeight) -> dict[str, Tensor]:
    return {"weight": q.codes.view(torch.int8), "scale": q.scales}


def modelopt_nvfp4(q: QuantizedWeight) -> dict[str, Tensor]:
    return {"weight": q.codes, "weight_scale": q.scales, "weight_scale_2": q.global_scale.reshape(())}


def compressed_nvfp4(q: QuantizedWeight) -> dict[str, Tensor]:
    divisors = {"weight_global_scale": 1 / q.global_scale.reshape(1), "input_global_scale": torch.tensor([300.0])}
    return {"weight_packed": q.codes, "weight_scale": q.scales} | divisors


GPTQMODEL = {"quant_method": "fp8", "format": "float8_e4m3fn", "weight_scale_semantics": "inverse"}
FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
# format, tensors, stem, quantization_config of config.json
LAYOUTS: dict[str, tuple[str, Callable, str, dict | None]] = {
    "hf-static": (
        "fp8_tensor",
        hf_static,
        "model.fc",
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
    ),
    "hf-fp8": ("fp8_tensor", per_tensor, "model.fc", {"quant_method": "fp8", "activation_scheme": "static"}),
    "modelopt-fp8": ("fp8_tensor", per_tensor, "fc", {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "mistral": ("fp8_tensor", mistral, "eagle_linear", None),
    "modelopt-row": ("fp8_row", per_row, "fc", {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}),
    "compressed-tensor": ("fp8_tensor", compressed_whole, "fc", {"quant_method": "compressed-tensors"}),
    "compressed-row": ("fp8_row", compressed, "fc", {"quant_method": "compressed-tensors"}),
    "hf-block": ("fp8_block128", scale_inv, "model.fc", FP8_BLOCKS),
    "deepseek-block": ("fp8_block128", deepseek, "fc", FP8_BLOCKS | {"scale_fmt": "ue8m0"}),
    "deepseek-v4.1": ("fp8_block32", deepseek, "fc", {"quant_method": "fp8", "weight_block_size": [32, 32]}),
    "modelopt-block": ("fp8_block128", modelopt_blocks, "fc", {"quant_algo": "FP8_PB_WO"}),
    "compressed-int8": ("int8_row", compressed, "fc", {"quant_method": "compressed-tensors"}),
    "modelopt-mxfp8": ("mxfp8", modelopt_mx, "fc", {"quant_algo": "MXFP8"}),
    "quark-mxfp4": ("mxfp4", modelopt_mx, "fc", {"quant_method": "quark"}),
    "deepseek-mxfp4": ("mxfp4", int8_pairs, "fc", None),
    "modelopt-nvfp4": ("nvfp4", modelopt_nvfp4, "fc", {"quant_algo": "NVFP4"}),
    "compressed-nvfp4": ("nvfp4", compressed_nvfp4, "fc", {"quant_method": "compressed-tensors"}),
}
# Without the config these scales would be factors.
DIVISORS: dict[str, tuple[str, Callable, str, dict | None]] = {
    "gptqmodel-tensor": ("fp8_tensor", divisors, "fc", GPTQMODEL | {"weight_scale_method": "tensor"}),
    "gptqmodel-row": ("fp8_row", divisors, "model.fc", GPTQMODEL | {"weight_scale_method": "row"}),
    "gptqmodel-block": ("fp8_block128", divisors, "fc", GPTQMODEL | {"weight_block_size": [128, 128]}),
}


def quantized_fc(layout: str) -> tuple[QuantizedWeight, dict[str, Tensor], dict | None]:
    """(what the file means, its tensors, its config)."""
    torch.manual_seed(1)
    format, tensors, stem, config = (LAYOUTS | DIVISORS)[layout]
    weight = ek.quantize(torch.randn(D, W) * torch.logspace(-2, 1, D).unsqueeze(1), format)
    weights = weights_of(tensors(weight), stem)
    if tensors is deepseek:
        weight = QuantizedWeight(weight.codes, powers_of_two(weight.scales), format)
    return weight, weights, config


@pytest.fixture(params=["compiled", "reference"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "reference":
        monkeypatch.setenv("EAGLE_KERNELS_BACKEND", "reference")
        plan.clear()
    yield request.param
    monkeypatch.undo()
    plan.clear()


@pytest.mark.parametrize("config_file", ["config.json", "hf_quant_config.json"])
@pytest.mark.parametrize("layout", LAYOUTS | DIVISORS)
def test_each_layout_loads_with_its_scale(
    layout: str, config_file: str, backend: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    weight, weights, config = quantized_fc(layout)
    save_file(weights, tmp_path / "model.safetensors")
    if config is not None:
        key = {"config.json": "quantization_config", "hf_quant_config.json": "quantization"}[config_file]
        (tmp_path / config_file).write_text(json.dumps({key: config}))
    layer = eagle3().load_checkpoint(tmp_path)
    truth = weight.dequantize(torch.float64)
    if backend == "compiled":
        assert layer.fc.format == weight.format
        loaded = layer.fc.quantized.dequantize(torch.float64)
        is_divisor = layout == "compressed-nvfp4" or layout in DIVISORS
        rtol = 2**-22 if is_divisor else 0  # the reciprocal of a reciprocal
        torch.testing.assert_close(loaded, truth, rtol=rtol, atol=0)
    else:
        assert "dequantized to torch.bfloat16: no kernel reads codes on cpu" in caplog.text
        torch.testing.assert_close(layer.fc.weight.double(), truth, rtol=2**-8, atol=0)
    x = torch.randn(4, W).bfloat16()
    gains = [weights[f"model.fc_norm.{k}.weight"].float() for k in range(K)]
    normed = torch.nn.functional.rms_norm(x.float().reshape(4, K, H), (H,), None, layer.config.eps)
    expected = (normed * torch.stack(gains)).reshape(4, W).double() @ truth.t()
    assert ((layer(x).double() - expected).norm(dim=1) / expected.norm(dim=1)).max() < 2**-7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scales_of_16_bits_are_widened(dtype: torch.dtype) -> None:
    """compressed-tensors keeps them in the dtype of the model."""
    weight, weights, _ = quantized_fc("compressed-row")
    weights["fc.weight_scale"] = weights["fc.weight_scale"].to(dtype)
    rounded = QuantizedWeight(weight.codes, weights["fc.weight_scale"].float(), "fp8_row")
    loaded = eagle3().load_checkpoint(weights).fc.quantized
    assert torch.equal(loaded.dequantize(torch.float64), rounded.dequantize(torch.float64))


def test_an_algorithm_in_small_letters_is_the_same(tmp_path: Path) -> None:
    _, weights, _ = quantized_fc("modelopt-nvfp4")
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_algo": "nvfp4"}}))
    assert eagle3().load_checkpoint(tmp_path).fc.format == "nvfp4"


@pytest.mark.parametrize("layout", ["hf-block", "modelopt-nvfp4"])
def test_a_layer_changes_between_quantized_and_dense(layout: str) -> None:
    _, weights, _ = quantized_fc(layout)
    layer = eagle3()
    dense = weights_of({"weight": torch.randn(D, W).bfloat16()})
    for _ in range(2):
        layer.load_checkpoint(weights)
        assert set(layer.state_dict()) >= {"fc.weight", "fc.weight_scale"}
        twin = eagle3().load_checkpoint(weights)
        twin.load_state_dict(layer.state_dict())
        layer.load_checkpoint(dense)
        assert same_bits(layer.fc.weight, dense["model.fc.weight"])
        assert "fc.weight_scale" not in layer.state_dict()


@needs_packing
@pytest.mark.parametrize("layout", ["hf-block", "modelopt-nvfp4"])
def test_a_packed_layer_becomes_quantized(layout: str) -> None:
    _, weights, _ = quantized_fc(layout)
    packed, dense = eagle3().prepack().load_checkpoint(weights), eagle3().load_checkpoint(weights)
    x = torch.randn(2, W).bfloat16()
    assert torch.equal(packed(x), dense(x))


def test_an_update_in_place_counts_from_the_next_call() -> None:
    _, weights, _ = quantized_fc("hf-fp8")
    layer, x = eagle3().load_checkpoint(weights), torch.randn(2, W).bfloat16()
    before = layer(x)
    layer.fc.weight_scale.mul_(2)
    assert torch.equal(layer(x), before * 2)
    layer.load_checkpoint(weights)
    assert torch.equal(layer(x), before)


def test_a_cast_leaves_codes_and_scales() -> None:
    _, weights, _ = quantized_fc("hf-block")
    layer = eagle3(bias=True).load_checkpoint(weights | {"fc.bias": torch.randn(D).bfloat16()})
    codes, scales = layer.fc.weight, layer.fc.weight_scale
    layer.half()
    assert same_bits(layer.fc.weight, codes) and same_bits(layer.fc.weight_scale, scales)
    assert layer.fc.bias.dtype == torch.float16
    assert layer(torch.randn(2, W).half()).dtype == torch.float16


def test_a_move_that_fails_keeps_the_bias() -> None:
    """The bias was taken out while the codes moved, and lost if that raised: the next call raised KeyError."""
    layer, x = eagle3(bias=True).quantize("fp8_row"), torch.randn(2, W).bfloat16()
    expected, state = layer(x), dict(layer.state_dict())

    def no_memory(_: Tensor) -> Tensor:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        layer._apply(no_memory)
    assert layer.state_dict().keys() == state.keys() and torch.equal(layer(x), expected)


def change(layout: str, edit: Callable[[dict], object], config: dict | None = None) -> Callable:
    def build() -> tuple[dict, dict | None]:
        _, weights, _ = quantized_fc(layout)
        edit(weights)
        return weights, config

    return build


NAN = float("nan")
OF_CODES = [
    "weight",
    "weight_packed",
    "weight_scale",
    "weight_scale_inv",
    "scale",
    "qscale_weight",
    "weight_scale_2",
    "weight_global_scale",
]
LOST = "because what it makes of them would be lost"
UNREAD = f"expected numbers or codes in one of {list(FORMATS)}, because the checkpoint's quantization_config says it"
ALGORITHM = {"quant_algo": "NVFP4"}
COMPRESSED, AUTO_ROUND = {"quant_method": "compressed-tensors"}, {"quant_method": "auto-round", "bits": 4}
BROKEN = {
    "no-scale": (
        change("hf-block", lambda w: w.pop("model.fc.weight_scale_inv")),
        "weights has model.fc.weight in torch.float8_e4m3fn, expected its scale beside it: one of ['weight_scale', "
        "'weight_scale_inv', 'scale', 'qscale_weight']",
    ),
    "left-out-without-scale": (
        change("compressed-row", lambda w: w.pop("fc.weight_scale"), ALGORITHM | {"ignore": ["fc"]}),
        "weights has fc.weight in torch.float8_e4m3fn, expected its scale beside it: one of ['weight_scale', "
        "'weight_scale_inv', 'scale', 'qscale_weight']",
    ),
    "scale-alone": (
        change("hf-block", lambda w: w.pop("model.fc.weight")),
        "weights has model.fc.weight_scale_inv, expected a weight beside it",
    ),
    "nan-scale": (
        change("hf-block", lambda w: w["model.fc.weight_scale_inv"][1].fill_(NAN)),
        "model.fc.weight_scale_inv is NaN at [1, 0], expected numbers, because what it scales would be lost",
    ),
    "nan-e8m0": (
        change("quark-mxfp4", lambda w: w["fc.weight_scale"][2, 1].fill_(255)),
        "fc.weight_scale is NaN at [2, 1], expected numbers, because what it scales would be lost",
    ),
    "block-64": (
        change("hf-block", lambda w: w.update({"model.fc.weight_scale_inv": torch.ones(3, 3)})),
        "model.fc.weight_scale_inv is torch.float32 of shape (3, 3), expected (1, 1) of fp8_tensor or (136, 1) of "
        "fp8_row or (2, 2) of fp8_block128 or (5, 6) of fp8_block32, because model.fc.weight has shape (136, 192)",
    ),
    "divisor-of-zero": (
        change("gptqmodel-row", lambda w: w["model.fc.weight_scale_inv"][5].fill_(0), GPTQMODEL),
        "model.fc.weight_scale_inv is 0.0 at [5], expected a finite number above 0, because codes are divided by it",
    ),
    "semantics-of-nobody": (
        change("gptqmodel-row", lambda w: None, GPTQMODEL | {"weight_scale_semantics": "direct"}),
        "the checkpoint says weight_scale_semantics 'direct', expected 'inverse', because it says whether "
        "model.fc.weight_scale_inv is a divisor",
    ),
    "groups-of-another-size": (
        lambda: (
            in_int8_groups(32)[0],
            in_group(**W4A8 | {"strategy": "group", "group_size": 64}) | {"format": "int-quantized"},
        ),
        "fc.weight has 6 groups in 192 columns, expected 3, because the checkpoint says config_groups.a.weights."
        "group_size 64",
    ),
    "groups-with-zeros": (
        lambda: (in_int8_groups(32)[0], in_group(**W4A8 | {"group_size": 32, "symmetric": False})),
        "fc.weight is int8_group, expected int8 without zeros, because the checkpoint says config_groups.a.weights."
        "symmetric False",
    ),
    "groups-of-fp8": (
        lambda: (in_int8_groups(32)[0], {"quant_method": "fp8"}),
        "fc.weight is int8_group, expected fp8_tensor or fp8_row or fp8_block128 or fp8_block32, because the "
        "checkpoint says quant_method fp8",
    ),
    "groups-with-a-second-scale": (
        lambda: (in_int8_groups(32)[0] | {"fc.weight_scale_2": torch.ones(())}, None),
        "weights has fc.weight_scale_2, expected none, because fc.weight is int8_group",
    ),
    "groups-that-differ": (
        change("compressed-int8", lambda w: w.update({"fc.weight_scale": torch.ones(D, 5)})),
        "fc.weight_scale is torch.float32 of shape (136, 5), expected (136, 1) of int8_row, because fc.weight has "
        "shape (136, 192)",
    ),
    "two-scales": (
        change("hf-block", lambda w: w.update({"model.fc.scale": torch.ones(2, 2)})),
        "weights has model.fc.weight_scale_inv and model.fc.scale, expected one of them, because both scale it",
    ),
    "config-says-64": (
        change("hf-block", lambda w: None, {"quant_method": "fp8", "weight_block_size": [64, 64]}),
        "model.fc.weight is fp8_block128, expected a format that is read here, because the checkpoint says "
        "weight_block_size [64, 64]",
    ),
    "config-says-nvfp4": (
        change("hf-block", lambda w: None, ALGORITHM),
        "model.fc.weight is fp8_block128, expected nvfp4, because the checkpoint says quant_algo NVFP4",
    ),
    **{
        f"unread-{config[key]}": (
            change("compressed-row", lambda w: None, config),
            f"fc.weight is in {tool} {config[key]}, {UNREAD}",
        )
        for tool, key, config in (
            ("modelopt", "quant_algo", {"quant_algo": "INT3"}),
            ("modelopt", "quant_algo", {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": 128}),
            ("modelopt", "quant_algo", {"quant_method": "modelopt", "quant_algo": "W4A8_NVFP4_FP8", "group_size": 32}),
            ("compressed-tensors", "format", COMPRESSED | {"format": "mxfp6-pack-quantized"}),
            ("auto-round", "data_type", AUTO_ROUND | {"data_type": "mx_int"}),
            ("auto-round", "data_type", AUTO_ROUND | {"data_type": "nvfp4_v2"}),
            ("MLX", "mode", {"group_size": 64, "bits": 4, "mode": "affine"}),
        )
    },
    "unread-algorithm-of-a-layer": (
        change(
            "compressed-row",
            lambda w: None,
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"fc": {"quant_algo": "W4A8_AWQ"}}},
        ),
        f"fc.weight is in modelopt W4A8_AWQ, {UNREAD}",
    ),
    "unread-format-of-a-group": (
        change(
            "compressed-row",
            lambda w: None,
            COMPRESSED
            | {
                "format": "mixed-precision",
                "config_groups": {"a": {"targets": ["Linear"], "weights": {}, "format": "marlin-24"}},
            },
        ),
        f"fc.weight is in compressed-tensors marlin-24, {UNREAD}",
    ),
    "unread-data-type-of-a-layer": (
        change("compressed-row", lambda w: None, AUTO_ROUND | {"extra_config": {"fc": {"data_type": "mx_int"}}}),
        f"fc.weight is in auto-round mx_int, {UNREAD}",
    ),
    "awq-scales-the-input": (
        change(
            "modelopt-nvfp4",
            lambda w: w.update({"fc.pre_quant_scale": torch.ones(W)}),
            {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ", "group_size": 16},
        ),
        f"weights has fc.pre_quant_scale beside fc.weight, expected only {OF_CODES}, {LOST}",
    ),
    "unknown-zeros": (
        change("modelopt-fp8", lambda w: w.update({"fc.weight_zp": torch.zeros(2, dtype=torch.int32)})),
        f"weights has fc.weight_zp beside fc.weight, expected only {OF_CODES}, {LOST}",
    ),
    "two-weights": (
        change("modelopt-nvfp4", lambda w: w.update({"fc.weight_packed": w["fc.weight"].clone()})),
        "weights has fc.weight and fc.weight_packed, expected one of them, because each is the weight",
    ),
    "dense-and-packed": (
        change("modelopt-nvfp4", lambda w: w.update({"fc.qweight": torch.zeros(W // 8, D, dtype=torch.int32)})),
        "weights has fc.weight and fc.qweight, expected one of them, because each is the weight",
    ),
    "dense-with-a-second-scale": (
        change("modelopt-nvfp4", lambda w: (w.pop("fc.weight_scale"), w.update({"fc.weight": torch.zeros(D, W)}))),
        "fc.weight is torch.float32, expected codes for fc.weight_scale_2, because a scale belongs to codes, and these "
        "are numbers",
    ),
    "int32": (
        change("modelopt-fp8", lambda w: w.update({"fc.weight": torch.zeros(D, W // 8, dtype=torch.int32)})),
        "fc.weight is torch.int32, expected codes in torch.float8_e4m3fn, torch.int8 or torch.uint8, because "
        "fc.weight_scale belongs to it",
    ),
    "dense-with-a-scale": (
        change("modelopt-fp8", lambda w: w.update({"fc.weight": torch.zeros(D, W)})),
        "fc.weight is torch.float32, expected codes for fc.weight_scale, because a scale belongs to codes, and these "
        "are numbers",
    ),
    "another-shape": (
        change("modelopt-fp8", lambda w: w.update({"fc.weight": torch.zeros(D, 2 * H).to(torch.float8_e4m3fn)})),
        "fc.weight has shape (136, 128), expected (136, 192), because it is (D, K*H) with K = 3 and H = 64",
    ),
    "no-second-scale": (
        change("modelopt-nvfp4", lambda w: w.pop("fc.weight_scale_2")),
        "weights has fc.weight in nvfp4, expected one of weight_scale_2 and weight_global_scale beside it",
    ),
    "second-scale-nan": (
        change("modelopt-nvfp4", lambda w: w["fc.weight_scale_2"].fill_(NAN)),
        "fc.weight_scale_2 is nan, expected a finite number above 0",
    ),
    "second-scale-of-fp8": (
        change("modelopt-fp8", lambda w: w.update({"fc.weight_scale_2": torch.ones(1)})),
        "weights has fc.weight_scale_2, expected none, because fc.weight is fp8_tensor",
    ),
    "second-scale-zero": (
        change("modelopt-nvfp4", lambda w: w["fc.weight_scale_2"].fill_(0)),
        "fc.weight_scale_2 is 0.0, expected a finite number above 0",
    ),
    "tiny-second-scale": (
        change("modelopt-nvfp4", lambda w: w.update({"fc.weight_scale_2": torch.tensor(1e-46, dtype=torch.float64)})),
        "fc.weight_scale_2 is 1e-46, expected a number nearer to 1, because in fp32 the codes would be multiplied by "
        "0.0",
    ),
    "tiny-divisor": (
        change("compressed-nvfp4", lambda w: w.update({"fc.weight_global_scale": torch.tensor([2.0**-135])})),
        f"fc.weight_global_scale is {2.0**-135}, expected a number nearer to 1, because in fp32 the codes would be "
        "multiplied by inf",
    ),
    "second-scale-of-8-bits": (
        change("modelopt-nvfp4", lambda w: w.update({"fc.weight_scale_2": torch.ones(1).to(torch.float8_e4m3fn)})),
        "fc.weight_scale_2 is torch.float8_e4m3fn of shape (1,), expected one number",
    ),
    "scale-as-it-is-stored": (
        change("quark-mxfp4", lambda w: w.update({"fc.weight_scale": torch.ones(D, W // 32).bfloat16()})),
        f"fc.weight_scale is torch.bfloat16 of shape ({D}, {W // 32}), expected torch.float8_e4m3fn or "
        "torch.float8_e8m0fnu, because fc.weight is torch.uint8",
    ),
    "second-scale-of-two-numbers": (
        change("modelopt-nvfp4", lambda w: w.update({"fc.weight_scale_2": torch.ones(2)})),
        "fc.weight_scale_2 is torch.float32 of shape (2,), expected one number",
    ),
    "second-scale-of-integers": (
        change("modelopt-nvfp4", lambda w: w.update({"fc.weight_scale_2": torch.ones(1, dtype=torch.int32)})),
        "fc.weight_scale_2 is torch.int32 of shape (1,), expected one number",
    ),
    "both-second-scales": (
        change("modelopt-nvfp4", lambda w: w.update({"fc.weight_global_scale": torch.ones(1)})),
        "weights has fc.weight in nvfp4, expected one of weight_scale_2 and weight_global_scale beside it",
    ),
    "scales-of-a-row-in-a-row": (
        change("compressed-row", lambda w: w.update({"fc.weight_scale": torch.ones(1, D)})),
        "fc.weight_scale is torch.float32 of shape (1, 136), expected (1, 1) of fp8_tensor or (136, 1) of fp8_row or "
        "(2, 2) of fp8_block128 or (5, 6) of fp8_block32, because fc.weight has shape (136, 192)",
    ),
    "int8-of-half-the-columns": (
        change("compressed-int8", lambda w: w.update({"fc.weight": torch.zeros(D, W // 2, dtype=torch.int8)})),
        "fc.weight has shape (136, 96), expected (136, 192), because it is (D, K*H) with K = 3 and H = 64",
    ),
    "config-says-fp8": (
        change("compressed-int8", lambda w: None, {"quant_method": "fp8"}),
        "fc.weight is int8_row, expected fp8_tensor or fp8_row or fp8_block128 or fp8_block32, because the checkpoint "
        "says quant_method fp8",
    ),
    "config-says-lists": (
        change("hf-block", lambda w: None, {"quant_method": "fp8", "weight_block_size": [[128], [128]]}),
        "model.fc.weight is fp8_block128, expected a format that is read here, because the checkpoint says "
        "weight_block_size [[128], [128]]",
    ),
    "unknown-method": (
        change("compressed-row", lambda w: None, {"quant_method": "foo"}),
        f"fc.weight is in foo, {UNREAD}",
    ),
    "method-of-engines": (
        change(
            "compressed-row",
            lambda w: (
                w.pop("fc.weight_scale"),
                w.update({"fc.weight": torch.zeros(D * W // 2, 1).byte(), "fc.weight.absmax": torch.ones(8)}),
            ),
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
        ),
        f"fc.weight is in bitsandbytes, {UNREAD}",
    ),
    "names-of-engines": (
        change(
            "compressed-row",
            lambda w: (
                [w.pop(f"fc.{name}") for name in ("weight", "weight_scale")],
                w.update({"fc.suh": torch.ones(W), "fc.trellis": torch.zeros(2, 2, 64).short()}),
            ),
            {"quant_method": "exl3"},
        ),
        f"fc.trellis is in exl3, {UNREAD}",
    ),
    "dtype-of-engines": (
        change(
            "compressed-row",
            lambda w: w.update({"fc.weight": torch.zeros(D, W * 3 // 4).byte()}),
            {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp6_e3m2"}}},
        ),
        f"fc.weight is in quark fp6_e3m2, {UNREAD}",
    ),
    "two-dtypes-of-engines": (
        change(
            "compressed-row",
            lambda w: None,
            {"quant_method": "quark", "global_quant_config": {"weight": [{"dtype": "fp8_e4m3"}, {"dtype": "int4"}]}},
        ),
        f"fc.weight is in quark int4, {UNREAD}",
    ),
    "scale-of-integers": (
        change("modelopt-fp8", lambda w: w.update({"fc.weight_scale": torch.ones(1, dtype=torch.int32)})),
        "fc.weight_scale is torch.int32 of shape (1,), expected torch.float32 or torch.float8_e8m0fnu, because "
        "fc.weight is torch.float8_e4m3fn",
    ),
}


def in_group(**weights: object) -> dict:
    """compressed-tensors' config_groups."""
    return {"config_groups": {"a": {"targets": ["Linear"], "weights": weights}}, "quant_method": "compressed-tensors"}


# layout, quantization_config, quantization of hf_quant_config.json, what the error says behind the tensor's name
CONTRADICTIONS: dict[str, tuple[str, dict | None, dict | None, str]] = {
    "method-of-integers": ("compressed-row", {"quant_method": "awq"}, None, "awq, {} quant_method awq"),
    "method-is-a-list": (
        "compressed-row",
        {"quant_method": ["fp8"]},
        None,
        "a format that is read here, {} quant_method ['fp8']",
    ),
    "algorithms-are-a-list": (
        "compressed-row",
        {"quant_algo": ["FP8"]},
        None,
        "a format that is read here, {} quant_algo ['FP8']",
    ),
    "format": (
        "compressed-row",
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
        None,
        "nvfp4, {} format nvfp4-pack-quantized",
    ),
    "unknown-format": ("compressed-row", {"format": "dense"}, None, "a format that is read here, {} format dense"),
    "integers": (
        "compressed-row",
        in_group(type="int", num_bits=8, strategy="channel"),
        None,
        "int8_row or int8_group or pack-quantized, {} config_groups.a.weights type int, num_bits 8, strategy channel",
    ),
    "per-tensor": (
        "compressed-row",
        in_group(type="float", num_bits=8, strategy="tensor"),
        None,
        "fp8_tensor, {} config_groups.a.weights type float, num_bits 8, strategy tensor",
    ),
    "blocks": (
        "hf-block",
        in_group(type="float", num_bits=8, strategy="block", block_structure=[32, 32]),
        None,
        "fp8_block32, {} config_groups.a.weights type float, num_bits 8, strategy block, block_structure [32, 32]",
    ),
    "groups-of-32": (
        "modelopt-nvfp4",
        in_group(type="float", num_bits=4, group_size=32),
        None,
        "mxfp4, {} config_groups.a.weights type float, num_bits 4, group_size 32",
    ),
    "another-layer-is-left-out": (
        "compressed-row",
        {"quant_algo": "NVFP4", "ignore": ["lm_head", "c", "*.fc.*", "mtp*", "re:.*fc2", 7]},
        None,
        "nvfp4, {} quant_algo NVFP4",
    ),
    "another-layer-is-left-out-by-a-pattern": (
        "compressed-row",
        ALGORITHM | {"modules_to_not_convert": ["f+", "c", "f.", ".*f", "fd|eh_proj", "(?:fc", "modelxfc", "", ".", 7]},
        None,
        "nvfp4, {} quant_algo NVFP4",
    ),
    "a-list-of-names": (
        "compressed-row",
        ALGORITHM | {"ignore": [".*fc", "(fc)"], "exclude_modules": ["fc+"], "ignored_layers": ["(eh_proj|fc)"]},
        None,
        "nvfp4, {} quant_algo NVFP4",
    ),
    "left-out-but-listed": (
        "compressed-row",
        {"quant_algo": "NVFP4", "ignore": ["fc"], "quantized_layers": {"fc": {"quant_algo": "FP8"}}},
        None,
        "fp8_tensor, {} quantized_layers.fc.quant_algo FP8",
    ),
    "group-size": (
        "modelopt-nvfp4",
        {"quant_algo": "NVFP4", "group_size": 32},
        None,
        "a format that is read here, {} quant_algo NVFP4, group_size 32",
    ),
    "nested": (
        "compressed-row",
        {"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4"}},
        None,
        "nvfp4, {} quantization.quant_algo NVFP4",
    ),
    "mixed": (
        "compressed-row",
        {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"model.fc": {"quant_algo": "NVFP4"}}},
        None,
        "nvfp4, {} quantized_layers.model.fc.quant_algo NVFP4",
    ),
    "mixed-beside": (
        "compressed-row",
        None,
        {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"fc": {"quant_algo": "FP8"}}},
        "fp8_tensor, {} quantized_layers.fc.quant_algo FP8",
    ),
    "data-type": (
        "compressed-row",
        {"quant_method": "auto-round", "data_type": "mx_fp", "bits": 4, "extra_config": {"fc": {"bits": 8}}},
        None,
        "mxfp8, {} data_type mx_fp, extra_config.fc.bits 8",
    ),
    "data-type-of-integers": (
        "modelopt-nvfp4",
        {"quant_method": "auto-round", "data_type": "int", "bits": 4},
        None,
        "pack-quantized or gptq or awq, {} data_type int, bits 4",
    ),
    "one-side-of-blocks": (
        "hf-block",
        {"quant_method": "fp8", "weight_block_size": 64},
        None,
        "a format that is read here, {} weight_block_size 64",
    ),
    "blocks-as-text": (
        "hf-block",
        in_group(type="float", num_bits=8, strategy="block", block_structure="64x64"),
        None,
        "a format that is read here, {} config_groups.a.weights type float, num_bits 8, strategy block, "
        "block_structure 64x64",
    ),
    "quark": (
        "compressed-row",
        {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4", "group_size": 32}}},
        None,
        "mxfp4, {} global_quant_config.weight dtype fp4, group_size 32",
    ),
    "quark-scheme": (
        "compressed-row",
        {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}}},
        None,
        "fp8_tensor, {} global_quant_config.weight dtype fp8_e4m3, qscheme per_tensor",
    ),
    "quark-blocks": (
        "hf-block",
        {
            "quant_method": "quark",
            "layer_quant_config": {
                "*fc": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_block", "block_size": [32, 32]}}
            },
        },
        None,
        "fp8_block32, {} layer_quant_config.*fc.weight dtype fp8_e4m3, qscheme per_block, block_size [32, 32]",
    ),
    "quark-two-scales": (
        "quark-mxfp4",
        {"quant_method": "quark", "global_quant_config": {"weight": [{"dtype": "fp4"}, {"dtype": "fp8_e4m3"}]}},
        None,
        "nvfp4, {} global_quant_config.weight dtype fp4",
    ),
    "quark-group-of-integers": (
        "compressed-int8",
        {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int8", "qscheme": "per_group"}}},
        None,
        "a format that is read here, {} global_quant_config.weight dtype int8, qscheme per_group",
    ),
    "two-files": (
        "compressed-row",
        {"quant_method": "fp8"},
        {"quant_algo": "NVFP4"},
        "nvfp4, {} hf_quant_config.json: quant_algo NVFP4",
    ),
}


def save_with(folder: Path, weights: dict[str, Tensor], config: dict | None, beside: dict | None) -> None:
    save_file(weights, folder / "model.safetensors")
    files = ("config.json", "quantization_config", config), ("hf_quant_config.json", "quantization", beside)
    for file, key, section in files:
        if section is not None:
            (folder / file).write_text(json.dumps({key: section}))


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_a_config_that_means_another_format_is_named(case: str, tmp_path: Path) -> None:
    layout, config, beside, expected = CONTRADICTIONS[case]
    weight, weights, _ = quantized_fc(layout)
    save_with(tmp_path, weights, config, beside)
    name = f"{LAYOUTS[layout][2]}.weight"
    message = f"{name} is {weight.format}, expected {expected.format('because the checkpoint says')}"
    with pytest.raises(ValueError, match=f"^{re.escape(f'Eagle3Projection.load_checkpoint: {message}')}$"):
        eagle3().load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("layout", "config", "beside"),
    [
        pytest.param("compressed-row", in_group(type="float", num_bits=8, strategy="channel"), None, id="channel"),
        pytest.param("compressed-row", in_group(type="float", num_bits=8, dynamic=False), None, id="no-strategy"),
        pytest.param("compressed-row", in_group(), None, id="no-bits"),
        pytest.param("compressed-int8", in_group(num_bits=8, strategy="channel"), None, id="int8"),
        pytest.param(
            "hf-block",
            in_group(type="float", num_bits=8, strategy="block", block_structure=[128, 128]),
            None,
            id="block",
        ),
        pytest.param(
            "hf-block",
            in_group(type="float", num_bits=8, strategy="block", block_structure="128x128"),
            None,
            id="block-as-text",
        ),
        pytest.param("modelopt-nvfp4", in_group(type="float", num_bits=4, group_size=16), None, id="nvfp4"),
        # Names that Model-Optimizer's export gives to formats of one layer.
        pytest.param("compressed-int8", {"quant_method": "modelopt", "quant_algo": "W8A16"}, None, id="w8a16"),
        pytest.param("quark-mxfp4", {"quant_method": "modelopt", "quant_algo": "MXFP4"}, None, id="mxfp4"),
        pytest.param("quark-mxfp4", {"quant_algo": "w4a8_mxfp4_fp8"}, None, id="w4a8-mxfp4"),
        pytest.param("compressed-int8", {"quant_algo": "W8A8_SQ_PER_CHANNEL"}, None, id="smooth-quant"),
        pytest.param("modelopt-nvfp4", {"quant_algo": "NVFP4_AWQ", "group_size": 16}, None, id="awq-in-the-norm"),
        # The target's layers beside the drafter's, as Model-Optimizer exports both.
        *(
            pytest.param(
                "modelopt-fp8",
                {
                    "quant_algo": "MIXED_PRECISION",
                    "quantized_layers": {
                        "model.fc": {"quant_algo": "NVFP4"},
                        f"{module}.fc": {"quant_algo": "FP8"},
                        "fc": {"quant_algo": "W4A8_AWQ"},
                    },
                },
                None,
                id=module,
            )
            for module in ("eagle_module", "dflash_module")
        ),
        pytest.param("hf-block", {"quant_algo": "fp8_pb_real"}, None, id="fp8-blocks"),
        pytest.param("modelopt-fp8", {"quant_method": "modelopt_fp8"}, None, id="modelopt-fp8"),
        pytest.param(
            "modelopt-mxfp8", {"quant_method": "FP8", "weight_block_size": [1, 32]}, None, id="method-in-capitals"
        ),
        pytest.param(
            "quark-mxfp4",
            {
                "quant_method": "quark",
                "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}},
                "layer_quant_config": {"*.mlp.*": {"weight": {"dtype": "int4"}}, "*fc": {"weight": {"dtype": "fp4"}}},
            },
            None,
            id="quark-layer",
        ),
        pytest.param(
            "compressed-row",
            {
                "quant_method": "quark",
                "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}},
                "layer_type_quant_config": {"Linear": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_channel"}}},
            },
            None,
            id="quark-types",
        ),
        pytest.param("hf-block", {"quant_algo": "FP8_BLOCK_SCALES"}, None, id="fp8-block-scales"),
        pytest.param(
            "compressed-row",
            {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": ["fp4"], "qscheme": {}}}},
            None,
            id="quark-says-nothing",
        ),
        pytest.param(
            "compressed-int8",
            {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int8", "qscheme": "per_channel"}}},
            None,
            id="quark-int8",
        ),
        pytest.param("modelopt-nvfp4", {"quant_algo": "NVFP4", "group_size": 16}, None, id="group-size"),
        pytest.param("hf-fp8", {"quant_method": "fp8"}, {"quant_algo": "FP8"}, id="two-files"),
        pytest.param(
            "compressed-row",
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"lm_head": {"quant_algo": "NVFP4"}}},
            None,
            id="of-another-layer",
        ),
        pytest.param("compressed-row", {"format": "float-quantized", "ignore": ["re:fc", "re:("]}, None, id="left-out"),
        # re raises OverflowError and RecursionError for these.
        pytest.param("compressed-row", {"ignore": ["re:a{99999999999}", "re:" + "(" * 5000]}, None, id="no-patterns"),
    ],
)
def test_a_config_that_agrees(layout: str, config: dict, beside: dict | None, tmp_path: Path) -> None:
    weight, weights, _ = quantized_fc(layout)
    save_with(tmp_path, weights, config, beside)
    assert eagle3().load_checkpoint(tmp_path).fc.format == weight.format


NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
COMPRESSED_NVFP4 = {
    **{"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
    "config_groups": {"a": {"targets": ["Linear"], "weights": {"type": "float", "num_bits": 4, "group_size": 16}}},
}
# Configs of other formats that leave out the layer `fc` or `model.fc`, in each spelling: the two files' sections.
LEAVES_OUT: dict[str, tuple[dict | None, dict | None]] = {
    "modelopt": (NVFP4 | {"ignore": ["lm_head", "fc*"]}, None),
    "modelopt-prefix": (NVFP4 | {"ignore": ["model.fc*"]}, None),
    "modelopt-anywhere": (NVFP4 | {"exclude_modules": ["*fc"]}, None),
    "modelopt-name": (NVFP4 | {"exclude_modules": ["model.language_model.fc"]}, None),
    "modelopt-nested": ({"quant_method": "modelopt", "quantization": NVFP4 | {"exclude_modules": ["*fc*"]}}, None),
    "modelopt-beside": (NVFP4 | {"ignore": ["*fc*"]}, {"quant_algo": "NVFP4", "exclude_modules": ["*fc*"]}),
    "modelopt-only-beside": (NVFP4, {"quant_algo": "NVFP4", "exclude_modules": ["fc"]}),
    "modelopt-file": (None, {"quant_algo": "NVFP4", "exclude_modules": ["fc*"]}),
    "compressed": (COMPRESSED_NVFP4 | {"ignore": ["lm_head", "fc"]}, None),
    "compressed-prefix": (COMPRESSED_NVFP4 | {"ignore": ["model.fc"]}, None),
    "compressed-pattern": (COMPRESSED_NVFP4 | {"ignore": ["re:fc.*"]}, None),
    "compressed-longer": (COMPRESSED_NVFP4 | {"format": None, "ignore": ["eagle3.fc", "eagle3.model.fc"]}, None),
    "compressed-anywhere": (COMPRESSED_NVFP4 | {"ignore": ["re:(", "re:.*fc$"]}, None),
    "hugging-face": ({"quant_method": "mxfp4", "modules_to_not_convert": ["model.fc"]}, None),
    "hugging-face-blocks": (
        {"quant_method": "fp8", "weight_block_size": [32, 32], "modules_to_not_convert": ["fc"]},
        None,
    ),
    "ignored-layers": ({"quant_method": "mxfp8", "ignored_layers": ["fc"]}, None),
    "quark": ({"quant_method": "mxfp4", "exclude": ["re:model.fc"]}, None),
    # transformers' patterns, and a glob that is none.
    **{
        f"modules-to-not-convert-{pattern}": (ALGORITHM | {"modules_to_not_convert": ["lm_head", pattern]}, None)
        for pattern in (".*fc", "(eh_proj|fc)", r"model\.fc$", "model.[ef]c", "*fc", "model.*", "fc.", "re:.*fc")
    },
    "gptq": ({"quant_method": "gptq", "dynamic": {"-:.*fc": {}}}, None),
    "auto-round": ({"quant_method": "auto-round", "data_type": "nv_fp", "extra_config": {"fc": {"bits": 16}}}, None),
    "auto-round-part": ({"quant_method": "Auto-Round", "data_type": "int", "extra_config": {"c$": {"bits": 32}}}, None),
    "auto-round-blocks": ({"quant_method": "auto-round", "data_type": "int", "to_quant_block_names": "layers"}, None),
    "auto-round-blocks-pattern": (
        {
            "quant_method": "auto-round",
            **{
                "data_type": "int",
                "bits": 4,
                "block_name_to_quantize": "layers",
                "extra_config": {".*fc": {"sym": True}},
            },
        },
        None,
    ),
    # Formats that engines alone read.
    "unread": ({"quant_method": "w4afp8", "modules_to_not_convert": ["fc"]}, None),
    "quark-of-another-dtype": (
        {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4"}}, "exclude": ["*fc"]},
        None,
    ),
    "unread-quark": (
        {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int4"}}, "exclude": ["*fc"]},
        None,
    ),
}


@pytest.mark.parametrize(
    ("entry", "is_found"),
    [("model.fc", True), ("fc", True), (".*fc", True), ("drafter.model.fc", False), ("model", False)],
)
def test_an_entry_of_extra_config_that_engines_find(entry: str, is_found: bool) -> None:
    config = {"quant_method": "auto-round", "bits": 4, "extra_config": {entry: {"bits": 16}}}
    assert leaves_out(config, "fc")
    assert leaves_out(config, "model.fc", "part") is is_found


@pytest.mark.parametrize("layout", ["hf-block", "deepseek-block", "compressed-row"])  # model.fc, fc and fc
@pytest.mark.parametrize("case", LEAVES_OUT)
def test_a_layer_that_the_config_leaves_out_is_what_its_tensors_are(case: str, layout: str, tmp_path: Path) -> None:
    """NVFP4 checkpoints keep their MTP layers in FP8 (vllm#43455): "is fp8_block128, expected nvfp4"."""
    weight, weights, _ = quantized_fc(layout)
    save_with(tmp_path, weights, *LEAVES_OUT[case])
    loaded = eagle3().load_checkpoint(tmp_path).fc.quantized
    assert loaded.format == weight.format
    assert torch.equal(loaded.dequantize(torch.float64), weight.dequantize(torch.float64))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_with_one_scale_has_it_in_each_row(shape: tuple[int, ...], dtype: torch.dtype, tmp_path: Path) -> None:
    """compressed-tensors' strategy `tensor`, which was refused: expected (136, 1) of int8_row."""
    torch.manual_seed(2)
    codes, scale = torch.randint(-127, 128, (D, W)).to(torch.int8), torch.full(shape, 0.0123, dtype=dtype)
    weights = weights_of({"weight": codes, "weight_scale": scale}, "fc")
    save_with(tmp_path, weights, in_group(num_bits=8), None)
    layer = eagle3().load_checkpoint(tmp_path)
    truth = codes.double() * scale.double().item()
    assert layer.fc.format == "int8_row"
    assert torch.equal(layer.fc.quantized.dequantize(torch.float64), truth)
    x = torch.randn(3, W).bfloat16()
    normed = torch.nn.functional.rms_norm(x.double().reshape(3, K, H), (H,), None, layer.config.eps)
    gains = torch.stack([weights[f"model.fc_norm.{k}.weight"].double() for k in range(K)])
    expected = (normed * gains).reshape(3, W) @ truth.t()
    assert ((layer(x).double() - expected).norm(dim=1) / expected.norm(dim=1)).max() < 2**-7


W4A8 = {"num_bits": 4, "type": "int", "symmetric": True, "dynamic": False}


@pytest.mark.parametrize("bits", range(2, 9))
def test_an_int8_has_any_number_of_bits(bits: int, tmp_path: Path) -> None:
    """compressed-tensors' int-quantized of W4A8 by row, which was refused: expected pack-quantized."""
    torch.manual_seed(bits)
    end = 1 << (bits - 1)
    codes, scales = torch.randint(-end, end, (D, W)).to(torch.int8), torch.rand(D, 1)
    config = in_group(**W4A8 | {"num_bits": bits, "strategy": "channel"}) | {"format": "int-quantized"}
    save_with(tmp_path, weights_of({"weight": codes, "weight_scale": scales}, "fc"), config, None)
    loaded = eagle3().load_checkpoint(tmp_path).fc
    assert loaded.format == "int8_row"
    assert torch.equal(loaded.quantized.dequantize(torch.float64), codes.double() * scales.double())


def in_int8_groups(size: int) -> tuple[dict[str, Tensor], Tensor]:
    torch.manual_seed(size)
    codes, scales = torch.randint(-8, 8, (D, W)).to(torch.int8), torch.rand(D, W // size).bfloat16()
    truth = codes.double() * scales.double().repeat_interleave(size, 1)
    return weights_of({"weight": codes, "weight_scale": scales}, "fc"), truth


@pytest.mark.parametrize("size", [32, 96])
@pytest.mark.parametrize("format", ["int-quantized", "mixed-precision", None])
def test_int8_in_groups_is_dequantized(
    size: int, format: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """compressed-tensors' W4A8 and W4AFP8."""
    caplog.set_level(logging.INFO)
    weights, truth = in_int8_groups(size)
    weights["fc.weight_zero_point"] = torch.zeros(D, W // size, dtype=torch.int8)
    config = in_group(**W4A8 | {"strategy": "group", "group_size": size}) | {"format": format}
    save_with(tmp_path, weights, config, None)
    layer = eagle3().load_checkpoint(tmp_path)
    torch.testing.assert_close(layer.fc.weight.double(), truth, rtol=2**-8, atol=0)
    because = "a projection's int8 has one scale for each row"
    assert f"fc.weight is int8_group, dequantized to torch.bfloat16: {because}" in caplog.text


def test_quarks_nvfp4_has_a_second_scale_of_activations_too(tmp_path: Path) -> None:
    """vLLM's quark_nvfp4 reads input_scale_2, whose presence was an error here."""
    weight, weights, _ = quantized_fc("modelopt-nvfp4")
    weights |= {"fc.input_scale_2": torch.tensor(0.5)}
    entries = [{"dtype": "fp4", "qscheme": "per_group", "group_size": 16}, {"dtype": "fp8_e4m3"}]
    save_with(tmp_path, weights, {"quant_method": "quark", "global_quant_config": {"weight": entries}}, None)
    loaded = eagle3().load_checkpoint(tmp_path).fc.quantized
    assert torch.equal(loaded.dequantize(torch.float64), weight.dequantize(torch.float64))


@pytest.mark.parametrize("method", ["tensor", "row", "block"])
def test_gptqmodel_s_scale_is_a_divisor(method: str, tmp_path: Path) -> None:
    """448 / amax was multiplied: 1e7 times too much, without an error. The quantizer is GPTQModel 7.7's
    `quantize_fp8_weight`."""
    torch.manual_seed(3)
    weight = torch.randn(256, 384) * 0.02
    blocks = {"tensor": (256, 384), "row": (1, 384), "block": (128, 128)}[method]
    rows, columns = 256 // blocks[0], 384 // blocks[1]
    tiles = weight.reshape(rows, blocks[0], columns, blocks[1])
    divisor = 448 / tiles.abs().amax((1, 3))
    codes = (tiles * divisor[:, None, :, None]).clamp(-448, 448).reshape(256, 384).to(torch.float8_e4m3fn)
    in_file = divisor.reshape({"tensor": (), "row": (-1,), "block": divisor.shape}[method])
    own = GPTQMODEL | {"weight_scale_method": method} | ({"weight_block_size": [128, 128]} if method == "block" else {})
    save_with(tmp_path, {"fc.weight": codes, "fc.weight_scale_inv": in_file}, own, None)
    config = ek.Eagle3Config(num_chunks=3, target_hidden_size=128, hidden_size=256)
    loaded = ek.Eagle3Projection(config).load_checkpoint(tmp_path).fc.quantized.dequantize(torch.float64)
    expanded = divisor.double().repeat_interleave(blocks[0], 0).repeat_interleave(blocks[1], 1)
    torch.testing.assert_close(loaded, codes.double() / expanded, rtol=2**-23, atol=0)
    assert (loaded - weight).norm() / weight.norm() < 0.03


def test_only_weight_scale_inv_is_a_divisor(tmp_path: Path) -> None:
    """A saved state_dict has multipliers in weight_scale, whatever the config beside it says of weight_scale_inv."""
    weight, weights, _ = quantized_fc("modelopt-row")
    save_with(tmp_path, weights, GPTQMODEL | {"weight_scale_method": "row"}, None)
    loaded = eagle3().load_checkpoint(tmp_path).fc.quantized
    assert torch.equal(loaded.dequantize(torch.float64), weight.dequantize(torch.float64))


def test_a_layer_that_gptqmodel_left_out_has_its_own_scales(tmp_path: Path) -> None:
    weight, weights, _ = quantized_fc("hf-block")
    save_with(tmp_path, weights, GPTQMODEL | {"dynamic": {"-:.*fc": {}}}, None)
    loaded = eagle3().load_checkpoint(tmp_path).fc.quantized
    assert torch.equal(loaded.dequantize(torch.float64), weight.dequantize(torch.float64))


QUARK = {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_channel"}}}


@pytest.mark.parametrize("config", [QUARK, QUARK | {"global_quant_config": None}, {"quant_method": "fbgemm_fp8"}])
def test_formats_of_engines_whose_codes_are_those_of_another(config: dict, tmp_path: Path) -> None:
    _, weights, _ = quantized_fc("compressed-row")
    save_with(tmp_path, weights, config, None)
    assert eagle3().load_checkpoint(tmp_path).fc.format == "fp8_row"


def test_numbers_beside_codes_that_only_engines_read(tmp_path: Path) -> None:
    """bitsandbytes does not quantize what `llm_int8_skip_modules` names: here fc, while later layers have codes."""
    _, weights, _ = quantized_fc("compressed-row")
    weight = torch.randn(D, W).bfloat16()
    del weights["fc.weight_scale"]
    weights |= {"fc.weight": weight, "midlayer.mlp.up_proj.weight": torch.zeros(8, 1).byte()}
    save_with(tmp_path, weights, {"quant_method": "bitsandbytes"}, None)
    assert same_bits(eagle3().load_checkpoint(tmp_path).fc.weight, weight)


def test_of_formats_that_mean_the_same_it_is_the_one_of_the_config(tmp_path: Path) -> None:
    """A 128 x 128 block larger than the weight was taken for one scale of the tensor, which contradicted the config."""
    weight = ek.quantize(torch.randn(64, 128), "fp8_block128")
    save_file({"fc.weight": weight.codes, "fc.weight_scale_inv": weight.scales}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": FP8_BLOCKS}))
    config = ek.Eagle3Config(num_chunks=2, target_hidden_size=64, hidden_size=64)
    assert ek.Eagle3Projection(config).load_checkpoint(tmp_path).fc.format == "fp8_block128"


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_checkpoint_is_named_and_copies_nothing(case: str, tmp_path: Path) -> None:
    build, message = BROKEN[case]
    weights, config = build()
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, tmp_path / "model.safetensors")
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    layer = eagle3()
    expected = f"^{re.escape(f'Eagle3Projection.load_checkpoint: {message}')}$"
    with UnchangedTensors(list(layer.state_dict().values())), pytest.raises(ValueError, match=expected):
        layer.load_checkpoint(tmp_path)


def streams() -> ek.MTPStreamsProjection:
    return ek.MTPStreamsProjection(ek.MTPStreamsConfig(H), dtype=torch.bfloat16)


def context() -> ek.ContextKV:
    return ek.ContextKV(ek.ContextKVConfig(K, H, H, 1, 2, 32), dtype=torch.bfloat16)


# Modules with a projection, the names of their weights in a checkpoint, and the name of the projection.
MODULES: dict[str, tuple[Callable, Callable[[str], str], str]] = {
    "eagle3": (eagle3, str, "fc"),
    "mtp": (lambda: ek.MTPProjection(ek.MTPConfig(H, D)), "model.layers.61.{}".format, "eh_proj"),
    "streams": (streams, "mtp.0.{}".format, "h_proj"),
    "context": (context, str, "fc"),
    "context-k": (context, str, "layers.0.self_attn.k_proj"),
}


def dense_weights(module: str) -> dict[str, Tensor]:
    make, named, _ = MODULES[module]
    weights = {named(name): tensor.clone() for name, tensor in make().state_dict().items()}
    if module == "streams":
        e, h = weights.pop("mtp.0.eh_proj.weight").chunk(2, 1)
        weights |= {"mtp.0.e_proj.weight": e, "mtp.0.h_proj.weight": h}
    if module.startswith("context"):
        attention = "layers.0.self_attn"
        k, v = weights.pop("kv_proj.weight").chunk(2)
        weights |= {f"{attention}.k_proj.weight": k, f"{attention}.v_proj.weight": v}
        weights[f"{attention}.k_norm.weight"] = weights.pop("k_norm.0.weight")
    return weights


# The last four are of modules inside the layer: Model-Optimizer's quantizer, a transform, LoRA.
COMPANIONS = [
    *("pre_quant_scale", "smooth_scale", "weight_zp", "absmax", "weight_zero_point"),
    *("input_quantizer._pre_quant_scale", "v_input.weight", "lora_A.weight", "lora_B.default.weight"),
]


@pytest.mark.parametrize("is_quantized", [True, False], ids=["codes", "dense"])
@pytest.mark.parametrize("companion", COMPANIONS)
@pytest.mark.parametrize("module", MODULES)
def test_what_is_not_read_beside_a_weight_is_refused(module: str, companion: str, is_quantized: bool) -> None:
    """MTPProjection ignored Model-Optimizer's pre_quant_scale, which multiplies every column; every module ignored
    names with a further dot."""
    make, named, stem = MODULES[module]
    weights, name = dense_weights(module), named(stem)
    for projection in {name, name.replace(".h_proj", ".e_proj")} if is_quantized else ():
        weight = ek.quantize(weights[f"{projection}.weight"], "fp8_row")
        weights |= {f"{projection}.weight": weight.codes, f"{projection}.weight_scale": weight.scales}
    layer = make().load_checkpoint(weights)
    weights[f"{name}.{companion}"] = torch.full((4,), 7.0)
    message = f"weights has {name}.{companion} beside {name}.weight, expected only {OF_CODES}, {LOST}"
    expected = pytest.raises(ValueError, match=f"^{re.escape(f'{type(layer).__name__}.load_checkpoint: {message}')}$")
    with UnchangedTensors(list(layer.state_dict().values())), expected:
        layer.load_checkpoint(weights)


NORMS = {
    "eagle3": "fc_norm.1",
    "mtp": "model.layers.61.enorm",
    "streams": "mtp.0.hnorm",
    "context": "hidden_norm",
    "context-aux": "aux_hidden_norms.0",
    "context-k": "layers.0.self_attn.k_norm",
    "qkv": "midlayer.hidden_norm",
}


def qkv_weights() -> tuple[ek.Eagle3QKVProjection, dict[str, Tensor]]:
    config = ek.Eagle3QKVConfig(hidden_size=H, num_heads=4, num_kv_heads=2, head_dim=16)
    rows = {"q_proj": 64, "k_proj": 32, "v_proj": 32}
    weights = {f"midlayer.self_attn.{name}.weight": torch.randn(size, 2 * H) for name, size in rows.items()}
    weights |= {f"midlayer.{name}.weight": torch.ones(H) for name in ("input_layernorm", "hidden_norm")}
    return ek.Eagle3QKVProjection(config, dtype=torch.bfloat16), weights


@pytest.mark.parametrize(
    "companion",
    ["bias", "weight_scale", "norm.weight", "lora_A.default.weight", "input_scale", "input_quantizer._amax"],
)
@pytest.mark.parametrize("module", NORMS)
def test_what_is_not_read_beside_a_norm_is_refused(module: str, companion: str) -> None:
    """All of these were ignored, but for a bias in MTPProjection."""
    if module == "qkv":
        layer, weights = qkv_weights()
    elif module == "context-aux":
        config = ek.ContextKVConfig(K, H, H, 1, 2, 32, chunk_norm=True)
        layer = ek.ContextKV(config, dtype=torch.bfloat16)
        weights = dense_weights("context") | {f"aux_hidden_norms.{k}.weight": torch.ones(H) for k in range(K)}
    else:
        layer, weights = MODULES[module][0](), dense_weights(module)
    name = f"{NORMS[module]}.{companion}"
    layer.load_checkpoint(weights)
    weights[name] = torch.full((4,), 7.0)
    if companion.startswith("input_"):
        layer.load_checkpoint(weights)
        return
    expected = pytest.raises(ValueError, match=f"load_checkpoint: weights has {re.escape(name)}, expected ")
    with UnchangedTensors(list(layer.state_dict().values())), expected:
        layer.load_checkpoint(weights)


@pytest.mark.parametrize("module", sorted(MODULES.keys() & NORMS.keys()))
def test_a_tensor_on_meta_is_refused_before_anything_changes(module: str) -> None:
    """The codes were in the module when the copy of the norm failed."""
    make, named, stem = MODULES[module]
    weights, name, norm = dense_weights(module), named(stem), f"{NORMS[module]}.weight"
    for projection in {name, name.replace(".h_proj", ".e_proj")}:
        quantized = ek.quantize(weights[f"{projection}.weight"], "fp8_row")
        weights |= {f"{projection}.weight": quantized.codes, f"{projection}.weight_scale": quantized.scales}
    layer = make()
    before = layer.state_dict()
    for meta in (norm, f"{name}.weight_scale"):
        message = f"{type(layer).__name__}.load_checkpoint: {meta} is on meta, expected a tensor with numbers"
        expected = pytest.raises(ValueError, match=f"^{re.escape(message)}$")
        with UnchangedTensors(list(before.values())), expected:
            layer.load_checkpoint(weights | {meta: weights[meta].to("meta")})
        assert {key: value.data_ptr() for key, value in layer.state_dict().items()} == {
            key: value.data_ptr() for key, value in before.items()
        }


def test_a_norm_before_fc_that_the_config_forgot_is_refused() -> None:
    """Laguna's norms, in a drafter whose config has none: the context was computed without them."""
    message = "weights has aux_hidden_norms.0.weight, expected 0 norms before fc, because chunk_norm is False"
    with pytest.raises(ValueError, match=f"^{re.escape(f'ContextKV.load_checkpoint: {message}')}$"):
        context().load_checkpoint(dense_weights("context") | {"aux_hidden_norms.0.weight": torch.ones(H)})


@pytest.mark.parametrize("module", MODULES)
def test_a_weight_in_fp64_is_no_codes(module: str) -> None:
    """It was said to lack its scale."""
    make, named, stem = MODULES[module]
    weights, name = dense_weights(module), f"{named(stem)}.weight"
    weights[name] = weights[name].double()
    message = (
        rf"load_checkpoint: {re.escape(name)} has dtype torch\.float64, expected torch\.bfloat16 or torch\.float16"
    )
    with pytest.raises(TypeError, match=message):
        make().load_checkpoint(weights)


RANGES = ["input_quantizer._amax", "weight_quantizer.0._amax"]
OF_ACTIVATIONS = ["input_scale", "activation_scale", "input_zero_point", "qscale_act", "k_scale", *RANGES]


@pytest.mark.parametrize("companion", OF_ACTIVATIONS)
@pytest.mark.parametrize("module", MODULES)
def test_what_belongs_to_activations_is_left_alone(module: str, companion: str) -> None:
    make, named, stem = MODULES[module]
    make().load_checkpoint(dense_weights(module) | {f"{named(stem)}.{companion}": torch.ones(1)})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("eagle_linear.lora_A.weight", "weights has eagle_linear.lora_A.weight beside eagle_linear.weight"),
        ("eagle_linear.base_layer.weight", "weights has eagle_linear.base_layer.weight beside eagle_linear.weight"),
    ],
)
def test_modules_inside_mistral_s_fc_are_refused(name: str, message: str) -> None:
    weights = weights_of({"weight": torch.ones(D, W)}, "eagle_linear") | {name: torch.ones(4, W)}
    with pytest.raises(ValueError, match=f"^Eagle3Projection.load_checkpoint: {re.escape(message)}, expected only "):
        eagle3().load_checkpoint(weights)


def at(targets: object, location: str = "input", **more: object) -> dict:
    """compressed-tensors' config_groups of one transform."""
    apply = [{"targets": targets, "location": location, **more}]
    return {"config_groups": {"v": {"type": "hadamard", "apply": apply}}}


TRANSFORMS: dict[str, tuple[object, bool]] = {  # and whether one runs at fc and eh_proj
    "linear": (at(["Linear"]), True),
    "output": (at(["Linear"], "output"), True),
    "one-target": (at("re:.*(fc|eh_proj)$"), True),
    "no-target": (at(None), True),
    "no-groups": ({"v": "hadamard"}, True),
    "no-object": (["hadamard"], True),
    "apply-is-no-list": ({"config_groups": {"v": {"apply": "hadamard"}}}, True),
    "other-layer": (at(["re:.*q_proj$"]), False),
    "ignored": (at(["Linear"], ignore=["re:.*fc$", "eh_proj"]), False),
    "in-the-weight": (at(["Linear"], "weight_input", inverse=True), False),
    "nothing": ({"config_groups": {}}, False),
    "none": (None, False),
}


@pytest.mark.parametrize("is_quantized", [True, False], ids=["codes", "dense"])
@pytest.mark.parametrize("module", ["eagle3", "mtp"])
@pytest.mark.parametrize("case", TRANSFORMS)
def test_a_layer_with_a_transform_is_refused(case: str, module: str, is_quantized: bool, tmp_path: Path) -> None:
    """A rotated weight was multiplied by an input that is not rotated: its matrix may be beside another layer."""
    (transform, is_refused), (make, named, stem) = TRANSFORMS[case], MODULES[module]
    weights, name = dense_weights(module), f"{named(stem)}.weight"
    if is_quantized:
        weight = ek.quantize(weights[name], "fp8_row")
        weights |= {name: weight.codes, f"{name}_scale": weight.scales}
    config = {"quant_method": "compressed-tensors", "transform_config": transform}
    save_with(tmp_path, weights, config, None)
    layer = make()
    if not is_refused:
        layer.load_checkpoint(tmp_path)
        return
    op, where = f"{type(layer).__name__}.load_checkpoint", ""
    if isinstance(transform, dict) and "config_groups" in transform:
        where = ".config_groups.v"
    because = f"because the checkpoint says transform_config{where}"
    message = f"{op}: {name} is of a layer with a transform, expected one without, {because}"
    expected = pytest.raises(ValueError, match=f"^{re.escape(message)}$")
    with UnchangedTensors(list(layer.state_dict().values())), expected:
        layer.load_checkpoint(tmp_path)


HADAMARD = {"algorithm": "hadamard", "block_size": 128}
# layout, keys of the config, the key in the message, or None where fc is not in it
ROTATIONS: dict[str, tuple[str, dict, str | None]] = {
    "auto-round-fp8": ("hf-block", FP8_BLOCKS | {"rotation_config": HADAMARD}, "rotation_config"),
    "spinquant": ("hf-block", FP8_BLOCKS | {"spinquant_config": HADAMARD}, "spinquant_config"),
    "gptqmodel": ("gptqmodel-row", GPTQMODEL | {"rotation": "hadamard"}, "rotation"),
    "of-a-layer": (
        "compressed-int8",
        {"quant_method": "auto-round", "data_type": "int", "extra_config": {"fc": {"rotation_config": HADAMARD}}},
        "extra_config.fc.rotation_config",
    ),
    "left-out": (
        "hf-block",
        FP8_BLOCKS | {"rotation_config": HADAMARD, "modules_to_not_convert": ["fc"]},
        None,
    ),
    "none": ("hf-block", FP8_BLOCKS | {"rotation_config": {}, "rotation": None}, None),
}


@pytest.mark.parametrize("case", ROTATIONS)
def test_a_rotated_layer_is_refused(case: str, tmp_path: Path) -> None:
    """auto-round's rotation_config was looked for under its own quant_method alone, and it writes fp8 too."""
    layout, config, key = ROTATIONS[case]
    _, weights, _ = quantized_fc(layout)
    save_with(tmp_path, weights, config, None)
    layer = eagle3()
    if key is None:
        layer.load_checkpoint(tmp_path)
        return
    name = f"{(LAYOUTS | DIVISORS)[layout][2]}.weight"
    message = f"{name} is of a layer with a transform, expected one without, because the checkpoint says {key}"
    expected = pytest.raises(ValueError, match=f"^{re.escape(f'Eagle3Projection.load_checkpoint: {message}')}$")
    with UnchangedTensors(list(layer.state_dict().values())), expected:
        layer.load_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["{", "[" * 100_000], ids=["ended", "too-deep"])
def test_a_damaged_config_is_named(text: str, tmp_path: Path) -> None:
    _, weights, _ = quantized_fc("hf-block")
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(text)
    expected = f"^Eagle3Projection.load_checkpoint: '{tmp_path}/config.json' is damaged, expected JSON, because "
    with pytest.raises(ValueError, match=expected):
        eagle3().load_checkpoint(tmp_path)


@pytest.mark.parametrize("content", [[], {"quantization_config": None}, {"text_config": ["fp8"]}], ids=str)
def test_a_config_without_a_section_says_nothing(content: object, tmp_path: Path) -> None:
    _, weights, _ = quantized_fc("hf-block")
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert eagle3().load_checkpoint(tmp_path).fc.format == "fp8_block128"


@pytest.mark.parametrize(
    "nest",
    [
        lambda section: {"text_config": {"quantization_config": section}},
        lambda section: {"compression_config": section},
    ],
    ids=["text_config", "compression_config"],
)
def test_a_section_elsewhere_is_compared(nest: Callable, tmp_path: Path) -> None:
    _, weights, _ = quantized_fc("hf-block")
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(nest({"quant_method": "mxfp8"})))
    with pytest.raises(
        ValueError, match="is fp8_block128, expected mxfp8, because the checkpoint says quant_method mx"
    ):
        eagle3().load_checkpoint(tmp_path)
    own = {"quantization_config": FP8_BLOCKS}  # takes precedence
    (tmp_path / "config.json").write_text(json.dumps(nest({"quant_method": "mxfp8"}) | own))
    assert eagle3().load_checkpoint(tmp_path).fc.format == "fp8_block128"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", {"quantization_config": ["fp8"]}, "quantization_config of '{}' is a list"),
        (
            "config.json",
            {"text_config": {"quantization_config": "fp8"}},
            "text_config.quantization_config of '{}' is a str",
        ),
        ("hf_quant_config.json", {"quantization": 8}, "quantization of '{}' is a int"),
    ],
    ids=["list", "str", "int"],
)
def test_a_section_that_is_no_object_is_named(file: str, content: dict, message: str, tmp_path: Path) -> None:
    _, weights, _ = quantized_fc("hf-block")
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / file).write_text(json.dumps(content))
    expected = f"{message.format(tmp_path / file)}, expected an object, because what it says of the weights would be "
    with pytest.raises(ValueError, match=f"^{re.escape(f'Eagle3Projection.load_checkpoint: {expected}')}"):
        eagle3().load_checkpoint(tmp_path)


def test_int8_with_zeros_is_refused(tmp_path: Path) -> None:
    _, weights, _ = quantized_fc("compressed-int8")
    save_with(tmp_path, weights, in_group(num_bits=8, strategy="channel", symmetric=False), None)
    message = (
        "is int8_row, expected int8 without zeros, because the checkpoint says config_groups.a.weights.symmetric F"
    )
    with pytest.raises(ValueError, match=message):
        eagle3().load_checkpoint(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32], ids=str)
@pytest.mark.parametrize("shape", [(D,), (D, 1), (1,)], ids=str)
def test_int8_loads_beside_zero_points_of_zero(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Quark and sparseml write them for symmetric codes too."""
    weight, weights, _ = quantized_fc("compressed-int8")
    weights["fc.weight_zero_point"] = torch.zeros(shape, dtype=dtype)
    loaded = eagle3().load_checkpoint(weights).fc.quantized
    assert same_bits(loaded.dequantize(torch.float64), weight.dequantize(torch.float64))


@pytest.mark.parametrize("layout", ["compressed-int8", "compressed-row"])
def test_zero_points_that_would_be_lost_are_refused(layout: str) -> None:
    _, weights, _ = quantized_fc(layout)
    weights["fc.weight_zero_point"] = torch.zeros(D, 1, dtype=torch.int8)
    weights["fc.weight_zero_point"][3] = -7
    of_int8 = "fc.weight_zero_point is -7 at [3, 0], expected 0, because int8 is read without zero points"
    of_fp8 = f"weights has fc.weight_zero_point beside fc.weight, expected only {OF_CODES}, {LOST}"
    message = of_int8 if layout == "compressed-int8" else of_fp8
    layer = eagle3()
    expected = pytest.raises(ValueError, match=f"^{re.escape(f'Eagle3Projection.load_checkpoint: {message}')}$")
    with UnchangedTensors(list(layer.state_dict().values())), expected:
        layer.load_checkpoint(weights)


def test_mtp_loads_a_quantized_eh_proj() -> None:
    torch.manual_seed(3)
    weight = ek.quantize(torch.randn(D, 2 * H), "fp8_block128")
    prefix = "model.layers.61."
    weights = {f"{prefix}{name}.weight": torch.rand(H).bfloat16() for name in ("enorm", "hnorm")}
    weights |= {f"{prefix}eh_proj.weight": weight.codes, f"{prefix}eh_proj.weight_scale_inv": weight.scales}
    layer = ek.MTPProjection(ek.MTPConfig(H, D), dtype=torch.bfloat16).load_checkpoint(weights)
    dense = ek.MTPProjection(ek.MTPConfig(H, D)).load_checkpoint(
        {name: tensor.float() for name, tensor in weights.items() if "eh_proj" not in name}
        | {f"{prefix}eh_proj.weight": weight.dequantize(torch.float32)}
    )
    hidden, embeds = torch.randn(5, H).bfloat16(), torch.randn(5, H).bfloat16()
    expected = dense(hidden.float(), embeds=embeds.float()).double()
    result = layer(hidden, embeds=embeds).double()
    assert ((result - expected).norm(dim=1) / expected.norm(dim=1)).max() < 2**-7


@pytest.mark.parametrize("format", ["fp8_row", "fp8_block128", "int8_row", "nvfp4"])
def test_a_layer_quantizes_itself(format: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    layer = eagle3().load_checkpoint(weights_of({"weight": torch.randn(D, W).bfloat16()}))
    expected = ek.quantize(layer.fc.weight, format)
    assert same_bits(layer.quantize(format).fc.weight, expected.codes)
    assert re.search(rf"quantize to {format}: \[136, 192\], 0.0 MB of 0.1, relative error \d\.\d\de-\d\d", caplog.text)
    again = f"^Eagle3Projection.quantize: the weight is {format}, expected a dense weight"
    with pytest.raises(RuntimeError, match=again):
        layer.quantize(format)
    with pytest.raises(TypeError, match=f"^Eagle3Projection.prepack: fc.weight is {format}, expected bf16 or fp16"):
        layer.prepack()


def test_quantizing_where_no_kernel_reads_codes_is_a_warning(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    """A call took 33 times as long as that of the dense weight, and nothing said so."""
    eagle3().quantize("int8_row")
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    expected = "Eagle3Projection.quantize: every call will dequantize the int8_row weight: no kernel reads codes on cpu"
    assert warnings == ([f"eagle_kernels: {expected}"] if backend == "reference" else [])
