"""Every error of the public ops: its type, and a message that names the op, what it got and what it expected.

Each row changes one argument of a call that works. A call that raises has written nothing (docs/design.md, Errors).
"""

import re
from collections.abc import Callable, Iterator
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import eagle_kernels as ek
from backends import environment_of
from guards import same_bits

T, K, H, D, V = 4, 3, 8, 5, 20


def rows(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape).to(dtype)


def sources() -> dict:
    return {"chunks": [rows(T, H) for _ in range(K)], "out": rows(T, K * H)}


def linear() -> dict:
    return {**sources(), "weight": rows(D, K * H), "out": rows(T, D)}


def packed() -> dict:
    return {"chunks": rows(T, K * H), "norm_weight": rows(K, H), "out": rows(T, K * H)}


def one_row() -> dict:
    return {"chunks": [rows(H), rows(H)], "out": rows(2 * H)}


def capture() -> dict:
    return {"hidden": rows(T, H), "residual": rows(T, H), "out": rows(T, H), "sum_squares": torch.randn(T)}


def add_norm() -> dict:
    names = ("hidden", "residual", "out", "out_sum")
    return {**{name: rows(T, H) for name in names}, "weight": rows(H)}


def embedding() -> dict:
    shard = ek.VocabShard.build(V, tp_rank=0, tp_size=2, padding_size=4)
    return {"ids": torch.tensor([1, 2, 3]), "weight": rows(shard.rows, H), "shard": shard, "out": rows(3, H)}


CALLS = {
    "norm_concat": (ek.norm_concat, sources),
    "norm_concat packed": (ek.norm_concat, packed),
    "norm_concat one row": (ek.norm_concat, one_row),
    "norm_concat_linear": (ek.norm_concat_linear, linear),
    "capture_hidden": (ek.capture_hidden, capture),
    "add_rms_norm": (ek.add_rms_norm, add_norm),
    "vocab_parallel_embedding": (ek.vocab_parallel_embedding, embedding),
}


BF16, FP32 = "torch.bfloat16", "torch.float32"
SUPPORTED = "torch.bfloat16 or torch.float16 or torch.float32"
PER_CHUNK = [rows(H), rows(H), rows(H)]

