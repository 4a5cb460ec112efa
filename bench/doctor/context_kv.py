"""DFlash and DSpark: the captured layers, `fc` with the norm after it, and K and V of the draft layers.

SGLang 0.5.23 `models/dflash.py`, `dspark.py`; vLLM 0.33 `qwen3_dflash`, `eagle3_utils`.
"""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from eagle_kernels import ContextKV, ContextKVConfig, capture_layers
from eagle_kernels.checkpoint import context_kv, context_modules, context_projections
from eagle_kernels.context_kv import NEOX_STYLE, is_neox_style, plain_config

from .eagle3 import IDS
from .layers import (
    Names,
    is_read_by_sglang,
    kind_of,
    look_at_layers,
    look_at_merged,
    look_at_names,
    names_in_vllm,
    names_without_layer,
)
from .pair import SGLANG, VLLM_V1, VLLM_V2, Pair
from .quantization import (
    EMBEDDING,
    HEAD,
    PLAIN,
    TAKES_CONFIG,
    UNQUANTIZED,
    head_held_in,
    holds_codes,
    look_at_codes,
)
from .served import look_at_registries

_LAGUNA = "DFlashLagunaForCausalLM"
# In SGLang's other classes fc is a plain nn.Linear (sglang#39087); the layers after it take the config in every class.
_SGLANG_FC_TAKES_CONFIG = {"LiLiCorrDraftModel", "DSparkMiniMaxDraftModel", "DeepseekV4ForCausalLMDSpark"}
_VLLM_TAKES_NO_CONFIG = {"DFlash2BeamDraftModel"}
# In vLLM's other classes lm_head has no quantization method, whatever the config says.
_VLLM_HEAD_TAKES_CONFIG = {"DFlashDraftModel", "DFlash2DraftModel", "LiLiCorrDraftModel"}
# Modules beside the decoder layers: selector, convolution, Domino's projector, Markov and confidence heads.
_SGLANG_PLAIN = re.compile(
    r"\b(markov_head|confidence_head|candidate_selector|embed_proj|lilicorr\.(factor_input_proj|out_head|in_head))\b"
    r"|kernel_projection$"
)
_VLLM_UNQUANTIZED = re.compile(
    r"\b(confidence_head|candidate_selector|xpress_head|lilicorr\.(factor_input_proj|out_head|in_head))\b"
)
# These classes give their layers no prefix, so that no ignore-list entry with a layer's number in it matches them.
_SGLANG_NAMES_NO_LAYER = {
    *("DFlashDraftModel", "DFlash2DraftModel", "DFlash2BeamDraftModel", _LAGUNA),
    *("MiniMaxDFlash2DraftModel", "MuseGlimmerAssistantModel", "DSparkDraftModel", "Qwen3DSparkModel"),
    *("LingDSparkModel", "Lfm2DSparkDraftModel"),
}
# For a Muse Glimmer target SGLang takes the layer ids of these drafters for outputs, those of others for boundaries.
_MUSE_OUTPUTS = {"DFlash2DraftModel", "MuseGlimmerAssistantModel", "DFlashMuseGlimmerAssistantModel"}
# vLLM numbers the layers of these after the target's last one, and renames ModelOpt's entries likewise: what calls
# `DFlashQwen3Model.__init__` of 0.33.
_VLLM_RENAMES = {
    *("DFlashDraftModel", "DFlash2DraftModel", "LiLiCorrDraftModel", "Qwen3XPressModel", "DFlashQwen3XPressModel"),
    *("MuseGlimmerAssistantModel", "DFlashMuseGlimmerAssistantModel", "Qwen3DSparkModel", "Qwen3OmniDSparkModel"),
}
# It numbers the layers of these, too, and renames nothing: `muse_spark/common/dspark`, `kimi_k3/nvidia/dspark_mla`.
_VLLM_COUNTS_ON = _VLLM_RENAMES | {"MuseSparkDSparkModel", "K3DSparkModel"}
# In vLLM fc of these reads states as wide as the drafter, whatever target_hidden_size is.
_VLLM_READS_OWN_WIDTH = {"DFlash2BeamDraftModel", "Gemma4DSparkModel"}
# In vLLM RoPE rotates halves in these, whatever the config says.
_VLLM_ROTATES_HALVES = {"DFlash2BeamDraftModel", _LAGUNA}
# The classes with a Qwen 3's layers: one RoPE for all of them, and in vLLM norms whose gain is the weight.
_SGLANG_DENSE = _SGLANG_NAMES_NO_LAYER | {"LiLiCorrDraftModel"}
_VLLM_DENSE = _VLLM_RENAMES | {"DFlash2BeamDraftModel"}
# SGLang's `DFlashAttention`, whose columns that rotate vLLM looks for in other fields.
_IN_BOTH = _SGLANG_DENSE & (_VLLM_RENAMES | {_LAGUNA})
# Names that `DFlashLagunaModel.load_weights` of vLLM has no parameter for: of the decoder layer it has qkv_proj,
# gate_proj and up_proj, and it puts `model.` in front of every name.
_UNKNOWN_TO_VLLM_LAGUNA = re.compile(r"model\..*|layers\.\d+\.(self_attn\.[qkv]_proj|mlp\.gate_up_proj)")
# transformers 5.24 `LagunaConfig`, which vLLM reads: (theta, factor) of a config without rope_parameters.
_LAGUNA_ROPE = {"full_attention": (500000.0, 0.5), "sliding_attention": (10000.0, 1.0)}
# The names that SGLang reads for this one, out of all that the file has: `DSparkMiniMaxDraftModel.load_weights`.
_OF_MINIMAX_M31 = re.compile(r"((language_model\.)?model\.)?dspark\.")
# vLLM cuts K and V out of `qkv_proj.weight` as if it held numbers (vllm#51581).
_VLLM_CUTS_CODES = {
    _LAGUNA,
    "Gemma4DSparkModel",
    "MuseSparkDSparkModel",
}


