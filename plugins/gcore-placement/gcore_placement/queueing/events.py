"""The compiled part: one rollout, from the first group issued to the last verdict, event by event.

**Time.** Every replica decodes in rounds, each of which gives every running sequence a token. With
b sequences running and K tokens cached, a round takes A = base + running b + cached K seconds,
where base, running and cached are a profile's coefficients. K grows by b each round, so x rounds
take A x + cached b x^2 / 2 seconds. Between two events nothing else changes, and the equation is
solved for x exactly; x is a real number.

**Events.** An event is the end of a sequence. What follows it is one turn of the loop in ``_play``:

    1. issue      groups that the rule of oversampling asks for arrive
    2. start      requests that wait begin, where a replica has room
    3. foresee    for each replica where something has changed: when does its next sequence end?
    4. pass time  up to the earliest of these ends, over all replicas; it is accounted for
    5. follow up  a record that has ended becomes a request to the judge; the last verdict of a
                  group ends the group, and may ask for more of them

For example, one replica of the policy, no judge, base 10 ms, running 1 ms, cached 0, and one group
with records of 10 and 30 tokens:

    0 ms          both begin; a round takes 10 + 2 x 1 = 12 ms, so the first ends after 10 rounds
    120 ms        event: the first has ended; a round takes 11 ms, and the other lacks 20 of them
    340 ms        event: the second has ended, and with it the group and the rollout

**Places.** Waiting requests go to the replica that runs the fewest sequences. A replica that serves
both roles gives each of them a round in turn: each round reads the weights of its role.

**Dealing.** The policy's records are dealt out by shards. A shard gives each record to the replica
that still has the fewest of its records, as long as they are fewer than the shard's room there; the
record then waits at that replica. With a room of 0 records wait in one queue for all replicas, as
requests to the judge do.

**State** is held in a few arrays that the compiled functions change in place: ``requests``,
``state``, ``heaps``, ``trees`` and ``load``. Their rows and columns have names, and are described
there. The arrays are passed one by one: in tuples with names each access counts a reference, and a
rollout takes four times as long.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeAlias

import numpy as np
from numba import njit

from gcore_core.kits.programs import keep_rate

# The core's own rule of oversampling, compiled. Compiled code can call only compiled functions, so
# ``covers`` is replaced by its compiled form among the globals that the rule sees.
_RULE = (keep_rate.groups_missing, keep_rate.covers)
groups_missing = njit(
    FunctionType(
        keep_rate.groups_missing.__code__, {**vars(keep_rate), "covers": njit(keep_rate.covers)}
    )
)

#: Compiles a function into those that call it. A call that passes arrays takes about as long as
#: what most functions here do, and there are several for each event.
inlined = njit(inline="always")

#: What ``_play`` returns; see there.
Played: TypeAlias = tuple[float, int, int, np.ndarray, np.ndarray, np.ndarray, np.ndarray]

#: The two roles, by which the arrays are indexed.
POLICY = 0
JUDGE = 1

#: Rows of ``requests``, float64[6, 2, N * G]: of each role the request of each record. Tokens that
#: it writes, and that are read before those; seconds of its arrival, start and end; the replica
#: that serves it, -1 for none yet.
ACTIONS, PROMPT, ARRIVAL, START, END, REPLICA = range(6)

#: Columns of ``state``, float64[R, 8]: of each of R replicas. Rounds done; seconds of prompts that
#: are still to be read; seconds up to which both are right, see ``_advance``; whether something has
#: changed at it in this turn of the loop, see ``_note_change``.
ROUNDS, DEBT, UP_TO, CHANGED = range(4)
#: Sequences that run, a column for each role: SEQUENCES + role.
SEQUENCES = 4
#: A number for each role, OFFSET + role, such that the role's cached tokens are
#: offset + sequences * rounds. A sequence of prompt p that started in round r has p + rounds - r
#: tokens, so it adds p - r to the offset; nothing has to be updated each round.
OFFSET = 6

#: Rows of ``trees``, float64[3, 2 * W]: trees of minima over replicas with W leaves, see ``_set``.
#: POLICY and JUDGE: sequences that a replica runs, of both roles together; infinite where it does
#: not serve the role. UPCOMING: seconds at which its next sequence ends.
UPCOMING = 2

#: Rows of ``load``, int64[6, 2]: counts of each role. Requests that have arrived and not ended;
#: replicas that run any of them; places that are taken; replicas that serve the role; of the role's
#: queue the place of its first, and the place behind its last.
ACTIVE, RUN_ANY, TAKEN, SERVING, HEAD, LAST = range(6)

#: Rows of ``spent``, in replica-seconds. BUSY and FILLED have one row for each role: BUSY + role.
#: A replica that runs anything counts as busy.
BUSY = 0
#: The share of a replica's places (sequences that can run at once) that are taken.
FILLED = 2
#: Idle replica-seconds, a row for each cause; ``step.CAUSES`` says what the causes are.
TAIL = 4
NO_VERDICT = 5
NO_RECORD = 6
JUDGE_TAIL = 7
SWAPPING = 8
#: Number of rows of ``spent``.
SPENT = 9

#: Columns of ``profiles``. BASE, RUNNING and CACHED are seconds of a round: in all, for each
#: sequence, for each cached token. PREFILL is seconds for each prompt token. MOST is the most
#: sequences that run at once, CACHE the most cached tokens.
BASE, RUNNING, CACHED, PREFILL, MOST, CACHE = range(6)


@njit
def _set(tree: np.ndarray, leaf: int, value: float) -> None:
    """Sets a leaf of a tree of minima.

    The tree is an array of twice as many entries as leaves: the root is entry 1, the children of
    entry i are 2 i and 2 i + 1, the leaves are the second half, and each inner entry is the less of
    its children. So the root holds the least leaf, and a change touches only one path to it.
    """
    at = leaf + len(tree) // 2
    tree[at] = value
    at //= 2
    while at:
        least = min(tree[2 * at], tree[2 * at + 1])
        if tree[at] == least:
            break
        tree[at] = least
        at //= 2


@njit
def _least(tree: np.ndarray) -> int:
    """Returns the number of the first leaf that holds the least value."""
    at = 1
    half = len(tree) // 2
    while at < half:
        at = 2 * at if tree[2 * at] == tree[at] else 2 * at + 1
    return at - half


@njit
def _push(heap: np.ndarray, size: int, end: float, request: int) -> None:
    """Adds a request to one replica's binary heap of ``size`` requests, the earliest end first.

    heap: float64[2, most], a row of ends and one of requests. An end is the number of the replica's
        round in which the request ends. Requests to the judge are counted on from the number of
        records.
    """
    at = size
    while at and heap[0, (at - 1) // 2] > end:
        heap[0, at] = heap[0, (at - 1) // 2]
        heap[1, at] = heap[1, (at - 1) // 2]
        at = (at - 1) // 2
    heap[0, at] = end
    heap[1, at] = request


@njit
def _pop(heap: np.ndarray, size: int) -> None:
    """Removes the first of ``size`` requests from a heap; see ``_push``."""
    # the last one takes the first place and sinks until no child is earlier
    end = heap[0, size - 1]
    request = heap[1, size - 1]
    at = 0
    while 2 * at + 1 < size - 1:
        child = 2 * at + 1
        if child + 1 < size - 1 and heap[0, child + 1] < heap[0, child]:
            child += 1
        if heap[0, child] >= end:
            break
        heap[0, at] = heap[0, child]
        heap[1, at] = heap[1, child]
        at = child
    heap[0, at] = end
    heap[1, at] = request


@njit
def _play(  # noqa: C901, PLR0912, PLR0915
    actions: np.ndarray,
    prompts: np.ndarray,
    keep: np.ndarray,
    serves: np.ndarray,
    profiles: np.ndarray,
    rule: Any,
    needed: int,
    switch_s: float,
    in_turn: bool,
    dealing: tuple[int, int],
) -> Played:
    """Plays one rollout; ``play`` of ``step`` has the arguments with names and checks.

    actions: float64[2, N, G], tokens that each record takes of the policy and of the judge.
    prompts: float64[2, N, G], tokens that are read before those.
    keep: bool[N], whether each group teaches.
    serves: int8[replicas], bit 0 for the policy, bit 1 for the judge.
    profiles: float64[2, 6], those of the policy and the judge; columns as above.
    rule: float64[4 + quarters], the numbers of the rule of oversampling; see
        ``keep_rate.groups_missing``.
    needed: groups that teach, which the rollout must end with.
    switch_s: seconds that a change of roles takes.
    in_turn: whether all replicas serve one role, then all the other.
    dealing: (room, shards), see the module.

    Returns, in this order:

    seconds: how long the rollout took.
    issued: groups issued.
    kept: of those, groups that teach.
    spent: float64[SPENT], replica-seconds.
    order: int64[finished], the groups in the order in which they finished.
    times: float64[3, 2, N, G], seconds of arrival, start and end of each request.
    replica: int64[2, N, G], the replica that served each request; -1 if none did.
    """
    groups = actions.shape[1]
    samples = actions.shape[2]
    total = groups * samples
    count = len(serves)
    room, shards = dealing
    requests = _new_requests(actions, prompts)
    state = np.zeros((count, 8))
    # of each replica the requests that run, as a heap; see ``_push``
    heaps = np.empty((count, 2, int(profiles[0, MOST] + profiles[1, MOST])))
    trees = _new_trees(serves)
    load = _new_load(serves)
    waiting = np.empty((2, total), np.int64)  # a queue for each role, of records
    changed = np.zeros(count + 1, np.int64)  # how many replicas have changed, then which
    # Linked lists of records: what each replica was dealt, and, behind those, what each shard has
    # still to deal. ``following`` is the next record in the same list, -1 at the end.
    first_of = np.full(count + shards, -1, np.int64)
    last_of = np.full(count + shards, -1, np.int64)
    following = np.empty(total, np.int64)
    shard_of = np.empty(groups, np.int64)
    # of each shard: a tree of how many of its records each replica has, and how many it may have
    leaves = trees.shape[1] // 2
    dealt = _new_dealt(shards, load[SERVING, POLICY], trees.shape[1])
    rooms = np.zeros(shards)
    unended = np.full(groups, samples)  # records of each group whose last request has not ended
    order = np.empty(groups, np.int64)
    spent = np.zeros(SPENT)
    now = 0.0
    phase = POLICY  # the role that all replicas serve now, where they serve one after the other
    kept = 0
    finished = 0
    issued = 0
    in_flight = 0  # groups that are issued and have not finished
    issue = min(groups_missing(needed, 0, 0, 0, rule), groups)  # groups to be issued now
    while True:
        # -- 1: groups are issued; their records wait in the common queue, or are dealt out
        for record in range(issued * samples, (issued + issue) * samples):
            _arrive(record, POLICY, now, requests, load)
            if room == 0:
                _queue(record, POLICY, waiting, load)
        if room and issue:
            begin = issued
            for shard in range(shards):
                # as many groups as every other shard, to within one
                end = begin + issue // shards + (shard < issue % shards)
                shard_of[begin:end] = shard
                for record in range(begin * samples, end * samples):
                    _append(count + shard, record, first_of, last_of, following)
                # with very many records a larger room: half of a replica's even share of them
                half_share = (end - begin) * samples // (2 * load[SERVING, POLICY])
                rooms[shard] = max(rooms[shard], room, half_share)
                _deal(shard, dealt, rooms, first_of, last_of, following, state, changed)
                begin = end
        issued += issue
        in_flight += issue
        issue = 0
        # nothing is left for this role: all replicas change to the other
        if in_turn and load[ACTIVE, phase] == 0 and load[ACTIVE, 1 - phase] > 0:
            phase = 1 - phase
            now += switch_s
            spent[SWAPPING] += switch_s * load[SERVING, phase]

        # -- 2: requests start
        if not in_turn or phase == POLICY:
            _start_dealt(
                now, first_of, following, requests, state, heaps, trees, load, changed, profiles
            )
        for role in range(2):
            if not in_turn or role == phase:
                _start_waiting(
                    role, now, waiting, requests, state, heaps, trees, load, changed, profiles
                )

        # -- 3: when the next sequence of each changed replica ends
        _foresee(now, state, heaps, trees, changed, profiles)

        # -- 4: time passes until the first of them
        if in_flight == 0 or trees[UPCOMING, 1] == np.inf:
            break
        i = _least(trees[UPCOMING])
        until = trees[UPCOMING, 1]
        _account(until - now, in_turn, phase, load, spent, profiles)
        now = until

        # -- 5: what ends there is followed up. Usually it is one sequence; those that end in the
        #    same round, but for rounding, end together.
        _note_change(i, state, changed)
        _advance(i, now, state, profiles)
        state[i, ROUNDS] = max(state[i, ROUNDS], heaps[i, 0, 0])
        while _sequences(i, state) and heaps[i, 0, 0] <= state[i, ROUNDS] + 1e-9:
            role, record = _end_first(i, now, requests, state, heaps, load)
            group = record // samples
            if role == POLICY and room:  # the shard may have one more there
                shard = shard_of[group]
                _set(dealt[shard], i, dealt[shard, leaves + i] - 1)
                _deal(shard, dealt, rooms, first_of, last_of, following, state, changed)
            if role == POLICY and requests[ACTIONS, JUDGE, record] > 0:
                _arrive(record, JUDGE, now, requests, load)
                _queue(record, JUDGE, waiting, load)
                continue
            unended[group] -= 1
            if unended[group] == 0:
                order[finished] = group
                finished += 1
                in_flight -= 1
                kept += keep[group]
                if not in_turn or in_flight == 0:
                    more = groups_missing(needed, kept, finished, in_flight + issue, rule)
                    issue = min(issue + more, groups - issued)
        _settle(i, state, trees)
    shape = (2, groups, samples)
    return (
        now,
        issued,
        kept,
        spent,
        order[:finished],
        requests[ARRIVAL : END + 1].copy().reshape((3, *shape)),
        requests[REPLICA].astype(np.int64).reshape(shape),
    )


# -- how it begins ---------------------------------------------------------------------------------


@njit
def _new_requests(actions: np.ndarray, prompts: np.ndarray) -> np.ndarray:
    """Returns ``requests`` before any has arrived; arguments as in ``_play``."""
    total = actions.shape[1] * actions.shape[2]
    requests = np.zeros((6, 2, total))
    requests[ACTIONS] = actions.reshape(2, total)
    requests[PROMPT] = prompts.reshape(2, total)
    requests[REPLICA] = -1
    return requests


@njit
def _new_trees(serves: np.ndarray) -> np.ndarray:
    """Returns ``trees`` of replicas that run nothing; argument as in ``_play``."""
    leaves = 1  # a power of two
    while leaves < len(serves):
        leaves *= 2
    trees = np.full((3, 2 * leaves), np.inf)
    for i in range(len(serves)):
        for role in range(2):
            if serves[i] >> role & 1:
                _set(trees[role], i, 0.0)
    return trees


@njit
def _new_load(serves: np.ndarray) -> np.ndarray:
    """Returns ``load`` before anything has happened; argument as in ``_play``."""
    load = np.zeros((6, 2), np.int64)
    for role in range(2):
        load[SERVING, role] = ((serves >> role) & 1).sum()
    return load


@njit
def _new_dealt(shards: int, abreast: int, entries: int) -> np.ndarray:
    """Returns for each shard a tree in which no replica has any of its records.

    abreast: replicas of the policy; they have the lowest numbers.
    entries: of a tree over all replicas.
    """
    dealt = np.full((shards, entries), np.inf)
    for shard in range(shards):
        # The term below 1/2 breaks ties: each shard starts at another replica.
        for i in range(abreast):
            _set(dealt[shard], i, (i - shard * abreast // shards) % abreast / (2 * abreast))
    return dealt


# -- 1: records arrive and are dealt ---------------------------------------------------------------


@inlined
def _arrive(record: int, role: int, now: float, requests: np.ndarray, load: np.ndarray) -> None:
    """Has a record's request to a role arrive."""
    requests[ARRIVAL, role, record] = now
    load[ACTIVE, role] += 1