# (call, changed arguments or a function of the call's arguments, exception, message after "op: ").
SOURCE_ERRORS = [
    ({"norm": "mean"}, ValueError, "norm is 'mean', expected one of ('none', 'chunk', 'concat')"),
    ({"norm": None}, ValueError, "norm is None, expected one of ('none', 'chunk', 'concat')"),
    ({"chunks": []}, ValueError, "chunks is empty, expected K >= 1 tensors"),
    ({"chunks": 5}, TypeError, "chunks is a int, expected a tensor or a sequence of tensors"),
    ({"num_chunks": 2}, ValueError, "num_chunks is 2, expected 3, because chunks has that many"),
    ({"chunks": [rows(T, H), [1.0]]}, TypeError, "chunks[1] is a list, expected a torch.Tensor"),
    ({"chunks": [torch.zeros(T, H).long()]}, TypeError, f"chunks[0] has dtype torch.int64, expected {SUPPORTED}"),
    (
        {"chunks": [rows(T, H), rows(T, H, dtype=torch.float16)]},
        TypeError,
        f"chunks[1] has dtype torch.float16, expected {BF16}, because chunks[0] has dtype {BF16}",
    ),
    ({"chunks": [rows(2, T, H)]}, ValueError, "chunks[0] has shape (2, 4, 8), expected [T, H] or [H]"),
    (
        {"chunks": [rows(T, H), rows(H)]},
        ValueError,
        "chunks[1] has shape (8,), expected 2 dimensions, because chunks[0] has that many",
    ),
    ({"chunks": [rows(H, T).t()]}, ValueError, "chunks[0] has strides (1, 4), expected a last stride of 1"),
    ({"chunks": [rows(T, 0)]}, ValueError, "chunks[0] has shape (4, 0), expected (T, H) with H >= 1"),
    (
        {"chunks": [rows(T, H), rows(T, H).to("meta")]},
        ValueError,
        "chunks[1] is on meta, expected cpu, because chunks[0] is there",
    ),
    (
        {"chunks": [rows(T, H), rows(T + 1, H)]},
        ValueError,
        "chunks[1] has shape (5, 8), expected (4, H), because it has no index and N rows are asked for",
    ),
    # residuals
    ({"residuals": 5}, TypeError, "residuals is a int, expected a tensor or a sequence of tensors or None"),
    ({"residuals": [rows(T, H)]}, ValueError, "residuals has 1 entries, expected 3, one per chunk"),
    (
        {"residuals": [None, rows(T, H + 1), None]},
        ValueError,
        "residuals[1] has shape (4, 9), expected (4, 8), because chunks[1] has that shape",
    ),
    (
        {"residuals": [None, None, rows(T, H, dtype=torch.float32)]},
        TypeError,
        f"residuals[2] has dtype {FP32}, expected {BF16}, because chunks[2] has dtype {BF16}",
    ),
    ({"residuals": [None, None, 1.0]}, TypeError, "residuals[2] is a float, expected a torch.Tensor"),
    (
        {"residuals": [None, None, rows(H, T).t()]},
        ValueError,
        "residuals[2] has strides (1, 4), expected a last stride of 1",
    ),
    # indices
    ({"indices": 5}, TypeError, "indices is a int, expected a tensor or a sequence of tensors or None"),
    (
        {"indices": [torch.arange(T)] * 2},
        ValueError,
        "indices has 2 entries, expected one for all chunks or K=3",
    ),
    ({"indices": [torch.arange(T), [0, 1], None]}, TypeError, "indices[1] is a list, expected a torch.Tensor"),
    (
        {"indices": torch.arange(T).short()},
        TypeError,
        "indices[0] has dtype torch.int16, expected torch.int32 or torch.int64",
    ),
    (
        {"indices": rows(T)},
        TypeError,
        f"indices[0] has dtype {BF16}, expected torch.int32 or torch.int64",
    ),
    ({"indices": torch.arange(T).view(2, 2)}, ValueError, "indices[0] has shape (2, 2), expected (N,)"),
    (
        {"indices": torch.arange(2 * T)[::2]},
        ValueError,
        "indices[0] has strides (2,), expected a last stride of 1",
    ),
    (
        {"indices": torch.arange(T).to("meta")},
        ValueError,
        "indices[0] is on meta, expected cpu, because chunks[0] is there",
    ),
    (
        {"indices": [torch.arange(3), None, torch.arange(T)]},
        ValueError,
        "indices[2] has shape (4,), expected (3,), because all chunks give the same N rows",
    ),
    (
        {"indices": [torch.arange(3), None, None]},
        ValueError,
        "chunks[1] has shape (4, 8), expected (3, H), because it has no index and N rows are asked for",
    ),
    # norm_weight
    (
        {"norm": "none", "norm_weight": rows(K, H)},
        ValueError,
        "norm_weight is given, expected None, because norm is 'none'",
    ),
    ({"norm_weight": 1.0}, TypeError, "norm_weight is a float, expected a tensor or a sequence of tensors"),
    ({"norm_weight": rows(K, H + 1)}, ValueError, "norm_weight has shape (3, 9), expected (K, H) = (3, 8)"),
    ({"norm_weight": rows(K * H)}, ValueError, "norm_weight has shape (24,), expected (K, H) = (3, 8)"),
    (
        {"norm_weight": rows(K, H, dtype=torch.float16)},
        TypeError,
        f"norm_weight has dtype torch.float16, expected {BF16} or {FP32}, because chunks[0] has dtype {BF16}",
    ),
    (
        {"norm_weight": rows(2 * K, H)[::2]},
        ValueError,
        "norm_weight has strides (16, 1), expected a contiguous tensor",
    ),
    (
        {"chunks": [rows(T, H), rows(T, H + 1)], "norm_weight": rows(2, H)},
        TypeError,
        "norm_weight is one tensor, expected a list of K=2, because the chunks have widths [8, 9]",
    ),
    ({"norm_weight": PER_CHUNK[:2]}, ValueError, "norm_weight has 2 entries, expected K=3"),
    ({"norm_weight": [*PER_CHUNK, PER_CHUNK[0]]}, ValueError, "norm_weight has 4 entries, expected K=3"),
    ({"norm_weight": [*PER_CHUNK[:2], 1]}, TypeError, "norm_weight[2] is a int, expected a torch.Tensor"),
    (
        {"norm_weight": [*PER_CHUNK[:2], rows(H - 1)]},
        ValueError,
        "norm_weight[2] has shape (7,), expected (8,) = (H,)",
    ),
    (
        {"norm_weight": [*PER_CHUNK[:2], rows(H).float()]},
        TypeError,
        f"norm_weight[2] has dtype {FP32}, expected {BF16}, because norm_weight[0] has that dtype",
    ),
    (
        {"norm": "concat", "norm_weight": PER_CHUNK},
        TypeError,
        "norm_weight is a list, expected a tensor (K*H,), because norm is 'concat'",
    ),
    (
        {"norm": "concat", "norm_weight": rows(K, H)},
        ValueError,
        "norm_weight has shape (3, 8), expected (24,) = (K*H,)",
    ),
    # eps, norm_offset
    ({"eps": [1e-6, 1e-5]}, ValueError, "eps has 2 entries, expected one, or 3 for norm='chunk'"),
    ({"norm": "concat", "eps": [1e-6] * 3}, ValueError, "eps has 3 entries, expected one, or 1 for norm='concat'"),
    ({"eps": "small"}, TypeError, "eps is a str, expected a number or a sequence of numbers"),
    ({"eps": {1e-6, 1e-5}}, TypeError, "eps is a set, expected a number or a sequence of numbers"),
    ({"eps": None}, TypeError, "eps is a NoneType, expected a number or a sequence of numbers"),
    ({"eps": [1e-6, None, 1e-6]}, TypeError, "eps[1] is a NoneType, expected a number"),
    ({"norm_offset": "one"}, TypeError, "norm_offset is a str, expected a number"),
    ({"norm_offset": float("nan")}, ValueError, "norm_offset is nan, expected a finite fp32 number"),
    ({"norm_offset": -1e39}, ValueError, "norm_offset is -1e+39, expected a finite fp32 number"),
    # sum_squares
    ({"sum_squares": [1.0]}, TypeError, "sum_squares is a list, expected a torch.Tensor"),
    ({"sum_squares": rows(T, K)}, TypeError, f"sum_squares has dtype {BF16}, expected {FP32}"),
    (
        {"sum_squares": torch.rand(T, K).to("meta")},
        ValueError,
        "sum_squares is on meta, expected cpu, because chunks[0] is there",
    ),
    (
        {"norm": "none", "sum_squares": torch.rand(T, K)},
        ValueError,
        "sum_squares is given, expected None, because norm is 'none'",
    ),
    ({"sum_squares": torch.rand(T)}, ValueError, "sum_squares has shape (4,), expected (T, K) = (4, 3)"),
    ({"sum_squares": torch.rand(T, K + 1)}, ValueError, "sum_squares has shape (4, 4), expected (T, K) = (4, 3)"),
    (
        {"sum_squares": torch.rand(K, T).t()},
        ValueError,
        "sum_squares has strides (1, 4), expected a last stride of 1",
    ),
    (
        {
            "chunks": [rows(T, H), rows(9, H)],
            "indices": [None, torch.arange(T)],
            "sum_squares": torch.rand(T, 2),
        },
        ValueError,
        "chunks[1] has shape (9, 8), expected (4, H), because sum_squares has one row per row of every chunk",
    ),
    # out
    ({"out": "buffer"}, TypeError, "out is a str, expected a torch.Tensor"),
    (
        {"out": rows(T, K * H).float()},
        TypeError,
        f"out has dtype {FP32}, expected {BF16}, because chunks[0] has dtype {BF16}",
    ),
    ({"out": rows(T, K * H).to("meta")}, ValueError, "out is on meta, expected cpu, because chunks[0] is there"),
]

