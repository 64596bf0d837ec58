"""What was lost is tried again by one policy, and every wait has its deadline from one table."""

from __future__ import annotations

import math

import pytest

from gcore_core.contract.deadlines import Deadlines, Wait
from gcore_core.contract.errors import ContractError, DeadlineExceeded, WorkerDied
from gcore_core.contract.launching import Endpoint, StreamEndpoint
from gcore_core.runtime import messages
from gcore_core.wire.retry import LOST, PATIENT, RetryPolicy

AT_ONCE = RetryPolicy(tries=4, first_pause_s=0.0)


class Failing:
    """Raises ``error`` for the first ``failures`` tries, then gives the number of the try."""

    def __init__(self, failures: int, error: Exception) -> None:
        self.failures, self.error, self.tries = failures, error, list[int]()

    async def __call__(self, number: int) -> int:
        self.tries.append(number)
        if number < self.failures:
            raise self.error
        return number


async def test_a_lost_call_is_retried_until_it_succeeds() -> None:
    work = Failing(2, WorkerDied("gone"))
    assert await AT_ONCE.run(work, LOST) == 2
    assert work.tries == [0, 1, 2]


async def test_the_error_of_the_last_try_is_raised() -> None:
    work = Failing(9, DeadlineExceeded("late"))
    with pytest.raises(DeadlineExceeded, match="late"):
        await AT_ONCE.run(work, LOST)
    assert work.tries == [0, 1, 2, 3]


async def test_an_error_raised_by_the_peer_is_not_retried() -> None:
    work = Failing(1, ContractError("no"))
    with pytest.raises(ContractError):
        await AT_ONCE.run(work, LOST)
    assert work.tries == [0]


def test_pauses_double_up_to_the_maximum() -> None:
    assert [PATIENT.pause_s(n) for n in (0, 1, 2)] == [0.05, 0.1, 0.2]
    assert PATIENT.pause_s(50) == 2.0


def test_the_policy_waits_long_enough_for_a_model_to_load() -> None:
    assert sum(PATIENT.pause_s(n) for n in range(PATIENT.tries)) >= 180


def test_default_deadlines_are_those_on_the_page() -> None:
    table = {wait: Deadlines().seconds(wait) for wait in Wait}
    assert table == {
        Wait.ANSWER: 60.0,
        Wait.WORK: 600.0,
        Wait.SOON: 60.0,
        Wait.PUSH: 300.0,
        Wait.MOVE: 600.0,
        Wait.SHARDS: 1800.0,
        Wait.MEETING: 3600.0,
        Wait.EVER: math.inf,
    }


@pytest.mark.parametrize("patience_s", [1.0, 30.0, 600.0, 3600.0])
def test_more_patience_never_makes_a_deadline_shorter(patience_s: float) -> None:
    shorter, longer = Deadlines(patience_s), Deadlines(2 * patience_s)
    assert all(shorter.seconds(wait) <= longer.seconds(wait) for wait in Wait)


def test_a_short_patience_shortens_only_deadlines_of_work_and_of_operations_of_seconds() -> None:
    by_default, short = Deadlines(), Deadlines(2.0)
    changed = {wait for wait in Wait if short.seconds(wait) != by_default.seconds(wait)}
    assert changed == {Wait.WORK, Wait.SOON}
    assert short.seconds(Wait.WORK) == short.seconds(Wait.SOON) == 2.0


def test_a_caller_may_give_a_deadline_of_its_own() -> None:
    assert Deadlines().seconds(Wait.WORK, 5.0) == 5.0


def test_every_endpoint_declares_its_kind_of_deadline() -> None:
    endpoints = [
        value for value in vars(messages).values() if isinstance(value, Endpoint | StreamEndpoint)
    ]
    assert len(endpoints) > 30
    assert all(isinstance(endpoint.wait, Wait) for endpoint in endpoints)


def test_a_relay_waits_for_a_rank_as_long_as_a_direct_caller() -> None:
    for endpoint in (messages.PREPARE_RANKS, messages.TRAIN_RANKS):
        assert endpoint.of_rank_encoded.name == endpoint.of_rank.name
        assert endpoint.of_rank_encoded.wait is endpoint.of_rank.wait is Wait.SHARDS
        assert endpoint.of_relay.wait is Wait.WORK
