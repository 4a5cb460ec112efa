"""The Triton kernels on quantized weights in the interpreter: every format, tiling and dtype against float64."""

import importlib
from dataclasses import replace

import pytest
import torch

import eagle_kernels as ek
from accuracy import allow_independent_roundings, expect
from cases import Case, operands, weight_of_every_code
from eagle_kernels import plan as plans
from eagle_kernels.quantized_weight import E4M3, FORMATS
from eagle_kernels.tuned_configs import Tiles
from guards import GuardedRows

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory", "triton_backend"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, of intended NaN
]

TILES = {
    "one block": Tiles(BT=16, BD=32, BK=128, splits=1, swap=False, num_warps=4, num_stages=2, finalize_columns=32),
    "splits": Tiles(BT=16, BD=16, BK=32, splits=3, swap=False, num_warps=4, num_stages=2, finalize_columns=64),
    "swap": Tiles(BT=16, BD=32, BK=64, splits=2, swap=True, num_warps=4, num_stages=2, finalize_columns=64),
}

CASES = [
    Case("bf16", (128,) * 3, 7, D=150),
    Case("bf16", (256,) * 2, 3, "concat", D=33, residuals="all", norm_offset=1.0, bias="fp32"),
    Case("bf16", (384,) * 1, 17, "none", D=130, indices="shared"),
    Case("fp16", (128,) * 2, 5, D=40, post_norm="dtype", gain="fp32"),
    Case("fp16", (128,) * 2, 5, "none", D=40),
    Case("fp32", (128,) * 2, 4, D=40, gain="none"),
]


# Each pair of format and case has one set of tiles, rotated so that every format meets every set.
CALLS = [
    pytest.param(format, case, list(TILES)[(i + j) % 3], id=f"{format}-{case.id}-{list(TILES)[(i + j) % 3]}")
    for i, format in enumerate(FORMATS)
    for j, case in enumerate(CASES)
]


@pytest.mark.parametrize(("format", "case", "tiles"), CALLS)
def test_float64_truth(format: str, case: Case, tiles: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "choose_tiles", lambda *sizes, **facts: (TILES[tiles], "the test wants it"))
    plan, weight = check(case, format)
    BK = min(TILES[tiles].BK, weight.block[1]) if weight.scaled_where(case.dtype) == "blocks" else TILES[tiles].BK
    assert plan.tiles == TILES[tiles]._replace(BK=BK), plan


def check(case: Case, format: str) -> tuple[plans.Plan, ek.QuantizedWeight]:
    """Against float64; returns the plan and the weight. In two steps x is rounded where eager rounds it, so the bound
    is eager's; the split kernels round elsewhere."""
    call = operands(case)
    weight = ek.quantize(call.projection["weight"], format)
    _, expected = expect(replace(call, projection=call.projection | {"weight": weight.dequantize(torch.float64)}))
    guarded = GuardedRows(call.N, case.D, case.dtype)
    call = replace(call, projection=call.projection | {"weight": weight})
    plan = ek.explain("norm_concat_linear", call.chunks, **call.sources, **call.projection)
    assert plan.backend == "triton", plan
    call.norm_concat_linear(out=guarded.view)
    guarded.check_around()
    in_two_steps = plan.kernel is plans.Kernel.TWO_STEP
    (expected if in_two_steps else allow_independent_roundings(expected)).check(guarded.view)
    return plan, weight


# The tiles that codes get without a tuned table, beyond those of few rows.
SHIPPED = {17: (32, 64), 33: (64, 128), 65: (64, 128)}


@pytest.mark.parametrize("N", SHIPPED)
@pytest.mark.parametrize("format", FORMATS)
def test_float64_truth_with_the_tiles_of_more_rows(format: str, N: int) -> None:
    plan, _ = check(Case("bf16", (128,) * 2, N, D=200), format)
    if N > 64 and format in ("mxfp8", "mxfp4", "nvfp4"):  # codes that are multiplied by their scales
        assert plan.kernel is plans.Kernel.TWO_STEP and plan.tiles is None, plan
    else:
        assert SHIPPED[N] == (plan.tiles.BT, plan.tiles.BD), plan


def test_fp32_rows_beyond_the_split_plans() -> None:
    """Without a tuned table, fp32 has no split plan of its own for 17 rows: a bare AssertionError."""
    plan, _ = check(Case("fp32", (128,) * 2, 17, D=40), "fp8_row")
    assert str(plan).startswith("norm_concat_linear x fp8_row: triton/split 16x64x32"), plan


