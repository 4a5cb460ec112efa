"""MTP and EAGLE-1: the one projection of embedding and hidden state, by the family's row of `models/table.py`."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from eagle_kernels import MTPConfig, MTPProjection, MTPStreamsConfig, MTPStreamsProjection
from eagle_kernels.checkpoint import mtp_layers, mtp_projection, mtp_streams_projection
from eagle_kernels.models.family import EngineStage, ModelFamily, MTPStage

from .pair import ENGINES, Pair
from .quantization import PLAIN, TAKES_CONFIG, look_at_codes

# SGLang's `deepseek_nextn` takes a quantization config of Quark, and of nobody else.
_TAKE_QUARK = {"DeepseekV3ForCausalLMNextN", "GlmMoeDsaForCausalLMNextN", "Glm5NextForConditionalGenerationNextN"}


def examine(pair: Pair, family: ModelFamily, stage: MTPStage, config: Mapping[str, Any]) -> None:
    """Look for every trap of the stage, in each MTP layer that the file has."""
    pair.facts["drafter"] = f"MTP of {family.title}" if family.config_types else family.title
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
    held_in = {name: _held_in(pair, served) for engine, served in stage.engines.items() for name in ENGINES[engine]}
    for stems in layers.values():
        _look_at_layer(pair, configs, list(stems))
        for path, stem in {name.rpartition(".")[0]: stem for name, stem in stems.items()}.items():
            if stem in stage.projections:
                look_at_codes(pair, path, stem, held_in, "quantized")
    return None


def _summary(stage: EngineStage, config: MTPConfig) -> str:
    zero = "; zeros at position 0" if config.mask_position_zero else ""
    kind = stage.linear if stage.quantized else f"{stage.linear}, never quantized"
    return f"{kind}; the next step reads: {config.chain}{zero}"


def _held_in(pair: Pair, stage: EngineStage) -> str:
    is_quark = pair.quantization is not None and pair.quantization.get("quant_method") == "quark"
    takes_config = stage.quantized or (is_quark and not _TAKE_QUARK.isdisjoint(stage.architectures))
    return TAKES_CONFIG if takes_config else PLAIN


def _look_at_layer(pair: Pair, configs: Mapping[str, MTPConfig], names: list[str]) -> None:
    """Once for both engines, but where one has a bias and the other none."""
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