ERRORS = [
    *(("norm_concat", *error) for error in SOURCE_ERRORS),
    *(("norm_concat_linear", *error) for error in SOURCE_ERRORS),
    # packed chunks and single rows
    (
        "norm_concat packed",
        {"norm_weight": None},
        ValueError,
        "num_chunks is None, expected K, or norm_weight of shape (K, H), because a packed chunks does not say where it "
        "splits",
    ),
    ("norm_concat packed", {"num_chunks": 0}, ValueError, "num_chunks is 0, expected at least 1"),
    ("norm_concat packed", {"num_chunks": 1.5}, TypeError, "num_chunks is a float, expected an int"),
    (
        "norm_concat packed",
        {"num_chunks": 5, "norm_weight": None},
        ValueError,
        "chunks has shape (4, 24), expected (T, K*H) with K*H a multiple of K=5",
    ),
    (
        "norm_concat packed",
        {"indices": [torch.arange(T)] * 3},
        ValueError,
        "indices has 3 entries, expected one, because the rows of a packed chunks are read together",
    ),
    (
        "norm_concat packed",
        {"residuals": [rows(T, H)] * 3},
        ValueError,
        "residuals has 3 entries, expected 1, one per chunk",
    ),
    (
        "norm_concat one row",
        {"indices": torch.arange(1)},
        ValueError,
        "indices is given, expected None, because chunks are single rows [H]",
    ),
    ("norm_concat one row", {"out": rows(1, 2 * H)}, ValueError, "out has shape (1, 16), expected K*H = (16,)"),
    # out of the right type
    ("norm_concat", {"out": rows(T, K * H + 1)}, ValueError, "out has shape (4, 25), expected (N, K*H) = (4, 24)"),
    ("norm_concat", {"out": rows(T + 1, K * H)}, ValueError, "out has shape (5, 24), expected (N, K*H) = (4, 24)"),
    ("norm_concat", {"out": rows(K * H, T).t()}, ValueError, "out has strides (1, 4), expected a last stride of 1"),
    (
        "norm_concat",
        lambda call: {"chunks": [call["out"][:, :H], call["out"][:, H:]]},
        ValueError,
        "out overlaps chunks[0], expected disjoint memory, because rows are written while others are read",
    ),
    (
        "norm_concat",
        lambda call: {"residuals": [None, None, call["out"][:, -H:]]},
        ValueError,
        "out overlaps residuals[2], expected disjoint memory, because rows are written while others are read",
    ),
    ("norm_concat_linear", {"out": rows(T, D + 1)}, ValueError, "out has shape (4, 6), expected (N, D) = (4, 5)"),
    (
        "norm_concat_linear",
        lambda call: (
            {"chunks": [call["chunks"][0], call["chunks"][1], rows(T, H + D)[:, :H]], "out": None}
            | (lambda wide: {"chunks": [wide[:, :H]] * 3, "out": wide[:, H - 1 : H - 1 + D]})(rows(T, H + D))
        ),
        ValueError,
        "out overlaps chunks[0], expected disjoint memory, because rows are written while others are read",
    ),
    (
        "norm_concat_linear",
        lambda call: {"out": call["weight"][:T, :D]},
        ValueError,
        "out overlaps weight, expected disjoint memory, because rows are written while others are read",
    ),
    # the projection
    ("norm_concat_linear", {"weight": None}, TypeError, "weight is a NoneType, expected a torch.Tensor"),
    (
        "norm_concat_linear",
        {"weight": rows(D, K * H).float()},
        TypeError,
        f"weight has dtype {FP32}, expected {BF16}, because chunks[0] has dtype {BF16}",
    ),
    (
        "norm_concat_linear",
        {"weight": rows(D, 2 * H)},
        ValueError,
        "weight has shape (5, 16), expected (D, K*H) = (*, 24) for K=3 chunks of H=8",
    ),
    (
        "norm_concat_linear",
        {"weight": rows(K * H)},
        ValueError,
        "weight has shape (24,), expected (D, K*H) = (*, 24) for K=3 chunks of H=8",
    ),
    (
        "norm_concat_linear",
        {"chunks": [rows(T, 3), rows(T, 4)]},
        ValueError,
        "weight has shape (5, 24), expected (D, K*H) = (*, 7) for 2 chunks",
    ),
    (
        "norm_concat_linear",
        {"weight": rows(K * H, D).t()},
        ValueError,
        "weight has strides (1, 5), expected a last stride of 1",
    ),
    (
        "norm_concat_linear",
        {"weight": rows(D, K * H).to("meta")},
        ValueError,
        "weight is on meta, expected cpu, because chunks[0] is there",
    ),
    ("norm_concat_linear", {"bias": rows(D + 1)}, ValueError, "bias has shape (6,), expected (5,) = (D,)"),
    ("norm_concat_linear", {"bias": rows(1, D)}, ValueError, "bias has shape (1, 5), expected (5,) = (D,)"),
    ("norm_concat_linear", {"bias": 0.0}, TypeError, "bias is a float, expected a torch.Tensor"),
    (
        "norm_concat_linear",
        {"bias": rows(D).half()},
        TypeError,
        f"bias has dtype torch.float16, expected {BF16} or {FP32}, because chunks[0] has dtype {BF16}",
    ),
    (
        "norm_concat_linear",
        {"bias": rows(2 * D)[::2]},
        ValueError,
        "bias has strides (2,), expected a last stride of 1",
    ),
    (
        "norm_concat_linear",
        {"post_norm_weight": rows(D - 1)},
        ValueError,
        "post_norm_weight has shape (4,), expected (5,) = (D,)",
    ),
    (
        "norm_concat_linear",
        {"post_norm_weight": rows(D), "eps": [1e-6]},
        ValueError,
        "eps has 1 entries, expected K + 1, because post_norm_weight is given and the last eps is its own",
    ),
    (
        "norm_concat_linear",
        {"post_norm_weight": rows(D), "eps": [1e-6] * 3},
        ValueError,
        "eps without the post norm's has 2 entries, expected one, or 3 for norm='chunk'",
    ),
    (
        "norm_concat_linear",
        {"out": rows(D).expand(T, D)},
        ValueError,
        "out has strides (0, 1), expected rows that do not overlap each other",
    ),
    # capture_hidden
    ("capture_hidden", {"hidden": 1}, TypeError, "hidden is a int, expected a torch.Tensor"),
    (
        "capture_hidden",
        {"hidden": rows(T, H).double()},
        TypeError,
        f"hidden has dtype torch.float64, expected {SUPPORTED}",
    ),
    (
        "capture_hidden",
        {"hidden": rows(1, 1, T, H)},
        ValueError,
        "hidden has shape (1, 1, 4, 8), expected [T, H], [T, S, H] or [H]",
    ),
    (
        "capture_hidden",
        {"hidden": rows(T, 0, H), "residual": None},
        ValueError,
        "hidden has shape (4, 0, 8), expected (T, S, H) with S >= 1, because no stream has no mean",
    ),
    (
        "capture_hidden",
        {"hidden": rows(T, 4, H)},
        ValueError,
        "residual is given, expected None, because hidden has streams, which are complete residuals",
    ),
    (
        "capture_hidden",
        {"hidden": rows(T, 4, H), "residual": None, "out": rows(T, H + 1)},
        ValueError,
        "out has shape (4, 9), expected (4, 8) = (T, H)",
    ),
    (
        "capture_hidden",
        {"hidden": (streams := rows(T, 5, H))[:, 1:], "residual": None, "out": streams[:, 4]},
        ValueError,
        "out overlaps hidden, expected disjoint memory, because rows are written while others are read",
    ),
    (
        "capture_hidden",
        {"hidden": rows(H, T).t()},
        ValueError,
        "hidden has strides (1, 4), expected a last stride of 1",
    ),
    (
        "capture_hidden",
        {"residual": rows(T, H + 1)},
        ValueError,
        "residual has shape (4, 9), expected (4, 8), because hidden has that shape",
    ),
    (
        "capture_hidden",
        {"residual": rows(T, H).float()},
        TypeError,
        f"residual has dtype {FP32}, expected {BF16}, because hidden has dtype {BF16}",
    ),
    ("capture_hidden", {"out": None}, TypeError, "out is a NoneType, expected a torch.Tensor"),
    (
        "capture_hidden",
        {"out": rows(T + 1, H)},
        ValueError,
        "out has shape (5, 8), expected (4, 8), because hidden has that shape",
    ),
    (
        "capture_hidden",
        {"out": rows(T, H).to("meta")},
        ValueError,
        "out is on meta, expected cpu, because hidden is there",
    ),
    ("capture_hidden", {"sum_squares": 0}, TypeError, "sum_squares is a int, expected a torch.Tensor"),
    ("capture_hidden", {"sum_squares": rows(T)}, TypeError, f"sum_squares has dtype {BF16}, expected {FP32}"),
    (
        "capture_hidden",
        {"sum_squares": torch.rand(T + 1)},
        ValueError,
        "sum_squares has shape (5,), expected (4,) = (T,)",
    ),
    (
        "capture_hidden",
        {"sum_squares": torch.rand(T, 1)},
        ValueError,
        "sum_squares has shape (4, 1), expected (4,) = (T,)",
    ),
    (
        "capture_hidden",
        {"sum_squares": torch.rand(T).to("meta")},
        ValueError,
        "sum_squares is on meta, expected cpu, because hidden is there",
    ),
    (
        "capture_hidden",
        {"sum_squares": torch.rand(1).expand(T)},
        ValueError,
        "sum_squares has strides (0,), expected rows that do not overlap each other",
    ),
    (
        "capture_hidden",
        lambda call: {"out": call["hidden"]},
        ValueError,
        "out overlaps hidden, expected disjoint memory, because rows are written while others are read",
    ),
    (
        "capture_hidden",
        lambda call: {"out": call["residual"]},
        ValueError,
        "out overlaps residual, expected disjoint memory, because rows are written while others are read",
    ),
    # add_rms_norm
    ("add_rms_norm", {"hidden": None}, TypeError, "hidden is a NoneType, expected a torch.Tensor"),
    (
        "add_rms_norm",
        {"residual": rows(T, H + 1)},
        ValueError,
        "residual has shape (4, 9), expected (4, 8), because hidden has that shape",
    ),
    ("add_rms_norm", {"residual": None}, TypeError, "residual is a NoneType, expected a torch.Tensor"),
    ("add_rms_norm", {"weight": rows(H + 1)}, ValueError, "weight has shape (9,), expected (8,) = (H,)"),
    (
        "add_rms_norm",
        {"weight": rows(H).half()},
        TypeError,
        f"weight has dtype torch.float16, expected {BF16} or {FP32}, because hidden has dtype {BF16}",
    ),
    (
        "add_rms_norm",
        {"out": rows(T, H + 1)},
        ValueError,
        "out has shape (4, 9), expected (4, 8), because hidden has that shape",
    ),
    (
        "add_rms_norm",
        {"out_sum": rows(T, H).float()},
        TypeError,
        f"out_sum has dtype {FP32}, expected {BF16}, because hidden has dtype {BF16}",
    ),
    ("add_rms_norm", {"eps": "small"}, TypeError, "eps is a str, expected a number"),
    ("add_rms_norm", {"norm_offset": None}, TypeError, "norm_offset is a NoneType, expected a number"),
    ("add_rms_norm", {"norm_offset": float("inf")}, ValueError, "norm_offset is inf, expected a finite fp32 number"),
    *(
        (
            "add_rms_norm",
            lambda call, out=out, read=read: {out: call[read]},
            ValueError,
            f"{out} overlaps {read}, expected disjoint memory, because rows are written while others are read",
        )
        for out, read in [
            ("out", "hidden"),
            ("out", "residual"),
            ("out", "out_sum"),
            ("out_sum", "hidden"),
            ("out_sum", "residual"),
        ]
    ),
    # vocab_parallel_embedding
    ("vocab_parallel_embedding", {"ids": [1, 2, 3]}, TypeError, "ids is a list, expected a torch.Tensor"),
    (
        "vocab_parallel_embedding",
        {"ids": torch.zeros(3)},
        TypeError,
        f"ids has dtype {FP32}, expected torch.int32 or torch.int64",
    ),
    ("vocab_parallel_embedding", {"weight": None}, TypeError, "weight is a NoneType, expected a torch.Tensor"),
    (
        "vocab_parallel_embedding",
        {"weight": torch.zeros(10, H).long()},
        TypeError,
        f"weight has dtype torch.int64, expected {SUPPORTED}",
    ),
    (
        "vocab_parallel_embedding",
        {"weight": rows(10, H).to("meta")},
        ValueError,
        "weight is on meta, expected cpu, because ids is there",
    ),
    (
        "vocab_parallel_embedding",
        {"weight": rows(H, 10).t()},
        ValueError,
        "weight has strides (1, 10), expected a last stride of 1",
    ),
    ("vocab_parallel_embedding", {"shard": 2}, TypeError, "shard is a int, expected a VocabShard"),
    *(
        (
            "vocab_parallel_embedding",
            {"weight": weight},
            ValueError,
            f"weight has shape {tuple(weight.shape)}, expected (rows, H) = (10, *), because rank 0 of 2 holds 10 ids' "
            "rows",
        )
        for weight in (rows(9, H), rows(11, H), rows(10), rows(10, 1, H))
    ),
    ("vocab_parallel_embedding", {"scale": "two"}, TypeError, "scale is a str, expected a number or a 0-d tensor"),
    (
        "vocab_parallel_embedding",
        {"scale": torch.tensor(2)},
        TypeError,
        f"scale has dtype torch.int64, expected {SUPPORTED}",
    ),
    (
        "vocab_parallel_embedding",
        {"scale": torch.ones(1)},
        ValueError,
        "scale has shape (1,), expected a 0-d tensor or a float",
    ),
    (
        "vocab_parallel_embedding",
        {"scale": torch.tensor(2.0, device="meta")},
        ValueError,
        "scale is on meta, expected cpu, because weight is there",
    ),
    (
        "vocab_parallel_embedding",
        {"out": rows(3, H).float()},
        TypeError,
        f"out has dtype {FP32}, expected {BF16}, because weight has dtype {BF16}",
    ),
    (
        "vocab_parallel_embedding",
        {"out": rows(4, H)},
        ValueError,
        "out has shape (4, 8), expected (*ids.shape, H) = (3, 8)",
    ),
    (
        "vocab_parallel_embedding",
        {"ids": torch.zeros(2, 3).long(), "out": rows(3, 2, H).transpose(0, 1)},
        ValueError,
        "out has strides (8, 16, 1), expected rows of one common stride, because ids has 2 dimensions",
    ),
    (
        "vocab_parallel_embedding",
        lambda call: {"out": call["weight"][:3]},
        ValueError,
        "out overlaps weight, expected disjoint memory, because rows are written while others are read",
    ),
]


