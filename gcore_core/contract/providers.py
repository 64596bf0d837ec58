"""Defines the frozen descriptions that plugins return from their provider hooks.

A description is data: listing, checking and configuring need nothing else, so the heavy code named
by ``factory`` is imported only in the worker that runs it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from gcore_core.contract.columns import ColumnSpec
from gcore_core.contract.errors import ContractError
from gcore_core.contract.traits import refuse_former_words, wrong_methods

_NAME = re.compile(r"[a-z][a-z0-9_]*(-[a-z0-9_]+)*")
_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_SHARED_NAME = re.compile(r"[\w.-]{3}")

#: What a step program can call on the roles of a kind. A "push" takes a trainer and generators.
CALLS: Mapping[str, frozenset[str]] = {
    "trainer": frozenset({"prepare", "train", "push", "save"}),
    "generator": frozenset({"generate", "push", "sleep"}),
    "annotator": frozenset({"annotate"}),
    "scorer": frozenset({"score"}),
}
#: What it can call besides, on trainers with the trait ``evaluates``.
FURTHER_CALLS: Mapping[str, frozenset[str]] = {"trainer": frozenset({"evaluate"})}
#: Parts of a job that a step program may need: "generation" is the role rollout, "rewards" at least
#: one reward, the others are sections.
PARTS = frozenset({"generation", "rewards", "advantage", "objective"})
#: What a role may be: the kind of provider that its ``use:`` names.
ROLE_KINDS = ("trainer", "generator", "annotator")
#: The columns that generators write; no role may give one of these names.
RECORD_COLUMNS = frozenset(
    {"prompt_ids", "action_ids", "logp", "action_mask", "temperature", "text", "version"}
)


@dataclass(frozen=True, kw_only=True)
class Provider:
    """Holds what every provider says of itself.

    name: lower case with dashes; ``default`` is what ``use: <plugin>`` means.
    summary: what it is, in one line, for lists and checks.
    factory: ``"module:attribute"``; how and where it is called, its hook says
        (``gcore_core.contract.hookspecs``).
    config: a dataclass the plugin owns; its fields may be set under ``config:`` in the YAML. Its
        method ``traits`` may tell the core more, see ``gcore_core.contract.traits``.
    needs: requirements (PEP 508) of the engine, checked in the role's own interpreter.
    shared_memory: names of files that its engine makes directly in ``/dev/shm`` and leaves there
        when it is killed, as fnmatch reads them, such as ``("engine_queue_*",)``. The node agent
        removes those that it saw its own worker hold.
    memory: ``"module:attribute"`` of a function that says how much memory a worker will need, see
        ``gcore_core.contract.memory``; "": nobody knows. Its module imports no engine.
    twin: ``"module:attribute"`` of a function that makes a tiny random twin of what it opens (a
        model, a data set), so that a job can be tried where there is no room, as ``g-core shrink``
        does. It is called as ``twin(node, directory)`` and returns what replaces the node's
        settings, a mapping that is merged over it, in which None leaves a setting out.
        node: ``use``, ``config``, of a role also ``model`` and ``engine``, as the job writes them;
        and ``like``, the policy's ``model``, for one that an earlier job has not made yet.
        directory: where files go; what lies there from an earlier call may be used again.
        "": the node stays as it is.
    """

    name: str = "default"
    summary: str
    factory: str
    config: type | None = None
    needs: tuple[str, ...] = ()
    shared_memory: tuple[str, ...] = ()
    memory: str = ""
    twin: str = ""

    def __new__(cls, **given: Any) -> Self:
        refuse_former_words(cls.__name__, given)
        return super().__new__(cls)

    def problems(self, plugin: str) -> list[str]:
        """Returns the reasons why this description is not valid; none when it is."""
        problems = []
        if not _NAME.fullmatch(self.name):
            problems.append(f"name {self.name!r} is not lower case words joined by dashes")
        if not _FACTORY.fullmatch(self.factory):
            problems.append(f"factory {self.factory!r} is not 'module:attribute'")
        if self.memory and not _FACTORY.fullmatch(self.memory):
            problems.append(f"memory {self.memory!r} is not 'module:attribute'")
        if self.twin and not _FACTORY.fullmatch(self.twin):
            problems.append(f"twin {self.twin!r} is not 'module:attribute'")
        if self.config is not None and not hasattr(self.config, "__dataclass_fields__"):
            problems.append(f"config {self.config!r} is not a dataclass")
        elif self.config is not None:
            name = self.config.__qualname__
            wrong = wrong_methods(self.config)
            problems += [f"config class {name}: {problem}" for problem in wrong]
        problems += [
            f"shared_memory {name!r} does not begin with three letters, digits, '_', '.' or '-'"
            for name in self.shared_memory
            if not _SHARED_NAME.match(name) or "/" in name
        ]
        return problems


@dataclass(frozen=True, kw_only=True)
class ControllerProvider(Provider):
    """Describes a step program; the factory makes one shard of it.

    calls: kind of role -> what the program calls on it, see ``CALLS`` and ``FURTHER_CALLS``;
        "scorer" is the worker of rewards. A role on which nothing is called is refused. Without
        "push" among a generator's, weights are never sent, and log-probs are not compared.
    parts: what a job under this program must have, see ``PARTS``; nothing is asked of the others.
    """

    calls: Mapping[str, frozenset[str]]
    parts: frozenset[str] = PARTS

    def problems(self, plugin: str) -> list[str]:
        problems = super().problems(plugin)
        for kind, verbs in self.calls.items():
            known = CALLS.get(kind, frozenset()) | FURTHER_CALLS.get(kind, frozenset())
            if unknown := sorted(verbs - known):
                problems.append(f"calls: nobody can call {unknown[0]!r} on kind {kind!r}")
        if unknown := sorted(self.parts - PARTS):
            problems.append(f"part {unknown[0]!r} is none of {', '.join(sorted(PARTS))}")
        return problems


def _problems_of(columns: Iterable[ColumnSpec]) -> list[str]:
    """Returns what is wrong with columns that a plugin adds to records'."""
    problems = []
    for column in columns:
        problems += column.problems()
        if column.name in RECORD_COLUMNS:
            problems.append(f"column {column.name!r}: generators write it")
    return problems


