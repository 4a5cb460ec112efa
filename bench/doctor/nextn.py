"""What SGLang 0.5.23 makes of the names in a config's lists for an MTP drafter, whose layer it calls otherwise.

A class may rename the entries (`hf_to_sglang_mapper`), which reaches the methods of `_RENAMED` alone: AWQ, GPTQ and
auto-round have no `apply_weight_name_mapper`.

| drafter | its layer | entries that it renames |
|---|---|---|
| DeepSeek V3 | model.decoder | those with model.layers.61 in them |
| GLM-5 | model.decoder | Quark's that begin with model.layers.N. |
| GLM-5-next | model.decoder | those with model.layers.N in them |
| HunYuan V4 | .model.decoder | those of fp8 with mtp_layers.0 in them |
| GLM-4.5 to 4.7, Lite, GLM-OCR, GigaChat 3.5, HunYuan V3, MiMo-V2 | model.decoder | none |
| Qwen3-Next, Qwen3-MoE, EXAONE-MoE | model.layers.0 | none |
| dots3-note | model.heads.0.decoder | none |
| Ernie 4.5 | model.mtp_block | none |
| IQuest-Q1 | model.mtp_layer.mtp_model_layer | none |
| MiMo | without a name, so self_attn and mlp | none |

Source: `deepseek_nextn`, `glm4_moe` (`GlmMoeDsaForCausalLMNextN`), `glm5_next_nextn`, `glm4_moe_nextn`,
`glm4_moe_lite_nextn`, `glm_ocr_nextn`, `gigachat35_mtp`, `hunyuan_v3_nextn`, `hunyuan_v4_nextn`, `mimo_v2_nextn`,
`qwen3_next_mtp`, `qwen3_moe_mtp`, `exaone_moe_mtp`, `dots3_common/nextn`, `ernie4_eagle`, `iquest_q1_mtp`, `mimo_mtp`;
`_get_quantization_config`.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from eagle_kernels.quantization_config import algorithm_of, leaves_out, method_of, renamed

from .layers import names_without_layer, tried_by_sglang
from .pair import Pair

_RENAMED = ("compressed-tensors", "fp8", "humming", "modelopt", "mxfp8", "quark")
_DECODER = "model.decoder"
# Beside the decoder, not in it: GLM-5's names, of which GLM-5-next renames all but the first.
_STAGE = ("shared_head.norm", "eh_proj", "enorm", "hnorm")


def _of_deepseek(entry: str, layer: str) -> str:
    return entry.replace("model.layers.61", _DECODER, 1)


def _of_glm5(entry: str, layer: str) -> str:
    if not entry.startswith(f"{layer}."):
        return entry
    return entry.replace(layer, "model" if any(name in entry for name in _STAGE) else _DECODER, 1)


def _of_glm5_next(entry: str, layer: str) -> str:
    for own in (layer.replace("model.", "model.language_model."), layer):
        for name in _STAGE[1:]:
            if f"{own}.{name}" in entry:
                return entry.replace(f"{own}.{name}", f"model.{name}", 1)
        if own in entry:
            return entry.replace(own, _DECODER, 1)
    return entry


def _of_hunyuan4(entry: str, layer: str) -> str:
    return entry.replace("model.mtp_layers.0", _DECODER).replace("mtp_layers.0", _DECODER)


class _Class(NamedTuple):
    decoder: str | None = None  # what it calls its layer; None where that is not known
    rename: Callable[[str, str], str] = lambda entry, layer: entry  # given the name of the MTP layer in the file
    methods: tuple[str, ...] = _RENAMED
    is_left_out_whole: bool = False  # by an entry that is the layer itself (`_resolve_nextn_quant_config`)
    merged: tuple[str, ...] = ()  # the layers in its packed_modules_mapping


_CLASSES = {
    "DeepseekV3ForCausalLMNextN": _Class(_DECODER, _of_deepseek, is_left_out_whole=True),
    "GlmMoeDsaForCausalLMNextN": _Class(_DECODER, _of_glm5, methods=("quark",)),
    "Glm5NextForConditionalGenerationNextN": _Class(_DECODER, _of_glm5_next, is_left_out_whole=True),
    **dict.fromkeys(
        (
            *("Glm4MoeForCausalLMNextN", "Glm4MoeLiteForCausalLMNextN", "GlmOcrForConditionalGenerationNextN"),
            *("GigaChat35ForCausalLMNextN", "HYV3ForCausalLMNextN", "MiMoV2MTP"),
        ),
        _Class(_DECODER),
    ),
    "HYV4ForCausalLMNextN": _Class(f".{_DECODER}", _of_hunyuan4, methods=("fp8",), merged=("gate_up_proj",)),
    **dict.fromkeys(
        ("Qwen3NextForCausalLMMTP", "Qwen3MoeForCausalLMMTP"),
        _Class("model.layers.0", merged=("qkv_proj", "gate_up_proj")),
    ),
    "ExaoneMoEForCausalLMMTP": _Class("model.layers.0"),
    "Dots3NoteForCausalLMNextN": _Class("model.heads.0.decoder"),
    "Ernie4_5_MoeForCausalLMMTP": _Class("model.mtp_block"),
    "IQuestQ1MTP": _Class("model.mtp_layer.mtp_model_layer"),
    "MiMoMTP": _Class(""),
}


def _class_of(architectures: Collection[str]) -> _Class:
    return next((_CLASSES[name] for name in architectures if name in _CLASSES), _Class())


def read_config(pair: Pair, architectures: Collection[str]) -> Mapping[str, Any] | None:
    """The quantization config as SGLang reads it, with the entries as the drafter's class has renamed them."""
    config, of = pair.read["sglang", False], _class_of(architectures)
    if config is None or (method_of(config) if algorithm_of(config) is None else "modelopt") not in of.methods:
        return config
    return renamed(config, lambda entry: of.rename(entry, _layer(pair)))


def names_of(pair: Pair, architectures: Collection[str], path: str) -> list[str]:
    """["model.decoder.self_attn.qkv_proj", "model.decoder.self_attn.q_proj"] for model.layers.61.self_attn.q_proj: the
    merged layer, and its part, which methods try too; [] where the name is not known. Experts are one module."""
    own, names = _class_of(architectures), names_without_layer(path)
    if ".mlp.experts." in path:
        names = ["experts"]
    if names and names[0] not in own.merged:
        names = tried_by_sglang(pair, names)
    part = next((part for part in ("self_attn", "mlp") if f".{part}." in path), None)
    if own.decoder is None or part is None:
        return []
    return [f"{own.decoder}.{part}.{name}" if own.decoder else f"{part}.{name}" for name in names]


def is_unquantized(pair: Pair, architectures: Collection[str]) -> bool:
    """Whether the drafter is built without the quantization config, because Quark's exclude has the whole layer."""
    config, of = pair.quantization, _class_of(architectures)
    if config is None or method_of(config) != "quark" or not of.is_left_out_whole:
        return False
    config = renamed(config, lambda entry: of.rename(entry, _layer(pair)))
    return leaves_out(config, of.rename(_layer(pair), _layer(pair)), "whole")


def _layer(pair: Pair) -> str:
    """The first layer after the target's."""
    return f"model.layers.{pair.num_layers}"
