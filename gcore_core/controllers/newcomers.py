"""Knows generators that have come up within a run, until every shard draws from them.

A machine that comes gets replicas of the policy's generator. When they are up, the supervisor tells
every controller (``meet``), the lead last. The lead takes them in at its next decision, which is
before a push, and all shards get the same list from it (``PlacementShard.decide``):

    known   every controller knows it        nobody asks it yet
    awake   since a decision of the lead     it gets the push, and then it draws

So a replica draws nothing before it holds the weights that all others hold, and every shard deals
its leases out over the same replicas.
"""

from __future__ import annotations

from collections.abc import Sequence

from gcore_core.contract.launching import GrowingNetwork, Network, Peer
from gcore_core.controllers.lost_nodes import LostNodes
from gcore_core.runtime.messages import NewReplicas


class ShardNewcomers:
    """Knows the replicas that have come, in one controller."""

    def __init__(self, network: Network, lost: LostNodes) -> None:
        self._network = network
        self._lost = lost
        self._peers: dict[str, Peer] = {}
        self._waiting: list[str] = []

    def meet(self, new: NewReplicas) -> None:
        """Notes replicas of a machine that has come. Told again, nothing happens."""
        if any(name in self._peers for name in new.replicas):
            return
        if isinstance(self._network, GrowingNetwork):
            self._network.introduce(new.addresses)
        self._lost.add(new.node, new.replicas)
        self._peers |= {name: self._lost.peer(self._network, name) for name in new.replicas}
        self._waiting += new.replicas

    def take_waiting(self) -> list[str]:
        """Returns the replicas that wait to be taken in, each once; the lead asks."""
        waiting, self._waiting = self._waiting, []
        return waiting

    def peers(self, names: Sequence[str]) -> list[Peer]:
        """Returns replicas that this controller has met."""
        return [self._peers[name] for name in names]
