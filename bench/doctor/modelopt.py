"""What each engine reads of Model-Optimizer's config: one list of layers in numbers, and algorithms of single layers.

| engine | quant_algo | in config.json the first of | in `quantization`, or hf_quant_config.json |
|---|---|---|---|
| SGLang 0.5.23 | FP8 | ignore | exclude_modules |
| SGLang 0.5.23 | NVFP4 | ignore, modules_to_not_convert, exclude_modules | exclude_modules |
| SGLang 0.5.23 | MIXED_PRECISION | ignore, exclude_modules | exclude_modules |
| SGLang 0.5.23 | MXFP8 | exclude_modules, ignore, modules_to_not_convert | the same |
| vLLM 0.33 | all | ignore, exclude_modules | exclude_modules |

A linear layer in an algorithm of MIXED_PRECISION that the engine has no method for is built in numbers.

Source: `from_config` and `get_quant_method` of both engines' `modelopt`; SGLang's `_parse_modelopt_quant_config`.
"""

from collections.abc import Mapping
from typing import Any

from eagle_kernels.quantization_config import HF_FILE, LEFT_OUT, algorithm_of

_FLAT = {
    ("sglang", "FP8"): ("ignore",),
    ("sglang", "MIXED_PRECISION"): ("ignore", "exclude_modules"),
    ("sglang", "MXFP8"): ("exclude_modules", "ignore", "modules_to_not_convert"),
    ("sglang", None): ("ignore", "modules_to_not_convert", "exclude_modules"),
    ("vllm", None): ("ignore", "exclude_modules"),
}
_NESTED = {("sglang", "MXFP8"): _FLAT["sglang", "MXFP8"]}
_OF_BOTH = {"FP8", "FP8_PB_WO", "MXFP8", "NVFP4", "W4A16_NVFP4"}
_BLOCKS = {"FP8_BLOCK_SCALES"}
# By engine and whether the layer is of experts.
_LAYERS = {
    ("sglang", False): _OF_BOTH | _BLOCKS,
    ("sglang", True): _OF_BOTH | _BLOCKS,
    ("vllm", False): _OF_BOTH | {"FP8_PER_CHANNEL_PER_TOKEN"},
    ("vllm", True): _OF_BOTH | _BLOCKS,
}


def read_by(
    config: Mapping[str, Any] | None, engine: str, of_experts: bool, is_inline: bool
) -> Mapping[str, Any] | None:
    """The config without the lists and the entries of quantized_layers that an engine does not read.

    Args:
        of_experts: whether it is asked about experts, for which vLLM has another algorithm.
        is_inline: whether it is config.json's, not that of hf_quant_config.json alone.
    """
    if config is None or (algorithm := algorithm_of(config)) is None:
        return config
    if engine == "vllm" and is_inline and lacks_method(config):
        return None
    nested, beside = _mapping(config.get("quantization")), _mapping(config.get(HF_FILE))
    is_flat = not nested if engine == "vllm" else config.get("quant_algo") is not None
    section = config if is_flat or not nested else nested
    if is_flat and (is_inline or config.get("quant_method") is not None):
        keys = _FLAT.get((engine, algorithm), _FLAT[engine, None])
    else:
        keys = _NESTED.get((engine, algorithm), ("exclude_modules",))
    found = [section[key] for key in keys if key in section]
    if algorithm == "MIXED_PRECISION" and "exclude_modules" in beside:  # read where the config lacks something
        found.append(beside["exclude_modules"])

    def of_engine(section: Mapping[str, Any]) -> dict[str, Any]:
        kept = {key: value for key, value in section.items() if key not in LEFT_OUT}
        layers = _mapping(section.get("quantized_layers"))
        if not layers:
            return kept
        known = _LAYERS[engine, of_experts]
        has = {name: str(_mapping(layer).get("quant_algo")).upper() in known for name, layer in layers.items()}
        return {**kept, "quantized_layers": {name: layer for name, layer in layers.items() if has[name]}}

    sections = {key: of_engine(_mapping(config[key])) for key in ("quantization", HF_FILE) if key in config}
    return {**of_engine(config), **sections, "ignore": found[0] if found else []}


def lacks_method(config: Mapping[str, Any]) -> bool:
    """Whether config.json has Model-Optimizer's keys without the quant_method by which vLLM knows them; it adds one
    where they are in `quantization` (0.33 `_normalize_quantization_config`)."""
    nested, producer = _mapping(config.get("quantization")), _mapping(config.get("producer")).get("name")
    is_added = (producer == "modelopt" or "modelopt_quant_config" in nested) and nested.get("quant_algo") is not None
    return config.get("quant_method") is None and algorithm_of(config) is not None and not is_added


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
