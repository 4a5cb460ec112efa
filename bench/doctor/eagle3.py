"""EAGLE-3: which layers each engine captures, and what comes before and after `fc`.

What the engines read is taken from SGLang 0.5.23 (`llama_eagle3`, `spec_aux_hidden_state`) and vLLM 0.33
(`llama_eagle3`, `gpu_model_runner`, `eagle3_utils`), whose two runners differ.
"""

import re
from collections.abc import Mapping
from functools import partial

from eagle_kernels import Eagle3Config, Eagle3Projection, capture_layers
from eagle_kernels.checkpoint import eagle3_name, eagle3_projection, norms_before_fc
from eagle_kernels.checkpoint_files import Checkpoint
from eagle_kernels.drafter_config import get_field, is_captured_by_sglang
from eagle_kernels.quantized_checkpoint import is_of_activations

from . import eagle3_decoder
from .layers import (
    Names,
    kind_of,
    look_at_layers,
    look_at_merged,
    look_at_names,
    names_in_vllm,
    names_without_layer,
    tried_by_sglang,
)
from .pair import DENSE, SGLANG, VLLM_V1, VLLM_V2, Header, Pair
from .quantization import (
    EMBEDDING,
    HEAD,
    PLAIN,
    TAKES_CONFIG,
    UNQUANTIZED,
    head_held_in,
    is_modelopt_fp4,
    look_at_codes,
)
from .served import eagle3_in_vllm, look_at_registries

IDS = "eagle_aux_hidden_state_layer_ids"
_MLA = ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM")
# `kimi_k25_eagle3`: the only fc in SGLang that takes a quantization config, except one of modelopt_fp4.
_MLA_FC = {"Eagle3DeepseekV2ForCausalLM"}
_OF_LAYER_0_NORM = re.compile(
    r"(model\.)?(midlayer|layers\.0)\.(?P<norm>input_layernorm|hidden_norm)\.(?P<parameter>.+)"
)


def examine(pair: Pair, trained_by: str | None) -> None:
    """Look for every trap of an EAGLE-3 drafter; `trained_by` as in `Eagle3Config.from_hf`."""
    pair.facts["drafter"] = "EAGLE-3"
    if pair.drafter.get("speculators_model_type") is None:  # whose architecture vLLM makes of its model_type
        look_at_registries(pair, pair.architectures, "EAGLE-3", eagle3_in_vllm)
    _look_at_unread_ids(pair)
    try:
        config = Eagle3Config.from_hf(pair.drafter, trained_by=trained_by)
    except (TypeError, ValueError) as wrong:
        return pair.find("config", str(wrong))
    _look_at_layers(pair, config)
    pair.facts["H"], pair.facts["D"] = config.target_hidden_size, config.hidden_size
    pair.look_at_target(config.target_hidden_size)
    if config.projection:
        _look_at_fc(pair, config)
    _look_at_norms(pair, config)
    _look_at_flags(pair, config)
    _look_at_target_size(pair)
    eagle3_decoder.examine(pair, any(name in _MLA for name in pair.architectures))
    _look_at_vocabulary(pair, config)
    seen = {name.rpartition(".")[0] for name in pair.headers if _is_seen(name)}
    names = {"sglang": Names(partial(_names_in_sglang, pair)), "vllm": Names(partial(names_in_vllm, pair))}
    look_at_layers(pair, pair.layers.keys() - seen, partial(_held_in, pair, config), names)
    look_at_merged(pair, pair.layers)
    look_at_names(pair, pair.layers, names)
    return None


def _names_in_sglang(pair: Pair, path: str) -> list[str]:
    """`llama_eagle3` gives the parts of each layer the model's prefix, without the layer's; its fc takes no config.
    Of `kimi_k25_eagle3` fc takes it, under a name of its own."""
    if not any(name in _MLA for name in pair.architectures):
        names = tried_by_sglang(pair, names_without_layer(path))
        return [f"model.self_attn.{name}" if name == "o_proj" else f"model.{name}" for name in names]
    takes_fc = not _MLA_FC.isdisjoint(pair.architectures) and _in_sglang(pair) == TAKES_CONFIG
    return ["model.fc"] if path == "fc" and takes_fc else []


