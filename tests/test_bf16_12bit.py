"""bf16 in 12 bits a number: every number comes back, and a product has the bits of that with the bf16 weight."""

import dataclasses
import itertools
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import eagle_kernels as ek
from accuracy import expect
from backends import CPU_ISAS, environment_of, needs_compiled
from cases import Case, Operands, operands
from eagle_kernels import bf16_12bit, plan
from eagle_kernels.quantized_weight import COMPRESSED, CompressedWeight, QuantizedWeight
from guards import GuardedRows, UnchangedTensors, between_forbidden_pages, same_bits
from primitives import run_primitive

NAN = float("nan")


def compress(weight: Tensor) -> CompressedWeight:
    compressed = ek.quantize(weight, COMPRESSED)
    assert isinstance(compressed, CompressedWeight)
    return compressed


def weight_of(kind: str, D: int, W: int) -> Tensor:
    """By kind: numbers as weights have them; so many large and small ones that rows have numbers without a code; any
    bits."""
    if kind == "any bits":
        bits = torch.randint(-(1 << 15), 1 << 15, (D, W)).to(torch.int16)
        return torch.where(bits >> 7 & 0xFF == 0xFF, bits & 0x3FFF, bits).view(torch.bfloat16)  # no infinity or NaN
    normal = torch.randn(D, W) * W**-0.5
    return (normal * torch.exp(4 * torch.randn(D, W)) if kind == "far apart" else normal).bfloat16()


KINDS = ["normal", "far apart", "any bits"]


