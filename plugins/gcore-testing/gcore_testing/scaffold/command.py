"""``g-core new NAME``: writes the distribution of a new plugin."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from gcore_testing.scaffold import writing

KINDS = (
    "generator, trainer, annotator, role, reward, placement, balancer, advantage, objective, "
    "launcher, observer, hooks, controller, dataset, filter, sentinel, command, view, "
    "environment"
)
_EPILOG = f"""\
kinds of a new plugin: {KINDS},
or PLUGIN/KIND for a template that another plugin brings

example:
  g-core new mine --kind balancer --to gcore-mine
"""


def run(words: Sequence[str]) -> int:
    args = make_parser().parse_intermixed_args(words)
    distribution = writing.write(args.name, args.kind or "", args.to)
    print(distribution.next_steps)
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="g-core new",
        description="Write a distribution to begin with, with a test that fails until its marked "
        "lines are filled in.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", help="the name of the plugin")
    parser.add_argument("--kind", metavar="KIND", help="what it provides")
    parser.add_argument(
        "--to", type=Path, metavar="DIR", help="where it is written; default: gcore-NAME"
    )
    return parser
