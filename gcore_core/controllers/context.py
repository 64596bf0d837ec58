"""Defines what a controller is given.

These are facts of the job, peers, agreements and the objects of the algorithms that were chosen.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

from gcore_core.contract.algorithms import ActionAdvantage, Advantage, Balancer, Filter
from gcore_core.contract.errors import ContractError
from gcore_core.contract.factories import FactorySpec, build
from gcore_core.contract.job_settings import POLICY
from gcore_core.contract.launching import Network, Peer, Traffic
from gcore_core.contract.placement import PlacementPolicy
from gcore_core.contract.plugin_code import PluginCode
from gcore_core.contract.sentinel import Sentinel
from gcore_core.contract.step_check import StepCheck, StepCheckContext
from gcore_core.controllers.algorithm_answers import (
    advantage_code,
    balancer_code,
    filter_code,
)
from gcore_core.controllers.checked_workers import AskedWorkers
from gcore_core.controllers.tracing import Trace
from gcore_core.runtime.agreements import Agreements
from gcore_core.runtime.worker_settings import JobFacts
from gcore_core.wire.retry import insist
from gcore_core.wire.service import Service


@dataclass(frozen=True, kw_only=True)
class ControllerContext:
    """Holds what a step program is made with.

    facts: of the job, the same for every shard but its number.
    traffic: counts what this process sends and receives.
    trace: where the times of records and stages go.
    agree: agreements with the other shards; ``agree.scope(name)`` for a task next to others.
    supervisor: it shows reports and commits checkpoints.
    lead: the lead's process, as every shard asks it.
    service: what this process answers.
    replicas: the policy's generators, in order of their numbers.
    trained: role that is trained -> the workers of each data-parallel rank; the policy is the last.
    scorers: each with the rewards that it hosts.
    chosen_advantage: None where the program needs none and none is chosen; else ``advantage``.
    filter, balancer: the job's other algorithms.
    judges: generator role that rewards or episodes ask -> its replicas.
    annotators: role that gives columns and is not trained -> its workers.
    placement: the policy that moves devices between generators; none where nothing moves.
    agents: the nodes' agents by name, where they read how long devices are in use.
    sentinel: this controller's half of what compares log-probs; None where nothing does.
    step_check: looks at each step; only the lead has it, in a run with a sentinel.
    stopping: set in the lead when the run is to end early, its state saved.
    saving: set in the lead when somebody has asked for a checkpoint.
    trainers_turn: in the lead, held while the trainers do something: the step program
        from the beginning, but for where it waits for records (``trainers_free``), and pushes to
        generators that are behind.
    """

    facts: JobFacts
    traffic: Traffic
    trace: Trace
    agree: Agreements
    supervisor: Peer
    lead: Peer
    service: Service
    replicas: list[Peer]
    trained: Mapping[str, list[list[Peer]]]
    scorers: list[tuple[Peer, list[str]]]
    chosen_advantage: Advantage | ActionAdvantage | None
    filter: Filter
    balancer: Balancer
    judges: Mapping[str, list[Peer]] = field(default_factory=dict)
    annotators: Mapping[str, list[Peer]] = field(default_factory=dict)
    placement: PlacementPolicy | None = None
    agents: Mapping[str, Peer] = field(default_factory=dict)
    sentinel: Sentinel | None = None
    step_check: StepCheck | None = None
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    saving: asyncio.Event = field(default_factory=asyncio.Event)
    trainers_turn: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))

    @contextlib.asynccontextmanager
    async def trainers_free(self) -> AsyncIterator[None]:
        """Leaves the trainers free inside the block, for pushes to generators that are behind.

        A generator that was started again has the weights of version 0, and draws nothing of a
        newer one before its push. So a program that waits for records, of this shard or of
        another, must wait inside such a block, as ``Producer`` does. Blocks must not overlap.
        """
        self.trainers_turn.release()
        try:
            yield
        finally:
            await self.trainers_turn.acquire()

    @property
    def advantage(self) -> Advantage | ActionAdvantage:
        """The chosen advantage.

        Raises ContractError in a program whose description says that it needs none.
        """
        if self.chosen_advantage is None:
            raise ContractError(
                "the step program uses an advantage, and its description does not name that part.",
                where="controller.use",
                todo='add "advantage" to parts of its ControllerProvider',
            )
        return self.chosen_advantage

    @property
    def advantage_code(self) -> PluginCode:
        """Calls the advantage's code, and names its plugin in errors.

        The next two do the same for filter and balancer.
        """
        return advantage_code(self.advantage, self.facts.providers.get("advantage", ""))

    @property
    def filter_code(self) -> PluginCode:
        return filter_code(self.filter, self.facts.providers.get("filter", ""))

    @property
    def balancer_code(self) -> PluginCode:
        return balancer_code(self.balancer, self.facts.providers.get("balance", ""))

    @property
    def ranks(self) -> list[list[Peer]]:
        """The workers of each data-parallel rank of the policy's trainer."""
        return self.trained[POLICY]

    @property
    def trainers(self) -> list[Peer]:
        """Every worker of the policy's trainer; the first one sends weights."""
        return self.workers_of(POLICY)

    def workers_of(self, trained: str) -> list[Peer]:
        """Every worker of a role that is trained."""
        return [peer for rank in self.trained[trained] for peer in rank]


def make_context(
    config: None,
    facts: JobFacts,
    factories: Mapping[str, FactorySpec],
    network: Network,
    service: Service,
) -> ControllerContext:
    """Makes the context of a controller.

    It is a factory like any other, so that a worker needs only its name; it takes no ``config``.
    """
    supervisor = network.peer("supervisor")
    placed = facts.placement
    replicas = [network.peer(name) for name in facts.replicas]
    trained = {
        role: [[network.peer(name) for name in rank] for rank in trained.ranks]
        for role, trained in facts.trained.items()
    }
    sentinel: Sentinel | None = None
    if facts.sentinel is not None:
        sentinel = build(factories["sentinel"], facts.sentinel)
    step_check: StepCheck | None = None
    if sentinel is not None and "step_check" in factories:
        about = StepCheckContext(
            sentinel=sentinel,
            provider=facts.providers.get("sentinel", ""),
            workers=AskedWorkers(replicas, trained[POLICY], both_score=facts.both_score),
            saves=facts.checkpoint.every > 0,
        )
        step_check = build(factories["step_check"], about)
    return ControllerContext(
        facts=facts,
        traffic=network.traffic,
        trace=Trace(facts.trace, facts.shard),
        agree=Agreements(supervisor, facts.shard, facts.shards, insist),
        supervisor=supervisor,
        lead=network.peer("controller.0"),
        service=service,
        replicas=replicas,
        trained=trained,
        scorers=[(network.peer(name), rewards) for name, rewards in facts.scorers.items()],
        chosen_advantage=build(factories["advantage"]) if "advantage" in factories else None,
        filter=build(factories["filter"]),
        balancer=build(factories["balance"]),
        judges={
            role: [network.peer(name) for name in names] for role, names in facts.judges.items()
        },
        annotators={
            role: [network.peer(name) for name in names] for role, names in facts.annotators.items()
        },
        placement=build(factories["placement"]) if "placement" in factories else None,
        agents={
            name: network.peer(name)
            for names in (placed.agents.values() if placed and placed.meter else ())
            for name in names
        },
        sentinel=sentinel,
        step_check=step_check,
    )
