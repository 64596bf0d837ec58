"""Makes a reward of what people say: asks by the queue, and waits for their labels."""

from __future__ import annotations

import asyncio
import logging
import statistics
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.records import REWARD_SKIPPED
from gcore_core.contract.scorer import Score, ScoredRecord, failure
from gcore_rewards.human.config import DIRECTORY, HumanConfig
from gcore_rewards.human.queue import Labels, Question, Questions, Withdrawn, key_of

log = logging.getLogger(__name__)


class HumanReward:
    """See ``gcore_core.contract.scorer.AsyncScorer``.

    An answer that was labelled before, in this run or in another that shares the directory, is not
    asked about again. Neither is one whose question an earlier process of the run has written.
    """

    def __init__(self, config: HumanConfig, context: WorkerContext) -> None:
        self._config = config
        run = Path(context.directory)
        self._directory = Path(config.path).absolute() if config.path else run / DIRECTORY
        self._progress = context.progress
        self._questions = Questions(self._directory)
        self._labels = Labels(self._directory)
        self._asker = f"{run.absolute()} {context.role} {context.rank}"
        self._calls_of: dict[str, int] = {}  # key -> calls that wait for it now
        self._forget_earlier()

    async def score(self, records: Sequence[ScoredRecord]) -> list[Score]:
        keys = [self._key(record) if self._is_asked(record) else "" for record in records]
        wanted = {key: record for key, record in zip(keys, records, strict=True) if key}
        for key in wanted:
            self._calls_of[key] = self._calls_of.get(key, 0) + 1
        try:
            in_time = await self._wait(wanted)
        finally:
            given_up = self._leave(wanted)
        if not in_time:
            self._withdraw(given_up)
        return [self._score(key) if key else _LEFT_OUT for key in keys]

    # -- asking ------------------------------------------------------------------------------------

    def _is_asked(self, record: ScoredRecord) -> bool:
        # Ordinals below zero are those of evaluations.
        return self._config.evaluation or record.ordinal >= 0

    def _key(self, record: ScoredRecord) -> str:
        return key_of(self._config, _prompt(record), record.text)

    def _forget_earlier(self) -> None:
        """Withdraws what an earlier process of this worker has asked and nobody has answered.

        Until now people could answer it. A run that goes on may draw other answers, and asks for
        those of before again where it draws them again.
        """
        waiting = self._questions.waiting()
        self._withdraw([key for key, asked in waiting.items() if asked.asker == self._asker])

    def _ask(self, wanted: dict[str, ScoredRecord]) -> None:
        """Writes the questions that are not there, or that another run has withdrawn."""
        config = self._config
        asked = self._questions.waiting()
        fresh = [
            Question(
                key=key,
                prompt=_prompt(record),
                answer=record.text,
                question=config.question,
                form=config.form,
                lowest=config.lowest,
                highest=config.highest,
                raters=config.raters,
                asker=self._asker,
                time_unix_s=time.time(),
            )
            for key, record in wanted.items()
            if not self._is_labelled(key)
            and not (key in asked and asked[key].raters >= config.raters)
        ]
        if fresh:
            self._questions.append(fresh)
            log.info(
                "%d answers wait for people: g-core human label %s", len(fresh), self._directory
            )

    # -- waiting -----------------------------------------------------------------------------------

    async def _wait(self, wanted: dict[str, ScoredRecord]) -> bool:
        """Asks, and waits until all are labelled; returns False after ``wait_s``."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + self._config.wait_s
        while True:
            self._labels.read()
            if all(map(self._is_labelled, wanted)):
                return True
            left_s = end_s - loop.time()
            if left_s <= 0:
                return False
            self._ask(wanted)
            # Without this sign the controller would take the wait for a scorer that hangs.
            self._progress()
            await asyncio.sleep(min(self._config.poll_s, left_s))

    def _is_labelled(self, key: str) -> bool:
        return len(self._labels.of(key)) >= self._config.raters

    def _leave(self, keys: Collection[str]) -> list[str]:
        """Ends a call's wait; returns the unlabelled keys for which no other call waits."""
        for key in keys:
            self._calls_of[key] -= 1
        ended = [key for key in keys if not self._calls_of[key]]
        for key in ended:
            del self._calls_of[key]
        return [key for key in ended if not self._is_labelled(key)]

    def _withdraw(self, keys: Collection[str]) -> None:
        if keys:
            self._questions.append(Withdrawn(key=key, time_unix_s=time.time()) for key in keys)

    def _score(self, key: str) -> Score:
        labels = self._labels.of(key)
        if not self._is_labelled(key):
            of = f", and {len(labels)} of {self._config.raters} raters" if labels else ""
            return failure(f"not labelled within wait_s, {self._config.wait_s:g} s{of}")
        return Score(value=statistics.fmean(map(self._value, labels.values())))

    def _value(self, label: int) -> float:
        config = self._config
        if config.form == "yes_no":
            return float(label)
        return (label - config.lowest) / (config.highest - config.lowest)


_LEFT_OUT = Score(value=None, status=REWARD_SKIPPED, reason="an evaluation, which is not asked")


def _prompt(record: ScoredRecord) -> str | list[dict[str, object]]:
    prompt = record.prompt
    return prompt.messages if prompt.messages is not None else prompt.text or ""
