"""The supervisor: checks the job, opens the site, starts the workers, watches them, and ends them all.

It is the process of ``g-core run``. It sees reports and exits, the middle of the agreements, and a few records to show;
it holds no batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from gcore_core import checks, config
from gcore_core.errors import GcoreError, WorkerDied, WorkerError
from gcore_core.factories import build
from gcore_core.placement.placed import place
from gcore_core.plugins import observer_failure
from gcore_core.processes import handshake
from gcore_core.processes.agreements import AgreementService
from gcore_core.processes.gathering import Gathering
from gcore_core.processes.jobs import Job, worker_specs
from gcore_core.processes.keeper import Keeper, check_same, newest
from gcore_core.processes.launchers import AGENT, Launcher, Site
from gcore_core.processes.messages import (
    Hello,
    Hung,
    KillRequest,
    Nothing,
    Published,
    SpawnRequest,
    StepEnd,
    UsageReply,
    WorkerExit,
)
from gcore_core.processes.service import Call, RemoteFailure, Service, from_wire
from gcore_core.processes.store import StoreReader
from gcore_core.records import RunFacts, WorkerFailure
from gcore_core.run import directory as run_directory
from gcore_core.run import summary
from gcore_core.run.checkpoints import Checkpoints
from gcore_core.run.display import Display, open_display
from gcore_core.run.making import make_model
from gcore_core.run.samples import shown_rows

log = logging.getLogger(__name__)
SETTLE_S = 1.0  # after a first failure: time for the worker that caused it to tell


class Supervisor:
    def __init__(self, job: Job, display: Display) -> None:
        self._job, self._display = job, display
        self._run = RunFacts(
            name=job.plan.config["run"]["name"],
            directory=str(job.directory),
            steps=job.plan.config["run"]["steps"],
            config=job.plan.config,
            resumed_from=job.resumed.step if job.resumed else 0,
        )
        self._observers = job.plan.plugins.observers(self._observer_failed)
        self._metrics = run_directory.MetricsFile(job.directory, alarm=display.note)
        self._waiting = set(job.names())
        self._ready = asyncio.Event()
        self._controllers = {f"controller.{shard}" for shard in range(job.shards)}
        self._errors: list[GcoreError] = []
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._site: Site | None = None
        self._evaluated = build(job.plan.factory("evaluation.data")) if "evaluation" in job.rows else None
        self._started_s = time.monotonic()
        self._once = Gathering(1)  # a controller asks again when the answer was lost
        self._cpu_s = 0.0  # of all processes, when the last step ended

    def _service(self) -> Service:
        service = Service("supervisor")
        service.add("hello", Hello, self.hello)
        service.add("failed", RemoteFailure, self.failed)
        service.add("step_end", StepEnd, self.step_end)
        service.add("published", Published, self.published)
        service.add("hung", Hung, self.hung)
        AgreementService(self._job.shards).register(service)
        Keeper(self._job.plan, self._job.directory, self._display.note).register(service)
        return service

    async def run(self) -> None:
        """Runs the job to its end. Raises the first cause when a worker fails; ends every process in any case."""
        launcher: Launcher = build(self._job.plan.factory("launcher"))
        error = ""
        try:
            async with launcher.site(self._job.names(), self._service(), self._job.directory / "logs") as site:
                self._site = site
                watch = asyncio.ensure_future(self._watch(site))
                try:
                    specs = worker_specs(self._job, site)
                    self._display.phase(f"starting {len(specs)} processes")
                    await site.agent.call("spawn", SpawnRequest(specs), Nothing)
                    await self._over
                finally:
                    watch.cancel()
                    await asyncio.gather(watch, return_exceptions=True)
        except BaseException as caught:
            error = str(caught) or type(caught).__name__
            raise
        finally:
            self._observers.run_end(self._run, error)
            self._metrics.close()
            try:
                wall_s = time.monotonic() - self._started_s
                summary.write(self._run, wall_s=wall_s, cpu_s=self._cpu_s)
            except GcoreError as unwritten:  # must not hide how the run ended
                self._display.note(str(unwritten))

    # -- what workers tell --------------------------------------------------------------------------------------------

    async def hello(self, request: Hello, call: Call) -> Nothing:
        handshake.agree(request.name, worker=request.versions, supervisor=handshake.versions(request.versions.plugins))
        self._waiting.discard(request.name)
        log.info("%s is up, pid %s", request.name, request.pid)
        if not self._waiting and not self._ready.is_set():
            self._ready.set()
            self._observers.run_start(self._run)
        elif self._waiting:
            self._display.phase(f"waiting for {_some(sorted(self._waiting))}")
        if request.name in self._controllers:
            await self._ready.wait()  # a controller begins when everybody is up
        return Nothing()

    async def failed(self, request: RemoteFailure, call: Call) -> Nothing:
        self._errors.append(from_wire(request))
        return Nothing()

    async def hung(self, request: Hung, call: Call) -> Nothing:
        """Nobody can wait for it any more: it writes its stacks to its log and is killed, as if it had been lost."""
        log_file = run_directory.log_path(self._job.directory, request.name)
        self._display.note(
            f"{request.waiter} waits for {request.name}: {request.what} (run.patience_s); it is killed, "
            f"and its stacks are in {log_file}"
        )
        if self._site is not None:
            await self._site.agent.call("kill", KillRequest(request.name), Nothing)
        return Nothing()

    async def published(self, request: Published, call: Call) -> Nothing:
        async def act(_: list[None]) -> None:
            self._observers.weights_published(self._run, request.version)

        await self._once.join(("published", request.version), 0, None, act)
        return Nothing()

    async def step_end(self, request: StepEnd, call: Call) -> Nothing:
        async def act(_: list[None]) -> None:
            await self._step_ended(request)

        await self._once.join(("step", request.report.step), 0, None, act)
        return Nothing()

    async def _step_ended(self, request: StepEnd) -> None:
        """Everything a step leaves behind: metrics with what each process used, samples, the position in the data."""
        assert self._site is not None
        report, usage = request.report, await self._site.agent.call("usage", Nothing(), UsageReply)
        for note in usage.notes:
            self._display.note(note)
        if not self._site.inline:
            usage.cpu_s["supervisor"] = time.process_time()
        self._cpu_s = sum(usage.cpu_s.values())
        report.metrics["cpu_seconds"] = self._cpu_s
        report.metrics |= {f"cpu_seconds/{name}": value for name, value in usage.cpu_s.items()}
        report.metrics |= {f"memory_mib/{name}": value for name, value in usage.memory_mib.items()}
        self._metrics.append(report)
        if report.samples and self._evaluated is not None:
            reader = StoreReader(self._site.store, AGENT, self._site.secret)
            rows = shown_rows(report.samples, reader, self._evaluated)
            run_directory.write_samples(self._job.directory, report.step, rows)
        if request.ledger:
            run_directory.write_position(self._job.directory, {"step": report.step, **request.ledger})
        self._display.step(report)
        for name, count in report.metrics.items():
            if name.startswith("groups/dropped/"):
                self._display.note(f"step {report.step}: {count:.0f} groups dropped: {name.rpartition('/')[2]}")
        self._observers.step_end(self._run, report)

    # -- what the agent tells -----------------------------------------------------------------------------------------

    async def _watch(self, site: Site) -> None:
        try:
            async for gone in site.agent.stream("exits", Nothing(), WorkerExit, deadline_s=float("inf")):
                await self._exited(gone)
        except GcoreError as error:
            self._end(error)

    async def _exited(self, gone: WorkerExit) -> None:
        if gone.code == 0 and gone.name in self._controllers:
            self._controllers.discard(gone.name)
            if not self._controllers:
                self._end(None)
            return
        reason = f"ended with {_code(gone.code)}"
        role, _, rank = gone.name.rpartition(".")
        failure = WorkerFailure(role=role, rank=int(rank), reason=reason, fatal=not gone.restarted)
        self._observers.worker_failed(self._run, failure)
        if gone.restarted:
            self._display.note(f"{gone.name} {reason}; it is started again")
            return
        await asyncio.sleep(0 if self._errors else SETTLE_S)
        self._end(self._cause(gone, reason))

    def _cause(self, gone: WorkerExit, reason: str) -> GcoreError:
        """The first failure that is not itself a report of somebody's death."""
        causes = [error for error in self._errors if not isinstance(error, WorkerDied)]
        if causes:
            return causes[0]
        log_file = run_directory.log_path(self._job.directory, gone.name)
        last = [line for line in gone.tail.splitlines() if line.strip()][-1:]
        return WorkerDied(
            reason if not self._waiting else f"{reason} while the run was starting",
            where=gone.name,
            why="\n".join(last),
            todo=f"its log: {log_file}",
            process=gone.name,
            pid=gone.pid,
            code=gone.code,
        )

    def _end(self, error: GcoreError | None) -> None:
        if self._over.done():
            return
        if error is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(error)

    def _observer_failed(self, plugin: str, hook: str, error: BaseException) -> None:
        log.error("plugin %s failed in %s", plugin, hook, exc_info=error)
        log_file = run_directory.log_path(self._job.directory, "supervisor")
        self._display.note(str(observer_failure(plugin, hook, error, f"its traceback: {log_file}")))


