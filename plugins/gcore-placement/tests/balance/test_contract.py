"""Held to what every plugin and every balancer must keep, also where nothing is learned."""

from __future__ import annotations

import pytest
from gcore_placement.balance.config import CostConfig
from gcore_testing import BalancerContract
from gcore_testing.conformance import contracts_of

from gcore_core.contract.errors import ConfigError

globals().update(contracts_of("balance"))


class TestUnlearning(BalancerContract):
    provider = "balance"
    config = {"learn": False}
    known_gaps = {"test_it_predicts_the_times_it_was_shown": "it is told not to learn"}


def test_a_hidden_size_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="balance.config: hidden_size is 0, and must be positive"):
        CostConfig(hidden_size=0)
