"""bf16 stored exactly in 12 bits a number: a call reads a quarter less of the weight, and the product is the same.

A row of weights has few different exponents: the 16 most frequent cover all but some in ten thousand of its numbers
(all but one in 30,000 of normally distributed ones). So 4 bits index a number's exponent among the row's 16, and 8 bits
are its sign and mantissa. Exceptions, numbers with another exponent, are stored in full beside their row.

    codes      uint8 [D, 192 * ceil(W/128)]    the order within a row is in csrc/cpu/widen_bf16_12bit.h
    exponents  uint8 [D, 32 + 4 E]    the row's 16 exponents as the bits they have in a number (16 low bytes, then 16
                                      high bytes), then its exceptions as pairs of uint16: column (ascending) and bits.
                                      E is the largest count of exceptions in a row; unused entries have column 65535.

After DFloat11 (arXiv 2504.11651), which codes the exponent with a variable number of bits: 11 bits a number in all, but
no row can be read from its middle.
"""

from __future__ import annotations

import torch
from torch import Tensor

# An exception's column has 16 bits, and 65535 means that there is no exception.
MAX_WIDTH = 65535
TABLE_BYTES = 32  # of a row's 16 exponents
_GROUP = 128
_NO_COLUMN = 0xFFFF


def row_bytes(width: int) -> int:
    """Bytes of the codes of one row."""
    return -(-width // _GROUP) * (_GROUP + _GROUP // 2)


def is_exponents_shape(shape: tuple[int, ...], rows: int) -> bool:
    return len(shape) == 2 and shape[0] == rows and shape[1] >= TABLE_BYTES and (shape[1] - TABLE_BYTES) % 4 == 0


def encode(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, exponents) of a bf16 weight [D, W]."""
    D, W = weight.shape
    codes = torch.zeros(D, row_bytes(W), dtype=torch.uint8, device=weight.device)
    tables, exceptions = [], []
    for begin, end in _row_ranges(D, W):
        bits = weight[begin:end].contiguous().view(torch.int16).to(torch.int32) & 0xFFFF
        exponent = (bits >> 7 & 0xFF).long()
        counts = torch.zeros(end - begin, 256, dtype=torch.int32, device=weight.device)
        counts.scatter_add_(1, exponent, torch.ones_like(bits))
        most = counts.topk(16).indices
        index_of = torch.full((end - begin, 256), 16, dtype=torch.uint8, device=weight.device)
        index_of.scatter_(1, most, torch.arange(16, dtype=torch.uint8, device=weight.device).expand_as(most))
        index = index_of.gather(1, exponent)
        row, column = (index == 16).nonzero(as_tuple=True)
        exceptions.append((row + begin, column, bits[row, column]))
        tables.append(torch.cat(((most & 1) << 7, most >> 1), 1).to(torch.uint8))
        numbers = (bits >> 8 & 0x80 | bits & 0x7F).to(torch.uint8)
        numbers, index = _in_lines(numbers), _in_lines(index & 15)
        pairs = index[:, :, 0] | index[:, :, 1] << 4
        codes[begin:end] = torch.cat((numbers.flatten(2), pairs), 2).flatten(1)
    row, column, bits = (torch.cat(parts) for parts in zip(*exceptions, strict=True))
    beside = torch.bincount(row, minlength=D)
    max_beside = int(beside.max())
    place = torch.arange(len(row), device=weight.device) - (beside.cumsum(0) - beside)[row]
    listed = torch.zeros(D, max_beside, 2, dtype=torch.int32, device=weight.device)
    listed[:, :, 0] = _NO_COLUMN
    listed[row, place] = torch.stack((column.int(), bits), 1)
    as_bytes = torch.stack((listed & 0xFF, listed >> 8), -1).to(torch.uint8).flatten(1)
    return codes, torch.cat((torch.cat(tables), as_bytes), 1)


def decode(codes: Tensor, exponents: Tensor, width: int) -> Tensor:
    """The bf16 weight [D, W] that was encoded."""
    D = codes.shape[0]
    weight = torch.empty(D, width, dtype=torch.bfloat16, device=codes.device)
    for begin, end in _row_ranges(D, width):
        groups = codes[begin:end].view(end - begin, -1, _GROUP + _GROUP // 2)
        pairs = groups[:, :, _GROUP:]
        index = _in_columns(torch.cat((pairs & 15, pairs >> 4), 2))[:, :width].long()
        numbers = _in_columns(groups[:, :, :_GROUP])[:, :width].int()
        low, high = (table.int().gather(1, index) for table in exponents[begin:end, :TABLE_BYTES].split(16, 1))
        bits = (numbers & 0x80 | high) << 8 | numbers & 0x7F | low
        halves = exponents[begin:end, TABLE_BYTES:].view(end - begin, -1, 2, 2).int()
        column, exact = (halves[..., 0] | halves[..., 1] << 8).unbind(-1)
        row, place = (column < width).nonzero(as_tuple=True)
        bits[row, column[row, place].long()] = exact[row, place]
        weight[begin:end] = bits.to(torch.int16).view(torch.bfloat16)
    return weight


def _in_lines(columns: Tensor) -> Tensor:
    """[D, W] -> [D, groups, 2 lines, 64 bytes]; a quarter line has 8 of its first 32 columns, then 8 of its others."""
    padded = torch.nn.functional.pad(columns, (0, -columns.shape[1] % _GROUP))
    return padded.view(len(columns), -1, 2, 2, 4, 8).transpose(3, 4).flatten(3)


def _in_columns(lines: Tensor) -> Tensor:
    """[D, groups, 128 bytes] -> [D, columns]: undoes `_in_lines`."""
    return lines.reshape(len(lines), -1, 2, 4, 2, 8).transpose(3, 4).flatten(1)


def _row_ranges(D: int, W: int) -> list[tuple[int, int]]:
    """Ranges of rows with about 4 M numbers each, which take 32 MB as int64."""
    step = max(1, (1 << 22) // max(W, 1))
    return [(begin, min(begin + step, D)) for begin in range(0, D, step)]
