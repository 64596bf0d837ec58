"""Runs a benchmark that has parts, each a module of its own: ``<name>_<part>.py``."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, cast

from report import Claim, add_options, publish


class PartModule(Protocol):
    """What a part's module has."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Adds the part's own words."""

    def measure(self, args: argparse.Namespace) -> Sequence[Claim]:
        """Returns the part's claims. args: the parsed words."""


def part_names(benchmark: str) -> list[str]:
    """Returns the parts that there are, in alphabetical order."""
    files = Path(__file__).parent.glob(f"{benchmark}_*.py")
    return sorted(file.stem.removeprefix(f"{benchmark}_") for file in files)


def run_parts(
    benchmark: str, description: str, packages: Sequence[str], seeds: Sequence[int] = ()
) -> int:
    """Measures the parts that the command line names, or all; returns the exit code.

    benchmark: its name, with which the files of its parts begin.
    packages: whose versions the result tells.
    seeds: default of ``--seeds``; none: its parts train over no seeds.
    """
    names = part_names(benchmark)
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--parts", nargs="+", choices=names, default=names)
    if seeds:
        parser.add_argument("--seeds", nargs="+", type=int, default=list(seeds))
    modules = {
        name: cast(PartModule, importlib.import_module(f"{benchmark}_{name}")) for name in names
    }
    for module in modules.values():
        module.add_arguments(parser)
    add_options(parser)
    args = parser.parse_args()
    claims = [claim for name in args.parts for claim in modules[name].measure(args)]
    # A single part has a result of its own.
    name = f"{benchmark}_{args.parts[0]}" if len(args.parts) == 1 else benchmark
    return publish(name, claims, args, list(packages))
