"""Runs a worker: builds what its spec names, serves it, says hello.

The node agent starts it by ``python -m gcore_core.node.worker --fd N ...``; its spec
comes through that file descriptor. Nothing is discovered here. A worker ends with its node agent:
it watches a pipe that ends when the agent is gone.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, assert_never

from gcore_core.contract.algorithms import AdaptsToSteps
from gcore_core.contract.context import WorkerContext
from gcore_core.contract.dataset import Dataset
from gcore_core.contract.deadlines import Deadlines
from gcore_core.contract.errors import ConfigError
from gcore_core.contract.factories import build, config_object
from gcore_core.contract.job_settings import POLICY
from gcore_core.contract.launching import Network, Peer
from gcore_core.contract.questions import Sampler
from gcore_core.contract.traits import traits_of
from gcore_core.node import handshake
from gcore_core.node.devices import share_of_cores
from gcore_core.node.spawn import read_spec
from gcore_core.runtime.compute import Compute, ThreadCompute
from gcore_core.runtime.main_thread import MainThread, ThreadedLimits
from gcore_core.runtime.messages import (
    ANSWERED,
    FAILED,
    HELLO,
    HUNG,
    SAVE_RUN,
    STOP_RUN,
    TIME_OF_DAY,
    Answered,
    Hello,
    Hung,
    Nothing,
    WorkerSpec,
)
from gcore_core.runtime.named_files import refuse_changed
from gcore_core.runtime.worker_settings import (
    AnnotatorSettings,
    GeneratorSettings,
    JobFacts,
    ScorerSettings,
    ShellSettings,
    TrainerSettings,
)
from gcore_core.store.client import StoreReader, StoreWriter, push_memory
from gcore_core.wire.loop_delays import TimedLoop
from gcore_core.wire.retry import insist, insist_with
from gcore_core.wire.service import Call, Service, to_wire

if TYPE_CHECKING:
    from gcore_core.contract.columns import ColumnSpec
    from gcore_core.workers.annotations import Annotations
    from gcore_core.workers.generator import GeneratorShell
    from gcore_core.workers.role_sampler import RoleSampler
    from gcore_core.workers.sleep_note import SleepNote

log = logging.getLogger(__name__)
T = TypeVar("T")
_DATASET = "dataset/"  # so begin the names of datasets' factories
_LEAVE_S = 0.2  # a reply has so long to leave before the process does


class Worker:
    """Runs one worker, in a process of its own or inside the supervisor's.

    compute: runs what a provider or a user has written, and whatever else blocks.
    give_up: ends the process with an exit code.
    limits: notices time limits that such code sets in a thread; None: nobody does.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        network: Network,
        compute: Compute,
        give_up: Callable[[int], None] = os._exit,
        limits: ThreadedLimits | None = None,
    ) -> None:
        self._spec = spec
        self._network = network
        self._unchecked = compute
        self._give_up = give_up
        self._limits = limits or ThreadedLimits()
        self._service = Service(spec.name, network.deadlines)
        self._closing: list[Callable[[], Any]] = []  # called at its end, the last first
        self._versions = handshake.versions(spec.versions.plugins)

    async def run(self) -> None:
        """Serves until it is cancelled. A controller returns when its program ends.

        A failure is reported to the supervisor, and raised.
        """
        spec = self._spec
        try:
            # Before anything of a plugin is imported: a wrong version would fail in ways that do
            # not say so.
            handshake.agree(spec.name, worker=self._versions, supervisor=spec.versions)
            refuse_changed(spec.files)
            settings = spec.settings
            if isinstance(settings, JobFacts):
                await self._controller(settings)
                return
            self._loop = asyncio.get_running_loop()
            await self._compute(self._build, settings, self._service)
            await self._network.serve(spec.name, self._service)
            await self._hello()
            if spec.restarted:
                await self._service.answered.wait()
                await insist(self._network.peer("supervisor"), ANSWERED, Answered(spec.name))
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise
        except Exception as error:  # isolation point: the supervisor reports it
            log.exception("%s ends", spec.name)
            await self._network.peer("supervisor").call(FAILED, to_wire(error, spec.name))
            raise
        finally:
            for close in reversed(self._closing):
                await self._compute(close)

    async def _compute(self, work: Callable[..., T], *args: Any) -> T:
        """Is the ``Compute`` of this worker's shells.

        Raises ContractError where a call has set a time limit in a thread.
        """
        return await self._unchecked(self._checked, work, args)

    def _checked(self, work: Callable[..., T], args: Sequence[Any]) -> T:
        try:
            return work(*args)
        finally:
            # A scorer's shell knows which reward it was.
            self._limits.check("" if self._spec.kind == "scorer" else self._spec.name)

    async def _hello(self) -> None:
        hello = Hello(self._spec.name, os.getpid(), self._versions)
        # A controller's hello is answered when every worker is up; to load a model may take long.
        await insist(self._network.peer("supervisor"), HELLO, hello)

    async def _controller(self, facts: JobFacts) -> None:
        """Runs a controller's program to its end."""
        factories = self._spec.factories
        # Built by name: the runtime may not import the controllers, and no other worker loads them.
        context = build(factories["context"], facts, factories, self._network, self._service)

        async def stop(request: Nothing, call: Call) -> Nothing:
            context.stopping.set()
            return request

        async def save(request: Nothing, call: Call) -> Nothing:
            context.saving.set()
            return request

        self._service.add(STOP_RUN, stop)
        self._service.add(SAVE_RUN, save)
        await self._network.serve(self._spec.name, self._service)
        await self._hello()
        context.trace.ahead_s = await self._time_of_day()
        gc.freeze()  # what is loaded by now stays: no collection needs to go through it
        await build(factories["controller"], context).run()

    async def _time_of_day(self) -> float:
        """Returns how far the supervisor's time of day is from this event loop's clock.

        Traces of controllers on several machines have one time so, whatever their clocks say.
        """
        clock = asyncio.get_running_loop().time
        asked_s = 0.0

        def request() -> Nothing:
            nonlocal asked_s
            asked_s = clock()  # at each try: the answer belongs to the last one
            return Nothing()

        answer = await insist_with(self._network.peer("supervisor"), TIME_OF_DAY, request)
        return answer.unix_s - (asked_s + clock()) / 2

    def _build(self, settings: ShellSettings, service: Service) -> None:
        match settings:
            case GeneratorSettings():
                self._generator(settings, service)
            case AnnotatorSettings():
                self._annotator(settings, service)
            case ScorerSettings():
                self._scorer(settings, service)
            case TrainerSettings():
                self._trainer(settings, service)
            case _:
                assert_never(settings)  # mypy tells of a kind that is missing here

    def _generator(self, settings: GeneratorSettings, service: Service) -> None:
        from gcore_core.workers.asleep import SleepingGenerator
        from gcore_core.workers.sleep_note import SleepNote, note_path

        spec = self._spec
        note = SleepNote(note_path(spec.store.directory, spec.name))
        if not spec.restarted:
            note.remove()  # of an earlier attempt
        if note.says_asleep:
            log.info("%s sleeps, as did the process before it: a wake makes its backend", spec.name)
            make = partial(self._awake_generator, settings, note)
            asleep = SleepingGenerator(make, self._compute, note, spec.name)
            asleep.register(service)
        else:
            self._awake_generator(settings, note).register(service)

    def _awake_generator(
        self,
        settings: GeneratorSettings,
        note: SleepNote,
    ) -> GeneratorShell:
        """Makes a generator's backend, and the shell around it."""
        from gcore_core.workers.generator import GeneratorShell
        from gcore_core.workers.push import DtypeSetting
        from gcore_core.workers.role_sampler import LoopSpeaker

        spec = self._spec
        acts = "environment" in spec.factories
        context = replace(self._context(settings), acts=acts)
        backend = build(spec.factories["backend"], context)
        self._closing.append(backend.close)
        draws = None
        asked = self._samplers(settings.asks)
        if acts:
            speakers = {
                player: LoopSpeaker(asked[role], self._loop)
                for player, role in settings.speakers.items()
            }
            context = replace(context, speakers=speakers)
            draws = build(spec.factories["environment"], context, backend)
            self._closing.append(draws.close)
        store = StoreWriter(*self._place(), f"{spec.name}-{os.getpid()}")
        return GeneratorShell(
            backend,
            self._datasets(),
            store,
            self._compute,
            self._network,
            settings,
            restarted=spec.restarted,
            setting=DtypeSetting(f"roles.{spec.role}.config.dtype", own_dtype(spec)),
            replica=spec.rank,
            note=note,
            draws=draws,
            asked=list(asked.values()),
        )

    def _samplers(self, asks: Mapping[str, Sequence[str]]) -> dict[str, RoleSampler]:
        """Makes one for each role: whoever asks the same role shares what is known of its load.

        asks: role -> peer names of its replicas.
        """
        from gcore_core.workers.role_sampler import RoleSampler

        return {
            role: RoleSampler(
                role, [self._network.peer(name) for name in names], self._service.progress
            )
            for role, names in asks.items()
        }

    def _annotator(self, settings: AnnotatorSettings, service: Service) -> None:
        from gcore_core.workers.annotations import AnnotatorShell

        backend = build(self._spec.factories["backend"], self._context(settings))
        self._closing.append(backend.close)
        annotations = self._annotations(settings.columns, settings.shards)
        shell = AnnotatorShell(backend, annotations, self._compute, settings.shards)
        shell.register(service)

    def _annotations(self, columns: Sequence[ColumnSpec], shards: int) -> Annotations:
        from gcore_core.workers.annotations import Annotations

        store = StoreWriter(*self._place(), f"{self._spec.name}-{os.getpid()}")
        return Annotations(columns, store, shards)

    def _scorer(self, settings: ScorerSettings, service: Service) -> None:
        from gcore_core.workers.overruns import Overruns, note_path
        from gcore_core.workers.scorer import NamedScorer, ScorerShell

        samplers = self._samplers(settings.asks)
        scorers = []
        for name, reward in settings.rewards.items():
            sampler = samplers[reward.role] if reward.role else None
            context = self._context(settings, sampler=sampler)
            scorers.append(
                NamedScorer(
                    name=name,
                    scorer=build(self._spec.factories[f"reward/{name}"], context),
                    timeout_s=reward.timeout_s,
                    when=reward.when,
                    sampler=sampler,
                    of_groups=name in settings.of_groups,
                    alone_every=reward.alone_every,
                    known=reward.known or "",
                )
            )
        reader = StoreReader(*self._place())
        spec = self._spec
        note = note_path(spec.store.directory, spec.name)
        overruns = Overruns(note, was_held=spec.was_held)
        shell = ScorerShell(
            scorers,
            self._datasets(),
            reader,
            self._compute,
            self._leave,
            overruns,
            settings.datasets,
            self._limits,
        )
        shell.register(service)

    def _trainer(self, settings: TrainerSettings, service: Service) -> None:
        from gcore_core.runtime.relay import Relay
        from gcore_core.workers.run_journals import TensorJournal, TokenJournal
        from gcore_core.workers.trainer import TrainerShell

        spec = self._spec
        parts: dict[str, Any] = {
            part: build(spec.factories[part])
            for part in ("objective", "advantage")
            if part in spec.factories
        }
        _check_is_shown_steps(parts.get("objective"), spec)
        backend = build(spec.factories["backend"], self._context(settings, parts))
        self._closing.append(backend.close)
        if settings.resume:
            backend.load(Path(settings.resume))
        path = push_memory(Path(spec.store.directory), spec.name)
        columns = settings.columns
        annotations = self._annotations(columns, settings.shards) if columns else None
        reader = StoreReader(*self._place()) if annotations is None else annotations.reader
        journal = TensorJournal(Path(settings.context.directory))
        sentinel = None
        tokens = None
        if settings.sentinel is not None:
            if spec.role == POLICY and spec.rank == 0:
                tokens = TokenJournal(Path(settings.context.directory))
            sentinel = build(spec.factories["sentinel"], replace(settings.sentinel, rank=spec.rank))
        shell = TrainerShell(
            backend,
            reader,
            self._compute,
            path,
            spec.rank,
            journal=journal,
            sentinel=sentinel,
            followers=self._peers_of_other_ranks(),
            annotations=annotations,
            adapters=settings.adapters,
            tokens=tokens,
        )
        shell.register(service, Relay(self._network, service, settings.shards))

    def _peers_of_other_ranks(self) -> list[Peer]:
        spec = self._spec
        others = range(1, spec.ranks) if spec.rank == 0 else ()
        return [self._network.peer(f"{spec.role}.{rank}") for rank in others]

    def _context(
        self,
        settings: ShellSettings,
        parts: Mapping[str, Any] | None = None,
        sampler: Sampler | None = None,
    ) -> WorkerContext:
        run = settings.run
        plain = settings.context
        return WorkerContext(
            role=self._spec.role,
            rank=self._spec.rank,
            ranks=self._spec.ranks,
            devices=plain.devices,
            threads=1 if run.deterministic else share_of_cores(plain.devices, plain.devices_in_use),
            seed=run.seed,
            deterministic=run.deterministic,
            steps=run.steps,
            updates_per_step=plain.updates_per_step,
            model=plain.model,
            rendezvous=plain.rendezvous,
            meeting_address=plain.meeting_address,
            parts=parts or {},
            engine=plain.engine,
            directory=plain.directory,
            columns=plain.columns,
            given=plain.given,
            policy=plain.policy,
            sampler=sampler,
            progress=self._service.progress,
        )

    def _datasets(self) -> dict[str, Dataset]:
        factories = self._spec.factories
        return {
            name.removeprefix(_DATASET): build(factory)
            for name, factory in factories.items()
            if name.startswith(_DATASET)
        }

    def _place(self) -> tuple[Path, str, bytes, Peer]:
        """Returns this node's store, as the first arguments of a StoreReader and a StoreWriter:
        (directory, the node's name, secret, agent).
        """
        place = self._spec.store
        agent = self._network.peer(place.agent)
        return Path(place.directory), place.node, self._spec.secret, agent

    def _leave(self, code: int) -> None:
        """Ends the process a little later: replies that were made are sent before."""
        asyncio.get_running_loop().call_later(_LEAVE_S, self._give_up, code)


