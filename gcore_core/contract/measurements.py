"""What a placement policy may know of past steps: requests as columns, engine profiles, what
decisions came to.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

import numpy as np


def _ints() -> np.ndarray:
    return np.zeros(0, np.int64)


def _floats() -> np.ndarray:
    return np.zeros(0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Requests:
    """Finished requests of one role in the latest steps, as columns of one length. Times count from
    the start of their step's rollout.

    group: the ordinal. parent: of a judge's request, the index of the policy's record in the
        policy's columns; else -1.
    kept: the group passed the filter (of the policy's requests). replica: which one served it.
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
        """Some of them, by mask or by index. ``parent`` still counts in all of the policy's
        columns.
        """
        return Requests(**{f.name: getattr(self, f.name)[which] for f in fields(self)})


@dataclass(frozen=True, kw_only=True)
class Profile:
    """How long a replica's engine takes: a round of decoding, which gives each running sequence a
    token, ``base_s + running_s * running + cached_s * cached tokens``.

    The defaults are a roofline, not a measurement: a dense model of 32e9 parameters in bfloat16 on
    four devices of 80 GB, 3.35 TB/s and 989 TFLOP/s.
    """

    base_s: float = 0.012
    running_s: float = 3.0e-5
    cached_s: float = 2.8e-8
    prefill_s: float = 6.25e-5  # each token of a prompt; nothing else runs meanwhile
    max_running: int = 256
    cache_tokens: int = 750_000

    def seconds(self, prompt: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """float64[N]: a request's share of the engine's time when the batch is as full as memory
        allows.
        """
        cached = prompt + actions / 2
        batch = np.clip(self.cache_tokens / np.maximum(cached, 1), 1, self.max_running)
        decode = actions * (self.base_s / batch + self.running_s + self.cached_s * cached)
        return np.asarray(decode + prompt * self.prefill_s)

    @classmethod
    def fit(cls, requests: Requests, prior: Profile, least: int = 64) -> Profile:
        """The profile that explains the requests' times best; the prior's terms where fewer than
        ``least`` say nothing.

        A request's seconds are its prefill and a round per action, each with as many sequences
        running and tokens
        cached as its replica had on average meanwhile: least squares without negative terms. Limits
            stay the prior's.
        """
        took = requests.end_s - requests.start_s
        if len(requests) < least:
            return prior
        rows, seconds = [], []
        for replica in np.unique(requests.replica + (requests.step << 32)):
            mine = requests.take(requests.replica + (requests.step << 32) == replica)
            shared = np.minimum(mine.end_s[:, None], mine.end_s) - np.maximum(
                mine.start_s[:, None], mine.start_s
            )
            share = np.clip(shared, 0, None) / np.maximum(mine.end_s - mine.start_s, 1e-9)[:, None]
            cached = share @ (mine.prompt + mine.actions / 2)
            rows.append(
                np.column_stack([mine.actions, mine.actions * share.sum(1), mine.actions * cached])
            )
            seconds.append(mine.end_s - mine.start_s - prior.prefill_s * mine.prompt)
        table, target = np.concatenate(rows), np.concatenate(seconds)
        scale = np.maximum(np.abs(table).max(0), 1e-12)
        base, running, cached_ = (
            _non_negative(table / scale / took[:, None].max(), target / took.max()) / scale
        )
        return replace(prior, base_s=float(base), running_s=float(running), cached_s=float(cached_))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a decision came to: the rollout of ``step`` took ``measured_s`` and was predicted to
    take ``predicted_s``.

    work: actions sampled by all roles, so that steps can be compared.
    """

    step: int
    candidate: str
    predicted_s: float | None
    measured_s: float
    work: float = 0.0


def _non_negative(table: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Least squares without negative terms: of the few subsets of columns, the best whose terms are
    all positive.
    """
    best, least = np.zeros(table.shape[1]), np.inf
    for mask in range(1, 2 ** table.shape[1]):
        columns = [i for i in range(table.shape[1]) if mask >> i & 1]
        terms = np.linalg.lstsq(table[:, columns], target, rcond=None)[0]
        error = float(((table[:, columns] @ terms - target) ** 2).sum())
        if terms.min() >= 0 and error < least * (1 - 1e-9):
            best, least = np.zeros(table.shape[1]), error
            best[columns] = terms
    return best
