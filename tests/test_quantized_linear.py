"""The state of quantized layers: what is saved loads unchanged, and a state that does not fit changes nothing."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import eagle_kernels as ek
from backends import environment_of, needs_packing
from eagle_kernels.quantized_weight import FORMATS
from guards import UnchangedTensors, same_bits

save_file = pytest.importorskip("safetensors.torch").save_file

K, H, D = 3, 64, 136  # 136 rows: no block divides them
W = K * H
EXPECTED_NUMBERS = "expected a floating-point dtype of 16 bits or more"


def eagle3(format: str | None = None, seed: int = 0, bias: bool = False) -> ek.Eagle3Projection:
    config = ek.Eagle3Config(num_chunks=K, target_hidden_size=H, hidden_size=D, bias=bias, chunk_norm=True)
    layer = ek.Eagle3Projection(config, dtype=torch.bfloat16)
    torch.manual_seed(seed)
    layer.fc.weight.copy_(torch.randn(D, W) * 10**seed)
    return layer if format is None else layer.quantize(format)


def mtp(format: str | None = None) -> ek.MTPProjection:
    layer = ek.MTPProjection(ek.MTPConfig(H, D), dtype=torch.bfloat16)
    torch.manual_seed(2)
    layer.eh_proj.weight.copy_(torch.randn(D, 2 * H))
    return layer if format is None else layer.quantize(format)


def context(format: str | None = None) -> ek.ContextKV:
    layer = ek.ContextKV(ek.ContextKVConfig(K, H, H, 2, 2, 32), dtype=torch.bfloat16)
    return layer if format is None else layer.quantize(format)


def context_with_norms(format: str | None = None) -> ek.ContextKV:
    """Whose kv_proj stays dense."""
    config = ek.ContextKVConfig(K, H, H, 2, 2, 32, bias=True, chunk_norm=True, layer_norm=True)
    layer = ek.ContextKV(config, dtype=torch.bfloat16)
    return layer if format is None else layer.quantize(format)


def qkv(format: str | None = None) -> ek.Eagle3QKVProjection:
    """The second of two ranks."""
    config = ek.Eagle3QKVConfig(H, 4, 2, 32, bias=True)
    layer = ek.Eagle3QKVProjection(config, tp_rank=1, tp_size=2, dtype=torch.bfloat16)
    return layer if format is None else layer.quantize(format)


def streams(format: str | None = None, width: int = H, rows: int = D) -> ek.MTPStreamsProjection:
    layer = ek.MTPStreamsProjection(ek.MTPStreamsConfig(width, rows), dtype=torch.bfloat16)
    return layer if format is None else layer.quantize(format)


MODULES: dict[str, tuple[Callable, str]] = {
    "eagle3": (eagle3, "model."),
    "mtp": (mtp, "model.layers.61."),
    "streams": (streams, "mtp.0."),
    "context": (context, ""),
    "context-norms": (context_with_norms, "model."),
    "qkv": (qkv, "model."),
}


def with_random_weights(layer: nn.Module) -> nn.Module:
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape))
    return layer


def output_of(layer: nn.Module) -> torch.Tensor:
    torch.manual_seed(7)
    if isinstance(layer, ek.Eagle3Projection):
        return layer([torch.randn(3, H).bfloat16() for _ in range(K)])
    if isinstance(layer, ek.ContextKV):
        return layer.project(layer.combine([torch.randn(3, H).bfloat16() for _ in range(K)]))
    width = layer.config.hidden_size
    streams = layer.config.num_streams if isinstance(layer, ek.MTPStreamsProjection) else 1
    out = layer(torch.randn(3, streams * width).bfloat16(), embeds=torch.randn(3, width).bfloat16())
    return out[0] if isinstance(out, tuple) else out


def assert_restored(layer: nn.Module, saved: nn.Module) -> None:
    state, expected = layer.state_dict(), saved.state_dict()
    assert state.keys() == expected.keys()
    assert all(state[name].dtype == tensor.dtype for name, tensor in expected.items())
    assert all(same_bits(state[name], tensor) for name, tensor in expected.items())
    assert same_bits(output_of(layer), output_of(saved))


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("format", [None, *FORMATS, "bf16_12bit"])
def test_a_saved_state_dict_loads_as_a_checkpoint(module: str, format: str | None, tmp_path: Path) -> None:
    """nvfp4's global scale came back as its reciprocal: it was saved under compressed-tensors' name for a divisor. And
    the modules that join a checkpoint's projections refused their own names."""
    make, prefix = MODULES[module]
    saved, file = with_random_weights(make()), tmp_path / "model.safetensors"
    if format is not None:
        saved.quantize(format)
    save_file({prefix + name: tensor for name, tensor in saved.state_dict().items()}, file)
    for own in {None, "int8_row", format}:
        assert_restored(make(own).load_checkpoint(file), saved)


