"""Reads from a run what a simulation of its job needs: lengths, and what each part takes.

lengths       of every group in the trace, in order of ordinals; from the first again with others
teaching      as the run found. Of a group that its step did not need nobody knows. It teaches if
              its rewards differ, where that is so of all others; else by chance, as often as others
engine        ``fit_engine`` over the records of the trace. Of a run whose generation ran ahead the
              default profile is only scaled: pushes came between, and samples of several steps ran
              together.
judges        the same over the questions to them: each role has an engine of its own
questions     about an answer, in rounds. A question begins a round if all earlier ones had their
              verdicts when it was sent. Rewards are not told apart: where one asks again while
              another waits for a verdict, both questions are of one round
training      seconds of preparation and training, which are taken to be proportional to the tokens
              of a rank
push, reward  medians
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from gcore_core.contract.engine_profiles import Profile
from gcore_core.contract.errors import DataError
from gcore_core.contract.measurements import Requests
from gcore_core.contract.run_files import Asked, RecordTrace, read_metrics, read_trace
from gcore_core.kits.runs import read_config
from gcore_placement.fitting import LEAST, fit_engine
from gcore_placement.sim.ahead import Asking, GroupLengths, Rounds, TrainerPace

#: Verdicts on groups of which is known whether they teach.
_DECIDED = frozenset({"trained", "filtered"})
_SURPLUS = "surplus"
#: Records by which the engine is fitted; the latest ones.
_FITTED = 4096


@dataclass(frozen=True)
class MeasuredJudge:
    """Holds what was read of a judge.

    size: devices of one of its replicas.
    profile: of the engine of a replica.
    """

    size: int
    profile: Profile


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """Holds what was read from a run.

    prompts: groups that a step trained on, on average.
    devices: those of the cluster; where the run does not say (``auto``), of trainer, generators and
        judges together.
    size: devices of a replica of the generators.
    groups: lengths, by ordinal.
    profile: of the engine of a replica.
    trainer: what training takes.
    push_s, reward_s: medians, in seconds.
    controller: settings of the run's step program.
    judges: role -> what is known of it; empty where no judge was asked.
    asks_groups: whether judges were asked about whole groups, as each had all its answers.
    """

    prompts: int
    devices: int
    size: int
    groups: Sequence[GroupLengths]
    profile: Profile
    trainer: TrainerPace
    push_s: float
    reward_s: float
    controller: dict[str, Any]
    judges: dict[str, MeasuredJudge] = field(default_factory=dict)
    asks_groups: bool = False

    def group(self, ordinal: int) -> GroupLengths:
        """Returns a group's lengths; see ``AnswerSource``.

        Ordinals beyond the run have those of a group that is drawn from it.
        """
        if ordinal >= len(self.groups):
            ordinal = int(np.random.default_rng(ordinal).integers(len(self.groups)))
        return self.groups[ordinal]


def measured_run(directory: Path) -> MeasuredRun:
    """Reads a run. Raises DataError where it has finished no step."""
    ordered = _read_groups(directory)
    rows = [row["metrics"] for row in read_metrics(directory)]
    steps = [row for row in rows if "seconds/train" in row and row.get("groups/trained")]
    if not ordered or not steps:
        raise DataError(
            "the run has finished no step that trained.",
            where=str(directory),
            why="a simulation needs the lengths and the seconds of at least one",
            todo="give the directory of a run that has finished a step",
        )
    steps = steps[1:] or steps  # the first one also warms up
    config = read_config(directory)
    settings = dict(config["controller"].get("config") or {})
    asked = {one.role for group in ordered for record in group for one in record.asked}
    slots = {
        role: int(config["roles"][role]["slots"]) for role in ("policy", "rollout", *sorted(asked))
    }
    ranks = _processes("policy", steps[-1]) or slots["policy"]
    replicas = {record.replica for group in ordered for record in group}
    trained = [group for group in ordered if group[0].verdict == "trained"]
    tokens = statistics.mean(sum(r.n_prompt + r.n_actions for r in group) for group in trained)
    prompts = statistics.mean(row["groups/trained"] for row in steps)
    train_s = statistics.mean(
        row["seconds/train"] + row.get("seconds/prepare", 0.0) for row in steps
    )
    runs_ahead = bool(settings.get("ahead"))
    devices = config.get("cluster", {}).get("devices")  # may be "auto"
    return MeasuredRun(
        prompts=max(1, round(prompts)),
        devices=devices if isinstance(devices, int) else sum(slots.values()),
        size=max(1, slots["rollout"] // len(replicas)),
        groups=_groups(ordered),
        profile=_profile([_served(record) for group in ordered for record in group], runs_ahead),
        trainer=TrainerPace(token_s=train_s * ranks / (tokens * prompts)),
        push_s=statistics.median(row.get("seconds/push", 0.0) for row in steps),
        reward_s=statistics.median(map(_reward_s, ordered)),
        controller=settings,
        judges={
            role: _judge(role, slots[role], _processes(role, steps[-1]), ordered, runs_ahead)
            for role in sorted(asked)
        },
        asks_groups=bool(asked) and all(map(_is_asked_whole, ordered)),
    )


def _read_groups(directory: Path) -> list[list[RecordTrace]]:
    """Returns the groups of a run's trace, in order of ordinals."""
    records: dict[int, dict[int, RecordTrace]] = defaultdict(dict)
    for line in read_trace(directory):
        if isinstance(line, RecordTrace) and line.verdict in _DECIDED | {_SURPLUS}:
            group = records[line.ordinal]
            # A group that its step did not need may be that of a later one. Its records are then in
            # the trace twice.
            if line.verdict in _DECIDED or line.sample not in group:
                group[line.sample] = line
    return [list(records[ordinal].values()) for ordinal in sorted(records)]


