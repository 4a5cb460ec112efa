"""`check`: every op on every usable backend and instruction set against float64, on random calls.

A case is its op, seed and number: the same three give the same call on every machine. Row counts, widths, strides,
dtypes and all optional arguments are drawn; rows get different scales and some channels are outliers, as in real
residual streams.
"""

import argparse
import functools
import math
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

import eagle_kernels
from eagle_kernels import VocabShard, environment, ops
from eagle_kernels.ops.add_rms_norm import formula as add_formula
from eagle_kernels.ops.capture_hidden import CaptureHidden as CaptureRecord
from eagle_kernels.ops.norm_concat_linear import Projection, project_formula
from eagle_kernels.ops.sources import Sources
from eagle_kernels.ops.sources import formula as sources_formula
from eagle_kernels.ops.vocab_parallel_embedding import VocabParallelEmbedding as EmbeddingRecord
from eagle_kernels.plan import unsupported_reason

from . import cli_types
from .accuracy import error_bound, relative_rms
from .cli_types import DTYPE_NAMES, DTYPES, Command
from .forced import forced, usable_isas

_LINE = "{op:<26}{backend:<11}{isa:<13}{worst:<44}{verdict}"
_ROWS = (0, 1, 2, 3, 7, 16, 33, 129)
_WIDTHS = (1, 7, 16, 64, 100, 255, 896, 1152)


@dataclass(frozen=True)
class Expected:
    """What one output must be: the bits of `value`, or within `bound` of it."""

    label: str
    value: Tensor
    bound: float | None = None  # None: bit for bit

    def error(self, actual: Tensor) -> float:
        """The relative RMS error; for bit-exact outputs 0 or inf."""
        if self.bound is None:
            return 0.0 if torch.equal(_bits(actual), _bits(self.value)) else math.inf
        return relative_rms(actual, self.value)


def _bits(tensor: Tensor) -> Tensor:
    """The tensor as integers: as floats -0.0 would equal 0.0."""
    return tensor.contiguous().view(torch.int32 if tensor.element_size() == 4 else torch.int16)


@dataclass(frozen=True)
class Call:
    """One call of an op, the outputs to look at, and what they must be."""

    arguments: tuple
    options: dict[str, object]
    expected: list[Expected]
    written: list["Guarded"] = field(default_factory=list)  # tensors that the call fills through `out` and the like


class Guarded:
    """A poisoned output that is a view into a wider buffer; what surrounds the view has to survive the call."""

    def __init__(self, draw: "Draw", *shape: int, dtype: torch.dtype) -> None:
        rows, columns = (1, *shape)[-2:]
        margin = draw.random.choice((0, 3, 8))
        self._buffer = torch.full((rows + 2, columns + 2 * margin), math.nan, dtype=dtype)
        self._inner = (slice(1, rows + 1), slice(margin, margin + columns))
        self.view = self._buffer[self._inner] if len(shape) == 2 else self._buffer[self._inner][0]

    def reset(self) -> None:
        self._buffer.fill_(math.nan)

    def is_intact(self) -> bool:
        outside = torch.ones_like(self._buffer, dtype=torch.bool)
        outside[self._inner] = False
        return bool(self._buffer[outside].isnan().all())


