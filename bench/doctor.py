"""`doctor`: whether a target and its EAGLE-3 drafter fit each other, and what each engine makes of the two.

Configs and the headers of the safetensors files are read, no weight and no GPU. What an engine reads where is of SGLang
0.5.23 (`llama_eagle3`, `spec_aux_hidden_state`) and vLLM 0.33 (`llama_eagle3`, `gpu_model_runner`, `eagle3_utils`),
whose two runners differ.
"""

import argparse
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from eagle_kernels import Eagle3Config, capture_layers
from eagle_kernels.checkpoint import norms_before_fc, open_files
from eagle_kernels.drafter_config import get_field
from eagle_kernels.quantization_config import config_of

from .cli_types import Command
from .output import define, say, wrap

OP = "doctor"
_IDS = "eagle_aux_hidden_state_layer_ids"
_DENSE = ("BF16", "F16", "F32")


SGLANG, VLLM_V1, VLLM_V2 = "SGLang 0.5.23", "vLLM 0.33, V1 runner", "vLLM 0.33, V2 runner"
_ENGINES = {"sglang": (SGLANG,), "vllm": (VLLM_V1, VLLM_V2)}


class Finding(NamedTuple):
    trap: str  # a short name, stable, for scripts
    engines: tuple[str, ...]  # that fall into it; all of them where it is empty
    text: str


class Header(NamedTuple):
    """Of one tensor in a safetensors file."""

    shape: tuple[int, ...]
    dtype: str  # as the format spells it: BF16, F8_E4M3


@dataclass
class Pair:
    """A target and its drafter, as far as they could be read, and what was found of them."""

    target: Mapping[str, Any]
    drafter: Mapping[str, Any]
    headers: dict[str, Header]  # by the drafter's names without `model.`
    quantization: Mapping[str, Any] | None
    facts: dict[str, object] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    config: Eagle3Config | None = None

    def find(self, trap: str, text: str, *engines: str) -> None:
        self.findings.append(Finding(trap, engines, text))

    @property
    def text(self) -> Mapping[str, Any]:
        """The target's text part."""
        nested = self.target.get("text_config")
        return nested if isinstance(nested, Mapping) else self.target

    @property
    def model_type(self) -> str:
        return str(self.target.get("model_type", self.text.get("model_type")))


def examine(target: Path, drafter: Path, trained_by: str | None = None) -> Pair:
    """Read both folders and look for every trap; `trained_by` as in `Eagle3Config.from_hf`.

    Raises ValueError that names a file which is missing or damaged.
    """
    pair = Pair(_config(target), _config(drafter), _headers(drafter), config_of(OP, drafter))
    try:
        pair.config = Eagle3Config.from_hf(pair.drafter, trained_by=trained_by)
    except (TypeError, ValueError) as wrong:
        pair.find("config", str(wrong))
        return pair
    for look in (
        _look_at_layers,
        _look_at_widths,
        _look_at_norms,
        _look_at_flags,
        _look_at_vocabulary,
        _look_at_quantization,
    ):
        look(pair, pair.config)
    return pair


def _headers(folder: Path) -> dict[str, Header]:
    headers = {}
    for file in open_files(OP, folder):
        names = file.keys()
        for name in names:
            tensor = file.get_slice(name)
            headers[name.removeprefix("model.")] = Header(tuple(tensor.get_shape()), tensor.get_dtype())
    return headers


def _config(folder: Path) -> Mapping[str, Any]:
    file = folder / "config.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{OP}: {file} is missing, expected a model's folder") from None
    except (ValueError, RecursionError) as failure:
        raise ValueError(f"{OP}: {file} is damaged, expected JSON, because {failure}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{OP}: {file} is a {type(content).__name__}, expected an object")
    return content


def _engines(drafter: Mapping[str, Any]) -> dict[str, tuple[list[int] | None, bool, int]]:
    """(layer ids, whether they are boundaries, K of fc) as each engine reads them out of the drafter's config."""
    nested = get_field(drafter, "eagle_config") or {}
    nested_ids, top_ids = nested.get(_IDS), drafter.get(_IDS)
    stated = drafter.get("num_aux_hidden_states") or len(nested_ids or ()) or 3
    return {
        SGLANG: (nested_ids, False, stated),
        VLLM_V1: (top_ids or nested_ids, True, stated),
        VLLM_V2: (top_ids or nested.get("layer_ids"), True, stated),
    }


