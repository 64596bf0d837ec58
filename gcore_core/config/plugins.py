"""Loads exactly the plugins a configuration names, validates what they offer and calls their hooks.

No other module uses pluggy. Stock pluggy drops the second distribution of one name in silence,
aborts at the first failing import, accepts a misspelt hook and stops at the first observer that
raises. The catalog handles the first of these, and this module handles the others.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import pluggy

from gcore_core.config.catalog import CORE, Installed
from gcore_core.contract import hookspecs, local_files
from gcore_core.contract.dataset import Dataset
from gcore_core.contract.errors import (
    ConfigError,
    ContractError,
    GcoreError,
    PluginBroken,
    did_you_mean,
)
from gcore_core.contract.factories import import_source
from gcore_core.contract.looking import Look, Seen
from gcore_core.contract.missing_modules import import_advice
from gcore_core.contract.preflight import PlacedJob, ResolvedJob
from gcore_core.contract.providers import KINDS, Provider
from gcore_core.contract.records import RunFacts, StepReport, WorkerFailure

#: Fields of a description that name something in a module.
_REFERENCES = ("factory", "memory", "twin", "opens", "parser")
#: Hook that 0.2 had and 0.3 has not -> what to do in its place.
_GONE_HOOKS = {
    "gcore_samplers": "remove it; draw, look at the answer and draw again in one episode of an "
    "environment: docs/how-to/move-to-0.3.md"
}
#: Called with plugin, hook and error when an observer raises for the first time.
ReportFailure = Callable[[str, str, Exception], None]


@dataclass(frozen=True, kw_only=True)
class Provided:
    """Holds a provider's description together with the plugin that offers it.

    plugin: name of the plugin.
    distribution: distribution that the plugin belongs to; the path of a project's own file.
    version: version of the distribution, or a hash of the file's content.
    kind: what is provided, such as "reward" or "advantage".
    spec: the description itself.
    """

    plugin: str
    distribution: str
    version: str
    kind: str
    spec: Provider

    @property
    def reference(self) -> str:
        """Returns what ``use:`` would say: ``vllm`` or ``vllm/async``."""
        return self.plugin if self.spec.name == "default" else f"{self.plugin}/{self.spec.name}"

    @property
    def owner(self) -> str:
        return f"{self.distribution} {self.version}".rstrip()

    @property
    def is_of_the_core(self) -> bool:
        """Does the core define what is built? Then nothing of the plugin is needed to build it."""
        return self.spec.factory.partition(".")[0] == "gcore_core"

    @property
    def installed(self) -> bool:
        """Says whether it comes from a distribution other than the core.

        A project's own file is no distribution.
        """
        return self.plugin != CORE and not self.distribution.endswith(".py")


def local_plugin(file: Path, where: str = "local") -> Installed:
    """Describes a project's own file as a plugin.

    The plugin's name is the stem of the file, and its version is a hash of the content, and of that
    of files next to it that it imports.
    """
    try:
        content = b"".join(one.read_bytes() for one in (file, *local_files.files_beside(file)))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}.", where=where) from error
    digest = hashlib.blake2b(content, digest_size=8).hexdigest()
    return Installed(
        name=file.stem, distribution=str(file), version=f"blake2b:{digest}", module=str(file)
    )


@dataclass(frozen=True, kw_only=True)
class FileChecks:
    """Holds what plugins say of the files that a job names.

    problems: one sentence each, with the plugin's name.
    looks: plugin and what it has looked at.
    """

    problems: list[str]
    looks: list[tuple[str, Look]]


class Plugins:
    """Holds the loaded plugins of one run, in the order in which they were loaded."""

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager("gcore")
        self._manager.add_hookspecs(hookspecs)
        self._provided: list[Provided] = []
        self._loaded: dict[str, Installed] = {}

    @property
    def loaded(self) -> list[Installed]:
        return list(self._loaded.values())

    def load(self, plugin: Installed, *, where: str = "") -> None:
        """Imports and validates one plugin. A second call for the same name does nothing.

        Raises PluginBroken when its import or one of its provider hooks fails, ContractError when
        a hook or a description is not as the contract says.

        where: the config key that names the plugin.
        """
        if plugin.name in self._loaded:
            return
        try:
            module = import_source(plugin.module)
        except (Exception, SystemExit) as error:
            raise PluginBroken(
                f"plugin {plugin.name!r} ({plugin.owner}, {plugin.module}) failed to import: "
                f"{type(error).__name__}: {error}",
                where=where,
                todo=import_advice(error)
                or (local_files.advice(Path(plugin.module), error) if plugin.is_file else "")
                or f"see the whole cause: G_CORE_TRACEBACK=1 g-core plugins show {plugin.name}",
                plugin=plugin.name,
                distribution=plugin.distribution,
            ) from error
        _check_marked(plugin, module)
        _check_arguments(plugin, module)
        try:
            self._manager.register(module, plugin.name)
        except (pluggy.PluginValidationError, ValueError) as error:
            raise ContractError(f"{_who(plugin)}: {error}", plugin=plugin.name) from error
        for caller in self._manager.get_hookcallers(module) or []:
            _check_hook(
                plugin, caller, [impl for impl in caller.get_hookimpls() if impl.plugin is module]
            )
        self._provided += self._collect(plugin, module)
        self._loaded[plugin.name] = plugin

    def providers(self, kind: str, plugin: str = "") -> list[Provided]:
        """Returns the providers of one kind that all loaded plugins offer, or one of them."""
        return [
            item for item in self._provided if item.kind == kind and plugin in ("", item.plugin)
        ]

    def provided_by(self, plugin: str) -> list[Provided]:
        return [item for item in self._provided if item.plugin == plugin]

    def resolve(self, kind: str, use: str, *, where: str) -> Provided:
        """Returns the provider that ``use: plugin[/provider]`` names for a kind.

        The plugin must be loaded. Raises ConfigError, with the config key ``where``, when it does
        not offer that provider.
        """
        plugin, _, name = use.partition("/")
        offered = self.providers(kind, plugin)
        for item in offered:
            if item.spec.name == (name or "default"):
                return item
        choices = [item.reference for item in offered]
        if not choices:
            what = f"plugin {plugin!r} offers no {kind}."
            kinds = sorted({item.kind for item in self.provided_by(plugin)})
            why = f"it offers: {', '.join(kinds) or 'nothing'}"
            choices = [item.reference for item in self.providers(kind)]
        elif name:
            what = f"plugin {plugin!r} has no {kind} named {name!r}{did_you_mean(use, choices)}."
            why = ""
        else:
            what = f"plugin {plugin!r} has no default {kind}; say which."
            why = ""
        raise ConfigError(
            what,
            where=where,
            why=why,
            todo=f"choices: {', '.join(choices) or 'none'}",
            choices=choices,
        )

    def check(self, config: Mapping[str, Any], job: ResolvedJob) -> list[str]:
        """Returns the problems that ``gcore_check`` hooks report, each with its plugin's name."""
        said = self._said("gcore_check", config, {"job": job})
        return [_of_plugin(name, problem) for name, problem in said]

    def check_files(
        self,
        config: Mapping[str, Any],
        *,
        here: bool,
        datasets: Mapping[str, Dataset] | None = None,
    ) -> FileChecks:
        """Returns what ``gcore_check_files`` hooks report; a look that is not valid is a problem.

        here: whether all workers start on this machine.
        datasets: config path -> the dataset that is opened.
        """
        problems = []
        looks = []
        more = {"here": here, "datasets": MappingProxyType(dict(datasets or {}))}
        for name, said in self._said("gcore_check_files", config, more):
            if not isinstance(said, Look):
                problems.append(_of_plugin(name, said))
            elif wrong := said.problems():
                problems.append(
                    _of_plugin(name, f"{said.where}: a look that is not valid: {wrong[0]}.")
                )
            else:
                looks.append((name, self._anchored_look(name, said)))
        return FileChecks(problems=problems, looks=looks)

    def answer_looks(
        self, looks: Sequence[tuple[str, Look]], say: Callable[[str], None]
    ) -> Seen | None:
        """Returns what the first ``gcore_answer_looks`` hook says; None where no plugin has it."""
        for impl in self._manager.hook.gcore_answer_looks.get_hookimpls():
            seen: Seen = _call(impl, {"looks": looks, "say": say})
            return seen
        return None

    def preflight(
        self,
        job: ResolvedJob,
        placed: PlacedJob,
        overrides: Sequence[str],
        facts: Mapping[str, int],
    ) -> Iterator[str | GcoreError]:
        """Yields what ``gcore_preflight`` hooks expect of a start; one that raises is a note."""
        arguments = {"job": job, "placed": placed, "overrides": overrides, "facts": facts}
        for impl in self._manager.hook.gcore_preflight.get_hookimpls():
            try:
                yield from list(_call(impl, arguments) or ())
            except Exception as error:
                raised = f"gcore_preflight raised {type(error).__name__}: {error}"
                yield _of_plugin(impl.plugin_name, raised)

    def _said(
        self, hook: str, config: Mapping[str, Any], more: Mapping[str, Any]
    ) -> Iterator[tuple[str, Any]]:
        """Yields plugin and what its hook reports, of all plugins. One that raises reports that.

        config: the resolved configuration; every plugin gets a copy, as ``plan``.
        more: the hook's other arguments.
        """
        for impl in getattr(self._manager.hook, hook).get_hookimpls():
            try:
                arguments = {"plan": copy.deepcopy(dict(config)), **more}
                reported = list(_call(impl, arguments) or ())
            except Exception as error:
                reported = [f"{hook} raised {type(error).__name__}: {error}"]
            for said in reported:
                yield impl.plugin_name, said

    def _anchored_look(self, plugin: str, look: Look) -> Look:
        module: Any = self._manager.get_plugin(plugin)
        reference = _anchored_reference(look.function, self._loaded[plugin], module)
        return replace(look, function=reference)

    def observers(self, report: ReportFailure) -> Observers:
        return Observers(self._manager.hook, report)

    def _collect(self, plugin: Installed, module: ModuleType) -> list[Provided]:
        """Calls the provider hooks of one plugin and validates what they return."""
        provided: list[Provided] = []
        for kind, (hook, expected) in KINDS.items():
            for impl in getattr(self._manager.hook, hook).get_hookimpls():
                if impl.plugin is not module:
                    continue
                specs = _yielded(plugin, hook, impl)
                for spec in specs:
                    _check_description(plugin, hook, spec, expected)
                names = [spec.name for spec in specs]
                for name in sorted({name for name in names if names.count(name) > 1}):
                    raise ContractError(
                        f"{_who(plugin)}: {hook} offers {name!r} twice.", plugin=plugin.name
                    )
                provided += [
                    Provided(
                        plugin=plugin.name,
                        distribution=plugin.distribution,
                        version=plugin.version,
                        kind=kind,
                        spec=_anchored(spec, plugin, module),
                    )
                    for spec in specs
                ]
        return provided