def streams_of_two(format: str, width: int = H, rows: int = D) -> ek.MTPStreamsProjection:
    """From e_proj and h_proj that were quantized apart."""
    torch.manual_seed(3)
    weights = {f"mtp.0.{name}.weight": torch.rand(width) for name in ("enorm", "hnorm")}
    for size, name in enumerate(("e_proj", "h_proj"), 1):
        part = ek.quantize(torch.randn(rows, width).bfloat16() * size, format)
        weights |= {f"mtp.0.{name}.weight": part.codes, f"mtp.0.{name}.weight_scale": part.scales}
        weights |= {} if part.global_scale is None else {f"mtp.0.{name}.weight_scale_2": part.global_scale}
    return streams(width=width, rows=rows).load_checkpoint(weights)


@pytest.mark.parametrize(("width", "rows"), [(H, D), (32, D), (128, 128), (128, 1)])
@pytest.mark.parametrize("format", FORMATS)
def test_two_projections_side_by_side_are_saved_and_restored(format: str, width: int, rows: int) -> None:
    """Scales of whole rows became two columns, which only the checkpoint's e_proj and h_proj brought back."""
    saved = streams_of_two(format, width, rows)
    for own in (None, "int8_row", format):
        assert_restored(streams(own, width, rows).load_checkpoint(dict(saved.state_dict())), saved)
    assert_restored(saved.load_checkpoint(dict(saved.state_dict())), streams_of_two(format, width, rows))
    again = streams_of_two(format, width, rows)
    with_random_weights(again.enorm)
    again.load_state_dict(saved.state_dict())
    assert_restored(again, saved)


@pytest.mark.parametrize("format", ["fp8_tensor", "fp8_row", "int8_row"])
def test_a_reload_of_two_projections_writes_where_the_weight_is(format: str) -> None:
    layer, update = streams_of_two(format), streams_of_two(format)
    with torch.no_grad():
        update.eh_proj.weight_scale.mul_(3)
    places = {name: tensor.data_ptr() for name, tensor in layer.state_dict().items()}
    layer.load_checkpoint(dict(update.state_dict()))
    assert {name: tensor.data_ptr() for name, tensor in layer.state_dict().items()} == places
    assert_restored(layer, update)


@pytest.mark.parametrize(
    ("own", "saved", "message"),
    [
        (streams, lambda: streams_of_two("int8_row"), "the layer is dense: load_checkpoint makes it a quantized one"),
        (qkv, lambda: qkv("fp8_row"), "the layer is dense: load_checkpoint makes it a quantized one"),
        (
            lambda: streams("int8_row"),
            lambda: streams_of_two("int8_row"),
            "eh_proj.weight_scale has shape (136, 2), expected (136, 1), because the layer is int8_row: "
            "MTPStreamsProjection.load_checkpoint takes either",
        ),
        (
            lambda: streams_of_two("fp8_tensor"),
            lambda: streams("fp8_tensor"),
            "eh_proj.weight_scale has shape (1, 1), expected (1, 2), because the layer is fp8_tensor: "
            "MTPStreamsProjection.load_checkpoint takes either",
        ),
    ],
    ids=["streams-dense", "qkv-dense", "one-weight", "two-weights"],
)
def test_load_state_dict_says_that_load_checkpoint_restores_it(own: Callable, saved: Callable, message: str) -> None:
    layer, other = own(), saved()
    with UnchangedTensors(list(layer.state_dict().values())), pytest.raises(RuntimeError, match=re.escape(message)):
        layer.load_state_dict(other.state_dict())
    assert_restored(layer.load_checkpoint(dict(other.state_dict())), other)


