"""Simulates whole runs on virtual time.

The step program, the ledger and the worker shells are the real ones; the network between them has
weather. One seed decides every delay and every loss, so a failure is repeated by its seed. Time
passes only when no task can go on. If none ever can, the run is deadlocked and says so.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar, TypeVarTuple

import numpy as np

from gcore_core.contract.columns import ColumnSpec, action_versions
from gcore_core.contract.context import WorkerContext
from gcore_core.contract.controller import Controller
from gcore_core.contract.factories import FactorySpec
from gcore_core.contract.job_settings import (
    POLICY,
    CheckpointSettings,
    EvaluationSettings,
    RewardSettings,
    RunSettings,
)
from gcore_core.contract.placement import Device, Need
from gcore_core.contract.records import TRAINED, StepReport, WeightPlan
from gcore_core.contract.scorer import Score, ScoredRecord
from gcore_core.contract.trainer import TrainRecord
from gcore_core.controllers.config import SyncConfig
from gcore_core.controllers.context import ControllerContext, make_context
from gcore_core.controllers.step_program import StepProgram
from gcore_core.controllers.synchronous import SynchronousController
from gcore_core.runtime.agreements import AgreementService
from gcore_core.runtime.messages import (
    BEGIN_CHECKPOINT,
    CARRIED,
    COMMIT_CHECKPOINT,
    OPEN_CHECKPOINT,
    PUBLISHED,
    STEP_END,
    Carried,
    CheckpointPlace,
    CommitCheckpoint,
    Nothing,
    OpenCheckpoint,
    Published,
    StepEnd,
)
from gcore_core.runtime.relay import Relay
from gcore_core.runtime.worker_settings import (
    GeneratorSettings,
    JobFacts,
    PlacementFacts,
    TrainedFacts,
)
from gcore_core.store.client import StoreReader, StoreWriter
from gcore_core.store.server import SlabService, StoreSpec
from gcore_core.wire.in_process import InlineNetwork, Weather
from gcore_core.wire.service import Call
from gcore_core.workers.annotations import Annotations, AnnotatorShell
from gcore_core.workers.generator import GeneratorShell
from gcore_core.workers.role_sampler import RoleSampler
from gcore_core.workers.scorer import NamedScorer, ScorerShell
from gcore_core.workers.trainer import TrainerShell
from gcore_testing import fake
from gcore_testing.fake_judge import FakeAsker
from gcore_testing.faults import Faults, LastingService, Life, MortalService

T = TypeVar("T")
_Ts = TypeVarTuple("_Ts")
Program = Callable[[SyncConfig, ControllerContext], Controller]
SECRET = b"secret of a simulated run"
#: A role that gives a column, and the column.
TEACHER = "teacher"
TEACHER_COLUMN = "teacher_logp"
MOST_TURNS = 300_000  # turns of a test's event loop: twenty times as many as a run needs


class Deadlock(Exception):
    """Says that no task can go on and nothing is scheduled, or that a task goes on without end."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Is an event loop whose clock jumps to the next timer instead of waiting for it.

    It asks the system for nothing: what it runs has no sockets and no threads. That, and timers
    that are compared as tuples, makes a run a little faster.
    """

    # Of the base class: what runs in the next turn, and whether that is the last one.
    _ready: deque[asyncio.Handle]
    _stopping: bool

    def __init__(self, most_turns: int = 1 << 62) -> None:
        self.now_s = 0.0
        self._turns = 0
        self._most_turns = most_turns
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = itertools.count()  # timers of one time run in the order of their making
        super().__init__()

    def time(self) -> float:
        return self.now_s

    def call_at(
        self,
        when: float,
        callback: Callable[[*_Ts], object],
        *args: *_Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def call_soon_threadsafe(
        self,
        callback: Callable[[*_Ts], object],
        *args: *_Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Is told by a timer of its end; ``_run_once`` throws it away when its time has come."""

    def _run_once(self) -> None:
        """Takes one turn, as the base class does: runs what is ready, and what is due."""
        self._turns += 1
        timers = self._timers
        if not self._ready and not self._stopping:
            while timers and timers[0][2].cancelled():
                heapq.heappop(timers)
            if not timers:
                self._raise_deadlock()
            self.now_s = max(self.now_s, timers[0][0])
        if self._turns % self._most_turns == 0:
            self._raise_deadlock()
        while timers and timers[0][0] <= self.now_s:
            self._ready.append(heapq.heappop(timers)[2])
        for _ in range(len(self._ready)):
            handle = self._ready.popleft()
            if not handle.cancelled():
                handle._run()

    def _raise_deadlock(self) -> NoReturn:
        raise Deadlock(f"at {self.now_s:.3f} s of virtual time, turn {self._turns} of the loop")

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*_Ts], T], *args: *_Ts
    ) -> asyncio.Future[T]:
        """Runs a thread's work at once: nobody waits for a thread in virtual time."""
        done: asyncio.Future[T] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # isolation point: it is raised where the work is awaited
            done.set_exception(error)
        return done


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine on a virtual-time loop of its own."""
    loop = VirtualLoop(MOST_TURNS)
    try:
        return loop.run_until_complete(main)
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        try:
            loop.run_until_complete(_settle())
        finally:
            loop.close()


async def _settle() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*tasks, return_exceptions=True)


class Storm:
    """Delays every message, loses some and lets some arrive twice.

    The sender of a lost message sees a broken connection, or nothing until its deadline expires.

    lost: (sender, method) -> how often it was lost; a worker's number is left out of the sender.
    """

    def __init__(
        self,
        seed: int,
        *,
        lose: float = 0.04,
        silently: float = 0.02,
        twice: float = 0.04,
        delay_s: float = 0.5,
    ) -> None:
        self._random = random.Random(seed)
        self._lose = lose
        self._silently = silently
        self._twice = twice
        self._delay_s = delay_s
        self.lost: Counter[tuple[str, str]] = Counter()

    async def travel(self, source: str, target: str, method: str) -> int:
        await asyncio.sleep(self._random.uniform(0, self._delay_s))
        fate = self._random.random()
        if fate < self._silently + self._lose:
            self.lost[source.rstrip("0123456789."), method] += 1
            if fate < self._silently:
                await asyncio.get_running_loop().create_future()  # for ever
            return 0
        return 2 if fate < self._silently + self._lose + self._twice else 1


class TimedCompute:
    """Runs work after a random time, one piece after the other, as a worker's thread does."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._lock = asyncio.Lock()

    async def __call__(self, work: Callable[..., T], *args: Any) -> T:
        async with self._lock:
            await asyncio.sleep(self._random.uniform(0, 0.2))
            return work(*args)


