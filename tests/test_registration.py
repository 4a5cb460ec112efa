"""The registered ops as torch sees them: schemas, fake kernels, aliasing, torch.compile, torch.export, autograd."""

import contextlib
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import eagle_kernels as ek
from backends import environment_of, fused_up_to
from guards import same_bits

T, K, H, D, V = 5, 3, 24, 17, 40

_SOURCES = (
    "Tensor[] chunks, int num_chunks, str norm, Tensor[] gains, float[] eps, float norm_offset, "
    "Tensor?[] residuals, Tensor?[] indices, Tensor? sum_squares"
)
_PROJECTION = "Tensor weight, Tensor? bias, Tensor? post_norm_weight, float post_norm_eps"
_QUANTIZED = (
    "Tensor codes, Tensor scales, Tensor? global_scale, str format, int block_rows, int block_columns, "
    "Tensor? bias, Tensor? post_norm_weight, float post_norm_eps"
)
_SHARD = (
    "Tensor ids, Tensor weight, SymInt org_begin, SymInt org_end, SymInt added_begin, SymInt added_end, "
    "SymInt added_row, float? scale, Tensor? scale_tensor"
)
_CONTEXT_KV = (
    "Tensor kv, Tensor? k_norm_weight, float eps, float norm_offset, int norm_width, Tensor cos_sin, int rotary_begin, "
    "bool interleaved, Tensor positions, Tensor slots, Tensor(a!) k_cache, Tensor(b!)? v_cache"
)
_ADD = "Tensor hidden, Tensor residual, Tensor weight, float eps, float norm_offset"

# Callers of torch.ops, such as engines' fusion passes, rely on these.
SCHEMAS = {
    "norm_concat": f"({_SOURCES}) -> Tensor",
    "norm_concat_out": f"({_SOURCES}, Tensor(a!) out) -> ()",
    "norm_concat_linear": f"({_SOURCES}, {_PROJECTION}) -> Tensor",
    "norm_concat_linear_out": f"({_SOURCES}, {_PROJECTION}, Tensor(a!) out) -> ()",
    "norm_concat_linear_quantized": f"({_SOURCES}, {_QUANTIZED}) -> Tensor",
    "norm_concat_linear_quantized_out": f"({_SOURCES}, {_QUANTIZED}, Tensor(a!) out) -> ()",
    "capture_hidden": "(Tensor hidden, Tensor? residual) -> (Tensor, Tensor)",
    "capture_hidden_out": "(Tensor hidden, Tensor? residual, Tensor(a!) out, Tensor(b!)? sum_squares) -> ()",
    "vocab_parallel_embedding": f"({_SHARD}) -> Tensor",
    "vocab_parallel_embedding_out": f"({_SHARD}, Tensor(a!) out) -> ()",
    "add_rms_norm": f"({_ADD}) -> (Tensor, Tensor)",
    "store_context_kv": f"({_CONTEXT_KV}) -> ()",
    "packed_linear": "(Tensor x, Tensor packed, Tensor? bias, int out_features) -> Tensor",
    "add_rms_norm_out": f"({_ADD}, Tensor(a!) out, Tensor(b!) out_sum) -> ()",
}


def packet(name: str) -> torch._ops.OpOverloadPacket:
    return getattr(torch.ops.eagle_kernels, name)