@inlined
def _queue(record: int, role: int, waiting: np.ndarray, load: np.ndarray) -> None:
    """Adds a record to a role's queue, as the last."""
    waiting[role, load[LAST, role]] = record
    load[LAST, role] += 1


@njit
def _append(
    queue: int,
    request: int,
    first_of: np.ndarray,
    last_of: np.ndarray,
    following: np.ndarray,
) -> None:
    """Adds a record at the end of a linked list."""
    if first_of[queue] < 0:
        first_of[queue] = request
    else:
        following[last_of[queue]] = request
    following[request] = -1
    last_of[queue] = request


@njit
def _deal(
    shard: int,
    dealt: np.ndarray,
    rooms: np.ndarray,
    first_of: np.ndarray,
    last_of: np.ndarray,
    following: np.ndarray,
    state: np.ndarray,
    changed: np.ndarray,
) -> None:
    """Deals a shard's records, each to the replica that has the fewest, while there is room.

    Arguments are arrays of ``_play``, which it changes.
    """
    undealt = len(state) + shard  # the number of the shard's list
    leaves = dealt.shape[1] // 2
    while first_of[undealt] >= 0:
        i = _least(dealt[shard])
        if dealt[shard, leaves + i] >= rooms[shard]:
            break
        record = first_of[undealt]
        first_of[undealt] = following[record]
        _append(i, record, first_of, last_of, following)
        _set(dealt[shard], i, dealt[shard, leaves + i] + 1)
        _note_change(i, state, changed)


