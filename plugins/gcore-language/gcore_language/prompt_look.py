"""Looks at what a model's tokenizer makes of rows, before a run.

``gcore_language.prompt_places`` yields the looks; the functions here answer them in a helper
process of the interpreter that the role will have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gcore_core.contract.errors import DataError
from gcore_core.contract.looking import Note
from gcore_core.contract.records import Prompt
from gcore_language.chats import Chats, Unreadable
from gcore_language.end_ids import end_ids
from gcore_language.model_files import read_config
from gcore_language.model_places import directory_here
from gcore_language.prompt_places import first_of
from gcore_language.prompts import PromptEncoder, ids_without_token, load_tokenizer


def tokenizer_problems(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Looks at a tokenizer, and at which ids end an answer; what is wrong is raised as a DataError.

    arguments: ``directory``, ``trust_remote_code``; ``sampled``, whether answers are sampled.
    """
    tokenizer = _tokenizer(arguments)
    if tokenizer is None or not arguments["sampled"]:
        return
    size = _embedded(arguments)
    ends = end_ids(Path(arguments["directory"]), size, tokenizer)
    if not ends:
        yield Note("no file names an id that ends an answer, so each goes on to max_new_tokens.")
    never = ids_without_token(tokenizer, size, ends)
    if never:
        yield Note(
            f"{len(never)} of {size} ids are without a token; no answer is sampled with them."
        )


def row_problems(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yields problems with rows, or with questions about rows, that a generator could not answer.

    arguments: as ``tokenizer_problems`` has them, or ``path`` and ``revision`` of the model in
        place of its directory; and ``template_kwargs``;
        where      config path that names the data
        role       config path of the generator
        what       how a row's number is introduced: "row", or "its question about row"
        rows       a row of each form, as ``gcore_core.kits.rows`` gives them
        limit      tokens of prompt and answer; left out or null: not known
        long       the longest rows that may have more
        all_long   whether no other row may
        count      rows of the dataset
        drops      whether prompts that are too long are left out
    """
    directory = arguments.get("directory") or directory_here(
        arguments["path"], arguments["revision"]
    )
    if directory is None:
        return
    encoder = _encoder({**arguments, "directory": str(directory)})
    if encoder is None:
        return
    where, what, role = arguments["where"], arguments["what"], arguments["role"]
    told = [
        f"{where}: {what} {row} cannot be answered by {role} ({directory}): {why}."
        for row, why in _unreadable(encoder, arguments["rows"])
    ]
    yield from first_of(told, where)
    if arguments.get("limit") is not None:
        yield from _too_long(encoder, arguments)


def written_problems(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yields problems with chats that a reward model reads with their answers.

    arguments: as ``row_problems`` has them; ``role`` is the config path of the reward.
    """
    tokenizer = _tokenizer_if_whole(arguments)
    if tokenizer is None:
        return
    chats = Chats(tokenizer)
    where, role = arguments["where"], arguments["role"]
    told = []
    for row in arguments["rows"]:
        if row.get("messages") is None:
            continue
        try:
            chats.written([*row["messages"], {"role": "assistant", "content": "1"}])
        except Unreadable as error:
            directory = arguments["directory"]
            what = f"{where}: row {row['row']} cannot be read by {role} ({directory})"
            told.append(f"{what}: {error}.")
    yield from first_of(told, where)


def _too_long(encoder: PromptEncoder, arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yields what is to be said of prompts that leave no room for an answer."""
    limit, rows = arguments["limit"], arguments["long"]
    if not rows:
        return
    lengths = {
        row["row"]: len(ids)
        for row, ids in zip(rows, encoder.encode(_prompts(rows)), strict=True)
        if isinstance(ids, np.ndarray) and len(ids) >= limit
    }
    if not lengths:
        return
    where, count = arguments["where"], arguments["count"]
    longest, tokens = max(lengths.items(), key=lambda item: item[1])
    at_least = "" if arguments["all_long"] or len(lengths) < len(rows) else "at least "
    said = (
        f"{where}: {at_least}{len(lengths)} of {count} rows have more tokens than {limit}, which "
        f"is what {arguments['role']} takes; row {longest} has {tokens}"
    )
    if len(lengths) == count:
        yield f"{said}; shorten the rows, or take another model or context_length."
    elif not arguments["drops"]:
        yield f"{said}; shorten them, or set controller.config.too_long: drop."
    else:
        yield Note(f"{said}; they are left out.")


def _unreadable(
    encoder: PromptEncoder, rows: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[int, str]]:
    """Yields row and reason of those that cannot be read, or have no tokens."""
    for row, ids in zip(rows, encoder.encode(_prompts(rows)), strict=True):
        if isinstance(ids, Unreadable):
            yield row["row"], str(ids)
        elif not len(ids):
            yield row["row"], "its prompt has no token"


def _prompts(rows: Sequence[Mapping[str, Any]]) -> list[Prompt]:
    return [
        Prompt(row=row["row"], text=row.get("text"), messages=row.get("messages")) for row in rows
    ]


def _encoder(arguments: Mapping[str, Any]) -> PromptEncoder | None:
    """Returns what encodes prompts; None where the tokenizer cannot be had, which is told."""
    tokenizer = _tokenizer_if_whole(arguments)
    if tokenizer is None:
        return None
    try:
        ends = end_ids(Path(arguments["directory"]), _embedded(arguments), tokenizer)
    except DataError:
        ends = []  # told with the tokenizer
    return PromptEncoder(tokenizer, ends, arguments["template_kwargs"])


def _tokenizer_if_whole(arguments: Mapping[str, Any]) -> Any | None:
    try:
        return _tokenizer(arguments)
    except DataError:
        return None


def _tokenizer(arguments: Mapping[str, Any]) -> Any | None:
    """Opens a tokenizer as a worker does; None where the library for it is missing."""
    try:
        return load_tokenizer(
            arguments["directory"],
            _embedded(arguments),
            trust_remote_code=bool(arguments["trust_remote_code"]),
        )
    except ImportError:
        return None  # what a role needs is checked by its provider


def _embedded(arguments: Mapping[str, Any]) -> int | None:
    """Returns how many ids the model has; None where that cannot be known, which is told."""
    try:
        settings = read_config(Path(arguments["directory"]))
    except DataError:
        return None
    size = settings.get("text_config", settings).get("vocab_size")
    return size if isinstance(size, int) else None
