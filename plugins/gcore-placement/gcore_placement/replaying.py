"""Replays the latest step as a workload on the queueing model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gcore_core.contract.engine_profiles import Profile
from gcore_core.contract.measurements import Requests
from gcore_core.kits.programs import KeepRate
from gcore_placement.cells import Pool, Split
from gcore_placement.config import ReplayConfig
from gcore_placement.measuring import MeasuredWindow
from gcore_placement.modes import Mode, Profiles
from gcore_placement.queueing.step import Engines, Groups, Played, coresident, play

#: Largest factor by which engines may be slower, or faster.
_FURTHEST = 10.0
#: How often the interval of such factors is halved; what is left of it is 2% wide.
_HALVINGS = 8


class Replayed:
    """Plays the groups of the latest step under other splits.

    All groups are issued at once, refills of the step too: when those came was that step's luck.

    weights: judge role -> seconds that its requests take one after the other.
    profiles: of the policy and of the judge, as the window has them.
    seen: what the replay is based on, for the run's journal.
    """

    def __init__(self, window: MeasuredWindow, pool: Pool, config: ReplayConfig) -> None:
        """Takes the latest step of the window, and engines as fast as its profiles say."""
        present = [judge for judge in pool.judges if judge in window.requests]
        policy, judged = lengths(
            window.requests[pool.policy], [window.requests[judge] for judge in present]
        )
        self._pool = pool
        self._switch_s = window.switch_s or 0.0
        self._groups = as_groups(policy, judged)
        self._random = np.random.default_rng([config.seed, window.step])
        self._draws = config.draws
        self._largest = config.largest
        profiles = [window.profiles.get(role, Profile()) for role in (pool.policy, *present)]
        work = [
            float(p.seconds(r.prompt, r.actions).sum())
            for p, r in zip(profiles, (policy, *judged), strict=True)
        ]
        self.weights = dict(zip(present, work[1:], strict=True))
        # The model has one judge: it gets the profile of the one that has the most work.
        self.profiles: Profiles = profiles[0], profiles[1 + int(np.argmax(work[1:]))]
        self._profiles_of_mode: dict[str, Profiles] = {}
        self._paces = (1.0, 1.0)
        # Seconds that each record took, and then all that judges wrote about it.
        judged_s = np.zeros(len(policy))
        for requests in judged:
            np.add.at(judged_s, requests.parent, _taken_s(requests))
        self._taken_s = table(policy, _taken_s(policy)), table(policy, judged_s)
        self.seen: dict[str, Any] = {
            "policy_requests": len(policy),
            "judge_requests": sum(map(len, judged)),
            "policy_tokens": float(policy.actions.mean()),
            "judge_tokens": float(np.concatenate([requests.actions for requests in judged]).mean()),
            "kept": float(self._groups.kept.mean()),
            "work_share": sum(work[1:]) / max(sum(work), 1e-12),
            **({"judges as one": len(judged)} if len(judged) > 1 else {}),
        }

    def price(self, modes: Mapping[str, Mode], ran: str) -> None:
        """Has each mode be replayed with the profiles of its own latest step.

        The mode ``ran`` of the step that is over, and modes that never ran, have the window's.
        """
        self._profiles_of_mode = {
            name: mode.profiles for name, mode in modes.items() if name != ran
        }

    def correct(self, split: Split, paces: Sequence[float], weight: float) -> tuple[float, float]:
        """Has engines be slower, or faster, than their profiles; returns by which factors.

        The factors are those of the policy and of the judge with which the step, replayed under the
        split that ran, takes as many seconds for its requests as were measured: from when they
        could begin until they end. What a request waits inside an engine is in both. The slower an
        engine, the longer its requests take, so the factors are found by bisection; the policy's
        first, because the judge's requests begin when answers end.

        paces: the factors of earlier steps.
        weight: how much this step's factors count, from 0 to 1; the earlier ones count the rest.
        """
        latest = np.log(np.array(paces, float))
        cells, count = self._part()
        which = np.arange(len(self._groups))[:count]
        for role, taken_s in enumerate(self._taken_s):
            measured_s = float(taken_s[:count].sum())
            if measured_s <= 0:
                continue
            low = -np.log(_FURTHEST)
            high = np.log(_FURTHEST)
            for _ in range(_HALVINGS):
                latest[role] = (low + high) / 2
                self._paces = float(np.exp(latest[0])), float(np.exp(latest[1]))
                if _seconds(self._played(split, which, cells), role) < measured_s:
                    low = latest[role]
                else:
                    high = latest[role]
        mixed = np.exp(weight * latest + (1 - weight) * np.log(np.array(paces, float)))
        self._paces = float(mixed[0]), float(mixed[1])
        return self._paces

    def costs(self, splits: Sequence[Split], near: float) -> dict[Split, float]:
        """Returns the mean seconds of each candidate over several draws of groups.

        Only candidates whose first draw takes at most ``near`` times the least are played on the
        other draws. For the rest the first draw's seconds are scaled by the factor by which the
        other draws changed the sum of the near ones.
        """
        cells, count = self._part()
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
        """Returns the seconds of the groups as they were, without drawing.

        Where the cluster is larger than what is replayed, a part of the groups is played on a part
        of the cells.
        """
        cells, count = self._part()
        return self._play(split, np.arange(len(self._groups))[:count], cells)

    def _part(self) -> tuple[int, int]:
        """Returns how many cells are replayed, and how many groups have as much work for each."""
        cells = min(len(self._pool.cells), self._largest)
        return cells, max(round(len(self._groups) * cells / len(self._pool.cells)), 1)

    def _play(self, split: Split, which: np.ndarray, cells: int) -> float:
        """Returns the seconds of a rollout; see ``_played``."""
        return self._played(split, which, cells).seconds

    def _played(self, split: Split, which: np.ndarray, cells: int) -> Played:
        """Returns a rollout of groups of the latest step under a split.

        which: int64[groups], their indexes.
        cells: number of cells on which they are played.
        """
        pool = self._pool
        groups = self._groups.take(which)
        per = [pool.per_cell[pool.policy], pool.per_cell[pool.judges[0]]]
        # The same share of the replayed cells judges; both roles keep at least one cell.
        judge = min(max(round(split.judge * cells / len(pool.cells)), 1), cells - 1)
        told = self._profiles_of_mode.get(split.mode, self.profiles)
        profiles = slower(told[0], self._paces[0]), slower(told[1], self._paces[1])
        if split.mode == "split":
            engines = Engines("split", (cells - judge) * per[0], judge * per[1])
        elif split.mode == "colocated":
            engines = Engines("colocated", cells * per[0], cells * per[1])
        else:
            engines = Engines("coresident", cells, 0)
            profiles = coresident(profiles, per)
        # All groups are taken as kept and as needed, so that none is issued beyond those drawn.
        everything = replace(groups, kept=np.ones(len(groups), bool))
        rate = KeepRate(rates=(1.0,) * 4, is_known=True)
        return play(everything, engines, profiles, len(groups), rate, self._switch_s)


def as_groups(policy: Requests, judges: Sequence[Requests]) -> Groups:
    """Turns requests into tables of float64[groups, most samples of a group], in the order of
    ordinals.

    What several judges write about one record is added up to one verdict. Where a group has fewer
    samples than the largest, the rest of its row is 0.

    policy: the requests of the latest step.
    judges: for each judge its requests, whose ``parent`` is an index into those of the policy.
    """
    verdict_tokens = np.zeros(len(policy))
    judge_prompt = np.zeros(len(policy))
    for requests in judges:
        np.add.at(verdict_tokens, requests.parent, requests.actions)
        np.add.at(judge_prompt, requests.parent, requests.prompt)

    ordinals, place = np.unique(policy.group, return_inverse=True)
    kept = np.zeros(len(ordinals), bool)
    kept[place] = policy.kept
    return Groups(
        policy=table(policy, policy.actions),
        judge=table(policy, verdict_tokens),
        policy_prompt=table(policy, policy.prompt),
        judge_prompt=table(policy, judge_prompt),
        kept=kept,
    )


def table(policy: Requests, values: np.ndarray) -> np.ndarray:
    """Returns one value for each of the policy's requests as a table; see ``as_groups``."""
    ordinals, place = np.unique(policy.group, return_inverse=True)
    first = np.argsort(place, kind="stable")
    counts = np.bincount(place)
    # Each request's number within its group: its position among the requests sorted by group, less
    # the position at which its group begins.
    sample = np.empty(len(policy), np.int64)
    sample[first] = np.arange(len(policy)) - np.repeat(np.cumsum(counts) - counts, counts)
    shape = len(ordinals), int(counts.max())
    filled = np.zeros(shape)
    filled[place, sample] = values
    return filled


