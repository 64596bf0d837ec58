"""A second model of a rollout, to judge decisions that were made with the first one (``events``).

It shares with the first only what is to be placed: groups, replicas, the rule of oversampling. Here
an engine goes through its steps in stretches of at most ``STRETCH`` rounds:

- Each stretch takes longer or shorter than the profile says, by a factor drawn from what a real
  engine's steps took (``slowness``), stalls included; among those that ran about as many sequences.
- Requests begin only between two stretches.
- When the cache is full, the sequence that began last is thrown out. It waits first in line and is
  read again with all that it had written.
- Prompts that were read lately are not read again: those of a group, and a judge's instructions.
  The cache forgets what was not used while as many tokens as it holds were written.
- Every request goes at once to the replica that owes the fewest, and waits there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numba import njit

from gcore_core.contract.engine_profiles import Profile
from gcore_core.controllers.keep_rate import KeepRate
from gcore_queueing import events
from gcore_queueing.events import _least, _set
from gcore_queueing.step import Engines, Groups, Played

#: Most rounds of decoding in a stretch; also how many of a real engine's steps a factor is from.
STRETCH = 64
#: Requests that a replica may owe; the rest waits for the next that owes fewer.
ROOM = 256
#: Factors are told apart by the share of an engine's places that are taken: at least 0, 1/16, ...
FULLNESS = (0.0, 1 / 16, 1 / 4, 1 / 2)

Recording: TypeAlias = dict[str, Any]


def slowness(recordings: Sequence[Recording], most: int) -> list[np.ndarray]:
    """Returns, for each of FULLNESS, factors by which stretches of steps missed a profile.

    The profile has the form that the first model assumes and is fitted to all recordings together,
    so what it cannot express is in the factors. The middle of all steps' factors is 1. Raises
    ValueError where the recordings hold too few steps of one kind.

    recordings: each a mapping of columns, one number a step: ``us``, ``decoding``, ``prefill`` and
        ``cached``; see ``benchmarks/vllm_steps.py``.
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
    """Simulates a rollout on the second model; see ``gcore_queueing.step.play``.

    Raises ValueError for mode coresident, of which this model knows nothing.

    factors: for each of FULLNESS, what a stretch's seconds may be multiplied with; not empty.
    instructions: tokens that all prompts of the judge begin with.
    seed: of the factors that are drawn.
    """
    if engines.mode == "coresident":
        raise ValueError("the second model has no engines that hold both models")
    table = np.array(
        [
            [p.base_s, p.running_s, p.cached_s, p.prefill_s, p.max_running, p.cache_tokens]
            for p in profiles
        ]
    )
    longest = max(map(len, factors))
    drawn = np.stack([np.resize(levels, longest) for levels in factors])
    in_turn = engines.mode == "colocated"
    serves = np.full(engines.policy, 3, np.int8) if in_turn else engines.serves
    seconds, issued, kept, spent, order, times, replica = _walk_once(
        np.stack([groups.policy, groups.judge]).astype(float),
        np.stack([groups.policy_prompt, groups.judge_prompt]).astype(float),
        groups.kept,
        serves,
        table,
        rate.rule(),
        needed,
        float(switch_s),
        in_turn,
        drawn,
        float(instructions),
        seed,
    )
    width = [float(((serves >> role) & 1).sum()) for role in range(2)]
    return Played(
        seconds=seconds,
        issued=issued,
        kept=kept,
        engines=len(serves),
        spent=spent,
        order=order,
        times=times,
        replica=replica,
        groups=groups,
        capacity=(width[0] * seconds, width[1] * seconds),
    )


def _fit(table: np.ndarray, took: np.ndarray) -> np.ndarray:
    """Returns the terms, none negative, that miss each step's seconds by the least share.

    A step that stalled counts as the middle one does: in three rounds, steps count the less the
    further they are off.
    """
    weights = np.ones(len(took))
    terms = np.zeros(table.shape[1])
    for _ in range(3):
        scaled = table / took[:, None] * weights[:, None]
        used = np.arange(table.shape[1])
        while True:
            terms = np.zeros(table.shape[1])
            terms[used] = np.linalg.lstsq(scaled[:, used], weights, rcond=None)[0]
            if (terms[used] >= 0).all():
                break
            used = used[terms[used] > 0]
        weights = 1 / np.maximum(np.abs(took / (table @ terms) - 1), 0.05) ** 0.5
    return terms * float(np.median(took / (table @ terms)))


