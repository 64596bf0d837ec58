"""Decides what becomes of a group whose records are all drawn and scored."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gcore_core.contract.algorithms import Filter
from gcore_core.contract.errors import DataError, TrainingError
from gcore_core.contract.job_settings import RewardSettings
from gcore_core.contract.plugin_code import PluginCode
from gcore_core.contract.records import (
    FAILED,
    FILTERED,
    QUARANTINED,
    REWARD_FAILED,
    REWARD_TIMEOUT,
    TRAINED,
    TRUNCATED,
    Header,
)
from gcore_core.contract.run_files import log_path
from gcore_core.controllers.algorithm_answers import keeps
from gcore_core.controllers.config import SyncConfig
from gcore_core.controllers.generation.ledger import has_failed_reward
from gcore_core.controllers.reward_weights import group_scalars
from gcore_core.runtime.worker_settings import JobFacts

_LINES = 6  # at most this many lines of an error
_TOO_LONG = "prompt_too_long"
#: So many prompts in a row that are too long end a run which has no other group for a step.
_TOO_MANY = 10


@dataclass(frozen=True)
class Verdict:
    """Holds a group with its verdict.

    verdict: TRAINED, FILTERED or QUARANTINED.
    reason: why it was not TRAINED.
    """

    ordinal: int
    group: list[Header]
    verdict: str
    reason: str


def verdict_on(
    group: list[Header],
    config: SyncConfig,
    rewards: Mapping[str, RewardSettings],
    group_filter: Filter,
    code: PluginCode,
) -> Verdict:
    """Gives a complete group its verdict.

    A group with a failed record or reward is QUARANTINED; the filter decides on the others. One
    whose prompt is too long is left out like one that the filter drops, or raises DataError when
    ``too_long`` is "error". A group in which every record was cut off has nothing to train on when
    ``truncated`` is "mask".

    group: the records of one prompt.
    rewards: reward -> its settings.
    group_filter: the filter of the job.
    code: calls the filter, and names its plugin in errors.
    """
    reason = _unusable(group, config)
    verdict = FILTERED if reason == _TOO_LONG else QUARANTINED
    if not reason:
        keep, reason = keeps(code, group_filter, group_scalars(group, rewards))
        verdict = TRAINED if keep else FILTERED
        if keep and config.truncated == "mask" and all(h.status == TRUNCATED for h in group):
            verdict = FILTERED
            reason = "truncated"
    return Verdict(group[0].ordinal, group, verdict, reason)


def _unusable(group: list[Header], config: SyncConfig) -> str:
    """Returns why the group cannot be used; "" if it can."""
    for header in group:
        if header.status == FAILED:
            word, _, details = header.reason.partition(":")
            if word == _TOO_LONG and config.too_long == "error":
                raise DataError(
                    "the prompt is longer than the context allows",
                    where=f"row {header.row} of the dataset",
                    why=details.strip(),
                    todo=(
                        "shorten it, raise the context length, or set "
                        "controller.config.too_long: drop"
                    ),
                )
            return word or "failed"
        if has_failed_reward(header):
            return "reward_failed"
    return ""


def too_many_failures(
    failures: Sequence[list[Header]], unusable: int, complete: int, logs: Mapping[str, str]
) -> TrainingError:
    """Makes the error that ends a run in which too many groups cannot be used.

    failures: this shard's latest groups that cannot be used.
    unusable: groups of the step that cannot be used, over all shards.
    complete: groups of the step that are drawn and scored, over all shards.
    logs: reward -> the log of the scorer that hosts it, where tracebacks are.
    """
    causes = [
        header
        for group in failures
        for header in group
        if header.status == FAILED or has_failed_reward(header)
    ]
    todo = ["fix the reward or the data; controller.config.failure_limit says how many may fail"]
    slow = _rewards_with(causes, REWARD_TIMEOUT)
    if slow:
        todo.append(
            f"or give it more time: {', '.join(f'rewards.{name}.timeout_s' for name in slow)}"
        )
        if files := _log_files(slow, logs):
            todo.append(f"one record fails all of its call; where it was held: {files}")
    failed = _rewards_with(causes, REWARD_FAILED)
    if files := _log_files(failed, logs):
        todo.append(f"tracebacks: {files}")
    lines = list(_reasons(causes[:64]))[: _LINES - 1 - len(todo)]
    return TrainingError(
        f"{unusable} of {complete} groups could not be used",
        where="rewarding",
        why="\n".join(lines) or "no reason was given",
        todo="\n".join(todo),
    )


def latest_too_long(groups: Sequence[Verdict]) -> list[Verdict]:
    """Returns the last groups in a row that were left out for too long a prompt.

    groups: in the order in which steps consume them.
    """
    latest = itertools.takewhile(lambda one: one.reason == _TOO_LONG, reversed(groups))
    return list(latest)[::-1]


def check_any_fits(too_long: Sequence[Verdict]) -> None:
    """Raises DataError where no prompt seems to fit, in a step that finds no other group.

    Such groups are no failures, and the run draws others for them. Without any other, the rows
    do not go with the model.

    too_long: what ``latest_too_long`` returned.
    """
    if len(too_long) < _TOO_MANY:
        return
    raise DataError(
        f"the last {len(too_long)} prompts are all longer than the context allows",
        where="generation",
        why="\n".join(list(_reasons([one.group[0] for one in too_long]))[:2]),
        todo="shorten the rows, raise the context length, or take another model",
    )


def _reasons(headers: Sequence[Header]) -> dict[str, None]:
    """Returns why records failed, each reason once; of a failed record with its row."""
    return dict.fromkeys(
        f"row {header.row}: {header.reason}" if header.status == FAILED else header.reason
        for header in headers
        if header.reason
    )


def logs_of_rewards(facts: JobFacts) -> dict[str, str]:
    """Returns reward -> the log of the scorer that hosts it, if this machine has the log."""
    if not facts.output:
        return {}
    directory = Path(facts.output).parent
    logs: dict[str, str] = {}
    for worker, rewards in facts.scorers.items():
        log_file = log_path(directory, worker)
        if log_file.exists():
            logs |= dict.fromkeys(rewards, str(log_file))
    return logs


def _log_files(rewards: Sequence[str], logs: Mapping[str, str]) -> str:
    return ", ".join(sorted({logs[name] for name in rewards if name in logs}))


def _rewards_with(headers: Sequence[Header], status: str) -> list[str]:
    return sorted(
        {
            name
            for header in headers
            for name, record_status in header.reward_status.items()
            if record_status == status
        }
    )