def _some(names: list[str], shown: int = 6) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def _code(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


# -- the command ------------------------------------------------------------------------------------------------------


def prepare(file: Path, overrides: Sequence[str], display_of: Any, resume: Path | None = None) -> tuple[Job, Display]:
    """Everything before the first process: configuration, run directory, data, models, placement. ``resume``: the
    directory of the run that goes on."""
    plan = config.load(file, overrides)
    checks.interpreters(plan.config, plan.provided, plan.source)
    rows = {"train": len(build(plan.factory("data")))}
    if "evaluation.data" in plan.provided:
        rows["evaluation"] = len(build(plan.factory("evaluation.data")))
    placed = place(plan)
    settings = plan.config["run"]
    resumed = None if resume is None else newest(resume)
    if resumed is not None:
        check_same(resumed, plan, rows["train"])
    directory = resume or run_directory.create(Path("runs"), settings["name"], settings["dir"])
    display: Display = display_of(settings["steps"])
    for note in resumed.notes if resumed else ():
        display.note(note)
    run_directory.write_config(directory, OmegaConf.to_yaml(plan.config))
    run_directory.write_lock(directory, {item["plugin"]: item for item in plan.lock})
    models = {role: _model(role, node["model"], display) for role, node in plan.config["roles"].items()}
    for role, node in plan.config["roles"].items():
        if node["follows"] and not models[role]:
            models[role] = models[node["follows"]]
    return Job(plan=plan, directory=directory, models=models, rows=rows, placed=placed, resumed=resumed), display


def _model(role: str, model: dict[str, Any], display: Display) -> dict[str, Any]:
    if "make" not in model:
        return model
    cache = Path(os.environ.get("G_CORE_CACHE") or Path.home() / ".cache" / "g-core") / "models"
    path = make_model(model["make"], cache, lambda share, text: display.phase(f"roles.{role}: {text}", share))
    return {**model, "path": str(path)}


@contextlib.contextmanager
def _terminated_as_interrupt() -> Iterator[dict[str, int]]:
    """SIGTERM ends the run as Ctrl-C does, with its own exit code."""
    codes = {"code": 130}

    def interrupt(*_: Any) -> None:
        codes["code"] = 143
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in the background of a script
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)  # whoever handles an interrupt at this moment

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield codes
    finally:
        signal.signal(signal.SIGTERM, before)


