"""``g-core sentinel calibrate``: makes a table of healthy gaps from runs that kept theirs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from gcore_core.contract.errors import DataError
from gcore_core.contract.sentinel import Pair
from gcore_core.kits.commands import write_file
from gcore_sentinel.evidence import (
    EDGES,
    MOMENTS,
    Cusum,
    Table,
    counts,
    log_e,
    quantiles_of,
    slope_moments,
    slope_terms,
    worst_shares_of,
    worst_slope_of,
)
from gcore_sentinel.tables import TableFile, shown

_EPILOG = """\
example:
  for seed in 1 2 3; do
    g-core run job.yaml run.seed=$seed run.dir=healthy/$seed sentinel.config.keep=true
  done
  g-core sentinel calibrate healthy/1 healthy/2 healthy/3 --out table.json
  g-core run job.yaml sentinel.config.table=table.json

A table takes what it is shown for healthy: a fault that is there from the start, such as another
temperature, goes into it. Compare one run in float32 first, where the band finds such faults.
"""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Holds what one run compared, action by action.

    pair, model: of the run.
    rollout, trainer: float32[n].
    entropy: float32[n], not a number where it was not computed.
    step, ordinal: int64[n].
    """

    pair: Pair
    model: dict[str, Any]
    rollout: np.ndarray
    trainer: np.ndarray
    entropy: np.ndarray
    step: np.ndarray
    ordinal: np.ndarray


class _About(msgspec.Struct):
    pair: Pair
    model: dict[str, Any]


def read_run(directory: Path) -> Kept:
    """Reads what a run kept. Raises DataError when it kept nothing."""
    folder = directory / "sentinel"
    files = sorted(folder.glob("rank*-step*.npz"))
    if not files or not (folder / "about.json").is_file():
        raise DataError(
            "this run kept no log-probs",
            where=str(directory),
            todo="run it with sentinel.config.keep=true",
        )
    about = msgspec.json.decode((folder / "about.json").read_bytes(), type=_About)
    parts = []
    for file in files:
        with np.load(file, allow_pickle=False) as arrays:
            columns = {name: arrays[name] for name in ("rollout", "trainer", "entropy", "ordinal")}
        step = int(file.stem.rpartition("step")[2])
        parts.append((columns, np.full(len(columns["rollout"]), step)))
    return Kept(
        pair=about.pair,
        model=about.model,
        rollout=np.concatenate([columns["rollout"] for columns, _ in parts]),
        trainer=np.concatenate([columns["trainer"] for columns, _ in parts]),
        entropy=np.concatenate([columns["entropy"] for columns, _ in parts]),
        ordinal=np.concatenate([columns["ordinal"] for columns, _ in parts]),
        step=np.concatenate([steps for _, steps in parts]),
    )


def make_table(runs: Sequence[Kept], made: str = "") -> TableFile:
    """Makes a table from healthy runs of one pair and model.

    The shares are the largest over WINDOW steps of any run, under the quantiles of all others, as a
    run is that the table has not seen. With a single run they are its own.

    Raises DataError when the runs are not alike, or too short.
    """
    first = runs[0]
    for run in runs[1:]:
        if (run.pair, run.model) != (first.pair, first.model):
            raise DataError(
                f"runs of {shown(first.pair)} and of {shown(run.pair)}, or of two models, cannot "
                "make one table"
            )
    quantiles = _quantiles(runs)
    own = Table(quantiles=quantiles, worst_shares=np.zeros(4))
    by_step = [_by_step(run, _without(runs, i) or own) for i, run in enumerate(runs)]
    return TableFile(
        pair=first.pair,
        model=first.model,
        quantiles=quantiles.tolist(),
        worst_shares=np.max([worst_shares_of(sums) for sums in by_step], axis=0).tolist(),
        worst_slope=max(worst_slope_of(sums) for sums in by_step),
        actions=int(sum(len(run.rollout) for run in runs)),
        runs=len(runs),
        made=made,
    )


def _quantiles(runs: Sequence[Kept]) -> np.ndarray:
    trainer = np.concatenate([run.trainer for run in runs])
    gaps = np.concatenate([np.abs(run.rollout.astype(np.float64) - run.trainer) for run in runs])
    try:
        return quantiles_of(gaps, np.digitize(trainer, EDGES))
    except ValueError as error:
        raise DataError(f"{len(gaps)} actions are too few: {error}") from error


def _without(runs: Sequence[Kept], index: int) -> Table | None:
    others = [run for i, run in enumerate(runs) if i != index]
    if not others:
        return None
    return Table(quantiles=_quantiles(others), worst_shares=np.zeros(4))


def _by_step(run: Kept, table: Table) -> np.ndarray:
    """Returns what the test counts, summed over each step, float64[steps, NUMBERS]."""
    return np.stack([_summed(run, run.step == step, table) for step in np.unique(run.step)])


def _summed(run: Kept, part: np.ndarray, table: Table) -> np.ndarray:
    """Returns what the test counts of some actions, float64[NUMBERS].

    part: bool[n].
    """
    rollout, trainer = run.rollout[part], run.trainer[part]
    slope = slope_terms(rollout, trainer, run.entropy[part], table)
    sums: np.ndarray = np.array([*counts(rollout, trainer, table), *(s.sum() for s in slope)])
    return sums


def peak(run: Kept, table: Table) -> float:
    """Returns the highest log e that a run reaches under a table, step by step."""
    cusum = Cusum()
    highest = 0.0
    for step in np.unique(run.step):
        here = run.step == step
        groups = np.unique(run.ordinal[here])
        sums = []
        for group in groups:
            sums.append(_summed(run, here & (run.ordinal == group), table))
        counted = np.stack(sums)
        slope = slope_moments(counted, table).sum(axis=0)
        compared = cusum.compared(np.concatenate([np.zeros(2 * MOMENTS), slope]))
        logs = np.concatenate([log_e(counted, table).sum(axis=0), compared])
        cusum.add(int(step), logs, int(here.sum()))
        highest = max(highest, cusum.level)
    return highest


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="g-core sentinel calibrate",
        description="Makes a table of healthy gaps from runs with sentinel.config.keep=true.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="directory of a run")
    parser.add_argument("--out", type=Path, required=True, help="file of the table")
    parser.add_argument("--made", default="", help="how it was made, for a person")
    options = parser.parse_args(words)
    runs = [read_run(directory) for directory in options.runs]
    file = make_table(runs, options.made)
    for directory, run in zip(options.runs, runs, strict=True):
        print(
            f"{directory}: {len(run.rollout)} actions, log e {peak(run, file.table()):.1f} at most"
        )
    encoded = msgspec.json.format(msgspec.json.encode(file), indent=1)
    write_file(options.out, encoded.decode() + "\n", option="--out")
    names = ", ".join(f"{share:.3f}" for share in file.worst_shares)
    slope = f"{file.worst_slope:.5f}"
    print(f"{options.out}: {shown(file.pair)}; largest healthy shares {names}, slope {slope}")
    return 0
