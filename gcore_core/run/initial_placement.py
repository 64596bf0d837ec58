"""Places a run's workers on this machine's devices, as the placement policy of the job says.

The policy is asked here for the first time, before any process starts. Where devices may move
between generators, the lead asks it again before each step (``gcore_core.controllers.placement``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gcore_core.config.plan import Plan
from gcore_core.contract.abilities import meter_of, replica_slots
from gcore_core.contract.errors import PlacementError
from gcore_core.contract.factories import build, import_attribute
from gcore_core.contract.metering import Meter
from gcore_core.contract.placement import Device, Need, Partition, PlacementPolicy, Window
from gcore_core.runtime.placement_decisions import ask_policy, unable_to_sleep
from gcore_core.runtime.process.launchers import AGENT
from gcore_core.runtime.worker_settings import PlacementFacts


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Says which workers of a role have which devices, and what the lead needs to ask the policy
    again.

    workers: role -> device indexes of each of its workers.
    window: what the policy was shown.
    moves: devices may change between generators, so the policy is asked before every step.
    sleeps: roles whose backend can sleep.
    resting: of ``sleeps``, the generators that sleep while the trainer works.
    provider: the policy's provider, as in ``placement.use``.
    meter: the factory of the meter that the policy wants read in each rollout; "": none.
    """

    workers: Mapping[str, list[list[int]]] = field(default_factory=dict)
    window: Window = field(default_factory=lambda: Window(devices=(), slots={}))
    moves: bool = False
    sleeps: Sequence[str] = ()
    resting: Sequence[str] = ()
    provider: str = ""
    meter: str = ""

    @property
    def note(self) -> str:
        """Says which generators cannot sleep, where the policy may move devices; else ""."""
        needs = self.window.needs
        unable = [
            role for role, need in needs.items() if need.kind == "generator" and not need.sleeps
        ]
        if not self.moves or not unable:
            return ""
        return f"{', '.join(unable)} cannot sleep, so generators never take turns on a device"

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
            agent=AGENT,
        )


def place(plan: Plan) -> Placed:
    """Asks the policy where workers go. Raises PlacementError naming the role that does not fit."""
    roles = plan.settings.roles
    needs = {
        role: Need(
            kind=plan.provided[f"roles.{role}"].kind,
            follows=node.follows or "",
            size=replica_slots(plan.objects[f"roles.{role}"]),
            least=node.least,
            sleeps="sleep" in plan.provided[f"roles.{role}"].spec.capabilities,
        )
        for role, node in roles.items()
    }
    slots = {role: node.slots for role, node in roles.items()}
    window = Window(devices=find_devices(plan.settings.cluster.devices), slots=slots, needs=needs)
    policy: PlacementPolicy = build(plan.factory("placement"))
    provider = plan.provided["placement"].reference
    decision = ask_policy(policy, provider, None, window)
    workers = _workers(decision.engines or decision.partition, needs)
    unable = unable_to_sleep(decision, window)
    if unable:
        raise PlacementError(
            "its backend cannot sleep.",
            where=f"roles.{unable}.use",
            why=f"{provider} has every device serve one model after the other",
            todo=(
                "take a backend with the capability sleep, or a policy that needs none "
                "(placement/split, placement/coresident)"
            ),
            role=unable,
        )
    sleeps = [role for role, need in needs.items() if need.sleeps]
    resting = _resting(plan.settings.placement.sleep_in_training, workers, window, sleeps)
    moves = decision.engines is not None
    kind = next((device.kind for device in window.devices), "")
    meter = meter_of(plan.objects.get("placement"), kind)
    if moves and meter:
        _try_meter(meter, window.devices)
    return Placed(
        workers=workers,
        window=window,
        moves=moves,
        provider=provider,
        meter=meter,
        sleeps=sleeps,
        resting=resting,
    )


def _try_meter(factory: str, devices: Sequence[Device]) -> None:
    """Makes a meter, asks it once and closes it: it raises ConfigError where it cannot read."""
    meter: Meter = import_attribute(factory)()
    try:
        meter.used_s({device.index: () for device in devices})
    finally:
        meter.close()


def _resting(
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
            todo=(
                "take a backend with the capability sleep, or set placement.sleep_in_training: auto"
            ),
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


def _workers(partition: Partition, needs: Mapping[str, Need]) -> dict[str, list[list[int]]]:
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


def find_devices(devices: str | int) -> tuple[Device, ...]:
    """Returns the devices of this machine: its GPUs where the driver shows some, else its cores.

    devices: how many there are to be; "auto": as many as this machine has.
    """
    gpus = _gpu_count()
    kind = "cuda" if gpus else "cpu"
    present = gpus or len(os.sched_getaffinity(0))
    count = present if str(devices) == "auto" else int(devices)
    return tuple(Device(index=index, kind=kind) for index in range(count))


def _gpu_count() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([word for word in visible.split(",") if word.strip() not in ("", "-1")])
    driver = Path("/proc/driver/nvidia/gpus")
    return len(list(driver.iterdir())) if driver.is_dir() else 0
