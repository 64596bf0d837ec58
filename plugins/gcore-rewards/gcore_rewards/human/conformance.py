"""What ``g-core conformance human`` runs: the contract of the reward, with a rater beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from gcore_testing import ScorerContract
from gcore_testing.contracts.scorer import scored_record

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.scorer import Score, ScoredRecord
from gcore_rewards.human.labelling import Labelling
from gcore_rewards.human.reward import HumanReward

_NEVER = "???"


class _Asked:
    """A reward that a rater answers while it waits: yes to answers of an even length."""

    def __init__(self, reward: HumanReward, directory: Path) -> None:
        self._reward = reward
        self._labelling = Labelling(directory)
        self._loop = asyncio.new_event_loop()

    def score(self, records: Sequence[ScoredRecord]) -> list[Score]:
        return self._loop.run_until_complete(self._answered(records))

    def close(self) -> None:
        self._loop.close()
        self._labelling.close()

    async def _answered(self, records: Sequence[ScoredRecord]) -> list[Score]:
        rater = asyncio.ensure_future(self._answer())
        try:
            return await self._reward.score(records)
        finally:
            rater.cancel()

    async def _answer(self) -> None:
        while True:
            shown = self._labelling.next("anna")
            if shown is None:
                await asyncio.sleep(0.002)
                continue
            (answer,) = shown.answers
            choice = "skip" if answer == _NEVER else str(1 - len(answer) % 2)
            self._labelling.answer("anna", {"key": shown.key, "choice": choice})


class TestHuman(ScorerContract):
    provider = "human"

    @pytest.fixture
    def scorer(self, context: WorkerContext, tmp_path: Path) -> Iterator[Any]:
        directory = tmp_path / "queue"
        reward = self.build(context, path=str(directory), wait_s=0.5, poll_s=0.01)
        asked = _Asked(reward, directory)
        yield asked
        asked.close()

    @pytest.fixture
    def unscorable(self) -> ScoredRecord:
        """The rater skips it."""
        return scored_record(99, _NEVER, {})
