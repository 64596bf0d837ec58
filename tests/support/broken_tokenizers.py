"""Breaks the tokenizer of a model directory, or what its files say of ids, in one way each.

``BROKEN`` has a function for each way: ``break_it(directory, draw)``, where ``draw`` chooses among
numbers and words that break it alike. The directory is one that ``gcore_language.tiny`` or a
``make.py`` of tests/cases has written: a fast tokenizer, a chat template in a file of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

Breaking = Callable[[Path, Random], None]
TEMPLATE = "chat_template.jinja"


@dataclass(frozen=True, kw_only=True)
class Broken:
    """One way.

    break_it: does it.
    says: a pattern of the problem that ``g-core check`` must tell.
    chat: whether only rows that are chats show it.
    """

    break_it: Breaking
    says: str
    chat: bool = False


def settings(directory: Path, name: str, values: Mapping[str, Any]) -> None:
    """Sets keys of a JSON file; makes it where there is none."""
    file = directory / name
    before = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({**before, **values}))


def end_id(name: str, value: Callable[[Random], Any]) -> Broken:
    return Broken(
        break_it=lambda directory, draw: settings(directory, name, {"eos_token_id": value(draw)}),
        says=rf"{name}: eos_token_id: .* is no token's id|cannot load",
    )


def template(text: Callable[[Random], str], says: str) -> Broken:
    return Broken(
        break_it=lambda directory, draw: _write(directory / TEMPLATE, text(draw)),
        says=says,
        chat=True,
    )


def file(name: str, content: Callable[[Random, bytes], bytes], says: str) -> Broken:
    def change(directory: Path, draw: Random) -> None:
        path = directory / name
        path.write_bytes(content(draw, path.read_bytes() if path.is_file() else b""))

    return Broken(break_it=change, says=says)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _far(draw: Random) -> int:
    return draw.choice([160, 32000, 128009, 2**31, 10**12])


def _words(draw: Random) -> str:
    return draw.choice(["</s>", "2", "<|im_end|>", "none"])


def _cut(draw: Random, content: bytes) -> bytes:
    return content[: draw.randrange(1, len(content) - 2)]


def _without_template(directory: Path, draw: Random) -> None:
    (directory / TEMPLATE).unlink()


def _more_tokens(directory: Path, draw: Random) -> None:
    """Adds words at the end of the vocabulary, for which the model has no rows."""
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    first = max(vocabulary.values()) + 1
    for i in range(draw.randrange(1, 9) + 64):
        vocabulary[f"<more{i}>"] = first + i
    path.write_text(json.dumps(content))


def _unknown_model(directory: Path, draw: Random) -> None:
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"] = {"type": draw.choice(["Nothing", "", "BPE"])}
    path.write_text(json.dumps(content))


def _end_word(directory: Path, draw: Random) -> None:
    """Names an end token that the vocabulary lacks; the library would add it."""
    settings(directory, "tokenizer_config.json", {"eos_token": draw.choice(["</s>", "<|end|>"])})


def _no_tokenizer(directory: Path, draw: Random) -> None:
    for path in directory.glob("*token*"):
        path.unlink()


_NO_LOAD = "cannot load the tokenizer"
_REFUSES = "the chat template refuses it: "
_SETTINGS = "generation_config.json"

BROKEN: Mapping[str, Broken] = {
    "end-negative": end_id(_SETTINGS, lambda draw: -draw.randrange(1, 99)),
    "end-beyond": end_id(_SETTINGS, _far),
    "end-word": end_id(_SETTINGS, _words),
    "end-fraction": end_id(_SETTINGS, lambda draw: draw.choice([1.5, 2.0, 0.0])),
    "end-bool": end_id(_SETTINGS, lambda draw: draw.choice([True, False])),
    "end-one-of-two": end_id(_SETTINGS, lambda draw: [2, _far(draw)]),
    "end-list-of-lists": end_id(_SETTINGS, lambda draw: [[2], [_far(draw)]]),
    "end-mapping": end_id(_SETTINGS, lambda draw: {_words(draw): 2}),
    "end-beyond-in-config": end_id("config.json", _far),
    "end-word-in-config": end_id("config.json", _words),
    "settings-cut": file(
        _SETTINGS, lambda draw, content: b'{"eos_token_id": ', "the file is not JSON"
    ),
    "settings-no-mapping": file(
        _SETTINGS, lambda draw, content: draw.choice([b"[2]", b"2", b"null"]), "holds no mapping"
    ),
    "settings-no-text": file(_SETTINGS, lambda draw, content: b"\xff\xfe{}", "is not JSON"),
    "tokenizer-cut": file("tokenizer.json", _cut, _NO_LOAD),
    "tokenizer-empty": file("tokenizer.json", lambda draw, content: b"", _NO_LOAD),
    "tokenizer-no-json": file("tokenizer.json", lambda draw, content: b"<html>404", _NO_LOAD),
    "tokenizer-unknown": Broken(break_it=_unknown_model, says=_NO_LOAD),
    "tokenizer-settings-cut": file("tokenizer_config.json", _cut, _NO_LOAD),
    "tokenizer-missing": Broken(break_it=_no_tokenizer, says="has no tokenizer"),
    "tokenizer-larger": Broken(break_it=_more_tokens, says="but the model embeds only"),
    "tokenizer-adds-its-end": Broken(break_it=_end_word, says="but the model embeds only"),
    "template-missing": Broken(
        break_it=_without_template, says="the tokenizer has no chat template", chat=True
    ),
    "template-raises": template(
        lambda draw: "{{ raise_exception('" + draw.choice(["no chats", "roles"]) + "') }}", _REFUSES
    ),
    "template-undefined": template(
        lambda draw: "{{ messages[0]." + draw.choice(["a.b", "meta.name"]) + " }}", _REFUSES
    ),
    "template-syntax": template(
        lambda draw: draw.choice(["{% for m in %}", "{{ messages", "{% endif %}"]), _REFUSES
    ),
    "template-type": template(lambda draw: "{{ messages + 1 }}", _REFUSES),
    "template-filter": template(lambda draw: "{{ messages | nothing }}", _REFUSES),
    "template-of-nothing": template(lambda draw: draw.choice(["", " "]), "no chat template|leaves"),
    "template-drops": template(
        lambda draw: "{{ bos_token }}{% for m in messages %}{{ m.role }}{% endfor %}",
        r"the chat template leaves out turn 0 \(user\)",
    ),
    "template-ends": template(
        lambda draw: "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}",
        "the chat template ends it with .*, which ends an answer",
    ),
}
