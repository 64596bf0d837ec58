"""Checks what must hold between the values of a resolved configuration.

All problems are reported in one error. A function that returns ``Iterator[str]`` yields one
problem at a time, each beginning with its config path; its docstring says what must hold.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from gcore_core.config import schema, yaml_source
from gcore_core.config.interpreters import Interpreter, differences, open_interpreter, unmet_needs
from gcore_core.config.plugins import Plugins, Provided
from gcore_core.contract.algorithms import LOGP_OF, ids_column
from gcore_core.contract.columns import ColumnSpec
from gcore_core.contract.errors import ConfigError, GcoreError, did_you_mean
from gcore_core.contract.job_settings import (
    MISSING,
    POLICY,
    ROLLOUT,
    JobSettings,
    RewardSettings,
    RoleSettings,
)
from gcore_core.contract.preflight import ChosenProvider, ResolvedJob
from gcore_core.contract.providers import PARTS, ControllerProvider, RewardProvider, RoleProvider
from gcore_core.contract.traits import traits_of

#: Columns that every trainer can supply to an objective or advantage that requires them.
FROM_TRAINER = frozenset(
    {"age", "old_logp", "ref_logp", "entropy", "rollout_logp", "group", "sample"}
    | {"kl_k1", "kl_k2", "kl_k3"}
)
#: What a model with a value head supplies to the objective that trains it, with an advantage of
#: level "record" and "action".
_FROM_VALUES = {
    "record": frozenset({"values", "old_values"}),
    "action": frozenset({"values", "old_values", "returns"}),
}
#: What processes of the core are named by; no role and no worker of rewards may be.
_OWN_PROCESSES = frozenset({"agent", "controller", "supervisor"})
_COMMIT = re.compile(r"[0-9a-f]{40}")


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


def problems_of(job: ResolvedJob, plugins: Plugins) -> list[str]:
    """Returns the problems that the core finds in a job; the plugins find others.

    plugins: those that are loaded for the job.
    """
    settings, provided, objects = job.settings, job.provided, job.objects
    problems = [
        *_limits(settings),
        *_run_name(settings),
        *_follows(settings, provided),
        *_workers(settings),
        *_cluster(settings),
        *_owned_replicas(settings, objects),
        *_judges(settings, provided),
        *_models(settings),
    ]
    problems += _uncalled(settings, provided)
    problems += _rewards(settings, provided, objects)
    problems += _sleeping_trainers(settings, provided)
    problems += _named_rewards(settings, objects)
    problems += _asked_alone(settings, provided)
    role_providers = _role_providers(plugins)
    columns = {
        name: given_columns(role_providers[name], objects.get(f"roles.{name}"))
        for name in settings.roles
        if name in role_providers
    }
    problems += _columns(settings, columns, provided)
    problems += _widths(settings, role_providers, objects)
    problems += _learners(settings, provided, objects, role_providers)
    problems += _value_heads(settings, provided, objects)
    problems += _own_columns(settings, objects, columns)
    for path in ("advantage", *_objectives(settings, provided)):
        problems += _requirements(path, objects, settings, provided, columns, role_providers)
    problems += _token_logprobs(objects.get("objective"), provided)
    problems += _routing(provided, objects)
    roles_that_read = {path: [ROLLOUT, POLICY] for path in ("data", "evaluation.data")}
    for name, reward in settings.rewards.items():
        roles_that_read[f"rewards.{name}"] = [reward.role] if reward.role else []
    for path, roles in roles_that_read.items():
        problems += _images(path, objects.get(path), provided, roles)
    problems += _replicas(settings, objects)
    problems += _remote_code(settings)
    return problems


def interpreters(settings: JobSettings, provided: Mapping[str, Provided], file: Path) -> None:
    """Raises when workers could not start.

    They cannot where an interpreter, a plugin or an engine is missing or has another version.
    """
    errors: dict[str, GcoreError] = {}
    built_in_a_role: set[str] = set()
    opened: dict[str | None, Interpreter] = {}  # each is started once, however many roles it has
    for role, node in settings.roles.items():
        paths = [f"roles.{role}", *_built_beside(role, provided)]
        providers = {path: provided[path] for path in paths if path in provided}
        built_in_a_role |= providers.keys()
        try:
            if node.python not in opened:
                opened[node.python] = open_interpreter(node.python, where=f"roles.{role}.python")
        except ConfigError as error:
            errors[str(error)] = error
            continue
        interpreter = opened[node.python]
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
    refuse(problems, file)


def _built_beside(role: str, provided: Mapping[str, Provided]) -> list[str]:
    """Returns the config paths of what a role's workers build beside their backend.

    The role's interpreter must have the plugins that are chosen there. ``gcore_core.run.jobs``
    hands just these to the workers.
    """
    kind = provided[f"roles.{role}"].kind
    if kind == "generator":
        return ["data", "evaluation.data", *(["sampling"] if role == ROLLOUT else [])]
    if kind != "trainer":
        return []
    own = f"roles.{role}.objective"
    paths = [own if own in provided else "objective"]
    if _level(provided) == "action":
        paths.append("advantage")
    watches = role == POLICY and "sentinel" in provided
    if watches and not provided["sentinel"].is_of_the_core:
        paths.append("sentinel")
    return paths


def _unmet(interpreter: Interpreter, provided: Mapping[str, Provided]) -> list[GcoreError]:
    """Returns an error for each requirement of a chosen provider that the interpreter fails."""
    return [
        error
        for path, item in provided.items()
        for error in unmet_needs(interpreter, item.owner, item.spec.needs, where=f"{path}.use")
    ]


def refuse(problems: list[str], file: Path) -> None:
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
    """Each value is within its declared limit, and every number is one; the core's are finite.

    Whether a setting of a plugin may be infinite, the plugin says.
    """
    for path, value, limit in schema.limits(settings):
        if problem := limit.problem(value):
            yield f"{path}: {problem}"
    for path, value in _plain_values(asdict(settings), ""):
        if not isinstance(value, float) or math.isfinite(value):
            continue
        if ".config." not in path:
            yield f"{path}: must be a finite number, not {value}."
        elif math.isnan(value):
            yield f"{path}: must be a number, not {value}."


def _plain_values(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yields (path, value) of every value in mappings and lists, such as ``betas[0]``."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _plain_values(value, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from _plain_values(value, f"{path}[{index}]")
    else:
        yield path, tree


def _run_name(settings: JobSettings) -> Iterator[str]:
    """The name of the run can be that of a directory, unless ``run.dir`` says which it has."""
    name = settings.run.name or ""
    if settings.run.dir is None and (name in (".", "..") or "/" in name or "\0" in name):
        yield (
            f"run.name: {name!r} cannot name a directory; use letters, digits, '-', '_' and '.', "
            "or set run.dir."
        )


def _cluster(settings: JobSettings) -> Iterator[str]:
    """The devices are "auto" or a count of at least one."""
    devices = settings.cluster.devices
    if devices != "auto" and not (isinstance(devices, int) and devices >= 1):
        yield f"cluster.devices: must be 'auto' or a number of devices, not {devices!r}."


def _follows(settings: JobSettings, provided: Mapping[str, ChosenProvider]) -> Iterator[str]:
    """A role follows another role of this run, which is a trainer, or none."""
    for name, role in settings.roles.items():
        followed = role.follows
        if followed is not None and (followed not in settings.roles or followed == name):
            names = ", ".join(other for other in settings.roles if other != name) or "none"
            yield (
                f"roles.{name}.follows: this run has no other role {followed!r}; "
                f"other roles: {names}."
            )
        elif followed is not None and provided[f"roles.{followed}"].kind != "trainer":
            yield (
                f"roles.{name}.follows: nobody trains roles.{followed}, so it pushes no weights; "
                "name a role that has a trainer, or leave it out and give this role a model."
            )


def _replicas(settings: JobSettings, objects: Mapping[str, Any]) -> Iterator[str]:
    """The slots of a role hold a whole number of replicas."""
    for name, role in settings.roles.items():
        size = traits_of(objects.get(f"roles.{name}")).replica_slots
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
    count = role.slots // traits_of(objects.get(f"roles.{ROLLOUT}")).replica_slots if role else 0
    if role and count < settings.controller.shards:
        yield (
            f'controller.replicas: with "owned" each of {settings.controller.shards} controllers '
            f"needs a replica of its own, and roles.{ROLLOUT} has {count}; "
            f"set controller.shards to at most {count}, raise roles.{ROLLOUT}.slots, "
            'or choose "shared".'
        )


def _workers(settings: JobSettings) -> Iterator[str]:
    """Roles and scorer workers have different names, because their processes are named by them.

    None has a name of the core's own processes.
    Rewards that share a worker also agree on its number of processes (``workers``).
    """
    for name in sorted(settings.roles.keys() & _OWN_PROCESSES):
        yield f"roles.{name}: processes of the core are named so; give the role another name."
    names_in_use = settings.roles.keys() | _OWN_PROCESSES
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
                "'_' and '-', and not the name of a role, 'agent', 'controller' or 'supervisor'."
            )


def _judges(settings: JobSettings, provided: Mapping[str, ChosenProvider]) -> Iterator[str]:
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


def _models(settings: JobSettings) -> Iterator[str]:
    """A model is made or lies somewhere, not both: the path would be left unread."""
    for name, role in settings.roles.items():
        if "make" in role.model and role.model.get("path"):
            yield (
                f"roles.{name}.model: has both path ({role.model['path']}) and make; leave one of "
                "them out. The one that the command line names wins over the file's."
            )


def _model_of(
    node: RoleSettings | RewardSettings, roles: Mapping[str, RoleSettings]
) -> Mapping[str, Any]:
    """Returns the ``model:`` of a role, or of the role that it follows; a reward has none."""
    if not isinstance(node, RoleSettings):
        return {}
    followed = roles.get(node.follows) if node.follows else None
    if not node.model and followed is not None:
        return followed.model
    return node.model


def _images(
    path: str, settings: Any, provided: Mapping[str, ChosenProvider], roles: Sequence[str]
) -> Iterator[str]:
    """Roles that are shown images can take them.

    The settings of a dataset or reward say by ``shows_images()`` that there are images.

    path: where the dataset or reward is chosen.
    roles: names of the roles that its images are shown to.
    """
    if not traits_of(settings).shows_images:
        return
    for role in (f"roles.{name}" for name in roles):
        if role in provided and "images" not in provided[role].spec.capabilities:
            use = provided[role].reference
            yield (
                f"{path}: its prompts have images, and {use}, which {role} uses, takes no "
                "images; take one that does."
            )


def _uncalled(settings: JobSettings, provided: Mapping[str, ChosenProvider]) -> Iterator[str]:
    """The step program calls something on every role and on every reward."""
    controller = provided["controller"]
    calls = controller.spec.calls if isinstance(controller.spec, ControllerProvider) else {}
    never = f"controller {controller.reference} never calls this"
    for name in settings.roles:
        kind = provided[f"roles.{name}"].kind
        if not calls.get(kind):
            yield f"roles.{name}: {never} role (kind {kind!r}); leave it out."
    if not calls.get("scorer"):
        yield from (f"rewards.{name}: {never} reward; leave it out." for name in settings.rewards)


def _rewards(
    settings: JobSettings, provided: Mapping[str, ChosenProvider], objects: Mapping[str, Any]
) -> Iterator[str]:
    """A job has a reward, unless its step program or its advantage needs none."""
    controller = provided["controller"]
    parts = controller.spec.parts if isinstance(controller.spec, ControllerProvider) else PARTS
    if settings.rewards or "rewards" not in parts or "advantage" not in provided:
        return
    if not traits_of(objects.get("advantage")).works_without_rewards:
        yield (
            f"rewards: there is none, and advantage {provided['advantage'].reference} is computed "
            "from rewards under these settings; add rewards.<name>."
        )


def _sleeping_trainers(
    settings: JobSettings, provided: Mapping[str, ChosenProvider]
) -> Iterator[str]:
    """Trainers that are to sleep can."""
    if settings.placement.sleep_in_rollout != "always":
        return
    for name in settings.roles:
        role = provided[f"roles.{name}"]
        if role.kind == "trainer" and "sleep" not in role.spec.capabilities:
            yield (
                f"placement.sleep_in_rollout: always, but trainer {role.reference}, which "
                f"roles.{name} uses, cannot sleep; set it to never, or take a trainer with the "
                "capability sleep."
            )


def _named_rewards(settings: JobSettings, objects: Mapping[str, Any]) -> Iterator[str]:
    """A reward that an algorithm reads by name is one of the job's."""
    for path in ("filter", "advantage", "sampling"):
        for name in sorted(traits_of(objects.get(path)).reads_rewards - settings.rewards.keys()):
            present = ", ".join(sorted(settings.rewards)) or "none"
            yield (
                f"{path}: reads the reward {name!r}, which the job does not have (it has: "
                f"{present})."
            )


