"""Defines the types of placement: devices, where roles are on them, and the policy that decides.

What a policy is told of past steps, and the account that it gives of them, are in
``gcore_core.contract.measurements``; how fast an engine is, in
``gcore_core.contract.engine_profiles``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal, Protocol, runtime_checkable

from gcore_core.contract.errors import PlacementError
from gcore_core.contract.measurements import Account, Outcome, Requests, Rollout


@dataclass(frozen=True, kw_only=True)
class Device:
    """Describes a GPU, or a core on machines without one.

    index: its number among all devices of the run.
    kind: "cuda" or "cpu".
    node: name of the agent of the machine that it belongs to.
    number: its number on that machine; None: the same as ``index``.
    """

    index: int
    kind: str
    node: str = "agent.0"
    number: int | None = None

    @property
    def local_index(self) -> int:
        """Its number on its machine."""
        return self.index if self.number is None else self.number


@dataclass(frozen=True)
class Cell:
    """Names the devices that hold whole replicas of a role; they move together.

    devices: one or more.
    """

    devices: tuple[Device, ...]


@dataclass(frozen=True)
class Partition:
    """Says which cells each role has in one phase.

    cells: role -> its cells.
    """

    cells: Mapping[str, tuple[Cell, ...]]


@dataclass(frozen=True, kw_only=True)
class Need:
    """Says what a role asks of placement.

    kind: "trainer", "generator" or "annotator".
    follows: the role whose weights it takes; "" for a model of its own.
    size: slots that one replica takes together.
    least: replicas that must stay awake.
    sleeps: whether a replica can sleep while others have its devices. Mode "colocated" is for
        generators that can. One that speaks in the policy's episodes cannot, whatever its backend
        does: it is asked while the policy draws.
    """

    kind: str
    follows: str = ""
    size: int = 1
    least: int = 1
    sleeps: bool = True


@dataclass(frozen=True, kw_only=True)
class Window:
    """Holds what a policy sees at a step boundary: facts, from which it measures what it wants.

    Devices move between generators: these have an engine at every cell, awake or asleep. Mappings
    are by role.

    devices: all devices of the run.
    slots: how many devices each role may occupy.
    needs: what each role asks of placement.
    step: the one that is about to begin.
    needed: groups that the step must keep.
    requests: finished requests of the latest rollout; empty where there was none. Those for the
        policy's records stand under the generator role that follows the policy.
    rollout: who was awake in the latest rollout, where and for how long.
    account: ``Decision.account`` of the latest decision.
    directory: the run's; "" where there is none, as before the run starts.
    switch_s: seconds that a change of roles took the last time; None before the first one.
    outcomes: what earlier decisions came to, oldest first.
    state: ``Decision.state`` of the latest decision.
    starving: at a rescue, the role whose replicas all do not answer; "" otherwise.
    lost: at a rescue, device indexes of the role's replicas that do not answer; else empty.
    overlaps: whether generators draw while trainers work. Then no decision may be in mode
        "colocated": generation does not end, so no turn of the judge would come. Generators on a
        trainer's accelerator could not sleep for it, so trainers need devices of their own.
    """

    devices: tuple[Device, ...]
    slots: Mapping[str, int]
    needs: Mapping[str, Need] = field(default_factory=dict)
    step: int = 0
    needed: int = 0
    requests: Mapping[str, Requests] = field(default_factory=dict)
    rollout: Rollout = field(default_factory=Rollout)
    account: Account = field(default_factory=Account)
    directory: str = ""
    switch_s: float | None = None
    outcomes: tuple[Outcome, ...] = ()
    state: Mapping[str, Any] = field(default_factory=dict)
    starving: str = ""
    lost: Mapping[str, Sequence[int]] = field(default_factory=dict)
    overlaps: bool = False


Mode = Literal["split", "colocated", "coresident"]


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Says who is awake where in the next rollout, and why.

    partition: the cells at which each role is awake.
    engines: every cell at which a role has an engine, awake or asleep; None means the cells of
        ``partition``. Engines are made once, so the first decision's stay.
    mode: how generators share cells. "split": each cell serves one generator. "colocated": every
        cell serves the policy until all its records are there, then the judge, and both in turn
        again for a refill; not where ``Window.overlaps``. "coresident": both models are awake in
        every cell.
    chosen: the candidate that the decision takes, of those in ``predicted_s``.
    predicted_s: candidate -> predicted seconds of the rollout; empty for no prediction.
    reason: why, in one sentence.
    seen: a summary of what the policy looked at, for the journal; plain values, for JSON.
    state: what the policy gets back at the next decision; plain values, for JSON.
    account: what the policy has measured in the rollout that is over.
    """

    partition: Partition
    engines: Partition | None = None
    mode: Mode = "split"
    chosen: str = ""
    predicted_s: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    seen: Mapping[str, Any] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    account: Account = field(default_factory=Account)


class PlacementPolicy(Protocol):
    """Decides before each step which generators are awake on which devices.

    A policy that knows no other mode than "colocated" raises PlacementError where
    ``Window.overlaps``.
    """

    def revise(self, partition: Partition | None, window: Window) -> Decision:
        """Returns the decision for the next step. It must be pure.

        partition: that of the latest decision; None before the first.

        Raises PlacementError naming the role that does not fit.
        """


@runtime_checkable
class Prepares(Protocol):
    """Is a policy that has something to do once before it can decide.

    It may compile, so that no decision has to wait for that in the middle of a step, and read what
    an earlier run has measured. What it read then belongs to the policy: ``revise`` reads nothing.
    """

    def prepare(self, window: Window) -> None:
        """Does it. Called once, in the process that decides, before the run's first decision there.

        Workers load their models meanwhile. It counts neither as deciding nor as a part of a step.

        window: what the first decision will see.
        """


@runtime_checkable
class Rescues(Protocol):
    """Is a policy that can also help a judge whose replicas do not answer."""

    def rescue(self, partition: Partition, window: Window) -> Decision | None:
        """Returns who is awake from here on; None where there is no help. It must be pure.

        It is called at a step's start, or within a step when all is drawn and the policy's
        generators have nothing to do.

        partition: who was to be awake, as the latest decision says.
        """


def every_slot(window: Window) -> Partition:
    """Makes cells for every slot that roles may occupy, taking all devices in turn.

    A cell of a generator has as many devices as one replica spreads over, any other has one.
    """
    cells = {}
    turn = count()
    for role, slots in window.slots.items():
        if slots > len(window.devices):
            raise PlacementError(
                f"wants {slots} slots, but the number of devices is {len(window.devices)}",
                where=f"roles.{role}.slots",
                why="a role has at most one worker per device",
                todo="ask for fewer slots, or set cluster.devices to the number that may be used",
                role=role,
            )
        devices = [window.devices[next(turn) % len(window.devices)] for _ in range(slots)]
        need = window.needs.get(role)
        size = need.size if need is not None and need.kind == "generator" else 1
        cells[role] = tuple(Cell(tuple(devices[i : i + size])) for i in range(0, slots, size))
    return Partition(cells)


def place_evenly(partition: Partition | None, window: Window) -> Decision:
    """Decides as ``core/even`` does: roles take their slots from all devices in turn, once.

    A policy may return this decision when it has nothing better to say.
    """
    if partition is None:
        return Decision(
            partition=every_slot(window),
            reason="every role takes its slots from all devices in turn",
        )
    return Decision(partition=partition, reason="roles keep their devices")
