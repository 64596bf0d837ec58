"""Checks a job before its processes start, beyond the values of its configuration.

check_parts: whether its parts can be made. ``g-core check`` and ``g-core run`` both call it, so
    that the first knows what the second would refuse.
check_files: whether the files, data and models that it names are there and in order; both call
    it, too.
check_pushes: whether weights reach every generator.
check_estimates: what plugins expect of the start, such as whether it fits into memory.
check_version: whether this version goes on from a checkpoint.
check_same, check_same_files: whether a resumed run is still the same run.
changed_settings: what else of it is set in another way.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from gcore_core import __version__
from gcore_core.config import checks
from gcore_core.config.plan import Plan
from gcore_core.config.plugins import Plugins
from gcore_core.config.yaml_source import flat
from gcore_core.contract.dataset import Dataset
from gcore_core.contract.errors import (
    CheckpointError,
    ConfigError,
    ContractError,
    GcoreError,
    PluginBroken,
    PluginNotFound,
)
from gcore_core.contract.factories import build
from gcore_core.contract.job_settings import POLICY, ROLLOUT
from gcore_core.contract.launching import ElasticLauncher, Launcher, NodeFacts
from gcore_core.contract.looking import Look, Seen
from gcore_core.contract.run_files import WEIGHTS
from gcore_core.contract.traits import traits_of
from gcore_core.run.checkpoint_service import Resumed, saved_config
from gcore_core.run.data_checks import open_data, row_problems
from gcore_core.run.initial_placement import Placed
from gcore_core.run.make_model import check_make, find_made, models_cache
from gcore_core.workers.checked_rewards import read_known

#: The plugin whose estimates every job gets where it is installed, in gcore-tools.
ESTIMATES = "plan"
#: Parts that run in controllers: numpy at most, so they can be made here, too.
LIGHT_PARTS = ("advantage", "filter", "balance")
#: What a resumed run must not change: it would be another run. One with another ``run.dir`` would
#: still go on where it is.
_FIXED = re.compile(
    r"run\.(seed|dir)|(data|advantage|rewards|evaluation\.data|roles\.[^.]+\.model)(\..+)?"
    r"|environment\.use|roles\..+[._]path"
)
#: Keys of what a role opens; one that makes its model has its path, not that of what makes it.
_MODEL = re.compile(r"roles\.(?!.*\.make\.).+[._]path")
#: What is said where looks are not answered.
_NOT_LOOKED = (
    "nobody looks at models, templates and functions before they are used; gcore-tools does"
)
#: How many of the other settings that differ are named.
_NAMED = 6
#: What it may change of each reward: a run that ends since scores take too long may get more time.
_HOW_LONG = ("timeout_s", "workers")


def check_parts(plan: Plan) -> None:
    """Makes the light parts and looks for the others; raises what starting the job would raise.

    ConfigError: an advantage of groups without records, a ``model.make`` that is not there.
    ContractError: a factory that fails or does not take its config, with its file and line.
    PluginBroken: a factory that is not there.
    """
    for path in LIGHT_PARTS:
        if path in plan.provided:
            _check_light(plan, path)
    for role, node in plan.settings.roles.items():
        if not node.python:
            _check_module(plan, f"roles.{role}")
            if role == ROLLOUT and "environment" in plan.provided:
                _check_module(plan, "environment")
        _check_model(role, node.model)
    for name in plan.settings.observers:
        _check_module(plan, f"observers.{name}")


def check_files(
    plan: Plan,
    nodes: Sequence[NodeFacts],
    say: Callable[[str], None],
    opened: Mapping[str, Dataset] | None = None,
) -> Seen:
    """Returns notes and facts of the files that the job names; there are no problems.

    Raises one ConfigError that lists datasets that cannot be read, and what plugins miss of the
    files; or for a file of known rewards that has none.

    nodes: the machines that the run may use.
    say: told what goes on, where it takes longer than a second.
    opened: config path -> a dataset that is opened already. Others are opened here, and closed.
    """
    seen = see_files(plan, nodes, say, opened)
    checks.refuse(list(seen.problems), plan.source)
    return seen


def see_files(
    plan: Plan,
    nodes: Sequence[NodeFacts],
    say: Callable[[str], None],
    opened: Mapping[str, Dataset] | None = None,
) -> Seen:
    """Returns what ``check_files`` returns, and the problems for which it would refuse the job.

    Raises ConfigError for a file of known rewards that has none; arguments are as there.
    """
    here = not any(node.host for node in nodes)
    for name, reward in plan.settings.rewards.items():
        if here and reward.known:
            read_known(reward.known, name)
    with ExitStack() as closing:
        datasets, problems = open_data(plan, opened or {}, closing)
        checked = plan.plugins.check_files(_with_made(plan), here=here, datasets=datasets)
        of_rows, notes = row_problems(plan.settings, datasets, plan.origins)
    seen = _answered(plan, checked.looks, say)
    found = [*problems, *of_rows, *checked.problems, *seen.problems]
    return replace(seen, problems=found, notes=[*notes, *seen.notes])


def _answered(plan: Plan, looks: Sequence[tuple[str, Look]], say: Callable[[str], None]) -> Seen:
    """Has looks answered by a plugin of the job, or by ``ESTIMATES``; says where nobody does it.

    looks: the plugin's name, and its look.
    """
    if not looks:
        return Seen()
    more, _ = _estimating(plan)
    for plugins in (plan.plugins, more):
        if seen := plugins.answer_looks(looks, say):
            return seen
    return Seen(notes=[_NOT_LOOKED])


def _with_made(plan: Plan) -> dict[str, Any]:
    """Returns the configuration with the directory of each model that the job makes, as ``path``
    next to ``make``, where it has been made.
    """
    config = dict(plan.config)
    config["roles"] = roles = dict(config["roles"])
    for name, node in plan.settings.roles.items():
        if "make" in node.model and (made := find_made(node.model["make"], models_cache())):
            roles[name] = {**roles[name], "model": {**roles[name]["model"], "path": str(made)}}
    return config


def check_pushes(plan: Plan, placed: Placed, launcher: Launcher) -> str:
    """Says what a setting forbids that keeps pushes on the trainer's machine; "": nothing.

    Raises ConfigError where a generator of the policy is placed on another one: its first push
    would end the run.
    """
    setting = traits_of(plan.objects.get("controller")).pushes_nearby
    if not setting or not {POLICY, ROLLOUT} <= placed.workers.keys():
        return ""
    trainer = placed.node_of(POLICY, 0)
    ranks = range(len(placed.workers[ROLLOUT]))
    elsewhere = [rank for rank in ranks if placed.node_of(ROLLOUT, rank) != trainer]
    if elsewhere:
        host = placed.host(placed.node_of(ROLLOUT, elsewhere[0]))
        raise ConfigError(
            f"{setting} pushes weights to no other machine",
            where=setting.partition("=")[0],
            why=f"the trainer is on {placed.host(trainer)}, {ROLLOUT}.{elsewhere[0]} on {host}",
            todo="use auto or shm",
        )
    if isinstance(launcher, ElasticLauncher):
        return f"no host that comes is taken in: {setting} reaches no other machine"
    return ""


def check_estimates(
    plan: Plan, placed: Placed, overrides: Sequence[str], facts: Mapping[str, int]
) -> list[str]:
    """Returns the notes of ``gcore_preflight`` hooks: of the job's plugins, and of ``ESTIMATES``.

    Raises the first error that one of them yields.
    """
    more, notes = _estimating(plan)
    for plugins in (plan.plugins, more):
        for said in plugins.preflight(plan, placed, overrides, facts):
            if isinstance(said, GcoreError):
                raise said
            notes.append(said)
    return notes


def _estimating(plan: Plan) -> tuple[Plugins, list[str]]:
    """Returns the plugin ``ESTIMATES``, unless the job has it or nobody has, and a note where it
    cannot be used.

    It is no plugin of the job, so the run's lock does not name it.
    """
    plugins = Plugins()
    if any(plugin.name == ESTIMATES for plugin in plan.plugins.loaded):
        return plugins, []
    try:
        plugins.load(plan.installed.get(ESTIMATES, where="gcore_preflight"))
    except PluginNotFound:
        return plugins, []
    except GcoreError as error:
        return plugins, [f"nothing is estimated: {error.sentence()}"]
    return plugins, []


def _check_light(plan: Plan, path: str) -> None:
    """Makes one of the light parts, as a controller will."""
    item = plan.provided[path]
    try:
        part = build(plan.factory(path))
    except GcoreError:
        raise
    except Exception as error:  # isolation point: a plugin's code
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise ContractError(
            f"{item.reference} ({item.owner}): its factory failed: {type(error).__name__}: {error}",
            where=f"{path}.use",
            why=f"at {last.filename}:{last.lineno}; it is called as {item.spec.factory}(config)",
            todo="ask its author",
        ) from error
    size = getattr(part, "group_size", 1)
    if path == "advantage" and not (isinstance(size, int) and size >= 1):
        raise ConfigError(
            f"{size!r} is not a number of records.",
            where="advantage.config.group_size",
            why=(
                f"{item.reference} ({item.owner}) says by it how many records are sampled for "
                "each prompt"
            ),
            todo="set it to 1 or more",
        )


def _check_module(plan: Plan, path: str) -> None:
    """Looks for the module of a backend's factory without importing it: only a worker does."""
    item = plan.provided[path]
    module = item.spec.factory.rpartition(":")[0]
    try:
        is_there = Path(module).is_file() if module.endswith(".py") else _is_there(module)
    except ImportError as error:
        raise PluginBroken(
            f"{item.reference} ({item.owner}): {module} does not import: {error}",
            where=f"{path}.use",
        ) from error
    if not is_there:
        raise PluginBroken(
            f"{item.reference} ({item.owner}): its factory is {item.spec.factory!r}, and there is "
            f"no module {module}.",
            where=f"{path}.use",
            todo="ask its author",
        )


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(f"{error.name}.")):
            return False
        raise