# -- 2: requests start -----------------------------------------------------------------------------


@inlined
def _start_dealt(
    now: float,
    first_of: np.ndarray,
    following: np.ndarray,
    requests: np.ndarray,
    state: np.ndarray,
    heaps: np.ndarray,
    trees: np.ndarray,
    load: np.ndarray,
    changed: np.ndarray,
    profiles: np.ndarray,
) -> None:
    """Starts what was dealt to each changed replica, up to the first that has no room there."""
    for n in range(changed[0]):
        i = changed[1 + n]
        while first_of[i] >= 0:
            record = first_of[i]
            _advance(i, now, state, profiles)
            if not _has_room(i, POLICY, record, requests, state, profiles):
                break
            first_of[i] = following[record]
            _start(i, POLICY, record, now, requests, state, heaps, trees, load, changed, profiles)


@inlined
def _start_waiting(
    role: int,
    now: float,
    waiting: np.ndarray,
    requests: np.ndarray,
    state: np.ndarray,
    heaps: np.ndarray,
    trees: np.ndarray,
    load: np.ndarray,
    changed: np.ndarray,
    profiles: np.ndarray,
) -> None:
    """Starts a role's queue, each request where the fewest sequences run, up to the first that has
    no room there.
    """
    while load[HEAD, role] < load[LAST, role] and trees[role, 1] < np.inf:
        i = _least(trees[role])
        record = waiting[role, load[HEAD, role]]
        _advance(i, now, state, profiles)
        if not _has_room(i, role, record, requests, state, profiles):
            break
        load[HEAD, role] += 1
        _start(i, role, record, now, requests, state, heaps, trees, load, changed, profiles)


