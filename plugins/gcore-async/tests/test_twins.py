"""The asynchronous program reads as the synchronous one's twin; the docs show how they differ."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

ROOT = Path(__file__).parents[3]
SYNCHRONOUS = ROOT / "gcore_core/controllers/synchronous.py"
ASYNCHRONOUS = ROOT / "plugins/gcore-async/gcore_async/program.py"
PAGE = ROOT / "docs/how-to/asynchronous.md"
FENCE = "```diff\n"
MOST_LINES = 60


def difference() -> list[str]:
    """Returns the lines of a unified diff of the two programs, with all of their text."""
    texts = [path.read_text().splitlines() for path in (SYNCHRONOUS, ASYNCHRONOUS)]
    names = [str(path.relative_to(ROOT)) for path in (SYNCHRONOUS, ASYNCHRONOUS)]
    return list(difflib.unified_diff(*texts, *names, n=100, lineterm=""))


def test_the_two_programs_differ_in_fewer_than_sixty_lines() -> None:
    changed = [line for line in difference()[2:] if line[0] in "+-"]
    assert 0 < len(changed) < MOST_LINES


def test_the_docs_show_the_difference_as_it_is() -> None:
    """With G_CORE_WRITE=1 it is written there."""
    before, _, rest = PAGE.read_text().partition(FENCE)
    shown, fence, after = rest.partition("\n```")
    lines = [line.rstrip() for line in difference() if not line.startswith("@@")]
    expected = "\n".join(lines)
    if os.environ.get("G_CORE_WRITE"):
        PAGE.write_text(before + FENCE + expected + fence + after)
        return
    assert shown == expected, "run this test once with G_CORE_WRITE=1"
