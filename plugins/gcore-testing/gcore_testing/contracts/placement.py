"""The contract of a placement policy.

Its plan fits, follows from its arguments alone, and stays as long as nothing has changed.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest

from gcore_core.contract.errors import PlacementError
from gcore_core.contract.measurements import Account, Requests, Rollout
from gcore_core.contract.placement import Decision, Device, Need, Partition, Window
from gcore_core.controllers.placement.lead import decided_line
from gcore_core.runtime.placement_decisions import check_decision
from gcore_testing.contracts.arguments import ASKS
from gcore_testing.contracts.base import Contract


class PlacementPolicyContract(Contract):
    """To test a placement policy, override ``provider``, or the fixture ``policy``."""

    kind: ClassVar[str] = "placement"

    @pytest.fixture
    def policy(self) -> Any:
        return self.build()

    @pytest.fixture(
        params=["one device", "two roles on two", "more roles than devices", "eight devices"]
    )
    def window(self, request: pytest.FixtureRequest) -> Window:
        """Gives windows in which every role fits."""
        windows = {
            "one device": window_of(1, policy=1, rollout=1),
            "two roles on two": window_of(2, policy=2, rollout=1),
            "more roles than devices": window_of(2, policy=1, rollout=2, judge=1, critic=1),
            "eight devices": window_of(8, policy=4, rollout=8, judge=2),
        }
        return windows[request.param]

    def test_every_role_has_its_slots(self, policy: Any, window: Window) -> None:
        plan = policy.revise(None, window).partition
        assert {role: len(cells) for role, cells in plan.cells.items()} == dict(window.slots)

    def test_no_slot_is_given_twice(self, policy: Any, window: Window) -> None:
        """All devices are from the window, and a role has no device more than once."""
        plan = policy.revise(None, window).partition
        for role, cells in plan.cells.items():
            devices = [device for cell in cells for device in cell.devices]
            assert all(cell.devices for cell in cells), f"a slot of {role} has no device"
            assert set(devices) <= set(window.devices), f"{role} has a device that is not there"
            assert len(set(devices)) == len(devices), f"two slots of {role} have one device"

    def test_generators_that_share_cells_leave_each_other_some(self, policy: Any) -> None:
        """Both roles may have engines on all devices.

        The replicas that are awake must fit, and each has an engine where it is awake.
        """
        window = shared_window()
        decision = policy.revise(None, window)
        awake = {
            role: [d for cell in cells for d in cell.devices]
            for role, cells in decision.partition.cells.items()
        }
        assert len(awake["rollout"]) >= 2 and awake["judge"], (
            "a role is without the replicas that it must keep"
        )
        assert all(len(set(devices)) == len(devices) for devices in awake.values()), (
            "a device is given twice"
        )
        engines = (decision.engines or decision.partition).cells
        for role, cells in decision.partition.cells.items():
            assert set(cells) <= set(engines[role]), f"{role} is awake where it has no engine"
            assert sum(len(cell.devices) for cell in engines[role]) == window.slots[role]

    def test_a_run_can_carry_its_decision_out(self, policy: Any, window: Window) -> None:
        """A run checks every decision in this way, here also for generators that share devices.

        In mode "split" a device serves one model, wherever the engines are.
        """
        kinds = {"policy": "trainer", "critic": "trainer"}
        needs = {role: Need(kind=kinds.get(role, "generator")) for role in window.slots}
        shared = window_of(8, rollout=8, judge=8)
        for asked in (
            replace(window, needs=needs),
            replace(shared, needs={role: Need(kind="generator") for role in shared.slots}),
        ):
            decision = policy.revise(None, asked)
            check_decision(decision, str(self.provider or type(policy).__name__), asked)

    def test_nothing_takes_turns_where_generation_never_ends(self, policy: Any) -> None:
        """Generators draw while trainers work, so a cell never changes hands within a rollout.

        A policy that knows nothing else raises PlacementError.
        """
        needs = {
            "policy": Need(kind="trainer"),
            "rollout": Need(kind="generator", follows="policy"),
            "judge": Need(kind="generator"),
        }
        shared = window_of(8, policy=2, rollout=6, judge=6)
        window = replace(shared, needs=needs, overlaps=True, switch_s=0.1)
        partition = None
        for step in range(3):
            try:
                decision = policy.revise(partition, replace(window, step=step))
            except PlacementError:
                return
            assert decision.mode != "colocated", "roles take turns, and no turn ends"
            partition = decision.partition

    def test_what_it_says_can_be_written_down(self, policy: Any, window: Window) -> None:
        line = decided_line(1, policy.revise(None, window))
        assert msgspec.json.decode(msgspec.json.encode(line), type=type(line)) == line

    def test_a_resumed_run_decides_as_the_run_would_have(self, policy: Any) -> None:
        """The state and the account of the latest decision survive a checkpoint, which is JSON.

        Of the account, only ``engines`` and ``state`` come back.
        """
        window = shared_window()
        first = policy.revise(None, window)
        after = replace(rollout_over(window, first), state=first.state, account=first.account)
        second = policy.revise(first.partition, after)
        kept = {"engines": second.account.engines, "state": second.account.state}
        state, account = msgspec.json.decode(msgspec.json.encode((second.state, kept)))
        after = replace(rollout_over(after, second), step=2)
        gone_on = policy.revise(
            second.partition, replace(after, state=second.state, account=second.account)
        )
        resumed = policy.revise(
            second.partition, replace(after, state=state, account=msgspec.convert(account, Account))
        )
        assert resumed == gone_on, "it goes by something that no checkpoint holds"

    def test_the_same_arguments_give_the_same_plan(self, policy: Any, window: Window) -> None:
        first = policy.revise(None, window)
        policy.revise(None, window_of(4, policy=3, rollout=2))
        for _ in range(ASKS):
            assert policy.revise(None, window) == first

    def test_arguments_stay_as_they_are(self, policy: Any, window: Window) -> None:
        before = copy.deepcopy(window)
        plan = policy.revise(None, window).partition
        copy_of_plan = Partition(dict(plan.cells))
        policy.revise(plan, window)
        assert window == before, "the window was changed"
        assert plan == copy_of_plan, "the partition was changed"

    def test_a_plan_that_fits_stays(self, policy: Any, window: Window) -> None:
        """To move a role costs a transfer of its weights, and nothing happened that is worth it."""
        plan = policy.revise(None, window).partition
        assert policy.revise(plan, window).partition == plan

    def test_what_does_not_fit_is_refused_by_name(self, policy: Any) -> None:
        with pytest.raises(PlacementError) as raised:
            policy.revise(None, window_of(2, policy=1, rollout=3))
        assert "rollout" in str(raised.value), "the error must name the role that does not fit"


def window_of(devices: int, **slots: int) -> Window:
    """Makes a window of CPU devices of one node, with the slots that each role needs."""
    return Window(
        devices=tuple(Device(index=index, kind="cpu") for index in range(devices)),
        slots=dict(slots),
    )


def shared_window() -> Window:
    """Makes a window of a policy and a judge, which may both have engines on all eight devices."""
    needs = {
        "rollout": Need(kind="generator", follows="policy", least=2),
        "judge": Need(kind="generator"),
    }
    return replace(window_of(8, rollout=8, judge=8), needs=needs)


def rollout_over(window: Window, decision: Decision) -> Window:
    """Makes the window after a rollout of 16 records, each judged once, on the decision's cells."""
    awake = {
        role: sorted({device.index for cell in cells for device in cell.devices})
        for role, cells in decision.partition.cells.items()
    }
    count = 16
    shared = {"step": np.full(count, window.step), "group": np.arange(count) // 2}
    drawn_s = 1 + np.arange(count) / 4
    drawn = Requests(
        **shared,
        arrival_s=np.zeros(count),
        start_s=np.zeros(count),
        end_s=drawn_s,
        prompt=np.full(count, 5),
        actions=10 + np.arange(count),
        parent=np.full(count, -1),
        kept=np.ones(count, bool),
        replica=np.resize(awake["rollout"], count),
    )
    judged = Requests(
        **shared,
        arrival_s=drawn_s,
        start_s=drawn_s,
        end_s=drawn_s + 0.5,
        prompt=drawn.actions,
        actions=np.full(count, 4),
        parent=np.arange(count),
        kept=np.zeros(count, bool),
        replica=np.resize(awake["judge"], count),
    )
    engines = {role: [[device.index] for device in window.devices] for role in awake}
    return replace(
        window,
        step=window.step + 1,
        requests={"rollout": drawn, "judge": judged},
        rollout=Rollout(seconds=6.0, engines=engines, serving=awake, served=awake),
        switch_s=0.1,
    )
