"""Places a run's workers on the devices of its nodes, as the placement policy of the job says.

The policy is asked here for the first time, before any process starts. Where devices may move
between generators, the lead asks it again before each step (``gcore_core.controllers.placement``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from gcore_core.config.plan import Plan
from gcore_core.contract.errors import PlacementError
from gcore_core.contract.factories import build, import_attribute
from gcore_core.contract.job_settings import ROLLOUT
from gcore_core.contract.launching import Launcher, NodeFacts
from gcore_core.contract.metering import Meter
from gcore_core.contract.placement import (
    Device,
    Mode,
    Need,
    Partition,
    PlacementPolicy,
    Window,
)
from gcore_core.contract.traits import traits_of
from gcore_core.node.launchers import AGENT
from gcore_core.runtime.placement_decisions import ask_policy, unable_to_sleep
from gcore_core.runtime.worker_settings import PlacementFacts

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Says which workers of a role have which devices, and what the lead needs to ask the policy
    again.

    workers: role -> device indexes of each of its workers.
    nodes: the machines of the run, in order.
    missing: host -> why the run does without it.
    window: what the policy was shown.
    moves: devices may change between generators, so the policy is asked before every step.
    sleeps: generator roles whose backend can sleep.
    asleep_in_training: roles of ``sleeps`` that sleep while the trainer works.
    asleep_in_rollout: the trainers that sleep while generators sample.
    provider: the policy's provider, as in ``placement.use``.
    meter: the factory of the meter that the policy wants read in each rollout; "": none.
    mode: how generators share cells at first, as in ``Decision.mode``.
    reason: why workers are where they are, in the policy's words.
    """

    workers: Mapping[str, list[list[int]]] = field(default_factory=dict)
    nodes: Sequence[NodeFacts] = (NodeFacts(name=AGENT, devices=()),)
    missing: Mapping[str, str] = field(default_factory=dict)
    window: Window = field(default_factory=lambda: Window(devices=(), slots={}))
    moves: bool = False
    sleeps: Sequence[str] = ()
    asleep_in_training: Sequence[str] = ()
    asleep_in_rollout: Sequence[str] = ()
    provider: str = ""
    meter: str = ""
    mode: Mode = "split"
    reason: str = ""

    @property
    def note(self) -> str:
        """Says which generators cannot sleep in a rollout, where devices may move; else ""."""
        needs = self.window.needs
        unable = [
            role for role, need in needs.items() if need.kind == "generator" and not need.sleeps
        ]
        if not self.moves or not unable:
            return ""
        names = ", ".join(unable)
        return f"{names} cannot sleep in a rollout, so no generators take turns on a device"

    def node_of(self, role: str, rank: int) -> str:
        """Returns the name of the node that a role's worker runs on; the first where none was
        placed.
        """
        devices = self.workers.get(role, [])
        if not devices:
            return self.nodes[0].name
        return self._by_index[devices[rank][0]].node

    def local_devices(self, role: str, rank: int) -> tuple[int, ...]:
        """Returns a worker's devices, as its node numbers them; () where none was placed."""
        devices = self.workers.get(role, [])
        if not devices:
            return ()
        return tuple(self._by_index[index].local_index for index in devices[rank])

    def in_use(self, role: str, rank: int) -> int:
        """Returns how many devices of a worker's node are in use while it works, its own among
        them.

        Generators sample together; trainers and annotators, which work on their records, do so
        afterwards, or meanwhile where the program overlaps.
        """
        needs = self.window.needs
        samples = needs[role].kind == "generator"
        node = self.node_of(role, rank)
        return len(
            {
                index
                for name, workers in self.workers.items()
                if self.window.overlaps or (needs[name].kind == "generator") == samples
                for devices in workers
                for index in devices
                if self._by_index[index].node == node
            }
        )

    def host(self, node: str) -> str:
        """Returns what a person calls a node."""
        hosts = {facts.name: facts.host for facts in self.nodes}
        return hosts.get(node, "") or "this machine"

    @property
    def node_names(self) -> list[str]:
        """The nodes that have devices, or else the first: those that workers may run on."""
        names = [node.name for node in self.nodes if node.devices]
        return names or [self.nodes[0].name]

    @cached_property
    def _by_index(self) -> dict[int, Device]:
        return {device.index: device for device in self.window.devices}

    def facts(self, groups_per_step: int, directory: str) -> PlacementFacts | None:
        """Returns what the controllers need to ask the policy again; None where nothing moves."""
        if not self.moves:
            return None
        generators = [role for role, need in self.window.needs.items() if need.kind == "generator"]
        return PlacementFacts(
            devices=list(self.window.devices),
            slots=dict(self.window.slots),
            needs=dict(self.window.needs),
            engines={role: self.workers[role] for role in generators},
            sleeps=list(self.sleeps),
            needed=groups_per_step,
            directory=directory,
            provider=self.provider,
            meter=self.meter,
            agents={
                role: [self.node_of(role, rank) for rank in range(len(self.workers[role]))]
                for role in generators
            },
            overlaps=self.window.overlaps,
        )


