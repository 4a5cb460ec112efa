"""When the cuda backend is chosen, and what is said where it is not."""

import dataclasses
import functools
import importlib
import importlib.util
import logging
import types

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import eagle_kernels as ek
from backends import environment_of
from eagle_kernels import library, plan
from eagle_kernels.ops import norm_concat_linear_quantized as quantized
from eagle_kernels.ops.sources import Sources
from eagle_kernels.tuned_configs import Gpu

WHEEL = ("80", "89", "90a", "100a", "120", "90+ptx")
CUDA = torch.device("cuda")

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture(autouse=True)
def hopper_with_a_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plans of an H100 on a machine that has none."""
    monkeypatch.setattr(library, "unsupported_reason", None)
    monkeypatch.setattr(library, "cuda_archs", WHEEL)
    monkeypatch.setattr(library, "CUDA_RUNTIME_VERSION", 13000)
    monkeypatch.setattr(library, "cuda_driver_version", lambda: 13000)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(plan, "gpu_of", lambda device: Gpu("NVIDIA H100", 90, 227 << 10))
    plan.clear()
    yield
    plan.clear()


@pytest.mark.parametrize(
    ("archs", "capability", "runs"),
    [
        (WHEEL, (8, 0), True),
        (WHEEL, (8, 6), True),
        (WHEEL, (9, 0), True),
        (WHEEL, (10, 0), True),
        (WHEEL, (10, 3), True),  # B300: PTX, since 100a is for 10.0 alone
        (WHEEL, (12, 1), True),
        (WHEEL, (7, 5), False),
        (("90a",), (9, 0), True),
        (("90a",), (10, 0), False),
        (("90a",), (8, 9), False),
        (("89",), (8, 6), False),
        (("80",), (8, 9), True),
        (("80",), (9, 0), False),
        (("90+ptx",), (8, 9), False),
        (("90+ptx",), (9, 0), True),
        ((), (9, 0), False),
    ],
    ids=str,
)
def test_which_gpus_a_build_serves(
    archs: tuple, capability: tuple, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "cuda_archs", archs)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    reason = plan.unsupported_reason("cuda", CUDA)
    assert (reason is None) == runs
    if archs and not runs:
        assert f"this build has kernels for {', '.join(archs)}" in reason
        assert f"compute capability {capability[0]}.{capability[1]}" in reason


@needs_triton
def test_two_steps_where_an_h200_has_no_good_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a dense weight, and chunks of one width; a small one is read in one pass, and other GPUs have not timed it."""
    asked = []
    monkeypatch.setattr(library, "wgmma_pays", lambda *sizes: asked.append(sizes) or sizes[1] < 5120)
    with environment_of():
        assert planned(17, H=5120).kernel is plan.Kernel.WGMMA and not asked
        plan.clear()
        monkeypatch.setattr(plan, "gpu_of", lambda device: Gpu("NVIDIA H200", 90, 227 << 10, 132))
        faster = "T=17 > 16: the library's product is faster there"
        assert str(planned(17, H=5120)) == f"norm_concat_linear: cuda/norm_concat + linear, because {faster}"
        assert asked == [(3, 5120, 4096, 132)]
        assert planned(17).kernel is plan.Kernel.WGMMA and len(asked) == 2
        assert planned(16, H=5120).kernel is plan.Kernel.FUSED
        unlike = plan.Problem("norm_concat_linear", CUDA, 3, 17, torch.bfloat16, 4096, (5120, 6144))
        assert plan.choose(*unlike).kernel is plan.Kernel.WGMMA
        assert planned(17, H=336).kernel is plan.Kernel.WGMMA and len(asked) == 2


@pytest.mark.parametrize("op", ["capture_hidden", "add_rms_norm", "norm_concat", "vocab_parallel_embedding"])
def test_the_memory_ops_take_cuda(op: str) -> None:
    with environment_of():
        assert plan.choose(op, CUDA).backend == "cuda"


