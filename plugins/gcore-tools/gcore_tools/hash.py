"""The plugin ``hash``: ``g-core hash PATH`` prints the SHA-256 of a run's final weights, or of a
directory of safetensors.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from gcore_core import hookimpl
from gcore_core.contract.providers import CommandProvider

SUMMARY = "print the SHA-256 of weights"


@hookimpl
def gcore_commands() -> Iterable[CommandProvider]:
    yield CommandProvider(
        summary=SUMMARY,
        factory="gcore_tools.hash:run",
        parser="gcore_tools.hash:make_parser",
    )


def make_parser() -> argparse.ArgumentParser:
    from gcore_core.kits.commands import command_parser

    parser = command_parser("hash", SUMMARY)
    parser.add_argument(
        "path", type=Path, metavar="PATH", help="a run's directory, or one of safetensors files"
    )
    parser.epilog = (
        "It covers each tensor's name, dtype, shape and bytes, and does not depend on how they are "
        "split\ninto files.\n\nexamples:\n  g-core hash runs/quickstart/001\n  g-core hash my-model"
    )
    return parser


def run(words: Sequence[str]) -> int:
    from gcore_core.contract.run_files import WEIGHTS
    from gcore_core.kits.runs import weights_sha256

    args = make_parser().parse_intermixed_args(words)
    is_run = (args.path / WEIGHTS).is_dir()
    print(weights_sha256(args.path / WEIGHTS if is_run else args.path))
    return 0
