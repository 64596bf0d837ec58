"""Prepares a job, supervises it, and begins again from a checkpoint when a process was lost.

This is what ``g-core run`` and ``g-core resume`` do.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from gcore_core.config import checks, yaml_source
from gcore_core.config.plan import Plan, load_plan
from gcore_core.contract import run_files
from gcore_core.contract.errors import CheckpointError, ConfigError, WorkerError
from gcore_core.contract.factories import build
from gcore_core.contract.launching import ElasticLauncher, Launcher, NodeFacts
from gcore_core.run import directory as run_directory
from gcore_core.run import environment, summary
from gcore_core.run.checkpoint_service import Resumed, newest
from gcore_core.run.checkpoints import Checkpoints
from gcore_core.run.consumed import check_data
from gcore_core.run.display import Display, open_display
from gcore_core.run.guard import Begun, GuardLink, guarded
from gcore_core.run.host_memory import host_memory
from gcore_core.run.initial_placement import Placed, place_on_fewer, run_apart
from gcore_core.run.jobs import Job
from gcore_core.run.kept_site import KeptSite
from gcore_core.run.machine_changes import MachinesChange
from gcore_core.run.machines_left import PlacedOn, changes, place_again, place_first
from gcore_core.run.make_model import make_model, models_cache
from gcore_core.run.manifest import KEY, ensure_key
from gcore_core.run.memory_fit import check_memory
from gcore_core.run.observers import chosen_observers
from gcore_core.run.opened_data import DATASETS
from gcore_core.run.preflight import (
    changed_settings,
    check_files,
    check_parts,
    check_pushes,
    check_same,
    check_same_files,
)
from gcore_core.run.signals import Signals
from gcore_core.run.supervised import goes_on_already, hold_run
from gcore_core.run.supervisor import Supervisor, ending
from gcore_core.runtime.named_files import NamedFile, named_files
from gcore_core.runtime.process.leftovers import RECORD, clear_up
from gcore_core.runtime.process.main_thread import MainThread, exits_told

log = logging.getLogger(__name__)
_ENDS_S = 3.0  # a supervisor that was just killed is gone within that
_LOOK_S = 0.1

#: Makes the display of a run: number of steps -> display.
DisplayOf = Callable[[int], Display]


def prepare(
    file: Path,
    overrides: Sequence[str],
    display_of: Any,
    resume: Path | None = None,
    *,
    again: bool = False,
    until_end: contextlib.ExitStack,
) -> tuple[Job, Display]:
    """Does everything that comes before the first process.

    It resolves the configuration, counts the data, places the workers, makes the run's directory
    and the models, in an order in which what is quick to refuse is refused first.
    display_of: makes the display, given the number of steps.
    resume: the directory of the run that goes on.
    again: this process takes the place of one that was killed. The run had its machines once, so it
        goes on with those that are left.
    until_end: is closed when the run has ended; until then no other process supervises it.
    """
    if resume is not None:
        until_end.enter_context(hold_run(resume, _ENDS_S))
        _end_what_is_left(resume)
    plan = load_plan(file, overrides)
    checks.interpreters(plan.settings, plan.provided, plan.source)
    datasets = {path: build(plan.factory(path)) for path in DATASETS if path in plan.provided}
    rows = {DATASETS[path]: len(dataset) for path, dataset in datasets.items()}
    launcher: Launcher = build(plan.factory("launcher"))
    # One that takes a killed one's place may wait for machines, and says so.
    waits = again and isinstance(launcher, ElasticLauncher)
    display: Display | None = _displayed(plan, display_of) if waits else None
    found = _found(plan, launcher, display)
    placed = found.placed
    check_parts(plan)

    def say(text: str) -> None:
        nonlocal display
        display = display or _displayed(plan, display_of)
        display.phase(text)

    seen = check_files(plan, placed.nodes, say, datasets)
    memory_notes = check_memory(plan, placed, placed.nodes, overrides, facts=seen.facts)
    push_note = check_pushes(plan, placed, launcher)
    resumed = None if resume is None else newest(resume)
    if resumed is not None:
        check_same(resumed, plan, rows["train"])
    directory = resume or _new_directory(plan, until_end)
    check_data(directory, datasets["data"], resumed=resume is not None)
    display = display or _displayed(plan, display_of)
    models = {role: _model(role, node.model, display) for role, node in plan.settings.roles.items()}
    files = named_files(_with_models(plan.config, models), directory)
    if resumed is not None:
        _compare_files(directory, plan, resumed, files, display, by_itself=again)
    run_directory.write_config(directory, yaml_source.written(plan.config))
    run_directory.write_origins(directory, plan.provenance())
    run_directory.write_lock(directory, {item["plugin"]: item for item in plan.lock})
    environment.write(directory, plan, resumed.step if resumed else 0, files)
    if any("make" in node.model for node in plan.settings.roles.values()):
        # Those models are there only now.
        seen = check_files(plan, placed.nodes, display.phase, datasets)
    for role, node in plan.settings.roles.items():
        if node.follows and not models[role]:
            models[role] = models[node.follows]
    _say_changes(plan, {}, found, display)
    for note in filter(None, [placed.note, push_note, *seen.notes, *memory_notes]):
        display.note(note)
    kept_weights = host_memory(plan, placed, models)
    if kept_weights:
        display.note(kept_weights)
    job = Job(
        plan=plan,
        directory=directory,
        models=models,
        rows=rows,
        placed=placed,
        resumed=resumed,
        launcher=launcher if isinstance(launcher, ElasticLauncher) else None,
        missing=found.missing,
        files=files,
    )
    return job, display


def _new_directory(plan: Plan, until_end: contextlib.ExitStack) -> Path:
    """Makes the directory of a new run, which this process alone supervises."""
    directory = run_directory.create(Path("runs"), plan.name, plan.settings.run.dir)
    until_end.enter_context(hold_run(directory))
    return directory


def _with_models(
    config: Mapping[str, Any], models: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Returns the configuration with the path of each model, also of one that the job makes."""
    roles = {role: {**node, "model": models[role]} for role, node in config["roles"].items()}
    return {**config, "roles": roles}


