"""Says what is wrong with the turns of a chat, and writes them the way that chat templates read.

A chat template is a program that writes what it is given. Given a null or a list it may write
``None`` or Python's own form of the list into a prompt, and no library looks. So turns are looked
at here first. Light: neither torch nor transformers.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

Turns = list[dict[str, Any]]

#: Roles of who answers, in lower case. A model is asked to write the turn behind the last one.
ANSWERS = frozenset({"assistant", "ai", "bing", "bot", "chatbot", "chatgpt", "gpt", "model"})
#: Roles of those who never answer.
ASKS = frozenset({"developer", "function", "human", "ipython", "system", "tool", "user"})
_KINDS: Mapping[type, str] = {
    bool: "true or false",
    dict: "an object",
    float: "a number",
    int: "a number",
}
#: It fits into what a record says of why it failed: 128 bytes, of which 19 are taken.
_ANSWERED = (
    "it ends with the assistant's answer; take it off (data/hub: last_answer: take), or train "
    "offline on it"
)


def problem_of(turns: Sequence[Mapping[str, Any]], *, sampled: bool = False) -> str:
    """Returns why turns cannot be written as they are meant; "" where they can.

    sampled: whether a model is to write the turn behind them.
    """
    for place, turn in enumerate(turns):
        if problem := _problem_of_turn(turn):
            return f"turn {place} ({turn.get('role')}): {problem}"
    if not sampled:
        return ""
    if not turns:
        return "the chat has no turn"
    last = turns[-1]
    role = str(last.get("role"))
    if role.lower() in ANSWERS:
        return _ANSWERED
    says = text_of(last["content"]).strip() or shows_images([last])
    if role.lower() in ("user", "human") and not says:
        return f"its last turn ({role}) is empty, so nothing is asked"
    return ""


def _problem_of_turn(turn: Mapping[str, Any]) -> str:
    content = turn.get("content")
    if isinstance(content, str):
        return ""
    if content is None:
        calls = turn.get("tool_calls")
        if str(turn.get("role")).lower() in ANSWERS and isinstance(calls, list) and calls:
            return ""
        return "its content is null; write a text, which may be empty"
    if not isinstance(content, list):
        kind = _KINDS.get(type(content), type(content).__name__)
        return f"its content is {kind}, neither a text nor a list of parts; write it as a text"
    return next(filter(None, map(_problem_of_part, content)), "")


def _problem_of_part(part: Any) -> str:
    """Returns why a part of a turn's content cannot be written; "" where it can."""
    if not isinstance(part, Mapping):
        return "a part of its content is no object; write {type: text, text: ...}"
    kind = part.get("type")
    if kind == "text":
        has_text = isinstance(part.get("text"), str)
        return "" if has_text else "a part of type text has no text"
    if kind == "image":
        inside = sorted(key for key, value in part.items() if value is not None and key != "type")
        if not inside:
            return ""
        return (
            f"a part of type image has {', '.join(inside)}; name the pictures' files in a field of "
            "the row and set data.config.images to it"
        )
    if isinstance(kind, str) and "image" in kind:
        return (
            f"it has a part of type {kind}; name the pictures' files in a field of the row, set "
            "data.config.images to it, and write {type: image} where each stands"
        )
    return f"it has a part of type {json.dumps(kind, default=repr)[:40]}; there are text and image"


def shows_images(turns: Sequence[Mapping[str, Any]]) -> bool:
    """Whether any part of turns without a problem is an image."""
    return any(part["type"] == "image" for turn in turns for part in _parts(turn))


def _parts(turn: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    content = turn.get("content")
    if isinstance(content, list):
        yield from content


def text_of(content: Any) -> str:
    """Returns the text of a turn's content: of parts the texts, joined by line breaks."""
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if part.get("type") == "text")
    return content or ""


def in_texts(turns: Sequence[Mapping[str, Any]]) -> Turns:
    """Returns turns whose contents are texts, for templates that write a content as it is.

    A content with an image stays as it is.
    """
    return [
        {**plain, "content": text_of(plain["content"])}
        if isinstance(plain["content"], list) and not shows_images([plain])
        else plain
        for plain in map(_plain, turns)
    ]


