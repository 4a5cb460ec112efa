"""Quantized weights in the layout of their checkpoints: codes and their scales (the formats: `QuantizedWeight`)."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import InitVar, dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import bf16_12bit, checks

OP = "QuantizedWeight"
_LOGGER = logging.getLogger("eagle_kernels")

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_ALL = 0  # rows or columns of a block: all there are
# Where a row has several blocks, kernels read blocks of these numbers of columns and of multiples of 128;
# `is_block_width` of csrc/norm_concat_linear.cpp refuses others in every call.
_NARROW_BLOCKS = (16, 32, 64)


class Format(NamedTuple):
    codes: torch.dtype
    block: tuple[int, int]  # rows and columns that share a scale
    scales: tuple[torch.dtype, ...]
    max: float  # the largest code

    @property
    def columns_per_code(self) -> int:
        return 2 if self.codes == torch.uint8 else 1

    @property
    def bits(self) -> int:
        return 8 // self.columns_per_code

    @property
    def columns_of_a_row(self) -> int | None:
        """Columns of one row that share a scale; None where several rows or all columns share one."""
        return self.block[1] if self.block[0] == 1 and self.block[1] != _ALL else None


FORMATS = {
    "fp8_tensor": Format(E4M3, (_ALL, _ALL), (torch.float32,), 448.0),
    "fp8_row": Format(E4M3, (1, _ALL), (torch.float32,), 448.0),
    "fp8_block128": Format(E4M3, (128, 128), (torch.float32, E8M0), 448.0),
    "fp8_block32": Format(E4M3, (32, 32), (torch.float32, E8M0), 448.0),
    "int8_row": Format(torch.int8, (1, _ALL), (torch.float32,), 127.0),
    "mxfp8": Format(E4M3, (1, 32), (E8M0,), 448.0),
    "mxfp4": Format(torch.uint8, (1, 32), (E8M0,), 6.0),
    "nvfp4": Format(torch.uint8, (1, 16), (E4M3,), 6.0),
}
COMPRESSED = "bf16_12bit"
# What `quantize` makes.
WEIGHT_FORMATS = (*FORMATS, COMPRESSED)
# By format the dtypes that the codes and the scales may have.
DTYPES = {
    **{name: ((format.codes,), format.scales) for name, format in FORMATS.items()},
    COMPRESSED: ((torch.uint8,), (torch.uint8,)),
}


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """W[d, c] = codes[d, c] * scales[d // block rows, c // block columns] * global_scale, a weight [D, W] of W = K*H
    columns for `norm_concat_linear` and the modules; nothing is copied or converted.

    ============  =============  =======================  ===============================================
    format        codes          scale of                 scales
    ============  =============  =======================  ===============================================
    fp8_tensor    e4m3 [D, W]    the whole weight         fp32 [1]
    fp8_row       e4m3 [D, W]    a row                    fp32 [D] or [D, 1]
    fp8_block128  e4m3 [D, W]    128 rows x 128 columns   fp32 or e8m0 [ceil(D/128), ceil(W/128)]
    fp8_block32   e4m3 [D, W]    32 rows x 32 columns     fp32 or e8m0 [ceil(D/32), ceil(W/32)]
    int8_row      int8 [D, W]    a row                    fp32 [D] or [D, 1]
    mxfp8         e4m3 [D, W]    32 columns of a row      e8m0 [D, W/32]
    mxfp4         e2m1 [D, W/2]  32 columns of a row      e8m0 [D, W/32]
    nvfp4         e2m1 [D, W/2]  16 columns of a row      e4m3 [D, W/16], and global_scale
    ============  =============  =======================  ===============================================

    A uint8 has two e2m1 codes, the even column in the low four bits. e8m0 is torch.float8_e8m0fnu or its bytes b as
    uint8: 2^(b - 127), and NaN for 255 (OCP Microscaling Formats 1.0). `quantize` makes one format more, bf16_12bit.

    Args:
        codes, scales: as in the table; row strides free, last stride 1.
        format: a name of the table.
        global_scale: fp32, one element or a float; multiplies everything. nvfp4 needs it: ModelOpt's weight_scale_2, or
            1 / weight_global_scale of compressed-tensors.
        shard_rows: the number of rows of each weight that an engine or a checkpoint has merged into this one along D,
            each with its own scales: block rows begin anew in each shard (2048 + 576 rows of fp8_block128 have 16 + 5),
            and fp8_tensor has one scale per shard. Where a shard ends within a block, scales are expanded to one row
            per weight row.

    Raises:
        TypeError, ValueError: tensors that do not fit each other or the format.

    Source of the layouts: Model-Optimizer `qtensor`, vLLM 0.33 `modelopt.py`, `fp8.py`, `compressed_tensors`.
    """

    codes: Tensor
    scales: Tensor
    format: str
    global_scale: Tensor | None = None
    shard_rows: InitVar[Sequence[int] | None] = None
    block: tuple[int, int] = field(init=False)  # rows and columns of the weight that share a scale

    def __post_init__(self, shard_rows: Sequence[int] | None) -> None:
        format = format_named(OP, self.format)
        codes = self.codes
        checks.check_tensor(OP, "codes", codes)
        checks.check_dtype(OP, "codes", codes, (format.codes,), f"the format is {self.format}")
        if codes.dim() != 2:
            raise checks.shape_error(OP, "codes", codes, "(D, W)" if format.columns_per_code == 1 else "(D, W/2)")
        checks.check_last_dim_contiguous(OP, "codes", codes)
        D, W = self.shape
        block = (format.block[0] or max(D, 1), format.block[1] or max(W, 1))
        if format.columns_per_code > 1 and W % block[1]:
            because = f"{block[1]} columns share a scale"
            raise checks.shape_error(OP, "codes", codes, f"(D, W/2) with W a multiple of {block[1]}", because)
        scales, block = self._checked_scales(format, block, shard_rows)
        global_scale = _checked_global_scale(OP, "global_scale", self.global_scale, self.format, codes)
        self.__dict__.update(scales=scales, block=block, global_scale=global_scale)  # frozen: setattr raises

    def _checked_scales(
        self, format: Format, block: tuple[int, int], shard_rows: Sequence[int] | None
    ) -> tuple[Tensor, tuple[int, int]]:
        """The scales as a matrix, and the rows and columns that share one."""
        scales, (D, W) = self.scales, self.shape
        checks.check_tensor(OP, "scales", scales)
        if scales.dtype == torch.uint8 and E8M0 in format.scales:
            scales = scales.view(E8M0)
        checks.check_dtype(OP, "scales", scales, format.scales, f"the format is {self.format}")
        checks.check_device(OP, "scales", scales, self.codes.device, "codes")
        shards = (
            [D] if shard_rows is None else checks.check_sequence(OP, "shard_rows", shard_rows, "a sequence of ints")
        )
        shards = [checks.check_int(OP, f"shard_rows[{k}]", rows, at_least=0) for k, rows in enumerate(shards)]
        if sum(shards) != D:
            raise checks.error(ValueError, OP, f"shard_rows is {shards}", f"a sum of {D}", "codes has that many rows")
        per_tensor = format.block[0] == _ALL
        block_rows = [1 if per_tensor else _ceil(rows, block[0]) for rows in shards]
        shape = (sum(block_rows), _ceil(W, block[1]))
        if scales.dim() < 2 and scales.numel() == shape[0] * shape[1]:
            scales = scales.reshape(shape)
        if tuple(scales.shape) != shape:
            got = f"codes of {D} rows and {W} columns have scales for {block[0]} x {block[1]} of them"
            raise checks.shape_error(OP, "scales", scales, str(shape), got)
        checks.check_last_dim_contiguous(OP, "scales", scales)
        if len(shards) == 1 or (not per_tensor and all(rows % block[0] == 0 for rows in shards[:-1])):
            return scales, block
        # One row of scales per row of the weight: 3 % of the codes' bytes at 128 columns in fp32.
        height = [rows if per_tensor else block[0] for rows in shards]
        ranges = zip(shards, height, accumulate([0, *block_rows[:-1]]), strict=True)
        device = scales.device
        rows_of = [begin + torch.arange(rows, device=device) // max(each, 1) for rows, each, begin in ranges]
        return _gather_rows(scales, torch.cat(rows_of)), (1, block[1])

    @property
    def shape(self) -> tuple[int, int]:
        """(D, W) of the weight."""
        D, columns = self.codes.shape
        return D, columns * FORMATS[self.format].columns_per_code

    @property
    def scale_shape(self) -> tuple[int, int]:
        """(ceil(D / block rows), ceil(W / block columns)), the shape of `scales`."""
        (D, W), (rows, columns) = self.shape, self.block
        return _ceil(D, rows), _ceil(W, columns)

    @property
    def code_bits(self) -> int:
        """Bits of one code: 8 or 4, and 12 of bf16_12bit."""
        return FORMATS[self.format].bits

    @property
    def nbytes(self) -> int:
        """The bytes that a call reads."""
        return self.codes.nbytes + self.scales.nbytes

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """(codes, scales, global_scale)."""
        return self.codes, self.scales, self.global_scale

    @staticmethod
    def of_tensors(
        codes: Tensor, scales: Tensor, global_scale: Tensor | None, format: str, block: tuple[int, int]
    ) -> QuantizedWeight:
        """From the fields of a QuantizedWeight after its checks, which do not run again."""
        weight = object.__new__(CompressedWeight if format == COMPRESSED else QuantizedWeight)
        fields = {"codes": codes, "scales": scales, "global_scale": global_scale, "format": format, "block": block}
        for name, value in fields.items():
            object.__setattr__(weight, name, value)  # torch 2.11 can trace this, but no update of __dict__
        return weight

    def check(self, op: str) -> None:
        """Raise where the tensors do not fit the format: those of a layer are buffers, which may be replaced."""
        parts = (("weight.codes", self.codes), ("weight.scales", self.scales))
        for (name, tensor), dtypes in zip(parts, DTYPES[self.format], strict=True):
            checks.check_tensor(op, name, tensor)
            checks.check_dtype(op, name, tensor, dtypes, f"the format is {self.format}")
            if tensor.dim() != 2:
                raise checks.shape_error(op, name, tensor, "two dimensions")
            checks.check_last_dim_contiguous(op, name, tensor)
        if tuple(self.scales.shape) != (expected := self.scale_shape):
            because = f"{self.block[0]} x {self.block[1]} of the weight have one"
            raise checks.shape_error(op, "weight.scales", self.scales, str(expected), because)
        _checked_global_scale(op, "weight.global_scale", self.global_scale, self.format, self.codes)

    def scaled_where(self, dtype: torch.dtype) -> str:
        """What a kernel for rows of `dtype` scales, so that scaling rounds nothing to 16 bits: "codes" where code *
        scale is exact in `dtype`, else fp32 sums over "blocks" of columns or over whole "rows"."""
        if self.block[1] >= self.shape[1]:
            return "rows"
        # e2m1 * e4m3 has 6 significant bits and lies in [2^-10, 2688]; a power of two may leave fp16's range.
        kind = self.scales.dtype
        return "codes" if kind == E4M3 or (kind == E8M0 and dtype != torch.float16) else "blocks"

    def to(self, device: torch.device | str, copy: bool = False) -> QuantizedWeight:
        """The same weight on a device; of tensors that are there already a copy only where `copy` asks for one. A dtype
        in place of the device raises TypeError: `dequantize` takes one."""
        device = checks.as_device(f"{OP}.to", device)  # .to(dtype) would convert codes without their scales
        moved = (None if tensor is None else tensor.to(device, copy=copy) for tensor in self.tensors)
        codes, scales, global_scale = moved
        assert codes is not None and scales is not None
        return QuantizedWeight.of_tensors(codes, scales, global_scale, self.format, self.block)

    @torch.no_grad()
    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """W [D, W] in `dtype`, rounded once from the products in fp32; in float64 it is exact."""
        _check_dense_dtype(dtype)
        out = torch.empty(self.shape, dtype=dtype, device=self.codes.device)
        for begin, end, values in self._chunks(torch.float64 if dtype == torch.float64 else torch.float32):
            out[begin:end] = values
        return out

    def _chunks(self, dtype: torch.dtype) -> Iterator[tuple[int, int, Tensor]]:
        """(first row, end row, values) of each piece."""
        for begin, end in _pieces(*self.shape):
            yield begin, end, values_of(self.codes[begin:end]).to(dtype) * self._scales_of_rows(begin, end, dtype)

    def _scales_of_rows(self, begin: int, end: int, dtype: torch.dtype) -> Tensor:
        rows, columns = self.block
        row = torch.arange(begin, end, device=self.codes.device) // rows
        blocks = self.scales[begin // rows : (end - 1) // rows + 1].float().to(dtype)
        blocks = blocks[row - begin // rows].repeat_interleave(columns, 1)[:, : self.shape[1]]
        return blocks if self.global_scale is None else blocks * self.global_scale.to(dtype)


def _pieces(D: int, W: int) -> Iterator[tuple[int, int]]:
    """(first row, end row), 4 M numbers at a time: no weight exists in fp32 as a whole."""
    step = max(1, (1 << 22) // max(W, 1))
    for begin in range(0, D, step):
        yield begin, min(begin + step, D)


class CompressedWeight(QuantizedWeight):
    """A bf16 weight [D, W] in 12 bits a number, as `quantize(weight, "bf16_12bit")` makes it: no number is rounded.

    A projection on it has the bits of one on the bf16 weight, where both run the same fused kernel. `scales` are not
    scales, but the `exponents` of `bf16_12bit`.
    """

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.block[1]

    @property
    def scale_shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.scales.shape[1]

    @property
    def code_bits(self) -> int:
        return 12

    def check(self, op: str) -> None:
        super().check(op)
        (D, W), codes, exponents = self.shape, self.codes, self.scales
        if codes.shape[1] != (row_bytes := bf16_12bit.row_bytes(W)):
            raise checks.shape_error(op, "weight.codes", codes, f"({D}, {row_bytes})", f"a row has {W} numbers")
        if not bf16_12bit.is_exponents_shape(tuple(exponents.shape), D):
            raise checks.shape_error(op, "weight.scales", exponents, f"({D}, {bf16_12bit.TABLE_BYTES} + 4 E)")

    @torch.no_grad()
    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        _check_dense_dtype(dtype)
        return bf16_12bit.decode(self.codes, self.scales, self.shape[1]).to(dtype)


def _check_dense_dtype(dtype: torch.dtype) -> None:
    dtypes = (*checks.DTYPES, torch.float64)
    if dtype not in dtypes:  # values cast to fp8 or integers without scales would overflow or be cut off
        expected = f"one of {', '.join(map(str, dtypes))}"
        raise checks.error(TypeError, f"{OP}.dequantize", f"dtype is {dtype!r}", expected)


def _compressed(weight: Tensor) -> CompressedWeight:
    W = weight.shape[1]
    if weight.dtype != torch.bfloat16:
        raise checks.error(TypeError, "quantize", f"weight is {weight.dtype}", "torch.bfloat16", f"of {COMPRESSED}")
    if W > bf16_12bit.MAX_WIDTH:
        limit = f"at most {bf16_12bit.MAX_WIDTH} columns"
        raise checks.shape_error("quantize", "weight", weight, f"(D, W), W {limit}", f"of {COMPRESSED}")
    compressed = QuantizedWeight.of_tensors(*bf16_12bit.encode(weight), None, COMPRESSED, (1, W))
    assert isinstance(compressed, CompressedWeight)
    return compressed


def columns_unsupported_reason(weights: Sequence[QuantizedWeight]) -> str | None:
    """Why weights with equal numbers of rows cannot be joined by columns as codes; None where they can."""
    first, columns = weights[0], weights[0].block[1]
    kinds = {(weight.format, weight.block, weight.scales.dtype) for weight in weights}
    if len({weight.format for weight in weights}) > 1:
        return f"{' and '.join(weight.format for weight in weights)} are two formats"
    if first.format == COMPRESSED:
        return "the exponents of a row are one table"
    if len(kinds) > 1:
        return "their scales are of other blocks or dtypes"
    if any(weight.shape[1] % columns for weight in weights[:-1]):
        return f"{columns} columns share a scale, and {first.shape[1]} are no multiple"
    several = columns < sum(weight.shape[1] for weight in weights)
    if several and columns not in _NARROW_BLOCKS and columns % 128:
        return f"{columns} columns share a scale, and kernels read blocks of {_NARROW_BLOCKS} or a multiple of 128"
    if any(weight.global_scale is not None for weight in weights):
        return "each has a global scale of its own"
    return None


def concat_columns(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """One weight [D, sum of W_k] from weights [D, W_k] side by side, for the concat of their inputs."""
    first = weights[0]
    codes, scales = (
        torch.cat([tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor for tensor in tensors], 1).view(
            tensors[0].dtype  # ATen cannot concatenate e8m0
        )
        for tensors in ([weight.codes for weight in weights], [weight.scales for weight in weights])
    )
    return QuantizedWeight.of_tensors(codes, scales, None, first.format, first.block)


def columns_of(weight: QuantizedWeight, begin: int, end: int) -> QuantizedWeight | None:
    """A view of some columns, the reverse of `concat_columns`; None where they share scales with other columns."""
    if weight.format == COMPRESSED:
        return None
    columns, scales = weight.block[1], weight.scales
    if columns < weight.shape[1]:
        if begin % columns or end % columns:
            return None
        scales = scales[:, begin // columns : end // columns]
    per_code = FORMATS[weight.format].columns_per_code
    codes = weight.codes[:, begin // per_code : end // per_code]
    return QuantizedWeight.of_tensors(codes, scales, weight.global_scale, weight.format, weight.block)


def log_dequantized(op: str, name: str, kind: str, dtype: torch.dtype, because: str) -> None:
    _LOGGER.info("eagle_kernels: %s: %s is %s, dequantized to %s: %s", op, name, kind, dtype, because)


def warn_of_dequantizing(op: str, kind: str, because: str) -> None:
    _LOGGER.warning("eagle_kernels: %s: every call will dequantize the %s weight: %s", op, kind, because)


def _gather_rows(scales: Tensor, rows: Tensor) -> Tensor:
    bits = torch.uint8 if scales.dtype.itemsize == 1 else scales.dtype  # ATen cannot gather e8m0
    return scales.view(bits)[rows].view(scales.dtype)


def format_named(op: str, name: object) -> Format:
    if not isinstance(name, str) or name not in FORMATS:
        raise checks.error(ValueError, op, f"format is {name!r}", f"one of {list(FORMATS)}")
    return FORMATS[name]


def num_bytes(name: str, shape: tuple[int, int]) -> int:
    """Bytes of the codes and scales of a weight [D, W], with scales in the format's first dtype; for bf16_12bit without
    the few exceptions."""
    D, W = shape
    if name == COMPRESSED:
        return D * (bf16_12bit.row_bytes(W) + bf16_12bit.TABLE_BYTES)
    format = FORMATS[name]
    rows, columns = scale_shape(format, shape)
    return D * W // format.columns_per_code + rows * columns * format.scales[0].itemsize


def scale_shape(format: Format, shape: tuple[int, int]) -> tuple[int, int]:
    """The shape of the scales of one weight [D, W]."""
    rows, columns = (size or max(whole, 1) for size, whole in zip(format.block, shape, strict=True))
    return _ceil(shape[0], rows), _ceil(shape[1], columns)


def _ceil(n: int, divisor: int) -> int:
    return -(-n // divisor)


def _checked_global_scale(op: str, name: str, value: object, format: str, codes: Tensor) -> Tensor | None:
    if value is None:
        if format == "nvfp4":
            because = "nvfp4 has two scales, and 1.0 says that the second is 1"
            raise checks.error(ValueError, op, f"{name} is None", "a number or a tensor", because)
        return None
    if not isinstance(value, Tensor):
        number = checks.check_number(op, name, value)
        if not abs(number) <= torch.finfo(torch.float32).max:
            raise checks.error(ValueError, op, f"{name} is {number}", "a number that is finite in torch.float32")
        value = torch.tensor(number, dtype=torch.float32, device=codes.device)
    checks.check_tensor(op, name, value)
    checks.check_dtype(op, name, value, (torch.float32,))
    checks.check_device(op, name, value, codes.device, "codes")
    if value.numel() != 1:
        raise checks.shape_error(op, name, value, "one element")
    return value


def values_of(codes: Tensor) -> Tensor:
    """The values of the codes in fp32: two columns for each uint8."""
    if codes.dtype != torch.uint8:
        return codes.float()
    table = torch.tensor((*E2M1, *(-value for value in E2M1)), device=codes.device)
    return table[torch.stack((codes & 15, codes >> 4), -1).int()].flatten(-2)


@torch.no_grad()
def quantize(weight: Tensor, format: str) -> QuantizedWeight:
    """The weight [D, W] in a format of `QuantizedWeight`, rounded to nearest even.

    logging.getLogger("eagle_kernels") logs the relative error, norm(rounded - W) / norm(W) in float64, at INFO.

    With a = max(abs(W)) over the numbers that share a scale, and m the largest code (448, 127, 6); where a is 0 the
    scale is 1, or 2^-127 for mxfp8 and mxfp4:

        fp8_tensor, fp8_row, fp8_block*, int8_row    scale = a / m
        mxfp8, mxfp4                                 scale = 2^ceil(log2(a / m))
        nvfp4    global_scale = max(abs(W)) / (6 * 448); scale = e4m3(max(a / (6 * global_scale), 2^-9))
        bf16_12bit                                   bf16 as it is, in 12 bits a number (`CompressedWeight`)

    Args:
        weight: bf16, fp16 or fp32.
        format: a name of the table of `QuantizedWeight`, or "bf16_12bit".

    Raises:
        TypeError, ValueError: a weight that is no matrix, is not finite, or whose columns are not a multiple of the
            block (mxfp8, mxfp4, nvfp4); for bf16_12bit, which takes infinity and NaN, one that is not bf16 or has more
            than 65535 columns.

    Source: Model-Optimizer `NVFP4QTensor`, `MXFP8QTensor`, `MXFP4QTensor`.
    """
    op = "quantize"
    if format not in WEIGHT_FORMATS:
        raise checks.error(ValueError, op, f"format is {format!r}", f"one of {list(WEIGHT_FORMATS)}")
    checks.check_tensor(op, "weight", weight)
    checks.check_dtype(op, "weight", weight, checks.DTYPES)
    if weight.is_meta:
        raise checks.error(ValueError, op, "weight is on meta", "a device where it has values")
    if weight.dim() != 2 or 0 in weight.shape:
        raise checks.shape_error(op, "weight", weight, "(D, W), neither of them 0")
    D, W = weight.shape
    if format == COMPRESSED:
        compressed = _compressed(weight)
        # A row of numbers far apart lengthens the table of exponents for all rows.
        level = logging.INFO if compressed.nbytes < weight.nbytes else logging.WARNING
        _LOGGER.log(level, "eagle_kernels: quantize to %s: [%d, %d], %s", format, D, W, _sizes(compressed, weight))
        return compressed
    kind = FORMATS[format]
    rows, columns = kind.block[0] or D, kind.block[1] or W
    if kind.columns_of_a_row is not None and W % columns:
        raise checks.shape_error(op, "weight", weight, f"(D, W) with W a multiple of {columns}", f"of {format}")
    of_columns = []
    for begin, end in _pieces(D, W):
        magnitudes = weight[begin:end].float().abs()
        if not magnitudes.isfinite().all():
            raise checks.error(ValueError, op, "weight has NaN or infinity", "finite values")
        of_columns.append(F.pad(magnitudes, (0, -W % columns)).unflatten(1, (-1, columns)).amax(2))
    largest = F.pad(torch.cat(of_columns), (0, 0, 0, -D % rows)).unflatten(0, (-1, rows)).amax(1)
    scales, global_scale = _scales_for(largest, kind)
    codes = torch.empty(D, W // kind.columns_per_code, dtype=kind.codes, device=weight.device)
    quantized = QuantizedWeight(codes, scales, format, global_scale)
    for begin, end in _pieces(D, W):
        spread = quantized._scales_of_rows(begin, end, torch.float32)
        codes[begin:end] = _codes_for(weight[begin:end].float().contiguous() / spread, kind)
    sizes, error = _sizes(quantized, weight), _relative_error(quantized, weight)
    _LOGGER.info("eagle_kernels: quantize to %s: [%d, %d], %s, relative error %.2e", format, D, W, sizes, error)
    return quantized


def _relative_error(quantized: QuantizedWeight, weight: Tensor) -> float:
    """norm(W - weight) / norm(weight) in float64; 0 where the weight is 0."""
    lost = total = 0.0
    for begin, end, values in quantized._chunks(torch.float64):
        rows = weight[begin:end].double()
        lost += (values - rows).square().sum().item()
        total += rows.square().sum().item()
    return (lost / total) ** 0.5 if total else 0.0


def _sizes(quantized: QuantizedWeight, weight: Tensor) -> str:
    return f"{quantized.nbytes / 1e6:.1f} MB of {weight.nbytes / 1e6:.1f}"


def _scales_for(largest: Tensor, format: Format) -> tuple[Tensor, Tensor | None]:
    if format.scales == (E8M0,):
        # Not log2: in fp32 log2(1 + 2^-23) is 0, and the scale would be half of what the largest code needs.
        mantissa, exponent = torch.frexp(largest.double() / format.max)
        exponent = (exponent - (mantissa == 0.5).int()).where(largest > 0, -127).clamp(-127, 127)
        return (exponent + 127).to(torch.uint8).view(E8M0), None
    if format.scales == (E4M3,):
        global_scale = _one_for_zero(largest.amax() / (format.max * 448.0))
        return _one_for_zero(largest / (format.max * global_scale)).clamp(min=2**-9).to(E4M3), global_scale
    return _one_for_zero(largest / format.max), None


def _one_for_zero(scales: Tensor) -> Tensor:
    return torch.where(scales == 0, 1.0, scales)


def _codes_for(scaled: Tensor, format: Format) -> Tensor:
    scaled = scaled.clamp(-format.max, format.max)
    if format.codes == torch.int8:
        return scaled.round().to(torch.int8)
    if format.codes == E4M3:
        return scaled.to(E4M3)
    # A tie goes to the even code: up from the bounds below codes 2, 4, 6.
    values = torch.tensor(E2M1, device=scaled.device)
    bounds = (values[1:] + values[:-1]) / 2
    magnitude = scaled.abs()
    code = torch.bucketize(magnitude, bounds) + torch.isin(magnitude, bounds[1::2])
    code = (code + 8 * (scaled < 0)).to(torch.uint8)
    return code[:, 0::2] | code[:, 1::2] << 4
