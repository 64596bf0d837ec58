"""The shell of a generator: leases in, finished headers out, columns into the store, weights from
the trainer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from gcore_core.contract.dataset import Dataset
from gcore_core.contract.errors import ContractError, WeightMismatch
from gcore_core.contract.generator import (
    Finished,
    Generator,
    ReceivesWeights,
    SampleRequest,
    Sleeps,
)
from gcore_core.contract.order import sample_seed
from gcore_core.contract.records import FAILED, HEADER_LIMIT_BYTES, Header, Lease, Prompt
from gcore_core.runtime.messages import (
    ASK,
    GENERATE,
    GREEDY,
    OPEN_PUSH,
    PULL,
    SLEEP,
    TRAIN,
    WAKE,
    AnswerItem,
    AskRequest,
    GenerateRequest,
    Nothing,
    OpenPush,
    PullWeights,
    PushConfirmed,
    SleepRequest,
    WakeReply,
    short_reason,
)
from gcore_core.runtime.process.compute import Compute
from gcore_core.runtime.push import PUSH_DEADLINE_S, pull_weights
from gcore_core.runtime.rpc.gathering import Gathering
from gcore_core.runtime.rpc.retry import TRIES, backoff_s, insist
from gcore_core.runtime.rpc.service import Call, Network, Service, encode
from gcore_core.runtime.shells.questions import Asking
from gcore_core.runtime.store.client import StoreWriter
from gcore_core.runtime.worker_settings import GeneratorSettings

RESTORE_BUCKET_BYTES = 256 << 20
Key = tuple[
    int, int
]  # ordinal, sample; evaluation uses ordinals below zero, so that no two purposes share a key


@dataclass
class _Listener:
    """One open ``generate`` request: what it still waits for, and where finished headers go."""

    waiting: set[Key]
    call: Call
    inbox: asyncio.Queue[list[Header]] = field(default_factory=asyncio.Queue)


@dataclass
class _Round:
    """The shards' parts of one round, until all have come."""

    parts: dict[int, list[Lease]] = field(default_factory=dict)
    complete: asyncio.Event = field(default_factory=asyncio.Event)
    submitted: bool = False


