"""The norms of transformers' models, with which the rows of `models/table.py` are compared."""

import importlib
import inspect

import pytest


def norm_of(model_type: str) -> type:
    """The RMSNorm of a model's layers; skips the test where transformers has no such model."""
    auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    if model_type not in auto.CONFIG_MAPPING:
        pytest.skip("transformers has no such model")
    package = auto.model_type_to_module_name(model_type)
    module = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    names = [name for name in vars(module) if name.endswith("RMSNorm") and "Unweighted" not in name]
    return next(value for name in names if inspect.isclass(value := getattr(module, name)))
