"""norm_concat_linear: float64 truth, what the bits of a row's result depend on, and what memory it touches."""

import contextlib
import functools
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import eagle_kernels as ek
from accuracy import eager_chain, expect
from backends import environment_of, fused_up_to, needs_compiled
from cases import CASES, FEATURES, Case, operands
from eagle_kernels.ops.projection import Projection, project_formula
from eagle_kernels.ops.sources import Sources, formula
from eagle_kernels.plan import DENSE_DOTS_ROWS, FUSED_ROWS, Kernel, Problem, cpu_isa, cpu_projection
from guards import GuardedRows, UnchangedTensors, between_forbidden_pages, same_bits

pytestmark = pytest.mark.usefixtures("poisoned_memory")

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_float64_truth(case: Case, projection: str) -> None:
    """The bound of docs/design.md, Exactness, for an `out` in guarded memory and for a tensor that the op allocates."""
    call = operands(case)
    _, expected = expect(call)
    one_row = case.layout == "row"
    guarded = GuardedRows(1 if one_row else call.N, case.D, case.dtype)
    view = guarded.view[0] if one_row else guarded.view
    with UnchangedTensors(call.tensors()):
        assert call.norm_concat_linear(out=view) is view
        own = call.norm_concat_linear()
    guarded.check_around()
    try:
        expected.check(guarded.view)
    except AssertionError:
        # VDPBF16PS flushes subnormal partial sums. oneDNN flushes too, but on AMD Zen 4 it sums along other lanes and
        # loses less of these products around 1e-37: its error is 2.52e-3, ours 2.74e-3. No model has such rows.
        if not projection.endswith("avx512_bf16") or case.data != "tiny":
            raise
        pytest.xfail("VDPBF16PS flushes subnormal partial sums, more of ours than of oneDNN's on this CPU")
    assert own.dim() == (1 if one_row else 2) and own.dtype == case.dtype and own.is_contiguous()
    assert same_bits(own, view.clone())


