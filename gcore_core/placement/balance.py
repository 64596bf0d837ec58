"""``core/in-order``: records to ranks in the order they come, as many to each as to the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

from gcore_core.protocols import Balancer, Work


class InOrder:
    def __init__(self, config: None = None) -> None:
        pass

    def costs(self, work: Work) -> np.ndarray:
        """A record's length. It is told, and not looked at by ``split``."""
        return np.asarray(work.lengths + work.extra)

    def split(self, work: Work, bins: int) -> list[list[int]]:
        """Contiguous runs whose lengths differ by at most one."""
        return [part.tolist() for part in np.array_split(np.arange(len(work)), bins)]


@runtime_checkable
class KeepsCosts(Protocol):
    """Of a balancer with the capability "costs.learned", which may do without: a resumed run goes
    on with what it learned.
    """

    def state(self) -> dict[str, Any]:
        """Plain values, of which JSON gives the same back: finite numbers, texts, lists, dicts with
        texts as keys.
        """

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on with what ``state`` of another one like this gave."""


def learned(balancer: Balancer) -> dict[str, Any]:
    """What goes into a checkpoint, under the balancer's name: a resumed run may have chosen another
    one.
    """
    return (
        {type(balancer).__qualname__: balancer.state()} if isinstance(balancer, KeepsCosts) else {}
    )


def go_on(balancer: Balancer, learned: Mapping[str, Any]) -> None:
    """Gives the balancer what one of its name had learned."""
    if isinstance(balancer, KeepsCosts) and (state := learned.get(type(balancer).__qualname__)):
        balancer.restore(state)
