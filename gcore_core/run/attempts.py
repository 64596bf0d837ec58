"""Makes attempts of a run, until one ends well or the run may not go on. All are the same:

    begin     with nothing, or from the newest checkpoint (``begins_from``)
    place     on the machines that there are (``machines.place_run``)
    run       on a site that is opened for the attempt and closed behind it (``supervisor``)

So the first attempt, one after a loss, that of a supervisor that takes a killed one's place
(``restart_supervisor``) and that of ``g-core resume`` differ in what they are given: ``prepare`` of
``gcore_core.run.start`` begins and places the first of a process, this module those behind it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from gcore_core.config.plan import Plan
from gcore_core.contract import run_files
from gcore_core.contract.errors import CheckpointError, ConfigError, WorkerError
from gcore_core.run.checkpoint_service import Resumed, newest
from gcore_core.run.checkpoints import Checkpoints
from gcore_core.run.display import Display
from gcore_core.run.jobs import Job
from gcore_core.run.machines import MachinesChange, place_run, say_changes
from gcore_core.run.manifest import KEY, ensure_key
from gcore_core.run.observers import chosen_observers
from gcore_core.run.preflight import changed_settings, check_same, check_version
from gcore_core.run.restart_supervisor import Lost, StarterLink
from gcore_core.run.signals import Signals
from gcore_core.run.supervisor import Supervisor, ending
from gcore_core.runtime.main_thread import MainThread

log = logging.getLogger(__name__)


def supervise(
    job: Job, display: Display, signals: Signals, starter: StarterLink | None = None
) -> None:
    """Runs the job, and again from its newest checkpoint when a process is lost for good.

    That happens at most ``job.restarts`` times, and only when there is a checkpoint. It goes on
    from one also when machines have come or leave, however often.

    starter: is told of each loss. It counts them, too: a supervisor that takes this one's place has
        what is left.
    Raises KeyboardInterrupt when a signal has ended the run.
    """
    with _logged(run_files.log_path(job.directory, "supervisor")):
        try:
            MainThread().run(lambda: _attempts(job, display, signals, starter))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        if signals.code:
            raise KeyboardInterrupt


async def _attempts(
    job: Job, display: Display, signals: Signals, starter: StarterLink | None
) -> None:
    """Makes one attempt after the other."""
    supervisor: Supervisor | None = None
    key = _key(job.directory)

    def stop(within_s: float) -> bool:
        return supervisor is not None and supervisor.stop(within_s)

    # Signals are asked for while a site closes, too: one must not end that half way. Observers take
    # what is left when the last site is closed, since a hanging one must not hold its devices.
    with signals.ask(stop):
        async with chosen_observers(job.plan, job.directory, display.note) as observers:
            with ending(lambda: supervisor):
                while True:
                    supervisor = Supervisor(job, display, observers)
                    try:
                        await supervisor.run()
                        return
                    except WorkerError as error:
                        if signals.code:
                            display.note(str(error))
                            raise asyncio.CancelledError from error
                        if not isinstance(error, MachinesChange):
                            job = _counted(job, error, starter)
                            display.note(str(error))
                    job = await _next(job, key, display)


def _counted(job: Job, loss: WorkerError, starter: StarterLink | None) -> Job:
    """Returns the job with one restart less. Raises the loss where the run may not go on."""
    saved_steps = Checkpoints(job.directory).steps()
    if not job.restarts or not saved_steps:
        raise loss
    log.exception("the run goes on from its newest checkpoint")
    if starter is not None:
        starter.tell(Lost())
    return replace(job, restarts=job.restarts - 1)


async def _next(job: Job, key: bytes, display: Display) -> Job:
    """Returns the job of the next attempt, and says from where and on what machines it goes on.

    key: that of the run's checkpoints when it began. Raises CheckpointError where another run's
        stand in its directory now, and ConfigError where they are of another configuration, or the
        machines are not enough for too long.
    """
    if _key(job.directory) != key:
        raise CheckpointError(
            "the checkpoints here are those of another run.",
            where=str(job.directory),
            why=f"{KEY} is not the one that this run began with",
            todo="give each run a directory of its own, and begin this one again",
        )
    resumed = begins_from(job.directory, job.plan, job.rows["train"], display.note)
    display.note(f"the run goes on from step {resumed.step}")
    placed = await place_run(job.plan, job.launcher, display.note, again=True)
    say_changes(job.plan, job.placed.missing, placed, display.note)
    return replace(job, resumed=resumed, placed=placed)


def begins_from(
    directory: Path,
    plan: Plan,
    rows: int,
    note: Callable[[str], None],
) -> Resumed:
    """Returns the newest whole checkpoint of a run, from which it goes on as the same run.

    rows: how many the dataset of the job has now.
    note: is told which newer checkpoints are damaged, and which settings differ.
    Raises CheckpointError where there is none or another minor version of the core saved it, and
    ConfigError where it would be another run.
    """
    resumed = newest(directory)
    check_version(directory, Path(resumed.path), resumed.core)
    check_same(resumed, plan, rows)
    for text in resumed.notes:
        note(text)
    for text in changed_settings(resumed, plan):
        note(text)
    return resumed


def _key(run_dir: Path) -> bytes:
    """Returns the key of the run's checkpoints, by which they are known to be its own."""
    try:
        return ensure_key(run_dir)
    except (OSError, ValueError) as error:
        raise ConfigError(
            "the key of the run's checkpoints cannot be read or made.",
            where=str(run_dir / KEY),
            why=str(error),
            todo="see to that directory",
        ) from error


@contextlib.contextmanager
def _logged(file: Path) -> Iterator[None]:
    """Writes what this process logs to a file, as workers do; inline, their logs are here too."""
    handler = logging.FileHandler(file)
    handler.setFormatter(logging.Formatter("%(asctime)s supervisor %(levelname)s %(message)s"))
    root_logger = logging.getLogger()
    core_logger = logging.getLogger("gcore_core")
    level_before = core_logger.level
    root_logger.addHandler(handler)
    core_logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        core_logger.setLevel(level_before)
        root_logger.removeHandler(handler)
        handler.close()
