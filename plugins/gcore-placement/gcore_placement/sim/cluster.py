"""Simulates a cluster on which placement policies are compared step by step, on the same groups.

Each step is costed under every policy, under the best fixed split of that step (the oracle), and
by a lower bound that no placement can beat. The policies are the same objects that decide in a
run, and they see the same facts as in a run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gcore_core.contract.algorithms import Balancer, Work
from gcore_core.contract.engine_profiles import Profile
from gcore_core.contract.measurements import Outcome
from gcore_core.contract.placement import (
    Cell,
    Decision,
    Device,
    Need,
    Partition,
    PlacementPolicy,
)
from gcore_core.kits.programs import KeepRate, by_quarter
from gcore_placement.measuring import MeasuredWindow
from gcore_placement.queueing import stepping
from gcore_placement.queueing.step import (
    Engines,
    Groups,
    Played,
    coresident,
    lower_bound,
    play,
    room_of,
)
from gcore_placement.sim.config import TrainerConfig
from gcore_placement.sim.workloads import INSTRUCTIONS, Workload

ORACLE = "oracle"
#: Names of the two roles that a simulated run has.
_POLICY = "rollout"
_JUDGE = "judge"
_SYNC_S = 10.0  # a push of weights and the wake after it


@dataclass(frozen=True, kw_only=True)
class Truth:
    """How the engines behave, where policies are told something else.

    They follow the second model, ``gcore_placement.queueing.stepping``, which no policy carries.

    profiles: those that the engines have; ``Cluster.profiles`` are what policies are told.
    factors: by which stretches of steps take longer or shorter; see ``stepping.slowness``.
    instructions: tokens that all prompts of the judge begin with.
    """

    profiles: tuple[Profile, Profile]
    factors: tuple[np.ndarray, ...]
    instructions: float = INSTRUCTIONS


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The simulated machine, and what a step must produce on it.

    devices: how many there are, all of one kind.
    size: devices of one replica, the same for both roles.
    needed: groups that a step must keep.
    switch_s: seconds to change the roles of all devices.
    shards: controllers that share a step's groups.
    profiles: cost profiles of the policy's engines and of the judge's, in this order.
    trainer: the terms of what training costs.
    truth: how the engines behave, if not as ``profiles`` and the model of the policies say.
    """

    devices: int
    size: int = 4
    needed: int
    switch_s: float = 30.0
    shards: int = 1
    profiles: tuple[Profile, Profile] = field(default_factory=lambda: (Profile(), Profile()))
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    truth: Truth | None = None

    @property
    def replicas(self) -> int:
        """The number of replicas of either role that fit on the devices."""
        return self.devices // self.size

    def window(self) -> MeasuredWindow:
        """Returns what a policy sees before the first step, when nothing is measured."""
        needs = {
            _POLICY: Need(kind="generator", follows="policy", size=self.size),
            _JUDGE: Need(kind="generator", size=self.size),
        }
        return MeasuredWindow(
            devices=tuple(Device(index=index, kind="cuda") for index in range(self.devices)),
            slots=dict.fromkeys((_POLICY, _JUDGE), self.replicas * self.size),
            needs=needs,
            needed=self.needed,
            profiles=dict(zip((_POLICY, _JUDGE), self.profiles, strict=True)),
            switch_s=self.switch_s,
        )


@dataclass(frozen=True, kw_only=True)
class Row:
    """One step under one policy.

    policy: the policy's name, or ORACLE.
    step: the step's number, from 0.
    seconds: the rollout's time under this policy.
    best_s: the rollout's time under the best fixed split of this step.
    bound_s: a lower bound of the rollout's time; no placement takes less.
    train_s: preparation, training and the push, computed from the oracle's rollout.
    mode: the decision's mode: split, colocated or coresident.
    share: share of the cells that judge.
    moved: cells that changed roles before this step.
    issued, kept: groups that were started, and groups that passed the filter.
    decision_s: processor seconds that the policy took to decide.
    predicted_s: the policy's own prediction of `seconds`; None when it makes none.
    idle: cause -> share of all replica-seconds that were idle for it.
    """

    policy: str
    step: int
    seconds: float
    best_s: float
    bound_s: float
    train_s: float
    mode: str
    share: float
    moved: int
    issued: int
    kept: int
    decision_s: float
    predicted_s: float | None
    idle: Mapping[str, float]

    @property
    def excess(self) -> float:
        """The share by which the rollout took longer than under the best fixed split of the
        step.
        """
        return self.seconds / self.best_s - 1


