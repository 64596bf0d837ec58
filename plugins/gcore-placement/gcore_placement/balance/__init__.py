"""The plugin ``balance``: which records train on which data-parallel rank."""

from __future__ import annotations

from collections.abc import Iterable

from gcore_core import hookimpl
from gcore_core.contract.providers import BalancerProvider
from gcore_placement.balance.config import CostConfig, TokensConfig


@hookimpl
def gcore_balancers() -> Iterable[BalancerProvider]:
    for name in ("default", "cost"):
        yield BalancerProvider(
            name=name,
            summary="costliest first to the lightest rank, evened out; counts may differ",
            factory="gcore_placement.balance.balancers:Cost",
            config=CostConfig,
        )
    yield BalancerProvider(
        name="lpt-tokens",
        summary="longest first to the rank with the fewest tokens",
        factory="gcore_placement.balance.balancers:LptTokens",
        config=TokensConfig,
    )
    yield BalancerProvider(
        name="kk",
        summary="Karmarkar-Karp differencing by cost, equal counts",
        factory="gcore_placement.balance.balancers:KarmarkarKarp",
        config=CostConfig,
    )
    yield BalancerProvider(
        name="snake",
        summary="sorted by cost, dealt to and fro",
        factory="gcore_placement.balance.balancers:Snake",
        config=CostConfig,
    )
    yield BalancerProvider(
        name="sorted",
        summary="sorted by cost, dealt in turn",
        factory="gcore_placement.balance.balancers:Sorted",
        config=CostConfig,
    )
