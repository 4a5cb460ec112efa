"""Calls that the compiled primitives refuse: one for every check of csrc, as arguments of the public op.

`tests/test_primitives.py` runs each through the primitive; the line in the message shows that every check has its call.
The public ops take the same table: each op must refuse each of its calls with a worded error.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

import eagle_kernels as ek

# H = D: `out` of norm_concat_linear can stand for a chunk.
T, K, H, D, V = 4, 3, 8, 8, 20
NAN, INF = float("nan"), float("inf")
NOT_FINITE = (NAN, INF, -INF, 1e39, -1e39)  # in fp32


@dataclass(frozen=True)
class BadCall:
    """A call of `op` that works but for `change`, which gets the good arguments and returns those that differ."""

    op: str
    name: str
    change: Callable[[dict], dict]
    base: dict = field(default_factory=dict)  # what differs from the op's good call before `change`
    direct_only: str | None = None  # why no public call gets here
    backends: tuple[str, ...] = ("cpu", "cuda")  # whose primitives refuse it

    @property
    def id(self) -> str:
        return f"{self.op}-{self.name}"

    def arguments(self) -> dict:
        arguments = {name: make() if callable(make) else make for name, make in (GOOD[self.op] | self.base).items()}
        return arguments | self.change(arguments)


def rows(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


# Not a public op: norm_concat_linear calls this primitive where its weight is a QuantizedWeight.
QUANTIZED = "norm_concat_linear_quantized"
# Not a public op either: `ContextKV` passes it a record.
CONTEXT_KV = "store_context_kv"

_SOURCES = {
    "chunks": lambda: [rows(T, H) for _ in range(K)],
    "num_chunks": None,
    "norm": "chunk",
    "norm_weight": lambda: rows(K, H),
    "eps": 1e-6,
    "norm_offset": 0.0,
    "residuals": None,
    "indices": None,
    "sum_squares": None,
}
# By op: its arguments, or functions that make them.
GOOD: dict[str, dict] = {
    "capture_hidden": {
        "hidden": lambda: rows(T, H),
        "residual": lambda: rows(T, H),
        "out": lambda: rows(T, H),
        "sum_squares": lambda: torch.randn(T),
    },
    "add_rms_norm": {
        "hidden": lambda: rows(T, H),
        "residual": lambda: rows(T, H),
        "weight": lambda: rows(H),
        "eps": 1e-6,
        "norm_offset": 0.0,
        "out": lambda: rows(T, H),
        "out_sum": lambda: rows(T, H),
    },
    "vocab_parallel_embedding": {
        "ids": lambda: torch.tensor([1, 2, 15, -1]),
        "weight": lambda: rows(V, H),
        "shard": lambda: ek.VocabShard.build(V, tp_rank=0, tp_size=1, padding_size=4, org_num_embeddings=16),
        "scale": None,
        "out": lambda: rows(T, H),
    },
    "norm_concat": _SOURCES | {"out": lambda: rows(T, K * H)},
    "norm_concat_linear": _SOURCES
    | {"weight": lambda: rows(D, K * H), "bias": None, "post_norm_weight": None, "out": lambda: rows(T, D)},
    CONTEXT_KV: {
        "kv": lambda: rows(T, 2 * 2 * H),
        "k_norm_weight": lambda: rows(H),
        "eps": 1e-6,
        "norm_offset": 0.0,
        "norm_width": H,
        "cos_sin": lambda: torch.rand(9, 6),
        "rotary_begin": 1,
        "interleaved": False,
        "positions": lambda: torch.arange(T),
        "slots": lambda: torch.tensor([4, 0, -1, 2]),
        "k_cache": lambda: rows(5, 2, H),
        "v_cache": lambda: rows(5, 2, H),
    },
    QUANTIZED: _SOURCES
    | {
        "codes": lambda: rows(D, K * H).to(torch.float8_e4m3fn),
        "scales": lambda: torch.rand(D, K * H // 16 + 1),
        "global_scale": lambda: torch.ones(1),
        "block": (1, 16),
        "bias": None,
        "post_norm_weight": None,
        "out": lambda: rows(T, D),
    },
}

# What can be wrong with one tensor, by name: the tensor as it should be -> the bad one.
WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "device": lambda good: good.to("meta"),
    "dtype": lambda good: good.half() if good.dtype == torch.bfloat16 else good.bfloat16(),
    "dimensions": lambda good: good.unsqueeze(0),
    "shape": lambda good: torch.cat([good, good[..., :1]], -1),
    "rows": lambda good: torch.cat([good, good[:1]]),
    "last_stride": lambda good: good.t().contiguous().t(),
    "row_stride": lambda good: good[:1].expand_as(good),
    "rows_share_a_column": lambda good: rows(good.numel()).as_strided(good.shape, (good.shape[1] - 1, 1)),
    "strides": lambda good: torch.stack([good, good], -1)[..., 0],
    "memory": lambda good: _released(good.clone()),
}
OPERAND = ("device", "dtype", "dimensions", "last_stride", "memory")
OUTPUT = (*OPERAND, "row_stride", "rows_share_a_column")
VECTOR = ("device", "dtype", "dimensions", "shape", "strides", "memory")


def _released(tensor: Tensor) -> Tensor:
    """As FSDP leaves a parameter between uses: null stood for an operand that is absent, or was read."""
    tensor.untyped_storage().resize_(0)
    return tensor


def _wrong(op: str, path: str, kinds: tuple[str, ...], base: dict | None = None) -> Iterator[BadCall]:
    """`path` names an argument, or an entry of one: chunks.1"""
    argument, _, entry = path.partition(".")

    def changed(good: dict, how: Callable[[Tensor], Tensor]) -> dict:
        if not entry:
            return {argument: how(good[argument])}
        values = list(good[argument])
        values[int(entry)] = how(values[int(entry)])
        return {argument: values}

    for kind in kinds:
        name = path if base is None else f"{path}_of_{'_'.join(base)}"
        yield BadCall(op, f"{name}-{kind}", lambda good, how=WRONG[kind]: changed(good, how), base or {})


def _first(tensor: Tensor, dtype: torch.dtype, *shape: int) -> Tensor:
    """The first bytes of a dense tensor, as a tensor of another dtype and shape."""
    return tensor.view(dtype).flatten()[: torch.Size(shape).numel()].view(shape)


def _replaced(values: list, entry: int, value: object) -> list:
    return [*values[:entry], value, *values[entry + 1 :]]


def _source_calls(op: str) -> Iterator[BadCall]:
    def bad(name: str, change: Callable[[dict], dict], direct_only: str | None = None, **base: object) -> BadCall:
        return BadCall(op, name, change, base, direct_only)

    per_chunk = {"norm_weight": lambda: [rows(H) for _ in range(K)]}
    packed = {"chunks": lambda: rows(T, K * H), "num_chunks": K}
    columns = K * H if op == "norm_concat" else D
    residuals = {"residuals": lambda: [None, rows(T, H), None]}
    indices = {"indices": lambda: torch.arange(T)}
    sum_squares = {"sum_squares": lambda: torch.rand(T, K)}

    yield bad("chunks-none", lambda good: {"chunks": [], "norm_weight": None})
    yield bad("num_chunks", lambda good: {"num_chunks": K - 1})
    yield bad("norm", lambda good: {"norm": "mean"})
    yield bad("gain_without_norm", lambda good: {"norm": "none"})
    yield bad("statistics_without_norm", lambda good: {"norm": "none", "norm_weight": None}, **sum_squares)
    yield bad("chunks-float64", lambda good: {"chunks": [rows(T, H).double()] * K})
    yield from _wrong(op, "out", OUTPUT)
    yield from _wrong(op, "chunks.0", ("dimensions", "last_stride", "memory"))
    yield from _wrong(op, "chunks.1", OPERAND)
    yield bad("chunks-packed_columns", lambda good: {"chunks": rows(T, K * H + 1)}, num_chunks=K)
    yield bad("chunks-packed_dimensions", lambda good: {"chunks": rows(1, T, K * H)}, num_chunks=K)
    yield bad("chunks-packed_nothing", lambda good: {"chunks": rows(T, 0), "norm_weight": None}, num_chunks=2**62)
    yield bad("chunks-empty_width", lambda good: {"chunks": [*good["chunks"][:2], rows(T, 0)]}, **per_chunk)
    too_wide = 2**31 - 4095 - (K - 1) * H
    yield bad("chunks-int32_columns", lambda good: {"chunks": [*good["chunks"][:2], rows(0, too_wide)]}, **per_chunk)
    yield bad("chunks-rows", lambda good: {"chunks": [*good["chunks"][:2], rows(T + 1, H)]})
    yield bad("chunks-rows_of_out", lambda good: {"out": rows(T + 1, columns)})
    yield bad(
        "chunks-rows_beside_an_index",
        lambda good: {"chunks": [*good["chunks"][:2], rows(T + 1, H)]},
        indices=lambda: [torch.arange(T), None, None],
    )
    yield bad("chunks-overlap", lambda good: {"chunks": _replaced(good["chunks"], 1, good["out"][:, :H])})
    # Rows with a stride of 0.
    yield bad(
        "chunks-repeated_row_of_out",
        lambda good: {
            "out": (out := rows(1, columns)),
            "chunks": _replaced(good["chunks"], 1, out[:, :H].expand(T, H)),
        },
        indices=lambda: torch.zeros(1).long(),
    )
    # Adjacent columns of one buffer, except that one column is in both.
    yield bad(
        "chunks-shifted",
        lambda good: {"chunks": [(wide := rows(T, H + columns))[:, :H]] * K, "out": wide[:, H - 1 : -1]},
    )

    yield bad("residuals-count", lambda good: {"residuals": [rows(T, H)]})
    yield from _wrong(op, "residuals.1", (*OPERAND, "shape", "rows"), residuals)
    yield bad("residuals-overlap", lambda good: {"residuals": [good["out"][:, :H], None, None]})
    yield bad("residuals-packed_shape", lambda good: {"residuals": [rows(T, H)]}, **packed)

    yield bad("indices-count", lambda good: {"indices": [torch.arange(T)] * 2})
    yield bad("indices-count_packed", lambda good: {"indices": [torch.arange(T)] * K}, **packed)
    yield from _wrong(op, "indices", ("device", "dtype", "shape", "strides", "memory"), indices)
    yield bad("indices-dimensions", lambda good: {"indices": torch.zeros(T, 1).long()})
    yield bad("indices-overlap", lambda good: {"indices": _first(good["out"], torch.int64, T)})

    yield bad("norm_weight-count", lambda good: {"norm_weight": good["norm_weight"][:2]}, **per_chunk)
    yield from _wrong(op, "norm_weight", ("device", "dtype", "shape", "strides", "memory"))
    yield bad("norm_weight-flat", lambda good: {"norm_weight": rows(K * H)})
    yield bad("norm_weight-widths", lambda good: {"chunks": [rows(T, H - 1), rows(T, H + 1), rows(T, H)]})
    yield bad("norm_weight-concat", lambda good: {"norm": "concat"})
    yield bad("norm_weight-overlap", lambda good: {"norm_weight": _first(good["out"], torch.bfloat16, K, H)})
    yield from _wrong(op, "norm_weight.1", VECTOR, per_chunk)
    yield bad(
        "norm_weight-mixed_dtypes",
        lambda good: {"norm_weight": _replaced(good["norm_weight"], 1, torch.rand(H))},
        **per_chunk,
    )
    yield bad(
        "norm_weight-list_overlap",
        lambda good: {"norm_weight": _replaced(good["norm_weight"], 2, good["out"][1, :H])},
        **per_chunk,
    )

    yield bad("eps-count", lambda good: {"eps": [1e-6] * 2})
    yield bad("eps-count_concat", lambda good: {"eps": [1e-6] * K}, norm="concat", norm_weight=None)
    for eps in (NAN, INF, -1e-6, 1e39):
        yield bad(f"eps-{eps}", lambda good, eps=eps: {"eps": eps})
        yield bad(f"eps-list_{eps}", lambda good, eps=eps: {"eps": [1e-6, eps, 0.0]})
    for offset in NOT_FINITE:
        yield bad(f"norm_offset-{offset}", lambda good, offset=offset: {"norm_offset": offset})

    yield from _wrong(op, "sum_squares", (*OPERAND, "shape", "rows"), sum_squares)
    yield bad("sum_squares-overlap", lambda good: {"sum_squares": _first(good["out"], torch.float32, T, K)})


def _norm_concat_calls() -> Iterator[BadCall]:
    op = "norm_concat"
    yield from _source_calls(op)
    yield from _wrong(op, "out", ("shape",))
    yield BadCall(op, "cuda-count", lambda good: {"chunks": [rows(T, 8)] * 9, "out": rows(T, 72)},
                  {"norm_weight": None}, "the plan leaves more chunks to another backend", ("cuda",))  # fmt: skip


def _norm_concat_linear_calls() -> Iterator[BadCall]:
    op = "norm_concat_linear"
    yield from _source_calls(op)
    yield from _wrong(op, "weight", (*OPERAND, "shape", "rows"))
    yield BadCall(op, "weight-overlap", lambda good: {"out": _first(good["weight"], torch.bfloat16, T, D)})
    for name in ("bias", "post_norm_weight"):
        yield from _wrong(op, name, VECTOR, {name: lambda: rows(D)})
        yield BadCall(op, f"{name}-overlap", lambda good, name=name: {name: good["out"][1]})
    for eps in (NAN, INF, -1e-6, 1e39):
        yield BadCall(op, f"post_norm_eps-{eps}", lambda good, eps=eps: {"eps": [1e-6, eps]},
                      {"post_norm_weight": lambda: rows(D)})  # fmt: skip

    planned = "the plan gives such a call another method"
    unaligned = lambda good: {"weight": rows(D, K * H + 1)[:, :-1]}  # noqa: E731
    fp32 = lambda good: {  # noqa: E731
        "chunks": [torch.randn(T, H) for _ in range(K)],
        "norm_weight": None,
        "weight": torch.randn(D, K * H),
        "out": torch.randn(T, D),
    }
    nine = lambda good: {"chunks": [rows(T, 8)] * 9, "weight": rows(D, 72)}  # noqa: E731
    yield BadCall(op, "cuda-count", nine, {"norm_weight": None}, planned, backends=("cuda",))
    yield BadCall(op, "cuda-fp32", fp32, direct_only=planned, backends=("cuda",))
    yield BadCall(
        op, "cuda-post_norm", lambda good: {"post_norm_weight": rows(D)}, direct_only=planned, backends=("cuda",)
    )
    yield BadCall(op, "cuda-alignment", unaligned, direct_only=planned, backends=("cuda",))


def _norm_concat_linear_quantized_calls() -> Iterator[BadCall]:
    op, columns = QUANTIZED, K * H

    def bad(name: str, change: Callable[[dict], dict]) -> BadCall:
        return BadCall(op, name, change)

    def nibbles(width: int) -> Tensor:
        return torch.randint(0, 256, (D, width), dtype=torch.uint8)

    def in_12_bits(**changes: Tensor | list[Tensor] | None) -> Callable[[dict], dict]:
        good = {"codes": nibbles(-(-columns // 128) * 192), "scales": torch.zeros(D, 36, dtype=torch.uint8)}
        return lambda _: good | {"global_scale": None, "block": (1, columns)} | changes

    floats = [rows(T, H).float() for _ in range(K)]
    odd = {"chunks": [rows(T, 3), rows(T, 4)], "norm_weight": None, "codes": nibbles(3)}
    calls = [
        bad("chunks-rows", lambda good: {"chunks": [*good["chunks"][:2], rows(T + 1, H)]}),
        *_wrong(op, "codes", (*OPERAND, "shape", "rows")),
        bad("codes-e5m2", lambda good: {"codes": good["codes"].to(torch.float8_e5m2)}),
        bad("codes-nibbles_of_every_column", lambda good: {"codes": nibbles(columns)}),
        bad("codes-nibbles_of_odd_width", lambda good: odd),
        bad("codes-overlap", lambda good: {"out": _first(good["codes"], torch.bfloat16, T, D)}),
        *_wrong(op, "scales", (*OPERAND, "shape", "rows")),
        bad("scales-overlap", lambda good: {"out": _first(good["scales"], torch.bfloat16, T, D)}),
        *_wrong(op, "global_scale", ("device", "dtype", "shape", "memory")),
        bad("global_scale-overlap", lambda good: {"global_scale": _first(good["out"], torch.float32, 1)}),
        bad("bias-shape", lambda good: {"bias": rows(D + 1)}),
        bad("12bit-chunks", in_12_bits(chunks=floats, norm_weight=None, out=rows(T, D).float())),
        bad("12bit-codes", in_12_bits(codes=nibbles(columns // 2))),
        bad("12bit-no_table", in_12_bits(scales=torch.zeros(D, 28, dtype=torch.uint8))),
        bad("12bit-part_of_an_exception", in_12_bits(scales=torch.zeros(D, 38, dtype=torch.uint8))),
        bad("12bit-scales_rows", in_12_bits(scales=torch.zeros(D + 1, 36, dtype=torch.uint8))),
    ]
    for block in ((0, 16), (1, 0), (1, -128), (1, 8), (1, 20)):
        calls.append(bad(f"block-{block[0]}x{block[1]}", lambda good, block=block: {"block": block}))
    for call in calls:
        yield replace(call, direct_only="a QuantizedWeight has checked itself")
    for number in (-1, 3, 1 << 40):
        yield replace(bad(f"kernel-{number}", lambda good, number=number: {"kernel": number}), direct_only="the plan's")
    planned = "the plan gives such a call another method"
    yield replace(bad("cuda-block", lambda good: {}), direct_only=planned, backends=("cuda",))


def _capture_hidden_calls() -> Iterator[BadCall]:
    op = "capture_hidden"

    def bad(name: str, change: Callable[[dict], dict]) -> BadCall:
        return BadCall(op, name, change)

    streams = {"hidden": lambda: rows(T, 4, H), "residual": None}

    yield bad("hidden-float64", lambda good: {"hidden": good["hidden"].double()})
    yield bad("hidden-dimensions", lambda good: {"hidden": rows(1, T, 1, H)})
    yield from _wrong(op, "hidden", ("last_stride", "memory"))
    yield bad("hidden-no_streams", lambda good: {"hidden": rows(T, 0, H), "residual": None})
    yield bad("hidden-streams_last_stride", lambda good: {"hidden": rows(T, H, 4).mT, "residual": None})
    yield bad("residual-of_streams", lambda good: {"hidden": rows(T, 4, H)})
    yield BadCall(op, "out-shape_of_streams", lambda good: {"out": rows(T, H + 1)}, streams)
    yield BadCall(op, "out-a_stream", lambda good: {"out": good["hidden"][:, 3]}, streams)
    yield BadCall(
        op, "out-a_strided_stream", lambda good: {"hidden": (wide := rows(T, 6, H))[:, 1:5], "out": wide[:, 4]}, streams
    )
    yield from _wrong(op, "out", (*OUTPUT, "shape", "rows"))
    yield from _wrong(op, "residual", (*OPERAND, "shape", "rows"))
    yield bad("out-hidden", lambda good: {"out": good["hidden"]})
    yield bad("out-residual", lambda good: {"out": good["residual"]})
    yield bad("out-shifted", lambda good: {"hidden": (wide := rows(T + 1, H))[1:], "out": wide[:-1]})
    yield from _wrong(op, "sum_squares", ("device", "dtype", "dimensions", "shape", "memory"))
    yield bad("sum_squares-one_element", lambda good: {"sum_squares": torch.rand(1).expand(T)})
    yield bad("sum_squares-out", lambda good: {"sum_squares": _first(good["out"], torch.float32, T)})
    yield bad("sum_squares-column_of_out", lambda good: {"sum_squares": good["out"].view(torch.float32)[:, 1]})
    yield bad("sum_squares-hidden", lambda good: {"sum_squares": good["hidden"].view(torch.float32)[:, 0]})
    yield bad("sum_squares-residual", lambda good: {"sum_squares": good["residual"].view(torch.float32)[:, -1]})


def _add_rms_norm_calls() -> Iterator[BadCall]:
    op = "add_rms_norm"
    yield BadCall(op, "hidden-float64", lambda good: {"hidden": good["hidden"].double()})
    yield from _wrong(op, "hidden", ("dimensions", "last_stride", "memory"))
    yield from _wrong(op, "residual", (*OPERAND, "shape", "rows"))
    yield from _wrong(op, "weight", VECTOR)
    for name in ("out", "out_sum"):
        yield from _wrong(op, name, (*OUTPUT, "shape", "rows"))
        for read in ("hidden", "residual"):
            yield BadCall(op, f"{name}-{read}", lambda good, name=name, read=read: {name: good[read]})
        yield BadCall(op, f"{name}-weight", lambda good, name=name: {"weight": good[name][1]})
    yield BadCall(op, "out-out_sum", lambda good: {"out": good["out_sum"]})
    for eps in (NAN, INF, -1e-6, 1e39):
        yield BadCall(op, f"eps-{eps}", lambda good, eps=eps: {"eps": eps})
    for offset in NOT_FINITE:
        yield BadCall(op, f"norm_offset-{offset}", lambda good, offset=offset: {"norm_offset": offset})


def _vocab_parallel_embedding_calls() -> Iterator[BadCall]:
    op = "vocab_parallel_embedding"

    def bad(name: str, change: Callable[[dict], dict]) -> BadCall:
        return BadCall(op, name, change)

    yield bad("weight-float64", lambda good: {"weight": good["weight"].double()})
    yield from _wrong(op, "weight", ("dimensions", "last_stride", "memory"))
    yield from _wrong(op, "ids", ("device", "dtype", "memory"))
    # The public op flattens ids of any shape before this check; it does not flatten `out`.
    any_shape = "public ids have any shape"
    yield BadCall(op, "ids-dimensions", lambda good: {"ids": torch.zeros(T, 1).long()}, {}, any_shape)
    yield from _wrong(op, "out", (*OUTPUT, "shape", "rows"))
    yield bad("out-weight", lambda good: {"out": good["weight"][:T]})
    yield bad("out-ids", lambda good: {"ids": _first(good["out"], torch.int64, T)})
    yield bad("out-strided_ids", lambda good: {"ids": good["out"].view(torch.int64)[:, 1]})
    scale = {"scale": lambda: torch.tensor(2.0)}
    yield from _wrong(op, "scale", ("device", "memory"), scale)
    yield bad("scale-integer", lambda good: {"scale": torch.tensor(2)})
    yield bad("scale-dimensions", lambda good: {"scale": torch.ones(1)})
    yield bad("scale-out", lambda good: {"scale": good["out"][1, 1]})
    for name, bounds in {
        "original-negative": (-(2**63), 2**63 - 1, 0, 0, 0),
        "original-descending": (5, 3, 0, 0, 0),
        "original-rows": (0, V + 1, 0, 0, 0),
        "added-negative": (0, 12, -(2**63), 2**63 - 1, 12),
        "added-descending": (0, 12, 14, 12, 12),
        "added-rows": (0, 12, 0, V + 1, 0),
        "added-row": (0, 12, 0, 2, 2**63 - 1),
        "added-behind": (0, 12, 0, 2, V - 1),
        "added-before": (0, 12, 0, 2, -1),
    }.items():
        laid_out = "a VocabShard lays its rows out, and the public op compares weight with it"
        yield BadCall(op, f"shard-{name}", lambda good, bounds=bounds: {"shard": bounds}, {}, laid_out)


def _cache_over(good: dict, name: str, other: str) -> dict:
    """The input `other` in the memory of a cache."""
    memory = good[name].view(-1)
    in_memory = {
        "positions": memory.view(torch.int64)[:T],
        "slots": memory.view(torch.int64)[-T:],
        "cos_sin": memory[:54].view(9, 6),
        "k_norm_weight": memory[-H:],
    }
    return {other: in_memory[other]}


def _store_context_kv_calls() -> Iterator[BadCall]:
    op = CONTEXT_KV

    def bad(name: str, change: Callable[[dict], dict]) -> BadCall:
        return BadCall(op, name, change)

    calls = [
        bad("kv-float64", lambda good: {"kv": good["kv"].double()}),
        *_wrong(op, "kv", ("dimensions", "last_stride", "shape", "memory")),
        bad("kv-of_k_alone", lambda good: {"kv": rows(T, 3 * H)}),
    ]
    for name in ("k_cache", "v_cache"):
        calls += _wrong(op, name, ("device", "dtype", "dimensions", "memory"))
        calls += [
            bad(f"{name}-last_stride", lambda good, name=name: {name: rows(5, H, 2).mT}),
            bad(f"{name}-kv", lambda good, name=name: {name: good["kv"].view(-1)[: 4 * H].view(2, 2, H)}),
            bad(f"{name}-between_rows", lambda good, name=name: {
                name: (wide := rows(T, 6 * H))[:, 4 * H :].unflatten(1, (2, H)), "kv": wide[:, : 4 * H]}),
        ]  # fmt: skip
        for other in ("positions", "slots", "cos_sin", "k_norm_weight"):
            calls.append(
                bad(f"{name}-over_{other}", lambda good, name=name, other=other: _cache_over(good, name, other))
            )
        for strides in ((0, H, 1), (2 * H, 0, 1), (H, H, 1), (2 * H - 1, H, 1), (H, 5 * H - 1, 1)):
            calls.append(
                bad(f"{name}-strides{strides}", lambda good, name=name, strides=strides: {
                    name: good[name].as_strided((5, 2, H), strides)})
            )  # fmt: skip
    for name in ("positions", "slots"):
        calls += _wrong(op, name, ("device", "dtype", "dimensions", "shape", "strides", "memory"))
    wide = {"k_cache": rows(1, 1, 1025), "v_cache": None, "kv": rows(T, 1025)}
    calls += [
        bad("k_cache-head", lambda good: wide),
        bad("v_cache-slots", lambda good: {"v_cache": rows(6, 2, H)}),
        bad("v_cache-heads", lambda good: {"v_cache": rows(5, 3, H)}),
        bad("norm_width-negative", lambda good: {"norm_width": -1, "k_norm_weight": None}),
        bad("norm_width-beyond", lambda good: {"norm_width": H + 1, "k_norm_weight": rows(H + 1)}),
        *_wrong(op, "k_norm_weight", VECTOR),
        *_wrong(op, "cos_sin", ("device", "dimensions", "last_stride", "memory")),
        bad("cos_sin-float64", lambda good: {"cos_sin": good["cos_sin"].double()}),
        bad("cos_sin-odd", lambda good: {"cos_sin": torch.rand(9, 5)}),
        bad("cos_sin-beyond", lambda good: {"cos_sin": torch.rand(9, 8)}),
        bad("rotary_begin-negative", lambda good: {"rotary_begin": -1}),
        bad("rotary_begin-beyond", lambda good: {"rotary_begin": 2**62}),
    ]
    for eps in (NAN, INF, -1e-6, 1e39):
        calls.append(bad(f"eps-{eps}", lambda good, eps=eps: {"eps": eps}))
    for offset in NOT_FINITE:
        calls.append(bad(f"norm_offset-{offset}", lambda good, offset=offset: {"norm_offset": offset}))
    for call in calls:
        yield replace(
            call, direct_only="its record is no public call: tests/test_store_context_kv.py", backends=("cpu",)
        )


BAD_CALLS: tuple[BadCall, ...] = (
    *_store_context_kv_calls(),
    *_capture_hidden_calls(),
    *_add_rms_norm_calls(),
    *_vocab_parallel_embedding_calls(),
    *_norm_concat_calls(),
    *_norm_concat_linear_calls(),
    *_norm_concat_linear_quantized_calls(),
)
