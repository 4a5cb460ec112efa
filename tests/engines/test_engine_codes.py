"""The layouts in which engines keep a quantized linear layer, read without a copy."""

import sys
import types
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import eagle_kernels as ek
from eagle_kernels.engines import engine_codes
from eagle_kernels.engines.engine_codes import EngineCodes
from eagle_kernels.engines.projection import EngineProjection
from eagle_kernels.engines.sglang import unsupported
from eagle_kernels.engines.vllm import combine
from engines.watched_parameter import Parameter

D, W = 160, 320


class Fp8: ...


class Marlin(Fp8): ...


METHODS = {f"{__name__}:Fp8"}


class EngineLinear(nn.Module):
    """A layer as an engine leaves it after loading, with a weight quantized to `format`."""

    def __init__(self, format: str, **changes: object) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.quantized = ek.quantize(torch.randn(D, W), format)
        self.output_size, self.input_size, self.params_dtype = D, W, torch.bfloat16
        self.quant_method, self.bias, self.logical_widths = Fp8(), None, [D]
        codes, scales = self.quantized.codes, self.quantized.scales
        self.weight_block_size = None
        if "block" in format:
            self.weight_block_size = list(self.quantized.block)
            self.weight, self.weight_scale_inv = parameter(codes), parameter(scales)
        else:
            self.weight, self.weight_scale = parameter(codes.t()), parameter(scales.reshape(-1))
        for name, value in changes.items():
            setattr(self, name, value)


def parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def read(linear: nn.Module) -> EngineCodes | None:
    return engine_codes.read(linear, METHODS)


@pytest.mark.parametrize("format", ["fp8_tensor", "fp8_row", "int8_row", "fp8_block128", "fp8_block32"])
def test_each_layout_is_read_where_it_is(format: str) -> None:
    linear = EngineLinear(format)
    weight = read(linear).weight
    assert weight.format == format and weight.codes.data_ptr() == linear.weight.data_ptr()
    truth = linear.quantized.dequantize(torch.float64)
    assert torch.equal(weight.dequantize(torch.float64), truth)
    x = torch.randn(5, W).bfloat16()
    got = ek.norm_concat_linear([x], weight, norm="none")
    exact = x.double() @ truth.t()
    assert (got.double() - exact).norm() < 2**-8 * exact.norm()


def test_the_blocks_may_be_those_of_the_method() -> None:
    linear = EngineLinear("fp8_block128", weight_block_size=None)
    linear.quant_method.weight_block_size = [128, 128]
    assert read(linear).weight.format == "fp8_block128"
    assert torch.equal(read(linear).weight.dequantize(torch.float64), linear.quantized.dequantize(torch.float64))


def test_a_shard_of_the_rows_is_a_weight_of_its_own() -> None:
    linear = EngineLinear("fp8_row", output_size=2 * D, output_size_per_partition=D)
    assert read(linear).weight.shape == (D, W)


def test_a_shard_that_an_engine_gathers_is_not_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """That would take all ranks, and one may have failed before."""
    unquant = types.SimpleNamespace(UnquantizedLinearMethod=object)
    monkeypatch.setitem(sys.modules, "sglang.srt.layers.quantization.unquant", unquant)
    monkeypatch.setattr(unsupported, "_QUANTIZED", METHODS)
    monkeypatch.setattr(combine, "QUANTIZED", METHODS)
    shard, whole = EngineLinear("fp8_row", output_size=2 * D, output_size_per_partition=D), EngineLinear("fp8_row")
    assert combine.read_codes(shard) is None
    assert unsupported.linear_unsupported_reason(shard, codes=True) == "its codes are a shard"
    for linear, column_shard in ((shard, True), (whole, False), (whole, True)):
        assert combine.read_codes(linear, column_shard=column_shard).weight.shape == (D, W)
        assert unsupported.linear_unsupported_reason(linear, codes=True, column_shard=column_shard) is None


def test_rows_are_read_with_their_padding() -> None:
    padded = torch.zeros(D, W + 256, dtype=torch.float8_e4m3fn)
    linear = EngineLinear("fp8_row")
    padded.view(torch.uint8)[:, :W] = linear.quantized.codes.view(torch.uint8)
    linear.weight = parameter(padded[:, :W].t())
    assert torch.equal(read(linear).weight.dequantize(torch.float64), linear.quantized.dequantize(torch.float64))


@pytest.mark.parametrize("name", ["weight_scale", "weight"])
def test_what_the_layer_has_now_is_read(name: str) -> None:
    linear = EngineLinear("fp8_row")
    held, loaded = read(linear), linear.quantized.dequantize(torch.float64)
    assert held.weight is held.weight  # cached: not built anew in each call
    linear.weight_scale.data.mul_(2)
    assert torch.equal(held.weight.dequantize(torch.float64), 2 * loaded)
    now = getattr(linear, name)
    setattr(linear, name, parameter(now.float().neg().to(now.dtype)))
    assert torch.equal(held.weight.dequantize(torch.float64), -2 * loaded)


