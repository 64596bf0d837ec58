"""Runs ``g-core report``."""

from __future__ import annotations

import argparse
from pathlib import Path

from gcore_core.contract.errors import ConfigError

_EPILOG = """\
The file needs no network and no server; what it leaves out of long runs, it says itself.

examples:
  g-core report runs/quickstart/latest
  g-core report runs/quickstart/001 runs/quickstart/002 --to compared.html
"""


def report(words: list[str]) -> int:
    """Runs ``g-core report`` with these words; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="g-core report",
        description="Writes one HTML file that shows a run, or compares several.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's directory")
    parser.add_argument(
        "--to", type=Path, metavar="FILE", help="where to write; default: RUN/report.html"
    )
    args = parser.parse_args(words)
    from gcore_report.page.document import report as page_of
    from gcore_report.page.runs import open_runs

    runs = open_runs(args.runs)
    path = args.to or runs[0].directory / "report.html"
    text = page_of(runs)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"the page cannot be written: {error.strerror}.",
            where=str(path),
            todo="name another file: --to FILE",
        ) from error
    print(f"{path}: {len(text.encode()) / 2**20:.1f} MiB; open it in a browser")
    return 0
