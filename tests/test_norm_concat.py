"""norm_concat: float64 truth, rows that do not depend on other rows, and what memory it touches."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import eagle_kernels as ek
from accuracy import expect
from cases import NORM_CONCAT_CASES, Case, operands
from eagle_kernels.ops.sources import Sources, formula
from guards import GuardedRows, UnchangedTensors, between_forbidden_pages, same_bits

pytestmark = pytest.mark.usefixtures("poisoned_memory")

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("case", NORM_CONCAT_CASES, ids=lambda case: case.id)
def test_float64_truth(case: Case, cpu_isa: str) -> None:
    call = operands(case)
    expected, _ = expect(call)
    one_row = case.layout == "row"
    guarded = GuardedRows(1 if one_row else call.N, sum(case.widths), case.dtype)
    view = guarded.view[0] if one_row else guarded.view
    with UnchangedTensors(call.tensors()):
        assert call.norm_concat(out=view) is view
        own = call.norm_concat()
    guarded.check_around()
    expected.check(guarded.view)
    assert own.dim() == (1 if one_row else 2) and own.dtype == case.dtype and own.is_contiguous()
    assert same_bits(own, view.clone())


def make_call(T: int, dtype: torch.dtype, K: int = 3, H: int = 101) -> tuple:
    chunks = [torch.randn(T, H).to(dtype) for _ in range(K)]
    return chunks, [chunk.flip(0) for chunk in chunks], torch.rand(K, H).to(dtype) + 0.5


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16", "fp32"])
def test_bits_do_not_depend_on_T_threads_or_the_run(dtype: torch.dtype, cpu_isa: str) -> None:
    chunks, residuals, gain = make_call(200, dtype, H=333)
    every_row = ek.norm_concat(chunks, norm_weight=gain, residuals=residuals)
    for T in (*range(1, 20), 33, 128, 199):
        rows = [[rows[200 - T :] for rows in source] for source in (chunks, residuals)]
        out = ek.norm_concat(rows[0], norm_weight=gain, residuals=rows[1])
        assert same_bits(every_row[200 - T :], out), T
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            assert same_bits(every_row, ek.norm_concat(chunks, norm_weight=gain, residuals=residuals)), threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("norm", ["chunk", "concat", "none"])
@pytest.mark.parametrize("stale", [float("nan"), float("inf"), 3e4])
def test_a_bad_row_stays_in_its_row(stale: float, norm: str, cpu_isa: str) -> None:
    chunks, residuals, _ = make_call(9, torch.bfloat16)
    clean = ek.norm_concat(chunks, norm=norm, residuals=residuals)
    chunks[1][4, 50] = stale
    residuals[0][7] = stale
    dirty = ek.norm_concat(chunks, norm=norm, residuals=residuals)
    kept = [0, 1, 2, 3, 5, 6, 8]
    assert same_bits(clean[kept], dirty[kept])
    assert not same_bits(clean, dirty)


def test_a_bad_chunk_leaves_the_other_chunks_of_its_row_alone(cpu_isa: str) -> None:
    """With one norm per chunk, as in the engines, a NaN in chunk 1 is in no column of chunks 0 and 2."""
    chunks, _, gain = make_call(3, torch.bfloat16)
    clean = ek.norm_concat(chunks, norm_weight=gain)
    chunks[1][:, 7] = float("nan")
    dirty = ek.norm_concat(chunks, norm_weight=gain)
    assert same_bits(clean[:, :101], dirty[:, :101]) and same_bits(clean[:, 202:], dirty[:, 202:])
    assert dirty[:, 101:202].isnan().all()


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FFFFFFF, -1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gains_nan_of_any_payload_stays_one(dtype: torch.dtype, bits: int, cpu_isa: str) -> None:
    """Rounding a NaN's bits as a number's would turn a payload of all ones into a number."""
    gain = torch.full((1, 101), bits, dtype=torch.int32).view(torch.float32)
    assert ek.norm_concat([torch.randn(3, 101).to(dtype)], norm_weight=gain).isnan().all()


def test_the_defaults_are_the_documented_ones() -> None:
    """Rows so small that eps decides."""
    chunks, _, gain = make_call(3, torch.float32)
    chunks, weight = [chunk * 1e-3 for chunk in chunks], torch.randn(7, 303)
    given = {"norm": "chunk", "eps": 1e-6, "norm_offset": 0.0}
    for call in (ek.norm_concat, lambda *args, **options: ek.norm_concat_linear(*args, weight, **options)):
        assert same_bits(call(chunks, norm_weight=gain), call(chunks, norm_weight=gain, **given))


def test_without_norm_it_is_the_engines_cat_bit_for_bit(cpu_isa: str) -> None:
    chunks, residuals, _ = make_call(40, torch.bfloat16)
    out = ek.norm_concat(chunks, norm="none", residuals=[residuals[0], None, residuals[2]])
    assert same_bits(out, torch.cat([chunks[0] + residuals[0], chunks[1], chunks[2] + residuals[2]], -1))


def test_a_zero_row_hides_what_the_sources_hold(cpu_isa: str) -> None:
    chunks, _, gain = make_call(6, torch.bfloat16)
    for chunk in chunks:
        chunk[[0, -1]] = float("nan")
    indices = torch.tensor([-1, 2, 6, 2**40, -(2**40)])
    out = ek.norm_concat(chunks, norm_weight=gain, indices=indices)
    assert same_bits(out[[0, 2, 3, 4]], torch.zeros(4, 303).bfloat16())
    assert out[1].isfinite().all() and out[1].any()


@pytest.mark.parametrize("eps", [0.0, 1e-6])
@pytest.mark.parametrize("norm", ["chunk", "concat", "none"])
def test_a_zero_row_is_zero_whatever_the_gain_and_eps(norm: str, eps: float, cpu_isa: str) -> None:
    """rsqrt(0) is infinite at eps = 0, and a gain may be infinite: 0 * inf would be NaN."""
    chunks = [torch.randn(3, 33).bfloat16() for _ in range(2)]
    gain = None if norm == "none" else torch.full((2, 33) if norm == "chunk" else (66,), float("inf"))
    out = ek.norm_concat(chunks, norm=norm, norm_weight=gain, eps=eps, indices=torch.tensor([-1, 3]))
    assert same_bits(out, torch.zeros(2, 66).bfloat16())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", ["chunk", "concat"])
def test_a_row_of_zeros_stays_zero_without_eps(norm: str, dtype: torch.dtype, cpu_isa: str) -> None:
    """0 * rsqrt(0) would be NaN; the rows beside it are normed."""
    chunks = [torch.randn(4, 33).to(dtype) for _ in range(2)]
    for chunk in chunks:
        chunk[1] = 0
    chunks[0][2] = 0
    gain = torch.rand(2, 33) + 0.5
    squares = torch.stack([chunk.float().square().sum(-1) for chunk in chunks], -1)
    arguments = {"norm": norm, "norm_weight": gain if norm == "chunk" else gain.flatten(), "eps": 0.0}
    for statistics in (None, squares):
        out = ek.norm_concat(chunks, sum_squares=statistics, **arguments)
        assert same_bits(out[1], torch.zeros(66, dtype=dtype)) and same_bits(out[2, :33], out[1, :33])
        assert out.isfinite().all() and out[[0, 3]].all() and out[2, 33:].all()


def test_sources_without_rows_give_zero_rows(cpu_isa: str) -> None:
    chunks = [torch.empty(0, 33).bfloat16(), torch.empty(0, 33).bfloat16()]
    out = ek.norm_concat(chunks, indices=torch.tensor([0, -1, 5]))
    assert same_bits(out, torch.zeros(3, 66).bfloat16())


def test_int32_and_int64_indices_agree(cpu_isa: str) -> None:
    chunks, _, gain = make_call(6, torch.float16)
    indices = torch.tensor([5, -1, 6, 0, -(2**31), 2**31 - 1])
    by_long = ek.norm_concat(chunks, norm_weight=gain, indices=indices)
    assert same_bits(by_long, ek.norm_concat(chunks, norm_weight=gain, indices=indices.int()))


def test_one_index_tensor_equals_a_list_of_it(cpu_isa: str) -> None:
    chunks, residuals, _ = make_call(6, torch.float16)
    index = torch.tensor([5, -1, 6, 0])
    single = ek.norm_concat(chunks, residuals=residuals, indices=index)
    assert same_bits(single, ek.norm_concat(chunks, residuals=residuals, indices=[index] * 3))
    assert same_bits(single, ek.norm_concat(torch.cat(chunks, -1), residuals=torch.cat(residuals, -1), indices=index,
                                            num_chunks=3))  # fmt: skip


@pytest.mark.parametrize("at", ["begin", "end"])
@pytest.mark.parametrize("H", [1, 33, 101, 512])
@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16", "fp32"])
def test_no_operand_is_read_or_written_beyond_its_end(dtype: torch.dtype, H: int, at: str, cpu_isa: str) -> None:
    """A failure is a segmentation fault."""

    def guarded(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return between_forbidden_pages(torch.randn(shape).to(dtype), at)

    indices = torch.tensor([0, -1, 6, 3, 2**40])
    arguments = {
        "norm_weight": [guarded(H), guarded(H)],
        "residuals": [guarded(4, H), guarded(4, H)],
        "indices": [between_forbidden_pages(indices, at), between_forbidden_pages(indices.int(), at)],
    }
    out = guarded(5, 2 * H)
    ek.norm_concat([guarded(4, H), guarded(4, H)], **arguments, out=out)
    ek.norm_concat([guarded(4, H), guarded(4, H)], **arguments, sum_squares=guarded(4, 2, dtype=torch.float32), out=out)
    gain = guarded(2 * H, dtype=torch.float32)
    ek.norm_concat(guarded(5, 2 * H), norm="concat", norm_weight=gain, num_chunks=2, out=out)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_indices(data: st.DataObject, cpu_isa: str) -> None:
    rows = data.draw(st.integers(0, 5), label="rows")
    dtype = data.draw(st.sampled_from([torch.int32, torch.int64]), label="dtype")
    limits = torch.iinfo(dtype)
    entry = st.one_of(st.integers(-2, rows + 1), st.integers(limits.min, limits.max))
    drawn = data.draw(st.lists(entry, max_size=6), label="indices")
    index = torch.tensor(drawn, dtype=dtype)
    chunk = torch.randn(rows, 24)
    out = ek.norm_concat([chunk], norm="none", indices=index)
    assert same_bits(out, formula(Sources([chunk], 1, "none", [], [0.0], 0.0, [], [index], None)))
    for i, row in enumerate(drawn):
        assert torch.equal(out[i], chunk[row] if 0 <= row < rows else torch.zeros(24))
