"""Runs first in every process of the engine: a torchvision that only imports.

SGLang imports torchvision for image processors that a text model never calls, and its CPU build for a given torch is
not on PyPI.
"""

import importlib.abc
import importlib.machinery
import sys
import types


class _AnyName(type):
    def __getattr__(cls, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Empty(f"{cls.__name__}.{name}")


class _Empty(types.ModuleType):
    """A module, class or function that has every attribute and does nothing."""

    __path__: tuple[str, ...] = ()
    __version__ = "0.0.0"  # transformers parses it

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _AnyName(name, (), {}) if name[:1].isupper() else _Empty(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value

    def __call__(self, *args: object, **kwargs: object) -> object:
        return args[0] if args else self


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        if name.partition(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.append(_Finder())
