"""Defines what the core calls on rewards: scorers, and what they see and answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from gcore_core.contract.columns import Columns
from gcore_core.contract.records import REWARD_FAILED, Prompt, Ref

#: A reason that quotes others (a model, a user's function) is cut to so many characters.
REASON_CHARACTERS = 200
#: The largest size of a value: that of float32, in which trainers compute.
LARGEST_VALUE = float(np.finfo(np.float32).max)


@dataclass(frozen=True, kw_only=True)
class ScoredRecord:
    """Holds what a scorer sees of a record.

    ordinal, sample: name it; records of one ordinal have one prompt.
    prompt: the row of the dataset, a copy for this record and this reward alone.
    text: the completion, without special tokens; "" where actions are no tokens.
    status: how it ended, as in its header.
    columns: as listed in ``gcore_core.contract.records``.
    media: ``Finished.media`` of its generator.
    refs: name -> where a medium lies, to show it in a ``Question``.
    """

    ordinal: int
    sample: int
    prompt: Prompt
    text: str
    status: str
    columns: Columns
    media: Columns = field(default_factory=dict)
    refs: Mapping[str, Ref] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Score:
    """Holds what a reward says of a record. A failed reward is a status, never a number.

    value: finite, also in float32 (``LARGEST_VALUE``), with status "ok"; None with any other.
    status: "ok", "failed", "timeout" or "skipped".
    reason: why there is no value; of a value nobody reads it.
    """

    value: float | None
    status: str = "ok"
    reason: str = ""


@runtime_checkable
class Scorer(Protocol):
    """Gives records their values of one reward. Calls come one at a time, in the main thread."""

    def score(self, records: Sequence[ScoredRecord]) -> list[Score]:
        """Returns one score per record, in order.

        records: of a provider of level "group", whole groups, neighbours by ordinal.
        """


@runtime_checkable
class AsyncScorer(Protocol):
    """Gives records their values of a reward that waits for others, such as a judge or a service.

    Calls overlap, on the worker's event loop. That is in another thread than the main one, so no
    signal can be handled there, and a time limit by one ends the run.
    """

    async def score(self, records: Sequence[ScoredRecord]) -> list[Score]:
        """Returns one score per record, in order."""


def failure(reason: str) -> Score:
    """Makes the answer for a record that cannot be scored."""
    return Score(value=None, status=REWARD_FAILED, reason=reason)
