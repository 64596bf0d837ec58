"""Answers for a scorer: opens references, asks the rewards, enforces their time limits."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
import numbers
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import msgspec
import numpy as np

from gcore_core.contract.dataset import Dataset
from gcore_core.contract.errors import ConfigError, ContractError, DataError
from gcore_core.contract.lineage import check_seal, receipt_of
from gcore_core.contract.plugin_code import definition_of, line_of, short
from gcore_core.contract.records import (
    OK,
    REWARD_FAILED,
    REWARD_SKIPPED,
    REWARD_TIMEOUT,
    Header,
    Inquiry,
    Prompt,
    RecordScore,
)
from gcore_core.contract.rows import is_meant
from gcore_core.contract.scorer import (
    LARGEST_VALUE,
    AsyncScorer,
    Score,
    ScoredRecord,
    Scorer,
    failure,
)
from gcore_core.runtime.compute import Compute
from gcore_core.runtime.main_thread import ThreadedLimits
from gcore_core.runtime.messages import RESTART_EXIT_CODE, SCORE, TRAIN, ScoreRequest, short_reason
from gcore_core.runtime.worker_settings import DATASET_SECTIONS
from gcore_core.store.client import StoreReader
from gcore_core.store.columns import Columns
from gcore_core.wire.service import Call, Service
from gcore_core.workers.checked_rewards import (
    KNOWN_EVERY,
    KnownRow,
    check_alone,
    check_known,
    read_known,
)
from gcore_core.workers.overruns import Overruns, RewardWork
from gcore_core.workers.role_sampler import RoleSampler
from gcore_core.workers.row_digest import open_row, own_row

log = logging.getLogger(__name__)


class _OutOfTimeError(Exception):
    """A reward has used up its time.

    It is no TimeoutError, because a reward may raise that by itself.
    """


@dataclass(frozen=True, kw_only=True)
class NamedScorer:
    """Holds a reward with its settings.

    timeout_s: its time for one call, unless it has a sampler.
    when: field of a row -> the value or the values for which the row's records get this reward;
        empty: all do.
    sampler: the role that this reward asks questions, if any. Its calls have no time limit then:
        the role's replicas may take as long as they make progress.
    of_groups: whether it sees the records of a prompt together.
    alone_every: in one of so many calls whose scores differ, one score is asked for again, alone;
        0: in none.
    known: file of rows whose reward is known; "": none.
    """

    name: str
    scorer: Scorer | AsyncScorer
    timeout_s: float
    when: Mapping[str, Any] = field(default_factory=dict)
    sampler: RoleSampler | None = None
    of_groups: bool = False
    alone_every: int = 0
    known: str = ""


class ScorerShell:
    """Hosts the rewards of one scorer worker.

    A function that does not return cannot be stopped: the records it was called with
    get the status "timeout", the reply is sent, and the process is given up. Where the function
    lets no other code run, the agent ends the process, and the next one gives that answer to all
    that ran in it.

    datasets: "train" and "evaluation" -> the rows of the records' prompts.
    give_up: ends the process with an exit code; its agent starts it again.
    overruns: what earlier processes have ended with; by default nothing is kept.
    providers: dataset -> its provider, as in ``use``, for errors.
    limits: notices time limits that rewards set in a thread; None: nobody does.
    """

    def __init__(
        self,
        scorers: list[NamedScorer],
        datasets: Mapping[str, Dataset],
        store: StoreReader,
        compute: Compute,
        give_up: Callable[[int], None],
        overruns: Overruns | None = None,
        providers: Mapping[str, str] | None = None,
        limits: ThreadedLimits | None = None,
    ) -> None:
        for reward in scorers:
            _check_alone_every(reward)
        self._scorers = scorers
        self._datasets = datasets
        self._store = store
        self._compute = compute
        self._give_up = give_up
        self._overruns = overruns or Overruns()
        self._providers = providers or {}
        self._limits = limits or ThreadedLimits()
        self._lock = asyncio.Lock()  # of calls in the main thread: rewards, and opening of rows
        self._calls: Counter[str] = Counter()  # reward -> calls in which scores differed
        self._requests: Counter[str] = Counter()  # reward -> requests that it was in
        self._known: dict[str, list[KnownRow]] = {}  # reward -> rows whose reward is known

    def register(self, service: Service) -> None:
        service.add(SCORE, self.score)

    async def score(self, request: ScoreRequest, call: Call) -> list[RecordScore]:
        """Returns the scores that this worker's rewards give records, of those the request wants.

        Raises RecordMismatch for a record that is not what its generator sealed, and DataError for
        one whose row is another one here.
        """
        name = "train" if request.purpose == TRAIN else "evaluation"
        contents = await self._store.records(request.headers)
        for header, (columns, _) in zip(request.headers, contents, strict=True):
            place = f"scoring for {request.purpose}"
            check_seal(header.seal, *header.key, header.prompt_digest, columns, place)
        async with self._lock:  # else the opening would count against the time of a reward
            prompts = await self._compute(self._prompts, request.headers, name)
        records = [
            _record(header, content, prompts[header.row, header.prompt_digest])
            for header, content in zip(request.headers, contents, strict=True)
        ]
        rewards = [
            reward
            for reward in self._scorers
            if reward.name in request.rewards or not request.rewards
        ]
        by_reward = await asyncio.gather(
            *(self._score_matching(reward, records, request, call) for reward in rewards)
        )
        results = [RecordScore(header.ordinal, header.sample, {}, {}) for header in request.headers]
        for reward, scores in zip(rewards, by_reward, strict=True):
            results = [
                _with(result, reward.name, score)
                for result, score in zip(results, scores, strict=True)
            ]
        return [
            msgspec.structs.replace(
                result,
                asked=self._take_inquiries(result),
                receipt=receipt_of(header.seal, result.values),
            )
            for header, result in zip(request.headers, results, strict=True)
        ]

    def _prompts(self, headers: Sequence[Header], name: str) -> dict[tuple[int, int], Prompt]:
        """Opens the rows of records in the dataset ``name``; returns (row, its digest) -> prompt.

        The records of a group share a row: it is opened, and its digest taken, once.
        """
        provider = self._providers.get(name, "")
        prompts: dict[tuple[int, int], Prompt] = {}
        for header in headers:
            key = header.row, header.prompt_digest
            if key not in prompts:
                where = DATASET_SECTIONS[name]
                prompts[key] = open_row(header, self._datasets[name], provider, where)
        return prompts

    def _take_inquiries(self, result: RecordScore) -> list[Inquiry]:
        """Returns the measured questions about a record, each of them once.

        Rewards that ask the same role share a sampler, so each sampler is looked at once.
        """
        samplers = {
            id(reward.sampler): reward.sampler
            for reward in self._scorers
            if reward.sampler is not None
        }
        return [
            inquiry
            for sampler in samplers.values()
            for inquiry in sampler.take_inquiries(result.ordinal, result.sample)
        ]

    async def _score_matching(
        self,
        reward: NamedScorer,
        records: list[ScoredRecord],
        request: ScoreRequest,
        call: Call,
    ) -> list[Score]:
        """Returns one reward's score of each record.

        A record that does not match the reward's ``when`` is "skipped".
        """
        sampler = reward.sampler
        if sampler is not None:
            sampler.route(request.awake, request.awake_version)
        await self._check_known(reward)
        scores = [_SKIPPED] * len(records)
        keys = [
            RewardWork(
                reward.name, request.purpose, header.ordinal, header.sample, header.versions[1]
            )
            for header in request.headers
        ]
        matching = [
            i for i, record in enumerate(records) if is_meant(record.prompt.fields, reward.when)
        ]
        asked = []
        for i in matching:
            if self._overruns.is_over(keys[i]):
                scores[i] = _score_of_overrun(reward)
            else:
                asked.append(i)
        if asked:
            answers = await self._score_isolated(
                reward, [records[i] for i in asked], [keys[i] for i in asked]
            )
            for i, score in zip(asked, answers, strict=True):
                scores[i] = score
        call.progress()
        return scores

    async def _score_waiting(
        self, reward: NamedScorer, records: list[ScoredRecord], keys: list[RewardWork]
    ) -> Any:
        """Calls a scorer that is a coroutine.

        It waits for others, so its calls overlap, and one that takes too long is cancelled.
        """
        timeout_s = None if reward.sampler else reward.timeout_s
        watched = (
            contextlib.nullcontext() if timeout_s is None else self._overruns.watch(keys, timeout_s)
        )
        with watched:
            try:
                async with _limit(timeout_s):
                    return await cast(AsyncScorer, reward.scorer).score(_own(records))
            except _OutOfTimeError:
                return [_score_of_overrun(reward)] * len(records)
            finally:
                self._limits.check("")

    async def _score_locked(
        self, reward: NamedScorer, records: list[ScoredRecord], keys: list[RewardWork]
    ) -> Any:
        """Calls a scorer that is a plain function, one call after the other.

        The limit counts from when it begins, not from when it was asked for.
        """
        async with self._lock:
            with self._overruns.watch(keys, reward.timeout_s):
                work = asyncio.ensure_future(
                    self._compute(cast(Scorer, reward.scorer).score, _own(records))
                )
                async with _limit(reward.timeout_s):
                    return await asyncio.shield(work)

    async def _score_isolated(
        self, reward: NamedScorer, records: list[ScoredRecord], keys: list[RewardWork]
    ) -> list[Score]:
        """Returns one reward's score of each record.

        Where the reward fails, that is the records' status.

        keys: name the records' work for ``Overruns``.

        Raises what a reward says on purpose to the person who runs it: with a wrong config, for
        example, nothing can be scored.
        """
        try:
            if inspect.iscoroutinefunction(reward.scorer.score):
                answer = await self._score_waiting(reward, records, keys)
            else:
                answer = await self._score_locked(reward, records, keys)
            scores = list(answer) if isinstance(answer, Iterable) else answer
        except (ConfigError, ContractError, DataError) as error:
            error.where = error.where or f"rewards.{reward.name}"
            raise
        except _OutOfTimeError:
            log.error(
                "rewards.%s: %s; the scorer is started again; "
                "rewards.%s.timeout_s gives it more time",
                reward.name,
                _score_of_overrun(reward).reason,
                reward.name,
            )
            # The answer may be lost with the process: other rewards of the request wait for their
            # turn. Asked again, the next process gives it.
            self._overruns.add_over(keys)
            self._give_up(RESTART_EXIT_CODE)
            return [_score_of_overrun(reward)] * len(records)
        # Isolation point: the failure becomes the records' status. Coroutines may raise SystemExit.
        except (Exception, SystemExit) as error:
            log.exception("rewards.%s failed", reward.name)
            place = short(line_of(error, reward.scorer))
            return [failure(f"{type(error).__name__}: {error} ({place})")] * len(records)
        if problem := _problem(scores, len(records)):
            place = definition_of(reward.scorer.score)
            log.error("rewards.%s: %s, at %s", reward.name, problem, place)
            return [failure(f"{problem} ({short(place)})")] * len(records)
        scores = [_bounded(score) for score in scores]
        await self._check_alone(reward, records, keys, scores)
        return scores

    async def _check_alone(
        self,
        reward: NamedScorer,
        records: list[ScoredRecord],
        keys: list[RewardWork],
        scores: list[Score],
    ) -> None:
        """Asks for one score alone in every ``alone_every``-th call in which scores differ.

        See ``checked_rewards.check_alone``.
        """
        # With equal scores nothing would differ, whatever their order.
        if not reward.alone_every or len({score.value for score in scores}) < 2:
            return
        number = self._calls[reward.name]
        self._calls[reward.name] += 1
        if number % reward.alone_every:
            return
        key_of = {id(record): key for record, key in zip(records, keys, strict=True)}

        async def ask(some: list[ScoredRecord]) -> list[Score] | None:
            return await self._ask_again(reward, some, [key_of[id(record)] for record in some])

        await check_alone(reward.name, reward.scorer.score, records, scores, ask)

    async def _check_known(self, reward: NamedScorer) -> None:
        """Asks about the rows whose reward is known, now and then; see ``checked_rewards``."""
        number = self._requests[reward.name]
        self._requests[reward.name] += 1
        if not reward.known or number % KNOWN_EVERY:
            return
        if reward.name not in self._known:
            self._known[reward.name] = read_known(reward.known, reward.name)

        async def ask(some: list[ScoredRecord]) -> list[Score] | None:
            keys = [RewardWork(reward.name, "known", r.ordinal, r.sample, 0) for r in some]
            answers = await self._ask_again(reward, some, keys)
            if reward.sampler is not None:
                for record in some:  # what was measured is of no record of a step
                    reward.sampler.take_inquiries(record.ordinal, record.sample)
            return answers

        await check_known(reward.name, reward.known, self._known[reward.name], ask)

    async def _ask_again(
        self, reward: NamedScorer, records: list[ScoredRecord], keys: list[RewardWork]
    ) -> list[Score] | None:
        """Returns a reward's scores of records that no step waits for; None where it gives none."""
        try:
            if inspect.iscoroutinefunction(reward.scorer.score):
                answer = await self._score_waiting(reward, records, keys)
            else:
                answer = await self._score_locked(reward, records, keys)
        except _OutOfTimeError:
            self._give_up(RESTART_EXIT_CODE)  # the main thread is lost
            return None
        except Exception:  # isolation point: it fails, so there is nothing to compare
            log.exception("rewards.%s failed when it was asked again", reward.name)
            return None
        scores = list(answer) if isinstance(answer, Iterable) else answer
        return None if _problem(scores, len(records)) else [_bounded(score) for score in scores]