def _compare_files(
    directory: Path,
    plan: Plan,
    resumed: Resumed,
    files: Mapping[str, NamedFile],
    display: Display,
    *,
    by_itself: bool,
) -> None:
    """Tells what is to be known of a run that goes on: bad checkpoints, what changed since.

    by_itself: nobody asked for it. Raises ConfigError where a file is another one that must not be.
    """
    changed = environment.changed_files(directory, resumed.step, files)
    check_same_files(plan.config, changed, by_itself=by_itself)
    for note in (*resumed.notes, *changed_settings(resumed, plan)):
        display.note(note)
    for key in changed:
        display.note(f"the file of {key} is not what it was when the run was last started")


def _end_what_is_left(run_dir: Path) -> None:
    """Ends what a supervisor that was killed has left of a run, before anything of it is read.

    Such processes may still write into the run's files. Raises ConfigError where a supervisor lives
    on this machine, since both would write into them.
    """
    until_s = time.monotonic() + _ENDS_S
    while pid := clear_up(run_dir / run_files.LOGS / RECORD):
        if time.monotonic() > until_s:
            raise goes_on_already(run_dir, str(pid))
        time.sleep(_LOOK_S)


def _displayed(plan: Plan, display_of: Any) -> Display:
    display: Display = display_of(plan.settings.run.steps)
    return display


def _found(plan: Plan, launcher: Launcher, display: Display | None) -> PlacedOn:
    """Finds the machines of a run and places it there.

    display: of a run that goes on with those that are left, and waits for more where it must; None:
        it begins.
    """
    if display is None or not isinstance(launcher, ElasticLauncher):
        return run_apart(lambda: place_first(plan, launcher))
    say = display.note
    try:
        return run_apart(lambda: place_again(plan, launcher, say, partial(place_on_fewer, plan)))
    except BaseException:
        display.finish()
        raise