@pytest.mark.parametrize("case", [case for case in FEATURES if case.dtype_name == "fp32"], ids=lambda case: case.id)
def test_the_formula_is_the_engines_chain(case: Case) -> None:
    """The truth itself against torch's own norms, which share no line with it: an offset or an eps missing from the
    formula would show here. fp32 only, where the chain does not round between its steps."""
    call = operands(case)
    normed, projected = eager_chain(call)
    x = formula(Sources(*call.formula), torch.float64)
    torch.testing.assert_close(normed.double(), x, rtol=1e-5, atol=1e-6)
    weight, bias, post = (call.projection[name] for name in ("weight", "bias", "post_norm_weight"))
    y = project_formula(x, Projection(weight, bias, post, call.post_norm_eps), case.norm_offset)
    torch.testing.assert_close(projected.double(), y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm", ["chunk", "concat"])
def test_formula_is_torch_rms_norm_in_float64(norm: str) -> None:
    chunks = list(torch.randn(2, 5, 24).double())
    gains = list(torch.rand(2, 24).double())
    if norm == "chunk":
        normed = [F.rms_norm(chunks[k], (24,), gains[k] + 1, eps) for k, eps in enumerate((0.1, 0.2))]
        x = formula(Sources(chunks, 2, norm, gains, [0.1, 0.2], 1.0, [], [], None), torch.float64)
        torch.testing.assert_close(x, torch.cat(normed, -1))
    else:
        x = formula(Sources(chunks, 2, norm, [torch.cat(gains)], [0.1], 1.0, [], [], None), torch.float64)
        torch.testing.assert_close(x, F.rms_norm(torch.cat(chunks, -1), (48,), torch.cat(gains) + 1, 0.1))


def make_call(T: int, dtype: torch.dtype, K: int = 3, H: int = 101, D: int = 97) -> tuple:
    chunks = [torch.randn(T, H).to(dtype) for _ in range(K)]
    weight = (torch.randn(D, K * H) / (K * H) ** 0.5).to(dtype)
    return chunks, weight, torch.rand(K, H).to(dtype) + 0.5


@pytest.mark.parametrize("T", [1, 7, 33])
@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16", "fp32"])
def test_two_runs_give_the_same_bits(dtype: torch.dtype, T: int, projection: str) -> None:
    chunks, weight, gain = make_call(T, dtype)
    first = ek.norm_concat_linear(chunks, weight, norm_weight=gain)
    for _ in range(3):
        assert same_bits(first, ek.norm_concat_linear(chunks, weight, norm_weight=gain))


@pytest.mark.parametrize("norm", ["chunk", "concat", "none"])
@pytest.mark.parametrize("stale", [float("nan"), float("inf"), 3e4])
def test_a_bad_row_stays_in_its_row(stale: float, norm: str, projection: str) -> None:
    """Padded rows of a CUDA graph may contain anything; the other rows keep every bit."""
    chunks, weight, _ = make_call(9, torch.bfloat16)
    bias, post = torch.randn(97), torch.rand(97)
    clean = ek.norm_concat_linear(chunks, weight, norm=norm, bias=bias, post_norm_weight=post)
    chunks[1][4, 50] = stale
    chunks[0][7] = stale
    dirty = ek.norm_concat_linear(chunks, weight, norm=norm, bias=bias, post_norm_weight=post)
    kept = [0, 1, 2, 3, 5, 6, 8]
    assert same_bits(clean[kept], dirty[kept])
    assert dirty[[4, 7]].isnan().all() or stale == 3e4


@pytest.mark.parametrize("with_out", [True, False], ids=["out", "allocating"])
@pytest.mark.parametrize("bias", [None, torch.ones(64).bfloat16()], ids=["no-bias", "bias"])
@pytest.mark.parametrize("product", ["torch's", "in tiles"])
@pytest.mark.parametrize("projection", ["two-step", "reference"], indirect=True)
def test_a_nan_row_stays_in_its_row_at_every_width(
    product: str, bias: torch.Tensor | None, with_out: bool, projection: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K*H = 276 ends inside an AMX tile, which also reads the next row. "in tiles" stands in for a CPU with AMX."""
    chunks, weight, _ = make_call(600, torch.bfloat16, H=92, D=64)
    chunks[0][4] = float("nan")
    if product == "in tiles":
        monkeypatch.setattr(torch, "mm", lambda x, y, out: out.copy_(product_in_tiles(x, y.t(), None)))
        monkeypatch.setattr(F, "linear", product_in_tiles)
    out = torch.empty(600, 64).bfloat16() if with_out else None
    projected = ek.norm_concat_linear(chunks, weight, bias=bias, out=out)
    assert projected.isnan().any(1).nonzero().flatten().tolist() == [4]


def product_in_tiles(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ weight^T + bias as oneDNN computes it with AMX: 32 columns of a row at once, even past the row's end."""
    rows, width = x.shape
    whole = -(-width // 32) * 32
    memory = torch.cat([x.flatten(), x.new_zeros(whole)])
    product = memory.as_strided((rows, whole), (width, 1)).float() @ F.pad(weight, (0, whole - width)).float().t()
    return (product if bias is None else product + bias.float()).to(x.dtype)


def test_a_zero_row_hides_what_the_sources_hold(projection: str) -> None:
    """An index out of range gives zeros although row 0 and the last row, the likely clamps, are NaN."""
    chunks, weight, gain = make_call(6, torch.bfloat16)
    for chunk in chunks:
        chunk[[0, -1]] = float("nan")
    indices = torch.tensor([-1, 2, 6, 2**40, -(2**40)])
    out = ek.norm_concat_linear(chunks, weight, norm_weight=gain, indices=indices)
    assert same_bits(out[[0, 2, 3, 4]], torch.zeros(4, 97).bfloat16())
    assert out[1].isfinite().all() and out[1].any()


def check_infinite_gain_of_a_zero_row() -> None:
    """A chunk whose index is out of range adds nothing to its row, where 0 * inf would add NaN. Shared with the other
    backends' tests."""
    chunks, weight = [torch.randn(rows, 64).bfloat16() for rows in (6, 9)], torch.randn(40, 128).bfloat16()
    gain, infinite = torch.ones(2, 64).bfloat16(), torch.ones(2, 64).bfloat16()
    infinite[0, 5] = float("inf")
    out_of_range = torch.tensor([-1, 2, 6, 2**40, 3])
    for indices in (out_of_range, [out_of_range, torch.arange(5)]):
        for norm in ("chunk", "concat"):
            arguments = {"norm": norm, "indices": indices, "eps": 0.0, "bias": torch.randn(40).bfloat16()}
            gains = (gain, infinite) if norm == "chunk" else (gain.flatten(), infinite.flatten())
            expected, out = (ek.norm_concat_linear(chunks, weight, norm_weight=gain, **arguments) for gain in gains)
            assert same_bits(expected[[0, 2, 3]], out[[0, 2, 3]]), (norm, type(indices))
            assert expected.isfinite().all() and not out[[1, 4]].isfinite().any()


def check_zero_row_of_one_chunk() -> None:
    """An index out of range in one chunk keeps what the other chunks add. Shared with the other backends' tests."""
    chunks, weight = [torch.randn(rows, 64).bfloat16() for rows in (6, 9)], torch.randn(40, 128).bfloat16()
    zeros = [torch.cat([chunks[0], torch.zeros(1, 64).bfloat16()]), chunks[1]]
    for norm in ("chunk", "concat", "none"):
        out_of_range = [torch.tensor([-1, 2, 7, 2**40, 3]), torch.arange(5)]
        given = [torch.tensor([6, 2, 6, 6, 3]), torch.arange(5)]
        expected = ek.norm_concat_linear(zeros, weight, norm=norm, indices=given)
        assert same_bits(ek.norm_concat_linear(chunks, weight, norm=norm, indices=out_of_range), expected), norm
        assert expected.any(1).all()


def test_a_zero_row_is_zero_whatever_the_gain(projection: str) -> None:
    check_infinite_gain_of_a_zero_row()
    check_zero_row_of_one_chunk()


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16", "fp32"])
def test_bits_do_not_depend_on_T_or_threads(dtype: torch.dtype, projection: str) -> None:
    """Of the fused kernels, at every T up to 200; EAGLE_KERNELS_BATCH_INVARIANT=1 takes one of them for all."""
    if projection.partition("-")[0] not in ("fused", "dots"):
        pytest.skip("the library's product depends on T")
    chunks, weight, gain = make_call(200, dtype, H=33, D=45)
    every_row = ek.norm_concat_linear(chunks, weight, norm_weight=gain)
    for T in range(1, 201):
        rows = [chunk[200 - T :] for chunk in chunks]
        assert same_bits(every_row[200 - T :], ek.norm_concat_linear(rows, weight, norm_weight=gain)), T
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            assert same_bits(every_row, ek.norm_concat_linear(chunks, weight, norm_weight=gain)), threads
    finally:
        torch.set_num_threads(before)


# Contexts in which one kernel takes every T: on CPUs with two for bf16 the one of few rows, and the other.
ONE_PLAN = {
    "batch invariant": lambda: environment_of(EAGLE_KERNELS_BATCH_INVARIANT="1"),
    "any rows": lambda: fused_up_to(1 << 40),
}


@needs_compiled
@pytest.mark.parametrize("one_plan", ONE_PLAN)
@pytest.mark.parametrize("norm", ["chunk", "concat", "none"])
@pytest.mark.parametrize("format", ["", "fp8_row", "mxfp4"])
@pytest.mark.parametrize("T", [16, 37])
def test_threads_may_share_a_group_of_rows(T: int, format: str, norm: str, one_plan: str) -> None:
    """On the tile unit 16 rows are packed together, 512 columns a part; chunks end within parts."""
    chunks, weight, gain = make_call(T, torch.bfloat16, H=2880, D=65)
    operand = ek.quantize(weight, format) if format else weight
    norm_weight = {"chunk": gain, "concat": gain.flatten(), "none": None}[norm]
    arguments = {"norm": norm, "norm_weight": norm_weight, "indices": [torch.arange(T).roll(1) - 1] * 3}
    results, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            with ONE_PLAN[one_plan]():
                results.append(ek.norm_concat_linear(chunks, operand, **arguments))
    finally:
        torch.set_num_threads(before)
    assert all(same_bits(result, results[0]) for result in results)


@needs_compiled
@pytest.mark.parametrize("format", ["", "fp8_row", "int8_row", "mxfp4"])
def test_rows_of_several_passes_over_the_weight(format: str) -> None:
    """csrc/cpu/project_lanes.h, kPassGroups: a pass has 256 rows at most. A row has the bits that it has among few
    others, and its place in the result. Up to 12 rows by codes are multiplied in strips."""
    chunks, weight, gain = make_call(555, torch.bfloat16, H=2816, D=33)
    operand = ek.quantize(weight, format) if format else weight
    arguments = {"norm_weight": gain, "bias": torch.randn(33), "post_norm_weight": torch.rand(33).bfloat16() + 0.5}
    with fused_up_to(1 << 40):
        whole = ek.norm_concat_linear(chunks, operand, **arguments)
        with environment_of(EAGLE_KERNELS_BATCH_INVARIANT="1" if format else "0"):
            for begin, end in ((0, 12), (0, 40), (250, 310), (543, 555)):
                rows = [chunk[begin:end] for chunk in chunks]
                assert same_bits(whole[begin:end], ek.norm_concat_linear(rows, operand, **arguments))


@needs_compiled
def test_few_rows_are_multiplied_by_a_kernel_of_their_own() -> None:
    """The sums are zero but for their roundings, whose order is each kernel's own."""
    if cpu_isa() not in DENSE_DOTS_ROWS[torch.bfloat16]:
        pytest.skip("this processor has one kernel for all rows")
    chunk, half = torch.randn(8, 1500).bfloat16(), torch.randn(77, 1500).bfloat16()
    chunks, weight = [chunk, chunk], torch.cat([half, -half], 1)
    few = ek.norm_concat_linear(chunks, weight)
    with fused_up_to(1 << 40):
        many = ek.norm_concat_linear(chunks, weight)
    assert few.abs().max() < 1e-3 and many.abs().max() < 1e-3 and not same_bits(few, many)


@needs_compiled
@pytest.mark.parametrize("one_plan", ONE_PLAN)
@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16", "fp32"])
def test_bits_do_not_depend_on_T_over_many_blocks(dtype: torch.dtype, one_plan: str) -> None:
    """K*H beyond one block of the sum (4096 at most), more than 512 rows and more than 512 columns."""
    with ONE_PLAN[one_plan]():
        chunks, weight, gain = make_call(555, dtype, H=1500, D=577)
        every_row = ek.norm_concat_linear(chunks, weight, norm_weight=gain)
        for begin, end in ((0, 1), (511, 513), (520, 555), (100, 117)):
            rows = [chunk[begin:end] for chunk in chunks]
            assert same_bits(every_row[begin:end], ek.norm_concat_linear(rows, weight, norm_weight=gain))


# Not strict: which T differ is a matter of oneDNN's and MKL's kernels for this processor.
torchs_product_depends_on_T = pytest.mark.xfail(reason="oneDNN and MKL choose the order of their sums by T")


def check_zero_rows(**projection: torch.Tensor | None) -> None:
    """Shared with the other backends' tests."""
    chunks = [torch.randn(4, 64).bfloat16() for _ in range(2)]
    for chunk in chunks:
        chunk[1] = 0
    chunks[0][2] = 0
    weight, gain = torch.randn(40, 128).bfloat16(), torch.rand(2, 64).bfloat16() + 0.5
    for norm, norm_weight in (("chunk", gain), ("concat", gain.flatten()), ("none", None)):
        arguments = {"norm": norm, "norm_weight": norm_weight, "eps": 0.0, **projection}
        out = ek.norm_concat_linear(chunks, weight, **arguments)
        assert not out[1].any() and out.isfinite().all() and out[[0, 2, 3]].any(1).all(), norm


def test_a_row_of_zeros_stays_zero_without_eps(projection: str) -> None:
    check_zero_rows()
    check_zero_rows(post_norm_weight=torch.rand(40) + 0.5)


@needs_compiled
@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.bfloat16, marks=torchs_product_depends_on_T, id="bf16"),
        pytest.param(torch.float16, id="fp16"),
        pytest.param(torch.float32, marks=torchs_product_depends_on_T, id="fp32"),
    ],
)
def test_bits_do_not_depend_on_T_within_each_default_plan(dtype: torch.dtype) -> None:
    """docs/design.md, Exactness, without EAGLE_KERNELS_BATCH_INVARIANT: true of fused plans, not of two steps."""
    chunks, weight, gain = make_call(800, dtype, H=1536, D=1024)
    by_kernel: dict[Kernel, list[torch.Tensor]] = {}
    for T in (1, 2, 8, 17, 24, 130, 200, 300, 800):
        rows = [chunk[:T] for chunk in chunks]
        kernel = ek.explain("norm_concat_linear", rows, weight).kernel
        by_kernel.setdefault(kernel, []).append(ek.norm_concat_linear(rows, weight, norm_weight=gain))
    few, limit = DENSE_DOTS_ROWS[dtype].get(cpu_isa(), 0), FUSED_ROWS[dtype][cpu_isa()]
    assert len(by_kernel) == (few > 0) + (limit is None or limit > few) + (limit is not None)
    for kernel, results in by_kernel.items():
        for result in results:
            assert same_bits(result, results[-1][: len(result)]), (kernel, len(result))


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("norm", ["chunk", "concat", "none"])
def test_the_normed_input_is_norm_concat(norm: str, dtype: torch.dtype, projection: str) -> None:
    """A product with the identity shows the operand: the values norm_concat writes, bit for bit."""
    chunks, _, gain = make_call(19, dtype)
    gain = None if norm == "none" else gain.reshape(-1) if norm == "concat" else gain
    arguments = {"norm": norm, "norm_weight": gain, "norm_offset": 1.0, "residuals": [c.flip(0) for c in chunks]}
    seen = ek.norm_concat_linear(chunks, torch.eye(303).to(dtype), **arguments)
    normed = ek.norm_concat(chunks, **arguments)
    assert torch.equal(seen, normed)


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16", "fp32"])
def test_what_is_multiplied_is_rounded_once(dtype: torch.dtype, projection: str) -> None:
    """The same product of norm_concat's output has the same bits: an operand left in fp32 would give others."""
    chunks, weight, gain = make_call(19, dtype)
    normed = ek.norm_concat(chunks, norm_weight=gain)
    assert same_bits(
        ek.norm_concat_linear(chunks, weight, norm_weight=gain), ek.norm_concat_linear([normed], weight, norm="none")
    )