@dataclass(frozen=True, kw_only=True)
class SimulatedJob:
    """Sets the size and the settings of a simulated run.

    If there are several ranks, the weights of the first are pushed. Ranks do not communicate.

    prompts, samples: groups of a step, and records of a group.
    filter: a factory.
    store_bytes: budget of each machine's store.
    takes_stale: whether records of older weights may be trained on.
    judges: replicas of a role that one more reward asks; 0: there is no such reward.
    level: "record" or "group", of that reward.
    placement: a policy that moves devices between ``replicas`` cells, which both roles have.
    overlaps: whether that policy is told that generators draw while trainers work.
    rests: whether generators sleep while the trainer works.
    owns_replicas: whether each shard asks its own replicas only.
    annotators: workers of a role from whose column the trainer learns.
    pushes: whether generators get the policy's weights.
    stop_after: the lead is told to stop when this step has been reported; -1: never.
    resumed: the checkpoint that the run goes on from.
    """

    shards: int = 4
    replicas: int = 2
    ranks: int = 1
    scorers: int = 2
    steps: int = 3
    prompts: int = 8
    samples: int = 4
    max_new_tokens: int = 8
    late_end: int = 1
    minibatches: int = 2
    max_rounds: int = 10
    max_skipped_steps: int = 10
    seed: int = 0
    evaluate_prompts: int = 6
    filter: str = "gcore_core.builtin.filters:KeepAll"
    balance: FactorySpec = FactorySpec("gcore_core.builtin.balancer:InOrder")
    deterministic: bool = False
    store_bytes: int = 1 << 20
    takes_stale: bool = False
    judges: int = 0
    level: str = "record"
    placement: FactorySpec | None = None
    overlaps: bool = False
    rests: bool = False
    owns_replicas: bool = False
    annotators: int = 0
    pushes: bool = True
    checkpoint_every: int = 0
    evaluate_every: int = 0
    stop_after: int = -1
    resumed: CommitCheckpoint | None = None