def _is_seen(name: str) -> bool:
    ours = eagle3_name(name)
    is_norm = ours == "norm.weight" or bool(norms_before_fc([name])) or _in_layer_0_norm(name) == "weight"
    return ours.startswith("fc.") or is_norm


def _held_in(pair: Pair, config: Eagle3Config, path: str) -> dict[str, str]:
    """{engine: what it holds a layer after fc in}. An engine without an entry takes its target's weight there.

    Source: SGLang 0.5.23 `llama_eagle3`, `kimi_k25_eagle3`, `eagle_worker_v2`; vLLM 0.33 `llama_eagle3`,
    `qwen3_eagle3`, `deepseek_eagle3`.
    """
    kind, is_mla = kind_of(path), any(name in _MLA for name in pair.architectures)
    in_sglang, in_vllm = _in_sglang(pair), TAKES_CONFIG
    if kind == "embedding":
        in_sglang = in_vllm = EMBEDDING
        is_own = pair.drafter.get("target_hidden_size") not in (None, config.hidden_size)
    elif kind == "head":
        is_own = pair.drafter.get("draft_vocab_size") is not None and not pair.drafter.get("tie_word_embeddings")
        in_vllm = HEAD if is_mla else head_held_in(pair.quantization, path, "vllm")
        in_sglang = HEAD if in_sglang != TAKES_CONFIG else head_held_in(pair.quantization, path, "sglang")
    else:
        is_own = True
    held_in = {VLLM_V1: in_vllm, VLLM_V2: in_vllm}
    return {SGLANG: in_sglang} | held_in if is_own else held_in


def _in_sglang(pair: Pair) -> str:
    is_mla = not _MLA_FC.isdisjoint(pair.architectures)
    return UNQUANTIZED if is_mla and is_modelopt_fp4(pair.quantization) else TAKES_CONFIG


def _engines(pair: Pair) -> dict[str, tuple[list[int] | None, bool, int]]:
    """(layer ids, whether they are boundaries, K of fc) as each engine reads them out of the drafter's config."""
    drafter = pair.drafter
    nested = get_field(drafter, "eagle_config") or {}
    nested_ids, top_ids = nested.get(IDS), drafter.get(IDS)
    stated = drafter.get("num_aux_hidden_states") or len(nested_ids or ()) or 3
    in_sglang = stated
    if not _MLA_FC.isdisjoint(pair.architectures):  # it never reads num_aux_hidden_states
        ids = top_ids if nested_ids is None else nested_ids
        in_sglang = 3 if ids is None else len(ids)
    return {
        SGLANG: (nested_ids, False, in_sglang),
        VLLM_V1: (top_ids or nested_ids or None, True, stated),  # an empty list counts as none
        VLLM_V2: (top_ids or nested.get("layer_ids") or None, True, stated),
    }


def _reads_last_state(pair: Pair) -> bool:
    """Whether engines take the drafter for one without fc: they look for use_aux_hidden_state in eagle_config alone."""
    nested = pair.drafter.get("eagle_config")
    return isinstance(nested, Mapping) and nested.get("use_aux_hidden_state") is False


def _look_at_unread_ids(pair: Pair) -> None:
    """Report layer ids that `use_aux_hidden_state` makes an engine ignore.

    Source: SGLang 0.5.23 `spec_aux_hidden_state`, `configure_aux_hidden_state_capture`; vLLM 0.33 `gpu_model_runner`.
    """
    if not _reads_last_state(pair):
        return
    places = {IDS: pair.drafter, f"eagle_config.{IDS}": pair.drafter["eagle_config"]}
    for name, section in places.items():
        if ids := section.get(IDS):
            text = f"captures no layer, since use_aux_hidden_state is False, and {name} is {ids}"
            pair.find("engine-layers", text, SGLANG, VLLM_V1)


