"""Has the job's sentinel judge the log-probs of each step, and looks for the cause of an alarm.

    rank         sums of every group, over the rank's records        (``Sentinel.measure``)
    controller   adds up what ranks say of its groups                (``Sentinel.weigh``)
    lead         adds up what controllers say, and judges            (``Sentinel.judge``)

Where none of a step's records could be compared, since older weights had sampled them, the lead has
both sides score some of them again after the push: canaries. Trainers do so at once. Generators do
so while the program goes on, and what they said is judged before the next update.

After an alarm the lead asks every rank what its records show, and the generators what weights they
hold. The run ends with a WeightMismatch that says all of it.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from gcore_core.contract.errors import GcoreError, WeightMismatch
from gcore_core.contract.plugin_code import PluginCode
from gcore_core.contract.sentinel import Alarm, Compared, Finding, Sentinel, Source
from gcore_core.controllers.canaries import scored_by_generators, scored_by_trainers
from gcore_core.controllers.context import ControllerContext
from gcore_core.controllers.explaining import explained
from gcore_core.runtime.messages import (
    DIAGNOSE,
    PUSH_HELD,
    DiagnoseRequest,
    GroupNumbers,
    HeldReply,
    Nothing,
)
from gcore_core.runtime.rpc.retry import insist

Evidence = dict[Source, np.ndarray]  # (replica, version) -> what ``Sentinel.weigh`` gave, summed
GAP_MAX = "logprob_gap_max"
GAP_MEAN = "logprob_gap_mean"
CANARY_ACTIONS = "sentinel/canary_actions"
#: What a trainer says of the log-probs of generators beside its own.
GAPS = (GAP_MAX, GAP_MEAN, "logprob_gap_share")
#: A cause that explains less than this of what was seen is not named.
_LIKELY = 0.5
#: Tensors that an error names.
_NAMED = 3


class Watching:
    """One shard's part of watching log-probs; does nothing where the job has no sentinel."""

    def __init__(self, context: ControllerContext) -> None:
        self._context = context
        self._provider = context.facts.providers.get("sentinel", "")
        self._compares = True  # whether any record of the last step could be compared; in the lead
        # version -> what generators score under its weights; in the lead
        self._canaries: tuple[int, asyncio.Task[list[Compared]]] | None = None
        sentinel = context.sentinel
        self._sentinel = sentinel
        state = context.facts.state.get("sentinel", {}).get(self._provider)
        if sentinel is not None and state:
            sentinel.restore(state)

    def state(self) -> dict[str, Any]:
        """Returns what a resumed run goes on with, under the sentinel's name; plain values.

        A resumed run may have another sentinel, which must not get it.
        """
        state = self._sentinel.state() if self._sentinel is not None else {}
        return {self._provider: state} if state else {}

    def notes(self) -> list[str]:
        """Returns what a person should know when the run starts."""
        return self._sentinel.notes() if self._sentinel is not None else []

    async def judge(self, step: int, groups: Iterable[GroupNumbers]) -> dict[str, float]:
        """Judges a step; all shards call it. Returns the sentinel's metrics; empty but in the lead.

        In the lead it raises WeightMismatch when there is an alarm.

        groups: what all ranks measured of this shard's groups.
        """
        sentinel = self._sentinel
        if sentinel is None:
            return {}
        code = self._code(sentinel)
        own = evidence_of(sentinel, code, groups)
        rows = [(*source, row.tolist()) for source, row in sorted(own.items())]
        payloads = await self._context.agree.collect("evidence", msgspec.msgpack.encode(rows))
        if not self._context.agree.lead:
            return {}
        evidence = summed(payloads)
        self._compares = bool(evidence)
        alarms = code.call(sentinel.judge, step, evidence)
        if alarms:
            raise await self._mismatch(step, alarms, evidence)
        return code.call(sentinel.metrics)

    async def show_canaries(self, version: int) -> None:
        """Has trainers score some records, and generators begin to; right after a push.

        Only the lead does it, and only where no record of the last step could be compared. Both
        sides score the records under the weights of this version, so that it does not matter which
        weights have sampled them. Generators that sleep, are lost or hold another version score
        none.

        Raises what a trainer's call raises.
        """
        facts = self._context.facts
        if self._sentinel is None or self._compares or not facts.canaries:
            return
        shown = await scored_by_trainers(self._context, version, facts.canaries)
        scoring = scored_by_generators(self._context, version, shown)
        self._canaries = version, asyncio.create_task(scoring)

    async def canaries(self) -> dict[str, float]:
        """Judges what ``show_canaries`` began; returns metrics, empty where it began nothing.

        Raises WeightMismatch when there is an alarm. Called before an update, so nothing is trained
        on what generators sampled under weights that raise one.
        """
        sentinel = self._sentinel
        if sentinel is None or self._canaries is None:
            return {}
        version, scoring = self._canaries
        self._canaries = None
        records = await scoring
        if not records:
            return {}
        code = self._code(sentinel)
        measured = code.call(sentinel.measure, records)
        groups = [
            GroupNumbers(record.ordinal, record.replica, version, row.tolist())
            for record, row in zip(records, measured, strict=True)
        ]
        evidence = evidence_of(sentinel, code, groups)
        alarms = code.call(sentinel.judge, version, evidence)
        if alarms:
            raise await self._mismatch(version, alarms, evidence, records)
        gaps = np.concatenate(
            [np.abs(one.rollout_logp - one.trainer_logp)[one.mask] for one in records]
        )
        return {
            CANARY_ACTIONS: float(gaps.size),
            GAP_MAX: float(gaps.max(initial=0.0)),
            GAP_MEAN: float(gaps.mean()) if gaps.size else 0.0,
        }

    def end_canaries(self) -> None:
        """Waits for no canary any more, as the run ends before anything is trained on."""
        if self._canaries is not None:
            self._canaries[1].cancel()
            self._canaries = None

    def compared_gaps(self, metrics: dict[str, float]) -> dict[str, float]:
        """Returns a trained step's metrics, of the gaps only those that were measured."""
        return metrics if self._compares else without_empty_gaps(metrics)

    def _code(self, sentinel: Sentinel) -> PluginCode:
        return PluginCode(
            made=sentinel,
            kind="sentinel",
            provider=self._provider,
            where="sentinel.use",
            contract="SentinelContract",
        )

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
        facts = self._context.facts
        replicas = sorted({alarm.replica for alarm in alarms if alarm.replica >= 0})
        cause = await self._cause(step, alarms[0], replicas, canaries)
        peers = self._context.replicas
        names = ", ".join(peers[i].name for i in replicas) or "the generators together"
        versions = sorted({v for replica, v in evidence if not replicas or replica in replicas})
        return mismatch(
            step,
            names,
            alarms,
            cause,
            versions=versions,
            of_canaries=bool(canaries),
            checkpoints=facts.checkpoint.every > 0,
        )

    async def _cause(
        self, step: int, alarm: Alarm, replicas: list[int], canaries: Sequence[Compared]
    ) -> tuple[str, str]:
        """Returns a word for the cause and a sentence about it.

        What generators hold comes first, since hashes leave no doubt.
        """
        if alarm.cause:
            return alarm.cause, ""
        if sentence := await self._held(replicas):
            return "weights", sentence
        if canaries and self._sentinel is not None:
            own = [one for one in canaries if not replicas or one.replica in replicas]
            return likeliest(self._code(self._sentinel).call(self._sentinel.diagnose, own))
        findings = await self._findings(step, replicas)
        return likeliest(findings + await explained(self._context, step, replicas, findings))

    async def _findings(self, step: int, replicas: list[int]) -> list[Finding]:
        """Returns what every rank finds in its records of these replicas, or of all without any."""
        request = DiagnoseRequest(step, replicas)
        ranks = [rank[0] for rank in self._context.ranks]
        answers = await asyncio.gather(*(insist(rank, DIAGNOSE, request) for rank in ranks))
        return [finding for answer in answers for finding in answer]

    async def _held(self, replicas: list[int]) -> str:
        """Says which generator holds other weights than were pushed; "" where none is seen to."""
        everyone = range(len(self._context.replicas))
        for replica in replicas or everyone:
            peer = self._context.replicas[replica]
            try:
                held = await insist(peer, PUSH_HELD, Nothing())
            except GcoreError:  # asleep or lost: it cannot be asked, and the alarm stays
                continue
            if text := held_otherwise(peer.name, held):
                return text
        return ""