def _check_model(role: str, model: Mapping[str, Any]) -> None:
    if "make" not in model:
        return
    try:
        check_make(model["make"])
    except ConfigError as error:
        error.where = f"roles.{role}.{error.where}"
        raise


def check_version(run_dir: Path, checkpoint: Path, core: str) -> None:
    """Raises CheckpointError where another minor version of the core saved a checkpoint.

    core: the version that saved it; "": unknown, which is taken for this one.
    """
    if not core or _minor(core) == _minor(__version__):
        return
    of_step, way = "", "begin a new run from its weights"
    if not (run_dir / WEIGHTS).is_dir():
        # A trainer writes them, and the job may have keys that this version does not know.
        of_step = f" --step {int(checkpoint.name.rpartition('-')[2])}"
        way = (
            f"go on with gcore-core {core}, or begin a new run from its weights; where this "
            f"version refuses to export them, {core} does"
        )
    own = ".".join(_minor(__version__))
    export = f"g-core export {shlex.quote(str(run_dir))}{of_step} --to DIRECTORY"
    raise CheckpointError(
        f"gcore-core {core} saved it, and {__version__} goes on from checkpoints of {own} alone.",
        where=str(checkpoint),
        todo=f"{way}: {export}",
    )


def check_same(resumed: Resumed, plan: Plan, rows: int) -> None:
    """Raises ConfigError, saying what differs, where the run would go on as another one.

    rows: how many the dataset of the job has now.
    """
    differences = [
        f"{key}: {saved!r} was saved, {value!r} is asked for"
        for key, saved, value in _differences(resumed, plan, fixed=True)
    ]
    saved_rows = resumed.state.get("ledger", {}).get("rows", rows)
    if saved_rows != rows:
        differences.append(f"data: it had {saved_rows} rows, it has {rows}")
    if differences:
        raise ConfigError(
            "the run cannot go on with another configuration.",
            where=resumed.path,
            why="\n".join(differences[:3]),
            todo="leave these as they were, or begin a new run from the exported weights",
            differences=differences,
        )


