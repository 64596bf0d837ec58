"""Defines what may be set under ``config:`` of what the core brings: datasets, reward, filter."""

from __future__ import annotations

from dataclasses import dataclass

from gcore_core.contract.rows import RowsConfig
from gcore_core.contract.traits import Traits


@dataclass(frozen=True, kw_only=True)
class JsonLinesConfig(RowsConfig):
    """A file with one JSON object a line."""

    index_dir: str | None = None
    """Where the index of the file is kept. Empty: $G_CORE_CACHE/index, else
    ~/.cache/g-core/index.
    """


@dataclass(frozen=True, kw_only=True)
class FunctionRewardConfig:
    """A function in a Python file."""

    path: str
    """The file; relative to the YAML's directory."""
    name: str
    """The function: of one record, ``def f(record) -> float``, or of many when ``batch`` is set. It
    may be async.
    """
    batch: bool = False
    """Call it with a list of records; it returns a list of as many numbers."""


@dataclass(frozen=True, kw_only=True)
class VariedConfig:
    """Settings of the filter ``varied``."""

    reward: str | None = None
    """The reward that is looked at, by its name under ``rewards``. None: the weighted sum of all of
    them, from which advantages are made.
    """

    def traits(self) -> Traits:
        named = frozenset() if self.reward is None else frozenset({self.reward})
        return Traits(reads_rewards=named)
