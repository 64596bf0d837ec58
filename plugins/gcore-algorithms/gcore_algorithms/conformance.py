"""Contracts that need more than a provider's name; ``g-core conformance algorithms`` adds the plain
ones.
"""

from __future__ import annotations

from typing import Any, ClassVar

from gcore_testing import AdvantageContract, ScorerContract


class TestReinforcePp(AdvantageContract):
    provider = "algorithms/reinforce-pp"
    baseline = "batch"


class TestOverlong(ScorerContract):
    provider = "algorithms/overlong"
    config: ClassVar[dict[str, Any]] = {"max_actions": 12, "soft_actions": 10}
