"""The latest step as a workload, replayed on the queueing model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from gcore_queueing.step import Engines, Groups, coresident, play

from gcore_core.contract.measurements import Profile, Requests
from gcore_core.contract.placement import Window
from gcore_core.controllers.keep_rate import KeepRate
from gcore_placement.cells import Pool, Split
from gcore_placement.config import ReplayConfig


class Replayed:
    """Groups of the latest step. Its refills are issued at once: when they came was that step's
    luck.
    """

    def __init__(self, window: Window, pool: Pool, config: ReplayConfig) -> None:
        present = [judge for judge in pool.judges if judge in window.requests]
        policy, judged = lengths(
            window.requests[pool.policy], [window.requests[judge] for judge in present]
        )
        self._pool, self._switch_s = pool, window.switch_s or 0.0
        self._groups = as_groups(policy, judged)
        self._random = np.random.default_rng([config.seed, window.step])
        self._draws, self._largest = config.draws, config.largest
        told = [window.profiles.get(role, Profile()) for role in (pool.policy, *present)]
        work = [
            float(p.seconds(r.prompt, r.actions).sum())
            for p, r in zip(told, (policy, *judged), strict=True)
        ]
        self.weights = dict(zip(present, work[1:], strict=True))
        self._profiles = told[0], told[1 + int(np.argmax(work[1:]))]
        self.seen: dict[str, Any] = {
            "policy_requests": len(policy),
            "judge_requests": sum(map(len, judged)),
            "policy_tokens": float(policy.actions.mean()),
            "judge_tokens": float(np.concatenate([requests.actions for requests in judged]).mean()),
            "kept": float(self._groups.kept.mean()),
            "work_share": sum(work[1:]) / max(sum(work), 1e-12),
        }

    def costs(self, splits: Sequence[Split], near: float) -> dict[Split, float]:
        """Mean seconds by candidate. The first draw decides which are worth the others: those
        within ``near`` times the least; what it cost the rest is scaled by what the others made of
        those near.
        """
        cells = min(len(self._pool.cells), self._largest)
        count = max(round(len(self._groups) * cells / len(self._pool.cells)), 1)
        draws = [self._random.integers(0, len(self._groups), count) for _ in range(self._draws)]
        first = {split: self._play(split, draws[0], cells) for split in splits}
        close = [split for split, cost in first.items() if cost <= near * min(first.values())]
        mean = {
            s: float(np.mean([first[s], *(self._play(s, draw, cells) for draw in draws[1:])]))
            for s in close
        }
        ratio = sum(mean.values()) / sum(first[split] for split in close)
        return {split: mean.get(split, cost * ratio) for split, cost in first.items()}

    def exact(self, split: Split) -> float:
        """Seconds of the groups as they were; of a part of them where the cluster is larger than
        what is replayed.
        """
        cells = min(len(self._pool.cells), self._largest)
        count = max(round(len(self._groups) * cells / len(self._pool.cells)), 1)
        return self._play(split, np.arange(len(self._groups))[:count], cells)

    def _play(self, split: Split, which: np.ndarray, cells: int) -> float:
        pool, groups = self._pool, self._groups.take(which)
        per = [pool.per_cell[pool.policy], pool.per_cell[pool.judges[0]]]
        judge = min(max(round(split.judge * cells / len(pool.cells)), 1), cells - 1)
        profiles = self._profiles
        if split.mode == "split":
            engines = Engines("split", (cells - judge) * per[0], judge * per[1])
        elif split.mode == "colocated":
            engines = Engines("colocated", cells * per[0], cells * per[1])
        else:
            engines, profiles = Engines("coresident", cells, 0), coresident(self._profiles, per)
        everything = replace(groups, kept=np.ones(len(groups), bool))
        known = KeepRate(rates=(1.0,) * 4, known=True)
        return play(everything, engines, profiles, len(groups), known, self._switch_s).seconds


def as_groups(policy: Requests, judges: Sequence[Requests]) -> Groups:
    """Groups in the order of their ordinals. What several judges write of a record counts as one
    verdict; samples that a group lacks have no actions.
    """
    ordinals, place = np.unique(policy.group, return_inverse=True)
    first = np.argsort(place, kind="stable")
    counts = np.bincount(place)
    sample = np.empty(len(policy), np.int64)
    sample[first] = np.arange(len(policy)) - np.repeat(np.cumsum(counts) - counts, counts)
    shape = len(ordinals), int(counts.max())
    written, read = np.zeros(len(policy)), np.zeros(len(policy))
    for requests in judges:
        np.add.at(written, requests.parent, requests.actions)
        np.add.at(read, requests.parent, requests.prompt)

    def table(values: np.ndarray) -> np.ndarray:
        found = np.zeros(shape)
        found[place, sample] = values
        return found

    kept = np.zeros(len(ordinals), bool)
    kept[place] = policy.kept
    return Groups(
        policy=table(policy.actions),
        judge=table(written),
        policy_prompt=table(policy.prompt),
        judge_prompt=table(read),
        kept=kept,
    )


def lengths(policy: Requests, judges: Sequence[Requests]) -> tuple[Requests, list[Requests]]:
    """The requests of the latest step alone; judges' ``parent`` then counts in the policy's that
    are left.
    """
    latest = policy.step == policy.step.max()
    index = np.cumsum(latest) - 1
    found = []
    for requests in judges:
        mine = requests.take((requests.parent >= 0) & latest[np.clip(requests.parent, 0, None)])
        found.append(replace(mine, parent=index[mine.parent]))
    return policy.take(latest), found