_BOTH = "expected one of them, because the first is of a saved state_dict, the second of a checkpoint"


def changed(name: str, change: Callable) -> Callable:
    return lambda state: state.update({name: change(state[name].clone())})


def nan_at_the_second(scales: torch.Tensor) -> torch.Tensor:
    scales[5, 1] = float("nan")
    return scales


BROKEN: dict[str, tuple[Callable, Callable, str]] = {
    "streams-both": (
        streams,
        lambda state: state.update({"h_proj.weight": torch.ones(D, H)}),
        f"weights has eh_proj.weight and h_proj.weight, {_BOTH}",
    ),
    "streams-inside": (
        streams,
        lambda state: state.update({"eh_proj.input_quantizer._pre_quant_scale": torch.ones(2 * H)}),
        "weights has eh_proj.input_quantizer._pre_quant_scale beside eh_proj.weight, expected only ",
    ),
    "qkv-both": (
        qkv,
        lambda state: state.update({"midlayer.self_attn.k_proj.weight": torch.ones(64, 2 * H)}),
        f"weights has qkv_proj.weight and midlayer.self_attn.k_proj.weight, {_BOTH}",
    ),
    "qkv-both-norms": (
        qkv,
        lambda state: state.update({"model.layers.0.hidden_norm.weight": torch.ones(H)}),
        f"weights has qkv_proj.weight and model.layers.0.hidden_norm.weight, {_BOTH}",
    ),
    "context-both": (
        context,
        lambda state: state.update({"layers.1.self_attn.v_proj.weight": torch.ones(64, H)}),
        f"weights has kv_proj.weight and layers.1.self_attn.v_proj.weight, {_BOTH}",
    ),
    "context-both-fc": (
        context,
        lambda state: state.update({"context_proj.weight": torch.ones(H, W)}),
        f"weights has kv_proj.weight and context_proj.weight, {_BOTH}",
    ),
    "twice": (
        qkv,
        lambda state: state.update({"model.hidden_norm.weight": torch.ones(H)}),
        "weights has hidden_norm.weight and model.hidden_norm.weight, expected one of them",
    ),
    "streams-no-norm": (streams, lambda state: state.pop("hnorm.weight"), "weights has no hnorm.weight, expected all"),
    "context-no-fc": (context, lambda state: state.pop("fc.weight"), "weights has no fc.weight, expected all of "),
    "qkv-no-bias": (qkv, lambda state: state.pop("qkv_proj.bias"), "weights has no qkv_proj.bias, expected all of "),
    "context-norm": (
        context,
        lambda state: state.update({"aux_norm.0.weight": torch.ones(H)}),
        "weights has aux_norm.0.weight, expected only ['fc.weight', 'hidden_norm.weight', 'k_norm.0.weight', "
        "'k_norm.1.weight', 'kv_proj.weight'], because the config has no other",
    ),
    "context-bias": (
        context,
        lambda state: state.update({"kv_proj.bias": torch.ones(256)}),
        "weights has kv_proj.bias, expected only ['fc.weight', ",
    ),
    "context-rows": (
        context,
        changed("kv_proj.weight", lambda weight: weight[1:]),
        "kv_proj.weight has shape (255, 64), expected (256, 64), because it is (L*W, H) with L = 2 and W = 128",
    ),
    "qkv-rank": (
        qkv,
        changed("qkv_proj.weight", lambda weight: torch.cat([weight, weight])),
        "qkv_proj.weight has shape (256, 128), expected (128, 128), because it is (R, 2H) with H = 64",
    ),
    "codes-without-scale": (
        lambda: qkv("fp8_row"),
        lambda state: state.pop("qkv_proj.weight_scale"),
        "weights has qkv_proj.weight in torch.float8_e4m3fn, expected its scale beside it",
    ),
    "nan-of-h_proj": (
        lambda: streams_of_two("int8_row"),
        changed("eh_proj.weight_scale", nan_at_the_second),
        "eh_proj.weight_scale[:, 1:2] is NaN at [5, 0], expected numbers",
    ),
    "three-columns": (
        lambda: streams_of_two("int8_row"),
        changed("eh_proj.weight_scale", lambda scales: scales[:, [0, 1, 1]]),
        "eh_proj.weight_scale is torch.float32 of shape (136, 3), expected (136, 1) of int8_row",
    ),
    "columns-that-no-kernel-reads": (
        lambda: streams("int8_row", 48),
        changed("eh_proj.weight_scale", lambda scales: scales[:, [0] * 7]),  # int8 in groups, but for the width
        "eh_proj.weight_scale is torch.float32 of shape (136, 7), expected (136, 1) of int8_row",
    ),
    "seven-columns-of-one-projection": (
        lambda: qkv("int8_row"),
        changed("qkv_proj.weight_scale", lambda scales: scales[:, [0] * 7]),
        "qkv_proj.weight_scale is torch.float32 of shape (128, 7), expected (128, 1) of int8_row",
    ),
}