@needs_triton
@pytest.mark.parametrize("driver, served", [(12080, "CUDA 12.8"), (0, "no CUDA")])
def test_a_driver_older_than_the_runtime_leaves_it_to_triton(
    driver: int, served: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The library's runtime would fail with error 35 in every call, where torch for CUDA 12 and Triton work."""
    monkeypatch.setattr(library, "cuda_driver_version", lambda: driver)
    monkeypatch.setattr(plan, "_warn_once", functools.cache(logging.getLogger("eagle_kernels").warning))
    reason = f"this build needs a driver for CUDA 13.0 (driver 580) or newer, and this one serves {served}"
    with environment_of():
        for op in ("capture_hidden", "norm_concat"):
            assert plan.choose_backend(op, CUDA) == ("triton", f"cuda: {reason}")
        assert planned(4).backend == "triton"
    assert [record.getMessage() for record in caplog.records] == [f"the CUDA kernels are left out: {reason}"]
    with environment_of(EAGLE_KERNELS_BACKEND="cuda"), pytest.raises(RuntimeError, match="driver 580"):
        plan.choose_backend("capture_hidden", CUDA)


@pytest.mark.parametrize(("runtime", "driver"), [(13000, 13000), (13020, 13000), (12080, 13000), (12080, 12020)])
def test_a_runtime_runs_on_every_driver_of_its_major_version(
    runtime: int, driver: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "CUDA_RUNTIME_VERSION", runtime)
    monkeypatch.setattr(library, "cuda_driver_version", lambda: driver)
    assert plan.unsupported_reason("cuda", CUDA) is None


@needs_triton
def test_each_gpu_of_a_machine_has_its_own_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    capabilities = [(9, 0), (7, 5)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device.index])
    with environment_of():
        backends = [plan.choose_backend("capture_hidden", torch.device("cuda", index))[0] for index in (0, 1, 0)]
    assert backends == ["cuda", "reference", "cuda"]


def planned(T: int, dtype: torch.dtype = torch.bfloat16, H: int = 4096, **layout: object) -> plan.Plan:
    problem = plan.Problem("norm_concat_linear", CUDA, 3, T, dtype, 4096, (H,), **layout)
    return plan.choose(*problem)