class _Trial:
    """One policy, with what it has seen so far."""

    def __init__(self, policy: PlacementPolicy, window: MeasuredWindow) -> None:
        self._policy = policy
        self._window = window
        self._partition: Partition | None = None

    def decide(self, step: int) -> tuple[Decision, int, float]:
        """Returns the decision, how many cells change roles by it, and its processor seconds."""
        began_s = time.process_time()
        decision = self._policy.revise(self._partition, replace(self._window, step=step))
        took_s = time.process_time() - began_s
        # A cell that begins or ends to judge has changed roles: the symmetric difference.
        judge_cells = set(self._partition.cells[_JUDGE]) if self._partition else set()
        moved = len(judge_cells ^ set(decision.partition.cells[_JUDGE])) if judge_cells else 0
        self._partition = decision.partition
        return decision, moved, took_s

    def measured(self, step: int, decision: Decision, played: Played) -> None:
        """Adds the outcome of a step to what the policy sees at its next decision."""
        requests = {_POLICY: played.requests(0, step), _JUDGE: played.requests(1, step)}
        outcome = Outcome(
            step=step,
            candidate=decision.chosen,
            predicted_s=decision.predicted_s.get(decision.chosen),
            measured_s=played.seconds,
            work=float(sum(role_requests.actions.sum() for role_requests in requests.values())),
        )
        self._window = replace(
            self._window,
            requests=requests,
            busy={_POLICY: played.busy(0), _JUDGE: played.busy(1)},
            filled={_POLICY: played.filled(0), _JUDGE: played.filled(1)},
            outcomes=(*self._window.outcomes, outcome)[-64:],
            state=decision.state,
        )


def simulate(
    cluster: Cluster,
    workload: Workload,
    policies: Mapping[str, PlacementPolicy],
    steps: int,
    seed: int,
    balancer: Balancer | None = None,
) -> Iterator[Row]:
    """Yields the rows of every step: one for each policy, then one for the oracle.

    All policies share one rule of oversampling, which learns from what the oracle's steps kept, so
    that policies differ in their placement alone.
    """
    trials = {name: _Trial(policy, cluster.window()) for name, policy in policies.items()}
    rate = KeepRate()
    for step in range(steps):
        # Five times the groups that are needed, so that enough of them teach.
        groups = workload.groups(step, round(cluster.needed * 5 + 64), seed)
        plays = _Plays(cluster, groups, rate, seed * steps + step)
        decided = {name: trial.decide(step) for name, trial in trials.items()}
        played = {name: plays.of(decision) for name, (decision, _, _) in decided.items()}
        judges, best = plays.best()
        bound_s = lower_bound(
            groups.take(np.arange(best.issued)),
            cluster.replicas,
            cluster.truth.profiles if cluster.truth else cluster.profiles,
        )
        facts: dict[str, Any] = {
            "best_s": best.seconds,
            "bound_s": bound_s,
            "train_s": train_s(cluster, best, balancer),
        }
        for name, (decision, moved, took_s) in decided.items():
            trials[name].measured(step, decision, played[name])
            share = len(decision.partition.cells[_JUDGE]) / max(len(_cells(decision)), 1)
            predicted_s = decision.predicted_s.get(decision.chosen)
            yield _row(
                name, step, played[name], facts, (decision.mode, share, moved, took_s, predicted_s)
            )
        yield _row(ORACLE, step, best, facts, ("split", judges / cluster.replicas, 0, 0.0, None))
        in_order = groups.kept[best.order]
        rate = rate.after(by_quarter(in_order), by_quarter(np.ones(len(in_order))))


def _row(
    name: str, step: int, played: Played, facts: Mapping[str, Any], decision_facts: tuple[Any, ...]
) -> Row:
    """Makes the row of one step under one policy.

    facts: what all rows of the step have in common.
    decision_facts: (mode, share of the cells that judge, cells moved, processor seconds of
        deciding, predicted seconds).
    """
    mode, share, moved, took_s, predicted_s = decision_facts
    return Row(
        policy=name,
        step=step,
        seconds=played.seconds,
        mode=mode,
        share=share,
        moved=moved,
        issued=played.issued,
        kept=played.kept,
        decision_s=took_s,
        predicted_s=predicted_s,
        idle=played.idle,
        **facts,
    )


def _cells(decision: Decision) -> set[Cell]:
    """Returns all cells at which any role is awake."""
    return {*decision.partition.cells[_POLICY], *decision.partition.cells[_JUDGE]}


