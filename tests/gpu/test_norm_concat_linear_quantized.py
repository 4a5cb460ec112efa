"""norm_concat_linear on codes on a GPU: float64 truth in every form of codes and scales, bits, a graph."""

from dataclasses import replace

import pytest
import torch

import eagle_kernels as ek
import test_norm_concat_linear_quantized as on_cpu
from accuracy import allow_independent_roundings, expect
from backends import environment_of
from cases import Case, check_every_value, operands, weight_of_every_code
from eagle_kernels import plan
from guards import GuardedRows, same_bits

pytestmark = pytest.mark.usefixtures("gpu_backend")

CASES = [
    Case("bf16", (160,) * 3, 3, D=150),
    Case("fp16", (2880, 160), 16, D=150, gain="fp32", residuals="some", bias="dtype"),
    Case("bf16", (160,) * 3, 40, "concat", D=150, gain="fp32", norm_offset=1.0, residuals="some"),
    Case("fp16", (2880,) * 2, 70, D=300, indices="shared", bias="fp32"),
    Case("bf16", (4096,) * 3, 8, D=4096, post_norm="dtype"),
    Case("bf16", (2816, 128, 384), 16, D=2880, gain="fp32", residuals="some"),
    Case("bf16", (4096,) * 3, 1, "concat", D=4096),
    Case("bf16", (2816,) * 3, 40, D=150, gain="none"),
    Case("bf16", (4096,) * 3, 128, D=500, gain="none", residuals="all"),
    Case("bf16", (4096,) * 3, 300, D=500),
    # The fused kernel's pairs and wide pairs on a GPU of 132 SMs, unless the form has none; the last one's ranges have
    # columns of two chunks, as those of (4096,) * 3 above.
    Case("bf16", (1024,) * 2, 9, D=4096, gain="fp32"),
    Case("bf16", (1024,) * 2, 16, D=6144),
    Case("bf16", (2048,) * 3, 5, "concat", D=6144),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("name", on_cpu.WEIGHTS)
def test_float64_truth(name: str, case: Case) -> None:
    call = operands(case, "cuda")
    torch.manual_seed(0)
    weight = on_cpu.random_weight(name, case.D, sum(case.widths)).to("cuda")
    _, expected = expect(replace(call, projection=call.projection | {"weight": weight.dequantize(torch.float64)}))
    guarded = GuardedRows(call.N, case.D, case.dtype, "cuda")
    replace(call, projection=call.projection | {"weight": weight}).norm_concat_linear(out=guarded.view)
    guarded.check_around()
    allow_independent_roundings(expected).check(guarded.view)


@pytest.mark.parametrize("norm", ["chunk", "none"])
@pytest.mark.parametrize("T", [160, 1030])
@pytest.mark.parametrize("name", on_cpu.WEIGHTS)
def test_float64_truth_of_many_rows(name: str, T: int, norm: str) -> None:
    """Codes that are dequantized once, and with fp32 scales of blocks at 160 rows those that are widened 64 rows at a
    time. In two steps x is rounded where eager rounds it, so the bound is eager's."""
    case = Case("bf16", (2880,) * 3, T, norm, D=500, bias="fp32" if norm == "none" else "")
    call = operands(case, "cuda")
    torch.manual_seed(0)
    weight = on_cpu.random_weight(name, case.D, sum(case.widths)).to("cuda")
    _, expected = expect(replace(call, projection=call.projection | {"weight": weight.dequantize(torch.float64)}))
    call = replace(call, projection=call.projection | {"weight": weight})
    guarded = GuardedRows(call.N, case.D, case.dtype, "cuda")
    chosen = ek.explain("norm_concat_linear", call.chunks, **call.sources, **call.projection)
    is_widened = T == 160 and weight.scaled_where(case.dtype) == "blocks"
    assert (chosen.kernel is plan.Kernel.TWO_STEP) == (not is_widened), chosen
    call.norm_concat_linear(out=guarded.view)
    guarded.check_around()
    (allow_independent_roundings(expected) if is_widened else expected).check(guarded.view)


@pytest.mark.parametrize("rows", [16, 32, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [32, 128])  # by the second, CUDA's kernels multiply codes by their scales
@pytest.mark.parametrize("name", ["fp8_row", "int8_row", "mxfp8", "nvfp4", "mxfp4"])
def test_every_code_and_scale(name: str, width: int, dtype: torch.dtype, rows: int) -> None:
    """x is the identity, so each output is one code times its scale, rounded once; NaN stays NaN."""
    weight = weight_of_every_code(name, 64, width)
    expected = weight.dequantize(torch.float64).to(dtype).t().repeat(2, 1)
    on_gpu, identity = weight.to("cuda"), torch.eye(width, dtype=dtype).repeat(2, 1).cuda()
    result = torch.cat([ek.norm_concat_linear([x], on_gpu, norm="none") for x in identity.split(rows)]).cpu()
    check_every_value(result, expected, multiplies_codes=name == "mxfp4")


def make_call(name: str, T: int, H: int = 2880, D: int = 2880) -> tuple:
    chunks = [torch.randn(T, H, device="cuda").bfloat16() for _ in range(2)]
    weight = on_cpu.random_weight(name, D, 2 * H).to("cuda")
    return chunks, weight, (torch.rand(2, H, device="cuda") + 0.5).bfloat16()


@pytest.mark.parametrize("gpu_backend", ["cuda"], indirect=True)
@pytest.mark.parametrize(
    ("name", "H"), [("fp8_row", 2880), ("fp8_block32", 2880), ("int8_row", 2880), ("nvfp4", 2880), ("mxfp4", 2816)]
)
def test_a_rows_bits_do_not_depend_on_T(name: str, H: int, gpu_backend: str) -> None:
    chunks, weight, gain = make_call(name, 300, H)
    with environment_of(EAGLE_KERNELS_BATCH_INVARIANT="1", EAGLE_KERNELS_BACKEND=gpu_backend):
        whole = ek.norm_concat_linear(chunks, weight, norm_weight=gain)
        for T in (1, 8, 16, 17, 32, 33, 64, 65, 128, 129):
            out = ek.norm_concat_linear([chunk[:T] for chunk in chunks], weight, norm_weight=gain)
            assert same_bits(out, whole[:T]), T
            assert same_bits(out, ek.norm_concat_linear([c[:T] for c in chunks], weight, norm_weight=gain.float())), T


@pytest.mark.parametrize("T", [1, 9, 40, 100, 400])
# Of 2880 and 2816 columns only 2816 is a multiple of 128; to 4096 and 6144 the fused kernel runs in pairs and wide
# pairs on a GPU of 132 SMs.
@pytest.mark.parametrize(("H", "D"), [(2880, 2880), (2816, 2880), (2048, 4096), (2048, 6144)])
@pytest.mark.parametrize("name", ["fp8_row", "fp8_block128", "nvfp4", "mxfp4"])
def test_a_graph_replays_with_new_contents(name: str, H: int, D: int, T: int) -> None:
    """Back to back, where a call copies its weight while the one before it runs."""
    chunks, weight, gain = make_call(name, T, H, D)
    outs = torch.empty(5, T, D, dtype=torch.bfloat16, device="cuda")

    def call_all() -> None:
        for out in outs:
            ek.norm_concat_linear(chunks, weight, norm_weight=gain, out=out)

    call_all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call_all()
    for _ in range(4):
        for chunk in chunks:
            chunk.normal_()
        outs.fill_(float("nan"))
        graph.replay()
        expected = ek.norm_concat_linear(chunks, weight, norm_weight=gain)
        assert all(same_bits(out, expected) for out in outs)