@needs_triton
def test_which_kernel_takes_how_many_rows() -> None:
    with environment_of():
        assert (
            str(planned(16))
            == "norm_concat_linear: cuda/fused, because T=16 <= 16: one pass over the weight is the bound"
        )
        one_pass = "one pass over the weight, whose products are those of warpgroups"
        for T in (17, 48):
            assert str(planned(T)) == f"norm_concat_linear: cuda/fused wgmma, because T={T}: {one_pass}"
        faster = "the library's product is faster there"
        assert str(planned(49)) == f"norm_concat_linear: cuda/norm_concat + linear, because T=49 > 48: {faster}"
        of_small = [planned(T, H=H).kernel for H, T in ((344, 64), (336, 64), (336, 65))]
        assert of_small == [plan.Kernel.TWO_STEP, plan.Kernel.WGMMA, plan.Kernel.TWO_STEP]
        assert planned(4, torch.float32).backend == "triton"
        assert "tensor cores multiply 16-bit types" in planned(4, torch.float32).reason
        assert planned(4, H=2888).kernel is plan.Kernel.FUSED
        assert planned(4, H=2884).reason.startswith("H=2884 is no multiple of 8; an address, a row stride or H is")
        post_norm = planned(4, has_post_norm=True)
        assert (post_norm.backend, post_norm.kernel) == ("cuda", plan.Kernel.SPLIT)
        assert post_norm.reason == "a post norm needs all D columns of a row in one place"
        assert planned(16, has_post_norm=True).kernel is plan.Kernel.SPLIT
        assert planned(17, has_post_norm=True).kernel is plan.Kernel.TWO_STEP
        assert planned(4, bytes_aligned=False).reason.startswith(
            "cuda: an address or a row stride is no multiple of 16"
        )


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("archs", [("80", "90a", "100a", "120"), ("80", "90+ptx")], ids=lambda archs: archs[1])
def test_one_launch_needs_a_gpu_with_clusters(archs: tuple, capability: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows need sm_90, and a library with code for sm_90a."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(library, "cuda_archs", archs)
    with environment_of():
        kernel = plan.Kernel.FUSED if capability >= (9, 0) else plan.Kernel.SPLIT
        of_many = plan.Kernel.WGMMA if capability == (9, 0) and "90a" in archs else plan.Kernel.TWO_STEP
        assert (planned(1).kernel, planned(17).kernel) == (kernel, of_many)
        if kernel is plan.Kernel.SPLIT:
            assert planned(16).reason == "T=16: one pass over the weight, then over its sums"
        if of_many is plan.Kernel.TWO_STEP:
            assert planned(17).reason == "T=17 > 16: the library's product is faster there"


@needs_triton
def test_before_a_library_product_the_normed_rows_are_cudas() -> None:
    """Wherever Triton would write the normed rows and leave the product to a library, the cuda backend writes them, and
    nothing of Triton is imported."""
    with environment_of():
        assert str(planned(5000, torch.float32)) == (
            "norm_concat_linear: cuda/norm_concat + linear, because tensor cores multiply 16-bit types; T=5000 > 16 "
            "by the heuristic, without a tuned table for NVIDIA H100"
        )
        unaligned = {"bytes_aligned": False, "elements_aligned": False}
        for T, dtype, changed in (
            (5000, torch.bfloat16, {}),
            (4, torch.bfloat16, {"H": 2884}),
            (4, torch.bfloat16, unaligned),
            (17, torch.float32, {}),
        ):
            for post_norm in (False, True):
                problem = planned(T, dtype, has_post_norm=post_norm, **changed)
                assert (problem.backend, problem.kernel) == ("cuda", plan.Kernel.TWO_STEP)


@needs_triton
@pytest.mark.parametrize("backend", ["auto", "cuda"])
def test_one_plan_for_all_T(backend: str) -> None:
    rows = (1, 16, 17, 129, 300)
    with environment_of(EAGLE_KERNELS_BATCH_INVARIANT="1", EAGLE_KERNELS_BACKEND=backend):
        assert {(planned(T).backend, planned(T).kernel) for T in rows} == {("cuda", plan.Kernel.SPLIT)}
        if backend == "auto":
            assert {planned(T, torch.float32).backend for T in rows} == {"triton"}
            assert {planned(T, torch.float32).tiles for T in rows} == {planned(1, torch.float32).tiles}


def planned_codes(T: int = 4, H: int = 4096, block_columns: int | None = None, **changed: object) -> plan.Plan:
    sizes, in_blocks = (T, torch.bfloat16, 4096, (H,)), block_columns is not None
    problem = plan.Problem("norm_concat_linear_quantized", CUDA, 3, *sizes)
    scaling = {"block_rows": block_columns or 1, "block_columns": block_columns or 3 * H, "in_blocks": in_blocks}
    return plan.choose(*problem._replace(**scaling | changed))


@needs_triton
@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"T": 16}, None),
        ({"T": 33}, None),
        ({"T": 128}, None),
        ({"T": 4, "has_post_norm": True}, None),
        ({"T": 129}, "T=129 > 128: the split kernels would widen the codes 3 times or more"),
        ({"H": 4112}, None),
        ({"H": 4104}, "H=4104 is no multiple of 16"),
        ({"H": 4128, "block_columns": 32}, None),
        ({"H": 4112, "block_columns": 128}, "H=4112 is no multiple of 32"),
        ({"widths": (2048, 4096)}, None),
        ({"widths": (2048, 4100)}, "H=4100 is no multiple of 16"),
        (
            {"H": 384, "block_columns": 384},
            "384 columns share a scale, and the kernels shift by a power of two from 32 up",
        ),
        (
            {"T": 33, "H": 384, "block_columns": 384},
            "384 columns share a scale, and the kernels shift by a power of two from 32 up",
        ),
        ({"block_columns": 16}, "16 columns share a scale, and the kernels shift by a power of two from 32 up"),
        ({"block_columns": 4096, "has_int8": True}, "no cuda kernel reads int8 whose scales are of blocks"),
        ({"has_int8": True}, None),
        ({"code_bits": 12}, "no cuda kernel reads codes of 12 bits"),
        (
            {"code_bits": 4, "block_columns": 32, "H": 4128},
            "H=4128 is no multiple of 128, the columns of four scales, which are copied together",
        ),
        (
            {"code_bits": 4, "block_columns": 16, "dtype": torch.float16},
            "codes times their scales may leave the range of torch.float16",
        ),
        (
            {"code_bits": 4, "block_columns": 16, "scales_aligned": False},
            "four scales are copied together, and their address or row stride is no multiple of 4 bytes",
        ),
        ({"dtype": torch.float32}, "tensor cores multiply 16-bit types"),
        ({"bytes_aligned": False}, "an address or a row stride is no multiple of 16 bytes"),
    ],
    ids=str,
)
def test_codes_go_to_the_kernels_of_bf16(changed: dict, reason: str | None) -> None:
    """Other codes go to Triton or are dequantized; `explain` says why."""
    with environment_of():
        chosen = planned_codes(**changed)
        if reason is None:
            # Beyond 48 rows a bf16 weight goes to the library, which cannot multiply codes.
            of_bf16 = planned(min(changed.get("T", 4), 48), has_post_norm=changed.get("has_post_norm", False))
            kernel, why = of_bf16.kernel, of_bf16.reason.replace("T=48:", f"T={changed.get('T')}:")
            if "block_columns" in changed:
                kernel, why = plan.Kernel.SPLIT, "a tile of 64 rows and columns of the fused kernel has one scale"
            assert (chosen.backend, chosen.kernel) == ("cuda", kernel)
            assert chosen.reason == f"the codes are widened as they are multiplied; {why}"
        else:
            assert chosen.backend in ("triton", "reference") and f"cuda: {reason}; " in chosen.reason


