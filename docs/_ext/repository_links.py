"""Links of a page to READMEs outside the folder of the documentation lead to their pages here."""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

README = re.compile(r"\]\((?:\.\./)+(?:plugins|contrib)/([\w-]+)/README\.md(#[\w-]+)?\)")


def relink(app: Sphinx, docname: str, source: list[str]) -> None:
    """Called by Sphinx with the text of each page, which it may change."""
    up = "../" * docname.count("/")
    source[0] = README.sub(lambda link: f"]({up}plugins/{link[1]}.md{link[2] or ''})", source[0])


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx when conf.py names this extension."""
    app.connect("source-read", relink)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
