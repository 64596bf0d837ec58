"""``placement/replay``: after each step, what would every split have cost it? The next step gets
the least regret.

A step that is over has told the length of every answer and every verdict. It is replayed with them
on a model of the cluster, once for each candidate split and for several draws of groups from it, so
that a choice does not hang on the luck of one answer. A step's costs over their least are its
regrets; regrets of steps are added up, each counting ``discount`` times what the next one counts.
At a step boundary a new split is free, so the policy jumps to the least.
Lengths of finished requests are whole here: nothing is estimated from requests that ran, which are
    the short ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gcore_core.contract.measurements import Profile
from gcore_core.contract.placement import Decision, Partition, Window, place_evenly
from gcore_placement.cells import Pool, Rescue, Split, decide, find_pool
from gcore_placement.config import ReplayConfig

_NEAR = 1.12  # candidates that cost less than this over the least are replayed with every draw
_TYPICAL_PROMPT, _TYPICAL_INSTRUCTIONS = 512.0, 1024.0


class Replay(Rescue):
    def __init__(self, config: ReplayConfig) -> None:
        self._config = config

    def revise(self, partition: Partition | None, window: Window) -> Decision:
        pool = find_pool(window)
        if pool is None:
            return place_evenly(partition, window)
        policy, judges = (
            window.requests.get(pool.policy),
            [window.requests.get(judge) for judge in pool.judges],
        )
        measured = (
            policy is not None
            and len(policy)
            and any(found is not None and len(found) for found in judges)
        )
        if not measured and window.state:
            return self._choose(window, pool, _State.read(window.state), {}, {"policy_requests": 0})
        if not measured:
            return self._first(window, pool)
        from gcore_placement.replaying import (
            Replayed,
        )  # numba: only where there is something to replay

        replayed = Replayed(window, pool, self._config)
        splits = self._candidates(window, pool)
        costs = replayed.costs(splits, _NEAR)
        state = _State.read(window.state).after(costs, self._config.discount)
        state = self._judged(state, window, replayed)
        return self._choose(window, pool, state, costs, replayed.seen, replayed.weights)

    def _first(self, window: Window, pool: Pool) -> Decision:
        """Nothing was measured: the work that is expected, or the configured share."""
        config, share = self._config, self._config.share
        reason = f"nothing is measured yet: the configured share, {share:.0%}"
        if config.policy_tokens and config.judge_tokens:
            answers, verdicts = np.array([config.policy_tokens]), np.array([config.judge_tokens])
            of = [window.profiles.get(role, Profile()) for role in (pool.policy, pool.judges[0])]
            sampled = (
                float(of[0].seconds(np.array([_TYPICAL_PROMPT]), answers)[0])
                / pool.per_cell[pool.policy]
            )
            judged = (
                float(of[1].seconds(_TYPICAL_INSTRUCTIONS + answers, verdicts)[0])
                / pool.per_cell[pool.judges[0]]
            )
            share = judged / (sampled + judged)
            reason = f"nothing is measured yet: judging is {share:.0%} of the work that is expected"
        return replace(decide(window, pool, pool.limited(share * len(pool.cells))), reason=reason)

    def _candidates(self, window: Window, pool: Pool) -> list[Split]:
        """Splits on a grid that is finest where one role has few cells, and the other modes that
        are possible.
        """
        counts = np.arange(pool.fewest, pool.most + 1)
        if len(counts) > self._config.splits:
            cells = len(pool.cells)
            low, high = (
                np.log(x / (cells - x))
                for x in (max(pool.fewest, 0.04 * cells), min(pool.most, 0.8 * cells))
            )
            grid = cells / (1 + np.exp(-np.linspace(low, high, self._config.splits)))
            counts = np.unique(np.clip(np.round(grid), pool.fewest, pool.most)).astype(int)
        found = [Split("split", int(count)) for count in counts]
        if pool.shared() and "colocated" in self._config.modes and window.switch_s is not None:
            found.append(Split("colocated"))
        if pool.shared() and "coresident" in self._config.modes:
            found.append(Split("coresident"))
        return found

    def _judged(self, state: _State, window: Window, replayed: Any) -> _State:
        """Keeps the book of steps that the replay did not explain, and of what every split that ran
        came to.
        """
        last = window.outcomes[-1] if window.outcomes else None
        if last is None or not last.candidate:
            return state
        explained = replayed.exact(Split.named(last.candidate))
        error = explained / max(last.measured_s, 1e-9) - 1
        state = replace(
            state, wrong=state.wrong + 1 if abs(error) > self._config.tolerance else 0, error=error
        )
        if last.work <= 0:
            return state
        count, mean = state.ran.get(last.candidate, (0, 0.0))
        mean += (last.measured_s / last.work - mean) / (count + 1)
        return replace(state, ran={**state.ran, last.candidate: (count + 1, mean)})

    def _choose(
        self,
        window: Window,
        pool: Pool,
        state: _State,
        costs: Mapping[Split, float],
        seen: Mapping[str, Any],
        weights: Mapping[str, float] | None = None,
    ) -> Decision:
        predicted = {split.name: seconds for split, seconds in costs.items()}
        fell_back = state.wrong >= self._config.patience and bool(state.ran)
        if fell_back:
            best = min(state.ran, key=lambda name: state.ran[name][1])
            split = Split.named(best)
            split = (
                pool.limited(split.judge) if split.mode == "split" else split
            )  # the pool may have changed
            reason = (
                f"the replay of the last {state.wrong} steps was off by more than "
                f"{self._config.tolerance:.0%}: "
                f"the best split that ran, {best}"
            )
        else:
            split = _least(state.regrets, pool, self._config.caution)
            regret = _at(state.regrets, split) / max(state.weight, 1e-12) - 1
            reason = (
                f"least regret over the last steps, {max(regret, 0.0):.1%} above each "
                "step's best on average"
            )
        if costs:
            predicted.setdefault(split.name, _at(costs, split))
        seen = {**seen, "error": state.error, "wrong": state.wrong, "fell_back": fell_back}
        decision = decide(window, pool, split, weights)
        return replace(
            decision, predicted_s=predicted, reason=reason, seen=seen, state=state.plain()
        )


@dataclass(frozen=True, kw_only=True)
class _State:
    """What is carried from step to step. regrets: candidate -> discounted sum of its cost over the
    least, whose terms have the sum ``weight``. ran: candidate -> how often it ran, and its mean
    seconds per action.
    """

    regrets: Mapping[Split, float]
    weight: float = 0.0
    wrong: int = 0
    error: float = 0.0
    ran: Mapping[str, tuple[int, float]]

    @classmethod
    def read(cls, state: Mapping[str, Any]) -> _State:
        return cls(
            regrets={
                Split.named(name): float(value) for name, value in state.get("regrets", {}).items()
            },
            weight=float(state.get("weight", 0.0)),
            wrong=int(state.get("wrong", 0)),
            error=float(state.get("error", 0.0)),
            ran={
                name: (int(count), float(mean))
                for name, (count, mean) in state.get("ran", {}).items()
            },
        )

    def plain(self) -> dict[str, Any]:
        return {
            "regrets": {split.name: value for split, value in self.regrets.items()},
            "weight": self.weight,
            "wrong": self.wrong,
            "error": self.error,
            "ran": {name: [count, mean] for name, (count, mean) in self.ran.items()},
        }

    def after(self, costs: Mapping[Split, float], discount: float) -> _State:
        """A step's regrets added. What is known of a candidate that is new, such as after the pool
        has changed, comes from its neighbours.
        """
        least = min(costs.values())
        before = {split: _at(self.regrets, split) if self.regrets else 0.0 for split in costs}
        regrets = {split: discount * before[split] + cost / least for split, cost in costs.items()}
        return replace(self, regrets=regrets, weight=discount * self.weight + 1)


def _at(costs: Mapping[Split, float], split: Split) -> float:
    """A candidate's cost; between two splits that were tried, on the line between them."""
    if split in costs:
        return costs[split]
    splits = sorted(
        (other for other in costs if other.mode == "split"), key=lambda other: other.judge
    )
    if split.mode != "split" or not splits:  # never tried: as bad as the worst
        return max(costs.values())
    return float(
        np.interp(
            split.judge, [other.judge for other in splits], [costs[other] for other in splits]
        )
    )


def _least(regrets: Mapping[Split, float], pool: Pool, caution: float) -> Split:
    """The candidate of least regret. The best split of the next step lies somewhere near that of
    the steps before, and
    too few judges cost more than too many: a split's regret is the mean of those around it, normal
    in the log-odds of its share with a standard deviation of ``caution``.
    """
    cells = len(pool.cells)
    splits = sorted(
        (split for split in regrets if split.mode == "split"), key=lambda split: split.judge
    )
    known = [split.judge for split in splits]
    counts = np.arange(max(known[0], 1), min(known[-1], cells - 1) + 1)
    odds = np.log(counts / (cells - counts))
    near = np.exp(-(((odds[:, None] - odds) / max(caution, 1e-6)) ** 2) / 2)
    values = (
        near
        / near.sum(1, keepdims=True)
        @ np.interp(counts, known, [regrets[split] for split in splits])
    )
    best = min(regrets, key=regrets.__getitem__)
    return best if best.mode != "split" else pool.limited(int(counts[np.argmin(values)]))
