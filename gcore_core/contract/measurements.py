"""Defines what a placement policy may know of past steps: requests and outcomes."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np


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
