"""A second model of a rollout, to judge decisions that were made with the first one (``events``).

It shares with the first only what is to be placed: groups, replicas, the rule of oversampling. Here
an engine works in *stretches*, of at most ``STRETCH`` rounds each:

- Each stretch takes longer or shorter than the profile says, by a factor drawn from what a real
  engine's steps took (``slowness``), stalls included; among those that ran about as many sequences.
- Requests begin only between two stretches.
- When the cache is full, the sequence that began last is thrown out. It waits first in line and is
  read again with all that it had written.
- Prompts that were read lately are not read again: those of a group, and a judge's instructions.
  The cache forgets what was not used while as many tokens as it holds were written.
- Every request goes at once to the replica that owes the fewest, and waits there.

An event is the end of a stretch. What follows it is one turn of the loop in ``_walk``:

    1. issue      groups that the rule of oversampling asks for arrive
    2. send       requests go to the replicas that owe the fewest
    3. begin      a stretch, at each replica that has none and has requests
    4. pass time  up to the earliest end of a stretch, over all replicas; it is accounted for
    5. follow up  a record that has ended becomes a request to the judge; the last verdict of a
                  group ends the group, and may ask for more of them

For example, one replica, one group with records of 10 and 90 tokens, and all factors 1:

    both begin    10 rounds with two sequences, up to the end of the first record
    event         64 rounds with one sequence, since a stretch has at most 64
    event         16 more, which end the second record, and with it the group and the rollout
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numba import njit

from gcore_core.contract.engine_profiles import Profile
from gcore_core.kits.programs import KeepRate
from gcore_placement.queueing import events
from gcore_placement.queueing.events import (
    BASE,
    CACHE,
    CACHED,
    JUDGE,
    MOST,
    POLICY,
    PREFILL,
    RUNNING,
    _append,
    _least,
    _set,
    inlined,
)
from gcore_placement.queueing.step import Engines, Groups, Played, profile_table

#: Most rounds of decoding in a stretch; also how many of a real engine's steps a factor is from.
STRETCH = 64
#: Requests that a replica may owe; the rest waits for the next that owes fewer.
ROOM = 256
#: Factors are told apart by the share of an engine's places that are taken: at least 0, 1/16, ...
FULLNESS = (0.0, 1 / 16, 1 / 4, 1 / 2)
#: How often the fit to recorded steps is made, each time with other weights.
_FITS = 3
#: A step whose seconds are missed by at most this share counts in full.
_MET = 0.05

Recording: TypeAlias = dict[str, Any]


def slowness(recordings: Sequence[Recording], most: int) -> list[np.ndarray]:
    """Returns, for each of FULLNESS, factors by which stretches of steps missed a profile.

    The profile has the form that the first model assumes and is fitted to all recordings together,
    so what it cannot express is in the factors. The middle of all steps' factors is 1. Raises
    ValueError where the recordings hold too few steps of one kind.

    recordings: each a mapping of columns, one number a step: ``us``, ``decoding``, ``prefill`` and
        ``cached``; see ``benchmarks/vllm_steps.json``.
    most: the most sequences that ran at once in any of them.
    """
    tables = []
    for recording in recordings:
        columns = [np.array(recording[name], float) for name in ("decoding", "cached", "prefill")]
        tables.append(np.column_stack([np.ones(len(columns[0])), *columns]))
    seconds = [np.array(recording["us"], float) for recording in recordings]
    terms = _fit(np.concatenate(tables), np.concatenate(seconds))
    of_fullness: list[list[float]] = [[] for _ in FULLNESS]
    for table, took in zip(tables, seconds, strict=True):
        expected = table @ terms
        for begin in range(0, len(took) - STRETCH + 1, STRETCH // 4):
            part = slice(begin, begin + STRETCH)
            share = table[part, 1].mean() / most
            level = int(np.searchsorted(FULLNESS, share, side="right")) - 1
            of_fullness[level].append(float(took[part].sum() / expected[part].sum()))
    if not all(of_fullness):
        raise ValueError(f"the recordings leave one of {FULLNESS} without {STRETCH} steps in a row")
    return [np.array(factors) for factors in of_fullness]


def play(
    groups: Groups,
    engines: Engines,
    profiles: tuple[Profile, Profile],
    needed: int,
    rate: KeepRate,
    switch_s: float,
    *,
    factors: Sequence[np.ndarray],
    instructions: float,
    seed: int,
) -> Played:
    """Simulates a rollout on the second model; see ``gcore_placement.queueing.step.play``.

    Raises ValueError for mode coresident, of which this model knows nothing.

    factors: for each of FULLNESS, what a stretch's seconds may be multiplied with; not empty.
    instructions: tokens that all prompts of the judge begin with.
    seed: of the factors that are drawn.
    """
    if engines.mode == "coresident":
        raise ValueError("the second model has no engines that hold both models")
    longest = max(map(len, factors))
    drawn = np.stack([np.resize(levels, longest) for levels in factors])
    in_turn = engines.mode == "colocated"
    serves = np.full(engines.policy, 3, np.int8) if in_turn else engines.serves
    actions, prompts = groups.tokens()
    result = _walk_once(
        actions,
        prompts,
        groups.kept,
        serves,
        profile_table(profiles),
        rate.rule(),
        needed,
        float(switch_s),
        in_turn,
        drawn,
        float(instructions),
        seed,
    )
    return Played.of(result, groups, serves, len(serves))


def _fit(table: np.ndarray, took: np.ndarray) -> np.ndarray:
    """Returns the terms, none negative, that miss each step's seconds by the least share.

    A step that stalled must not bend the fit, so the fit is repeated: each time a step counts the
    less, the further the fit before was off there. At last all terms are scaled so that the middle
    step's seconds are met.

    table: float64[steps, terms], what each term is multiplied with in each step.
    took: float64[steps], the seconds of each step.
    """
    weights = np.ones(len(took))
    terms = np.zeros(table.shape[1])
    for _ in range(_FITS):
        # Each row is divided by the step's seconds, so that what is made small is a share of them.
        terms = _solve(table / took[:, None] * weights[:, None], weights)
        missed = np.abs(took / (table @ terms) - 1)
        weights = 1 / np.maximum(missed, _MET) ** 0.5
    return terms * float(np.median(took / (table @ terms)))


def _solve(table: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Returns the terms of least squares, none negative.

    A term that comes out negative is left out, which means that it is 0, and the rest is solved
    again.

    table: float64[rows, terms]; the terms' sums over its rows should be ``wanted``.
    """
    used = np.arange(table.shape[1])
    while True:
        terms = np.zeros(table.shape[1])
        terms[used] = np.linalg.lstsq(table[:, used], wanted, rcond=None)[0]
        if (terms[used] >= 0).all():
            return terms
        used = used[terms[used] > 0]


