"""Compares what the token ids of two models mean.

A teacher, a reference and a critic are fed the ids that the policy's tokenizer and the policy
itself have made. So their numbers are of the same text only where an id means the same to both. Two
ways to look:

    files       before a run, from ``tokenizer.json``, without a library; it knows only the words
    tokenizers  in a worker, with transformers; it also encodes texts with both
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gcore_core.contract.errors import DataError
from gcore_language.model_places import has_tokenizer
from gcore_language.prompts import load_tokenizer

#: Texts that two tokenizers must encode alike: words, numbers, code, white space, other scripts.
PROBES = (
    "The quick brown fox jumps over the lazy dog.",
    "7+3+8=18, 1234567890 and -0.5e10",
    "def f(x):\n\treturn x  # three   spaces\n\n",
    "Straße, naïve café, Ünïcödé",
    "日本語のテキストと中文",
    "Привет, мир! مرحبا",
    '{"key": [1, 2, null]}',
    "<tag attr='v'>&amp;</tag>",
)
_SHOWN = 3


def read_vocabulary(directory: Path) -> dict[str, int] | None:
    """Returns word -> id of a directory's ``tokenizer.json``; None where it has none to read."""
    file = directory / "tokenizer.json"
    try:
        parsed = json.loads(file.read_text(encoding="utf-8"))
        words = parsed["model"]["vocab"]
        if isinstance(words, list):  # of the kind Unigram: [word, score], by id
            words = {word: i for i, (word, _) in enumerate(words)}
        added = {token["content"]: token["id"] for token in parsed.get("added_tokens", ())}
        return {**words, **added}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def difference(policy: Mapping[str, int], other: Mapping[str, int]) -> str:
    """Returns how the ids of two vocabularies differ, as a sentence's part; "" where they do not.

    policy, other: word -> id. Words that only the other one has are no difference: the policy never
    uses them.
    """
    wrong = [word for word, i in policy.items() if other.get(word) != i]
    if not wrong:
        return ""
    shown = ", ".join(
        f"{word!r} is {policy[word]} and {other.get(word, 'unknown')}" for word in wrong[:_SHOWN]
    )
    return f"{len(wrong)} of the policy's {len(policy)} tokens have another id or none: {shown}"


def tokenizer_difference(policy: Any, other: Any) -> str:
    """Returns how two tokenizers of transformers differ; "" where they encode alike."""
    differs = difference(policy.get_vocab(), other.get_vocab())
    if differs:
        return differs
    for text in PROBES:
        ids = [tokenizer(text, add_special_tokens=False).input_ids for tokenizer in (policy, other)]
        if ids[0] != ids[1]:
            return f"they encode {text!r} differently: {ids[0][:8]} and {ids[1][:8]}"
    return ""


def problems(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Looks before a run at what ``refuse_other_tokens`` would refuse in a worker.

    arguments: ``where``, ``directory`` and ``trust_remote_code`` of a model, and ``policy``, the
        directory of the policy's.
    """
    trust = bool(arguments["trust_remote_code"])
    try:
        policy = load_tokenizer(arguments["policy"], None, trust_remote_code=trust)
    except (DataError, ImportError):
        return  # of the policy, which is told
    refuse_other_tokens(
        policy, Path(arguments["directory"]), arguments["where"], trust_remote_code=trust
    )
    yield from ()


def refuse_other_tokens(
    policy: Any, directory: Path, where: str, *, trust_remote_code: bool = False
) -> None:
    """Raises DataError where the policy's ids are other texts to a model that is fed them.

    A model without a tokenizer, or with one that cannot be opened, is taken as it is: it is fed the
    policy's ids.

    policy: the policy's tokenizer.
    directory: of the other model.
    where: config path that names it.
    """
    if not has_tokenizer(directory):
        return
    try:
        own = load_tokenizer(str(directory), None, trust_remote_code=trust_remote_code)
    except (DataError, ImportError):
        return
    if differs := tokenizer_difference(policy, own):
        raise DataError(
            "its tokenizer is not the policy's, so the same ids are other texts to it.",
            where=where,
            why=differs,
            todo="Take a model with the policy's tokenizer.",
        )