@needs_triton
def test_codes_of_more_than_128_rows_are_dequantized_once() -> None:
    """By Triton, where that is exact in 16 bits or, above 192 rows, in two numbers; codes that are multiplied by their
    scales from 65 rows on. Without it CUDA widens the codes of up to 512 rows, as it does where the split kernels of
    Triton do not take them."""
    once = "the codes are dequantized once for the library's product"
    blocks = {"block_columns": 128, "scales_sums": True}
    scaled = {"block_columns": 32, "block_rows": 1, "has_e8m0": True}
    with environment_of():
        for changed, most in (
            ({"T": 129}, 128),
            ({"T": 5000}, 128),
            ({"T": 65, "code_bits": 4, **scaled}, 64),
            ({"T": 65, **scaled}, 64),
            ({"T": 193, **blocks}, 192),
        ):
            assert planned_codes(**changed | {"T": most}).backend == "cuda"
            chosen = planned_codes(**changed)
            assert (chosen.backend, chosen.kernel) == ("triton", plan.Kernel.TWO_STEP), chosen
            assert chosen.reason.startswith("cuda: ") and chosen.reason.endswith(f"; T={changed['T']} > {most}: {once}")
        assert planned_codes(192, **blocks).kernel is plan.Kernel.WGMMA
        assert planned_codes(192, H=4128, **blocks).kernel is plan.Kernel.SPLIT
        assert planned_codes(513, dtype=torch.float16, H=4128, **blocks).backend == "reference"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(importlib.util, "find_spec", lambda name: None)
            plan.clear()
            assert planned_codes(512).backend == "cuda" and planned_codes(513).backend == "reference"
        plan.clear()


