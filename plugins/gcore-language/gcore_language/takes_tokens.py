"""Says for an engine what an environment asks of it: ``TakesTokens`` of the contract."""

from __future__ import annotations

from typing import Any

from gcore_language.prompts import PromptEncoder
from gcore_language.settings import GeneratorSettings


class TakesTokensByEncoder:
    """An engine whose prompts a ``PromptEncoder`` writes.

    _config: its settings.
    _encoder: made with the ids that end an answer.
    _context_length: as in ``TakesTokens``.
    """

    _config: GeneratorSettings
    _encoder: PromptEncoder
    _context_length: int

    @property
    def tokenizer(self) -> Any:
        """See ``TakesTokens``."""
        return self._encoder.tokenizer

    @property
    def end_ids(self) -> frozenset[int]:
        """See ``TakesTokens``."""
        return self._encoder.ends

    @property
    def max_actions(self) -> int:
        """See ``TakesTokens``."""
        return self._config.max_new_tokens

    @property
    def context_length(self) -> int:
        """See ``TakesTokens``."""
        return self._context_length

    @property
    def temperature(self) -> float:
        """See ``TakesTokens``."""
        return self._config.temperature

    @property
    def top_p(self) -> float:
        """See ``TakesTokens``."""
        return self._config.top_p

    @property
    def top_k(self) -> int:
        """See ``TakesTokens``."""
        return self._config.top_k
