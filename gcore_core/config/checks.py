"""Checks what must hold between the values of a resolved configuration.

The core checks what belongs to every job. What a feature of a plugin needs of the others is said by
that plugin (``gcore_check``).

    each value by itself        _limits, _run_name, _cluster, _models, _remote_code
    names of processes          _process_names, _workers_of_rewards
    slots and replicas          _replicas, _owned_replicas
    roles name each other       _follows, _learners, _judges
    rewards                     _rewards, _named_rewards, _asked_alone
    the step program calls it   _uncalled
    who can do what             _sleeping_trainers, _images, _routing, _environment
    columns have a giver        column_checks
    interpreters have it all    interpreters

All problems are reported in one error. A function that returns ``Iterator[str]`` yields one
problem at a time, each beginning with its config path; its docstring says what must hold.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gcore_core.config import column_checks, schema, yaml_source
from gcore_core.config.column_checks import is_of_actions
from gcore_core.config.interpreters import Interpreter, differences, open_interpreter, unmet_needs
from gcore_core.config.plugins import Provided
from gcore_core.contract.errors import ConfigError, GcoreError, did_you_mean
from gcore_core.contract.job_settings import (
    MISSING,
    POLICY,
    ROLLOUT,
    JobSettings,
    RewardSettings,
    RoleSettings,
)
from gcore_core.contract.preflight import ResolvedJob
from gcore_core.contract.providers import PARTS, ControllerProvider, RewardProvider, RoleProvider
from gcore_core.contract.traits import traits_of

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


def problems_of(job: ResolvedJob, roles: Mapping[str, RoleProvider]) -> list[str]:
    """Returns the problems that the core finds in a job; see the module. Plugins find others.

    roles: name -> description of every role that a loaded plugin offers.
    """
    settings = job.settings
    return [
        *_limits(settings),
        *_run_name(settings),
        *_cluster(settings),
        *_process_names(settings),
        *_workers_of_rewards(settings),
        *_models(settings),
        *_remote_code(settings),
        *_replicas(job),
        *_owned_replicas(job),
        *_follows(job),
        *_learners(job),
        *_judges(job),
        *_named_rewards(job),
        *_asked_alone(job),
        *_rewards(job),
        *_uncalled(job),
        *_sleeping_trainers(job),
        *_images(job),
        *_routing(job),
        *_environment(job),
        *column_checks.problems_of(job, roles),
    ]


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
    """Returns the config paths of what a role's workers build besides their backend.

    The role's interpreter must have the plugins that are chosen there. ``gcore_core.run.jobs``
    hands just these to the workers.
    """
    kind = provided[f"roles.{role}"].kind
    if kind == "generator":
        return ["data", "evaluation.data", *(["environment"] if role == ROLLOUT else [])]
    if kind != "trainer":
        return []
    own = f"roles.{role}.objective"
    paths = [own if own in provided else "objective"]
    if is_of_actions(provided):
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


def _process_names(settings: JobSettings) -> Iterator[str]:
    """No role has a name of the core's own processes."""
    for name in sorted(settings.roles.keys() & _OWN_PROCESSES):
        yield f"roles.{name}: processes of the core are named so; give the role another name."


def _workers_of_rewards(settings: JobSettings) -> Iterator[str]:
    """A worker has a name that no other process has, and its rewards agree on its processes."""
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


