"""Supervises a run: opens the site of a job, starts its workers, watches them and ends them all.

It is the process of ``g-core run``. It gets the reports of steps and the exits of processes, it
serves the agreements between shards, and it reads a few records to write samples. It never holds a
batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from gcore_core.config.plan import trained_roles
from gcore_core.config.plugins import observer_failure
from gcore_core.contract import run_files
from gcore_core.contract.dataset import Dataset
from gcore_core.contract.deadlines import Deadlines, Wait
from gcore_core.contract.errors import DeadlineExceeded, GcoreError, WorkerDied, WorkerError
from gcore_core.contract.factories import build
from gcore_core.contract.launching import ALIVE, Endpoint, Peer, Reply, Site
from gcore_core.contract.records import Header, RunFacts, StepReport, WorkerFailure
from gcore_core.node import handshake
from gcore_core.run import directory as run_directory
from gcore_core.run import summary
from gcore_core.run.checkpoint_service import CheckpointService
from gcore_core.run.consumed import ConsumedOrdinals
from gcore_core.run.display import Display
from gcore_core.run.jobs import Job, job_files, worker_specs
from gcore_core.run.machines import MachineChanges, MachinesChange
from gcore_core.run.observers import ChosenObservers, EveryObserver
from gcore_core.run.worker_exits import Restarts, exit_text, last_error
from gcore_core.runtime.agreements import AgreementService
from gcore_core.runtime.main_thread import in_main_thread
from gcore_core.runtime.messages import (
    ANSWERED,
    EXITS,
    FAILED,
    HELLO,
    HUNG,
    KILL,
    PUBLISHED,
    SAVE_RUN,
    SPAWN,
    STEP_END,
    STOP_RUN,
    TIME_OF_DAY,
    USAGE,
    Answered,
    Hello,
    Hung,
    KillRequest,
    Nothing,
    Published,
    SpawnRequest,
    StepEnd,
    TimeOfDay,
    UsageReply,
    WorkerExit,
    WorkerSpec,
)
from gcore_core.store.client import StoreReader
from gcore_core.wire.gathering import Gathering
from gcore_core.wire.service import Call, RemoteFailure, Service, from_wire

log = logging.getLogger(__name__)
LEAD = "controller.0"
#: How long the supervisor waits after the first exit, so that the worker that caused it can report.
SETTLE_S = 1.0


class Supervisor:
    """Supervises one attempt of a run, from the opening of its site to the closing.

    When a process is lost for good, ``gcore_core.run.attempts`` makes another supervisor, for an
    attempt that goes on from the newest checkpoint. Make it inside a running event loop, and await
    ``run``; call ``over`` when the run does not go on.
    """

    def __init__(
        self,
        job: Job,
        display: Display,
        chosen: ChosenObservers | None = None,
    ) -> None:
        """Prepares an attempt; takes the lines of steps that it makes again out of the journals.

        chosen: the observers that the job names; None: nobody tells them.
        """
        self._job = job
        self._display = display
        self._run = RunFacts(
            name=job.plan.name,
            directory=str(job.directory),
            steps=job.plan.settings.run.steps,
            config=job.plan.config,
            resumed_from=job.resumed.step if job.resumed else 0,
        )
        hooks = job.plan.plugins.observers(self._observer_failed)
        self._observers = EveryObserver(hooks, chosen)
        self._metrics = run_directory.MetricsFile(
            job.directory,
            alarm=display.note,
            resumed_from=job.resumed.step if job.resumed else None,
        )
        self._consumed = ConsumedOrdinals.of_run(
            job.directory, job.resumed.step if job.resumed else None
        )
        if self._metrics.went_back:
            run_directory.set_end_aside(job.directory)
        if job.resumed:
            run_directory.go_back(job.directory, job.resumed.step, display.note)
        self._waiting = set(job.names())  # processes that have not said hello
        self._ready = asyncio.Event()  # set when none is waited for
        # Names of those that have not ended.
        self._controllers = {f"controller.{shard}" for shard in range(job.shards)}
        self._errors: list[GcoreError] = []  # that workers have reported, in order
        # Done when the attempt has ended well, or its time to stop is over.
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._site: Site | None = None  # None: it is not open
        self._is_closing = False  # the site
        self._evaluated = (
            in_main_thread(build, job.plan.factory("evaluation.data"))
            if "evaluation" in job.rows
            else None
        )
        self._checkpoints = CheckpointService(
            job.plan, job.directory, display.note, self._metrics.hashed, self._checkpoint_saved
        )
        self._started_s = time.monotonic()
        # A controller repeats a report when the answer was lost; each report is handled once.
        self._requests = Gathering(1)
        self._usage: dict[str, UsageReply] = {}  # node -> what its agent said last
        self._cpu_s = 0.0  # CPU seconds of all processes up to the end of the last step
        self._stopping: asyncio.Task[None] | None = None
        self._restarts = Restarts()
        self._changes: MachineChanges | None = None  # None: before the attempt
        self._moves_on = False  # the attempt ends, since machines have come or leave
        # Whether a rank of the trainer has ended before the run.
        self._lost_trainer = False

    def _service(self) -> Service:
        service = Service("supervisor")
        service.add(HELLO, self.hello)
        service.add(FAILED, self.failed)
        service.add(TIME_OF_DAY, self.time_of_day)
        service.add(STEP_END, self.step_end)
        service.add(PUBLISHED, self.published)
        service.add(HUNG, self.hung)
        service.add(ANSWERED, self.answered)
        AgreementService(self._job.shards).register(service)
        self._checkpoints.register(service)
        return service

    async def run(self) -> None:
        """Opens a site, runs the job there to the last report, and closes it.

        Raises the error of the worker that failed first when one fails, and MachinesChange when the
        run is to go on with other machines. The site is closed with it.
        """
        job = self._job
        logs = job.directory / run_files.LOGS
        try:
            async with (
                job.launcher.site(job.where(), self._service(), logs) as site,
                site.files.follow(job.directory, job.placed.host),
            ):
                self._site = site
                try:
                    await self._attempt(site)
                    if self._moves_on and not self._stopping:
                        raise MachinesChange(
                            "the run goes on with other machines", where="supervisor"
                        )
                    await site.files.collect_all()
                    run_directory.remove_earlier_end(job.directory)
                finally:
                    self._is_closing = True
        finally:
            self._site = None
            self._is_closing = False
            self._metrics.close()
            if self._changes is not None:
                self._changes.say_left()

    def over(self, error: str) -> None:
        """Tells observers that the run is over, and writes its summary.

        error: empty when it ended well.
        """
        stopped = "stopped by a signal" if self._stopping else ""
        self._observers.run_end(self._run, error or stopped)
        try:
            wall_s = time.monotonic() - self._started_s
            summary.write(self._run, wall_s=wall_s, cpu_s=self._cpu_s)
        except Exception as unwritten:  # isolation point: it must not hide how the run ended
            log.exception("the summary is not written")
            is_told = isinstance(unwritten, GcoreError)
            what = f"{unwritten}" if is_told else f"the summary is not written: {unwritten!r}"
            self._display.note(what)
        self._observers.all_written(error or stopped)

    async def _attempt(self, site: Site) -> None:
        """Starts and watches the processes of the site, until the run is over."""
        site.network.deadlines = Deadlines(self._job.plan.settings.run.patience_s)
        changes = self._changes = MachineChanges(
            job=self._job,
            site=site,
            note=self._display.note,
            save=lambda: self._save_at_end_of_step(site),
        )
        watchers = [self._watch(node.agent) for node in site.nodes.values()]
        if len(site.nodes) > 1 or site.newcomer is not None:
            watchers.append(changes.watch())
        if site.has_processes:
            watchers += [self._look_after(site, name) for name in (*site.nodes, *site.where)]
        parts = [asyncio.ensure_future(part) for part in (self._start(site), *watchers)]
        watch: asyncio.Future[Any] = asyncio.gather(*parts)
        # ``watch`` ends only when one of its parts fails; ``_over`` is set at the end.
        try:
            await asyncio.wait([watch, self._over], return_when=asyncio.FIRST_COMPLETED)
            await (self._over if self._over.done() else watch)
        except GcoreError as error:
            await self._keep_newest(site)
            if self._stopping and isinstance(error, WorkerError):
                # The signal may have ended the worker, too.
                self._display.note(str(error))
                raise asyncio.CancelledError from error
            raise
        finally:
            # Each by itself: when one has failed, ``watch`` is over and the others are not.
            for part in parts:
                part.cancel()
            await asyncio.gather(watch, *parts, return_exceptions=True)

    async def _keep_newest(self, site: Site) -> None:
        """Commits the checkpoint that the trainer is saving while the run fails."""
        if not self._lost_trainer:
            # The policy's rank 0 answers first.
            roles = reversed(trained_roles(self._job.plan))
            names = [name for role in roles for name in self._job.workers(role)]
            ranks = [site.network.peer(name) for name in names]
            await self._checkpoints.finish(ranks, site.network.deadlines.seconds(Wait.SOON))

    async def _start(self, site: Site) -> None:
        """Gives nodes the job's files, restores a resumed run's state and starts every worker."""
        await site.files.provide(job_files(self._job, site.where), self._display.phase)
        resumed = await self._checkpoints.enter(site, self._job.resumed, self._job.shards)
        if resumed is not None:
            resumed = msgspec.structs.replace(resumed, evaluated=self._metrics.evaluated)
        specs = worker_specs(replace(self._job, resumed=resumed), site)
        self._display.phase(f"starting {len(specs)} processes")
        workers: dict[str, list[WorkerSpec]] = {name: [] for name in site.nodes}
        for spec in specs:
            workers[site.where[spec.name]].append(spec)
        await asyncio.gather(
            *(
                node.agent.call(SPAWN, SpawnRequest(workers[name]))
                for name, node in site.nodes.items()
            )
        )

    def stop(self, within_s: float) -> bool:
        """Asks the lead to save the run's state and end; then all processes end.

        They end after ``within_s`` seconds even if the lead has not. Where the site is just closed,
        they end already. Returns False, and does nothing, when there is nothing to save yet.
        """
        if self._is_closing:
            return True
        if self._site is None or not self._ready.is_set():
            return False
        self._display.note(
            f"its state is being saved, for at most {within_s:g} s; another signal ends the run now"
        )
        self._stopping = asyncio.ensure_future(self._stop(self._site, within_s))
        return True

    async def _stop(self, site: Site, within_s: float) -> None:
        with contextlib.suppress(GcoreError, TimeoutError):
            async with asyncio.timeout(within_s):
                await site.network.peer(LEAD).call(STOP_RUN, Nothing())
                await asyncio.shield(self._over)  # set when the lead's process ends
        self._end()

    # -- messages from workers ---------------------------------------------------------------------

    async def hello(self, request: Hello, call: Call) -> Nothing:
        """Notes that a worker is up. A controller gets its answer only when every worker is up."""
        handshake.agree(
            request.name,
            worker=request.versions,
            supervisor=handshake.versions(request.versions.plugins),
        )
        self._waiting.discard(request.name)
        log.info("%s is up, pid %s", request.name, request.pid)
        if not self._waiting and not self._ready.is_set():
            self._ready.set()
            self._say_first_evaluation()
            self._observers.run_start(self._run)
        elif self._waiting:
            self._display.phase(f"waiting for {_first_names(sorted(self._waiting))}")
        if request.name in self._controllers:
            await self._ready.wait()
        return Nothing()

    def _say_first_evaluation(self) -> None:
        """Says what is waited for before step 1: with a large model it takes as long as steps."""
        answers = 2 * min(
            self._job.plan.settings.evaluation.prompts, self._job.rows.get("evaluation", 0)
        )
        if answers and self._job.resumed is None:
            self._display.phase(f"evaluating the initial weights on {answers} answers")

    async def time_of_day(self, request: Nothing, call: Call) -> TimeOfDay:
        return TimeOfDay(time.time())

    async def _ask_agents(self, endpoint: Endpoint[Nothing, Reply]) -> dict[str, Reply]:
        """Asks the agents of all nodes at once, and returns node -> what its agent answered.

        An agent that is late is left out: whether it hangs is found out by ``_look_after``, which
        ends it then.
        """
        if self._site is None:
            return {}
        nodes = self._site.nodes
        calls = (node.agent.call(endpoint, Nothing()) for node in nodes.values())
        answers = await asyncio.gather(*calls, return_exceptions=True)
        heard: dict[str, Reply] = {}
        for name, answer in zip(nodes, answers, strict=True):
            if not isinstance(answer, BaseException):
                heard[name] = answer
            elif isinstance(answer, DeadlineExceeded):
                log.warning("%s is late: %s", name, answer)
            else:
                raise answer
        return heard

    async def failed(self, request: RemoteFailure, call: Call) -> Nothing:
        """Notes the error that ends a worker."""
        error = from_wire(request)
        self._errors.append(error)
        return Nothing()

    async def hung(self, request: Hung, call: Call) -> Nothing:
        """Kills a process that does not answer in time; it writes its stacks to its log first.

        From then on it is handled like any process that was lost.
        """
        log_file = run_files.log_path(self._job.directory, request.name)
        self._restarts.hung(request.name, request.waiter, request.what)
        self._display.note(
            f"{request.waiter} waits for {request.name}: {request.what} (run.patience_s); it is "
            "killed, "
            f"and its stacks are in {log_file}"
        )
        site = self._site
        if site is None:
            return Nothing()
        if request.name in site.nodes:
            end_agent = site.nodes[request.name].end_agent
            if end_agent is not None:
                await end_agent()
        else:
            await site.node_of(request.name).agent.call(KILL, KillRequest(request.name))
        return Nothing()

    async def answered(self, request: Answered, call: Call) -> Nothing:
        """Notes that a worker which was started again has got somewhere."""
        self._restarts.answered(request.name)
        return Nothing()

    async def published(self, request: Published, call: Call) -> Nothing:
        """Tells observers that a version of the weights was published, once for each version."""

        async def act(_: list[None]) -> None:
            self._observers.weights_published(self._run, request.version)

        await self._requests.run_once(("published", request.version), None, act)
        return Nothing()

    async def step_end(self, request: StepEnd, call: Call) -> Nothing:
        """Handles the report of a step that has ended, once, however often it comes."""

        async def act(_: list[None]) -> None:
            await self._step_ended(request)

        await self._requests.run_once(("step", request.report.step), None, act)
        return Nothing()

    async def _step_ended(self, request: StepEnd) -> None:
        """Writes what a step leaves behind: metrics, samples and the position in the data.

        The metrics include the CPU time and memory that each process has used.
        """
        assert self._site is not None
        self._restarts.step_ended()
        report = request.report
        site = self._site
        await self._add_usage(site, report)
        self._checkpoints.reported(report)
        news = self._metrics.unwritten(report)
        if report.step > self._run.resumed_from:
            run_directory.set_end_aside(self._job.directory)
        if news is not None:
            self._metrics.append(news)
        self._consumed.check(report.step, report.metrics)
        if report.samples and self._evaluated is not None:
            home = site.home_node
            reader = StoreReader(home.store, site.home, site.secret, home.agent)
            rows = await _shown_rows(report.samples, reader, self._evaluated)
            run_directory.write_samples(self._job.directory, report.step, rows)
        if request.ledger:
            run_directory.write_position(
                self._job.directory, {"step": report.step, **request.ledger}
            )
        self._display.step(report)
        self._tell_failures(report)
        for note in request.notes:
            self._display.note(f"step {report.step}: {note}")
        if news is not None:
            self._observers.step_end(self._run, news)
        await self._save_if_asked(site)
        await self._move_on_if_due(site, report.step)

    def _tell_failures(self, report: StepReport) -> None:
        """Shows what a step or its evaluation leaves out of its means."""
        for name, count in report.metrics.items():
            what = name.rpartition("/")[2]
            if name.startswith("groups/dropped/"):
                self._display.note(f"step {report.step}: {count:.0f} groups dropped: {what}")
            elif name.startswith(run_files.EVALUATION_FAILED):
                self._display.note(
                    f"step {report.step}: {count:.0f} {what} answers of the evaluation failed, or "
                    "a reward failed on them; its means leave them out"
                )

    async def _save_if_asked(self, site: Site) -> None:
        """Asks the lead to save the run where a file in its directory asks for that."""
        request = self._job.directory / run_files.SAVE
        if not request.exists():
            return
        with contextlib.suppress(GcoreError):
            await site.network.peer(LEAD).call(SAVE_RUN, Nothing())
            request.unlink(missing_ok=True)
            self._display.note(
                "a checkpoint was asked for; it is saved at the end of the next step"
            )

    async def _save_at_end_of_step(self, site: Site) -> None:
        await self._ready.wait()
        with contextlib.suppress(GcoreError):
            await site.network.peer(LEAD).call(SAVE_RUN, Nothing())

    async def _move_on_if_due(self, site: Site, step: int) -> None:
        """Asks the lead to end, where the attempt ends at a checkpoint and this step has one.

        The lead then finishes the save that it has begun. Not behind the run's last step.
        """
        is_due = (
            self._changes is not None and self._changes.is_due and self._checkpoints.saves(step)
        )
        if is_due and step < self._run.steps and not self._moves_on:
            self._moves_on = True
            with contextlib.suppress(GcoreError):
                await site.network.peer(LEAD).call(STOP_RUN, Nothing())

    async def _add_usage(self, site: Site, report: StepReport) -> None:
        """Adds the CPU time and memory that every process of every node has used to the metrics.

        Of a node whose agent does not answer in time, it adds what the agent said last.
        """
        answers = await self._ask_agents(USAGE)
        for usage in answers.values():
            for note in usage.notes:
                self._display.note(note)
        self._usage |= answers
        cpu_s: dict[str, float] = {}
        memory_mib: dict[str, float] = {}
        for node in site.nodes:
            if node in self._usage:
                cpu_s |= self._usage[node].cpu_s
                memory_mib |= self._usage[node].memory_mib
        if site.has_processes:
            cpu_s["supervisor"] = time.process_time()
        self._cpu_s = sum(cpu_s.values())
        report.metrics["cpu_seconds"] = self._cpu_s
        report.metrics |= {f"cpu_seconds/{name}": value for name, value in cpu_s.items()}
        report.metrics |= {f"memory_mib/{name}": value for name, value in memory_mib.items()}

    # -- messages from node agents -----------------------------------------------------------------

    async def _watch(self, agent: Peer) -> None:
        """Handles every exit on one node; raises the first cause when a lost process is not started
        again.
        """
        try:
            async for exited in agent.stream(EXITS, Nothing()):
                await self._exited(exited)
        except WorkerDied as error:
            if error.where == agent.name:
                error.why = "the workers of its node end with it, and so does the store"
                error.todo = f"its log: {run_files.log_path(self._job.directory, agent.name)}"
            raise

    def _note(self, text: str) -> None:
        log.warning("%s", text)
        self._display.note(text)

    async def _look_after(self, site: Site, name: str) -> None:
        """Calls one process again and again, and kills it when it no longer answers.

        This is needed because no other process calls a controller, and because the deadline of a
        push, a save or a move is longer than the time in which a live process answers. An agent
        runs from the beginning and nothing else in its process can delay its answer, so its
        deadline is shorter.
        """
        is_agent = name in site.nodes
        wait = Wait.SOON if is_agent else Wait.WORK
        patience_s = site.network.deadlines.seconds(wait)
        if not is_agent:
            await self._ready.wait()
        while True:
            try:
                await site.network.peer(name).call(ALIVE, None, deadline_s=patience_s)
            except DeadlineExceeded as error:
                await self.hung(Hung(name, "the supervisor", error.what), Call(lambda: None))
            except WorkerDied:
                pass  # ``_watch`` gets its exit
            await asyncio.sleep(patience_s / 2)

    async def _exited(self, exited: WorkerExit) -> None:
        """Handles one exit. The run is over when all controllers have ended without an error.

        When the run is being stopped, or moves on, the end of the lead is enough.
        """
        if exited.code == 0 and exited.name in self._controllers:
            self._controllers.discard(exited.name)
            ends_early = self._stopping or self._moves_on
            if not self._controllers or (ends_early and exited.name == LEAD):
                self._end()
            return
        reason = f"ended with {exit_text(exited.code)}"
        role, _, rank = exited.name.rpartition(".")
        self._lost_trainer |= role in trained_roles(self._job.plan)
        log_file = run_files.log_path(self._job.directory, exited.name)
        in_vain = self._restarts.ended(exited, reason, log_file) if exited.restarted else None
        goes_on = exited.restarted and in_vain is None
        failure = WorkerFailure(role=role, rank=int(rank), reason=reason)
        self._observers.worker_failed(self._run, failure)
        if in_vain is not None:
            raise in_vain
        if goes_on:
            message = exited.running or last_error(exited)
            why = f"\n  {message}" if message else ""
            self._note(f"{exited.name} {reason}; it is started again{why}")
            return
        # No worker causes another one's SIGKILL, so there is nobody to wait for.
        is_killed = exited.code == -signal.SIGKILL
        await asyncio.sleep(0 if self._errors or is_killed else SETTLE_S)
        cause = self._cause(exited, reason)
        if not isinstance(cause, WorkerError):
            await self._check_machines()
        raise cause

    async def _check_machines(self) -> None:
        """Raises WorkerDied when a machine is lost and nobody has said so yet.

        A worker's error may come of that. After the loss of a machine the run goes on, but after an
        error it ends.
        """
        if self._site is not None and len(self._site.nodes) > 1:
            agents = (node.agent for node in self._site.nodes.values())
            with contextlib.suppress(DeadlineExceeded):
                await asyncio.gather(*(agent.call(ALIVE, None) for agent in agents))

    def _cause(self, exited: WorkerExit, reason: str) -> GcoreError:
        """Returns the error to raise: the first reported one that is not itself about an exit.

        When there is none, it says how the process ended, with the last line of its log.
        """
        if causes := [error for error in self._errors if not isinstance(error, WorkerDied)]:
            return causes[0]
        log_file = run_files.log_path(self._job.directory, exited.name)
        last = [line for line in exited.tail.splitlines() if line.strip()][-1:]
        what = f"{reason} while the run was starting" if self._waiting else reason
        facts = {"process": exited.name, "pid": exited.pid, "code": exited.code}
        return WorkerDied(
            what,
            where=exited.name,
            why=exited.running or "\n".join(last),
            todo=f"its log: {log_file}",
            **facts,
        )

    def _end(self) -> None:
        if not self._over.done():
            self._over.set_result(None)

    def _checkpoint_saved(self, step: int, path: str) -> None:
        self._observers.checkpoint_saved(self._run, step, path)

    def _observer_failed(self, plugin: str, hook: str, error: BaseException) -> None:
        log.error("plugin %s failed in %s", plugin, hook, exc_info=error)
        log_file = run_files.log_path(self._job.directory, "supervisor")
        self._display.note(str(observer_failure(plugin, hook, error, f"its traceback: {log_file}")))


@contextlib.contextmanager
def ending(latest: Callable[[], Supervisor | None]) -> Iterator[None]:
    """Ends a run with the block: well, or with the error that leaves the block.

    Observers hear of the end once, however often the run goes on from a checkpoint in the block.

    latest: returns the supervisor of the latest attempt; None before the first.
    """
    error = ""
    try:
        yield
    except BaseException as caught:
        # A run that a signal ends after another error is cancelled because of that error.
        cause = caught.__cause__ if isinstance(caught, asyncio.CancelledError) else None
        cause = cause or caught
        error = str(cause) or type(cause).__name__
        raise
    finally:
        supervisor = latest()
        if supervisor is not None:
            supervisor.over(error)


def _first_names(names: list[str], limit: int = 6) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


async def _shown_rows(
    headers: Iterable[Header], reader: StoreReader, dataset: Dataset
) -> list[dict[str, Any]]:
    """Returns the rows of ``samples/step_*.jsonl``.

    A row has prompt, text, rewards, mode ("greedy" or "sampled") and status. A record with pictures
    has ``arrays`` too: name -> each column or medium that is uint8[H, W, C]. Records without
    columns are left out.
    """
    shown = [header for header in headers if header.columns is not None]
    contents = await reader.records(shown)
    prompts = in_main_thread(lambda: [dataset[header.row] for header in shown])
    rows = []
    for header, prompt, (columns, media) in zip(shown, prompts, contents, strict=True):
        pictures = {
            n: a for n, a in {**columns, **media}.items() if a.dtype == np.uint8 and a.ndim == 3
        }
        text = columns["text"].tobytes().decode("utf-8", "replace") if "text" in columns else ""
        row: dict[str, Any] = {
            "prompt": prompt.text if prompt.text is not None else prompt.messages,
            "text": text,
            "rewards": header.rewards,
            # An evaluation draws row r as ordinal -(2r + 1), greedily, and as -(2r + 2), sampled.
            "mode": ("greedy", "sampled")[(-header.ordinal - 1) % 2],
            "status": header.status,
        }
        rows.append(row | ({"arrays": pictures} if pictures else {}))
    return rows
