"""Answers for a trainer rank, by calling the backend.

It gets the parts of all shards at once (see ``runtime.relay``) and calls the backend once for them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from gcore_core.contract.annotator import Annotates
from gcore_core.contract.errors import (
    CheckpointError,
    ContractError,
    GcoreError,
    WeightMismatch,
)
from gcore_core.contract.launching import Peer
from gcore_core.contract.lineage import UNSEALED, name_of
from gcore_core.contract.records import WeightPlan
from gcore_core.contract.sentinel import Finding, Sentinel
from gcore_core.contract.trainer import (
    DiagnosesExport,
    EvaluatesLoss,
    SavesInBackground,
    SleepsInRollout,
    Trainer,
    TrainRecord,
)
from gcore_core.contract.weight_transfer import Bucket
from gcore_core.contract.weights_hash import WeightsHash
from gcore_core.runtime.compute import Compute
from gcore_core.runtime.messages import (
    ANNOTATE_RANKS,
    DIAGNOSE,
    EVALUATE_RANKS,
    FINISH_SAVE,
    PLACE_WEIGHTS,
    PREPARE_RANKS,
    PUSH_BEGIN,
    PUSH_BUCKET,
    PUSH_EXPORTED,
    PUSH_PLAN,
    RELEASE_STEPS,
    SAVE_PRETRAINED,
    SAVE_STATE,
    SCORE_LAST,
    SHOW_COMPARED,
    SKIP_STEP,
    TRAIN_RANKS,
    TRAINER_SLEEP,
    AnnotateReply,
    AnnotateRequest,
    BeginPush,
    BucketRequest,
    DiagnoseRequest,
    EvaluateRequest,
    Nothing,
    PlaceWeights,
    PlanRequest,
    PrepareRequest,
    ReleaseSteps,
    SavedState,
    SaveState,
    SaveWeights,
    ScoreLast,
    ShownRecord,
    SkipStep,
    TrainerSlept,
    TrainItem,
    TrainReply,
    TrainRequest,
)
from gcore_core.runtime.relay import Relay
from gcore_core.store.client import StoreReader
from gcore_core.wire.gathering import Gathering, shared
from gcore_core.wire.retry import insist, keep_alive
from gcore_core.wire.service import Call, Service
from gcore_core.workers import final_weights
from gcore_core.workers.annotations import Annotations
from gcore_core.workers.compared_records import ComparedRecords
from gcore_core.workers.opened_records import check_duplicates, open_records
from gcore_core.workers.push import PushMemory, PushSource, exhaust, exported, sends_adapter
from gcore_core.workers.run_journals import TensorJournal, TokenJournal

T = TypeVar("T")
# Weights of more bytes are not hashed where a run must end within seconds; these take a second.
_URGENT_BYTES = 1 << 30

#: One reply for each shard; None for a shard that gets no answer.
_Replies = list[TrainReply | None]


class TrainerShell:
    """Serves one rank of the trainer.

    push_path: the file in shared memory for the buckets of pushes.
    rank: its number; rank 0 sends pushes.
    journal: gets the digests of the tensors of each push.
    sentinel: measures the log-probs of every step; None where nothing watches them.
    followers: in rank 0, the workers of all other ranks.
    annotations: where the columns go that the role gives; None where it gives none.
    adapters: all receivers of pushes take an adapter alone.
    tokens: gets the records that a sentinel compares; None where they are not written.

    Ranks may meet in collectives, and then all must do the same in the same order. The lead asks
    all of them for one thing after the other, and a backend's calls run in the order of requests.
    An export is not over at once: rank 0 exports as receivers load. So before it does what may need
    the other ranks, it closes the push that is open; they do it behind their part of the export.
    """

    def __init__(
        self,
        backend: Trainer,
        store: StoreReader,
        compute: Compute,
        push_path: Path,
        rank: int,
        journal: TensorJournal | None = None,
        sentinel: Sentinel | None = None,
        followers: Sequence[Peer] = (),
        *,
        annotations: Annotations | None = None,
        adapters: bool = False,
        tokens: TokenJournal | None = None,
    ) -> None:
        self._journal = journal
        self._backend = backend
        self._store = store
        self._annotations = annotations
        self._compute = WakingCompute(backend, compute)
        self._memory = PushMemory(push_path)
        self._rank = rank
        self._requests = Gathering(1)  # of one part: a repeated request gets the reply of the first
        self._keys: list[tuple[int, int]] = []  # (ordinal, sample) of the prepared records
        self._counts = (0, 0)  # of their actions: trained, masked
        self._compared = ComparedRecords(backend, sentinel) if sentinel is not None else None
        self._push: PushSource | None = None  # the push that is open
        self._followers = followers
        self._adapters = adapters
        self._tokens = tokens
        self._following: list[asyncio.Task[None]] = []  # of the open push, by rank
        self._export: asyncio.Task[None] | None = None  # but in rank 0: of the latest push
        # The step that was saved last, and the hash of its weights.
        self._hashing: tuple[int, asyncio.Future[str]] | None = None
        self._urgent = False  # whether this process may be ended within seconds
        self._stamps: dict[int, int] = {}  # version -> stamp of the weights that were pushed

    def register(self, service: Service, relay: Relay) -> None:
        relay.add(PREPARE_RANKS, self.prepare)
        relay.add(TRAIN_RANKS, self.train)
        relay.add(EVALUATE_RANKS, self.evaluate)
        if self._annotations is not None:
            relay.add(ANNOTATE_RANKS, self.annotate)
            service.add(RELEASE_STEPS, self.release_steps)
        service.add(TRAINER_SLEEP, self.sleep)
        service.add(SKIP_STEP, self.skip)
        service.add(DIAGNOSE, self.diagnose)
        service.add(SHOW_COMPARED, self.show_compared)
        service.add(SCORE_LAST, self.score_last)
        service.add(PUSH_BEGIN, self.begin_push)
        service.add(PUSH_EXPORTED, self.exported)
        service.add(PUSH_PLAN, self.plan)
        service.add(PUSH_BUCKET, self.bucket)
        service.add(SAVE_PRETRAINED, self.save_pretrained)
        service.add(PLACE_WEIGHTS, self.place_weights)
        service.add(SAVE_STATE, self.save_state)
        service.add(FINISH_SAVE, self.finish_save)

    async def annotate(self, parts: list[AnnotateRequest], call: Call) -> list[AnnotateReply]:
        """Gives the role's columns of the records of all shards; for each shard, where they lie.

        All ranks are asked at once, since the backend may need the others.
        """

        async def act(_: list[list[AnnotateRequest]]) -> list[AnnotateReply]:
            annotations = self._annotations
            if annotations is None or not isinstance(self._backend, Annotates):
                raise ContractError("this trainer gives no columns", where="annotate")
            step = parts[0].step
            items = [item for part in parts for item in part.items]
            records = await open_records(self._store, items, step)
            # In the order of ``prepare``: so a pass over them has the same shape on every start.
            keys = [(record.ordinal, record.sample) for record in records]
            order = sorted(range(len(records)), key=keys.__getitem__)
            answers = await self._together(
                annotations.of, self._backend, [records[i] for i in order]
            )
            given = dict(zip(order, answers, strict=True))
            replies = []
            first = 0
            for part in parts:
                own = [given[first + i] for i in range(len(part.items))]
                first += len(part.items)
                chunk = await annotations.put(step, own)
                replies.append(AnnotateReply(self._backend.version, chunk))
            return replies

        replies: list[AnnotateReply] = await self._requests.run_once(
            ("annotate", parts[0].step), parts, act
        )
        return replies

    async def release_steps(self, request: ReleaseSteps, call: Call) -> Nothing:
        if self._annotations is not None:
            self._annotations.release(request)
        return Nothing()

    async def prepare(self, parts: list[PrepareRequest], call: Call) -> list[list[list[float]]]:
        """Prepares the records of all shards.

        Returns for each shard a row of scalars for each of its items. A row has the scalars in the
        order in which the request names them.
        """

        async def act(_: list[list[PrepareRequest]]) -> list[list[list[float]]]:
            items = [item for part in parts for item in part.items]
            self._check_stamps(items, parts[0].step)
            records = await open_records(self._store, items, parts[0].step)
            records.sort(key=lambda record: (record.ordinal, record.sample))
            check_duplicates(records, f"step {parts[0].step}")
            scalars_of = await self._together(self._prepare, parts[0], records)
            return [
                [scalars_of[item.ordinal, item.sample] for item in part.items] for part in parts
            ]

        rows: list[list[list[float]]] = await self._requests.run_once(
            ("prepare", parts[0].step), parts, act
        )
        return rows

    def _check_stamps(self, items: Sequence[TrainItem], step: int) -> None:
        """Checks that fresh records were sampled by the weights whose version they name.

        Rank 0 knows the stamp of each version that it has pushed since it was started. Of any other
        version, of records without a stamp, and in other ranks, nothing is checked.

        Raises WeightMismatch where a record's stamp is another one.
        """
        self._note_stamp()
        # Only of fresh records: where generation runs ahead of training, and generators are lost,
        # a record of older weights may have a later stamp.
        for item in (item for item in items if item.version == step):
            pushed = self._stamps.get(item.last_version, item.stamp)
            if UNSEALED not in (item.stamp, pushed) and item.stamp != pushed:
                holders = [str(v) for v, stamp in self._stamps.items() if stamp == item.stamp]
                raise WeightMismatch(
                    f"record {name_of(item.ordinal, item.sample)} says that version "
                    f"{item.last_version} has sampled it, and other weights have",
                    where=f"step {step}",
                    why=f"they are those of version {', '.join(holders) or 'none that was pushed'}",
                    todo="the generator's version is another than that of the weights it holds",
                )

    def _note_stamp(self) -> None:
        """Notes the stamp of the weights of the open push, if all its tensors are filled."""
        push = self._push
        if push is not None and push.stamp:
            self._stamps[push.key[0]] = push.stamp

    def _prepare(
        self, request: PrepareRequest, records: list[TrainRecord]
    ) -> dict[tuple[int, int], list[float]]:
        self._keys = [(record.ordinal, record.sample) for record in records]
        if len(set(self._keys)) != len(self._keys):
            raise ContractError("two shards sent the same record", where=f"step {request.step}")
        self._counts = _count_actions(records)  # before the backend, which may change its arrays
        if self._compared is not None:
            self._compared.keep(request.step, records)
        rows = self._backend.prepare(records, frozenset(request.scalars))
        return {
            key: [row[name] for name in request.scalars]
            for key, row in zip(self._keys, rows, strict=True)
        }

    async def train(self, parts: list[TrainRequest], call: Call) -> list[TrainReply | None]:
        """Runs the updates of a step.

        The lead gets the reply. Another shard gets what the sentinel measured of its groups, or
        None without one.
        """

        async def act(_: list[list[TrainRequest]]) -> list[TrainReply | None]:
            # Who still takes a push gets no tensors of after the update.
            await self._close_push()
            return await self._compute(self._train, parts)

        replies: _Replies = await self._requests.run_once(("train", parts[0].step), parts, act)
        return replies

    def _train(self, parts: list[TrainRequest]) -> list[TrainReply | None]:
        """Calls the backend with the advantages in the order of the prepared records.

        ``busy_s`` is processor time where the backend does not say it: a rank that waits for
        another one uses none, so it is the rank's own work.
        """
        advantage_of = {
            (ordinal, sample): value for part in parts for ordinal, sample, value in part.advantages
        }
        if advantage_of.keys() != set(self._keys):
            raise ContractError(
                "the advantages are not those of the prepared records",
                where=f"step {parts[0].step}",
            )
        advantages = np.array([advantage_of[key] for key in self._keys], np.float64)
        began_s = time.process_time()
        metrics = self._backend.train(
            parts[0].step, advantages, parts[0].minibatches, parts[0].epochs
        )
        busy_s = metrics.pop("busy_s", time.process_time() - began_s)
        version = self._backend.version
        if self._compared is None:
            reply = TrainReply(metrics, version, busy_s, *self._counts)
            return [reply, *[None] * (len(parts) - 1)]
        by_shard = self._compared.by_shard(
            [{ordinal for ordinal, _, _ in part.advantages} for part in parts]
        )
        if self._tokens is not None:
            self._tokens.write(parts[0].step, self._compared.trained, advantage_of)
        reply = TrainReply(metrics, version, busy_s, *self._counts, by_shard[0])
        return [reply, *(TrainReply({}, version, groups=groups) for groups in by_shard[1:])]

    async def evaluate(
        self, parts: list[EvaluateRequest], call: Call
    ) -> list[dict[str, tuple[float, float]]]:
        """Computes the objective on the records of all shards; every shard gets the same sums."""

        async def act(_: list[list[EvaluateRequest]]) -> list[dict[str, tuple[float, float]]]:
            items = [item for part in parts for item in part.items]
            values = [value for part in parts for value in part.advantages]
            records = await open_records(self._store, items, parts[0].step)
            order = sorted(range(len(items)), key=lambda i: (items[i].ordinal, items[i].sample))
            sums = await self._together(
                cast(EvaluatesLoss, self._backend).evaluate,
                [records[i] for i in order],
                np.array([values[i] for i in order], np.float64),
            )
            return [sums] * len(parts)

        replies: list[dict[str, tuple[float, float]]] = await self._requests.run_once(
            ("evaluate", parts[0].step), parts, act
        )
        return replies

    async def diagnose(self, request: DiagnoseRequest, call: Call) -> list[Finding]:
        """Says what the records of the step that was trained last show of the cause of an alarm."""
        compared = self._compared
        if compared is None:
            return []

        def findings() -> list[Finding]:
            backend = self._backend
            exported = backend.diagnose_export() if isinstance(backend, DiagnosesExport) else []
            own = compared.diagnose(request)
            weight = max((finding.weight for finding in own), default=1.0)
            return own + [replace(finding, weight=weight) for finding in exported]

        return await self._together(findings)

    async def show_compared(self, request: DiagnoseRequest, call: Call) -> list[ShownRecord]:
        """Shows some records of the step that was trained last, for a generator to explain."""
        return [] if self._compared is None else self._compared.shown(request)

    async def score_last(self, request: ScoreLast, call: Call) -> list[ShownRecord]:
        """Scores some records of the last step under the weights that it holds now."""

        async def act(_: list[ScoreLast]) -> list[ShownRecord]:
            compared = self._compared
            if compared is None or self._backend.version != request.version:
                return []
            return await self._together(compared.score_last, request)

        scored: list[ShownRecord] = await self._requests.run_once(
            ("score_last", request.version), request, act
        )
        return scored

    async def skip(self, request: SkipStep, call: Call) -> Nothing:
        """Ends a step that has nothing to train on."""

        async def act(_: list[SkipStep]) -> None:
            await self._close_push()
            await self._compute(self._backend.skip, request.step)

        await self._requests.run_once(("skip", request.step), request, act)
        return Nothing()

    async def sleep(self, request: Nothing, call: Call) -> TrainerSlept:
        """Lets the backend give its memory back; whatever it is asked next wakes it.

        A push that is open is given up first: it would wake the backend at once.
        """
        await self._close_push()
        return await self._compute.sleep()

    async def _together(self, work: Callable[..., T], *args: Any) -> T:
        """Runs what may need the other ranks, such as collectives; a push that is open is given up.

        Where no other rank waits for this one (one rank, or any rank but the first), the push goes
        on.
        """
        if self._followers:
            await self._close_push()
        return await self._compute(work, *args)

    # -- pushes ------------------------------------------------------------------------------------

    async def begin_push(self, request: BeginPush, call: Call) -> Nothing:
        """Begins the push of ``version``; rank 0 is asked, and has the other ranks take part.

        So it makes no difference when the one who asked is lost: all ranks export, or none does.
        """
        if self._backend.version != request.version:
            raise ContractError(
                (
                    f"asked to push version {request.version}, the trainer holds "
                    f"{self._backend.version}"
                ),
                where="push",
            )
        await self._requests.run_once((request.version, request.attempt), request, self._begin_push)
        return Nothing()

    async def _begin_push(self, requests: list[BeginPush]) -> None:
        """Begins this rank's part of the export, before anything that it is asked later.

        Rank 0 returns when all ranks have: what is asked of them next finds them in the same order.
        """
        (request,) = requests
        adapter = self._adapters and sends_adapter(self._backend, request.transport)
        if self._rank:
            work = self._compute(lambda: exhaust(exported(self._backend, adapter)))
            self._export = asyncio.ensure_future(work)
            return
        await self._close_push()
        source = await self._compute(
            PushSource,
            self._backend,
            self._memory,
            self._compute,
            request,
            self._journal,
            self._store.node,
            adapter,
        )
        # It is open before the others are asked: where one of them refuses, what is asked of this
        # rank next ends the export that the rest have begun.
        self._push = source
        await asyncio.gather(*(insist(rank, PUSH_BEGIN, request) for rank in self._followers))
        self._following = [
            asyncio.ensure_future(self._follow(rank, request, source)) for rank in self._followers
        ]

    async def _follow(self, rank: Peer, request: BeginPush, source: PushSource) -> None:
        """Waits until another rank's part of the export is over, which ends when this rank's does.

        Receivers get the error of a rank that cannot export.
        """
        try:
            await insist(rank, PUSH_EXPORTED, request)
        except GcoreError as error:
            source.fail(error)

    async def exported(self, request: BeginPush, call: Call) -> Nothing:
        """Returns when this rank's part of the export is over; raises what it raised."""
        if self._export is not None:
            with keep_alive(call.progress):  # how fast it goes is decided by those who pull
                await shared(self._export)
        return Nothing()

    async def _close_push(self) -> None:
        self._note_stamp()
        before = self._push
        self._push = None
        if before is not None:
            await before.close()
            await asyncio.gather(*self._following)

    def _source(self, request: PlanRequest | BucketRequest) -> PushSource:
        if self._push is None or self._push.key != (request.version, request.attempt):
            raise ContractError(
                f"no push of version {request.version}, attempt {request.attempt}, is open",
                where="push",
            )
        return self._push

    async def plan(self, request: PlanRequest, call: Call) -> WeightPlan:
        return self._source(request).plan

    async def bucket(self, request: BucketRequest, call: Call) -> Bucket:
        return await self._source(request).bucket(request, call)

    async def save_pretrained(self, request: SaveWeights, call: Call) -> Nothing:
        """Writes the final weights next to their place."""
        directory = Path(request.directory)
        with final_weights.writing(directory):
            await self._together(self._backend.save_pretrained, final_weights.partial(directory))
        return Nothing()

    async def place_weights(self, request: PlaceWeights, call: Call) -> Nothing:
        """Moves the final weights to their place; those that are not whole are removed."""
        directory = Path(request.directory)
        act = final_weights.place if request.whole else final_weights.discard
        with final_weights.writing(directory):
            await asyncio.to_thread(act, directory)
        return Nothing()

    async def save_state(self, request: SaveState, call: Call) -> Nothing:
        """Begins a save if the backend can save while it trains; else does the whole save.

        Either way the hash of the weights is begun, and ``finish_save`` waits for it.
        """

        async def act(_: list[SaveState]) -> Nothing:
            backend = self._backend
            save = backend.begin_save if isinstance(backend, SavesInBackground) else backend.save
            try:
                await self._saving(save, Path(request.directory))
            finally:
                # The hash runs in the backend's thread before whatever is asked next, so it is of
                # the weights that were saved. That thread is idle until the next step has its
                # records. A rank that cannot save takes part: the export of the others needs it.
                hashing = asyncio.ensure_future(self._together(self._hash_weights, request.step))
                self._hashing = request.step, hashing
            return Nothing()

        reply: Nothing = await self._requests.run_once(("save", request.step), request, act)
        return reply

    def _hash_weights(self, version: int) -> str:
        """Returns the hash of the weights, in rank 0; the others only run through the export.

        It is "" where time is lacking, and for weights that have changed since.
        """
        if self._backend.version != version:
            return ""
        weights = WeightsHash()
        is_large = sum(spec.nbytes for spec in self._backend.weight_specs()) > _URGENT_BYTES
        for spec, content in self._backend.export_weights():
            if not self._rank and not (is_large and self._urgent):
                weights.add(spec, np.ascontiguousarray(content).data)
        return "" if self._rank or (is_large and self._urgent) else weights.hexdigest()

    async def finish_save(self, request: SaveState, call: Call) -> SavedState:
        """Waits for a save that runs in the background, and for the hash of what is saved."""

        async def act(_: list[None]) -> SavedState:
            backend = self._backend
            if isinstance(backend, SavesInBackground):
                await self._saving(backend.finish_save)
            step, hashing = self._hashing or (-1, None)
            if hashing is None or step != request.step:
                return SavedState()
            return SavedState(await hashing)

        self._urgent |= request.urgent
        # Not with the request: who finishes the save after the lead was lost may ask with
        # another urgency, and gets the first one's answer.
        reply: SavedState = await self._requests.run_once(("saved", request.step), None, act)
        return reply

    async def _saving(self, work: Callable[..., None], *args: Any) -> None:
        """Runs a save; an error of the disk is the checkpoint's failure, not the trainer's."""
        try:
            await self._together(work, *args)
        except OSError as error:
            raise CheckpointError(
                f"the state cannot be saved: {error.strerror}.",
                where=str(error.filename or args),
                todo="see that there is space, and that this user may write there",
            ) from error