@dataclass
class Outcome:
    """Holds what a simulated run left behind.

    reports: the steps' reports, in order.
    batches: for each step, (ordinal, sample, minibatch) of the records that the trainer got.
    stale: for each step, the ordinals that older weights had sampled.
    logits: the ranks' weights at the end.
    ledger: the ledger's state in the latest report.
    verdicts: (number of its shard's step, ordinal) -> all verdicts that the ordinal got.
    virtual_s: how long the run took, in virtual time.

    The others are there for any step program:

    letters: for each step, (ordinal, sample) -> the actions of the record.
    scored: (ordinal, sample) -> its latest score in training.
    begun: for each step, (ordinal, sample) -> the version that sampled the record's first action.
    weights: version -> the first rank's table of logits.
    versions: replica -> the pushes that it confirmed.
    published: the versions that were published.
    checkpoints: the checkpoints that were committed.
    """

    reports: list[StepReport] = field(default_factory=list)
    batches: list[list[tuple[int, int, int]]] = field(default_factory=list)
    stale: list[set[int]] = field(default_factory=list)
    logits: list[float] = field(default_factory=list)
    ledger: dict[str, Any] = field(default_factory=dict)
    verdicts: dict[tuple[int, int], list[str]] = field(default_factory=dict)
    virtual_s: float = 0.0
    letters: list[dict[tuple[int, int], list[int]]] = field(default_factory=list)
    scored: dict[tuple[int, int], float] = field(default_factory=dict)
    begun: list[dict[tuple[int, int], int]] = field(default_factory=list)
    weights: dict[int, np.ndarray] = field(default_factory=dict)
    versions: dict[str, list[int]] = field(default_factory=dict)
    published: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # for a person
    checkpoints: list[CommitCheckpoint] = field(default_factory=list)


class _RecordingTrainer(fake.FakeTrainer):
    def __init__(self, outcome: Outcome, context: WorkerContext, rank: int) -> None:
        (toward,) = context.given or ("",)
        super().__init__(fake.FakeTrainerConfig(toward=toward), context)
        self._outcome = outcome
        self._steps = itertools.count()
        self._toward = toward
        self._is_first = rank == 0

    def prepare(self, records: Any, scalars: frozenset[str]) -> list[dict[str, float]]:
        """Records the ranks' parts of a step as one batch."""
        step = next(self._steps)
        outcome = self._outcome
        if step == len(outcome.batches):
            outcome.batches.append([])
            outcome.stale.append(set())
            outcome.letters.append({})
            outcome.begun.append({})
        outcome.batches[step] = sorted(
            [
                *outcome.batches[step],
                *((r.ordinal, r.sample, r.minibatch) for r in _checked(records)),
            ]
        )
        letters = {(r.ordinal, r.sample): r.columns["action_ids"].tolist() for r in records}
        outcome.letters[step] |= letters
        outcome.stale[step] |= {r.ordinal for r in records if not r.fresh}
        outcome.begun[step] |= {(r.ordinal, r.sample): r.version for r in records}
        if self._is_first:
            outcome.weights[self.version] = self._logits
            _check_trained(records)
        _check_versions(records, outcome.weights)
        if self._toward:
            _check_annotations(records, self._toward)
        return super().prepare(records, scalars)


class _RecordingGenerator(fake.FakeGenerator):
    def __init__(
        self, outcome: Outcome, config: fake.FakeGeneratorConfig, context: WorkerContext
    ) -> None:
        super().__init__(config, context)
        self._versions = outcome.versions.setdefault(f"{context.role}.{context.rank}", [])

    def commit_weights(self, plan: WeightPlan) -> None:
        super().commit_weights(plan)
        self._versions.append(plan.version)


class _RecordingScorer(fake.FakeScorer):
    def __init__(self, outcome: Outcome, context: WorkerContext) -> None:
        super().__init__(None, context)
        self._outcome = outcome

    def score(self, records: Sequence[ScoredRecord]) -> list[Score]:
        scores = super().score(records)
        for record, score in zip(records, scores, strict=True):
            if record.ordinal >= 0:  # ordinals of evaluations are below zero
                self._outcome.scored[record.ordinal, record.sample] = score.value or 0.0
        return scores


