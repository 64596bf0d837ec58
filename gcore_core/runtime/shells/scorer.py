"""The shell of a scorer: opens references, asks the rewards, enforces their time limits."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from gcore_core.contract.dataset import Dataset
from gcore_core.contract.errors import ConfigError, ContractError, DataError
from gcore_core.contract.records import (
    OK,
    REWARD_FAILED,
    REWARD_SKIPPED,
    REWARD_TIMEOUT,
    Header,
    Inquiry,
    RecordScore,
)
from gcore_core.contract.scorer import AsyncScorer, Score, ScoredRecord, Scorer
from gcore_core.runtime.messages import RESTART_EXIT_CODE, SCORE, TRAIN, ScoreRequest, short_reason
from gcore_core.runtime.process.compute import Compute
from gcore_core.runtime.rpc.service import Call, Service
from gcore_core.runtime.shells.role_sampler import RoleSampler
from gcore_core.runtime.store.client import StoreReader
from gcore_core.runtime.store.columns import Columns

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class NamedScorer:
    """A reward. when: field of a row -> the values with which it is asked. sampler: the role it
    asks in its turn; then it has the time that the role's replicas take, as long as they make
    progress.
    """

    name: str
    scorer: Scorer | AsyncScorer
    timeout_s: float
    when: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    sampler: RoleSampler | None = None


class ScorerShell:
    """Hosts the rewards of one scorer worker. ``give_up`` ends the process; its agent starts it
    again.

    A function that does not return cannot be stopped in its thread: the records it held get the
    status "timeout", the answer is sent, and the process is given up.
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
        service.add(SCORE, self.score)

    async def score(self, request: ScoreRequest, call: Call) -> list[RecordScore]:
        dataset = self._datasets["train" if request.purpose == TRAIN else "evaluation"]
        held = await self._store.records(request.headers)
        records = [_record(*found, dataset) for found in zip(request.headers, held, strict=True)]
        scores = [RecordScore(header.ordinal, header.sample, {}, {}) for header in request.headers]
        wanted = [
            named for named in self._scorers if named.name in request.rewards or not request.rewards
        ]
        for found in await asyncio.gather(
            *(self._where(named, records, request, call) for named in wanted)
        ):
            for i, (score, answer) in enumerate(zip(scores, found[1], strict=True)):
                scores[i] = _with(score, found[0], answer)
        return [msgspec.structs.replace(score, asked=self._asked(score)) for score in scores]

    def _asked(self, score: RecordScore) -> list[Inquiry]:
        """What others were asked about a record. Rewards that ask the same role share a sampler."""
        samplers = {
            id(named.sampler): named.sampler for named in self._scorers if named.sampler is not None
        }
        return [
            one
            for sampler in samplers.values()
            for one in sampler.asked(score.ordinal, score.sample)
        ]

    async def _where(
        self,
        named: NamedScorer,
        records: list[ScoredRecord],
        request: ScoreRequest,
        call: Call,
    ) -> tuple[str, list[Score]]:
        """The reward's scores; "skipped" for records that it is not for."""
        if named.sampler is not None and named.sampler.role in request.awake:
            named.sampler.route(request.awake[named.sampler.role], request.awake_version)
        mine = [
            all(r.prompt.fields.get(key) in values for key, values in named.when.items())
            for r in records
        ]
        asked = [record for record, is_mine in zip(records, mine, strict=True) if is_mine]
        answers = iter(await self._ask(named, asked) if asked else [])
        call.progress()
        return named.name, [next(answers) if is_mine else _SKIPPED for is_mine in mine]

    async def _waiting(self, named: NamedScorer, records: list[ScoredRecord]) -> list[Score]:
        """Of a scorer that waits for others: calls overlap, and one that takes too long is
        cancelled.
        """
        try:
            async with asyncio.timeout(None if named.sampler else named.timeout_s):
                return list(await cast(AsyncScorer, named.scorer).score(records))
        except TimeoutError:
            reason = f"no answer within {named.timeout_s:g} s"
            return [Score(value=None, status=REWARD_TIMEOUT, reason=reason)] * len(records)

    async def _in_turn(self, named: NamedScorer, records: list[ScoredRecord]) -> list[Score]:
        async with (
            self._turn
        ):  # the limit counts from when the reward begins, not from when it was asked
            work = asyncio.ensure_future(self._compute(cast(Scorer, named.scorer).score, records))
            async with asyncio.timeout(named.timeout_s):
                return list(await asyncio.shield(work))

    async def _ask(self, named: NamedScorer, records: list[ScoredRecord]) -> list[Score]:
        waits = inspect.iscoroutinefunction(named.scorer.score)
        try:
            answers = await (self._waiting if waits else self._in_turn)(named, records)
        except (
            ConfigError,
            ContractError,
            DataError,
        ):  # said on purpose, to whom runs it: nothing can be scored
            raise
        except TimeoutError:
            reason = f"no answer within {named.timeout_s:g} s"
            log.error("rewards.%s: %s; the scorer is started again", named.name, reason)
            self._give_up(RESTART_EXIT_CODE)
            return [Score(value=None, status=REWARD_TIMEOUT, reason=reason)] * len(records)
        except Exception as error:  # isolation point: the failure becomes the records' status
            log.exception("rewards.%s failed", named.name)
            return [
                Score(value=None, status=REWARD_FAILED, reason=f"{type(error).__name__}: {error}")
            ] * len(records)
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
        refs=header.media,
    )


_SKIPPED = Score(value=None, status=REWARD_SKIPPED)


def _with(score: RecordScore, name: str, answer: Score) -> RecordScore:
    value, status, reason = answer.value, answer.status, answer.reason
    if status == REWARD_SKIPPED:
        return msgspec.structs.replace(score, statuses={**score.statuses, name: status})
    if status == OK and (value is None or not math.isfinite(value)):
        status, reason = REWARD_FAILED, f"the reward is {value}"
    values = (
        {**score.values, name: float(value)} if status == OK and value is not None else score.values
    )
    told = score.reason or (
        short_reason(f"rewards.{name}: {reason}") if reason and status != OK else ""
    )
    return RecordScore(score.ordinal, score.sample, values, {**score.statuses, name: status}, told)
