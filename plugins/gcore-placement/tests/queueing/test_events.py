"""The compiled model against one written for reading: every sequence by itself, everything advanced
at every event.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from gcore_placement.fitting import fit_engine
from gcore_placement.queueing.step import ROOM, Engines, Groups, lower_bound, play, room_of

from gcore_core.contract.engine_profiles import Profile
from gcore_core.kits.programs import KeepRate

ENGINES = [
    Engines("split", 3, 2),
    Engines("split", 1, 4),
    Engines("colocated", 4, 4),
    Engines("coresident", 3, 0),
]


def some_groups(count: int, samples: int, seed: int, judged: float = 1.0) -> Groups:
    random = np.random.default_rng(seed)
    policy = random.lognormal(
        5, 1, (count, samples)
    )  # not whole: two that end together have no order
    return Groups(
        policy=policy,
        judge=random.lognormal(4, 0.5, policy.shape) * (random.random(policy.shape) < judged),
        policy_prompt=np.full(policy.shape, 64.0),
        judge_prompt=128 + policy,
        kept=random.random(count) < 0.6,
    )


SLOW = Profile(
    base_s=0.01, running_s=1e-3, cached_s=2e-6, prefill_s=1e-4, max_running=7, cache_tokens=4000
)
FAST = Profile(
    base_s=0.004, running_s=2e-4, cached_s=1e-6, prefill_s=2e-4, max_running=5, cache_tokens=5000
)


@dataclass
class Replica:
    """running: [role, request, rounds left, tokens cached] of each sequence."""

    serves: int
    prefill: float = 0.0
    running: list[list[float]] = field(default_factory=list)

    def pace(self, profiles: tuple[Profile, Profile]) -> tuple[float, float]:
        first = growth = 0.0
        for role, profile in enumerate(profiles):
            own = [sequence for sequence in self.running if sequence[0] == role]
            if own:
                first += (
                    profile.base_s
                    + profile.running_s * len(own)
                    + profile.cached_s * sum(s[3] for s in own)
                )
                growth += profile.cached_s * len(own) / 2
        return first, growth

    def due(self, profiles: tuple[Profile, Profile]) -> float:
        if not self.running:
            return math.inf
        first, growth = self.pace(profiles)
        left = min(sequence[2] for sequence in self.running)
        return self.prefill + first * left + growth * left**2

    def advance(self, seconds: float, profiles: tuple[Profile, Profile]) -> None:
        if not self.running:
            return
        prefilled = min(self.prefill, seconds)
        self.prefill -= prefilled
        if seconds > prefilled:
            first, growth = self.pace(profiles)
            rounds = (math.sqrt(first**2 + 4 * growth * (seconds - prefilled)) - first) / (
                2 * growth
            )
            for sequence in self.running:
                sequence[2] -= rounds
                sequence[3] += rounds


def reference(  # noqa: C901, PLR0912
    groups: Groups,
    engines: Engines,
    profiles: tuple[Profile, Profile],
    needed: int,
    rate: KeepRate,
    switch_s: float,
) -> tuple[float, int, int]:
    replicas = [Replica(int(mask)) for mask in engines.serves]
    actions, prompts = [groups.policy, groups.judge], [groups.policy_prompt, groups.judge_prompt]
    queues: list[list[tuple[int, int]]] = [[], []]
    samples, now, phase, issued, kept, finished = groups.policy.shape[1], 0.0, 0, 0, 0, 0
    left = {}
    more = min(rate.missing(needed=needed, kept=0, finished=0, in_flight=0), len(groups))
    while True:
        for group in range(issued, issued + more):
            left[group] = samples
            queues[0] += [(group, sample) for sample in range(samples)]
        issued, more = issued + more, 0
        running = [sum(s[0] == role for r in replicas for s in r.running) for role in range(2)]
        if (
            engines.mode == "colocated"
            and not queues[phase]
            and not running[phase]
            and queues[1 - phase]
        ):
            phase, now = 1 - phase, now + switch_s
        for role in range(2):
            if engines.mode == "colocated" and role != phase:
                continue
            able = [replica for replica in replicas if replica.serves >> role & 1]
            while queues[role] and able:
                replica = min(able, key=lambda r: len(r.running))
                request = queues[role][0]
                mine = sum(sequence[0] == role for sequence in replica.running)
                full = (
                    sum(s[3] for s in replica.running) + prompts[role][request]
                    > profiles[role].cache_tokens
                )
                if mine >= profiles[role].max_running or (replica.running and full):
                    break
                queues[role].pop(0)
                replica.running.append(
                    [role, request, actions[role][request], prompts[role][request]]
                )
                replica.prefill += prompts[role][request] * profiles[role].prefill_s
        due = [replica.due(profiles) for replica in replicas]
        if min(due) == math.inf:
            return now, issued, kept
        chosen = replicas[due.index(min(due))]
        for replica in replicas:
            replica.advance(min(due), profiles)
        now += min(due)
        ended = [sequence for sequence in chosen.running if sequence[2] < 1e-7]
        chosen.running = [sequence for sequence in chosen.running if sequence[2] >= 1e-7]
        chosen.prefill = chosen.prefill if chosen.running else 0.0
        for role, request, *_ in ended:
            if role == 0 and groups.judge[request] > 0:
                queues[1].append(request)
                continue
            left[request[0]] -= 1
            if left[request[0]] == 0:
                finished, kept = finished + 1, kept + int(groups.kept[request[0]])
                in_flight = issued + more - finished
                if engines.mode != "colocated" or in_flight == 0:
                    missing = rate.missing(
                        needed=needed, kept=kept, finished=finished, in_flight=in_flight
                    )
                    more = min(more + missing, len(groups) - issued)


@pytest.mark.parametrize("engines", ENGINES, ids=str)
@pytest.mark.parametrize("judged", [1.0, 0.5, 0.0])
def test_the_compiled_model_matches_the_readable_reference_model(
    engines: Engines, judged: float
) -> None:
    """Within 1e-6 s of some hundred, with full batches, full caches and refills."""
    for seed in range(3):
        groups, rate = some_groups(40, 3, seed, judged), KeepRate(margin=0.5)
        seconds, issued, kept = reference(groups, engines, (SLOW, FAST), 12, rate, 2.5)
        played = play(groups, engines, (SLOW, FAST), 12, rate, 2.5, dealing=(0, 1))
        assert (played.issued, played.kept) == (issued, kept)
        assert played.seconds == pytest.approx(seconds, abs=1e-6)


@pytest.mark.parametrize("engines", ENGINES, ids=str)
def test_no_rollout_is_faster_than_the_lower_bound(engines: Engines) -> None:
    groups, rate = some_groups(30, 4, 7), KeepRate(rates=(1.0,) * 4, is_known=True)
    everything = replace(groups, kept=np.ones(len(groups), bool))
    played = play(everything, engines, (SLOW, SLOW), len(groups), rate)
    assert played.seconds >= lower_bound(groups, len(engines.serves), (SLOW, SLOW))


@pytest.mark.parametrize("engines", ENGINES[:2], ids=str)
def test_busy_and_idle_shares_add_up(engines: Engines) -> None:
    played = play(some_groups(40, 3, 1), engines, (SLOW, FAST), 12, KeepRate())
    busy = (played.busy(0) * engines.policy + played.busy(1) * engines.judge) / (
        engines.policy + engines.judge
    )
    assert busy + sum(played.idle.values()) == pytest.approx(1)


def test_busy_and_idle_shares_add_up_where_all_replicas_change_roles() -> None:
    played = play(
        some_groups(40, 3, 1),
        Engines("colocated", 5, 5),
        (SLOW, FAST),
        12,
        KeepRate(),
        switch_s=2.5,
    )
    assert played.idle["changing roles"] > 0
    assert played.busy(0) + played.busy(1) + sum(played.idle.values()) == pytest.approx(1)


def test_requests_start_after_arrival_and_verdicts_after_their_answers() -> None:
    played = play(some_groups(40, 3, 1), ENGINES[0], (SLOW, FAST), 12, KeepRate())
    answers, verdicts = played.requests(0, 4), played.requests(1, 4)
    for requests in (answers, verdicts):
        assert (requests.arrival_s <= requests.start_s).all() and (
            requests.start_s < requests.end_s
        ).all()
        assert set(requests.step) == {4}
    np.testing.assert_array_equal(verdicts.arrival_s, answers.end_s[verdicts.parent])


@pytest.mark.parametrize(
    ("shards", "replicas", "room"), [(1, 3, 256), (2, 5, 128), (1, 3, 25), (3, 4, 5), (1, 3, 1)]
)
def test_every_record_goes_to_the_replica_with_fewest_open_records_of_its_shard(
    shards: int, replicas: int, room: int
) -> None:
    """Told from what came out: of each shard, in order, when a record was dealt and what was owed
    then.
    """
    groups = some_groups(40, 3, 1)
    whole = replace(groups, kept=np.ones(40, bool))
    roomy = replace(
        SLOW, max_running=199, cache_tokens=10**9
    )  # so that what is dealt begins at once
    rate = KeepRate(rates=(1.0,) * 4, is_known=True)
    played = play(
        whole, Engines("split", replicas, 2), (roomy, FAST), 40, rate, dealing=(room, shards)
    )
    answers = played.requests(0, 0)
    assert played.issued == 40
    for shard, own in enumerate(np.array_split(np.arange(40), shards)):
        mine = np.flatnonzero(np.isin(answers.group, own))
        most = max(room, len(mine) // (2 * replicas))
        assert (np.diff(answers.start_s[mine]) >= 0).all(), "in the order of their ordinals"
        for at, record in enumerate(mine):
            dealt, now_s = mine[:at], answers.start_s[record]
            owed = np.bincount(
                answers.replica[dealt[answers.end_s[dealt] > now_s]], minlength=replicas
            )
            turn = (np.arange(replicas) - shard * replicas // shards) % replicas
            fewest = min(range(replicas), key=lambda i: (owed[i], turn[i]))
            assert answers.replica[record] == fewest and owed[fewest] < most
            assert now_s == 0 or owed[fewest] == most - 1, "it waited only while all were full"


def test_records_per_replica_do_not_depend_on_the_number_of_shards() -> None:
    assert [room_of(shards) * shards for shards in (1, 2, 8, 64)] == [ROOM] * 4
    assert room_of(2 * ROOM) == 1


def test_the_simulation_ends_when_no_groups_are_left() -> None:
    groups = some_groups(5, 2, 0)
    assert play(groups, ENGINES[0], (SLOW, FAST), 50, KeepRate()).issued == 5


def test_a_fitted_profile_equals_that_of_the_engines() -> None:
    """Of requests that the model itself has served, within a tenth of a round's seconds."""
    truth = Profile(
        base_s=0.02,
        running_s=2e-4,
        cached_s=2e-7,
        prefill_s=1e-5,
        max_running=64,
        cache_tokens=10**6,
    )
    groups = some_groups(400, 4, 3)
    played = play(
        replace(groups, kept=groups.kept | True),
        Engines("split", 4, 4),
        (truth, truth),
        400,
        KeepRate(),
    )
    prior = replace(truth, base_s=1.0, running_s=0.0, cached_s=0.0)
    fitted = fit_engine(played.requests(0, 0), prior).profile
    for running, cached in ((2, 1000), (40, 20_000)):
        told, true = (
            p.base_s + p.running_s * running + p.cached_s * cached for p in (fitted, truth)
        )
        assert told == pytest.approx(true, rel=0.1)
