"""Finds where in an episode's book the history of an agent's request goes on.

An agent posts the whole conversation each time, and may write it differently: with other spaces, or
with arguments in another order. So a history is looked up by its messages, and is continued by the
ids that the policy read and sampled. A history that continues none becomes another sequence, a
*fork*, which is counted by its cause:

    parallel    several requests from one point, or another conversation, such as a helper's
    rewritten   an assistant's message stands there that is not what the policy said there
    template    the chat template writes the old turns otherwise once new messages follow
    boundary    the next turn begins with another token than the one that the policy ended with

Only "rewritten" and "template" are drift, which ``drift: error`` refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gcore_environments.book import Book, Cause
from gcore_environments.questions import Refused
from gcore_environments.rendering import Renderer, Said, digest

_DRIFT = {
    "rewritten": "an assistant's message stands there that is not what the policy said there",
    "template": "the chat template writes old turns otherwise once new messages follow",
}

Messages = Sequence[dict[str, Any]]
#: Is told how many ids the policy would read, before they are written. Raises Refused.
Fits = Callable[[int], object]


def _always(_: int) -> None:
    """Lets the policy read any number of ids."""


def place(
    book: Book,
    renderer: Renderer,
    messages: Messages,
    tools: Messages,
    drift: str,
    fits: Fits = _always,
) -> int:
    """Writes what is new in a history, and returns the number of the sequence that has it.

    The policy's answer is to follow the ids of that sequence.

    drift: "fork" or "error", for a history that is rewritten.
    fits: refuses what the policy has no room for.

    Raises Refused, before anything is written.
    """
    whole = digest(messages, tools)
    if whole in book.nodes:  # asked before: another answer from the same point
        number, end = book.nodes[whole]
        fits(end)
        return book.start(book.sequences[number].ids[:end], "parallel")
    try:
        number = _place(book, renderer, messages, tools, drift, fits)
    except Refused:
        raise
    except Exception as error:  # a chat template is the user's program
        text = f"The chat template cannot render this history: {type(error).__name__}: {error}"
        raise Refused(400, text) from error
    book.nodes[whole] = number, len(book.sequences[number].ids)
    return number


def place_ids(book: Book, ids: list[int], drift: str, fits: Fits = _always) -> int:
    """Writes what is new in a prompt by ids, and returns the number of the sequence that has it.

    The prompt goes on behind the farthest turn that it repeats. The rest is as in ``place``.
    """
    fits(len(ids))
    rewritten = _encoded_anew(book, ids)
    cause: Cause = "rewritten" if rewritten else "parallel"
    if rewritten:
        _refuse_drift(drift, cause)
    number, end = _longest_turn(book, ids)
    if number < 0:
        return book.start(ids, cause)
    return book.go_on(number, end, ids[end:], cause)


def answered(
    book: Book,
    number: int,
    messages: Messages,
    tools: Messages,
    said: Said,
    stop: Sequence[str] = (),
) -> None:
    """Notes where a history ends that the policy has just answered: where its sequence ends now.

    messages: without the answer, which is ``said``.
    """
    key = digest([*messages, answer_of(said, stop)], tools)
    book.nodes[key] = number, len(book.sequences[number].ids)


def answer_of(said: Said, stop: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the assistant's message that an agent gets.

    The text of ``stop`` that ended the answer is left out, as other services do. The policy has
    sampled it nevertheless, and reads it in its next turn.
    """
    text = said.text
    cut = min((text.find(one) for one in stop if one in text), default=len(text))
    message: dict[str, Any] = {"role": "assistant", "content": text[:cut]}
    if said.reasoning:
        message["reasoning_content"] = said.reasoning
    if said.calls:
        message["tool_calls"] = said.calls
    return message


def _place(
    book: Book,
    renderer: Renderer,
    messages: Messages,
    tools: Messages,
    drift: str,
    fits: Fits,
) -> int:
    length = _said_until(book, messages, tools)
    if not length:
        other: Cause = "rewritten" if _speaks(messages) else "parallel"
        return _start(book, renderer, messages, tools, drift, fits, other)
    number, end = book.nodes[digest(messages[:length], tools)]
    ids, new = book.sequences[number].ids, messages[length:]
    cause: Cause = "boundary"
    if len(ids) > end:
        cause = "rewritten" if _speaks(new) else "parallel"
    bridge = renderer.bridge(ids[:end], new, tools)
    if bridge is None:
        cause = "rewritten" if cause == "rewritten" else "template"
        return _start(book, renderer, messages, tools, drift, fits, cause)
    _refuse_drift(drift, cause)
    read_on = end - bridge.drop
    fits(read_on + len(bridge.ids))
    return book.go_on(number, read_on, bridge.ids, cause)


def _start(
    book: Book,
    renderer: Renderer,
    messages: Messages,
    tools: Messages,
    drift: str,
    fits: Fits,
    cause: Cause,
) -> int:
    if book.sequences:
        _refuse_drift(drift, cause)
    ids = renderer.start(messages, tools)
    if not ids:
        raise Refused(400, "The chat template renders these messages as nothing.")
    fits(len(ids))
    return book.start(ids, cause)


def _refuse_drift(drift: str, cause: Cause) -> None:
    if drift == "error" and cause in _DRIFT:
        raise Refused(
            409,
            f"The history is no continuation of what was said: {_DRIFT[cause]}. Post each answer "
            "as it came; `drift: fork` trains such a history as another sequence.",
        )


def _speaks(messages: Messages) -> bool:
    return any(message["role"] == "assistant" for message in messages)


def _said_until(book: Book, messages: Messages, tools: Messages) -> int:
    """Returns how many messages stand up to the policy's latest answer, with it; 0 without one.

    An assistant's message counts as the policy's where the book knows the history up to it.
    """
    for length in range(len(messages) - 1, 0, -1):
        speaks = messages[length - 1]["role"] == "assistant"
        if speaks and digest(messages[:length], tools) in book.nodes:
            return length
    return 0


def _longest_turn(book: Book, ids: list[int]) -> tuple[int, int]:
    """Returns the farthest turn that a prompt repeats from its beginning.

    It is (number of the sequence, end of the turn among its ids), or (-1, 0) without one.
    """
    best, found = 0, -1
    for number, one in enumerate(book.sequences):
        for span in one.spans:
            end = span[1]
            if end > best and ids[:end] == one.ids[:end]:
                best, found = end, number
    return found, best


def _encoded_anew(book: Book, ids: list[int]) -> bool:
    """Whether the ids leave the sequence that they are most alike within a turn of the policy."""
    farthest = [(_common(one.ids, ids), one) for one in book.sequences]
    same = max((length for length, _ in farthest), default=0)
    spans = [span for length, one in farthest if length == same for span in one.spans]
    return any(begin <= same < end and len(ids) > begin for begin, end, _, _ in spans)


def _common(one: list[int], other: list[int]) -> int:
    """Returns how many ids two lists begin with alike."""
    least = min(len(one), len(other))
    if one[:least] == other[:least]:
        return least
    return next(place for place in range(least) if one[place] != other[place])