@pytest.mark.parametrize(("make", "change", "message"), BROKEN.values(), ids=BROKEN)
def test_a_saved_state_dict_that_does_not_fit_is_refused(make: Callable, change: Callable, message: str) -> None:
    layer, state = make(), dict(with_random_weights(make()).state_dict())
    change(state)
    worded = pytest.raises(ValueError, match=rf"^{type(layer).__name__}\.load_checkpoint: {re.escape(message)}")
    with UnchangedTensors(list(layer.state_dict().values())), worded:
        layer.load_checkpoint(state)


def test_the_codes_of_rows_with_norms_of_their_own_become_numbers() -> None:
    """No call reads codes in parts; a kv_proj of codes in that module has no weight to multiply."""
    layer, saved = context_with_norms(), with_random_weights(context_with_norms())
    codes = ek.quantize(saved.kv_proj.weight, "fp8_row")
    state = saved.state_dict() | {"kv_proj.weight": codes.codes, "kv_proj.weight_scale": codes.scales}
    layer.load_checkpoint(state)
    assert torch.equal(layer.kv_proj.weight, codes.dequantize())


def under_the_old_name(layer: ek.Eagle3Projection) -> dict[str, torch.Tensor]:
    state = dict(layer.state_dict())
    return state | {"fc.weight_global_scale": state.pop("fc.weight_scale_2")}


