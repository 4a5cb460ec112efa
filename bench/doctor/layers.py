"""Codes in the layers after a drafter's input stage: attention, MLP, experts, embedding, head and norms."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from eagle_kernels.engines.scales import MERGED
from eagle_kernels.quantization_config import algorithm_of, method_of, section_of, unread_format
from eagle_kernels.quantized_checkpoint import check_projection

from . import experts as stacks
from .pair import ENGINE_OF, ENGINES, OP, Header, Pair
from .quantization import (
    NO_PATTERN,
    NORM,
    TAKES_CONFIG,
    codes_of,
    described,
    expects_codes,
    holds_codes,
    is_in_numbers,
    is_of_experts,
    misnamed,
    misread,
    parameters_of,
    why_quantized,
)

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_HEADS = ("lm_head", "head", "output")
_OF_DRAFTER = re.compile(
    r"(?:midlayer|layers\.(?P<number>\d{1,9}))\.(?P<part>self_attn|mlp|feed_forward)\.(?P<name>\w+)"
)
# The projection of the captured layers: Kimi K3's is the latter.
_PROJECTIONS = ("fc", "context_proj")
# The linear layers of a decoder layer without experts, and the module of all its experts.
_OF_LAYER = re.compile(
    r"\b(?:midlayer|(?:mtp_)?layers\.\d+|mtp_block\.\d+|mtp_model_layer)\.(?:self_attn|mlp)\."
    r"([qkvo]_proj|q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|gate_proj|up_proj|down_proj)$"
)
_OF_EXPERTS = re.compile(
    r"(?P<module>(?:.*\.)?layers\.\d+\.mlp\.experts)\.(?:\d+\.)?(gate_proj|up_proj|down_proj|gate_up_proj)"
)


def kind_of(path: str) -> str:
    """What a layer is by its name: "norm", "embedding", "head" or "linear"."""
    names = [name for name in path.split(".") if not name.isdigit()]
    name = names[-1] if names else path
    if "norm" in name:
        return "norm"
    if name in _HEADS:
        return "head"
    # DSpark's markov_w1 is an embedding of token ids too; embed_proj is no embedding, but multiplies one.
    return "embedding" if ("emb" in name and "proj" not in name) or name == "markov_w1" else "linear"


def is_read_by_sglang(path: str) -> bool:
    """Whether SGLang itself reads codes and scales into a layer that it holds in numbers: DeepSeek-V4's wo_a."""
    return path.endswith(".wo_a")


class Names(NamedTuple):
    """How an engine looks a drafter's layers up in the config's lists."""

    of: Callable[[str], list[str]]  # its own names, given the path in the file; [] where it calls the layer so too
    read: Mapping[str, Any] | None = None  # the config with the entries as the engine's class has renamed them


def look_at_layers(
    pair: Pair,
    paths: Iterable[str],
    held_in: Callable[[str], Mapping[str, str]],
    names: Mapping[str, Names],
) -> None:
    """Report codes in these layers of the file that cannot be read, and engines that misread them or expect them.

    Args:
        held_in: for a path, what each engine holds the layer in, as in `look_at_codes`; an engine that takes its
            target's weight there is left out.
        names: by engine, where it does not call each layer as the file does.
    """
    paths = set(paths)
    layers = _alike(path for path in paths if holds_codes(pair, path))
    wrong = []
    for pattern, alike in layers.items():
        pair.facts[pattern if len(alike) > 1 else alike[0]] = described(pair, alike[0])
        for path in alike:
            if (unreadable := _unreadable(pair, path)) is not None:
                wrong.append(_Wrong("load", (), path, unreadable))
            places = {engine: NORM if kind_of(path) == "norm" else place for engine, place in held_in(path).items()}
            for text, engines in misread(pair, path, path, places):
                wrong.append(_Wrong("layer-quantized", tuple(engines), path, text))
    _report(pair, wrong, layers)
    examined = (path for path in paths if _OF_LAYER.search(path) or _OF_EXPERTS.fullmatch(path))
    in_numbers = (path for path in examined if is_in_numbers(pair, path))
    layers = _alike(path for path in in_numbers if _merged_codes(pair, path, paths) is None)  # see `look_at_merged`
    wrong = []
    for path in (path for alike in layers.values() for path in alike):
        takes = [engine for engine, place in held_in(path).items() if place == TAKES_CONFIG]
        for why, engines in why_quantized(pair, path, takes).items():
            expects = {name: _expects_codes(pair, path, names, name) for name in {ENGINE_OF[each] for each in engines}}
            own = [name for name in engines if why == NO_PATTERN or expects[ENGINE_OF[name]]]
            if own:
                text = f"builds {path} quantized{why}, and it is in numbers"
                wrong.append(_Wrong("layer-quantized", tuple(own), path, text))
    _report(pair, wrong, layers)


