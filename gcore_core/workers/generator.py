"""Answers for a generator: what may be asked of one replica.

generate   leases in, finished headers out              Rounds, DrawnRecords, EngineDriver
ask        questions to its role in, answers out        Asking, EngineDriver
pull       weights from the trainer                     WeightsFollower
sleep, wake   the engine's memory given back and taken  EngineDriver's lock
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from typing import Any, Protocol, cast

from gcore_core.contract.dataset import Dataset
from gcore_core.contract.errors import ContractError
from gcore_core.contract.generator import (
    Draws,
    ExplainsGaps,
    Finished,
    Generator,
    SampleRequest,
    ScoresLogprobs,
    Sleeps,
)
from gcore_core.contract.launching import Network
from gcore_core.contract.order import sample_seed
from gcore_core.contract.records import Header, Lease, Prompt
from gcore_core.contract.sentinel import Finding
from gcore_core.contract.step_check import Held
from gcore_core.runtime.compute import Compute
from gcore_core.runtime.messages import (
    ASK,
    EXPLAIN,
    GENERATE,
    GREEDY,
    PUSH_HELD,
    PUSH_PULL,
    RELEASE_STEPS,
    SCORE_AGAIN,
    SLEEP,
    TRAIN,
    WAKE,
    AnswerItem,
    AskRequest,
    ExplainRequest,
    GenerateRequest,
    Nothing,
    PullWeights,
    PushConfirmed,
    ReleaseSteps,
    ScoreAgain,
    SleepRequest,
    WakeReply,
)
from gcore_core.runtime.shown_records import opened_record
from gcore_core.runtime.worker_settings import GeneratorSettings
from gcore_core.store.client import StoreWriter, note_error
from gcore_core.wire.gathering import shared
from gcore_core.wire.service import Call, Service
from gcore_core.workers.compared_records import columns_of
from gcore_core.workers.drawn_records import DrawnRecords, EndReasons
from gcore_core.workers.push import UNTOLD_DTYPE, DtypeSetting, Here
from gcore_core.workers.questions import Asking
from gcore_core.workers.role_sampler import RoleSampler
from gcore_core.workers.rounds import Rounds
from gcore_core.workers.sleep_note import SleepNote
from gcore_core.workers.weights_follower import WeightsFollower

log = logging.getLogger(__name__)


class GeneratorShell:
    """Serves one replica's endpoints around its backend.

    backend: holds the weights, sleeps and explains.
    restarted: its process takes the place of one that ended.
    setting: what the configuration says of the dtype that the backend holds, for errors.
    replica: its number among the replicas of its role.
    note: says to the next process that this one sleeps; None: nobody is told.
    draws: samples are asked of it, the environment around the backend; None: of the backend.
    asked: the roles that this environment asks.
    """

    def __init__(
        self,
        backend: Generator,
        datasets: Mapping[str, Dataset],
        store: StoreWriter,
        compute: Compute,
        network: Network,
        settings: GeneratorSettings,
        *,
        restarted: bool = False,
        setting: DtypeSetting = UNTOLD_DTYPE,
        replica: int = 0,
        note: SleepNote | None = None,
        draws: Draws | None = None,
        asked: Sequence[RoleSampler] = (),
    ) -> None:
        self._backend = backend
        self._asked = asked
        self._draws = draws or backend
        self._note = note or SleepNote()
        self._datasets = datasets
        self._compute = compute
        self._aborts = settings.aborts
        self._background = set[asyncio.Task[None]]()  # the event loop alone would not keep them
        self._seed = settings.run.seed
        gather_s = None if settings.run.deterministic else settings.gather_s
        self._rounds = Rounds(settings.shards, gather_s, restarted)
        self._records = DrawnRecords(store, self._rounds, settings.shards, replica)
        self._asking = Asking(store.reader())
        self._ends = EndReasons()
        self._engine = EngineDriver(self._draws, compute, settings.batch_s, self)
        lock = self._engine.lock
        self._weights = WeightsFollower(
            backend, compute, network, lock, settings.follows, setting, Here(*store.place)
        )

    def register(self, service: Service) -> None:
        self._progress = service.progress
        service.add(GENERATE, self.generate)
        service.add(PUSH_PULL, self.pull)
        service.add(PUSH_HELD, self.held)
        service.add(RELEASE_STEPS, self.release_steps)
        service.add(EXPLAIN, self.explain)
        service.add(SCORE_AGAIN, self.score_again)
        service.add(ASK, self.ask)
        service.add(SLEEP, self.sleep)
        service.add(WAKE, self.wake)

    # -- what can be asked of it -------------------------------------------------------------------

    async def generate(
        self, request: GenerateRequest, call: Call
    ) -> AsyncGenerator[list[Header], None]:
        """Streams headers as records finish.

        Asking again for a sample gives the record that it already made. Raises WeightsBehind where
        it first needs a push, and WeightsGone where samples are asked of a version that is no
        longer to be had.
        """
        if request.step < self._records.over:
            if not request.leases:
                return  # an empty part of a round that ended without it
            raise ContractError(
                f"step {request.step} is over, its records are gone", where="generate"
            )
        for role in self._asked:
            role.route(request.awake, request.awake_version)
        keys = [(lease.ordinal, sample) for lease in request.leases for sample in lease.samples]
        if request.leases:
            self._weights.check_is_not_behind(request.least)
        if request.exact and not self._records.has_all(keys, request.step):
            self._weights.check_is_at(request.least)
        with self._records.listen(keys, request.step, call) as listener:
            await self._submit(request, await self._rounds.join(request))
            while listener.waiting:
                headers = await listener.inbox.get()
                if not headers:
                    await self._engine.check()
                if awaited := listener.take(headers):
                    yield awaited

    async def ask(self, request: AskRequest, call: Call) -> AsyncGenerator[list[AnswerItem], None]:
        """Streams the answers to questions as they finish.

        Those that the asker no longer waits for are taken back from the engine.
        """
        opened, samples = await self._asking.open(request, call)
        try:
            await self._engine.submit(samples)
            missing = len(samples)
            while missing:
                answers = await opened.inbox.get()
                if not answers:
                    await self._engine.check()
                missing -= len(answers)
                yield answers
        finally:
            if keys := self._asking.close(opened):
                self._in_background(self._give_up(keys))

    async def pull(self, request: PullWeights, call: Call) -> PushConfirmed:
        """Takes a push from the trainer; no step of the engine runs meanwhile."""
        self._records.release(request.release_before)
        return await self._weights.pull(request, self._progress)

    async def release_steps(self, request: ReleaseSteps, call: Call) -> Nothing:
        """Forgets the records of earlier steps, where no push says so."""
        self._records.release(request.before)
        return Nothing()

    async def held(self, request: Nothing, call: Call) -> Held:
        """Says what it holds now, against what the last pushes brought."""
        return await self._weights.held()

    async def explain(self, request: ExplainRequest, call: Call) -> list[Finding]:
        """Says why its log-probs are not the trainer's, where its backend can; it never fails."""
        backend = self._backend
        if not isinstance(backend, ExplainsGaps):
            return []
        records = [opened_record(record) for record in request.records]
        async with self._engine.lock:
            try:
                return await self._compute(backend.explain_gaps, records)
            except Exception:  # isolation point: the alarm stands, with whatever else is known
                log.exception("the gaps of %d records cannot be explained", len(records))
                return []

    async def score_again(self, request: ScoreAgain, call: Call) -> list[list[float]]:
        """Returns the log-probs of each record's actions.

        It is empty where the backend cannot score records, or holds another version.
        """
        backend = self._backend
        columns = [columns_of(record) for record in request.records]
        async with self._engine.lock:
            if not isinstance(backend, ScoresLogprobs) or backend.version != request.version:
                return []
            scored = await self._compute(backend.logprobs, columns)
        return [logp.tolist() for logp in scored]

    async def sleep(self, request: SleepRequest, call: Call) -> Nothing:
        """Gives the engine's memory back.

        Samples that no open request waits for are given up, where the backend can end them: another
        replica has drawn them already. All others end before the sleep.
        """
        await self._give_up()
        await self._engine.idle()
        self._records.release(request.release_before)
        async with self._engine.lock:
            await self._compute(cast(Sleeps, self._backend).sleep)
            # Before the reply, upon which others take the memory.
            self._note.leave()
        return Nothing()

    async def wake(self, request: Nothing, call: Call) -> WakeReply:
        """Takes the engine's memory again."""
        async with self._engine.lock:
            await self._compute(cast(Sleeps, self._backend).wake)
            self._note.remove()
        return WakeReply(self._backend.version)

    # -- what the engine's driver asks (``Owner``) -------------------------------------------------

    def owed(self) -> int:
        return len(self._records) + len(self._asking)

    def progress(self) -> None:
        self._records.progress()
        self._asking.progress()

    async def take(self, finished: list[Finished]) -> None:
        if records := self._asking.take(finished):
            self._ends.add(records)
            await self._records.keep_finished(records, self._weights.stamp)

    def fail(self) -> None:
        self._records.fail()
        self._asking.failed()

    async def _submit(self, request: GenerateRequest, leases: list[Lease]) -> None:
        """Lets the engine draw what neither runs nor is finished.

        Others may wait for the same leases: no cancellation ends it.
        """
        await asyncio.shield(self._in_background(self._submit_now(request, leases)))

    async def _give_up(self, keys: Sequence[tuple[int, int]] = ()) -> None:
        """Takes samples back from the engine, where it can end them.

        keys: of which; none: the records that no open request waits for.
        """
        if self._aborts:
            async with self._engine.lock:
                if keys := keys or self._records.give_up():
                    await self._compute(self._draws.abort, keys)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begins work that goes on where whoever asked for it is cancelled."""
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        task.add_done_callback(note_error)
        return task

    async def _submit_now(self, request: GenerateRequest, leases: list[Lease]) -> None:
        if not leases:
            return
        # Between two steps of the engine: the next one has these samples.
        async with self._engine.lock:
            # All are opened before any runs: one that cannot be opened must leave no sample that
            # counts as running and that nobody draws.
            rows = await self._compute(self._open, leases, request.purpose)
            samples = [
                sample
                for lease, row in zip(leases, rows, strict=True)
                for sample in self._begin(request, lease, row)
            ]
            await self._engine.submit_now(samples)

    def _open(self, leases: Sequence[Lease], purpose: str) -> list[Prompt]:
        """Asks the dataset for the row of each lease; it runs where the backend's calls run."""
        dataset = self._datasets["train" if purpose == TRAIN else "evaluation"]
        return [dataset[lease.row] for lease in leases]

    def _begin(self, request: GenerateRequest, lease: Lease, row: Prompt) -> list[SampleRequest]:
        """Notes that samples of a lease run; returns what the engine is asked for."""
        return [
            SampleRequest(
                ordinal=lease.ordinal,
                sample=sample,
                seed=sample_seed(self._seed, lease.ordinal, lease.epoch, sample),
                prompt=row,
                greedy=request.purpose == GREEDY,
                attempt=lease.attempt,
            )
            for sample in self._records.begin(lease, request.step)
        ]


