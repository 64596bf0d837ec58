"""Checks what must hold between the values of a resolved configuration.

All problems are reported in one error. A function that returns ``Iterator[str]`` yields one
problem at a time, each beginning with its config path.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gcore_core.config import schema, yaml_source
from gcore_core.config.interpreters import Interpreter, differences, open_interpreter, unmet_needs
from gcore_core.config.plugins import Plugins, Provided
from gcore_core.contract.abilities import (
    adapts,
    replica_slots,
    required_by,
    rewards_read_by,
    shows_images,
    takes_stale,
)
from gcore_core.contract.errors import ConfigError, GcoreError, did_you_mean
from gcore_core.contract.job_settings import MISSING, POLICY, ROLLOUT, JobSettings, Reward, Role
from gcore_core.contract.providers import ControllerProvider, RoleProvider

#: Columns that every trainer can supply to an objective or advantage that requires them.
FROM_TRAINER = frozenset(
    {"old_logp", "ref_logp", "entropy", "rollout_logp", "kl_k1", "kl_k2", "kl_k3"}
)
_COMMIT = re.compile(r"[0-9a-f]{40}")


#: Kind of a role -> the config paths whose objects its workers build beside their backend.
_BUILT_BESIDE = {
    "trainer": ("objective", "sentinel"),
    "generator": ("data", "evaluation.data"),
    "annotator": (),
}


def no_missing(config: Mapping[str, Any], provided: Mapping[str, Provided]) -> None:
    """Raises ConfigError when a mandatory setting of a plugin was not given."""
    missing = sorted(key for key, value in yaml_source.flat(config).items() if value == MISSING)
    if not missing:
        return
    owners = sorted(
        f"{item.reference} ({item.owner})"
        for path, item in provided.items()
        if any(key.startswith(f"{path}.config.") for key in missing)
    )
    raise ConfigError(
        "a value is missing."
        if len(missing) == 1
        else f"a value is missing here, and for {', '.join(missing[1:])}.",
        where=missing[0],
        why=f"required by {', '.join(owners)}" if owners else "",
        missing=missing,
    )


def run(
    settings: JobSettings,
    config: Mapping[str, Any],
    provided: Mapping[str, Provided],
    objects: Mapping[str, Any],
    plugins: Plugins,
    file: Path,
) -> None:
    """Raises one ConfigError that lists every problem.

    config: the settings as plain values, which are passed to the plugins' own checks.
    provided: config path -> chosen provider.
    objects: config path -> the provider's config object.
    """
    problems = [
        *_limits(settings),
        *_follows(settings),
        *_workers(settings),
        *_cluster(settings),
        *_owned_replicas(settings, objects),
        *_judges(settings, provided),
    ]
    problems += _uncalled(settings, provided)
    problems += _stale(provided, objects)
    problems += _adapting(provided, objects)
    problems += _named_rewards(settings, objects)
    role_providers = _role_providers(plugins)
    problems += _columns(settings, role_providers)
    for path in ("advantage", "objective"):
        problems += _requirements(path, objects.get(path), settings, role_providers)
    roles_that_read = {path: [ROLLOUT, POLICY] for path in ("data", "evaluation.data")}
    for name, reward in settings.rewards.items():
        roles_that_read[f"rewards.{name}"] = [reward.role] if reward.role else []
    for path, roles in roles_that_read.items():
        problems += _images(path, objects.get(path), provided, roles)
    problems += _replicas(settings, objects)
    problems += _remote_code(settings)
    problems += plugins.check(config)
    _raise(problems, file)


def interpreters(settings: JobSettings, provided: Mapping[str, Provided], file: Path) -> None:
    """Raises when workers could not start.

    They cannot where an interpreter, a plugin or an engine is missing or has another version.
    """
    errors: dict[str, GcoreError] = {}
    built_in_a_role: set[str] = set()
    opened: dict[str | None, Interpreter] = {}  # each is started once, however many roles it has
    for role, node in settings.roles.items():
        try:
            if node.python not in opened:
                opened[node.python] = open_interpreter(node.python, where=f"roles.{role}.python")
        except ConfigError as error:
            errors[str(error)] = error
            continue
        interpreter = opened[node.python]
        paths = [f"roles.{role}", *_BUILT_BESIDE[provided[f"roles.{role}"].kind]]
        providers = {path: provided[path] for path in paths if path in provided}
        built_in_a_role |= providers.keys()
        installed = [item for item in providers.values() if item.installed]
        versions = {item.distribution: item.version for item in installed}
        wrong = list(differences(interpreter, versions, where=f"roles.{role}.python")) or _unmet(
            interpreter, providers
        )
        errors |= {str(error): error for error in wrong}
    # Whatever no role builds runs in this interpreter.
    others = {path: item for path, item in provided.items() if path not in built_in_a_role}
    errors |= {str(error): error for error in _unmet(open_interpreter(None, where=""), others)}
    if len(errors) == 1:
        raise next(iter(errors.values()))
    problems = [" ".join(filter(None, (f"{e.where}: {e.what}", e.todo))) for e in errors.values()]
    _raise(problems, file)


def _unmet(interpreter: Interpreter, provided: Mapping[str, Provided]) -> list[GcoreError]:
    """Returns an error for each requirement of a chosen provider that the interpreter fails."""
    return [
        error
        for path, item in provided.items()
        for error in unmet_needs(interpreter, item.owner, item.spec.needs, where=f"{path}.use")
    ]


def _raise(problems: list[str], file: Path) -> None:
    """Raises one ConfigError for all problems, if there are any."""
    if len(problems) == 1:
        raise ConfigError(problems[0], problems=problems)
    if problems:
        more = f"and {len(problems) - 4} more: g-core check {file}"
        lines = problems if len(problems) <= 5 else [*problems[:4], more]
        raise ConfigError(
            f"the configuration has {len(problems)} problems.",
            where=str(file),
            why="\n".join(lines),
            problems=problems,
        )


def _limits(settings: JobSettings) -> Iterator[str]:
    """Each value is within its declared limit, and every number of the core is finite."""
    for path, value, limit in schema.limits(settings):
        if problem := limit.problem(value):
            yield f"{path}: {problem}"
    for path, value in yaml_source.flat(asdict(settings)).items():
        if isinstance(value, float) and not math.isfinite(value) and ".config." not in path:
            yield f"{path}: must be a finite number, not {value}."


def _cluster(settings: JobSettings) -> Iterator[str]:
    """The devices are "auto" or a count of at least one."""
    devices = settings.cluster.devices
    if devices != "auto" and not (isinstance(devices, int) and devices >= 1):
        yield f"cluster.devices: must be 'auto' or a number of devices, not {devices!r}."


def _follows(settings: JobSettings) -> Iterator[str]:
    """A role follows another role of this run, or none."""
    for name, role in settings.roles.items():
        followed = role.follows
        if followed is not None and (followed not in settings.roles or followed == name):
            names = ", ".join(other for other in settings.roles if other != name) or "none"
            yield (
                f"roles.{name}.follows: this run has no other role {followed!r}; "
                f"other roles: {names}."
            )


def _replicas(settings: JobSettings, objects: Mapping[str, Any]) -> Iterator[str]:
    """The slots of a role hold a whole number of replicas."""
    for name, role in settings.roles.items():
        size = replica_slots(objects.get(f"roles.{name}"))
        if role.slots % size:
            yield (
                f"roles.{name}.slots: {role.slots} slots cannot be divided into replicas of "
                f"{size} slots each."
            )


def _owned_replicas(settings: JobSettings, objects: Mapping[str, Any]) -> Iterator[str]:
    """Every controller has a replica to own, in a run that lets them own any."""
    if settings.controller.replicas != "owned":
        return
    if settings.run.deterministic:
        yield (
            'controller.replicas: "owned" cannot be had with run.deterministic, in which every '
            'replica hears every controller; choose "shared".'
        )
    role = settings.roles.get(ROLLOUT)
    count = role.slots // replica_slots(objects.get(f"roles.{ROLLOUT}")) if role else 0
    if role and count < settings.controller.shards:
        yield (
            f'controller.replicas: with "owned" each of {settings.controller.shards} controllers '
            f"needs a replica of its own, and roles.{ROLLOUT} has {count}; "
            f"set controller.shards to at most {count}, raise roles.{ROLLOUT}.slots, "
            'or choose "shared".'
        )


def _workers(settings: JobSettings) -> Iterator[str]:
    """Roles and scorer workers have different names, because their processes are named by them.

    Rewards that share a worker also agree on its number of processes (``workers``).
    """
    names_in_use = {*settings.roles, "controller", "supervisor"}
    counts: dict[str, int] = {}
    for name, reward in settings.rewards.items():
        worker = reward.worker
        if reward.workers != counts.setdefault(worker, reward.workers):
            yield (
                f"rewards.{name}.workers: rewards that share a worker ({worker!r}) must set the "
                "same number of workers; set that number, or give this reward another worker."
            )
        if worker in names_in_use or not schema.NAME.fullmatch(worker):
            yield (
                f"rewards.{name}.worker: {worker!r} cannot name a worker; use letters, digits, "
                "'_' and '-', and not the name of a role, 'controller' or 'supervisor'."
            )


def _judges(settings: JobSettings, provided: Mapping[str, Provided]) -> Iterator[str]:
    """Rewards that ask a model and the generators that answer them fit together.

    A reward that asks a model names a generator, and no other reward names a role. Every generator
    but the rollout is named by a reward.
    """
    answer = {name for name in settings.roles if provided[f"roles.{name}"].kind == "generator"}
    judges = set()
    for name, reward in settings.rewards.items():
        spec = provided[f"rewards.{name}"].spec
        role = reward.role
        judges.add(role)
        if role is None and getattr(spec, "asks", False):
            yield (
                f"rewards.{name}.role: {reward.use} asks a model; name the role that runs "
                "it, such as role: judge."
            )
        elif role is not None and not getattr(spec, "asks", False):
            yield f"rewards.{name}.role: {reward.use} asks no model; leave it out."
        elif role is not None and role not in answer:
            guess = did_you_mean(role, sorted(answer))
            yield (
                f"rewards.{name}.role: {role!r} is no generator of this run{guess}; there are "
                f"{', '.join(answer)}."
            )
    for name in sorted(answer - judges - {ROLLOUT}):
        yield (
            f"roles.{name}: no reward asks it; set rewards.<name>.role: {name}, or leave the "
            "role out."
        )


def _remote_code(settings: JobSettings) -> Iterator[str]:
    """With ``trust_remote_code``, the code cannot change after the user has read it.

    So the model is a local directory, is made here, or is pinned to a commit of the hub.
    """
    roles = settings.roles
    for section, nodes in (("roles", roles), ("rewards", settings.rewards)):
        for name, node in nodes.items():
            if not node.config.get("trust_remote_code"):
                continue
            model = _model_of(node, roles) or node.config
            pinned = _COMMIT.fullmatch(str(model.get("revision")))
            if not pinned and "make" not in model and not Path(str(model.get("path"))).is_dir():
                where = "give path a local directory"
                if section == "roles":
                    where = (
                        "set model.revision to the commit (40 hex digits) whose code you have "
                        "read, or "
                    ) + where
                yield (
                    f"{section}.{name}.config.trust_remote_code: the code of this model could "
                    f"change; {where}."
                )


def _model_of(node: Role | Reward, roles: Mapping[str, Role]) -> Mapping[str, Any]:
    """Returns the ``model:`` of a role, or of the role that it follows; a reward has none."""
    if not isinstance(node, Role):
        return {}
    followed = roles.get(node.follows) if node.follows else None
    if not node.model and followed is not None:
        return followed.model
    return node.model


def _images(
    path: str, settings: Any, provided: Mapping[str, Provided], roles: Sequence[str]
) -> Iterator[str]:
    """Roles that are shown images can take them.

    The settings of a dataset or reward say by ``shows_images()`` that there are images.

    path: where the dataset or reward is chosen.
    roles: names of the roles that its images are shown to.
    """
    if not shows_images(settings):
        return
    for role in (f"roles.{name}" for name in roles):
        if role in provided and "images" not in provided[role].spec.capabilities:
            use = provided[role].reference
            yield (
                f"{path}: its prompts have images, and {use}, which {role} uses, takes no "
                "images; take one that does."
            )


def _uncalled(settings: JobSettings, provided: Mapping[str, Provided]) -> Iterator[str]:
    """The step program calls something on every role and on every reward."""
    controller = provided["controller"]
    calls = controller.spec.calls if isinstance(controller.spec, ControllerProvider) else {}
    never = f"controller {controller.reference} never calls this"
    for name in settings.roles:
        kind = provided[f"roles.{name}"].kind
        if not calls.get(kind) or (kind == "trainer" and name != POLICY):
            yield f"roles.{name}: {never} role (kind {kind!r}); leave it out."
    if not calls.get("scorer"):
        yield from (f"rewards.{name}: {never} reward; leave it out." for name in settings.rewards)


def _stale(provided: Mapping[str, Provided], objects: Mapping[str, Any]) -> Iterator[str]:
    """A step program that trains on records of older weights has an objective that corrects it."""
    controller = provided["controller"]
    spec = controller.spec
    must_correct = isinstance(spec, ControllerProvider) and spec.trains_on_stale
    if must_correct and "objective" in provided and not takes_stale(objects.get("objective")):
        yield (
            f"objective: {provided['objective'].reference} does not correct for actions that older "
            f"weights sampled, and controller {controller.reference} trains on such actions; "
            "choose an objective that corrects for them."
        )


def _adapting(provided: Mapping[str, Provided], objects: Mapping[str, Any]) -> Iterator[str]:
    """An objective that learns from steps has a trainer that shows them and saves its state."""
    policy = provided.get(f"roles.{POLICY}")
    if policy is None or not adapts(objects.get("objective")):
        return
    if "objective.adapts" not in policy.spec.capabilities:
        yield (
            f"objective: {provided['objective'].reference} adapts its loss to what steps measure, "
            f"and trainer {policy.reference} shows it none and saves no state of it; take a "
            "trainer that does, or settings under which it stays as it is."
        )


def _named_rewards(settings: JobSettings, objects: Mapping[str, Any]) -> Iterator[str]:
    """A reward that a filter or an advantage reads by name is one of the job's."""
    for path in ("filter", "advantage"):
        for name in sorted(rewards_read_by(objects.get(path)) - settings.rewards.keys()):
            present = ", ".join(sorted(settings.rewards)) or "none"
            yield (
                f"{path}: reads the reward {name!r}, which the job does not have (it has: "
                f"{present})."
            )


