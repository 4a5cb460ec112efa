"""What a checkpoint's quantization_config says of a projection; the projection's tensors are compared with it.

| who | keys |
|---|---|
| all | quant_method |
| Hugging Face fp8 | weight_block_size |
| GPTQModel fp8 | weight_block_size; weight_scale_semantics, by which weight_scale_inv is a divisor |
| Quark | a weight's dtype, qscheme, block_size, group_size in layer_quant_config, or else in global_quant_config |
| Model-Optimizer | quant_algo, group_size, quantized_layers; in `quantization` and in hf_quant_config.json too |
| MLX | mode and bits, without quant_method |
| compressed-tensors | format, and the weights' arguments of the layer's group in config_groups; transform_config |
| GPTQ, AWQ | bits, group_size, desc_act; a layer's entry in `dynamic` overrides them |
| auto-round | bits, group_size, data_type; a layer's entry in `extra_config` overrides them; block_name_to_quantize |
| GPTQ, AWQ, auto-round | format among others, which name a packing (`int4_checkpoint`) |
| GPTQModel, auto-round | rotation, rotation_config, spinquant_config: the input is transformed |

The tensors determine the format. A key that means another one is an error; a missing key says nothing. Keys of the
whole checkpoint say nothing of a layer that the config leaves out (`leaves_out`), whose codes may be in another format:
NVFP4 checkpoints keep MTP layers in FP8 (vllm#43455).

Sources: vLLM 0.33 `modelopt.py`, `compressed_tensors`, `gptq_utils.py`, `quark.py` (`_find_matched_config`);
Model-Optimizer `export/quant_utils.py` (`process_layer_quant_config`); compressed-tensors `CompressionFormat`;
auto-round 0.16 `inference/convert_model.py` (`get_layer_config`) and `export_to_fp8.py`, GPTQModel 7.7
`quantization/config.py` and `qlinear/fp8.py`, vLLM 0.32 `inc/config_parser.py`, SGLang 0.5.23
`auto_round.py`; transformers 5.24 `quantizers_utils.py` (`should_convert_module`).
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from . import checks
from .quantized_weight import E4M3, FORMATS

# Integers in groups, which `int4_checkpoint` reads; FORMATS has the formats of codes.
_PACKED, _GPTQ, _AWQ = "pack-quantized", "gptq", "awq"
# int8 whose rows have several scales each; the numbers may have fewer bits.
INT8_GROUP = "int8_group"

HF_FILE = "hf_quant_config.json"
# Where config.json has the section, in the order of vLLM 0.33 `weight_utils.get_quant_config`.
_INLINE = (("quantization_config",), ("text_config", "quantization_config"), ("compression_config",))
_FP8 = ("fp8_tensor", "fp8_row", "fp8_block128", "fp8_block32")
_E4M3 = tuple(name for name, format in FORMATS.items() if format.codes == E4M3)
# By the columns that share a scale.
_E2M1: dict[int | None, tuple[str, ...]] = {16: ("nvfp4",), 32: ("mxfp4",), None: ("nvfp4", "mxfp4")}
_METHODS: dict[str, tuple[str, ...]] = {
    "fp8": _FP8,
    "fbgemm_fp8": ("fp8_row",),
    "ptpc_fp8": ("fp8_row",),
    "w8a8_fp8": ("fp8_tensor", "fp8_row"),
    "w8a8_int8": ("int8_row",),
    "mxfp8": ("mxfp8",),
    "mxfp4": ("mxfp4",),
    **dict.fromkeys(("modelopt", "modelopt_mixed", "quark"), tuple(FORMATS)),
    **dict.fromkeys(("modelopt_fp4", "petit_nvfp4"), ("nvfp4",)),
    "modelopt_fp8": _FP8[:3],
    "modelopt_mxfp8": ("mxfp8",),
    "compressed-tensors": (*FORMATS, INT8_GROUP, _PACKED),
    **dict.fromkeys(("gptq", "gptqmodel"), (_GPTQ,)),
    "awq": (_AWQ,),
    "auto-round": (*FORMATS, _PACKED, _GPTQ, _AWQ),
}
# Model-Optimizer's quant_algo.
_ALGORITHMS = {
    "FP8": ("fp8_tensor",),
    "FP8_PER_CHANNEL_PER_TOKEN": ("fp8_row",),
    **dict.fromkeys(("FP8_PB_WO", "FP8_PB_REAL", "FP8_BLOCK_SCALES"), ("fp8_block128",)),
    **dict.fromkeys(("W8A16", "W8A8_SQ_PER_CHANNEL"), ("int8_row",)),
    **dict.fromkeys(("MXFP4", "W4A8_MXFP4_FP8"), ("mxfp4",)),
    # AWQ's pre_quant_scale is in the norm before the layer, or else a tensor, which is refused.
    **dict.fromkeys(("NVFP4", "W4A16_NVFP4", "NVFP4_AWQ"), ("nvfp4",)),
    "MXFP8": ("mxfp8",),
    "MIXED_PRECISION": tuple(FORMATS),
}
_BLOCKS: dict[tuple[int, int], tuple[str, ...]] = {
    (128, 128): ("fp8_block128",),
    (32, 32): ("fp8_block32",),
    (1, 32): ("mxfp8",),
}
# auto-round's data_type, by its beginning.
_DATA_TYPES = {
    "int": ("int8_row", _PACKED, _GPTQ, _AWQ),
    "fp": _FP8,
    "mx_fp": ("mxfp8", "mxfp4"),
    "nv_fp": ("nvfp4",),
}
# compressed-tensors' format.
_COMPRESSIONS = {
    "int-quantized": ("int8_row", INT8_GROUP),
    "float-quantized": _E4M3,
    "naive-quantized": (*_E4M3, "int8_row", INT8_GROUP),
    "mxfp8-quantized": ("mxfp8",),
    "pack-quantized": (_PACKED,),
    "nvfp4-pack-quantized": ("nvfp4",),
    "mxfp4-pack-quantized": ("mxfp4",),
    "mixed-precision": (*FORMATS, INT8_GROUP, _PACKED),
    "dense": (),  # beside quantized KV caches
}
# What a message quotes of Quark's entry for a weight.
_OF_QUARK = ("dtype", "qscheme", "group_size", "block_size")
# Quark's dtypes of weights that are read here.
_QUARK = ("fp8_e4m3", "fp8_e4m3fn", "int8", "fp4")
_STRATEGIES = {"tensor": ("fp8_tensor",), "channel": ("fp8_row",), "block": _FP8[2:], "group": ("mxfp8",)}
# Lists of layers that are not in the checkpoint's format: Hugging Face's, vLLM's for fp8, Model-Optimizer's and
# compressed-tensors', Model-Optimizer's in hf_quant_config.json, Quark's, bitsandbytes'.
LEFT_OUT = (
    *("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules", "exclude"),
    "llm_int8_skip_modules",
)
# Methods beside which no engine reads Model-Optimizer's keys; nvidia/DeepSeek-V4-Flash-NVFP4 has them beside fp8.
# Source: `_parse_quant_hf_config` of SGLang 0.5.23, `_extract_modelopt_quant_algo` of vLLM 0.33.
OTHER_TOOLS = ("auto-round", "awq", "compressed-tensors", "fbgemm_fp8", "fp8", "gptq", "gptqmodel", "quark")
# What they say of single layers: Model-Optimizer's and Quark's.
_BY_LAYER = ("quantized_layers", "layer_quant_config")
# Model-Optimizer's names of a drafter's layers in the model that also has the target's.
_OF_DRAFTER = ("eagle_module.", "dflash_module.")
# The lists whose entries transformers takes for patterns: they match the begin of a name, up to the end of a part.
_PATTERN_LISTS = ("modules_to_not_convert", "llm_int8_skip_modules")
_END_OF_A_PART = r"(?:(?<=\.)|(?=\.|$))"
# What no module's name has and a pattern may.
_OF_PATTERNS = frozenset("*+?^$()[]{}|\\")
# auto-round's blocks, by either name.
_BLOCK_LISTS = ("block_name_to_quantize", "to_quant_block_names")
# Transforms of the input: auto-round's, which it writes under quant_method fp8 too, and GPTQModel's.
_ROTATIONS = ("rotation_config", "spinquant_config", "rotation")
_EMBEDDINGS = ("model.embed_tokens", "model.language_model.embed_tokens")
# What a list may have before a layer's name and a file may not, or the other way round.
_PREFIXES = ("", "model.", "language_model.", "language_model.model.", "model.language_model.")

# Methods whose entries name a layer, or the end of its name, and never a part of the model that contains it:
# llm-compressor lists parents of layers in codes (SGLang 0.5.23 `check_equal_or_regex_match`).
_OF_LAYERS = ("compressed-tensors", "quark")

# Whose name of a layer is looked for: the file's, of which an entry may be a part ("file") or the end ("layer"), or an
# engine's, in which an entry is looked for as text, as a part between dots, as the end or as the whole. A pattern is a
# pattern to all.
Naming = Literal["file", "layer", "text", "part", "end", "whole"]


class _Claim(NamedTuple):
    formats: tuple[str, ...]  # that the keys can mean
    says: str  # the keys, for the message


class Section(NamedTuple):
    """What a config says of a layer's numbers: bits, groups and zeros."""

    values: Mapping[str, Any]
    own: Collection[str] = ()  # the keys that stand in the layer's own entry
    entry: str = ""  # before these in messages

    def place(self, key: str) -> str:
        return self.entry if key in self.own else ""


