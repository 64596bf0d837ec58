"""Looks at rows with answers before a run: whether the model's tokenizer can encode them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from gcore_language.chats import Unreadable
from gcore_language.memory import ANSWER_TOKENS, PROMPT_TOKENS
from gcore_language.prompt_places import first_of
from gcore_language.prompts import added_tokens, load_tokenizer, padding_id

from gcore_algorithms.offline.remembered import RememberingTokenizer
from gcore_algorithms.offline.rows import example_in
from gcore_algorithms.offline.tokens import Encoded, encode_answers, encode_texts
from gcore_core.contract.errors import DataError
from gcore_core.contract.looking import Fact
from gcore_core.contract.records import Prompt


def row_problems(arguments: Mapping[str, Any]) -> Iterator[str | Fact]:
    """Yields problems with rows that could not be encoded, or of which nothing is trained on, and
    how long the longest ones are.

    arguments: ``directory`` and ``trust_remote_code`` of the tokenizer;
        where    config path that names the data
        rows     a row of each form, as ``gcore_language.rows`` gives them
        long     the longest rows
        answers  how many a row must have
        reader   "answers", or "texts" for a reward model
        config   of the reader
    """
    directory, trust = arguments["directory"], arguments["trust_remote_code"]
    try:
        tokenizer = load_tokenizer(directory, None, trust_remote_code=trust)
        arguments = {**arguments, "padding": padding_id(directory, trust_remote_code=trust)}
    except (DataError, ImportError):
        return  # of the model, which is told
    remembering = RememberingTokenizer(tokenizer, added_tokens(tokenizer))
    told = []
    for row in arguments["rows"]:
        problem = _problem(remembering, row, arguments)
        if problem:
            told.append(f"{arguments['where']}: row {row['row']}: {problem}.")
    yield from first_of(told, arguments["where"])
    yield from _lengths(remembering, arguments)


def _lengths(tokenizer: RememberingTokenizer, arguments: Mapping[str, Any]) -> Iterator[Fact]:
    """Yields how many tokens the longest prompt and the longest answer have."""
    records: list[Encoded] = []
    for row in arguments["long"]:
        with contextlib.suppress(Unreadable, DataError):  # told where its form is
            records += _encoded(tokenizer, row, arguments)
    most = arguments["config"].get("max_tokens") or sys.maxsize
    if records:
        yield Fact(PROMPT_TOKENS, min(most, max(len(record.prompt) for record in records)))
        yield Fact(ANSWER_TOKENS, min(most, max(len(record.actions) for record in records)))


def _problem(
    tokenizer: RememberingTokenizer, row: Mapping[str, Any], arguments: Mapping[str, Any]
) -> str:
    try:
        answers = _encoded(tokenizer, row, arguments)
    except Unreadable as error:
        return f"{error} (tokenizer of {arguments['directory']})"
    except DataError as error:
        return "; ".join(part.rstrip(".") for part in (error.what, error.why, error.todo) if part)
    if len(answers) < arguments["answers"]:
        return f"it has {len(answers)} answers, and the run needs {arguments['answers']}"
    if not all(answer.mask.any() for answer in answers):
        return "an answer has no token that is trained on"
    return ""


def _encoded(
    tokenizer: RememberingTokenizer, row: Mapping[str, Any], arguments: Mapping[str, Any]
) -> list[Encoded]:
    """Returns the answers of a row as the reader encodes them. Raises Unreadable and DataError."""
    prompt = Prompt(
        row=row["row"], text=row.get("text"), messages=row.get("messages"), fields=row["fields"]
    )
    example = example_in(prompt, arguments["answers"])
    if arguments["reader"] == "texts":
        return encode_texts(tokenizer, example, padding=arguments["padding"])
    config = arguments["config"]
    return encode_answers(
        tokenizer,
        example,
        last_turn=config["turns"] == "last",
        add_end=bool(config["add_end"]),
        where=f"row {prompt.row}",
    )
