"""Whatever a placement policy gets wrong is told at once, with its name and its contract."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gcore_core.contract.errors import ContractError, PlacementError
from gcore_core.contract.measurements import Account
from gcore_core.contract.placement import Cell, Decision, Device, Need, Partition, Window
from gcore_core.runtime.placement_decisions import ask_policy, check_decision, unable_to_sleep

DEVICES = tuple(Device(index=i, kind="cpu") for i in range(4))
WINDOW = Window(
    devices=DEVICES,
    slots={"policy": 2, "rollout": 4, "judge": 4},
    needs={
        "policy": Need(kind="trainer"),
        "rollout": Need(kind="generator", follows="policy"),
        "judge": Need(kind="generator"),
    },
)


def cells(*indexes: int) -> tuple[Cell, ...]:
    return tuple(Cell((DEVICES[i],)) for i in indexes)


EVERYWHERE = Partition(
    {"policy": cells(0, 1), "rollout": cells(0, 1, 2, 3), "judge": cells(0, 1, 2, 3)}
)
GOOD = Decision(
    partition=Partition(
        {"policy": cells(0, 1), "rollout": cells(0, 1, 2), "judge": cells(3)},
    ),
    engines=EVERYWHERE,
    reason="three sample, one judges",
)


def with_cells(**changed: tuple[Cell, ...]) -> Decision:
    return replace(GOOD, partition=Partition({**GOOD.partition.cells, **changed}))


def without(role: str) -> Decision:
    left = {name: own for name, own in GOOD.partition.cells.items() if name != role}
    return replace(GOOD, partition=Partition(left))


class Policy:
    def __init__(self, revise: Callable[[], Any]) -> None:
        self._revise = revise

    def revise(self, partition: Partition | None, window: Window) -> Any:
        return self._revise()


def test_turns_are_refused_by_name_where_generators_draw_while_trainers_work() -> None:
    turns = replace(with_cells(rollout=cells(0, 1), judge=cells(0, 1)), mode="colocated")
    check_decision(turns, "mine/policy", WINDOW)
    with pytest.raises(ContractError, match="mine/policy.*take turns.*Window.overlaps"):
        ask_policy(Policy(lambda: turns), "mine/policy", None, replace(WINDOW, overlaps=True))
    check_decision(GOOD, "mine/policy", replace(WINDOW, overlaps=True))


def test_a_decision_that_can_be_carried_out_passes() -> None:
    assert ask_policy(Policy(lambda: GOOD), "mine/default", None, WINDOW) is GOOD


BAD: dict[str, tuple[Any, str]] = {
    "nothing": (None, "gave a NoneType, not a Decision"),
    "no partition": (replace(GOOD, partition=None), "gave a malformed Decision"),  # type: ignore[arg-type]
    "a prediction that is a word": (
        replace(GOOD, predicted_s={"split 1": "long"}),  # type: ignore[dict-item]
        "gave a malformed Decision",
    ),
    "cells in place of a partition": (
        replace(GOOD, partition=GOOD.partition.cells),  # type: ignore[arg-type]
        "gave a malformed Decision",
    ),
    "a device that is not there": (
        with_cells(rollout=(Cell((Device(index=9, kind="cpu"),)),)),
        "'rollout' has device 9, which is not there",
    ),
    "a device of another kind": (
        with_cells(rollout=(Cell((Device(index=0, kind="cuda"),)),)),
        "'rollout' has device 0, which is not there",
    ),
    "a device twice": (with_cells(rollout=cells(0, 1, 1)), "'rollout' has device 1 twice"),
    "a cell without a device": (with_cells(judge=(Cell(()),)), "a cell of 'judge' has no device"),
    "a role forgotten": (without("judge"), "partition leaves out role 'judge'"),
    "a role invented": (with_cells(critic=cells(0)), "names a role that is not there: 'critic'"),
    "two models awake on one device in a split": (
        with_cells(judge=cells(2, 3)),
        "in mode split, both 'rollout' and 'judge' are awake on device 2",
    ),
    "fewer replicas than a role must keep": (
        with_cells(judge=()),
        "'judge' has 0 replicas awake, it must keep 1",
    ),
    "more engines than slots": (
        replace(GOOD, engines=Partition({**EVERYWHERE.cells, "policy": cells(0, 1, 2)})),
        "'policy' has engines on 3 devices, its slots are 2",
    ),
    "awake without an engine": (
        replace(GOOD, engines=None, partition=Partition({**EVERYWHERE.cells, "judge": cells(0)})),
        "'judge' has engines on 1 devices, its slots are 4",
    ),
    "an unknown mode": (replace(GOOD, mode="both"), "mode 'both' is none of split, colocated"),  # type: ignore[arg-type]
    "a prediction that is no number": (
        replace(GOOD, predicted_s={"split 1": float("nan")}),
        "predicts nan s for 'split 1'",
    ),
    "a state that JSON does not take": (
        replace(GOOD, state={"seen": object()}),
        "seen, state or account is no plain value",
    ),
    "an account that is none": (
        replace(GOOD, account={"engines": {}}),  # type: ignore[arg-type]
        "its account is a dict, not an Account",
    ),
    "an account that JSON does not take": (
        replace(GOOD, account=Account(state={"seen": object()})),
        "seen, state or account is no plain value",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_decision_that_cannot_be_carried_out_names_provider_and_contract(name: str) -> None:
    decision, problem = BAD[name]
    with pytest.raises(ContractError) as raised:
        ask_policy(Policy(lambda: decision), "mine/default", None, WINDOW)
    text = str(raised.value)
    assert "placement policy mine/default: " in text and problem in text
    assert raised.value.where == "placement.use"
    assert "PlacementPolicyContract" in raised.value.todo


def test_an_exception_of_a_policy_is_reported_with_file_and_line() -> None:
    def divide() -> Decision:
        return replace(GOOD, predicted_s={"split 1": 1 / 0})

    with pytest.raises(ContractError) as raised:
        ask_policy(Policy(divide), "mine/default", None, WINDOW)
    assert "mine/default: raised ZeroDivisionError" in str(raised.value)
    assert "test_placement_decisions.py:" in raised.value.why


def test_a_placement_error_raised_by_a_policy_passes_unchanged() -> None:
    def refuse() -> Decision:
        raise PlacementError("wants 9 slots", where="roles.rollout.slots")

    with pytest.raises(PlacementError, match="wants 9 slots"):
        ask_policy(Policy(refuse), "mine/default", None, WINDOW)


def test_a_later_decision_is_checked_against_the_existing_engines() -> None:
    made = {"rollout": {0, 1, 2}, "judge": {2, 3}}
    later = Decision(partition=Partition({"rollout": cells(0, 1), "judge": cells(2, 3)}))
    check_decision(later, "mine/default", WINDOW, made)
    moved = Decision(partition=Partition({"rollout": cells(0, 3), "judge": cells(2)}))
    with pytest.raises(ContractError, match="'rollout' is awake on device 3, where it has no eng"):
        check_decision(moved, "mine/default", WINDOW, made)


def test_generators_that_take_turns_must_be_able_to_sleep() -> None:
    colocated = replace(GOOD, mode="colocated", partition=EVERYWHERE)
    awake_judge = replace(
        WINDOW, needs={**WINDOW.needs, "judge": Need(kind="generator", sleeps=False)}
    )
    assert unable_to_sleep(colocated, awake_judge) == "judge"
    assert unable_to_sleep(colocated, WINDOW) == ""
    assert unable_to_sleep(GOOD, awake_judge) == ""


def test_a_later_decision_may_not_put_to_sleep_what_cannot_sleep() -> None:
    colocated = replace(GOOD, mode="colocated", partition=EVERYWHERE)
    needs = {**WINDOW.needs, "judge": Need(kind="generator", sleeps=False)}
    engines = {role: {0, 1, 2, 3} for role in ("rollout", "judge")}
    policy = Policy(lambda: colocated)
    assert ask_policy(policy, "p/q", EVERYWHERE, WINDOW, engines) == colocated
    with pytest.raises(ContractError, match="p/q: has generators take turns .*'judge' cannot"):
        ask_policy(policy, "p/q", EVERYWHERE, replace(WINDOW, needs=needs), engines)