@inlined
def _has_room(
    i: int,
    role: int,
    record: int,
    requests: np.ndarray,
    state: np.ndarray,
    profiles: np.ndarray,
) -> bool:
    """Returns whether a request could start: not too many sequences, nor too many cached tokens.

    A replica that runs nothing has room for any prompt. It must be up to date; see ``_advance``.
    """
    if state[i, SEQUENCES + role] >= profiles[role, MOST]:
        return False
    sequences = _sequences(i, state)
    cached = state[i, OFFSET] + state[i, OFFSET + 1] + sequences * state[i, ROUNDS]
    is_too_much = cached + requests[PROMPT, role, record] > profiles[role, CACHE]
    return sequences == 0 or not is_too_much


@inlined
def _start(
    i: int,
    role: int,
    record: int,
    now: float,
    requests: np.ndarray,
    state: np.ndarray,
    heaps: np.ndarray,
    trees: np.ndarray,
    load: np.ndarray,
    changed: np.ndarray,
    profiles: np.ndarray,
) -> None:
    """Starts a record's request at a replica, which must be up to date."""
    prompt = requests[PROMPT, role, record]
    end = state[i, ROUNDS] + requests[ACTIONS, role, record]
    _push(heaps[i], _sequences(i, state), end, record + role * requests.shape[2])
    state[i, OFFSET + role] += prompt - state[i, ROUNDS]
    state[i, SEQUENCES + role] += 1
    state[i, DEBT] += prompt * profiles[role, PREFILL]
    requests[START, role, record] = now
    requests[REPLICA, role, record] = i
    load[TAKEN, role] += 1
    load[RUN_ANY, role] += state[i, SEQUENCES + role] == 1
    _show_load(i, state, trees)
    _note_change(i, state, changed)


