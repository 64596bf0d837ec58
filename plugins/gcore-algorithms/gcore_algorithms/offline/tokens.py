"""Turns examples into tokens, and says which of them are trained on.

A policy's record is what it would have sampled: the prompt is encoded by itself, as generators do,
and so is the answer. A text that is encoded as one may join letters across the border into one
token, and then has a prompt that nobody is ever asked.

A chat is written by the tokenizer's template. The assistant's tokens are found in one of two ways:

    mask      the template marks them (``{% generation %}``), and transformers gives the mask
    prefix    the chat up to a turn, and up to its end, are written too; where each is what the
              whole chat begins with, the difference is the turn's text

A template for which neither is exact is refused. It may, for example, drop what the assistant
thought in turns but the last: then only the last turn can be trained on.

A reward model's record is the whole text as reward models read it: written and encoded as one, up
to its last token that is no padding. There transformers and the reward ``torch`` take the reward
from, also of texts that end with a token that is both the end of a turn and padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gcore_algorithms.offline.remembered import RememberingTokenizer
from gcore_algorithms.offline.rows import Example, Turns
from gcore_core.contract.errors import DataError

_GENERATION = "{% generation"
_TIGHT_GENERATION = "{%- generation"


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """Holds the tokens of an answer to a prompt.

    prompt: int32[P], P > 0; tokens that are never trained on.
    actions: int32[A].
    mask: uint8[A], 1 where a token is trained on. A is 0 where no token is.
    """

    prompt: np.ndarray
    actions: np.ndarray
    mask: np.ndarray

    def __len__(self) -> int:
        return len(self.prompt) + len(self.actions)


def encode_answers(
    tokenizer: RememberingTokenizer, example: Example, *, last_turn: bool, add_end: bool, where: str
) -> list[Encoded]:
    """Returns each answer of an example as a policy's record; all have the same prompt.

    Raises Unreadable for a chat that the template refuses, DataError for one whose template does
    not show what the assistant writes.

    last_turn: whether only the last turn of the assistant is trained on.
    add_end: whether an answer that does not end with the end-of-sequence token gets it.
    where: the row, for errors.
    """
    marked = [
        _text_tokens(tokenizer, example.prompt, answer, add_end)
        if isinstance(answer, str)
        else _chat_tokens(tokenizer, example.prompt, answer, last_turn, add_end, where)
        for answer in example.answers
    ]
    # What is before the first trained token of any answer is the prompt of all.
    first = min(_first_trained(mask) for _, mask in marked)
    border = min([first, *(_common(marked[0][0], ids) for ids, _ in marked[1:])])
    return [_cut(ids, mask, border) for ids, mask in marked]


def encode_texts(
    tokenizer: RememberingTokenizer, example: Example, *, padding: int | None
) -> list[Encoded]:
    """Returns each answer of an example as a reward model's record; all have the same prompt.

    The records' prompt is what their tokens have in common, less one: so every record has an
    action, and after its last one the model has read what its reward is of.

    padding: the model's padding; None where it has none.

    Raises Unreadable for a chat that the template refuses.
    """
    rows = [
        _without_padding(_whole(tokenizer, example.prompt, answer), padding)
        for answer in example.answers
    ]
    shortest = min(map(len, rows))
    common = min([shortest, *(_common(rows[0], row) for row in rows[1:])])
    border = max(min(common, shortest - 1), min(1, shortest))
    return [_cut(row, np.ones(len(row), np.uint8), border) for row in rows]


def _whole(tokenizer: RememberingTokenizer, prompt: Any, answer: Any) -> np.ndarray:
    if isinstance(answer, str):
        return np.array(tokenizer.whole(prompt + answer), np.int32)
    return _ids(tokenizer, tokenizer.chats.written([*prompt, *answer]))


def _without_padding(ids: np.ndarray, padding: int | None) -> np.ndarray:
    """Returns a row up to its last token that is no padding; its first one where all are."""
    read = np.flatnonzero(ids != (-1 if padding is None else padding))
    return ids[: read[-1] + 1] if len(read) else ids[:1]


# -- texts -----------------------------------------------------------------------------------------


def _text_tokens(
    tokenizer: RememberingTokenizer, prompt: Any, answer: str, add_end: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens int32[T] and where they are trained on, uint8[T]."""
    before = np.array(tokenizer.asked(prompt), np.int32)
    actions = _ids(tokenizer, answer)
    if add_end:
        actions = _ended(tokenizer, actions)
    mask = np.repeat(np.array([0, 1], np.uint8), [len(before), len(actions)])
    return np.concatenate([before, actions]), mask


def _ids(tokenizer: RememberingTokenizer, text: str) -> np.ndarray:
    return np.array(tokenizer(text, add_special_tokens=False).input_ids, np.int32)


def _ended(tokenizer: RememberingTokenizer, ids: np.ndarray) -> np.ndarray:
    end = tokenizer.eos_token_id
    if end is None or (len(ids) and ids[-1] == end):
        return ids
    return np.append(ids, np.int32(end))


