"""What a drafter's config says about its input stage: which layers of the target it reads, and how it projects them.

Layers are named by boundaries: boundary 0 is the embedding output, boundary i the residual stream after layers
0..i-1 (hidden + residual, rounded once, before the next norm), boundary N the stream after the last layer, before
the final norm. Checkpoints write them in several encodings; a wrong one costs acceptance and raises nothing
(1.2 % against 58.9 % of drafts accepted, vllm#50170).
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import checks
from .models import families


def _output_ids(layer_ids: Sequence[int], num_layers: int) -> int:
    return 1


def _boundary_ids(layer_ids: Sequence[int], num_layers: int) -> int:
    return 0


def _output_ids_iff_first_is_one(layer_ids: Sequence[int], num_layers: int) -> int:
    # SpecForge's DeepSeek drafts say [1, 29, 57], its Kimi drafts [2, 30, 58], for the same boundaries (sglang#25454).
    return int(layer_ids[0] == 1)


def _boundary_ids_iff_last_is_n(layer_ids: Sequence[int], num_layers: int) -> int:
    # An output id N cannot exist, so a list that reaches N names boundaries (nvidia/gpt-oss-120b-Eagle3-v3).
    return int(max(layer_ids) != num_layers)


_Rule = Callable[[Sequence[int], int], int]
LAYER_ID_RULES: dict[str, _Rule] = {
    "output": _output_ids,
    "boundary": _boundary_ids,
    "output-iff-first-is-1": _output_ids_iff_first_is_one,
    "boundary-iff-last-is-N": _boundary_ids_iff_last_is_n,
}

# boundary = id + rule(ids, N), for targets without a rule in models/table.py. Source: SGLang 0.5.23
# `set_eagle3_layers_to_capture`, of the model's class or the one it inherits from; a composite model type is listed
# beside its text model's, to which it delegates. Qwen4-Exp inherits it too, and `Qwen4ExpVLModel.forward` returns no
# captured state: SGLang's next line fails.
_OTHER_MODEL_TYPES = {
    "output": """
        apertus bailing_moe bailing_moe_v2 cosmos3_omni internlm3 interns1_pro interns1_pro_text iquestcoder llama
        llama4 llama4_text mellum ministral3 minimax_m2 mistral phi3 qwen2 qwen2_5_vl qwen2_5_vl_text qwen2_moe qwen3
        qwen3_vl qwen3_vl_moe qwen3_vl_moe_text qwen3_vl_text sarvam_moe
    """,
    "output-iff-first-is-1": "deepseek_v2",
    "boundary-iff-last-is-N": "gpt_oss",
}
# How the DSpark stages of these targets name layers; nothing else captures them. V4.1's read the attention's inputs.
_OF_DSPARK = {"deepseek_v4": "output", "deepseek_v41": "boundary"}
# DFlash's ids name outputs for every target but this one, where SGLang takes the ids of some drafters for boundaries.
_OF_SEVERAL_MEANINGS = ("muse_glimmer",)
_MEANINGS = ("output", "boundary")
ENGINES = ("sglang", "vllm", "transformers")
_ALGORITHMS = {"eagle3": "EAGLE-3", "dflash": "DFlash", "dspark": "DSpark"}


def capture_layers(
    model_type: str,
    num_layers: int,
    layer_ids: Sequence[int] | None = None,
    *,
    algorithm: str = "eagle3",
    layer_ids_mean: str | None = None,
) -> list[int]:
    """boundaries = sorted(id + shift for id in layer_ids), where shift depends on the checkpoint's encoding.

    shift 1 for most model types (ids name layer outputs); DeepSeek V2/V3, Kimi K2, GLM-4-MoE-lite: 1 iff the first id
    is 1; gpt-oss: 0 iff max(ids) = N; DFlash and DSpark: 1 for any target, but 0 for DeepSeek V4.1's DSpark stages.
    Without ids: [2, N // 2, N - 3], which are boundaries.

    Args:
        model_type: `model_type` of the target's Hugging Face config (of the whole model or of its text part). The
            default is the same for every target: without layer_ids any name will do.
        num_layers: N, the target's number of decoder layers.
        layer_ids: as the drafter's checkpoint writes them, or None for the default.
        algorithm: "eagle3", "dflash" or "dspark".
        layer_ids_mean: "output" or "boundary" overrides the table; `Eagle3Config.layer_ids_mean` says what the
            drafter's format implies. The default list stays as it is.

    Returns:
        Ascending boundaries: the order in which the target reaches them and `fc` expects them.

    Raises:
        TypeError: `num_layers` or an id is not an int.
        ValueError: an unknown name; a model type whose ids have no single meaning (DFlash and DSpark: "muse_glimmer",
            whose ids SGLang reads by the class of the drafter; DFlash: DeepSeek V4 and V4.1); an empty list,
            duplicates, a boundary outside [0, N], DFlash or DSpark without ids, or a target too shallow for the default
            (N < 7).

    Source: SGLang 0.5.23 `set_eagle3_layers_to_capture`, `set_dflash_layers_to_capture`,
    `set_dspark_layers_to_capture`. vLLM 0.33 reads EAGLE-3 ids of every model as boundaries: pass
    layer_ids_mean="boundary" for a drafter trained against it.
    """
    op = "capture_layers"
    num_layers = checks.check_int(op, "num_layers", num_layers, at_least=1)
    # The default is the same for every target. The table has SGLang's targets alone, and vLLM captures others too.
    is_default = layer_ids is None and layer_ids_mean is None
    if is_default:
        checks.check_type(op, "model_type", model_type, str, "a name")
    rule = _capture_rule(op, model_type, algorithm, "boundary" if is_default else layer_ids_mean)
    if layer_ids is None:
        if algorithm != "eagle3":
            because = f"{_ALGORITHMS[algorithm]} has no default layers"
            raise checks.error(ValueError, op, "layer_ids is None", "a list", because)
        if num_layers < 7:
            because = f"the default [2, N // 2, N - 3] needs N >= 7 layers, and the target has {num_layers}"
            raise checks.error(ValueError, op, "layer_ids is None", "a list", because)
        # SGLang's minimax_m3_vl alone shifts this default by one; vLLM and every other model take it as boundaries.
        layer_ids, rule = [2, num_layers // 2, num_layers - 3], _boundary_ids
    layer_ids = _check_layer_ids(op, "layer_ids", layer_ids)
    if not layer_ids:
        raise checks.error(ValueError, op, "layer_ids is []", "at least one id, or None for the default")
    shift = rule(layer_ids, num_layers)
    boundaries = sorted(layer_id + shift for layer_id in layer_ids)
    got = f"layer_ids is {layer_ids}"
    because = f"with N = {num_layers} layers they mean the boundaries {boundaries}"
    if len(set(boundaries)) < len(boundaries):
        raise checks.error(ValueError, op, got, "distinct ids", because)
    if boundaries[0] < 0 or boundaries[-1] > num_layers:
        raise checks.error(ValueError, op, got, f"boundaries in [0, {num_layers}]", because)
    return boundaries


def _check_layer_ids(op: str, name: str, layer_ids: object) -> list[int]:
    layer_ids = checks.check_sequence(op, name, layer_ids, "a list of ints")
    return [checks.check_int(op, f"{name}[{i}]", layer_id) for i, layer_id in enumerate(layer_ids)]


def _check_meaning(op: str, layer_ids_mean: object) -> None:
    if layer_ids_mean is not None and layer_ids_mean not in _MEANINGS:
        expected = " or ".join(map(repr, _MEANINGS))
        raise checks.error(ValueError, op, f"layer_ids_mean is {layer_ids_mean!r}", f"None, {expected}")


def _capture_rule(op: str, model_type: str, algorithm: str, layer_ids_mean: str | None) -> _Rule:
    if not isinstance(algorithm, str) or algorithm not in _ALGORITHMS:
        raise checks.error(ValueError, op, f"algorithm is {algorithm!r}", " or ".join(map(repr, _ALGORITHMS)))
    _check_meaning(op, layer_ids_mean)
    if layer_ids_mean is not None:
        return LAYER_ID_RULES[layer_ids_mean]
    is_name = isinstance(model_type, str) and model_type != ""
    if algorithm == "dspark" and is_name and model_type in _OF_DSPARK:
        return LAYER_ID_RULES[_OF_DSPARK[model_type]]
    if algorithm != "eagle3":
        if is_name and model_type not in (*_OF_DSPARK, *_OF_SEVERAL_MEANINGS):
            return LAYER_ID_RULES["output"]
        expected = f"a target whose ids have one meaning for {_ALGORITHMS[algorithm]}"
        because = "those of Muse Glimmer depend on the drafter, and DeepSeek-V4 is captured for its DSpark stages alone"
        raise checks.error(ValueError, op, f"model_type is {model_type!r}", expected, f"{because}; pass layer_ids_mean")
    rules = _rule_of_model_type()
    if not is_name or model_type not in rules:
        raise checks.error(
            ValueError,
            op,
            f"model_type is {model_type!r}",
            f"one of {sorted(rules)}",
            "what the ids mean depends on it; for another target pass boundaries and layer_ids_mean='boundary'",
        )
    return LAYER_ID_RULES[rules[model_type]]


def is_captured_by_sglang(model_type: str) -> bool:
    """Whether SGLang is known to capture layers of this target for EAGLE-3."""
    return model_type in _rule_of_model_type()


@functools.cache
def _rule_of_model_type() -> dict[str, str]:
    rules = {model_type: rule for rule, names in _OTHER_MODEL_TYPES.items() for model_type in names.split()}
    of_families = {name: family.layer_ids for family in families().values() for name in family.model_types}
    return rules | {name: rule for name, rule in of_families.items() if rule is not None}


@dataclass(frozen=True)
class Eagle3Config:
    """The input stage of an EAGLE-3 drafter: y = fc(norm(cat of K captured layers)), K*H -> D.

    Args:
        num_chunks: K.
        target_hidden_size: H, the width of one source.
        hidden_size: D, the drafter's width.
        chunk_norm, concat_norm: one RMSNorm per chunk; one over all K*H. With both, concat_norm comes first (SGLang
            0.5.23 `llama_eagle3`).
        norm_offset: the gain of these norms is norm_offset + w. `from_hf` sets 0, as the engines do for every drafter
            whatever its target uses; 1 is for a drafter that was trained with its Gemma target's own norms.
        eps: of every norm of the drafter.
        bias: `fc` has one.
        projection: False where the drafter reads the last hidden state as it is (`use_aux_hidden_state` false).
        norm_output: the drafter feeds its normed output to its next step, not the pre-norm sum.
        norm_before_residual: the first layer's residual is the normed hidden state.
        layer_ids: as the checkpoint writes them, None for the default.
        layer_ids_mean: for `capture_layers`: "boundary" where the config's format implies it, None where the target's
            model type decides.
        vocab_size: rows of the drafter's embedding table.
        draft_vocab_size: rows of the drafter's head; `vocab_size` where the config gives none.
    """

    num_chunks: int
    target_hidden_size: int
    hidden_size: int
    chunk_norm: bool = False
    concat_norm: bool = False
    norm_offset: float = 0.0
    eps: float = 1e-6
    bias: bool = False
    projection: bool = True
    norm_output: bool = False
    norm_before_residual: bool = False
    layer_ids: tuple[int, ...] | None = None
    layer_ids_mean: str | None = None
    vocab_size: int | None = None
    draft_vocab_size: int | None = None

    def __post_init__(self) -> None:
        op = "Eagle3Config"
        checks.check_sizes(op, self, "num_chunks", "target_hidden_size", "hidden_size")
        vocabularies = ("vocab_size", "draft_vocab_size")
        checks.check_sizes(op, self, *(name for name in vocabularies if getattr(self, name) is not None))
        for name in ("chunk_norm", "concat_norm", "bias", "projection", "norm_output", "norm_before_residual"):
            checks.check_bool(op, name, getattr(self, name))
        checks.check_width(op, self.num_chunks, self.target_hidden_size)
        checks.check_width(op, 1, self.hidden_size)
        for name in ("norm_offset", "eps"):  # floats, as `Sources.of_module` takes them
            object.__setattr__(self, name, checks.check_number(op, name, getattr(self, name)))
        checks.check_eps(op, "eps", self.eps)
        checks.check_finite(op, "norm_offset", self.norm_offset)
        _check_meaning(op, self.layer_ids_mean)
        if self.layer_ids is None:
            return
        layer_ids = tuple(_check_layer_ids(op, "layer_ids", self.layer_ids))
        object.__setattr__(self, "layer_ids", layer_ids)
        if len(layer_ids) != self.num_chunks:
            expected = f"{self.num_chunks} ids"
            raise checks.error(ValueError, op, f"layer_ids is {layer_ids}", expected, "num_chunks says so")

    @classmethod
    def from_hf(cls, config: object, *, trained_by: str | None = None) -> "Eagle3Config":
        """Read a drafter's Hugging Face config in the format of SGLang, vLLM, SpecForge or speculators.

        A field may be at the top level, in `eagle_config` or in `transformer_layer_config` (speculators); where it
        appears twice the values must agree. None and an empty id list count as absent.

        K = num_aux_hidden_states (or num_aux_layers), else the length of the layer-id list, else 3; 1 where
        `use_aux_hidden_state` is false; those that are there must agree. chunk_norm = fc_norm or use_aux_norm (its old
        name); concat_norm = norm_before_fc. target_hidden_size defaults to hidden_size, eps to 1e-6 (LlamaConfig's),
        norm_before_residual to True for speculators' eagle3 and else to False. Layer ids of speculators and of
        `eagle_config.layer_ids` are boundaries.

        speculators 0.9 trains with norm_before_fc and norm_output by default and writes both into every config; one
        without them is older than these fields, and its drafter was trained with False.

        Args:
            config: a dict (parsed config.json) or any object with those attributes (`PretrainedConfig`).
            trained_by: "specforge" where SpecForge wrote the config. Its norm_output says only that the head has a
                norm: the state fed back is the pre-norm one in any case (0.2.0 `llama3_eagle`). An engine that reads
                True as its own flag feeds back the normed state, which such a drafter has never seen.

        Raises:
            TypeError: neither a dict nor an object with attributes, or a value of another type than the field's.
            ValueError: `hidden_size` is missing, a field appears twice with different values, sources disagree on K
                (the message names both and their values), or speculators_model_type is not EAGLE-3.

        Source: SGLang 0.5.23 and vLLM 0.33 `llama_eagle3`, vLLM's `speculators/algos.py`; the engines differ in where
        they look (vLLM's two runners too), so each silently takes a default where another reads a value.
        """
        check_config(_FROM_HF, "config", config)
        if trained_by not in (None, "specforge"):
            raise checks.error(ValueError, _FROM_HF, f"trained_by is {trained_by!r}", "None or 'specforge'")
        speculators = get_field(config, "speculators_model_type")
        if speculators not in (None, "eagle3", "peagle"):
            raise checks.error(
                ValueError, _FROM_HF, f"speculators_model_type is {speculators!r}", "'eagle3' or 'peagle'"
            )
        hidden_size = _one(config, "hidden_size")
        if hidden_size is None:
            raise checks.error(ValueError, _FROM_HF, "hidden_size is missing", "the drafter's width")
        layer_ids = _one(config, *_LAYER_IDS)
        vocab_size = _one(config, "vocab_size")
        return cls(
            num_chunks=_num_chunks(config),
            target_hidden_size=_one(config, "target_hidden_size", default=hidden_size),
            hidden_size=hidden_size,
            chunk_norm=_flag(config, "fc_norm") or _flag(config, "use_aux_norm"),
            concat_norm=_flag(config, "norm_before_fc"),
            eps=checks.check_number(_FROM_HF, "rms_norm_eps", _one(config, "rms_norm_eps", default=1e-6)),
            bias=_flag(config, "bias"),
            projection=_flag(config, "use_aux_hidden_state", default=True),
            norm_output=_flag(config, "norm_output") and trained_by != "specforge",
            norm_before_residual=_flag(config, "norm_before_residual", default=speculators == "eagle3"),
            layer_ids=layer_ids,
            layer_ids_mean="boundary" if layer_ids is not None and _ids_are_boundaries(config) else None,
            vocab_size=vocab_size,
            draft_vocab_size=_one(config, "draft_vocab_size", default=vocab_size),
        )


_FROM_HF = "Eagle3Config.from_hf"
_PLACES = ("", "eagle_config", "transformer_layer_config")
# The second is what vLLM's V2 runner reads in `eagle_config`.
_LAYER_IDS = ("eagle_aux_hidden_state_layer_ids", "layer_ids")


def _num_chunks(config: object) -> int:
    """K, from every source that states it, in order of precedence."""
    sources = {f"{name} is {k}": k for name, k in _find(config, "num_aux_hidden_states", "num_aux_layers").items()}
    sources |= {f"{name} is {list(ids)}": len(ids) for name, ids in _find(config, *_LAYER_IDS).items()}
    if not _flag(config, "use_aux_hidden_state", default=True):
        sources["use_aux_hidden_state is False"] = 1
    if not sources:
        return 3
    (first, num_chunks), *others = sources.items()
    for other, k in others:
        if k != num_chunks:
            raise checks.error(ValueError, _FROM_HF, other, f"K = {num_chunks} chunks", first)
    return num_chunks


def _ids_are_boundaries(config: object) -> bool:
    # Speculators trains on vLLM's captures and writes vLLM's ids: [2, N // 2, N - 3] for its default. vLLM's own
    # SpeculatorsConfig drops speculators_model_type, but keeps a model_type of its own.
    if get_field(config, "speculators_model_type") or get_field(config, "model_type") == "speculators":
        return True
    return all(name.endswith(".layer_ids") for name in _find(config, *_LAYER_IDS))


def _one(config: object, *keys: str, default: Any = None) -> Any:
    """The value of a field wherever it is; raises where two places disagree."""
    found = _find(config, *keys)
    if not found:
        return default
    (first, value), *others = found.items()
    for name, other in others:
        if other != value:
            raise checks.error(ValueError, _FROM_HF, f"{name} is {other}", f"{value}", f"{first} says so")
    return value


def _flag(config: object, key: str, default: bool = False) -> bool:
    return checks.check_bool(_FROM_HF, key, _one(config, key, default=default))


def _find(config: object, *keys: str) -> dict[str, Any]:
    """Every place that states one of `keys`, by dotted name; None and an empty list of ids state nothing."""
    found = {}
    for place in _PLACES:
        section = get_field(config, place) if place else config
        if section is None:
            continue
        check_config(_FROM_HF, place, section)
        for key in keys:
            name = f"{place}.{key}" if place else key
            value = get_field(section, key)
            if value is not None and key in _LAYER_IDS:
                value = tuple(_check_layer_ids(_FROM_HF, name, value)) or None
            if value is not None:
                found[name] = value
    return found


def check_config(op: str, name: str, config: object) -> None:
    if not isinstance(config, Mapping) and not hasattr(config, "__dict__"):
        got, expected = f"{name} is a {type(config).__name__}", "a dict or a Hugging Face config object"
        raise checks.error(TypeError, op, got, expected)


def get_field(section: object, key: str) -> Any:
    """A field of a Hugging Face config, which is a dict or an object with attributes; None where it is absent."""
    return section.get(key) if isinstance(section, Mapping) else getattr(section, key, None)


def first_field(key: str, *sections: object) -> Any:
    """A field of the first section that states it."""
    return next((value for section in sections if (value := get_field(section, key)) is not None), None)


def int_field(op: str, key: str, *sections: object, at_least: int = 1) -> int | None:
    """A field as an int; None where no section states it."""
    value = first_field(key, *sections)
    return None if value is None else checks.check_int(op, key, value, at_least=at_least)


def needed_int_field(op: str, key: str, *sections: object, whose: str = "the drafter's", at_least: int = 1) -> int:
    value = int_field(op, key, *sections, at_least=at_least)
    if value is None:
        raise checks.error(ValueError, op, f"{key} is missing", whose)
    return value


def number_field(op: str, key: str, *sections: object, default: float) -> float:
    value = first_field(key, *sections)
    return default if value is None else checks.check_number(op, key, value)


def flag_field(op: str, key: str, *sections: object, default: bool = False) -> bool:
    value = first_field(key, *sections)
    return default if value is None else checks.check_bool(op, key, value)


def check_engine(op: str, engine: object) -> None:
    if engine not in ENGINES:
        raise checks.error(ValueError, op, f"engine is {engine!r}", " or ".join(map(repr, ENGINES)))