# -- 3 and 4: a replica's time ---------------------------------------------------------------------


@inlined
def _foresee(
    now: float,
    state: np.ndarray,
    heaps: np.ndarray,
    trees: np.ndarray,
    changed: np.ndarray,
    profiles: np.ndarray,
) -> None:
    """Computes when the next sequence of each changed replica ends, and forgets the changes.

    These replicas are up to date: ``_advance`` was called for each when it changed.
    """
    for n in range(changed[0]):
        i = changed[1 + n]
        state[i, CHANGED] = 0
        next_end_s = np.inf
        if _sequences(i, state):
            first, growth = _pace(i, state, profiles)
            x = max(0.0, heaps[i, 0, 0] - state[i, ROUNDS])
            next_end_s = now + state[i, DEBT] + first * x + growth * x * x
        _set(trees[UPCOMING], i, next_end_s)
    changed[0] = 0


@inlined
def _pace(i: int, state: np.ndarray, profiles: np.ndarray) -> tuple[float, float]:
    """Returns (a, c) such that a replica's next x rounds take a x + c x^2 seconds.

    a is the seconds of the next round. c is half of what each round adds to the seconds of the
    following one, because of the tokens it caches. Both are summed over the roles that run.
    """
    first = 0.0
    growth = 0.0
    for role in range(2):
        sequences = state[i, SEQUENCES + role]
        if sequences:
            cached = state[i, OFFSET + role] + sequences * state[i, ROUNDS]
            terms = profiles[role]
            first += terms[BASE] + terms[RUNNING] * sequences + terms[CACHED] * cached
            growth += terms[CACHED] * sequences / 2
    return first, growth


