"""MTP and EAGLE-1: the one projection of embedding and hidden state, by the family's row of `models/table.py`."""

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from eagle_kernels import MTPConfig, MTPProjection, MTPStreamsConfig, MTPStreamsProjection
from eagle_kernels.checkpoint import mtp_layers, mtp_norms_inside, mtp_projection, mtp_streams_projection
from eagle_kernels.models.family import EngineStage, ModelFamily, MTPStage
from eagle_kernels.quantization_config import method_of

from . import nextn
from .layers import Names, is_read_by_sglang, kind_of, look_at_layers, look_at_merged, look_at_names
from .pair import ENGINES, SGLANG, Pair
from .quantization import EMBEDDING, PLAIN, TAKES_CONFIG, UNQUANTIZED, is_modelopt_fp4, look_at_codes, misnamed
from .served import eagle_in_vllm, look_at_registries

# SGLang's `deepseek_nextn` gives its projection a quantization config only if it is Quark's.
_TAKE_QUARK = {"DeepseekV3ForCausalLMNextN", "GlmMoeDsaForCausalLMNextN", "Glm5NextForConditionalGenerationNextN"}

# SGLang builds all layers of these in numbers where the target is in modelopt_fp4 (sglang#36599).
_NOT_IN_FP4 = _TAKE_QUARK | {
    *("Glm4MoeForCausalLMNextN", "Glm4MoeLiteForCausalLMNextN", "GlmOcrForConditionalGenerationNextN"),
    *("BailingMoeForCausalLMNextN", "Qwen3_5ForCausalLMMTP"),
}

# For these it reads mtp.safetensors even where the index does not name it.
_ADD_THE_FILE = {"Glm4MoeForCausalLMNextN", "Glm4MoeLiteForCausalLMNextN"}
# It gives the decoder layer of these no quantization config.
_SGLANG_IN_NUMBERS = {"Step3p5MTP", "InklingForConditionalGenerationMTP"}
# Each engine takes one entry for all layers of these: vLLM a rule of GPTQ's `dynamic` that leaves out mtp, SGLang an
# expert of mtp in Quark's exclude.
_QWEN3_5 = {"Qwen3_5MTP", "Qwen3_5MoeMTP", "InternS2MobiusMTP", "Qwen3_5ForCausalLMMTP", "Qwen4ExpForCausalLMMTP"}

# What engines call the projection in the config's lists, where not as the file does.
# Source: SGLang 0.5.23 `deepseek_nextn`, `dots3_common/nextn`, `longcat_flash_nextn`, `mistral_eagle`; vLLM 0.32
# `gemma4_mtp`, `longcat_flash_mtp`, `llama_eagle`, `cohere_eagle`, `mistral_eagle`, `mistral_large_3_eagle`.
_NAMES = {
    **dict.fromkeys(_TAKE_QUARK, "model.eh_proj"),
    "Dots3NoteForCausalLMNextN": "model.heads.0.eh_proj",
    "Gemma4MTPModel": "draft_model.pre_projection",
    **dict.fromkeys(("LongcatFlashForCausalLMNextN", "LongCatFlashMTPModel"), "eh_proj"),
    **dict.fromkeys(("MistralForCausalLMEagle", "MistralLarge3ForCausalLMEagle", "EagleLlamaForCausalLM"), "model.fc"),
    **dict.fromkeys(("EagleCohereForCausalLM", "EagleMistralForCausalLM"), "model.fc"),
    "EagleMistralLarge3ForCausalLM": "model.fc",
}
# vLLM compares the end of a name with the lists of fp8 for these (`_setup_ling3_fp8_config`).
_BY_THE_END = {"BailingMoeV3MTPModel"}

# vLLM builds fc of these in numbers where the target is in modelopt_fp4 (vllm#38832): `qwen3_5_mtp`, `qwen3_next_mtp`.
_FC_NOT_IN_FP4 = {"Qwen3NextMTP", "Qwen3_5MTP", "Qwen3_5MoeMTP"}


