"""What an evaluation leaves out of its means is counted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import msgspec

from gcore_core.contract.records import (
    FAILED,
    FINISHED,
    OK,
    REWARD_FAILED,
    Header,
    Lease,
    RecordScore,
)
from gcore_core.controllers.context import ControllerContext
from gcore_core.controllers.evaluation import Evaluated, RewardEvaluation
from gcore_core.controllers.generation import Round
from gcore_core.controllers.generation.ledger import Ledger
from gcore_core.controllers.reporting import Reporting, ShardReport
from gcore_core.runtime.messages import Nothing, StepEnd


async def draw(
    context: Any, placement: Any, ledger: Ledger, round_: Round, leases: list[Lease]
) -> None:
    """Draws and scores records at once: of row 0 none can be drawn, on row 1 the reward fails."""
    for lease in leases:
        header = Header(ordinal=lease.ordinal, sample=0, row=lease.row, seed=0)
        if lease.row == 0:
            ledger.finished(msgspec.structs.replace(header, status=FAILED, n_actions=0))
            continue
        ledger.finished(msgspec.structs.replace(header, status=FINISHED, n_actions=6))
        failed = lease.row == 1
        values = {} if failed else {"exact": 0.5, "length": 100.0}
        statuses = {"exact": REWARD_FAILED if failed else OK}
        ledger.scored(RecordScore(lease.ordinal, 0, values, statuses), {"exact"})


async def evaluated(shard: int, shards: int) -> Evaluated:
    facts = SimpleNamespace(
        shard=shard,
        shards=shards,
        rows={"evaluation": 4},
        start_step=0,
        evaluated=False,
        evaluation=SimpleNamespace(every=0, prompts=4, show=0),
        run=SimpleNamespace(steps=9, seed=0),
    )
    context = cast(ControllerContext, SimpleNamespace(facts=facts))
    with mock.patch("gcore_core.controllers.evaluation.draw", draw):
        found = await RewardEvaluation(context, cast(Any, None)).at(0, False)
    assert found is not None
    return found


async def test_answers_that_failed_are_counted_and_are_in_no_mean() -> None:
    found = await evaluated(0, 1)
    assert found.failed == {"greedy": 2, "sampled": 2}
    assert found.sums["greedy/length"] == (18.0, 3.0), "what was not drawn has no length"
    assert found.sums["greedy/exact"] == (1.0, 2.0)
    assert found.sums["greedy/reward.length"] == (200.0, 2.0), "a reward may have this name"


class Supervisor:
    name = "supervisor"

    async def call(self, endpoint: Any, request: Any, *, deadline_s: float | None = None) -> Any:
        self.request: StepEnd = request
        return Nothing()


async def test_a_report_has_the_failed_answers_of_all_shards() -> None:
    parts = [await evaluated(shard, 2) for shard in range(2)]
    assert [part.failed["greedy"] for part in parts] == [1, 1]

    class Lead:
        lead = True

        async def collect(self, name: str, payload: bytes) -> list[bytes]:
            counts = {"evaluation_failed/greedy": float(parts[1].failed["greedy"])}
            other = ShardReport({}, counts, parts[1].sums, [])
            return [payload, msgspec.msgpack.encode(other)]

    supervisor = Supervisor()
    context = SimpleNamespace(agree=Lead(), supervisor=supervisor)
    await Reporting(cast(ControllerContext, context)).begin(0, parts[0])
    report = supervisor.request.report
    assert report.metrics["evaluation_failed/greedy"] == 2
    assert report.evaluation["greedy/exact"] == 0.5
