"""The commands ``run`` and ``list`` of the museum."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gcore_testing import museum
from gcore_testing.museum import Exhibit, Finding

from gcore_core.contract.errors import ConfigError, did_you_mean
from gcore_core.kits.commands import print_table, run_file
from tests.museum.page import page_of

JOB = Path(__file__).parent / "job.yaml"
#: Outcomes of which none may be left for the museum to be in order.
_WRONG = (museum.FALSE_ALARM, museum.IDLE, museum.CRASHED)


def run(words: Sequence[str]) -> int:
    """Plants the named exhibits, or all; returns 1 when one crashed, did not act, or was a false
    alarm.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tests.museum run",
        description="Plant faults that were reported in public into small runs.",
    )
    parser.add_argument("ids", nargs="*", metavar="ID", help="exhibits; all without one")
    parser.add_argument("--kind", default="", metavar="LETTERS", help="only these kinds, as AC")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the results as a page")
    args = parser.parse_args(list(words))
    exhibits = chosen(args.ids, args.kind)
    findings = findings_of(exhibits)
    if args.page:
        args.page.write_text(page_of(exhibits, findings), encoding="utf-8")
    if args.json:
        print(json.dumps(as_json(exhibits, findings), indent=2))
    else:
        show(exhibits, findings)
    return int(any(finding.outcome in _WRONG for finding in findings))


def findings_of(exhibits: Sequence[Exhibit]) -> list[Finding]:
    """Plants each exhibit into a run of its own, in this process; says on stderr how each went."""
    findings = []
    with tempfile.TemporaryDirectory(prefix="g-core-museum-") as directory:
        for exhibit in exhibits:
            began_s = time.monotonic()
            findings.append(museum.show(exhibit, JOB, Path(directory) / exhibit.id, run_file))
            seconds = time.monotonic() - began_s
            print(f"{exhibit.id}: {findings[-1].outcome} ({seconds:.1f} s)", file=sys.stderr)
    return findings


def list_exhibits(words: Sequence[str]) -> int:
    """Prints every exhibit with its thread and its fault."""
    argparse.ArgumentParser(
        prog="python -m tests.museum list", description="List every exhibit."
    ).parse_args(list(words))
    rows = [[e.kind, e.id, e.thread, "control" if e.control else "", e.fault] for e in chosen()]
    print_table(["kind", "id", "thread", "", "fault"], rows)
    return 0


def chosen(ids: Sequence[str] = (), kinds: str = "") -> list[Exhibit]:
    """Returns the exhibits of these ids and kinds.

    Raises ConfigError for an id that none has, and for a letter that is no kind.
    """
    from tests.museum.exhibits import ALL

    by_id = {exhibit.id: exhibit for exhibit in ALL}
    for word in ids:
        if word not in by_id:
            raise ConfigError(
                f"the museum has no exhibit {word!r}{did_you_mean(word, list(by_id))}.",
                where="python -m tests.museum run",
                todo="python -m tests.museum list",
            )
    for letter in kinds:
        if letter not in museum.KINDS:
            raise ConfigError(
                f"the museum has no kind {letter!r}.",
                where="python -m tests.museum run --kind",
                todo=f"Take some of {''.join(museum.KINDS)}.",
            )
    return [e for e in ALL if (not ids or e.id in ids) and (not kinds or e.kind in kinds)]


def as_json(exhibits: Sequence[Exhibit], findings: Sequence[Finding]) -> dict[str, Any]:
    """Returns what ``--json`` prints.

    ``real_faults``: how many exhibits are no controls. ``found_within_one_step``: how many of these
    ended the run before the step after the one in which they acted first had ended. ``named``: how
    many of these with the error and the words that were expected. ``quiet_controls``: how many
    controls acted, and their run went to its end.
    """
    faults = [f for e, f in zip(exhibits, findings, strict=True) if not e.control]
    in_time = [f for f in faults if f.delay_steps is not None and f.delay_steps <= 1]
    return {
        "real_faults": len(faults),
        "found_within_one_step": len(in_time),
        "named": sum(f.outcome == museum.FOUND for f in faults),
        "controls": len(findings) - len(faults),
        "quiet_controls": sum(f.outcome == museum.QUIET for f in findings),
        "false_alarms": sum(f.outcome == museum.FALSE_ALARM for f in findings),
        "outcomes": museum.counts(findings),
        "findings": [finding.as_dict() for finding in findings],
    }


def show(exhibits: Sequence[Exhibit], findings: Sequence[Finding]) -> None:
    """Prints a row for each finding, and below it all messages that were not as expected."""
    rows = [
        [
            finding.kind,
            finding.id,
            finding.thread,
            finding.outcome,
            "" if finding.delay_steps is None else str(finding.delay_steps),
            exhibit.expected.detector,
            finding.said.partition("\n")[0],
        ]
        for exhibit, finding in zip(exhibits, findings, strict=True)
    ]
    print_table(["kind", "exhibit", "thread", "outcome", "steps", "detector", "said"], rows)
    for finding in findings:
        if finding.outcome in (museum.OTHERWISE, museum.CRASHED, museum.FALSE_ALARM):
            lacking = f" (lacks {', '.join(finding.lacking)})" if finding.lacking else ""
            print(f"\n{finding.id}: {finding.outcome}{lacking}\n  {finding.error}: {finding.said}")
    totals = ", ".join(f"{count} {name}" for name, count in museum.counts(findings).items())
    print(f"\n{len(findings)} exhibits: {totals}")