def examine(pair: Pair, family: ModelFamily, stage: MTPStage, config: Mapping[str, Any]) -> None:
    """Look for every trap of the stage, in each MTP layer that the file has."""
    pair.facts["drafter"] = f"MTP of {family.title}" if family.config_types else family.title
    if not family.config_types:
        look_at_registries(pair, pair.architectures, "EAGLE-1", eagle_in_vllm, engines=stage.engines)
    configs: dict[str, MTPConfig] = {}
    for engine, names in ENGINES.items():
        if engine not in stage.engines:
            pair.find("unserved", f"has no drafter for {family.title}", *names)
            continue
        try:
            kind = MTPStreamsConfig if stage.streams else MTPConfig
            configs[engine] = kind.from_hf(config, engine=engine)
        except (TypeError, ValueError) as wrong:
            return pair.find("config", str(wrong))
    for engine, served in configs.items():
        for name in ENGINES[engine]:
            pair.facts[name] = _summary(stage.engines[engine], served)
    first = next(iter(configs.values()))
    pair.facts["H"], pair.facts["D"] = first.hidden_size, first.out_features
    pair.look_at_target(first.hidden_size)
    layers = mtp_layers(pair.headers, streams=stage.streams)
    layers = {prefix: stems for prefix, stems in layers.items() if {*stage.projections} & {*stems.values()}}
    pair.facts["layers"] = sorted(layers)
    if not layers:
        pair.find(
            "load", f"the drafter's files have no {' and no '.join(stage.projections)}, the stage of {family.title}"
        )
    _look_at_index(pair, stage, [name for stems in layers.values() for name in stems])
    held_in = {name: _held_in(pair, served) for engine, served in stage.engines.items() for name in ENGINES[engine]}
    inside_norms = mtp_norms_inside(pair.headers, streams=stage.streams)
    for prefix, stems in layers.items():
        inside = [name for path in {name.rpartition(".")[0] for name in stems} for name in pair.inside[path].values()]
        inside += inside_norms.get(prefix, {})
        _look_at_layer(pair, configs, [*stems, *inside])
        for path, stem in {name.rpartition(".")[0]: stem for name, stem in stems.items()}.items():
            if stem in stage.projections:
                look_at_codes(pair, path, stem, held_in, "quantized")
                _look_at_name(pair, stage, path, held_in)
    seen = {name.rpartition(".")[0] for stems in layers.values() for name in stems}
    is_alone = not family.config_types or pair.drafter.get("model_type") in stage.drafter_types
    own = _own_paths(pair, layers, is_alone)
    held_in_layer = partial(_layer_held_in, pair, family, stage)
    own_names: dict[str, Names] = {}
    if stage.sglang is not None:
        architectures = stage.sglang.architectures
        own_names["sglang"] = Names(
            partial(nextn.names_of, pair, architectures), nextn.read_config(pair, architectures)
        )
    look_at_layers(pair, own - seen, held_in_layer, own_names)
    look_at_merged(pair, own)
    takes = [path for path in own - seen if held_in_layer(path).get(SGLANG) == TAKES_CONFIG]
    look_at_names(pair, takes, own_names)
    return None


def _look_at_index(pair: Pair, stage: MTPStage, names: Collection[str]) -> None:
    """Report engines that do not read mtp.safetensors, because the index does not name it (`maybe_add_mtp_safetensors`
    of SGLang 0.5.23; vLLM 0.33 reads the files of the index alone)."""
    if pair.unindexed.isdisjoint(names):
        return
    layers = pair.drafter.get("num_nextn_predict_layers")
    has_layers = isinstance(layers, int) and layers > 0
    for engine, served in stage.engines.items():
        if engine == "vllm" or not has_layers or _ADD_THE_FILE.isdisjoint(served.architectures):
            text = "does not read mtp.safetensors, which model.safetensors.index.json does not name"
            pair.find("load", text, *ENGINES[engine])


def _own_paths(pair: Pair, layers: Mapping[str, Mapping[str, str]], is_alone: bool) -> set[str]:
    """The paths of the drafter's own layers; those of MTP are in the target's files."""
    if is_alone:
        return set(pair.layers)
    # Where names do not contain the layer, as in Ernie, the prefix is made up and may be the target's.
    prefixes = [prefix for prefix, stems in layers.items() if any(name.startswith(prefix) for name in stems)]
    prefixes = [prefix for prefix in prefixes if prefix not in ("", "model.")]
    return {path for path in pair.layers if path.startswith(tuple(prefixes)) or ".mtp" in f".{path}"}


