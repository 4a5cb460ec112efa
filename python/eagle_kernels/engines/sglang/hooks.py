"""Hooks into SGLang by its HookRegistry, checked before they are registered and after they are applied.

The registry applies hooks after every plugin has run and only logs a traceback where that fails: it neither says which
part of a plugin is now missing nor leaves the rest of the part alone.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..eligibility import TargetError, find_target, log_once

LOGGER = logging.getLogger("sglang.eagle_kernels")


@dataclass(frozen=True)
class Hook:
    """target: "package.module:Class.attribute".  parameters: as in `find_target`.

    kind: of the registry's HookType. AROUND: function(original, *args). AFTER: function(result, *args), None keeps the
    result. REPLACE: function(original) is called once and returns the replacement. ADD, which the registry does not
    know: function is set where the class has no such attribute.
    """

    target: str
    kind: str
    function: Callable
    parameters: Sequence[object] | None = None


_registered: list[str] = []


def hook_all(parts: Mapping[str, Sequence[Hook]]) -> None:
    """Register each part whose targets are all there; report the others, and what the registry then fails to apply."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    originals = {}
    for part, hooks in parts.items():
        if part in _registered or (found := _find(part, hooks)) is None:
            continue
        _registered.append(part)
        for hook, (owner, name, value) in zip(hooks, found, strict=True):
            if hook.kind == "ADD":
                setattr(owner, name, hook.function)
                continue
            function = hook.function(value) if hook.kind == "REPLACE" else hook.function
            HookRegistry.register(hook.target.replace(":", "."), function, HookType[hook.kind])
            originals[hook.target] = (part, value)
    if originals:
        _report_after_apply(HookRegistry, originals)


def _find(part: str, hooks: Sequence[Hook]) -> list[tuple[Any, str, Any]] | None:
    found: list[tuple[Any, str, Any]] = []
    try:
        for hook in hooks:
            if hook.kind == "ADD":
                target, _, name = hook.target.rpartition(".")
                owner = find_target(target)[2]
                if hasattr(owner, name):
                    raise TargetError(f"{hook.target} exists, and was to be added")
                found.append((owner, name, None))
            else:
                found.append(find_target(hook.target, hook.parameters))
    except Exception as failure:  # a model's module may fail to import in any way
        reason = failure if isinstance(failure, TargetError) else f"{hook.target} is not there ({failure!r})"
        log_once(LOGGER, logging.WARNING, f"{part} is off, SGLang runs its own code: {reason}")
        return None
    return found


def _report_after_apply(registry: Any, originals: dict[str, tuple[str, object]]) -> None:
    """Wrap the registry's next apply_hooks: it returns nothing and raises nothing, whatever it did."""
    apply_hooks = vars(registry)["apply_hooks"]

    def apply_and_report() -> None:
        registry.apply_hooks = apply_hooks
        registry.apply_hooks()
        for target, (part, original) in originals.items():
            if not _replaced(target, original):
                log_once(LOGGER, logging.WARNING, f"{part} is not whole: SGLang did not apply the hook on {target}")
        parts = sorted({part for part, _ in originals.values()})
        log_once(LOGGER, logging.INFO, f"hooks of {', '.join(parts)} are active")

    registry.apply_hooks = staticmethod(apply_and_report)


def _replaced(target: str, original: object) -> bool:
    try:
        return find_target(target)[2] is not original
    except TargetError:
        return False
