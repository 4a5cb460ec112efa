"""A gate per hook: a hook goes in only where the engine's function is the one it was written for, whatever the version.

A `Target` records where that function is, its parameters and, where the hook depends on what the function does, hashes
of the bodies that it was written for. A hash comes from the source alone, the same on every Python. Only the standard
library is used (tests/engines/test_gates.py runs the file by itself).
"""

import ast
import hashlib
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


class TargetError(Exception):
    """A hook's target is gone or has changed; the message names it."""


@dataclass(frozen=True)
class Target:
    """What one hook was written for.

    where: "package.module:Class.attribute".
    parameters: the names the function has to take, `self` included, `...` at the end for any more; None checks nothing.
    bodies: `body_hash` of each known body -> the engine's versions that have it; empty where the hook does not
        depend on the body.
    """

    where: str
    parameters: Sequence[object] | None = None
    bodies: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def module(self) -> str:
        return self.where.partition(":")[0]

    def find(self) -> tuple[Any, str, Any]:
        """(owner, name, value); imports the module. Raises TargetError where the target is not what was recorded."""
        owner, name, value = resolve(self.where)
        self.check(value)
        return owner, name, value

    def check(self, function: Callable) -> None:
        """Raise TargetError where a function is not what was recorded; `where` only names it in the message."""
        if self.parameters is not None:
            check_parameters(self.where, function, self.parameters)
        if self.bodies:
            check_body(self.where, function, self.bodies)


def resolve(where: str) -> tuple[Any, str, Any]:
    """(owner, name, value) of "package.module:Class.attribute", whatever it is; TargetError where it is not there."""
    module, _, path = where.partition(":")
    try:
        owner: Any = None
        value: Any = importlib.import_module(module)
        for name in path.split("."):
            owner, value = value, getattr(value, name)
    except (ImportError, AttributeError) as failure:
        raise TargetError(f"{where} is not there ({failure})") from failure
    return owner, name, value


def check_parameters(where: str, function: Callable, parameters: Sequence[object]) -> None:
    """Raise TargetError where a function's parameters are not those that a hook passes on."""
    try:
        found, expected = list(inspect.signature(function).parameters), list(parameters)
    except (TypeError, ValueError) as failure:
        raise TargetError(f"{where} is no function with parameters ({failure})") from failure
    if expected and expected[-1] is ...:
        expected.pop()
        found = found[: len(expected)]
    if found != expected:
        raise TargetError(f"{where} takes {found}, and the hook was written for {expected}")


def check_body(where: str, function: Callable, bodies: Mapping[str, Sequence[str]]) -> None:
    """Raise TargetError where a function's body is none of the known ones."""
    try:
        found = body_hash(function)
    except (OSError, TypeError, SyntaxError) as failure:
        raise TargetError(f"{where} has no source to compare ({failure})") from failure
    if found not in bodies:
        versions = ", ".join(dict.fromkeys(version for known in bodies.values() for version in known))
        raise TargetError(f"{where} has another body ({found}) than the hook was written for (that of {versions})")


def body_hash(function: Callable) -> str:
    """A hash of a function's source without comments, layout, docstrings and annotations, the same on every Python.

    Raises:
        OSError, TypeError: there is no source.
        TargetError: a wrapper that the source does not name is around the function, so more than the body runs.
    """
    source = inspect.getsource(function)
    # A method's lines are indented; dedenting them would change multi-line strings.
    (node,) = ast.parse(f"if True:\n{source}" if source[0].isspace() else source).body
    if isinstance(node, ast.If):
        (node,) = node.body
    wrappers, wrapped = 0, function
    while hasattr(wrapped, "__wrapped__"):
        wrappers, wrapped = wrappers + 1, wrapped.__wrapped__
    if wrappers > len(getattr(node, "decorator_list", ())):
        raise TargetError(f"{function.__module__}.{function.__qualname__} is wrapped by {_file(function)}")
    return hashlib.sha256(repr(_canonical(node)).encode()).hexdigest()[:16]


def _file(function: Any) -> str:
    code = getattr(function, "__code__", None)
    return "an object without code" if code is None else code.co_filename


# Not part of what runs, or not there in every version of Python (type_params: 3.12).
_LEFT_OUT = frozenset(("annotation", "ctx", "kind", "returns", "type_comment", "type_params"))
_WITH_DOCSTRING = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _canonical(node: object) -> object:
    """A syntax tree as nested tuples: ast.dump and ast.unparse write the same tree differently between versions."""
    if isinstance(node, ast.AST):
        fields = {name: value for name, value in ast.iter_fields(node) if name not in _LEFT_OUT}
        if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
            fields["body"] = fields["body"][1:]
        if isinstance(node, ast.JoinedStr):  # Python 3.12 ends a format specification with an empty string
            fields["values"] = [part for part in node.values if getattr(part, "value", None) != ""]
        present = sorted((name, _canonical(value)) for name, value in fields.items() if value not in (None, []))
        return (type(node).__name__, *present)
    if isinstance(node, list):
        return tuple(map(_canonical, node))
    return repr(node)