def _model(role: str, model: dict[str, Any], display: Display) -> dict[str, Any]:
    """Returns the model's settings. A model that the job makes (``model.make``) is made and gets a
    path.
    """
    if "make" not in model:
        return model
    path = make_model(
        model["make"],
        models_cache(),
        lambda share, text: display.phase(f"roles.{role}: {text}", share),
    )
    return {**model, "path": str(path)}


def run_guarded(file: Path, overrides: Sequence[str] = (), resume: Path | None = None) -> int:
    """Does what ``run_file`` does, in a child that is started again when it is killed."""

    def supervise(again: Path | None, guard: GuardLink) -> int:
        if again is None:
            return run_file(file, overrides, resume, guard)
        return run_file(again / run_files.CONFIG, (), again, guard, again=True)

    return guarded(supervise)


def run_file(
    file: Path,
    overrides: Sequence[str] = (),
    resume: Path | None = None,
    guard: GuardLink | None = None,
    *,
    again: bool = False,
    display_of: DisplayOf | None = None,
) -> int:
    """Runs a job to its end and returns the exit code.

    0 when the run ended well, 130 after Ctrl-C, 143 after SIGTERM; errors are raised.

    guard: starts this process again when it is killed; it is told when the run's directory is
        known.
    again: this process takes the place of one that was killed.
    display_of: makes the display, given the number of steps. By default it is on standard output.
    """
    job = None
    display: Display | None = None
    signals = Signals()

    def displayed(steps: int) -> Display:
        nonlocal display
        display = (display_of or _display_of)(steps)
        return display

    with signals.handled(), contextlib.ExitStack() as until_end:
        try:
            with exits_told():
                job, display = prepare(
                    file, overrides, displayed, resume, again=again, until_end=until_end
                )
                if guard is not None:
                    restarts = job.plan.settings.checkpoint.restarts
                    guard.tell(Begun(str(job.directory.resolve()), restarts))
                _supervise(job, display, signals)
        except KeyboardInterrupt:
            if display is not None and job is not None:
                lines = ["stopped; every process has ended", f"the run is in {job.directory}"]
                saved_steps = Checkpoints(job.directory).steps()
                if saved_steps:
                    lines.append(
                        f"go on from step {saved_steps[-1]} with: g-core resume {job.directory}"
                    )
                display.finish(lines)
            elif display is not None:  # as while a model is made
                display.finish()
            return signals.code
        except BaseException:
            if display is not None:
                display.finish([f"the run is in {job.directory}"] if job is not None else [])
            raise
    table = summary.table(run_files.read_metrics(job.directory))
    display.finish([*table.splitlines(), "", *where_things_are(job.directory)])
    return 0


def _display_of(steps: int) -> Display:
    return open_display(steps, sys.stdout)


def _supervise(job: Job, display: Display, signals: Signals) -> None:
    """Runs the job, and again from its newest checkpoint when a process is lost for good.

    That happens at most ``checkpoint.restarts`` times, and only when there is a checkpoint. It goes
    on from one also when machines have come or leave, however often. Raises KeyboardInterrupt when
    a signal has ended the run.
    """

    with _logged(run_files.log_path(job.directory, "supervisor")):
        try:
            MainThread().run(lambda: _attempts(job, display, signals))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        if signals.code:
            raise KeyboardInterrupt


