"""Which workers a configuration makes on which devices, as its placement policy says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from typing import Any

from gcore_core.config import Plan
from gcore_core.factories import build, config_object, replica_slots
from gcore_core.placement.devices import Need, Partition, PlacementPolicy, Window, find_devices


@dataclass(frozen=True, kw_only=True)
class Placed:
    """workers: role -> device indexes of each of its workers. window: what the policy was shown. moves: devices may
    change between generators, so the policy is asked before every step."""

    workers: Mapping[str, list[list[int]]] = field(default_factory=dict)
    window: Window = field(default_factory=lambda: Window(devices=(), slots={}))
    moves: bool = False

    def facts(self, sleeps: list[str], needed: int, directory: str) -> dict[str, Any] | None:
        """What the controllers need to ask the policy again, as plain values; None where nothing moves."""
        if not self.moves:
            return None
        generators = [role for role, need in self.window.needs.items() if need.kind == "generator"]
        return {
            "devices": [(device.index, device.kind, device.node) for device in self.window.devices],
            "slots": dict(self.window.slots),
            "needs": {role: astuple(need) for role, need in self.window.needs.items()},
            "engines": {role: self.workers[role] for role in generators},
            "sleeps": sleeps,
            "needed": needed,
            "directory": directory,
        }


def place(plan: Plan) -> Placed:
    """Asks the policy. Raises PlacementError naming the role that does not fit."""
    roles = plan.config["roles"]
    needs = {
        role: Need(
            kind=plan.provided[f"roles.{role}"].kind,
            follows=node["follows"] or "",
            size=replica_slots(config_object(plan.factory(f"roles.{role}"))),
            least=int(node["least"]),
        )
        for role, node in roles.items()
    }
    slots = {role: int(node["slots"]) for role, node in roles.items()}
    window = Window(devices=find_devices(plan.config["cluster"]["devices"]), slots=slots, needs=needs)
    policy: PlacementPolicy = build(plan.factory("placement"))
    decision = policy.revise(None, window)
    return Placed(
        workers=_workers(decision.engines or decision.partition, needs),
        window=window,
        moves=decision.engines is not None,
    )


def _workers(partition: Partition, needs: Mapping[str, Need]) -> dict[str, list[list[int]]]:
    """One process for each replica of a generator, whose engine spreads over its devices; else one for each device."""
    found = {}
    for role, cells in partition.cells.items():
        size = needs[role].size if needs[role].kind == "generator" else 1
        own = [[device.index for device in cell.devices] for cell in cells]
        found[role] = [cell[i : i + size] for cell in own for i in range(0, len(cell), size)]
    return found
