"""The documentation site has a page for everything that it must have, and every page has a place.

``tox run -e docs`` builds it; here is what needs no Sphinx.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gcore_core.cli import VERBS
from gcore_core.contract.errors import error_types

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def table_of_contents() -> list[str]:
    """Every page that a table of contents names, from the docs' root, without its suffix."""
    named = ["index"]
    for page in DOCS.rglob("*.md"):
        for block in re.findall(r"^```\{toctree\}\n(.*?)^```", page.read_text(), flags=re.M | re.S):
            folder = page.parent.relative_to(DOCS)
            entries = [line for line in block.splitlines() if line and not line.startswith(":")]
            named += [str(folder / entry) for entry in entries]
    return named


def test_every_page_stands_once_in_a_table_of_contents() -> None:
    files = [*DOCS.rglob("*.md"), *DOCS.rglob("*.ipynb")]
    # The notebook's run writes Markdown, too; the site leaves it out (conf.py).
    files = [file for file in files if "runs" not in file.parts]
    pages = [str(page.relative_to(DOCS).with_suffix("")) for page in files]
    assert len(pages) > 10
    assert sorted(table_of_contents()) == sorted(pages)


def test_every_module_of_the_contract_is_on_the_page_of_the_contract() -> None:
    page = (DOCS / "reference/contract.md").read_text()
    shown = re.findall(r"^\.\. automodule:: gcore_core\.contract\.(\w+)$", page, flags=re.M)
    modules = [path.stem for path in (ROOT / "gcore_core/contract").glob("*.py")]
    assert sorted(shown) == sorted(set(modules) - {"__init__"}), (
        "docs/reference/contract.md has an automodule block for each module of the contract"
    )


def test_every_kit_is_on_the_page_of_the_contract() -> None:
    page = (DOCS / "reference/contract.md").read_text()
    shown = re.findall(r"^\.\. automodule:: gcore_core\.kits\.(\w+)$", page, flags=re.M)
    modules = [path.stem for path in (ROOT / "gcore_core/kits").glob("*.py")]
    assert sorted(shown) == sorted(set(modules) - {"__init__"})


def test_every_distribution_has_its_readme_on_a_page() -> None:
    for folder in (*(ROOT / "plugins").iterdir(), *(ROOT / "contrib").iterdir()):
        if (folder / "README.md").exists():
            page = DOCS / f"plugins/{folder.name}.md"
            include = f"```{{include}} ../../{folder.relative_to(ROOT)}/README.md\n"
            assert page.exists() and page.read_text().startswith(include), (
                f"docs/plugins/{folder.name}.md shows no README; docs/index.md lists it too"
            )


def test_every_verb_of_the_command_line_is_on_the_page_of_commands() -> None:
    page = (DOCS / "reference/commands.md").read_text()
    missing = [verb for verb in VERBS if f"`g-core {verb}" not in page]
    assert missing == []


def test_every_kind_of_error_that_the_process_exits_with_is_on_the_page_of_commands() -> None:
    page = (DOCS / "reference/commands.md").read_text()
    shown = {int(code) for code in re.findall(r"^\| (\d+) \|", page, flags=re.M)}
    assert {error.exit_code for error in error_types().values()} <= shown


DECISIONS = sorted({*(DOCS / "decisions").glob("*.md")} - {DOCS / "decisions/index.md"})


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_decisions_are_numbered_and_each_is_stated_with_its_reason(page: Path) -> None:
    _, *parts = re.split(r"^## ", page.read_text(), flags=re.M)
    numbers = [int(part.partition(".")[0]) for part in parts]
    assert parts and numbers == [*range(1, len(parts) + 1)]
    for part in parts:
        assert part.count("**Decision.**") == 1
        assert "**Why.**" in part or "**Rejected.**" in part, part


def test_pages_of_decisions_exist() -> None:
    assert len(DECISIONS) >= 10
