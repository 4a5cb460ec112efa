"""norm_concat on a GPU: float64 truth for every case and preset, bad rows, and offsets beyond 2^31."""

import pytest
import torch

import eagle_kernels as ek
from accuracy import expect
from cases import NORM_CONCAT_CASES, Case, operands
from eagle_kernels.model_shapes import model_shapes
from guards import GuardedRows, UnchangedTensors, same_bits
from test_norm_concat import make_call

pytestmark = pytest.mark.usefixtures("gpu_backend")

STAGES = sorted({(stage.K, stage.H) for model in model_shapes().values() for stage in model.stages})
PRESETS = [Case("bf16", (H,) * K, T, norm) for K, H in STAGES for norm in ("chunk", "concat") for T in (1, 16, 129)]
PRESETS += [Case("bf16", (8200,) * 2, 5, "concat", residuals="all"), Case("fp32", (20000,) * 2, 5)]


@pytest.mark.parametrize("case", dict.fromkeys([*NORM_CONCAT_CASES, *PRESETS]), ids=lambda case: case.id)
def test_float64_truth(case: Case) -> None:
    call = operands(case, "cuda")
    expected, _ = expect(call)
    one_row = case.layout == "row"
    guarded = GuardedRows(1 if one_row else call.N, sum(case.widths), case.dtype, "cuda")
    with UnchangedTensors(call.tensors()):
        call.norm_concat(out=guarded.view[0] if one_row else guarded.view)
    guarded.check_around()
    expected.check(guarded.view)
    operands.cache_clear()


@pytest.mark.parametrize("norm", ["chunk", "concat", "none"])
@pytest.mark.parametrize("stale", [float("nan"), float("inf"), 3e4])
def test_a_bad_row_stays_in_its_row(stale: float, norm: str) -> None:
    chunks, residuals, _ = make_call(9, torch.bfloat16)
    chunks, residuals = ([rows.cuda() for rows in source] for source in (chunks, residuals))
    clean = ek.norm_concat(chunks, norm=norm, residuals=residuals)
    chunks[1][4, 50] = stale
    residuals[0][7] = stale
    dirty = ek.norm_concat(chunks, norm=norm, residuals=residuals)
    kept = [0, 1, 2, 3, 5, 6, 8]
    assert same_bits(clean[kept], dirty[kept])
    assert not same_bits(clean, dirty)


@pytest.mark.parametrize("norm", ["chunk", "none"])
@pytest.mark.parametrize("H", [2880, 4096])
def test_bits_do_not_depend_on_T(H: int, norm: str) -> None:
    """Of bf16, where every SM has many blocks, a thread does the work of two (csrc/cuda/norm_concat.cu)."""
    T = 16 * torch.cuda.get_device_properties("cuda").multi_processor_count
    chunks, residuals, gain = make_call(T, torch.bfloat16, K=2, H=H)
    chunks, residuals = ([rows.cuda() for rows in source] for source in (chunks, residuals))
    norm_weight = gain.cuda() if norm == "chunk" else None
    all_rows = ek.norm_concat(chunks, norm=norm, norm_weight=norm_weight, residuals=residuals)
    for begin in (0, T - 100):
        some = [[rows[begin : begin + 100] for rows in source] for source in (chunks, residuals)]
        out = ek.norm_concat(some[0], norm=norm, norm_weight=norm_weight, residuals=some[1])
        assert same_bits(all_rows[begin : begin + 100], out), begin


def test_rows_beyond_2_to_the_31_elements() -> None:
    """A table of 2^31 + 2^20 values: 32-bit offsets would wrap."""
    H = 4096
    table = torch.zeros(2**19 + 2**8, H, dtype=torch.bfloat16, device="cuda")
    table[-1] = 3
    out = ek.norm_concat([table], norm="none", indices=torch.tensor([len(table) - 1, len(table)], device="cuda"))
    assert (out[0] == 3).all() and (out[1] == 0).all()
