"""Reads pages of the documentation as the site has them, with the parts that are made from the
code.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def extension() -> ModuleType:
    """The extension of Sphinx that makes these parts; it needs no Sphinx for it."""
    name = "docs_made_pages"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, DOCS / "_ext/made_pages.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
    return sys.modules[name]


def page(name: str) -> str:
    """A page by its path below the folder ``docs``, with the parts that are made."""
    return str(extension().expand((DOCS / name).read_text(encoding="utf-8")))


def committed() -> list[Path]:
    """The pages of the documentation that are written by hand.

    Without what a build of the site has left beside them, and the notebook's runs.
    """
    made = {DOCS / f"plugins/{name}.md" for name in extension().readme_pages()}
    return sorted(
        file for file in DOCS.rglob("*.md") if file not in made and "runs" not in file.parts
    )