def in_parts(turns: Sequence[Mapping[str, Any]]) -> Turns:
    """Returns turns whose contents are lists of parts, for templates that know nothing else."""
    return [
        {**plain, "content": [{"type": "text", "text": plain["content"]}]}
        if isinstance(plain["content"], str)
        else plain
        for plain in map(_plain, turns)
    ]


def as_they_are(turns: Sequence[Mapping[str, Any]]) -> Turns:
    """Returns turns for templates that know both texts and lists of parts."""
    return [_plain(turn) for turn in turns]


def _plain(turn: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a turn without the keys that have no value.

    A table gives each turn and each part all keys. Templates ask whether a key is there.
    """
    plain = {key: value for key, value in turn.items() if value is not None or key == "content"}
    if not plain.get("tool_calls", True):
        del plain["tool_calls"]
    content = plain.setdefault("content", None)
    if isinstance(content, list):
        plain["content"] = [
            {"type": part["type"], **{k: v for k, v in part.items() if v is not None}}
            for part in content
        ]
    return plain


def pattern_of(turns: Sequence[Mapping[str, Any]]) -> Hashable:
    """Returns what rows have in common of which a template writes the same turns."""
    return tuple(
        (turn.get("role"), type(turn.get("content")), bool(_says(turn)), _count_of_names(turn))
        for turn in turns
    )


def with_words(
    turns: Sequence[Mapping[str, Any]], word: str, only: str = ""
) -> tuple[Turns, dict[str, str]]:
    """Returns turns with a word behind each text, and word -> what it stands behind.

    A template that writes a turn writes its word, too. What the assistant said gets none: templates
    drop its thoughts of earlier turns, and some its earlier answers.

    word: how each word begins; no row and no template has it.
    only: of the words that this gives, the one to put in; "": all.
    """
    changed: Turns = []
    behind: dict[str, str] = {}

    def add(what: str) -> str:
        own = f"{word}{len(behind)}x"
        behind[own] = what
        return own if only in ("", own) else ""

    for place, turn in enumerate(turns):
        turn = dict(turn)
        role = str(turn.get("role"))
        if _count_of_names(turn):
            added = add(f"the calls of tools of turn {place} ({role})")
            turn["tool_calls"] = [_named(call, added) for call in turn["tool_calls"]]
        if _says(turn) and role.lower() not in ANSWERS:
            turn["content"] = _longer(turn["content"], add(f"turn {place} ({role})"))
        changed.append(turn)
    return changed, {only: behind[only]} if only else behind


def _says(turn: Mapping[str, Any]) -> str:
    return text_of(turn.get("content")).strip()


def _longer(content: Any, word: str) -> Any:
    """Returns a content with a word behind its last text."""
    if isinstance(content, str):
        return content + word
    last = max(place for place, part in enumerate(content) if part.get("type") == "text")
    return [
        {**part, "text": part["text"] + word} if place == last else part
        for place, part in enumerate(content)
    ]


def _count_of_names(turn: Mapping[str, Any]) -> int:
    """Returns how many functions with a name a turn calls."""
    return sum(_named(call, "x") != call for call in turn.get("tool_calls") or ())


def _named(call: Any, word: str) -> Any:
    """Returns a call of a function with a word behind its name, where it has one."""
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _named(call["function"], word)}
    name = call.get("name")
    return {**call, "name": name + word} if isinstance(name, str) and name else call


def called_with(turns: Sequence[Mapping[str, Any]], *, objects: bool) -> Turns:
    """Returns turns whose calls of tools have their arguments as objects, or as JSON texts.

    Templates differ in what they write: the one as JSON, the other as it is. An argument that is
    no object in JSON stays.
    """
    written = []
    for turn in turns:
        calls = turn.get("tool_calls")
        if isinstance(calls, list):
            turn = {**turn, "tool_calls": [_called(call, objects) for call in calls]}
        written.append(dict(turn))
    return written


def _called(call: Any, objects: bool) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _called(call["function"], objects)}
    arguments = call.get("arguments")
    if objects and isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            return call
        return {**call, "arguments": parsed} if isinstance(parsed, dict) else call
    if not objects and isinstance(arguments, Mapping):
        return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return call
