"""The compiled primitives, called directly: what they refuse and what they take, and rows of zeros.

`tests/cuda_host/test_primitives.py` runs these tests on the CUDA primitives.
"""

import ctypes
import os
import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from backends import CPU_ISAS, environment_of, needs_compiled
from bad_calls import BAD_CALLS, GOOD, BadCall, D, H, K, T, rows
from csrc_checks import CSRC, checks, failure_of, unreached
from eagle_kernels import library, plan
from guards import same_bits
from primitives import run_primitive, tensors_of

pytestmark = needs_compiled

ON_CPU = [call for call in BAD_CALLS if "cpu" in call.backends]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16", "fp32"])


@pytest.fixture(params=CPU_ISAS or [None])
def ops(request: pytest.FixtureRequest) -> Iterator[object]:
    """The primitives, on every instruction set."""
    with environment_of(EAGLE_KERNELS_CPU_ISA=request.param):
        assert plan.cpu_isa() == request.param
        yield torch.ops.eagle_kernels_C


@pytest.mark.parametrize("call", ON_CPU, ids=lambda call: call.id)
def test_a_bad_call_is_refused_before_anything_is_written(call: BadCall) -> None:
    failure_of(torch.ops.eagle_kernels_C, call)


class Projections:
    """An op namespace whose `norm_concat_linear_out` is another primitive of `primitives` with its arguments."""

    norm_concat_linear_out = default = property(lambda self: self)

    def __init__(self, primitives: object, kind: str) -> None:
        self.primitive = getattr(primitives, f"norm_concat_linear_{kind}_out")

    def redispatch(self, keys: torch._C.DispatchKeySet, *arguments: object) -> None:
        self.primitive.default.redispatch(keys, *arguments)


class CudaKernels:
    """`primitives` with a `norm_concat_linear_out`: that of these CUDA kernels, under these switches."""

    norm_concat_linear_out = default = property(lambda self: self)

    def __init__(self, primitives: object, kernels: str, *switches: bool) -> None:
        self.primitives, self.switches = primitives, switches
        self.primitive = getattr(primitives, f"norm_concat_linear_{kernels}_out")

    def __getattr__(self, name: str) -> object:
        return getattr(self.primitives, name)

    def __call__(self, *arguments: object) -> None:
        *operands, out = arguments
        self.primitive(*operands, *self.switches, out)

    def redispatch(self, keys: torch._C.DispatchKeySet, *arguments: object) -> None:
        *operands, out = arguments
        self.primitive.default.redispatch(keys, *operands, *self.switches, out)


PROJECTIONS = [call for call in ON_CPU if call.op == "norm_concat_linear"]
# The CPU's two steps end in torch's product, so they refuse a bias and a post norm.
EPILOGUES = [BadCall("norm_concat_linear", name, lambda good: {}, {name: lambda: rows(D)})
             for name in ("bias", "post_norm_weight")]  # fmt: skip


@pytest.mark.parametrize("call", [*PROJECTIONS, *EPILOGUES], ids=lambda call: call.id)
def test_the_two_steps_refuse_what_the_fused_kernel_does(call: BadCall) -> None:
    failure_of(Projections(torch.ops.eagle_kernels_C, "two_step"), call)


@pytest.mark.parametrize("call", PROJECTIONS, ids=lambda call: call.id)
def test_the_kernel_for_few_rows_refuses_what_the_fused_kernel_does(call: BadCall) -> None:
    failure_of(Projections(torch.ops.eagle_kernels_C, "few_rows"), call)


class ChecksAlone:
    """An op namespace whose primitives are those that Triton's launchers call first."""

    def __getattr__(self, primitive: str) -> object:
        return getattr(torch.ops.eagle_kernels_C, f"{primitive.removesuffix('_out')}_checks_out")


@pytest.mark.parametrize("call", ON_CPU, ids=lambda call: call.id)
def test_the_checks_alone_refuse_what_the_kernels_do(call: BadCall) -> None:
    failure_of(ChecksAlone(), call)


@pytest.mark.parametrize("op", GOOD)
def test_the_checks_alone_write_nothing(op: str) -> None:
    arguments = BadCall(op, "good", lambda good: {}).arguments()
    before = [tensor.clone() for tensor in tensors_of(arguments)]
    run_primitive(ChecksAlone(), op, arguments)
    assert all(map(same_bits, tensors_of(arguments), before))


