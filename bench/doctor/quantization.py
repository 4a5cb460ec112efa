"""What each engine makes of a weight that is quantized, or that the drafter's quantization_config says is."""

import fnmatch
import re
from collections.abc import Collection, Mapping
from typing import Any

from .pair import DENSE, Header, Pair

# In checkpoints of these methods each linear layer that the config does not leave out is stored as codes.
_STORED = ("awq", "compressed-tensors", "fp8", "gptq", "gptqmodel")
_LEFT_OUT = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules", "exclude")
_CODES = ("weight", "weight_packed", "qweight")
_NUMBERS = (*DENSE, "F64")
_WITHOUT = "without this package's plugin"


def look_at_codes(pair: Pair, path: str, name: str, takes_config: Mapping[str, bool], trap: str) -> None:
    """Report the weight at `path` of the file, and the engines that read it wrong.

    Args:
        name: what it is called in facts and findings.
        takes_config: by engine whether it builds this layer as the quantization config says, or as plain numbers.
    """
    parameters = _parameters(pair, path)
    stored = _codes_of(parameters)
    if stored is None:
        return
    weight = parameters[stored]
    scales = sorted(each for each in parameters if "scale" in each and "input" not in each and "act" not in each)
    takes = [engine for engine, is_taken in takes_config.items() if is_taken]
    config = pair.quantization
    if weight.dtype in _NUMBERS:
        pair.facts[name] = weight.dtype
        if takes and config is not None and _covers(config, path):
            text = f"builds {name} quantized, as quantization_config says of it, and {path}.weight is {weight.dtype}"
            pair.find(trap, text, *takes)
        return
    pair.facts[name] = f"{weight.dtype} with {', '.join(scales) or 'no scale'}"
    if plain := [engine for engine in takes_config if engine not in takes]:
        skipped = "its scales: codes are taken for numbers"
        if stored != "weight":
            skipped = f"its {stored}: the weight stays what it was made with"
        text = f"holds {name} in a plain nn.Linear, skips {skipped} (sglang#39087) {_WITHOUT}"
        pair.find(trap, text, *plain)
    if not takes:
        return
    says = f"quantizes {name} as the drafter's quantization_config says"
    if config is None:
        pair.find(trap, f"{says}, and there is none: it fails to load {_WITHOUT}", *takes)
    elif _leaves_out(config, path):
        pair.find(trap, f"{says}, and that leaves {name} out: codes have no place there {_WITHOUT}", *takes)


def holds_codes(pair: Pair, path: str) -> bool:
    parameters = _parameters(pair, path)
    stored = _codes_of(parameters)
    return stored is not None and parameters[stored].dtype not in _NUMBERS


def _parameters(pair: Pair, path: str) -> dict[str, Header]:
    """What the file has of a layer, by what stands behind the last dot."""
    parts = {name: name.rpartition(".") for name in pair.headers}
    return {last: pair.headers[name] for name, (before, _, last) in parts.items() if before == path}


def _codes_of(parameters: Collection[str]) -> str | None:
    return next((name for name in _CODES if name in parameters), None)


def _covers(config: Mapping[str, Any], path: str) -> bool:
    """Whether a checkpoint of this config has codes at `path`."""
    if _leaves_out(config, path):
        return False
    algorithm, method = config.get("quant_algo"), config.get("quant_method")
    if isinstance(algorithm, str):
        return algorithm.upper() != "MIXED_PRECISION"  # which lists its layers
    if method == "compressed-tensors":
        groups = config.get("config_groups")
        groups = groups.values() if isinstance(groups, Mapping) else ()
        targets = [_texts(group.get("targets")) for group in groups if isinstance(group, Mapping)]
        return any(entry == "Linear" or _names(entry, path) for entries in targets for entry in entries)
    return method in _STORED


def _leaves_out(config: Mapping[str, Any], path: str) -> bool:
    entries = [entry for key in _LEFT_OUT for entry in _texts(config.get(key))]
    # GPTQModel's: "-:" is in front of the pattern of what stays as it is.
    entries += [f"re:{pattern[2:]}" for pattern in _texts(config.get("dynamic")) if pattern.startswith("-:")]
    return any(_names(entry, path) for entry in entries)


def _texts(value: object) -> list[str]:
    return [entry for entry in value if isinstance(entry, str)] if isinstance(value, (list, dict)) else []


def _names(entry: str, path: str) -> bool:
    """Whether an entry of a config is this layer, a part of a model that it is in, or a pattern of it."""
    paths = (path, f"model.{path}")  # the checkpoint's, and the one that an engine gives it
    if entry.startswith("re:"):
        try:
            return any(re.match(entry[3:], each) for each in paths)
        except re.error:
            return False
    if any(character in entry for character in "*?["):
        return any(fnmatch.fnmatchcase(each, entry) for each in paths)
    return any(f".{entry}." in f".{each}." for each in paths)
