"""The calls of norm_concat and norm_concat_linear that every backend is tested on, in a table with ids.

`CASES` is a covering selection, not the product of its axes (which has 10^7 entries). Each value of each axis occurs
with each dtype, or in two cases at least. Other combinations are left out for these reasons:

- T x D x K*H: kernels block the three separately, and the edge of a block on one axis does not depend on the others. So
  every T, every H and an odd D meet each other in some case, not in all.
- features x sizes: strides, residuals, indices and statistics act on one row of one chunk, before the product. They run
  on small widths that end inside a vector (101, 33, 64).
- features x dtypes: element types differ in load and store only; bf16 takes every feature, fp16 and fp32 those that
  load through another path (residual rounding, gains of another type, tables, statistics).
"""

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import accuracy
import eagle_kernels as ek
from backends import environment_of
from eagle_kernels.quantized_weight import FORMATS

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Case:
    """One call, by its sizes and features; `operands` makes the tensors."""

    dtype_name: str
    widths: tuple[int, ...]  # H of each chunk
    T: int
    norm: str = "chunk"
    D: int = 33
    data: str = "plain"  # a key of accuracy.DATA
    layout: str = "dense"  # or strided, packed, row
    gain: str = "dtype"  # or fp32, none, list
    norm_offset: float = 0.0
    eps: float | tuple[float, ...] = 1e-6
    residuals: str = ""  # or all, some
    indices: str = ""  # or shared, each, some, table, none-in-range
    index_dtype: torch.dtype = torch.int64
    bias: str = ""  # or dtype, fp32
    post_norm: str = ""  # or dtype, fp32
    sum_squares: bool = False
    view: bool = False  # a strided weight, beside the strided out that every test writes

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.dtype_name]

    @property
    def K(self) -> int:
        return len(self.widths)

    @property
    def id(self) -> str:
        width = "+".join(map(str, dict.fromkeys(self.widths)))
        parts = [self.dtype_name, f"K{self.K}", f"H{width}", f"T{self.T}", self.norm]
        parts += [f"D{self.D}"] if self.D != 33 else []
        parts += [self.data] if self.data != "plain" else []
        parts += [self.layout] if self.layout != "dense" else []
        parts += [f"gain_{self.gain}"] if self.gain != "dtype" and self.norm != "none" else []
        parts += [f"offset{self.norm_offset:g}"] if self.norm_offset else []
        parts += ["eps_each"] if isinstance(self.eps, tuple) else []
        parts += [f"residuals_{self.residuals}"] if self.residuals else []
        parts += [f"indices_{self.indices}"] if self.indices else []
        parts += ["int32"] if self.index_dtype == torch.int32 else []
        parts += [f"bias_{self.bias}"] if self.bias else []
        parts += [f"post_{self.post_norm}"] if self.post_norm else []
        parts += ["statistics"] if self.sum_squares else []
        parts += ["strided_weight"] if self.view else []
        return "-".join(parts)


def _case(dtype: str, K: int, H: int | Sequence[int], T: int, norm: str = "chunk", **features: object) -> Case:
    widths = (H,) * K if isinstance(H, int) else tuple(H)
    assert len(widths) == K
    return Case(dtype, widths, T, norm, **features)


# Every K, H, T and dtype, with nothing but gains.
SIZES = [
    _case("bf16", 1, 64, 1),
    _case("bf16", 2, 896, 2, "concat", D=257),
    _case("bf16", 3, 2880, 17, "concat"),
    _case("bf16", 3, 4096, 1, D=257),
    _case("bf16", 5, 1152, 7, D=64),
    _case("bf16", 6, 4096, 3),
    _case("bf16", 3, 64, 129, D=257),
    _case("bf16", 1, 101, 33, D=1),
    _case("bf16", 2, 1, 16),
    _case("bf16", 2, 2880, 33, "none", D=97),
    _case("bf16", 3, 101, 1000, D=101),
    _case("bf16", 3, 101, 0),
    _case("bf16", 1, 1, 1, D=1),
    _case("fp16", 1, 4096, 2),
    _case("fp16", 2, 2880, 16, "concat", D=97),
    _case("fp16", 3, 896, 7, D=257),
    _case("fp16", 5, 64, 129),
    _case("fp16", 6, 1152, 1),
    _case("fp16", 3, 101, 33, "none"),
    _case("fp16", 2, 1, 3),
    _case("fp16", 1, 64, 0, "concat"),
    _case("fp32", 1, 2880, 3),
    _case("fp32", 2, 4096, 1, "concat", D=97),
    _case("fp32", 3, 1152, 16, D=257),
    _case("fp32", 3, 4096, 17),
    _case("fp32", 5, 896, 2),
    _case("fp32", 6, 64, 129),
    _case("fp32", 2, 101, 33, "none", D=257),
    _case("fp32", 3, 1, 7),
    _case("fp32", 2, 64, 0, "none"),
]

