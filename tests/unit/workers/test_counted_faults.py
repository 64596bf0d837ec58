"""Faults that show only in counts: equal samples, answers that were cut off, labels of versions."""

from __future__ import annotations

import numpy as np
import pytest

from gcore_core.contract.errors import RecordMismatch, WeightMismatch, WeightsGone
from gcore_core.contract.generator import Finished, SampleRequest
from gcore_core.contract.records import FINISHED, TRUNCATED, UNSAMPLED, Header, Prompt
from gcore_core.contract.trainer import TrainRecord
from gcore_core.controllers.generation.dispatch import Round, check_repeats, check_versions
from gcore_core.workers.drawn_records import EndReasons
from gcore_core.workers.opened_records import check_duplicates

END = 2


def records(groups: int, *, equal: int, logp: float, actions: int = 12) -> list[TrainRecord]:
    """Groups of three samples; in ``equal`` of them the last two have one answer."""
    draw = np.random.default_rng(0)
    made = []
    for ordinal in range(groups):
        answers = [draw.integers(0, 1000, actions).astype(np.int32) for _ in range(3)]
        if ordinal < equal:
            answers[2] = answers[1]
        for sample, answer in enumerate(answers):
            columns = {
                "action_ids": answer,
                "logp": np.full(actions, logp, np.float32),
                "action_mask": np.ones(actions, np.uint8),
            }
            made.append(TrainRecord(ordinal=ordinal, sample=sample, minibatch=0, columns=columns))
    return made


def test_equal_samples_of_unlikely_answers_are_refused() -> None:
    with pytest.raises(RecordMismatch, match=r"records 0/1 and 0/2 are equal.*\n.*in 4 of 8 gr"):
        check_duplicates(records(8, equal=4, logp=-3.0), "step 0")


@pytest.mark.parametrize(
    ("equal", "logp"),
    [
        (8, -0.01),  # a policy that has learned says the same thing every time
        (8, -1.5),  # top_p = 0.5 may have taken half of the probability away
        (3, -3.0),  # too few groups
    ],
)
def test_equal_samples_that_chance_may_give_pass(equal: int, logp: float) -> None:
    check_duplicates(records(8, equal=equal, logp=logp), "step 0")
    masked = records(8, equal=8, logp=-3.0)
    for record in masked:
        record.columns["action_mask"][1:] = 0  # what a tool has said may well be equal
    check_duplicates(masked, "step 0")


def answer(ids: list[int], status: str = FINISHED, reason: str = "") -> Finished:
    request = SampleRequest(ordinal=0, sample=0, seed=0, prompt=Prompt(row=0, text=""))
    columns = {"action_ids": np.array(ids, np.int32)}
    return Finished(request=request, status=status, versions=(0, 0), columns=columns, reason=reason)


#: Eight that ended by themselves, and thirty that ran into a limit of six tokens.
SHORTER = [answer([7] * n + [END]) for n in (1, 2, 3, 4) for _ in range(2)]
CUT = [[7] * 5 + [10 + n] for n in range(30)]


def test_answers_that_were_cut_off_and_told_as_finished_are_refused() -> None:
    with pytest.raises(RecordMismatch, match="16 answers of 6 actions.*told as finished"):
        EndReasons().add([*SHORTER, *map(answer, CUT)])


@pytest.mark.parametrize(
    "healthy",
    [
        [*SHORTER, *(answer(ids, TRUNCATED, "length") for ids in CUT)],
        [*SHORTER, *(answer(ids, FINISHED, "stop") for ids in CUT)],
        [*SHORTER, *(answer([*ids[:5], END]) for ids in CUT)],  # all ended at one length
        [answer(ids) for ids in CUT],  # fixed lengths: nothing tells what ends an answer
        # games, which end with any move
        [answer([7] * (n % 5) + [n]) for n in range(60)] + [answer(ids) for ids in CUT],
    ],
    ids=["told", "by a text", "at one length", "of one length", "games"],
)
def test_answers_that_ended_by_themselves_pass(healthy: list[Finished]) -> None:
    EndReasons().add(healthy)


def test_a_label_that_is_behind_the_weights_is_refused() -> None:
    round_ = Round(version=3, number=0, purpose="train")
    header = Header(ordinal=24, sample=1, row=0, seed=0, stamp=5)
    for versions in ((3, 3), (2, 3), (3, 4)):
        header.versions = versions
        check_versions([header], round_, "rollout.1")
    header.versions = (2, 2)
    with pytest.raises(WeightMismatch, match=r"step 3: rollout.1 says that version 2 .*24/1"):
        check_versions([header], round_, "rollout.1")
    header.stamp = 0  # of a generator that no push has reached
    check_versions([header], round_, "rollout.1")


def test_a_record_of_another_version_is_refused_in_a_run_that_repeats() -> None:
    round_ = Round(version=3, number=0, purpose="train")
    header = Header(ordinal=24, sample=1, row=0, seed=0, stamp=5)
    for versions in ((3, 3), (UNSAMPLED, UNSAMPLED)):
        header.versions = versions
        check_repeats([header], round_, "rollout.1")
    for versions in ((3, 4), (4, 4), (2, 3)):
        header.versions = versions
        with pytest.raises(
            WeightsGone, match=r"rollout.1: version.* sampled .*24/1, and version 3"
        ):
            check_repeats([header], round_, "rollout.1")
    header.stamp = 0  # of a generator that no push has reached
    check_repeats([header], round_, "rollout.1")
