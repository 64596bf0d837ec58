"""Reads from a run what a simulation of its job needs: lengths, and what each part takes.

lengths       of every group in the trace, in order of ordinals; from the first again with others
engine        ``fit_engine`` over the records of the trace. Of a run whose generation ran ahead the
              default profile is only scaled: pushes came between, and samples of several steps ran
              together.
training      seconds of preparation and training, which are taken to be proportional to the tokens
              of a rank
push, reward  medians
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gcore_core.contract.engine_profiles import Profile
from gcore_core.contract.errors import DataError
from gcore_core.contract.measurements import Requests
from gcore_core.contract.run_files import Record, read_metrics, read_trace
from gcore_core.controllers.placement.fitting import LEAST, fit_engine
from gcore_core.kits.runs import read_config
from gcore_sim.ahead import GroupLengths, TrainerPace

_KEPT = frozenset({"trained", "surplus"})
#: Records by which the engine is fitted; the latest ones.
_FITTED = 4096
#: A metric of each rank of the trainer; a rank may have several devices.
_OF_RANK = "cpu_seconds/policy."


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """Holds what was read from a run.

    prompts: groups that a step trained on, on average.
    devices: those of trainer and generators.
    size: devices of a replica of the generators.
    groups: lengths, by ordinal.
    profile: of the engine of a replica.
    trainer: what training takes.
    push_s, reward_s: medians, in seconds.
    controller: settings of the run's step program.
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

    def group(self, ordinal: int) -> GroupLengths:
        """Returns a group's lengths; see ``AnswerSource``.

        Ordinals beyond the run have those of a group that is drawn from it.
        """
        if ordinal >= len(self.groups):
            ordinal = int(np.random.default_rng(ordinal).integers(len(self.groups)))
        return self.groups[ordinal]


def measured_run(directory: Path) -> MeasuredRun:
    """Reads a run. Raises DataError where it has finished no step."""
    records: dict[int, list[Record]] = defaultdict(list)
    for line in read_trace(directory):
        if isinstance(line, Record) and line.verdict in _KEPT | {"filtered"}:
            records[line.ordinal].append(line)
    rows = [row["metrics"] for row in read_metrics(directory)]
    steps = [row for row in rows if "seconds/train" in row and row.get("groups/trained")]
    if not records or not steps:
        raise DataError(
            "the run has finished no step that trained.",
            where=str(directory),
            why="a simulation needs the lengths and the seconds of at least one",
            todo="give the directory of a run that has finished a step",
        )
    steps = steps[1:] or steps  # the first one also warms up
    config = read_config(directory)
    settings = dict(config["controller"].get("config") or {})
    slots = {role: int(config["roles"][role]["slots"]) for role in ("policy", "rollout")}
    ranks = sum(name.startswith(_OF_RANK) for name in steps[-1]) or slots["policy"]
    replicas = {record.replica for group in records.values() for record in group}
    ordered = [records[ordinal] for ordinal in sorted(records)]
    trained = [group for group in ordered if group[0].verdict == "trained"]
    tokens = statistics.mean(sum(r.n_prompt + r.n_actions for r in group) for group in trained)
    prompts = statistics.mean(row["groups/trained"] for row in steps)
    train_s = statistics.mean(
        row["seconds/train"] + row.get("seconds/prepare", 0.0) for row in steps
    )
    return MeasuredRun(
        prompts=max(1, round(prompts)),
        devices=sum(slots.values()),
        size=max(1, slots["rollout"] // len(replicas)),
        groups=[_lengths(group) for group in ordered],
        profile=_profile(
            [record for group in ordered for record in group],
            runs_ahead=bool(settings.get("ahead")),
        ),
        trainer=TrainerPace(token_s=train_s * ranks / (tokens * prompts)),
        push_s=statistics.median(row.get("seconds/push", 0.0) for row in steps),
        reward_s=statistics.median(map(_reward_s, ordered)),
        controller=settings,
    )


def _lengths(group: Sequence[Record]) -> GroupLengths:
    return GroupLengths(
        prompt=group[0].n_prompt,
        answers=[record.n_actions for record in group],
        teaches=group[0].verdict in _KEPT,
    )


def _reward_s(group: Sequence[Record]) -> float:
    """Returns the seconds between a group's last answer and its last reward."""
    scored_s = max(record.scored_s for record in group)
    return max(0.0, scored_s - max(record.finished_s for record in group))


def _profile(records: Sequence[Record], runs_ahead: bool) -> Profile:
    """Fits the engine to the latest records; those of one step ran together.

    runs_ahead: whether those of several steps did.
    """
    latest = sorted(records, key=lambda record: record.sent_s)[-_FITTED:]
    replicas = {name: at for at, name in enumerate(sorted({r.replica for r in latest}))}
    zero_s = latest[0].sent_s
    start_s = np.array([record.sent_s - zero_s for record in latest])
    requests = Requests(
        step=np.array([0 if runs_ahead else record.step for record in latest]),
        group=np.array([record.ordinal for record in latest]),
        arrival_s=start_s,
        start_s=start_s,
        end_s=np.array([record.finished_s - zero_s for record in latest]),
        prompt=np.array([record.n_prompt for record in latest]),
        actions=np.array([record.n_actions for record in latest]),
        parent=np.full(len(latest), -1),
        kept=np.ones(len(latest), bool),
        replica=np.array([replicas[record.replica] for record in latest]),
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
