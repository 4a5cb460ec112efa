"""Integers packed into int32 as compressed-tensors, AutoAWQ, GPTQ and auto-round write them. No kernel reads them, so
they are dequantized when they are loaded.

    W[d, c] = (q[d, c] - zero[d, group]) * scale[d, group]

q is unsigned, with b = 4 or 8 bits. The first number of an int32 is in its lowest bits:

| who | codes | zeros | numbers of an int32 | zero |
|---|---|---|---|---|
| compressed-tensors `pack-quantized` | [D, W*b/32] | [D*b/32, groups] | in order | as stored, or 2^(b-1) |
| GPTQ | [W*b/32, D] | [groups, D*b/32] | in order | stored + 1, or as stored |
| AutoAWQ `gemm`, b = 4 | [W, D/8] | [groups, D/8] | 0 2 4 6 1 3 5 7 | as stored |

The config's `checkpoint_format` or `format` says which zeros GPTQ's are: `gptq` is stored + 1, `gptq_v2` as stored.
AWQ's `version`, `format` and `checkpoint_format` say `gemm`. auto-round's `packing_format` says `auto_round:auto_gptq`
(stored + 1), `auto_round`, `auto_round:exllamav2`, `auto_round:gptqmodel` (as stored) or `auto_round:auto_awq`
(`gemm`). Without a key zeros are stored + 1 for GPTQ's layout, as in vLLM and auto-round. Other values are refused.

compressed-tensors has scales [D, groups] and the names weight_packed, weight_scale and weight_zero_point; the others
have scales [groups, D] and the names qweight, scales and qzeros.

g_idx (GPTQ's `desc_act`) and weight_g_idx give the group of each column. Without them each group is group_size
consecutive columns, and the last one may have fewer. Where there are several groups, a g_idx of all zeros is ignored
(exllamav2 `ext.py`, `make_q_matrix`).

Sources: compressed-tensors 0.20 `compressors/pack_quantized` (`pack_to_int32`, and its zeros along dim 0), AutoAWQ
`awq/utils/packing_utils.py` (`AWQ_ORDER`, `dequantize_gemm`), AutoGPTQ
`nn_modules/qlinear/qlinear_cuda_old.py` (`pack`), vLLM `csrc/quantization/gptq/q_gemm.cu` (`zero_offset`), auto-round
0.9.7 `export_to_autoround/export.py` (`dynamic_import_quant_linear_for_packing`), `qlinear_torch.py`,
`qlinear_torch_zp.py`, `inference/convert_model.py` (`auto_round:gptq` and `auto_round:awq` are short names).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import checks
from .quantization_config import check_format, leaves_out, method_of, section_of
from .quantized_weight import log_dequantized
from .stored_projection import StoredProjection

PACKED, TRANSPOSED = "weight_packed", "qweight"
# The tensors of each: the codes, and those that dequantize them.
OF_PACKED = (PACKED, "weight_scale", "weight_zero_point", "weight_g_idx")
OF_TRANSPOSED = (TRANSPOSED, "scales", "qzeros", "g_idx")
# An int32 of AutoAWQ has numbers of 8 rows of the weight: for each row, the place of its 4 bits.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
_OF_A_TOOL = ("quant_method", "checkpoint_format", "format", "packing_format", "autoround_version")
# Of each layout the keys that name a packing, and how much less than the zero each packing stores; the first is what it
# is where no key says.
_PACKINGS: dict[str, tuple[tuple[str, ...], dict[str, int]]] = {
    "gptq": (("checkpoint_format", "format"), {"gptq": 1, "gptq_v2": 0}),
    "awq": (("version", "format", "checkpoint_format"), {"gemm": 0}),
}
_AUTO_ROUND = {
    "gptq": {
        "auto_round:auto_gptq": 1,
        "auto_round:gptq": 1,
        "auto_round": 0,
        "auto_round:exllamav2": 0,
        "auto_round:gptqmodel": 0,
    },
    "awq": {"auto_round:auto_awq": 0, "auto_round:awq": 0},
}


@dataclass(frozen=True)
class Packed:
    """Codes [D, W] as the file stores them, and what dequantizes them."""

    name: str  # of the layout
    bits: int
    codes: Tensor
    scales: Tensor  # [D, groups]
    zeros: Tensor  # [D, groups], or one number
    group_of: Tensor  # [W]

    def columns(self, begin: int, end: int) -> Tensor:
        """q of columns [begin, end); begin is a multiple of 8, and so is end unless it is W."""
        numbers = 32 // self.bits
        if self.name == "pack-quantized":
            return _unpack(self.codes[:, begin // numbers : end // numbers], self.bits)
        if self.name == "gptq":
            return _unpack(self.codes[begin // numbers : end // numbers].t(), self.bits)
        return _in_awq_order(self.codes[begin:end]).t()

    def dequantize(self, op: str, codes_name: str) -> Tensor:
        """The weight [D, W] in bf16, rounded once from fp32; the log says so."""
        D, W = self.scales.shape[0], self.group_of.shape[0]
        out = torch.empty(D, W, dtype=torch.bfloat16, device=self.codes.device)
        # 4 M values at a time, so that a weight of 100 MB never exists in fp32 as a whole.
        step = max(8, (1 << 22) // max(D, 1) // 8 * 8)
        for begin in range(0, W, step):
            end = min(begin + step, W)
            group = self.group_of[begin:end]
            zeros = self.zeros[:, group] if self.zeros.dim() else self.zeros
            out[:, begin:end] = (self.columns(begin, end) - zeros) * self.scales[:, group]
        kind = f"{self.name} int{self.bits}"
        log_dequantized(op, codes_name, kind, out.dtype, f"no kernel reads {kind}")
        return out


def is_packed(stored: StoredProjection) -> bool:
    """Whether a projection's tensors are int32 words of several codes."""
    if TRANSPOSED in stored.names:
        return True
    return PACKED in stored.names and getattr(stored.read(stored.names[PACKED]), "dtype", None) == torch.int32


