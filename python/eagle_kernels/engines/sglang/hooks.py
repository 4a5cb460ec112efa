"""Hooks into SGLang's modules, each as soon as SGLang has imported its module and never before.

To hook a class of a module that is not imported yet, SGLang's HookRegistry imports it: 2,260 modules and 3.8 s of CPU
in every process of the engine, also those that run no model. Here a finder in front of sys.meta_path waits for the
module instead, as the package wrapt does in its `when_imported`; wrapt would be the first runtime dependency beside
torch, and swaps the module's loader for a proxy.

A part goes in as a whole. Its targets are looked for when it is registered (a module's file) and when their module is
imported (names, parameters, bodies). If one is not what was recorded, the part's other hooks, including those already
in, call SGLang's own code from then on. SGLang imports all model modules before it builds a model.
"""

import functools
import importlib.abc
import logging
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from ..eligibility import log_once
from ..gates import Target, TargetError
from ..projection import leaving_to

LOGGER = logging.getLogger("sglang.eagle_kernels")
leaving_to_sglang = functools.partial(leaving_to, "SGLang", LOGGER)


@dataclass(frozen=True)
class Hook:
    """kind: what becomes of the target.

    AROUND: function(original, *args).  AFTER: function(result, *args), None keeps the result.  REPLACE:
    function(original) is called once and returns the replacement.  ADD: function is set where the class has no such
    attribute.  KEEP: nothing; the part's other hooks rely on what was recorded of it.
    """

    target: Target
    kind: str = "KEEP"
    function: Any = None


class Part:
    """Hooks that go in together or not at all."""

    def __init__(self, name: str, hooks: Sequence[Hook]) -> None:
        self.name, self.hooks = name, hooks
        self.on = True
        self.waits_for = {hook.target.module for hook in hooks}
        self._added: list[tuple[type, str]] = []

    def check_modules(self, package: types.ModuleType) -> None:
        """Turn the part off where the engine has no such module; imports nothing."""
        for hook in self.hooks:
            if not _exists(hook.target.module, package):
                self.turn_off(f"{hook.target.where} is not there (no module {hook.target.module})")
                return

    def hook(self, module: types.ModuleType, *, imported_before: bool) -> None:
        """Put in the hooks of a module that has just been imported, or was before the plugin was loaded."""
        if not self.on:
            return
        hooks = [hook for hook in self.hooks if hook.target.module == module.__name__]
        try:
            found = [_find(hook) for hook in hooks]
            for hook, (owner, name, original) in zip(hooks, found, strict=True):
                if hook.kind == "KEEP":
                    continue
                replacement = self._replacement(hook, original)
                is_static = isinstance(vars(owner).get(name), staticmethod)
                setattr(owner, name, staticmethod(replacement) if is_static else replacement)
                if hook.kind == "ADD":
                    self._added.append((owner, name))
                elif imported_before and owner is module:
                    _rebind(original, replacement)
        except Exception as failure:  # the engine is in the middle of an import
            self.turn_off(str(failure) if isinstance(failure, TargetError) else repr(failure))
            return
        self._hooked(module.__name__)

    def leave_out(self, module: str) -> None:
        """SGLang itself cannot import the module, and so serves no model of it."""
        log_once(LOGGER, logging.INFO, f"{self.name}: SGLang fails to import {module}, nothing is hooked there")
        self._hooked(module)

    def _hooked(self, module: str) -> None:
        self.waits_for.discard(module)
        if self.on and not self.waits_for:
            log_once(LOGGER, logging.INFO, f"hooks of {self.name} are active")

    def turn_off(self, reason: str) -> None:
        self.on = False
        for owner, name in self._added:
            delattr(owner, name)
        log_once(LOGGER, logging.WARNING, f"{self.name} is off, SGLang runs its own code: {reason}")

    def _replacement(self, hook: Hook, original: Any) -> Any:
        if hook.kind == "ADD":
            return hook.function
        if hook.kind == "REPLACE":
            return hook.function(original)

        @functools.wraps(original)
        def around(*args: object, **kwargs: object) -> object:
            return hook.function(original, *args, **kwargs) if self.on else original(*args, **kwargs)

        @functools.wraps(original)
        def after(*args: object, **kwargs: object) -> object:
            result, changed = original(*args, **kwargs), None
            with leaving_to_sglang(hook.target.where):
                changed = hook.function(result, *args, **kwargs) if self.on else None
            return result if changed is None else changed

        return around if hook.kind == "AROUND" else after


def hook_all(parts: Mapping[str, Sequence[Hook]]) -> None:
    """Hook each part whose modules are there; a module that SGLang has not imported yet is hooked when it does."""
    import sglang

    new = [Part(name, hooks) for name, hooks in parts.items() if name not in _parts]
    for part in new:
        _parts[part.name] = part
        part.check_modules(sglang)
    for name in dict.fromkeys(hook.target.module for part in new for hook in part.hooks):
        users = [part for part in new if part.on and name in part.waits_for]
        if (module := sys.modules.get(name)) is not None:
            for part in users:
                part.hook(module, imported_before=True)
        elif users:
            _FINDER.waiting[name] = users
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself: it has the module's own loader call the parts that wait for it."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Part]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.waiting:
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            with leaving_to_sglang(name):
                self._call_parts_after(spec.loader)
        return spec

    def _call_parts_after(self, loader: Any) -> None:
        """Patches the loader of this one import: its class, and what reads resources by it, stay as they are."""
        exec_module = loader.exec_module

        def exec_and_hook(module: types.ModuleType) -> None:
            del loader.exec_module
            try:
                exec_module(module)
            except Exception:
                for part in self.waiting.get(module.__name__, ()):
                    part.leave_out(module.__name__)
                raise
            for part in self.waiting.pop(module.__name__, ()):
                part.hook(module, imported_before=False)

        loader.exec_module = exec_and_hook


_FINDER = _Finder()
_parts: dict[str, Part] = {}


def _exists(module: str, package: types.ModuleType) -> bool:
    """Whether a module of the package can be found; unlike importlib.util.find_spec, imports none of its parents."""
    if module in sys.modules:
        return True
    folders = module.split(".")[1:-1]
    return PathFinder.find_spec(module, [str(Path(path, *folders)) for path in package.__path__]) is not None


def _find(hook: Hook) -> tuple[Any, str, Any]:
    if hook.kind != "ADD":
        return hook.target.find()
    where, _, name = hook.target.where.rpartition(".")
    owner = Target(where).find()[2]
    if hasattr(owner, name):
        raise TargetError(f"{hook.target.where} exists, and was to be added")
    return owner, name, None


def _rebind(original: object, replacement: object) -> None:
    """Put the replacement also into the modules that imported the original by name."""
    for module in list(sys.modules.values()):
        if isinstance(module, types.ModuleType):
            for name, value in list(vars(module).items()):
                if value is original:
                    setattr(module, name, replacement)
