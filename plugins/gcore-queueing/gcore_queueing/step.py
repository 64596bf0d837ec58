"""One rollout with named arguments: what is to be sampled, on which replicas, and what came of
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from gcore_core.contract.measurements import Profile, Requests
from gcore_core.controllers.keep_rate import KeepRate
from gcore_queueing import events

Mode = Literal["split", "colocated", "coresident"]

#: records that all shards together have at a replica at a time; more when that is less than half of
#: its even share
ROOM = 256

#: why a replica ran nothing -> row of ``events.play``'s ``spent``
CAUSES = {
    "policy: others still answer": events.TAIL,
    "policy: waits for verdicts": events.NO_VERDICT,
    "judge: waits for answers": events.NO_RECORD,
    "judge: others still judge": events.JUDGE_TAIL,
    "changing roles": events.SWAPPING,
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Groups:
    """What may be sampled, N groups of G in the order in which they are issued.

    policy, judge: float64[N, G], actions of each record and of its verdict; 0 for a record that is
        not judged.
    policy_prompt, judge_prompt: float64[N, G], tokens that are read first. kept: bool[N], whether
        the group teaches.
    """

    policy: np.ndarray
    judge: np.ndarray
    policy_prompt: np.ndarray
    judge_prompt: np.ndarray
    kept: np.ndarray

    def __len__(self) -> int:
        return len(self.kept)

    def take(self, which: np.ndarray) -> Groups:
        return Groups(
            policy=self.policy[which],
            judge=self.judge[which],
            policy_prompt=self.policy_prompt[which],
            judge_prompt=self.judge_prompt[which],
            kept=self.kept[which],
        )


@dataclass(frozen=True)
class Engines:
    """Who serves what. split: ``policy`` and ``judge`` replicas; colocated: first all of the one,
    then all of the other; coresident: each of the ``policy`` replicas holds both models.
    """

    mode: Mode
    policy: int
    judge: int

    @property
    def serves(self) -> np.ndarray:
        if self.mode == "coresident":
            return np.full(self.policy, 3, np.int8)
        return np.repeat(np.array([1, 2], np.int8), [self.policy, self.judge])


@dataclass(frozen=True, kw_only=True, eq=False)
class Played:
    """One rollout. issued, kept: groups. order: issued groups by when they finished. requests: by
    role.
    """

    seconds: float
    issued: int
    kept: int
    engines: int
    spent: np.ndarray
    order: np.ndarray
    times: np.ndarray
    replica: np.ndarray
    groups: Groups
    capacity: tuple[float, float]  # replica-seconds of each role

    def busy(self, role: int) -> float:
        """Share of a role's replica-seconds in which a replica ran anything."""
        return float(self.spent[events.BUSY + role] / max(self.capacity[role], 1e-12))

    def filled(self, role: int) -> float:
        """Share of a role's places that were taken."""
        return float(self.spent[events.FILLED + role] / max(self.capacity[role], 1e-12))

    @property
    def idle(self) -> dict[str, float]:
        """Cause -> share of all replica-seconds."""
        return {
            name: float(self.spent[row] / max(self.engines * self.seconds, 1e-12))
            for name, row in CAUSES.items()
        }

    def requests(self, role: int, step: int) -> Requests:
        """The columns of a role, as a run would have measured them."""
        groups, samples = self.issued, self.groups.policy.shape[1]
        flat = {
            "arrival_s": self.times[0, role],
            "start_s": self.times[1, role],
            "end_s": self.times[2, role],
            "prompt": (self.groups.judge_prompt if role else self.groups.policy_prompt),
            "actions": (self.groups.judge if role else self.groups.policy),
            "replica": self.replica[role],
        }
        columns = {name: column[:groups].ravel() for name, column in flat.items()}
        count = groups * samples
        return Requests(
            step=np.full(count, step),
            group=np.repeat(np.arange(groups), samples),
            parent=np.arange(count) if role else np.full(count, -1),
            kept=np.repeat(self.groups.kept[:groups], samples),
            **columns,
        )


def play(
    groups: Groups,
    engines: Engines,
    profiles: tuple[Profile, Profile],
    needed: int,
    rate: KeepRate,
    switch_s: float = 0,
    dealing: tuple[int, int] = (ROOM, 1),
) -> Played:
    """Samples until ``needed`` groups are kept and every issued one has its verdict, or there are
    no more groups.

    profiles: of the policy's and the judge's replicas. switch_s: what it takes all replicas to
        change roles. dealing:
    records that a shard has at a replica at a time, 0: no such limit, and what waits waits in one
    queue for all; and shards, each dealing its own groups to the replicas that owe it the fewest.
    """
    table = np.array(
        [
            [p.base_s, p.running_s, p.cached_s, p.prefill_s, p.max_running, p.cache_tokens]
            for p in profiles
        ]
    )
    actions = np.stack([groups.policy, groups.judge]).astype(float)
    prompts = np.stack([groups.policy_prompt, groups.judge_prompt]).astype(float)
    in_turn, serves = engines.mode == "colocated", engines.serves
    seconds, issued, kept, spent, order, times, replica = events.play(
        actions,
        prompts,
        groups.kept,
        serves,
        table,
        rate.rule(),
        needed,
        float(switch_s),
        in_turn,
        dealing,
    )
    held = [float(((serves >> role) & 1).sum()) * seconds for role in range(2)]
    return Played(
        seconds=seconds,
        issued=issued,
        kept=kept,
        engines=max(engines.policy, engines.judge) if in_turn else len(serves),
        spent=spent,
        order=order,
        times=times,
        replica=replica,
        groups=groups,
        capacity=(held[0], held[1]),
    )


def room_of(shards: int) -> int:
    """Of one shard, at a replica."""
    return max(1, ROOM // shards)


def coresident(
    profiles: tuple[Profile, Profile], per_cell: Sequence[int] = (1, 1)
) -> tuple[Profile, Profile]:
    """Profiles of engines that hold both models: ``per_cell`` replicas of a role as one, with half
    of the cache.
    """
    found = [
        replace(
            profile,
            running_s=profile.running_s / count,
            cached_s=profile.cached_s / count,
            prefill_s=profile.prefill_s / count,
            max_running=profile.max_running * count,
            cache_tokens=profile.cache_tokens * count // 2,
        )
        for profile, count in zip(profiles, per_cell, strict=True)
    ]
    return found[0], found[1]


def lower_bound(groups: Groups, engines: int, profiles: tuple[Profile, Profile]) -> float:
    """Seconds below which no placement comes: all work at full batches, or the longest answer and
    its verdict alone.
    """
    work, chain = np.zeros(groups.policy.shape), np.zeros(groups.policy.shape)
    for profile, prompt, actions in (
        (profiles[0], groups.policy_prompt, groups.policy),
        (profiles[1], groups.judge_prompt, groups.judge),
    ):
        work += profile.seconds(prompt, actions)
        chain += replace(profile, max_running=1).seconds(prompt, actions)
    return max(float(work.sum()) / engines, float(chain.max(initial=0.0)))