def _taken_s(requests: Requests) -> np.ndarray:
    """Returns the seconds from when each request could begin until it ended: float64[N].

    None could begin before the first of its role did: where roles take turns, answers wait for the
    judge's turn, which says nothing of the judge.
    """
    if not len(requests):
        return np.zeros(0)
    began_s = np.maximum(requests.arrival_s, requests.start_s.min())
    taken_s: np.ndarray = requests.end_s - began_s
    return taken_s


def _seconds(played: Played, role: int) -> float:
    """Returns the sum of ``_taken_s`` over a role's requests in a replay."""
    arrival_s, start_s, end_s = played.times[:, role]
    was_served = played.replica[role] >= 0
    if not was_served.any():
        return 0.0
    began_s = np.maximum(arrival_s, start_s[was_served].min())
    return float((end_s - began_s)[was_served].sum())


def slower(profile: Profile, factor: float) -> Profile:
    """Returns a profile whose seconds are all multiplied with a factor."""
    return replace(
        profile,
        base_s=profile.base_s * factor,
        running_s=profile.running_s * factor,
        cached_s=profile.cached_s * factor,
        prefill_s=profile.prefill_s * factor,
    )


def lengths(policy: Requests, judges: Sequence[Requests]) -> tuple[Requests, list[Requests]]:
    """Returns the requests of the latest step alone, those of the policy and those of each judge.

    ``parent`` of the judges' requests becomes an index into the policy's that are left. Requests
    without a parent are left out.
    """
    latest = policy.step == policy.step.max()
    # A kept request's new index is the number of kept requests before it.
    index = np.cumsum(latest) - 1
    judge_requests = []
    for requests in judges:
        mine = requests.take((requests.parent >= 0) & latest[np.clip(requests.parent, 0, None)])
        judge_requests.append(replace(mine, parent=index[mine.parent]))
    return policy.take(latest), judge_requests
