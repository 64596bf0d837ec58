"""What ``replay`` does on a cluster that behaves otherwise than its model says.

Seconds are scripted: ``MODEL`` is what the model says, and each test has its truth. Both are the
seconds of 1,000 tokens of answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from gcore_placement import replaying
from gcore_placement.config import ReplayConfig
from gcore_placement.queueing.step import Engines
from gcore_placement.replay import Replay

from gcore_core.contract.engine_profiles import Profile
from gcore_core.contract.measurements import Outcome, Requests
from gcore_core.contract.placement import Decision, Device, Need, Window

Seconds = Mapping[str, float]

#: Of the model whatever ran, or with profiles that were fitted to a split.
MODEL: Seconds = {"split 1": 2.4, "split 2": 1.8, "split 3": 2.7, "colocated": 1.2}
#: Of real engines: two and two is the fastest.
TRUTH: Seconds = {"split 1": 1.7, "split 2": 1.14, "split 3": 1.9, "colocated": 1.3}
#: Of a model that is right with profiles that were fitted to a split.
FITTED_TO_SPLITS: Seconds = {**TRUTH, "colocated": 1.0}

#: Runs ``replay``; see the fixture ``run``.
Run = Callable[..., list[Outcome]]

STEPS = 60
LOADS = {
    "rising": np.linspace(16, 96, STEPS),
    "falling": np.linspace(96, 16, STEPS),
    "like": np.full(STEPS, 48),
}


def fitted(mode: str) -> Profile:
    """A profile from which the scripted model tells in which mode it was fitted."""
    return Profile(base_s=0.01 if mode == "split" else 0.02)


def requests_of(step: int, groups: int) -> dict[str, Requests]:
    random = np.random.default_rng(step)
    zeros = np.zeros(groups)
    shared: dict[str, Any] = {
        "group": np.arange(groups),
        "kept": np.ones(groups, bool),
        "step": np.full(groups, step),
        "prompt": np.full(groups, 50.0),
        **dict.fromkeys(("arrival_s", "start_s", "end_s", "replica"), zeros),
    }
    answers = np.ceil(random.lognormal(np.log(200), 0.3, groups))
    return {
        "rollout": Requests(**shared, actions=answers, parent=np.full(groups, -1)),
        "judge": Requests(**shared, actions=np.full(groups, 50.0), parent=np.arange(groups)),
    }


def candidates(outcomes: Sequence[Outcome]) -> list[str]:
    return [outcome.candidate for outcome in outcomes]


def window_of(step: int, **changes: Any) -> Window:
    first = Window(
        devices=tuple(Device(index=index, kind="cuda", node="node0") for index in range(4)),
        slots={"policy": 4, "rollout": 4, "judge": 4},
        needs={
            "policy": Need(kind="trainer"),
            "rollout": Need(kind="generator", follows="policy"),
            "judge": Need(kind="generator"),
        },
        needed=32,
        step=step,
        switch_s=0.02,
    )
    return replace(first, **changes)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Returns a function that runs ``replay`` for all steps and returns their outcomes."""

    def run(
        loads: Sequence[float],
        truth: Callable[[int], Seconds],
        model: Mapping[str, Seconds],
    ) -> list[Outcome]:
        """Runs a step of so many groups for each load.

        truth: step -> what candidates really take.
        model: mode to which profiles are fitted -> what the model then says.
        """

        def play(groups: Any, engines: Engines, profiles: Any, *_: Any) -> SimpleNamespace:
            name = f"split {engines.judge}" if engines.mode == "split" else engines.mode
            mode = next(mode for mode in model if profiles[0] == fitted(mode))
            return SimpleNamespace(seconds=model[mode][name] * float(groups.policy.sum()) / 1000)

        monkeypatch.setattr(replaying, "play", play)
        policy = Replay(ReplayConfig())
        decision: Decision = policy.revise(None, window_of(0))
        outcomes = []
        for step, groups in enumerate(loads):
            requests = requests_of(step, round(groups))
            tokens = float(requests["rollout"].actions.sum())
            outcome = Outcome(
                step=step,
                candidate=decision.chosen,
                predicted_s=decision.predicted_s.get(decision.chosen),
                measured_s=truth(step)[decision.chosen] * tokens / 1000,
                work=tokens,
            )
            outcomes.append(outcome)
            mode = decision.mode if decision.mode in model else "split"
            decision = policy.revise(
                decision.partition,
                window_of(
                    step + 1,
                    requests=requests,
                    profiles={"rollout": fitted(mode), "judge": fitted(mode)},
                    outcomes=(outcome,),
                    # a resumed run reads the state from a file
                    state=msgspec.json.decode(msgspec.json.encode(decision.state)),
                ),
            )
        return outcomes

    return run


@pytest.mark.parametrize("load", LOADS)
def test_a_model_that_overprices_splits_is_corrected_by_the_splits_that_ran(
    run: Run, load: str
) -> None:
    outcomes = run(LOADS[load], lambda step: TRUTH, {"split": MODEL})
    assert set(candidates(outcomes)[12:]) == {"split 2"}
    # A prediction is of a step like the latest ones, of which the last counts half.
    errors, mean_s = [], outcomes[0].measured_s
    for before, outcome in pairwise(outcomes):
        mean_s = (mean_s + before.measured_s) / 2
        assert outcome.predicted_s
        errors.append(np.log(outcome.predicted_s / mean_s))
    assert abs(np.mean(errors[-20:])) < 0.03


@pytest.mark.parametrize("load", LOADS)
def test_fits_of_turns_do_not_reprice_the_splits_that_ran(run: Run, load: str) -> None:
    """The model is right about splits until cells take turns, and only then overprices them."""
    ran = candidates(
        run(LOADS[load], lambda step: TRUTH, {"split": FITTED_TO_SPLITS, "colocated": MODEL})
    )
    assert "colocated" in ran
    # all but rare trials of co-location
    assert ran[20:].count("split 2") >= STEPS - 20 - 1


@pytest.mark.parametrize("load", LOADS)
def test_a_mode_left_after_a_slow_first_step_is_tried_again(run: Run, load: str) -> None:
    """The first step of a run may be slow, for instance because engines still compile."""

    def truth(step: int) -> Seconds:
        return {name: seconds * (1.8 if step == 0 else 1) for name, seconds in TRUTH.items()}

    ran = candidates(run(LOADS[load], truth, {"split": MODEL, "colocated": MODEL}))
    assert "colocated" in ran
    assert ran[20:].count("split 2") >= STEPS - 20 - 2


def test_trials_of_a_mode_that_stays_slower_become_rare(run: Run) -> None:
    slow = {**MODEL, "split 2": 1.6}
    ran = candidates(run(LOADS["like"], lambda step: slow, {"split": slow, "colocated": slow}))
    first = ran.index("colocated")
    trials = [step for step in range(first, STEPS) if ran[step] != "colocated"]
    waits = np.diff([first, *trials])
    assert 2 <= len(trials) <= 4
    assert all(later >= 1.8 * earlier for earlier, later in zip(waits[1:], waits[2:], strict=False))


def test_where_the_model_is_right_and_stays_the_same_nothing_is_tried(
    run: Run,
) -> None:
    ran = candidates(run(LOADS["like"], lambda step: MODEL, {"split": MODEL}))
    first = ran.index("colocated")
    assert set(ran[first:]) == {"colocated"}
    right = {**MODEL, "split 2": 1.14}
    ran = candidates(run(LOADS["like"], lambda step: right, {"split": right}))
    assert set(ran[1:]) == {"split 2"}
