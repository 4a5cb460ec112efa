"""The Triton kernels of norm_concat_linear in the interpreter: every parameter, in every plan, against float64."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from eagle_kernels.triton_kernels import norm_concat_linear as kernels

import eagle_kernels as ek
from accuracy import allow_independent_roundings, expect
from backends import environment_of
from cases import FEATURES, NUMBERS, SIZES, Case, operands
from eagle_kernels import plan as plans
from eagle_kernels.ops.sources import Sources, formula
from eagle_kernels.tuned_configs import Tiles
from guards import GuardedRows, UnchangedTensors, between_forbidden_pages, same_bits
from test_norm_concat_linear import check_infinite_gain_of_a_zero_row, check_zero_row_of_one_chunk, check_zero_rows

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory", "triton_backend"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, of intended infinities and NaN
]


# Smaller than any GPU would want, so that a few columns already have a second tile, a tail and an uneven split.
TILES = {
    "decode": Tiles(BT=16, BD=32, BK=32, splits=1, swap=False, num_warps=4, num_stages=2, finalize_columns=32),
    "split": Tiles(BT=16, BD=16, BK=16, splits=3, swap=False, num_warps=4, num_stages=2, finalize_columns=64),
    "swap": Tiles(BT=16, BD=32, BK=64, splits=2, swap=True, num_warps=4, num_stages=2, finalize_columns=64),
}


@pytest.fixture(params=TILES)
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tiles]:
    """One way to cut the product, active for every size."""
    monkeypatch.setattr(plans, "choose_tiles", lambda *sizes, **facts: (TILES[request.param], "the test wants it"))
    return TILES[request.param]


def splittable(case: Case) -> Case | None:
    """The case at a width that the split kernels take, a multiple of 16 but not of a block."""
    if len(set(case.widths)) > 1 or case.layout == "strided" or case.view:
        return None
    return replace(case, widths=(80,) * case.K)


# Every feature with one set of tiles: most features do not depend on the tiles.
FEATURE_CASES = [case for case in dict.fromkeys(map(splittable, FEATURES)) if case is not None and case.T <= 33]

# With every set of tiles: the edges of blocks, the dtypes, and what passes through the tiles of the partial kernel.
EDGE_CASES = [
    Case("bf16", (48,) * 1, 17, "concat", D=1),
    Case("bf16", (64,) * 8, 3, D=70),
    Case("fp16", (80,) * 2, 33, D=97, residuals="some", indices="each", gain="list"),
    Case("bf16", (80,) * 3, 7, "concat", layout="packed", residuals="all", indices="shared", index_dtype=torch.int32),
    Case("fp32", (80,) * 3, 7, residuals="some", indices="some", gain="fp32", norm_offset=1.0, bias="fp32"),
    Case("bf16", (80,) * 2, 16, indices="table", norm_offset=1.0, eps=(1e-5, 0.3), post_norm="dtype"),
    Case("bf16", (80,) * 3, 0),
    *(Case(dtype, (144,) * 2, 18, D=65, data=data) for dtype in ("bf16", "fp16") for data in ("outliers", "scales")),
    # Not of bf16 and fp32: their tiny values have products that are subnormal in fp32 (the kernel's docstring).
    Case("fp16", (80,) * 2, 7, data="tiny", gain="none"),
]

MODERATE_NUMBERS = [case for case in NUMBERS if case.T == 7 and case.data != "tiny"]

# What the split kernels leave to norm_concat and a library product: odd and different widths, unaligned rows, many T.
LIBRARY_CASES = [case for case in FEATURES if splittable(case) is None] + [
    *(case for case in SIZES if 101 in case.widths and case.T < 100),
    *(case for case in FEATURES if case.widths == (101,) * 3 and (case.bias or case.post_norm)),
]


def check(case: Case) -> None:
    call = operands(case)
    _, expected = expect(call)
    one_row = case.layout == "row"
    guarded = GuardedRows(1 if one_row else call.N, case.D, case.dtype)
    view = guarded.view[0] if one_row else guarded.view
    with UnchangedTensors(call.tensors()):
        assert call.norm_concat_linear(out=view) is view
    guarded.check_around()
    allow_independent_roundings(expected).check(guarded.view)


def method(case: Case) -> str:
    call = operands(case)
    arguments = call.sources | call.projection | {"eps": 1e-6}
    return ek.explain("norm_concat_linear", call.chunks, **arguments).method


@pytest.mark.parametrize("tiles", ["split"], indirect=True)
@pytest.mark.parametrize("case", FEATURE_CASES, ids=lambda case: case.id)
def test_float64_truth_of_every_feature(case: Case, tiles: Tiles) -> None:
    assert method(case) == f"split {tiles.BT}x{tiles.BD}x{tiles.BK}"
    check(case)


@pytest.mark.parametrize("case", EDGE_CASES, ids=lambda case: case.id)
def test_float64_truth_of_every_cut(case: Case, tiles: Tiles) -> None:
    assert method(case) == f"split {tiles.BT}x{tiles.BD}x{tiles.BK}"
    check(case)


@pytest.mark.parametrize("case", LIBRARY_CASES, ids=lambda case: case.id)
def test_float64_truth_of_the_library_plan(case: Case) -> None:
    assert method(case) == "norm_concat + linear"
    check(case)


@pytest.mark.parametrize("case", MODERATE_NUMBERS, ids=lambda case: case.id)
def test_float64_truth_with_the_default_tiles(case: Case) -> None:
    case = replace(case, widths=(128,) * case.K)
    assert method(case) == "split 16x64x128" if case.dtype_name != "fp32" else method(case) == "split 16x64x32"
    check(case)


# The tiles that an sm_90 gets without a tuned table, each with its fewest and its most rows.
SHIPPED = {"32x64x64": (17, 32), "64x128x64": (33, 64), "128x128x64": (65, 128)}


@pytest.mark.parametrize("features", ["plain", "full"])
@pytest.mark.parametrize("tiles, N", [(tiles, N) for tiles, rows in SHIPPED.items() for N in rows])
def test_float64_truth_with_the_tiles_of_more_rows(tiles: str, N: int, features: str) -> None:
    if features == "plain":
        case = Case("bf16", (80,) * 2, N, D=200)
    else:  # a gather has 11 more rows than its sources (tests/cases.py)
        more = {"residuals": "some", "indices": "each", "gain": "list", "bias": "fp32", "norm_offset": 1.0}
        case = Case("fp16", (80,) * 2, N - 11, D=200, **more)
    assert method(case) == f"split {tiles}"
    check(case)


def make_call(T: int, dtype: torch.dtype = torch.bfloat16, K: int = 2, H: int = 64, D: int = 40) -> tuple:
    chunks = [torch.randn(T, H).to(dtype) for _ in range(K)]
    weight = (torch.randn(D, K * H) / (K * H) ** 0.5).to(dtype)
    return chunks, weight, (torch.rand(K, H) + 0.5).to(dtype)


def test_a_folded_gain_gives_the_same_bits(tiles: Tiles) -> None:
    chunks, weight, gain = make_call(5)
    folded = (weight.float() * (1.0 + gain.float().reshape(-1))).bfloat16()
    in_kernel = ek.norm_concat_linear(chunks, weight, norm_weight=gain, norm_offset=1.0)
    assert same_bits(in_kernel, ek.norm_concat_linear(chunks, folded))


@pytest.mark.parametrize("magnitude", [1e-4, 1.0, 300.0])
def test_fp16_has_room_for_the_gain(magnitude: float, tiles: Tiles) -> None:
    """gain * weight of 1e-5 is subnormal in fp16, and x of 3e4 times a gain would be infinite."""
    chunks, weight, gain = make_call(20, torch.float16)
    chunks = [chunk * 7000 for chunk in chunks]
    gain = (gain * magnitude).half()
    out = ek.norm_concat_linear(chunks, weight, norm_weight=gain)
    x = formula(Sources(chunks, 2, "chunk", [gain], [1e-6], 0.0, [], [], None), torch.float64)
    truth = x @ weight.double().t()
    # Three roundings of half a unit: of the gain on its way here, of gain * weight, of the result.
    assert (out.double() - truth).norm() / truth.norm() < 3 * 2.0**-12 + (truth.abs().max() < 1e-2) * 1e-2


@pytest.fixture
def rows_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """einsum for the interpreter's tl.dot: in np.matmul OpenBLAS (Haswell, Zen) sums a row by its place in a block."""
    monkeypatch.setattr(np, "matmul", lambda a, b, dtype: np.einsum("ij,jk->ik", a, b, dtype=dtype))


