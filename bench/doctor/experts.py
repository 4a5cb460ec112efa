"""Stacked experts: the codes of all experts of a layer in one tensor. Engines read them, this package does not.

| who | codes | scales |
|---|---|---|
| gpt-oss | down_proj_blocks u8 [E, D, W/32, 16] | down_proj_scales e8m0 [E, D, W/32] |
| Hugging Face fp8 | down_proj e4m3 [E, D, W] | down_proj_scale_inv [E, ceil(D/n), ceil(W/n)], or [E, 1, 1] |
| fbgemm_fp8 of Llama 4 | down_proj e4m3 [E, W, D] | down_proj_scale [E, 1, D] |
| Model-Optimizer's Llama 4 | down_proj e4m3 [E, W, D] | down_proj_weight_scale, one |
| the same in NVFP4 | down_proj u8 [E, W/2, D] | down_proj_weight_scale e4m3 [E, W/16, D], down_proj_weight_scale_2 |
| Step-3.5, Quark | moe.down_proj.weight [E, D, W] | .weight_scale_inv, .weight_scale, .weight_scale_2 beside it |

Which of the last two dimensions is D differs between writers, so scales of either order are accepted.

Sources: transformers 5.23 `integrations/finegrained_fp8`, `mxfp4`, `fbgemm_fp8`; vLLM 0.33 `gpt_oss`, `mllama4`,
`step3p5`; SGLang 0.5.23 `gpt_oss`, `mllama4`.
"""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from eagle_kernels.quantization_config import check_format

from .pair import OP, Header, Pair

_SCALES = ("weight_scale", "weight_scale_inv", "scale", "scale_inv", "scales", "qscale_weight")
_SECOND = ("weight_scale_2", "weight_global_scale")
_FLOATS, _E8M0 = ("F32", "BF16", "F16"), ("F8_E8M0", "U8")
_BLOCKS = {"fp8_block128": 128, "fp8_block32": 32}


def unreadable(pair: Pair, path: str, stored: str, config: Mapping[str, Any] | None) -> str | None:
    """What is wrong with the headers of a stack; None where they match the table."""
    parameters = pair.layers[path]
    codes, name = parameters[stored], pair.name_of(path, stored)
    got = f"{name} is {list(codes.shape)} of {codes.dtype}"
    given = [parameter for parameter in _SCALES if parameter in parameters]
    if len(given) > 1:
        both = " and ".join(pair.name_of(path, parameter) for parameter in given)
        return f"the file has {both}, expected one of them, because both scale {name}"
    if not given:
        return f"{got}, expected its scales beside it"
    scale, scale_name = parameters[given[0]], pair.name_of(path, given[0])
    fits = dict(_fits(stored, codes, scale))
    if not fits:
        return f"{got}, expected codes of stacked experts"
    found = [format for format, (dtypes, shapes) in fits.items() if scale.dtype in dtypes and scale.shape in shapes]
    if not found:
        expected = " or ".join(f"{list(min(shapes))} of {format}" for format, (_, shapes) in fits.items() if shapes)
        return f"{scale_name} is {list(scale.shape)} of {scale.dtype}, expected {expected}, because {got}"
    second = [parameter for parameter in _SECOND if parameter in parameters]
    if found == ["nvfp4"] and len(second) != 1:
        return f"{got} in nvfp4, expected one of {' and '.join(_SECOND)} beside it"
    try:
        check_format(OP, name, found, config or {})
    except ValueError as wrong:
        return str(wrong).removeprefix(f"{OP}: ")
    return None


_Fits = tuple[tuple[str, ...], set[tuple[int, ...]]]  # the dtypes and the shapes of scales


def _fits(stored: str, codes: Header, scale: Header) -> Iterator[tuple[str, _Fits]]:
    """(format, the scales that fit) for each format that the codes can have."""
    experts, *sizes = codes.shape
    if stored == "blocks":
        if sizes[-1] % 16 == 0:
            size = sizes[-1] // 16
            yield "mxfp4", (_E8M0, {(experts, *sizes[:-1]) if len(sizes) == 3 else (experts, sizes[0], size)})
        return
    if len(sizes) != 2:
        return
    rows, columns = sizes
    one_each = {(), (1,), (experts,), (experts, 1), (experts, 2), (experts, 1, 1), (experts, 2, 1), (experts, 1, 2)}
    row = {(experts, rows), (experts, rows, 1), (experts, 1, rows)}
    row |= {(experts, columns), (experts, columns, 1), (experts, 1, columns)}
    if codes.dtype == "F8_E4M3":
        yield "fp8_tensor", (_FLOATS, one_each)
        yield "fp8_row", (_FLOATS, row)
        for format, block in _BLOCKS.items():
            counts = itertools.product(_counts(rows, block), _counts(columns, block))
            yield format, ((*_FLOATS, *_E8M0), {(experts, *count) for count in counts})
        yield "mxfp8", (_E8M0, _groups(experts, rows, columns, 32))
    if codes.dtype == "I8":
        yield "int8_row", (_FLOATS, row | one_each)
    if codes.dtype in ("I8", "U8"):  # two codes per byte, along either dimension
        for format, dtypes, group in (("mxfp4", _E8M0, 32), ("nvfp4", ("F8_E4M3",), 16)):
            by_row, by_column = (rows, 2 * columns), (2 * rows, columns)
            yield format, (dtypes, _groups(experts, *by_row, group) | _groups(experts, *by_column, group))
    if codes.dtype == "I32":  # in groups of any size
        groups = scale.shape[1:] if len(scale.shape) == 3 else (rows, columns)
        yield ("pack-quantized" if stored == "weight_packed" else "gptq"), (_FLOATS, {(experts, *groups)})


def _counts(size: int, block: int) -> set[int]:
    """Possible numbers of blocks along a dimension: for gate and up together, or for each of them."""
    return {-(-size // block), max(-(-size // block), 2), 2 * -(-(size // 2) // block)}


def _groups(experts: int, rows: int, columns: int, size: int) -> set[tuple[int, ...]]:
    """Shapes of the scales of groups along the columns or along the rows."""
    return {(experts, rows, -(-columns // size)), (experts, -(-rows // size), columns)}
