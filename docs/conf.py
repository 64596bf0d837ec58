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
    "made_pages",
    "repository_links",
]
exclude_patterns = ["_build", "_ext", "**/runs"]  # the notebook's run writes Markdown, too
nitpicky = False  # docstrings name types of libraries whose pages are not at hand

html_theme = "furo"
html_title = f"G-Core {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_copyright = False

# A notebook shows the output that it is committed with. `tox run -e docs` sets "force": then it is
# executed, and a cell that fails is an error.
nb_execution_mode = "off"
nb_execution_timeout = 600  # seconds for one cell; training takes half a minute on two quiet cores
nb_execution_raise_on_error = True

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