EPS = (1e-6, 0.3, 2.0)  # far apart, so that using another chunk's eps shows

FEATURES = [
    # Layouts of the sources.
    _case("bf16", 3, 101, 7, layout="strided"),
    _case("bf16", 3, 64, 8, layout="packed"),
    _case("bf16", 3, 101, 3, "concat", layout="packed"),
    _case("bf16", 2, 101, 3, "none", layout="packed"),
    _case("bf16", 3, 101, 1, layout="row"),
    _case("bf16", 4, (64, 101, 33, 1), 7),
    _case("bf16", 4, (64, 101, 33, 1), 7, "concat", layout="strided"),
    _case("fp16", 3, 101, 7, layout="strided"),
    _case("fp32", 2, (101, 64), 3, "none", layout="strided"),
    _case("fp32", 3, 101, 2, layout="packed", gain="none"),
    _case("fp32", 2, 101, 1, layout="row", residuals="all"),
    # Gains, offsets, eps.
    _case("bf16", 3, 101, 7, gain="none"),
    _case("bf16", 3, 101, 7, "concat", gain="none"),
    _case("bf16", 3, 101, 7, gain="fp32", norm_offset=1.0),
    _case("bf16", 3, 101, 7, "concat", gain="fp32"),
    _case("bf16", 3, 101, 7, gain="list", norm_offset=1.0, eps=EPS),
    _case("bf16", 3, 101, 7, "concat", norm_offset=1.0, eps=0.3),
    _case("bf16", 2, 64, 5, gain="none", norm_offset=1.0),
    _case("fp16", 3, 101, 7, gain="fp32", norm_offset=1.0, eps=EPS),
    _case("fp32", 3, 101, 7, gain="list", norm_offset=1.0, eps=EPS),
    # Residuals.
    _case("bf16", 3, 101, 7, residuals="all"),
    _case("bf16", 3, 101, 7, "concat", residuals="some", layout="strided"),
    _case("bf16", 3, 101, 7, "none", residuals="some"),
    _case("bf16", 2, 64, 8, residuals="all", layout="packed"),
    _case("fp16", 3, 101, 7, "concat", residuals="all"),
    _case("fp32", 3, 101, 7, residuals="some"),
    # Indices.
    _case("bf16", 3, 101, 7, indices="shared"),
    _case("bf16", 3, 101, 7, "concat", indices="each", index_dtype=torch.int32),
    _case("bf16", 3, 101, 7, indices="some", residuals="some", layout="strided"),
    _case("bf16", 2, 101, 16, indices="table", norm_offset=1.0, eps=(1e-5, 0.3)),
    _case("bf16", 3, 64, 16, indices="shared", layout="packed", residuals="all"),
    _case("bf16", 2, 64, 3, indices="none-in-range", bias="dtype"),
    _case("bf16", 2, 64, 8, indices="table", residuals="all", norm_offset=1.0),
    _case("bf16", 2, 64, 0, "none", indices="shared"),
    _case("fp16", 3, 101, 7, "none", indices="each"),
    _case("fp16", 2, 101, 16, indices="table", index_dtype=torch.int32),
    _case("fp32", 3, 101, 7, indices="shared", index_dtype=torch.int32, residuals="all"),
    _case("fp32", 2, 101, 16, "concat", indices="table"),
    # Bias, post norm, a weight that is a slice.
    _case("bf16", 3, 101, 7, bias="dtype"),
    _case("bf16", 3, 101, 7, bias="fp32", view=True),
    _case("bf16", 3, 64, 129, bias="dtype", D=257),
    _case("bf16", 2, 896, 3, post_norm="dtype", D=97),
    _case("bf16", 3, 101, 7, "concat", post_norm="fp32", bias="dtype", norm_offset=1.0),
    _case("bf16", 3, 101, 33, post_norm="dtype", bias="fp32", eps=EPS),
    _case("bf16", 1, 64, 7, "none", post_norm="dtype", norm_offset=1.0),
    _case("fp16", 3, 101, 7, bias="fp32", post_norm="dtype"),
    _case("fp16", 3, 101, 7, bias="dtype", view=True),
    _case("fp32", 3, 101, 7, bias="fp32", post_norm="fp32", view=True),
    # Statistics from capture_hidden.
    _case("bf16", 3, 101, 7, sum_squares=True),
    _case("bf16", 3, 101, 7, "concat", sum_squares=True, indices="shared"),
    _case("bf16", 3, 64, 8, sum_squares=True, layout="packed", norm_offset=1.0),
    _case("fp16", 3, 101, 7, sum_squares=True),
    _case("fp32", 3, 101, 7, sum_squares=True, layout="strided"),
]