def method_of(config: Mapping[str, Any]) -> object:
    """quant_method, in lower case where it is a string."""
    method = config.get("quant_method")
    return method.lower() if isinstance(method, str) else method


def unread_format(config: Mapping[str, Any] | None, path: str | None = None) -> str | None:
    """The config's name of a format that this package does not read, such as bitsandbytes or modelopt W4A16_AWQ; None
    for another format, where the config does not say, and where it leaves out the layer at `path`."""
    config = _mapping(config)
    if path is not None and leaves_out(config, path):
        return None
    stated, method = config.get("quant_method"), method_of(config)
    if isinstance(method, str) and method not in _METHODS:
        return str(stated)
    if method is None and isinstance(config.get("mode"), str) and "bits" in config:
        return f"MLX {config['mode']}"
    algorithm = stated_algorithm(config) if path is None else _algorithm_at(config, path)
    if algorithm is not None and algorithm.upper() not in _ALGORITHMS:
        return f"{stated or 'modelopt'} {algorithm}"
    unread: list[str] = []
    if method == "quark":
        unread = [weight["dtype"] for weight in of_quark(config, path)[1] if weight["dtype"] not in _QUARK]
    elif method == "auto-round":
        kind = (config if path is None else section_of(config, path).values).get("data_type")
        unread = [kind] if isinstance(kind, str) and not kind.startswith(tuple(_DATA_TYPES)) else []
    elif method == "compressed-tensors":
        group = None if path is None else group_of(config, path)
        kind = (group[1].get("format") if group is not None else None) or config.get("format")
        unread = [kind] if isinstance(kind, str) and kind not in _COMPRESSIONS else []
    return f"{stated} {unread[0]}" if unread else None


