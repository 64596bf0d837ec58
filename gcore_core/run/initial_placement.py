"""Which workers a configuration makes on which devices, as its placement policy says."""

from __future__ import annotations

from collections.abc import Mapping

from gcore_core.config.plan import Plan
from gcore_core.contract.abilities import replica_slots
from gcore_core.contract.errors import PlacementError
from gcore_core.contract.factories import build
from gcore_core.contract.placement import Need, Partition, PlacementPolicy, Window
from gcore_core.run.devices import find_devices
from gcore_core.run.placed import Placed
from gcore_core.runtime.placement_decisions import ask_policy, unable_to_sleep


def place(plan: Plan) -> Placed:
    """Asks the policy. Raises PlacementError naming the role that does not fit."""
    roles = plan.settings.roles
    needs = {
        role: Need(
            kind=plan.provided[f"roles.{role}"].kind,
            follows=node.follows or "",
            size=replica_slots(plan.objects[f"roles.{role}"]),
            least=node.least,
        )
        for role, node in roles.items()
    }
    slots = {role: node.slots for role, node in roles.items()}
    window = Window(devices=find_devices(plan.settings.cluster.devices), slots=slots, needs=needs)
    policy: PlacementPolicy = build(plan.factory("placement"))
    provider = plan.provided["placement"].reference
    decision = ask_policy(policy, provider, None, window)
    workers = _workers(decision.engines or decision.partition, needs)
    sleeps = [role for role in roles if "sleep" in plan.provided[f"roles.{role}"].spec.capabilities]
    if unable := unable_to_sleep(decision, window, sleeps):
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
    resting = _resting(plan.settings.placement.sleep_in_training, workers, window, sleeps)
    return Placed(
        workers=workers,
        window=window,
        moves=decision.engines is not None,
        provider=provider,
        sleeps=sleeps,
        resting=resting,
    )


def _resting(
    wanted: str, workers: Mapping[str, list[list[int]]], window: Window, sleeps: list[str]
) -> list[str]:
    """Generators that sleep while the trainer works. By themselves those that share an accelerator
    with it, whose memory is scarce. Raises PlacementError for one that is to and cannot.
    """
    generators = [role for role, need in window.needs.items() if need.kind == "generator"]
    if wanted == "always" and (unable := [role for role in generators if role not in sleeps]):
        raise PlacementError(
            "its backend cannot sleep.",
            where=f"roles.{unable[0]}.use",
            why="placement.sleep_in_training is always",
            todo=(
                "take a backend with the capability sleep, or set placement.sleep_in_training: auto"
            ),
            role=unable[0],
        )
    on = {role: {index for own in workers.get(role, ()) for index in own} for role in window.needs}
    trained = set().union(
        *(on[role] for role, need in window.needs.items() if need.kind == "trainer")
    )
    scarce = {device.index for device in window.devices if device.kind != "cpu"} & trained
    able = [role for role in generators if role in sleeps and wanted != "never"]
    return [role for role in able if wanted == "always" or on[role] & scarce]


def _workers(partition: Partition, needs: Mapping[str, Need]) -> dict[str, list[list[int]]]:
    """One process for each replica of a generator, whose engine spreads over its devices; else one
    for each device.
    """
    found = {}
    for role, cells in partition.cells.items():
        size = needs[role].size if needs[role].kind == "generator" else 1
        own = [[device.index for device in cell.devices] for cell in cells]
        found[role] = [cell[i : i + size] for cell in own for i in range(0, len(cell), size)]
    return found