class _Requests(NamedTuple):
    """What is known of each request, by its number.

    A record's number is that of its request to the policy. Its request to the judge has the same
    number plus the number of records, N * G.

    group: int64[2 * N * G], its group.
    actions: float64[2 * N * G], tokens that it writes in all.
    prompts: float64[2 * N * G], tokens that are read before those.
    left: float64[2 * N * G], tokens that it has still to write.
    holds: float64[2 * N * G], tokens that it has in the cache; while it waits, those that will be
        read when it begins.
    following: int64[2 * N * G], the next request that waits at the same replica; -1: none.
    times: float64[3, 2 * N * G], seconds of arrival, of being sent to a replica, and of its end.
    replica: int64[2 * N * G], the replica that it was sent to; -1: none yet.
    """

    group: np.ndarray
    actions: np.ndarray
    prompts: np.ndarray
    left: np.ndarray
    holds: np.ndarray
    following: np.ndarray
    times: np.ndarray
    replica: np.ndarray


class _Replicas(NamedTuple):
    """The state of each replica, by its number.

    running: int64[R, most], the requests that run, in the order in which they began.
    sequences: int64[R], how many run.
    first, last: int64[R], ends of the list of requests that wait there; -1: none waits.
    owes: int64[R], requests that were sent there and have not ended.
    cached: float64[R], tokens in the cache.
    written: float64[R], tokens that were ever put into the cache; the clock by which it forgets.
    used: float64[R, N], ``written`` when the prompt of each group was last used.
    used_instructions: float64[R], the same of the judge's instructions.
    rounds: float64[R], rounds of the stretch that runs.
    until: float64[R], seconds at which it ends; infinite without one.
    ends: ``until`` as a tree of minima; see ``events``.
    chance: uint64[R], state of the generator of random numbers.
    """

    running: np.ndarray
    sequences: np.ndarray
    first: np.ndarray
    last: np.ndarray
    owes: np.ndarray
    cached: np.ndarray
    written: np.ndarray
    used: np.ndarray
    used_instructions: np.ndarray
    rounds: np.ndarray
    until: np.ndarray
    ends: np.ndarray
    chance: np.ndarray


