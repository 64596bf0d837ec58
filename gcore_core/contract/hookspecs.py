"""Every hook, on one page.

A plugin is an entry point of a distribution, in the group ``gcore``. The entry point's name is the
plugin's name and its value a light module that holds functions marked ``@hookimpl``:

    from gcore_core import hookimpl
    from gcore_core.contract.providers import BalancerProvider

    @hookimpl
    def gcore_balancers():
        yield BalancerProvider(summary="...", factory="my_module:MyBalancer")

**Provider hooks** take nothing, are pure and return in milliseconds an iterable of frozen
descriptions. They are called once, in the process that reads the configuration, right after the
plugin was imported, and only if the configuration names the plugin. An exception in one means that
the plugin is broken; the run does not start.

**The check hooks** see the resolved plan before anything starts and return problems; they change
nothing. ``gcore_preflight`` comes after them, when the job's workers are placed.

**Observer hooks** run in the supervisor, one after the other in the order of ``plugins:``; results
are ignored. One that raises is reported once with its plugin's name. No observer hook of that
plugin is called again, unless the run goes back to a checkpoint; the others and the run go on. They
have no settings: what needs some, or calls over a network, is provided by ``gcore_observers`` and
chosen under ``observers:``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pluggy

from gcore_core.contract import providers as p
from gcore_core.contract.dataset import Dataset
from gcore_core.contract.errors import GcoreError
from gcore_core.contract.looking import Look, Seen
from gcore_core.contract.preflight import PlacedJob, ResolvedJob
from gcore_core.contract.records import RunFacts, StepReport, WorkerFailure

hookspec = pluggy.HookspecMarker("gcore")


@hookspec
def gcore_controllers() -> Iterable[p.ControllerProvider]:  # type: ignore[empty-body]
    """Step programs. Factory: ``(config, context: ControllerContext) -> Controller``, called in
    each controller.
    """


@hookspec
def gcore_roles() -> Iterable[p.RoleProvider]:  # type: ignore[empty-body]
    """Participants beyond policy, rollout and judge: the kind of backend they run, whose weights
    they follow and which per-action columns they give. No factory.
    """


@hookspec
def gcore_placement_policies() -> Iterable[p.PlacementProvider]:  # type: ignore[empty-body]
    """Placement policies. Factory: ``(config) -> PlacementPolicy``; pure.

    The supervisor asks a policy before any process starts. Where it moves devices, the lead asks it
    again before each step.
    """


@hookspec
def gcore_generators() -> Iterable[p.GeneratorProvider]:  # type: ignore[empty-body]
    """Backends that sample. Factory: ``(config, context: WorkerContext) -> Generator``, called in
    each worker.
    """


@hookspec
def gcore_trainers() -> Iterable[p.TrainerProvider]:  # type: ignore[empty-body]
    """Backends that train. Factory: ``(config, context: WorkerContext) -> Trainer``, called in each
    rank.
    """


@hookspec
def gcore_annotators() -> Iterable[p.AnnotatorProvider]:  # type: ignore[empty-body]
    """Models that give per-action columns. Factory: ``(config, context: WorkerContext) ->
    Annotator``, called in each worker.
    """


@hookspec
def gcore_rewards() -> Iterable[p.RewardProvider]:  # type: ignore[empty-body]
    """Scorers. Factory: ``(config, context: WorkerContext) -> Scorer``, called in the scorer
    worker.
    """


@hookspec
def gcore_advantages() -> Iterable[p.AdvantageProvider]:  # type: ignore[empty-body]
    """Advantage estimators. Factory: ``(config) -> Advantage``, called in controllers, or
    ``(config) -> ActionAdvantage``, called in controllers and in each trainer rank.
    """


@hookspec
def gcore_objectives() -> Iterable[p.ObjectiveProvider]:  # type: ignore[empty-body]
    """Losses. Factory: ``(config) -> Objective``, called in each trainer rank."""


@hookspec
def gcore_balancers() -> Iterable[p.BalancerProvider]:  # type: ignore[empty-body]
    """Splitters of records over ranks. Factory: ``(config) -> Balancer``, called in controllers;
    the lead alone asks it.
    """


@hookspec
def gcore_sentinels() -> Iterable[p.SentinelProvider]:  # type: ignore[empty-body]
    """Watchers of log-probs. Factory: ``(config, context: SentinelContext) -> Sentinel``, called in
    each trainer rank and in each controller. What follows from an alarm is for its step check,
    which the lead's controller makes (``SentinelProvider.check``).
    """


@hookspec
def gcore_environments() -> Iterable[p.EnvironmentProvider]:  # type: ignore[empty-body]
    """What the policy acts in, over several turns.

    Factory: ``(config, context: WorkerContext, generator: Generator) -> Draws``, called in each of
    the policy's generators, around it.
    """


@hookspec
def gcore_observers() -> Iterable[p.ObserverProvider]:  # type: ignore[empty-body]
    """Observers with settings of their own. Factory: ``(config, context: ObserverContext) ->
    Observer``, called in a process of the observer's own.
    """


@hookspec
def gcore_filters() -> Iterable[p.FilterProvider]:  # type: ignore[empty-body]
    """Judges of whole groups for dynamic sampling. Factory: ``(config) -> Filter``, called in
    controllers.
    """


@hookspec
def gcore_datasets() -> Iterable[p.DatasetProvider]:  # type: ignore[empty-body]
    """Prompt sources. Factory: ``(config) -> Dataset``, called in the supervisor and in workers
    that read prompts.
    """


@hookspec
def gcore_launchers() -> Iterable[p.LauncherProvider]:  # type: ignore[empty-body]
    """Starters of node agents. Factory: ``(config) -> Launcher``, called in the supervisor."""


@hookspec
def gcore_commands() -> Iterable[p.CommandProvider]:  # type: ignore[empty-body]
    """Commands reached as ``g-core <plugin> <name> ...``. Factory: ``(words: list[str]) -> int``
    (exit code).
    """


@hookspec
def gcore_venvs() -> Iterable[p.VenvProvider]:  # type: ignore[empty-body]
    """What pip is to install for the plugin's engine, one description a flavour. For ``g-core
    venv``; no factory.
    """


@hookspec
def gcore_views() -> Iterable[p.ViewProvider]:  # type: ignore[empty-body]
    """Pictures of a run for a notebook. Factory: ``(run_dir: Path) -> object``, called in the
    notebook's process, while the run goes on and afterwards.
    """


@hookspec
def gcore_check(  # type: ignore[empty-body]
    plan: Mapping[str, Any], job: ResolvedJob
) -> Iterable[str]:
    """Problems with the resolved configuration, one sentence each, starting with the config path.

    ``plan`` has its plain values. ``job`` is the same job with what is chosen at each config path:
    its description, and its settings as an object. By them a plugin asks whether the others can do
    what a feature of its own needs; the core asks that for no plugin.

    Called once before anything starts, in the process that reads the configuration; all plugins'
    problems are printed together and end the run. Must not raise and must not change the plan.
    """


@hookspec
def gcore_check_files(  # type: ignore[empty-body]
    plan: Mapping[str, Any], here: bool, datasets: Mapping[str, Dataset]
) -> Iterable[str | Look]:
    """Problems with files, data and models that the job names, one sentence each, starting with the
    config path.

    Called once by ``g-core check``, and once by a run before its processes start; not where a job
    is only read, as to plan, shrink or export it, since its files may lie elsewhere then. ``here``
    says whether all workers start on this machine: a worker elsewhere may have a file that is not
    here. Must not raise, download, import an engine or change the plan.

    A model that the job makes (``model.make``) has ``model.path`` next to it once it has been made;
    a run calls the hook once more after it made one.

    What needs an engine's libraries is yielded as a ``Look``: its function is called in a helper
    process of the role's interpreter, and what it finds is reported as if this hook had. That is
    done by ``gcore_answer_looks``.

    ``datasets`` maps "data" and "evaluation.data" to the dataset that the job chose there, opened
    in this process just before the first call of the hook and closed after the last. One is left
    out where its settings say that opening it ``downloads``. So is one that cannot be opened or
    read; the core tells that. A plugin that looks at rows takes few of them: see
    ``gcore_language.rows``.
    """


@hookspec
def gcore_answer_looks(  # type: ignore[empty-body]
    looks: Sequence[tuple[str, Look]], say: Callable[[str], None]
) -> Seen:
    """Answers the looks that ``gcore_check_files`` hooks of all plugins have yielded.

    Called after them, in the process that reads the configuration, where there are some. The first
    plugin that has the hook answers: one of the job's, else ``plan`` of gcore-tools, where that is
    installed. ``looks`` are the plugin's name and its look, whose function may be called as it is;
    ``say`` shows what goes on, where that takes long. What is wrong is among the problems, not
    raised.
    """


@hookspec
def gcore_preflight(  # type: ignore[empty-body]
    job: ResolvedJob,
    placed: PlacedJob,
    overrides: Sequence[str],
    facts: Mapping[str, int],
) -> Iterable[str | GcoreError]:
    """Notes on a start, such as what it will need of memory, one sentence each; and errors, made
    and not raised, for what cannot start.

    Called by ``g-core check``, and by a run before its processes start, when workers are placed and
    files are looked at. Notes are printed; the first error ends the command or the run. The core
    itself expects nothing: besides the job's plugins, it asks the plugin ``plan`` where that is
    installed, whether the job names it or not.

    ``overrides`` are the words ``key=value`` that the job was read with besides its file, and
    ``facts`` what looks counted (``WorkerShape.facts``). Must start no process and change nothing.
    One that raises is told in a note, and the job starts.
    """


@hookspec
def gcore_run_start(run: RunFacts) -> None:
    """The run's processes are up, no step has begun. Once per start of a run, also when it is
    resumed.
    """


@hookspec
def gcore_step_end(run: RunFacts, report: StepReport) -> None:
    """A step is committed. Once per step, in order; ``report.evaluation`` is filled where an
    evaluation was due.

    A run that goes on from a checkpoint begins with the step after it, whatever had been reported
    before. Where the checkpoint's step was not evaluated although that was due, it is reported once
    more, without metrics.
    """


@hookspec
def gcore_weights_published(run: RunFacts, version: int) -> None:
    """Every replica of the policy's generator that is awake has verified weights ``version``. Once
    per push.
    """


@hookspec
def gcore_checkpoint_saved(run: RunFacts, step: int, path: str) -> None:
    """A whole checkpoint of the state after ``step`` steps lies in the directory ``path``. Once per
    checkpoint.
    """


@hookspec
def gcore_worker_failed(run: RunFacts, failure: WorkerFailure) -> None:
    """A worker ended or was lost. Called when it is noticed, before any restart."""


@hookspec
def gcore_run_end(run: RunFacts, error: str) -> None:
    """The run is over; ``error`` is empty when it ended well. Once, the last call."""