def _look_at_layers(pair: Pair, config: Eagle3Config) -> None:
    layers = pair.text.get("num_hidden_layers")
    if not isinstance(layers, int):
        return pair.find("layers", f"the target's config has no num_hidden_layers: got {layers!r}")
    try:
        meant = capture_layers(pair.model_type, layers, config.layer_ids, layer_ids_mean=config.layer_ids_mean)
    except (TypeError, ValueError) as wrong:
        return pair.find("layers", str(wrong))
    pair.facts["K"] = config.num_chunks
    pair.facts["boundaries"] = meant
    for engine, (ids, are_boundaries, stated) in _engines(pair.drafter).items():
        try:
            captured = capture_layers(
                pair.model_type, layers, ids, layer_ids_mean="boundary" if are_boundaries else None
            )
        except (TypeError, ValueError) as wrong:
            pair.find("engine-layers", f"{engine}: {wrong}")
            continue
        pair.facts[engine] = f"captures {captured}, fc for K = {stated}"
        if captured != meant:
            pair.find("engine-layers", f"captures the boundaries {captured}, and the config means {meant}", engine)
        if stated != config.num_chunks:
            text = f"builds fc for K = {stated}, and the config means K = {config.num_chunks} (vllm#54526)"
            pair.find("engine-chunks", text, engine)
    if pair.model_type.startswith("gemma3"):
        text = "captures Gemma 3 without its residual (sglang#39286) unless this package's plugin runs"
        pair.find("gemma3-residual", text, SGLANG)


def _look_at_widths(pair: Pair, config: Eagle3Config) -> None:
    H, D, K = config.target_hidden_size, config.hidden_size, config.num_chunks
    pair.facts["H"], pair.facts["D"] = H, D
    if (width := pair.text.get("hidden_size")) != H:
        pair.find("hidden-size", f"the target's hidden_size is {width}, and the drafter's target_hidden_size {H}")
    if not config.projection:
        return
    if K * H == D:
        text = f"K*H = {K * H} is the drafter's own width: fc is skipped, since widths are compared"
        pair.find("fc-skipped", text, SGLANG)
    weight = _weight_of_fc(pair)
    if weight is None:
        return pair.find("fc", "the drafter has no fc.weight")
    columns = weight.shape[1] * (2 if weight.dtype in ("U8", "F4") else 1) if len(weight.shape) == 2 else 0
    words = math.prod(weight.shape) if weight.dtype == "I32" else 0  # of 8 or 4 codes, rows or columns first
    if (weight.shape[0], columns) != (D, K * H) and D * K * H not in (8 * words, 4 * words):
        pair.find("fc", f"fc.weight is {list(weight.shape)} of {weight.dtype}, expected (D, K*H) = {[D, K * H]}")
    if ("fc.bias" in pair.headers) != config.bias:
        stored = "there" if "fc.bias" in pair.headers else "missing"
        pair.find("fc-bias", f"fc.bias is {stored}, and the config's bias is {config.bias}")


def _look_at_norms(pair: Pair, config: Eagle3Config) -> None:
    found = norms_before_fc(pair.headers)
    wanted = [f"fc_norm.{k}.weight" for k in range(config.num_chunks)] if config.chunk_norm else []
    wanted += ["input_norm.weight"] if config.concat_norm else []
    pair.facts["norms in front of fc"] = found or "none"
    if found != sorted(wanted):
        text = f"the file has {found or 'no norms in front of fc'}, and the config means {wanted or 'none'}"
        pair.find("norms", f"{text}: an engine that skips one loses acceptance, and says nothing")


def _look_at_flags(pair: Pair, config: Eagle3Config) -> None:
    meant = {name: getattr(config, name) for name in _FLAGS}
    pair.facts["trained with"] = ", ".join(name for name in _FLAGS if meant[name]) or "the plain stage"
    for engine, read in _flags(pair.drafter).items():
        if read is None:
            pair.find("format", "does not know the format of speculators", engine)
            continue
        for name in _FLAGS:
            if read[name] != meant[name]:
                text = f"takes {name} for {read[name]}, and the drafter was trained with {meant[name]}: {_FLAGS[name]}"
                pair.find("engine-flags", text, engine)


# The fields of Eagle3Config that an engine may read otherwise, and what hangs on each.
_FLAGS = {
    "chunk_norm": "its fc reads other sizes",
    "concat_norm": "its fc reads other sizes",
    "bias": "fc.bias is left out",
    "norm_before_residual": "layer 0 adds another residual",
    "norm_output": "from its second step on it reads another state",
}
_MLA = ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM")


