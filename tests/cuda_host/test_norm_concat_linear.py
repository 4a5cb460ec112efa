"""norm_concat_linear in CUDA, emulated: every parameter and template instance against float64, bits, and memory."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

import eagle_kernels as ek
import test_norm_concat_linear as on_cpu
from accuracy import allow_independent_roundings, expect
from backends import environment_of
from cases import FEATURES, NUMBERS, SIZES, Case, operands
from cuda_host.conftest import SHARED_MEMORY, is_in_pairs, is_in_threes
from eagle_kernels.plan import Kernel
from guards import GuardedRows, UnchangedTensors, between_forbidden_pages, same_bits

pytestmark = pytest.mark.usefixtures("poisoned_memory", "emulated")

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def product(case: Case, max_rows: int) -> Case | None:
    """The case as the kernels that multiply take it: fewer rows, multiples of 8 or else 72 columns (64 and a tail)."""
    if case.dtype_name == "fp32" or case.layout == "strided" or case.data == "tiny":
        return None
    widths = tuple(H if H % 8 == 0 else 72 for H in case.widths)
    T = min(case.T, 5 if case.indices in ("shared", "each") else max_rows)
    return replace(case, widths=widths, T=T, view=False)


PRODUCTS = list(dict.fromkeys(filter(None, (product(case, 16) for case in [*SIZES, *FEATURES, *NUMBERS]))))
FUSED_CASES = [case for case in PRODUCTS if not case.post_norm]
FUSED_CASES += [
    Case("bf16", (8,) * 8, 3, D=70),
    Case("fp16", (80, 8, 264), 9, D=16, residuals="some", gain="list"),
    # Chunks that end inside a stage: inside the first one, and after several full ones.
    Case("bf16", (104, 40), 3, D=4300),
    Case("bf16", (568, 40), 3, gain="none"),
    Case("bf16", (72,) * 3, 16, "concat", D=17, layout="packed", residuals="all"),
]
# With the fused kernel's cases: under EAGLE_KERNELS_BATCH_INVARIANT=1 one plan serves all T.
SPLIT_CASES = [*(case for case in PRODUCTS if case.post_norm), *FUSED_CASES]
SPLIT_CASES += [replace(case, T=T) for case in FUSED_CASES[-2:] for T in (33, 70, 128, 129)]
SPLIT_CASES += [
    Case("bf16", (72,) * 2, 33, D=129, post_norm="dtype", bias="fp32", norm_offset=1.0, eps=(1e-6, 0.3)),
    Case("fp16", (200, 72), 130, "concat", D=260, gain="fp32", residuals="some"),
    Case("bf16", (136,) * 3, 100, D=132, layout="packed", indices="shared", sum_squares=True),
]
# More rows than one round takes.
SPLIT_CASES += [
    Case("bf16", (72,) * 2, 513, D=17, residuals="some", sum_squares=True),
    Case("fp16", (72, 40), 1030, "concat", D=20, indices="some", index_dtype=torch.int32),
    Case("bf16", (72,) * 2, 600, D=37, layout="packed", residuals="all", post_norm="dtype", bias="dtype"),
]
WGMMA_CASES = [case for case in SPLIT_CASES if not case.post_norm and 0 < case.T <= 128]
# Calls that they leave to norm_concat and a library product.
OTHER_CASES = [case for case in FEATURES if case.view or case.layout == "strided"]
OTHER_CASES += [case for case in SIZES if case.widths[0] in (101, 1) and case.T < 100]
# And calls that the second split kernel finishes there (bias, post_norm), or the library product itself.
OTHER_CASES += [case for case in FEATURES if (case.bias or case.post_norm) and (case.widths[0] == 101 or case.T > 128)]
OTHER_CASES += [
    Case("bf16", (72,) * 2, 129, D=129, post_norm="dtype", bias="fp32", residuals="all", eps=(1e-6, 0.3)),
    Case("bf16", (72,) * 2, 130, "concat", D=132, bias="fp32", norm_offset=1.0),
    Case("bf16", (64,) * 3, 131, "none", D=64, layout="packed", post_norm="fp32", norm_offset=1.0),
    Case("fp16", (200, 72), 130, D=260, post_norm="dtype", bias="dtype"),
    Case("fp16", (64,), 5, "none", D=1, bias="fp32", layout="strided"),
    Case("fp32", (72,) * 3, 20, D=2052, post_norm="dtype", bias="dtype"),
    Case("fp32", (72,) * 3, 9, D=37, bias="dtype"),
]
OTHER_CASES = list(dict.fromkeys(OTHER_CASES))


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


def explained(case: Case) -> str:
    call = operands(case)
    return str(ek.explain("norm_concat_linear", call.chunks, **call.sources | call.projection | {"eps": 1e-6}))


@pytest.mark.usefixtures("fused_at_every_T")
@pytest.mark.parametrize("case", FUSED_CASES, ids=lambda case: case.id)
def test_float64_truth(case: Case) -> None:
    assert explained(case).startswith("norm_concat_linear: cuda/fused, because T=")
    check(case)


@pytest.mark.parametrize("case", SPLIT_CASES, ids=lambda case: case.id)
def test_float64_truth_of_the_split_kernels(case: Case) -> None:
    with environment_of(EAGLE_KERNELS_BATCH_INVARIANT="1", EAGLE_KERNELS_BACKEND="cuda"):
        assert explained(case).startswith("norm_concat_linear: cuda/split, because ")
        check(case)


@pytest.mark.usefixtures("wgmma_at_every_T")
@pytest.mark.parametrize("case", WGMMA_CASES, ids=lambda case: case.id)
def test_float64_truth_of_the_wgmma_kernel(case: Case) -> None:
    assert explained(case).startswith("norm_concat_linear: cuda/fused wgmma, because T=")
    check(case)


@pytest.mark.parametrize("case", OTHER_CASES, ids=lambda case: case.id)
def test_float64_truth_of_what_they_do_not_take(case: Case) -> None:
    assert explained(case).startswith("norm_concat_linear: cuda/norm_concat + linear, because ")
    check(case)


# Name -> what selects an instance of the kernels' templates besides the dtype: launch_rows and
# norm_concat_linear_fused_cuda of csrc/cuda/norm_concat_linear.cu, launch_columns of norm_concat_linear_wgmma.cu.
FLAVOURS = {"no-gain": {"gain": "none"}, "gain": {}, "residuals": {"residuals": "some"}, "fp32-gain": {"gain": "fp32"}}


@pytest.mark.parametrize("norm", ["chunk", "concat"])
@pytest.mark.parametrize("multiprocessors", [1, 132])  # one range of both chunks, or two of each
@pytest.mark.parametrize("blocks", [2, 3])  # on an SM
@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("dtype", TYPES)
def test_float64_truth_of_every_instance(
    dtype: str,
    flavour: str,
    blocks: int,
    multiprocessors: int,
    norm: str,
    emulation: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EAGLE_KERNELS_FUSED_BLOCKS", str(blocks))
    for late_copies in (False, True):
        order = {"descending_warps": late_copies, "late_copies": late_copies}
        emulation.set_device(SHARED_MEMORY, **order, multiprocessors=multiprocessors)
        emulation.take_launches()
        check(Case(dtype, (136,) * 2, 11, norm, D=70, norm_offset=1.0, **FLAVOURS[flavour]))
        launch = emulation.take_launches()[-1]
        ranges = 1 if multiprocessors == 1 else 4
        assert (launch.grid, launch.cluster) == ([2, ranges], ranges)
        assert is_in_threes(launch) == (blocks == 3 and "residuals" not in FLAVOURS[flavour])


@pytest.mark.parametrize(
    ("widths", "ranges"),
    # Chunks of 3, 3 and 3 units of 128 columns, whose ranges begin at units 0, 1, 3, 5, 7; 1 and 5; 2 and 9; ten units
    # in one block; four chunks of which each block has two; and 9, 1 and 1 units, of which the first chunk alone is
    # cut, since the last of five even ranges would have columns of all.
    [
        ((264, 264, 264), 5),
        ((72, 520), 6),
        ((136, 1032), 6),
        ((264, 264, 264), 2),
        ((600, 600), 1),
        ((136, 264, 264, 136), 2),
        ((136, 264, 264, 136), 4),
        ((1032, 72, 72), 5),
    ],
)
@pytest.mark.parametrize("flavour", ["gain", "residuals"])
def test_float64_truth_of_ranges_across_chunks(
    widths: tuple[int, ...], ranges: int, flavour: str, emulation: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE_KERNELS_FUSED_RANGES", str(ranges))
    for norm in ("chunk", "concat", "none"):
        emulation.take_launches()
        check(Case("bf16", widths, 11, norm, D=70, norm_offset=1.0, **{"gain": "list", **FLAVOURS[flavour]}))
        launch = emulation.take_launches()[-1]
        assert (launch.grid, launch.cluster) == ([2, ranges], ranges)


def test_a_cut_for_whose_parts_a_block_has_no_room_is_not_taken(
    emulation: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three blocks of two chunks each would be sent six parts of three shares."""
    monkeypatch.setenv("EAGLE_KERNELS_FUSED_RANGES", "3")
    for K, ranges in ((3, 3), (6, 6)):
        emulation.take_launches()
        check(Case("bf16", (72,) * K, 16, D=70))
        assert emulation.take_launches()[-1].grid == [2, ranges]