def rows(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def chunk_arguments() -> tuple:
    chunks = [rows(T, H + 2)[:, 1:-1] for _ in range(K)]
    index = torch.tensor([0, 4, -1, 2])
    residuals = [None, rows(T, H), None]
    return chunks, K, "chunk", [rows(K, H)], [1e-6] * K, 1.0, residuals, [index, index.int(), index], None


def packed_arguments() -> tuple:
    return [rows(T, K * H)], K, "concat", [torch.rand(K * H)], [1e-6], 0.0, [], [], torch.rand(T, K)


def projection_arguments() -> tuple:
    return rows(D, K * H), torch.rand(D), rows(D), 1e-6


def quantized_arguments() -> tuple:
    codes = torch.randint(-128, 128, (D, K * H), dtype=torch.int8)  # opcheck adds to its arguments, which fp8 lacks
    return codes, torch.rand(D, 1), torch.rand(1), "int8_row", 1, K * H, torch.rand(D), None, 1e-6


def context_kv_arguments(*, latent: bool = False) -> tuple:
    kv = (rows(T, H) if latent else rows(T, 2 * 2 * H), rows(H), 1e-6, 1.0, H, torch.rand(9, 6), 2, latent)
    caches = (rows(6, 1, H), None) if latent else (rows(6, 2, H), rows(6, 2, H))
    return *kv, torch.arange(T), torch.tensor([4, 0, -1, 2, 5]), *caches


def shard_arguments() -> tuple:
    return torch.tensor([3, -1, 25, 39, 2**40]), rows(30, H), 0, 20, 30, 40, 20


# (op, arguments, how many of the last ones are written).
SAMPLES = {
    "norm_concat": lambda: (chunk_arguments(), 0),
    "norm_concat-packed": lambda: (packed_arguments(), 0),
    "norm_concat_out": lambda: ((*chunk_arguments(), rows(4, K * H)), 1),
    "norm_concat_out-view": lambda: ((*packed_arguments(), rows(T, K * H + 9)[:, 3:-6]), 1),
    "norm_concat_linear": lambda: ((*chunk_arguments(), *projection_arguments()), 0),
    "norm_concat_linear-packed": lambda: ((*packed_arguments(), rows(D, K * H), None, None, 0.0), 0),
    "norm_concat_linear_out": lambda: ((*chunk_arguments(), *projection_arguments(), rows(4, D)), 1),
    "norm_concat_linear_out-view": lambda: ((*packed_arguments(), *projection_arguments(), rows(T, D + 9)[:, 3:-6]), 1),
    "norm_concat_linear_quantized": lambda: ((*chunk_arguments(), *quantized_arguments()), 0),
    "norm_concat_linear_quantized_out": lambda: ((*chunk_arguments(), *quantized_arguments(), rows(4, D)), 1),
    "capture_hidden": lambda: ((rows(T, H), rows(T, H)), 0),
    "capture_hidden-no_residual": lambda: ((rows(T, H), None), 0),
    "capture_hidden-streams": lambda: ((rows(T, 4, H), None), 0),
    "capture_hidden_out": lambda: ((rows(T, H), None, rows(T, 2 * H)[:, H:], None), 2),
    "capture_hidden_out-streams": lambda: ((rows(T, 4, H), None, rows(T, H), torch.rand(T)), 2),
    "capture_hidden_out-statistics": lambda: ((rows(T, H), rows(T, H), rows(T, H), torch.rand(T, K)[:, 1]), 2),
    "store_context_kv": lambda: (context_kv_arguments(), 2),
    "store_context_kv-latent": lambda: (context_kv_arguments(latent=True), 2),
    "vocab_parallel_embedding": lambda: ((*shard_arguments(), None, None), 0),
    "vocab_parallel_embedding-scale": lambda: ((*shard_arguments(), 2.5, None), 0),
    "vocab_parallel_embedding_out": lambda: ((*shard_arguments(), None, torch.tensor(2.0), rows(5, H)), 1),
    "add_rms_norm": lambda: ((rows(T, H), rows(T, H), torch.rand(H), 1e-6, 1.0), 0),
    "add_rms_norm_out": lambda: ((rows(T, H), rows(T, H), rows(H), 1e-6, 0.0, rows(T, H), rows(T, H)), 2),
}

UTILITIES = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize("utility", UTILITIES)
@pytest.mark.parametrize("sample", SAMPLES)
def test_opcheck(sample: str, utility: str) -> None:
    arguments, _ = SAMPLES[sample]()
    torch.library.opcheck(packet(sample.partition("-")[0]).default, arguments, test_utils=utility)


# (a sample, the position of an argument, a value that a caller of torch.ops may pass for it, the error)
BAD_ARGUMENTS = {
    "1-D-chunk": ("norm_concat", 0, [rows(H)], "norm_concat: chunks[0] has shape (24,), expected (T, H)"),
    "1-D-chunk-out": ("norm_concat_out", 0, [rows(H)], "norm_concat: chunks[0] has shape (24,), expected (T, H)"),
    "no-chunks": ("norm_concat", 0, [], "norm_concat: chunks is empty, expected K >= 1 tensors"),
    "num_chunks": ("norm_concat_linear", 1, 0, "norm_concat_linear: num_chunks is 0, expected at least 1"),
    "norm": ("norm_concat", 2, "bogus", "norm_concat: norm is 'bogus', expected one of ('none', 'chunk', 'concat')"),
    "projection-1-D-chunk": (
        "norm_concat_linear", 0, [rows(H)], "norm_concat_linear: chunks[0] has shape (24,), expected (T, H)"
    ),
    "projection-1-D-chunk-out": (
        "norm_concat_linear_out", 0, [rows(H)], "norm_concat_linear: chunks[0] has shape (24,), expected (T, H)"
    ),
    "projection-norm": ("norm_concat_linear_out", 2, "bogus", "norm_concat_linear: norm is 'bogus', expected one of"),
    "0-D-weight": ("norm_concat_linear", 9, rows(), "norm_concat_linear: weight has shape (), expected (D, K*H)"),
    "quantized-1-D-chunk": (
        "norm_concat_linear_quantized", 0, [rows(H)], "norm_concat_linear: chunks[0] has shape (24,), expected (T, H)"
    ),
    "1-D-codes": (
        "norm_concat_linear_quantized", 9, torch.ones(D, dtype=torch.int8), "norm_concat_linear: weight.codes has shape"
    ),
    "1-D-scales": (
        "norm_concat_linear_quantized_out", 10, torch.ones(D), "norm_concat_linear: weight.scales has shape (17,)"
    ),
    "format": (
        "norm_concat_linear_quantized", 12, "bogus", "norm_concat_linear: format is 'bogus', expected one of ['fp8_"
    ),
    "block": (
        "norm_concat_linear_quantized", 13, 0, "norm_concat_linear: block_rows is 0, expected at least 1"
    ),
    "block-out": (
        "norm_concat_linear_quantized_out", 14, 0, "norm_concat_linear: block_columns is 0, expected at least 1"
    ),
    "0-D-hidden": ("capture_hidden", 0, rows(), "capture_hidden: hidden has shape (), expected (T, H)"),
    "1-D-hidden": ("capture_hidden", 0, rows(H), "capture_hidden: hidden has shape (24,), expected (T, H)"),
    "0-D-hidden-out": ("capture_hidden_out", 0, rows(), "capture_hidden: hidden has shape (), expected [T, H]"),
    "1-D-table": (
        "vocab_parallel_embedding", 1, rows(H), "vocab_parallel_embedding: weight has shape (24,), expected (rows, H)"
    ),
    "1-D-table-out": (
        "vocab_parallel_embedding_out", 1, rows(H), "vocab_parallel_embedding: weight has shape (24,), expected (rows, "
    ),
    "0-D-ids": (
        "vocab_parallel_embedding", 0, torch.tensor(3), "vocab_parallel_embedding: ids has shape (), expected (N,)"
    ),
    "0-D-add": ("add_rms_norm", 0, rows(), "add_rms_norm: hidden has shape (), expected (T, H)"),
}  # fmt: skip


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_bad_arguments_of_registered_ops_are_worded(case: str, backend: str) -> None:
    """Those that are read before the checks: to find the plan and to allocate the result."""
    sample, position, value, message = BAD_ARGUMENTS[case]
    arguments, _ = SAMPLES[sample]()
    bad = [*arguments[:position], value, *arguments[position + 1 :]]
    with environment_of(EAGLE_KERNELS_BACKEND=backend), pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        packet(sample)(*bad)


def test_schemas_are_a_promise() -> None:
    found = {name: str(packet(name).default._schema) for name in SCHEMAS}
    assert found == {name: f"eagle_kernels::{name}{schema}" for name, schema in SCHEMAS.items()}


def test_there_are_no_other_ops_and_no_out_overloads() -> None:
    """Inductor mistakes an `.out` overload for torch's own convention and breaks on it (docs/design.md, A call)."""
    registered = {name for name in torch._C._dispatch_get_all_op_names() if name.partition("::")[0] == "eagle_kernels"}
    assert registered == {f"eagle_kernels::{name}" for name in SCHEMAS}
    for name in SCHEMAS:
        assert packet(name).overloads() == ["default"]


@pytest.mark.parametrize("sample", SAMPLES)
def test_written_arguments_are_the_declared_ones(sample: str) -> None:
    """A functional op returns fresh memory and writes nothing; an out op writes its last arguments and nothing else."""
    arguments, written = SAMPLES[sample]()
    flat = [
        entry
        for argument in arguments[: len(arguments) - written]
        for entry in (argument if isinstance(argument, list) else [argument])
        if isinstance(entry, Tensor)
    ]
    before = [entry.clone() for entry in flat]
    returned = packet(sample.partition("-")[0])(*arguments)
    assert all(map(same_bits, before, flat))
    if written:
        assert returned is None
    else:
        returned = [returned] if isinstance(returned, Tensor) else list(returned)
        storages = [entry.untyped_storage().data_ptr() for entry in (*flat, *returned)]
        assert len(set(storages[-len(returned) :])) == len(returned)
        assert not set(storages[-len(returned) :]) & set(storages[: len(flat)])


def linear_stage(chunks: list[Tensor], residual: Tensor, indices: Tensor, weight: Tensor, gain: Tensor) -> Tensor:
    projected = ek.norm_concat_linear(
        chunks, weight, norm_weight=gain, residuals=[residual, None], indices=indices, norm_offset=1.0
    )
    return projected.relu() + 1


def quantized_stage(packed: Tensor, codes: Tensor, scales: Tensor, gain: Tensor) -> Tensor:
    weight = ek.QuantizedWeight.of_tensors(codes, scales, None, "fp8_row", (1, K * H))
    return ek.norm_concat_linear(packed * 2, weight, norm_weight=gain) * 3


def packed_stage(packed: Tensor, gain: Tensor) -> Tensor:
    return ek.norm_concat(packed * 2, norm_weight=gain) * 3


def buffered_stage(hidden: Tensor, residual: Tensor, buffer: Tensor, weight: Tensor, statistics: Tensor) -> Tensor:
    """Captures into slots, projects the packed view, writes a slice of a static buffer: no copies may come between."""
    n = hidden.shape[0]
    slots = [buffer[:n, k * H : (k + 1) * H] for k in range(2)]
    ek.capture_hidden(hidden, residual, out=slots[0], sum_squares=statistics[:n, 0])
    ek.capture_hidden(hidden + 1, out=slots[1], sum_squares=statistics[:n, 1])
    out = torch.empty(n + 3, D, dtype=hidden.dtype)
    ek.norm_concat_linear(buffer[:n, : 2 * H], weight, num_chunks=2, sum_squares=statistics[:n], out=out[1 : n + 1])
    return out[1 : n + 1] * 2


def chained_stage(hidden: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    normed, total = ek.add_rms_norm(hidden, residual, weight, eps=1e-5)
    return normed * 2, total + 1


def embedding_stage(ids: Tensor, weight: Tensor) -> Tensor:
    shard = ek.VocabShard.build(V, tp_rank=1, tp_size=2, padding_size=4)
    return ek.vocab_parallel_embedding(ids, weight, shard, scale=2.5) + ek.vocab_parallel_embedding(ids, weight, shard)


# (function, arguments for n rows, which of them carry n).
STAGES = {
    "norm_concat_linear": (
        linear_stage,
        lambda n: ([rows(n, H), rows(n, H)], rows(n, H), torch.arange(n) - 1, rows(D, 2 * H), rows(2, H)),
        ({0: [{0: 0}, {0: 0}]}, 1, 2),
    ),
    "norm_concat_linear_quantized": (
        quantized_stage,
        lambda n: (rows(n, K * H), rows(D, K * H).to(torch.float8_e4m3fn), torch.rand(D, 1), rows(K, H)),
        (0,),
    ),
    "norm_concat": (packed_stage, lambda n: (rows(n, K * H), rows(K, H)), (0,)),
    "capture_hidden": (
        buffered_stage,
        lambda n: (rows(n, H), rows(n, H), torch.zeros(16, 3 * H).bfloat16(), rows(D, 2 * H), torch.zeros(16, 2)),
        (0, 1),
    ),
    "add_rms_norm": (chained_stage, lambda n: (rows(n, H), rows(n, H), torch.rand(H)), (0, 1)),
    "vocab_parallel_embedding": (
        embedding_stage,
        lambda n: (torch.randint(-2, V + 2, (n,)), rows(20, H)),
        (0,),
    ),
}


# Inductor compiles C++ for seconds; the stage with views, mutation and two ops stands for the others.
@pytest.mark.parametrize(
    ("stage", "backend"), [*((stage, "aot_eager") for stage in STAGES), ("capture_hidden", "inductor")]
)
def test_compile_fullgraph_dynamic(stage: str, backend: str) -> None:
    """One graph for every number of rows, with the bits of the eager call, buffers included."""
    function, make, _ = STAGES[stage]
    torch._dynamo.reset()
    frames = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(function, backend=frames, fullgraph=True, dynamic=True)
    compilations = []
    for n in (5, 9, 2, 13):
        torch.manual_seed(n)
        arguments = make(n)
        torch.manual_seed(n)
        for_eager = make(n)
        with torch.no_grad():
            results, expected = compiled(*arguments), function(*for_eager)
        torch.testing.assert_close(results, expected, rtol=0, atol=0)
        torch.testing.assert_close(arguments, for_eager, rtol=0, atol=0)
        compilations.append(frames.frame_count)
    # The first call may compile twice: torch retraces where a float argument (eps, offset) would have been symbolic.
    assert len(set(compilations)) == 1


def test_an_index_of_unknown_length_compiles() -> None:
    """Its checks asked whether there are two rows, which no trace knows."""
    weight = rows(D, 2 * H)

    def accepted_rows(hidden: Tensor, accepted: Tensor) -> Tensor:
        return ek.norm_concat_linear([hidden, hidden], weight, indices=accepted.nonzero().squeeze(-1))

    torch._dynamo.reset()
    hidden, accepted = rows(5, H), torch.tensor([True, False, True, True, False])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(accepted_rows, backend="aot_eager", fullgraph=True)
        assert same_bits(compiled(hidden, accepted), accepted_rows(hidden, accepted))


def test_ids_that_are_not_dense_compile() -> None:
    """Whether an output overlaps them is asked of memory, which a trace has none of."""
    table, shard = rows(V, H), ek.VocabShard.build(V, tp_rank=0, tp_size=1)

    def embed(ids: Tensor, out: Tensor) -> Tensor:
        return ek.vocab_parallel_embedding(ids, table, shard, out=out)

    torch._dynamo.reset()
    ids = torch.arange(2 * T).view(2, T).t()
    compiled = torch.compile(embed, backend="aot_eager", fullgraph=True)
    assert same_bits(compiled(ids, torch.empty(T, 2, H).bfloat16()), table[ids])


class Stage(torch.nn.Module):
    def __init__(self, function: object) -> None:
        super().__init__()
        self.function = function

    def forward(self, *arguments: object) -> object:
        return self.function(*arguments)


@pytest.mark.parametrize("stage", STAGES)
def test_export_with_a_dynamic_number_of_rows(stage: str) -> None:
    function, make, dynamic = STAGES[stage]
    n = torch.export.Dim("n", min=2, max=16)
    places: dict[int, object] = {}
    for entry in dynamic:
        places |= {0: [{0: n}, {0: n}]} if isinstance(entry, dict) else {entry: {0: n}}
    arguments = make(5)
    shapes = tuple(places.get(i) for i in range(len(arguments)))
    with torch.no_grad():
        program = torch.export.export(Stage(function), arguments, dynamic_shapes=(shapes,), strict=False)
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert any(target.startswith(f"eagle_kernels.{stage}") for target in targets), targets
    module = program.module()
    for length in (5, 9):
        torch.manual_seed(length)
        arguments = make(length)
        torch.manual_seed(length)
        torch.testing.assert_close(module(*arguments), function(*make(length)), rtol=0, atol=0)


@pytest.mark.parametrize("stage", ["norm_concat", "norm_concat_linear", "norm_concat_linear_quantized"])
def test_a_package_of_aotinductor_runs(stage: str, tmp_path: Path) -> None:
    """It passes None for an empty list of tensors."""
    function, make, _ = STAGES[stage]
    arguments = make(5)
    with torch.no_grad():
        program = torch.export.export(Stage(function), arguments, strict=False)
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "stage.pt2"))
    result = torch._inductor.aoti_load_package(package)(*arguments)
    torch.testing.assert_close(result, function(*arguments), rtol=0, atol=0)


