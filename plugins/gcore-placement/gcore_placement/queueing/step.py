"""One simulated rollout, with named arguments: what is sampled, on which replicas, the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from gcore_core.contract.engine_profiles import Profile
from gcore_core.contract.measurements import Requests
from gcore_core.kits.programs import KeepRate
from gcore_placement.queueing import events

Mode = Literal["split", "colocated", "coresident"]

#: Records that all shards together have at a replica at a time; half of the replica's even share,
#: if that is more.
ROOM = 256

#: For each reason why a replica ran nothing, its row in the ``spent`` of ``events.play``.
CAUSES = {
    "policy: others still answer": events.TAIL,
    "policy: waits for verdicts": events.NO_VERDICT,
    "judge: waits for answers": events.NO_RECORD,
    "judge: others still judge": events.JUDGE_TAIL,
    "changing roles": events.SWAPPING,
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Groups:
    """What may be sampled: N groups of G records, in the order in which they are issued.

    policy: float64[N, G], tokens of each record's answer.
    judge: float64[N, G], tokens of its verdict; 0 for a record that is not judged.
    policy_prompt: float64[N, G], tokens that the policy reads before it answers.
    judge_prompt: float64[N, G], tokens that the judge reads before it answers.
    kept: bool[N], whether the group teaches.
    """

    policy: np.ndarray
    judge: np.ndarray
    policy_prompt: np.ndarray
    judge_prompt: np.ndarray
    kept: np.ndarray

    def __len__(self) -> int:
        return len(self.kept)

    def take(self, which: np.ndarray) -> Groups:
        """Returns the groups that an index array or a mask names."""
        return Groups(
            policy=self.policy[which],
            judge=self.judge[which],
            policy_prompt=self.policy_prompt[which],
            judge_prompt=self.judge_prompt[which],
            kept=self.kept[which],
        )

    def tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens that are written and those that are read before them.

        Both are float64[2, N, G], of the policy and of the judge.
        """
        actions = np.stack([self.policy, self.judge]).astype(float)
        prompts = np.stack([self.policy_prompt, self.judge_prompt]).astype(float)
        return actions, prompts


@dataclass(frozen=True)
class Engines:
    """Which replicas serve which role.

    mode: "split": each replica serves one role. "colocated": all serve the policy first, then all
        serve the judge. "coresident": each of the ``policy`` replicas holds both models.
    policy: replicas of the policy.
    judge: replicas of the judge.
    """

    mode: Mode
    policy: int
    judge: int

    @property
    def serves(self) -> np.ndarray:
        """The roles that each replica serves: int8[replicas], bit 0 for the policy, bit 1 for
        the judge.
        """
        if self.mode == "coresident":
            return np.full(self.policy, 3, np.int8)
        return np.repeat(np.array([1, 2], np.int8), [self.policy, self.judge])