# Tensors that are not plain strided memory, by name: how to make one from a valid operand, and the message after the
# argument's name.
NOT_PLAIN = {
    "sparse": (lambda good: good.to_sparse(), "has layout torch.sparse_coo, expected torch.strided"),
    "csr": (lambda good: good.to_sparse_csr(), "has layout torch.sparse_csr, expected torch.strided"),
    "nested": (lambda good: torch.nested.nested_tensor(list(good)), "is a nested tensor, expected a dense one"),
    "uninitialized": (
        lambda good: nn.UninitializedParameter(requires_grad=False, dtype=good.dtype),
        "is a UninitializedParameter, expected an initialized tensor",
    ),
    "zeros": (
        lambda good: torch._efficientzerotensor(good.shape, dtype=good.dtype),
        "is a lazy view, expected a tensor with memory of its own values: its clone()",
    ),
}


def not_plain_calls() -> Iterator[object]:
    for call, (_, make) in CALLS.items():
        for name, value in make().items():
            tensor = value[0] if isinstance(value, list) else value
            for how in NOT_PLAIN if isinstance(tensor, Tensor) else ():
                if tensor.dim() == 2 or how == "sparse":
                    yield pytest.param(call, name, how, id=f"{call.replace(' ', '_')}-{name}-{how}")


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of nested and sparse tensors in beta
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(("call", "name", "how"), [*not_plain_calls()])
def test_a_tensor_that_is_no_plain_memory(call: str, name: str, how: str, backend: str) -> None:
    function, make = CALLS[call]
    change, message = NOT_PLAIN[how]
    arguments = make()
    value = arguments[name]
    arguments[name] = [change(value[0]), *value[1:]] if isinstance(value, list) else change(value)
    named = "chunks[0]" if name == "chunks" else name
    without_out = {key: value for key, value in arguments.items() if key not in ("out", "out_sum") or key == name}
    for changed in [arguments] if call == "capture_hidden" else [arguments, without_out]:
        raises = pytest.raises(TypeError, match=f"^{re.escape(f'{function.__name__}: {named} {message}')}$")
        with environment_of(EAGLE_KERNELS_BACKEND=backend), raises:
            function(**changed)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(
    ("call", "name"),
    [
        pytest.param(call, name, id=f"{call.replace(' ', '_')}-{name}")
        for call, (_, make) in CALLS.items()
        for name, value in make().items()
        if isinstance(value, (Tensor, list)) and name != "ids"  # ids may have any shape
    ],
)
def test_a_tensor_without_dimensions(call: str, name: str, backend: str) -> None:
    function, make = CALLS[call]
    arguments = make()
    value = arguments[name]
    flat = (value[0] if isinstance(value, list) else value).flatten()[0]
    arguments[name] = [flat, *value[1:]] if isinstance(value, list) else flat
    named = "chunks[0]" if name == "chunks" else name
    pattern = f"^{function.__name__}: {re.escape(named)} has shape \\(\\), expected "
    with environment_of(EAGLE_KERNELS_BACKEND=backend), pytest.raises(ValueError, match=pattern):
        function(**arguments)


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("num_chunks", torch.tensor(3.0), "num_chunks is a Tensor, expected an int"),
        ("num_chunks", torch.tensor([3, 3]), "num_chunks is a Tensor, expected an int"),
        ("eps", torch.ones(3, 2), "eps[0] is a Tensor, expected a number"),
        ("norm_offset", torch.ones(2), "norm_offset is a Tensor, expected a number"),
        ("eps", True, "eps is a bool, expected a number or a sequence of numbers"),
        ("num_chunks", True, "num_chunks is a bool, expected an int"),
        ("chunks", "abc", "chunks is a str, expected a tensor or a sequence of tensors"),
    ],
)
def test_a_value_of_another_type(argument: str, value: object, message: str) -> None:
    for op, make in (("norm_concat", packed), ("norm_concat_linear", lambda: packed() | linear())):
        with pytest.raises(TypeError, match=f"^{op}: {re.escape(message)}$"):
            getattr(ek, op)(**make() | {argument: value})


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("what", ["of it", "empty", "of None"])
@pytest.mark.parametrize(
    ("call", "name"),
    [
        (call, name)
        for call, (_, make) in CALLS.items()
        for name, value in make().items()
        if isinstance(value, Tensor) and name not in ("chunks", "norm_weight")  # these may be lists
    ],
)
def test_a_list_in_place_of_a_tensor(call: str, name: str, what: str, backend: str) -> None:
    """The fast path, which takes lists of plain tensors, asked this list for its dimensions."""
    function, make = CALLS[call]
    arguments = make()
    arguments[name] = {"of it": [arguments[name]], "empty": [], "of None": [None]}[what]
    message = f"^{function.__name__}: {name} is a list, expected a torch.Tensor$"
    with environment_of(EAGLE_KERNELS_BACKEND=backend), pytest.raises(TypeError, match=message):
        function(**arguments)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of nested tensors in beta