def _asked_alone(settings: JobSettings, provided: Mapping[str, ChosenProvider]) -> Iterator[str]:
    """Only a reward that is a plain function of one record is asked for a score alone.

    Of others that ask no model of the run, it is known when their worker has made them.
    """
    for name, reward in settings.rewards.items():
        spec = provided[f"rewards.{name}"].spec
        if not reward.alone_every or not isinstance(spec, RewardProvider):
            continue
        if spec.level == "group" or spec.asks:
            sees = "asks a model" if spec.asks else "sees the records of a prompt together"
            yield (
                f"rewards.{name}.alone_every: {reward.use} {sees}; only a plain function of one "
                "record is asked for a score alone. Leave it out."
            )


def _role_providers(plugins: Plugins) -> dict[str, RoleProvider]:
    """Returns name -> provider of every role that a loaded plugin offers."""
    specs = (item.spec for item in plugins.providers("role"))
    return {spec.name: spec for spec in specs if isinstance(spec, RoleProvider)}


def given_columns(role: RoleProvider, config: Any) -> tuple[ColumnSpec, ...]:
    """Returns the columns that a role gives in this run, in the order of its description.

    config: the settings object of the role's backend, which says how wide columns [A, k] are.
    """
    widths = traits_of(config).column_widths
    return tuple(
        replace(column, k=widths[column.name]) if column.wide else column
        for column in role.column_specs
        if not column.wide or widths.get(column.name)
    )


