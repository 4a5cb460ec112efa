"""Which engines have the method of a drafter's quantization_config, and what they refuse that it says beside it."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from eagle_kernels.quantization_config import (
    HF_FILE,
    algorithm_of,
    group_of,
    lists_algorithms,
    method_of,
    of_quark,
    stated_algorithm,
    unread_format,
)

from .modelopt import lacks_method
from .pair import ENGINE_OF, ENGINES, SGLANG, Pair
from .quantization import holds_codes, is_of_experts

# The engines that have a quant_method, where the default is wrong: both engines have the methods that this package
# reads, none has the others.
# Source: SGLang 0.5.23 and vLLM 0.33, `layers/quantization/__init__.py`.
_ENGINES_WITH = {
    **dict.fromkeys(("bitsandbytes", "blockwise_int8", "gguf", "minimax_m3_nvfp4", "modelslim"), ("sglang",)),
    **dict.fromkeys(("mxfp_w4a8", "petit_nvfp4", "w4afp8", "w8a8_fp8", "w8a8_int8"), ("sglang",)),
    **dict.fromkeys(("experts_int8", "fbgemm_fp8", "fp_quant", "inc", "torchao"), ("vllm",)),
    **dict.fromkeys(("humming", "moe_wna16"), ("sglang", "vllm")),
    "gptqmodel": (),
}


def look_at_method(pair: Pair) -> None:
    """State a format that this package does not read, and report the engines that lack the config's method."""
    config = pair.quantization
    if config is None:
        return
    format, stated = unread_format(config), config.get("quant_method")
    # Of hf_quant_config.json alone, or of config.json, to which old ones wrote no quant_method.
    is_of_modelopt = stated is None and algorithm_of(config) is not None
    is_file_alone = is_of_modelopt and not pair.is_inline
    if format is not None:
        text = f"{format}, which this package does not read: load_checkpoint refuses it, "
        pair.facts["format"] = f"{text}the plugins leave layers of it to the engine"
    method = "modelopt" if is_of_modelopt else method_of(config)
    if not isinstance(method, str):
        return
    have = _ENGINES_WITH.get(method, () if format is not None and format == stated else tuple(ENGINES))
    lacking = [name for engine, names in ENGINES.items() if engine not in have for name in names]
    if lacking:
        pair.find("engine-format", f"has no quantization method {method}, and refuses the config", *lacking)
    refused: dict[str, list[str]] = {}
    is_missed = pair.is_inline and lacks_method(config)
    if is_missed:
        text = "takes the checkpoint for one in numbers: its quantization_config has no quant_method"
        pair.find("engine-format", text, *ENGINES["vllm"])
    for engine, because in (*_refusals(method, config, is_file_alone), *_refused_groups(pair, method)):
        if engine == "vllm" and is_missed:
            continue
        refused.setdefault(because, []).extend(ENGINES[engine])
    for because, engines in refused.items():
        # Of that file SGLang takes what it does not know for nothing.
        is_ignored = is_file_alone and engines == [SGLANG]
        text = "takes the checkpoint for one in numbers" if is_ignored else "refuses the config"
        pair.find("engine-format", f"{text}: {because}", *engines)
    if algorithm_of(config) == "MIXED_PRECISION" and not lists_algorithms(config, _FP4):
        text = "takes MIXED_PRECISION without NVFP4 for w4afp8, which builds every linear layer in FP8 blocks"
        pair.find("engine-format", text, SGLANG)
    if config.get("weight_scale_semantics") == "inverse":  # GPTQModel's alone
        text = "multiplies codes by weight_scale_inv, which weight_scale_semantics says is a divisor"
        pair.find("engine-format", text, *ENGINE_OF)