@pytest.mark.parametrize("op", ["norm_concat", "norm_concat_linear"])
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_a_nested_tensor_among_the_chunks(layout: torch.layout, op: str) -> None:
    """Its width was read before the checks, to allocate the result."""
    nested = torch.nested.nested_tensor([rows(2, H), rows(2, H)], layout=layout)
    arguments = {"chunks": [rows(T, H), nested]} | ({"weight": rows(D, 2 * H)} if op == "norm_concat_linear" else {})
    message = f"^{op}: chunks\\[1\\] is a nested tensor, expected a dense one$"
    with pytest.raises(TypeError, match=message):
        getattr(ek, op)(**arguments)


def all_tensors(arguments: dict) -> list[Tensor]:
    flat = [entry for value in arguments.values() for entry in (value if isinstance(value, list) else [value])]
    return [entry for entry in flat if isinstance(entry, Tensor) and entry.device.type == "cpu"]


@pytest.mark.parametrize(
    ("call", "changes", "kind", "message"),
    ERRORS,
    ids=[f"{call.replace(' ', '_')}-{message[:48].replace(' ', '_')}" for call, _, _, message in ERRORS],
)
def test_error(call: str, changes: dict | Callable, kind: type[Exception], message: str) -> None:
    function, make = CALLS[call]
    arguments = make()
    arguments |= changes(arguments) if callable(changes) else changes
    tensors = all_tensors(arguments)
    before = [tensor.clone() for tensor in tensors]
    with pytest.raises(kind, match=f"^{re.escape(f'{function.__name__}: {message}')}$") as caught:
        function(**arguments)
    assert type(caught.value) is kind
    assert all(map(same_bits, before, tensors)), "a call that raised wrote"


