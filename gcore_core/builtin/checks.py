"""Says before anything starts what is wrong with the files of a user: functions of rewards.

A file of Python is parsed here, and imported in a helper process alone. One that does not exist is
left to the run, since an earlier command may make it.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gcore_core.config.user_functions import load_function
from gcore_core.contract.errors import did_you_mean
from gcore_core.contract.looking import Look

_FUNCTION = "core/function"
_LOOK = "gcore_core.builtin.checks:function_problems"


def problems_of(plan: Mapping[str, Any]) -> Iterator[str]:
    """Yields a sentence for each reward whose file is no Python or lacks the function."""
    for name, reward in plan.get("rewards", {}).items():
        if reward.get("use") == _FUNCTION:
            yield from _function_problems(f"rewards.{name}.config", reward.get("config") or {})


def function_looks(plan: Mapping[str, Any]) -> Iterator[Look]:
    """Yields a look at each function of the user that the job names: rewards, models to be made.

    A function that has made its model already is not asked again.
    """
    for name, reward in plan.get("rewards", {}).items():
        if reward.get("use") == _FUNCTION:
            config = reward.get("config") or {}
            given = ["records"] if config.get("batch") else ["record"]
            yield from _look(f"rewards.{name}.config", config, given)
    for role, node in plan.get("roles", {}).items():
        model = node.get("model") or {}
        if "make" in model and "path" not in model:
            given = ["directory", "config", "progress"]
            yield from _look(f"roles.{role}.model.make", model["make"], given)


def _look(where: str, config: Mapping[str, Any], given: list[str]) -> Iterator[Look]:
    path = str(config.get("path", ""))
    if Path(path).is_file():
        arguments = {"where": where, "path": path, "name": str(config["name"]), "given": given}
        yield Look(where=where, function=_LOOK, arguments=arguments, files=(path,))


def _function_problems(where: str, config: Mapping[str, Any]) -> Iterator[str]:
    file = Path(str(config.get("path", "")))
    if not file.is_file():
        return
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        yield f"{where}.path: {file}{f', line {line}' if line else ''}: no Python: {error}."
        return
    name = str(config.get("name", ""))
    names = top_names(tree)
    if name not in names and "*" not in names and "__getattr__" not in names:
        near = did_you_mean(name, sorted(names))
        yield f"{where}.name: {file} has no function {name!r}{near}."


def top_names(tree: ast.Module) -> set[str]:
    """Returns the names that a module may bind, more rather than fewer; "*": it may bind any."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("globals", "exec", "vars"):
            names.add("*")
    return names


def function_problems(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yields why a function cannot be called as the job will call it. It is not called here.

    arguments: ``where``: the section that names it; ``path`` and ``name``, as the section has them;
        ``given``: what it is called with, a name for each argument.
    Raises what ``load_function`` raises.
    """
    function = load_function(Path(arguments["path"]), arguments["name"])
    given = arguments["given"]
    if not _takes(function, len(given)):
        yield (
            f"{arguments['where']}.name: {arguments['name']}{inspect.signature(function)} in "
            f"{arguments['path']} is called with ({', '.join(given)})."
        )


def _takes(function: Callable[..., Any], count: int) -> bool:
    """Whether a function takes so many arguments by their places, as far as it says."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True
