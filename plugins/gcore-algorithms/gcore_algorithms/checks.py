"""What ``g-core check`` refuses of a job whose advantage or objective is of this plugin."""

from __future__ import annotations

from collections.abc import Iterator

from gcore_algorithms.config import GdpoConfig, ObjectiveConfig, RecordAdvantageConfig
from gcore_core.contract.job_settings import POLICY, ROLLOUT
from gcore_core.contract.preflight import ResolvedJob
from gcore_core.contract.traits import traits_of


def problems_of(job: ResolvedJob) -> Iterator[str]:
    """Yields one sentence for each problem of a resolved job, its path first."""
    advantage, objective = job.objects.get("advantage"), job.objects.get("objective")
    if isinstance(advantage, RecordAdvantageConfig | GdpoConfig) and advantage.compares_samples:
        yield from _samples_differ(job)
    if isinstance(objective, ObjectiveConfig) and objective.adapts:
        yield from _steps_are_shown(job)


def _samples_differ(job: ResolvedJob) -> Iterator[str]:
    """The samples of a prompt are not all the same where they are compared with each other."""
    path = f"roles.{ROLLOUT}"
    setting = traits_of(job.objects.get(path)).samples_alike
    if not setting or "environment" in job.provided:  # it may show each sample something else
        return
    name = setting.partition("=")[0]
    yield (
        f"{path}.config.{name}: with {setting} all samples of a prompt are the same, and "
        f"{job.provided['advantage'].reference} compares the samples of one prompt, so each has "
        f"advantage 0 and teaches nothing; leave {path}.config.{name} at its default, or set it so "
        "that samples differ; an evaluation samples greedily by itself."
    )


def _steps_are_shown(job: ResolvedJob) -> Iterator[str]:
    """The trainer shows an objective that learns from steps what they measure, and saves it."""
    trainer = job.provided[f"roles.{POLICY}"]
    if not traits_of(job.objects[f"roles.{POLICY}"]).adapts_objective:
        yield (
            f"objective: {job.provided['objective'].reference} adapts its loss to what steps "
            f"measure, and trainer {trainer.reference} shows it none and saves no state of it; "
            "take a trainer that does, or settings under which it stays as it is."
        )