@inlined
def _advance(i: int, now: float, state: np.ndarray, profiles: np.ndarray) -> None:
    """Brings a replica up to ``now``: it first reads prompts, then does rounds."""
    passed = now - state[i, UP_TO]
    state[i, UP_TO] = now
    if passed <= 0 or _sequences(i, state) == 0:
        return
    prefilled = min(state[i, DEBT], passed)
    state[i, DEBT] -= prefilled
    passed -= prefilled
    if passed > 0:
        first, growth = _pace(i, state, profiles)
        if growth > 0:
            # The root of growth x^2 + first x = passed, in the form that does not cancel for small
            # growth.
            root = math.sqrt(first * first + 4 * growth * passed)
            state[i, ROUNDS] += 2 * passed / (first + root)
        else:
            state[i, ROUNDS] += passed / first


@inlined
def _account(
    passed: float,
    in_turn: bool,
    phase: int,
    load: np.ndarray,
    spent: np.ndarray,
    profiles: np.ndarray,
) -> None:
    """Adds ``passed`` seconds of every replica to ``spent``."""
    for role in range(2):
        spent[BUSY + role] += passed * load[RUN_ANY, role]
        spent[FILLED + role] += passed * load[TAKEN, role] / profiles[role, MOST]
    if in_turn:
        cause = TAIL if phase == POLICY else JUDGE_TAIL
        spent[cause] += passed * (load[SERVING, phase] - load[RUN_ANY, phase])
        return
    cause = TAIL if load[ACTIVE, POLICY] else NO_VERDICT
    spent[cause] += passed * (load[SERVING, POLICY] - load[RUN_ANY, POLICY])
    cause = NO_RECORD if load[ACTIVE, POLICY] else JUDGE_TAIL
    spent[cause] += passed * (load[SERVING, JUDGE] - load[RUN_ANY, JUDGE])


