"""A projection's weight from a checkpoint, quantized or not, under the names that quantizers write.

| codes | scales | who |
|---|---|---|
| weight | weight_scale | Model-Optimizer, compressed-tensors, Quark: fp8, int8, mxfp8, mxfp4, nvfp4 |
| weight | weight_scale_inv | Hugging Face fp8 in blocks; despite its name this scale is multiplied |
| weight | weight_scale [D, groups] | compressed-tensors int8 in groups, dequantized when it is read |
| weight | weight_scale_inv | GPTQModel fp8, a divisor: `weight_scale_semantics` is `inverse` |
| weight | scale | DeepSeek's own files |
| weight | qscale_weight | Mistral's own files |
| weight_packed | weight_scale | compressed-tensors nvfp4, and integers in groups (`int4_checkpoint`) |
| qweight | scales | GPTQ and AWQ (`int4_checkpoint`) |

The tensors determine the format: their dtypes and shapes fit one, or several that mean the same. What a config beside
them says is compared with that. Codes are never read without their scale.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from . import bf16_12bit, checks, int4_checkpoint
from .quantization_config import INT8_GROUP, check_format, check_untransformed, section_of, unread_format
from .quantized_weight import COMPRESSED, E8M0, FORMATS, QuantizedWeight, log_dequantized, scale_shape
from .stored_projection import CODES, StoredProjection

_INVERSE = "weight_scale_inv"
_SCALES = ("weight_scale", _INVERSE, "scale", "qscale_weight")
# nvfp4's second scale: Model-Optimizer's is multiplied, compressed-tensors' is a divisor.
_MULTIPLIER, _DIVISOR = "weight_scale_2", "weight_global_scale"
_OF_CODES = ("weight", "weight_packed", *_SCALES, _MULTIPLIER, _DIVISOR)
# Quark and sparseml write it beside symmetric int8 too, all zeros: vLLM 0.32's `quark_w8a8_int8.py` has a parameter for
# it that nothing reads.
_ZEROS = "weight_zero_point"
# All parameters that a weight may consist of, dense or not.
OF_WEIGHT = tuple(dict.fromkeys((*_OF_CODES, *int4_checkpoint.OF_PACKED, *int4_checkpoint.OF_TRANSPOSED)))
# Codes in formats that only engines read: EXL2's, EXL3's, HQQ's, AQLM's and torchao's; bitsandbytes calls its `weight`.
UNREAD_CODES = ("q_weight", "trellis", "W_q", "codes", "_weight_qdata")
# Ignored: scales of activations and KV caches, which stay in 16 bits here, and what the codes' own shape says.
_UNREAD = (
    *("input_scale", "input_global_scale", "input_zero_point", "qscale_act", "output_scale", "k_scale", "v_scale"),
    "activation_scale",  # Hugging Face's input_scale
    "input_scale_2",  # Quark's second one
    "weight_shape",
)
_RANGE = re.compile(r"\w+_quantizer(\.\d+)?\._amax")  # Model-Optimizer's calibrated ranges, ignored as well


def is_of_activations(parameter: str) -> bool:
    """Whether a tensor, by what follows its layer's path, says nothing of the layer's numbers."""
    return parameter in _UNREAD or _RANGE.fullmatch(parameter) is not None


def tensors_inside(paths: Collection[str], names: Iterable[str]) -> dict[str, dict[str, str]]:
    """For each layer's path the names of tensors of modules inside it, by what follows the path: `lora_A.weight`."""
    inside: dict[str, dict[str, str]] = {path: {} for path in paths}
    for name in names:
        path = name.rpartition(".")[0]
        while path := path.rpartition(".")[0]:
            if path in inside:
                inside[path][name[len(path) + 1 :]] = name
    return inside


def read_projection(stored: StoredProjection) -> Tensor | QuantizedWeight:
    """The weight [D, W] from its tensors; dense where it is not quantized, or is integers that no kernel reads.

    Raises ValueError that names the tensor.
    """
    weight = _read(stored)
    if isinstance(weight, int4_checkpoint.Packed):
        return weight.dequantize(stored.op, stored.codes_name)
    if isinstance(weight, QuantizedWeight) and weight.codes.dtype == torch.int8 and weight.scales.shape[1] > 1:
        because = "a projection's int8 has one scale for each row"
        log_dequantized(stored.op, stored.codes_name, INT8_GROUP, torch.bfloat16, because)
        return weight.dequantize()
    return weight