@pytest.mark.parametrize("format", ["fp8_row", "fp8_block128"])
def test_a_parameter_of_vllms_own_class_is_asked_nothing_again(format: str) -> None:
    linear = EngineLinear(format)
    for name, held in list(linear.named_parameters()):
        setattr(linear, name, Parameter(held.data))
    codes = read(linear)
    first = codes.weight
    Parameter.seen.clear()
    assert codes.weight is first and Parameter.seen == []
    linear.weight.data = linear.weight.data.clone(memory_format=torch.preserve_format)
    assert codes.weight.codes.data_ptr() == linear.weight.data_ptr() != first.codes.data_ptr()


@pytest.mark.parametrize("format", ["fp8_tensor", "fp8_row", "int8_row", "fp8_block32"])
def test_a_compiled_model_reads_them_in_one_graph(format: str) -> None:
    """Dynamo breaks a graph where addresses are compared, and vLLM compiles layer 0 and MTP layers in one graph."""
    linear, x = EngineLinear(format), torch.randn(5, W).bfloat16()
    projection, scales = EngineProjection(read(linear), 1), engine_codes._scales_of(linear)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: projection([x]), fullgraph=True, backend="aot_eager")
    for _ in range(2):
        assert torch.equal(compiled(x), projection([x]))
        scales.data.mul_(3)


@pytest.mark.parametrize("name", ["weight_scale", "weight"])
def test_new_memory_of_a_parameter_is_read(name: str) -> None:
    """After `param.data = new` the op still read the old codes."""
    linear = EngineLinear("fp8_row")
    held, loaded = read(linear), linear.quantized.dequantize(torch.float64)
    assert held.weight is held.weight
    now = getattr(linear, name)
    # Keeps each row contiguous in memory: a copy with contiguous columns is another layout.
    now.data = torch.empty_like(now, memory_format=torch.preserve_format).copy_(now.float().neg().to(now.dtype))
    assert torch.equal(held.weight.dequantize(torch.float64), -loaded)


def as_contiguous(linear: EngineLinear) -> None:
    linear.weight = parameter(linear.weight.contiguous())


def with_(**changes: object) -> Callable[[EngineLinear], None]:
    return lambda linear: [setattr(linear, name, value) for name, value in changes.items()] and None


@pytest.mark.parametrize(
    ("format", "change"),
    [
        pytest.param("fp8_row", as_contiguous, id="a-copy-by-columns"),
        pytest.param("fp8_row", with_(quant_method=Marlin()), id="a-subclass"),
        pytest.param("fp8_row", with_(base_layer=nn.Linear(1, 1)), id="lora"),
        pytest.param("fp8_row", with_(weight=parameter(torch.zeros(W, D))), id="numbers"),
        pytest.param("fp8_row", with_(weight=None), id="packed-elsewhere"),
        pytest.param("fp8_row", with_(weight_scale=None), id="no-scales"),
        pytest.param("fp8_row", with_(weight_scale=parameter(torch.ones(D - 1))), id="scales-of-other-rows"),
        pytest.param("fp8_row", with_(weight_scale=parameter(torch.ones(D).bfloat16())), id="scales-of-16-bits"),
        pytest.param("fp8_tensor", with_(output_size=2 * D), id="a-shard-without-its-rows"),
        pytest.param("int8_row", with_(weight_scale=parameter(torch.ones(1))), id="int8-with-one-scale"),
        pytest.param("fp8_block128", with_(weight_block_size=[64, 64]), id="other-blocks"),
        pytest.param("fp8_block128", with_(weight_block_size=[128, 64]), id="blocks-not-square"),
        pytest.param("fp8_block128", with_(logical_widths=[D // 2, D // 2]), id="merged-inside-a-block"),
        pytest.param("fp8_block128", with_(weight_scale_inv=parameter(torch.ones(3, 2).t())), id="scales-by-columns"),
    ],
)
def test_what_fits_no_layout_stays_with_the_engine(format: str, change: Callable[[EngineLinear], None]) -> None:
    linear = EngineLinear(format)
    assert read(linear) is not None
    change(linear)
    assert read(linear) is None


def test_a_layer_that_is_repacked_later_is_not_current() -> None:
    linear = EngineLinear("fp8_row")
    held = read(linear)
    assert held.is_current
    linear.weight = parameter(torch.zeros(W // 4, D, dtype=torch.int32))
    assert not held.is_current