def _check_annotations(records: list[TrainRecord], name: str) -> None:
    """Raises unless every record has the column that the role gives, with that record's values."""
    context = WorkerContext(role=TEACHER, columns=(name,))
    expected = fake.FakeAnnotator(fake.FakeAnnotatorConfig(), context).annotate(records)
    for record, columns in zip(records, expected, strict=True):
        if not np.array_equal(record.columns[name], columns[name]):
            raise AssertionError(f"{record.ordinal}, {record.sample}: not its own column {name}")


def _check_versions(records: Sequence[TrainRecord], weights: Mapping[int, np.ndarray]) -> None:
    """Raises unless each action has the log-prob of the version that its record names for it.

    weights: of the versions that are known; those of before a resumed run are not.
    """
    for record in records:
        columns = record.columns
        actions = columns["action_ids"]
        versions = action_versions(columns, len(actions), record.version)
        if versions[0] != record.version:
            raise AssertionError(
                f"{record.ordinal}, {record.sample}: version {record.version} did not begin it"
            )
        for version in np.unique(versions).tolist():
            table = weights.get(version)
            if table is None:
                continue  # a run that was resumed, or a step that was skipped
            own = versions == version
            apart = np.abs(fake.log_softmax(table)[actions[own]] - columns["logp"][own])
            if apart.max() > 1e-6:
                raise AssertionError(
                    f"{record.ordinal}, {record.sample}: version {version} did not draw "
                    f"{own.sum()} of its actions, though the record says so"
                )


def _check_trained(records: Sequence[TrainRecord]) -> None:
    """Raises unless each action is trained on."""
    for record in records:
        if not record.columns["action_mask"].all():
            raise AssertionError(f"{record.ordinal}, {record.sample}: an action is masked")


def _checked(records: list[TrainRecord]) -> list[TrainRecord]:
    """Raises unless the records are sorted by (ordinal, sample), each once; returns them."""
    keys = [(record.ordinal, record.sample) for record in records]
    if keys != sorted(set(keys)):
        raise AssertionError(f"the batch is not ordered by (ordinal, sample), each once: {keys}")
    return records


async def simulate(
    job: SimulatedJob,
    store: Path,
    weather: Weather | None = None,
    program: Program = SynchronousController,
) -> Outcome:
    """Runs a job of fakes to its end.

    store: an empty directory for slabs; checkpoints lie beside it.
    weather: decides what happens to messages; with ``Faults`` processes die too. None: nothing.
    program: makes one shard of the step program.
    """
    network = InlineNetwork(weather)
    outcome = Outcome()
    spill = store.with_name(f"{store.name}-spill")
    spec = StoreSpec(
        node="node0", directory=str(store), spill=str(spill), budget_bytes=job.store_bytes
    )
    slabs = SlabService(spec, SECRET)
    stopping = asyncio.Event()
    await _serve_supervisor(network, job, outcome, slabs, store, stopping)
    policy = WorkerContext(role="policy", given=(TEACHER_COLUMN,) if job.annotators else ())
    ranks = [_RecordingTrainer(outcome, policy, rank) for rank in range(job.ranks)]
    if job.resumed is not None:
        for rank in ranks:
            rank.load(_saved(store, job.resumed.step))
    births = _births(network, job, store, outcome)
    await _serve_ranks(network, job, store, ranks)
    if isinstance(weather, Faults):
        await weather.begin(network, births, lambda life: slabs.ended(f"{life.name}-{life.number}"))
    for name, birth in births.items():
        await network.view(name).serve(name, birth(Life(name, 0)))
    contexts = [await _context(network, job, shard) for shard in range(job.shards)]
    lead_stops = contexts[0].stopping
    controllers = [program(_config(job), context) for context in contexts]
    for controller in controllers:
        if isinstance(controller, StepProgram):
            _witness(controller, outcome)
    await _run_all(controllers, lead_stops, stopping)
    outcome.logits = [float(value) for rank in ranks for value in rank._logits]
    outcome.virtual_s = asyncio.get_running_loop().time()
    return outcome


