"""Whether each engine's registry has a drafter, by the name that the engine makes of the config's architecture."""

from collections.abc import Callable, Collection, Sequence

from eagle_kernels.models.drafters import SGLANG, VLLM

from .pair import ENGINES, Pair

_ROWS = {"sglang": SGLANG, "vllm": VLLM}


def look_at_registries(
    pair: Pair,
    architectures: Sequence[str],
    kind: str = "",
    in_vllm: Callable[[str], str] = str,
    engines: Collection[str] = tuple(ENGINES),
) -> None:
    """Report engines that have none of these; SGLang then loads a target of that name, or transformers' model.

    Args:
        kind: how the titles of the drafters' rows begin, "EAGLE-3": a drafter of another kind is none.
        in_vllm: what vLLM makes of a name.
        engines: those to ask.

    Source: SGLang 0.5.23 `models/registry` (`_normalize_archs`), whose `_config_draft_model` renames no EAGLE drafter.
    """
    for engine in engines:
        asked = [in_vllm(name) if engine == "vllm" else name for name in architectures]
        served = {name for row in _ROWS[engine] if row.title.startswith(kind) for name in row.architectures}
        if asked and served.isdisjoint(asked):
            pair.find("unserved", f"has no {' and no '.join(asked)}", *ENGINES[engine])


def eagle3_in_vllm(name: str) -> str:
    """Source: vLLM 0.33 `transformers_utils/configs/eagle.py`."""
    return name if name.startswith("Eagle3") or name.endswith("Eagle3") else f"Eagle3{name}"


def eagle_in_vllm(name: str) -> str:
    """Source: the same."""
    return name if name.startswith("Eagle") else f"Eagle{name}"