_FP4 = ("NVFP4", "W4A16_NVFP4")
# Model-Optimizer's quant_algo that each engine reads. Source: `_parse_modelopt_quant_config` of SGLang 0.5.23, whose
# other values, lower case among them, end in `ModelOptFp8Config`, which reads FP8; vLLM 0.33 `modelopt.QUANT_ALGOS`.
_ALGORITHMS = {
    "sglang": (*_FP4, "NVFP4_AWQ", "FP8", "MXFP8", "MIXED_PRECISION"),
    "vllm": (*_FP4, "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP8", "MIXED_PRECISION"),
}
# Those of them that vLLM has no method for if hf_quant_config.json alone says them: `_normalize_quantization_config`.
_NOT_ALONE = ("W4A16_NVFP4", "MXFP8")
# Where SGLang's modelopt_mixed needs the file beside a config that lacks one of them: `get_quant_config`.
_OF_MIXED = (("quantized_layers",), ("kv_cache_quant_algo", "kv_cache_scheme"))


# Source: vLLM 0.32 `DEPRECATED_QUANTIZATION_METHODS`; its `speculative.py` makes the drafter's ModelConfig without the
# flag.
_DEPRECATED = ("fbgemm_fp8", "fp_quant")


def _refusals(method: str, config: Mapping[str, Any], is_file_alone: bool) -> Iterator[tuple[str, str]]:
    """(engine, why) for each engine that has the method and ends with an error for what the config says beside it."""
    if method.startswith("modelopt") and (algorithm := algorithm_of(config)) is not None:
        read = {"sglang": stated_algorithm(config), "vllm": algorithm}
        for engine, known in _ALGORITHMS.items():
            if read[engine] not in known:
                yield engine, f"it has no quant_algo {read[engine]}"
        if config.get("quant_method") is None and algorithm in _NOT_ALONE:
            where = f"in {HF_FILE} alone" if is_file_alone else "without a quant_method"
            yield "vllm", f"it has no quant_algo {algorithm} {where}"
        if algorithm == "MIXED_PRECISION" and not is_file_alone and HF_FILE not in config:
            lacking = [" and ".join(keys) for keys in _OF_MIXED if not any(key in config for key in keys)]
            if lacking and lists_algorithms(config, _FP4):
                yield "sglang", f"it lacks {' and '.join(lacking)}, and there is no {HF_FILE}"
    if method in _DEPRECATED:
        yield "vllm", "the method is deprecated, and --allow-deprecated-quantization is for the target alone"
    if method == "quark":
        if config.get("export") is None:
            yield from ((engine, "it lacks export") for engine in ENGINES)
        elif (said := _unread_by_sglang(config)) is not None:
            yield "sglang", f"it has no scheme of Quark for weights in {said}"
    if method == "compressed-tensors":
        sparsity = config.get("sparsity_config")
        if isinstance(sparsity, Mapping) and sparsity.get("targets"):
            yield "vllm", "it has a sparsity_config, support of which is removed"
    if method == "auto-round" and (kind := config.get("data_type", "int")) != "int":
        yield "sglang", f"data_type is {kind!r}, and it reads int"
        size = config.get("group_size")
        if kind in ("fp", "fp8"):
            if not isinstance(size, list) or len(size) != 2:
                yield "vllm", f"group_size is {size!r}, and it reads FP8 in blocks alone"
        elif "mx_fp" not in str(kind):
            yield "vllm", f"data_type is {kind!r}, and it reads int, fp and mx_fp"
    refused = [*_refused_integers(method, config)]
    if refused:
        yield from refused
    elif method == "auto-round" and "sym" not in config:
        yield "sglang", "it lacks sym"
    elif method == "gptq" and _has_act_order(config):
        yield "vllm", "desc_act is true, and it reads no groups of columns that are out of order"


def _unread_by_sglang(config: Mapping[str, Any]) -> str | None:
    """What Quark's config says of all layers' weights that SGLang has no scheme for.

    Source: `QuarkConfig._get_scheme_from_config` of SGLang 0.5.23, which reads FP8 by tensor, row and block and MXFP4,
    each with activations in codes too.
    """
    weights = of_quark(config)[1]
    if not weights:
        return None
    dtype = weights[0]["dtype"]
    if len(weights) > 1:
        return "NVFP4" if dtype == "fp4" else " and ".join(weight["dtype"] for weight in weights)
    if dtype not in ("fp8_e4m3", "fp8_e4m3fn", "fp4"):
        return dtype
    if dtype != "fp4" and weights[0].get("qscheme") == "per_group":
        return "MXFP8"
    return None if config["global_quant_config"].get("input_tensors") else f"{dtype} without input_tensors"