# Values that strain the statistic or the formats, at sizes large enough for the averages of bench/accuracy.py's rule.
NUMBERS = [
    *(_case(dtype, 3, 896, 33, norm, D=257, data="outliers") for dtype in DTYPES for norm in ("chunk", "concat")),
    *(_case(dtype, 3, 896, 33, D=257, data="scales") for dtype in DTYPES),
    *(_case(dtype, 2, 101, 7, norm, data="scales") for dtype in DTYPES for norm in ("concat", "none")),
    *(_case(dtype, 2, 101, 7, data="tiny", gain="none") for dtype in DTYPES),
    _case("bf16", 3, 896, 129, D=257, data="outliers", residuals="all"),
    _case("bf16", 3, 896, 33, D=257, post_norm="dtype", data="outliers"),
]

CASES = [*SIZES, *FEATURES, *NUMBERS]


def _does_not_touch_the_projection(case: Case) -> Case:
    return replace(case, D=33, bias="", post_norm="", view=False)


# norm_concat has no projection: the same table, without the cases that then coincide.
NORM_CONCAT_CASES = list(dict.fromkeys(map(_does_not_touch_the_projection, CASES)))


@dataclass(frozen=True)
class Operands:
    """The tensors of a case: as the public ops take them, and spelled out per chunk for `ops.sources.formula`."""

    case: Case
    chunks: Tensor | list[Tensor]
    sources: dict[str, object]  # the keyword arguments that both ops share
    projection: dict[str, object]  # those of norm_concat_linear alone, weight included
    formula: tuple  # ops.sources.formula's arguments before `dtype`; not built by the package
    post_norm_eps: float

    @property
    def N(self) -> int:
        indices = [index for index in self.formula[7] if index is not None]
        return indices[0].shape[0] if indices else self.formula[0][0].shape[0]

    def norm_concat(self, out: Tensor | None = None) -> Tensor:
        return ek.norm_concat(self.chunks, **self.sources, out=out)

    def norm_concat_linear(self, out: Tensor | None = None) -> Tensor:
        sources = dict(self.sources)
        if self.case.post_norm and isinstance(self.case.eps, tuple):
            sources["eps"] = (*self.case.eps, self.post_norm_eps)
        return ek.norm_concat_linear(self.chunks, **sources, **self.projection, out=out)

    def tensors(self) -> list[Tensor]:
        """Every tensor that the op reads, to check afterwards that it wrote none of them."""
        values = [self.chunks, *self.sources.values(), *self.projection.values()]
        flat = [entry for value in values for entry in (value if isinstance(value, list | tuple) else [value])]
        return [entry for entry in flat if isinstance(entry, Tensor)]