def test_a_state_dict_of_the_old_name_is_refused() -> None:
    expected = (
        "Eagle3Projection.load_checkpoint: weights has fc.weight_global_scale beside fc.weight, expected "
        "weight_scale_2, because the divisor of compressed-tensors is beside weight_packed, and state_dict once called "
        "the multiplier so"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        eagle3().load_checkpoint(under_the_old_name(eagle3("nvfp4")))


OTHERS = {
    **{format: lambda format=format: eagle3(format, seed=1) for format in (*FORMATS, "bf16_12bit")},
    "dense": lambda: eagle3(seed=1),
    "packed": lambda: eagle3(seed=1).prepack(),
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("saved", [name for name in OTHERS if name != "packed"])
@pytest.mark.parametrize("own", [pytest.param(own, marks=needs_packing if own == "packed" else ()) for own in OTHERS])
def test_a_state_dict_of_another_format_changes_nothing(own: str, saved: str, strict: bool) -> None:
    """torch casts codes and skips scales: fp8_row loaded into int8_row was 112 % off, with all keys matching."""
    layer, state = OTHERS[own](), eagle3(None if saved == "dense" else saved).state_dict()
    if own == saved or (own, saved) == ("packed", "dense"):
        layer.load_state_dict(state, strict=strict)
        assert all(same_bits(tensor, state[name]) for name, tensor in layer.state_dict().items())
        return
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"load_state_dict: .*fc.weight.*, expected .*, because the layer is "):
        layer.load_state_dict(state, strict=strict)
    after = layer.state_dict()
    assert before.keys() == after.keys() and all(same_bits(after[name], before[name]) for name in before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            lambda s: s.pop("fc.weight_scale_2"),
            "state_dict has ['fc.weight', 'fc.weight_scale'], expected ['fc.weight', 'fc.weight_scale', "
            "'fc.weight_scale_2'], because the layer is nvfp4",
            id="no-global-scale",
        ),
        pytest.param(
            lambda s: s.update({"fc.weight_global_scale": s.pop("fc.weight_scale_2")}),
            "state_dict has ['fc.weight', 'fc.weight_scale', 'fc.weight_global_scale'], expected ['fc.weight', "
            "'fc.weight_scale', 'fc.weight_scale_2'], because the layer is nvfp4",
            id="old-name",
        ),
        pytest.param(
            lambda s: s.update({"fc.weight": s["fc.weight"].bfloat16()}),
            "fc.weight has dtype torch.bfloat16, expected torch.uint8, because the layer is nvfp4",
            id="cast",
        ),
        pytest.param(
            lambda s: s.update({"fc.weight_scale": s["fc.weight_scale"][1:]}),
            "fc.weight_scale has shape (135, 12), expected (136, 12), because the layer is nvfp4",
            id="other-rows",
        ),
        pytest.param(
            lambda s: s.update({"fc.weight": [1.0]}), "fc.weight is a list, expected a torch.Tensor", id="no-tensor"
        ),
    ],
)
def test_what_of_a_state_dict_does_not_fit_is_named(change: Callable, message: str) -> None:
    state, layer = dict(eagle3("nvfp4").state_dict()), eagle3("nvfp4", seed=1)
    change(state)
    worded = pytest.raises(RuntimeError, match=re.escape(f"load_state_dict: {message}"))
    with UnchangedTensors(list(layer.state_dict().values())), worded:
        layer.load_state_dict(state, strict=False)


@pytest.mark.parametrize("make", [eagle3, mtp, context], ids=["eagle3", "mtp", "context"])
@pytest.mark.parametrize("own", [None, "int8_row"])
def test_what_does_not_fit_leaves_the_norms_too(make: Callable, own: str | None) -> None:
    """torch loads the norms before the projection, which reported the mismatch when they had already changed."""
    layer, saved = nn.ModuleDict({"drafter": make(own)}), nn.ModuleDict({"drafter": make("fp8_row")})
    state = {name: tensor + 1 if "norm" in name else tensor for name, tensor in saved.state_dict().items()}
    assert any("norm" in name for name in state)
    worded = pytest.raises(RuntimeError, match=r"load_state_dict: .*drafter\..*, expected .*, because the layer is ")
    with UnchangedTensors(list(layer.state_dict().values())), worded:
        layer.load_state_dict(state)


@pytest.mark.parametrize("exceptions", [(0, 3), (3, 0), (1, 5)])
def test_another_weight_in_12_bits_has_other_exceptions(exceptions: tuple[int, int]) -> None:
    layer, update = (with_exceptions(number) for number in exceptions)
    assert layer.fc.weight_scale.shape != update.fc.weight_scale.shape
    state = {name: tensor.clone() for name, tensor in update.state_dict().items()}
    layer.load_state_dict(state)
    assert all(same_bits(tensor, state[name]) for name, tensor in layer.state_dict().items())
    x = torch.randn(2, W).bfloat16()
    assert torch.equal(layer(x), update(x))
    state["fc.weight_scale"] = state["fc.weight_scale"][:, :-1].clone()
    with UnchangedTensors(list(layer.state_dict().values())), pytest.raises(RuntimeError, match=r"\(136, 32 \+ 4 E\)"):
        layer.load_state_dict(state)


def with_exceptions(number: int) -> ek.Eagle3Projection:
    """A weight in 12 bits with this many exceptions in a row, numbers outside its 16 exponents."""
    layer = eagle3()
    layer.fc.weight.copy_(torch.rand(D, W) + 1)
    layer.fc.weight[:, : 15 + number] = 2.0 ** torch.arange(2, 17 + number)
    return layer.quantize("bf16_12bit")


