"""The state of quantized layers: what is saved loads unchanged, and a state that does not fit changes nothing."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import eagle_kernels as ek
from backends import needs_packing
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


@pytest.mark.parametrize("format", [*FORMATS, "bf16_12bit"])
def test_a_saved_state_dict_loads_as_a_checkpoint(format: str, tmp_path: Path) -> None:
    """nvfp4's global scale came back as its reciprocal: it was saved under compressed-tensors' name for a divisor."""
    for make, prefix in ((eagle3, ""), (mtp, "model.layers.61.")):
        layer, file = make(format), tmp_path / "model.safetensors"
        save_file({prefix + name: tensor for name, tensor in layer.state_dict().items()}, file)
        loaded = make().load_checkpoint(file).state_dict()
        assert loaded.keys() == layer.state_dict().keys()
        assert all(same_bits(loaded[name], tensor) for name, tensor in layer.state_dict().items())


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
