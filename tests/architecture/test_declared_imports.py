"""What a distribution imports, it declares, among its dependencies or in one of its extras.

Installed alone it has nothing else: another distribution, or an engine, may have brought the rest
here.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.architecture.test_layers import ROOT, imports_of

PROJECTS = [ROOT, *(file.parent for file in sorted(ROOT.glob("plugins/*/pyproject.toml")))]
#: Import name -> distribution, where they differ.
DISTRIBUTIONS = {
    "PIL": "pillow",
    "aviary": "fhaviary",
    "megatron": "megatron-core",
    "mlflow": "mlflow-skinny",
    "pynvml": "nvidia-ml-py",
    "yaml": "pyyaml",
}
#: A notebook has this, and nothing imports it elsewhere.
OF_NOTEBOOKS = {"ipython"}
#: Whoever runs contracts has ``gcore-testing``: modules of plugins that are imported by tests
#: alone need not declare this.
OF_TESTS = {"gcore-testing", "pytest"}
#: Functions that import the module that their first argument names.
BY_NAME = {"files", "import_module"}


def modules_by_name(path: Path) -> Iterator[tuple[str, int]]:
    """(module, line) of each call such as ``import_module("pynvml")``."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        called = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
        first = node.args[0]
        if called in BY_NAME and isinstance(first, ast.Constant) and isinstance(first.value, str):
            yield first.value, node.lineno


def imported(package: Path) -> Iterator[tuple[str, str]]:
    """(distribution, file and line) of every import of a package, at its top and in functions.

    Those for the type checker alone are left out.
    """
    for path in sorted(package.rglob("*.py")):
        lines = [(found.target, found.line) for found in imports_of(path) if not found.typing]
        for target, line in [*lines, *modules_by_name(path)]:
            name = target.partition(".")[0]
            if name in sys.stdlib_module_names or name == package.name or not name.isidentifier():
                continue
            at = f"{path.relative_to(package.parent)}:{line}"
            yield normal(DISTRIBUTIONS.get(name, name)), at


def declared(project: Path) -> set[str]:
    """Names of the distributions that a project requires, those of its extras included."""
    facts: dict[str, Any] = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))
    required = facts["project"]["dependencies"]
    extras = facts["project"].get("optional-dependencies", {}).values()
    lines = [*required, *(line for lines in extras for line in lines)]
    return {normal(re.split(r"[^\w.-]", line, maxsplit=1)[0]) for line in lines}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("project", PROJECTS, ids=lambda project: project.name)
def test_a_distribution_declares_every_module_that_it_imports(project: Path) -> None:
    package = next(project.glob("gcore_*/__init__.py")).parent
    allowed = declared(project) | OF_TESTS | OF_NOTEBOOKS
    assert [f"{at} imports {name}" for name, at in imported(package) if name not in allowed] == []


def test_imports_in_functions_and_by_name_are_seen() -> None:
    seen = {name for name, _ in imported(ROOT / "plugins/gcore-placement/gcore_placement")}
    assert {"nvidia-ml-py", "numpy", "gcore-core"} <= seen
    seen = {name for name, _ in imported(ROOT / "plugins/gcore-language/gcore_language")}
    assert {"peft", "pillow", "transformers"} <= seen
