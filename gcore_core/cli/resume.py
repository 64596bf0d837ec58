"""``g-core resume RUN``: goes on where its newest checkpoint was saved."""

from __future__ import annotations

import argparse
from pathlib import Path


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", type=Path, metavar="RUN", help="the run's directory, such as runs/quickstart/latest"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],  # else it counts as required
        metavar="key=value",
        help="values that win over the run's, e.g. controller.shards=4",
    )
    parser.epilog = (
        "examples:\n  g-core resume runs/quickstart/latest\n  g-core resume "
        "runs/quickstart/latest roles.policy.slots=2"
    )


def run(args: argparse.Namespace) -> int:
    from gcore_core.contract.errors import ConfigError
    from gcore_core.contract.run_files import CONFIG

    if args.owns_process:
        from gcore_core.run.start import run_with_restarts as run_job
    else:
        from gcore_core.run.start import run_file as run_job

    directory = args.run.expanduser().resolve()
    if not (directory / CONFIG).is_file():
        raise ConfigError(
            "this directory holds no run.",
            where=str(args.run),
            why=f"it has no {CONFIG}",
            todo="give the directory of a run",
        )
    return run_job(directory / CONFIG, args.overrides, directory)
