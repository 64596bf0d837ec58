"""``g-core checkpoint list RUN``, ``g-core checkpoint verify PATH``: what a run has saved, and
whether it is whole.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", choices=["list", "verify"], help="list: names and sizes; verify: every byte"
    )
    parser.add_argument(
        "path", type=Path, metavar="PATH", help="a run's directory; for verify also one checkpoint"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of lines"
    )
    parser.epilog = (
        "verify ends with exit code 1 when there is a problem\n\n"
        "examples:\n  g-core checkpoint list runs/quickstart/001\n"
        "  g-core checkpoint verify runs/quickstart/001/checkpoints/step-000020"
    )


def run(args: argparse.Namespace) -> int:
    from gcore_core.cli.checkpoints import list_checkpoints, verify_checkpoints

    act = list_checkpoints if args.action == "list" else verify_checkpoints
    return act(args.path, as_json=args.json)
