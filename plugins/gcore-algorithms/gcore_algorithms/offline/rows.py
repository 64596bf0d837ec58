"""Detects and validates the formats in which the field writes answers down, one row at a time.

A row becomes an ``Example``: a prompt and one answer or two. What a row is follows from its fields:

    chat      messages                        a whole chat
              prompt, completion              texts, or lists of messages
              text                            a text without a prompt
    pairs     prompt, chosen, rejected        texts, or lists of messages
              chosen, rejected                the prompt is what both begin with
    scores    prompt, completion, score       texts, or lists of messages

A prompt that is a text may stand beside answers that are chats, which begin with it or do not. A
pair's margin is its field ``margin``, or ``score_chosen`` - ``score_rejected``, or 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from os.path import commonprefix
from typing import Any, Literal

import msgspec
import numpy as np
from gcore_language.rows import nbytes_of_prompt

from gcore_core.contract.errors import DataError
from gcore_core.contract.records import Prompt
from gcore_core.contract.rows import shortened

Kind = Literal["chat", "pairs", "scores"]
Turns = list[dict[str, Any]]

#: The field of a ``Prompt`` in which a dataset of this plugin keeps the row's example.
EXAMPLE = "example"
#: Names of an answer's field, and of its score.
_COMPLETIONS = ("completion", "response", "answer")
_SCORES = ("score", "label", "reward")
#: Labels go to the trainer as float32.
_LARGEST = float(np.finfo(np.float32).max)
#: Where an answer begins in a dialogue that is written as one text (Anthropic's HH).
_ASSISTANT = "\n\nAssistant:"


class Example(msgspec.Struct, frozen=True):
    """Holds a row: a prompt, and the answers to it.

    prompt: a text, or chat turns; empty where the answer is all there is.
    answers: of the same type as the prompt; of a pair the chosen one comes first.
    label: a pair's margin or an answer's score; 0 where the row has none.
    """

    prompt: str | Turns
    answers: list[str | Turns]
    label: float = 0.0


def example_of(values: Mapping[str, Any], kind: Kind, where: str) -> Example:
    """Makes an example of a row's fields.

    Raises DataError when the row is in none of the formats of ``kind``; it says what is wrong.

    where: the row, for errors.
    """
    make = {"chat": _chat, "pairs": _pair, "scores": _scored}[kind]
    return make(values, where)


def nbytes_of_row(prompt: Prompt) -> int:
    """Returns about how many bytes of text a row has, its answers included."""
    return nbytes_of_prompt(prompt) + len(json.dumps(prompt.fields, default=repr))


def example_in(prompt: Prompt, answers: int) -> Example:
    """Returns the example of a prompt, from whatever dataset.

    answers: how many the run needs: 2 of a pair, else 1.
    """
    kept = prompt.fields.get(EXAMPLE)
    if kept is not None:
        return msgspec.convert(kept, Example)
    values: dict[str, Any] = dict(prompt.fields)
    has_answer = any(name in values for name in (*_COMPLETIONS, "chosen"))
    values |= {"prompt": prompt.messages if prompt.messages is not None else prompt.text}
    if prompt.messages is not None and not has_answer:
        values = {"messages": prompt.messages}
    scored = any(name in values for name in _SCORES) and "chosen" not in values
    kind: Kind = "pairs" if answers == 2 else "scores" if scored else "chat"
    return example_of(values, kind, f"row {prompt.row}")


def prompt_of(row: int, example: Example, fields: Mapping[str, Any]) -> Prompt:
    """Makes the prompt of a row, which carries the example.

    fields: further values of the row.
    """
    carried = {**fields, EXAMPLE: msgspec.to_builtins(example)}
    prompt = example.prompt
    if isinstance(prompt, str):
        return Prompt(row=row, text=prompt, fields=carried)
    # Of a whole chat, a person is shown what the last answer answers.
    shown = prompt or [turn for turn in example.answers[0][:-1] if isinstance(turn, dict)]
    return Prompt(row=row, messages=shown, fields=carried)


# -- formats ---------------------------------------------------------------------------------------


def _chat(values: Mapping[str, Any], where: str) -> Example:
    if "messages" in values:
        turns = _turns(values["messages"], "messages", where)
        if not any(turn["role"] == "assistant" for turn in turns):
            raise DataError("no turn of messages is the assistant's", where=where)
        return Example([], [turns])
    name = _first(values, _COMPLETIONS)
    if name:
        return _answered(values, name, 0.0, where)
    if "text" in values:
        return Example("", [_text(values["text"], "text", where)])
    raise _unknown(values, "messages, or prompt and completion, or text", where)


def _scored(values: Mapping[str, Any], where: str) -> Example:
    name = _first(values, _COMPLETIONS)
    score = _first(values, _SCORES)
    if not name or not score:
        raise _unknown(values, "prompt, completion and score", where)
    return _answered(values, name, _number(values[score], score, where), where)


def _answered(values: Mapping[str, Any], name: str, label: float, where: str) -> Example:
    if "prompt" not in values:
        raise _unknown(values, f"prompt, beside {name}", where)
    prompt, (answer,) = _alike(values["prompt"], [values[name]], [name], where)
    return Example(prompt, [answer], label)


def _pair(values: Mapping[str, Any], where: str) -> Example:
    names = ["chosen", "rejected"]
    if any(name not in values for name in names):
        raise _unknown(values, "chosen and rejected, with prompt or without", where)
    answers = [values[name] for name in names]
    if "prompt" in values:
        prompt, both = _alike(values["prompt"], answers, names, where)
    else:
        prompt, both = _implicit(answers, names, where)
    if both[0] == both[1] and "prompt" not in values:
        raise DataError("chosen and rejected are the same, so there is no prompt", where=where)
    return Example(prompt, both, _margin(values, where))


def _alike(
    prompt: Any, answers: Sequence[Any], names: Sequence[str], where: str
) -> tuple[Any, list[Any]]:
    """Returns prompt and answers as texts, or all of them as turns where one is turns."""
    if isinstance(prompt, str) and all(isinstance(answer, str) for answer in answers):
        return prompt, list(answers)
    turns = prompt
    if isinstance(prompt, str):
        turns = [{"role": "user", "content": prompt}]
    turns = _turns(turns, "prompt", where)
    both = []
    for answer, name in zip(answers, names, strict=True):
        given = answer
        if isinstance(answer, str):
            given = [{"role": "assistant", "content": answer}]
        own = _turns(given, name, where)
        # Some write the whole chat as the answer, prompt and all.
        own = own[len(turns) :] if own[: len(turns)] == turns else own
        if not own or own[0]["role"] != "assistant":
            raise DataError(
                f"field {name!r} does not begin with a turn of the assistant",
                where=where,
                why="after the prompt, if it repeats that, an answer is the assistant's",
            )
        both.append(own)
    return turns, both


def _implicit(answers: Sequence[Any], names: Sequence[str], where: str) -> tuple[Any, list[Any]]:
    """Returns the prompt that both answers begin with, and what is left of them."""
    if all(isinstance(answer, str) for answer in answers):
        return _implicit_text(answers)
    turns = [_turns(answer, name, where) for answer, name in zip(answers, names, strict=True)]
    common = 0
    while common < min(map(len, turns)) and turns[0][common] == turns[1][common]:
        common += 1
    # A prompt ends before the assistant speaks.
    while common and (
        turns[0][common - 1]["role"] == "assistant" or common == min(map(len, turns))
    ):
        common -= 1
    if not common or any(own[common]["role"] != "assistant" for own in turns):
        raise DataError(
            "chosen and rejected have no prompt in common that the assistant answers", where=where
        )
    return turns[0][:common], [own[common:] for own in turns]


def _implicit_text(answers: Sequence[str]) -> tuple[str, list[str]]:
    ends = [answer.rfind(_ASSISTANT) for answer in answers]
    if ends[0] == ends[1] >= 0 and answers[0][: ends[0]] == answers[1][: ends[0]]:
        end = ends[0] + len(_ASSISTANT)
    else:
        common = commonprefix(list(answers))
        # Not inside a word: the tokens of the prompt alone would be others.
        end = max(common.rfind(" "), common.rfind("\n")) if common else 0
        end = max(end, 0)
    return answers[0][:end], [answer[end:] for answer in answers]


# -- fields ----------------------------------------------------------------------------------------


def _first(values: Mapping[str, Any], names: Sequence[str]) -> str:
    return next((name for name in names if name in values), "")


def _text(value: Any, name: str, where: str) -> str:
    if isinstance(value, str):
        return value
    raise DataError(f"field {name!r} is {_shown(value)}, not a text", where=where)


def _turns(value: Any, name: str, where: str) -> Turns:
    is_chat = isinstance(value, list) and bool(value)
    for turn in value if is_chat else []:
        is_turn = isinstance(turn, dict) and isinstance(turn.get("role"), str)
        is_chat = is_chat and is_turn and isinstance(turn.get("content"), str)
    if is_chat:
        return list(value)
    raise DataError(
        f"field {name!r} is {_shown(value)}, neither a text nor a list of messages",
        where=where,
        why='each message is an object with "role" and "content", both texts',
    )


def _number(value: Any, name: str, where: str) -> float:
    if isinstance(value, bool | int | float) and abs(value) <= _LARGEST:
        return float(value)
    raise DataError(
        f"field {name!r} is {_shown(value)}, not a finite number of float32", where=where
    )


def _margin(values: Mapping[str, Any], where: str) -> float:
    if "margin" in values:
        return _number(values["margin"], "margin", where)
    scores = [values.get(name) for name in ("score_chosen", "score_rejected")]
    if None in scores:
        return 0.0
    chosen = _number(scores[0], "score_chosen", where)
    margin = chosen - _number(scores[1], "score_rejected", where)
    return _number(margin, "score_chosen - score_rejected", where)


def _shown(value: Any) -> str:
    return shortened(repr(value).encode())


def _unknown(values: Mapping[str, Any], formats: str, where: str) -> DataError:
    return DataError(
        "the row is in no format of this dataset",
        where=where,
        why=f"it has: {', '.join(map(str, values)) or 'no field'}; needed: {formats}",
        todo="rename its fields, or take data.use: offline/chat, offline/pairs or offline/scores",
    )
