"""The compile gate of norm_concat_linear: what every plan needs, on every preset and arch, in how few binaries."""

import importlib
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from eagle_kernels import plan
from eagle_kernels.model_shapes import model_shapes
from eagle_kernels.ops.norm_concat_linear_quantized import QuantizedProjection
from eagle_kernels.ops.projection import Projection
from eagle_kernels.ops.sources import Sources
from eagle_kernels.quantized_weight import FORMATS, QuantizedWeight, scale_shape

if plan.SETTINGS.triton_interpret:
    pytest.skip("TRITON_INTERPRET=1: nothing is compiled", allow_module_level=True)
pytest.importorskip("triton")

from eagle_kernels.triton_kernels import launch as launching
from eagle_kernels.triton_kernels.launch import compile_kernel
from triton.backends.compiler import GPUTarget

from compile.offline import ARCHS, SHARED_LIMIT, Arch, Launch, Row, launches, resources
from eagle_kernels.tuned_configs import Gpu

kernels = importlib.import_module("eagle_kernels.triton_kernels.norm_concat_linear")
dequantize = importlib.import_module("eagle_kernels.triton_kernels.dequantize")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PLAN_ROWS = {"16 rows": 16, "32 rows": 32, "64 rows": 64, "128 rows": 128, "library": 129}
SIZES = (3, 4096, 4096)
PARTIAL, FINALIZE = "_norm_concat_linear_partial", "_norm_concat_linear_finalize"
DEQUANTIZE = "_dequantize"


def tensor(*shape: int, dtype: torch.dtype, stride: int | None = None) -> Tensor:
    strides = (stride, 1) if stride else torch.empty(shape, device="meta").stride()
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def call(
    arch: Arch,
    N: int,
    K: int,
    H: int,
    D: int,
    norm: str = "chunk",
    *,
    dtype: torch.dtype = BF16,
    gains: int | None = None,
    gain_dtype: torch.dtype | None = None,
    packed: bool = False,
    residuals: tuple[bool, ...] = (),
    indices: tuple[torch.dtype | None, ...] = (),
    source_rows: int | None = None,
    stride: int | None = None,
    statistics: bool = False,
    bias: torch.dtype | None = None,
    post_norm: bool = False,
    eps: tuple[float, ...] = (1e-6,),
    aligned: bool = True,
    format: str | None = None,
    fp32_scales: bool = False,
) -> list[Launch]:
    """What a call would launch on an `arch`. gains: how many tensors the gain is in, 0 where it is folded into the
    weight; format: that of a quantized weight, whose scales are of its last dtype, or of its first, fp32."""
    T = source_rows or N
    chunks = [tensor(T, K * H, dtype=dtype)] if packed else [tensor(T, H, dtype=dtype, stride=stride) for _ in range(K)]
    gains = (K if norm == "chunk" else 1 if norm == "concat" else 0) if gains is None else gains
    gain_widths = [K * H] if gains == 1 else [H] * gains
    sources = Sources(
        chunks,
        K,
        norm,
        [tensor(width, dtype=gain_dtype or dtype) for width in gain_widths],
        list(eps),
        1.0,
        [chunk if given else None for chunk, given in zip(chunks, residuals, strict=False)],
        [None if kind is None else tensor(N, dtype=kind) for kind in indices],
        tensor(T, K, dtype=FP32) if statistics else None,
    )
    weight = tensor(D, K * H, dtype=dtype) if format is None else quantized(format, D, K * H, fp32_scales)
    epilogue = (None if bias is None else tensor(D, dtype=bias), tensor(D, dtype=dtype) if post_norm else None, 1e-6)
    projection = Projection(weight, *epilogue) if format is None else QuantizedProjection(weight, *epilogue)
    problem = plan.Problem(
        "norm_concat_linear",
        torch.device("meta"),
        K,
        N,
        dtype,
        D,
        (H,),
        has_residuals=bool(residuals),
        elements_aligned=aligned,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "gpu_of", lambda device: Gpu(f"no table for {arch}", arch, SHARED_LIMIT[arch]))
        if format is None:
            chosen = plan.triton_projection(problem)
        else:
            scales_sums = weight.scaled_where(dtype) == "blocks"
            problem = problem._replace(block_columns=weight.block[1], scales_sums=scales_sums)
            chosen = plan.quantized_projection(problem, "triton", "", "")
    out = tensor(N, D, dtype=dtype)
    return launches(lambda: kernels.run(sources, projection, out, chosen), arch)