class _Rollout(NamedTuple):
    """What is known of the rollout as a whole; [2] is of the policy and of the judge.

    waiting: int64[2, N * G], a queue for each role, of requests that no replica has room for.
    head, tail: int64[2], the place of the queue's first, and the place behind its last.
    active: int64[2], requests that have arrived and not ended.
    role_of: int64[R], the role that each replica serves now.
    unended: int64[N], records of each group whose last request has not ended.
    width: float64[2], replicas that serve the role.
    idle: float64[2], those of them without a stretch. Where all take turns, every replica counts
        as the policy's here.
    spent: float64[SPENT], replica-seconds; see ``events``.
    starting: int64[R + 1], the replicas that begin a stretch in this turn of the loop.
    n_starting: int64[1], how many they are.
    ended: int64[most], requests that ended with the latest stretch.
    """

    waiting: np.ndarray
    head: np.ndarray
    tail: np.ndarray
    active: np.ndarray
    role_of: np.ndarray
    unended: np.ndarray
    width: np.ndarray
    idle: np.ndarray
    spent: np.ndarray
    starting: np.ndarray
    n_starting: np.ndarray
    ended: np.ndarray


@njit
def _walk(
    actions: np.ndarray,
    prompts: np.ndarray,
    keep: np.ndarray,
    serves: np.ndarray,
    profiles: np.ndarray,
    rule: Any,
    needed: int,
    switch_s: float,
    in_turn: bool,
    factors: np.ndarray,
    instructions: float,
    seed: int,
) -> events.Played:
    """Walks through one rollout; arguments as in ``events._play`` and ``play``.

    Returns what ``events._play`` returns.
    """
    groups = actions.shape[1]
    samples = actions.shape[2]
    most = int(max(profiles[POLICY, MOST], profiles[JUDGE, MOST]))
    requests = _new_requests(actions, prompts)
    replicas = _new_replicas(len(serves), groups, most, seed)
    rollout = _new_rollout(serves, groups, samples, most)
    order = np.empty(groups, np.int64)
    now = 0.0
    phase = POLICY  # the role that all replicas serve now, where they take turns
    kept = 0
    finished = 0
    issued = 0
    in_flight = 0  # groups that are issued and have not finished
    issue = min(events.groups_missing(needed, 0, 0, 0, rule), groups)  # groups to be issued now
    while True:
        # -- 1: groups are issued
        _issue(issued * samples, (issued + issue) * samples, now, requests, rollout)
        issued += issue
        in_flight += issue
        issue = 0
        # nothing is left for this role: all replicas change to the other
        if in_turn and rollout.active[phase] == 0 and rollout.active[1 - phase] > 0:
            phase = 1 - phase
            rollout.role_of[:] = phase
            now += switch_s
            rollout.spent[events.SWAPPING] += switch_s * len(serves)

        # -- 2: what waits is sent to replicas; one that had nothing to do begins at once
        for role in range(2):
            if not in_turn or role == phase:
                _send_waiting(role, now, in_turn, serves, requests, replicas, rollout)

        # -- 3: stretches begin
        for n in range(rollout.n_starting[0]):
            i = rollout.starting[n]
            _begin_stretch(
                i, now, in_turn, requests, replicas, rollout, profiles, instructions, factors
            )

        # -- 4: time passes until the first stretch ends
        if in_flight == 0 or replicas.ends[1] == np.inf:
            break
        i = _least(replicas.ends)
        _account(replicas.until[i] - now, in_turn, phase, rollout)
        now = replicas.until[i]
        rollout.starting[0] = i
        rollout.n_starting[0] = 1

        # -- 5: what has ended with it is followed up
        role = rollout.role_of[i]
        for n in range(_end_stretch(i, now, requests, replicas, rollout.ended)):
            group = _follow_up(rollout.ended[n], role, now, requests, rollout)
            if group < 0:
                continue
            order[finished] = group
            finished += 1
            in_flight -= 1
            kept += keep[group]
            if not in_turn or in_flight == 0:
                more = events.groups_missing(needed, kept, finished, in_flight + issue, rule)
                issue = min(issue + more, groups - issued)
    shape = (2, groups, samples)
    return (
        now,
        issued,
        kept,
        rollout.spent,
        order[:finished],
        requests.times.reshape((3, *shape)),
        requests.replica.reshape(shape),
    )


