"""What may be set under ``config:`` of the verifiers."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gcore_core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class VerifierConfig:
    """A comparison of the completion with a field of the row."""

    answer: str = "answer"
    """Field of the row that holds the right answer."""
    pattern: str | None = None
    """Regular expression: its last match (its first group, where it has one) is compared, not the whole completion."""
    ignore_case: bool = False
    """Take A and a for equal."""
    tolerance: float = 1e-6
    """Largest difference of two numbers that count as equal (numeric only)."""

    def __post_init__(self) -> None:
        if self.tolerance < 0:
            raise ConfigError(f"must not be negative, is {self.tolerance}", where="tolerance")
        try:
            re.compile(self.pattern or "")
        except re.error as error:
            raise ConfigError(f"{self.pattern!r} is not a regular expression: {error}", where="pattern") from error
