"""The contract of a reward.

Each record gets one score, in order, whatever else is in the batch. A score is finite, or it says
why it failed.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.records import FINISHED, OK, Prompt
from gcore_core.contract.scorer import AsyncScorer, Score, ScoredRecord, Scorer
from gcore_core.testing.contracts.base import Contract, closing


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
    """

    kind: ClassVar[str] = "reward"

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
