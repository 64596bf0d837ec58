"""What a controller is given: facts of the job, peers, agreements, the small objects that
algorithms plug in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gcore_core.contract.algorithms import Advantage, Balancer, Filter
from gcore_core.contract.factories import FactorySpec, build
from gcore_core.contract.placement import PlacementPolicy
from gcore_core.contract.records import Header
from gcore_core.controllers.reward_weights import Weighing
from gcore_core.controllers.tracing import Trace
from gcore_core.runtime.agreements import Agreements
from gcore_core.runtime.rpc.retry import insist
from gcore_core.runtime.rpc.service import Network, Peer, Traffic


class PlacementFacts(msgspec.Struct, kw_only=True, frozen=True):
    """What the lead tells a placement policy. devices: index, kind, node. needs: the fields of a
    ``Need``. engines: generator role -> device indexes of each of its replicas. sleeps: roles whose
    backend can. needed: groups that a step must keep. directory: the run's, for the journal; empty:
    none is kept.
    """

    devices: list[tuple[int, str, str]]
    slots: dict[str, int]
    needs: dict[str, tuple[str, str, int, int]]
    engines: dict[str, list[list[int]]]
    sleeps: list[str]
    needed: int = 0
    directory: str = ""


class JobFacts(msgspec.Struct, kw_only=True, frozen=True):
    """Plain facts of the job, the same for every shard but ``shard``.

    replicas: peer names of generator replicas. ranks: of the workers of each data-parallel trainer
    rank. scorers: peer name -> the rewards it hosts. rows: size of the datasets "train" and
    "evaluation". rewards: how each counts.
    takes_stale: the objective corrects for actions sampled by older weights. judges: generator role
    that rewards ask -> peer names of its replicas. placement: where devices move between
    generators. resting: generator roles whose replicas sleep while the trainer works. last_ordinal:
    the step that consumes up to here is the last. start_step,
    next_ordinal, state: what a resumed run goes on from. carried: records that its shards had kept
        for the first step.
    """

    shard: int
    shards: int
    steps: int
    seed: int
    rows: dict[str, int]
    replicas: list[str]
    ranks: list[list[str]]
    scorers: dict[str, list[str]]
    rewards: dict[str, Weighing]
    logprob_band: float = 1e-3
    deterministic: bool = False
    evaluate_every: int = 0
    evaluate_prompts: int = 0
    show: int = 0
    output: str = ""
    trace: str = ""
    takes_stale: bool = False
    judges: dict[str, list[str]] = {}
    placement: PlacementFacts | None = None
    resting: list[str] = []
    next_ordinal: int = 0
    start_step: int = 0
    state: dict[str, Any] = {}
    carried: list[Header] = []
    checkpoint_every: int = 0
    patience_s: float = 600.0
    last_ordinal: int = 1 << 62


@dataclass(frozen=True, kw_only=True)
class ControllerContext:
    """stopping: set in the lead when the run is to end early, its state saved."""

    facts: JobFacts
    traffic: Traffic
    trace: Trace
    agree: Agreements
    supervisor: Peer
    replicas: list[Peer]
    ranks: list[list[Peer]]
    scorers: list[tuple[Peer, list[str]]]
    advantage: Advantage
    filter: Filter
    balancer: Balancer
    judges: Mapping[str, list[Peer]] = field(default_factory=dict)
    placement: PlacementPolicy | None = None
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def trainers(self) -> list[Peer]:
        """Every worker of the policy; the first one sends weights."""
        return [peer for rank in self.ranks for peer in rank]


def make_context(
    settings: Mapping[str, Any], factories: Mapping[str, FactorySpec], network: Network
) -> ControllerContext:
    facts = msgspec.convert(dict(settings), JobFacts)
    supervisor = network.peer("supervisor")
    return ControllerContext(
        facts=facts,
        traffic=network.traffic,
        trace=Trace(facts.trace, facts.shard),
        agree=Agreements(supervisor, facts.shard, facts.shards, insist),
        supervisor=supervisor,
        replicas=[network.peer(name) for name in facts.replicas],
        ranks=[[network.peer(name) for name in rank] for rank in facts.ranks],
        scorers=[(network.peer(name), rewards) for name, rewards in facts.scorers.items()],
        advantage=build(factories["advantage"]),
        filter=build(factories["filter"]),
        balancer=build(factories["balance"]),
        judges={
            role: [network.peer(name) for name in names] for role, names in facts.judges.items()
        },
        placement=build(factories["placement"]) if "placement" in factories else None,
    )
