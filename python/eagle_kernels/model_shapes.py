"""Shapes of real targets and of their drafters' input stages: benchmark presets and test cases.

They are in `shapes.json`, except for norm_offset where the target has a row in `models/table.py`, which states it.
"""

import functools
import importlib.resources
import json
from dataclasses import dataclass

from . import checks
from .models import families


@dataclass(frozen=True)
class ContextCache:
    """What a draft layer of DFlash or DSpark keeps of each context token, as in `ContextKVConfig`."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    values: str = "own"
    rotary_begin: int = 0
    interleaved: bool = False

    @property
    def kv_width(self) -> int:
        """W, the columns of one layer's projection."""
        return self.num_kv_heads * self.head_dim * (2 if self.values == "own" else 1)


@dataclass(frozen=True)
class InputStage:
    """One input stage: K chunks of width H, RMSNorm with gain norm_offset + w, projected to width D.

    kind: "eagle3" (and its variants "eagle3_narrow", "eagle3_v3"), "first_layer_qkv", "dflash", "dspark", "mtp" or
        "context_kv" (K and V of all layers of a DFlash or DSpark drafter, from the result of "dflash" or "dspark").
    norm: "chunk", "concat" or "none", as in `norm_concat_linear`; post_norm: an RMSNorm of the result follows (DFlash).
    layer_ids: as the checkpoint writes them; boundaries: what they mean. None where not known.
    streams: residual streams of the target (mHC), whose mean is captured; an MTP stage projects each of them, after a
        norm over hnorm_over, "stream" or "row" (all of them), as in `MTPStreamsConfig`.
    context: set for kind "context_kv" alone.
    """

    kind: str
    K: int
    H: int
    D: int
    eps: float
    norm_offset: float
    norm: str
    post_norm: bool
    layer_ids: tuple[int, ...] | None
    boundaries: tuple[int, ...] | None
    streams: int = 1
    hnorm_over: str = "stream"
    context: ContextCache | None = None

    @property
    def projects_streams(self) -> bool:
        return self.kind == "mtp" and self.streams > 1


@dataclass(frozen=True)
class ModelShape:
    """A target and the input stages of its drafters. eps and norm_offset are those of the target's own norms.

    certain: False where the facts do not come from the model's own config. num_layers: None where not known.
    """

    name: str
    target_hidden_size: int
    num_layers: int | None
    vocab_size: int
    eps: float
    norm_offset: float
    certain: bool
    stages: tuple[InputStage, ...]

    def stage(self, kind: str) -> InputStage:
        """The stage of this kind; ValueError names those there are."""
        for stage in self.stages:
            if stage.kind == kind:
                return stage
        raise checks.error(
            ValueError, "ModelShape.stage", f"kind is {kind!r}", f"one of {[stage.kind for stage in self.stages]}"
        )


@functools.cache
def model_shapes() -> dict[str, ModelShape]:
    """Every preset by name."""
    text = importlib.resources.files(__package__).joinpath("shapes.json").read_text(encoding="utf-8")
    return {model["name"]: _model_shape(model) for model in json.loads(text)["models"]}


def _model_shape(model: dict) -> ModelShape:
    if "family" in model:
        model = model | {"norm_offset": families()[model["family"]].norm_offset}
    entries = {kind: model[kind] for kind in model if kind.startswith(("mtp", "eagle3", "dflash", "dspark"))}
    stages = [_input_stage(kind, entry, model) for kind, entry in entries.items()]
    for entry in entries.values():
        if "first_layer_qkv" in entry:
            stages.append(_first_layer_stage(entry, model))
        if "context_kv" in entry:
            stages.append(_context_stage(entry, model))
    return ModelShape(
        name=model["name"],
        target_hidden_size=model["target_hidden_size"],
        num_layers=model["num_layers"],
        vocab_size=model["vocab_size"],
        eps=model["rms_norm_eps"],
        norm_offset=model["norm_offset"],
        certain=model.get("certain", True),
        stages=tuple(stages),
    )


def _input_stage(kind: str, entry: dict, model: dict) -> InputStage:
    chunk_norm = kind == "mtp" or entry.get("fc_norm", False)
    concat_norm = entry.get("norm_before_fc", False)
    row = families()[model["family"]].mtp if kind == "mtp" and "family" in model else None
    return InputStage(
        kind=kind,
        K=entry["num_chunks"],
        H=model["target_hidden_size"],
        D=entry.get("draft_hidden_size", model["target_hidden_size"]),
        eps=model["rms_norm_eps"],
        # EAGLE-3 and DFlash drafters have plain norms even for a (1 + w) target; MTP layers are the target's own.
        norm_offset=model["norm_offset"] if kind == "mtp" else 0.0,
        norm="chunk" if chunk_norm else "concat" if concat_norm else "none",
        post_norm=kind in ("dflash", "dspark"),
        layer_ids=_ids(entry, "layer_ids"),
        boundaries=_ids(entry, "boundaries"),
        streams=model.get("streams", 1),
        hnorm_over="stream" if row is None else row.hnorm_over,
    )


def _context_stage(entry: dict, model: dict) -> InputStage:
    """K and V of all draft layers. hidden_norm belongs to the stage before, as in SGLang."""
    context = ContextCache(**entry["context_kv"])
    return InputStage(
        kind="context_kv",
        K=1,
        H=entry.get("draft_hidden_size", model["target_hidden_size"]),
        D=context.num_layers * context.kv_width,
        eps=model["rms_norm_eps"],
        norm_offset=0.0,
        norm="none",
        post_norm=False,
        layer_ids=None,
        boundaries=None,
        context=context,
    )


def _first_layer_stage(entry: dict, model: dict) -> InputStage:
    """qkv_proj over the normed embedding and the normed projection: K = 2 sources of the draft width."""
    return InputStage(
        kind="first_layer_qkv",
        K=entry["first_layer_qkv"]["num_chunks"],
        H=entry["draft_hidden_size"],
        D=entry["first_layer_qkv"]["out"],
        eps=model["rms_norm_eps"],
        norm_offset=0.0,
        norm="chunk",
        post_norm=False,
        layer_ids=None,
        boundaries=None,
    )


def _ids(entry: dict, key: str) -> tuple[int, ...] | None:
    return tuple(entry[key]) if key in entry else None
