"""Brings the log-probs of each step to the lead, where the job's step check looks at them.

rank         sums of every group, over the rank's records        (``Sentinel.measure``)
controller   adds up what ranks say of its groups                (``Sentinel.weigh``)
lead         adds up what controllers say, and has it judged     (``StepCheck.updated``)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from gcore_core.contract.plugin_code import PluginCode
from gcore_core.contract.sentinel import Sentinel, Source
from gcore_core.controllers.context import ControllerContext
from gcore_core.runtime.messages import GroupNumbers

Evidence = dict[Source, np.ndarray]  # (replica, version) -> what ``Sentinel.weigh`` gave, summed
GAP_MAX = "logprob_gap_max"
#: What a trainer says of the log-probs of generators next to its own.
GAPS = (GAP_MAX, "logprob_gap_mean", "logprob_gap_share")


class Watching:
    """One shard's part of watching log-probs; does nothing where the job has no sentinel.

    The step check is the lead's: in another shard only ``judge`` does something.
    """

    def __init__(self, context: ControllerContext) -> None:
        self._context = context
        self._provider = context.facts.providers.get("sentinel", "")
        self._compares = True  # whether any record of the last step could be compared; in the lead
        self._check = context.step_check
        self._code = PluginCode(
            made=context.sentinel,
            kind="sentinel",
            provider=self._provider,
            where="sentinel.use",
            contract="SentinelContract",
        )
        state = context.facts.state.get("sentinel", {}).get(self._provider)
        if self._check is not None and state:
            self._check.restore(state)

    def state(self) -> dict[str, Any]:
        """Returns what a resumed run goes on with, under the sentinel's name; plain values.

        A resumed run may have another sentinel, which must not get it.
        """
        state = self._check.state() if self._check is not None else {}
        return {self._provider: state} if state else {}

    def notes(self) -> list[str]:
        """Returns what a person should know when the run starts."""
        return self._check.notes() if self._check is not None else []

    async def judge(self, step: int, groups: Iterable[GroupNumbers]) -> dict[str, float]:
        """Judges a step; all shards call it. Returns the check's metrics; empty but in the lead.

        In the lead it raises WeightMismatch at an alarm.

        groups: what all ranks measured of this shard's groups.
        """
        sentinel = self._context.sentinel
        if sentinel is None:
            return {}
        own = evidence_of(sentinel, self._code, groups)
        rows = [(*source, row.tolist()) for source, row in sorted(own.items())]
        payloads = await self._context.agree.collect("evidence", msgspec.msgpack.encode(rows))
        if self._check is None:
            return {}
        evidence = summed(payloads)
        self._compares = bool(evidence)
        return await self._code.wait(self._check.updated(step, evidence))

    async def pushed(self, version: int) -> None:
        """Tells the check, in the lead, that generators and trainer hold the same version."""
        if self._check is not None:
            await self._code.wait(self._check.pushed(version))

    async def before_update(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Returns a step's metrics with what the check still had to judge.

        Raises WeightMismatch at an alarm, before anything is trained on what it is
        about.
        """
        if self._check is None:
            return dict(metrics)
        return await self._code.wait(self._check.before_update(metrics))

    def end(self) -> None:
        """Tells the check that the run ends."""
        if self._check is not None:
            self._check.end()

    def compared_gaps(self, metrics: dict[str, float]) -> dict[str, float]:
        """Returns a trained step's metrics, of the gaps only those that were measured."""
        return metrics if self._compares else without_empty_gaps(metrics)


def evidence_of(sentinel: Sentinel, code: PluginCode, groups: Iterable[GroupNumbers]) -> Evidence:
    """Returns the evidence of a shard's groups, summed for each replica and version.

    A group that lies on several ranks counts once: its numbers are added before they are weighed.
    """
    sums: dict[tuple[int, int, int], np.ndarray] = {}
    for part in groups:
        key = part.ordinal, part.replica, part.version
        numbers = np.array(part.numbers, np.float64)
        sums[key] = sums[key] + numbers if key in sums else numbers
    if not sums:
        return {}
    weighed = code.call(sentinel.weigh, np.stack(list(sums.values())))
    evidence: Evidence = {}
    for (_, *source), row in zip(sums, weighed, strict=True):
        key_of_source: Source = (source[0], source[1])
        evidence[key_of_source] = evidence.get(key_of_source, np.zeros(row.shape)) + row
    return evidence


def without_empty_gaps(metrics: dict[str, float]) -> dict[str, float]:
    """Returns metrics of a step in which the sentinel compared nothing, without gaps of 0.0.

    A trainer that compared nothing says 0.0, which reads as if generator and trainer agreed. A gap
    that is not 0.0 was measured, by a trainer that sees what the sentinel cannot.
    """
    if metrics.get(GAP_MAX) != 0.0:
        return metrics
    return {name: value for name, value in metrics.items() if name not in GAPS}


def summed(payloads: Sequence[bytes]) -> Evidence:
    """Adds up what the shards sent."""
    evidence: Evidence = {}
    for payload in payloads:
        rows = msgspec.msgpack.decode(payload, type=list[tuple[int, int, list[float]]])
        for replica, version, numbers in rows:
            row = np.array(numbers, np.float64)
            before = evidence.get((replica, version))
            evidence[replica, version] = row if before is None else before + row
    return dict(sorted(evidence.items()))
