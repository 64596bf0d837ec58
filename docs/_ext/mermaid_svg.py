"""Draws Mermaid blocks as SVG while the site is built, without a browser and without a network.

A block marked ``mermaid`` becomes an image. Code hosts that know Mermaid draw the same block, so a
page reads alike in both places. A diagram that cannot be drawn ends a strict build.
"""

from __future__ import annotations

import base64
import html
from typing import Any

import mmdr
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

logger = logging.getLogger(__name__)


class MermaidDiagram(SphinxDirective):
    """The directive behind a ``mermaid`` block."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        source = "\n".join(self.content)
        try:
            svg = str(mmdr.render(source).svg())
        except Exception as error:  # the renderer's errors have no common type
            logger.warning("mermaid: %s", error, location=self.get_location())
            return [nodes.literal_block(source, source)]
        # An image of its own: the ids in the drawings of one page would clash.
        address = f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"
        text = html.escape(source, quote=True)
        image = f'<img class="diagram" src="{address}" alt="{text}">'
        return [nodes.raw("", image, format="html")]


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx when conf.py names this extension."""
    app.add_directive("mermaid", MermaidDiagram)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