def _layer_held_in(pair: Pair, family: ModelFamily, stage: MTPStage, path: str) -> dict[str, str]:
    """{engine: what it holds a layer after the stage in}. An engine without an entry takes its target's weight there,
    or reads codes itself (`is_read_by_sglang`).

    Source: the NextN and MTP models of SGLang 0.5.23, whose worker shares embedding and head; vLLM 0.33
    `llm_base_proposer`, which shares those of MTP models, and for EAGLE-1 those that the drafter lacks; both engines'
    `gemma4_mtp`.
    """
    kind, is_assistant = kind_of(path), family.name == "gemma4"  # which has an embedding of its own, and no other head
    if kind == "head" or (kind == "embedding" and family.config_types and not is_assistant):
        return {}
    held_in: dict[str, str] = {}
    for engine, served in stage.engines.items():
        if engine == "sglang" and ((kind == "embedding" and not is_assistant) or is_read_by_sglang(path)):
            continue
        if path.endswith("masked_embedding.centroids"):
            held_in |= dict.fromkeys(ENGINES[engine], PLAIN)
            continue
        in_numbers = _is_in_numbers(pair, engine, {*served.architectures})
        place = EMBEDDING if kind == "embedding" else UNQUANTIZED if in_numbers else TAKES_CONFIG
        held_in |= dict.fromkeys(ENGINES[engine], place)
    return held_in


def _is_in_numbers(pair: Pair, engine: str, architectures: set[str]) -> bool:
    """Whether an engine builds the layers after the stage without a quantization method, whatever the config says.

    Source: SGLang 0.5.23 `step3p5_mtp`, `inkling`, `qwen3_5_mtp`; vLLM 0.33 `qwen3_5_mtp`.
    """
    config = pair.quantization
    if config is None:
        return False
    if engine == "vllm":
        stated = pair.drafter.get("quantization_config")
        rules = stated.get("dynamic") if isinstance(stated, Mapping) and not is_modelopt_fp4(config) else None
        of_mtp = isinstance(rules, Mapping) and any(rule.startswith("-:") and "mtp" in rule for rule in rules)
        return of_mtp and not _QWEN3_5.isdisjoint(architectures)
    if not _SGLANG_IN_NUMBERS.isdisjoint(architectures) or nextn.is_unquantized(pair, architectures):
        return True
    if method_of(config) == "quark" and not _QWEN3_5.isdisjoint(architectures):
        excluded = config.get("exclude")
        entries = [entry for entry in excluded if isinstance(entry, str)] if isinstance(excluded, list) else []
        return any(entry.startswith("mtp.") and "mlp.experts" in entry for entry in entries)
    return is_modelopt_fp4(config) and not _NOT_IN_FP4.isdisjoint(architectures)


def _summary(stage: EngineStage, config: MTPConfig) -> str:
    zero = "; zeros at position 0" if config.mask_position_zero else ""
    kind = stage.linear if stage.quantized else f"{stage.linear}, never quantized"
    return f"{kind}; the next step reads: {config.chain}{zero}"


def _held_in(pair: Pair, stage: EngineStage) -> str:
    if is_modelopt_fp4(pair.quantization) and not _FC_NOT_IN_FP4.isdisjoint(stage.architectures):
        return UNQUANTIZED
    if nextn.is_unquantized(pair, stage.architectures):
        return PLAIN
    is_quark = pair.quantization is not None and method_of(pair.quantization) == "quark"
    takes_config = stage.quantized or (is_quark and not _TAKE_QUARK.isdisjoint(stage.architectures))
    return TAKES_CONFIG if takes_config else PLAIN


def _look_at_name(pair: Pair, stage: MTPStage, path: str, held_in: Mapping[str, str]) -> None:
    """Report engines that do not find the projection in the config's lists, under their own name or the file's."""
    for engine, served in stage.engines.items():
        takes = [name for name in ENGINES[engine] if held_in[name] == TAKES_CONFIG]
        if not takes or not _BY_THE_END.isdisjoint(served.architectures):
            continue
        own = next((_NAMES[name] for name in served.architectures if name in _NAMES), path)
        read = nextn.read_config(pair, served.architectures)
        if (text := misnamed(pair, path, [own], engine, read)) is not None:
            pair.find("quantized", text, *takes)


def _look_at_layer(pair: Pair, configs: Mapping[str, MTPConfig], names: list[str]) -> None:
    """Load once for both engines, or once for each where only one of them has a bias."""
    opened = pair.opened(names)
    by_bias = {config.bias: config for config in configs.values()}
    for bias, config in by_bias.items():
        engines = [name for engine, other in configs.items() if other.bias == bias for name in ENGINES[engine]]
        if isinstance(config, MTPStreamsConfig):
            streams = MTPStreamsProjection(config, device="meta")
            pair.look_at_loading(partial(mtp_streams_projection, opened, streams, None))
        else:
            layer = MTPProjection(config, device="meta")
            only = engines if len(by_bias) > 1 else ()
            pair.look_at_loading(partial(mtp_projection, opened, layer, None), *only)
