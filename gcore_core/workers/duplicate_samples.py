"""Looks for samples of one prompt that are equal although that is all but impossible.

Engines that share a seed, and chunks whose samples are numbered alike, draw one answer several
times. Nothing else shows it: log-probs are right, and every record is what its generator sealed.

A second sample equals the first with the probability of the answer itself, which its log-probs say.
These are over all tokens. A generator that samples from the likeliest ones alone (top_p, top_k)
gives its answers a higher probability. So the log-prob of each action is raised by an allowance,
and one group is never enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from gcore_core.contract.errors import RecordMismatch
from gcore_core.contract.lineage import name_of
from gcore_core.contract.trainer import TrainRecord

#: The allowance: nats by which sampling from the likeliest tokens may raise an action's log-prob.
#: It is so much where half of the probability is left out.
_ALLOWED = 0.7
#: Equal answers of a larger log-prob are passed; e ** -14 is one in a million.
_RARE = -14.0
#: Equal samples must be in so many groups, and in half of those that have several records.
_GROUPS = 4


def check_duplicates(records: Iterable[TrainRecord], where: str) -> None:
    """Raises RecordMismatch where samples of many prompts are equal beyond chance.

    Records without ``action_ids`` are passed: their actions are not tokens.
    """
    groups: dict[int, list[TrainRecord]] = {}
    for record in records:
        columns = record.columns
        if "action_ids" in columns and "logp" in columns and len(columns["action_ids"]):
            groups.setdefault(record.ordinal, []).append(record)
    several = [group for group in groups.values() if len(group) > 1]
    pairs = [pair for group in several if (pair := _duplicates(group))]
    if len(pairs) < max(_GROUPS, len(several) / 2):
        return
    first, second = pairs[0]
    chance = np.exp(max(_log_chance(first.columns), -700.0))
    raise RecordMismatch(
        f"records {name_of(first.ordinal, first.sample)} and "
        f"{name_of(second.ordinal, second.sample)} are equal, by chance one in {1 / chance:.1g}",
        where=where,
        why=f"in {len(pairs)} of {len(several)} groups two samples are equal: they were drawn with "
        "the same random numbers, or the likeliest token was always taken",
        todo="look at the seeds of samples: each of a prompt has its own (SampleRequest.seed)",
        ordinal=first.ordinal,
        sample=second.sample,
    )


def _duplicates(group: list[TrainRecord]) -> tuple[TrainRecord, TrainRecord] | None:
    """Returns the first two records with one answer that is too unlikely to come twice."""
    first: dict[bytes, TrainRecord] = {}
    for record in group:
        other = first.setdefault(record.columns["action_ids"].tobytes(), record)
        if other is not record and _log_chance(record.columns) < _RARE:
            return other, record
    return None


def _log_chance(columns: Mapping[str, np.ndarray]) -> float:
    """Returns the most that the logarithm of an answer's probability can be."""
    logp = np.asarray(columns["logp"], np.float64)
    if "action_mask" in columns:
        logp = logp[np.asarray(columns["action_mask"]) != 0]  # the others were not sampled
    return float(np.minimum(logp + _ALLOWED, 0.0).sum())