class _Scheme(NamedTuple):
    """A group of compressed-tensors in words, `int4 group 128`, `int8 token dynamic` or `none`, and a format; in the
    tables below each is a pattern."""

    weights: str
    inputs: str
    format: str

    def matches(self, scheme: "_Scheme") -> bool:
        return all(re.fullmatch(pattern, words) for pattern, words in zip(self, scheme, strict=True))


# The schemes for linear layers. Source: `_get_scheme_from_parts` of SGLang 0.5.23 and of vLLM 0.32 and 0.33, and their
# `is_activation_quantization_format`.
_NVFP4, _ROWS = "float4 tensor_group 16", r"(channel|group \d+)( asymmetric)?"
_INPUTS_OF_INT8 = r"\w+8 (token( asymmetric)? dynamic|tensor( asymmetric)?)"
_BY_SGLANG, _BY_VLLM = "(naive|int|float|nvfp4-pack|pack)-quantized", "(naive|int|float|nvfp4-pack)-quantized"
_SCHEMES = {
    "sglang": (
        _Scheme(f"int[48] {_ROWS}", "none", "pack-quantized"),
        _Scheme(_NVFP4, f"none|{_NVFP4}( dynamic)?", _BY_SGLANG),
        _Scheme("float8 (tensor|channel)", ".*", _BY_SGLANG),
        _Scheme("float8 block", "float.*( dynamic| tensor)", _BY_SGLANG),
        _Scheme("int8 (tensor|channel)", _INPUTS_OF_INT8, _BY_SGLANG),
    ),
    "vllm": (
        _Scheme(_NVFP4, f"none|{_NVFP4}( dynamic)?", ".*"),
        _Scheme("float[48] group 32", ".*", ".*"),
        _Scheme(f"int[2-8] {_ROWS}", "none", "pack-quantized"),
        _Scheme(f"int[2-8] {_ROWS}", r"int[48] (token|group \d+) dynamic", "pack-quantized"),
        _Scheme(f"int[2-8] {_ROWS}", "int8 tensor", "(int|pack)-quantized"),
        _Scheme("float8 (tensor|channel|block)", ".*", _BY_VLLM),
        _Scheme("int8 (tensor|channel)", _INPUTS_OF_INT8, _BY_VLLM),
        _Scheme(r"int4 (channel|group \d+)", "int8 token( asymmetric)? dynamic", _BY_VLLM),
    ),
}
_VLLM_ON_SM_90 = _Scheme("int4 group 128", "float8 token dynamic", ".*")


def _refused_groups(pair: Pair, method: str) -> Iterator[tuple[str, str]]:
    """(engine, why) for each group that an engine has no scheme for, of those with a layer in codes; experts' are
    others."""
    config = pair.quantization
    if config is None or method != "compressed-tensors":
        return
    paths = [path for path in pair.layers if holds_codes(pair, path) and not is_of_experts(pair, path)]
    groups = dict(found for path in paths if (found := group_of(config, path)) is not None)
    for scheme in dict.fromkeys(_scheme_of(config, group) for group in groups.values()):
        words = f"weights in {scheme.weights}, inputs in {scheme.inputs}, format {scheme.format}"
        for engine in (engine for engine in ENGINES if not any(each.matches(scheme) for each in _SCHEMES[engine])):
            alone = " but on sm_90" if engine == "vllm" and _VLLM_ON_SM_90.matches(scheme) else ""
            yield engine, f"it has no scheme of compressed-tensors{alone} for {words}"