@pytest.mark.parametrize("off", [1, 16])
@pytest.mark.parametrize("format", ["fp8_row", "fp8_block128", "mxfp4"])
def test_operands_off_the_alignment(format: str, off: int) -> None:
    """Rows of codes that do not begin at multiples of 16 bytes, and rows of x not at 16 elements: the plan for aligned
    operands comes first, and its launch refuses them."""
    call = operands(Case("bf16", (128,) * 2, 5, D=40))
    weight = ek.quantize(call.projection["weight"], format)
    _, expected = expect(replace(call, projection=call.projection | {"weight": weight.dequantize(torch.float64)}))
    wider = torch.zeros(40, weight.codes.shape[1] + 2 * off, dtype=torch.uint8).view(weight.codes.dtype)
    codes = wider[:, off:-off]
    codes.copy_(weight.codes)
    wide_rows = [torch.zeros(5, 128 + off).bfloat16()[:, off:].copy_(chunk) for chunk in call.chunks]
    weight = ek.QuantizedWeight.of_tensors(codes, weight.scales, weight.global_scale, format, weight.block)
    call = replace(call, chunks=wide_rows, projection=call.projection | {"weight": weight})
    out = torch.full((5, 40), float("nan")).bfloat16()
    call.norm_concat_linear(out=out)
    allow_independent_roundings(expected).check(out)


@pytest.mark.parametrize("format", ["fp8_row", "mxfp8", "mxfp4"])
def test_every_code_and_scale(format: str) -> None:
    """x is the identity, so each output is one code times its scale, rounded once."""
    weight = weight_of_every_code(format, 64)
    expected = weight.dequantize(torch.bfloat16).t()
    result = ek.norm_concat_linear([torch.eye(32).bfloat16()], weight, norm="none")
    assert torch.equal(result.isnan(), expected.isnan())
    assert torch.equal(result.nan_to_num(7), expected.nan_to_num(7))


@pytest.mark.parametrize(("of_scales", "of_all"), [(2.0**-120, 2.0**120), (2.0**120, 2.0**-120)])
@pytest.mark.parametrize("T", [5, 40])
@pytest.mark.parametrize("format", ["fp8_tensor", "fp8_row", "int8_row", "fp8_block128"])
def test_scales_that_are_far_apart_do_not_overflow(format: str, T: int, of_scales: float, of_all: float) -> None:
    """One after the other they made sums infinite."""
    call = operands(Case("bf16", (128,) * 2, T, D=40))
    weight = ek.quantize(call.projection["weight"], format)
    scales = torch.rand(weight.scales.shape) + 0.1
    near = ek.QuantizedWeight.of_tensors(weight.codes, scales, None, format, weight.block)
    far = ek.QuantizedWeight.of_tensors(weight.codes, scales * of_scales, torch.tensor(of_all), format, weight.block)
    results = [replace(call, projection={"weight": weight}).norm_concat_linear() for weight in (far, near)]
    assert torch.equal(*results)


@pytest.mark.parametrize("format", ["fp8_row", "mxfp4", "nvfp4"])
def test_a_code_times_a_large_gain_stays_in_fp16(format: str) -> None:
    """448 * 300, and 6 * 448 * 300 with nvfp4, exceed fp16's maximum of 65504."""
    call = operands(Case("fp16", (128,) * 2, 5, D=40))
    gain = torch.full((2, 128), 300.0).half()
    weight = ek.quantize(call.projection["weight"], format)
    result = ek.norm_concat_linear(call.chunks, weight, norm_weight=gain)
    x = torch.cat(
        [chunk.double() / (chunk.double().square().mean(-1, True) + 1e-6).sqrt() for chunk in call.chunks], -1
    )
    expected = 300 * x @ weight.dequantize(torch.float64).t()
    torch.testing.assert_close(result.double(), expected, rtol=5e-3, atol=0.5)


# Of more than 128 rows: chunks of two widths, off every alignment, each feature in some case.
MANY_ROWS = [
    Case("bf16", (101, 59), 131, D=83, layout="strided", residuals="some", gain="fp32", norm_offset=1.0, bias="fp32"),
    Case("bf16", (96,) * 3, 140, "concat", D=50, indices="shared", post_norm="dtype", bias="dtype"),
    Case("bf16", (160,), 129, "none", D=33),
    Case("fp16", (64, 128), 130, D=41, indices="table", gain="none", bias="fp32", post_norm="fp32"),
]


def many_rows_of(format: str) -> list[Case]:
    """The cases that are dequantized once: in fp16 those without the scales of blocks that may leave its range."""
    in_fp16 = format == "nvfp4" or FORMATS[format].block[1] == 0
    return [case for case in MANY_ROWS if case.dtype_name == "bf16" or in_fp16]


