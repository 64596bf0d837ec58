"""Asks rewards what is known already, where a job wants it (``alone_every``, ``known``).

A receipt says what a scorer said of a record, not whether it meant that record; a status says that
a reward failed only where the reward tells it. Both checks ask the reward itself:

alone   one record's score is asked for again, alone: a function that scores a batch may sort it
known   rows whose reward a person has written down: a verifier may swallow its own errors
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gcore_core.contract.errors import ConfigError, RecordMismatch
from gcore_core.contract.lineage import name_of
from gcore_core.contract.plugin_code import definition_of
from gcore_core.contract.records import FINISHED, OK, Prompt
from gcore_core.contract.scorer import LARGEST_VALUE, Score, ScoredRecord

#: Asks a reward for the scores of some records; None where it gave none that can be compared.
Ask = Callable[[list[ScoredRecord]], Awaitable[list[Score] | None]]
#: Known rows are asked about in the first request of a process and in every so many-th after it.
KNOWN_EVERY = 64
#: Two values of a reward that are closer than this share of the larger one are the same.
_CLOSE = 1e-6


async def check_alone(
    name: str,
    function: Callable[..., Any],
    records: Sequence[ScoredRecord],
    scores: Sequence[Score],
    ask: Ask,
) -> None:
    """Asks for one record's score again, alone and twice; raises RecordMismatch where it is
    another.

    A reward that answers differently when it is asked twice is left alone: then it is no function
    of the record.

    name: of the reward.
    function: what scores, for the error.
    records, scores: what the reward was asked and what it gave, at least two different values.
    """
    values = Counter(score.value for score in scores)
    # The record with the rarest score: in another place it would differ most likely.
    place = min(range(len(scores)), key=lambda i: values[scores[i].value])
    answers = [await ask([records[place]]) for _ in range(2)]
    given = [answer[0].value for answer in answers if answer]
    if len(given) < 2 or given[0] != given[1] or given[0] == scores[place].value:
        return
    record, alone = records[place], given[0]
    holders = [
        name_of(other.ordinal, other.sample)
        for other, score in zip(records, scores, strict=True)
        if score.value == alone
    ]
    why = "a score belongs to its record, whatever it is asked with"
    if holders:
        why += f"; {alone} was given to {', '.join(holders[:3])}"
    raise RecordMismatch(
        f"record {name_of(record.ordinal, record.sample)} gets {scores[place].value} among others "
        f"and {alone} alone",
        where=f"rewards.{name}",
        why=why,
        todo=f"see how {definition_of(function)} sorts its records",
        ordinal=record.ordinal,
        sample=record.sample,
    )


@dataclass(frozen=True, kw_only=True)
class KnownRow:
    """Holds an answer whose reward a person has written down.

    line: its number in the file, from 1.
    record: as the reward sees it; its sample is its place in the file, its ordinal below zero.
    reward: the value that the reward must give it.
    """

    line: int
    record: ScoredRecord
    reward: float


def read_known(path: str, name: str) -> list[KnownRow]:
    """Reads a file of ``{"row": {...}, "text": "...", "reward": 1.0}``, one object a line.

    row: the fields of a row as the dataset has them; ``prompt`` is its text, or its ``messages``.
    name: of the reward. Raises ConfigError where the file cannot be read.
    """
    where = f"rewards.{name}.known"
    try:
        # Not splitlines, which also ends a line at characters that a text in JSON may have.
        lines = Path(path).read_text(encoding="utf-8").split("\n")
        numbered = [(n, json.loads(line)) for n, line in enumerate(lines, 1) if line.strip()]
        known = [_known_row(place, *line) for place, line in enumerate(numbered)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise _no_known(path, f"{type(error).__name__}: {error}", where) from error
    if not known:
        raise _no_known(path, "it has no rows, so nothing would be checked", where)
    return known


def _no_known(path: str, why: str, where: str) -> ConfigError:
    return ConfigError(
        f"{path} has no known rewards: {why}.",
        where=where,
        todo='each line is {"row": {"prompt": "1+1="}, "text": "2", "reward": 1.0}',
    )


def _known_row(place: int, line: int, content: dict[str, Any]) -> KnownRow:
    fields = dict(content["row"])
    messages = fields.pop("messages", None)
    text = None if messages is not None else str(fields.pop("prompt", ""))
    prompt = Prompt(row=place, text=text, messages=messages, fields=fields)
    record = ScoredRecord(
        ordinal=-1 - place,
        sample=place,
        prompt=prompt,
        text=str(content["text"]),
        status=FINISHED,
        columns={},
    )
    reward = float(content["reward"])
    if not math.isfinite(reward):
        raise ValueError(f"line {line}: the reward is {reward}")
    if abs(reward) > LARGEST_VALUE:  # such a reward fails, so the answer could never be right
        raise ValueError(f"line {line}: the reward is {reward:g}, too large for a float32")
    return KnownRow(line=line, record=record, reward=reward)


async def check_known(name: str, path: str, rows: Sequence[KnownRow], ask: Ask) -> None:
    """Asks a reward about known rows; raises RecordMismatch for the first that it scores otherwise.

    Nothing is compared where the reward raises, or does not answer in time: that shows in the
    status of the step's own records. A failure that it gives for a row is a wrong answer.

    path: of the file with the rows, for the error.
    """
    scores = await ask([row.record for row in rows])
    if scores is None:
        return
    for row, score in zip(rows, scores, strict=True):
        if score.status != OK or score.value is None:
            said = f"fails ({score.reason or score.status})"
        elif math.isclose(score.value, row.reward, rel_tol=_CLOSE, abs_tol=1e-9):
            continue
        else:
            said = f"gives {float(score.value):g}"
        wrong = f"{said} for an answer whose reward is known to be {row.reward:g}"
        raise RecordMismatch(
            f"the reward {wrong}",
            where=f"rewards.{name}",
            why=f"line {row.line} of {path}: an error that is told as a wrong answer looks so",
            todo="see what the reward does with its own errors: it should raise, or give a failure",
            ordinal=row.record.ordinal,
            sample=row.record.sample,
        )
