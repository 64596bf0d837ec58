"""Makes one record of an episode's sequences.

The record's prompt is what the first sequence was given before its first turn. All other ids are
actions: those that a policy sampled, with ``action_mask`` 1, and those that were given to it. Of
each sequence they are its *own part*, the ids that it does not share with its parent; own parts
stand one behind the other. ``gcore_language.sequences`` reads such a record.

    sequence 0   p q | a b | r s | c        parent -1, shared 2: the prompt
    sequence 1   p q | a b | t | d          parent 0, shared 4
    record       prompt p q, actions a b r s c t d, mask 1 1 0 0 1 0 1
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from gcore_core.contract.columns import column_of_versions
from gcore_environments.book import Book, Sequence


def columns_of(
    book: Book, *, temperature: float, text: str, episode: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Returns the columns of an episode's record.

    Beside those that each record of tokens has (``gcore_core.contract.records``):

        turns        int32[T, 4]  of each turn (begin and end among the actions, version of its
                                  first action, player)
        turn_reward  float32[A]   the reward of a turn at its last action, else 0
        sequences    int32[S, 3]  of each sequence (begin of its own part among the actions; number
                                  of its parent, -1 for none; how many ids of prompt and actions it
                                  begins with that are its parent's)
        episode      uint8[*]     UTF-8 of JSON

    A given id has the version of the turn before it, or that of the first action of all where
    there is none.

    book: with at least one sequence.
    temperature: at which all log-probs were taken.
    text: all that was sampled, as rewards read it.
    episode: what scorers and the report read: messages, rewards by name, forks and the like.
    """
    first = book.sequences[0]
    prompt = first.spans[0][0] if first.spans else len(first.ids)
    parts: list[dict[str, np.ndarray]] = []
    versions: list[np.ndarray] = []  # of all ids of each sequence
    sequences: list[tuple[int, int, int]] = []
    turns: list[tuple[int, int, int, int]] = []
    begin = 0
    for number, one in enumerate(book.sequences):
        shared = prompt if number == 0 else one.shared
        offset = begin - shared  # from a place in the sequence to that among the actions
        sequences.append((begin, one.parent, shared))
        turns += [(offset + b, offset + e, version, who) for b, e, version, who in one.spans]
        before = versions[one.parent][:shared] if one.parent >= 0 else np.zeros(0, np.int32)
        versions.append(_versions(one, before, _first_version(book)))
        whole = _whole(one) | {"version": versions[-1]}
        parts.append({name: column[shared:] for name, column in whole.items()})
        begin += len(one.ids) - shared
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return {
        "prompt_ids": np.array(first.ids[:prompt], np.int32),
        **{name: column for name, column in columns.items() if name != "version"},
        **column_of_versions(columns["version"]),
        "temperature": np.array(temperature, np.float32),
        "text": np.frombuffer(text.encode(), np.uint8),
        "turns": np.array(turns, np.int32).reshape(-1, 4),
        "sequences": np.array(sequences, np.int32).reshape(-1, 3),
        "episode": np.frombuffer(_json(episode), np.uint8),
    }


def cost_of(book: Book) -> float:
    """Returns how many ids trainers read a second time, since sequences share them.

    It is the ``cost`` of ``Finished``, in tokens.
    """
    return float(sum(one.shared for one in book.sequences))


def _whole(one: Sequence) -> dict[str, np.ndarray]:
    """Returns a column with a value for each id of a sequence, by name."""
    count = len(one.ids)
    mask = np.zeros(count, np.uint8)
    logp = np.zeros(count, np.float32)
    rewards = np.zeros(count, np.float32)
    at = 0
    for (begin, end, _, _), reward in zip(one.spans, one.rewards, strict=True):
        mask[begin:end] = 1
        logp[begin:end] = one.logp[at : at + end - begin]
        rewards[end - 1] = reward
        at += end - begin
    return {
        "action_ids": np.array(one.ids, np.int32),
        "logp": logp,
        "action_mask": mask,
        "turn_reward": rewards,
    }


def _versions(one: Sequence, before: np.ndarray, first: int) -> np.ndarray:
    """Returns the version of each id of a sequence, int32.

    before: int32, the versions of the ids that it shares with its parent.
    first: the version of ids that have no turn before them.
    """
    versions = np.full(len(one.ids), first, np.int32)
    versions[: len(before)] = before
    latest = int(before[-1]) if len(before) else first
    at, behind = 0, len(before)
    for begin, end, _, _ in one.spans:
        versions[behind:begin] = latest
        versions[begin:end] = one.versions[at : at + end - begin]
        latest = one.versions[at + end - begin - 1]
        at, behind = at + end - begin, end
    versions[behind:] = latest
    return versions


def _first_version(book: Book) -> int:
    """Returns the version of the first action of all that were sampled, -1 without any."""
    return next((one.versions[0] for one in book.sequences if one.versions), -1)


def _json(episode: Mapping[str, Any]) -> bytes:
    return json.dumps(episode, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")
