"""`doctor`: whether a target and its drafter fit each other, and what each engine makes of the two.

It reads configs and the headers of the safetensors files; it needs no weights and no GPU.
"""

import argparse
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from eagle_kernels.checkpoint import mtp_layers
from eagle_kernels.checks import error
from eagle_kernels.context_kv import SPECULATORS, VARIANTS
from eagle_kernels.models import families, find_family
from eagle_kernels.models.drafters import SGLANG as SERVED_BY_SGLANG
from eagle_kernels.models.drafters import VLLM as SERVED_BY_VLLM
from eagle_kernels.models.family import MTPStage

from ..cli_types import Command
from ..output import define, say, wrap
from . import context_kv, eagle3, mtp
from .methods import look_at_method
from .pair import ENGINE_OF, ENGINES, OP, Pair, read

__all__ = ["DOCTOR", "examine"]

_EAGLE3 = {
    name
    for row in (*SERVED_BY_SGLANG, *SERVED_BY_VLLM)
    if row.title.startswith("EAGLE-3")
    for name in row.architectures
}
# Fields that only an EAGLE-3 drafter has in its config.
_EAGLE3_FIELDS = ("eagle_config", "draft_vocab_size", eagle3.IDS)
# Tensors that only its file has. A target, whose MTP layers are in its own file, has a layers.0.input_layernorm too.
_EAGLE3_TENSORS = re.compile(r"(model\.)?(midlayer\.(input_layernorm|hidden_norm)|layers\.0\.hidden_norm)\.weight")
# Names of projections that no EAGLE-3 drafter has: a file that has one belongs to another kind of drafter.
_PROJECTIONS = {name for family in families().values() if family.mtp for name in family.mtp.projections} - {"fc"}


def examine(target: Path, drafter: Path, trained_by: str | None = None) -> Pair:
    """Read both folders and look for every trap; `trained_by` as in `Eagle3Config.from_hf`.

    Raises ValueError that names a file which is missing or damaged, or a drafter that is not known.
    """
    pair = read(target, drafter)
    stated = pair.drafter.get("architectures")
    if stated is not None and not (isinstance(stated, list) and all(isinstance(name, str) for name in stated)):
        pair.find("config", f"the drafter's architectures is {stated!r}, expected a list of names")
    examination = _examination(pair, trained_by)
    pair.look_at_rotation()
    look_at_method(pair)
    examination(pair)
    return pair


def _examination(pair: Pair, trained_by: str | None) -> Callable[[Pair], None]:
    """What to look for in this kind of drafter."""
    names, speculators = pair.architectures, pair.drafter.get("speculators_model_type")
    of_eagle3 = partial(eagle3.examine, trained_by=trained_by)
    if speculators is not None:
        if speculators in ("eagle3", "peagle"):
            return of_eagle3
        if isinstance(speculators, str) and speculators in SPECULATORS:
            return context_kv.examine_speculators
        known = " or ".join(map(repr, ("eagle3", "peagle", *SPECULATORS)))
        raise error(ValueError, OP, f"the drafter is speculators' {speculators!r}", f"{known} of theirs")
    if not _EAGLE3.isdisjoint(names):
        return of_eagle3
    context = next((name for name in names if name in VARIANTS), None)
    # DeepSeek-V4's own checkpoint: its DSpark stages if dspark_target_layer_ids is set, else its MTP layers below.
    if context is not None and (pair.drafter.get("dspark_target_layer_ids") or not context_kv.is_target(context)):
        return partial(context_kv.examine, architecture=context)
    if any(pair.drafter.get(name) is not None for name in _EAGLE3_FIELDS):
        return of_eagle3
    if any(_EAGLE3_TENSORS.fullmatch(name) for name in pair.headers):
        return of_eagle3
    # A target's MTP layers, or EAGLE-1, where vLLM puts "Eagle" in front of the architecture in the drafter's config.
    for candidates, must_have_stage in ((names, False), (tuple(f"Eagle{name}" for name in names), True)):
        family = find_family(str(pair.drafter.get("model_type")), candidates)
        if family is not None and family.mtp is not None and not (must_have_stage and not _has(pair, family.mtp)):
            config = {**pair.drafter, "architectures": list(candidates)}
            return partial(mtp.examine, family=family, stage=family.mtp, config=config)
    own = sorted(name for name in _PROJECTIONS if any(f".{name}." in f".{stored}" for stored in pair.headers))
    if names or own:
        has = f", and its files have {', '.join(own)}" if own else ""
        got = f"the drafter's architectures are {list(names)}, its model_type {pair.drafter.get('model_type')!r}{has}"
        raise error(ValueError, OP, got, "an EAGLE, MTP, DFlash or DSpark drafter of docs/models.md")
    return of_eagle3


def _has(pair: Pair, stage: MTPStage) -> bool:
    layers = mtp_layers(pair.headers, streams=stage.streams).values()
    return any(stem in stage.projections for stems in layers for stem in stems.values())


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", type=Path, help="folder of the target: its config.json")
    parser.add_argument("drafter", type=Path, help="folder of the drafter: config.json and safetensors files")
    parser.add_argument("--engine", choices=list(ENGINES), help="leave out the facts and the traps of the others")
    parser.add_argument("--trained-by", choices=["specforge"], help="who wrote the drafter's config")
    parser.add_argument("--json", action="store_true", help="the same, or the error, as one JSON object on stdout")


def _run(arguments: argparse.Namespace) -> int:
    try:
        pair = examine(arguments.target, arguments.drafter, arguments.trained_by)
    except ValueError as unreadable:
        if arguments.json:
            say(json.dumps({"error": str(unreadable)}, indent=1))
            return 2
        arguments.parser.error(str(unreadable))
    asked = set(ENGINES.get(arguments.engine, ()))
    findings = [finding for finding in pair.findings if not (asked and finding.engines) or asked & {*finding.engines}]
    facts = {name: fact for name, fact in pair.facts.items() if not (asked and name in ENGINE_OF) or name in asked}
    if arguments.json:
        say(json.dumps({"facts": facts, "findings": [finding._asdict() for finding in findings]}, indent=1))
    else:
        for name, fact in facts.items():
            define(name, str(fact), column=22)
        for finding in findings:
            who = f"{'; '.join(finding.engines)}: " if finding.engines else ""
            say(wrap(f"{finding.trap}: {who}{finding.text}"))
        say(f"findings: {len(findings)}" if findings else "nothing found")
    return 1 if findings else 0


DOCTOR = Command(
    "Whether a target and its drafter fit, and what each engine makes of them; 1 where something does not.",
    _add_arguments,
    _run,
)