def _columns(
    settings: JobSettings,
    columns: Mapping[str, Sequence[ColumnSpec]],
    provided: Mapping[str, ChosenProvider],
) -> Iterator[str]:
    """A column comes from one role only, and an annotator follows no role.

    columns: role of this run -> what it gives.
    """
    giver: dict[str, str] = {}
    for name, given in columns.items():
        if settings.roles[name].follows and provided[f"roles.{name}"].kind == "annotator":
            yield (
                f"roles.{name}.follows: no weights are pushed to an annotator; leave it out, and "
                "give it a model."
            )
        for column in given:
            if column.name in giver:
                yield (
                    f"roles.{name}: gives {column.name!r}, as roles.{giver[column.name]} does; "
                    "leave one of them out."
                )
            giver.setdefault(column.name, name)


def _widths(
    settings: JobSettings, roles: Mapping[str, RoleProvider], objects: Mapping[str, Any]
) -> Iterator[str]:
    """A backend says widths of wide columns that some role gives, and none is negative.

    The column may be another role's, since a backend may serve several roles. A width of 0 says
    that the column is not given.
    """
    known = {column.name: column for role in roles.values() for column in role.column_specs}
    for name in settings.roles:
        for column, k in traits_of(objects.get(f"roles.{name}")).column_widths.items():
            if column not in known or not known[column].wide or k < 0:
                yield (
                    f"roles.{name}.config: says that column {column!r} has {k} numbers for each "
                    "action, and no installed role gives such a column; ask its author."
                )


