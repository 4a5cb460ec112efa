"""The weights of a drafter's input stage out of a checkpoint, under the names that engines and trainers write."""

from __future__ import annotations

import os
from collections.abc import Mapping

from torch import Tensor, nn

_LEGACY_NORMS = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}


def eagle3_projection(weights: str | os.PathLike | Mapping[str, Tensor], layer: nn.Module) -> dict[str, Tensor]:
    """The state_dict of an Eagle3Projection."""
    names = set(layer.state_dict())
    found = {}
    for name, tensor in dict(weights).items():
        stem, _, parameter = name.removeprefix("model.").rpartition(".")
        canonical = f"{_LEGACY_NORMS.get(stem, stem)}.{parameter}"
        if canonical in names:
            found[canonical] = tensor
    return found


def mtp_projection(
    weights: str | os.PathLike | Mapping[str, Tensor], layer: nn.Module, number: int | None
) -> dict[str, Tensor]:
    """The state_dict of an MTPProjection."""
    prefix = "" if number is None else f"layers.{number}."
    return {
        stem: tensor
        for stem in layer.state_dict()
        for name, tensor in dict(weights).items()
        if name.endswith(prefix + stem)
    }
