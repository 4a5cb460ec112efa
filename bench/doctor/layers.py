"""Codes behind a drafter's input stage: in attention, MLP, experts, embedding, head and norms."""

import re
from collections.abc import Callable, Iterable, Mapping

from eagle_kernels.quantization_config import section_of
from eagle_kernels.quantized_checkpoint import check_projection

from .pair import OP, Header, Pair
from .quantization import NORM, codes_of, described, holds_codes, misread, parameters_of

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_HEADS = ("lm_head", "head", "output")


def kind_of(path: str) -> str:
    """What a layer is by its name: "norm", "embedding", "head" or "linear"."""
    names = [name for name in path.split(".") if not name.isdigit()]
    name = names[-1] if names else path
    if "norm" in name:
        return "norm"
    if name in _HEADS:
        return "head"
    # DSpark's markov_w1 is one of token ids too; embed_proj multiplies one.
    return "embedding" if ("embed" in name and "proj" not in name) or name == "markov_w1" else "linear"


def look_at_layers(pair: Pair, paths: Iterable[str], held_in: Callable[[str], Mapping[str, str]]) -> None:
    """Report the codes of these layers of the file that cannot be read, and the engines that read them wrong.

    Args:
        held_in: of a path, what each engine holds the layer in, as in `look_at_codes`; an engine that reads another
            layer's weight there, its target's, is left out.
    """
    in_codes = [path for path in sorted(paths) if holds_codes(pair, path)]
    alike: dict[str, list[str]] = {}  # the same layer of each decoder layer, and of each expert
    for path in in_codes:
        alike.setdefault(_NUMBER.sub("*", path), []).append(path)
    # (trap, engines, what is said of each of them) -> where it is so, of layers that are alike
    found: dict[tuple[str, tuple[str, ...], str], list[str]] = {}
    for pattern, layers in alike.items():
        pair.facts[pattern if len(layers) > 1 else layers[0]] = described(parameters_of(pair, layers[0]))
        for path in layers:
            places = {engine: NORM if kind_of(path) == "norm" else place for engine, place in held_in(path).items()}
            wrong = [("layer-quantized", tuple(names), text) for text, names in misread(pair, path, path, places)]
            if (unreadable := _unreadable(pair, path)) is not None:
                wrong.insert(0, ("load", (), unreadable))
            for trap, names, text in wrong:
                found.setdefault((trap, names, text.replace(path, pattern)), []).append(path)
    for (trap, names, text), layers in found.items():
        pattern = _NUMBER.sub("*", layers[0])
        if len(layers) == 1:
            text = text.replace(pattern, layers[0])
        elif len(layers) < len(alike[pattern]):
            text += f" (in {len(layers)} of {len(alike[pattern])}, the first of which is {layers[0]})"
        pair.find(trap, text, *names)


def _unreadable(pair: Pair, path: str) -> str | None:
    """What this package's reader of codes says of the headers; None of a stack of experts, which it does not read."""
    parameters = parameters_of(pair, path)
    stored = codes_of(parameters)
    assert stored is not None
    shape, name = parameters[stored].shape, f"{path}.{stored}"
    if kind_of(path) == "norm" or len(shape) < 2:
        expected = "numbers" if kind_of(path) == "norm" else "a matrix"
        return f"{name} is {list(shape)} of {parameters[stored].dtype}, expected {expected}"
    if len(shape) > 2:
        return None
    config = pair.quantization
    if ".experts." in f".{path}." and pair.drafter.get("expert_dtype") is not None:
        config = None  # DeepSeek-V4's experts have a format of their own, of which its quantization_config says nothing
    names = {parameter: f"{path}.{parameter}" for parameter in parameters if parameter != "bias"}
    readers = pair.readers(names.values())
    said: list[str] = []
    for meant in _shapes(stored, parameters, config or {}, path):
        try:
            check_projection(OP, names, lambda name: readers[name](), meant, "the shape of its codes", config)
        except (TypeError, ValueError) as wrong:
            said.append(str(wrong).removeprefix(f"{OP}: "))
        else:
            return None
    return said[0]


def _shapes(
    stored: str, parameters: Mapping[str, Header], config: Mapping[str, object], path: str
) -> list[tuple[int, int]]:
    """[D, W] as the codes have it; several where neither they nor the config say how many bits one has."""
    rows, columns = parameters[stored].shape
    section = section_of(config, path)[1]
    stated = next((value for key in ("bits", "num_bits", "w_bit") if isinstance(value := section.get(key), int)), 0)
    packed = [32 // bits for bits in ([stated] if 0 < stated <= 32 else [4, 8])]  # numbers of an int32
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
