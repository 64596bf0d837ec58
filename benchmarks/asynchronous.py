"""Measures the asynchronous program against the synchronous one: each part by a script of its own.

    python benchmarks/asynchronous.py --parts PART ... [--seeds 0 1 2 3 4] [--json] [--check]

A part is a module ``asynchronous_<part>.py`` beside this one, as for ``roles.py``. Runs of both
programs are interleaved, so that both meet the same load. Ratios of times say little on a machine
that others use: the result has the load.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, cast

from report import Claim, add_options, publish

PREFIX = "asynchronous_"


class PartModule(Protocol):
    """What a part's module has."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Adds the part's own words."""

    def measure(self, args: argparse.Namespace) -> Sequence[Claim]:
        """Returns the part's claims.

        args: the parsed words; ``args.seeds`` are the seeds to train over.
        """


def part_names() -> list[str]:
    """Returns the parts that there are, in alphabetical order."""
    files = Path(__file__).parent.glob(f"{PREFIX}*.py")
    return sorted(file.stem.removeprefix(PREFIX) for file in files)


def part_module(name: str) -> PartModule:
    """Imports the module of a part."""
    return cast(PartModule, importlib.import_module(PREFIX + name))


def main() -> int:
    names = part_names()
    parser = argparse.ArgumentParser(description="The asynchronous program beside core/sync.")
    parser.add_argument("--parts", nargs="+", choices=names, default=names)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    modules = {name: part_module(name) for name in names}
    for module in modules.values():
        module.add_arguments(parser)
    add_options(parser)
    args = parser.parse_args()
    claims = [claim for name in args.parts for claim in modules[name].measure(args)]
    # A single part has a result of its own.
    name = PREFIX + args.parts[0] if len(args.parts) == 1 else "asynchronous"
    return publish(name, claims, args, ["gcore-core", "gcore-async", "torch", "transformers"])


if __name__ == "__main__":
    raise SystemExit(main())
