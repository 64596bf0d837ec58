"""Writes ``tokens.jsonl`` and ``tensors.jsonl`` of a run; rank 0 of the policy does.

Tokens and log-probs are of a few trained records, which a sentinel compares anyway: every ``EVERY``
steps ``PROMPTS`` x ``RECORDS`` records of at most ``ACTIONS`` actions, whatever the size of a step.
Digests are of each push's tensors. ``gcore_core.contract.run_files`` has the types of the lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from gcore_core.contract.records import WeightPlan
from gcore_core.contract.run_files import TENSORS, TOKENS, PushedTensors, TensorNames, TrainedTokens
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


class TensorJournal:
    """Appends a row for each push that brings something else than the row before says."""

    def __init__(self, run_dir: Path) -> None:
        self._rows = Journal(run_dir / TENSORS)
        self._names: list[str] = []
        self._latest: PushedTensors | None = None

    def write(self, plan: WeightPlan, digests: Sequence[int], transport: str) -> None:
        """Appends the digests of a push, unless the last row has them already.

        digests: of the plan's tensors, in its order.
        transport: its name: each may have digests of its own kind.
        """
        # Some transports count a digest as a signed number; the bits are the same.
        joined = b"".join((digest % 2**64).to_bytes(8, "big") for digest in digests)
        pushed = PushedTensors(plan.version, transport, joined)
        if pushed == self._latest:
            return
        names = [spec.name for spec in plan.tensors]
        self._rows.append([pushed] if names == self._names else [TensorNames(names), pushed])
        self._names = names
        self._latest = pushed