async def _attempts(job: Job, display: Display, signals: Signals) -> None:
    """Supervises one attempt after the other, on one site."""
    supervisor: Supervisor | None = None
    works = False  # whether there is an attempt that could save its state
    key = _key(job.directory)

    def stop(within_s: float) -> bool:
        return works and supervisor is not None and supervisor.stop(within_s)

    # Signals are asked for while the site closes, too: one must not end that half way. Observers
    # take what is left when the site is closed, since a hanging one must not hold its devices.
    with signals.ask(stop):
        async with (
            chosen_observers(job.plan, job.directory, display.note) as observers,
            KeptSite(job) as place,
        ):
            with ending(lambda: supervisor):
                restarts_left = job.plan.settings.checkpoint.restarts
                while True:
                    supervisor = Supervisor(job, display, observers)
                    works = True
                    try:
                        await supervisor.run(place)
                        return
                    except WorkerError as error:
                        if signals.code:
                            display.note(str(error))
                            raise asyncio.CancelledError from error
                        if not isinstance(error, MachinesChange):
                            if not restarts_left or not Checkpoints(job.directory).steps():
                                raise
                            restarts_left -= 1
                            log.exception("the run goes on from its newest checkpoint")
                            display.note(str(error))  # first: clearing up may take long
                        works = False
                        changes = supervisor.changes
                        moves_on = changes is not None and changes.is_due
                        # A machine that was missing, comes or leaves gets or loses its part only
                        # when a site is opened.
                        opens_anew = job.missing or moves_on or place.has_agent(error.where)
                        is_open = await place.clear(is_kept=not opens_anew)
                        if changes is not None:
                            changes.say_left()
                        job = _resumed(job, display, key)
                        if not is_open:
                            job = await _placed_again(job, display)
                            place.place(job)


def _resumed(job: Job, display: Display, key: bytes) -> Job:
    """Returns the job as it goes on from its newest checkpoint, and says so.

    key: that of the run's checkpoints when it began. Raises CheckpointError where another run's
        stand in its directory now, ConfigError where they are of another configuration.
    """
    if _key(job.directory) != key:
        raise CheckpointError(
            "the checkpoints here are those of another run.",
            where=str(job.directory),
            why=f"{KEY} is not the one that this run began with",
            todo="give each run a directory of its own, and begin this one again",
        )
    resumed = newest(job.directory)
    check_same(resumed, job.plan, job.rows["train"])
    for note in resumed.notes:
        display.note(note)
    display.note(f"the run goes on from step {resumed.step}")
    return replace(job, resumed=resumed)


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


async def _placed_again(job: Job, display: Display) -> Job:
    """Returns the job on the machines that are left, and says which have come and gone.

    Raises ConfigError where they are not enough for too long.
    """
    if job.launcher is None:
        return job
    fit = partial(_fitted, job.plan, job.models)
    now = await place_again(job.plan, job.launcher, display.note, fit)
    _say_changes(job.plan, job.missing, now, display)
    return replace(job, placed=now.placed, missing=now.missing)


def _fitted(
    plan: Plan, models: Mapping[str, Mapping[str, Any]], nodes: Sequence[NodeFacts]
) -> Placed:
    """Places a job on machines. Raises PlacementError, also where a machine has too little memory
    for generators that sleep.
    """
    placed = place_on_fewer(plan, nodes)
    host_memory(plan, placed, models)
    return placed


def _say_changes(
    plan: Plan, missing_before: Mapping[str, str], now: PlacedOn, display: Display
) -> None:
    """Says which machines have come and gone, and how many slots each role has then."""
    lines = changes(missing_before, now.missing)
    for line in lines:
        display.note(line)
    slots = now.placed.window.slots
    roles = plan.settings.roles.items()
    if lines or any(slots.get(role, node.slots) < node.slots for role, node in roles):
        told = [f"{role} {slots[role]} of {node.slots}" for role, node in roles]
        display.note(f"slots: {', '.join(told)}")


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


def where_things_are(directory: Path) -> list[str]:
    """Returns a line for each file of the run that a person may want to open.

    The last line has the SHA-256 of the final weights.
    """
    files = {
        "summary": "summary.md",
        "curves": "curves.png",
        "weights": "weights",
        "metrics": "metrics.jsonl",
    }
    lines = [
        f"{what:8} {directory / name}"
        for what, name in files.items()
        if (directory / name).exists()
    ]
    weights_sha256 = summary.weights_sha256_in(directory)
    return [*lines, f"weights_sha256 {weights_sha256}"] if weights_sha256 else lines
