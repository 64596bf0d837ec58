"""Resolves a YAML file and its overrides into a plan.

Only a plugin knows the settings of its providers, and only the file says which plugins there are.
So the file is merged twice. For example

    advantage: {use: algorithms/grpo, config: {group_size: 8}}

    first phase    into the core's schema, in which every ``config`` is open: anything may stand
                   there. Result: ``advantage.use`` is ``algorithms/grpo``, so the plugin
                   ``algorithms`` is loaded.
    second phase   into the same schema with GRPO's own dataclass in the place of
                   ``advantage.config``. Result: ``group_size`` is known and of the right type, and
                   the other settings of GRPO have their defaults.

Both are merges of the whole tree. That is why every error can name the full path.

Values stand in four forms on the way. They share their paths, such as ``roles.policy.use``:

    user    the file with its overrides, as plain values: what a user has written, and what is
            chosen for the user
    tree    the schema as OmegaConf has it, without the user's values
    core    the result of the first phase, as plain values
    plain   the result of the second phase, as plain values; ``JobSettings`` is made of it
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import msgspec
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from gcore_core import __version__
from gcore_core.config import (
    catalog,
    checks,
    default_balancer,
    default_sentinel,
    schema,
    yaml_source,
)
from gcore_core.config.column_checks import given_columns
from gcore_core.config.plugins import Plugins, Provided, local_plugin
from gcore_core.contract.columns import ColumnSpec
from gcore_core.contract.errors import (
    ConfigError,
    ContractError,
    GcoreError,
    PluginClash,
    did_you_mean,
)
from gcore_core.contract.factories import FactorySpec, reference_to
from gcore_core.contract.job_settings import (
    MISSING,
    POLICY,
    ROLLOUT,
    DataSettings,
    EnvironmentSettings,
    JobSettings,
    ObjectiveSettings,
    ObserverSettings,
    RewardSettings,
    RoleSettings,
)
from gcore_core.contract.providers import PARTS, ControllerProvider, RoleProvider
from gcore_core.contract.traits import traits_of


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Holds a configuration that is resolved and checked.

    settings: the settings of the core, with all defaults filled in.
    config: the same settings as plain values, which are printed, saved and passed to plugins.
    provided: config path ("roles.policy", "rewards.exact", "advantage", ...) -> chosen provider.
    objects: the same paths -> the provider's own config object; None where it has no settings.
    source: the YAML file.
    written: what the file and the overrides say and nothing else, with texts as they were written;
        interpolations are not replaced, and paths are the file's.
    columns: role of this run -> the per-action columns that it gives under its settings.
    lock: one entry for each loaded plugin, with its name, distribution and version.
    origins: dotted key -> where it was set; a key with a fixed default is absent.
    plugins: the loaded plugins.
    installed: the plugins that there are.
    notes: what ``g-core check`` says of defaults that depend on other values.
    """

    settings: JobSettings
    config: dict[str, Any]
    provided: Mapping[str, Provided]
    objects: Mapping[str, Any]
    source: Path
    written: Mapping[str, Any]
    columns: Mapping[str, tuple[ColumnSpec, ...]]
    lock: tuple[dict[str, str], ...]
    origins: Mapping[str, str]
    plugins: Plugins
    installed: catalog.Catalog
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Returns the name of the run: ``run.name``, or the stem of the file when it is not set."""
        return self.settings.run.name or self.source.stem

    def at(self, path: str) -> Any:
        """Returns the value at a dotted path. Raises ConfigError when there is none."""
        value: Any = self.config
        for key in path.split("."):
            if not isinstance(value, Mapping) or key not in value:
                keys = list(yaml_source.flat(self.config))
                raise ConfigError(
                    f"the configuration has no such key{did_you_mean(path, keys)}.", where=path
                )
            value = value[key]
        return value

    def factory(self, path: str) -> FactorySpec:
        """Returns what a worker needs to make the object that was chosen at ``path``."""
        if path not in self.provided:
            raise ConfigError(
                f"no provider is chosen at this key{did_you_mean(path, list(self.provided))}.",
                where=path,
                why=f"choices are made at: {', '.join(self.provided)}",
            )
        spec = self.provided[path].spec
        config_class = reference_to(spec.config) if spec.config else ""
        return FactorySpec(
            factory=spec.factory, config_class=config_class, config=self.at(path)["config"]
        )

    def why(self, key: str) -> str:
        """Returns ``key = value  # where it came from``, one line for each value below ``key``."""
        values = yaml_source.flat(self.at(key), key)
        return "\n".join(
            f"{leaf} = {msgspec.json.encode(value).decode()}  # {self._origin(leaf)}"
            for leaf, value in values.items()
        )

    def provenance(self) -> dict[str, str]:
        """Returns where each value was set, as ``why`` says it, by dotted key."""
        return {leaf: self._origin(leaf) for leaf in yaml_source.flat(self.config)}

    def _origin(self, leaf: str) -> str:
        """Returns where the value at a dotted key was set, or whose default it is."""
        if leaf in self.origins:
            return self.origins[leaf]
        for path, item in self.provided.items():
            if leaf.startswith(f"{path}.config."):
                return f"default of {item.reference} ({item.owner})"
        return f"default of the core (gcore-core {__version__})"


