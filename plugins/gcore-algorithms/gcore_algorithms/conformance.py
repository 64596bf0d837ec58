"""Contracts that need more than a provider's name; ``g-core conformance algorithms`` adds the plain
ones.
"""

from __future__ import annotations

from gcore_core.testing import AdvantageContract


class TestReinforcePp(AdvantageContract):
    provider = "algorithms/reinforce-pp"
    baseline = "batch"
