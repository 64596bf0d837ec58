"""What must hold between the values of a resolved configuration; all problems are printed
together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gcore_core.config import schema, yaml_source
from gcore_core.config.interpreters import Environment, differences, open_environment, unmet_needs
from gcore_core.config.plugins import Plugins, Provided
from gcore_core.contract.errors import ConfigError, GcoreError, did_you_mean
from gcore_core.contract.factories import replica_slots

#: What any trainer can supply to an objective or advantage that requires it.
FROM_TRAINER = frozenset(
    {"old_logp", "ref_logp", "entropy", "rollout_logp", "kl_k1", "kl_k2", "kl_k3"}
)
#: What a critic supplies.
FROM_CRITIC = frozenset({"values", "returns"})
_COMMIT = re.compile(r"[0-9a-f]{40}")


def no_missing(config: Mapping[str, Any], provided: Mapping[str, Provided]) -> None:
    """Raises where a plugin's mandatory setting was not given."""
    missing = sorted(
        key for key, value in yaml_source.flat(config).items() if value == schema.MISSING
    )
    if not missing:
        return
    owners = sorted(
        f"{item.reference} ({item.owner})"
        for path, item in provided.items()
        if any(key.startswith(f"{path}.config.") for key in missing)
    )
    raise ConfigError(
        "a value is missing." if len(missing) == 1 else f"missing too: {', '.join(missing[1:])}.",
        where=missing[0],
        why=f"asked for by {', '.join(owners)}" if owners else "",
        missing=missing,
    )


def run(
    config: Mapping[str, Any],
    provided: Mapping[str, Provided],
    objects: Mapping[str, Any],
    plugins: Plugins,
    file: Path,
) -> None:
    """Raises one ConfigError with every problem; ``objects`` are the providers' config objects by
    path.
    """
    problems = [
        *_ranges(config),
        *_follows(config),
        *_workers(config),
        *_cluster(config),
        *_judges(config, provided),
    ]
    for path in ("advantage", "objective"):
        problems += _requirements(path, objects.get(path), config)
    shown = {path: ["rollout", "policy"] for path in ("data", "evaluation.data")}
    shown |= {f"rewards.{name}": [reward["role"]] for name, reward in config["rewards"].items()}
    for path, roles in shown.items():
        problems += _images(path, objects.get(path), provided, roles)
    problems += _replicas(config, objects)
    problems += _remote_code(config)
    problems += plugins.check(config)
    _raise(problems, file)


def interpreters(config: Mapping[str, Any], provided: Mapping[str, Provided], file: Path) -> None:
    """Raises when workers could not start: an interpreter, a plugin or an engine is missing, or is
    another version.
    """
    found: dict[str, GcoreError] = {}
    built_in_a_role: set[str] = set()
    for role, node in config["roles"].items():
        try:
            environment = open_environment(node["python"], where=f"roles.{role}.python")
        except ConfigError as error:
            found[str(error)] = error
            continue
        trains = provided[f"roles.{role}"].kind == "trainer"
        paths = [f"roles.{role}", *(["objective"] if trains else ["data", "evaluation.data"])]
        chosen = {path: provided[path] for path in paths if path in provided}
        built_in_a_role |= chosen.keys()
        versions = {item.distribution: item.version for item in chosen.values() if item.installed}
        wrong = list(differences(environment, versions, where=f"roles.{role}.python")) or _unmet(
            environment, chosen
        )
        found |= {str(error): error for error in wrong}
    rest = {path: item for path, item in provided.items() if path not in built_in_a_role}
    found |= {str(error): error for error in _unmet(open_environment(None, where=""), rest)}
    if len(found) == 1:
        raise next(iter(found.values()))
    _raise([" ".join(filter(None, (f"{e.where}: {e.what}", e.todo))) for e in found.values()], file)


def _unmet(environment: Environment, chosen: Mapping[str, Provided]) -> list[GcoreError]:
    """What the chosen providers need there, in vain."""
    return [
        error
        for path, item in chosen.items()
        for error in unmet_needs(environment, item.owner, item.spec.needs, where=f"{path}.use")
    ]


def _raise(problems: list[str], file: Path) -> None:
    """One ConfigError for all of them, if there are any."""
    if len(problems) == 1:
        raise ConfigError(problems[0], problems=problems)
    if problems:
        more = f"and {len(problems) - 4} more: g-core check {file}"
        shown = problems if len(problems) <= 5 else [*problems[:4], more]
        raise ConfigError(
            f"the configuration has {len(problems)} problems.",
            where=str(file),
            why="\n".join(shown),
            problems=problems,
        )


def _ranges(config: Mapping[str, Any]) -> Iterator[str]:
    for pattern, least in schema.AT_LEAST.items():
        for path, value in _matching(config, pattern):
            if value < least:
                yield f"{path}: must be at least {least}, not {value}."
    for pattern in schema.POSITIVE:
        for path, value in _matching(config, pattern):
            if value is not None and not value > 0:
                yield f"{path}: must be greater than 0, not {value}."
    for pattern, words in schema.ONE_OF.items():
        for path, value in _matching(config, pattern):
            if value not in words:
                guess = did_you_mean(str(value), list(words))
                yield f"{path}: must be one of {', '.join(words)}{guess}, not {value!r}."