def test_export_with_a_dynamic_width_of_a_chunk() -> None:
    """The widths of the chunks are symbols then, which no set takes."""
    h = torch.export.Dim("h", min=2, max=64)
    function = Stage(lambda *arguments: ek.norm_concat(arguments[:2], norm_weight=arguments[2]))
    arguments = lambda width: (rows(T, width), rows(T, width), rows(2, width))  # noqa: E731
    program = torch.export.export(function, arguments(24), dynamic_shapes=(({1: h},) * 3,), strict=False)
    for width in (24, 31):
        call = arguments(width)
        torch.testing.assert_close(program.module()(*call), function(*call), rtol=0, atol=0)


GRAD_CALLS = {
    "norm_concat_linear": lambda x: ek.norm_concat_linear([x], rows(D, H)),
    "norm_concat_linear-weight": lambda x: ek.norm_concat_linear([rows(T, H)], x),
    "norm_concat_linear-bias": lambda x: ek.norm_concat_linear([rows(T, H)], rows(T, H), bias=x[:, 0].contiguous()),
    "norm_concat_linear-post_norm_weight": lambda x: ek.norm_concat_linear(
        [rows(T, H)], rows(H, H), post_norm_weight=x[0]
    ),
    "norm_concat": lambda x: ek.norm_concat([rows(T, H)], residuals=[x]),
    "norm_concat-sum_squares": lambda x: ek.norm_concat([rows(T, H)], sum_squares=x.float()[:, :1]),
    "norm_concat-out": lambda x: ek.norm_concat([rows(T, H)], out=x),
    "capture_hidden": lambda x: ek.capture_hidden(x, out=rows(T, H)),
    "capture_hidden-sum_squares": lambda x: ek.capture_hidden(rows(T, H), out=rows(T, H), sum_squares=x.float()[:, 0]),
    "add_rms_norm": lambda x: ek.add_rms_norm(rows(T, H), rows(T, H), x[0]),
    "add_rms_norm-out_sum": lambda x: ek.add_rms_norm(rows(T, H), rows(T, H), rows(H), out_sum=x),
    "vocab_parallel_embedding": lambda x: ek.vocab_parallel_embedding(
        torch.tensor([1]), x, ek.VocabShard.build(T, tp_rank=0, tp_size=1)
    ),
    "vocab_parallel_embedding-scale": lambda x: ek.vocab_parallel_embedding(
        torch.tensor([1]), rows(T, H), ek.VocabShard.build(T, tp_rank=0, tp_size=1), scale=x[0, 0]
    ),
}


