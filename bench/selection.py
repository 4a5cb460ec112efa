"""Which input stages a command runs on: presets by name, or a shape spelled out."""

import argparse

from eagle_kernels.model_shapes import InputStage, model_shapes

from . import choices

# What an explicit shape is called in tables and files.
EXPLICIT = "explicit"
_EXPLICIT_VOCABULARY = 128256
_DEFAULT = "llama3.1-8b"

Stage = tuple[str, InputStage, int]  # preset, stage, V


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--preset, and --chunks --hidden --out for a shape that no preset has."""
    add = parser.add_argument
    names = "NAME, NAME:STAGE such as deepseek-v3:mtp, all, or distinct: one of each shape (see `list`)"
    add("--preset", type=_presets, nargs="+", metavar="PRESET", help=f"{names}; default {_DEFAULT}")
    add("--chunks", type=choices.number(1), metavar="K", help="an explicit shape: sources")
    add("--hidden", type=choices.number(1), metavar="H", help="an explicit shape: width of a source")
    add("--out", type=choices.number(1), metavar="D", help="an explicit shape: output width")
    add("--vocab", type=choices.number(1), metavar="V", help=f"of an explicit shape (default {_EXPLICIT_VOCABULARY})")


def stages(arguments: argparse.Namespace) -> list[Stage]:
    """The selected stages in the order given; a usage error where an explicit shape is not complete."""
    sizes = {"--chunks": arguments.chunks, "--hidden": arguments.hidden, "--out": arguments.out}
    missing = [name for name, size in sizes.items() if size is None]
    chosen = [stage for group in arguments.preset or [] for stage in group]
    if not missing:
        # EAGLE-3's block: a norm per chunk, no offset; --norm says otherwise where a command has it.
        stage = InputStage("eagle3", *sizes.values(), 1e-6, 0.0, "none", False, None, None)
        chosen.append((EXPLICIT, stage, arguments.vocab or _EXPLICIT_VOCABULARY))
    elif len(missing) < len(sizes):
        arguments.parser.error(f"an explicit shape is --chunks K --hidden H --out D; {', '.join(missing)} is missing")
    elif arguments.vocab is not None:
        arguments.parser.error("--vocab belongs to an explicit shape: --chunks K --hidden H --out D")
    return chosen or _presets(_DEFAULT)


def norm_of(stage: InputStage) -> str:
    """The checkpoint's norm; EAGLE-3 stages without one get the chunk norm (`fc_norm`), which newer ones have."""
    return "chunk" if stage.kind.startswith("eagle3") and stage.norm == "none" else stage.norm


def _presets(text: str) -> list[Stage]:
    """An argparse type: a model and one of its input stages, EAGLE-3 where it has several and none is named."""
    if text in ("all", "distinct"):
        every = [(name, stage, model.vocab_size) for name, model in model_shapes().items() for stage in model.stages]
        if text == "all":
            return every
        # With the post norm, which changes what runs; without names, eps and layer ids.
        keys = [(norm_of(s), s.K, s.H, s.D, s.norm_offset, s.post_norm) for _, s, _ in every]
        return [stage for number, stage in enumerate(every) if keys.index(keys[number]) == number]
    name, _, kind = text.partition(":")
    if name not in model_shapes():
        known = ", ".join(["all", "distinct", *model_shapes()])
        raise argparse.ArgumentTypeError(f"preset {name!r} is unknown, known are: {known}")
    model = model_shapes()[name]
    kinds = {stage.kind: stage for stage in model.stages}
    if kind and kind not in kinds:
        raise argparse.ArgumentTypeError(f"{name} has no stage {kind!r}, it has: {', '.join(kinds)}")
    stage = kinds[kind] if kind else kinds.get("eagle3") or next(iter(kinds.values()))
    return [(name, stage, model.vocab_size)]
