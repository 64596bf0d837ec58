"""Imports point one way. What stands on one line may import what stands on it or above, never
below.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from gcore_core.config import catalog

ROOT = Path(__file__).parents[2]

#: What each folder of the core may import of the project, besides itself.
MAY_IMPORT = {
    "contract": set(),
    "config": {"contract"},
    "wire": {"contract"},
    "runtime": {"contract", "wire"},
    "store": {"contract", "wire", "runtime"},
    "workers": {"contract", "wire", "runtime", "store"},
    "node": {"contract", "wire", "runtime", "store", "workers"},
    "controllers": {"contract", "wire", "runtime"},
    "run": {"contract", "config", "wire", "runtime", "store", "workers", "node"},
    "builtin": {"contract", "config", "runtime", "node", "controllers"},
    "cli": {"contract", "config", "runtime", "node", "run"},
    "kits": {
        *("contract", "config", "wire", "runtime", "store", "workers", "node", "controllers"),
        *("run", "cli"),
    },
}

HEAVY = {*catalog.HEAVY, "pyarrow", "tokenizers"}


@dataclass(frozen=True)
class Import:
    """``module`` imports ``target``. top: when it is itself imported. typing: for the type checker
    only.
    """

    module: str
    target: str
    line: int
    top: bool
    typing: bool

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


def module_name(path: Path) -> str:
    """``gcore_core.cli`` of ``gcore_core/cli/__init__.py``; below plugins/ the distribution's
    folder is left out.
    """
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[2:] if parts[0] == "plugins" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


CORE = sorted((ROOT / "gcore_core").rglob("*.py"))
OWN = frozenset(map(module_name, CORE))


@cache
def imports_of(path: Path) -> tuple[Import, ...]:
    """Every import of a file; ``from package import module`` names a module of the core."""
    module = module_name(path)
    package = module if path.stem == "__init__" else module.rpartition(".")[0]

    def walk(node: ast.AST, top: bool, typing: bool) -> Iterator[Import]:
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = (
                package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            )
            base = ".".join([*above, *filter(None, [node.module])])
            inner = [f"{base}.{alias.name}" for alias in node.names]
            targets = [name for name in inner if name in OWN]
            targets += [base] if len(targets) < len(inner) else []
        yield from (Import(module, target, node.lineno, top, typing) for target in targets)  # type: ignore[attr-defined]
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        unused = isinstance(node, ast.If) and dotted(node.test) in (
            "TYPE_CHECKING",
            "typing.TYPE_CHECKING",
        )
        for child in ast.iter_child_nodes(node):
            yield from walk(child, top and not inside, typing or unused)

    return tuple(walk(ast.parse(path.read_text()), True, False))


def dotted(node: ast.AST) -> str:
    """``a.b.c`` where an expression is a name with attributes; "" for any other."""
    if isinstance(node, ast.Name):
        return node.id
    inner = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{inner}.{node.attr}" if inner and isinstance(node, ast.Attribute) else ""


INNER = [found for path in CORE for found in imports_of(path)]


def part(module: str) -> str:
    """``processes`` of ``gcore_core.wire.sockets``; empty for the package itself."""
    return module.partition(".")[2].partition(".")[0]


def within_folders() -> Iterator[Import]:
    """Imports of one folder's module by another folder's."""
    for found in INNER:
        inside = found.target.startswith("gcore_core.") and part(found.module)
        if inside and part(found.module) != part(found.target):
            yield found


def test_every_module_of_the_core_stands_in_a_folder() -> None:
    assert {part(module) for module in OWN} - {"", "__main__"} == set(MAY_IMPORT)


def test_unit_tests_lie_in_folders_of_the_rooms() -> None:
    """``project`` has those of recipes, benchmarks and the tests' own commands."""
    folders = {file.parent.name for file in (ROOT / "tests/unit").glob("*/test_*.py")}
    assert folders == {*MAY_IMPORT, "project"}


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_a_folder_imports_only_what_it_may(folder: str) -> None:
    strange = [
        str(found)
        for found in within_folders()
        if part(found.module) == folder and part(found.target) not in MAY_IMPORT[folder]
    ]
    assert strange == []


def test_the_package_init_imports_nothing_of_the_core() -> None:
    assert [
        str(found)
        for found in INNER
        if found.module == "gcore_core" and "gcore_core" in found.target and not found.typing
    ] == []


def test_modules_of_the_core_do_not_import_each_other_in_a_circle() -> None:
    edges: dict[str, set[str]] = {}
    for found in INNER:
        if found.top and not found.typing and found.target in OWN and found.target != found.module:
            edges.setdefault(found.module, set()).add(found.target)
    while edges:  # what imports nothing that is left, is in no circle
        free = {module for module, targets in edges.items() if not targets & edges.keys()}
        assert free, f"in a circle, or leading to one: {sorted(edges)}"
        edges = {module: targets for module, targets in edges.items() if module not in free}


def test_the_core_imports_no_engine() -> None:
    heavy = [
        found for found in INNER if found.target.partition(".")[0] in HEAVY and not found.typing
    ]
    assert [str(found) for found in heavy] == []