def _models(settings: JobSettings) -> Iterator[str]:
    """A model is made or lies somewhere, not both: the path would be left unread."""
    for name, role in settings.roles.items():
        if "make" in role.model and role.model.get("path"):
            yield (
                f"roles.{name}.model: has both path ({role.model['path']}) and make; leave one of "
                "them out. The one that the command line names wins over the file's."
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


def _replicas(job: ResolvedJob) -> Iterator[str]:
    """The slots of a role hold a whole number of replicas."""
    for name, role in job.settings.roles.items():
        size = traits_of(job.objects.get(f"roles.{name}")).replica_slots
        if role.slots % size:
            yield (
                f"roles.{name}.slots: {role.slots} slots cannot be divided into replicas of "
                f"{size} slots each."
            )


def _owned_replicas(job: ResolvedJob) -> Iterator[str]:
    """Every controller has a replica to own, in a run that lets them own any."""
    controller = job.settings.controller
    if controller.replicas != "owned":
        return
    if job.settings.run.deterministic:
        yield (
            'controller.replicas: "owned" cannot be had with run.deterministic, in which every '
            'replica hears every controller; choose "shared".'
        )
    role = job.settings.roles.get(ROLLOUT)
    size = traits_of(job.objects.get(f"roles.{ROLLOUT}")).replica_slots
    count = role.slots // size if role else 0
    if role and count < controller.shards:
        yield (
            f'controller.replicas: with "owned" each of {controller.shards} controllers '
            f"needs a replica of its own, and roles.{ROLLOUT} has {count}; "
            f"set controller.shards to at most {count}, raise roles.{ROLLOUT}.slots, "
            'or choose "shared".'
        )


def _follows(job: ResolvedJob) -> Iterator[str]:
    """A role follows another role of this run, which is a trainer, or none. An annotator follows
    none, nor does a generator that answers rewards or episodes.
    """
    for name, role in job.settings.roles.items():
        followed = role.follows
        if followed is not None and (followed not in job.settings.roles or followed == name):
            names = ", ".join(other for other in job.settings.roles if other != name) or "none"
            yield (
                f"roles.{name}.follows: this run has no other role {followed!r}; "
                f"other roles: {names}."
            )
        elif followed is not None and job.provided[f"roles.{followed}"].kind != "trainer":
            yield (
                f"roles.{name}.follows: nobody trains roles.{followed}, so it pushes no weights; "
                "name a role that has a trainer, or leave it out and give this role a model."
            )
        if followed and job.provided[f"roles.{name}"].kind == "annotator":
            yield (
                f"roles.{name}.follows: no weights are pushed to an annotator; leave it out, and "
                "give it a model."
            )
        elif followed and name != ROLLOUT and job.provided[f"roles.{name}"].kind == "generator":
            yield (
                f"roles.{name}.follows: weights are pushed to {ROLLOUT} alone, so this role stays "
                "what it is at the start; leave it out, and give it a model."
            )


def _learners(job: ResolvedJob) -> Iterator[str]:
    """A trainer besides the policy has an objective. The keys of such a role mean nothing to
    others.
    """
    for name, node in job.settings.roles.items():
        path = f"roles.{name}"
        if name != POLICY and job.provided[path].kind == "trainer":
            if f"{path}.objective" not in job.provided:
                yield f"{path}.objective: nothing says what this role trains; set objective.use."
            continue
        if node.objective is not None:
            yield f"{path}.objective: only a trainer besides the policy has one; leave it out."
        for key, default in (("minibatches", 1), ("epochs", 1), ("head_start", 0)):
            if getattr(node, key) != default:
                hint = f"; set controller.config.{key}" if name == POLICY and default else ""
                yield f"{path}.{key}: only a trainer besides the policy has it{hint}."


def _judges(job: ResolvedJob) -> Iterator[str]:
    """Rewards that ask a model and the generators that answer them fit together.

    A reward that asks a model names a generator, and no other reward names a role. A role that
    speaks for a player is a generator other than the rollout. Every generator but the rollout is
    named by a reward or speaks for a player.
    """
    answer = {
        name for name in job.settings.roles if job.provided[f"roles.{name}"].kind == "generator"
    }
    judges = set[str | None](job.settings.speakers.values())
    for name, reward in job.settings.rewards.items():
        asks = traits_of(job.objects.get(f"rewards.{name}")).asks
        role = reward.role
        judges.add(role)
        if role is None and asks:
            yield (
                f"rewards.{name}.role: {reward.use} asks a model; name the role that runs "
                "it, such as role: judge."
            )
        elif role is not None and not asks:
            yield f"rewards.{name}.role: {reward.use} asks no model; leave it out."
        elif role is not None and role not in answer:
            guess = did_you_mean(role, sorted(answer))
            yield (
                f"rewards.{name}.role: {role!r} is no generator of this run{guess}; there are "
                f"{', '.join(sorted(answer))}."
            )
    for player, role in job.settings.speakers.items():
        others = sorted(answer - {ROLLOUT})
        if role == ROLLOUT:
            yield (
                f"environment.roles.{player}: {ROLLOUT} is the policy, which speaks for every "
                "player that is not named here; leave the player out."
            )
        elif role not in answer:
            yield (
                f"environment.roles.{player}: {role!r} is no generator of this run"
                f"{did_you_mean(role, others)}; besides the policy's it has: "
                f"{', '.join(others) or 'none'}. Add roles.{role} with a generator, or name one "
                "that there is."
            )
    for name in sorted(answer - judges - {ROLLOUT}):
        yield (
            f"roles.{name}: no reward asks it; set rewards.<name>.role: {name}, have it speak for "
            f"a player (environment.roles), or leave the role out."
        )


def _named_rewards(job: ResolvedJob) -> Iterator[str]:
    """A reward that an algorithm reads by name is one of the job's."""
    for path in ("filter", "advantage"):
        read = traits_of(job.objects.get(path)).reads_rewards
        for name in sorted(read - job.settings.rewards.keys()):
            present = ", ".join(sorted(job.settings.rewards)) or "none"
            yield (
                f"{path}: reads the reward {name!r}, which the job does not have (it has: "
                f"{present})."
            )


def _asked_alone(job: ResolvedJob) -> Iterator[str]:
    """Only a reward that is a plain function of one record is asked for a score alone.

    Of others that ask no model of the run, it is known when their worker has made them.
    """
    for name, reward in job.settings.rewards.items():
        spec = job.provided[f"rewards.{name}"].spec
        if not reward.alone_every or not isinstance(spec, RewardProvider):
            continue
        asks = traits_of(job.objects.get(f"rewards.{name}")).asks
        if spec.level == "group" or asks:
            sees = "asks a model" if asks else "sees the records of a prompt together"
            yield (
                f"rewards.{name}.alone_every: {reward.use} {sees}; only a plain function of one "
                "record is asked for a score alone. Leave it out."
            )


def _rewards(job: ResolvedJob) -> Iterator[str]:
    """A job has a reward, unless its step program or its advantage needs none."""
    controller = job.provided["controller"]
    parts = controller.spec.parts if isinstance(controller.spec, ControllerProvider) else PARTS
    advantage = job.provided.get("advantage")
    if job.settings.rewards or "rewards" not in parts or advantage is None:
        return
    if not traits_of(job.objects["advantage"]).works_without_rewards:
        yield (
            f"rewards: there is none, and advantage {advantage.reference} is computed from rewards "
            "under these settings; add rewards.<name>."
        )


def _uncalled(job: ResolvedJob) -> Iterator[str]:
    """The step program calls something on every role and on every reward."""
    controller = job.provided["controller"]
    calls = controller.spec.calls if isinstance(controller.spec, ControllerProvider) else {}
    never = f"controller {controller.reference} never calls this"
    for name in job.settings.roles:
        kind = job.provided[f"roles.{name}"].kind
        if not calls.get(kind):
            yield f"roles.{name}: {never} role (kind {kind!r}); leave it out."
    if not calls.get("scorer"):
        yield from (
            f"rewards.{name}: {never} reward; leave it out." for name in job.settings.rewards
        )


def _sleeping_trainers(job: ResolvedJob) -> Iterator[str]:
    """Trainers that are to sleep can."""
    if job.settings.placement.sleep_in_rollout != "always":
        return
    for name in job.settings.roles:
        role = job.provided[f"roles.{name}"]
        if role.kind == "trainer" and not traits_of(job.objects.get(f"roles.{name}")).sleeps:
            yield (
                f"placement.sleep_in_rollout: always, but trainer {role.reference}, which "
                f"roles.{name} uses, cannot sleep; set it to never, or take a trainer with the "
                "trait sleeps."
            )


def _images(job: ResolvedJob) -> Iterator[str]:
    """Roles that are shown images, by a dataset or a reward, can take them."""
    shown_to = {"data": [ROLLOUT, POLICY], "evaluation.data": [ROLLOUT, POLICY]}
    for name, reward in job.settings.rewards.items():
        shown_to[f"rewards.{name}"] = [reward.role] if reward.role else []
    for path, roles in shown_to.items():
        if not traits_of(job.objects.get(path)).shows_images:
            continue
        for role in (f"roles.{name}" for name in roles):
            item = job.provided.get(role)
            if item is not None and not traits_of(job.objects.get(role)).images:
                yield (
                    f"{path}: its prompts have images, and {item.reference}, which {role} uses, "
                    "takes no images; take one that does."
                )


def _routing(job: ResolvedJob) -> Iterator[str]:
    """A trainer that replays experts has a generator that says which computed each token."""
    policy, rollout = (job.provided.get(f"roles.{name}") for name in (POLICY, ROLLOUT))
    if policy is None or not traits_of(job.objects.get(f"roles.{POLICY}")).needs_routing:
        return
    if rollout is not None and not traits_of(job.objects.get(f"roles.{ROLLOUT}")).routing:
        yield (
            f"roles.{ROLLOUT}.use: {rollout.reference} does not say under these settings which "
            f"experts computed a token, and {policy.reference}, which roles.{POLICY} uses, is to "
            "replay them; take a generator with the trait routing, such as torch, or settings that "
            f"have it, or set roles.{POLICY}.config not to need them."
        )


def _environment(job: ResolvedJob) -> Iterator[str]:
    """A policy that acts in an environment has a generator that goes on behind given tokens."""
    environment = job.provided.get("environment")
    rollout = job.provided.get(f"roles.{ROLLOUT}")
    if environment is None:
        return
    if rollout is None:
        yield (
            f"environment: this job has no roles.{ROLLOUT}, so nobody acts in "
            f"{environment.reference}; add that role, or leave the section out."
        )
    elif not traits_of(job.objects.get(f"roles.{ROLLOUT}")).tokens:
        yield (
            f"roles.{ROLLOUT}.use: {rollout.reference} cannot go on behind given tokens under "
            f"these settings, as environment.use ({environment.reference}) has it do; take a "
            "generator with the trait tokens, such as torch, vllm or sglang."
        )