def packed_of(stored: StoredProjection) -> Packed:
    """The projection's tensors, checked. Errors are those of `read_projection`."""
    op, name, (D, W) = stored.op, stored.codes_name, stored.shape
    transposed = TRANSPOSED in stored.names
    codes = stored.tensor(TRANSPOSED if transposed else PACKED)
    checks.check_dtype(op, name, codes, (torch.int32,))
    layout, bits = _layout_of(stored, codes)
    if leaves_out(stored.config, stored.path):
        # It says nothing of this layer, but a tool stores the zeros of all layers alike.
        is_of_tool = layout == "gptq" and method_of(stored.config) in ("gptq", "gptqmodel", "auto-round")
        config = {key: stored.config[key] for key in _OF_A_TOOL if key in stored.config} if is_of_tool else {}
        stored = replace(stored, config=config)
    scales = stored.tensor(_scales_of(stored))
    scales_name = stored.names[_scales_of(stored)]
    checks.check_dtype(op, scales_name, scales, checks.DTYPES)
    by_row = scales.t() if transposed and scales.dim() == 2 else scales
    if by_row.dim() != 2 or by_row.shape[0] != D or not 0 < by_row.shape[1] <= W:
        expected = f"(groups, {D})" if transposed else f"({D}, groups)"
        raise checks.shape_error(op, scales_name, scales, expected, f"{name} is {layout}")
    if (missing := by_row.float().isnan()).any():
        place = missing.nonzero()[0].tolist()
        got = f"{scales_name} is NaN at {place[::-1] if transposed else place}"
        raise checks.error(ValueError, op, got, "numbers", "what it scales would be lost")
    groups = by_row.shape[1]
    if not transposed and "weight_shape" in stored.names:
        stated = stored.tensor("weight_shape").flatten().tolist()
        if stated != [D, W]:
            got = f"{stored.names['weight_shape']} is {stated}"
            raise checks.error(ValueError, op, got, str([D, W]), f"W is {stored.meaning}")
    size, in_order = _checked_groups(stored, layout, bits, groups)
    less = _stored_less(stored, layout)
    group_of = _groups(stored, by_row, size, in_order)
    zeros = _zeros(stored, layout, bits, groups, less)
    of_layer = section_of(stored.config, stored.path)
    middle = 1 << (bits - 1)
    # Engines then take the middle for every zero and skip qzeros (vLLM 0.32 `auto_gptq`, SGLang 0.5.23 `gptq`).
    if layout == "gptq" and of_layer.values.get("sym") is True and (wrong := (zeros != middle).nonzero()).numel():
        row, group = wrong[0].tolist()
        got = f"{stored.names['qzeros']} has a zero of {int(zeros[row, group])} for row {row}, group {group}"
        raise checks.error(ValueError, op, got, str(middle), f"the checkpoint says {of_layer.place('sym')}sym True")
    return Packed(layout, bits, codes, by_row.float(), zeros, group_of)


