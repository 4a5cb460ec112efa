"""What is special about each family of target models and about the input stage of its MTP layers.

Data that imports nothing else of the package: a family is one row of `table.FAMILIES`; docs/models.md shows their MTP
stages.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .family import ModelFamily

__all__ = ["families", "find_family"]


@functools.cache
def families() -> dict[str, ModelFamily]:
    """Every family by name."""
    from .table import FAMILIES  # takes 2 ms, so only on demand

    return {family.name: family for family in FAMILIES}


def find_family(model_type: str, architectures: Collection[str] = ()) -> ModelFamily | None:
    """The family of a config, a target's or its MTP drafter's; None where no family has it.

    By `architectures` where one family alone has one of them (EAGLE drafters have their target's model type, and two
    generations of Bailing share one), else by `model_type`.
    """
    named = [family for family in families().values() if not family.architectures.isdisjoint(architectures)]
    if len(named) == 1:
        return named[0]
    return next((family for family in named or families().values() if model_type in family.config_types), None)
