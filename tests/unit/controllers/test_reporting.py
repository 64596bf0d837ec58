"""How the lead sends the report of a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from gcore_core.controllers.context import ControllerContext
from gcore_core.controllers.reporting import Reporting, ShardReport
from gcore_core.runtime.messages import STEP_END, Nothing


class Lead:
    """The agreements of a run with one shard."""

    lead = True

    async def collect(self, name: str, payload: bytes) -> list[bytes]:
        return [payload]


class Supervisor:
    name = "supervisor"

    def __init__(self) -> None:
        self.calls: list[tuple[Any, float | None]] = []

    async def call(self, endpoint: Any, request: Any, *, deadline_s: float | None = None) -> Any:
        self.calls.append((endpoint, deadline_s))
        return Nothing()


async def test_a_report_is_waited_for_as_long_as_the_table_of_deadlines_says() -> None:
    """No deadline of its own: observers may work on a report for as long as ``MOVE`` allows."""
    supervisor = Supervisor()
    context = SimpleNamespace(agree=Lead(), supervisor=supervisor)
    reporting = Reporting(cast(ControllerContext, context))
    await reporting.end(1, ShardReport({}, {}, {}, []), {}, {})
    assert supervisor.calls == [(STEP_END, None)]