@pytest.mark.parametrize("W", [1, 31, 128, 129, 700])
@pytest.mark.parametrize("kind", KINDS)
def test_every_number_comes_back(kind: str, W: int) -> None:
    weight = weight_of(kind, 37, W)
    compressed = compress(weight)
    assert compressed.shape == (37, W) and same_bits(compressed.dequantize(), weight)
    assert same_bits(compressed.dequantize(torch.float64), weight.double())
    assert compressed.codes.shape == (37, 192 * -(-W // 128)) and compressed.codes.dtype == torch.uint8


def test_a_weight_that_is_encoded_in_parts() -> None:
    """Rows are encoded about 4 M numbers at a time; this weight has more."""
    weight = weight_of("far apart", 71, bf16_12bit.MAX_WIDTH)
    assert same_bits(compress(weight).dequantize(), weight)


def test_every_bit_pattern_comes_back() -> None:
    """NaN, infinity, zeros and subnormal numbers too."""
    weight = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16).reshape(16, 4096)
    for rows in (weight, weight[:, torch.randperm(4096)], weight.reshape(4096, 16)):
        assert same_bits(compress(rows.contiguous()).dequantize(), rows)


def test_a_strided_weight() -> None:
    weight = torch.randn(9, 300).bfloat16()[:, 3:203]
    assert same_bits(compress(weight).dequantize(), weight)


def test_a_row_in_the_order_of_its_codes() -> None:
    """Decoded here as the comments of the module and of the header describe."""
    W = 300
    weight = weight_of("far apart", 5, W)
    codes, exponents = bf16_12bit.encode(weight)
    bits = weight.view(torch.int16)
    for d in range(5):
        beside = exponents[d, 32:].contiguous().view(torch.int16).view(-1, 2)
        listed = {int(column) & 0xFFFF: int(number) & 0xFFFF for column, number in beside}
        listed.pop(0xFFFF, None)
        assert list(listed) == sorted(listed)
        for c in range(W):
            group, line, column = c // 128 * 192, c % 128 // 64, c % 64
            byte = column % 32 // 8 * 16 + column // 32 * 8 + column % 8
            index = int(codes[d, group + 128 + byte]) >> 4 * line & 15
            number = int(codes[d, group + 64 * line + byte])
            low, high = int(exponents[d, index]), int(exponents[d, 16 + index])
            decoded = (number & 0x80 | high) << 8 | number & 0x7F | low
            assert listed.get(c, decoded) == int(bits[d, c]) & 0xFFFF


def test_three_quarters_of_the_bytes() -> None:
    weight = weight_of("normal", 64, 12288)
    compressed = compress(weight)
    assert 0.75 < compressed.nbytes / weight.nbytes < 0.756
    assert compressed.scales.shape[1] <= 32 + 4 * 12  # at most 12 numbers without a code in any row


def test_what_cannot_be_compressed_is_refused() -> None:
    with pytest.raises(TypeError, match=r"quantize: weight is torch.float16, expected torch.bfloat16"):
        ek.quantize(torch.ones(2, 3, dtype=torch.float16), COMPRESSED)
    with pytest.raises(ValueError, match=r"quantize: weight has shape \(1, 65536\), expected .*at most 65535 columns"):
        ek.quantize(torch.ones(1, 65536, dtype=torch.bfloat16), COMPRESSED)
    with pytest.raises(ValueError, match=r"QuantizedWeight: format is 'bf16_12bit', expected one of"):
        QuantizedWeight(torch.zeros(2, 192, dtype=torch.uint8), torch.zeros(2, 32, dtype=torch.uint8), COMPRESSED)


@pytest.fixture(params=CPU_ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with environment_of(EAGLE_KERNELS_CPU_ISA=request.param):
        assert plan.cpu_isa() == request.param
        yield request.param


def arguments_of(call: Operands, out: Tensor) -> dict:
    epilogue = {name: call.projection[name] for name in ("bias", "post_norm_weight")}
    return {"chunks": call.chunks, **call.sources, **epilogue, "out": out}


# The argument `kernel` of the primitive for codes, and the primitive for the weight itself.
KERNELS = {0: "norm_concat_linear_out", 1: "norm_concat_linear_few_rows_out"}


def project(call: Operands, weight: QuantizedWeight, out: Tensor, kernel: int = 0) -> Tensor:
    tensors = dict(zip(("codes", "scales", "global_scale"), weight.tensors, strict=True))
    arguments = {**arguments_of(call, out), **tensors, "block": weight.block, "kernel": kernel}
    run_primitive(torch.ops.eagle_kernels_C, "norm_concat_linear_quantized", arguments)
    return out


def poisoned(call: Operands, D: int) -> Tensor:
    return torch.full((call.N, D), NAN, dtype=torch.bfloat16)


def check(case: Case, weight: Tensor) -> None:
    """The bits of the product with the weight itself by the same kernels, and float64 truth."""
    call, D = operands(case), weight.shape[0]
    compressed = compress(weight)
    for kernel, primitive in KERNELS.items():
        dense = poisoned(call, D)
        ops = SimpleNamespace(norm_concat_linear_out=getattr(torch.ops.eagle_kernels_C, primitive))
        run_primitive(ops, "norm_concat_linear", {**arguments_of(call, dense), "weight": weight})
        guarded = GuardedRows(call.N, D, torch.bfloat16)
        with UnchangedTensors([*call.tensors(), compressed.codes, compressed.scales]):
            project(call, compressed, guarded.view, kernel)
        guarded.check_around()
        assert same_bits(guarded.view, dense), primitive
        truth = dataclasses.replace(call, projection=call.projection | {"weight": weight.double()})
        expect(truth)[1].check(guarded.view)


@needs_compiled
@pytest.mark.usefixtures("poisoned_memory", "isa")
class TestTheKernel:
    @pytest.mark.parametrize("T", [0, 1, 2, 5, 16, 17, 33, 64])
    @pytest.mark.parametrize("kind", ["normal", "far apart"])
    def test_bits_are_those_of_the_weight_itself(self, kind: str, T: int) -> None:
        """Widths that end inside a group, and rows of the weight that end inside a panel."""
        check(Case("bf16", (96, 96, 96), T, D=67), weight_of(kind, 67, 288))

    def test_strided_codes_and_exponents(self) -> None:
        weight, call = compress(weight_of("far apart", 33, 300)), operands(Case("bf16", (300,), 5, D=33))
        apart = [torch.full((33, tensor.shape[1] + 7), 0xFF, dtype=torch.uint8) for tensor in weight.tensors[:2]]
        for wider, tensor in zip(apart, weight.tensors, strict=False):
            wider[:, 3:-4] = tensor
        codes, exponents = (wider[:, 3:-4] for wider in apart)
        strided = QuantizedWeight.of_tensors(codes, exponents, None, weight.format, weight.block)
        for kernel in KERNELS:
            ours, expected = (project(call, each, poisoned(call, 33), kernel) for each in (strided, weight))
            assert same_bits(ours, expected), kernel

    @pytest.mark.parametrize(
        ("widths", "D"), [((1,), 1), ((101, 102), 31), ((128,), 32), ((577, 90), 33), ((2000,), 70)]
    )
    def test_odd_widths(self, widths: tuple[int, ...], D: int) -> None:
        for T, post_norm in ((3, ""), (19, "dtype")):
            case = Case("bf16", widths, T, D=D, bias="fp32", post_norm=post_norm)
            check(case, weight_of("far apart", D, sum(widths)))

    def test_wide_weights_and_many_rows(self) -> None:
        """These have blocks along K*H: a panel is then widened from its middle on."""
        check(Case("bf16", (4100, 4100), 6, D=9), weight_of("far apart", 9, 8200))
        check(Case("bf16", (4100, 4100), 300, D=33), weight_of("far apart", 33, 8200))

    @pytest.mark.parametrize("value", [NAN, float("inf"), -float("inf")])
    def test_a_number_that_is_none_is_in_its_column_alone(self, value: float) -> None:
        call, weight = operands(Case("bf16", (200,), 4, "none", D=35)), weight_of("normal", 35, 200)
        expected = project(call, compress(weight), poisoned(call, 35))
        weight[7, 199], weight[34, 0] = value, value
        spoiled = project(call, compress(weight), poisoned(call, 35))
        assert not spoiled[:, [7, 34]].isfinite().any()
        others = [d for d in range(35) if d not in (7, 34)]
        assert same_bits(spoiled[:, others], expected[:, others])

    @pytest.mark.parametrize("at", ["begin", "end"])
    @pytest.mark.parametrize(("W", "D"), [(32, 1), (96, 35), (352, 33)])
    @pytest.mark.parametrize("kind", ["normal", "far apart"])
    def test_nothing_is_read_beyond_codes_and_exponents(self, kind: str, W: int, D: int, at: str) -> None:
        """Between pages that trap: a failure is a segmentation fault."""
        weight = compress(weight_of(kind, D, W))
        codes, exponents = (between_forbidden_pages(tensor, at) for tensor in (weight.codes, weight.scales))
        guarded = QuantizedWeight.of_tensors(codes, exponents, None, weight.format, weight.block)
        for T, kernel in itertools.product((3, 13), KERNELS):
            call = operands(Case("bf16", (W,), T, D=D))
            ours, expected = (project(call, each, poisoned(call, D), kernel) for each in (guarded, weight))
            assert same_bits(ours, expected), (T, kernel)

    @pytest.mark.parametrize("T", [1, 40])
    def test_columns_of_any_value_touch_no_memory(self, T: int) -> None:
        """A file may hold anything: columns out of range and out of order, and rows that are full of them."""
        D, W = 33, 300
        weight, call = compress(weight_of("normal", D, W)), operands(Case("bf16", (W,), T, D=D))
        expected = {kernel: project(call, weight, poisoned(call, D), kernel) for kernel in KERNELS}
        tables = weight.scales[:, :32]
        for fill in (torch.randint(0, 256, (D, 4 * 50)), torch.full((D, 4 * 50), 0xFF), torch.zeros(D, 4 * 50)):
            scales = between_forbidden_pages(torch.cat((tables, fill.to(torch.uint8)), 1))
            broken = QuantizedWeight.of_tensors(weight.codes, scales, None, weight.format, weight.block)
            guarded = GuardedRows(call.N, D, torch.bfloat16)
            for kernel in KERNELS:
                project(call, broken, guarded.view, kernel)
                guarded.check_around()
                if (fill == 0xFF).all():  # these entries name no column
                    assert same_bits(guarded.view, expected[kernel])

    def test_what_does_not_fit_is_refused(self) -> None:
        D, W = 33, 300
        weight, call = compress(weight_of("normal", D, W)), operands(Case("bf16", (W,), 3, D=D))
        codes, scales, _ = weight.tensors
        for wrong in (
            (codes[:, :-1], scales),
            (codes[:-1], scales),
            (codes, scales[:-1]),
            (codes, scales[:, :28]),
            (codes, torch.cat((scales, scales), 1)[:, : scales.shape[1] + 2]),
        ):
            out = poisoned(call, D)
            broken = QuantizedWeight.of_tensors(*wrong, None, weight.format, weight.block)
            with pytest.raises(RuntimeError, match="norm_concat_linear_quantized"):
                project(call, broken, out)
            assert out.isnan().all()
        wider = operands(Case("fp32", (W,), 3, D=D))
        with pytest.raises(RuntimeError, match="chunks"):
            project(wider, weight, torch.empty(3, D))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_public_op(dtype: torch.dtype) -> None:
    """Rows that are not bf16 are multiplied by torch: correct, but slow."""
    chunks, weight = [torch.randn(5, 100).to(dtype) for _ in range(3)], weight_of("normal", 40, 300)
    weight[:, ::7] *= 2.0 ** -torch.arange(40).unsqueeze(1)
    compressed = compress(weight)
    out = torch.full((5, 40), NAN, dtype=dtype)
    ek.norm_concat_linear(chunks, compressed, norm="none", out=out)
    exact = torch.cat(chunks, 1).double() @ weight.double().t()
    bound = torch.cat(chunks, 1).double().abs() @ weight.double().abs().t()
    assert ((out.double() - exact).abs() <= bound * 1e-5 + exact.abs() * torch.finfo(dtype).eps).all()
    chosen = ek.explain("norm_concat_linear", chunks, compressed, norm="none")
    on_cpu = dtype == torch.bfloat16 and chosen.backend == "cpu"
    fused = plan.Kernel.DOTS if plan.cpu_isa() in plan.DENSE_DOTS_ROWS[torch.bfloat16] else plan.Kernel.FUSED
    assert chosen.kernel is (fused if on_cpu else plan.Kernel.TORCH)
    assert "12 bits" in chosen.reason or chosen.backend == "reference"


def test_a_layer_keeps_its_results_and_its_state() -> None:
    config = ek.Eagle3Config(3, 96, 80, chunk_norm=True)
    layer = ek.Eagle3Projection(config, dtype=torch.bfloat16)
    for parameter in layer.parameters():
        parameter.data.normal_(0, 0.1)
    chunks = [torch.randn(4, 96).bfloat16() for _ in range(3)]
    expected, dense = layer(chunks), layer.fc.weight.clone()
    layer.quantize(COMPRESSED)
    assert same_bits(layer(chunks), expected)
    state = layer.state_dict()
    other = ek.Eagle3Projection(config, dtype=torch.bfloat16)
    other.fc.weight.data.copy_(dense)
    other.quantize(COMPRESSED).load_state_dict(state)
    assert same_bits(other(chunks), layer(chunks))
    assert same_bits(other.fc.quantized.dequantize(), dense)


def test_a_layer_keeps_its_weight_where_another_does_not_fit() -> None:
    """Its exponents were about to be replaced by those of another number of exceptions."""
    kept, other = weight_of("normal", 80, 288), weight_of("any bits", 80, 288)
    layer = ek.Eagle3Projection(ek.Eagle3Config(3, 96, 80), dtype=torch.bfloat16)
    layer.fc.weight.data.copy_(kept)
    layer.quantize(COMPRESSED)
    codes = compress(other)
    assert codes.scales.shape != layer.fc.weight_scale.shape
    for module, prefix in ((layer, "fc."), (layer.fc, "")):
        with pytest.raises(RuntimeError, match=rf"{prefix}weight has shape"):
            module.load_state_dict({f"{prefix}weight": codes.codes[:79], f"{prefix}weight_scale": codes.scales})
        assert same_bits(layer.fc.quantized.dequantize(), kept)
    layer.load_state_dict({"fc.weight": codes.codes, "fc.weight_scale": codes.scales})
    assert same_bits(layer.fc.quantized.dequantize(), other)


def test_a_layer_elsewhere_is_refused() -> None:
    layer = ek.Eagle3Projection(ek.Eagle3Config(3, 96, 80), dtype=torch.bfloat16, device="meta")
    with pytest.raises(RuntimeError, match=r"the weight is on meta, expected on cpu for bf16_12bit"):
        layer.quantize(COMPRESSED)
