"""Counts the words of ours that the author of a new plugin has to know.

They are read from what ``g-core new`` writes, since that is the least that works. A word is one of
``gcore_core`` or ``gcore_testing``, and is counted once:

- what the modules import from there;
- what they implement or set: a function, method, fixture or attribute that has the name of one
  that the contract or a contract test declares;
- a keyword that they give to something imported, such as a field of a description.

Fields of dataclasses are the plugin's own words, since these are its configs.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import gcore_testing
from gcore_testing.scaffold import writing

import gcore_core

OURS = ("gcore_core", "gcore_testing")
#: Where the words lie that a plugin and its test implement.
DECLARED = (
    Path(gcore_core.__file__).parent / "contract",
    Path(gcore_testing.__file__).parent / "contracts",
)


def names_to_know(kind: str) -> set[str]:
    """Returns the words that an author of a plugin of this kind has to know."""
    with TemporaryDirectory() as folder:
        written = writing.write("measured", kind, Path(folder) / "measured").files
        return words_of(file.read_text(encoding="utf-8") for file in written if is_python(file))


def is_python(file: Path) -> bool:
    """Returns whether a file is a module."""
    return file.suffix == ".py"


def words_of(modules: Iterable[str]) -> set[str]:
    """Returns the words of ours in the texts of some modules."""
    declared = {
        name
        for folder in DECLARED
        for file in folder.glob("*.py")
        for name in defined(ast.parse(file.read_text(encoding="utf-8")))
    }
    words: set[str] = set()
    for tree in map(ast.parse, modules):
        imported = set(imports_of_ours(tree))
        words |= imported | set(keywords_to(imported, tree)) | declared & set(defined(tree))
    return words


def imports_of_ours(tree: ast.AST) -> Iterator[str]:
    """Yields the names that a module imports from the core or the test kit."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in OURS:
            yield from (alias.name for alias in node.names)


def keywords_to(names: set[str], tree: ast.AST) -> Iterator[str]:
    """Yields the keywords that a module gives where it calls one of these names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
            yield from (keyword.arg for keyword in node.keywords if keyword.arg)


def defined(tree: ast.AST) -> Iterator[str]:
    """Yields the public functions of a module, and what its classes define or set."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [node.name]
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names = [node.attr]
        elif isinstance(node, ast.ClassDef) and not is_dataclass(node):
            names = [name for statement in node.body for name in set_by(statement)]
        yield from (name for name in names if not name.startswith("_"))


def is_dataclass(node: ast.ClassDef) -> bool:
    """Returns whether a class is decorated as a dataclass."""
    return any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


def set_by(statement: ast.stmt) -> list[str]:
    """Returns the names that a statement declares or sets, as ``version: int`` does."""
    if isinstance(statement, ast.AnnAssign):
        return [ast.unparse(statement.target)]
    if isinstance(statement, ast.Assign):
        return [ast.unparse(target) for target in statement.targets]
    return []