def test_post_norm_sees_the_unrounded_projection(projection: str) -> None:
    check_post_norm(33)


def check_post_norm(rows: int, H: int = 101) -> None:
    """Rounding to bf16 before the post norm changes over 5 % of the values, an unrounded product under 1 %."""
    chunks, weight, _ = make_call(rows, torch.bfloat16, H=H)
    x = ek.norm_concat(chunks).double()
    projected = x @ weight.double().t()
    truth = F.rms_norm(projected, (97,), eps=1e-6)
    rounded_first = F.rms_norm(projected.bfloat16().double(), (97,), eps=1e-6)
    out = ek.norm_concat_linear(chunks, weight, post_norm_weight=torch.ones(97))
    differ = rounded_first.bfloat16() != truth.bfloat16()
    assert differ.float().mean() > 0.05
    assert (out != truth.bfloat16()).float().mean() < 0.01


@pytest.mark.parametrize("at", ["begin", "end"])
@pytest.mark.parametrize("H", [1, 33, 101, 512])
@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("N", [5, 10])
def test_no_operand_is_read_beyond_its_end(N: int, dtype: torch.dtype, H: int, at: str, projection: str) -> None:
    """Every operand lies between pages that trap; indices point past both ends. A failure is a segmentation fault."""
    D = 35
    indices = torch.tensor([0, -1, 6, 3, 2**40]).repeat(N // 5)

    def guarded(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return between_forbidden_pages(torch.randn(shape).to(dtype), at)

    out = guarded(N, D)
    arguments = {
        "norm_weight": [guarded(H), guarded(H)],
        "residuals": [guarded(4, H), guarded(4, H)],
        "indices": [between_forbidden_pages(indices, at), between_forbidden_pages(indices.int(), at)],
        "sum_squares": guarded(4, 2, dtype=torch.float32),
        "bias": guarded(D, dtype=torch.float32),
        "post_norm_weight": guarded(D),
    }
    ek.norm_concat_linear([guarded(4, H), guarded(4, H)], guarded(D, 2 * H), **arguments, out=out)
    del arguments["sum_squares"]
    ek.norm_concat_linear([guarded(4, H), guarded(4, H)], guarded(D, 2 * H), **arguments, norm="chunk", out=out)
    packed = guarded(4, 2 * H)
    ek.norm_concat_linear(packed, guarded(D, 2 * H), norm="concat", norm_weight=guarded(2 * H), num_chunks=2)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_indices(data: st.DataObject, projection: str) -> None:
    rows = data.draw(st.integers(0, 5), label="rows")
    dtype = data.draw(st.sampled_from([torch.int32, torch.int64]), label="dtype")
    limits = torch.iinfo(dtype)
    entry = st.one_of(st.integers(-2, rows + 1), st.integers(limits.min, limits.max))
    drawn = [data.draw(st.lists(entry, min_size=4, max_size=4), label="indices") for _ in range(2)]
    indices = [torch.tensor(each, dtype=dtype) for each in drawn]
    chunks = [torch.randn(rows, 24), torch.randn(rows + 1, 24)]
    weight = torch.randn(7, 48)
    out = ek.norm_concat_linear(chunks, weight, indices=indices)
    x = formula(Sources(chunks, 2, "chunk", [], [1e-6], 0.0, [], indices, None), torch.float64)
    torch.testing.assert_close(out.double(), x @ weight.double().t(), rtol=1e-5, atol=1e-5)


def test_the_mtp_stage_is_one_call(projection: str) -> None:
    """Token ids into the table, position 0 masked by -1, beside the target's hidden states (DeepSeek's MTP)."""
    table, hidden = torch.randn(50, 64).bfloat16(), torch.randn(4, 64).bfloat16()
    enorm, hnorm = torch.rand(2, 64).bfloat16()
    ids, positions = torch.tensor([7, 49, 0, 7]), torch.tensor([0, 1, 2, 3])
    weight = torch.randn(64, 128).bfloat16() / 11
    masked = torch.where(positions == 0, -1, ids)
    out = ek.norm_concat_linear([table, hidden], weight, norm_weight=[enorm, hnorm], indices=[masked, None])
    embeds = torch.where((positions == 0).unsqueeze(1), 0, table[ids])
    parts = [F.rms_norm(embeds.double(), (64,), enorm.double(), 1e-6)]
    parts += [F.rms_norm(hidden.double(), (64,), hnorm.double(), 1e-6)]
    truth = torch.cat(parts, -1) @ weight.double().t()
    assert (out.double() - truth).norm() / truth.norm() < 4e-3


def test_explain_names_the_kernel_that_runs(projection: str) -> None:
    chunks, weight, _ = make_call(3, torch.bfloat16)
    fused = f"cpu/{projection.replace('-', ' ')}"
    in_dots = cpu_isa() in DENSE_DOTS_ROWS[torch.bfloat16]  # of bf16 with tiles there are none
    dots = fused.replace("dots", "fused dots" if in_dots else "fused")
    expected = {"fused": fused, "dots": dots, "two": "cpu/norm_concat + linear"}
    plan = ek.explain("norm_concat_linear", chunks, weight)
    name = expected.get(projection.partition("-")[0], "reference/plain torch")
    assert str(plan).startswith(f"norm_concat_linear: {name}, because ")


@pytest.mark.parametrize("dtype", FUSED_ROWS, ids=str)
def test_the_fused_kernel_takes_as_many_rows_as_the_table_says(dtype: torch.dtype) -> None:
    for isa, limit in FUSED_ROWS[dtype].items():
        for T in (1, 2, 8, 9, 24, 25, 64, 65, 128, 129, 192, 193, 768, 769, 5000):
            fused = limit is None or limit >= T
            problem = Problem("norm_concat_linear", torch.device("cpu"), 3, T, dtype, 4096, (4096,))
            has_dots = DENSE_DOTS_ROWS[dtype].get(isa, 0) >= T
            one_pass = Kernel.DOTS if has_dots else Kernel.FUSED
            assert cpu_projection(problem, isa).kernel is (one_pass if fused else Kernel.TWO_STEP), (isa, T)
            # A post norm reads unrounded sums, which torch computes only from fp32 operands: slower than FUSED.
            fused |= dtype.itemsize == 2 and isa != "scalar"
            before_a_norm = cpu_projection(problem._replace(has_post_norm=True), isa)
            assert before_a_norm.kernel is (one_pass if fused else Kernel.TWO_STEP), (isa, T)


@needs_compiled
def test_out_allocates_nothing_that_outlives_the_call() -> None:
    """docs/design.md, Arguments: with `out` the call leaves none of torch's memory behind."""
    chunks, weight, gain = make_call(16, torch.bfloat16)
    out = torch.empty(16, 97).bfloat16()
    for _ in range(3):
        ek.norm_concat_linear(chunks, weight, norm_weight=gain, out=out)
    with torch.profiler.profile(profile_memory=True) as profile:
        ek.norm_concat_linear(chunks, weight, norm_weight=gain, out=out)
    kept = sum(event.self_cpu_memory_usage for event in profile.key_averages())
    assert kept <= 0, os.linesep.join(map(str, profile.key_averages()))


@needs_compiled
def test_a_workspace_larger_than_memory_is_named() -> None:
    """It was `std::bad_alloc`: a RuntimeError, or under a profiler a MemoryError. 2^49 bytes are more than there are
    addresses."""
    row = torch.ones(1, 2**24).bfloat16()
    out = torch.empty(2**24, 1).bfloat16()
    message = r"norm_concat_linear: the system gave no workspace of \d{15,16} bytes"
    call = functools.partial(ek.norm_concat_linear, [row.expand(2**24, -1)], row, norm="none", out=out)
    with environment_of(EAGLE_KERNELS_BACKEND="cpu"):
        for context in (contextlib.nullcontext(), torch.profiler.profile()):
            with context, pytest.raises(RuntimeError, match=message):
                call()
        call = functools.partial(call.func, call.args[0], ek.quantize(row, "int8_row"), **call.keywords)
        with pytest.raises(RuntimeError, match=message):
            call()


FAULTS = """
import resource, torch, eagle_kernels as ek

chunks = [torch.randn(64, 2048, dtype=torch.bfloat16) for _ in range(3)]
weight, gain = torch.randn(512, 3 * 2048, dtype=torch.bfloat16), torch.ones(3, 2048, dtype=torch.bfloat16)
out = torch.empty(64, 512, dtype=torch.bfloat16)

def faults_of(calls):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(calls):
        ek.norm_concat_linear(chunks, weight, norm_weight=gain, out=out)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults_of(3)
print(faults_of(20))
"""


@needs_compiled
def test_a_call_faults_no_pages_in() -> None:
    """The workspace is kept for the next call. Each call faulted all its pages in, some 200 here, where malloc returns
    blocks of this size to the system: always with a fixed threshold, else it depends on what was freed before."""
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(128 << 10), "EAGLE_KERNELS_BATCH_INVARIANT": "1"}
    run = subprocess.run([sys.executable, "-c", FAULTS], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 20 * 10
