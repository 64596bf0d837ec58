"""Compares what the token ids of two models mean.

A teacher is fed the ids that the policy's tokenizer and the policy itself have made. So its numbers
are of the same text only where an id means the same to both. Two ways to look:

    files       before a run, from ``tokenizer.json``, without a library; it knows only the words
    tokenizers  in a worker, with transformers; it also encodes texts with both
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