async def _run_all(
    controllers: Sequence[Controller], lead_stops: asyncio.Event, stopping: asyncio.Event
) -> None:
    """Runs all controllers to their end; when the lead is to stop, only until the lead ends."""

    async def tell() -> None:
        await stopping.wait()
        lead_stops.set()

    running = [asyncio.ensure_future(controller.run()) for controller in controllers]
    telling = asyncio.ensure_future(tell())
    everybody: asyncio.Future[Any] = asyncio.gather(*running)
    lead: asyncio.Future[Any] = running[0]
    try:
        await asyncio.wait([everybody, lead], return_when=asyncio.FIRST_COMPLETED)
        if everybody.done() or not stopping.is_set():
            await everybody
    finally:
        for task in (*running, telling):
            task.cancel()
        await asyncio.gather(*running, telling, return_exceptions=True)


def _saved(store: Path, step: int) -> Path:
    return store.with_name(f"{store.name}-step{step}") / POLICY


async def _serve_supervisor(
    network: InlineNetwork,
    job: SimulatedJob,
    outcome: Outcome,
    slabs: SlabService,
    store: Path,
    stopping: asyncio.Event,
) -> None:
    async def step_end(request: StepEnd, call: Call) -> Nothing:
        if not outcome.reports or outcome.reports[-1].step != request.report.step:
            outcome.reports.append(request.report)
        outcome.ledger = request.ledger
        outcome.notes += request.notes
        if request.report.step == job.stop_after:
            stopping.set()
        return Nothing()

    async def published(request: Published, call: Call) -> Nothing:
        outcome.published.append(request.version)
        return Nothing()

    async def carried(request: Carried, call: Call) -> Nothing:
        return Nothing()

    async def open_checkpoint(request: OpenCheckpoint, call: Call) -> CheckpointPlace:
        place = _saved(store, request.step)
        place.mkdir(exist_ok=True, parents=True)
        return CheckpointPlace(str(place.parent))

    async def begin_checkpoint(request: CommitCheckpoint, call: Call) -> Nothing:
        return Nothing()

    async def commit_checkpoint(request: CommitCheckpoint, call: Call) -> Nothing:
        outcome.checkpoints.append(request)
        return Nothing()

    service = LastingService("supervisor")
    service.add(STEP_END, step_end)
    service.add(PUBLISHED, published)
    service.add(CARRIED, carried)
    service.add(OPEN_CHECKPOINT, open_checkpoint)
    service.add(BEGIN_CHECKPOINT, begin_checkpoint)
    service.add(COMMIT_CHECKPOINT, commit_checkpoint)
    slabs.register(service)
    AgreementService(job.shards).register(service)
    await network.view("supervisor").serve("supervisor", service)


def _witness(controller: StepProgram, outcome: Outcome) -> None:
    """Records the verdicts that every step hands out, in ``outcome.verdicts``."""
    ledger = controller.producer._ledger
    steps = itertools.count()
    pop = ledger.pop_verdicts

    def witnessed() -> dict[int, tuple[str, str]]:
        verdicts = pop()
        step = next(steps)
        for ordinal, (verdict, _) in verdicts.items():
            outcome.verdicts.setdefault((step, ordinal), []).append(verdict)
        return verdicts

    ledger.pop_verdicts = witnessed  # type: ignore[method-assign]


def _datasets() -> dict[str, Any]:
    return {
        name: fake.FakeDataset(fake.FakeDataConfig(rows=16)) for name in ("train", "evaluation")
    }


def _births(
    network: InlineNetwork,
    job: SimulatedJob,
    store: Path,
    outcome: Outcome,
) -> dict[str, Callable[[Life], MortalService]]:
    """Returns process -> a function that makes its service anew, without any earlier state."""
    datasets = _datasets()
    born: dict[str, Callable[[Life], Any]] = {}
    for i in range(job.replicas):
        born[f"rollout.{i}"] = lambda life: _generator(network, job, store, life, outcome)
    for i in range(job.judges):
        born[f"judge.{i}"] = lambda life: _generator(network, job, store, life, outcome)
    for i in range(job.scorers):

        def scorer(life: Life, i: int = i) -> ScorerShell:
            backend = _RecordingScorer(outcome, WorkerContext(role="scorer"))
            reward = NamedScorer(name=f"letters{i}", scorer=backend, timeout_s=60.0)
            return ScorerShell(
                [reward],
                datasets,
                _reader(network, f"scorer{i}.0", store),
                TimedCompute(200 + i),
                _never,
            )

        born[f"scorer{i}.0"] = scorer
    if job.judges:

        def asker(life: Life) -> ScorerShell:
            view = network.view("asker.0")
            sampler = RoleSampler(
                "judge", [view.peer(f"judge.{i}") for i in range(job.judges)], lambda: None
            )
            backend = FakeAsker(None, WorkerContext(role="asker", sampler=sampler))
            reward = NamedScorer(name="asked", scorer=backend, timeout_s=60.0, sampler=sampler)
            return ScorerShell(
                [reward], datasets, _reader(network, "asker.0", store), TimedCompute(290), _never
            )

        born["asker.0"] = asker

    for i in range(job.annotators):
        born[f"{TEACHER}.{i}"] = lambda life: _annotator(network, job, store, life)

    def serving(birth: Callable[[Life], Any]) -> Callable[[Life], MortalService]:
        def serve(life: Life) -> MortalService:
            service = MortalService(life)
            birth(life).register(service)
            return service

        return serve

    return {name: serving(birth) for name, birth in born.items()}