def run_file(file: Path, overrides: Sequence[str] = (), resume: Path | None = None) -> int:
    """``g-core run`` and ``resume``: 0 when the run ended well. Errors are raised; Ctrl-C gives 130, SIGTERM 143."""
    job, display = None, None
    with _terminated_as_interrupt() as codes:
        try:
            job, display = prepare(file, overrides, lambda steps: open_display(steps, sys.stdout), resume)
            _supervise(job, display)
        except KeyboardInterrupt:
            if display is not None and job is not None:
                go_on = [f"go on with: g-core resume {job.directory}"] if Checkpoints(job.directory).steps() else []
                display.finish(["stopped; every process has ended", f"the run is in {job.directory}", *go_on])
            return codes["code"]
        except BaseException:
            if display is not None and job is not None:
                display.finish([f"the run is in {job.directory}"])
            raise
    table = summary.table(run_directory.read_metrics(job.directory))
    display.finish([*table.splitlines(), "", *where_things_are(job.directory)])
    return 0


def _supervise(job: Job, display: Display) -> None:
    """Runs the job; when a process is lost that nobody replaces, once more from the newest checkpoint."""

    async def run(job: Job) -> None:
        await Supervisor(job, display).run()

    with _logged(run_directory.log_path(job.directory, "supervisor")):
        for left in reversed(range(job.plan.config["checkpoint"]["restarts"] + 1)):
            try:
                asyncio.run(run(job))
                return
            except WorkerError as error:
                if not left or not Checkpoints(job.directory).steps():
                    raise
                log.exception("the run goes on from its newest checkpoint")
                job = replace(job, resumed=newest(job.directory))
                assert job.resumed is not None
                for note in (str(error), *job.resumed.notes, f"the run goes on from step {job.resumed.step}"):
                    display.note(note)


@contextlib.contextmanager
def _logged(file: Path) -> Iterator[None]:
    """What this process logs, and inline what its workers log, goes to a file like theirs."""
    handler = logging.FileHandler(file)
    handler.setFormatter(logging.Formatter("%(asctime)s supervisor %(levelname)s %(message)s"))
    root, own = logging.getLogger(), logging.getLogger("gcore_core")
    before = own.level
    root.addHandler(handler)
    own.setLevel(logging.INFO)
    try:
        yield
    finally:
        own.setLevel(before)
        root.removeHandler(handler)
        handler.close()


def where_things_are(directory: Path) -> list[str]:
    named = {"summary": "summary.md", "curves": "curves.png", "weights": "weights", "metrics": "metrics.jsonl"}
    return [f"{what:8} {directory / name}" for what, name in named.items() if (directory / name).exists()]