def own_dtype(spec: WorkerSpec) -> str:
    """Returns what the backend's config has as ``dtype``; empty where it has no such field."""
    dtype = getattr(config_object(spec.factories["backend"]), "dtype", "")
    return dtype if isinstance(dtype, str) else ""


def _check_is_shown_steps(objective: Any, spec: WorkerSpec) -> None:
    """Raises ConfigError where an objective adapts to steps that its trainer does not show it."""
    trainer = spec.factories["backend"]
    if not isinstance(objective, AdaptsToSteps) or not objective.state():
        return
    if not traits_of(config_object(trainer)).adapts_objective:
        raise ConfigError(
            f"objective {spec.factories['objective'].factory} adapts its loss to what steps "
            f"measure, and trainer {trainer.factory} shows it none and saves no state of it.",
            where=f"roles.{spec.role}.use",
            todo="take a trainer with the trait adapts_objective, or settings of the objective "
            "under which it stays as it is",
        )


async def _main(
    spec: WorkerSpec,
    lifeline: int,
    main: MainThread,
    limits: ThreadedLimits,
) -> None:
    """Runs a worker over sockets, and reports processes that do not answer it in time."""
    from gcore_core.wire.sockets import RpcNetwork

    deadlines = Deadlines(spec.settings.run.patience_s)
    network = RpcNetwork(
        spec.peers,
        spec.secret,
        deadlines=deadlines,
        identity=spec.identity,
        public={spec.name: spec.public} if spec.public else {},
    )
    # Nobody writes to the pipe. It becomes readable when it ends: the node agent is gone. Group 0
    # is this worker's own group, with all that it started.
    loop = asyncio.get_running_loop()
    loop.add_reader(lifeline, os.killpg, 0, signal.SIGKILL)
    # Held until they are sent, or they could be collected.
    reports = set[asyncio.Task[Nothing]]()

    def report_hung(peer: str, what: str) -> None:
        if peer != "supervisor":
            report = network.peer("supervisor").call(HUNG, Hung(peer, spec.name, what))
            task = loop.create_task(report)
            reports.add(task)
            task.add_done_callback(reports.discard)

    network.expired = report_hung
    try:
        await Worker(spec, network, ThreadCompute(main), limits=limits).run()
    finally:
        await network.close()


def main() -> None:
    spec, lifeline = read_spec("a worker of a run; started by the node agent only", WorkerSpec)
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s {spec.name} %(levelname)s %(message)s"
    )
    main = MainThread()
    limits = ThreadedLimits()

    def work() -> NoReturn:
        code = 1
        try:
            with asyncio.Runner(loop_factory=TimedLoop) as runner:
                runner.run(_main(spec, lifeline, main, limits))
            code = 0
        except Exception:  # isolation point: it was reported and logged
            pass
        except BaseException:  # such as a SystemExit of a task
            log.exception("%s ends", spec.name)
        logging.shutdown()
        # Neither a library's thread nor one that hangs holds a finished worker.
        os._exit(code)

    if isinstance(spec.settings, JobFacts):
        work()  # a controller calls no function of a user
    with limits.noticed():
        # The loop's thread ends the process, whatever the main thread does then.
        threading.Thread(target=work, name="event loop").start()
        main.serve(lambda: log.warning("a KeyboardInterrupt came while nothing was called"))
    raise AssertionError("nobody ends the serving")


if __name__ == "__main__":
    main()
