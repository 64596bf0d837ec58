"""Every link that points into the project leads somewhere."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.support import made_pages

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *made_pages.committed(),
        *ROOT.glob("*/README.md"),
        *ROOT.glob("plugins/*/README.md"),
    ]
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)[^)]*\)|<(?:img|a)\b[^>]*?(?:src|href)=\"([^\"]+)\"")


def slug(heading: str) -> str:
    """The anchor that a Markdown reader gives a heading."""
    kept = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return kept.replace(" ", "-")


@cache
def text_of(page: Path) -> str:
    return str(made_pages.extension().expand(page.read_text()))


@cache
def anchors(page: Path) -> set[str]:
    return {slug(heading) for heading in re.findall(r"^#+ (.+)$", text_of(page), flags=re.M)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    broken = []
    text = re.sub(r"^```.*?^```", "", text_of(page), flags=re.M | re.S)
    for target in filter(None, (link for pair in LINK.findall(text) for link in pair)):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        there = (page.parent / file).resolve() if file else page
        if not there.exists() or (
            anchor and there.suffix == ".md" and anchor not in anchors(there)
        ):
            broken.append(target)
    assert broken == []


def test_the_first_page_and_the_design_page_exist() -> None:
    assert {ROOT / "README.md", ROOT / "docs/explanation/design.md"} <= set(PAGES)