def mismatch(
    step: int,
    names: str,
    alarms: Sequence[Alarm],
    cause: tuple[str, str],
    *,
    versions: Sequence[int],
    of_canaries: bool,
    checkpoints: bool,
) -> WeightMismatch:
    """Makes the error that ends a run after an alarm.

    names: of the generators that it is about.
    cause: a word and a sentence.
    versions: of the weights that sampled what they gave to this step; of canaries, those under
        which both sides scored them.
    of_canaries: the alarm is about canaries, not about the step's own records.
    checkpoints: whether the run makes any.
    """
    first = alarms[0]
    saved = (
        "the run can be resumed from a checkpoint; g-core checkpoint lists them, those after "
        f"step {first.since_step} were trained on such records"
    )
    unsaved = "nothing is saved: set checkpoint.every, so that such a run can be resumed"
    which = ", ".join(map(str, versions))
    compared = (
        f"both sides scored canaries under version {which}"
        if of_canaries
        else f"records of this step are of version {which}"
    )
    return WeightMismatch(
        f"{names} and the trainer disagree about log-probs since step {first.since_step}",
        where=f"step {step}",
        why=f"{first.text}; {compared}\n{cause[1]}",
        todo=saved if checkpoints else unsaved,
        replicas=[alarm.replica for alarm in alarms],
        since_step=first.since_step,
        versions=list(versions),
        cause=cause[0],
    )


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