class GeneratorShell:
    """Serves one replica of a generator.

    restarted: its process takes the place of one that ended.
    process: a number that no other process of a generator has; drawn where none is given.
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
        process: int = 0,
    ) -> None:
        self._backend, self._datasets, self._store = backend, datasets, store
        self._compute, self._network = compute, network
        self._seed = settings.run.seed
        self._shards = settings.shards
        self._gather_s = None if settings.run.deterministic else settings.gather_s
        self._batch_s = settings.batch_s
        self._rounds: dict[tuple[int, int, str], _Round] = {}
        self._listeners: list[_Listener] = []
        self._running: dict[Key, int] = {}  # -> step
        self._finished: dict[Key, tuple[int, Header]] = {}
        self._engine = asyncio.Lock()
        self._driver: asyncio.Task[None] | None = None
        self._pulls = Gathering(1)
        self._mapped: dict[str, np.ndarray] = {}
        self._over = 0  # records of earlier steps are gone
        self._asking = Asking(store.reader())
        self._trainers = settings.trainers
        self._restarted = restarted
        # a step that began with the process before this one, which heard words that this one did
        # not
        self._hasty = -1
        # The system's own process ids repeat.
        self._process = process or int.from_bytes(os.urandom(5), "big")
        self._restoring = asyncio.Lock()

    def register(self, service: Service) -> None:
        self._progress = service.progress
        service.add(GENERATE, self.generate)
        service.add(PULL, self.pull)
        service.add(ASK, self.ask)
        service.add(SLEEP, self.sleep)
        service.add(WAKE, self.wake)

    async def generate(
        self, request: GenerateRequest, call: Call
    ) -> AsyncGenerator[list[Header], None]:
        """Streams headers as records finish. Asking again for a sample gives the record it already
        made.
        """
        if request.step < self._over:
            raise ContractError(
                f"step {request.step} is over, its records are gone", where="generate"
            )
        if self._restarted:
            self._restarted, self._hasty = False, request.step
        if request.leases and self._trainers and self._backend.version < request.step:
            await self._restore(request.step, call)
        keys = [(lease.ordinal, sample) for lease in request.leases for sample in lease.samples]
        listener = _Listener(set(keys), call)
        self._listeners.append(listener)
        try:
            if known := [self._finished[key][1] for key in keys if key in self._finished]:
                listener.inbox.put_nowait(known)
            await self._gather(request)
            while listener.waiting:
                headers = await listener.inbox.get()
                if not headers and self._driver is not None:
                    await self._driver  # it failed: raises what the engine raised
                if wanted := [header for header in headers if header.key in listener.waiting]:
                    listener.waiting.difference_update(header.key for header in wanted)
                    yield wanted
        finally:
            self._listeners.remove(listener)

    async def _gather(self, request: GenerateRequest) -> None:
        """Submits a round when all shards' parts are here, so that the engine sees one batch
        whatever C is.
        """
        group = self._rounds.setdefault((request.step, request.round, request.purpose), _Round())
        group.parts.setdefault(request.shard, []).extend(request.leases)
        if len(group.parts) == self._shards:
            group.complete.set()
        elif not group.submitted and request.step != self._hasty:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._gather_s):
                    await group.complete.wait()
        if group.submitted:
            # Late, or asked again: what is running or finished is not submitted twice.
            leases = request.leases
        else:
            group.submitted = True
            leases = [lease for part in group.parts.values() for lease in part]
        await self._submit(request, sorted(leases, key=lambda lease: lease.ordinal))

    async def _submit(self, request: GenerateRequest, leases: list[Lease]) -> None:
        dataset = self._datasets["train" if request.purpose == TRAIN else "evaluation"]
        wanted = []
        for lease in leases:
            keys = [(lease.ordinal, sample) for sample in lease.samples]
            fresh = [
                key[1] for key in keys if key not in self._running and key not in self._finished
            ]
            prompt = dataset[lease.row] if fresh else None
            for sample in fresh:
                self._running[lease.ordinal, sample] = request.step
                wanted.append(
                    SampleRequest(
                        ordinal=lease.ordinal,
                        sample=sample,
                        seed=sample_seed(self._seed, lease.ordinal, lease.turn, sample),
                        prompt=cast(Prompt, prompt),
                        greedy=request.purpose == GREEDY,
                        attempt=lease.attempt,
                    )
                )
        await self._enqueue(wanted)

    async def _enqueue(self, wanted: list[SampleRequest]) -> None:
        if wanted:
            async with self._engine:
                await self._compute(self._backend.submit, wanted)
            if self._driver is None or self._driver.done():
                self._driver = asyncio.ensure_future(self._drive())

    async def _drive(self) -> None:
        try:
            while self._running or len(self._asking):
                async with self._engine:
                    finished = await self._compute(self._advance)
                for listener in self._listeners:
                    listener.call.progress()
                self._asking.progress()
                if records := self._asking.take(finished):
                    await self._emit(records)
        except Exception:  # isolation point: every open request raises it
            for listener in self._listeners:
                listener.inbox.put_nowait([])
            self._asking.failed()
            raise

    def _advance(self) -> list[Finished]:
        """Steps for at least ``batch_s``, so that records that end close together travel in one
        message.
        """
        until_s, finished = time.perf_counter() + self._batch_s, self._backend.step()
        while time.perf_counter() < until_s and len(finished) < len(self._running) + len(
            self._asking
        ):
            finished += self._backend.step()
        return finished

    async def _emit(self, finished: list[Finished]) -> None:
        known = [record for record in finished if _key(record) in self._running]
        headers = {_key(record): _header(record) for record in known}
        if whole := [record for record in known if record.status != FAILED]:
            step = max(self._running[_key(record)] for record in whole)
            await self._keep(step, whole, headers)
        for key, header in headers.items():
            _check_size(header)
            self._finished[key] = self._running.pop(key), header
        for listener in self._listeners:
            if mine := [header for header in headers.values() if header.key in listener.waiting]:
                listener.inbox.put_nowait(mine)

    async def _keep(self, step: int, records: list[Finished], headers: dict[Key, Header]) -> None:
        """Stores columns and media, for all shards that have asked for records of the step: so they
        share slabs.
        """
        rounds = [group.parts.items() for key, group in self._rounds.items() if key[0] == step]
        asked = frozenset(shard for parts in rounds for shard, leases in parts if leases)
        if step < self._over:
            return  # nobody waits for them any more
        ref = await self._store.put(step, asked, [record.columns for record in records])
        arrays = [array for record in records for array in record.media.values()]
        blobs = iter(await self._store.put_blobs(step, asked, arrays))
        for slot, record in enumerate(records):
            header = headers[_key(record)]
            header.columns, header.slot = ref, slot
            header.media = {name: next(blobs) for name in record.media}

    def _release(self, before: int) -> None:
        """Forgets earlier steps. Every replica hears of it by the push, also those that some shards
        never speak to.
        """
        self._over = over = max(self._over, before)
        self._store.release(dict.fromkeys(range(self._shards), (0, over)))
        self._finished = {key: found for key, found in self._finished.items() if found[0] >= over}
        self._rounds = {key: group for key, group in self._rounds.items() if key[0] >= over}

    async def _restore(self, version: int, call: Call) -> None:
        """This process was started after the push of these weights: has one of its own. The trainer
        is idle in a rollout; where another generator's push takes the place of this one's, it is
        begun anew.
        """
        async with self._restoring:
            for attempt in range(TRIES):
                if self._backend.version >= version:
                    return
                opened = OpenPush(version, RESTORE_BUCKET_BYTES, 1, self._process * TRIES + attempt)
                ranks = map(self._network.peer, self._trainers)
                await asyncio.gather(
                    *(insist(rank, OPEN_PUSH, opened, PUSH_DEADLINE_S) for rank in ranks)
                )
                try:
                    await self.pull(
                        PullWeights(version, 0, self._trainers[0], opened.attempt), call
                    )
                except (ContractError, WeightMismatch):
                    if attempt == TRIES - 1:
                        raise
                    await asyncio.sleep(backoff_s(attempt))

    async def ask(self, request: AskRequest, call: Call) -> AsyncGenerator[list[AnswerItem], None]:
        """Streams the answers to a reward's questions as they finish."""
        asked, wanted = await self._asking.open(request, call)
        try:
            await self._enqueue(wanted)
            owed = len(wanted)
            while owed:
                answers = await asked.inbox.get()
                if not answers and self._driver is not None:
                    await self._driver  # it failed: raises what the engine raised
                owed -= len(answers)
                yield answers
        finally:
            self._asking.close(asked)

    async def sleep(self, request: SleepRequest, call: Call) -> Nothing:
        """Gives the engine's memory back. What still runs, another replica has drawn already: it
        ends before.
        """
        if self._driver is not None:
            await asyncio.wait([self._driver])
        self._release(request.release_before)
        async with self._restoring, self._engine:
            await self._compute(cast(Sleeps, self._backend).sleep)
        return Nothing()

    async def wake(self, request: Nothing, call: Call) -> WakeReply:
        async with self._engine:
            await self._compute(cast(Sleeps, self._backend).wake)
        return WakeReply(self._backend.version)

    async def pull(self, request: PullWeights, call: Call) -> PushConfirmed:
        """Takes a push from the trainer; no step of the engine runs meanwhile."""
        self._release(request.release_before)

        async def act(_: list[PullWeights]) -> PushConfirmed:
            async with self._engine:
                receiver = cast(ReceivesWeights, self._backend)
                source = self._network.peer(request.source)
                return await pull_weights(
                    receiver, source, request, self._compute, self._progress, self._mapped
                )

        # Once, and to its end: a pull that was begun anew would find the first buckets overwritten.
        confirmed: PushConfirmed = await self._pulls.join(
            (request.version, request.attempt), 0, request, act
        )
        return confirmed


def _key(record: Finished) -> Key:
    return record.request.ordinal, record.request.sample


def _check_size(header: Header) -> None:
    nbytes = len(encode(header))
    if nbytes > HEADER_LIMIT_BYTES:
        raise ContractError(
            f"the header of a record has {nbytes} bytes, the limit is {HEADER_LIMIT_BYTES}",
            where=f"ordinal {header.ordinal}, sample {header.sample}",
            why=f"it names {len(header.media)} media: {', '.join(header.media)}"[:200],
            todo="give fewer media with shorter names, or put them into one array",
        )


def _header(record: Finished) -> Header:
    request, columns = record.request, record.columns
    return Header(
        ordinal=request.ordinal,
        sample=request.sample,
        row=request.prompt.row,
        seed=request.seed,
        attempt=request.attempt,
        versions=record.versions,
        n_prompt=columns["prompt_ids"].size if "prompt_ids" in columns else 0,
        n_actions=columns["action_mask"].size if "action_mask" in columns else 0,
        status=record.status,
        reason=short_reason(record.reason),
    )