def _matching(tree: Any, pattern: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of every value that a pattern with ``*`` names."""
    head, _, rest = pattern.partition(".")
    for key in tree if head == "*" else [head]:
        if rest:
            yield from _matching(tree[key], rest, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", tree[key]


def _cluster(config: Mapping[str, Any]) -> Iterator[str]:
    devices = config["cluster"]["devices"]
    if devices != "auto" and not (isinstance(devices, int) and devices >= 1):
        yield f"cluster.devices: must be 'auto' or a number of devices, not {devices!r}."


def _follows(config: Mapping[str, Any]) -> Iterator[str]:
    for name, role in config["roles"].items():
        followed = role["follows"]
        if followed is not None and (followed not in config["roles"] or followed == name):
            others = ", ".join(other for other in config["roles"] if other != name)
            yield f"roles.{name}.follows: {followed!r} is no other role of this run ({others})."


def _replicas(config: Mapping[str, Any], objects: Mapping[str, Any]) -> Iterator[str]:
    for name, role in config["roles"].items():
        size = replica_slots(objects.get(f"roles.{name}"))
        if role["slots"] % size:
            yield (
                f"roles.{name}.slots: {role['slots']} do not hold whole replicas, which take "
                f"{size} slots each."
            )


def _workers(config: Mapping[str, Any]) -> Iterator[str]:
    """Processes are named by role or scorer worker, so these must differ; rewards of one worker are
    as many.
    """
    taken = {*config["roles"], "controller", "supervisor"}
    counts: dict[str, int] = {}
    for name, reward in config["rewards"].items():
        worker = reward["worker"]
        if reward["workers"] != counts.setdefault(worker, reward["workers"]):
            yield (
                f"rewards.{name}.workers: rewards of one worker ({worker!r}) have as many; "
                "give it another worker."
            )
        if worker in taken or not schema.NAME.fullmatch(worker):
            yield (
                f"rewards.{name}.worker: {worker!r} is no free name (letters, digits, '_', "
                "'-'; not a role)."
            )


def _judges(config: Mapping[str, Any], provided: Mapping[str, Provided]) -> Iterator[str]:
    """A reward that asks names a role that answers, and no other reward does; a role that answers
    is asked.
    """
    answer = {name for name in config["roles"] if provided[f"roles.{name}"].kind == "generator"}
    asked = set()
    for name, reward in config["rewards"].items():
        spec, role = provided[f"rewards.{name}"].spec, reward["role"]
        asked.add(role)
        if role is None and getattr(spec, "asks", False):
            yield (
                f"rewards.{name}.role: {reward['use']} asks a model; name the role that runs "
                "it, such as role: judge."
            )
        elif role is not None and not getattr(spec, "asks", False):
            yield f"rewards.{name}.role: {reward['use']} asks no model; leave it out."
        elif role is not None and role not in answer:
            guess = did_you_mean(role, sorted(answer))
            yield (
                f"rewards.{name}.role: {role!r} is no generator of this run{guess}; there are "
                f"{', '.join(answer)}."
            )
    for name in sorted(answer - asked - {"rollout"}):
        yield (
            f"roles.{name}: no reward asks it; set rewards.<name>.role: {name}, or leave the "
            "role out."
        )


def _remote_code(config: Mapping[str, Any]) -> Iterator[str]:
    """A setting ``trust_remote_code`` needs code that stays as it was read: a directory, or a
    commit of the hub.
    """
    roles = config["roles"]
    for section, nodes in (("roles", roles), ("rewards", config["rewards"])):
        for name, node in nodes.items():
            if not node["config"].get("trust_remote_code"):
                continue
            model = (
                node.get("model")
                or roles.get(node.get("follows"), {}).get("model")
                or node["config"]
            )
            pinned = _COMMIT.fullmatch(str(model.get("revision")))
            if not pinned and "make" not in model and not Path(str(model.get("path"))).is_dir():
                where = "give path a local directory"
                if section == "roles":
                    where = (
                        "set model.revision to the commit (40 hex digits) whose code you have "
                        "read, or "
                    ) + where
                yield (
                    f"{section}.{name}.config.trust_remote_code: what it runs could change; "
                    f"{where}."
                )


def _images(
    path: str, settings: Any, provided: Mapping[str, Provided], roles: Sequence[str]
) -> Iterator[str]:
    """A dataset whose settings say by ``shows_images()`` that prompts have images needs a policy
    that takes them, and a reward that shows images a role that does.
    """
    shows_images = getattr(settings, "shows_images", None)
    if not callable(shows_images) or not shows_images():
        return
    for role in (f"roles.{name}" for name in roles):
        if role in provided and "images" not in provided[role].spec.capabilities:
            use = provided[role].reference
            yield (
                f"{path}: its prompts have images, and {use}, which {role} uses, takes no "
                "images; take one that does."
            )


def _requirements(path: str, settings: Any, config: Mapping[str, Any]) -> Iterator[str]:
    """The columns and scalars that the settings' ``requires()`` names must come from somewhere."""
    requires = getattr(settings, "requires", None)
    if not callable(requires):
        return
    for name in sorted(requires()):
        if name in FROM_CRITIC and "critic" not in config["roles"]:
            yield f"{path}: requires {name!r}, which needs a role 'critic'; add roles.critic."
        elif name not in FROM_TRAINER | FROM_CRITIC:
            known = ", ".join(sorted(FROM_TRAINER | FROM_CRITIC))
            yield f"{path}: requires {name!r}, which nothing supplies (known: {known})."