def _token_logprobs(objective: Any, provided: Mapping[str, ChosenProvider]) -> Iterator[str]:
    """A trainer that does not compute log-probs of other tokens is not asked for them."""
    policy = provided.get(f"roles.{POLICY}")
    needed = sorted(name for name in traits_of(objective).requires if name.startswith(LOGP_OF))
    if not needed or policy is None or "logprobs.tokens" in policy.spec.capabilities:
        return
    yield (
        f"objective: requires {needed[0]!r}, log-probs of other tokens than the actions, and "
        f"{policy.reference}, which roles.{POLICY} uses, does not compute them; take a trainer "
        "with the capability logprobs.tokens, such as torch, or an objective that needs none."
    )


def _routing(provided: Mapping[str, ChosenProvider], objects: Mapping[str, Any]) -> Iterator[str]:
    """A trainer that needs the experts by which records were sampled has a generator of them."""
    rollout = provided.get(f"roles.{ROLLOUT}")
    if rollout is None or not traits_of(objects.get(f"roles.{POLICY}")).needs_routing:
        return
    policy = f"{provided[f'roles.{POLICY}'].reference}, which roles.{POLICY} uses"
    if "routing" not in rollout.spec.capabilities:
        yield (
            f"roles.{ROLLOUT}.use: {rollout.reference} does not say which experts computed a "
            f"token, and {policy}, is to replay them; take a generator with the capability "
            "routing, such as torch, or set roles.policy.config not to need them."
        )
    elif not traits_of(objects.get(f"roles.{ROLLOUT}")).gives_routing:
        yield (
            f"roles.{ROLLOUT}.config: under these settings {rollout.reference} does not say which "
            f"experts computed a token, and {policy}, is to replay them; have it say so."
        )