class Owner(Protocol):
    """Gets what the engine makes, from the driver."""

    def owed(self) -> int:
        """Returns how many samples run for somebody."""

    def progress(self) -> None:
        """Tells those who wait that records have ended."""

    async def take(self, finished: list[Finished]) -> None:
        """Takes the records that have ended."""

    def fail(self) -> None:
        """Wakes those who wait, since the engine raised; ``EngineDriver.check`` raises it again."""


class EngineDriver:
    """Holds the backend's lock, and steps what draws while its owner is owed samples.

    Records that end are progress. In between only the backend knows whether it works: it calls
    ``WorkerContext.progress`` for actions that it has sampled.

    draws: the backend, or the environment around it.
    lock: held to load weights or to put the engine to sleep, so that no step runs then.
    batch_s: seconds for which the engine steps on before its records are handed over, so that those
        that end close together travel in one message.
    """

    def __init__(self, draws: Draws, compute: Compute, batch_s: float, owner: Owner) -> None:
        self._draws = draws
        self._compute = compute
        self._owner = owner
        self._batch_s = batch_s
        self._driving: asyncio.Task[None] | None = None
        self.lock = asyncio.Lock()

    async def submit(self, requests: list[SampleRequest]) -> None:
        """Queues samples; begins to step when nothing ran."""
        async with self.lock:
            await self.submit_now(requests)

    async def submit_now(self, requests: list[SampleRequest]) -> None:
        """Queues samples while the lock is held."""
        if not requests:
            return
        await self._compute(self._draws.submit, requests)
        if self._driving is None or self._driving.done():
            self._driving = asyncio.ensure_future(self._drive())

    async def check(self) -> None:
        """Raises what the engine raised. While it runs well, waits until nothing is owed."""
        if self._driving is not None:
            await shared(self._driving)

    async def idle(self) -> None:
        """Waits until nothing is owed, however the engine ends."""
        if self._driving is not None:
            await asyncio.wait([self._driving])

    async def _drive(self) -> None:
        try:
            while self._owner.owed():
                async with self.lock:
                    finished = await self._compute(self._step_for_a_while)
                if finished:  # an empty list is no sign: an engine may give it for ever
                    self._owner.progress()
                await self._owner.take(finished)
        except Exception:  # isolation point: every open request raises it
            log.exception("the engine failed")
            self._owner.fail()
            raise

    def _step_for_a_while(self) -> list[Finished]:
        until_s = time.perf_counter() + self._batch_s
        finished = self._draws.step()
        while time.perf_counter() < until_s and len(finished) < self._owner.owed():
            finished += self._draws.step()
        return finished
