"""Reports a step in numbers.

Each shard sums its own records; the lead merges the sums and sends them to the supervisor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from gcore_core.contract.launching import Traffic
from gcore_core.contract.records import TRUNCATED, Header, StepReport
from gcore_core.contract.run_files import DIGESTS, EVALUATION_FAILED
from gcore_core.controllers.context import ControllerContext
from gcore_core.controllers.evaluation import Evaluated, Sums
from gcore_core.runtime.messages import STEP_END, StepEnd
from gcore_core.runtime.step_digests import sum_of
from gcore_core.wire.loop_delays import latest_delays_s
from gcore_core.wire.retry import insist


class ShardReport(msgspec.Struct, array_like=True):
    """Holds one shard's part of a report.

    sums: name -> (sum, weight); the report has the quotient of these over all shards.
    counts: name -> a number that is added over all shards.
    evaluation: as ``sums``; empty without an evaluation.
    samples: a few evaluated records, by reference.
    digests: stage -> digest; the report has their sums over all shards.
    """

    sums: dict[str, tuple[float, float]]
    counts: dict[str, float]
    evaluation: dict[str, tuple[float, float]]
    samples: list[Header]
    digests: dict[str, int] = {}


class Reporting:
    """Makes one shard's part of each step's report; in the lead it also sends the whole report."""

    def __init__(self, context: ControllerContext) -> None:
        self._context = context
        self._before = Traffic()  # as it was at the latest summary

    def summary(
        self,
        groups: list[list[Header]],
        counts: Counter[str],
        verdicts: Mapping[int, tuple[str, str]],
        evaluated: Evaluated | None,
        digests: Mapping[str, int] | None = None,
    ) -> ShardReport:
        """Sums up the records that this shard trained on in a step.

        counts: name -> groups, reported as ``groups/NAME``.
        verdicts: ordinal -> (verdict, reason) of the step's groups; they are counted by verdict.
        evaluated: this shard's part of an evaluation, if one was made.
        digests: stage -> this shard's digest of it; runs are compared by them.
        """
        records = [header for group in groups for header in group]
        rewards = self._context.facts.rewards
        n = float(len(records))
        before = self._before
        self._before = replace(self._context.traffic)
        sums: Sums = {
            "length": (float(sum(h.n_sampled for h in records)), n),
            "truncated_share": (float(sum(h.status == TRUNCATED for h in records)), n),
            "controller/bytes_per_record": (float(self._before.nbytes - before.nbytes), n),
        }
        if rewards:
            weighted = (rewards[name].weight * v for h in records for name, v in h.rewards.items())
            sums["reward"] = sum(weighted), n
        for name in rewards:
            values = [h.rewards[name] for h in records if name in h.rewards]
            sums[f"reward/{name}"] = sum(values), float(len(values))
        shard_counts = {f"groups/{name}": float(value) for name, value in counts.items()}
        shard_counts |= Counter(f"groups/{verdict}" for verdict, _ in verdicts.values())
        shard_counts |= _failed_of(evaluated)
        shard_counts |= {
            "actions": sums["length"][0],
            "controller/messages": float(self._before.messages - before.messages),
        }
        if delays_s := latest_delays_s():
            name = f"loop_delay_ms_p99/controller.{self._context.facts.shard}"
            shard_counts[name] = 1000 * float(np.percentile(delays_s, 99))
        return ShardReport(sums, shard_counts, *_of(evaluated), dict(digests or {}))

    async def begin(
        self,
        version: int,
        evaluated: Evaluated | None,
        digests: Mapping[str, int] | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        """Reports the state before the first step: weights, and an evaluation if one was due.

        notes: lines for a person.
        """
        own_part = ShardReport({}, _failed_of(evaluated), *_of(evaluated), dict(digests or {}))
        await self.end(version, own_part, {}, {}, notes)

    async def end(
        self,
        version: int,
        own_part: ShardReport,
        metrics: Mapping[str, float],
        ledger: Mapping[str, Any],
        notes: Sequence[str] = (),
    ) -> None:
        """Merges the shards' parts and sends the report; all shards call it.

        version: of the weights after the step.
        own_part: this shard's part.
        metrics: of the trainer and the stages; the lead's are reported as they are.
        ledger: what a resumed run needs of the ledger.
        notes: lines for a person.
        """
        agree = self._context.agree
        parts = await agree.collect("report", msgspec.msgpack.encode(own_part))
        if not agree.lead:
            return
        shards = [msgspec.msgpack.decode(part, type=ShardReport) for part in parts]
        counts: Counter[str] = Counter()
        for shard in shards:
            counts.update(shard.counts)
        values = {**_means(shard.sums for shard in shards), **counts, **metrics}
        if values.get("seconds/step"):
            values["actions_per_s"] = values["actions"] / values["seconds/step"]
        report = StepReport(
            step=version,
            version=version,
            metrics={name: float(value) for name, value in sorted(values.items())},
            evaluation=_means(shard.evaluation for shard in shards),
            samples=sorted(
                (h for shard in shards for h in shard.samples), key=lambda header: -header.ordinal
            ),
            digests=_summed([shard.digests for shard in shards]),
        )
        await insist(self._context.supervisor, STEP_END, StepEnd(report, dict(ledger), list(notes)))


def _of(evaluated: Evaluated | None) -> tuple[Sums, list[Header]]:
    return (evaluated.sums, evaluated.samples) if evaluated else ({}, [])


def _failed_of(evaluated: Evaluated | None) -> dict[str, float]:
    failed = evaluated.failed if evaluated else {}
    return {f"{EVALUATION_FAILED}{purpose}": float(count) for purpose, count in failed.items()}


def _summed(parts: Sequence[Mapping[str, int]]) -> dict[str, str]:
    stages = [stage for stage in DIGESTS if any(stage in part for part in parts)]
    return {stage: f"{sum_of(part.get(stage, 0) for part in parts):016x}" for stage in stages}


def _means(parts: Iterable[Mapping[str, tuple[float, float]]]) -> dict[str, float]:
    """Divides each name's sum over all parts by its weight over all parts.

    A name whose weight is 0 is left out.
    """
    totals: dict[str, tuple[float, float]] = {}
    for sums in parts:
        for name, (total, weight) in sums.items():
            before = totals.get(name, (0.0, 0.0))
            totals[name] = before[0] + total, before[1] + weight
    return {name: total / weight for name, (total, weight) in totals.items() if weight}