def examine_speculators(pair: Pair) -> None:
    """`examine` of a drafter in speculators' format, by the architecture that vLLM gives it."""
    pair.find("format", "does not know the format of speculators", SGLANG)
    if (plain := _plain(pair)) is not None:
        pair.drafter = plain
        examine(pair, pair.architectures[0])


def _plain(pair: Pair) -> Mapping[str, Any] | None:
    """The drafter's config without sections; None, and a finding, where it cannot be read."""
    try:
        plain = plain_config(pair.drafter)
    except (TypeError, ValueError) as wrong:
        pair.find("config", str(wrong))
        return None
    assert isinstance(plain, Mapping)
    return plain


def examine(pair: Pair, architecture: str) -> None:
    """Look for every trap of the context stage of a DFlash or DSpark drafter."""
    if (plain := _plain(pair)) is None:
        return None
    pair.drafter = plain
    is_dspark = "DSpark" in architecture or pair.drafter.get("dspark_target_layer_ids") is not None
    pair.facts["drafter"] = f"{'DSpark' if is_dspark else 'DFlash'} ({architecture})"
    if not is_target(architecture):
        look_at_registries(pair, [architecture])
    _look_at_layers(pair, architecture, "dspark" if is_dspark else "dflash")
    pair.look_at_vocabulary(pair.drafter.get("vocab_size"))
    width = pair.text.get("hidden_size")
    if not isinstance(width, int):
        return pair.find("hidden-size", f"the target's config has no hidden_size: got {width!r}")
    try:
        config = ContextKVConfig.from_hf(_without_value_scale(pair), target_hidden_size=width)
    except (TypeError, ValueError) as wrong:
        return pair.find("config", str(wrong))
    if config.capture_after_engram:  # as SGLang does for the family, where a layer has an Engram
        _look_at_engrams(pair)
    pair.facts |= {"K": config.num_chunks, "H": width, "D": config.hidden_size, "draft layers": config.num_layers}
    if not is_target(architecture):
        _look_at_width(pair, architecture, width)
        _look_at_gains(pair, architecture, config)
        _look_at_rope(pair, architecture)
        _look_at_rope_by_layer_type(pair, architecture, config)
        _look_at_rotated_columns(pair, architecture, config)
    if architecture == _LAGUNA:
        _look_at_defaults_of_laguna(pair)
        _look_at_names_of_laguna(pair)
    layer = ContextKV(config, device="meta")
    pair.look_at_loading(partial(context_kv, pair.opened(pair.headers), layer, 0, 1))
    _look_at_projections(pair, architecture)
    seen = context_modules(pair.headers)
    own = {path for path in pair.layers if not is_target(architecture) or path.startswith("mtp.")}
    if architecture == "DSparkMiniMaxDraftModel":  # whose file may have the target's layers too
        own = {path for path in own if _OF_MINIMAX_M31.match(path)} or own
    names = {}
    if architecture in _SGLANG_NAMES_NO_LAYER and not _is_nemotron_35(pair, architecture):
        names["sglang"] = Names(names_without_layer)
    if architecture in _VLLM_COUNTS_ON:
        names["vllm"] = Names(partial(names_in_vllm, pair, renames=architecture in _VLLM_RENAMES))
    look_at_layers(pair, own - seen, partial(_held_in, pair, architecture), names)
    if architecture != "Gemma4DSparkModel":  # whose q, k and v stay apart
        look_at_merged(pair, own)
    look_at_names(pair, own, names)
    return None