def _flags(drafter: Mapping[str, Any]) -> dict[str, dict[str, bool] | None]:
    """`_FLAGS` as each engine reads them out of the drafter's config; None where it reads no such config."""
    nested = get_field(drafter, "eagle_config") or {}
    is_mla = any(name in _MLA for name in drafter.get("architectures") or ())
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
    pair.facts["vocabulary"] = f"target {target}, drafter {own}, drafted {drafted}"
    if own is not None and target is not None and own != target:
        pair.find("vocabulary", f"the target has {target} token ids, and the drafter's table {own} rows")
    d2t, head = pair.headers.get("d2t"), pair.headers.get("lm_head.weight")
    is_short = None not in (drafted, target) and drafted != target
    if is_short and d2t is None:
        pair.find(
            "d2t", f"{drafted} of {target} ids are drafted, and the file has no d2t: every draft means another token"
        )
    if d2t is not None and drafted is not None and d2t.shape != (drafted,):
        pair.find("d2t", f"d2t has {list(d2t.shape)} entries, and draft_vocab_size is {drafted}")
    if head is not None and drafted is not None and head.shape[0] != drafted:
        pair.find("draft-head", f"lm_head.weight has {head.shape[0]} rows, and draft_vocab_size is {drafted}")
    if is_short and head is None:
        pair.find("draft-head", f"{drafted} ids are drafted, and the file has no lm_head.weight for them")


def _weight_of_fc(pair: Pair) -> Header | None:
    names = ("fc.weight", "fc.weight_packed", "fc.qweight")
    return next((pair.headers[name] for name in names if name in pair.headers), None)


def _look_at_quantization(pair: Pair, config: Eagle3Config) -> None:
    fc = {name.removeprefix("fc."): header for name, header in pair.headers.items() if name.startswith("fc.")}
    codes = _weight_of_fc(pair)
    if codes is None or codes.dtype in _DENSE:
        pair.facts["fc"] = "none" if codes is None else codes.dtype
        return
    scales = [name for name in fc if "scale" in name and "input" not in name and "act" not in name]
    pair.facts["fc"] = f"{codes.dtype} with {', '.join(scales) or 'no scale'}"
    if not scales:
        pair.find("fc-scale", f"fc holds codes ({codes.dtype}) without a scale beside them")
    without = "without this package's plugin"
    text = f"holds fc in a plain nn.Linear, skips its scales: codes are taken for numbers (sglang#39087) {without}"
    pair.find("fc-quantized", text, SGLANG)
    if pair.quantization is None:
        text = f"quantizes fc as the drafter's quantization_config says, and there is none: it fails to load {without}"
        pair.find("fc-quantized", text, VLLM_V1, VLLM_V2)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", type=Path, help="folder of the target: its config.json")
    parser.add_argument("drafter", type=Path, help="folder of the EAGLE-3 drafter: config.json and safetensors files")
    parser.add_argument("--engine", choices=list(_ENGINES), help="leave out what only the others fall into")
    parser.add_argument("--trained-by", choices=["specforge", "speculators"], help="who wrote the drafter's config")
    parser.add_argument("--json", action="store_true", help="the same as one JSON object on standard output")


def _run(arguments: argparse.Namespace) -> int:
    try:
        pair = examine(arguments.target, arguments.drafter, arguments.trained_by)
    except ValueError as unreadable:
        arguments.parser.error(str(unreadable))
    asked = set(_ENGINES.get(arguments.engine, ()))
    findings = [finding for finding in pair.findings if not (asked and finding.engines) or asked & {*finding.engines}]
    if arguments.json:
        say(json.dumps({"facts": pair.facts, "findings": [finding._asdict() for finding in findings]}, indent=1))
    else:
        for name, fact in pair.facts.items():
            define(name, str(fact), column=22)
        for finding in findings:
            who = f"{'; '.join(finding.engines)}: " if finding.engines else ""
            say(wrap(f"{finding.trap}: {who}{finding.text}"))
        say(f"findings: {len(findings)}" if findings else "nothing found")
    return 1 if findings else 0


DOCTOR = Command(
    "Whether a target and its EAGLE-3 drafter fit, and what each engine makes of them; 1 where something does not.",
    _add_arguments,
    _run,
)