def _scales_of(stored: StoredProjection) -> str:
    return "scales" if TRANSPOSED in stored.names else "weight_scale"


def _layout_of(stored: StoredProjection, codes: Tensor) -> tuple[str, int]:
    """(who packed it, the bits of a code), from the shape of the codes."""
    D, W = stored.shape
    shapes = {("gptq", 4): (W // 8, D), ("gptq", 8): (W // 4, D), ("awq", 4): (W, D // 8)}
    if TRANSPOSED not in stored.names:
        shapes = {("pack-quantized", 4): (D, W // 8), ("pack-quantized", 8): (D, W // 4)}
    for (layout, bits), expected in shapes.items():
        divides = (D if layout == "awq" else W) % (32 // bits) == 0
        if divides and tuple(codes.shape) == expected:
            return layout, bits
    choices = " or ".join(f"{size} of {layout} int{bits}" for (layout, bits), size in shapes.items())
    because = f"W is {stored.shape}, {stored.meaning}; other packings are not read"
    raise checks.shape_error(stored.op, stored.codes_name, codes, choices, because)


def _checked_groups(stored: StoredProjection, layout: str, bits: int, groups: int) -> tuple[int | None, str | None]:
    """(columns of a group, the key that says that groups are in order), each None where the config does not say.

    Raises where the config means another packing than the tensors have.
    """
    op, name, names, W = stored.op, stored.codes_name, stored.names, stored.shape[1]
    check_format(op, name, [layout], stored.config)
    if layout == "gptq" and not stored.config:
        because = "its checkpoint_format says whether zeros are stored less 1"
        meant = "a config.json beside it whose quantization_config is GPTQ's"
        raise checks.error(ValueError, op, f"{name} is gptq", meant, because)
    of_layer = section_of(stored.config, stored.path)
    section = of_layer.values

    def says(key: str) -> str:
        return f"the checkpoint says {of_layer.place(key)}{key} {section[key]!r}"

    for key in ("bits", "num_bits", "w_bit"):
        if section.get(key) not in (None, bits):
            raise checks.error(ValueError, op, f"{name} has {bits} bits a code", f"{section[key]!r}", says(key))
    stated = None
    for key in ("group_size", "q_group_size"):
        if not isinstance(size := section.get(key), int):
            continue
        stated = size if size > 0 else max(W, 1)
        if groups != (expected := max(-(-W // stated), 1)):
            raise checks.error(ValueError, op, f"{name} has {groups} groups in {W} columns", str(expected), says(key))
    ordered = {"desc_act": (True,), "actorder": ("group", "dynamic", True)}
    for key, values in ordered.items():
        if groups > 1 and section.get(key) in values and not {"g_idx", "weight_g_idx"} & names.keys():
            raise checks.error(ValueError, op, f"weights has {name}", "the group of each column beside it", says(key))
    if layout == "pack-quantized" and section.get("symmetric") is False and "weight_zero_point" not in names:
        raise checks.error(ValueError, op, f"weights has {name}", "weight_zero_point beside it", says("symmetric"))
    return stated, says("desc_act") if section.get("desc_act") is False else None


def _stored_less(stored: StoredProjection, layout: str) -> int:
    """How much less than the zero is stored. Raises where the config names a packing that is not read."""
    op, config = stored.op, stored.config
    if layout not in _PACKINGS:
        return 0
    keys, packings = _PACKINGS[layout]
    if method_of(config) == "auto-round":
        keys, packings = ("packing_format",), _AUTO_ROUND[layout]
    stated: dict[str, int] = {}
    for key in keys:
        if (value := config.get(key)) is None:
            continue
        says = f"{key} {value!r}"
        packing = value.lower() if isinstance(value, str) else ""
        if packing not in packings:
            expected = " or ".join(map(repr, packings))
            because = f"{stored.codes_name} is {layout}, of which nothing else is read"
            raise checks.error(ValueError, op, f"the checkpoint says {says}", expected, because)
        version = str(config.get("autoround_version"))
        # 0.5 packed it like auto_gptq and read it like gptqmodel.
        if packing == "auto_round:gptqmodel" and version.startswith("0.5."):
            got, because = f"the checkpoint says {says} of auto-round {version}", "0.5 stored its zeros less 1"
            raise checks.error(ValueError, op, got, "one of 0.6 or later", because)
        stated[says] = packings[packing]
    if len(set(stated.values())) > 1:
        got = f"the checkpoint says {' and '.join(stated)}"
        raise checks.error(ValueError, op, got, "the same of both", "one stores zeros less 1, the other as they are")
    return next(iter(stated.values()), next(iter(packings.values())))


def _groups(stored: StoredProjection, scales: Tensor, size: int | None, in_order: str | None) -> Tensor:
    """The group of each column; `scales` are [D, groups], `size` is the config's group size, if it states one."""
    op, names, W, groups = stored.op, stored.names, stored.shape[1], scales.shape[1]
    parameter = next((parameter for parameter in ("g_idx", "weight_g_idx") if parameter in names), None)
    given = None if parameter is None else _group_indices(stored, parameter, groups)
    # A quantizer without act order leaves zeros here: taken at their word, all columns would have the first scale.
    if given is not None and not in_order and (groups == 1 or given.any()):
        return given
    if size is None and W % groups:
        got = f"{names[_scales_of(stored)]} has {groups} groups"
        raise checks.error(ValueError, op, got, f"a divisor of {W}, the columns of the weight")
    each = W // groups if size is None else size
    # On the scales' device: with meta as the default one, indexing by this would return uninitialized memory.
    sequential = torch.arange(W, device=scales.device) // each
    if given is not None and given.any() and (wrong := (given != sequential).nonzero()).numel():
        assert parameter is not None and in_order is not None
        column = int(wrong[0])
        got = f"{names[parameter]}[{column}] is {int(given[column])}"
        raise checks.error(ValueError, op, got, str(int(sequential[column])), in_order)
    return sequential


def _group_indices(stored: StoredProjection, parameter: str, groups: int) -> Tensor:
    op, name, W = stored.op, stored.names[parameter], stored.shape[1]
    indices = stored.tensor(parameter)
    checks.check_dtype(op, name, indices, (torch.int32, torch.int64))
    if tuple(indices.shape) != (W,):
        raise checks.shape_error(op, name, indices, f"({W},)")
    indices = indices.long()
    if W and not 0 <= int(indices.min()) <= int(indices.max()) < groups:
        got = f"{name} has groups {int(indices.min())} to {int(indices.max())}"
        because = f"{stored.names[_scales_of(stored)]} has {groups}"
        raise checks.error(ValueError, op, got, f"0 to {groups - 1}", because)
    return indices


def _zeros(stored: StoredProjection, layout: str, bits: int, groups: int, less: int) -> Tensor:
    """The zeros [D, groups], of which each was stored `less`; for symmetric pack-quantized one number."""
    parameter = "weight_zero_point" if layout == "pack-quantized" else "qzeros"
    if layout == "pack-quantized" and parameter not in stored.names:
        return torch.tensor(1 << (bits - 1), device="cpu")  # 0-d: it works with codes on any device
    op, D, packed, numbers = stored.op, stored.shape[0], stored.tensor(parameter), 32 // bits
    checks.check_dtype(op, stored.names[parameter], packed, (torch.int32,))
    expected = (-(-D // numbers), groups) if layout == "pack-quantized" else (groups, -(-D // numbers))
    if tuple(packed.shape) != expected:
        raise checks.shape_error(op, stored.names[parameter], packed, str(expected))
    if layout == "awq":
        return _in_awq_order(packed).t()
    zeros = _unpack(packed.t() if layout == "pack-quantized" else packed, bits)[:, :D].t()
    # A stored 2^b - 1 may mean a zero of 2^b, or one of 0 that wrapped around: 2^b here, as in AutoGPTQ and vLLM.
    return zeros + less


def _unpack(words: Tensor, bits: int) -> Tensor:
    """[R, n] -> [R, n * 32/bits], the lowest bits of a word first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return (words.unsqueeze(-1) >> shifts & ((1 << bits) - 1)).flatten(-2)


def _in_awq_order(words: Tensor) -> Tensor:
    return _unpack(words, 4).unflatten(-1, (-1, 8))[..., list(_AWQ_PLACES)].flatten(-2)
