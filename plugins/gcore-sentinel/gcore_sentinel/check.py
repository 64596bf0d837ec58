"""The step check of this plugin: canaries, and the search for an alarm's cause.

Where none of a step's records could be compared, since older weights had sampled them, both sides
score some of them again after the push: canaries. Records say what their generator computed when
they were sampled, and the trainer has other weights by then; after a push both hold the same
version. They are given tokens: it does not matter which weights have sampled them. The trainer
scores at once. Generators do so while the program goes on, and what they said is judged before the
next update.

After an alarm every rank is asked what its records show, and generators what weights they hold. The
run ends with a WeightMismatch that says all of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gcore_core.contract.errors import WeightMismatch
from gcore_core.contract.sentinel import Alarm, Compared, Sentinel, Source
from gcore_core.contract.step_check import Evidence, StepCheck, StepCheckContext, blamed, mismatch
from gcore_sentinel.causes import explained, held_otherwise_by, likeliest
from gcore_sentinel.config import BandConfig

GAP_MAX = "logprob_gap_max"
GAP_MEAN = "logprob_gap_mean"
CANARY_ACTIONS = "sentinel/canary_actions"
#: What an alarm is about, before the versions.
_CANARIES = "both sides scored canaries under version"
_RECORDS = "records of this step are of version"


class Searching(StepCheck):
    """Has canaries scored, and looks for the cause of what the sentinel sees."""

    def __init__(self, config: BandConfig, context: StepCheckContext) -> None:
        self._sentinel = context.sentinel
        self._workers = context.workers
        self._saves = context.saves
        self._count = config.canaries if context.workers.both_score else 0
        self._compares = True  # whether any record of the last step could be compared
        # version -> what generators score under its weights
        self._canaries: tuple[int, asyncio.Task[list[Compared]]] | None = None

    async def updated(self, step: int, evidence: Evidence) -> dict[str, float]:
        self._compares = bool(evidence)
        alarms = self._sentinel.judge(step, evidence)
        if alarms:
            raise await self._mismatch(step, alarms, evidence)
        return self._sentinel.metrics()

    async def pushed(self, version: int) -> None:
        """Has the trainer score canaries, and generators begin to, where nothing was compared.

        Raises what a trainer's call raises.
        """
        if self._compares or not self._count:
            return
        shown = await self._workers.scored_by_trainer(version, self._count)
        scoring = self._workers.scored_by_generators(version, shown)
        self._canaries = version, asyncio.ensure_future(scoring)

    async def before_update(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Judges what ``pushed`` began.

        So nothing is trained on what generators sampled under weights that raise an alarm.
        """
        if self._canaries is None:
            return dict(metrics)
        version, scoring = self._canaries
        self._canaries = None
        records = await scoring
        if not records:
            return dict(metrics)
        evidence = evidence_of(self._sentinel, records)
        alarms = self._sentinel.judge(version, evidence)
        if alarms:
            raise await self._mismatch(version, alarms, evidence, records)
        gaps = np.concatenate(
            [np.abs(one.rollout_logp - one.trainer_logp)[one.mask] for one in records]
        )
        seen = {
            CANARY_ACTIONS: float(gaps.size),
            GAP_MAX: float(gaps.max(initial=0.0)),
            GAP_MEAN: float(gaps.mean()) if gaps.size else 0.0,
        }
        return with_canaries(metrics, seen)

    def notes(self) -> list[str]:
        return self._sentinel.notes()

    def state(self) -> dict[str, Any]:
        return self._sentinel.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self._sentinel.restore(state)

    def end(self) -> None:
        """Waits for no canary any more, as the run ends before anything is trained on."""
        if self._canaries is not None:
            self._canaries[1].cancel()
            self._canaries = None

    async def _mismatch(
        self,
        step: int,
        alarms: Sequence[Alarm],
        evidence: Evidence,
        canaries: Sequence[Compared] = (),
    ) -> WeightMismatch:
        """Makes the error, with what ranks and generators say of the cause.

        canaries: what the alarm is about; empty where it is about the step's own records.
        """
        return mismatch(
            step,
            alarms,
            evidence,
            self._workers.generators,
            saves=self._saves,
            cause=await self._cause(step, alarms[0], blamed(alarms), canaries),
            compared=_CANARIES if canaries else _RECORDS,
        )

    async def _cause(
        self, step: int, alarm: Alarm, replicas: list[int], canaries: Sequence[Compared]
    ) -> tuple[str, str]:
        """Returns a word for the cause and a sentence about it.

        What generators hold comes first, since hashes leave no doubt.
        """
        if alarm.cause:
            return alarm.cause, ""
        if sentence := await held_otherwise_by(self._workers, replicas):
            return "weights", sentence
        if canaries:
            own = [one for one in canaries if not replicas or one.replica in replicas]
            return likeliest(self._sentinel.diagnose(own))
        findings = await self._workers.found_by_ranks(step, replicas)
        return likeliest(findings + await explained(self._workers, step, replicas, findings))


def evidence_of(sentinel: Sentinel, records: Sequence[Compared]) -> Evidence:
    """Returns the evidence of some records, as ranks and controllers make it.

    Ranks may have drawn canaries of one prompt each: they are one group, and weighed as such.
    """
    sums: dict[tuple[int, int, int], np.ndarray] = {}
    for record, numbers in zip(records, sentinel.measure(records), strict=True):
        key = record.ordinal, record.replica, record.version
        sums[key] = sums[key] + numbers if key in sums else numbers
    weighed = sentinel.weigh(np.stack(list(sums.values())))
    evidence: dict[Source, np.ndarray] = {}
    for (_, replica, version), row in zip(sums, weighed, strict=True):
        source = replica, version
        evidence[source] = evidence[source] + row if source in evidence else row
    return evidence


def with_canaries(metrics: Mapping[str, float], seen: Mapping[str, float]) -> dict[str, float]:
    """Returns a step's metrics with those of a push's canaries.

    A step that is saved judges the canaries of two pushes: of the one before it, and of its own.
    Then their actions are summed, the largest gap is that of both, and the mean is over both.

    metrics: of the step; those of the push before may be among them.
    seen: of the canaries of a push; empty for none.
    """
    if not seen or CANARY_ACTIONS not in metrics:
        return {**metrics, **seen}
    counts = metrics[CANARY_ACTIONS], seen[CANARY_ACTIONS]
    total = sum(counts)
    means = metrics[GAP_MEAN] * counts[0] + seen[GAP_MEAN] * counts[1]
    return {
        **metrics,
        CANARY_ACTIONS: total,
        GAP_MAX: max(metrics[GAP_MAX], seen[GAP_MAX]),
        GAP_MEAN: means / total if total else 0.0,
    }
