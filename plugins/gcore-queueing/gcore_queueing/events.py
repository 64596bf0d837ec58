"""The compiled part: one rollout, from the first group issued to the last verdict, event by event.

Every replica decodes in rounds: with b sequences running and K tokens cached a round takes A = base
+ running b + cached K seconds and gives each sequence a token, so x rounds take A x + cached b x^2
/ 2. Between two events nothing else changes, and the equation is solved exactly. An event is the
end of a sequence; what ended makes a request to the judge, a group's last verdict may make new
groups, and waiting requests go to the replica that runs the fewest.

A replica that serves both roles gives each of them a round in turn: both read their weights.

The policy's records are dealt out by shards: each to the replica that owes this shard the fewest,
as long as that is less than the shard's room there. What a replica was dealt waits at that replica.
Without room (0) records wait in one queue for all, as requests to the judge do.
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

# The rule as the core has it, compiled; what it calls must be compiled too.
_RULE = (keep_rate.groups_missing, keep_rate.covers)
_missing = njit(
    FunctionType(
        keep_rate.groups_missing.__code__, {**vars(keep_rate), "covers": njit(keep_rate.covers)}
    )
)

#: see ``_play``, Returns
Played: TypeAlias = tuple[float, int, int, np.ndarray, np.ndarray, np.ndarray, np.ndarray]

POLICY, JUDGE = 0, 1
#: rows of ``spent``: replica-seconds
BUSY, FILLED = 0, 2  # [+ role]: running something; share of the places that run something
TAIL, NO_VERDICT, NO_RECORD, JUDGE_TAIL, SWAPPING = 4, 5, 6, 7, 8  # idle, see ``step.CAUSES``
SPENT = 9

BASE, RUNNING, CACHED, PREFILL, MOST, CACHE = range(6)  # columns of ``profiles``


@njit
def _set(tree: np.ndarray, leaf: int, value: float) -> None:
    """A tree of minima: the root, at 1, is the least leaf."""
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
    """The first leaf that holds the least value."""
    at, half = 1, len(tree) // 2
    while at < half:
        at = 2 * at if tree[2 * at] == tree[at] else 2 * at + 1
    return at - half


@njit
def _push(ends: np.ndarray, who: np.ndarray, size: int, end: float, request: int) -> None:
    at = size
    while at and ends[(at - 1) // 2] > end:
        ends[at], who[at] = ends[(at - 1) // 2], who[(at - 1) // 2]
        at = (at - 1) // 2
    ends[at], who[at] = end, request


@njit
def _pop(ends: np.ndarray, who: np.ndarray, size: int) -> None:
    """Removes the first of ``size``; the rest is a heap again."""
    end, request, at = ends[size - 1], who[size - 1], 0
    while 2 * at + 1 < size - 1:
        child = 2 * at + 1
        if child + 1 < size - 1 and ends[child + 1] < ends[child]:
            child += 1
        if ends[child] >= end:
            break
        ends[at], who[at] = ends[child], who[child]
        at = child
    ends[at], who[at] = end, request


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
    """See ``gcore_queueing.step.play``, which has the same arguments with names and checks.

    actions, prompts: float64[2, N, G] of the policy and the judge. keep: bool[N]. serves:
    int8[replicas], a bit for each role. profiles: float64[2, 6]. in_turn: all replicas serve one
    role, then the other. dealing: (room, shards).

    Returns (seconds, issued, kept, spent[SPENT], order[N] of groups by when they finished, times[3,
    2, N, G] of arrival, start and end, replica[2, N, G]).
    """
    groups, samples = actions.shape[1], actions.shape[2]
    total, replicas = groups * samples, len(serves)
    actions, prompts = actions.reshape(2, total), prompts.reshape(2, total)
    width = 1
    while width < replicas:
        width *= 2
    upcoming = np.full(2 * width, np.inf)
    loads = np.full((2, 2 * width), np.inf)
    most = int(profiles[0, MOST] + profiles[1, MOST])
    ends, who = np.empty((replicas, most)), np.empty((replicas, most), np.int64)
    running, offset = (
        np.zeros((replicas, 2), np.int64),
        np.zeros((replicas, 2)),
    )  # cached = offset + running * rounds
    rounds, at, debt = np.zeros(replicas), np.zeros(replicas), np.zeros(replicas)
    waiting, head, tail = (
        np.empty((2, total), np.int64),
        np.zeros(2, np.int64),
        np.zeros(2, np.int64),
    )
    times, replica = np.zeros((3, 2, total)), np.full((2, total), -1, np.int64)
    active, busy, filled, width_of = (
        np.zeros(2, np.int64),
        np.zeros(2, np.int64),
        np.zeros(2, np.int64),
        np.zeros(2),
    )
    left, order, spent = np.full(groups, samples), np.empty(groups, np.int64), np.zeros(SPENT)
    touched, is_touched, count = np.empty(replicas, np.int64), np.zeros(replicas, np.bool_), 0
    # queues in the order of ``following``: what a replica was dealt, and, behind these, what a
    # shard has still to deal
    room, shards = dealing
    first_of, last_of = (
        np.full(replicas + shards, -1, np.int64),
        np.full(replicas + shards, -1, np.int64),
    )
    following, shard_of = np.empty(total, np.int64), np.empty(groups, np.int64)
    owed, rooms = np.full((shards, 2 * width), np.inf), np.zeros(shards)
    now, phase = 0.0, POLICY
    kept, finished, issued, in_flight = 0, 0, 0, 0
    for i in range(replicas):
        for role in range(2):
            if serves[i] >> role & 1:
                width_of[role] += 1
                _set(loads[role], i, 0.0)
    abreast = int(width_of[POLICY])
    for shard in range(shards):
        for i in range(
            abreast
        ):  # policy's replicas come first; of those that owe the same, from the shard's own on
            _set(owed[shard], i, (i - shard * abreast // shards) % abreast / (2 * abreast))

    issue = min(_missing(needed, 0, 0, 0, rule), groups)
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
                    owed,
                    rooms,
                    first_of,
                    last_of,
                    following,
                    touched,
                    is_touched,
                    count,
                )
                begin = end
        issued, in_flight, active[POLICY] = (
            issued + issue,
            in_flight + issue,
            active[POLICY] + issue * samples,
        )

        if (
            in_turn and active[phase] == 0 and active[1 - phase] > 0
        ):  # nothing runs: all change roles
            phase = 1 - phase
            now += switch_s
            spent[SWAPPING] += switch_s * width_of[phase]

        # -- waiting requests go to the replica that runs the fewest, until that one has no room
        if not in_turn or phase == POLICY:
            for n in range(count):
                i = touched[n]
                while first_of[i] >= 0:
                    request = first_of[i]
                    _advance(i, now, rounds, at, debt, running, offset, profiles)
                    cached = (
                        offset[i, 0] + offset[i, 1] + (running[i, 0] + running[i, 1]) * rounds[i]
                    )
                    here = running[i, 0] + running[i, 1]
                    if running[i, POLICY] >= profiles[POLICY, MOST]:
                        break
                    if here and cached + prompts[POLICY, request] > profiles[POLICY, CACHE]:
                        break
                    first_of[i] = following[request]
                    _push(ends[i], who[i], here, rounds[i] + actions[POLICY, request], request)
                    offset[i, POLICY] += prompts[POLICY, request] - rounds[i]
                    running[i, POLICY] += 1
                    debt[i] += prompts[POLICY, request] * profiles[POLICY, PREFILL]
                    times[1, POLICY, request], replica[POLICY, request] = now, i
                    filled[POLICY] += 1
                    busy[POLICY] += running[i, POLICY] == 1
                    for other in range(2):
                        if serves[i] >> other & 1:
                            _set(loads[other], i, here + 1.0)
        for role in range(2):
            if in_turn and role != phase:
                continue
            while head[role] < tail[role] and loads[role, 1] < np.inf:
                i = _least(loads[role])
                request = waiting[role, head[role]]
                _advance(i, now, rounds, at, debt, running, offset, profiles)
                cached = offset[i, 0] + offset[i, 1] + (running[i, 0] + running[i, 1]) * rounds[i]
                here = running[i, 0] + running[i, 1]
                if running[i, role] >= profiles[role, MOST]:
                    break
                if here and cached + prompts[role, request] > profiles[role, CACHE]:
                    break
                head[role] += 1
                _push(
                    ends[i],
                    who[i],
                    here,
                    rounds[i] + actions[role, request],
                    request + role * total,
                )
                offset[i, role] += prompts[role, request] - rounds[i]
                running[i, role] += 1
                debt[i] += prompts[role, request] * profiles[role, PREFILL]
                times[1, role, request], replica[role, request] = now, i
                filled[role] += 1
                busy[role] += running[i, role] == 1
                for other in range(2):
                    if serves[i] >> other & 1:
                        _set(loads[other], i, here + 1.0)
                if not is_touched[i]:
                    is_touched[i] = True
                    touched[count] = i
                    count += 1
        for n in range(count):
            i = touched[n]
            is_touched[i] = False
            here = running[i, 0] + running[i, 1]
            due = np.inf
            if here:
                first, growth = _pace(i, rounds, running, offset, profiles)
                x = max(0.0, ends[i, 0] - rounds[i])
                due = now + debt[i] + first * x + growth * x * x
            _set(upcoming, i, due)
        count = 0

        # -- the next end of a sequence
        if in_flight == 0 or upcoming[1] == np.inf:
            break
        i, until = _least(upcoming), upcoming[1]
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
        now, issue = until, 0
        touched[count], is_touched[i], count = i, True, count + 1
        _advance(i, now, rounds, at, debt, running, offset, profiles)
        rounds[i] = max(rounds[i], ends[i, 0])
        while running[i, 0] + running[i, 1] and ends[i, 0] <= rounds[i] + 1e-9:
            end, request = ends[i, 0], who[i, 0]
            _pop(ends[i], who[i], running[i, 0] + running[i, 1])
            role, request = request // total, request % total
            running[i, role] -= 1
            offset[i, role] -= prompts[role, request] - (end - actions[role, request])
            times[2, role, request] = now
            active[role] -= 1
            if role == POLICY and room:
                shard = shard_of[request // samples]
                _set(owed[shard], i, owed[shard, width + i] - 1)
                count = _deal(
                    shard,
                    replicas,
                    owed,
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
            left[group] -= 1
            if left[group] == 0:
                order[finished] = group
                finished, in_flight, kept = finished + 1, in_flight - 1, kept + keep[group]
                if not in_turn or in_flight == 0:
                    more = _missing(needed, kept, finished, in_flight + issue, rule)
                    issue = min(issue + more, groups - issued)
        if running[i, 0] + running[i, 1] == 0:
            offset[i, 0], offset[i, 1], debt[i] = 0.0, 0.0, 0.0
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
    if first_of[queue] < 0:
        first_of[queue] = request
    else:
        following[last_of[queue]] = request
    following[request], last_of[queue] = -1, request


@njit
def _deal(
    shard: int,
    replicas: int,
    owed: np.ndarray,
    rooms: np.ndarray,
    first_of: np.ndarray,
    last_of: np.ndarray,
    following: np.ndarray,
    touched: np.ndarray,
    is_touched: np.ndarray,
    count: int,
) -> int:
    """Gives replicas of what the shard has while there is room; returns how many replicas are
    touched then.
    """
    half = owed.shape[1] // 2
    while first_of[replicas + shard] >= 0:
        i = _least(owed[shard])
        if owed[shard, half + i] >= rooms[shard]:
            break
        request = first_of[replicas + shard]
        first_of[replicas + shard] = following[request]
        _append(i, request, first_of, last_of, following)
        _set(owed[shard], i, owed[shard, half + i] + 1)
        if not is_touched[i]:
            touched[count], is_touched[i], count = i, True, count + 1
    return count


@njit
def _pace(
    i: int,
    rounds: np.ndarray,
    running: np.ndarray,
    offset: np.ndarray,
    profiles: np.ndarray,
) -> tuple[float, float]:
    """(seconds of the next round, half of what a round more costs for the tokens that this one
    adds).
    """
    first, growth = 0.0, 0.0
    for role in range(2):
        if running[i, role]:
            here, terms = running[i, role], profiles[role]
            first += (
                terms[BASE]
                + terms[RUNNING] * here
                + terms[CACHED] * (offset[i, role] + here * rounds[i])
            )
            growth += terms[CACHED] * here / 2
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
    """Brings a replica to ``now``: prompts first, then rounds."""
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
    """``play``, kept on disk between processes. The compiler looks at the source of this file alone
    when it asks whether what it kept is still right; so a rule of oversampling that has changed is
    another constant of the closure.
    """

    @njit(cache=True)
    def play(
        actions: np.ndarray,
        prompts: np.ndarray,
        keep: np.ndarray,
        serves: np.ndarray,
        profiles: np.ndarray,
        rate: Any,
        needed: int,
        switch_s: float,
        in_turn: bool,
        dealing: tuple[int, int],
    ) -> Played:
        played: Played = _play(
            actions,
            prompts,
            keep,
            serves,
            profiles,
            rate,
            needed + 0 * rule,
            switch_s,
            in_turn,
            dealing,
        )
        return played

    compiled: Callable[..., Played] = play
    return compiled


play = _compiled_once(
    zlib.crc32(
        b"".join(part.__code__.co_code + repr(part.__code__.co_consts).encode() for part in _RULE)
    )
)
