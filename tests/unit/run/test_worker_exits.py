"""A worker that is started again in vain ends the attempt; one that answers in between does not."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from gcore_core.contract.deadlines import Wait
from gcore_core.contract.errors import ContractError, WorkerDied
from gcore_core.contract.launching import ALIVE, Endpoint, StreamEndpoint
from gcore_core.run.worker_exits import RESTARTS_IN_VAIN, Restarts
from gcore_core.runtime.messages import WorkerExit
from gcore_core.wire.service import Call, Service, encode

LOG = Path("logs/rollout.0.log")


def lost(restarts: Restarts, times: int, *, name: str = "rollout.0", tail: str = "") -> WorkerDied:
    """Ends a worker so often; returns the error of the last time, the only one."""
    exited = WorkerExit(name, 1, -9, True, tail)
    for _ in range(times - 1):
        assert restarts.ended(exited, "ended with signal SIGKILL", LOG) is None
    error = restarts.ended(exited, "ended with signal SIGKILL", LOG)
    assert error is not None
    return error


def test_a_worker_is_started_again_so_often_in_vain() -> None:
    error = lost(Restarts(), RESTARTS_IN_VAIN + 1, tail="loaded\n\nout of memory\n")
    assert error.where == "rollout.0"
    assert error.why == "the last time it ended with signal SIGKILL\nloaded\nout of memory"
    assert "its log: logs/rollout.0.log" in error.todo


@pytest.mark.parametrize("what", ["answered", "step"])
def test_the_count_begins_anew_when_it_gets_somewhere(what: str) -> None:
    restarts = Restarts()
    exited = WorkerExit("rollout.0", 1, -9, True, "")
    for _ in range(3 * RESTARTS_IN_VAIN):
        assert restarts.ended(exited, "ended with signal SIGKILL", LOG) is None
        if what == "answered":
            restarts.answered("rollout.0")
        else:
            restarts.step_ended()
    lost(restarts, RESTARTS_IN_VAIN + 1)


def test_workers_are_counted_apart() -> None:
    restarts = Restarts()
    exited = WorkerExit("rollout.1", 1, -9, True, "")
    for _ in range(RESTARTS_IN_VAIN):
        assert restarts.ended(exited, "ended with signal SIGKILL", LOG) is None
        restarts.answered("scorer.0")
    lost(restarts, RESTARTS_IN_VAIN + 1, name="rollout.0")


def test_of_one_that_hangs_the_waiting_caller_is_named_and_no_stack_is_shown() -> None:
    restarts = Restarts()
    tail = 'loaded\nThread 0x7f (most recent call first):\n  File "a.py", line 1 in wait\n'
    for _ in range(RESTARTS_IN_VAIN):
        lost_once = WorkerExit("rollout.0", 1, -9, True, tail)
        assert restarts.ended(lost_once, "ended with signal SIGKILL", LOG) is None
    restarts.hung("rollout.0", "controller.1", "no sign of progress for 10 s in generate")
    error = lost(restarts, 1, tail=tail)
    assert error.why == (
        "controller.1 waited for it: no sign of progress for 10 s in generate\nloaded"
    )


DOUBLE = Endpoint("double", int, int)
COUNT = StreamEndpoint("count", int, int)
PUSH = Endpoint("push", int, int, Wait.SOON)


async def double(request: int, call: Call) -> int:
    if request < 0:
        raise ContractError("no such number", where="double")
    return 2 * request


async def count(request: int, call: Call) -> AsyncGenerator[int, None]:
    for number in range(request):
        yield number
    if request:
        raise ContractError("lost on the way", where="count")


@pytest.mark.parametrize(
    ("method", "request_body", "answered"),
    [
        (ALIVE.name, None, False),
        (DOUBLE.name, -1, False),
        (DOUBLE.name, 1, True),
        (PUSH.name, 1, False),  # which comes before the request that kills each process
        (COUNT.name, 1, True),  # an item was sent, so the next process has less to do
        (COUNT.name, 0, True),
    ],
)
async def test_a_process_has_answered_when_a_caller_got_something(
    method: str, request_body: int | None, answered: bool
) -> None:
    service = Service("rollout.0")
    service.add(DOUBLE, double)
    service.add(COUNT, count)
    service.add(PUSH, double)

    async def emit(item: bytes) -> None: ...

    try:
        await service.handle(method, encode(request_body), Call(lambda: None), emit)
    except ContractError:
        assert request_body
    assert service.answered.is_set() == answered
