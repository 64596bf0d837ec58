from dataclasses import dataclass

from gcore_core import hookimpl
from gcore_core.contract import providers
from gcore_core.contract.traits import Traits


@dataclass(frozen=True, kw_only=True)
class LongestFirstConfig:
    power: float = 1.0
    """A record costs its length to this power; above 1, long records count for more."""


class LongestFirst:
    def __init__(self, config):
        self.power = config.power

    def costs(self, work):
        return work.lengths**self.power

    def split(self, work, bins):
        costs = self.costs(work)
        parts = [[] for _ in range(bins)]
        for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
            min(parts, key=lambda part: costs[part].sum()).append(i)
        return parts


@hookimpl
def gcore_balancers():
    yield providers.BalancerProvider(
        summary="longest first", factory="gcore_example:LongestFirst", config=LongestFirstConfig
    )


@dataclass(frozen=True, kw_only=True)
class LettersConfig:
    max_new_tokens: int = 8
    """Most letters of one answer."""

    def traits(self):
        return Traits(receives_weights=True, determinism=True)


@hookimpl
def gcore_generators():
    yield providers.GeneratorProvider(
        summary="letters from a table",
        factory="gcore_example.letters:Letters",
        config=LettersConfig,
    )
