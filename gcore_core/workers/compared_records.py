"""Holds, on one trainer rank, the log-probs of a step that a sentinel compares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from gcore_core.contract.columns import Columns
from gcore_core.contract.generator import ScoresLogprobs
from gcore_core.contract.plugin_code import PluginCode
from gcore_core.contract.sentinel import Compared, Finding, Sentinel
from gcore_core.contract.trainer import ComparesLogprobs, StartLogprobs, Trainer, TrainRecord
from gcore_core.runtime.messages import DiagnoseRequest, GroupNumbers, ScoreLast, ShownRecord
from gcore_core.runtime.shown_records import show_record


class ComparedRecords:
    """Keeps copies of the rollout's log-probs from ``prepare`` to the next one.

    They are copies, since the store may use a record's memory again when its step is over, and an
    alarm is looked into after that. Only fresh records are kept: those that older weights sampled
    cannot be compared with what the trainer computes now.
    """

    def __init__(self, backend: Trainer, sentinel: Sentinel) -> None:
        self._backend = backend
        self._sentinel = sentinel
        self._code = PluginCode(
            made=sentinel, kind="sentinel", where="sentinel.use", contract="SentinelContract"
        )
        self._step = 0
        self._kept: list[Compared | None] = []  # as prepared; None for those that are not fresh
        self._compared: list[Compared] = []  # of the step that was trained last
        self._canaries: list[Compared] = []  # of the last step that had records of tokens alone

    def keep(self, step: int, records: Sequence[TrainRecord]) -> None:
        """Copies what is needed of the prepared records."""
        self._step = step
        if canaries := _some_tokens(step, records):
            self._canaries = canaries
        self._compared = []
        self._kept = [_copied_if_fresh(step, record) for record in records]

    def by_shard(self, ordinals: Sequence[set[int]]) -> list[list[GroupNumbers]]:
        """Measures the step that was trained; returns the numbers of each shard's groups.

        ordinals: for each shard, its groups.
        """
        own = cast(ComparesLogprobs, self._backend).start_logprobs()
        pairs = zip(self._kept, own, strict=True)
        self._compared = [compared for pair in pairs if (compared := _compared(*pair))]
        numbers = self._code.call(self._sentinel.measure, self._compared)
        if numbers.ndim != 2 or len(numbers) != len(self._compared):
            raise self._code.broken(
                f"measure() gave {numbers.shape} for {len(self._compared)} records",
                self._sentinel.measure,
            )
        sums: dict[tuple[int, int, int], np.ndarray] = {}
        for record, row in zip(self._compared, numbers, strict=True):
            key = record.ordinal, record.replica, record.version
            sums[key] = sums[key] + row if key in sums else row
        return [
            [GroupNumbers(*key, row.tolist()) for key, row in sums.items() if key[0] in groups]
            for groups in ordinals
        ]

    @property
    def trained(self) -> list[Compared]:
        """Returns the records of the step that was trained last, with both sides."""
        return self._compared

    def diagnose(self, request: DiagnoseRequest) -> list[Finding]:
        """Returns what the records of some replicas say of the cause of an alarm."""
        chosen = self._chosen(request)
        return self._code.call(self._sentinel.diagnose, chosen) if chosen else []

    def shown(self, request: DiagnoseRequest) -> list[ShownRecord]:
        """Returns some records of some replicas, for a generator that is to explain them."""
        chosen = [r for r in self._chosen(request) if r.action_ids is not None]
        shown: list[ShownRecord] = []
        actions = 0
        for record in chosen[:: max(1, math.ceil(len(chosen) / _SHOWN_RECORDS))]:
            actions += len(record.rollout_logp)
            if actions <= _SHOWN_ACTIONS:
                shown.append(show_record(record))
        return shown

    def score_last(self, request: ScoreLast) -> list[ShownRecord]:
        """Scores this rank's share of the canaries under the weights that its backend holds.

        Returns each with these log-probs on both sides, see ``ShownRecord``. All ranks call it at
        the same time, since the backend may need collectives.
        """
        share = -(-request.count // request.ranks)
        chosen = [show_record(record) for record in self._canaries[:share]]
        backend = cast(ScoresLogprobs, self._backend)
        scored = backend.logprobs([columns_of(record) for record in chosen])
        for record, logp in zip(chosen, scored, strict=True):
            record.key = (*record.key[:2], request.version, -1, request.version)
            record.logps = [logp.tolist(), logp.tolist()]
        return chosen

    def _chosen(self, request: DiagnoseRequest) -> list[Compared]:
        if request.step != self._step:
            return []
        return [r for r in self._compared if not request.replicas or r.replica in request.replicas]


def columns_of(shown: ShownRecord) -> Columns:
    """Returns what ``ScoresLogprobs`` takes of a record."""
    prompt_ids, action_ids = (np.array(ids, np.int32) for ids in shown.ids)
    return {
        "prompt_ids": prompt_ids,
        "action_ids": action_ids,
        "logp": np.array(shown.logps[0], np.float32),
        "action_mask": np.array(shown.mask, np.uint8),
        "temperature": np.array(shown.temperature, np.float32),
    }


def _some_tokens(step: int, records: Sequence[TrainRecord]) -> list[Compared]:
    """Copies the beginning of one record of each prompt, to have both sides score it: canaries.

    Records with media are left out, since both sides are given tokens alone.
    """
    chosen: dict[int, Compared] = {}
    for record in records:
        columns = record.columns
        if record.media or not {"prompt_ids", "action_ids"} <= columns.keys():
            continue
        if record.ordinal not in chosen and (copied := _copied(step, record)) is not None:
            assert copied.action_ids is not None
            chosen[record.ordinal] = replace(
                copied,
                rollout_logp=copied.rollout_logp[:_AGAIN_ACTIONS],
                trainer_logp=copied.trainer_logp[:_AGAIN_ACTIONS],
                mask=copied.mask[:_AGAIN_ACTIONS],
                action_ids=copied.action_ids[:_AGAIN_ACTIONS],
            )
        if len(chosen) == _SHOWN_RECORDS:
            break
    return list(chosen.values())


def _copied_if_fresh(step: int, record: TrainRecord) -> Compared | None:
    return _copied(step, record) if record.fresh else None


def _copied(step: int, record: TrainRecord) -> Compared | None:
    """Copies what both sides need of a record; None for one without log-probs.

    The rollout's log-probs stand for the trainer's, until these are known.
    """
    columns = record.columns
    if "logp" not in columns or not len(columns["logp"]):
        return None
    rollout_logp = np.array(columns["logp"], np.float32)
    masks = columns.get("action_mask")
    mask = np.ones(len(rollout_logp), bool) if masks is None else np.array(masks, bool)
    ids = {name: np.array(columns[name]) if name in columns else None for name in _IDS}
    return Compared(
        ordinal=record.ordinal,
        sample=record.sample,
        step=step,
        replica=record.replica,
        version=record.version,
        rollout_logp=rollout_logp,
        trainer_logp=rollout_logp,
        mask=mask,
        prompt_ids=ids["prompt_ids"],
        action_ids=ids["action_ids"],
        temperature=float(columns.get("temperature", 1.0)),
    )


def _compared(kept: Compared | None, own: StartLogprobs | None) -> Compared | None:
    """Joins both sides of a record; None where one of them is missing."""
    if kept is None or own is None:
        return None
    return replace(kept, trainer_logp=own.logp, entropy=own.entropy)


_IDS = ("prompt_ids", "action_ids")
#: Generators are shown at most so many records of a rank, with at most so many actions together. So
#: many are kept as canaries, at most.
_SHOWN_RECORDS = 32
_SHOWN_ACTIONS = 8192
#: Of a record, so many actions are scored as a canary: its first ones.
_AGAIN_ACTIONS = 512