def _check_alone_every(reward: NamedScorer) -> None:
    """Raises ConfigError where a reward is to be asked alone that is no function of one record."""
    if not reward.alone_every:
        return
    why = ""
    if reward.of_groups:
        why = "this one sees the records of a prompt together"
    elif inspect.iscoroutinefunction(reward.scorer.score):
        why = "this one is a coroutine, as those that ask judges or services are"
    if why:
        raise ConfigError(
            "only a reward that is a plain function of one record is asked for a score alone.",
            where=f"rewards.{reward.name}.alone_every",
            why=why,
            todo="leave it out",
        )


@contextlib.asynccontextmanager
async def _limit(timeout_s: float | None) -> AsyncIterator[None]:
    """Raises _OutOfTimeError after so many seconds; None: never."""
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            yield
    except TimeoutError:
        if limit.expired():
            raise _OutOfTimeError from None
        raise


def _score_of_overrun(reward: NamedScorer) -> Score:
    reason = f"no answer within {reward.timeout_s:g} s"
    return Score(value=None, status=REWARD_TIMEOUT, reason=reason)


def _problem(scores: Any, records: int) -> str:
    """Returns what is wrong with a scorer's answer to so many records; empty if nothing is."""
    if not isinstance(scores, list):
        return f"score() gave a {type(scores).__name__}, not a list"
    if len(scores) != records:
        return f"{len(scores)} scores for {records} records"
    for score in scores:
        if not isinstance(score, Score):
            return f"score() gave a list with a {type(score).__name__}, not a Score"
        if not isinstance(score.value, numbers.Real | np.bool_ | None):
            return f"score() gave a Score whose value is a {type(score.value).__name__}"
        if not isinstance(score.reason, str | None):
            return f"score() gave a Score whose reason is a {type(score.reason).__name__}"
    return ""