@dataclass(frozen=True, kw_only=True)
class RoleProvider(Provider):
    """Describes a participant of the job, by the name under ``roles:``. It has no factory.

    kind: of the provider that ``use:`` names below the role, one of ``ROLE_KINDS``.
    follows: the role whose weights it follows.
    columns: the per-action columns that it gives for every record that is trained on; an objective
        or an advantage may require them. A name alone, as in ``("ref_logp",)``, is of a column
        float32[A]; a ``ColumnSpec`` describes any other. An annotator gives at least one. A trainer
        gives them in preparation, by the weights that a step begins with.
    objective: what a trainer of this role trains, as in ``use:``; ``roles.<name>.objective`` may
        choose another. Empty: the job's own objective.
    """

    factory: str = ""
    kind: str
    follows: str | None = None
    columns: tuple[str | ColumnSpec, ...] = ()
    objective: str = ""

    @property
    def column_specs(self) -> tuple[ColumnSpec, ...]:
        """Describes every column that the role can give, in the order of ``columns``."""
        return tuple(
            ColumnSpec(name=column) if isinstance(column, str) else column
            for column in self.columns
        )

    def problems(self, plugin: str) -> list[str]:
        problems = [text for text in super().problems(plugin) if not text.startswith("factory ")]
        if self.kind not in ROLE_KINDS:
            problems.append(f"kind {self.kind!r} is none of {', '.join(ROLE_KINDS)}")
        if self.factory:
            problems.append(f"factory {self.factory!r}: a role is never called, its backend is")
        if self.kind == "annotator" and not self.columns:
            problems.append("an annotator gives columns; name them")
        if self.kind == "annotator" and self.follows:
            problems.append("follows: no weights are pushed to an annotator")
        if self.objective and self.kind != "trainer":
            problems.append("objective: only a trainer has one")
        if self.kind == "generator" and self.columns:
            problems.append("columns: a generator gives none beside its records'")
        return problems + _problems_of(self.column_specs)