@EVERY_DTYPE
def test_the_two_steps_take_strides_and_no_rows(dtype: torch.dtype, ops: object) -> None:
    """Against the same product in float64; the memory around a strided `out` stays as it is."""
    for count, columns in ((T, D), (1, D), (T, 1), (0, D), (T, 0)):
        chunks = [torch.randn(count, H + 3).to(dtype)[:, :H] for _ in range(K)]
        weight = torch.randn(columns, K * H + 5).to(dtype)[:, : K * H]
        around = torch.full((count, columns + 4), 7.0).to(dtype)
        out = around[:, 2 : 2 + columns]
        arguments = {"chunks": chunks, "norm_weight": None, "weight": weight, "out": out}
        run(Projections(ops, "two_step"), "norm_concat_linear", **arguments)
        normed = torch.empty(count, K * H).to(dtype)
        run(ops, "norm_concat", chunks=chunks, norm_weight=None, out=normed)
        truth = normed.double() @ weight.double().T
        # fp32 accumulation, relative to the row's sum of absolute products, and one rounding.
        scale = normed.double().abs() @ weight.double().abs().T
        rounding = torch.finfo(dtype).eps / 2 * truth.abs()
        assert ((out.double() - truth).abs() <= rounding + K * H * 2**-24 * scale).all()
        assert (around[:, :2] == 7).all() and (around[:, 2 + columns :] == 7).all()


def test_every_check_has_a_call_that_it_refuses() -> None:
    ops = torch.ops.eagle_kernels_C
    messages = [failure_of(ops, call) for call in ON_CPU] + [
        failure_of(Projections(ops, "two_step"), call) for call in EPILOGUES
    ]
    assert unreached(messages, cuda=False) == []


def test_the_checks_are_found() -> None:
    """The test above proves something only if it knows the checks."""
    sources = [path.read_text() for path in CSRC.glob("*.cpp") if path.stem not in ("checks", "memory_bandwidth")]
    named = sum(len(re.findall(r"\bcheck\w*\(", text)) for text in sources)
    sites = {(check.file, check.first_line) for cuda in (False, True) for check in checks(cuda=cuda)}
    assert len(sites) == named > 80


def run(ops: object, op: str, **changes: object) -> dict:
    """The arguments of a good call with changes, after the call."""
    arguments = BadCall(op, "good", lambda good: changes).arguments()
    run_primitive(ops, op, arguments)
    return arguments


@pytest.mark.parametrize("op", GOOD)
def test_the_calls_that_the_bad_ones_change_work(op: str, ops: object) -> None:
    run(ops, op)