def test_a_state_dict_of_other_layers_leaves_the_codes() -> None:
    layer = eagle3("fp8_row")
    with UnchangedTensors(list(layer.state_dict().values())):
        layer.load_state_dict({}, strict=False)


@pytest.mark.parametrize(
    "make", [mtp, lambda: ek.ContextKV(ek.ContextKVConfig(K, H, H, 2, 2, 32))], ids=["mtp", "context"]
)
def test_every_dense_projection_refuses_codes(make: Callable) -> None:
    layer = make()
    name = next(name for name in ("eh_proj", "kv_proj") if hasattr(layer, name))
    state = dict(layer.state_dict())
    state[f"{name}.weight"] = state[f"{name}.weight"].to(torch.float8_e4m3fn)
    with pytest.raises(
        RuntimeError, match=rf"load_state_dict: {name}\.weight has dtype torch.float8_e4m3fn, expected a "
    ):
        layer.load_state_dict(state)


GAINS = {"eagle3": (eagle3, "fc_norm.1.weight"), "mtp": (mtp, "hnorm.weight"), "context": (context, "k_norm.0.weight")}


@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.int32], ids=["fp8", "int8", "int32"])
@pytest.mark.parametrize("own", [None, "int8_row"])
@pytest.mark.parametrize("module", GAINS)
def test_a_gain_in_codes_changes_nothing(module: str, own: str | None, dtype: torch.dtype, assign: bool) -> None:
    """torch cast the codes of a gain to numbers, where load_checkpoint refused them."""
    make, name = GAINS[module]
    layer = nn.ModuleDict({"drafter": make(own)})
    state = {each: tensor + 1 if "norm" in each else tensor for each, tensor in layer.state_dict().items()}
    state[f"drafter.{name}"] = state[f"drafter.{name}"].to(dtype)
    message = f"load_state_dict: drafter.{name} has dtype {dtype}, {EXPECTED_NUMBERS}, because codes need their scale"
    before = layer.state_dict()
    with UnchangedTensors(list(before.values())), pytest.raises(RuntimeError, match=re.escape(message)):
        layer.load_state_dict(state, strict=False, assign=assign)
    assert all(tensor.data_ptr() == before[each].data_ptr() for each, tensor in layer.state_dict().items())


@pytest.mark.parametrize("own", [None, "int8_row"])
@pytest.mark.parametrize("is_alone", [True, False], ids=["fc", "layer"])
def test_a_bias_in_codes_changes_nothing(is_alone: bool, own: str | None) -> None:
    layer = eagle3(own, bias=True)
    module, name = (layer.fc, "bias") if is_alone else (layer, "fc.bias")
    state = {each: tensor + 1 if "norm" in each else tensor for each, tensor in module.state_dict().items()}
    state[name] = state[name].to(torch.int8)
    message = re.escape(f"load_state_dict: {name} has dtype torch.int8, {EXPECTED_NUMBERS}")
    with UnchangedTensors(list(layer.state_dict().values())), pytest.raises(RuntimeError, match=message):
        module.load_state_dict(state)


@pytest.mark.parametrize("format", [*FORMATS, "dense"])
def test_a_reload_writes_where_the_weight_is(format: str) -> None:
    """A CUDA graph captured before the reload reads that memory."""
    name = None if format == "dense" else format
    layer, update = eagle3(name, bias=True), eagle3(name, seed=1, bias=True)
    places = {name: tensor.data_ptr() for name, tensor in layer.state_dict().items()}
    layer.load_checkpoint(dict(update.state_dict()))
    loaded = layer.state_dict()
    assert {name: tensor.data_ptr() for name, tensor in loaded.items()} == places
    assert all(same_bits(loaded[name], tensor) for name, tensor in update.state_dict().items())
    x = torch.randn(2, W).bfloat16()
    assert torch.equal(layer(x), update(x))


