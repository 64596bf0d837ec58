"""``g-core config FILE``: prints the resolved configuration, or why a key has its value."""

from __future__ import annotations

import argparse
from pathlib import Path


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="the job, a YAML file")
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key=value",
        help="values that win over the file",
    )
    parser.add_argument("--why", metavar="KEY", help="print this key's value and where it was set")
    parser.epilog = (
        "examples:\n  g-core config job.yaml\n  g-core config job.yaml --why "
        "controller run.steps=10"
    )


def run(args: argparse.Namespace) -> int:
    from gcore_core.config.plan import load_plan

    plan = load_plan(args.file, args.overrides)
    if args.why:
        print(plan.why(args.why))
    else:
        from gcore_core.config.yaml_source import written

        print(written(plan.config), end="")
    return 0
