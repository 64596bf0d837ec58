"""The contract of a sentinel.

What it measures of a record depends on that record alone, its evidence adds up in any order, a gap
over the band is an alarm that names the replica, and a resumed run judges alike.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest

from gcore_core.contract.sentinel import GRID, Alarm, Compared, Sentinel, SentinelContext, Source
from gcore_testing.contracts.base import Contract

_GROUPS = 12
_SAMPLES = 4
_STEPS = 30


class SentinelContract(Contract):
    """To test a sentinel, override ``provider``, or the method ``made``.

    band: of the pair that it watches, in nats.
    """

    kind: ClassVar[str] = "sentinel"
    band: ClassVar[float] = 1e-3

    def made(self, context: SentinelContext) -> Sentinel:
        """Makes the tested sentinel."""
        sentinel: Sentinel = self.build(context)
        return sentinel

    @pytest.fixture
    def sentinel(self, tmp_path: Any) -> Sentinel:
        return self.made(self._context(tmp_path))

    def _context(self, directory: Any) -> SentinelContext:
        return SentinelContext(band=self.band, replicas=2, directory=str(directory))

    @pytest.fixture
    def records(self) -> list[Compared]:
        return compared()

    # -- on a rank ---------------------------------------------------------------------------------

    def test_there_is_one_row_of_numbers_for_each_record(
        self, sentinel: Sentinel, records: list[Compared]
    ) -> None:
        numbers = sentinel.measure(records)
        assert numbers.shape[0] == len(records) and numbers.dtype == np.float64
        assert np.isfinite(numbers).all()
        assert sentinel.measure([]).shape == (0, numbers.shape[1]), "without records"

    def test_numbers_of_a_record_do_not_depend_on_the_others(
        self, sentinel: Sentinel, records: list[Compared]
    ) -> None:
        together = sentinel.measure(records)
        assert (sentinel.measure(records[::-1])[::-1] == together).all()
        assert (np.concatenate([sentinel.measure([r]) for r in records]) == together).all()

    def test_masked_actions_have_no_influence(
        self, sentinel: Sentinel, records: list[Compared]
    ) -> None:
        def masked(value: float) -> list[Compared]:
            changed = []
            for record in records:
                mask = record.mask.copy()
                rollout = record.rollout_logp.copy()
                mask[1], rollout[1] = False, value
                changed.append(replace(record, mask=mask, rollout_logp=rollout))
            return changed

        expected = sentinel.measure(masked(-1.0))
        for value in (-50.0, np.nan):
            assert (sentinel.measure(masked(value)) == expected).all(), value

    def test_arguments_stay_as_they_are(self, sentinel: Sentinel, records: list[Compared]) -> None:
        sentinel.measure(records)
        sentinel.diagnose(records)
        for record, before in zip(records, compared(), strict=True):
            assert np.array_equal(record.rollout_logp, before.rollout_logp)
            assert np.array_equal(record.trainer_logp, before.trainer_logp)
            assert np.array_equal(record.mask, before.mask)

    def test_findings_are_scores_of_the_same_causes_on_every_rank(
        self, sentinel: Sentinel, records: list[Compared]
    ) -> None:
        wrong = shifted(records, by=10 * self.band)
        halves = [sentinel.diagnose(part) for part in (wrong[::2], wrong[1::2])]
        for findings in halves:
            assert all(0 <= f.score <= 1 and f.weight >= 0 and f.text for f in findings if f.score)
        causes = [[finding.cause for finding in findings] for findings in halves]
        assert causes[0] == causes[1] and len(set(causes[0])) == len(causes[0])

    # -- in controllers ----------------------------------------------------------------------------

    def test_evidence_of_a_group_does_not_depend_on_the_others_and_adds_up_exactly(
        self, sentinel: Sentinel, records: list[Compared]
    ) -> None:
        sums = sentinel.measure(records).reshape(_GROUPS, _SAMPLES, -1).sum(axis=1)
        weighed = sentinel.weigh(sums)
        assert len(weighed) == _GROUPS and np.isfinite(weighed).all()
        alone = np.concatenate([sentinel.weigh(row[None]) for row in sums])
        assert (alone == weighed).all()
        assert (np.floor(weighed / GRID) * GRID == weighed).all(), "not on the grid: use on_grid"

    def test_a_gap_over_the_band_is_an_alarm_that_names_the_replica(
        self, sentinel: Sentinel, records: list[Compared]
    ) -> None:
        wrong = [
            shifted([r], by=10 * self.band)[0] if r.ordinal == 3 and r.sample == 1 else r
            for r in records
        ]
        alarms = judged(sentinel, 5, wrong)
        assert [alarm.replica for alarm in alarms] == [1], "group 3 was sampled by replica 1"
        assert alarms[0].since_step == 5 and alarms[0].text

    def test_a_log_prob_that_is_not_a_number_is_an_alarm(
        self, sentinel: Sentinel, records: list[Compared]
    ) -> None:
        assert judged(sentinel, 0, [*shifted(records[:1], by=np.nan), *records[1:]])

    def test_equal_log_probs_never_give_an_alarm(self, sentinel: Sentinel) -> None:
        for step in range(_STEPS):
            assert judged(sentinel, step, compared(step)) == []

    def test_a_step_without_evidence_gives_no_alarm(
        self, sentinel: Sentinel, records: list[Compared]
    ) -> None:
        assert sentinel.judge(0, {}) == []
        assert judged(sentinel, 1, records) == []

    def test_a_resumed_run_judges_alike(
        self, sentinel: Sentinel, records: list[Compared], tmp_path: Any
    ) -> None:
        """Its state is plain: it goes through JSON."""
        resumed = self.made(self._context(tmp_path))
        for step in range(3):
            judged(sentinel, step, shifted(compared(step), by=self.band / 4))
        resumed.restore(json.loads(json.dumps(sentinel.state())))
        assert resumed.state() == sentinel.state()
        for step in range(3, 6):
            wrong = shifted(compared(step), by=self.band / 4)
            assert judged(resumed, step, wrong) == judged(sentinel, step, wrong)
        assert resumed.state() == sentinel.state()

    def test_notes_and_metrics_are_told_by_their_names(
        self, sentinel: Sentinel, records: list[Compared]
    ) -> None:
        judged(sentinel, 0, records)
        assert all(isinstance(note, str) and note for note in sentinel.notes())
        metrics = sentinel.metrics()
        assert all(name.startswith("sentinel/") for name in metrics)
        assert all(np.isfinite(value) for value in metrics.values())


def compared(step: int = 0) -> list[Compared]:
    """Makes records whose log-probs agree; even groups are of replica 0, odd ones of replica 1."""
    draw = np.random.default_rng(step)
    made = []
    for ordinal in range(_GROUPS):
        for sample in range(_SAMPLES):
            logp = -draw.gamma(0.5, 1.0, 6).astype(np.float32)
            made.append(
                Compared(
                    ordinal=ordinal,
                    sample=sample,
                    step=step,
                    replica=ordinal % 2,
                    version=step,
                    rollout_logp=logp,
                    trainer_logp=logp.copy(),
                    mask=np.ones(6, bool),
                )
            )
    return made


def shifted(records: Sequence[Compared], by: float) -> list[Compared]:
    """Returns the records with the rollout's log-probs off by so many nats."""
    return [replace(r, rollout_logp=r.rollout_logp - np.float32(by)) for r in records]


def judged(sentinel: Sentinel, step: int, records: Sequence[Compared]) -> list[Alarm]:
    """Has a sentinel judge a step, as a run with one rank and one controller does."""
    sums: dict[tuple[int, int, int], np.ndarray] = {}
    for record, row in zip(records, sentinel.measure(records), strict=True):
        key = record.ordinal, record.replica, record.version
        sums[key] = sums.get(key, np.zeros(row.shape)) + row
    evidence: dict[Source, np.ndarray] = {}
    for key, row in zip(sums, sentinel.weigh(np.stack(list(sums.values()))), strict=True):
        source = key[1], key[2]
        evidence[source] = evidence.get(source, np.zeros(row.shape)) + row
    frozen: Mapping[Source, np.ndarray] = evidence
    return sentinel.judge(step, frozen)
