"""Picks the rows of a dataset that are worth looking at before a run, as plain JSON values.

For ``gcore_check_files``: what a row looks like decides whether a chat template renders it, whether
a verifier can read it and whether it is too long. A few rows stand for all of their form, and they
travel to a helper process as arguments of a ``Look``. Each is an object:

    row       its number in the dataset, counted from 0
    text      the prompt, or ``messages``: its chat turns, as in ``Prompt``
    images    paths of its images
    fields    its other values
    not_json  names of fields that are left out, as JSON has no word for them, such as bytes
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterator
from typing import Any

from gcore_core.contract.dataset import Dataset
from gcore_core.contract.records import Prompt
from gcore_core.contract.rows import spread

#: Rows that are read, spread evenly over the dataset: to find forms, and to find long ones.
_READ_FOR_FORMS = 2_000
_READ_FOR_LENGTHS = 10_000


def rows_of_each_form(dataset: Dataset, most: int = 100) -> list[dict[str, Any]]:
    """Returns the first row of each form, out of up to 2,000 that are spread evenly.

    Rows have one form where they have the same of all these: text or messages; an empty prompt or
    not; which role follows which; what kind of content each role has (text, null, parts and their
    types) and which further keys; whether the assistant has the last turn; whether there are
    images; the fields and the types of their values.

    Raises DataError for a row that is malformed.

    most: forms that are looked for.
    """
    first_of: dict[str, Prompt] = {}
    for row in spread(len(dataset), _READ_FOR_FORMS):
        prompt = dataset[row]
        first_of.setdefault(_form(prompt), prompt)
        if len(first_of) == most:
            break
    return [_plain(prompt) for prompt in first_of.values()]


def nbytes_of_prompt(prompt: Prompt) -> int:
    """Returns how many bytes of text a prompt has, without what else its row has."""
    return len((prompt.text or "").encode(errors="replace")) + sum(
        len(text.encode(errors="replace"))
        for turn in prompt.messages or ()
        for text in _texts(turn.get("content"))
    )


def longest_rows(
    dataset: Dataset,
    over_bytes: int,
    most: int = 300,
    least: int = 0,
    nbytes_of: Callable[[Prompt], int] = nbytes_of_prompt,
) -> list[dict[str, Any]]:
    """Returns the rows that have most bytes, longest first, of those that may be too long.

    A token has at least one byte, so a prompt of no more bytes than a limit in tokens has room, but
    for what a template adds. All rows are read, or 10,000 that are spread evenly.

    Raises DataError for a row that is malformed.

    over_bytes: prompts of so many bytes or fewer are left out.
    most: rows that are returned.
    least: of the longest rows so many are returned, however short they are.
    nbytes_of: how many bytes of text of a row count.
    """
    longest: list[tuple[int, int]] = []
    for row in spread(len(dataset), _READ_FOR_LENGTHS):
        # Of two that are equally long the first one counts.
        push = heapq.heappush if len(longest) < most else heapq.heappushpop
        push(longest, (nbytes_of(dataset[row]), -row))
    return [
        _plain(dataset[-row])
        for place, (nbytes, row) in enumerate(sorted(longest, reverse=True))
        if nbytes > over_bytes or place < least
    ]


def _form(prompt: Prompt) -> str:
    """Returns a text that is the same for rows of the same form."""
    turns = prompt.messages or []
    roles = ["", *(str(turn.get("role")) for turn in turns)]
    return repr(
        (
            "text" if prompt.messages is None else "messages",
            not (prompt.text or turns),
            sorted(set(zip(roles, roles[1:], strict=False))),
            sorted({(*_kind(turn), *sorted(turn)) for turn in turns}),
            roles[-1] == "assistant",
            bool(prompt.images),
            sorted((name, type(value).__name__) for name, value in prompt.fields.items()),
        )
    )


def _kind(turn: dict[str, Any]) -> Iterator[str]:
    """Yields the role of a turn, then what kind of content it has."""
    yield str(turn.get("role"))
    content = turn.get("content")
    yield type(content).__name__ if content else f"no {type(content).__name__}"
    if isinstance(content, list):
        types = {part.get("type") if isinstance(part, dict) else type(part) for part in content}
        yield from sorted(map(str, types))


def _texts(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        texts = (part.get("text") for part in content if isinstance(part, dict))
        yield from (text for text in texts if isinstance(text, str))


def _plain(prompt: Prompt) -> dict[str, Any]:
    """Returns a row as plain JSON values; see the module."""
    row: dict[str, Any] = {"row": prompt.row}
    if prompt.messages is None:
        row["text"] = prompt.text
    else:
        row["messages"] = json.loads(json.dumps(prompt.messages, default=repr))
    row["images"] = list(prompt.images)
    row["fields"] = {name: value for name, value in prompt.fields.items() if _is_json(value)}
    row["not_json"] = sorted(prompt.fields.keys() - row["fields"].keys())
    return row


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