@pytest.mark.parametrize("call", GRAD_CALLS)
def test_inference_only(call: str) -> None:
    """An input that requires grad is an error while grad mode is on, and an input like any other while it is off."""
    x = rows(T, H).requires_grad_()
    op = call.partition("-")[0]
    expected = f"{op}: an input requires grad, expected inputs without grad or a call under torch.no_grad"
    with pytest.raises(RuntimeError, match=expected):
        GRAD_CALLS[call](x)
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            GRAD_CALLS[call](x)


# One for every argument that an op writes, and for every way in which torch ends a projection.
WRITING_CALLS = {
    "norm_concat_linear": lambda out: ek.norm_concat_linear([rows(T, H)], rows(H, H), out=out),
    "norm_concat_linear-bias": lambda out: ek.norm_concat_linear([rows(T, H)], rows(H, H), bias=rows(H), out=out),
    "norm_concat_linear-post_norm": lambda out: ek.norm_concat_linear(
        [rows(T, H)], rows(H, H), post_norm_weight=rows(H), out=out
    ),
    "norm_concat_linear-codes": lambda out: ek.norm_concat_linear(
        [rows(T, H)], ek.quantize(rows(H, H), "fp8_row"), out=out
    ),
    "norm_concat": lambda out: ek.norm_concat([rows(T, H)], out=out),
    "capture_hidden": lambda out: ek.capture_hidden(rows(T, H), out=out),
    "capture_hidden-sum_squares": lambda out: ek.capture_hidden(
        rows(T, H), out=rows(T, H), sum_squares=out.view(torch.float32)[:, 0]
    ),
    "add_rms_norm": lambda out: ek.add_rms_norm(rows(T, H), rows(T, H), rows(H), out=out),
    "add_rms_norm-out_sum": lambda out: ek.add_rms_norm(rows(T, H), rows(T, H), rows(H), out_sum=out),
    "vocab_parallel_embedding": lambda out: ek.vocab_parallel_embedding(
        torch.arange(T), rows(V, H), ek.VocabShard.build(V, tp_rank=0, tp_size=1), out=out
    ),
}


