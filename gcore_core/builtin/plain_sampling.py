"""Draws every record of a group at once, from the row's own prompt."""

from __future__ import annotations

from collections.abc import Sequence

from gcore_core.contract.records import Prompt
from gcore_core.contract.sampling import Draft, DrawnSoFar


class Plain:
    """One wave: no record is made from another."""

    def __init__(self, config: None = None) -> None:
        pass

    def waves(self, group_size: int) -> Sequence[int]:
        return [group_size]

    def drafts(self, group: DrawnSoFar, count: int) -> Sequence[int]:
        return [-1] * count

    def prompt(self, prompt: Prompt, draft: Draft) -> Prompt:
        return prompt
