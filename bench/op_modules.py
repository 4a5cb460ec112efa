"""The module of an op: the package exports the function under the same name."""

import importlib
from types import ModuleType


def op_module(op: str) -> ModuleType:
    return importlib.import_module(f"eagle_kernels.ops.{op}")
