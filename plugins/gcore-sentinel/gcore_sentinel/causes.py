"""Says which cause explains an alarm, from what ranks and generators say of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from gcore_core.contract.sentinel import Compared, Finding
from gcore_core.contract.step_check import CheckedWorkers, Held

#: A cause that explains less than this of what was seen is not named.
_LIKELY = 0.5
#: Tensors that an error names.
_NAMED = 3


async def explained(
    workers: CheckedWorkers, step: int, replicas: Sequence[int], findings: Sequence[Finding]
) -> list[Finding]:
    """Returns what generators find when they score some of their records again.

    Generators that sleep, are lost or cannot do it say nothing.

    replicas: those that alarms name; none: all.
    findings: of the ranks. What all generators find together weighs as much as these do.
    """
    by_replica: dict[int, list[Compared]] = {}
    for record in await workers.shown_by_ranks(step, replicas):
        by_replica.setdefault(record.replica, []).append(record)
    told: list[list[Finding]] = []
    for replica in sorted(by_replica):
        if replica >= len(workers.generators):
            continue
        found = await workers.found_by_generator(replica, by_replica[replica])
        if found is not None:
            told.append(found)
    weight = sum(f.weight for f in findings if f.cause == findings[0].cause) if findings else 1.0
    share = weight / max(len(told), 1)
    return [replace(finding, weight=share) for answer in told for finding in answer]


async def held_otherwise_by(workers: CheckedWorkers, replicas: Sequence[int]) -> str:
    """Says which generator holds other weights than were pushed; "" where none is seen to.

    replicas: those that alarms name; none: all.
    """
    for replica in replicas or range(len(workers.generators)):
        held = await workers.held_by_generator(replica)
        if held is not None and (text := held_otherwise(workers.generators[replica], held)):
            return text
    return ""


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


def held_otherwise(name: str, held: Held) -> str:
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
