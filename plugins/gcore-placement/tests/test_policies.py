"""What the policies decide, on windows as a run would show them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from gcore_placement.cells import Split, find_pool
from gcore_placement.config import ReplayConfig, SplitConfig, UtilisationConfig
from gcore_placement.fixed import Colocated, Coresident, FixedSplit
from gcore_placement.measuring import MeasuredWindow
from gcore_placement.queueing import events
from gcore_placement.queueing.step import Engines, play
from gcore_placement.replay import Replay
from gcore_placement.replaying import as_groups, slower
from gcore_placement.utilisation import Utilisation

from gcore_core.contract.engine_profiles import Profile
from gcore_core.contract.errors import ConfigError, PlacementError
from gcore_core.contract.measurements import Outcome, Requests
from gcore_core.contract.placement import Decision, Device, Need
from gcore_core.kits.programs import KeepRate

PROFILE = Profile(
    base_s=0.01, running_s=1e-4, cached_s=1e-7, prefill_s=1e-5, max_running=16, cache_tokens=10**6
)


def window(
    devices: int, judge_tokens: float = 100, groups: int = 64, seed: int = 0, **changes: object
) -> MeasuredWindow:
    """A step whose answers have about 200 tokens; both roles may occupy all devices."""
    random, samples = np.random.default_rng(seed), 4
    count = groups * samples
    answers, verdicts = (
        np.ceil(random.lognormal(np.log(x), 0.4, count)) for x in (200, judge_tokens)
    )
    shared = {
        "group": np.arange(count) // samples,
        "kept": np.ones(count, bool),
        "step": np.zeros(count, np.int64),
    }
    nothing = {name: np.zeros(count) for name in ("arrival_s", "start_s", "end_s", "replica")}
    requests = {
        "rollout": Requests(
            **shared,
            **nothing,
            prompt=np.full(count, 50.0),
            actions=answers,
            parent=np.full(count, -1),
        ),
        "judge": Requests(
            **shared, **nothing, prompt=50 + answers, actions=verdicts, parent=np.arange(count)
        ),
    }
    made = MeasuredWindow(
        devices=tuple(
            Device(index=index, kind="cuda", node=f"node{index // 8}") for index in range(devices)
        ),
        slots={"policy": devices, "rollout": devices, "judge": devices},
        needs={
            "policy": Need(kind="trainer"),
            "rollout": Need(kind="generator", follows="policy"),
            "judge": Need(kind="generator"),
        },
        step=1,
        needed=groups,
        requests=requests,
        profiles={"rollout": PROFILE, "judge": PROFILE},
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def judges(decision: Decision) -> int:
    return len(decision.partition.cells["judge"])


def test_replay_gives_the_judge_more_when_its_verdicts_are_longer() -> None:
    counts = [
        judges(Replay(ReplayConfig()).revise(None, window(16, tokens))) for tokens in (20, 100, 400)
    ]
    assert counts == sorted(counts) and counts[0] < counts[2]


def test_replay_chooses_the_least_predicted_time_and_gives_its_reason() -> None:
    decision = Replay(ReplayConfig(modes=["split"])).revise(None, window(8))
    assert decision.predicted_s[decision.chosen] == min(decision.predicted_s.values())
    assert decision.chosen == f"split {judges(decision)}" and "regret" in decision.reason
    assert decision.seen["judge_requests"] == 256


def test_replay_depends_only_on_its_input_also_over_json() -> None:
    """A resumed run goes on as it would have: the state is all there is, and it survives being
    written down.
    """
    first = Replay(ReplayConfig()).revise(None, window(16))
    state = msgspec.json.decode(msgspec.json.encode(first.state))
    shown = window(16, 300, seed=1, state=state)
    assert Replay(ReplayConfig()).revise(first.partition, shown) == Replay(ReplayConfig()).revise(
        first.partition, shown
    )
    assert (
        Replay(ReplayConfig()).revise(first.partition, replace(shown, state=first.state)).state
        != first.state
    )


def test_replay_gradually_forgets_old_steps() -> None:
    policy = Replay(ReplayConfig(modes=["split"]))

    def after(steps: range) -> int:
        decision = None
        for step in steps:
            shown = window(16, 20 if step < 4 else 400, seed=step, step=step + 1)
            state = decision.state if decision else {}
            decision = policy.revise(decision and decision.partition, replace(shown, state=state))
        assert decision is not None
        return judges(decision)

    assert after(range(4)) < after(range(6)) <= after(range(24)) == after(range(4, 24))


def test_before_any_measurement_the_expected_work_decides() -> None:
    unknown = window(16, requests={})
    assert judges(Replay(ReplayConfig(share=0.5)).revise(None, unknown)) == 8
    expected = Replay(ReplayConfig(policy_tokens=2000, judge_tokens=200)).revise(None, unknown)
    assert 1 <= judges(expected) <= 3 and "expected" in expected.reason


def test_a_step_without_measurements_keeps_the_split() -> None:
    first = Replay(ReplayConfig()).revise(None, window(16))
    again = Replay(ReplayConfig()).revise(
        first.partition, window(16, requests={}, state=first.state)
    )
    assert again.partition == first.partition


def test_colocated_is_a_candidate_once_a_change_of_roles_was_measured() -> None:
    for switch_s, known in ((None, False), (0.1, True)):
        decision = Replay(ReplayConfig()).revise(None, window(2, switch_s=switch_s))
        assert ("colocated" in decision.predicted_s) == known
    assert decision.mode == "colocated", (
        "two devices, one of which would judge for a tenth of the work"
    )


@pytest.mark.parametrize("role", ["rollout", "judge"])
def test_colocated_is_no_candidate_where_a_generator_cannot_sleep(role: str) -> None:
    shown = window(8, switch_s=0.0)
    needs = {**shown.needs, role: replace(shown.needs[role], sleeps=False)}
    decision = Replay(ReplayConfig()).revise(None, replace(shown, needs=needs))
    assert "colocated" not in decision.predicted_s


def test_persistently_wrong_predictions_fall_back_to_the_best_split_that_ran() -> None:
    policy, state, decision = Replay(ReplayConfig(modes=["split"], patience=3)), {}, None
    for step in range(1, 8):
        ran = (
            ("split 3", 50.0) if step % 2 else ("split 5", 40.0)
        )  # seconds that no replay explains
        last = Outcome(
            step=step, candidate=ran[0], predicted_s=1.0, measured_s=1000 * ran[1], work=1000.0
        )
        decision = policy.revise(None, window(8, step=step, outcomes=(last,), state=state))
        state = decision.state
        assert (decision.chosen == "split 5" and "off by more than 30%" in decision.reason) == (
            step >= 3
        )
    explained = decision.predicted_s
    last = replace(last, candidate="split 2", measured_s=explained["split 2"])
    recovered = policy.revise(None, window(8, outcomes=(last,), state=state))
    assert "regret" in recovered.reason


def test_predictions_make_up_for_seconds_that_the_model_leaves_out() -> None:
    policy, state = Replay(ReplayConfig(modes=["split"])), {}
    plain = policy.revise(None, window(8))
    last = Outcome(step=0, candidate="split 3", predicted_s=1.0, measured_s=1.0)
    replayed_s = 1 + policy.revise(None, window(8, outcomes=(last,))).seen["error"]
    for step in range(1, 6):
        last = replace(last, step=step, measured_s=1.2 * replayed_s)
        decision = policy.revise(None, window(8, outcomes=(last,), state=state))
        state = decision.state
    assert decision.predicted_s == pytest.approx(
        {name: 1.2 * seconds for name, seconds in plain.predicted_s.items()}
    )
    assert decision.chosen == plain.chosen


def test_what_is_predicted_is_a_mean_over_the_latest_steps() -> None:
    """One step's seconds depend on the luck of its lengths."""
    policy = Replay(ReplayConfig(modes=["split"]))
    first = policy.revise(None, window(8, judge_tokens=200))
    alone = policy.revise(None, window(8))
    second = policy.revise(None, window(8, state=first.state))
    assert second.predicted_s == pytest.approx(
        {
            name: (first.predicted_s[name] + alone.predicted_s[name]) / 2
            for name in alone.predicted_s
        }
    )