def _look_at_last_state(pair: Pair, config: Eagle3Config) -> None:
    """For a drafter without fc (nvidia/gpt-oss-120b-Eagle3-short-context): engines capture no layer."""
    pair.facts["K"] = config.num_chunks
    pair.facts["boundaries"] = "none: the drafter reads the state in front of the target's head"
    if config.target_hidden_size != config.hidden_size:
        text = f"the states are {config.target_hidden_size} wide and the drafter {config.hidden_size}, and "
        pair.find("hidden-size", f"{text}use_aux_hidden_state False leaves out the fc between them")


def _look_at_layers(pair: Pair, config: Eagle3Config) -> None:
    if _reads_last_state(pair):
        return _look_at_last_state(pair, config)
    if not config.projection:
        text = "use_aux_hidden_state is False, but not in eagle_config, where engines look for it: they capture layers"
        pair.find("layers", text)
    layers = pair.num_layers
    if not isinstance(layers, int):
        return pair.find("layers", f"the target's config has no num_hidden_layers: got {layers!r}")
    in_sglang = is_captured_by_sglang(pair.model_type)
    mean = config.layer_ids_mean if in_sglang else "boundary"  # to vLLM, the only engine that may capture it
    try:
        meant = capture_layers(pair.model_type, layers, config.layer_ids, layer_ids_mean=mean)
    except (TypeError, ValueError) as wrong:
        return pair.find("layers", str(wrong))
    pair.facts["K"] = config.num_chunks
    pair.facts["boundaries"] = meant
    for engine, (ids, are_boundaries, stated) in _engines(pair).items():
        if engine == SGLANG and not in_sglang:
            pair.find("engine-layers", f"is not known to capture layers of a {pair.model_type!r} target", engine)
            continue
        is_unread = ids is None and config.layer_ids is not None
        unread = "does not read the config's layer ids and takes its default: " if is_unread else ""
        if ids == []:
            text = f"captures no layer, as the list of its ids is empty, and the config means the boundaries {meant}"
            pair.find("engine-layers", text, engine)
            continue
        try:
            captured = capture_layers(
                pair.model_type, layers, ids, layer_ids_mean="boundary" if are_boundaries else None
            )
        except (TypeError, ValueError) as wrong:
            pair.find("engine-layers", f"{unread}{wrong}", engine)
            continue
        pair.facts[engine] = f"captures {captured}, fc for K = {stated}"
        if captured != meant:
            text = f"{unread or 'captures '}the boundaries {captured}, and the config means {meant}"
            pair.find("engine-layers", text, engine)
        if stated != config.num_chunks:
            text = f"builds fc for K = {stated}, and the config means K = {config.num_chunks} (vllm#54526)"
            pair.find("engine-chunks", text, engine)
    if pair.model_type.startswith("gemma3"):
        text = "captures Gemma 3 without its residual (sglang#39286) unless this package's plugin runs"
        pair.find("gemma3-residual", text, SGLANG)
    return None


def _look_at_fc(pair: Pair, config: Eagle3Config) -> None:
    H, D, K = config.target_hidden_size, config.hidden_size, config.num_chunks
    if K * H == D:
        text = f"K*H = {K * H} is the drafter's own width: fc is skipped, since widths are compared"
        pair.find("fc-skipped", text, SGLANG)
    stored = {name: eagle3_name(name) for name in pair.headers}
    if ("fc.bias" in stored.values()) != config.bias:
        there = "there" if "fc.bias" in stored.values() else "missing"
        pair.find("fc-bias", f"fc.bias is {there}, and the config's bias is {config.bias}")
    names = [name for name, ours in stored.items() if ours.startswith("fc.") and ours != "fc.bias"]
    if not names:
        return pair.find("fc", "the drafter has no fc.weight")
    if numbers := [name for name in names if pair.headers[name].dtype == "F64"]:
        return pair.find("fc", f"{numbers[0]} is F64, expected {' or '.join(DENSE)}, or codes")
    # The loader is to judge fc alone: everything else that the layer has gets a stand-in that fits.
    layer = Eagle3Projection(config, device="meta")
    others = {name: tuple(value.shape) for name, value in layer.state_dict().items() if name != "fc.weight"}
    readers = pair.readers(names) | {name: Header(shape, "BF16").stand_in for name, shape in others.items()}
    pair.look_at_loading(partial(eagle3_projection, Checkpoint(readers, pair.quantization), layer))
    in_sglang = PLAIN if _MLA_FC.isdisjoint(pair.architectures) else _in_sglang(pair)
    held_in = {SGLANG: in_sglang, VLLM_V1: TAKES_CONFIG, VLLM_V2: TAKES_CONFIG}
    path = min((name.rpartition(".")[0] for name in names), key=len)  # bitsandbytes has fc.weight.absmax too
    look_at_codes(pair, path, "fc", held_in, "fc-quantized")
    return None


