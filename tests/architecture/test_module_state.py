"""No module keeps state: a table at its top is a constant. Loggers and caches of pure functions are
fine.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODULES = sorted(
    [*(ROOT / "gcore_core").rglob("*.py"), *(ROOT / "plugins").glob("*/gcore_*/**/*.py")]
)

CONTAINERS = {"dict", "list", "set", "bytearray", "deque", "defaultdict", "Counter", "OrderedDict"}
DISPLAYS = (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)
CHANGES = {
    "append",
    "appendleft",
    "extend",
    "insert",
    "add",
    "update",
    "setdefault",
    "pop",
    "popleft",
    "popitem",
}
CHANGES |= {"remove", "discard", "clear", "sort", "reverse"}


def is_container(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        function = value.func
        return (
            function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        ) in CONTAINERS
    return isinstance(value, DISPLAYS)


def tables(tree: ast.Module) -> set[str]:
    """Names that a module binds to a container when it is imported."""
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and is_container(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def changes(tree: ast.Module, names: set[str]) -> Iterator[int]:
    """Lines below the top level that change one of ``names``, or rebind any name of the module."""

    def is_one(node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id in names

    for statement in tree.body:
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        for node in ast.walk(statement):
            match node:
                case ast.Global():
                    yield node.lineno
                case ast.Call(func=ast.Attribute(value=value, attr=verb)) if (
                    verb in CHANGES and is_one(value)
                ):
                    yield node.lineno
                case ast.Subscript(value=value, ctx=ast.Store() | ast.Del()) if is_one(value):
                    yield node.lineno
                case ast.AugAssign(target=target) if is_one(target):
                    yield node.lineno


def test_no_function_changes_module_state() -> None:
    found = []
    for path in MODULES:
        tree = ast.parse(path.read_text())
        found += [f"{path.relative_to(ROOT)}:{line}" for line in changes(tree, tables(tree))]
    assert found == []


def test_the_search_finds_each_way_to_change_a_table() -> None:
    source = "A = {}\nB: list[int] = []\nC = set()\n"
    ways = [
        "A['k'] = 1",
        "A.update(k=1)",
        "B.append(1)",
        "B += [1]",
        "C.add(1)",
        "del A['k']",
        "global A; A = {}",
    ]
    for way in ways:
        tree = ast.parse(f"{source}def change():\n    {way}\n")
        assert list(changes(tree, tables(tree))) == [5], way


def test_the_search_leaves_constants_alone() -> None:
    tree = ast.parse(
        "A = {1: 2}\ndef read(key):\n    own = {}\n    own[key] = A[key]\n    return own\n"
    )
    assert list(changes(tree, tables(tree))) == []
