"""Reads the figures of pages, and the file of the release that they are of.

A figure that was measured stands before a comment that names the claim it is:

    1.64<!-- result: quickstart.samples_per_cpu_second_over_trl -->

It must be the claim's value, rounded to the digits that are shown; a figure followed by % is 100
times the value. ``* 1000`` or ``/ 1024`` after the name changes the unit. A page with such figures
links to the file of the release that they are of, such as ``benchmarks/releases/0.2.json``.

A file of another name, such as ``0.2-core.json``, is a yardstick: tests and people compare a later
version with it, and no page quotes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RELEASES = ROOT / "benchmarks" / "releases"
FIGURE = re.compile(
    r"(?P<number>[\d,]*\d(?:\.\d+)?)(?P<percent>\s?%)?(?P<words>[^\d<\n()]{0,12})"
    r"<!-- result: (?P<claim>[^\s>]+)(?: (?P<op>[*/]) (?P<factor>[\d.]+))? -->"
)
COMMENT = "<!-- result:"
NUMBER = re.compile(r"[\d.]+")
LINK = re.compile(r"\bbenchmarks/releases/([\d.]+\d)\.json\)")


@dataclass(frozen=True)
class Figure:
    """A number in a page that was measured.

    shown: as the page writes it, without thousands' commas.
    claim: the benchmark and its claim, as in "quickstart.accuracy_gain_min".
    scale: what the claim's value is multiplied with.
    """

    shown: str
    claim: str
    scale: float

    def is_rounded_from(self, value: float) -> bool:
        """Whether the page's number is the value, rounded to as many digits."""
        digits = len(self.shown.partition(".")[2])
        # half a unit of the last digit, and what float arithmetic adds
        return abs(float(self.shown) - value * self.scale) <= 0.5 * 10**-digits * (1 + 1e-9)


def figures(text: str) -> Iterator[Figure]:
    """Yields the figures of a page. Raises ValueError for a comment without a number before it."""
    marks = list(FIGURE.finditer(text))
    if len(marks) != text.count(COMMENT):
        raise ValueError(f"{text.count(COMMENT)} comments name a result, {len(marks)} of a number")
    for mark in marks:
        scale = 100.0 if mark["percent"] else 1.0
        if mark["factor"]:
            factor = float(mark["factor"])
            scale = scale * factor if mark["op"] == "*" else scale / factor
        yield Figure(mark["number"].replace(",", ""), mark["claim"], scale)


def pages() -> list[Path]:
    """Returns the pages that may have figures: docs and all READMEs; none where they are not."""
    patterns = ("README.md", "docs/**/*.md", "plugins/*/README.md")
    return [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]


@lru_cache(maxsize=1)
def quoted() -> frozenset[str]:
    """Returns the claims that any page quotes."""
    return frozenset(figure.claim for page in pages() for figure in figures(page.read_text()))


def claim_name(benchmark: str, name: str) -> str:
    """Returns the name by which pages quote a claim of a benchmark."""
    return f"{benchmark}.{name.replace(' ', '_')}"


def releases() -> list[str]:
    """Returns the releases that have figures, the oldest first."""
    names = [file.stem for file in RELEASES.glob("*.json") if NUMBER.fullmatch(file.stem)]
    return sorted(names, key=lambda name: [int(part) for part in name.split(".")])


def has_file(name: str) -> bool:
    """Whether there are figures of a release, or a yardstick, of this name."""
    return (RELEASES / f"{name}.json").exists()


def read_release(name: str) -> dict[str, dict[str, Any]]:
    """Returns the figures of a release by claim: value, unit, interval, commit, date, machine."""
    return dict(json.loads((RELEASES / f"{name}.json").read_text())["figures"])


def write_release(name: str, figures_of: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes the figures of a release, one a line."""
    lines = [f"    {json.dumps(claim)}: {json.dumps(figures_of[claim])}" for claim in figures_of]
    body = ",\n".join(sorted(lines))
    text = f'{{\n  "release": "{name}",\n  "figures": {{\n{body}\n  }}\n}}\n'
    (RELEASES / f"{name}.json").write_text(text)


def wrong_figures(text: str, release: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns a line for each figure of a page that the release does not have, or otherwise."""
    lines = []
    for figure in figures(text):
        if figure.claim not in release:
            lines.append(f"{figure.shown}: the release has no claim {figure.claim}")
        elif not figure.is_rounded_from(release[figure.claim]["value"]):
            value = release[figure.claim]["value"] * figure.scale
            lines.append(f"{figure.shown}: {figure.claim} is {value:.6g}")
    return lines


def complaints_of(text: str) -> list[str]:
    """Returns what is wrong with the figures of a page, and with the release that it names."""
    if COMMENT not in text:
        return []
    names = set(LINK.findall(text))
    if len(names) != 1 or not names <= set(releases()):
        return [f"links to the releases {sorted(names)}; its figures are of one of {releases()}"]
    return wrong_figures(text, read_release(names.pop()))


def complaints() -> list[str]:
    """Returns a line for whatever is wrong with the figures of any page."""
    return [
        f"{page.relative_to(ROOT)}: {line}"
        for page in pages()
        for line in complaints_of(page.read_text())
    ]


def without_place() -> list[str]:
    """Returns the figures of the newest release that no page quotes."""
    return sorted(read_release(releases()[-1]).keys() - quoted())