def trained_roles(plan: Plan) -> list[str]:
    """Returns the roles that are trained, the policy last."""
    learners = [
        role
        for role in plan.settings.roles
        if role != POLICY and plan.provided[f"roles.{role}"].kind == "trainer"
    ]
    return [*learners, POLICY]


def load_plan(
    file: str | Path, overrides: Sequence[str] = (), installed: catalog.Catalog | None = None
) -> Plan:
    """Reads, resolves and checks a configuration. It starts no process.

    Raises ConfigError or PluginError.

    overrides: of the command line, as ``path=value``.
    installed: the plugins that there are; None: they are looked for.
    """
    plan = read_plan(file, overrides, installed)
    problems = checks.problems_of(plan, _role_descriptions(plan.plugins))
    checks.refuse(problems + plan.plugins.check(plan.config, plan), plan.source)
    return plan


def read_plan(
    file: str | Path, overrides: Sequence[str] = (), installed: catalog.Catalog | None = None
) -> Plan:
    """Reads and resolves a configuration as ``load_plan`` does, with the same errors for keys and
    types of values. Whether what is chosen goes together, and can run here, is not asked.
    """
    source = yaml_source.read_source(Path(file), overrides)
    installed = installed or catalog.scan()
    chosen = _first_phase(source, installed)
    provided, settings = _second_phase(chosen, source)
    # Defaults that depend on other values, which no schema can say.
    filled = _fill_defaults(settings, chosen.plugins, source.file)
    origins = {**source.origins, **filled, **chosen.origins}
    for name, role in settings.roles.items():
        _take_one_model(role.model, f"roles.{name}.model", origins)
    yaml_source.resolve_paths(settings, source.file.parent)
    # Everything has its value now.
    config = asdict(settings)
    objects = {
        path: _config_object(item, path, _get(config, f"{path}.config"))
        for path, item in provided.items()
    }
    for path, item in provided.items():
        _check_traits(item, path, objects[path])
    return Plan(
        settings=settings,
        config=config,
        provided=provided,
        objects=objects,
        source=source.file,
        written=_written(source, provided),
        columns=_given_columns(settings, objects, chosen.plugins),
        lock=_lock(chosen.plugins),
        origins=origins,
        plugins=chosen.plugins,
        installed=installed,
        notes=chosen.notes,
    )


