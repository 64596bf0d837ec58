"""``g-core trace RUN``: what a run's trace says in numbers, or the whole of it as a timeline for
Perfetto.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_dir",
        type=Path,
        metavar="RUN_DIR",
        help="the run's directory, e.g. runs/quickstart/001",
    )
    parser.add_argument(
        "--perfetto", type=Path, metavar="FILE", help="write a timeline that ui.perfetto.dev opens"
    )
    parser.add_argument("--json", action="store_true", help="print the numbers as one JSON object")
    parser.epilog = "example:\n  g-core trace runs/quickstart/001 --perfetto timeline.json"


def run(args: argparse.Namespace) -> int:
    from gcore_core.cli.tracing import numbers, timeline
    from gcore_core.contract.run_files import read_trace

    lines = list(read_trace(args.run_dir))
    if args.perfetto is not None:
        args.perfetto.write_text(
            json.dumps({"traceEvents": list(timeline(lines)), "displayTimeUnit": "ms"})
        )
        print(f"{args.perfetto}: open it in ui.perfetto.dev")
        return 0
    told = numbers(lines)
    if args.json:
        print(json.dumps(told, indent=2))
    else:
        for name, value in told.items():
            print(f"{name:<28} {value:12.4g}")
    return 0