@dataclass(frozen=True, kw_only=True)
class PlacementProvider(Provider):
    """Describes a policy that decides which devices each role has in each phase."""


@dataclass(frozen=True, kw_only=True)
class GeneratorProvider(Provider):
    """Describes a backend that samples records from a policy or a judge, or reads them.

    columns: names of further per-action columns, float32[A], that all its records have, such as
        ``("label",)``. An objective may require those of the role rollout.
    """

    columns: tuple[str, ...] = ()

    def problems(self, plugin: str) -> list[str]:
        specs = (ColumnSpec(name=name) for name in self.columns)
        return super().problems(plugin) + _problems_of(specs)


@dataclass(frozen=True, kw_only=True)
class TrainerProvider(Provider):
    """Describes a backend that holds, updates and exports policy weights.

    opens: ``"module:attribute"`` of a function ``(directory: Path) -> object`` that opens weights
        which it exported, as the library's own model, for ``run.policy()`` in Python; "": nobody
        can.
    """

    opens: str = ""

    def problems(self, plugin: str) -> list[str]:
        problems = super().problems(plugin)
        if self.opens and not _FACTORY.fullmatch(self.opens):
            problems.append(f"opens {self.opens!r} is not 'module:attribute'")
        return problems


@dataclass(frozen=True, kw_only=True)
class AnnotatorProvider(Provider):
    """Describes a model that gives per-action columns, such as a reference's or a teacher's
    log-probs.
    """


@dataclass(frozen=True, kw_only=True)
class RewardProvider(Provider):
    """Describes something that scores finished records.

    level: "record": each by itself, the moment it is finished; "group": all records of a prompt
        together.
    """

    level: str = "record"


@dataclass(frozen=True, kw_only=True)
class AdvantageProvider(Provider):
    """Describes how rewards become advantages, in numpy.

    level: "record": one number a record, in controllers. "action": one an action, on trainer ranks
        (``ActionAdvantage``); controllers give these the record's reward.
    """

    level: str = "record"


@dataclass(frozen=True, kw_only=True)
class ObjectiveProvider(Provider):
    """Describes a loss, in torch, that runs inside a trainer rank."""


@dataclass(frozen=True, kw_only=True)
class BalancerProvider(Provider):
    """Describes how records are split over data-parallel ranks."""