@dataclass(frozen=True, kw_only=True)
class _Chosen:
    """What the first phase has decided: which providers are chosen, and all plugins are loaded.

    user, tree, core: see the module.
    plugins: the loaded plugins.
    origins: config path -> why it was chosen for the user, such as ``balance.use``.
    notes: what ``g-core check`` says of that.
    """

    user: dict[str, Any]
    tree: DictConfig
    core: dict[str, Any]
    plugins: Plugins
    origins: Mapping[str, str]
    notes: tuple[str, ...]


def _first_phase(source: yaml_source.Source, installed: catalog.Catalog) -> _Chosen:
    """Finds out what is chosen where, and loads the plugins. Every ``config`` stays open."""
    user = _fitted(source)
    tree = _schema_tree(user)
    merged = _merged(copy.deepcopy(tree), user, source, {})
    core = _core_values(merged)
    # What the core chooses for the user comes first, so that these plugins are loaded, too.
    defaults = _chosen_by_core(core, merged, installed)
    for section, choice in defaults.items():
        _take(section, choice.use, core, user)
    plugins = _load_plugins(core, installed, source.file.parent)
    # Then what the loaded plugins choose.
    objectives = _take_objectives(core, user, tree, plugins)
    # What is chosen by nobody is an error, unless the step program does not need it.
    parts = _parts(core, plugins)
    _require(core, user, parts - _doubtful(core), source.file)
    for path in _left_out(core, parts):
        OmegaConf.update(tree, f"{path}.use", "")
    reasons = {f"{section}.use": choice.reason for section, choice in defaults.items()}
    return _Chosen(
        user=user,
        tree=tree,
        core=core,
        plugins=plugins,
        origins={**reasons, **objectives},
        notes=tuple(choice.note for choice in defaults.values() if choice.note),
    )


def _chosen_by_core(
    core: Mapping[str, Any], merged: DictConfig, installed: catalog.Catalog
) -> dict[str, default_balancer.BalancerChoice]:
    """Returns section -> the choice of the core, for sections that the user leaves to it."""
    chosen = {
        "balance": default_balancer.choose(core, merged, installed),
        "sentinel": default_sentinel.choose(core, installed),
    }
    return {section: choice for section, choice in chosen.items() if choice is not None}


def _second_phase(
    chosen: _Chosen, source: yaml_source.Source
) -> tuple[dict[str, Provided], JobSettings]:
    """Puts each provider's dataclass into the schema, and merges again.

    Returns config path -> chosen provider, and the settings.
    """
    user = chosen.user
    provided = dict(_resolve(chosen.core, chosen.plugins))
    for path, item in provided.items():
        if source.origins.get(f"{path}.use", "").startswith(yaml_source.OVERRIDE):
            _drop_of_others(item, _get(user, f"{path}.config"), f"{path}.config", source.origins)
        _graft(chosen.tree, path, item, _get(user, f"{path}.config"))
        if node := _get(user, path):
            node.update(_fitted_config(item, node, path, source))
    plain = _plain_tree(_merged(chosen.tree, user, source, provided))
    for key, word in source.words.items():
        if word.error is not None and _get(user, key) is None:  # no text took it
            raise word.error
    checks.no_missing(plain, provided)
    return provided, msgspec.convert(plain, JobSettings)


def _given_columns(
    settings: JobSettings, objects: Mapping[str, Any], plugins: Plugins
) -> dict[str, tuple[ColumnSpec, ...]]:
    """Returns role of this run -> the per-action columns that it gives under its settings."""
    return {
        role: given_columns(description, objects.get(f"roles.{role}"))
        for role, description in _role_descriptions(plugins).items()
        if role in settings.roles
    }


def _role_descriptions(plugins: Plugins) -> dict[str, RoleProvider]:
    """Returns name -> description of every role that a loaded plugin offers."""
    specs = {name: item.spec for name, item in _roles(plugins).items()}
    return {name: spec for name, spec in specs.items() if isinstance(spec, RoleProvider)}


def _lock(plugins: Plugins) -> tuple[dict[str, str], ...]:
    """Returns one entry for each loaded plugin; see ``Plan``."""
    return tuple(
        {"plugin": item.name, "distribution": item.distribution, "version": item.version}
        for item in plugins.loaded
    )


