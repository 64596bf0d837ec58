"""The page that follows one record names files and functions, and each of them is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/explanation/life-of-a-record.md").read_text(encoding="utf-8")
STEPS = re.findall(r"^\| (\d+) \| .*? \| `([\w/]+\.py)` `([\w.]+)` \|", PAGE, flags=re.M)
NAMED = re.findall(r"`([A-Z]\w+(?:\.\w+)?)`", PAGE)


def names_in(path: Path) -> set[str]:
    """``function``, ``Class`` and ``Class.method`` of a module."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            inner = (n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
            found |= {f"{node.name}.{method.name}" for method in inner}
    return found


EVERYWHERE = {name for path in (ROOT / "gcore_core").rglob("*.py") for name in names_in(path)}


def test_the_page_has_twelve_steps() -> None:
    assert [int(number) for number, _, _ in STEPS] == list(range(1, 13))


@pytest.mark.parametrize(("number", "file", "function"), STEPS)
def test_the_function_of_a_step_is_where_the_page_says(
    number: str, file: str, function: str
) -> None:
    assert function in names_in(ROOT / "gcore_core" / file)


def test_every_file_on_the_page_exists() -> None:
    files = set(re.findall(r"`([\w/]+/\w+\.py)`", PAGE))
    assert len(files) > 10
    assert [file for file in sorted(files) if not (ROOT / "gcore_core" / file).is_file()] == []


def test_every_class_and_method_on_the_page_exists() -> None:
    assert len(NAMED) > 20
    assert sorted(set(NAMED) - EVERYWHERE) == []
