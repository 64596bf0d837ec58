"""Defines what a placement policy may know of past steps: requests, engine profiles, outcomes."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

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
class Profile:
    """Says how long a replica's engine takes for its work.

    A round of decoding, which gives each running sequence one token, takes
    ``base_s + running_s * running sequences + cached_s * cached tokens``.

    base_s: seconds of a round, whatever runs.
    running_s: further seconds of a round for each sequence that runs.
    cached_s: further seconds of a round for each token in the cache.
    prefill_s: seconds for each token of a prompt; nothing else runs meanwhile.
    max_running: how many sequences may run at once.
    cache_tokens: how many tokens the cache holds.

    The defaults are a roofline, not a measurement: a dense model of 32e9 parameters in bfloat16 on
    four devices of 80 GB, 3.35 TB/s and 989 TFLOP/s.
    """

    base_s: float = 0.012
    running_s: float = 3.0e-5
    cached_s: float = 2.8e-8
    prefill_s: float = 6.25e-5
    max_running: int = 256
    cache_tokens: int = 750_000

    def seconds(self, prompt: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """Estimates each request's share of the engine's time, in seconds: float64[N].

        The batch is as full as memory allows.
        """
        cached = prompt + actions / 2
        batch = np.clip(self.cache_tokens / np.maximum(cached, 1), 1, self.max_running)
        decode = actions * (self.base_s / batch + self.running_s + self.cached_s * cached)
        return np.asarray(decode + prompt * self.prefill_s)

    @classmethod
    def fit(cls, requests: Requests, prior: Profile, least: int = 64) -> Profile:
        """Returns the profile that explains the requests' times best.

        A request's seconds are taken as its prefill and one round for each action. Each round has
        as many sequences running and tokens cached as its replica had on average meanwhile. The
        terms of a round are fitted by least squares without negative terms; ``prefill_s`` and the
        limits are the prior's. With fewer than ``least`` requests the prior is returned.
        """
        took = requests.end_s - requests.start_s
        if len(requests) < least:
            return prior
        rows = []
        seconds = []
        # One number for each pair of replica and step: only requests of one pair ran together.
        for replica in np.unique(requests.replica + (requests.step << 32)):
            batch = requests.take(requests.replica + (requests.step << 32) == replica)
            # [i, j]: seconds in which requests i and j both ran; then that as a share of i's time.
            shared = np.minimum(batch.end_s[:, None], batch.end_s) - np.maximum(
                batch.start_s[:, None], batch.start_s
            )
            share = (
                np.clip(shared, 0, None) / np.maximum(batch.end_s - batch.start_s, 1e-9)[:, None]
            )
            cached = share @ (batch.prompt + batch.actions / 2)
            rows.append(
                np.column_stack(
                    [batch.actions, batch.actions * share.sum(1), batch.actions * cached]
                )
            )
            seconds.append(batch.end_s - batch.start_s - prior.prefill_s * batch.prompt)
        table = np.concatenate(rows)
        target = np.concatenate(seconds)
        scale = np.maximum(np.abs(table).max(0), 1e-12)
        base, running, cached_ = (
            _non_negative(table / scale / took[:, None].max(), target / took.max()) / scale
        )
        return replace(prior, base_s=float(base), running_s=float(running), cached_s=float(cached_))


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


def _non_negative(table: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Solves a least-squares problem without negative terms.

    It tries every subset of the few columns and takes the best one that has no negative term.
    """
    best = np.zeros(table.shape[1])
    least = np.inf
    for mask in range(1, 2 ** table.shape[1]):
        columns = [i for i in range(table.shape[1]) if mask >> i & 1]
        terms = np.linalg.lstsq(table[:, columns], target, rcond=None)[0]
        error = float(((table[:, columns] @ terms - target) ** 2).sum())
        if terms.min() >= 0 and error < least * (1 - 1e-9):
            best = np.zeros(table.shape[1])
            least = error
            best[columns] = terms
    return best