@pytest.mark.parametrize("call", CALLS)
def test_the_calls_that_the_errors_change_work(call: str) -> None:
    function, make = CALLS[call]
    function(**make())


def test_the_message_of_the_contract() -> None:
    """The sentence of docs/design.md, Errors."""
    message = (
        "norm_concat_linear: weight has shape (4096, 8192), expected (D, K*H) = (*, 12288) for K=3 chunks of H=4096"
    )
    chunks = [torch.empty(1, 4096)] * 3
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        ek.norm_concat_linear(chunks, torch.empty(4096, 8192))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32], ids=str)
def test_a_dtype_that_everything_shares(dtype: torch.dtype) -> None:
    chunks, weight = [torch.ones(T, H, dtype=dtype)] * 2, torch.ones(D, 2 * H, dtype=dtype)
    for out in (None, torch.ones(T, D, dtype=dtype)):
        with pytest.raises(
            TypeError, match=rf"^norm_concat_linear: chunks\[0\] has dtype {dtype}, expected {SUPPORTED}$"
        ):
            ek.norm_concat_linear(chunks, weight, out=out)


def test_slots_of_one_buffer_do_not_overlap() -> None:
    """Interleaved columns of one allocation are disjoint: the check must not refuse the case it exists for."""
    buffer = rows(T, 3 * H)
    slots = buffer.split(H, -1)
    ek.capture_hidden(slots[0], slots[1], out=slots[2])
    assert same_bits(slots[2].clone(), slots[0] + slots[1])
    ek.norm_concat([slots[0]], out=slots[1])
    ek.add_rms_norm(slots[0], slots[0], rows(H), out=slots[1], out_sum=slots[2])
    with pytest.raises(ValueError, match=r"out overlaps chunks\[0\]"):
        ek.norm_concat([slots[0]], out=buffer[:, H - 1 : 2 * H - 1])


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_the_stride_of_a_single_column_is_free(backend: str) -> None:
    hidden, residual = (rows(3, T).t()[:, :1] for _ in range(2))
    assert hidden.stride() == (1, T)
    with environment_of(EAGLE_KERNELS_BACKEND=backend):
        assert same_bits(ek.norm_concat([hidden], norm="none"), hidden.contiguous())
        total = ek.add_rms_norm(hidden, residual, rows(1))[1]
        assert same_bits(total, (hidden + residual).contiguous())


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_vector_between_the_rows_of_out_does_not_overlap(backend: str) -> None:
    hidden, weight = rows(T, H), rows(H)
    with environment_of(EAGLE_KERNELS_BACKEND=backend):
        expected = ek.add_rms_norm(hidden, hidden, weight)[0]
        for row in (0, T // 2, T - 1):
            buffer = rows(T, 2 * H)
            buffer[row, H:] = weight
            ek.add_rms_norm(hidden, hidden, buffer[row, H:], out=buffer[:, :H])
            assert same_bits(buffer[:, :H].clone(), expected)
            with pytest.raises(ValueError, match=r"^add_rms_norm: out overlaps weight, "):
                ek.add_rms_norm(hidden, hidden, buffer[row, H - 1 : 2 * H - 1], out=buffer[:, :H])


@pytest.mark.parametrize("rows_apart", [1, 3])
def test_shifted_rows_of_one_buffer_overlap(rows_apart: int) -> None:
    buffer = rows(T + rows_apart, H)
    with pytest.raises(ValueError, match="out overlaps hidden"):
        ek.capture_hidden(buffer[:T], out=buffer[rows_apart:])
    ek.capture_hidden(buffer[:rows_apart], out=buffer[T:])


def test_an_out_over_ids_that_are_not_dense_is_refused() -> None:
    """The kernel reads a dense copy of such ids."""
    memory = torch.zeros(T * 2 * H, dtype=torch.int64)
    out = memory.view(torch.bfloat16)[: T * 2 * H].view(T, 2, H)
    shard = ek.VocabShard.build(64, tp_rank=0, tp_size=1)
    for ids in (memory[: 2 * T].view(2, T).t(), memory[: 4 * T].view(T, 4)[:, 1::2]):
        with pytest.raises(ValueError, match=r"^vocab_parallel_embedding: out overlaps ids, expected disjoint memory"):
            ek.vocab_parallel_embedding(ids, torch.ones(64, H).bfloat16(), shard, out=out)
        assert not memory.any()


def test_bad_chunks_are_worded_before_their_widths_are_needed() -> None:
    good = rows(T, H)
    for bad, kind in ((None, TypeError), (torch.tensor(1.0).bfloat16(), ValueError), (rows(H), ValueError)):
        for call in (lambda c: ek.norm_concat(c), lambda c: ek.norm_concat_linear(c, rows(D, 2 * H))):
            with pytest.raises(kind, match=r"^norm_concat(_linear)?: chunks\[1\] "):
                call([good, bad])


@pytest.mark.parametrize("number", [np.float32(0.5), np.float64(0.5), np.array(0.5), torch.tensor(0.5), Fraction(1, 2)])
def test_numbers_of_every_kind_are_numbers(number: object) -> None:
    chunks, weight = [rows(T, H), rows(T, H)], rows(D, 2 * H)
    shard = ek.VocabShard.build(V, tp_rank=0, tp_size=1, padding_size=4)
    calls = [
        lambda x: ek.norm_concat(chunks, eps=x, norm_offset=x),
        lambda x: ek.norm_concat_linear(chunks, weight, eps=x, post_norm_weight=torch.ones(D)),
        lambda x: ek.add_rms_norm(chunks[0], chunks[1], torch.ones(H), eps=x, norm_offset=x)[0],
    ]
    if not isinstance(number, Tensor):  # a tensor scale is another argument
        calls.append(lambda x: ek.vocab_parallel_embedding(torch.tensor([1, 2]), shard_rows(shard), shard, scale=x))
    for backend in ("cpu", "reference"):
        with environment_of(EAGLE_KERNELS_BACKEND=backend):
            for call in calls:
                assert same_bits(call(number), call(0.5))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("shape", [(T, H), (H,)], ids=["rows", "one-row"])
def test_inputs_that_require_grad_are_taken_without_grad_mode(shape: tuple[int, ...], backend: str) -> None:
    hidden, weight = rows(*shape).requires_grad_(), nn.Parameter(rows(H))
    with environment_of(EAGLE_KERNELS_BACKEND=backend):
        with torch.no_grad():
            normed, total = ek.add_rms_norm(hidden, hidden, weight)
        expected = ek.add_rms_norm(hidden.detach(), hidden.detach(), weight.detach())
    assert same_bits(normed, expected[0]) and same_bits(total, expected[1])
    with pytest.raises(RuntimeError, match=r"^add_rms_norm: an input requires grad, "):
        ek.add_rms_norm(hidden, hidden, weight)


@pytest.mark.parametrize(
    "number",
    [np.float32(0.5), np.float64(0.5), np.array(0.5), torch.tensor(0.5), Fraction(1, 2), 1],
)
def test_those_of_a_config_are_floats(number: object) -> None:
    """Modules pass them to the ops unchanged: a compiled Eagle3Projection failed on a norm_offset of numpy's."""
    eagle = ek.Eagle3Config(2, H, D, chunk_norm=True, eps=number, norm_offset=number)
    mtp = ek.MTPConfig(H, enorm_eps=number, hnorm_eps=number, norm_offset=number, embedding_scale=number)
    context, qkv = (
        ek.ContextKVConfig(1, H, H, 1, 1, 4, eps=number, norm_offset=number),
        ek.Eagle3QKVConfig(H, eps=number),
    )
    of_mtp = (mtp.enorm_eps, mtp.hnorm_eps, mtp.norm_offset, mtp.embedding_scale)
    for field in (eagle.eps, eagle.norm_offset, *of_mtp, context.eps, context.norm_offset, qkv.eps):
        assert type(field) is float and field == float(number)


def shard_rows(shard: ek.VocabShard) -> Tensor:
    return torch.arange(shard.rows * H).view(shard.rows, H).bfloat16()


@pytest.mark.parametrize("op", ["add_rms_norm", "norm_concat", "capture_hidden_out"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_the_registered_ops_take_matrices(op: str, backend: str) -> None:
    row = rows(H)
    arguments = {
        "capture_hidden_out": (row, None, torch.empty_like(row), None),
        "add_rms_norm": (row, row, row, 1e-6, 0.0),
        "norm_concat": ([row], 1, "none", [], [0.0], 0.0, [], [], None),
    }
    message = rf"^{op.removesuffix('_out')}: (hidden|chunks\[0\]) has shape \(8,\), expected \(T, H\)$"
    with environment_of(EAGLE_KERNELS_BACKEND=backend), pytest.raises(ValueError, match=message):
        getattr(torch.ops.eagle_kernels, op)(*arguments[op])
