"""Provides ``placement/replay``, which replays each step under every split and takes the best.

After a step the length of every answer and every verdict is known. The step is replayed with them
on a model of the cluster, once for each candidate split and for several draws of groups from it, so
that the choice does not depend on the luck of one answer.

A candidate's regret in a step is its cost divided by the least cost of all candidates. Regrets are
added up over steps, each step counting ``discount`` times as much as the next one. At a step
boundary a new split costs nothing, so the policy changes to the least regret at once.

All requests of a finished step have ended, so their lengths are complete. In the middle of a step
only the short ones would have ended, and an estimate from those would be too low.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gcore_core.contract.engine_profiles import Profile
from gcore_core.contract.placement import Decision, Partition, Window, place_evenly
from gcore_placement.cells import Pool, Rescue, Split, decide, find_pool
from gcore_placement.config import ReplayConfig
from gcore_placement.modes import Mode, after_step, to_try

#: Candidates that cost less than this many times the least are replayed with every draw.
_NEAR = 1.12
#: What the latest step counts for in the seconds that are expected of the next one.
_LATEST = 0.5
#: Tokens of a prompt before any was measured.
_TYPICAL_PROMPT = 512.0
#: Tokens of a judge's instructions before any were measured.
_TYPICAL_INSTRUCTIONS = 1024.0


class Replay(Rescue):
    """The placement policy ``placement/replay``; see the module."""

    def __init__(self, config: ReplayConfig) -> None:
        self._config = config

    def prepare(self, window: Window) -> None:
        """Has the model of the cluster compiled, where there will be something to replay."""
        if find_pool(window) is not None:
            from gcore_placement.queueing.step import compile_play

            compile_play()

    def revise(self, partition: Partition | None, window: Window) -> Decision:
        """Chooses the split of the next step; see the contract's placement policy.

        Without two generators that share devices there is nothing to choose, and without a
        measured step it uses the regrets carried from earlier ones, or else ``_first``.
        """
        pool = find_pool(window)
        if pool is None:
            return place_evenly(partition, window)
        policy_requests = window.requests.get(pool.policy)
        judge_requests = [window.requests.get(judge) for judge in pool.judges]
        measured = (
            policy_requests is not None
            and len(policy_requests)
            and any(requests is not None and len(requests) for requests in judge_requests)
        )
        if not measured and window.state:
            return self._choose(window, pool, _State.read(window.state), {}, {"policy_requests": 0})
        if not measured:
            return self._first(window, pool)
        from gcore_placement.replaying import (
            Replayed,
        )  # numba: only where there is something to replay

        replayed = Replayed(window, pool, self._config)
        state = self._correct(_State.read(window.state), window, replayed)
        state = self._learn(state, window, replayed)
        costs = {
            split: cost * state.factor_among_modes(split.mode)
            for split, cost in replayed.costs(self._candidates(window, pool), _NEAR).items()
        }
        state = state.after(costs, self._config.discount)
        state = self._compare(state, window, replayed)
        return self._choose(window, pool, state, costs, replayed.seen, replayed.weights)

    def _first(self, window: Window, pool: Pool) -> Decision:
        """Chooses a split before anything was measured.

        The judges' share of cells is their share of the expected work, if the configuration gives
        tokens of answers and verdicts, and the configured share otherwise.
        """
        config = self._config
        share = self._config.share
        reason = f"nothing is measured yet: the configured share, {share:.0%}"
        if config.policy_tokens and config.judge_tokens:
            answers = np.array([config.policy_tokens])
            verdicts = np.array([config.judge_tokens])
            # cell-seconds of one record: a replica's seconds over the replicas of a cell
            profiles = [
                window.profiles.get(role, Profile()) for role in (pool.policy, pool.judges[0])
            ]
            sampled = (
                float(profiles[0].seconds(np.array([_TYPICAL_PROMPT]), answers)[0])
                / pool.per_cell[pool.policy]
            )
            judged = (
                float(profiles[1].seconds(_TYPICAL_INSTRUCTIONS + answers, verdicts)[0])
                / pool.per_cell[pool.judges[0]]
            )
            share = judged / (sampled + judged)
            reason = f"nothing is measured yet: judging is {share:.0%} of the work that is expected"
        return replace(decide(window, pool, pool.limited(share * len(pool.cells))), reason=reason)

    def _candidates(self, window: Window, pool: Pool) -> list[Split]:
        """Returns the candidates: splits, and the other modes if they are possible and configured.

        At most ``config.splits`` splits are tried. Their log-odds (judge's cells over the others')
        are evenly spaced, so the grid is finest where one role has few cells and a single cell
        matters most.
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
        candidates = [Split("split", int(count)) for count in counts]
        turns = Split("colocated")
        is_priced = window.switch_s is not None
        if pool.may_run(turns) and is_priced and "colocated" in self._config.modes:
            candidates.append(turns)
        if pool.shared() and "coresident" in self._config.modes:
            candidates.append(Split("coresident"))
        return candidates

    def _correct(self, state: _State, window: Window, replayed: Any) -> _State:
        """Has the replay's engines be as fast as requests were served; returns the new ``paces``.

        A profile may be wrong, and engines do what no profile says: they stall, and throw sequences
        out. What all this does to a role is one factor on its seconds.
        """
        last = window.outcomes[-1] if window.outcomes else None
        if last is None or not last.candidate or not self._config.correction:
            return state
        split = Split.named(last.candidate)
        return replace(state, paces=replayed.correct(split, state.paces, self._config.correction))

    def _learn(self, state: _State, window: Window, replayed: Any) -> _State:
        """Learns from the step that is over how its mode compares with its replay."""
        last = window.outcomes[-1] if window.outcomes else None
        if last is None or not last.candidate or last.measured_s <= 0:
            replayed.price(state.modes, "")
            return replace(state, tried="")
        split = Split.named(last.candidate)
        replayed.price(state.modes, split.mode)
        # a rescue may have replaced what was decided
        was_trial = state.tried == split.mode
        modes = after_step(
            state.modes,
            split.mode,
            replayed.profiles,
            last.measured_s / max(replayed.exact(split), 1e-9),
            self._config.discount,
            was_trial,
        )
        return replace(state, modes=modes, tried=state.tried if was_trial else "")

    def _compare(self, state: _State, window: Window, replayed: Any) -> _State:
        """Compares the replay of the split that ran with the time that was measured.

        Returns the state with a new ``wrong``, ``error`` and ``slower``, and with the new mean cost
        of that split.
        """
        last = window.outcomes[-1] if window.outcomes else None
        if last is None or not last.candidate or last.measured_s <= 0:
            return state
        explained = replayed.exact(Split.named(last.candidate))
        error = explained / max(last.measured_s, 1e-9) - 1
        # What the model leaves out, such as the seconds of controllers and rewards, is learned as a
        # factor: the mean of its logarithm over the latest steps. Beyond the tolerance the model is
        # wrong, which no factor mends.
        limit = np.log1p(self._config.tolerance)
        factor = np.clip(np.log(last.measured_s / max(explained, 1e-9)), -limit, limit)
        slower = state.slower + float(factor - state.slower) / max(state.weight, 1.0)
        state = replace(
            state,
            wrong=state.wrong + 1 if abs(error) > self._config.tolerance else 0,
            error=error,
            slower=slower,
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
        """Takes the least regret, or, while the replay is often wrong, the best measured split.

        costs: seconds of each candidate in the step that was replayed; empty without one.
        seen: what the decision is to report.
        weights: of the judges, if there are several; see ``Pool.awake``.
        """
        factor = state.mean_factor()
        expected_s = {split: state.expected_s[split] for split in costs}
        predicted = {split.name: seconds * factor for split, seconds in expected_s.items()}
        tried = ""
        ran = [name for name in state.ran if pool.may_run(Split.named(name))]
        fell_back = state.wrong >= self._config.patience and bool(ran)
        if fell_back:
            best = min(ran, key=lambda name: state.ran[name][1])
            split = Split.named(best)
            # the pool may have changed since then
            split = pool.limited(split.judge) if split.mode == "split" else split
            reason = (
                f"the replay of the last {state.wrong} steps was off by more than "
                f"{self._config.tolerance:.0%}: "
                f"the best split that ran, {best}"
            )
        else:
            split = _least(state.regrets, pool, self._config.caution)
            tried = self._mode_to_try(state, costs, split)
            regret = _at(state.regrets, split) / max(state.weight, 1e-12) - 1
            reason = (
                f"least regret over the last steps, {max(regret, 0.0):.1%} above each "
                "step's best on average"
            )
        if tried:
            regrets = {s: regret for s, regret in state.regrets.items() if s.mode == tried}
            split = _least(regrets, pool, self._config.caution)
            reason = f"a trial: mode {tried} has not run for {state.modes[tried].idle} steps"
        state = state.chosen(split.mode, tried)
        if costs:
            predicted.setdefault(split.name, _at(expected_s, split) * factor)
        seen = {
            **seen,
            "paces": list(state.paces),
            "error": state.error,
            "wrong": state.wrong,
            "fell_back": fell_back,
        }
        decision = decide(window, pool, split, weights)
        return replace(
            decision, predicted_s=predicted, reason=reason, seen=seen, state=state.plain()
        )

    def _mode_to_try(self, state: _State, costs: Mapping[Split, float], chosen: Split) -> str:
        """Returns the mode that is to be tried instead of the candidate's; "" for none."""
        expected_s: dict[str, float] = {}
        for split, seconds in costs.items():
            expected_s[split.mode] = min(seconds, expected_s.get(split.mode, np.inf))
        return to_try(state.modes, chosen.mode, expected_s, self._config.patience)


@dataclass(frozen=True, kw_only=True)
class _State:
    """What is carried from step to step.

    regrets: for each candidate, the discounted sum over steps of its cost divided by the least.
    weight: the sum of those steps' discounts; a candidate that was always best has this regret.
    expected_s: for each candidate, the seconds that are expected of the next step, uncorrected: a
        mean over the latest steps, because one step's seconds depend on the luck of its lengths.
    wrong: latest steps in a row whose replay was off by more than the tolerance.
    error: by how much the latest replay was off, as a share of the measured seconds.
    slower: logarithm of measured over replayed seconds, a mean over the latest steps; predictions
        are corrected by it until a second mode has run, see ``modes``.
    paces: factors on the seconds of the policy's profile and of the judge's.
    ran: for each candidate that ran, how often, and its mean measured seconds per action.
    modes: for each mode that ran, what its steps have shown of it.
    tried: the mode that is on trial in the step that was decided last; "" without a trial.
    """

    regrets: Mapping[Split, float]
    weight: float = 0.0
    expected_s: Mapping[Split, float] = field(default_factory=dict)
    wrong: int = 0
    error: float = 0.0
    slower: float = 0.0
    paces: tuple[float, float] = (1.0, 1.0)
    ran: Mapping[str, tuple[int, float]]
    modes: Mapping[str, Mode] = field(default_factory=dict)
    tried: str = ""

    @classmethod
    def read(cls, state: Mapping[str, Any]) -> _State:
        """Returns the state that ``plain`` has written; an empty mapping gives the first step's."""
        return cls(
            regrets={
                Split.named(name): float(value) for name, value in state.get("regrets", {}).items()
            },
            weight=float(state.get("weight", 0.0)),
            expected_s={
                Split.named(name): float(seconds)
                for name, seconds in state.get("expected_s", {}).items()
            },
            wrong=int(state.get("wrong", 0)),
            error=float(state.get("error", 0.0)),
            slower=float(state.get("slower", 0.0)),
            paces=tuple(state.get("paces", (1.0, 1.0))),
            ran={
                name: (int(count), float(mean))
                for name, (count, mean) in state.get("ran", {}).items()
            },
            modes={name: Mode.read(mode) for name, mode in state.get("modes", {}).items()},
            tried=str(state.get("tried", "")),
        )

    def plain(self) -> dict[str, Any]:
        """Returns the state as plain values, which ``read`` takes."""
        return {
            "regrets": {split.name: value for split, value in self.regrets.items()},
            "weight": self.weight,
            "expected_s": {split.name: seconds for split, seconds in self.expected_s.items()},
            "wrong": self.wrong,
            "error": self.error,
            "slower": self.slower,
            "paces": list(self.paces),
            "ran": {name: [count, mean] for name, (count, mean) in self.ran.items()},
            "modes": {name: mode.plain() for name, mode in self.modes.items()},
            "tried": self.tried,
        }

    def factor_among_modes(self, mode: str) -> float:
        """Returns by which factor a mode is slower, relative to its replay, than modes on average.

        It is 1 for a mode that never ran, and where only one did: nothing sets modes apart then.
        """
        if mode not in self.modes or len(self.modes) == 1:
            return 1.0
        return float(np.exp(self.modes[mode].slower)) / self.mean_factor()

    def mean_factor(self) -> float:
        """Returns by which factor modes are slower on average than their replay."""
        if len(self.modes) < 2:
            return float(np.exp(self.slower))
        return float(np.exp(np.mean([mode.slower for mode in self.modes.values()])))

    def chosen(self, mode: str, tried: str) -> _State:
        """Returns the state with the mode that was chosen for the next step.

        tried: the mode if the step is a trial; "" otherwise, and then its next wait is short again.
        """
        modes = dict(self.modes)
        if mode in modes:
            modes[mode] = replace(modes[mode], trials=modes[mode].trials + 1 if tried else 0)
        return replace(self, modes=modes, tried=tried)

    def after(self, costs: Mapping[Split, float], discount: float) -> _State:
        """Returns the state with one more step's regrets and with the next step's expected seconds.

        costs: seconds of each candidate in that step.
        discount: what earlier steps count for from now on, between 0 and 1.
        A mode that was on trial gets the regret that this step alone shows: earlier ones rest on
        prices that no measurement had corrected.
        A candidate without a regret so far, as after the pool has changed, gets that of its
        neighbours. A mode that becomes possible gets the worst: it has to do well for some steps,
        since the first fits of engines are rough, and a mode that runs does not show how splits do.
        """
        least = min(costs.values())
        regrets_so_far = {
            split: _at(self.regrets, split) if self.regrets else 0.0 for split in costs
        }
        regrets = {
            split: discount * regrets_so_far[split] + cost / least for split, cost in costs.items()
        }
        weight = discount * self.weight + 1
        for split, cost in costs.items():
            if split.mode == self.tried:
                regrets[split] = weight * cost / least
        expected_s = {
            split: _LATEST * cost + (1 - _LATEST) * self.expected_s.get(split, cost)
            for split, cost in costs.items()
        }
        return replace(self, regrets=regrets, weight=weight, expected_s=expected_s)


def _at(costs: Mapping[Split, float], split: Split) -> float:
    """Returns a candidate's cost, interpolated linearly between the splits that were tried."""
    if split in costs:
        return costs[split]
    splits = sorted(
        (candidate for candidate in costs if candidate.mode == "split"),
        key=lambda candidate: candidate.judge,
    )
    if split.mode != "split" or not splits:  # never tried: as bad as the worst
        return max(costs.values())
    return float(
        np.interp(
            split.judge,
            [candidate.judge for candidate in splits],
            [costs[candidate] for candidate in splits],
        )
    )


def _least(regrets: Mapping[Split, float], pool: Pool, caution: float) -> Split:
    """Returns the candidate of least regret, after smoothing the regrets of splits.

    The next step's best split lies only near that of earlier steps, and too few judges cost more
    than too many. So a split's regret is replaced by a weighted mean of those around it: the
    weights are normal in the log-odds of the judge's share, with standard deviation ``caution``.
    Other modes keep their regret. Regrets of another pool, as of a run that goes on with fewer
    devices, may be of modes and splits that this one cannot have.
    """
    cells = len(pool.cells)
    regrets = {split: regret for split, regret in regrets.items() if pool.may_run(split)}
    splits = sorted(
        (split for split in regrets if split.mode == "split"), key=lambda split: split.judge
    )
    best = min(regrets, key=regrets.__getitem__)
    if not splits:
        return best
    tried = [split.judge for split in splits]
    counts = np.arange(max(tried[0], 1), min(tried[-1], cells - 1) + 1)
    if not len(counts):
        return best if best.mode != "split" else pool.limited(best.judge)
    odds = np.log(counts / (cells - counts))
    # near[i, j]: weight of split j in the mean for split i
    near = np.exp(-(((odds[:, None] - odds) / max(caution, 1e-6)) ** 2) / 2)
    values = (
        near
        / near.sum(1, keepdims=True)
        @ np.interp(counts, tried, [regrets[split] for split in splits])
    )
    return best if best.mode != "split" else pool.limited(int(counts[np.argmin(values)]))
