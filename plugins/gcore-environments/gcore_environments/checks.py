"""Looks at a job's environment before it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gcore_core.contract.errors import did_you_mean
from gcore_core.contract.preflight import ResolvedJob
from gcore_core.contract.traits import traits_of
from gcore_environments import sandbox
from gcore_environments.settings import PlayConfig

ROLLOUT = "rollout"


def problems(plan: Mapping[str, Any], job: ResolvedJob) -> Iterator[str]:
    """Yields problems with the section ``environment`` and with rewards that read it."""
    config = job.objects.get("environment")
    yield from _rewards(job)
    if not isinstance(config, PlayConfig):
        return
    yield from _patience(job, config)
    yield from _abort(job)


def host_problems(plan: Mapping[str, Any], here: bool) -> Iterator[str]:
    """Yields why processes of the job's environment cannot be started, or confined, here.

    here: whether they start on this machine.
    """
    section = plan["environment"]
    if not here or not section or section["use"].split("/")[0] != "environments":
        return
    config = section["config"] or {}
    yield from _file(str(config.get("environment", "")))
    if why := sandbox.problem(config.get("sandbox", "none"), config.get("python", "")):
        yield f"environment.config: {why}."


def _rewards(job: ResolvedJob) -> Iterator[str]:
    """A reward of the environment needs one."""
    if "environment" in job.provided:
        return
    for path, provider in job.provided.items():
        if path.startswith("rewards.") and provider.reference.split("/")[0] == "environments":
            yield (
                f"{path}.use: {provider.reference} reads what an environment gave, and this job "
                "has none; add the section environment."
            )


def _patience(job: ResolvedJob, config: PlayConfig) -> Iterator[str]:
    """A generator that waits for one observation must not count as hung."""
    patience_s = job.settings.run.patience_s
    if patience_s <= config.turn_s:
        yield (
            f"environment.config.turn_s: an environment may take {config.turn_s:g} s for a turn, "
            f"and a generator counts as hung after {patience_s:g} s without a sign; set "
            f"run.patience_s above {config.turn_s:g}."
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