def check_format(op: str, name: str, fits: Sequence[str], config: Mapping[str, Any]) -> str:
    """Of the formats that the named tensor can be, `fits`, the one that the config means.

    Raises ValueError where the config means none of them.
    """
    fits = list(fits)
    for claim in _claims(config, name.rpartition(".")[0]):
        meant = [format for format in fits if format in claim.formats]
        if not meant:
            expected = " or ".join(claim.formats) or "a format that is read here"
            raise checks.error(ValueError, op, f"{name} is {fits[0]}", expected, f"the checkpoint says {claim.says}")
        fits = meant
    return fits[0]


def algorithm_of(config: Mapping[str, Any]) -> str | None:
    """Model-Optimizer's quant_algo, in upper case: its own, that in `quantization`, or that of hf_quant_config.json;
    None beside the quant_method of another tool, with which engines do not read it."""
    algorithm = stated_algorithm(config)
    return None if algorithm is None else algorithm.upper()


def stated_algorithm(config: Mapping[str, Any]) -> str | None:
    """The same in the case in which the file has it."""
    if method_of(config) in OTHER_TOOLS:
        return None
    found = (section.get("quant_algo") for section in _sections(config))
    return next((algorithm for algorithm in found if isinstance(algorithm, str)), None)


def lists_layer(config: Mapping[str, Any], path: str, is_whole: bool = False) -> bool:
    """Whether Model-Optimizer's quantized_layers, which MIXED_PRECISION has for a format, name a layer; with `is_whole`
    by this very name."""
    if is_whole:
        return any(path in _mapping(section.get("quantized_layers")) for section in _sections(config))
    return any(_own_algorithm(section, path) is not None for section in _sections(config))


