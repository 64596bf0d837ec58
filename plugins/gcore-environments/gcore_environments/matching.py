"""Where the history of an agent's request goes on.

An agent posts all that was said, each time, and writes it anew: other spaces, arguments in another
order. So a history is found by its messages, and continued by the ids that the policy read and
sampled. What is no continuation becomes another sequence, and is counted by its cause:

    parallel    several calls from one point, or another conversation: a fork by right
    rewritten   an assistant's message stands there that is not what the policy said there
    template    the chat template writes the old turns otherwise once new messages follow
    boundary    the next turn begins with another token than the one that the policy ended with

Only "rewritten" and "template" are drift, which ``drift: error`` refuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gcore_environments.book import Book, Cause
from gcore_environments.questions import Refused
from gcore_environments.rendering import Renderer, Said, digest

_DRIFT = {
    "rewritten": "an assistant's message stands there that is not what the policy said there",
    "template": "the chat template writes old turns otherwise once new messages follow",
}

Messages = Sequence[dict[str, Any]]


def place(book: Book, renderer: Renderer, messages: Messages, tools: Messages, drift: str) -> int:
    """Returns the sequence in which the policy is to go on; what is new stands in it already.

    drift: ``fork`` or ``error``. Raises ``Refused``, before anything is written.
    """
    whole = digest(messages, tools)
    if whole in book.nodes:  # asked before: another answer from the same point
        number, end = book.nodes[whole]
        return book.start(book.sequences[number].ids[:end], "parallel")
    try:
        number = _place(book, renderer, messages, tools, drift)
    except Refused:
        raise
    except Exception as error:  # a chat template is the user's program
        text = f"The chat template cannot render this history: {type(error).__name__}: {error}"
        raise Refused(400, text) from error
    book.nodes[whole] = number, len(book.sequences[number].ids)
    return number


def place_ids(book: Book, ids: list[int], drift: str) -> int:
    """The same for a prompt by ids: it goes on behind the farthest turn that it repeats."""
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
    """Notes that a history with the policy's answer ends where its sequence ends now."""
    key = digest([*messages, answer_of(said, stop)], tools)
    book.nodes[key] = number, len(book.sequences[number].ids)


def answer_of(said: Said, stop: Sequence[str] = ()) -> dict[str, Any]:
    """The message that an agent gets. A text that ended the answer is not shown, as everywhere; the
    policy has said it, and reads it in its next turn.
    """
    text = said.text
    cut = min((text.find(one) for one in stop if one in text), default=len(text))
    message: dict[str, Any] = {"role": "assistant", "content": text[:cut]}
    if said.reasoning:
        message["reasoning_content"] = said.reasoning
    if said.calls:
        message["tool_calls"] = said.calls
    return message


def _place(book: Book, renderer: Renderer, messages: Messages, tools: Messages, drift: str) -> int:
    length = _said_until(book, messages, tools)
    if not length:
        other: Cause = "rewritten" if _speaks(messages) else "parallel"
        return _start(book, renderer, messages, tools, drift, other)
    number, end = book.nodes[digest(messages[:length], tools)]
    ids, new = book.sequences[number].ids, messages[length:]
    cause: Cause = "boundary"
    if len(ids) > end:
        cause = "rewritten" if _speaks(new) else "parallel"
    bridge = renderer.bridge(ids[:end], new, tools)
    if bridge is None:
        cause = "rewritten" if cause == "rewritten" else "template"
        return _start(book, renderer, messages, tools, drift, cause)
    _refuse_drift(drift, cause)
    return book.go_on(number, end - bridge.drop, bridge.ids, cause)


def _start(
    book: Book,
    renderer: Renderer,
    messages: Messages,
    tools: Messages,
    drift: str,
    cause: Cause,
) -> int:
    if book.sequences:
        _refuse_drift(drift, cause)
    ids = renderer.start(messages, tools)
    if not ids:
        raise Refused(400, "The chat template renders these messages as nothing.")
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
    """How many messages end with the latest of the policy's that is there as it was said."""
    for length in range(len(messages) - 1, 0, -1):
        speaks = messages[length - 1]["role"] == "assistant"
        if speaks and digest(messages[:length], tools) in book.nodes:
            return length
    return 0


def _longest_turn(book: Book, ids: list[int]) -> tuple[int, int]:
    """The sequence, and the end of the turn in it, that the ids repeat farthest; (-1, 0): none."""
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
    """How many ids two lists begin with alike."""
    least = min(len(one), len(other))
    if one[:least] == other[:least]:
        return least
    return next(place for place in range(least) if one[place] != other[place])
