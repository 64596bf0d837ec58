"""Measures what the recipe of noughts and crosses learns, for ``environments.py``.

selfplay_win_rate_against_start_min
                        share of games that the policy wins after the run of recipes/noughts.yaml
                        against the model that it began as, of the worst seed; a draw is not won.
                        The policy takes the likeliest move, the opponent samples, and each begins
                        in half of the held-out games
selfplay_sampled_win_rate_against_start_min
                        the same where the policy samples at temperature 1
selfplay_win_rate_before
                        the first before the run, mean over seeds
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

import quickstart_runs as runs
from report import Claim

from gcore_core.config.plan import load_plan

RECIPE = Path(__file__).parents[1] / "recipes/noughts.yaml"


def selfplay(args: argparse.Namespace, folder: Path) -> list[Claim]:
    """Returns what the game's runs say. The opponent of a seed is the start of that seed."""
    before, after, sampled = [], [], []
    for seed in args.seeds:
        directory = folder / f"noughts-{seed}"
        overrides = runs.overrides_of(seed, directory)
        overrides.append(f"roles.opponent.model.make.config.seed={seed}")
        if args.steps:
            overrides.append(f"run.steps={args.steps}")
        plan = load_plan(RECIPE, overrides)
        runs.make_policy(plan.config, folder)
        words, log = ["run", str(RECIPE), *overrides], folder / f"noughts-{seed}.log"
        began_s = time.perf_counter()
        runs.require_success(runs.start(words, folder, log), words, log)
        seconds = time.perf_counter() - began_s
        rows = runs.finished_rows(directory, plan.at("run.steps"))
        before.append(rows[0]["evaluation"]["greedy/win"])
        after.append(rows[-1]["evaluation"]["greedy/win"])
        sampled.append(rows[-1]["evaluation"]["sampled/win"])
        print(
            f"noughts, seed {seed}: {before[-1]:.3f} -> {after[-1]:.3f} in {seconds:.0f} s, "
            f"load {os.getloadavg()[0]:.1f}",
            file=sys.stderr,
        )
    return [
        Claim("selfplay_win_rate_against_start_min", min(after), "share", 0.8),
        Claim("selfplay_sampled_win_rate_against_start_min", min(sampled), "share"),
        Claim("selfplay_win_rate_before", statistics.fmean(before), "share"),
    ]