def lists_algorithms(config: Mapping[str, Any], algorithms: Sequence[str]) -> bool:
    """Whether quantized_layers have a layer in one of these."""
    layers = [layer for each in _sections(config) for layer in _mapping(each.get("quantized_layers")).values()]
    return any(str(_mapping(layer).get("quant_algo")).upper() in algorithms for layer in layers)


def _sections(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Where Model-Optimizer's keys are."""
    return config, _mapping(config.get("quantization")), _mapping(config.get(HF_FILE))


def _own_algorithm(section: Mapping[str, Any], path: str) -> tuple[str, Mapping[str, Any]] | None:
    """(name, what it says) of a layer's entry in quantized_layers."""
    layers = _mapping(section.get("quantized_layers"))
    names = [name for name in layers if isinstance(layers[name], Mapping) and _matches(name, path)]
    name = min(names, key=lambda name: not name.startswith(_OF_DRAFTER), default=None)
    return None if name is None else (name, layers[name])


def _algorithm_at(config: Mapping[str, Any], path: str) -> str | None:
    """quant_algo of a layer: its own, or else that of the whole checkpoint."""
    own = (
        found[1].get("quant_algo") for each in _sections(config) if (found := _own_algorithm(each, path)) is not None
    )
    return next((algorithm for algorithm in own if isinstance(algorithm, str)), stated_algorithm(config))


def of_quark(config: Mapping[str, Any], path: str | None = None) -> tuple[str, list[Mapping[str, Any]]]:
    """(where Quark's config says it, what it says of a layer's weight), of every layer without a path: two entries are
    codes and their scales, none are numbers. Nothing for a config of another method, nor where it speaks of types of
    layers, which a file does not name."""
    if method_of(config) != "quark":
        return "", []
    place, section = "global_quant_config", config.get("global_quant_config")
    if path is not None:
        layers, names = _mapping(config.get("layer_quant_config")), _paths(path).names
        own = (entry for entry in layers if _matches(entry, path) or fnmatch.filter(names, entry))
        if (entry := next(own, None)) is not None:
            place, section = f"layer_quant_config.{entry}", layers[entry]
        elif config.get("layer_type_quant_config"):
            return "", []
    weight = _mapping(section).get("weight")
    weights = weight if isinstance(weight, list) else [weight]
    return place, [each for each in map(_mapping, weights) if isinstance(each.get("dtype"), str)]


def leaves_out(config: Mapping[str, Any], path: str, naming: Naming = "file") -> bool:
    """Whether the config says that the layer is not in the checkpoint's format.

    An entry of modules_to_not_convert may be a pattern to transformers 5; to engines it is a name.
    """
    entries: list[object] = []
    for section in _sections(config):
        entries += [entry for key in LEFT_OUT for entry in _list(section.get(key))]
        if naming == "file":
            listed = [entry for key in _PATTERN_LISTS for entry in _list(section.get(key)) if isinstance(entry, str)]
            patterns = [entry for entry in listed if not _OF_PATTERNS.isdisjoint(entry)]
            entries += [f"re:(?:{pattern}){_END_OF_A_PART}" for pattern in patterns]
    # GPTQModel's: "-:" precedes the pattern of layers that are left out.
    patterns = [pattern for pattern in _mapping(config.get("dynamic")) if pattern.startswith("-:")]
    entries += [f"re:{pattern.removeprefix('-:')}" for pattern in patterns]
    of_entries: Naming = "layer" if naming == "file" and method_of(config) in _OF_LAYERS else naming
    if any(names_layer(entry, path, of_entries) for entry in entries if isinstance(entry, str)):
        return True
    if method_of(config) != "auto-round":
        return False
    override = _override_of(config, path, naming)
    bits = None if override is None else override.values.get("bits")
    if isinstance(bits, int):
        return bits >= 16
    # A name without bits has those of the config; a pattern changes nothing of whether its layers are quantized.
    is_by_name = override is not None and override.is_name
    return not is_by_name and not _is_in_blocks(config, _paths(path).names if naming == "file" else (path,))


def renamed(config: Mapping[str, Any], rename: Callable[[str], str]) -> Mapping[str, Any]:
    """The config with other names of layers in its lists, quantized_layers, layer_quant_config and groups."""

    def of_section(section: Mapping[str, Any], keys: Sequence[str] = LEFT_OUT) -> dict[str, Any]:
        changed = dict(section)
        for key in (key for key in keys if key in section):
            changed[key] = [rename(each) if isinstance(each, str) else each for each in _list(section[key])]
        for key in (key for key in _BY_LAYER if key in section):
            changed[key] = {rename(name): said for name, said in _mapping(section[key]).items()}
        return changed

    sections = {key: of_section(_mapping(config[key])) for key in ("quantization", HF_FILE) if key in config}
    groups = {
        name: of_section(group, ("targets",)) if isinstance(group, Mapping) else group
        for name, group in _mapping(config.get("config_groups")).items()
    }
    return {**of_section(config), **sections, **({"config_groups": groups} if groups else {})}


class _Override(NamedTuple):
    place: str  # before its keys in messages
    name: str
    values: Mapping[str, Any]

    @property
    def is_name(self) -> bool:
        return _OF_PATTERNS.isdisjoint(self.name)


def _override_of(config: Mapping[str, Any], path: str, naming: Naming = "file") -> _Override | None:
    """A layer's own entry in `dynamic`, or for auto-round in `extra_config`: there under the layer's name, which may
    begin with more than the entry, or else the first that names a part of the model (not to engines) or, as a pattern,
    is found in the name.

    SGLang matches patterns of extra_config with whole names: those that auto-round writes begin and end with `.*`.
    """
    if method_of(config) != "auto-round":
        for pattern, own in _mapping(config.get("dynamic")).items():
            is_own = isinstance(own, Mapping) and pattern[:2] != "-:"
            if is_own and _matches(f"re:{pattern.lstrip('+:')}", path):
                return _Override(f"dynamic.{pattern}.", pattern, own)
        return None
    entries = {name: own for name, own in _mapping(config.get("extra_config")).items() if isinstance(own, Mapping)}

    def names() -> Iterator[str]:
        if path in entries:
            yield path
        yield from (name for name in entries if path.endswith(f".{name}"))
        plain = [name for name in entries if _OF_PATTERNS.isdisjoint(name)]
        if naming == "file":
            yield from (name for name in plain if name.endswith(f".{path}") or names_layer(name, path))
        patterns = (name for name in entries if not _OF_PATTERNS.isdisjoint(name))
        yield from (name for name in patterns if names_layer(f"re:.*(?:{name})", path, naming))

    name = next(names(), None)
    return None if name is None else _Override(f"extra_config.{name}.", name, entries[name])


def bits_of_head(config: Mapping[str, Any], path: str) -> int:
    """auto-round's of an lm_head: 16 unless its own entry says otherwise or a block has it; `lm_head` changes nothing.

    Source: SGLang 0.5.23 `auto_round.get_layer_config`, vLLM 0.33 `inc/config_parser`.
    """
    override = _override_of(config, path)
    is_named = False if override is None else override.is_name
    if is_named or (any(config.get(key) for key in _BLOCK_LISTS) and _is_in_blocks(config, _paths(path).names)):
        bits = config.get("bits")
    else:
        bits = 16
    bits = bits if override is None else override.values.get("bits", bits)
    return bits if isinstance(bits, int) else 16


def _is_in_blocks(config: Mapping[str, Any], paths: Sequence[str]) -> bool:
    """Whether a layer's name begins with that of a block that auto-round quantized."""
    blocks = next((blocks for key in _BLOCK_LISTS if (blocks := config.get(key))), None)
    if isinstance(blocks, str):
        blocks = blocks.split(",")
    nested = [each if isinstance(each, list) else [each] for each in _list(blocks)]
    names = [name.strip() for each in nested for name in each if isinstance(name, str)]
    return not names or any(each.startswith(name) for name in names for each in paths)


def names_layer(entry: str, path: str, naming: Naming = "file") -> bool:
    """Whether a config's entry is this layer or a pattern that matches it, or as `naming` says a part of the model that
    contains it."""
    if naming in ("text", "end", "whole"):
        if entry.startswith("re:"):
            return _is_matched(entry, path)
        is_inside = (naming == "text" and entry in path) or (naming == "end" and path.endswith(f".{entry}"))
        return is_inside or entry == path
    paths = _paths(path)
    if entry.startswith("re:"):
        return any(_is_matched(entry, each) for each in paths.names)
    if any(character in entry for character in "*?["):
        return any(fnmatch.fnmatchcase(each, entry) for each in paths.names)
    # AWQ's lists have "model.layers.0." too: its loaders look for the text, which without a dot is in layer 01's name.
    named = f".{entry.strip('.')}."
    if naming == "layer":
        return any(f".{each}.".endswith(named) for each in paths.names)
    return named in paths.text


class _Paths(NamedTuple):
    names: tuple[str, ...]
    text: str  # all of them, each between dots


# Kept, since every entry is compared with them: doctor took 51 s for 768 layers of experts by 600 entries.
@lru_cache(maxsize=4096)
def _paths(path: str) -> _Paths:
    """A layer's name in the file, and what a config may call it."""
    bare = path
    while bare.startswith(("model.", "language_model.")):
        bare = bare.partition(".")[2]
    names = (path, *(f"{prefix}{bare}" for prefix in _PREFIXES))
    return _Paths(names, "\n".join(f".{each}." for each in names))


def section_of(config: Mapping[str, Any], path: str) -> Section:
    if leaves_out(config, path):
        return Section({})
    if (found := group_of(config, path)) is not None:
        name, weights = found[0], found[1]["weights"]
        return Section(weights, weights, f"config_groups.{name}.weights.")
    if (override := _override_of(config, path)) is None:
        return Section(config)
    own = {key: value for key, value in override.values.items() if value is not None}
    return Section({**config, **own}, own, override.place)


def check_untransformed(op: str, name: str, config: Mapping[str, Any]) -> None:
    """Refuse the named weight where the config has a transform of the layer's input or output, which each call would
    need. Transforms of the weight itself are in the file's numbers already."""
    if (key := _transform_of(config, name.rpartition(".")[0])) is not None:
        because = f"the checkpoint says {key}"
        raise checks.error(ValueError, op, f"{name} is of a layer with a transform", "one without", because)


def _transform_of(config: Mapping[str, Any], path: str) -> str | None:
    """The key of a transform that runs at a layer, or of one that does not say where; None where there is none."""
    section = section_of(config, path)
    if (rotation := next((key for key in _ROTATIONS if section.values.get(key)), None)) is not None:
        return f"{section.place(rotation)}{rotation}"
    transforms = config.get("transform_config")
    groups = _mapping(transforms).get("config_groups")
    if not isinstance(groups, Mapping):
        return "transform_config" if transforms else None
    for key, location, targets, ignored in _transforms(groups):
        is_target = not targets or "Linear" in targets or _names(targets, path)
        if is_target and not _names(ignored, path) and location not in ("weight_input", "weight_output"):
            return key
    return None


def _names(entries: list, path: str) -> bool:
    return any(_matches(entry, path) for entry in entries)


def _transforms(groups: Mapping[str, Any]) -> Iterator[tuple[str, object, list, list]]:
    """(key, location, targets, ignored) of each transform of compressed-tensors."""
    for name, group in groups.items():
        entries = _mapping(group).get("apply")
        for entry in entries if isinstance(entries, list) else [entries]:
            targets, ignored = (
                [names] if isinstance(names, str) else _list(names)
                for names in (_mapping(entry).get("targets"), _mapping(entry).get("ignore"))
            )
            yield f"transform_config.config_groups.{name}", _mapping(entry).get("location"), targets, ignored


def rotation_of(config: Mapping[str, Any]) -> str | None:
    """The key of a transform that rotates a model's hidden states, which is one of the rows of its embedding
    (SpinQuant's R1, as llm-compressor stores it); None where there is none."""
    for path in _INLINE:
        groups = _mapping(_mapping(_at(config, (*path, "transform_config"))).get("config_groups"))
        for key, location, targets, ignored in _transforms(groups):
            is_target = any(_names(targets, name) and not _names(ignored, name) for name in _EMBEDDINGS)
            if is_target and location in ("weight_output", "output"):
                return key
    return None


def _claims(config: Mapping[str, Any], path: str) -> Iterator[_Claim]:
    is_left_out = leaves_out(config, path)
    method, block = config.get("quant_method"), config.get("weight_block_size")
    if block is not None and not is_left_out:
        yield _Claim(_of_blocks(block), f"weight_block_size {block}")
    if method is not None and not is_left_out and not (method_of(config) == "fp8" and block is not None):
        yield _Claim(_METHODS.get(method.lower(), ()) if isinstance(method, str) else (), f"quant_method {method}")
    place, entries = of_quark(config, path)
    if entries and not is_left_out:
        said = ", ".join(f"{key} {entries[0][key]}" for key in _OF_QUARK if entries[0].get(key) is not None)
        yield _Claim(_of_quark_weight(entries), f"{place}.weight {said}")
    if method_of(config) == "auto-round":
        yield from _of_data_type(section_of(config, path))
    yield from _of_algorithm(config, path, "", is_left_out)
    for where, section in (("quantization.", config.get("quantization")), (f"{HF_FILE}: ", config.get(HF_FILE))):
        yield from _of_algorithm(_mapping(section), path, where, is_left_out)
    compression, found = config.get("format"), group_of(config, path)
    # GPTQ and AWQ have a `format` too; transformers 5 writes it beside their older keys.
    of_compression = compression is not None and method_of(config) in (None, "compressed-tensors")
    if of_compression and not is_left_out:
        formats = _COMPRESSIONS.get(compression, ()) if isinstance(compression, str) else ()
        yield _Claim(formats, f"format {compression}")
    if found is None:
        return
    name, weights = found[0], found[1]["weights"]
    meant = _of_weights(weights)
    if meant is not None:
        keys = ("type", "num_bits", "strategy", "group_size", "block_structure")
        values = ", ".join(f"{key} {weights[key]}" for key in keys if weights.get(key) is not None)
        yield _Claim(meant, f"config_groups.{name}.weights {values}")


def _of_blocks(size: object) -> tuple[str, ...]:
    if not isinstance(size, Sequence):
        return ()
    return next((formats for block, formats in _BLOCKS.items() if list(block) == list(size)), ())


def _of_quark_weight(entries: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    weight = entries[0]
    dtype, scheme, size = weight["dtype"], weight.get("qscheme"), weight.get("group_size")
    if dtype == "fp4":
        if len(entries) > 1:  # e4m3 for the scales
            return ("nvfp4",)
        return _E2M1.get(size, ()) if isinstance(size, int | None) else ()
    if dtype == "int8":
        return () if scheme == "per_group" else ("int8_row",)
    if scheme == "per_block":
        return _of_blocks(weight.get("block_size")) if weight.get("block_size") is not None else _FP8[2:]
    of_e4m3 = {"per_tensor": ("fp8_tensor",), "per_channel": ("fp8_row",), "per_group": ("mxfp8",), None: _E4M3}
    return of_e4m3.get(scheme, ()) if isinstance(scheme, str | None) else ()


def _of_data_type(section: Section) -> Iterator[_Claim]:
    data_type, bits = section.values.get("data_type"), section.values.get("bits")
    if not isinstance(data_type, str):
        return
    formats = next((formats for start, formats in _DATA_TYPES.items() if data_type.startswith(start)), ())
    said = f"{section.place('data_type')}data_type {data_type}"
    if isinstance(bits, int):
        # Of a packing, the codes' own shape says how many bits one has.
        formats = tuple(format for format in formats if format not in FORMATS or FORMATS[format].bits == bits)
        said += f", {section.place('bits')}bits {bits}"
    yield _Claim(formats, said)


def _of_algorithm(config: Mapping[str, Any], path: str, where: str, is_left_out: bool) -> Iterator[_Claim]:
    name, own = _own_algorithm(config, path) or ("", {})
    of_all = {} if is_left_out else config
    for section, place in ((of_all, where), (own, f"{where}quantized_layers.{name}.")):
        algorithm, size = section.get("quant_algo"), section.get("group_size")
        if algorithm is None:
            continue
        formats = _ALGORITHMS.get(algorithm.upper(), ()) if isinstance(algorithm, str) else ()
        said = ""
        if isinstance(size, int) and any(FORMATS[format].columns_of_a_row not in (None, size) for format in formats):
            formats = tuple(format for format in formats if FORMATS[format].columns_of_a_row in (None, size))
            said = f", group_size {size}"
        yield _Claim(formats, f"{place}quant_algo {algorithm}{said}")


def _of_weights(weights: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The formats that compressed-tensors' arguments of a weight can mean; None where they do not say."""
    bits, size, strategy = weights.get("num_bits"), weights.get("group_size"), weights.get("strategy")
    if bits is None:
        return None
    if weights.get("type", "int") != "float":
        # int-quantized has an int8 for each, whatever the bits.
        return ("int8_row", INT8_GROUP, _PACKED) if bits in range(2, 9) else ()
    if bits == 8:
        structure = weights.get("block_structure")
        if strategy == "block" and structure is not None:  # once "128x128"
            if isinstance(structure, str):
                structure = [int(part) for part in structure.split("x") if part.isdecimal()]
            return _of_blocks(structure)
        return _STRATEGIES.get(strategy, _E4M3) if isinstance(strategy, str) else _E4M3
    return _E2M1.get(size, ()) if bits == 4 and isinstance(size, int | None) else ()


def group_of(config: Mapping[str, Any], path: str) -> tuple[str, Mapping[str, Any]] | None:
    """(name, entry) of the one in config_groups that has a layer, by its own name or as a Linear, and says something of
    its weight."""
    groups = {
        name: group
        for name, group in _mapping(config.get("config_groups")).items()
        if isinstance(group, Mapping) and isinstance(group.get("weights"), Mapping)
    }
    # Here an entry of `ignore` may be longer than the file's name. `leaves_out` does not take those: engines do not
    # either, and doctor reports them.
    if leaves_out(config, path) or any(_matches(name, path) for name in _list(config.get("ignore"))):
        return None
    targets = {name: _list(group.get("targets", ["Linear"])) for name, group in groups.items()}
    own = [name for name in groups if any(_matches(target, path) for target in targets[name])]
    own += [name for name in groups if "Linear" in targets[name]]
    return (own[0], groups[own[0]]) if own else None


def _matches(name: object, path: str) -> bool:
    """Whether a config's name means the layer at this path; their prefixes may differ, and `re:` begins a pattern."""
    if not isinstance(name, str):
        return False
    if not name.startswith("re:"):
        return name == path or path.endswith(f".{name}") or name.endswith(f".{path}")
    return _is_matched(name, path)


def _is_matched(entry: str, path: str) -> bool:
    """Whether the pattern after `re:` matches the path."""
    pattern = _compiled(entry.removeprefix("re:"))
    return pattern is not None and pattern.match(path) is not None


# More than the 512 that `re` keeps.
@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str] | None:
    """None for what is no pattern."""
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError):  # a{99999999999}, thousands of parentheses
        return None


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> list:
    return value if isinstance(value, list) else []


def config_of(op: str, folder: Path) -> Mapping[str, Any] | None:
    """quantization_config of config.json or of its text_config, or compression_config. `quantization` of
    hf_quant_config.json is added to it under that file's name, or returned alone. None where there is neither."""
    inline = _section(op, folder / "config.json", _INLINE)
    beside = _section(op, folder / HF_FILE, (("quantization",),))
    if inline is None or beside is None:
        return beside if inline is None else inline
    return {**inline, HF_FILE: beside}


def is_inline(config: Mapping[str, Any]) -> bool:
    """Whether a model's config.json has a quantization config, so that hf_quant_config.json is not all there is."""
    return any(isinstance(_at(config, path), Mapping) for path in _INLINE)


def _at(section: object, path: Sequence[str]) -> object:
    for key in path:
        section = section.get(key) if isinstance(section, dict) else None
    return section


def _section(op: str, file: Path, paths: Sequence[tuple[str, ...]]) -> Mapping[str, Any] | None:
    """The object at the first of these paths of keys that a JSON file has."""
    checks.check_file(op, file, "JSON")
    if not file.exists():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as failure:  # invalid UTF-8 too
        raise checks.error(ValueError, op, f"{str(file)!r} is damaged", "JSON", str(failure)) from None
    for path in paths:
        section = _at(content, path)
        if isinstance(section, dict):
            return section
        if section is not None:
            got = f"{'.'.join(path)} of {str(file)!r} is a {type(section).__name__}"
            raise checks.error(ValueError, op, got, "an object", "what it says of the weights would be lost")
    return None
