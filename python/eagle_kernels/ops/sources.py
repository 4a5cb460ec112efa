"""The sources of norm_concat and norm_concat_linear: what both ops gather, add, norm and concatenate.

    value_k[i] = round(chunk_k[index_k[i]] + residual_k[index_k[i]])     (a zero row where the index is out of range)
    rstd_k[i]  = rsqrt(mean(value_k[i]^2) + eps_k)                       norm="chunk"
    rstd[i]    = rsqrt(mean over all K*H columns of value[i]^2 + eps)    norm="concat"
    x[i]       = concat_k(value_k[i] * rstd_k[i] * (norm_offset + gain_k))

`Sources.build` normalises the public arguments once; nothing below it checks them again.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import checks

NORMS = ("none", "chunk", "concat")  # the position is the code the compiled primitives take
_DEFAULTS = (("norm", "chunk"), ("eps", 1e-6), ("norm_offset", 0.0))  # of the public ops


@dataclass(frozen=True)
class Sources:
    """The arguments in the form the registered ops take; lists of length 1 stand for all K chunks where noted."""

    chunks: list[Tensor]  # K of [T, H_k], or one packed [T, K*H]
    num_chunks: int
    norm: str
    gains: list[Tensor]  # [] (unit gain), one packed [K, H] or [K*H], or K of [H_k]
    eps: list[float]  # one for all chunks, or K
    norm_offset: float
    residuals: list[Tensor | None]  # [] or one per entry of chunks
    indices: list[Tensor | None]  # [], one for all chunks, or K
    sum_squares: Tensor | None  # fp32 [T, K]
    one_row: bool  # the caller passed 1-D rows

    @property
    def arguments(self) -> tuple:
        """The leading arguments of the registered ops, in schema order."""
        return (
            self.chunks,
            self.num_chunks,
            self.norm,
            self.gains,
            self.eps,
            self.norm_offset,
            self.residuals,
            self.indices,
            self.sum_squares,
        )

    @property
    def rows(self) -> int:
        return output_rows(self.chunks, self.indices)

    @property
    def width(self) -> int:
        return total_width(self.chunks)

    @staticmethod
    def of_call(op: str, chunks: Sequence[Tensor] | Tensor, arguments: dict[str, object]) -> "Sources":
        """From the keyword arguments of a public call, for `explain`."""
        norm, eps, norm_offset = (arguments.get(*default) for default in _DEFAULTS)
        given = (arguments.get(name) for name in ("residuals", "indices", "sum_squares", "num_chunks"))
        return Sources.build(op, chunks, norm, arguments.get("norm_weight"), eps, norm_offset, *given)

    @staticmethod
    def build(
        op: str,
        chunks: Sequence[Tensor] | Tensor,
        norm: str,
        norm_weight: Sequence[Tensor] | Tensor | None,
        eps: float | Sequence[float],
        norm_offset: float,
        residuals: Sequence[Tensor | None] | Tensor | None,
        indices: Sequence[Tensor | None] | Tensor | None,
        sum_squares: Tensor | None,
        num_chunks: int | None,
        eps_name: str = "eps",
    ) -> "Sources":
        if norm not in NORMS:
            raise checks.error(ValueError, op, f"norm is {norm!r}", f"one of {NORMS}")
        packed = isinstance(chunks, Tensor)
        chunks = [chunks] if packed else checks.check_sequence(op, "chunks", chunks)
        if not chunks:
            raise checks.error(ValueError, op, "chunks is empty", "K >= 1 tensors")
        num_chunks = _count_chunks(op, chunks, packed, norm, norm_weight, num_chunks)
        one_row = _check_chunks(op, chunks)
        if packed and chunks[0].shape[-1] % num_chunks:
            raise checks.shape_error(op, "chunks", chunks[0], f"(T, K*H) with K*H a multiple of K={num_chunks}")

        residuals = _as_list(op, "residuals", residuals)
        indices = _as_list(op, "indices", indices)
        _check_residuals(op, residuals, chunks)
        if one_row:
            if indices:
                raise checks.error(ValueError, op, "indices is given", "None", "chunks are single rows [H]")
            chunks = [chunk.unsqueeze(0) for chunk in chunks]
            residuals = [None if residual is None else residual.unsqueeze(0) for residual in residuals]
        _check_indices(op, indices, chunks, num_chunks)
        gains = _gain_list(op, norm, norm_weight, chunks, num_chunks)
        if sum_squares is not None:
            _check_sum_squares(op, sum_squares, norm, chunks, num_chunks)
        checks.check_inference(op, (*chunks, *residuals, *gains))
        eps = _eps_list(op, eps_name, eps, norm, num_chunks)
        norm_offset = checks.check_number(op, "norm_offset", norm_offset)
        return Sources(chunks, num_chunks, norm, gains, eps, norm_offset, residuals, indices, sum_squares, one_row)


def plain_arguments(
    op: str,
    chunks: Sequence[Tensor] | Tensor,
    norm: str,
    norm_weight: Sequence[Tensor] | Tensor | None,
    eps: float | Sequence[float],
    norm_offset: float,
    residuals: Sequence[Tensor | None] | Tensor | None,
    indices: Sequence[Tensor | None] | Tensor | None,
    sum_squares: Tensor | None,
    num_chunks: int | None,
) -> tuple:
    """The leading arguments of the compiled primitives, which check them; raises where the long way has to look."""
    packed = isinstance(chunks, Tensor)
    num_chunks = _count_chunks(op, chunks, packed, norm, norm_weight, num_chunks)
    per_chunk = not isinstance(norm_weight, Tensor) or norm_weight.dim() == 2
    if norm_weight is not None and per_chunk != (norm == "chunk"):
        raise TypeError("norm_weight has the form of another norm")
    return (
        [chunks] if packed else chunks,
        num_chunks,
        NORMS.index(norm),
        _listed(norm_weight),
        [eps] if isinstance(eps, (int, float)) else eps,
        norm_offset,
        _listed(residuals),
        _listed(indices),
        sum_squares,
    )


def tensors_of(arguments: tuple) -> tuple[Tensor | None, ...]:
    """The tensors among `plain_arguments` that could ask for a gradient."""
    return (*arguments[0], *arguments[3], *arguments[6])


def _listed(value: Sequence[Tensor] | Tensor | None) -> Sequence[Tensor]:
    if value is None:
        return []
    return [value] if isinstance(value, Tensor) else value


def output_rows(chunks: list[Tensor], indices: list[Tensor | None]) -> int:
    """N: the length of the indices, or the rows of a chunk that has none."""
    for index in indices:
        if index is not None:
            return index.shape[0]
    return chunks[0].shape[0]


def total_width(chunks: list[Tensor]) -> int:
    return sum(chunk.shape[-1] for chunk in chunks)


def _as_list(op: str, name: str, value: Sequence[Tensor | None] | Tensor | None) -> list[Tensor | None]:
    if value is None:
        return []
    expected = "a tensor or a sequence of tensors or None"
    values = [value] if isinstance(value, Tensor) else checks.check_sequence(op, name, value, expected)
    return [] if all(entry is None for entry in values) else values


def _count_chunks(
    op: str, chunks: list[Tensor], packed: bool, norm: str, norm_weight: object, num_chunks: int | None
) -> int:
    if not packed:
        if num_chunks not in (None, len(chunks)):
            raise checks.error(ValueError, op, f"num_chunks is {num_chunks}", str(len(chunks)), "chunks has that many")
        return len(chunks)
    if num_chunks is not None:
        return checks.check_int(op, "num_chunks", num_chunks, at_least=1)
    if norm == "chunk":
        if isinstance(norm_weight, Tensor) and norm_weight.dim() == 2:
            return norm_weight.shape[0]
        if isinstance(norm_weight, Sequence) and len(norm_weight) > 0:
            return len(norm_weight)
        raise checks.error(
            ValueError,
            op,
            "num_chunks is None",
            "K, or norm_weight of shape (K, H)",
            "a packed chunks does not say where it splits",
        )
    return 1


def _check_chunks(op: str, chunks: list[Tensor]) -> bool:
    for k, chunk in enumerate(chunks):
        name = f"chunks[{k}]"
        checks.check_rows(op, name, chunk)
        if k:
            checks.check_operand(op, name, chunk, chunks[0], "chunks[0]")
        if chunk.dim() != chunks[0].dim():
            raise checks.shape_error(op, name, chunk, f"{chunks[0].dim()} dimensions", "chunks[0] has that many")
        if chunk.shape[-1] == 0:
            raise checks.shape_error(op, name, chunk, "(T, H) with H >= 1")
    return chunks[0].dim() == 1


def _check_residuals(op: str, residuals: list[Tensor | None], chunks: list[Tensor]) -> None:
    if not residuals:
        return
    if len(residuals) != len(chunks):
        raise checks.error(ValueError, op, f"residuals has {len(residuals)} entries", f"{len(chunks)}, one per chunk")
    for k, (residual, chunk) in enumerate(zip(residuals, chunks, strict=True)):
        if residual is not None:
            checks.check_like(op, f"residuals[{k}]", residual, chunk, f"chunks[{k}]")


def _check_indices(op: str, indices: list[Tensor | None], chunks: list[Tensor], num_chunks: int) -> None:
    if indices and len(indices) not in (1, num_chunks):
        raise checks.error(
            ValueError, op, f"indices has {len(indices)} entries", f"one for all chunks or K={num_chunks}"
        )
    if len(indices) > 1 and len(chunks) == 1:
        raise checks.error(
            ValueError,
            op,
            f"indices has {len(indices)} entries",
            "one",
            "the rows of a packed chunks are read together",
        )
    length = None
    for k, index in enumerate(indices):
        if index is None:
            continue
        name = f"indices[{k}]"
        checks.check_tensor(op, name, index)
        checks.check_dtype(op, name, index, (torch.int32, torch.int64))
        checks.check_device(op, name, index, chunks[0].device, "chunks[0]")
        if index.dim() != 1:
            raise checks.shape_error(op, name, index, "(N,)")
        checks.check_last_dim_contiguous(op, name, index)
        if length is not None and index.shape[0] != length:
            raise checks.shape_error(op, name, index, f"({length},)", "all chunks give the same N rows")
        length = index.shape[0]
    for k, chunk in enumerate(chunks):
        gathered = len(indices) == 1 or (indices and indices[k] is not None)
        expected = chunks[0].shape[0] if length is None else length
        if not gathered and chunk.shape[0] != expected:
            raise checks.shape_error(
                op, f"chunks[{k}]", chunk, f"({expected}, H)", "it has no index and N rows are asked for"
            )


def _gain_list(
    op: str, norm: str, norm_weight: Sequence[Tensor] | Tensor | None, chunks: list[Tensor], num_chunks: int
) -> list[Tensor]:
    if norm_weight is None:
        return []
    if norm == "none":
        raise checks.error(ValueError, op, "norm_weight is given", "None", "norm is 'none'")
    width = total_width(chunks)
    if norm == "concat":
        if not isinstance(norm_weight, Tensor):
            raise checks.error(
                TypeError, op, f"norm_weight is a {type(norm_weight).__name__}", "a tensor (K*H,)", "norm is 'concat'"
            )
        checks.check_vector(op, "norm_weight", norm_weight, width, "K*H", chunks[0], "chunks[0]")
        return [norm_weight]

    widths = [width // num_chunks] * num_chunks if len(chunks) == 1 else [chunk.shape[-1] for chunk in chunks]
    if isinstance(norm_weight, Tensor):
        checks.check_operand(op, "norm_weight", norm_weight, chunks[0], "chunks[0]", fp32_too=True)
        if len(set(widths)) > 1:
            raise checks.error(
                TypeError,
                op,
                "norm_weight is one tensor",
                f"a list of K={num_chunks}",
                f"the chunks have widths {widths}",
            )
        if tuple(norm_weight.shape) != (num_chunks, widths[0]):
            raise checks.shape_error(op, "norm_weight", norm_weight, f"(K, H) = ({num_chunks}, {widths[0]})")
        if not norm_weight.is_contiguous():
            raise checks.error(ValueError, op, f"norm_weight has strides {norm_weight.stride()}", "a contiguous tensor")
        return [norm_weight]
    gains = checks.check_sequence(op, "norm_weight", norm_weight)
    if len(gains) != num_chunks:
        raise checks.error(ValueError, op, f"norm_weight has {len(gains)} entries", f"K={num_chunks}")
    for k, (gain, gain_width) in enumerate(zip(gains, widths, strict=True)):
        checks.check_vector(op, f"norm_weight[{k}]", gain, gain_width, "H", chunks[0], "chunks[0]")
        if gain.dtype != gains[0].dtype:
            checks.check_dtype(op, f"norm_weight[{k}]", gain, (gains[0].dtype,), "norm_weight[0] has that dtype")
    return gains


def _eps_list(op: str, name: str, eps: float | Sequence[float], norm: str, num_chunks: int) -> list[float]:
    if isinstance(eps, (int, float)):
        return [float(eps)]
    if isinstance(eps, (str, bytes)) or not isinstance(eps, Iterable):
        return [checks.check_number(op, name, eps, "a number or a sequence of numbers")]
    values = [checks.check_number(op, f"{name}[{k}]", value) for k, value in enumerate(eps)]
    expected = num_chunks if norm == "chunk" else 1
    if len(values) not in (1, expected):
        raise checks.error(ValueError, op, f"{name} has {len(values)} entries", f"one, or {expected} for norm={norm!r}")
    return values


def _check_sum_squares(op: str, sum_squares: Tensor, norm: str, chunks: list[Tensor], num_chunks: int) -> None:
    checks.check_tensor(op, "sum_squares", sum_squares)
    checks.check_dtype(op, "sum_squares", sum_squares, (torch.float32,))
    checks.check_device(op, "sum_squares", sum_squares, chunks[0].device, "chunks[0]")
    if norm == "none":
        raise checks.error(ValueError, op, "sum_squares is given", "None", "norm is 'none'")
    rows = chunks[0].shape[0]
    if tuple(sum_squares.shape) != (rows, num_chunks):
        raise checks.shape_error(op, "sum_squares", sum_squares, f"(T, K) = ({rows}, {num_chunks})")
    checks.check_last_dim_contiguous(op, "sum_squares", sum_squares)
    for k, chunk in enumerate(chunks):
        if chunk.shape[0] != rows:
            raise checks.shape_error(
                op, f"chunks[{k}]", chunk, f"({rows}, H)", "sum_squares has one row per row of every chunk"
            )


@torch.no_grad()
def formula(
    chunks: list[Tensor],
    num_chunks: int,
    norm: str,
    gains: list[Tensor],
    eps: list[float],
    norm_offset: float,
    residuals: list[Tensor | None],
    indices: list[Tensor | None],
    sum_squares: Tensor | None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """x [N, K*H] of the module's formula in `dtype`, unrounded: fp32 is the reference backend, fp64 the truth."""
    values, squares, held = [], [], []
    pieces = chunks if len(chunks) == num_chunks else list(chunks[0].chunk(num_chunks, -1))
    residuals = residuals if len(residuals) in (0, num_chunks) else list(residuals[0].chunk(num_chunks, -1))
    for k, piece in enumerate(pieces):
        value = piece if not residuals or residuals[k] is None else piece + residuals[k]
        square = None if sum_squares is None else sum_squares[:, k : k + 1]
        index = indices[k] if len(indices) == num_chunks else (indices[0] if indices else None)
        held.append(None if index is None else held_rows(value, index))
        value = gather_rows(value, index).to(dtype)
        values.append(value)
        squares.append(value.square().sum(-1, keepdim=True) if square is None else gather_rows(square, index).to(dtype))
    if norm == "none":
        return torch.cat(values, -1)
    if norm == "concat":
        rstd = torch.rsqrt(sum(squares) / total_width(values) + eps[0])
        gains = list(gains[0].split([value.shape[-1] for value in values])) if gains else gains
    elif gains and len(gains) != num_chunks:
        gains = list(gains[0])
    normed = []
    for k, (value, square) in enumerate(zip(values, squares, strict=True)):
        if norm == "chunk":
            rstd = torch.rsqrt(square / value.shape[-1] + eps[k if len(eps) > 1 else 0])
        value = value * rstd
        if gains:
            value = value * (_gain(gains, k).to(dtype) + norm_offset)
        # A row that no source holds stays zero where the gain is infinite, or rstd at eps = 0.
        normed.append(value if held[k] is None else torch.where(held[k], value, 0))
    return torch.cat(normed, -1)


def _gain(gains: list[Tensor], k: int) -> Tensor:
    return gains[k].reshape(-1)


def gather_rows(rows: Tensor, index: Tensor | None) -> Tensor:
    """rows[index], a zero row where the index is outside [0, T)."""
    if index is None:
        return rows
    if rows.shape[0] == 0:
        return rows.new_zeros(index.shape[0], *rows.shape[1:])
    held = held_rows(rows, index)
    gathered = rows[torch.where(held.squeeze(-1), index, 0).long()]
    # where, not a product: row 0 may hold a NaN, and NaN * 0 would leak it.
    return torch.where(held, gathered, 0)


def held_rows(rows: Tensor, index: Tensor) -> Tensor:
    """[N, 1]: whether the index is a row."""
    return ((index >= 0) & (index < rows.shape[0])).unsqueeze(-1)


def check_no_overlap(op: str, out: Tensor, chunks: list[Tensor], residuals: list[Tensor | None]) -> None:
    reads = [(f"chunks[{k}]", chunk) for k, chunk in enumerate(chunks)]
    reads += [(f"residuals[{k}]", residual) for k, residual in enumerate(residuals)]
    checks.check_no_overlap(op, "out", out, reads)
