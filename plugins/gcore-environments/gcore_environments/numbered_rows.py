"""A data set for environments that make their tasks themselves: its rows are only numbered."""

from __future__ import annotations

from dataclasses import dataclass

from gcore_core.contract.errors import ConfigError
from gcore_core.contract.records import Prompt


@dataclass(frozen=True, kw_only=True)
class NumbersConfig:
    """How many rows there are."""

    rows: int
    """How many; each has the field ``number``."""
    begin: int = 0
    """The first number. Take other numbers to evaluate on than to train on."""

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ConfigError(f"must be at least 1, is {self.rows}", where="rows")
        if self.begin < 0:
            raise ConfigError(f"must not be negative, is {self.begin}", where="begin")


class Numbers:
    """Gives rows with the field ``number``, which an environment makes a task of."""

    def __init__(self, config: NumbersConfig) -> None:
        self._config = config

    def __len__(self) -> int:
        return self._config.rows

    def __getitem__(self, row: int) -> Prompt:
        if not 0 <= row < len(self):
            raise IndexError(f"there are rows 0 to {len(self) - 1}, and {row} was asked for")
        number = self._config.begin + row
        return Prompt(row=row, text=str(number), fields={"number": number})
