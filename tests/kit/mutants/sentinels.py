"""Sentinels with one fault each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from gcore_testing import SentinelContract

from gcore_core.builtin.band import Band
from gcore_core.contract.sentinel import Alarm, Compared, Finding, SentinelContext, Source


class Counting(Band):
    """``core/band``, and an alarm when a tenth step has small gaps; so it has a state."""

    def __init__(self, config: None, context: SentinelContext) -> None:
        super().__init__(config, context)
        self._small = context.band / 8
        self._seen = 0

    def measure(self, records: Sequence[Compared]) -> np.ndarray:
        gaps = [np.abs(r.rollout_logp - r.trainer_logp)[r.mask] for r in records]
        small = np.array([np.count_nonzero(gap > self._small) for gap in gaps], np.float64)
        return np.concatenate([super().measure(records), small.reshape(-1, 1)], axis=1)

    def diagnose(self, records: Sequence[Compared]) -> list[Finding]:
        return [Finding(cause="other", score=0.5, weight=float(len(records)), text="it differs")]

    def judge(self, step: int, evidence: Mapping[Source, np.ndarray]) -> list[Alarm]:
        self._seen += any(row[2] for row in evidence.values())
        alarms = super().judge(step, {source: row[:2] for source, row in evidence.items()})
        if self._seen >= 5 and not alarms:
            alarms.append(Alarm(replica=-1, since_step=step, actions=1, text="small gaps"))
        return alarms

    def state(self) -> dict[str, Any]:
        return {"seen": self._seen}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._seen = int(state["seen"])


class Clean(SentinelContract):
    caught_by: ClassVar[tuple[str, ...]] = ()
    Backend: ClassVar[type[Counting]] = Counting

    def made(self, context: SentinelContext) -> Counting:
        return self.Backend(None, context)


class ReadsMaskedActions(Clean):
    caught_by = ("test_masked_actions_have_no_influence",)

    class Backend(Counting):
        def measure(self, records: Sequence[Compared]) -> np.ndarray:
            return super().measure([replace(r, mask=np.ones_like(r.mask)) for r in records])


class TakesNotANumberForEqual(Clean):
    caught_by = ("test_a_log_prob_that_is_not_a_number_is_an_alarm",)

    class Backend(Counting):
        def measure(self, records: Sequence[Compared]) -> np.ndarray:
            known = [
                replace(
                    r,
                    rollout_logp=np.where(np.isnan(r.rollout_logp), r.trainer_logp, r.rollout_logp),
                )
                for r in records
            ]
            return super().measure(known)


class ComparesWithTheBatch(Clean):
    caught_by = ("test_numbers_of_a_record_do_not_depend_on_the_others",)

    class Backend(Counting):
        def measure(self, records: Sequence[Compared]) -> np.ndarray:
            return super().measure(records) + np.array([0.0, len(records) > 1, 0.0])


class FailsWithoutRecords(Clean):
    caught_by = ("test_there_is_one_row_of_numbers_for_each_record",)

    class Backend(Counting):
        def measure(self, records: Sequence[Compared]) -> np.ndarray:
            return super().measure(records) if records else np.zeros((0, 1))


class WeighsByTheNumberOfGroups(Clean):
    caught_by = ("test_evidence_of_a_group_does_not_depend_on_the_others_and_adds_up_exactly",)

    class Backend(Counting):
        def weigh(self, sums: np.ndarray) -> np.ndarray:
            weighed: np.ndarray = sums / (3 * len(sums))
            return weighed


class BlamesTheFirstReplica(Clean):
    caught_by = ("test_a_gap_over_the_band_is_an_alarm_that_names_the_replica",)

    class Backend(Counting):
        def judge(self, step: int, evidence: Mapping[Source, np.ndarray]) -> list[Alarm]:
            return [replace(alarm, replica=0) for alarm in super().judge(step, evidence)]


class StopsAnyRun(Clean):
    caught_by = (
        "test_equal_log_probs_never_give_an_alarm",
        "test_a_step_without_evidence_gives_no_alarm",
        "test_a_gap_over_the_band_is_an_alarm_that_names_the_replica",
    )

    class Backend(Counting):
        def judge(self, step: int, evidence: Mapping[Source, np.ndarray]) -> list[Alarm]:
            alarm = Alarm(replica=-1, since_step=step, actions=0, text="it is a step")
            return [*super().judge(step, evidence), alarm]


class ForgetsOnResuming(Clean):
    caught_by = ("test_a_resumed_run_judges_alike",)

    class Backend(Counting):
        def restore(self, state: Mapping[str, Any]) -> None: ...


class SortsTheLogProbs(Clean):
    caught_by = ("test_arguments_stay_as_they_are",)

    class Backend(Counting):
        def diagnose(self, records: Sequence[Compared]) -> list[Finding]:
            for record in records:
                record.rollout_logp.sort()
            return super().diagnose(records)


class FindsOtherCausesOnOtherRanks(Clean):
    caught_by = ("test_findings_are_scores_of_the_same_causes_on_every_rank",)

    class Backend(Counting):
        def diagnose(self, records: Sequence[Compared]) -> list[Finding]:
            return [replace(f, cause=str(records[0].sample)) for f in super().diagnose(records)]


class NamesAMetricAsItLikes(Clean):
    caught_by = ("test_notes_and_metrics_are_told_by_their_names",)

    class Backend(Counting):
        def metrics(self) -> dict[str, float]:
            return {"seen": float(self._seen)}