def with_canaries(metrics: dict[str, float], seen: dict[str, float]) -> dict[str, float]:
    """Returns a step's metrics with those of a push's canaries.

    A step that is saved judges the canaries of two pushes: of the one before it, and of its own.
    Then their actions are summed, the largest gap is that of both, and the mean is over both.

    metrics: of the step; those of the push before may be among them.
    seen: what ``Watching.canaries`` returned; empty for none.
    """
    if not seen or CANARY_ACTIONS not in metrics:
        return metrics | seen
    counts = metrics[CANARY_ACTIONS], seen[CANARY_ACTIONS]
    total = sum(counts)
    means = metrics[GAP_MEAN] * counts[0] + seen[GAP_MEAN] * counts[1]
    return {
        **metrics,
        CANARY_ACTIONS: total,
        GAP_MAX: max(metrics[GAP_MAX], seen[GAP_MAX]),
        GAP_MEAN: means / total if total else 0.0,
    }


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


def likeliest(findings: Sequence[Finding]) -> tuple[str, str]:
    """Returns (cause, sentence) of the cause that best explains what all ranks saw.

    The cause is "" where none explains enough. Every rank scores the same causes.
    """
    scores: dict[str, float] = defaultdict(float)
    texts: dict[str, Finding] = {}
    total = sum(finding.weight for finding in findings if finding.cause == findings[0].cause)
    for finding in findings:
        scores[finding.cause] += finding.score * finding.weight
        best = texts.get(finding.cause)
        if best is None or finding.weight > best.weight:
            texts[finding.cause] = finding
    if total > 0:
        cause = max(scores, key=lambda name: scores[name])
        if scores[cause] / total >= _LIKELY:
            return cause, f"likely cause: {texts[cause].text}"
    return "", (
        "no single cause explains it: wrong or half-loaded weights, or another arithmetic on one "
        "side"
    )


def held_otherwise(name: str, held: HeldReply) -> str:
    """Says how what a generator holds differs from what was pushed to it; "" where it does not."""
    if held.pushed >= 0 and held.version != held.pushed:
        return f"cause: {name} is at version {held.version}, version {held.pushed} was pushed to it"
    if not held.differ:
        return ""
    if held.older == len(held.differ):
        return (
            f"cause: {name} holds weights of version {held.older_version} in "
            f"{len(held.differ)} of {held.tensors} tensors: old weights"
        )
    some = ", ".join(held.differ[:_NAMED])
    more = f" and {len(held.differ) - _NAMED} more" if len(held.differ) > _NAMED else ""
    return (
        f"cause: {name} holds other bytes than were pushed in {len(held.differ)} of "
        f"{held.tensors} tensors: {some}{more}"
    )