# -- chats -----------------------------------------------------------------------------------------


def _chat_tokens(
    tokenizer: RememberingTokenizer,
    prompt: Any,
    answer: Turns,
    last_turn: bool,
    add_end: bool,
    where: str,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens int32[T] and where they are trained on, uint8[T]."""
    turns: Turns = [*prompt, *answer]
    trained = [
        place for place in range(len(prompt), len(turns)) if turns[place]["role"] == "assistant"
    ]
    trained = trained[-1:] if last_turn else trained
    by_mask = None
    if any(word in _template(tokenizer) for word in (_GENERATION, _TIGHT_GENERATION)):
        by_mask = _by_mask(tokenizer, turns, trained)
    ids, mask = by_mask or _by_prefix(tokenizer, turns, trained, where)
    end = tokenizer.eos_token_id
    if add_end and end is not None and trained and trained[-1] == len(turns) - 1:
        last = _last_trained(mask)
        if last >= 0 and ids[last] != end:
            ids = np.append(ids[: last + 1], np.int32(end))
            mask = np.append(mask[: last + 1], np.uint8(1))
    return ids, mask


def _template(tokenizer: RememberingTokenizer) -> str:
    template = tokenizer.chat_template
    return template if isinstance(template, str) else ""


def _by_mask(
    tokenizer: RememberingTokenizer, turns: Turns, trained: Sequence[int]
) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns what the template's own marks say; None where they do not show every turn."""
    written, marked = tokenizer.chats.marked(turns)
    ids = np.array(written, np.int32)
    marks = np.array(marked, np.int8)
    edges = np.flatnonzero(np.diff(marks, prepend=0, append=0)).reshape(-1, 2)
    spoken = [place for place, turn in enumerate(turns) if turn["role"] == "assistant"]
    if len(edges) != len(spoken):
        return None
    mask = np.zeros(len(ids), np.uint8)
    for place, (start, end) in zip(spoken, edges.tolist(), strict=True):
        mask[start:end] = place in trained
    return ids, mask


def _by_prefix(
    tokenizer: RememberingTokenizer, turns: Turns, trained: Sequence[int], where: str
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens of the whole chat, encoded in pieces that end where a turn does.

    So a turn's tokens are those that the policy would sample after what comes before it.
    """
    write = tokenizer.chats.written
    whole = write(turns)
    pieces: list[tuple[str, int]] = []
    position = 0
    for place in trained:
        before = write(turns[:place], opens=True)
        after = write(turns[: place + 1])
        if not (whole.startswith(after) and after.startswith(before) and len(before) >= position):
            raise DataError(
                f"the chat template does not show which tokens of turn {place} the assistant wrote",
                where=where,
                why="a chat that goes on is not written as it was before, and the template marks "
                "nothing with {% generation %}",
                todo="set roles.rollout.config.turns: last, or mark the assistant's part of the "
                "template with {% generation %} and {% endgeneration %}",
            )
        pieces += [(whole[position : len(before)], 0), (whole[len(before) : len(after)], 1)]
        position = len(after)
    pieces.append((whole[position:], 0))
    parts = [(_ids(tokenizer, text), trained_on) for text, trained_on in pieces if text]
    ids = np.concatenate([part for part, _ in parts])
    mask = np.concatenate([_until_end(tokenizer, *part) for part in parts])
    return ids, mask


def _until_end(tokenizer: RememberingTokenizer, ids: np.ndarray, trained_on: int) -> np.ndarray:
    """Returns uint8[T]: a turn is trained on up to its end-of-sequence token, where it has one.

    What a template writes after that, such as a line break, nobody samples.
    """
    mask = np.full(len(ids), trained_on, np.uint8)
    ends = np.flatnonzero(ids == tokenizer.eos_token_id)
    if len(ends):
        mask[ends[-1] + 1 :] = 0
    return mask


# -- borders ---------------------------------------------------------------------------------------


def _first_trained(mask: np.ndarray) -> int:
    places = np.flatnonzero(mask)
    return int(places[0]) if len(places) else len(mask)


def _last_trained(mask: np.ndarray) -> int:
    places = np.flatnonzero(mask)
    return int(places[-1]) if len(places) else -1


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """Returns how many tokens two rows have in common from the first on."""
    shorter = min(len(one), len(other))
    differs = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(differs[0]) if len(differs) else shorter


def _cut(ids: np.ndarray, mask: np.ndarray, border: int) -> Encoded:
    """Cuts a row into prompt and actions; what comes after the last trained token is left out.

    The first token is never an action, since nothing predicts it.
    """
    border = max(border, 1)
    end = _last_trained(mask) + 1
    return Encoded(
        prompt=ids[:border].astype(np.int32),
        actions=ids[border:end].astype(np.int32),
        mask=mask[border:end].astype(np.uint8),
    )
