"""Filters of groups for tests."""

from __future__ import annotations

from gcore_core.contract.algorithms import GroupScalars


class Nothing:
    """No group teaches anything."""

    def __init__(self, config: object) -> None: ...

    def keep(self, group: GroupScalars) -> tuple[bool, str]:
        return False, "nothing"