def test_a_cluster_that_no_gpc_has_room_for_is_cut_all_the_same(emulation: ModuleType) -> None:
    """Seven chunks take four blocks or more, for which one SM has no room: by the fit every cut takes forever."""
    emulation.set_device(SHARED_MEMORY, descending_warps=False, multiprocessors=1)
    emulation.take_launches()
    check(Case("bf16", (72,) * 7, 5, D=70))
    assert emulation.take_launches()[-1].grid == [2, 4]


# One range of one chunk: a block that has its outputs to itself.
ALONE = [
    Case("bf16", (64,), 1, "chunk", D=70),
    Case("fp16", (64,), 16, "concat", D=132, residuals="all"),
    Case("bf16", (64,), 11, "none", D=64),
    Case("bf16", (264,), 17, "chunk", D=70, bias="dtype", norm_offset=1.0, indices="shared"),
    Case("fp16", (264,), 40, "concat", D=200, gain="fp32"),
    Case("bf16", (264,), 9, "none", D=37, residuals="all"),
    Case("bf16", (264,), 5, "chunk", D=70, sum_squares=True),
]


@pytest.mark.parametrize("name", ["fused", "fused wgmma"])
@pytest.mark.parametrize("case", ALONE, ids=lambda case: case.id)
def test_float64_truth_of_a_block_that_is_alone(
    case: Case, name: str, emulation: ModuleType, request: pytest.FixtureRequest
) -> None:
    """It sends nothing and waits at no barrier of a cluster, of which compute-sanitizer refused the former on an H100;
    the emulation refuses both. With two SMs or more some of these would be several ranges, of warpgroups also with one:
    they take the 64 columns of a stage, which no split cuts."""
    request.getfixturevalue("wgmma_at_every_T" if "wgmma" in name else "fused_at_every_T")
    if "wgmma" in name:
        case = replace(case, widths=(64,))
    for late_copies in (False, True):
        order = {"descending_warps": late_copies, "late_copies": late_copies}
        emulation.set_device(SHARED_MEMORY, **order, multiprocessors=1)
        emulation.take_launches()
        assert explained(case).startswith(f"norm_concat_linear: cuda/{name}, because ")
        check(case)
        launch = emulation.take_launches()[-1]
        assert (launch.grid[1], launch.cluster) == (1, 1)