class Dispatched(TorchDispatchMode):
    """Sends public calls through the registered ops."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kernel", ["preferred", "reference", "two steps"])
@pytest.mark.parametrize("path", [contextlib.nullcontext, Dispatched], ids=["plain", "registered"])
@pytest.mark.parametrize("call", WRITING_CALLS)
def test_autograd_sees_what_is_written(call: str, path: Callable, kernel: str) -> None:
    """A tensor that was saved for a backward and then written: the backward raises, as after torch's own out= ops."""
    limited = fused_up_to(-1) if kernel == "two steps" else contextlib.nullcontext()
    with limited, environment_of(**{"EAGLE_KERNELS_BACKEND": "reference"} if kernel == "reference" else {}):
        out = rows(T, H)
        product = out * torch.ones(T, H, requires_grad=True)
        with path():
            WRITING_CALLS[call](out)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


@pytest.mark.parametrize("kernel", ["preferred", "reference", "two steps"])
@pytest.mark.parametrize("path", [contextlib.nullcontext, Dispatched], ids=["plain", "registered"])
@pytest.mark.parametrize("call", WRITING_CALLS)
def test_inference_tensors_have_no_version_and_are_written(call: str, path: Callable, kernel: str) -> None:
    """Outside inference mode too. Where torch's own ops end a call, by its T and backend, they refused it."""
    limited = fused_up_to(-1) if kernel == "two steps" else contextlib.nullcontext()
    with torch.inference_mode():
        out = torch.full((T, H), torch.nan).bfloat16()
    with limited, environment_of(**{"EAGLE_KERNELS_BACKEND": "reference"} if kernel == "reference" else {}), path():
        WRITING_CALLS[call](out)
    assert not out.isnan().all()


@pytest.mark.parametrize("call", GRAD_CALLS)
def test_no_tangent_is_dropped(call: str) -> None:
    """Forward-mode differentiation is refused whatever the grad mode; inference mode turns both off."""
    op = call.partition("-")[0]
    expected = f"^{op}: an input has a tangent, expected inputs that forward-mode differentiation does not follow"
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(rows(T, H), rows(T, H))
        for grad_mode in (torch.enable_grad, torch.no_grad):
            with grad_mode(), pytest.raises(RuntimeError, match=expected):
                GRAD_CALLS[call](dual)
        with torch.inference_mode():
            GRAD_CALLS[call](dual)
        GRAD_CALLS[call](rows(T, H))