# -- how it begins ---------------------------------------------------------------------------------


@njit
def _new_requests(actions: np.ndarray, prompts: np.ndarray) -> _Requests:
    """Returns the requests before any of them was sent; arguments as in ``events._play``."""
    count = actions.size
    return _Requests(
        np.arange(count) % (count // 2) // actions.shape[2],
        actions.reshape(count),
        prompts.reshape(count),
        actions.reshape(count).copy(),
        prompts.reshape(count).copy(),
        np.full(count, -1, np.int64),
        np.zeros((3, count)),
        np.full(count, -1, np.int64),
    )


@njit
def _new_replicas(count: int, groups: int, most: int, seed: int) -> _Replicas:
    """Returns ``count`` replicas that have nothing to do.

    most: the most requests that run at once at any of them.
    seed: of the factors that are drawn.
    """
    leaves = 1  # of the tree: a power of two
    while leaves < count:
        leaves *= 2
    chance = np.empty(count, np.uint64)
    for i in range(count):
        chance[i] = np.uint64(seed * 1_000_003 + i * 7919 + 1)
    return _Replicas(
        np.empty((count, most), np.int64),
        np.zeros(count, np.int64),
        np.full(count, -1, np.int64),
        np.full(count, -1, np.int64),
        np.zeros(count, np.int64),
        np.zeros(count),
        np.zeros(count),
        np.full((count, groups), -np.inf),
        np.full(count, -np.inf),
        np.zeros(count),
        np.full(count, np.inf),
        np.full(2 * leaves, np.inf),
        chance,
    )


@njit
def _new_rollout(serves: np.ndarray, groups: int, samples: int, most: int) -> _Rollout:
    """Returns what is known before anything has happened.

    most: the most requests that run at once at any replica.
    """
    width = np.zeros(2)
    for role in range(2):
        width[role] = ((serves >> role) & 1).sum()
    return _Rollout(
        np.empty((2, groups * samples), np.int64),
        np.zeros(2, np.int64),
        np.zeros(2, np.int64),
        np.zeros(2, np.int64),
        np.where(serves & 1, POLICY, JUDGE),
        np.full(groups, samples),
        width,
        width.copy(),
        np.zeros(events.SPENT),
        np.empty(len(serves) + 1, np.int64),
        np.zeros(1, np.int64),
        np.empty(most, np.int64),
    )


# -- 1 and 2: requests arrive and are sent ---------------------------------------------------------


@inlined
def _issue(begin: int, end: int, now: float, requests: _Requests, rollout: _Rollout) -> None:
    """Has the records of new groups arrive: those from ``begin`` to before ``end``."""
    for record in range(begin, end):
        _arrive(record, POLICY, now, requests, rollout)


@inlined
def _arrive(request: int, role: int, now: float, requests: _Requests, rollout: _Rollout) -> None:
    """Puts a request into the queue of its role."""
    rollout.waiting[role, rollout.tail[role]] = request
    rollout.tail[role] += 1
    rollout.active[role] += 1
    requests.times[0, request] = now


@inlined
def _send_waiting(
    role: int,
    now: float,
    in_turn: bool,
    serves: np.ndarray,
    requests: _Requests,
    replicas: _Replicas,
    rollout: _Rollout,
) -> None:
    """Sends a role's queue to its replicas until each owes as many requests as it may."""
    while rollout.head[role] < rollout.tail[role]:
        i = _owes_least(role, serves, replicas)
        if i < 0 or replicas.owes[i] >= ROOM:
            break
        _send(rollout.waiting[role, rollout.head[role]], i, now, requests, replicas)
        rollout.head[role] += 1
        if replicas.until[i] == np.inf:  # it has no stretch, so one begins now
            replicas.until[i] = now
            rollout.idle[POLICY if in_turn else role] -= 1
            rollout.starting[rollout.n_starting[0]] = i
            rollout.n_starting[0] += 1


@njit
def _owes_least(role: int, serves: np.ndarray, replicas: _Replicas) -> int:
    """Returns the first replica of a role that owes the fewest requests; -1: there is none."""
    least = -1
    for i in range(len(serves)):
        if serves[i] >> role & 1 and (least < 0 or replicas.owes[i] < replicas.owes[least]):
            least = i
    return least


@inlined
def _send(request: int, i: int, now: float, requests: _Requests, replicas: _Replicas) -> None:
    """Sends a request to a replica, where it waits as the last."""
    _append(i, request, replicas.first, replicas.last, requests.following)
    replicas.owes[i] += 1
    requests.times[1, request] = now
    requests.replica[request] = i


# -- 3: a stretch begins ---------------------------------------------------------------------------


@inlined
def _begin_stretch(
    i: int,
    now: float,
    in_turn: bool,
    requests: _Requests,
    replicas: _Replicas,
    rollout: _Rollout,
    profiles: np.ndarray,
    instructions: float,
    factors: np.ndarray,
) -> None:
    """Has a replica begin its next stretch; it rests where it has no requests.

    What runs in it is decided first, then how many rounds it has and when it ends.
    """
    role = rollout.role_of[i]
    terms = profiles[role]
    read = _change_batch(i, role, requests, replicas, terms, instructions)
    if replicas.sequences[i] == 0:
        replicas.until[i] = np.inf
        rollout.idle[POLICY if in_turn else role] += 1
    else:
        replicas.rounds[i] = _rounds(i, requests, replicas, terms)
        share = replicas.sequences[i] / terms[MOST]
        took = _seconds(i, read, replicas, terms)
        took *= _draw(i, share, replicas, factors)
        replicas.until[i] = now + took
        rollout.spent[events.FILLED + role] += took * share
    _set(replicas.ends, i, replicas.until[i])


@njit
def _change_batch(
    i: int,
    role: int,
    requests: _Requests,
    replicas: _Replicas,
    terms: np.ndarray,
    instructions: float,
) -> float:
    """Decides what runs in a replica's next stretch; returns the tokens that are read before it.

    Where the next round would not fit into the cache, requests are thrown out, and none begins.

    terms: the row of ``profiles`` of the role.
    """
    if _is_full(i, replicas, terms):
        while _is_full(i, replicas, terms):
            _throw_out(i, requests, replicas)
        return 0.0
    read = 0.0
    while replicas.first[i] >= 0 and replicas.sequences[i] < terms[MOST]:
        request = replicas.first[i]
        tokens = replicas.cached[i] + requests.holds[request]
        if replicas.sequences[i] and tokens > terms[CACHE]:
            break
        read += _begin(i, role, requests, replicas, terms, instructions)
    return read


@njit
def _is_full(i: int, replicas: _Replicas, terms: np.ndarray) -> bool:
    """Returns whether a round, which adds a token to each request, would overfill the cache.

    A request that runs alone is never thrown out, so with one the cache does not count as full.
    """
    sequences = replicas.sequences[i]
    is_full: bool = sequences > 1 and replicas.cached[i] + sequences > terms[CACHE]
    return is_full


@njit
def _throw_out(i: int, requests: _Requests, replicas: _Replicas) -> None:
    """Has the request that began last wait again, before all others."""
    replicas.sequences[i] -= 1
    request = replicas.running[i, replicas.sequences[i]]
    replicas.cached[i] -= requests.holds[request]
    requests.following[request] = replicas.first[i]
    replicas.first[i] = request
    if replicas.last[i] < 0:
        replicas.last[i] = request


@njit
def _begin(
    i: int,
    role: int,
    requests: _Requests,
    replicas: _Replicas,
    terms: np.ndarray,
    instructions: float,
) -> float:
    """Has the first request that waits at a replica begin; returns the tokens that it reads.

    Not read again is what the cache remembers: of the policy's requests the prompt of the group, of
    the judge's the instructions. It remembers them while fewer tokens than it holds were written
    since they were last used. At least one token is read.
    """
    request = replicas.first[i]
    replicas.first[i] = requests.following[request]
    if replicas.first[i] < 0:
        replicas.last[i] = -1
    replicas.running[i, replicas.sequences[i]] = request
    replicas.sequences[i] += 1
    replicas.cached[i] += requests.holds[request]
    group = requests.group[request]
    written = replicas.written[i]
    read: float = requests.holds[request]
    if role == POLICY:
        if written - replicas.used[i, group] < terms[CACHE]:
            read -= requests.prompts[request]
        replicas.used[i, group] = written
    else:
        if written - replicas.used_instructions[i] < terms[CACHE]:
            read -= instructions
        replicas.used_instructions[i] = written
    read = max(read, 1.0)
    replicas.written[i] += read
    return read


@njit
def _rounds(i: int, requests: _Requests, replicas: _Replicas, terms: np.ndarray) -> float:
    """Returns how many rounds a replica's next stretch has, at least 1 and at most STRETCH.

    It ends with the first of its requests, and before the cache is full.
    """
    sequences = replicas.sequences[i]
    shortest = np.inf
    for n in range(sequences):
        shortest = min(shortest, requests.left[replicas.running[i, n]])
    room = max((terms[CACHE] - replicas.cached[i]) // sequences, 1.0)
    rounds: float = max(min(shortest, min(room, float(STRETCH))), 1.0)
    return rounds


@njit
def _seconds(i: int, read: float, replicas: _Replicas, terms: np.ndarray) -> float:
    """Returns the seconds of a replica's next stretch as its profile says.

    Each of its x rounds finds as many more tokens cached as sequences run, so all rounds together
    find x cached + sequences (0 + 1 + ... + (x - 1)) tokens.

    read: tokens of prompts that are read before it.
    """
    sequences = replicas.sequences[i]
    x = replicas.rounds[i]
    took: float = x * (terms[BASE] + terms[RUNNING] * sequences)
    took += terms[CACHED] * (x * replicas.cached[i] + sequences * x * (x - 1) / 2)
    took += terms[PREFILL] * read
    return took


@njit
def _draw(i: int, share: float, replicas: _Replicas, factors: np.ndarray) -> float:
    """Draws by which factor a stretch takes longer than the profile says.

    share: the share of the replica's places that are taken; it says which of ``factors`` may be
        drawn.
    """
    level = 0
    while level + 1 < len(FULLNESS) and share >= FULLNESS[level + 1]:
        level += 1
    # a linear congruential generator with Knuth's constants for MMIX; its high bits are the good
    # ones
    state = replicas.chance[i] * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
    replicas.chance[i] = state
    factor: float = factors[level, int(state >> np.uint64(33)) % factors.shape[1]]
    return factor


# -- 4 and 5: time passes, and a stretch ends ------------------------------------------------------


@inlined
def _account(passed: float, in_turn: bool, phase: int, rollout: _Rollout) -> None:
    """Adds ``passed`` seconds of every replica to ``spent``, but for FILLED, which
    ``_begin_stretch`` adds.
    """
    for role in range(2):
        if in_turn and role != phase:
            continue
        resting = rollout.idle[POLICY if in_turn else role]
        rollout.spent[events.BUSY + role] += passed * (rollout.width[role] - resting)
        rollout.spent[_cause(role, rollout.active)] += passed * resting


@inlined
def _cause(role: int, active: np.ndarray) -> int:
    """Returns the row of ``spent`` for replicas of a role that have nothing to do.

    active: of each role the requests that have not ended.
    """
    if role == POLICY:
        return events.TAIL if active[POLICY] else events.NO_VERDICT
    return events.NO_RECORD if active[POLICY] else events.JUDGE_TAIL


@njit
def _end_stretch(
    i: int, now: float, requests: _Requests, replicas: _Replicas, ended: np.ndarray
) -> int:
    """Gives each running request of a replica the tokens of its stretch.

    Writes the requests that have ended by it into ``ended``, and returns how many they are. The
    rest runs on, in the same order.
    """
    rounds = replicas.rounds[i]
    tokens = rounds * replicas.sequences[i]
    replicas.cached[i] += tokens
    replicas.written[i] += tokens
    remaining = 0
    done = 0
    for n in range(replicas.sequences[i]):
        request = replicas.running[i, n]
        requests.left[request] -= rounds
        requests.holds[request] += rounds
        if requests.left[request] > 0:
            replicas.running[i, remaining] = request
            remaining += 1
        else:
            replicas.cached[i] -= requests.holds[request]
            requests.times[2, request] = now
            ended[done] = request
            done += 1
    replicas.sequences[i] = remaining
    replicas.owes[i] -= done
    return done


@inlined
def _follow_up(request: int, role: int, now: float, requests: _Requests, rollout: _Rollout) -> int:
    """Follows up a request that has ended: by one to the judge, or by the end of its group.

    Returns its group if that ends with it, else -1.
    """
    total = rollout.waiting.shape[1]
    record = request % total
    rollout.active[role] -= 1
    if role == POLICY and requests.actions[total + record] > 0:
        _arrive(total + record, JUDGE, now, requests, rollout)
        return -1
    group: int = requests.group[record]
    rollout.unended[group] -= 1
    return group if rollout.unended[group] == 0 else -1


def _compiled_once(rule: int) -> Callable[..., events.Played]:
    """Returns ``_walk``, kept on disk between processes; see ``events``."""

    @njit(cache=True)
    def walk(
        actions: np.ndarray,
        prompts: np.ndarray,
        keep: np.ndarray,
        serves: np.ndarray,
        profiles: np.ndarray,
        rule_numbers: Any,
        needed: int,
        switch_s: float,
        in_turn: bool,
        factors: np.ndarray,
        instructions: float,
        seed: int,
    ) -> events.Played:
        """Walks through one rollout; see ``_walk``."""
        walked: events.Played = _walk(
            actions,
            prompts,
            keep,
            serves,
            profiles,
            rule_numbers,
            needed + 0 * rule,
            switch_s,
            in_turn,
            factors,
            instructions,
            seed,
        )
        return walked

    compiled: Callable[..., events.Played] = walk
    return compiled


_walk_once = _compiled_once(events.RULE_CHECKSUM)