def _without_value_scale(pair: Pair) -> Mapping[str, object]:
    """The drafter's config without MiMo's factor of V, which both engines multiply by and `ContextKV` does not.

    Source: SGLang 0.5.23 `DFlashAttention.kv_proj_only`; vLLM 0.33 `precompute_and_store_context_kv`.
    """
    nested = pair.drafter.get("dflash_config")
    if not isinstance(nested, Mapping) or nested.get("attention_value_scale") is None:
        return pair.drafter
    scale = nested["attention_value_scale"]
    pair.facts["attention_value_scale"] = f"{scale}, which ContextKV does not read: it refuses the config"
    return {**pair.drafter, "dflash_config": {**nested, "attention_value_scale": None}}


def _held_in(pair: Pair, architecture: str, path: str) -> dict[str, str]:
    """{engine: what it holds a layer after the context stage in}.

    An engine without an entry takes its target's weight there, as SGLang's workers do for embedding and head, or reads
    codes itself (`is_read_by_sglang`).
    Source: SGLang 0.5.23 `dflash`, `dspark`, `dspark_minimax`, `lilicorr`; vLLM 0.33 `qwen3_dflash`, `qwen3_dflash2`,
    `qwen3_dspark`, `qwen3_xpress`, `lilicorr`, `laguna_dflash`, `models/beam`.
    """
    kind, takes_none = kind_of(path), architecture in _VLLM_TAKES_NO_CONFIG
    in_vllm = UNQUANTIZED if takes_none or _VLLM_UNQUANTIZED.search(path) else TAKES_CONFIG
    name = path.rpartition(".")[2]
    is_plain = _SGLANG_PLAIN.search(path) and not (name == "markov_w2" and _is_nemotron_35(pair, architecture))
    in_sglang = PLAIN if is_plain else TAKES_CONFIG
    if name == "markov_w1":
        in_sglang = in_vllm = EMBEDDING
    elif name == "markov_w2" and not takes_none:  # a ParallelLMHead to vLLM
        in_vllm = HEAD if architecture == "Gemma4DSparkModel" else head_held_in(pair.quantization, path, "vllm")
    elif kind in ("embedding", "head"):
        if takes_none or is_target(architecture):
            return {}
        takes_head = architecture in _VLLM_HEAD_TAKES_CONFIG and pair.drafter.get("has_own_lm_head")
        in_head = head_held_in(pair.quantization, path, "vllm") if takes_head else HEAD
        in_vllm = EMBEDDING if kind == "embedding" else in_head
        return {VLLM_V1: in_vllm, VLLM_V2: in_vllm}
    if is_read_by_sglang(path):
        return {VLLM_V1: in_vllm, VLLM_V2: in_vllm}
    return {SGLANG: in_sglang, VLLM_V1: in_vllm, VLLM_V2: in_vllm}


def _is_nemotron_35(pair: Pair, architecture: str) -> bool:
    """Whether SGLang takes it for a drafter of Nemotron 3.5, whose fc, Markov head and numbered layers take the config.

    Source: SGLang 0.5.23 `dflash_utils.is_nemotron_35_draft_config`.
    """
    config, nested = pair.drafter, pair.drafter.get("dflash_config")
    nested = nested if isinstance(nested, Mapping) else {}
    targets: object = next(iter(_layer_ids(pair).values()), None)
    return (
        architecture in ("DFlashDraftModel", "Qwen3DSparkModel")
        and bool(config.get("has_embed_tokens"))
        and not config.get("has_lm_head")
        and (pair.quantization or {}).get("quant_algo") == "W4A16_NVFP4"
        and isinstance(targets, list)
        and all(type(each) is int for each in targets)
        and config.get(IDS) == [each + 1 for each in targets]
        and nested.get("sample_from_anchor", config.get("sample_from_anchor")) is False
    )