def _take_one_model(model: dict[str, Any], where: str, origins: Mapping[str, str]) -> None:
    """Leaves of ``path`` and ``make`` the one that the command line says, if it says one of them.

    Both in the file stay, and are refused by ``checks``. A ``make`` that is null is left out.
    """
    if model.get("make", ...) is None:
        del model["make"]
    if not ("make" in model and model.get("path")):
        return
    says_path = _is_overridden(f"{where}.path", origins)
    says_make = _is_overridden(f"{where}.make", origins)
    if says_path and not says_make:
        del model["make"]
    elif says_make and not says_path:
        del model["path"]


def _is_overridden(path: str, origins: Mapping[str, str]) -> bool:
    """Returns whether the command line gives the value at a config path, or one below it."""
    return any(
        origin.startswith(yaml_source.OVERRIDE)
        for leaf, origin in origins.items()
        if leaf == path or leaf.startswith(f"{path}.")
    )


def _normalised(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Expands the short forms: ``plugins`` as a list of names, and an empty ``config:``."""
    user = copy.deepcopy(dict(tree))
    if isinstance(user.get("plugins"), list):
        user["plugins"] = {str(name): None for name in user["plugins"]}
    for node in _choices(user):
        if "config" in node and node["config"] is None:
            node["config"] = {}
    return user


def _fitted(source: yaml_source.Source) -> dict[str, Any]:
    """Returns what the user wrote, with texts where the core's keys are texts; see ``schema``."""
    user = _normalised(source.tree)
    fitting = schema.Fitting(words=source.words, origins=source.origins)
    fitted: dict[str, Any] = fitting.fit(JobSettings, user, _normalised(source.texts))
    return fitted


def _fitted_config(
    item: Provided, node: Mapping[str, Any], path: str, source: yaml_source.Source
) -> dict[str, Any]:
    """Returns ``config`` with texts where the provider's keys are texts; {} without settings."""
    if item.spec.config is None or "config" not in node:
        return {}
    fitting = schema.Fitting(words=source.words, origins=source.origins)
    where = f"{path}.config"
    texts = _get(source.texts, where)
    try:
        return {"config": fitting.fit(item.spec.config, node["config"], texts, where)}
    except ConfigError as error:
        error.why = "\n".join(filter(None, (error.why, _whose(item))))
        raise


def _written(source: yaml_source.Source, provided: Mapping[str, Provided]) -> dict[str, Any]:
    """Returns ``Plan.written``."""
    user = _fitted(source)
    for path, item in provided.items():
        if node := _get(user, path):
            node.update(_fitted_config(item, node, path, source))
    # The short form that the user chose.
    if isinstance(source.texts.get("plugins"), list):
        user["plugins"] = source.texts["plugins"]
    return user


def _choices(user: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields every node of the user's tree in which a provider is chosen."""
    nodes = [_get(user, path) for path in schema.KIND_AT]
    for section in schema.NAMED:
        children = user.get(section)
        nodes += list(children.values()) if isinstance(children, Mapping) else []
    nodes += [node.get("objective") for node in nodes if isinstance(node, dict)]
    yield from (node for node in nodes if isinstance(node, dict))


def _get(tree: Any, path: str) -> Any:
    """Returns the value at a dotted path of a plain tree, or None."""
    for key in path.split("."):
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


def _schema_tree(user: Mapping[str, Any]) -> DictConfig:
    """Returns the core schema with a node for every role, reward and observer that the user names.

    Providers' config classes are grafted onto these nodes later.
    """
    flags = {"no_deepcopy_set_nodes": True}  # since each node is made for its place
    tree: DictConfig = OmegaConf.structured(JobSettings, flags=flags)
    for section, cls in (
        ("roles", RoleSettings),
        ("rewards", RewardSettings),
        ("observers", ObserverSettings),
    ):
        for name in user.get(section) or ():
            if not schema.NAME.fullmatch(str(name)):
                raise ConfigError(
                    "a name is made of letters, digits, '_' and '-'.", where=f"{section}.{name}"
                )
            tree[section][str(name)] = OmegaConf.structured(cls)
    for name in user.get("roles") or ():
        if _get(user, f"roles.{name}.objective") is not None:
            tree.roles[str(name)].objective = OmegaConf.structured(ObjectiveSettings)
    if _get(user, "evaluation.data") is not None:
        tree.evaluation.data = OmegaConf.structured(DataSettings)
    if _get(user, "environment") is not None:
        tree.environment = OmegaConf.structured(EnvironmentSettings)
    return tree


def _merged(
    tree: DictConfig,
    user: Mapping[str, Any],
    source: yaml_source.Source,
    provided: Mapping[str, Provided],
) -> DictConfig:
    """Merges the user's tree into the schema itself. Raises ConfigError for what does not fit."""
    try:
        merged = OmegaConf.unsafe_merge(tree, OmegaConf.create(dict(user)))
    except OmegaConfBaseException as error:
        raise _explained(error, source, provided) from error
    if not isinstance(merged, DictConfig):
        raise ConfigError("the file must hold a mapping of keys to values.", where=str(source.file))
    return merged


def _explained(
    error: Any, source: yaml_source.Source, provided: Mapping[str, Provided]
) -> ConfigError:
    """Turns OmegaConf's error into ours: what is wrong, whose field it is, where it was written."""
    where = str(error.full_key or source.file)
    first = f"{str(error).splitlines()[0].rstrip('.')}."
    why = [source.origins[where]] if where in source.origins else []
    # Keys that are gone, and values as KEY=VALUE -> what to do in their place, or what says it.
    gone = getattr(error.object_type, "GONE_KEYS", {})
    if str(error.key) in gone:
        todo = gone[str(error.key)]
        return ConfigError(
            "there is no such key any more.",
            where=where,
            why="\n".join(why),
            todo=todo() if callable(todo) else todo,
        )
    owner = next(
        (item for path, item in provided.items() if where.startswith(f"{path}.config")), None
    )
    if owner is not None:
        why.append(_whose(owner))
    choices = []
    if isinstance(error, ConfigKeyError) and isinstance(error.parent_node, DictConfig):
        choices = [str(key) for key in error.parent_node]
        what = f"{error.object_type_str!r} has no such field" if owner else "there is no such key"
        first = f"{what}{did_you_mean(str(error.key), choices)}."
        why.append(f"there are: {', '.join(choices)}")
    todo = gone.get(f"{error.key}={getattr(error, 'value', None)}", "")
    return ConfigError(first, where=where, why="\n".join(why), todo=todo, choices=choices)


def _whose(item: Provided) -> str:
    return (
        f"from plugin {item.plugin} ({item.owner}); its fields: g-core plugins show {item.plugin}"
    )


def _core_values(tree: DictConfig) -> dict[str, Any]:
    """Returns the result of the first phase as plain values.

    Interpolations stay as they are, because the plugins' defaults are not there yet. Only those in
    ``use`` are resolved, because they say which plugins to load.
    """
    core = _plain_tree(tree, resolve=False)
    for path, use in _uses(core):
        if use.startswith("${"):
            _get(core, path)["use"] = _plain_tree(
                OmegaConf.masked_copy(OmegaConf.select(tree, path), "use")
            )["use"]
    return core


def _take(section: str, use: str, core: dict[str, Any], user: dict[str, Any]) -> None:
    """Puts the provider that was chosen for the user where a user would name it."""
    core[section]["use"] = use
    node = user.get(section)
    user[section] = {**(node if isinstance(node, dict) else {}), "use": use}


def _take_objectives(
    core: dict[str, Any], user: dict[str, Any], tree: DictConfig, plugins: Plugins
) -> dict[str, str]:
    """Puts the objective that a role's plugin names where a user would name one.

    Returns config path -> its origin.
    """
    origins = {}
    for name, item in _roles(plugins).items():
        use = getattr(item.spec, "objective", "")
        node = core["roles"].get(name)
        if not use or node is None or (node["objective"] or {}).get("use", MISSING) != MISSING:
            continue
        written = _get(user, f"roles.{name}.objective") or {}
        node["objective"] = {"config": {}, **(node["objective"] or {}), "use": use}
        user["roles"][name]["objective"] = {**written, "use": use}
        tree.roles[name].objective = OmegaConf.structured(ObjectiveSettings)
        origins[f"roles.{name}.objective.use"] = f"default of role {name} ({item.owner})"
    return origins


def _plain_tree(tree: DictConfig, *, resolve: bool = True) -> dict[str, Any]:
    """Converts a tree to dicts and lists.

    resolve: whether interpolations are replaced.
    """
    try:
        plain = OmegaConf.to_container(tree, resolve=resolve)
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"{str(error).splitlines()[0]}.", where=str(error.full_key or "")
        ) from error
    return {str(key): value for key, value in plain.items()} if isinstance(plain, dict) else {}


def _parts(core: Mapping[str, Any], plugins: Plugins) -> frozenset[str]:
    """Returns the parts of a job that the chosen step program needs."""
    spec = plugins.resolve("controller", core["controller"]["use"], where="controller.use").spec
    return spec.parts if isinstance(spec, ControllerProvider) else PARTS


def _doubtful(core: Mapping[str, Any]) -> frozenset[str]:
    """Returns the parts that the job needs or not, as only a plugin's settings can tell.

    Those settings are not read yet; ``checks`` asks them.
    """
    use = (core.get("advantage") or {}).get("use", MISSING)
    return frozenset() if use in ("", MISSING) else frozenset({"rewards"})


def _left_out(core: Mapping[str, Any], parts: frozenset[str]) -> list[str]:
    """Returns the sections that the step program does not need and in which nothing is chosen."""
    return [path for path in sorted(PARTS - parts) if (core.get(path) or {}).get("use") == MISSING]


def _require(
    core: Mapping[str, Any], user: Mapping[str, Any], parts: frozenset[str], file: Path
) -> None:
    """Raises one ConfigError that names every mandatory value that is missing.

    parts: the parts of a job that the step program needs.
    """
    unneeded = PARTS - parts
    unset = ("", MISSING)
    absent = [] if user.get("data") else ["data"]
    absent += [
        f"{path}.use"
        for path in schema.KIND_AT
        if (_get(core, path) or {}).get("use") in unset and path not in unneeded
    ]
    required_roles = [POLICY, ROLLOUT] if "generation" in parts else [POLICY]
    absent += [f"roles.{name}" for name in required_roles if name not in core["roles"]]
    for section in schema.NAMED:
        absent += [
            f"{section}.{name}.use" for name, node in core[section].items() if node["use"] in unset
        ]
    absent += [
        f"roles.{name}.objective.use"
        for name, node in core["roles"].items()
        if (node.get("objective") or {}).get("use") in unset
    ]
    if not core["rewards"] and "rewards" in parts:
        absent.append("rewards.<name>")
    if absent:
        raise ConfigError(
            f"missing: {', '.join(absent)}.",
            where=str(file),
            todo=(
                "each names a provider, as in: advantage: {use: algorithms/grpo}      all keys: "
                "docs/reference/config.md"
            ),
            missing=absent,
        )


def _uses(core: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields (config path, value of ``use``) where something is chosen, in the schema's order."""
    nodes = [(path, _get(core, path)) for path in schema.KIND_AT]
    for section in schema.NAMED:
        nodes += [(f"{section}.{name}", node) for name, node in core[section].items()]
    nodes += [
        (f"roles.{name}.objective", node.get("objective")) for name, node in core["roles"].items()
    ]
    for path, node in nodes:
        if node is not None and node["use"] not in ("", MISSING):
            yield path, node["use"]


def _load_plugins(core: Mapping[str, Any], installed: catalog.Catalog, base: Path) -> Plugins:
    """Loads every plugin that is named; each one is looked up before the first is imported.

    base: the directory that paths of local files are relative to.
    """
    locals_ = [
        local_plugin(yaml_source.anchored(name, base), f"local[{i}]")
        for i, name in enumerate(core["local"])
    ]
    local_plugins: dict[str, catalog.Installed] = {}
    for plugin in locals_:
        other = local_plugins.setdefault(plugin.name, plugin)
        if other.module != plugin.module:
            raise PluginClash(
                f"two local files are named {plugin.name!r}.",
                where="local",
                why=f"{other.module} and {plugin.module}",
                todo="rename one; a name cannot be shared",
            )
    mentions = [(name, f"plugins.{name}", pin or "") for name, pin in core["plugins"].items()]
    mentions += [(use.partition("/")[0], f"{path}.use", "") for path, use in _uses(core)]
    plugins_to_load = {catalog.CORE: (installed.get(catalog.CORE, where=""), "")}
    for name in local_plugins:
        if name in installed.names():
            raise PluginClash(
                f"plugin {name!r} is both a local file and an installed plugin.",
                where="local",
                why=f"file: {local_plugins[name].module}",
                todo="rename the file; a name cannot be shared",
            )
    mentions = [mention for mention in mentions if mention[0] not in local_plugins]
    named_at: dict[str, str] = {}
    for name, where, _ in mentions:
        named_at.setdefault(name, where)
    installed.require(named_at)
    for name, where, pin in mentions:
        plugin = installed.get(name, where=where, pin=pin)
        plugins_to_load.setdefault(name, (plugin, where))
    plugins = Plugins()
    for plugin, where in [*plugins_to_load.values(), *((plugin, "local") for plugin in locals_)]:
        plugins.load(plugin, where=where)
    return plugins


def _resolve(core: Mapping[str, Any], plugins: Plugins) -> Iterator[tuple[str, Provided]]:
    """Yields (config path, provider) for everything that is chosen.

    The role's provider says which kind its backend has. A role that no provider knows is a
    generator when a reward or the environment names it.
    """
    roles = _roles(plugins)
    judges = {reward["role"] for reward in core["rewards"].values()}
    judges |= set((_get(core, "environment.roles") or {}).values())
    for path, use in _uses(core):
        section, _, name = path.partition(".")
        if section == "roles" and name.endswith(".objective"):
            kind = "objective"
        elif section == "roles" and name in judges and name not in roles:
            kind = "generator"
        elif section == "roles":
            if name not in roles:
                asked = sorted(judge for judge in judges if judge)
                raise ConfigError(
                    f"no loaded plugin knows a role {name!r}"
                    f"{did_you_mean(name, [*roles, *asked])}.",
                    where=path,
                    why=f"known roles: {', '.join(roles)}; rewards and environment.roles name: "
                    f"{', '.join(asked) or 'none'}",
                    todo="name the plugin that brings the role, as in plugins: [NAME], or name the "
                    "role where it is asked: in rewards.<name>.role or environment.roles",
                    choices=list(roles),
                )
            kind = roles[name].spec.kind  # type: ignore[attr-defined]
        else:
            kind = schema.KIND_IN.get(section) or schema.KIND_AT[path]
        yield path, plugins.resolve(kind, use, where=f"{path}.use")


def _roles(plugins: Plugins) -> dict[str, Provided]:
    """Returns name -> provider of every known role; raises PluginClash for one with two owners."""
    roles: dict[str, Provided] = {}
    for item in plugins.providers("role"):
        if item.spec.name in roles:
            other = roles[item.spec.name]
            raise PluginClash(
                f"role {item.spec.name!r} is defined by {other.owner} and by {item.owner}.",
                todo="a role can have one definition; use only one of these plugins in a run",
            )
        roles[item.spec.name] = item
    return roles


def _drop_of_others(item: Provided, settings: Any, path: str, origins: Mapping[str, str]) -> None:
    """Deletes from ``settings`` those that were meant for a provider that an override replaced.

    A key goes when the new provider has no such field. A key that is itself set by an override
    stays, so that it is reported as an error.
    """
    known_keys = (
        {one.name for one in fields(item.spec.config)} if item.spec.config is not None else set()
    )
    overridden = {key for key, where in origins.items() if where.startswith(yaml_source.OVERRIDE)}
    for key in sorted(set(settings if isinstance(settings, dict) else ()) - known_keys):
        if not any(f"{other}.".startswith(f"{path}.{key}.") for other in overridden):
            del settings[key]


def _graft(tree: DictConfig, path: str, item: Provided, settings: Any) -> None:
    """Puts the provider's config dataclass in the place of its open ``config`` node."""
    if item.spec.config is None:
        if settings:
            raise ConfigError(
                f"{item.reference} has no settings, but {', '.join(map(str, settings))} is set.",
                where=f"{path}.config",
                todo=default_sentinel.setting_elsewhere(item.reference, settings),
            )
        return
    try:
        OmegaConf.update(
            tree, f"{path}.config", OmegaConf.structured(item.spec.config), merge=False
        )
    except (OmegaConfBaseException, TypeError, ValueError) as error:
        raise ContractError(
            f"{item.reference} ({item.owner}): config class {item.spec.config.__qualname__} "
            "cannot be a schema: "
            f"{str(error).splitlines()[0]}",
            where=path,
            plugin=item.plugin,
        ) from error


def _fill_defaults(settings: JobSettings, plugins: Plugins, file: Path) -> dict[str, str]:
    """Fills in the defaults that depend on other values; returns dotted key -> its origin."""
    origins = {}
    if settings.run.name is None:
        settings.run.name = file.stem
        origins["run.name"] = f"stem of {file.name}"
    for name, item in _roles(plugins).items():
        follows = getattr(item.spec, "follows", None)
        if follows and name in settings.roles and settings.roles[name].follows is None:
            settings.roles[name].follows = follows
            origins[f"roles.{name}.follows"] = f"default of role {name} ({item.owner})"
        role = settings.roles.get(name)
        is_trainer = getattr(item.spec, "kind", "") == "trainer"
        if is_trainer and name != POLICY and role is not None and not role.model:
            role.model = copy.deepcopy(settings.roles[POLICY].model)
            origins[f"roles.{name}.model"] = f"roles.{POLICY}.model"
    return origins


def _config_object(item: Provided, path: str, config: Any) -> Any:
    """Makes the provider's own config object, so that its ``__post_init__`` checks run early.

    The object is None where the provider has no settings.
    """
    cls = item.spec.config
    if cls is None:
        return None
    try:
        return msgspec.convert(config, cls)
    except msgspec.ValidationError as error:
        # The error that the plugin raised, which msgspec has wrapped.
        own_words = error.__cause__
        if isinstance(own_words, GcoreError):
            if own_words.where.partition(".")[0] in {field.name for field in fields(cls)}:
                own_words.where = f"{path}.config.{own_words.where}"
            raise own_words from None
        raise ConfigError(
            f"{error}.", where=f"{path}.config", why=f"from plugin {item.plugin} ({item.owner})"
        ) from error


def _check_traits(item: Provided, path: str, config: Any) -> None:
    """Raises ContractError where a config object gives no traits, or another kind's."""
    try:
        misplaced = traits_of(config).misplaced(item.kind)
    except ContractError as error:
        error.where, error.why = path, _whose(item)
        raise
    if misplaced:
        raise ContractError(
            f"{item.kind} {item.reference} claims what is not its own: {misplaced[0]}.",
            where=path,
            why=_whose(item),
        )