def _reader(network: InlineNetwork, name: str, store: Path) -> StoreReader:
    """Returns what a process reads with."""
    return StoreReader(store, "node0", SECRET, network.view(name).peer("supervisor"))


def _generator(
    network: InlineNetwork,
    job: SimulatedJob,
    store: Path,
    life: Life,
    outcome: Outcome,
) -> GeneratorShell:
    view = network.view(life.name)
    role, _, number = life.name.partition(".")
    drawing = fake.FakeGeneratorConfig(max_new_tokens=job.max_new_tokens, late_end=job.late_end)
    backend = _RecordingGenerator(outcome, drawing, WorkerContext(role=role, rank=int(number)))
    writer = StoreWriter(
        store, "node0", SECRET, view.peer("supervisor"), f"{life.name}-{life.number}"
    )
    settings = GeneratorSettings(
        run=RunSettings(seed=job.seed, deterministic=job.deterministic),
        shards=job.shards,
        follows=role == "rollout" and job.pushes,
        gather_s=0.05,
        batch_s=0.0,
        aborts=True,
    )
    compute = TimedCompute(100 + int(number))
    return GeneratorShell(
        backend,
        _datasets(),
        writer,
        compute,
        view,
        settings,
        restarted=life.number > 0,
        replica=int(number),
    )


def _annotator(
    network: InlineNetwork, job: SimulatedJob, store: Path, life: Life
) -> AnnotatorShell:
    number = int(life.name.rpartition(".")[2])
    context = WorkerContext(role=TEACHER, rank=number, columns=(TEACHER_COLUMN,))
    backend = fake.FakeAnnotator(fake.FakeAnnotatorConfig(), context)
    peer = network.view(life.name).peer("supervisor")
    writer = StoreWriter(store, "node0", SECRET, peer, f"{life.name}-{life.number}")
    compute = TimedCompute(400 + number)
    columns = [ColumnSpec(name=name) for name in context.columns]
    annotations = Annotations(columns, writer, job.shards)
    return AnnotatorShell(backend, annotations, compute, job.shards)


async def _serve_ranks(
    network: InlineNetwork, job: SimulatedJob, store: Path, ranks: Sequence[fake.FakeTrainer]
) -> None:
    for i, rank in enumerate(ranks):
        reader = _reader(network, f"policy.{i}", store)
        compute = TimedCompute(300 + i)
        view = network.view(f"policy.{i}")
        others = range(1, len(ranks)) if i == 0 else ()
        followers = [view.peer(f"policy.{other}") for other in others]
        path = store / f"push{i or ''}"
        policy = TrainerShell(rank, reader, compute, path, i, followers=followers)
        service = LastingService(f"policy.{i}")
        policy.register(service, Relay(view, service, job.shards))
        await view.serve(service.name, service)


def _never(code: int) -> None:
    raise AssertionError("a scorer gave up although nothing hangs")