@pytest.mark.parametrize("norm", ["chunk", "none"])
def test_a_block_that_is_alone_has_the_bits_of_a_cluster(
    norm: str, kernel: Kernel, emulation: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose second chunk is zero, and adds zeros."""
    if kernel is Kernel.SPLIT:
        pytest.skip("its blocks form no clusters")
    emulation.set_device(SHARED_MEMORY, descending_warps=True, multiprocessors=1)
    (chunk, zeros), weight, gain = make_call(9, K=2, H=64)
    gains = gain if norm == "chunk" else None
    emulation.take_launches()
    alone = ek.norm_concat_linear([chunk], weight[:, :64], norm=norm, norm_weight=None if gains is None else gain[:1])
    monkeypatch.setenv("EAGLE_KERNELS_FUSED_RANGES", "2")
    both = ek.norm_concat_linear([chunk, zeros.zero_()], weight, norm=norm, norm_weight=gains)
    assert [launch.cluster for launch in emulation.take_launches() if launch.threads] == [1, 2]
    assert same_bits(alone, both)


@pytest.mark.parametrize(
    ("K", "H", "D", "dense", "fp8_row"),  # blocks on an SM, and ranges; in pairs also a block's columns
    # Clusters of 64 columns on 132 SMs. With two blocks on an SM there is room for 132 clusters of two, 79 of three, 62
    # of four, 47 of five, 39 of six; with three for 124 of three, 92 of four, 69 of five and 62 of six.
    [
        (3, 896, 896, (2, 6), (2, 6)),
        (3, 1152, 1152, (2, 6), (2, 6)),
        (3, 2048, 2048, (2, 6), (2, 6)),
        (3, 2560, 2560, (2, 5), (2, 5)),
        (3, 2880, 2880, (3, 6), (3, 6)),  # with two on an SM 45 clusters of five would leave room for two, and wait
        (3, 3840, 3840, (2, 4), (2, 4)),
        (2, 4096, 4096, (3, 5), (2, 4, 64)),  # clusters of two pairs have an SM for each pair
        (3, 4096, 4096, (3, 5), (2, 4, 64)),
        (3, 5120, 5120, (3, 4), (3, 4)),
        (3, 6144, 6144, (3, 3), (2, 4, 96)),
        (2, 7168, 7168, (2, 2), (2, 2)),
        (3, 8192, 8192, (2, 2), (2, 2)),
        (5, 4096, 4096, (3, 5), (2, 4, 64)),
        (8, 64, 64, (2, 8), (2, 8)),
    ],
)
def test_a_cluster_shares_the_ranges_of_its_columns_out(
    K: int, H: int, D: int, dense: tuple[int, ...], fp8_row: tuple[int, ...], emulation: ModuleType
) -> None:
    chunks, weight = [torch.empty(1, H).bfloat16() for _ in range(K)], torch.empty(D, K * H).bfloat16()
    codes = ek.QuantizedWeight(torch.empty(D, K * H, dtype=torch.float8_e4m3fn), torch.empty(D, 1), "fp8_row")
    for of, expected in ((weight, dense), (codes, fp8_row)):
        emulation.run_kernels(False)
        emulation.take_launches()
        try:
            ek.norm_concat_linear(chunks, of)
        finally:
            emulation.run_kernels(True)
        launch = emulation.take_launches()[-1]
        (blocks, ranges), in_pairs = expected[:2], len(expected) == 3
        cluster, columns = (ranges // 2, expected[2]) if in_pairs else (ranges, 64)
        assert (launch.grid, launch.cluster, launch.pdl) == ([-(-D // columns), cluster], cluster, True)
        assert (is_in_pairs(launch), is_in_threes(launch)) == (in_pairs, blocks == 3)


def test_a_gpu_without_clusters_is_left_to_the_split_kernels(emulated: object, emulation: ModuleType) -> None:
    """By the plan (tests/test_cuda_backend.py); the primitive refuses."""
    chunks, weight, _ = make_call(2, K=2, H=72)
    emulation.set_device(99 << 10, descending_warps=False, capability=89)
    arguments = (chunks, 2, 1, [], [1e-6], 0.0, None, None, None, weight, None)
    with pytest.raises(RuntimeError, match=r"^norm_concat_linear: CUDA has error 801"):
        emulated.norm_concat_linear_fused_out(*arguments, None, 0.0, True, torch.empty(2, 37).bfloat16())


@pytest.mark.usefixtures("no_wgmma")
@pytest.mark.parametrize("norm", ["chunk", "concat"])
@pytest.mark.parametrize("T", [17, 40, 101])
@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("dtype", TYPES)
def test_float64_truth_of_every_split_instance(dtype: str, flavour: str, T: int, norm: str) -> None:
    case = Case(dtype, (136,) * 2, T, norm, D=150, norm_offset=1.0, **FLAVOURS[flavour])
    assert explained(case).startswith("norm_concat_linear: cuda/split, because ")
    check(case)


@pytest.mark.parametrize("norm_offset", [0.0, 1.0, 0.5])  # bf16 has one instruction for each of the first two
@pytest.mark.parametrize("T", [40, 101])
@pytest.mark.parametrize(
    ("columns", "D", "multiprocessors"),  # blocks of 1, 2, 3 and 4 warpgroups
    [(64, 150, 132), (128, 70, 2), (192, 300, 8), (256, 400, 8)],
)
@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("dtype", TYPES)
def test_float64_truth_of_every_wgmma_instance(
    dtype: str,
    flavour: str,
    columns: int,
    D: int,
    multiprocessors: int,
    T: int,
    norm_offset: float,
    emulation: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """64 rows at a time; with residuals, blocks of two warpgroups or more."""
    if flavour == "residuals":
        columns = max(columns, 128)
    monkeypatch.setenv("EAGLE_KERNELS_WGMMA_COLUMNS", str(columns))
    for late_copies in (False, True):
        order = {"descending_warps": late_copies, "late_copies": late_copies}
        emulation.set_device(SHARED_MEMORY, **order, multiprocessors=multiprocessors)
        emulation.take_launches()
        check(Case(dtype, (136,) * 2, T, D=D, norm_offset=norm_offset, **FLAVOURS[flavour]))
        launch = emulation.take_launches()[-1]
        assert (launch.threads, launch.grid[0]) == (2 * columns, -(-T // 64) * -(-D // columns))
        assert launch.cluster == launch.grid[1] > 1


@pytest.mark.parametrize(
    ("K", "H", "D", "columns", "ranges", "pays"),
    # Blocks of 192 and 256 columns have an SM to themselves: there is room for 17 clusters of six, 22 of five, 30 of
    # four and 39 of three, of those of up to 128 columns for twice as many; one of them stays free.
    [
        (3, 896, 896, 64, 6, True),
        (3, 1152, 1152, 64, 6, True),
        (3, 2048, 2048, 64, 6, True),
        (2, 2048, 2048, 192, 8, True),
        (3, 2880, 2880, 192, 6, True),
        (3, 4096, 4096, 256, 6, True),
        (2, 4096, 4096, 256, 6, True),
        (3, 5120, 5120, 192, 3, False),
        (5, 4096, 4096, 256, 5, False),
        (3, 7168, 7168, 192, 3, True),
        (2, 7168, 7168, 128, 4, True),
        (6, 5376, 5376, 192, 6, False),
    ],
)
def test_warpgroups_and_ranges_share_the_columns_out(
    K: int, H: int, D: int, columns: int, ranges: int, pays: bool, emulation: ModuleType
) -> None:
    """For any number of rows, since a row's bits depend on the ranges. Plans take it where it pays."""
    assert emulation.wgmma_pays(K, H, D, 132) == pays
    weight = torch.empty(D, K * H).bfloat16()
    emulation.run_kernels(False)
    try:
        for T in (17, 65, 128):
            emulation.take_launches()
            ek.norm_concat_linear([torch.empty(T, H).bfloat16()] * K, weight)
            launch = emulation.take_launches()[-1]
            assert (launch.grid, launch.cluster) == ([-(-T // 64) * -(-D // columns), ranges], ranges), T
            assert (launch.threads, launch.pdl) == (2 * columns, True)
    finally:
        emulation.run_kernels(True)


@pytest.mark.parametrize("columns", [64, 128, 192, 256])
def test_a_library_of_alternatives_is_told_the_columns(
    columns: int, emulation: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The emulation is such a library. bench/gpu_session.sh times each width next to the library's choice, 256 here,
    also where no split pays."""
    monkeypatch.setenv("EAGLE_KERNELS_WGMMA_COLUMNS", str(columns))
    assert emulation.wgmma_pays(3, 5120, 5120, 132)
    emulation.run_kernels(False)
    try:
        emulation.take_launches()
        ek.norm_concat_linear([torch.empty(64, 4096).bfloat16()] * 3, torch.empty(4096, 3 * 4096).bfloat16())
        launch = emulation.take_launches()[-1]
        assert (launch.threads, launch.grid[0]) == (2 * columns, -(-4096 // columns))
    finally:
        emulation.run_kernels(True)


@pytest.mark.parametrize("ranges", [2, 3, 4, 5, 6, 7, 8])
def test_a_library_of_alternatives_is_told_the_ranges(
    ranges: int, emulation: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher chooses 5 here."""
    monkeypatch.setenv("EAGLE_KERNELS_FUSED_RANGES", str(ranges))
    emulation.run_kernels(False)
    try:
        emulation.take_launches()
        ek.norm_concat_linear([torch.empty(1, 4096).bfloat16()] * 3, torch.empty(4096, 3 * 4096).bfloat16())
        assert emulation.take_launches()[-1].grid == [64, ranges]
    finally:
        emulation.run_kernels(True)


def test_an_sm_without_room_for_two_blocks_is_cut_for_one(emulation: ModuleType) -> None:
    """As of sm_120: cut for two on each of 170 SMs, into 4 ranges, the 64 clusters would run in two waves."""
    emulation.set_device(descending_warps=False, capability=120, multiprocessors=170, shared_bytes=99 << 10)
    emulation.run_kernels(False)
    try:
        emulation.take_launches()
        ek.norm_concat_linear([torch.empty(1, 4096).bfloat16()] * 3, torch.empty(4096, 3 * 4096).bfloat16())
        launch = emulation.take_launches()[-1]
        assert launch.grid == [64, 2] and emulation.clusters_at_once(170, 2, 1) >= 64
    finally:
        emulation.run_kernels(True)


def test_more_than_512_rows_take_the_split_kernels_several_rounds(emulation: ModuleType) -> None:
    """Their sums of all rows at once would take gigabytes."""
    emulation.run_kernels(False)
    try:
        with environment_of(EAGLE_KERNELS_BATCH_INVARIANT="1", EAGLE_KERNELS_BACKEND="cuda"):
            emulation.take_launches()
            ek.norm_concat_linear([torch.empty(1200, 64).bfloat16()] * 3, torch.empty(64, 3 * 64).bfloat16())
        launches = [launch for launch in emulation.take_launches() if launch.threads]
        assert len(launches) == 6 and [launch.grid[0] for launch in launches[1::2]] == [512, 512, 176]
    finally:
        emulation.run_kernels(True)


KERNELS = {
    "fused": {},
    "fused wgmma": {},
    "split": {"EAGLE_KERNELS_BATCH_INVARIANT": "1"},
}


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, emulated: object) -> Iterator[Kernel]:
    request.getfixturevalue("wgmma_at_every_T" if "wgmma" in request.param else "fused_at_every_T")
    with environment_of(EAGLE_KERNELS_BACKEND="cuda", **KERNELS[request.param]):
        yield Kernel(request.param)


def make_call(T: int, dtype: torch.dtype = torch.bfloat16, K: int = 3, H: int = 136, D: int = 37) -> tuple:
    chunks = [torch.randn(T, H).to(dtype) for _ in range(K)]
    weight = (torch.randn(D, K * H) / (K * H) ** 0.5).to(dtype)
    return chunks, weight, (torch.rand(K, H) + 0.5).to(dtype)


@pytest.mark.parametrize("norm", ["chunk", "concat", "none"])
@pytest.mark.parametrize("dtype", TYPES)
def test_a_rows_bits_do_not_depend_on_T_or_the_instance(dtype: str, norm: str, kernel: Kernel) -> None:
    """The fused kernel takes 16 rows at a time, the split ones 32, 64 or 128, wgmma 64; more in several rounds."""
    most, rows = (33, (1, 5, 9, 16, 17)) if kernel is Kernel.FUSED else (150, (1, 17, 33, 65, 129))
    if kernel is Kernel.WGMMA:
        most, rows = 128, (1, 17, 64, 65)
    chunks, weight, gain = make_call(most, TYPES[dtype])
    arguments = {"norm": norm, "norm_weight": {"chunk": gain, "concat": gain.reshape(-1), "none": None}[norm]}
    for residuals in (None, [chunk.flip(0) for chunk in chunks]):

        def call(T: int, residuals: list[Tensor] | None = residuals) -> Tensor:
            last = None if residuals is None else [residual[most - T :] for residual in residuals]
            return ek.norm_concat_linear([chunk[most - T :] for chunk in chunks], weight, residuals=last, **arguments)

        whole = call(most)
        for T in rows:
            assert same_bits(call(T), whole[most - T :]), T


@pytest.mark.usefixtures("no_wgmma")
def test_a_gpu_with_less_shared_memory_multiplies_64_rows_at_a_time(emulation: ModuleType) -> None:
    """128 rows take 199 KB; sm_89 and sm_120 have 99 KB."""
    chunks, weight, gain = make_call(100, H=72)
    grids, results = [], []
    for shared in (SHARED_MEMORY, 99 << 10):
        emulation.set_device(shared, descending_warps=False)
        emulation.take_launches()
        results.append(ek.norm_concat_linear(chunks, weight, norm_weight=gain))
        grids.append(emulation.take_launches()[-2].grid)
    assert grids == [[1, 3], [2, 3]]
    assert same_bits(*results)


@pytest.mark.usefixtures("no_wgmma")
@pytest.mark.parametrize(
    ("multiprocessors", "D", "expected"),
    # By hand, for chunks of 9, 2 and 5 units: the least of (blocks of the busiest SM) * (longest range + 3).
    [(1, 37, 4), (5, 37, 4), (132, 37, 9), (1, 300, 4), (5, 300, 3), (9, 300, 3), (132, 300, 9)],
)
def test_the_ranges_share_the_work_out(multiprocessors: int, D: int, expected: int, emulation: ModuleType) -> None:
    chunks = [torch.randn(20, H).bfloat16() for H in (576, 72, 264)]
    weight = (torch.randn(D, 912) / 30).bfloat16()
    whole = ek.norm_concat_linear(chunks, weight)
    emulation.set_device(SHARED_MEMORY, descending_warps=True, late_copies=True, multiprocessors=multiprocessors)
    emulation.take_launches()
    torch.testing.assert_close(ek.norm_concat_linear(chunks, weight), whole, rtol=0.02, atol=0.01)
    *_, partial, _ = emulation.take_launches()
    assert partial.grid == [-(-D // 128), expected]


@pytest.mark.parametrize("early", ["0", "1"])
@pytest.mark.usefixtures("no_wgmma")
def test_the_weight_is_copied_before_the_previous_kernel_ends_unless_switched_off(
    early: str, emulation: ModuleType
) -> None:
    """All of a small weight is, 16 bytes at a time. The emulation checks that x is not."""
    chunks, weight, _ = make_call(20, K=1, H=264, D=37)
    emulation.take_launches()
    with environment_of(EAGLE_KERNELS_BACKEND="cuda", EAGLE_KERNELS_EARLY_WEIGHT=early):
        out = ek.norm_concat_linear(chunks, weight)
    *_, partial, finalize = emulation.take_launches()
    assert (partial.early_copies, finalize.early_copies) == (37 * 264 // 8 * int(early), 0)
    assert same_bits(out, ek.norm_concat_linear(chunks, weight))


@pytest.mark.parametrize("early", ["0", "1"])
def test_the_fused_kernel_copies_as_early(early: str, emulation: ModuleType) -> None:
    """All of a small weight, too."""
    chunks, weight, _ = make_call(9, K=1, H=264, D=37)
    emulation.take_launches()
    with environment_of(EAGLE_KERNELS_BACKEND="cuda", EAGLE_KERNELS_EARLY_WEIGHT=early):
        out = ek.norm_concat_linear(chunks, weight)
    launch = emulation.take_launches()[-1]
    assert launch.early_copies == int(early) * 37 * 264 // 8
    assert same_bits(out, ek.norm_concat_linear(chunks, weight))


def test_a_gpu_without_wgmma_is_left_to_the_split_kernels(emulated: object, emulation: ModuleType) -> None:
    """By the plan (tests/test_cuda_backend.py); the primitive refuses. sm_100 has clusters and no wgmma."""
    chunks, weight, _ = make_call(2, K=2, H=72)
    emulation.set_device(SHARED_MEMORY, descending_warps=False, capability=100)
    arguments = (chunks, 2, 1, [], [1e-6], 0.0, None, None, None, weight, None)
    with pytest.raises(RuntimeError, match=r"^norm_concat_linear: CUDA has error 801"):
        emulated.norm_concat_linear_wgmma_out(*arguments, None, 0.0, torch.empty(2, 37).bfloat16())


@pytest.mark.parametrize("late_copies", [False, True])
def test_the_weight_beyond_a_chunk_is_in_no_sum(late_copies: bool, emulation: ModuleType) -> None:
    """A range of 10 stages takes three turns of the ring. Its last stage reaches into the next chunk, where the weight
    is not finite, also if that chunk has no rows; the last chunk's stage reaches beyond the weight. Blocks of 64 and of
    6 rows of the weight."""
    emulation.set_device(SHARED_MEMORY, descending_warps=late_copies, late_copies=late_copies, multiprocessors=1)
    chunks, weight, gain = [torch.randn(11, H).bfloat16() for H in (1160, 72)], torch.randn(70, 1232).bfloat16(), None
    weight[3, 1160:], weight[5, 1231] = float("inf"), float("nan")
    weight[8:, 1200] = 0
    out = ek.norm_concat_linear(chunks, weight, norm_weight=gain, norm="concat")
    assert out.isfinite().all(0).tolist() == [column not in (3, 5) for column in range(70)]
    of_first = ek.norm_concat_linear(chunks, weight, norm="concat", indices=[None, torch.full((11,), -1)])
    assert of_first.isfinite().all()


@pytest.mark.parametrize("T", [3, 13])
@pytest.mark.parametrize("dtype", TYPES)
def test_a_folded_gain_gives_the_same_bits(dtype: str, T: int, kernel: Kernel) -> None:
    chunks, weight, gain = make_call(T, TYPES[dtype])
    scale = 64.0 if dtype == "fp16" else 1.0  # by which the kernel scales the gain
    folded = (weight.float() * (gain.float() * scale).reshape(-1)).to(weight.dtype)
    out = ek.norm_concat_linear(chunks, weight, norm_weight=gain)
    for gains in (gain.float(), list(gain)):
        assert same_bits(out, ek.norm_concat_linear(chunks, weight, norm_weight=gains))
    x = ek.norm_concat_linear(chunks, folded).float() / scale
    assert same_bits(out, x.to(out.dtype))


def test_statistics_that_are_given_are_used(kernel: Kernel) -> None:
    chunks, weight, gain = make_call(5)
    squares = torch.stack([chunk.float().square().sum(-1) for chunk in chunks], -1)
    given = ek.norm_concat_linear(chunks, weight, norm_weight=gain, sum_squares=squares * 4)
    own = ek.norm_concat_linear(chunks, weight, norm_weight=gain, eps=0.0)
    torch.testing.assert_close(given.float() * 2, own.float(), rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("norm", ["chunk", "concat", "none"])
@pytest.mark.parametrize("stale", [float("nan"), float("inf"), 3e4])
def test_a_bad_row_stays_in_its_row(stale: float, norm: str, kernel: Kernel) -> None:
    chunks, weight, _ = make_call(9)
    clean = ek.norm_concat_linear(chunks, weight, norm=norm)
    chunks[1][4, 50] = stale
    chunks[0][7] = stale
    dirty = ek.norm_concat_linear(chunks, weight, norm=norm)
    kept = [0, 1, 2, 3, 5, 6, 8]
    assert same_bits(clean[kept], dirty[kept])
    assert not dirty[[4, 7]].isfinite().any() or stale == 3e4


def test_a_zero_row_hides_what_the_sources_hold(kernel: Kernel) -> None:
    chunks, weight, gain = make_call(6)
    for chunk in chunks:
        chunk[[0, -1]] = float("nan")
    indices = torch.tensor([-1, 2, 6, 2**40, -(2**40)])
    for eps in (1e-6, 0.0):
        out = ek.norm_concat_linear(chunks, weight, norm_weight=gain, indices=indices, eps=eps)
        assert same_bits(out[[0, 2, 3, 4]], torch.zeros(4, 37).bfloat16())
        assert out[1].isfinite().all() and out[1].any()


def test_a_zero_row_is_zero_whatever_the_gain(kernel: Kernel) -> None:
    on_cpu.check_infinite_gain_of_a_zero_row()
    on_cpu.check_zero_row_of_one_chunk()


@pytest.mark.parametrize("at", ["begin", "end"])
@pytest.mark.parametrize(
    ("dtype", "N", "H", "D"),
    [("bf16", 5, 136, 35), ("bf16", 11, 584, 35), ("fp16", 5, 584, 35), ("fp16", 11, 136, 35), ("bf16", 3, 584, 4259)],
)
def test_no_operand_is_read_or_written_beyond_its_end(
    dtype: str, N: int, H: int, D: int, at: str, kernel: Kernel
) -> None:
    """Operands lie between pages that trap; indices are out of range both ways. A failure is a segmentation fault."""

    def guarded(*shape: int, dtype: torch.dtype = TYPES[dtype]) -> Tensor:
        return between_forbidden_pages(torch.randn(shape).to(dtype), at)

    indices = torch.tensor([0, -1, 6, 3, 2**40, -(2**63), 4, 3, 2, 1, 0])[:N]
    out = guarded(N, D)
    arguments = {
        "norm_weight": [guarded(H), guarded(H)],
        "residuals": [guarded(4, H), guarded(4, H)],
        "indices": [between_forbidden_pages(indices, at), between_forbidden_pages(indices.int(), at)],
        "bias": guarded(D, dtype=torch.float32),
    }
    chunks, weight = [guarded(4, H), guarded(4, H)], guarded(D, 2 * H)
    assert ek.explain("norm_concat_linear", chunks, weight, **arguments).kernel is kernel
    ek.norm_concat_linear(chunks, weight, **arguments, sum_squares=guarded(4, 2, dtype=torch.float32), out=out)
    ek.norm_concat_linear(chunks, weight, **arguments, out=out)
    gain = guarded(2 * H, dtype=torch.float32)
    ek.norm_concat_linear(guarded(N, 2 * H), weight, norm="concat", norm_weight=gain, num_chunks=2, out=out)
    ek.norm_concat_linear(guarded(N, 2 * H), weight, norm="concat", norm_weight=gain.to(out.dtype), num_chunks=2)
    ek.norm_concat_linear(guarded(N, 2 * H), weight, norm="none", bias=guarded(D), out=out)
    ek.norm_concat_linear(guarded(N, 2 * H), weight, norm="none", post_norm_weight=guarded(D), out=out)


@pytest.mark.parametrize("D", [4, 68, 132])
def test_rows_without_a_gap_end_where_the_next_begins(D: int, kernel: Kernel) -> None:
    """They are stored four outputs at a time, rows of another stride singly; a block's last columns have no output."""
    chunks, weight, gain = make_call(5, D=D)
    wide = torch.full((5, D + 3), float("nan")).bfloat16()
    ek.norm_concat_linear(chunks, weight, norm_weight=gain, out=wide[:, :D])
    assert same_bits(ek.norm_concat_linear(chunks, weight, norm_weight=gain), wide[:, :D].contiguous())


def test_strided_operands_on_16_bytes_are_taken(kernel: Kernel) -> None:
    """Slots of a buffer and a slice of a wider weight, with NaN around them."""
    N, H = 7, 72
    chunks, weight, gain = make_call(N, H=H)
    expected = ek.norm_concat_linear(chunks, weight, norm_weight=gain)
    buffer = torch.full((N, 3 * H + 32), float("nan")).bfloat16()
    wide = torch.full((37, 3 * H + 16), float("nan")).bfloat16()
    slots = [buffer[:, 8 + k * (H + 8) :][:, :H] for k in range(3)]
    for slot, chunk in zip(slots, chunks, strict=True):
        slot.copy_(chunk)
    wide[:, 8:-8] = weight
    assert ek.explain("norm_concat_linear", slots, wide[:, 8:-8], norm_weight=gain).kernel is kernel
    assert same_bits(expected, ek.norm_concat_linear(slots, wide[:, 8:-8], norm_weight=gain))


def _unsupported() -> dict[str, tuple[Callable[[], tuple[tuple, dict]], str]]:
    def call(T: int = 3, dtype: torch.dtype = torch.bfloat16, H: int = 72, K: int = 3, **arguments: object) -> tuple:
        chunks, weight, gain = make_call(T, dtype, K, H)
        return (chunks, weight), {"norm_weight": gain} | arguments

    def off_alignment() -> tuple:
        (chunks, weight), arguments = call()
        chunks[1] = torch.zeros(3, 80).bfloat16()[:, 1:73]
        return (chunks, weight), arguments

    def odd_stride() -> tuple:
        (chunks, _), arguments = call()
        return (chunks, torch.zeros(37, 3 * 72 + 1).bfloat16()[:, : 3 * 72]), arguments

    return {
        "T": (lambda: call(T=129), "T=129 > 128: the library's product is faster there"),
        "fp32": (lambda: call(dtype=torch.float32), "tensor cores multiply 16-bit types"),
        "H": (lambda: call(H=100), "H=100 is no multiple of 8"),
        "address": (off_alignment, "an address or a row stride is no multiple of 16 bytes"),
        "stride": (odd_stride, "an address or a row stride is no multiple of 16 bytes"),
    }


UNSUPPORTED = _unsupported()


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_they_do_not_take_goes_elsewhere_and_explain_says_why(name: str) -> None:
    make, reason = UNSUPPORTED[name]
    arguments, options = make()
    said = str(ek.explain("norm_concat_linear", *arguments, **options))
    assert said == f"norm_concat_linear: cuda/norm_concat + linear, because {reason}"
    out = ek.norm_concat_linear(*arguments, **options)
    with environment_of(EAGLE_KERNELS_BACKEND="reference"):
        torch.testing.assert_close(out, ek.norm_concat_linear(*arguments, **options), rtol=0.05, atol=0.05)


def test_more_than_eight_chunks_are_refused_and_said_so() -> None:
    chunks, weight, gain = make_call(2, K=9, H=8)
    for op, arguments in (("norm_concat_linear", (weight,)), ("norm_concat", ())):
        message = f"{op}: EAGLE_KERNELS_BACKEND is 'cuda', expected one of .*because K=9 > 8 chunks"
        for call in (getattr(ek, op), lambda *args, op=op, **kwargs: ek.explain(op, *args, **kwargs)):
            with pytest.raises(RuntimeError, match=message):
                call(chunks, *arguments, norm_weight=gain)


@pytest.mark.parametrize("name", ["fused", "wgmma", "split"])
def test_the_primitive_refuses_what_it_cannot_take(name: str, emulated: object) -> None:
    chunks, weight, _ = make_call(2, K=2, H=72)
    out = torch.full((2, 37), float("nan")).bfloat16()

    def run(chunks: list[Tensor], weight: Tensor, post_norm: Tensor | None = None) -> None:
        arguments = (chunks, len(chunks), 1, [], [1e-6], 0.0, None, None, None, weight, None, post_norm, 0.0)
        switches = {"fused": (True,), "split": (True,), "wgmma": ()}[name]
        getattr(emulated, f"norm_concat_linear_{name}_out")(*arguments, *switches, out)

    with pytest.raises(RuntimeError, match=r"^norm_concat_linear: operands: alignment \("):
        run([torch.zeros(2, 80).bfloat16()[:, 1:73], chunks[1]], weight)
    if name != "split":
        with pytest.raises(RuntimeError, match=r"^norm_concat_linear: post_norm_weight: CUDA \("):
            run(chunks, weight, torch.ones(37))
    with pytest.raises(RuntimeError, match=r"^norm_concat_linear: operands: alignment \("):
        run([c[:, :71] for c in chunks], weight[:, :142])
    with pytest.raises(RuntimeError, match=r"^norm_concat_linear: chunks: count on CUDA \("):
        run([chunks[0]] * 9, torch.zeros(37, 9 * 72).bfloat16())
    assert out.isnan().all()


@pytest.mark.parametrize(("rows", "H"), [(129, 136), (33, 101)])
def test_post_norm_sees_the_unrounded_product_of_a_library(rows: int, H: int) -> None:
    on_cpu.check_post_norm(rows, H)


@pytest.mark.parametrize(
    ("options", "launches"),
    [
        ({}, 1),
        ({"bias": torch.bfloat16}, 1),
        ({"bias": torch.float32}, 2),
        ({"post_norm_weight": torch.bfloat16}, 2),
        ({"norm": "none", "bias": torch.bfloat16}, 0),
        ({"norm": "none", "post_norm_weight": torch.float32}, 1),
    ],
    ids=str,
)
def test_two_steps_are_one_call_of_the_library(options: dict, launches: int, emulation: ModuleType) -> None:
    """The library adds a bias of its own dtype and rounds once; we launch norm_concat and what needs fp32 sums."""
    _, weight, gain = make_call(1, H=64)
    vectors = {name: torch.rand(37).to(dtype) for name, dtype in options.items() if name != "norm"}
    norm = {"norm": "none"} if "norm" in options else {"norm_weight": gain}
    emulation.take_launches()
    ek.norm_concat_linear(torch.randn(129, 192).bfloat16(), weight, **norm, **vectors, num_chunks=3)
    assert len(emulation.take_launches()) == launches


test_any_indices = on_cpu.test_any_indices
test_the_mtp_stage_is_one_call = on_cpu.test_the_mtp_stage_is_one_call


@pytest.fixture
def projection(emulated: object) -> str:
    """Tests that run on every path of the CPU backend run once here."""
    return "emulated"