# -- 5: a sequence ends ----------------------------------------------------------------------------


@inlined
def _end_first(
    i: int,
    now: float,
    requests: np.ndarray,
    state: np.ndarray,
    heaps: np.ndarray,
    load: np.ndarray,
) -> tuple[int, int]:
    """Ends the sequence of a replica that is the first to end; returns its role and its record."""
    total = requests.shape[2]
    end = heaps[i, 0, 0]
    role = int(heaps[i, 1, 0]) // total
    record = int(heaps[i, 1, 0]) % total
    _pop(heaps[i], _sequences(i, state))
    state[i, SEQUENCES + role] -= 1
    # end - actions is the round in which it started; takes back what it added there
    started = end - requests[ACTIONS, role, record]
    state[i, OFFSET + role] -= requests[PROMPT, role, record] - started
    requests[END, role, record] = now
    load[ACTIVE, role] -= 1
    load[TAKEN, role] -= 1
    load[RUN_ANY, role] -= state[i, SEQUENCES + role] == 0
    return role, record


@inlined
def _settle(i: int, state: np.ndarray, trees: np.ndarray) -> None:
    """Brings a replica's sums in order when all that ended there has been followed up."""
    if _sequences(i, state) == 0:
        # exactly 0 again, without what rounding left
        state[i, OFFSET] = 0.0
        state[i, OFFSET + 1] = 0.0
        state[i, DEBT] = 0.0
    _show_load(i, state, trees)


# -- small words -----------------------------------------------------------------------------------


@inlined
def _sequences(i: int, state: np.ndarray) -> int:
    """Returns how many sequences run at a replica, of both roles."""
    return int(state[i, SEQUENCES] + state[i, SEQUENCES + 1])


@inlined
def _show_load(i: int, state: np.ndarray, trees: np.ndarray) -> None:
    """Writes how many sequences run at a replica into the trees of the roles that it serves."""
    leaves = trees.shape[1] // 2
    for role in range(2):
        if trees[role, leaves + i] < np.inf:
            _set(trees[role], i, float(_sequences(i, state)))


@inlined
def _note_change(i: int, state: np.ndarray, changed: np.ndarray) -> None:
    """Notes that something has changed at a replica in this turn of the loop."""
    if not state[i, CHANGED]:
        state[i, CHANGED] = 1
        changed[0] += 1
        changed[changed[0]] = i


def _compiled_once(rule: int) -> Callable[..., Played]:
    """Returns ``play``, whose compiled code numba keeps on disk between processes.

    numba compiles anew when this file has changed, but does not notice that the rule of
    oversampling, which is in another file, has. The cache's key includes the values of a closure,
    so a checksum of the rule is one of them.

    rule: that checksum.
    """

    @njit(cache=True)
    def play(
        actions: np.ndarray,
        prompts: np.ndarray,
        keep: np.ndarray,
        serves: np.ndarray,
        profiles: np.ndarray,
        rule_numbers: Any,
        needed: int,
        switch_s: float,
        in_turn: bool,
        dealing: tuple[int, int],
    ) -> Played:
        """Plays one rollout; see ``_play``."""
        played: Played = _play(
            actions,
            prompts,
            keep,
            serves,
            profiles,
            rule_numbers,
            needed + 0 * rule,
            switch_s,
            in_turn,
            dealing,
        )
        return played

    compiled: Callable[..., Played] = play
    return compiled


#: Changes with the code of the rule of oversampling.
RULE_CHECKSUM = zlib.crc32(
    b"".join(
        function.__code__.co_code + repr(function.__code__.co_consts).encode() for function in _RULE
    )
)
play = _compiled_once(RULE_CHECKSUM)