def test_learned_state_survives_a_change_of_pool_size() -> None:
    first = Replay(ReplayConfig()).revise(None, window(16))
    smaller = Replay(ReplayConfig()).revise(None, window(8, state=first.state))
    assert set(smaller.state["regrets"]) == {f"split {n}" for n in range(1, 8)}


def test_a_run_that_goes_on_with_fewer_devices_takes_a_split_that_they_can_have() -> None:
    """Nothing is measured there yet, so the regrets of the larger pool decide."""
    state = {"regrets": {"split 16": 1.0}, "weight": 1.0}
    decision = Replay(ReplayConfig()).revise(None, window(8, requests={}, state=state))
    assert decision.chosen == "split 7"


def test_a_mode_that_a_pool_cannot_have_is_not_taken_from_earlier_regrets() -> None:
    """Where no cell has engines of both roles, they cannot take turns."""
    state = {"regrets": {"colocated": 1.0, "split 4": 1.5}, "weight": 1.0}
    slots = {"policy": 8, "rollout": 4, "judge": 4}
    wrong = {**state, "wrong": 9, "ran": {"colocated": [3, 1.0], "split 4": [3, 2.0]}}
    for carried in (state, wrong):
        given = window(8, requests={}, state=carried, slots=slots)
        decision = Replay(ReplayConfig()).revise(None, given)
        assert (decision.mode, decision.chosen) == ("split", "split 4")


