"""Puts a record that a sentinel looks at into a message, and takes it out."""

from __future__ import annotations

import numpy as np

from gcore_core.contract.sentinel import Compared
from gcore_core.runtime.messages import ShownRecord


def show_record(record: Compared) -> ShownRecord:
    """Puts a record into a message; its actions are tokens."""
    ids = (record.prompt_ids, record.action_ids)
    return ShownRecord(
        (record.ordinal, record.sample, record.step, record.replica, record.version),
        [[] if array is None else array.tolist() for array in ids],
        [record.rollout_logp.tolist(), record.trainer_logp.tolist()],
        record.mask.tolist(),
        record.temperature,
    )


def opened_record(shown: ShownRecord) -> Compared:
    """Takes a record out of a message."""
    ordinal, sample, step, replica, version = shown.key
    prompt_ids, action_ids = (np.array(ids, np.int32) for ids in shown.ids)
    rollout_logp, trainer_logp = (np.array(logp, np.float32) for logp in shown.logps)
    return Compared(
        ordinal=ordinal,
        sample=sample,
        step=step,
        replica=replica,
        version=version,
        rollout_logp=rollout_logp,
        trainer_logp=trainer_logp,
        mask=np.array(shown.mask, bool),
        prompt_ids=prompt_ids,
        action_ids=action_ids,
        temperature=shown.temperature,
    )
