"""The second model: it must agree with the first where both say the same, and differ where it
should.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gcore_placement.queueing import events, stepping
from gcore_placement.queueing.step import Engines, Groups, Played, play

from gcore_core.contract.engine_profiles import Profile
from gcore_core.kits.programs import KeepRate

PROFILE = Profile(
    base_s=0.01, running_s=1e-4, cached_s=1e-7, prefill_s=1e-5, max_running=32, cache_tokens=10**6
)
STEADY = [np.ones(1)] * len(stepping.FULLNESS)
EVERYTHING = KeepRate(rates=(1.0,) * 4, is_known=True)


def some_groups(count: int = 48, prompt: float = 64.0) -> Groups:
    random = np.random.default_rng(3)
    policy = np.ceil(random.lognormal(6, 0.8, (count, 8)))
    return Groups(
        policy=policy,
        judge=np.ceil(random.lognormal(5, 0.5, policy.shape)),
        policy_prompt=np.full(policy.shape, prompt),
        judge_prompt=128 + policy,
        kept=np.ones(count, bool),
    )


def walk(
    groups: Groups,
    engines: Engines = Engines("split", 6, 2),  # noqa: B008
    profile: Profile = PROFILE,
    factors: list[np.ndarray] = STEADY,  # noqa: B006
) -> Played:
    return stepping.play(
        groups,
        engines,
        (profile, profile),
        len(groups),
        EVERYTHING,
        3.0,
        factors=factors,
        instructions=128.0,
        seed=1,
    )


@pytest.mark.parametrize("engines", [Engines("split", 6, 2), Engines("colocated", 8, 8)])
def test_both_models_agree_on_steady_engines_with_room(engines: Engines) -> None:
    groups = some_groups()
    first = play(groups, engines, (PROFILE, PROFILE), len(groups), EVERYTHING, 3.0)
    second = walk(groups, engines)
    assert second.seconds == pytest.approx(first.seconds, rel=0.1)
    for role in range(2):
        assert second.busy(role) == pytest.approx(first.busy(role), abs=0.1)
        assert second.filled(role) == pytest.approx(first.filled(role), abs=0.1)


@pytest.mark.parametrize("engines", [Engines("split", 6, 2), Engines("colocated", 8, 8)])
def test_every_request_is_served_once_and_every_second_is_told(engines: Engines) -> None:
    groups = some_groups()
    played = walk(groups, engines)
    assert sorted(played.order.tolist()) == list(range(len(groups)))
    assert (played.replica >= 0).all()
    arrived, started, ended = played.times
    assert (arrived <= started).all() and (started < ended).all()
    assert (ended[0] <= arrived[1]).all(), "a verdict is asked for when its answer is there"
    if engines.mode == "split":
        busy = (played.busy(0) * engines.policy + played.busy(1) * engines.judge) / 8
        assert busy + sum(played.idle.values()) == pytest.approx(1)


def test_a_full_cache_costs_time_because_sequences_are_read_again() -> None:
    groups = some_groups()
    tight = walk(groups, profile=replace(PROFILE, cache_tokens=6000))
    assert (tight.replica >= 0).all() and len(tight.order) == len(groups)
    assert tight.spent[events.BUSY] > 1.1 * walk(groups).spent[events.BUSY]


def test_a_prompt_of_a_group_is_read_once_while_the_cache_remembers_it() -> None:
    """A prompt takes 4 s to read. Answers of 6,000 tokens drive it out of a cache of 5,000."""
    slow = replace(PROFILE, cached_s=0.0, prefill_s=1e-3, cache_tokens=10**7)
    groups = replace(some_groups(4, prompt=4000.0), policy=np.full((4, 8), 6000.0))
    one = Engines("split", 1, 1)
    unread = walk(replace(groups, policy_prompt=np.zeros((4, 8))), one, slow)
    remembered = walk(groups, one, slow)
    assert remembered.spent[events.BUSY] - unread.spent[events.BUSY] < 4 * 4.0 + 1
    little = replace(slow, cache_tokens=5000, max_running=1)
    unread = walk(replace(groups, policy_prompt=np.zeros((4, 8))), one, little)
    forgotten = walk(groups, one, little)
    assert forgotten.spent[events.BUSY] - unread.spent[events.BUSY] > 4 * 8 * 4.0 - 1


def test_a_factor_stretches_the_whole_rollout() -> None:
    twice = [np.full(1, 2.0)] * len(stepping.FULLNESS)
    steady = walk(some_groups()).seconds
    assert walk(some_groups(), factors=twice).seconds == pytest.approx(2 * steady, rel=0.1)


def test_engines_with_both_models_are_refused() -> None:
    with pytest.raises(ValueError, match="both models"):
        walk(some_groups(), Engines("coresident", 8, 0))


def recording(sequences: int, steps: int = 1000) -> dict[str, list[float]]:
    random = np.random.default_rng(sequences)
    decoding = np.full(steps, sequences)
    cached = random.integers(100, 200, steps) * sequences
    prefill = random.integers(0, 2, steps) * 64
    us = 1000 + 20 * decoding + 0.1 * cached + 5 * prefill
    columns = {"us": us, "decoding": decoding, "cached": cached, "prefill": prefill}
    return {name: column.tolist() for name, column in columns.items()}


def test_steps_that_follow_a_profile_have_no_factor_but_one() -> None:
    factors = stepping.slowness([recording(n) for n in (1, 8, 24, 64)], 64)
    assert all(np.allclose(part, 1.0) for part in factors)


def test_a_stall_is_in_the_factors_of_engines_that_are_as_full() -> None:
    recordings = [recording(n) for n in (1, 8, 24, 64)]
    recordings[2]["us"][500] *= 100
    factors = stepping.slowness(recordings, 64)
    assert [round(float(part.max()), 1) > 2 for part in factors] == [False, False, True, False]


def test_recordings_without_one_kind_of_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="recordings leave"):
        stepping.slowness([recording(64)], 64)
