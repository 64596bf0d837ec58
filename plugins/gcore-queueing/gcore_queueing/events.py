"""The compiled part: one rollout, from the first group issued to the last verdict, event by event.

Every replica decodes in rounds, each of which gives every running sequence a token. With b
sequences running and K tokens cached, a round takes A = base + running b + cached K seconds, where
base, running and cached are a profile's coefficients. K grows by b each round, so x rounds take
A x + cached b x^2 / 2 seconds. Between two events nothing else changes, and the equation is solved
for x exactly; x is a real number.

An event is the end of a sequence. A record that ends becomes a request to the judge, a group's last
verdict may cause new groups to be issued, and waiting requests go to the replica that runs the
fewest sequences.

A replica that serves both roles gives each of them a round in turn: each round reads the weights of
its role.

The policy's records are dealt out by shards. A shard gives each record to the replica that still
has the fewest of its records, as long as they are fewer than the shard's room there; the record
then waits at that replica. With a room of 0 records wait in one queue for all replicas, as requests
to the judge do.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeAlias

import numpy as np
from numba import njit

from gcore_core.controllers import keep_rate

# The core's own rule of oversampling, compiled. Compiled code can call only compiled functions, so
# ``covers`` is replaced by its compiled form among the globals that the rule sees.
_RULE = (keep_rate.groups_missing, keep_rate.covers)
groups_missing = njit(
    FunctionType(
        keep_rate.groups_missing.__code__, {**vars(keep_rate), "covers": njit(keep_rate.covers)}
    )
)

#: What ``_play`` returns; see there.
Played: TypeAlias = tuple[float, int, int, np.ndarray, np.ndarray, np.ndarray, np.ndarray]

#: The two roles, by which the arrays are indexed.
POLICY = 0
JUDGE = 1
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
def _push(ends: np.ndarray, request_of: np.ndarray, size: int, end: float, request: int) -> None:
    """Adds a request to one replica's binary heap of ``size`` requests, the earliest end first.

    ends: the number of the replica's round in which each request ends.
    request_of: the request; those to the judge are counted on from the number of records.
    """
    at = size
    while at and ends[(at - 1) // 2] > end:
        ends[at] = ends[(at - 1) // 2]
        request_of[at] = request_of[(at - 1) // 2]
        at = (at - 1) // 2
    ends[at] = end
    request_of[at] = request


@njit
def _pop(ends: np.ndarray, request_of: np.ndarray, size: int) -> None:
    """Removes the first of ``size`` requests from a heap; see ``_push``."""
    # the last one takes the first place and sinks until no child is earlier
    end = ends[size - 1]
    request = request_of[size - 1]
    at = 0
    while 2 * at + 1 < size - 1:
        child = 2 * at + 1
        if child + 1 < size - 1 and ends[child + 1] < ends[child]:
            child += 1
        if ends[child] >= end:
            break
        ends[at] = ends[child]
        request_of[at] = request_of[child]
        at = child
    ends[at] = end
    request_of[at] = request


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
    """Plays one rollout; ``gcore_queueing.step.play`` has the arguments with names and checks.

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
    replicas = len(serves)
    actions = actions.reshape(2, total)
    prompts = prompts.reshape(2, total)
    width = 1  # leaves of the trees over replicas: a power of two
    while width < replicas:
        width *= 2
    upcoming = np.full(2 * width, np.inf)  # tree: when the next sequence of each replica ends
    # trees, one for each role: sequences that each replica runs; infinite where it does not serve
    loads = np.full((2, 2 * width), np.inf)
    most = int(profiles[0, MOST] + profiles[1, MOST])
    # the requests that each replica runs, as a heap; see ``_push``
    ends = np.empty((replicas, most))
    request_of = np.empty((replicas, most), np.int64)
    # of each replica and role: sequences that run, and an offset such that the cached tokens are
    # offset + running * rounds. A sequence of prompt p that started in round r has p + rounds - r
    # tokens, so it adds p - r to the offset; nothing has to be updated each round.
    running = np.zeros((replicas, 2), np.int64)
    offset = np.zeros((replicas, 2))
    # of each replica: rounds done, when it was last brought up to date, seconds of prompts to read
    rounds = np.zeros(replicas)
    at = np.zeros(replicas)
    debt = np.zeros(replicas)
    # a queue for each role: its requests, the place of its first, the place behind its last
    waiting = np.empty((2, total), np.int64)
    head = np.zeros(2, np.int64)
    tail = np.zeros(2, np.int64)
    times = np.zeros((3, 2, total))
    replica = np.full((2, total), -1, np.int64)
    # of each role: requests that have not ended, replicas that run any, places taken, replicas
    active = np.zeros(2, np.int64)
    busy = np.zeros(2, np.int64)
    filled = np.zeros(2, np.int64)
    width_of = np.zeros(2)
    unended = np.full(groups, samples)  # records of each group that have not ended
    order = np.empty(groups, np.int64)
    spent = np.zeros(SPENT)
    # the ``count`` replicas for which something changed at this event
    touched = np.empty(replicas, np.int64)
    is_touched = np.zeros(replicas, np.bool_)
    count = 0
    # linked lists of records: what each replica was dealt, and, behind those, what each shard has
    # still to deal; ``following`` is the next record in the same list, -1 at the end
    room, shards = dealing
    first_of = np.full(replicas + shards, -1, np.int64)
    last_of = np.full(replicas + shards, -1, np.int64)
    following = np.empty(total, np.int64)
    shard_of = np.empty(groups, np.int64)
    # of each shard: a tree of how many of its records each replica has, and its room at a replica
    dealt = np.full((shards, 2 * width), np.inf)
    rooms = np.zeros(shards)
    now = 0.0
    phase = POLICY
    kept = 0
    finished = 0
    issued = 0
    in_flight = 0
    for i in range(replicas):
        for role in range(2):
            if serves[i] >> role & 1:
                width_of[role] += 1
                _set(loads[role], i, 0.0)
    abreast = int(width_of[POLICY])
    for shard in range(shards):
        # The policy's replicas have the lowest numbers. The term below 1/2 breaks ties: each shard
        # starts at another replica.
        for i in range(abreast):
            _set(dealt[shard], i, (i - shard * abreast // shards) % abreast / (2 * abreast))

    issue = min(groups_missing(needed, 0, 0, 0, rule), groups)
    while True:
        for request in range(issued * samples, (issued + issue) * samples):
            times[0, POLICY, request] = now
            if room == 0:
                waiting[POLICY, tail[POLICY]] = request
                tail[POLICY] += 1
        if room and issue:
            begin = issued
            for shard in range(shards):
                end = begin + issue // shards + (shard < issue % shards)
                shard_of[begin:end] = shard
                for request in range(begin * samples, end * samples):
                    _append(replicas + shard, request, first_of, last_of, following)
                rooms[shard] = max(rooms[shard], room, (end - begin) * samples // (2 * abreast))
                count = _deal(
                    shard,
                    replicas,
                    dealt,
                    rooms,
                    first_of,
                    last_of,
                    following,
                    touched,
                    is_touched,
                    count,
                )
                begin = end
        issued = issued + issue
        in_flight = in_flight + issue
        active[POLICY] = active[POLICY] + issue * samples

        # nothing is left for this role: all replicas change to the other
        if in_turn and active[phase] == 0 and active[1 - phase] > 0:
            phase = 1 - phase
            now += switch_s
            spent[SWAPPING] += switch_s * width_of[phase]

        # -- requests start: those dealt to a replica there, others where the fewest run, until the
        #    first one that has no room (too many sequences, or too many tokens cached)
        if not in_turn or phase == POLICY:
            for n in range(count):
                i = touched[n]
                while first_of[i] >= 0:
                    request = first_of[i]
                    _advance(i, now, rounds, at, debt, running, offset, profiles)
                    cached = (
                        offset[i, 0] + offset[i, 1] + (running[i, 0] + running[i, 1]) * rounds[i]
                    )
                    sequences = running[i, 0] + running[i, 1]
                    if running[i, POLICY] >= profiles[POLICY, MOST]:
                        break
                    if sequences and cached + prompts[POLICY, request] > profiles[POLICY, CACHE]:
                        break
                    first_of[i] = following[request]
                    _push(
                        ends[i],
                        request_of[i],
                        sequences,
                        rounds[i] + actions[POLICY, request],
                        request,
                    )
                    offset[i, POLICY] += prompts[POLICY, request] - rounds[i]
                    running[i, POLICY] += 1
                    debt[i] += prompts[POLICY, request] * profiles[POLICY, PREFILL]
                    times[1, POLICY, request] = now
                    replica[POLICY, request] = i
                    filled[POLICY] += 1
                    busy[POLICY] += running[i, POLICY] == 1
                    for served in range(2):
                        if serves[i] >> served & 1:
                            _set(loads[served], i, sequences + 1.0)
        for role in range(2):
            if in_turn and role != phase:
                continue
            while head[role] < tail[role] and loads[role, 1] < np.inf:
                i = _least(loads[role])
                request = waiting[role, head[role]]
                _advance(i, now, rounds, at, debt, running, offset, profiles)
                cached = offset[i, 0] + offset[i, 1] + (running[i, 0] + running[i, 1]) * rounds[i]
                sequences = running[i, 0] + running[i, 1]
                if running[i, role] >= profiles[role, MOST]:
                    break
                if sequences and cached + prompts[role, request] > profiles[role, CACHE]:
                    break
                head[role] += 1
                _push(
                    ends[i],
                    request_of[i],
                    sequences,
                    rounds[i] + actions[role, request],
                    request + role * total,
                )
                offset[i, role] += prompts[role, request] - rounds[i]
                running[i, role] += 1
                debt[i] += prompts[role, request] * profiles[role, PREFILL]
                times[1, role, request] = now
                replica[role, request] = i
                filled[role] += 1
                busy[role] += running[i, role] == 1
                for served in range(2):
                    if serves[i] >> served & 1:
                        _set(loads[served], i, sequences + 1.0)
                if not is_touched[i]:
                    is_touched[i] = True
                    touched[count] = i
                    count += 1
        # -- when the next sequence of each changed replica ends
        for n in range(count):
            i = touched[n]
            is_touched[i] = False
            sequences = running[i, 0] + running[i, 1]
            next_end_s = np.inf
            if sequences:
                first, growth = _pace(i, rounds, running, offset, profiles)
                x = max(0.0, ends[i, 0] - rounds[i])
                next_end_s = now + debt[i] + first * x + growth * x * x
            _set(upcoming, i, next_end_s)
        count = 0

        # -- the next event: the earliest end of a sequence
        if in_flight == 0 or upcoming[1] == np.inf:
            break
        i = _least(upcoming)
        until = upcoming[1]
        passed = until - now
        for role in range(2):
            spent[BUSY + role] += passed * busy[role]
            spent[FILLED + role] += passed * filled[role] / profiles[role, MOST]
        if not in_turn:
            spent[TAIL if active[POLICY] else NO_VERDICT] += passed * (
                width_of[POLICY] - busy[POLICY]
            )
            spent[NO_RECORD if active[POLICY] else JUDGE_TAIL] += passed * (
                width_of[JUDGE] - busy[JUDGE]
            )
        else:
            spent[TAIL if phase == POLICY else JUDGE_TAIL] += passed * (
                width_of[phase] - busy[phase]
            )
        now = until
        issue = 0
        touched[count] = i
        is_touched[i] = True
        count = count + 1
        _advance(i, now, rounds, at, debt, running, offset, profiles)
        rounds[i] = max(rounds[i], ends[i, 0])
        while running[i, 0] + running[i, 1] and ends[i, 0] <= rounds[i] + 1e-9:
            end = ends[i, 0]
            request = request_of[i, 0]
            _pop(ends[i], request_of[i], running[i, 0] + running[i, 1])
            role = request // total
            request = request % total
            running[i, role] -= 1
            # end - actions is the round in which it started; takes back what it added there
            offset[i, role] -= prompts[role, request] - (end - actions[role, request])
            times[2, role, request] = now
            active[role] -= 1
            if role == POLICY and room:
                shard = shard_of[request // samples]
                _set(dealt[shard], i, dealt[shard, width + i] - 1)
                count = _deal(
                    shard,
                    replicas,
                    dealt,
                    rooms,
                    first_of,
                    last_of,
                    following,
                    touched,
                    is_touched,
                    count,
                )
            filled[role] -= 1
            busy[role] -= running[i, role] == 0
            if role == POLICY and actions[JUDGE, request] > 0:
                waiting[JUDGE, tail[JUDGE]] = request
                times[0, JUDGE, request] = now
                tail[JUDGE] += 1
                active[JUDGE] += 1
                continue
            group = request // samples
            unended[group] -= 1
            if unended[group] == 0:
                order[finished] = group
                finished = finished + 1
                in_flight = in_flight - 1
                kept = kept + keep[group]
                if not in_turn or in_flight == 0:
                    more = groups_missing(needed, kept, finished, in_flight + issue, rule)
                    issue = min(issue + more, groups - issued)
        if running[i, 0] + running[i, 1] == 0:
            # exactly 0 again, without what rounding left
            offset[i, 0] = 0.0
            offset[i, 1] = 0.0
            debt[i] = 0.0
        for role in range(2):
            if serves[i] >> role & 1:
                _set(loads[role], i, float(running[i, 0] + running[i, 1]))
    shape = (2, groups, samples)
    return (
        now,
        issued,
        kept,
        spent,
        order[:finished],
        times.reshape((3, *shape)),
        replica.reshape(shape),
    )


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
    replicas: int,
    dealt: np.ndarray,
    rooms: np.ndarray,
    first_of: np.ndarray,
    last_of: np.ndarray,
    following: np.ndarray,
    touched: np.ndarray,
    is_touched: np.ndarray,
    count: int,
) -> int:
    """Deals a shard's records, each to the replica that has the fewest, while there is room.

    Arguments are arrays of ``_play``, which it changes. Returns the new ``count`` of ``touched``.
    """
    half = dealt.shape[1] // 2
    while first_of[replicas + shard] >= 0:
        i = _least(dealt[shard])
        if dealt[shard, half + i] >= rooms[shard]:
            break
        request = first_of[replicas + shard]
        first_of[replicas + shard] = following[request]
        _append(i, request, first_of, last_of, following)
        _set(dealt[shard], i, dealt[shard, half + i] + 1)
        if not is_touched[i]:
            touched[count] = i
            is_touched[i] = True
            count = count + 1
    return count


@njit
def _pace(
    i: int,
    rounds: np.ndarray,
    running: np.ndarray,
    offset: np.ndarray,
    profiles: np.ndarray,
) -> tuple[float, float]:
    """Returns (a, c) such that a replica's next x rounds take a x + c x^2 seconds.

    a is the seconds of the next round. c is half of what each round adds to the seconds of the
    following one, because of the tokens it caches. Both are summed over the roles that run.
    """
    first = 0.0
    growth = 0.0
    for role in range(2):
        if running[i, role]:
            sequences = running[i, role]
            terms = profiles[role]
            first += (
                terms[BASE]
                + terms[RUNNING] * sequences
                + terms[CACHED] * (offset[i, role] + sequences * rounds[i])
            )
            growth += terms[CACHED] * sequences / 2
    return first, growth


@njit
def _advance(
    i: int,
    now: float,
    rounds: np.ndarray,
    at: np.ndarray,
    debt: np.ndarray,
    running: np.ndarray,
    offset: np.ndarray,
    profiles: np.ndarray,
) -> None:
    """Brings a replica up to ``now``: it first reads prompts, then does rounds."""
    passed = now - at[i]
    at[i] = now
    if passed <= 0 or running[i, 0] + running[i, 1] == 0:
        return
    prefilled = min(debt[i], passed)
    debt[i] -= prefilled
    passed -= prefilled
    if passed > 0:
        first, growth = _pace(i, rounds, running, offset, profiles)
        if growth > 0:
            # The root of growth x^2 + first x = passed, in the form that does not cancel for small
            # growth.
            rounds[i] += 2 * passed / (first + math.sqrt(first * first + 4 * growth * passed))
        else:
            rounds[i] += passed / first


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