def _expects_codes(pair: Pair, path: str, names: Mapping[str, Names], engine: str) -> bool:
    own, experts = names.get(engine, Names(lambda path: [])), _OF_EXPERTS.fullmatch(path)
    in_file = [_merged(path), path] if experts is None else [experts["module"]]
    return expects_codes(pair, path, own.of(path) or in_file, engine, own.read)


def _merged(path: str) -> str:
    """The name of the layer that engines merge this one into: layers.0.self_attn.qkv_proj for that of q_proj."""
    parent, _, name = path.rpartition(".")
    return f"{parent}.{next((merged for merged, parts in MERGED.items() if name in parts), name)}"


def look_at_merged(pair: Pair, paths: Iterable[str]) -> None:
    """Report layers in numbers that engines merge with one in codes, as they merge q_proj with k_proj and v_proj."""
    layers = _alike(path for path in paths if codes_of(parameters_of(pair, path)) is not None)
    paths = {path for alike in layers.values() for path in alike}
    wrong = []
    for path in sorted(paths):
        in_codes = _merged_codes(pair, path, paths)
        if in_codes is not None and not holds_codes(pair, path):
            text = f"{path} is in numbers and {in_codes} in codes: engines merge them into one layer"
            wrong.append(_Wrong("layer-quantized", (), path, text))
    _report(pair, wrong, layers)


def _merged_codes(pair: Pair, path: str, paths: Collection[str]) -> str | None:
    """One of the layers in codes that engines merge with this one."""
    parent, _, name = path.rpartition(".")
    others = [f"{parent}.{other}" for parts in MERGED.values() if name in parts for other in parts]
    return next((other for other in others if other in paths and holds_codes(pair, other)), None)


def look_at_names(pair: Pair, paths: Iterable[str], names: Mapping[str, Names]) -> None:
    """Report layers that engines look for in the config under another name than the checkpoint's."""
    others = (path for path in paths if not _OF_EXPERTS.fullmatch(path))
    layers = _alike(path for path in others if codes_of(parameters_of(pair, path)) is not None)
    for engine, own in names.items():
        wrong = []
        for path in (path for alike in layers.values() for path in alike):
            if (called := own.of(path)) and (text := misnamed(pair, path, called, engine, own.read)) is not None:
                wrong.append(_Wrong("layer-quantized", ENGINES[engine], path, text))
        _report(pair, wrong, layers)


def names_in_vllm(pair: Pair, path: str, renames: bool = False) -> list[str]:
    """["model.layers.32.self_attn.qkv_proj"] for a drafter's midlayer.self_attn.q_proj: vLLM numbers its layers after
    those of the target, and gives its config no table of merged layers (vllm#53116).

    Args:
        renames: whether the class renames ModelOpt's entries from the file's names to these, merged layers aside.

    Source: vLLM 0.33 `llama_eagle3`, `qwen3_eagle3`, `deepseek_eagle3`, which rename none; `qwen3_dflash`, whose
    `map_draft_quant_config` does.
    """
    own, layers = path.removeprefix("model."), pair.num_layers
    is_renamed = renames and pair.quantization is not None and algorithm_of(pair.quantization) is not None
    match = _OF_DRAFTER.fullmatch(own)
    if own in _PROJECTIONS:
        return [own, f"model.{own}"] if is_renamed else [f"model.{own}"]
    if match is None or kind_of(path) != "linear" or type(layers) is not int:
        return []
    if is_renamed:
        return [_merged(own), f"model.{_merged(own)}"]
    return [_merged(f"model.layers.{layers + int(match['number'] or 0)}.{match['part']}.{match['name']}")]


def names_without_layer(path: str) -> list[str]:
    """["qkv_proj", "q_proj"] for layers.0.self_attn.q_proj: the name of SGLang's merged layer, and its part's, which
    quantization methods try too."""
    match = _OF_LAYER.search(path)
    if match is None:
        return []
    name = match[1]
    return [*(merged for merged, parts in MERGED.items() if name in parts and merged != "fused_qkv_a_proj"), name]


