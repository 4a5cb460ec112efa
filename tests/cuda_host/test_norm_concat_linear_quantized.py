"""norm_concat_linear on codes in CUDA, emulated: every form of codes and scales against float64, bits, and memory."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

import eagle_kernels as ek
import test_norm_concat_linear_quantized as on_cpu
from accuracy import allow_independent_roundings, expect
from backends import environment_of
from cases import Case, Operands, check_every_value, operands, weight_of_every_code
from cuda_host.conftest import SHARED_MEMORY, is_in_pairs, is_in_threes
from cuda_host.test_norm_concat_linear import FLAVOURS, FUSED_CASES, SPLIT_CASES, TYPES
from eagle_kernels import QuantizedWeight, plan
from eagle_kernels.ops import norm_concat_linear_quantized as codes_op
from eagle_kernels.tuned_configs import Gpu
from guards import GuardedRows, UnchangedTensors, between_forbidden_pages, same_bits

pytestmark = pytest.mark.usefixtures("poisoned_memory", "emulated")

WEIGHTS = [name for name in on_cpu.WEIGHTS if "fp4" not in name]
WITH_ONE_SCALE = [name for name in WEIGHTS if "block" not in name and name != "mxfp8"]  # per row
IN_BLOCKS = [name for name in WEIGHTS if "block" in name or name == "mxfp8"]
IN_LARGE_BLOCKS = ["fp8_block128", "fp8_block128_e8m0"]  # blocks of shards have a scale for each row
IN_FOUR_BITS = ["nvfp4", "mxfp4"]
TOGETHER = {"nvfp4": 64, "mxfp4": 128, "mxfp8": 128}  # columns of four scales
FUSED, CASES = (
    list(dict.fromkeys(replace(case, D=min(case.D, 260)) for case in cases if case.T <= 130))
    for cases in (FUSED_CASES, SPLIT_CASES)
)


@pytest.fixture(autouse=True)
def products(request: pytest.FixtureRequest, emulated: object, monkeypatch: pytest.MonkeyPatch) -> str:
    """Products of warps (mma), with three blocks of the fused kernel on an SM where a test asks for them, unless it
    asks for those of warpgroups (wgmma), as planned or at every T."""
    name = getattr(request, "param", "mma")
    monkeypatch.setenv("EAGLE_KERNELS_FUSED_BLOCKS", "3" if name == "mma-in-threes" else "2")
    if name.startswith("mma"):
        request.getfixturevalue("no_wgmma")
    elif name == "wgmma-at-every-T":
        monkeypatch.setattr(plan, "_FEW_ROWS_OF_CODES", {False: 0, True: 0})
    return name


# The fused kernel, with two blocks on an SM and with three, the split kernels, and the wgmma kernel.
by_all = pytest.mark.parametrize(
    ("products", "T"), [("mma", 5), ("mma-in-threes", 5), ("mma", 19), ("wgmma", 40)], indirect=["products"]
)
by_mma = pytest.mark.parametrize("products", ["mma", "mma-in-threes"], indirect=True)
by_wgmma = pytest.mark.parametrize("products", ["wgmma"], indirect=True)
by_wgmma_at_every_T = pytest.mark.parametrize("products", ["wgmma-at-every-T"], indirect=True)


def in_steps(case: Case, name: str) -> Case:
    """The case in widths that the kernels take."""
    step = 32 if name in IN_BLOCKS else 16
    return replace(case, widths=tuple(-(-H // step) * step for H in case.widths))


def with_weight(call: Operands, weight: QuantizedWeight) -> Operands:
    return replace(call, projection=call.projection | {"weight": weight})


def width_of(T: int) -> int:
    """The width of a chunk, no multiple of 128; for few rows a multiple of 64, as the fused kernel needs."""
    return 192 if T <= 16 else 160


def kernel_of(name: str, T: int, products: str = "mma", H: int | None = None) -> str:
    H = H or width_of(T)
    if T <= 16:
        in_tiles = name in IN_LARGE_BLOCKS and H % 64 == 0
        return "fused" if name in WITH_ONE_SCALE or in_tiles or H % TOGETHER.get(name, H + 1) == 0 else "split"
    return "fused wgmma" if name in WITH_ONE_SCALE and products == "wgmma" else "split"


def explained(call: Operands) -> str:
    return str(ek.explain("norm_concat_linear", call.chunks, **call.sources | call.projection | {"eps": 1e-6}))


def check(case: Case, name: str, kernel: str) -> None:
    case = in_steps(case, name)
    call = operands(case)
    torch.manual_seed(0)
    weight = on_cpu.random_weight(name, case.D, sum(case.widths))
    _, expected = expect(with_weight(call, weight.dequantize(torch.float64)))
    one_row = case.layout == "row"
    guarded = GuardedRows(1 if one_row else call.N, case.D, case.dtype)
    view = guarded.view[0] if one_row else guarded.view
    call = with_weight(call, weight)
    assert explained(call).startswith(f"norm_concat_linear x {weight.format}: cuda/{kernel}, because ")
    with UnchangedTensors([*call.tensors(), *(tensor for tensor in weight.tensors if tensor is not None)]):
        assert call.norm_concat_linear(out=view) is view
    guarded.check_around()
    allow_independent_roundings(expected).check(guarded.view)


@pytest.mark.parametrize(
    ("name", "case"),
    [pytest.param(name, case, id=f"{name}-{case.id}") for name, case in zip(itertools.cycle(WEIGHTS), CASES)],
)
def test_float64_truth(name: str, case: Case) -> None:
    with environment_of(EAGLE_KERNELS_BATCH_INVARIANT="1", EAGLE_KERNELS_BACKEND="cuda"):
        check(case, name, "split")


@pytest.mark.usefixtures("fused_at_every_T")
@pytest.mark.parametrize(
    ("name", "case"),
    [pytest.param(name, case, id=f"{name}-{case.id}") for name, case in zip(itertools.cycle(WITH_ONE_SCALE), FUSED)],
)
def test_float64_truth_in_one_launch(name: str, case: Case) -> None:
    check(case, name, "fused")


@pytest.mark.usefixtures("fused_at_every_T")
@pytest.mark.parametrize(
    ("name", "case"),
    [pytest.param(name, case, id=f"{name}-{case.id}") for name, case in zip(itertools.cycle(IN_LARGE_BLOCKS), FUSED)],
)
def test_float64_truth_of_blocks_in_one_launch(name: str, case: Case) -> None:
    check(replace(case, widths=tuple(-(-H // 64) * 64 for H in case.widths)), name, "fused")


@by_mma
@pytest.mark.parametrize("multiprocessors", [1, 132])  # one range per chunk, or two
@pytest.mark.parametrize("widths", [(192, 192), (64, 832, 320)])  # tails of stages of 256 columns in 1 to 3 warps
@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", ["fp8_block128", "fp8_block128_e8m0"])
def test_float64_truth_of_every_instance_of_blocks_in_one_launch(
    name: str,
    dtype: str,
    flavour: str,
    widths: tuple[int, ...],
    multiprocessors: int,
    products: str,
    emulation: ModuleType,
) -> None:
    for late_copies in (False, True):
        order = {"descending_warps": late_copies, "late_copies": late_copies}
        emulation.set_device(SHARED_MEMORY, **order, multiprocessors=multiprocessors)
        emulation.take_launches()
        check(Case(dtype, widths, 11, "concat", D=150, **FLAVOURS[flavour]), name, "fused")
        in_threes = is_in_threes(emulation.take_launches()[-1])
        assert in_threes == (products == "mma-in-threes" and dtype == "bf16" and flavour != "residuals")


def test_a_scale_of_a_column_of_blocks_is_in_its_rows_alone() -> None:
    """For a column of blocks that two chunks share, and the last one, after which a stage has columns of no scale."""
    chunks, weight, gain = make_call("fp8_block128", 5, K=2, H=320, D=200)
    out = ek.norm_concat_linear(chunks, weight, norm_weight=gain)
    for column in (2, 4):
        scales = weight.scales.clone()
        scales[1, column] = float("nan")
        bad = QuantizedWeight(weight.codes, scales, weight.format)
        dirty = ek.norm_concat_linear(chunks, bad, norm_weight=gain)
        assert same_bits(dirty[:, :128], out[:, :128]) and dirty[:, 128:].isnan().all()


WGMMA = [case for case in CASES if case.dtype_name == "bf16" and not case.post_norm and 0 < case.T <= 128]


@by_wgmma_at_every_T
@pytest.mark.parametrize(
    ("name", "case"),
    [pytest.param(name, case, id=f"{name}-{case.id}") for name, case in zip(itertools.cycle(WITH_ONE_SCALE), WGMMA)],
)
def test_float64_truth_of_the_wgmma_kernel(name: str, case: Case, products: str) -> None:
    check(case, name, "fused wgmma")


# What selects an instance of the kernel's template besides the dtype: with_form of csrc/cuda/scales.cuh,
# launch_rows of norm_concat_linear.cu, and whether the gain is multiplied in pairs.
FORMS = ["fp8_row", "fp8_block128", "fp8_block32_e8m0", "int8_row"]
FLAVOURS = {**FLAVOURS, "offset": {"norm_offset": 1.0}}


@pytest.mark.parametrize(
    ("products", "T"), [("mma", 3), ("mma-in-threes", 3), ("mma", 24), ("mma", 40)], indirect=["products"]
)
@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", FORMS)
def test_float64_truth_of_every_instance(
    name: str, dtype: str, flavour: str, T: int, products: str, emulation: ModuleType
) -> None:
    """The second step of a chunk's last stage is outside its 160 columns, and a block of 128 ends in the next
    chunk."""
    kernel = kernel_of(name, T, H=160)
    emulation.take_launches()
    check(Case(dtype, (160,) * 3, T, "concat" if T == 3 else "chunk", D=150, **FLAVOURS[flavour]), name, kernel)
    in_threes = is_in_threes(emulation.take_launches()[-1])
    assert kernel != "fused" or in_threes == (products == "mma-in-threes" and flavour != "residuals")


IN_PAIRS = ["fp8_row", "int8_row", "nvfp4", "mxfp4", "mxfp8"]


@pytest.mark.parametrize(("flavour", "ranges"), [("no-gain", 6), ("gain", 4), ("fp32-gain", 8), ("offset", 4)])
@pytest.mark.parametrize(
    ("name", "dtype", "columns"),  # scales multiply codes in bf16 alone; scales of blocks, no 96 columns
    [
        *((name, "bf16", columns) for name in IN_PAIRS for columns in (64, 96)),
        *((name, "fp16", columns) for name in IN_PAIRS[:2] for columns in (64, 96)),
        *((name, dtype, 64) for name in IN_LARGE_BLOCKS for dtype in TYPES),
    ],
)
def test_float64_truth_of_every_instance_in_pairs(
    name: str,
    dtype: str,
    columns: int,
    flavour: str,
    ranges: int,
    emulation: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranges some of which go on into the next chunk, and a row's bits, which do not depend on T."""
    monkeypatch.setenv("EAGLE_KERNELS_FUSED_BLOCKS", "1")
    monkeypatch.setenv("EAGLE_KERNELS_FUSED_COLUMNS", str(columns))
    monkeypatch.setenv("EAGLE_KERNELS_FUSED_RANGES", str(ranges))
    # In units of 256 columns: 4 ranges have 6 parts, 6 have 8, and 8 are of one chunk each.
    widths = {4: (896, 256, 128, 256), 6: (1152, 256, 1152, 1280), 8: (384, 1408, 640)}[ranges]
    for T, late_copies in ((3, False), (16, True)):
        order = {"descending_warps": late_copies, "late_copies": late_copies}
        emulation.set_device(SHARED_MEMORY, **order, random=ranges if T == 3 else 0)
        emulation.take_launches()
        check(Case(dtype, widths, T, "concat" if T == 3 else "chunk", D=150, **FLAVOURS[flavour]), name, "fused")
        launch = emulation.take_launches()[-1]
        assert is_in_pairs(launch)
        assert (launch.grid, launch.cluster) == ([-(-150 // columns), ranges // 2], ranges // 2)
    chunks, weight, gain = make_call(name, 16, TYPES[dtype], H=896, D=150)  # three chunks, of four units each
    whole = ek.norm_concat_linear(chunks, weight, norm_weight=gain)
    for T in (1, 8, 9):
        assert same_bits(ek.norm_concat_linear([x[-T:] for x in chunks], weight, norm_weight=gain), whole[-T:]), T
    assert all(is_in_pairs(launch) for launch in emulation.take_launches() if launch.threads)


def test_a_cluster_of_two_has_an_sm_for_each_block(emulation: ModuleType) -> None:
    """With residuals, for which there are no pairs: 64 clusters of two, where those of three would share SMs."""
    chunks, weight, _ = make_call("fp8_row", 1, K=2, H=4096, D=4096)
    emulation.run_kernels(False)
    try:
        emulation.take_launches()
        ek.norm_concat_linear(chunks, weight, residuals=chunks)
    finally:
        emulation.run_kernels(True)
    launch = emulation.take_launches()[-1]
    assert (launch.grid, launch.rows) == ([64, 2], 1)


def test_wide_pairs_for_whose_parts_a_block_has_no_room_are_not_taken(
    emulation: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four blocks of two chunks each are sent eight parts, of two shares of 64 columns or of three of 96."""
    for name, value in (("BLOCKS", "1"), ("COLUMNS", "96"), ("RANGES", "4")):
        monkeypatch.setenv(f"EAGLE_KERNELS_FUSED_{name}", value)
    for K, columns in ((7, 96), (8, 64)):
        emulation.take_launches()
        check(Case("bf16", (256,) * K, 16, D=150), "fp8_row", "fused")
        launch = emulation.take_launches()[-1]
        assert launch.grid[0] == -(-150 // columns) and launch.grid[1] * launch.rows == 4


@pytest.mark.parametrize("ranges", [2, 5])
def test_an_odd_block_and_two_that_are_alone_are_no_pairs(
    ranges: int, emulation: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE_KERNELS_FUSED_BLOCKS", "1")
    monkeypatch.setenv("EAGLE_KERNELS_FUSED_RANGES", str(ranges))
    emulation.take_launches()
    check(Case("bf16", (896, 896), 5, D=150), "fp8_row", "fused")
    assert not is_in_pairs(emulation.take_launches()[-1])


def test_pairs_are_for_codes_on_a_gpu_with_memory(emulation: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 132 SMs, where a block can have 227 KB. For 4096 and 6144 outputs the plan takes them of its own accord, for
    6144 in blocks of 96 columns unless scales are of blocks; of a dense weight never."""
    monkeypatch.delenv("EAGLE_KERNELS_FUSED_BLOCKS")
    row, blocks, wide_row, wide_blocks = (
        make_call(name, 1, K=2, H=1024, D=D)[1] for D in (4096, 6144) for name in ("fp8_row", "fp8_block128")
    )
    chunks = [torch.randn(1, 1024).bfloat16()] * 2
    emulation.run_kernels(False)
    try:
        for memory, sms, weight, pairs in (
            (SHARED_MEMORY, 132, row, 64),
            (SHARED_MEMORY, 132, blocks, 64),
            (SHARED_MEMORY, 132, wide_row, 64),
            (SHARED_MEMORY, 78, make_call("fp8_row", 1, K=2, H=1024, D=3264)[1], None),  # 34 wide pairs would fit best
            (SHARED_MEMORY - 16, 132, row, None),
            (SHARED_MEMORY - 16, 132, wide_row, None),
            (SHARED_MEMORY, 132, wide_blocks, None),
            (SHARED_MEMORY, 132, row.dequantize(torch.bfloat16), None),
        ):
            emulation.set_device(memory, descending_warps=False, multiprocessors=sms)
            emulation.take_launches()
            ek.norm_concat_linear(chunks, weight)
            launch = emulation.take_launches()[-1]
            assert is_in_pairs(launch) == (pairs is not None)
            assert pairs is None or launch.grid == [pairs, 2]
    finally:
        emulation.run_kernels(True)


@by_wgmma_at_every_T
@pytest.mark.parametrize("T", [6, 40, 70])
@pytest.mark.parametrize(
    ("columns", "D", "multiprocessors"),  # blocks of 2, 3 and 4 warpgroups
    [(128, 70, 2), (192, 190, 2), (256, 600, 2)],
)
@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("name", ["fp8_row", "fp8_block128", "int8_row"])
def test_float64_truth_of_every_wgmma_instance(
    name: str, flavour: str, columns: int, D: int, multiprocessors: int, T: int, products: str, emulation: ModuleType
) -> None:
    """Chunks of three stages and, with one scale per row, a part of a fourth. 70 rows take two rounds."""
    H = 384 if "block" in name else 400
    for late_copies in (False, True):
        order = {"descending_warps": late_copies, "late_copies": late_copies}
        emulation.set_device(SHARED_MEMORY, **order, multiprocessors=multiprocessors)
        emulation.take_launches()
        check(Case("bf16", (H,) * 2, T, "concat" if T == 6 else "chunk", D=D, **FLAVOURS[flavour]), name, "fused wgmma")
        launch = emulation.take_launches()[-1]
        assert (launch.threads, launch.grid[0]) == (2 * columns, -(-T // 64) * -(-D // columns))
        assert launch.cluster == launch.grid[1] > 1


@by_wgmma_at_every_T
@pytest.mark.parametrize("name", ["fp8_row", "fp8_block128", "fp8_block128_e8m0", "int8_row"])
def test_a_rows_bits_do_not_depend_on_T_of_the_wgmma_kernel(name: str, products: str) -> None:
    chunks, weight, gain = make_call(name, 128, H=256)
    for residuals in (None, [chunk.flip(0) for chunk in chunks]):
        whole = ek.norm_concat_linear(chunks, weight, norm_weight=gain, residuals=residuals)
        for T in (1, 17, 65):
            last = None if residuals is None else [residual[-T:] for residual in residuals]
            rows = ek.norm_concat_linear([chunk[-T:] for chunk in chunks], weight, norm_weight=gain, residuals=last)
            assert same_bits(rows, whole[-T:]), T


@by_wgmma_at_every_T
def test_a_row_out_of_range_is_zero_whatever_the_gain(products: str, emulation: ModuleType) -> None:
    """Over several turns, 8 stages in a ring of 3: the NaN of 0 * inf left in a stage was squared in the next turn."""
    emulation.set_device(SHARED_MEMORY, descending_warps=False, multiprocessors=1)
    chunks, weight, gain = make_call("fp8_row", 5, K=2, H=1024)
    gain[1, ::7] = float("inf")
    for norm in ("chunk", "concat"):
        arguments = {"norm": norm, "norm_weight": gain if norm == "chunk" else gain.flatten()}
        out = ek.norm_concat_linear(chunks, weight, indices=torch.tensor([0, -1, 2, 5]), **arguments)
        assert same_bits(out[[1, 3]], torch.zeros(2, 67).bfloat16()) and not out[[0, 2]].isfinite().any()


@by_wgmma
def test_blocks_that_end_inside_a_stage_are_left_to_the_split_kernels(products: str) -> None:
    """They end there because of the widths or the blocks of scales. fp16 is left to them too, as x times its gain may
    overflow, and so are chunks of different widths."""
    for name, H, dtype, kernel in [
        ("fp8_block128", 256, torch.bfloat16, "fused wgmma"),
        ("fp8_block128", 160, torch.bfloat16, "split"),
        ("fp8_block32", 256, torch.bfloat16, "split"),
        ("mxfp8", 256, torch.bfloat16, "split"),
        ("fp8_row", 160, torch.bfloat16, "fused wgmma"),
        ("fp8_row", 160, torch.float16, "split"),
    ]:
        chunks, weight, gain = make_call(name, 33, dtype, H=H)
        said = str(ek.explain("norm_concat_linear", chunks, weight, norm_weight=gain))
        assert said.startswith(f"norm_concat_linear x {weight.format}: cuda/{kernel}, because "), (name, H, said)
    chunks = [torch.randn(33, H).bfloat16() for H in (256, 160, 96)]
    weight = on_cpu.random_weight("fp8_block128", 67, 512)
    assert "cuda/split" in str(ek.explain("norm_concat_linear", chunks, weight))
    out = ek.norm_concat_linear(chunks, weight)
    with environment_of(EAGLE_KERNELS_BATCH_INVARIANT="1", EAGLE_KERNELS_BACKEND="cuda"):
        assert same_bits(out, ek.norm_concat_linear(chunks, weight))


@pytest.mark.parametrize(("products", "T"), [("mma", 5), ("wgmma", 40)], indirect=["products"])
def test_a_last_chunk_that_ends_inside_a_stage_has_the_kernel_that_explain_says(
    products: str, T: int, emulation: ModuleType
) -> None:
    """By its first chunk alone the call would run in one launch, and the primitive would take it."""
    chunks, weight = [torch.randn(T, H).bfloat16() for H in (128, 96)], on_cpu.random_weight("fp8_block128", 67, 224)
    assert "cuda/split" in str(ek.explain("norm_concat_linear", chunks, weight))
    emulation.take_launches()
    ek.norm_concat_linear(chunks, weight)
    assert [launch.cluster for launch in emulation.take_launches() if launch.threads] == [1, 1]


def make_call(
    name: str, T: int, dtype: torch.dtype = torch.bfloat16, K: int = 3, H: int | None = None, D: int = 67
) -> tuple:
    H = H or width_of(T)
    chunks = [torch.randn(T, H).to(dtype) for _ in range(K)]
    return chunks, on_cpu.random_weight(name, D, K * H), (torch.rand(K, H) + 0.5).to(dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", FORMS)
def test_a_rows_bits_do_not_depend_on_T_or_the_instance(name: str, dtype: str) -> None:
    chunks, weight, gain = make_call(name, 130, TYPES[dtype])
    arguments = {"norm_weight": gain}
    with environment_of(EAGLE_KERNELS_BATCH_INVARIANT="1", EAGLE_KERNELS_BACKEND="cuda"):
        for residuals in (None, [chunk.flip(0) for chunk in chunks]):

            def call(T: int, residuals: list[Tensor] | None = residuals) -> Tensor:
                last = None if residuals is None else [residual[-T:] for residual in residuals]
                return ek.norm_concat_linear([chunk[-T:] for chunk in chunks], weight, residuals=last, **arguments)

            whole = call(130)
            for T in (1, 33, 65):
                assert same_bits(call(T), whole[-T:]), T


@by_mma
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", FORMS)
def test_a_rows_bits_do_not_depend_on_T_up_to_16(name: str, dtype: str, products: str) -> None:
    chunks, weight, gain = make_call(name, 16, TYPES[dtype])
    residuals = [chunk.flip(0) for chunk in chunks]
    for given in (None, residuals):
        whole = ek.norm_concat_linear(chunks, weight, norm_weight=gain, residuals=given)
        for T in (1, 8, 9):
            last = None if given is None else [residual[-T:] for residual in given]
            rows = ek.norm_concat_linear([chunk[-T:] for chunk in chunks], weight, norm_weight=gain, residuals=last)
            assert same_bits(rows, whole[-T:]), T


@by_all
@pytest.mark.parametrize("name", FORMS)
def test_a_gain_in_pairs_gives_the_bits_of_one_in_fp32(name: str, T: int) -> None:
    chunks, weight, gain = make_call(name, T)
    out = ek.norm_concat_linear(chunks, weight, norm_weight=gain)
    assert same_bits(out, ek.norm_concat_linear(chunks, weight, norm_weight=gain.float()))
    ones = ek.norm_concat_linear(chunks, weight, norm_weight=torch.ones_like(gain))
    assert same_bits(ones, ek.norm_concat_linear(chunks, weight))


@pytest.mark.parametrize(
    ("products", "rows"),
    [("mma", 16), ("mma-in-threes", 16), ("mma", 32), ("wgmma-at-every-T", 32)],
    indirect=["products"],
)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", ["fp8_row", "int8_row", "mxfp8"])
@pytest.mark.parametrize("shift", [0, 64])
def test_every_code_and_scale(shift: int, name: str, dtype: str, rows: int, products: str) -> None:
    """x is the identity, so outputs are the weight's values, rounded once."""
    weight = weight_of_every_code(name, shift)
    expected = weight.dequantize(torch.float64).to(TYPES[dtype]).t()
    identity = torch.eye(32, dtype=TYPES[dtype])
    result = torch.cat([ek.norm_concat_linear([x], weight, norm="none") for x in identity.split(rows)])
    assert torch.equal(result.isnan(), expected.isnan())
    assert torch.equal(result.nan_to_num(7), expected.nan_to_num(7))


@by_all
@pytest.mark.parametrize("name", ["fp8_row", "fp8_block128", "int8_row"])
def test_a_code_times_a_large_gain_stays_in_fp16(name: str, T: int) -> None:
    """448 * 300 is beyond fp16's 65504."""
    chunks, weight, _ = make_call(name, T, torch.float16)
    out = ek.norm_concat_linear(chunks, weight, norm_weight=torch.full((3, width_of(T)), 300.0).half())
    ones = ek.norm_concat_linear(chunks, weight)
    torch.testing.assert_close(out.double(), 300 * ones.double(), rtol=5e-3, atol=0.5)


@by_all
@pytest.mark.parametrize("name", ["fp8_row", "fp8_block128", "fp8_block32", "mxfp8", "int8_row"])
def test_a_global_scale_multiplies_every_format(name: str, T: int) -> None:
    chunks, weight, _ = make_call(name, T)
    twice = QuantizedWeight.of_tensors(weight.codes, weight.scales, torch.tensor(2.0), name, weight.block)
    assert same_bits(ek.norm_concat_linear(chunks, twice), 2 * ek.norm_concat_linear(chunks, weight))


@by_all
@pytest.mark.parametrize(("of_scales", "of_all"), [(2.0**-120, 2.0**120), (2.0**120, 2.0**-120)])
@pytest.mark.parametrize("name", ["fp8_row", "fp8_block128", "int8_row"])
def test_scales_that_are_far_apart_do_not_overflow(name: str, of_scales: float, of_all: float, T: int) -> None:
    chunks, weight, _ = make_call(name, T)
    scales = torch.rand(weight.scales.shape) + 0.1
    near = QuantizedWeight.of_tensors(weight.codes, scales, None, name, weight.block)
    far = QuantizedWeight.of_tensors(weight.codes, scales * of_scales, torch.tensor(of_all), name, weight.block)
    assert same_bits(ek.norm_concat_linear(chunks, far), ek.norm_concat_linear(chunks, near))


@by_all
@pytest.mark.parametrize("name", ["fp8_row", "fp8_block128", "mxfp8"])
def test_a_nan_code_is_in_its_column_alone(name: str, T: int) -> None:
    chunks, weight, _ = make_call(name, T)
    clean = ek.norm_concat_linear(chunks, weight)
    for place, row in enumerate(on_cpu.BAD_ROWS):
        weight.codes.view(torch.uint8)[row, (0, 1, 159, 160, 479)[place]] = 0x7F if place % 2 else 0xFF
    on_cpu.check_columns(clean, ek.norm_concat_linear(chunks, weight), float("nan"))


@by_all
@pytest.mark.parametrize(
    ("name", "scale"),
    [
        *((name, scale) for name in ("fp8_row", "int8_row", "fp8_block32") for scale in (on_cpu.NAN, on_cpu.INF, 0.0)),
        ("mxfp8", 255),
    ],
)
def test_a_scale_that_is_no_number_or_zero_is_in_its_columns_alone(name: str, scale: float, T: int) -> None:
    """The columns of the first row of scales, which 32 columns of the output share in fp8_block32."""
    chunks, weight, _ = make_call(name, T)
    clean = ek.norm_concat_linear(chunks, weight)
    scales = weight.scales if weight.scales.dtype == torch.float32 else weight.scales.view(torch.uint8)
    scales[0] = scale
    dirty = ek.norm_concat_linear(chunks, weight)
    shared = weight.block[0]
    assert same_bits(clean[:, shared:].contiguous(), dirty[:, shared:].contiguous())
    assert not (dirty[:, :shared].any() if scale == 0 else dirty[:, :shared].isfinite().any())


@by_all
@pytest.mark.parametrize("stale", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", FORMS)
def test_a_bad_row_stays_in_its_row(name: str, stale: float, T: int) -> None:
    chunks, weight, _ = make_call(name, T)
    clean = ek.norm_concat_linear(chunks, weight)
    chunks[1][4, 50] = stale
    dirty = ek.norm_concat_linear(chunks, weight)
    kept = [row for row in range(T) if row != 4]
    assert same_bits(clean[kept], dirty[kept]) and not dirty[4].isfinite().any()


@pytest.mark.parametrize("at", ["begin", "end"])
@pytest.mark.parametrize(
    ("products", "H", "D", "N"),
    [
        ("mma", 96, 35, 5),
        ("mma", 352, 129, 11),
        ("mma", 320, 129, 11),
        ("mma", 352, 129, 19),
        ("mma", 32, 1, 40),
        ("wgmma", 352, 129, 33),
        ("wgmma", 256, 1, 40),
    ],
    indirect=["products"],
)
@pytest.mark.parametrize("name", WEIGHTS)
def test_no_operand_is_read_or_written_beyond_its_end(
    name: str, H: int, D: int, N: int, at: str, products: str
) -> None:
    """Codes, scales and sources lie between pages that trap; indices are out of range both ways. A failure is a
    segmentation fault."""

    def guarded(tensor: Tensor) -> Tensor:
        return between_forbidden_pages(tensor, at)

    chunks, weight, gain = make_call(name, 4, K=2, H=H, D=D)
    tensors = [None if tensor is None else guarded(tensor) for tensor in weight.tensors]
    inside = QuantizedWeight.of_tensors(*tensors, weight.format, weight.block)
    arguments = {"indices": torch.tensor([0, -1, 6, 3, 2**40, -(2**63), 4, 3, 2, 1, 0]).repeat(4)[:N]}
    arguments |= {"norm_weight": gain, "residuals": chunks[::-1], "bias": torch.randn(D)}
    out = between_forbidden_pages(torch.empty(N, D).bfloat16(), at)
    moved = {name: _each(guarded, value) for name, value in arguments.items()}
    ek.norm_concat_linear(_each(guarded, chunks), inside, **moved, out=out)
    assert same_bits(out, ek.norm_concat_linear(chunks, weight, **arguments))


def _each(move: Callable[[Tensor], Tensor], value: Tensor | list[Tensor]) -> Tensor | list[Tensor]:
    return [move(tensor) for tensor in value] if isinstance(value, list) else move(value)


@by_all
def test_strided_codes_and_scales_are_taken(T: int, products: str) -> None:
    """Slices of wider buffers, from column 16 on, with NaN between the rows."""
    for name in WEIGHTS:
        chunks, weight, gain = make_call(name, T)
        buffers = [torch.full((t.shape[0], t.shape[1] + 32), 0xFF if t.itemsize == 1 else torch.nan) for t in
                   weight.tensors[:2]]  # fmt: skip
        views = []
        for buffer, tensor in zip(buffers, weight.tensors[:2], strict=True):
            raw = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
            wide = buffer.to(raw.dtype)
            wide[:, 16:-16] = raw
            views.append(wide.view(tensor.dtype)[:, 16:-16])
        strided = QuantizedWeight.of_tensors(*views, None, weight.format, weight.block)
        assert f"cuda/{kernel_of(name, T, products)}," in str(
            ek.explain("norm_concat_linear", chunks, strided, norm_weight=gain)
        )
        out = ek.norm_concat_linear(chunks, strided, norm_weight=gain)
        assert same_bits(out, ek.norm_concat_linear(chunks, weight, norm_weight=gain)), name


@by_all
@pytest.mark.parametrize("early", ["0", "1"])
@pytest.mark.parametrize("name", ["fp8_row", "mxfp8"])
def test_codes_are_copied_before_the_previous_kernel_ends_unless_switched_off(
    name: str, early: str, emulation: ModuleType, T: int, products: str
) -> None:
    """All codes of a small weight are, 16 bytes at a time; scales are not, but those that multiply codes, in fours."""
    chunks, weight, _ = make_call(name, T, K=1, H=256)
    emulation.take_launches()
    with environment_of(EAGLE_KERNELS_BACKEND="cuda", EAGLE_KERNELS_EARLY_WEIGHT=early):
        ek.norm_concat_linear(chunks, weight)
    copies = [launch.early_copies for launch in emulation.take_launches() if launch.threads]
    kernel = kernel_of(name, T, products, H=256)
    rounds = {"fused": 1, "split": -(-T // 32), "fused wgmma": 0}[kernel]
    of_scales = 67 * 256 // TOGETHER[name] if name in TOGETHER and kernel == "fused" else 0
    assert copies == [(67 * 256 // 16 + of_scales) * rounds * int(early)] + [0] * (kernel == "split")


IN_FOURS = "the columns of four scales, which are copied together"


@pytest.mark.parametrize(
    ("name", "changed", "reason"),
    [
        ("fp8_row", {"H": 72}, "H=72 is no multiple of 16"),
        ("fp8_block128", {"H": 144}, "H=144 is no multiple of 32"),
        ("fp8_block128", {"H": 144, "T": 129}, "H=144 is no multiple of 32"),
        ("int8_row", {"dtype": torch.float32}, "tensor cores multiply 16-bit types"),
        ("nvfp4", {"H": 160}, f"H=160 is no multiple of 64, {IN_FOURS}"),
        ("mxfp4", {"H": 192}, f"H=192 is no multiple of 128, {IN_FOURS}"),
        ("nvfp4", {"dtype": torch.float16}, "codes times their scales may leave the range of torch.float16"),
    ],
)
def test_what_they_do_not_take_goes_elsewhere_and_explain_says_why(name: str, changed: dict, reason: str) -> None:
    chunks, weight, gain = make_call(name, **{"T": 3} | changed)
    said = str(ek.explain("norm_concat_linear", chunks, weight, norm_weight=gain))
    because = "because the weight is dequantized in every call: "
    expected = f"norm_concat_linear x {weight.format}: reference/plain torch, {because}"
    assert said.startswith(f"{expected}cuda: {reason}; triton: ")
    out = ek.norm_concat_linear(chunks, weight, norm_weight=gain)
    with environment_of(EAGLE_KERNELS_BACKEND="reference"):
        assert same_bits(out, ek.norm_concat_linear(chunks, weight, norm_weight=gain))


@pytest.mark.parametrize(("name", "T"), [("fp8_row", 129), ("fp8_block128", 193)])
def test_many_rows_that_triton_does_not_take_are_not_dequantized(name: str, T: int) -> None:
    """As blocks of 128 columns do not divide chunks of 2880."""
    chunks, weight, gain = make_call(name, T, H=160)
    said = str(ek.explain("norm_concat_linear", chunks, weight, norm_weight=gain))
    assert said.startswith(f"norm_concat_linear x {weight.format}: cuda/split, because triton: "), said
    assert said.endswith(f"; T={T} <= 512: its kernels widen the codes {-(-T // 64)} times or more")
    out = ek.norm_concat_linear(chunks, weight, norm_weight=gain)
    with environment_of(EAGLE_KERNELS_BATCH_INVARIANT="1", EAGLE_KERNELS_BACKEND="cuda"):
        assert same_bits(out, ek.norm_concat_linear(chunks, weight, norm_weight=gain))


@pytest.mark.parametrize("T", [200, 513])
def test_what_triton_refuses_at_the_call_runs_as_explain_says(
    T: int, emulation: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first plan supposes chunks of one width, which Triton takes. The weight was dequantized, though the second
    plan was CUDA's."""
    monkeypatch.setattr(plan, "unsupported_reason", lambda backend, device: None)
    monkeypatch.setattr(plan, "gpu_of", lambda device: Gpu("NVIDIA H100", 90, 227 << 10))
    monkeypatch.setattr(codes_op, "check", lambda record, primitive: record.check())
    monkeypatch.setattr(codes_op, "triton_kernels", lambda op: SimpleNamespace(run=lambda *call: False))
    ran: list[str] = []
    monkeypatch.setattr(codes_op.NormConcatLinearQuantized, "reference", lambda record: ran.append("reference"))
    monkeypatch.setattr(plan, "_PREFERENCE", {"cpu": plan._PREFERENCE["cuda"]})
    chunks = [torch.empty(T, H).half() for H in (128, 256, 128)]
    weight = on_cpu.random_weight("fp8_block128", 67, 512)  # with rows of fp16 it is not dequantized once
    emulation.run_kernels(False)
    emulation.take_launches()
    try:
        with environment_of(EAGLE_KERNELS_BACKEND="auto"):
            chosen = ek.explain("norm_concat_linear", chunks, weight)
            ek.norm_concat_linear(chunks, weight)
    finally:
        emulation.run_kernels(True)
    ran += ["cuda"] * any(launch.threads for launch in emulation.take_launches())
    assert ran == [chosen.backend] == ["cuda" if T <= 512 else "reference"], chosen


@pytest.mark.parametrize(
    ("without", "bits", "reads"),
    [
        ((), 8, True),
        ((), 4, True),
        ((), 12, False),
        (("triton",), 8, True),
        (("triton",), 4, False),
        (("cuda",), 8, True),
        (("cuda", "triton"), 8, False),
    ],
)
def test_a_gpu_reads_codes_with_either_backend(
    without: tuple[str, ...], bits: int, reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's kernels read 8 bits without Triton; such codes were dequantized when they were loaded."""
    monkeypatch.setattr(plan, "unsupported_reason", lambda backend, device: "none" if backend in without else None)
    with environment_of(EAGLE_KERNELS_BACKEND="auto"):
        assert codes_op.can_read_codes(torch.device("cuda"), bits) is reads
    with environment_of(EAGLE_KERNELS_BACKEND="reference"):
        assert not codes_op.can_read_codes(torch.device("cuda"), bits)


def scaled_in_fours(case: Case, name: str) -> Case:
    step = TOGETHER[name]
    return replace(case, widths=tuple(-(-H // step) * step for H in case.widths))


SCALED = list(TOGETHER)
OF_BF16 = [case for case in CASES if case.dtype_name == "bf16"]


@pytest.mark.parametrize(
    ("name", "case"),
    [pytest.param(name, case, id=f"{name}-{case.id}") for name, case in zip(itertools.cycle(IN_FOUR_BITS), OF_BF16)],
)
def test_float64_truth_of_four_bits(name: str, case: Case) -> None:
    with environment_of(EAGLE_KERNELS_BATCH_INVARIANT="1", EAGLE_KERNELS_BACKEND="cuda"):
        check(scaled_in_fours(case, name), name, "split")


@pytest.mark.usefixtures("fused_at_every_T")
@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(name, case, id=f"{name}-{case.id}")
        for name, case in zip(itertools.cycle(SCALED), FUSED)
        if case.dtype_name == "bf16" and (case.residuals == "" or name != "mxfp8")
    ],
)
def test_float64_truth_of_scaled_codes_in_one_launch(name: str, case: Case) -> None:
    check(scaled_in_fours(case, name), name, "fused")


@pytest.mark.parametrize("multiprocessors", [1, 132])  # one range per chunk, or several
@pytest.mark.parametrize(
    ("products", "T"), [("mma", 3), ("mma-in-threes", 3), ("mma", 24), ("mma", 40)], indirect=["products"]
)
@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("name", SCALED)
def test_float64_truth_of_every_instance_of_scaled_codes(
    name: str, flavour: str, T: int, multiprocessors: int, products: str, emulation: ModuleType
) -> None:
    """Of unlike chunks, the first and the last end inside a stage of 256 columns."""
    if name == "mxfp8" and (T > 16 or flavour == "residuals"):
        pytest.skip("the split kernels scale its sums")
    widths = tuple(units * TOGETHER[name] for units in (1, 6, 3))
    for late_copies in (False, True):
        order = {"descending_warps": late_copies, "late_copies": late_copies}
        emulation.set_device(SHARED_MEMORY, **order, multiprocessors=multiprocessors)
        case = Case("bf16", widths, T, "concat" if T == 3 else "chunk", D=150, **FLAVOURS[flavour])
        emulation.take_launches()
        check(case, name, kernel_of(name, T, H=TOGETHER[name]))
        in_threes = is_in_threes(emulation.take_launches()[-1])
        assert T > 16 or in_threes == (products == "mma-in-threes" and flavour != "residuals")


@pytest.mark.parametrize(("products", "rows"), [("mma", 16), ("mma-in-threes", 16), ("mma", 32)], indirect=["products"])
@pytest.mark.parametrize("shift", [0, 64])
@pytest.mark.parametrize("name", SCALED)
def test_every_code_times_every_scale(name: str, shift: int, rows: int, products: str) -> None:
    """x is the identity, so outputs are the weight's values. A byte of two e2m1 codes has each with each."""
    weight = weight_of_every_code(name, shift, 128)
    expected = weight.dequantize(torch.float64).bfloat16().t()
    identity = torch.eye(128, dtype=torch.bfloat16)
    result = torch.cat([ek.norm_concat_linear([x], weight, norm="none") for x in identity.split(rows)])
    check_every_value(result, expected, multiplies_codes=True)


@pytest.mark.parametrize(("products", "T"), [("mma", 5), ("mma-in-threes", 5), ("mma", 19)], indirect=["products"])
@pytest.mark.parametrize("name", SCALED)
def test_scaled_codes_keep_to_their_rows(name: str, T: int, products: str) -> None:
    """The bits of a row depend on no other, on no gain's dtype and on no number of rows; a bad scale or code is in its
    column of the output alone."""
    H = 3 * TOGETHER[name]
    chunks, weight, gain = make_call(name, T, H=H)
    clean = ek.norm_concat_linear(chunks, weight, norm_weight=gain)
    assert same_bits(clean, ek.norm_concat_linear(chunks, weight, norm_weight=gain.float()))
    for rows in (1, 3):
        few = ek.norm_concat_linear([chunk[-rows:] for chunk in chunks], weight, norm_weight=gain)
        assert T > 16 or same_bits(few, clean[-rows:])
    assert weight.scales.dtype.itemsize == 1
    for place, row in enumerate(on_cpu.BAD_ROWS):
        weight.scales.view(torch.uint8)[row, place] = 0x7F if name == "nvfp4" else 0xFF
    on_cpu.check_columns(clean, ek.norm_concat_linear(chunks, weight, norm_weight=gain), float("nan"))
    chunks, weight, gain = make_call(name, T, H=H)
    clean = ek.norm_concat_linear(chunks, weight)
    chunks[1][4, 50] = float("inf")
    dirty = ek.norm_concat_linear(chunks, weight)
    kept = [row for row in range(T) if row != 4]
    assert same_bits(clean[kept], dirty[kept]) and not dirty[4].isfinite().any()


@pytest.mark.parametrize("name", IN_FOUR_BITS)
def test_a_rows_bits_do_not_depend_on_T_in_four_bits(name: str) -> None:
    chunks, weight, gain = make_call(name, 70, H=2 * TOGETHER[name])
    with environment_of(EAGLE_KERNELS_BATCH_INVARIANT="1", EAGLE_KERNELS_BACKEND="cuda"):
        for residuals in (None, [chunk.flip(0) for chunk in chunks]):
            whole = ek.norm_concat_linear(chunks, weight, norm_weight=gain, residuals=residuals)
            for T in (1, 31, 40):
                last = None if residuals is None else [residual[-T:] for residual in residuals]
                rows = ek.norm_concat_linear([chunk[-T:] for chunk in chunks], weight, norm_weight=gain, residuals=last)
                assert same_bits(rows, whole[-T:]), T


@pytest.mark.parametrize("at", ["begin", "end"])
@pytest.mark.parametrize(("D", "N"), [(129, 11), (35, 19), (1, 40)])
@pytest.mark.parametrize("has_residuals", [False, True])
@pytest.mark.parametrize("name", SCALED)
def test_scaled_codes_are_read_within_their_ends(name: str, has_residuals: bool, D: int, N: int, at: str) -> None:
    """The last stage of a chunk has half of its columns."""
    chunks, weight, gain = make_call(name, N, K=2, H=3 * TOGETHER[name], D=D)
    tensors = [None if tensor is None else between_forbidden_pages(tensor, at) for tensor in weight.tensors]
    inside = QuantizedWeight.of_tensors(*tensors, weight.format, weight.block)
    residuals = chunks[::-1] if has_residuals else None
    out = between_forbidden_pages(torch.empty(N, D).bfloat16(), at)
    ek.norm_concat_linear(chunks, inside, norm_weight=gain, residuals=residuals, out=out)
    assert same_bits(out, ek.norm_concat_linear(chunks, weight, norm_weight=gain, residuals=residuals))


@pytest.mark.parametrize("name", SCALED)
def test_scales_that_cannot_be_copied_in_fours_are_left_to_others_and_explain_says_so(name: str) -> None:
    chunks, weight, gain = make_call(name, 5, H=2 * TOGETHER[name])
    expected = ek.norm_concat_linear(chunks, weight, norm_weight=gain)
    D, columns = weight.scales.shape
    for offset, wider in ((1, 8), (4, 1), (4, 4)):
        buffer = torch.full((D, columns + offset + wider), 0xFF, dtype=torch.uint8)
        view = buffer[:, offset : offset + columns].view(weight.scales.dtype)
        view.view(torch.uint8).copy_(weight.scales.view(torch.uint8))
        moved = QuantizedWeight.of_tensors(weight.codes, view, weight.global_scale, name, weight.block)
        said = str(ek.explain("norm_concat_linear", chunks, moved, norm_weight=gain))
        in_fours = (offset, wider) == (4, 4)
        assert ("cuda/fused," in said) == in_fours, said
        assert in_fours or name == "mxfp8" or "their address or row stride is no multiple of 4 bytes" in said
        out = ek.norm_concat_linear(chunks, moved, norm_weight=gain)
        torch.testing.assert_close(out, expected, rtol=2**-6, atol=2**-6)
        assert not in_fours or same_bits(out, expected)


@pytest.mark.parametrize("what", ["address", "width"])
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_the_primitive_refuses_scales_that_cannot_be_copied_in_fours(
    name: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were a plan to choose it all the same: a GPU would fail at the first copy, or multiply another chunk's scales."""
    chunks, weight, _ = make_call(name, 5, H=2 * TOGETHER[name] + (TOGETHER[name] // 2 if what == "width" else 0))
    D, columns = weight.scales.shape
    first = 1 if what == "address" else 0
    padded = torch.zeros(D, columns // 4 * 4 + 8, dtype=torch.uint8)
    scales = padded[:, first : first + columns].view(weight.scales.dtype)
    weight = QuantizedWeight.of_tensors(weight.codes, scales, weight.global_scale, name, weight.block)
    monkeypatch.setattr(plan, "_cuda_scaled_codes_unsupported_reason", lambda problem: None)
    out = torch.full((5, D), 7.0).bfloat16()
    with pytest.raises(RuntimeError, match=r"^norm_concat_linear_quantized: block: CUDA"):
        ek.norm_concat_linear(chunks, weight, out=out)
    assert (out == 7.0).all()


def test_codes_off_alignment_go_elsewhere() -> None:
    chunks, weight, _ = make_call("fp8_row", 3, H=160)
    wide = torch.zeros(67, 488, dtype=torch.uint8).view(weight.codes.dtype)
    for codes in (wide[:, 8:], wide[:, 1:481]):
        moved = QuantizedWeight(codes[:, :480], weight.scales, "fp8_row")
        reason = "cuda: an address or a row stride is no multiple of 16 bytes"
        assert reason in str(ek.explain("norm_concat_linear", chunks, moved))
        assert not ek.norm_concat_linear(chunks, moved).any()