def find_nodes(plan: Plan) -> list[NodeFacts]:
    """Asks the job's launcher which machines there are. Raises what it raises."""
    launcher: Launcher = build(plan.factory("launcher"))
    devices = plan.settings.cluster.devices
    return run_apart(lambda: launcher.nodes(devices))


def run_apart(made: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Runs a coroutine in a thread of its own.

    Where this is called, as in a notebook, an event loop may be running.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(made())).result()


def place(
    plan: Plan,
    nodes: Sequence[NodeFacts],
    slots: Mapping[str, int] | None = None,
) -> Placed:
    """Asks the policy where workers go.

    Raises PlacementError naming the role that does not fit, and ConfigError where the meter that
    the policy names cannot read the devices of this machine.

    nodes: the machines of the run.
    slots: of each role; None: the job's.
    """
    roles = plan.settings.roles
    sizes = _slots_per_replica(plan)
    able = {role for role in roles if traits_of(plan.objects[f"roles.{role}"]).sleeps}
    speaking = set(plan.settings.speakers.values())
    needs = {
        role: Need(
            kind=plan.provided[f"roles.{role}"].kind,
            follows=node.follows or "",
            size=sizes[role],
            least=node.least or 1,
            sleeps=role in able and role not in speaking,
        )
        for role, node in roles.items()
    }
    slots = slots or _slots(plan)
    overlaps = traits_of(plan.objects.get("controller")).overlaps
    window = Window(devices=_numbered(nodes), slots=slots, needs=needs, overlaps=overlaps)
    policy: PlacementPolicy = build(plan.factory("placement"))
    provider = plan.provided["placement"].reference
    decision = ask_policy(policy, provider, None, window)
    workers = _workers(decision.engines or decision.partition, needs)
    _check_within_nodes(plan, workers, needs, window.devices, nodes)
    unable = unable_to_sleep(decision, window)
    if unable:
        raise PlacementError(
            "it speaks in the policy's episodes, which would wait for it and it for them."
            if unable in speaking
            else "its backend cannot sleep.",
            where=f"roles.{unable}.use",
            why=f"{provider} has every device serve one model after the other",
            todo=("" if unable in speaking else "take a backend with the trait sleeps, or ")
            + "take a policy that has none sleep (placement/split, placement/coresident)",
            role=unable,
        )
    sleeps = [role for role, need in needs.items() if role in able and need.kind == "generator"]
    asleep_in_training = _asleep_in_training(
        plan.settings.placement.sleep_in_training, workers, window, sleeps
    )
    trainers = [role for role, need in needs.items() if need.sleeps and need.kind == "trainer"]
    moves = decision.engines is not None
    kind = next((device.kind for device in window.devices), "")
    meter = traits_of(plan.objects.get("placement")).meters.get(kind, "")
    if moves and meter:
        _try_meter(meter, nodes)
    return Placed(
        workers=workers,
        nodes=tuple(nodes),
        window=window,
        moves=moves,
        provider=provider,
        meter=meter,
        sleeps=sleeps,
        asleep_in_training=asleep_in_training,
        asleep_in_rollout=trainers if plan.settings.placement.sleep_in_rollout == "always" else (),
        mode=decision.mode,
        reason=decision.reason,
    )