def is_target(architecture: str) -> bool:
    """Whether it is DeepSeek-V4's own checkpoint, of whose DSpark stages each engine makes a drafter."""
    return architecture.startswith("DeepseekV4")


def _look_at_layers(pair: Pair, architecture: str, algorithm: str) -> None:
    layers, ids = pair.num_layers, _layer_ids(pair)
    if not isinstance(layers, int):
        return pair.find("layers", f"the target's config has no num_hidden_layers: got {layers!r}")
    if architecture == "K3DSparkModel":
        _look_at_layers_of_kimi_k3(pair)
    elif (stated := _num_target_layers(pair)) not in (None, layers):
        pair.find("layers", f"the target has {layers} layers, and the drafter's num_target_layers is {stated}")
    if not ids:
        text = "the config has no target_layer_ids: SGLang spreads them over the target, vLLM takes as many as the "
        return pair.find("layers", text + "drafter has layers")
    (place, first), *others = ids.items()
    for other, value in others:
        if value != first:
            pair.find("layers", f"{other} is {value}, and {place} {first}")
    try:
        is_muse = pair.model_type == "muse_glimmer" and not _MUSE_OUTPUTS.isdisjoint(pair.architectures)
        mean = "output" if is_muse else None
        meant = capture_layers(pair.model_type, layers, first, algorithm=algorithm, layer_ids_mean=mean)
    except (TypeError, ValueError) as wrong:
        return pair.find("layers", str(wrong))
    pair.facts["boundaries"] = meant
    pair.facts["layer ids"] = f"{first} in {place}"
    _look_at_engines(pair, algorithm, meant)
    return None


def _num_target_layers(pair: Pair) -> object:
    """Source: SGLang 0.5.23 `parse_dflash_draft_config`."""
    nested = pair.drafter.get("dflash_config")
    place = nested if isinstance(nested, Mapping) and "num_target_layers" in nested else pair.drafter
    return place.get("num_target_layers")


def _look_at_layers_of_kimi_k3(pair: Pair) -> None:
    """There num_target_layers is the number of captured layers. Source: vLLM 0.33 `K3DSparkConfig`."""
    stated, ids = pair.drafter.get("num_target_layers"), pair.drafter.get("target_layer_ids")
    count = len(ids) if isinstance(ids, list) else 0
    if count == 0 or stated != count:
        text = f"refuses the config: num_target_layers is {stated}, and target_layer_ids has {count} entries"
        pair.find("layers", text, VLLM_V1, VLLM_V2)


def _look_at_width(pair: Pair, architecture: str, width: int) -> None:
    """Report engines whose fc reads states of another width than the target's.

    Source: SGLang 0.5.23 `DFlashDraftModel.__init__`; vLLM 0.33 `_get_dflash_fc_input_size`, `laguna_dflash`,
    `models/beam`, `gemma4_dspark`.
    """
    own = pair.drafter.get("hidden_size")
    in_vllm = own if architecture in _VLLM_READS_OWN_WIDTH else pair.drafter.get("target_hidden_size") or own
    in_vllm = width if architecture == _LAGUNA else in_vllm
    found: dict[str, list[str]] = {}
    for engine, read in ((SGLANG, own), (VLLM_V1, in_vllm), (VLLM_V2, in_vllm)):
        if read != width:
            text = f"builds fc for states as wide as {read}, and the target's hidden_size is {width}"
            found.setdefault(text, []).append(engine)
    for text, engines in found.items():
        pair.find("hidden-size", text, *engines)