@functools.cache
def operands(case: Case, device: str = "cpu") -> Operands:
    """The operands of a case, made from a seed of its own; callers must not write to them."""
    seed = sum(ord(letter) * (place + 1) for place, letter in enumerate(case.id))
    generator = torch.Generator().manual_seed(seed)
    make = accuracy.DATA[case.data]
    dtype = case.dtype
    lengths = _chunk_rows(case)
    values = [make(length, H, dtype, generator) for length, H in zip(lengths, case.widths, strict=True)]
    residuals = [make(length, H, dtype, generator) for length, H in zip(lengths, case.widths, strict=True)]
    keeps_residual = {"": lambda k: False, "all": lambda k: True, "some": lambda k: k % 2 == 1}[case.residuals]
    residuals = [residual if keeps_residual(k) else None for k, residual in enumerate(residuals)]
    sum_squares = torch.empty(case.T, case.K) if case.sum_squares else None
    if case.sum_squares:
        packed = torch.empty(case.T, sum(case.widths), dtype=dtype)
        slots = packed.split(list(case.widths), -1)
        for k, (value, slot) in enumerate(zip(values, slots, strict=True)):
            other = make(case.T, case.widths[k], dtype, generator)
            with environment_of(EAGLE_KERNELS_BACKEND="auto") if device == "cuda" else contextlib.nullcontext():
                # A forced GPU backend refuses these CPU tensors, which are moved to the GPU below.
                ek.capture_hidden(value, other, out=slot, sum_squares=sum_squares[:, k])
        values = list(slots)

    indices = _indices(case, lengths, generator)
    gains, gain_argument = _gains(case, generator)
    values, residuals, chunks, residual_argument = _lay_out(case, values, residuals)
    eps = list(case.eps) if isinstance(case.eps, tuple) else [case.eps]

    K_times_H = sum(case.widths)
    weight_columns = K_times_H + (5 if case.view else 0)
    weight = torch.randn(case.D, weight_columns, generator=generator) / K_times_H**0.5
    vector = {
        "": lambda: None,
        "dtype": lambda: torch.randn(case.D, generator=generator).to(dtype),
        "fp32": lambda: torch.randn(case.D, generator=generator),
    }
    move = functools.partial(_to, device=device)
    formula = (values, case.K, case.norm, gains, eps, case.norm_offset, residuals, indices, sum_squares)
    has_residual = any(residual is not None for residual in residuals)
    index_argument = None if not case.indices else indices[0] if case.indices == "shared" else indices
    needs_count = case.layout == "packed" and not isinstance(gain_argument, Tensor | list)
    needs_count = needs_count or (case.layout == "packed" and case.norm != "chunk")
    return Operands(
        case,
        move(chunks),
        {
            "norm": case.norm,
            "norm_weight": move(gain_argument),
            "eps": case.eps,
            "norm_offset": case.norm_offset,
            "residuals": move(residual_argument) if has_residual else None,
            "indices": move(index_argument),
            "sum_squares": move(sum_squares),
            "num_chunks": case.K if needs_count else None,
        },
        {
            "weight": move(weight.to(dtype))[:, :K_times_H],
            "bias": move(vector[case.bias]()),
            "post_norm_weight": move(vector[case.post_norm]()),
        },
        move(formula),
        0.7 if isinstance(case.eps, tuple) else case.eps,
    )


def _to(value: object, device: str) -> object:
    if isinstance(value, Tensor):
        return value if value.device.type == device else value.to(device)
    if isinstance(value, list | tuple):
        return type(value)(_to(entry, device) for entry in value)
    return value


TABLE_ROWS = 50


def _chunk_rows(case: Case) -> list[int]:
    lengths = [case.T] * case.K
    if case.indices == "table":
        lengths[0] = TABLE_ROWS
    if case.indices == "each":
        lengths = [case.T + k for k in range(case.K)]
    return lengths


