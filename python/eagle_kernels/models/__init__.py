"""What is special about each family of target models, one file each: data, which imports nothing else of the package.

A family is one file here that defines `FAMILIES`, and one test in `tests/models/`.
"""

import functools
import importlib
import pkgutil

from .family import ModelFamily, MTPStage

__all__ = ["ModelFamily", "MTPStage", "families", "find_family"]


@functools.cache
def families() -> dict[str, ModelFamily]:
    """Every family by name."""
    modules = (importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
    return {family.name: family for module in modules for family in getattr(module, "FAMILIES", ())}


def find_family(model_type: str) -> ModelFamily | None:
    """The family of a `model_type`, of a target's or of its MTP drafter's config; None where no family has it."""
    for family in families().values():
        if model_type in family.model_types or (family.mtp and model_type in family.mtp.drafter_types):
            return family
    return None