class Observers:
    """Calls the observer hooks, with one typed method for each hook.

    When a hook of a plugin raises, this is reported once and none of the plugin's observer hooks is
    called again. The other plugins' hooks go on.
    """

    def __init__(self, hooks: pluggy.HookRelay, report: ReportFailure) -> None:
        self._hooks = hooks
        self._report = report
        self._disabled: set[str] = set()

    def run_start(self, run: RunFacts) -> None:
        self._tell("gcore_run_start", {"run": run})

    def step_end(self, run: RunFacts, report: StepReport) -> None:
        self._tell("gcore_step_end", {"run": run, "report": report})

    def weights_published(self, run: RunFacts, version: int) -> None:
        self._tell("gcore_weights_published", {"run": run, "version": version})

    def checkpoint_saved(self, run: RunFacts, step: int, path: str) -> None:
        self._tell("gcore_checkpoint_saved", {"run": run, "step": step, "path": path})

    def worker_failed(self, run: RunFacts, failure: WorkerFailure) -> None:
        self._tell("gcore_worker_failed", {"run": run, "failure": failure})

    def run_end(self, run: RunFacts, error: str) -> None:
        self._tell("gcore_run_end", {"run": run, "error": error})

    def _tell(self, hook: str, arguments: Mapping[str, Any]) -> None:
        for impl in getattr(self._hooks, hook).get_hookimpls():
            if impl.plugin_name in self._disabled:
                continue
            try:
                _call(impl, arguments)
            except Exception as error:
                self._disabled.add(impl.plugin_name)
                self._report(impl.plugin_name, hook, error)