def _role_providers(plugins: Plugins) -> dict[str, RoleProvider]:
    """Returns name -> provider of every role that a loaded plugin offers."""
    specs = (item.spec for item in plugins.providers("role"))
    return {spec.name: spec for spec in specs if isinstance(spec, RoleProvider)}


def _columns(settings: JobSettings, roles: Mapping[str, RoleProvider]) -> Iterator[str]:
    """A column comes from one role only, and an annotator follows no role."""
    giver: dict[str, str] = {}
    for name, node in settings.roles.items():
        role = roles.get(name)
        if role is None or role.kind != "annotator":
            continue
        if node.follows:
            yield (
                f"roles.{name}.follows: no weights are pushed to an annotator; leave it out, and "
                "give it a model."
            )
        for column in role.columns:
            if column in giver:
                yield (
                    f"roles.{name}: gives {column!r}, as roles.{giver[column]} does; leave one of "
                    "them out."
                )
            giver.setdefault(column, name)


def _requirements(
    path: str, config: Any, settings: JobSettings, roles: Mapping[str, RoleProvider]
) -> Iterator[str]:
    """The columns and scalars that ``requires()`` of the settings names come from somewhere.

    path: "advantage" or "objective".
    config: the settings object of the provider that is chosen there.
    """
    annotators = [role for role in roles.values() if role.kind == "annotator"]
    # Roles give per-action columns, and an advantage gets only numbers of whole records.
    if path == "advantage":
        annotators = []
    # Where several roles give one name, those of this run come last and stay.
    annotators.sort(key=lambda role: role.name in settings.roles)
    giver = {name: role.name for role in annotators for name in role.columns}
    supplied_by_roles = {name for name, role in giver.items() if role in settings.roles}
    for name in sorted(required_by(config) - FROM_TRAINER - supplied_by_roles):
        if name in giver:
            yield f"{path}: requires {name!r}, which roles.{giver[name]} gives; add that role."
        else:
            supplied = ", ".join(sorted(FROM_TRAINER | supplied_by_roles))
            no_role = "" if path == "advantage" else ": no installed role gives it"
            yield f"{path}: requires {name!r}, which nothing supplies{no_role} (known: {supplied})."
