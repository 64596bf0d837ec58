"""What ``g-core check`` refuses of a job in which generation runs ahead of training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gcore_async.conditions import why_pushes_wait
from gcore_core.contract.job_settings import ROLLOUT
from gcore_core.contract.preflight import ResolvedJob
from gcore_core.contract.traits import traits_of


def problems_of(plan: Mapping[str, Any], job: ResolvedJob) -> Iterator[str]:
    """Yields one sentence for each problem of a resolved job, its path first."""
    yield from _sleep(plan, job)
    yield from _in_flight(plan, job)
    yield from _older_weights(plan, job)


def _sleep(plan: Mapping[str, Any], job: ResolvedJob) -> Iterator[str]:
    """Neither generators nor trainers have a time of rest."""
    if plan["placement"]["sleep_in_training"] == "always":
        yield (
            "placement.sleep_in_training: async generates while it trains, so generators cannot "
            "sleep; set it to never."
        )
    if plan["placement"]["sleep_in_rollout"] == "always":
        yield (
            f"placement.sleep_in_rollout: always, but controller "
            f"{job.provided['controller'].reference} generates while it trains; leave it out."
        )


def _in_flight(plan: Mapping[str, Any], job: ResolvedJob) -> Iterator[str]:
    """Pushes come while samples run only where these can go on through them.

    Whether devices move is not known yet.
    """
    deterministic = plan["run"]["deterministic"]
    if why_pushes_wait(job.objects["controller"], deterministic=deterministic, moves=False):
        return
    rollout = job.provided[f"roles.{ROLLOUT}"]
    if not traits_of(job.objects[f"roles.{ROLLOUT}"]).midway_weights:
        yield (
            f"roles.{ROLLOUT}.use: {rollout.reference} is not known to go on with samples through "
            f"a push, and controller {job.provided['controller'].reference} pushes while they run; "
            "take a generator with the trait midway_weights, such as torch, or have pushes "
            "wait (controller.config.midway: wait)."
        )


def _older_weights(plan: Mapping[str, Any], job: ResolvedJob) -> Iterator[str]:
    """The objective corrects for actions that older weights sampled."""
    if not traits_of(job.objects["objective"]).takes_stale:
        yield (
            f"objective: {job.provided['objective'].reference} does not correct for actions that "
            f"older weights sampled, and controller {job.provided['controller'].reference} trains "
            "on such actions; choose an objective, or settings of it, with which the loss corrects "
            "for them."
        )
    settings = plan["objective"].get("config") or {}
    correction = settings.get("correction")  # the objectives of other plugins may have none
    uncorrected = correction is not None and correction.get("kind") == "none"
    if uncorrected and settings.get("old_logprobs") == "recompute":
        yield (
            "objective.config: recomputed log-probs alone do not correct for older weights; set "
            "objective.config.correction.kind: truncate, or old_logprobs: rollout."
        )