def weight_of_every_code(format: str, shift: int, width: int = 32) -> ek.QuantizedWeight:
    """[256, width]: row d has code d in every column and, where scales are bytes, the scale d - shift."""
    kind = FORMATS[format]
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8).unsqueeze(1)
    scales = torch.full((256, 1), 3.0)
    if kind.scales[0].itemsize == 1:
        scales = codes.roll(shift, 0).repeat(1, width // kind.block[1]).view(kind.scales[0])
    codes = codes.repeat(1, width // kind.columns_per_code).view(kind.codes)
    return ek.QuantizedWeight(codes, scales, format, 1.0 if format == "nvfp4" else None)


def check_every_value(result: Tensor, expected: Tensor, multiplies_codes: bool) -> None:
    """Of products with the identity. Where scales multiply codes, a column of the result with a value beyond its
    dtype's range may have NaN for 0 * infinity in place of its other values."""
    beyond = expected.isinf() & multiplies_codes
    within = ~beyond.any(0)
    assert torch.equal(result.isnan()[:, within], expected.isnan()[:, within])
    assert torch.equal(result.nan_to_num(7)[:, within], expected.nan_to_num(7)[:, within])
    assert within.any() and not result[beyond].isfinite().any()


def index(rows: int, length: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Indices into `rows` rows, every fourth one out of range: -1, rows, the least and greatest of the type, 2^40."""
    limits = torch.iinfo(dtype)
    out_of_range = [-1, rows, limits.min, limits.max] + ([2**40, -(2**40)] if dtype == torch.int64 else [])
    indices = torch.randint(0, max(rows, 1), (length,), generator=generator).to(dtype)
    for i, place in enumerate(range(1, length, 4)):
        indices[place] = out_of_range[i % len(out_of_range)]
    return indices


def _indices(case: Case, lengths: list[int], generator: torch.Generator) -> list[Tensor | None]:
    def make(rows: int, length: int) -> Tensor:
        return index(rows, length, case.index_dtype, generator)

    N = case.T + 11 if case.T else 0  # more output rows than source rows
    match case.indices:
        case "":
            return []
        case "shared":
            return [make(case.T, N)] * case.K
        case "none-in-range":
            return [torch.tensor([-1, case.T, 2**40])] * case.K
        case "each":
            return [make(rows, N) for rows in lengths]
        case "some":
            return [make(case.T, case.T) if k % 2 == 0 else None for k in range(case.K)]
        case "table":
            return [make(TABLE_ROWS, case.T), *[None] * (case.K - 1)]
    raise AssertionError(case.indices)


def _gains(case: Case, generator: torch.Generator) -> tuple[list[Tensor], Tensor | list[Tensor] | None]:
    """(one gain per chunk or the one of the concat, the public argument)."""
    if case.gain == "none" or case.norm == "none":
        return [], None
    dtype = torch.float32 if case.gain == "fp32" else case.dtype
    gains = [(torch.rand(H, generator=generator) + 0.5 - case.norm_offset).to(dtype) for H in case.widths]
    if case.norm == "concat":
        return [torch.cat(gains)], torch.cat(gains)
    as_list = case.gain == "list" or len(set(case.widths)) > 1
    return gains, gains if as_list else torch.stack(gains)


def _lay_out(case: Case, values: list[Tensor], residuals: list[Tensor | None]) -> tuple:
    """(values, residuals) per chunk for the formula, and the public arguments in the layout of the case."""
    if case.layout == "packed":
        given = [residual for residual in residuals if residual is not None]
        packed = torch.cat(values, -1)
        return values, residuals, packed, torch.cat(given, -1) if given else None
    if case.layout == "row":
        rows = [value[0] for value in values]
        return values, residuals, rows, [None if residual is None else residual[0] for residual in residuals]
    if case.layout == "strided":
        values = [_strided(value) for value in values]
        residuals = [None if residual is None else _strided(residual) for residual in residuals]
    return values, residuals, values, residuals


def _strided(rows: Tensor) -> Tensor:
    """The same rows as a column slice of a wider buffer of NaN, starting off every alignment."""
    buffer = rows.new_full((rows.shape[0], rows.shape[1] + 9), float("nan"))
    buffer[:, 3:-6] = rows
    return buffer[:, 3:-6]
