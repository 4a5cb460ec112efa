"""The projections of the MTP families, and the classes that the source of an engine's model builds them from."""

import ast

import pytest

from eagle_kernels.models import families

# Projections whose name in the checkpoint is not the module's attribute.
_ATTRIBUTES = {"eagle_linear": "fc"}


def mtp_stages(engine: str) -> list:
    """(stage, architecture) of each class that the engine serves, as a test's parameters."""
    return [
        pytest.param(family.mtp, architecture, id=f"{name}-{architecture}")
        for name, family in families().items()
        if family.mtp is not None and engine in family.mtp.engines
        for architecture in family.mtp.engines[engine].architectures
    ]


def built(source: str, projection: str) -> set[tuple[str, bool]]:
    """(class, whether it gets a quantization config) of each `self.<projection> = <class>(...)`."""
    attribute, found = _ATTRIBUTES.get(projection, projection), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Call):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Attribute) and target.attr == attribute:
                given = {word.arg: word.value for word in node.value.keywords}
                config = given.get("quant_config", ast.Constant(None))
                quantized = not (isinstance(config, ast.Constant) and config.value is None)
                found.add((ast.unparse(node.value.func).rpartition(".")[2], quantized))
    return found