def observer_failure(plugin: str, hook: str, error: BaseException, todo: str) -> PluginBroken:
    """Returns the error shown to the user when an observer raised; the run goes on without it."""
    frames = traceback.extract_tb(error.__traceback__)
    return PluginBroken(
        f"{type(error).__name__}: {error}",
        where=f"plugin {plugin!r}, {hook}",
        why=(f"at {frames[-1].filename}:{frames[-1].lineno}\n" if frames else "")
        + "the run goes on without it",
        todo=todo,
        plugin=plugin,
    )


def _call(impl: pluggy.HookImpl, arguments: Mapping[str, Any]) -> Any:
    """Calls a plugin's hook with the arguments that it names."""
    return impl.function(*(arguments[name] for name in impl.argnames))


def _yielded(plugin: Installed, hook: str, impl: pluggy.HookImpl) -> list[Any]:
    """Returns what a provider hook describes.

    Raises ContractError for a description that cannot be, and PluginBroken when the hook fails.
    """
    try:
        descriptions: Any = impl.function()
        return list(descriptions)
    except ContractError as error:
        error.where, error.facts["plugin"] = _who(plugin), plugin.name
        raise
    except Exception as error:
        raise PluginBroken(
            f"{_who(plugin)}: {hook} failed: {type(error).__name__}: {error}",
            why="a provider hook takes no arguments and returns an iterable of descriptions",
            plugin=plugin.name,
        ) from error


