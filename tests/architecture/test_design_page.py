"""The page of the design draws the rooms of the core as they import each other, and names them all.

``G_CORE_WRITE=1`` writes the drawing into the page in place of comparing it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from tests.architecture.test_layers import INNER, MAY_IMPORT, ROOT, part

PAGE = ROOT / "docs/explanation/design.md"
DRAWING = re.compile(r"^```mermaid\nflowchart.*?^```$", re.M | re.S)


def arrows() -> dict[str, set[str]]:
    """room -> the rooms that its modules import, for the type checker too."""
    found: dict[str, set[str]] = {room: set() for room in MAY_IMPORT}
    for item in INNER:
        room, target = part(item.module), part(item.target)
        if item.target.startswith("gcore_core.") and room in found and target in found:
            found[room].add(target)
    return {room: targets - {room} for room, targets in found.items()}


def reached(room: str, drawn: dict[str, set[str]]) -> set[str]:
    """Every room that ``room`` reaches over one arrow or several."""
    seen: set[str] = set()
    queue = [*drawn[room]]
    while queue:
        target = queue.pop()
        if target not in seen:
            seen.add(target)
            queue += drawn[target]
    return seen


def drawing() -> str:
    """A Mermaid flowchart of the rooms.

    An arrow that a way over other arrows replaces is left out: who imports ``run`` and ``wire`` has
    one arrow to ``run``, as ``run`` imports ``wire``.
    """
    drawn = arrows()
    lines = ["```mermaid", "flowchart TB"]
    for room in drawn:
        longer: set[str] = set()
        for target in drawn[room]:
            longer |= reached(target, drawn)
        lines += [f"    {room} --> {target}" for target in sorted(drawn[room] - longer)]
    return "\n".join([*lines, "```"])


def test_the_drawing_shows_the_imports_of_the_code() -> None:
    text = PAGE.read_text(encoding="utf-8")
    if os.environ.get("G_CORE_WRITE"):
        PAGE.write_text(DRAWING.sub(drawing(), text), encoding="utf-8")
    assert DRAWING.findall(PAGE.read_text(encoding="utf-8")) == [drawing()]


def test_no_room_reaches_itself() -> None:
    """Else arrows would be left out that nothing replaces."""
    drawn = arrows()
    assert [room for room in drawn if room in reached(room, drawn)] == []


def test_the_page_says_what_each_room_holds() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("| room | holds |\n")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \| ", table, flags=re.M)
    assert rows == list(MAY_IMPORT)


def test_a_distribution_on_the_page_exists() -> None:
    """Each of plugins/ is named on the page, and the page names no other."""
    named = set(re.findall(r"`(gcore-\w+)`", PAGE.read_text(encoding="utf-8")))
    there = {folder.name for folder in Path(ROOT / "plugins").iterdir() if folder.is_dir()}
    assert named - {"gcore-core"} == there