def place_on_fewer(plan: Plan, nodes: Sequence[NodeFacts]) -> Placed:
    """Places as ``place`` does; roles that do not fit give up replicas.

    A generator keeps as many as ``roles.<name>.least`` says, another role all of them unless that
    is set. Above that, each role gets as many replicas as fit.
    Raises PlacementError where the least do not fit: that of the job's own slots.
    """
    try:
        return place(plan, nodes)
    except PlacementError as refused:
        slots = _fewest_slots(plan, nodes)
        if slots is None:
            raise refused
    sizes = _slots_per_replica(plan)
    wanted = _slots(plan)
    # From the least that fits up, one replica of each role in turn, while it still fits.
    growing = [role for role in wanted if slots[role] < wanted[role]]
    while growing:
        for role in list(growing):
            more = {**slots, role: slots[role] + sizes[role]}
            if more[role] <= wanted[role] and _fits(plan, nodes, more):
                slots = more
            else:
                growing.remove(role)
    return place(plan, nodes, slots)


def _fewest_slots(plan: Plan, nodes: Sequence[NodeFacts]) -> dict[str, int] | None:
    """Returns slots of each role with which the job fits; None: it does not fit.

    Generators go down to their least first, since their replicas hold nothing between two steps.
    Only where that is not enough do the other roles go down to theirs.
    """
    sizes = _slots_per_replica(plan)
    slots = _slots(plan)
    kinds = {role: plan.provided[f"roles.{role}"].kind for role in slots}
    for is_generator in (True, False):
        for role, node in plan.settings.roles.items():
            least = node.least or (1 if kinds[role] == "generator" else None)
            if least is not None and (kinds[role] == "generator") == is_generator:
                slots[role] = min(slots[role], least * sizes[role])
        if _fits(plan, nodes, slots):
            return slots
    return None


def _fits(plan: Plan, nodes: Sequence[NodeFacts], slots: Mapping[str, int]) -> bool:
    """Whether the job can be placed with these slots.

    Where each shard has replicas of its own (``controller.replicas: owned``), it needs at least
    one.
    """
    n_replicas = slots.get(ROLLOUT, 0) // _slots_per_replica(plan).get(ROLLOUT, 1)
    is_owned = plan.settings.controller.replicas == "owned"
    if is_owned and n_replicas < plan.settings.controller.shards:
        return False
    try:
        place(plan, nodes, slots)
    except PlacementError:
        return False
    return True


def _slots(plan: Plan) -> dict[str, int]:
    return {role: node.slots for role, node in plan.settings.roles.items()}


def _slots_per_replica(plan: Plan) -> dict[str, int]:
    configs = {role: plan.objects[f"roles.{role}"] for role in plan.settings.roles}
    return {role: traits_of(config).replica_slots for role, config in configs.items()}


def _numbered(nodes: Sequence[NodeFacts]) -> tuple[Device, ...]:
    """Returns the devices of all nodes, numbered through in the order of the nodes."""
    devices: list[Device] = []
    for node in nodes:
        for device in node.devices:
            index = len(devices)
            devices.append(replace(device, index=index, node=node.name, number=device.local_index))
    return tuple(devices)


def _check_within_nodes(
    plan: Plan,
    workers: Mapping[str, list[list[int]]],
    needs: Mapping[str, Need],
    devices: Sequence[Device],
    nodes: Sequence[NodeFacts],
) -> None:
    """Raises PlacementError where the devices of one process lie on several nodes, or of a trainer
    that cannot do so.
    """
    node_of = {device.index: device.node for device in devices}
    host_of = {node.name: node.host or "this machine" for node in nodes}
    for role, placed in workers.items():
        used = dict.fromkeys(node_of[index] for indexes in placed for index in indexes)
        if needs[role].kind == "trainer" and len(used) > 1:
            _check_ranks_may_part(plan, role, [node for node in nodes if node.name in used])
        for rank, indexes in enumerate(placed):
            hosts = dict.fromkeys(host_of[node_of[index]] for index in indexes)
            if len(hosts) > 1:
                raise PlacementError(
                    f"{role}.{rank} would have devices of {' and '.join(hosts)}",
                    where=f"roles.{role}.slots",
                    why="one replica of a generator spreads over the devices of one node only",
                    todo=(
                        "take a replica that fits the devices of a node, or a placement policy "
                        "that packs by node (placement/split)"
                    ),
                    role=role,
                )


