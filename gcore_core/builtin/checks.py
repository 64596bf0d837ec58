"""Says before anything starts what is wrong with the files of a user: functions of rewards, data.

A file of Python is parsed, never imported: it may need what only its worker has. One that does not
exist is left to the run, since an earlier command may make it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from gcore_core.builtin.config import JsonLinesConfig
from gcore_core.contract.errors import did_you_mean
from gcore_core.contract.rows import datasets_of, problem_of

_FUNCTION = "core/function"
_JSON_LINES = "core/jsonl"


def problems_of(plan: Mapping[str, Any]) -> Iterator[str]:
    """Yields a sentence for each reward whose file is no Python or lacks the function."""
    for name, reward in plan.get("rewards", {}).items():
        if reward.get("use") == _FUNCTION:
            yield from _function_problems(f"rewards.{name}.config", reward.get("config") or {})


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


def data_problems(plan: Mapping[str, Any]) -> Iterator[str]:
    """Yields a sentence for each file of JSON lines that is not one, or has a row without a prompt.

    Every row is read, as a run does first; both read a file once, until it changes.
    """
    for where, config in datasets_of(plan, _JSON_LINES):
        settings = msgspec.convert(config, JsonLinesConfig)
        if problem := problem_of(where, partial(_opened, settings)):
            yield problem


def _opened(settings: JsonLinesConfig) -> None:
    from gcore_core.builtin.json_lines import JsonLines

    JsonLines(settings).close()


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
