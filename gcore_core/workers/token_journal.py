"""Writes tokens and log-probs of a few trained records, ``tokens.jsonl`` of a run.

Rank 0 of the policy writes it, of what a sentinel compares anyway. It is bounded, whatever the size
of a step: every ``EVERY`` steps ``PROMPTS`` x ``RECORDS`` records of at most ``ACTIONS`` actions.
``gcore_core.contract.run_files`` has the type of the lines and reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from gcore_core.contract.run_files import TOKENS, TrainedTokens
from gcore_core.contract.sentinel import Compared
from gcore_core.runtime.journal import Journal

#: Steps from one that is shown to the next; the first is step 0.
EVERY = 10
#: Prompts of a step, the first ones; and records of each, so that answers to one can be compared.
PROMPTS = 2
RECORDS = 2
#: Actions of a record, the first ones; and tokens of its prompt, the last ones.
ACTIONS = 1024
PROMPT_TOKENS = 256
_DECIMALS = 7  # of a log-prob in the file


class TokenJournal:
    """Appends the rows of the steps that are shown."""

    def __init__(self, run_dir: Path) -> None:
        self._rows = Journal(run_dir / TOKENS)

    def write(
        self,
        step: int,
        records: Iterable[Compared],
        advantage_of: Mapping[tuple[int, int], float],
    ) -> None:
        """Appends some of the records of a step, if it is one that is shown.

        advantage_of: (ordinal, sample) -> what a record was trained with.
        """
        if step % EVERY:
            return
        self._rows.append(
            _row(step, record, advantage_of[record.ordinal, record.sample])
            for record in _chosen(records)
        )


def _chosen(records: Iterable[Compared]) -> list[Compared]:
    """Returns the first records of the first prompts; none of records whose actions are no
    tokens.
    """
    of_prompt: dict[int, list[Compared]] = {}
    for record in records:
        is_known = record.ordinal in of_prompt
        if record.action_ids is None or not (is_known or len(of_prompt) < PROMPTS):
            continue
        own = of_prompt.setdefault(record.ordinal, [])
        if len(own) < RECORDS:
            own.append(record)
    return [record for own in of_prompt.values() for record in own]


def _row(step: int, record: Compared, advantage: float) -> TrainedTokens:
    assert record.action_ids is not None
    prompt_ids = [] if record.prompt_ids is None else record.prompt_ids[-PROMPT_TOKENS:].tolist()
    return TrainedTokens(
        step=step,
        ordinal=record.ordinal,
        sample=record.sample,
        replica=record.replica,
        version=record.version,
        advantage=float(advantage),
        prompt_ids=prompt_ids,
        action_ids=record.action_ids[:ACTIONS].tolist(),
        actions=len(record.action_ids),
        rollout_logp=_numbers(record.rollout_logp),
        trainer_logp=_numbers(record.trainer_logp),
        entropy=[] if record.entropy is None else _numbers(record.entropy),
        masked=np.flatnonzero(~record.mask[:ACTIONS]).tolist(),
    )


def _numbers(values: np.ndarray) -> list[float]:
    numbers: list[float] = np.asarray(values[:ACTIONS], np.float64).round(_DECIMALS).tolist()
    return numbers
