"""Defines what a placement policy is told of past steps, and what it makes of them.

A run tells what it noted: ``Requests``, ``Rollout``, ``Outcome``. It measures nothing itself: a
policy does, and its ``Account`` says what it found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from gcore_core.contract.engine_profiles import EngineFit


def _ints() -> np.ndarray:
    return np.zeros(0, np.int64)


def _floats() -> np.ndarray:
    return np.zeros(0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Requests:
    """Holds finished requests of one role in the latest steps, as columns of one length.

    Times are in seconds since the start of the step's rollout.

    step: int64[N], the step of the request.
    group: int64[N], the ordinal of the group that it belongs to.
    arrival_s: float64[N], when it could begin.
    start_s: float64[N], when it was sent to the replica.
    end_s: float64[N], when its answer was there.
    prompt: int64[N], tokens of the prompt.
    actions: int64[N], tokens or other actions of the answer.
    parent: int64[N], of a judge's request the index of the judged record in the policy's columns;
        -1 for the policy's own.
    kept: bool[N], whether a step may train on the group; only for the policy's requests.
    replica: int64[N], number of the replica that served it.
    """

    step: np.ndarray = field(default_factory=_ints)
    group: np.ndarray = field(default_factory=_ints)
    arrival_s: np.ndarray = field(default_factory=_floats)
    start_s: np.ndarray = field(default_factory=_floats)
    end_s: np.ndarray = field(default_factory=_floats)
    prompt: np.ndarray = field(default_factory=_ints)
    actions: np.ndarray = field(default_factory=_ints)
    parent: np.ndarray = field(default_factory=_ints)
    kept: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    replica: np.ndarray = field(default_factory=_ints)

    def __len__(self) -> int:
        return len(self.step)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Requests):
            return NotImplemented
        return all(
            np.array_equal(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)
        )

    def __hash__(self) -> int:
        return hash((len(self), self.actions.tobytes()))

    def take(self, which: np.ndarray) -> Requests:
        """Returns some of the requests, by mask or by index.

        ``parent`` still counts in the policy's columns as they were.
        """
        return Requests(**{f.name: getattr(self, f.name)[which] for f in fields(self)})


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Says what a decision came to.

    step: the step for which it was made.
    candidate: ``Decision.chosen``.
    predicted_s: seconds that its rollout was predicted to take; None without a prediction.
    measured_s: seconds that the rollout took.
    work: actions that all roles sampled, so that steps can be compared.
    """

    step: int
    candidate: str
    predicted_s: float | None
    measured_s: float
    work: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Says who was awake in the latest rollout, where and for how long.

    seconds: length of the rollout, by the lead's clock.
    turns_s: the part of it in which roles changed places.
    engines: generator role -> device indexes of each of its replicas.
    serving: generator role -> numbers of the replicas that were awake when the rollout ended. In
        mode "colocated" they are awake in their role's turn.
    served: likewise, at any time of the rollout.
    used: device index -> share of the rollout in which it was in use as a meter reads it, from 0 to
        1. It is empty unless the policy's config names meters.
    """

    seconds: float = 0.0
    turns_s: float = 0.0
    engines: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)
    serving: Mapping[str, Sequence[int]] = field(default_factory=dict)
    served: Mapping[str, Sequence[int]] = field(default_factory=dict)
    used: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Account:
    """Says what a policy has measured in the latest rollout: plain values, for JSON.

    A run writes it down with what the rollout's decision came to, and gives it back in
    ``Window.account``, in a resumed run too: then only ``engines`` and ``state``.

    engines: generator role -> how fast its engines are, as of this rollout.
    ran: first device of a generator's replica -> role -> seconds in which it ran anything there.
    waited: first device of a generator's replica -> seconds of the rollout in which nothing ran
        there.
    metrics: name of a metric of the run, without ``placement/`` -> its value.
    state: what the policy needs besides, to measure the next rollout.
    """

    engines: Mapping[str, EngineFit] = field(default_factory=dict)
    ran: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    waited: Mapping[int, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
