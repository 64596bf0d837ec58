"""A fitted profile is the engine's, whatever the prior's seconds are, with standard errors."""

from __future__ import annotations

import json
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from gcore_placement.fitting import LEAST, TERMS, fit_engine

from gcore_core.contract.engine_profiles import EngineFit, Profile
from gcore_core.contract.measurements import Requests

#: A small model on a CPU: a round costs by the sequence, and prompts are dear.
SMALL = Profile(base_s=2e-3, running_s=1.5e-3, cached_s=2e-6, prefill_s=4e-4)
PRIOR = Profile()


def served(
    profile: Profile, count: int, seed: int, *, at_once: int = 12, noise: float = 0.0, step: int = 0
) -> Requests:
    """Requests that one engine has served round by round, which is how a profile is meant.

    A new request begins when another ends; before a round all new prompts are read.
    """
    random = np.random.default_rng(seed)
    prompt = random.integers(20, 200, count)
    actions = random.integers(5, 120, count)
    start_s, end_s = np.zeros(count), np.zeros(count)
    now_s, begun = 0.0, 0
    left: dict[int, int] = {}
    while begun < count or left:
        while begun < count and len(left) < at_once:
            start_s[begun] = now_s
            left[begun] = int(actions[begun])
            begun += 1
        now_s += profile.prefill_s * sum(int(prompt[i]) for i in left if start_s[i] == now_s)
        cached = sum(int(prompt[i] + actions[i]) - left[i] for i in left)
        round_s = profile.base_s + profile.running_s * len(left) + profile.cached_s * cached
        now_s += round_s * (1 + noise * random.standard_normal())
        for i in list(left):
            left[i] -= 1
            if not left[i]:
                end_s[i] = now_s
                del left[i]
    nothing = np.zeros(count, np.int64)
    return Requests(
        step=nothing + step,
        group=nothing,
        arrival_s=start_s,
        start_s=start_s,
        end_s=end_s,
        prompt=prompt,
        actions=actions,
        parent=nothing - 1,
        kept=nothing > 0,
        replica=nothing,
    )


def joined(*parts: Requests) -> Requests:
    names = list(vars(parts[0]))
    return Requests(**{n: np.concatenate([getattr(part, n) for part in parts]) for n in names})


def varied(profile: Profile, noise: float = 0.0, seed: int = 0) -> Requests:
    """Steps with few and with many requests at once, so that terms can be told apart."""
    sizes = (2, 6, 16)
    return joined(
        *(
            served(profile, 150, seed + i, at_once=size, noise=noise, step=i)
            for i, size in enumerate(sizes)
        )
    )


def round_s(profile: Profile, running: int) -> float:
    """Seconds of a round of sequences of typical length."""
    return profile.base_s + running * (profile.running_s + 140 * profile.cached_s)


@pytest.mark.parametrize("factor", [1.0, 1e-3, 1e3])
def test_terms_are_recovered_however_slow_the_engine_is(factor: float) -> None:
    truth = replace(SMALL, **{name: getattr(SMALL, name) * factor for name in TERMS})
    profile = fit_engine(varied(truth), PRIOR).profile
    for running in (2, 6, 16):
        assert round_s(profile, running) == pytest.approx(round_s(truth, running), rel=0.05)
    for name, tolerance in (("base_s", 0.25), ("running_s", 0.2), ("prefill_s", 0.1)):
        assert getattr(profile, name) == pytest.approx(getattr(truth, name), rel=tolerance), name
    assert profile.max_running == 16


def test_noise_is_told_by_standard_errors_and_averages_out() -> None:
    fits = [fit_engine(varied(SMALL, noise=0.3, seed=10 * i), PRIOR) for i in range(8)]
    for fit in fits:
        for running in (2, 6, 16):
            assert round_s(fit.profile, running) == pytest.approx(round_s(SMALL, running), rel=0.1)
    values = np.array([fit.profile.prefill_s for fit in fits])
    errors = np.array([fit.errors["prefill_s"] for fit in fits])
    assert np.median(values) == pytest.approx(SMALL.prefill_s, rel=0.1)
    assert (errors > 0).all() and (errors < 0.3 * SMALL.prefill_s).all()


