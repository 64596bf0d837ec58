"""``g-core demo``: two runs of the quickstart at once, one of them killed; their weights compared.

Exit code: 0 the weights are the same, 1 they are not.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from gcore_core.contract.errors import ConfigError
from gcore_core.kits.commands import command_parser
from gcore_tools.demo import SUMMARY

_EVERY_S = 5.0  # between two lines of progress where no terminal replaces them


def make_parser() -> argparse.ArgumentParser:
    parser = command_parser("demo", SUMMARY)
    parser.add_argument("--steps", type=int, default=40, help="steps of each run (40)")
    parser.add_argument(
        "--kills", type=int, default=2, help="processes of the second run to kill (2)"
    )
    parser.add_argument("--seed", type=int, default=7, help="of both runs and of the kills (7)")
    parser.add_argument(
        "--recipe", type=Path, metavar="FILE", help="train this file instead of the quickstart"
    )
    parser.epilog = (
        "The runs are in runs/demo/<NNN>. Exit code: 0 the same weights, 1 not.\n\n"
        "example:\n  g-core demo --steps 20 --kills 3"
    )
    return parser


def run(words: Sequence[str]) -> int:
    """Trains both runs, prints how that goes, and returns the exit code."""
    from gcore_tools.demo import trainings

    args = make_parser().parse_args(words)
    settings = trainings.Settings(
        steps=_at_least(4, "--steps", args.steps),
        kills=_at_least(0, "--kills", args.kills),
        seed=args.seed,
        recipe=trainings.find_recipe(args.recipe),
    )
    # SIGTERM ends both runs as Ctrl-C does.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    show = _Lines()
    try:
        shown = _from_here(settings.recipe)
        print(f"training {shown} twice, {settings.steps} steps each", flush=True)
        outcome = trainings.run(settings, show)
    except KeyboardInterrupt:
        show.end()
        print("stopped; every process has ended")
        return 130
    finally:
        show.end()
        signal.signal(signal.SIGTERM, before)
    kills = len(outcome.kills)
    names = "undisturbed", "killed " + {1: "once", 2: "twice"}.get(kills, f"{kills} times")
    for name, sha256 in zip(names, outcome.hashes, strict=True):
        print(f"{name:{max(map(len, names))}}  {sha256}")
    if len(set(outcome.hashes)) == 1:
        print("same")
        return 0
    runs = f"{outcome.directory / trainings.UNDISTURBED} {outcome.directory / trainings.KILLED}"
    print(f"differs; where they part: g-core diff {runs}")
    return 1


def _from_here(path: Path) -> Path:
    """Returns the path as one would type it: without the working directory, where it is in it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _at_least(least: int, option: str, value: int) -> int:
    if value < least:
        raise ConfigError(f"must be at least {least}, is {value}", where=option)
    return value


class _Lines:
    """Prints lines; on a terminal, one that does not stay is replaced by the next.

    Elsewhere, such a line is printed every few seconds only.
    """

    def __init__(self) -> None:
        self._is_live = sys.stdout.isatty()
        self._is_open = False
        self._printed_s = -_EVERY_S

    def __call__(self, text: str, stays: bool) -> None:
        if not self._is_live:
            now_s = time.monotonic()
            if stays or now_s - self._printed_s >= _EVERY_S:
                print(text, flush=True)
            if not stays and now_s - self._printed_s >= _EVERY_S:
                self._printed_s = now_s
            return
        print(f"\r\x1b[K{text[:100]}", end="\n" if stays else "", flush=True)
        self._is_open = not stays

    def end(self) -> None:
        """Ends a line that would be replaced."""
        if self._is_open:
            print("\r\x1b[K", end="", flush=True)
        self._is_open = False
