"""Says what is no fault of a job with an environment, and may still not be what was meant."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gcore_core.contract.preflight import ResolvedJob
from gcore_core.contract.records import RunFacts, StepReport
from gcore_core.contract.run_files import read_metrics
from gcore_core.contract.traits import traits_of
from gcore_environments.advantages import TurnsConfig
from gcore_environments.settings import EnvironmentRewardConfig, PlayConfig

#: A reward that was 0 in so many steps from the first on is told of; in a shorter run, in all.
STEPS = 3


def notes(job: ResolvedJob) -> Iterator[str]:
    """Yields notes on a job that is to start, one sentence each."""
    config = job.objects.get("environment")
    if not isinstance(config, PlayConfig):
        return
    yield from _unread(job)
    yield from _turn_tokens(job, config)
    yield from _variables(config)
    yield from _objective(job)


def _unread(job: ResolvedJob) -> Iterator[str]:
    """Somebody reads what the environment gives."""
    readers = (EnvironmentRewardConfig, TurnsConfig)
    if not any(isinstance(config, readers) for config in job.objects.values()):
        yield (
            "environment: no reward of this job reads what the environment gives; add a reward "
            "with use: environments, if it gives any"
        )


def _turn_tokens(job: ResolvedJob, config: PlayConfig) -> Iterator[str]:
    """A turn's limit is below that of all turns together."""
    most = getattr(job.objects.get("roles.rollout"), "max_new_tokens", 0)
    if 0 < most < config.turn_tokens:
        yield (
            f"environment.config.turn_tokens: {config.turn_tokens} has no effect, as all turns of "
            f"an episode have {most} together (roles.rollout.config.max_new_tokens)"
        )


def _variables(config: PlayConfig) -> Iterator[str]:
    """What environments are to see of the run's variables is set."""
    if missing := [name for name in config.variables if name not in os.environ]:
        yield (
            f"environment.config.variables: {', '.join(missing)} is not set here, so environments "
            "of generators that start here will not see it"
        )


def _objective(job: ResolvedJob) -> Iterator[str]:
    """An objective may count each sequence of an episode as a record."""
    objective = job.provided.get("objective")
    if objective is not None and not traits_of(job.objects.get("objective")).weighs_rows:
        yield (
            f"objective.use: an episode may be several rows of a batch, and {objective.reference} "
            f"({objective.owner}) does not say that it weighs them (Traits.weighs_rows); if it "
            "averages records, it must divide by the column rows where that is there, or each "
            "such row weighs as a whole record"
        )


def after_step(run: RunFacts, report: StepReport) -> None:
    """Prints which rewards of the environment were 0 in each of the run's first steps."""
    named = _named(run.config)
    steps = min(STEPS, run.steps)
    if report.step != steps or not named:
        return
    earlier = [row["metrics"] for row in read_metrics(Path(run.directory)) if row["step"] < steps]
    for key in named:
        means = [metrics.get(f"reward/{key}") for metrics in [*earlier, report.metrics]]
        had = [mean for mean in means if mean is not None]
        if had and not any(had):
            _tell(run, key, steps)


def _named(config: dict[str, Any]) -> list[str]:
    """Returns the rewards of a job that read one of the environment's by its name."""
    rewards = config.get("rewards") or {}
    return [
        key
        for key, section in rewards.items()
        if section["use"] == "environments" and (section.get("config") or {}).get("name")
    ]


def _tell(run: RunFacts, key: str, steps: int) -> None:
    name = run.config["rewards"][key]["config"]["name"]
    when = "the only step" if steps == 1 else f"each of the first {steps} steps"
    print(
        f"note: rewards.{key} was 0 on average in {when}; if that is a "
        f"surprise, see whether the environment gives a reward of the name {name!r}: the log of "
        f"the scorer says which it gave ({run.directory}/logs)",
        file=sys.stderr,
        flush=True,
    )