def test_few_requests_scale_the_prior_and_keep_none_of_its_seconds() -> None:
    few = served(SMALL, LEAST - 1, 0)
    fit = fit_engine(few, PRIOR)
    scales = {getattr(fit.profile, name) / getattr(PRIOR, name) for name in TERMS}
    assert max(scales) == pytest.approx(min(scales))
    slow = fit_engine(few, replace(PRIOR, **{n: 50 * getattr(PRIOR, n) for n in TERMS}))
    for name in TERMS:
        assert getattr(slow.profile, name) == pytest.approx(getattr(fit.profile, name))
        assert fit.errors[name] == getattr(fit.profile, name), "it may as well be twice as much"


def test_a_step_whose_batch_never_changes_keeps_what_earlier_steps_told_apart() -> None:
    """Of one size alone, a round's fixed seconds and those of a sequence cannot be told apart."""
    first = fit_engine(varied(SMALL), PRIOR)
    fit = first
    for seed in range(3):
        fit = fit_engine(served(SMALL, 150, 90 + seed, at_once=6), PRIOR, fit)
    for name, tolerance in (("base_s", 0.3), ("running_s", 0.1), ("prefill_s", 0.1)):
        assert getattr(fit.profile, name) == pytest.approx(getattr(SMALL, name), rel=tolerance)
    assert fit.profile.max_running == 16, "the most that was ever seen"
    assert fit.expected_s == pytest.approx(fit.measured_s, rel=0.05)


def test_a_term_that_was_nothing_may_come_back() -> None:
    fit = fit_engine(varied(replace(SMALL, base_s=0.0, cached_s=0.0)), PRIOR)
    for seed in range(4):
        fit = fit_engine(varied(SMALL, seed=seed), PRIOR, fit)
    assert fit.profile.base_s == pytest.approx(SMALL.base_s, rel=0.3)
    assert min(fit.errors.values()) > 0


def all_sent_at_once(requests: Requests) -> Requests:
    """The same requests where all that an engine serves in a step were sent at the step's start."""
    return replace(requests, start_s=np.zeros(len(requests)), arrival_s=np.zeros(len(requests)))


@pytest.mark.parametrize("limit", [4, 12, 32])
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_requests_that_wait_in_the_engine_show_how_many_run_at_once(
    limit: int, noise: float
) -> None:
    steps = [
        all_sent_at_once(served(SMALL, 150, seed, at_once=limit, noise=noise, step=seed))
        for seed in range(3)
    ]
    fit = fit_engine(steps[0], PRIOR)
    for step in steps[1:]:
        fit = fit_engine(step, PRIOR, fit)
    assert fit.profile.max_running == limit
    # Batches are always full, so the seconds of prompts and of rounds are hard to tell apart.
    assert round_s(fit.profile, limit) == pytest.approx(round_s(SMALL, limit), rel=0.15)
    assert fit.expected_s == pytest.approx(fit.measured_s, rel=0.1)


def test_an_engine_in_which_nothing_waits_runs_all_that_it_has() -> None:
    fit = fit_engine(all_sent_at_once(served(SMALL, 100, 0, at_once=100)), PRIOR)
    assert fit.profile.max_running == 100


def test_an_engine_that_has_changed_is_followed() -> None:
    fit = fit_engine(varied(SMALL), PRIOR)
    slower = replace(SMALL, **{name: 3 * getattr(SMALL, name) for name in TERMS})
    for seed in range(4):
        fit = fit_engine(varied(slower, seed=seed), PRIOR, fit)
    assert fit.profile.running_s == pytest.approx(slower.running_s, rel=0.1)


def test_without_requests_nothing_is_learned() -> None:
    assert fit_engine(Requests(), PRIOR) == EngineFit(profile=PRIOR)
    fit = fit_engine(varied(SMALL), PRIOR)
    assert fit_engine(Requests(), PRIOR, fit) is fit


def test_prompts_that_are_all_empty_leave_finite_numbers() -> None:
    requests = replace(varied(SMALL), prompt=np.zeros(450, np.int64))
    fit = fit_engine(requests, PRIOR)
    numbers = [*msgspec.to_builtins(fit.profile).values(), *fit.errors.values()]
    assert np.isfinite(numbers).all() and min(numbers) >= 0


def test_a_fit_survives_being_written_down() -> None:
    fit = fit_engine(varied(SMALL), PRIOR)
    plain = json.loads(json.dumps(msgspec.to_builtins(fit)))
    assert msgspec.convert(plain, EngineFit) == fit