@pytest.mark.parametrize(
    ("format", "case"),
    [pytest.param(format, case, id=f"{format}-{case.id}") for format in FORMATS for case in many_rows_of(format)],
)
def test_float64_truth_of_many_rows(format: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """In slices of 16 or 32 rows of the weight, the last of them shorter. Codes with fp32 scales of blocks take this
    path from 193 rows on, which the tests below have."""
    monkeypatch.setattr(plans, "MAX_ROWS_OF_SCALED_SUMS", 128)
    dequantize = importlib.import_module("eagle_kernels.triton_kernels.dequantize")
    monkeypatch.setattr(dequantize, "_MAX_BYTES", 2 * 2 * 32 * sum(case.widths))
    plan, _ = check(case, format)
    assert plan.kernel is plans.Kernel.TWO_STEP and "the codes are dequantized once" in plan.reason, plan


@pytest.mark.parametrize("format", ["fp8_row", "fp8_block128"])
def test_float64_truth_of_1030_rows(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In two rounds of at most 600 rows."""
    kernels = importlib.import_module("eagle_kernels.triton_kernels.norm_concat_linear")
    monkeypatch.setattr(kernels, "_LIBRARY_ROWS", 600)
    plan, _ = check(Case("bf16", (72,) * 2, 1030, D=257, sum_squares=True), format)
    assert plan.kernel is plans.Kernel.TWO_STEP, plan


@pytest.mark.parametrize("format", ["fp8_tensor", "fp8_row", "int8_row"])
def test_a_width_that_nothing_divides(format: str) -> None:
    plan, _ = check(Case("bf16", (101, 33, 1), 129, D=37, residuals="all"), format)
    assert plan.kernel is plans.Kernel.TWO_STEP, plan


@pytest.mark.parametrize("off", [1, 16])
@pytest.mark.parametrize("format", ["fp8_row", "mxfp4"])
def test_strided_codes_of_many_rows(format: str, off: int) -> None:
    call = operands(Case("bf16", (64,) * 2, 129, D=37))
    weight = ek.quantize(call.projection["weight"], format)
    _, expected = expect(replace(call, projection=call.projection | {"weight": weight.dequantize(torch.float64)}))
    wider = torch.full((37, weight.codes.shape[1] + 2 * off), 0x7F, dtype=torch.uint8).view(weight.codes.dtype)
    codes = wider[:, off:-off].copy_(weight.codes)
    weight = ek.QuantizedWeight.of_tensors(codes, weight.scales, weight.global_scale, format, weight.block)
    out = torch.full((129, 37), float("nan")).bfloat16()
    replace(call, projection=call.projection | {"weight": weight}).norm_concat_linear(out=out)
    expected.check(out)


@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize(
    ("format", "dtype"),
    [
        *((format, torch.bfloat16) for format in ("fp8_row", "int8_row", "mxfp8", "mxfp4")),
        *((format, torch.float16) for format in ("fp8_row", "int8_row")),  # without the range of mxfp8's scales
    ],
    ids=str,
)
def test_every_code_and_scale_of_many_rows(format: str, dtype: torch.dtype, width: int) -> None:
    """As above; 32 columns are a whole row of mxfp8 and mxfp4, whose scales then multiply the sums."""
    weight = weight_of_every_code(format, 64, width)
    expected = weight.dequantize(torch.float64).to(dtype).t()
    kept = ~expected.isinf().any(0)  # infinity * 0 is NaN in the other columns
    assert kept.sum() >= 254
    result = ek.norm_concat_linear([torch.eye(width, dtype=dtype).repeat(192 // width, 1)], weight, norm="none")
    for rows in result.split(width):
        assert torch.equal(rows[:, kept].isnan(), expected[:, kept].isnan())
        assert torch.equal(rows[:, kept].nan_to_num(7), expected[:, kept].nan_to_num(7))


def weight_of_two_scales(first: float, second: float) -> ek.QuantizedWeight:
    """[32, 64] of ones: 32 columns with each scale."""
    scales = torch.tensor([[first, second]])
    return ek.QuantizedWeight(torch.ones(32, 64).to(E4M3), scales, "fp8_block32")


def test_scales_of_blocks_are_not_rounded_to_16_bits() -> None:
    """1 + 2^-12 is 1 in bf16: without the second number of each code the sums would be 0."""
    x = torch.zeros(321, 64).bfloat16()
    x[:, 0], x[:, 32] = -1, 1
    weight = weight_of_two_scales(1, 1 + 2**-12)
    plan = ek.explain("norm_concat_linear", [x], weight, norm="none")
    assert plan.kernel is plans.Kernel.TWO_STEP, plan
    assert (ek.norm_concat_linear([x], weight, norm="none") == 2**-12).all()


def test_an_infinite_scale_of_a_block_gives_no_nan() -> None:
    weight = weight_of_two_scales(1, float("inf"))
    result = ek.norm_concat_linear([torch.ones(321, 64).bfloat16()], weight, norm="none")
    assert (result == float("inf")).all()


@pytest.mark.parametrize("num_matrices", [1, 2])
@pytest.mark.parametrize("shape", [(1, 5), (7168, 3 * 7168), (4096, 3 * 4096), (2881, 8643), (150, 1 << 26)], ids=str)
def test_slices_are_within_their_bound(shape: tuple[int, int], num_matrices: int) -> None:
    dequantize = importlib.import_module("eagle_kernels.triton_kernels.dequantize")
    (D, W), rows = shape, dequantize.rows_of_slice(shape, num_matrices)
    assert rows == D or rows % 16 == 0
    assert rows <= 16 or 2 * rows * W * num_matrices <= 128 << 20
    assert -(-D // rows) == -(-D // max((128 << 20) // (2 * W * num_matrices) // 16 * 16, 16))