def check_projection(stored: StoredProjection) -> None:
    """Raise what `read_projection` raises, but dequantize nothing: the weight may take gigabytes."""
    _read(stored)


def _read(stored: StoredProjection) -> Tensor | QuantizedWeight | int4_checkpoint.Packed:
    """The projection's tensors, checked. int8 in groups is an int8_row with the group for its block."""
    check_is_read(stored)
    op, shape, read = stored.op, stored.shape, stored.read
    is_integers = int4_checkpoint.is_packed(stored)
    stored = _without_zeros(stored)
    names, config = stored.names, stored.config
    codes_name = _check_names(stored, is_integers)
    check_untransformed(op, codes_name, config)
    if is_integers:
        return int4_checkpoint.packed_of(stored)
    codes = read(codes_name)
    checks.check_tensor(op, codes_name, codes)
    if codes.is_floating_point() and codes.itemsize > 1:  # numbers, no codes
        checks.check_dtype(op, codes_name, codes, checks.DTYPES)
    scale_names = [names[parameter] for parameter in _SCALES if parameter in names]
    if len(scale_names) > 1:
        raise checks.error(ValueError, op, f"weights has {' and '.join(scale_names)}", "one of them", "both scale it")
    if codes.dtype in checks.DTYPES:
        scale_names += [names[parameter] for parameter in (_MULTIPLIER, _DIVISOR) if parameter in names]
        if scale_names:
            because = "a scale belongs to codes, and these are numbers"
            raise checks.error(ValueError, op, f"{codes_name} is {codes.dtype}", f"codes for {scale_names[0]}", because)
        if tuple(codes.shape) != shape:
            raise checks.shape_error(op, codes_name, codes, str(shape), f"it is {stored.meaning}")
        return codes
    if not scale_names:
        expected = f"its scale beside it: one of {list(_SCALES)}"
        raise checks.error(ValueError, op, f"weights has {codes_name} in {codes.dtype}", expected)
    scale_name = scale_names[0]
    scales = read(scale_name)
    checks.check_tensor(op, scale_name, scales)
    if _is_compressed(codes, scales, shape):
        check_format(op, codes_name, [COMPRESSED], config)
        return QuantizedWeight.of_tensors(codes, scales, None, COMPRESSED, (1, shape[1]))
    fits, codes, scales = _recognize(stored, codes, (scale_name, scales))
    if (missing := scales.float().isnan()).any():
        place = missing.nonzero()[0].tolist()
        raise checks.error(ValueError, op, f"{scale_name} is NaN at {place}", "numbers", "what it scales would be lost")
    format = check_format(op, codes_name, fits, config)
    section = section_of(config, stored.path)
    if codes.dtype == torch.int8 and section.values.get("symmetric") is False:
        says = f"the checkpoint says {section.place('symmetric')}symmetric False"
        raise checks.error(ValueError, op, f"{codes_name} is {format}", "int8 without zeros", says)
    global_scale = _global_scale(stored, format)
    if format == INT8_GROUP:
        groups, size = scales.shape[1], section.values.get("group_size")
        if isinstance(size, int) and size > 0 and groups != (meant := -(-shape[1] // size)):
            got = f"{codes_name} has {groups} groups in {shape[1]} columns"
            says = f"the checkpoint says {section.place('group_size')}group_size {size}"
            raise checks.error(ValueError, op, got, str(meant), says)
        return QuantizedWeight.of_tensors(codes, scales, None, "int8_row", (1, shape[1] // groups))
    return QuantizedWeight(codes, _multipliers(stored, scale_name, scales), format, global_scale)


def check_is_read(stored: StoredProjection) -> None:
    """Refuse codes whose config names a format that only engines read: by shape they would pass for another format."""
    names = stored.names
    if not names:
        return
    codes = (*CODES, *UNREAD_CODES)
    parameter = next((parameter for parameter in codes if parameter in names), min(names))
    name = names[parameter]
    format = unread_format(stored.config, name.removesuffix(f".{parameter}"))
    is_dense = names.keys() == {"weight"} and getattr(stored.read(names["weight"]), "dtype", None) in checks.DTYPES
    if format is None or is_dense:
        return
    expected = f"numbers or codes in one of {list(FORMATS)}"
    because = "the checkpoint's quantization_config says it"
    raise checks.error(ValueError, stored.op, f"{name} is in {format}", expected, because)


def _without_zeros(stored: StoredProjection) -> StoredProjection:
    """Without int8's zero points, which have to be 0: no kernel subtracts them."""
    op, names, read = stored.op, stored.names, stored.read
    if _ZEROS not in names or "weight" not in names or getattr(read(names["weight"]), "dtype", None) != torch.int8:
        return stored
    zeros = stored.tensor(_ZEROS)
    if (others := zeros != 0).any():
        place = others.nonzero()[0].tolist()
        got = f"{names[_ZEROS]} is {zeros[tuple(place)].item()} at {place}"
        raise checks.error(ValueError, op, got, "0", "int8 is read without zero points")
    return replace(stored, names={parameter: name for parameter, name in names.items() if parameter != _ZEROS})


def _check_names(stored: StoredProjection, is_integers: bool) -> str:
    """The codes' name. Refuses tensors beside them that are not read: `pre_quant_scale` would change every number."""
    op, names = stored.op, stored.names
    codes = [names[parameter] for parameter in CODES if parameter in names]
    if not codes:
        name = next(iter(names.values()))
        raise checks.error(ValueError, op, f"weights has {name}", "a weight beside it")
    if len(codes) > 1:
        raise checks.error(ValueError, op, f"weights has {' and '.join(codes)}", "one of them", "each is the weight")
    read: tuple[str, ...] = _OF_CODES
    if is_integers:
        transposed = int4_checkpoint.TRANSPOSED in names
        read = int4_checkpoint.OF_TRANSPOSED if transposed else int4_checkpoint.OF_PACKED
    for parameter, name in names.items():
        if parameter not in read and not is_of_activations(parameter):
            because = "what it makes of them would be lost"
            raise checks.error(ValueError, op, f"weights has {name} beside {codes[0]}", f"only {list(read)}", because)
    return codes[0]


def _is_compressed(codes: Tensor, scales: Tensor, shape: tuple[int, int]) -> bool:
    """Whether these are of a saved QuantizedLinear in 12 bits, whose codes have at least twice the bytes of e2m1."""
    D, W = shape
    is_bytes = codes.dtype == scales.dtype == torch.uint8
    sizes = tuple(codes.shape) == (D, bf16_12bit.row_bytes(W)) and 0 < W <= bf16_12bit.MAX_WIDTH
    return is_bytes and sizes and bf16_12bit.is_exponents_shape(tuple(scales.shape), D)


def _widened(scales: Tensor) -> Tensor:
    """Scales in fp32, where compressed-tensors has bf16, and 2-D, where Model-Optimizer has [rows, 1, columns, 1]."""
    if scales.dtype in (torch.bfloat16, torch.float16):
        scales = scales.float()
    if scales.dim() == 4 and scales.shape[1] == scales.shape[3] == 1:
        scales = scales[:, 0, :, 0]
    return scales


def _recognize(stored: StoredProjection, code: Tensor, scales: tuple[str, Tensor]) -> tuple[list[str], Tensor, Tensor]:
    """(the formats that fit, which mean the same, codes, scales) of tensors that fit each other."""
    op, codes_name, shape = stored.op, stored.codes_name, stored.shape
    (scale_name, in_file), (D, W) = scales, shape
    scale = _widened(in_file)
    if code.dtype == torch.int8 and tuple(code.shape) == (D, W // 2) and scale.dtype in (torch.uint8, E8M0):
        code = code.view(torch.uint8)  # DeepSeek's pairs of e2m1
    kinds = {name: format for name, format in FORMATS.items() if format.codes == code.dtype}
    if not kinds:
        because = f"{scale_name} belongs to it"
        expected = "codes in torch.float8_e4m3fn, torch.int8 or torch.uint8"
        raise checks.error(ValueError, op, f"{codes_name} is {code.dtype}", expected, because)
    columns = W // 2 if code.dtype == torch.uint8 else W
    if tuple(code.shape) != (D, columns):
        raise checks.shape_error(op, codes_name, code, str((D, columns)), f"it is {stored.meaning}")
    if code.dtype == torch.int8 and code.numel() and scale.dtype == torch.float32 and scale.numel() == 1:
        scale = scale.reshape(1, 1).repeat(D, 1)  # compressed-tensors' strategy tensor; kernels have int8 by rows only
    sizes = {}
    for name, format in kinds.items():
        dtypes = (*format.scales, torch.uint8) if E8M0 in format.scales else format.scales
        if scale.dtype in dtypes:
            sizes[name] = scale_shape(format, shape)
    fits = [name for name, size in sizes.items() if tuple(scale.shape) == size]
    if scale.dim() < 2:
        fits = [name for name, (rows, columns) in sizes.items() if scale.numel() == rows * columns]
    if code.dtype == torch.int8 and sizes and scale.dim() == 2 and not fits:
        groups = scale.shape[1]
        fits = [INT8_GROUP] if scale.shape[0] == D and 1 < groups <= W and W % groups == 0 else []
    if fits:
        return fits, code, scale.view(E8M0) if scale.dtype == torch.uint8 else scale
    got = f"{scale_name} is {in_file.dtype} of shape {tuple(in_file.shape)}"
    if not sizes:
        of_scales = sorted({str(dtype) for format in kinds.values() for dtype in format.scales})
        raise checks.error(ValueError, op, got, " or ".join(of_scales), f"{codes_name} is {code.dtype}")
    because = f"{codes_name} has shape {tuple(code.shape)}"
    choices = " or ".join(f"{size} of {name}" for name, size in sizes.items())
    raise checks.error(ValueError, op, got, choices, because)


def _multipliers(stored: StoredProjection, scale_name: str, scales: Tensor) -> Tensor:
    """What the codes are multiplied by: 1 / weight_scale_inv where the config has GPTQModel's key for a divisor."""
    section, key = section_of(stored.config, stored.path), "weight_scale_semantics"
    if stored.names.get(_INVERSE) != scale_name or (semantics := section.values.get(key)) is None:
        return scales
    if semantics != "inverse":
        got = f"the checkpoint says {section.place(key)}{key} {semantics!r}"
        raise checks.error(ValueError, stored.op, got, "'inverse'", f"it says whether {scale_name} is a divisor")
    multipliers = 1 / scales.float()
    if (wrong := ~(multipliers.isfinite() & (multipliers > 0))).any():
        place = wrong.nonzero()[0].tolist()
        got = f"{scale_name} is {scales[tuple(place)].item()} at {place}"
        raise checks.error(ValueError, stored.op, got, "a finite number above 0", "codes are divided by it")
    return multipliers


def _global_scale(stored: StoredProjection, format: str) -> Tensor | None:
    op, names, codes_name = stored.op, stored.names, stored.codes_name
    given = [parameter for parameter in (_MULTIPLIER, _DIVISOR) if parameter in names]
    if format != "nvfp4":
        if given:
            because = f"{codes_name} is {format}"
            raise checks.error(ValueError, op, f"weights has {names[given[0]]}", "none", because)
        return None
    if len(given) != 1:
        expected = f"one of {_MULTIPLIER} and {_DIVISOR} beside it"
        raise checks.error(ValueError, op, f"weights has {codes_name} in nvfp4", expected)
    name = names[given[0]]
    if given[0] == _DIVISOR and "weight" in names:
        because = (
            "the divisor of compressed-tensors is beside weight_packed, and state_dict once called the multiplier so"
        )
        raise checks.error(ValueError, op, f"weights has {name} beside {codes_name}", _MULTIPLIER, because)
    scale = stored.tensor(given[0])
    if scale.numel() != 1 or scale.dtype not in (*checks.DTYPES, torch.float64):
        raise checks.error(ValueError, op, f"{name} is {scale.dtype} of shape {tuple(scale.shape)}", "one number")
    value = scale.double().reshape(())
    if not value.isfinite() or value <= 0:
        raise checks.error(ValueError, op, f"{name} is {value.item()}", "a finite number above 0")
    multiplier = (value if given[0] == _MULTIPLIER else 1 / value).float()
    if multiplier == 0 or not multiplier.isfinite():
        because = f"in fp32 the codes would be multiplied by {multiplier.item()}"
        raise checks.error(ValueError, op, f"{name} is {value.item()}", "a number nearer to 1", because)
    return multiplier
