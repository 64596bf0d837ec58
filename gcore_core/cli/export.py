"""``g-core export RUN_DIR --to DIR``: copies a run's final weights out, in Hugging Face layout."""

from __future__ import annotations

import argparse
from pathlib import Path


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run's directory, e.g. runs/quickstart/001")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="a directory that does not exist yet")
    parser.epilog = "example:\n  g-core export runs/quickstart/001 --to my-model"


def run(args: argparse.Namespace) -> int:
    from gcore_core.cli.exporting import export

    size = export(args.run_dir, args.to)
    print(f"{args.to}: {size / 1e6:.1f} MB")
    return 0