def _bounded(score: Score) -> Score:
    """Makes a failure of a value that a trainer cannot compute with; returns any other as it is.

    An integer of Python may have any number of digits: then even its text would raise. A value
    beyond float32 becomes infinite in a trainer, and in float64 its square may be.
    """
    try:
        value = float(score.value or 0.0)
    except OverflowError:
        return failure(f"the reward is a {type(score.value).__name__} too large for a float")
    if math.isfinite(value) and abs(value) > LARGEST_VALUE:
        return failure(f"the reward is {value:g}, too large for a float32")
    return score


def _record(header: Header, content: tuple[Columns, Columns], prompt: Prompt) -> ScoredRecord:
    columns, media = content
    return ScoredRecord(
        ordinal=header.ordinal,
        sample=header.sample,
        prompt=prompt,
        text=columns["text"].tobytes().decode("utf-8", "replace") if "text" in columns else "",
        status=header.status,
        columns=columns,
        media=media,
        refs=header.media,
    )


def _own(records: Sequence[ScoredRecord]) -> list[ScoredRecord]:
    """Copies what a reward could change of records.

    A row is opened once for all records of its group, and records once for all rewards: a reward
    that empties a list of tests would do it for all of them. Columns cannot be written to.
    """
    return [
        replace(record, prompt=own_row(record.prompt), refs=dict(record.refs)) for record in records
    ]


_SKIPPED = Score(value=None, status=REWARD_SKIPPED)


def _with(result: RecordScore, name: str, score: Score) -> RecordScore:
    """Adds the score of the reward ``name`` to ``result``.

    Of the reasons for no value, the first stays. A value has none.
    """
    status = score.status
    statuses = {**result.statuses, name: status}
    if status == REWARD_SKIPPED:
        return msgspec.structs.replace(result, statuses=statuses)
    value = score.value
    reason = score.reason
    values = result.values
    if status == OK and value is not None and math.isfinite(value):
        values = {**values, name: float(value)}
    elif status == OK:
        status = REWARD_FAILED
        statuses[name] = status
        reason = f"the reward is {value}"
    first_reason = result.reason
    if status != OK and not first_reason:
        # Without a reason here, the record's own would be shown for it, such as "length".
        first_reason = short_reason(f"rewards.{name}: {reason or f'{status}, without a reason'}")
    return msgspec.structs.replace(result, values=values, statuses=statuses, reason=first_reason)