def check_same_files(
    config: Mapping[str, Any],
    changed: Sequence[str],
    *,
    by_itself: bool,
) -> None:
    """Raises ConfigError where the run would go on with other models than it had.

    changed: keys whose files are not what they were when the run was last started.
    by_itself: nobody asked that the run goes on, so no other file may have changed either.
    """
    refused = [key for key in changed if by_itself or _MODEL.fullmatch(key)]
    if refused:
        paths = flat(config)
        raise ConfigError(
            "the run cannot go on with other files.",
            where=refused[0],
            why="\n".join(
                f"{key}: {paths.get(key, 'the model that it makes')} is not what it was when the "
                "run was last started"
                for key in refused[:3]
            ),
            todo="put them back as they were, or begin a new run from the exported weights",
            differences=refused,
        )


def changed_settings(resumed: Resumed, plan: Plan) -> list[str]:
    """Returns one line that names the settings that may change and did; none where none did."""
    changed = [
        f"{key} {saved!r} -> {value!r}"
        for key, saved, value in _differences(resumed, plan, fixed=False)
    ]
    more = [f"and {len(changed) - _NAMED} more"] if len(changed) > _NAMED else []
    line = ", ".join([*changed[:_NAMED], *more])
    return [f"the run goes on with other settings than were saved: {line}"] if line else []


def _minor(version: str) -> list[str]:
    """Returns ``["0", "3"]`` of ``0.3.1``: versions with the same two read each other's states."""
    return version.split(".")[:2]


def _differences(
    resumed: Resumed,
    plan: Plan,
    *,
    fixed: bool,
) -> list[tuple[str, Any, Any]]:
    """Returns (dotted key, the saved value, that of the job) of each setting that differs.

    fixed: True for those that must not change, False for the others.
    """
    saved, values = (
        {key: value for key, value in flat(config).items() if value != {}}
        for config in (saved_config(Path(resumed.path)), plan.config)
    )
    differing = (key for key in {*saved, *values} if saved.get(key) != values.get(key))
    return [
        (key, saved.get(key), values.get(key))
        for key in sorted(differing)
        if _is_fixed(key, saved) == fixed
    ]


def _is_fixed(key: str, saved: Mapping[str, Any]) -> bool:
    section, _, name = key.rpartition(".")
    if name in _HOW_LONG and re.fullmatch(r"rewards\.[^.]+", section):
        return False
    if key.startswith("evaluation.data") and saved.get("evaluation.data", "") is None:
        return False  # a run that did not evaluate may begin to
    return _FIXED.fullmatch(key) is not None
