"""Fits an engine's profile to the requests that it served in a rollout.

What a run measures of a request is its prompt, its actions, when it was sent to a replica and when
its answer was there. From that follow, in this order:

1. how many sequences the engine runs at once, and so when each request left the engine's queue and
   began to run (``_begin_of``);
2. what each request's seconds consist of: rounds, sequences in these rounds, cached tokens, prompt
   tokens (``_count_terms``);
3. the seconds of each of these terms, by least squares (``_solve``).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from gcore_core.contract.engine_profiles import EngineFit, Profile
from gcore_core.contract.measurements import Requests

#: The terms of a profile that are seconds, in the order of columns.
TERMS = ("base_s", "running_s", "cached_s", "prefill_s")
#: Requests that are needed to fit the terms one by one. With fewer, the prior is only scaled.
LEAST = 64
#: By how much the standard errors of a fit grow until the next step: their squares by a fifth, so
#: that a fit remembers some five steps.
DRIFT = 1.1
#: No standard error is below this share of a request's seconds: engines are not as regular as that.
LEAST_SHARE = 0.002
#: Numbers of sequences at once that are tried, besides the most requests that a replica had and the
#: number of the fit before.
PLACES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
#: A number of places is refused where this share of the requests would have ended before it began.
IMPOSSIBLE = 0.05
#: Numbers of places whose misfit is at most this many times the least one count as alike.
ALIKE = 1.1
#: Requests by which the number of places is chosen.
TRIED = 1024


def fit_engine(
    requests: Requests, prior: Profile, before: EngineFit | None = None, *, least: int = LEAST
) -> EngineFit:
    """Fits a profile to the requests that one role's replicas served in a rollout.

    Example: of 40 requests of 10 prompt tokens and 20 actions each that a replica runs together,
    each takes 20 rounds, in which 40 sequences run and 40 * (10 + 20 / 2) tokens are cached, and
    the reading of 40 prompts. So each request gives one equation:

        its seconds = 20 base_s + 20 * 40 running_s + 20 * 800 cached_s + 400 prefill_s

    Requests differ, so the terms can be told apart. What these requests leave open is taken from
    the fit of earlier steps, or without one from the prior.

    requests: those of the rollout, of all replicas of the role.
    prior: what the terms are in proportion to each other where nothing was measured. How large they
        are does not matter.
    before: the fit of the earlier steps.
    least: with fewer requests than this, the terms keep their proportions and are only scaled.
    """
    known = before.profile if before is not None and before.requests else None
    took_s = requests.end_s - requests.start_s
    requests = requests.take((took_s > 0) & (requests.actions + requests.prompt > 0))
    if not len(requests):
        return before or EngineFit(profile=prior)
    most = _most_at_once(requests)
    seen = max(most, known.max_running if known else 1)
    # Replicas that never had as many requests as they are known to run tell nothing about places.
    places = _choose_places(requests, most, known) if most == seen else seen
    running = replace(requests, start_s=_begin_of(requests, places))
    running = running.take(running.end_s > running.start_s)
    counts = _count_terms(running)
    took_s = running.end_s - running.start_s
    earlier = np.array([getattr(known or prior, name) for name in TERMS])
    expected_s = counts @ earlier
    # Whatever else runs on a machine slows all terms down alike.
    scale = float(np.median(took_s / np.maximum(expected_s, 1e-12)))
    guess = earlier * scale
    terms = guess
    errors = guess.copy()  # nothing is known but the scale: a term may as well be twice as much
    if len(running) >= least:
        guess_errors = None
        if before is not None and known is not None:
            guess_errors = DRIFT * scale * np.array([before.errors[name] for name in TERMS])
        solution = _solve(counts / took_s[:, None], guess, guess_errors, _mean_batch(counts))
        terms = solution.terms
        errors = solution.errors
    longest = int((running.prompt + running.actions).max())
    profile = Profile(
        **dict(zip(TERMS, terms.tolist(), strict=True)),
        max_running=places,
        # What that many of the longest requests fill, so that the cache never binds first.
        cache_tokens=max(places * longest, known.cache_tokens if known else 1),
    )
    return EngineFit(
        profile=profile,
        errors=dict(zip(TERMS, errors.tolist(), strict=True)),
        requests=len(running),
        expected_s=float(expected_s.mean()),
        measured_s=float(took_s.mean()),
    )


# -- how many run at once --------------------------------------------------------------------------


def _choose_places(requests: Requests, most: int, known: Profile | None) -> int:
    """Returns how many sequences a replica runs at once, as the requests tell.

    Each number is tried: requests beyond it wait for one of the others to end. With the right
    number, seconds follow from what runs; with a larger one, some requests take longer than their
    work, because they waited, and with a smaller one some take less. Where several numbers fit
    alike, the earlier fit's is kept if it is one of them. Otherwise the largest is taken, so where
    nobody waited it is ``most``.

    most: the most requests that a replica had at once.
    known: the profile of the earlier steps.
    """
    part = _some_batches(requests)
    earlier = known.max_running if known else most
    misfits: dict[int, float] = {}
    for places in sorted({*(n for n in PLACES if n < most), min(earlier, most), most}):
        running = replace(part, start_s=_begin_of(part, places))
        is_possible = running.end_s > running.start_s
        if 1 - is_possible.mean() <= IMPOSSIBLE:
            misfits[places] = _misfit(running.take(is_possible))
    bound = ALIKE * min(misfits.values(), default=0.0)
    alike = [places for places, misfit in misfits.items() if misfit <= bound]
    return earlier if earlier in alike else max(alike, default=most)


def _misfit(running: Requests) -> float:
    """Returns by what factor the best terms miss a request's seconds: its logarithm, on average.

    A factor beyond e counts as e, so that a few requests that the engine took out of turn do not
    decide.
    """
    counts = _count_terms(running)
    took_s = running.end_s - running.start_s
    terms = _solve(counts / took_s[:, None], np.zeros(len(TERMS)), None, 1.0).terms
    factors = np.maximum(counts @ terms, 1e-12) / took_s
    return float(np.minimum(np.abs(np.log(factors)), 1).mean())


def _begin_of(requests: Requests, places: int) -> np.ndarray:
    """Returns when each request began to run: float64[N], not before it was sent.

    A replica takes requests in the order in which they were sent, whenever a place is free.

    places: sequences that a replica runs at once.
    """
    began_s = requests.start_s.copy()
    for batch in _batches(requests):
        ends: list[float] = []  # of the requests that have a place, the earliest first
        for i in batch[np.argsort(requests.start_s[batch], kind="stable")].tolist():
            if len(ends) == places:
                began_s[i] = max(began_s[i], heapq.heappop(ends))
            heapq.heappush(ends, float(requests.end_s[i]))
    return began_s


def _most_at_once(requests: Requests) -> int:
    """Returns the most requests that a replica had at once, running or waiting."""
    most = 0
    for batch in _batches(requests):
        start_s = requests.start_s[batch]
        end_s = requests.end_s[batch]
        # When a request is sent, as many are there as were sent by then and have not ended.
        sent = np.searchsorted(np.sort(start_s), start_s, side="right")
        ended = np.searchsorted(np.sort(end_s), start_s, side="right")
        most = max(most, int((sent - ended).max()))
    return most


def _batches(requests: Requests) -> Iterable[np.ndarray]:
    """Yields the indexes of the requests of one replica in one step: only these ran together."""
    order = np.lexsort((requests.replica, requests.step))
    changes = np.diff(requests.replica[order]) | np.diff(requests.step[order])
    return np.split(order, np.flatnonzero(changes) + 1)


def _some_batches(requests: Requests) -> Requests:
    """Returns whole batches of the requests, at least ``TRIED`` requests where there are so many.

    It begins with the largest, since the most requests had to wait there.
    """
    indexes: list[np.ndarray] = []
    count = 0
    for batch in sorted(_batches(requests), key=len, reverse=True):
        indexes.append(batch)
        count += len(batch)
        if count >= TRIED:
            break
    return requests.take(np.concatenate(indexes))


# -- what a request's seconds consist of -----------------------------------------------------------


def _count_terms(requests: Requests) -> np.ndarray:
    """Returns how often each of ``TERMS`` counts in each request's seconds: float64[N, 4].

    A request has one round for each action. Each round is taken to have as many running sequences
    and cached tokens as there were on average while the request ran. An engine that reads a prompt
    decodes nothing, so a request also takes the prompts of all that begin while it runs, its own
    among them.
    """
    counts = np.zeros((len(requests), len(TERMS)))
    for indexes in _batches(requests):
        batch = requests.take(indexes)
        # [i, j]: seconds in which requests i and j both ran; then that as a share of i's seconds.
        both_s = np.minimum(batch.end_s[:, None], batch.end_s) - np.maximum(
            batch.start_s[:, None], batch.start_s
        )
        share = np.clip(both_s, 0, None) / (batch.end_s - batch.start_s)[:, None]
        cached = share @ (batch.prompt + batch.actions / 2)
        begun = (batch.start_s >= batch.start_s[:, None]) & (batch.start_s < batch.end_s[:, None])
        counts[indexes, 0] = batch.actions
        counts[indexes, 1] = batch.actions * share.sum(1)
        counts[indexes, 2] = batch.actions * cached
        counts[indexes, 3] = begun @ batch.prompt
    return counts


def _mean_batch(counts: np.ndarray) -> float:
    """Returns how many sequences run in a round, on average."""
    return float((counts[:, 1] / np.maximum(counts[:, 0], 1)).mean())


# -- the seconds of each term ----------------------------------------------------------------------


@dataclass(frozen=True)
class _Solution:
    """Holds fitted terms and their standard errors, both float64[4] in seconds."""

    terms: np.ndarray
    errors: np.ndarray


def _solve(
    table: np.ndarray, guess: np.ndarray, guess_errors: np.ndarray | None, batch: float
) -> _Solution:
    """Finds the terms, none negative, for which ``table @ terms`` is nearest to 1.

    This is a ridge regression towards ``guess``. A row of the table is a request's counts over its
    seconds, so what is minimised is the relative error of seconds, and a long request counts no
    more than a short one.

    guess: the terms where the table leaves them open.
    guess_errors: standard errors of the guess; None: the guess counts as much as one request.
    batch: requests that ran together, on average. They shared their rounds and so their deviations,
        and count as one for the standard errors.
    """
    rows = len(table)
    # Terms are as unlike as seconds per round and per token. In units of their own all are of the
    # size of one: 1 then is a term that makes all of a typical request.
    unit = np.maximum(np.sqrt((table**2).mean(0)), 1e-300)
    scaled = table / unit
    gram = scaled.T @ scaled
    target = scaled.sum(0)
    weight = np.ones(len(unit))  # of the guess, for each term, in requests
    terms = _non_negative(gram + np.diag(weight), target + weight * guess * unit)
    variance = float(((scaled @ terms - 1) ** 2).sum()) / max(rows - len(unit), 1)
    variance *= max(batch, 1.0)
    if guess_errors is not None:
        # A measurement weighs as one over its variance. The least weight is for two terms that
        # always come together, which would make the system singular.
        tightness = 1 / np.maximum(guess_errors, 1e-15)
        weight = np.maximum(variance * (tightness / unit) ** 2, 1e-9 * rows)
        terms = _non_negative(gram + np.diag(weight), target + weight * guess * unit)
    covariance = variance * np.linalg.inv(gram + np.diag(weight))
    errors = np.maximum(np.sqrt(np.diag(covariance)), LEAST_SHARE) / unit
    # A term that no request has is as sure as a guess, which may be twice as much.
    return _Solution(terms / unit, np.where(table.any(0), errors, guess))


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