@pytest.mark.parametrize("devices", [64, 600])
def test_replay_decides_for_large_pools_in_candidates_between_its_limits(devices: int) -> None:
    decision = Replay(ReplayConfig(largest=32, draws=1)).revise(
        None, window(devices, groups=devices)
    )
    assert len(decision.predicted_s) <= 34 and 0.1 < judges(decision) / devices < 0.6


def test_replay_says_that_it_takes_several_judges_for_one() -> None:
    given = window(8)
    two = replace(
        given,
        slots={**given.slots, "second": given.slots["judge"]},
        needs={**given.needs, "second": given.needs["judge"]},
        requests={**given.requests, "second": given.requests["judge"]},
    )
    assert "judges as one" not in Replay(ReplayConfig()).revise(None, given).seen
    assert Replay(ReplayConfig()).revise(None, two).seen["judges as one"] == 2


def test_utilisation_moves_one_cell_to_the_role_that_is_used_more() -> None:
    policy = Utilisation(UtilisationConfig(share=0.5))
    first = policy.revise(None, window(8))
    for judge, moved in ((0.9, 5), (0.1, 3), (0.52, 4)):
        decision = policy.revise(first.partition, window(8, busy={"rollout": 0.5, "judge": judge}))
        assert judges(decision) == moved
    assert judges(first) == 4 and "cells move" in decision.reason


@pytest.mark.parametrize(
    ("signal", "field"), [("busy", "busy"), ("filled", "filled"), ("hardware", "used")]
)
def test_utilisation_looks_at_its_signal_alone(signal: str, field: str) -> None:
    policy = Utilisation(UtilisationConfig(signal=signal))  # type: ignore[arg-type]
    first = policy.revise(None, window(8))
    against = {name: {"rollout": 0.9, "judge": 0.1} for name in ("busy", "filled", "used")}
    shown = window(8, **{**against, field: {"rollout": 0.3, "judge": 0.8}})
    decision = policy.revise(first.partition, shown)
    assert judges(decision) == judges(first) + 1
    assert decision.seen == {"signal": signal, "policy": 0.3, "judge": 0.8}


def test_split_takes_a_share_or_a_count_within_the_least_of_each_role() -> None:
    assert judges(FixedSplit(SplitConfig(share=0.25)).revise(None, window(8))) == 2
    assert judges(FixedSplit(SplitConfig(cells=3)).revise(None, window(8))) == 3
    assert judges(FixedSplit(SplitConfig(cells=30)).revise(None, window(8))) == 7


