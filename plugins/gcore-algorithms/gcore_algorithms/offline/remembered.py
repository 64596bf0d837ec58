"""A tokenizer that encodes many texts in one call, and remembers what it has encoded.

A call of a tokenizer costs more than a short text does: 64 texts together take a sixth of the time
that they take one by one. And rows come back: each epoch has the same texts, and the two answers of
a pair have one prompt.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gcore_language.chats import Chats, Unreadable
from gcore_language.prompts import AddedTokens, all_tokens

#: Most tokens that are remembered, some 80 MB and their texts; then it begins anew.
_MOST_TOKENS = 2**21
_NOTHING = AddedTokens()


@dataclass(frozen=True)
class Tokens:
    """What a call gives of one text."""

    input_ids: list[int]


class RememberingTokenizer:
    """Stands for a tokenizer of transformers. Calls with one text are remembered, all else passed.

    tokenizer: the tokenizer. What it gives for a text must not change.
    added: what it adds to texts.
    most_tokens: when more are remembered, all are forgotten.

    chats: writes chats with it.
    """

    def __init__(
        self,
        tokenizer: Any,
        added: AddedTokens = _NOTHING,
        most_tokens: int = _MOST_TOKENS,
    ) -> None:
        self._tokenizer = tokenizer
        self._added = added
        self.chats = Chats(tokenizer)
        self.eos_token_id = tokenizer.eos_token_id  # a search through its tokens, each time
        self._most = most_tokens
        # (text, whether special tokens were added) -> its tokens
        self._known: dict[tuple[str, bool], Tokens] = {}
        self._count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> Tokens:
        """Returns the tokens of a text. Raises Unreadable where the tokenizer has none for it."""
        key = text, add_special_tokens
        if key not in self._known:
            self.encode([key])
        if key not in self._known:
            raise Unreadable("the tokenizer refuses a text of the row")
        return self._known[key]

    def asked(self, text: str) -> list[int]:
        """Returns the tokens of a text that an answer follows, as generators encode it."""
        return self._added.asked(self(text).input_ids)

    def whole(self, text: str) -> list[int]:
        """Returns the tokens of a text that nothing follows, as reward models encode it."""
        return self._added.whole(self(text).input_ids)

    def encode(self, texts: Iterable[tuple[str, bool]]) -> None:
        """Encodes texts in one call, or two: those with special tokens and those without.

        texts: (text, whether special tokens are added), any number of times each.
        """
        if self._count > self._most:
            self._known.clear()
            self._count = 0
        new = [key for key in dict.fromkeys(texts) if key not in self._known]
        for special in (True, False):
            part = [text for text, added in new if added is special]
            if not part:
                continue
            rows = all_tokens(self._tokenizer, part, special=special)
            for text, ids in zip(part, rows, strict=True):
                if not isinstance(ids, Unreadable):
                    self._known[text, special] = Tokens(ids)
                    self._count += len(ids)
