"""Looks at what a model's tokenizer makes of rows, before a run.

``gcore_language.prompt_places`` yields the looks; the functions here answer them in a helper
process of the interpreter that the role will have.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gcore_core.contract.errors import DataError, did_you_mean
from gcore_core.contract.looking import Fact, Note
from gcore_core.contract.records import Prompt
from gcore_language.chats import Chats, Unreadable
from gcore_language.end_ids import end_ids
from gcore_language.memory import ANSWER_TOKENS, PROMPT_TOKENS
from gcore_language.model_files import read_config
from gcore_language.model_places import directory_here
from gcore_language.prompt_places import first_of
from gcore_language.prompts import PromptEncoder, ids_without_token, load_tokenizer

#: Marks of what the assistant says, which only transformers knows.
_MARKS = re.compile(r"{%-?\s*(?:end)?generation\s*-?%}")


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
    if ends:
        yield from _end_of_turns(tokenizer, ends)


def _end_of_turns(tokenizer: Any, ends: Sequence[int]) -> Iterator[Note]:
    """Yields a note where the template ends the assistant's turn with no id that ends an answer."""
    chats = Chats(tokenizer)
    turns = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "1"}]
    try:
        asked, written = chats.asked(turns[:1]), chats.written(turns)
        opens = written != chats.written(turns, opens=True)
    except Unreadable:
        return
    if not (opens and written.startswith(f"{asked}1")):
        return
    behind = written[len(asked) + 1 :].lstrip()
    ids = tokenizer(behind, add_special_tokens=False).input_ids
    if ids and not set(ids) & set(ends):
        yield Note(
            f"the chat template ends a turn of the assistant with "
            f"{tokenizer.convert_ids_to_tokens(ids[0])}, which no file names as the end of an "
            f"answer, so that answers may go on behind it; add its id, {ids[0]}, to eos_token_id "
            "in generation_config.json."
        )


def setting_problems(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yields problems with settings of a generator that its tokenizer decides on.

    arguments: as ``tokenizer_problems`` has them, and ``template_kwargs``; ``where``, config path
        of the generator's config; ``stop``, its texts that end an answer.
    """
    tokenizer = _tokenizer_if_whole(arguments)
    if tokenizer is None:
        return
    yield from _stops_of_tokens(tokenizer, arguments)
    names = arguments["template_kwargs"]
    known = _variables(tokenizer)
    if known is None:
        return
    for name in sorted(set(names) - known):
        yield Note(
            f"{arguments['where']}.chat_template_kwargs: the chat template reads no variable "
            f"{name}{did_you_mean(name, sorted(known))}; correct it, or leave it out."
        )


def _stops_of_tokens(tokenizer: Any, arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yields a problem for each stop text with a special token, since texts have none of them."""
    added = tokenizer.added_tokens_decoder.items()
    special = {token.content: i for i, token in added if token.special}
    try:
        ends = end_ids(Path(arguments["directory"]), _embedded(arguments), tokenizer)
    except DataError:
        return  # told with the tokenizer
    for text in arguments["stop"]:
        if special.get(text) in ends or not any(token in text for token in special):
            continue
        todo = (
            f"add its id, {special[text]}, to eos_token_id in generation_config.json"
            if text in special
            else "take what is before or behind that token"
        )
        yield (
            f"{arguments['where']}.stop: {text!r} {'is' if text in special else 'has'} a special "
            f"token, which is never a part of an answer's text, so no answer would stop there; "
            f"{todo}."
        )


def _variables(tokenizer: Any) -> set[str] | None:
    """Returns the variables that a chat template reads; None where rows tell what is wrong."""
    from jinja2 import Environment, TemplateError
    from jinja2.meta import find_undeclared_variables

    environment = Environment(autoescape=True, extensions=["jinja2.ext.loopcontrols"])
    try:
        template = _MARKS.sub("", tokenizer.get_chat_template())
        return find_undeclared_variables(environment.parse(template))
    except (ValueError, TemplateError):
        return None


def row_problems(arguments: Mapping[str, Any]) -> Iterator[str | Fact]:
    """Yields problems with rows, or with questions about rows, that a generator could not answer,
    and how long they are.

    arguments: as ``tokenizer_problems`` has them, or ``path`` and ``revision`` of the model in
        place of its directory; and ``template_kwargs``;
        where      config path that names the data
        role       config path of the generator
        what       how a row's number is introduced: "row", or "its question about row"
        rows       a row of each form, as ``gcore_language.rows`` gives them
        limit      tokens of prompt and answer; left out or null: not known
        long       the longest rows, with all that may have more
        all_long   whether no other row may
        count      rows of the dataset
        drops      whether prompts that are too long are left out
        answer_tokens  the most that an answer may have; left out: not known
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
    if arguments.get("long"):
        yield from _lengths(encoder, arguments)


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


def _lengths(encoder: PromptEncoder, arguments: Mapping[str, Any]) -> Iterator[str | Fact]:
    """Yields how long prompts are, and what is to be said of those that leave no room for an
    answer.
    """
    rows = arguments["long"]
    read = {
        row["row"]: len(ids)
        for row, ids in zip(rows, encoder.encode(_prompts(rows)), strict=True)
        if isinstance(ids, np.ndarray)
    }
    limit = sys.maxsize if arguments.get("limit") is None else arguments["limit"]
    has_images = any(row["images"] for row in rows)
    answer = arguments.get("answer_tokens")
    if read and answer and not has_images:  # those take tokens of their own
        yield Fact(PROMPT_TOKENS, min(max(read.values()), limit))
        yield Fact(ANSWER_TOKENS, min(answer, limit))
    lengths = {row: tokens for row, tokens in read.items() if tokens >= limit}
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