@pytest.mark.parametrize(
    ("policy", "mode"), [(Colocated(), "colocated"), (Coresident(), "coresident")]
)
def test_colocated_and_coresident_give_every_role_all_cells(policy: Colocated, mode: str) -> None:
    decision = policy.revise(None, window(4))
    assert decision.mode == mode
    assert (
        decision.partition.cells["judge"]
        == decision.partition.cells["rollout"]
        == decision.partition.cells["policy"]
    )


def test_a_new_split_moves_only_cells_between_the_old_and_new_border() -> None:
    before, after = (
        FixedSplit(SplitConfig(cells=n)).revise(None, window(16)).partition for n in (4, 6)
    )
    assert set(before.cells["judge"]) < set(after.cells["judge"])


def test_a_cell_holds_whole_replicas_of_either_role_on_one_node() -> None:
    needs = {
        "policy": Need(kind="trainer"),
        "rollout": Need(kind="generator", follows="policy", size=4),
        "judge": Need(kind="generator", size=2, least=3),
    }
    pool = find_pool(window(20, needs=needs))
    assert pool is not None
    assert [len(cell.devices) for cell in pool.cells] == [4] * 5
    assert all(len({device.node for device in cell.devices}) == 1 for cell in pool.cells)
    assert pool.per_cell == {"rollout": 1, "judge": 2} and pool.fewest == 2
    assert Replay(ReplayConfig()).revise(None, window(20, needs=needs)).chosen in {
        f"split {n}" for n in (2, 3, 4)
    }


def test_several_judges_share_their_cells_by_their_work() -> None:
    shown = window(16, 400)
    needs = {**shown.needs, "small": Need(kind="generator")}
    slots = {**shown.slots, "small": 16}
    requests = {
        **shown.requests,
        "small": replace(shown.requests["judge"], actions=np.full(256, 20.0)),
    }
    decision = Replay(ReplayConfig()).revise(
        None, replace(shown, needs=needs, slots=slots, requests=requests)
    )
    cells = decision.partition.cells
    assert len(cells["judge"]) > len(cells["small"]) >= 1
    assert not set(cells["judge"]) & set(cells["small"]) and not set(cells["rollout"]) & set(
        cells["small"]
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"slots": {"policy": 2, "rollout": 3, "judge": 2}},
            "roles.rollout.slots: wants 3 slots, but the number of devices is 2",
        ),
        (
            {
                "needs": {
                    "rollout": Need(kind="generator", follows="policy", least=2),
                    "judge": Need(kind="generator"),
                }
            },
            r"generators need at least 3 cells of 1 devices \(rollout 2, judge 1\), there are 2",
        ),
        (
            {
                "needs": {
                    "rollout": Need(kind="generator", follows="policy", size=4),
                    "judge": Need(kind="generator"),
                }
            },
            "2 slots make 0 whole cells of 4 devices, and it needs at least 1",
        ),
    ],
)
def test_roles_that_do_not_fit_are_refused_with_the_numbers(
    changes: dict[str, object], words: str
) -> None:
    for policy in (
        Replay(ReplayConfig()),
        FixedSplit(SplitConfig()),
        Colocated(),
        Utilisation(UtilisationConfig()),
    ):
        with pytest.raises(PlacementError, match=words):
            policy.revise(None, window(2, **changes))


def test_slots_that_are_no_whole_cells_are_refused() -> None:
    """A role must have engines on all of its slots, and here it would have them on two of three."""
    needs = {**window(8).needs, "judge": Need(kind="generator", size=2)}
    slots = {"policy": 8, "rollout": 3, "judge": 4}
    words = "roles.rollout.slots: 3 slots are no whole cells of 2 devices"
    with pytest.raises(PlacementError, match=words):
        FixedSplit(SplitConfig()).revise(None, window(8, needs=needs, slots=slots))


def test_judges_of_different_slots_are_refused_with_their_slots() -> None:
    """Their engines are at the same cells, and a role must have engines on all of its slots."""
    needs = {**window(16).needs, "small": Need(kind="generator")}
    slots = {"policy": 16, "rollout": 4, "judge": 8, "small": 4}
    for policy in (FixedSplit(SplitConfig()), Replay(ReplayConfig())):
        with pytest.raises(PlacementError, match=r"of the others \(judge 8, small 4\)") as error:
            policy.revise(None, window(16, needs=needs, slots=slots))
        assert error.value.where == "roles.judge.slots"