def _scheme_of(config: Mapping[str, Any], group: Mapping[str, Any]) -> _Scheme:
    """With the defaults of compressed-tensors' `QuantizationArgs`."""

    def words(arguments: object) -> str:
        if not isinstance(arguments, Mapping):
            return "none"
        size = arguments.get("group_size")
        strategy = {None: "tensor", -1: "channel"}.get(size, "group") if isinstance(size, int | None) else ""
        strategy = arguments.get("strategy") or strategy
        said = [f"{arguments.get('type') or 'int'}{arguments.get('num_bits', 8)}", str(strategy)]
        said += [str(size)] if strategy in ("group", "tensor_group") else []
        said += ["asymmetric"] if arguments.get("symmetric") is False else []
        return " ".join([*said, "dynamic"] if arguments.get("dynamic") else said)

    format = group.get("format") or config.get("format")
    return _Scheme(words(group["weights"]), words(group.get("input_activations") or None), str(format))


# The keys without which engines read no config, each by all its names. Source: `from_config` of vLLM 0.33 `fp8`,
# `auto_gptq`, `auto_awq` and `inc`, of SGLang 0.5.23 `fp8`, `awq` and `auto_round`, and its
# `is_gptq_marlin_compatible`: on an NVIDIA GPU it has no other method for GPTQ.
_NEEDED = {
    "fp8": (("activation_scheme",),),
    "gptq": (("bits",), ("group_size",), ("desc_act",), ("sym",)),
    "awq": (("bits", "w_bit"), ("group_size", "q_group_size"), ("zero_point",)),
    "auto-round": (("bits",), ("group_size",)),
}
_AUTO_GPTQ = "auto_round:auto_gptq"
# Both engines' `MARLIN_SUPPORTED_GROUP_SIZES`; for GPTQ they have no other kernel on an NVIDIA GPU.
_GROUP_SIZES = (-1, 32, 64, 128)
# Of auto-round's widths those for which vLLM has other kernels, `inc_wna16_scheme.CUDA_HUMMING_SUPPORTED_BITS`.
_HUMMING = (2, 3, 5, 6, 7)


def _refused_integers(method: str, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(engine, why) for each that refuses a config of GPTQ, AWQ or auto-round, or one that lacks a key.

    Source: the classes of `_NEEDED`; vLLM's `inc_wna16_linear`, SGLang's `gptq_linear`.
    """
    lacking = [names[0] for names in _NEEDED.get(method, ()) if not any(name in config for name in names)]
    for engine in ENGINES:
        because = f"it lacks {' and '.join(lacking)}" if lacking else _unread_integers(engine, method, config)
        if because is not None:
            yield engine, because


def _unread_integers(engine: str, method: str, config: Mapping[str, Any]) -> str | None:
    bits, packing = config.get("bits", config.get("w_bit")), config.get("packing_format") or _AUTO_GPTQ
    if method not in ("gptq", "awq", "auto-round") or (
        method == "auto-round" and config.get("data_type", "int") != "int"
    ):
        return None
    if method == "auto-round" and packing not in (_AUTO_GPTQ, "auto_round:auto_awq"):
        return f"packing_format is {packing!r}, and it reads auto_gptq's and auto_awq's"
    if method == "awq":
        return None if bits == 4 else f"bits is {bits}, and it reads 4"
    if bits not in (4, 8):
        is_of_humming = engine == "vllm" and method == "auto-round" and bits in _HUMMING
        return None if is_of_humming else f"bits is {bits}, and it reads 4 and 8"
    if packing != _AUTO_GPTQ:
        return None
    if config.get("sym", True) is not True:
        return "sym is not true, and it reads no zeros of GPTQ"
    size = config["group_size"]
    return None if size in _GROUP_SIZES else f"group_size is {size}, and it reads {', '.join(map(str, _GROUP_SIZES))}"


def _has_act_order(config: Mapping[str, Any]) -> bool:
    """Whether groups are out of order in GPTQ, for all layers or in a rule of `dynamic`.

    Source: vLLM 0.32 `gptq_utils.normalize_and_validate_gptq_desc_act`.
    """
    dynamic = config.get("dynamic")
    rules = dynamic.items() if isinstance(dynamic, Mapping) else ()
    own = [rule for pattern, rule in rules if isinstance(rule, Mapping) and not pattern.startswith("-:")]
    merged = [config, *({**config, **rule} for rule in own)]
    return any(each.get("desc_act") is True and each.get("group_size") != -1 for each in merged)