def _look_at_rope(pair: Pair, architecture: str) -> None:
    """Report vLLM where it rotates other columns together than the config says, and SGLang reads: K is then wrong.

    Source: SGLang 0.5.23 `DFlashAttention`; vLLM 0.33 `qwen3_dflash`, `laguna`, `models/beam`.
    """
    if architecture in _VLLM_RENAMES:
        try:
            in_vllm, because = is_neox_style(pair.drafter, "is_neox_style"), "it reads is_neox_style alone"
        except TypeError as wrong:  # from_hf looks at rope_is_neox_style first
            return pair.find("config", str(wrong), VLLM_V1, VLLM_V2)
    elif architecture in _VLLM_ROTATES_HALVES:
        in_vllm, because = True, "it reads no field for it"
    else:
        return None
    if is_neox_style(pair.drafter) != in_vllm:
        name = next(name for name in NEOX_STYLE if pair.drafter.get(name) is not None)
        text = f"rotates {'halves' if in_vllm else 'pairs'} of K's heads: {because}, and the config has {name} "
        pair.find("rope", text + str(pair.drafter[name]).lower(), VLLM_V1, VLLM_V2)
    return None


def _look_at_gains(pair: Pair, architecture: str, config: ContextKVConfig) -> None:
    """Source: SGLang 0.5.23 `DFlashDraftModel`, `DFlashAttention`; vLLM 0.33 `qwen3_dflash`, `models/beam`."""
    if config.norm_offset and architecture in _VLLM_DENSE:
        text = "norms with the gain w: it does not read use_gemma_norm, by which the drafter's gains are 1 + w"
        pair.find("norms", text, VLLM_V1, VLLM_V2)


def _look_at_names_of_laguna(pair: Pair) -> None:
    if unknown := sorted(path for path in pair.layers if _UNKNOWN_TO_VLLM_LAGUNA.fullmatch(path)):
        text = f"has no parameter for {unknown[0]}, and fails: of a layer it has qkv_proj, gate_proj and up_proj"
        pair.find("load", f"{text}, by names without model.", VLLM_V1, VLLM_V2)


def _rope_of(pair: Pair) -> Mapping[str, Any]:
    rope = pair.drafter.get("rope_parameters") or pair.drafter.get("rope_scaling")
    return rope if isinstance(rope, Mapping) else {}


def _is_by_layer_type(rope: Mapping[str, Any]) -> bool:
    return any(isinstance(value, Mapping) for value in rope.values())


def _look_at_rope_by_layer_type(pair: Pair, architecture: str, config: ContextKVConfig) -> None:
    """Source: `get_rope` of SGLang 0.5.23 and of vLLM 0.33, which looks its arguments up by hash: a dict has none."""
    if not _is_by_layer_type(_rope_of(pair)):
        return
    # DSparkDraftModel is DeepSeek-V4's stages too, which have another class.
    in_sglang = (SGLANG,) if architecture in _SGLANG_DENSE and config.values == "own" else ()
    in_vllm = (VLLM_V1, VLLM_V2) if architecture in _VLLM_DENSE else ()
    if engines := in_sglang + in_vllm:
        text = "has one RoPE for all layers, and fails: rope_parameters have one for each type of layer"
        pair.find("rope", text, *engines)


def _look_at_defaults_of_laguna(pair: Pair) -> None:
    """Report layers for which the engines take different RoPE where the config has none.

    Source: SGLang 0.5.23 `configs/laguna`; vLLM 0.33 `laguna` with transformers' config.
    """
    config = pair.drafter
    if _rope_of(pair) or config.get("model_type") != "laguna":
        return
    in_sglang = config.get("rope_theta") or 10000.0, config.get("partial_rotary_factor") or 1.0
    own = {"sliding_attention"} if config.get("swa_rope_parameters") is not None else set()
    for name in dict.fromkeys(config.get("layer_types") or ["full_attention"]):
        in_vllm = _LAGUNA_ROPE.get(name)
        if name not in own and in_vllm not in (None, in_sglang):
            text = "the config has no rope_parameters: for {} SGLang takes theta {} and a factor of {}, "
            text += "vLLM transformers' {} and {}"
            pair.find("rope", text.format(name, *in_sglang, *in_vllm))