@njit
def _walk(  # noqa: C901, PLR0912, PLR0915
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
    total = groups * samples
    replicas = len(serves)
    actions = actions.reshape(2 * total)
    prompts = prompts.reshape(2 * total)
    most = int(max(profiles[0, 4], profiles[1, 4]))
    # Requests to the judge are counted on from the number of records. Of each: what it has still to
    # write, and the tokens that it holds, or will hold when it is read again.
    left = actions.copy()
    holds = prompts.copy()
    # Of each replica: what runs, in the order in which it began; a list of what waits there; what
    # it owes; tokens in its cache; tokens that it has ever written; seconds when its stretch ends.
    running = np.empty((replicas, most), np.int64)
    count = np.zeros(replicas, np.int64)
    first = np.full(replicas, -1, np.int64)
    last = np.full(replicas, -1, np.int64)
    following = np.full(2 * total, -1, np.int64)
    owes = np.zeros(replicas, np.int64)
    cached = np.zeros(replicas)
    written = np.zeros(replicas)
    rounds = np.zeros(replicas)
    until = np.full(replicas, np.inf)
    leaves = 1
    while leaves < replicas:
        leaves *= 2
    ends = np.full(2 * leaves, np.inf)  # ``until`` as a tree of minima; see ``events``
    # When each replica last used a group's prompt and the instructions, as tokens written so far.
    used = np.full((replicas, groups), -np.inf)
    used_instructions = np.full(replicas, -np.inf)
    chance = np.empty(replicas, np.uint64)
    for i in range(replicas):
        chance[i] = np.uint64(seed * 1_000_003 + i * 7919 + 1)
    # what waits for a replica that owes less than its room: one queue for each role
    waiting = np.empty((2, total), np.int64)
    head = np.zeros(2, np.int64)
    tail = np.zeros(2, np.int64)
    times = np.zeros((3, 2 * total))
    replica = np.full(2 * total, -1, np.int64)
    active = np.zeros(2, np.int64)
    width = np.zeros(2)
    for i in range(replicas):
        for role in range(2):
            width[role] += serves[i] >> role & 1
    # Replicas without a stretch, of each role; where both take turns all count as the first's.
    idle = width.copy()
    touched = np.empty(replicas + 1, np.int64)  # those that begin a stretch now, ``begun`` of them
    unended = np.full(groups, samples)
    order = np.empty(groups, np.int64)
    spent = np.zeros(events.SPENT)
    now = 0.0
    phase = 0
    kept = 0
    finished = 0
    issued = 0
    in_flight = 0
    issue = min(events.groups_missing(needed, 0, 0, 0, rule), groups)
    begun = 0
    while True:
        for request in range(issued * samples, (issued + issue) * samples):
            waiting[0, tail[0]] = request
            tail[0] += 1
            times[0, request] = now
        issued += issue
        in_flight += issue
        active[0] += issue * samples
        issue = 0
        if in_turn and active[phase] == 0 and active[1 - phase] > 0:
            phase = 1 - phase
            now += switch_s
            spent[events.SWAPPING] += switch_s * replicas
        # -- what waits goes to the replica that owes the fewest
        for role in range(2):
            if in_turn and role != phase:
                continue
            while head[role] < tail[role]:
                least = -1
                for i in range(replicas):
                    if serves[i] >> role & 1 and (least < 0 or owes[i] < owes[least]):
                        least = i
                if least < 0 or owes[least] >= ROOM:
                    break
                request = waiting[role, head[role]]
                head[role] += 1
                _append(least, request, first, last, following)
                owes[least] += 1
                times[1, request] = now
                replica[request] = least
                if until[least] == np.inf:  # it begins at once
                    until[least] = now
                    idle[0 if in_turn else role] -= 1
                    touched[begun] = least
                    begun += 1
        # -- the replica whose stretch has ended begins the next; so do those that had nothing to do
        for n in range(begun):
            i = touched[n]
            role = phase if in_turn else (0 if serves[i] & 1 else 1)
            terms = profiles[role]
            debt = 0.0
            if cached[i] + count[i] > terms[5] and count[i] > 1:
                while cached[i] + count[i] > terms[5] and count[i] > 1:
                    count[i] -= 1
                    thrown = running[i, count[i]]
                    cached[i] -= holds[thrown]
                    following[thrown] = first[i]
                    first[i] = thrown
                    if last[i] < 0:
                        last[i] = thrown
            else:
                while first[i] >= 0 and count[i] < terms[4]:
                    request = first[i]
                    if count[i] and cached[i] + holds[request] > terms[5]:
                        break
                    first[i] = following[request]
                    if first[i] < 0:
                        last[i] = -1
                    running[i, count[i]] = request
                    count[i] += 1
                    cached[i] += holds[request]
                    read = holds[request]
                    group = request % total // samples
                    if role == 0:
                        if written[i] - used[i, group] < terms[5]:
                            read -= prompts[request]
                        used[i, group] = written[i]
                    else:
                        if written[i] - used_instructions[i] < terms[5]:
                            read -= instructions
                        used_instructions[i] = written[i]
                    read = max(read, 1.0)
                    written[i] += read
                    debt += read
            if count[i] == 0:
                until[i] = np.inf
                _set(ends, i, until[i])
                idle[0 if in_turn else role] += 1
                continue
            shortest = np.inf
            for k in range(count[i]):
                shortest = min(shortest, left[running[i, k]])
            room = max((terms[5] - cached[i]) // count[i], 1.0)
            rounds[i] = max(min(shortest, min(room, float(STRETCH))), 1.0)
            x = rounds[i]
            took = x * (terms[0] + terms[1] * count[i])
            took += terms[2] * (x * cached[i] + count[i] * x * (x - 1) / 2)
            took += terms[3] * debt
            share = count[i] / terms[4]
            level = 0
            while level + 1 < len(FULLNESS) and share >= FULLNESS[level + 1]:
                level += 1
            # a linear congruential generator; its high bits are the good ones
            chance[i] = chance[i] * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
            draw = int(chance[i] >> np.uint64(33)) % factors.shape[1]
            took *= factors[level, draw]
            until[i] = now + took
            _set(ends, i, until[i])
            spent[events.FILLED + role] += took * share
        # -- the next end of a stretch
        if in_flight == 0 or ends[1] == np.inf:
            break
        i = _least(ends)
        passed = until[i] - now
        for role in range(2):
            if in_turn and role != phase:
                continue
            resting = idle[0 if in_turn else role]
            spent[events.BUSY + role] += passed * (width[role] - resting)
            if role == 0:
                cause = events.TAIL if active[0] else events.NO_VERDICT
            else:
                cause = events.NO_RECORD if active[0] else events.JUDGE_TAIL
            spent[cause] += passed * resting
        now = until[i]
        touched[0] = i
        begun = 1
        remaining = 0
        role = phase if in_turn else (0 if serves[i] & 1 else 1)
        cached[i] += rounds[i] * count[i]
        written[i] += rounds[i] * count[i]
        for n in range(count[i]):
            request = running[i, n]
            left[request] -= rounds[i]
            holds[request] += rounds[i]
            if left[request] > 0:
                running[i, remaining] = request
                remaining += 1
                continue
            cached[i] -= holds[request]
            times[2, request] = now
            owes[i] -= 1
            active[role] -= 1
            record = request % total
            if role == 0 and actions[total + record] > 0:
                waiting[1, tail[1]] = total + record
                times[0, total + record] = now
                tail[1] += 1
                active[1] += 1
                continue
            group = record // samples
            unended[group] -= 1
            if unended[group] == 0:
                order[finished] = group
                finished += 1
                in_flight -= 1
                kept += keep[group]
                if not in_turn or in_flight == 0:
                    more = events.groups_missing(needed, kept, finished, in_flight + issue, rule)
                    issue = min(issue + more, groups - issued)
        count[i] = remaining
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
    queue: int, request: int, first: np.ndarray, last: np.ndarray, following: np.ndarray
) -> None:
    """Adds a request at the end of a linked list."""
    if first[queue] < 0:
        first[queue] = request
    else:
        following[last[queue]] = request
    following[request] = -1
    last[queue] = request


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
