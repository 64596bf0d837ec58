"""The shell of a scorer: opens references, asks the rewards, enforces their time limits."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gcore_core.processes.columns import Columns
from gcore_core.processes.compute import Compute
from gcore_core.processes.messages import RESTART_EXIT_CODE, TRAIN, ScoreRequest, short_reason
from gcore_core.processes.service import Call, Service
from gcore_core.processes.store import StoreReader
from gcore_core.protocols import Dataset, Score, ScoredRecord, Scorer
from gcore_core.records import OK, REWARD_FAILED, REWARD_TIMEOUT, Header, RecordScore

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class NamedScorer:
    name: str
    scorer: Scorer
    timeout_s: float


class ScorerShell:
    """Hosts the rewards of one scorer worker. ``give_up`` ends the process; its agent starts it again.

    A function that does not return cannot be stopped in its thread: the records it held get the status "timeout", the
    answer is sent, and the process is given up.
    """

    def __init__(
        self,
        scorers: list[NamedScorer],
        datasets: Mapping[str, Dataset],
        store: StoreReader,
        compute: Compute,
        give_up: Callable[[int], None],
    ) -> None:
        self._scorers, self._datasets, self._store = scorers, datasets, store
        self._compute, self._give_up = compute, give_up
        self._turn = asyncio.Lock()

    def register(self, service: Service) -> None:
        service.add("score", ScoreRequest, self.score)

    async def score(self, request: ScoreRequest, call: Call) -> list[RecordScore]:
        dataset = self._datasets["train" if request.purpose == TRAIN else "evaluation"]
        held = await self._store.records(request.headers)
        records = [_record(*found, dataset) for found in zip(request.headers, held, strict=True)]
        scores = [RecordScore(header.ordinal, header.sample, {}, {}) for header in request.headers]
        for named in self._scorers:
            found = await self._ask(named, records)
            call.progress()
            for i, (score, answer) in enumerate(zip(scores, found, strict=True)):
                scores[i] = _with(score, named.name, answer)
        return scores

    async def _ask(self, named: NamedScorer, records: list[ScoredRecord]) -> list[Score]:
        try:
            async with self._turn:  # the limit counts from when the reward begins, not from when it was asked
                work = asyncio.ensure_future(self._compute(named.scorer.score, records))
                async with asyncio.timeout(named.timeout_s):
                    answers = await asyncio.shield(work)
        except TimeoutError:
            reason = f"no answer within {named.timeout_s:g} s"
            log.error("rewards.%s: %s; the scorer is started again", named.name, reason)
            self._give_up(RESTART_EXIT_CODE)
            return [Score(value=None, status=REWARD_TIMEOUT, reason=reason)] * len(records)
        except Exception as error:  # isolation point: the failure becomes the records' status
            log.exception("rewards.%s failed", named.name)
            return [Score(value=None, status=REWARD_FAILED, reason=f"{type(error).__name__}: {error}")] * len(records)
        if len(answers) != len(records):
            reason = f"{len(answers)} scores for {len(records)} records"
            return [Score(value=None, status=REWARD_FAILED, reason=reason)] * len(records)
        return answers


def _record(header: Header, held: tuple[Columns, Columns], dataset: Dataset) -> ScoredRecord:
    columns, media = held
    return ScoredRecord(
        ordinal=header.ordinal,
        sample=header.sample,
        prompt=dataset[header.row],
        text=columns["text"].tobytes().decode("utf-8", "replace") if "text" in columns else "",
        status=header.status,
        columns=columns,
        media=media,
    )


def _with(score: RecordScore, name: str, answer: Score) -> RecordScore:
    value, status, reason = answer.value, answer.status, answer.reason
    if status == OK and (value is None or not math.isfinite(value)):
        status, reason = REWARD_FAILED, f"the reward is {value}"
    values = {**score.values, name: float(value)} if status == OK and value is not None else score.values
    told = score.reason or (short_reason(f"rewards.{name}: {reason}") if reason and status != OK else "")
    return RecordScore(score.ordinal, score.sample, values, {**score.statuses, name: status}, told)
