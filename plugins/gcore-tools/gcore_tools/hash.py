"""``g-core hash PATH``: the SHA-256 of a run's final weights, or of a directory of safetensors."""

from __future__ import annotations

import argparse
from pathlib import Path


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", type=Path, metavar="PATH", help="a run's directory, or one of safetensors files"
    )
    parser.epilog = (
        "It covers each tensor's name, dtype, shape and bytes, and does not depend on how they are "
        "split\ninto files.\n\nexamples:\n  g-core hash runs/quickstart/001\n  g-core hash my-model"
    )


def run(args: argparse.Namespace) -> int:
    from gcore_core.contract.run_files import WEIGHTS
    from gcore_core.run.export import weights_sha256

    is_run = (args.path / WEIGHTS).is_dir()
    print(weights_sha256(args.path / WEIGHTS if is_run else args.path))
    return 0