def test_codes_in_blocks_of_64_rows_and_columns_or_more_are_one_launch() -> None:
    fused, split = plan.Kernel.FUSED, plan.Kernel.SPLIT
    with environment_of():
        for changed, kernel in (
            ({"block_columns": 128}, fused),
            ({"block_columns": 64, "T": 16}, fused),
            ({"block_columns": 64, "block_rows": 192, "H": 4160}, fused),
            ({"block_columns": 128, "dtype": torch.float16}, fused),
            ({"block_columns": 128, "T": 17}, split),
            ({"block_columns": 128, "H": 4128}, split),
            ({"block_columns": 128, "widths": (4096, 2080)}, split),
            ({"block_columns": 128, "block_rows": 1}, split),
            ({"block_columns": 128, "block_rows": 32}, split),
            ({"block_columns": 32, "block_rows": 128}, split),
            ({"block_columns": 128, "has_post_norm": True}, split),
        ):
            assert planned_codes(**changed).kernel is kernel, changed


def test_scales_that_multiply_codes() -> None:
    """Those of 4 bits on every path; MXFP8's in the fused kernel, where its four scales are copied together."""
    fused, split = plan.Kernel.FUSED, plan.Kernel.SPLIT
    mxfp8 = {"block_rows": 1, "block_columns": 32, "has_e8m0": True}
    with environment_of():
        for changed, kernel in (
            ({"code_bits": 4, "block_columns": 16, "H": 4160}, fused),
            ({"code_bits": 4, "block_columns": 32}, fused),
            ({"code_bits": 4, "block_columns": 32, "has_residuals": True}, fused),
            ({"code_bits": 4, "block_columns": 32, "has_post_norm": True}, split),
            ({"code_bits": 4, "block_columns": 32, "T": 17}, split),
            ({"code_bits": 4, "block_columns": 32, "T": 64}, split),
            (mxfp8, fused),
            (mxfp8 | {"T": 17}, split),
            (mxfp8 | {"has_e8m0": False}, split),
            (mxfp8 | {"block_rows": 32}, split),
            (mxfp8 | {"has_residuals": True}, split),
            (mxfp8 | {"scales_aligned": False}, split),
            (mxfp8 | {"dtype": torch.float16}, split),
            (mxfp8 | {"H": 4160}, split),
        ):
            chosen = planned_codes(**changed)
            assert (chosen.backend, chosen.kernel) == ("cuda", kernel), changed


def test_codes_of_more_rows_go_to_warpgroups() -> None:
    """bf16 rows, and codes with one scale per row or in blocks that end where a stage of 128 columns ends."""
    split, wgmma = plan.Kernel.SPLIT, plan.Kernel.WGMMA
    with environment_of():
        for changed, kernel in (
            ({"T": 17}, wgmma),
            ({"T": 32, "block_columns": 128}, split),
            ({"T": 33}, wgmma),
            ({"T": 33, "H": 4112}, wgmma),
            ({"T": 33, "dtype": torch.float16}, split),
            ({"T": 33, "has_post_norm": True}, split),
            ({"T": 33, "block_columns": 128}, wgmma),
            ({"T": 33, "block_columns": 256}, wgmma),
            ({"T": 33, "block_columns": 128, "H": 4128}, split),
            ({"T": 33, "block_columns": 128, "widths": (4096, 2080)}, split),
            ({"T": 33, "block_columns": 32}, split),
        ):
            assert planned_codes(**changed).kernel is kernel, changed


def test_codes_have_one_plan_for_all_T() -> None:
    with environment_of(EAGLE_KERNELS_BATCH_INVARIANT="1"):
        assert {planned_codes(T) for T in (1, 16, 129, 5000)} == {planned_codes(1)}
        assert planned_codes(1).reason.endswith("; EAGLE_KERNELS_BATCH_INVARIANT=1 wants one plan for all T")


def aligned(*shape: int, dtype: torch.dtype = torch.bfloat16, skip: int = 0) -> torch.Tensor:
    """Zeros whose rows begin at multiples of 64 bytes, `skip` elements further on."""
    buffer = torch.zeros(shape[0], shape[1] + 64, dtype=dtype)
    return buffer[:, skip : shape[1] + skip]


def sources_of(chunks: list[torch.Tensor], **options: object) -> Sources:
    return Sources.of("norm_concat_linear", chunks, **{"norm": "chunk"} | options)


