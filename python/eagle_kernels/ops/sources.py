"""The sources of norm_concat and norm_concat_linear: what both ops gather, add, norm and concatenate.

    value_k[i] = round(chunk_k[index_k[i]] + residual_k[index_k[i]])     (a zero row where the index is out of range)
    rstd_k[i]  = rsqrt(mean(value_k[i]^2) + eps_k)                       norm="chunk"
    rstd[i]    = rsqrt(mean over all K*H columns of value[i]^2 + eps)    norm="concat"
    x[i]       = concat_k(value_k[i] * rstd_k[i] * (norm_offset + gain_k))

A row of zeros stays zero, at eps = 0 too: rstd is 0 where its argument is. A row whose index is out of range stays
zero whatever the gain and eps are.

`Sources.of` normalizes the public arguments, `Sources.of_module` those of a module's call, and `Sources.check` raises
the error message for what is wrong with them. The compiled primitives have their own checks, so a call that runs on one
of them is checked in Python only where the primitive refuses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import checks

NORMS = ("none", "chunk", "concat")  # the position is the code the compiled primitives take
_NORM_CODES = {norm: code for code, norm in enumerate(NORMS)}

_DEFAULTS: dict[str, Any] = {"norm": "chunk", "eps": 1e-6, "norm_offset": 0.0}  # of the public ops


class Sources(NamedTuple):
    """The arguments in the form and order of the registered ops' schema."""

    chunks: list[Tensor]  # K of [T, H_k], or one packed [T, K*H]
    num_chunks: int
    norm: str
    gains: list[Tensor]  # [] (unit gain), one packed [K, H] or [K*H], or K of [H_k]
    eps: list[float]  # one for all chunks, or K
    norm_offset: float
    residuals: list[Tensor | None]  # [] or one per entry of chunks
    indices: list[Tensor | None]  # [], one for all chunks, or K
    sum_squares: Tensor | None  # fp32 [T, K]

    @staticmethod
    def of(
        op: str,
        chunks: Iterable[Tensor] | Tensor,
        norm: str,
        norm_weight: Iterable[Tensor] | Tensor | None = None,
        eps: float | Iterable[float] = _DEFAULTS["eps"],
        norm_offset: float = _DEFAULTS["norm_offset"],
        residuals: Iterable[Tensor | None] | Tensor | None = None,
        indices: Iterable[Tensor | None] | Tensor | None = None,
        sum_squares: Tensor | None = None,
        num_chunks: int | None = None,
    ) -> Sources:
        """The public arguments as lists, each iterable read once; raises where they have no such form."""
        _check_norm(op, norm)
        packed = isinstance(chunks, Tensor)
        chunks = [chunks] if packed else checks.check_sequence(op, "chunks", chunks)  # type: ignore[list-item]
        if not chunks:
            raise checks.error(ValueError, op, "chunks is empty", "K >= 1 tensors")
        matrix = norm_weight if isinstance(norm_weight, Tensor) else None
        gains: list[Tensor] = []
        if matrix is not None:
            gains = [matrix]
        elif norm_weight is not None:
            gains = _list_gains(op, norm, norm_weight)
        count = len(chunks)
        if not packed and (num_chunks is None or (type(num_chunks) is int and num_chunks == count)):
            num_chunks = count
        else:
            num_chunks = _count_chunks(op, chunks, packed, norm, gains, num_chunks)
        if norm == "none" and norm_weight is not None:
            raise checks.error(ValueError, op, "norm_weight is given", "None", "norm is 'none'")
        if norm == "chunk" and norm_weight is not None:
            # In the record one entry stands for all K. Only here is it known to be a matrix or a list of one vector.
            if matrix is not None:
                try:
                    is_matrix = matrix.dim() == 2
                except ValueError:  # an uninitialized parameter
                    is_matrix = False
                if not is_matrix:
                    _check_gain_matrix(op, matrix, chunks, num_chunks)
            elif len(gains) < 2:
                _check_gain_vectors(op, gains, chunks, num_chunks)
        values = (
            chunks,
            num_chunks,
            norm,
            gains,
            [eps] if isinstance(eps, float) else _eps_list(op, eps),
            norm_offset if isinstance(norm_offset, float) else checks.check_number(op, "norm_offset", norm_offset),
            [] if residuals is None else _as_list(op, "residuals", residuals),
            [] if indices is None else _as_list(op, "indices", indices),
            sum_squares,
        )
        return tuple.__new__(Sources, values)  # Sources(*values) goes through a Python function, 0.12 us

    @staticmethod
    def of_module(
        op: str,
        chunks: Iterable[Tensor] | Tensor,
        num_chunks: int | None,
        norm: str,
        gains: list[Tensor],
        eps: list[float],
        norm_offset: float,
        residuals: Iterable[Tensor | None] | Tensor | None = None,
        indices: Iterable[Tensor | None] | Tensor | None = None,
        sum_squares: Tensor | None = None,
    ) -> Sources:
        """As `of`, for a module, whose norm, gains and eps fit one another and are lists of tensors and of floats. Only
        the arguments of the call are looked at, which takes 0.5 us instead of 1.2. num_chunks: None where there is no
        norm and any number of chunks will do."""
        if isinstance(chunks, Tensor):
            rows, count = [chunks], num_chunks or 1
        else:
            rows = checks.check_sequence(op, "chunks", chunks)
            if (count := len(rows)) != (num_chunks or count) or count == 0:
                expected = f"K={num_chunks}" if num_chunks else "K >= 1"
                raise checks.error(ValueError, op, f"chunks has {count} entries", expected)
        more = [] if residuals is None else _as_list(op, "residuals", residuals)
        places = [] if indices is None else _as_list(op, "indices", indices)
        return tuple.__new__(Sources, (rows, count, norm, gains, eps, norm_offset, more, places, sum_squares))

    @staticmethod
    def of_schema(op: str, arguments: Sequence[Any]) -> Sources:
        """The leading arguments of a registered op. Checks what is read before the kernel checks the rest: to find the
        plan and to allocate the result."""
        sources = Sources(*arguments[: len(Sources._fields)])
        # An AOTInductor package passes None for an empty list of tensors.
        gains, residuals, indices = sources.gains or [], sources.residuals or [], sources.indices or []
        sources = sources._replace(gains=gains, residuals=residuals, indices=indices)
        _check_norm(op, sources.norm)
        checks.check_int(op, "num_chunks", sources.num_chunks, at_least=1)
        if not sources.chunks:
            raise checks.error(ValueError, op, "chunks is empty", "K >= 1 tensors")
        for k, chunk in enumerate(sources.chunks):
            checks.check_matrix(op, f"chunks[{k}]", chunk)
        return sources

    @staticmethod
    def of_call(op: str, chunks: Iterable[Tensor] | Tensor, arguments: Mapping[str, Any]) -> Sources:
        """From the keyword arguments of a public call, for `explain`."""
        names = ("norm", "norm_weight", "eps", "norm_offset", "residuals", "indices", "sum_squares", "num_chunks")
        return Sources.of(op, chunks, *(arguments.get(name, _DEFAULTS.get(name)) for name in names))

    @property
    def operands(self) -> tuple:
        return self.chunks, self.gains, self.residuals, self.indices, self.sum_squares

    @property
    def rows(self) -> int:
        """N: the length of the indices, or the rows of a chunk that has none."""
        for index in self.indices:
            if index is not None:
                return index.numel()
        return self.chunks[0].shape[0]

    @property
    def width(self) -> int:
        """K*H."""
        return total_width(self.chunks)

    @property
    def widths(self) -> tuple[int, ...]:
        """The distinct widths of the chunks."""
        if len(self.chunks) != self.num_chunks:
            return (self.width // self.num_chunks,)
        return tuple({*map(_width_of, self.chunks)})

    @property
    def is_one_row(self) -> bool:
        """Whether the caller passed 1-D rows."""
        return self.chunks[0].dim() == 1

    def as_matrices(self) -> Sources:
        """1-D rows as matrices of one row."""
        if not self.is_one_row:
            return self
        chunks = [chunk.unsqueeze(0) for chunk in self.chunks]
        residuals = [None if residual is None else residual.unsqueeze(0) for residual in self.residuals]
        return self._replace(chunks=chunks, residuals=residuals)

    def for_primitive(self) -> tuple:
        """The leading arguments of the compiled primitives: a number for the norm, None for an empty list."""
        chunks, num_chunks, norm, gains, eps, norm_offset, residuals, indices, sum_squares = self
        code = _NORM_CODES[norm]
        return chunks, num_chunks, code, gains, eps, norm_offset, residuals or None, indices or None, sum_squares

    def check(self, op: str, eps_name: str = "eps") -> None:
        """Raise the error message for what no kernel supports, except overlapping memory: see `check_memory`."""
        chunks, num_chunks = self.chunks, checks.check_int(op, "num_chunks", self.num_chunks, at_least=1)
        _check_chunks(op, chunks)
        if len(chunks) != num_chunks and chunks[0].shape[-1] % num_chunks:
            raise checks.shape_error(op, "chunks", chunks[0], f"(T, K*H) with K*H a multiple of K={num_chunks}")
        _check_residuals(op, self.residuals, chunks)
        if self.is_one_row and self.indices:
            raise checks.error(ValueError, op, "indices is given", "None", "chunks are single rows [H]")
        chunks_2d = self.as_matrices().chunks
        _check_indices(op, self.indices, chunks_2d, num_chunks)
        _check_gains(op, self.norm, self.gains, chunks, num_chunks)
        if self.sum_squares is not None:
            _check_sum_squares(op, self.sum_squares, self.norm, chunks_2d, num_chunks)
        checks.check_inference(op, (*chunks, *self.residuals, *self.gains, self.sum_squares))
        _check_eps(op, eps_name, self.eps, self.norm, num_chunks)
        checks.check_finite(op, "norm_offset", self.norm_offset)

    def check_out(self, op: str, out: Tensor, columns: int, meaning: str) -> None:
        """Raise where the caller's `out` is not [N, columns], or [columns] for 1-D rows."""
        checks.check_operand(op, "out", out, self.chunks[0], "chunks[0]")
        checks.check_inference(op, (out,))
        expected, text = ((columns,), meaning) if self.is_one_row else ((self.rows, columns), f"(N, {meaning})")
        if tuple(out.shape) != expected:
            raise checks.shape_error(op, "out", out, f"{text} = {expected}")

    def check_memory(self, op: str, out: Tensor, *more: tuple[str, Tensor | None]) -> None:
        """Raise where `out` shares memory with a source or with one of `more`."""
        named = (("chunks", self.chunks), ("residuals", self.residuals), ("indices", self.indices))
        reads = [(f"{name}[{k}]", tensor) for name, tensors in named for k, tensor in enumerate(tensors)]
        gain_name = "norm_weight" if len(self.gains) == 1 else "norm_weight[{}]"
        reads += [(gain_name.format(k), gain) for k, gain in enumerate(self.gains)]
        checks.check_no_overlap(op, "out", out, (*reads, ("sum_squares", self.sum_squares), *more))


def _check_norm(op: str, norm: object) -> None:
    if not isinstance(norm, str) or norm not in NORMS:
        raise checks.error(ValueError, op, f"norm is {norm!r}", f"one of {NORMS}")


def _width_of(chunk: Tensor | None) -> int:
    """H; 0 for None or a 0-d tensor, which the checks refuse."""
    return chunk.shape[-1] if chunk is not None and chunk.dim() else 0


def _as_list(op: str, name: str, value: Iterable[Tensor | None] | Tensor) -> list[Tensor | None]:
    expected = "a tensor or a sequence of tensors or None"
    values = [value] if isinstance(value, Tensor) else checks.check_sequence(op, name, value, expected)
    for entry in values:  # a loop that ends at the first tensor: all(...) takes 0.6 us
        if entry is not None:
            return values
    return []


def _count_chunks(
    op: str, chunks: list[Tensor], packed: bool, norm: str, gains: list[Tensor], num_chunks: int | None
) -> int:
    if not packed:
        if num_chunks is not None and checks.check_int(op, "num_chunks", num_chunks) != len(chunks):
            raise checks.error(ValueError, op, f"num_chunks is {num_chunks}", str(len(chunks)), "chunks has that many")
        return len(chunks)
    if num_chunks is not None:
        return checks.check_int(op, "num_chunks", num_chunks, at_least=1)
    if norm != "chunk":
        return 1
    if not gains:
        raise checks.error(
            ValueError,
            op,
            "num_chunks is None",
            "K, or norm_weight of shape (K, H)",
            "a packed chunks does not say where it splits",
        )
    first = gains[0]
    if len(gains) > 1 or not isinstance(first, Tensor):
        return len(gains)
    checks.check_strided(op, "norm_weight", first)
    if first.dim() != 2:
        return 1
    if first.shape[0] == 0:
        raise checks.shape_error(op, "norm_weight", first, "(K, H) with K >= 1")
    return first.shape[0]


def total_width(chunks: list[Tensor]) -> int:
    width = 0
    for chunk in chunks:  # as _width_of, written out because three calls of it take 0.4 us more
        width += chunk.shape[-1] if chunk is not None and chunk.dim() else 0
    return width


def _check_chunks(op: str, chunks: list[Tensor]) -> None:
    for k, chunk in enumerate(chunks):
        name = f"chunks[{k}]"
        checks.check_rows(op, name, chunk)
        if k:
            checks.check_operand(op, name, chunk, chunks[0], "chunks[0]")
        if chunk.dim() != chunks[0].dim():
            raise checks.shape_error(op, name, chunk, f"{chunks[0].dim()} dimensions", "chunks[0] has that many")
        if chunk.shape[-1] == 0:
            raise checks.shape_error(op, name, chunk, "(T, H) with H >= 1")
    if (width := total_width(chunks)) > checks.MAX_WIDTH:
        raise checks.error(
            ValueError, op, f"the chunks have {width} columns", f"at most {checks.MAX_WIDTH}", "int32 counts them"
        )


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
        checks.check_ids(op, name, index)
        checks.check_device(op, name, index, chunks[0].device, "chunks[0]")
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


def _list_gains(op: str, norm: str, norm_weight: Iterable[Tensor]) -> list[Tensor]:
    if norm == "concat":
        got = f"norm_weight is a {type(norm_weight).__name__}"
        raise checks.error(TypeError, op, got, "a tensor (K*H,)", "norm is 'concat'")
    return checks.check_sequence(op, "norm_weight", norm_weight)


def _check_gains(op: str, norm: str, gains: list[Tensor], chunks: list[Tensor], num_chunks: int) -> None:
    if not gains:
        return
    if norm == "none":
        raise checks.error(ValueError, op, "norm_weight is given", "None", "norm is 'none'")
    if norm == "concat":
        checks.check_vector(op, "norm_weight", gains[0], total_width(chunks), "K*H", chunks[0], "chunks[0]")
    elif len(gains) == 1 and isinstance(gains[0], Tensor) and gains[0].dim() == 2:
        _check_gain_matrix(op, gains[0], chunks, num_chunks)
    else:
        _check_gain_vectors(op, gains, chunks, num_chunks)


def _chunk_widths(chunks: list[Tensor], num_chunks: int) -> list[int]:
    if len(chunks) == num_chunks:
        return [chunk.shape[-1] for chunk in chunks]
    return [chunks[0].shape[-1] // num_chunks] * num_chunks


def _check_gain_matrix(op: str, gain: Tensor, chunks: list[Tensor], num_chunks: int) -> None:
    _check_chunks(op, chunks)
    widths = _chunk_widths(chunks, num_chunks)
    checks.check_operand(op, "norm_weight", gain, chunks[0], "chunks[0]", fp32_too=True)
    if any(width != widths[0] for width in widths[1:]):  # no set: a trace has symbols for them
        because = f"the chunks have widths {widths}"
        raise checks.error(TypeError, op, "norm_weight is one tensor", f"a list of K={num_chunks}", because)
    if tuple(gain.shape) != (num_chunks, widths[0]):
        raise checks.shape_error(op, "norm_weight", gain, f"(K, H) = ({num_chunks}, {widths[0]})")
    if not gain.is_contiguous():
        raise checks.error(ValueError, op, f"norm_weight has strides {gain.stride()}", "a contiguous tensor")


def _check_gain_vectors(op: str, gains: list[Tensor], chunks: list[Tensor], num_chunks: int) -> None:
    _check_chunks(op, chunks)
    if len(gains) != num_chunks:
        raise checks.error(ValueError, op, f"norm_weight has {len(gains)} entries", f"K={num_chunks}")
    for k, (gain, width) in enumerate(zip(gains, _chunk_widths(chunks, num_chunks), strict=True)):
        checks.check_vector(op, f"norm_weight[{k}]", gain, width, "H", chunks[0], "chunks[0]")
        if gain.dtype != gains[0].dtype:
            checks.check_dtype(op, f"norm_weight[{k}]", gain, (gains[0].dtype,), "norm_weight[0] has that dtype")


def is_number(eps: Any) -> bool:
    """Whether eps is a single value: a number, a 0-d tensor or array, or a string, which is refused later."""
    return isinstance(eps, (int, float, str, bytes)) or not isinstance(eps, Iterable) or getattr(eps, "ndim", 1) == 0


def _eps_list(op: str, eps: Any) -> list[float]:
    if type(eps) is list and {*map(type, eps)} == {float}:  # as a module has it: 0.3 us, and 2 us one by one
        return [*eps]
    if is_number(eps):
        return [checks.check_number(op, "eps", eps, "a number or a sequence of numbers")]
    values = checks.check_sequence(op, "eps", eps, "a number or a sequence of numbers")
    return [checks.check_number(op, f"eps[{k}]", value) for k, value in enumerate(values)]


def _check_eps(op: str, name: str, eps: list[float], norm: str, num_chunks: int) -> None:
    expected = num_chunks if norm == "chunk" else 1
    if len(eps) not in (1, expected):
        raise checks.error(ValueError, op, f"{name} has {len(eps)} entries", f"one, or {expected} for norm={norm!r}")
    for k, value in enumerate(eps):
        checks.check_eps(op, "eps" if len(eps) == 1 else f"eps[{k}]", value)


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
def formula(sources: Sources, dtype: torch.dtype = torch.float32) -> Tensor:
    """x [N, K*H] of this file's formula in `dtype`, unrounded: fp32 for the reference backend, fp64 as the truth."""
    norm, gains, eps = sources.norm, sources.gains, sources.eps
    values: list[Tensor] = []
    squares: list[Tensor] = []
    in_range: list[Tensor | None] = []
    for k, (value, index) in enumerate(_values(sources)):
        square = None if sources.sum_squares is None else sources.sum_squares[:, k : k + 1]
        in_range.append(None if index is None else rows_in_range(value, index))
        value = gather_rows(value, index).to(dtype)
        values.append(value)
        squares.append(value.square().sum(-1, keepdim=True) if square is None else gather_rows(square, index).to(dtype))
    if norm == "none":
        return torch.cat(values, -1)
    if norm == "concat":
        rstd = rstd_of(sum(squares[1:], squares[0]) / total_width(values), eps[0])
        gains = list(gains[0].split([value.shape[-1] for value in values])) if gains else gains
    elif gains and len(gains) != sources.num_chunks:
        gains = list(gains[0])
    normed = []
    for k, (value, square) in enumerate(zip(values, squares, strict=True)):
        if norm == "chunk":
            rstd = rstd_of(square / value.shape[-1], eps[k if len(eps) > 1 else 0])
        value = value * rstd
        if gains:
            value = value * (gains[k].reshape(-1).to(dtype) + sources.norm_offset)
        # A row out of range is zero and must stay zero: times an infinite gain it would be NaN.
        there = in_range[k]
        normed.append(value if there is None else torch.where(there, value, 0))
    return torch.cat(normed, -1)


def _values(sources: Sources) -> list[tuple[Tensor, Tensor | None]]:
    """Per chunk round(chunk + residual) and the index that gathers its rows."""
    K, indices = sources.num_chunks, sources.indices
    chunks: Sequence[Tensor] = sources.chunks if len(sources.chunks) == K else sources.chunks[0].chunk(K, -1)
    residuals: Sequence[Tensor | None] = sources.residuals or [None] * K
    if len(residuals) != K:
        residuals = [None] * K if residuals[0] is None else residuals[0].chunk(K, -1)
    values = [
        chunk if residual is None else chunk + residual for chunk, residual in zip(chunks, residuals, strict=True)
    ]
    return list(zip(values, indices if len(indices) == K else (indices or [None]) * K, strict=True))


def rstd_of(mean_square: Tensor, eps: float) -> Tensor:
    """1/rms, but 0 where eps = 0 meets a row of zeros, which then stays zero."""
    mean_square = mean_square + eps
    return torch.where(mean_square == 0, 0, torch.rsqrt(mean_square))


def gather_rows(rows: Tensor, index: Tensor | None) -> Tensor:
    """rows[index], a zero row where the index is outside [0, T)."""
    if index is None:
        return rows
    if rows.shape[0] == 0:
        return rows.new_zeros(index.shape[0], *rows.shape[1:])
    in_range = rows_in_range(rows, index)
    gathered = rows[torch.where(in_range.squeeze(-1), index, 0).long()]
    # where, not a product: row 0 may hold a NaN, and NaN * 0 would leak it.
    return torch.where(in_range, gathered, 0)


def rows_in_range(rows: Tensor, index: Tensor) -> Tensor:
    """[N, 1]: whether the index is a row."""
    return ((index >= 0) & (index < rows.shape[0])).unsqueeze(-1)
