"""The list of layers in numbers that each engine reads of a quantization config: a method reads its own keys alone.

| quant_method | key |
|---|---|
| fp8 | ignored_layers; where it is absent (SGLang) or has nothing (vLLM), modules_to_not_convert |
| fbgemm_fp8, awq | modules_to_not_convert |
| compressed-tensors | ignore |
| quark | exclude |
| gptq, gptqmodel, auto-round | none: theirs are rules of single layers |
| Model-Optimizer's | `modelopt` |

Source: `from_config` of the methods in SGLang 0.5.23 and vLLM 0.33.
"""

from collections.abc import Mapping
from typing import Any

from eagle_kernels.quantization_config import HF_FILE, LEFT_OUT, algorithm_of, method_of

from . import modelopt

_KEYS: dict[str, tuple[str, ...]] = {
    "fp8": ("ignored_layers", "modules_to_not_convert"),
    **dict.fromkeys(("fbgemm_fp8", "awq"), ("modules_to_not_convert",)),
    "compressed-tensors": ("ignore",),
    "quark": ("exclude",),
    **dict.fromkeys(("gptq", "gptqmodel", "auto-round"), ()),
}


def read_by(
    config: Mapping[str, Any] | None, engine: str, of_experts: bool, is_inline: bool
) -> Mapping[str, Any] | None:
    """The config without what an engine does not read of it; the arguments as in `modelopt.read_by`."""
    if config is None or algorithm_of(config) is not None:
        return modelopt.read_by(config, engine, of_experts, is_inline)
    method = method_of(config)
    if not isinstance(method, str) or method not in _KEYS:
        return config
    # vLLM takes the second key where the first one has nothing.
    given = [key for key in _KEYS[method] if key in config and (engine == "sglang" or config[key])]
    unread = {*LEFT_OUT, "quantization", HF_FILE}.difference(given[:1])
    return {key: value for key, value in config.items() if key not in unread}
