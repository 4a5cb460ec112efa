"""QuantizedWeight and quantize: what codes and scales stand for, by plain arithmetic on their bits."""

import copy
import io
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from eagle_kernels import QuantizedWeight, quantize
from eagle_kernels.quantized_weight import FORMATS, columns_of, columns_unsupported_reason, num_bytes
from guards import same_bits

E8M0 = torch.float8_e8m0fnu


def every_byte(rows: int = 1) -> Tensor:
    return torch.arange(256, dtype=torch.int16).to(torch.uint8).repeat(rows, 1)


def e4m3(byte: int) -> float:
    """OCP 8-bit floating point, E4M3: no infinity, one NaN of each sign."""
    sign, exponent, mantissa = -1.0 if byte & 128 else 1.0, byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def e2m1(nibble: int) -> float:
    sign, exponent, mantissa = -1.0 if nibble & 8 else 1.0, nibble >> 1 & 3, nibble & 1
    return sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


def test_every_code_is_its_number() -> None:
    fp8 = QuantizedWeight(every_byte().view(torch.float8_e4m3fn), torch.tensor([0.5]), "fp8_tensor")
    expected = torch.tensor([[e4m3(byte) / 2 for byte in range(256)]], dtype=torch.float64)
    torch.testing.assert_close(fp8.dequantize(torch.float64), expected, rtol=0, atol=0, equal_nan=True)
    mxfp4 = QuantizedWeight(every_byte(), torch.full((1, 16), 128, dtype=torch.uint8), "mxfp4")
    pairs = [(e2m1(byte & 15) * 2, e2m1(byte >> 4) * 2) for byte in range(256)]
    expected = torch.tensor(pairs, dtype=torch.float64).reshape(1, 512)
    torch.testing.assert_close(mxfp4.dequantize(torch.float64), expected, rtol=0, atol=0)
    int8 = QuantizedWeight(every_byte().view(torch.int8), torch.tensor([[3.0]]), "int8_row")
    assert int8.dequantize(torch.float64)[0, 128:].tolist() == [3.0 * (byte - 256) for byte in range(128, 256)]


def test_every_e8m0_byte_is_a_power_of_two_and_255_is_nan() -> None:
    codes = torch.full((1, 256 * 16), 0x22, dtype=torch.uint8)  # 1.0
    values = QuantizedWeight(codes, every_byte(), "mxfp4").dequantize(torch.float64)[0, ::32]
    assert values[:255].tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    assert values[255].isnan()


SHAPES = [(1, 32), (130, 160), (33, 96), (257, 288)]