def _objectives(settings: JobSettings, provided: Mapping[str, ChosenProvider]) -> dict[str, str]:
    """Returns config path -> the role that trains the objective that is chosen there."""
    paths = {"objective": POLICY} if "objective" in provided else {}
    for name in settings.roles:
        path = f"roles.{name}.objective"
        if path in provided:
            paths[path] = name
    return paths


def _level(provided: Mapping[str, ChosenProvider]) -> str:
    """Returns the level of the job's advantage; "record" without one."""
    advantage = provided.get("advantage")
    return getattr(advantage.spec, "level", "record") if advantage else "record"


def _learners(
    settings: JobSettings,
    provided: Mapping[str, ChosenProvider],
    objects: Mapping[str, Any],
    roles: Mapping[str, RoleProvider],
) -> Iterator[str]:
    """A trainer besides the policy gives columns that something requires, and knows what it trains.

    The keys of such a role mean nothing to others.
    """
    required = traits_of(objects.get("advantage")).requires
    for path, role in _objectives(settings, provided).items():
        # What a role requires of itself alone is of no use to anybody.
        own = roles[role].column_specs if role in roles else ()
        required |= traits_of(objects.get(path)).requires - {column.name for column in own}
    for name, node in settings.roles.items():
        path = f"roles.{name}"
        if name != POLICY and provided[path].kind == "trainer":
            yield from _learner(name, provided, roles[name], required)
            if node.head_start and _level(provided) != "action":
                yield (
                    f"{path}.head_start: needs an advantage that is computed for each action, such "
                    "as algorithms/gae; leave it out."
                )
            continue
        if node.objective is not None:
            yield f"{path}.objective: only a trainer besides the policy has one; leave it out."
        for key, default in (("minibatches", 1), ("epochs", 1), ("head_start", 0)):
            if getattr(node, key) != default:
                hint = f"; set controller.config.{key}" if name == POLICY and default else ""
                yield f"{path}.{key}: only a trainer besides the policy has it{hint}."


def _learner(
    name: str, provided: Mapping[str, ChosenProvider], role: RoleProvider, required: frozenset[str]
) -> Iterator[str]:
    """A trainer besides the policy has an objective and, where its role gives columns, a use.

    required: columns that the advantage requires, or the objective of another role.
    """
    path = f"roles.{name}"
    if f"{path}.objective" not in provided:
        yield f"{path}.objective: nothing says what this role trains; set objective.use."
    names = [column.name for column in role.column_specs]
    if not names:
        return
    if "annotate" not in provided[path].spec.capabilities:
        yield (
            f"{path}.use: {provided[path].reference} gives no columns, and this role must give "
            f"{', '.join(names)}; take a trainer with the capability annotate, such as torch."
        )
    if not required & frozenset(names):
        yield (
            f"{path}: nothing requires what it gives ({', '.join(names)}); choose an "
            "advantage that does, such as algorithms/gae, or leave the role out."
        )


def _value_heads(
    settings: JobSettings, provided: Mapping[str, ChosenProvider], objects: Mapping[str, Any]
) -> Iterator[str]:
    """An objective of values is trained by a trainer whose model can have a value head."""
    for path, role in _objectives(settings, provided).items():
        item = provided.get(f"roles.{role}")
        if item is None or "values" not in traits_of(objects.get(path)).requires:
            continue
        if "values" not in item.spec.capabilities:
            yield (
                f"roles.{role}.use: {item.reference} has no value head, which {path} "
                f"({provided[path].reference}) trains; take a trainer with the capability values, "
                "such as torch."
            )


def _own_columns(
    settings: JobSettings,
    objects: Mapping[str, Any],
    columns: Mapping[str, Sequence[ColumnSpec]],
) -> Iterator[str]:
    """Only the policy's trainer computes columns for an advantage of its own.

    The advantage then requires at least one of them, and no role gives any of them as well.

    columns: role of this run -> what it gives.
    """
    giver_of = {column.name: name for name, given in columns.items() for column in given}
    required = traits_of(objects.get("advantage")).requires
    for role in settings.roles:
        own = traits_of(objects.get(f"roles.{role}")).own_columns
        names = ", ".join(sorted(own))
        if own and role != POLICY:
            yield (
                f"roles.{role}.config: computes {names} for an advantage of its own, and only "
                f"roles.{POLICY} has one; leave that out."
            )
        elif own and not own & required:
            yield (
                f"roles.{role}.config: computes {names}, and the advantage requires none of them; "
                "choose one that does, such as algorithms/gae, or leave that out."
            )
        for name in sorted(own & giver_of.keys() if role == POLICY else ()):
            yield (
                f"roles.{role}.config: computes {name!r}, as roles.{giver_of[name]} does; leave "
                "one of them out."
            )