def _check_ranks_may_part(plan: Plan, role: str, nodes: Sequence[NodeFacts]) -> None:
    """Raises PlacementError unless the ranks of a trainer may be on several nodes.

    nodes: those that they would be on.
    """
    hosts = " and ".join(node.host or "this machine" for node in nodes)
    why = ""
    todo = ""
    if not traits_of(plan.objects[f"roles.{role}"]).sharding_over_nodes:
        why = "its backend lets ranks meet on one node only (trait sharding_over_nodes)"
        todo = "take as many slots as one node has devices, or fewer"
    elif not all(node.is_private for node in nodes):
        why = "what ranks send each other is in plain, and the network is not declared private"
        todo = (
            "list the network in launcher.config.private if nobody else is on it, or take as many "
            "slots as one node has devices"
        )
    if why:
        raise PlacementError(
            f"{role} would have ranks on {hosts}",
            where=f"roles.{role}.slots",
            why=why,
            todo=todo,
            role=role,
        )


def _try_meter(factory: str, nodes: Sequence[NodeFacts]) -> None:
    """Makes a meter, asks it once and closes it: it raises ConfigError where it cannot read.

    Only the devices of this machine can be asked for; the agents of other nodes try their own.
    """
    here = [device.local_index for node in nodes if not node.host for device in node.devices]
    if not here:
        return
    meter: Meter = import_attribute(factory)()
    try:
        meter.used_s(dict.fromkeys(here, ()))
    finally:
        meter.close()


def _asleep_in_training(
    sleep_in_training: str,
    workers: Mapping[str, list[list[int]]],
    window: Window,
    sleeps: list[str],
) -> list[str]:
    """Returns the generators that sleep while the trainer works.

    sleep_in_training: "never": none. "always": all of them. "auto": those that share an accelerator
        with the trainer, since its memory is scarce.
    Raises PlacementError when one has to sleep and its backend cannot.
    """
    generators = [role for role, need in window.needs.items() if need.kind == "generator"]
    unable = [role for role in generators if role not in sleeps]
    if sleep_in_training == "always" and unable:
        raise PlacementError(
            "its backend cannot sleep.",
            where=f"roles.{unable[0]}.use",
            why="placement.sleep_in_training is always",
            todo=("take a backend with the trait sleeps, or set placement.sleep_in_training: auto"),
            role=unable[0],
        )
    if sleep_in_training == "never":
        return []
    able = [role for role in generators if role in sleeps]
    if sleep_in_training == "always":
        return able
    accelerators = {device.index for device in window.devices if device.kind != "cpu"}
    of_trainers: set[int] = set()
    for role, need in window.needs.items():
        if need.kind == "trainer":
            of_trainers |= _devices_of(role, workers)
    scarce = accelerators & of_trainers
    return [role for role in able if _devices_of(role, workers) & scarce]


def _devices_of(role: str, workers: Mapping[str, list[list[int]]]) -> set[int]:
    return {index for devices in workers.get(role, ()) for index in devices}


def _workers(
    partition: Partition,
    needs: Mapping[str, Need],
) -> dict[str, list[list[int]]]:
    """Returns role -> the device indexes of each of its processes.

    A generator has one process for each replica, whose engine spreads over its devices. Any other
    role has one process for each device.
    """
    workers: dict[str, list[list[int]]] = {}
    for role, cells in partition.cells.items():
        size = needs[role].size if needs[role].kind == "generator" else 1
        workers[role] = []
        for cell in cells:
            indexes = [device.index for device in cell.devices]
            workers[role] += [indexes[i : i + size] for i in range(0, len(indexes), size)]
    return workers
