"""What there is to place on, where roles are, and the policy that decides.

What a policy sees of past steps, ``Requests``, ``Profile`` and ``Outcome``, stands in
``gcore_core.contract.measurements``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal, Protocol, runtime_checkable

from gcore_core.contract.errors import PlacementError
from gcore_core.contract.measurements import Outcome, Profile, Requests


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU, or a core on machines without one."""

    index: int
    kind: str  # "cuda" or "cpu"
    node: str = "node0"


@dataclass(frozen=True)
class Cell:
    """The devices that hold whole replicas of a role; the unit of a move."""

    devices: tuple[Device, ...]


@dataclass(frozen=True)
class Partition:
    """Which cells each role has in one phase."""

    cells: Mapping[str, tuple[Cell, ...]]

    def devices(self, role: str, rank: int) -> tuple[int, ...]:
        """Device indexes of one worker of the role."""
        return tuple(device.index for device in self.cells[role][rank].devices)


@dataclass(frozen=True, kw_only=True)
class Need:
    """What a role asks of placement. follows: the role whose weights it takes, "" for a model of
    its own. size: slots that one replica takes together. least: replicas that it must keep.
    """

    kind: str  # "trainer", "generator" or "reward"
    follows: str = ""
    size: int = 1
    least: int = 1


@dataclass(frozen=True, kw_only=True)
class Window:
    """What a policy sees at a step boundary: the devices, the slots that every role may occupy, and
    what was measured.

    Generators are the roles between which devices move: they have an engine at every cell, awake or
    asleep. Mappings are by role; what was not measured is not in them.

    devices: all of them.
    slots: how many devices each role may occupy.
    needs: what each role asks of placement.
    step: the one that is about to begin.
    needed: groups that it must keep.
    requests: finished ones of the latest steps; the policy's stand under the role that follows it.
    profiles: how long the role's engines take.
    busy: share of a role's replica-seconds, in the latest rollout, in which anything ran.
    filled: share of a role's places, in the latest rollout, that were taken. A replica has as many
        places as the most requests that one of the role's replicas was ever seen to have at once,
        but no more than its profile's ``max_running``.
    switch_s: seconds it takes a cell to change roles; None before one did.
    outcomes: what earlier decisions came to, oldest first.
    state: what the latest decision carried over.
    starving: at a rescue, the role of which nobody answers; "" otherwise.
    lost: device indexes of replicas that do not answer.
    """

    devices: tuple[Device, ...]
    slots: Mapping[str, int]
    needs: Mapping[str, Need] = field(default_factory=dict)
    step: int = 0
    needed: int = 0
    requests: Mapping[str, Requests] = field(default_factory=dict)
    profiles: Mapping[str, Profile] = field(default_factory=dict)
    busy: Mapping[str, float] = field(default_factory=dict)
    filled: Mapping[str, float] = field(default_factory=dict)
    switch_s: float | None = None
    outcomes: tuple[Outcome, ...] = ()
    state: Mapping[str, Any] = field(default_factory=dict)
    starving: str = ""
    lost: Mapping[str, Sequence[int]] = field(default_factory=dict)


Mode = Literal["split", "colocated", "coresident"]


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Who is awake where in the next rollout, and why.

    engines: every cell at which a role has an engine, awake or asleep; None: where it is awake.
    They are made once, so they stay as the first decision says. mode: "split", each cell serves one
    generator; "colocated", every cell serves the policy until all its records are there, then the
    judge, and in turn again for a refill; "coresident", both models are awake in every cell.
    predicted_s: candidate -> seconds of the rollout; ``chosen`` is one of the candidates. reason:
        one sentence.
    seen: what the policy looked at, summed up. state: carried to the next decision. Both are plain
        values, for JSON.
    """

    partition: Partition
    engines: Partition | None = None
    mode: Mode = "split"
    chosen: str = ""
    predicted_s: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    seen: Mapping[str, Any] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)


class PlacementPolicy(Protocol):
    def revise(self, partition: Partition | None, window: Window) -> Decision:
        """The decision for the next step; ``partition`` is the latest one's, None before the first.
        Pure.

        Raises PlacementError naming the role that does not fit.
        """


@runtime_checkable
class Rescues(Protocol):
    """Of a policy that knows help for a judge of which nobody answers."""

    def rescue(self, partition: Partition, window: Window) -> Decision | None:
        """Who is awake from here on instead of ``partition``, None where there is no help. Asked at
        a step's start, or within it when all is drawn and the policy's generators have nothing to
        do. Pure.
        """


def every_slot(window: Window) -> Partition:
    """Cells for every slot that roles may occupy, from all devices in turn: of as many devices as a
    generator's replica spreads over, else of one.
    """
    cells, turn = {}, count()
    for role, slots in window.slots.items():
        if slots > len(window.devices):
            raise PlacementError(
                f"wants {slots} slots, there are {len(window.devices)} devices",
                where=f"roles.{role}.slots",
                why="a role has at most one worker per device",
                todo="ask for fewer slots, or set cluster.devices to the number that may be used",
                role=role,
            )
        taken = [window.devices[next(turn) % len(window.devices)] for _ in range(slots)]
        need = window.needs.get(role)
        size = need.size if need is not None and need.kind == "generator" else 1
        cells[role] = tuple(Cell(tuple(taken[i : i + size])) for i in range(0, slots, size))
    return Partition(cells)


def place_evenly(partition: Partition | None, window: Window) -> Decision:
    """What ``core/even`` decides: every role takes its slots from all devices in turn, and keeps
    them. For policies that have nothing better to say.
    """
    if partition is None:
        return Decision(
            partition=every_slot(window),
            reason="every role takes its slots from all devices in turn",
        )
    return Decision(partition=partition, reason="roles keep their devices")
