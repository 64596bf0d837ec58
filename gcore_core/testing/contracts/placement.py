"""What a placement policy promises: a plan that fits, that follows from its arguments, and that stays."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import pytest

from gcore_core.errors import PlacementError
from gcore_core.placement.devices import Device, Partition, Window
from gcore_core.testing.contracts.base import Contract


class PlacementPolicyContract(Contract):
    """Override ``provider``, or the fixture ``policy``."""

    kind: ClassVar[str] = "placement"

    @pytest.fixture
    def policy(self) -> Any:
        return self.build()

    @pytest.fixture(params=["one device", "two roles on two", "more roles than devices", "eight devices"])
    def window(self, request: pytest.FixtureRequest) -> Window:
        """Windows in which every role fits."""
        windows = {
            "one device": window_of(1, policy=1, rollout=1),
            "two roles on two": window_of(2, policy=2, rollout=1),
            "more roles than devices": window_of(2, policy=1, rollout=2, judge=1, critic=1),
            "eight devices": window_of(8, policy=4, rollout=8, judge=2),
        }
        return windows[request.param]

    def test_every_role_has_its_slots(self, policy: Any, window: Window) -> None:
        plan = policy.revise(None, window)
        assert {role: len(cells) for role, cells in plan.cells.items()} == dict(window.slots)

    def test_no_slot_is_given_twice(self, policy: Any, window: Window) -> None:
        """Devices are the window's, and a role has no device more than once."""
        plan = policy.revise(None, window)
        for role, cells in plan.cells.items():
            devices = [device for cell in cells for device in cell.devices]
            assert all(cell.devices for cell in cells), f"a slot of {role} has no device"
            assert set(devices) <= set(window.devices), f"{role} has a device that is not there"
            assert len(set(devices)) == len(devices), f"two slots of {role} have one device"

    def test_the_same_arguments_give_the_same_plan(self, policy: Any, window: Window) -> None:
        first = policy.revise(None, window)
        policy.revise(None, window_of(4, policy=3, rollout=2))
        assert policy.revise(None, window) == first

    def test_arguments_stay_as_they_are(self, policy: Any, window: Window) -> None:
        before = copy.deepcopy(window)
        plan = policy.revise(None, window)
        kept = Partition(dict(plan.cells))
        policy.revise(plan, window)
        assert window == before, "the window was changed"
        assert plan == kept, "the partition was changed"

    def test_a_plan_that_fits_stays(self, policy: Any, window: Window) -> None:
        """Moving a role costs its weights; nothing has happened that would be worth that."""
        plan = policy.revise(None, window)
        assert policy.revise(plan, window) == plan

    def test_what_does_not_fit_is_refused_by_name(self, policy: Any) -> None:
        with pytest.raises(PlacementError) as raised:
            policy.revise(None, window_of(2, policy=1, rollout=3))
        assert "rollout" in str(raised.value), "the error must name the role that does not fit"


def window_of(devices: int, **slots: int) -> Window:
    """CPU devices of one node, and the slots that each role asks for."""
    return Window(devices=tuple(Device(index=index, kind="cpu") for index in range(devices)), slots=dict(slots))
