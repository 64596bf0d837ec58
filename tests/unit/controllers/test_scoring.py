"""Finished records are sent to the rewards that see one record, whole groups to the others."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from gcore_testing.simulation import run_virtual

from gcore_core.contract.records import Header, RecordScore
from gcore_core.controllers.generation import scoring
from gcore_core.controllers.generation.ledger import Ledger
from gcore_core.runtime.messages import TRAIN, ScoreRequest

SAMPLES = 4


@dataclass
class Scorer:
    """A scorer that keeps the keys of the records that it is asked about, request by request."""

    name: str
    asked: list[list[tuple[int, int]]] = field(default_factory=list)

    async def call(self, endpoint: Any, request: ScoreRequest, **_: Any) -> list[RecordScore]:
        self.asked.append([header.key for header in request.headers])
        return []


@pytest.fixture
def ledger() -> Ledger:
    ledger = Ledger(shard=0, shards=1, rows=8, seed=0, samples=SAMPLES)
    ledger.lease(range(2))
    return ledger


def headers_of(ordinal: int) -> list[Header]:
    return [Header(ordinal, sample, 0, 0) for sample in range(SAMPLES)]


def judge(ledger: Ledger, arrivals: list[list[Header]], *, in_turns: bool) -> tuple[Scorer, Scorer]:
    """Adds records as they arrive, each arrival beyond what one request takes; returns
    (the scorer of single records, that of groups).
    """
    single, of_groups = Scorer("single"), Scorer("groups")
    context = SimpleNamespace(
        facts=SimpleNamespace(rewards=["one", "whole"], of_groups=["whole"]),
        scorers=[(single, ["one"]), (of_groups, ["whole"])],
        trace=SimpleNamespace(scored=lambda scores: None),
    )
    awake = SimpleNamespace(in_turns=in_turns, version=0, judges=dict)

    async def main() -> None:
        work = scoring.Scoring(context, ledger, TRAIN, SimpleNamespace(awake=awake))  # type: ignore[arg-type]
        for headers in arrivals:
            work.add([header for header in headers if ledger.finished(header)])
        await work.finish()

    run_virtual(main())
    return single, of_groups


@pytest.mark.parametrize("in_turns", [True, False], ids=["judges asleep", "judges awake"])
def test_a_group_that_comes_in_several_requests_is_judged_once(
    ledger: Ledger, in_turns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "MOST", 1)
    first, second = headers_of(0), headers_of(1)
    arrivals = [first[:2], second[:3], first[2:], second[3:]]
    single, of_groups = judge(ledger, arrivals, in_turns=in_turns)
    assert single.asked == [[header.key for header in headers] for headers in arrivals]
    judged = [key for asked in of_groups.asked for key in asked]
    assert sorted(judged) == [header.key for header in (*first, *second)]


def test_a_group_that_is_not_complete_is_not_judged(ledger: Ledger) -> None:
    single, of_groups = judge(ledger, [headers_of(0)[:3]], in_turns=False)
    assert single.asked and not of_groups.asked


def test_records_that_end_together_are_scored_in_one_request(ledger: Ledger) -> None:
    """It waits for them for a moment, from the first on."""
    scorer = Scorer("scorer")
    context = SimpleNamespace(
        facts=SimpleNamespace(rewards=["one"], of_groups=[]),
        scorers=[(scorer, ["one"])],
        trace=SimpleNamespace(scored=lambda scores: None),
    )
    awake = SimpleNamespace(in_turns=False, version=0, judges=dict)
    headers = [header for ordinal in range(2) for header in headers_of(ordinal)]

    async def main() -> float:
        began_s = asyncio.get_running_loop().time()
        work = scoring.Scoring(context, ledger, TRAIN, SimpleNamespace(awake=awake))  # type: ignore[arg-type]

        async def lane(header: Header) -> None:
            work.add([header])

        await asyncio.gather(*map(lane, headers))
        await work.finish()
        return asyncio.get_running_loop().time() - began_s

    assert run_virtual(main()) == pytest.approx(scoring.WAIT_S)
    assert scorer.asked == [[header.key for header in headers]]
