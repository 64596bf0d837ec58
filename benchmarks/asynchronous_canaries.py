"""Plants replicas that keep old weights, and counts those that the next step names.

stale_replica_found_share      of the runs in which one of two replicas keeps all or half of the old
                               weights at a push, the share that ends in the step in question with
                               an error that names this replica
stale_replica_planted          how many such runs there were
stale_replica_false_alarms     runs without such a replica that end with an error
stale_replica_found_without    of runs without canaries in which replica 0 keeps half of the
                               weights, the share that ends with any error

Generators are fakes that cannot hash what they hold, in real processes. Every seed has all eight
cases: all or half of the weights, either replica, both ways through a push.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from report import Claim

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.stale_replicas import CASES, finished, named  # noqa: E402


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds no words of its own."""


def measure(args: argparse.Namespace) -> list[Claim]:
    """Returns the part's claims."""
    found = 0
    unseen = 0
    false_alarms = 0
    with tempfile.TemporaryDirectory() as room:
        for seed in args.seeds:
            where = Path(room) / str(seed)
            where.mkdir()
            for number, (kept, replica, midway) in enumerate(CASES):
                code, told = finished(where / f"{number}", kept, replica, midway, seed=seed)
                found += code == 6 and named(told.output, replica)
            for midway in ("wait", "recompute"):
                code, _ = finished(where / f"healthy-{midway}", "", 0, midway, seed=seed)
                false_alarms += code != 0
                blind = {"sentinel": {"canaries": 0}}
                code, _ = finished(where / f"blind-{midway}", "half", 0, midway, seed=seed, **blind)
                unseen += code == 0
            print(f"seed {seed}: {found} found", file=sys.stderr)
    planted = len(CASES) * len(args.seeds)
    blind_runs = 2 * len(args.seeds)
    return [
        Claim("stale_replica_found_share", found / planted, "share", 1.0),
        Claim("stale_replica_planted", planted, "runs"),
        Claim("stale_replica_false_alarms", false_alarms, "runs", 0, "<="),
        Claim("stale_replica_found_without", 1 - unseen / blind_runs, "share"),
    ]
