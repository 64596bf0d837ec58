"""The page of traits has a row for every field of ``Traits``, with what its docstring says.

``G_CORE_WRITE=1`` writes the rows into the page in place of comparing them.
"""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path

from gcore_testing.plugin_commands.descriptions import field_help

from gcore_core.contract.traits import Traits

PAGE = Path(__file__).parents[2] / "docs/reference/traits.md"
BEGIN = "<!-- made from gcore_core/contract/traits.py -->\n"


def rows() -> str:
    """A table for each block of fields that belong to the same kinds."""
    helps = field_help(Traits)
    lines: list[str] = []
    heading = ""
    for item in fields(Traits):
        kinds = ", ".join(sorted(item.metadata["kinds"]))
        if kinds != heading:
            lines += [
                "",
                f"## {kinds.capitalize()}",
                "",
                "| field | type | promise |",
                "|---|---|---|",
            ]
            heading = kinds
        promise = helps[item.name].replace("``", "`").replace("|", "\\|")
        lines.append(f"| `{item.name}` | `{item.type}` | {promise} |")
    return "\n".join(lines) + "\n"


def test_the_page_has_a_row_for_every_field() -> None:
    text = PAGE.read_text(encoding="utf-8")
    if os.environ.get("G_CORE_WRITE"):
        PAGE.write_text(text.partition(BEGIN)[0] + BEGIN + rows(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8").partition(BEGIN)[2] == rows()