def _check_marked(plugin: Installed, module: ModuleType) -> None:
    """Raises for a function that is named like a hook but lacks the mark.

    Such a function would never be called, and nobody would notice.
    """
    for name, value in inspect.getmembers(module, inspect.isfunction):
        if (
            name.startswith("gcore_")
            and value.__module__ == module.__name__
            and not hasattr(value, "gcore_impl")
        ):
            raise ContractError(
                f"{_who(plugin)}: function {name!r} lacks @hookimpl.",
                todo="put it above the function: from gcore_core import hookimpl",
                plugin=plugin.name,
            )


def _check_arguments(plugin: Installed, module: ModuleType) -> None:
    """Raises for an argument that the hook does not give.

    Pluggy would raise too, but in more lines and without a suggestion.
    """
    for name, value in inspect.getmembers(module, lambda member: hasattr(member, "gcore_impl")):
        spec = getattr(hookspecs, name, None)
        if spec is None or not inspect.isfunction(value):
            continue
        parameters = list(inspect.signature(spec).parameters)
        for argument in inspect.signature(value).parameters:
            if argument not in parameters:
                raise ContractError(
                    (
                        f"{_who(plugin)}: {name} has no argument "
                        f"{argument!r}{did_you_mean(argument, parameters)}."
                    ),
                    why=f"its arguments: {', '.join(parameters) or 'none'}",
                    todo="an implementation takes any of them, by these names",
                    plugin=plugin.name,
                    choices=parameters,
                )


def _check_hook(plugin: Installed, caller: pluggy.HookCaller, impls: list[pluggy.HookImpl]) -> None:
    """Raises ContractError for an unknown hook, a default argument, or a mark that orders calls.

    caller: pluggy's name for one hook with all its implementations.
    impls: the plugin's.
    """
    if not caller.has_spec():
        hooks = [name for name in dir(hookspecs) if name.startswith("gcore_")]
        if caller.name in _GONE_HOOKS:
            raise ContractError(
                f"{_who(plugin)}: there is no hook {caller.name!r} any more.",
                todo=_GONE_HOOKS[caller.name],
                plugin=plugin.name,
            )
        raise ContractError(
            f"{_who(plugin)}: there is no hook {caller.name!r}{did_you_mean(caller.name, hooks)}.",
            todo="all hooks: docs/reference/hooks.md",
            plugin=plugin.name,
            choices=hooks,
        )
    for impl in impls:
        if impl.kwargnames:
            raise ContractError(
                f"{_who(plugin)}: {caller.name} gives a default to {impl.kwargnames[0]!r}, "
                "and such an argument is never passed.",
                todo="remove the default",
                plugin=plugin.name,
            )
        if impl.wrapper or impl.hookwrapper or impl.tryfirst or impl.trylast:
            raise ContractError(
                f"{_who(plugin)}: {caller.name} is marked as a wrapper, tryfirst or trylast.",
                why="plugins are called one after another, in the order of `plugins:`",
                todo="use a plain @hookimpl",
                plugin=plugin.name,
            )


def _check_description(plugin: Installed, hook: str, spec: Any, expected: type[Provider]) -> None:
    """Raises ContractError for a description of another class, or one that has problems."""
    if not isinstance(spec, expected):
        raise ContractError(
            f"{_who(plugin)}: {hook} must yield {expected.__name__}, not {type(spec).__name__}.",
            plugin=plugin.name,
        )
    problems = spec.problems(plugin.name)
    if problems:
        raise ContractError(
            f"{_who(plugin)}: {hook} yields an invalid description, {spec.name!r}.",
            why="\n".join(problems),
            plugin=plugin.name,
        )


def _anchored(spec: Provider, plugin: Installed, module: ModuleType) -> Provider:
    """Replaces the stem of a project's own file in references to it by the file's path.

    Such a file calls itself by its stem, but it can be found only by its path.
    """
    anchored: dict[str, Any] = {
        name: _anchored_reference(getattr(spec, name), plugin, module)
        for name in _REFERENCES
        if hasattr(spec, name)
    }
    return replace(spec, **anchored)


def _anchored_reference(reference: str, plugin: Installed, module: ModuleType) -> str:
    """Replaces the name of a project's file in a reference, or of one next to it, by its path."""
    source, _, attribute = reference.rpartition(":")
    if not plugin.is_file:
        return reference
    if source in (plugin.name, module.__name__):
        return f"{plugin.module}:{attribute}"
    sibling = Path(plugin.module).with_name(f"{source}.py")
    return f"{sibling}:{attribute}" if sibling.is_file() else reference


def _of_plugin(plugin: str, problem: Any) -> str:
    """Returns a problem with the name of the plugin that reports it."""
    return f"{problem} [plugin {plugin}]"


def _who(plugin: Installed) -> str:
    return f"plugin {plugin.name!r} ({plugin.owner})"
