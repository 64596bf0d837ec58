"""Prepares the first attempt of a process, has attempts made, and says how the run ended.

This is what ``g-core run`` and ``g-core resume`` do.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gcore_core.config import checks, yaml_source
from gcore_core.config.plan import Plan, load_plan
from gcore_core.contract import run_files
from gcore_core.contract.factories import build
from gcore_core.contract.launching import Launcher
from gcore_core.node.process_record import RECORD, clear_up
from gcore_core.run import directory as run_directory
from gcore_core.run import environment, summary
from gcore_core.run.attempts import begins_from, supervise
from gcore_core.run.checkpoint_service import Resumed
from gcore_core.run.checkpoints import Checkpoints
from gcore_core.run.consumed import check_data
from gcore_core.run.data_checks import DATASETS
from gcore_core.run.display import Display, open_display
from gcore_core.run.initial_placement import run_apart
from gcore_core.run.jobs import Job
from gcore_core.run.machines import place_run, say_changes
from gcore_core.run.make_model import make_model, models_cache
from gcore_core.run.preflight import (
    check_estimates,
    check_files,
    check_parts,
    check_pushes,
    check_same_files,
    check_version,
)
from gcore_core.run.restart_supervisor import Begun, Start, StarterLink, with_restarts
from gcore_core.run.signals import Signals
from gcore_core.run.supervised import goes_on_already, hold_run
from gcore_core.runtime.main_thread import exits_told
from gcore_core.runtime.named_files import NamedFile, named_files

_ENDS_S = 3.0  # a supervisor that was just killed is gone within that
_LOOK_S = 0.1

#: Makes the display of a run: number of steps -> display.
DisplayOf = Callable[[int], Display]


def prepare(
    start: Start, display_of: DisplayOf, *, until_end: contextlib.ExitStack
) -> tuple[Job, Display]:
    """Does everything that comes before the first process.

    It resolves the configuration, counts the data, places the workers, makes the run's directory
    and the models, in an order in which what is quick to refuse is refused first.
    until_end: is closed when the run has ended; until then no other process supervises it.
    """
    resume = start.resume
    by_itself = start.restarts is not None
    if resume is not None:
        _take_up(resume, until_end)
    plan = load_plan(start.file, start.overrides)
    checks.interpreters(plan.settings, plan.provided, plan.source)
    display = display_of(plan.settings.run.steps)
    datasets = {path: build(plan.factory(path)) for path in DATASETS if path in plan.provided}
    rows = {DATASETS[path]: len(dataset) for path, dataset in datasets.items()}
    launcher: Launcher = build(plan.factory("launcher"))
    named = {role: node.model for role, node in plan.settings.roles.items()}
    placed = run_apart(lambda: place_run(plan, launcher, display.note, again=by_itself))
    check_parts(plan)
    seen = check_files(plan, placed.nodes, display.phase, datasets)
    expected = check_estimates(plan, placed, start.overrides, seen.facts)
    push_note = check_pushes(plan, placed, launcher)
    resumed = None
    if resume is not None:
        resumed = begins_from(resume, plan, rows["train"], display.note)
    directory = resume or _new_directory(plan, until_end)
    check_data(directory, datasets["data"], resumed=resume is not None)
    models = {role: _model(role, model, display) for role, model in named.items()}
    files = named_files(_config_with_models(plan.config, models), directory)
    if resumed is not None:
        _compare_files(directory, plan, resumed, files, display, by_itself=by_itself)
    _write(directory, plan, resumed, files)
    if any("make" in model for model in named.values()):
        # Those models are there only now.
        seen = check_files(plan, placed.nodes, display.phase, datasets)
    for role, node in plan.settings.roles.items():
        if node.follows and not models[role]:
            models[role] = models[node.follows]
    say_changes(plan, {}, placed, display.note)
    notes = [*plan.notes, placed.note, push_note, *seen.notes, *expected]
    for note in filter(None, notes):
        display.note(note)
    restarts = start.restarts
    if restarts is None:
        restarts = plan.settings.checkpoint.restarts
    job = Job(
        plan=plan,
        directory=directory,
        models=models,
        rows=rows,
        launcher=launcher,
        placed=placed,
        resumed=resumed,
        restarts=restarts,
        files=files,
    )
    return job, display


def _take_up(run_dir: Path, until_end: contextlib.ExitStack) -> None:
    """Makes this process the only one that supervises a run that goes on.

    Raises CheckpointError for a run of another version, before its job is read: that may have keys
    which this version does not know.
    """
    until_end.enter_context(hold_run(run_dir, _ENDS_S))
    _end_what_is_left(run_dir)
    if saved := Checkpoints(run_dir).newest_saved():
        check_version(run_dir, *saved)


def _new_directory(plan: Plan, until_end: contextlib.ExitStack) -> Path:
    directory = run_directory.create(Path("runs"), plan.name, plan.settings.run.dir)
    until_end.enter_context(hold_run(directory))
    return directory


def _config_with_models(
    config: Mapping[str, Any], models: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    roles = {role: {**node, "model": models[role]} for role, node in config["roles"].items()}
    return {**config, "roles": roles}


def _write(
    directory: Path,
    plan: Plan,
    resumed: Resumed | None,
    files: Mapping[str, NamedFile],
) -> None:
    """Writes what a run is started with into its directory."""
    run_directory.write_config(directory, yaml_source.written(plan.config))
    run_directory.write_origins(directory, plan.provenance())
    run_directory.write_lock(directory, {item["plugin"]: item for item in plan.lock})
    step = resumed.step if resumed else 0
    environment.write(directory, plan, step, files)


def _compare_files(
    directory: Path,
    plan: Plan,
    resumed: Resumed,
    files: Mapping[str, NamedFile],
    display: Display,
    *,
    by_itself: bool,
) -> None:
    """Tells which files of a run that goes on have changed since it was last started.

    by_itself: nobody asked for it. Raises ConfigError where a file is another one that must not be.
    """
    changed = environment.changed_files(directory, resumed.step, files)
    check_same_files(plan.config, changed, by_itself=by_itself)
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


def run_with_restarts(
    file: Path,
    overrides: Sequence[str] = (),
    resume: Path | None = None,
) -> int:
    """Does what ``run_file`` does, in a child that is started again when it is killed."""
    return with_restarts(Start(file=file, overrides=overrides, resume=resume), run_job)


def run_told(
    file: Path,
    overrides: Sequence[str],
    resume: Path | None,
    display_of: DisplayOf,
    tell_directory: Callable[[str], None],
) -> int:
    """Does what ``run_with_restarts`` does, by another display; it also tells where the run is.

    The last two are called in the child that supervises the run, and again in each child that takes
    its place.
    """

    def run(start: Start, starter: StarterLink) -> int:
        return run_job(start, starter, display_of, tell_directory)

    return with_restarts(Start(file=file, overrides=overrides, resume=resume), run)


def run_file(
    file: Path,
    overrides: Sequence[str] = (),
    resume: Path | None = None,
) -> int:
    """Runs a job to its end and returns the exit code, see ``run_job``."""
    return run_job(Start(file=file, overrides=overrides, resume=resume))


def run_job(
    start: Start,
    starter: StarterLink | None = None,
    display_of: DisplayOf | None = None,
    tell_directory: Callable[[str], None] | None = None,
) -> int:
    """Runs a job to its end and returns the exit code.

    0 when the run ended well, 130 after Ctrl-C, 143 after SIGTERM; errors are raised.

    starter: starts this process again when it is killed; it is told when the run's directory is
        known.
    display_of: makes the display, given the number of steps. By default it is on standard output.
    tell_directory: is given the run's directory as soon as it is known.
    """
    job = None
    display: Display | None = None
    signals = Signals()

    def displayed(steps: int) -> Display:
        nonlocal display
        display = display_of(steps) if display_of else open_display(steps, sys.stdout)
        return display

    with signals.handled(), contextlib.ExitStack() as until_end:
        try:
            with exits_told():
                job, display = prepare(start, displayed, until_end=until_end)
                directory = str(job.directory.resolve())
                if starter is not None:
                    starter.tell(Begun(directory, job.restarts))
                if tell_directory is not None:
                    tell_directory(directory)
                supervise(job, display, signals, starter)
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
    weights_sha256 = run_files.read_weights_sha256(directory)
    return [*lines, f"weights_sha256 {weights_sha256}"] if weights_sha256 else lines