def test_colocation_needs_engines_of_both_roles_in_every_cell() -> None:
    with pytest.raises(
        PlacementError,
        match="roles.judge.slots: in mode colocated every generator runs in every cell",
    ):
        Colocated().revise(None, window(4, slots={"policy": 4, "rollout": 4, "judge": 2}))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SplitConfig(share=1.5), "placement.config.share: must be between 0 and 1, is 1.5"),
        (lambda: SplitConfig(cells=-1), "placement.config.cells: must not be negative, is -1"),
        (lambda: UtilisationConfig(cells=0), "placement.config.cells: must be at least 1, is 0"),
        (
            lambda: ReplayConfig(discount=1),
            "placement.config.discount: must be at least 0 and below 1, is 1",
        ),
        (lambda: ReplayConfig(caution=-1), "placement.config.caution: must not be negative, is -1"),
        (lambda: ReplayConfig(seed=-1), "placement.config.seed: must not be negative, is -1"),
        (
            lambda: ReplayConfig(tolerance=-2),
            "placement.config.tolerance: must not be negative, is -2",
        ),
        (
            lambda: ReplayConfig(policy_tokens=-1),
            "placement.config.policy_tokens: must not be negative, is -1",
        ),
        (
            lambda: UtilisationConfig(threshold=-1),
            "placement.config.threshold: must not be negative, is -1",
        ),
        (lambda: ReplayConfig(draws=0), "placement.config.draws: must be at least 1, is 0"),
        (lambda: ReplayConfig(largest=1), "placement.config.largest: must be at least 2, is 1"),
        (
            lambda: ReplayConfig(modes=["split", "apart"]),
            "placement.config.modes: apart: there are split, colocated",
        ),
        (lambda: ReplayConfig(modes=["colocated"]), "placement.config.modes: must hold split"),
    ],
)
def test_an_invalid_setting_is_refused(make: type, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def test_a_candidate_can_be_looked_up_by_its_name() -> None:
    for split in (Split("split", 12), Split("colocated"), Split("coresident")):
        assert Split.named(split.name) == split


def measured_window(judge_slower: float) -> MeasuredWindow:
    """A step that ran under split 4, on engines whose judge is slower than its profile says."""
    told = window(16)
    groups = as_groups(told.requests["rollout"], [told.requests["judge"]])
    profiles = PROFILE, slower(PROFILE, judge_slower)
    rate = KeepRate(rates=(1.0,) * 4, is_known=True)
    played = play(groups, Engines("split", 12, 4), profiles, len(groups), rate)
    outcome = Outcome(
        step=0, candidate="split 4", predicted_s=None, measured_s=played.seconds, work=1.0
    )
    requests = {"rollout": played.requests(0, 0), "judge": played.requests(1, 0)}
    return replace(told, requests=requests, outcomes=(outcome,))


@pytest.mark.parametrize("judge_slower", [0.5, 1.0, 3.0])
def test_replay_learns_from_requests_by_how_much_engines_miss_their_profiles(
    judge_slower: float,
) -> None:
    decision = Replay(ReplayConfig(correction=1.0)).revise(None, measured_window(judge_slower))
    assert decision.seen["paces"] == pytest.approx([1.0, judge_slower], rel=0.1)
    assert abs(decision.seen["error"]) < 0.05


def test_waiting_inside_an_engine_is_not_taken_for_slowness() -> None:
    """A run measures when a request was sent; it may wait in the engine before it begins."""
    told = measured_window(1.0)
    sent = {
        role: replace(requests, start_s=requests.arrival_s)
        for role, requests in told.requests.items()
    }
    waited_s = told.requests["judge"].start_s - told.requests["judge"].arrival_s
    assert waited_s.max() > 0.1, "the case must have requests that wait"
    decision = Replay(ReplayConfig(correction=1.0)).revise(None, replace(told, requests=sent))
    assert decision.seen["paces"] == pytest.approx([1.0, 1.0], rel=0.05)


def test_replay_gives_a_judge_more_that_is_slower_than_its_profile_says() -> None:
    told = measured_window(3.0)
    corrected = Replay(ReplayConfig(correction=0.5)).revise(None, told)
    as_told = Replay(ReplayConfig(correction=0.0)).revise(None, told)
    assert judges(corrected) > judges(as_told)
    assert as_told.seen["paces"] == [1.0, 1.0]


def test_corrections_of_earlier_steps_are_kept_and_fade() -> None:
    state = {"paces": [1.0, 4.0]}
    told = replace(measured_window(1.0), state=state)
    paces = [
        Replay(ReplayConfig(correction=weight)).revise(None, told).seen["paces"][1]
        for weight in (0.0, 0.5, 1.0)
    ]
    assert paces == pytest.approx([4.0, 2.0, 1.0], rel=0.1)


def unbroken(devices: int = 8, **changes: Any) -> MeasuredWindow:
    """A step of a run that draws while it trains: the trainer has two devices, others the rest."""
    slots = {"policy": 2, "rollout": devices - 2, "judge": devices - 2}
    told: dict[str, Any] = {"slots": slots, "overlaps": True, "switch_s": 0.01, **changes}
    return window(devices, **told)


@pytest.mark.parametrize(
    "policy",
    [
        Replay(ReplayConfig()),
        FixedSplit(SplitConfig(share=0.5)),
        Utilisation(UtilisationConfig()),
        Coresident(),
    ],
    ids=lambda policy: type(policy).__name__,
)
def test_generators_that_draw_while_the_trainer_works_share_no_device_with_it(policy: Any) -> None:
    decision = policy.revise(None, unbroken())
    engines = {
        role: {device.index for cell in cells for device in cell.devices}
        for role, cells in decision.engines.cells.items()
    }
    assert engines == {"policy": {0, 1}, "rollout": set(range(2, 8)), "judge": set(range(2, 8))}


def test_where_devices_are_few_generators_share_the_trainers() -> None:
    slots = {"policy": 1, "rollout": 3, "judge": 3}
    decision = FixedSplit(SplitConfig(cells=1)).revise(None, unbroken(3, slots=slots))
    awake = decision.partition.cells
    assert [cell.devices[0].index for cell in (*awake["rollout"], *awake["judge"])] == [0, 1, 2]


def test_replay_takes_no_turns_where_generation_never_ends() -> None:
    """Not even where a run that took turns has found them best."""
    turns = {"regrets": {"colocated": 1.0, "split 3": 9.0}, "weight": 1.0}
    policy = Replay(ReplayConfig())
    measured = policy.revise(None, unbroken(state=turns))
    assert measured.mode == "split" and "colocated" not in measured.predicted_s
    assert policy.revise(None, unbroken(state=turns, requests={})).mode == "split"
    assert policy.revise(None, window(8, state=turns, requests={})).mode == "colocated"


def test_co_location_is_refused_where_generation_never_ends() -> None:
    with pytest.raises(PlacementError, match="generation does not end") as raised:
        Colocated().revise(None, unbroken())
    assert "placement/split" in str(raised.value)


@pytest.mark.parametrize("overlaps", [True, False])
def test_no_rescue_takes_turns_where_generation_never_ends(overlaps: bool) -> None:
    """The policy can spare no cell."""
    policy = FixedSplit(SplitConfig(cells=100))
    slots = {"policy": 2, "rollout": 8, "judge": 8}
    seen = unbroken(slots=slots, overlaps=overlaps, starving="judge")
    partition = policy.revise(None, seen).partition
    lost = [device.index for cell in partition.cells["judge"] for device in cell.devices]
    found = policy.rescue(partition, replace(seen, lost={"judge": lost}))
    assert (found is None) == overlaps
    assert found is None or found.mode == "colocated"


def test_nothing_is_compiled_when_a_step_is_replayed_after_the_preparation() -> None:
    """The first step that was measured would else take as long as the compiler, 25 s."""
    config = ReplayConfig(modes=["split", "colocated", "coresident"])
    Replay(config).prepare(window(8))
    compiled = list(events.play.signatures)
    assert len(compiled) == 1
    assert Replay(config).revise(None, window(8, switch_s=1.0)).predicted_s
    assert events.play.signatures == compiled