def _read_columns(path: str, provided: Mapping[str, ChosenProvider]) -> Sequence[str]:
    """Returns the columns that the rollout's records have beside those of every generator."""
    rollout = provided.get(f"roles.{ROLLOUT}")
    if rollout is None or path == "advantage":
        return ()
    columns: Sequence[str] = getattr(rollout.spec, "columns", ())
    return columns


def _requirements(
    path: str,
    objects: Mapping[str, Any],
    settings: JobSettings,
    provided: Mapping[str, ChosenProvider],
    columns: Mapping[str, Sequence[ColumnSpec]],
    roles: Mapping[str, RoleProvider],
) -> Iterator[str]:
    """The columns and scalars that ``requires()`` of the settings names come from somewhere.

    path: "advantage", or where an objective is chosen.
    columns: role of this run -> what it gives.
    """
    if _lacks_value_head(path, objects, settings, provided):
        return  # ``_value_heads`` says so
    givers = _possible_givers(path, provided, columns, roles)
    given = {column.name for role in givers for column in columns.get(role.name, ())}
    supplied = _from_trainer(path, objects, provided) | given | {*_read_columns(path, provided)}
    required = {ids_column(name) or name for name in traits_of(objects.get(path)).requires}
    giver_of = {column.name: role.name for role in givers for column in role.column_specs}
    for name in sorted(required - supplied):
        if name in giver_of:
            yield _not_given(path, name, giver_of[name], columns)
        else:
            yield _not_supplied(path, name, supplied, _level(provided))


def _lacks_value_head(
    path: str,
    objects: Mapping[str, Any],
    settings: JobSettings,
    provided: Mapping[str, ChosenProvider],
) -> bool:
    """Whether an objective of values is trained by a trainer without a value head."""
    if path == "advantage" or "values" not in traits_of(objects.get(path)).requires:
        return False
    trainer = provided.get(f"roles.{_objectives(settings, provided)[path]}")
    return trainer is not None and "values" not in trainer.spec.capabilities


def _from_trainer(
    path: str, objects: Mapping[str, Any], provided: Mapping[str, ChosenProvider]
) -> frozenset[str]:
    """Returns what the trainer itself supplies to what is chosen at a path."""
    level = _level(provided)
    if path == "advantage":
        own = traits_of(objects.get(f"roles.{POLICY}")).own_columns
        return FROM_TRAINER if level == "record" else own
    if "values" in traits_of(objects.get(path)).requires:
        return _FROM_VALUES[level] | {"group", "sample"}
    return FROM_TRAINER


def _possible_givers(
    path: str,
    provided: Mapping[str, ChosenProvider],
    columns: Mapping[str, Sequence[ColumnSpec]],
    roles: Mapping[str, RoleProvider],
) -> list[RoleProvider]:
    """Returns the installed roles that can give columns to what is chosen at a path.

    Those of this run come last: where several could give one name, the last one is meant.
    """
    # Roles give per-action columns; an advantage of level "record" gets numbers of records.
    if path == "advantage" and _level(provided) != "action":
        return []
    givers = [role for role in roles.values() if role.columns]
    return sorted(givers, key=lambda role: role.name in columns)


def _not_given(path: str, name: str, role: str, columns: Mapping[str, Sequence[ColumnSpec]]) -> str:
    """Says how the role that can give a column is made to give it in this run."""
    if role in columns:
        return (
            f"{path}: requires {name!r}, which roles.{role} gives only where "
            f"roles.{role}.config says of how many numbers; set that."
        )
    return f"{path}: requires {name!r}, which roles.{role} gives; add that role."


def _not_supplied(path: str, name: str, supplied: Set[str], level: str) -> str:
    """Says that nothing installed gives a name, and which names are known."""
    known = ", ".join(sorted(supplied)) or "none"
    no_role = ": no installed role gives it"
    if path == "advantage":
        no_role = ": no loaded plugin has a role that gives it" if level == "action" else ""
    return f"{path}: requires {name!r}, which nothing supplies{no_role} (known: {known})."
