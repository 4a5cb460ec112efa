"""What each engine makes of a weight that is quantized, or that the drafter's quantization_config says is quantized."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from eagle_kernels.quantization_config import (
    Naming,
    algorithm_of,
    bits_of_head,
    leaves_out,
    lists_layer,
    method_of,
    names_layer,
    of_quark,
    unread_format,
)
from eagle_kernels.quantized_checkpoint import UNREAD_CODES
from eagle_kernels.quantized_weight import FORMATS
from eagle_kernels.stored_projection import CODES

from .pair import DENSE, DTYPES, ENGINE_OF, ENGINES, Header, Pair

# In checkpoints of these methods each linear layer that the config does not leave out is stored as codes.
_STORED = ("auto-round", "awq", "compressed-tensors", "fp8", "gptq", "gptqmodel")
_CODES = (*CODES, "blocks", *UNREAD_CODES)
_NUMBERS = (*DENSE, "F64")
# Dtypes of codes that this package reads, integers in groups among them; e5m2 is none.
_READ = {format.codes for format in FORMATS.values()} | {torch.int32}
_WITHOUT = " without this package's plugin"
_REFUSED = "; this package's plugin refuses them"
# GPTQ's list of layers in codes, and AWQ's of those in numbers.
_LISTS = {"gptq": "modules_in_block_to_quantize", "awq": "modules_to_not_convert"}
# Why an engine builds a layer quantized that is in numbers.
NO_PATTERN = ": it takes the pattern in modules_to_not_convert that leaves it out for a name"
_SAID, _UNREAD = ", as quantization_config says of it", ": it does not read the list that leaves it out"
_EXPERTS = "; this package's plugin leaves experts to it"
# What engines take an entry of these methods for unless it is a pattern; with others it is a part of a name.
# Source: SGLang 0.5.23 and vLLM 0.32, `should_ignore_layer` of compressed-tensors and Quark; `is_layer_skipped`,
# `is_layer_skipped_awq`.
_NAMINGS: dict[str, dict[str, Naming]] = {
    "sglang": {"awq": "text", "compressed-tensors": "end", "quark": "whole"},
    "vllm": {
        "awq": "text",
        **dict.fromkeys(("compressed-tensors", "fbgemm_fp8", "fp8", "quark"), "whole"),
    },
}
# SGLang's methods without a table of merged layers.
_BY_MERGED_NAME = ("awq", "gptq", "gptqmodel")
# Methods that both engines have for linear layers and experts only.
_OF_LINEAR_LAYERS = ("fp8", "fbgemm_fp8", "quark", "w8a8_fp8", "w8a8_int8", "mxfp4")

# What an engine holds a layer in: a module with the quantization config's method, or one without a method.
TAKES_CONFIG = "as the quantization config says"
PLAIN, UNQUANTIZED = "a plain nn.Linear", "a linear layer without a quantization method"
HEAD = "a ParallelLMHead without a quantization method"
EMBEDDING, NORM = "an embedding without a quantization method", "a norm"


def look_at_codes(pair: Pair, path: str, name: str, held_in: Mapping[str, str], trap: str) -> None:
    """Report the weight at `path` of the file, and the engines that read it wrong.

    Args:
        name: what it is called in facts and findings.
        held_in: by engine, TAKES_CONFIG or what it builds without the quantization config's method.
    """
    parameters = parameters_of(pair, path)
    stored = codes_of(parameters)
    if stored is None:
        return
    weight = parameters[stored]
    if weight.dtype in _NUMBERS:
        pair.facts[name] = weight.dtype
        takes = [engine for engine, place in held_in.items() if place == TAKES_CONFIG]
        for why, engines in why_quantized(pair, path, takes).items():
            pair.find(trap, f"builds {name} quantized{why}, and {path}.weight is {weight.dtype}", *engines)
        return
    pair.facts[name] = described(pair, path)
    for text, engines in misread(pair, path, name, held_in):
        pair.find(trap, text, *engines)


def misread(pair: Pair, path: str, name: str, held_in: Mapping[str, str]) -> Iterator[tuple[str, list[str]]]:
    """(what is wrong, the engines) for each way in which engines misread the codes at `path`."""
    parameters = parameters_of(pair, path)
    stored = codes_of(parameters)
    if stored is None:
        return
    skipped = "its scales: codes are taken for numbers"
    is_read = unread_format(pair.quantization, path) is None and DTYPES.get(parameters[stored].dtype) in _READ
    is_read &= not (stored == "weight" and _has_zero_points(parameters))
    without = _EXPERTS if is_of_experts(pair, path) else _WITHOUT if is_read else _REFUSED
    if stored != "weight":
        skipped = f"its {stored}: the weight stays what it was made with"
    engines: dict[str, list[str]] = {}
    for engine, place in held_in.items():
        engines.setdefault(place, []).append(engine)
    for place in (place for place in engines if place != TAKES_CONFIG):
        # The plugins turn these codes into numbers, except a norm's, which they refuse.
        plugin = _REFUSED if place == NORM else f" (sglang#39087){without}"
        yield f"holds {name} in {place}, skips {skipped}{plugin}", engines[place]
    if not (takes := engines.get(TAKES_CONFIG)):
        return
    says: dict[str, list[str]] = {}
    for engine in takes:
        if (unfit := _unfit(pair, path, name, ENGINE_OF[engine])) is not None:
            says.setdefault(f"{unfit}{without}", []).append(engine)
    yield from says.items()


def _unfit(pair: Pair, path: str, name: str, engine: str) -> str | None:
    """Why the codes at `path` have no place in a layer that takes the config."""
    config, says = _read(pair, path, engine), f"quantizes {name} as the drafter's quantization_config says"
    if config is None:
        return f"{says}, and there is none: it fails to load"
    if leaves_out(config, path):
        return f"{says}, and that leaves {name} out: codes have no place there"
    if not _is_in_group(config, path):
        return f"{says}, and none of its config_groups has {name}: codes have no place there"
    if method_of(config) == "mxfp4" and not is_of_experts(pair, path):
        return f"has no linear layer for quant_method mxfp4, which {name} is in"
    if algorithm_of(config) == "MIXED_PRECISION" and not lists_layer(config, path):
        assert pair.quantization is not None
        is_listed = lists_layer(pair.quantization, path)
        lack = f"its method lacks the quant_algo of {name}" if is_listed else f"its quantized_layers lack {name}"
        return f"{says}, and {lack}: codes have no place there"
    return None


def why_quantized(pair: Pair, path: str, engines: Sequence[str]) -> dict[str, list[str]]:
    """{why: the engines} that build a layer in numbers quantized, by the file's name of it."""
    why: dict[str, list[str]] = {}
    is_pattern = is_left_out_by_a_pattern(pair, path)
    for engine, runners in ENGINES.items():
        read, names = _read(pair, path, engine), [name for name in runners if name in engines]
        if pair.quantization is None or read is None or not names:
            continue
        if engine == "vllm" and _vllm_finds_numbers(pair, path):
            continue
        if is_pattern:
            why.setdefault(NO_PATTERN, []).extend(names)
        elif _covers(read, path):
            why.setdefault(_UNREAD if leaves_out(pair.quantization, path) else _SAID, []).extend(names)
    return why