class _Plays:
    """Plays one step's groups on any engines, and remembers the result for each of them."""

    def __init__(self, cluster: Cluster, groups: Groups, rate: KeepRate, seed: int) -> None:
        """seed: of what the engines' luck is drawn from, where there is a ``Cluster.truth``."""
        self._cluster = cluster
        self._groups = groups
        self._rate = rate
        self._seed = seed
        self._played: dict[Engines, Played] = {}

    def of(self, decision: Decision) -> Played:
        """Returns the rollout under a decision."""
        size = self._cluster.size
        n = self._cluster.replicas
        if decision.mode == "colocated":
            return self._play(Engines("colocated", n, n))
        if decision.mode == "coresident":
            return self._play(Engines("coresident", n, 0))
        devices = [
            sum(len(c.devices) for c in decision.partition.cells[role])
            for role in (_POLICY, _JUDGE)
        ]
        return self._play(Engines("split", devices[0] // size, devices[1] // size))

    def best(self) -> tuple[int, Played]:
        """Returns how many replicas judge in the best fixed split, and the rollout under it.

        The search starts from a coarse grid and then looks ever closer around its least point.
        """
        n = self._cluster.replicas
        for share in np.geomspace(0.05, 0.7, 9):
            self._split(round(share * n))
        stride = max(1, n // 32)
        # Both neighbours of the best are played. While one is better, the search moves there; when
        # none is, the stride halves, and at stride 1 the best is found.
        while True:
            best = self._least()
            self._split(best.judge - stride)
            self._split(best.judge + stride)
            if self._least() == best:
                if stride == 1:
                    return best.judge, self._played[best]
                stride = max(1, stride // 2)

    def _least(self) -> Engines:
        """Returns the fastest split of those that were played."""
        splits = [engines for engines in self._played if engines.mode == "split"]
        return min(splits, key=lambda engines: self._played[engines].seconds)

    def _split(self, judges: int) -> None:
        """Plays the split with so many judges; both roles keep at least one replica."""
        n = self._cluster.replicas
        judges = min(max(judges, 1), n - 1)
        self._play(Engines("split", n - judges, judges))

    def _play(self, engines: Engines) -> Played:
        """Returns the rollout on these engines; plays it when it was not played before."""
        if engines not in self._played:
            play_once = self._play_truth if self._cluster.truth else self._play_model
            self._played[engines] = play_once(engines)
        return self._played[engines]

    def _play_model(self, engines: Engines) -> Played:
        """Returns the rollout on the model that policies carry too."""
        cluster = self._cluster
        profiles = cluster.profiles
        if engines.mode == "coresident":
            profiles = coresident(profiles)
        dealing = room_of(cluster.shards), cluster.shards
        return play(
            self._groups,
            engines,
            profiles,
            cluster.needed,
            self._rate,
            cluster.switch_s,
            dealing,
        )

    def _play_truth(self, engines: Engines) -> Played:
        """Returns the rollout on the second model."""
        cluster = self._cluster
        assert cluster.truth is not None
        return stepping.play(
            self._groups,
            engines,
            cluster.truth.profiles,
            cluster.needed,
            self._rate,
            cluster.switch_s,
            factors=cluster.truth.factors,
            instructions=cluster.truth.instructions,
            seed=self._seed,
        )


def train_s(cluster: Cluster, played: Played, balancer: Balancer | None) -> float:
    """Returns the seconds of preparation, training and the push for what a rollout kept.

    All devices train. The slowest rank sets the time; without a balancer all ranks are taken to
    have the same work.
    """
    trained = np.flatnonzero(played.groups.kept[: played.issued])[: cluster.needed]
    groups = played.groups.take(trained)
    lengths = (groups.policy + groups.policy_prompt).ravel()
    trainer = cluster.trainer
    costs = trainer.record_s + trainer.token_s * lengths + trainer.token2_s * lengths**2
    if balancer is None:
        slowest_s = float(costs.sum()) / cluster.replicas
    else:
        samples = groups.policy.shape[1]
        work = Work(
            group=np.repeat(trained, samples),
            prompt=groups.policy_prompt.ravel().astype(np.int64),
            actions=groups.policy.ravel().astype(np.int64),
            extra=np.zeros(len(lengths)),
        )
        slowest_s = max(
            float(costs[rank_records].sum())
            for rank_records in balancer.split(work, cluster.replicas)
        )
    return slowest_s * (1 + trainer.prepare_share) + trainer.update_s + _SYNC_S
