"""Writes the results of the museum as a page of Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gcore_testing import museum
from gcore_testing.museum import KINDS, Exhibit, Finding

_HEAD = """\
# The museum of silent faults

Each exhibit plants a fault that was reported in public into a small run, and shows what G-Core says
of it. `python -m tests.museum run --page FILE` wrote this page.

How faults are planted, and what outcomes mean, is in tests/museum/README.md.
`steps` is how many steps ended between the first act of the fault and the end of the run: 0 is the
same step.

What a thread says is its authors' claim. Only its cause was built again here, on a small model, so
sizes differ. Below each exhibit stands the whole message of the run, which says where the fault is
(step, tensor, replica or record) and its cause; the line above it lists the words that were
expected of it. A fault that is not found stands here as not found.

"""


def page_of(exhibits: Sequence[Exhibit], findings: Sequence[Finding]) -> str:
    """Returns the page: totals, then each kind with a section for every exhibit."""
    pairs = list(zip(exhibits, findings, strict=True))
    faults = [finding for exhibit, finding in pairs if not exhibit.control]
    in_time = sum(f.delay_steps is not None and f.delay_steps <= 1 for f in faults)
    named = sum(finding.outcome == museum.FOUND for finding in faults)
    alarms = sum(finding.outcome == museum.FALSE_ALARM for finding in findings)
    lines = [
        f"{len(faults)} faults: {in_time} ended the run within one step, "
        f"{named} were named as expected."
        f" {len(findings) - len(faults)} negative controls: {alarms} false alarms.",
        "",
        "| kind | exhibit | thread | outcome | steps | detector |",
        "|---|---|---|---|---|---|",
    ]
    for exhibit, finding in pairs:
        steps = "" if finding.delay_steps is None else str(finding.delay_steps)
        lines.append(
            f"| {exhibit.kind} | [{exhibit.id}](#{exhibit.id}) | {exhibit.thread} | "
            f"{finding.outcome} | {steps} | {exhibit.expected.detector} |"
        )
    for kind, title in KINDS.items():
        of_kind = [pair for pair in pairs if pair[0].kind == kind]
        if of_kind:
            lines += ["", f"## {kind}: {title}"]
        for exhibit, finding in of_kind:
            lines += ["", *_section(exhibit, finding)]
    return _HEAD + "\n".join(lines) + "\n"


def _section(exhibit: Exhibit, finding: Finding) -> list[str]:
    control = " A negative control." if exhibit.control else ""
    lines = [
        f"### {exhibit.id}",
        "",
        f"{exhibit.fault}{control} Thread: {exhibit.thread}. Shown then: {exhibit.shown}.",
        "",
    ]
    if not finding.error:
        return [*lines, f"Said here: nothing ({finding.outcome})."]
    # files by their name alone: where they lie is one machine's matter
    said = re.sub(r"/\S+/(?=[^/\s]+\.\w+)", "", finding.said)
    when = {0: "in the same step", 1: "one step later"}.get(finding.delay_steps or 0, "later")
    named = ", ".join(f"`{text}`" for text in exhibit.expected.names if text in finding.said)
    names = f"; it names {named}" if named else ""
    return [
        *lines,
        f"Said here {when} ({exhibit.expected.detector}){names}:",
        "",
        f"```text\n{finding.error}: {said}\n```",
    ]