class Draw:
    """Random values of one case; everything that was drawn is kept by name, to be printed with a failure."""

    def __init__(self, op: str, seed: int, number: int) -> None:
        key = f"{op}-{seed}-{number}"
        self.random = random.Random(key)
        self._generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
        self.drawn: dict[str, object] = {}

    def choose(self, name: str, *values: object) -> object:
        value = self.random.choice(values)
        self.drawn[name] = DTYPE_NAMES.get(value, value)
        return value

    def dtype(self) -> torch.dtype:
        return self.choose("dtype", *DTYPES.values())

    def normal(self, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=self._generator) * scale).to(dtype)

    def integers(self, low: int, high: int, count: int, dtype: torch.dtype) -> Tensor:
        return torch.randint(low, max(high, low + 1), (count,), generator=self._generator).to(dtype)

    def rows(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Hidden states [rows, columns], often a slice of something wider, whose other columns are poison."""
        margin = self.random.choice((0, 0, 1, 8))
        buffer = torch.full((rows, columns + 2 * margin), math.nan, dtype=dtype)
        values = torch.randn(rows, columns, generator=self._generator)
        # fp16 ends at 65504, and a product without a norm has to stay below it.
        outlier, spread = (50.0, 1.0) if dtype == torch.float16 else (500.0, 4.0)
        values[:, self.random.randrange(columns)] *= self.random.choice((1.0, outlier))
        values *= torch.exp2(torch.randn(rows, 1, generator=self._generator).clamp(-2, 2) * spread)
        view = buffer[:, margin : margin + columns]
        view.copy_(values)
        return view

    def gain(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return self.normal(*shape, dtype=self.random.choice((dtype, torch.float32)), scale=0.3) + 1


def make_case(op: str, seed: int, number: int) -> tuple[Draw, Call]:
    """Case `number` of this op and seed: what was drawn for it, and the call."""
    draw = Draw(op, seed, number)
    return draw, _MAKERS[op](draw)


def _make_sources(draw: Draw) -> tuple[tuple[list[Tensor] | Tensor], dict[str, object]]:
    """chunks and the options that norm_concat and norm_concat_linear share."""
    dtype, K, T = draw.dtype(), draw.choose("K", 1, 2, 3, 5, 6), draw.choose("T", *_ROWS)
    norm = draw.choose("norm", "chunk", "chunk", "concat", "none")
    layout = draw.choose("layout", "list", "list", "packed", "unequal", "one row")
    widths = [draw.choose("H", *_WIDTHS)] * K
    if layout == "unequal":
        widths = [draw.random.choice(_WIDTHS) for _ in range(K)]
        draw.drawn["H"] = widths
    parts = [sum(widths)] if layout == "packed" else widths
    chunks = [draw.rows(1 if layout == "one row" else T, width, dtype) for width in parts]
    residuals = [draw.rows(*chunk.shape, dtype) for chunk in chunks]
    keep = draw.choose("residuals", "none", "some", "all")
    kept = [keep == "all" or (keep == "some" and draw.random.random() < 0.5) for _ in residuals]
    residuals = [residual if is_kept else None for residual, is_kept in zip(residuals, kept, strict=True)]

    options: dict[str, object] = {"norm": norm, "norm_offset": draw.choose("norm_offset", 0.0, 1.0)}
    options["residuals"] = None if keep == "none" else residuals
    options["norm_weight"] = _make_gains(draw, norm, widths, dtype)
    options["eps"] = [1e-6 * 10**k for k in range(K)] if norm == "chunk" and draw.choose("eps", 1, "K") == "K" else 1e-5
    if layout == "one row":
        options["residuals"] = None if keep == "none" else [r if r is None else r[0] for r in residuals]
        return ([chunk[0] for chunk in chunks],), options
    options["indices"] = _make_indices(draw, T, K, per_chunk=layout != "packed")
    if layout == "packed":
        options["num_chunks"] = K
    if norm != "none" and draw.choose("sum_squares", False, False, True):
        options["sum_squares"] = _sum_squares(chunks, residuals, K)
    return (chunks[0] if layout == "packed" else chunks,), options


def _make_gains(draw: Draw, norm: str, widths: list[int], dtype: torch.dtype) -> Tensor | list[Tensor] | None:
    form = draw.choose("gains", "none", "list", "tensor")
    if norm == "none" or form == "none":
        return None
    if norm == "concat":
        return draw.gain(sum(widths), dtype=dtype)
    if form == "tensor" and len(set(widths)) == 1:
        return draw.gain(len(widths), widths[0], dtype=dtype)
    gains = [draw.gain(width, dtype=dtype) for width in widths]
    return [gain.to(gains[0].dtype) for gain in gains]


def _make_indices(draw: Draw, T: int, K: int, per_chunk: bool) -> Tensor | list[Tensor | None] | None:
    form = draw.choose("indices", "none", "one", *(["per chunk"] if per_chunk else []))
    dtype = draw.choose("index_dtype", torch.int32, torch.int64)
    if form == "none":
        return None
    # Without an index of its own a chunk gives its T rows, so a mixed list has to have N = T.
    mixed = form == "per chunk" and draw.choose("mixed", False, True)
    N = T if mixed else draw.choose("N", *_ROWS)
    indices = [_index(draw, T, N, dtype) for _ in range(K if form == "per chunk" else 1)]
    if form == "one":
        return indices[0]
    return [None if mixed and draw.random.random() < 0.4 else index for index in indices]


def _index(draw: Draw, T: int, N: int, dtype: torch.dtype) -> Tensor:
    """N row numbers, some of them outside [0, T)."""
    index = draw.integers(-1, T + 1, N, dtype)
    far = torch.iinfo(dtype)
    for position in range(0, N, 5):
        index[position] = draw.random.choice((-1, T, far.min, far.max))
    return index


def _sum_squares(chunks: list[Tensor], residuals: list[Tensor | None], K: int) -> Tensor:
    values = [c if r is None else c + r for c, r in zip(chunks, residuals, strict=True)]
    pieces = values[0].chunk(K, -1) if len(values) != K else values
    return torch.stack([piece.float().square().sum(-1) for piece in pieces], -1)


def _norm_concat(draw: Draw) -> Call:
    arguments, options = _make_sources(draw)
    sources = Sources.of_call("norm_concat", *arguments, options)
    matrices = sources.as_matrices()
    truth = sources_formula(matrices, torch.float64)
    eager = sources_formula(matrices).to(sources.chunks[0].dtype)
    return _one_output(draw, arguments, options, truth, eager, sources)


def _norm_concat_linear(draw: Draw) -> Call:
    arguments, options = _make_sources(draw)
    sources = Sources.of_call("norm_concat_linear", *arguments, options)
    dtype, D = sources.chunks[0].dtype, draw.choose("D", 1, 5, 31, 64, 130)
    weight = draw.rows(D, sources.width, torch.float32).clamp(-3, 3) / math.sqrt(sources.width)
    wide = draw.choose("weight_rows_apart", False, True)
    weight = torch.cat([weight, weight], 1).to(dtype)[:, : sources.width] if wide else weight.to(dtype)
    bias = draw.gain(D, dtype=dtype) if draw.choose("bias", False, True) else None
    post_norm = draw.gain(D, dtype=dtype) if draw.choose("post_norm", False, False, True) else None
    eps = options["eps"]
    if post_norm is not None and not isinstance(eps, float):
        options["eps"] = [*eps, 1e-4]
    projection = Projection(weight, bias, post_norm, eps if isinstance(eps, float) else 1e-4)
    matrices = sources.as_matrices()
    truth = project_formula(sources_formula(matrices, torch.float64), projection, sources.norm_offset)
    # The engines' order: x is rounded to the dtype, the product's sums are fp32, the result is rounded.
    rounded = sources_formula(matrices).to(dtype)
    eager = project_formula(rounded.float(), projection, sources.norm_offset).to(dtype)
    options |= {"bias": bias, "post_norm_weight": post_norm}
    return _one_output(draw, (*arguments, weight), options, truth, eager, sources)


def _one_output(
    draw: Draw, arguments: tuple, options: dict[str, object], truth: Tensor, eager: Tensor, sources: Sources
) -> Call:
    """The call of an op whose only output is float64 `truth` up to a bound, half of the time through `out`."""
    bound = error_bound(relative_rms(eager, truth), eager.dtype, sources.width, truth.numel())
    truth = truth[0] if sources.is_one_row else truth
    if not draw.choose("out", False, True):
        return Call(arguments, options, [Expected("result", truth, bound)])
    out = Guarded(draw, *truth.shape, dtype=eager.dtype)
    return Call(arguments, options | {"out": out.view}, [Expected("result", truth, bound)], [out])


def _capture_hidden(draw: Draw) -> Call:
    dtype, T, H = draw.dtype(), draw.choose("T", *_ROWS), draw.choose("H", *_WIDTHS)
    hidden = draw.rows(T, H, dtype)
    residual = draw.rows(T, H, dtype) if draw.choose("residual", False, True) else None
    value, squares = torch.empty(T, H, dtype=dtype), torch.empty(T)
    CaptureRecord(hidden, residual, value, squares).reference()
    out = Guarded(draw, T, H, dtype=dtype)
    expected, options, written = [Expected("out", value)], {"out": out.view}, [out]
    if draw.choose("sum_squares", False, True):
        column = Guarded(draw, T, 1, dtype=torch.float32)
        truth = value.double().square().sum(-1)
        options["sum_squares"] = column.view[:, 0]
        bound = error_bound(relative_rms(squares, truth), torch.float32, H, T)
        expected.append(Expected("sum_squares", truth, bound))
        written.append(column)
    return Call((hidden, residual), options, expected, written)


def _add_rms_norm(draw: Draw) -> Call:
    dtype, T, H = draw.dtype(), draw.choose("T", *_ROWS), draw.choose("H", *_WIDTHS)
    hidden, residual, weight = draw.rows(T, H, dtype), draw.rows(T, H, dtype), draw.gain(H, dtype=dtype)
    options = {"eps": draw.choose("eps", 1e-6, 1e-3), "norm_offset": draw.choose("norm_offset", 0.0, 1.0)}
    truth = add_formula(hidden, residual, weight, **options, dtype=torch.float64)[0]
    eager, total = (output.to(dtype) for output in add_formula(hidden, residual, weight, **options))
    bound = error_bound(relative_rms(eager, truth), dtype, H, truth.numel())
    expected = [Expected("normed", truth, bound), Expected("sum", total)]
    written = []
    for name in ("out", "out_sum"):
        if draw.choose(name, False, True):
            written.append(Guarded(draw, T, H, dtype=dtype))
            options[name] = written[-1].view
    return Call((hidden, residual, weight), options, expected, written)


def _vocab_parallel_embedding(draw: Draw) -> Call:
    dtype, H, T = draw.dtype(), draw.choose("H", *_WIDTHS), draw.choose("T", *_ROWS)
    added, tp_size = draw.choose("added", 0, 0, 1, 70), draw.choose("tp_size", 1, 2, 4)
    V = draw.choose("V", 5, 64, 130, 1000) + added
    tp_rank = draw.random.randrange(tp_size)
    draw.drawn["tp_rank"] = tp_rank
    shard = VocabShard.build(V, tp_rank=tp_rank, tp_size=tp_size, org_num_embeddings=V - added)
    weight = draw.rows(shard.rows, H, dtype)
    ids = _index(draw, V, T, draw.choose("id_dtype", torch.int32, torch.int64))
    scale = draw.choose("scale", None, None, "float", "tensor")
    if scale is not None:
        scale = math.sqrt(H) if scale == "float" else torch.tensor(math.sqrt(H), dtype=dtype)
    value = torch.empty(T, H, dtype=dtype)
    is_tensor = isinstance(scale, Tensor)
    scales = (None, scale) if is_tensor else (scale, None)
    EmbeddingRecord(ids, weight, *shard.bounds, *scales, value).reference()
    written = [Guarded(draw, T, H, dtype=dtype)] if draw.choose("out", False, True) else []
    options = {"scale": scale} | ({"out": written[0].view} if written else {})
    return Call((ids, weight, shard), options, [Expected("result", value)], written)


_MAKERS: dict[str, Callable[[Draw], Call]] = {
    "add_rms_norm": _add_rms_norm,
    "capture_hidden": _capture_hidden,
    "norm_concat": _norm_concat,
    "norm_concat_linear": _norm_concat_linear,
    "vocab_parallel_embedding": _vocab_parallel_embedding,
}


@dataclass(frozen=True)
class Outcome:
    """How the error of a case compares with its bound (inf where the result cannot be compared), and what is wrong."""

    ratio: float
    error: float
    bound: float
    text: str


@dataclass(frozen=True)
class Path:
    """Where cases run."""

    op: str
    backend: str
    isa: str | None


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    isas, op_names = environment.CPU_ISAS, ops.__all__
    add = parser.add_argument
    add("--seed", type=cli_types.number(0), default=0, help="of the random calls (default 0)")
    add("--cases", type=cli_types.number(1), default=40, help="calls per op and backend (default 40)")
    add("--op", type=cli_types.one_of("op", op_names), help="only this op")
    add("--backend", type=cli_types.one_of("backend", environment.BACKENDS), help="only this backend")
    add("--isa", type=cli_types.one_of("instruction set", isas), help="only this one, of the cpu backend")
    add("--case", type=cli_types.number(0), help="only the case of this number, as a repro names it")


def _run(arguments: argparse.Namespace) -> int:
    print(f"random calls against float64, seed {arguments.seed}")
    print(_LINE.format(op="op", backend="backend", isa="cpu isa", worst="worst rel. RMS error / bound", verdict=""))
    numbers = range(arguments.cases) if arguments.case is None else [arguments.case]
    failed = paths = 0
    for path in _paths(arguments):
        paths += 1
        with forced(path.backend, path.isa):
            failed += not _check_path(path, arguments.seed, numbers)
    if not paths:
        arguments.parser.error("nothing to check: no usable backend or instruction set is left, see above")
    return 1 if failed else 0


def _paths(arguments: argparse.Namespace) -> Iterator[Path]:
    backends = [arguments.backend] if arguments.backend else environment.BACKENDS
    for backend in backends:
        # The calls are made of CPU tensors; a backend for another device says so here.
        if (reason := unsupported_reason(backend, torch.device("cpu"))) is not None:
            print(f"{backend} is left out: {reason}")
            continue
        isas = usable_isas(backend)
        if arguments.isa is not None:
            isas = [isa for isa in isas if isa == arguments.isa]
        for op in [arguments.op] if arguments.op else ops.__all__:
            yield from (Path(op, backend, isa) for isa in isas)


def _check_path(path: Path, seed: int, numbers: range | list[int]) -> bool:
    """Run the cases and print one line, and the worst case where one misses; whether all are right."""
    results = [(_run_case(path.op, seed, number), number) for number in numbers]
    worst, number = max(results, key=lambda result: result[0].ratio)
    misses = sum(result.ratio > 1 for result, _ in results)
    verdict = f"{misses} of {len(results)} cases FAIL" if misses else f"{len(results)} cases ok"
    error = "bit for bit" if worst.bound == 0 == worst.error else f"{worst.error:.2e} / {worst.bound:.2e}"
    error = f"{error} ({worst.text})" if worst.text else error
    fields = {"op": path.op, "backend": path.backend, "isa": path.isa or "-"}
    print(_LINE.format(**fields, worst=error, verdict=f"{verdict}, seed {seed}"), flush=True)
    if misses:
        _print_repro(path, seed, number, worst)
    return not misses


def _print_repro(path: Path, seed: int, number: int, outcome: Outcome) -> None:
    draw, _ = make_case(path.op, seed, number)
    isa = f" --isa {path.isa}" if path.isa else ""
    print(f"  case {number}: {outcome.text}")
    print(f"  {path.op} with {', '.join(f'{name}={value}' for name, value in draw.drawn.items())}")
    print(f"  repro: eagle-kernels check --op {path.op} --backend {path.backend}{isa} --seed {seed} --case {number}")


def _run_case(op: str, seed: int, number: int) -> Outcome:
    """Run one case; its largest ratio of error and bound, inf for wrong bits, a raise or a write outside `out`."""
    _, call = _case(op, seed, number)
    for guarded in call.written:
        guarded.reset()
    try:
        results = getattr(eagle_kernels, op)(*call.arguments, **call.options)
    except Exception as raised:
        return Outcome(math.inf, math.inf, 0, f"raised {type(raised).__name__}: {raised}")
    if not all(guarded.is_intact() for guarded in call.written):
        return Outcome(math.inf, math.inf, 0, "memory beside an output was written")
    results = results if isinstance(results, tuple) else (results,)
    if op == "capture_hidden" and "sum_squares" in call.options:
        results = (*results, call.options["sum_squares"])
    outcomes = [_judge(expected, actual) for expected, actual in zip(call.expected, results, strict=True)]
    return max(outcomes, key=lambda outcome: outcome.ratio)


# Every backend and instruction set runs the same cases, and float64 is the slow part of a case.
_case = functools.cache(make_case)


def _judge(expected: Expected, actual: Tensor) -> Outcome:
    if actual.shape != expected.value.shape:
        got, wanted = tuple(actual.shape), tuple(expected.value.shape)
        return Outcome(math.inf, math.inf, 0, f"{expected.label} has shape {got}, expected {wanted}")
    error, bound = expected.error(actual), expected.bound or 0.0
    if error <= bound:
        return Outcome(error / bound if bound else 0.0, error, bound, "")
    # Not a plain comparison: an error of nan has to count as a miss.
    ratio = error / bound if bound and error < math.inf else math.inf
    return Outcome(ratio, error, bound, f"{expected.label} differs")


CHECK = Command(
    "Compare every op on every usable backend and instruction set with float64, on random calls.", _add_arguments, _run
)