@dataclass(frozen=True, kw_only=True)
class FilterProvider(Provider):
    """Describes a filter, which says which groups teach."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentProvider(Provider):
    """Describes what the policy acts in, around its generator, which has the trait ``tokens``.

    columns: names of further per-action columns, float32[A], that all its records have, such as
        ``("turn_reward",)``. An objective, or an advantage of level "action", may require them.
    """

    columns: tuple[str, ...] = ()

    def problems(self, plugin: str) -> list[str]:
        specs = (ColumnSpec(name=name) for name in self.columns)
        return super().problems(plugin) + _problems_of(specs)


@dataclass(frozen=True, kw_only=True)
class SentinelProvider(Provider):
    """Describes what watches whether generators compute what the trainer computes.

    check: ``"module:attribute"`` of the factory of a step check, called in the lead's controller as
        ``check(config, context: StepCheckContext)``; "": the kernel's, which ends the run at the
        sentinel's first alarm.

    One whose ``factory`` is ``gcore_core.contract.sentinel.BAND`` needs no plugin on trainer ranks:
    they build it without a config.
    """

    check: str = ""

    def problems(self, plugin: str) -> list[str]:
        problems = super().problems(plugin)
        if self.check and not _FACTORY.fullmatch(self.check):
            problems.append(f"check {self.check!r} is not 'module:attribute'")
        return problems


@dataclass(frozen=True, kw_only=True)
class ObserverProvider(Provider):
    """Describes what observes a run, in a process of its own."""


@dataclass(frozen=True, kw_only=True)
class DatasetProvider(Provider):
    """Describes rows of prompts, opened where they are used."""


@dataclass(frozen=True, kw_only=True)
class LauncherProvider(Provider):
    """Describes a launcher, which starts node agents."""


@dataclass(frozen=True, kw_only=True)
class CommandProvider(Provider):
    """Describes a command of the plugin, ``g-core <plugin> <name>``.

    The factory is called with the remaining words.

    parser: ``"module:attribute"`` of a function that takes nothing and returns the
        ``argparse.ArgumentParser`` of a default command; ``g-core completion`` makes of it what
        a shell completes; "": files.
    """

    parser: str = ""


@dataclass(frozen=True, kw_only=True)
class VenvProvider(Provider):
    """Describes what the plugin's engine needs installed, for ``g-core venv create <plugin>``.

    It is never called, so it has no factory.

    name: the flavour; "cuda" is taken where a driver is seen and "cpu" where none is, others when
        they are asked for.
    engine: the distribution that is the engine; its version is shown.
    requirements: ``"package:file"``, pip requirements with the versions that were tested.
    no_deps: pip takes the requirements alone, without what they depend on.
    extras: of the plugin's own distribution.
    remove: distributions that are uninstalled afterwards.
    beside: further distributions that go in where they are installed here, such as those of a
        trainer's objectives.
    """

    factory: str = ""
    engine: str
    requirements: str = ""
    no_deps: bool = False
    extras: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()

    def problems(self, plugin: str) -> list[str]:
        return [
            problem for problem in super().problems(plugin) if not problem.startswith("factory ")
        ]

    def requirements_file(self, owner: str) -> Path | None:
        """Returns the file of ``requirements``, or None where the engine needs none.

        Raises ContractError, in the name of ``owner``, when the plugin has no such file.
        """
        if not self.requirements:
            return None
        import importlib.resources  # only where a venv is made or a plugin is checked

        package, _, name = self.requirements.partition(":")
        try:
            file = Path(str(importlib.resources.files(package) / name))
        except (ImportError, TypeError) as error:
            raise ContractError(
                f"{owner}: there is no package {package!r} for {self.requirements!r}."
            ) from error
        if not file.is_file():
            raise ContractError(
                f"{owner}: there is no file {self.requirements!r}.",
                why=f"looked for {file}",
                todo="declare it as package data",
            )
        return file


@dataclass(frozen=True, kw_only=True)
class ViewProvider(Provider):
    """Describes a picture of a run, drawn from the files in its directory.

    The factory is called with the directory alone and returns what a notebook can show, such as a
    figure; None where there is nothing to show yet. It writes nothing. It is called in the process
    of the notebook, again and again while the run goes on.
    """


#: kind -> (hook that yields it, class of its descriptions)
KINDS: dict[str, tuple[str, type[Provider]]] = {
    "controller": ("gcore_controllers", ControllerProvider),
    "role": ("gcore_roles", RoleProvider),
    "placement": ("gcore_placement_policies", PlacementProvider),
    "generator": ("gcore_generators", GeneratorProvider),
    "trainer": ("gcore_trainers", TrainerProvider),
    "annotator": ("gcore_annotators", AnnotatorProvider),
    "reward": ("gcore_rewards", RewardProvider),
    "advantage": ("gcore_advantages", AdvantageProvider),
    "objective": ("gcore_objectives", ObjectiveProvider),
    "balancer": ("gcore_balancers", BalancerProvider),
    "filter": ("gcore_filters", FilterProvider),
    "environment": ("gcore_environments", EnvironmentProvider),
    "sentinel": ("gcore_sentinels", SentinelProvider),
    "observer": ("gcore_observers", ObserverProvider),
    "dataset": ("gcore_datasets", DatasetProvider),
    "launcher": ("gcore_launchers", LauncherProvider),
    "command": ("gcore_commands", CommandProvider),
    "venv": ("gcore_venvs", VenvProvider),
    "view": ("gcore_views", ViewProvider),
}