def _read(pair: Pair, path: str, engine: str) -> Mapping[str, Any] | None:
    """The config as far as an engine reads it for the layer at `path`."""
    return pair.read[engine, is_of_experts(pair, path)]


def misnamed(
    pair: Pair, path: str, names: Sequence[str], engine: str, read: Mapping[str, Any] | None = None
) -> str | None:
    """What goes wrong for a layer that an engine looks up in the config's lists by `names`, its own name first.

    Args:
        read: the config as the engine's class has renamed its entries; without it as the engine reads it.
    """
    config = _read(pair, path, engine)
    if config is None:
        return None
    read = config if read is None else read
    if engine == "vllm" and (text := _misread_from_header(pair, config, path, names[0])) is not None:
        return text
    method, naming = method_of(config), _naming_of(config, engine)
    if engine == "sglang" and method in _BY_MERGED_NAME:
        names = names[:1]
    if holds_codes(pair, path):
        is_listed = algorithm_of(config) == "MIXED_PRECISION" and lists_layer(config, path)
        if is_listed and not _finds_algorithm(read, path, names, engine):
            return f"calls {path} {names[0]}, which quantized_layers lack: codes have no place there{_WITHOUT}"
        if _is_in_group(config, path) and not any(_is_in_group(read, name, "whole") for name in names):
            return f"calls {path} {names[0]}, which none of config_groups has: codes have no place there{_WITHOUT}"
        if not leaves_out(config, path) and all(leaves_out(read, name, naming) for name in names):
            what = "is in no block of the config" if method == "auto-round" else "the config leaves out"
            return f"calls {path} {names[0]}, which {what}: codes have no place there{_WITHOUT}"
        return None
    if engine == "vllm" and method == "gptq" and not _is_listed_in_gptq(pair, config, names[0]):
        return None
    if is_left_out_by_a_pattern(pair, path):  # by whatever name
        return None
    if leaves_out(config, path) and all(_covers(read, name, naming) for name in names):
        if path in names:
            return f"builds {path} quantized: it takes the entry that leaves it out for a layer's own name"
        return f"builds {path} quantized: it calls it {names[0]}, which quantization_config does not leave out"
    return None


