"""The contract of a reward.

Each record gets one score, in order, whatever else is in the batch. A score is finite, or it says
why it failed.
"""

from __future__ import annotations

import asyncio
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.job_settings import RewardSettings
from gcore_core.contract.records import FINISHED, OK, Prompt
from gcore_core.contract.scorer import AsyncScorer, Score, ScoredRecord, Scorer
from gcore_testing.contracts.arguments import ASKS, snapshot, writable
from gcore_testing.contracts.base import Contract, closing

#: Texts that models do write: nothing, bytes that are no text, one that never comes to an end.
ODD_TEXTS = ("", "\x00\ufffd", "((" * 200 + "\\", "9" * 20_000)
#: Records that a worker may be called with at once; a contract has fewer.
RECORDS_A_CALL = 64


class Waited:
    """Wraps an ``AsyncScorer`` as a scorer with plain calls, which run on a given event loop."""

    def __init__(self, scorer: AsyncScorer, loop: asyncio.AbstractEventLoop) -> None:
        self._scorer = scorer
        self._loop = loop

    def score(self, records: Sequence[ScoredRecord]) -> list[Score]:
        return self._loop.run_until_complete(self._scorer.score(records))


class ScorerContract(Contract):
    """To test a reward, override ``provider``, or the fixture ``scorer``.

    Override ``records`` too where the reward needs fields of a row.

    tolerance: how much two scores of the same record may differ: 0 for a function, more for a judge
        that samples.
    timeout_s: seconds that one call may take, as in ``rewards.<name>.timeout_s``.
    """

    kind: ClassVar[str] = "reward"
    timeout_s: ClassVar[float] = RewardSettings(use="").timeout_s

    @pytest.fixture
    def scorer(self, context: WorkerContext) -> Iterator[Any]:
        yield from closing(self.build(context))

    @pytest.fixture
    def records(self) -> list[ScoredRecord]:
        """Gives records whose scores are not all alike."""
        texts = ["a", "3", "b1.", "answer: 3", "aa", "-3", "four", "the answer is 12."]
        return [scored_record(i, text, {"answer": "3"}) for i, text in enumerate(texts)]

    @pytest.fixture
    def unscorable(self) -> ScoredRecord | None:
        """Gives a record that this reward cannot score; None when it can score anything."""
        return None

    @pytest.fixture
    def clock(self) -> Callable[[], float]:
        """Gives what tells the seconds that a call takes."""
        return time.monotonic

    def test_it_is_a_scorer(self, scorer: Any) -> None:
        assert isinstance(scorer, Scorer), "it has no method `score`"

    def test_one_score_for_each_record(self, scorer: Any, records: list[ScoredRecord]) -> None:
        assert len(scorer.score(records)) == len(records)
        assert list(scorer.score([])) == []

    def test_scores_stand_in_the_records_order(
        self, scorer: Any, records: list[ScoredRecord]
    ) -> None:
        alone = [scorer.score([record])[0] for record in records]
        self._assert_same(scorer.score(records), alone)

    def test_a_score_does_not_depend_on_the_batch(
        self, scorer: Any, records: list[ScoredRecord]
    ) -> None:
        """The first half has the same scores with the second half behind it as without."""
        half = len(records) // 2
        self._assert_same(scorer.score(records)[:half], scorer.score(records[:half]))

    def test_a_score_is_finite_or_a_failure_with_a_reason(
        self, scorer: Any, records: list[ScoredRecord], unscorable: ScoredRecord | None
    ) -> None:
        for score in scorer.score([*records, *filter(None, [unscorable])]):
            assert isinstance(score.reason, str), f"the reason is {score.reason!r}, not a text"
            if score.status == OK:
                assert score.value is not None and math.isfinite(score.value), (
                    f"the score is {score.value}"
                )
            else:
                assert score.value is None, f"a failed score has the value {score.value}"
                assert score.reason, "a failed score must say why"

    def test_a_record_that_cannot_be_scored_fails_alone(
        self, scorer: Any, records: list[ScoredRecord], unscorable: ScoredRecord | None
    ) -> None:
        if unscorable is None:
            self.not_claimed("failures (give the fixture `unscorable`)")
        expected = scorer.score(records)
        first, failed, *later = scorer.score([records[0], unscorable, *records[1:]])
        assert failed.status != OK, f"a record that cannot be scored got {failed.value}"
        self._assert_same([first, *later], expected)

    def test_asking_twice_gives_the_same(self, scorer: Any, records: list[ScoredRecord]) -> None:
        """A record may be sent again after a lost message.

        Its columns are read-only, as in shared memory.
        """
        self._assert_same(scorer.score(records), scorer.score(records))

    def test_it_answers_in_time(
        self, scorer: Any, records: list[ScoredRecord], clock: Callable[[], float]
    ) -> None:
        """A call that takes longer than ``timeout_s`` loses its scores, and its worker.

        The first call may load something; the second one is measured. A warning says when a full
        call would take too long.
        """
        scorer.score(records)
        begin_s = clock()
        scorer.score(records)
        took_s = clock() - begin_s
        assert took_s <= self.timeout_s, (
            f"{len(records)} records took {took_s:.1f} s, rewards.<name>.timeout_s is "
            f"{self.timeout_s:g}: make it faster, or tell users which timeout_s it needs"
        )
        full_s = took_s * max(1.0, RECORDS_A_CALL / max(1, len(records)))
        if full_s > self.timeout_s:
            warnings.warn(
                f"{len(records)} records took {took_s:.1f} s: {RECORDS_A_CALL} would take longer "
                f"than rewards.<name>.timeout_s, {self.timeout_s:g} s",
                stacklevel=2,
            )

    def test_an_odd_record_does_not_fail_its_batch(
        self, scorer: Any, records: list[ScoredRecord]
    ) -> None:
        """Whatever a model writes, the records beside it keep their scores."""
        expected = scorer.score(records)
        for text in ODD_TEXTS:
            odd = scored_record(99, text, dict(records[0].prompt.fields))
            odd = replace(odd, prompt=records[0].prompt, media=records[0].media)
            *others, _ = scorer.score([*records, odd])  # behind them: groups stay together
            self._assert_same(others, expected)

    def test_arguments_stay_as_they_are(self, scorer: Any, records: list[ScoredRecord]) -> None:
        """Other rewards see the same records. Their fields and arrays can be written to."""
        given = writable(records)
        scorer.score(given)
        assert snapshot(given) == snapshot(records), "a record was written to"

    def test_asking_often_gives_the_same(self, scorer: Any, records: list[ScoredRecord]) -> None:
        """Neither a cache nor a counter changes a score."""
        expected = scorer.score(records)
        for _ in range(ASKS):
            self._assert_same(scorer.score(records), expected)

    def _assert_same(self, scores: Sequence[Score], expected: Sequence[Score]) -> None:
        assert len(scores) == len(expected)
        for i, (one, other) in enumerate(zip(scores, expected, strict=True)):
            assert one.status == other.status, f"record {i}"
            values = [math.nan if score.value is None else score.value for score in (one, other)]
            assert values[0] == pytest.approx(values[1], abs=self.tolerance, nan_ok=True), (
                f"record {i}"
            )


def scored_record(row: int, text: str, fields: dict[str, Any]) -> ScoredRecord:
    """Makes a finished record with this text; its arrays are read-only."""
    content = np.frombuffer(text.encode(), np.uint8)
    actions = content.astype(np.int32)
    columns: dict[str, np.ndarray] = {
        "prompt_ids": np.array([1, 2], np.int32),
        "action_ids": actions,
        "logp": np.full(actions.size, -1.0, np.float32),
        "action_mask": np.ones(actions.size, np.uint8),
        "temperature": np.ones((), np.float32),
        "text": content,
    }
    for column in columns.values():
        column.flags.writeable = False
    prompt = Prompt(row=row, text="a question", fields=fields)
    return ScoredRecord(
        ordinal=row, sample=0, prompt=prompt, text=text, status=FINISHED, columns=columns
    )
