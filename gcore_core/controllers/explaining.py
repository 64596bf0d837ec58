"""Asks generators, after an alarm, why their log-probs are not the trainer's."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from gcore_core.contract.errors import GcoreError
from gcore_core.contract.sentinel import Finding
from gcore_core.controllers.context import ControllerContext
from gcore_core.runtime.messages import (
    EXPLAIN,
    SHOW_COMPARED,
    DiagnoseRequest,
    ExplainRequest,
    ShownRecord,
)
from gcore_core.runtime.rpc.retry import insist


async def explained(
    context: ControllerContext, step: int, replicas: Sequence[int], findings: Sequence[Finding]
) -> list[Finding]:
    """Returns what generators find when they score some of their records again.

    Generators that sleep, are lost or cannot do it say nothing.

    replicas: those that alarms name; none: all.
    findings: of the ranks. What all generators find together weighs as much as these do.
    """
    request = DiagnoseRequest(step, list(replicas))
    ranks = [rank[0] for rank in context.ranks]
    answers = await asyncio.gather(*(insist(rank, SHOW_COMPARED, request) for rank in ranks))
    by_replica: dict[int, list[ShownRecord]] = {}
    for record in (record for answer in answers for record in answer):
        by_replica.setdefault(record.key[3], []).append(record)
    asked = [replica for replica in sorted(by_replica) if replica < len(context.replicas)]
    told: list[list[Finding]] = []
    for replica in asked:
        try:
            records = ExplainRequest(by_replica[replica])
            told.append(await insist(context.replicas[replica], EXPLAIN, records))
        except GcoreError:  # asleep or lost: it cannot be asked, and the alarm stays
            continue
    weight = sum(f.weight for f in findings if f.cause == findings[0].cause) if findings else 1.0
    share = weight / max(len(told), 1)
    return [replace(finding, weight=share) for answer in told for finding in answer]
