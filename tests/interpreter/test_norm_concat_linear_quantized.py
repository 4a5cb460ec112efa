"""The Triton kernels on quantized weights in the interpreter: every format, tiling and dtype against float64."""

from dataclasses import replace

import pytest
import torch

import eagle_kernels as ek
from accuracy import allow_independent_roundings, expect
from cases import Case, operands, weight_of_every_code
from eagle_kernels import plan as plans
from eagle_kernels.quantized_weight import FORMATS
from eagle_kernels.tuned_configs import Tiles
from guards import GuardedRows

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory", "triton_backend"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, of intended NaN
]

TILES = {
    "one block": Tiles(BT=16, BD=32, BK=128, splits=1, swap=False, num_warps=4, num_stages=2, finalise_columns=32),
    "splits": Tiles(BT=16, BD=16, BK=32, splits=3, swap=False, num_warps=4, num_stages=2, finalise_columns=64),
    "swap": Tiles(BT=16, BD=32, BK=64, splits=2, swap=True, num_warps=4, num_stages=2, finalise_columns=64),
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
    """Against float64; returns the plan and the weight."""
    call = operands(case)
    weight = ek.quantize(call.projection["weight"], format)
    _, expected = expect(replace(call, projection=call.projection | {"weight": weight.dequantize(torch.float64)}))
    guarded = GuardedRows(call.N, case.D, case.dtype)
    call = replace(call, projection=call.projection | {"weight": weight})
    plan = ek.explain("norm_concat_linear", call.chunks, **call.sources, **call.projection)
    assert plan.backend == "triton", plan
    call.norm_concat_linear(out=guarded.view)
    guarded.check_around()
    allow_independent_roundings(expected).check(guarded.view)
    return plan, weight


# The tiles that codes get without a tuned table, beyond those of few rows.
SHIPPED = {17: (32, 64), 33: (64, 128), 65: (64, 128)}


@pytest.mark.parametrize("N", SHIPPED)
@pytest.mark.parametrize("format", FORMATS)
def test_float64_truth_with_the_tiles_of_more_rows(format: str, N: int) -> None:
    plan, _ = check(Case("bf16", (128,) * 2, N, D=200), format)
    assert SHIPPED[N] == (plan.tiles.BT, plan.tiles.BD), plan


def test_fp32_rows_beyond_the_split_plans() -> None:
    """Without a tuned table, fp32 has no split plan of its own for 17 rows: a bare AssertionError."""
    plan, _ = check(Case("fp32", (128,) * 2, 17, D=40), "fp8_row")
    assert str(plan).startswith("norm_concat_linear_quantized: triton/split 16x64x32"), plan


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