def weight_of(format: str, skip: int = 0, scales_skip: int = 0, scales_apart: int = 0) -> ek.QuantizedWeight:
    """scales_apart: bytes between the rows of scales, beside what `aligned` leaves."""
    weight = ek.quantize(torch.ones(96, 256), format)
    codes, scales = aligned(*weight.codes.shape, dtype=torch.uint8, skip=skip).view(weight.codes.dtype), weight.scales
    row_bytes = scales[0].nbytes
    bytes_of_scales = aligned(scales.shape[0], row_bytes + scales_apart, dtype=torch.uint8, skip=scales_skip)
    bytes_of_scales = bytes_of_scales[:, :row_bytes]
    if scales.element_size() == 1:
        scales = bytes_of_scales.view(scales.dtype)
    return ek.QuantizedWeight.of_tensors(codes, scales, weight.global_scale, format, weight.block)


@pytest.mark.parametrize(
    ("format", "changes", "expected"),
    [
        ("fp8_row", {}, {"block_rows": 1, "block_columns": 256}),
        ("int8_row", {}, {"block_rows": 1, "block_columns": 256, "has_int8": True}),
        ("fp8_block128", {}, {"block_rows": 128, "block_columns": 128, "in_blocks": True, "scales_sums": True}),
        ("mxfp8", {}, {"block_rows": 1, "block_columns": 32, "in_blocks": True, "has_e8m0": True}),
        ("nvfp4", {}, {"block_rows": 1, "block_columns": 16, "in_blocks": True, "code_bits": 4}),
        ("fp8_row", {"residuals": [None, aligned(3, 128)]}, {"has_residuals": True}),
        ("fp8_row", {"chunks": [aligned(3, 128), aligned(3, 128, skip=8)]}, {}),
        ("fp8_row", {"chunks": [aligned(3, 128), aligned(3, 128, skip=1)]}, {"bytes_aligned": False}),
        (
            "fp8_row",
            {"chunks": [aligned(3, 128), torch.zeros(3, 136, dtype=torch.bfloat16)[:, :128]]},
            {"elements_aligned": False},
        ),
        (
            "fp8_row",
            {"residuals": [None, aligned(3, 128, skip=1)]},
            {"has_residuals": True, "bytes_aligned": False},
        ),
        ("fp8_row", {"norm_weight": [aligned(1, 128)[0], aligned(1, 128, skip=1)[0]]}, {"bytes_aligned": False}),
        ("fp8_row", {"skip": 1}, {"bytes_aligned": False}),
        ("mxfp8", {"scales_skip": 1}, {"in_blocks": True, "has_e8m0": True, "scales_aligned": False}),
        ("mxfp8", {"scales_apart": 1}, {"in_blocks": True, "has_e8m0": True, "scales_aligned": False}),
        ("fp8_row", {"has_post_norm": True}, {"has_post_norm": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value) or "plain",
)
def test_a_call_of_codes_is_planned_by_its_operands(
    format: str, changes: dict, expected: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized, "choose", lambda *problem: plan.Problem(*problem))
    of_weight = ("skip", "scales_skip", "scales_apart")
    weight = weight_of(format, **{name: value for name, value in changes.items() if name in of_weight})
    options = {name: value for name, value in changes.items() if name in ("residuals", "norm_weight")}
    sources = sources_of(changes.get("chunks", [aligned(3, 128), aligned(3, 128)]), **options)
    problem = quantized.plan_of(sources, weight, 3, changes.get("has_post_norm", False))
    sizes = {"num_chunks": 2, "rows": 3, "columns": 96, "widths": (128,), "dtype": torch.bfloat16}
    flags = {name: False for name in ("has_residuals", "has_post_norm", "in_blocks", "scales_sums", "has_int8")}
    flags |= {"has_e8m0": False, "bytes_aligned": True, "scales_aligned": True, "code_bits": 8} | sizes | expected
    if expected.get("bytes_aligned", True):
        flags |= {"elements_aligned": expected.get("elements_aligned", True)}
    assert {name: getattr(problem, name) for name in flags} == flags


def test_the_stride_of_a_single_row_counts_where_one_plan_serves_all_T(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "choose", lambda *problem: plan.Problem(*problem))
    chunk = torch.zeros(1, 257, dtype=torch.bfloat16)[:, :256]
    for invariant in (False, True):
        with environment_of(EAGLE_KERNELS_BATCH_INVARIANT=str(int(invariant))):
            assert quantized.plan_of(sources_of([chunk]), weight_of("fp8_row"), 1, False).bytes_aligned != invariant


OF_CODES = ek.quantize(torch.randn(96, 256), "fp8_row")


def run_codes(chunks: list[torch.Tensor], **options: object) -> torch.Tensor:
    projection = quantized.QuantizedProjection(OF_CODES, options.get("bias"), None, 1e-6)
    return quantized.run(sources_of(chunks), projection, None)


@pytest.mark.parametrize(
    ("backend", "kernel", "number"),
    [
        ("cpu", plan.Kernel.FUSED, 0),
        ("cpu", plan.Kernel.DOTS, 1),
        ("cuda", plan.Kernel.SPLIT, 0),
        ("cuda", plan.Kernel.FUSED, 1),
        ("cuda", plan.Kernel.WGMMA, 2),
    ],
)
@pytest.mark.parametrize("early", [True, False])
def test_the_primitive_of_codes_is_told_the_plans_kernel(
    backend: str, kernel: plan.Kernel, number: int, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """csrc/norm_concat_linear.h, ProductKernel. With another one the results are as right, and slower."""
    calls: list[tuple] = []
    stand_in = types.SimpleNamespace(norm_concat_linear_quantized_out=lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(library, "primitives", stand_in)
    monkeypatch.setattr(quantized, "choose", lambda op, *_: plan.Plan(op, backend, kernel, ""))
    with environment_of(EAGLE_KERNELS_EARLY_WEIGHT=str(int(early))):
        run_codes([aligned(3, 256)])
    ((*_, told, told_early, _),) = calls
    assert (told, told_early) == (number, early)


def test_codes_are_planned_anew_where_cuda_would_take_what_explain_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A last chunk of another width; one row where one plan serves all T."""
    problems: list[tuple] = []

    def choose(op: str, *problem: object) -> plan.Plan:
        problems.append(plan.Problem(op, *problem))
        return plan.Plan(op, "cuda", plan.Kernel.SPLIT, str(len(problems)))

    monkeypatch.setattr(quantized, "choose", choose)
    monkeypatch.setattr(quantized, "_run_plan", lambda plan, *_: True)
    for chunks, invariant, count in (
        ([aligned(3, 128), aligned(3, 128)], "1", 1),
        ([aligned(1, 128), aligned(1, 128)], "0", 1),
        ([aligned(1, 128), aligned(1, 128)], "1", 2),
        ([aligned(3, 64), aligned(3, 192)], "0", 2),
    ):
        problems.clear()
        with environment_of(EAGLE_KERNELS_BATCH_INVARIANT=invariant):
            run_codes(chunks)
            assert len(problems) == count
            if count == 2:
                assert set(problems[1].widths) == {chunk.shape[1] for chunk in chunks}
                with pytest.raises(ValueError, match="bias has shape"):
                    run_codes(chunks, bias=torch.zeros(7))


def test_operands_that_no_kernel_of_codes_takes_are_multiplied_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks, kernels = [torch.randn(3, 256).bfloat16()], []
    with environment_of(EAGLE_KERNELS_BACKEND="reference"):
        expected = run_codes(chunks)
    monkeypatch.setattr(quantized, "_run_plan", lambda plan, *_: bool(kernels.append(plan)))
    assert torch.equal(run_codes(chunks), expected) and len(kernels) == 2


def test_a_refusal_by_the_planned_kernel_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the exact plan names another kernel, that one runs; else the device's own error comes out."""

    def failing(*arguments: object) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(library, "primitives", types.SimpleNamespace(norm_concat_linear_quantized_out=failing))
    record = (sources_of([aligned(3, 256)]), quantized.QuantizedProjection(OF_CODES, None, None, 1e-6))
    planned = plan.Plan(quantized.PRIMITIVE, "cuda", plan.Kernel.SPLIT, "")
    out = torch.empty(3, 96, dtype=torch.bfloat16)
    for change in ({"kernel": plan.Kernel.FUSED}, {"backend": "cpu"}):
        monkeypatch.setattr(quantized, "plan_of", lambda *_, change=change: dataclasses.replace(planned, **change))
        assert not quantized._run_plan(planned, *record, out)
    monkeypatch.setattr(quantized, "plan_of", lambda *_: planned)
    with pytest.raises(RuntimeError, match=r"^device lost$"):
        quantized._run_plan(planned, *record, out)
    with pytest.raises(ValueError, match="out has shape"):
        quantized._run_plan(planned, *record, out[:2])


@needs_triton
def test_a_layer_keeps_codes_that_a_kernel_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, bits = torch.device("cpu"), (4, 8, 12)
    with environment_of():
        assert [quantized.can_read_codes(CUDA, each) for each in bits] == [True, True, False]
        assert [quantized.can_read_codes(cpu, each) for each in bits] == [True] * 3
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        plan.clear()
        assert [quantized.can_read_codes(CUDA, each) for each in bits] == [False, True, False]
    with environment_of(EAGLE_KERNELS_BACKEND="reference"):
        assert not any(quantized.can_read_codes(device, 8) for device in (CUDA, cpu))


def test_without_triton_the_rest_is_norm_concat_and_a_library_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with environment_of():
        assert planned(129).backend == "cuda" and planned(129).kernel is plan.Kernel.TWO_STEP


def test_more_chunks_than_a_kernel_holds_go_to_the_next_backend() -> None:
    with environment_of():
        backend, reason = plan.choose_backend("norm_concat", CUDA, 9)
        assert backend != "cuda" and reason.startswith("cuda: K=9 > 8 chunks")
        assert plan.choose_backend("norm_concat", CUDA, 8)[0] == "cuda"
        with FakeTensorMode():  # a call is planned by its own device and K
            chunks = [torch.empty(2, 64, device=CUDA, dtype=torch.bfloat16) for _ in range(9)]
            assert ek.explain("norm_concat", chunks[:8]).backend == "cuda"
            assert ek.explain("norm_concat", chunks).reason.startswith("cuda: K=9 > 8 chunks")


@pytest.mark.parametrize(
    ("archs", "reason"), [((), "this build has no cuda kernels"), (WHEEL, "the tensors are on cpu")], ids=str
)
def test_a_forced_backend_says_why_it_cannot(archs: tuple, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "cuda_archs", archs)
    row = torch.zeros(1, 8)
    wanted = rf"capture_hidden: EAGLE_KERNELS_BACKEND is 'cuda', expected one of \[.*'reference'\], because {reason}"
    with environment_of(EAGLE_KERNELS_BACKEND="cuda"), pytest.raises(RuntimeError, match=wanted):
        ek.capture_hidden(row, out=torch.zeros(1, 8))


def test_an_amd_gpu_is_not_nvidias(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 4))
    assert plan.unsupported_reason("cuda", CUDA) == "the GPU is AMD's"


@pytest.mark.parametrize(
    ("unsupported", "said"),
    [
        (None, "triton/one kernel, because no cuda kernel stores context KV"),
        (
            "it is not installed",
            "reference/plain torch, because no cuda kernel stores context KV; triton: it is not installed",
        ),
    ],
)
def test_context_kv_is_stored_by_triton(unsupported: str | None, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Triton ran, `explain` gave as the reason: triton: None."""
    monkeypatch.setattr(plan, "_wanted_backend", lambda *_: ("cuda", "it is the default"))
    monkeypatch.setattr(plan, "unsupported_reason", lambda backend, device: unsupported)
    assert str(plan._choose(plan.Problem("store_context_kv", CUDA))) == f"store_context_kv: {said}"