def tried_by_sglang(pair: Pair, names: list[str]) -> list[str]:
    """These names of a merged layer and its part without the part's, where SGLang does not try it: compressed-tensors
    has it from packed_modules_mapping alone, which few classes of drafters have (0.5.23 `should_ignore_layer`)."""
    is_by_table = pair.quantization is not None and method_of(pair.quantization) == "compressed-tensors"
    return names[:1] if is_by_table else names


class _Wrong(NamedTuple):
    trap: str
    engines: tuple[str, ...]
    path: str
    text: str  # has the path in it


def _pattern(path: str) -> str:
    return _NUMBER.sub("*", path)


def _alike(paths: Iterable[str]) -> dict[str, list[str]]:
    """{pattern: paths}: the same layer of all decoder layers and experts has one pattern."""
    alike: dict[str, list[str]] = {}
    for path in sorted(paths):
        alike.setdefault(_pattern(path), []).append(path)
    return alike


def _report(pair: Pair, wrong: Iterable[_Wrong], layers: Mapping[str, list[str]]) -> None:
    """Report what is wrong with several layers that are alike as one finding."""
    found: dict[tuple[str, tuple[str, ...], str], list[_Wrong]] = {}
    for each in wrong:
        found.setdefault((each.trap, each.engines, _pattern(each.text)), []).append(each)
    for (trap, engines, text), where in found.items():
        alike = layers[_pattern(where[0].path)]
        if len(where) == 1:
            text = where[0].text
        elif len(where) < len(alike):
            text += f" (in {len(where)} of {len(alike)}, the first of which is {where[0].path})"
        pair.find(trap, text, *engines)


def _unreadable(pair: Pair, path: str) -> str | None:
    """Why this package's reader of codes refuses the headers; None where it does not, or does not read the format."""
    parameters = parameters_of(pair, path)
    stored = codes_of(parameters)
    assert stored is not None
    if unread_format(pair.quantization, path) is not None:
        return None
    shape, name = parameters[stored].shape, pair.name_of(path, stored)
    if kind_of(path) == "norm" or len(shape) < 2:
        expected = "numbers" if kind_of(path) == "norm" else "a matrix"
        return f"{name} is {list(shape)} of {parameters[stored].dtype}, expected {expected}"
    config = pair.quantization
    if is_of_experts(pair, path) and (pair.drafter.get("expert_dtype") or (config or {}).get("store_dtype")):
        config = None  # DeepSeek-V4's and Ling's experts have a format of their own; the config describes the others
    if len(shape) > 2:
        return stacks.unreadable(pair, path, stored, config)
    names = {parameter: pair.name_of(path, parameter) for parameter in parameters if parameter != "bias"}
    names |= pair.inside[path]
    checkpoint = pair.opened(names.values())._replace(quantization=config, op=OP)
    said: list[str] = []
    for meant in _shapes(stored, parameters, config or {}, path):
        try:
            check_projection(checkpoint.projection(names, meant, "the shape of its codes"))
        except (TypeError, ValueError) as wrong:
            said.append(str(wrong).removeprefix(f"{OP}: "))
        else:
            return None
    return said[0]


def _shapes(
    stored: str, parameters: Mapping[str, Header], config: Mapping[str, object], path: str
) -> list[tuple[int, int]]:
    """Possible [D, W] of the weight; several where neither codes nor config say how many bits a code has."""
    rows, columns = parameters[stored].shape
    section = section_of(config, path).values
    stated = next((value for key in ("bits", "num_bits", "w_bit") if isinstance(value := section.get(key), int)), 0)
    packed = [32 // bits for bits in ([stated] if 0 < stated <= 32 else [4, 8])]  # codes in an int32
    if stored == "qweight":
        gptq, awq = [(columns, rows * numbers) for numbers in packed], [(columns * numbers, rows) for numbers in packed]
        return awq if config.get("quant_method") == "awq" else gptq
    dtype = parameters[stored].dtype
    if dtype == "I32":
        return [(rows, columns * numbers) for numbers in packed]
    scales = {header.dtype for name, header in parameters.items() if "scale" in name}
    # DeepSeek's pairs of e2m1 are int8, and have powers of two for scales.
    is_pairs = dtype == "U8" or (dtype == "I8" and not scales.isdisjoint(("U8", "F8_E8M0")))
    return [(rows, columns * 2 if is_pairs else columns)]
