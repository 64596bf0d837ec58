"""Filters for dynamic sampling decide which groups teach.

These filters have no settings, so their config is None.
"""

from __future__ import annotations

from gcore_core.contract.algorithms import GroupScalars, are_equal


class KeepAll:
    """Lets every group teach."""

    def __init__(self, config: None = None) -> None:
        pass

    def keep(self, group: GroupScalars) -> tuple[bool, str]:
        return True, ""


class Varied:
    """Lets a group teach when its rewards are not all equal.

    When they are equal, but for rounding, every advantage is zero (DAPO, section 3.2).
    """

    def __init__(self, config: None = None) -> None:
        pass

    def keep(self, group: GroupScalars) -> tuple[bool, str]:
        if are_equal(group.rewards):
            return False, "equal_rewards"
        return True, ""
