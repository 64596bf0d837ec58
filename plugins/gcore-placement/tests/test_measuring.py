"""What this plugin's policies measure of a rollout that a run tells them of."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from gcore_placement.config import ReplayConfig, SplitConfig, UtilisationConfig
from gcore_placement.fixed import Coresident, FixedSplit
from gcore_placement.measuring import MeasuredWindow, measure
from gcore_placement.replay import Replay
from gcore_placement.utilisation import Utilisation

from gcore_core.contract import run_files
from gcore_core.contract.engine_profiles import EngineFit, Profile
from gcore_core.contract.measurements import Account, Requests, Rollout
from gcore_core.contract.placement import Device, Need, PlacementPolicy, Window
from gcore_core.runtime.journal import Journal

NEEDS = {
    "rollout": Need(kind="generator", follows="policy"),
    "judge": Need(kind="generator"),
}


def served(*spans: tuple[int, float, float], about: bool = False) -> Requests:
    """Requests of (replica, start, end), of 5 prompt tokens and 10 actions each."""
    replica, start_s, end_s = (np.array(column) for column in zip(*spans, strict=True))
    count = len(spans)
    return Requests(
        step=np.zeros(count, np.int64),
        group=np.arange(count),
        arrival_s=start_s.astype(float),
        start_s=start_s.astype(float),
        end_s=end_s.astype(float),
        prompt=np.full(count, 5),
        actions=np.full(count, 10),
        parent=np.arange(count) if about else np.full(count, -1),
        kept=np.ones(count, bool),
        replica=replica.astype(np.int64),
    )


def told(**changes: Any) -> Window:
    """A rollout of 10 s on devices 4 and 5: the policy has replica 0, the judge replica 1."""
    window = Window(
        devices=tuple(Device(index=index, kind="cpu") for index in (4, 5)),
        slots={"rollout": 2, "judge": 2},
        needs=NEEDS,
        step=1,
        requests={
            "rollout": served((0, 0, 4), (0, 2, 6)),
            "judge": served((1, 6, 8), (1, 8, 9), about=True),
        },
        rollout=Rollout(
            seconds=10.0,
            turns_s=1.0,
            engines={"rollout": [[4], [5]], "judge": [[4], [5]]},
            serving={"rollout": [0], "judge": [1]},
            served={"rollout": [0], "judge": [1]},
            used={4: 0.5, 5: 0.25},
        ),
    )
    return replace(window, **changes)


def test_shares_are_of_the_replicas_that_were_awake() -> None:
    measured = measure(told())
    assert measured.busy == pytest.approx({"rollout": 0.6, "judge": 0.3})
    assert measured.filled == pytest.approx({"rollout": 0.4, "judge": 0.3})
    assert measured.used == {"rollout": 0.5, "judge": 0.25}


def test_the_account_says_where_the_devices_time_went() -> None:
    account = measure(told()).account
    assert account.ran == {4: {"rollout": 6.0}, 5: {"judge": 3.0}}
    assert account.waited == {4: 3.0, 5: 6.0}, "the change of roles is no waiting"
    assert account.metrics["idle_share"] == pytest.approx((4.5 + 1.0) / 10)
    assert set(account.engines) == {"rollout", "judge"}


def test_a_device_that_two_roles_shared_waited_while_neither_ran() -> None:
    rollout = replace(told().rollout, served={"rollout": [0], "judge": [0, 1]}, turns_s=0.0)
    requests = {"rollout": served((0, 0, 4)), "judge": served((0, 3, 6), (1, 0, 1), about=True)}
    account = measure(told(rollout=rollout, requests=requests)).account
    assert account.ran == {4: {"rollout": 4.0, "judge": 3.0}, 5: {"judge": 1.0}}
    assert account.waited == {4: 4.0, 5: 9.0}


def test_measuring_goes_on_from_the_account_before_also_over_json() -> None:
    first = measure(told()).account
    plain = json.loads(msgspec.json.encode({"engines": first.engines, "state": first.state}))
    kept = msgspec.convert(plain, Account)
    quiet = {"rollout": served((0, 0, 4)), "judge": served((1, 6, 8), about=True)}
    of_memory = measure(told(requests=quiet, account=first))
    of_file = measure(told(requests=quiet, account=kept))
    assert of_memory == of_file
    assert of_file.account.state == {"most_at_once": {"rollout": 2, "judge": 1}}
    anew = measure(told(requests=quiet)).account.engines["rollout"]
    assert of_file.account.engines["rollout"].expected_s != anew.expected_s


def test_without_a_rollout_the_account_stays_and_profiles_are_those_before() -> None:
    account = measure(told()).account
    quiet = measure(told(requests={}, rollout=Rollout(), account=account))
    assert quiet.account == account
    assert quiet.profiles == {role: fit.profile for role, fit in account.engines.items()}
    assert quiet.busy == quiet.filled == quiet.used == {}


POLICIES: dict[str, PlacementPolicy] = {
    "replay": Replay(ReplayConfig()),
    "split": FixedSplit(SplitConfig()),
    "coresident": Coresident(),
    "utilisation": Utilisation(UtilisationConfig(signal="hardware")),
}


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_gives_the_account_of_what_it_was_told(name: str) -> None:
    window = told()
    decision = POLICIES[name].revise(None, window)
    assert decision.account == measure(window).account
    assert decision == POLICIES[name].revise(None, window), "it only goes by what it is told"


def test_a_window_that_is_measured_is_taken_as_it_is() -> None:
    measured = measure(told())
    known = replace(measured, profiles={"rollout": Profile(base_s=5.0)}, account=Account())
    assert isinstance(known, MeasuredWindow)
    assert FixedSplit(SplitConfig()).revise(None, known).account == Account()


def test_a_new_run_begins_with_the_profiles_that_the_run_before_has_fitted(
    tmp_path: Path,
) -> None:
    runs = {name: tmp_path / name for name in ("001", "002", "003", "latest", "mine")}
    for directory in runs.values():
        directory.mkdir()
    for number, base_s in (("001", 0.1), ("002", 0.2)):
        for step in range(3):
            fit = EngineFit(profile=Profile(base_s=base_s + step), requests=70)
            line = run_files.Measured(step=step, measured_s=1.0, engines={"rollout": fit})
            Journal(runs[number] / run_files.PLACEMENT).append([line])

    def known(directory: Path | str) -> dict[str, float]:
        policy = FixedSplit(SplitConfig())
        window = told(requests={}, rollout=Rollout(), directory=str(directory))
        policy.prepare(window)
        profiles = measure(window, policy._priors).profiles
        return {role: profile.base_s for role, profile in profiles.items()}

    assert known(runs["003"]) == {"rollout": 2.2}
    assert known(runs["002"]) == {"rollout": 2.1}
    assert known(runs["001"]) == {}, "no run was before"
    assert known(runs["mine"]) == {}, "beside a directory of one's own there may be anything"
    assert known("") == {}, "a run that keeps no files"
    with (runs["002"] / run_files.PLACEMENT).open("ab") as file:
        file.write(b"not json\n")
    assert known(runs["003"]) == {"rollout": 2.1}, "a damaged journal is passed over"
