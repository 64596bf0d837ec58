"""Finds functions of a plugin that nobody has written yet, as a new plugin has them.

Such a function can only end with NotImplementedError. Source is parsed, nothing is imported, so an
engine need not be there.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from gcore_core.contract.traits import Traits, methods_of, protocols_of

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def optional_methods(kind: str, traits: Traits) -> frozenset[str]:
    """Returns the methods that a backend of a kind may lack, since its traits do not claim them."""
    methods = {"abort"} if not traits.abort else set()
    for name, protocol in protocols_of(kind).items():
        if not getattr(traits, name):
            methods |= {*methods_of(protocol)}
    return frozenset(methods)


def unwritten(reference: str, optional: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yields "file:line: name" of each such function in the module that a reference names.

    Of classes, the methods of the named one count: others may be there to be derived from.

    reference: ``"module:attribute"``, of a class or a function.
    optional: methods that need not be written.
    """
    source, _, name = reference.rpartition(":")
    for node in _body(source):
        if isinstance(node, _Function):
            yield from _named(source, node, node.name)
        elif isinstance(node, ast.ClassDef) and node.name == name:
            for method in node.body:
                if isinstance(method, _Function) and method.name not in optional:
                    yield from _named(source, method, f"{name}.{method.name}")


def _named(source: str, function: _Function, name: str) -> Iterator[str]:
    if _only_raises(function):
        yield f"{_file(source)}:{function.lineno}: {name}"


def _only_raises(function: _Function) -> bool:
    """Says whether a function raises NotImplementedError by itself and returns nothing before."""
    raises = any(
        isinstance(statement, ast.Raise) and _is_not_implemented(statement.exc)
        for statement in function.body
    )
    gives = any(
        isinstance(node, ast.Yield | ast.YieldFrom)
        or (isinstance(node, ast.Return) and not _is_none(node.value))
        for node in ast.walk(function)
    )
    return raises and not gives


def _is_not_implemented(error: ast.expr | None) -> bool:
    error = error.func if isinstance(error, ast.Call) else error
    return isinstance(error, ast.Name) and error.id == "NotImplementedError"


def _is_none(value: ast.expr | None) -> bool:
    return value is None or (isinstance(value, ast.Constant) and value.value is None)


def _file(source: str) -> Path | None:
    """Returns the file of a module, by its name or its path; None where there is none."""
    if source.endswith(".py"):
        return Path(source)
    try:
        spec = importlib.util.find_spec(source)
    except (ImportError, ValueError):
        return None
    is_python = spec is not None and spec.origin is not None and spec.origin.endswith(".py")
    return Path(str(spec.origin)) if spec is not None and is_python else None


def _body(source: str) -> list[ast.stmt]:
    file = _file(source)
    try:
        return ast.parse(file.read_bytes()).body if file else []
    except (OSError, SyntaxError, ValueError):  # its import says so
        return []
