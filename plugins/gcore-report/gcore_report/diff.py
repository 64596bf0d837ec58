"""The plugin ``diff`` says where two runs part, and why: ``g-core diff RUN RUN``.

Exit code: 0 they are the same, 1 they are not, 2 bad input.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from gcore_core import hookimpl
from gcore_core.contract.providers import CommandProvider

if TYPE_CHECKING:
    from gcore_report.comparison import Comparison

_SHOWN = 6  # differences besides the likely cause
_EPILOG = """\
exit code: 0 the same, 1 they differ, 2 a directory that cannot be compared

example:
  g-core diff runs/quickstart/001 runs/quickstart/002
"""


@hookimpl
def gcore_commands() -> Iterable[CommandProvider]:
    yield CommandProvider(
        summary="say where two runs part, and why",
        factory="gcore_report.diff:diff",
        parser="gcore_report.diff:make_parser",
    )


def diff(words: list[str]) -> int:
    """Runs ``g-core diff`` with these words; returns the exit code."""
    args = make_parser().parse_intermixed_args(words)
    import msgspec

    from gcore_report.comparison import compare

    comparison = compare(args.first, args.second)
    if args.json:
        print(msgspec.json.encode(comparison).decode())
    else:
        print("\n".join(lines_of(comparison)))
    return 0 if comparison.same else 1


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser of ``g-core diff``."""
    parser = argparse.ArgumentParser(
        prog="g-core diff",
        description="Say where two runs part, and why.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_EPILOG,
    )
    for name in ("first", "second"):
        parser.add_argument(name, type=Path, metavar="RUN", help="a run's directory")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def lines_of(comparison: Comparison) -> list[str]:
    """Returns what a person reads of a comparison."""
    if comparison.same:
        lines = [f"same: every stage of all {comparison.steps[0]} steps"]
    else:
        lines = _parting(comparison)
    hashes = comparison.weights_sha256
    if any(hashes):
        lines += [f"weights_sha256 {hash_ or '(no final weights)'}" for hash_ in hashes]
    return lines


def _parting(comparison: Comparison) -> list[str]:
    lines = [f"they part at step {comparison.step}, stage {comparison.stage}"]
    if record := comparison.record:
        rows = list(dict.fromkeys(str(row) for row in record.row if row is not None))
        of_row = f", row {' | '.join(rows)}" if rows else ""
        lines.append(f"record: ordinal {record.ordinal}, sample {record.sample}{of_row}")
    if comparison.tensor:
        lines.append(f"tensor: {comparison.tensor}")
    lines += [f"  {line}" for line in comparison.details]
    lines.append(f"likely cause: {comparison.cause}")
    others = [one for one in comparison.differences if one != comparison.cause]
    lines += [f"  differs, too: {one}" for one in others[:_SHOWN]]
    if len(others) > _SHOWN:
        lines.append(f"  and {len(others) - _SHOWN} more: --json")
    return lines
