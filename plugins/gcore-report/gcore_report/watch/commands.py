"""Runs ``g-core watch``."""

from __future__ import annotations

import argparse
from pathlib import Path

from gcore_core.contract.errors import ConfigError

_LARGEST_PORT = 65535
_EPILOG = """\
The page is on 127.0.0.1 alone. From another machine, make a tunnel: ssh -L PORT:127.0.0.1:PORT HOST

Its buttons save and stop a run on the machine that the run was started on.

example:
  g-core watch runs/quickstart/latest
"""


def watch(words: list[str]) -> int:
    """Runs ``g-core watch`` with these words, until it is stopped."""
    parser = argparse.ArgumentParser(
        prog="g-core watch",
        description="Serves the page of a run while it goes on.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's directory")
    parser.add_argument(
        "--port", type=int, default=0, metavar="PORT", help="default: one that is free"
    )
    args = parser.parse_args(words)
    if not 0 <= args.port <= _LARGEST_PORT:
        raise ConfigError(
            f"{args.port} is no port.",
            where="--port",
            todo=f"give a number from 0 to {_LARGEST_PORT}, or none for a free port",
        )
    from gcore_report.page.runs import open_runs
    from gcore_report.watch.serving import serve

    (run,) = open_runs([args.run])
    serve(run, args.port)
    return 0
