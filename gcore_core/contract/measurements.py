"""Defines what a placement policy may know of past steps: requests, engine profiles, outcomes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import numpy as np

#: The terms of a profile that are seconds, in the order in which they are fitted.
TERMS = ("base_s", "running_s", "cached_s", "prefill_s")
#: Requests from which on the terms are fitted one by one. With fewer only their sum is.
LEAST = 64
#: By how much the standard errors of a fit grow until the next step: their squares double.
DRIFT = 1.4
#: No term is surer than what makes this share of a request's seconds: engines are not quite so.
LEAST_SHARE = 0.002


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


@dataclass(frozen=True, kw_only=True)
class EngineFit:
    """Holds a profile that was fitted to the requests of a rollout, and how sure it is.

    profile: the profile.
    errors: term of the profile -> its standard error, in seconds.
    requests: how many requests were fitted; 0: the profile is a prior.
    expected_s: mean seconds of these requests as the profile before expected them.
    measured_s: mean seconds that they took.
    """

    profile: Profile
    errors: Mapping[str, float] = field(default_factory=dict)
    requests: int = 0
    expected_s: float = 0.0
    measured_s: float = 0.0

    @classmethod
    def of(
        cls,
        requests: Requests,
        prior: Profile,
        before: EngineFit | None = None,
        *,
        least: int = LEAST,
    ) -> EngineFit:
        """Fits a profile to the requests of one role.

        A request's seconds are taken as one round for each action, and the prefill of every prompt
        that its replica began to read meanwhile, its own included. Each round has as many sequences
        running and tokens cached as the replica had on average meanwhile. The terms are fitted by
        least squares of the relative errors, without negative terms.

        ``prior`` gives only the proportions of terms: scaled to the median of the requests, it
        counts as much as one request, which decides what the requests leave open. With fewer than
        ``least`` requests the scaled prior is the result. A fit of earlier steps (``before``)
        takes the prior's place, scaled likewise, since what else runs on a machine slows all terms
        down. It counts by its standard errors, which grow from step to step by ``DRIFT``.

        ``max_running`` becomes the most requests that a replica was seen to have at once, since
        nothing is known of larger batches. ``cache_tokens`` becomes what that many of the longest
        requests fill, so that it never binds first.

        Requests that run together share their deviations, so for standard errors they count as one.
        Errors are at least what makes ``LEAST_SHARE`` of a request.
        """
        known = before.profile if before is not None and before.requests else None
        took = requests.end_s - requests.start_s
        requests = requests.take((took > 0) & (requests.actions + requests.prompt > 0))
        if not len(requests):
            return before or cls(profile=prior)
        took = requests.end_s - requests.start_s
        table, most = _rounds(requests)
        guess = np.array([getattr(known or prior, name) for name in TERMS])
        expected = table @ guess
        scale = float(np.median(took / np.maximum(expected, 1e-12)))
        guess = guess * scale
        errors = guess.copy()  # of a scaled prior, the terms are as likely to be twice as much
        terms = guess
        if len(requests) >= least:
            together = float((table[:, 1] / np.maximum(table[:, 0], 1)).mean())
            tightness = None
            if before is not None and known is not None:
                earlier = np.array([before.errors[name] for name in TERMS])
                tightness = 1 / np.maximum(DRIFT * scale * earlier, 1e-15)
            terms, errors = _relative_fit(table / took[:, None], guess, tightness, together)
        longest = int((requests.prompt + requests.actions).max())
        max_running = max(most, known.max_running if known else 1)
        profile = Profile(
            **dict(zip(TERMS, terms.tolist(), strict=True)),
            max_running=max_running,
            cache_tokens=max(max_running * longest, known.cache_tokens if known else 1),
        )
        return cls(
            profile=profile,
            errors=dict(zip(TERMS, errors.tolist(), strict=True)),
            requests=len(requests),
            expected_s=float(expected.mean()),
            measured_s=float(took.mean()),
        )


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


def _rounds(requests: Requests) -> tuple[np.ndarray, int]:
    """Returns what each request's seconds consist of, and the most that a replica had at once.

    The first is float64[N, 4]: by how much each of ``TERMS`` counts in each request.
    """
    table = np.zeros((len(requests), len(TERMS)))
    most = 0
    # One number for each pair of replica and step: only requests of one pair ran together.
    pair = requests.replica + (requests.step << 32)
    for number in np.unique(pair):
        mask = pair == number
        batch = requests.take(mask)
        # [i, j]: seconds in which requests i and j both ran; then that as a share of i's time.
        shared_s = np.minimum(batch.end_s[:, None], batch.end_s) - np.maximum(
            batch.start_s[:, None], batch.start_s
        )
        share = np.clip(shared_s, 0, None) / (batch.end_s - batch.start_s)[:, None]
        cached = share @ (batch.prompt + batch.actions / 2)
        # [i, j]: whether j began while i was there. An engine that reads a prompt decodes nothing.
        begun = (batch.start_s >= batch.start_s[:, None]) & (batch.start_s < batch.end_s[:, None])
        table[mask] = np.column_stack(
            [batch.actions, batch.actions * share.sum(1), batch.actions * cached]
            + [begun @ batch.prompt]
        )
        # As many are there when a request begins as began by then and have not ended.
        present = (batch.start_s <= batch.start_s[:, None]) & (batch.end_s > batch.start_s[:, None])
        most = max(most, int(present.sum(1).max()))
    return table, most


def _relative_fit(
    table: np.ndarray, guess: np.ndarray, tightness: np.ndarray | None, together: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the terms for which ``table @ terms`` is nearest to 1, and their standard errors.

    guess: what the terms are taken for where the table leaves them open.
    tightness: for each term 1 / its earlier standard error; None: the guess counts as one row.
    together: how many rows share their deviations, on average.
    """
    count = len(table)
    # Terms are as unlike as seconds per round and per token: each gets a unit of its own.
    unit = np.maximum(np.sqrt((table**2).mean(0)), 1e-300)
    scaled = table / unit
    gram = scaled.T @ scaled
    target = scaled.sum(0)
    weak = np.ones(len(unit))
    terms = _non_negative(gram + np.diag(weak), target + weak * guess * unit)
    spread = float(((scaled @ terms - 1) ** 2).sum()) / max(count - len(unit), 1)
    spread *= max(together, 1.0)
    if tightness is not None:
        # Never nothing: two terms that always come together must not make the system singular.
        weak = np.maximum(spread * (tightness / unit) ** 2, 1e-9 * count)
        terms = _non_negative(gram + np.diag(weak), target + weak * guess * unit)
    covariance = spread * np.linalg.inv(gram + np.diag(weak))
    terms = terms / unit
    errors = np.maximum(np.sqrt(np.diag(covariance)), LEAST_SHARE) / unit
    # A term that no request has is as sure as a guess, which may be twice as much.
    return terms, np.where(table.any(0), errors, guess)


def _non_negative(gram: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Solves ``gram @ terms = target`` in the least-squares sense, without negative terms.

    It tries every subset of the few terms and takes the best one that has no negative term.
    """
    best = np.zeros(len(target))
    least = np.inf
    for mask in range(1, 2 ** len(target)):
        of_mask = [i for i in range(len(target)) if mask >> i & 1]
        terms = np.linalg.solve(gram[np.ix_(of_mask, of_mask)], target[of_mask])
        # The sum of squares, less what is the same for all terms.
        error = -float(terms @ target[of_mask])
        if terms.min() >= 0 and error < least:
            best = np.zeros(len(target))
            least = error
            best[of_mask] = terms
    return best
