"""Records of episodes as OpenEnv's ``TrainingTrace`` (schema 1), and back.

Such a trace has one entry for each turn: all that the policy read, and what it sampled. Nothing of
OpenEnv is needed here. What a record has beside the tokens goes into ``metadata``, under
``g_core``, so that an export that is read again is the same episode.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from gcore_language.sequences import cut

from gcore_core.contract.columns import Columns
from gcore_core.contract.errors import DataError
from gcore_environments.book import Book
from gcore_environments.matching import place_ids
from gcore_environments.records import columns_of

SCHEMA_VERSION = 1
_OURS = "g_core"
_TURN = ("prompt_token_ids", "completion_token_ids", "per_token_logps", "loss_mask")


def trace_of(columns: Columns) -> dict[str, Any]:
    """Returns a record as a trace, ready for JSON. A sequence without a turn is not in it.

    A record without the column ``turns`` is one turn.
    """
    turns = columns.get("turns")
    if turns is None:
        turns = np.array([[0, len(columns["action_ids"]), -1, 0]], np.int32)
    entries: list[dict[str, Any]] = []
    for row in cut(columns):
        own = row.columns
        read, actions = own["prompt_ids"].tolist(), own["action_ids"].tolist()
        mask, logp = own["action_mask"].tolist(), own["logp"].tolist()
        for begin, end, version, player in turns.tolist():
            if not row.begin <= begin < row.end:
                continue
            first, last = begin - row.begin, end - row.begin
            prompt = [*read, *actions[:first]]
            about: dict[str, Any] = {"version": version, "player": player}
            if "version" in own:
                about["versions"] = own["version"][first:last].tolist()
            if "turn_reward" in own:
                about["reward"] = float(own["turn_reward"][first:last].sum())
            entry = {
                "node_id": str(len(entries)),
                "prompt_token_ids": prompt,
                "completion_token_ids": actions[first:last],
                "per_token_logps": [min(value, 0.0) for value in logp[first:last]],
                "loss_mask": [0] * len(prompt) + mask[first:last],
                "metadata": {_OURS: about},
            }
            entries.append(entry)
    if entries:
        entries[0]["metadata"][_OURS] |= _of_record(columns)
    return {"schema_version": SCHEMA_VERSION, "turns": entries}


def columns_of_trace(trace: Mapping[str, Any]) -> Columns:
    """Returns the record of a trace, of ours or of another. What its mask hides is given.

    Raises DataError for a trace that cannot be trained on.
    """
    if trace.get("schema_version", SCHEMA_VERSION) != SCHEMA_VERSION:
        raise _error("schema_version", f"is {trace['schema_version']!r}, not {SCHEMA_VERSION}")
    turns = trace.get("turns")
    if not isinstance(turns, list) or not turns:
        raise _error("turns", "has no turn")
    book = Book()
    for place, turn in enumerate(turns):
        _add(book, turn, f"turns[{place}]")
    ours = _ours(turns[0])
    return columns_of(
        book,
        temperature=float(ours.get("temperature", 1.0)),
        text=str(ours.get("text", "")),
        episode=ours.get("episode", {}),
    )


def _of_record(columns: Columns) -> dict[str, Any]:
    found: dict[str, Any] = {"temperature": float(columns["temperature"])}
    if "text" in columns:
        found["text"] = columns["text"].tobytes().decode(errors="replace")
    if "episode" in columns:
        found["episode"] = json.loads(columns["episode"].tobytes() or b"{}")
    return found


def _ours(turn: Mapping[str, Any]) -> dict[str, Any]:
    metadata = turn.get("metadata")
    found = metadata.get(_OURS) if isinstance(metadata, Mapping) else None
    return dict(found) if isinstance(found, Mapping) else {}


def _add(book: Book, turn: Any, where: str) -> None:
    """Writes a turn: a run of what its mask trains is sampled, any other run is given."""
    _check(turn, where)
    prompt, said, logp, mask = (turn[name] for name in _TURN)
    ours, own = _ours(turn), mask[len(prompt) :]
    versions = ours.get("versions", [int(ours.get("version", 0))] * len(said))
    number = place_ids(book, prompt, "fork")
    begin = 0
    while begin < len(said):
        end = next((at for at in range(begin, len(said)) if own[at] != own[begin]), len(said))
        if own[begin]:
            run = slice(begin, end)
            book.sampled(number, said[run], logp[run], versions[run], int(ours.get("player", 0)))
        else:
            book.sampled(number, [], [], [])
            number = book.go_on(number, len(book.sequences[number].ids), said[begin:end])
        begin = end
    book.reward(float(ours.get("reward", 0.0)), number)


def _check(turn: Any, where: str) -> None:
    if not isinstance(turn, Mapping):
        raise _error(where, "is no object")
    for name in _TURN:
        if not isinstance(turn.get(name), list):
            raise _error(f"{where}.{name}", "must be a list")
    for name, problem in _problems(*(turn[name] for name in _TURN)).items():
        if problem:
            raise _error(f"{where}.{name}", problem)


def _problems(
    prompt: list[Any], said: list[Any], logp: list[Any], mask: list[Any]
) -> dict[str, str]:
    """What is wrong with each column of a turn; empty where nothing is."""
    found = dict.fromkeys(_TURN, "")
    for name, ids in ("prompt_token_ids", prompt), ("completion_token_ids", said):
        if not all(type(one) is int and 0 <= one < 1 << 31 for one in ids):
            found[name] = "must be a list of ids, each a whole number from 0"
    if not prompt:
        found["prompt_token_ids"] = "has no id, so nothing predicts the first one"
    if len(logp) != len(said):
        found["per_token_logps"] = f"has {len(logp)} values for {len(said)} ids"
    elif not all(_is_logp(one) for one in logp):
        found["per_token_logps"] = "must have finite numbers, none above 0"
    if len(mask) != len(prompt) + len(said):
        found["loss_mask"] = "must cover prompt and completion"
    elif not all(type(one) is int and one in (0, 1) for one in mask):
        found["loss_mask"] = "must have only 0 and 1"
    elif any(mask[: len(prompt)]):
        found["loss_mask"] = "trains ids of the prompt, which no policy sampled"
    return found


def _is_logp(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and value <= 0


def _error(where: str, what: str) -> DataError:
    return DataError(
        f"{what}.",
        where=where,
        why="Only what a policy sampled, with its log-probs, can be trained on.",
        todo="Export the trace again, or leave this one out.",
    )
