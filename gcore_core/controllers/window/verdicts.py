"""What becomes of a group whose records are all drawn and scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gcore_core.contract.algorithms import Filter
from gcore_core.contract.errors import DataError, TrainingError
from gcore_core.contract.job_settings import Reward
from gcore_core.contract.plugin_code import PluginCode
from gcore_core.contract.records import (
    FAILED,
    FILTERED,
    OK,
    QUARANTINED,
    REWARD_SKIPPED,
    TRAINED,
    Header,
)
from gcore_core.controllers.algorithm_answers import keeps
from gcore_core.controllers.config import SyncConfig
from gcore_core.controllers.reward_weights import rewards_of
from gcore_core.controllers.training import group_scalars


@dataclass(frozen=True)
class Settled:
    """A group with its verdict: TRAINED, FILTERED or QUARANTINED, and why."""

    ordinal: int
    group: list[Header]
    verdict: str
    reason: str


def verdict_on(
    group: list[Header],
    config: SyncConfig,
    rewards: Mapping[str, Reward],
    chosen: Filter,
    code: PluginCode,
) -> Settled:
    """Raises DataError for a prompt that is too long, where the job says so.

    chosen: the filter of the job.
    code: what errors say of it.
    """
    verdict = QUARANTINED
    reason = _unusable(group, config)
    if not reason:
        keep, reason = keeps(code, chosen, group_scalars(group, rewards_of(group, rewards)))
        verdict = TRAINED if keep else FILTERED
    return Settled(group[0].ordinal, group, verdict, reason)


def _unusable(group: list[Header], config: SyncConfig) -> str:
    """Why the group cannot be used; empty if it can."""
    for header in group:
        if header.status == FAILED:
            if header.reason == "prompt_too_long" and config.too_long == "error":
                raise DataError(
                    "the prompt is longer than the context allows",
                    where=f"row {header.row} of the dataset",
                    todo=(
                        "shorten it, raise the context length, or set "
                        "controller.config.too_long: drop"
                    ),
                )
            return header.reason or "failed"
        if any(status not in (OK, REWARD_SKIPPED) for status in header.reward_status.values()):
            return "reward_failed"
    return ""


def too_many_failures(
    failures: Sequence[list[Header]], unusable: int, complete: int
) -> TrainingError:
    """failures: this shard's latest. unusable, complete: groups of the step, over all shards."""
    reasons = [header.reason for group in failures for header in group if header.reason]
    return TrainingError(
        f"{unusable} of {complete} groups could not be used",
        where="rewarding",
        why="\n".join(dict.fromkeys(reasons[:64])) or "no reason was given",
        todo="mend the reward or the data; controller.config.failure_limit says how many may fail",
    )
