"""Writes docs/reference/benchmarks.md from the results, and reads figures in other pages.

    python benchmarks/page.py [--check]

A figure that a page takes from a result stands before a comment that names the claim:

    1.75<!-- result: quickstart.samples_per_cpu_second_over_trl -->

It must be the claim's value, rounded to the digits that are shown; a figure followed by % is 100
times the value. ``* 1000`` or ``/ 1024`` after the name changes the unit.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import report
from measured import BENCHMARKS, RESULTS, ROOT, Benchmark, digest

PAGE = ROOT / "docs" / "reference" / "benchmarks.md"
HEAD = """\
<!-- Written by benchmarks/page.py from benchmarks/results; a change by hand is lost. -->

```{include} ../../benchmarks/README.md
:relative-docs: .
```

## Results

Each table is the file of the same name in `benchmarks/results`. `tox run -e results` measures those
again that are **stale**: code that they measure has changed since. An interval holds 95% of
bootstrap draws of the repetitions (rounds, draws or seeds). What was measured once, a count and the
worst of all repetitions have none. *missed* marks a claim that does not hold its bar. *Loop* is a
fixed loop of Python, timed after the benchmark: how fast the processor was. At the end stands what
came of the tests that take hours, part by part.
"""
FIGURE = re.compile(
    r"(?P<number>[\d,]*\d(?:\.\d+)?)(?P<percent>\s?%)?(?P<words>[^\d<\n]{0,12})"
    r"<!-- result: (?P<claim>[^\s>]+)(?: (?P<op>[*/]) (?P<factor>[\d.]+))? -->"
)
COMMENT = "<!-- result:"


@dataclass(frozen=True)
class Figure:
    """A number in a page that a result gives.

    shown: as the page writes it, without thousands' commas.
    claim: the result's file and the claim in it, as in "quickstart.accuracy_gain_min".
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


def results() -> dict[str, dict[str, Any]]:
    """Returns the committed results by the names of their benchmarks."""
    return {
        benchmark.name: json.loads(benchmark.result.read_text())
        for benchmark in BENCHMARKS
        if benchmark.result.exists()
    }


def values(by_name: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Returns the value of each claim by "result.claim"."""
    return {
        f"{name}.{claim['name'].replace(' ', '_')}": claim["value"]
        for name, result in by_name.items()
        for claim in result["claims"]
    }


def wrong_figures(text: str, value_of: dict[str, float]) -> list[str]:
    """Returns a line for each figure of a page that differs from its result or has none."""
    lines = []
    for figure in figures(text):
        if figure.claim not in value_of:
            lines.append(f"{figure.shown}: no result has a claim {figure.claim}")
        elif not figure.is_rounded_from(value_of[figure.claim]):
            value = value_of[figure.claim] * figure.scale
            lines.append(f"{figure.shown}: {figure.claim} is {value:.6g}")
    return lines


def pages() -> list[Path]:
    """Returns the pages that may have figures: docs and all READMEs."""
    folders = ("docs/**/*.md", "plugins/*/README.md")
    return [ROOT / "README.md", *(path for f in folders for path in sorted(ROOT.glob(f)))]


def is_stale(benchmark: Benchmark, result: dict[str, Any]) -> bool:
    """Whether a file that the benchmark measures is not as it was when it was measured."""
    return bool(result.get("code") != digest(benchmark.paths))


def render() -> str:
    """Returns the page of results."""
    sections = [HEAD]
    for benchmark in BENCHMARKS:
        if benchmark.result.exists():
            result = json.loads(benchmark.result.read_text())
            sections.append(section(result, stale=is_stale(benchmark, result)))
        else:
            sections.append(f"### {benchmark.name}\n\nNot measured yet.\n")
    sections.append(long_tests())
    return "\n".join(sections)


def long_tests() -> str:
    """Returns the part of the page for tests that run part by part (tests/parts.py)."""
    commands = "`tox run -e engines`, `tox run -e nightly` and `tox run -e recipes`"
    head = f"### Tests that take hours\n\n{commands}: "
    path = RESULTS / "long_tests.json"
    if not path.exists():
        return f"{head}not run yet.\n"
    result = json.loads(path.read_text())
    passed = sum(part["outcome"] == "passed" for part in result["parts"].values())
    lines = [
        f"{head}{passed} of {len(result['parts'])} parts that ran passed, on "
        f"{result['machine']['cores']} cores ({result['machine']['processor']}).",
        "",
        "| part | outcome | seconds | commit |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| `{part}` | {entry['outcome']} | {entry['seconds']:,} | `{entry['commit'][:12]}` |"
        for part, entry in result["parts"].items()
    ]
    return "\n".join([*lines, ""])


def section(result: dict[str, Any], *, stale: bool) -> str:
    """Returns the part of the page for one result."""
    machine = result["machine"]
    accelerator = f"one {machine['accelerator']}, " if "accelerator" in machine else ""
    loop = f", loop {machine['loop_ms']:g} ms" if "loop_ms" in machine else ""
    lines = [
        f"### {result['benchmark']}",
        "",
        f"{'**stale**: ' if stale else ''}measured on {result['date']} at commit "
        f"`{result['commit'][:12]}` on {accelerator}{machine['cores']} cores "
        f"({machine['processor']}), "
        f"{machine['memory_gib']} GiB; load {machine['load_1min']:g} at its end{loop}.",
        "",
        "| claim | value | 95% interval | unit | bar | |",
        "|---|---|---|---|---|---|",
    ]
    with_bar = [claim for claim in result["claims"] if claim["bar"] is not None]
    without = [claim for claim in result["claims"] if claim["bar"] is None]
    lines += [row(claim) for claim in (*with_bar, *without)]
    return "\n".join([*lines, ""])


def row(claim: dict[str, Any]) -> str:
    """Returns a claim's row in the table."""
    ends = claim.get("interval")
    interval = "" if ends is None else f"{number(ends[0])} to {number(ends[1])}"
    bar = ""
    verdict = ""
    if claim["bar"] is not None:
        bar = f"{claim['op']} {number(claim['bar'])}"
        verdict = "met" if report.HOLDS[claim["op"]](claim["value"], claim["bar"]) else "**missed**"
    cells = [f"`{claim['name']}`", number(claim["value"]), interval, claim["unit"], bar, verdict]
    return "| " + " | ".join(cells) + " |"


def number(value: float) -> str:
    """Returns a number with four digits that count; whole ones whole."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.4g}"


def write() -> None:
    """Writes the page of results."""
    PAGE.write_text(render())


def complaints() -> list[str]:
    """Returns a line for each figure of any page that is not that of its result."""
    value_of = values(results())
    return [
        f"{path.relative_to(ROOT)}: {line}"
        for path in pages()
        for line in wrong_figures(path.read_text(), value_of)
    ]


def stale_names() -> list[str]:
    """Returns the benchmarks whose results are older than what they measure."""
    known = results()
    return [b.name for b in BENCHMARKS if b.name in known and is_stale(b, known[b.name])]


def main() -> int:
    parser = argparse.ArgumentParser(description="The page of results, and figures in other pages.")
    parser.add_argument("--check", action="store_true", help="write nothing; say what differs")
    args = parser.parse_args()
    if not args.check:
        write()
    lines = complaints()
    if PAGE.read_text() != render():
        lines.append(f"{PAGE.relative_to(ROOT)} is not what {Path(__file__).name} makes")
    print("\n".join(lines) or f"{len(results())} results, no figure differs")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
