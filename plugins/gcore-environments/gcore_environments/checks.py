"""Looks at a job's environment before it runs."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gcore_core.contract.errors import ConfigError, did_you_mean
from gcore_core.contract.preflight import ResolvedJob
from gcore_core.contract.traits import traits_of
from gcore_environments import sandbox
from gcore_environments.adapter_settings import TextArenaConfig
from gcore_environments.parsers import choose_parser
from gcore_environments.settings import EnvironmentRewardConfig, PlayConfig

ROLLOUT = "rollout"


def problems(plan: Mapping[str, Any], job: ResolvedJob) -> Iterator[str]:
    """Yields problems with the section ``environment`` and with rewards that read it."""
    config = job.objects.get("environment")
    yield from _rewards(job)
    yield from _kept_once(job)
    if not isinstance(config, PlayConfig):
        return
    yield from _parser(config)
    yield from _patience(job, config)
    yield from _players(job, config)
    yield from _abort(job)


def host_problems(plan: Mapping[str, Any], here: bool) -> Iterator[str]:
    """Yields why processes of the job's environment cannot be started, or confined, here.

    here: whether they start on this machine.
    """
    section = plan.get("environment")
    if not here or not section or section["use"].split("/")[0] != "environments":
        return
    config = section["config"] or {}
    environment = str(config.get("environment", ""))
    yield from _file(environment)
    yield from _class(environment, config.get("sandbox", "none"))
    if why := sandbox.problem(config.get("sandbox", "none"), config.get("python", "")):
        yield f"environment.config: {why}."


def _rewards(job: ResolvedJob) -> Iterator[str]:
    """A reward of the environment needs one."""
    if "environment" in job.provided:
        return
    for path, provider in job.provided.items():
        if isinstance(job.objects.get(path), EnvironmentRewardConfig):
            yield (
                f"{path}.use: {provider.reference} reads what an environment gave, and this job "
                "has none; add the section environment."
            )


def _kept_once(job: ResolvedJob) -> Iterator[str]:
    """One reward keeps episodes: they all write into the same folder."""
    first, *others = [
        path
        for path, config in job.objects.items()
        if isinstance(config, EnvironmentRewardConfig) and config.keep
    ] or [""]
    for path in others:
        yield (
            f"{path}.config.keep: {first} keeps each episode already, and it would be there twice; "
            "leave it out here."
        )


def _parser(config: PlayConfig) -> Iterator[str]:
    """The parser of tool calls is one that there is."""
    try:
        choose_parser(config.parser)
    except ConfigError as error:
        yield f"environment.config.parser: {error.what} {error.todo}"


def _patience(job: ResolvedJob, config: PlayConfig) -> Iterator[str]:
    """A generator that waits for one observation must not count as hung."""
    patience_s = job.settings.run.patience_s
    if patience_s <= config.turn_s:
        yield (
            f"environment.config.turn_s: an environment may take {config.turn_s:g} s for a turn, "
            f"and a generator counts as hung after {patience_s:g} s without a sign; set "
            f"run.patience_s above {config.turn_s:g}."
        )


def _players(job: ResolvedJob, config: PlayConfig) -> Iterator[str]:
    """A role speaks for a player that the game has, where that is known, and not for all."""
    if "" in job.settings.speakers:
        yield (
            "environment.roles: the player without a name is the policy, so no role speaks for it; "
            "name the player as the environment does."
        )
        return
    if not isinstance(config, TextArenaConfig) or not job.settings.speakers:
        return
    names = [str(number) for number in range(config.players)] if config.players > 1 else [""]
    told = f"are {', '.join(names)}" if config.players > 1 else "have no names: it is for one"
    for player in job.settings.speakers:
        if player not in names:
            yield (
                f"environment.roles.{player}: the players of this game {told}; name one of them, "
                "or set environment.config.players."
            )
    if not set(names) - job.settings.speakers.keys():
        yield (
            "environment.roles: roles speak for all players of this game, and the policy for none; "
            "leave one of them out."
        )


def _abort(job: ResolvedJob) -> Iterator[str]:
    """Turns of an episode that has ended are taken back from the engine."""
    rollout = job.provided.get(f"roles.{ROLLOUT}")
    if rollout is not None and not traits_of(job.objects.get(f"roles.{ROLLOUT}")).abort:
        yield (
            f"roles.{ROLLOUT}.use: {rollout.reference} cannot end a turn whose episode is over; "
            "take a generator with the trait abort, such as torch, vllm or sglang."
        )


def _file(environment: str) -> Iterator[str]:
    """The file of the class is there."""
    place = Path(environment.rpartition(":")[0])
    if place.suffix != ".py" or place.is_file():
        return
    folder = place.parent
    names = [file.name for file in folder.glob("*.py")] if folder.is_dir() else []
    yield (
        f"environment.config.environment: no such file: {place}"
        f"{did_you_mean(place.name, names)}; a path is relative to the job file."
    )


def _class(environment: str, confined_by: str) -> Iterator[str]:
    """The class stands in its file, and can ask the policy where it is a program.

    The file is read and not run. What it may do to have the class by other means is not judged.
    """
    file, _, name = environment.rpartition(":")
    try:
        tree = ast.parse(Path(file).read_bytes()) if file.endswith(".py") else None
    except (OSError, SyntaxError, ValueError):
        return
    if tree is None or any(_binds_unknown(node) for node in ast.walk(tree)):
        return
    if name not in {bound for node in ast.walk(tree) for bound in _bound(node)}:
        names = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
        yield (
            f"environment.config.environment: {file} has no class {name}"
            f"{did_you_mean(name, names)}; classes there: {', '.join(names) or 'none'}."
        )
    if confined_by == "docker" and any(_is_program(node, name) for node in tree.body):
        yield (
            f"environment.config.sandbox: {name} is a program, which asks the policy over the "
            "network, and a container has none; set sandbox to confine."
        )


def _binds_unknown(node: ast.AST) -> bool:
    is_star = isinstance(node, ast.ImportFrom) and any(one.name == "*" for one in node.names)
    return is_star or (isinstance(node, ast.Name) and node.id in ("globals", "exec", "setattr"))


def _bound(node: ast.AST) -> list[str]:
    """Returns names that a part of a file gives to something."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [one.asname or one.name for one in node.names]
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return [node.id]
    return []


def _is_program(node: ast.AST, name: str) -> bool:
    """Whether it is the class of this name, owns its loop, and inherits nothing."""
    if not isinstance(node, ast.ClassDef) or node.name != name or node.bases:
        return False
    methods = {
        one.name for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    return "run" in methods and "reset" not in methods
