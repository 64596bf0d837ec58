"""What ``g-core conformance genrm`` runs: the contract of rewards, with a judge that scores by the
length of a text.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from gcore_testing import ScorerContract
from gcore_testing.contracts.scorer import Waited, scored_record

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.questions import Answer, Question
from gcore_core.contract.records import FINISHED
from gcore_core.contract.scorer import ScoredRecord


class LengthJudge:
    """A sampler whose answers depend on the question alone.

    It answers a prompt with ``???`` in it without a verdict.
    """

    async def sample(self, questions: Sequence[Question]) -> list[list[Answer]]:
        return [[self._answer(question)] * question.samples for question in questions]

    def _answer(self, question: Question) -> Answer:
        prompt = str(
            question.prompt.messages[-1]["content"]
            if question.prompt.messages
            else question.prompt.text
        )
        parts = [len(part.strip()) for part in re.split(r"# Response[ AB]*", prompt)[1:]]
        if "???" in prompt:
            text = "I would rather not say."
        elif len(parts) == 2:
            text = "Better: " + (
                "tie" if parts[0] == parts[1] else "A" if parts[0] > parts[1] else "B"
            )
        else:
            score = min(10, parts[0])
            text = f'Score: {score}\n{{"clear": {score}, "short": {10 - score}}}'
        return Answer(text=text, status=FINISHED, n_actions=len(text))


class _Judge(ScorerContract):
    @pytest.fixture
    def scorer(self, context: WorkerContext) -> Iterator[Any]:
        loop = asyncio.new_event_loop()
        yield Waited(self.build(replace(context, sampler=LengthJudge())), loop)
        loop.close()

    @pytest.fixture
    def unscorable(self) -> ScoredRecord:
        """What the judge says of it is no score."""
        return scored_record(99, "???", {})


class TestPointwise(_Judge):
    provider = "genrm"


class TestRubric(_Judge):
    provider = "genrm/rubric"
    config = {"criteria": [{"name": "clear"}, {"name": "short", "weight": 3.0}]}


class TestPairwise(_Judge):
    """Its records are those of whole groups, so a batch is split between groups only."""

    provider = "genrm/pairwise"

    @pytest.fixture
    def records(self) -> list[ScoredRecord]:
        texts = ["a", "bbb", "cc", "d", "eeee", "ff"]
        return [
            replace(scored_record(i // 3, text, {}), sample=i % 3) for i, text in enumerate(texts)
        ]

    @pytest.fixture
    def unscorable(self) -> ScoredRecord:
        """The only one of its prompt."""
        return scored_record(99, "a", {})

    def test_scores_stand_in_the_records_order(
        self, scorer: Any, records: list[ScoredRecord]
    ) -> None:
        self._assert_same(
            scorer.score(records), [*scorer.score(records[:3]), *scorer.score(records[3:])]
        )

    def test_a_record_that_cannot_be_scored_fails_alone(
        self, scorer: Any, records: list[ScoredRecord], unscorable: ScoredRecord | None
    ) -> None:
        assert unscorable is not None
        expected = scorer.score(records)
        *others, failed = scorer.score([*records, unscorable])
        assert failed.value is None and failed.reason
        self._assert_same(others, expected)