def test_slots_of_one_buffer_are_apart(ops: object) -> None:
    """Rows of one pitch beside each other: what the checks of overlap exist to allow."""
    buffer, statistics = rows(T, 3 * H), torch.zeros(T, K)
    slots = buffer.split(H, -1)
    run(ops, "capture_hidden", hidden=slots[0], residual=slots[1], out=slots[2], sum_squares=statistics[:, 1])
    assert same_bits(slots[2].contiguous(), slots[0] + slots[1])
    assert not statistics[:, [0, 2]].any() and statistics[:, 1].all()
    run(ops, "norm_concat", chunks=[slots[0]], norm_weight=None, out=slots[1])
    run(ops, "add_rms_norm", hidden=slots[0], residual=slots[0], out=slots[1], out_sum=slots[2])
    # One behind the other.
    halves = rows(2 * T, H)
    for first, second in (halves.split(T), reversed(halves.split(T))):
        run(ops, "capture_hidden", hidden=first, residual=None, out=second, sum_squares=None)
        assert same_bits(first, second)
        halves.normal_()
    # The row sums of squares in the same rows as the values, as long as no byte is shared.
    wide = rows(T, H + 4)
    run(ops, "capture_hidden", hidden=wide[:, :H], out=rows(T, H), sum_squares=wide.view(torch.float32)[:, H // 2])


def test_the_stride_of_one_row_is_not_used(ops: object) -> None:
    """A view of one row may have any row stride, 0 and that of another tensor among them."""
    row = rows(H)
    one = {"hidden": row.expand(1, H), "residual": torch.as_strided(row, (1, H), (3, 1)), "sum_squares": None}
    out = torch.as_strided(torch.empty(H).bfloat16(), (1, H), (0, 1))
    run(ops, "capture_hidden", **one, out=out)
    assert same_bits(out[0].clone(), row + row)
    # A row between the rows of another tensor, whatever its stride is.
    table = rows(T, 3 * H)
    gap = torch.as_strided(table, (1, H), (5, 1), H)
    run(ops, "capture_hidden", hidden=table[1:2, :H], residual=None, out=gap, sum_squares=None)
    assert same_bits(gap, table[1:2, :H])


def test_rows_of_no_columns_have_no_squares(ops: object) -> None:
    """Nothing to store, and still a statistic to write."""
    squares = torch.full((T,), float("nan"))
    run(ops, "capture_hidden", hidden=rows(T, 0), residual=None, out=rows(T, 0), sum_squares=squares)
    assert same_bits(squares, torch.zeros(T))


@pytest.mark.parametrize("norm", ["chunk", "concat"])
@EVERY_DTYPE
def test_a_row_of_zeros_without_eps_gives_zeros(dtype: torch.dtype, norm: str, ops: object) -> None:
    """rstd is 0 where mean square and eps are 0: rsqrt(0) would give 0 * inf = NaN."""
    chunks = [torch.randn(T, H).to(dtype) for _ in range(K)]
    for chunk in chunks:
        chunk[1] = 0
    gain = torch.rand(K, H) + 0.5
    sources = {"chunks": chunks, "norm": norm, "norm_weight": gain if norm == "chunk" else gain.flatten()}
    squares = torch.stack([chunk.float().square().sum(-1) for chunk in chunks], -1)
    for statistics in (None, squares):
        out = torch.full((T, K * H), float("nan")).to(dtype)
        run(ops, "norm_concat", **sources, eps=0.0, norm_offset=1.0, sum_squares=statistics, out=out)
        assert same_bits(out[1], torch.zeros_like(out[1]))
        assert out[[0, 2, 3]].isfinite().all() and out[[0, 2, 3]].any(1).all()


def test_a_zero_chunk_of_a_row_leaves_the_others(ops: object) -> None:
    chunks = [rows(T, H) for _ in range(K)]
    chunks[1][2] = 0
    out = run(ops, "norm_concat", chunks=chunks, eps=0.0)["out"]
    assert not out[2, H : 2 * H].any()  # zeros of either sign: gains are of both
    assert out.isfinite().all() and out[2, :H].any() and out[2, 2 * H :].any()


@EVERY_DTYPE
def test_the_sum_may_be_a_row_of_zeros(dtype: torch.dtype, ops: object) -> None:
    hidden = torch.randn(T, H).to(dtype)
    residual = hidden.flip(0)
    residual[1] = -hidden[1]
    out, out_sum = (torch.full((T, H), float("nan")).to(dtype) for _ in range(2))
    operands = {"hidden": hidden, "residual": residual, "weight": torch.rand(H), "out": out, "out_sum": out_sum}
    run(ops, "add_rms_norm", **operands, eps=0.0, norm_offset=1.0)
    assert not out[1].any() and not out_sum[1].any()
    assert out.isfinite().all() and out[[0, 2, 3]].any(1).all()


def check_zero_rows_of_a_projection(dtype: torch.dtype, ops: object, **projection: Tensor) -> None:
    chunks = [torch.randn(T, H).to(dtype) for _ in range(K)]
    for chunk in chunks:
        chunk[1] = 0
    weight = torch.randn(D, K * H).to(dtype)
    for norm, gain in (("chunk", torch.rand(K, H).to(dtype)), ("concat", torch.rand(K * H).to(dtype)), ("none", None)):
        out = torch.full((T, D), float("nan")).to(dtype)
        sources = {"chunks": chunks, "norm": norm, "norm_weight": gain, "eps": 0.0}
        run(ops, "norm_concat_linear", **sources, weight=weight, out=out, **projection)
        assert not out[1].any() and out.isfinite().all() and out[[0, 2, 3]].any(1).all(), norm


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=["bf16", "fp16"])
def test_a_projected_row_of_zeros_is_zero(dtype: torch.dtype, ops: object) -> None:
    check_zero_rows_of_a_projection(dtype, ops)


@EVERY_DTYPE
def test_the_post_norm_of_a_row_of_zeros_is_zero(dtype: torch.dtype, ops: object) -> None:
    check_zero_rows_of_a_projection(dtype, ops)
    check_zero_rows_of_a_projection(dtype, ops, post_norm_weight=torch.rand(D) + 1)


@pytest.mark.parametrize("norm", ["chunk", "concat"])
def test_a_row_out_of_range_is_zero_whatever_gain_and_eps_are(norm: str, ops: object) -> None:
    gain = torch.full((K, H), float("inf"))
    sources = {"norm": norm, "norm_weight": gain if norm == "chunk" else gain.flatten()}
    sources |= {"indices": torch.tensor([-1, 2**40, T, 1])}
    for eps in (0.0, 1e-6, 3e38):
        out = run(ops, "norm_concat", **sources, eps=eps)["out"]
        assert same_bits(out[:3], torch.zeros(3, K * H).bfloat16())


def test_the_limits_of_the_cuda_kernels_are_exported() -> None:
    compiled = ctypes.CDLL(os.fspath(library.COMPILED_LIBRARY))
    limits = [getattr(compiled, f"eagle_kernels_max_cuda_{name}") for name in ("chunks", "decode_rows")]
    for limit in limits:
        limit.restype = ctypes.c_int64
    assert [limit() for limit in limits] == [8, 16]


@pytest.mark.parametrize(("cap", "active"), [(-1, 0), (0, 0), (2**40, len(CPU_ISAS) - 1), (-(2**63), 0)])
def test_a_cap_of_the_instruction_set_is_in_range(cap: int, active: int) -> None:
    with environment_of():
        assert torch.ops.eagle_kernels_C.set_cpu_isa(cap) == active