async def _context(network: InlineNetwork, job: SimulatedJob, shard: int) -> ControllerContext:
    resumed = job.resumed
    state = resumed.state if resumed else {}
    facts = JobFacts(
        run=RunSettings(steps=job.steps, seed=job.seed, deterministic=job.deterministic),
        evaluation=EvaluationSettings(
            every=job.evaluate_every, prompts=job.evaluate_prompts, show=0
        ),
        checkpoint=CheckpointSettings(every=job.checkpoint_every),
        shard=shard,
        shards=job.shards,
        rows={"train": 16, "evaluation": 16},
        replicas=[f"rollout.{i}" for i in range(job.replicas)],
        owns_replicas=job.owns_replicas,
        trained={POLICY: TrainedFacts(ranks=[[f"policy.{i}"] for i in range(job.ranks)])},
        scorers={f"scorer{i}.0": [f"letters{i}"] for i in range(job.scorers)}
        | ({"asker.0": ["asked"]} if job.judges else {}),
        rewards={f"letters{i}": RewardSettings() for i in range(job.scorers)}
        | ({"asked": RewardSettings()} if job.judges else {}),
        of_groups=["asked"] if job.judges and job.level == "group" else [],
        judges={"judge": [f"judge.{i}" for i in range(job.judges)]} if job.judges else {},
        annotators=(
            {TEACHER: [f"{TEACHER}.{i}" for i in range(job.annotators)]} if job.annotators else {}
        ),
        takes_stale=job.takes_stale,
        midway_weights=True,
        placement=_placement(job),
        asleep_in_training=["rollout", "judge"] if job.rests else [],
        start_step=resumed.step if resumed else 0,
        next_ordinal=state.get("ledger", {}).get("next_ordinal", 0),
        state=state,
    )
    factories = {
        "advantage": FactorySpec(
            "gcore_testing.fake:FakeAdvantage",
            "gcore_testing.fake:FakeAdvantageConfig",
            {"group_size": job.samples},
        ),
        "filter": FactorySpec(job.filter),
        "balance": job.balance,
        **({"placement": job.placement} if job.placement else {}),
    }
    view = network.view(f"controller.{shard}")
    service = LastingService(f"controller.{shard}")
    await view.serve(service.name, service)
    return make_context(None, facts, factories, view, service)


def _config(job: SimulatedJob) -> SyncConfig:
    return SyncConfig(
        prompts=job.prompts,
        minibatches=job.minibatches,
        max_rounds=job.max_rounds,
        max_skipped_steps=job.max_skipped_steps,
        push_bucket_bytes=1,  # one tensor a bucket
    )


def _placement(job: SimulatedJob) -> PlacementFacts | None:
    if job.placement is None:
        return None
    cells = [[i] for i in range(job.replicas)]
    return PlacementFacts(
        devices=[Device(index=i, kind="cpu") for i in range(job.replicas)],
        slots={"rollout": job.replicas, "judge": job.judges},
        needs={
            "rollout": Need(kind="generator", follows="policy"),
            "judge": Need(kind="generator"),
        },
        engines={"rollout": cells, "judge": cells},
        sleeps=["rollout", "judge"],
        overlaps=job.overlaps,
    )


def violations(outcome: Outcome, calm: Outcome, weather: Faults, job: SimulatedJob) -> list[str]:
    """Returns the rules that a run broke, of those that hold in any weather.

    outcome: what the run did.
    calm: the outcome of the same job with one shard and without faults.
    """
    consumed = outcome.ledger["next_ordinal"]
    ordinals_of = [sorted({key[0] for key in batch}) for batch in outcome.batches]
    ordinals = sorted(ordinal for _, ordinal in outcome.verdicts)
    trained = sorted(
        ordinal for (_, ordinal), verdicts in outcome.verdicts.items() if verdicts == [TRAINED]
    )
    holds = {
        "every ordinal has one verdict": ordinals == list(range(consumed))
        and max(map(len, outcome.verdicts.values())) == 1,
        "what is trained has that verdict": trained == sorted(itertools.chain(*ordinals_of)),
        "every step reports once": [report.step for report in outcome.reports]
        == list(range(job.steps + 1)),
        "steps are full": all(len(step) == job.prompts for step in ordinals_of)
        and len(ordinals_of) == job.steps,
    }
    if not job.takes_stale:
        holds["batches are those of the calm run"] = (
            outcome.batches == calm.batches and outcome.ledger == calm.ledger
        )
        holds["weights are those of the calm run"] = outcome.logits == calm.logits
        holds["digests are those of the calm run"] = [
            report.digests for report in outcome.reports
        ] == [report.digests for report in calm.reports]
    return [name for name, is_kept in holds.items() if not is_kept]
