"""Puts the page together: one HTML file that needs no network.

Whatever a model or a person wrote stands in the file as data alone, never as markup: as JSON in
which no ``<`` is left, or packed and in base64. The page's scripts put it into the document as
text. A policy (Content-Security-Policy) allows the page's own scripts by their digests and
nothing else, so that a text which got out of its place would still not run.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from typing import Any

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from gcore_report.page.answers import answers
from gcore_report.page.configuration import configuration
from gcore_report.page.curves import curves
from gcore_report.page.pictures import pictures
from gcore_report.page.placement import placement
from gcore_report.page.processes import balance, memory
from gcore_report.page.runs import Run, facts_of
from gcore_report.page.timeline import timeline
from gcore_report.page.tokens import tokens

#: Name of a panel -> its title and what makes its data, in the order of the page.
PANELS: dict[str, tuple[str, Callable[[Sequence[Run]], Any]]] = {
    "curves": ("Curves", curves),
    "answers": ("Answers", answers),
    "tokens": ("Tokens", tokens),
    "pictures": ("Pictures", pictures),
    "timeline": ("Timeline", timeline),
    "placement": ("Placement", placement),
    "balance": ("Balance", balance),
    "memory": ("Memory", memory),
    "configuration": ("Configuration", configuration),
}
#: Scripts of the page, in the order in which they run.
SCRIPTS = (
    "data.js",
    "sources.js",
    "charts.js",
    "curves.js",
    "answers.js",
    "processes.js",
    "tokens.js",
    "pictures.js",
    "configuration.js",
    "live.js",
    "page.js",
)
_AT_ONCE = "curves"  # the panel that is open first: its data need no unpacking


def report(runs: Sequence[Run]) -> str:
    """Returns the page of some runs as HTML, with all that it shows in it."""
    data = {
        name: _packed(make(runs)) if name != _AT_ONCE else _json(make(runs))
        for name, (_, make) in PANELS.items()
    }
    page, _ = _rendered(runs, data, is_live=False)
    return page


def live_page(runs: Sequence[Run]) -> tuple[str, str]:
    """Returns the page of a run that goes on, which asks for its data, and its policy.

    The policy is of the answer's header, where it can forbid frames, too.
    """
    page, policy = _rendered(runs, {}, is_live=True)
    return page, f"{policy}; frame-ancestors 'none'"


def _rendered(runs: Sequence[Run], data: Mapping[str, str], *, is_live: bool) -> tuple[str, str]:
    """Returns the page and its policy.

    data: panel -> its data; those of other panels are asked for when they are opened.
    """
    scripts = [plotly(), *(_static(name) for name in SCRIPTS)]
    templates = Environment(
        loader=PackageLoader("gcore_report"), autoescape=True, undefined=StrictUndefined
    )
    head = {"runs": facts_of(runs), "live": is_live}
    policy = _policy(scripts)
    page = templates.get_template("page.html").render(
        title=", ".join(run.label for run in runs),
        panels={name: title for name, (title, _) in PANELS.items()},
        runs=runs,
        policy="" if is_live else policy,
        style=Markup(_static("page.css")),
        scripts=[Markup(script) for script in scripts],
        head=Markup(_json(head)),
        at_once=_AT_ONCE,
        data={name: Markup(text) for name, text in data.items()},
        is_live=is_live,
    )
    return page, policy


def plotly() -> str:
    """Returns the script that draws the charts, as the package ``plotly`` brings it."""
    return files("plotly").joinpath("package_data", "plotly.min.js").read_text("utf-8").strip()


def _static(name: str) -> str:
    return files("gcore_report").joinpath("static", name).read_text("utf-8")


def _policy(scripts: Sequence[str]) -> str:
    """Returns the policy of the file: these scripts, styles, and pictures that are in it."""
    digests = (hashlib.sha256(script.encode()).digest() for script in scripts)
    sources = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {sources}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _json(value: Any) -> str:
    """Returns JSON that may stand within an element ``script``: nothing in it can end that."""
    return msgspec.json.encode(value).decode().replace("<", "\\u003c")


def _packed(value: Any) -> str:
    """Returns a value as JSON, packed by gzip, in base64: a third of its size."""
    return base64.b64encode(gzip.compress(msgspec.json.encode(value), 6, mtime=0)).decode()