def _groups(groups: Sequence[Sequence[RecordTrace]]) -> list[GroupLengths]:
    """Returns the lengths of groups, and which of them teach."""
    decided = [group for group in groups if group[0].verdict in _DECIDED]
    follows_rewards = all(_has_taught(group) == _varies(group) for group in decided)
    share = sum(map(_has_taught, decided)) / len(decided)
    chance = np.random.default_rng(0).random(len(groups))
    found = []
    for group, one in zip(groups, chance, strict=True):
        if group[0].verdict in _DECIDED:
            teaches = _has_taught(group)
        else:
            teaches = _varies(group) if follows_rewards else bool(one < share)
        lengths = GroupLengths(
            prompt=group[0].n_prompt,
            answers=[record.n_actions for record in group],
            teaches=teaches,
            asked=[_rounds(record.asked) for record in group],
        )
        found.append(lengths)
    return found


def _has_taught(group: Sequence[RecordTrace]) -> bool:
    return group[0].verdict == "trained"


def _varies(group: Sequence[RecordTrace]) -> bool:
    """Whether the rewards of a group differ."""
    return any(record.rewards != group[0].rewards for record in group)


def _rounds(asked: Sequence[Asked]) -> Rounds:
    """Returns the questions about a record, in rounds.

    A question begins a round if all that were sent before it had been answered.
    """
    rounds: list[list[Asking]] = []
    answered_s = -math.inf
    for one in sorted(asked, key=lambda one: one.sent_s):
        if one.sent_s >= answered_s:
            rounds.append([])
        answered_s = max(answered_s, one.finished_s)
        # An engine that counted nothing, such as a classifier, has read and written at least this.
        rounds[-1].append(Asking(one.role, max(1, one.n_prompt), max(1, one.n_actions)))
    return rounds


def _is_asked_whole(group: Sequence[RecordTrace]) -> bool:
    """Whether judges were asked about a group when it had all its answers."""
    ended_s = max(record.finished_s for record in group)
    return all(one.sent_s >= ended_s for record in group for one in record.asked)


def _reward_s(group: Sequence[RecordTrace]) -> float:
    """Returns the seconds between a group's last answer, or a judge's last one, and its last
    reward.
    """
    ended_s = [record.finished_s for record in group]
    ended_s += [one.finished_s for record in group for one in record.asked]
    return max(0.0, max(record.scored_s for record in group) - max(ended_s))


def _processes(role: str, metrics: Mapping[str, float | None]) -> int:
    """Returns how many processes a role has, by the metrics of a step; 0 where it has none.

    Each may have several devices.
    """
    return sum(name.startswith(f"cpu_seconds/{role}.") for name in metrics)


def _judge(
    role: str,
    slots: int,
    processes: int,
    groups: Sequence[Sequence[RecordTrace]],
    runs_ahead: bool,
) -> MeasuredJudge:
    """Returns what is known of a judge from the questions to it.

    processes: how many the role has; 0: those that were asked.
    """
    served = [
        _Served(
            step=record.step,
            ordinal=record.ordinal,
            replica=str(one.replica),
            sent_s=one.sent_s,
            finished_s=one.finished_s,
            n_prompt=one.n_prompt,
            n_actions=one.n_actions,
        )
        for group in groups
        for record in group
        for one in record.asked
        if one.role == role
    ]
    replicas = processes or len({one.replica for one in served})
    return MeasuredJudge(max(1, slots // replicas), _profile(served, runs_ahead))


@dataclass(frozen=True, kw_only=True)
class _Served:
    """A request to a replica, of the policy's generator or of a judge; see ``RecordTrace``."""

    step: int
    ordinal: int
    replica: str
    sent_s: float
    finished_s: float
    n_prompt: int
    n_actions: int


def _served(record: RecordTrace) -> _Served:
    """Returns the request that a record is the answer to."""
    return _Served(**{one.name: getattr(record, one.name) for one in fields(_Served)})


def _profile(served: Sequence[_Served], runs_ahead: bool) -> Profile:
    """Fits an engine to the latest requests of a role; those of one step ran together.

    runs_ahead: whether those of several steps did.
    """
    latest = sorted(served, key=lambda one: one.sent_s)[-_FITTED:]
    replicas = {name: at for at, name in enumerate(sorted({one.replica for one in latest}))}
    zero_s = latest[0].sent_s
    start_s = np.array([one.sent_s - zero_s for one in latest])
    requests = Requests(
        step=np.array([0 if runs_ahead else one.step for one in latest]),
        group=np.array([one.ordinal for one in latest]),
        arrival_s=start_s,
        start_s=start_s,
        end_s=np.array([one.finished_s - zero_s for one in latest]),
        prompt=np.array([one.n_prompt for one in latest]),
        actions=np.array([one.n_actions for one in latest]),
        parent=np.full(len(latest), -1),
        kept=np.ones(len(latest), bool),
        replica=np.array([replicas[one.replica] for one in latest]),
    )
    prior = Profile()
    fit = fit_engine(requests, prior, least=len(latest) + 1 if runs_ahead else LEAST)
    return replace(
        fit.profile,
        # Prompts of a run are often too alike to tell what reading a token takes. It is arithmetic,
        # as is what a sequence adds to a round.
        prefill_s=fit.profile.running_s * prior.prefill_s / prior.running_s,
        # With fewer replicas each gets more sequences than any had in the run.
        max_running=max(fit.profile.max_running, prior.max_running),
        cache_tokens=max(fit.profile.cache_tokens, prior.cache_tokens),
    )