def test_help_imports_only_the_standard_library() -> None:
    seen, queue = set(), ["gcore_core.__main__", "gcore_core.cli"]
    while queue:
        module = queue.pop()
        seen.add(module)
        for found in INNER:
            if (
                found.module == module
                and found.top
                and not found.typing
                and found.target not in seen
            ):
                if found.target in OWN:
                    queue.append(found.target)
                else:
                    assert found.target.partition(".")[0] in sys.stdlib_module_names, str(found)


#: Not plugins, so plugins may import them.
LIBRARIES = {"gcore_core", "gcore_language"}
#: Plugin -> other plugins whose modules it may import, since it declares their distributions.
MAY_USE = {
    "gcore_data": {"gcore_rewards"},  # extraction of answers and rewards read numbers alike
    "gcore_environments": {"gcore_rewards"},  # both confine code that nobody trusts
    "gcore_rewards": {"gcore_report"},
    "gcore_tools": {"gcore_nodes"},  # an extra: nodes out of namespaces are machines of a launcher
}
#: The test kit, and what it may use of the core: its simulator runs the real programs, its fakes
#: stand in real workers.
TESTING = "gcore_testing"
TESTED_WITH = {
    *("builtin", "config", "contract", "controllers", "kits", "node", "run", "runtime"),
    *("store", "wire", "workers"),
}


def is_plugin(folder: Path) -> bool:
    return "[project.entry-points.gcore]" in (folder / "pyproject.toml").read_text(encoding="utf-8")


def test_everything_under_plugins_is_a_plugin_or_a_shared_library() -> None:
    others = {
        file.parent.name.replace("-", "_")
        for file in (ROOT / "plugins").glob("*/pyproject.toml")
        if not is_plugin(file.parent)
    }
    assert others == LIBRARIES - {"gcore_core"}


#: Root of a plugin -> further packages that its distribution installs.
MORE_PACKAGES = {"gcore_tools": ("gcore",)}


def imports_of_plugins() -> Iterator[tuple[str, Import]]:
    """(root of the plugin, import) of every module that a distribution below plugins/ installs.

    Their tests are left out: they may import another plugin, since pairs are tested too.
    """
    for folder in sorted((ROOT / "plugins").iterdir()):
        root = folder.name.replace("-", "_")
        packages = [folder / name for name in (root, *MORE_PACKAGES.get(root, ()))]
        for path in sorted(path for package in packages for path in package.rglob("*.py")):
            for found in imports_of(path):
                yield root, found


def test_a_plugin_imports_only_the_core_and_shared_libraries_of_the_project() -> None:
    strange = [
        str(found)
        for root, found in imports_of_plugins()
        if found.target.partition("_")[0].partition(".")[0] == "gcore"
        if found.target.partition(".")[0]
        not in (
            *(*LIBRARIES, TESTING, root),
            *(*MAY_USE.get(root, ()), *MORE_PACKAGES.get(root, ())),
        )
    ]
    assert strange == []


#: What a plugin may use of the core besides the contract; the docstring of kits says for what.
KIT = "gcore_core.kits"


def is_public(module: str) -> bool:
    """Whether a module of the core is for plugins: of the contract, or of a kit."""
    if module == "gcore_core":
        return True
    public = any(f"{module}.".startswith(f"{kit}.") for kit in ("gcore_core.contract", KIT))
    return public and not any(word.startswith("_") for word in module.split("."))


def outside_contract_and_kits() -> list[str]:
    """Imports of plugins that reach into the core's own rooms."""
    return [
        str(found)
        for root, found in imports_of_plugins()
        if root != TESTING
        if found.target.partition(".")[0] == "gcore_core" and not is_public(found.target)
    ]


def test_a_plugin_imports_only_the_contract_and_kits_of_the_core() -> None:
    assert outside_contract_and_kits() == []


def test_the_test_kit_imports_only_what_it_may_of_the_core() -> None:
    strange = [
        str(found)
        for root, found in imports_of_plugins()
        if root == TESTING and found.target.startswith("gcore_core.")
        if part(found.target) not in TESTED_WITH
    ]
    assert strange == []


def test_the_core_imports_no_plugin() -> None:
    plugins = {folder.name.replace("-", "_") for folder in (ROOT / "plugins").iterdir()}
    plugins |= {package for packages in MORE_PACKAGES.values() for package in packages}
    assert [str(found) for found in INNER if found.target.partition(".")[0] in plugins] == []


def test_every_kit_is_listed_with_its_purpose() -> None:
    listed = (ROOT / "gcore_core/kits/__init__.py").read_text()
    own = [name for name in OWN if name.startswith("gcore_core.kits.")]
    assert own and all(f"    {name} " in listed for name in own)


@pytest.mark.parametrize(
    ("module", "public"),
    [
        ("gcore_core", True),
        ("gcore_core.contract.records", True),
        ("gcore_core.controllers.generation", False),
        ("gcore_core.kits.launching", True),
        ("gcore_core.kits._private", False),
        ("gcore_core.workers.push", False),
        ("gcore_core.contractual", False),
    ],
)
def test_public_modules_are_determined_by_name(module: str, public: bool) -> None:
    assert is_public(module) is public


@pytest.mark.parametrize("folder", ["contrib", "recipes"])
def test_shipped_code_does_not_import(folder: str) -> None:
    shipped = [*CORE, *(ROOT / "plugins").rglob("*.py")]
    found = [
        item
        for path in shipped
        for item in imports_of(path)
        if item.target.partition(".")[0] == folder
    ]
    assert [str(item) for item in found] == []