def random_weight(format: str, D: int, W: int) -> QuantizedWeight:
    """Random codes with scales of every size; no NaN."""
    kind = FORMATS[format]
    rows, columns = kind.block[0] or D, kind.block[1] or W
    scale_shape = (-(-D // rows), -(-W // columns))
    codes = torch.randint(0, 256, (D, W // kind.columns_per_code), dtype=torch.int16).to(torch.uint8)
    if kind.codes == torch.float8_e4m3fn:
        codes = torch.where(codes & 127 == 127, 1, codes)
    dtype = kind.scales[-1]
    if dtype == E8M0:
        scales = torch.randint(110, 140, scale_shape, dtype=torch.int16).to(torch.uint8).view(E8M0)
    else:
        scales = (torch.rand(scale_shape) + 0.01).to(dtype)
    return QuantizedWeight(codes.view(kind.codes), scales, format, 0.37 if format == "nvfp4" else None)


@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("format", FORMATS)
def test_what_quantizing_costs_is_logged(format: str, magnitude: float, caplog: pytest.LogCaptureFixture) -> None:
    """In float64: for weights of 1e30 it logged nan in fp32, where their squares overflow."""
    caplog.set_level(logging.INFO)
    weight = torch.randn(40, 64) * magnitude
    truth = weight.double()
    error = (quantize(weight, format).dequantize(torch.float64) - truth).norm() / truth.norm()
    assert caplog.messages[-1].endswith(f"relative error {error:.2e}")


class _LargestResult(TorchDispatchMode):
    numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: tuple = (), named: dict | None = None) -> Any:
        result = function(*arguments, **named or {})
        if isinstance(result, torch.Tensor) and result.dtype.itemsize >= 4:
            self.numbers = max(self.numbers, result.numel())
        return result


@pytest.mark.parametrize("format", FORMATS)
def test_no_weight_is_in_fp32_as_a_whole(format: str) -> None:
    """Rounding a bf16 weight of 100 MB to nvfp4 took 2.3 GB."""
    weight = torch.randn(130, 1 << 16).bfloat16()
    with _LargestResult() as largest:
        quantize(weight, format)
    assert largest.numbers <= 1 << 22


def test_a_weight_that_12_bits_make_larger_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    weight = torch.randn(512, 1024).bfloat16()
    quantize(weight, "bf16_12bit")
    assert not caplog.records
    weight[7] = torch.randint(-(2**15), 2**15, (1024,), dtype=torch.int16).view(torch.bfloat16)
    quantize(weight, "bf16_12bit")
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_zeros_are_exact(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    quantize(torch.zeros(2, 64), "nvfp4")
    assert caplog.messages[-1].endswith("relative error 0.00e+00")


@pytest.mark.parametrize(("D", "W"), SHAPES)
@pytest.mark.parametrize("format", FORMATS)
def test_each_code_has_the_scale_of_its_block(format: str, D: int, W: int) -> None:
    torch.manual_seed(D)
    weight = random_weight(format, D, W)
    kind = FORMATS[format]
    rows, columns = kind.block[0] or D, kind.block[1] or W
    bits, scales = weight.codes.view(torch.uint8), weight.scales.float().double()
    values = weight.dequantize(torch.float64)
    for _ in range(200):
        d, c = int(torch.randint(D, ())), int(torch.randint(W, ()))
        byte = int(bits[d, c // kind.columns_per_code])
        if kind.codes == torch.uint8:
            code = e2m1(byte >> 4 if c % 2 else byte & 15)
        else:
            code = e4m3(byte) if kind.codes == torch.float8_e4m3fn else float(byte - 256 * (byte > 127))
        expected = code * scales[d // rows, c // columns].item()
        expected *= 1.0 if weight.global_scale is None else weight.global_scale.double().item()
        assert values[d, c].item() == expected
    assert same_bits(weight.dequantize(torch.bfloat16), weight.dequantize(torch.float32).bfloat16())


@pytest.mark.parametrize("format", FORMATS)
def test_dequantize_takes_a_large_weight_in_parts(format: str) -> None:
    weight = random_weight(format, 140, 32 * 1024)  # 128 rows at a time
    whole = weight.dequantize(torch.float32)
    for d in (0, 127, 128, 139):
        scales = weight.scales[d // weight.block[0]].unsqueeze(0)
        row = QuantizedWeight.of_tensors(weight.codes[d : d + 1], scales, weight.global_scale, format, weight.block)
        assert torch.equal(whole[d : d + 1], row.dequantize(torch.float32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("format", FORMATS)
def test_quantize_takes_the_nearest_code(format: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    weight = (torch.randn(70, 192) * torch.logspace(-3, 1, 70).unsqueeze(1)).to(dtype)
    weight[3] = 0
    quantized = quantize(weight, format)
    assert quantized.nbytes == num_bytes(format, (70, 192))
    assert torch.equal(quantized.dequantize(torch.float64)[3], torch.zeros(192, dtype=torch.float64))
    ones = QuantizedWeight.of_tensors(
        quantized.codes, torch.ones_like(quantized.scales.float()), None, format, quantized.block
    )
    codes = ones.dequantize(torch.float64)
    scale = quantized.dequantize(torch.float64) / codes
    scale = torch.where(scale.isnan(), quantized._scales_of_rows(0, 70, torch.float64), scale)
    grid = {
        torch.int8: torch.arange(-127, 128, dtype=torch.float64),
        torch.uint8: torch.tensor([e2m1(n) for n in range(16)], dtype=torch.float64),
        torch.float8_e4m3fn: torch.tensor([e4m3(b) for b in range(256) if b & 127 != 127], dtype=torch.float64),
    }[FORMATS[format].codes].unique()
    wanted = (weight.double() / scale).unsqueeze(-1)
    distance = (wanted - grid).abs().amin(-1)
    # The division is in fp32: a value within its rounding of a tie may go either way.
    tie = 2.0**-22 * wanted.squeeze(-1).abs()
    assert ((codes - wanted.squeeze(-1)).abs() <= distance + tie).all()


def test_scales_are_model_optimizers() -> None:
    weight = torch.zeros(2, 64)
    weight[0, 0], weight[0, 40], weight[1, 20] = 6.5, -1.0, 0.001
    amax = 6.5
    assert quantize(weight, "fp8_tensor").scales.item() == torch.tensor(amax / 448).item()
    assert quantize(weight, "int8_row").scales[:, 0].tolist() == torch.tensor([amax / 127, 0.001 / 127]).tolist()
    assert quantize(weight, "mxfp8").scales.view(torch.uint8).tolist() == [[127 - 6, 127 - 8], [127 - 18, 0]]
    assert quantize(weight, "mxfp4").scales.view(torch.uint8).tolist() == [[127 + 1, 127 - 2], [127 - 12, 0]]
    nvfp4 = quantize(weight, "nvfp4")
    assert nvfp4.global_scale.item() == torch.tensor(amax / 2688).item()
    expected = torch.tensor([[448.0, 1.0, 448 / amax, 1.0], [1.0, 448 * 0.001 / amax, 1.0, 1.0]])
    assert same_bits(nvfp4.scales, expected.to(torch.float8_e4m3fn))


def test_a_tie_goes_to_the_even_code() -> None:
    values = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]).repeat(4).unsqueeze(0)
    rounded = quantize(values, "mxfp4").dequantize(torch.float32)[0, :8]
    assert rounded.tolist() == [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]


def test_a_small_block_of_nvfp4_has_the_least_scale_and_no_nan() -> None:
    weight = torch.zeros(1, 32)
    weight[0, 0], weight[0, 16] = 1.0, 1e-7
    quantized = quantize(weight, "nvfp4")
    assert quantized.scales.float().tolist() == [[448.0, 2**-9]]
    assert quantized.dequantize(torch.float64)[0, 16:].tolist() == [0.0] * 16


def test_blocks_of_fp8_end_anywhere() -> None:
    """mxfp8 needs whole blocks, fp8_block32 has the same 32 columns and does not."""
    for format, block in (("fp8_block32", 32), ("fp8_block128", 128)):
        weight = torch.full((block + 5, block + 1), 448.0)
        weight[block - 1, 0], weight[block, 1], weight[0, block] = 2 * 448.0, 4 * 448.0, 8 * 448.0
        quantized = quantize(weight, format)
        assert quantized.scales.tolist() == [[2.0, 8.0], [4.0, 1.0]]
        assert torch.equal(quantized.dequantize(torch.float32), weight)


def test_where_a_kernel_scales() -> None:
    """docs/design.md: no 16-bit number is rounded for a scale. A power of two may leave fp16's range."""
    by_dtype = {
        (torch.bfloat16, torch.float32): {
            **dict.fromkeys(("fp8_tensor", "fp8_row", "int8_row"), "rows"),
            **dict.fromkeys(("fp8_block128", "fp8_block32"), "blocks"),
            **dict.fromkeys(("mxfp8", "mxfp4", "nvfp4"), "codes"),
        },
    }
    by_dtype[(torch.float16,)] = by_dtype[(torch.bfloat16, torch.float32)] | {"mxfp8": "blocks", "mxfp4": "blocks"}
    weights = {format: quantize(torch.randn(4, 256), format) for format in FORMATS}
    for dtypes, expected in by_dtype.items():
        for dtype in dtypes:
            assert {format: weight.scaled_where(dtype) for format, weight in weights.items()} == expected


def test_merged_shards_keep_their_own_scales() -> None:
    """2048 + 576 rows of fp8_block128 have 16 + 5 rows of scales (vllm-ascend#15346): block rows begin anew."""
    torch.manual_seed(2)
    shards = [torch.randn(rows, 256) for rows in (300, 70, 128)]
    parts = [quantize(shard, "fp8_block128") for shard in shards]
    codes, scales = torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts])
    merged = QuantizedWeight(codes, scales, "fp8_block128", shard_rows=[300, 70, 128])
    assert torch.equal(merged.dequantize(torch.float64), torch.cat([part.dequantize(torch.float64) for part in parts]))
    aligned = QuantizedWeight(codes[:384], scales[[0, 1, 4]], "fp8_block128", shard_rows=[256, 128])
    assert aligned.block == (128, 128) and aligned.scales.shape == (3, 2)
    shorter = QuantizedWeight(codes[:326], scales[[0, 1, 3]], "fp8_block128", shard_rows=[256, 70])
    assert shorter.block == (128, 128), "no block begins anew behind the last shard"
    whole = QuantizedWeight(tensor := codes[:7], torch.ones(1), "fp8_tensor", shard_rows=[7])
    assert whole.block == tuple(tensor.shape) and whole.scales.shape == (1, 1)
    tensors = [quantize(shard, "fp8_tensor") for shard in shards]
    codes, scales = torch.cat([part.codes for part in tensors]), torch.cat([part.scales for part in tensors])
    merged = QuantizedWeight(codes, scales.flatten(), "fp8_tensor", shard_rows=[300, 70, 128])
    expected = torch.cat([part.dequantize(torch.float64) for part in tensors])
    assert torch.equal(merged.dequantize(torch.float64), expected)
    powers = [torch.randint(120, 130, (rows, 2)).to(torch.uint8) for rows in (3, 1, 1)]
    codes = torch.cat([part.codes for part in parts])
    merged = QuantizedWeight(codes, torch.cat(powers), "fp8_block128", shard_rows=[300, 70, 128])
    each = [QuantizedWeight(part.codes, power, "fp8_block128") for part, power in zip(parts, powers, strict=True)]
    assert torch.equal(merged.dequantize(torch.float64), torch.cat([part.dequantize(torch.float64) for part in each]))


@pytest.mark.parametrize("format", FORMATS)
def test_columns_of_a_weight_are_a_view(format: str) -> None:
    weight = quantize(torch.randn(200, 384).bfloat16(), format)
    whole = weight.dequantize(torch.float32)
    for begin, end in ((0, 128), (128, 384), (0, 384)):
        columns = columns_of(weight, begin, end)
        assert columns is not None and columns.dequantize(torch.float32).equal(whole[:, begin:end])
        columns.check("test")
        assert columns.codes.untyped_storage().data_ptr() == weight.codes.untyped_storage().data_ptr()
    shared = weight.block[1]
    if shared < 384:
        assert columns_of(weight, shared // 2, 384) is None and columns_of(weight, 0, 384 - shared // 2) is None


def test_columns_in_12_bits_are_no_weight() -> None:
    assert columns_of(quantize(torch.randn(8, 256).bfloat16(), "bf16_12bit"), 0, 128) is None


def test_columns_with_scales_of_another_kind_do_not_become_one_weight() -> None:
    """Joined, powers of two would be read as numbers, or a row's scales as a block's."""
    blocks = quantize(torch.randn(256, 128), "fp8_block128")
    powers = QuantizedWeight(blocks.codes, torch.full((2, 1), 120, dtype=torch.uint8), "fp8_block128")
    merged = QuantizedWeight(blocks.codes, torch.rand(3, 1), "fp8_block128", shard_rows=[100, 156])
    assert (powers.block, merged.block) == ((128, 128), (1, 128))
    assert columns_unsupported_reason([blocks, blocks]) is None
    for other in (powers, merged):
        assert columns_unsupported_reason([blocks, other]) == "their scales are of other blocks or dtypes"


@pytest.mark.parametrize(("format", "scales"), [("fp8_tensor", torch.rand(3)), ("fp8_block128", torch.rand(5, 2))])
def test_the_default_device_is_not_the_merged_shards(format: str, scales: torch.Tensor) -> None:
    codes, shards = torch.randn(498, 256).to(torch.float8_e4m3fn), [300, 70, 128]
    expected = QuantizedWeight(codes, scales, format, shard_rows=shards)
    with torch.device("meta"):
        merged = QuantizedWeight(codes, scales, format, shard_rows=shards)
    assert torch.equal(merged.scales, expected.scales)


@pytest.mark.parametrize("format", FORMATS)
def test_copies_and_saved_ones_are_equal(format: str) -> None:
    weight = random_weight(format, 33, 96)
    file = io.BytesIO()
    torch.save(weight, file)  # torch 2.13's plain pickle knows no float8
    file.seek(0)
    for twin in (copy.deepcopy(weight), torch.load(file, weights_only=False), weight.to("cpu")):
        assert (twin.format, twin.block, twin.shape) == (weight.format, weight.block, (33, 96))
        assert torch.equal(twin.dequantize(torch.float64), weight.dequantize(torch.float64))


@pytest.mark.parametrize("format", FORMATS)
def test_a_strided_weight_is_quantized_as_its_copy(format: str) -> None:
    weight = torch.randn(64, 96).t()
    strided, copied = quantize(weight, format), quantize(weight.contiguous(), format)
    assert strided.codes.is_contiguous()
    assert torch.equal(strided.dequantize(torch.float64), copied.dequantize(torch.float64))


@pytest.mark.parametrize("format", ["mxfp8", "mxfp4"])
def test_a_scale_of_two_s_power_is_exact(format: str) -> None:
    """One ulp above the largest code times a power of two belongs to the next scale; log2 in fp32 rounds it off."""
    largest = torch.tensor(FORMATS[format].max)
    for power in (-100, -1, 0, 3):
        exact = largest * 2.0**power
        above = torch.nextafter(exact, torch.tensor(torch.inf))
        weight = torch.stack((exact, above))[:, None].expand(2, 32)
        assert quantize(weight, format).scales.float().flatten().tolist() == [2.0**power, 2.0 ** (power + 1)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_global_scale_that_is_a_float_is_in_fp32(dtype: torch.dtype) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        scale = QuantizedWeight(FP8, torch.ones(1, dtype=torch.float32), "fp8_tensor", global_scale=2.1).global_scale
    finally:
        torch.set_default_dtype(before)
    assert scale is not None and scale.equal(torch.tensor(2.1, dtype=torch.float32))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int32, torch.complex64, "bf16"], ids=str)
@pytest.mark.parametrize("format", ["fp8_row", "bf16_12bit"])
def test_numbers_are_of_16_bits_or_more(format: str, dtype: torch.dtype) -> None:
    message = f"QuantizedWeight.dequantize: dtype is {dtype!r}, expected one of torch.bfloat16, "
    with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
        quantize(torch.ones(4, 32).bfloat16(), format).dequantize(dtype)


FP8 = torch.zeros(4, 64).to(torch.float8_e4m3fn)
ERRORS: list = [
    (lambda: QuantizedWeight(FP8, torch.ones(1), "fp9"), "format is 'fp9', expected one of"),
    (
        lambda: QuantizedWeight(
            torch.zeros(4, 8, dtype=torch.uint8), torch.ones(4, 1).to(torch.float8_e4m3fn), "nvfp4"
        ),
        "global_scale is None, expected a number or a tensor, because nvfp4 has two scales",
    ),
    (lambda: QuantizedWeight([1], torch.ones(1), "fp8_row"), "codes is a list, expected a torch.Tensor"),
    (
        lambda: QuantizedWeight(FP8, torch.ones(1), "int8_row"),
        "codes has dtype torch.float8_e4m3fn, expected torch.int8, because the format is int8_row",
    ),
    (lambda: QuantizedWeight(FP8[0], torch.ones(1), "fp8_row"), "codes has shape (64,), expected (D, W)"),
    (lambda: QuantizedWeight(FP8.t(), torch.ones(64), "fp8_row"), "codes has strides (1, 64), expected a last stride"),
    (
        lambda: QuantizedWeight(FP8, torch.ones(3), "fp8_row"),
        "scales has shape (3,), expected (4, 1), because codes of 4 rows and 64 columns have scales for 1 x 64 of them",
    ),
    (
        lambda: QuantizedWeight(FP8, torch.ones(4, 2), "mxfp8"),
        "scales has dtype torch.float32, expected torch.float8_e8",
    ),
    (
        lambda: QuantizedWeight(FP8, torch.ones(4).half(), "fp8_row"),
        "scales has dtype torch.float16, expected torch.flo",
    ),
    (
        lambda: QuantizedWeight(torch.zeros(4, 20, dtype=torch.uint8), torch.zeros(4, 2, dtype=torch.uint8), "mxfp4"),
        "codes has shape (4, 20), expected (D, W/2) with W a multiple of 32, because 32 columns share a scale",
    ),
    (
        lambda: QuantizedWeight(FP8, torch.ones(1), "fp8_tensor", torch.ones(2)),
        "global_scale has shape (2,), expected one element",
    ),
    (lambda: QuantizedWeight(FP8, torch.ones(1), ["fp8_row"]), "format is ['fp8_row'], expected one of"),
    (
        lambda: QuantizedWeight(FP8, torch.ones(1), "fp8_tensor", 1e39),
        "global_scale is 1e+39, expected a number that is finite in torch.float32",
    ),
    (lambda: QuantizedWeight(FP8, torch.ones(1), "fp8_tensor", "1"), "global_scale is a str, expected a number"),
    (
        lambda: QuantizedWeight(FP8, torch.ones(2), "fp8_tensor", shard_rows=[-1, 5]),
        "shard_rows[0] is -1, expected at least 0",
    ),
    (
        lambda: QuantizedWeight(FP8, torch.ones(2), "fp8_tensor", shard_rows=[1.5, 2.5]),
        "shard_rows[0] is a float, expected an int",
    ),
    (
        lambda: QuantizedWeight(FP8, torch.ones(2), "fp8_tensor", shard_rows=4),
        "shard_rows is a int, expected a sequence of ints",
    ),
    (
        lambda: QuantizedWeight(FP8, torch.ones(2), "fp8_tensor", shard_rows="22"),
        "shard_rows is a str, expected a sequence of ints",
    ),
    (
        lambda: QuantizedWeight(FP8, torch.ones(2), "fp8_tensor", shard_rows=[3, 2]),
        "shard_rows is [3, 2], expected a sum of 4, because codes has that many rows",
    ),
    (
        lambda: QuantizedWeight(FP8, torch.ones(1), "fp8_tensor", shard_rows=[1, 2]),
        "shard_rows is [1, 2], expected a sum of 4, because codes has that many rows",
    ),
    (
        lambda: QuantizedWeight(FP8, torch.ones(2, 2), "fp8_row"),
        "scales has shape (2, 2), expected (4, 1), because codes of 4 rows and 64 columns have scales for 1 x 64 of",
    ),
    (
        lambda: QuantizedWeight(FP8, torch.zeros(4, 3, dtype=torch.uint8), "mxfp8"),
        "scales has shape (4, 3), expected (4, 2), because codes of 4 rows and 64 columns have scales for 1 x 32 of",
    ),
    (
        lambda: QuantizedWeight(FP8.repeat(16, 1), torch.ones(2, 2).t(), "fp8_block32"),
        "scales has strides (1, 2), expected a last stride",
    ),
    (lambda: quantize(torch.ones(0, 4), "fp8_row"), "weight has shape (0, 4), expected (D, W), neither of them 0"),
    (lambda: quantize(torch.ones(4), "fp8_row"), "weight has shape (4,), expected (D, W), neither of them 0"),
    (lambda: quantize(torch.ones(4, 33), "mxfp8"), "weight has shape (4, 33), expected (D, W) with W a multiple of 32"),
    (lambda: quantize(torch.ones(4, 4).double(), "fp8_row"), "weight has dtype torch.float64, expected torch.bfloat16"),
    (lambda: quantize(torch.full((4, 4), torch.inf), "fp8_row"), "weight has NaN or infinity, expected finite values"),
]


@pytest.mark.parametrize(("build", "message"), ERRORS)
def test_what_does_not_fit_is_worded(build: Callable, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^(QuantizedWeight|quantize): {re.escape(message)}"):
        build()
