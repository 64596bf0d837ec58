"""Asks the sampling program from which records the next wave of a group is made."""

from __future__ import annotations

import numpy as np

from gcore_core.contract.records import FAILED, DraftRef, Header, Lease
from gcore_core.contract.sampling import DrawnSoFar
from gcore_core.controllers.algorithm_answers import drafts_of
from gcore_core.controllers.context import ControllerContext
from gcore_core.controllers.generation.ledger import Ledger, has_failed_reward
from gcore_core.controllers.reward_weights import group_scalars


def next_leases(
    context: ControllerContext, ledger: Ledger, leases: list[Lease], wave: int
) -> list[Lease]:
    """Makes the next wave of these groups due, and returns its leases.

    A group with a failed record or reward is drawn to its end from the row's own prompt: it cannot
    be used, and its verdict waits for all of its records.

    leases: of the wave before.
    wave: number of the next one.
    """
    ordinals = {lease.ordinal for lease in leases}
    for ordinal, records in ledger.between_waves(ordinals):
        drafts = _drafts(context, ledger, records, ledger.waves[wave])
        ledger.next_wave(ordinal, wave, drafts)
    return ledger.unfinished(ordinals)


def _drafts(
    context: ControllerContext, ledger: Ledger, records: list[Header], count: int
) -> dict[int, DraftRef]:
    """Returns sample -> the record that it is made from.

    records: those of the group so far, by sample.
    count: how many the next wave draws.
    """
    program = context.sampling
    if program is None or any(r.status == FAILED or has_failed_reward(r) for r in records):
        return {}
    numbers = group_scalars(records, context.facts.rewards)
    group = DrawnSoFar(
        rewards=numbers.rewards,
        named=numbers.named,
        drafts=np.array([record.draft for record in records], np.int64),
    )
    names = drafts_of(context.sampling_code, program, group, count)
    return {
        len(records) + place: _ref(
            records[name],
            float(numbers.rewards[name]),
            ledger.critique(*records[name].key, context.facts.rewards),
        )
        for place, name in enumerate(names)
        if name >= 0
    }


def _ref(record: Header, reward: float, critique: str) -> DraftRef:
    if record.columns is None:
        raise ValueError(f"record {record.key} has no columns")  # a failed one, which is no draft
    return DraftRef(
        sample=record.sample,
        columns=record.columns,
        slot=record.slot,
        reward=reward,
        rewards=tuple(sorted(record.rewards.items())),
        critique=critique,
    )