@needs_packing
@pytest.mark.parametrize("format", [*FORMATS, "bf16_12bit", "dense"])
def test_a_packed_layer_without_other_parameters_loads_a_checkpoint(format: str) -> None:
    """The device was taken from a parameter or from codes; such a layer has neither, and raised AttributeError."""
    config, weight = ek.Eagle3Config(K, H, D), torch.randn(D, W).bfloat16()
    codes = ek.Eagle3Projection(config, dtype=torch.bfloat16)
    codes.fc.weight.copy_(weight)
    if format != "dense":
        codes.quantize(format)
    layer = ek.Eagle3Projection(config, dtype=torch.bfloat16).prepack()
    loaded = layer.load_checkpoint(dict(codes.state_dict())).state_dict()
    assert loaded.keys() == codes.state_dict().keys()
    assert all(same_bits(loaded[name], tensor) for name, tensor in codes.state_dict().items())


def test_another_format_is_another_layer() -> None:
    layer = eagle3("fp8_row", bias=True)
    layer.load_checkpoint(dict(eagle3("nvfp4", seed=1, bias=True).state_dict()))
    assert layer.fc.format == "nvfp4" and layer.fc.bias is not None


@pytest.mark.parametrize("own", [None, "fp8_row"])
@pytest.mark.parametrize("loaded", [None, "int8_row"])
def test_a_module_of_inference_tensors_loads_in_their_mode_alone(own: str | None, loaded: str | None) -> None:
    """Outside, its projection was replaced before torch refused to write the norms."""
    state = eagle3(loaded, seed=1).state_dict()
    with torch.inference_mode():
        layer = eagle3(own)
    fc = layer.fc
    expected = "an inference tensor, expected a call under torch.inference_mode\\(\\), because"
    message = rf"^Eagle3Projection.load_checkpoint: \S+ is {expected}"
    with UnchangedTensors([*layer.state_dict().values()]), pytest.raises(RuntimeError, match=message):
        layer.load_checkpoint(state)
    assert layer.fc is fc
    with torch.inference_mode():
        layer.load_checkpoint(state)
    assert all(same_bits(tensor, state[name]) for name, tensor in layer.state_dict().items())


@needs_packing
def test_a_packed_layer_is_not_quantized() -> None:
    because = "prepack has put its numbers into another order"
    message = f"Eagle3Projection.quantize: the weight is packed, expected a dense weight, because {because}"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        eagle3().prepack().quantize("fp8_row")


@pytest.mark.parametrize("kind", MODULES)
def test_a_module_without_memory_loads_nothing(kind: str) -> None:
    """A copy to meta succeeds and stores nothing."""
    make, _ = MODULES[kind]
    layer = make()
    state = {name: torch.randn_like(tensor) for name, tensor in layer.state_dict().items()}
    on_meta = make().to("meta")
    message = (
        r"load_checkpoint: \S+ is on meta, expected a module with memory: to_empty\(device=\.\.\.\) first, because"
    )
    with pytest.raises(RuntimeError, match=message):
        on_meta.load_checkpoint(state)
    loaded = on_meta.to_empty(device="cpu").load_checkpoint(state)
    assert all(same_bits(tensor, state[name]) for name, tensor in loaded.state_dict().items())


# By format the buffer, what replaces it, and the message.
REPLACED = [
    ("fp8_row", "weight_scale", lambda t: t.half(), "weight.scales has dtype torch.float16, expected torch.float32"),
    ("fp8_row", "weight", lambda t: t.view(torch.int8), "weight.codes has dtype torch.int8, expected torch.float8"),
    ("mxfp8", "weight_scale", lambda t: t.view(torch.uint8), "weight.scales has dtype torch.uint8, expected torch."),
    ("mxfp4", "weight_scale", lambda t: t.view(torch.float8_e4m3fn), "weight.scales has dtype torch.float8_e4m3fn"),
    ("nvfp4", "weight_scale_2", lambda t: None, "weight.global_scale is None, expected a number or a tensor"),
    ("nvfp4", "weight_scale_2", lambda t: torch.ones(2), "weight.global_scale has shape (2,), expected one element"),
    ("int8_row", "weight", lambda t: None, "weight.codes is a NoneType, expected a torch.Tensor"),
    ("int8_row", "weight", lambda t: t[0], "weight.codes has shape (192,), expected two dimensions"),
    ("int8_row", "weight", lambda t: t.t().contiguous().t(), "weight.codes has strides (1, 136), expected"),
    ("int8_row", "weight_scale", lambda t: None, "weight.scales is a NoneType, expected a torch.Tensor"),
    ("int8_row", "weight_scale", lambda t: t.flatten(), "weight.scales has shape (136,), expected two dimensions"),
    ("int8_row", "weight_scale", lambda t: t[1:], "weight.scales has shape (135, 1), expected (136, 1)"),
    ("bf16_12bit", "weight", lambda t: t[:, 1:], "weight.codes has shape (136, 383), expected (136, 384)"),
    ("bf16_12bit", "weight_scale", lambda t: t[:, :28], "weight.scales has shape (136, 28), expected (136, 32 + 4 E)"),
]  # fmt: skip