def _count_actions(records: Sequence[TrainRecord]) -> tuple[int, int]:
    """Counts the actions of some records: (those that are trained on, those that are masked).

    A record without the column, which has actions of a kind of its own, counts as one action.
    """
    one = np.ones(1, np.uint8)
    masks = [record.columns.get("action_mask", one) for record in records]
    trained = sum(int(np.count_nonzero(mask)) for mask in masks)
    return trained, sum(mask.size for mask in masks) - trained


class WakingCompute:
    """Runs a backend's calls as ``Compute`` does, and wakes it before a call where it sleeps.

    So nobody has to know what a trainer that sleeps may be asked: a generator that was started
    again in the middle of a rollout gets its weights.
    """

    def __init__(self, backend: Trainer, compute: Compute) -> None:
        self._backend = backend
        self._compute = compute
        self._asleep = False
        self._wake_s = 0.0  # seconds that the wake since the latest sleep took
        self._slept = TrainerSlept(0.0, 0.0)  # of the latest sleep

    async def __call__(self, work: Callable[..., T], *args: Any) -> T:
        return await self._compute(self._awake, work, args)

    async def sleep(self) -> TrainerSlept:
        """Puts the backend to sleep. Where it sleeps, says again what it said then.

        Raises ContractError for a backend that cannot.
        """
        return await self._compute(self._sleep)

    def _awake(self, work: Callable[..., T], args: tuple[Any, ...]) -> T:
        if self._asleep and isinstance(self._backend, SleepsInRollout):
            began_s = time.perf_counter()
            self._backend.wake()
            self._asleep = False
            self._wake_s = time.perf_counter() - began_s
        return work(*args)

    def _sleep(self) -> TrainerSlept:
        if not isinstance(self._backend, SleepsInRollout):
            raise ContractError("this trainer cannot sleep.", where="placement.sleep_in_rollout")
        if self._asleep:
            return self._slept
        began_s = time.perf_counter()
        self._backend.sleep()
        self._asleep = True
        self._slept = TrainerSlept(time.perf_counter() - began_s, self._wake_s)
        self._wake_s = 0.0
        return self._slept