def _in_layer_0_norm(name: str) -> str | None:
    """What follows the path of a norm of layer 0; None for a tensor that is none of its."""
    match = _OF_LAYER_0_NORM.fullmatch(name)
    return match and match["parameter"]


def _look_at_norms(pair: Pair, config: Eagle3Config) -> None:
    H, D, K = config.target_hidden_size, config.hidden_size, config.num_chunks
    found = norms_before_fc(pair.headers)
    wanted = {f"fc_norm.{k}.weight": H for k in range(K)} if config.chunk_norm else {}
    wanted |= {"input_norm.weight": K * H} if config.concat_norm else {}
    pair.facts["norms in front of fc"] = found or "none"
    if found != sorted(wanted):
        text = f"the file has {found or 'no norms in front of fc'}, and the config means {[*wanted] or 'none'}"
        pair.find("norms", f"{text}: an engine that skips one loses acceptance, and says nothing")
    of_layer_0 = {match["norm"] for match in map(_OF_LAYER_0_NORM.fullmatch, pair.headers) if match}
    missing = [f"midlayer.{norm}.weight" for norm in ("input_layernorm", "hidden_norm") if norm not in of_layer_0]
    if not any(eagle3_name(name).startswith("norm.") for name in pair.headers):
        missing.append("norm.weight")
    if missing:
        pair.find(
            "norms", f"the file has no {' and no '.join(missing)}: engines norm with a gain of 1, and say nothing"
        )
    for name, header in pair.headers.items():
        parameter = _in_layer_0_norm(name)
        if parameter not in (None, "weight") and not is_of_activations(parameter):
            text = f"the file has {name}, and a norm has its weight alone: an engine that skips it says nothing"
            pair.find("norms", text)
        ours = eagle3_name(name)
        width = D if ours == "norm.weight" or parameter == "weight" else wanted.get(ours)
        if width is not None and (header.shape != (width,) or header.dtype not in DENSE):
            text = f"{name} is {list(header.shape)} of {header.dtype}, expected {[width]} of {' or '.join(DENSE)}"
            pair.find("norms", text)


# The fields of Eagle3Config that an engine may read differently, and what happens then.
_FLAGS = {
    "chunk_norm": "its fc reads other sizes",
    "concat_norm": "its fc reads other sizes",
    "bias": "fc.bias is left out",
    "norm_before_residual": "layer 0 adds another residual",
    "norm_output": "from its second step on it reads another state",
}


def _look_at_flags(pair: Pair, config: Eagle3Config) -> None:
    meant = {name: getattr(config, name) for name in _FLAGS}
    pair.facts["trained with"] = ", ".join(name for name in _FLAGS if meant[name]) or "the plain stage"
    for engine, read in _flags(pair).items():
        if read is None:
            pair.find("format", "does not know the format of speculators", engine)
            continue
        for name in _FLAGS:
            if read[name] != meant[name]:
                text = f"takes {name} for {read[name]}, and the drafter was trained with {meant[name]}: {_FLAGS[name]}"
                pair.find("engine-flags", text, engine)