def expects_codes(
    pair: Pair, path: str, names: Sequence[str], engine: str, read: Mapping[str, Any] | None = None
) -> bool:
    """Whether an engine builds a layer in numbers quantized: the config has codes there, by the engine's names too.

    The engine then makes a parameter for codes and their scales, and skips the file's numbers or takes them for codes.

    Args:
        names, read: as in `misnamed`.
    """
    config = _read(pair, path, engine)
    if config is None or not _covers(config, path) or (engine == "vllm" and _vllm_finds_numbers(pair, names[0])):
        return False
    read, naming = config if read is None else read, _naming_of(config, engine)
    names = names[:1] if method_of(config) in _BY_MERGED_NAME else names
    if algorithm_of(config) == "MIXED_PRECISION":
        has_codes = _finds_algorithm(read, path, names, engine)
    else:
        has_codes = any(_covers(read, name, naming) for name in names)
    return has_codes and not any(leaves_out(read, name, naming) for name in names)


def _naming_of(config: Mapping[str, Any], engine: str) -> Naming:
    method = method_of(config)
    return _NAMINGS[engine].get(method, "part") if isinstance(method, str) else "part"


def _finds_algorithm(config: Mapping[str, Any], path: str, names: Sequence[str], engine: str) -> bool:
    """Whether an engine finds a layer in quantized_layers under one of `names`. vLLM looks for the parts of a merged
    layer too (0.33 `ModelOptMixedPrecisionConfig._resolve_quant_algo`)."""
    part = path.rpartition(".")[2]
    parts = [f"{name.rpartition('.')[0]}.{part}" for name in names] if engine == "vllm" else []
    return any(lists_layer(config, name, is_whole=True) for name in (*names, *parts))


def _misread_from_header(pair: Pair, config: Mapping[str, Any], path: str, name: str) -> str | None:
    """What goes wrong where a GPTQ or AWQ config lists no layers: vLLM then lists those that the file has in codes
    (GPTQ) or in numbers (AWQ), by the file's names, and looks for each inside its own.

    Source: `maybe_update_config` of vLLM 0.32 and 0.33 `auto_gptq`, `auto_awq`.
    """
    in_codes = holds_codes(pair, path)
    if not _is_without_list(config) or in_codes != (method_of(config) == "gptq") or leaves_out(config, path):
        return None
    if any(listed in name for listed in pair.layers if holds_codes(pair, listed) == in_codes):
        return None
    if in_codes:
        return f"calls {path} {name}, and looks that up among the file's names: codes have no place there{_WITHOUT}"
    return f"builds {path} quantized: it calls it {name}, which none of the file's unquantized layers is called"


def _vllm_finds_numbers(pair: Pair, path: str) -> bool:
    """Whether vLLM knows of a layer in numbers that it is: from the file's header, or from GPTQ's list of layers.

    Source: `maybe_update_config` as above, `is_layer_gptq_quantized`. Names that differ are for `misnamed`.
    """
    config = pair.quantization
    if config is None:
        return False
    if _is_without_list(config):
        # A header without codes of any layer says nothing to GPTQ's.
        return method_of(config) == "awq" or any(header.dtype not in DENSE for header in pair.headers.values())
    if method_of(config) != "gptq":
        return False
    return not _is_listed_in_gptq(pair, config, path)


def _is_listed_in_gptq(pair: Pair, config: Mapping[str, Any], name: str) -> bool:
    """Whether vLLM takes the layer that it calls `name` for one in GPTQ's codes: by the config's list of layers, or by
    the file's header. Source: `is_layer_gptq_quantized` of vLLM 0.32."""
    if _is_without_list(config):
        return any(listed in name for listed in pair.layers if holds_codes(pair, listed))
    nested = [each if isinstance(each, list) else [each] for each in config[_LISTS["gptq"]]]
    return any(isinstance(listed, str) and listed in name for each in nested for listed in each)


def _is_without_list(config: Mapping[str, Any]) -> bool:
    """Whether a GPTQ or AWQ config lists no layers."""
    key = next((key for method, key in _LISTS.items() if method_of(config) == method), None)
    return key is not None and not (isinstance(config.get(key), list) and config[key])


def is_left_out_by_a_pattern(pair: Pair, path: str) -> bool:
    """Whether engines build a layer quantized that modules_to_not_convert leaves out: they take its entries for names.

    Source: `is_layer_skipped` of SGLang 0.5.23 and vLLM 0.32, `is_layer_skipped_awq`.
    """
    config = pair.quantization
    return config is not None and leaves_out(config, path) and _covers(config, path, "part")