@pytest.mark.parametrize(("backend", "shape"), [("cpu", (3,)), ("cpu", ()), ("reference", (3,))], ids=str)
@pytest.mark.parametrize(("format", "name", "change", "message"), REPLACED, ids=[f"{r[0]}-{r[3]}" for r in REPLACED])
def test_a_buffer_that_does_not_fit_the_format_is_named(
    format: str, name: str, change: Callable, message: str, backend: str, shape: tuple[int, ...]
) -> None:
    """Codes viewed as int8 were read as int8, and without its global scale nvfp4 was multiplied by one."""
    layer, out = eagle3(format), torch.full((*shape, D), 7.0).bfloat16()
    setattr(layer.fc, name, change(getattr(layer.fc, name)))
    chunks = [torch.randn(*shape, H).bfloat16() for _ in range(K)]
    raises = pytest.raises((TypeError, ValueError), match=f"^norm_concat_linear: {re.escape(message)}")
    with environment_of(EAGLE_KERNELS_BACKEND=backend), UnchangedTensors([out]), raises:
        layer(chunks, out=out)


@pytest.mark.parametrize("change", ["parameter", "parametrized"])
def test_codes_that_are_no_buffer_are_named(change: str) -> None:
    """It was a KeyError that said 'weight'."""
    layer = eagle3("int8_row")
    if change == "parameter":
        layer.fc.weight = nn.Parameter(torch.randn(D, W).bfloat16(), requires_grad=False)
    else:
        parametrize.register_parametrization(layer.fc, "weight", nn.Identity())
    message = "^norm_concat_linear: weight is no buffer of the layer, expected what int8_row stores, because"
    with pytest.raises(RuntimeError, match=message):
        layer([torch.randn(2, H).bfloat16() for _ in range(K)])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("format", ["fp8_row", "bf16_12bit"])
def test_a_layer_is_whole_at_every_step_of_a_move_and_of_a_reload(format: str, bias: bool) -> None:
    """In a move the bias was taken out, and a reload put uninitialized exponents in, which other threads met."""
    layer = eagle3(format, bias=bias)
    chunks = [torch.randn(2, H).bfloat16() for _ in range(K)]
    expected, seen = layer(chunks), []

    def look(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(torch.equal(layer(chunks), expected))
        return tensor

    class Looking(dict):  # a state_dict, at each of whose tensors the layer is called
        def __getitem__(self, name: str) -> torch.Tensor:
            return look(super().__getitem__(name))

    layer._apply(look)
    assert len(seen) == len(layer.state_dict())
    layer.fc._load_from_state_dict(Looking(layer.fc.state_dict()), "", {}, True, [], [], [])
    assert all(seen)
    assert len(seen) > len(layer.state_dict())


def test_a_move_changes_the_dtype_of_the_bias_alone() -> None:
    layer = eagle3("nvfp4", bias=True)
    before = {name: tensor.dtype for name, tensor in layer.fc.state_dict().items()}
    after = {name: tensor.dtype for name, tensor in layer.half().fc.state_dict().items()}
    assert after == before | {"bias": torch.float16}
    assert not layer.fc.bias.requires_grad