@dataclass(frozen=True, kw_only=True, eq=False)
class Played:
    """The result of one rollout.

    seconds: how long it took.
    issued: groups issued.
    kept: of those, groups that teach.
    engines: replicas that can run at once.
    spent: float64[rows of ``events``], replica-seconds.
    order: int64[finished], issued groups in the order in which they finished.
    times: float64[3, 2, N, G], seconds of arrival, start and end of each role's requests.
    replica: int64[2, N, G], the replica of each request; -1 if none served it.
    groups: what could be sampled.
    capacity: replica-seconds of the policy and of the judge.
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
    capacity: tuple[float, float]

    @classmethod
    def of(cls, result: events.Played, groups: Groups, serves: np.ndarray, engines: int) -> Played:
        """Names what the compiled code returned; see ``events._play``.

        groups: what could be sampled.
        serves: int8[replicas], the roles that each replica served; see ``Engines.serves``.
        engines: replicas that can run at once.
        """
        seconds, issued, kept, spent, order, times, replica = result
        capacity_s = [float(((serves >> role) & 1).sum()) * seconds for role in range(2)]
        return cls(
            seconds=seconds,
            issued=issued,
            kept=kept,
            engines=engines,
            spent=spent,
            order=order,
            times=times,
            replica=replica,
            groups=groups,
            capacity=(capacity_s[0], capacity_s[1]),
        )

    def busy(self, role: int) -> float:
        """Returns the share of a role's replica-seconds in which a replica ran anything."""
        return float(self.spent[events.BUSY + role] / max(self.capacity[role], 1e-12))

    def filled(self, role: int) -> float:
        """Returns the share of a role's places (sequences that can run at once) that were taken."""
        return float(self.spent[events.FILLED + role] / max(self.capacity[role], 1e-12))

    @property
    def idle(self) -> dict[str, float]:
        """Cause -> share of all replica-seconds in which a replica ran nothing because of it."""
        return {
            name: float(self.spent[row] / max(self.engines * self.seconds, 1e-12))
            for name, row in CAUSES.items()
        }

    def requests(self, role: int, step: int) -> Requests:
        """Returns the requests of a role (0 policy, 1 judge) as a run would have measured them."""
        groups = self.issued
        samples = self.groups.policy.shape[1]
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
    """Simulates sampling until ``needed`` groups are kept and all issued ones have their verdicts.

    It ends earlier if there are no more groups.

    groups: what may be sampled.
    engines: which replicas serve which role.
    profiles: those of the policy's and of the judge's replicas, in this order.
    needed: groups that must be kept.
    rate: the rule that says how many groups to issue.
    switch_s: seconds that it takes all replicas to change roles; only mode "colocated" pays them.
    dealing: (room, shards). room: records that a shard has at a replica at a time; with 0 there is
        no limit, and records wait in one queue for all replicas. shards: each deals its own groups
        to the replicas that have the fewest of its records.
    """
    in_turn = engines.mode == "colocated"
    serves = engines.serves
    actions, prompts = groups.tokens()
    result = events.play(
        actions,
        prompts,
        groups.kept,
        serves,
        profile_table(profiles),
        rate.rule(),
        needed,
        float(switch_s),
        in_turn,
        dealing,
    )
    at_once = max(engines.policy, engines.judge) if in_turn else len(serves)
    return Played.of(result, groups, serves, at_once)


def compile_play() -> None:
    """Has ``play`` compiled, unless its compiled code lies on the disk: some 25 s once a machine.

    The smallest rollout has the types of every other one, so nothing is compiled again for those.
    """
    one = np.ones((1, 1))
    groups = Groups(
        policy=one, judge=one, policy_prompt=one, judge_prompt=one, kept=np.ones(1, bool)
    )
    rate = KeepRate(rates=(1.0,) * 4, is_known=True)
    play(groups, Engines("split", 1, 1), (Profile(), Profile()), 1, rate)


def profile_table(profiles: tuple[Profile, Profile]) -> np.ndarray:
    """Returns float64[2, 6]: of the policy and of the judge the columns that ``events`` names."""
    return np.array(
        [
            [p.base_s, p.running_s, p.cached_s, p.prefill_s, p.max_running, p.cache_tokens]
            for p in profiles
        ]
    )


def room_of(shards: int) -> int:
    """Returns how many records one of ``shards`` shards may have at a replica at a time."""
    return max(1, ROOM // shards)


def coresident(
    profiles: tuple[Profile, Profile], per_cell: Sequence[int] = (1, 1)
) -> tuple[Profile, Profile]:
    """Returns the profiles of both roles for engines that hold both models.

    per_cell: replicas of each role on the devices of one such engine. They are merged into one that
    is as fast as all of them and has half of their cache.
    """
    merged = [
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
    return merged[0], merged[1]


def lower_bound(groups: Groups, engines: int, profiles: tuple[Profile, Profile]) -> float:
    """Returns seconds below which no placement can come.

    It is the greater of two times: all work at full batches, spread over all engines; and the
    slowest single record, its answer and its verdict one after the other, each running alone.
    """
    work = np.zeros(groups.policy.shape)
    chain = np.zeros(groups.policy.shape)
    for profile, prompt, actions in (
        (profiles[0], groups.policy_prompt, groups.policy),
        (profiles[1], groups.judge_prompt, groups.judge),
    ):
        work += profile.seconds(prompt, actions)
        chain += replace(profile, max_running=1).seconds(prompt, actions)
    return max(float(work.sum()) / engines, float(chain.max(initial=0.0)))