def head_held_in(config: Mapping[str, Any] | None, path: str, engine: str) -> str:
    """What an engine holds an lm_head in where it gets the config: not every method has a place for its scales.

    Source: `get_quant_method` of SGLang 0.5.23 and vLLM 0.33, by whether it asks for a ParallelLMHead.
    """
    method = None if config is None else method_of(config)
    if config is not None and algorithm_of(config) == "MXFP8":  # to SGLang a method of fp8
        return HEAD if engine == "sglang" else TAKES_CONFIG
    if config is None or algorithm_of(config) is not None:
        return TAKES_CONFIG
    if method == "auto-round":
        return TAKES_CONFIG if bits_of_head(config, path) < 16 else HEAD
    if method in ("gptq", "gptqmodel", "awq"):
        return TAKES_CONFIG if config.get("lm_head") else HEAD
    if method == "compressed-tensors":  # "Linear" does not match an lm_head
        is_target = any(names_layer(entry, path, "layer") for entry in _targets(config))
        return TAKES_CONFIG if is_target else HEAD
    return HEAD if method in _OF_LINEAR_LAYERS else TAKES_CONFIG


def is_modelopt_fp4(config: Mapping[str, Any] | None) -> bool:
    """Whether both engines call it modelopt_fp4, with which some drafters are built in numbers, whatever their files
    have."""
    return config is not None and algorithm_of(config) in ("NVFP4", "NVFP4_AWQ", "W4A16_NVFP4")


def described(pair: Pair, path: str) -> str:
    """The weight's dtype and scales: F8_E4M3 with weight_scale."""
    parameters, format = parameters_of(pair, path), unread_format(pair.quantization, path)
    scales = sorted(each for each in parameters if "scale" in each and "input" not in each and "act" not in each)
    stored = codes_of(parameters)
    if stored is None:
        return "no weight"
    of = f"of {format}" if format else f"with {', '.join(scales) or 'no scale'}"
    return f"{parameters[stored].dtype} {of}"


def is_of_experts(pair: Pair, path: str) -> bool:
    """By name, or by shape: a layer's experts may be one tensor [E, ...] under any name (Step-3.5's moe.up_proj)."""
    parameters = parameters_of(pair, path)
    stored = codes_of(parameters)
    is_stack = stored is not None and stored not in UNREAD_CODES and len(parameters[stored].shape) > 2
    return ".experts." in f".{path}." or is_stack


def holds_codes(pair: Pair, path: str) -> bool:
    parameters = parameters_of(pair, path)
    stored = codes_of(parameters)
    return stored is not None and parameters[stored].dtype not in _NUMBERS


def is_in_numbers(pair: Pair, path: str) -> bool:
    return codes_of(parameters_of(pair, path)) is not None and not holds_codes(pair, path)


def parameters_of(pair: Pair, path: str) -> Mapping[str, Header]:
    """The file's tensors of a layer, by the part of their names after the last dot."""
    return pair.layers.get(path, {})


def _has_zero_points(parameters: Mapping[str, Header]) -> bool:
    """Whether int8 has zero points that are not 0: `load_checkpoint` refuses them."""
    header = parameters.get("weight_zero_point")
    return header is not None and header.dtype in DTYPES and bool(header.stand_in().to(torch.float32).any())


def codes_of(parameters: Collection[str]) -> str | None:
    """The name of the one that holds the weight."""
    return next((name for name in _CODES if name in parameters), None)


def _covers(config: Mapping[str, Any], path: str, naming: Naming = "file") -> bool:
    """Whether a checkpoint of this config has codes at `path`."""
    if leaves_out(config, path, naming):
        return False
    algorithm, method = algorithm_of(config), method_of(config)
    if algorithm is not None:
        return algorithm != "MIXED_PRECISION" or lists_layer(config, path)
    if method == "compressed-tensors":
        return _is_in_group(config, path, "layer" if naming == "file" else "whole")
    if method == "quark":
        return bool(of_quark(config, path)[1])
    return method in _STORED


def _is_in_group(config: Mapping[str, Any], path: str, naming: Naming = "layer") -> bool:
    """Whether one of config_groups has the layer; True for a config without such groups."""
    if method_of(config) != "compressed-tensors":
        return True
    return any(entry == "Linear" or names_layer(entry, path, naming) for entry in _targets(config))


def _targets(config: Mapping[str, Any]) -> list[str]:
    return [entry for group in groups_of(config) for entry in _texts(group.get("targets"))]


def groups_of(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """compressed-tensors' config_groups, whatever they are called."""
    groups = config.get("config_groups")
    return [each for each in groups.values() if isinstance(each, Mapping)] if isinstance(groups, Mapping) else []


def _texts(value: object) -> list[str]:
    return [entry for entry in value if isinstance(entry, str)] if isinstance(value, (list, dict)) else []
