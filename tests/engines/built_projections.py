"""What the source of an engine's model builds a projection of."""

import ast

# Where a checkpoint has another name than the module.
_ATTRIBUTES = {"eagle_linear": "fc"}


def built(source: str, projection: str) -> set[tuple[str, bool]]:
    """(class, whether it is handed a quantization config) of each `self.<projection> = <class>(...)`."""
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