@pytest.mark.usefixtures("rows_of_their_own")
def test_bits_do_not_depend_on_T(tiles: Tiles) -> None:
    chunks, weight, gain = make_call(35)
    every_row = ek.norm_concat_linear(chunks, weight, norm_weight=gain)
    for begin, end in ((0, 1), (15, 17), (30, 35), (3, 19)):
        rows = [chunk[begin:end] for chunk in chunks]
        assert same_bits(every_row[begin:end], ek.norm_concat_linear(rows, weight, norm_weight=gain)), (begin, end)


@pytest.mark.usefixtures("rows_of_their_own")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_one_plan_for_all_T_on_request(dtype: torch.dtype) -> None:
    """Unaligned rows and widths included."""
    with environment_of(EAGLE_KERNELS_BATCH_INVARIANT="1"):
        chunks, weight, gain = make_call(70, dtype, H=33, D=20)
        every_row = ek.norm_concat_linear(chunks, weight, norm_weight=gain)
        for T in (1, 16, 17, 64, 65):
            rows = [chunk[-T:] for chunk in chunks]
            assert same_bits(every_row[-T:], ek.norm_concat_linear(rows, weight, norm_weight=gain)), T


@pytest.mark.parametrize("plan", ["split", "library"])
@pytest.mark.parametrize("statistics", ["own", "given"])
@pytest.mark.parametrize("indices", ["", "shared", "some"])
def test_rounds_of_rows_join_up(indices: str, statistics: str, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than one round takes: each round must take its own rows of everything, and all of an indexed source."""
    tiles = TILES["decode"] if plan == "split" else None
    monkeypatch.setattr(plans, "choose_tiles", lambda *sizes, **facts: (tiles, "the test wants it"))
    chunks, weight, gain = make_call(11)
    index = torch.tensor([3, -1, 10, 0, 0, 7, 11, 2, 9, 5, 6])
    arguments = {
        "norm_weight": gain,
        "residuals": [torch.randn(11, 64).bfloat16(), None],
        "indices": {"": None, "shared": index, "some": [index, None]}[indices],
        "sum_squares": torch.rand(11, 2) * 100 if statistics == "given" else None,
    }
    one_round = ek.norm_concat_linear(chunks, weight, **arguments)
    rounds, run_round = [], kernels._run_round
    monkeypatch.setattr(kernels, "_SPLIT_ROWS", 4)
    monkeypatch.setattr(kernels, "_LIBRARY_ROWS", 4)
    monkeypatch.setattr(kernels, "_run_round", lambda *round: (rounds.append(len(round[2])), run_round(*round)))
    several = ek.norm_concat_linear(chunks, weight, **arguments)
    assert rounds == [4, 4, 3]
    assert same_bits(several, one_round)


@pytest.mark.parametrize("norm", ["chunk", "concat", "none"])
@pytest.mark.parametrize("stale", [float("nan"), float("inf"), 3e4])
def test_a_bad_row_stays_in_its_row(stale: float, norm: str, tiles: Tiles) -> None:
    chunks, weight, _ = make_call(9)
    bias, post = torch.randn(40), torch.rand(40)
    clean = ek.norm_concat_linear(chunks, weight, norm=norm, bias=bias, post_norm_weight=post)
    chunks[1][4, 50] = stale
    chunks[0][7] = stale
    dirty = ek.norm_concat_linear(chunks, weight, norm=norm, bias=bias, post_norm_weight=post)
    kept = [0, 1, 2, 3, 5, 6, 8]
    assert same_bits(clean[kept], dirty[kept])
    assert dirty[[4, 7]].isnan().all() or stale == 3e4


@pytest.mark.parametrize("eps", [1e-6, 0.0])
@pytest.mark.parametrize("norm", ["chunk", "concat", "none"])
def test_a_zero_row_hides_what_the_sources_hold(norm: str, eps: float, tiles: Tiles) -> None:
    """An index out of range gives zeros although row 0 and the last row, the likely clamps, are NaN."""
    chunks, weight, _ = make_call(6)
    for chunk in chunks:
        chunk[[0, -1]] = float("nan")
    indices = torch.tensor([-1, 2, 6, 2**40, -(2**40)])
    out = ek.norm_concat_linear(chunks, weight, norm=norm, eps=eps, indices=indices)
    assert same_bits(out[[0, 2, 3, 4]], torch.zeros(4, 40).bfloat16())
    assert out[1].isfinite().all() and out[1].any()


def test_a_zero_row_is_zero_whatever_the_gain(tiles: Tiles) -> None:
    check_infinite_gain_of_a_zero_row()
    check_zero_row_of_one_chunk()


@pytest.mark.parametrize("T", [3, 300])
def test_no_columns(T: int) -> None:
    assert ek.norm_concat_linear([torch.randn(T, 64)], torch.empty(0, 64), bias=torch.empty(0)).shape == (T, 0)


def test_a_row_of_zeros_stays_zero_without_eps(tiles: Tiles) -> None:
    check_zero_rows()
    check_zero_rows(post_norm_weight=torch.rand(40) + 0.5)


@pytest.mark.parametrize("at", ["begin", "end"])
@pytest.mark.parametrize("H", [16, 80])
def test_no_operand_is_read_beyond_its_end(H: int, at: str, tiles: Tiles) -> None:
    """Every operand lies between pages that trap; indices point past both ends. A failure is a segmentation fault."""
    indices = torch.tensor([0, -1, 6, 3, 2**40])

    def guarded(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return between_forbidden_pages(torch.randn(shape).to(dtype), at)

    arguments = {
        "norm_weight": [guarded(H), guarded(H)],
        "residuals": [guarded(4, H), guarded(4, H)],
        "indices": [between_forbidden_pages(indices, at), between_forbidden_pages(indices.int(), at)],
        "bias": guarded(35, dtype=torch.float32),
        "post_norm_weight": guarded(35),
        "out": guarded(5, 35),
    }
    ek.norm_concat_linear([guarded(4, H), guarded(4, H)], guarded(35, 2 * H), **arguments)
    arguments["sum_squares"] = guarded(4, 2, dtype=torch.float32)
    ek.norm_concat_linear([guarded(4, H), guarded(4, H)], guarded(35, 2 * H), **arguments)


def test_explain_says_why() -> None:
    chunks, weight, gain = make_call(3)
    explained = str(ek.explain("norm_concat_linear", chunks, weight, norm_weight=gain))
    assert explained.startswith("norm_concat_linear: triton/split 16x64x64, because T=3 <= 16 by the heuristic")
    odd = [torch.randn(3, 33).bfloat16()] * 2
    assert "no multiple of 16" in str(ek.explain("norm_concat_linear", odd, weight[:, :66].contiguous()))
    widths = [torch.randn(3, 32).bfloat16(), torch.randn(3, 64).bfloat16()]
    assert "differ in width" in str(ek.explain("norm_concat_linear", widths, weight[:, :96].contiguous()))


@pytest.mark.parametrize("widths", [(32, 64, 80), (64, 32, 96)])
def test_chunks_of_several_aligned_widths(widths: tuple[int, ...], tiles: Tiles) -> None:
    """The plan for the first chunk's width (in the second case the mean too) is refused, and another is chosen."""
    check(Case("bf16", widths, 5, D=40))


@pytest.mark.parametrize("bias", [None, torch.randn(48)])
def test_an_inference_tensor_is_written_outside_of_inference_mode(bias: torch.Tensor | None) -> None:
    """As every other kernel does: torch's products, which end a call of many rows, refuse it."""
    chunks, weight = [torch.randn(200, 64) for _ in range(2)], torch.randn(48, 128)
    with torch.inference_mode():
        out = torch.empty(200, 48)
    ek.norm_concat_linear(chunks, weight, bias=bias, out=out)
    assert torch.equal(out, ek.norm_concat_linear(chunks, weight, bias=bias))


@pytest.mark.parametrize("bias", [None, torch.randn(48)])
def test_the_registered_op_takes_a_weight_that_is_trained(bias: torch.Tensor | None) -> None:
    """An exported program calls it so: without the public function's check that no input requires grad."""
    chunks, gains, weight = [torch.randn(200, 64) for _ in range(2)], [torch.ones(64)] * 2, torch.randn(48, 128)

    def call() -> torch.Tensor:
        return torch.ops.eagle_kernels.norm_concat_linear(
            chunks, 2, "chunk", gains, [1e-6], 0.0, [], [], None, weight, bias, None, 1e-6
        )

    expected = call()
    weight.requires_grad_()
    assert torch.equal(call(), expected)