def quantized(format: str, D: int, W: int, fp32_scales: bool) -> QuantizedWeight:
    kind = FORMATS[format]
    codes = tensor(D, W // kind.columns_per_code, dtype=kind.codes)
    scales = tensor(*scale_shape(kind, (D, W)), dtype=kind.scales[0 if fp32_scales else -1])
    return QuantizedWeight(codes, scales, format, tensor(1, dtype=FP32) if format == "nvfp4" else None)


def preset_calls(arch: Arch) -> dict[str, list[Launch]]:
    """Every plan of every stage of every model, with its gain in the kernel and, where it has one, folded.

    The finalize kernel is compiled on one arch only: it loops over H and adds vectors.
    """
    calls = {}
    for model in model_shapes().values():
        for stage in model.stages:
            sizes = (stage.K, stage.H, stage.D, stage.norm)
            for plan_name, N in PLAN_ROWS.items():
                for gains in {None, 0} if stage.norm != "none" else {None}:
                    name = f"{model.name} {stage.kind} {plan_name}{' folded' if gains == 0 else ''}"
                    made = call(arch, N, *sizes, gains=gains, post_norm=stage.post_norm)
                    calls[name] = [launch for launch in made if arch == 90 or launch.kernel.fn.__name__ != FINALIZE]
    return calls


ALL = (torch.int64, torch.int64, torch.int64)
FEATURES: dict[str, dict[str, object]] = {
    "residuals": {"residuals": (True, True, True)},
    "everything": {"residuals": (True, False, True), "indices": ALL, "gain_dtype": FP32, "bias": FP32},
    "folded residuals": {"residuals": (True, True, True), "gains": 0},
    "packed": {"packed": True, "residuals": (True,), "indices": (torch.int32,), "statistics": True},
    "table": {"indices": (torch.int64, None, None), "gains": 1},
    "concat post norm": {"norm": "concat", "post_norm": True, "bias": BF16, "statistics": True},
    "fp16": {"dtype": FP16, "residuals": (True, True, True)},
    "odd D": {"D": 4095, "H": 4000},
    **{format: {"format": format} for format in FORMATS},
    "fp8_block128 residuals": {"format": "fp8_block128", "residuals": (True, True, True)},
    "mxfp8 fp16": {"format": "mxfp8", "dtype": FP16},
    "nvfp4 folded": {"format": "nvfp4", "gains": 0},
    "nvfp4 fp16": {"format": "nvfp4", "dtype": FP16, "bias": FP32},
    "int8_row post norm": {"format": "int8_row", "post_norm": True},
}


def feature_calls(arch: Arch) -> dict[str, list[Launch]]:
    calls = {
        f"{name} {plan_name}": call(arch, N, **({"K": 3, "H": 4096, "D": 4096} | feature))
        for name, feature in FEATURES.items()
        for plan_name, N in PLAN_ROWS.items()
    }
    with pytest.MonkeyPatch.context() as patch:
        # Only EAGLE_KERNELS_BATCH_INVARIANT=1 splits unaligned rows, and it has one plan.
        patch.setattr(plan, "SETTINGS", replace(plan.SETTINGS, batch_invariant=True))
        calls["unaligned"] = call(arch, 7, 3, 2001, 4095, aligned=False, residuals=(True, True, True))
    for format in ("fp8_block32", "fp8_block128"):
        calls[f"{format} of fp32 321 rows"] = call(arch, 321, *SIZES, format=format, fp32_scales=True)
    for format in ("fp8_row", "int8_row", "mxfp8", "nvfp4"):  # the last three with a width of whole blocks
        H = 2001 if format.endswith("row") else 2000
        calls[f"{format} unaligned"] = call(arch, 129, 2, H, 4095, stride=4097, format=format)
    calls["fp32 16 rows"] = call(arch, 16, 3, 4096, 4096, dtype=FP32, residuals=(True, True, True))
    calls["fp32 folded"] = call(arch, 16, 3, 4096, 4096, dtype=FP32, gains=0)
    calls["K=8"] = call(arch, 16, 8, 2880, 2880, residuals=(True,) * 8, indices=(torch.int64,) * 8)
    calls["K=1"] = call(arch, 16, 1, 7168, 7168)
    return calls


def expected_mma(launch: Launch, arch: Arch) -> str:
    """The tensor cores a partial kernel has to reach: without them it is bound by arithmetic."""
    specialization = launch.specialization
    if launch.kernel.fn.__name__ != PARTIAL:
        return ""
    if isinstance(arch, str):
        return "mfma"  # of fp32 too, which CDNA multiplies exactly
    if specialization.types[0][0] == "*fp32":
        return ""
    swap = specialization.constants[launch.kernel.arg_names.index("SWAP") - len(specialization.types)]
    return {90: "wgmma.mma_async", 100: "tcgen05.mma"}[arch] if swap else "mma.sync"


def distinct_launches(calls: dict[str, list[Launch]]) -> dict[str, Launch]:
    """By case and kernel: a launch for each binary. norm_concat has a gate of its own."""
    seen = {}
    for case, made in calls.items():
        for launch in made:
            name = launch.kernel.fn.__name__
            if name in (PARTIAL, FINALIZE, DEQUANTIZE):
                seen.setdefault((launch.kernel, launch.specialization), (f"{case} {name}", launch))
    return dict(seen.values())


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("calls", [preset_calls, feature_calls])
def test_resources(
    calls: Callable[[Arch], dict[str, list[Launch]]],
    arch: Arch,
    selected: Callable,
    record_binary: Callable[[Row], None],
) -> None:
    """No spills, no trap, shared and tensor memory that the arch has, its tensor cores, 16-byte copies."""
    faults = []
    for case, launch in selected(distinct_launches(calls(arch))).items():
        found, specialization = resources(launch, arch), launch.specialization
        record_binary(Row(launch.kernel.fn.__name__, case, str(arch), specialization.num_warps, found))
        faults += [f"{case}: {fault}" for fault in found.faults(arch)]
        mma = expected_mma(launch, arch)
        if mma not in found.mma or (not mma and found.mma):
            faults.append(f"{case}: matrix instructions are {found.mma!r}, expected {mma!r}")
        # A step of codes has at most half of the bytes, which AMD's compiler loads 1 to 8 at a time.
        narrow = isinstance(arch, str) and {"*u8", "*i8"} & set(specialization.types)
        if "w_ptr" in specialization.aligned and not (narrow or "128-bit" in found.loads or "dwordx4" in found.loads):
            faults.append(f"{case}: loads are {found.loads}")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("N", [64, 128])
@pytest.mark.parametrize("gains", [0, 3], ids=["folded", "gain"])
@pytest.mark.parametrize("residuals", [(), (True,) * 3], ids=["", "residuals"])
def test_no_buffer_feeds_both_wgmma_and_registers(residuals: tuple, gains: int, N: int) -> None:
    """triton #6691: the next copy into such a buffer overwrites what wgmma still reads, and the sums are wrong."""
    launch = call(90, N, *SIZES, gains=gains, residuals=residuals)[0]
    text = compile_kernel(launch.kernel, launch.specialization, GPUTarget("cuda", 90, 32)).asm["ttgir"]
    ring_of = {name: name for name in re.findall(r"(%\w+) = ttg\.local_alloc : \(\)", text)}
    slots = {name: int(count) for name, count in re.findall(r"(%\w+) = ttg\.local_alloc : \(\) -> \S+?<(\d+)x", text)}
    for view, source in re.findall(r"(%\w+) = ttg\.memdesc_\w+ (%\w+)", text):
        if source in ring_of:
            ring_of[view] = ring_of[source]
    multiplied = {ring_of.get(name) for names in re.findall(r"warp_group_dot (%\w+), (%\w+)", text) for name in names}
    loaded = {ring_of.get(name) for name in re.findall(r"local_load (%\w+)", text)}
    assert slots and not (multiplied & loaded) - {None}
    for ring in multiplied - {None}:
        assert slots[ring] == launch.specialization.num_stages
    assert (multiplied | loaded) - {None} == set(slots)


def specializations(made: list[list[Launch]]) -> set[tuple]:
    return {(launch.kernel.fn.__name__, launch.specialization) for each in made for launch in each}


INDEXED = {"indices": ALL, "residuals": (True, False, True)}


PLANS = [range(1, 17), range(17, 33), range(33, 65), range(65, 129)]


@pytest.mark.parametrize("rows", PLANS, ids=lambda rows: f"{rows[-1]} rows")
def test_two_binaries_for_all_of_a_plan(rows: range) -> None:
    """One for each kernel, whatever N, T, the row strides and eps are."""
    made = [call(90, N, *SIZES, **INDEXED, source_rows=5) for N in rows]
    made += [call(90, rows[-1], *SIZES, **INDEXED, source_rows=T) for T in (1, 2, 16, 4096, 70001, 2**33)]
    made += [call(90, rows[-1], *SIZES, **INDEXED, source_rows=5, stride=s) for s in (4112, 8192, 12288, 2**33)]
    made += [call(90, rows[-1], *SIZES, **INDEXED, source_rows=5, eps=(1.0, 1e-5, 0.5))]
    assert len(specializations(made)) == 2


@pytest.mark.parametrize(("H", "stride"), [(2001, None), (4096, 4097)], ids=["width", "stride"])
def test_one_plan_for_all_T_has_one_binary_of_unaligned_rows(
    H: int, stride: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stride of a single row counts as 0, and the finalize kernel of aligned rows adds squares in another order."""
    monkeypatch.setattr(plan, "SETTINGS", replace(plan.SETTINGS, batch_invariant=True))
    made = [call(90, N, 3, H, 4096, stride=stride, aligned=False) for N in (1, 2, 513)]
    assert len(made[-1]) == 4  # a second round, of one row
    assert len(specializations(made)) == 2


def test_a_layer_needs_few_binaries() -> None:
    """All T of an EAGLE-3 fc and of first-layer qkv: four partial kernels; a finalize kernel for few and for many rows;
    norm_concat for the rest."""
    assert len(specializations([call(90, N, *SIZES) for N in range(1, 300)])) == 7
    assert len(specializations([call(90, N, 2, 4096, 6144) for N in (*range(1, 300), 5000)])) == 7


def test_what_is_prepared_serves_its_signature_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of every feature, aligned and not, one after the other: each launches what it does alone."""
    alone = feature_calls(90)
    monkeypatch.setattr(launching, "forget_prepared", lambda: None)
    for _ in range(2):
        assert feature_calls(90) == alone


def test_operands_that_a_plan_is_not_for_are_refused() -> None:
    """Before anything is launched: the caller then asks for another plan."""
    assert call(90, 16, *SIZES, stride=4112) and call(90, 16, *SIZES, stride=4097) == []
    assert call(90, 1, *SIZES, stride=4097)  # the stride of a single row is not used


def test_arguments_have_the_types_that_the_kernels_have_names_for() -> None:
    for each in (call(90, 16, *SIZES, **INDEXED), call(90, 300, *SIZES, post_norm=True)):
        for launch in each:
            types, constants = launch.specialization.types, launch.specialization.constants
            assert len(types) + len(constants) == len(launch.kernel.arg_names)
            assert set(launch.specialization.aligned) <= set(launch.kernel.arg_names)


def test_the_library_product_is_one_launch_before_and_one_after() -> None:
    """norm_concat, then torch's product; a post norm or fp32 bias of its unrounded result takes the finalize kernel."""
    names = [launch.kernel.fn.__name__ for launch in call(90, 300, *SIZES)]
    assert names == ["_norm_concat"]
    assert [launch.kernel.fn.__name__ for launch in call(90, 300, *SIZES, bias=BF16)] == ["_norm_concat"]
    for after in ({"bias": FP32}, {"post_norm": True}):
        assert [launch.kernel.fn.__name__ for launch in call(90, 300, *SIZES, **after)] == ["_norm_concat", FINALIZE]
    assert call(90, 300, *SIZES, "none", packed=True) == []
    assert len(call(90, 10000, *SIZES)) == 3  # rounds


def test_codes_of_many_rows_are_written_before_the_product() -> None:
    """norm_concat, the numbers of each slice of the weight's rows, and the finalize kernel, which has their scales."""
    many = {"N": 300, "K": 3, "format": "fp8_row"}
    names = [launch.kernel.fn.__name__ for launch in call(90, H=4096, D=4096, **many)]
    assert names == ["_norm_concat", DEQUANTIZE, FINALIZE]
    names = [launch.kernel.fn.__name__ for launch in call(90, H=7168, D=7168, **many)]
    assert names == ["_norm_concat", *[DEQUANTIZE] * 3, FINALIZE]
    made = call(90, H=4096, D=4096, norm="none", packed=True, **many)
    assert [launch.kernel.fn.__name__ for launch in made] == [DEQUANTIZE, FINALIZE]
    assert made[0].grid == (3 * 4096 // 128, 4096 // 32, 1)
    assert made[0].specialization == call(90, 300, 3, 2880, 2881, format="fp8_row")[1].specialization
    assert len(specializations([call(90, N, *SIZES, format="mxfp4") for N in (129, 130, 1024, 5000)])) == 3


@pytest.mark.parametrize("statistics", [False, True])
def test_loads_before_the_wait_go_past_l1(statistics: bool) -> None:
    """The finalize kernel reads sources before its wait: L1 may still have what was there before they were written."""
    features = {"residuals": (True, False, True), "indices": (torch.int64, None, torch.int32), "bias": FP32}
    for launch in call(90, 16, 3, 512, 256, statistics=statistics, source_rows=9, **features):
        ptx = compile_kernel(launch.kernel, launch.specialization, GPUTarget("cuda", 90, 32)).asm["ptx"]
        early, wait, late = ptx.partition("griddepcontrol.wait")
        loads = re.findall(r"\bld\.global[\w.:]*", early)
        assert wait and re.search(r"\bld\.global|\bcp\.async", late)
        assert bool(loads) == (launch.kernel.fn.__name__ == FINALIZE)
        assert all(".cg" in load for load in loads), loads