def _look_at_rotated_columns(pair: Pair, architecture: str, config: ContextKVConfig) -> None:
    """Report fields by which vLLM finds the columns that rotate and SGLang does not; both read rope_dim.

    Source: SGLang 0.5.23 `DFlashAttention`, `get_rope_config`; vLLM 0.33 `get_rope`, `laguna`.
    """
    rope, stated = _rope_of(pair), pair.drafter.get("partial_rotary_factor")
    if architecture not in _IN_BOTH or _is_by_layer_type(rope):
        return
    in_sglang = int(config.head_dim * stated) if isinstance(stated, (int, float)) else config.head_dim
    if isinstance(rope.get("rope_dim"), int):
        in_sglang = rope["rope_dim"]
    if in_sglang != config.rotary_dim:
        widths = f"SGLang rotates {in_sglang} of {config.head_dim} columns of K's heads, vLLM {config.rotary_dim}"
        own = "swa_rope_parameters and " if architecture == _LAGUNA else ""
        text = f"it alone reads {own}partial_rotary_factor in rope_parameters, and both read rope_dim there"
        pair.find("rope", f"{widths}: {text}")


def _look_at_engines(pair: Pair, algorithm: str, meant: list[int]) -> None:
    """Report engines that capture other layers than the config means.

    Source: vLLM 0.33 `gpu_model_runner._get_eagle3_aux_layers_from_config` (V1, which runs no DSpark),
    `eagle3_utils.get_eagle3_aux_layers_from_config` (V2); SGLang 0.5.23 `parse_dflash_draft_config`.
    """
    top, nested = pair.drafter.get(IDS), pair.drafter.get("dflash_config")
    runners = (VLLM_V1, VLLM_V2) if algorithm == "dflash" else (VLLM_V2,)
    if top:
        if top != meant:
            text = f"captures the boundaries {top}, as {IDS} says, and the config means {meant}"
            pair.find("engine-layers", text, *runners)
    elif algorithm == "dflash" and not (isinstance(nested, Mapping) and nested.get("target_layer_ids")):
        text = "reads target_layer_ids in dflash_config alone, and captures the layers that its target has for EAGLE-3"
        pair.find("engine-layers", text, VLLM_V1)


def _look_at_engrams(pair: Pair) -> None:
    """Source: SGLang 0.5.23 `deepseek_v4`, vLLM 0.33 `deepseek_v41`, `common/engram.py`."""
    captured, engrams = next(iter(_layer_ids(pair).values()), []), pair.text.get("engram_layer_ids")
    if isinstance(engrams, list) and (both := [each for each in captured if each in engrams]):
        text = f"SGLang captures the layers {both} after the injection of their Engram, vLLM before it"
        pair.find("engine-layers", f"{text}: the drafter reads right states in the engine that it was trained for")


def _layer_ids(pair: Pair) -> dict[str, list]:
    """{field of the config: the layer ids that it states}, as the checkpoint has them; the one that engines read comes
    first."""
    nested = pair.drafter.get("dflash_config")
    places = {"dflash_config.": nested if isinstance(nested, Mapping) else {}, "": pair.drafter}
    names = ("dspark_target_layer_ids", "target_layer_ids")
    found = {f"{place}{name}": section.get(name) for place, section in places.items() for name in names}
    return {place: ids for place, ids in found.items() if ids}


def _look_at_projections(pair: Pair, architecture: str) -> None:
    takes_fc = architecture in _SGLANG_FC_TAKES_CONFIG or _is_nemotron_35(pair, architecture)
    takes_fc |= pair.drafter.get("dspark_target_layer_ids") is not None
    in_vllm = UNQUANTIZED if architecture in _VLLM_TAKES_NO_CONFIG else TAKES_CONFIG
    for part, paths in context_projections(pair.headers).items():
        in_sglang = TAKES_CONFIG if part != "fc" or takes_fc else PLAIN
        in_codes = [path for path in paths if holds_codes(pair, path)]
        in_numbers = [path for path in paths if path not in in_codes]
        trap = "fc-quantized" if part == "fc" else "kv-quantized"
        for path in in_numbers[:1] + in_codes[:1]:  # one layer speaks for all
            held_in = {SGLANG: in_sglang, VLLM_V1: in_vllm, VLLM_V2: in_vllm}
            look_at_codes(pair, path, path.rpartition(".")[2], held_in, trap)
        if part in ("k", "qkv") and architecture in _VLLM_CUTS_CODES and in_codes:
            text = "cuts K and V out of the codes of qkv_proj as if they were numbers (vllm#51581)"
            pair.find(trap, text, VLLM_V1, VLLM_V2)
