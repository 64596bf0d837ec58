"""``g-core run FILE``: trains."""

from __future__ import annotations

import argparse
from pathlib import Path


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="the job, a YAML file")
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],  # else it counts as required
        metavar="key=value",
        help="values that win over the file, e.g. run.steps=10",
    )
    parser.epilog = (
        "examples:\n  g-core run job.yaml\n  g-core run job.yaml run.steps=10 roles.rollout.slots=2"
    )


def run(args: argparse.Namespace) -> int:
    if args.owns_process:
        from gcore_core.run.start import run_with_restarts as run_job
    else:
        from gcore_core.run.start import run_file as run_job

    return run_job(args.file, args.overrides)
