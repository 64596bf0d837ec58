"""Docstrings as the project writes them, read as reStructuredText.

A docstring is one sentence, then one attribute a line (``name: what it is``, or several names with
commas), then paragraphs. Attribute lines become a list. An indented paragraph is code or a drawing.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

from sphinx.application import Sphinx

ATTRIBUTE = re.compile(r"^(`{0,2}[a-z_]\w*`{0,2}(?:, `{0,2}[a-z_]\w*`{0,2})*): (\S.*)$")


def as_restructured_text(lines: list[str]) -> list[str]:
    """The docstring's lines with lists and literal blocks marked as such."""
    shown: list[str] = []
    is_literal = False
    for is_blank, paragraph in itertools.groupby(lines, key=lambda line: not line.strip()):
        if is_blank:
            continue
        block = list(paragraph)
        if block[0].startswith("    "):
            if not is_literal:
                shown += ["::", ""]
            shown += block
            is_literal = True
        else:
            shown += with_lists(block)
            is_literal = False
        shown.append("")
    return shown


def with_lists(paragraph: list[str]) -> list[str]:
    """One paragraph; its attribute lines and dashes are items, other lines go on with what is
    before them.
    """
    shown: list[str] = []
    in_list = False
    for line in paragraph:
        attribute = ATTRIBUTE.match(line)
        if attribute:
            names = ", ".join(f"``{name.strip('`')}``" for name in attribute[1].split(", "))
            line = f"- {names}: {attribute[2]}"
        if line.startswith("- "):
            if not in_list:
                shown.append("")
            in_list = True
            shown.append(line)
        else:
            shown.append(f"  {line.strip()}" if in_list else line.strip())
    return shown


def process(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Called by autodoc with the lines of each docstring, which it may change."""
    lines[:] = as_restructured_text(lines)


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx when conf.py names this extension."""
    app.connect("autodoc-process-docstring", process)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
