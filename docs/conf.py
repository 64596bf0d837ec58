"""How Sphinx builds the site: ``tox run -e docs``."""

from __future__ import annotations

import sys
from pathlib import Path

import gcore_core

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))

project = "G-Core"
release = gcore_core.__version__
author = "the authors of G-Core"
copyright = author

extensions = [
    "myst_nb",  # myst_parser, and notebooks
    "sphinx.ext.autodoc",
    "mermaid_svg",
    "house_docstrings",
    "repository_links",
]
exclude_patterns = ["_build", "_ext"]
nitpicky = False  # docstrings name types of libraries whose pages are not at hand

html_theme = "furo"
html_title = f"G-Core {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_copyright = False

nb_execution_mode = "off"  # a notebook shows the output that it is committed with

myst_enable_extensions = ["deflist"]
myst_fence_as_directive = ["mermaid"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_default_options = {
    "members": True,
    "undoc-members": True,
    "show-inheritance": True,
}