def _look_at_target_size(pair: Pair) -> None:
    """Engines multiply target_hidden_size as it is where the config has it; only one class takes null for absent."""
    is_null = "target_hidden_size" in pair.drafter and pair.drafter["target_hidden_size"] is None
    if not is_null or pair.drafter.get("speculators_model_type") is not None:  # whose nulls vLLM leaves out
        return
    text = "reads target_hidden_size, which is null, and fails: without the field it is the drafter's hidden_size"
    in_sglang = (SGLANG,) if _MLA_FC.isdisjoint(pair.architectures) else ()
    in_vllm = () if _reads_last_state(pair) else (VLLM_V1, VLLM_V2)
    if engines := in_sglang + in_vllm:
        pair.find("hidden-size", text, *engines)


def _flags(pair: Pair) -> dict[str, dict[str, bool] | None]:
    """`_FLAGS` as each engine reads them from the drafter's config; None where it cannot read such a config."""
    drafter = pair.drafter
    nested = get_field(drafter, "eagle_config") or {}
    is_mla = any(name in _MLA for name in pair.architectures)
    speculators = drafter.get("speculators_model_type")

    def top(name: str, default: bool = False) -> bool:
        value = drafter.get(name)
        return default if value is None else bool(value)

    norm_before_fc = not is_mla and bool(nested.get("norm_before_fc", drafter.get("norm_before_fc")))
    sglang = {
        "chunk_norm": top("fc_norm") or top("use_aux_norm"),
        "concat_norm": norm_before_fc,
        "bias": top("bias"),
        "norm_before_residual": False,
        "norm_output": top("norm_output"),
    }
    vllm = sglang | {
        "chunk_norm": top("fc_norm") and speculators != "peagle",
        "bias": False,
        "norm_before_residual": top("norm_before_residual", default=speculators == "eagle3"),
        "norm_output": top("norm_output") and speculators != "peagle",
    }
    return {SGLANG: sglang if speculators is None else None, VLLM_V1: vllm, VLLM_V2: vllm}


def _look_at_vocabulary(pair: Pair, config: Eagle3Config) -> None:
    target, own, drafted = pair.text.get("vocab_size"), config.vocab_size, config.draft_vocab_size
    sizes = {"target": target, "drafter": own, "drafted": drafted}
    stated = (f"{name} {'not stated' if size is None else size}" for name, size in sizes.items())
    pair.facts["vocabulary"] = ", ".join(stated)
    pair.look_at_vocabulary(own)
    headers = {eagle3_name(name): header for name, header in pair.headers.items()}
    d2t, head = headers.get("d2t", headers.get(".d2t")), headers.get("lm_head.weight")
    is_short = None not in (drafted, target) and drafted != target
    if is_short and d2t is None:
        pair.find(
            "d2t", f"{drafted} of {target} ids are drafted, and the file has no d2t: every draft means another token"
        )
    if d2t is not None and drafted is not None and d2t.shape != (drafted,):
        pair.find("d2t", f"d2t has {list(d2t.shape)} entries, and draft_vocab_size is {drafted}")
    if head is not None and len(head.shape) != 2:
        pair.find("draft-head", f"lm_head.weight is {list(head.shape)}, expected a matrix")
    elif head is not None and drafted is not None and head.shape[0] != drafted:
        pair.find("draft-head", f"lm_head.weight has {head.shape[0]} rows, and draft_vocab_size is {drafted}")
    has_head = any(name.startswith("lm_head.") for name in headers)
    if is_short and not has_head:
        pair.find("draft-head", f"{drafted} ids are drafted, and the file has no lm_head.weight for them")
    if pair.drafter.get("speculators_model_type") is not None:  # which SGLang does not read
        return
    if pair.drafter.get("tie_word_embeddings") and has_head:
        text = "takes the embedding for the head, as tie_word_embeddings says, and skips the file's lm_head"
        pair.find("draft-head", text, SGLANG)
    if "draft_vocab_size" not in pair.drafter and _MLA_FC.isdisjoint(pair.architectures):
        text = "reads draft_vocab_size, which the config does not have, and fails: null stands for the target's head"
        pair.find("draft-head", text, SGLANG)
